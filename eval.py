"""How good a model is: the share of right answers on a task, perplexity on a text. Also the functions that other stages call.

    python eval.py out/base --task=unit_conversion
    python eval.py HuggingFaceTB/SmolLM2-360M --task=gsm8k --num_samples=8 --temperature=1
    python eval.py --compare out/base out/tuned --task=unit_conversion --json             the same questions to both
    python eval.py out/book --dataset=other.txt
    torchrun --nproc_per_node=8 eval.py HuggingFaceTB/SmolLM2-360M --dataset=wikitext --split=test --block_size=1024 --stride=512

Of a text every token but the first is predicted once, after at least block_size - stride others (at the start, after those there
are); nothing is put before the text. Knobs, as --key=value:
"""
import contextlib
import dataclasses
import gc
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from tqdm import tqdm

import hf
from engine import Engine, Request, Sampling
from runtime import config, data, distributed, examples, guard, hardware
from runtime.config import BadInput
from runtime.prompts import context_of, prompt_ids
from runtime.rewards import BrokenReward, Pool, check_graded, load

Z = 1.959963984540054                        # of a normal distribution, 95% lies within so many standard deviations


@dataclass
class Config:
    models: tuple = ()                       # run folders, Hugging Face folders or hub names, first on the command line
    split: Literal["auto", "test", "valid", "train"] = "auto"   # auto: test of a task, valid of a text
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes, or a folder with one
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # auto: for a task bf16 where the hardware has it; for a text fp32
    json: bool = False                       # all figures as the last line
    # a task
    task: str = ""                           # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours
    compare: bool = False                    # several models, each against the first; implied when several are named
    num_questions: int | Literal["auto"] | None = "auto"     # as many as there are, up to 500; None: all;
                                             # the same for every model and seed
    num_samples: int = 1                     # a question
    few_shot: int | None = None              # worked examples before each; None: 0 for a run (those grpo.py gave), 4 for Hugging Face's
    max_new_tokens: int = 128
    temperature: float = 0.0                 # 0: greedy
    top_k: int | None = None                 # sample among the k likeliest tokens; None: all
    top_p: float = 1.0                       # among the likeliest that together reach it
    min_p: float = 0.0                       # among those at least so likely, as a share of the likeliest
    seed: int = 0                            # of the sampling
    deterministic: bool = False              # a sample is the same bit for bit whoever shares its batch (see engine.py)
    reward_workers: int | None = None        # processes that verify; None: one a core, at most 8
    # a text
    dataset: str = ""                        # as train.py's; of a single file all of it counts, else the split
    text_key: str = "text"                   # where the text is in .jsonl, .parquet, or a dataset of the hub
    data_dir: str = "data"                   # where tokenised texts are kept
    block_size: int | None = None            # tokens of a window; None: the model's, at most 1024
    stride: int | None = None                # tokens between the beginnings of two windows; None: block_size, no overlap
    batch_size: int = 8                      # windows at a time
    eval_tokens: int | None = None           # predict only so many; None: all
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"


def text_loss(model, tokens, block_size, batch_size, hardware, limit=None, stride=None):
    """Loss of a text over all ranks, each token predicted once (data.complete_pass).

    tokens: data.TokenFile. limit: only the first so many predicted tokens. Returns a dictionary: `loss` in nats per token, `nll`
    in nats, `tokens` predicted (the first token of a text is context only), `ppl_token`; where the text's words and bytes are
    known also these, `ppl_word` = exp(nats / words), words being what white space separates, and `bits_per_byte`. With a limit,
    words and bytes are counted in proportion.
    """
    result = loss_of(model, data.complete_pass(tokens, block_size, batch_size, limit, distributed.rank(), distributed.world_size(), stride),
                     hardware)
    nats, n = result["nll"], result["tokens"]
    if tokens.words:
        share = n / (len(tokens) - 1)
        words, bytes = share * tokens.words, share * tokens.bytes
        result |= {"words": round(words), "bytes": round(bytes), "ppl_word": exp(nats / words), "bits_per_byte": nats / bytes / math.log(2)}
    return result


