"""Measure the perplexity cost of each part of OKADFA: small models of one text with the same budget.

    python -m studies.okadfa TEXT OUT                       every row (docs/okadfa.md has the table)
    python -m studies.okadfa TEXT OUT --rows=softmax,feedback,last

TEXT is a --dataset= of train.py. The learning rate is tuned for each row: every rate of --rates runs for a
third of the steps with the first seed, followed by up to two more beyond an edge if the best is there. The
best on the validation text then trains for all steps, with all seeds if the row is compared with a published
ratio or another row, else with the first. Runs are train.py processes of one thread, --jobs in parallel, in
OUT/ROW/; finished runs are not repeated, stopped runs are resumed. Writes OUT/table.md and OUT/table.json.

Options, as --key=value:
"""
import datetime
import json
import math
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from measure.ceilings import cpu_name, git_commit
from measure.runs import ROOT, as_flags, logged_process
from runtime import checkpoint, config, guard
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, PositiveInt
from runtime.metrics import read_lines
from text import data
from text.tokenizer import Tokenizer

RATES = {"muon": "0.006 0.012 0.024 0.048", "adamw": "0.001 0.002 0.004 0.008"}
SHARED = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "optimizer", "tokenizer", "dtype",
          "eval_tokens")                     # options that are passed to train.py unchanged
MOST_BEYOND = 2                              # rates to try beyond an edge of --rates
MOST_IDS = 10_000                            # largest vocabulary for bigram counts
LAUNAY = "Launay et al. 2020, WikiText-103, BPE"
SCHLAG = "Schlag et al. 2021, WikiText-103, words"


@dataclass
class Config:
    words: tuple = ()                        # the text and the output folder; usually without --words=
    rows: str = "all"                        # or names of ROWS, with commas between
    jobs: PositiveInt = 2                    # parallel runs of one thread each
    seeds: str = "0 1 2"
    rates: str | None = None                 # None: four, by optimizer (RATES)
    tokenizer: str = "bytes"
    data_dir: str = "data"                   # for tokenised texts
    # the model and its budget
    n_layer: int = 4
    n_head: int = 2
    n_embd: int = 64
    block_size: int = 256
    batch_size: int = 16
    max_steps: PositiveInt = 1600
    warmup: float = 0.05                     # share of the steps
    optimizer: Literal["muon", "adamw"] = "muon"
    mixer_features: int = 64                 # of favor, for each head
    dtype: str = "auto"
    eval_tokens: PositiveInt | None = None   # None: the whole validation text


@dataclass
class Row:
    title: str
    options: dict = field(default_factory=dict)      # of train.py, in addition to the shared ones
    published: float | None = None           # perplexity relative to softmax attention with backpropagation
    source: str = ""
    times: int = 1                           # multiple of --max_steps
    rate_of: str | None = None               # take the learning rate of this row; None: tune it
    compared: bool = False                   # with another row, so train with all seeds


MICRO = {"backward": "feedback_micro"}
FEEDBACK = {"backward": "feedback"}
DELTA = {"mixer_rule": "delta"}
ADAMW = {"optimizer": "adamw"}
ROWS = {
    "frozen": Row("all blocks frozen", {"trained_blocks": "none"}),
    "last": Row("only the last block trained", {"trained_blocks": "last"}, compared=True),
    "softmax": Row("softmax, backpropagation", {}, 1.0),
    "twice": Row("softmax, backpropagation, twice the steps", {}, times=2, rate_of="softmax"),
    "linear": Row("elu + 1", {"mixer": "linear"}, 1.12, SCHLAG),
    "favor": Row("FAVOR+", {"mixer": "favor"}, 1.16, SCHLAG),
    "linear_delta": Row("elu + 1, delta rule", {"mixer": "linear"} | DELTA, 1.04, SCHLAG),
    "favor_delta": Row("FAVOR+, delta rule", {"mixer": "favor"} | DELTA, 1.09, SCHLAG),
    "feedback": Row("softmax, feedback", FEEDBACK, 1.74, LAUNAY),
    "feedback_shared": Row("softmax, feedback, one matrix for all", FEEDBACK | {"feedback_matrix": "shared"}),
    "feedback_identity": Row("softmax, feedback, no matrices", FEEDBACK | {"feedback_matrix": "identity"},
                             compared=True),
    "feedback_micro": Row("softmax, feedback inside blocks too", MICRO, 3.13, LAUNAY),
    "favor_feedback": Row("FAVOR+, feedback", {"mixer": "favor"} | FEEDBACK),
    # Muon scales all directions of a gradient alike, also those that are only noise of the feedback
    "softmax_adamw": Row("AdamW: softmax, backpropagation", ADAMW),
    "last_adamw": Row("AdamW: only the last block trained", ADAMW | {"trained_blocks": "last"}),
    "feedback_adamw": Row("AdamW: softmax, feedback", ADAMW | FEEDBACK),
}


