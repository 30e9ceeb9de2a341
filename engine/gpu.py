"""A decoding step as a CUDA graph, which launches all of its kernels without Python between them."""
import contextlib

import torch


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
                torch._C._cuda_clearCublasWorkspaces()     # torch.compile frees them: capture its own
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
