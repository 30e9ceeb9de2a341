"""Batched generation with a static KV cache: slots that are refilled, prompts that are computed once.

    engine = Engine(model, slots=64)
    for sample in engine.generate(Request(ids, num_samples=8, key=i) for i, ids in enumerate(prompts)):
        print(sample.request.key, sample.index, sample.ids, sample.reason)

Shapes: B rows in flight, H query heads, K key/value heads, G = H/K queries a key head, D channels a head, V ids.
"""
import copy
import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

BUCKET = 64                      # cache lengths that are read, and prompt lengths that are computed, are multiples of it
MASK63 = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Request:
    ids: list                                # the prompt's token ids
    num_samples: int = 1
    key: int = 0                             # names the question: a sample's noise depends on (seed, key, its index, position)
    max_new_tokens: int = 128


@dataclass
class Sampling:
    temperature: float = 1.0                 # 0: greedy
    top_k: int | None = None                 # of so many likeliest ids
    top_p: float = 1.0                       # of the likeliest ids that together reach it (Holtzman et al. 2020)
    min_p: float = 0.0                       # of ids at least so likely, as a share of the likeliest (Nguyen et al. 2024)
    stop: tuple = ()                         # token ids that end a sample; they are its last

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k is not None and self.top_k < 1:
            raise ValueError(f"{self} can't be sampled from: temperature is at least 0, top_k at least 1, top_p in (0, 1], min_p in "
                             "[0, 1].")


@dataclass
class Sample:
    request: Request
    index: int                               # 0 ... num_samples - 1
    ids: list = field(default_factory=list)  # new token ids
    logprobs: list = field(default_factory=list)       # of them, under the distribution that was sampled from
    reason: str = ""                         # stop | length


def uniform(seed, key, index, position):
    """A number in (0, 1) for each of the int64 tensors' elements that depends on nothing else: the counter-based generator
    splitmix64 (Steele et al. 2014), keyed four times."""
    x = torch.zeros_like(position)
    for part in (seed, key, index, position):
        x = (x ^ part) - 7046029254386353131
        x = (x ^ shifted(x, 30)) * -4658895280553007687
        x = (x ^ shifted(x, 27)) * -7723592293110705685
        x = x ^ shifted(x, 31)
    return (shifted(x, 11).double() + 0.5) * 2.0**-53


def shifted(x, bits):
    """Right shift of int64 as if it had no sign."""
    return (x >> bits) & (MASK63 >> (bits - 1))


def draw(logits, u, s):
    """Ids [B] drawn from fp32 logits [B, V] by inverting the distribution at u [B], and their log-probabilities under it."""
    if s.temperature == 0:
        logprobs, ids = logits.log_softmax(-1).max(-1)
        return ids, logprobs
    logits, candidates = logits / s.temperature, None
    if s.top_k or s.top_p < 1 or s.min_p > 0:
        logits, candidates = logits.topk(min(s.top_k or logits.shape[-1], logits.shape[-1]))     # in falling order
        p = logits.softmax(-1)
        outside = (p.cumsum(-1) - p >= s.top_p) | (p < s.min_p * p[:, :1])
        outside[:, 0] = False
        logits = logits.masked_fill(outside, -math.inf)
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().double().cumsum(-1)
    ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None]).clamp(max=logits.shape[-1] - 1)
    logprobs = logprobs.gather(1, ids)[:, 0]
    return (ids if candidates is None else candidates.gather(1, ids))[:, 0], logprobs


