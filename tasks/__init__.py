"""Tasks: questions, worked examples and a verifier each, one file per task. Modules whose names begin with an
underscore are shared. Tasks import only the standard library, their field's library and light modules of
runtime/, so that reward workers start fast. A user's task file may import its neighbours, except those named
like one of our modules. "+" between specs makes a mixture, see _mixture.py.

A task is a module of plain functions. Only reward is required; a function that has a parameter `argument`
gets the ARGUMENT of the spec.

    reward(question, completion)   score from 0 to 1 (1: correct), (score, {part name: bool}), or with figures
                                   to watch (score, {part name: bool}, {figure name: number}); a parameter
                                   `turns` gets the model's and the environment's texts of an episode in turn,
                                   and [completion] without respond
    questions(split, seed, n)      list of n distinct {"question": str, "answer": str, ...}, None: all or a
                                   default number; the splits train, valid and test share no question
    solution(question)             correct worked completion
    documents(split, seed)         texts for pretraining, split "train" or "valid", with questions in the form
                                   PROMPT ("Question: {}\\n")
    examples(n)                    n fixed (question's text, completion) of split train, for few-shot prompts
    signature(completion)          text that is equal for two completions with the same solution
    check(argument)                raises ValueError or OSError for an invalid argument
    respond(question, text)        the text that an environment puts behind an episode's text so far, when the
                                   model ends a turn; None ends the episode
    PROMPT, INSTRUCTION, STOP, TURN_STOP, MAX_TURNS      see Task
"""
import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from runtime.progress import ProgressLine

PROMPT = "Question: {}\n"
SPLITS = ("train", "valid", "test")
# {task: module}; a "_" is appended to modules that would hide one of the standard library
MODULES = {name.removesuffix("_"): name for _, name, _ in pkgutil.iter_modules(__path__) if name[0] != "_"}
NAMES = list(MODULES)
MOST_REPLY = 10_000                       # characters of an environment's text
RESERVED = "is a name that tasks/__init__.py reserves"
USER_FILE = r"(?s)(.+?\.py)(?::(.*))?"    # path, argument


class NotAScore(ValueError):
    """A reward returned something other than a number in [0, 1]. score: the number, or NaN."""

    def __init__(self, sentence, score):
        super().__init__(sentence)
        self.score = score


def user_files(spec):
    """Return the paths of the .py files that `load` would execute."""
    found = [re.fullmatch(USER_FILE, part) for part in parts_of(spec) if part.partition(":")[0] not in NAMES]
    return [match[1] for match in found if match]


def parts_of(spec):
    """Return the tasks in a spec as {spec: weight}. A path or its argument may contain "+" and "@"."""
    match = re.fullmatch(USER_FILE, spec)
    if match and Path(match[1]).is_file() and not all(is_known(name) for name in spec.split("+")):
        return {spec: 1}
    if "+" not in spec and "@" not in spec:
        return {spec: 1}
    from tasks import _mixture
    return _mixture.parse(spec)


def is_known(spec):
    from tasks._mixture import WEIGHT
    name = WEIGHT.fullmatch(spec)
    match = name and re.fullmatch(USER_FILE, name[1])
    return bool(name) and (name[1].partition(":")[0] in NAMES or bool(match) and Path(match[1]).is_file())


def spec_of(task):
    """Return the spec of a config's task, which may be {spec: weight}."""
    if not isinstance(task, dict):
        return task
    parts = []
    for name, weight in task.items():
        small = isinstance(weight, float) and "e" in str(weight)         # a spec can't contain an exponent
        parts.append(f"{name}@{weight:.12f}" if small else f"{name}@{weight}")
    return "+".join(parts)


def next_task(weights, counts):
    """Return the name of {name: weight} whose turn is next, after counts {name: turns so far}.

    Earliest deadline first among the tasks behind their share; ties go to the first task. No task is ever
    more than one turn off its share."""
    total = sum(counts.get(name, 0) for name in weights) + 1
    everything = sum(weights.values())
    behind = [name for name in weights if weights[name] * total > counts.get(name, 0) * everything]
    return min(behind, key=lambda name: (counts.get(name, 0) + 1) / weights[name])


def load(spec):
    """Return the Task of NAME[:ARGUMENT] or path/to/file.py[:ARGUMENT], or the Mixture of several. Raises
    LookupError, ValueError or OSError with a one-sentence message."""
    parts = parts_of(spec)
    if list(parts) != [spec]:
        from tasks import _mixture
        return _mixture.Mixture(spec, {name: load_one(name) for name in parts})
    return load_one(spec)


