"""What train.py and grpo.py share of an optimizer step."""
import functools
import math

import torch
import torch.nn as nn

from runtime import distributed, parallel
from runtime.hardware import cpu_multiplies_bf16

# Weights that Muon moves together: 128 MiB of updates in fp32 and three times 64 in bf16, or 128 where bf16
# is slow.
AT_A_TIME = 2**25
# Devices on which ranks that have the same gradients share Muon's work, and exchange its results. On a
# CPU that would take longer than it saves.
SPREAD_ON = ("cuda",)
# Devices on which --compile is for Newton and Schulz's iteration too. Its products stay as they are; what is
# fused is around them. On a CPU compiling them takes longer than a run would save.
COMPILE_ON = ("cuda",)


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the same results, up to rounding, and state. Matrices of one shape are
    orthogonalised together: of a small model each product is quicker done than dispatched (16 matrices 128
    wide, two Zen 5 cores: 4.0 ms instead of 8.0)."""
    is_compiled = False
    in_fp32 = False                          # on a CPU, where a run is in fp32

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                n = max(1, AT_A_TIME // shape.numel()) * parallel.cards(matrices[0])       # so many for each
                if is_shared_out(matrices[0]):
                    n = -(-n // distributed.world_size()) * distributed.world_size()
                for start in range(0, len(matrices), n):
                    self.update(matrices[start:start + n], group)

    def update(self, matrices, group):
        """Do one step of matrices of one shape."""
        lr = group["lr"]
        momentum = group["momentum"]
        shape = matrices[0].shape
        for p in matrices:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # Of sharded weights each rank moves its own rows.
        grads = [parallel.local(p.grad) for p in matrices]
        buffers = [parallel.local(self.state[p]["momentum_buffer"]) for p in matrices]
        weights = [parallel.local(p) for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)              # Nesterov's
        dtype = muon_dtype(weights[0].device, self.in_fp32)
        updates = torch.stack(updates)
        if dtype != torch.float16:           # which is too narrow until their length is taken out
            updates = updates.to(dtype)
        orthogonal = functools.partial(
            compiled() if self.is_compiled else newton_schulz, coefficients=group["ns_coefficients"],
            steps=group["ns_steps"], eps=group["eps"], dtype=dtype)
        if parallel.is_sharded(matrices[0]):
            updates = parallel.by_owners(updates, shape[0], matrices[0].device_mesh, orthogonal)
        elif is_shared_out(matrices[0]):
            updates = parallel.in_turn(updates, orthogonal)
        else:
            updates = orthogonal(updates)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        step_size = -0.2 * lr * math.sqrt(max(shape))            # as long as AdamW's
        torch._foreach_add_(weights, updates.unbind(), alpha=step_size)


def is_shared_out(matrix):
    """Tell whether each rank orthogonalises some of the matrices that all of them have."""
    is_whole = not parallel.is_sharded(matrix)
    return is_whole and distributed.world_size() > 1 and matrix.device.type in SPREAD_ON


@functools.cache
def muon_dtype(device, in_fp32=False):
    """Return what Muon multiplies in: bf16, which is exact enough, or where that is only emulated fp16 on a
    GPU, which has tensor cores for it, and fp32 on a CPU. (Of 16 matrices of a small model on two Zen 3 cores
    that is 35 times as fast, and a training step in fp32 more than twice.) in_fp32: on a CPU anyway."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    on_cpu = device.type == "cpu"
    return torch.float32 if on_cpu and (in_fp32 or not cpu_multiplies_bf16()) else torch.bfloat16


def newton_schulz(x, coefficients, steps, eps, dtype):
    """Return x [N, rows, columns] with all singular values between about 0.7 and 1.2: Newton and Schulz's
    iteration, quintic (Jordan et al. 2024), in dtype."""
    a, b, c = coefficients
    given = x.dtype
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(given)


@functools.cache
def compiled():
    """Return newton_schulz compiled for each shape that it meets, of which a GPT has three or four."""
    return torch.compile(newton_schulz, dynamic=False)


