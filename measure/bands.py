"""Runs a recipe with several seeds and writes expected/bands/NAME.json, the band in which another run should
lie (runtime/expected.py says what is in such a file, runtime/band.py how it is computed).

    python -m measure.bands quickstart --seeds="0 1 2 3 4"   quickstart_base, quickstart_rft, quickstart_grpo
    python -m measure.bands cpu_small --dataset=input.txt    seeds 0, 1 and 2
    python -m measure.bands quickstart out/seed0 out/seed1 out/seed2           finished runs: none is started
    python -m measure.bands quickstart_grpo out/a/grpo out/b/grpo out/c/grpo   the same, of one rung alone

A seed's folder is OUT_DIR/RECIPE/seedN. Seeds that are done are not run again: call it again to go on after a
stop. A folder that is given holds what the recipe's commands leave in theirs.

Knobs, as --key=value:
"""
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from measure.ceilings import cpu_name, git_commit
from measure.runs import ROOT
from runtime import band, config, expected, guard
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, read_json
from runtime.guard import Failure
from runtime.log import duration

# beside a seed's folder: once it is done, commit, machine and date; what its commands printed
DONE = ".done.json"
LOG = ".log"


@dataclass
class Config:
    words: tuple = ()                        # a recipe's name, then run folders; usually without --words=
    seeds: str = "0 1 2"                     # to run
    out_dir: str = "out/bands"               # of the runs
    data_dir: str = "data"                   # where tokenised texts are kept
    dataset: str | None = None               # the text, of recipes that are about one
    commit: str | None = None                # of the folders that are given, where they do not say it
    machine: str | None = None               # the same


@dataclass
class Recipe:
    """Commands that climb a recipe's ladder with one seed, and the runs that they leave: {name of the band:
    (pattern of its folder, name of the band that its model comes from, or None)}."""
    what: str
    commands: tuple
    runs: dict


RECIPES = {
    "quickstart": Recipe(
        "the quickstart: a small model from scratch, its own verified answers, reinforcement learning",
        ("bash runs/quickstart.sh --out_dir={out} --data_dir={data} --seed={seed}",),
        {"quickstart_base": ("base", None), "quickstart_rft": ("rft", "quickstart_base"),
         "quickstart_grpo": ("grpo", "quickstart_rft")}),
    "chess": Recipe(
        "a small model that is chess's environment, and its reinforcement learning",
        ("python train.py config/chess_mini.py --out_dir={out}/base --data_dir={data} --seed={seed} "
         "--resume=auto",
         "python grpo.py config/chess_mini_grpo.py --init_from={out}/base --out_dir={out}/grpo --seed={seed} "
         "--resume=auto"),
        {"chess_mini": ("base", None), "chess_mini_grpo": ("grpo", "chess_mini")}),
    "wikitext2_cpu": Recipe(
        "WikiText-2 with GPT-2's tokenizer on a CPU",
        ("python train.py config/wikitext2_cpu.py --dataset={dataset} --out_dir={out} --data_dir={data} "
         "--seed={seed} --resume=auto",),
        {"wikitext2_cpu": ("", None)}),
    "cpu_small": Recipe(
        "a character-level model of tinyshakespeare on a CPU",
        ("python train.py config/cpu_small.py --dataset={dataset} --out_dir={out} --data_dir={data} "
         "--seed={seed} --resume=auto",),
        {"cpu_small": ("", None)}),
    "six_domains": Recipe(
        "six domains in one model: from scratch, its own verified answers, reinforcement learning on all six",
        ("bash runs/domains.sh --out_dir={out} --data_dir={data} --seed={seed} --seeds={seed}",),
        {"six_domains_base": ("base", None), "six_domains_rft": ("rft", "six_domains_base"),
         "six_domains_grpo": ("mixed[0-9]*", "six_domains_rft")}),
}


# --- runs ---

