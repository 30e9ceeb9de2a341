"""The engine samples the same ids as the plain model, in any batch."""
import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import engine
import kernels_on_cpu
from conftest import ROOT, environment
from engine import Engine, Request, Sampling
from layers.packed import HalfPacked, Packed
from engine.kv_cache import cache_bytes
from engine.runner import ModelRunner, graph_size
from engine.sampler import draw, invert, stream, uniform
from engine.scheduler import Scheduler
from layers import ops
from layers.lora import add_lora, merged
from model import GPT, GPTConfig
from recorded import Recorded
from runtime import memory


@pytest.fixture(autouse=True, params=[None, "cuda"], ids=["", "as on a GPU"])
def acting(request, monkeypatch):
    """Run every test a second time on a GPU's branches, with recorded graphs."""
    monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", request.param)
    monkeypatch.setattr("engine.runner.CUDAGraph", Recorded)
    Recorded.made.clear()
    return request.param


on_a_cpu = pytest.mark.parametrize("acting", [None], indirect=True)
on_a_gpu = pytest.mark.parametrize("acting", ["cuda"], indirect=True)
GREEDY = Sampling(temperature=0)
SHAPES = {"default": {}, "grouped": dict(n_head=4, n_kv_head=2, mlp="swiglu", tied_head=True),
          "gpt2": dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True)}


def make(**options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(vocab_size=100, block_size=192, n_layer=2, n_head=2, n_embd=32) | options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def prompts(n):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(100, (int(torch.randint(1, 90, (1,), generator=g)),), generator=g).tolist() for _ in range(n)]


def requests(n, samples=1, new=20):
    """Return n Requests. new: max_new_tokens, or a function from key to it."""
    return [Request(p, samples, i, new(i) if callable(new) else new) for i, p in enumerate(prompts(n))]


def sampled(engine, asked, **options):
    """Return {(key, index): Sample}."""
    return {(s.request.key, s.index): s for s in engine.generate(asked, **options)}


def ids_of(engine, asked):
    """Return {(key, index): ids}."""
    return {key: s.ids for key, s in sampled(engine, asked).items()}


def first(engine, *request, **options):
    """Return the first Sample of a Request."""
    return next(engine.generate([Request(*request, **options)]))


def as_text(ids):
    return "".join(chr(32 + i) for i in ids)


@torch.no_grad()
def logits_of(model, s):
    """Return the model's logits [new tokens, V] at a Sample's ids, without a cache."""
    ids = torch.tensor([s.request.ids + s.ids], device=model.head_weight.device)
    return model(ids)[0, len(s.request.ids) - 1:-1]


def logprobs_at(logits, s):
    return logits.log_softmax(-1).gather(1, torch.tensor(s.ids, device=logits.device)[:, None])[:, 0]


def assert_near(found, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=tolerance)


def assert_same(found, expected, tolerance=1e-5):
    """Compare {key: Sample}: the ids, and the logprobs within the tolerance."""
    assert {key: s.ids for key, s in found.items()} == {key: s.ids for key, s in expected.items()}
    for key, s in expected.items():
        assert_near(found[key].logprobs, s.logprobs, tolerance)


