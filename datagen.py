"""Rejection sampling: many solutions a question, verified, the right ones kept (Yuan et al. 2023, RFT).

    python datagen.py --init_from=out/base --task=unit_conversion --num_questions=1000 --oversample=10 --temperature=0.6
    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json
    torchrun --nproc_per_node=8 datagen.py --init_from=HuggingFaceTB/SmolLM2-360M-Instruct --task=unit_conversion:3

Writes data/rft.json, [[question, answer, reasoning], ...], and beside it data/rft.attempts.jsonl, every
attempt with its ids and its verdict. Run again after it was stopped, it goes on after the attempts it finds
there. Knobs, as --key=value:
"""
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.usage import first_line

first_line()                             # --help, or a word, before the seconds that importing PyTorch takes

import torch

import hf
import tasks
from engine import Engine, Sampling
from rollouts.accuracy import accuracy
from rollouts.pipeline import Pipeline, context_for, few_shot_of, requests_of, stop_strings_of
from rollouts.questions import task_errors, unseen_questions
from runtime import config, distributed, guard, hardware, lock
from runtime.checkpoint import write_atomically
from runtime.config import BadInput
from runtime.progress import track
from tasks._pool import Grade, Pool, check_graded, load
from text import examples


@dataclass
class Config:
    init_from: str = "out/base"              # run folder, Hugging Face folder or hub name
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    task: str | dict = "unit_conversion"     # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours; several:
                                             # NAME@WEIGHT+NAME, in a config file {NAME: WEIGHT}
    output: str = "data/rft.json"
    overwrite: bool = False                  # begin anew instead of going on after the attempts that are
                                             # logged
    # what is asked
    split: Literal["train", "valid"] = "train"
    num_questions: int | Literal["auto"] | None = "auto"     # as many as there are, up to 1,000; None: all
    few_shot: int | None = None              # worked examples before each; None: 0 for a run (those grpo.py
                                             # gave), 4 for Hugging Face's
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
    deterministic: bool = False              # the same file byte for byte, whether stopped on the way, and on
                                             # any number of ranks
    # machine
    slots: int | None = None                 # samples in flight; None: as many as fit
    reward_workers: int | None = None        # processes that verify; None: one a core, at most 8
    timeout: float = 10.0                    # seconds after which a verifier is killed and its sample is an
                                             # error
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    json: bool = False                       # all figures as the last line


# may differ when a run goes on
OF_THIS_CALL = ("output", "overwrite", "reward_workers", "device", "json")


