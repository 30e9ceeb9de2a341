"""grpo.py: the objective against numbers by hand, what is trained on, and runs that can be stopped, repeated and shared by ranks."""
import dataclasses
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import forked
import grpo
import hub
import tasks
import train
from conftest import ROOT, environment, failure, flags, in_process, largest_difference, metrics, trained, unknown, wait_for, weights
from engine import Engine, Request, Sample
from layers.logprobs import chunk_logprobs
from model import GPT, GPTConfig, IGNORE
from rollouts import fit, records, pipeline as rollout, questions
from rollouts.batch import micro_batches, padded
from rollouts.pipeline import Completion
from runtime import checkpoint, config, optim
from runtime.config import BadInput
from text.provenance import check_task, own_task, prompt_form
from tasks import _pool as rewards
from tasks._pool import Grade
from test_model import GPT2, LLAMA, QWEN, ids, tiny
from text.tokenizer import Tokenizer

NAN, INF = float("nan"), float("inf")

# A completion is worth its share of the letter t; it ends at the first a, which about half of them reach in time.
TASK = '''
STOP = "a"
PROMPT = "{}"

def questions(split, seed=0, n=None):
    words = [f"{w} {i}" for i in range(12) for w in ("the", "cat", "sat")]
    return [{"question": w, "answer": "t"} for w in (words if split == "train" else [f"mat {i}" for i in range(6)])][:n]

def reward(question, completion):
    share = completion.count("t") / max(1, len(completion))
    return share, {"many": share > 0.2, "ended": completion.endswith("a")}
'''
GRPO = dict(prompts_per_step=4, k_samples=4, max_new_tokens=12, max_steps=4, learning_rate=3e-3, warmup_steps=0, dtype="fp32",
            reward_pool="serial", eval_interval=0, keep_memory=False, tokens_per_micro_batch=1024)


# --- runs ---

@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "base"
    trained(folder, text, max_steps=20, learning_rate=0.02, dtype="fp32")
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return write(tmp_path_factory.mktemp("task"), TASK)


def write(folder, text, name="letters.py"):
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def learn(base, letters, tmp_path):
    """A run in this process, which saves the seconds that importing torch takes. Returns its folder; what it said is in `learn.said`."""
    def learn(name="run", code=0, argv=None, **knobs):
        argv = argv or flags(**GRPO | dict(init_from=base, task=letters, out_dir=tmp_path / name) | knobs)
        learn.said, learn.error = in_process(grpo.main, argv, code)
        return tmp_path / name
    return learn


def command(out_dir, base, task, **knobs):
    return [sys.executable, str(ROOT / "grpo.py"), *flags(**GRPO | dict(init_from=base, task=task, out_dir=out_dir) | knobs)]


def lines(out_dir):
    """The lines of metrics.jsonl that belong to steps of training."""
    return [line for line in map(json.loads, (Path(out_dir) / "metrics.jsonl").read_text().splitlines()) if "reward" in line]


def same(a, b):
    return largest_difference(a, b) == 0


def gradient(out_dir, step=1):
    """Of a run's one step without clipping, as AdamW's first moment holds it."""
    moments = moments_of(out_dir, step)
    return torch.cat([moments[name].flatten() for name in sorted(moments) if name.endswith(".exp_avg")]) / (1 - grpo.Config.beta1)


def moments_of(out_dir, step):
    return load_file(checkpoint.step_folder(out_dir, step) / "optimizer.safetensors")


def apart(a, b):
    """How far two vectors are from each other, as a share of the longer."""
    return ((a - b).norm() / max(a.norm(), b.norm())).item()


@pytest.fixture
def watched(monkeypatch):
    """What the runs of a test hand from one part to another: samples of the engine, groups of each optimizer step, padded batches."""
    seen = SimpleNamespace(samples=[], groups=[], batches=[])
    generate, step, pad = Engine.generate, grpo.learn, grpo.padded

    def spied(self, requests, *rest):
        for sample in generate(self, requests, *rest):
            seen.samples.append(sample)
            yield sample

    def stepped(cfg, run, model, groups, *rest):
        seen.groups.append(groups)
        return step(cfg, run, model, groups, *rest)

    def padding(rollouts, multiple):
        seen.batches.append(pad(rollouts, multiple))
        return seen.batches[-1]
    monkeypatch.setattr(Engine, "generate", spied)
    monkeypatch.setattr(grpo, "learn", stepped)
    monkeypatch.setattr(grpo, "padded", padding)
    return seen


# --- the objective ---

LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "cispo")
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, -1.0]])
RATIO = torch.tensor([[1.0, 1.5, 0.5], [0.7, 1.3, 9.0]])
ADVANTAGE, MASK = torch.tensor([1.0, -2.0]), torch.tensor([[1, 1, 1], [1, 1, 0]])


def loss_of(logp, old_logp, ref_logp, advantage, mask, denominator=1.0, sampled_logp=None, **options):
    return grpo.grpo_loss(logp, old_logp, ref_logp, advantage, mask, grpo.Config(**options), denominator, sampled_logp)


def by_hand(loss_type, **options):
    logp = (OLD + RATIO.log()).requires_grad_()
    divisor = grpo.loss_denominator(loss_type, 5, 2, 4)
    options = dict(ref_logp=None) | {k: logp.detach() + v if k == "ref_logp" else OLD - v if k == "sampled_logp" else v for k, v in options.items()}
    loss, figures = loss_of(logp, OLD, options.pop("ref_logp"), ADVANTAGE, MASK, divisor, loss_type=loss_type, **options)
    loss.backward()
    return loss.item(), logp.grad, {k: v.item() for k, v in figures.items()}


@pytest.mark.parametrize("loss_type, loss, divisors", [
    ("dapo", (-1 - 1.28 - 0.5 + 1.6 + 2.6) / 5, (5, 5)), ("grpo", ((-1 - 1.28 - 0.5) / 3 + (1.6 + 2.6) / 2) / 2, (6, 4)),
    ("dr_grpo", (-1 - 1.28 - 0.5 + 1.6 + 2.6) / 8, (8, 8))])
def test_the_loss_is_what_one_computes_by_hand(loss_type, loss, divisors):
    """Ratios count up to 1.28 where the advantage is positive, down to 0.8 where it is negative, and without a limit on the other side."""
    found, slope, figures = by_hand(loss_type)
    assert found == pytest.approx(loss, rel=1e-6) and figures["clipped"] == 2 and figures["kl"] == 0
    expected = torch.tensor([[-1.0, 0, -0.5], [0, 2.6, 0]]) / torch.tensor(divisors)[:, None]
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-7)
    assert figures["kl_old"] == pytest.approx(sum(r - 1 - math.log(r) for r in (1.0, 1.5, 0.5, 0.7, 1.3)), rel=1e-5)
    swapped, _, figures = by_hand(loss_type, clip_low=0.6, clip_high=0.2)
    assert figures["clipped"] == 1 and swapped == pytest.approx({
        "dapo": (-1 - 1.2 - 0.5 + 1.4 + 2.6) / 5, "grpo": (-2.7 / 3 + 4.0 / 2) / 2, "dr_grpo": 1.3 / 8}[loss_type], rel=1e-5)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    _, slope, figures = by_hand("cispo", clip_high=0.28)
    weights = torch.tensor([[1.0, 1.28, 0.5], [0.7, 1.28, 0]])                # of ratios 1, 1.5, 0.5, 0.7, 1.3
    torch.testing.assert_close(slope, -weights * ADVANTAGE[:, None] * MASK / 5, rtol=1e-6, atol=1e-7)
    assert figures["clipped"] == 2


def test_the_divergence_and_importance_weights_are_what_one_computes_by_hand():
    """k3 of a ratio of 2 between reference and policy, at a token that has become 1.5 times as likely."""
    plain, toward = by_hand("dapo")[0], torch.zeros(2, 3)
    toward[0, 1], k3 = math.log(2), 2 - 1 - math.log(2)
    loss, slope, figures = by_hand("dapo", ref_logp=toward, beta=0.1)
    assert loss == pytest.approx(plain + 0.1 * 1.5 * k3 / 5, rel=1e-6) and figures["kl"] == pytest.approx(k3, rel=1e-5)
    assert slope[0, 1].item() == pytest.approx(0.1 * 1.5 * (k3 + 1 - 2) / 5, rel=1e-5)        # d(ratio k3) = ratio (k3 + dk3)
    assert by_hand("dapo", ref_logp=toward)[0] == plain
    over = torch.tensor([[math.log(3), 0, math.log(0.5)], [0, math.log(1.5), 0]])
    assert by_hand("dapo", sampled_logp=over, tis_cap=2.0)[0] == pytest.approx((-2 - 1.28 - 0.25 + 1.6 + 1.5 * 2.6) / 5, rel=1e-6)
    assert by_hand("dapo", sampled_logp=over)[0] == plain
    both = by_hand("dapo", sampled_logp=over, tis_cap=2.0, ref_logp=toward, beta=0.1)[0]
    assert both == pytest.approx((-2 - 1.28 - 0.25 + 1.6 + 1.5 * 2.6 + 0.15 * k3) / 5, rel=1e-6)


def plainly(logp, old, ref, advantage, lengths, loss_type, low, high, beta, sampled, cap, max_new_tokens):
    """The objective in float64, a token at a time."""
    rows = []
    for b, n in enumerate(lengths):
        row = []
        for t in range(n):
            ratio, a = torch.exp(logp[b, t] - old[b, t]), advantage[b]
            capped = torch.clamp(ratio, max=1 + high) if a > 0 else torch.clamp(ratio, min=1 - low)
            token = -capped * a
            if loss_type == "cispo":
                token = -torch.clamp(ratio.detach(), max=1 + high) * a * logp[b, t]
            if cap:
                token = token * min(cap, math.exp(old[b, t] - sampled[b, t]))
            if beta:
                back = torch.exp(ref[b, t] - logp[b, t])
                token = token + beta * ratio * (back - 1 - torch.log(back))
            row.append(token)
        rows.append(row)
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * max_new_tokens if loss_type == "dr_grpo" else sum(lengths))


