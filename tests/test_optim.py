import copy
import math
from types import SimpleNamespace

import pytest
import torch

import forked
from conftest import ROOT, environment
from model import GPT, GPTConfig
from runtime import hardware, optim, recovery
from runtime.state import NonFinite


def lrs(schedule, warmup=10, n=100, **kw):
    return [optim.lr_at(s, n, 1.0, 0.1, warmup, schedule, **kw) for s in range(n)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_warm_up_linearly_then_never_rise(schedule):
    rates = lrs(schedule)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in zip(rates[9:], rates[10:])) and min(rates[10:]) >= 0.1
    assert rates[-1] == (1.0 if schedule == "constant" else pytest.approx(0.1, abs=0.06))


def test_schedules_have_their_shape():
    assert lrs("cosine", 0)[50] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert lrs("linear", 0)[50] == pytest.approx(0.55)
    wsd = lrs("wsd", cooldown=0.2)
    assert wsd[79] == 1.0 and wsd[90] == pytest.approx(0.55)


def test_muon_gets_the_matrices_inside_the_blocks_and_adamw_the_rest():
    model = GPT(GPTConfig(vocab_size=64, n_layer=2, n_head=2, n_embd=32, block_size=8, qkv_bias=True))
    adamw, muon = optim.build(model, "muon", weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    by_muon = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    assert by_muon == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    decayed = {names[id(p)] for g in adamw.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {"token_embedding.weight", "head.weight"}
    assert len(by_muon) + sum(len(g["params"]) for g in adamw.param_groups) == len(names)
    (only,) = optim.build(model, "adamw")
    assert sum(len(g["params"]) for g in only.param_groups) == len(names)


@pytest.mark.parametrize("at_a_time", [2**25, 32 * 96])
def test_muon_equals_pytorch_s(at_a_time, monkeypatch):
    monkeypatch.setattr(optim, "MUON_BATCH", at_a_time)
    monkeypatch.setattr(optim, "muon_dtype", lambda *given: torch.bfloat16)
    shapes = [(32, 96), (96, 32), (32, 96), (32, 32), (32, 96)]
    mine, theirs = ([torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)]
                    for _ in range(2))
    ours = optim.Muon(mine, lr=0.02, weight_decay=0.1, momentum=0.9)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for i, (p, q) in enumerate(zip(mine, theirs)):
            p.grad = q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        if step == 1:
            mine[3].grad = theirs[3].grad = None
        if step == 2:                         # a state of theirs is one of ours
            ours.load_state_dict(copy.deepcopy(other.state_dict()) | {"param_groups": ours.state_dict()["param_groups"]})
        before = [q.detach().clone() for q in theirs]
        ours.step()
        other.step()
        for p, q, old in zip(mine, theirs, before):
            assert (p - q).norm() <= 0.01 * (q - old).norm()             # of the step: bf16 rounds it


def test_muon_compiled_does_the_same(monkeypatch):
    """With --compile on a GPU; else nothing is compiled."""
    moved = []
    for devices, compile in (((), True), (("cpu",), False), (("cpu",), True)):
        monkeypatch.setattr(optim, "COMPILE_ON", devices)
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32, block_size=8))
        _, muon = optim.build(model, "muon", 0.01, hardware=SimpleNamespace(compile=compile, dtype="auto"))
        assert muon.is_compiled == (devices == ("cpu",) and compile)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        before = model.blocks[0].mlp.up.weight.detach().clone()
        muon.step()
        moved.append(model.blocks[0].mlp.up.weight.detach() - before)
    whole, _, compiled = moved
    assert 0 < whole.norm() and (compiled - whole).norm() <= 0.02 * whole.norm()         # bf16 is rounded elsewhere


