"""Logging for grpo.py: the start-up paragraph, and metrics (metrics.jsonl) and log lines of steps and
evaluations."""
import math
import re
from collections import Counter, defaultdict
from statistics import fmean

import torch

from layers.lora import fingerprint
from rollouts.accuracy import accuracy
from rollouts.pipeline import zero_variance
from rollouts.questions import normalized
from runtime import distributed
from runtime.log import shown
from runtime.progress import duration
from runtime.options import non_default_options, rate_shown
from text.provenance import common_prompt

PHASES = ("rollout", "reward", "reference", "update", "sync", "record")      # timed phases of a step
SHOWN = 2                                    # answers of an evaluation in the log


def start_up(cfg, run, stream, pipeline, about):
    """Return the start-up paragraph: model, machine, options. about: a description of the questions."""
    hw = run.hardware
    engine = pipeline.engine
    pool = pipeline.pool
    trainable = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    reference = f"beta {cfg.beta:g}" if cfg.beta else "no reference"
    if cfg.teacher:
        reference += f" from the teacher {cfg.teacher}, reward weight {cfg.reward_weight:g}"
    return "\n".join([
        f"{run.model.n_params():,} parameters, {trainable:,} trainable, from {cfg.init_from}; {about}.",
        f"{distributed.world_size()} x {hw.name}, {hw.dtype}, engine {engine.dtype}, attention "
        f"{hw.attention_name(run.model.config)}, compile {'on' if hw.compile else 'off'}, {engine.slots} "
        f"samples in flight, micro-batches of {run.state.micro_batch:,} tokens, {pool.n} reward workers "
        f"({pool.kind}).",
        f"{cfg.prompts_per_step} prompts x {cfg.k_samples} samples per step, {cfg.inner_epochs} x "
        f"{cfg.mini_batches} optimizer steps each; {cfg.loss_type}, {cfg.optimizer}, {cfg.lr_schedule} "
        f"{rate_shown(cfg)}, {reference}.",
        f"Non-default options: {non_default_options(cfg)}",
    ])


def flops(model, completions):
    """Return the FLOPs of forward and backward passes without padding: each prefix once, the head only for
    completion tokens."""
    head = model.head_flops()
    plain = model.flops_per_token(0) - head
    by_length = model.flops_per_token(1) - model.flops_per_token(0)
    total = sum(len(prefix) * (plain + by_length * len(prefix)) for prefix in {c.prefix for c in completions})
    for c in completions:
        total += len(c.ids) * (plain + by_length * (len(c.prefix) + len(c.ids))) + c.n_sampled * head
    return total


class Update:
    """Statistics of an optimizer step on this rank, see grpo.learn."""

    def __init__(self, flops):
        self.sums = Counter(flops=flops)     # over tokens, tensors []
        self.largest_gap = 0.0               # between a token's logprobs by trainer and engine
        self.grad_norm = None
        self.metrics = {}                    # more metrics, {name: number}, logged of a step's last Update

    def count(self, loss, entropy, gap, mask, others):
        """Add a micro-batch: its loss [], entropies and logprob gaps of tokens [B, T], and other sums over
        its tokens, {name: tensor []}."""
        gap = torch.where(mask, gap, 0.0).detach().abs()
        self.largest_gap = gap.max().clamp(min=self.largest_gap)
        sums = others | {"loss": loss, "entropy": entropy.sum(), "gap": gap.sum(), "tokens": mask.sum()}
        self.sums.update({name: value.detach() for name, value in sums.items()})


def sums_over(groups):
    """Return sums over groups of Completions, as a Counter."""
    completions = [c for group in groups for c in group]
    graded = [c for c in completions if not c.grade.error]
    truncated = [c for c in completions if not c.finished and c.reason != "reply"]
    return Counter(
        samples=len(completions),
        graded=len(graded),
        groups=len(groups),
        reward=sum(c.reward for c in graded),
        reward_squared=sum(c.reward**2 for c in graded),
        right=sum(c.grade.score == 1 for c in graded),
        solved=sum(any(c.grade.score == 1 for c in group) for group in groups),
        zero_variance=sum(map(zero_variance, groups)),
        completion_tokens=sum(c.n_sampled for c in completions),
        prompt_tokens=sum(c.n_context for c in completions),
        replies=sum(len(c.forced) for c in completions),
        truncated=len(truncated),
        truncated_score=sum(c.grade.score for c in truncated),
        reply_too_long=sum(c.reason == "reply" for c in completions),
        errors=len(completions) - len(graded),
        timeouts=sum((c.grade.error or "").startswith("timed out") for c in completions),
    )


