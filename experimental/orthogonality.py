"""A penalty that draws attention's projections towards orthogonal matrices (--orthogonality=λ).

For a projection W with k rows, or columns if these are fewer, it is ||W W^T - I||^2 / k (Frobenius norm; W^T W
of the latter): the mean of (σ^2 - 1)^2 over its singular values σ, so that λ means the same at every width.
Queries', keys', values' and output projections of all blocks count one each, and λ times their sum is added
to the mean loss of a step. λ rises linearly from 0 over the first orthogonality_warmup steps.

The gradient, 4 (W W^T - I) W / k, is added once a step, after those of all micro-steps and ranks."""
import torch

from layers.lora import full_tensor
from runtime import parallel


def penalty(w):
    """Return the penalty of a matrix w [rows, columns], fp32 [], and its gradient, of w's shape."""
    wide = w if w.shape[0] <= w.shape[1] else w.mT
    k = len(wide)
    off = wide @ wide.mT - torch.eye(k, dtype=w.dtype, device=w.device)
    gradient = 4 / k * off @ wide
    return off.square().sum() / k, gradient if wide is w else gradient.mT


def projections(attention):
    """Return [(weight, the number of its rows in each projection)] of a block's attention: queries, keys and
    values are the rows of one matrix."""
    c = attention.config
    heads = (c.n_head, c.n_kv_head, c.n_kv_head)
    return [(attention.qkv.weight, [n * c.head_dim for n in heads]), (attention.out.weight, [c.n_embd])]


@torch.no_grad()
def add_gradients(cfg, run):
    """Add the gradients of the penalty of this step to those of the loss. Return {"orthogonality": the mean
    penalty of a projection, []} for the log, {} without --orthogonality. Of a sharded model each weight is
    gathered, and every rank must call."""
    if not cfg.orthogonality:
        return {}
    strength = cfg.orthogonality * min(1.0, (run.step + 1) / cfg.orthogonality_warmup)
    strength *= run.scaler.get_scale()       # fp16's, by which the gradients of the loss are multiplied
    penalties = []
    for block in run.model.blocks:
        for weight, rows in projections(block.attention):
            if not weight.requires_grad:
                continue
            found = [penalty(part) for part in full_tensor(weight).split(rows)]
            penalties += [value for value, _ in found]
            gradient = torch.cat([part for _, part in found])
            parallel.local(weight.grad).add_(gradient[parallel.my_rows(weight)], alpha=strength)
    return {"orthogonality": torch.stack(penalties).mean()}
