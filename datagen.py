"""Sample many solutions per question and keep the verified ones: rejection sampling (RFT, Yuan et al. 2023).

    python datagen.py --init_from=out/base --task=unit_conversion --oversample=10 --temperature=0.6
    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json
    torchrun --nproc_per_node=8 datagen.py --init_from=HuggingFaceTB/SmolLM2-360M-Instruct --task=gsm8k

Writes data/rft.json, [[question, answer, reasoning], ...] (of an episode, a list of the model's and the
environment's texts in turn), and data/rft.attempts.jsonl, every attempt with its ids and its verdict. The
same command resumes an interrupted run from that log.
"""
import dataclasses
import glob
import hashlib
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from runtime.usage import first_line

first_line()                             # --help without the seconds that importing PyTorch takes

import torch

import hub
import tasks
from engine import Engine, Sampling
from engine.scheduler import forced_tokens
from rollouts.accuracy import accuracy
from rollouts.pipeline import Pipeline, context_for, few_shot_of, requests_of, stop_strings_of
from rollouts.questions import task_errors, unseen_questions
from rollouts.records import record_of, regraded
from rollouts.verifier import code_of
from runtime import config, distributed, guard, hardware, lock
from runtime.checkpoint import write_atomically
from runtime.config import (BadInput, Bounds, Count, NonNegativeFloat, NonNegativeInt, PositiveInt,
                            UnitInterval)
from runtime.progress import track
from tasks._pool import Grade, Pool, check_graded, load
from text import examples
from text.prompts import instruction_of


@dataclass
class Config:
    init_from: str = "out/base"              # run folder, Hugging Face folder, GGUF file or hub name
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    task: str | dict = "unit_conversion"     # NAME or NAME:ARGUMENT from tasks/, or your file.py; several:
                                             # NAME@WEIGHT+NAME, in a config file {NAME: WEIGHT}
    output: str = "data/rft.json"            # the verified solutions
    overwrite: bool = False                  # start over instead of resuming from the logged attempts (a
                                             # restart by torchrun or SLURM resumes)
    # questions
    split: Literal["train", "valid"] = "train"     # of the task's questions
    num_questions: Count | Literal["auto"] | None = "auto"     # auto: at most 1,000; None: all, or
                                             # the task's default
    few_shot: Annotated[int, Bounds(0, 1000)] | None = None     # worked examples in the prompt; None: a
                                             # grpo.py run's own, 0 for other runs, 4 for a Hugging Face model
    oversample: Count = 10                   # samples per question, at most
    keep_per_question: PositiveInt = 4       # distinct verified solutions, at most
    stop_early: bool = False                 # stop sampling a question once keep_per_question are found
    # sampling
    temperature: NonNegativeFloat = 0.6      # of sampling
    top_k: PositiveInt | None = None         # sample only from the k likeliest tokens; None: all
    top_p: UnitInterval = 1.0                # the fewest tokens whose probabilities sum to this; on a GPU at
                                             # most 1,024, without top_k
    min_p: UnitInterval = 0.0                # tokens at least this fraction as likely as the likeliest
    max_new_tokens: PositiveInt = 128        # longest completion
    seed: NonNegativeInt = 0                 # of samples, and of generated questions
    deterministic: bool = False              # byte-identical output after any interruption, on any number of
                                             # ranks
    # machine
    slots: Annotated[int, Bounds(1, 2**16)] | None = None     # samples in flight; None: all that
                                             # fit, with --deterministic 64
    reward_workers: Annotated[int, Bounds(1, 256)] | None = None     # verifier processes; None: one per core,
                                             # at most 8
    timeout: Annotated[float, Bounds(0.01, 10**6)] = 10.0     # seconds per sample before its verifier is
                                             # killed (an error)
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp32"] = "auto"     # precision of sampling; fp16's range is too narrow
    json: bool = False                       # print all figures as JSON on the last line


DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?")
# options that may change when a run resumes
MAY_CHANGE = ("output", "overwrite", "reward_workers", "device", "json")


# --- the log of attempts ---

def is_log(path):
    """Tell whether a file begins with the header of an attempts log."""
    try:
        with open(path, encoding="utf-8") as file:
            header = config.parse_json(file.readline(), dict)
        return {"config", "tokenizer", "model", "questions"} <= header.keys()
    except (OSError, ValueError):
        return False


def grade_of(record):
    """Return the Grade in a log record."""
    return Grade(record["score"], record["parts"], record["signature"], record["error"])


