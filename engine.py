"""Batched generation with a static KV cache: slots that are refilled, prompts that are computed once.

    engine = Engine(model, sampling=Sampling(temperature=0.8, stop=(tokenizer.eos,)))
    for sample in engine.generate(Request(ids, num_samples=8, key=i) for i, ids in enumerate(prompts)):
        print(sample.request.key, sample.index, sample.ids, sample.reason)

Shapes: B rows in flight, L layers, H query heads, K key/value heads, G = H/K queries a key head, D channels a head, C
places of the cache that are read, V ids. The host launches steps and looks at their results every `poll` steps.
"""
import math
import platform
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import ATTENTION
from model import GPT, merged, rotations
from runtime import memory

TOP_P_AMONG = 1024               # likeliest ids that top_p alone chooses from, where sorting a whole vocabulary would be slow
MOST_SLOTS = {"cpu": 512, "cuda": 512}                # where memory would allow for more
GROUP, SORT_EVERY = 128, 32       # on a CPU: rows whose attention is computed together, looks after which rows are sorted by position


@dataclass(frozen=True, eq=False)
class Request:
    ids: list                                # the prompt's token ids; or an array of them
    num_samples: int = 1
    key: int = 0                             # names the question: a sample's noise depends on (seed, key, its index, position)
    max_new_tokens: int = 128
    first_sample: int = 0                    # index of the first: samples of a question can be asked for in parts

    def __post_init__(self):
        object.__setattr__(self, "ids", [int(i) for i in self.ids])


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0                 # 0: greedy
    top_k: int | None = None                 # of so many likeliest ids
    top_p: float = 1.0                       # of the likeliest ids that together reach it (Holtzman et al. 2020)
    min_p: float = 0.0                       # of ids at least so likely, as a share of the likeliest (Nguyen et al. 2024)
    stop: tuple = ()                         # token ids that end a sample; they are its last
    stop_strings: tuple = ()                 # texts that end a sample, with the token that completes them
    full_logprobs: bool = False              # also log-probabilities at T = 1 over all ids

    def __post_init__(self):
        object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.stop_strings, str) or "" in self.stop_strings:
            raise ValueError(f"stop_strings={self.stop_strings!r} should be a tuple of texts, none of them empty.")
        for name, holds, needed in (("temperature", 0 <= self.temperature < math.inf, "at least 0"),
                                    ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None"),
                                    ("top_p", 0 < self.top_p <= 1, "above 0, and at most 1"),
                                    ("min_p", 0 <= self.min_p <= 1, "from 0 to 1")):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} can't be sampled from: it must be {needed}.")


@dataclass
class Sample:
    request: Request
    index: int                               # first_sample ... first_sample + num_samples - 1
    ids: list = field(default_factory=list)  # new token ids
    logprobs: list = field(default_factory=list)       # of them, nats, under the distribution sampled from (greedy: at T = 1)
    full_logprobs: list = field(default_factory=list)  # at T = 1 over all ids, if asked for
    reason: str = ""                         # stop | length


@dataclass
class Progress:
    slots: int
    busy: int = 0                            # of them
    tokens: int = 0                          # sampled so far
    steps: int = 0                           # of the model, all rows at once
    samples: int = 0                         # finished
    requests: int = 0                        # all of whose samples are finished
    in_flight: object = None                 # function -> [(Sample, its ids so far)]
    began: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self):
        return self.tokens / (time.perf_counter() - self.began)


@dataclass
class Pending:
    """A request some of whose samples have no slot yet."""
    request: Request
    indices: deque                           # of the samples to come
    slots: list = field(default_factory=list)          # given in this round
    waits: bool = False                      # its keys and values are in the cache's last row


# --- drawing ---