@pytest.mark.parametrize("acting, groups", [(None, False), (None, True), ("cuda", False)], indirect=["acting"],
                         ids=["together", "in groups that are sorted", "as on a GPU"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_batch_equals_the_model_without_a_cache(shape, groups, acting, monkeypatch):
    if groups:
        monkeypatch.setattr("engine.kv_cache.ROW_GROUP_SIZE", 2)
        monkeypatch.setattr("engine.generate.SORT_EVERY", 3)
    model = make(**SHAPES[shape])
    engine, sorts, sort = Engine(model, slots=6, sampling=GREEDY), [], Scheduler.sort

    def noted(scheduler):
        order = sort(scheduler)
        sorts.append(order.tolist() != sorted(order))
        return order
    monkeypatch.setattr(Scheduler, "sort", noted)
    done = list(engine.generate(requests(20, new=lambda i: (7 * i) % 40 + 1)))
    assert sorted(s.request.key for s in done) == list(range(20))
    for s in done:
        assert s.ids == logits_of(model, s).argmax(-1).tolist()
        assert len(s.ids) == s.request.max_new_tokens and s.reason == "length"
    assert any(sorts) == groups
    widths = [C for _, _, C in engine.runner.step_shape([5, 20, 90, 7, 8, 9])[1]]
    assert widths == ([32, 96, 16] if groups else [128] if acting else [96])
    shapes = {(B, groups[0].length) for B, groups, _ in engine.runner.graphs}
    assert len(shapes) == len(Recorded.made) == (4 if acting else 0)


def test_batch_sorting_and_poll_interval_change_no_sample(monkeypatch):
    """More samples than slots, of prompts of very different lengths; sorted by pairs in the second case."""
    model, asked = make(), requests(5, 7, lambda i: 3 + 4 * i)
    options = dict(seed=5, sampling=Sampling(stop=(3, 50, 7)))
    expected = sampled(Engine(model, slots=35, poll=1, **options), asked)
    assert len(expected) == 35 and {s.reason for s in expected.values()} == {"stop", "length"}
    assert len({tuple(s.ids[:3]) for s in expected.values()}) > 30
    assert all(len({s.ids[0] for (key, _), s in expected.items() if key == prompt}) > 1 for prompt in range(5))    # also the first token
    for slots, poll, group, every in ((5, 1, 128, 32), (5, 2, 2, 2), (4, 3, 128, 32), (4, 8, 128, 32)):
        monkeypatch.setattr("engine.kv_cache.ROW_GROUP_SIZE", group)
        monkeypatch.setattr("engine.generate.SORT_EVERY", every)
        found = sampled(Engine(model, slots=slots, poll=poll, **options), asked)
        assert_same(found, expected)
        assert all(found[key].reason == s.reason for key, s in expected.items())
    alone = sampled(Engine(model, slots=1, **options), asked[4:])
    assert len(alone) == 7 and all(expected[key].ids == s.ids for key, s in alone.items())
    assert next(Engine(model, slots=1, **options | dict(seed=6)).generate(asked[4:])).ids not in [s.ids for s in alone.values()]


def test_log_probabilities_are_those_of_a_full_forward_pass_and_stops_end_a_sample():
    model = make()
    engine = Engine(model, slots=5, sampling=Sampling(temperature=0.7, stop=(3, 50)))
    done = list(engine.generate(requests(6, 3, 4)))
    assert len(done) == 18 and {s.reason for s in done} == {"stop", "length"}
    for s in done:
        assert (s.ids[-1] in (3, 50)) == (s.reason == "stop") and not {3, 50} & set(s.ids[:-1])
        assert_near(s.logprobs, logprobs_at(logits_of(model, s) / 0.7, s))


@on_a_cpu
@pytest.mark.parametrize("shape", [dict(n_layer=1, n_kv_head=1), dict(n_layer=3)], ids=str)
def test_growing_the_cache_changes_nothing(shape):
    """Long and short samples alternate, and prompts waiting in the last row are moved. (With one layer and
    one head a full row is contiguous, which PyTorch refuses to copy within its own tensor.)"""
    model = make(**shape)
    engine, widths = Engine(model, slots=3, sampling=GREEDY), []
    resize, at = engine.runner.cache.resize, engine.runner.cache.storage.data_ptr()
    engine.runner.cache.resize = lambda length, kept=0: (widths.append((length, kept)), resize(length, kept))
    for longest in (8, 50):
        widths.clear()
        for s in engine.generate(requests(5, 4, lambda i: longest - i)):
            assert s.ids == logits_of(model, s).argmax(-1).tolist() and len(s.ids) == longest - s.request.key
        assert widths[0] == (16, 0) and all(a < b and kept == a for (a, _), (b, kept) in zip(widths, widths[1:]))
        assert widths[-1][0] == engine.runner.cache.length < engine.context and engine.runner.cache.k.data_ptr() == at
    assert len(widths) > 2


@pytest.mark.parametrize("dtype, packed_from", [(torch.float32, 2**18), (torch.float32, 0), (torch.bfloat16, 0)],
                         ids=["fp32", "fp32, packed", "bf16"])
def test_deterministic_is_bitwise_in_any_batch(dtype, packed_from, monkeypatch):
    monkeypatch.setattr("layers.packed.PACKED_FROM", packed_from)
    engine = Engine(make(n_head=4, n_kv_head=2, n_embd=64), slots=64, deterministic=True, dtype=dtype)
    shapes, launch = set(), engine.runner.launch
    engine.runner.launch = lambda B, groups, sampling: (shapes.add((B, groups)), launch(B, groups, sampling))

    def run(asked):
        return {s.index: (s.ids, s.logprobs) for s in engine.generate(asked) if s.request.key == 5}
    asked = requests(24, 3, lambda i: 20 if i == 5 else 1 + i)
    alone = run([asked[5]])
    assert len(alone) == 3 and run(asked) == alone and shapes == {(64, ((0, 64, engine.runner.cache.length),))}
    part = Request(asked[5].ids, num_samples=2, first_sample=1, key=5, max_new_tokens=20)
    assert run([part]) == {k: v for k, v in alone.items() if k}


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it():
    plain = first(Engine(make(), slots=1, seed=3), [1, 2], max_new_tokens=40)
    stop = as_text(plain.ids)[20:23]
    end = as_text(plain.ids).index(stop) + 3
    for poll in (1, 8):
        engine = Engine(make(), slots=2, seed=3, sampling=Sampling(stop_strings=("never there", stop)), decode=as_text, poll=poll)
        sample = first(engine, [1, 2], max_new_tokens=40)
        assert sample.ids == plain.ids[:end] and sample.reason == "stop" and len(sample.logprobs) == end
    with pytest.raises(ValueError, match="decode=tokenizer.decode"):
        Engine(make(), sampling=Sampling(stop_strings=("x",)))
    engine, asked = Engine(make(), slots=1), [Request([1, 2], max_new_tokens=2)]
    with pytest.raises(ValueError, match="decode=tokenizer.decode"):
        next(engine.generate(asked, sampling=Sampling(stop_strings=("x",))))
    assert next(engine.generate(asked, sampling=Sampling(stop=(3,)))).ids


def test_a_call_can_override_the_sampling():
    def run(engine, **options):
        return sorted((key, s.ids, s.reason, s.logprobs)
                      for key, s in sampled(engine, requests(6, 2, 25), **options).items())
    default = Sampling(temperature=0.7, stop_strings=("A", "longer than the other"))
    greedy = Sampling(temperature=0, stop=(3, 50), stop_strings=("b", "zz"))
    plain = Sampling(top_k=5)
    alone = {s: run(Engine(make(), slots=12, sampling=s, decode=as_text)) for s in (default, greedy, plain)}
    assert {reason for _, _, reason, _ in alone[default]} == {"stop", "length"}
    assert {as_text(ids[-1:]) for _, ids, *_ in alone[greedy]} == {as_text([50]), "b"}
    engine = Engine(make(), slots=12, sampling=default, decode=as_text)
    for s in (greedy, default, plain, None, greedy):
        assert run(engine, sampling=s) == alone[s or default]
        assert engine.sampling is default
    engine.sampling = plain                                            # for later calls
    assert run(engine) == alone[plain] and run(engine, sampling=default) == alone[default]


def test_each_prompt_is_prefilled_once(monkeypatch):
    computed = []
    plain = ModelRunner.prefill
    monkeypatch.setattr(ModelRunner, "prefill", lambda self, prompts: (computed.extend(prompts), plain(self, prompts)))
    texts = [p + [1] for p in prompts(4)]
    for slots in (1, 3, 16):
        computed.clear()
        assert len(ids_of(Engine(make(), slots=slots), [Request(p, 5, i, 4) for i, p in enumerate(texts)])) == 20
        assert [ids for _, ids in computed] == [p[:-1] for p in texts]


@on_a_gpu
@pytest.mark.parametrize("fails", ["replay", "__init__"])
def test_out_of_memory_in_a_graph_or_its_capture_loses_nothing(monkeypatch, fails):
    """A failing capture raises a CUDA error that does not mention memory."""
    expected, engine = ids_of(Engine(make(), slots=8), requests(5, 4, 12)), Engine(make(), slots=8)
    calls, plain = [], getattr(Recorded, fails)

    def failing(self, *arguments):
        calls.append(self)
        if len(calls) == 3:
            try:
                raise torch.OutOfMemoryError("pretended")
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        plain(self, *arguments)
    monkeypatch.setattr(Recorded, fails, failing)
    assert ids_of(engine, requests(5, 4, 12)) == expected and engine.slots == 4 and max(B for B, _, _ in engine.runner.graphs) == 4


@pytest.fixture
def fused_step(monkeypatch):
    """engine/fused_step.py with PyTorch's functions in place of Triton's kernels, which tests/test_triton.py compares."""
    monkeypatch.setitem(sys.modules, "engine.triton_kernels", kernels_on_cpu)
    monkeypatch.setattr(engine, "triton_kernels", kernels_on_cpu, raising=False)
    monkeypatch.delitem(sys.modules, "engine.fused_step", raising=False)
    monkeypatch.delattr("engine.fused_step", raising=False)
    yield importlib.import_module("engine.fused_step")
    del engine.fused_step, sys.modules["engine.fused_step"]


@on_a_gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_step_equals_the_model(monkeypatch, shape, graphs, fused_step):
    """Also in graphs, with refilled rows and with new weights."""
    old, new = make(**SHAPES[shape]), make(**SHAPES[shape])
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(1.1)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(ModelRunner, "can_fuse", lambda runner: fused)
        engine = Engine(old, slots=6, cuda_graphs=graphs)
        found.append([])
        for model in (old, new):
            engine.load(model)
            found[-1].append(sampled(engine, requests(12, new=lambda i: (7 * i) % 20 + 1)))
        assert bool(graphs) == bool(engine.runner.graphs)
        if graphs:                           # without a mask a step has one shape for any length
            lengths = {groups for _, groups, _ in engine.runner.graphs}
            assert fused == engine.runner.fused == (len(lengths) == len({B for B, *_ in engine.runner.graphs}))
    for plain, fused in zip(*found):
        assert_same(plain, fused)


@on_a_cpu
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_that_compute_something_else_are_noticed(monkeypatch, shape, fused_step):
    config = make(rope_theta=50.0, **SHAPES[shape]).config
    state = torch.get_rng_state()
    assert fused_step.distance(config, torch.device("cpu"), torch.float32) < 1e-5
    assert torch.equal(state, torch.get_rng_state())
    cases = {"no rotation": lambda qkv, cache, positions, rope, norm: kernels_on_cpu.decode_attention(qkv, cache, positions, None, norm),
             "no norm": lambda qkv, cache, positions, rope, norm: kernels_on_cpu.decode_attention(qkv, cache, positions, rope),
             "the first block of keys": lambda qkv, cache, positions, *rest:
                 kernels_on_cpu.decode_attention(qkv, [x[:, :, :64] for x in cache], positions.clamp(max=63), *rest)}
    used = {"no rotation": config.position == "rope", "no norm": config.qk_norm, "the first block of keys": True}
    for case, kernel in cases.items():
        monkeypatch.setattr(fused_step, "kernels", SimpleNamespace(**vars(kernels_on_cpu) | {"decode_attention": kernel}))
        assert (fused_step.distance(config, torch.device("cpu"), torch.float32) > fused_step.TOLERANCE) == used[case], case


@on_a_gpu
def test_free_slots_of_a_graph_read_few_positions(monkeypatch):
    """The slots of samples that have ended, which are refilled later."""
    model, asked = make(), requests(24, new=lambda key: 4 + key)
    engine, launch, free = Engine(model, slots=20, sampling=GREEDY), ModelRunner.launch, []

    def watched(runner, B, *rest):
        launch(runner, B, *rest)
        free.append(runner.state[1, engine.progress.busy:B].tolist())
    monkeypatch.setattr(ModelRunner, "launch", watched)
    found = sampled(engine, asked)
    assert max(map(len, free)) > 2 and max(map(max, filter(None, free))) == engine.runner.poll
    assert {B for B, *_ in engine.runner.graphs} <= {1, 2, 4, 8, 16, 20}
    assert_same(found, sampled(Engine(model, slots=20, sampling=GREEDY, cuda_graphs=False), asked))


@on_a_cpu
def test_the_sizes_of_graphs():
    sizes = {1: 1, 2: 2, 3: 4, 5: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 48, 49: 64, 65: 80, 500: 512}
    assert {n: graph_size(n) for n in sizes} == sizes


@on_a_gpu
def test_the_fused_step_needs_16_bits(monkeypatch, fused_step):
    model = make(n_head=4, n_kv_head=2)
    monkeypatch.setattr(fused_step, "works", lambda config, device, dtype: True)

    def chosen(**options):
        return Engine(model, slots=5, **dict(dtype=torch.bfloat16) | options).runner.fused
    monkeypatch.setattr("engine.runner.find_spec", lambda name: name)
    assert chosen() and not chosen(fused=False)
    assert not chosen(deterministic=True) and not chosen(dtype=torch.float32)
    monkeypatch.setattr("engine.runner.find_spec", lambda name: None)
    assert not chosen()


# operations without a kernel: views, dropout in evaluation and `to` without a conversion
FREE = "view transpose split split_with_sizes slice select expand unsqueeze chunk unbind flatten reshape dropout to".split()


def decode_kernels(n_layer, **options):
    engine = Engine(make(n_layer=n_layer, **options), slots=2)
    list(engine.generate([Request([1, 2, 3], 2, max_new_tokens=2)]))
    names = [function.__name__.split(".")[0] for function, *_ in Recorded.made[-1].operations]
    return len([name for name in names if name not in FREE])


@on_a_gpu
@pytest.mark.parametrize("shape, most", [("default", 19), ("grouped", 20), ("gpt2", 12)])
def test_a_layer_of_a_decoding_step_has_few_kernels(shape, most, monkeypatch):
    """With few rows a step's time is that of its kernel launches. Besides the layers: masks, noise, head,
    draw, positions."""
    monkeypatch.setattr("model.rms_norm", ops.fused_norm)
    monkeypatch.setattr("layers.ops.rms_norm", ops.fused_norm)
    two = decode_kernels(2, **SHAPES[shape])
    three = decode_kernels(3, **SHAPES[shape])
    assert three - two <= most and two - 2 * most <= 32


@on_a_gpu
@pytest.mark.parametrize("shape, most", [("default", 8), ("grouped", 8), ("gpt2", 10)])
def test_a_layer_of_the_fused_step_has_eight_kernels(shape, most, monkeypatch, fused_step):
    monkeypatch.setattr(ModelRunner, "can_fuse", lambda runner: True)
    two = decode_kernels(2, **SHAPES[shape])
    assert decode_kernels(3, **SHAPES[shape]) - two == most and two - 2 * most <= 32


@on_a_cpu
def test_out_of_memory_halves_the_slots_and_loses_nothing(monkeypatch):
    asked, engine, steps = requests(10, 4, 12), Engine(make(), slots=8), []
    expected = ids_of(Engine(make(), slots=8), asked)
    plain_step, plain_prefill = ModelRunner.decode_step, ModelRunner.prefill

    def step(self, B, *arguments):
        steps.append(B)
        if len(steps) == 17:
            raise torch.OutOfMemoryError("pretended")
        plain_step(self, B, *arguments)

    def prefill(self, prompts):
        plain_prefill(self, prompts)
        if len(steps) == 30 and self.slots == 4:
            raise torch.OutOfMemoryError("pretended")
    monkeypatch.setattr(ModelRunner, "decode_step", step)
    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    assert ids_of(engine, asked) == expected and engine.slots == 2 and engine.runner.cache.k.shape[1] == engine.slots + 1
    monkeypatch.setattr(ModelRunner, "decode_step", lambda *arguments: (_ for _ in ()).throw(torch.OutOfMemoryError("pretended")))
    with pytest.raises(torch.OutOfMemoryError):                        # too large even with one slot
        ids_of(engine, asked)


@pytest.mark.parametrize("acting", [None, "cuda"], indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_common_beginning_of_prompts_is_computed_once(shape, acting, monkeypatch):
    model, begin = make(**SHAPES[shape]), prompts(9)[8][:30]
    assert len(begin) == 30
    asked = [Request(begin[:30 if i < 7 else 20] + prompt[:1 + i], 2, i, 12) for i, prompt in enumerate(prompts(12))]
    engine, computed, hidden = Engine(model, slots=6), [], GPT.hidden
    monkeypatch.setattr("engine.runner.MIN_PREFIX", 999)
    expected = sampled(engine, asked)
    monkeypatch.setattr("engine.runner.MIN_PREFIX", 16)
    monkeypatch.setattr(GPT, "hidden", lambda self, x, *more: (computed.append(x.numel() * (x.shape[1] > 1)), hidden(self, x, *more))[1])
    assert_same(sampled(engine, asked), expected)
    assert engine.runner.prefix == begin[:20] and sum(computed) < 0.7 * sum(len(request.ids) for request in asked)
    fresh = Engine(model, slots=6)
    ids_of(fresh, asked[9:])                 # an earlier call, with a shorter beginning, leaves no trace
    assert_same(sampled(fresh, asked[:7]), sampled(Engine(model, slots=6), asked[:7]), tolerance=0)
    with torch.no_grad():
        model.token_embedding.weight.mul_(1.1)
    engine.load(model)
    assert_same(sampled(engine, asked), sampled(Engine(model, slots=6, deterministic=True), asked))
    assert sampled(engine, [Request(begin[:20], 1, 0, 12)])[0, 0].ids == ids_of(Engine(model, slots=1), [Request(begin[:20], 1, 0, 12)])[0, 0]


def test_slots_follow_the_free_memory(monkeypatch):
    model = make()
    each = cache_bytes(model.config, 0, 192, torch.float32)
    assert each == 2 * 2 * 2 * 192 * 16 * 4
    assert Engine(model).slots == 512
    monkeypatch.setattr(memory, "available", lambda device: 20 * each)
    assert 1 <= Engine(model).slots < 20
    monkeypatch.setattr(memory, "available", lambda device: 0)
    assert Engine(model).slots == 1


@on_a_cpu
def test_memory_matches_the_estimate():
    """Measure the growth of the resident set in a separate process."""
    code = """
import torch
import torch.nn.functional as F
from engine import Engine, Request
from engine.kv_cache import cache_bytes
from model import GPT, GPTConfig, on_meta
from runtime import hardware
config = GPTConfig(vocab_size=256, block_size=1024, n_layer=8, n_head=8, n_embd=512, n_kv_head=4)
shape = on_meta(config)
list(Engine(GPT(GPTConfig(vocab_size=256, block_size=64, n_layer=1, n_head=2, n_embd=64)), dtype=torch.bfloat16).generate([Request([1, 2])]))
model, hw = GPT(config), hardware.setup("cpu")
before = hw.memory_gb()[0]
engine = Engine(model, slots=32, dtype=torch.bfloat16)
engine.runner.cache.k.fill_(1), engine.runner.cache.v.fill_(1)
taken = (hw.memory_gb()[0] - before) * 2**30
print(taken / (2 * model.n_params() + cache_bytes(config, 32, 1024, torch.bfloat16)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert 0.9 < float(done.stdout) < 1.1, done.stdout + done.stderr


def test_progress_counts():
    seen = []
    engine = Engine(make(), slots=3, poll=1)
    whole = sampled(engine, requests(4, 2, 5), progress=lambda p: seen.append((p.tokens, p.busy, p.slots, p.samples, p.tokens_per_s, p.in_flight())))
    assert seen[-1][:4] == (40, 0, 3, 8) and len(whole) == 8
    assert all(sum(len(ids) for _, ids in line[5]) + 5 * line[3] == line[0] for line in seen)
    assert all(a[0] <= b[0] and a[3] <= b[3] for a, b in zip(seen, seen[1:])) and all(line[4] > 0 for line in seen)
    assert {line[1] for line in seen} >= {3, 0} and all(len(line[5]) == line[1] for line in seen)
    for line in seen:
        assert all(0 < len(ids) < 5 and whole[s.request.key, s.index].ids[:len(ids)] == ids for s, ids in line[5])


def test_concurrent_generate_calls_are_refused_and_abandoned_ones_leave_no_trace():
    engine, request = Engine(make(), slots=2), Request([1, 2, 3], num_samples=5, key=1, max_new_tokens=8)
    expected = ids_of(engine, [request])
    unfinished = engine.generate(requests(5, new=3))
    next(unfinished)
    assert ids_of(engine, [request]) == expected
    with pytest.raises(RuntimeError, match="took over"):
        list(unfinished)


def test_requests_are_read_only_when_slots_are_free():
    drawn = []
    stream = Engine(make(), slots=4).generate(drawn.append(r.key) or r for r in requests(50, 2, 5))
    next(stream)
    assert drawn == [0, 1]


@pytest.mark.parametrize("request_, words", [
    (Request([]), "prompt of 0 tokens"), (Request([1] * 192), "prompt of 192 tokens"), (Request([5, 100]), "token id 100"),
    (Request([-1]), "token id -1"), (Request([1], key=2**63), "64 bits"), (Request([1], num_samples=0), "num_samples=0"), (Request([1], max_new_tokens=0), "at least 1")])
def test_request_errors_are_one_sentence(request_, words):
    with pytest.raises(ValueError, match=words):
        next(Engine(make(), slots=2).generate([request_]))


def test_invalid_options_are_refused():
    for options in (dict(slots=0), dict(poll=0), dict(context=1)):
        with pytest.raises(ValueError, match="at least"):
            Engine(make(), **options)
    for stop in ("</answer>", ("",)):
        with pytest.raises(ValueError, match="tuple of texts"):
            Sampling(stop_strings=stop)


def test_a_tiny_temperature_is_greedy():
    logits, u = torch.randn(50, 300), torch.rand(50, dtype=torch.float64)
    ids, logprobs = draw(logits, u, Sampling(temperature=1e-46))
    assert torch.equal(ids, logits.argmax(-1)) and (logprobs == 0).all()


def test_top_p_alone_counts_the_mass_of_all_ids(monkeypatch):
    """Ids outside the TOP_P_CANDIDATES count as well, and a CPU keeps them where they are needed."""
    monkeypatch.setattr("engine.sampler.TOP_P_CANDIDATES", 4)
    p = torch.tensor([0.3, 0.2, 0.11, 0.09, *(0.039 - 0.002 * i for i in range(10))])
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    for top_p, allowed in ((0.45, 2), (0.55, 3), (0.69, 4), (0.85, 9), (0.95, 12)):
        ids, logprobs = draw(p.log().expand(999, 14), u, Sampling(top_p=top_p))
        assert ids.unique().tolist() == list(range(allowed))
        torch.testing.assert_close(logprobs, (p[ids] / p[:allowed].sum()).log())
    # rows that need more ids leave the others as they are, bit by bit
    logits = torch.randn(50, 14) * torch.tensor([[0.3], [5.0]]).repeat(25, 1)
    together = draw(logits, u[:50], Sampling(top_p=0.8))
    alone = [draw(logits[i:i + 1], u[i:i + 1], Sampling(top_p=0.8)) for i in range(50)]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, zip(*alone)))
    with pytest.warns(UserWarning, match="top_p keeps at most 4 ids on a GPU"):
        draw(p.log()[None].to("meta"), u[:1].to("meta"), Sampling(top_p=0.5))


def test_the_context_ends_a_sample():
    sample = first(Engine(make(), slots=2), [1] * 190, max_new_tokens=50)
    assert len(sample.ids) == 2 and sample.reason == "length"


def test_load_copies_weights_in_place():
    a, b = make(), make(mlp_hidden=128)
    with torch.no_grad():
        for p in b.parameters():
            p.add_(0.1 * torch.randn_like(p))
    engine, request = Engine(a, slots=2), Request(prompts(1)[0], max_new_tokens=20)
    buffers = [p.data_ptr() for p in (*engine.runner.model.parameters(), engine.runner.cache.k, engine.runner.cache.v)]
    before = next(engine.generate([request]))
    engine.load(torch.compile(b))                                      # never called, so never compiled
    after, fresh = (next(e.generate([request])) for e in (engine, Engine(b, slots=2)))
    assert (after.ids, after.logprobs) == (fresh.ids, fresh.logprobs) and after.ids != before.ids
    engine.load(a)
    assert next(engine.generate([request])).logprobs == before.logprobs
    assert [p.data_ptr() for p in (*engine.runner.model.parameters(), engine.runner.cache.k, engine.runner.cache.v)] == buffers
    running = engine.generate([Request([1, 2], num_samples=3, max_new_tokens=2)])
    next(running)
    engine.load(b)
    with pytest.raises(RuntimeError, match="load"):
        list(running)


def test_adapters_are_merged_and_low_precision_is_the_engines_alone():
    def logprobs(model, **options):
        return first(Engine(model, slots=1, **options), prompts(1)[0], max_new_tokens=20).logprobs

    def loaded(weights):
        other = make()
        other.load_state_dict(weights)
        return other
    model, plain = make(), logprobs(make())
    add_lora(model, 4)
    assert logprobs(model) == plain                                    # B is zero
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.data.normal_()
    assert logprobs(model) == logprobs(loaded(merged(model))) != plain
    rounded = make().bfloat16()
    exact = loaded({name: weight.float() for name, weight in rounded.state_dict().items()})
    assert logprobs(rounded, dtype=torch.float32) == logprobs(exact)


@on_a_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.skipif(not HalfPacked.works("cpu", torch.float32), reason="needs FBGEMM")
def test_weights_in_fp16_are_the_only_thing_that_is_rounded(monkeypatch, shape):
    """A model whose weights fp16 holds, such as a bf16 checkpoint, gives the same ids and log-probabilities."""
    monkeypatch.setattr("layers.packed.HALF_WEIGHTS_FROM", 0)
    model = make(**SHAPES[shape])
    exact = Engine(model, 4, 128)
    half = Engine(model, 4, 128, half_weights=True)
    assert (exact.format, half.format) == ("fp32", "fp32 with fp16 weights") and half.runner.weight_bytes == exact.runner.weight_bytes // 2
    rounded = sampled(half, requests(4, 2))
    first_tokens = [(rounded[key].logprobs[0], sample.logprobs[0]) for key, sample in sampled(exact, requests(4, 2)).items()]
    assert max(abs(a - b) for a, b in first_tokens) > 3e-5
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in model.state_dict().items()})
    for engine in (exact, half):
        engine.load(model)
    halves = sampled(half, requests(4, 2))
    for key, sample in sampled(exact, requests(4, 2)).items():
        assert halves[key].ids == sample.ids
        torch.testing.assert_close(torch.tensor(halves[key].logprobs), torch.tensor(sample.logprobs), rtol=0, atol=1e-5)


@on_a_cpu
@pytest.mark.skipif(not Packed.works("cpu", torch.float32), reason="needs oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_give_the_same_samples(monkeypatch, shape):
    model = make(**SHAPES[shape])
    engines = []
    for least in (2**18, 0, 32 * 32 + 1):
        monkeypatch.setattr("layers.packed.PACKED_FROM", least)
        engines.append(Engine(model, 6))
    packed = [sum(isinstance(module, Packed) for module in engine.runner.model.modules()) for engine in engines]
    assert packed[0] == 0 < packed[2] < packed[1] and not engines[0].runner.head and engines[1].runner.head
    for _ in range(2):
        expected = sampled(engines[0], requests(12))
        for engine in engines[1:]:
            assert_same(sampled(engine, requests(12)), expected)
        model.blocks[0].mlp.up.weight.data *= 1.5
        for engine in engines:
            engine.load(model)


@on_a_cpu
def test_a_small_model_keeps_its_weights_as_they_are():
    assert not Engine(make(), 1, 128, half_weights=True).half_weights


def test_non_finite_weights_are_one_sentence_and_leave_no_trace():
    good, bad, request = make(), make(), Request([1, 2, 3], max_new_tokens=10)
    bad.token_embedding.weight.data[2] = float("nan")
    expected = next(Engine(good, slots=1).generate([request])).ids
    for temperature in (0, 1):
        engine = Engine(bad, slots=1, sampling=Sampling(temperature=temperature))
        with pytest.raises(FloatingPointError, match="not finite"):
            next(engine.generate([request]))
    engine.load(good)
    assert next(engine.generate([request])).ids == expected


def test_a_callers_own_code_is_not_part_of_the_engine():
    """The caller's errors are not caught, and its code runs outside inference mode."""
    def requests():
        assert not torch.is_inference_mode_enabled()
        yield Request(torch.tensor([1, 2]).numpy(), num_samples=2, max_new_tokens=3)
        raise RuntimeError("the reward server is out of memory")
    engine = Engine(make(), slots=8)
    with pytest.raises(RuntimeError, match="reward server"):
        list(engine.generate(requests()))
    assert engine.slots == 8
    list(engine.generate([Request([1], max_new_tokens=2)], progress=lambda p: torch.ones(1, requires_grad=True).sum().backward()))


def test_noise_is_uniform_and_distinct():
    n = torch.arange(200_000)
    u = uniform(stream(1, n % 50, (n // 50) % 40), n // 2000)
    assert 0 < u.min() and u.max() < 1 and len(u.unique()) == len(u)
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150                    # chi-square, 99 degrees of freedom: p = 0.0007
    assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.01


def test_draws_are_the_same_with_and_without_blocks():
    """A large vocabulary is searched in two steps; ids of probability 0 behind the others make it large."""
    torch.manual_seed(0)
    p, u = torch.randn(500, 512).mul(3).softmax(-1), torch.rand(500, dtype=torch.float64)
    p[:, ::3] = 0
    few, many, more = (invert(F.pad(p, (0, n)), u) for n in (0, 1, 128))
    behind = invert(F.pad(p, (188, 0)), u) - 188             # the last 188 ids are less than a block
    assert few.equal(many) and few.equal(more) and few.equal(behind) and (p.gather(1, few[:, None]) > 0).all() and len(few.unique()) > 100


@pytest.mark.parametrize("s", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(min_p=0.2),
                               Sampling(temperature=1.3, top_k=6, top_p=0.8)], ids=str)
def test_frequencies_are_those_of_the_filtered_softmax(s):
    logits = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.0, -3.0, 0.7])
    p = (logits / s.temperature).softmax(0)
    likeliest, order = p.sort(descending=True)
    likeliest[s.top_k or 8:] = 0
    likeliest /= likeliest.sum()
    kept = (likeliest > 0) & (likeliest.cumsum(0) - likeliest < s.top_p) & (likeliest >= s.min_p * likeliest[0])
    allowed = torch.zeros(8, dtype=torch.bool).scatter(0, order, kept)
    p = torch.where(allowed, p, 0) / p[allowed].sum()
    n = 20_000
    u = uniform(torch.zeros(n, dtype=torch.long), torch.arange(n))
    ids, logprobs = draw(logits.expand(n, 8), u, s)
    counts = torch.bincount(ids, minlength=8).double()
    assert counts[~allowed].sum() == 0
    assert ((counts - n * p)[allowed] ** 2 / (n * p[allowed])).sum() < 27      # 7 degrees of freedom: p = 0.0003
    assert torch.allclose(logprobs, p[ids].log(), atol=1e-5)
