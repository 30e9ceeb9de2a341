"""What a user waits for, on the last line of the terminal: what it is, how far it has come, how long it will
take.

    with ProgressLine("evaluating", n_tokens, "tokens") as line:
        for x, y in batches:
            ...
            line.add(len(x))
    for row in track(rows, "reading", "rows"):
        ...
    with ProgressLine("compiling"):          # nothing to count: how long so far
        ...

What has taken DELAY seconds gets its line, which is erased at its end, so that what is quick shows nothing. A
thread draws it: counting costs the loop an addition. Nothing is drawn, and no thread started, where standard
error is no terminal, and on ranks but the first. Of lines within lines the innermost that has a total is
drawn, or else the innermost. Who prints meanwhile calls clear() before. Imports no torch, for tasks draw
questions with it.
"""
import contextlib
import os
import sys
import threading
import time

from runtime.usage import is_first_rank

DELAY = 2.0                          # seconds that something takes before it has a line
TICK = 0.25                          # seconds between two drawings


class ProgressLine:
    """Something that takes its time, from `with` to its end.

    what: for people. total: of what is counted; None: nothing is. unit: its name, B for bytes. count: a
    function that tells how many are done, where nobody calls add(). note: a function that gives a few words
    more. Both are called by another thread, when the line is drawn.
    """

    def __init__(self, what, total=None, unit="", count=None, note=None):
        self.what = what
        self.total = total
        self.unit = unit
        self.count = count
        self.note = note
        self.done = 0
        self.began = time.monotonic()

    def __enter__(self):
        self.began = time.monotonic()
        if is_watched():
            SCREEN.begin(self)
        return self

    def __exit__(self, *_):
        SCREEN.end(self)

    def add(self, n=1):
        self.done += n

    def text(self):
        """Return the line as it is now."""
        seconds = max(1e-9, time.monotonic() - self.began)
        done = self.count() if self.count else self.done
        parts = [f"{duration(seconds)} so far"]
        if self.total:
            done = min(done, self.total)     # some totals are estimates
            if done:
                speed = done / seconds
                parts = [per_second(speed, self.unit), f"ETA {duration((self.total - done) / speed)}"]
            unit = "" if self.unit == "B" else f" {self.unit}"
            parts.insert(0, f"{amount(done, self.unit)} of {amount(self.total, self.unit)}{unit} "
                            f"({done / self.total:.0%})")
        if self.note:
            parts.append(self.note())
        return f"{self.what}: {', '.join(filter(None, parts))}"


def track(values, what, unit, total=None):
    """Yield the values, with a line that counts those that have been dealt with. total: if they are no
    list."""
    with ProgressLine(what, len(values) if total is None else total, unit) as line:
        for value in values:
            yield value
            line.add()


class Screen:
    """The last line of the terminal, and all ProgressLines that are under way."""

    def __init__(self):
        self.lock = threading.RLock()        # the garbage collector may end a loop's line at any moment
        self.lines = []                      # the innermost last
        self.drawn = ""                      # what stands there
        self.free_until = 0.0                # not to be drawn on before
        self.ended = None                    # an Event that ends the thread
        self.file = None
        self.off = False                     # in this process

    def begin(self, line):
        with self.lock:
            self.lines.append(line)
            if len(self.lines) == 1:
                self.file = sys.stderr
                self.ended = threading.Event()
                threading.Thread(target=self.redraw, args=[self.ended], daemon=True).start()

    def end(self, line):
        with self.lock:
            if line in self.lines:
                self.lines.remove(line)
                self.erase()
            if not self.lines and self.ended:
                self.ended.set()

    def redraw(self, ended):
        while not ended.wait(TICK):
            with self.lock:
                if not ended.is_set() and time.monotonic() >= self.free_until:
                    self.draw()

    def draw(self):
        drawn_if_begun_by = time.monotonic() - DELAY
        lines = [line for line in self.lines if line.began <= drawn_if_begun_by]
        if not lines or others_draw():
            self.erase()
            return
        line = next((line for line in reversed(lines) if line.total), lines[-1])
        text = line.text()[:columns(self.file) - 1]
        if text != self.drawn:
            self.write("\r" + text.ljust(len(self.drawn)))
            self.drawn = text

    def erase(self):
        if self.drawn:
            self.write("\r" + " " * len(self.drawn) + "\r")
            self.drawn = ""

    def write(self, text):
        with contextlib.suppress(OSError, ValueError):        # the terminal was closed
            self.file.write(text)
            self.file.flush()


SCREEN = Screen()


def clear():
    """Erase the line, for what is about to be printed: it comes back below that."""
    with SCREEN.lock:
        SCREEN.erase()
        SCREEN.free_until = time.monotonic() + TICK


def stop():
    """Erase the line, and end all that an exception has left under way."""
    for line in list(SCREEN.lines):
        SCREEN.end(line)


def never():
    """Draw nothing in this process: the terminal is another's, which started it."""
    SCREEN.off = True


def is_watched():
    """Tell whether there is someone to look at a line that this process draws."""
    is_terminal = bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal and is_first_rank() and not SCREEN.off


def others_draw():
    """Tell whether a library has drawn a bar of its own there, for a download say; all use tqdm for that."""
    tqdm = sys.modules.get("tqdm.std")
    return bool(tqdm) and len(tqdm.tqdm._instances) > 0


def columns(terminal):
    """Return how many characters fit a line of a terminal; 80 if it does not tell."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(terminal.fileno()).columns
    return found or 80


# --- numbers for people ---

def duration(seconds):
    """Write seconds: 5s, 3m20s, 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def amount(n, unit):
    """Write a number: 12,345; of bytes 1.2 GB."""
    if unit != "B":
        return f"{n:,.0f}"
    for size, name in ((1e9, "GB"), (1e6, "MB")):
        if n >= size:
            return f"{n / size:.1f} {name}"
    return f"{n / 1e3:.1f} kB"


def per_second(speed, unit):
    """Write a speed: 31/s, 2.5/s, 31.0 MB/s; below one a second the time of each."""
    if unit == "B":
        return f"{amount(speed, unit)}/s"
    if speed < 1:
        return f"{duration(1 / speed)} each"
    return f"{speed:,.1f}/s" if speed < 10 else f"{speed:,.0f}/s"
