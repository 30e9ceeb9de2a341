"""Rejection sampling: many solutions a question, verified, the right ones kept (Yuan et al. 2023, RFT).

    python datagen.py --init_from=out/base --task=unit_conversion --num_questions=1000 --oversample=10 --temperature=0.6
    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json
    torchrun --nproc_per_node=8 datagen.py --init_from=HuggingFaceTB/SmolLM2-360M-Instruct --task=unit_conversion:3

Writes data/rft.json, [[question, answer, reasoning], ...], and beside it data/rft.attempts.jsonl, every attempt with its ids and its
verdict. Run again after it was stopped, it goes on after the attempts it finds there. Knobs, as --key=value:
"""
import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import hf
import tasks
from engine import Engine, Sampling
from eval import accuracy, context_for, few_shot_of, refused, requests_of, unseen_questions
from runtime import config, distributed, examples, guard, hardware
from runtime.checkpoint import write_atomically
from runtime.config import BadInput
from runtime.rewards import Grade, Pool, check_graded, load


@dataclass
class Config:
    init_from: str = "out/base"              # run folder, Hugging Face folder or hub name
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes, or a folder with one
    task: str = "unit_conversion"            # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours
    output: str = "data/rft.json"
    overwrite: bool = False                  # begin anew instead of going on after the attempts that are logged
    # what is asked
    split: Literal["train", "valid"] = "train"
    num_questions: int | Literal["auto"] | None = "auto"     # as many as there are, up to 1,000; None: all
    few_shot: int | None = None              # worked examples before each; None: 0 for a run (those grpo.py gave), 4 for Hugging Face's
    oversample: int = 10                     # samples a question, at most
    keep_per_question: int = 4               # distinct verified solutions, at most
    stop_early: bool = False                 # ask no more of a question once these are found
    # sampling
    temperature: float = 0.6
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    deterministic: bool = False              # the same file byte for byte, whether stopped on the way, and on any number of ranks
    # machine
    slots: int | None = None                 # samples in flight; None: as many as fit
    reward_workers: int | None = None        # processes that verify; None: one a core, at most 8
    timeout: float = 10.0                    # seconds after which a verifier is killed and its sample is an error
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    json: bool = False                       # all figures as the last line


OF_THIS_CALL = ("output", "overwrite", "reward_workers", "device", "json")       # may differ when a run goes on


