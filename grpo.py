"""Improve a model by reinforcement learning on verifiable rewards: Group Relative Policy Optimization (GRPO, Shao et al. 2024).

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion
    python grpo.py config/grpo.py --init_from=out/rft --task=my_reward.py --dataset=questions.jsonl
    python grpo.py --init_from=resume --out_dir=out/grpo
    torchrun --nproc_per_node=2 grpo.py config/grpo_4090x2.py --init_from=...

A step: the model answers some questions k_samples times each, a verifier grades the answers, and what did better than the mean of its
group becomes likelier, what did worse less so. Shapes: B sequences, T positions, G groups, K samples a group. Knobs, as --key=value:
"""
import contextlib
import dataclasses
import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

import hf
from engine import Engine, Sampling, slots_that_fit
from eval import accuracy, ask, few_shot_of, refused, requests_of, unseen_questions
from model import IGNORE, Prompts, adapters_off, blank
from runtime import checkpoint, config, distributed, guard, hardware, memory, optim
from runtime.config import BadInput
from runtime.log import Log, check_installed, duration
from runtime.prompts import context_of
from runtime.rewards import BrokenReward, Pool, load
from runtime.rollouts import (Batch, Rollout, alike, cells, figures_of, flops, micro_batches, next_places, note_logprobs, padded,
                              question_at, read_questions)
from runtime.state import State, adapt, check_task, check_training


@dataclass
class Config:
    # the run
    out_dir: str = "out/grpo"                # run folder: config, weights, metrics.jsonl, samples.txt, training.log
    init_from: str = "out/rft"               # run folder, Hugging Face folder or hub name; resume: the run in out_dir
    overwrite: bool = False                  # replace the run that out_dir holds
    seed: int = 0
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes, or a folder with one
    # questions and their rewards
    task: str | None = None                  # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours with
                                             # reward(question, completion); None: unit_conversion
    dataset: str | None = None               # .jsonl, {"prompt": ..., "answer": ...} a line, instead of the task's questions
    num_questions: int | None = None         # to train on; None: all there are, or as the task finds right; of a dataset at most
    few_shot: int | None = None              # worked examples before each; None: of a run folder as many as it was trained with, of a
                                             # model of Hugging Face's 4; with a dataset 0
    reward_workers: int | None = None        # processes that verify, a rank; None: one a core, at most 8 in all
    reward_pool: Literal["process", "thread", "serial"] = "process"       # only a process can be stopped if it hangs
    timeout: float = 10.0                    # seconds after which a verifier is killed and its sample is an error, worth 0
    # rollout. There is no top_k or top_p: the loss is about the distribution that was sampled from
    prompts_per_step: int = 32               # all ranks together
    k_samples: int = 8                       # of each prompt: its group
    temperature: float = 1.0
    max_prompt_tokens: int | None = None     # longer ones are left out; None: those that leave no room for an answer
    max_new_tokens: int = 128
    skip_solved: int = 0                     # epochs for which a question rests after all its samples were right; they teach nothing
    dynamic_sampling: bool = False           # other questions in place of those whose samples all fare alike (DAPO, Yu et al. 2025)
    max_rounds: int = 4                      # in which it looks for them
    slots: int | None = None                 # samples in flight a rank; None: all of a step's, up to 512, if they fit
    # loss
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"      # what a token's loss is divided by; see `normaliser`
    advantage_scale: Literal["none", "group"] = "none"          # group: divided by the standard deviation in the group, as in GRPO
    clip_low: float = 0.2                    # the ratio of probabilities counts down to 1 - clip_low,
    clip_high: float = 0.28                  # and up to 1 + clip_high (DAPO; PPO has 0.2)
    beta: float = 0.0                        # weight of the KL divergence from the model that training began with, k3 (Schulman 2020)
                                             # times the ratio, without which its gradient is biased; 0: that model is not loaded
    offload_reference: bool = False          # that model waits in the CPU's memory while it is not needed
    inner_epochs: int = 1                    # passes over a step's samples
    mini_batches: int = 1                    # optimizer steps a pass
    tis_cap: float = 0.0                     # e.g. 2: truncated importance sampling (Yao et al. 2025) where the engine's
                                             # log-probabilities are not the trainer's; 0: off
    overlong: Literal["keep", "mask", "penalty"] = "keep"       # samples that reach max_new_tokens: keep their reward; don't train on
                                             # them; subtract up to 1 over the last overlong_tokens (DAPO's soft punishment)
    overlong_tokens: int = 32
    # optimizer
    max_steps: int = 100                     # rollouts, each with inner_epochs * mini_batches optimizer steps
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4              # of a model of a million parameters; 1e-6 is usual for a few hundred million
    min_lr: float = 0.0
    warmup_steps: int = 5
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "constant"
    cooldown: float = 0.4                    # wsd: the share of steps in which the rate falls
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    muon_momentum: float = 0.9
    grad_clip: float = 1.0                   # norm of the whole gradient; 0: off
    fused_adamw: bool = True
    lora_rank: int = 0                       # train adapters of that rank; the reference is the model without them. 0: off
    lora_alpha: float | None = None          # their scale is alpha / rank; None: 2 lora_rank
    lora_linears: str = "qkv,out,up,gate,down"       # which linear layers of a block get one
    # speed and memory
    tokens_per_micro_batch: int = 16384      # positions of a forward pass, see runtime.rollouts.cells; less while they don't fit the memory
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; weights are fp32. The engine samples in bf16 or fp32
    tf32: bool = True
    compile: bool = False                    # torch.compile of the update
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    cuda_graphs: bool = True                 # in sampling
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass: less memory, a second forward
    deterministic: bool = False              # refuse kernels whose result varies from run to run
    keep_memory: bool = True                 # on a CPU, freed tensors' memory stays in the process
    # evaluation, log, checkpoints
    eval_interval: int = 50                  # steps; also before the first and after the last; 0: never
    eval_questions: int = 200                # of split valid, answered greedily; of a dataset at most a tenth, which is not trained on
    shown_questions: int = 4                 # of them whose answers samples.txt shows
    log_interval: int = 1                    # steps
    save_interval: int = 100                 # steps; also after the last, at a new best, and when asked to stop
    keep_last: int = 2                       # checkpoints, beside the best
    save_only_model: bool = False            # weights alone: a third of the size, no resume
    tensorboard: bool = False
    wandb: bool = False

    @property
    def batch_size(self):
        """What runtime.state calls it: what a micro-batch may hold."""
        return self.tokens_per_micro_batch


