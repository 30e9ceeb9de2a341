"""Answers that a model was sampled for, as grpo.py learns from them: the questions' order, padded batches, a step's figures."""
import functools
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from model import IGNORE, Prompts
from runtime import distributed
from runtime.config import BadInput
from runtime.examples import is_answer, read_rows
from runtime.rewards import Grade


# --- questions ---

def read_questions(path, n_valid):
    """(questions to train on, questions for validation) of a .jsonl file; the latter a tenth by a hash, n_valid at most."""
    found = {}
    for number, row in enumerate(read_rows(path), 1):
        text = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if not isinstance(text, str) or "answer" not in row or not is_answer(row["answer"]):
            raise BadInput(f'Row {number} of {path} is no question: it should be {{"prompt": text, "answer": ...}}, and the '
                           'answer not NaN.')
        found.setdefault(text, row | {"question": text})
    held = [text for text in found if int(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), 16) % 10 == 0][:n_valid]
    valid = [found.pop(text) for text in held]
    if not found:
        raise BadInput(f"{path} holds no question to train on: give a --dataset= with more.")
    return list(found.values()), valid


def question_at(place, n, seed):
    """The number of the question that stands at a place of the endless stream: each of the n once an epoch, in an order of its own."""
    epoch, k = divmod(place, n)
    return int(order(n, seed, epoch)[k])


@functools.lru_cache(maxsize=2)
def order(n, seed, epoch):
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


def next_places(cfg, now, n):
    """Where the next questions of a step stand in the endless stream, of all ranks together; those that rest are passed over."""
    places, resting = [], set()
    while len(places) < cfg.prompts_per_step:
        number, epoch = question_at(now.asked, n, cfg.seed), now.asked // n
        if epoch - now.solved.get(number, -cfg.skip_solved - 1) > cfg.skip_solved or len(resting) == n:
            places.append(now.asked)
        else:
            resting.add(number)              # if all do, they are asked all the same
        now.asked += 1
    return places


# --- rollouts ---

@dataclass
class Rollout:
    prompt: list                             # ids
    ids: list                                # sampled after it; the token that ended it is the last
    logprobs: list                           # of them, nats, when they were sampled
    finished: bool                           # not cut off at max_new_tokens
    trained: bool = True                     # whether the loss looks at it
    grade: Grade | None = None
    reward: float = 0.0
    advantage: float = 0.0
    reference: list | None = None            # log-probabilities under the reference
    recomputed: list | None = None           # under the trained model before the step, by the trainer

    @property
    def read(self):                          # of the prompt before the completion's first step, which is its last token
        return tuple(self.prompt[:-1])


def alike(group):
    """Whether all Rollouts of a group have the same reward: no gradient comes from them."""
    return len({r.reward for r in group}) == 1


class Batch(NamedTuple):
    x: torch.Tensor                          # [B, T] ids: a prompt's last, and the completion's but for the last
    y: torch.Tensor                          # [B, T] the completions; IGNORE past the end, and where they are not trained on
    sampled: torch.Tensor                    # [B, T] log-probabilities of y: the engine's,
    recomputed: torch.Tensor                 # the trainer's before the step (0 if not needed),
    reference: torch.Tensor                  # and the reference's (0 without one)
    advantage: torch.Tensor                  # [B]
    read: torch.Tensor                       # [G, P] the prompts, each once, without their last tokens
    lengths: torch.Tensor                    # [G] of them
    of: torch.Tensor                         # [B] which of them a row continues

    @property
    def prompts(self):
        return Prompts(self.read, self.lengths, self.of)


def padded(rollouts):
    """The Batch of some Rollouts. Masks come from lengths: a completion's last token, be it the end of text, is trained on."""
    B, T, prompts = len(rollouts), max(len(r.ids) for r in rollouts), {}
    x, y, floats = np.zeros((B, T), np.int64), np.full((B, T), IGNORE), np.zeros((3, B, T), np.float32)
    of = [prompts.setdefault(r.read, len(prompts)) for r in rollouts]
    lengths = [*map(len, prompts)]
    read = np.array([prompt + (0,) * (max(lengths) - len(prompt)) for prompt in prompts], np.int64)
    for i, r in enumerate(rollouts):
        n = len(r.ids)
        x[i, :n] = r.prompt[-1:] + r.ids[:-1]
        if r.trained:
            y[i, :n] = r.ids
        for row, values in zip(floats[:, i], (r.logprobs, r.recomputed, r.reference)):
            row[:n] = 0.0 if values is None else values
    return Batch(*map(torch.from_numpy, (x, y, *floats)), torch.tensor([r.advantage for r in rollouts]),
                 torch.from_numpy(read), torch.tensor(lengths), torch.tensor(of))


def cells(n_prompts, longest, rows, T):
    """What a forward pass of rows of T ids after so many prompts takes, in positions: those of the linear layers, padding included, and an
    eighth of the keys and values that attention copies for each row, which is about their share of a position's memory."""
    return n_prompts * longest + rows * T + rows * (longest + T) / 8