def code_of(task):
    """SHA-256 of what verifies: the task's file, its neighbours that it imports, and what tasks share."""
    files = [*task.files, *sorted(Path(tasks.__file__).parent.glob("_*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# --- the log of attempts ---

def is_log(path):
    """Whether a file begins as a log of attempts does."""
    try:
        with open(path, encoding="utf-8") as file:
            header = config.parse_json(file.readline(), dict)
        return {"config", "tokenizer", "model", "questions"} <= header.keys()
    except (OSError, ValueError):
        return False


def grade_of(record):
    """The Grade that a record of the log holds."""
    return Grade(record["score"], record["parts"], record["signature"], record["error"])


class Attempts:
    """Everything sampled so far, {(question's number, sample): record}: in output.attempts.jsonl, and what
    ranks have added to it since in files of their own, which the next to open it puts together. A line that a
    crash cut short is dropped. An output without a log beside it is not datagen.py's, and stays. numbers, samples:
    of this run."""

    def __init__(self, output, header, overwrite, numbers=range(2**63), samples=range(2**63)):
        self.path = examples.attempts_path(output)
        for path in (self.path, Path(output)):               # what a writer that was killed left
            for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-[0-9]*"):
                left.unlink()
        self.header = header
        self.numbers = numbers
        self.samples = samples
        self.records = {}
        for path in [self.path, *self.parts()]:
            if path.exists() and not overwrite:
                self.read(path)
        for path in [Path(output), self.path, *self.parts()]:
            if path.exists() and not (is_log(self.path) or is_log(path)):
                raise config.would_overwrite(path, f"datagen.py's, which has its log of attempts in {self.path}")
        self.write()
        if overwrite:
            Path(output).unlink(missing_ok=True)
        for path in self.parts():
            path.unlink()

    def parts(self):
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part[0-9]*"))

    def read(self, path):
        """Take over the records of a file, and check that they were made as this run makes them."""
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            try:
                row = examples.record_of(line) if number > 0 else examples.header_of(line)
                if number > 0 and not (row["number"] in self.numbers and row["sample"] in self.samples):
                    raise ValueError(f"there is no sample {row['sample']} of a question {row['number']}")
            except ValueError as e:
                if number < len(lines) - 1 or path == self.path and number == 0:
                    anew = "--overwrite to begin anew, or " if number > 0 else ""
                    raise BadInput(f"Line {number + 1} of {path} can't be read ({e}): mend or delete it, give "
                                   f"{anew}another --output=.") from None
                break                        # the last, cut short, or nothing after the last end of line
            if number == 0:
                self.check_header(path, row)
            elif not (row["error"] or "").startswith(("timed out", "the worker died")):      # those may fare better
                self.records[row["number"], row["sample"]] = row

    def check_header(self, path, header):
        """BadInput, with what is different, unless a log begins as this run's does."""
        different = [key for key in self.header if header.get(key) != self.header[key]]
        if not different:
            return
        names = {
            "model": "model, or another checkpoint of it",
            "questions": "list of questions",
            "code": "version of the verifier",
        }
        what = names.get(different[0], different[0])
        if different[0] == "config":
            what = "set of knobs"
            saved = header.get("config") or {}
            for knob, value in self.header["config"].items():
                if saved.get(knob) != value:
                    what = f"{knob} ({saved.get(knob)}, now {value})"
                    break
        raise BadInput(f"{path} was made with another {what}: leave the knobs as they were to go on, give "
                       "--overwrite to begin anew, or another --output=.")

    def write(self):
        rows = [self.header, *(self.records[key] for key in sorted(self.records))]
        write_atomically(self.path, "".join(map(examples.line_of, rows)).encode())

    def part(self, rank):
        """A new file for what a rank adds."""
        file = open(f"{self.path}.part{rank}", "w", encoding="utf-8")
        file.write(examples.line_of(self.header))
        return file


def lock_of(output):
    return f"{examples.attempts_path(output)}.lock"


def open_log(cfg, header, n_questions):
    """Return the Attempts of an output, which is locked from here on."""
    try:
        Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)
        if Path(cfg.output).is_dir():
            raise BadInput(f"{cfg.output} is a folder: choose another --output=.")
        lock.take(lock_of(cfg.output), cfg.output, "--output=")
        return Attempts(cfg.output, header, cfg.overwrite, range(n_questions), range(cfg.oversample))
    except OSError as e:
        raise BadInput(f"{cfg.output} can't be written to ({e.strerror}): choose another "
                       "--output=.") from None


def closes_at(records, keep):
    """The smallest m for which samples 0 ... m of a question are there and hold `keep` different verified
    solutions, None if there is none; and these solutions. records: {sample: record}. It does not depend on
    the order in which samples finished."""
    found = {}
    for m in range(len(records)):
        if m not in records:
            break
        if records[m]["verdict"] == "verified":
            found.setdefault(records[m]["signature"], records[m])
        if len(found) == keep:
            return m, list(found.values())
    return None, list(found.values())


def verdict(completion):
    """Return verified, or the first thing that is wrong."""
    grade = completion.grade
    if not completion.finished:
        return "unfinished"
    if grade.error:
        return "error"
    if grade.verified:                       # a blank one, whatever a verifier pays for it, teaches nothing
        return "verified" if completion.text.strip() else "blank"
    for part, holds in grade.parts.items():
        if not holds:
            return f"not {part}"
    return "not correct"


# --- sampling ---

class Share:
    """A rank's questions: the records of their attempts, and the file that keeps those it adds."""

    def __init__(self, cfg, tokenizer, n_questions, attempts, file):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.file = file
        self.keys = range(distributed.rank(), n_questions, distributed.world_size())
        self.records = {key: {} for key in self.keys}        # {question's number: {sample: record}}
        for (key, index), record in attempts.records.items():
            if key in self.records:
                self.records[key][index] = record
        self.to_come = sum(cfg.oversample - len(records) for records in self.records.values())
        self.new = []
        self.verified = 0

    def missing(self, requests):
        """Yield Requests for what to sample next: all that is missing of a question; with stop_early in
        rounds over the questions still open, as many at a time as have to be kept. The engine draws from it
        when a slot is free, so what has come out meanwhile counts."""
        cfg = self.cfg
        at_once = cfg.keep_per_question if cfg.stop_early else cfg.oversample
        for first in range(0, cfg.oversample, at_once):
            for key in self.keys:
                if cfg.stop_early and closes_at(self.records[key], cfg.keep_per_question)[0] is not None:
                    continue
                last = min(first + at_once, cfg.oversample)
                left = [index for index in range(first, last) if index not in self.records[key]]
                while left:
                    # without a gap
                    n = next((n for n in range(1, len(left)) if left[n] != left[0] + n), len(left))
                    yield dataclasses.replace(requests[key], num_samples=n, first_sample=left[0])
                    left = left[n:]

    def add(self, completions):
        """Log graded Completions."""
        for completion in completions:
            record = self.record(completion)
            self.records[completion.key][completion.index] = record
            self.new.append(record)
            self.verified += record["verdict"] == "verified"
            self.file.write(examples.line_of(record))
        if completions:
            self.file.flush()

    def note(self, pipeline):
        """Return what the progress line says beside the number of samples."""
        errors = pipeline.pool.counts["errors"]
        verified = f"{self.verified / max(1, len(self.new)):.0%} verified, {pipeline.speed()}"
        return verified + (f", {errors} errors" if errors else "")

    def record(self, completion):
        """Return what the log keeps of a completion."""
        ids = completion.ids
        grade = completion.grade
        return {
            "number": completion.key,
            "sample": completion.index,
            "question": completion.question["question"],
            "answer": completion.question["answer"],
            "completion": completion.text,
            "ids": ids[:-1] if ids[-1] in self.tokenizer.stop else ids,
            "seed": self.cfg.seed,
            "logprob": sum(completion.logprobs),
            "verdict": verdict(completion),
            "score": grade.score,
            "parts": grade.parts,
            "signature": grade.signature,
            "error": grade.error,
        }


def sample(cfg, pipeline, questions, requests, attempts, stop):
    """Draw this rank's missing samples, have them verified meanwhile, and log them. Returns (their records,
    what they cost). stop: guard.StopSignal, which ends it early; what is not verified by then is sampled
    again."""
    began = time.perf_counter()
    with attempts.part(distributed.rank()) as file:
        share = Share(cfg, pipeline.tokenizer, len(questions), attempts, file)
        note = functools.partial(share.note, pipeline)
        for _ in pipeline.sample(questions, share.missing(requests), share.to_come, grade_unfinished=False,
                                 note=note):
            share.add(pipeline.graded())
            if stop.received is not None:
                break
        share.add(pipeline.graded(wait=stop.received is None))
    tokens = pipeline.engine.progress.tokens if pipeline.engine.progress else 0
    return share.new, {"tokens": tokens, "seconds": time.perf_counter() - began, **pipeline.pool.counts}


# --- the outcome ---

def choose(cfg, questions, records):
    """Return ([[question, answer, reasoning]] that are kept, the records that count, how many different
    solutions each question has). Marks the records that are kept, and those that came after their question
    had closed."""
    by_question = {key: {} for key in range(len(questions))}
    for record in records:
        by_question[record["number"]][record["sample"]] = record
    rows = []
    counted = []
    solutions = []
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
    """Return an answer as a number, where it is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            value = kind(answer)
            return value if math.isfinite(value) else answer
    return answer


def figures(cfg, questions, records, rows, counted, solutions, cost):
    """Return what a run is judged by, as a dictionary."""
    verdicts = Counter(r["verdict"] for r in counted)
    lengths = sorted(len(r["ids"]) for r in records if r["kept"]) or [0]
    grades = {}
    for r in sorted(counted, key=lambda r: (r["number"], r["sample"])):
        grades.setdefault(r["number"], []).append(grade_of(r))
    first = [g[0].score == 1 for g in grades.values()]
    complete = not cfg.stop_early and all(len(g) == cfg.oversample for g in grades.values())
    seconds = cost["seconds"]
    domains = {}
    for name in tasks.parts_of(cfg.task):
        # of a mixture
        own = [n for question, n in zip(questions, solutions) if question.get("domain") == name]
        kept = [min(n, cfg.keep_per_question) for n in own]
        domains[name] = {"questions": len(own), "solved": sum(n > 0 for n in own), "kept": sum(kept)}
    return {
        "questions": len(questions),
        "solved": sum(n > 0 for n in solutions),
        "kept": len(rows),
        "domains": domains if len(domains) > 1 else None,
        "attempts": len(records),
        "yield_loose": sum(r["score"] == 1 for r in counted) / len(counted),
        "yield_tight": verdicts["verified"] / len(counted),
        "pass_at_1": sum(first) / len(first),
        "pass_at_k": accuracy(list(grades.values()))["pass_at_k"] if complete else None,
        "verdicts": dict(verdicts.most_common()),
        "solutions_per_question": dict(sorted(Counter(solutions).items())),
        "completion_tokens": {"median": statistics.median(lengths), "longest": lengths[-1]},
        "verified_per_s": cost["verified"] / seconds if seconds else None,
        "tokens_per_s": cost["tokens"] / seconds if seconds else None,
        "seconds": seconds,
        "errors": cost["errors"],
        "timeouts": cost["timeouts"],
        "restarts": cost["restarts"],
    }


def summary(f, cfg, dropped):
    """Return the figures for people."""
    kept = (f"{f['solved']:,} of {f['questions']:,} questions solved, {f['kept']:,} solutions kept in "
            f"{cfg.output}")
    if dropped:
        kept += f"; {dropped} questions that stand in the test split were dropped"
    for name, own in (f["domains"] or {}).items():
        kept += f"\n  {name}: {own['solved']:,} of {own['questions']:,} solved, {own['kept']:,} kept"
    shares = (f"yield {f['yield_loose']:.1%} by the task's grade, {f['yield_tight']:.1%} verified; "
              f"pass@1 {f['pass_at_1']:.1%}")
    shares += "".join(f", pass@{k} {v:.1%}" for k, v in (f["pass_at_k"] or {}).items() if k != "1")
    verdicts = ", ".join(f"{k} {v:,}" for k, v in f["verdicts"].items())
    histogram = ", ".join(f"{n} of {count}" for count, n in sorted(f["solutions_per_question"].items()))
    lengths = f["completion_tokens"]
    lines = [
        kept,
        shares,
        f"verdicts: {verdicts}",
        f"questions by different solutions: {histogram}; tokens of a kept one: {lengths['median']:.0f} in the "
        f"middle, {lengths['longest']} at most",
    ]
    if f["seconds"]:
        speed = (f"{f['verified_per_s']:,.0f} verified samples/s, {f['tokens_per_s']:,.0f} tokens/s, "
                 f"{f['seconds']:.1f} s")
        if f["errors"]:
            speed += f"; verifier: {f['errors']} errors, {f['timeouts']} of them time-outs"
        lines.append(speed)
    return "\n".join(lines)


def finish(cfg, questions, attempts, shares, dropped):
    """Put the ranks' attempts together, write the output and say what came out. Returns the exit code.
    shares: of each rank (its new records, what they cost)."""
    cost = {"seconds": max(cost["seconds"] for _, cost in shares), "verified": 0}
    for key in ("tokens", "errors", "timeouts", "restarts"):
        cost[key] = sum(rank_cost[key] for _, rank_cost in shares)
    for new, _ in shares:
        cost["verified"] += sum(record["verdict"] == "verified" for record in new)
        attempts.records |= {(record["number"], record["sample"]): record for record in new}
    check_graded(cfg.task, [grade_of(r) for r in attempts.records.values() if r["verdict"] != "unfinished"])
    rows, counted, solutions = choose(cfg, questions, attempts.records.values())
    attempts.write()
    write_atomically(Path(cfg.output), ("[" + ",\n ".join(map(json.dumps, rows)) + "]\n").encode())
    for path in attempts.parts():
        path.unlink()
    lock.release(lock_of(cfg.output))
    f = figures(cfg, questions, attempts.records.values(), rows, counted, solutions, cost)
    print(summary(f, cfg, dropped))
    if not rows:
        print(f"No question was solved, so {cfg.output} is empty: try an easier task, more --oversample, or a "
              "better model.",
              file=sys.stderr)
    if cfg.json:
        print(json.dumps(f | {"dropped": dropped, "output": cfg.output}))
    return 0 if rows else 1


# --- the command line ---

def check(cfg):
    cfg.task = tasks.spec_of(cfg.task)
    config.at_least(cfg, 1, "oversample keep_per_question slots")
    config.at_least(cfg, 0.01, "timeout")
    config.at_most(cfg, 10**6, "timeout oversample")
    config.at_most(cfg, 2**16, "slots")
    config.check_sampling(cfg)
    config.check_questions(cfg)
    if not cfg.output.endswith(".json"):
        raise BadInput(f"--output={cfg.output} should end in .json.")
    if cfg.temperature == 0 and cfg.oversample > 1:
        raise BadInput("At --temperature=0 all samples of a question are the same: raise it, or give "
                       "--oversample=1.")


def fingerprint(model):
    """Return the SHA-256 of a model's weights."""
    digest = hashlib.sha256()
    for name, weight in track(sorted(model.state_dict().items()), "hashing the weights", "tensors"):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def header_of(cfg, hw, tokenizer, model, task, form, questions, requests):
    """Return what stands first in the log: a run goes on after attempts that were made in just the same
    way."""
    knobs = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in OF_THIS_CALL}
    if not cfg.deterministic:
        del knobs["slots"]
    asked = json.dumps([questions, [request.ids for request in requests]])
    return {
        "config": knobs | {"dtype": hw.dtype},
        "tokenizer": tokenizer.describe(),
        "model": fingerprint(model),
        "prompt": form,
        "code": code_of(task),
        "questions": hashlib.sha256(asked.encode()).hexdigest(),
    }


def main(argv):
    cfg = config.load(Config, argv)
    check(cfg)
    distributed.init()
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
    found = distributed.on_main(lambda: hf.find(cfg.init_from))
    tokenizer = found.tokenizer(cfg.tokenizer)
    model = found.load()                     # in the computer's memory; a GPU's is for the engine
    cfg.few_shot = few_shot_of(cfg, found)
    if cfg.deterministic and cfg.slots is None:
        cfg.slots = 64                       # as many wherever it runs: shapes decide the last bits
    with task_errors():
        task = load(cfg.task)
        form = task.prompt
        questions, dropped = distributed.on_main(
            lambda: unseen_questions(task, cfg.split, cfg.num_questions, cfg.seed))
        if cfg.num_questions == "auto":
            cfg.num_questions = len(questions) + dropped             # which the log keeps
        requests = requests_of(tokenizer, task, questions, cfg.oversample, cfg.max_new_tokens, cfg.few_shot)
        sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tokenizer.stop,
                            stop_strings_of(task))
        context = context_for(cfg, requests, cfg.few_shot, found)
        engine = Engine(model, cfg.slots, context, sampling, seed=cfg.seed, dtype=hw.sampling_dtype,
                        device=hw.device, deterministic=cfg.deterministic, decode=tokenizer.decode)
        engine.check(max(requests, key=lambda request: len(request.ids)))
    header = header_of(cfg, hw, tokenizer, model, task, form, questions, requests)
    attempts = distributed.on_main(lambda: open_log(cfg, header, len(questions)))
    if distributed.is_main():
        before = f"; {len(attempts.records):,} attempts are logged already" if attempts.records else ""
        print(f"{len(questions):,} questions of {cfg.task} x {cfg.oversample} samples, {cfg.few_shot} worked "
              f"examples before each; {hw.dtype} on {hw.name}, {engine.slots} samples in "
              f"flight{before}.", flush=True)

    stop = guard.StopSignal()
    new = []
    cost = {}
    failure = None
    try:
        with Pool(cfg.task, cfg.reward_workers, cfg.timeout) as pool:
            pipeline = Pipeline(engine, pool, tokenizer, task)
            new, cost = sample(cfg, pipeline, questions, requests, attempts, stop)
    except (ValueError, FloatingPointError) as e:
        failure = str(e)
    except OSError as e:
        failure = (f"{e.filename or 'The log of attempts'} could not be written ({e.strerror}): free some space, and "
                   "the same command goes on after what is logged.")
    if stop.received is not None:
        print(f"Stopped as asked after {len(new):,} more attempts, which are logged: the same command"
              f"{' without --overwrite' if cfg.overwrite else ''} goes on after them.", flush=True)
        return stop.exit_code()
    shares = []
    for rank_failure, *share in distributed.gather((failure, new, cost)):
        if rank_failure:
            raise BadInput(rank_failure)
        shares.append(share)
    return distributed.on_main(lambda: finish(cfg, questions, attempts, shares, dropped))


if __name__ == "__main__":
    guard.run(main)
