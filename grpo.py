"""Train a model with reinforcement learning on verifiable rewards: Group Relative Policy Optimization (GRPO,
Shao et al. 2024).

    python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion
    python grpo.py config/grpo.py --init_from=out/rft --task=my_reward.py --dataset=questions.jsonl
    python grpo.py config/grpo.py --init_from=out/rft --out_dir=out/grpo --resume=auto
    torchrun --nproc_per_node=2 grpo.py config/grpo_4090x2.py --init_from=...

In each step the model samples k_samples completions for each question and a verifier grades them. Completions
that score above their group's mean become more likely, those below it less likely. Shapes: B sequences, T
positions, G groups, K completions per group.
"""
import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Literal

from runtime.usage import first_line

first_line()                             # answers --help before the slow import of PyTorch

import torch

import doctor
import experimental
import hub
import tasks
from engine import Engine, Sampling
from model import IGNORE, blank
from rollouts.accuracy import accuracy, by_domain, macro, mean_score
from rollouts.batch import MICRO_BATCH, MICRO_BATCH_ON_CPU, logprobs_of, micro_batches, padded
from rollouts.episodes import reply_tokens
from rollouts.fit import fit_update, samples_per_rank, slots_beside_update, worst_case
from rollouts.metrics import Update, facts, flops, log_evaluation, log_step, start_up
from rollouts.pipeline import Pipeline, ask, few_shot_of, stop_strings_of, with_requests, zero_variance
from rollouts.questions import QuestionStream, check_domains, open_questions, task_errors
from rollouts.records import Recorder
from runtime import config, distributed, guard, hardware, memory, parallel as sharding
from runtime.checkpoint import claim
from runtime.config import BadInput, Bounds, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt
from runtime.options import LORA, RunOptions, check_needs, check_training
from runtime.run import start
from runtime.state import Progress, adapt
from tasks._pool import BrokenReward, Pool, load
from text.prompts import context_of
from text.provenance import check_task, common_prompt, own_task


