"""A progress line on the terminal, drawn by tqdm, for work that takes longer than DELAY seconds.

    with ProgressLine("evaluating", n_tokens, "tokens") as line:
        for x, y in batches:
            ...
            line.add(len(x))
    for row in track(rows, "reading", "rows"):
        ...
    with ProgressLine("compiling"):          # no count, only the name
        ...

The line is erased when the work is done. Only the first rank draws, and only if standard error is a terminal
and never() was not called; else tqdm is not imported. Imports no torch, since tasks use it.
"""
import contextlib
import os
import sys
import threading

from runtime.usage import is_first_rank

DELAY = 2.0                          # seconds before a line is drawn
FORM = "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f}%), {rate_fmt}{postfix}, ETA {remaining}"
disabled = False                     # the terminal belongs to the parent process


class ProgressLine:
    """A named line while its `with` block runs. total: the count at the end; None counts nothing. unit: of
    the count, B for bytes. note: a function that returns a short suffix."""

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
                            unit_scale=in_bytes, delay=DELAY, leave=False, dynamic_ncols=True, position=0,
                            file=sys.stderr, bar_format=FORM if self.total else "{desc} ...")
            # tqdm draws only when something is counted.
            self.timer = threading.Timer(DELAY, self.draw)
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
    """Yield the values and count them on a progress line. total: needed if `values` has no length."""
    with ProgressLine(name, len(values) if total is None else total, unit) as line:
        for value in values:
            yield value
            line.add()


def clear():
    """Erase the lines before text is printed; tqdm draws them again below it."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else ():
        with contextlib.suppress(OSError, ValueError):        # the terminal was closed
            bar.clear()


def never():
    """Draw nothing in this process, whose terminal belongs to its parent."""
    global disabled
    disabled = True


def is_watched():
    """Return whether this process may draw on a terminal."""
    is_terminal = bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal and is_first_rank() and not disabled


def duration(seconds):
    """Format seconds as 5s, 3m20s or 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