def build(model, optimizer="adamw", learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95), fused=True,
          momentum=0.95, compile=False, dtype="auto"):
    """Return the optimizers of a step, as a list. Weight decay is on matrices only, not on norms and biases.

    muon: Muon (Jordan et al. 2024) for the matrices inside the blocks, its update scaled to AdamW's size (Liu
    et al. 2025) so that one learning rate serves both; AdamW for embeddings, head, adapters (whose rank it
    would undo) and the rest. compile: torch.compile what Muon does to its matrices, on a GPU. dtype: the
    run's; with fp32 a CPU multiplies Muon's matrices in fp32 too.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = set()
    for name, p in trained.items():
        if name.startswith("blocks.") and p.ndim == 2 and ".lora_" not in name:
            hidden.add(name)

    def group(names, decay):
        return {"params": [p for name, p in trained.items() if name in names], "weight_decay": decay}

    muon = optimizer == "muon"
    by_adamw = set(trained) - hidden if muon else set(trained)
    matrices = {name for name in by_adamw if trained[name].ndim >= 2}
    groups = [group(matrices, weight_decay), group(by_adamw - matrices, 0.0)]
    groups = [g for g in groups if g["params"]]
    optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)]
    if muon and hidden:
        optimizers.append(Muon([group(hidden, weight_decay)], lr=learning_rate, momentum=momentum))
        optimizers[-1].in_fp32 = dtype == "fp32"
        optimizers[-1].is_compiled = compile and next(iter(trained.values())).device.type in COMPILE_ON
    return optimizers


def moments(model, optimizers):
    """Return what the optimizers keep of each weight as {weight's name.its name: tensor}, such as
    head.weight.exp_avg."""
    names = {p: name for name, p in model.named_parameters()}
    result = {}
    for optimizer in optimizers:
        for p, kept in optimizer.state.items():
            result |= {f"{names[p]}.{key}": tensor for key, tensor in kept.items()}
    return result


def load_moments(model, optimizers, saved):
    """Bring back what `moments` returned, given as tensors or as slices of a file. ValueError if it is
    another model's."""
    names = {p: name for name, p in model.named_parameters()}
    left = set(saved)
    for optimizer in optimizers:
        keys = ("momentum_buffer",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if f"{names[p]}.{keys[0]}" not in left:       # it had no gradient yet
                    continue
                for key in keys:
                    kept = torch.zeros_like(p, requires_grad=False)
                    if key == "step":
                        kept = torch.zeros((), device=p.device if group["fused"] else "cpu")
                    name = f"{names[p]}.{key}"
                    parallel.fill(kept, saved[name], name)
                    optimizer.state[p][key] = kept
                    left.remove(name)
    if left:
        raise ValueError(f"{min(left)} is left over")


def moments_of_old(model, optimizers, state):
    """Return as `moments` does what stands in the state of an old run, which has the optimizers'
    state_dicts."""
    names = {p: name for name, p in model.named_parameters()}
    result = {}
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        numbered = [p for group in optimizer.param_groups for p in group["params"]]
        for number, kept in saved["state"].items():
            result |= {f"{names[numbered[number]]}.{key}": tensor for key, tensor in kept.items()}
    return result


def state_to_come(optimizers):
    """Return the bytes that the optimizers will keep from their first step on: two fp32 numbers a weight for
    AdamW, one for Muon."""
    total = 0
    for optimizer in optimizers:
        bytes_a_weight = 4 if isinstance(optimizer, torch.optim.Muon) else 8
        for group in optimizer.param_groups:
            to_come = [parallel.local(p) for p in group["params"] if p not in optimizer.state]
            total += sum(bytes_a_weight * p.numel() for p in to_come)
    return total


def lr_at(step, max_steps, learning_rate, min_lr, warmup_steps, schedule, cooldown=0.2):
    """Return the learning rate of step 0 ... max_steps - 1. Linear warm-up, then cosine or linear down to
    min_lr, or constant, or wsd: constant, then linear down over the last `cooldown` of the steps (Hu et al.
    2024). warmup_steps: None for a tenth of the steps, at most 50."""
    if warmup_steps is None:
        warmup_steps = min(50, max_steps // 10)
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, max_steps - math.ceil(cooldown * max_steps))
    done = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    if schedule == "constant":
        share = 1.0
    elif schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = 1 - done
    return min_lr + share * (learning_rate - min_lr)


def apply_step(optimizers, scaler, lr, grad_clip=0.0):
    """Unscale, clip, check, step, clear. Return (norm of the gradients before clipping, whether they were
    finite).

    The gradients are summed over the ranks before, and the norm is that of all of them, so every rank decides
    alike; with a non-finite one no optimizer moves.
    """
    parameters = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += [p for p in group["params"] if p.grad is not None]
        scaler.unscale_(optimizer)
    norm = parallel.full_tensor(nn.utils.get_total_norm([p.grad for p in parameters], foreach=None))
    grad_norm = norm.item()
    finite = math.isfinite(grad_norm)
    if finite and grad_clip:
        nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if finite:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return grad_norm, finite
