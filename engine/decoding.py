"""Attention of a decoding step on a GPU by the lengths of rows instead of a mask, where that is faster.

A kernel that takes a mask reads every position that the longest row has; flash reads those that are there.
Shapes: B rows, K key heads of T positions in the cache, G queries a key head, D channels.
"""
import inspect
import statistics
import time

import torch
from torch.nn.attention import sdpa_kernel

from engine.cuda_graph import CUDAGraph
from layers.ops import SDPA_WITH_MASK

CALLS = 20                                   # in a graph that is timed, as many as a model has layers
BETTER = 0.9                                 # of the mask's seconds, at most
TOLERANCE = 0.03                             # relative error beside the mask's result, in bf16


def is_there():
    """Tell whether PyTorch has attention by lengths: 2.13 has, 2.11 not for a cache."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "seqused_k" in inspect.signature(varlen_attn).parameters


class ByLength:
    """What rows of a cache read in a step: the first `lengths` [B K] positions of each row and key head.

    Each row and key head is a sequence of its own, whose G queries are heads that share its keys.
    """

    def __init__(self, cache, positions, longest):
        """positions [B] of the newest tokens, on the device; longest: of the rows, or more."""
        _, _, K, T, _ = cache.k.shape
        self.lengths = (positions + 1).repeat_interleave(K).int()
        self.of_queries = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=positions.device)
        self.of_keys = self.of_queries * T
        self.longest = longest

    def attend(self, q, keys, values):
        """Return [B, 1, H, D] for q [B, 1, H, D] over a layer's keys and values [B, K, T, D]."""
        from torch.nn.attention.varlen import varlen_attn
        B, K, _, D = keys.shape
        q = q.reshape(B * K, -1, D)
        keys = keys.view(-1, 1, D)
        values = values.view(-1, 1, D)
        y = varlen_attn(q, keys, values, self.of_queries, self.of_keys, max_q=1, max_k=self.longest,
                        enable_gqa=True, seqused_k=self.lengths)
        return y.view(B, 1, -1, D)


def choose(engine, asked=""):
    """Return length or mask for an engine: the first if that is possible and asked for, or if its result
    agrees and takes a tenth less time, with as many rows as the engine has, of 1 to `context` positions.
    state: of a model that has no keys and values."""
    if engine.config.mixer != "softmax":
        return "state"
    possible = engine.kind == "cuda" and engine.dtype in (torch.bfloat16, torch.float16) and is_there()
    if asked == "mask" or engine.deterministic or not possible:
        return "mask"
    if asked:
        return asked
    try:
        ways = both_ways(engine).values()
        expected, found = (way.attend().float() for way in ways)
        error = ((found - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCE:
            return "mask"
        masked, by_length = (way.seconds() for way in ways)
        return "length" if by_length < BETTER * masked else "mask"
    except Exception:                        # no such kernel here, or none that a graph can hold
        return "mask"
    finally:
        engine.cache.storage.zero_()


def both_ways(engine):
    """Return {mask or length: Once} of rows of random lengths, for which the cache's first layer is filled."""
    drawn = {"generator": torch.Generator(engine.device).manual_seed(0)}
    on_device = {"device": engine.device} | drawn
    B = engine.slots
    c = engine.config
    positions = torch.randint(engine.context, (B,), **on_device)
    q = torch.randn(B, 1, c.n_head, c.head_dim, dtype=engine.dtype, **on_device)
    keys, values = (cache[0, :B].normal_(**drawn) for cache in (engine.cache.k, engine.cache.v))
    return {way: Once(way, engine, q, keys, values, positions) for way in ("mask", "length")}


class Once:
    """A layer's attention in one of the ways, outside of a step."""

    def __init__(self, way, engine, q, keys, values, positions):
        self.device = engine.device
        self.cache = engine.cache
        self.inputs = q, keys, values
        self.reading = self.cache.reading(positions, self.cache.length, way)

    def attend(self):
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
            return self.cache.attend(*self.inputs, self.reading)

    def repeat(self):
        for _ in range(CALLS):
            self.attend()

    def seconds(self):
        """Return the median seconds of a graph of CALLS calls, for one by one they would wait for Python."""
        graph = CUDAGraph(self.repeat, self.device, [])
        seconds = []
        for _ in range(6):
            clock = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - clock)
        return statistics.median(seconds[1:])