def shares(cfg, total):
    """Turn sums from sums_over into means over samples or groups. Rewards and pass_at_1 are means over graded
    samples, NaN without one."""
    n = max(1, total["samples"])
    graded = total["graded"] or math.nan
    groups = max(1, total["groups"])
    mean_reward = total["reward"] / graded
    return {
        "reward": mean_reward,
        "reward_std": max(0.0, total["reward_squared"] / graded - mean_reward**2) ** 0.5,
        "pass_at_1": total["right"] / graded,
        f"pass_at_{cfg.k_samples}": total["solved"] / groups,
        "zero_variance": total["zero_variance"] / groups,
        "groups": total["groups"],
        "completion_tokens": total["completion_tokens"] / n,
        "truncated": total["truncated"] / n,
        "truncated_score": total["truncated_score"] / (total["truncated"] or math.nan),
    }


def domain_metrics(cfg, stream, groups):
    """Return each task's metrics (TASK/reward and so on) for a mixture, else {}."""
    if len(stream.domains) == 1:
        return {}
    by_task = {name: [] for name in stream.domains}
    for group in groups:
        by_task[stream.domain(group[0].key)].append(group)
    ranks = distributed.gather({name: sums_over(own) for name, own in by_task.items()})
    metrics = {}
    for name in stream.domains:
        total = Counter()
        for counts in ranks:
            total.update(counts[name])
        metrics[f"{name}/questions"] = stream.state.turns.get(name, 0)
        if total["samples"]:                 # --mixing=round_robin: only one task per step has any
            metrics |= {f"{name}/{key}": value for key, value in shares(cfg, total).items()}
    return metrics


def step_metrics(cfg, run, stream, groups, updates, bytes_read):
    """Return a step's metrics over all ranks. Given for this rank: its groups, the Updates, and the bytes
    that sampling read."""
    completions = [c for group in groups for c in group]
    counts = sums_over(groups)
    counts["bytes"] = bytes_read
    for c in completions:
        parts = {f"parts/{name}": bool(holds) for name, holds in c.grade.parts.items()}
        for name, value in (parts | {f"figures/{name}": x for name, x in c.grade.figures.items()}).items():
            counts.update({name: value, f"with {name}": 1})          # of a mixture not every task has it
    for update in updates:
        counts.update({name: float(value) for name, value in update.sums.items()})
    largest_gap = 0.0
    if updates:                              # the first: no weight has changed since sampling
        counts.update(first_gap=float(updates[0].sums["gap"]), first_tokens=float(updates[0].sums["tokens"]))
        largest_gap = float(updates[0].largest_gap)

    ranks = distributed.gather((counts, largest_gap, max(c.n_sampled for c in completions)))
    total = Counter()
    for rank_counts, _, _ in ranks:
        total.update(rank_counts)
    of_updates = {"entropy": "entropy", "kl": "kl", "kl_old": "kl_old", "clip_fraction": "clipped"}
    n = total["samples"]
    targets = max(1.0, total["tokens"])
    tokens = total["completion_tokens"] + total["prompt_tokens"]
    hw = run.hardware
    world = distributed.world_size()
    seconds = run.timings.total()
    rollout_s = run.timings["rollout"]
    mfu = hw.mfu(total["flops"] / world / max(1e-9, run.timings["update"]), 1) if updates else None
    return {
        "loss": total["loss"] / max(1, len(updates)),
        **shares(cfg, total),
        **{name: total[name] / total[f"with {name}"] for name in sorted(total)
           if name.startswith(("parts/", "figures/"))},
        **{name: total[name] / n for name in ("replies", "reply_too_long") if total[name]},
        "errors": total["errors"],
        "timeouts": total["timeouts"],
        # None without an update
        **{name: total[key] / targets if updates else None for name, key in of_updates.items()},
        "logprob_gap": total["first_gap"] / max(1.0, total["first_tokens"]) if updates else None,
        "logprob_gap_max": max(gap for _, gap, _ in ranks) if updates else None,
        "completion_tokens_max": max(longest for _, _, longest in ranks),
        "completions_per_s": n / seconds,
        "tokens_per_s": tokens / seconds,
        "sampled_tokens_per_s": total["completion_tokens"] / rollout_s,
        "mfu": mfu,
        "mbu_rollout": hw.bandwidth and total["bytes"] / world / rollout_s / (hw.bandwidth * 1e12),
        "perf/throughput": tokens / seconds / world,
        "perf/mfu/actor": mfu,
        **domain_metrics(cfg, stream, groups),
        **(updates[-1].metrics if updates else {}),
    }


