"""The functions of engine/triton_kernels.py in PyTorch. Each is one operation to recorded.py."""
import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIMS = 16, 32, 64, 128, 256


def rms_norm(x, gain, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


@torch.library.custom_op("nanorft_test::decode_attention", mutates_args=("keys", "values"))
def attention_op(qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rope: list[Tensor], gains: list[Tensor], eps: float) -> Tensor:
    B, (_, K, T, D) = len(qkv), keys.shape
    heads = qkv.view(B, -1, D)
    q, k, v = heads.split((heads.shape[1] - 2 * K, K, K), 1)
    if gains:
        q, k = (rms_norm(x, gain, eps) for x, gain in zip((q, k), gains))
    if rope:
        cos, sin = (table[positions] for table in rope)
        q, k = (x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin for x in (q, k))
    for past, new in ((keys, k), (values, v)):
        past[torch.arange(B), :, positions] = new.to(past.dtype)
    scores = torch.einsum("bkgd,bktd->bkgt", q.reshape(B, K, -1, D), keys[:B]) * D**-0.5
    unused = torch.arange(T) > positions[:, None, None, None]
    return torch.einsum("bkgt,bktd->bkgd", scores.masked_fill(unused, -torch.inf).softmax(-1), values[:B]).reshape(B, -1)


def decode_attention(qkv, cache, positions, rope=None, norm=None):
    *gains, eps = norm or (0.0,)
    return attention_op(qkv, *cache, positions, list(rope or ()), gains, eps)


@torch.library.custom_op("nanorft_test::add_and_norm", mutates_args=("h",))
def norm_op(h: Tensor, y: Tensor, gain: Tensor, eps: float) -> Tensor:
    h += y
    return rms_norm(h, gain, eps)


def add_and_norm(h, y, gain, eps):
    return h, norm_op(h, y, gain, eps)


@torch.library.custom_op("nanorft_test::activate", mutates_args=())
def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "relu2":
        return F.relu(x).square()
    gates, values = x.chunk(2, -1)
    return F.silu(gates) * values