def load_one(spec):
    name, colon, argument = spec.partition(":")
    if name in NAMES:
        file = f"{Path(__file__).with_name(MODULES[name])}.py"
        with load_errors(file, file):
            module = importlib.import_module(f"tasks.{MODULES[name]}")
        return Task(spec, module, argument if colon else None)
    match = re.fullmatch(USER_FILE, spec)
    if not match:
        raise LookupError(f"There is no task {name}: choose {', '.join(NAMES)}, or the path of a .py file.")
    file, argument = match.groups()
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no file {file}: a task is a name or the path of a .py file with a "
                                "function reward.")
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)                        # last, so that its neighbours hide none of our modules
    found = importlib.util.spec_from_file_location(module_name(Path(file).resolve()), file)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module                     # needed by dataclasses and pickle
    with load_errors(file, module.__file__):             # cached bytecode may be of an edit a second ago
        exec(compile(Path(file).read_bytes(), module.__file__, "exec"), vars(module))
    return Task(spec, module, argument)


@contextlib.contextmanager
def load_errors(file, origin):
    """Turn an exception of a task's import into a ValueError with its line. origin: the module's __file__."""
    try:
        yield
    except (Exception, SystemExit) as e:
        raise ValueError(f"The task {file} can't be loaded ({describe_error(e, origin)}): correct it.") from e


def module_name(path):
    """Return the name under which a file can be imported, so that any process can unpickle its functions. If
    another module has that name, return one made of the path, known only to this process and its forks."""
    try:
        known = importlib.util.find_spec(path.stem)
        if known and known.origin and Path(known.origin).resolve() == path:
            return path.stem
    except (ImportError, ValueError):                    # a dot in the name, or a module without a spec
        pass
    return re.sub(r"\W", "_", str(path))


