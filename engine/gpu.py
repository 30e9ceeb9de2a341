"""Decoding on a GPU: CUDA graphs, and optionally variable-length attention instead of a mask.

A CUDA graph launches all kernels of a step without Python between them. A kernel with a mask reads as many
positions for every row as the longest row has; variable-length attention reads each row's own. Shapes: B
rows, K key heads of T positions in the cache, G queries a key head, D channels.
"""
import contextlib

import torch

# torch.nn.attention.varlen's operator: unlike 2.13's varlen_attn, 2.11's does not pass it the used lengths
FLASH_ATTENTION = torch.ops.aten._flash_attention_forward


class CUDAGraph:
    """A captured decoding step. The tensors that it reads and writes must stay at their addresses, and every
    number computed in Python is fixed."""

    def __init__(self, step, device, others):
        """Run step once, so that libraries initialise, and capture it.

        others: CUDAGraphs that never run at the same time; they share their memory pool. A failed capture,
        for example out of memory, restores the current stream.
        """
        self.device = device
        self.graph = torch.cuda.CUDAGraph()
        self.stream = others[0].stream if others else torch.cuda.Stream(device)
        self.pool = others[0].pool if others else torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    step()
                current.wait_stream(self.stream)
                with torch.cuda.graph(self.graph, self.pool, self.stream, capture_error_mode="thread_local"):
                    step()
            except Exception:
                # After a failed capture PyTorch leaves the allocator in capture mode.
                with contextlib.suppress(Exception):
                    torch._C._cuda_endAllocateToPool(current.device_index, self.pool)
                raise
            finally:                         # a failed capture leaves self.stream current
                torch.cuda.set_stream(current)

    def replay(self):
        with torch.cuda.device(self.device):
            self.graph.replay()


def has_varlen_attention():
    """Return whether PyTorch's flash attention can read a part of each sequence of keys (2.11 and newer)."""
    return "seqused_k" in str(FLASH_ATTENTION.default._schema)


class VarlenAttention:
    """Attention of cache rows over the first `lengths` [B K] positions of each row and key head.

    Each row and key head is one sequence; its G queries are heads that share the keys.
    """

    def __init__(self, cache, positions, longest):
        """Take positions [B] of the newest tokens, on the device, and a bound of all lengths."""
        _, _, K, T, _ = cache.k.shape
        self.lengths = (positions + 1).repeat_interleave(K).int()
        self.query_offsets = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=positions.device)
        self.key_offsets = self.query_offsets * T
        self.longest = longest

    def attend(self, q, keys, values):
        """Return [B, 1, H, D] for q [B, 1, H, D] over a layer's keys and values [B, K, T, D]."""
        B, K, _, D = keys.shape
        q = q.reshape(B * K, -1, D)
        keys = keys.view(-1, 1, D)
        values = values.view(-1, 1, D)
        y, *_ = FLASH_ATTENTION(q, keys, values, self.query_offsets, self.key_offsets, 1, self.longest, 0.0,
                                False, False, seqused_k=self.lengths)
        return y.view(B, 1, -1, D)
