"""From logits to tokens: Sampling, noise that depends on the sample alone, the draw, stop strings.

Shapes: B rows, V ids.
"""
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

TOP_P_AMONG = 1024     # likeliest ids that top_p alone chooses from: sorting a whole vocabulary would be slow


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0       # 0: greedy
    top_k: int | None = None       # of so many likeliest ids
    top_p: float = 1.0             # of the likeliest ids that together reach it (Holtzman et al. 2020)
    min_p: float = 0.0             # of ids with at least this share of the likeliest's (Nguyen et al. 2024)
    stop: tuple = ()               # token ids that end a sample; they are its last
    stop_strings: tuple = ()       # texts that end a sample, with the token that completes them
    full_logprobs: bool = False    # also log-probabilities at T = 1 over all ids

    def __post_init__(self):
        object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.stop_strings, str) or "" in self.stop_strings:
            raise ValueError(f"stop_strings={self.stop_strings!r} should be a tuple of texts, "
                             "none of them empty.")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        self.require("temperature", 0 <= self.temperature < math.inf, "at least 0")
        self.require("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None")
        self.require("top_p", 0 < self.top_p <= 1, "above 0, and at most 1")
        self.require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")

    def require(self, name, holds, bounds):
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)} can't be sampled from: it must be {bounds}.")


# --- noise ---

def mix(x, part):
    """Run a round of the counter-based generator splitmix64 (Steele et al. 2014) on int64 x."""
    x = (x ^ part) - 7046029254386353131
    x = (x ^ shift_right(x, 30)) * -4658895280553007687
    x = (x ^ shift_right(x, 27)) * -7723592293110705685
    return x ^ shift_right(x, 31)


def shift_right(x, bits):
    """Shift int64 as if it had no sign."""
    return (x >> bits) & (2**(64 - bits) - 1)


def stream(seed, key, index):
    """Return the int64 that stands for a sample, elementwise; `uniform` draws from it."""
    return mix(mix(mix(torch.zeros_like(index), seed), key), index)


def uniform(stream, position):
    """Return a float64 in (0, 1) for each element, which depends on the sample and the position alone."""
    return (((mix(stream, position) >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


# --- the draw ---

def draw(logits, u, sampling):
    """Draw ids [B] from fp32 logits [B, V] by inverting the distribution at u [B].

    Return them and their log-probabilities under the distribution they are drawn from (greedy: at T = 1).
    """
    if sampling.temperature == 0:
        p, ids = logits.softmax(-1).max(-1)
        return ids, p.log()
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / sampling.temperature                   # at most 0, however small the temperature is
    candidates = None
    if sampling.top_k or sampling.top_p < 1:
        logits, candidates = likeliest(logits, sampling.top_k, sampling.top_p)
    if sampling.min_p:
        threshold = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < threshold, -math.inf)
    p = logits.softmax(-1)
    ids = invert(p, u)[:, None].clamp_(max=p.shape[-1] - 1)
    logprobs = p.gather(1, ids)[:, 0].log()
    if candidates is not None:
        ids = candidates.gather(1, ids)
    return ids[:, 0], logprobs


def likeliest(logits, top_k, top_p):
    """Return the logits [B, n] that are drawn from, in falling order, and their ids [B, n].

    Where top_p leaves an id out, its logit is -inf. Without top_k, it adds up shares of the mass of all ids.
    """
    V = logits.shape[-1]
    if top_k:
        logits, ids = logits.topk(min(top_k, V))
        total = logits.logsumexp(-1, keepdim=True)
    else:
        total = logits.logsumexp(-1, keepdim=True)
        logits, ids = logits.topk(min(TOP_P_AMONG, V))
    p = (logits - total).exp()
    return logits.masked_fill(p.cumsum(-1) - p >= top_p, -math.inf), ids


def invert(p, u):
    """Return the first id [B] at which the running sum of p [B, V] reaches the share u [B] of the whole.

    Of many ids first the block of 256, then the id in it: running sums of all V in float64 would take three
    times as long.
    """
    if p.shape[-1] <= 512:
        sums = p.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(sums, u[:, None] * sums[:, -1:])[:, 0]
    p = F.pad(p, (0, -p.shape[-1] % 256)).unflatten(1, (-1, 256))
    sums = p.sum(-1).double().cumsum(-1)                     # of whole blocks
    target = (u * sums[:, -1])[:, None]
    block = torch.searchsorted(sums, target)
    block = block.clamp_(max=sums.shape[1] - 1)              # NaN would be past the end
    before = F.pad(sums, (1, 0)).gather(1, block)
    # The target's share of its block lies in (0, 1]: an id of probability 0 is never reached.
    share = (target - before) / (sums.gather(1, block) - before)
    sums = p.gather(1, block[..., None].expand(-1, -1, 256))[:, 0].double().cumsum(-1)
    return (block * 256 + torch.searchsorted(sums, share * sums[:, -1:]))[:, 0]


# --- stops ---

class StopStrings:
    """Finds the token that completes one of the texts that end a sample. decode: ids -> text."""

    def __init__(self, strings, decode, vocab_size):
        self.strings = strings
        self.decode = decode
        longest = max(len(string.encode()) for string in strings)
        self.tail = longest + 3                              # ids to decode: none is shorter than a byte
        self.last = {string[-1] for string in strings}
        self.has_last = np.full(vocab_size, -1, dtype=np.int8)       # by id: in its text; -1: not known yet

    def may_complete(self, ids):
        """Return whether a stop string may end in each of ids [B, steps], whose text has its last character.

        Decoding every row after every step took 2-9% of the time of a small model (docs/notes.md).
        """
        for i in np.unique(ids[self.has_last[ids] < 0]):
            text = self.decode([i])
            self.has_last[i] = any(c in text or not c.isascii() or c.isspace() for c in self.last)
        return self.has_last[ids] > 0

    def completed_by(self, new, before):
        """Return how many `new` ids, which follow those before, complete a stop string; 0: they don't."""
        for n in range(1, len(new) + 1):
            text = self.decode((before + new[:n])[-self.tail:])
            if any(string in text for string in self.strings):
                return n
        return 0
