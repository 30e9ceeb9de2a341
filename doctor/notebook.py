"""For notebooks: commands of the project, with their curves as they grow.

    from doctor.notebook import follow, run
    run("train.py config/quickstart.py", out_dir="out/base", resume="auto")
    follow("out/base")
"""
import codecs
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib.figure                     # noqa: F401 (here, lest the stop button cut the import short)
from IPython.display import DisplayHandle, Image, Pretty

from doctor import plot
from runtime import lock
from runtime.config import BadInput
from runtime.metrics import read_run

LINES = 8                                    # of what a command says that are shown


def run(command, ranks=1, every=2.0, lines=LINES, **knobs):
    """Run a script of the project, given as on a command line in its folder, with knobs as flags. Shows its
    last lines and, of one with an out_dir, its curves, until it ends.

    ranks: processes that share the work (torchrun). every: seconds between two looks, at least; drawing takes
    no more than a tenth of the time. The stop button ends the command as Ctrl-C does, after saving; pressed
    again, at once. RuntimeError with the command's own sentence if it fails.
    """
    environment = dict(os.environ)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment["OMP_NUM_THREADS"] = "1"
    flags = [f"--{key}={value}" for key, value in knobs.items()]
    out_dir = knobs.get("out_dir")
    screen = Screen(out_dir, lines)
    terminal = Terminal()
    process = terminal.start(start + command.split() + flags, environment)
    stopped = False
    try:
        while process.poll() is None:
            began = time.monotonic()
            screen.show(terminal.lines())
            wait(process, max(every, 10 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        stopped = True
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        if process.poll() is None:           # the stop button again, or curves that can't be drawn
            process.kill() if stopped else process.terminate()
    terminal.close()
    if stopped:                              # torchrun's last words are a traceback
        screen.show(log_lines(out_dir) if out_dir else [])
        print("Stopped. Run this cell again to go on.")
        return
    screen.show(terminal.lines())
    if process.returncode not in (0, 3):     # 3: a verdict on a run
        raise RuntimeError(terminal.error() or f"{command} ended with exit code {process.returncode}")


def follow(out_dir, every=5.0, lines=LINES):
    """Show the last lines and the curves of a run that goes on elsewhere until it ends, or the stop button is
    pressed; of one that has ended, once."""
    screen = Screen(out_dir, lines)
    try:
        while True:
            goes_on = lock.is_held(Path(out_dir) / lock.NAME)          # before its last line is read
            screen.show(log_lines(out_dir) or [f"There is no run in {out_dir} yet."])
            if not goes_on:
                return
            time.sleep(every)
    except KeyboardInterrupt:
        return


def command_of(name):
    """Return the command in the header of config/NAME.py, such as "grpo.py config/grpo_a100x8.py"."""
    return re.search(rf"\w+\.py config/{name}\.py", Path(f"config/{name}.py").read_text())[0]


def log_lines(out_dir):
    log = Path(out_dir) / "training.log"
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def wait(process, seconds):
    """Wait for the end of a process, or so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass


class Terminal:
    """What a command prints on a terminal of its own, so that the line of what takes long (runtime/progress.py)
    is there too."""

    def __init__(self):
        self.ended = []                      # lines
        self.last = ""                       # one that goes on

    def start(self, command, environment):
        """Return the process of a command."""
        ours, theirs = os.openpty()
        with open(theirs, "wb") as output:
            # In a session of its own: Jupyter's stop button interrupts all processes of the notebook's, and the
            # second Ctrl-C, which is `run`'s, would end the command before it has saved.
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        self.reader = threading.Thread(target=self.read, args=[ours], daemon=True)
        self.reader.start()
        return process

    def read(self, ours):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with open(ours, "rb", buffering=0) as terminal:
            try:
                while printed := terminal.read(4096):
                    self.add(decoder.decode(printed))
            except OSError:                  # how Linux tells that nobody has the other end any more
                pass

    def add(self, text):
        *ended, self.last = (self.last + text).split("\n")
        self.ended += ended

    def lines(self):
        """Return the lines as they look: of each what was written last, from its beginning on."""
        return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in [*self.ended, self.last]]

    def error(self):
        """Return the sentence with which the command failed, or its last line."""
        lines = [line for line in self.lines() if line]
        return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")

    def close(self):
        self.reader.join(5)                  # at most: a process of the command's may have outlived it


class Screen:
    """What a cell shows of a command: its last lines, and below them the curves of its run."""

    def __init__(self, out_dir, num_lines):
        self.out_dir = out_dir
        self.num_lines = num_lines
        self.handles = {}                    # {what is shown: its place in the cell}
        self.drawn = 0                       # bytes of metrics.jsonl that the curves are from

    def show(self, lines):
        text = "\n".join(lines).strip("\n").split("\n")[-self.num_lines:]
        self.put("lines", Pretty("\n".join(text)))
        picture = self.curves() if self.out_dir else None
        if picture:
            self.put("curves", picture)

    def put(self, name, shown):
        if name in self.handles:
            self.handles[name].update(shown)
        else:
            self.handles[name] = DisplayHandle()
            self.handles[name].display(shown)

    def curves(self):
        """Return the curves of the run as a picture; None if it has logged no step, or none since the last
        one."""
        log = Path(self.out_dir) / "metrics.jsonl"
        size = log.stat().st_size if log.exists() else 0
        if size == self.drawn:
            return None
        png = io.BytesIO()
        try:
            plot.draw({str(self.out_dir): read_run(self.out_dir)}, "steps", png, dpi=60)
        except (BadInput, OSError):          # no step yet, or a drive that does not answer
            return None
        self.drawn = size
        return Image(png.getvalue())
