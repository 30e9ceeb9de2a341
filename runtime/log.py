"""Logging: metrics.jsonl for programs (one object per line, for a step, an evaluation or the start of a run),
training.log and the terminal for people."""
import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path

from runtime import distributed, progress
from runtime.checkpoint import write_atomically
from runtime.config import LARGEST, BadInput, parse_json
from runtime.usage import load_package, visible

OBJECTS = ("config", "settings", "facts", "finding")         # in metrics.jsonl
SAMPLE = 200                                 # characters of a sampled text on a terminal


def check_installed(tensorboard, wandb):
    """Raise BadInput if a package that a flag needs is missing, before the run folder is changed."""
    for package, module, wanted in (("tensorboard", "torch.utils.tensorboard", tensorboard),
                                    ("wandb", "wandb", wandb)):
        try:
            if wanted:
                load_package(module, package)
        except ImportError as e:
            raise BadInput(f"--{package} can't be used, since {e}, or leave it out.") from None


ROLLOUT = set("reward reward_std zero_variance groups completion_tokens completion_tokens_max truncated "
              "truncated_score most_common_share distinct replies errors timeouts questions epoch".split())


class Log:
    """Writes the log of a run, on rank 0 only. `say` prints a line and appends it to training.log; `metrics`
    appends an object to metrics.jsonl and sends its numbers to TensorBoard and Weights & Biases if enabled.
    doctor: class whose look() finds problems in the lines (doctor.diagnose)."""

    def __init__(self, out_dir, resumed_step=None, cfg=None, doctor=None):
        """resumed_step: later metrics are dropped. cfg: the stage's options; None: no TensorBoard, no W&B."""
        self.main = distributed.is_main()
        self.folder = Path(out_dir)
        self.cfg = cfg
        self.board = None                    # TensorBoard writer
        self.wandb_run = None
        if resumed_step is not None:
            distributed.on_main(lambda: self.forget_after(resumed_step))
        self.doctor = doctor(read_lines(self.folder)) if doctor and self.main else None
        if cfg and cfg.tensorboard and self.main:
            from torch.utils.tensorboard import SummaryWriter
            purge_step = None if resumed_step is None else resumed_step + 1    # earlier events are discarded
            self.board = SummaryWriter(self.folder / "tensorboard", flush_secs=10, purge_step=purge_step)
        if cfg and cfg.wandb:
            distributed.on_main(lambda: self.open_wandb(dataclasses.asdict(cfg)))

    def samples(self, step, texts):
        """Print sampled texts, and send them to TensorBoard and Weights & Biases if enabled."""
        if not self.main:
            return
        for i, text in enumerate(texts):
            self.say("    " + " ".join(text.split())[:SAMPLE])
            if self.board:
                self.board.add_text(f"samples/{i}", "    " + visible(text).replace("\n", "\n    "), step)
            if self.wandb_run:
                self.wandb_run.log({f"samples/{i}": text}, step=step)

    def open_wandb(self, config):
        """Open this folder's run at Weights & Biases, a new one unless it is resumed. W&B ignores steps that
        are repeated after a crash or a rollback."""
        import wandb
        path = self.folder / "wandb_id"
        project = config["wandb_project"] or os.environ.get("WANDB_PROJECT", "nanorft")
        try:
            run_id = path.read_text() if path.exists() else None
            run = wandb.init(project=project, name=config["wandb_name"] or self.folder.name,
                             dir=self.folder, id=run_id, resume="allow", config=config)
        except Exception as e:
            reason = (str(e) or type(e).__name__).splitlines()[0]
            raise BadInput(f"--wandb could not start ({reason}): run 'wandb login', set WANDB_MODE=offline, "
                           "or leave it out.") from None
        path.write_text(run.id)
        self.wandb_run = run

    def forget_after(self, step):
        """Drop the metrics of steps that will be repeated, a last line cut short by a crash and, with a
        message, other unreadable lines: they must not prevent a resume."""
        path = self.folder / "metrics.jsonl"
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as e:
            raise BadInput(f"{path} can't be read ({e.strerror}): move it elsewhere, and the resumed run "
                           "starts a new one.") from None
        kept = []
        unreadable = []
        for number, line in enumerate(lines, 1):
            try:
                if parse_line(line)["step"] <= step:
                    kept.append(line + b"\n")
            except ValueError:
                if number < len(lines):
                    unreadable.append(number)
        write_atomically(path, b"".join(kept))
        if unreadable:
            self.say(f"{len(unreadable)} unreadable lines of {path} are left out; the first is line "
                     f"{unreadable[0]}.")

    def say_findings(self):
        """Log the findings that still hold at the end of the run."""
        if self.doctor and self.doctor.holding:
            self.say("Problems of this run (docs/diagnosis.md):")
            for finding in self.doctor.holding:
                self.say(f"! {finding}")

    def close(self, failed=False):
        if self.board:
            self.board.close()
        if self.wandb_run:
            with contextlib.suppress(Exception):         # curves must not end a run
                self.wandb_run.finish(exit_code=int(failed))

    def say(self, text):
        if self.main:
            progress.clear()
            print(visible(text), flush=True)
            self.append("training.log", text)

    def metrics(self, **values):
        """Append a line to metrics.jsonl. values: `step` and numbers, None, or the run's config and
        settings."""
        if not self.main:
            return
        self.write_line(values)
        numbers = {grouped(name): value for name, value in values.items()
                   if isinstance(value, int | float) and name != "step"}
        for name, value in numbers.items() if self.board else ():
            self.board.add_scalar(name, value, values["step"])
        if numbers and self.wandb_run:
            self.wandb_run.log(numbers, step=values["step"])
        for finding in self.doctor.look(values) if self.doctor else ():
            self.write_line({"step": values["step"], "finding": finding.as_json()})
            self.say(f"! {finding}")

    def write_line(self, values):
        """Append a line to metrics.jsonl: all of its lines come from here."""
        self.append("metrics.jsonl", json.dumps(for_json(values)))

    def append(self, name, line):
        """Append a line to a file. A failure (a full disk, for example) does not end the run; the next
        checkpoint will."""
        try:
            with open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace") as f:
                f.write(visible(line) + "\n")
        except OSError as e:
            print(f"{self.folder / name} could not be written ({e.strerror}).", flush=True)