def examples_loss(model, held_out, batch_size, hardware):
    """As text_loss, of the answers of examples.Examples, over all ranks."""
    held_out = sorted(held_out, key=lambda e: e.length)
    mine, longest = held_out[distributed.rank()::distributed.world_size()], held_out[-1].length
    parts = (mine[i:i + batch_size] for i in range(0, len(mine), batch_size))
    return loss_of(model, (examples.padded(part, examples.width(part[-1].length, longest)) for part in parts), hardware)


@torch.no_grad()
def loss_of(model, batches, hardware):
    """{loss, nll, tokens, ppl_token} of batches x, y, summed over all ranks."""
    training = model.training
    model.eval()
    nats, n = 0.0, 0
    for x, y in batches:
        n += int((y != data.IGNORE).sum())
        with hardware.autocast():
            nats += model.loss(x.to(hardware.device), y.to(hardware.device)).item()
    model.train(training)
    nats, n = distributed.sum([nats, n])
    return {"loss": nats / n, "nll": nats, "tokens": int(n), "ppl_token": exp(nats / n)}


def exp(x):
    """Perplexity, infinite where a float can't hold it."""
    return math.exp(x) if x < 700 else math.inf


def evaluation_line(result):
    """A line for people of what text_loss returned."""
    line = f"val loss {result['loss']:.4f} | perplexity {result['ppl_token']:.2f} a token"
    return line + (f", {result['ppl_word']:.2f} a word | {result['bits_per_byte']:.4f} bits/byte" if "ppl_word" in result else "")


# --- on a task ---

def few_shot_of(cfg, found):
    """Worked examples before a question: for a model that was trained here as many as grpo.py trained it with, none after other
    training, for it has seen the form; four for any other."""
    if cfg.few_shot is not None:
        return cfg.few_shot
    if found.step is None:
        return 4
    saved = config.read_saved(found.folder).get("few_shot")
    return config.check_type(saved, int | None, f"{found.folder}/config.json: few_shot") or 0


def requests_of(tokenizer, task, questions, num_samples=1, max_new_tokens=128, few_shot=0):
    """The engine's Request of each question, in their order, with so many worked examples before it (without the question itself).
    ValueError, LookupError or OSError if the task does not have them."""
    worked = task.examples(few_shot) if few_shot else ()
    prompts = [prompt_ids(tokenizer, q["question"], task.prompt, [pair for pair in worked if pair[0] != q["question"]],
                          task.instruction if worked else None) for q in questions]
    return [Request(ids, num_samples, key, max_new_tokens) for key, ids in enumerate(prompts)]


def context_for(cfg, requests, few_shot, found):
    """context_of the longest of the prompts, before a model is asked."""
    longest = max(len(request.ids) for request in requests)
    return context_of(longest, cfg.max_new_tokens, found.config.block_size,
                      f"lower --few_shot, which is {few_shot}, or choose another model than {found.folder}")


def ask(engine, tokenizer, questions, requests, pool, progress=None, texts=None):
    """Grades [n_questions][num_samples] of a model's answers, all of them on every rank.

    requests: of all questions, on every rank, which asks its share of them and scores what is there while the rest is generated.
    engine: with the task's stop among its stop strings. pool: a rewards.Pool that has nothing left to collect. progress: called
    with the engine's Progress after each look. texts: a dictionary that is given {(question's key, sample): text}. ValueError, on
    every rank, if one of them has what can't be sampled.
    """
    said, mine, error = {}, [], None
    try:
        for request in requests:
            engine.check(request)
        for sample in engine.generate(requests[distributed.rank()::distributed.world_size()], progress):
            text = said[sample.request.key, sample.index] = tokenizer.text_of(sample.ids)
            pool.submit(questions[sample.request.key], text)
            mine += pool.collect()
        mine += pool.collect(wait=True)
    except (ValueError, FloatingPointError) as e:
        error = e if isinstance(e, BrokenReward) else ValueError(str(e))
    errors, shares, answers = zip(*distributed.gather((error, dict(zip(said, mine)), said if texts is not None else {})))
    if any(errors):
        raise next(filter(None, errors))
    for answer in answers if texts is not None else ():
        texts |= answer
    grades = {which: grade for share in shares for which, grade in share.items()}
    return [[grades[i, sample] for sample in range(request.num_samples)] for i, request in enumerate(requests)]