@pytest.mark.parametrize("loss_type, beta, cap, seed", [(*kind, seed) for seed, kind in enumerate(itertools.product(LOSS_TYPES, (0.0, 0.3), (0.0, 1.1)))])
def test_loss_and_gradient_equal_those_of_the_formula_in_float64(loss_type, beta, cap, seed):
    g, (B, T), lengths = torch.Generator().manual_seed(seed), (5, 9), [9, 1, 4, 7, 2]
    old, sampled, ref, logp = (-1 - 2 * torch.rand(B, T, generator=g, dtype=torch.float64) for _ in range(4))
    sampled, ref, logp = (old + 0.6 * (x - x.mean()) for x in (sampled, ref, logp))
    advantage = torch.randn(B, generator=g, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    expected = plainly(a := logp.clone().requires_grad_(), old, ref, advantage, lengths, loss_type, 0.15, 0.25, beta, sampled, cap, 11)
    expected.backward()
    b = logp.float().requires_grad_()
    parts, clipped = [], 0                   # in two micro-batches, divided by the number of the whole
    for rows in (slice(0, 2), slice(2, B)):
        loss, figures = loss_of(b[rows], old.float()[rows], ref.float()[rows] if beta else None, advantage[rows], mask[rows],
                                grpo.loss_denominator(loss_type, sum(lengths), B, 11), sampled.float()[rows], clip_low=0.15, clip_high=0.25,
                                beta=beta, loss_type=loss_type, tis_cap=cap)
        loss.backward()
        parts.append(loss.item())
        clipped += figures["clipped"]
    assert sum(parts) == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(b.grad.double(), a.grad, rtol=1e-4, atol=1e-6)
    assert 0 < clipped < sum(lengths)


def test_the_expected_gradient_of_the_divergence_is_that_of_the_true_one():
    """Over all tokens of a small vocabulary, weighted with the policy that samples them."""
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(7, generator=g).requires_grad_(), torch.randn(7, generator=g).log_softmax(0)

    def slope(of):
        return torch.autograd.grad(of(logits.log_softmax(0)), logits)[0]

    def of_loss(logp):
        one = torch.ones(1, 1)
        return sum(p * loss_of(logp[i].view(1, 1), logp[i].detach().view(1, 1), ref[i].view(1, 1), torch.zeros(1), one, beta=1.0)[0]
                   for i, p in enumerate(logp.exp().tolist()))
    true = slope(lambda logp: (logp.exp() * (logp - ref)).sum())
    without_ratio = slope(lambda logp: (logp.exp().detach() * ((ref - logp).exp() - (ref - logp) - 1)).sum())
    k1 = slope(lambda logp: (logp.exp().detach() * (logp - ref)).sum())
    assert apart(slope(of_loss), true) < 1e-6
    assert apart(without_ratio, true) > 0.1 and k1.norm() < 1e-6


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_stands_at_masked_positions_has_no_effect(loss_type, bad):
    g = torch.Generator().manual_seed(0)
    values, mask = -torch.rand(4, 3, 6, generator=g), torch.rand(3, 6, generator=g) < 0.6
    mask[1] = False                          # a whole sequence, too
    results = []
    for filling in (0.0, bad):
        logp, old, ref, sampled = torch.where(mask, values, filling)
        logp.requires_grad_()
        advantage = torch.tensor([1.0, -1.0, 0.5])
        loss, figures = loss_of(logp, old, ref, advantage, mask, 7.0, beta=0.2, loss_type=loss_type, sampled_logp=sampled, tis_cap=2.0)
        loss.backward()
        results.append((loss, logp.grad, *figures.values()))
    for clean, spoiled in zip(*results):
        assert spoiled.isfinite().all() and torch.equal(clean, spoiled)
    assert (results[0][1][~mask] == 0).all() and results[0][1].any()


@pytest.mark.parametrize("filling", [-1.0, NAN, INF])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_micro_batch_without_a_target_gives_nothing(loss_type, filling):
    logp = torch.full((2, 3), filling, requires_grad=True)
    nothing = torch.zeros(2, 3)
    loss, figures = loss_of(logp, nothing, nothing, torch.ones(2), nothing, 5.0, beta=0.1, loss_type=loss_type, sampled_logp=nothing, tis_cap=2.0)
    loss.backward()
    assert loss == 0 and not logp.grad.any() and not any(figures.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("far", list(itertools.product((-100.0, 0.0, 100.0), repeat=3)), ids=str)
def test_huge_ratios_stay_finite(far, advantage):
    logp = torch.full((1, 2), -200.0, requires_grad=True)
    old, ref, sampled = (logp.detach() + by for by in far)
    loss, figures = loss_of(logp, old, ref, torch.tensor([advantage]), torch.ones(1, 2), beta=0.1, sampled_logp=sampled, tis_cap=2.0)
    loss.backward()
    assert all(x.isfinite().all() for x in (loss, logp.grad, *figures.values()))


# --- advantages ---

@pytest.mark.parametrize("scale", ["none", "group"])
def test_a_completion_without_a_grade_has_no_part_in_its_group(scale):
    rewards = torch.tensor([[1.0, 1, 1, math.nan], [1, 0, math.nan, 0.5], [math.nan, math.nan, math.nan, 0.3], [math.nan] * 4])
    found = grpo.advantages(rewards, scale)
    assert not found[[0, 2, 3]].any() and found[1, 2] == 0
    torch.testing.assert_close(found[1, [0, 1, 3]], grpo.advantages(torch.tensor([[1, 0, 0.5]]), scale)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_have_mean_zero_and_stay_in_their_group(scale):
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[2], rewards[3] = 0.1 + 0.2, 1 / 3
    found = grpo.advantages(rewards, scale)
    assert found.dtype == torch.float64 and found.sum(1).abs().max() < 1e-12
    assert not found[2:4].any()              # exactly, though the mean of five 0.3s is not 0.3
    other = rewards.clone()
    other[0] = torch.tensor([0.0, 1, 0, 1, 1])
    assert torch.equal(grpo.advantages(other, scale)[1:], found[1:])
    alone = torch.cat([grpo.advantages(row[None], scale) for row in rewards])
    torch.testing.assert_close(alone, found, rtol=1e-12, atol=1e-12)
    spread = found.std(1, correction=0)[[0, 1, 4, 5]]
    expected = torch.ones(4, dtype=torch.float64) if scale == "group" else rewards.std(1, correction=0)[[0, 1, 4, 5]]
    torch.testing.assert_close(spread, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("value", [0.1 + 0.2, 0.1, 1 / 3, 1e-30, 0.7 * 3, -0.1, 0.0])
@pytest.mark.parametrize("k", [1, 2, 3, 7, 16])
def test_a_group_that_fares_alike_and_a_group_of_one_have_none(scale, value, k):
    assert grpo.advantages(torch.full((2, k), value), scale).tolist() == [[0.0] * k] * 2


# --- log-probabilities ---

KINDS = {"default": {}, "gpt2": GPT2, "llama": LLAMA, "qwen with a softcap": QWEN}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_logprobs_are_those_of_the_targets_at_the_temperature(kind, temperature):
    model, x, y = tiny(trained=True, **kind), ids(), ids(seed=2)
    model.head_weight.data[100:] = 1e3       # padding ids, which no probability may leak to
    y[0, :9], y[2, 5:] = IGNORE, IGNORE
    logp, entropy = model.token_logprobs(x, y, temperature)
    logits = model(x)
    whole = (logits / temperature).log_softmax(-1)
    expected = torch.where(y == IGNORE, 0.0, whole.gather(-1, y.clamp(min=0)[..., None])[..., 0])
    assert logp.dtype == torch.float32 and logits.shape[-1] == 100
    torch.testing.assert_close(logp, expected, rtol=0, atol=2e-6)
    assert (logp[y == IGNORE] == 0).all() and (entropy[y == IGNORE] == 0).all()
    truth = torch.where(y == IGNORE, 0.0, torch.distributions.Categorical(logits=logits / temperature).entropy())
    torch.testing.assert_close(entropy, truth, rtol=0, atol=2e-6)
    a, b = torch.rand(2, *y.shape)
    parameters = list(model.parameters())
    for ours, of_autograd in ((a * logp, a * expected), (b * entropy, b * truth), (a * logp + b * entropy, a * expected + b * truth)):
        for gradient, exact in zip(*(torch.autograd.grad(of.sum(), parameters, retain_graph=True) for of in (ours, of_autograd))):
            torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5 * max(1.0, exact.abs().max().item()))


@pytest.mark.parametrize("rows", [1, 7, 31])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_logprobs_in_chunks_are_the_same_and_so_is_their_gradient(kind, rows):
    x, y, results = ids(), ids(seed=2), []
    y[1, 3:11] = IGNORE
    weight = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))
    for at_a_time in (10**6, rows):
        model = tiny(trained=True, **kind)
        model.rows_per_chunk = lambda device: at_a_time
        logp, entropy = model.token_logprobs(x, y, 0.8)
        (logp * weight).sum().backward(retain_graph=True)
        (logp * weight + entropy * weight.flip(0)).sum().backward()
        results.append([logp.detach(), entropy.detach(), *(p.grad for p in model.parameters())])
    for one, many in zip(*results):
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6 * max(1.0, one.abs().max().item()))


