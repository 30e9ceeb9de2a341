"""Knobs: dataclass defaults, then config files (Python files of assignments), then --key=value flags; the
last one wins.

A key that no dataclass field has is an error, from a file as from a flag, and so is a value of the wrong
type.
"""
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

from runtime.usage import help_text, is_first_rank


# not taken over from the run that is resumed
OF_THIS_CALL = ("out_dir", "init_from", "resume", "overwrite", "eval_only")
# Knobs that are paths: an empty one would be the current directory.
PATHS = "out_dir data_dir output init_from dataset tokenizer model models runs paths run".split()
PYTORCH = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}       # names that a dtype may have too
LARGEST = 2**63 - 1                  # whole number, as torch and NumPy hold them


class BadInput(Exception):
    """Something the user can mend. The message is one sentence: what is wrong and what to do. Exit code 2."""


def in_the_way(path, whose, knob="--output="):
    """The BadInput for a file where one is to be written that would replace one of ours alone."""
    return BadInput(f"{path} is there and not {whose}: move it elsewhere, or choose another {knob}.")


def load(Config, argv, frozen=(), positional=None, saved_of=None, claim=None):
    """Config instance from `argv` (config files and flags, in order). `--help` prints every knob and exits. A
    word that is neither is the value of the knob named by `positional`, if there is one; of several, if its
    type is tuple.

    With init_from=resume the values of the run in out_dir stand in for the defaults, and with init_from=MODEL
    those that saved_of(MODEL), if there is one, gives; a knob in `frozen` that is given another value then is
    an error. claim: of a stage that writes into out_dir, runtime.run.claim; it is called before anything
    there is read.
    """
    fields = {f.name: f for f in dataclasses.fields(Config)}
    hints = typing.get_type_hints(Config)
    given = {}
    for arg in argv:
        # bytes that Python could not decode, and can't print
        if any("\ud800" <= c <= "\udfff" for c in arg):
            raise BadInput(f"{ascii(arg)} is not UTF-8: write it in UTF-8.")
        if arg in ("-h", "--help"):
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
            raise BadInput(f"'{arg}' is neither a config file (ending in .py) nor a flag of the form "
                           "--key=value.")
    check_paths(given, fields)

    values = {name: f.default for name, f in fields.items()}
    if claim and not given.get("eval_only"):
        given = choose_start(given, claim(given.get("out_dir", values["out_dir"])))
    init_from = given.get("init_from", values.get("init_from", "scratch"))
    if init_from != "scratch" and (init_from == "resume" or saved_of):
        run = given.get("out_dir", values["out_dir"]) if init_from == "resume" else init_from
        saved = read_saved(run) if init_from == "resume" else saved_of(run)
        for key in frozen:
            if key in given and key in saved and given[key] != saved[key]:
                raise BadInput(f"{key}={given[key]} can't go on from {run}, which has {key}={saved[key]}; "
                               "leave it out, or start from scratch.")
        values |= {key: check_type(saved[key], hints[key], f"{Path(run) / 'config.json'}: {key}")
                   for key in fields if key in saved and key not in OF_THIS_CALL}
        if init_from == "resume" and claim and not any((Path(run) / "checkpoints").glob("step_*")):
            values |= {"init_from": begin_again(run, saved), "overwrite": True}
            given.pop("init_from")
    return Config(**(values | given))


def choose_start(given, found):
    """Return the flags that count, after what runtime.run.claim found in out_dir."""
    if found == "restarted":                 # all knobs are in the run folder
        return {"init_from": "resume"} | {key: given[key] for key in given if key == "out_dir"}
    if given.get("resume") != "auto":
        return given
    if given.get("overwrite"):
        raise BadInput("--resume=auto goes on with the run that --overwrite would replace: leave one of them out.")
    return given | {"init_from": "resume"} if found == "run" else given


def begin_again(run, saved):
    """Return what a run began from that was stopped before its first checkpoint, and so begins again."""
    if saved.get("init_from", "resume") == "resume":
        raise BadInput(f"{run} has no checkpoint to go on from: put one back, or start a new run.")
    if is_first_rank():
        print(f"The run in {run} has no checkpoint yet, so it begins again, as its config.json says.", flush=True)
    return saved["init_from"]


def check_paths(given, fields):
    """BadInput if a path that was given is an empty text, as a shell makes of a variable that is not set."""
    for name in PATHS:
        paths = given.get(name)
        for path in paths if isinstance(paths, tuple) else [paths]:
            if isinstance(path, str) and not path.strip() and path != fields[name].default:
                raise BadInput(f"--{name} is empty (is a variable not set?): give a path, or leave it out.")


def read_saved(out_dir):
    """The resolved config of the run in out_dir, as a dictionary."""
    path = Path(out_dir) / "config.json"
    if not path.is_file():
        raise BadInput(f"{out_dir} is not the folder of a run (it has no config.json): give the out_dir of "
                       "one.")
    try:
        return read_sealed(path, "restore it, or start a new run")
    except BadInput as e:
        for meta in sorted(Path(out_dir).glob("checkpoints/step_*/meta.json"), reverse=True):
            with contextlib.suppress(BadInput):
                saved = read_sealed(meta, "").get("config")
                if isinstance(saved, dict):
                    if is_first_rank():
                        print(f"{path} is damaged; what {meta} says of the knobs counts.", flush=True)
                    return saved
        raise e


