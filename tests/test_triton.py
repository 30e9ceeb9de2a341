"""The Triton kernels of a decoding step give PyTorch's result. Without a GPU Triton's interpreter runs them, after `pip install triton`:

    TRITON_INTERPRET=1 NANORFT_GPU_TESTS_ON=cpu python -m pytest tests/test_triton.py
"""
import os

import pytest
import torch

import kernels_on_cpu as expected
from test_gpu import off

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1")]
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture
def kernels(card):
    if card.type == "cuda" and torch.cuda.get_device_capability(card) < (8, 0):
        pytest.skip("the kernels need an A100 or newer")
    from engine import triton_kernels
    return triton_kernels


def norm_of(gains, *to):
    return gains if gains is None else (*gains.to(*to), 1e-5)


def check(found, result, dtype, record_property):
    record_property("error", off(found, result))
    assert found.dtype == dtype and off(found, result) < TOLERANCES[dtype]


@pytest.mark.parametrize("rotated, norm", [(False, False), (True, True), (True, False)], ids=["", "rotated and normed", "rotated"])
@pytest.mark.parametrize("heads, kv_heads, D", [(6, 6, 64), (6, 2, 128), (5, 1, 32), (4, 4, 256), (3, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention(dtype, heads, kv_heads, D, rotated, norm, kernels, card, record_property):
    """Over as many positions as a row has, in a cache with more rows and positions."""
    if card.type == "cpu" and dtype == torch.bfloat16 and heads != kv_heads:
        pytest.skip("the interpreter has no products in bf16")
    torch.manual_seed(0)
    positions = torch.tensor([0, 63, 64, 299, 17])
    cache = torch.randn(2, 7, kv_heads, 300, D).to(dtype)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * D).to(dtype)
    rope = torch.randn(2, 300, 1, D).to(dtype) if rotated else None
    gains = (torch.rand(2, D) + 0.5).to(dtype) if norm else None
    exact = cache.double()
    result = expected.decode_attention(
        qkv.double(), exact, positions, rope if rope is None else rope.double().unbind(), norm_of(gains, "cpu", torch.float64))
    cache = cache.to(card)
    found = kernels.decode_attention(
        qkv.to(card), cache, positions.to(card), rope if rope is None else rope.to(card).unbind(), norm_of(gains, card, dtype))
    check(found, result, dtype, record_property)
    assert off(cache, exact) < TOLERANCES[dtype] / 10     # only the new position is rounded


@pytest.mark.parametrize("C", [32, 576])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_residual_and_norm(dtype, C, kernels, card, record_property):
    torch.manual_seed(0)
    h, y = torch.randn(2, 5, C).to(dtype)
    gain = (torch.rand(C) + 0.5).to(dtype)
    exact = (h + y).double()
    _, result = expected.add_and_norm(h.double(), y.double(), gain.double(), 1e-5)
    h, found = kernels.add_and_norm(h.to(card), y.to(card), gain.to(card), 1e-5)
    check(found, result, dtype, record_property)
    assert off(h, exact) < TOLERANCES[dtype]


@pytest.mark.parametrize("kind", ["relu2", "swiglu"])
@pytest.mark.parametrize("F", [100, 1536])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_activations(dtype, F, kind, kernels, card, record_property):
    torch.manual_seed(0)
    x = 2 * torch.randn(5, F * (1 + (kind == "swiglu"))).to(dtype)
    check(kernels.activate(x.to(card), kind), expected.activate(x.double(), kind), dtype, record_property)
    x[:] = torch.nan                         # marks weights that are not finite
    assert kernels.activate(x.to(card), kind).isnan().all()
    x[:] = 300
    assert kernels.activate(x.to(card), kind).isfinite().all() == (dtype != torch.float16 or kind == "relu2")
