"""One file per problem. A task module imports only the standard library and its field's library; no torch here.

`documents(split, seed)` gives the texts to pretrain on for split "train" or "valid", the two without a common question.
`questions(split, seed, n)` gives n different questions, {"question", "answer"}, and `reward(question, completion)` how good a
completion is, a score in [0, 1], and its parts by name. Files that begin with an underscore are what tasks share.
"""
import importlib
import pkgutil


def load(name):
    """The module of the task `name`; LookupError if there is none."""
    known = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    if name not in known:
        raise LookupError(f"There is no task {name}; there is {', '.join(known)}.")
    return importlib.import_module(f"tasks.{name}")