class Attempts:
    """All attempts so far, records {(question number, sample index): record}.

    They are stored in output.attempts.jsonl; during sampling each rank appends to a part file of its own, and
    opening the log merges these. A line truncated by a crash is dropped. An output without a log was not
    written by datagen.py: BadInput. numbers, samples: valid question numbers and sample indices."""

    def __init__(self, output, header, overwrite, numbers=range(2**63), samples=range(2**63)):
        self.path = examples.attempts_path(output)
        for path in (self.path, Path(output)):
            for leftover in path.parent.glob(f"{glob.escape(path.name)}.tmp-[0-9]*"):    # of a killed writer
                leftover.unlink()
        self.header = header
        self.numbers = numbers
        self.samples = samples
        self.records = {}
        for path in [self.path, *self.parts()]:
            if path.exists() and not overwrite:
                self.read(path)
        for path in [Path(output), self.path, *self.parts()]:
            if path.exists() and not (is_log(self.path) or is_log(path)):
                raise config.would_overwrite(path, f"an output of datagen.py, whose log is {self.path}")
        self.write()
        if overwrite:
            Path(output).unlink(missing_ok=True)
            regraded(self.path).unlink(missing_ok=True)      # other scores of the old attempts
        for path in self.parts():
            path.unlink()

    def parts(self):
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part[0-9]*"))

    def read(self, path):
        """Read the records of a log or part file. BadInput if the header differs or a line is damaged."""
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            try:
                row = examples.row_of(line, "number" if number > 0 else "prompt")
                if number > 0 and not (row["number"] in self.numbers and row["sample"] in self.samples):
                    raise ValueError(f"there is no sample {row['sample']} of a question {row['number']}")
            except ValueError as e:
                if number < len(lines) - 1 or path == self.path and number == 0:
                    start_over = "--overwrite to start over, or " if number > 0 else ""
                    raise BadInput(f"Line {number + 1} of {path} can't be read ({e}): fix or delete it, or "
                                   f"give {start_over}another --output=.") from None
                break                        # a truncated last line, or the empty one after the last newline
            if number == 0:
                self.check_header(path, row)
            elif not (row["error"] or "").startswith(("timed out", "the worker died")):    # these are retried
                self.records[row["number"], row["sample"]] = row

    def check_header(self, path, header):
        """Raise BadInput naming the first difference between a log's header and this run's."""
        different = [key for key in self.header if header.get(key) != self.header[key]]
        if not different:
            return
        names = {
            "model": "model, or another checkpoint of it",
            "questions": "list of questions",
            "code": "version of the verifier",
        }
        difference = names.get(different[0], different[0])
        if different[0] == "config":
            difference = "set of options"
            saved = header.get("config") or {}
            for option, value in self.header["config"].items():
                if saved.get(option) != value:
                    difference = f"{option} ({saved.get(option)}, now {value})"
                    break
        raise BadInput(f"{path} was made with another {difference}: restore it to resume, give --overwrite "
                       "to start over, or choose another --output=.")

    def write(self):
        rows = [self.header, *(self.records[key] for key in sorted(self.records))]
        write_atomically(self.path, "".join(map(examples.line_of, rows)).encode())

    def part(self, rank):
        """Open a new part file for a rank's attempts."""
        file = open(f"{self.path}.part{rank}", "w", encoding="utf-8")
        file.write(examples.line_of(self.header))
        return file


def open_log(cfg, header, n_questions):
    """Lock an output and return its Attempts."""
    try:
        Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)
        if Path(cfg.output).is_dir():
            raise BadInput(f"{cfg.output} is a folder: choose another --output=.")
        lock.take(f"{examples.attempts_path(cfg.output)}.lock", cfg.output, "--output=")
        return Attempts(cfg.output, header, cfg.overwrite, range(n_questions), range(cfg.oversample))
    except OSError as e:
        raise BadInput(f"{cfg.output} can't be written ({e.strerror}): choose another --output=.") from None


def closes_at(records, keep):
    """Return (m, solutions): the smallest m such that samples 0 ... m exist and contain `keep` distinct
    verified solutions, or None. records: {sample index: record}; the order of finishing is irrelevant."""
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
    """Return "verified", or the first reason against a completion."""
    grade = completion.grade
    if not completion.finished:
        return "unfinished"
    if grade.error:
        return "error"
    if grade.verified:                       # a blank completion teaches nothing, whatever its score
        return "verified" if completion.text.strip() else "blank"
    for part, holds in grade.parts.items():
        if not holds:
            return f"not {part}"
    return "not correct"


