"""Summarise a folder of runs/quickstart.sh or runs/smollm2.sh: a table, summary.json, summary.png.

    python -m runs.summary out/quickstart
"""
import json
from functools import partial
from pathlib import Path

from doctor import plot
from runtime import config, guard, hardware

COLORS = ("#c4c4c4", "#a9c2de", "#6b98c9", "#1f5a99")


def figures_of(summary):
    """Return {key of a figure: its name} of the stages."""
    names = {"greedy": "greedy", "sampled": "one sample, T = 1"}
    for key in summary["stages"][0]:
        if key.startswith("pass_at_"):
            names[key] = f"best of {key.removeprefix('pass_at_')} samples"
    return names


def last_line(path):
    """Return the JSON object in the last line of eval.py --json."""
    return json.loads(path.read_text().strip().splitlines()[-1])


def summarise(folder):
    """Return (summary, [the intervals of greedy and sampled accuracy] of each stage)."""
    seconds = {}
    for line in (folder / "seconds").read_text().splitlines():
        name, end, begin = line.split()
        seconds[name] = seconds.get(name, 0.0) + float(end) - float(begin)
    stages = []
    intervals = []
    rows = [last_line(folder / f"{name}.txt")["models"] for name in ("greedy", "sampled")]
    k = max(map(int, rows[1][0]["pass_at_k"]))
    for greedy, sampled in zip(*rows):
        name = Path(greedy["model"]).stem
        took = seconds.get(name, 0.0) + (seconds["datagen"] if name == "rft" else 0.0)
        stages.append({"name": name, "greedy": greedy["accuracy"], "sampled": sampled["accuracy"],
                       f"pass_at_{k}": sampled["pass_at_k"][str(k)], "seconds": round(took, 1)})
        intervals.append([(row["accuracy_low"], row["accuracy_high"]) for row in (greedy, sampled)])
    total = round(sum(seconds.values()), 1)
    device = hardware.setup().name
    return {"stages": stages, "total_seconds": total, "device": device, "seconds": seconds}, intervals


def draw(summary, intervals, path):
    figure, axis = plot.one_panel("Right answers to unseen questions, %, with 95% intervals", 7, 3.6)
    figures = figures_of(summary)
    n = len(summary["stages"])
    width = 0.84 / n
    for i, (stage, bounds) in enumerate(zip(summary["stages"], intervals)):
        heights = [100 * stage[key] for key in figures]
        places = [k + width * i for k in range(len(figures))]
        bars = axis.bar(places, heights, width - 0.02, color=COLORS[i - n], label=stage["name"])
        text_color = "white" if i == n - 1 else "black"
        axis.bar_label(bars, fmt="%.0f", label_type="center", fontsize=10, color=text_color)
        below = [height - 100 * low for height, (low, _) in zip(heights, bounds)]
        above = [100 * high - height for height, (_, high) in zip(heights, bounds)]
        axis.errorbar(places[:2], heights[:2], [below, above], fmt="none", ecolor="black", linewidth=1,
                      capsize=3)
    axis.set_xticks([k + width * (n - 1) / 2 for k in range(len(figures))], figures.values())
    axis.set_ylim(0, 105)
    axis.legend(frameon=False, loc="upper left", ncols=n)
    figure.savefig(path, dpi=140)


def print_stages(summary):
    figures = figures_of(summary)
    names = [key.replace("_at_", "@") for key in figures]
    width = max(6, *(len(stage["name"]) + 2 for stage in summary["stages"]))
    print(f"\n{'':{width}}{''.join(f'{name:>9}' for name in names)}{'seconds':>10}")
    for stage in summary["stages"]:
        shares = "".join(f"{100 * stage[key]:8.1f}%" for key in figures)
        print(f"{stage['name']:{width}}{shares}{stage['seconds']:10.0f}")


def write(folder, summary, report, draw, texts):
    """Write summary.json, {name: text} of more files and summary.png to a folder. report: a function that
    prints the summary; draw: one that draws it, given the path. Raises BadInput for a file of others."""
    path = folder / "summary.json"
    if path.exists() and b"total_seconds" not in path.read_bytes():
        raise config.would_overwrite(path, "a pipeline's", "folder")
    plot.check_output(folder / "summary.png")
    texts = {"summary.json": json.dumps(summary, indent=1)} | texts
    for name, text in texts.items():
        (folder / name).write_text(text)
    report(summary)
    names = ", ".join(f"{folder / name}" for name in texts)
    print(f"{summary['total_seconds']:.0f} s in all. {names}", end="")
    try:
        draw(path=folder / "summary.png")
        print(f", {folder / 'summary.png'}")
    except ImportError as e:
        print(f"; summary.png is not drawn, since matplotlib can't be imported ({e}).")


def main(folder):
    summary, intervals = summarise(folder)
    write(folder, summary, print_stages, partial(draw, summary, intervals), {})


if __name__ == "__main__":
    guard.run(lambda argv: main(Path(argv[0])))
