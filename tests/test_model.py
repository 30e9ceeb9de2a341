import itertools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from layers.ops import (HeadAndLoss, SquaredReLU, chunk_loss, drop_out, fused_loss, math_attention, rms_norm,
                        sdpa_attention)
from model import GPT, GPTConfig, IGNORE, Prompts, on_meta, rotate

GPT2 = dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True, mlp_bias=True,
            tied_head=True)
LLAMA = dict(mlp="swiglu", n_kv_head=2, qk_norm=False, tied_head=True)
QWEN = dict(mlp="swiglu", n_kv_head=1, head_dim=24, qkv_bias=True, logit_softcap=15.0)
kinds = pytest.mark.parametrize("kind", [{}, GPT2, LLAMA, QWEN], ids=["default", "gpt2", "llama", "qwen"])


def tiny(seed=0, trained=False, **kw):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**(dict(vocab_size=100, block_size=32, n_layer=2, n_head=4, n_embd=64) | kw)))
    if trained:                       # no longer zero as initialised
        for p in model.parameters():
            p.data.add_(torch.randn_like(p) * 0.1)
    return model


def ids(B=3, T=16, V=100, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


WIDE = dict(n_embd=1024, tied_head=True)


@pytest.mark.parametrize("vocab_size, kind", [*itertools.product([257, 4099], [{}, GPT2, LLAMA, QWEN]), (257, WIDE)], ids=str)
def test_loss_at_start_is_ln_of_the_vocabulary(kind, vocab_size):
    model = tiny(vocab_size=vocab_size, **dict(n_embd=192) | kind)
    x = ids(8, 32, vocab_size)
    loss = model.loss(x[:, :-1], x[:, 1:]).item() / x[:, 1:].numel()
    assert abs(loss - math.log(vocab_size)) < 0.05


def test_parameter_counts_and_flops_of_gpt2_124m():
    model = on_meta(GPTConfig(**GPT2))
    padding = (50304 - 50257) * 768
    assert model.n_params() == 124_439_808 + padding
    assert model.n_params(embeddings=False) == 124_439_808 - 50257 * 768 - 1024 * 768
    assert model.flops_per_token(1024) == pytest.approx(0.86e9, rel=0.01)


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return out


def test_evaluation_takes_no_gradient_of_the_head(monkeypatch):
    seen, apply = [], HeadAndLoss.apply
    monkeypatch.setattr(HeadAndLoss, "apply", lambda *args: seen.append(args[1].requires_grad) or apply(*args))
    model = tiny()
    model.loss(ids(), ids())
    with torch.no_grad():
        model.loss(ids(), ids())
    assert seen == [True, False]


@pytest.mark.parametrize("chunk_loss", [chunk_loss, fused_loss])
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_head_and_loss_equal_cross_entropy_over_real_ids(rows, softcap, chunk_loss):
    torch.manual_seed(0)
    h, w = torch.randn(48, 32, requires_grad=True), torch.randn(128, 32, requires_grad=True)
    y = torch.randint(0, 100, (48,))
    y[5:9] = IGNORE
    loss = HeadAndLoss.apply(h, w, y, 100, softcap, rows, chunk_loss)
    ours = torch.autograd.grad(loss * 0.37, (h, w))
    logits = h @ w[:100].t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum")
    for a, b in zip((loss, *ours), (expected, *torch.autograd.grad(expected * 0.37, (h, w)))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert ours[1][100:].abs().max() == 0                 # padding ids get no gradient


@pytest.mark.parametrize("chunk_loss", [chunk_loss, fused_loss])
def test_bf16_head_takes_the_softmax_in_fp32(chunk_loss):
    torch.manual_seed(0)
    h, w = torch.randn(64, 32), torch.randn(50304, 32) * 0.1
    y = torch.randint(0, 50257, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = HeadAndLoss.apply(h, w, y, 50257, 0.0, 16, chunk_loss)
    exact = F.cross_entropy((h.bfloat16() @ w.bfloat16().t())[:, :50257].double(), y, reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)


def test_all_logits_never_exist_at_once():
    model = tiny(vocab_size=2048, n_embd=32, n_layer=1)
    model.loss_chunks = 8
    x = ids(4, 32, 2048)
    with LargestTensor() as seen:
        model.loss(x, x).backward()
    assert seen.size <= max(4 * 32 * 2048 // 8, 2048 * 32)


def test_loss_without_targets_is_zero():
    model = tiny(trained=True)
    loss = model.loss(ids(), torch.full((3, 16), IGNORE))
    loss.backward()
    assert loss == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


@kinds
def test_attention_is_causal(kind):
    model = tiny(trained=True, **kind)
    x = ids()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 100
    a, b = model(x), model(changed)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


@kinds
def test_loss_equals_the_cross_entropy_of_the_logits(kind):
    model = tiny(trained=True, **kind)
    x = ids()
    expected = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(x[:, :-1], x[:, 1:]), expected, rtol=1e-5, atol=1e-4)


def test_checkpointing_gives_the_same_gradients_bit_for_bit():
    grads = []
    for on in (False, True):
        model = tiny(trained=True, dropout=0.1)
        model.gradient_checkpointing = on
        torch.manual_seed(5)
        model.loss(ids(), ids(seed=2)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("p", [0.004, 0.1, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_on_a_cpu_drops_the_share_everywhere_and_keeps_the_mean(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(40_003, 16, dtype=dtype).t().requires_grad_()      # neither contiguous nor a multiple of eight
    y = drop_out(x, p)
    zeros = (y == 0).float()
    exact = round(256 * p) / 256
    spread = 5 * math.sqrt(exact * (1 - exact))
    assert abs(zeros.mean() - exact) < spread / math.sqrt(x.numel())
    assert (zeros.flatten()[:640_000].view(-1, 8).mean(0) - exact).abs().max() < spread / math.sqrt(80_000)    # for each byte of a word
    a, b = zeros.flatten()[:-1] - exact, zeros.flatten()[1:] - exact
    assert abs((a * b).mean()) < spread**2 / 5 / math.sqrt(x.numel())                                            # neighbours are independent
    assert y.max().item() == pytest.approx(1 / (1 - exact), rel=4e-3) and torch.equal(y[y > 0].unique(), y.max()[None])
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_is_off_in_evaluation_and_follows_the_generator():
    x = torch.randn(5, 7)
    assert drop_out(x, 0.5, False) is x and drop_out(x, 0.0) is x
    torch.manual_seed(3)
    first, second = drop_out(x, 0.5), drop_out(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(drop_out(x, 0.5), first) and not torch.equal(first, second)


@pytest.mark.parametrize("prompt", [None, 0, 70])
@pytest.mark.parametrize("T", [0, 1, 10, 128, 300])          # more than 128 are computed in parts
@pytest.mark.parametrize("K", [1, 2, 4])
def test_math_attention_equals_sdpa(K, T, prompt):
    """Cover prompts of 0 to 70 positions with padding, and torch.compile, which does not split the rows."""
    torch.manual_seed(0)
    S = T + (prompt or 0)
    inputs = [torch.randn(3, length, heads, 8, requires_grad=True) for length, heads in ((T, 4), (S, K), (S, K))]
    dy = torch.randn(3, T, 4, 8)
    mask = None
    if prompt is not None:
        lengths = torch.tensor([0, prompt // 2, prompt])
        mask = Prompts(torch.zeros(3, prompt, dtype=torch.long), lengths, torch.arange(3)).mask(T, torch.float32)
    expected = attention_and_gradients(sdpa_attention, inputs, dy, mask)
    for attend in [math_attention] + [torch.compile(math_attention, backend="eager")] * (T > 128):
        for written, fused in zip(attention_and_gradients(attend, inputs, dy, mask), expected):
            torch.testing.assert_close(written, fused)


def attention_and_gradients(attend, inputs, dy, mask):
    y = attend(*inputs, mask)
    return y, *torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("heads", [(), (3,)], ids=["channels", "heads"])
@pytest.mark.parametrize("dtype, within", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_norm_on_a_cpu_equals_pytorch_s(heads, dtype, within):
    torch.manual_seed(0)
    x = torch.randn(4, 5, *heads, 32, dtype=torch.float64, requires_grad=True)
    gain = (1 + 0.3 * torch.randn(*heads, 32, dtype=torch.float64)).requires_grad_()
    x2, gain2 = x.detach().to(dtype).requires_grad_(), gain.detach().to(dtype).requires_grad_()
    dy = torch.randn_like(x)
    y = F.rms_norm(x, (32,), eps=1e-2) * gain
    y2 = rms_norm(x2, gain2, 1e-2)
    y.backward(dy)
    y2.backward(dy.to(dtype))
    for mine, exact in ((y2, y), (x2.grad, x.grad), (gain2.grad, gain.grad)):
        assert mine.dtype == dtype and (mine - exact).norm() < within * exact.norm()


def test_norm_on_a_gpu_keeps_its_dtype():
    """Autocast on a GPU runs rms_norm in fp32, which would make queries, keys and the inputs of linear layers
    fp32."""
    with FakeTensorMode():
        x, gain = torch.empty(2, 3, 8, device="cuda", dtype=torch.bfloat16), torch.empty(8, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            assert F.rms_norm(x, (8,)).dtype == torch.float32
            assert rms_norm(x, gain, 1e-5).dtype == rms_norm(x, gain.expand(3, 8), 1e-5).dtype == torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_second_derivatives_raise():
    """Hand-written backward passes can't be differentiated again."""
    x, gain = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    for y in (rms_norm(x, gain, 1e-5), SquaredReLU.apply(x)):
        first, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()
    frozen = torch.ones(8)
    rms_norm(x, frozen, 1e-5).sum().backward()
    assert frozen.grad is None and x.grad is not None


def test_squared_relu_and_its_gradient():
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert SquaredReLU.apply(x).equal(F.relu(x).square())
    assert torch.autograd.gradcheck(SquaredReLU.apply, x)


def test_rotation_depends_on_distance_alone():
    model = tiny()
    q, k = torch.randn(16), torch.randn(16)
    at = rotate(torch.stack((q, k))[None, None].expand(1, 32, 2, 16), model.cos, model.sin)
    scores = [at[0, i + 5, 0] @ at[0, i, 1] for i in range(20)]
    torch.testing.assert_close(torch.stack(scores), torch.stack(scores[:1] * 20), rtol=1e-4, atol=1e-4)


def test_generate_is_greedy_at_temperature_0_and_keeps_to_real_ids():
    model = tiny(trained=True, vocab_size=5).eval()
    out = model.generate(ids(2, 4, 5), 6, temperature=0)
    for t in range(4, 10):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))
    hot = model.generate(ids(64, 4, 5), 40, temperature=100.0)          # beyond block_size
    assert hot.max() < 5 and hot.shape == (64, 44)
    assert torch.equal(model.generate(ids(2, 4, 5), 6, temperature=2.0, top_k=1), out)


def test_generate_samples_the_softmax():
    model = tiny(trained=True, vocab_size=5).eval()
    x = ids(1, 1, 5).expand(20_000, 1)
    counts = torch.bincount(model.generate(x, 1, generator=torch.Generator().manual_seed(0))[:, -1], minlength=5)
    expected = model(x[:1])[0, -1].softmax(-1) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5             # chi-square, 4 degrees of freedom, p = 0.001


@pytest.mark.parametrize("wrong", [
    dict(n_head=3), dict(n_kv_head=3), dict(head_dim=7), dict(n_layer=0), dict(n_layer="2"), dict(n_layer=2.0), dict(n_layer=True), dict(n_layer=None), dict(n_head=0), dict(n_head=-1), dict(n_embd=[64]),
    dict(n_kv_head=0), dict(head_dim=-2), dict(mlp_hidden=0), dict(vocab_size=10**12), dict(block_size=math.nan), dict(rope_theta=0),
    dict(rope_theta="1e4"), dict(rope_theta=math.inf), dict(norm_eps=-1.0), dict(norm="batchnorm"), dict(norm=[]), dict(mlp=None), dict(position={}),
    dict(qk_norm="yes"), dict(tied_head=1), dict(logit_softcap=-1), dict(rope_scaling=[]), dict(rope_scaling={"factor": 0}),
    dict(rope_scaling={"factor": "2"}), dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), dict(rope_scaling={"rope_type": []}),
    dict(rope_scaling={"ramp": 1}), dict(rope_scaling={"rate": 1.0}), dict(rope_scaling={"factor": "linear"}), dict(rope_scaling={"rope_type": "llama3", "factor": -8.0})], ids=str)
def test_invalid_configs_name_the_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))) as e:
        GPTConfig(**dict(n_embd=64, n_head=4) | wrong)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", [{}, QWEN], ids=["default", "qwen"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_whole_step_is_one_graph_for_torch_compile(kind, checkpointing):
    torch._dynamo.reset()
    model = tiny(trained=True, n_layer=1, **kind)
    model.gradient_checkpointing, model.loss_chunks = checkpointing, 2
    x, y = ids(), ids(seed=2)
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        eager = torch.autograd.grad(model.loss(x, y), list(model.parameters()))
        for a, b in zip(torch.autograd.grad(compiled(x, y), list(model.parameters())), eager):
            assert (a - b).norm() <= 0.01 * b.norm()          # the fused loss rounds a bf16 gradient differently


def test_squares_of_fp16_stay_finite():
    """The squares of numbers above 255.9 overflow; the gradient is that of the largest number that remains.
    """
    x = torch.tensor([-1.0, 0.5, 200.0, 300.0, 60000.0], dtype=torch.float16, requires_grad=True)
    y = SquaredReLU.apply(x)
    y.backward(torch.full_like(y, 0.5))
    assert y.tolist() == [0.0, 0.25, 40000.0, 65024.0, 65024.0] and x.grad.tolist() == [0.0, 0.5, 200.0, 255.0, 255.0]


def test_gpu_memory_determines_the_logits_per_chunk(monkeypatch):
    """At 152k ids, 2**25 logits would be 220 rows."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = tiny(vocab_size=151936, n_embd=32, n_layer=1)
    assert model.rows_per_chunk(torch.device("cuda")) == 80 * 2**30 // 256 // 151936 > 2000
    assert model.rows_per_chunk(torch.device("cpu")) == 2**25 // 151936
