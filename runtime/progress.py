"""A progress line for work that takes longer than DELAY seconds, drawn by tqdm on a terminal. If standard
error is a file, a counted line is written to it every half minute.

    with ProgressLine("evaluating", n_tokens, "tokens") as line:
        for x, y in batches:
            ...
            line.add(len(x))
    for row in track(rows, "reading", "rows"):
        ...
    with ProgressLine("compiling"):          # no count, only the name
        ...

A drawn line is erased when the work is done. Only the first rank shows lines, and none after never(). Imports
no torch, since tasks use it.
"""
import contextlib
import os
import sys
import threading
import time

from runtime.usage import is_first_rank

DELAY = 2.0                          # seconds before a line is drawn
INTERVAL = 30.0                      # seconds between two lines in a file
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
        self.count = 0

    def __enter__(self):
        self.began = time.monotonic()
        self.written = self.began            # time of the last line in a file
        if is_shown() and is_terminal():
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
            self.timer.join()                # or draw(), already under way, would draw the line after close()
            self.bar.close()
            self.bar = None

    def draw(self):
        self.bar.delay = 0                   # or close() would leave the line
        self.bar.refresh()

    def add(self, n=1):
        self.count += n
        if time.monotonic() - self.written >= INTERVAL and is_shown() and not is_terminal():
            self.write()
        if self.bar is not None:
            if self.note:
                self.bar.set_postfix_str(self.note(), refresh=False)
            self.bar.update(n)

    def write(self):
        """Write the line to a file."""
        self.written = time.monotonic()
        seconds = self.written - self.began
        share = self.count / self.total if self.total else 0
        total = f"{share:.0%} of {self.total:,} {self.unit}" if share else f"{self.count:,} {self.unit}"
        left = f", ETA {duration(seconds / share - seconds)}" if share > 0.02 else ""      # too early before
        note = f", {self.note()}" if self.note else ""
        with contextlib.suppress(OSError, ValueError):        # the file was closed
            print(f"{self.name}: {total}{note}, {duration(seconds)}{left}", file=sys.stderr, flush=True)


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


def is_terminal():
    """Return whether lines can be drawn on standard error."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def is_shown():
    """Return whether this process shows lines."""
    return bool(sys.stderr) and is_first_rank() and not disabled


def duration(seconds):
    """Format seconds as 5s, 3m20s or 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
