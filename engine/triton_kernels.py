"""Triton kernels of a decoding step: attention of rows of different lengths, and all but the products.

PyTorch's attention kernels are made for many queries. In place of its masked attention, a kernel that padded
one query a head to 16 rows made sampling of 512 rows of GPT-2 1.28 times as fast on an H100, of 64 rows 1.42
times (docs/figures.json, G7 and G8); these kernels have not run on a card yet. Shapes: B rows, H query and K
key heads of T positions in the cache, G queries a key head, D channels a head, C channels, F hidden channels
of the MLP.
"""
import torch
import triton
import triton.language as tl

MIN_ROWS = 16                                # of a product on tensor cores
BLOCK = 64                                   # positions; half as many of 256 channels, for shared memory
HEAD_DIMS = (16, 32, 64, 128, 256)


def decode_attention(qkv, cache, positions, rope=None, norm=None):
    """Write keys and values at positions [B] of a layer's cache, and return attention [B, H D] up to there.

    qkv: [B, (H + 2 K) D], contiguous. cache: keys and values [at least B, K, T, D]. rope: GPT's cos and sin
    [T, 1, D]; None: no rotation. norm: (gains of queries and keys [D], eps) of qk_norm; None: no norm.
    """
    keys, values = cache
    _, K, _, D = keys.shape
    B = len(qkv)
    H = qkv.shape[1] // D - 2 * K
    y = torch.empty(B, H * D, dtype=qkv.dtype, device=qkv.device)
    cos, sin = rope or (None, None)
    q_gain, k_gain, eps = norm or (None, None, 0.0)
    rows = 1 if H == K else max(MIN_ROWS, triton.next_power_of_2(H // K))
    attend[(B, K)](qkv, keys, values, y, positions, cos, sin, q_gain, k_gain, eps, keys.stride(0),
                   keys.stride(1), D**-0.5, H // K, rows, D, BLOCK if D <= 128 else BLOCK // 2)
    return y


@triton.jit
def head_vectors(at, COS, SIN, GAIN, eps, is_read, D: tl.constexpr):
    """Return the vectors [N, D] that begin at the pointers [N, 1], normed and rotated, in fp32. GAIN, or COS
    and SIN, may be None."""
    channels = tl.arange(0, D)[None, :]
    x = tl.load(at + channels, mask=is_read, other=0.0).to(tl.float32)
    factor = 1.0
    if GAIN is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        x *= factor * tl.load(GAIN + channels).to(tl.float32)
    if COS is not None:
        partners = (channels + D // 2) % D
        partner = tl.load(at + partners, mask=is_read, other=0.0).to(tl.float32)
        if GAIN is not None:
            partner *= factor * tl.load(GAIN + partners).to(tl.float32)
        x = x * tl.load(COS + channels).to(tl.float32) + partner * tl.load(SIN + channels).to(tl.float32)
    return x


@triton.jit
def attend(QKV, K, V, Y, positions, COS, SIN, Q_GAIN, K_GAIN, eps, cache_row, cache_head, scale,
           G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attend with the G queries of a row and key head, padded to ROWS."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    position = tl.load(positions + row)
    channels = tl.arange(0, D)[None, :]
    if COS is not None:
        COS += position * D
        SIN += position * D
    row_at = QKV + row * (G + 2) * num_heads * D
    key_at = row_at + (G * num_heads + head + tl.arange(0, 1)[:, None]) * D
    new_k = head_vectors(key_at, COS, SIN, K_GAIN, eps, True, D).to(K.dtype.element_ty)
    new_v = tl.load(key_at + num_heads * D + channels)
    first = row * cache_row + head * cache_head
    tl.store(K + first + position * D + channels, new_k)
    tl.store(V + first + position * D + channels, new_v)

    g = tl.arange(0, ROWS)[:, None]
    is_query = g < G
    q = head_vectors(row_at + (head * G + g) * D, COS, SIN, Q_GAIN, eps, is_query, D)
    q = q.to(QKV.dtype.element_ty)
    new_k = new_k.to(tl.float32)
    new_v = new_v.to(tl.float32)
    score = tl.sum(q.to(tl.float32) * new_k, 1) * scale                  # of the new position [ROWS]
    if G == 1:
        y = attend_alone(q, K + first, V + first, position, score, new_v, scale, D, BLOCK)
    else:
        y = attend_together(q, K + first, V + first, position, score, new_v, scale, ROWS, D, BLOCK)
    at = ((row * num_heads + head) * G + g) * D + channels
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=is_query)


@triton.jit
def attend_alone(q, K, V, position, score, new_v, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the attention [1, D] of one query [1, D] over the positions before `position` and the new one,
    whose score [1] and value [1, D] are given. Each of BLOCK lanes has an online softmax of its own, so that
    nothing is summed across warps until the end."""
    lanes = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], tl.float32) + score
    total = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, position, BLOCK):
        t = start + lanes
        is_past = t < position
        at = t[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(K + at, mask=is_past[:, None], other=0.0).to(tl.float32)
        v = tl.load(V + at, mask=is_past[:, None], other=0.0).to(tl.float32)
        scores = tl.where(is_past, tl.sum(q.to(tl.float32) * k, 1) * scale, float("-inf"))
        new_highest = tl.maximum(highest, scores)
        weights = tl.exp(scores - new_highest)
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + weights
        y = y * rescale[:, None] + weights[:, None] * v
        highest = new_highest
    top = tl.max(highest, 0)
    rescale = tl.exp(highest - top)
    new_weight = tl.exp(score - top)
    total = tl.sum(total * rescale, 0) + new_weight
    y = tl.sum(y * rescale[:, None], 0)[None, :] + new_weight[:, None] * new_v
    return y / total[:, None]


@triton.jit
def attend_together(q, K, V, position, score, new_v, scale, ROWS: tl.constexpr, D: tl.constexpr,
                    BLOCK: tl.constexpr):
    """As attend_alone, for ROWS queries [ROWS, D] with scores [ROWS] of the new position, by products on
    tensor cores."""
    highest = score
    total = tl.full([ROWS], 1.0, tl.float32)
    y = tl.zeros([ROWS, D], tl.float32) + new_v
    for start in range(0, position, BLOCK):
        t = start + tl.arange(0, BLOCK)
        is_past = t < position
        at = t[:, None] * D + tl.arange(0, D)[None, :]
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
    return y / total[:, None]


def add_and_norm(h, y, gain, eps):
    """Return h + y, in place of h [B, C], and its rms_norm [B, C]."""
    B, C = h.shape
    x = torch.empty_like(h)
    add_norm[(B,)](h, y, x, gain, eps, C, triton.next_power_of_2(C))
    return h, x


@triton.jit
def add_norm(H, Y, X, GAIN, eps, C: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, SIZE)
    is_channel = channels < C
    at = row * C + channels
    h = tl.load(H + at, mask=is_channel, other=0.0).to(tl.float32)
    h += tl.load(Y + at, mask=is_channel, other=0.0).to(tl.float32)
    h = h.to(H.dtype.element_ty)
    tl.store(H + at, h, mask=is_channel)
    h = h.to(tl.float32)
    factor = tl.rsqrt(tl.sum(h * h, 0) / C + eps)
    gain = tl.load(GAIN + channels, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(X + at, (h * factor * gain).to(X.dtype.element_ty), mask=is_channel)


def activate(x, kind):
    """Return the activations [B, F] of an MLP: of x [B, F] for relu2, of gates and values x [B, 2 F] for
    swiglu."""
    is_gated = kind == "swiglu"
    B, F = x.shape
    F //= 1 + is_gated
    y = torch.empty(B, F, dtype=x.dtype, device=x.device)
    activation[(B, triton.cdiv(F, 1024))](x, y, F, is_gated, 1024)
    return y


@triton.jit
def activation(X, Y, F: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_read = i < F
    at = X + row * F * (1 + GATED) + i
    x = tl.load(at, mask=is_read, other=0.0).to(tl.float32)
    if GATED:
        y = x * tl.sigmoid(x) * tl.load(at + F, mask=is_read, other=0.0).to(tl.float32)
    else:
        y = tl.where(x < 0.0, 0.0, x)                        # tl.maximum would hide NaN
        if X.dtype.element_ty == tl.float16:
            y = tl.where(y > 255.0, 255.0, y)                # as layers/ops.py
        y *= y
    tl.store(Y + row * F + i, y.to(Y.dtype.element_ty), mask=is_read)