@dataclass
class Config(RunOptions):                    # runtime/options.py: --resume, adapters, machine, checkpoints
    # the run
    out_dir: str = "out/grpo"                # run folder: config, weights, metrics.jsonl, rollouts/,
                                             # training.log
    init_from: str = "out/rft"               # run folder, Hugging Face folder, GGUF file or hub name; resume:
                                             # the run in out_dir, see --resume
    # questions and their rewards
    task: str | dict | None = None           # NAME or NAME:ARGUMENT of tasks/, or your own file.py with
                                             # reward(question, completion); several: NAME@WEIGHT+NAME, in a
                                             # config file {NAME: WEIGHT}; None: unit_conversion
    mixing: Literal["mixed", "round_robin"] = "mixed"     # several tasks: mixed in each step, or one a step
    dataset: str | None = None               # the questions: a .jsonl of {"prompt": ..., "answer": ...}
    num_questions: Count | None = None       # training questions; None: the task's default, all of a dataset
    few_shot: Annotated[int, Bounds(0, 1000)] | None = None     # worked examples in each prompt; None: 0
                                             # with a dataset, a grpo.py run's own, 4 for a Hugging Face
                                             # model, else 0
    # rollout. There is no top_k or top_p: the loss needs the full distribution that was sampled from
    prompts_per_step: Count = 32             # questions in a step, all ranks together
    k_samples: Annotated[int, Bounds(2, 10**7)] = 8     # group size: completions per prompt
    temperature: Annotated[float, Bounds(0.01)] = 1.0     # of sampling
    max_new_tokens: PositiveInt = 128        # longest completion
    max_prompt_tokens: PositiveInt | None = None     # drop longer prompts; None: the model's context
    overlong: Literal["keep", "mask", "penalty"] = "keep"     # completions that reach max_new_tokens: keep
                                             # their reward, mask them in the loss, or subtract up to 1 over
                                             # the last overlong_tokens (DAPO's soft punishment)
    overlong_tokens: PositiveInt = 32        # tokens of --overlong=penalty
    skip_solved: NonNegativeInt = 0          # epochs to skip a question whose completions were all correct
    dynamic_sampling: bool = False           # replace groups with zero variance (DAPO, Yu et al. 2025)
    max_rounds: PositiveInt = 4              # rounds of dynamic sampling per step, at most
    # loss
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo"] = "dapo"      # sets the loss denominator, see
                                             # docs/rl.md; cispo also changes the clipping
    advantage_scale: Literal["none", "group"] = "none"     # group: advantage / standard deviation (GRPO)
    clip_low: Fraction = 0.2                 # clip the probability ratio below 1 - clip_low (not in cispo)
    clip_high: NonNegativeFloat = 0.28       # clip ratios above 1 + clip_high (DAPO; PPO: 0.2; cispo: 4)
    beta: NonNegativeFloat = 0.0             # weight of the KL divergence from the reference model: k3
                                             # (Schulman 2020) times the ratio, which makes its gradient
                                             # unbiased; 0: no reference model is loaded
    teacher: str | None = None               # the reference model, as --init_from names one, for distillation
                                             # on the model's own samples (Agarwal et al. 2023) with --beta=1;
                                             # None: the initial model
    distill: Literal["reverse", "forward"] = "reverse"     # with a teacher: the model's divergence from it on
                                             # sampled ids (reverse), or its divergence from the model over
                                             # all ids (forward)
    reward_weight: NonNegativeFloat = 1.0    # weight of the advantages; 0: the KL divergence alone trains
    inner_epochs: PositiveInt = 1            # passes over a step's completions
    mini_batches: PositiveInt = 1            # optimizer steps per pass
    surgery: Literal["none", "pcgrad"] = "none"       # PCGrad: project out the conflicting components of the
                                             # tasks' gradients (Yu et al. 2020)
    surgery_buffers: Literal["device", "bf16", "cpu"] = "device"  # PCGrad keeps each task's gradient in fp32
                                             # (device) or bf16 on the device, or in host memory (cpu)
    tis_cap: NonNegativeFloat = 0.0          # e.g. 2: truncated importance sampling (Yao et al. 2025), which
                                             # corrects for engine logprobs unlike the trainer's; 0: off
    # optimizer
    max_steps: PositiveInt = 100             # steps, each with inner_epochs * mini_batches optimizer steps
    learning_rate: NonNegativeFloat | None = None     # None: 3e-4 for a million parameters, less for more
                                             # (docs/training.md), 2e-4 with LoRA
    optimizer: Literal["adamw", "muon"] = "adamw"     # muon: of the matrices inside blocks; AdamW of the rest
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "constant"  # wsd: decay at the end
    warmup_steps: NonNegativeInt = 5         # steps in which the rate rises
    # machine
    tokens_per_micro_batch: PositiveInt | None = None     # positions of a micro-batch, see rollouts/batch.py;
                                             # halved until it fits in memory. None: 65536, on a CPU 2048
    compile: bool = False                    # torch.compile of the update
    offload_reference: bool = False          # keep the reference model in host memory between uses
    # evaluation, log, checkpoints
    eval_interval: NonNegativeInt = 50       # steps between evaluations; also at the start and end; 0: never
    eval_questions: Count = 200              # held-out questions, answered greedily: of split valid,
                                             # or at most a tenth of a dataset
    record: Literal["all", "none"] | PositiveInt = 500       # megabytes of completions in out_dir/rollouts
                                             # (the quickstart has 3), or all, or none
    log_interval: PositiveInt = 1            # steps between log lines
    # verifiers
    reward_workers: Annotated[int, Bounds(1, 256)] | None = None     # verifier processes per rank; None: one
                                             # per core, at most 8 a rank
    reward_pool: Literal["process", "thread", "serial"] = "process"  # of verifiers; a process can be killed
    timeout: Annotated[float, Bounds(0.01, 10**6)] = 10.0     # seconds until a verifier is killed; its
                                             # completion is an error and is not trained on
    tokenizer: str | None = None             # of a model without tokenizer.json: gpt2, bytes, or a folder
    # speed: bench.py --stage=... --ladder measures the gain of most
    slots: Annotated[int, Bounds(1, 2**16)] | None = None     # completions in flight per rank; None: all of a
                                             # step's, up to 512, if they fit
    cuda_graphs: bool = True                 # CUDA graphs in sampling

    # Not an option: learning_rate where that is None, see optim.default_learning_rate
    default_rates = (None, 3e-4, 2e-4)

    def flags_for(self, micro_batch):
        """Return the flags for the same step with this micro-batch."""
        return f"--tokens_per_micro_batch={micro_batch}"


