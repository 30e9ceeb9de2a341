"""The static KV cache: storage, decoding attention over it, and the number of slots that fit into memory.

Shapes: L layers, B rows, H query heads, K key/value heads, G = H/K queries a key head, T positions, D
channels a head.
"""
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from layers.ops import ATTENTION
from runtime import memory

ROW_GROUP_SIZE = 128                         # on a CPU: rows of one attention product
MAX_SLOTS = {"cpu": 512, "cuda": 512, "mps": 64}                 # even if memory allows more
PREFILL_TOKENS = {"cpu": 512, "cuda": 2**14, "mps": 512}         # padded prompt tokens per prefill batch


def bucket(n, multiple):
    """Round n up to a multiple of `multiple` and of a power of two between n/8 and n/4."""
    step = max(multiple, 2 ** max(0, n.bit_length() - 3))
    return -(-n // step) * step


def cache_bytes(config, slots, context, dtype):
    """Return the bytes of the cache for `slots` slots and one more row, in which a prompt waits.

    For mixer=favor or linear this is the size of the states, whatever the context.
    """
    if config.mixer != "softmax":
        from engine.state_cache import state_bytes
        return (slots + 1) * state_bytes(config)
    per_position = 2 * config.n_layer * config.n_kv_head * config.head_dim * dtype.itemsize
    return (slots + 1) * bucket(context, 64) * per_position


def slots_that_fit(config, context, dtype, device, reserved=0):
    """Return the number of slots that fit into 90% of free memory, less `reserved` bytes.

    The activations of a decoding step and a prefill are subtracted as well.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()             # PyTorch's cached blocks count as free
    channels = config.n_head * config.head_dim + 2 * config.mlp_hidden + 4 * config.n_embd
    if config.mixer != "softmax":
        from layers.linear_attention import n_features
        channels += 2 * n_features(config) * (config.n_head + config.n_kv_head)
    activations = 4 * channels * PREFILL_TOKENS[device.type]
    per_slot = cache_bytes(config, 0, context, dtype) + 16 * config.padded_vocab_size
    free = 0.9 * (memory.available(device) - reserved) - activations
    return max(1, min(MAX_SLOTS[device.type], int(free / per_slot) - 1))


class RowGroup(NamedTuple):
    """Rows first ... last - 1 of a step, which read the first `length` positions of the cache."""
    first: int
    last: int
    length: int


class KVCache:
    """Keys and values k, v [L, slots + 1, K, T, D]; the last row holds a prompt with waiting samples.

    device_type: cpu, cuda or mps. graphs: decoding steps are CUDA graphs. by_length: a row reads its own
    positions (engine/fused_step.py), so a step needs no groups. On a CPU the cache `grows`: T follows the
    positions in use, since in bf16 whole rows are read faster than parts (docs/notes.md).
    """

    def __init__(self, model, slots, context, *, device_type, deterministic, graphs, by_length=False):
        self.config = config = model.config
        self.attention = ATTENTION[model.backend]            # of prefill
        self.device_type = device_type
        self.deterministic = deterministic
        self.graphs = graphs
        self.by_length = by_length
        self.grows = device_type == "cpu" and not deterministic
        self.longest = bucket(context, 64)
        weight = model.token_embedding.weight                # has the cache's dtype and device
        self.positions = torch.arange(self.longest, device=weight.device)
        self.mask_values = weight.new_tensor([[0.0], [-math.inf]])
        self.shape = (config.n_layer, slots + 1, config.n_kv_head, self.longest, config.head_dim)
        self.storage = weight.new_zeros(2, math.prod(self.shape))
        self.resize(self.longest)

    @property
    def length(self):
        return self.k.shape[3]

    def resize(self, length, kept=0):
        """Set T = length within the storage of the longest, keeping the first `kept` positions."""
        L, rows, K, _, D = self.shape
        resized = self.storage[:, :L * rows * K * length * D].view(2, L, rows, K, length, D)
        if kept:
            for new, old in zip(resized, (self.k, self.v)):
                for layer in reversed(range(L)):       # a layer may overlap the old ones behind it
                    new[layer, :, :, :kept] = old[layer, :, :, :kept].clone()
        self.k, self.v = resized
        # Offset of each row and key head in the storage, in units of D: [slots, K].
        self.row_starts = torch.arange((rows - 1) * K, device=self.storage.device).view(-1, K) * length

    def fit(self, length):
        """Grow T to at least `length`, or to the longest, if the cache grows."""
        length = min(bucket(length, 16), self.longest)
        if self.grows and length > self.length:
            self.resize(length, self.length)

    def clear(self, slots):
        """Do nothing: positions past a row's own are never read."""

    def updated_in_place(self, B):
        """Return the tensors that a step adds to: none, since repeating a step writes the same values."""
        return []

    def bytes_read(self, lengths):
        """Return bytes read by samples of lengths (prompt, new tokens): per token, all earlier positions."""
        positions = sum(new * prompt + new * (new + 1) / 2 for prompt, new in lengths)
        return positions * cache_bytes(self.config, 0, 64, self.storage.dtype) / 64

    def copy(self, source, slots, n):
        """Copy the first n keys and values of a slot to other slots: a tensor on the device or a slice."""
        for cache in (self.k, self.v):
            cache[:, slots, :, :n] = cache[:, source, None, :, :n].clone()

    def reorder(self, order):
        """Move row order[i] to row i."""
        for layer in (*self.k, *self.v):
            layer[:len(order)] = layer.index_select(0, order)

    # --- prompts ---

    def prefill(self, slots, lengths, P, T):
        """Return each layer's attention function for GPT.hidden; it writes the prompts to slots [B]. They
        begin with the first P positions of the kept prefix, and T more are computed."""
        layers = zip(self.k, self.v)
        if not P:
            return [partial(self.prefill_layer, layer, slots) for layer in layers]
        mask = self.storage.new_full((T, P + T), -math.inf).triu(P + 1)[None, None]
        return [partial(self.prefill_after, layer, slots, kept[:, :, :, :P], mask)
                for layer, kept in zip(layers, self.prefix)]

    def prefill_layer(self, layer, slots, q, k, v):
        """Write k and v [B, T, K, D] to a layer's (keys, values) and attend with q [B, T, H, D]."""
        for cache, new in zip(layer, (k, v)):
            cache[slots, :, :new.shape[1]] = new.transpose(1, 2)
        return self.attention(q, k, v)

    def prefill_after(self, layer, slots, prefix, mask, q, k, v):
        """As prefill_layer, behind a prefix [2, 1, K, P, D] that all rows share."""
        both = []
        for cache, first, new in zip(layer, prefix, (k, v)):
            z = torch.cat((first.expand(len(new), -1, -1, -1), new.transpose(1, 2)), 2)
            cache[slots, :, :z.shape[2]] = z
            both.append(z.transpose(1, 2))
        return self.attention(q, *both, mask=mask)

    def keep_prefix(self):
        """Return each layer's attention function for GPT.hidden; it keeps the keys and values of x [1, P]."""
        self.prefix = []                     # [2, 1, K, P, D] of each layer
        return [self.keep_layer] * self.config.n_layer

    def keep_layer(self, q, k, v):
        self.prefix.append(torch.stack((k, v)).transpose(2, 3))
        return self.attention(q, k, v)

    def extend(self, slots, positions, end):
        """Return each layer's attention function for GPT.hidden, for more positions [B, T], the last of which
        is end - 1, of the rows in slots [B]."""
        self.fit(end)
        length = self.length if self.deterministic else end
        mask = self.storage.new_zeros(len(slots), 1, positions.shape[1], length)
        mask.masked_fill_(self.positions[:length] > positions[:, None, :, None], -math.inf)
        return [partial(self.extend_layer, layer, slots, positions, mask) for layer in zip(self.k, self.v)]

    def extend_layer(self, layer, slots, positions, mask, q, k, v):
        """Write k and v [B, T, K, D] to a layer's (keys, values) and attend with q [B, T, H, D]."""
        both = []
        for cache, new in zip(layer, (k, v)):
            cache[slots[:, None], :, positions] = new
            both.append(cache[slots, :, :mask.shape[-1]].transpose(1, 2))
        return self.attention(q, *both, mask=mask)

    # --- the next token ---

    def groups(self, B, lengths):
        """Return the RowGroups of a step of B rows that read `lengths` positions each (an array).

        On a CPU attention dominates a small model's step, so a group reads only as far as its longest row.
        """
        T = self.length
        if self.deterministic or self.by_length:
            return (RowGroup(0, B, T),)
        if self.graphs:
            return (RowGroup(0, B, min(T, bucket(int(lengths.max()), 64))),)
        group_size = ROW_GROUP_SIZE if self.device_type == "cpu" else B
        groups = []
        for first in range(0, B, group_size):
            last = min(first + group_size, B)
            length = bucket(int(lengths[first:last].max()), 16)
            # In bf16 reading parts of rows is slower than reading up to 1.5 times as much in whole rows.
            whole = T <= length or self.storage.dtype != torch.float32 and T <= 1.5 * length
            groups.append(RowGroup(first, last, T if whole else length))
        return tuple(groups)

    def decode(self, positions, groups):
        """Return each layer's attention function for next tokens at positions [B]; see decode_layer."""
        layers = zip(self.k, self.v)
        masks = []
        for first, last, length in groups:
            masks.append((slice(first, last), self.mask(positions[first:last], length)))
        write_at = (self.row_starts[:len(positions)] + positions[:, None]).flatten()
        return [partial(self.decode_layer, layer, write_at, masks) for layer in layers]

    def mask(self, positions, length):
        """Return the additive mask of rows at positions [B], which read at most `length` positions.

        It is -inf for keys past a row's position, else 0: [B, K, G, length], on a CPU [B K, G, length].
        """
        K = self.config.n_kv_head
        G = self.config.n_head // K
        zero, minus_infinity = self.mask_values
        mask = torch.where(self.positions[:length] > positions[:, None], minus_infinity, zero)
        mask = mask[:, None, None].expand(-1, K, G, -1)
        return mask.flatten(0, 1) if self.device_type == "cpu" else mask

    def decode_layer(self, layer, write_at, masks, q, k, v):
        """Write k and v [B, 1, K, D] to a layer's (keys, values) and attend with q [B, 1, H, D]."""
        for cache, new in zip(layer, (k, v)):
            D = new.shape[3]
            cache.view(-1, D).index_copy_(0, write_at, new.reshape(-1, D))
        keys, values = layer
        parts = [self.attend(q[rows], keys[rows], values[rows], mask) for rows, mask in masks]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def attend(self, q, keys, values, mask):
        """Attend to keys and values [B, K, T, D] with q [B, 1, H, D], under a mask.

        The G queries of a key head are rows of one product, so that its keys and values are read once and not
        repeated. On a CPU the products are written out, in bf16 at least twice as fast as PyTorch's fused
        kernel (docs/notes.md).
        """
        keys, values = (x[:, :, :mask.shape[-1]] for x in (keys, values))
        B, K, _, D = keys.shape
        q = q.reshape(B, K, -1, D)
        if self.device_type != "cpu":
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(B, 1, -1, D)
        q, keys, values = (x.flatten(0, 1) for x in (q, keys, values))
        if keys.dtype == torch.bfloat16:     # strided bf16 products take several times as long
            keys = keys.contiguous()
            values = values.contiguous()
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=D**-0.5)
        return scores.softmax(-1).bmm(values).view(B, 1, -1, D)
