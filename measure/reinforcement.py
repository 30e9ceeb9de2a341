"""Measure steps of grpo.py (rollout, reward, update) against their limit and TRL, and verifiers alone."""
import functools
import json
import random
import statistics
import time
import zlib
from pathlib import Path
from string import ascii_lowercase

import torch

import hub.weights
import tasks
from measure.ceilings import devices, matmul_peak, sampling_limit
from measure.runs import (WARM_UP, Work, alternate, as_flags, is_small, processes, run_peer, run_script,
                          shared_figures, steps_alone)
from measure.synthetic import SHAPES, verifier
from model import GPTConfig, on_meta
from rollouts.pipeline import requests_of
from rollouts.questions import questions_of
from runtime import guard
from tasks._pool import Pool, default_workers

# {model: (work, prompt_tokens, max_new_tokens)}, chosen so that a step of TRL takes some seconds
GRPO = {"llama-50m": ("4x8", 50, 32), "gpt2": ("64x8", 50, 94)}
# of other models, for two cores
GRPO_DEFAULT = ("8x8", 50, 64)
GRADED = 256                                 # completions a run of --stage=rewards
WORKERS = 2                                  # processes of it
PEER_NAMES = {"trl_fp32": "TRL's GRPOTrainer, fp32", "trl_bf16": "TRL's GRPOTrainer, bf16"}


def grpo_case(cfg, script_args):
    """Return (prompts, samples of each, new tokens, tokens of a prompt) from bench.py's options, else from
    config files and flags of grpo.py, else the defaults."""
    work, prompt_tokens, max_new_tokens = GRPO.get(cfg.model, GRPO_DEFAULT)
    prompts, samples = map(int, (cfg.work or work).split("x"))
    given = {option: getattr(script_args.config, option) for option in script_args.given}
    if not cfg.work:
        prompts = given.get("prompts_per_step", prompts)
        samples = given.get("k_samples", samples)
    max_new_tokens = cfg.max_new_tokens or given.get("max_new_tokens", max_new_tokens)
    return prompts, samples, max_new_tokens, cfg.prompt_tokens or prompt_tokens


def grpo_work(cfg, hw, folder, script_args):
    """Return the Work of grpo.py, with --run on a trained model and questions of unit_conversion, else on
    random weights and prompts."""
    folder = Path(folder)
    prompts, samples, new, prompt_tokens = grpo_case(cfg, script_args)
    if cfg.run:
        source = as_flags(init_from=cfg.run, task="unit_conversion", dataset=None, few_shot=0)
        description = f"{prompts} questions of unit conversion x {samples} samples of at most {new} tokens"
    else:
        source = random_questions(cfg, folder, prompts, prompt_tokens)
        at_most = "at most " if cfg.varied_prompts else ""
        description = f"{prompts} prompts of {at_most}{prompt_tokens} tokens x {samples} samples of {new}"
        if cfg.verifier_ms:
            description += f", a verifier of {cfg.verifier_ms:g} ms"
    ranks = cfg.ranks
    if not ranks:
        threads = torch.get_num_threads()
        small_on_cpu = hw.device.type == "cpu" and is_small(shape_of(cfg))
        ranks = threads if small_on_cpu and prompts % threads == 0 else 1
    arguments = as_flags(learning_rate=1e-6, warmup_steps=0)
    arguments += [*script_args.files, *script_args.flags, *steps_alone(cfg, folder), *source]
    arguments += as_flags(num_questions=None, tokenizer=None)
    arguments += as_flags(prompts_per_step=prompts, k_samples=samples, max_new_tokens=new)
    arguments += as_flags(eval_interval=0, dtype=hw.dtype)
    return Work("grpo.py", arguments, folder, description, "completions/s", cfg.steps, ranks,
                prompts * samples, script_args.config)


def shape_of(cfg):
    """Return the GPTConfig of the measured model."""
    return hub.find(cfg.run).config if cfg.run else GPTConfig(**SHAPES[cfg.model])