# Values of loss_type that average over each sequence's tokens before they average over sequences
MEAN_PER_SEQUENCE = ("grpo",)


def check(cfg):
    if cfg.dataset and cfg.task is None:
        raise BadInput("--dataset needs a verifier for its answers: add --task=my_reward.py.")
    cfg.task = "unit_conversion" if cfg.task is None else tasks.spec_of(cfg.task)
    check_training(cfg)
    world = distributed.world_size()
    if cfg.prompts_per_step % (world * cfg.mini_batches):
        raise BadInput(f"{cfg.prompts_per_step} prompts per step can't be split evenly over {world} ranks "
                       f"with {cfg.mini_batches} mini-batches: change --prompts_per_step.")
    check_needs(cfg, {
        "--dynamic_sampling": (cfg.dynamic_sampling, ["max_rounds"]),
        "--overlong=penalty": (cfg.overlong == "penalty", ["overlong_tokens"]),
        "--beta=1": (cfg.beta, ["teacher"]),
        "--teacher": (cfg.teacher, ["distill"]),
        "--surgery": (cfg.surgery != "none", ["surgery_buffers"]),
    })
    if cfg.loss_type == "cispo" and cfg.clip_low != Config.clip_low:
        raise BadInput("--clip_low has no effect with --loss_type=cispo, which only clips from above: leave "
                       "it out.")
    if cfg.overlong == "penalty" and cfg.overlong_tokens > cfg.max_new_tokens:
        raise BadInput(f"--overlong_tokens={cfg.overlong_tokens} is more than "
                       f"--max_new_tokens={cfg.max_new_tokens}: lower it.")
    if cfg.offload_reference and cfg.parallel != "ddp":
        raise BadInput(f"--offload_reference can't move a model sharded by --parallel={cfg.parallel}: leave "
                       "one of them out.")
    if cfg.surgery != "none" and cfg.mixing == "round_robin":
        raise BadInput("--surgery needs several tasks per step, and --mixing=round_robin has one: leave one "
                       "of them out.")
    if cfg.distill == "forward" and (cfg.offload_reference or cfg.parallel != "ddp" or
                                     cfg.compile_mode in distributed.CUDA_GRAPHS):
        raise BadInput("--distill=forward computes the teacher within the update: leave out "
                       "--offload_reference, and use --parallel=ddp and --compile_mode=default.")
    if cfg.distill == "forward" and cfg.loss_type in MEAN_PER_SEQUENCE:
        raise BadInput(f"--distill=forward is a sum over tokens, and --loss_type={cfg.loss_type} a mean over "
                       "sequences: choose another loss.")
    if not (cfg.reward_weight or cfg.beta):
        raise BadInput("With --reward_weight=0 nothing is left to learn: give --beta.")
    if cfg.init_from == "scratch":
        raise BadInput("--init_from=scratch gets no reward to learn from: name a trained model.")


# --- the objective ---

def advantages(rewards, scale="none"):
    """Return each reward minus its group's mean, float64 [G, K], from rewards [G, K]; exactly 0 in a group
    with zero variance. NaN marks a completion without a grade, which is left out of the mean and gets 0.

    scale="group" divides by the group's standard deviation (over K, without Bessel's correction), as in GRPO;
    this gives easy and hard questions more weight (Dr. GRPO, Liu et al. 2025).
    """
    rewards = rewards.double()
    result = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        result = result / (result.square().nanmean(1, keepdim=True).sqrt() + 1e-4)
    first = rewards.nan_to_num(-math.inf).amax(1, keepdim=True)
    equal = (rewards == first) | rewards.isnan()             # whose mean may be rounded
    return result.masked_fill(equal.all(1, keepdim=True), 0.0).nan_to_num(0.0)


