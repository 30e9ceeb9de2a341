"""Summarise a folder of runs/quickstart.sh or runs/smollm2.sh: a table, summary.json, summary.png.

    python -m runs.summary out/quickstart
"""
import json
from functools import partial
from itertools import accumulate
from pathlib import Path

from doctor import plot
from runtime import config, guard, hardware
from runtime.config import BadInput

NEEDED = ("seconds", "greedy.txt", "sampled.txt")
COLORS = ("#1f5a99", "#7fa8d1", "#b0b0b0")       # of the figures


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
    """Return (summary, [the intervals of greedy and sampled accuracy] of each stage); BadInput for a folder
    without them."""
    for name in NEEDED:
        if not (folder / name).is_file() or not (folder / name).read_text().strip():
            raise BadInput(f"{folder}/{name} is not there yet: let the pipeline end, or give its folder.")
    seconds = {}
    for line in (folder / "seconds").read_text().splitlines():
        name, end, begin = line.split()
        seconds[name] = seconds.get(name, 0.0) + float(end) - float(begin)
    stages = []
    intervals = []
    rows = [last_line(folder / f"{name}.txt")["models"] for name in ("greedy", "sampled")]
    k = max(map(int, rows[1][0]["pass_at_k"]))
    for greedy, sampled in zip(*rows):
        name = Path(greedy["model"]).name.removesuffix(".gguf")
        took = seconds.get(name, 0.0) + (seconds["datagen"] if name == "rft" else 0.0)
        stages.append({"name": name, "greedy": greedy["accuracy"], "sampled": sampled["accuracy"],
                       f"pass_at_{k}": sampled["pass_at_k"][str(k)], "seconds": round(took, 1)})
        intervals.append([(row["accuracy_low"], row["accuracy_high"]) for row in (greedy, sampled)])
    total = round(sum(seconds.values()), 1)
    device = hardware.setup().name
    return {"stages": stages, "total_seconds": total, "device": device, "seconds": seconds}, intervals


def draw(summary, intervals, path, curve=(), level=()):
    """Draw accuracy over wall time, a point at the end of each stage. curve: [(seconds since its start,
    share)] of the last stage; level: (share, its name) of a horizontal line."""
    title = "Right answers to unseen questions, %, with 95% intervals"
    figure, axis = plot.one_panel(title, 7, 3.8)
    ends = [seconds / 60 for seconds in accumulate(stage["seconds"] for stage in summary["stages"])]
    for k, (key, name) in enumerate(figures_of(summary).items()):
        heights = [100 * stage[key] for stage in summary["stages"]]
        bounds = None                                    # pass@k has no interval
        if k < 2:
            bounds = [[height - 100 * of_stage[k][0] for height, of_stage in zip(heights, intervals)],
                      [100 * of_stage[k][1] - height for height, of_stage in zip(heights, intervals)]]
        axis.errorbar(ends, heights, bounds, fmt="o-", color=COLORS[k], capsize=3, label=name)
    if curve:
        minutes = [ends[-2] + seconds / 60 for seconds, _ in curve]
        axis.plot(minutes, [100 * share for _, share in curve], color=COLORS[1], linewidth=0.8,
                  label="samples to train on")
    if level:
        axis.axhline(100 * level[0], color="black", linestyle=":", linewidth=1, label=level[1])
    for end, stage in zip(ends, summary["stages"]):
        axis.annotate(stage["name"], (end, 2), ha="right", fontsize=9)
        axis.axvline(end, color="#e0e0e0", linewidth=1, zorder=0)
    axis.set_ylim(0, 100)
    axis.set_xlim(0, None)
    axis.set_xlabel("minutes of training and sampling")
    axis.legend(frameon=False, fontsize=8, loc="center left")
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
    plot.check_output(folder / "summary.png", "folder")
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


def main(argv):
    if len(argv) != 1:
        raise BadInput("Give the folder of a pipeline: python -m runs.summary out/quickstart")
    folder = Path(argv[0])
    summary, intervals = summarise(folder)
    write(folder, summary, print_stages, partial(draw, summary, intervals), {})


if __name__ == "__main__":
    guard.run(main)