def accuracy(grades):
    """Figures of Grades [n_questions][num_samples], all but the last three in [0, 1]. A sample is right if its score is 1.

    accuracy: mean over questions of the share of right samples, from accuracy_low to accuracy_high with 95% confidence; pass_at_k:
    {str(k): chance that one of k samples is right} for k = 1, 2, 4, ..., num_samples; parts: {name: share of samples for which it is
    true}; answer_rate: that of the part "answered", None without; verified: share of samples fit for training.
    """
    samples = [grade for row in grades for grade in row]
    names = dict.fromkeys(name for grade in samples for name in grade.parts)
    parts = {name: fmean(bool(grade.parts.get(name)) for grade in samples) for name in names}
    shares, fewest = right(grades), min(map(len, grades))
    low, high = interval(shares, len(samples) / len(grades))
    ks = sorted({2**i for i in range(fewest.bit_length())} | {fewest})
    return {"accuracy": fmean(shares), "accuracy_low": low, "accuracy_high": high, "answer_rate": parts.get("answered"),
            "pass_at_k": {str(k): fmean(pass_at(k, len(row), sum(g.score == 1 for g in row)) for row in grades) for k in ks},
            "parts": parts, "verified": fmean(grade.verified for grade in samples),
            "questions": len(grades), "samples": len(samples), "errors": sum(grade.error is not None for grade in samples)}


def right(grades):
    """Of each question, the share of its samples that are right."""
    return [fmean(grade.score == 1 for grade in row) for row in grades]