def code_of(task):
    """SHA-256 of what verifies: the task's file, its neighbours that it imports, and what tasks share."""
    files = [*tasks.files_of(task), *sorted(Path(tasks.__file__).parent.glob("_*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# --- the log of attempts ---

def lock(path):
    """A file that stays locked while it is open: a second run that wrote here would take this one's away. None without such locks."""
    with contextlib.suppress(ImportError):
        import fcntl
        file = open(path, "a")
        if file.tell():
            raise config.in_the_way(path, "an empty lock of datagen.py's")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"Another run holds {path}: wait for its end, or choose another --output=.") from None
        return file


def is_log(path):
    """Whether a file begins as a log of attempts does."""
    try:
        with open(path, encoding="utf-8") as file:
            return {"config", "tokenizer", "model", "questions"} <= config.parse_json(file.readline(), dict).keys()
    except (OSError, ValueError):
        return False


def grade_of(record):
    """The Grade that a record of the log holds."""
    return Grade(record["score"], record["parts"], record["signature"], record["error"])


class Attempts:
    """Everything sampled so far, {(question's number, sample): record}: in output.attempts.jsonl, and what ranks have added to it since
    in files of their own, which the next to open it puts together. A line that a crash cut short is dropped.
    An output without a log beside it is not datagen.py's, and stays."""

    def __init__(self, output, header, overwrite):
        self.path, self.header, self.records = examples.attempts_path(output), header, {}
        for path in [self.path, *self.parts()]:
            if path.exists() and not overwrite:
                self.read(path)
        for path in [Path(output), self.path, *self.parts()]:
            if path.exists() and not (is_log(self.path) or is_log(path)):
                raise config.in_the_way(path, f"datagen.py's, which has its log of attempts in {self.path}")
        self.write()
        if overwrite:
            Path(output).unlink(missing_ok=True)
        for path in self.parts():
            path.unlink()

    def parts(self):
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part[0-9]*"))

    def read(self, path):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            try:
                row = config.parse_json(line)
                which = (row["number"], row["sample"]) if number else None
            except (ValueError, TypeError, KeyError):
                if number < len(lines) - 1 or path == self.path and number == 0:
                    anew = "--overwrite to begin anew, or " if number else ""
                    raise BadInput(f"Line {number + 1} of {path} can't be read: mend or delete it, give "
                                   f"{anew}another --output=.") from None
                break                        # the last, cut short, or nothing after the last end of line
            if number:
                if not (row["error"] or "").startswith(("timed out", "the worker died")):          # those may fare better
                    self.records[which] = row
            elif different := [k for k in self.header if not isinstance(row, dict) or row.get(k) != self.header[k]]:
                raise BadInput(f"{path} was made with another {self.difference(row, different[0])}: leave the knobs as they were to go "
                                   "on, give --overwrite to begin anew, or another --output=.")

    def difference(self, row, key):
        """What to call it, for people."""
        if key != "config" or not isinstance(row, dict):
            return {"model": "model, or another checkpoint of it", "questions": "list of questions", "code": "version of the verifier"}.get(key, key)
        old, new = (header.get("config") or {} for header in (row, self.header))
        return next((f"{k} ({old.get(k)}, now {new.get(k)})" for k in new if old.get(k) != new[k]), "set of knobs")

    def write(self):
        rows = [self.header, *(self.records[key] for key in sorted(self.records))]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def part(self, rank):
        """A new file for what a rank adds."""
        file = open(f"{self.path}.part{rank}", "w", encoding="utf-8")
        file.write(json.dumps(self.header) + "\n")
        return file


def closes_at(records, keep):
    """The smallest m for which samples 0 ... m of a question are there and hold `keep` different verified solutions, None if there
    is none; and these solutions. records: {sample: record}. It does not depend on the order in which samples finished."""
    found = {}
    for m in range(len(records)):
        if m not in records:
            break
        if records[m]["verdict"] == "verified":
            found.setdefault(records[m]["signature"], records[m])
        if len(found) == keep:
            return m, list(found.values())
    return None, list(found.values())


def verdict(grade):
    """verified, or the first thing that is wrong."""
    if grade.error:
        return "error"
    return "verified" if grade.verified else next((f"not {part}" for part, holds in grade.parts.items() if not holds), "not correct")


# --- sampling ---

def missing(cfg, requests, by_question, keys):
    """What to sample next: all that is missing of a question; with stop_early in rounds over the questions still open, as many at a
    time as have to be kept. Drawn from when a slot is free, so what has come out meanwhile counts."""
    at_once = cfg.keep_per_question if cfg.stop_early else cfg.oversample
    for first in range(0, cfg.oversample, at_once):
        for key in keys:
            if cfg.stop_early and closes_at(by_question[key], cfg.keep_per_question)[0] is not None:
                continue
            left = [s for s in range(first, min(first + at_once, cfg.oversample)) if s not in by_question[key]]
            while left:
                n = next((n for n in range(1, len(left)) if left[n] != left[0] + n), len(left))      # without a gap
                yield dataclasses.replace(requests[key], num_samples=n, first_sample=left[0])
                left = left[n:]


def sample(cfg, engine, tokenizer, task, questions, requests, attempts, stop):
    """Draw this rank's missing samples, have them verified meanwhile, and log them; the records. `stop` ends it early."""
    rank, world = distributed.rank(), distributed.world_size()
    keys = range(rank, len(questions), world)
    by_question = {key: {} for key in keys}
    for (key, index), record in attempts.records.items():
        if key in by_question:
            by_question[key][index] = record
    new, fresh, waiting, kept = [], [], deque(), 0
    total = sum(cfg.oversample - len(by_question[key]) for key in keys)
    bar = tqdm(total=total, desc="sampling", unit=" samples", disable=None if rank == 0 else True)

    def log(record, grade):
        nonlocal kept
        record |= {"score": grade.score, "parts": grade.parts, "signature": grade.signature, "error": grade.error,
                   "verdict": record["verdict"] or verdict(grade)}
        by_question[record["number"]][record["sample"]] = record
        new.append(record)
        kept += record["verdict"] == "verified"
        file.write(json.dumps(record) + "\n")

    def speak(now):
        errors = f", {pool.counts['errors']} errors" if pool.counts["errors"] else ""
        yielded = f"{kept / max(1, len(new)):.0%} verified"
        bar.set_postfix_str(f"{yielded}, {now.tokens_per_s:,.0f} tokens/s{errors}", refresh=False)

    with Pool(cfg.task, cfg.reward_workers, cfg.timeout) as pool, attempts.part(rank) as file, bar:
        def hand_over(wait=False):
            """New samples to the verifiers, verified ones to the log. Many at a time: on a CPU every process that wakes stops the
            threads that sample, which one at a time costs a small model up to a tenth of its speed (NOTES.md)."""
            for record in fresh:
                waiting.append(record)
                pool.submit(questions[record["number"]], record["completion"])
            fresh.clear()
            for grade in pool.collect(wait):
                log(waiting.popleft(), grade)
            file.flush()
            bar.update(len(new) - bar.n)

        handed = began = time.perf_counter()
        for s in engine.generate(missing(cfg, requests, by_question, keys), speak):
            question, ids = questions[s.request.key], s.ids[:-1] if s.ids[-1] in tokenizer.stop else s.ids
            record = {"number": s.request.key, "sample": s.index, "question": question["question"], "answer": question["answer"],
                      "completion": task.cut(tokenizer.text_of(s.ids)), "ids": ids, "seed": cfg.seed, "logprob": sum(s.logprobs), "verdict": None}
            if s.reason == "length":
                log(record | {"verdict": "unfinished"}, Grade(0.0, {}, "", None))
            else:
                fresh.append(record)
            if len(fresh) >= min(64, engine.slots) or time.perf_counter() - handed > 1:
                hand_over()
                handed = time.perf_counter()
            if stop.received is not None:
                break
        hand_over(wait=stop.received is None)              # what is not verified yet is sampled again
        tokens = engine.progress.tokens if engine.progress else 0
        return new, {"tokens": tokens, "seconds": time.perf_counter() - began, **pool.counts}


# --- the outcome ---

def choose(cfg, questions, records):
    """([[question, answer, reasoning]] that are kept, figures of the whole). Marks the records that are kept, and those that came
    after their question had closed."""
    by_question = {key: {} for key in range(len(questions))}
    for record in records:
        by_question[record["number"]][record["sample"]] = record
    rows, solutions, counted = [], [], []
    for mine in by_question.values():
        closes, chosen = closes_at(mine, cfg.keep_per_question)
        for record in mine.values():
            record["kept"] = any(record is c for c in chosen)
            record["after_close"] = cfg.stop_early and closes is not None and record["sample"] > closes
        counted += [r for r in mine.values() if not r["after_close"]]
        solutions.append(len({r["signature"] for r in mine.values() if r["verdict"] == "verified"}))
        rows += [[r["question"], number(r["answer"]), r["completion"]] for r in chosen]
    return rows, counted, solutions


def number(answer):
    """An answer as a number, where it is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            value = kind(answer)
            return value if math.isfinite(value) else answer
    return answer


def figures(cfg, questions, records, rows, counted, solutions, cost):
    """What a run is judged by, as a dictionary."""
    verdicts = Counter(r["verdict"] for r in counted)
    lengths = sorted(len(r["ids"]) for r in records if r["kept"]) or [0]
    grades = {}
    for r in sorted(counted, key=lambda r: (r["number"], r["sample"])):
        grades.setdefault(r["number"], []).append(grade_of(r))
    first = [g[0].score == 1 for g in grades.values()]
    complete = not cfg.stop_early and all(len(g) == cfg.oversample for g in grades.values())
    return {
        "questions": len(questions), "solved": sum(n > 0 for n in solutions), "kept": len(rows), "attempts": len(records),
        "yield_loose": sum(r["score"] == 1 for r in counted) / len(counted), "yield_tight": verdicts["verified"] / len(counted),
        "pass_at_1": sum(first) / len(first),
        "pass_at_k": accuracy(list(grades.values()))["pass_at_k"] if complete else None,
        "verdicts": dict(verdicts.most_common()), "solutions_per_question": dict(sorted(Counter(solutions).items())),
        "completion_tokens": {"median": statistics.median(lengths), "longest": lengths[-1]},
        "verified_per_s": cost["verified"] / cost["seconds"] if cost["seconds"] else None,
        "tokens_per_s": cost["tokens"] / cost["seconds"] if cost["seconds"] else None,
        **{k: cost[k] for k in ("seconds", "errors", "timeouts", "restarts")}}


def summary(f, cfg, dropped):
    """The figures for people."""
    histogram = ", ".join(f"{n} of {count}" for count, n in sorted(f["solutions_per_question"].items()))
    lines = [f"{f['solved']:,} of {f['questions']:,} questions solved, {f['kept']:,} solutions kept in {cfg.output}"
             + (f"; {dropped} questions that stand in the test split were dropped" if dropped else ""),
             f"yield {f['yield_loose']:.1%} by the task's grade, {f['yield_tight']:.1%} verified; pass@1 {f['pass_at_1']:.1%}"
             + "".join(f", pass@{k} {v:.1%}" for k, v in (f["pass_at_k"] or {}).items() if k != "1"),
             f"verdicts: {', '.join(f'{k} {v:,}' for k, v in f['verdicts'].items())}",
             f"questions by different solutions: {histogram}; tokens of a kept one: {f['completion_tokens']['median']:.0f} in the "
             f"middle, {f['completion_tokens']['longest']} at most"]
    if f["seconds"]:
        lines.append(f"{f['verified_per_s']:,.0f} verified samples/s, {f['tokens_per_s']:,.0f} tokens/s, {f['seconds']:.1f} s"
                     + (f"; verifier: {f['errors']} errors, {f['timeouts']} of them time-outs" if f["errors"] else ""))
    return "\n".join(lines)


def fingerprint(model):
    """SHA-256 of a model's weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def main(argv):
    cfg = config.load(Config, argv)
    config.at_least(cfg, 1, "oversample keep_per_question slots")
    config.at_least(cfg, 0.01, "timeout")
    config.at_most(cfg, 10**6, "timeout oversample")
    config.at_most(cfg, 2**16, "slots")
    config.check_sampling(cfg)
    config.check_questions(cfg)
    if not cfg.output.endswith(".json"):
        raise BadInput(f"--output={cfg.output} should end in .json.")
    if cfg.temperature == 0 and cfg.oversample > 1:
        raise BadInput("At --temperature=0 all samples of a question are the same: raise it, or give --oversample=1.")
    distributed.init()
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
    found = distributed.on_main(lambda: hf.find(cfg.init_from))
    tokenizer, model = found.tokenizer(cfg.tokenizer), found.load(device=hw.device)
    cfg.few_shot = few_shot_of(cfg, found)
    if cfg.deterministic and cfg.slots is None:
        cfg.slots = 64                       # as many wherever it runs: shapes decide the last bits
    with refused():
        task = load(cfg.task)
        questions, dropped = distributed.on_main(lambda: unseen_questions(task, cfg.split, cfg.num_questions, cfg.seed))
        if cfg.num_questions == "auto":
            cfg.num_questions = len(questions) + dropped             # which the log keeps
        requests = requests_of(tokenizer, task, questions, cfg.oversample, cfg.max_new_tokens, cfg.few_shot)
        longest = max(requests, key=lambda r: len(r.ids))
        sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tuple(tokenizer.stop), (task.stop,) if task.stop else ())
        engine = Engine(model, cfg.slots, context_for(cfg, requests, cfg.few_shot, found), sampling, cfg.seed,
                        hw.sampling_dtype, cfg.deterministic, tokenizer.decode)
        engine.check(longest)

    known = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in OF_THIS_CALL and (k != "slots" or cfg.deterministic)}
    header = {"config": known | {"dtype": hw.dtype}, "tokenizer": tokenizer.describe(), "model": fingerprint(model),
              "prompt": task.prompt, "code": code_of(task),
              "questions": hashlib.sha256(json.dumps([questions, [r.ids for r in requests]]).encode()).hexdigest()}

    locks = []

    def open_log():
        try:
            Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)
            if Path(cfg.output).is_dir():
                raise BadInput(f"{cfg.output} is a folder: choose another --output=.")
            locks.append(lock(f"{examples.attempts_path(cfg.output)}.lock"))
            return Attempts(cfg.output, header, cfg.overwrite)
        except OSError as e:
            raise BadInput(f"{cfg.output} can't be written to ({e.strerror}): choose another --output=.") from None
    attempts, stop = distributed.on_main(open_log), guard.StopSignal()
    if distributed.is_main():
        before = f"; {len(attempts.records):,} attempts are logged already" if attempts.records else ""
        print(f"{len(questions):,} questions of {cfg.task} x {cfg.oversample} samples, {cfg.few_shot} worked examples before each; "
              f"{hw.dtype} on {hw.name}, {engine.slots} samples in flight{before}.", flush=True)
    new, cost, failure = [], {}, None
    try:
        new, cost = sample(cfg, engine, tokenizer, task, questions, requests, attempts, stop)
    except (ValueError, FloatingPointError, OSError) as e:
        failure = str(e)
    if stop.received is not None:
        print(f"Stopped as asked after {len(new):,} more attempts, which are logged: the same command"
              f"{' without --overwrite' if cfg.overwrite else ''} goes on after them.", flush=True)
        return stop.exit_code()
    shares = distributed.gather((new, cost, failure))
    if failure := next((failure for *_, failure in shares if failure), None):
        raise BadInput(failure)                           # of whichever rank it was
    return distributed.on_main(lambda: finish(cfg, questions, attempts, shares, dropped))


