"""Runs a recipe with several seeds and writes expected/bands/NAME.json, the band in which another run should
lie (doctor/expected.py says what is in such a file, doctor/band.py how it is computed).

    python -m studies.bands quickstart --seeds="0 1 2 3 4"   quickstart_base, quickstart_rft, quickstart_grpo
    python -m studies.bands cpu_small --dataset=input.txt    seeds 0, 1 and 2
    python -m studies.bands quickstart out/seed0 out/seed1 out/seed2           finished runs: none is started
    python -m studies.bands quickstart_grpo out/a/grpo out/b/grpo out/c/grpo   the same, of one rung alone
    python -m studies.bands quickstart --seeds="5 6" --add=true                more seeds for bands that there are
    python -m studies.bands quickstart --seeds="7 8" --fresh=true              seeds to hold against them

A seed's folder is OUT_DIR/RECIPE/seedN. Seeds that are done are not run again: call it again to go on after a
stop. A folder that is given holds what the recipe's commands leave in theirs. Fresh seeds are no part of a band:
their figures stand beside it, and show how many healthy runs it holds.

Knobs, as --key=value:
"""
import datetime
import json
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from doctor import band, expected
from measure.ceilings import cpu_name, git_commit
from measure.runs import ROOT, logged_process
from runtime import config, guard
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, read_json
from runtime.log import duration

# beside a seed's folder: once it is done, commit, machine and date; what its commands printed
DONE = ".done.json"
LOG = ".log"


@dataclass
class Config:
    words: tuple = ()                        # a recipe's name, then run folders; usually without --words=
    seeds: str = "0 1 2"                     # to run
    out_dir: str = "out/bands"               # of the runs
    add: bool = False                        # the files keep the seeds that they have, and get these as well
    fresh: bool = False                      # the files get these beside their band, to be judged by it
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
    "shakespeare": Recipe(
        "tinyshakespeare on two CPU cores, as far as nanoGPT comes on an A100",
        ("python train.py config/shakespeare.py --dataset={dataset} --out_dir={out} --data_dir={data} "
         "--seed={seed} --resume=auto",),
        {"shakespeare": ("", None)}),
    "countdown": Recipe(
        "Countdown: a small model on the searches of teachers, its own verified searches, reinforcement learning",
        ("bash runs/countdown.sh --out_dir={out} --data_dir={data} --seed={seed}",),
        {"countdown_base": ("base", None), "countdown_rft": ("rft", "countdown_base"),
         "countdown_grpo": ("grpo", "countdown_rft")}),
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
    logged_process(words, command, log, cwd=ROOT, PYTHON=sys.executable)


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

def collect(name, recipe, parent, runs, abouts, earlier=None, fresh=False):
    """Return the content of expected/bands/NAME.json, of Logged runs of different seeds that came to their
    end, and what is known of their folders. earlier: the content that they are added to; fresh: beside its
    band. BadInput if they are not of one recipe."""
    check(name, runs, earlier)
    if fresh:
        new = {str(run.saved["seed"]): figures_of([run]) for run in runs}
        return earlier | {"fresh": earlier.get("fresh", {}) | new}
    new = {"seeds": [run.saved["seed"] for run in runs], "figures": figures_of(runs)}
    seeds_and_figures = join(earlier, new)
    others = [earlier] if earlier else []
    return {
        "what": f"{recipe.what}; {name} with {len(seeds_and_figures['seeds'])} seeds",
        "commands": commands_of(recipe, "out", "data", "SEED", "TEXT"),
        "machine": together(about["machine"] for about in others + abouts),
        "date": together(about["date"] for about in others + abouts),
        "commit": together(about["commit"] for about in others + abouts),
        "stage": runs[0].stage,
        "starts_from": parent,
        "knobs": knobs_without_folders(runs[0]),
        "val_tokens": expected.val_tokens(runs[0]),
        **seeds_and_figures,
        "band": band.bands(seeds_and_figures["figures"]),
        **({"fresh": earlier["fresh"]} if earlier and "fresh" in earlier else {}),
    }


def figures_of(runs):
    """Return {figure: {steps, runs: a row a run}} at the steps that all runs have logged."""
    figures = {}
    for key in expected.FIGURES[runs[0].stage]:
        series = [expected.series(run, key) for run in runs]
        steps = sorted(set.intersection(*(set(values) for values in series)))
        if steps:
            rows = [band.rounded([values[step] for step in steps]) for values in series]
            figures[key] = {"steps": steps, "runs": rows}
    return figures


def join(earlier, new):
    """Return {seeds, figures} of both, at the steps that both have; earlier may be None."""
    if earlier is None:
        return new
    figures = {}
    for key in earlier["figures"].keys() & new["figures"].keys():
        parts = earlier["figures"][key], new["figures"][key]
        steps = sorted(set(parts[0]["steps"]) & set(parts[1]["steps"]))
        rows = []
        for part in parts:
            at = {step: i for i, step in enumerate(part["steps"])}
            rows += [[row[at[step]] for step in steps] for row in part["runs"]]
        figures[key] = {"steps": steps, "runs": rows}
    in_order = {key: figures[key] for key in earlier["figures"] if key in figures}
    return {"seeds": earlier["seeds"] + new["seeds"], "figures": in_order}


