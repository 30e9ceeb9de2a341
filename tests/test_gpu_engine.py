"""The engine gives the same samples on a GPU as on a CPU: with and without graphs, refilled, with new
weights, out of memory."""
import pytest
import torch

from engine import Engine, Request, Sampling
from engine.runner import ModelRunner
from recorded import Recorded
from test_engine import GREEDY, SHAPES, assert_same, logits_of, logprobs_at, make, prompts, requests, sampled
from test_episodes import STOP, Replies

pytestmark = pytest.mark.gpu
ASKED = requests(8, 2, lambda key: 3 + 5 * key)         # more samples than slots, of unequal lengths


@pytest.fixture(autouse=True)
def acting(card, monkeypatch):
    """If the CPU stands in for a GPU, take a GPU's branches with recorded graphs."""
    if card.type == "cpu":
        monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", "cuda")
        monkeypatch.setattr("engine.runner.CUDAGraph", Recorded)


def on(card, **options):
    return make(**options).to(card)


def samples_of(engine, asked=ASKED):
    return sampled(engine, asked)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_refilled_batch_equals_the_cpu(shape, graphs, card, monkeypatch):
    engine = Engine(on(card, **SHAPES[shape]), slots=5, sampling=GREEDY, cuda_graphs=graphs)
    found = samples_of(engine)
    assert bool(engine.runner.graphs) == graphs
    monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", None)
    assert_same(found, samples_of(Engine(make(**SHAPES[shape]), slots=5, sampling=GREEDY)), 1e-4)


def test_graphs_change_no_draw(card):
    """Cover sampling at a temperature, and a stop."""
    sampling = Sampling(temperature=0.9, top_p=0.95, stop=(3, 50))
    graphs, eager = (samples_of(Engine(on(card), slots=5, sampling=sampling, cuda_graphs=flag)) for flag in (True, False))
    assert_same(graphs, eager, 1e-4)


def test_existing_graphs_read_new_weights(card):
    old, new = on(card), on(card)
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(1.5)
    engine = Engine(old, slots=5, sampling=GREEDY)
    before = samples_of(engine)
    graphs = dict(engine.runner.graphs)
    engine.load(new)
    after = samples_of(engine)
    assert graphs and all(engine.runner.graphs[key] is graph for key, graph in graphs.items())
    assert_same(after, samples_of(Engine(new, slots=5, sampling=GREEDY)), 1e-4)
    assert [s.ids for s in after.values()] != [s.ids for s in before.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_deterministic_is_bitwise_in_any_batch(dtype, card):
    engine = Engine(on(card, n_head=4, n_kv_head=2), slots=4, dtype=dtype, deterministic=True)
    together = samples_of(engine)
    for request in ASKED:
        alone = samples_of(engine, [request])
        assert_same(alone, {key: together[key] for key in alone}, 0)


@pytest.mark.parametrize("shape", ["default", "grouped"])
@pytest.mark.parametrize("dtype, fused", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
                         ids=["fp32", "bf16", "bf16 fused"])
def test_logprobs_equal_training(dtype, fused, shape, card, record_property):
    """In bf16 compare means: a single logprob is sometimes off by 0.1."""
    model = on(card, **SHAPES[shape] | dict(n_embd=128))
    engine = Engine(model, 5, dtype=dtype, fused=fused)
    if fused and not engine.runner.fused:
        pytest.skip("Triton does not run here")
    differences = []
    for sample in samples_of(engine).values():
        with torch.autocast(card.type, dtype, enabled=dtype != torch.float32):
            logits = logits_of(model, sample)
        differences.append((torch.tensor(sample.logprobs) - logprobs_at(logits, sample).cpu()).abs())
    differences = torch.cat(differences)
    record_property("error", differences.mean().item())
    assert differences.mean() < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_common_beginning_is_computed_once(card, monkeypatch):
    """A system message, or worked examples."""
    beginning = [(7 * i) % 100 for i in range(40)]
    asked = [Request(beginning + p[:60], 2, i, 10) for i, p in enumerate(prompts(6))]
    engine = Engine(on(card), slots=12, sampling=GREEDY)
    found = samples_of(engine, asked)
    assert engine.runner.prefix == beginning
    monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", None)
    assert_same(found, samples_of(Engine(make(), slots=12, sampling=GREEDY, deterministic=True), asked), 1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_episodes_equal_the_cpu(shape, card, monkeypatch):
    """Samples that go on behind replies of several lengths, some of which come later."""
    sampling = Sampling(stop=STOP)
    late = iter(range(10**6))
    found = sampled(Engine(on(card, **SHAPES[shape]), slots=5, sampling=sampling), ASKED, environment=Replies(late=lambda: next(late) % 4))
    monkeypatch.setattr("engine.runner.DEVICE_TYPE_OVERRIDE", None)
    expected = sampled(Engine(make(**SHAPES[shape]), slots=5, sampling=sampling), ASKED, environment=Replies())
    assert_same(found, expected, 1e-4)
    assert any(s.forced for s in found.values()) and all(found[key].forced == s.forced for key, s in expected.items())


@pytest.mark.parametrize("where", ["prefill", "eager step", "first run", "capture", "later capture"])
def test_out_of_memory_halves_the_slots(where, card, monkeypatch):
    """One call of a method fails; with graphs a step is called once to initialise libraries and once for the
    capture."""
    method, number = {"prefill": ("prefill", 2), "eager step": ("decode_step", 9), "first run": ("decode_step", 1),
                      "capture": ("decode_step", 2), "later capture": ("decode_step", 4)}[where]
    graphs = where != "eager step"
    expected = samples_of(Engine(on(card), slots=8, cuda_graphs=graphs))
    engine = Engine(on(card), slots=8, cuda_graphs=graphs)
    plain = getattr(ModelRunner, method)
    calls = []

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise torch.OutOfMemoryError("pretended")
        return plain(self, *arguments)
    monkeypatch.setattr(ModelRunner, method, failing)
    found = samples_of(engine)
    assert len(calls) > number and engine.slots == 4
    assert_same(found, expected, 1e-4)


def test_a_cache_that_is_too_large_gets_half_the_slots(card):
    """Here the allocator itself runs out of memory."""
    if card.type != "cuda":
        pytest.skip("only CUDA's allocator can be given a limit")
    model = on(card)
    expected = samples_of(Engine(model, slots=8, sampling=GREEDY))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(card).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(card) + 2**27) / total, card)
    try:
        engine = Engine(model, slots=2**13, sampling=GREEDY)           # the cache alone takes 800 MB
        assert 8 <= engine.slots < 2**13
        assert_same(samples_of(engine), expected, 1e-4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card)