FROZEN = ["lora_rank", "lora_alpha", "lora_linears"]


def check(cfg):
    if cfg.dataset and cfg.task is None:
        raise BadInput("--dataset needs the file that grades its answers: --task=my_reward.py.")
    cfg.task = cfg.task or "unit_conversion"
    config.at_least(cfg, 1, "prompts_per_step k_samples max_prompt_tokens max_new_tokens max_rounds slots inner_epochs mini_batches "
                            "overlong_tokens max_steps tokens_per_micro_batch eval_questions log_interval save_interval "
                            "keep_last")
    config.at_least(cfg, 0, "seed clip_low clip_high beta tis_cap learning_rate min_lr warmup_steps cooldown weight_decay "
                            "beta1 beta2 muon_momentum grad_clip lora_rank eval_interval shown_questions skip_solved")
    config.at_least(cfg, 0.01, "timeout temperature")
    config.below(cfg, 1, "clip_low beta1 beta2 muon_momentum")
    config.at_most(cfg, 1, "cooldown")
    config.at_most(cfg, 10**6, "timeout prompts_per_step k_samples eval_questions")
    config.at_most(cfg, 2**16, "slots")
    config.check_questions(cfg)
    check_training(cfg)
    world = distributed.world_size()
    if cfg.k_samples == 1:
        raise BadInput("--k_samples=1 leaves nothing to compare a sample with: give at least 2.")
    if cfg.prompts_per_step % (world * cfg.mini_batches):
        raise BadInput(f"{cfg.prompts_per_step} prompts a step can't be shared evenly by {world} ranks with {cfg.mini_batches} "
                       "mini-batches: change --prompts_per_step.")
    if cfg.overlong == "penalty" and cfg.overlong_tokens > cfg.max_new_tokens:
        raise BadInput(f"--overlong_tokens={cfg.overlong_tokens} is more than --max_new_tokens={cfg.max_new_tokens}: lower it.")
    if cfg.init_from == "scratch":
        raise BadInput("A model that knows nothing gets no reward to learn from: name one with --init_from=.")
    if cfg.init_from != "resume" and Path(cfg.out_dir).resolve() == Path(cfg.init_from).resolve():
        raise BadInput(f"{cfg.out_dir} holds the model to start from: choose another --out_dir=, or continue its run with "
                       "--init_from=resume.")


# --- the objective ---