# --- sampling ---

class Share:
    """One rank's questions, the records of their attempts, and the part file for new ones."""

    def __init__(self, cfg, pipeline, n_questions, attempts, file):
        self.cfg = cfg
        self.pipeline = pipeline
        self.file = file
        # {question's number: {sample: record}}
        self.records = {key: {} for key in range(distributed.rank(), n_questions, distributed.world_size())}
        for (key, index), record in attempts.records.items():
            if key in self.records:
                self.records[key][index] = record
        self.to_come = sum(cfg.oversample - len(records) for records in self.records.values())
        self.new = []
        self.seen = Counter()                # of new attempts: verdict "verified", and true parts

    def missing(self, requests):
        """Yield Requests for missing samples: all of a question's at once, or with stop_early in rounds of
        keep_per_question over the questions still open. The engine takes a Request when a slot is free, so
        samples graded by then decide whether a question is still open."""
        cfg = self.cfg
        per_round = cfg.keep_per_question if cfg.stop_early else cfg.oversample
        for first in range(0, cfg.oversample, per_round):
            for key in self.records:
                if cfg.stop_early and closes_at(self.records[key], cfg.keep_per_question)[0] is not None:
                    continue
                last = min(first + per_round, cfg.oversample)
                left = [index for index in range(first, last) if index not in self.records[key]]
                while left:                  # one Request per run of consecutive indices
                    n = next((n for n in range(1, len(left)) if left[n] != left[0] + n), len(left))
                    yield dataclasses.replace(requests[key], num_samples=n, first_sample=left[0])
                    left = left[n:]

    def add(self, completions):
        """Log graded Completions."""
        for completion in completions:
            record = self.record(completion)
            self.records[completion.key][completion.index] = record
            self.new.append(record)
            self.seen["verified"] += record["verdict"] == "verified"
            self.seen.update(part for part, holds in record["parts"].items() if holds)
            self.file.write(examples.line_of(record))
        if completions:
            self.file.flush()

    def note(self):
        """Return the progress line's remarks: shares of the parts and verified, speed, errors."""
        errors = self.pipeline.pool.counts["errors"]
        notes = [f"{n / len(self.new):.0%} {part}" for part, n in self.seen.items()]
        notes += [self.pipeline.speed()] + [f"{errors} errors"] * (errors > 0)
        return ", ".join(notes)

    def record(self, completion):
        """Return the log record of a graded Completion."""
        ids = completion.ids
        stop = self.pipeline.tokenizer.stop
        task = self.pipeline.task.of(completion.question)
        instruction = instruction_of(self.pipeline.tokenizer, task, completion.question)
        told = {"instruction": instruction} if instruction and self.pipeline.tokenizer.is_chat else {}
        record = record_of(completion)
        kept = slice(len(ids) - (ids[-1] in stop))
        return record | told | {
            "ids": ids[kept],
            "millinats": record["millinats"][kept],
            "seed": self.cfg.seed,
            "logprob": sum(completion.logprobs),
            "verdict": verdict(completion),
            "signature": completion.grade.signature,
        }


def sample(cfg, pipeline, questions, requests, attempts, stop):
    """Sample, verify and log this rank's missing attempts. Returns (new records, their cost). stop: a
    guard.StopSignal, which ends sampling early; attempts not graded by then are sampled again on resume."""
    began = time.perf_counter()
    with attempts.part(distributed.rank()) as file:
        share = Share(cfg, pipeline, len(questions), attempts, file)
        for _ in pipeline.sample(questions, share.missing(requests), share.to_come, grade_unfinished=False,
                                 note=share.note):
            share.add(pipeline.graded())
            if stop.received is not None:
                break
        share.add(pipeline.graded(wait=stop.received is None))
    tokens = pipeline.engine.progress.tokens
    return share.new, {"tokens": tokens, "seconds": time.perf_counter() - began, **pipeline.pool.counts}


# --- results ---

