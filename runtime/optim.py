"""Optimizers, learning rate schedule and optimizer step of train.py and grpo.py."""
import functools
import math

import torch
import torch.nn as nn

from runtime import distributed, parallel
from runtime.hardware import cpu_multiplies_bf16

# Weights that Muon updates in one batch: 128 MiB of updates in fp32 and three times 64 in bf16, or 128 where
# bf16 is slow.
MUON_BATCH = 2**25
# Devices on which DDP ranks divide Muon's matrices among them. On a CPU the exchange costs too much.
DIVIDE_ON = ("cuda",)
# Devices on which --compile includes Newton-Schulz. On a CPU compiling it takes longer than a run saves.
COMPILE_ON = ("cuda",)


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the same state, and the same results up to rounding. It orthogonalises matrices
    of one shape as a batch, since dispatch dominates small products (16 matrices 128 wide, two Zen 5 cores:
    4.0 ms instead of 8.0)."""
    hardware = None                          # the run's, without which it is eager and in bf16

    @property
    def is_compiled(self):
        device = self.param_groups[0]["params"][0].device
        return bool(self.hardware and self.hardware.compile and device.type in COMPILE_ON)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                n = max(1, MUON_BATCH // shape.numel()) * parallel.num_shards(matrices[0])
                if is_divided(matrices[0]):
                    n = -(-n // distributed.world_size()) * distributed.world_size()
                for start in range(0, len(matrices), n):
                    self.update(matrices[start:start + n], group)

    def update(self, matrices, group):
        """Do one step for matrices of one shape."""
        lr = group["lr"]
        momentum = group["momentum"]
        shape = matrices[0].shape
        for p in matrices:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # Each rank updates its own rows of sharded weights.
        grads = [parallel.local(p.grad) for p in matrices]
        buffers = [parallel.local(self.state[p]["momentum_buffer"]) for p in matrices]
        weights = [parallel.local(p) for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)              # Nesterov momentum
        dtype = muon_dtype(weights[0].device, bool(self.hardware) and self.hardware.dtype == "fp32")
        updates = torch.stack(updates)
        if dtype != torch.float16:           # before normalisation fp16's range is too narrow
            updates = updates.to(dtype)
        orthogonal = functools.partial(
            compiled() if self.is_compiled else newton_schulz, coefficients=group["ns_coefficients"],
            steps=group["ns_steps"], eps=group["eps"], dtype=dtype)
        if parallel.is_sharded(matrices[0]):
            from runtime import fsdp
            updates = fsdp.map_sharded(updates, shape[0], matrices[0].device_mesh, orthogonal)
        elif is_divided(matrices[0]):
            updates = parallel.map_replicated(updates, orthogonal)
        else:
            updates = orthogonal(updates)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        step_size = -0.2 * lr * math.sqrt(max(shape))            # matches AdamW's RMS
        torch._foreach_add_(weights, updates.unbind(), alpha=step_size)


def is_divided(matrix):
    """Return whether the ranks divide replicated matrices among them, for orthogonalisation."""
    is_whole = not parallel.is_sharded(matrix)
    return is_whole and distributed.world_size() > 1 and matrix.device.type in DIVIDE_ON


@functools.cache
def muon_dtype(device, in_fp32=False):
    """Return the dtype of Muon's products: bf16, which is exact enough. Where bf16 is only emulated: fp16 on
    a GPU, fp32 on a CPU (16 matrices of a small model on two Zen 3 cores: 35 times as fast, and a training
    step more than twice). in_fp32: use fp32 on any CPU."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    on_cpu = device.type == "cpu"
    return torch.float32 if on_cpu and (in_fp32 or not cpu_multiplies_bf16()) else torch.bfloat16


def newton_schulz(x, coefficients, steps, eps, dtype):
    """Orthogonalise x [N, rows, columns]: the quintic Newton-Schulz iteration in dtype brings all singular
    values to between about 0.7 and 1.2 (Jordan et al. 2024)."""
    a, b, c = coefficients
    input_dtype = x.dtype
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(input_dtype)


@functools.cache
def compiled():
    """Return newton_schulz compiled separately for each shape; a GPT has three or four."""
    return torch.compile(newton_schulz, dynamic=False)


