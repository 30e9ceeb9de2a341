"""Tasks: questions, worked examples, and a verifier each. One file per task; nothing here imports more than the standard library and
the task's field library (and runtime/progress.py, which does so too), so that reward workers start at once. Files that begin with an
underscore are what tasks share.
A file of the user's may import its neighbours; a name that a module of ours has too is ours.

Several with "+" between them are a mixture, see _mixture.py.

A task is a module with plain functions. Only `reward` must be there; those that need it take the spec's ARGUMENT as `argument`.

    reward(question, completion)            a score from 0 to 1 (1: correct), or (score, {part name: bool})
    questions(split, seed, n)               a list of n different {"question": str, "answer": str, ...}, None: all or a default number;
                                            of split "train", "valid" or "test", no two of which share a question
    solution(question)                      a worked and true completion for one of its questions
    documents(split, seed)                  texts to pretrain on, for split "train" or "valid"; a question in
                                            it has the form that it is asked in, PROMPT ("Question: {}\\n")
    examples(n)                             n fixed (question's text, completion) of split train, to be shown before a question
    signature(completion)                   a text that two completions share if they are the same solution
    check(argument)                         ValueError, OSError if the task can't be had with this argument
    PROMPT, INSTRUCTION, STOP               see Task
"""
import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from runtime.progress import ProgressLine
from tasks import _equations, _mixture
from tasks._mixture import next_task

PROMPT = "Question: {}\n"
SPLITS = ("train", "valid", "test")
# {task: module}; a module that would hide one of the standard library's ends in "_"
MODULES = {name.removesuffix("_"): name for _, name, _ in pkgutil.iter_modules(__path__) if name[0] != "_"}
NAMES = list(MODULES)
RESERVED = "is a name that tasks/__init__.py reserves"
OWN = r"(?s)(.+?\.py)(?::(.*))?"


class NotAScore(ValueError):
    """A reward returned no number in [0, 1]. score: the number, NaN if it is none."""

    def __init__(self, sentence, score):
        super().__init__(sentence)
        self.score = score


def user_files(spec):
    """Give the paths of the .py files that `load` would execute."""
    found = [re.fullmatch(OWN, part) for part in parts_of(spec) if part.partition(":")[0] not in NAMES]
    return [own[1] for own in found if own]


def parts_of(spec):
    """Give the tasks that a spec names, as {spec: weight}: several with "+" between them are a mixture, see
    _mixture.py. A path, or what stands behind its colon, may have a "+" or "@" of its own."""
    own = re.fullmatch(OWN, spec)
    if own and Path(own[1]).is_file() and not all(is_known(name) for name in spec.split("+")):
        return {spec: 1}
    return _mixture.parse(spec) if "+" in spec or "@" in spec else {spec: 1}


def is_known(spec):
    name = _mixture.WEIGHT.fullmatch(spec)
    own = name and re.fullmatch(OWN, name[1])
    return bool(name) and (name[1].partition(":")[0] in NAMES or bool(own) and Path(own[1]).is_file())


def spec_of(task):
    """Give the spec of a config file's task, which may be {spec: weight}."""
    if not isinstance(task, dict):
        return task
    parts = []
    for name, weight in task.items():
        small = isinstance(weight, float) and "e" in str(weight)         # no exponent can stand in a spec
        parts.append(f"{name}@{weight:.12f}" if small else f"{name}@{weight}")
    return "+".join(parts)


def load(spec):
    """The Task of NAME[:ARGUMENT] or path/to/file.py[:ARGUMENT], or the Mixture of several; LookupError,
    ValueError or OSError, one sentence, if none."""
    parts = parts_of(spec)
    if list(parts) != [spec]:
        return _mixture.Mixture(spec, {name: load_one(name) for name in parts})
    return load_one(spec)


def load_one(spec):
    name, colon, argument = spec.partition(":")
    if name in NAMES:
        return Task(spec, importlib.import_module(f"tasks.{MODULES[name]}"), argument if colon else None)
    own = re.fullmatch(OWN, spec)
    if not own:
        raise LookupError(f"There is no task {name}; there is {', '.join(NAMES)}, or give the path of a .py file of yours.")
    file, argument = own.groups()
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no file {file}: a task is a name or the path of a .py file with a function reward.")
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)                          # last: its neighbours hide no module of ours
    found = importlib.util.spec_from_file_location(module_name(Path(file).resolve()), file)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module                     # dataclasses and pickle look their module up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"The task {file} can't be loaded ({describe_error(e, module.__file__)}): correct it.") from e
    return Task(spec, module, argument)


