"""Whole steps of reinforcement learning (rollout, reward and update), and its verifiers alone, beside their
limits and TRL."""
import functools
import json
import os
import random
import statistics
import time
import zlib
from pathlib import Path
from string import ascii_lowercase

import torch

from measure.ceilings import devices, matmul_peak, sampling_limit
from measure.runs import (WARM_UP, Work, a_peer, a_run, as_flags, in_turn, median_parts, processes, raw,
                          small, steps_alone)
from measure.synthetic import SHAPES, write_verifier
from model import GPTConfig, on_meta
from runtime import guard
from tasks._pool import Pool

# work, prompt_tokens, max_new_tokens: what takes TRL some seconds
GRPO = {"llama-50m": ("4x8", 50, 32), "gpt2": ("64x8", 50, 94)}
# a step on two cores; of other shapes
GRPO_ELSE = ("8x8", 50, 64)
PEER_NAMES = {"trl_fp32": "TRL's GRPOTrainer, fp32", "trl_bf16": "TRL's GRPOTrainer, bf16"}


def grpo_case(cfg, script_args):
    """Return (prompts, samples of each, new tokens, tokens of a prompt): of bench.py's knobs, config files
    and flags, defaults, in that order."""
    work, prompt_tokens, max_new_tokens = GRPO.get(cfg.model, GRPO_ELSE)
    prompts, samples = map(int, (cfg.work or work).split("x"))
    given = {knob: getattr(script_args.config, knob) for knob in script_args.given}
    if not cfg.work:
        prompts = given.get("prompts_per_step", prompts)
        samples = given.get("k_samples", samples)
    max_new_tokens = cfg.max_new_tokens or given.get("max_new_tokens", max_new_tokens)
    return prompts, samples, max_new_tokens, cfg.prompt_tokens or prompt_tokens