def grouped(name):
    """Return a metric's name in TensorBoard and W&B, which show the part before "/" as a group."""
    if "/" in name:
        return name
    if name.startswith("val_"):
        return f"val/{name.removeprefix('val_')}"
    if name.endswith(("_s", "_gb")) or name in ("seconds", "mfu", "mbu_rollout", "utilization", "joules"):
        return f"time/{name}"
    group = "rollout" if name in ROLLOUT or name.startswith("pass_at_") else "train"
    return f"{group}/{name}"


def for_json(value):
    """Convert NaN and infinity, which JSON lacks, to text, also in dictionaries and lists."""
    if isinstance(value, dict):
        return {name: for_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def shown(value, form, unit=""):
    """Format a number, None as n/a."""
    return "n/a" if value is None else format(value, form) + unit


# --- reading ---

def read_lines(run):
    """Return the readable lines of a run's metrics.jsonl, dictionaries with a step; [] without that file. A
    crash may have truncated a line."""
    path = Path(run) / "metrics.jsonl"
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(parse_line(line))
    return lines


def parse_line(line):
    """Return the dictionary of a line; ValueError if no run writes such a line."""
    values = parse_json(line, dict)
    if type(values.get("step")) is not int:
        raise ValueError("it has no step")
    for name, value in values.items():
        if name in OBJECTS and not isinstance(value, dict) or type(value) is int and abs(value) > LARGEST:
            raise ValueError(f"its {name} has the wrong type or is too large")
    return values


def check_run(run):
    """Raise BadInput if a folder has no metrics.jsonl."""
    if not (Path(run) / "metrics.jsonl").is_file():
        raise BadInput(f"{run} is not a run folder (it has no metrics.jsonl): give the out_dir of a run.")


def read_run(run):
    """Return the lines of a run as read_lines does; BadInput if no step is logged yet."""
    check_run(run)
    lines = read_lines(run)
    if not any("loss" in line for line in lines):
        raise BadInput(f"{run} has logged no step yet: wait for its first step.")
    return lines
