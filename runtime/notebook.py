"""For notebooks: commands of the project, with their curves as they grow.

    from runtime.notebook import follow, run
    run("train.py config/quickstart.py", out_dir="out/base", resume="auto")
    follow("out/base")
"""
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from IPython.display import Image, clear_output, display

from runtime import plot
from runtime.config import BadInput

LINES = 8                                    # of what a command says that are shown


def run(command, ranks=1, every=5.0, **knobs):
    """Run a script of the project, given as on a command line in its folder, with knobs as flags, and show its
    last lines and, of one with an out_dir, its curves, until it ends.

    ranks: processes that share the work, a core each (torchrun). every: seconds between two looks. The stop
    button ends the command as Ctrl-C does: it saves before. RuntimeError with its last line if it fails.
    """
    flags = [f"--{key}={value}" for key, value in knobs.items()]
    start = [sys.executable]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(start + command.split() + flags, env=environment, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = deque(maxlen=LINES)
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            show(said, knobs.get("out_dir"))
            wait(process, every)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
    code = process.wait()
    reader.join()
    show(said, knobs.get("out_dir"))
    if code not in (0, 3, 130):              # 3: something is said of a run; 130: stopped as asked
        raise RuntimeError(said[-1].strip() if said else f"{command} ended with {code}")


def wait(process, seconds):
    """Wait for the end of a process, or so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass


def follow(out_dir, minutes=0.0, every=10.0):
    """Show the last lines and the curves of a run that goes on elsewhere, or has ended, for so many minutes
    (or until the stop button)."""
    end = time.monotonic() + 60 * minutes
    try:
        while True:
            show(last_lines(out_dir), out_dir)
            if time.monotonic() >= end:
                return
            time.sleep(every)
    except KeyboardInterrupt:
        return


def last_lines(out_dir):
    log = Path(out_dir) / "training.log"
    return log.read_text(errors="replace").splitlines(keepends=True)[-LINES:] if log.exists() else []


def show(said, out_dir):
    """Put lines, and the curves of a run if there are some yet, in place of what the cell shows."""
    picture = curves(out_dir) if out_dir else None
    clear_output(wait=True)
    print("".join(list(said)), end="")
    if picture:
        display(picture)


def curves(out_dir):
    """Return the curves of a run as a picture; None while it has logged no step."""
    png = io.BytesIO()
    try:
        plot.draw({str(out_dir): plot.read(out_dir)}, "steps", png, dpi=60)
    except BadInput:
        return None
    return Image(png.getvalue())
