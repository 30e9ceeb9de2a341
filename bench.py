"""What this machine can do and what the stages make of it, beside their limits and beside other ways to do the same.

    python bench.py                                             an overview: matrix products, memory, one line a stage (two minutes)
    python bench.py --stage=train config/gpt2_124m.py --batch_size=8         any knob of the stage's script may follow bench.py's own
    python bench.py --stage=train --ladder                      from the plainest training, one optimisation after the other
    python bench.py --stage=sft --ablate                        everything on, and each left out once
    python bench.py --stage=grpo --profile                      a trace of a few steps, and what takes their time
    python bench.py --stage=train --peers                       against nanoGPT's way of training and transformers' Trainer
    python bench.py --stage=generate --peers=generate           SmolLM2-360M's shape, random weights, 2x10, 8x8 and 32x1 samples
    python bench.py --stage=generate --model=gpt2 --work=1x1,64x1,32x8,64x8 --prompt_tokens=90 --dtype=bf16
    python bench.py --stage=datagen --run=out/quickstart/base --peers        rejection sampling against a loop over transformers' generate
    python bench.py --stage=sft --model=llama-1m --peers        fine-tuning against transformers' Trainer and TRL's
    python bench.py --stage=grpo --model=llama-50m --peers      whole steps of reinforcement learning against TRL's GRPOTrainer
    python bench.py --stage=rewards                             slow verifiers in worker processes against the caller itself

Of train.py, datagen.py and grpo.py the real scripts run, as processes, and what they log is read: medians over the steps after a warm-up.
Whatever is compared has the same weights or shapes, data and precision and is taken in turn. Each call leaves all its figures, with what
they were measured on, in bench_results/ as JSON and as a chart. Knobs, as --key=value:
"""
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple

import torch
from tqdm import tqdm

import hf
import tasks
from engine import Engine, Packed, Request, Sampling, draw, uniform
from eval import requests_of
from measure import peers
from measure.ceilings import clock, formats, give_back, machine, matmul_peak, on_meta, peak, read_bandwidth, sampling_limit
from measure.ladder import print_rows, rows_of, rungs
from measure.runs import ROOT, WARM_UP, Work, a_peer, a_run, as_flags, chart, in_turn, process, processes, raw, small, steps_alone
from measure.synthetic import SHAPES, never_ends, random_model, write_text, write_tokenizer, write_verifier
from model import GPTConfig, add_lora
from runtime import checkpoint, config, guard, hardware, optim
from runtime.config import BadInput
from runtime.rewards import Pool
from runtime.tokenizer import Tokenizer

SCRIPTS = {"train": "train", "sft": "train", "datagen": "datagen", "grpo": "grpo"}


@dataclass
class Config:
    stage: Literal["overview", "train", "sft", "generate", "datagen", "grpo", "rewards"] = "overview"
    model: Literal["auto", "smollm2-360m", "gpt2", "gpt2-1m", "1m", "llama-1m", "llama-50m"] = "auto"     # a shape, with random weights.
                                             # auto: generate smollm2-360m; else gpt2 on a GPU, llama-1m elsewhere; train: a config file's
    run: str = ""                            # datagen: a model that can answer, instead
    ladder: bool = False                     # train, sft, grpo: the plainest way, then one optimisation more a row
    ablate: bool = False                     # train, sft, grpo: everything on, then each left out once
    profile: bool = False                    # train, sft, grpo: what takes the time of a few steps, and a trace for chrome://tracing
    memory: bool = False                     # with --profile: what takes and gives back memory too, with its timeline in the trace
    peers: bool | str = False                # others' ways too: all that are installed, or names with a comma (measure/peers.py)
    steps: int | None = None                 # that count, after WARM_UP which don't; None: train 20, sft 8, grpo 6, with --profile 3
    repeats: int | None = None               # runs of each side or row, in turn; the median counts; None: 3, of the overview 1
    ranks: int | None = None                 # processes of ours; None: datagen and grpo one a thread for a small model on a CPU, else 1
    peer_ranks: int = 1                      # grpo: processes of TRL's
    work: str | None = None                  # prompts x samples of each; of generate several cases; None: 2x10,8x8,32x1, or GRPO's
    prompt_tokens: int | None = None         # generate, grpo; None: 120, or GRPO's
    max_new_tokens: int | None = None        # generate, datagen, grpo; None: 60, or GRPO's
    slots: int | None = None                 # generate; None: all samples at once, at most 512
    completions: int = 256                   # rewards
    verifier_ms: float | None = None         # rewards, grpo: of a core's time for each completion; None: 5, of grpo without --ladder 0
    reward_workers: int = 2                  # rewards: processes
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    seed: int = 0
    output: str | None = None                # .json; None: a name of its own in bench_results/. The chart and the trace lie beside it
    json: bool = False                       # all figures as the last line too


GRPO = {"llama-50m": ("4x8", 50, 32), "gpt2": ("64x8", 50, 94)}          # work, prompt_tokens, max_new_tokens: what takes TRL some seconds
GRPO_ELSE = ("8x8", 50, 64)                                              # a step on two cores; of other shapes
STEPS = {"train": 20, "sft": 8, "grpo": 6}
TO_BOTH = ("device", "dtype", "seed", "max_new_tokens", "output", "json")          # knobs of bench.py even where a script has them too
FOLDER = "bench_results"


# --- what the stages' scripts are handed ---

class Handed(NamedTuple):
    """Config files and flags of a stage's script, the Config that they make, and the knobs that they name."""
    files: list = ()
    flags: list = ()
    config: Any = None
    given: frozenset = frozenset()


