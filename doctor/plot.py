"""Curves of one or several runs, from their metrics.jsonl, as a PNG.

    python -m doctor.plot out/a out/b
    python -m doctor.plot out/a --x=time --output=a.png
    python -m doctor.plot out/a --expected=quickstart_grpo    beside the seeds of a recipe (expected/seeds)

Knobs, as --key=value:
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime import config, guard
from runtime.config import BadInput, read_json
from runtime.metrics import read_run
from runtime.usage import load_package

SEEDS = Path(__file__).parent.parent / "expected" / "seeds"


@dataclass
class Config:
    runs: tuple = ()                                 # run folders; usually without --runs=
    x: Literal["steps", "tokens", "time"] = "steps"  # time: minutes in training steps, without evaluations
                                             # and saves
    output: str | None = None                        # None: curves.png in the first run's folder
    expected: str | None = None              # NAME of expected/seeds: shade the range of its seeds


# x: (its key in metrics.jsonl, scale, label)
X_AXES = {
    "steps": ("step", 1, "optimizer step"),
    "tokens": ("tokens", 1e-6, "million tokens"),
    "time": ("seconds", 1 / 60, "minutes of training"),
}
# title, {key in metrics.jsonl: style of its curve}, scale of the y axis
LEARNING_RATE = ("learning rate", {"lr": "-"}, "linear")
SPEED = ("tokens/s", {"tokens_per_s": "-"}, "linear")
PANELS = (
    ("loss, nats a token", {"loss": "-", "val_loss": "o--"}, "linear"),
    ("validation perplexity a token", {"val_ppl_token": "o-"}, "log"),
    LEARNING_RATE,
    SPEED,
)
# of runs of grpo.py alone, whose loss says nothing
GRPO_PANELS = (
    ("reward of a step's samples", {"reward": "-"}, "linear"),
    ("held-out questions right, greedy", {"val_accuracy": "o-"}, "linear"),
    ("tokens of a completion", {"completion_tokens": "-"}, "linear"),
    ("entropy, nats a token", {"entropy": "-"}, "linear"),
    ("groups of equal rewards, of which nothing is learnt", {"zero_variance": "-"}, "linear"),
    ("gradient norm", {"grad_norm": "-"}, "linear"),
    LEARNING_RATE,
    SPEED,
)


def points(lines, key, x_key):
    """Return (x, y) of a curve, two lists; evaluations of grpo.py have the tokens and seconds of the step
    before them."""
    xs = []
    ys = []
    x = 0
    for line in lines:
        x = line.get(x_key, x)
        if isinstance(line.get(key), int | float):
            xs.append(x)
            ys.append(line[key])
    return xs, ys


def recorded(name):
    """Return the figures of a recipe's seeds, {key of metrics.jsonl: {steps: [T], runs: [seeds][T]}}."""
    names = sorted(path.stem for path in SEEDS.glob("*.json"))
    if name not in names:
        raise BadInput(f"--expected={name} names no recorded seeds: choose {', '.join(names)}.")
    return read_json(SEEDS / f"{name}.json", "restore it")["figures"]


def beside_seeds(lines, figures):
    """Return a run's last figures with the least and the most of the seeds at the same step, for people."""
    parts = []
    for key, figure in figures.items():
        values = dict(zip(*points(lines, key, "step")))
        for step, seeds in reversed(list(zip(figure["steps"], zip(*figure["runs"])))):
            if step in values:
                parts.append(f"{key} {values[step]:.3g} at step {step}, seeds {min(seeds):.3g} to {max(seeds):.3g}")
                break
    return "; ".join(parts) or "no step in common with the seeds"


def draw(runs, x, output, figures=None, dpi=120):
    """Draw a panel a figure, a colour a run; dots are evaluations. runs: {name: lines of metrics}. output: a
    path, or a binary file. figures: of a recipe's seeds (see `recorded`), whose range is shaded."""
    try:
        ticker = load_package("matplotlib.ticker")
        Figure = load_package("matplotlib.figure").Figure
    except ImportError as e:
        raise BadInput(f"Nothing can be drawn, since {e}.") from None
    x_key, x_scale, x_label = X_AXES[x]
    of_grpo = all(any("reward" in line for line in lines) for lines in runs.values())
    panels = GRPO_PANELS if of_grpo else PANELS
    columns = len(panels) // 2
    size = (11 if columns == 2 else 18, 7)
    figure = Figure(figsize=size, layout="constrained")        # without pyplot, which has a notebook's backend
    axes = figure.subplots(2, columns, sharex=True)
    for (title, curves, y_scale), axis in zip(panels, axes.flat):
        axis.set_title(title, loc="left", fontsize=10)
        for key in curves.keys() & (figures or {}).keys():
            seeds = list(zip(*figures[key]["runs"]))
            axis.fill_between(figures[key]["steps"], list(map(min, seeds)), list(map(max, seeds)), color="gray",
                              alpha=0.25, linewidth=0, label="seeds" if key != "val_loss" else None)
        for i, (name, lines) in enumerate(runs.items()):
            for key, style in curves.items():
                xs, ys = points(lines, key, x_key)
                if xs:
                    label = f"{name}, validation" if key == "val_loss" else name
                    axis.plot([x * x_scale for x in xs], ys, style, color=f"C{i % 10}", linewidth=1.2,
                              markersize=4, label=label)
        axis.set_yscale(y_scale)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if y_scale == "log":
            for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                formatter = ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4))
                set_formatter(formatter)
    for axis in axes[1]:
        axis.set_xlabel(x_label)
    axes.flat[-1].yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.flat[-1].set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=dpi)


def check_output(path):
    """Raise BadInput if a file is there that matplotlib did not draw, which signs all but .jpg."""
    if Path(path).exists() and b"Matplotlib" not in Path(path).read_bytes():
        raise config.in_the_way(path, "a picture of matplotlib's")


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("Which runs? python -m doctor.plot out/a out/b")
    if cfg.expected and cfg.x != "steps":
        raise BadInput(f"--expected is about steps, not --x={cfg.x}: leave one of them out.")
    figures = recorded(cfg.expected) if cfg.expected else None
    output = cfg.output or Path(cfg.runs[0]) / "curves.png"
    try:
        check_output(output)
        runs = {str(run): read_run(run) for run in cfg.runs}
        draw(runs, cfg.x, output, figures)
    except (OSError, ValueError) as e:                    # no such folder, no such format
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"{output} could not be written ({reason}): choose another --output=.") from None
    for name, lines in runs.items() if figures else ():
        print(f"{name}: {beside_seeds(lines, figures)}.")
    print(output)
    return 0


if __name__ == "__main__":
    guard.run(main)