def pass_at(k, n, right):
    """Chance that one of k samples is right, without bias, from n of which so many are (Chen et al. 2021)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def interval(shares, num_samples):
    """(low, high) that hold the mean of questions' shares of right samples with 95% confidence: Wilson's interval (1927) for as many
    independent answers as would have its standard error. These are the questions if samples of one are right or wrong together, or
    if there is one each; at most they are the samples. The standard error is taken with one more question, half of it right. At one
    sample each that changes nothing; without it, where few samples are right, as few as 85% of intervals hold the truth (simulated)."""
    n, p = len(shares), fmean(shares)
    around, squares = (n * p + 0.5) / (n + 1), (sum(x * x for x in shares) + 0.5) / (n + 1)
    n /= max((squares - around**2) / (around * (1 - around)), 1 / num_samples)
    middle, half = p + Z**2 / (2 * n), Z * math.sqrt(p * (1 - p) / n + (Z / (2 * n))**2)
    return max(0.0, (middle - half) / (1 + Z**2 / n)), min(1.0, (middle + half) / (1 + Z**2 / n))


def difference(a, b):
    """How much more accurate b is than a, Grades on the same questions: {difference, difference_low, difference_high}. Question by
    question, so what is hard for both does not count. The 95% interval has one more question, half of it gained and half lost
    (after Bonett and Price 2012, who add two), or ten questions without a difference would prove that there is none."""
    gains = [y - x for x, y in zip(right(a), right(b), strict=True)]
    n = len(gains) + 1
    middle = sum(gains) / n
    half = Z * math.sqrt(((sum(x * x for x in gains) + 1) / n - middle**2) / n)
    return {"difference": fmean(gains), "difference_low": max(-1.0, middle - half), "difference_high": min(1.0, middle + half)}


# --- the command line ---

def evaluate_text(cfg):
    (name,), split, dtype = cfg.models, "valid" if cfg.split == "auto" else cfg.split, "fp32" if cfg.dtype == "auto" else cfg.dtype
    hw = hardware.setup(cfg.device, dtype, tf32=dtype != "fp32", compile=False, attention=cfg.attention)
    found = distributed.on_main(lambda: hf.find(name))
    tokenizer = found.tokenizer(cfg.tokenizer)
    block_size = cfg.block_size or min(1024, found.config.block_size)
    stride = cfg.stride or block_size
    if block_size > found.config.block_size or stride > block_size:
        raise BadInput(f"A stride of {stride} needs windows of at least that, and these of {block_size} a model with as many positions, "
                       f"which has {found.config.block_size}: lower --stride or --block_size.")
    folder = distributed.on_main(lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key, split))
    text = data.TokenFile(folder, "valid")
    if len(text) < 2:
        raise BadInput(f"{cfg.dataset} has no token to predict: give more text.")
    began = time.perf_counter()
    model = found.load(hw.attention, device=hw.device)
    result = text_loss(model, text, block_size, cfg.batch_size, hw, cfg.eval_tokens, stride)
    seconds = time.perf_counter() - began
    say(f"{name} on {cfg.dataset}: {result['tokens']:,} tokens in windows of {block_size}, stride {stride}, {hw.dtype}, {seconds:.1f} s")
    say(evaluation_line(result))
    unknown = dict.fromkeys(("words", "bytes", "ppl_word", "bits_per_byte"))
    return unknown | result | {"model": name, "dataset": cfg.dataset, "block_size": block_size, "stride": stride, "dtype": hw.dtype,
                               "seconds": seconds}


def evaluate_task(cfg):
    """The figures of one model, or {"models": those of several}."""
    many, split = cfg.compare or len(cfg.models) > 1, "test" if cfg.split == "auto" else cfg.split
    with refused():
        sampling, task = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p), load(cfg.task)
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False)
    questions = distributed.on_main(lambda: questions_of(task, split, cfg.num_questions, most=500))
    models = [prepare(cfg, name, task, questions) for name in cfg.models]            # all of them before hours are spent on one
    say(f"{task.name}: {len(questions)} {split} questions x {cfg.num_samples}, temperature {cfg.temperature:g}; % [95% interval]")
    grades, rows = [], []
    with refused(), Pool(cfg.task, cfg.reward_workers) as pool:
        for name, found, tokenizer, few_shot, asked, context in models:
            sampling = dataclasses.replace(sampling, stop=tokenizer.stop, stop_strings=(task.stop,) if task.stop else ())
            engine = Engine(found.load(device=hw.device), 64 if cfg.deterministic else None, context, sampling, cfg.seed,
                            hw.sampling_dtype, cfg.deterministic, tokenizer.decode)
            total, began = cfg.num_samples * len(asked[distributed.rank()::distributed.world_size()]), time.perf_counter()
            with tqdm(total=total, desc=name, unit="answer", leave=False, disable=None if distributed.is_main() else True) as bar:
                grades.append(ask(engine, tokenizer, questions, asked, pool, lambda now: bar.update(now.samples - bar.n)))
            seconds, (tokens,) = time.perf_counter() - began, distributed.sum([engine.progress.tokens])
            rows.append(accuracy(grades[-1]) | {
                "model": name, "task": cfg.task, "split": split, "num_samples": cfg.num_samples, "temperature": cfg.temperature,
                "few_shot": few_shot, "dtype": hw.sampling_format, "seconds": seconds, "tokens": int(tokens), "tokens_per_s": tokens / seconds})
            if rows[1:]:
                rows[-1] |= difference(grades[0], grades[-1])
            check_graded(cfg.task, [grade for row in grades[-1] for grade in row])
            report(rows[-1], grades[-1], max(map(len, cfg.models)), many, heading=not rows[1:])
            del engine
            gc.collect()                                               # its memory is the next one's
    return {"models": rows} if many else rows[0]


@contextlib.contextmanager
def refused():
    """What a task, its workers or the engine say of their input, as BadInput. A KeyError is a mistake in a task's own code."""
    try:
        yield
    except (LookupError, ValueError, OSError, FloatingPointError) as e:
        if isinstance(e, KeyError | IndexError):
            raise
        raise BadInput(str(e)) from None