def hand_over(stage, arguments):
    """Handed, checked by the script's own Config: what it does not know it refuses in its own words."""
    cfg = config.load(importlib.import_module(SCRIPTS[stage]).Config, arguments)
    files, flags = ([a for a in arguments if a.startswith("--") == flag] for flag in (False, True))
    flagged = {a[2:].partition("=")[0] for a in flags}
    settled = {"train": "num_epochs patience eval_tokens", "sft": "num_epochs patience dataset tokenizer",
               "datagen": "task tokenizer few_shot", "grpo": "task dataset num_questions tokenizer few_shot"}[stage]
    always = "out_dir init_from overwrite eval_only max_steps log_interval eval_interval save_interval save_only_model"
    for knob in f"{settled} {always}".split():
        if knob in flagged:
            raise BadInput(f"--{knob} is what bench.py itself settles in --stage={stage}: leave it out"
                           f"{', and say with --steps= how many' if knob in ('max_steps', 'num_epochs') else ''}.")
    return Handed(files, flags, cfg, frozenset(flagged.union(*(config.read_file(file) for file in files))))


# --- training on text, and fine-tuning ---

def train_work(cfg, hw, folder, handed):
    """train.py from scratch, on ids that are made up, unless a --dataset= is handed over."""
    folder, steps, script, knobs = Path(folder), cfg.steps or STEPS["train"], handed.config, {}
    shape = None if handed.files and cfg.model == "auto" else SHAPES[model_of(cfg, hw)]
    if shape is not None:
        c = GPTConfig(**shape)
        follows = {"n_kv_head", "head_dim", "mlp_hidden"} - shape.keys()          # from knobs that may be handed over
        knobs = {f.name: getattr(c, f.name) for f in fields(script) if hasattr(c, f.name) and f.name not in follows | {"dropout"}}
        knobs["bias"] = c.qkv_bias
    if cfg.ladder or cfg.ablate or cfg.peers:
        knobs |= {"optimizer": "adamw", "learning_rate": 1e-3, "warmup_steps": 2}          # as the guides have it, and the peers
    made = []
    if "dataset" not in {flag[2:].partition("=")[0] for flag in handed.flags}:
        named = script.tokenizer or "bytes"
        n_vocab = 50257 if named == "gpt2" else Tokenizer(named).n_vocab if "tokenizer" in handed.given or shape is None else c.vocab_size
        if n_vocab != 257 and (named == "gpt2" or "tokenizer" not in handed.given):
            write_tokenizer(folder, n_vocab)                             # GPT-2's own would have to be downloaded
            made = as_flags(tokenizer=folder)
        made += as_flags(dataset=write_text(folder / "text", n_vocab, cfg.seed), data_dir=folder / "tokens")
    defaults = as_flags(**{k: v for k, v in knobs.items() if k not in handed.given})
    T, sequences = knobs.get("block_size", script.block_size) if "block_size" not in handed.given else script.block_size, script.sequences
    arguments = [*defaults, *handed.files, *handed.flags, *made, *steps_alone(cfg, folder, steps),
                 *as_flags(init_from="scratch", num_epochs=None, patience=0, eval_interval=10**9, eval_tokens=T, dtype=hw.dtype)]
    what = f"{sequences} sequences of {T} tokens a step"
    return Work("train.py", arguments, folder, what, "tokens/s", steps, cfg.ranks or 1, sequences, script)


def sft_work(cfg, hw, folder, handed):
    """train.py on examples of unit conversion, as many as the steps need once, from random weights that are exported to the folder."""
    folder, steps = Path(folder), cfg.steps or STEPS["sft"]
    recipe = [] if handed.files else [str(ROOT / "config/rft.py")]
    script = config.load(type(handed.config), recipe + handed.files + handed.flags)
    task, path = tasks.load("unit_conversion"), folder / "rft.json"
    questions = task.questions("train", n=script.sequences * (WARM_UP + steps))
    path.write_text(json.dumps([[q["question"], q["answer"], task.solution(q)] for q in questions]))
    rate = as_flags(learning_rate=1e-3, warmup_steps=2) if cfg.ladder or cfg.ablate else as_flags(learning_rate=1e-4)
    arguments = [*recipe, *rate, *handed.files, *handed.flags, *steps_alone(cfg, folder, steps), *as_flags(
        init_from=folder, tokenizer="bytes", dataset=path, num_epochs=None, patience=0, eval_interval=10**9, dtype=hw.dtype)]
    return Work("train.py", arguments, folder, f"{script.sequences} examples of unit conversion a step", "tokens/s", steps, cfg.ranks or 1,
                script.sequences, script)