def loss_denominator(loss_type, tokens, sequences, max_new_tokens):
    """Return the divisor of an optimizer step's summed losses, over all micro-batches and ranks. dapo, cispo:
    the number of tokens. grpo: the number of sequences, each a mean over its tokens. dr_grpo: a constant per
    sequence."""
    if loss_type in MEAN_PER_SEQUENCE:
        return sequences
    return sequences * max_new_tokens if loss_type == "dr_grpo" else tokens


def grpo_loss(logp, old_logp, ref_logp, advantage, mask, cfg, denominator=1.0, sampled_logp=None):
    """Return (loss [], statistics summed over tokens): the negated clipped objective of a micro-batch (PPO,
    Schulman et al. 2017; cispo: MiniMax-M1, Chen et al. 2025, where clipped tokens keep their gradient),
    summed and divided by `denominator`.

    All are fp32 in nats, [B, T]; column t is the t-th token of a completion:
      logp          of the sampled tokens under the trained model, with gradient
      old_logp      before this step: the engine's, or with tis_cap the trainer's
      sampled_logp  the engine's, used with tis_cap
      ref_logp      the reference model's, used with beta
      mask          tokens to train on; other values have no effect, not even NaN and infinity
    advantage [B]. cfg: loss_type, clip_low, clip_high, beta, distill, tis_cap. Statistics: kl to the
    reference model, kl_old to old_logp (both k3), clipped.
    """
    mask = mask.bool()
    advantage = advantage.float()[:, None]
    log_ratio = masked_difference(logp, old_logp, mask)
    ratio = log_ratio.exp()
    if cfg.loss_type == "cispo":
        weight = ratio.detach().clamp(max=1 + cfg.clip_high)
        active = weight < ratio
        loss = -weight * advantage * torch.where(mask, logp.float(), 0.0)
    else:
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        active = clipped * advantage < ratio * advantage
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if cfg.tis_cap:
        loss = loss * masked_difference(old_logp, sampled_logp, mask).exp().clamp(max=cfg.tis_cap)
    kl = torch.zeros_like(ratio)
    if cfg.beta and cfg.distill == "reverse":
        toward = masked_difference(ref_logp, logp, mask)
        kl = toward.exp() - toward - 1
        loss = loss + cfg.beta * ratio * kl
    loss = torch.where(mask, loss, 0.0).sum(1)
    if cfg.loss_type in MEAN_PER_SEQUENCE:
        loss = loss / mask.sum(1).clamp(min=1)
    with torch.no_grad():
        clipped = torch.where(mask, active, False).sum()
        stats = {"kl": kl.sum(), "kl_old": (ratio - 1 - log_ratio).sum(), "clipped": clipped}
    return loss.sum() / denominator, stats


def masked_difference(a, b, mask):
    """Return a - b in fp32, masked and clamped before exp, since 0 * inf would make the gradient NaN."""
    return torch.where(mask, a.float() - b.float(), 0.0).clamp(-20, 20)


# --- a step ---

def sample_groups(cfg, run, pipeline, stream, reference):
    """Return (groups to train on, all sampled groups, bytes read by sampling), of this rank.

    Dynamic sampling repeats until each rank has its share of groups without zero variance, at most max_rounds
    times. FloatingPointError and BrokenReward on one rank are raised on all.
    """
    share = cfg.prompts_per_step // distributed.world_size()
    groups = []
    sampled = []
    bytes_read = 0
    for i in range(cfg.max_rounds if cfg.dynamic_sampling else 1):
        # A slice per rank, so that mini-batches don't depend on the number of ranks.
        mine = stream.next(again=i > 0)[distributed.rank() * share:][:share]
        completions = distributed.together(lambda: sample(run, pipeline, stream, mine),
                                           FloatingPointError, BrokenReward)
        # Logprobs are computed while verifiers work.
        tokens = run.state.micro_batch
        if reference and cfg.distill == "reverse":
            reference.add_logprobs(completions, tokens)
        if cfg.tis_cap:
            for c, logprobs in logprobs_of(run.model, run.hardware, completions, tokens, cfg.temperature):
                c.trainer_logprobs = logprobs
        run.end_phase("reference")
        distributed.together(lambda: pipeline.graded(wait=True), BrokenReward)
        run.end_phase("reward")
        answered = group_by_question(cfg, completions, mine)
        sampled += answered.values()
        groups += [g for g in answered.values() if not (cfg.dynamic_sampling and zero_variance(g))]
        lengths = [(c.n_context, c.n_sampled) for group in answered.values() for c in group]
        bytes_read += pipeline.engine.bytes_read(lengths)
        if cfg.skip_solved:
            stream.mark_solved(answered)
        if not distributed.on_any_rank(len(groups) < share):
            break
    return groups[:share], sampled, bytes_read


