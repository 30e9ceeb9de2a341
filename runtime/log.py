"""metrics.jsonl for programs, training.log and the terminal for people."""
import contextlib
import importlib.util
import json
import os
from pathlib import Path

from runtime import distributed
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, parse_json


def check_installed(tensorboard, wandb):
    """BadInput if a package that a flag asks for is missing: before a run folder is touched."""
    for package, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        if wanted and importlib.util.find_spec(package) is None:
            raise BadInput(f"--{package} needs a package that is not installed: pip install {package}, or "
                           "leave it out.")


class Log:
    """Writes on the first rank only. `say` prints a line and keeps it in training.log; `metrics` appends an
    object to metrics.jsonl, and hands its numbers to TensorBoard and Weights & Biases if they are asked
    for."""

    def __init__(self, out_dir, resumed_step=None, tensorboard=False, wandb=False, config=None):
        self.main = distributed.is_main()
        self.folder = Path(out_dir)
        self.writers = []
        self.board = None                    # TensorBoard's writer
        self.wandb_run = None
        if resumed_step is not None:
            self.forget_after(resumed_step)
        if tensorboard and self.main:
            self.open_board(resumed_step)
            self.writers.append(lambda step, numbers: [self.board.add_scalar(k, v, step) for k, v in numbers.items()])
        if wandb:
            distributed.on_main(lambda: self.open_wandb(config))

    def open_board(self, last_step=None):
        """TensorBoard's writer; steps after last_step that an earlier one wrote no longer count."""
        from torch.utils.tensorboard import SummaryWriter
        self.board = SummaryWriter(self.folder / "tensorboard", flush_secs=10,
                                   purge_step=None if last_step is None else last_step + 1)

    def open_wandb(self, config):
        """The run at Weights & Biases that belongs to this folder, a new one unless it is resumed. It keeps
        what it has seen: steps that are run again, after a crash or a roll-back, are not shown anew."""
        import wandb
        path = self.folder / "wandb_id"
        try:
            run = wandb.init(project=os.environ.get("WANDB_PROJECT", "nanorft"), name=self.folder.name, dir=self.folder,
                             id=path.read_text() if path.exists() else None, resume="allow", config=config)
        except Exception as e:
            raise BadInput(f"--wandb could not start ({(str(e) or type(e).__name__).splitlines()[0]}): run "
                           "'wandb login', set WANDB_MODE=offline, or leave it out.") from None
        path.write_text(run.id)
        self.wandb_run = run
        self.writers.append(lambda step, numbers: run.log(numbers, step=step))

    def forget_after(self, step):
        """Drop the metrics of steps that will be run again, and a line that a crash cut short."""
        if not self.main:
            return
        if self.board:
            self.board.close()
            self.open_board(step)
        path = self.folder / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                kept += [line] if parse_json(line, dict)["step"] <= step else []
            except (ValueError, KeyError, TypeError):
                continue
        write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def close(self, failed=False):
        if self.board:
            self.board.close()
        if self.wandb_run:
            with contextlib.suppress(Exception):         # a run does not end by what became of its curves
                self.wandb_run.finish(exit_code=int(failed))

    def say(self, text):
        if self.main:
            print(text, flush=True)
            self.append("training.log", text)

    def note(self, text):
        """Keep in training.log what is printed elsewhere, on whichever rank."""
        self.append("training.log", text)

    def metrics(self, **values):
        """values: `step`, and numbers, None, or the run's config and settings."""
        if self.main:
            self.append("metrics.jsonl", json.dumps({k: finite(v) for k, v in values.items()}))
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
            for write in self.writers if numbers else []:
                write(values["step"], numbers)

    def append(self, name, line):
        """A log that can't be written (a full disk, say) does not end a run: saving a checkpoint will say
        so."""
        try:
            with open(self.folder / name, "a") as f:
                f.write(line + "\n")
        except OSError as e:
            print(f"{self.folder / name} could not be written ({e.strerror}).", flush=True)


def finite(value):
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))) else value


def duration(seconds):
    """5s, 3m20s, 2h05m"""
    s = round(seconds)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def shown(value, form, unit=""):
    """A number for people; n/a where it is not known."""
    return "n/a" if value is None else format(value, form) + unit
