"""What doctor.diagnose has to know of the weights beside a step's figures."""
import torch

from layers.lora import merged_weights

NUMBERS = 256                                # of each matrix


@torch.no_grad()
def fingerprint(model, dtype=torch.float32):
    """Return some numbers of each matrix of the last block, adapters merged, as they are in dtype: a copy,
    fp32 [n], on the model's device. Of a sharded model every rank must call."""
    last = f"blocks.{model.config.n_layer - 1}."
    parts = []
    for _, weight in merged_weights(model, dtype, last):
        if weight.ndim == 2:
            parts.append(weight.flatten()[::max(1, weight.numel() // NUMBERS)])
    return torch.cat(parts).to(dtype).float()


def moved(before, after):
    """Return by which share of their size the weights of two fingerprints differ."""
    return ((after - before).norm() / before.norm().clamp(min=1e-30)).item()