def sample(run, pipeline, stream, positions):
    """Return the Completions for these positions of the question stream."""
    questions = {}
    requests = []
    for position in positions:
        question, request = stream.pairs[stream.place(position).number]
        questions[position] = question
        requests.append(dataclasses.replace(request, key=position))
    completions = list(pipeline.sample(questions, requests))
    run.end_phase("rollout")
    return completions


def group_by_question(cfg, completions, positions):
    """Set the rewards of graded Completions and return {position: group of K Completions}."""
    groups = {position: [None] * cfg.k_samples for position in positions}
    for c in completions:
        length = c.n_sampled if c.finished else cfg.max_new_tokens     # cut off, perhaps by the context
        c.reward = math.nan if c.grade.error else c.grade.score - length_penalty(cfg, length)
        c.trained = not c.grade.error and (c.finished or cfg.overlong != "mask")
        groups[c.key][c.index] = c
    return groups


def length_penalty(cfg, length):
    """Return DAPO's soft overlong punishment for a completion of `length` tokens: 0 to 1 over the last
    overlong_tokens."""
    if cfg.overlong != "penalty":
        return 0.0
    return max(0.0, (length - (cfg.max_new_tokens - cfg.overlong_tokens)) / cfg.overlong_tokens)


def set_advantages(cfg, groups):
    """Set the advantage of each Completion from its group's rewards."""
    rewards = torch.tensor([[c.reward for c in group] for group in groups]).view(-1, cfg.k_samples)
    for group, row in zip(groups, advantages(rewards, cfg.advantage_scale).tolist()):
        for c, advantage in zip(group, row):
            c.advantage = cfg.reward_weight * advantage


def has_gradient(cfg, completion):
    """Tell whether a Completion has a gradient; others are not computed. A term of the loss that trains on an
    advantage of 0 too, as beta's does, must be named here."""
    return completion.trained and bool(completion.advantage or cfg.beta)


def learn(cfg, run, model, groups, lr, pcgrad, reference):
    """Take one optimizer step. Returns this rank's Update, or None if no completion on any rank has a
    gradient, which leaves weights and optimizers unchanged."""
    completions = [c for group in groups for c in group]
    trained = [c for c in completions if c.trained]
    learnable = [c for c in completions if has_gradient(cfg, c)]
    num_tokens, num_sequences, num_learnable = distributed.sum_over_ranks(
        [sum(c.n_sampled for c in trained), len(trained), len(learnable)])
    if not num_learnable:
        return None
    denominator = loss_denominator(cfg.loss_type, num_tokens, num_sequences, cfg.max_new_tokens)
    update = Update(flops(run.model, learnable))
    for batch in update_batches(run, model, learnable, pcgrad):
        mask = batch.y != IGNORE
        inputs = batch.x, batch.y, cfg.temperature, batch.prefixes, batch.target_index
        # Without rewards the forward divergence has all of the gradient.
        differentiated = cfg.reward_weight > 0 or cfg.distill == "reverse"
        with run.hardware.autocast(), torch.set_grad_enabled(differentiated):
            logprobs, entropy = model.token_logprobs(*inputs)
        old_logprobs = batch.trainer_logprobs if cfg.tis_cap else batch.sampled_logprobs
        loss, sums = grpo_loss(logprobs, old_logprobs, batch.reference_logprobs, batch.advantages, mask, cfg,
                               denominator, batch.sampled_logprobs)
        if cfg.distill == "forward":
            with run.hardware.autocast():
                sums["kl"], _ = model.divergence(reference.model, *inputs)
            loss = loss + cfg.beta * sums["kl"] / denominator
        run.scaler.scale(loss).backward()
        update.count(loss, entropy, logprobs - batch.sampled_logprobs, mask, sums)
    rollouts = [vars(c) | {"grade": c.grade.score} for c in completions]
    update.grad_norm = run.optimizer_step(lr, rollouts=rollouts)
    update.metrics = pcgrad.figures if pcgrad else {}
    return update