def bench_training(cfg, hw, folder, handed, say):
    """Tokens a second (of examples without padding) within steps, the fetching of batches included: of theirs without. Peers of train have
    the same shape and text; of sft the same weights, rows and labels. Both sides AdamW."""
    work, runs = prepare(cfg, hw, folder, handed), []
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}")

    def ours():
        runs.append(a_run(work))
        return runs[-1]["rate"]

    def theirs(peer):
        settings, c = runs[-1]["settings"], checkpoint.read_model(work.out)["architecture"]
        if peer == "nanogpt" and not peers.is_gpt2(c):
            raise BadInput("--peers=nanogpt is GPT-2's architecture alone: give --model=gpt2 or gpt2-1m, and no knob that changes it.")
        model = folder
        if cfg.stage == "train" and peer == "trainer" and not (model := Path(folder) / "peer").exists():
            hf.export(random_model(GPTConfig(**c), hardware.setup("cpu", compile=False)), model)
        data = Path(folder) / ("text" if cfg.stage == "train" else "rft.json")
        return a_peer(cfg, hw, work, peer, runs[-1]["units"], architecture=c, model=str(model), data=str(data),
                      lora_rank=settings["lora_rank"], block_size=settings["block_size"], batch_size=settings["batch_size"],
                      accumulation=settings["gradient_accumulation_steps"])
    rates = in_turn({"nanoRFT": ours} | {name: functools.partial(theirs, name) for name in cfg.peers}, cfg.repeats, work.unit, say)
    about, rate = checkpoint.read_model(work.out), statistics.median(rates["nanoRFT"])
    model = on_meta(GPTConfig(**about["architecture"]))
    if about["lora"]:
        add_lora(model, **about["lora"])
    flops = model.flops_per_token(runs[0]["units"] / work.sequences)     # at the length that sequences have on average
    step = statistics.median(run["step_s"] for run in runs)
    limit, mfu = matmul_peak(hw) / flops, rate * flops / peak(hw)
    say(f"{flops / 1e6:,.1f} MFLOP a token: MFU {mfu:.1%}, a step {1e3 * step:,.1f} ms; at a large product's speed {limit:,.0f} tokens/s")
    return {"what": work.what, "unit": work.unit, "rates": rates, "limit": limit, "share": rate / limit, "mfu": mfu, "step_s": step,
            "flops_per_token": flops, "peak_memory_gb": statistics.median(run["peak_memory_gb"] for run in runs),
            "settings": runs[0]["settings"], "repeats": raw(runs), "also": f"MFU {mfu:.1%}, a step {1e3 * step:,.0f} ms"}


# --- rejection sampling ---

def bench_datagen(cfg, hw, folder, handed, say):
    """Samples a second, verified ones if a model is given that can answer, without the start of the processes."""
    found, script = hf.find(cfg.run or folder), handed.config
    tokenizer, task = found.tokenizer(None if cfg.run else "bytes"), tasks.load("unit_conversion")
    asked, oversample, new = (script.num_questions if "num_questions" in handed.given else 100), script.oversample, cfg.max_new_tokens
    questions = task.questions("train", n=asked)
    prompts = [r.ids for r in requests_of(tokenizer, task, questions)]
    ranks = cfg.ranks or (torch.get_num_threads() if hw.device.type == "cpu" and small(found.config) else 1)
    shortest, *_, longest = sorted(map(len, prompts))
    what = f"{len(prompts)} questions x {oversample}, prompts of {shortest}-{longest} tokens, at most {new} new ones"
    unit, done = "verified samples/s" if cfg.run else "samples/s", []
    say(f"{what}, {hw.dtype} on {hw.name}; {processes(ranks)}")

    def ours():
        arguments = [*as_flags(num_questions=asked, temperature=1), *handed.files, *handed.flags, "--overwrite", "--json", *as_flags(
            init_from=cfg.run or folder, task="unit_conversion", output=f"{folder}/rft.json", max_new_tokens=new, few_shot=0,
            dtype=hw.dtype, device=cfg.device, seed=cfg.seed, **({} if cfg.run else {"tokenizer": "bytes"}))]
        said = process([str(ROOT / "datagen.py")], arguments, ranks, "datagen.py", fine=(0, 1))       # 1: nothing was right
        if not (last := [line for line in said.splitlines() if line.startswith("{")]):
            raise guard.Failure("datagen.py failed: run it by itself to see why.")
        done.append(f := json.loads(last[-1]))
        return (f["verdicts"].get("verified", 0) if cfg.run else f["attempts"]) / f["seconds"]
    sides = {"nanoRFT": ours}
    if cfg.peers:
        hf.export(found.load(), f"{folder}/peer")
        peer = peers.Generate(f"{folder}/peer", hw)

        def loop():
            seconds, verified = clock(lambda: peers.verified_in_a_loop(peer, hw, tokenizer, task, questions, prompts, oversample, new), hw)
            return (verified if cfg.run else len(prompts) * oversample) / seconds
        sides["loop over generate"] = loop
    rates = in_turn(sides, cfg.repeats, unit, say, warm_up=1 if len(sides) > 1 else 0)
    f = done[-1]
    sampled = f["tokens_per_s"] * f["seconds"] / f["attempts"]
    least, *_ = sampling_limit(found.config, hw, len(prompts), statistics.fmean(map(len, prompts)), oversample, sampled)
    rate = statistics.median(rates["nanoRFT"])
    limit = rate * f["seconds"] / least
    say(f"{sampled:.0f} tokens a sample; {rate / limit:.1%} of the limit of {limit:,.0f} {unit}")
    return {"what": what, "unit": unit, "rates": rates, "limit": limit, "share": rate / limit, "tokens_per_s": f["tokens_per_s"],
            "also": f"{f['tokens_per_s']:,.0f} new tokens/s, {processes(ranks)}"}


# --- reinforcement learning: whole steps, rollout, reward and update ---

def grpo_case(cfg, handed):
    """(prompts, samples of each, new tokens, tokens of a prompt): of bench.py's knobs, config files and flags, defaults, in that order."""
    work, prompt_tokens, new = GRPO.get(cfg.model, GRPO_ELSE)
    prompts, samples = map(int, (cfg.work or work).split("x"))
    script = {k: getattr(handed.config, k) for k in handed.given}
    if not cfg.work:
        prompts, samples = script.get("prompts_per_step", prompts), script.get("k_samples", samples)
    return prompts, samples, cfg.max_new_tokens or script.get("max_new_tokens", new), cfg.prompt_tokens or prompt_tokens