def climb(recipe, folder, seed, cfg):
    """Run the recipe's commands with a seed, unless that is done. What they print goes to a file beside the
    folder."""
    done = beside(folder, DONE)
    if done.exists():
        print(f"{folder} is done.", flush=True)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for command in commands_of(recipe, folder, cfg.data_dir, seed, cfg.dataset):
        print(f"{command} > {beside(folder, LOG)}", flush=True)
        run(command, beside(folder, LOG))
    about = {"commit": git_commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
    write_atomically(done, json.dumps(about, indent=1).encode())
    print(f"{folder} took {duration(time.perf_counter() - start)}.", flush=True)


def beside(folder, ending):
    return folder.parent / (folder.name + ending)


def commands_of(recipe, out, data, seed, dataset):
    """Return a recipe's commands with these in their places."""
    places = {"out": out, "data": data, "seed": seed, "dataset": dataset}
    quoted = {key: shlex.quote(str(place)) for key, place in places.items()}
    return [command.format(**quoted) for command in recipe.commands]


def run(command, log):
    """Run a command in the repository with this Python; Failure with its last line if it fails."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    with open(log, "a") as output:
        code = subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                              env=os.environ | {"PYTHON": sys.executable}).returncode
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise Failure(f"{command} ended with {code}, after: {last}")


def machine():
    python = platform.python_version()
    return f"{os.cpu_count()} cores, {cpu_name()}, torch {version('torch')}, Python {python}"


def about_folder(folder, cfg):
    """Return {commit, machine, date} of a seed's folder; None where neither it nor a knob says so."""
    if beside(folder, DONE).exists():
        return read_json(beside(folder, DONE), "remove it, and the seed is run again")
    written = max((log.stat().st_mtime for log in folder.glob("**/metrics.jsonl")), default=0)
    date = datetime.date.fromtimestamp(written).isoformat()
    return {"commit": cfg.commit, "machine": cfg.machine, "date": date}


# --- the file ---

def collect(name, recipe, parent, runs, abouts):
    """Return the content of expected/bands/NAME.json, of Logged runs of different seeds that came to their
    end, and what is known of their folders. BadInput if they are not."""
    check(name, runs)
    figures = {}
    for key in expected.FIGURES[runs[0].stage]:
        series = [expected.series(run, key) for run in runs]
        steps = sorted(set.intersection(*(set(values) for values in series)))
        if steps:
            rows = [band.rounded([values[step] for step in steps]) for values in series]
            figures[key] = {"steps": steps, "runs": rows}
    return {
        "what": f"{recipe.what}; {name} with {len(runs)} seeds",
        "commands": commands_of(recipe, "out", "data", "SEED", "TEXT"),
        "machine": together(about["machine"] for about in abouts),
        "date": together(about["date"] for about in abouts),
        "commit": together(about["commit"] for about in abouts),
        "stage": runs[0].stage,
        "starts_from": parent,
        "knobs": knobs_without_folders(runs[0]),
        "val_tokens": expected.val_tokens(runs[0]),
        "seeds": [run.saved["seed"] for run in runs],
        "figures": figures,
        "band": band.bands(figures),
    }


def knobs_without_folders(run):
    """Return the knobs that a run depends on, of a text's path the name."""
    knobs = expected.knobs_of(run.saved)
    dataset = knobs["dataset"]
    return knobs | {"dataset": Path(dataset).name if dataset and "task:" not in dataset else dataset}


def check(name, runs):
    """BadInput unless these are finished runs of one recipe with at least three seeds."""
    seeds = {run.saved["seed"] for run in runs}
    if len(seeds) < max(3, len(runs)):
        raise BadInput(f"{name} needs runs of at least three seeds, and no seed twice: these are of "
                       f"{', '.join(str(run.saved['seed']) for run in runs)}.")
    for other in runs[1:]:
        if other.stage != runs[0].stage:
            raise BadInput(f"{other.folder} is a run of {other.stage}, {runs[0].folder} of {runs[0].stage}: "
                           "give runs of one recipe.")
        here = knobs_without_folders(other)
        for knob, value in knobs_without_folders(runs[0]).items():
            if here.get(knob, value) != value:
                raise BadInput(f"{other.folder} has {knob}={here[knob]}, {runs[0].folder} {knob}={value}: "
                               "give runs of one recipe.")
    longest = max(run.last_step for run in runs)
    for run in runs:
        # Of a number of epochs the steps are not known, and examples that were chosen differ in number.
        if run.last_step < (run.saved["max_steps"] or 0.8 * longest):
            raise BadInput(f"{run.folder} has stopped at step {run.last_step}: let it go on to its end, or "
                           "leave it out.")


def together(values):
    """Return what all seeds have, or the list of what they have, or None if nobody knows."""
    different = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


def written(content):
    """Return JSON with a line for each list of numbers."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def run_in(folder, place):
    """Return the run that a seed's folder has at a place, a pattern; "": the folder itself."""
    return expected.open_run(next(iter(sorted(folder.glob(place))), folder / place) if place else folder)


def find(name):
    """Return the Recipe of a name, which is its own or that of one of its bands, and the runs to collect, as
    Recipe has them."""
    if name in RECIPES:
        return RECIPES[name], RECIPES[name].runs
    for recipe in RECIPES.values():
        if name in recipe.runs:
            return recipe, {name: ("", recipe.runs[name][1])}
    raise BadInput(f"Which recipe? python -m measure.bands NAME, which is one of {', '.join(RECIPES)}.")


def run_seeds(name, recipe, cfg):
    """Run a recipe with all seeds that are not done. Returns their folders."""
    if name not in RECIPES:
        raise BadInput(f"{name} is a part of a recipe: give the folders of its runs, or the name of the "
                       "recipe.")
    if cfg.dataset is None and any("{dataset}" in command for command in recipe.commands):
        raise BadInput(f"{name} is about a text: name it with --dataset=.")
    seeds = cfg.seeds.replace(",", " ").split()
    if len(set(seeds)) < max(3, len(seeds)) or not all(map(str.isdecimal, seeds)):
        raise BadInput(f"--seeds={cfg.seeds} should be at least three different whole numbers: "
                       '--seeds="0 1 2".')
    # as seen from the repository, where the commands run
    folder = Path(cfg.out_dir).resolve() / name
    cfg.data_dir = Path(cfg.data_dir).resolve()
    cfg.dataset = cfg.dataset and Path(cfg.dataset).resolve()
    for seed in seeds:
        climb(recipe, folder / f"seed{seed}", seed, cfg)
    return [folder / f"seed{seed}" for seed in seeds]


def main(argv):
    cfg = config.load(Config, argv, positional="words")
    name, *folders = cfg.words or ("",)
    recipe, places = find(name)
    folders = [Path(folder) for folder in folders] or run_seeds(name, recipe, cfg)
    abouts = [about_folder(folder, cfg) for folder in folders]
    expected.FOLDER.mkdir(parents=True, exist_ok=True)
    for band_name, (place, parent) in places.items():
        runs = [run_in(folder, place) for folder in folders]
        path = expected.FOLDER / f"{band_name}.json"
        write_atomically(path, written(collect(band_name, recipe, parent, runs, abouts)).encode())
        print(path)
    return 0


if __name__ == "__main__":
    guard.run(main)
