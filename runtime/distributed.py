"""Collectives over the ranks of torchrun, or trivial ones for a single process, and the model that ranks
train."""
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

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")    # compile modes that record CUDA graphs
SAVE_TIMEOUT = 60.0                  # seconds for a rank to save after its torchrun was killed
STEP_TIMEOUT = datetime.timedelta(hours=1)           # of collectives in a step

patient = None      # process group with a long timeout, for the work of rank 0 alone, such as tokenization
store = None        # torchrun's key-value store


def init():
    """Join torchrun's process group, if there is one: gloo for CPU tensors, NCCL for GPU tensors."""
    global patient, store
    if "RANK" in os.environ and not dist.is_initialized():
        # After a restart, torchrun's store still has the addresses of failed ranks (torch 2.13), so use a new
        # prefix.
        store, *_ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=exit_with, args=[os.getppid()], daemon=True).start()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=STEP_TIMEOUT, store=store, rank=rank(),
                                world_size=world_size())
        patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def exit_with(torchrun):
    """End this rank after its torchrun (a process id) was killed: by SIGTERM, so that the run saves, and
    after SAVE_TIMEOUT seconds at the latest."""
    while os.getppid() == torchrun:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_TIMEOUT)
    os._exit(128 + signal.SIGTERM)


def close():
    if dist.is_initialized():
        # DDP's reference cycles hold the group, whose threads must end before the interpreter does.
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
    """Tell whether no other rank has printed this sentence: most errors occur on all ranks, some on one."""
    try:
        return store is None or store.add(f"said: {sentence}", 1) == 1
    except RuntimeError:                     # the rank that hosts the store has ended
        return is_main()


def sum_over_ranks(values):
    """Return the elementwise sum over all ranks of a list of numbers, in float64."""
    if not dist.is_initialized():
        return [float(v) for v in values]
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(number):
    """Return the maximum of an integer over all ranks."""
    if not dist.is_initialized():
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def on_any_rank(flag):
    """Tell whether the flag is true on any rank."""
    return sum_over_ranks([flag])[0] > 0


def gather(value):
    """Return the picklable values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value, group=patient)
    return values


def together(function, *kinds):
    """Call `function` on every rank and return its result. If it raises one of these kinds of exception on
    some rank, every rank raises the exception of the first such rank."""
    result = None
    error = None
    try:
        result = function()
    except kinds as e:
        error = e
    if on_any_rank(error is not None):
        raise next(e for e in gather(error) if e is not None)
    return result


def on_main(function):
    """Call `function` on rank 0 and broadcast its result, or the BadInput that it raised."""
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
    """Calls any method of a GPT through `forward`, as DDP and torch.compile require."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, method, *args):
        return getattr(self.model, method)(*args)


def is_spread(model):
    """Tell whether a model is sharded over the ranks (runtime.parallel)."""
    return hasattr(getattr(model, "model", model), "reshard")


def in_step(model, batches, empty):
    """Yield this rank's batches. With a sharded model, whose forward passes need all ranks, yield `empty`
    while another rank has more."""
    if not is_spread(model):
        yield from batches
        return
    batches = iter(batches)
    batch = next(batches, None)
    while on_any_rank(batch is not None):
        yield empty if batch is None else batch
        batch = next(batches, None)


class TrainedModel(nn.Module):
    """The `loss`, `token_logprobs` and `divergence` of a GPT, compiled if asked: in parts, or as a whole with
    CUDA graphs of fixed shapes.

    After share_gradients() a backward pass leaves the sum of all ranks' gradients on every rank; a sum, since
    losses are divided by the targets of all ranks. model: the GPT; if it is sharded, every rank must make
    each call."""

    def __init__(self, model, compile=False, mode=None, dynamic=None):
        super().__init__()
        self.model = model
        self.is_sharded = is_spread(model)
        self.local = Forward(model)
        self.cuda_graphs = compile and mode in CUDA_GRAPHS
        model.parts = CompiledParts()
        if self.cuda_graphs and not dynamic:
            self.local = torch.compile(self.local, mode=mode, dynamic=dynamic)
        elif compile:
            # Otherwise DDP splits each block's graph at its gradient buckets.
            torch._dynamo.config.optimize_ddp = False
            # Sizes of one, disabled adapters and frozen tensors need separate code.
            torch._dynamo.config.recompile_limit = 32
            # runtime.fsdp compiles the blocks of a sharded model.
            model.parts = CompiledParts.compiled(mode, dynamic, blocks=not self.is_sharded)
        self.ddp = None
        self.rehearsed_s = None              # set by memory.rehearse

    def share_gradients(self):
        """Sum gradients over ranks from now on. Every rank must call."""
        if world_size() > 1 and not self.is_sharded:
            device = self.model.head_weight.device
            known = inspect.signature(DistributedDataParallel).parameters
            # torch before 2.13 has broadcast_buffers.
            sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            self.ddp = DistributedDataParallel(
                self.local, device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True, **{sync: False})
            self.ddp.register_comm_hook(None, sum_gradients)

    def loss(self, x, y, target_index=None, prefix=None):
        return self.call("loss", x, y, target_index, prefix)

    def token_logprobs(self, x, y, temperature=1.0, prompts=None, target_index=None):
        return self.call("token_logprobs", x, y, temperature, prompts, target_index)

    def divergence(self, teacher, x, y, temperature, prompts, target_index):
        return self.call("divergence", teacher, x, y, temperature, prompts, target_index)

    def call(self, method, *args):
        """Call a method of the GPT, without DDP in evaluation: ranks may have different numbers of batches
        there. CUDA graphs overwrite the outputs of the last call; a first gradient would be one of them, so
        it is added to zeros."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
            for p in self.model.parameters() if torch.is_grad_enabled() else ():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        forward = self.ddp if self.ddp and torch.is_grad_enabled() else self.local
        return forward(method, *args)

    def micro_steps(self, micro_batches, empty=None):
        """Yield the micro-batches of an optimizer step. Gradients are reduced in the last backward pass only;
        with a sharded model in each, unless sum_locally is set. empty: yielded if there is none, since other
        ranks wait for the gradients, and with a sharded model while they have more."""
        micro_batches = micro_batches or [empty]
        n = max_over_ranks(len(micro_batches)) if self.is_sharded else len(micro_batches)
        for i in range(n):
            is_last = i == n - 1
            if self.ddp:
                self.ddp.require_backward_grad_sync = is_last
            if self.is_sharded and self.model.sum_locally:
                self.model.set_requires_gradient_sync(is_last)
            yield micro_batches[i] if i < len(micro_batches) else empty


def sum_gradients(_, bucket):
    """Sum gradients in DDP's communication hook, without the division by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
