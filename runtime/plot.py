"""Curves of one or several runs, from their metrics.jsonl, as a PNG.

    python -m runtime.plot out/a out/b
    python -m runtime.plot out/a --x=time --output=a.png
    python -m runtime.plot out/a --expected                    in the band of its recipe (runtime/expected.py)

Knobs, as --key=value:
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime import config, expected, guard
from runtime.band import block_mean
from runtime.config import BadInput
from runtime.metrics import read_run
from runtime.usage import load_package


@dataclass
class Config:
    runs: tuple = ()                                 # run folders; usually without --runs=
    x: Literal["steps", "tokens", "time"] = "steps"  # time: minutes in training steps, without evaluations
                                             # and saves
    output: str | None = None                        # None: curves.png in the first run's folder
    expected: bool = False                           # the band in which a run of its recipe should lie, too


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


def draw(runs, x, output, bands=None, dpi=120):
    """Draw a panel a figure, a colour a run; dots are evaluations. runs: {name: lines of metrics}. output: a
    path, or a binary file. bands: {name: {key: the band of a run's figure}}, with the run's means in the band's
    blocks as crosses."""
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
        if bands and "loss" in curves:       # of which a band is a share
            y_scale = "log"
        axis.set_title(title, loc="left", fontsize=10)
        for i, (name, lines) in enumerate(runs.items()):
            for key, style in curves.items():
                xs, ys = points(lines, key, x_key)
                band = (bands or {}).get(name, {}).get(key)
                if band:
                    draw_band(axis, key, band, dict(zip(xs, ys)), f"C{i % 10}")
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


def draw_band(axis, key, band, values, color):
    """Draw the band of a figure, at the middle of each block of steps, and where the run's own means lie.
    values: {step: the run's figure}."""
    middles = [(steps[0] + steps[-1]) / 2 for steps in band["steps"]]
    label = "expected" if key != "val_loss" else None
    axis.fill_between(middles, band["low"], band["high"], color=color, alpha=0.15, linewidth=0, label=label)
    means = [block_mean(key, steps, values) for steps in band["steps"]]
    inside = [(middle, mean) for middle, mean in zip(middles, means) if mean is not None]
    if inside:
        axis.plot(*zip(*inside), "x", color=color, markersize=6)


def check_output(path):
    """Raise BadInput if a file is there that matplotlib did not draw, which signs all but .jpg."""
    if Path(path).exists() and b"Matplotlib" not in Path(path).read_bytes():
        raise config.in_the_way(path, "a picture of matplotlib's")


def bands_of(cfg):
    """Return {run: {key: band}} of the runs that have one, and say of each how it lies in it."""
    if cfg.x != "steps":
        raise BadInput(f"--expected is about steps, not --x={cfg.x}: leave one of them out.")
    known = expected.recipes()
    found = {}
    for name in map(str, cfg.runs):
        run = expected.open_run(name)
        verdict = expected.judge(run, known=known)
        print(expected.sentence(verdict, known))
        if verdict["verdict"] != "no band":
            found[name] = expected.bands_for(run, known[verdict["recipe"]])
    return found


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("Which runs? python -m runtime.plot out/a out/b")
    output = cfg.output or Path(cfg.runs[0]) / "curves.png"
    try:
        check_output(output)
        runs = {str(run): read_run(run) for run in cfg.runs}
        draw(runs, cfg.x, output, bands_of(cfg) if cfg.expected else None)
    except (OSError, ValueError) as e:                    # no such folder, no such format
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"{output} could not be written ({reason}): choose another --output=.") from None
    print(output)
    return 0


if __name__ == "__main__":
    guard.run(main)