def finish(cfg, questions, attempts, shares, dropped):
    """Put the ranks' attempts together, write the output, say what came out; the exit code."""
    for new, *_ in shares:
        attempts.records |= {(r["number"], r["sample"]): r for r in new}
    cost = {k: sum(c[k] for _, c, _ in shares) for k in ("tokens", "errors", "timeouts", "restarts")}
    check_graded(cfg.task, [grade_of(r) for r in attempts.records.values() if r["verdict"] != "unfinished"])
    cost |= {"seconds": max(c["seconds"] for _, c, _ in shares), "verified": sum(r["verdict"] == "verified" for new, *_ in shares for r in new)}
    rows, counted, solutions = choose(cfg, questions, attempts.records.values())
    attempts.write()
    write_atomically(Path(cfg.output), ("[" + ",\n ".join(map(json.dumps, rows)) + "]\n").encode())
    for path in attempts.parts():
        path.unlink()
    Path(f"{attempts.path}.lock").unlink(missing_ok=True)
    f = figures(cfg, questions, attempts.records.values(), rows, counted, solutions, cost)
    print(summary(f, cfg, dropped))
    if not rows:
        print(f"No question was solved, so {cfg.output} is empty: try an easier task, more --oversample, or a better model.", file=sys.stderr)
    if cfg.json:
        print(json.dumps(f | {"dropped": dropped, "output": cfg.output}))
    return 0 if rows else 1


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
