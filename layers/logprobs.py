"""Logprobs and entropies of a linear head, with a gradient written by hand. Only grpo.py loads this file.
Shapes: see layers/ops.py."""
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from layers.ops import autocast


class HeadAndLogprobs(torch.autograd.Function):
    """Logprobs of targets after a linear head and entropies of its distributions, `rows` positions at a time.

    The backward pass computes the logits again, unless they are a single chunk. Both passes take 0.78 of the
    time of log_softmax under torch.utils.checkpoint (1,024 x 49,152 logits of 576 channels, fp32, a Zen 3
    core), and 0.76 of log_softmax's own (8,192 x 256)."""

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, softcap, temperature, rows, functions):
        """Return nats at this temperature, fp32 [N] twice, for h [N, C], weight [V padded, C], targets [N].

        functions: chunk_logprobs and chunk_gradient below, eager or compiled."""
        chunk_logprobs, ctx.chunk_gradient = functions
        ctx.settings = vocab_size, softcap, temperature
        ctx.rows = rows
        ctx.h_dtype = h.dtype
        ctx.set_materialize_grads(False)
        h = autocast(h)
        w = weight.to(h.dtype)
        chunks = []
        for chunk, y in zip(h.split(rows), targets.split(rows)):
            logits = chunk @ w.t()
            chunks.append(chunk_logprobs(logits, y, *ctx.settings))
        logprobs, entropies = map(torch.cat, zip(*chunks))
        kept = logits if len(chunks) == 1 else None
        ctx.save_for_backward(h, weight, targets, logprobs, entropies, kept)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, by_logprob, by_entropy):
        h, weight, *of_targets, kept = ctx.saved_tensors
        if by_logprob is None:
            by_logprob = torch.zeros_like(by_entropy)
        w = weight.to(h.dtype)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(h), ctx.rows):
            at = slice(start, start + ctx.rows)
            of_chunk = [None if of is None else of[at] for of in (*of_targets, by_logprob, by_entropy)]
            logits = h[at] @ w.t() if kept is None else kept
            grad = ctx.chunk_gradient(logits, *of_chunk, *ctx.settings)
            if dh is not None:
                dh[at] = grad @ w
            if dw is not None:
                dw += grad.t() @ h[at]
        dh = None if dh is None else dh.to(ctx.h_dtype)
        dw = None if dw is None else dw.to(weight.dtype)
        return dh, dw, *6 * [None]


def scaled(logits, vocab_size, softcap, temperature):
    """Return fp32 logits [N, V] at a temperature, of [N, V padded]."""
    z = logits[:, :vocab_size].float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z if temperature == 1 else z / temperature


def chunk_logprobs(logits, y, vocab_size, softcap, temperature):
    """Return logprobs of targets y [N] and entropies, fp32 [N], of logits [N, V padded]."""
    z = scaled(logits, vocab_size, softcap, temperature)
    z = z - z.amax(-1, keepdim=True)
    weights = z.exp()
    total = weights.sum(-1)
    # (weights * z).sum(-1) would write and read another tensor of [N, V]. Autocast would round it to bf16.
    with torch.autocast(z.device.type, enabled=False):
        mean = torch.linalg.vecdot(weights, z) / total
    return z.gather(1, y[:, None])[:, 0] - total.log(), total.log() - mean


def chunk_gradient(logits, y, logprobs, entropies, by_logprob, by_entropy, vocab_size, softcap, temperature):
    """Return the gradient by logits [N, V padded], in their dtype, from those by logprobs and entropies [N].

    by_entropy may be None. With probabilities p, a logprob's gradient is onehot - p and an entropy's
    -p (log p + entropy)."""
    z = scaled(logits, vocab_size, softcap, temperature)
    at = y[:, None]
    slope = 1 - (z * (temperature / softcap)).square() if softcap else None
    by_logprob = by_logprob / temperature
    logp = z - (z.gather(1, at) - logprobs[:, None])
    if by_entropy is None:
        grad = logp.exp_().mul_(-by_logprob[:, None])
    else:
        by_logp = by_entropy[:, None] / temperature * (logp + entropies[:, None])
        grad = logp.exp_().mul_(-by_logprob[:, None] - by_logp)
    grad.scatter_add_(1, at, by_logprob[:, None])
    if softcap:
        grad.mul_(slope)
    grad = grad.to(logits.dtype)
    return grad if grad.shape == logits.shape else F.pad(grad, (0, logits.shape[1] - vocab_size))