def module_name(path):
    """Return the name under which a file can be imported, so that pickle finds its functions in any process.
    If another module has it, return one made of the path, which only this process and its forks know."""
    try:
        known = importlib.util.find_spec(path.stem)
        if known and known.origin and Path(known.origin).resolve() == path:
            return path.stem
    except (ImportError, ValueError):                    # a name with a dot, or a module without a spec
        pass
    return re.sub(r"\W", "_", str(path))


def files_of(task):
    """A task's file and those of its neighbours that it imports, and that these import; all of a package."""
    found = [Path(task.module.__file__)]
    for file in found:
        with contextlib.suppress(SyntaxError):               # of a neighbour that may never be imported
            for node in ast.walk(ast.parse(file.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                for name in names:
                    near = found[0].parent / name.partition(".")[0]
                    files = [near.with_suffix(".py"), *sorted(near.rglob("*.py"))]
                    found += [other for other in files if other.is_file() and other not in found]
    return found


def describe_error(error, file=None):
    """An exception as one short line that can be printed, whatever the text that it quotes; with the last
    line of `file` that it came through."""
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

    name: the spec. prompt: the form of a plain prompt. instruction: the system message of a chat when examples are shown. stop: the
    text that ends a completion, which `cut` cuts after it.
    """

    def __init__(self, name, module, argument=None):
        self.name, self.module, self.argument = name, module, argument
        self.prompt, self.stop = getattr(module, "PROMPT", PROMPT), getattr(module, "STOP", "</answer>")
        self.instruction = getattr(module, "INSTRUCTION", "")
        if not callable(getattr(module, "reward", None)):
            raise ValueError(f"The task {name} has no reward(question, completion): write one.")
        if hasattr(module, "check"):
            self.sentence("check", module.check, argument)
        elif argument is not None and not any(self.takes(f, "argument") for f in vars(module).values() if inspect.isfunction(f)):
            raise ValueError(f"The task {name} has nothing that takes an argument: leave :{argument} out.")
        self.domains = []                                # of a mixture, its tasks
        self.weights = {name: 1}
        self.score = self.call("reward")
        self.must_take("reward(question, completion)", self.score, {}, "")
        if hasattr(module, "signature"):
            self.must_take("signature(completion)", self.call("signature"), "")
        for hook, text in (("PROMPT", self.prompt), ("STOP", self.stop or ""), ("INSTRUCTION", self.instruction or "")):
            if not isinstance(text, str) or hook == "PROMPT" and "{}" not in text:
                raise ValueError(f"{hook} of the task {name} is {str(text)[:80]!r}: {hook} {RESERVED} for a text"
                                 f"{' with {} for the question' * (hook == 'PROMPT')}, so rename yours.")

    @property
    def files(self):
        return files_of(self)

    def of(self, question):
        """The Task that a question belongs to, as a mixture has it."""
        return self

    def must_take(self, form, function, *given):
        """ValueError unless a function can be called with these."""
        try:
            inspect.signature(function).bind(*given)
        except TypeError as e:
            name = form.partition("(")[0]
            raise ValueError(f"The {name} of the task {self.name} can't be called as {form} ({e}): {name}() "
                             f"{RESERVED}, so let it take these, or rename yours.") from None
        except ValueError:                               # some built-in functions don't say what they take
            pass

    def takes(self, function, keyword):
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            return False
        return any(p.name == keyword or p.kind == p.VAR_KEYWORD for p in parameters)

    def call(self, function, **options):
        """The module's function, with the argument and those options that it takes."""
        found = getattr(self.module, function, None)
        if not callable(found):
            raise ValueError(f"The task {self.name} has no {function}: write a function {function} in its file, where "
                             "nothing else may have that name, or use another task.")
        return partial(found, **{k: v for k, v in (options | {"argument": self.argument}).items() if self.takes(found, k)})

    def sentence(self, name, function, *given):
        """What a function of the module returns. If one of the user's fails, ValueError with its line."""
        try:
            return function(*given)
        except (Exception, SystemExit) as e:
            if self.module.__name__.startswith("tasks."):
                raise
            what = describe_error(e, self.module.__file__)
            raise ValueError(f"{name}() of the task {self.name} failed ({what}): {name}() {RESERVED}, so mend it, or rename yours.") from e

    def ask(self, kind, name, *given, **options):
        """The list or the str that the module's function gives; `sentence` if it can't."""
        function = self.call(name, **options)

        def answer():
            found = function(*given)
            if kind is list and isinstance(found, Iterable):
                found = list(found)                      # a generator runs here
            if not isinstance(found, kind):
                raise TypeError(f"it returned {str(found)[:80]} and no {kind.__name__}")
            return found
        return self.sentence(name, answer)

    def documents(self, split, seed=0):
        """Texts to pretrain on, of split "train" or "valid"."""
        if split not in SPLITS[:2]:
            raise ValueError(f"The text of the task {self.name} has no split {split}: choose train or valid.")
        with ProgressLine(f"making {split} text of {self.name}"):
            found = self.ask(list, "documents", split, seed=seed)
        for text in found:
            if not isinstance(text, str):
                raise ValueError(f"The task {self.name} gave the document {str(text)[:80]}: give texts.")
        return found

    def questions(self, split, seed=0, n=None, fewer=False):
        """n different questions of a split, a function of (split, seed); None: all, or the number that the
        task finds right. fewer: all there are will do where there are less than n."""
        if split not in SPLITS:
            raise ValueError(f"The task {self.name} has no split {split}: choose train, valid or test.")
        with ProgressLine(f"getting {split} questions of {self.name}"):
            try:
                found = self.ask(list, "questions", split, seed=seed, n=n)
            except ValueError:                           # it may refuse to draw more than it has
                if not fewer or n is None:
                    raise
                found = self.ask(list, "questions", split, seed=seed, n=None)
        for q in found:
            if not isinstance(q, dict) or not isinstance(q.get("question"), str) or "answer" not in q \
                    or not can_be_json(q):
                raise ValueError(f"The task {self.name} gave the question {str(q)[:80]}: a question is "
                                 '{"question": text, "answer": text}, with whatever else JSON can hold.')
        if n is not None and len(found) < n and not fewer:
            raise ValueError(f"{n} questions of {self.name} were asked for, and the split {split} has {len(found)}.")
        return found[:n]

    def solution(self, question):
        return self.ask(str, "solution", question)

    def examples(self, n):
        """n (question's text, completion) of split train, always the same; of a task that does not choose them, the first whose
        solution its verifier pays in full."""
        if n == 0:
            return []
        if hasattr(self.module, "examples"):
            found = self.ask(list, "examples", n)
            for pair in found:
                if not isinstance(pair, tuple | list) or [type(text) for text in pair] != [str, str]:
                    raise ValueError(f"The task {self.name} gave the example {str(pair)[:80]}: an example is "
                                     "(question's text, completion).")
        else:
            worked = ((q, self.solution(q)) for q in self.questions("train"))
            graded = ((q, s, self.sentence("reward", self.reward, q, s)) for q, s in worked)
            found = list(islice(((q["question"], s) for q, s, grade in graded if self.verified(*grade)), n))
        if len(found) < n:
            raise ValueError(f"{n} worked examples of {self.name} were asked for, and it has {len(found)}.")
        return found[:n]

    def cut(self, completion):
        """What of a completion counts: all up to its first stop, that included."""
        return "".join(completion.partition(self.stop)[:2]) if self.stop else completion

    def signature(self, completion):
        """Two solutions with the same signature are the same solution; of a task that does not say, the equations decide."""
        if hasattr(self.module, "signature"):
            return self.ask(str, "signature", completion)
        return _equations.signature(completion)

    def reward(self, question, completion):
        """(score, {part name: bool}); NotAScore if it is not in [0, 1]."""
        result = self.score(question, completion)
        whole = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        score, parts = result if whole else (result, None)
        try:
            score = float(score)
        except (TypeError, ValueError):
            score = float("nan")
        if not 0 <= score <= 1:
            raise NotAScore(f"The task {self.name} gave the score {str(result)[:80]}: a score is a number from 0 to 1.", score)
        return score, {"correct": score == 1} if parts is None else {name: bool(value) for name, value in parts.items()}

    @staticmethod
    def verified(score, parts):
        """Whether a completion may be trained on: correct, and every part of it."""
        return score == 1 and all(parts.values())
