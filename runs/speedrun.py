"""Judge records of the record game (docs/records.md): run candidates and the reference in turn, on two cores.

    python -m runs.speedrun runs/mine.sh      a faster copy of runs/speedrun.sh, in the folder runs of a tree

Several candidates run in turn with one reference. The same call resumes; --seeds=7 adds seeds, another
candidate or an edit begins anew, and another --out_dir= draws other questions and seeds. Each script runs in
a copy of its tree, out_dir/trees/DIGEST. out_dir/speedrun.json has every run, speedrun.log the output.
"""
import json
import os
import re
import shutil
import statistics
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from measure import answers
from measure.ceilings import cpu_name
from measure.gpu.run import error_message, run_process
from measure.intervals import MOST, half_width
from measure.runs import ROOT, aligned, as_flags, end_on_signals, make_folder, process, turned
from runtime import config, guard, lock
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, Bounds
from runtime.progress import ProgressLine
from runs.referee import OUTSIDE, keep_copy

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


def check(paths):
    """Raise BadInput for a script that is not in a tree like this one."""
    for script in paths:
        if not script.is_file() or not (script.parent.parent / "train.py").is_file():
            raise BadInput(f"{script} isn't a file in the folder runs of a tree with train.py: copy "
                           "runs/speedrun.sh there, and edit the copy.")


def copies_of(paths, out):
    """Return {name: path} of scripts in copies of their trees, which later edits do not change."""
    trees = {path.parent.parent for path in paths.values()}
    copies = {tree: out / "trees" / keep_copy(tree, out) for tree in trees}
    return {name: copies[path.parent.parent] / path.parent.name / path.name for name, path in paths.items()}


def run(script, folder, seed, questions):
    """Run a script from an empty folder, and return {"seconds": of the whole script, "exact": share of the
    samples}, or {"failed": message}."""
    shutil.rmtree(folder, ignore_errors=True)              # else a stopped run's tokens would be reused
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    env.pop("OMP_NUM_THREADS", None)
    command = ["bash", str(script), *as_flags(out_dir=folder, seed=seed)]
    log_path = folder.parent / "speedrun.log"
    with open(log_path, "a+", errors="replace") as log, ProgressLine(f"running {script.name}"):
        start = time.perf_counter()
        code, printed = run_process(command, None, log, env)
        seconds = time.perf_counter() - start
    if code != 0:
        message = error_message(printed)
        if code is None or code < 0 or code > 128 or re.search(OUTSIDE, message):
            raise guard.Failure(f"{script} was stopped ({message}): the same call resumes.")
        return {"failed": message}
    options = as_flags(task=TASK, dataset=questions, num_samples=SAMPLES, temperature=1, max_new_tokens=144,
                       seed=seed, device="cpu")
    try:
        said = process([str(ROOT / "eval.py")], [folder / "model", *options, "--json"], CORES)
    except (BadInput, guard.Failure) as e:
        if re.search(OUTSIDE, str(e)):
            raise
        return {"failed": f"eval.py can't read its model: {e}"}
    return {"seconds": seconds, "exact": json.loads(said.splitlines()[-1])["parts"]["exact"]}


def score(runs, reference):
    """Return (ratio of seconds, its low and high bound, mean share of exact answers) of a script's runs
    beside the reference's with the same seeds."""
    logs = np.log([own["seconds"] / other["seconds"] for own, other in zip(runs, reference)])
    mean = logs.mean()
    half = half_width(logs, CONFIDENCE)
    exact = statistics.fmean(one["exact"] for one in runs)
    return np.exp(mean), np.exp(mean - half), np.exp(mean + half), exact


def verdict(name, high, exact):
    """Return the verdict in one sentence."""
    if exact < TARGET:
        return f"{name} is no record: {exact:.1%} of its samples are exact, below {TARGET:.0%}."
    if high >= 1:
        return f"{name} is no record: it is not faster with p < 0.01."
    return f"{name} is a record."


def report(by_name):
    """Print the table and the verdicts of {name: runs}, the reference first."""
    table = [["", "exact, %", "seconds", "of the reference's", f"{CONFIDENCE}% interval"]]
    sentences = []
    for name, runs in by_name.items():
        failed = [seed for seed, one in enumerate(runs) if "failed" in one]
        if failed:
            seed, *_ = failed
            sentences.append(f"{name} is no record: seed {seed} failed ({runs[seed]['failed']}).")
            continue
        ratio, low, high, exact = score(runs, by_name["reference"])
        seconds = statistics.fmean(one["seconds"] for one in runs)
        table.append([name, f"{100 * exact:.1f}", f"{seconds:,.0f}", f"{ratio:.2f}", f"{low:.2f}-{high:.2f}"])
        if name != "reference":
            sentences.append(verdict(name, high, exact))
        elif exact < TARGET:
            sentences.append(f"The reference misses {TARGET:.0%} on this machine.")
    print("", *aligned(table), "", *sentences, sep="\n")


def main(argv):
    end_on_signals()
    candidates = [Path(word).resolve() for word in argv if not word.startswith("--")]
    cfg = config.load(Config, [word for word in argv if word.startswith("--")])
    paths = {"reference": REFERENCE} | {path.stem: path for path in candidates}
    if len(paths) != len(candidates) + 1:
        raise BadInput("Two candidates have one name, or one is called reference: rename one.")
    check(paths.values())
    out = Path(cfg.out_dir).resolve()
    make_folder(out)
    lock.take(out / "speedrun.lock", out)
    scripts = copies_of(paths, out)
    if hasattr(os, "sched_setaffinity"):     # the scripts inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    questions, _ = answers.draw_questions(TASK, QUESTIONS, answers.seed_of(out.name, 1), out)
    first_seed = answers.seed_of(out.name, "seeds")
    path = out / "speedrun.json"
    state = {"cpu": cpu_name(), "runs": {}}
    if path.exists():
        state |= config.read_json(path, "restore it, or choose another --out_dir=")
    if state["cpu"] != cpu_name():
        raise BadInput(f"{path} has seconds of another CPU, {state['cpu']}: choose another --out_dir=.")
    # of what runs in turn
    together = zlib.crc32("".join(str(script.relative_to(out)) for script in scripts.values()).encode())
    names = list(scripts)
    by_name = {name: [] for name in names}
    for number in range(cfg.seeds):
        for name in turned(names, number):
            key = f"{name}-{together:08x}-{number}"
            if key not in state["runs"]:
                one = run(scripts[name], out / key, first_seed + number, questions)
                if "failed" in one and name == "reference":
                    raise guard.Failure(f"{REFERENCE} failed: {one['failed']}")
                state["runs"][key] = one
                write_atomically(path, json.dumps(state, indent=1).encode())
            by_name[name].append(state["runs"][key])
            print(f"{name}, seed {number}: {describe(by_name[name][-1])}", flush=True)
    report(by_name)
    return 0


def describe(one):
    """Return a run in a few words."""
    return one.get("failed") or f"{one['seconds']:,.0f} s, {one['exact']:.1%} exact"


if __name__ == "__main__":
    guard.run(main)
