"""Improve a model by reinforcement learning on verifiable rewards: Group Relative Policy Optimization (GRPO,
Shao et al. 2024).

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion
    python grpo.py config/grpo.py --init_from=out/rft --task=my_reward.py --dataset=questions.jsonl
    python grpo.py --init_from=resume --out_dir=out/grpo
    torchrun --nproc_per_node=2 grpo.py config/grpo_4090x2.py --init_from=...

A step: the model answers some questions k_samples times each, a verifier grades the answers, and what did
better than the mean of its group becomes likelier, what did worse less so. Shapes: B sequences, T positions,
G groups, K samples a group. Knobs, as --key=value:
"""
import dataclasses
import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from runtime.usage import first_line

first_line()                             # --help, or a word, before the seconds that importing PyTorch takes

import torch

import hf
import tasks
from engine import Engine, Sampling, slots_that_fit
from experimental.pcgrad import PCGrad
from model import IGNORE, blank
from rollouts.accuracy import accuracy, by_domain
from rollouts.batch import WorstCase, logprobs_of, micro_batches, padded, round_up
from rollouts.metrics import facts, flops, log_evaluation, log_step, start_up, step_metrics, vitals
from rollouts.pipeline import Pipeline, ask, few_shot_of, requests_of, stop_strings_of, zero_variance
from rollouts.questions import QuestionStream, read_questions, task_errors, unseen_questions
from rollouts.reference import Reference
from runtime import config, distributed, guard, hardware, memory, optim, parallel as sharding
from runtime.config import BadInput
from runtime.log import check_installed
from runtime.run import Run, adapt, check_task, check_training, claim
from tasks._pool import BrokenReward, Pool, load
from text.prompts import context_of


