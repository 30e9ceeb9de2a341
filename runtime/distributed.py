"""The ranks that torchrun started, or the one process that runs without it."""
import datetime
import gc
import inspect
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from model import CompiledParts
from runtime.config import BadInput

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")    # compile modes that record a step, and can't accumulate
LAST_WORDS = 60.0                    # seconds in which a rank may save when its torchrun was killed
STEP_TIMEOUT = datetime.timedelta(hours=1)           # of an exchange within a step: one that takes longer hangs

# the group that waits for what the first rank does alone: tokenising may take hours
patient = None
# what all ranks can read, with a few words of each
store = None


def init():
    """Join torchrun's process group, if there is one: gloo for tensors on the CPU, NCCL for those on a
    GPU."""
    global patient, store
    if "RANK" in os.environ and not dist.is_initialized():
        # After a restart torchrun's store still has the addresses of the ranks that failed (torch 2.13):
        # others would try to connect to them.
        store, *_ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=STEP_TIMEOUT, store=store, rank=rank(), world_size=world_size())
        patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def end_with(torchrun):
    """End this rank when torchrun was killed, and could not do so: by a SIGTERM, after which a run saves, or
    at the latest in LAST_WORDS seconds. torchrun: the id of its process."""
    while os.getppid() == torchrun:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_WORDS)
    os._exit(128 + signal.SIGTERM)


def close():
    if dist.is_initialized():
        # DDP's cycles hold the group: its threads must end before the interpreter does, or they abort it
        gc.collect()
        dist.destroy_process_group()


def rank():
    return int(os.environ.get("RANK", 0))


def local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


def local_world_size():
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_main():
    return rank() == 0


def is_first_to_say(sentence):
    """Tell whether no other rank has said it: most of what is wrong is found by all of them, some by one."""
    try:
        return store is None or store.add(f"said: {sentence}", 1) == 1
    except RuntimeError:                     # the store ended with the rank that had it
        return is_main()


def sum(values):
    """The elementwise sum over all ranks of a list of numbers, as a list of float64."""
    if not dist.is_initialized():
        return [float(v) for v in values]
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def most(number):
    """The largest of all ranks' whole numbers."""
    if not dist.is_initialized():
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def any(flag):
    """True on every rank if it is true on one."""
    return sum([flag])[0] > 0


def gather(value):
    """The value of every rank (anything that can be pickled), in their order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=patient)
    return values


def together(function, *kinds):
    """What `function` returns on this rank. If it raises one of these kinds of exception on a rank, every
    rank raises it, of several that of the first."""
    result, error = None, None
    try:
        result = function()
    except kinds as e:
        error = e
    if any(error is not None):
        raise next(e for e in gather(error) if e is not None)
    return result


def on_main(function):
    """Run `function` on the first rank alone; every rank gets what it returned, or the BadInput that it
    raised."""
    if not dist.is_initialized():
        return function()
    answer = [None, None]
    if is_main():
        try:
            answer[0] = function()
        except BadInput as e:
            answer[1] = str(e)
    dist.broadcast_object_list(answer, src=0, group=patient, device=torch.device("cpu"))
    if answer[1] is not None:
        raise BadInput(answer[1])
    return answer[0]


# --- the model that all ranks train ---

class Forward(nn.Module):
    """One `forward` for all that training asks of a GPT, since DDP and torch.compile look at nothing else."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, method, *args):
        return getattr(self.model, method)(*args)


def is_spread(model):
    """Tell whether sharding.shard has spread a model over the ranks."""
    return hasattr(getattr(model, "model", model), "reshard")


def in_step(model, batches, empty):
    """Yield the batches of this rank and, of a sharded model, `empty` while another rank has more: all must
    take part in each forward pass."""
    if not is_spread(model):
        yield from batches
        return
    batches = iter(batches)
    batch = next(batches, None)
    while any(batch is not None):
        yield empty if batch is None else batch
        batch = next(batches, None)


class TrainedModel(nn.Module):
    """A GPT as a training loop calls it: its `loss` and `token_logprobs`, compiled if that is asked for: by its
    parts, or with CUDA graphs as a whole.

    After share_gradients() a backward pass leaves the same gradients on every rank: the sum of what each
    found, since losses are divided by the targets of all ranks. model: the GPT itself; sharding.shard may
    have spread it, and then every call must be made by all ranks."""

    def __init__(self, model, compile=False, mode=None, dynamic=None):
        super().__init__()
        self.model = model
        self.is_sharded = is_spread(model)
        self.local = Forward(model)
        model.parts = CompiledParts()
        if compile and mode in CUDA_GRAPHS:
            self.local = torch.compile(self.local, mode=mode, dynamic=dynamic)
        elif compile:
            # Or DDP would have each block cut where it thinks that a bucket of gradients ends.
            torch._dynamo.config.optimize_ddp = False
            # Sizes of one, adapters that are off and what takes no gradient have code of their own.
            torch._dynamo.config.recompile_limit = 32
            model.parts = CompiledParts.compiled(mode, dynamic, blocks=not self.is_sharded)       # which sharding compiles
        self.ddp = None
        self.rehearsed_s = None              # see memory.rehearse

    def share_gradients(self):
        """From now on with the other ranks, if there are any. Every rank must call."""
        if world_size() > 1 and not self.is_sharded:
            device = self.model.head_weight.device
            known = inspect.signature(DistributedDataParallel).parameters
            sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"      # before 2.13
            self.ddp = DistributedDataParallel(
                self.local, device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True, **{sync: False})
            self.ddp.register_comm_hook(None, sum_gradients)

    def loss(self, x, y):
        return self.call("loss", x, y)

    def token_logprobs(self, x, y, temperature=1.0, prompts=None, target_index=None):
        return self.call("token_logprobs", x, y, temperature, prompts, target_index)

    def call(self, method, *args):
        """Evaluation is each rank's own, and they need not have as many batches, unless the model is
        sharded."""
        forward = self.ddp if self.ddp and torch.is_grad_enabled() else self.local
        return forward(method, *args)

    def micro_steps(self, micro_batches, empty=None):
        """Yield the micro-batches of an optimizer step. Gradients are exchanged in the last one's backward
        pass alone; those of a sharded model in each, unless sum_locally was asked for. empty: what a rank
        gets in which others have more micro-batches."""
        n = len(micro_batches)
        if self.is_sharded:
            n = most(n)
        for i in range(n):
            is_last = i == n - 1
            if self.ddp:
                self.ddp.require_backward_grad_sync = is_last
            if self.is_sharded and self.model.sum_locally:
                self.model.set_requires_gradient_sync(is_last)
            yield micro_batches[i] if i < len(micro_batches) else empty


def sum_gradients(_, bucket):
    """DDP's exchange of gradients, without its division by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