def test_autocast_rounds_no_entropy():
    logits, y = torch.randn(7, 100), torch.arange(7)
    outside = chunk_logprobs(logits, y, 100, None, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk_logprobs(logits, y, 100, None, 1.0)
    assert all(same.dtype == torch.float32 and torch.equal(same, exact) for same, exact in zip(inside, outside, strict=True))


def test_logprobs_of_no_target_are_zeros_that_can_be_differentiated():
    """What a rank does that has nothing to learn, while others wait for its gradients."""
    model = tiny(trained=True)
    logp, entropy = model.token_logprobs(ids(), torch.full((3, 16), IGNORE), 1.0)
    logp.sum().backward()
    assert not logp.any() and not entropy.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- questions, rollouts and batches ---

def test_the_stream_asks_every_question_once_an_epoch_in_an_order_of_its_own():
    orders = [[questions.question_at(place, 11, seed) for place in range(33)] for seed in (0, 1)]
    epochs = [tuple(order[i:i + 11]) for order in orders for i in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs) and len(set(epochs)) == 6
    assert orders[0] == [questions.question_at(place, 11, 0) for place in range(33)] and questions.question_at(10**9, 1, 5) == 0


def some_rollouts(seed=0, n=40):
    rng = random.Random(seed)
    return [Completion(prompt=[rng.randrange(257) for _ in range(rng.randrange(1, 9))], ids=(ids := [rng.choice([0, 5, 256]) for _ in range(rng.randrange(1, 14))]),
                    logprobs=[-rng.random() for _ in ids], finished=rng.random() < 0.5, trained=rng.random() < 0.8, advantage=rng.random(),
                    reference_logprobs=[-rng.random() for _ in ids], trainer_logprobs=[-rng.random() for _ in ids]) for _ in range(n)]


def test_what_is_trained_on_follows_from_lengths_alone():
    """Padding id 0 and the end of text, 256, are ids like any other where they were sampled."""
    rollouts = some_rollouts()
    rollouts += [Completion(list(r.prompt), [1, 256], [-1.0, -1.0], True) for r in rollouts[:5]]          # prompts that stand there already
    batch = padded(rollouts)
    for i, r in enumerate(rollouts):
        n, g = len(r.ids), batch.prefixes.prompt_index[i]
        assert batch.prefixes.lengths[g] == len(r.prompt) - 1 and batch.prefixes.ids[g, :batch.prefixes.lengths[g]].tolist() == r.prompt[:-1]
        assert batch.x[i, :n].tolist() == [r.prompt[-1], *r.ids[:-1]] and not batch.x[i, n:].any()
        assert batch.y[i].tolist() == (r.ids if r.trained else [IGNORE] * n) + [IGNORE] * (batch.y.shape[1] - n)
        for name, values in (("sampled_logprobs", r.logprobs), ("trainer_logprobs", r.trainer_logprobs), ("reference_logprobs", r.reference_logprobs)):
            found = getattr(batch, name)[i]
            assert found.dtype == torch.float32 and found[:n].tolist() == pytest.approx(values or [0.0] * n) and not found[n:].any()
        assert batch.advantages[i].item() == pytest.approx(r.advantage)
    assert batch.x.shape == batch.y.shape == (45, max(len(r.ids) for r in rollouts)) and (batch.y == IGNORE).any(1).sum() >= 30
    assert batch.prefixes.ids.shape == (len({tuple(r.prompt[:-1]) for r in rollouts}), max(len(r.prompt) for r in rollouts) - 1)
    assert padded([Completion([3], [0], [-1.0], True), Completion([4], [0, 256], [-1.0, -2.0], False)]).y.tolist() == [[0, IGNORE], [0, 256]]
    assert padded([Completion([3], [0], [-1.0], True)]).prefixes.ids.shape == (1, 0)


def computed(batch):
    """The number of positions of a Batch that the model computes."""
    kept = batch.prefixes.kept
    return batch.x.numel() + batch.prefixes.ids.numel() if kept is None else len(kept)


@pytest.mark.parametrize("tokens", [1, 15, 64, 100, 10**6])
def test_micro_batches_keep_to_their_tokens_and_lose_nothing(tokens):
    rollouts = some_rollouts(1)
    rollouts += [dataclasses.replace(r) for r in rollouts]
    parts = micro_batches(rollouts, tokens)
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, rollouts))
    cells = [computed(padded(part)) for part in parts]
    assert all(n <= tokens or len(part) == 1 for n, part in zip(cells, parts))
    assert len(parts) == {1: 80, 10**6: 1}.get(tokens, len(parts)) and micro_batches([], tokens) == []
    if tokens == 100:                        # no padding, little in attention, and a prompt stands there once
        assert sum(cells) < sum(len(r.prompt) + len(r.ids) - 1 for r in rollouts)
        cells = [padded(part).x.numel() + padded(part).prefixes.ids.numel() for part in parts]
        assert sum(cells) < 1.2 * sum(len(r.prompt) + len(r.ids) - 1 for r in rollouts)


@pytest.mark.parametrize("P, spread, bound", [(1, 100, 1.2), (400, 20, 0.3)])
def test_micro_batches_hold_equal_lengths_or_a_prompt_s_samples_whatever_takes_less(P, spread, bound):
    """Against each sample alone with its prompt, without padding. A prompt that is long stands in one micro-batch, or two at a cut."""
    rng = random.Random(0)
    rollouts = [Completion([g] * P, [1] * rng.randrange(20, 20 + spread), [], True) for g in range(24) for _ in range(8)]
    rng.shuffle(rollouts)
    batches = [padded([dataclasses.replace(r, logprobs=None) for r in part]) for part in micro_batches(rollouts, 4096)]
    assert sum(b.x.numel() + b.prefixes.ids.numel() for b in batches) < bound * sum(P - 1 + len(r.ids) for r in rollouts)
    if P > 1:
        assert sum(len(b.prefixes.ids) for b in batches) <= 24 + len(batches)


@pytest.mark.parametrize("shape", [{}, dict(n_kv_head=1, mlp="swiglu", qk_norm=False), dict(position="learned", norm="layernorm", tied_head=True),
                                   dict(logit_softcap=5.0, rope_scaling={"factor": 2.0})])
@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_prompt_computed_once_gives_what_rows_that_repeat_it_give(shape, backend):
    """Log-probabilities, entropies and the whole gradient; prompts of different lengths, one of a single token among them, padding
    that would be past the last position, and micro-batches in which a prompt has one row or all."""
    torch.manual_seed(0)
    config = GPTConfig(**dict(vocab_size=257, block_size=21, n_layer=2, n_head=2, n_embd=32) | shape)
    model = GPT(config, backend).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    rollouts = some_rollouts(2, 12)
    rollouts[5] = dataclasses.replace(rollouts[5], prompt=[3])
    rollouts += [dataclasses.replace(r, ids=(ids := [7] * (i + 1)), logprobs=[-1.0] * len(ids), reference_logprobs=None, trainer_logprobs=None)
                 for i, r in enumerate(rollouts[:10])] + [Completion([9], [1, 256], [-1.0, -2.0], True)]
    found = {}
    for how in ("repeated", "alone", "once", "in parts", "with padding"):
        model.zero_grad()
        for part in {"once": [rollouts], "with padding": [rollouts], "in parts": micro_batches(rollouts, 60)}.get(how, [[r] for r in rollouts]):
            batch = padded(part, 8 if how == "in parts" else 1)
            total, lengths = batch.x.numel() + batch.prefixes.ids.numel(), [len(r.ids) for r in part] + batch.prefixes.lengths.tolist()
            assert computed(batch) == (-(-sum(lengths) // 8) * 8 if how == "in parts" else sum(lengths)) <= total
            if how == "with padding":
                batch.prefixes = batch.prefixes._replace(kept=None)
            if how == "repeated":
                whole, n = torch.tensor([part[0].prompt + part[0].ids]), len(part[0].ids)
                y = torch.cat((torch.full((1, whole.shape[1] - n), IGNORE), batch.y[:, :n]), 1)[:, 1:]
                logp, entropy = (z[:, -n:] for z in model.token_logprobs(whole[:, :-1], y, 1.3))
            else:
                logp, entropy = model.token_logprobs(batch.x, batch.y, 1.3, batch.prefixes)
            (logp * torch.arange(1, 1 + logp.shape[1])).sum().backward()
            for r, *rows in zip(part, logp, entropy):
                found.setdefault(how, {})[id(r)] = torch.stack([row[:len(r.ids)] for row in rows]).detach()
        found[how]["gradient"] = torch.cat([p.grad.flatten() for p in model.parameters()])
    for how in ("alone", "once", "in parts", "with padding"):
        for key, value in found["repeated"].items():
            torch.testing.assert_close(found[how][key], value, rtol=1e-5, atol=1e-5)     # logits are fp32, whatever the rest is
    assert found["once"]["gradient"].abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_in_bf16_loss_and_gradient_are_within_5_percent_of_fp32_s(kind):
    """On the same samples, after weights have moved: where they have not, the ratio is 1 and the loss does not depend on the precision."""
    rng, found = random.Random(3), {}
    rollouts = [Completion([rng.randrange(100) for _ in range(5)], [rng.randrange(100) for _ in range(10)], [], True, advantage=(-1) ** i * rng.random())
                for i in range(24) for _ in range(2)]
    model = tiny(trained=True, **kind)
    with torch.no_grad():
        batch = padded([dataclasses.replace(r, logprobs=[0.0] * 10) for r in rollouts])
        for r, row in zip(rollouts, model.token_logprobs(batch.x, batch.y, 1.0, batch.prefixes)[0].tolist()):
            r.logprobs = row
        for p in model.parameters():
            p.add_(0.005 * torch.randn_like(p))
    batch = padded(rollouts)
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logp, _ = model.token_logprobs(batch.x, batch.y, 1.0, batch.prefixes)
        loss, figures = loss_of(logp, batch.sampled_logprobs, None, batch.advantages, batch.y != IGNORE, 480)
        loss.backward()
        found[dtype] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]), figures["kl_old"].item()
    (loss, gradient, kl), (loss16, gradient16, kl16) = found.values()
    assert abs(loss) > 0.01 and kl > 0.1     # so that there is something to be off by
    assert loss16 == pytest.approx(loss, rel=0.05) and kl16 == pytest.approx(kl, rel=0.05)
    assert gradient16.norm().item() == pytest.approx(gradient.norm().item(), rel=0.05)
    assert torch.cosine_similarity(gradient, gradient16, dim=0) > 0.99


class Scripted:
    """Stands for the engine: for each request, completions that end in every way there is."""
    completions = [([5, 0, 256], "stop"), ([0, 7, 0], "length"), ([256], "stop"), ([5, 256, 9, 0], "length")]

    def generate(self, requests, progress, sampling, environment):
        for request in reversed(requests):
            for index in (2, 0, 3, 1):
                ids, reason = self.completions[index]
                yield Sample(request, index, ids, [-0.5] * len(ids), reason)


class Judge:
    def __init__(self):
        self.asked, self.collected = [], 0

    def submit(self, question, completion, turns):
        self.asked.append((question["question"], completion))

    def flush(self):
        pass

    def collect(self, wait):
        new = self.asked[self.collected:] if wait else []
        self.collected += len(new)
        return [Grade(0.25 * len(text), {}, "", None) for _, text in new]


def test_the_pipeline_gives_completions_in_their_order_and_does_not_ask_about_what_was_cut_off():
    judge, tokenizer = Judge(), Tokenizer("bytes")
    pipeline = rollout.Pipeline(Scripted(), judge, tokenizer, SimpleNamespace(cut=lambda text: text.partition("!")[0], responds=False))
    requests, asked = [Request([1], 4, 0, 4)], [{"question": "q"}]
    sampled = list(pipeline.sample(asked, requests, grade_unfinished=False))
    assert [c.index for c in sampled] == [2, 0, 3, 1] and all(c.question is asked[0] for c in sampled)
    assert len(judge.asked) == sum(c.finished for c in sampled) < 4
    done = pipeline.graded(wait=True)
    assert done == sampled and all(c.grade is rollout.UNFINISHED for c in done if not c.finished)
    assert all(c.grade.score == 0.25 * len(c.text) for c in done if c.finished) and pipeline.graded() == []


