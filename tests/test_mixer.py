"""Linear attention against explicit sums: alone, in a model, in the engine and in runs."""
import dataclasses
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import datagen
import eval as evaluation
import grpo
import hub.weights
import sample
import train
from conftest import TINY, count_graphs, flags, in_process, largest_difference, metrics, trained, weights
from engine import Engine, Request, Sampling
from engine.kv_cache import cache_bytes
from layers import linear_attention
from layers.linear_attention import mix, mix_step
from layers.lora import add_lora, merged
from model import GPT, GPTConfig
from recorded import Recorded
from rollouts.batch import padded
from rollouts.pipeline import Completion
from runtime import checkpoint, distributed, hardware, memory
from runtime.config import BadInput
from test_grpo import TASK

KINDS = [("favor", "sum"), ("favor", "delta"), ("linear", "sum"), ("linear", "delta")]
kinds = pytest.mark.parametrize("kind, rule", KINDS, ids=["-".join(kind) for kind in KINDS])


def make(kind="favor", rule="sum", trained=True, **options):
    """Return a small model with two queries a key head and perturbed weights."""
    torch.manual_seed(0)
    shape = dict(vocab_size=100, block_size=192, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, mixer=kind, mixer_rule=rule, mixer_features=24)
    if kind == "softmax":
        shape |= {"mixer_rule": "sum"}
    model = GPT(GPTConfig(**shape | options))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and trained:
                p.add_(0.3 * torch.randn_like(p))
    return model


def inputs(kind, rule, B=2, T=150, H=4, K=2, D=8, M=24, size=1.0):
    """Return random arguments of `mix`, which require gradients."""
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=10, n_layer=1, n_head=H, n_kv_head=K, head_dim=D, n_embd=16, mixer=kind, mixer_rule=rule, mixer_features=M)
    layer = GPT(config).blocks[0].attention.mixer
    q, k, v = (size * torch.randn(B, T, heads, D) for heads in (H, K, K))
    return [x.detach().requires_grad_() for x in layer(torch.randn(B, T, 16), q, k, v)]


