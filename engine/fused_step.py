"""A decoding step of eight kernels a layer: the four products, attention with the norm and the rotation of
queries and keys, the activation, and twice residual and norm (engine/triton_kernels.py).

With few rows a step takes as long as its kernels take to start. It has GPT.hidden's result up to rounding;
LayerNorm and GELU keep their own kernels. An engine first compares the two, so that a change of model.py
which this file lacks makes sampling slower, not wrong. Only a GPU loads this file. Shapes: see
engine/triton_kernels.py.
"""
import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine import triton_kernels as kernels
from layers.ops import RMSNorm, sdpa_attention
from model import blank

TOLERANCE = 0.03      # distance from GPT.hidden as a share of its length; in bf16 it is below 0.01


def hidden(model, tokens, positions, keys, values):
    """Return final hidden states [B, C] of tokens [B] at positions [B]. keys and values: of the cache [L, at
    least B, K, T, D], read up to each row's position and written there. The model is of merge_gates."""
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
    """Return h + y and its norm, both [B, C]. It may change h."""
    if isinstance(norm, RMSNorm):
        return h, kernels.add_and_norm(h, y, norm.weight, norm.eps)
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
        mlp.merged = mlp.up.weight, mlp.up.bias
        if mlp.gate is not None:
            mlp.merged = merge(mlp.gate.weight, mlp.up.weight), merge(mlp.gate.bias, mlp.up.bias)


def merge(a, b):
    """Return the concatenation of two parameters, which become views of it; None for None."""
    if a is None:
        return None
    both = torch.cat((a.data, b.data))
    a.data, b.data = both.chunk(2)
    return both


def works(config, device, dtype):
    """Return whether hidden() runs on this device and agrees with GPT.hidden, tried with one layer of this
    shape. Triton builds its kernels with a C compiler, which may be missing."""
    if device.type != "cuda" or config.head_dim not in kernels.HEAD_DIMS:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        off = distance(config, device, dtype)
    except Exception as e:
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
    config = replace(config, n_layer=1, vocab_size=64)
    model = blank(config, device=device, dtype=dtype)
    model.fill_rope_tables(dtype)
    random = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        if p.ndim == 1:
            p.uniform_(0.5, 1.5, generator=random)
        else:
            p.normal_(0, p.shape[-1]**-0.5, generator=random)
    merge_gates(model)
    T = min(config.block_size, 200)          # several blocks of the kernel
    ids = torch.randint(config.vocab_size, (2, T), generator=random, device=device)
    cache = torch.zeros(2, 1, 2, config.n_kv_head, T, config.head_dim, dtype=dtype, device=device)

    def attend_and_keep(q, k, v):
        cache[:, 0] = torch.stack((k, v)).transpose(2, 3)
        return sdpa_attention(q, k, v, repeat=True)
    rows = torch.arange(2, device=device)
    positions = rows * (T - 1)
    expected = model.hidden(ids, attentions=[attend_and_keep])[rows, positions].float()
    cache[:, 0, rows, :, positions] = 0      # the step writes them
    found = hidden(model, ids[rows, positions], positions, *cache).float()
    return ((found - expected).norm() / expected.norm()).item()
