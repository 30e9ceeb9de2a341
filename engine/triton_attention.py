"""Attention of a decoding step as a Triton kernel: each row reads the positions that it has.

PyTorch's kernels are made for many queries. In place of its masked attention, this kernel makes sampling of
512 rows of GPT-2 1.28 times as fast on an H100, of 64 rows 1.42 times (docs/figures.json, G7 and G8). Shapes:
B rows, K key heads of T positions in the cache, G queries a key head, D channels.
"""
import functools
import warnings

import torch
import triton
import triton.language as tl

MIN_ROWS = 16                                # of a product on tensor cores
BLOCK = 64                                   # positions; half as many of 256 channels, for shared memory


@functools.cache
def can_attend(device, dtype, head_dim):
    """Return whether the kernel runs on this device for this number of channels a head. Triton builds it with
    a C compiler, which may be missing, so it is tried once."""
    if device.type != "cuda" or head_dim not in (16, 32, 64, 128, 256):
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    q = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
    start = torch.zeros(1, dtype=torch.long, device=device)
    try:
        decode_attention(q, q, q, q.new_zeros(2, 1, 1, 1, head_dim), start)
        torch.cuda.synchronize(device)
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0]
        warnings.warn(f"Triton's attention failed ({reason}): sampling goes on without it, slower.")
        return False
    return True


def decode_attention(q, k, v, cache, positions):
    """Write k and v [B, 1, K, D] at positions [B] of a layer's cache, and return attention [B, 1, H, D] of
    q [B, 1, H, D] up to there. cache: keys and values [at least B, K, T, D]."""
    keys, values = cache
    B, _, K, D = k.shape
    H = q.shape[2]
    y = torch.empty(B, 1, H, D, dtype=q.dtype, device=q.device)
    rows = max(MIN_ROWS, triton.next_power_of_2(H // K))
    strides = [stride for x in (q, k, v) for stride in (x.stride(0), x.stride(2))]
    attend[(B, K)](q, k, v, keys, values, y, positions, *strides, keys.stride(0), keys.stride(1), D**-0.5,
                   H // K, rows, D, BLOCK if D <= 128 else BLOCK // 2)
    return y


@triton.jit
def attend(Q, NEW_K, NEW_V, K, V, Y, positions, q_row, q_head, k_row, k_head, v_row, v_head, cache_row,
           cache_head, scale, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attend with the G queries of a row and key head, padded to ROWS, by an online softmax that begins with
    the new position."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    channels = tl.arange(0, D)
    new_k = tl.load(NEW_K + row * k_row + head * k_head + channels)
    new_v = tl.load(NEW_V + row * v_row + head * v_head + channels)
    first = row * cache_row + head * cache_head
    tl.store(K + first + position * D + channels, new_k)
    tl.store(V + first + position * D + channels, new_v)

    g = tl.arange(0, ROWS)[:, None]
    is_query = g < G
    q = tl.load(Q + row * q_row + (head * G + g) * q_head + channels[None, :], mask=is_query, other=0.0)
    highest = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    y = tl.zeros([ROWS, D], tl.float32) + new_v.to(tl.float32)[None, :]
    for start in range(0, position, BLOCK):
        t = start + tl.arange(0, BLOCK)
        is_past = t < position
        at = first + t[:, None] * D + channels[None, :]
        k = tl.load(K + at, mask=is_past[:, None], other=0.0)
        v = tl.load(V + at, mask=is_past[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_past[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        y = y * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    y = y / total[:, None]
    heads = tl.num_programs(1) * G
    at = (row * heads + head * G + g) * D + channels[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=is_query)
