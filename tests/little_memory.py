"""train.py where the allocator refuses a micro-batch of more than ROWS sequences, and after CALLS training passes of more
than ROWS_LATER; on ONLY_RANK, if that is set; in the backward pass, if BACKWARD is, when all activations are there."""
import os
import sys
import weakref
from pathlib import Path

import torch
from torch._subclasses import FakeTensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import train
from runtime import guard

calls, allowed, left_behind = 0, train.GPT.loss, lambda: None


def refuse(*_):
    raise torch.OutOfMemoryError("Tried to allocate too much for this test")


def loss(self, x, y, *more):
    global calls, left_behind
    assert left_behind() is None, "the pass that was refused is still in memory"
    rank = os.environ.get("RANK", "0")
    if rank == os.environ.get("ONLY_RANK", rank) and not isinstance(x, FakeTensor):        # those are arithmetic
        calls += self.training
        later = calls > int(os.environ.get("CALLS", 10**9))
        if len(x) > int(os.environ["ROWS_LATER" if later else "ROWS"]):
            if "BACKWARD" not in os.environ or not later:
                refuse()
            refused = allowed(self, x, y)
            refused.register_hook(refuse)
            left_behind = weakref.ref(refused.grad_fn)
            return refused
    return allowed(self, x, y)


train.GPT.loss = loss
guard.run(train.main)
