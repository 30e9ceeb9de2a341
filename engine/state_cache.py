"""The states of a GPT with mixer=favor or linear while it decodes: what KVCache is to softmax attention.

A state has the same size after any number of positions, so there is nothing to grow, to mask or to sort by
length. Shapes: L layers, K key/value heads, M features, E columns.
"""
import math
from functools import partial

import torch

from layers.linear_attention import mix, mix_step, state_shape


def state_bytes(config):
    """Return the bytes of a slot's states, which are fp32."""
    return 4 * config.n_layer * math.prod(state_shape(config))


class StateCache:
    """States `storage` [L, slots + 1, K, M, E]; the last row is of a prompt some of whose samples wait."""

    grows = False

    def __init__(self, config, slots, device):
        self.config = config
        shape = config.n_layer, slots + 1, *state_shape(config)
        self.storage = torch.zeros(shape, dtype=torch.float32, device=device)

    def fit(self, length):
        """Do nothing: any length fits."""

    def clear(self, slots):
        """Have slots begin anew: a prompt of a single token has nothing that would be written over."""
        self.storage[:, slots] = 0

    def changed(self, B):
        """Return what a step adds to, which is not the same if it is done twice."""
        return [self.storage[:, :B]]

    def bytes_read(self, lengths):
        """Return what samples of lengths (prompt, new tokens) read: each token a state."""
        return sum(new for _, new in lengths) * state_bytes(self.config)

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

    def in_groups(self, B):
        return False

    def groups(self, B, lengths):
        """Return how the rows of a step differ in what they read: not at all."""
        return ()

    def decode(self, positions, groups, way):
        """Return for each layer what GPT.hidden calls with the next tokens of rows 0 ... B-1, at positions
        [B]."""
        return [partial(mix_step, state=layer[:len(positions)]) for layer in self.storage]