def grpo_work(cfg, hw, folder, handed):
    """grpo.py on prompts of one length and with a verifier that grades by a hash; samples never end before max_new_tokens."""
    folder, steps = Path(folder), cfg.steps or STEPS["grpo"]
    prompts, samples, new, prompt_tokens = grpo_case(cfg, handed)
    rng, c = random.Random(cfg.seed), GPTConfig(**SHAPES[cfg.model])
    texts = ["".join(rng.choices(ascii_lowercase + " 0123456789", k=prompt_tokens)) for _ in range(prompts * (WARM_UP + steps))]
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    write_verifier(folder / "score.py", cfg.verifier_ms)
    threads = torch.get_num_threads()
    ranks = cfg.ranks or (threads if hw.device.type == "cpu" and small(c) and prompts % threads == 0 else 1)
    arguments = [*as_flags(learning_rate=1e-6, warmup_steps=0), *handed.files, *handed.flags, *steps_alone(cfg, folder, steps), *as_flags(
        init_from=folder, task=folder / "score.py", dataset=folder / "questions.jsonl", num_questions=None, tokenizer=None, few_shot=None,
        prompts_per_step=prompts, k_samples=samples, max_new_tokens=new, eval_interval=0, dtype=hw.dtype)]
    what = (f"{prompts} prompts of {prompt_tokens} tokens x {samples} samples of {new}"
            + (f", a verifier of {cfg.verifier_ms:g} ms" if cfg.verifier_ms else ""))
    return Work("grpo.py", arguments, folder, what, "completions/s", steps, ranks, prompts * samples, handed.config)


def bench_grpo(cfg, hw, folder, handed, say):
    """Completions a second of whole steps (rollout, reward, update), by the seconds that grpo.py logs, and of TRL's GRPOTrainer from the
    start of its steps to their end: neither with the start of the process, TRL's without fetching questions and logging. Same weights,
    prompts, reward, group size, learning rate and loss (dapo's, clipped alike, no KL, advantages not scaled), one AdamW step a rollout;
    that samples don't end early is checked on both sides. grpo.py leaves samples without any advantage out of its update: here there are
    none."""
    work, (prompts, samples, new, prompt_tokens), c, runs = grpo_work(cfg, hw, folder, handed), grpo_case(cfg, handed), \
        GPTConfig(**SHAPES[cfg.model]), []
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}; {processes(work.ranks)} here"
        + (f", {cfg.peer_ranks} of TRL's" if cfg.peers else ""))

    def ours():
        runs.append(a_run(work))
        same = {(s["completion_tokens"], s["completion_tokens_max"], s["zero_variance"]) for s in runs[-1]["steps"]}
        if same != {(new, new, 0)}:
            raise guard.Failure(f"grpo.py did other work than was asked for, completions of {same} tokens: leave out knobs that change it.")
        return runs[-1]["rate"]

    def theirs(peer):
        return a_peer(cfg, hw, work, peer, work.sequences, cfg.peer_ranks, dtype=peer.removeprefix("trl_"), model=str(folder),
                      max_new_tokens=new, task=f"{folder}/score.py", data=f"{folder}/questions.jsonl", prompts=prompts, samples=samples)
    called = {"trl_fp32": "TRL's GRPOTrainer, fp32", "trl_bf16": "TRL's GRPOTrainer, bf16"}
    sides = {"nanoRFT": ours} | {called[name]: functools.partial(theirs, name) for name in cfg.peers}
    rates = in_turn(sides, cfg.repeats, work.unit, say)
    update = (prompts * prompt_tokens + work.sequences * new) * on_meta(c).flops_per_token(prompt_tokens + new) / matmul_peak(hw)
    least = sampling_limit(c, hw, prompts, prompt_tokens, samples, new)[0] + update
    rate, limit, step = statistics.median(rates["nanoRFT"]), work.sequences / least, statistics.median(run["step_s"] for run in runs)
    say(f"{rate / limit:.1%} of the limit of {limit:,.0f} {work.unit}: of a step's {1e3 * step:,.0f} ms sampling takes at least "
        f"{1e3 * (least - update):,.1f} and the update {1e3 * update:,.1f}")
    counted = [logged for run in runs for logged in run["steps"][WARM_UP:]]
    parts = {k: statistics.median(logged[k] for logged in counted) for k in ("rollout_s", "reward_s", "update_s", "sync_s")}
    return {"what": work.what, "unit": work.unit, "rates": rates, "limit": limit, "share": rate / limit, "step_s": step, "parts": parts,
            "settings": runs[0]["settings"], "repeats": raw(runs),
            "also": f"a step {1e3 * step:,.0f} ms, of which rollout {1e3 * parts['rollout_s']:,.0f}, update {1e3 * parts['update_s']:,.0f}"}


# --- verifiers ---

def bench_rewards(cfg, hw, folder, handed, say):
    """Completions a second that worker processes grade, and the caller itself, with a verifier that takes about verifier_ms of an idle
    core, always the same work. Without the start of the workers, which grpo.py has once a run."""
    path = Path(folder) / "slow.py"
    write_verifier(path, cfg.verifier_ms)
    pairs = [({"question": "", "answer": ""}, "x" * i) for i in range(cfg.completions)]
    what = f"{cfg.completions} completions, {cfg.verifier_ms:g} ms each, {processes(cfg.reward_workers)}"
    say(what)
    with Pool(str(path), cfg.reward_workers) as workers, Pool(str(path), 1, kind="serial") as serial:
        def rate(pool):
            began = time.perf_counter()
            grades = pool.score(pairs)
            seconds = time.perf_counter() - began
            assert [grade.score for grade in grades] == [zlib.crc32(text.encode()) / 2**32 for _, text in pairs], "wrong grades"
            return len(pairs) / seconds
        sides = {"nanoRFT": lambda: rate(workers), "one after the other": lambda: rate(serial)}
        rates = in_turn(sides, cfg.repeats, "completions/s", say, warm_up=1)
    limit = min(cfg.reward_workers, os.cpu_count()) / max(1e-9, cfg.verifier_ms / 1000)
    share = statistics.median(rates["nanoRFT"]) / limit
    return {"what": what, "unit": "completions/s", "rates": rates, "limit": limit, "share": share, "also": what}


