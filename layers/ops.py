"""Operations of model.py written by hand for speed or memory. Imports only torch.

Dropout draws bytes on a CPU; ATTENTION holds the attention kernels; Pad and Unpad keep padding out of the
linear layers; the norm and the squared ReLU have fast backward passes on a CPU; the head computes its loss in
chunks.

Shapes: B sequences of T positions, C channels, V ids; in attention H query heads, K key/value heads of S
positions, D channels a head."""
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

IGNORE = -1          # the target of positions without a loss; set from lengths, never from token ids
ROWS = 128           # positions per product of math_attention
SDPA_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# --- dropout ---

def drop_out(x, p, training=True):
    """Return x with a share p of its numbers set to 0 and the rest rescaled; x itself outside training.

    On a CPU p is rounded to 256ths, so that one random byte decides on each number. F.dropout draws a double
    each, on one core: forward and backward of 2M numbers in bf16 take 6.3 instead of 21.9 ms (a Zen 5 core).
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped = min(max(round(256 * p), 1), 255)
    # Each int64 is 64 random bits: eight bytes.
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-2**63, None)
    random_bytes = words.view(torch.uint8)[:x.numel()].view(x.shape)
    kept = (random_bytes >= dropped).to(x.dtype)
    return x * kept.mul_(256 / (256 - dropped))


# --- attention ---

def sdpa_attention(q, k, v, mask=None, dropout=0.0, repeat=False):
    """Return attention [B, T, H, D] of q [B, T, H, D] over k and v [B, S, K, D], by PyTorch's fused kernel.

    Without a mask it is causal, and S is T. A mask [B, 1, T, S] of 0 and -inf is added to the scores and must
    be causal itself: the last key is at the last position.
    repeat: repeat key heads for a kernel without grouped-query attention (runtime/hardware.py)."""
    H = q.shape[2]
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    if repeat or mask is not None:
        k = repeat_heads(k, H)
        v = repeat_heads(v, H)
    if mask is None:
        grouped = k.shape[1] != H
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
    else:
        # On a GPU this overrides the chosen kernel: flash takes no mask, and the others can't share heads.
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True) if q.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return y.transpose(1, 2)


def math_attention(q, k, v, mask=None, dropout=0.0):
    """Return sdpa_attention's result with the two products written out.

    On a CPU in bf16 this is several times faster at short lengths (docs/notes.md)."""
    if not dropout and not torch.compiler.is_compiling():
        return AttentionInParts.apply(q, k, v, mask)
    B, T, H, D = q.shape
    S = k.shape[1]
    q = q.transpose(1, 2).reshape(B * H, T, D)
    k = repeat_heads(k.transpose(1, 2), H).reshape(B * H, S, D)
    v = repeat_heads(v.transpose(1, 2), H).reshape(B * H, S, D)
    if mask is None:
        mask = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    else:
        mask = mask.expand(B, H, T, S).flatten(0, 1)
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=D**-0.5).softmax(-1)
    y = torch.bmm(drop_out(weights, dropout), v)
    return y.view(B, H, T, D).transpose(1, 2)


class AttentionInParts(torch.autograd.Function):
    """Compute math_attention for ROWS positions at a time, over keys up to their own positions.

    The scores stay in the CPU's cache, and most masked scores are never computed. Query heads with the same
    key head are rows of one product. Forward and backward, 5 x 800 positions, 4 heads of 32 with one key
    head, in bf16: 33 instead of 54 ms (a Zen 5 core; docs/notes.md)."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        """Return [B, T, H, D] for q [B, T, H, D], k and v [B, S, K, D], mask [B, 1, T, S] or None."""
        B, T, H, D = q.shape
        _, S, K, _ = k.shape
        ctx.G = H // K
        q, k, v = (by_key_head(x, K) for x in (q, k, v))
        y = torch.empty_like(q)
        parts = []                           # weights [B K, positions G, keys]
        for start in range(0, T, ROWS):
            end = min(start + ROWS, T)
            rows = slice(start * ctx.G, end * ctx.G)
            seen = S - T + end
            scores = q.new_empty(B * K, (end - start) * ctx.G, seen)
            scores.baddbmm_(q[:, rows], k[:, :seen].mT, beta=0, alpha=D**-0.5)
            by_position = scores.view(B, K, end - start, ctx.G, seen)
            if mask is None:
                future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
                by_position[..., start:].masked_fill_(future[:, None], float("-inf"))
            else:
                by_position += mask[:, :, start:end, None, :seen]
            weights = scores.softmax(-1, dtype=q.dtype)      # a GPU's autocast would return fp32
            torch.bmm(weights, v[:, :seen], out=y[:, rows])
            parts.append(weights)
        ctx.save_for_backward(q, k, v, *parts)
        return by_query_head(y, K, ctx.G)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, *parts = ctx.saved_tensors
        K = dy.shape[2] // ctx.G
        dy = by_key_head(dy, K)
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        end = 0
        for weights in parts:
            rows = slice(end, end + weights.shape[1])
            end = rows.stop
            seen = weights.shape[2]
            dv[:, :seen].baddbmm_(weights.mT, dy[:, rows])
            dweights = dy[:, rows].bmm(v[:, :seen].mT)
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)  # as autograd does
            dscores *= q.shape[-1]**-0.5
            torch.bmm(dscores, k[:, :seen], out=dq[:, rows])
            dk[:, :seen].baddbmm_(dscores.mT, q[:, rows])
        return by_query_head(dq, K, ctx.G), by_query_head(dk, K, 1), by_query_head(dv, K, 1), None


def by_key_head(x, K):
    """Return [B K, T G, D] of x [B, T, K G, D]: for each key head, positions and their query heads."""
    B, _, _, D = x.shape
    return x.unflatten(2, (K, -1)).transpose(1, 2).reshape(B * K, -1, D)


def by_query_head(x, K, G):
    """Return [B, T, K G, D], the inverse of by_key_head."""
    return x.view(len(x) // K, K, -1, G, x.shape[-1]).transpose(1, 2).flatten(2, 3)


def repeat_heads(x, n_head):
    """Repeat the heads of keys or values [B, K, S, D] once per query head: [B, H, S, D]."""
    groups = n_head // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


ATTENTION = {"sdpa": sdpa_attention, "sdpa_repeated": partial(sdpa_attention, repeat=True),
             "math": math_attention}


# --- padding ---

class Pad(torch.autograd.Function):
    """Copy positions to a sequence with padding, which is 0.

    The backward passes of index_copy and index_select sum gradients, which takes 6 times as long on a CPU as
    the copies here."""

    @staticmethod
    def forward(ctx, x, kept, n):
        """Return [n, ...] with x [N, ...] at the positions kept [N]."""
        ctx.save_for_backward(kept)
        return scattered(x, kept, n)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        kept, = ctx.saved_tensors
        return dy.index_select(0, kept), None, None


class Unpad(torch.autograd.Function):
    """The inverse of Pad."""

    @staticmethod
    def forward(ctx, x, kept):
        """Return [N, ...], the positions kept [N] of x [n, ...]."""
        ctx.save_for_backward(kept)
        ctx.n = len(x)
        return x.index_select(0, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        kept, = ctx.saved_tensors
        return scattered(dy, kept, ctx.n), None


def scattered(x, index, n):
    """Return [n, ...] with x [N, ...] at the positions index [N], 0 elsewhere."""
    # Not in place: compiled by torch 2.11, a Function that returns a tensor changed in place has no gradient.
    return x.new_zeros(n, *x.shape[1:]).index_copy(0, index, x)


# --- norm and activation ---

def rms_norm(x, gain, eps):
    """Return x [..., D] over its root mean square, times gain [D] (or [H, D]: one per head)."""
    if x.device.type != "cpu":
        return fused_norm(x, gain, eps)
    # Dynamo doesn't support is_inference_mode_enabled.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return NormOnCPU.apply(x, gain, eps)
    if x.dtype != torch.float32:             # normed rounds the factor to x.dtype
        return fused_norm(x, gain, eps)
    return normed(x, eps)[0].mul_(gain)


def fused_norm(x, gain, eps):
    """Return rms_norm by F.rms_norm: one kernel on a GPU, or two."""
    gain = gain.to(x.dtype)                  # the kernel is fused only for equal dtypes
    # A GPU's autocast would return fp32.
    autocast = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
        if gain.ndim == 1:
            return F.rms_norm(x, x.shape[-1:], gain, eps)
        return F.rms_norm(x, x.shape[-1:], eps=eps) * gain


def normed(x, eps):
    """Return (x [..., D] over its root mean square, the factor [..., 1]). On a CPU F.rms_norm takes 1.4 to
    2.6 times as long (fp32, 1 to 64 rows of 128 to 960, a Zen 3 core)."""
    at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32)
    mean_square = length.square_().div_(x.shape[-1])
    scale = mean_square.add_(eps).rsqrt_().to(x.dtype)
    return x * scale, scale


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class NormOnCPU(torch.autograd.Function):
    """Compute rms_norm in few passes over memory.

    F.rms_norm's backward pass takes twenty on a CPU. Forward and backward, 8192 x 128 in bf16: 1.3 instead of
    2.5 ms (two Zen 5 cores)."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        y, scale = normed(x, eps)
        ctx.gain_dtype = gain.dtype
        gain = gain.to(x.dtype)
        ctx.save_for_backward(y, scale, gain)
        return y * gain

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, scale, gain = ctx.saved_tensors
        dy_normed = dy * y
        dgain = None
        if ctx.needs_input_grad[1]:
            dgain = dy_normed.flatten(0, -1 - gain.ndim).sum(0).to(ctx.gain_dtype)
        # Scaling x does not change the result, so the gradient has no component along x.
        component = (dy_normed * gain).sum(-1, keepdim=True)
        dx = torch.addcmul(dy * gain, y, component, value=-1 / y.shape[-1]).mul_(scale)
        return dx, dgain, None


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 (So et al. 2021), whose backward pass reads memory once instead of three times.

    Forward and backward, 8192 x 512 in bf16: 1.2 instead of 2.3 ms (two Zen 5 cores)."""

    @staticmethod
    def forward(ctx, x):
        positive = F.relu(x)
        if x.dtype == torch.float16:         # squares of more than 255.9 overflow
            positive = positive.clamp_(max=255)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        positive, = ctx.saved_tensors
        return torch.addcmul(dy.new_zeros(()), dy, positive, value=2)


# --- head and loss ---

def autocast(h):
    """Return h in the dtype that autocast gives a product."""
    device = h.device.type
    return h.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h


class HeadAndLoss(torch.autograd.Function):
    """Summed cross entropy of a linear head, `rows` positions at a time: B*T*V logits never exist at once.

    The gradient of a summed cross entropy is softmax - onehot, so the forward pass computes it while a
    chunk's logits exist. Nothing is recomputed, and only [B*T, C] and [V, C] are kept. At 32 x 1024 x 50304
    the fp32 logits and their gradient would take 6,288 MiB each; chunks of 2**27 logits take 512 MiB each."""

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, softcap, rows, chunk_loss):
        """Return nats as fp32 [] for h [B*T, C], weight [V padded, C] and targets [B*T] (or IGNORE).

        chunk_loss: the function below, eager or compiled."""
        ctx.h_dtype = h.dtype
        ctx.weight_dtype = weight.dtype
        h = autocast(h)
        w = weight.to(h.dtype)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        needs_gradient = dh is not None or dw is not None
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        for start in range(0, len(h), rows):
            chunk = h[start:start + rows]
            y = targets[start:start + rows]
            is_target = y != IGNORE
            nats, grad = chunk_loss(chunk @ w.t(), y.clamp(min=0), vocab_size, softcap, needs_gradient)
            # Not in place, as in `scattered`.
            loss = loss + (nats * is_target).sum()
            mask = is_target[:, None].to(h.dtype)        # applied to [rows, C], which is narrower than V
            if dh is not None:
                dh[start:start + rows] = (grad @ w) * mask
            if dw is not None:
                dw += grad.t() @ (chunk * mask)
        ctx.save_for_backward(dh, dw)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        dh, dw = ctx.saved_tensors
        if dh is not None:
            dh = (dh.float() * scale).to(ctx.h_dtype)
        if dw is not None:
            dw = (dw * scale).to(ctx.weight_dtype)
        return dh, dw, None, None, None, None, None


def chunk_loss(logits, y, vocab_size, softcap, needs_gradient):
    """Return the nats of targets y [N], fp32 [N], and their gradient by logits [N, V padded], in its dtype.

    The nats are log(sum(exp(logits))) - logits[y] and the gradient is softmax - onehot. Compiled, this reads
    bf16 logits twice and writes the gradient once: 6 bytes a logit instead of 18 in eager mode."""
    if torch.compiler.is_compiling():
        return fused_loss(logits, y, vocab_size, softcap, needs_gradient)
    dtype = logits.dtype
    if softcap:
        logits = softcap * torch.tanh(logits.float() / softcap)
    logits[:, vocab_size:] = float("-inf")
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # The largest p is 1 / sum(exp(logits - max)), so two maxima give the log of the sum.
    log_sum = logits.amax(-1).float() - p.amax(-1).log()
    nats = log_sum - logits.gather(1, y[:, None])[:, 0].float()
    if not needs_gradient:
        return nats, None
    p[torch.arange(len(y), device=y.device), y] -= 1
    if softcap:
        logits[:, vocab_size:] = 0
        p *= 1 - (logits / softcap).square()
    return nats, p.to(dtype)


def fused_loss(logits, y, vocab_size, softcap, needs_gradient):
    """Return the same in a form that compiles to two loops."""
    z = logits.float()
    slope = 1.0
    if softcap:
        capped = torch.tanh(z / softcap)
        slope = 1 - capped.square()
        z = softcap * capped
    ids = torch.arange(logits.shape[1], device=logits.device)
    z = z.masked_fill(ids >= vocab_size, float("-inf"))
    log_sum = z.logsumexp(-1, keepdim=True)
    nats = (log_sum - z.gather(1, y[:, None]))[:, 0]
    if not needs_gradient:
        return nats, None
    onehot = (ids == y[:, None]).float()
    return nats, (((z - log_sum).exp() - onehot) * slope).to(logits.dtype)