def micro_batches(rollouts, tokens):
    """Lists of Rollouts of at most so many `cells`; of a single one if that alone has more. In the order that takes fewer of them: those
    of about equal lengths together, for less padding, or those of a prompt, which then stands in one list."""
    longest = {}
    for r in rollouts:
        longest[r.read] = max(longest.get(r.read, 0), len(r.ids))

    def cut(order):
        parts, reads, T = [], set(), 0
        for r in sorted(rollouts, key=order):
            reads, T = reads | {r.read}, max(T, len(r.ids))
            if not parts or cells(len(reads), max(map(len, reads)), len(parts[-1]) + 1, T) > tokens:
                parts.append([])
                reads, T = {r.read}, len(r.ids)
            parts[-1].append(r)
        return parts

    def size(part):
        reads = {r.read for r in part}
        return cells(len(reads), max(map(len, reads)), len(part), max(len(r.ids) for r in part))
    orders = lambda r: (-len(r.ids), r.prompt), lambda r: (-longest[r.read], r.prompt, -len(r.ids))
    return min(map(cut, orders), key=lambda parts: sum(map(size, parts)))


@torch.no_grad()
def note_logprobs(model, hw, rollouts, tokens, temperature, name):
    """Give each Rollout the log-probabilities of its ids under the model, in the field of that name."""
    for part in micro_batches(rollouts, tokens):
        batch = Batch(*(t.to(hw.device) for t in padded(part)))
        with hw.autocast():
            logp, _ = model.token_logprobs(batch.x, batch.y, temperature, batch.prompts)
        for r, row in zip(part, logp.cpu().numpy()):
            setattr(r, name, row[:len(r.ids)].tolist())


# --- what is said of a step ---

def flops(model, rollouts):
    """Of forward and backward passes, without padding: a prompt once, the head for what is sampled alone."""
    head = (6 if model.head_weight.requires_grad else 4) * model.head_weight.numel()
    plain, by_length = model.flops_per_token(0) - head, model.flops_per_token(1) - model.flops_per_token(0)
    read = [len(prompt) for prompt in {r.read for r in rollouts}]
    return sum(n * (plain + by_length * n) for n in read) + sum(
        len(r.ids) * (plain + by_length * (len(r.read) + len(r.ids)) + head) for r in rollouts)


def figures_of(cfg, hw, groups, sums, read, spent):
    """A step's metrics, from all ranks' sampled groups of Rollouts, the sums of each optimizer step, the bytes that sampling read, and
    this rank's seconds."""
    rollouts, world, seconds = [r for g in groups for r in g], distributed.world_size(), sum(spent.values())
    mine = {"samples": len(rollouts), "groups": len(groups), "reward": sum(r.reward for r in rollouts),
            "squares": sum(r.reward**2 for r in rollouts), "right": sum(r.grade.score == 1 for r in rollouts),
            "solved": sum(any(r.grade.score == 1 for r in g) for g in groups), "alike": sum(map(alike, groups)),
            "sampled": sum(len(r.ids) for r in rollouts), "read": sum(len(r.prompt) for r in rollouts), "bytes": read,
            "cut": sum(not r.finished for r in rollouts), "errors": sum(r.grade.error is not None for r in rollouts),
            "timeouts": sum((r.grade.error or "").startswith("timed out") for r in rollouts)}
    for key in ("loss", "tokens", "entropy", "kl", "kl_old", "clipped", "flops"):
        mine[key] = sum(s[key] for s in sums)
    before = sums[0] if sums else {"gap": 0.0, "tokens": 0.0, "gap_max": 0.0}        # before any weight has moved
    mine |= {"gap": before["gap"], "compared": before["tokens"]}
    for name in {name for r in rollouts for name in r.grade.parts}:
        mine[f"parts/{name}"] = sum(bool(r.grade.parts.get(name)) for r in rollouts)
    ranks = distributed.gather((mine, before["gap_max"], max(len(r.ids) for r in rollouts)))
    of = {key: sum(numbers.get(key, 0.0) for numbers, *_ in ranks) for key in sorted({key for numbers, *_ in ranks for key in numbers})}
    n, learnt, tokens = of["samples"], max(1.0, of["tokens"]), of["sampled"] + of["read"]
    mfu = hw.mfu(of["flops"] / world / max(1e-9, spent["update"]), 1)
    mbu = hw.bandwidth and of["bytes"] / world / spent["rollout"] / (hw.bandwidth * 1e12)
    return {
        "loss": of["loss"] / max(1, len(sums)), "reward": of["reward"] / n, "reward_std": max(0.0, of["squares"] / n - (of["reward"] / n)**2) ** 0.5,
        "pass_at_1": of["right"] / n, f"pass_at_{cfg.k_samples}": of["solved"] / of["groups"], "zero_variance": of["alike"] / of["groups"],
        "groups": of["groups"], **{key: of[key] / n for key in of if key.startswith("parts/")}, "errors": of["errors"], "timeouts": of["timeouts"],
        "entropy": of["entropy"] / learnt, "kl": of["kl"] / learnt, "kl_old": of["kl_old"] / learnt, "clip_fraction": of["clipped"] / learnt,
        "logprob_gap": of["gap"] / max(1.0, of["compared"]), "logprob_gap_max": max(gap for _, gap, _ in ranks),
        "completion_tokens": of["sampled"] / n, "completion_tokens_max": max(longest for *_, longest in ranks), "truncated": of["cut"] / n,
        "completions_per_s": n / seconds, "tokens_per_s": tokens / seconds, "sampled_tokens_per_s": of["sampled"] / spent["rollout"],
        "mfu": mfu, "mbu_rollout": mbu, "perf/throughput": tokens / seconds / world, "perf/mfu/actor": mfu}