def random_questions(cfg, folder, prompts, prompt_tokens):
    """Write random prompts and a verifier that grades by a hash, and return the flags that name them.
    Prompts have one length, or with varied_prompts a quarter of it to all; samples never end before
    max_new_tokens."""
    rng = random.Random(cfg.seed)
    letters = ascii_lowercase + " 0123456789"
    num_questions = prompts * (WARM_UP + cfg.steps)
    lengths = [prompt_tokens] * num_questions
    if cfg.varied_prompts:
        lengths = [rng.randint(-(-prompt_tokens // 4), prompt_tokens) for _ in lengths]
    rows = [{"prompt": "".join(rng.choices(letters, k=length)), "answer": ""} for length in lengths]
    dataset = folder / "questions.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)))
    (folder / "score.py").write_text(verifier(cfg.verifier_ms))
    return as_flags(init_from=folder, task=folder / "score.py", dataset=dataset, few_shot=None)


def write_for_peer(cfg, folder, n):
    """Write --run's weights and tokenizer to folder/peer, and the prompts of n questions."""
    source = hub.find(cfg.run)
    tokenizer = source.tokenizer()
    hub.weights.export(source.load(), folder / "peer", tokenizer)
    task = tasks.load("unit_conversion")
    questions = questions_of(task, "train", n, cfg.seed)
    rows = [{"prompt": tokenizer.decode(request.ids), "question": question}
            for question, request in zip(questions, requests_of(tokenizer, task, questions))]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))


def bench_grpo(cfg, hw, folder, script_args, log):
    """Measure completions a second of whole steps (rollout, reward, update).

    grpo.py's seconds come from its log, those of TRL's GRPOTrainer from step callbacks, without its fetching
    of questions and logging; neither includes starting the process. Both have the same weights, prompts,
    reward, group size, learning rate and loss (dapo, same clipping, no KL, unscaled advantages) and one AdamW
    step a rollout. Completion lengths are checked on both sides, and grpo.py would skip samples of zero
    advantage, but there are none; with --run lengths differ, and it skips them.
    """
    folder = Path(folder)
    work = grpo_work(cfg, hw, folder, script_args)
    prompts, samples, new, _ = grpo_case(cfg, script_args)
    if cfg.run and cfg.peers:
        write_for_peer(cfg, folder, prompts * (WARM_UP + cfg.steps))
    log(f"{work.description}, {work.steps} steps a run after {WARM_UP}, {hw.dtype} on {hw.name}; "
        f"{processes(work.ranks)} here")

    def ours():
        run = run_script(work)
        keys = ("completion_tokens", "completion_tokens_max", "zero_variance")
        sampled = {tuple(step[key] for key in keys) for step in run["steps"]}
        if not cfg.run and sampled != {(new, new, 0)}:
            raise guard.Failure(f"grpo.py sampled completions of {sampled} tokens, not {new}: leave out "
                                "options that change their length.")
        return run["rate"]

    def theirs(peer):
        model, task = (folder / "peer", "unit_conversion") if cfg.run else (folder, folder / "score.py")
        return run_peer(cfg, hw, work, peer, work.sequences, dtype=peer.removeprefix("trl_"),
                        model=str(model), task=str(task), data=f"{folder}/questions.jsonl", source=cfg.run,
                        prompts=prompts, samples=samples, max_new_tokens=new,
                        lora_rank=script_args.config.lora_rank)
    sides = {"nanoRFT": ours} | {PEER_NAMES[peer]: functools.partial(theirs, peer) for peer in cfg.peers}
    rates = alternate(sides, cfg.repeats, work.unit, log)
    c = shape_of(cfg)
    n = devices(hw, work.ranks)
    *_, before = work.runs[-1]["steps"][:WARM_UP]
    counted = work.runs[-1]["steps"][WARM_UP:]
    new = statistics.fmean(step["completion_tokens"] for step in counted)
    both = (counted[-1]["tokens"] - before["tokens"]) / (counted[-1]["questions"] - before["questions"])
    prompt_tokens = both / samples - new     # on average
    tokens = prompts * prompt_tokens + work.sequences * new
    update = tokens * on_meta(c).flops_per_token(prompt_tokens + new) / matmul_peak(hw) / n
    sampling, *_ = sampling_limit(c, hw, -(-prompts // n), prompt_tokens, samples, new)
    least = sampling + update                # seconds of a step
    limit = work.sequences / least
    phases = ("rollout_s", "reward_s", "update_s", "sync_s", "record_s")
    figures = shared_figures(work, rates, limit, phases, log)
    step_ms = 1e3 * figures["step_s"]
    log(f"{figures['share']:.1%} of the limit of {limit:,.0f} {work.unit}: of a step's {step_ms:,.0f} ms "
        f"sampling needs at least {1e3 * (least - update):,.1f} and the update {1e3 * update:,.1f}")
    rollout_ms, update_ms = (1e3 * figures["parts"][part] for part in ("rollout_s", "update_s"))
    also = f"a step {step_ms:,.0f} ms, of which rollout {rollout_ms:,.0f}, update {update_ms:,.0f}"
    return figures | {"also": also}


def grade_all(pool, pairs):
    """Grade (question, completion) pairs, check the grades, and return completions a second."""
    start = time.perf_counter()
    grades = pool.score(pairs)
    seconds = time.perf_counter() - start
    expected = [zlib.crc32(text.encode()) / 2**32 for _, text in pairs]
    assert [grade.score for grade in grades] == expected, "wrong grades"
    return len(pairs) / seconds


def bench_rewards(cfg, hw, folder, script_args, log):
    """Measure completions a second graded by worker processes and by the calling process, with a verifier of
    about verifier_ms CPU time. The start of the workers, once a run in grpo.py, is excluded."""
    path = Path(folder) / "slow.py"
    path.write_text(verifier(cfg.verifier_ms))
    pairs = [({"question": "", "answer": ""}, "x" * i) for i in range(GRADED)]
    description = f"{GRADED} completions, {cfg.verifier_ms:g} ms each, {processes(WORKERS)}"
    log(description)
    with Pool(str(path), WORKERS) as workers, Pool(str(path), 1, kind="serial") as serial:
        sides = {
            "nanoRFT": lambda: grade_all(workers, pairs),
            "one after the other": lambda: grade_all(serial, pairs),
        }
        rates = alternate(sides, cfg.repeats, "completions/s", log, warm_up=1)
    limit = min(WORKERS, default_workers()) * statistics.median(rates["one after the other"])
    share = statistics.median(rates["nanoRFT"]) / limit
    return {"what": description, "unit": "completions/s", "rates": rates, "limit": limit, "share": share,
            "also": description}