def test_muon_s_update_is_the_same_in_fp32_but_for_rounding():
    x = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(0))
    knobs = dict(coefficients=(3.4445, -4.775, 2.0315), steps=5, eps=1e-7)
    exact = optim.newton_schulz(x, **knobs, dtype=torch.float32)
    rounded = optim.newton_schulz(x.bfloat16(), **knobs, dtype=torch.bfloat16).float()
    assert 0 < (exact - rounded).norm() < 0.02 * exact.norm()
    assert optim.muon_dtype(torch.device("cpu")) == (torch.bfloat16 if hardware.cpu_multiplies_bf16() else torch.float32)
    assert optim.muon_dtype(torch.device("cpu"), in_fp32=True) == torch.float32


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])            # of fp16 the first is 0 and the last infinite
def test_muon_in_fp16_takes_gradients_of_any_size(monkeypatch, size):
    """For cards without bf16, such as Turing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index else (8, 0))
    assert optim.muon_dtype(torch.device("cuda:1")) == torch.float16 and optim.muon_dtype(torch.device("cuda:0")) == torch.bfloat16
    gradient = size * torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(0))
    moved = {}
    for dtype in (torch.float32, torch.float16):
        monkeypatch.setattr(optim, "muon_dtype", lambda *given: dtype)
        matrices = [torch.nn.Parameter(torch.zeros(32, 96)) for _ in gradient]
        for p, g in zip(matrices, gradient):
            p.grad = g.clone()
        optim.Muon(matrices, lr=1.0, weight_decay=0.0, eps=1e-20).step()
        moved[dtype] = torch.stack([p.detach() for p in matrices])
    exact, rounded = moved.values()
    assert 0 < (exact - rounded).norm() < 0.01 * exact.norm()


def test_ddp_ranks_divide_muon_s_matrices():
    """Two of five matrices go to one rank, three to the other; weights equal those of one process."""
    program = """
import torch
from runtime import distributed, optim
distributed.init()
computed = []
newton_schulz = optim.newton_schulz
def counted(x, **knobs):
    computed.append(len(x))
    return newton_schulz(x, **knobs)
optim.newton_schulz = counted
weights = []
for devices in ((), ("cpu",)):
    optim.DIVIDE_ON = devices
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.zeros(16, 24)) for _ in range(5)]
    muon = optim.Muon(matrices, lr=0.1)
    for _ in range(3):
        for p in matrices:
            p.grad = torch.randn(16, 24, generator=generator)
        muon.step()
    weights.append(torch.stack([p.detach() for p in matrices]))
torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
said = distributed.gather(computed)
if distributed.is_main():
    print(said)
distributed.close()
"""
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[[5, 5, 5, 3, 3, 3], [5, 5, 5, 2, 2, 2]]\n", done.stderr


def stepped(gradients, clip=0.0, scale=None):
    p = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([p], lr=9.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    p.grad = scaler.scale(torch.tensor(gradients))
    result = optim.apply_step([sgd], scaler, lr=1.0, grad_clip=clip)
    assert p.grad is None
    return p.detach(), result, scaler


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_apply_step_clips_after_unscaling(scale):
    p, (norm, finite), _ = stepped([3.0, 0.0, 4.0], scale=scale)
    torch.testing.assert_close(p, torch.tensor([-2.0, 1.0, -3.0]))
    assert norm == pytest.approx(5.0) and finite
    p, (norm, _), _ = stepped([3.0, 0.0, 4.0], clip=1.0, scale=scale)
    torch.testing.assert_close(p, torch.tensor([0.4, 1.0, 0.2]), atol=1e-4, rtol=0)
    assert norm == pytest.approx(5.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_apply_step_moves_nothing_on_a_non_finite_gradient(bad):
    p, (_, finite), _ = stepped([1.0, bad, 1.0], clip=1.0)
    assert not finite and torch.equal(p, torch.ones(3))
    p, (_, finite), scaler = stepped([1.0, bad, 1.0], scale=1024.0)
    assert not finite and torch.equal(p, torch.ones(3)) and scaler.get_scale() == 512.0


def test_non_finite_policy_skips_then_rolls_back(monkeypatch):
    monkeypatch.setattr(recovery, "roll_back", lambda run: rolled_back.append(run.state.skipped))
    rolled_back, scale = [], 1.0
    run = SimpleNamespace(nonfinite=NonFinite(patience=3), state=SimpleNamespace(skipped=0), step=0, log=SimpleNamespace(say=lambda _: None),
                          scaler=SimpleNamespace(get_scale=lambda: scale))
    for finite in (False, False, True, False, False, False):
        recovery.after_step(run, finite)
    assert rolled_back == [5] and run.nonfinite.in_a_row == 3
    recovery.after_step(run, True)
    scale = 2.0**16                          # fp16 finding its scale
    for _ in range(9):
        recovery.after_step(run, False)
    assert rolled_back == [5] and run.nonfinite.in_a_row == 0 and run.state.skipped == 14