def facts(run, source, pipeline, stream, valid):
    """Return facts about the model and its questions for doctor.diagnose. source: the hub.ModelSource that
    training began with. valid: [(question, Request)]."""
    rows = {}
    if run.cfg.diagnose:
        from text.facts import facts_of
        train, held_out = ([normalized(question["question"]) for question, _ in pairs]
                           for pairs in (stream.pairs, valid))
        answers = [(question["question"], question.get("answer", "")) for question, _ in stream.pairs]
        rows = facts_of(train, held_out, answers, "questions")
    return rows | {
        "vocabulary": run.model.config.vocab_size,
        "parameters": run.model.n_params(),
        "prompt": None if pipeline.tokenizer.is_chat else common_prompt(pipeline.task),
        "trained_prompt": source.about.get("prompt"),
    }


def vitals(run, pipeline, groups, metrics):
    """Return further values for doctor.diagnose: relative weight change at the engine's precision, whether
    the engine's weights are stale, mean number of distinct samples per group, and evidence for the cause of
    zero or equal rewards. groups: this rank's."""
    engine = pipeline.engine
    after = fingerprint(run.model, engine.dtype)
    completions = [c for group in groups for c in group]
    values = {
        "moved": run.moved(after, engine.dtype),
        "engine_stale": float(not torch.equal(after, engine.fingerprint)),
        "distinct": fmean(len({tuple(c.ids) for c in group}) for group in groups),
        "advantage_fit": advantage_fit(groups),
        "length_fit": length_fit(groups),
        "copies_paid_unlike": copies_paid_unlike(groups),
        "right_unpaid": right_unpaid(completions),
        **most_common(completions),
    }
    if not metrics["pass_at_1"]:
        values["sample"] = completions[0].text[:300]
    if metrics["errors"]:
        values["error"] = next((c.grade.error for c in completions if c.grade.error), None)
    if metrics["zero_variance"] >= 0.9 or metrics["truncated"] >= 0.5:
        values["paid_elsewhere"] = paid_elsewhere(pipeline, groups)
    if metrics.get("replies"):
        values["paid_replies"] = paid_replies(pipeline, completions)
    return values