def grpo_work(cfg, hw, folder, script_args):
    """Return the Work of grpo.py on prompts of one length, or of a quarter of it and more, and with a
    verifier that grades by a hash; samples never end before max_new_tokens."""
    folder = Path(folder)
    prompts, samples, new, prompt_tokens = grpo_case(cfg, script_args)
    rng = random.Random(cfg.seed)
    letters = ascii_lowercase + " 0123456789"
    num_questions = prompts * (WARM_UP + cfg.steps)
    lengths = [prompt_tokens] * num_questions
    if cfg.varied_prompts:
        lengths = [rng.randint(-(-prompt_tokens // 4), prompt_tokens) for _ in lengths]
    texts = ["".join(rng.choices(letters, k=length)) for length in lengths]
    rows = [json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts]
    (folder / "questions.jsonl").write_text("".join(rows))
    write_verifier(folder / "score.py", cfg.verifier_ms)
    ranks = cfg.ranks
    if not ranks:
        threads = torch.get_num_threads()
        is_small = hw.device.type == "cpu" and small(GPTConfig(**SHAPES[cfg.model]))
        ranks = threads if is_small and prompts % threads == 0 else 1
    arguments = as_flags(learning_rate=1e-6, warmup_steps=0)
    arguments += [*script_args.files, *script_args.flags, *steps_alone(cfg, folder)]
    arguments += as_flags(init_from=folder, task=folder / "score.py", dataset=folder / "questions.jsonl")
    arguments += as_flags(num_questions=None, tokenizer=None, few_shot=None)
    arguments += as_flags(prompts_per_step=prompts, k_samples=samples, max_new_tokens=new)
    arguments += as_flags(eval_interval=0, dtype=hw.dtype)
    at_most = "at most " if cfg.varied_prompts else ""
    what = f"{prompts} prompts of {at_most}{prompt_tokens} tokens x {samples} samples of {new}"
    if cfg.verifier_ms:
        what += f", a verifier of {cfg.verifier_ms:g} ms"
    return Work("grpo.py", arguments, folder, what, "completions/s", cfg.steps, ranks, prompts * samples,
                script_args.config)


def bench_grpo(cfg, hw, folder, script_args, log):
    """Measure completions a second of whole steps (rollout, reward, update), by the seconds that grpo.py
    logs, and of TRL's GRPOTrainer from the start of its steps to their end: neither with the start of the
    process, TRL's without fetching questions and logging.

    Same weights, prompts, reward, group size, learning rate and loss (dapo's, clipped alike, no KL,
    advantages not scaled), one AdamW step a rollout; that samples don't end early is checked on both sides.
    grpo.py leaves samples without any advantage out of its update: here there are none.
    """
    work = grpo_work(cfg, hw, folder, script_args)
    prompts, samples, new, prompt_tokens = grpo_case(cfg, script_args)
    peer_processes = f", {cfg.peer_ranks} of TRL's" if cfg.peers else ""
    log(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}; "
        f"{processes(work.ranks)} here{peer_processes}")
    runs = []

    def ours():
        run = a_run(work)
        runs.append(run)
        keys = ("completion_tokens", "completion_tokens_max", "zero_variance")
        sampled = {tuple(step[key] for key in keys) for step in run["steps"]}
        if sampled != {(new, new, 0)}:
            raise guard.Failure("grpo.py did other work than was asked for, completions of "
                                f"{sampled} tokens: leave out knobs that change it.")
        return run["rate"]

    def theirs(peer):
        job = {
            "dtype": peer.removeprefix("trl_"),
            "model": str(folder),
            "max_new_tokens": new,
            "task": f"{folder}/score.py",
            "data": f"{folder}/questions.jsonl",
            "prompts": prompts,
            "samples": samples,
        }
        return a_peer(cfg, hw, work, peer, work.sequences, cfg.peer_ranks, **job)
    sides = {"nanoRFT": ours} | {PEER_NAMES[peer]: functools.partial(theirs, peer) for peer in cfg.peers}
    rates = in_turn(sides, cfg.repeats, work.unit, log)
    c = GPTConfig(**SHAPES[cfg.model])
    n = devices(hw, work.ranks)
    if cfg.varied_prompts:
        prompt_tokens *= 5 / 8               # on average
    tokens = prompts * prompt_tokens + work.sequences * new
    update = tokens * on_meta(c).flops_per_token(prompt_tokens + new) / matmul_peak(hw) / n
    sampling, *_ = sampling_limit(c, hw, -(-prompts // n), prompt_tokens, samples, new)
    least = sampling + update                # seconds of a step
    limit = work.sequences / least
    rate = statistics.median(rates["nanoRFT"])
    step_s = statistics.median(run["step_s"] for run in runs)
    log(f"{rate / limit:.1%} of the limit of {limit:,.0f} {work.unit}: of a step's {1e3 * step_s:,.0f} ms "
        f"sampling takes at least {1e3 * (least - update):,.1f} and the update {1e3 * update:,.1f}")
    parts = median_parts(runs, ("rollout_s", "reward_s", "update_s", "sync_s"))
    return {
        "what": work.what,
        "unit": work.unit,
        "rates": rates,
        "limit": limit,
        "share": rate / limit,
        "step_s": step_s,
        "parts": parts,
        "settings": runs[0]["settings"],
        "repeats": raw(runs),
        "also": f"a step {1e3 * step_s:,.0f} ms, of which rollout {1e3 * parts['rollout_s']:,.0f}, "
                f"update {1e3 * parts['update_s']:,.0f}",
    }


def grade_all(pool, pairs):
    """Grade the (question, completion) pairs, and return completions a second."""
    start = time.perf_counter()
    grades = pool.score(pairs)
    seconds = time.perf_counter() - start
    expected = [zlib.crc32(text.encode()) / 2**32 for _, text in pairs]
    assert [grade.score for grade in grades] == expected, "wrong grades"
    return len(pairs) / seconds


def bench_rewards(cfg, hw, folder, script_args, log):
    """Measure completions a second that worker processes grade, and the caller itself, with a verifier that
    takes about verifier_ms of an idle core, always the same work. Without the start of the workers, which
    grpo.py has once a run."""
    path = Path(folder) / "slow.py"
    write_verifier(path, cfg.verifier_ms)
    pairs = [({"question": "", "answer": ""}, "x" * i) for i in range(cfg.completions)]
    what = f"{cfg.completions} completions, {cfg.verifier_ms:g} ms each, {processes(cfg.reward_workers)}"
    log(what)
    with Pool(str(path), cfg.reward_workers) as workers, Pool(str(path), 1, kind="serial") as serial:
        sides = {
            "nanoRFT": lambda: grade_all(workers, pairs),
            "one after the other": lambda: grade_all(serial, pairs),
        }
        rates = in_turn(sides, cfg.repeats, "completions/s", log, warm_up=1)
    limit = min(cfg.reward_workers, os.cpu_count()) * statistics.median(rates["one after the other"])
    share = statistics.median(rates["nanoRFT"]) / limit
    return {
        "what": what,
        "unit": "completions/s",
        "rates": rates,
        "limit": limit,
        "share": share,
        "also": what,
    }
