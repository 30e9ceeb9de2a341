"""Options: dataclass defaults, then config files (Python files of assignments), then --key=value flags. The
last value wins; an unknown key or a value of the wrong type is an error."""
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import sys
import traceback
import types
import typing
import zlib
from pathlib import Path
from typing import Annotated, NamedTuple

from runtime.usage import is_first_rank, load_package

# Options that are not inherited from the run that is resumed, which has a copy of its tokenizer
NOT_INHERITED = ("out_dir", "init_from", "resume", "overwrite", "eval_only", "tokenizer")
# Options that are paths: an empty path would be the current directory.
PATH_OPTIONS = ("out_dir", "data_dir", "out", "output", "init_from", "dataset", "teacher", "tokenizer",
                "model", "models", "runs", "paths", "run")
DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LARGEST = 2**63 - 1                  # int64, as in torch and NumPy


class BadInput(Exception):
    """An error that the user can fix. Its message is one sentence: problem and remedy. Exit code 2."""


def require(module, need):
    """Return an optional package's module; BadInput, which begins with `need`, if its import fails."""
    try:
        return load_package(module)
    except ImportError as e:
        raise BadInput(f"{need}, since {e}.") from None


class Bounds(NamedTuple):
    """The range of a number option: least <= value <= most, above < value < below."""
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def check(self, value, source):
        """Raise BadInput for a value outside. source: the flag, or the file and the name."""
        problem = None
        if value < self.least:
            problem = f"small: it must be at least {self.least}"
        elif value <= self.above:
            problem = f"small: it must be above {self.above}"
        elif value > self.most:
            problem = f"large: it must be at most {self.most}"
        elif value >= self.below:
            problem = f"large: it must be below {self.below}"
        if problem:
            raise BadInput(f"{source}={value} is too {problem}.")


# types of options; `load` checks their bounds
PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
Count = Annotated[int, Bounds(1, 10**7)]
PositiveFloat = Annotated[float, Bounds(above=0)]
NonNegativeFloat = Annotated[float, Bounds(0)]
UnitInterval = Annotated[float, Bounds(0, 1)]
Fraction = Annotated[float, Bounds(0, below=1)]


def would_overwrite(path, expected, option="--output="):
    """Return the BadInput for an output path that holds a file other than the `expected` kind."""
    return BadInput(f"{path} exists and is not {expected}: move it elsewhere, or choose another {option}.")


def load(Config, argv, frozen=(), positional=None, saved_of=None, claim=None):
    """Return a Config from `argv`, config files and flags in order. `--help` prints every option and exits.
    Any other word is a value of the option `positional`, which collects several if its type is tuple.

    init_from=resume replaces the defaults by the options of the run in out_dir, init_from=MODEL by
    saved_of(MODEL); then a different value for an option in `frozen` is an error. claim: checkpoint.claim,
    for a stage that writes to out_dir; it locks the folder before anything there is read.
    """
    given = read_arguments(Config, argv, positional)
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    if claim:
        out_dir = given.get("out_dir", defaults["out_dir"])
        if given.get("eval_only"):           # locks and changes nothing
            run = "run" if (Path(out_dir) / "config.json").exists() else "nothing"
        else:
            run = claim(out_dir)
        given = choose_start(given, run)
    values = defaults | given
    init_from = values.get("init_from", "scratch")
    if init_from == "resume" and "out_dir" not in defaults:
        raise BadInput("--init_from=resume is for train.py and grpo.py: name a model here; the same "
                       "datagen.py command resumes its --output=.")
    if init_from == "resume":
        values = resumed(Config, defaults, given, frozen, bool(claim) and not given.get("eval_only"))
    elif init_from != "scratch" and saved_of:
        values = defaults | inherited(Config, saved_of(init_from), init_from, given, frozen) | given
    return Config(**values)