# --- sampling ---

class Ours:
    name = "engine"

    def __init__(self, model, cfg, hw, rows):
        slots = cfg.slots or min(rows, 512)
        self.engine = Engine(model, slots, cfg.prompt_tokens + cfg.max_new_tokens, Sampling(), cfg.seed, hw.torch_dtype)

    def run(self, prompts, samples, new):
        requests = [Request(p, samples, i, new) for i, p in enumerate(prompts)]
        return sum(len(s.ids) for s in self.engine.generate(requests))


def split(engine, prompts, samples, new, total, hw, B, groups):
    """(seconds of a run by part: its prompts, the draws, and its other decoding, each measured alone; the rest is the host's;
    seconds of a step in the middle of a run)"""
    def a_step():
        engine.tick.zero_()
        engine.launch(B, groups)
    with torch.inference_mode():
        prefill = clock(lambda: engine.prefill([(i % engine.slots, p[:-1]) for i, p in enumerate(prompts)]), hw)[0]
        a_step()
        steps = [clock(a_step, hw)[0] for _ in range(5)]
        logits = torch.randn(B, engine.c.vocab_size, device=hw.device)
        noise = engine.state[2, :B]
        draws = [clock(lambda: draw(logits, uniform(noise, noise), engine.sampling), hw)[0] for _ in range(5)]
    rounds = new * len(prompts) * samples / B
    step, one_draw = statistics.median(steps), statistics.median(draws)
    parts = {"prefill": prefill, "decode": rounds * (step - one_draw), "draw": rounds * one_draw}
    return parts | {"host": total - sum(parts.values())}, step


def products(engine, B, C, hw):
    """Seconds of a step's matrix products alone, on a CPU: what is left of a step is overhead."""
    D, dtype, groups = engine.c.head_dim, engine.dtype, engine.c.n_head // engine.c.n_kv_head
    linears = [m for m in [*engine.model.modules(), engine.head] if isinstance(m, Packed | torch.nn.Linear)]
    x = {m: torch.randn(B, 1, m.weight.shape[1]).to(dtype) for m in linears}
    q, p = (torch.randn(B * engine.c.n_kv_head, groups, n).to(dtype) for n in (D, C))

    def all_of_them():
        for m in linears:
            m(x[m])
        for k, v in zip(engine.k, engine.v):
            k, v = (z[:B].flatten(0, 1)[:, :C] for z in (k, v))
            torch.bmm(q, k.transpose(1, 2)), torch.bmm(p, v)
    with torch.inference_mode():
        return statistics.median(clock(all_of_them, hw)[0] for _ in range(5))


