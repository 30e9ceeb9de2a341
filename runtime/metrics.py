"""Reads what a run has logged in metrics.jsonl: an object a line, of a step, an evaluation or the run's start."""
from pathlib import Path

from runtime.config import BadInput, parse_json


def read_lines(run):
    """Return the lines of a run's metrics.jsonl that a crash has not cut short, dictionaries with a step; []
    without such a file."""
    path = Path(run) / "metrics.jsonl"
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            values = parse_json(line, dict)
        except ValueError:
            continue
        if isinstance(values.get("step"), int):
            lines.append(values)
    return lines


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