def seal(content):
    """Return a dictionary as the bytes of a JSON file that tells whether it is as it was written."""
    return json.dumps(content | {"checksum": checksum(content)}, indent=1).encode()


def read_sealed(path, advice):
    """Return the dictionary of a file that `seal` wrote, or of one from before there was a checksum.
    BadInput, which ends with the advice, if it is not as it was written."""
    content = read_json(path, advice)
    expected = content.pop("checksum", None)
    if expected not in (None, checksum(content)):
        raise BadInput(f"{path} is not as it was written (it fails its checksum): {advice}.")
    return content


def checksum(content):
    """Return the CRC-32 of a dictionary, whatever the order of its keys, as eight hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def read_json(path, advice):
    """The object that a JSON file holds; BadInput, which ends with the advice, if it can't be read or holds
    none."""
    try:
        return parse_json(Path(path).read_bytes(), dict)
    except (OSError, ValueError) as e:
        raise BadInput(f"{path} can't be read ({getattr(e, 'strerror', None) or e}): {advice}.") from None


def parse_json(text, kind=object):
    """What a JSON text, or its bytes, stands for; ValueError if it is none, nested too deep to be read, or no
    `kind`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not readable JSON: {e}") from None
    if not isinstance(content, kind):
        raise ValueError(f"it holds a {type(content).__name__}, and no object")
    return content


def read_file(path):
    """The assignments of a config file, without modules and names that begin with an underscore."""
    if not Path(path).is_file():
        raise BadInput(f"There is no config file {path}.")
    names = {"__file__": path}
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), names)
    except Exception as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        where = f" at line {lines[-1] if lines else e.lineno}" if lines or isinstance(e, SyntaxError) else ""
        raise BadInput(f"{path} failed{where}: {type(e).__name__}: {e}") from None
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def check_known(key, fields, what):
    if key not in fields:
        near = difflib.get_close_matches(key.replace("-", "_"), fields, n=1)
        raise BadInput(f"{what} is not a "
                       f"knob{f'; did you mean {near[0]}?' if near else '; --help lists them all.'}")


def choices(hint):
    """The types or literal values that a field's annotation admits."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [c for part in typing.get_args(hint) for c in choices(part)]
    return [hint]


def parse(text, hint, what):
    """The value that a flag's text stands for: None, true/false, a whole number (2e4 too), a number, or the
    text."""
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
            return check_type(int(value) if whole else value, hint, what)
    return check_type(text, hint, what)


def check_type(value, hint, what):
    options = choices(hint)
    if isinstance(value, str) and PYTORCH.get(value) in options:
        value = PYTORCH[value]
    kind = type(value)
    if kind is int and abs(value) > LARGEST:
        raise BadInput(f"{what} is too large: a whole number is at most 2**63 - 1.")
    if any(value is o or (isinstance(o, str) and value == o) for o in options) or kind in options:
        if not (kind is float and not math.isfinite(value)):
            return value
    if value is None and type(None) in options:
        return None
    if kind is int and float in options:
        return float(value)
    wanted = [o if isinstance(o, str) else "None" if o is type(None) else
              {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list",
               dict: "an object"}[o] for o in options]
    near = difflib.get_close_matches(str(value), [o for o in options if isinstance(o, str)], n=1)
    raise BadInput(f"{what}={str(value)[:80]} should be "
                   f"{', '.join(wanted[:-1]) + ' or ' if wanted[1:] else ''}{wanted[-1]}"
                   f"{f'; did you mean {near[0]}?' if near else '.'}")


def at_least(cfg, least, names):
    """BadInput if one of the named knobs (None and "auto" aside) is smaller than `least`."""
    for name in names.split():
        value = getattr(cfg, name)
        if value not in (None, "auto") and value < least:
            raise BadInput(f"--{name}={value} is too small: it must be at least {least}.")


def at_most(cfg, most, names):
    """BadInput if one of the named knobs (None and "auto" aside) is larger than `most`."""
    for name in names.split():
        value = getattr(cfg, name)
        if value not in (None, "auto") and value > most:
            raise BadInput(f"--{name}={value} is too large: it must be at most {most}.")


def below(cfg, limit, names):
    """BadInput if one of the named knobs is not smaller than `limit`."""
    for name in names.split():
        if getattr(cfg, name) >= limit:
            raise BadInput(f"--{name}={getattr(cfg, name)} is too large: it must be below {limit}.")


def check_sampling(cfg):
    """BadInput for knobs of sample.py, eval.py and datagen.py that can't be sampled with."""
    at_least(cfg, 1, "max_new_tokens top_k")
    at_least(cfg, 0, "temperature seed min_p")
    at_most(cfg, 1, "top_p min_p")


def check_questions(cfg):
    """BadInput for what eval.py, datagen.py and grpo.py can't have of a task, before one draws questions for
    minutes."""
    at_least(cfg, 1, "num_questions reward_workers")
    at_least(cfg, 0, "few_shot")
    at_most(cfg, 10**7, "num_questions")
    at_most(cfg, 1000, "few_shot")
    at_most(cfg, 256, "reward_workers")
