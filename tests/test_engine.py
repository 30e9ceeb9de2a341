"""The engine's text is that of the plain model, whoever else is in the batch."""
import pytest
import torch

from engine import Engine, Request, Sampling, draw, uniform
from model import GPT, GPTConfig

SHAPES = {"default": {}, "grouped": dict(n_head=4, n_kv_head=2, mlp="swiglu", tied_head=True),
          "gpt2": dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True)}


def make(**knobs):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(vocab_size=100, block_size=192, n_layer=2, n_head=2, n_embd=32) | knobs))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def prompts(n):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(100, (int(torch.randint(1, 90, (1,), generator=g)),), generator=g).tolist() for _ in range(n)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_from_a_ragged_refilled_batch_equals_one_by_one_without_a_cache(shape):
    model = make(**SHAPES[shape])
    lengths = [(7 * i) % 40 + 1 for i in range(20)]
    engine = Engine(model, slots=6, sampling=Sampling(temperature=0))
    done = list(engine.generate(Request(p, key=i, max_new_tokens=n) for i, (p, n) in enumerate(zip(prompts(20), lengths))))
    assert sorted(s.request.key for s in done) == list(range(20))
    for s in done:
        x = torch.tensor([s.request.ids])
        assert s.ids == model.generate(x, len(s.ids), temperature=0)[0, x.shape[1]:].tolist()
        assert len(s.ids) == s.request.max_new_tokens and s.reason == "length"


def test_log_probabilities_are_those_of_a_full_forward_pass_and_stops_end_a_sample():
    model = make()
    engine = Engine(model, slots=5, sampling=Sampling(temperature=0.7, stop=(3, 50)))
    done = list(engine.generate(Request(p, num_samples=3, key=i, max_new_tokens=4) for i, p in enumerate(prompts(6))))
    assert len(done) == 18 and {s.reason for s in done} == {"stop", "length"}
    for s in done:
        assert (s.ids[-1] in (3, 50)) == (s.reason == "stop") and not {3, 50} & set(s.ids[:-1])
        x = torch.tensor([s.request.ids + s.ids])
        with torch.no_grad():
            logprobs = (model(x)[0, len(s.request.ids) - 1:-1] / 0.7).log_softmax(-1)
        assert torch.allclose(logprobs.gather(1, torch.tensor(s.ids)[:, None])[:, 0], torch.tensor(s.logprobs), atol=1e-5)


def test_a_sample_does_not_depend_on_the_batch_around_it():
    model, texts = make(), prompts(12)
    together = {(s.request.key, s.index): s.ids for s in Engine(model, slots=16, seed=5).generate(
        Request(p, num_samples=4, key=i, max_new_tokens=20) for i, p in enumerate(texts))}
    assert len(together) == 48 and len({tuple(v[:3]) for v in together.values()}) > 40
    for i in (0, 7):
        alone = Engine(model, slots=1, seed=5).generate([Request(texts[i], num_samples=4, key=i, max_new_tokens=20)])
        assert {(i, s.index): s.ids for s in alone} == {k: v for k, v in together.items() if k[0] == i}
    other = next(Engine(model, slots=1, seed=6).generate([Request(texts[0], key=0, max_new_tokens=20)]))
    assert other.ids != together[0, 0]


def test_requests_are_drawn_no_sooner_than_slots_are_free():
    drawn = []

    def requests():
        for i, p in enumerate(prompts(50)):
            drawn.append(i)
            yield Request(p, num_samples=2, key=i, max_new_tokens=5)
    stream = Engine(make(), slots=4).generate(requests())
    next(stream)
    assert drawn == [0, 1]


@pytest.mark.parametrize("request_, words", [
    (Request([]), "prompt of 0 tokens"), (Request([1] * 192), "prompt of 192 tokens"), (Request([5, 100]), "token id 100"),
    (Request([-1]), "token id -1"), (Request([1], num_samples=0), "num_samples=0"), (Request([1], max_new_tokens=0), "at least 1")])
def test_what_can_not_be_sampled_is_one_sentence(request_, words):
    with pytest.raises(ValueError, match=words):
        next(Engine(make(), slots=2).generate([request_]))


@pytest.mark.parametrize("knobs", [dict(temperature=-1), dict(top_p=0.0), dict(top_k=0), dict(min_p=2.0)], ids=str)
def test_filters_out_of_range_are_refused(knobs):
    with pytest.raises(ValueError, match="can't be sampled from"):
        Sampling(**knobs)


def test_the_context_ends_a_sample():
    sample = next(Engine(make(), slots=2).generate([Request([1] * 190, max_new_tokens=50)]))
    assert len(sample.ids) == 2 and sample.reason == "length"


def test_new_weights_are_taken_over_in_place():
    a, b = make(), make(mlp_hidden=128)
    with torch.no_grad():
        for p in b.parameters():
            p.mul_(1.1)
    engine, request = Engine(a, slots=2, sampling=Sampling(temperature=0)), Request(prompts(1)[0], max_new_tokens=20)
    before = next(engine.generate([request])).ids
    engine.load(b)
    assert next(engine.generate([request])).ids == next(Engine(b, sampling=Sampling(temperature=0)).generate([request])).ids
    engine.load(a)
    assert next(engine.generate([request])).ids == before


def test_noise_is_uniform_and_distinct():
    n = torch.arange(200_000)
    u = uniform(1, n % 50, (n // 50) % 40, n // 2000)
    assert 0 < u.min() and u.max() < 1 and len(u.unique()) == len(u)
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150                    # chi-square, 99 degrees of freedom: p = 0.0007
    assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.01


@pytest.mark.parametrize("s", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(min_p=0.2),
                               Sampling(temperature=1.3, top_k=6, top_p=0.8)], ids=str)
def test_frequencies_are_those_of_the_filtered_softmax(s):
    logits = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.0, -3.0, 0.7])
    p = (logits / s.temperature).softmax(0)
    order = p.argsort(descending=True)
    allowed = torch.zeros(8, dtype=torch.bool)
    top = order[:s.top_k] if s.top_k else order
    q = p[top] / p[top].sum()
    for i, share in zip(top.tolist(), q.tolist()):
        if s.min_p and p[i] < s.min_p * p.max():
            break
        allowed[i] = True
        if s.top_p < 1 and q[:len(allowed.nonzero())].sum() >= s.top_p:
            break
    p = torch.where(allowed, p, 0) / p[allowed].sum()
    n = 20_000
    u = uniform(0, torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long), torch.arange(n))
    ids, logprobs = draw(logits.expand(n, 8), u, s)
    counts = torch.bincount(ids, minlength=8).double()
    assert counts[~allowed].sum() == 0
    assert ((counts - n * p)[allowed] ** 2 / (n * p[allowed])).sum() < 27      # 7 degrees of freedom: p = 0.0003
    assert torch.allclose(logprobs, p[ids].log(), atol=1e-5)
