"""A decoding step of eight kernels a layer: the four products, attention with the norm and the rotation of
queries and keys, the activation, and twice residual and norm (engine/triton_kernels.py).

With few rows a step takes as long as its kernels take to start. It has GPT.hidden's result up to rounding;
LayerNorm and GELU keep their own kernels. An engine first compares the two on two layers and 200
positions, so that a change of a block or of engine/kv_cache.py which this file lacks makes sampling slower,
not wrong. Only a GPU loads this file. Shapes: see engine/triton_kernels.py.
"""
import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from engine import triton_kernels as kernels
from engine.kv_cache import KVCache, RowGroup
from layers.ops import SDPA_WITH_MASK, RMSNorm
from model import blank
from runtime import memory

TOLERANCE = 0.03      # distance from GPT.hidden as a share of its length; in bf16 it is below 0.01


def hidden(model, tokens, positions, keys, values):
    """Return final hidden states [B, C] of tokens [B] at positions [B]. keys and values: of the cache [L, at
    least B, K, T, D], read up to each row's position and written there. Call merge_gates(model) first."""
    config = model.config
    h = model.token_embedding(tokens)
    if model.position_embedding is not None:
        h = h + model.position_embedding.weight[positions]
    rope = None if model.cos is None else (model.cos, model.sin)
    next_norms = [block.attention_norm for block in model.blocks[1:]] + [model.final_norm]
    x = model.blocks[0].attention_norm(h)
    for block, next_norm, *cache in zip(model.blocks, next_norms, keys, values):
        attention = block.attention
        norm = (attention.q_norm, attention.k_norm, config.norm_eps) if config.qk_norm else None
        y = kernels.decode_attention(attention.qkv(x), cache, positions, rope, norm)
        h, x = add_and_norm(h, attention.out(y), block.mlp_norm)
        y = block.mlp.down(activations(block.mlp, x))
        h, x = add_and_norm(h, y, next_norm)
    return x


def add_and_norm(h, y, norm):
    """Return h + y, which may be in place of h [B, C], and its norm [B, C]."""
    if isinstance(norm, RMSNorm):
        return kernels.add_and_norm(h, y, norm.weight, norm.eps)
    h = h + y
    return h, norm(h)


def activations(mlp, x):
    """Return the activations [B, F] of x [B, C]."""
    if mlp.kind in ("relu2", "swiglu"):
        return kernels.activate(F.linear(x, *mlp.merged), mlp.kind)
    return mlp.activation(x)


def merge_gates(model):
    """Give each MLP `merged`, the weight and bias of one product: for swiglu the gate's followed by those of
    the values, which become views of it."""
    for block in model.blocks:
        mlp = block.mlp
        mlp.merged = (mlp.up.weight, mlp.up.bias)
        if mlp.gate is not None:
            weight = concatenated(mlp.gate.weight, mlp.up.weight)
            mlp.merged = (weight, concatenated(mlp.gate.bias, mlp.up.bias))


def concatenated(a, b):
    """Return the concatenation of two parameters, which become views of it; None for None."""
    if a is None:
        return None
    both = torch.cat((a.data, b.data))
    a.data, b.data = both.chunk(2)
    return both


def works(config, device, dtype):
    """Return whether hidden() runs on this device and agrees with GPT.hidden, tried with two layers of
    this shape. Triton builds its kernels with a C compiler, which may be missing."""
    if device.type != "cuda" or config.head_dim not in kernels.HEAD_DIMS:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        off = distance(config, device, dtype)
    except Exception as e:
        if memory.is_out_of_memory(e):
            raise
        problem = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0]
    else:
        if off < TOLERANCE:
            return True
        problem = f"their result is off by {off:.2g}"
    warnings.warn(f"Triton's kernels don't work here ({problem}): sampling goes on without them, slower.")
    return False


@torch.no_grad()
def distance(config, device, dtype):
    """Return the distance of hidden() from GPT.hidden as a share of its length, with random weights."""
    T = min(config.block_size, 200)          # several blocks of the kernel
    config = replace(config, n_layer=min(2, config.n_layer), vocab_size=64, block_size=T)
    model = blank(config, device=device, dtype=dtype)
    model.fill_rope_tables(dtype)
    random = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        if p.ndim == 1:
            p.uniform_(0.5, 1.5, generator=random)
        else:
            p.normal_(0, p.shape[-1]**-0.5, generator=random)
    merge_gates(model)
    ids = torch.randint(64, (2, T), generator=random, device=device)
    rows = torch.arange(2, device=device)
    positions = rows * (T - 1)
    tokens = ids[rows, positions]
    cache = KVCache(model, 2, T, device_type="cuda", deterministic=False, graphs=True)
    model.hidden(ids[:, :-1], attentions=cache.prefill(rows, rows + T - 1, 0, T - 1))
    kept = cache.storage.clone()
    with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
        attentions = cache.decode(positions, (RowGroup(0, 2, T),))
        expected = model.hidden(tokens[:, None], positions[:, None], attentions)[:, 0].float()
    cache.storage.copy_(kept)                # without the new keys and values
    found = hidden(model, tokens, positions, cache.k, cache.v).float()
    return ((found - expected).norm() / expected.norm()).item()