def files_of(file):
    """Return a task's file and the neighbours and tasks that it imports, recursively; of a package, all
    files."""
    found = [Path(file)]
    for file in found:
        with contextlib.suppress(SyntaxError, OSError):      # in a neighbour that may never be imported
            for node in ast.walk(ast.parse(file.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                    if node.module == "tasks":
                        names = [f"tasks.{alias.name}" for alias in node.names]
                for name in names:
                    near = found[0].parent / name.partition(".")[0]
                    task = name.removeprefix("tasks.")
                    if task != name and task in MODULES.values():
                        near = Path(__file__).parent / task
                    files = [near.with_suffix(".py"), *sorted(near.rglob("*.py"))]
                    found += [other for other in files if other.is_file() and other not in found]
    return found


def describe_error(error, file=None):
    """Return an exception as one short printable line, with the last line of `file` in its traceback."""
    line = " ".join(f"{type(error).__name__}: {str(error)[:300]}".split()).removesuffix(":")
    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line += f", line {places[-1]} of {Path(file).name}" if places else ""
    return line.encode(errors="backslashreplace").decode()


def can_be_json(value):
    try:
        return bool(json.dumps(value))
    except (TypeError, ValueError):
        return False


class Task:
    """A task's module with its argument.

    name: the spec. prompt: form of a plain prompt. instruction: system message for a chat model. stop: text
    that ends a completion. turn_stop: text that ends a turn, for respond; a stop token does too. max_turns:
    of the model, at most."""

    def __init__(self, name, module, argument=None):
        self.name = name
        self.module = module
        self.argument = argument
        self.prompt = getattr(module, "PROMPT", PROMPT)
        self.stop = getattr(module, "STOP", "</answer>")
        self.instruction = getattr(module, "INSTRUCTION", "")
        if not callable(getattr(module, "reward", None)):
            raise ValueError(f"The task {name} has no reward(question, completion): write one.")
        if hasattr(module, "check"):
            self.sentence("check", module.check, argument)
        elif argument is not None:
            functions = [value for value in vars(module).values() if inspect.isfunction(value)]
            if not any(self.takes(function, "argument") for function in functions):
                raise ValueError(f"No function of the task {name} takes an argument: leave :{argument} out.")
        self.turn_stop = getattr(module, "TURN_STOP", None)
        self.max_turns = getattr(module, "MAX_TURNS", 8)
        self.responds = callable(getattr(module, "respond", None))
        if self.responds:
            self.must_take("respond(question, text)", self.call("respond"), {}, "")
        if type(self.max_turns) is not int or self.max_turns < 1:
            raise ValueError(f"MAX_TURNS of the task {name} is {str(self.max_turns)[:80]}: MAX_TURNS "
                             f"{RESERVED} for a positive number of turns, so correct it, or rename yours.")
        self.domains = []                                # the tasks of a Mixture
        self.weights = {name: 1}
        self.score = self.call("reward")
        self.takes_turns = self.takes(self.score, "turns")
        turns = {"turns": []} if self.takes_turns else {}
        self.must_take("reward(question, completion)", self.score, {}, "", **turns)
        if hasattr(module, "signature"):
            self.must_take("signature(completion)", self.call("signature"), "")
        texts = {"PROMPT": self.prompt, "STOP": self.stop or "", "INSTRUCTION": self.instruction or "",
                 "TURN_STOP": self.turn_stop or ""}
        for hook, text in texts.items():
            if not isinstance(text, str) or hook == "PROMPT" and "{}" not in text:
                raise ValueError(f"{hook} of the task {name} is {str(text)[:80]!r}: {hook} {RESERVED} for a "
                                 f"text{' with {} for the question' * (hook == 'PROMPT')}, so rename yours.")

    @property
    def files(self):
        return files_of(self.module.__file__)

    def of(self, question):
        """Return the Task of a question, as Mixture.of does."""
        return self

    def must_take(self, form, function, *given, **options):
        """Raise ValueError unless a function can be called with these arguments."""
        try:
            inspect.signature(function).bind(*given, **options)
        except TypeError as e:
            name = form.partition("(")[0]
            raise ValueError(f"The {name} of the task {self.name} can't be called as {form} ({e}): {name}() "
                             f"{RESERVED}, so change its parameters, or rename yours.") from None
        except ValueError:                               # some built-in functions have no signature
            pass

    def takes(self, function, keyword):
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            return False
        return any(p.name == keyword or p.kind == p.VAR_KEYWORD for p in parameters)

    def call(self, function, **options):
        """Return the module's function, bound to the argument and to the options that it accepts."""
        found = getattr(self.module, function, None)
        if not callable(found):
            raise ValueError(f"The task {self.name} has no {function}: write a function {function} in its "
                             "file, where nothing else may have that name, or use another task.")
        options |= {"argument": self.argument}
        return partial(found, **{key: value for key, value in options.items() if self.takes(found, key)})

    def sentence(self, name, function, *given):
        """Call a function of the module. If it fails, raise ValueError with its line; a ValueError or OSError
        of a task in tasks/ has a sentence of its own."""
        try:
            return function(*given)
        except (Exception, SystemExit) as e:
            if isinstance(e, ValueError | OSError) and self.module.__name__.startswith("tasks."):
                raise
            reason = describe_error(e, self.module.__file__)
            raise ValueError(f"{name}() of the task {self.name} failed ({reason}): {name}() {RESERVED}, so "
                             "correct it, or rename yours.") from e

    def ask(self, kind, name, *given, **options):
        """Return the list or str (kind) from the module's function; see `sentence` for errors."""
        function = self.call(name, **options)

        def answer():
            found = function(*given)
            if kind is list and isinstance(found, Iterable) and not isinstance(found, str):
                found = list(found)                      # a generator runs here
            if not isinstance(found, kind):
                raise TypeError(f"it returned {str(found)[:80]} and no {kind.__name__}")
            return found
        return self.sentence(name, answer)

    def documents(self, split, seed=0):
        """Return texts for pretraining, of split "train" or "valid"."""
        if split not in SPLITS[:2]:
            raise ValueError(f"The text of the task {self.name} has no split {split}: choose train or valid.")
        with ProgressLine(f"generating {split} text of {self.name}"):
            found = self.ask(list, "documents", split, seed=seed)
        for text in found:
            if not isinstance(text, str):
                raise ValueError(f"The task {self.name} returned the document {str(text)[:80]}: return "
                                 "texts.")
        return found

    def questions(self, split, seed=0, n=None, fewer=False):
        """Return n distinct questions of a split, determined by (split, seed); None: all, or the task's
        default number. fewer: accept fewer than n if the split has no more."""
        if split not in SPLITS:
            raise ValueError(f"The task {self.name} has no split {split}: choose train, valid or test.")
        with ProgressLine(f"getting {split} questions of {self.name}"):
            try:
                found = self.ask(list, "questions", split, seed=seed, n=n)
            except ValueError as e:                      # tasks may refuse an n that is too large
                if not fewer or n is None:
                    raise
                found = self.ask(list, "questions", split, seed=seed, n=getattr(e, "most", None))
        for q in found:
            if not isinstance(q, dict) or not isinstance(q.get("question"), str) or "answer" not in q \
                    or not can_be_json(q):
                raise ValueError(f"The task {self.name} returned the question {str(q)[:80]}: a question is "
                                 '{"question": text, "answer": text} with any other JSON values.')
        if n is not None and len(found) < n and not fewer:
            raise ValueError(f"{n} questions of {self.name} were asked for, and the split {split} has "
                             f"{len(found)}.")
        return found[:n]

    def solution(self, question):
        return self.ask(str, "solution", question)

    def examples(self, n):
        """Return n fixed (question's text, completion) of split train: the task's examples(), else the first
        questions whose solutions its verifier accepts."""
        if n == 0:
            return []
        if hasattr(self.module, "examples"):
            found = self.ask(list, "examples", n)
            for pair in found:
                if not isinstance(pair, tuple | list) or [type(text) for text in pair] != [str, str]:
                    raise ValueError(f"The task {self.name} returned the example {str(pair)[:80]}: an "
                                     "example is (question's text, completion).")
        else:
            worked = ((q, self.solution(q)) for q in self.questions("train"))
            graded = ((q, s, self.sentence("reward", self.reward, q, s)) for q, s in worked)
            found = list(islice(((q["question"], s) for q, s, grade in graded if self.verified(*grade)), n))
        if len(found) < n:
            raise ValueError(f"{n} worked examples of {self.name} were asked for, and it has {len(found)}.")
        return found[:n]

    def cut(self, completion):
        """Return a completion up to its first stop, inclusive."""
        return "".join(completion.partition(self.stop)[:2]) if self.stop else completion

    def cut_turn(self, text):
        """Return a model's turn up to its first TURN_STOP, inclusive."""
        return "".join(text.partition(self.turn_stop)[:2]) if self.turn_stop else text

    def signature(self, completion):
        """Return a text that is equal for equal solutions: the task's signature(), else the equations."""
        if hasattr(self.module, "signature"):
            return self.ask(str, "signature", completion)
        from tasks import _equations
        return _equations.signature(completion)

    def reward(self, question, completion, turns=None):
        """Return (score, {part name: bool}), see `graded`."""
        return self.graded(question, completion, turns)[:2]

    def graded(self, question, completion, turns=None):
        """Return (score, {part name: bool}, {figure name: float}); NotAScore if the score is not in [0, 1].
        turns: an episode's texts, the model's and the environment's in turn; None: the completion alone."""
        options = {"turns": list(turns or [completion])} if self.takes_turns else {}
        result = self.score(question, completion, **options)
        score = result
        parts = None
        figures = {}
        is_tuple = isinstance(result, tuple) and 2 <= len(result) <= 3
        if is_tuple and all(isinstance(x, dict) for x in result[1:]):
            score, parts, *more = result
            figures = more[0] if more else {}
        try:
            score = float(score)
        except (TypeError, ValueError):
            score = float("nan")
        if not 0 <= score <= 1:
            raise NotAScore(f"The task {self.name} returned the score {str(result)[:80]}: a score is a "
                            "number from 0 to 1.", score)
        parts = {"correct": score == 1} if parts is None else parts
        parts = {name: bool(value) for name, value in parts.items()}
        figures = {name: float(value) for name, value in figures.items()}
        if not all(map(math.isfinite, figures.values())):
            raise ValueError(f"its figures are not all finite: {str(figures)[:80]}")
        return score, parts, figures

    def respond(self, question, text):
        """Return the environment's text behind an episode's text so far, without lone surrogates, or None at
        its end. TypeError or ValueError for anything else, or for more than MOST_REPLY characters."""
        reply = self.call("respond")(question, text)
        if reply is None:
            return None
        if not isinstance(reply, str):
            raise TypeError(f"it returned {str(reply)[:80]}: return a text, or None to end the episode")
        if not 0 < len(reply) <= MOST_REPLY:
            raise ValueError(f"it returned {len(reply):,} characters: return a text of 1 to {MOST_REPLY:,}, "
                             "or None to end the episode")
        return reply.encode(errors="replace").decode()

    @staticmethod
    def verified(score, parts):
        """Return whether a completion may be trained on: the score is 1 and every part is true."""
        return score == 1 and all(parts.values())