def build(model, optimizer="adamw", learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95), fused=True,
          momentum=0.95, hardware=None):
    """Return a list of optimizers. Weight decay applies to matrices, not to norms and biases.

    muon: Muon (Jordan et al. 2024) for the matrices inside the blocks, its update scaled to AdamW's RMS (Liu
    et al. 2025) so that both share one learning rate; AdamW for embeddings, head, adapters (Muon would change
    their rank) and the rest. hardware: a run's Hardware; with its compile Muon is compiled on a GPU, with its
    dtype fp32 Muon uses fp32 on a CPU.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = {name for name, p in trained.items() if optimizer == "muon" and name.startswith("blocks.")
              and p.ndim == 2 and ".lora_" not in name}

    def group(names, decay):
        return {"params": [p for name, p in trained.items() if name in names], "weight_decay": decay,
                "lr_scale": 1}               # times the schedule's learning rate

    by_adamw = trained.keys() - hidden
    matrices = {name for name in by_adamw if trained[name].ndim >= 2}
    groups = [group(matrices, weight_decay), group(by_adamw - matrices, 0.0)]
    groups = [g for g in groups if g["params"]]
    optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)]
    if hidden:
        optimizers.append(Muon([group(hidden, weight_decay)], lr=learning_rate, momentum=momentum))
        optimizers[-1].hardware = hardware
    return optimizers


def moments(model, optimizers):
    """Return the optimizers' state as {weight.key: tensor}, such as head.weight.exp_avg."""
    names = {p: name for name, p in model.named_parameters()}
    result = {}
    for optimizer in optimizers:
        for p, kept in optimizer.state.items():
            result |= {f"{names[p]}.{key}": tensor for key, tensor in kept.items()}
    return result


def load_moments(model, optimizers, saved):
    """Restore the state that `moments` returned, from tensors or slices of a file. ValueError if it belongs
    to another model."""
    weights = dict(model.named_parameters())
    owners = {}                              # {weight: (its optimizer, whether that is fused)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owners |= {p: (optimizer, group.get("fused")) for p in group["params"]}
    for name, values in saved.items():
        weight, _, key = name.rpartition(".")
        p = weights.get(weight)
        if p not in owners:
            raise ValueError(f"{name} is left over")
        optimizer, fused = owners[p]
        kept = torch.zeros_like(p, requires_grad=False)
        if key == "step":
            kept = torch.zeros((), device=p.device if fused else "cpu")
        parallel.fill(kept, values, name)
        optimizer.state[p][key] = kept


def pending_bytes(optimizers):
    """Return the bytes of optimizer state that the first step will allocate: two fp32 numbers per weight for
    AdamW, one for Muon."""
    total = 0
    for optimizer in optimizers:
        bytes_per_weight = 4 if isinstance(optimizer, torch.optim.Muon) else 8
        for group in optimizer.param_groups:
            pending = [parallel.local(p) for p in group["params"] if p not in optimizer.state]
            total += sum(bytes_per_weight * p.numel() for p in pending)
    return total


def default_learning_rate(cfg, n_params):
    """Return the learning rate of a run that names none, and the reason for it. cfg.default_rates: the rate
    from scratch, of all weights of a model of up to a million parameters, and of adapters. The second falls
    with the size: docs/training.md has the trials."""
    scratch, all_weights, adapters = cfg.default_rates
    if cfg.init_from == "scratch":
        return scratch, "the default from scratch"
    if cfg.lora_rank:
        return adapters, "the default of adapters"
    rate = all_weights * min(1, 1e6 / n_params) ** 0.7
    return float(f"{rate:.1g}"), f"the default for all weights of {n_params / 1e6:,.1f}M parameters"


def lr_at(step, max_steps, learning_rate, min_lr, warmup_steps, schedule, cooldown=0.2):
    """Return the learning rate of a step, 0 to max_steps - 1: linear warm-up, then constant, cosine or linear
    decay to min_lr, or wsd: constant, then linear decay over the last fraction `cooldown` of the steps (Hu et
    al. 2024). warmup_steps: None for a tenth of the steps, at most 50."""
    if warmup_steps is None:
        warmup_steps = min(50, max_steps // 10)
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, max_steps - math.ceil(cooldown * max_steps))
    done = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    if schedule == "constant":
        scale = 1.0
    elif schedule == "cosine":
        scale = 0.5 * (1 + math.cos(math.pi * done))
    else:
        scale = 1 - done
    return min_lr + scale * (learning_rate - min_lr)


def apply_step(optimizers, scaler, lr, grad_clip=0.0):
    """Unscale and clip the gradients, step, and clear them. Return (gradient norm before clipping, whether it
    is finite). If it is not, no optimizer steps; every rank must call, with gradients already summed over the
    ranks, so that all decide alike."""
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
            group["lr"] = lr * group.get("lr_scale", 1)
        if finite:
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return grad_norm, finite