def test_the_penalty_of_long_completions_rises_over_the_last_tokens():
    cfg = grpo.Config(overlong="penalty", max_new_tokens=100, overlong_tokens=20)
    assert [grpo.length_penalty(cfg, n) for n in (1, 80, 81, 90, 99, 100)] == pytest.approx([0, 0, 0.05, 0.5, 0.95, 1])
    assert grpo.length_penalty(grpo.Config(max_new_tokens=100), 100) == 0
    cfg.k_samples = 2                        # the first was cut by the context
    cut, ended = (SimpleNamespace(grade=Grade(1.0, {}, "", None), n_sampled=30, finished=finished, key=0, index=i) for i, finished in enumerate((False, True)))
    grpo.group_by_question(cfg, [cut, ended], [0])
    assert (cut.reward, ended.reward) == (0, 1)


def test_questions_of_a_file_are_told_apart_by_a_hash(tmp_path, capsys):
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "level": i} for i in range(200)]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", "q.jsonl")
    train, held = questions.read_questions(path, 100)
    assert 10 <= len(held) <= 32 and not {q["question"] for q in train} & {q["question"] for q in held}
    assert sorted(q["level"] for q in train + held) == list(range(200)) and all(q["question"] == q["prompt"] for q in train)
    fewer, three = questions.read_questions(path, 3)
    assert three == held[:3] and len(fewer) == 197 and questions.read_questions(path, 0) == ([row | {"question": row["prompt"]} for row in rows], [])
    random.Random(0).shuffle(rows)           # in another order, with one twice and under the other name
    other = write(tmp_path, "\n".join(json.dumps({"question": r["prompt"], "answer": r["answer"]}) for r in rows + rows[:1]), "r.jsonl")
    again, same_held = questions.read_questions(other, 100)
    assert {q["question"] for q in same_held} == {q["question"] for q in held} and len(again) == len(train)
    assert capsys.readouterr().out == f"Questions of {other} dropped because an earlier one has the same text: 1.\n"


def test_on_a_cpu_micro_batches_are_small_by_default(learn):
    out = learn(max_steps=1, tokens_per_micro_batch=None)
    assert "micro-batches of 2,048 tokens" in (out / "training.log").read_text()


# --- what a run trains on ---

def test_a_run_trains_on_the_very_ids_that_were_sampled_after_the_prompt(learn, watched, letters):
    learn(max_steps=3, tokens_per_micro_batch=64)
    sampled = {}
    for s in watched.samples:
        whole = tuple(s.request.ids + s.ids)
        assert bytes(s.request.ids).decode() in {f"{w} {i}" for i in range(12) for w in ("the", "cat", "sat")}
        assert (s.reason == "stop") == (s.ids[-1] in (ord("a"), 256)) and len(s.ids) <= 12 and (s.reason == "stop" or len(s.ids) == 12)
        sampled.setdefault(whole, []).append((len(s.request.ids), s.logprobs))
    met = 0
    for batch in watched.batches:
        assert computed(batch) <= 64
        for x, y, logprobs, g in zip(batch.x.tolist(), batch.y.tolist(), batch.sampled_logprobs, batch.prefixes.prompt_index):
            trained_on = [t for t, target in enumerate(y) if target != IGNORE]
            whole = tuple(batch.prefixes.ids[g, :batch.prefixes.lengths[g]].tolist() + x[:trained_on[-1] + 1] + [y[trained_on[-1]]])
            n, _ = sampled[whole][0]
            assert trained_on == list(range(len(whole) - n)) and [y[t] for t in trained_on] == list(whole[n:])
            assert any(logprobs[trained_on].tolist() == other for _, other in sampled[whole])
            met += 1
    assert len(watched.samples) == 48 and met == sum(r.advantage != 0 for groups in watched.groups for g in groups for r in g) > 30
    for groups in watched.groups:
        for group in groups:
            mean = sum(r.reward for r in group) / 4
            assert [r.advantage for r in group] == pytest.approx([r.reward - mean for r in group], abs=1e-6) and len({tuple(r.prompt) for r in group}) == 1


def test_samples_that_were_cut_off_are_left_out_by_mask_and_pay_by_penalty(learn, watched):
    learn("mask", max_steps=2, overlong="mask")
    rollouts = [r for groups in watched.groups for group in groups for r in group]
    assert {r.finished for r in rollouts} == {True, False} and all(r.trained == r.finished for r in rollouts)
    assert sum((batch.y != IGNORE).any(1).sum() for batch in watched.batches) == sum(r.trained and r.advantage != 0 for r in rollouts)
    first, watched.groups[:] = watched.groups[0], []
    learn("penalty", max_steps=1, overlong="penalty", overlong_tokens=4)
    for plain, punished in zip(itertools.chain(*first), itertools.chain(*watched.groups[0]), strict=True):
        assert punished.trained and punished.ids == plain.ids
        assert punished.reward == pytest.approx(plain.reward - max(0, len(plain.ids) - 8) / 4)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_trainer_finds_the_log_probabilities_of_the_engine(learn, temperature):
    """Temperature included: without it they would be apart by tenths."""
    out = learn(temperature=temperature, tokens_per_micro_batch=100)
    assert len(lines(out)) == 4
    for line in lines(out):
        assert 0 < line["logprob_gap"] <= line["logprob_gap_max"] < 1e-5 and abs(line["kl_old"]) < 1e-6 and line["clip_fraction"] == 0


def test_dropout_of_the_model_to_start_from_stays_off(learn, base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    about = config.read_sealed(base / "model.json", "")
    about["architecture"]["dropout"] = 0.5
    (tmp_path / "base" / "model.json").write_bytes(config.seal(about))
    assert all(line["logprob_gap_max"] < 1e-5 for line in lines(learn(init_from=tmp_path / "base")))


def test_the_loss_is_given_what_the_knobs_say(learn, monkeypatch, watched):
    """Each group belongs to one mini-batch of a pass; the ratio is to the trainer's log-probabilities where importance weights bridge to the engine's."""
    loss, calls = grpo.grpo_loss, []

    def spied(*args, **knobs):
        calls.append(inspect.signature(loss).bind(*args, **knobs).arguments)
        return loss(*args, **knobs)
    monkeypatch.setattr(grpo, "grpo_loss", spied)
    chosen = dict(clip_low=0.11, clip_high=0.33, beta=0.05, tis_cap=1.7)
    out = learn(**chosen, loss_type="dr_grpo", max_steps=1, inner_epochs=2, mini_batches=2, dtype="bf16")
    first, second, *again = watched.groups
    assert [len(first), len(second)] == [2, 2] and not {id(g) for g in first} & {id(g) for g in second}
    assert [[id(g) for g in groups] for groups in again] == [[id(g) for g in groups] for groups in (first, second)] and lines(out)[0]["updates"] == 4
    for call, batch in zip(calls, watched.batches, strict=True):
        assert {key: getattr(call["cfg"], key) for key in chosen} == chosen and call["cfg"].loss_type == "dr_grpo"
        assert call["denominator"] == 8 * 12
        assert torch.equal(call["old_logp"], batch.trainer_logprobs) and torch.equal(call["sampled_logp"], batch.sampled_logprobs)
        assert not torch.equal(batch.trainer_logprobs, batch.sampled_logprobs) and torch.equal(call["advantage"], batch.advantages)
    assert (calls[0]["logp"] - calls[0]["old_logp"]).abs().max() < 1e-5 < (calls[2]["logp"] - calls[2]["old_logp"]).abs().max()
    learn("plain", max_steps=1, dtype="bf16")
    assert torch.equal(calls[-1]["old_logp"], watched.batches[-1].sampled_logprobs) and not calls[-1]["cfg"].tis_cap


# --- one normaliser ---

PIECES = {loss_type: dict(loss_type=loss_type, max_steps=1, grad_clip=0, prompts_per_step=6) for loss_type in LOSS_TYPES} | {
    "masked": dict(loss_type="dapo", overlong="mask", max_steps=1, grad_clip=0, prompts_per_step=6, beta=0.1),
    "three steps": dict(max_steps=3, grad_clip=0.5, advantage_scale="group", save_interval=2, keep_last=9),
    "inner": dict(max_steps=3, inner_epochs=2, mini_batches=2, beta=0.1, prompts_per_step=8)}


@pytest.fixture(scope="module")
def ranked(base, letters, tmp_path_factory):
    """Folders of the runs of PIECES by two ranks, one after another in one start of torchrun."""
    folder = tmp_path_factory.mktemp("ranked")
    argvs = {name: flags(**GRPO | dict(init_from=base, task=letters, out_dir=folder / name) | knobs) for name, knobs in PIECES.items()}
    return folder, in_ranks(folder, argvs)


def in_ranks(folder, argvs):
    """What two ranks said that ran these."""
    script = write(folder, f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport grpo\nfrom runtime import distributed, guard\n"
                   f"for argv in {list(argvs.values())!r}:\n    assert grpo.main(argv) == 0\ndistributed.close()\n", "several.py")
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", str(script)], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, failure(done)
    return done.stdout


@pytest.mark.parametrize("kind", [kind for kind, knobs in PIECES.items() if knobs["max_steps"] == 1])
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(learn, ranked, kind):
    whole, *others = [learn(f"{tokens}", **PIECES[kind], tokens_per_micro_batch=tokens) for tokens in (2048, 256, 64)]
    assert gradient(whole).norm() > 1e-3
    for other in [*others, ranked[0] / kind]:
        assert apart(gradient(other), gradient(whole)) < 1e-5
        (one,), (many,) = lines(whole), lines(other)
        for key in ("loss", "reward", "grad_norm", "entropy", "kl", "pass_at_1", "completion_tokens", "truncated", "zero_variance", "parts/many", "tokens"):
            assert many[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("loss_type, knobs", [("dapo", dict(temperature=0.7)), ("grpo", dict(advantage_scale="group")), ("dr_grpo", dict(overlong="mask")),
                                              ("dapo", dict(beta=0.1, tis_cap=2.0))], ids=str)
def test_the_gradient_of_a_run_is_that_of_the_formula(learn, watched, base, loss_type, knobs):
    """Of its samples, a sequence and a token at a time."""
    out, cfg = learn(loss_type=loss_type, max_steps=1, grad_clip=0, **knobs), dict(temperature=1.0) | knobs
    model, logp, advantage, ((*groups,),) = hub.find(str(base)).load(), [], [], watched.groups
    for group in groups:
        rewards = torch.tensor([r.reward for r in group], dtype=torch.float64)
        above = rewards - rewards.mean()
        above = above / (rewards.std(correction=0) + 1e-4) if "advantage_scale" in knobs else above
        for r, a in zip(group, above):
            if r.finished or "overlong" not in knobs:
                logits = model(torch.tensor([r.prompt + r.ids]))[0].double() / cfg["temperature"]
                logp.append(torch.stack([logits[len(r.prompt) + t - 1].log_softmax(0)[i] for t, i in enumerate(r.ids)]))
                advantage.append(a)
    old = [row.detach() for row in logp]     # as the policy has not moved, ratios are 1 and the divergence is 0
    logp, old = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (logp, old))
    lengths = [len(r.ids) for group in groups for r in group if r.finished or "overlong" not in knobs]
    plainly(logp, old, old, advantage, lengths, loss_type, 0.2, 0.28, knobs.get("beta"), old, 0.0, 12).backward()
    expected = [p.grad.flatten() for name, p in sorted(model.named_parameters())]
    assert apart(gradient(out), torch.cat(expected)) < 1e-4


@pytest.mark.parametrize("kind", ["three steps", "inner"])
def test_two_ranks_go_in_lockstep_with_one(learn, ranked, kind):
    alone = learn(**PIECES[kind])
    assert largest_difference(weights(alone, 3), weights(ranked[0] / kind, 3)) < 1e-5
    for one, two in zip(lines(alone), lines(ranked[0] / kind), strict=True):
        assert all(two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6) for key in ("loss", "reward", "grad_norm", "entropy", "kl", "clip_fraction"))
    assert not same(weights(alone, 3), checkpoint_of_base(alone))