# --- runs ---

def options_of(cfg, text, row, rate, seed, steps):
    """Return the options of train.py for a run of a row."""
    shared = {name: getattr(cfg, name) for name in SHARED}
    features = {"mixer_features": cfg.mixer_features} if row.options.get("mixer") == "favor" else {}
    return shared | features | row.options | {
        "dataset": str(text),
        "learning_rate": rate,
        "seed": seed,
        "max_steps": steps,
        "warmup_steps": max(1, round(cfg.warmup * steps)),
        "lr_schedule": "linear",
        "eval_interval": steps,
        "save_interval": max(1, steps // 4),
        "keep_last": 1,
    }


def folder_of(out, name, options):
    rate = options["learning_rate"]
    return Path(out) / name / f"rate{rate:g}_steps{options['max_steps']}_seed{options['seed']}"


def result(folder, options):
    """Return {loss, ppl_token, ppl_word, step_s (of the fastest steps)} of a finished run, else None. Raises
    BadInput if the run has other options, Failure if it rolled back to a lower learning rate."""
    if not (folder / "config.json").exists():
        return None
    saved = config.read_saved(folder)
    for option, value in options.items():
        if saved[option] != value:
            raise BadInput(f"{folder} has {option}={saved[option]} and not {value}: choose another output "
                           "folder, or remove it.")
    lines = read_lines(folder)
    evaluated = [line for line in lines if line.get("step") == options["max_steps"] and "val_loss" in line]
    if not evaluated:
        return None
    if checkpoint.load_state(folder, options["max_steps"])["progress"]["lr_factor"] < 1:
        raise guard.Failure(f"{folder} rolled back and lowered its learning rate, so its figures are not "
                            f"those of {options['learning_rate']}: see {folder.name}.log, and lower --rates.")
    steps = [line for line in lines if "lr" in line]
    fastest = max(line["tokens_per_s"] for line in steps)    # other processes may slow down the rest
    return {
        "loss": evaluated[-1]["val_loss"],
        "ppl_token": evaluated[-1]["val_ppl_token"],
        "ppl_word": evaluated[-1].get("val_ppl_word", math.nan),
        "step_s": steps[-1]["tokens"] / steps[-1]["step"] / fastest,
    }


def run(folder, options, data_dir):
    """Return the result of a run, after starting or resuming it unless it is finished."""
    found = result(folder, options)
    if found:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    flags = as_flags(data_dir=data_dir, out_dir=folder, resume="auto", **options)
    print(f"{folder} ...", flush=True)
    logged_process([sys.executable, ROOT / "train.py", *flags], f"train.py in {folder}",
                   folder.parent / f"{folder.name}.log", OMP_NUM_THREADS="1")
    return result(folder, options)


def try_rate(*job):
    """Return the result of a run, with an infinite loss if it failed, for example by diverging."""
    try:
        return run(*job)
    except guard.Failure as e:
        print(f"A learning rate is left out, since its run failed: {e}", flush=True)
        return {"loss": math.inf}


def run_all(cfg, text, out, wanted, run=run):
    """Return the results of runs [(row's name, rate, seed, steps)] in order, running --jobs in parallel."""
    jobs = []
    for name, rate, seed, steps in wanted:
        options = options_of(cfg, text, ROWS[name], rate, seed, steps)
        jobs.append((folder_of(out, name, options), options, cfg.data_dir))
    with ThreadPoolExecutor(cfg.jobs) as pool:
        futures = [pool.submit(run, *job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def tune(cfg, text, out, names, seed):
    """Return {row: {rate: loss}} after a third of the steps."""
    steps = max(1, cfg.max_steps // 3)
    losses = {name: {} for name in names if ROWS[name].rate_of is None}
    wanted = []
    for name in losses:
        optimizer = ROWS[name].options.get("optimizer", cfg.optimizer)
        wanted += [(name, rate) for rate in numbers(cfg.rates or RATES[optimizer], float, "rates")]
    for _ in range(1 + MOST_BEYOND):
        runs = run_all(cfg, text, out, [(*pair, seed, steps) for pair in wanted], try_rate)
        for (name, rate), found in zip(wanted, runs):
            losses[name][rate] = found["loss"]
        wanted = [(name, beyond(tried)) for name, tried in losses.items() if beyond(tried)]
    return losses


def beyond(losses):
    """Return the next rate to try if the best of several is at an edge, else None."""
    rate = best(losses)
    if len(losses) == 1 or min(losses) < rate < max(losses):
        return None
    return 2 * rate if rate == max(losses) else rate / 2


def best(losses):
    """Return the rate of the least finite loss."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


# --- counts ---

def nll_of_counts(train, valid, n_vocab):
    """Return (unigram, bigram) nats of valid[1:], int64 [n], by add-one counts of `train`."""
    ids = np.bincount(train, minlength=n_vocab) + 1.0
    unigram = -np.log(ids[valid[1:]] / ids.sum()).sum()
    pairs = np.bincount(train[:-1] * n_vocab + train[1:], minlength=n_vocab**2) + 1.0
    pairs = pairs.reshape(n_vocab, n_vocab)
    bigram = -np.log(pairs[valid[:-1], valid[1:]] / pairs.sum(1)[valid[:-1]]).sum()
    return float(unigram), float(bigram)


def count(cfg, text):
    """Return {row: result} of the unigram and the bigram counts."""
    tokenizer = Tokenizer(cfg.tokenizer)
    if tokenizer.n_vocab > MOST_IDS:
        raise BadInput(f"The pairs of {tokenizer.n_vocab:,} ids are too many to count: choose a smaller "
                       "--tokenizer=.")
    folder = data.prepare(text, tokenizer, cfg.data_dir)
    train = data.TokenFile(folder, "train")
    valid = data.TokenFile(folder, "valid")
    n = len(valid) if cfg.eval_tokens is None else min(len(valid), cfg.eval_tokens + 1)
    words = (valid.words or math.nan) * (n - 1) / (len(valid) - 1)
    rows = {}
    for name, nll in zip(("unigram", "bigram"), nll_of_counts(train[:], valid[:n], tokenizer.n_vocab)):
        loss = nll / (n - 1)
        rows[name] = {"loss": loss, "ppl_token": math.exp(loss), "ppl_word": math.exp(nll / words)}
    return rows


# --- the table ---

def summary(title, runs, rate=None, at_edge=False, published=None, source=""):
    """Return a row's figures: means over its runs, and the range of its perplexity a token."""
    tokens = [run["ppl_token"] for run in runs]
    return {
        "title": title,
        "rate": rate,
        "at_edge": at_edge,
        "seeds": len(runs),
        "ppl_token": statistics.fmean(tokens),
        "range": [min(tokens), max(tokens)],
        "ppl_word": statistics.fmean(run["ppl_word"] for run in runs),
        "published": published,
        "source": source,
        "step_s": statistics.fmean(run["step_s"] for run in runs) if "step_s" in runs[0] else None,
    }


def table(rows, unit="token"):
    """Return the lines of the table of {name: summary}, with ratios to the row softmax, if present."""
    base = rows.get("softmax")
    head = ["", "learning rate", f"perplexity a {unit} (least-most)", "a word", f"ratio a {unit}", "a word",
            "published", "s/step"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows.values():
        rate = "-" if row["rate"] is None else f"{row['rate']:g}{' (edge)' if row['at_edge'] else ''}"
        token = f"{row['ppl_token']:.3f}"
        if row["seeds"] > 1:
            token += f" ({row['range'][0]:.3f}-{row['range'][1]:.3f})"
        ratios = ["-", "-"]
        if base:
            ratios = [f"{row[key] / base[key]:.3f}" for key in ("ppl_token", "ppl_word")]
        published = "-" if row["published"] is None else f"{row['published']:.2f}"
        seconds = "-" if row["step_s"] is None else f"{row['step_s']:.3f}"
        cells = [row["title"], rate, token, f"{row['ppl_word']:.1f}", *ratios, published, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def knee(rows):
    """Return the sentence on the gain of twice the steps, None without that row."""
    if not {"softmax", "twice"} <= rows.keys():
        return None
    gains = [1 - rows["twice"][key] / rows["softmax"][key] for key in ("ppl_token", "ppl_word")]
    past = "is" if gains[0] < 0.05 else "is not"
    return ("Twice the steps lower the perplexity of softmax attention with backpropagation by "
            f"{gains[0]:.1%} a token, {gains[1]:.1%} a word: by the first figure the baseline {past} past "
            "its knee (5%).")


def chosen(cfg):
    """Return the names of the rows to run, as in ROWS: those of --rows and those they take a rate from."""
    asked = list(ROWS) if cfg.rows == "all" else cfg.rows.split(",")
    if unknown := sorted(set(asked) - set(ROWS)):
        raise BadInput(f"--rows={unknown[0]} is not a row: choose from {', '.join(ROWS)}.")
    needed = {ROWS[name].rate_of for name in asked}
    return [name for name in ROWS if name in asked or name in needed]


def numbers(text, kind, option):
    """Return the numbers of a list separated by spaces or commas. Raises BadInput."""
    try:
        found = [kind(word) for word in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise BadInput(f"--{option}={text} should be different numbers with spaces between.")
    return found


def main(argv):
    cfg = config.load(Config, argv, positional="words")
    if len(cfg.words) != 2:
        raise BadInput("Give a text and an output folder: python -m studies.okadfa TEXT OUT.")
    text, out = cfg.words
    names = chosen(cfg)
    seeds = numbers(cfg.seeds, int, "seeds")

    rows = {}
    for name, found in count(cfg, text).items():         # tokenises the text, before train.py does
        rows[name] = summary(f"{name} counts", [found])
    losses = tune(cfg, text, out, names, seeds[0])
    wanted = []
    for name in names:
        row = ROWS[name]
        rate = best(losses[row.rate_of or name])
        for seed in seeds if row.published or row.compared else seeds[:1]:
            wanted.append((name, rate, seed, row.times * cfg.max_steps))
    results = run_all(cfg, text, out, wanted)
    for name in names:
        row = ROWS[name]
        runs = [found for job, found in zip(wanted, results) if job[0] == name]
        tried = losses[row.rate_of or name]
        at_edge = beyond(tried) is not None
        rows[name] = summary(row.title, runs, best(tried), at_edge, row.published, row.source)
    lines = table(rows, "byte" if cfg.tokenizer == "bytes" else "token")
    lines += ["", *filter(None, [knee(rows)])]
    print("\n".join(lines), flush=True)
    record = {
        "command": ["python", "-m", "studies.okadfa", *argv],
        "machine": f"{os.cpu_count()} cores, {cpu_name()}, torch {torch.__version__}",
        "commit": git_commit(),
        "date": datetime.date.today().isoformat(),
        "knobs": asdict(cfg),
        "tuning": losses,
        "rows": rows,
    }
    write_atomically(Path(out) / "table.md", ("\n".join(lines) + "\n").encode())
    write_atomically(Path(out) / "table.json", json.dumps(record, indent=1).encode())
    return 0


if __name__ == "__main__":
    guard.run(main)
