"""The largest micro-batch that fits: a trial step before training, and estimates of its memory."""
import dataclasses
import gc
import os
import time
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import on_meta
from runtime import distributed, parallel
from runtime.config import BadInput
from runtime.guard import Failure, is_out_of_memory
from runtime.hardware import return_freed_memory
from runtime.progress import ProgressLine

GIB = 2**30
# Measured peak resident set divided by the estimate below: 1.0 to 1.6 for six shapes (docs/notes.md)
CPU_SLACK = 1.6
SMALLER_MODEL = ("lower --n_layer or --n_embd, choose a smaller model, or shard it over several GPUs with "
                 "--parallel=fsdp")
CGROUPS = {"": ("/sys/fs/cgroup", "memory.max", "anon"),     # {controllers: folder, limit's file, used}
           "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss")}


def n_params(config):
    """Return the number of weights of GPT(config), from one block and one position of it."""
    model = on_meta(dataclasses.replace(config, n_layer=1, block_size=1))
    blocks = (config.n_layer - 1) * sum(p.numel() for p in model.blocks.parameters())
    positions = (config.block_size - 1) * config.n_embd if config.position == "learned" else 0
    return model.n_params() + blocks + positions


def check_weights(config, device, ranks=1, remedy=SMALLER_MODEL):
    """Raise BadInput with a remedy if the weights of GPT(config), sharded over `ranks`, do not fit in
    memory."""
    device = torch.device(device)
    rotations = 2 * config.block_size * config.head_dim if config.position == "rope" else 0
    size = 4 * (n_params(config) // ranks + rotations)
    free = available(device)
    if size > free:
        raise BadInput(f"The weights of this model alone take {size / GIB:.1f} GiB, and the "
                       f"device has {free / GIB:.1f} GiB free: {remedy}.")


def divisors(micro_batch, share):
    """Return micro-batches to try, largest first: each the largest, at most half the one before, that divides
    a rank's share of a step."""
    sizes = [micro_batch]
    while sizes[-1] > 1:
        sizes.append(next(n for n in range(sizes[-1] // 2, 0, -1) if share % n == 0))
    return sizes


def rehearse(model, hardware, micro_batch, block_size, passes, optimizer_bytes, update=None, prefix=None,
             loss_of=None):
    """Try a training step with the longest sequences and (without `update`) an evaluation. Return None if
    they run and fit, else the exception; Failure if the model is sharded, since this process can't try again.

    Gradients accumulate over `passes` micro-steps, with memory reserved for the optimizers' state. On a CPU,
    where the kernel kills a process that takes too much, an estimate comes first. update(model) returns
    grpo.py's loss of about as many positions. prefix: ids [P] that the sequences begin with. loss_of: the
    loss of a micro-batch, None for model.loss.
    Sets model.rehearsed_s: seconds of the last micro-step, None if unknown. Every rank must call."""
    if hardware.device.type == "cpu":
        needed = estimate(model.model, hardware, micro_batch, block_size, optimizer_bytes)
        free = available(hardware.device)
        if distributed.on_any_rank(needed > free):    # decide together before any rank allocates
            return torch.OutOfMemoryError(f"about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free")
        if update and not hardware.compile:
            return None                      # the trial takes as long as two steps: minutes for a real model
    whole = torch.zeros(micro_batch, block_size, dtype=torch.long, device=hardware.device)
    x = whole
    if prefix is not None:
        x = whole[:, len(prefix):]
        prefix = prefix.to(hardware.device)
    failure = None
    try:
        reserved = torch.empty(optimizer_bytes, dtype=torch.uint8, device=hardware.device)
        for _ in model.micro_steps([None] * passes):
            clock = time.perf_counter()
            with hardware.autocast():
                loss = update(model) if update else (loss_of or model.loss)(x, x, None, prefix)
            loss.backward()
            hardware.wait()
            model.rehearsed_s = time.perf_counter() - clock
        if hardware.compile and passes == 1:
            model.rehearsed_s = None         # mostly compilation
        if not update:
            model.eval()
            with hardware.autocast(), torch.no_grad():
                model.loss(whole, whole)
        del reserved, loss
    except Exception as e:                   # out of memory, a torch.compile failure, or a bug in the model
        failure = e
        if model.is_sharded:                  # the other ranks are in the middle of an exchange
            problem = "ran out of memory: lower --batch_size or --tokens_per_micro_batch"
            if not is_out_of_memory(e):
                reason = str(e).strip().partition("\n")[0]
                problem = f"failed ({type(e).__name__}: {reason}): try --compile=false"
            raise Failure(f"Rank {distributed.rank()} {problem} (a sharded model can't retry).") from None
        if is_out_of_memory(e):               # a new exception: the traceback of this one holds tensors
            failure = torch.OutOfMemoryError(str(e).partition("\n")[0])
    model.train().zero_grad(set_to_none=True)
    release()                                # else the engine finds no memory for its slots
    if hardware.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return failure


def release():
    """Return the memory of objects without references to the GPU or the system, where `available` counts
    it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    return_freed_memory()


def widest(run, sizes, block_size, optimizer_bytes):
    """Return the first of these micro-batches, largest first, whose estimate fits in memory on every rank."""
    for size in sizes:
        needed = estimate(run.model, run.hardware, size, block_size, optimizer_bytes)
        if not distributed.on_any_rank(needed > available(run.hardware.device)):
            break
    return size


def fit(run, sizes, attempt, advice):
    """Return the model for the loop, with the first micro-batch of `sizes` that fits on every rank; run keeps
    it and the sizes. attempt(size): returns (TrainedModel, exception of `rehearse` or None). advice(): the
    message of the BadInput if none fits. If torch.compile fails, do without."""
    hardware = run.hardware
    run.sizes = sizes
    remaining = list(sizes)
    while True:
        size = remaining[0]
        failure = None
        if hardware.compile:
            torch.compiler.reset()            # frees the memory of the last attempt, as does failure = None
        with ProgressLine(f"trying a micro-batch of {size}{', compiling' if hardware.compile else ''}"):
            model, failure = attempt(size)
        if distributed.on_any_rank(failure is not None and is_out_of_memory(failure)):
            del remaining[0]
            if not remaining:
                raise BadInput(distributed.on_main(advice))
            run.log.say(f"A micro-batch of {size} does not fit in memory ({failure or 'on another rank'}): "
                        f"trying {remaining[0]}.")
        elif distributed.on_any_rank(failure is not None):
            if not hardware.compile:
                raise failure or Failure("Another rank failed at its first step.", alone=False)
            reason = "on another rank"
            if failure:
                reason = f"{type(failure).__name__}: {str(failure).strip()}".splitlines()[0]
            run.log.say(f"torch.compile failed ({reason}): training continues without it.")
            hardware.compile = False
        else:
            run.state.micro_batch = size
            model.share_gradients()
            return model


def estimate(*step):
    """Return the bytes that a step takes at most besides the weights. step: the arguments of `parts`."""
    _, hardware, *_ = step
    slack = CPU_SLACK if hardware.device.type == "cpu" else 1.0
    return slack * sum(parts(*step).values())


def parts(model, hardware, micro_batch, block_size, optimizer_bytes):
    """Return {name: bytes} of a step besides the weights, in eager mode (torch.compile saves less)."""
    trainable = sum(parallel.local(p).numel() for p in model.parameters() if p.requires_grad)
    rows_of_logits = min(micro_batch * block_size, model.rows_per_chunk(hardware.device))
    feedback = {"feedback": model.feedback.pending_bytes()} if model.feedback else {}
    return feedback | {
        "gradients": 4 * trainable,
        "gathered": parallel.gathered_bytes(model, hardware.torch_dtype),
        "optimizer": optimizer_bytes,
        "activations": saved_for_backward(model, hardware, micro_batch, block_size),
        "head": 3 * 4 * model.config.padded_vocab_size * (rows_of_logits + model.config.n_embd),
    }


def saved_for_backward(model, hardware, rows, block_size):
    """Return the bytes that a forward pass of rows x block_size saves for the backward pass, computed with
    fake tensors."""
    saved = {}                               # {storage: bytes}; tensors may share a storage

    def record(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor
    # Fake tensors on "cpu" have the same autocast and need no GPU; the kernels are the CPU's, not those that
    # setup chose for a GPU.
    with FakeTensorMode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        config = dataclasses.replace(model.config)
        fake_model = type(model)(config, model.backend, model.gradient_checkpointing, model.loss_chunks)
        # A GPU's fused attention does not keep the attention weights for dropout; the CPU's does.
        if hardware.device.type != "cpu":
            fake_model.config.dropout = 0.0
        x = torch.zeros(rows, block_size, dtype=torch.long)
        with torch.autocast("cpu", hardware.torch_dtype, enabled=hardware.dtype != "fp32"):
            with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
                loss = fake_model.loss(x, x)
        for p in fake_model.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
    del loss
    return sum(saved.values())


def available(device):
    """Return the free bytes of the GPU, or this process's share of those of the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *free_in_cgroups()]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_in_cgroups():
    """Yield the free bytes within each memory limit that a container, SLURM or systemd sets."""
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUPS:
            root, limit, used = CGROUPS[controllers]
            for folder in Path(root, path.lstrip("/"), "memory.stat").parents:
                most = read_text(folder / limit).strip()
                if most.isdigit():
                    figures = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
                    yield int(most) - int(figures.get(used, 0))


def read_text(path):
    """Return a file's text, or "" if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def advice(model, hardware, block_size, optimizer_bytes, lower="lower --n_layer, --n_embd or --block_size"):
    """Return the message for a micro-batch of one sequence that does not fit: memory needed, free memory, and
    options to change."""
    weights = sum(parallel.local(p).numel() * p.element_size() for p in model.parameters())
    needed = {"weights": weights} | parts(model, hardware, 1, block_size, optimizer_bytes)
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
    if not model.gradient_checkpointing and needed["activations"] > needed["gradients"] / 2:
        lower = f"use --gradient_checkpointing, or {lower}"
    return (f"A micro-batch of one sequence of {block_size} tokens does not fit in memory; {hardware.name} "
            f"has {available(hardware.device) / GIB:.2f} GiB free beside the weights, and a step needs about "
            f"{sum(needed.values()) / GIB:.2f} GiB ({shown}): {lower}.")