def choose(cfg, questions, records):
    """Return (kept rows [[question, answer, reasoning]], records that count, number of distinct solutions per
    question). Sets "kept" and "after_close" (sampled after stop_early closed the question) in each record."""
    by_question = {key: {} for key in range(len(questions))}
    for record in records:
        by_question[record["number"]][record["sample"]] = record
    rows = []
    counted = []
    solutions = []
    for attempts in by_question.values():
        closes, chosen = closes_at(attempts, cfg.keep_per_question)
        for record in attempts.values():
            record["kept"] = any(record is c for c in chosen)
            record["after_close"] = cfg.stop_early and closes is not None and record["sample"] > closes
        counted += [r for r in attempts.values() if not r["after_close"]]
        solutions.append(len({r["signature"] for r in attempts.values() if r["verdict"] == "verified"}))
        rows += [[r["question"], number(r["answer"]), r.get("turns", r["completion"])] for r in chosen]
    return rows, counted, solutions


def number(answer):
    """Convert a text that is a decimal number to an int or float; return any other answer unchanged."""
    if not isinstance(answer, str) or not DECIMAL.fullmatch(answer):
        return answer
    return float(answer) if "." in answer else int(answer)


def figures(cfg, questions, records, rows, counted, solutions, cost):
    """Return the run's figures as a dictionary (--json)."""
    verdicts = Counter(r["verdict"] for r in counted)
    lengths = sorted(len(r["ids"]) - forced_tokens(r.get("forced", ())) for r in records if r["kept"]) or [0]
    grades = {}
    for r in sorted(counted, key=lambda r: (r["number"], r["sample"])):
        grades.setdefault(r["number"], []).append(grade_of(r))
    first = [g[0].score == 1 for g in grades.values()]
    complete = not cfg.stop_early and all(len(g) == cfg.oversample for g in grades.values())
    seconds = cost["seconds"]
    domains = {}
    for name in tasks.parts_of(cfg.task):
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
    """Return the figures as text."""
    kept = (f"{f['solved']:,} of {f['questions']:,} questions solved, {f['kept']:,} solutions kept in "
            f"{cfg.output}")
    if dropped:
        kept += f"; dropped {dropped} questions that are in the test split"
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
        f"questions by number of distinct solutions: {histogram}; tokens of a kept solution: median "
        f"{lengths['median']:.0f}, longest {lengths['longest']}",
    ]
    if f["seconds"]:
        speed = (f"{f['verified_per_s']:,.0f} verified samples/s, {f['tokens_per_s']:,.0f} tokens/s, "
                 f"{f['seconds']:.1f} s")
        if f["errors"]:
            speed += f"; verifier: {f['errors']} errors, {f['timeouts']} of them timeouts"
        lines.append(speed)
    return "\n".join(lines)


def finish(cfg, questions, attempts, shares, dropped):
    """Merge the ranks' attempts, write the output and print the figures. Returns the exit code. shares: each
    rank's (new records, cost)."""
    cost = {"seconds": max(cost["seconds"] for _, cost in shares), "verified": 0}
    for key in ("tokens", "errors", "timeouts", "restarts"):
        cost[key] = sum(rank_cost[key] for _, rank_cost in shares)
    for new, _ in shares:
        cost["verified"] += sum(record["verdict"] == "verified" for record in new)
        attempts.records |= {(record["number"], record["sample"]): record for record in new}
    graded = [grade_of(r) for r in attempts.records.values() if r["verdict"] != "unfinished"]
    if 2 * len(graded) > len(attempts.records):      # else it may be one reply beside truncated attempts
        check_graded(cfg.task, graded)
    rows, counted, solutions = choose(cfg, questions, attempts.records.values())
    attempts.write()
    write_atomically(Path(cfg.output), ("[" + ",\n ".join(map(json.dumps, rows)) + "]\n").encode())
    for path in attempts.parts():
        path.unlink()
    f = figures(cfg, questions, attempts.records.values(), rows, counted, solutions, cost)
    print(summary(f, cfg, dropped))
    if not rows:
        print(f"No question was solved, so {cfg.output} is empty: try an easier task, a larger --oversample, "
              "or a better model.", file=sys.stderr)
    if cfg.json:
        print(json.dumps(f | {"dropped": dropped, "output": cfg.output}))
    return 0 if rows else 1


# --- the command line ---

def check(cfg):
    cfg.task = tasks.spec_of(cfg.task)
    if not cfg.output.endswith(".json"):
        raise BadInput(f"--output={cfg.output} should end in .json: rename it.")
    if cfg.temperature == 0 and cfg.oversample > 1:
        raise BadInput("At --temperature=0 all samples of a question are the same: raise it, or give "
                       "--oversample=1.")


