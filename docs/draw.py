"""Draw the pictures of README.md and docs/ from the figures in expected/.

    python docs/draw.py
"""
import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from studies.domains import draw_cosines, draw_transfer

OURS = "#1b7837"
OTHERS = "#888888"


def recorded(name):
    return json.loads((HERE.parent / "expected" / f"{name}.json").read_text())


def save(figure, name):
    figure.tight_layout()
    (HERE / "pictures").mkdir(exist_ok=True)
    figure.savefig(HERE / "pictures" / f"{name}.png", dpi=110)
    plt.close(figure)


def quickstart():
    """Draw the accuracy after each stage: a bar for the mean of the seeds, a dot for each seed."""
    seeds = recorded("quickstart_seeds")["seeds"].values()
    stages = {"base": "pretrained", "rft": "tuned on its own\nverified answers",
              "grpo": "after reinforcement\nlearning"}
    ways = {"greedy": "greedy", "sampled": "one sample at T = 1", "pass_at_8": "best of 8 samples"}
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for i, (way, label) in enumerate(ways.items()):
        places = [k + 0.27 * (i - 1) for k in range(len(stages))]
        means = [100 * fmean(seed[stage][way] for seed in seeds) for stage in stages]
        axes.bar(places, means, 0.25, label=label, color=OURS, alpha=(0.9, 0.6, 0.3)[i])
        for place, stage, mean in zip(places, stages, means):
            values = [100 * seed[stage][way] for seed in seeds]
            axes.plot([place] * len(seeds), values, ".", color="black", markersize=3)
            axes.text(place, 4, f"{mean:.0f}", ha="center", color="white" if i < 2 else "black")
    axes.set_xticks(range(len(stages)), stages.values())
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 100)
    axes.legend(ncols=3, loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "quickstart")


def grpo():
    """Draw a run's reward and its greedy accuracy on held-out questions."""
    run = recorded("quickstart_grpo")
    figure, axes = plt.subplots(figsize=(8, 3.2))
    axes.plot(run["step"], run["reward"], color=OURS, alpha=0.6, label="reward of the step's samples")
    axes.errorbar(run["val_step"], run["val_accuracy"], yerr=run["val_interval"], fmt="o-", color="black",
                  capsize=3, label="held-out questions right, greedy (95% interval)")
    axes.set_xlabel("step")
    axes.set_ylim(0.55, 0.95)
    axes.legend(frameon=False, loc="upper center", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "grpo")


def shakespeare():
    """Draw validation loss against wall time of nanoRFT and nanoGPT, from the start of Python."""
    runs = recorded("shakespeare_cpu")
    figure, axes = plt.subplots(figsize=(8, 3.2))
    for name, color in (("nanoGPT", OTHERS), ("nanoRFT", OURS)):
        axes.plot(runs[name]["seconds"], runs[name]["val_loss"], "o-", color=color, label=name, markersize=3)
    axes.set_xlabel("seconds since the start of Python")
    axes.set_ylabel("validation loss, nats a character")
    axes.set_ylim(1.8, 2.6)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "shakespeare")


def shakespeare_on_a_gpu():
    """Draw validation loss of nanoGPT's two recipes and config/shakespeare.py in equal time on two CPU
    cores."""
    curves = recorded("shakespeare")["curves"]
    figure, axes = plt.subplots(figsize=(8, 3.6))
    styles = {
        "nanoGPT, its GPU recipe": (OTHERS, "o:"),
        "nanoGPT, its CPU recipe, stretched": (OTHERS, "o-"),
        "nanoRFT, config/shakespeare.py": (OURS, "o-"),
    }
    for name, (color, style) in styles.items():
        minutes = [seconds / 60 for seconds in curves[name]["seconds"]]
        axes.plot(minutes, curves[name]["val_loss"], style, color=color, label=name, markersize=3)
    axes.axhline(1.4697, color="black", linewidth=0.8, linestyle="--")
    published = "1.4697: nanoGPT's GPU recipe, three minutes on an A100 (published)"
    axes.text(0, 1.455, published, fontsize=8, va="top")
    axes.set_xlabel("minutes since the start of Python, two CPU cores")
    axes.set_ylabel("validation loss, nats a character")
    axes.set_ylim(1.35, 2.7)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "shakespeare_on_a_gpu")


def domains():
    """Draw the cosines of six domains' gradients, and the change of all domains by training on one."""
    runs = recorded("domains")
    conflicts = {int(step): share for step, share in runs["conflicts"].items()}
    cosines = {}
    for pair, steps in runs["cosines"].items():
        cosines[pair] = {int(step): cosine for step, cosine in steps.items()}
    draw_cosines(cosines, conflicts, HERE / "pictures" / "domains_cosines.png")
    draw_transfer(runs["sampled"]["transfer"], HERE / "pictures" / "domains_transfer.png")


if __name__ == "__main__":
    quickstart()
    grpo()
    shakespeare()
    shakespeare_on_a_gpu()
    domains()
