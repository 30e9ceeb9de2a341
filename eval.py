"""Evaluate models: accuracy, mean score and pass@k on a task, or perplexity on a text.

    python eval.py out/base --task=unit_conversion
    python eval.py HuggingFaceTB/SmolLM2-360M --task=gsm8k --num_samples=8 --temperature=1
    python eval.py --compare out/base out/tuned --task=unit_conversion --json            on the same questions
    python eval.py out/base --task=my_reward.py --dataset=questions.jsonl
    python eval.py out/book --dataset=other.txt
    torchrun --nproc_per_node=8 eval.py HuggingFaceTB/SmolLM2-360M --dataset=wikitext --split=test

On a text, every token but the first is predicted once, from at least block_size - stride tokens (at the
start, from all that precede it); no token is prepended.
"""
import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from runtime.usage import end_with_reader, first_line

first_line()                             # --help without the seconds that importing PyTorch takes

import hub
import tasks
from engine import Engine, Sampling
from rollouts.accuracy import accuracy, by_domain, difference, macro, mean_score, partly_right
from rollouts.pipeline import Pipeline, ask, context_for, few_shot_of, requests_of, stop_strings_of
from rollouts.questions import questions_in, questions_of, task_errors
from rollouts.records import record_of
from runtime import config, distributed, guard, hardware, memory
from runtime.checkpoint import write_atomically
from runtime.config import (BadInput, Bounds, Count, NonNegativeFloat, NonNegativeInt, PositiveInt,
                            UnitInterval)
from runtime.log import for_json
from tasks._pool import Pool, check_graded, load


@dataclass
class Config:
    models: tuple = ()                       # run folders, Hugging Face folders, GGUF files or hub names,
                                             # first on the command line
    split: Literal["auto", "test", "valid", "train"] = "auto"   # auto: test for a task, valid for a text
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # auto: for a task bf16 if the hardware has
                                             # it (a CPU without: docs/sampling.md), for a text fp32
    json: bool = False                       # print all figures as JSON on the last line
    # a task
    task: str | dict = ""                    # NAME or NAME:ARGUMENT from tasks/, or your file.py; several:
                                             # NAME+NAME
    compare: bool = False                    # compare each model with the first; implied by several models
    num_questions: Count | Literal["auto"] | None = "auto"     # auto: at most 500, of a dataset all;
                                             # None: all, or the task's default; whatever the seed
    num_samples: Count = 1                   # samples per question
    few_shot: Annotated[int, Bounds(0, 1000)] | None = None     # worked examples in the prompt; None: 0 with
                                             # a dataset, a grpo.py run's own, 4 for a Hugging Face model,
                                             # else 0
    max_new_tokens: PositiveInt = 128        # longest completion
    temperature: NonNegativeFloat = 0.0      # of sampling; 0: greedy
    top_k: PositiveInt | None = None         # sample only from the k likeliest tokens; None: all
    top_p: UnitInterval = 1.0                # fewest tokens with this total probability (GPU: at most 1,024)
    min_p: UnitInterval = 0.0                # tokens at least this fraction as likely as the likeliest
    seed: NonNegativeInt = 0                 # of samples
    deterministic: bool = False              # samples do not depend on the rest of the batch, bit for bit
                                             # (see engine/runner.py)
    reward_workers: Annotated[int, Bounds(1, 256)] | None = None     # verifier processes; None: one per core,
                                             # at most 8
    output: str | None = None                # .jsonl for all answers, a record a line (rollouts/records.py)
    # a text
    dataset: str = ""                        # as in train.py; a single file is evaluated whole, other
                                             # datasets by split. With a task: .jsonl of questions, as in
                                             # grpo.py
    text_key: str = "text"                   # column of the text in .jsonl, .parquet or a hub dataset
    data_dir: str = "data"                   # cache of tokenised texts
    block_size: PositiveInt | None = None    # tokens per window; None: the model's, at most 1024
    stride: PositiveInt | None = None        # tokens between window starts; None: block_size (no overlap)
    batch_size: PositiveInt = 8              # windows per forward pass
    eval_tokens: PositiveInt | None = None   # predict at most this many; None: all
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"  # kernel


# --- a text ---

