"""The cache of recurrent states for mixer=favor or linear, with KVCache's interface.

A state has a constant size, so nothing grows, is masked or is sorted by length. Shapes: L layers, K key/value
heads, M features, E columns.
"""
import math
from functools import partial

import torch

from layers.linear_attention import mix, mix_step, state_shape


def state_bytes(config):
    """Return the bytes of one slot's states (fp32)."""
    return 4 * config.n_layer * math.prod(state_shape(config))


class StateCache:
    """States `storage` [L, slots + 1, K, M, E]; the last row holds a prompt with waiting samples."""

    grows = False

    def __init__(self, config, slots, device):
        self.config = config
        shape = config.n_layer, slots + 1, *state_shape(config)
        self.storage = torch.zeros(shape, dtype=torch.float32, device=device)

    def fit(self, length):
        """Do nothing: any length fits."""

    def clear(self, slots):
        """Zero the states of slots; the prefill of a prompt of one token would not overwrite them."""
        self.storage[:, slots] = 0

    def updated_in_place(self, B):
        """Return the tensors that a step adds to."""
        return [self.storage[:, :B]]

    def bytes_read(self, lengths):
        """Return bytes read by samples of lengths (prompt, new tokens): one state per token."""
        return sum(new for _, new in lengths) * state_bytes(self.config)

    def copy(self, source, slots, n):
        """Copy a slot's state after n positions to other slots: a tensor on the device or a slice."""
        self.storage[:, slots] = self.storage[:, source, None].clone()

    def prefill(self, slots, lengths, P, T):
        """Return each layer's function for GPT.hidden; it writes the prompts' states to slots [B]."""
        return [partial(self.prefill_layer, layer, slots, lengths) for layer in self.storage]

    def prefill_layer(self, layer, slots, lengths, *inputs):
        y, layer[slots] = mix(*inputs, lengths=lengths)
        return y

    def groups(self, B, lengths):
        """Return no RowGroups: all rows read the same amount."""
        return ()

    def decode(self, positions, groups):
        """Return each layer's function for GPT.hidden, for next tokens at positions [B]."""
        return [partial(mix_step, state=layer[:len(positions)]) for layer in self.storage]
