"""Emulate a CUDA graph on a CPU: replay the operations of a recorded step on the same memory."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operations that synchronize
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")


def memory_of(values):
    return [x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Record each operation with its input and output tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in WAITS, f"{name} synchronizes, so a CUDA graph can't contain it"
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result


class Recorded:
    """Implement the interface of engine.gpu.CUDAGraph. As in a CUDA graph, numbers from Python and
    reallocated buffers keep the values of the recorded step."""
    made = []

    def __init__(self, step, device, others):
        runner = step.func.__self__
        buffers = [x for x in vars(runner).values() if isinstance(x, torch.Tensor)] + [runner.cache.storage]
        before = [x.clone() for x in buffers]
        step()                               # the first run
        after = [x.clone() for x in buffers]
        for values, recorder in ((before, Recorder()), (after, None)):
            for buffer, value in zip(buffers, values):
                buffer.copy_(value)
            if recorder:                     # then restore the buffers, since capturing does not execute
                with recorder:
                    step()
                self.operations = recorder.operations
        self.made.append(self)

    def replay(self):
        for function, args, kwargs, results in self.operations:
            inputs = memory_of((args, kwargs))
            for old, new in zip(tree_leaves(results), tree_leaves(function(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)