def evaluate_text(cfg):
    """Return a model's figures on a text."""
    from text import data
    from text.perplexity import evaluation_line, text_loss
    (name,) = cfg.models
    dtype = "fp32" if cfg.dtype == "auto" else cfg.dtype
    hw = hardware.setup(cfg.device, dtype, tf32=dtype != "fp32", compile=False, attention=cfg.attention)
    source = distributed.on_main(lambda: hub.find(name))
    tokenizer = source.tokenizer(cfg.tokenizer)
    block_size = cfg.block_size or min(1024, source.config.block_size)
    stride = cfg.stride or block_size
    if block_size > source.config.block_size:
        raise BadInput(f"--block_size={block_size} exceeds the model's {source.config.block_size} "
                       "positions: lower it.")
    if stride > block_size:
        raise BadInput(f"--stride={stride} exceeds the window of {block_size} tokens: lower it.")

    split = "valid" if cfg.split == "auto" else cfg.split
    folder = distributed.on_main(
        lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key, split))
    text = data.TokenFile(folder, "valid")
    if len(text) < 2:
        raise BadInput(f"{cfg.dataset} has fewer than two tokens: give a longer text.")

    began = time.perf_counter()
    model = source.load(hw.attention, device=hw.device)
    result = text_loss(model, text, block_size, cfg.batch_size, hw, cfg.eval_tokens, stride)
    seconds = time.perf_counter() - began
    say(f"{name} on {cfg.dataset}: {result['tokens']:,} tokens in windows of {block_size}, stride {stride}, "
        f"{hw.dtype}, {seconds:.1f} s")
    say(evaluation_line(result))
    unavailable = dict.fromkeys(("words", "bytes", "ppl_word", "bits_per_byte"))
    return unavailable | result | {
        "model": name,
        "dataset": cfg.dataset,
        "block_size": block_size,
        "stride": stride,
        "dtype": hw.dtype,
        "seconds": seconds,
    }


# --- a task ---

@dataclass
class Candidate:
    """A model whose inputs are checked and whose prompts are built; its weights are not loaded yet."""
    name: str
    source: hub.ModelSource
    tokenizer: object
    few_shot: int                            # worked examples in each prompt
    requests: list
    context: int                             # tokens of the longest prompt with its completion


def prepare(cfg, name, task, questions):
    """Return the Candidate for a run folder or model name; BadInput if anything is missing."""
    source = distributed.on_main(lambda: hub.find(name))
    tokenizer = source.tokenizer(cfg.tokenizer)
    few_shot = few_shot_of(cfg, source)
    with task_errors():
        requests = requests_of(tokenizer, task, questions, cfg.num_samples, cfg.max_new_tokens, few_shot)
    context = context_for(cfg, task, requests, few_shot, source)
    return Candidate(name, source, tokenizer, few_shot, requests, context)


def evaluate_task(cfg):
    """Return one model's figures on a task, or {"models": [figures of each]}."""
    many = cfg.compare or len(cfg.models) > 1
    split = "test" if cfg.split == "auto" else cfg.split
    with task_errors():
        Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)       # raises for invalid options
        task = load(cfg.task)
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False,
                        deterministic=cfg.deterministic)
    questions = distributed.on_main(lambda: read_questions(cfg, task, split))
    # check every model before hours are spent on the first
    candidates = [prepare(cfg, name, task, questions) for name in cfg.models]
    say(f"{task.name}: {len(questions)} {cfg.dataset or split} questions x {cfg.num_samples}, temperature "
        f"{cfg.temperature:g}; % [95% interval]")

    rows = []
    answers = []                             # rows for cfg.output
    first_grades = None
    with_scores = False                      # whether the table has a column for mean scores
    with task_errors(), Pool(cfg.task, cfg.reward_workers) as pool:
        for candidate in candidates:
            row, grades, completions = evaluate_model(cfg, hw, task, questions, pool, candidate)
            row["split"] = split
            if cfg.output:
                answers += answers_of(candidate.name, completions)
            first_grades = first_grades or grades
            if rows:
                row |= difference(first_grades, grades)
            if task.domains:
                row |= domain_figures(task, questions, grades, first_grades)
            check_graded(cfg.task, [grade for samples in grades for grade in samples])
            heading = not rows or (partly_right(grades) and not with_scores)
            with_scores = with_scores or partly_right(grades)
            report(row, grades, max(map(len, cfg.models)), many, with_scores, heading)
            rows.append(row)
            memory.release()                 # of this model, before the next is loaded
    if cfg.output and distributed.is_main():
        write_atomically(cfg.output, "".join(json.dumps(line) + "\n" for line in answers).encode())
    return {"models": rows} if many else rows[0]


def read_questions(cfg, task, split):
    """Return the questions of cfg.dataset, or of the task's split."""
    if cfg.dataset:
        n = None if cfg.num_questions == "auto" else cfg.num_questions
        return list(questions_in(cfg.dataset, split, task).values())[:n]
    return questions_of(task, split, cfg.num_questions, most=500)


def evaluate_model(cfg, hw, task, questions, pool, candidate):
    """Sample and grade one model's answers. Returns (figures, Grades [n_questions][num_samples], this rank's
    Completions)."""
    tokenizer = candidate.tokenizer
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tokenizer.stop,
                        stop_strings_of(task))
    slots = 64 if cfg.deterministic else None
    # In CPU memory the weights are fp32; the engine copies them to the device in its own format.
    engine = Engine(candidate.source.load(), slots, candidate.context, sampling, seed=cfg.seed,
                    samples=cfg.num_samples * len(questions), dtype=hw.sampling_dtype, device=hw.device,
                    deterministic=cfg.deterministic, decode=tokenizer.decode,
                    half_weights=cfg.dtype == "auto")
    began = time.perf_counter()
    pipeline = Pipeline(engine, pool, tokenizer, task)
    grades, completions = ask(pipeline, questions, candidate.requests, label=f"evaluating {candidate.name}")
    seconds = time.perf_counter() - began
    (tokens,) = distributed.sum_over_ranks([engine.progress.tokens])
    figures = accuracy(grades) | mean_score(grades) | {
        "model": candidate.name,
        "task": cfg.task,
        "num_samples": cfg.num_samples,
        "temperature": cfg.temperature,
        "few_shot": candidate.few_shot,
        "dtype": engine.format,
        "seconds": seconds,
        "tokens": int(tokens),
        "tokens_per_s": tokens / seconds,
    }
    return figures, grades, completions