def update_batches(run, model, completions, pcgrad):
    """Yield the micro-batches of an optimizer step on Completions as padded Batches, with PCGrad by task."""
    multiple = run.hardware.length_multiple
    if pcgrad:
        parts = pcgrad.micro_steps(model, completions, run.state.micro_batch, multiple)
    else:
        parts = model.micro_steps(micro_batches(completions, run.state.micro_batch, multiple), empty=[])
    for part in parts:
        yield padded(part, multiple).to(run.hardware.device)


def train(cfg, run, model, pipeline, stream, valid, reference, pcgrad, recorder):
    """Train until the last step or a stop request. Returns the exit code."""
    validate = partial(evaluate, cfg, run, pipeline, valid, recorder) if valid else None
    if valid and cfg.init_from != "resume":
        with task_errors():
            validate()
    run.catch_up(validate)
    while run.step < run.num_steps and not run.should_stop():
        run.start_step()
        run.reset_timings()

        # 1. Sample k completions for each question; verifiers grade while others are still being sampled.
        groups, sampled, bytes_read = sample_groups(cfg, run, pipeline, stream, reference)

        # 2. The advantage of a completion: its reward minus the mean of its group.
        set_advantages(cfg, groups)

        # 3. Update the policy.
        lr = run.lr()
        updates = []
        for i in range(cfg.inner_epochs * cfg.mini_batches):
            mini_batch = groups[i % cfg.mini_batches::cfg.mini_batches]
            with run.hardware.deterministic_kernels():
                update = learn(cfg, run, model, mini_batch, lr, pcgrad, reference)
            if update:
                updates.append(update)
        run.end_phase("update")

        # 4. Copy the new weights to the engine.
        pipeline.engine.load(run.model)
        stream.state.slots = pipeline.engine.slots
        stream.state.samples = samples_per_rank(cfg)
        run.end_phase("sync")
        learned = [c for c in chain(*groups) if updates and has_gradient(cfg, c)]
        recorder.write(run.step + 1, "train", chain(*sampled), learned)
        num_tokens = sum(len(c.prompt) + len(c.ids) for group in sampled for c in group)
        (num_tokens,) = distributed.sum_over_ranks([num_tokens])
        run.finish_step(int(num_tokens), "record",
                        partial(log_step, cfg, run, pipeline, stream, lr, sampled, updates, bytes_read),
                        validate)
    return run.end()


def evaluate(cfg, run, pipeline, valid, recorder):
    """Answer the validation questions greedily, record the answers and log the result."""
    questions = [question for question, _ in valid]
    requests = [request for _, request in valid]
    greedy = dataclasses.replace(pipeline.engine.sampling, temperature=0.0)
    grades, completions = ask(pipeline, questions, requests, sampling=greedy)
    recorder.write(run.step, "valid", completions)
    result = accuracy(grades)
    domains = by_domain(pipeline.task, questions, grades)
    rewards = [mean_score([row for row in rows if not row[0].error], "reward") for rows in domains.values()]
    result |= macro(rewards, "reward")
    log_evaluation(run, result, domains, grades, completions)
    # Of equal losses the first is best; of steps with equal rewards it should be the last.
    preference = 1e-9 * run.step
    run.record_validation(1 - result["reward"] - preference)


# --- the model and its memory ---

def build_model(cfg, hw, shape, found, resuming):
    """Return the GPT, not yet sharded, with the weights of `found`. `start` loads those of a resumed run."""
    memory.check_weights(shape, hw.device, sharding.ranks_that_share(cfg.parallel))
    torch.manual_seed(cfg.seed)
    device = sharding.building_device(hw, cfg.parallel)
    model = blank(shape, hw.attention, cfg.gradient_checkpointing, device=device)
    if not resuming and device.type != "meta":
        found.fill(model)
    adapt(cfg, model, device, resuming)
    return model


