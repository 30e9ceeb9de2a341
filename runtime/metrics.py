"""Reads what a run has logged in metrics.jsonl: an object a line, of a step, an evaluation or the run's start."""
import contextlib
from pathlib import Path

from runtime.config import LARGEST, BadInput, parse_json

OBJECTS = ("config", "settings", "facts", "finding")


def read_lines(run):
    """Return the lines of a run's metrics.jsonl that a crash has not cut short, dictionaries with a step; []
    without such a file."""
    path = Path(run) / "metrics.jsonl"
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(parse_line(line))
    return lines


def parse_line(line):
    """Return the dictionary of a line. ValueError if it is none that a run writes."""
    values = parse_json(line, dict)
    if type(values.get("step")) is not int:
        raise ValueError("it has no step")
    for name, value in values.items():
        if name in OBJECTS and not isinstance(value, dict) or type(value) is int and abs(value) > LARGEST:
            raise ValueError(f"its {name} is not one that a run writes")
    return values


def check_run(run):
    """BadInput if a folder has no metrics.jsonl."""
    if not (Path(run) / "metrics.jsonl").is_file():
        raise BadInput(f"{run} is not the folder of a run (it has no metrics.jsonl): give the out_dir of "
                       "one.")


def read_run(run):
    """Return the lines as above; BadInput if there is no such file, or no step in it yet."""
    check_run(run)
    lines = read_lines(run)
    if not any("loss" in line for line in lines):
        raise BadInput(f"{run} has logged no step yet: wait until it has.")
    return lines