@refused()
def questions_of(task, split, n, seed=0, most=1000):
    """n questions of a task's split, at least one; "auto": as many as there are, up to `most`. BadInput if
    there are not so many."""
    questions = task.questions(split, seed, most if n == "auto" else n, fewer=True)
    if isinstance(n, int) and len(questions) < n:
        raise ValueError(f"--num_questions={n} is more than there are: the split {split} of {task.name} has "
                         f"{len(questions)} questions; lower --num_questions, or leave it out.")
    if not questions:
        raise ValueError(f"The task {task.name} has no {split} questions: choose another split, or another "
                         "task.")
    return questions


def plain(text):
    """A question as it is compared: without case, spaces, and what punctuation is no part of a number or a formula."""
    return " ".join(re.sub(r"""[?!;:"'_]|[.,](?!\d)""", " ", text).casefold().split())


@refused()
def unseen_questions(task, split, n, seed=0):
    """(questions of a split to train on, how many were dropped because they, or ones that read the same, stand in the test split)."""
    questions = questions_of(task, split, n, seed)
    try:
        test = {plain(q["question"]) for q in task.questions("test")}
    except ValueError as e:
        print(f"The task has no test split that could be read, so no question was compared with it ({e})", flush=True)
        test = set()
    kept = [q for q in questions if plain(q["question"]) not in test]
    if not kept:
        raise ValueError(f"All {len(questions)} questions of {task.name} stand in its test split too: let questions() tell splits apart.")
    return kept, len(questions) - len(kept)


def prepare(cfg, name, task, questions):
    """(name, hf.Found, tokenizer, worked examples before a question, requests, tokens of the context) of a model
    that can be asked."""
    found = distributed.on_main(lambda: hf.find(name))
    tokenizer, few_shot = found.tokenizer(cfg.tokenizer), few_shot_of(cfg, found)
    with refused():
        asked = requests_of(tokenizer, task, questions, cfg.num_samples, cfg.max_new_tokens, few_shot)
    return name, found, tokenizer, few_shot, asked, context_for(cfg, asked, few_shot, found)


def report(row, grades, width, many, heading):
    """Print a model's line of the table, in percent."""
    def percent(key, sign=""):
        p, low, high = (f"{100 * row[key + end]:{sign}.1f}" for end in ("", "_low", "_high"))
        return f"{p} [{low}, {high}]"
    cells = {f"{'accuracy':>17}": percent("accuracy")}
    if many:
        cells[f"{'above the first':>20}"] = percent("difference", "+") if "difference" in row else ""
    shares = row["parts"] | {"verified": row["verified"]} | {f"pass@{k}": p for k, p in row["pass_at_k"].items() if k != "1"}
    cells |= {f"{name:>6}": f"{100 * share:.1f}" for name, share in shares.items()} | {f"{'seconds':>7}": f"{row['seconds']:.1f}"}
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
        raise BadInput("Name a model and a text or a task: python eval.py RUN_OR_MODEL --dataset=..., or --task=...")
    if cfg.dataset and cfg.task:
        raise BadInput("A model is evaluated on a text or on a task: leave out --dataset or --task.")
    if cfg.dataset and (len(cfg.models) > 1 or cfg.compare):
        raise BadInput("Models are compared on a task: give --task= instead of --dataset=, or name one model.")
    config.at_least(cfg, 1, "block_size stride batch_size eval_tokens num_samples")
    config.at_most(cfg, 10**6, "num_samples")
    config.check_sampling(cfg)
    config.check_questions(cfg)
    if cfg.num_samples > 1 and not cfg.temperature:
        raise BadInput(f"At temperature 0 all {cfg.num_samples} samples are the same: give --temperature=1, or leave --num_samples out.")
    distributed.init()
    figures = evaluate_task(cfg) if cfg.task else evaluate_text(cfg)
    if cfg.json:
        say(json.dumps(figures))
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
