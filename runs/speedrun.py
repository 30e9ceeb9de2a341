"""Judge records of the record game (docs/records.md): run candidates and the reference in turn, on two cores.

    python -m runs.speedrun my_speedrun.sh       a faster copy of runs/speedrun.sh, here or in another tree

Several candidates run in turn with one reference. The same call resumes; --seeds=7 adds seeds, and another
--out_dir= draws other questions and seeds. out_dir/speedrun.json has every run.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from measure import answers
from measure.ceilings import cpu_name, git_commit
from measure.intervals import BOUNDS, FEWEST, MOST
from measure.runs import ROOT, aligned, as_flags, process
from runtime import config, guard, lock
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, Bounds
from runtime.progress import ProgressLine

REFERENCE = ROOT / "runs" / "speedrun.sh"
TASK = "unit_conversion"
TARGET = 0.70                                # exact answers among the samples
QUESTIONS = 500
SAMPLES = 8                                  # of a question, at temperature 1
CORES = 2
CONFIDENCE = "99"                            # a record is faster with p < 0.01


@dataclass
class Config:
    out_dir: str = "out/speedrun"            # a folder for each run, and speedrun.json
    seeds: Annotated[int, Bounds(5, MOST)] = 5     # runs of each script


def run(script, folder, seed, questions):
    """Run a script from its start with a seed, and return {"seconds": of the whole script, "exact": share of
    the samples}."""
    start = time.perf_counter()
    command = ["bash", script, *as_flags(out_dir=folder, seed=seed)]
    env = os.environ | {"PYTHON": sys.executable}
    with ProgressLine(f"running {script.name}"):
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    seconds = time.perf_counter() - start
    if done.returncode:
        last, *_ = reversed(done.stderr.strip().splitlines() or ["no message"])
        raise guard.Failure(f"{script} ended with {done.returncode}: {last}")
    options = as_flags(task=TASK, dataset=questions, num_samples=SAMPLES, temperature=1, max_new_tokens=144,
                       seed=seed, device="cpu")
    said = process([str(ROOT / "eval.py")], [folder / "model", *options, "--json"], CORES)
    figures = json.loads(said.splitlines()[-1])
    return {"seconds": seconds, "exact": figures["parts"]["exact"]}


def score(runs, reference):
    """Return (ratio of seconds, its low and high bound, mean share of exact answers) of a script's runs
    beside the reference's with the same seeds."""
    logs = [math.log(own["seconds"] / other["seconds"]) for own, other in zip(runs, reference)]
    multiples, _ = BOUNDS[CONFIDENCE]
    mean = statistics.fmean(logs)
    half = multiples[len(logs) - FEWEST] * statistics.stdev(logs) / math.sqrt(len(logs))
    exact = statistics.fmean(one["exact"] for one in runs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half), exact


def verdict(name, high, exact):
    """Return the verdict in one sentence."""
    if exact < TARGET:
        return f"{name} is no record: {exact:.1%} of its samples are exact, below {TARGET:.0%}."
    if high >= 1:
        return f"{name} is no record: it is not faster with p < 0.01."
    return f"{name} is a record."


def main(argv):
    candidates = [Path(word).resolve() for word in argv if not word.startswith("--")]
    cfg = config.load(Config, [word for word in argv if word.startswith("--")])
    scripts = {"reference": REFERENCE} | {path.stem: path for path in candidates}
    if missing := [str(path) for path in scripts.values() if not path.is_file()]:
        raise BadInput(f"{missing[0]} isn't there: give a copy of runs/speedrun.sh.")
    if len(scripts) != len(candidates) + 1:
        raise BadInput("Two candidates have one name, or one is called reference: rename one.")
    out = Path(cfg.out_dir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    lock.take(out / "speedrun.lock", out)
    if hasattr(os, "sched_setaffinity"):     # the scripts inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    questions, _ = answers.draw_questions(TASK, QUESTIONS, answers.seed_of(out.name, 1), out)
    first_seed = answers.seed_of(out.name, "seeds")
    path = out / "speedrun.json"
    state = {"runs": {}}
    if path.exists():
        state = config.read_json(path, "restore it, or choose another --out_dir=")
    names = list(scripts)
    by_name = {name: [] for name in names}
    for number in range(cfg.seeds):
        for name in names[number % len(names):] + names[:number % len(names)]:
            digest = zlib.crc32(scripts[name].read_bytes())      # an edited script runs anew
            key = f"{name}-{digest:08x}-{number}"
            if key not in state["runs"]:
                state["runs"][key] = run(scripts[name], out / key, first_seed + number, questions)
                state |= {"cpu": cpu_name(), "commit": git_commit()}
                write_atomically(path, json.dumps(state, indent=1).encode())
            one = state["runs"][key]
            by_name[name].append(one)
            print(f"{name}, seed {number}: {one['seconds']:,.0f} s, {one['exact']:.1%} exact", flush=True)
    scores = {name: score(runs, by_name["reference"]) for name, runs in by_name.items()}
    table = [["", "exact, %", "seconds", "of the reference's", f"{CONFIDENCE}% interval"]]
    for name, (ratio, low, high, exact) in scores.items():
        seconds = statistics.fmean(one["seconds"] for one in by_name[name])
        table.append([name, f"{100 * exact:.1f}", f"{seconds:,.0f}", f"{ratio:.2f}", f"{low:.2f}-{high:.2f}"])
    sentences = [verdict(name, *scores[name][2:]) for name in names[1:]]
    print("", *aligned(table), "", *sentences, sep="\n")
    return 0


if __name__ == "__main__":
    guard.run(main)
