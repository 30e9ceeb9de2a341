"""From logits to tokens: filters, per-sample noise, the draw, stop strings. Shapes: B rows, V ids."""
import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

TOP_P_CANDIDATES = 1024        # likeliest ids among which top_p looks first: sorting the vocabulary is slow


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0       # 0: greedy
    top_k: int | None = None       # only the k likeliest ids
    top_p: float = 1.0             # only the likeliest ids that together reach p (Holtzman et al. 2020)
    min_p: float = 0.0             # only ids with at least this share of the top one's (Nguyen et al. 2024)
    stop: tuple = ()               # token ids that end a sample and are included in it
    stop_strings: tuple = ()       # texts that end a sample, including the token that completes them

    def __post_init__(self):
        object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.stop_strings, str) or "" in self.stop_strings:
            raise ValueError(f"stop_strings={self.stop_strings!r} should be a tuple of texts "
                             "that are not empty.")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        self.require("temperature", 0 <= self.temperature < math.inf, "at least 0")
        self.require("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None")
        self.require("top_p", 0 < self.top_p <= 1, "above 0, and at most 1")
        self.require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")

    def require(self, name, holds, bounds):
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)} can't be sampled from: it must be {bounds}.")


# --- noise ---

def splitmix64(x, part):
    """Return a round of the counter-based generator splitmix64 (Steele et al. 2014) on int64 x."""
    x = (x ^ part) - 7046029254386353131
    x = (x ^ shift_right(x, 30)) * -4658895280553007687
    x = (x ^ shift_right(x, 27)) * -7723592293110705685
    return x ^ shift_right(x, 31)


def shift_right(x, bits):
    """Shift int64 x right without extending the sign."""
    return (x >> bits) & (2**(64 - bits) - 1)


def stream(seed, key, index):
    """Return the int64 stream of each sample, elementwise; `uniform` draws from it."""
    return splitmix64(splitmix64(splitmix64(torch.zeros_like(index), seed), key), index)


def uniform(stream, position):
    """Return a float64 in (0, 1) for each element, a function of only the sample and the position."""
    return (((splitmix64(stream, position) >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


# --- the draw ---

def draw(logits, u, sampling):
    """Draw ids [B] from fp32 logits [B, V] by inverting the distribution at u [B].

    Return the ids and their logprobs under the sampling distribution (greedy: at T = 1). On a GPU, top_p
    without top_k keeps at most TOP_P_CANDIDATES ids, since a check of their mass would wait for each step; on
    a CPU it keeps all.
    """
    raw = logits
    if sampling.temperature == 0:
        p, ids = logits.softmax(-1).max(-1)
        return ids, p.log()
    if sampling.temperature != 1:
        logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / max(sampling.temperature, 1e-38)   # fp32 rounds less than this to 0
    candidates = None
    is_cut = None
    if sampling.top_k or sampling.top_p < 1:
        logits, candidates, mass = top_candidates(logits, sampling.top_k, sampling.top_p)
        if not sampling.top_k and raw.shape[-1] > TOP_P_CANDIDATES:
            if raw.device.type == "cpu":
                is_cut = mass < sampling.top_p
            else:
                warnings.warn(f"Without top_k, top_p keeps at most {TOP_P_CANDIDATES:,} ids on a GPU.")
    if sampling.min_p:
        threshold = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < threshold, -math.inf)
    p = logits.softmax(-1)
    ids = invert(p, u)[:, None].clamp_(max=p.shape[-1] - 1)
    logprobs = p.gather(1, ids)[:, 0].log()
    if candidates is not None:
        ids = candidates.gather(1, ids)
    ids = ids[:, 0]
    if is_cut is not None and is_cut.any():
        all_ids = replace(sampling, top_k=raw.shape[-1])
        ids[is_cut], logprobs[is_cut] = draw(raw[is_cut], u[is_cut], all_ids)
    return ids, logprobs


def top_candidates(logits, top_k, top_p):
    """Return the candidates' logits [B, n] in descending order, their ids [B, n], and their mass [B].

    The logit is -inf where top_p excludes an id. Without top_k, probabilities are those among all ids.
    """
    V = logits.shape[-1]
    if top_k:
        logits, ids = logits.topk(min(top_k, V))
        total = logits.logsumexp(-1, keepdim=True)
    else:
        total = logits.logsumexp(-1, keepdim=True)
        logits, ids = logits.topk(min(TOP_P_CANDIDATES, V))
    p = (logits - total).exp()
    sums = p.cumsum(-1)
    return logits.masked_fill(sums - p >= top_p, -math.inf), ids, sums[:, -1]


def invert(p, u):
    """Return the first id [B] at which the cumulative sum of p [B, V] reaches the share u [B] of the total.

    For many ids this finds the block of ids, then the id in it: cumulative sums of all V in float64 would
    take three times as long.
    """
    V = p.shape[-1]
    if V <= 512:
        sums = p.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(sums, u[:, None] * sums[:, -1:])[:, 0]
    size = 256
    rest = V % size                          # not padded: a copy of Qwen's p takes two thirds of a draw
    sums = p[:, :V - rest].unflatten(1, (-1, size)).sum(-1)
    if rest:
        sums = torch.cat((sums, p[:, -rest:].sum(-1, keepdim=True)), 1)
    sums = sums.double().cumsum(-1)                          # up to the end of each block
    target = (u * sums[:, -1])[:, None]
    block = torch.searchsorted(sums, target)
    block = block.clamp_(max=sums.shape[1] - 1)              # NaN would be past the end
    before = F.pad(sums, (1, 0)).gather(1, block)
    # The target's share of its block lies in (0, 1]: an id of probability 0 is never reached.
    share = (target - before) / (sums.gather(1, block) - before)
    ids = block * size + torch.arange(size, device=p.device)
    in_block = p.gather(1, ids.clamp(max=V - 1)).masked_fill_(ids >= V, 0)
    sums = in_block.double().cumsum(-1)
    return (block * size + torch.searchsorted(sums, share * sums[:, -1:]))[:, 0]


# --- stops ---

class StopStrings:
    """Find the token that completes a stop string. decode: ids -> text."""

    def __init__(self, strings, decode, vocab_size):
        self.strings = strings
        self.decode = decode
        longest = max(len(string.encode()) for string in strings)
        self.tail = longest + 3                              # ids to decode: each has at least one byte
        self.last_characters = {string[-1] for string in strings}
        self.has_last = np.full(vocab_size, -1, dtype=np.int8)       # by id: 0, 1 or -1 (not known yet)

    def may_complete(self, ids):
        """Return whether each of ids [B, steps] may end a stop string: its text has a last character.

        Decoding every row after every step took 2-9% of a small model's time (docs/notes.md).
        """
        for i in np.unique(ids[self.has_last[ids] < 0]):
            text = self.decode([i])
            self.has_last[i] = any(c in text or not c.isascii() or c.isspace() for c in self.last_characters)
        return self.has_last[ids] > 0

    def completed_by(self, new, before):
        """Return how many `new` ids after `before` complete a stop string, or 0."""
        for n in range(1, len(new) + 1):
            text = self.decode((before + new[:n])[-self.tail:])
            if any(string in text for string in self.strings):
                return n
        return 0
