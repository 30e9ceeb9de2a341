"""How good a model is: the share of right answers on a task, perplexity on a text.

    python eval.py out/base --task=unit_conversion
    python eval.py HuggingFaceTB/SmolLM2-360M --task=gsm8k --num_samples=8 --temperature=1
    python eval.py --compare out/base out/tuned --task=unit_conversion --json             the same questions to both
    python eval.py out/book --dataset=other.txt
    torchrun --nproc_per_node=8 eval.py HuggingFaceTB/SmolLM2-360M --dataset=wikitext --split=test --block_size=1024 --stride=512

Of a text every token but the first is predicted once, after at least block_size - stride others (at the
start, after those there are); nothing is put before the text. Knobs, as --key=value:
"""
import contextlib
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.usage import end_with_reader, first_line

first_line()                             # --help, or a word, before the seconds that importing PyTorch takes

import hf
import tasks
from engine import Engine, Sampling
from rollouts.accuracy import accuracy, by_domain, difference, macro
from rollouts.pipeline import Pipeline, ask, context_for, few_shot_of, requests_of, stop_strings_of
from rollouts.questions import questions_of, task_errors
from runtime import config, distributed, guard, hardware
from runtime.checkpoint import write_atomically
from runtime.config import BadInput
from tasks._pool import Pool, check_graded, load
from text import data
from text.perplexity import evaluation_line, text_loss


@dataclass
class Config:
    models: tuple = ()                       # run folders, Hugging Face folders or hub names, first on the
                                             # command line
    split: Literal["auto", "test", "valid", "train"] = "auto"   # auto: test of a task, valid of a text
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # auto: for a task bf16 where the hardware has
                                             # it; for a text fp32
    json: bool = False                       # all figures as the last line
    # a task
    task: str | dict = ""                    # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours; several:
                                             # NAME+NAME
    compare: bool = False                    # several models, each against the first; implied when several
                                             # are named
    num_questions: int | Literal["auto"] | None = "auto"     # as many as there are, up to 500; None: all; the
                                             # same for every model and seed
    num_samples: int = 1                     # a question
    few_shot: int | None = None              # worked examples before each; None: 0 for a run (those grpo.py
                                             # gave), 4 for Hugging Face's
    max_new_tokens: int = 128
    temperature: float = 0.0                 # 0: greedy
    top_k: int | None = None                 # sample among the k likeliest tokens; None: all
    top_p: float = 1.0                       # among the likeliest that together reach it
    min_p: float = 0.0                       # among those at least so likely, as a share of the likeliest
    seed: int = 0                            # of the sampling
    deterministic: bool = False              # a sample is the same bit for bit whoever shares its batch (see
                                             # engine/generate.py)
    reward_workers: int | None = None        # processes that verify; None: one a core, at most 8
    output: str | None = None                # a .jsonl for all answers with their grades, a question a line
    # a text
    dataset: str = ""                        # as train.py's; of a single file all of it counts, else the
                                             # split
    text_key: str = "text"                   # where the text is in .jsonl, .parquet, or a dataset of the hub
    data_dir: str = "data"                   # where tokenised texts are kept
    block_size: int | None = None            # tokens of a window; None: the model's, at most 1024
    stride: int | None = None                # tokens between the beginnings of two windows; None: block_size,
                                             # no overlap
    batch_size: int = 8                      # windows at a time
    eval_tokens: int | None = None           # predict only so many; None: all
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"


# --- a text ---

