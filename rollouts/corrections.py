"""Corrections: what a task's correct() would write next, at states that the model's own completions reach.

Imitating it there, and not in texts of its own, teaches the model to recover from its own mistakes (DAgger,
Ross et al. 2011)."""
import random
from statistics import fmean

from rollouts.batch import logprobs_of
from rollouts.pipeline import Completion


def add_corrections(cfg, run, pipeline, groups):
    """Append to groups of Completions cfg.corrections for each, as groups of their own: a right next line
    after some of a completion's lines, with the advantage cfg.correction_weight, so that its gradient is that
    of the cross entropy. Returns figures for the log, of this rank."""
    if not cfg.corrections:
        return {}
    asked = []
    for group in groups:
        rng = random.Random(f"{cfg.seed} {run.step} {group[0].key}")
        for c in rng.sample(group, min(cfg.corrections, len(group))):
            ids = c.ids[:rng.choice(line_ends(pipeline.tokenizer, c.ids))]
            future = pipeline.pool.correct(c.question, pipeline.tokenizer.decode(ids))
            asked.append((c, ids, rng, future))
    corrections = []
    for c, ids, rng, future in asked:
        lines, _ = pipeline.pool.take(future)
        if not lines:
            continue
        line = rng.choice(lines)
        next_ids = pipeline.tokenizer.encode(line).tolist()
        if len(c.prompt) + len(ids) + len(next_ids) <= run.model.config.block_size:
            corrections.append(Completion(c.prompt + ids, next_ids, [0.0] * len(next_ids), True, c.question, c.key, text=line,
                                          advantage=cfg.correction_weight))
    tokens = run.state.micro_batch
    for c, logprobs in logprobs_of(run.model, run.hardware, corrections, tokens, cfg.temperature):
        c.logprobs = c.trainer_logprobs = c.reference_logprobs = logprobs
    groups += [[c] for c in corrections]
    nats = [-logprob for c in corrections for logprob in c.logprobs]
    return {"corrections/number": len(corrections), "corrections/nats": fmean(nats) if nats else 0.0}


def line_ends(tokenizer, ids):
    """Return the numbers of ids after which a line begins, 0 included; the last line is unfinished."""
    ends = [n for n in range(1, len(ids)) if tokenizer.decode(ids[n - 1:n]).endswith("\n")]
    return [0, *ends]