def read_arguments(Config, argv, positional=None):
    """Return {option: value} of the config files and flags in argv; see load."""
    fields = Config.__dataclass_fields__
    hints = typing.get_type_hints(Config, include_extras=True)
    given = {}
    for arg in argv:
        if any("\ud800" <= c <= "\udfff" for c in arg):       # undecodable bytes
            raise BadInput(f"{ascii(arg)} is not UTF-8: encode it as UTF-8.")
        if arg in ("-h", "--help"):
            from runtime.help import help_text
            print(help_text(Path(inspect.getfile(Config)).read_text(encoding="utf-8")))
            sys.exit(0)
        elif arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            check_known(key, fields, f"--{key}")
            if not equals and bool not in choices(hints[key]):
                raise BadInput(f"--{key} needs a value: write --{key}=VALUE.")
            given[key] = parse(text if equals else "true", hints[key], f"--{key}")
        elif arg.endswith(".py"):
            for key, value in read_file(arg).items():
                check_known(key, fields, f"{arg}: {key}")
                given[key] = check_type(value, hints[key], f"{arg}: {key}")
        elif positional and hints[positional] is tuple:
            given[positional] = given.get(positional, ()) + (arg,)
        elif positional and positional not in given:
            given[positional] = arg
        else:
            from runtime.unknown import answer_to_word
            raise BadInput(answer_to_word(arg, fields))
    check_paths(given, fields)
    return given


def inherited(Config, saved, run, given, frozen):
    """Return the options that a run or model hands on, {option: value}; BadInput if `given` has another value
    for one in `frozen`."""
    for key in frozen:
        if key in given and key in saved and given[key] != saved[key]:
            raise BadInput(f"{key}={given[key]} contradicts {run}, which has {key}={saved[key]}: leave "
                           "it out, or start from scratch.")
    hints = typing.get_type_hints(Config, include_extras=True)
    return {key: check_type(saved[key], hints[key], f"{Path(run) / 'config.json'}: {key}")
            for key in Config.__dataclass_fields__ if key in saved and key not in NOT_INHERITED}


def resumed(Config, defaults, given, frozen, may_restart):
    """Return all values for a resume of the run in out_dir. may_restart: a run without a checkpoint starts
    again."""
    run = given.get("out_dir", defaults["out_dir"])
    saved = read_saved(run)
    # An option that the run did not have yet had its default's effect.
    values = defaults | inherited(Config, {key: defaults[key] for key in frozen} | saved, run, given, frozen)
    given = {key: value for key, value in given.items() if (key, value) != ("learning_rate", None)}
    values |= given                          # learning_rate=None is the rate that the run chose
    if may_restart and not any((Path(run) / "checkpoints").glob("step_*")):
        values |= {"init_from": restart_from(run, saved), "tokenizer": saved.get("tokenizer"),
                   "overwrite": True} | {key: given[key] for key in given if key != "init_from"}
    return values


def choose_start(given, run):
    """Return the flags that apply. run: the result of checkpoint.claim for out_dir."""
    if run == "restarted":                   # all options are in the run folder
        return {"init_from": "resume"} | {key: given[key] for key in given if key == "out_dir"}
    for name, value in (("resume", "auto"), ("init_from", "resume")):
        if given.get(name) == value and given.get("overwrite"):
            raise BadInput(f"--{name}={value} resumes the run that --overwrite would replace: leave one of "
                           "them out.")
    if given.get("resume") != "auto":
        return given
    if given.get("eval_only") and run == "nothing":
        raise BadInput("--eval_only --resume=auto finds no run to evaluate: give its --out_dir=.")
    return given | {"init_from": "resume"} if run == "run" else given


def restart_from(run, saved):
    """Return the original init_from of a run that stopped before its first checkpoint."""
    if saved.get("init_from", "resume") == "resume":
        raise BadInput(f"{run} has no checkpoint to resume from: restore one, or start a new run.")
    if is_first_rank():
        print(f"The run in {run} has no checkpoint yet: it restarts as its config.json says.", flush=True)
    return saved["init_from"]


def check_paths(given, fields):
    """Raise BadInput for an empty path, which is usually an unset shell variable."""
    for name in PATH_OPTIONS:
        paths = given.get(name)
        for path in paths if isinstance(paths, tuple) else [paths]:
            if isinstance(path, str) and not path.strip() and path != fields[name].default:
                raise BadInput(f"--{name} is empty (is a variable not set?): give a path, or leave it out.")
            if isinstance(path, str) and (path == "~" or path.startswith("~/")):
                raise BadInput(f"--{name}={path} begins with ~, which no shell expands there: write $HOME.")


def read_saved(out_dir):
    """Return the resolved config of the run in out_dir, a dictionary."""
    path = Path(out_dir) / "config.json"
    if not path.is_file():
        raise BadInput(f"{out_dir} is not a run folder (it has no config.json): give the out_dir of a run.")
    try:
        return read_sealed(path, "restore it, or start a new run")
    except BadInput as e:
        for meta in sorted(Path(out_dir).glob("checkpoints/step_*/meta.json"), reverse=True):
            with contextlib.suppress(BadInput):
                saved = read_sealed(meta, "").get("config")
                if isinstance(saved, dict):
                    if is_first_rank():
                        print(f"{path} is damaged: using the options in {meta}.", flush=True)
                    return saved
        raise e