def bench_generate(cfg, hw, folder, handed, say):
    """Tokens a second of the engine and of transformers, beside the limit, with what a run's time goes to."""
    c, cases, rates = GPTConfig(**SHAPES[cfg.model]), [], {}
    bandwidth, flops = read_bandwidth(hw), matmul_peak(hw)
    torch.manual_seed(cfg.seed)
    model = random_model(c, hw)
    say(f"{model.n_params():,} parameters, {hw.dtype} on {hw.name}; prompts of {cfg.prompt_tokens}, {cfg.max_new_tokens} new tokens a "
        f"sample; measured {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.2f} TFLOP/s.")
    others = [peers.SAMPLERS[name](folder, hw) for name in cfg.peers]
    for P, N in [map(int, case.split("x")) for case in cfg.work.split(",")]:
        prompts = torch.randint(c.vocab_size, (P, cfg.prompt_tokens)).tolist()
        sides, times, failed = [Ours(model, cfg, hw, P * N), *others], {}, {}
        for repeat in range(cfg.repeats + 1):             # the first is a warm-up, in which shapes are recorded
            for side in sides:
                try:
                    if side.name in failed or side.name == "generate_batch" and repeat < cfg.repeats:
                        continue
                    seconds, tokens = clock(lambda: side.run(prompts, N, cfg.max_new_tokens), hw)
                    assert tokens == P * N * cfg.max_new_tokens, f"{tokens} tokens"
                    if repeat:
                        times.setdefault(side.name, []).append(seconds)
                except Exception as e:
                    if side is sides[0]:
                        raise
                    failed[side.name] = f"{type(e).__name__}: {e}".splitlines()[0]
        engine, ours, new = sides[0].engine, statistics.median(times["engine"]), P * N * cfg.max_new_tokens
        limit, reading, in_flight = sampling_limit(c, hw, P, cfg.prompt_tokens, N, cfg.max_new_tokens, engine.slots)
        nominal = hw.bandwidth * 1e12 if hw.bandwidth else bandwidth
        context, floor, mbu = cfg.prompt_tokens + cfg.max_new_tokens / 2, reading * in_flight / new, reading * bandwidth / nominal / ours
        B, groups = engine.shape([int(context)] * in_flight)           # of a step in the middle of a run
        C = groups[0][2]
        parts, step = split(engine, prompts, N, cfg.max_new_tokens, ours, hw, B, groups)
        alone = products(engine, B, C, hw) if hw.device.type == "cpu" else None
        row = {"work": f"{P}x{N}", "tokens_per_s": new / ours, "limit": new / limit, "mbu": mbu, "step_ms": 1e3 * step,
               "floor_ms": 1e3 * floor, "overhead_ms": alone and 1e3 * (step - alone), **{f"{k}_s": v for k, v in parts.items()},
               "seconds": times, "failed": failed}
        say(f"\n{P} prompts x {N}: {new / ours:,.0f} tokens/s, {limit / ours:.0%} of the limit of {new / limit:,.0f}, MBU {mbu:.0%}; "
            + ", ".join(f"{k} {v / ours:.0%}" for k, v in parts.items())
            + f"; a step of {in_flight} rows {1e3 * step:.2f} ms (limit {1e3 * floor:.2f}"
            + (f", products alone {1e3 * alone:.2f})" if alone else ")"))
        for peer in [name for name in times if name != "engine"]:
            ratios = sorted(b / a for a, b in zip(times["engine"][-len(times[peer]):], times[peer]))
            row[f"over_{peer}"] = statistics.median(ratios)
            say(f"  {peer}: {new / statistics.median(times[peer]):,.0f} tokens/s; the engine is {statistics.median(ratios):.2f} times as "
                f"fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
        for peer, reason in failed.items():
            say(f"  {peer}: failed ({reason})")
        cases.append(row)
        rates |= {f"{P}x{N} {'nanoRFT' if name == 'engine' else name}": [new / s for s in seconds] for name, seconds in times.items()}
        del sides, engine
        gc.collect()
    first = cases[0]
    return {"what": f"{cfg.work}, prompts of {cfg.prompt_tokens}, {cfg.max_new_tokens} new tokens", "unit": "tokens/s", "rates": rates,
            "limit": first["limit"], "share": first["tokens_per_s"] / first["limit"], "cases": cases, "bandwidth": bandwidth,
            "flops": flops, "also": f"MBU {first['mbu']:.1%}, a step {first['step_ms']:,.1f} ms"}


# --- one optimisation at a time ---

def bench_rungs(cfg, hw, folder, handed, say):
    """The ladder, or the ablation: every row is the script itself with other knobs, the same seed and data. A row whose run turns out to
    have had the settings of the row that it is compared with (torch.compile failed, say) is left out."""
    work = prepare(cfg, hw, folder, handed)
    given = {k: getattr(work.config, k) for k in handed.given - {"dtype", "tf32", "batch_size", "gradient_accumulation_steps"}}
    given = {k: value for k, value in given.items() if value is not None}
    rows, runs, failed = rows_of(rungs(cfg.stage, hw, work.config, given, work.ranks), cfg.ladder), {}, {}
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {len(rows)} rows x {cfg.repeats} in turn, on {hw.name}")
    for name, knobs in tqdm([row for _ in range(cfg.repeats) for row in rows], "runs", leave=False, disable=None):
        try:
            if name not in failed:
                runs.setdefault(name, []).append(a_run(work, knobs))
        except (BadInput, guard.Failure) as e:
            if name == rows[0][0]:
                raise
            failed[name] = str(e)
    table = []
    for name, knobs in rows:
        if name in failed:
            say(f"{name}: left out, it failed: {failed[name]}")
            continue
        mine, settings = runs[name], runs[name][0]["settings"]
        before = (table[-1] if cfg.ladder else table[0]) if table else None
        if before and settings == before["settings"]:
            say(f"{name}: left out, it had no effect here.")
            continue

        def times(other):
            """As fast as another row, run by run."""
            return statistics.median(a["rate"] / b["rate"] for a, b in zip(mine, runs[other])) if other else None
        speed = times(before and before["name"])
        table.append({
            "name": name, "knobs": knobs, "settings": settings, "step_s": statistics.median(r["step_s"] for r in mine),
            "rate": statistics.median(r["rate"] for r in mine), "rates": [r["rate"] for r in mine],
            "gain": speed if cfg.ladder or speed is None else 1 / speed, "in_all": times(rows[0][0]) if before and cfg.ladder else None,
            "peak_memory_gb": statistics.median(r["peak_memory_gb"] for r in mine), "loss": statistics.median(r["loss"] for r in mine),
            "repeats": raw(mine)})
    exact = next((row["loss"] for row in table if row["settings"]["dtype"] == "fp32"), None)
    for row in table:
        row["off_fp32"] = None if exact is None or cfg.stage == "grpo" else row["loss"] / exact - 1
    print_rows(table, work.unit, cfg.ladder, cfg.stage != "grpo", say)
    return {"what": work.what, "unit": work.unit, "rows": table, "failed": failed, "rates": {row["name"]: row["rates"] for row in table}}


# --- where the time goes ---

def bench_profile(cfg, hw, folder, handed, say):
    """The script runs in this process, its main called with the arguments that a process would get; what every optimizer step ends with,
    optim.apply_step, is wrapped to start torch.profiler after WARM_UP steps and to stop it `steps` later. The script has no part in it."""
    work, done = prepare(cfg, hw, folder, handed), 0
    if cfg.ranks and cfg.ranks > 1:
        raise BadInput("--profile looks into one process: leave --ranks out.")
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (hw.device.type == "cuda")
    profiler, apply_step = torch.profiler.profile(activities=activities, profile_memory=cfg.memory), optim.apply_step

    def counted(*arguments):
        nonlocal done
        result, done = apply_step(*arguments), done + 1
        if done == WARM_UP:
            profiler.start()
        if done == WARM_UP + work.steps:
            profiler.stop()
        return result
    optim.apply_step = counted
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = importlib.import_module(work.script.removesuffix(".py")).main(list(map(str, work.arguments)))
    finally:
        optim.apply_step = apply_step
    if code or done < WARM_UP + work.steps:
        raise guard.Failure(f"{work.script} made {done} optimizer steps instead of {WARM_UP + work.steps}, so there is no profile.")
    profiler.export_chrome_trace(str(trace := cfg.output.with_suffix(".trace.json")))
    cuda = hw.device.type == "cuda"
    side = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in profiler.key_averages()         # on a GPU kernels, of which operations would count the time again
              if not cuda or event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)]
    events.sort(key=lambda event: -getattr(event, side))
    whole = sum(getattr(event, side) for event in events)
    table = [{"name": e.key, "calls": e.count, "ms_a_step": getattr(e, side) / 1e3 / work.steps, "share": getattr(e, side) / max(1, whole)}
             for e in events[:15]]
    say(f"\n{work.what}; {work.steps} steps after {WARM_UP}, {hw.dtype} on {hw.name}: {whole / 1e3 / work.steps:,.1f} ms a step in "
        f"{'kernels' if cuda else 'operations, without what they call'}")
    say(f"{'':58} {'calls a step':>12} {'ms a step':>10} {'share':>6}")
    for row in table:
        say(f"{row['name'][:58]:58} {row['calls'] / work.steps:12,.1f} {row['ms_a_step']:10,.2f} {row['share']:6.1%}")
    found = {"what": work.what, "consumers": table, "trace": str(trace), "ms_a_step": whole / 1e3 / work.steps}
    if cfg.memory:
        kept = f"self_{'device' if cuda else 'cpu'}_memory_usage"
        takers = sorted(profiler.key_averages(), key=lambda event: -abs(getattr(event, kept)))[:15]
        found["memory"] = [{"name": e.key, "mib_a_step": getattr(e, kept) / 2**20 / work.steps} for e in takers]
        say(f"\n{'memory taken, less what was given back':58} {'MiB a step':>12}")
        for row in found["memory"]:
            say(f"{row['name'][:58]:58} {row['mib_a_step']:12,.2f}")
    say(f"The trace is {trace}: open it at chrome://tracing or ui.perfetto.dev.")
    return found


