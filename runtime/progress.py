"""A progress line on the terminal, drawn by tqdm, for work that takes longer than DELAY seconds.

    with ProgressLine("evaluating", n_tokens, "tokens") as line:
        for x, y in batches:
            ...
            line.add(len(x))
    for row in track(rows, "reading", "rows"):
        ...
    with ProgressLine("compiling"):          # nothing to count: the name alone
        ...

The line is erased at its end. Nothing is drawn, and tqdm is not imported, where standard error is no terminal,
on all ranks but the first, and after never(). Imports no torch, since tasks draw questions with it.
"""
import contextlib
import os
import sys
import threading

from runtime.usage import is_first_rank

DELAY = 2.0                          # seconds before a line is drawn
FORM = "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f}%), {rate_fmt}{postfix}, ETA {remaining}"
shared = False                       # the terminal belongs to the process that started this one


class ProgressLine:
    """A line with a name from `with` to its end. total, unit: of the things that are counted (None: nothing is), B
    for bytes. note: a function that gives a few words more."""

    def __init__(self, name, total=None, unit="", note=None):
        self.name = name
        self.total = total
        self.unit = unit
        self.note = note
        self.bar = None

    def __enter__(self):
        if is_watched():
            from tqdm import tqdm
            in_bytes = self.unit == "B"
            self.bar = tqdm(desc=self.name, total=self.total, unit="B" if in_bytes else f" {self.unit}",
                            unit_scale=in_bytes, delay=DELAY, leave=False, dynamic_ncols=True, position=0, file=sys.stderr,
                            bar_format=FORM if self.total else "{desc} ...")
            self.timer = threading.Timer(DELAY, self.draw)    # nothing may be counted until then
            self.timer.daemon = True
            self.timer.start()
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.timer.cancel()
            self.bar.close()
            self.bar = None

    def draw(self):
        self.bar.delay = 0                   # or close() would leave the line
        self.bar.refresh()

    def add(self, n=1):
        if self.bar is not None:
            if self.note:
                self.bar.set_postfix_str(self.note(), refresh=False)
            self.bar.update(n)


def track(values, name, unit, total=None):
    """Yield the values, with a line that counts those that are done. total: if they are no list."""
    with ProgressLine(name, len(values) if total is None else total, unit) as line:
        for value in values:
            yield value
            line.add()


def clear():
    """Erase the lines, for text that is about to be printed: they come back below it."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else ():
        with contextlib.suppress(OSError, ValueError):        # the terminal was closed
            bar.clear()


def never():
    """Draw nothing in this process: the terminal is another's, which started it."""
    global shared
    shared = True


def is_watched():
    """Tell whether there is someone to look at a line that this process draws."""
    is_terminal = bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal and is_first_rank() and not shared


def duration(seconds):
    """Write seconds: 5s, 3m20s, 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