def evaluate_text(cfg):
    """Return the figures of a model on a text."""
    (name,) = cfg.models
    dtype = "fp32" if cfg.dtype == "auto" else cfg.dtype
    hw = hardware.setup(cfg.device, dtype, tf32=dtype != "fp32", compile=False, attention=cfg.attention)
    found = distributed.on_main(lambda: hf.find(name))
    tokenizer = found.tokenizer(cfg.tokenizer)
    block_size = cfg.block_size or min(1024, found.config.block_size)
    stride = cfg.stride or block_size
    if block_size > found.config.block_size or stride > block_size:
        raise BadInput(f"A stride of {stride} needs windows of at least that, and these of {block_size} a "
                       f"model with as many positions, which has {found.config.block_size}: lower --stride or "
                       "--block_size.")

    split = "valid" if cfg.split == "auto" else cfg.split
    folder = distributed.on_main(
        lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key, split))
    text = data.TokenFile(folder, "valid")
    if len(text) < 2:
        raise BadInput(f"{cfg.dataset} has no token to predict: give more text.")

    began = time.perf_counter()
    model = found.load(hw.attention, device=hw.device)
    result = text_loss(model, text, block_size, cfg.batch_size, hw, cfg.eval_tokens, stride)
    seconds = time.perf_counter() - began
    say(f"{name} on {cfg.dataset}: {result['tokens']:,} tokens in windows of {block_size}, stride {stride}, "
        f"{hw.dtype}, {seconds:.1f} s")
    say(evaluation_line(result))
    unknown = dict.fromkeys(("words", "bytes", "ppl_word", "bits_per_byte"))
    return unknown | result | {
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
    """A model that can be asked: nothing of what it will need is missing."""
    name: str
    found: hf.ModelSource
    tokenizer: object
    few_shot: int                            # worked examples before a question
    requests: list
    context: int                             # tokens of the longest prompt and the answer after it


def prepare(cfg, name, task, questions):
    """Return the Candidate of a name."""
    found = distributed.on_main(lambda: hf.find(name))
    tokenizer = found.tokenizer(cfg.tokenizer)
    few_shot = few_shot_of(cfg, found)
    with task_errors():
        requests = requests_of(tokenizer, task, questions, cfg.num_samples, cfg.max_new_tokens, few_shot)
    return Candidate(name, found, tokenizer, few_shot, requests, context_for(cfg, requests, few_shot, found))


def evaluate_task(cfg):
    """Return the figures of one model on a task, or {"models": those of several}."""
    many = cfg.compare or len(cfg.models) > 1
    split = "test" if cfg.split == "auto" else cfg.split
    with task_errors():
        # what can't be sampled with is refused here
        Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
        task = load(cfg.task)
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False)
    questions = distributed.on_main(lambda: questions_of(task, split, cfg.num_questions, most=500))
    # all before hours are spent on one
    candidates = [prepare(cfg, name, task, questions) for name in cfg.models]
    say(f"{task.name}: {len(questions)} {split} questions x {cfg.num_samples}, temperature "
        f"{cfg.temperature:g}; % [95% interval]")

    rows = []
    answers = []                             # lines of cfg.output
    first_grades = None
    with task_errors(), Pool(cfg.task, cfg.reward_workers) as pool:
        for candidate in candidates:
            row, grades, texts = evaluate_model(cfg, hw, task, questions, pool, candidate)
            row["split"] = split
            answers += answers_of(candidate.name, questions, texts, grades)
            first_grades = first_grades or grades
            if rows:
                row |= difference(first_grades, grades)
            if task.domains:
                row |= of_domains(task, questions, grades, first_grades)
            check_graded(cfg.task, [grade for samples in grades for grade in samples])
            report(row, grades, max(map(len, cfg.models)), many, heading=not rows)
            rows.append(row)
            gc.collect()                     # one model's memory is the next one's
    if cfg.output and distributed.is_main():
        write_atomically(cfg.output, "".join(json.dumps(line) + "\n" for line in answers).encode())
    return {"models": rows} if many else rows[0]


def evaluate_model(cfg, hw, task, questions, pool, candidate):
    """Ask one model. Returns (its figures, its Grades [n_questions][num_samples], with cfg.output its answers,
    texts of the same shape, else [])."""
    tokenizer = candidate.tokenizer
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tokenizer.stop,
                        stop_strings_of(task))
    slots = 64 if cfg.deterministic else None
    engine = Engine(candidate.found.load(device=hw.device), slots, candidate.context, sampling, seed=cfg.seed,
                    dtype=hw.sampling_dtype, deterministic=cfg.deterministic, decode=tokenizer.decode)
    began = time.perf_counter()
    pipeline = Pipeline(engine, pool, tokenizer, task)
    grades, texts = ask(pipeline, questions, candidate.requests, shown=len(questions) if cfg.output else 0,
                        what=f"asking {candidate.name}")
    seconds = time.perf_counter() - began
    (tokens,) = distributed.sum([engine.progress.tokens])
    figures = accuracy(grades) | {
        "model": candidate.name,
        "task": cfg.task,
        "num_samples": cfg.num_samples,
        "temperature": cfg.temperature,
        "few_shot": candidate.few_shot,
        "dtype": hw.sampling_format,
        "seconds": seconds,
        "tokens": int(tokens),
        "tokens_per_s": tokens / seconds,
    }
    return figures, grades, texts


