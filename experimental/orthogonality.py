"""A penalty that pulls the attention projections towards orthogonal matrices (--orthogonality=λ).

The penalty of a projection W, with k rows, is ||W W^T - I||^2 / k (Frobenius norm; with fewer columns than
rows W^T W, and k columns). This is the mean of (σ^2 - 1)^2 over its singular values σ, so that λ is
comparable at every width. λ times the sum over the query, key, value and output projections of all blocks is
added to the mean loss of a step; λ rises linearly from 0 over the first orthogonality_warmup steps.

The gradient, 4 (W W^T - I) W / k, is added once per step, after all micro-steps and ranks."""
import torch

from layers.lora import full_tensor
from runtime import parallel


def penalty(w):
    """Return the penalty of a matrix w [rows, columns], fp32 [], and its gradient in w's shape."""
    wide = w if w.shape[0] <= w.shape[1] else w.mT
    k = len(wide)
    deviation = wide @ wide.mT - torch.eye(k, dtype=w.dtype, device=w.device)
    gradient = 4 / k * deviation @ wide
    return deviation.square().sum() / k, gradient if wide is w else gradient.mT


def projections(attention):
    """Return [(weight, rows per projection)] of a block's attention; query, key and value projections are
    rows of one matrix."""
    c = attention.config
    heads = (c.n_head, c.n_kv_head, c.n_kv_head)
    return [(attention.qkv.weight, [n * c.head_dim for n in heads]), (attention.out.weight, [c.n_embd])]


@torch.no_grad()
def add_gradients(cfg, run):
    """Add the gradients of this step's penalty to those of the loss. Return {"orthogonality": mean penalty of
    a projection, []} for the log. A sharded model gathers each weight, so every rank must call."""
    strength = cfg.orthogonality * min(1.0, (run.step + 1) / cfg.orthogonality_warmup)
    strength *= run.scaler.get_scale()       # the gradients of the loss are scaled too
    penalties = []
    for block in run.model.blocks:
        for weight, rows in projections(block.attention):
            if not weight.requires_grad:
                continue
            results = [penalty(part) for part in full_tensor(weight).split(rows)]
            penalties += [value for value, _ in results]
            gradient = torch.cat([part for _, part in results])
            parallel.local(weight.grad).add_(gradient[parallel.local_rows(weight)], alpha=strength)
    return {"orthogonality": torch.stack(penalties).mean()}