def mix(x, part):
    """A round of the counter-based generator splitmix64 (Steele et al. 2014) on int64, keyed with `part`."""
    def shifted(x, bits):                    # right, as if int64 had no sign
        return (x >> bits) & (2**(64 - bits) - 1)
    x = (x ^ part) - 7046029254386353131
    x = (x ^ shifted(x, 30)) * -4658895280553007687
    x = (x ^ shifted(x, 27)) * -7723592293110705685
    return x ^ shifted(x, 31)


def stream(seed, key, index):
    """The int64 that stands for a sample, elementwise; `uniform` draws from it."""
    return mix(mix(mix(torch.zeros_like(index), seed), key), index)


def uniform(stream, position):
    """A float64 in (0, 1) for each element, which depends on nothing but the sample and the position."""
    return (((mix(stream, position) >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


def invert(p, u):
    """The first id [B] at which the running sum of p [B, V] reaches the share u [B] of the whole. Of many ids first the block of 256,
    then the id in it: running sums of all V in float64 would take three times as long."""
    if p.shape[-1] <= 512:
        upto = p.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(upto, u[:, None] * upto[:, -1:])[:, 0]
    p = F.pad(p, (0, -p.shape[-1] % 256)).unflatten(1, (-1, 256))
    upto = p.sum(-1).double().cumsum(-1)
    target = (u * upto[:, -1])[:, None]
    block = torch.searchsorted(upto, target).clamp_(max=upto.shape[1] - 1)             # NaN would be past the end
    before = F.pad(upto, (1, 0)).gather(1, block)
    inside = p.gather(1, block[..., None].expand(-1, -1, 256))[:, 0].double().cumsum(-1)
    share = (target - before) / (upto.gather(1, block) - before)     # in (0, 1]: an id of probability 0 is never reached
    return (block * 256 + torch.searchsorted(inside, share * inside[:, -1:]))[:, 0]


def draw(logits, u, s):
    """Ids [B] drawn from fp32 logits [B, V] by inverting the distribution at u [B], and their log-probabilities under it."""
    if s.temperature == 0:
        p, ids = logits.softmax(-1).max(-1)
        return ids, p.log()
    logits, candidates = (logits - logits.amax(-1, keepdim=True)) / s.temperature, None        # at most 0, however small T is
    if s.top_k or s.top_p < 1:
        total = None if s.top_k else logits.logsumexp(-1, keepdim=True)
        logits, candidates = logits.topk(min(s.top_k or TOP_P_AMONG, logits.shape[-1]))          # in falling order
        p = (logits - (logits.logsumexp(-1, keepdim=True) if total is None else total)).exp()
        logits = logits.masked_fill(p.cumsum(-1) - p >= s.top_p, -math.inf)
    if s.min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(s.min_p), -math.inf)
    p = logits.softmax(-1)
    ids = invert(p, u)[:, None].clamp_(max=p.shape[-1] - 1)
    logprobs = p.gather(1, ids)[:, 0].log()
    return (ids if candidates is None else candidates.gather(1, ids))[:, 0], logprobs


# --- the engine ---

class Packed(nn.Module):
    """A linear layer whose weight lies in memory as oneDNN reads it: on a CPU, at 20 rows of SmolLM2-360M, 1.6 times the speed of
    F.linear in bf16 and 2.7 times in fp32."""

    def __init__(self, bias=None):
        super().__init__()
        self.bias = bias

    def pack(self, weight):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device, dtype):
        return device.type == "cpu" and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available() and (
            dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def bucket(n, least):
    """n rounded up to a multiple of `least` and of an eighth to a quarter of n, so that there are few different ones."""
    step = max(least, 2 ** max(0, n.bit_length() - 3))
    return -(-n // step) * step


def at_a_time(device):
    """Tokens of prompts that are computed together, padding included: enough to keep the device busy."""
    return {"cuda": 2**14}.get(device, 512)


def cache_bytes(config, slots, context, dtype):
    """Of keys and values: of the slots, and of one more, where a prompt waits for its other samples."""
    return 2 * config.n_layer * (slots + 1) * config.n_kv_head * bucket(context, 64) * config.head_dim * dtype.itemsize


def slots_that_fit(config, context, dtype, device, reserved=0):
    """As many as nine tenths of the free memory hold, but for `reserved` bytes, with what a step and a prefill need beside the cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()                                       # what PyTorch holds back counts as free
    beside = 4 * (config.n_head * config.head_dim + 2 * config.mlp_hidden + 4 * config.n_embd) * at_a_time(device.type)
    a_slot = cache_bytes(config, 0, context, dtype) + 16 * config.padded_vocab_size
    return max(1, min(MOST_SLOTS.get(device.type, 64), int((0.9 * (memory.available(device) - reserved) - beside) / a_slot) - 1))


class Engine:
    """generate() is all there is to it; load() gives it new weights.

    slots: rows in flight, None: as many as fit the free memory (MOST_SLOTS); context: longest prompt and completion together, in
    tokens; dtype: of weights and cache; decode: ids -> text, needed for stop strings; poll: steps between two looks at the results;
    deterministic: every product has the same shape whoever is in the batch, so that a sample is the same bit for bit, in company or
    alone (at the same `slots` and `context`). Otherwise its noise is, and its log-probabilities are up to rounding: 1e-5 in fp32
    without TF32; in bf16 now and then another token is drawn.
    """

    @torch.inference_mode(False)
    def __init__(self, model, slots=None, context=None, sampling=None, seed=0, dtype=None, deterministic=False, decode=None, poll=None,
                 cuda_graphs=True):
        self.c, self.device = model.config, model.head_weight.device
        self.dtype, self.seed = dtype or model.head_weight.dtype, seed
        self.sampling, self.decode = sampling or Sampling(), decode
        self.default = self.sampling
        if self.sampling.stop_strings and not decode:
            raise ValueError("Stop strings need the function that turns ids into text: give Engine decode=tokenizer.decode.")
        self.tail = max(map(len, map(str.encode, self.sampling.stop_strings)), default=0) + 3        # ids: none is shorter than a byte
        self.context, self.deterministic = min(self.c.block_size if context is None else context, self.c.block_size), deterministic
        cuda = self.device.type == "cuda"
        self.grows = self.device.type == "cpu" and not deterministic   # the cache's rows, with what they hold
        self.poll, self.cuda_graphs = (8 if cuda else 1) if poll is None else poll, cuda and cuda_graphs
        if self.poll < 1 or self.context < 2 or slots is not None and slots < 1:
            raise ValueError(f"slots={slots} and poll={self.poll} must be at least 1, and context={self.context} at least 2.")
        self.side = torch.cuda.Stream(self.device) if cuda else None   # where graphs are recorded
        self.now = None                                                # Progress of the generate() whose rows are in the slots

        short = self.device.type == "cpu" and self.dtype == torch.bfloat16 and self.context <= 1024
        with torch.device("meta"):
            self.model = GPT(self.c, "math" if short else "sdpa")
        self.head = Packed() if Packed.works(self.device, self.dtype) else None
        if self.head:
            self.model.head = None
            for name, module in list(self.model.named_modules()):
                if isinstance(module, nn.Linear):
                    self.model.set_submodule(name, Packed(module.bias))
        self.model.to(self.dtype).to_empty(device=self.device).requires_grad_(False).eval()
        self.model.cos, self.model.sin = (None if t is None else t.to(self.device, self.dtype) for t in rotations(self.c))
        self.load(model)
        self.allocate(slots_that_fit(self.c, self.context, self.dtype, self.device) if slots is None else slots)

    @torch.no_grad()
    def load(self, model):
        """Take over the weights of a model of the same shape, adapters merged in fp32. Graphs stay valid; a generate() that has
        not come to its end can't go on, since its keys and values are the old weights'."""
        weights, self.now = merged(model), None
        in_blocks = sum(weight.numel() for name, weight in weights.items() if name.startswith("blocks."))
        self.weight_bytes = self.dtype.itemsize * (in_blocks + model.head_weight.numel())            # that a step reads
        for name, mine in self.model.named_parameters():
            mine.copy_(weights[name])
        for name, module in self.model.named_modules():
            if isinstance(module, Packed):
                module.pack(weights[f"{name}.weight"].to(self.dtype))
        if self.head:
            self.head.pack(model.head_weight.detach().to(self.dtype))

    # --- memory ---

    def allocate(self, slots):
        """Cache [L, slots + 1, K, T, D] and the state of each slot; of half the slots if they don't fit."""
        self.slots, c, T = slots, self.c, bucket(self.context, 64)
        self.graphs, self.k, self.v, self.room = {}, None, None, None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        shape = (c.n_layer, slots + 1, c.n_kv_head, T, c.head_dim)
        try:
            self.room = torch.zeros(2, math.prod(shape), dtype=self.dtype, device=self.device)
        except Exception as e:
            if slots == 1 or not memory.is_out_of_memory(e):
                raise
        if self.room is None:
            return self.allocate(slots // 2)
        self.lay_out(T)

        def numbers(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        self.state = numbers(2, slots)                                 # newest token, its position
        # The sample's noise at each position, drawn when it gets its slot: in a step that would be twenty small kernels.
        self.noise = torch.zeros(slots, self.context, dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device)
        self.places = torch.arange(T, device=self.device)
        self.seen, self.unseen = torch.tensor([[0.0], [-math.inf]], dtype=self.dtype, device=self.device)
        self.tick = numbers(1)                                         # steps since the last look, whose results these are:
        self.new_ids, self.new_logprobs = numbers(self.poll, slots), numbers(self.poll, 2, slots, dtype=torch.float32)
        # The host's notes of each slot: tokens of the prompt, new ones so far, new ones at most; what they are.
        self.prompt, self.count, self.limit = np.zeros((3, slots), dtype=np.int64)
        self.ids = np.zeros((slots, self.context + self.poll), dtype=np.int64)
        self.logprobs = np.zeros((slots, 2, self.context + self.poll), dtype=np.float32)
        self.last_characters = np.full(c.vocab_size, -1, dtype=np.int8)          # what may_complete has found out; -1: nothing yet

    def bytes_read(self, lengths):
        """What the last generate() had to read at least: the weights in each step, and for each token the keys and values of those before
        it. lengths: of its samples, (prompt, new tokens)."""
        return self.now.steps * self.weight_bytes + cache_bytes(self.c, 0, 64, self.dtype) / 64 * sum(n * p + n * (n + 1) / 2 for p, n in lengths)

    def lay_out(self, T, kept=0):
        """The cache with T places a row, in the memory that is there for the longest; the first `kept` of each stay. A CPU reads whole rows
        in bf16 faster than parts of them, so there they grow with what is read (NOTES.md)."""
        c = self.c
        shape = (2, c.n_layer, self.slots + 1, c.n_kv_head, T, c.head_dim)
        wider = self.room[:, :math.prod(shape[1:])].view(shape)
        if kept:
            for new, old in zip(wider, (self.k, self.v)):
                for layer in reversed(range(c.n_layer)):               # a layer comes to lie where those behind it lay
                    new[layer, :, :, :kept] = old[layer, :, :, :kept].clone()
        self.k, self.v = wider
        self.place = torch.arange(self.slots * c.n_kv_head, device=self.device).view(self.slots, -1) * T       # where a key head's row begins

    # --- on the device ---

    def prefill(self, prompts):
        """Keys and values of prompts (slot, ids), those of about the same length together, into their slots."""
        prompts = sorted((p for p in prompts if p[1]), key=lambda p: len(p[1]))
        while prompts:
            T = len(prompts[-1][1])
            n = 1 if self.deterministic else max(1, at_a_time(self.device.type) // T)
            prompts, group = prompts[:-n], prompts[-n:]
            x = torch.tensor([ids + [0] * (T - len(ids)) for _, ids in group], device=self.device)     # causal rows never see padding
            slots = torch.tensor([slot for slot, _ in group], device=self.device)

            def remember(keys, values):
                def attention(q, k, v):
                    keys[slots, :, :T] = k.transpose(1, 2)
                    values[slots, :, :T] = v.transpose(1, 2)
                    return ATTENTION[self.model.backend](q, k, v)
                return attention
            self.model.hidden(x, None, [remember(k, v) for k, v in zip(self.k, self.v)])

    def copy(self, source, slots, n):
        """The first n keys and values of a slot to other slots."""
        for cache in (self.k, self.v):
            cache[:, slots, :, :n] = cache[:, source, None, :, :n].clone()

    def step(self, B, groups):
        """One more token of rows 0 ... B-1. groups: (first row, last row + 1, places of the cache that these rows read). Nothing here
        waits for the device."""
        token, position = self.state[:, :B]
        biases = [self.bias(position[first:last], C) for first, last, C in groups]
        where = (self.place[:B] + position[:, None]).flatten()
        caches = [self.remembered(k, v, groups, where, biases) for k, v in zip(self.k, self.v)]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):         # of the fused kernels the one that takes a mask
            h = self.model.hidden(token[:, None], position[:, None], caches)[:, 0]
        logits = self.model.logits(h, self.head)
        if self.device.type == "mps":                                  # which has no float64
            logits = logits.cpu()
        noise = self.noise[:B].gather(1, position[:, None].to(self.noise.device))[:, 0]
        ids, logprobs = draw(logits, noise, self.sampling)
        full = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1) if self.sampling.full_logprobs else logprobs
        self.new_ids[:, :B].index_copy_(0, self.tick, ids[None].to(self.device))
        self.new_logprobs[:, :, :B].index_copy_(0, self.tick, torch.stack((logprobs, full))[None].to(self.device))
        token.copy_(ids)
        position.add_(1).clamp_(max=self.context - 1)                  # a row that is over runs on until the next look
        self.tick += 1

    def bias(self, position, C):
        """-inf for the places past each row's position, else 0: [B, K, G, C], on a CPU [B K, G, C]."""
        B, K, G = len(position), self.c.n_kv_head, self.c.n_head // self.c.n_kv_head
        bias = torch.where(self.places[:C] > position[:, None], self.unseen, self.seen)[:, None, None].expand(B, K, G, C)
        return bias.flatten(0, 1) if self.device.type == "cpu" else bias

    def remembered(self, keys, values, groups, where, biases):
        """Attention of a layer in a step. The G queries of a key head are the rows of one product: its cache is read once and
        not repeated. On a CPU the products are written out: in bf16 at least twice the speed of PyTorch's fused kernel (NOTES.md)."""
        K, D = keys.shape[1], keys.shape[3]

        def of_group(q, first, last, C, bias):
            q, k, v = q[first:last].reshape(last - first, K, -1, D), keys[first:last, :, :C], values[first:last, :, :C]
            if self.device.type != "cpu":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).reshape(last - first, 1, -1, D)
            q, k, v = (z.flatten(0, 1) for z in (q, k, v))
            if self.dtype == torch.bfloat16:                           # whose products of parts of rows take several times as long
                k, v = k.contiguous(), v.contiguous()
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=D**-0.5)
            return scores.softmax(-1).bmm(v).view(last - first, 1, -1, D)

        def attention(q, k, v):
            for cache, new in ((keys, k), (values, v)):
                cache.view(-1, D).index_copy_(0, where, new.reshape(-1, D))
            parts = [of_group(q, *group, bias) for group, bias in zip(groups, biases)]
            return torch.cat(parts) if parts[1:] else parts[0]
        return attention

    def launch(self, B, groups):
        """A step; on a GPU as a CUDA graph, recorded when its shape comes for the first time."""
        if not self.cuda_graphs:
            return self.step(B, groups)
        key = B, groups, self.sampling
        with torch.cuda.device(self.device):
            if key not in self.graphs:
                before, graph = (self.state.clone(), self.tick.clone()), torch.cuda.CUDAGraph()
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):                     # a first run, in which libraries set themselves up
                    self.step(B, groups)
                torch.cuda.current_stream().wait_stream(self.side)
                pool = next(iter(self.graphs.values())).pool() if self.graphs else None
                with torch.cuda.graph(graph, pool=pool, stream=self.side, capture_error_mode="thread_local"):
                    self.step(B, groups)
                self.state.copy_(before[0])
                self.tick.copy_(before[1])
                self.graphs[key] = graph
            self.graphs[key].replay()

    # --- on the host ---

    @torch.inference_mode()
    def generate(self, requests, progress=None, sampling=None):
        """Yield Samples as they finish. Requests are drawn from the iterable when slots are free, and no sooner. progress is
        called with a Progress after each look. Out of memory, it goes on with half the slots and begins the samples in flight
        again; their noise makes them the same."""
        self.sampling = sampling or self.default
        requests, todo, rows, left = iter(requests), deque(), [], {}           # rows[i] is the Sample in slot i
        self.looks = 0                                                 # at results
        if self.grows:
            self.lay_out(16)
        self.now = now = Progress(self.slots, in_flight=lambda: [
            (row, self.ids[i, :self.count[i]].tolist()) for i, row in enumerate(rows) if row])
        while True:
            self.ask(requests, todo, self.slots - sum(row is not None for row in rows))
            try:
                self.fill(rows, todo)
                if not rows:
                    return
                results = self.advance(rows)
            except Exception as e:
                if self.slots == 1 or not memory.is_out_of_memory(e):
                    raise
                results = None
            if results is None:                                        # by now the exception, with all it held, is gone
                again = {}
                for request, index in [(row.request, row.index) for row in rows if row] + [(p.request, i) for p in todo for i in p.indices]:
                    again.setdefault(request, Pending(request, deque())).indices.append(index)
                todo = deque(again.values())
                rows.clear()
                self.allocate(self.slots // 2)
                now.slots = self.slots
                continue
            finished = self.collect(rows, *results)
            for sample in finished:
                left[sample.request] = left.get(sample.request, sample.request.num_samples) - 1
                now.requests += left[sample.request] == 0 and left.pop(sample.request) == 0
            now.samples, now.busy = now.samples + len(finished), len(rows) - len(finished)
            if progress:
                with torch.inference_mode(False):
                    progress(now)
            yield from finished
            if self.now is not now:
                raise RuntimeError("Another generate() or a load() has taken over this engine's slots: let one finish before the next, "
                                   "or make two engines.")

    def check(self, request):
        """ValueError with one sentence for what can't be sampled."""
        n, ids = len(request.ids), request.ids
        if not 0 < n < self.context:
            raise ValueError(f"A prompt of {n} tokens can't be continued: give 1 to {self.context - 1}, the context being {self.context}.")
        if min(ids) < 0 or max(ids) >= self.c.vocab_size:
            raise ValueError(f"A prompt has the token id {max(ids) if min(ids) >= 0 else min(ids)}, and the model's end at "
                             f"{self.c.vocab_size - 1}: encode it with the model's tokenizer.")
        if not all(-2**63 <= n < 2**63 for n in (request.key, self.seed)):
            raise ValueError(f"key={request.key} and seed={self.seed} must fit 64 bits.")
        if request.num_samples < 1 or request.max_new_tokens < 1:
            raise ValueError(f"num_samples={request.num_samples} and max_new_tokens={request.max_new_tokens} must be at least 1.")

    def ask(self, requests, todo, free):
        """Requests from the caller until their samples fill the free slots; its code is no part of inference mode."""
        with torch.inference_mode(False):
            while sum(len(p.indices) for p in todo) < free and (request := next(requests, None)) is not None:
                self.check(request)
                todo.append(Pending(request, deque(range(request.first_sample, request.first_sample + request.num_samples))))

    def fill(self, rows, todo):
        """Samples into free slots. A prompt is computed without its last token, which is the samples' first step; in one slot,
        from where it is copied to the others, and to the cache's last row if more are to come."""
        placed = []
        for slot in [i for i, row in enumerate(rows) if row is None] + list(range(len(rows), self.slots)):
            if not todo:
                break
            pending = todo[0]
            rows[slot:slot + 1] = [Sample(pending.request, pending.indices.popleft())]
            pending.slots.append(slot)
            if len(pending.slots) == 1:
                placed.append(pending)
            if not pending.indices:
                todo.popleft()
        if placed:
            self.reach(max(len(p.request.ids) for p in placed))
        self.prefill([(p.slots[0], p.request.ids[:-1]) for p in placed if not p.waits])
        for p in placed:
            source = self.slots if p.waits else p.slots[0]
            targets = [slot for slot in p.slots + [self.slots] * bool(p.indices) if slot != source]
            if targets:
                self.copy(source, targets, len(p.request.ids) - 1)
            p.waits = bool(p.indices)
        if placed:
            slots = [slot for p in placed for slot in p.slots]
            new = torch.tensor([[r.request.ids[-1], len(r.request.ids) - 1, r.request.key, r.index] for r in (rows[s] for s in slots)]).T
            self.state[:, torch.tensor(slots, device=self.device)] = new[:2].to(self.device)
            first, last = int(new[1].min()), min(self.context, max(len(p.request.ids) + p.request.max_new_tokens for p in placed))
            noise = uniform(stream(self.seed, new[2], new[3])[:, None], torch.arange(first, last))
            self.noise[torch.tensor(slots, device=self.noise.device), first:last] = noise.to(self.noise.device)
            for p in placed:
                n = len(p.request.ids)
                self.prompt[p.slots], self.count[p.slots], self.limit[p.slots] = n, 0, min(p.request.max_new_tokens, self.context - n)
                p.slots.clear()
        while None in rows:                                            # nothing to put there: the last row moves up
            last = rows.pop()
            if last is not None:
                i, last_slot = rows.index(None), len(rows)
                rows[i] = last
                self.copy(last_slot, [i], self.prompt[last_slot] + self.count[last_slot])
                for notes in self.notes():
                    notes[i] = notes[last_slot]

    def notes(self):
        """What is kept of each slot beside the cache, slots first."""
        return self.state.T, self.noise, self.prompt, self.count, self.limit, self.ids, self.logprobs

    def reach(self, n):
        """Room for n places a row, where they grow."""
        T = self.k.shape[3]
        if self.grows and n > T:
            self.lay_out(min(bucket(n, 16), bucket(self.context, 64)), T)

    def shape(self, needed):
        """(B, groups) of a step of rows that need so many places of the cache each (a list or array). On a CPU, where attention takes most of a
        small model's step, they are in groups that read no more than their furthest row needs."""
        needed = np.asarray(needed)                                    # Python's max takes 27 us longer of 512 (a Zen 5 core)
        self.reach(int(needed.max()))
        T, B = self.k.shape[3], len(needed)
        if self.deterministic:
            return self.slots, ((0, self.slots, T),)
        if self.cuda_graphs:
            B = min(self.slots, 1 << (B - 1).bit_length())
            return B, ((0, B, min(T, bucket(int(needed.max()), 64))),)
        together, groups = GROUP if self.device.type == "cpu" else B, []
        for first in range(0, B, together):
            C = bucket(int(needed[first:first + together].max()), 16)
            whole = T <= C or self.dtype != torch.float32 and T <= 1.5 * C       # in bf16 a part is slower than a little more
            groups.append((first, min(first + together, B), T if whole else C))
        return B, tuple(groups)

    def sort(self, rows):
        """Rows in the order of their positions, so that those of a group need about as many places."""
        order = np.argsort(-(self.prompt + self.count)[:len(rows)], kind="stable")
        index = torch.from_numpy(order)
        for cache in (*self.k, *self.v):
            cache[:len(rows)] = cache.index_select(0, index)
        for notes in self.notes():
            notes[:len(rows)] = notes[index if isinstance(notes, torch.Tensor) else order]
        rows[:] = [rows[i] for i in order]

    def advance(self, rows):
        """Steps until the next look: the new ids [B, steps] and log-probabilities [B, 2, steps]."""
        B = len(rows)
        steps = min(self.poll, int((self.limit - self.count)[:B].max()))
        self.looks += 1
        if self.device.type == "cpu" and B > GROUP and not self.deterministic and self.looks % SORT_EVERY == 0:
            self.sort(rows)
        shape = self.shape((self.prompt + self.count)[:B] - 1 + steps)
        self.tick.zero_()
        self.now.steps += steps
        for _ in range(steps):
            self.launch(*shape)
        return self.new_ids[:steps, :B].T.cpu().numpy(), self.new_logprobs[:steps, :, :B].permute(2, 1, 0).cpu().numpy()

    def collect(self, rows, ids, logprobs):
        """Note the rows' new tokens; the Samples that are finished leave theirs. For all rows at once: a loop over 512 of them
        in Python would take as long as two steps of a small model on a GPU."""
        (B, steps), finished = ids.shape, []
        if np.isnan(logprobs[:, 0]).any():
            self.room.zero_()                                          # where it would outlive its row: 0 * NaN is NaN
            raise FloatingPointError("The logits are not finite: the model's weights are broken, or overflow in this dtype.")
        slots, count, room = np.arange(B)[:, None], self.count[:B], (self.limit - self.count)[:B]
        places = count[:, None] + np.arange(steps)
        self.ids[slots, places] = ids
        for kind in range(1 + self.sampling.full_logprobs):
            self.logprobs[slots, kind, places] = logprobs[:, kind]
        stops = (ids[..., None] == np.array(self.sampling.stop)).any(-1) & (np.arange(steps) < room[:, None])         # np.isin is slower
        stopped = stops.any(1)
        new = np.where(stopped, stops.argmax(1) + 1, np.minimum(room, steps))
        if self.sampling.stop_strings:
            for i in np.flatnonzero(self.may_complete(ids).any(1)):
                if n := self.completes(self.ids[i, max(0, count[i] - self.tail):count[i]].tolist(), ids[i, :new[i]].tolist()):
                    new[i], stopped[i] = n, True
        count += new
        self.now.tokens += int(new.sum())
        for i in np.flatnonzero(stopped | (count == self.limit[:B])):
            sample, n = rows[i], count[i]
            sample.ids, sample.logprobs = self.ids[i, :n].tolist(), self.logprobs[i, 0, :n].tolist()
            sample.full_logprobs = self.logprobs[i, 1, :n].tolist() if self.sampling.full_logprobs else []
            sample.reason, rows[i] = "stop" if stopped[i] else "length", None
            finished.append(sample)
        return finished

    def may_complete(self, ids):
        """For ids [B, steps], whether a stop string may end in one: its last character stands in that id's own text. To look at the
        text of every row after every step took 2-9% of the time of a small model (NOTES.md)."""
        for i in np.unique(ids[self.last_characters[ids] < 0]):
            text = self.decode([i])
            self.last_characters[i] = any(stop[-1] in text or not stop[-1].isascii() or stop[-1].isspace() for stop in self.sampling.stop_strings)
        return self.last_characters[ids] > 0

    def completes(self, ids, new):
        """How many of the new ids it takes to complete a stop string; 0 if they don't."""
        for n in range(1, len(new) + 1):
            text = self.decode((ids + new[:n])[-self.tail:])
            if any(stop in text for stop in self.sampling.stop_strings):
                return n
        return 0
