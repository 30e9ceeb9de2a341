"""Corrections: what a task's correct() would write next, at states that the model's own completions reach.

Imitating it there, and not in texts of its own, teaches the model to recover from its own mistakes (DAgger,
Ross et al. 2011)."""
import random

from rollouts.batch import logprobs_of
from rollouts.pipeline import Completion
from runtime import distributed
from tasks._pool import BrokenReward


def add_corrections(cfg, run, pipeline, groups):
    """Append to groups of Completions cfg.corrections for each, as groups of their own: a right next line
    after some of a completion's lines, with the advantage cfg.correction_weight. While the weights are those
    that its logprobs come from, its gradient is that of the cross entropy. Returns figures for the log."""
    if not cfg.corrections:
        return {}
    corrections = distributed.together(lambda: correct(cfg, run, pipeline, groups), BrokenReward)
    tokens = run.state.micro_batch
    nats = 0.0
    for c, logprobs in logprobs_of(run.model, run.hardware, corrections, tokens, cfg.temperature):
        c.logprobs = c.trainer_logprobs = logprobs
        nats -= sum(logprobs)
    groups += [[c] for c in corrections]
    run.end_phase("reference")
    number, nats, n = distributed.sum([len(corrections), nats, sum(len(c.ids) for c in corrections)])
    return {"corrections/number": number, "corrections/nats": nats / max(1, n)}


def correct(cfg, run, pipeline, groups):
    """Return the corrections of this rank's groups, without logprobs."""
    tokenizer = pipeline.tokenizer
    asked = []
    for group in groups:
        rng = random.Random(f"{cfg.seed} {run.step} {group[0].key}")
        for c in rng.sample(group, min(cfg.corrections, len(group))):
            ids = c.ids[:rng.choice(line_ends(tokenizer, c.ids))]
            asked.append((c, ids, rng.random(), pipeline.pool.correct(c.question, tokenizer.decode(ids))))
    corrections = []
    for c, ids, noise, future in asked:
        lines, _ = pipeline.pool.take(future)
        if not lines:
            continue
        line = lines[int(noise * len(lines))]
        next_ids = tokenizer.encode(line).tolist()
        if len(c.prompt) + len(ids) + len(next_ids) <= run.model.config.block_size:
            corrections.append(Completion(
                prompt=c.prompt + ids, ids=next_ids, logprobs=[0.0] * len(next_ids), finished=True,
                question=c.question, key=c.key, text=line, advantage=cfg.correction_weight))
    return corrections


def line_ends(tokenizer, ids):
    """Return the numbers of ids after which a line begins, 0 included; the last line is unfinished."""
    ends = [n for n in range(1, len(ids)) if tokenizer.decode(ids[n - 1:n]).endswith("\n")]
    return [0, *ends]
