"""Episodes: samples that go on behind an environment's text, from the engine to the loss."""
import random

import pytest
import torch

from engine import Engine, Request, Sampling
from engine.kv_cache import KVCache
from test_engine import SHAPES, acting, as_text, assert_near, assert_same, logits_of, logprobs_at, make, prompts, requests, sampled  # noqa: F401

STOP = (3, 50, 7)


class Replies:
    """An environment: answers up to `most` stops of a sample with ids that depend on the sample alone, `late` polls later."""

    def __init__(self, most=3, late=lambda: 0, length=lambda n: 1 + n % 5):
        self.most = most
        self.late = late
        self.length = length
        self.asked = []                      # [polls to wait, Sample, ids or None]
        self.waited = 0

    def ask(self, sample):
        turn = len(sample.forced)
        if turn >= self.most:
            return False
        number = sum(sample.ids) + turn
        ids = [(number + 13 * i) % 100 for i in range(self.length(number))] if number % 7 else None
        self.asked.append([self.late(), sample, ids])
        return True

    def replies(self, wait):
        self.waited += wait
        for waiting in self.asked:
            waiting[0] -= 1
        ready = [a for a in self.asked if a[0] < 0] or self.asked[:wait]
        self.asked = [a for a in self.asked if a not in ready]
        return [(sample, ids) for _, sample, ids in ready]


def own(sample):
    """Return the columns of a sample's own tokens."""
    forced = {i for first, last in sample.forced for i in range(first, last)}
    return [i for i in range(len(sample.ids)) if i not in forced]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_episode_is_the_model_behind_everything_that_was_said(shape):
    """Its own tokens have the logprobs of a full forward pass; forced ones have none; ids, lengths and limits add up."""
    model = make(**SHAPES[shape])
    asked = requests(12, 3, lambda i: 5 + 3 * i)
    done = sampled(Engine(model, slots=7, sampling=Sampling(temperature=0.9, stop=STOP), seed=2), asked, environment=Replies())
    assert len(done) == 36 and max(len(s.forced) for s in done.values()) == 3
    assert sum(s.reason == "length" for s in done.values()) > 3
    for s in done.values():
        mine = own(s)
        logprobs = logprobs_at(logits_of(model, s) / 0.9, s)
        assert_near(torch.tensor(s.logprobs)[mine], logprobs[mine])
        assert all(s.logprobs[i] == 0 for i in range(len(s.ids)) if i not in mine)
        assert mine[-1] == len(s.ids) - 1 and len(mine) <= s.request.max_new_tokens
        assert s.ids[-1] in STOP if s.reason == "stop" else len(mine) == s.request.max_new_tokens
        for first, last in s.forced:
            assert s.ids[first - 1] in STOP and first - 1 in mine
            number = sum(s.ids[:first]) + s.forced.index((first, last))
            assert s.ids[first:last] == [(number + 13 * i) % 100 for i in range(1 + number % 5)]


def test_when_the_environment_answers_and_who_else_runs_changes_no_sample(monkeypatch):
    model, asked = make(), requests(5, 7, lambda i: 8 + 4 * i)
    options = dict(seed=5, sampling=Sampling(stop=STOP))
    expected = sampled(Engine(model, slots=35, poll=1, **options), asked, environment=Replies())
    rng = random.Random(0)
    for slots, poll, late in ((5, 1, lambda: rng.randrange(12)), (5, 3, lambda: 0), (35, 8, lambda: rng.randrange(3)), (1, 2, lambda: 4)):
        monkeypatch.setattr("engine.kv_cache.ROW_GROUP_SIZE", 2)
        monkeypatch.setattr("engine.generate.SORT_EVERY", 3)
        environment = Replies(late=late)
        found = sampled(Engine(model, slots=slots, poll=poll, **options), asked, environment=environment)
        assert_same(found, expected)
        assert all((found[key].reason, found[key].forced) == (s.reason, s.forced) for key, s in expected.items())
        assert not environment.asked and environment.waited >= (slots == 1)