@dataclass
class Config:
    # the run
    out_dir: str = "out/grpo"                # run folder: config, weights, metrics.jsonl, samples.txt,
                                             # training.log
    init_from: str = "out/rft"               # run folder, Hugging Face folder or hub name; resume: the run in
                                             # out_dir
    resume: Literal["auto"] | None = None    # auto: go on with the run in out_dir if there is one, else begin as
                                             # the flags say
    overwrite: bool = False                  # replace the run that out_dir holds
    # questions and their rewards
    task: str | dict | None = None           # NAME or NAME:ARGUMENT of tasks/, or a file.py of yours with
                                             # reward(question, completion); several: NAME@WEIGHT+NAME, in a
                                             # config file {NAME: WEIGHT}; None: unit_conversion
    mixing: Literal["mixed", "round_robin"] = "mixed"        # several tasks: all in each step, or one a step
    dataset: str | None = None               # .jsonl, {"prompt": ..., "answer": ...} a line, instead of the
                                             # task's questions
    num_questions: int | None = None         # to train on; None: all there are, or as the task finds right;
                                             # of a dataset at most
    few_shot: int | None = None              # worked examples before each; None: of a run folder as many as
                                             # it was trained with, of a model of Hugging Face's 4; with a
                                             # dataset 0
    # rollout. There is no top_k or top_p: the loss is about the distribution that was sampled from
    prompts_per_step: int = 32               # all ranks together
    k_samples: int = 8                       # of each prompt: its group
    temperature: float = 1.0
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None     # longer ones are left out; None: those that leave no room for an
                                             # answer
    overlong: Literal["keep", "mask", "penalty"] = "keep"       # samples that reach max_new_tokens: keep
                                             # their reward; don't train on them; subtract up to 1 over the
                                             # last overlong_tokens (DAPO's soft punishment)
    overlong_tokens: int = 32
    skip_solved: int = 0                     # epochs for which a question rests after all its samples were
                                             # right; they teach nothing
    dynamic_sampling: bool = False           # other questions in place of those whose samples all have the
                                             # same reward (DAPO, Yu et al. 2025)
    max_rounds: int = 4                      # in which it looks for them
    # loss
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo"] = "dapo"      # what a token's loss is divided by,
                                             # see `normaliser`; cispo: also how its ratio is clipped
    advantage_scale: Literal["none", "group"] = "none"          # group: divided by the standard deviation in
                                             # the group, as in GRPO
    clip_low: float = 0.2                    # the ratio of probabilities counts down to 1 - clip_low (not of
                                             # cispo)
    clip_high: float = 0.28                  # and up to 1 + clip_high (DAPO; PPO has 0.2; cispo takes about
                                             # 4)
    beta: float = 0.0                        # weight of the KL divergence from the model that training began
                                             # with, k3 (Schulman 2020) times the ratio, without which its
                                             # gradient is biased; 0: that model is not loaded
    inner_epochs: int = 1                    # passes over a step's samples
    mini_batches: int = 1                    # optimizer steps a pass
    surgery: Literal["none", "pcgrad"] = "none"       # several tasks: what their gradients undo of each other
                                             # is projected out (PCGrad, Yu et al. 2020)
    surgery_buffers: Literal["device", "bf16", "cpu"] = "device"       # where each task's gradient waits: in
                                             # fp32 or bf16 on the device, or in the computer's memory
    tis_cap: float = 0.0                     # e.g. 2: truncated importance sampling (Yao et al. 2025) where
                                             # the engine's log-probabilities are not the trainer's; 0: off
    # optimizer
    max_steps: int = 100                     # rollouts, each with inner_epochs * mini_batches optimizer steps
    learning_rate: float = 3e-4              # of a model of a million parameters; 1e-6 is usual for a few
                                             # hundred million
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "constant"
    warmup_steps: int = 5
    cooldown: float = 0.4                    # wsd: the share of steps in which the rate falls
    min_lr: float = 0.0                      # where the schedule ends
    weight_decay: float = 0.0                # on matrices
    beta1: float = 0.9
    beta2: float = 0.95
    muon_momentum: float = 0.9
    grad_clip: float = 1.0                   # norm of the whole gradient; 0: off
    # adapters (LoRA)
    lora_rank: int = 0                       # train adapters of that rank; the reference is the model without
                                             # them. 0: off
    lora_alpha: float | None = None          # their scale is alpha / rank; None: 2 lora_rank
    lora_linears: str = "qkv,out,up,gate,down"       # which linear layers of a block get one
    # machine
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; weights are fp32. The
                                             # engine samples in bf16 or fp32
    tokens_per_micro_batch: int = 16384      # positions of a forward pass, see batch.token_cost; less while
                                             # they don't fit the memory
    compile: bool = False                    # torch.compile of the update
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass: less memory, a second
                                             # forward
    offload_reference: bool = False          # the KL term's model waits in the CPU's memory while it is not
                                             # needed
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"       # of several ranks each has all weights, or a share
                                             # of every tensor, of all ranks' (fsdp) or of a node's (hybrid),
                                             # and a copy in sampling's dtype
    sum_locally: bool = False                # with fsdp, hybrid: exchange the gradients once an optimizer step, not at
                                             # each micro-step; then each rank has all of them
    deterministic: bool = False              # refuse kernels whose result varies from run to run
    seed: int = 0
    # evaluation, log, checkpoints
    eval_interval: int = 50                  # steps; also before the first and after the last; 0: never
    eval_questions: int = 200                # of split valid, answered greedily; of a dataset at most a
                                             # tenth, which is not trained on
    shown_questions: int = 4                 # of them whose answers samples.txt shows
    log_interval: int = 1                    # steps
    save_interval: int = 100                 # steps; also after the last, at a new best, and when asked to
                                             # stop
    keep_last: int = 2                       # checkpoints, beside the best
    save_only_model: bool = False            # weights alone: a third of the size, no resume
    diagnose: bool = True                    # say what is wrong with the run (docs/diagnosis.md)
    tensorboard: bool = False                # curves in out_dir/tensorboard too
    wandb: bool = False                      # and at Weights & Biases (project: WANDB_PROJECT, or nanorft)
    # verifiers
    reward_workers: int | None = None        # processes that verify, a rank; None: one a core, at most 8 in
                                             # all
    reward_pool: Literal["process", "thread", "serial"] = "process"       # only a process can be stopped if
                                             # it hangs
    timeout: float = 10.0                    # seconds after which a verifier is killed and its sample is an
                                             # error: it has no reward and is not trained on
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    # speed: bench.py --ladder measures what each of these buys
    slots: int | None = None                 # samples in flight a rank; None: all of a step's, up to 512, if
                                             # they fit
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    cuda_graphs: bool = True                 # in sampling
    tf32: bool = True                        # fp32 products on tensor cores
    fused_adamw: bool = True
    keep_memory: bool = True                 # on a CPU, freed tensors' memory stays in the process

    @property
    def batch_size(self):
        """What runtime.run calls it: what a micro-batch may hold."""
        return self.tokens_per_micro_batch

    def flags_for(self, micro_batch):
        """Return the flags for the same step in micro-batches of so many tokens."""
        return f"--tokens_per_micro_batch={micro_batch}"


