"""Samples of the last block's weights: did a step move them, and does the engine have them?"""
import torch

from layers.lora import merged_weights

NUMBERS = 256                                # sampled weights of each matrix


@torch.no_grad()
def fingerprint(model, dtype=torch.float32):
    """Return sampled weights of the last block's matrices, adapters merged and rounded to dtype: fp32 [n] on
    the model's device. Every rank must call if the model is sharded."""
    last = f"blocks.{model.config.n_layer - 1}."
    parts = []
    for _, weight in merged_weights(model, dtype, last):
        if weight.ndim == 2:
            parts.append(weight.flatten()[::max(1, weight.numel() // NUMBERS)])
    return torch.cat(parts).to(dtype).float()


def moved(before, after):
    """Return the relative change ||after - before|| / ||before|| of two fingerprints."""
    return ((after - before).norm() / before.norm().clamp(min=1e-30)).item()
