"""Runs the project's commands in a notebook cell and shows their curves.

    from doctor.notebook import follow, run
    run("train.py config/quickstart.py", out_dir="out/base", resume="auto")
    follow("out/base")
"""
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import matplotlib.figure                     # noqa: F401 (early: the stop button must not interrupt it)
from IPython.display import DisplayHandle, Image, Pretty, display

from doctor import plot
from runtime.config import BadInput
from runtime.log import read_run

LINES = 8                                    # lines of output that are shown


def run(command, ranks=1, lines=LINES, **options):
    """Run a script of the project, as on a command line, showing its last lines; at the end show the curves
    if there is an out_dir. RuntimeError with the command's message if it fails.

    ranks: processes (torchrun). The stop button ends the command like Ctrl-C, after a checkpoint; pressed
    again, at once.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment["OMP_NUM_THREADS"] = "1"
    arguments = shlex.split(command) + [f"--{key}={value}" for key, value in options.items()]
    # In its own session: Jupyter's stop button interrupts the notebook's session, and with the signal below
    # the command would get two, which end it before it saves.
    process = subprocess.Popen(start + arguments, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    output = deque(maxlen=200)
    stopped = False
    try:
        show_output(process, output, lines)
    except KeyboardInterrupt:
        stopped = True
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        if process.poll() is None:           # the stop button was pressed again
            process.kill()
    out_dir = options.get("out_dir")
    if out_dir:
        show_curves(out_dir)
    if stopped:
        print("Stopped. Run this cell again to resume.")
    elif process.returncode not in (0, 3):   # 3: findings of the doctor
        errors = [line for line in output if line.startswith("error: ")] or list(output)
        raise RuntimeError(errors[-1] if errors else f"{command} ended with exit code {process.returncode}")


def show_output(process, output, lines):
    """Append a process's lines to `output` until it ends, and show the last ones."""
    handle = DisplayHandle()
    handle.display(Pretty(""))
    for line in process.stdout:
        if line.strip():
            output.append(line.decode(errors="replace").rstrip())
            handle.update(Pretty("\n".join(list(output)[-lines:])))
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


def follow(out_dir):
    """Show the present last lines and curves of a run, which may run elsewhere."""
    log = Path(out_dir) / "training.log"
    text = log.read_text(errors="replace") if log.exists() else f"There is no run in {out_dir} yet."
    display(Pretty("\n".join(text.splitlines()[-LINES:])))
    show_curves(out_dir)


def command_of(name):
    """Return the command in the header of config/NAME.py, such as "grpo.py config/grpo_a100x8.py"."""
    text = Path(f"config/{name}.py").read_text()
    return re.search(rf"\w+\.py (config/\w+\.py )*config/{name}\.py", text)[0]
