"""Padded batches of completions: micro-batches of bounded cost, their worst case, and logprobs.

Shapes: B rows, T tokens of the longest completion, G prefixes of at most P tokens.
"""
import math
from dataclasses import dataclass

import numpy as np
import torch

from model import IGNORE, Prompts
from rollouts.pipeline import Completion
from runtime import distributed

MICRO_BATCH = 65536                          # default positions of a micro-batch, see token_cost
# An update of SmolLM2-135M takes 41-50 s instead of 55 (two Zen 3 cores, docs/notes.md).
MICRO_BATCH_ON_CPU = 2048


@dataclass
class Batch:
    """Completions and their prefixes, each distinct prefix stored once. Column t is a completion's token t.
    Padding is IGNORE in y and 0 elsewhere."""
    x: torch.Tensor                          # [B, T] ids: the prompt's last, the completion's but the last
    y: torch.Tensor                          # [B, T] ids that the model wrote, of trained completions
    sampled_logprobs: torch.Tensor           # [B, T] of the completion: by the engine
    trainer_logprobs: torch.Tensor           # [B, T] by the trainer before the step; 0 if not needed
    reference_logprobs: torch.Tensor         # [B, T] by the reference model; 0 without one
    advantages: torch.Tensor                 # [B]
    target_index: torch.Tensor               # positions of the targets in y.flatten()
    prefixes: Prompts                        # ids [G, P], lengths [G], index of each row's prefix [B], and
                                             # the positions to compute (None: all)

    def to(self, device):
        ahead = torch.device(device).type == "cuda"          # on mps such a copy may read freed memory
        prefixes = Prompts(*(tensor if tensor is None else tensor.to(device, non_blocking=ahead)
                             for tensor in self.prefixes))
        moved = {name: tensor.to(device, non_blocking=ahead) for name, tensor in vars(self).items()
                 if name != "prefixes"}
        return Batch(**moved, prefixes=prefixes)


def padded(completions, multiple=1):
    """Return the Batch of Completions; for an empty list, one row without targets. P, T and the number of
    positions that are kept are rounded up to a multiple. Masks come from lengths, so a final end-of-text
    token is a target too."""
    completions = completions or [Completion([0, 0], [0], [0.0], True, trained=False)]
    B = len(completions)
    P, T = widths(completions, multiple)
    x = np.zeros((B, T), np.int64)
    y = np.full((B, T), IGNORE)
    logprobs = np.zeros((3, B, T), np.float32)
    for row, c in enumerate(completions):
        n = len(c.ids)
        x[row, :n] = c.prompt[-1:] + c.ids[:-1]
        if c.trained:
            y[row, :n] = c.ids
        for first, last in c.forced:
            y[row, first:last] = IGNORE
        for kind, values in enumerate((c.logprobs, c.trainer_logprobs, c.reference_logprobs)):
            logprobs[kind, row, :n] = 0.0 if values is None else values

    numbers = {}                             # {prefix: index}
    of_row = [numbers.setdefault(c.prefix, len(numbers)) for c in completions]
    lengths = [len(prefix) for prefix in numbers]
    ids = np.zeros((len(numbers), P), np.int64)
    for number, prefix in enumerate(numbers):
        ids[number, :len(prefix)] = prefix
    answers = [len(c.ids) for c in completions]
    is_kept = np.concatenate((filled(lengths, P), filled(answers, T)))
    # The first padding positions round up the number of kept ones, so that compiled code sees few shapes.
    n_padding = round_up(is_kept.sum(), multiple) - is_kept.sum()
    is_kept[np.flatnonzero(~is_kept)[:n_padding]] = True
    kept = torch.from_numpy(np.flatnonzero(is_kept))
    if multiple == 1 and is_kept.all():      # compiled code sees few graphs instead
        kept = None
    return Batch(
        torch.from_numpy(x), torch.from_numpy(y), *torch.from_numpy(logprobs),
        torch.tensor([c.advantage for c in completions]), torch.from_numpy(np.flatnonzero(y != IGNORE)),
        Prompts(torch.from_numpy(ids), torch.tensor(lengths), torch.tensor(of_row), kept))


def filled(lengths, width):
    """Return a flat mask over rows of this width, True up to each row's length."""
    return (np.arange(width) < np.array(lengths)[:, None]).ravel()


def token_cost(positions, G, P, B, T):
    """Return the cost in positions of a forward pass, by memory: those of the linear layers, 1/3 of padding,
    which attention alone computes, and 1/8 of the keys and values that it copies for each row."""
    padding = G * P + B * T - positions
    return positions + padding / 3 + B * (P + T) / 8