def test_a_run_of_two_ranks_goes_on_with_one(learn, ranked):
    """The same questions and noise, the same tokens (in fp32, up to ties), and what follows from them."""
    two = ranked[0] / "three steps"
    alone = learn("alone", max_steps=1)
    shutil.rmtree(alone)
    shutil.copytree(two, alone)
    shutil.rmtree(alone / "checkpoints/step_00000003")       # as if killed before it
    learn("alone", init_from="resume", **PIECES["three steps"])
    assert largest_difference(weights(alone, 3), weights(two, 3)) < 1e-5
    one, other = lines(alone)[-1], lines(two)[-1]
    for key in ("loss", "reward", "completion_tokens", "pass_at_1", "grad_norm", "entropy", "questions"):
        assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key


def checkpoint_of_base(out_dir):
    """The weights that a run began with."""
    return checkpoint.load_weights(folder := json.loads((out_dir / "config.json").read_text())["init_from"], checkpoint.choose(folder))


# --- stopped and resumed ---

RESUMED = {
    "dapo": {}, "beta": dict(beta=0.2, loss_type="grpo", advantage_scale="group"), "lora": dict(beta=0.2, lora_rank=2, learning_rate=0.02),
    "dynamic": dict(dynamic_sampling=True, k_samples=2, max_new_tokens=4), "inner": dict(inner_epochs=2, mini_batches=2, tis_cap=2.0),
    "bf16": dict(dtype="bf16", overlong="mask"), "muon": dict(optimizer="muon", overlong="penalty", overlong_tokens=4, lr_schedule="cosine")}


@pytest.mark.parametrize("kind", RESUMED)
def test_stopped_and_resumed_equals_a_run_that_was_not_bit_for_bit(learn, kind):
    out = learn(max_steps=6, save_interval=3, keep_last=9, eval_interval=3, **RESUMED[kind])
    whole, said = weights(out, 6), lines(out)
    (out / "checkpoints" / "step_00000006").rename(out / "gone")       # as if killed before it
    learn(max_steps=6, save_interval=3, keep_last=9, eval_interval=3, init_from="resume", **RESUMED[kind])
    assert same(weights(out, 6), whole) and not same(weights(out, 3), whole)
    timed = ("seconds", "_s", "memory_gb", "perf/throughput", "utilization", "joules")
    for one, two in zip(said, lines(out), strict=True):
        assert one.keys() == two.keys()
        assert {k: v for k, v in one.items() if not k.endswith(timed)} == {k: v for k, v in two.items() if not k.endswith(timed)}
    assert set(metrics(out, "val_accuracy")) == {0, 3, 6}


def test_killed_at_random_moments_it_ends_with_the_same_weights(learn, base, letters, tmp_path):
    knobs = dict(max_steps=60, save_interval=1, prompts_per_step=2, k_samples=2, max_new_tokens=6, log_interval=7, reward_pool="process", reward_workers=1)
    calm, out, rng, kills, seen = learn("calm", **knobs), tmp_path / "stormy", random.Random(0), 0, []
    while kills < 8:
        how = {"init_from": "resume"} if checkpoint.newest_intact(out, seen.append) else {"overwrite": True}
        process = forked.Popen(command(out, base, letters, **knobs | how), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = checkpoint.steps(out)
        wait_for(lambda: checkpoint.steps(out) != before or process.poll() is not None)
        time.sleep(rng.uniform(0, 0.1))
        if process.poll() is not None:
            break                            # through before the eighth kill
        process.kill()
        process.wait()
        kills += 1
    if checkpoint.newest_intact(out) < 60:
        learn("stormy", **knobs, init_from="resume")
    assert kills >= 4 and not seen           # and no kill left a damaged checkpoint
    assert same(weights(out, 60), weights(calm, 60)) and metrics(out) == metrics(calm) and metrics(out, "reward") == metrics(calm, "reward")
    assert [path.read_bytes() for path in records.files_of(out)] == [path.read_bytes() for path in records.files_of(calm)]


def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(learn, base, letters, tmp_path):
    out = tmp_path / "a"
    process = forked.Popen(command(out, base, letters, max_steps=100_000, reward_pool="process"), env=environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines(out)) > 2)
    os.killpg(process.pid, signal.SIGTERM)   # as batch systems do, to all it started
    said, error = process.communicate(timeout=60)
    step = checkpoint.newest_intact(out)
    assert process.returncode == 143 and step == lines(out)[-1]["step"]
    assert re.fullmatch(r"\nStopping after this step \(about \d+ s\) and its checkpoint. SIGKILL stops now and loses this step.\n", error)
    assert said.endswith(f"Stopped as asked after step {step}, and saved. Resume with --init_from=resume --out_dir={out}\n")
    learn("b", max_steps=step, reward_pool="process")
    assert same(weights(tmp_path / "b", step), weights(out, step))


def test_a_signal_to_one_of_two_ranks_stops_both_after_the_same_step(base, letters, tmp_path):
    out = tmp_path / "a"
    line = command(out, base, letters, max_steps=100_000)
    ranks = [forked.Popen(line, env=environment(**rank), stdout=subprocess.DEVNULL) for rank in forked.ranks_of(2)]
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines(out)) > 1)
    ranks[1].terminate()
    assert [rank.wait(60) for rank in ranks] == [143, 143]
    assert checkpoint.newest_intact(out) == lines(out)[-1]["step"]


# --- nothing to learn, and what goes wrong ---

def task_file(folder, reward, more="", name="own.py"):
    """A task of which the reward's body is given."""
    head = TASK.partition("def reward")[0]
    return write(folder, f"import time\ncalls = 0\n{head}\n{more}\ndef reward(question, completion, argument=None):\n    {reward}\n", name)


def test_where_all_fare_alike_no_weight_moves(learn, tmp_path):
    """After steps that did, with decay and moments that would move it."""
    task = task_file(tmp_path, "global calls; calls += 1; return completion.count('t') / 12 if calls <= 48 else 0.3")
    out = learn(task=task, max_steps=7, weight_decay=0.5, save_interval=1, keep_last=9, beta1=0.95)
    for step in (4, 5, 6, 7):
        assert same(weights(out, step), weights(out, 3))
    assert not same(weights(out, 3), weights(out, 2))
    assert learn.said.count("no update") == learn.said.count("entropy n/a") == learn.said.count("grad norm n/a") == 4 and [line["updates"] for line in lines(out)] == [1, 1, 1, 0, 0, 0, 0]
    assert all((line["zero_variance"], line["loss"], line["grad_norm"], line["entropy"], line["kl_old"], line["mfu"]) == (1, 0, *4 * [None]) and line["reward"] == pytest.approx(0.3) for line in lines(out)[3:])


@pytest.mark.parametrize("fault", ["raise ValueError('no')", "return float('nan')", "return 'good'", "return None", "return 0.5, {'a': 1}, 3",
                                   "raise SystemExit"])
def test_completions_without_a_grade_are_counted_and_not_trained_on(learn, tmp_path, watched, fault):
    """With a KL term, which completions without an advantage have too."""
    task = task_file(tmp_path, f"if len(completion) % 2: {fault}\n    return completion.count('t') / 12")
    out = learn(task=task, max_steps=2, beta=0.1)
    for groups, line in zip(watched.groups, lines(out), strict=True):
        step = [r for group in groups for r in group]
        failed = [r for r in step if r.grade.error]
        graded = [r for r in step if not r.grade.error]
        assert line["errors"] == len(failed) > 0 and graded and line["timeouts"] == 0
        assert line["reward"] == pytest.approx(sum(r.reward for r in graded) / len(graded))
        assert not any(r.trained or r.advantage for r in failed) and all(r.trained for r in graded)
        for group in groups:
            rewards = [r.reward for r in group if not r.grade.error]
            for r in group:
                if not r.grade.error:
                    assert r.advantage == pytest.approx(r.reward - sum(rewards) / len(rewards), abs=1e-6)
    assert sum((batch.y != IGNORE).sum() for batch in watched.batches) == sum(len(r.ids) for g in watched.groups for rs in g for r in rs if r.trained)


def test_a_step_of_which_nothing_could_be_graded_moves_no_weight(learn, tmp_path):
    task = task_file(tmp_path, "global calls; calls += 1\n    if calls > 48: raise ConnectionError('down')\n    return completion.count('t') / 12")
    out = learn(task=task, max_steps=5, save_interval=1, keep_last=9)
    assert same(weights(out, 3), weights(out, 4)) and not same(weights(out, 2), weights(out, 3))
    assert [(line["errors"], line["reward"], line["updates"]) for line in lines(out)[3:]] == [(16, "nan", 0)] * 2


