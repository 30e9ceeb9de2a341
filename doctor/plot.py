"""Curves of one or several runs, from their metrics.jsonl, as a PNG.

    python -m doctor.plot out/a out/b
    python -m doctor.plot out/a --x=time --output=a.png
    python -m doctor.plot out/a --expected=quickstart_grpo    with the range of its seeds (expected/seeds)
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime import config, guard
from runtime.config import BadInput, read_json, require
from runtime.log import read_run

SEEDS = Path(__file__).parent.parent / "expected" / "seeds"


@dataclass
class Config:
    runs: tuple = ()                                 # run folders; usually without --runs=
    x: Literal["steps", "tokens", "time"] = "steps"  # time: minutes of training, evaluations excluded
    output: str | None = None                        # None: curves.png in the first run's folder
    expected: str | None = None              # NAME of expected/seeds: shade the range of its seeds


# x: (its key in metrics.jsonl, scale, label)
X_AXES = {
    "steps": ("step", 1, "optimizer step"),
    "tokens": ("tokens", 1e-6, "million tokens"),
    "time": ("seconds", 1 / 60, "minutes of training"),
}
# (title, {key in metrics.jsonl: line style}, scale of the y axis)
LEARNING_RATE = ("learning rate", {"lr": "-"}, "linear")
SPEED = ("tokens/s", {"tokens_per_s": "-"}, "linear")
PANELS = (
    ("loss, nats per token", {"loss": "-", "val_loss": "o--"}, "linear"),
    ("validation perplexity per token", {"val_ppl_token": "o-"}, "log"), LEARNING_RATE, SPEED)
# If all runs are grpo.py's; its loss is not informative.
GRPO_PANELS = (
    ("mean reward", {"reward": "-", "val_reward": "o--"}, "linear"),
    ("held-out accuracy, greedy", {"val_accuracy": "o-"}, "linear"),
    ("tokens per completion", {"completion_tokens": "-"}, "linear"),
    ("entropy, nats per token", {"entropy": "-"}, "linear"),
    ("fraction of zero-variance groups", {"zero_variance": "-"}, "linear"),
    ("gradient norm", {"grad_norm": "-"}, "linear"), LEARNING_RATE, SPEED)


def one_panel(title, width, height):
    """Return (figure, axis) of this size in inches, with a title and no frame. Raises ImportError without
    matplotlib."""
    from matplotlib.figure import Figure     # without pyplot and its notebook backend
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    set_style(axis, title)
    return figure, axis


def set_style(axis, title):
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def points(lines, key, x="steps"):
    """Return (x, y) of a curve, two lists. A line without x (an evaluation of grpo.py) takes that of the
    previous line."""
    x_key, scale, _ = X_AXES[x]
    xs = []
    ys = []
    x = 0
    for line in lines:
        x = line.get(x_key, x)
        if isinstance(line.get(key), int | float):
            xs.append(x * scale)
            ys.append(line[key])
    return xs, ys


def recorded(name):
    """Return the metrics of a recipe's seeds, {key of metrics.jsonl: {steps: [T], runs: [seeds][T]}}."""
    names = sorted(path.stem for path in SEEDS.glob("*.json"))
    if name not in names:
        raise BadInput(f"--expected={name} names no recorded seeds: choose {', '.join(names)}.")
    return read_json(SEEDS / f"{name}.json", "restore it")["figures"]


def compare_with_seeds(lines, figures):
    """Return text: a run's last metrics with the minimum and maximum of the seeds at the same step."""
    parts = []
    for key, figure in figures.items():
        values = dict(zip(*points(lines, key)))
        for step, seeds in reversed(list(zip(figure["steps"], zip(*figure["runs"])))):
            if step in values:
                parts.append(f"{key} {values[step]:.3g} at step {step}, seeds {min(seeds):.3g} to "
                             f"{max(seeds):.3g}")
                break
    return "; ".join(parts) or "no step in common with the seeds"


def draw(runs, x, output, figures=None, dpi=120):
    """Draw one panel per metric and one colour per run; dots are evaluations, with their
    95% intervals. runs: {name: lines of metrics}. output: a path or a binary file. figures: of seeds, see
    `recorded`; their range is shaded."""
    ticker = require("matplotlib.ticker", "The plot can't be drawn")
    Figure = require("matplotlib.figure", "The plot can't be drawn").Figure
    of_grpo = all(any("reward" in line for line in lines) for lines in runs.values())
    panels = GRPO_PANELS if of_grpo else PANELS
    columns = len(panels) // 2
    # without pyplot and its notebook backend
    figure = Figure(figsize=(11 if columns == 2 else 18, 7), layout="constrained")
    axes = figure.subplots(2, columns, sharex=True)
    for (title, curves, y_scale), axis in zip(panels, axes.flat):
        set_style(axis, title)
        for key in curves.keys() & (figures or {}).keys():
            seeds = list(zip(*figures[key]["runs"]))
            axis.fill_between(figures[key]["steps"], list(map(min, seeds)), list(map(max, seeds)),
                              color="gray", alpha=0.25, linewidth=0,
                              label="seeds" if key != "val_loss" else None)
        for i, (name, lines) in enumerate(runs.items()):
            for key, style in curves.items():
                xs, ys = points(lines, key, x)
                if xs:
                    label = f"{name}, validation" if key in ("val_loss", "val_reward") else name
                    axis.plot(xs, ys, style, color=f"C{i % 10}", linewidth=1.2, markersize=4, label=label)
                    low, high = (points(lines, f"{key}_{end}", x)[1] for end in ("low", "high"))
                    if len(low) == len(high) == len(xs):
                        axis.fill_between(xs, low, high, color=f"C{i % 10}", alpha=0.15, linewidth=0)
        axis.set_yscale(y_scale)
        axis.grid(alpha=0.25)
        if y_scale == "log":
            for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                set_formatter(ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4)))
    for axis in axes[1]:
        axis.set_xlabel(X_AXES[x][2])
    axes.flat[-1].yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.flat[-1].set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=dpi)


def check_output(path, option="--output="):
    """Raise BadInput if the file exists and matplotlib did not write it (it signs all formats but .jpg).
    option: the one that names the file."""
    path = Path(path)
    if path.exists() and (not path.is_file() or b"Matplotlib" not in path.read_bytes()):
        raise config.would_overwrite(path, "a plot by matplotlib", option)


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("No run is given: name run folders, such as python -m doctor.plot out/a out/b.")
    if cfg.expected and cfg.x != "steps":
        raise BadInput(f"--expected needs --x=steps, not --x={cfg.x}: leave one of them out.")
    figures = recorded(cfg.expected) if cfg.expected else None
    output = cfg.output or Path(cfg.runs[0]) / "curves.png"
    runs = {str(run): read_run(run) for run in cfg.runs}
    try:
        check_output(output)
        draw(runs, cfg.x, output, figures)
    except (OSError, ValueError) as e:                    # missing folder, unknown format
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"{output} could not be written ({reason}): choose another --output=.") from None
    for name, lines in runs.items() if figures else ():
        print(f"{name}: {compare_with_seeds(lines, figures)}.")
    print(output)
    return 0


if __name__ == "__main__":
    guard.run(main)
