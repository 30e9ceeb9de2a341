"""A step recorded as a CUDA graph: its kernels are launched together, without Python between them."""
import contextlib

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