# --- answers and tables ---

def answers_of(name, completions):
    """Return the records of a model's Completions on all ranks, for cfg.output."""
    rows = sum(distributed.gather([{"model": name} | record_of(c) for c in completions]), [])
    return sorted(rows, key=lambda row: (row["number"], row["sample"]))


def check_output(path):
    """Raise BadInput if a path can't be written to, or holds a file other than answers of eval.py."""
    path = Path(path)
    if not path.parent.is_dir():
        raise BadInput(f"There is no folder {path.parent} for --output={path}: create it, or choose another.")
    if path.exists() and not path.is_file():
        raise config.would_overwrite(path, "a file of answers")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"The folder of --output={path} can't be written to: choose another.")
    if path.exists():
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            if {"model", "question", "completion"} <= config.parse_json(file.readline(), dict).keys():
                return
        raise config.would_overwrite(path, "eval.py's answers")


def domain_figures(task, questions, grades, first_grades):
    """Return figures for each task of a mixture, with the difference to the first model, and their macro
    averages."""
    first = by_domain(task, questions, first_grades)
    domains = {}
    for name, rows in by_domain(task, questions, grades).items():
        domains[name] = accuracy(rows) | mean_score(rows) | difference(first[name], rows)
    means = {}
    for name in ("accuracy", "mean_score", "difference"):
        means |= macro(domains.values(), name)
    return {"domains": domains} | {f"macro_{name}": value for name, value in means.items()}


def report(row, grades, width, many, with_scores, heading):
    """Print a model's row of the table, in percent. with_scores: also its mean score."""
    def percent(key, sign=""):
        p, low, high = (f"{100 * row[key + end]:{sign}.1f}" for end in ("", "_low", "_high"))
        return f"{p} [{low}, {high}]"
    cells = {f"{'accuracy':>17}": percent("accuracy")}
    if with_scores:
        cells[f"{'mean score':>17}"] = percent("mean_score")
    if many:
        cells[f"{'above the first':>20}"] = percent("difference", "+") if "difference" in row else ""
    shares = {name: figures["accuracy"] for name, figures in row.get("domains", {}).items()}
    shares |= row["parts"] | {"verified": row["verified"]}
    shares |= {f"pass@{k}": p for k, p in row["pass_at_k"].items() if k != "1"}
    cells |= {f"{name:>6}": f"{100 * share:.1f}" for name, share in shares.items()}
    cells[f"{'seconds':>7}"] = f"{row['seconds']:.1f}"
    if heading:
        say(" " * width + "".join(f"  {name}" for name in cells))
    say(f"{row['model']:<{width}}" + "".join(f"  {text:>{len(name)}}" for name, text in cells.items()))
    if row["errors"]:
        error = next(grade.error for samples in grades for grade in samples if grade.error)
        say(f"{row['errors']} of {row['samples']} answers could not be graded and count as wrong: {error}")


def say(text):
    if distributed.is_main():
        print(text, flush=True)


# options of one kind of evaluation alone
OF_TEXT = "block_size", "stride", "batch_size", "eval_tokens", "attention"
OF_TASK = ("num_questions", "num_samples", "few_shot", "max_new_tokens", "temperature", "top_k", "top_p",
           "min_p", "seed", "deterministic", "reward_workers")


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, positional="models")
    if not cfg.models or not (cfg.dataset or cfg.task):
        raise BadInput("Name a model and a text or a task: python eval.py MODEL --dataset=... or --task=...")
    cfg.task = tasks.spec_of(cfg.task)
    for option in OF_TEXT if cfg.task else OF_TASK:
        if getattr(cfg, option) != getattr(Config, option):
            mistake = "a text, not for --task=" if cfg.task else "a task, not for a text"
            raise BadInput(f"--{option} is for {mistake}: leave it out.")
    if cfg.task and cfg.dtype == "fp16":
        raise BadInput("--dtype=fp16 is for a text: for sampling its range is too narrow; use auto.")
    if not cfg.task and (len(cfg.models) > 1 or cfg.compare):
        raise BadInput("Models are compared only on a task: add --task=, or name one model.")
    if cfg.num_samples > 1 and not cfg.temperature:
        raise BadInput(f"At temperature 0 all {cfg.num_samples} samples are the same: give --temperature=1, "
                       "or leave out --num_samples.")
    if cfg.output is not None:
        if not cfg.task:
            raise BadInput("--output= is for answers to a task: leave it out, or add --task=.")
        check_output(cfg.output)
    else:
        end_with_reader()
    figures = evaluate_task(cfg) if cfg.task else evaluate_text(cfg)
    if cfg.json:
        say(json.dumps(for_json(figures)))
    return 0


if __name__ == "__main__":
    guard.run(main)
