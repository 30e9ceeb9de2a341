"""Summarise a folder of runs/quickstart.sh: a table, summary.json, summary.png.

    python -m runs.summary out/quickstart
"""
import json
from pathlib import Path

from doctor import plot
from runtime import config, guard, hardware

FIGURES = {"greedy": "greedy", "sampled": "one sample, T = 1", "pass_at_8": "best of 8 samples"}


def last_line(path):
    """Return the JSON object in the last line of eval.py --json."""
    return json.loads(path.read_text().strip().splitlines()[-1])


def summarise(folder):
    """Return (summary, [the intervals of greedy and sampled accuracy] of each stage)."""
    seconds = {}
    for line in (folder / "seconds").read_text().splitlines():
        name, end, begin = line.split()
        seconds[name] = seconds.get(name, 0.0) + float(end) - float(begin)
    took = {"base": seconds["base"], "rft": seconds["datagen"] + seconds["rft"], "grpo": seconds["grpo"]}
    stages = []
    intervals = []
    rows = [last_line(folder / f"{name}.txt")["models"] for name in ("greedy", "sampled")]
    for greedy, sampled in zip(*rows):
        name = Path(greedy["model"]).name
        stages.append({"name": name, "greedy": greedy["accuracy"], "sampled": sampled["accuracy"],
                       "pass_at_8": sampled["pass_at_k"]["8"], "seconds": round(took[name], 1)})
        intervals.append([(row["accuracy_low"], row["accuracy_high"]) for row in (greedy, sampled)])
    total = round(sum(seconds.values()), 1)
    device = hardware.setup().name
    return {"stages": stages, "total_seconds": total, "device": device, "seconds": seconds}, intervals


def draw(summary, intervals, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for i, (stage, bounds) in enumerate(zip(summary["stages"], intervals)):
        heights = [100 * stage[key] for key in FIGURES]
        places = [k + 0.28 * i for k in range(len(FIGURES))]
        color = ("#c4c4c4", "#7fa8d1", "#1f5a99")[i]
        bars = axis.bar(places, heights, 0.26, color=color, label=stage["name"])
        text_color = "white" if i == 2 else "black"
        axis.bar_label(bars, fmt="%.0f", label_type="center", fontsize=10, color=text_color)
        below = [height - 100 * low for height, (low, _) in zip(heights, bounds)]
        above = [100 * high - height for height, (_, high) in zip(heights, bounds)]
        axis.errorbar(places[:2], heights[:2], [below, above], fmt="none", ecolor="black", linewidth=1,
                      capsize=3)
    axis.set_xticks([k + 0.28 for k in range(len(FIGURES))], FIGURES.values())
    axis.set_ylim(0, 105)
    axis.set_title("Right answers of 500 unseen questions, %, with 95% intervals", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", ncols=3)
    figure.savefig(path, dpi=140)


def print_stages(summary):
    print(f"\n{'':6}{'greedy':>9}{'sampled':>9}{'pass@8':>9}{'seconds':>10}")
    for stage in summary["stages"]:
        figures = "".join(f"{100 * stage[key]:8.1f}%" for key in FIGURES)
        print(f"{stage['name']:6}{figures}{stage['seconds']:10.0f}")


def main(folder):
    summary, intervals = summarise(folder)
    path = folder / "summary.json"
    if path.exists() and b"total_seconds" not in path.read_bytes():
        raise config.would_overwrite(path, "the quickstart's", "folder")
    plot.check_output(folder / "summary.png")
    path.write_text(json.dumps(summary, indent=1))
    print_stages(summary)
    print(f"{summary['total_seconds']:.0f} s in all. {folder / 'summary.json'}", end="")
    try:
        draw(summary, intervals, folder / "summary.png")
        print(f", {folder / 'summary.png'}")
    except ImportError as e:
        print(f"; summary.png is not drawn, since matplotlib can't be imported ({e}).")


if __name__ == "__main__":
    guard.run(lambda argv: main(Path(argv[0])))