# --- all of it at a glance ---

def bench_overview(cfg, hw, folder, handed, say):
    """Peaks, and a line for each stage: short runs, one after the other."""
    found = {dtype: matmul_peak(hw, dtype) for dtype in formats(hw)}
    bandwidth = read_bandwidth(hw)
    say("matrix products, TFLOP/s: " + ", ".join(
        f"{name} {flops / 1e12:,.2f}" + (f" (nominal {hw.peaks[name]:g})" if hw.peaks.get(name) else "") for name, flops in found.items())
        + f"; reading memory: {bandwidth / 1e9:,.0f} GB/s" + (f" (nominal {1e3 * hw.bandwidth:,.0f})" if hw.bandwidth else ""))
    say(f"\n{'':9} {'speed':>28} {'limit':>14} {'of it':>7}")
    lines, most = {}, "64x8" if hw.device.type == "cuda" else "8x8"
    for stage in ("train", "sft", "generate", "datagen", "grpo", "rewards"):
        short = {"train": 10, "sft": 4, "grpo": 3}.get(stage)
        one = with_defaults(replace(cfg, stage=stage, steps=cfg.steps or short, work=cfg.work or (most if stage == "generate" else None)))
        given = hand_over(stage, ["--num_questions=40", "--oversample=8"] if stage == "datagen" else []) if stage in SCRIPTS else Handed()
        try:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                put_weights(one, hw, own, lambda *_: None)
                f = lines[stage] = STAGES[stage](one, hw, own, given, lambda *_: None)
        except (BadInput, guard.Failure) as e:
            say(f"{stage:9} left out: {e}")
            continue
        mine = [values for name, values in f["rates"].items() if "nanoRFT" in name][0]
        speed = f"{statistics.median(mine):,.0f} {f['unit']}"
        say(f"{stage:9} {speed:>28} {f['limit']:14,.0f} {f['share']:7.1%}  {f['also']}")
    say("\nThe limit is arithmetic: training's operations at the measured speed of a large product, sampling's weights, keys and values\n"
        "at that of memory, the cores of verifiers. A model of a million parameters stays far from it: dispatching operations takes time.")
    return {"unit": "% of the limit", "peaks": found, "bandwidth": bandwidth, "stages": lines,
            "rates": {stage: [100 * f["share"]] for stage, f in lines.items()}}


STAGES = {"overview": bench_overview, "train": bench_training, "sft": bench_training, "generate": bench_generate, "datagen": bench_datagen,
          "grpo": bench_grpo, "rewards": bench_rewards}


# --- the call ---

def prepare(cfg, hw, folder, handed):
    return {"train": train_work, "sft": sft_work, "grpo": grpo_work}[cfg.stage](cfg, hw, folder, handed)


def model_of(cfg, hw):
    """The name of a shape."""
    if cfg.model != "auto":
        return cfg.model
    if cfg.stage == "generate":
        return "smollm2-360m"
    if hw.device.type == "cuda":
        return "gpt2"
    return {"train": "gpt2-1m" if cfg.peers else "1m"}.get(cfg.stage, "llama-1m")


def with_defaults(cfg):
    """Config with the values that depend on the stage."""
    work, prompt_tokens, new = ("2x10,8x8,32x1", 120, 60)
    grpo = cfg.stage == "grpo"
    slow = None if cfg.stage == "overview" else 5.0 if cfg.stage == "rewards" or cfg.ladder or cfg.ablate else 0.0
    cfg = replace(cfg, repeats=cfg.repeats or (1 if cfg.stage == "overview" else 3), steps=cfg.steps or (3 if cfg.profile else None),
                  verifier_ms=slow if cfg.verifier_ms is None else cfg.verifier_ms)
    if grpo or cfg.stage == "overview":                  # a config file may say more: see grpo_case
        return cfg
    return replace(cfg, work=cfg.work or work, prompt_tokens=cfg.prompt_tokens or prompt_tokens, max_new_tokens=cfg.max_new_tokens or new)


