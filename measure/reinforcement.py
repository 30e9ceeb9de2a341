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

from measure.ceilings import devices, matmul_peak, on_meta, sampling_limit
from measure.runs import WARM_UP, Work, a_peer, a_run, as_flags, in_turn, processes, raw, small, steps_alone
from measure.synthetic import SHAPES, write_verifier
from model import GPTConfig
from runtime import guard
from runtime.rewards import Pool

# work, prompt_tokens, max_new_tokens: what takes TRL some seconds
GRPO = {"llama-50m": ("4x8", 50, 32), "gpt2": ("64x8", 50, 94)}
# a step on two cores; of other shapes
GRPO_ELSE = ("8x8", 50, 64)


def grpo_case(cfg, handed):
    """(prompts, samples of each, new tokens, tokens of a prompt): of bench.py's knobs, config files and
    flags, defaults, in that order."""
    work, prompt_tokens, new = GRPO.get(cfg.model, GRPO_ELSE)
    prompts, samples = map(int, (cfg.work or work).split("x"))
    script = {k: getattr(handed.config, k) for k in handed.given}
    if not cfg.work:
        prompts, samples = script.get("prompts_per_step", prompts), script.get("k_samples", samples)
    return prompts, samples, cfg.max_new_tokens or script.get("max_new_tokens", new), cfg.prompt_tokens or prompt_tokens


def grpo_work(cfg, hw, folder, handed):
    """grpo.py on prompts of one length and with a verifier that grades by a hash; samples never end before
    max_new_tokens."""
    folder, (prompts, samples, new, prompt_tokens) = Path(folder), grpo_case(cfg, handed)
    rng, c = random.Random(cfg.seed), GPTConfig(**SHAPES[cfg.model])
    texts = ["".join(rng.choices(ascii_lowercase + " 0123456789", k=prompt_tokens)) for _ in range(prompts * (WARM_UP + cfg.steps))]
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    write_verifier(folder / "score.py", cfg.verifier_ms)
    threads = torch.get_num_threads()
    ranks = cfg.ranks or (threads if hw.device.type == "cpu" and small(c) and prompts % threads == 0 else 1)
    arguments = [*as_flags(learning_rate=1e-6, warmup_steps=0), *handed.files, *handed.flags, *steps_alone(cfg, folder), *as_flags(
        init_from=folder, task=folder / "score.py", dataset=folder / "questions.jsonl", num_questions=None, tokenizer=None, few_shot=None,
        prompts_per_step=prompts, k_samples=samples, max_new_tokens=new, eval_interval=0, dtype=hw.dtype)]
    what = (f"{prompts} prompts of {prompt_tokens} tokens x {samples} samples of {new}"
            + (f", a verifier of {cfg.verifier_ms:g} ms" if cfg.verifier_ms else ""))
    return Work("grpo.py", arguments, folder, what, "completions/s", cfg.steps, ranks, prompts * samples, handed.config)


def bench_grpo(cfg, hw, folder, handed, say):
    """Completions a second of whole steps (rollout, reward, update), by the seconds that grpo.py logs, and of
    TRL's GRPOTrainer from the start of its steps to their end: neither with the start of the process, TRL's
    without fetching questions and logging. Same weights, prompts, reward, group size, learning rate and loss
    (dapo's, clipped alike, no KL, advantages not scaled), one AdamW step a rollout; that samples don't end
    early is checked on both sides. grpo.py leaves samples without any advantage out of its update: here there
    are none."""
    work, c, runs = grpo_work(cfg, hw, folder, handed), GPTConfig(**SHAPES[cfg.model]), []
    prompts, samples, new, prompt_tokens = grpo_case(cfg, handed)
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}; "
        f"{processes(work.ranks)} here"
        + (f", {cfg.peer_ranks} of TRL's" if cfg.peers else ""))

    def ours():
        runs.append(a_run(work))
        same = {(s["completion_tokens"], s["completion_tokens_max"], s["zero_variance"]) for s in runs[-1]["steps"]}
        if same != {(new, new, 0)}:
            raise guard.Failure(f"grpo.py did other work than was asked for, completions of {same} tokens: "
                                "leave out knobs that change it.")
        return runs[-1]["rate"]

    def theirs(peer):
        return a_peer(cfg, hw, work, peer, work.sequences, cfg.peer_ranks, dtype=peer.removeprefix("trl_"), model=str(folder),
                      max_new_tokens=new, task=f"{folder}/score.py", data=f"{folder}/questions.jsonl", prompts=prompts, samples=samples)
    called = {"trl_fp32": "TRL's GRPOTrainer, fp32", "trl_bf16": "TRL's GRPOTrainer, bf16"}
    sides = {"nanoRFT": ours} | {called[name]: functools.partial(theirs, name) for name in cfg.peers}
    rates = in_turn(sides, cfg.repeats, work.unit, say)
    n = devices(hw, work.ranks)
    update = (prompts * prompt_tokens + work.sequences * new) * on_meta(c).flops_per_token(prompt_tokens + new) / matmul_peak(hw) / n
    least = sampling_limit(c, hw, -(-prompts // n), prompt_tokens, samples, new)[0] + update
    rate, limit, step = statistics.median(rates["nanoRFT"]), work.sequences / least, statistics.median(run["step_s"] for run in runs)
    say(f"{rate / limit:.1%} of the limit of {limit:,.0f} {work.unit}: of a step's {1e3 * step:,.0f} ms "
        f"sampling takes at least {1e3 * (least - update):,.1f} and the update {1e3 * update:,.1f}")
    counted = [logged for run in runs for logged in run["steps"][WARM_UP:]]
    parts = {k: statistics.median(logged[k] for logged in counted) for k in ("rollout_s", "reward_s", "update_s", "sync_s")}
    return {"what": work.what, "unit": work.unit, "rates": rates, "limit": limit, "share": rate / limit, "step_s": step, "parts": parts,
            "settings": runs[0]["settings"], "repeats": raw(runs),
            "also": f"a step {1e3 * step:,.0f} ms, of which rollout {1e3 * parts['rollout_s']:,.0f}, update "
                    f"{1e3 * parts['update_s']:,.0f}"}


def bench_rewards(cfg, hw, folder, handed, say):
    """Completions a second that worker processes grade, and the caller itself, with a verifier that takes
    about verifier_ms of an idle core, always the same work. Without the start of the workers, which grpo.py
    has once a run."""
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
    limit = min(cfg.reward_workers, os.cpu_count()) * statistics.median(rates["one after the other"])
    share = statistics.median(rates["nanoRFT"]) / limit
    return {"what": what, "unit": "completions/s", "rates": rates, "limit": limit, "share": share, "also": what}