def make_engine(cfg, run, slots, context, tokenizer, task):
    """Return the Engine. Checkpoints keep the number of its slots, since logprobs depend on it in the last
    bits."""
    sampling = Sampling(cfg.temperature, stop=tokenizer.stop, stop_strings=stop_strings_of(task))
    with task_errors():
        return Engine(run.model, slots, context, sampling, seed=cfg.seed, dtype=run.hardware.sampling_dtype,
                      deterministic=cfg.deterministic, decode=tokenizer.decode, cuda_graphs=cfg.cuda_graphs)


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, frozen=LORA, claim=claim)
    check(cfg)
    distributed.on_main(lambda: check_task(cfg, argv))
    resuming = cfg.init_from == "resume"
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic,
                        cfg.keep_memory)

    # Model and questions.
    found = distributed.on_main(lambda: hub.to_resume(cfg.out_dir) if resuming else hub.find(cfg.init_from))
    tokenizer = found.tokenizer(cfg.tokenizer)
    cfg.tokenizer = tokenizer.option
    cfg.few_shot = few_shot_of(cfg, found)
    positions = found.config.block_size
    with task_errors():
        task = load(cfg.task)
        questions, held_out, dropped = distributed.on_main(lambda: open_questions(cfg, task))
        pairs = with_requests(cfg, tokenizer, task, questions, cfg.k_samples, positions)
        stream = QuestionStream(cfg, pairs, task)
        valid = with_requests(cfg, tokenizer, task, held_out, 1, positions)
    check_domains(stream, Counter(task.of(question).name for question in questions), positions)
    longest = max(len(request.ids) for _, request in stream.pairs + valid)
    replies = reply_tokens(cfg, task, found.config)
    context = context_of(longest, cfg.max_new_tokens, positions, replies=replies)
    about = f"{len(stream):,} questions of {cfg.dataset or cfg.task}{dropped}, {len(valid)} held out"
    if len(stream) < len(questions):
        about += f"; {len(questions) - len(stream)} dropped as too long"

    teacher = distributed.on_main(
        lambda: experimental.find_teacher(cfg, resuming, tokenizer, found.config.vocab_size, context))

    shape = dataclasses.replace(found.config, dropout=0.0)     # or the ratio would differ from 1
    model = distributed.together(lambda: build_model(cfg, hw, shape, found, resuming), BadInput)
    default = MICRO_BATCH_ON_CPU if hw.device.type == "cpu" else MICRO_BATCH
    micro_batch = cfg.tokens_per_micro_batch or default
    progress = Progress(micro_batch, micro_batch, cfg.max_steps, data=stream.digest())
    run = start(cfg, hw, model, progress, found.step if resuming else None, stream.state)
    with task_errors():                      # fails before the run folder is changed
        pool = Pool(cfg.task, cfg.reward_workers, cfg.timeout, cfg.reward_pool)
    pcgrad = experimental.pcgrad_of(cfg, run, stream)
    other_bytes = pcgrad.bytes() if pcgrad else 0
    provenance = distributed.on_main(lambda: {"task": own_task(cfg), "prompt": common_prompt(task),
                                              "teacher": teacher and teacher.identity(cfg.teacher)})
    keep_base = cfg.beta > 0 and not teacher
    with pool, run.open(tokenizer, provenance, doctor.start, resuming, keep_base):
        reference = None
        if cfg.beta:
            from rollouts.reference import Reference
            reference = Reference(cfg, hw, run.model, teacher)
        worst = worst_case(cfg, hw, longest, replies, context)
        model = fit_update(cfg, run, worst, context, other_bytes, reference)
        slots = cfg.slots or slots_beside_update(cfg, run, worst, context, other_bytes, stream.state)
        engine = make_engine(cfg, run, slots, context, tokenizer, task)
        pipeline = Pipeline(engine, pool, tokenizer, task)
        run.log_start(start_up(cfg, run, stream, pipeline, about), facts(run, found, pipeline, stream, valid),
                      engine=f"{engine.dtype}", reward_pool=pool.kind, cuda_graphs=engine.cuda_graphs)
        recorder = Recorder(cfg.out_dir, cfg.record, run.step)
        return train(cfg, run, model, pipeline, stream, valid, reference, pcgrad, recorder)


if __name__ == "__main__":
    guard.run(main)