LORA = ["lora_rank", "lora_alpha", "lora_linears"]


def check(cfg):
    if cfg.dataset and cfg.task is None:
        raise BadInput("--dataset needs the file that grades its answers: --task=my_reward.py.")
    cfg.task = "unit_conversion" if cfg.task is None else tasks.spec_of(cfg.task)
    config.at_least(cfg, 1, "prompts_per_step k_samples max_prompt_tokens max_new_tokens max_rounds slots "
                            "inner_epochs mini_batches overlong_tokens max_steps tokens_per_micro_batch "
                            "eval_questions log_interval save_interval keep_last")
    config.at_least(cfg, 0, "seed clip_low clip_high beta tis_cap learning_rate min_lr warmup_steps cooldown "
                            "weight_decay beta1 beta2 muon_momentum grad_clip lora_rank eval_interval "
                            "shown_questions skip_solved")
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
        raise BadInput(f"{cfg.prompts_per_step} prompts a step can't be shared evenly by {world} ranks with "
                       f"{cfg.mini_batches} mini-batches: change --prompts_per_step.")
    if cfg.loss_type == "cispo" and cfg.clip_low != Config.clip_low:
        raise BadInput("--clip_low has no effect with --loss_type=cispo, which clips the ratio from above alone: "
                       "leave it out.")
    if cfg.overlong == "penalty" and cfg.overlong_tokens > cfg.max_new_tokens:
        raise BadInput(f"--overlong_tokens={cfg.overlong_tokens} is more than "
                       f"--max_new_tokens={cfg.max_new_tokens}: lower it.")
    if cfg.offload_reference and cfg.parallel != "ddp":
        raise BadInput("--offload_reference moves a whole model, and with --parallel each rank has a share of "
                       "it: leave one of them out.")
    if cfg.surgery != "none" and cfg.mixing == "round_robin":
        raise BadInput("--surgery compares the gradients of a step's tasks, and with --mixing=round_robin a step "
                       "has one: leave one of them out.")
    if cfg.init_from == "scratch":
        raise BadInput("A model that knows nothing gets no reward to learn from: name one with --init_from=.")


# --- the objective ---

def advantages(rewards, scale="none"):
    """Return the difference of each reward to the mean of its group, float64 [G, K], from rewards [G, K]; exactly
    0 in a group of equal rewards. NaN is a completion that could not be graded: it has no part in the mean, and
    the advantage 0. scale group: in standard deviations (of the K samples, without Bessel's correction), as in
    GRPO, which weighs easy and hard questions more (Dr. GRPO, Liu et al. 2025)."""
    rewards = rewards.double()
    result = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        result = result / (result.square().nanmean(1, keepdim=True).sqrt() + 1e-4)
    first = rewards.nan_to_num(-math.inf).amax(1, keepdim=True)
    equal = (rewards == first) | rewards.isnan()             # then the mean is off by its rounding
    return result.masked_fill(equal.all(1, keepdim=True), 0.0).nan_to_num(0.0)


def normaliser(loss_type, tokens, sequences, max_new_tokens):
    """Return what the losses of an optimizer step, all micro-batches and ranks, are divided by: dapo and cispo
    the number of their tokens, so that each counts alike; grpo the number of sequences, each of which is a
    mean over its tokens; dr_grpo a constant a sequence."""
    return {"dapo": tokens, "cispo": tokens, "grpo": sequences,
            "dr_grpo": sequences * max_new_tokens}[loss_type]


