"""Compare the --loss_type values of grpo.py over several seeds, from one model and on the same questions.

    bash runs/quickstart.sh
    python -m studies.objectives out/quickstart/rft out/objectives

Runs use --mini_batches=4: with one optimizer step a rollout all ratios are 1, and dapo and cispo are equal (a
test checks that). Finished runs are not repeated. The table has the accuracy on test questions sampled at T =
1 and the difference from dapo with the same seed, as means over seeds with Student's 95% interval; a
difference whose interval contains 0 is a tie.
"""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from statistics import fmean

from measure.runs import as_flags, process
from runtime import config, guard
from runtime.config import BadInput, Bounds
from runtime.metrics import read_lines
from studies.domains import cell, over_seeds

# {name: options}; published GRPO divides by the group's standard deviation, cispo clips only large ratios
OBJECTIVES = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "advantage_scale": "group", "clip_high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "clip_high": 0.2},
    "cispo": {"loss_type": "cispo", "clip_high": 4.0},
}


@dataclass
class Config:
    folders: tuple = ()                      # the model to start from, and the output folder
    config: str = "config/grpo.py"
    seeds: Annotated[int, Bounds(2)] = 5
    mini_batches: int = 4
    max_steps: int | None = None             # None: the config's
    num_questions: int = 500                 # of split test
    num_samples: int = 8                     # of each question
    ranks: int = 2                           # processes, a core each
    device: str = "cpu"


def train(cfg, model, out, name, seed):
    """Start or resume a grpo.py run."""
    flags = as_flags(init_from=model, out_dir=out, seed=seed, resume="auto", mini_batches=cfg.mini_batches,
                     device=cfg.device, **OBJECTIVES[name])
    if cfg.max_steps:
        flags += as_flags(max_steps=cfg.max_steps)
    process(["grpo.py"], [cfg.config, *flags], cfg.ranks)
    (out / "done").touch()


def evaluate(cfg, model, folder, seed):
    """Return {objective, or "before" for the initial model: figures of eval.py, compared with the first}."""
    path = folder / f"seed{seed}.json"
    if not path.exists():
        models = [folder / f"{name}{seed}" for name in OBJECTIVES] + [model]
        printed = process(["eval.py"], ["--compare", *models, "--json", *as_flags(
            num_questions=cfg.num_questions, num_samples=cfg.num_samples, temperature=1, device=cfg.device,
            task="unit_conversion", max_new_tokens=144)], cfg.ranks)
        path.write_text(next(line for line in printed.splitlines() if line.startswith("{")))
    rows = json.loads(path.read_text())["models"]
    return dict(zip([*OBJECTIVES, "before"], rows))


def cost(run):
    """Return (seconds of a run's steps, mean share of clipped tokens)."""
    steps = [line for line in read_lines(run) if line.get("clip_fraction") is not None]
    return steps[-1]["seconds"], fmean(line["clip_fraction"] for line in steps)


def table(cfg, folder, found):
    """Print a row for each objective, and return the rows."""
    print(f"\n{'':10}{'accuracy, %':>22}{'- dapo, points':>24}{'clipped':>10}{'seconds':>10}")
    rows = {}
    for name in OBJECTIVES:
        accuracies = [of_seed[name]["accuracy"] for of_seed in found]
        gains = [accuracy - of_seed["dapo"]["accuracy"] for accuracy, of_seed in zip(accuracies, found)]
        seconds, clipped = map(fmean, zip(*(cost(folder / f"{name}{seed}") for seed in range(cfg.seeds))))
        rows[name] = {"accuracy": over_seeds(accuracies), "difference": over_seeds(gains),
                      "of_each_seed": accuracies, "clip_fraction": clipped, "seconds": seconds}
        tie = rows[name]["difference"][1] <= 0 <= rows[name]["difference"][2]
        against = "" if name == "dapo" else cell(*rows[name]["difference"], "+") + (" tie" if tie else "")
        print(f"{name:10}{cell(*rows[name]['accuracy']):>22}{against:>24}{clipped:>10.2%}{seconds:>10.0f}")
    before = found[0]["before"]["accuracy"]
    print(f"before    {100 * before:.1f}; {cfg.seeds} seeds, {cfg.mini_batches} mini-batches.")
    return rows


def main(argv):
    cfg = config.load(Config, argv, positional="folders")
    if len(cfg.folders) != 2:
        raise BadInput("Give a model and an output folder: python -m studies.objectives out/quickstart/rft "
                       "out/objectives")
    model, folder = map(Path, cfg.folders)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(cfg.seeds):
        for name in OBJECTIVES:              # alternating, so that drift of the machine affects all alike
            out = folder / f"{name}{seed}"
            if not (out / "done").exists():
                train(cfg, model, out, name, seed)
                print(f"{name}, seed {seed}: {cost(out)[0]:.0f} s", flush=True)
    found = [evaluate(cfg, model, folder, seed) for seed in range(cfg.seeds)]
    (folder / "summary.json").write_text(json.dumps(table(cfg, folder, found), indent=1))
    return 0


if __name__ == "__main__":
    guard.run(main)
