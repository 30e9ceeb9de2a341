"""Reads metrics.jsonl: one object per line, for a step, an evaluation or the start of a run."""
import contextlib
from pathlib import Path

from runtime.config import LARGEST, BadInput, parse_json

OBJECTS = ("config", "settings", "facts", "finding")


def read_lines(run):
    """Return the readable lines of a run's metrics.jsonl, dictionaries with a step; [] without that file. A
    crash may have truncated a line."""
    path = Path(run) / "metrics.jsonl"
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(parse_line(line))
    return lines


def parse_line(line):
    """Return the dictionary of a line; ValueError if no run writes such a line."""
    values = parse_json(line, dict)
    if type(values.get("step")) is not int:
        raise ValueError("it has no step")
    for name, value in values.items():
        if name in OBJECTS and not isinstance(value, dict) or type(value) is int and abs(value) > LARGEST:
            raise ValueError(f"its {name} has the wrong type or is too large")
    return values


def check_run(run):
    """Raise BadInput if a folder has no metrics.jsonl."""
    if not (Path(run) / "metrics.jsonl").is_file():
        raise BadInput(f"{run} is not a run folder (it has no metrics.jsonl): give the out_dir of a run.")


def read_run(run):
    """Return the lines of a run as read_lines does; BadInput if no step is logged yet."""
    check_run(run)
    lines = read_lines(run)
    if not any("loss" in line for line in lines):
        raise BadInput(f"{run} has logged no step yet: wait for its first step.")
    return lines