def test_deterministic_episodes_are_bitwise_in_any_batch():
    model, asked = make(n_head=4, n_kv_head=2), requests(4, 5, 20)
    engine = Engine(model, slots=6, seed=3, deterministic=True, sampling=Sampling(stop=STOP))
    together = sampled(engine, asked, environment=Replies(late=lambda: 2))
    alone = {}
    for request in reversed(asked):
        alone |= sampled(engine, [request], environment=Replies())
    assert together.keys() == alone.keys()
    assert all((s.ids, s.logprobs, s.forced) == (alone[key].ids, alone[key].logprobs, alone[key].forced) for key, s in together.items())


def test_replies_of_all_lengths_are_computed_in_one_pass_up_to_the_end_of_the_context(monkeypatch):
    model, asked = make(), requests(8, 3, lambda i: 30 + 17 * i)
    options = dict(most=6, length=lambda n: (20, 30, 80)[n % 3])
    expected = sampled(Engine(model, slots=1, sampling=Sampling(stop=STOP)), asked, environment=Replies(**options))
    plain, passes = KVCache.extend, []
    monkeypatch.setattr(KVCache, "extend", lambda self, slots, at, end: passes.append((len(slots), at, end)) or plain(self, slots, at, end))
    engine = Engine(model, slots=24, sampling=Sampling(stop=STOP))
    assert_same(sampled(engine, asked, environment=Replies(late=lambda: 2, **options)), expected)
    assert max(n for n, *_ in passes) > 2 and sum(n for n, *_ in passes) == sum(len(s.forced) for s in expected.values())
    # attention takes the last key for the last position's
    assert all(at.max() + 1 == at[:, 0].max() + at.shape[1] == end <= engine.context for _, at, end in passes)


def test_a_reply_without_room_ends_the_episode():
    """In a context of 192, a prompt of up to 89: a reply of 60 fits once or twice, and none is cut."""
    done = sampled(Engine(make(), slots=8, sampling=Sampling(stop=STOP)), requests(9, 3, 130),
                   environment=Replies(most=9, length=lambda n: 60)).values()
    assert {len(s.forced) for s in done} >= {0, 1, 2}
    for s in done:
        n = len(s.request.ids) + len(s.ids)
        assert n <= 192 and all(last - first == 60 for first, last in s.forced)
        if s.reason == "reply":
            assert s.ids[-1] in STOP and (n + 60 >= 192 or sum(last - first for first, last in s.forced) + 60 > 130)
        else:
            assert s.ids[-1] in STOP if s.reason == "stop" else len(own(s)) == 130 or n == 192
    assert {s.reason for s in done} == {"stop", "length", "reply"}
    few = sampled(Engine(make(), slots=8, sampling=Sampling(stop=STOP)), requests(9, 3, 20), environment=Replies(most=9, length=lambda n: 9)).values()
    assert max(len(s.forced) for s in few) == 2              # of 20 tokens at most
    with pytest.raises(ValueError, match="can't go on behind the text of an environment"):
        next(Engine(make(mixer="linear")).generate([Request([1])], environment=Replies()))


def test_a_stop_string_is_looked_for_in_the_turn_alone():
    """After a reply the earlier stop string still lies among the last ids, and must not end the next turn at its first token."""
    model = make()
    plain = Engine(model, slots=3, decode=as_text, sampling=Sampling(stop_strings=("!", "#")))
    done = sampled(plain, requests(6, 4, 60), environment=Replies(length=lambda n: 2))
    turns = [last - first for s in done.values() for (_, first), (last, _) in zip([(0, 0), *s.forced], [*s.forced, (len(s.ids), 0)])]
    assert sum(turns) / len(turns) > 10 and any(len(s.forced) == 3 for s in done.values())


def test_out_of_memory_starts_the_episodes_in_flight_again(monkeypatch):
    asked, options = requests(6, 4, 25), dict(slots=8, sampling=Sampling(stop=STOP))
    expected = sampled(Engine(make(), **options), asked, environment=Replies())
    plain, calls = KVCache.extend, []

    def extend(self, *arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("pretended")
        return plain(self, *arguments)
    monkeypatch.setattr(KVCache, "extend", extend)
    engine = Engine(make(), **options)
    assert_same(sampled(engine, asked, environment=Replies(late=lambda: 3)), expected)
    assert engine.slots == 4