def fingerprint(model):
    """Return the SHA-256 of a model's architecture and weights."""
    shape = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)
             if getattr(model.config, f.name) != f.default}       # a new field changes no old log
    digest = hashlib.sha256(json.dumps(shape).encode())
    for name, weight in track(sorted(model.state_dict().items()), "hashing the weights", "tensors"):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def header_of(cfg, dtype, tokenizer, model, task, form, questions, requests):
    """Return the log's header: everything the attempts depend on. It must be equal for a resume."""
    options = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in MAY_CHANGE}
    if not cfg.deterministic:
        del options["slots"]
    asked = json.dumps([questions, [request.ids for request in requests]])
    return {
        "config": options | {"dtype": dtype},
        "tokenizer": tokenizer.describe(),
        "model": fingerprint(model),
        "prompt": form,
        "code": code_of(task),
        "questions": hashlib.sha256(asked.encode()).hexdigest(),
    }


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv)
    # A rank that torchrun restarts resumes, and so does a job that SLURM requeues.
    cfg.overwrite &= not any(int(os.environ.get(f"{launcher}_RESTART_COUNT") or 0)
                             for launcher in ("TORCHELASTIC", "SLURM"))
    check(cfg)
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False,
                        deterministic=cfg.deterministic)
    source = distributed.on_main(lambda: hub.find(cfg.init_from))
    tokenizer = source.tokenizer(cfg.tokenizer)
    model = source.load()                    # in CPU memory; the engine copies it to the GPU
    cfg.few_shot = few_shot_of(cfg, source)
    if cfg.deterministic and cfg.slots is None:
        cfg.slots = 64                       # fixed, because batch shapes decide the last bits
    with task_errors():
        task = load(cfg.task)
        form = task.prompt
        questions, dropped = distributed.on_main(
            lambda: unseen_questions(task, cfg.split, cfg.num_questions, cfg.seed))
        if cfg.num_questions == "auto":
            cfg.num_questions = len(questions) + dropped             # for the log's header
        requests = requests_of(tokenizer, task, questions, cfg.oversample, cfg.max_new_tokens, cfg.few_shot)
        sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tokenizer.stop,
                            stop_strings_of(task))
        context = context_for(cfg, task, requests, cfg.few_shot, source)
        engine = Engine(model, cfg.slots, context, sampling, seed=cfg.seed, dtype=hw.sampling_dtype,
                        samples=cfg.oversample * len(questions), device=hw.device,
                        deterministic=cfg.deterministic, decode=tokenizer.decode,
                        half_weights=cfg.dtype == "auto")
        engine.check(max(requests, key=lambda request: len(request.ids)))
    if cfg.deterministic and engine.slots != cfg.slots:
        raise BadInput(f"Memory suffices for {engine.slots} samples at once, and --deterministic needs "
                       f"--slots={cfg.slots}, on which the last bits depend: free memory, or start again "
                       "with fewer.")
    header = header_of(cfg, engine.format, tokenizer, model, task, form, questions, requests)
    del model                                # the engine has its own copy
    attempts = distributed.on_main(lambda: open_log(cfg, header, len(questions)))
    if distributed.is_main():
        logged = f"; {len(attempts.records):,} attempts are logged already" if attempts.records else ""
        print(f"{len(questions):,} questions of {cfg.task} x {cfg.oversample} samples, {cfg.few_shot} worked "
              f"examples in each prompt; {engine.format} on {hw.name}, {engine.slots} samples in flight"
              f"{logged}.", flush=True)

    stop = guard.StopSignal(lambda: "the next answer", "the answers that are not graded yet")
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
        failure = (f"{e.filename or 'The attempts log'} could not be written ({e.strerror}): free disk "
                   "space, then repeat the command to resume.")
    stopped = any(number is not None for number in distributed.gather(stop.received))
    shares = []
    for rank_failure, *share in distributed.gather((failure, new, cost)):
        if rank_failure:
            raise BadInput(rank_failure)
        shares.append(share)
    if stopped:
        if distributed.is_main():
            logged = sum(len(attempts) for attempts, _ in shares)
            print(f"Stopped on request; {logged:,} more attempts are logged. Repeat the command"
                  f"{' without --overwrite' if cfg.overwrite else ''} to resume.", flush=True)
        return stop.exit_code()
    return distributed.on_main(lambda: finish(cfg, questions, attempts, shares, dropped))


if __name__ == "__main__":
    guard.run(main)
