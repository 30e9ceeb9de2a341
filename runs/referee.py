"""Compare candidate trees with the best so far, each trained by its own code; keep the better (program.md).

    python -m runs.referee experiments/night.py --candidate=../night --candidate="5f3c2a1: a higher rate"

A candidate is a folder, with its edits, or a commit of this repository; text behind ": " describes it. The
best is this tree at first. Other options are compare.py's; arms and controls have no effect. The same call
resumes. out_dir gets log.txt, decisions/, and trees/ by digests, which git diff takes.
"""
import os
import re
import shlex
import statistics
import subprocess
import time
from pathlib import Path

import compare
from compare import ROOT
from measure import answers, intervals
from measure.runs import end_on_signals, make_folder
from runtime import checkpoint, config, guard, lock

# errors that are not a candidate's fault: a kill, a full disk
OUTSIDE = "Another run|not be written|ended with -|exitcode +: -"


def git(out, *words):
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True,
                          env=os.environ | {"GIT_INDEX_FILE": str(out / "index")})
    if done.returncode:
        raise config.BadInput(f"git fails ({done.stderr.strip()}): give a folder, or a commit of {ROOT}.")
    return done.stdout


def keep_copy(tree, out):
    """Copy a tree, but no page or test, to out/trees/DIGEST, and return the digest, git's of these files."""
    folder = Path(tree).resolve()
    git(out, *([f"--work-tree={folder}", "add", "--all"] if folder.is_dir() else ["read-tree", tree]))
    own = [str(out.relative_to(folder))] if out.is_relative_to(folder) else []
    git(out, "rm", "-rf", "--cached", "--ignore-unmatch", "docs", "experiments", "notebooks", "tests", "*.md",
        "*.log", "*.out", *own)
    digest = git(out, "write-tree")[:12]
    git(out, "checkout-index", "--all", "--force", f"--prefix={out}/trees/{digest}/")
    return digest


def in_tree(command, tree):
    """Return a command with a tree's scripts, which import from their own folder, and its config files."""
    return " ".join(shlex.quote(str(tree / word)) if (ROOT / word).is_file() else word
                    for word in command.split(" "))


def is_hopeless(figures, cfg):
    """Tell whether a candidate with these figures and their spread becomes better within cfg.seeds with a
    probability below 5% (predictive power, Spiegelhalter et al. 1986)."""
    seeds = figures["seeds"]
    rise = 1.645 * statistics.stdev(figures["by_seed"]) * (1 / seeds - 1 / cfg.seeds)**0.5
    needed = intervals.more_seeds(figures, figures["difference"] + rise, cfg.confidence)
    return needed is None or seeds + needed > cfg.seeds


def decide(cfg, trees):
    """Run trees {"base": folder, "candidate": folder} in turn, and return the verdict and its figures."""
    runs = compare.Comparison(cfg, {arm: in_tree(cfg.command, tree) for arm, tree in trees.items()}, cfg.task)
    runs.first_seed = answers.seed_of(runs.out.name, "seeds")              # others for each decision
    for seed in range(cfg.seeds):
        try:
            runs.run_all(seed)
            if seed + 1 < intervals.FEWEST:
                continue
            runs.running = "candidate"       # its records may be unreadable
            shares, seconds, _ = runs.figures()
        except (config.BadInput, guard.Failure, LookupError, ValueError, ArithmeticError) as e:
            if runs.running != "candidate" or re.search(OUTSIDE, str(e)):
                raise
            return f"failed  {type(e).__name__}: {e}"
        figures = compare.verdicts(cfg, shares, seconds)[0]["candidate", "base"]
        if figures["verdict"] != "tie" or is_hopeless(figures, cfg):
            break
    return (f"{figures['verdict']:6}  {intervals.points(figures)}, {seed + 1} seeds, "
            f"{seconds['candidate']:,.0f} s, best {seconds['base']:,.0f} s")


def main(argv):
    candidates = [word.partition("=")[2] for word in argv if word.startswith("--candidate=")]
    if not candidates:
        print(__doc__)
        return 0
    end_on_signals()
    cfg = config.load(compare.Config, [*(word for word in argv if "--candidate=" not in word), "--controls="])
    compare.check(cfg, {"base": cfg.command})
    out = Path(cfg.out_dir).resolve()
    make_folder(out)
    lock.take(out / "referee.lock", out)
    log = out / "log.txt"
    own = keep_copy(ROOT, out)
    lines = log.read_text().splitlines() if log.exists() else [f"{time.strftime('%F %R')}  {own}  first"]
    if own != lines[0].split()[2]:
        raise config.BadInput(f"{ROOT} isn't {log}'s first tree: restore it, or give another --out_dir=.")
    for candidate in candidates:
        path, _, change = " ".join(candidate.split()).partition(": ")
        digest = keep_copy(path, out)
        if earlier := [line for line in lines if line.split()[2] == digest]:
            print(f"{path} is a tree that has run, and none runs twice: {earlier[0]}")
            continue
        best = [line.split()[2] for line in lines if line.split()[3] in ("first", "better")][-1]
        files = git(out, "diff-tree", "-r", "--name-only", best, digest).split()
        cfg.out_dir = str(out / "decisions" / f"{out.name}-{digest}-{best}")     # the name draws the seeds
        verdict = decide(cfg, {"base": out / "trees" / best, "candidate": out / "trees" / digest})
        lines.append(f"{time.strftime('%F %R')}  {digest}  {verdict}  {change} ({', '.join(files)})")
        checkpoint.write_atomically(log, "".join(f"{line}\n" for line in lines).encode())
        print(lines[-1], flush=True)
    return 0


if __name__ == "__main__":
    guard.run(main)