def advantages(rewards, scale="none"):
    """rewards [G, K] -> how much better each sample is than the mean of its group, float64 [G, K]; exactly 0 in a group that fares
    alike. scale group: in standard deviations, as GRPO has it, which weighs easy and hard questions more (Dr. GRPO, Liu et al. 2025)."""
    rewards = rewards.double()
    above = rewards - rewards.mean(1, keepdim=True)
    if scale == "group":
        above = above / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    return above.masked_fill((rewards.amax(1) == rewards.amin(1))[:, None], 0.0)       # where the mean is off by its rounding


def normaliser(loss_type, tokens, sequences, max_new_tokens):
    """What the losses of an optimizer step, all micro-batches and ranks, are divided by: dapo the number of their tokens, so that each
    counts alike; grpo the number of sequences, each of which is a mean over its tokens; dr_grpo a constant a sequence."""
    return {"dapo": tokens, "grpo": sequences, "dr_grpo": sequences * max_new_tokens}[loss_type]


def grpo_loss(logp, old_logp, ref_logp, advantage, mask, divisor=1.0, clip_low=0.2, clip_high=0.28, beta=0.0, loss_type="dapo",
              sampled_logp=None, tis_cap=0.0):
    """The clipped objective (PPO, Schulman et al. 2017), negated, summed over a micro-batch and divided by `divisor` (see `normaliser`).

    logp [B, T]: of the sampled tokens under the model that is trained, with a gradient; old_logp: when they were sampled; ref_logp:
    under the reference, None without beta; advantage [B]; mask [B, T]: which tokens are trained on; what stands elsewhere, NaN
    and infinity too, has no effect. sampled_logp: the engine's, where old_logp is the trainer's, for tis_cap. All in fp32, nats.
    Returns (loss [], {sums over tokens: kl to the reference, kl_old to the sampler (both k3), clipped}).
    """
    mask = mask.bool()

    def difference(a, b):                    # masked before exp, and within what exp can hold: 0 * inf would be a NaN gradient
        return torch.where(mask, a.float() - b.float(), 0.0).clamp(-20, 20)
    log_ratio = difference(logp, old_logp)
    ratio, advantage = log_ratio.exp(), advantage.float()[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, kl = -torch.minimum(ratio * advantage, clipped * advantage), torch.zeros_like(ratio)
    if tis_cap:
        loss = loss * difference(old_logp, sampled_logp).exp().clamp(max=tis_cap)
    if beta:
        toward = difference(ref_logp, logp)
        kl = toward.exp() - toward - 1
        loss = loss + beta * ratio * kl
    loss = torch.where(mask, loss, 0.0).sum(1)
    if loss_type == "grpo":
        loss = loss / mask.sum(1).clamp(min=1)
    with torch.no_grad():
        active = torch.where(mask, clipped * advantage < ratio * advantage, False)
    return loss.sum() / divisor, {"kl": kl.detach().sum(), "kl_old": (ratio - 1 - log_ratio).detach().sum(), "clipped": active.sum()}


# --- questions ---

def open_questions(cfg, task):
    """(questions to train on, questions for validation, what is said of those that were dropped)."""
    if cfg.dataset:
        train, valid = read_questions(cfg.dataset, cfg.eval_questions)
        return train[:cfg.num_questions], valid if cfg.eval_interval else [], ""
    train, dropped = unseen_questions(task, "train", cfg.num_questions, cfg.seed)
    valid = task.questions("valid")[:cfg.eval_questions] if cfg.eval_interval else []
    return train, valid, f" ({dropped} that stand in the test split dropped)" if dropped else ""


def asked(cfg, tokenizer, task, questions, num_samples, positions):
    """[(question, Request)] of those whose prompts leave room for an answer, and are not longer than asked for."""
    longest = min(positions - 1, cfg.max_prompt_tokens or positions)
    requests = requests_of(tokenizer, task, questions, num_samples, cfg.max_new_tokens, cfg.few_shot)
    pairs = [(question, request) for question, request in zip(questions, requests) if len(request.ids) <= longest]
    return [(question, dataclasses.replace(request, key=key)) for key, (question, request) in enumerate(pairs)]


# --- rollout ---

def roll_out(cfg, engine, tokenizer, pool, train, places, spent, meanwhile):
    """{place: its group of Rollouts, graded} for places of the stream. Verifiers work while the engine goes on, and while
    meanwhile(rollouts) does: they are handed an eighth of the samples at a time, for waking them takes a core from the engine.
    Seconds go to `spent`."""
    chosen, began = {place: train[question_at(place, len(train), cfg.seed)] for place in places}, time.perf_counter()
    groups = {place: [None] * cfg.k_samples for place in places}
    fresh, submitted, at_once = [], [], max(1, len(places) * cfg.k_samples // 8)

    def hand_over():
        for rollout, question in fresh:
            pool.submit(question, tokenizer.text_of(rollout.ids))
            submitted.append(rollout)
        fresh.clear()
    for s in engine.generate([dataclasses.replace(request, key=place) for place, (_, request) in chosen.items()]):
        finished, place = s.reason == "stop", s.request.key
        groups[place][s.index] = Rollout(s.request.ids, s.ids, s.logprobs, finished, trained=finished or cfg.overlong != "mask")
        fresh.append((groups[place][s.index], chosen[place][0]))
        if len(fresh) >= at_once:
            hand_over()
    hand_over()
    spent["rollout"] += time.perf_counter() - began
    meanwhile(submitted)
    began = time.perf_counter()
    for rollout, grade in zip(submitted, pool.collect(wait=True), strict=True):
        rollout.grade, rollout.reward = grade, grade.score - penalty(cfg, len(rollout.ids))
    spent["reward"] += time.perf_counter() - began
    return groups


def penalty(cfg, length):
    """DAPO's soft punishment of a completion of so many tokens: from 0 to 1 over the last overlong_tokens."""
    if cfg.overlong != "penalty":
        return 0.0
    return max(0.0, (length - (cfg.max_new_tokens - cfg.overlong_tokens)) / cfg.overlong_tokens)


def gather_groups(cfg, now, n, sample):
    """(groups to train on, all that were sampled) of this rank. n: questions; sample: places of the stream -> {place: group}. With
    dynamic sampling in rounds, until each rank has its share of groups that don't fare alike, or max_rounds are over.
    FloatingPointError or BrokenReward, on every rank, if sample raises it on one."""
    share, kept, everything = cfg.prompts_per_step // distributed.world_size(), [], []
    for _ in range(cfg.max_rounds if cfg.dynamic_sampling else 1):
        mine = next_places(cfg, now, n)[distributed.rank() * share:]    # in one piece, so that mini-batches don't depend on the ranks
        groups = distributed.together(lambda: sample(mine[:share]), FloatingPointError, BrokenReward)
        everything += groups.values()
        kept += [g for g in groups.values() if not cfg.dynamic_sampling or not alike(g)]
        if cfg.skip_solved:
            solved = [place for place, g in groups.items() if all(r.grade.score == 1 for r in g)]
            now.solved |= {question_at(place, n, cfg.seed): place // n for places in distributed.gather(solved) for place in places}
        if not distributed.any(len(kept) < share):
            break
    return kept[:share], everything


# --- update ---

def optimizer_step(cfg, hw, ddp, state, groups, spare, lr, say):
    """Forward, backward and one step of the optimizers on groups of Rollouts, with the one normaliser. Returns (this rank's sums, norm
    of the gradient, whether it is finite), or None if there was nothing to learn on any rank: then no weight moves, nor any
    state of the optimizers. spare: any Rollout."""
    now = state.progress
    trained = [r for group in groups for r in group if r.trained]
    tokens, sequences, signals = distributed.sum([
        sum(len(r.ids) for r in trained), len(trained), sum(r.advantage != 0 for r in trained)])
    divisor = normaliser(cfg.loss_type, tokens, sequences, cfg.max_new_tokens)
    if not sequences or not (signals or cfg.beta):
        return None
    # Without advantage a sample has no gradient, so it need not be computed. A rank with none takes part with one not trained on.
    learnt = [r for r in trained if r.advantage or cfg.beta] or [dataclasses.replace(spare, trained=False)]
    while True:
        parts, out_of_memory = micro_batches(learnt, now.micro_batch), None
        sums = {"gap_max": 0.0, "flops": flops(state.model, learnt)}
        try:
            for part in ddp.micro_steps(parts):
                batch = Batch(*(t.to(hw.device, non_blocking=True) for t in padded(part)))
                mask = batch.y != IGNORE
                with hw.autocast():
                    logp, entropy = ddp.token_logprobs(batch.x, batch.y, cfg.temperature, batch.prompts)
                loss, figures = grpo_loss(
                    logp, batch.recomputed if cfg.tis_cap else batch.sampled, batch.reference, batch.advantage, mask, divisor,
                    cfg.clip_low, cfg.clip_high, cfg.beta, cfg.loss_type, batch.sampled, cfg.tis_cap)
                state.scaler.scale(loss).backward()
                apart = torch.where(mask, logp.detach() - batch.sampled, 0.0).abs()
                sums["gap_max"] = apart.max().clamp(min=sums["gap_max"])
                figures |= {"loss": loss.detach(), "entropy": entropy.sum(), "gap": apart.sum(), "tokens": mask.sum()}
                sums |= {name: sums.get(name, 0.0) + value for name, value in figures.items()}
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            out_of_memory = f"{error}".partition("\n")[0]
        if out_of_memory is None:
            break
        batch = mask = logp = entropy = loss = figures = apart = None  # they and the exception, now gone, hold the step's tensors
        retreat(cfg, now, parts, out_of_memory, say)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return {k: float(v) for k, v in sums.items()}, *optim.apply_step(state.optimizers, state.scaler, lr, cfg.grad_clip)


def retreat(cfg, now, parts, reason, say):
    """Half the tokens a micro-batch after running out of memory; Failure where that can't help, or others wait for this rank."""
    less = now.micro_batch // 2
    if distributed.world_size() > 1:
        raise guard.Failure(f"Rank {distributed.rank()} ran out of memory at step {now.step + 1} ({reason}): go on from the last "
                            f"checkpoint with --init_from=resume --out_dir={cfg.out_dir} --tokens_per_micro_batch={less}.")
    if max(map(len, parts)) == 1:
        raise guard.Failure(f"Step {now.step + 1} ran out of memory with a micro-batch of one sequence ({reason}): go on from the last "
                            "checkpoint with --gradient_checkpointing, or lower --max_new_tokens.")
    say(f"Step {now.step + 1} ran out of memory ({reason}): it is repeated with micro-batches of {less} tokens.")
    now.micro_batch = less


# --- what is said of a step ---

def evaluate(cfg, engine, tokenizer, task, pool, valid, step):
    """Figures of greedy answers to the questions held out, of all ranks; those to the first few are added to samples.txt."""
    (questions, requests), sampling, texts = map(list, zip(*valid)), engine.sampling, {}
    engine.sampling = dataclasses.replace(sampling, temperature=0.0)
    try:
        grades = ask(engine, tokenizer, questions, requests, pool, texts=texts)
    finally:
        engine.sampling = sampling
        pool.collect(wait=True)              # of what no one asks for any more, if it failed
    if distributed.is_main() and cfg.shown_questions:
        said = [f"{'=' * 20} step {step}: {sum(g[0].score == 1 for g in grades)} of {len(grades)} right\n"]
        for number in range(min(cfg.shown_questions, len(questions))):
            grade = grades[number][0]
            true = ", ".join(name for name, holds in grade.parts.items() if holds) or "nothing"
            said.append(f"{questions[number]['question']}\n--> reward {grade.score:g} ({grade.error or true})\n"
                        f"{task.cut(texts[number, 0])}\n{'-' * 20}\n")
        with open(Path(cfg.out_dir) / "samples.txt", "a", encoding="utf-8", errors="backslashreplace") as f:
            f.write("\n".join(said) + "\n")
    return accuracy(grades) | {"reward": fmean(g.score for row in grades for g in row)}


def open_reference(cfg, hw, model):
    """Function of rollouts and of the tokens a micro-batch that notes what the model that training began with makes of them: this one
    without its adapters, or a second one."""
    if not cfg.beta:
        return lambda rollouts, tokens: None
    reference, pinned = model, []
    if not cfg.lora_rank:
        reference = blank(model.config, hw.attention, device=hw.device)
        reference.load_state_dict(checkpoint.load_base(cfg.out_dir))
        if cfg.offload_reference and hw.device.type == "cuda":
            pinned = [p.data.cpu().pin_memory() for p in reference.parameters()]

    def place(weights):
        for p, weight in zip(reference.parameters(), weights):
            p.data = weight
    place(pinned)

    def note(rollouts, tokens):
        place(weight.to(hw.device, non_blocking=True) for weight in pinned)
        with adapters_off(model) if cfg.lora_rank else contextlib.nullcontext():
            note_logprobs(reference, hw, rollouts, tokens, cfg.temperature, "reference")
        place(pinned)                        # where they stayed meanwhile
    return note


def open_engine(cfg, hw, state, context, longest, tokenizer, task, say):
    """(model as the update calls it, Engine). What does not fit the memory is cut smaller: first the update's micro-batches, then the
    samples in flight beside it. Both are kept with the checkpoints, since shapes decide the last bits. longest: prompt, in tokens."""
    model, now, K = state.model, state.progress, cfg.k_samples
    share, to_come = cfg.prompts_per_step // distributed.world_size() * K, optim.state_to_come(state.optimizers)

    new = min(cfg.max_new_tokens, context - 1)
    each = cells(1 / K, longest, 1, new)     # of a micro-batch's tokens, if all are as long as can be

    def answers(tokens):
        return min(share // cfg.mini_batches, max(1, int(tokens // each)))

    def rows(tokens):                        # sequences with as many positions
        return math.ceil(answers(tokens) * each / context)

    def attempt(tokens):
        mode, n = None if cfg.compile_mode == "default" else cfg.compile_mode, answers(tokens)
        dynamic = None if cfg.gradient_checkpointing else True         # which checkpointing does not compile with (torch 2.13)
        fast = distributed.TrainedModel(model, hw.compile, mode, dynamic)
        x, read = (torch.zeros(shape, dtype=torch.long, device=hw.device) for shape in ((n, new), (math.ceil(n / K), longest)))
        prompts = Prompts(read, read.new_full(read.shape[:1], longest), torch.arange(n, device=hw.device) // K)
        return fast, memory.rehearse(fast, hw, rows(tokens), context, 2, to_come, (x, x, cfg.temperature, prompts))
    fast, now.micro_batch = memory.fit(
        hw, now.micro_batch, attempt, lambda tokens: math.ceil(answers(tokens) // 2 * each) or None,
        lambda: memory.advice(model, hw, context, to_come, "lower --max_new_tokens, --max_prompt_tokens or --few_shot"), say)
    fast.share_gradients()
    dtype = hw.sampling_dtype
    needed = sum(memory.parts(model, hw, rows(now.micro_batch), context, to_come).values())
    most = slots_that_fit(model.config, context, dtype, hw.device, needed + dtype.itemsize * model.n_params())
    slots = cfg.slots or min(share, most, now.slots or share)
    with refused():
        sampling = Sampling(cfg.temperature, stop=tokenizer.stop, stop_strings=(task.stop,) if task.stop else ())
        engine = Engine(model, slots, context, sampling, cfg.seed, dtype, cfg.deterministic, tokenizer.decode,
                        cuda_graphs=cfg.cuda_graphs)
    return fast, engine


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, frozen=FROZEN)
    check(cfg)
    distributed.on_main(lambda: check_task(cfg, argv))
    check_installed(cfg.tensorboard, cfg.wandb)
    world, resuming = distributed.world_size(), cfg.init_from == "resume"
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic, cfg.keep_memory)
    if world > 1 and hw.device.type == "mps":
        raise BadInput("Several ranks can't exchange gradients on an Apple GPU: give --device=cpu, or start one process.")

    # The model and what it is asked.
    found = distributed.on_main(lambda: hf.to_resume(cfg.out_dir) if resuming else hf.find(cfg.init_from))
    tokenizer = found.tokenizer(None if resuming else cfg.tokenizer)
    cfg.tokenizer = tokenizer.describe()["name"]
    cfg.few_shot = 0 if cfg.few_shot is None and cfg.dataset else few_shot_of(cfg, found)
    with refused():
        task = load(cfg.task)
        questions, held_out, about = distributed.on_main(lambda: open_questions(cfg, task))
        train = asked(cfg, tokenizer, task, questions, cfg.k_samples, found.config.block_size)
        valid = asked(cfg, tokenizer, task, held_out, 1, found.config.block_size)
    if not train:
        raise BadInput(f"Every prompt is longer than --max_prompt_tokens, or fills the {found.config.block_size} positions of the "
                       "model: lower --few_shot, or choose another model.")
    longest = max(len(request.ids) for _, request in train + valid)
    context = context_of(longest, cfg.max_new_tokens, found.config.block_size)

    torch.manual_seed(cfg.seed)
    shape = dataclasses.replace(found.config, dropout=0.0)             # the ratio is about the model that sampled
    memory.check_weights(shape, hw.device)
    model = blank(shape, hw.attention, cfg.gradient_checkpointing, device=hw.device)
    if not resuming:
        found.fill(model)
    adapt(cfg, model, hw.device, resuming)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2), cfg.fused_adamw,
                             cfg.muon_momentum)
    state = State(cfg, hw, model, optimizers, cfg.tokens_per_micro_batch)
    now = state.progress
    now.data = digest = hashlib.sha256(json.dumps([(q, r.ids) for q, r in train]).encode()).hexdigest()
    if resuming:
        state.restore(found.step)
        if now.data != digest:
            raise BadInput(f"The questions have changed since the run in {cfg.out_dir} was stopped, so it can't go on exactly: put them "
                           f"back, or start a new run with --init_from={cfg.out_dir} and another --out_dir=.")
    with refused():                          # before a run folder is touched
        pool = Pool(cfg.task, cfg.reward_workers, cfg.timeout, cfg.reward_pool)
    distributed.on_main(lambda: state.open_run(tokenizer, resuming, keep_base=cfg.beta > 0))
    log = Log(cfg.out_dir, now.step if resuming else None, cfg.tensorboard, cfg.wandb, dataclasses.asdict(cfg))

    note_reference = open_reference(cfg, hw, model)
    ddp, engine = open_engine(cfg, hw, state, context, longest, tokenizer, task, log.say)
    log.say(f"{model.n_params():,} parameters, {sum(p.numel() for p in model.parameters() if p.requires_grad):,} of them trained, from "
            f"{cfg.init_from}; {len(train):,} questions of {cfg.dataset or cfg.task}{about}, {len(valid)} held out"
            f"{f'; {len(questions) - len(train)} too long left out' if len(train) < len(questions) else ''}.\n"
            f"{world} x {hw.name}, {hw.dtype}, engine {engine.dtype}, attention {hw.attention_kernel}, compile "
            f"{'on' if hw.compile else 'off'}, {engine.slots} samples in flight, micro-batches of {now.micro_batch:,} tokens, {pool.n} "
            f"reward workers ({pool.kind}).\n"
            f"{cfg.prompts_per_step} prompts x {cfg.k_samples} samples a step, {cfg.inner_epochs} x {cfg.mini_batches} optimizer steps on "
            f"them; {cfg.loss_type}, {cfg.optimizer}, {cfg.lr_schedule} learning rate {cfg.learning_rate:g}"
            f"{f', beta {cfg.beta:g}' if cfg.beta else ', no reference'}.\n"
            f"Not by default: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(cfg).items() if v != getattr(Config, k)) or '-'}")
    log.metrics(step=now.step, config=dataclasses.asdict(cfg), settings=hw.settings | {
        "ranks": world, "engine": f"{engine.dtype}", "reward_pool": pool.kind, "cuda_graphs": engine.cuda_graphs})

    def sample(places):
        def meanwhile(rollouts):
            began = time.perf_counter()
            note_reference(rollouts, now.micro_batch)
            if cfg.tis_cap:
                note_logprobs(model, hw, rollouts, now.micro_batch, cfg.temperature, "recomputed")
            spent["reference"] += time.perf_counter() - began
        try:
            groups = roll_out(cfg, engine, tokenizer, pool, train, places, spent, meanwhile)
        except FloatingPointError:           # the last steps broke the weights
            pool.collect(wait=True)          # no one asks for these grades any more
            raise
        read.append(engine.bytes_read((len(r.prompt), len(r.ids)) for g in groups.values() for r in g))
        return groups

    def examine():
        """The share of the reward that held-out answers miss, which is what the best checkpoint has least of."""
        result = evaluate(cfg, engine, tokenizer, task, pool, valid, now.step)
        log.metrics(step=now.step, **{f"val_{k}": v for k, v in result.items() if isinstance(v, float)})
        log.say(f"step {now.step}/{cfg.max_steps} | {len(valid)} held-out questions, greedy: {result['accuracy']:.1%} right "
                f"[{result['accuracy_low']:.1%}, {result['accuracy_high']:.1%}], reward {result['reward']:.3f}")
        return 1 - result["reward"] - 1e-9 * now.step      # of those that do as well the last

    stop, clock, groups = guard.StopSignal(), time.perf_counter, []
    torch.use_deterministic_algorithms(False)
    with pool:
        if valid and now.step == 0:
            with refused():
                examine()
        while now.step < cfg.max_steps:
            # One step: ask, grade, compare with the group, learn from the difference, hand the weights to the engine.
            spent = dict.fromkeys(("rollout", "reward", "reference", "update", "sync"), 0.0)
            read, sums, grad_norm, verdict = [], [], 0.0, "ok"
            lr = now.lr_factor * optim.lr_at(now.step, cfg.max_steps, cfg.learning_rate, cfg.min_lr, cfg.warmup_steps,
                                             cfg.lr_schedule, cfg.cooldown)
            t0 = clock()
            try:
                groups, everything = gather_groups(cfg, now, len(train), sample)
            except FloatingPointError:
                log.say(f"step {now.step + 1}: the logits are not finite, so nothing can be sampled.")
                verdict = "stop" if state.nonfinite.rolled_back else "rollback"
            above = advantages(torch.tensor([[r.reward for r in group] for group in groups]).view(-1, cfg.k_samples), cfg.advantage_scale)
            for group, row in zip(groups, above.tolist()):
                for rollout, advantage in zip(group, row):
                    rollout.advantage = advantage
            t1 = clock()
            torch.use_deterministic_algorithms(cfg.deterministic)      # of the update; in sampling, CUDA's running sums would be refused
            for i in range(cfg.inner_epochs * cfg.mini_batches if verdict == "ok" else 0):
                done = optimizer_step(cfg, hw, ddp, state, groups[i % cfg.mini_batches::cfg.mini_batches], everything[0][0], lr, log.say)
                if done is None:
                    continue
                figures, grad_norm, finite = done
                sums.append(figures)
                verdict = state.nonfinite.after(finite, state.scaler.get_scale())
                if verdict != "ok":
                    now.skipped += 1
                    log.say(f"step {now.step + 1}: the gradients are not finite; this optimizer step is skipped.")
                if verdict in ("rollback", "stop"):
                    break
            torch.use_deterministic_algorithms(False)
            t2 = clock()
            if verdict == "rollback" and state.roll_back(log.say):
                log.forget_after(now.step)
                engine.load(model)
                continue
            if verdict in ("rollback", "stop"):
                path = guard.keep_batch(cfg.out_dir, now.step + 1, rollouts=[vars(r) | {"grade": r.grade.score} for g in groups for r in g])
                log.say(f"Training diverged: no finite logits, or {state.nonfinite.patience} optimizer steps in a row without finite gradients, "
                        f"again after going back or with no checkpoint to go back to. The last rollouts are in {path}; lower --learning_rate.")
                return 1
            engine.load(model)
            stopping = stop.requested()                   # one small exchange between the ranks
            hw.wait()                                     # for the weights that the engine takes over: they are this step's time
            spent["update"], spent["sync"] = t2 - t1, clock() - t2
            seconds = clock() - t0
            now.step, now.seconds, now.slots = now.step + 1, now.seconds + seconds, engine.slots

            # Log, evaluate, save, stop.
            step, last = now.step, now.step == cfg.max_steps
            now.tokens += int(distributed.sum([sum(len(r.prompt) + len(r.ids) for group in everything for r in group)])[0])
            if step % cfg.log_interval == 0 or step == 1 or last:
                f, (used, peak) = figures_of(cfg, hw, everything, sums, sum(read), spent), hw.memory_gb()
                log.metrics(step=step, lr=lr, grad_norm=grad_norm, updates=len(sums), tokens=now.tokens, seconds=now.seconds, memory_gb=used,
                            peak_memory_gb=peak, skipped_steps=now.skipped, questions=now.asked,
                            epoch=now.asked / len(train), epoch_s=seconds * len(train) / cfg.prompts_per_step,
                            **{"training/global_step": step}, **f, **{f"{key}_s": value for key, value in spent.items()})
                log.say(f"step {step}/{cfg.max_steps} | reward {f['reward']:.3f} | pass@1 {f['pass_at_1']:.1%} | pass@{cfg.k_samples} "
                        f"{f[f'pass_at_{cfg.k_samples}']:.1%} | alike {f['zero_variance']:.0%} | entropy {f['entropy']:.3f} | "
                        f"{f['completion_tokens']:.0f} tokens | grad norm {grad_norm:.3f} | {seconds:.1f} s: rollout {spent['rollout']:.1f}, "
                        f"update {spent['update']:.1f} | ETA {duration((cfg.max_steps - step) * now.seconds / step)}"
                        + (f" | {f['errors']} errors" if f["errors"] else "")
                        + ("" if sums else " | nothing to learn: in each group all samples fare alike"))
            if stopping:                                  # first of all: whoever asked may not wait for an evaluation
                state.save()
            wrong, new_best = None, False
            if valid and (step % cfg.eval_interval == 0 or last):
                try:
                    wrong = examine()
                except BrokenReward:
                    raise
                except ValueError as e:      # weights that no longer give finite logits: not saved, the next rollout goes back
                    log.say(f"step {step}: the evaluation failed ({e})")
                    if last:
                        return 1
                    continue
                new_best = distributed.on_main(lambda: wrong < checkpoint.best_loss(cfg.out_dir, step - 1))
            if step % cfg.save_interval == 0 or last or new_best or stopping and wrong is not None:
                state.save(wrong)
            if stopping:
                how = f"--init_from={cfg.out_dir}" if cfg.save_only_model else f"--init_from=resume --out_dir={cfg.out_dir}"
                log.say(f"Stopped as asked after step {step}, and saved. Go on with {how}")
                return stop.exit_code()
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