# --- the answers, in a file ---

def answers_of(name, questions, texts, grades):
    """Return the lines of cfg.output about a model, a question each; none if there are no texts."""
    found = []
    for question, of_question, graded in zip(questions, texts, grades):
        samples = [{"completion": text, "score": grade.score, "parts": grade.parts, "error": grade.error}
                   for text, grade in zip(of_question, graded, strict=True)]
        found.append({"model": name, "question": question["question"], "answer": question["answer"],
                      "samples": samples})
    return found


def check_output(path):
    """Raise BadInput if a file is there that holds no answers, or none can be written there."""
    path = Path(path)
    if not path.parent.is_dir():
        raise BadInput(f"There is no folder {path.parent} for --output={path}: make it, or choose another.")
    if path.is_dir():
        raise config.would_overwrite(path, "a file of answers")
    if path.exists():
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            if {"model", "question", "samples"} <= config.parse_json(file.readline(), dict).keys():
                return
        raise config.would_overwrite(path, "eval.py's answers")


def of_domains(task, questions, grades, first_grades):
    """Return the figures of each task of a mixture, with how much better it is than the first model's, and the
    means in which each task counts alike."""
    first = by_domain(task, questions, first_grades)
    found = {}
    for name, rows in by_domain(task, questions, grades).items():
        found[name] = accuracy(rows) | difference(first[name], rows)
    means = macro(found.values()) | macro(found.values(), "difference")
    return {"domains": found} | {f"macro_{name}": value for name, value in means.items()}


def report(row, grades, width, many, heading):
    """Print a model's line of the table, in percent."""
    def percent(key, sign=""):
        p, low, high = (f"{100 * row[key + end]:{sign}.1f}" for end in ("", "_low", "_high"))
        return f"{p} [{low}, {high}]"
    cells = {f"{'accuracy':>17}": percent("accuracy")}
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
        say(f"{row['errors']} of {row['samples']} answers could not be scored and count as wrong: {error}")


def say(text):
    if distributed.is_main():
        print(text, flush=True)


def main(argv):
    cfg = config.load(Config, argv, positional="models")
    if not cfg.models or not (cfg.dataset or cfg.task):
        raise BadInput("Name a model and a text or a task: python eval.py RUN_OR_MODEL --dataset=..., or "
                       "--task=...")
    cfg.task = tasks.spec_of(cfg.task)
    if cfg.dataset and cfg.task:
        raise BadInput("A model is evaluated on a text or on a task: leave out --dataset or --task.")
    if cfg.dataset and (len(cfg.models) > 1 or cfg.compare):
        raise BadInput("Models are compared on a task: give --task= instead of --dataset=, or name one "
                       "model.")
    config.at_least(cfg, 1, "block_size stride batch_size eval_tokens num_samples")
    config.at_most(cfg, 10**6, "num_samples")
    config.check_sampling(cfg)
    config.check_questions(cfg)
    if cfg.num_samples > 1 and not cfg.temperature:
        raise BadInput(f"At temperature 0 all {cfg.num_samples} samples are the same: give --temperature=1, "
                       "or leave --num_samples out.")
    if cfg.output is not None:
        if cfg.dataset:
            raise BadInput("--output= is for answers to a task: leave it out, or give --task= instead of "
                           "--dataset=.")
        check_output(cfg.output)
    else:
        end_with_reader()
    distributed.init()
    figures = evaluate_task(cfg) if cfg.task else evaluate_text(cfg)
    if cfg.json:
        say(json.dumps(figures))
    return 0


if __name__ == "__main__":
    guard.run(main)
