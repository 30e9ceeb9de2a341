"""Print figures of docs/figures.json as Markdown: value, range, peers, machine, versions, date and command.

    python -m measure.figures             all of them
    python -m measure.figures T2 R6       those of these ids, which docs/benchmarks.md names

A figure has only the keys that apply to it: `low` and `high` are the least and the most, `values` those of
the seeds or repeats, `others` the peers measured in turn, the one with the least ratio first, `baseline` this
project without the change, `more` other measurements of the same run, `promised` the gain on GPUs that this
project's guides expect. `ratio` is the median over paired runs. `limit` is arithmetic: operations at
the measured speed of large products, weights and KV cache at the measured memory bandwidth (M1 to M5). Small
models stay far below it, because dispatching an operation takes longer than running it.
"""
import json
import sys
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "docs/figures.json"


def read():
    """Return {id: figure}, in the file's order."""
    return {figure["id"]: figure for figure in json.loads(PATH.read_text(encoding="utf-8"))}


def text(value):
    """Return a value as a reader's text: numbers with separators, entries of lists after semicolons."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return "; ".join(text(entry) for entry in value)
    return value if isinstance(value, str) else f"{value:,}"


def section(figure):
    """Return the Markdown section of a figure: a heading, then one line for each further key."""
    lines = [f"- {name}: {text(value)}" for name, value in figure.items() if name not in ("id", "what")]
    return "\n".join([f"## {figure['id']}: {figure['what']}", "", *lines, ""])


def main(argv):
    """Print the figures of the ids in argv, or all, and return the exit code."""
    figures = read()
    for name in argv:
        if name not in figures:
            print(f"error: docs/figures.json has no figure {name}: give ids of docs/benchmarks.md.",
                  file=sys.stderr)
            return 2
    for name in argv or figures:
        print(section(figures[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