def check(cfg):
    config.at_least(cfg, 1, "prompt_tokens max_new_tokens slots repeats steps ranks peer_ranks completions reward_workers")
    config.at_least(cfg, 0, "verifier_ms seed")
    modes = [mode for mode in ("ladder", "ablate", "profile") if getattr(cfg, mode)]
    if len(modes) > 1:
        raise BadInput(f"--{modes[0]} and --{modes[1]} are two things: give one of them.")
    if cfg.memory and not cfg.profile:
        raise BadInput("--memory is a part of --profile: give both.")
    if modes and cfg.stage not in STEPS:
        raise BadInput(f"--{modes[0]} is for --stage=train, sft or grpo: choose one of them.")
    if modes and cfg.peers:
        raise BadInput(f"--{modes[0]} looks at our own runs alone: leave --peers out.")
    if cfg.run and cfg.stage != "datagen":
        raise BadInput(f"--stage={cfg.stage} takes random weights of --model=: leave --run out.")
    one_case, work = cfg.stage == "grpo", cfg.work or "8x8"
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*" + ("" if one_case else r"(,[1-9]\d*x[1-9]\d*)*"), work):
        raise BadInput(f"--work={work} is not prompts x samples: write for example --work={'8x8' if one_case else '2x10,32x1'}.")
    if one_case and work.endswith("x1"):
        raise BadInput(f"--work={work} leaves nothing to compare a sample with: give at least 2 of each prompt.")
    if cfg.output and not cfg.output.endswith(".json"):
        raise BadInput(f"--output={cfg.output} should end in .json.")


def put_weights(cfg, hw, folder, say):
    """Random weights of the shape, and for grpo a tokenizer, exported to the folder, where a stage begins with such."""
    if cfg.stage in ("train", "rewards", "overview") or cfg.run or cfg.stage == "generate" and not cfg.peers:
        return
    torch.manual_seed(cfg.seed)
    c = GPTConfig(**SHAPES[cfg.model])
    model = random_model(c, hw)
    if cfg.stage == "grpo":
        never_ends(model, c.vocab_size - 1)
        write_tokenizer(folder, c.vocab_size)
    hf.export(model, folder)
    say(f"{cfg.model}, {model.n_params():,} parameters, random weights")
    del model
    give_back(hw)


def main(argv):
    known = {f.name for f in fields(Config)}
    stage = ([arg[8:] for arg in argv if arg.startswith("--stage=")] or [Config.stage])[-1]
    theirs = {f.name for f in fields(importlib.import_module(SCRIPTS[stage]).Config)} - set(TO_BOTH) if stage in SCRIPTS else set()
    own, others = [], []
    for arg in argv:                                     # what only the script knows, or both, is the script's
        name = arg[2:].partition("=")[0] if arg.startswith("--") else None
        mine = arg in ("-h", "--help") or not theirs or name in known - theirs
        (own if mine else others).append(arg)
    cfg = config.load(Config, own)
    check(cfg)
    cfg.peers = peers.chosen(cfg.stage, cfg.peers)
    handed = hand_over(cfg.stage, others) if cfg.stage in SCRIPTS else Handed()
    wanted, tf32 = (handed.config.dtype, handed.config.tf32) if hasattr(handed.config, "tf32") else ("auto", True)
    hw = hardware.setup(cfg.device, wanted if cfg.dtype == "auto" else cfg.dtype, tf32, compile=False)
    if cfg.stage != "train" or not handed.files or cfg.model != "auto":
        cfg.model = model_of(cfg, hw)
    cfg = with_defaults(cfg)
    if cfg.stage in ("generate", "grpo"):
        places, (new, read) = GPTConfig(**SHAPES[cfg.model]).block_size, grpo_case(cfg, handed)[2:] if cfg.stage == "grpo" else (
            cfg.max_new_tokens, cfg.prompt_tokens)
        if new + read > places:
            raise BadInput(f"{cfg.model} has {places} positions: lower --prompt_tokens or --max_new_tokens.")
    facts = machine(hw)
    mode = next((mode for mode in ("ladder", "ablate", "profile") if getattr(cfg, mode)), None)
    name = "_".join(filter(None, (cfg.stage, mode, hw.device.type, facts["date"][:19].replace(":", ""))))
    cfg.output = Path(cfg.output or f"{FOLDER}/{name}.json")
    cfg.output.parent.mkdir(parents=True, exist_ok=True)
    what = cfg.run or ("" if cfg.stage == "rewards" else cfg.model if cfg.model != "auto" else " ".join(handed.files))
    print(f"{cfg.stage}{f', {mode}' if mode else ''}: {f'{what}; ' if what else ''}{facts['hardware']}, torch {facts['torch']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        put_weights(cfg, hw, folder, print)
        function = bench_profile if mode == "profile" else bench_rungs if mode else STAGES[cfg.stage]
        figures = function(cfg, hw, folder, handed, functools.partial(print, flush=True))
    record = {"stage": cfg.stage, "mode": mode, "model": what, "command": shlex.join(["python", "bench.py", *argv]), "device": hw.name,
              "dtype": hw.dtype} | facts | figures
    if "rates" in figures:
        record["chart"] = chart(cfg.output.with_suffix(".png"), f"bench.py {' '.join(argv)}\n{facts['hardware']}, {facts['date'][:10]}",
                                figures["rates"], figures["unit"])
    cfg.output.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"All figures: {cfg.output}" + (f"; chart: {record['chart']}" if record.get("chart") else ""))
    if cfg.json:
        print(json.dumps(record, default=str))
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
