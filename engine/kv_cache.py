"""The static KV cache: its memory, how rows attend to it, and how many slots fit.

Shapes: L layers, B rows, H query heads, K key/value heads, G = H/K queries a key head, T positions, D
channels a head.
"""
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.gpu import ByLength
from engine.state_cache import state_bytes
from layers.linear_attention import n_features
from layers.ops import ATTENTION
from runtime import memory

GROUP = 128                                  # on a CPU: rows whose attention is computed together
MOST_SLOTS = {"cpu": 512, "cuda": 512}       # where memory would allow for more


def bucket(n, multiple):
    """Round n up to a multiple of `multiple` and of an eighth to a quarter of n: few sizes are left."""
    step = max(multiple, 2 ** max(0, n.bit_length() - 3))
    return -(-n // step) * step


def prefill_tokens(device_type):
    """Return how many tokens of prompts, padded, to compute together: enough to keep the device busy."""
    return {"cuda": 2**14}.get(device_type, 512)


def cache_bytes(config, slots, context, dtype):
    """Return the bytes of keys and values: of the slots, and of one more, where a prompt waits.

    Of a mixer other than softmax (layers/linear_attention.py) those of its states, whatever the context.
    """
    if config.mixer != "softmax":
        return (slots + 1) * state_bytes(config)
    per_position = 2 * config.n_layer * config.n_kv_head * config.head_dim * dtype.itemsize
    return (slots + 1) * bucket(context, 64) * per_position


def slots_that_fit(config, context, dtype, device, reserved=0):
    """Return how many slots fit nine tenths of the free memory, less `reserved` bytes.

    What a step and a prefill need beside the cache is left free.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()             # what PyTorch holds back counts as free
    channels = config.n_head * config.head_dim + 2 * config.mlp_hidden + 4 * config.n_embd
    if config.mixer != "softmax":
        channels += 2 * n_features(config) * (config.n_head + config.n_kv_head)
    activations = 4 * channels * prefill_tokens(device.type)
    per_slot = cache_bytes(config, 0, context, dtype) + 16 * config.padded_vocab_size
    free = 0.9 * (memory.available(device) - reserved) - activations
    return max(1, min(MOST_SLOTS.get(device.type, 64), int(free / per_slot) - 1))


class RowGroup(NamedTuple):
    """Rows first ... last - 1 of a step, which read the first `length` positions of the cache."""
    first: int
    last: int
    length: int


class KVCache:
    """Keys and values k, v [L, slots + 1, K, T, D]; the last row is of a prompt some of whose samples wait.

    If it `grows`, T follows what is read: a CPU reads whole rows in bf16 faster than parts (docs/notes.md).
    kind: of the device, cpu, cuda or mps. backend: of ATTENTION, for prompts. graphs: whether steps are
    recorded as CUDA graphs.
    """

    def __init__(self, config, slots, context, dtype, device, kind, backend, deterministic, graphs):
        self.config = config
        self.kind = kind
        self.backend = backend
        self.deterministic = deterministic
        self.graphs = graphs
        self.grows = kind == "cpu" and not deterministic
        self.longest = bucket(context, 64)
        self.positions = torch.arange(self.longest, device=device)
        self.mask_values = torch.tensor([[0.0], [-math.inf]], dtype=dtype, device=device)
        self.shape = (config.n_layer, slots + 1, config.n_kv_head, self.longest, config.head_dim)
        self.storage = torch.zeros(2, math.prod(self.shape), dtype=dtype, device=device)
        self.resize(self.longest)

    @property
    def length(self):
        return self.k.shape[3]

    def resize(self, length, kept=0):
        """Make T = length, in the memory that is there for the longest; the first `kept` positions stay."""
        L, rows, K, _, D = self.shape
        resized = self.storage[:, :L * rows * K * length * D].view(2, L, rows, K, length, D)
        if kept:
            for new, old in zip(resized, (self.k, self.v)):
                for layer in reversed(range(L)):       # a layer comes to lie where those behind it lay
                    new[layer, :, :, :kept] = old[layer, :, :, :kept].clone()
        self.k, self.v = resized
        # Where the positions of each row and key head begin, in units of D: [slots, K].
        self.row_starts = torch.arange((rows - 1) * K, device=self.storage.device).view(-1, K) * length

    def fit(self, length):
        """Make T at least `length`, if it grows."""
        if self.grows and length > self.length:
            self.resize(min(bucket(length, 16), self.longest), self.length)

    def clear(self, slots):
        """Do nothing: what was there before is behind a row's positions, where nobody reads."""

    def changed(self, B):
        """Return what a step adds to, which is not the same if it is done twice: nothing."""
        return []

    def bytes_read(self, lengths):
        """Return what samples of lengths (prompt, new tokens) read: for each token, those before it."""
        positions = sum(new * prompt + new * (new + 1) / 2 for prompt, new in lengths)
        return positions * cache_bytes(self.config, 0, 64, self.storage.dtype) / 64

    def copy(self, source, slots, n):
        """Copy the first n keys and values of a slot to other slots."""
        for cache in (self.k, self.v):
            cache[:, slots, :, :n] = cache[:, source, None, :, :n].clone()

    def reorder(self, order):
        """Give row i what row order[i] holds."""
        for layer in (*self.k, *self.v):
            layer[:len(order)] = layer.index_select(0, order)

    # --- prompts ---

    def prefill(self, slots, lengths):
        """Return for each layer what GPT.hidden calls with prompts of these lengths [B]: it leaves their keys
        and values in the slots [B]."""
        return [partial(self.prefill_layer, layer, slots) for layer in zip(self.k, self.v)]

    def prefill_layer(self, layer, slots, q, k, v):
        """Attend with q [B, T, H, D] to k and v [B, T, K, D], and write these to a layer's (keys, values)."""
        for cache, new in zip(layer, (k, v)):
            cache[slots, :, :new.shape[1]] = new.transpose(1, 2)
        return ATTENTION[self.backend](q, k, v)

    # --- the next token ---

    def in_groups(self, B):
        """Tell whether rows gain by being sorted, since a step of B rows reads groups of them apart."""
        return self.grows and B > GROUP

    def groups(self, B, lengths):
        """Return the RowGroups of a step of B rows, of which the first read so many positions each (an
        array).

        On a CPU, where attention takes most of a small model's step, a group reads no more than its furthest
        row needs.
        """
        T = self.length
        if self.deterministic:
            return (RowGroup(0, B, T),)
        if self.graphs:
            return (RowGroup(0, B, min(T, bucket(int(lengths.max()), 64))),)
        group_size = GROUP if self.kind == "cpu" else B
        groups = []
        for first in range(0, B, group_size):
            last = min(first + group_size, B)
            length = bucket(int(lengths[first:last].max()), 16)
            # In bf16 a part of the cache's rows is slower than a little more of them.
            whole = T <= length or self.storage.dtype != torch.float32 and T <= 1.5 * length
            groups.append(RowGroup(first, last, T if whole else length))
        return tuple(groups)

    def decode(self, positions, groups, way):
        """Return for each layer what GPT.hidden calls with the next tokens of rows 0 ... B-1, at positions
        [B]. way: see `reading`."""
        readings = [self.reading(positions[group.first:group.last], group.length, way) for group in groups]
        write_at = (self.row_starts[:len(positions)] + positions[:, None]).flatten()
        layers = zip(self.k, self.v)
        return [partial(self.decode_layer, layer, write_at, groups, readings) for layer in layers]

    def reading(self, positions, length, way):
        """Return what rows at positions [B] read of the first `length`: by way of mask the mask, by way of
        length a ByLength."""
        if way == "length":
            return ByLength(self, positions, length)
        return self.mask(positions, length)

    def mask(self, positions, length):
        """Return what is added to scores of rows at positions [B]: -inf for keys past them, else 0.

        [B, K, G, length], on a CPU [B K, G, length].
        """
        K = self.config.n_kv_head
        G = self.config.n_head // K
        zero, minus_infinity = self.mask_values
        mask = torch.where(self.positions[:length] > positions[:, None], minus_infinity, zero)
        mask = mask[:, None, None].expand(-1, K, G, -1)
        return mask.flatten(0, 1) if self.kind == "cpu" else mask

    def decode_layer(self, layer, write_at, groups, readings, q, k, v):
        """Write k and v [B, 1, K, D] to a layer's (keys, values), and attend to these with q [B, 1, H, D]."""
        for cache, new in zip(layer, (k, v)):
            D = new.shape[3]
            cache.view(-1, D).index_copy_(0, write_at, new.reshape(-1, D))
        parts = []
        for group, reading in zip(groups, readings):
            rows = slice(group.first, group.last)
            keys, values = (cache[rows] for cache in layer)
            parts.append(self.attend(q[rows], keys, values, reading))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def attend(self, q, keys, values, reading):
        """Attend to keys and values [B, K, T, D] with q [B, 1, H, D], as far as `reading` says.

        The G queries of a key head are the rows of one product: its cache is read once and not repeated.
        On a CPU the products are written out: in bf16 at least twice the speed of PyTorch's fused kernel
        (docs/notes.md).
        """
        if isinstance(reading, ByLength):
            return reading.attend(q, keys, values)
        mask = reading
        keys, values = (x[:, :, :mask.shape[-1]] for x in (keys, values))
        B, K, _, D = keys.shape
        q = q.reshape(B, K, -1, D)
        if self.kind != "cpu":
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(B, 1, -1, D)
        q, keys, values = (x.flatten(0, 1) for x in (q, keys, values))
        if keys.dtype == torch.bfloat16:     # whose products of parts of rows take several times as long
            keys = keys.contiguous()
            values = values.contiguous()
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=D**-0.5)
        return scores.softmax(-1).bmm(values).view(B, 1, -1, D)