def paid_replies(pipeline, completions):
    """Return the share of up to eight right episodes whose answer the environment alone wrote and that are
    not right without its texts; None without a right one."""
    right = [c for c in completions if c.forced and c.grade.score == 1]
    right = right[::max(1, len(right) // 8)][:8]
    without = []
    for c in filter(only_replies_answer, right):
        turns = ["" if i % 2 else text for i, text in enumerate(c.turns)]
        without.append((c.question, "".join(turns), turns))
    grades = pipeline.pool.score(without)
    return sum(grade.score < 1 and not grade.error for grade in grades) / len(right) if right else None


def only_replies_answer(c):
    """Return whether the answer to a Completion's question stands in the environment's texts alone."""
    answer = normalized(str(c.question.get("answer") or ""))
    whole_words = rf"(?<!\w){re.escape(answer)}(?!\w)"
    by_model, by_environment = (normalized(" ".join(c.turns[i::2])) for i in (0, 1))
    return bool(answer and re.search(whole_words, by_environment)) and not re.search(whole_words, by_model)


def most_common(completions):
    """Return the share of Completions that have the most common text, the number of different questions that
    they answer, and the beginning of that text."""
    questions = {}                           # {text: the questions of its completions}
    for c in completions:
        questions.setdefault(c.text.strip(), []).append(c.question["question"])
    text = max(questions, key=lambda text: len(questions[text]))
    return {"most_common_share": len(questions[text]) / len(completions),
            "most_common_questions": len(set(questions[text])),
            "most_common_text": text[:300]}


def centred(values):
    """Return values minus their mean."""
    mean = fmean(values)
    return [value - mean for value in values]


def advantage_fit(groups):
    """Return the mean correlation of advantages with rewards within groups, 1 if they belong together; None
    without a group that has advantages and differences."""
    fits = []
    for group in groups:
        graded = [c for c in group if not math.isnan(c.reward)]
        # Without any advantage it is not trained on. Equal pairs have no correlation: with another baseline
        # than the group's mean, equal rewards have an advantage too.
        if any(c.advantage for c in graded) and len({(c.reward, c.advantage) for c in graded}) > 1:
            rewards = centred([c.reward for c in graded])
            advantages = centred([c.advantage for c in graded])
            scale = math.sqrt(sum(r * r for r in rewards) * sum(a * a for a in advantages))
            fits.append(sum(r * a for r, a in zip(rewards, advantages)) / scale if scale > 1e-9 else 0.0)
    return fmean(fits) if fits else None


def length_fit(groups):
    """Return the share of the scores' variance that the length of the text explains (adjusted eta squared), 1
    if the score depends on length alone. None for scores of fewer than three values or few different texts of
    equal length."""
    by_length = defaultdict(list)
    for group in groups:
        for text, score in {c.text: c.grade.score for c in group if not c.grade.error}.items():
            by_length[len(text)].append(score)
    repeated = [scores for scores in by_length.values() if len(scores) > 1]
    scores = [score for alike in repeated for score in alike]
    if len({*scores}) < 3 or len(scores) < 2 * len(repeated) + 5:
        return None
    within = sum(d * d for alike in repeated for d in centred(alike)) / (len(scores) - len(repeated))
    return 1 - within / (sum(d * d for d in centred(scores)) / (len(scores) - 1))


def copies_paid_unlike(groups):
    """Return the share of texts with several copies among a question's completions whose scores differ by
    more than 0.1; None without any."""
    unlike = []
    for group in groups:
        scores = defaultdict(list)
        for c in group:
            if not c.grade.error:
                scores[c.text, tuple(c.turns or ())].append(c.grade.score)
        unlike += [max(copies) - min(copies) > 0.1 for copies in scores.values() if len(copies) > 1]
    return fmean(unlike) if unlike else None


def right_unpaid(completions):
    """Return the share of completions that earn at most a tenth of the best score, among those whose last
    word is their question's answer; None with fewer than four."""
    best = max(c.grade.score for c in completions)
    scores = [c.grade.score for c in completions if not c.grade.error
              and normalized(c.text).split()[-1:] == [normalized(str(c.question.get("answer")))]]
    return fmean(score <= best / 10 for score in scores) if len(scores) > 3 else None


def paid_elsewhere(pipeline, groups):
    """Return the share of up to eight rewarded completions that get the same score on another question; None
    without one."""
    answers = []
    for group, other in zip(groups, groups[1:] + groups[:1]):
        best = max(group, key=lambda c: c.grade.score)
        if best.grade.score and best.question != other[0].question:
            answers.append((best, other[0].question))
    grades = pipeline.pool.score([(question, c.text, c.turns) for c, question in answers[:8]])
    same = [grade.score == c.grade.score for grade, (c, _) in zip(grades, answers) if not grade.error]
    return fmean(same) if same else None


def log_step(cfg, run, pipeline, stream, lr, groups, updates, bytes_read):
    """Write a step's metrics and log line; every rank must call this. groups: all that this rank sampled;
    updates: of its optimizer steps; bytes_read: by sampling."""
    metrics = step_metrics(cfg, run, stream, groups, updates, bytes_read)
    metrics |= vitals(run, pipeline, groups, metrics)
    state = run.state
    grad_norm = updates[-1].grad_norm if updates else None
    seconds = run.timings.total()
    used, peak = run.hardware.memory_gb()
    timings = {f"{name}_s": run.timings[name] for name in PHASES}
    run.log.metrics(
        step=run.step, lr=lr, grad_norm=grad_norm, updates=len(updates), tokens=state.tokens,
        seconds=state.seconds, utilization=run.hardware.busy(), joules=run.hardware.joules(), memory_gb=used,
        peak_memory_gb=peak, reserved_memory_gb=run.hardware.reserved_gb(), skipped_steps=state.skipped,
        questions=sum(stream.state.turns.values()),
        epoch=max(stream.state.turns.get(name, 0) / len(asked) for name, asked in stream.numbers.items()),
        epoch_s=seconds * len(stream) / cfg.prompts_per_step,
        **{"training/global_step": run.step}, **metrics, **timings)
    line = (f"step {run.step}/{cfg.max_steps} | reward {metrics['reward']:.3f} | pass@1 "
            f"{metrics['pass_at_1']:.1%} | pass@{cfg.k_samples} {metrics[f'pass_at_{cfg.k_samples}']:.1%} | "
            f"zero variance {metrics['zero_variance']:.0%} | entropy {shown(metrics['entropy'], '.3f')} | "
            f"{metrics['completion_tokens']:.0f} tokens | grad norm {shown(grad_norm, '.3f')} | "
            f"{seconds:.1f} s: rollout {timings['rollout_s']:.1f}, update {timings['update_s']:.1f} | ETA "
            f"{duration((cfg.max_steps - run.step) * state.seconds / run.step)}")
    domains = [f"{name} {metrics[f'{name}/pass_at_1']:.0%}" for name in stream.domains
               if f"{name}/pass_at_1" in metrics]
    if domains:
        line += f" | pass@1 of {', '.join(domains)}"
    if "surgery/conflicts" in metrics:
        line += f" | conflicts {metrics['surgery/conflicts']:.0%}"
    if metrics["truncated"] > 0.05:
        line += f" | cut off {metrics['truncated']:.0%}"
    if metrics.get("reply_too_long", 0) > 0.05:
        line += f" | replies too long {metrics['reply_too_long']:.0%}"
    if metrics["errors"]:
        line += f" | {metrics['errors']} errors"
    if not updates:
        line += " | no update: all advantages are zero"
    run.log.say(line)


def log_evaluation(run, result, domains, grades, completions):
    """Write an evaluation's metrics, its log line and the answers to the first questions. domains: {task: its
    Grades}; those of a mixture are reported separately. completions: this rank's."""
    cfg = run.cfg
    figures = {f"val_{name}": value for name, value in result.items() if isinstance(value, float)}
    own = {name: accuracy(rows)["accuracy"] for name, rows in domains.items()}
    per_task = f" ({', '.join(f'{name} {share:.0%}' for name, share in own.items())})" if len(own) > 1 else ""
    if per_task:
        figures["val_macro_accuracy"] = fmean(own.values())
        figures |= {f"{name}/val_accuracy": share for name, share in own.items()}
    run.log.metrics(step=run.step, **figures)
    run.log.say(f"step {run.step}/{cfg.max_steps} | {len(grades)} held-out questions, greedy: "
                f"{result['accuracy']:.1%} right [{result['accuracy_low']:.1%}, "
                f"{result['accuracy_high']:.1%}], reward {result['reward']:.3f} "
                f"[{result['reward_low']:.3f}, {result['reward_high']:.3f}]{per_task}")
    run.log.samples(run.step, [f"{c.grade.score:g} {c.text[:100]} | {c.question['question']}"
                               for c in sorted(completions, key=lambda c: c.key)[:SHOWN]])
