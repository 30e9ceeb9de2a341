"""The micro-batch that fits: a rehearsal before the first step, arithmetic for machines and people."""
import dataclasses
import json
import os
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

from runtime import distributed
from runtime.checkpoint import write_atomically
from runtime.guard import Failure

GIB = 2**30
CPU_SLACK = 1.6              # peak resident set over the arithmetic below: 1.0 to 1.6 in six shapes (NOTES.md)


def is_out_of_memory(error):
    """Whether an allocator raised it: a GPU's, an Apple GPU's or the CPU's."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and any(w in str(error) for w in words)


def smaller(micro_batch, share):
    """The largest micro-batch of at most half the size that cuts a rank's share of a step into equal parts."""
    return max(n for n in range(1, micro_batch // 2 + 1) if share % n == 0)


def retreat(out_dir, cfg, step, micro_batch, share, reason, say):
    """The micro-batch with which to repeat a step that ran out of memory. Only one process can: of several, the others
    already wait for this one's gradients, so it leaves the number to the run folder, and ends with Failure."""
    if micro_batch == 1:
        raise Failure(f"Step {step + 1} ran out of memory with a micro-batch of one sequence ({reason}): go on from the last "
                      "checkpoint with --gradient_checkpointing, or where more memory is free.")
    less = smaller(micro_batch, share)
    if distributed.world_size() > 1:
        write_atomically(Path(out_dir) / "retreat.json", json.dumps({"batch_size": cfg.batch_size, "micro_batch": less}).encode())
        raise Failure(f"Rank {distributed.rank()} ran out of memory at step {step + 1} ({reason}): --init_from=resume "
                      f"--out_dir={out_dir} goes on from the last checkpoint with a micro-batch of {less} instead of {micro_batch}.")
    say(f"Step {step + 1} ran out of memory ({reason}): it is repeated with a micro-batch of {less} instead of {micro_batch}.")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return less


def after_retreat(out_dir, cfg, micro_batch):
    """micro_batch, or the smaller one that a rank without memory left to the run folder."""
    try:
        left = json.loads((Path(out_dir) / "retreat.json").read_text())
    except OSError:
        return micro_batch
    return min(micro_batch, left["micro_batch"]) if left["batch_size"] == cfg.batch_size else micro_batch


def rehearse(model, hardware, micro_batch, block_size, passes, optimizer_bytes):
    """None if a training step of the longest sequences and an evaluation run and fit, else the exception.

    The gradients of `passes` micro-steps accumulate as they will, with room taken for the optimizer's state. On a CPU,
    where the kernel kills what takes too much instead of refusing it, arithmetic comes first.
    """
    failure, plain = None, getattr(model, "_orig_mod", model)
    x = torch.zeros(micro_batch, block_size, dtype=torch.long, device=hardware.device)
    try:
        if hardware.device.type == "cpu":
            needed = CPU_SLACK * sum(parts(plain, hardware, micro_batch, block_size, optimizer_bytes).values())
            if needed > (free := available(hardware)):
                raise torch.OutOfMemoryError(f"about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free")
        reserved = torch.empty(optimizer_bytes, dtype=torch.uint8, device=hardware.device)
        for _ in range(passes):
            with hardware.autocast():
                loss = model(x, x)
            loss.backward()
        with hardware.autocast(), torch.no_grad():
            model.eval()(x, x)
        del reserved, loss
    except Exception as e:                    # out of memory, or whatever torch.compile stumbles over on this machine
        failure = type(e)(*e.args) if is_out_of_memory(e) else e.with_traceback(None)       # the traceback holds tensors
    plain.train().zero_grad(set_to_none=True)
    model.train()
    if hardware.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return failure


def parts(model, hardware, micro_batch, block_size, optimizer_bytes):
    """Bytes that a training step adds to the weights, by name, without compiling (which saves some of the activations)."""
    one, two = (saved_for_backward(model, hardware, rows, block_size) for rows in (1, 2))
    rows_of_logits = min(micro_batch * block_size, model.rows_at_a_time(hardware.device.type))
    return {"gradients": 4 * sum(p.numel() for p in model.parameters()), "optimizer": optimizer_bytes,
            "activations": one + (micro_batch - 1) * (two - one),
            "head": 3 * 4 * model.config.padded_vocab_size * (rows_of_logits + model.config.n_embd)}


def saved_for_backward(model, hardware, rows, block_size):
    """Bytes that a forward pass of rows x block_size keeps for the backward pass. Shapes alone are computed."""
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor
    with FakeTensorMode():                    # on "cpu", which has the same autocast and needs no GPU
        double = type(model)(dataclasses.replace(model.config), model.backend, model.gradient_checkpointing, model.loss_chunks)
        if hardware.device.type != "cpu":     # whose fused attention drops out without keeping the weights, unlike the CPU's
            double.config.dropout = 0.0
        x = torch.zeros(rows, block_size, dtype=torch.long)
        with torch.autocast("cpu", hardware.torch_dtype, enabled=hardware.dtype != "fp32"):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                kept = double(x, x)
        for p in double.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
    del kept
    return sum(saved.values())


def available(hardware):
    """Bytes that this process can still take: of the GPU, or of its share of the machine (or container)."""
    if hardware.device.type == "cuda":
        return torch.cuda.mem_get_info(hardware.device)[0]
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


def advice(model, hardware, block_size, optimizer_bytes):
    """The sentence for a micro-batch of one that does not fit: what is needed, what is there, what to lower."""
    need = parts(model, hardware, 1, block_size, optimizer_bytes)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in ({"weights": weights} | need).items())
    lower = ["lower --n_layer, --n_embd or --block_size"]
    if not model.gradient_checkpointing and need["activations"] > need["gradients"] / 2:
        lower.insert(0, "use --gradient_checkpointing")
    return (f"A micro-batch of one sequence of {block_size} tokens does not fit {hardware.name}, which has "
            f"{(available(hardware)) / GIB:.2f} GiB left beside the weights; it needs about (GiB) {shown}, "
            f"{(weights + sum(need.values())) / GIB:.2f} in all: {', or '.join(lower)}.")
