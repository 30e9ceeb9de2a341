"""The static KV cache: its memory, and how many slots fit.

Shapes: L layers, K key/value heads, T positions, D channels a head.
"""
import math

import torch

from mixer import n_features
from runtime import memory
from state_cache import state_bytes

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

    Of a mixer other than softmax (mixer.py) those of its states, whatever the context.
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


class KVCache:
    """Keys and values k, v [L, slots + 1, K, T, D]; the last row is of a prompt some of whose samples wait.

    If it `grows`, T follows what is read: a CPU reads whole rows in bf16 faster than parts (NOTES.md).
    """

    def __init__(self, config, slots, context, dtype, device, grows):
        self.grows = grows
        self.longest = bucket(context, 64)
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

    def copy(self, source, slots, n):
        """Copy the first n keys and values of a slot to other slots."""
        for cache in (self.k, self.v):
            cache[:, slots, :, :n] = cache[:, source, None, :, :n].clone()

    def reorder(self, order):
        """Give row i what row order[i] holds."""
        for layer in (*self.k, *self.v):
            layer[:len(order)] = layer.index_select(0, order)