def naive(q, k, v, write=None):
    """Compute `mix` in fp64 from all T x T weights, or one position after another."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    if write is None:
        seen = torch.einsum("bthm,bshm->bhts", q, k).tril()
        return torch.einsum("bhts,bshd->bthd", seen / seen.sum(-1, keepdim=True), v)
    write = write.double().repeat_interleave(groups, dim=2)
    B, T, H, M = q.shape
    state, read = torch.zeros(B, H, M, v.shape[-1], dtype=torch.float64), []
    for t in range(T):
        old = torch.einsum("bhm,bhmd->bhd", k[:, t], state)
        state = state + torch.einsum("bhm,bhd->bhmd", k[:, t], write[:, t, :, None] * (v[:, t] - old))
        read.append(torch.einsum("bhm,bhmd->bhd", q[:, t], state))
    return torch.stack(read, 1)


# --- the arithmetic ---

@kinds
@pytest.mark.parametrize("T", [1, 5, 64, 65, 150])
def test_chunked_results_and_gradients_equal_the_reference(kind, rule, T):
    x = inputs(kind, rule, T=T)
    y, expected = mix(*x)[0], naive(*x)
    assert y.dtype == torch.float32 and (y - expected).abs().max() < 1e-4
    dy = torch.randn(y.shape)
    for ours, theirs in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy.double())):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-5


@kinds
def test_a_state_replaces_all_earlier_positions(kind, rule):
    """Cover parts that are not multiples of a chunk, single positions, and padded sequences of several
    lengths."""
    x = [part.detach() for part in inputs(kind, rule)]
    y, last = mix(*x)
    first, state = mix(*(part[:, :70] for part in x))
    rest, state = mix(*(part[:, 70:] for part in x), state=state)
    torch.testing.assert_close(torch.cat((first, rest), 1), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)

    state = torch.zeros_like(last)
    steps = [mix_step(*(part[:, t:t + 1] for part in x), state=state) for t in range(y.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)

    _, states = mix(*x, lengths=torch.tensor([0, 70]))
    assert not states[0].any()
    torch.testing.assert_close(states[1:], mix(*(part[1:, :70] for part in x))[1], rtol=1e-4, atol=1e-5)
    nothing, same = mix(*(part[:, :0] for part in x), state=last)
    assert nothing.shape == y[:, :0].shape and same is last


class CountWritten(TorchDispatchMode):
    """Count the numbers that operations write, including additions and zeros, which FlopCounterMode ignores.
    """

    written = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        views = any(alias.alias_info and not alias.alias_info.is_write for alias in op._schema.returns)
        self.written += 0 if views else sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


@kinds
def test_cost_is_linear_in_the_length(kind, rule):
    counts = []
    for T in (256, 1024):
        with FlopCounterMode(display=False) as products, CountWritten() as numbers:
            mix(*inputs(kind, rule, B=1, T=T))[0].sum().backward()
        counts.append((products.get_total_flops(), numbers.written))
    assert counts[1][0] == pytest.approx(4 * counts[0][0], rel=0.01)
    assert counts[1][1] == pytest.approx(4 * counts[0][1], rel=0.1)
    # So is the model's own count, while softmax's grows.
    model = make(kind, rule)
    assert model.flops_per_token(100) == model.flops_per_token(10**5) > make("softmax").flops_per_token(0)


def test_flops_per_token_are_counted():
    """Count a layer's products without those of its linear layers."""
    config = GPTConfig(vocab_size=10, n_layer=1, n_head=4, n_kv_head=2, n_embd=64, mixer="favor", mixer_features=32)
    layer = GPT(config).blocks[0].attention.mixer
    q, k, v = (torch.randn(1, 640, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        mix(*layer(q, q, k, v))[0].sum().backward()
    assert counter.get_total_flops() / 640 == pytest.approx(linear_attention.flops_per_token(config), rel=0.05)


@kinds
def test_large_queries_and_keys_stay_finite(kind, rule):
    """If exp over- or underflows in fp32, the output is still a mean of values."""
    for size in (1e-3, 10.0, 1000.0):
        x = inputs(kind, rule, T=100, size=size)
        y = mix(*x)[0]
        for gradient in torch.autograd.grad(y.square().sum(), x):
            assert gradient.isfinite().all()
        typical = y.std() / x[2].std()
        assert 1e-3 < typical < 1.1, (size, typical)
        if rule == "sum":
            assert y.abs().max() <= x[2].abs().max() * 1.001


@kinds
def test_initial_output_has_the_scale_of_softmax(kind, rule):
    """Use real shapes, before the output projection, which is initialised to zero."""
    def scale(**options):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=257, block_size=512, n_layer=1, n_head=4, n_embd=256, **options))
        seen = []
        model.blocks[0].attention.out.register_forward_pre_hook(lambda module, given: seen.append(given[0].std().item()))
        with torch.no_grad():
            model.hidden(torch.randint(257, (2, 512)))
        return seen[0]
    assert 1 / 3 < scale(mixer=kind, mixer_rule=rule) / scale() < 3


# --- random features ---

def test_vectors_are_orthogonal_and_as_long_as_normal_ones():
    torch.manual_seed(0)
    vectors = linear_attention.orthogonal_vectors(640, 64)
    for block in vectors.split(64):
        angles = F.normalize(block, dim=-1) @ F.normalize(block, dim=-1).T
        assert (angles - torch.eye(64)).abs().max() < 0.01
    lengths = vectors.square().sum(-1)
    assert lengths.mean() == pytest.approx(64, rel=0.03) and lengths.std() == pytest.approx(math.sqrt(128), rel=0.2)
    assert vectors.mean().abs() < 0.02
    assert torch.equal(vectors.bfloat16().float(), vectors) and linear_attention.orthogonal_vectors(10, 64).shape == (10, 64)


def favor_errors(features, size=1.0, T=512, B=4, D=64):
    """|A' - A| / |A| of FAVOR+'s causal weights for each number of features; queries and keys have random directions and norm
    8 * size, as QK-norm with a gain of `size` gives."""
    torch.manual_seed(0)
    q, k = (size * math.sqrt(D) * F.normalize(torch.randn(B, T, D), dim=-1) for _ in range(2))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    exact = (q @ k.mT / math.sqrt(D)).masked_fill(future, -math.inf).softmax(-1)
    errors = []
    for n in features:
        vectors = linear_attention.orthogonal_vectors(n, D)
        mapped = (linear_attention.favor_features(x, vectors, own_maximum=x is q) for x in (q, k))
        near = torch.matmul(next(mapped), next(mapped).mT).masked_fill(future, 0)
        errors.append(((near / near.sum(-1, keepdim=True) - exact).norm() / exact.norm()).item())
    return errors


