"""The micro-batch that fits: a rehearsal before the first step, arithmetic for machines and people."""
import dataclasses
import os
import time
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import distributed, parallel
from runtime.config import BadInput
from runtime.guard import Failure
from runtime.progress import ProgressLine

GIB = 2**30
# peak resident set over the arithmetic below: 1.0 to 1.6 in six shapes (docs/notes.md)
CPU_SLACK = 1.6


def is_out_of_memory(error):
    """Tell whether an allocator is behind it: a GPU's, an Apple GPU's or the CPU's, alone, as the cause that a
    compiler reports, or as what ended the capture of a CUDA graph."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if "captur" in str(error) and error.__context__:
        return is_out_of_memory(error.__context__)
    phrases = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")
    return any(phrase in str(error) for phrase in phrases)


def weight_bytes(model):
    """Return what this rank keeps of the weights."""
    return sum(parallel.local(p).numel() * p.element_size() for p in model.parameters())


def n_params(config):
    """Count the weights of GPT(config) without building it, which takes minutes where a GPTConfig is
    absurd."""
    channels = config.n_embd
    heads = config.n_head * config.head_dim
    qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
    up = config.mlp_hidden * (2 if config.mlp == "swiglu" else 1)
    norm = channels * (2 if config.norm == "layernorm" else 1)
    linears = [                              # inputs, outputs, bias
        (channels, qkv, config.qkv_bias),
        (heads, channels, config.o_bias),
        (channels, up, config.mlp_bias),
        (config.mlp_hidden, channels, config.mlp_bias),
    ]
    block = sum((n_in + bias) * n_out for n_in, n_out, bias in linears)
    block += 2 * norm + 2 * config.head_dim * config.qk_norm
    if config.mixer == "favor":
        block += config.mixer_features * config.head_dim
    if config.mixer_rule == "delta":
        block += channels * config.n_kv_head
    embeddings = config.padded_vocab_size * (1 if config.tied_head else 2)
    if config.position == "learned":
        embeddings += config.block_size
    return config.n_layer * block + norm + embeddings * channels


def check_weights(config, device, ranks=1):
    """Raise BadInput if not even the weights of GPT(config) fit, of which each of the `ranks` has its share,
    with the sines and cosines of rotary positions."""
    device = torch.device(device)
    rotations = 2 * config.block_size * config.head_dim if config.position == "rope" else 0
    size = 4 * (n_params(config) // ranks + rotations)
    free = available(device)
    if size > free:
        raise BadInput(f"The weights of this model alone take {size / GIB:.1f} GiB, and "
                       f"{device.type.upper()} has {free / GIB:.1f} free: lower --n_layer or --n_embd, "
                       "choose a smaller model, or share it among GPUs with --parallel=fsdp.")


def smaller(micro_batch, share):
    """Return the largest micro-batch of at most half the size that cuts a rank's share of a step into
    equal parts."""
    return next(n for n in range(micro_batch // 2, 0, -1) if share % n == 0)


def rehearse(model, hardware, micro_batch, block_size, passes, optimizer_bytes, inputs=None):
    """Try a training step of the longest sequences and (without `inputs`) an evaluation. Return None if they
    run and fit, else the exception.

    Failure where a sharded model can't be tried again in this process. The gradients of `passes` micro-steps
    accumulate as they will, with room taken for the optimizer's state. model.rehearsed_s: seconds of the last
    one, None if not known. On a CPU, where the kernel kills what takes too much instead of refusing it,
    arithmetic comes first. inputs: what grpo.py calls the model with for log-probabilities, of about as many
    positions. Every rank must call.
    """
    if hardware.device.type == "cpu":
        step_bytes = parts(model.model, hardware, micro_batch, block_size, optimizer_bytes)
        needed = CPU_SLACK * sum(step_bytes.values())
        free = available(hardware.device)
        if distributed.any(needed > free):    # asked of all before one of them takes memory
            return torch.OutOfMemoryError(f"about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free")
    x = torch.zeros(micro_batch, block_size, dtype=torch.long, device=hardware.device)
    y = torch.zeros_like(x)
    failure = None
    try:
        reserved = torch.empty(optimizer_bytes, dtype=torch.uint8, device=hardware.device)
        for _ in model.micro_steps([None] * passes):
            clock = time.perf_counter()
            with hardware.autocast():
                if inputs:
                    loss = model.token_logprobs(*inputs)[0].sum()
                else:
                    loss = model.loss(x, y)
            loss.backward()
            hardware.wait()
            model.rehearsed_s = time.perf_counter() - clock
        if hardware.compile and passes == 1:
            model.rehearsed_s = None         # it was mostly compiled in
        if not inputs:
            model.eval()
            with hardware.autocast(), torch.no_grad():
                model.loss(x, y)
        del reserved, loss
    # out of memory, what torch.compile stumbles over here, or a mistake in the model
    except Exception as e:
        failure = e
        if model.is_sharded:                  # the other ranks are in the middle of an exchange
            what = "runs out of memory: give fewer sequences or tokens a micro-step"
            if not is_out_of_memory(e):
                what = f"fails ({type(e).__name__}: {str(e).strip().partition(chr(10))[0]}): try --compile=false"
            raise Failure(f"Rank {distributed.rank()} {what}; a sharded model can't try again by itself.") from None
        if is_out_of_memory(e):               # a new one, for the traceback of this one holds tensors
            failure = torch.OutOfMemoryError(str(e).partition("\n")[0])
    model.train().zero_grad(set_to_none=True)
    if hardware.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return failure


def fit(hardware, size, attempt, smaller, advice, log):
    """Return (model, size) that fit on every rank. attempt: size of a micro-batch -> (model as the loop calls
    it, exception of its rehearsal, or None). Without torch.compile where that fails; with a smaller(size),
    and again, while memory runs out on one rank, and BadInput with advice() once there is none. log: prints
    a line."""
    while True:
        failure = None
        if hardware.compile:
            torch.compiler.reset()            # with `failure`, all that an earlier attempt holds in memory
        with ProgressLine(f"trying a micro-batch of {size}{', compiling' if hardware.compile else ''}"):
            model, failure = attempt(size)
        if distributed.any(failure is not None and is_out_of_memory(failure)):
            next_size = smaller(size)
            if next_size is None:
                raise BadInput(advice())
            log(f"A micro-batch of {size} does not fit the memory ({failure or 'on another rank'}): "
                f"{next_size} instead.")
            size = next_size
        elif distributed.any(failure is not None):
            if not hardware.compile:
                raise failure or Failure("Another rank failed at its first step.")
            reason = "on another rank"
            if failure:
                reason = f"{type(failure).__name__}: {str(failure).strip()}".splitlines()[0]
            log(f"torch.compile failed, training goes on without it ({reason}).")
            hardware.compile = False
        else:
            return model, size


def parts(model, hardware, micro_batch, block_size, optimizer_bytes):
    """Return {name: bytes} of what a training step adds to the weights, without compiling (which saves some
    of the activations)."""
    trainable = sum(parallel.local(p).numel() for p in model.parameters() if p.requires_grad)
    rows_of_logits = min(micro_batch * block_size, model.rows_per_chunk(hardware.device))
    feedback = {"feedback": model.feedback.bytes_to_come()} if model.feedback else {}
    return feedback | {
        "gradients": 4 * trainable,
        "gathered": parallel.gathered_bytes(model, hardware.torch_dtype),
        "optimizer": optimizer_bytes,
        "activations": saved_for_backward(model, hardware, micro_batch, block_size),
        "head": 3 * 4 * model.config.padded_vocab_size * (rows_of_logits + model.config.n_embd),
    }


def saved_for_backward(model, hardware, rows, block_size):
    """Return the bytes that a forward pass of rows x block_size keeps for the backward pass. Shapes alone are
    computed."""
    saved = {}                               # {storage: bytes}, for several tensors may share one

    def record(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor
    # Fake tensors on "cpu", which has the same autocast and needs no GPU; its kernels, whatever setup chose
    # for a GPU.
    with FakeTensorMode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        config = dataclasses.replace(model.config)
        fake_model = type(model)(config, model.backend, model.gradient_checkpointing, model.loss_chunks)
        # whose fused attention drops out without keeping the weights, unlike the CPU's
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
    """Return the bytes that this process can still take: of the GPU, or of its share of the machine (or
    container)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    limit = read_text(cgroup / "memory.max").strip()
    used = dict(line.split() for line in read_text(cgroup / "memory.stat").splitlines())
    if limit.isdigit():
        free = min(free, int(limit) - int(used.get("anon", 0)))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def read_text(path):
    """Return a file's text, which is empty if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def advice(model, hardware, block_size, optimizer_bytes, lower="lower --n_layer, --n_embd or --block_size"):
    """Return the sentence for a micro-batch of one that does not fit: what is needed, what is there, what to
    lower."""
    needed = {"weights": weight_bytes(model)} | parts(model, hardware, 1, block_size, optimizer_bytes)
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
    if not model.gradient_checkpointing and needed["activations"] > needed["gradients"] / 2:
        lower = f"use --gradient_checkpointing, or {lower}"
    return (f"A micro-batch of one sequence of {block_size} tokens does not fit {hardware.name}, which has "
            f"{available(hardware.device) / GIB:.2f} GiB left beside the weights; it needs about (GiB) "
            f"{shown}, {sum(needed.values()) / GIB:.2f} in all: {lower}.")
