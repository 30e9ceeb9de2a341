"""The states of a GPT with mixer=favor or linear while it decodes: what KVCache is to softmax attention.

A state has the same size after any number of positions, so there is nothing to grow, to mask or to sort by
length. Shapes: L layers, K key/value heads, M features, E columns.
"""
import math
from functools import partial

import torch

from mixer import mix, mix_step, state_shape


def state_bytes(config):
    """Return the bytes of a slot's states, which are fp32."""
    return 4 * config.n_layer * math.prod(state_shape(config))


class StateCache:
    """States `storage` [L, slots + 1, K, M, E]; the last row is of a prompt some of whose samples wait."""

    grows = False
    longest = 0                              # positions that are kept

    def __init__(self, config, slots, device):
        shape = config.n_layer, slots + 1, *state_shape(config)
        self.storage = torch.zeros(shape, dtype=torch.float32, device=device)

    def fit(self, length):
        """Do nothing: any length fits."""

    def clear(self, slots):
        """Have slots begin anew: a prompt of a single token has nothing that would be written over."""
        self.storage[:, slots] = 0

    def copy(self, source, slots, n):
        """Copy a slot's state, which is that after n positions, to other slots."""
        self.storage[:, slots] = self.storage[:, source, None].clone()

    def prefill(self, slots, lengths):
        """Return for each layer what GPT.hidden calls with prompts of these lengths [B]: it leaves their
        states in the slots [B]."""
        return [partial(self.prefill_layer, layer, slots, lengths) for layer in self.storage]

    def prefill_layer(self, layer, slots, lengths, *inputs):
        y, layer[slots] = mix(*inputs, lengths=lengths)
        return y

    def decode(self, B):
        """Return for each layer what GPT.hidden calls with the next token of the first B slots."""
        return [partial(mix_step, state=layer[:B]) for layer in self.storage]
