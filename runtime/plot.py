"""Curves of one or several runs, from their metrics.jsonl, as a PNG.

    python -m runtime.plot out/a out/b
    python -m runtime.plot out/a --x=time --output=a.png

Knobs, as --key=value:
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime import config, guard
from runtime.config import BadInput, parse_json


@dataclass
class Config:
    runs: tuple = ()                                 # run folders; usually without --runs=
    x: Literal["steps", "tokens", "time"] = "steps"  # time: minutes in training steps, without evaluations
                                             # and saves
    output: str | None = None                        # None: curves.png in the first run's folder


# x: (its key in metrics.jsonl, scale, label)
X_AXES = {
    "steps": ("step", 1, "optimizer step"),
    "tokens": ("tokens", 1e-6, "million tokens"),
    "time": ("seconds", 1 / 60, "minutes of training"),
}
# title, {key in metrics.jsonl: style of its curve}, scale of the y axis
PANELS = (
    ("loss, nats a token", {"loss": "-", "val_loss": "o--"}, "linear"),
    ("validation perplexity a token", {"val_ppl_token": "o-"}, "log"),
    ("learning rate", {"lr": "-"}, "linear"),
    ("tokens/s", {"tokens_per_s": "-"}, "linear"),
)


def read(run):
    """Return the lines of a run's metrics.jsonl that a crash has not cut short, as dictionaries. BadInput if
    there is no such file, or no step in it."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise BadInput(f"{run} is not the folder of a run (it has no metrics.jsonl): give the out_dir of "
                       "one.")
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(parse_json(line, dict))
        except ValueError:
            continue
    if not any("loss" in line for line in lines):
        raise BadInput(f"{run} has logged no step yet: wait until it has.")
    return lines


def draw(runs, x, output):
    """Draw four panels, a colour a run; dots are evaluations. runs: {name: lines of metrics}."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput("runtime.plot needs a package that is not installed: pip install "
                       "matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    x_key, x_scale, x_label = X_AXES[x]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for (title, curves, y_scale), axis in zip(PANELS, axes.flat):
        axis.set_title(title, loc="left", fontsize=10)
        for i, (name, lines) in enumerate(runs.items()):
            for key, style in curves.items():
                xs = []
                ys = []
                for line in lines:
                    if isinstance(line.get(key), int | float) and x_key in line:
                        xs.append(line[x_key] * x_scale)
                        ys.append(line[key])
                if xs:
                    label = f"{name}, validation" if key == "val_loss" else name
                    axis.plot(xs, ys, style, color=f"C{i % 10}", linewidth=1.2, markersize=4, label=label)
        axis.set_yscale(y_scale)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel(x_label)
    perplexity = axes[0, 1].yaxis
    for set_formatter in (perplexity.set_major_formatter, perplexity.set_minor_formatter):
        set_formatter(matplotlib.ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4)))
    axes[1, 1].yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes[1, 1].set_ylim(bottom=0)
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.savefig(output, dpi=120)


def check_output(path):
    """Raise BadInput if a file is there that matplotlib did not draw, which signs all but .jpg."""
    if Path(path).exists() and b"Matplotlib" not in Path(path).read_bytes():
        raise config.in_the_way(path, "a picture of matplotlib's")


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("Which runs? python -m runtime.plot out/a out/b")
    output = cfg.output or Path(cfg.runs[0]) / "curves.png"
    try:
        check_output(output)
        draw({str(run): read(run) for run in cfg.runs}, cfg.x, output)
    except (OSError, ValueError) as e:                    # no such folder, no such format
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"{output} could not be written ({reason}): choose another --output=.") from None
    print(output)
    return 0


if __name__ == "__main__":
    guard.run(main)
