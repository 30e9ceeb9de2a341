"""For notebooks: run the project's commands in a cell, with their curves at the end.

    from doctor.notebook import follow, run
    run("train.py config/quickstart.py", out_dir="out/base", resume="auto")
    follow("out/base")
"""
import io
import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import matplotlib.figure                     # noqa: F401 (here, lest the stop button cut the import short)
from IPython.display import DisplayHandle, Image, Pretty, display

from doctor import plot
from runtime.config import BadInput
from runtime.metrics import read_run

LINES = 8                                    # of a command's output that are shown


def run(command, ranks=1, lines=LINES, **options):
    """Run a script of the project, given as on a command line in its folder, and show its last lines as they
    come and, of a command with an out_dir, its curves at the end.

    ranks: processes that share the work (torchrun). The stop button ends the command as Ctrl-C does, after
    saving; pressed again, at once. RuntimeError with the command's own sentence if it fails.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment["OMP_NUM_THREADS"] = "1"
    arguments = command.split() + [f"--{key}={value}" for key, value in options.items()]
    # In a session of its own: Jupyter's stop button interrupts all processes of the notebook's, and the second
    # Ctrl-C, which is `run`'s, would end the command before it has saved.
    process = subprocess.Popen(start + arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    said = deque(maxlen=200)
    stopped = False
    try:
        show_output(process, said, lines)
    except KeyboardInterrupt:
        stopped = True
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        if process.poll() is None:           # the stop button again
            process.kill()
    out_dir = options.get("out_dir")
    if out_dir:
        show_curves(out_dir)
    if stopped:
        print("Stopped. Run this cell again to resume.")
    elif process.returncode not in (0, 3):   # 3: the doctor has found something
        errors = [line for line in said if line.startswith("error: ")] or list(said)
        raise RuntimeError(errors[-1] if errors else f"{command} ended with exit code {process.returncode}")


def show_output(process, said, lines):
    """Append a process's lines to `said` until it ends, and show the last of them."""
    handle = DisplayHandle()
    handle.display(Pretty(""))
    for line in process.stdout:
        if line.strip():
            said.append(line.decode(errors="replace").rstrip())
            handle.update(Pretty("\n".join(list(said)[-lines:])))
    process.wait()


def show_curves(out_dir):
    """Show the curves of a run, if it has logged a step."""
    png = io.BytesIO()
    try:
        plot.draw({str(out_dir): read_run(out_dir)}, "steps", png, dpi=60)
    except BadInput as e:
        print(e)
    else:
        display(Image(png.getvalue()))


def follow(out_dir, lines=LINES):
    """Show the last lines and the curves of a run as they are now, of one that runs elsewhere, say."""
    log = Path(out_dir) / "training.log"
    said = log.read_text(errors="replace").splitlines() if log.exists() else [f"There is no run in {out_dir} yet."]
    display(Pretty("\n".join(said[-lines:])))
    show_curves(out_dir)


def command_of(name):
    """Return the command in the header of config/NAME.py, such as "grpo.py config/grpo_a100x8.py"."""
    return re.search(rf"\w+\.py config/{name}\.py", Path(f"config/{name}.py").read_text())[0]