def test_a_score_of_another_scale_ends_the_run(learn, tmp_path):
    out = learn(code=2, task=task_file(tmp_path, "return 2.0 if 't' in completion else 0.5"), max_steps=9)
    assert "returned the score 2: a score is a number from 0 to 1" in learn.error.splitlines()[-1] and not checkpoint.steps(out)
    learn("evaluated", code=2, task=task_file(tmp_path, "return 2.0"), max_steps=9, eval_interval=9)
    assert "returned the score 2" in learn.error
    learn("evaluated", task=task_file(tmp_path, "return 0.5"), max_steps=1)      # mended, the same command starts anew


def test_the_prompt_form_is_the_one_that_examples_were_trained_on():
    for prompt, form in (("Q: {}", "Q: {}"), (None, tasks.load("arithmetic").prompt)):
        assert prompt_form(train.Config(dataset="examples:arithmetic", prompt=prompt)) == form


def test_fewer_slots_than_before_are_said_or_refused(learn, monkeypatch):
    """As on a card that another job fills: the last bits of log-probabilities depend on their number."""
    for name, deterministic in (("plain", False), ("exact", True)):
        monkeypatch.setattr(fit, "slots_that_fit", lambda *arguments: 16)
        learn(name, max_steps=1, deterministic=deterministic)
        monkeypatch.setattr(fit, "slots_that_fit", lambda *arguments: 7)
        learn(name, code=2 * deterministic, init_from="resume", max_steps=2, deterministic=deterministic)
        assert "Memory suffices for 7 of the 16 samples" in (learn.error if deterministic else learn.said)


def test_more_ranks_or_fewer_samples_need_fewer_slots(learn, monkeypatch):
    """And more samples more."""
    slots = []
    make = grpo.Engine
    monkeypatch.setattr(grpo, "Engine", lambda model, n, *rest, **options: slots.append(n) or make(model, n, *rest, **options))
    learn(max_steps=1, deterministic=True)
    learn(init_from="resume", max_steps=2, k_samples=2, deterministic=True)
    assert "Memory suffices" not in learn.said
    learn(init_from="resume", max_steps=3, k_samples=6, deterministic=True)
    assert slots[2] == 3 * slots[1]


@pytest.mark.parametrize("knobs, error", [
    (dict(), "KeyError: 'unit'"), (dict(eval_interval=9, eval_questions=1), "KeyError: 'unit'"),
    (dict(reward_pool="process", reward_workers=2, timeout=0.3), "timed out after 0.3 s")],
    ids=["raises", "evaluated", "hangs"])
def test_a_verifier_that_always_fails_is_heard_and_ends_the_run(learn, tmp_path, monkeypatch, knobs, error):
    body = "time.sleep(99)" if "timeout" in knobs else "return question['unit']"
    monkeypatch.setattr(rewards, "FIRST", 8 if "timeout" in knobs else 32)
    out = learn(code=2, task=task_file(tmp_path, body), max_steps=9, **knobs)
    first, last = learn.error.splitlines()
    assert first.startswith("The reward of the task ") and error in first
    assert last.startswith("error: The reward of the task ") and error in last
    steps = 0 if "timeout" in knobs else 1
    assert len(lines(out)) == learn.said.count(" | 16 errors") == steps and checkpoint.steps(out) == []