def test_favor_approximates_softmax_with_many_features():
    errors = favor_errors((16, 256, 4096))                           # QK-norm with a gain of 1
    assert errors[0] > errors[1] > errors[2] and 1.5 < errors[1] < 2.5
    weak = favor_errors((16, 256, 4096), size=0.5)                   # smaller products are easier
    assert weak[-1] < 0.12 and all(more > 2 * fewer for more, fewer in zip(weak, weak[1:]))
    layer = GPT(GPTConfig(vocab_size=10, n_layer=1, n_head=1, n_embd=64, mixer="favor")).blocks[0].attention
    assert layer.q_norm.max().item() == layer.k_norm.min().item() == pytest.approx(64**-0.25)
    assert favor_errors((256,), size=64**-0.25)[0] < 0.12   # the initial gain


@pytest.mark.parametrize("gain", [1.0, 3.0, 4.5])
def test_large_gains_keep_the_weights_on_keys(gain):
    """MIN_FEATURE would dominate if the keys' length were not compensated."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=10, n_layer=1, n_head=1, n_embd=64, mixer="favor", mixer_features=64)
    attention = GPT(config).blocks[0].attention
    with torch.no_grad():
        attention.k_norm.fill_(gain)
        x = torch.randn(2, 40, 64)
        q, k, v = attention.project_qkv(x, torch.ones(40, 1, 64), torch.zeros(40, 1, 64))        # no rotation
        y, _ = mix(*attention.mixer(x, q, k, v, gain=attention.k_norm))
        without_gain, _ = mix(*attention.mixer(x, q, k, v))
        vectors = attention.mixer.vectors.double()
        q, k = (part[:, :, 0].double() * 64**-0.25 for part in (q, k))
        features = [(part @ vectors.T - part.square().sum(-1, keepdim=True) / 2).exp() for part in (q, k)]
        weights = (features[0] @ features[1].mT).tril()
        expected = (weights / weights.sum(-1, keepdim=True)) @ v[:, :, 0].double()

    def error(y):
        return ((y[:, :, 0] - expected).norm() / expected.norm()).item()
    assert error(y) < 0.01 and (gain == 1 or error(without_gain) > 0.1)


@pytest.mark.parametrize("N", [1, 5])
def test_states_are_the_same_by_cumsum(monkeypatch, N):
    state = torch.randn(2, 3, 4, 5)
    written = torch.randn(2, 3, N, 4, 5)
    ours = linear_attention.running_sums(state, written)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(ours, linear_attention.running_sums(state, written))
    assert torch.equal(ours[:, :, 0], state) and ours.shape == (2, 3, N + 1, 4, 5)


# --- the model ---

@kinds
def test_an_earlier_token_changes_later_logits_and_a_later_one_never_does(kind, rule):
    model = make(kind, rule, n_layer=1)
    x = torch.randint(100, (1, 140))
    with torch.no_grad():
        before = model(x)
        for at in (0, 63, 64, 100, 139):
            y = x.clone()
            y[0, at] = (x[0, at] + 1) % 100
            change = (model(y) - before).abs().amax(-1)[0]
            assert not change[:at].any() and (change[at:] > 1e-6).all(), at


def test_mixer_weights_are_drawn_after_the_others():
    softmax = make("softmax", trained=False).state_dict()
    assert not [name for name in softmax if "mixer" in name]
    for kind, new in (("linear", []), ("favor", ["vectors"])):
        own = make(kind, trained=False).state_dict()
        assert own.keys() - softmax.keys() == {f"blocks.{i}.attention.mixer.{name}" for i in (0, 1) for name in new}
        assert all(torch.equal(own[name], softmax[name]) for name in softmax if kind == "linear" or "k_norm" not in name and "q_norm" not in name)


@kinds
def test_gradients_reach_all_that_is_trained_and_checkpointing_and_bf16_change_little(kind, rule):
    model = make(kind, rule)
    x, y = torch.randint(100, (2, 2, 100))
    found = []
    for checkpointing, dtype in ((False, None), (True, None), (False, torch.bfloat16), (False, torch.float16)):
        model.gradient_checkpointing = checkpointing
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model.loss(x, y) / y.numel()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])))
    (loss, gradient), *others = found
    still = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert still == [f"blocks.{i}.attention.mixer.vectors" for i in (0, 1) if kind == "favor"]
    for (value, other), near in zip(others, (1e-6, 0.1, 0.02)):
        assert value == pytest.approx(loss, rel=near) and (other - gradient).norm() < 2 * near * gradient.norm()


@kinds
def test_features_and_states_are_fp32_in_a_model_of_bf16(kind, rule):
    model = make(kind, rule)
    seen = set()

    def attend(*given):
        y, state = mix(*given)
        seen.add((given[0].dtype, given[1].dtype, state.dtype, y.dtype))
        return y
    with torch.no_grad():
        expected = model(torch.arange(90)[None])
        model.bfloat16()
        model.causal_attention = attend
        close = model(torch.arange(90)[None])
    assert seen == {(torch.float32, torch.float32, torch.float32, torch.bfloat16)}
    assert (close - expected).norm() < 0.15 * expected.norm()
    if kind == "favor":
        assert torch.equal(model.blocks[1].attention.mixer.vectors.float(), make(kind, rule).blocks[1].attention.mixer.vectors)


@kinds
def test_shared_prompts_equal_repeated_prompts(kind, rule):
    """As in grpo.py, prompts have different lengths; one is a single token, which leaves no prefix."""
    model = make(kind, rule)
    rollouts = [Completion(prompt, [7 * i % 100] * (3 + i), [-1.0] * (3 + i), True)
                for i, prompt in enumerate([[5] * 90, [5] * 90, [9], [1, 2, 3], [1, 2, 3]])]
    for part in (rollouts, rollouts[2:3]):
        batch = padded(part)
        logprobs, _ = model.token_logprobs(batch.x, batch.y, 1.0, batch.prefixes)
        for c, row in zip(part, logprobs):
            whole = model(torch.tensor([c.prompt + c.ids]))[0, len(c.prompt) - 1:-1].log_softmax(-1)
            expected = whole.gather(1, torch.tensor(c.ids)[:, None])[:, 0]
            torch.testing.assert_close(row[:len(c.ids)], expected, rtol=1e-4, atol=1e-4)


def test_adapters_leave_the_features_alone():
    model = make("favor", "delta")
    x = torch.randint(100, (1, 40))
    expected = model(x)
    add_lora(model, 4)
    assert torch.equal(model(x), expected)
    assert all(name.endswith(("lora_a", "lora_b")) for name, p in model.named_parameters() if p.requires_grad)
    model.loss(x, x).backward()
    again = make("favor", "delta")
    again.load_state_dict(merged(model))
    assert torch.equal(again(x), expected)


@pytest.mark.parametrize("wrong, message", [
    (dict(mixer="performer"), "mixer=performer should be softmax, favor or linear"), (dict(mixer_rule="gated"), "should be sum or delta"),
    (dict(mixer="softmax", mixer_rule="delta"), "mixer_rule=delta needs mixer=favor or linear"), (dict(mixer_features=0), "mixer_features=0")])
def test_invalid_mixer_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


@kinds
def test_weights_and_states_are_counted(kind, rule):
    model = make(kind, rule)
    assert memory.n_params(model.config) == model.n_params()
    for slots in (1, 7):
        engine = Engine(model, slots=slots)
        assert engine.runner.cache.storage.nbytes == cache_bytes(model.config, slots, 192, torch.bfloat16)


def test_activations_are_counted():
    model = make("favor", "delta")
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    x = torch.zeros(2, 150, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(x, x)
    real = sum(n for p, n in kept.items() if p not in own)
    assert loss.requires_grad and memory.saved_for_backward(model, hardware.setup("cpu", dtype="fp32"), 2, 150) == pytest.approx(real, rel=0.02)


# --- the engine ---

@pytest.fixture(params=[None, "cuda"], ids=["", "as on a GPU"])
def acting(request, monkeypatch):
    monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", request.param)
    monkeypatch.setattr("engine.runner.CUDAGraph", Recorded)
    return request.param


def some_requests(n, **options):
    g = torch.Generator().manual_seed(1)
    lengths = [1, 70, 2, 64, 65, 1, 30, 90][:n]
    return [Request(torch.randint(100, (length,), generator=g).tolist(), key=i, **options) for i, length in enumerate(lengths)]


@kinds
def test_a_refilled_batch_decodes_like_the_plain_model(kind, rule, acting):
    model = make(kind, rule)
    engine = Engine(model, slots=3, sampling=Sampling(temperature=0), poll=2)
    requests = [dataclasses.replace(r, num_samples=1 + r.key % 3, max_new_tokens=6 + 5 * r.key % 13) for r in some_requests(8)]
    for _ in range(2):                       # the second time the slots hold old states
        done = list(engine.generate(requests))
        assert len(done) == sum(r.num_samples for r in requests)
        for s in done:
            ids = s.request.ids + s.ids
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[0, len(s.request.ids) - 1:-1]
            assert logits.argmax(-1).tolist() == s.ids and len(s.ids) == s.request.max_new_tokens
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(s.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(s.logprobs), logprobs, rtol=1e-4, atol=1e-4)
    assert engine.bytes_read([(70, 5), (1, 5)]) > 10 * cache_bytes(model.config, 0, 192, torch.float32)


@kinds
def test_a_sample_does_not_depend_on_its_batch(kind, rule, acting):
    model = make(kind, rule)
    *others, request = some_requests(8, num_samples=3, max_new_tokens=12)
    for deterministic in (False, True):
        engine = Engine(model, slots=4, deterministic=deterministic, seed=5)
        alone = {s.index: s for s in engine.generate([request])}
        among = {s.index: s for s in engine.generate([*others, request]) if s.request is request}
        assert len(alone) == len({tuple(s.ids) for s in alone.values()}) == 3
        for index, s in among.items():
            assert s.ids == alone[index].ids
            assert s.logprobs == (alone[index].logprobs if deterministic else pytest.approx(alone[index].logprobs, abs=1e-4))


@kinds
def test_weights_are_loaded_in_bf16(kind, rule):
    """This includes the random features."""
    model = make(kind, rule)
    engine = Engine(make(kind, rule, trained=False), slots=2, dtype=torch.bfloat16, sampling=Sampling(temperature=0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    engine.load(model)
    for name, value in engine.runner.model.state_dict().items():
        torch.testing.assert_close(value.float(), model.state_dict()[name], rtol=0.01, atol=0)
    s = next(engine.generate([Request([3] * 40, max_new_tokens=1)]))
    with torch.no_grad():
        expected = model.bfloat16()(torch.tensor([[3] * 40]))[0, -1].log_softmax(-1)[s.ids[0]]
    assert s.logprobs[0] == pytest.approx(expected.item(), abs=0.1)


# --- runs ---

@pytest.fixture(scope="module")
def favor(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("mixer") / "favor"
    trained(folder, text, mixer="favor", mixer_rule="delta", mixer_features=16, n_kv_head=1, dtype="fp32", max_steps=10)
    return folder


def test_a_run_keeps_its_mixer_and_its_features(favor, tmp_path, capsys):
    found = hub.find(favor)
    assert (found.config.mixer, found.config.mixer_rule, found.config.mixer_features) == ("favor", "delta", 16)
    model = found.load()
    saved = checkpoint.load_weights(favor, 10)
    assert torch.equal(model.blocks[1].attention.mixer.vectors, saved["blocks.1.attention.mixer.vectors"])
    assert saved["blocks.1.attention.mixer.vectors"].norm(dim=1).min() > 1 and saved["blocks.0.attention.mixer.write.weight"].shape == (1, 32)
    assert "attention favor (delta)" in (favor / "training.log").read_text()
    assert metrics(favor)[10] < metrics(favor)[1]

    assert "mixer=softmax contradicts" in in_process(train.main, flags(init_from=favor, mixer="softmax", dataset="x.txt", out_dir=tmp_path / "b"), 2)[1]
    for refused in (lambda: hub.weights.export(model, tmp_path / "out"), lambda: hub.weights.export_adapters(add_lora(model, 2), tmp_path / "out")):
        with pytest.raises(BadInput, match="transformers has no architecture with mixer=favor"):
            refused()
    assert sample.main([str(favor), "--prompt=the", "--max_new_tokens=3", "--num_samples=2", "--device=cpu"]) in (0, None)


def test_a_resumed_run_reaches_the_same_weights(text, tmp_path):
    options = TINY | dict(dataset=text, data_dir=text.parent / "tokens", max_steps=14, save_interval=12)
    in_process(train.main, flags(**options, mixer="favor", mixer_rule="delta", mixer_features=16, n_kv_head=1, dtype="fp32", out_dir=tmp_path / "b"))
    expected = weights(tmp_path / "b", 14)
    shutil.rmtree(tmp_path / "b/checkpoints/step_00000014")
    in_process(train.main, flags(init_from="resume", out_dir=tmp_path / "b"))
    after = weights(tmp_path / "b", 14)
    assert largest_difference(after, expected) == 0 and largest_difference(after, weights(tmp_path / "b", 12)) > 1e-4


def test_a_model_of_hugging_face_s_keeps_softmax(tmp_path):
    hub.weights.export(make("softmax", mlp="swiglu", qk_norm=False), tmp_path / "llama")
    _, said = in_process(train.main, flags(init_from=tmp_path / "llama", mixer="linear", dataset="x.txt", out_dir=tmp_path / "b"), 2)
    assert "mixer=linear contradicts" in said and "which has mixer=softmax" in said


@pytest.mark.parametrize("deterministic", [False, True])
def test_reinforcement_learning(favor, tmp_path, deterministic):
    """Run two steps, in which logprobs equal the engine's up to rounding."""
    (tmp_path / "letters.py").write_text(TASK)
    in_process(grpo.main, flags(init_from=favor, task=tmp_path / "letters.py", out_dir=tmp_path / "grpo", prompts_per_step=2, k_samples=4,
                         max_new_tokens=8, max_steps=2, warmup_steps=0, eval_interval=0, dtype="fp32", reward_pool="serial",
                         keep_memory=False, deterministic=deterministic, beta=0.01, device="cpu"))
    lines = [json.loads(line) for line in (tmp_path / "grpo/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    gaps = [line["logprob_gap_max"] for line in steps]
    assert 0 < max(gaps) < 1e-4
    before, after = weights(favor, 10), weights(tmp_path / "grpo", 2)
    assert largest_difference(before, after) > 0
    assert torch.equal(before["blocks.0.attention.mixer.vectors"], after["blocks.0.attention.mixer.vectors"])


def test_answers_are_verified_and_kept_and_counted(favor, tmp_path):
    """Samples of datagen.py and eval.py stop early, are refilled, and are the same when repeated."""
    verified = "\n\ndef reward(question, completion):\n    return float('t' in completion)\n"
    (tmp_path / "letter.py").write_text(TASK.replace('STOP = "a"', 'STOP = " "').partition("def reward")[0] + verified)
    shared = dict(task=tmp_path / "letter.py", max_new_tokens=16, device="cpu")
    kept = []
    for name in "ab":
        in_process(datagen.main, flags(init_from=favor, output=tmp_path / f"{name}.json", num_questions=12, oversample=4, keep_per_question=2,
                                temperature=1.0, **shared))
        kept.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert kept[0] == kept[1] and len(kept[0]) > 3
    said, _ = in_process(evaluation.main, [str(favor), "--json", *flags(num_samples=4, temperature=1.0, **shared)])
    found = json.loads(said.splitlines()[-1])
    assert 0 < found["accuracy"] < 1


def test_two_ranks_that_share_the_weights(text, tmp_path):
    options = dict(mixer="favor", mixer_rule="delta", mixer_features=15, dtype="fp32", max_steps=4, save_interval=4, batch_size=2,
                 gradient_accumulation_steps=2, eval_interval=4, optimizer="adamw", learning_rate=1e-3)
    trained(tmp_path / "one", text, **options)
    trained(tmp_path / "two", text, ranks=2, parallel="fsdp", **options)
    assert largest_difference(weights(tmp_path / "one", 4), weights(tmp_path / "two", 4)) < 1e-4


@pytest.mark.parametrize("rule", ["sum", "delta"])
def test_compiled_blocks_compute_the_same(monkeypatch, rule):
    """Lengths above a chunk share compiled code. Only the delta rule's loop is not compiled."""
    graphs = count_graphs(monkeypatch)
    found = []
    for compile in (False, True):
        fast = distributed.TrainedModel(make("favor", rule), compile=compile, dynamic=True)
        for T in (192, 128, 128):
            x = torch.arange(2 * T).view(2, T) % 100
            fast.loss(x, x).backward()
        found.append(torch.cat([p.grad.flatten() for p in fast.model.parameters() if p.requires_grad]))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(graphs) <= {"sum": 3, "delta": 10}[rule]
    assert bool(breaks) == (rule == "delta") and all("`disable`" in reason or "move_state" in reason for reason in breaks)
