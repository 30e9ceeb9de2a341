"""Grade the recorded completions of a run again, by another task or by a changed verifier.

    python -m doctor.regrade out/grpo --task=my_task.py
    python -m doctor.regrade data/rft.attempts.jsonl --task=unit_conversion

Prints how many rewards differ, how many advantages change their sign, and the clearest cases; writes the
other scores into regrade.json beside the records, which doctor.page shows.
"""
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

from rollouts import records
from rollouts.questions import task_errors
from runtime import config, guard
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, Bounds, NonNegativeInt
from tasks._pool import Pool


# of a record; without ids and log-probabilities, which would not fit in memory
NEEDED = "model split step number sample question answer keys completion turns score error verdict".split()


@dataclass
class Config:
    run: str = ""                            # run of grpo.py, log of datagen.py, or --output of eval.py
    task: str = ""                           # NAME or NAME:ARGUMENT from tasks/, or your file.py
    cases: NonNegativeInt = 10               # that are printed
    reward_workers: Annotated[int, Bounds(1, 256)] | None = None     # None: one per core, at most 8
    timeout: Annotated[float, Bounds(0.01, 10**6)] = 10.0     # seconds per completion


def sign_changes(graded):
    """Return how many completions are above their group's mean by one verifier and below it by the other."""
    groups = defaultdict(list)
    for record, other in graded:
        group = tuple(record.get(name) for name in ("model", "split", "step", "number"))
        groups[group].append((record["score"], other.score))
    changes = 0
    for group in groups.values():
        before, after = map(fmean, zip(*group))
        changes += sum((score - before) * (other - after) < 0 for score, other in group)
    return changes


def report(kept, grades, most):
    """Print the comparison and the clearest cases: the largest differences, one per question."""
    graded = [(record, other) for record, other in zip(kept, grades)
              if not (record["error"] or other.error) and record.get("verdict") != "unfinished"]
    differ = [(record, other) for record, other in graded if record["score"] != other.score]
    higher = sum(other.score > record["score"] for record, other in differ)
    errors = sum(bool(other.error) for other in grades)
    print(f"{len(kept):,} completions: {len(differ):,} rewards differ ({len(differ) / len(kept):.1%}), "
          f"{higher:,} of them higher by the other verifier; {sign_changes(graded):,} advantages "
          f"change their sign; {errors:,} errors.")
    cases = {}
    for record, other in sorted(differ, key=lambda pair: -abs(pair[0]["score"] - pair[1].score)):
        cases.setdefault(record["question"], (record, other))
    for record, other in list(cases.values())[:most]:
        failed = [part for part, holds in other.parts.items() if not holds]
        reason = f" (not {', '.join(failed)})" if failed else ""
        print(f"\nscore {record['score']:g}, by the other {other.score:g}{reason}\n{record['question']}\n"
              f"answer {record['answer']}: {record['completion'].strip()[:500]}")


def main(argv):
    cfg = config.load(Config, argv, positional="run")
    if not cfg.run or not cfg.task:
        raise BadInput("Name records and a task: python -m doctor.regrade out/grpo --task=my_task.py")
    kept = []
    if Path(cfg.run).exists():
        kept = [{name: record.get(name) for name in NEEDED} for record in records.read(cfg.run)]
    if not kept:
        raise BadInput(f"{cfg.run} has no recorded completions: give a run of grpo.py without --record=none, "
                       "a log of datagen.py, or an --output of eval.py.")
    with task_errors(), Pool(cfg.task, cfg.reward_workers, cfg.timeout) as pool:
        grades = pool.score(({"question": record["question"], "answer": record["answer"], **record["keys"]},
                             record["completion"], record.get("turns")) for record in kept)
    report(kept, grades, cfg.cases)
    scores = {records.key_of(record): other.score for record, other in zip(kept, grades) if not other.error}
    write_atomically(records.regraded(cfg.run), json.dumps({"task": cfg.task, "scores": scores}).encode())
    return 0


if __name__ == "__main__":
    guard.run(main)