def widths(completions, multiple):
    """Return P and T of a batch of Completions, rounded up to a multiple."""
    P = max(len(c.prefix) for c in completions)
    T = max(len(c.ids) for c in completions)
    return round_up(P, multiple), round_up(T, multiple)


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def cost_of(completions, multiple=1):
    """Return the token_cost of a batch of Completions."""
    prefixes = {c.prefix for c in completions}
    positions = sum(map(len, prefixes)) + sum(len(c.ids) for c in completions)
    P, T = widths(completions, multiple)
    return token_cost(positions, len(prefixes), P, len(completions), T)


def micro_batches(completions, tokens, multiple=1):
    """Split Completions into lists of token_cost at most `tokens` (P and T rounded up to a multiple); a
    Completion that exceeds it alone gets its own list. Sorts by length (less padding) or by prompt (each
    prefix computed once), whichever costs less in total."""
    longest = {}                             # {prefix: length of its longest completion}
    for c in completions:
        longest[c.prefix] = max(longest.get(c.prefix, 0), len(c.ids))
    by_length = sorted(completions, key=lambda c: (-len(c.ids), c.prompt))
    by_prompt = sorted(completions, key=lambda c: (-longest[c.prefix], c.prompt, -len(c.ids)))
    splits = [cut(ordered, tokens, multiple) for ordered in (by_length, by_prompt)]
    return min(splits, key=lambda parts: sum(cost_of(part, multiple) for part in parts))


def cut(completions, tokens, multiple=1):
    """Cut a list of Completions into consecutive parts of token_cost at most `tokens` each."""
    parts = []
    prefixes = set()
    positions = 0
    P = 0
    T = 0
    for c in completions:
        positions += len(c.ids) + (0 if c.prefix in prefixes else len(c.prefix))
        prefixes.add(c.prefix)
        P = max(P, round_up(len(c.prefix), multiple))
        T = max(T, round_up(len(c.ids), multiple))
        if not parts or token_cost(positions, len(prefixes), P, len(parts[-1]) + 1, T) > tokens:
            parts.append([])
            prefixes = {c.prefix}
            positions = len(c.prefix) + len(c.ids)
            P, T = widths([c], multiple)
        parts[-1].append(c)
    return parts


@dataclass
class WorstCase:
    """Micro-batches of the longest possible prompts and answers."""
    prompt: int                              # tokens
    answer: int                              # tokens
    k_samples: int
    most: int                                # answers per optimizer step and rank

    @property
    def cost(self):
        """Return the token_cost of one answer."""
        positions = self.prompt / self.k_samples + self.answer
        return token_cost(positions, 1 / self.k_samples, self.prompt, 1, self.answer)

    def answers(self, tokens):
        """Return the number of answers that fit a micro-batch of this many tokens."""
        return min(self.most, max(1, int(tokens // self.cost)))

    def rows(self, tokens, context):
        """Return the number of sequences of length `context` with as many positions as that micro-batch."""
        return math.ceil(self.answers(tokens) * self.cost / context)

    def sizes(self, tokens):
        """Return micro-batches to try, in tokens, largest first: each of half the answers of the one before,
        the last of one answer."""
        sizes = [tokens]
        while sizes[-1] > math.ceil(self.cost):
            sizes.append(math.ceil(max(1, self.answers(sizes[-1]) // 2) * self.cost))
        return sizes

    def inputs(self, tokens, temperature, device):
        """Return the arguments of GPT.token_logprobs and GPT.divergence for such a micro-batch."""
        n = self.answers(tokens)
        n_prompts = math.ceil(n / self.k_samples)
        x = torch.zeros(n, self.answer, dtype=torch.long, device=device)
        ids = torch.zeros(n_prompts, self.prompt, dtype=torch.long, device=device)
        of_row = torch.arange(n, device=device) // self.k_samples
        every = torch.arange(ids.numel() + x.numel(), device=device)
        prompts = Prompts(ids, ids.new_full((n_prompts,), self.prompt), of_row, every)
        return x, x, temperature, prompts, every[:x.numel()]


@torch.no_grad()
def logprobs_of(model, hw, completions, tokens, temperature):
    """Yield (Completion, logprobs of its ids under the model), computed in micro-batches of at most `tokens`.
    With a sharded model, every rank must call this."""
    for part in distributed.in_step(model, micro_batches(completions, tokens, hw.length_multiple), []):
        batch = padded(part, hw.length_multiple).to(hw.device)
        with hw.autocast():
            logprobs = model.token_logprobs(batch.x, batch.y, temperature, batch.prefixes,
                                            batch.target_index)[0]
        for c, row in zip(part, logprobs.cpu().numpy()):
            yield c, row[:len(c.ids)].tolist()