class Engine:
    def __init__(self, model, slots=64, context=None, sampling=None, seed=0, dtype=None):
        """slots: rows in flight at most; context: longest prompt and completion together; dtype: of weights and cache."""
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        if dtype is not None:
            self.model.to(dtype)
        self.c, self.slots, self.seed = model.config, slots, seed
        self.sampling = sampling or Sampling()
        self.context = min(context or self.c.block_size, self.c.block_size)
        weight = self.model.head_weight
        self.device, length = weight.device, -(-self.context // BUCKET) * BUCKET
        shape = (self.c.n_layer, slots, self.c.n_kv_head, length, self.c.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=self.device) for _ in range(2))
        self.stop = torch.tensor(self.sampling.stop, dtype=torch.long, device=self.device)

    def check(self, request):
        """ValueError with one sentence for what can't be sampled."""
        n, ids = len(request.ids), request.ids
        if not 0 < n < self.context:
            raise ValueError(f"A prompt of {n} tokens can't be continued: give 1 to {self.context - 1}, the context being {self.context}.")
        if min(ids) < 0 or max(ids) >= self.c.vocab_size:
            raise ValueError(f"A prompt has the token id {max(ids) if min(ids) >= 0 else min(ids)}, and the model's end at "
                             f"{self.c.vocab_size - 1}: encode it with the model's tokenizer.")
        if request.num_samples < 1 or request.max_new_tokens < 1:
            raise ValueError(f"num_samples={request.num_samples} and max_new_tokens={request.max_new_tokens} must be at least 1.")

    def load(self, model):
        """Take over the weights of a model of the same shape, in place."""
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.copy_(theirs.detach())

    @torch.inference_mode()
    def generate(self, requests):
        """Yield Samples as they finish. Requests are drawn from the iterable when slots are free, and no sooner."""
        requests, waiting = iter(requests), deque()                    # waiting: [request, next index, keys, values, logits]
        rows = []                                                      # Samples in flight; rows[i] has slot i
        state = torch.zeros(5, self.slots, dtype=torch.long, device=self.device)
        token, position, key, index, left = state                      # views, [slots]: the newest token and where it stands
        while True:
            fresh = self.fill(requests, waiting, rows, state)
            if not rows:
                return
            B = len(rows)
            if fresh is None:
                logits = self.decode(token[:B], position[:B])
                position[:B] += 1
                which = torch.arange(B, device=self.device)
            else:                                                      # rows that have their prompt's logits already
                which, logits = fresh
            u = uniform(self.seed, key[which], index[which], position[which])
            ids, logprobs = draw(logits, u, self.sampling)
            token[which] = ids
            left[which] -= 1
            stopped = torch.isin(ids, self.stop)
            over = (stopped | (left[which] == 0)).tolist()
            for i, new, logprob in zip(which.tolist(), ids.tolist(), logprobs.tolist()):
                rows[i].ids.append(new)
                rows[i].logprobs.append(logprob)
            finished = [(i, "stop" if s else "length") for i, o, s in zip(which.tolist(), over, stopped.tolist()) if o]
            for i, reason in reversed(finished):                       # the last row takes the place of one that is done
                rows[i].reason = reason
                yield rows[i]
                last = len(rows) - 1
                if i != last:
                    rows[i], state[:, i] = rows[last], state[:, last]
                    self.k[:, i], self.v[:, i] = self.k[:, last], self.v[:, last]
                rows.pop()

    def fill(self, requests, waiting, rows, state):
        """Put samples into free slots. (their rows, logits of their first token), or None if there is no new one."""
        placed, logits = [], []
        while len(rows) < self.slots:
            if not waiting:
                drawn = []
                for request in requests:
                    self.check(request)
                    drawn.append(request)
                    if sum(r.num_samples for r in drawn) >= self.slots - len(rows):
                        break
                if not drawn:
                    break
                waiting.extend(self.prefill(drawn))
            request, index, k, v, first = waiting[0]
            i, n = len(rows), len(request.ids)
            self.k[:, i, :, :n], self.v[:, i, :, :n] = k, v
            room = min(request.max_new_tokens, self.context - n)
            state[:, i] = torch.tensor([0, n, request.key, index, room])
            rows.append(Sample(request, index))
            placed.append(i)
            logits.append(first)
            waiting[0][1] += 1
            if waiting[0][1] == request.num_samples:
                waiting.popleft()
        return (torch.tensor(placed, device=self.device), torch.stack(logits)) if placed else None

    def prefill(self, requests):
        """[request, 0, keys, values [L, K, n, D], logits [V]] of each, prompts of about the same length together."""
        found = {}
        by_bucket = {}
        for request in requests:
            by_bucket.setdefault(-(-len(request.ids) // BUCKET) * BUCKET, []).append(request)
        for T, group in by_bucket.items():
            T = min(T, self.c.block_size)
            x = torch.zeros(len(group), T, dtype=torch.long, device=self.device)
            for row, request in zip(x, group):
                row[:len(request.ids)] = torch.tensor(request.ids)     # right padding: causal rows never see it
            keys, values = [], []

            def keep(q, k, v, layer):
                keys.append(k.transpose(1, 2))
                values.append(v.transpose(1, 2))
                return F.scaled_dot_product_attention(q.transpose(1, 2), keys[-1], values[-1], is_causal=True,
                                                      enable_gqa=True).transpose(1, 2)
            h = self.layers(x, torch.arange(T, device=self.device), keep)
            for i, request in enumerate(group):
                n = len(request.ids)
                found[request] = [request, 0, torch.stack([k[i, :, :n] for k in keys]), torch.stack([v[i, :, :n] for v in values]),
                                  self.model.logits(h[i, n - 1])]
        return [found[request] for request in requests]

    def decode(self, token, position):
        """Logits [B, V] after one more token [B] of each row, at its position [B]."""
        B, rows = len(token), torch.arange(len(token), device=self.device)
        C = (int(position.max()) // BUCKET + 1) * BUCKET
        mask = (torch.arange(C, device=self.device) <= position[:, None])[:, None, None]

        def cached(q, k, v, layer):
            self.k[layer, rows, :, position], self.v[layer, rows, :, position] = k[:, 0], v[:, 0]
            q = q[:, 0].unflatten(1, (self.c.n_kv_head, -1))           # [B, K, G, D]: a key head's queries share its cache
            y = F.scaled_dot_product_attention(q, self.k[layer, :B, :, :C], self.v[layer, :B, :, :C], attn_mask=mask)
            return y.flatten(1, 2)[:, None]
        return self.model.logits(self.layers(token[:, None], position[:, None], cached)[:, 0])

    def layers(self, x, position, attention):
        """Token ids [B, T] at positions [T] or [B, T] -> what the head reads [B, T, C]; attention(q, k, v, layer) keeps keys."""
        model = self.model
        h = model.token_embedding(x)
        if model.position_embedding is not None:
            h = h + model.position_embedding(position)
        cos, sin = (None, None) if model.cos is None else (model.cos[position], model.sin[position])
        for layer, block in enumerate(model.blocks):
            q, k, v = block.attention.heads(block.attention_norm(h), cos, sin)
            h = h + block.attention.out(attention(q, k, v, layer).flatten(2))
            h = h + block.mlp(block.mlp_norm(h))
        return model.final_norm(h)