def grpo_loss(logp, old_logp, ref_logp, advantage, mask, divisor=1.0, clip_low=0.2, clip_high=0.28, beta=0.0,
              loss_type="dapo", sampled_logp=None, tis_cap=0.0):
    """Compute the clipped objective (PPO, Schulman et al. 2017; with cispo that of MiniMax-M1, Chen et al. 2025,
    in which a clipped token keeps its gradient), negated, summed over a micro-batch and divided by `divisor`.

    logp [B, T]: of the sampled tokens under the model that is trained, with a gradient; column t is a
    completion's t-th token. old_logp: before this step, by the engine when they were sampled, or with tis_cap
    by the trainer; sampled_logp: then the engine's. ref_logp: under the reference, not looked at without
    beta. advantage [B]. mask [B, T]: which tokens are trained on; what stands elsewhere, NaN and infinity
    too, has no effect. divisor: see `normaliser`. All in fp32, nats. Returns (loss [], {sums over tokens: kl
    to the reference, kl_old to old_logp (both k3), clipped}).
    """
    mask = mask.bool()
    advantage = advantage.float()[:, None]
    log_ratio = masked_difference(logp, old_logp, mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    active = clipped * advantage < ratio * advantage
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if loss_type == "cispo":
        weight = ratio.detach().clamp(max=1 + clip_high)
        active = weight < ratio
        loss = -weight * advantage * torch.where(mask, logp.float(), 0.0)
    if tis_cap:
        loss = loss * masked_difference(old_logp, sampled_logp, mask).exp().clamp(max=tis_cap)
    kl = torch.zeros_like(ratio)
    if beta:
        toward = masked_difference(ref_logp, logp, mask)
        kl = toward.exp() - toward - 1
        loss = loss + beta * ratio * kl
    loss = torch.where(mask, loss, 0.0).sum(1)
    if loss_type == "grpo":
        loss = loss / mask.sum(1).clamp(min=1)
    with torch.no_grad():
        clipped = torch.where(mask, active, False).sum()
        stats = {"kl": kl.sum(), "kl_old": (ratio - 1 - log_ratio).sum(), "clipped": clipped}
    return loss.sum() / divisor, stats


def masked_difference(a, b, mask):
    """Return a - b in fp32, masked before exp and within what exp can hold: 0 * inf would be a NaN
    gradient."""
    return torch.where(mask, a.float() - b.float(), 0.0).clamp(-20, 20)


# --- questions ---

def open_questions(cfg, task):
    """Return (questions to train on, questions for validation, what is said of those that were dropped)."""
    if cfg.dataset:
        train, valid = read_questions(cfg.dataset, cfg.eval_questions)
        return train[:cfg.num_questions], valid if cfg.eval_interval else [], ""
    train, dropped = unseen_questions(task, "train", cfg.num_questions, cfg.seed)
    valid = task.questions("valid")[:cfg.eval_questions] if cfg.eval_interval else []
    return train, valid, f" ({dropped} that stand in the test split dropped)" if dropped else ""


def with_requests(cfg, tokenizer, task, questions, num_samples, positions):
    """Return [(question, Request)] of those whose prompts leave room for an answer, and are not longer than
    asked for."""
    longest = min(positions - 1, cfg.max_prompt_tokens or positions)
    requests = requests_of(tokenizer, task, questions, num_samples, cfg.max_new_tokens, cfg.few_shot)
    pairs = []
    for question, request in zip(questions, requests):
        if len(request.ids) <= longest:
            pairs.append((question, dataclasses.replace(request, key=len(pairs))))
    return pairs


def check_domains(stream, asked, positions):
    """BadInput for a task that is left without a question to train on, or with one, or for fewer questions
    than a step asks. asked: {name of a task: its questions before those that are too long were left out}."""
    for domain, numbers in stream.numbers.items():
        if not asked[domain]:
            raise BadInput(f"There is no question of {domain} to train on: raise --num_questions, or give another "
                           "--dataset= if there is one, or leave that task out.")
        if len(numbers) < min(2, asked[domain]):
            raise BadInput(f"Every prompt of {domain}{' but one' if numbers else ''} is longer than "
                           f"--max_prompt_tokens, or fills the {positions} positions of the model: lower "
                           "--few_shot, or choose another task or model.")
    if len(stream) < stream.cfg.prompts_per_step <= asked.total():
        raise BadInput(f"Only {len(stream)} of {asked.total()} prompts fit --max_prompt_tokens and the "
                       f"{positions} positions of the model, and a step asks {stream.cfg.prompts_per_step}: "
                       "lower --few_shot or --prompts_per_step.")


# --- a step ---

def ask_questions(cfg, run, pipeline, stream, positions):
    """Sample answers to the questions at these positions of the stream. Returns Completions."""
    questions = {}
    requests = []
    for position in positions:
        question, request = stream.pairs[stream.number(position)]
        questions[position] = question
        requests.append(dataclasses.replace(request, key=position))
    completions = list(pipeline.sample(questions, requests))
    run.lap("rollout")
    return completions


def add_logprobs(cfg, run, completions, reference):
    """Compute what the objective compares with beside the engine's log-probabilities. Of a sharded model the
    ranks do so together."""
    if reference:
        reference.add_logprobs(completions, run.state.micro_batch)
    if cfg.tis_cap:
        tokens = run.state.micro_batch
        for c, logprobs in logprobs_of(run.model, run.hardware, completions, tokens, cfg.temperature):
            c.trainer_logprobs = logprobs
    run.lap("reference")


def grade(cfg, run, pipeline, completions, positions):
    """Wait for the verifiers, which began when the first answers were there. Returns {position: its group, K
    Completions with their rewards}."""
    pipeline.graded(wait=True)
    groups = {position: [None] * cfg.k_samples for position in positions}
    for c in completions:
        c.reward = math.nan if c.grade.error else c.grade.score - penalty(cfg, len(c.ids))
        c.trained = not c.grade.error and (c.finished or cfg.overlong != "mask")
        groups[c.key][c.index] = c
    run.lap("reward")
    return groups


def penalty(cfg, length):
    """Return DAPO's soft punishment of a completion of so many tokens: from 0 to 1 over the last
    overlong_tokens."""
    if cfg.overlong != "penalty":
        return 0.0
    return max(0.0, (length - (cfg.max_new_tokens - cfg.overlong_tokens)) / cfg.overlong_tokens)


def sample_groups(cfg, run, pipeline, stream, reference):
    """Return (this rank's groups to train on, all that it sampled, bytes that sampling had to read). With
    dynamic sampling in rounds, until each rank has its share of groups whose rewards differ, or max_rounds
    are over. What one rank raises, all raise: FloatingPointError, BrokenReward."""
    share = cfg.prompts_per_step // distributed.world_size()
    groups = []
    sampled = []
    bytes_read = 0
    for i in range(cfg.max_rounds if cfg.dynamic_sampling else 1):
        # Each rank takes a piece, so that mini-batches don't depend on how many there are.
        mine = stream.next(again=i > 0)[distributed.rank() * share:][:share]
        completions = distributed.together(lambda: ask_questions(cfg, run, pipeline, stream, mine),
                                           FloatingPointError, BrokenReward)
        add_logprobs(cfg, run, completions, reference)
        answered = distributed.together(lambda: grade(cfg, run, pipeline, completions, mine), BrokenReward)
        sampled += answered.values()
        groups += [g for g in answered.values() if not (cfg.dynamic_sampling and zero_variance(g))]
        lengths = [(len(c.prompt), len(c.ids)) for group in answered.values() for c in group]
        bytes_read += pipeline.engine.bytes_read(lengths)
        if cfg.skip_solved:
            stream.mark_solved(answered)
        if not distributed.any(len(groups) < share):
            break
    return groups[:share], sampled, bytes_read


def learn(cfg, run, model, groups, lr, surgery):
    """Take one optimizer step on groups of Completions, with the one normaliser. Returns this rank's sums of
    what it is judged by, and the norm of the gradient; None if there was nothing to learn on any rank: then
    no weight moves, nor any state of the optimizers."""
    trained = [c for group in groups for c in group if c.trained]
    num_tokens, num_sequences, num_signals = distributed.sum([
        sum(len(c.ids) for c in trained), len(trained), sum(c.advantage != 0 for c in trained)])
    if not num_sequences or not (num_signals or cfg.beta):
        return None
    divisor = normaliser(cfg.loss_type, num_tokens, num_sequences, cfg.max_new_tokens)
    # Without advantage a completion has no gradient, so it need not be computed. A rank that has none takes
    # part with an empty micro-batch: others wait for its gradients.
    learnt = [c for c in trained if c.advantage or cfg.beta]
    stats = Counter(flops=flops(run.model, learnt))
    largest_difference = 0.0
    multiple = run.hardware.length_multiple
    parts = [micro_batches(part, run.state.micro_batch, multiple) or [[]] for part in surgery.split(learnt)]
    for part in surgery.micro_steps(model, parts):
        batch = padded(part, multiple).to(run.hardware.device)
        mask = batch.y != IGNORE
        with run.hardware.autocast():
            logprobs, entropy = model.token_logprobs(
                batch.x, batch.y, cfg.temperature, batch.prefixes, batch.trained)
        old_logprobs = batch.trainer_logprobs if cfg.tis_cap else batch.sampled_logprobs
        loss, figures = grpo_loss(
            logprobs, old_logprobs, batch.reference_logprobs, batch.advantages, mask, divisor,
            clip_low=cfg.clip_low, clip_high=cfg.clip_high, beta=cfg.beta, loss_type=cfg.loss_type,
            sampled_logp=batch.sampled_logprobs, tis_cap=cfg.tis_cap)
        run.scaler.scale(loss).backward()

        difference = torch.where(mask, logprobs.detach() - batch.sampled_logprobs, 0.0).abs()
        largest_difference = difference.max().clamp(min=largest_difference)
        stats.update(figures)
        stats.update(loss=loss.detach(), entropy=entropy.sum())
        stats.update(difference=difference.sum(), tokens=mask.sum())
    rollouts = [vars(c) | {"grade": c.grade.score} for group in groups for c in group]
    grad_norm = run.optimizer_step(lr, rollouts=rollouts)
    figures = {name: float(value) for name, value in stats.items()}
    figures |= {"largest_difference": float(largest_difference), "grad_norm": grad_norm}
    return figures | surgery.figures


def train(cfg, run, model, pipeline, stream, valid, reference, surgery):
    """Train until the last step, or until the run should stop. Returns the exit code."""
    if valid and run.step == 0:
        with task_errors():
            evaluate(cfg, run, pipeline, valid)
    if valid and run.state.evaluation_due:                 # the run was stopped before it
        evaluate(cfg, run, pipeline, valid)
        run.save()
    while run.step < run.num_steps and not run.should_stop():
        run.start_step()
        run.reset_timings()

        # 1. Ask some questions, k_samples times each.
        # 2. Grade the answers, while others are still being written.
        groups, sampled, bytes_read = sample_groups(cfg, run, pipeline, stream, reference)

        # 3. Compare each answer with those to the same question.
        rewards = torch.tensor([[c.reward for c in group] for group in groups]).view(-1, cfg.k_samples)
        for group, row in zip(groups, advantages(rewards, cfg.advantage_scale).tolist()):
            for c, advantage in zip(group, row):
                c.advantage = advantage

        # 4. Learn from the difference.
        lr = optim.lr_at(run.step, cfg.max_steps, cfg.learning_rate, cfg.min_lr, cfg.warmup_steps,
                         cfg.lr_schedule, cfg.cooldown)
        lr *= run.state.lr_factor
        # Only here: in sampling, CUDA's running sums would be refused.
        torch.use_deterministic_algorithms(cfg.deterministic)
        updates = []
        for i in range(cfg.inner_epochs * cfg.mini_batches):
            update = learn(cfg, run, model, groups[i % cfg.mini_batches::cfg.mini_batches], lr, surgery)
            if update:
                updates.append(update)
        torch.use_deterministic_algorithms(False)
        run.lap("update")

        # 5. Hand the weights to the engine.
        pipeline.engine.load(run.model)
        stream.state.slots = pipeline.engine.slots
        (num_tokens,) = distributed.sum([sum(len(c.prompt) + len(c.ids) for group in sampled for c in group)])
        run.finish_step(int(num_tokens))
        run.lap("sync", wait=True)           # the weights that the engine takes over are this step's time

        if run.due(cfg.log_interval) or run.step == 1:
            metrics = step_metrics(cfg, run, stream, sampled, updates, bytes_read)
            metrics |= vitals(cfg, run, pipeline, sampled, metrics)
            log_step(cfg, run, stream, lr, metrics, updates)
        if run.stopping:
            run.save()                       # at once: whoever asked may not wait for an evaluation
        if valid and run.state.evaluation_due:
            evaluate(cfg, run, pipeline, valid)
        run.save_if_due()
    return run.end()


def evaluate(cfg, run, pipeline, valid):
    """Answer the questions that are held out, greedily, and log how that went. Answers to the first few are
    added to samples.txt."""
    questions = [question for question, _ in valid]
    requests = [request for _, request in valid]
    greedy = dataclasses.replace(pipeline.engine.sampling, temperature=0.0)
    grades, texts = ask(pipeline, questions, requests, sampling=greedy, shown=cfg.shown_questions)
    result = accuracy(grades)
    domains = by_domain(pipeline.task, questions, grades)
    rewards = []
    for rows in domains.values():
        rewards.append(fmean([grade.score for row in rows for grade in row if not grade.error] or [0.0]))
    result["reward"] = fmean(rewards)
    log_evaluation(run, result, domains, questions, grades, texts)
    # Of steps that do as well, the last is best.
    run.record_validation(1 - result["reward"] - 1e-9 * run.step)


# --- the model, and what fits the memory ---

def build_model(cfg, hw, shape, found, resuming, device):
    """Return the GPT on a device with the weights of what was found; of a run that is resumed they come
    later, and on the device meta there are none."""
    model = blank(shape, hw.attention, cfg.gradient_checkpointing, device=device)
    if not resuming and device.type != "meta":
        found.fill(model)
    adapt(cfg, model, device, resuming)
    return model


def fit_update(cfg, run, worst, context):
    """Return the model as the update calls it, with micro-batches that fit the memory."""
    hw = run.hardware

    def attempt(tokens):
        model = distributed.TrainedModel(run.model, hw.compile, cfg.compile_mode, dynamic=True)
        rows = worst.rows(tokens, context)
        inputs = worst.inputs(tokens, cfg.temperature, hw.device)
        return model, memory.rehearse(model, hw, rows, context, 2, run.bytes_to_come(), inputs)

    def advice():
        return memory.advice(run.model, hw, context, run.bytes_to_come(),
                             "lower --max_new_tokens, --max_prompt_tokens or --few_shot")
    return run.fit(attempt, worst.smaller, advice)


def make_engine(cfg, run, stream, worst, context, tokenizer, task):
    """Return the Engine, with as many samples in flight as fit beside the update. That number is kept
    with the checkpoints, since it decides the last bits."""
    hw = run.hardware
    dtype = hw.sampling_dtype
    rows = worst.rows(run.state.micro_batch, context)
    needed = sum(memory.parts(run.model, hw, rows, context, run.bytes_to_come()).values())
    needed += dtype.itemsize * run.model.n_params()
    share = cfg.prompts_per_step // distributed.world_size() * cfg.k_samples
    most = slots_that_fit(run.model.config, context, dtype, hw.device, needed)
    slots = cfg.slots or min(share, most, stream.state.slots or share)
    sampling = Sampling(cfg.temperature, stop=tokenizer.stop, stop_strings=stop_strings_of(task))
    with task_errors():
        engine = Engine(run.model, slots, context, sampling, cfg.seed, dtype, cfg.deterministic,
                        tokenizer.decode, cuda_graphs=cfg.cuda_graphs)
    return engine


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, frozen=LORA, claim=claim)
    check(cfg)
    distributed.on_main(lambda: check_task(cfg, argv))
    check_installed(cfg.tensorboard, cfg.wandb)
    resuming = cfg.init_from == "resume"
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic,
                        cfg.keep_memory)

    # The model, and what it is asked.
    found = distributed.on_main(lambda: hf.to_resume(cfg.out_dir) if resuming else hf.find(cfg.init_from))
    tokenizer = found.tokenizer(None if resuming else cfg.tokenizer)
    cfg.tokenizer = tokenizer.describe()["name"]
    cfg.few_shot = 0 if cfg.few_shot is None and cfg.dataset else few_shot_of(cfg, found)
    positions = found.config.block_size
    with task_errors():
        task = load(cfg.task)
        questions, held_out, dropped = distributed.on_main(lambda: open_questions(cfg, task))
        pairs = with_requests(cfg, tokenizer, task, questions, cfg.k_samples, positions)
        stream = QuestionStream(cfg, pairs, task)
        valid = with_requests(cfg, tokenizer, task, held_out, 1, positions)
    check_domains(stream, Counter(task.of(question).name for question in questions), positions)
    longest = max(len(request.ids) for _, request in stream.pairs + valid)
    context = context_of(longest, cfg.max_new_tokens, positions)
    about = f"{len(stream):,} questions of {cfg.dataset or cfg.task}{dropped}, {len(valid)} held out"
    if len(stream) < len(questions):
        about += f"; {len(questions) - len(stream)} too long left out"

    torch.manual_seed(cfg.seed)
    shape = dataclasses.replace(found.config, dropout=0.0)     # the ratio is about the model that sampled
    memory.check_weights(shape, hw.device, sharding.ranks_that_share(cfg.parallel))
    model = sharding.build(partial(build_model, cfg, hw, shape, found, resuming), hw, cfg.parallel,
                           cfg.sum_locally, cfg.compile_mode)
    betas = (cfg.beta1, cfg.beta2)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, betas, cfg.fused_adamw,
                             cfg.muon_momentum, hw)

    asked = json.dumps([(question, request.ids) for question, request in stream.pairs])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    run = Run(cfg, hw, model, optimizers, cfg.tokens_per_micro_batch, cfg.max_steps, digest, stream.state)
    if resuming:
        run.restore(found.step)
        if run.state.data != digest:
            raise BadInput(f"The questions have changed since the run in {cfg.out_dir} was stopped, so it "
                           "can't go on exactly: put them back, or start a new run with "
                           f"--init_from={cfg.out_dir} and another --out_dir=.")
    with task_errors():                      # before a run folder is touched
        pool = Pool(cfg.task, cfg.reward_workers, cfg.timeout, cfg.reward_pool)
    surgery = PCGrad(cfg, run, stream)
    run.other_bytes = surgery.bytes()
    with pool, run.open(tokenizer, resuming, keep_base=cfg.beta > 0):
        torch.use_deterministic_algorithms(False)
        reference = Reference(cfg, hw, model) if cfg.beta else None
        most = cfg.prompts_per_step // distributed.world_size() * cfg.k_samples // cfg.mini_batches
        longest_answer = min(cfg.max_new_tokens, context - 1)
        longest, longest_answer = (round_up(n, hw.length_multiple) for n in (longest, longest_answer))
        worst = WorstCase(longest, longest_answer, cfg.k_samples, most)
        wrapped = fit_update(cfg, run, worst, context)
        engine = make_engine(cfg, run, stream, worst, context, tokenizer, task)
        pipeline = Pipeline(engine, pool, tokenizer, task)
        run.log.say(start_up(cfg, run, stream, pipeline, about))
        settings = hw.settings | {"ranks": distributed.world_size(), "engine": f"{engine.dtype}",
                                  "reward_pool": pool.kind, "cuda_graphs": engine.cuda_graphs,
                                  "attention": hw.attention_name(run.model.config)}
        run.log.metrics(step=run.step, config=dataclasses.asdict(cfg), settings=settings,
                        facts=facts(run, found, pipeline))
        return train(cfg, run, wrapped, pipeline, stream, valid, reference, surgery)


if __name__ == "__main__":
    guard.run(main)
