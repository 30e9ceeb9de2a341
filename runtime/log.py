"""metrics.jsonl for programs, training.log and the terminal for people."""
import json
from pathlib import Path

from runtime import distributed
from runtime.checkpoint import write_atomically


class Log:
    """Writes on the first rank only. `say` prints a line and keeps it in training.log; `metrics` appends an object to
    metrics.jsonl."""

    def __init__(self, out_dir, resumed_step=None):
        self.main = distributed.is_main()
        self.folder = Path(out_dir)
        if resumed_step is not None:
            self.forget_after(resumed_step)

    def forget_after(self, step):
        """Drop the metrics of steps that will be run again, and a line that a crash cut short."""
        if not self.main:
            return
        path = self.folder / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                kept += [line] if json.loads(line)["step"] <= step else []
            except (ValueError, KeyError):
                continue
        write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def say(self, text):
        if self.main:
            print(text, flush=True)
            self.append("training.log", text)

    def metrics(self, **values):
        """values: `step`, and numbers, None, or the config."""
        if self.main:
            self.append("metrics.jsonl", json.dumps({k: finite(v) for k, v in values.items()}))

    def append(self, name, line):
        """A log that can't be written (a full disk, say) does not end a run: saving a checkpoint will say so."""
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
