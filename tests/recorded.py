"""Stands in for a CUDA graph where there is no GPU: what a step did is done again, operation by operation, on
the same memory."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# what would wait for the device
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")


def memory_of(values):
    return [x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Keeps each operation with the very tensors that it took and gave."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in WAITS, f"{name} waits for the device, so no graph can hold it"
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result


class Recorded:
    """Has what engine/generate.py asks of a CUDAGraph. A buffer that has moved meanwhile, or a number that Python
    computed, is what it was when the step was recorded."""
    made = []

    def __init__(self, step, device, others):
        engine = step.func.__self__
        buffers = [x for x in vars(engine).values() if isinstance(x, torch.Tensor)] + [engine.cache.storage]
        before = [x.clone() for x in buffers]
        step()                               # the first run
        after = [x.clone() for x in buffers]
        for values, recorder in ((before, Recorder()), (after, None)):
            for buffer, value in zip(buffers, values):
                buffer.copy_(value)
            if recorder:                     # what is captured does not run
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