def knobs_without_folders(run):
    """Return the knobs that a run depends on, of a text's path the name."""
    knobs = expected.knobs_of(run.saved)
    dataset = knobs["dataset"]
    return knobs | {"dataset": Path(dataset).name if dataset and "task:" not in dataset else dataset}


def check(name, runs, earlier=None):
    """BadInput unless these are finished runs of one recipe, with at least three seeds with those that the
    earlier content has."""
    seeds = seeds_in(earlier) + [run.saved["seed"] for run in runs]
    if len(set(seeds)) < max(3, len(seeds)):
        raise BadInput(f"{name} needs runs of at least three seeds, and no seed twice: these are of "
                       f"{', '.join(map(str, seeds))}.")
    there = earlier["knobs"] if earlier else knobs_without_folders(runs[0])
    whose = f"the file of {name}" if earlier else str(runs[0].folder)
    for run in runs:
        if run.stage != runs[0].stage:
            raise BadInput(f"{run.folder} is a run of {run.stage}, {runs[0].folder} of {runs[0].stage}: "
                           "give runs of one recipe.")
        here = knobs_without_folders(run)
        for knob, value in there.items():
            if here.get(knob, value) != value:
                raise BadInput(f"{run.folder} has {knob}={here[knob]}, {whose} {knob}={value}: "
                               "give runs of one recipe.")
    longest = max(run.last_step for run in runs)
    for run in runs:
        # Of a number of epochs the steps are not known, and examples that were chosen differ in number.
        if run.last_step < (run.saved["max_steps"] or 0.5 * longest):
            raise BadInput(f"{run.folder} has stopped at step {run.last_step}: let it go on to its end, or "
                           "leave it out.")


def seeds_in(content):
    """Return the seeds that a file has, of its band and fresh ones; [] without a file."""
    return content["seeds"] + [int(seed) for seed in content.get("fresh", {})] if content else []


def together(values):
    """Return what all seeds have, or the list of what they have, or None if nobody knows."""
    different = []
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if one not in different:
                different.append(one)
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
    raise BadInput(f"Which recipe? python -m studies.bands NAME, which is one of {', '.join(RECIPES)}.")


def run_seeds(name, recipe, cfg):
    """Run a recipe with all seeds that are not done. Returns their folders."""
    if name not in RECIPES:
        raise BadInput(f"{name} is a part of a recipe: give the folders of its runs, or the name of the "
                       "recipe.")
    if cfg.dataset is None and any("{dataset}" in command for command in recipe.commands):
        raise BadInput(f"{name} is about a text: name it with --dataset=.")
    seeds = cfg.seeds.replace(",", " ").split()
    least = 1 if cfg.add or cfg.fresh else 3
    if len(set(seeds)) < max(least, len(seeds)) or not all(map(str.isdecimal, seeds)):
        raise BadInput(f"--seeds={cfg.seeds} should be at least {least} different whole "
                       f"number{'s' if least > 1 else ''}: --seeds=\"{' '.join('012'[:least])}\".")
    # as seen from the repository, where the commands run
    folder = Path(cfg.out_dir).resolve() / name
    cfg.data_dir = Path(cfg.data_dir).resolve()
    cfg.dataset = cfg.dataset and Path(cfg.dataset).resolve()
    for seed in seeds:
        climb(recipe, folder / f"seed{seed}", seed, cfg)
    return [folder / f"seed{seed}" for seed in seeds]


def earlier_of(names, cfg):
    """Return {band: the content of its file} to add to, or {band: None} if they are written anew."""
    if cfg.add and cfg.fresh:
        raise BadInput("Seeds can't be a part of a band and be judged by it: give --add or --fresh.")
    if not (cfg.add or cfg.fresh):
        return dict.fromkeys(names)
    known = expected.recipes()
    for name in names:
        if name not in known:
            raise BadInput(f"There is no band {name} yet, to which runs could be added: record it first, "
                           "without --add and --fresh.")
    return {name: known[name] for name in names}


def judged(contents):
    """Return {fresh seed: where it left the bands of its runs, in words}. contents: {band: its file's}."""
    found = {}
    for name, content in contents.items():
        for seed, figures in content.get("fresh", {}).items():
            found.setdefault(int(seed), [])
            for key, of_figure in content["band"].items():
                values = dict(zip(figures[key]["steps"], figures[key]["runs"][0]))
                left = band.departures(key, of_figure, values)[:1]
                found[int(seed)] += [f"left {name}: {expected.describe(departure)}" for departure in left]
    return found


def main(argv):
    cfg = config.load(Config, argv, positional="words")
    name, *folders = cfg.words or ("",)
    recipe, places = find(name)
    earlier = earlier_of(places, cfg)
    folders = [Path(folder) for folder in folders] or run_seeds(name, recipe, cfg)
    abouts = [about_folder(folder, cfg) for folder in folders]
    expected.FOLDER.mkdir(parents=True, exist_ok=True)
    contents = {}
    for band_name, (place, parent) in places.items():
        runs = [run_in(folder, place) for folder in folders]
        contents[band_name] = collect(band_name, recipe, parent, runs, abouts, earlier[band_name], cfg.fresh)
    for band_name, content in contents.items():
        path = expected.FOLDER / f"{band_name}.json"
        write_atomically(path, written(content).encode())
        print(path)
    for seed, left in judged(contents).items():
        print(f"seed {seed}: {'; '.join(left) or 'within'}")
    return 0


if __name__ == "__main__":
    guard.run(main)
