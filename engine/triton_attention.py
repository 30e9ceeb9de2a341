"""Attention of a decoding step as a Triton kernel: each row reads the positions that it has.

PyTorch's kernels are made for many queries: in place of its attention under a mask this makes sampling of 512
rows of GPT-2 1.47 times as fast on an H100, of 64 rows 1.19 times (docs/benchmarks.md). Shapes: B rows, K key
heads of T positions in the cache, G queries a key head, D channels.
"""
import torch
import triton
import triton.language as tl

MIN_ROWS = 16                                # of a product on tensor cores
BLOCK = 64                                   # positions


def can_attend(device, head_dim):
    """Return whether the kernel runs on this device for this number of channels a head."""
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim in (16, 32, 64, 128, 256)


def decode_attention(q, keys, values, positions):
    """Return attention [B, 1, H, D] of q [B, 1, H, D] over keys and values [B, K, T, D] up to positions
    [B]."""
    B, K, _, D = keys.shape
    H = q.shape[2]
    G = H // K
    y = torch.empty(B, 1, H, D, dtype=q.dtype, device=q.device)
    padded = max(MIN_ROWS, triton.next_power_of_2(G))
    strides = q.stride(0), q.stride(2), keys.stride(0), keys.stride(1)
    attend[(B, K)](q, keys, values, y, positions, *strides, D**-0.5, G, padded, D, BLOCK)
    return y


@triton.jit
def attend(Q, K, V, Y, positions, q_row, q_head, kv_row, kv_head, scale,
           G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attend with the G queries of a row and key head, padded to ROWS, by an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(positions + row) + 1
    g = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    is_query = g < G
    q = tl.load(Q + row * q_row + (head * G + g) * q_head + d, mask=is_query, other=0.0)
    start_of_head = row * kv_row + head * kv_head
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = start_of_head + t[:, None] * D + d
        k = tl.load(K + at, mask=t[:, None] < length, other=0.0)
        v = tl.load(V + at, mask=t[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(t[None, :] < length, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        y = y * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    y = y / total[:, None]
    heads = tl.num_programs(1) * G
    tl.store(Y + (row * heads + head * G + g) * D + d, y.to(Y.dtype.element_ty), mask=is_query)