def seal(content):
    """Return a dictionary as the bytes of a JSON file with a checksum."""
    return json.dumps(content | {"checksum": checksum(content)}, indent=1).encode()


def read_sealed(path, advice):
    """Return the dictionary of a file that `seal` wrote; BadInput, which ends with `advice`, if it is
    damaged."""
    content = read_json(path, advice)
    if content.pop("checksum", None) != checksum(content):
        raise BadInput(f"{path} is damaged (it fails its checksum): {advice}.")
    return content


def checksum(content):
    """Return the CRC-32 of a dictionary as eight hexadecimal digits, independent of the order of its keys."""
    return f"{zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()):08x}"


def read_json(path, advice):
    """Return the object in a JSON file; BadInput, which ends with `advice`, if there is none."""
    try:
        return parse_json(Path(path).read_bytes(), dict)
    except (OSError, ValueError) as e:
        raise BadInput(f"{path} can't be read ({getattr(e, 'strerror', None) or e}): {advice}.") from None


def parse_json(text, kind=object):
    """Return the value of JSON text or bytes. ValueError if it is not JSON, nested too deeply, or not a
    `kind`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not readable JSON: {e}") from None
    if not isinstance(content, kind):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def read_file(path):
    """Return the assignments of a config file, without modules and names that begin with an underscore."""
    if not Path(path).is_file():
        raise BadInput(f"There is no config file {path}: check the path.")
    names = {"__file__": path}
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), names)
    except KeyboardInterrupt:
        raise
    except BaseException as e:               # also SystemExit: it is no end of the run
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        where = f" at line {lines[-1] if lines else e.lineno}" if lines or isinstance(e, SyntaxError) else ""
        raise BadInput(f"{path} failed{where}: {type(e).__name__}: {e}") from None
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def check_known(key, fields, source):
    """Raise BadInput for a key that is no field. source: the flag, or the file and the name."""
    if key not in fields:
        from runtime.unknown import answer_to_option
        raise BadInput(answer_to_option(key, source, fields))


def choices(hint):
    """Return the types or literal values that a field's annotation admits."""
    if typing.get_origin(hint) is Annotated:
        return [hint.__origin__]
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [c for part in typing.get_args(hint) for c in choices(part)]
    return [hint]


def check_bounds(value, hint, source):
    """Raise BadInput for a number outside the Bounds in a field's annotation."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is Annotated and type(value) is part.__origin__:
            part.__metadata__[0].check(value, source)


def parse(text, hint, source):
    """Return the value of a flag's text: None, a bool, an integer (2e4 too), a float, or the text."""
    options = choices(hint)
    if hint is tuple:
        return tuple(text.split(","))
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    if bool in options and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    if int in options or float in options:
        for number in (int, float):
            try:
                value = number(text)
            except ValueError:
                continue
            whole = number is float and int in options and value.is_integer()
            return check_type(int(value) if whole else value, hint, source)
    return check_type(text, hint, source)


def check_type(value, hint, source):
    """Return the value, converted where its annotation asks for it; BadInput if it has another type."""
    options = choices(hint)
    if isinstance(value, str) and DTYPE_ALIASES.get(value) in options:
        value = DTYPE_ALIASES[value]
    if type(value) is int and abs(value) > LARGEST:
        raise BadInput(f"{source} is too large: a whole number is at most 2**63 - 1.")
    if type(value) is int and float in options:
        value = float(value)
    if type(value) is int and str(value) in options:         # such as confidence = 99 in a config file
        value = str(value)
    if type(value) is list and tuple in options:
        value = tuple(value)
    known = type(value) in options or any(isinstance(o, str) and value == o for o in options)
    if known and not (type(value) is float and not math.isfinite(value)):
        check_bounds(value, hint, source)
        return value
    wanted = [o if isinstance(o, str) else "None" if o is type(None) else
              {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list",
               tuple: "a list", dict: "an object"}[o] for o in options]
    near = difflib.get_close_matches(str(value), [o for o in options if isinstance(o, str)], n=1)
    raise BadInput(f"{source}={str(value)[:80]} should be "
                   f"{', '.join(wanted[:-1]) + ' or ' if wanted[1:] else ''}{wanted[-1]}"
                   f"{f'; did you mean {near[0]}?' if near else '.'}")