def test_a_verifier_that_fails_on_one_rank_ends_both(base, tmp_path):
    """The first rank, which speaks for all, learns of it."""
    task = task_file(tmp_path, "return 1 / (1 - int(os.environ['RANK']))", more="import os")
    argv = command(tmp_path / "run", base, task, prompts_per_step=16)[1:]
    torchrun = [*forked.TORCHRUN, "--nproc_per_node=2"]
    done = forked.run(torchrun + argv, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode and done.stderr.count("error: The reward of the task") == 1, done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_verifier_that_hangs_is_killed_and_counted_and_the_run_goes_on(learn, tmp_path):
    asked = [f"{w} {i}" for i in range(12) for w in ("the", "cat", "sat")][questions.question_at(1, 36, 0)]
    task = task_file(tmp_path, f"if question['question'] == {asked!r} and len(completion) % 2: time.sleep(99)\n    return completion.count('t') / 12")
    began = time.monotonic()
    out = learn(task=task, max_steps=3, reward_pool="process", reward_workers=2, timeout=0.5)
    first, *others = lines(out)
    assert 1 <= first["timeouts"] == first["errors"] <= 4 and first["reward"] > 0 and time.monotonic() - began < 60
    assert all(line["errors"] == line["timeouts"] == 0 for line in others)       # the question comes but once in these steps


@pytest.mark.parametrize("knobs", [dict(eval_interval=1), dict(gradient_checkpointing=True), dict(save_interval=1), dict(log_interval=3),
                                   dict(attention="sdpa")], ids=str)
def test_these_change_no_bit(learn, knobs):
    assert same(weights(learn("a", **knobs), 4), weights(learn("b"), 4))


def test_fp16_trains_with_a_loss_scale(learn):
    out = learn(dtype="fp16", max_steps=6)
    assert checkpoint.load_state(out, 6)["scaler"]["scale"] >= 1 and lines(out)[-1]["updates"] == 1
    assert all(line["logprob_gap_max"] < 0.1 for line in lines(out)) and not same(weights(out, 6), checkpoint_of_base(out))


def test_a_step_that_ran_out_of_memory_is_repeated_in_smaller_pieces(learn, monkeypatch):
    whole, loss, calls = learn("whole", max_steps=2, tokens_per_micro_batch=200), grpo.grpo_loss, itertools.count()

    def short(*args, **knobs):
        if next(calls) == 1:                 # the first piece has gone backward already
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(*args, **knobs)
    monkeypatch.setattr(grpo, "grpo_loss", short)
    out = learn("short", max_steps=2, tokens_per_micro_batch=200)
    smaller = checkpoint.load_state(out, 2)["progress"]["micro_batch"]
    assert 50 < smaller < 150 and f"repeating it with micro-batch {smaller} instead of 200" in learn.said
    assert largest_difference(weights(out, 2), weights(whole, 2)) < 1e-5


@pytest.mark.parametrize("saving", [1, 10**6])
def test_weights_that_have_moved_go_back_to_the_last_checkpoint(learn, monkeypatch, saving):
    """What runs out of memory while the weights are moved is no beginning of a step."""
    whole, step, calls = learn("whole", max_steps=3), optim.apply_step, itertools.count(1)

    def short(optimizers, *rest):
        if next(calls) == 3:
            with torch.no_grad():
                optimizers[0].param_groups[0]["params"][0].add_(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(optimizers, *rest)
    monkeypatch.setattr(optim, "apply_step", short)
    out = learn("short", code=int(saving > 1), max_steps=3, save_interval=saving)
    if saving > 1:
        assert "before the first checkpoint: start again with --overwrite --tokens_per_micro_batch=" in learn.error
    else:
        assert "after weights had changed: resuming from the last checkpoint" in learn.said
        assert largest_difference(weights(out, 3), weights(whole, 3)) < 1e-5
        assert [line["step"] for line in lines(out)] == [1, 2, 3] and not unknown(out)


def spoil(monkeypatch, steps):
    """Let the loss be NaN at these calls of it: one a step."""
    loss, calls = grpo.grpo_loss, itertools.count(1)

    def spoiled(*args, **knobs):
        value, figures = loss(*args, **knobs)
        return (value * NAN if next(calls) in steps else value), figures
    monkeypatch.setattr(grpo, "grpo_loss", spoiled)


def test_a_step_without_finite_gradients_is_skipped(learn, monkeypatch):
    spoil(monkeypatch, [3])
    out = learn(max_steps=3, save_interval=1, keep_last=9)
    assert same(weights(out, 3), weights(out, 2)) and not same(weights(out, 2), weights(out, 1))
    assert [line["skipped_steps"] for line in lines(out)] == [0, 0, 1] and "step 3: non-finite gradients" in learn.said
    spoil(monkeypatch, [3])
    out = learn("longer", max_steps=4, save_interval=1, keep_last=9)
    assert checkpoint.steps(out) == [1, 2, 4] and not same(weights(out, 4), weights(out, 2))
    assert [line["skipped_steps"] for line in lines(out)] == [0, 0, 1, 1]


def test_after_several_it_rolls_back_once(learn, monkeypatch):
    spoil(monkeypatch, range(6, 11))
    out = learn(max_steps=11, save_interval=5, keep_last=9)
    assert learn.said.count("Rolling back to the checkpoint of step 5") == 1 and [line["step"] for line in lines(out)] == list(range(1, 12))
    assert [line["lr"] for line in lines(out)] == pytest.approx([3e-3] * 5 + [1.5e-3] * 6) and not same(weights(out, 10), weights(out, 5))


def test_a_skipped_step_saves_no_checkpoint(learn, monkeypatch):
    """Or the run would roll back to the weights that failed."""
    spoil(monkeypatch, range(4, 9))
    out = learn(max_steps=9, save_interval=1, keep_last=2)
    assert learn.said.count("Rolling back to the checkpoint of step 3") == 1 and [line["step"] for line in lines(out)] == list(range(1, 10))


def test_and_then_stops_with_the_last_rollouts_on_disk(learn, monkeypatch):
    spoil(monkeypatch, range(7, 99))
    out = learn(code=1, max_steps=99, save_interval=6, beta=0.1)
    assert learn.said.count("Rolling back to the checkpoint of step 6") == 1 and "Training diverged" in learn.error
    (file,) = out.glob("bad_batch*.pt")
    rollouts = torch.load(file, weights_only=True)["rollouts"]
    assert len(rollouts) == 16 and all(len(r["ids"]) == len(r["logprobs"]) == len(r["reference_logprobs"]) for r in rollouts)
    assert not unknown(out)


@pytest.mark.parametrize("saving", [1, 10**6])
def test_a_rate_that_breaks_the_weights_rolls_back_once_and_stops(learn, saving):
    out = learn(code=1, max_steps=60, learning_rate=1e30, grad_clip=0, save_interval=saving)
    assert learn.said.count("Rolling back to the checkpoint of step") == (saving == 1) and "Training diverged" in learn.error and learn.error.count("\n") == 1
    assert list(out.glob("bad_batch*.pt"))


# --- reference, dynamic sampling, importance weights ---

@pytest.mark.parametrize("knobs", [{}, dict(lora_rank=2, learning_rate=0.02)], ids=["whole", "lora"])
def test_the_divergence_begins_at_nothing_grows_and_holds_the_model_back(learn, knobs):
    out, free = learn("held", beta=0.3, max_steps=12, **knobs), learn("free", beta=1e-6, max_steps=12, **knobs)
    held, grown = ([line["kl"] for line in lines(run)] for run in (out, free))
    assert abs(held[0]) < 1e-9 and held[1] > 1e-4 and grown[-1] > 10 * grown[1] and grown[-1] > 5 * held[-1]
    start = checkpoint_of_base(out)
    assert same(checkpoint.load_base(out), start)
    if knobs:
        assert all(".lora_" in n for n in weights(out, 12)) and all(w.any() for w in weights(out, 12).values())
    assert not any(line["kl"] for line in lines(learn("without", max_steps=2, **knobs)))


def test_a_reference_that_waits_elsewhere_changes_nothing(learn):
    assert same(weights(learn("a", beta=0.5, offload_reference=True), 4), weights(learn("b", beta=0.5), 4))


RARE = "return completion.count('t') / 12 if question['question'][0] == 't' else 0.5"        # a third of the questions can teach


def test_groups_that_fare_alike_are_replaced_by_other_questions(learn, tmp_path, watched):
    out = learn(task=task_file(tmp_path, RARE), dynamic_sampling=True, max_rounds=99, max_steps=4, k_samples=6)
    before = 0
    for line, groups in zip(lines(out), watched.groups, strict=True):
        assert len(groups) == 4 and all(len({r.reward for r in g}) > 1 for g in groups) and line["updates"] == 1
        assert (line["questions"] - before) % 4 == 0 and line["questions"] - before > 4 and line["groups"] > 4 and line["zero_variance"] > 0
        before = line["questions"]
    places = [s.request.key for s in watched.samples]
    assert len(set(places)) * 6 == len(places) == 6 * sum(line["groups"] for line in lines(out))        # no question's noise comes twice


def test_dynamic_sampling_gives_up_after_its_rounds(learn, tmp_path, watched):
    out = learn(task=task_file(tmp_path, "return 0.5"), dynamic_sampling=True, max_rounds=3, max_steps=3, beta=0.1)
    assert [line["questions"] for line in lines(out)] == [12, 24, 36] and all((line["updates"], line["groups"]) == (0, 12) for line in lines(out))
    assert same(weights(out, 3), checkpoint_of_base(out)) and watched.groups == [[]] * 3
    # A penalty for length does not tell equal grades apart.
    punished = learn("punished", task=task_file(tmp_path, "return 0.5"), dynamic_sampling=True, max_rounds=3, max_steps=1, overlong="penalty", overlong_tokens=12)
    assert [(line["questions"], line["zero_variance"], line["updates"]) for line in lines(punished)] == [(12, 1, 0)]
    del watched.groups[3:]
    out = learn("some", task=task_file(tmp_path, RARE), dynamic_sampling=True, max_rounds=2, max_steps=3)
    assert {len(g) for g in watched.groups[3:]} <= {0, 1, 2, 3, 4} and any(0 < len(g) < 4 for g in watched.groups[3:])     # what there is is learnt from
    assert not same(weights(out, 3), checkpoint_of_base(out))


def test_ranks_that_keep_unequal_numbers_of_groups_go_on_together(base, tmp_path):
    """A rank may have nothing for a mini-batch that another learns from."""
    knobs = dict(prompts_per_step=8, k_samples=3, max_new_tokens=6, max_steps=8, dynamic_sampling=True, max_rounds=1, mini_batches=2)
    argv = flags(**GRPO | dict(init_from=base, task=task_file(tmp_path, RARE), out_dir=tmp_path / "run") | knobs)
    in_ranks(tmp_path, {"run": argv})
    assert {line["updates"] for line in lines(tmp_path / "run")} >= {1, 2}


def test_solved_questions_rest_for_some_epochs(learn, tmp_path, watched):
    """All that begin with t are right at once, and so come back every third epoch only."""
    task = task_file(tmp_path, "return 1 if question['question'][0] == 't' else completion.count('t') / 24")
    knobs = dict(task=task, skip_solved=2, num_questions=12, max_steps=11, k_samples=2, save_interval=6, keep_last=9)
    out = learn(**knobs)
    epochs = {}
    for place in dict.fromkeys(s.request.key for s in watched.samples):
        epochs.setdefault(questions.question_at(place, 12, 0), []).append(place // 12)
    easy = [number for number in epochs if number % 3 == 0]
    assert len(epochs) == 12 and all(epochs[number] == [e for e in (0, 3) if e <= max(map(max, epochs.values()))] for number in easy)
    assert all(found == list(range(len(found))) for number, found in epochs.items() if number not in easy)
    (out / "checkpoints" / "step_00000011").rename(out / "gone")
    said = [line["questions"] for line in lines(out)]
    learn(**knobs, init_from="resume")       # who rests is remembered
    assert [line["questions"] for line in lines(out)] == said


@pytest.mark.parametrize("shape", [GPT2, LLAMA, QWEN])
def test_a_batch_without_padding_has_the_gradient_of_one_whose_padding_is_sought(shape):
    model = tiny(**shape)
    completions = [Completion([n // 2] * 7, ids(1, 5)[0].tolist(), [-1.0] * 5, True) for n in range(4)]
    batch = padded(completions)
    assert batch.prefixes.kept is None
    gradients = []
    for prefixes in (batch.prefixes, batch.prefixes._replace(kept=torch.arange(2 * 6 + 4 * 5))):
        model.zero_grad()
        model.token_logprobs(batch.x, batch.y, 1.0, prefixes, batch.target_index)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    # compiled code sees few graphs; one token less is padding
    assert len(padded(completions, multiple=64).prefixes.kept) == 64
    completions[1].ids.pop()
    completions[1].logprobs.pop()
    assert len(padded(completions).prefixes.kept) == 31


# --- what a run says and leaves behind ---

def test_the_metrics_have_their_keys_and_are_true(learn, watched):
    out = learn(beta=0.1, max_steps=2, eval_interval=1, eval_questions=5)
    keys = ("step loss lr grad_norm tokens reward pass_at_1 pass_at_4 zero_variance kl clip_fraction entropy completion_tokens truncated logprob_gap "
            "logprob_gap_max perf/throughput perf/mfu/actor training/global_step rollout_s reward_s reference_s update_s sync_s parts/many "
            "parts/ended seconds utilization memory_gb peak_memory_gb skipped_steps questions errors timeouts tokens_per_s mfu").split()
    tokens = 0
    for line, (groups,) in zip(lines(out), zip(watched.groups), strict=True):
        assert all(key in line for key in keys)
        rollouts = [r for g in groups for r in g]
        tokens += sum(len(r.prompt) + len(r.ids) for r in rollouts)
        expected = dict(
            reward=sum(r.reward for r in rollouts) / 16, completion_tokens=sum(len(r.ids) for r in rollouts) / 16, tokens=tokens,
            truncated=sum(not r.finished for r in rollouts) / 16, zero_variance=sum(len({r.reward for r in g}) == 1 for g in groups) / 4,
            pass_at_1=sum(r.grade.score == 1 for r in rollouts) / 16, pass_at_4=sum(any(r.grade.score == 1 for r in g) for g in groups) / 4,
            truncated_score=fmean(r.grade.score for r in rollouts if not r.finished), most_common_share=max(Counter(
                r.text.strip() for r in rollouts).values()) / 16, questions=4 * line["step"], errors=0, skipped_steps=0, updates=1, lr=3e-3, **{"training/global_step": line["step"]},
            **{f"parts/{part}": sum(r.grade.parts[part] for r in rollouts) / 16 for part in ("many", "ended")})
        assert {key: line[key] for key in expected} == pytest.approx(expected)
        assert line["entropy"] > 0 and line["grad_norm"] > 0 and line["rollout_s"] > 0 and line["perf/throughput"] > 0
    first, evaluation = map(json.loads, (out / "metrics.jsonl").read_text().splitlines()[:2])
    assert 0 <= evaluation["val_reward_low"] <= evaluation["val_reward"] < evaluation["val_reward_high"] <= 1
    assert first["config"]["k_samples"] == 4 and set(metrics(out, "val_accuracy")) == {0, 1, 2}
    assert "step 1/2" in (out / "training.log").read_text()
    assert not unknown(out)


def test_every_completion_is_recorded(learn, watched, monkeypatch):
    out = learn(max_steps=2, eval_interval=1, eval_questions=5)
    found = list(records.read(out))
    assert [(r["split"], r["step"]) for r in found] == [*16 * [("train", 1)], *16 * [("train", 2)], *(("valid", s) for s in (0, 1, 2) for _ in range(5))]
    asked = [c for groups in watched.groups for group in groups for c in group]
    for record, c in zip(found, asked):
        assert (record["completion"], record["ids"], record["prompt"], record["score"]) == (c.text, c.ids, c.prompt, c.grade.score)
        assert (record["reward"], record["advantage"], record["trained"], record["parts"]) == (c.reward, c.advantage, c.advantage != 0, c.grade.parts)
        assert record["logprobs"] == pytest.approx(c.logprobs, abs=6e-4) and record["question"] == c.question["question"]
    assert sum(r["score"] == 1 for r in found[-5:]) / 5 == metrics(out, "val_accuracy")[2]
    monkeypatch.setattr(records, "MEGABYTE", 1500)
    small = learn("small", max_steps=3, record=1)
    assert "later completions are not recorded" in learn.said and sum(f.stat().st_size for f in records.files_of(small)) <= 1500
    assert not records.files_of(learn("none", max_steps=1, record="none"))


def test_records_of_steps_that_are_repeated_are_written_once(learn):
    out = learn(max_steps=4, save_interval=2)
    whole = [path.read_bytes() for path in records.files_of(out)]
    (out / "checkpoints/step_00000004").rename(out / "gone")         # as if killed in a step after the second
    (out / "rollouts/train_00000009.0.jsonl.gz.tmp-7").touch()
    learn(max_steps=4, save_interval=2, init_from="resume")
    assert [path.read_bytes() for path in records.files_of(out)] == whole and len(list((out / "rollouts").iterdir())) == len(whole)


REWARD_ALONE = """
def reward(question, completion):
    assert question["unit"] == "m" and question["answer"] == 7
    return min(1, 3 * completion.count("t") / max(1, len(completion)))
"""


def test_a_file_of_questions_and_a_reward_are_enough(learn, tmp_path, watched):
    rows = [{"prompt": f"the {i}", "answer": 7, "unit": "m"} for i in range(40)]
    dataset, task = write(tmp_path, "\n".join(map(json.dumps, rows)), "q.jsonl"), write(tmp_path, REWARD_ALONE, "my_reward.py")
    knobs = dict(task=task, dataset=dataset, reward_pool="process", reward_workers=1)
    out = learn(**knobs, max_steps=11, max_new_tokens=6, eval_interval=11)
    train, held = questions.read_questions(dataset, 200)
    accuracy = metrics(out, "val_accuracy")
    assert held and set(accuracy) == {0, 11} and all(0 <= a <= 1 for a in accuracy.values()) and not any(line["errors"] for line in lines(out))
    assert f"{len(train)} questions of {dataset}, {len(held)} held out" in learn.said
    prompts = {tuple(r.prompt) for groups in watched.groups for g in groups for r in g}
    assert {bytes(p).decode() for p in prompts} == {f"Question: {q['prompt']}\n" for q in train}        # all of them, and no other
    answered = {record["question"] for record in records.read(out) if record["split"] == "valid"}
    assert answered == {q["question"] for q in held}
    alone, none, _ = questions.open_questions(SimpleNamespace(dataset=dataset, eval_questions=9, eval_interval=0, num_questions=None), None)
    assert len(alone) == 40 and not none                             # without an evaluation all of them train
    dataset.write_text(dataset.read_text().replace('"m"', '"cm"'))
    learn(**knobs, code=2, max_new_tokens=6, eval_interval=11, max_steps=12, init_from="resume")
    assert "q.jsonl has changed since the run" in learn.error


def test_a_resumed_run_says_which_task_file_it_executes_and_refuses_another(learn, tmp_path):
    own, trace = write(tmp_path, TASK, "own.py"), tmp_path / "executed"
    out = learn(task=own, max_steps=1)
    noted = json.loads((out / "model.json").read_text())["task"]
    assert noted == {"file": str(own), "sha256": checkpoint.sha256(own)}
    assert "Executing" not in learn.said                             # its user has just named it
    again = ["--init_from=resume", f"--out_dir={out}"]
    learn(argv=[*again, "--max_steps=2"])
    assert learn.said.startswith(f"Executing {own}, unchanged since the run recorded it.\n")
    own.write_text(f"{TASK}\nopen({str(trace)!r}, 'w').close()\n")
    learn(code=2, argv=[*again, "--max_steps=3"])
    assert f"{own} has changed since the run in {out} recorded it" in learn.error
    assert learn.error.count("\n") == 1 and not trace.exists() and not learn.said
    learn(argv=[*again, "--max_steps=3", f"--task={own}"])            # who names it wants it
    assert f"Executing {own}, changed since the run recorded it" in learn.said and trace.exists()
    learn(argv=[*again, "--max_steps=4"])
    assert f"Executing {own}, unchanged since the run recorded it." in learn.said
    about = config.read_sealed(out / "model.json", "")
    (out / "model.json").write_bytes(config.seal(about | {"task": None}))
    learn(code=2, argv=[*again, "--max_steps=5"])                    # the run had none of its own


def test_so_does_training_on_the_text_of_a_task(tmp_path, capsys):
    own = write(tmp_path, TASK, "own.py")
    cfg = train.Config(out_dir=str(tmp_path), init_from="resume", dataset=f"task:{own}:argument")
    (tmp_path / "model.json").write_bytes(config.seal({"task": own_task(cfg)}))
    check_task(cfg, [])
    assert capsys.readouterr().out == f"Executing {own}, unchanged since the run recorded it.\n"
    own.write_text(TASK + "\n")
    with pytest.raises(BadInput, match="recorded it: restore it.*--dataset=task:"):
        check_task(cfg, ["--max_steps=3"])
    for dataset in ("task:countdown", str(own), "task:missing.py"):
        check_task(dataclasses.replace(cfg, dataset=dataset), [])
    # Without a checkpoint the run would begin again, and execute the file all the same.
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.json").unlink()
    for argv, resume in (["--init_from=resume"], None), ([], "auto"):
        with pytest.raises(BadInput, match="model.json can't be read"):
            check_task(dataclasses.replace(cfg, init_from="scratch", resume=resume), argv)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("knobs", [{}, dict(optimizer="muon"), dict(loss_type="dr_grpo", lora_rank=4, learning_rate=0.03)], ids=["default", "muon", "lora"])
def test_it_learns(learn, knobs):
    out = learn(max_steps=30, k_samples=8, **knobs)
    rewards = [line["reward"] for line in lines(out)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2


def test_two_shares_of_a_group_s_noise_differ_and_come_again_with_the_seed(learn, watched):
    learn("a", max_steps=1), learn("b", max_steps=1), learn("c", max_steps=1, seed=1)
    a, b, c = (watched.samples[i:i + 16] for i in (0, 16, 32))
    drawn = [{(s.request.key, s.index): s.ids for s in run} for run in (a, b, c)]
    assert drawn[0] == drawn[1] != drawn[2] and all(len({tuple(ids) for (k, _), ids in drawn[0].items() if k == key}) > 1 for key in range(4))


# --- bad input ---

def refusal(learn, words, **knobs):
    learn(code=2, **knobs)
    assert words in learn.error and learn.error.count("\n") == 1 and learn.error.startswith("error: "), learn.error


@pytest.mark.parametrize("knobs, words", [
    (dict(k_samples=1), "at least 2"), (dict(prompts_per_step=3, mini_batches=2), "--prompts_per_step"),
    (dict(dataset="missing.jsonl"), "missing.jsonl"), (dict(init_from="scratch"), "--init_from="), (dict(reward_workers=0), "reward_workers"),
    (dict(init_from="nowhere/at-all"), "nowhere/at-all"), (dict(task="unknown"), "unknown"), (dict(num_questions=99), "99"), (dict(few_shot=3), "solution"),
    (dict(overlong="penalty", overlong_tokens=13), "--overlong_tokens"), (dict(overlong_tokens=8), "no effect without --overlong=penalty"),
    (dict(max_rounds=2), "--max_rounds=2 has no effect without --dynamic_sampling"), (dict(surgery_buffers="cpu"), "no effect without --surgery"),
    (dict(compile=False, compile_mode="max-autotune"), "--compile_mode=max-autotune has no effect without --compile"),
    (dict(loss_type="cispo", clip_low=0.1), "--clip_low has no effect"), (dict(lora_rank=2, lora_alpha=0), "--lora_alpha"), (dict(clip_low=1), "clip_low"),
    (dict(temperature=0), "temperature"), (dict(max_prompt_tokens=2), "max_prompt_tokens"), (dict(lora_rank=2, lora_linears="heads"), "linears"),
    (dict(init_from="resume"), "config.json"), (dict(k_sample=4), "k_samples"), (dict(tokenizer="gpt2"), "tokenizer")])
def test_what_can_not_be_done_is_one_sentence(learn, tmp_path, knobs, words):
    refusal(learn, words, **knobs)
    assert not (tmp_path / "run").exists()


def test_ranks_that_can_not_share_the_prompts_say_so(learn, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refusal(learn, "split evenly over 3 ranks")


def test_a_dataset_needs_its_verifier(learn, tmp_path):
    dataset = write(tmp_path, '{"prompt": "the 1", "answer": 3}\n' * 3, "q.jsonl")
    words = "--dataset needs a verifier for its answers: add --task=my_reward.py"
    refusal(learn, words, dataset=dataset, task=None)
    assert not (tmp_path / "run").exists()
    config = write(tmp_path, f"dataset = {str(dataset)!r}\ntask = 'my_reward.py'\n", "own.py")
    for argv, task in (([], "unit_conversion"), ([str(config)], "my_reward.py")):
        cfg = grpo.config.load(grpo.Config, argv)
        grpo.check(cfg)
        assert cfg.task == task              # before it is saved


def test_tasks_that_have_nothing_to_ask_are_refused(learn, tmp_path):
    refusal(learn, "no train questions", task=write(tmp_path, TASK.replace("return [{", 'return [] if split == "train" else [{'), "a.py"))
    refusal(learn, "no questions", task=write(tmp_path, "def reward(question, completion):\n    return 1\n", "b.py"))
    refusal(learn, "model's 32 positions", task=write(tmp_path, TASK.replace('PROMPT = "{}"', f'PROMPT = "{"x" * 40}{{}}"'), "c.py"))


def test_a_single_question_that_fits_is_refused(learn, tmp_path):
    """That of the worked example, before which it does not stand."""
    task = write(tmp_path, TASK + "\ndef examples(n):\n    return [('the 0', 't' * 30)]\n", "shown.py")
    refusal(learn, "shown.py but one exceeds", task=task, few_shot=1)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_fills_the_model_is_left_out_and_that_is_said(learn, tmp_path, watched):
    rows = [{"prompt": "the " + "x" * n, "answer": 3} for n in range(20, 34)]
    dataset = write(tmp_path, "\n".join(map(json.dumps, rows)), "q.jsonl")
    out = learn(dataset=dataset)
    kept = {len(q["prompt"]) for q in rows}
    short = {n for n in kept if n < 32}
    assert f"{len(short)} questions of" in learn.said and f"{len(kept - short)} dropped as too long" in learn.said and len(lines(out)) == 4
    assert len(short) > 5 and {len(s.request.ids) for s in watched.samples} == short and all(len(s.request.ids) + len(s.ids) <= 32 for s in watched.samples)
    refusal(learn, "and a step needs 8: lower", dataset=dataset, prompts_per_step=8, max_prompt_tokens=26)
    learn("short", dataset=dataset, prompts_per_step=2, max_prompt_tokens=26, max_steps=1)
    assert f"{len([n for n in kept if n <= 26])} questions of" in learn.said


def test_a_model_is_not_overwritten_by_what_is_learnt_from_it(learn, base, tmp_path):
    before = checkpoint_files(base)
    refusal(learn, "is both --out_dir and --init_from", out_dir=base, overwrite=True)
    out = learn(max_steps=1)
    refusal(learn, "already holds a run", max_steps=1)
    refusal(learn, "lora_rank=2", init_from="resume", lora_rank=2)
    refusal(learn, "optimizer=muon", init_from="resume", optimizer="muon", max_steps=2)
    refusal(learn, "base.safetensors: leave --beta out if the run began without it", init_from="resume", beta=0.1, max_steps=2)
    assert config.read_saved(out)["beta"] == 0               # later resumes don't take what was refused
    assert checkpoint_files(base) == before and checkpoint.steps(out) == [1]
    learn("again", init_from=out, max_steps=1)
    assert same(checkpoint.load_weights(out, 1), checkpoint_of_base(tmp_path / "again"))


def checkpoint_files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
