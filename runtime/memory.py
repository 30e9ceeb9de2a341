"""The micro-batch that fits: a rehearsal before the first step, arithmetic for machines and people."""
import dataclasses
import os
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import distributed
from runtime.config import BadInput
from runtime.guard import Failure

GIB = 2**30
# peak resident set over the arithmetic below: 1.0 to 1.6 in six shapes (NOTES.md)
CPU_SLACK = 1.6


def is_out_of_memory(error):
    """Whether an allocator is behind it: a GPU's, an Apple GPU's or the CPU's, alone or as the cause that a
    compiler reports."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def weight_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def n_params(c):
    """Number of weights of GPT(c), without building it, which takes minutes where a GPTConfig is absurd."""
    norm, up = c.n_embd * (2 if c.norm == "layernorm" else 1), c.mlp_hidden * (2 if c.mlp == "swiglu" else 1)
    linears = [(c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_dim, c.qkv_bias), (c.n_embd, up, c.mlp_bias),
               (c.n_head * c.head_dim, c.n_embd, c.o_bias), (c.mlp_hidden, c.n_embd, c.mlp_bias)]
    block = sum((n_in + bias) * n_out for n_in, n_out, bias in linears) + 2 * norm + 2 * c.head_dim * c.qk_norm
    rows = c.padded_vocab_size * (1 if c.tied_head else 2) + (c.block_size if c.position == "learned" else 0)
    return c.n_layer * block + norm + rows * c.n_embd


def check_weights(c, device):
    """BadInput if not even the weights of GPT(c) fit, with the sines and cosines of rotary positions."""
    device = torch.device(device)
    turns = 2 * c.block_size * c.head_dim if c.position == "rope" else 0
    size, free = 4 * (n_params(c) + turns), available(device)
    if size > free:
        raise BadInput(f"The weights of this model alone take {size / GIB:.1f} GiB, and {device.type.upper()} "
                       f"has {free / GIB:.1f} free: lower --n_layer or --n_embd, or choose a smaller model.")


def smaller(micro_batch, share):
    """The largest micro-batch of at most half the size that cuts a rank's share of a step into equal
    parts."""
    return next(n for n in range(micro_batch // 2, 0, -1) if share % n == 0)


def rehearse(model, hardware, micro_batch, block_size, passes, optimizer_bytes, inputs=None):
    """None if a training step of the longest sequences and (without `inputs`) an evaluation run and fit, else
    the exception.

    The gradients of `passes` micro-steps accumulate as they will, with room taken for the optimizer's state.
    On a CPU, where the kernel kills what takes too much instead of refusing it, arithmetic comes first.
    inputs: what grpo.py calls the model with for log-probabilities, of about as many positions. Every rank
    must call.
    """
    failure, plain = None, model.model
    if hardware.device.type == "cpu":
        needed = CPU_SLACK * sum(parts(plain, hardware, micro_batch, block_size, optimizer_bytes).values())
        too_much = needed > (free := available(hardware.device))
        if distributed.any(too_much):         # asked of all before one of them takes memory
            return torch.OutOfMemoryError(f"about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free")
    x, y = (torch.zeros(micro_batch, block_size, dtype=torch.long, device=hardware.device) for _ in range(2))
    try:
        reserved = torch.empty(optimizer_bytes, dtype=torch.uint8, device=hardware.device)
        for _ in range(passes):
            with hardware.autocast():
                loss = model.token_logprobs(*inputs)[0].sum() if inputs else model.loss(x, y)
            loss.backward()
        if not inputs:
            model.eval()
            with hardware.autocast(), torch.no_grad():
                model.loss(x, y)
        del reserved, loss
    # out of memory, what torch.compile stumbles over here, or a mistake in the model
    except Exception as e:
        # its traceback holds tensors
        failure = torch.OutOfMemoryError(str(e).splitlines()[0]) if is_out_of_memory(e) else e
    model.train().zero_grad(set_to_none=True)
    if hardware.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return failure


def fit(hardware, size, attempt, smaller, advice, say):
    """(model, size) that fit on every rank. attempt: size of a micro-batch -> (model as the loop calls it,
    exception of its rehearsal, or None). Without torch.compile where that fails; with a smaller(size), and
    again, while memory runs out on one rank, and BadInput with advice() once there is none."""
    while True:
        failure = None
        if hardware.compile:
            torch.compiler.reset()            # with `failure`, all that an earlier attempt holds in memory
        model, failure = attempt(size)
        if distributed.any(failure is not None and is_out_of_memory(failure)):
            less = smaller(size)
            if less is None:
                raise BadInput(advice())
            say(f"A micro-batch of {size} does not fit the memory ({failure or 'on another rank'}): {less} "
                "instead.")
            size = less
        elif distributed.any(failure is not None):
            if not hardware.compile:
                raise failure or Failure("Another rank failed at its first step.")
            reason = f"{type(failure).__name__}: {str(failure).strip()}".splitlines()[0] if failure else "on another rank"
            say(f"torch.compile failed, training goes on without it ({reason}).")
            hardware.compile = False
        else:
            return model, size


def parts(model, hardware, micro_batch, block_size, optimizer_bytes):
    """Bytes that a training step adds to the weights, by name, without compiling (which saves some of the
    activations)."""
    rows_of_logits = min(micro_batch * block_size, model.rows_at_a_time(hardware.device.type))
    return {"gradients": 4 * sum(p.numel() for p in model.parameters() if p.requires_grad), "optimizer": optimizer_bytes,
            "activations": saved_for_backward(model, hardware, micro_batch, block_size),
            "head": 3 * 4 * model.config.padded_vocab_size * (rows_of_logits + model.config.n_embd)}


def saved_for_backward(model, hardware, rows, block_size):
    """Bytes that a forward pass of rows x block_size keeps for the backward pass. Shapes alone are
    computed."""
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor
    # Fake tensors on "cpu", which has the same autocast and needs no GPU; its kernels, whatever setup chose
    # for a GPU.
    with FakeTensorMode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        double = type(model)(dataclasses.replace(model.config), model.backend, model.gradient_checkpointing, model.loss_chunks)
        # whose fused attention drops out without keeping the weights, unlike the CPU's
        if hardware.device.type != "cpu":
            double.config.dropout = 0.0
        x = torch.zeros(rows, block_size, dtype=torch.long)
        with torch.autocast("cpu", hardware.torch_dtype, enabled=hardware.dtype != "fp32"):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                kept = double.loss(x, x)
        for p in double.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
    del kept
    return sum(saved.values())


def available(device):
    """Bytes that this process can still take: of the GPU, or of its share of the machine (or container)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = read(group / "memory.max").strip(), dict(line.split() for line in read(group / "memory.stat").splitlines())
    if limit.isdigit():
        free = min(free, int(limit) - int(used.get("anon", 0)))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def read(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def advice(model, hardware, block_size, optimizer_bytes, lower="lower --n_layer, --n_embd or --block_size"):
    """The sentence for a micro-batch of one that does not fit: what is needed, what is there, what to
    lower."""
    need = {"weights": weight_bytes(model)} | parts(model, hardware, 1, block_size, optimizer_bytes)
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in need.items())
    if not model.gradient_checkpointing and need["activations"] > need["gradients"] / 2:
        lower = f"use --gradient_checkpointing, or {lower}"
    return (f"A micro-batch of one sequence of {block_size} tokens does not fit {hardware.name}, which has "
            f"{available(hardware.device) / GIB:.2f} GiB left beside the weights; it needs about (GiB) "
            f"{shown}, {sum(need.values()) / GIB:.2f} in all: {lower}.")
