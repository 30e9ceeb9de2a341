"""A decoding step on a GPU: recorded as a CUDA graph, whose kernels are launched together without Python between them;
and, by option, attention over the positions that each row has instead of under a mask.

A kernel that takes a mask reads every position that the longest row has; flash reads those that are there.
Shapes: B rows, K key heads of T positions in the cache, G queries a key head, D channels.
"""
import contextlib
import inspect

import torch


class CUDAGraph:
    """What `step` launches, for the tensors that it read and wrote when it was recorded: they must stay where
    they are, and every number that Python computed stays what it was."""

    def __init__(self, step, device, others):
        """Run step once, in which libraries set themselves up, and record it.

        others: CUDAGraphs that never run at the same time; they share their memory. What step changes in its
        tensors it changes once. A capture that fails, as for lack of memory, leaves the stream as it was.
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
                # PyTorch's own way out of a capture that CUDA gave up leaves the allocator in it.
                with contextlib.suppress(Exception):
                    torch._C._cuda_endAllocateToPool(current.device_index, self.pool)
                raise
            finally:                         # and self.stream current
                torch.cuda.set_stream(current)

    def replay(self):
        with torch.cuda.device(self.device):
            self.graph.replay()


def has_varlen_attention():
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
