"""A GPU computes what the CPU does: attention, loss, gradients, optimizers, a resumed run. Each test takes seconds on one."""
import copy
import functools
import math
import time
from types import SimpleNamespace

import pytest
import torch

import forked
from conftest import command, environment, largest_difference, metrics, trained, weights
from layers.ops import ATTENTION
from model import GPT, GPTConfig, IGNORE, Prompts
from runtime import distributed, hardware, optim
from test_engine import SHAPES
from test_grpo import GRPO, TASK

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = [1, 2, 7, 64, 100, 192, 1024]
# name: (of ops.ATTENTION, the only kernel that PyTorch may take)
WAYS = {kind: (kind, None) for kind in ATTENTION} | {
    "flash": ("sdpa", "flash"), "cudnn": ("sdpa", "cudnn"), "efficient": ("sdpa_repeated", "efficient")}
# A tensor's distance from the reference, as a share of its length. TF32 in place of fp32 would be off by 5e-4.
ATTENTION_OFF = {"fp32": 1e-4, "fp16": 3e-3, "bf16": 2e-2}
MODEL_OFF = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


def off(ours, reference, at_least=0.0):
    """The distance of two tensors, or lists of them, over the length of the second, or over what that is at least."""
    if isinstance(ours, torch.Tensor):
        ours, reference = [ours], [reference]
    difference = math.hypot(*((a.double().cpu() - b.double().cpu()).norm().item() for a, b in zip(ours, reference, strict=True)))
    return difference / max(at_least, math.hypot(*(b.double().norm().item() for b in reference)))


# --- reinforcement learning ---

@pytest.mark.parametrize("knobs", [dict(compile=True), {}, dict(lora_rank=4, learning_rate=0.03)], ids=["compiled", "whole", "lora"])
def test_reinforcement_learning_climbs(knobs, tmp_path, text, card):
    """In bf16, GRPO with LoRA once fell where fp32 rose, though losses and gradients agreed with the CPU's."""
    knobs = dict(compile=False) | knobs
    trained(tmp_path / "base", text, learning_rate=0.02, device=card.type, compile=False)
    (tmp_path / "letters.py").write_text(TASK)
    old = card.type == "cuda" and torch.cuda.get_device_capability(card) < (8, 0)            # without bf16
    options = GRPO | dict(init_from=tmp_path / "base", task=tmp_path / "letters.py", max_steps=30, k_samples=8, dtype="fp16" if old else "bf16",
                          device=card.type)
    line = command(tmp_path / "run", script="grpo.py", defaults=options, **knobs)
    done = forked.run(line, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "torch.compile failed" not in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    rewards = [*metrics(tmp_path / "run", "reward").values()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards


# --- attention ---

def ways(names):
    """(way, dtype) that can be had: flash and cuDNN have no fp32."""
    return [(way, dtype) for way in names for dtype in DTYPES if dtype != "fp32" or way not in ("flash", "cudnn")]


def exact_attention(q, k, v, mask):
    """Attention as it is defined, in fp64."""
    T, heads = q.shape[1:3]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    if mask is None:
        mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[3]) + mask
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def wait(card):
    if card.type == "cuda":
        torch.cuda.synchronize()


def compare_attention(way, dtype, kv_heads, T, card, mask, record_property):
    """Results and gradients beside those in fp64 of the same rounded inputs, which lie in memory as the model has them."""
    kind, kernel = WAYS[way]
    if kernel == "cudnn" and (torch.backends.cudnn.version() or 0) <= hardware.CUDNN_VERSION:
        pytest.skip(f"cuDNN {torch.backends.cudnn.version()} is not asked for attention")
    torch.manual_seed(T)
    B, heads, D = 2, 6, 64
    S = T if mask is None else mask.shape[-1]
    queries = torch.randn(B, T, heads, D).to(card, DTYPES[dtype]).requires_grad_()
    keys_values = torch.randn(B, S, 2 * kv_heads, D).to(card, DTYPES[dtype]).requires_grad_()
    dy = torch.randn(B, T, heads, D).to(card, DTYPES[dtype])
    wait(card)
    start = time.perf_counter()
    try:
        with hardware.sdpa_order([kernel]) if kernel else hardware.sdpa_order():
            y = ATTENTION[kind](queries, *keys_values.chunk(2, dim=2), **({} if mask is None else {"mask": mask}))
            found = [y, *torch.autograd.grad(y, (queries, keys_values), dy)]
    except RuntimeError as e:
        if "No available kernel" in str(e) or "No viable backend" in str(e):         # a GPU's words, and a CPU's
            pytest.skip(f"no {kernel} kernel for {dtype} here")
        raise
    wait(card)
    record_property("first_call_s", round(time.perf_counter() - start, 4))
    exact = [x.detach().double().requires_grad_() for x in (queries, keys_values)]
    y = exact_attention(exact[0], *exact[1].chunk(2, dim=2), None if mask is None else mask.double())
    expected = [y, *torch.autograd.grad(y, exact, dy.double())]
    dv = expected[2].norm().item()           # a query that sees one key has no gradient
    errors = [off(a, b, 0.1 * dv) for a, b in zip(found, expected)]
    record_property("error", max(errors))
    assert max(errors) < ATTENTION_OFF[dtype], errors


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kv_heads", [6, 2], ids=["", "grouped"])
@pytest.mark.parametrize("way, dtype", ways(WAYS))
def test_attention(way, dtype, kv_heads, T, card, record_property):
    compare_attention(way, dtype, kv_heads, T, card, None, record_property)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kv_heads", [6, 2], ids=["", "grouped"])
@pytest.mark.parametrize("way, dtype", ways(ATTENTION))
def test_attention_with_a_mask(way, dtype, kv_heads, T, card, record_property):
    """Of rows that continue prompts of 5 and of 3 tokens."""
    prompts = Prompts(torch.zeros(2, 5, dtype=torch.long), torch.tensor([5, 3]), torch.tensor([0, 1]))
    mask = prompts.mask(T, DTYPES[dtype]).to(card)
    compare_attention(way, dtype, kv_heads, T, card, mask, record_property)


# --- loss, log-probabilities and their gradients ---

def make(shape, attention="sdpa", **knobs):
    """A small GPT, none of whose gradients are zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(vocab_size=500, block_size=192, n_layer=2, n_head=4, n_embd=64) | SHAPES[shape] | knobs), attention)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def inputs(device):
    """x and y [3, 100], some of which is not trained on."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(500, (3, 100), generator=g)
    y = torch.randint(500, (3, 100), generator=g)
    y[0, :40] = IGNORE
    return x.to(device), y.to(device)


def loss_of(model, device):
    return model.loss(*inputs(device))


def logprobs_of(model, device):
    """The one place where tests that are marked gpu ask for log-probabilities: of rows that continue two prompts."""
    x, y = inputs(device)
    kept = torch.tensor([*range(47), *range(60, 60 + x.numel())], device=device)
    prompts = Prompts(x[:2, :30], torch.tensor([30, 17], device=device), torch.tensor([0, 1, 1], device=device), kept)
    logprobs, _ = model.token_logprobs(x, y, 0.9, prompts)
    return -logprobs.sum()


def divergence_of(model, device):
    """The divergence from a teacher of another width, after the same prompts; and the cross entropy."""
    x, y = inputs(device)
    prompts = Prompts(x[:2, :30], torch.tensor([30, 17], device=device), torch.tensor([0, 1, 1], device=device))
    target_index = (y.flatten() != IGNORE).nonzero()[:, 0]
    teacher = make("gpt2", n_embd=32).to(device)
    return sum(model.divergence(teacher, x, y, 0.9, prompts, target_index))


def loss_and_gradients(what, model, device, dtype):
    """[the loss, the gradients of all weights]; model: a GPT, or what trains one. fp16's gradients are scaled meanwhile."""
    with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32"):
        loss = what(model, device)
    scale = 64.0 if dtype == "fp16" else 1.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
    return [loss.detach(), [g.float() / scale for g in gradients if g is not None]]


@functools.cache
def on_the_cpu(what, shape):
    """The same in fp32 on the CPU."""
    return loss_and_gradients(what, make(shape), torch.device("cpu"), "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("what", [loss_of, logprobs_of, divergence_of])
def test_loss_and_gradients(what, attention, shape, dtype, card, record_property):
    expected_loss, expected = on_the_cpu(what, shape)
    loss, gradients = loss_and_gradients(what, make(shape, attention).to(card), card, dtype)
    errors = off(loss, expected_loss), off(gradients, expected)
    record_property("error", max(errors))
    assert max(errors) < MODEL_OFF[dtype], errors


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [("favor", "sum"), ("favor", "delta"), ("linear", "sum"), ("linear", "delta")], ids="-".join)
def test_attention_of_linear_cost(kind, deterministic, card, record_property):
    """Also where kernels whose result varies are refused."""
    mixer, rule = kind
    models = [make("grouped", mixer=mixer, mixer_rule=rule, mixer_features=48) for _ in range(2)]
    expected_loss, expected = loss_and_gradients(loss_of, models[0], torch.device("cpu"), "fp32")
    torch.use_deterministic_algorithms(deterministic)
    try:
        loss, gradients = loss_and_gradients(loss_of, models[1].to(card), card, "fp32")
    finally:
        torch.use_deterministic_algorithms(False)
    errors = off(loss, expected_loss), off(gradients, expected)
    record_property("error", max(errors))
    assert max(errors) < MODEL_OFF["fp32"], errors


# --- the optimizers' step ---

@pytest.mark.parametrize("optimizer, compile", [("adamw", False), ("muon", False), ("muon", True)])
def test_steps_of_an_optimizer(optimizer, compile, card, record_property):
    """Three steps, with gradients that are the same on both. Muon's products may be in bf16 on one
    of them alone, which is off by 1.1% on a CPU."""
    moved = []
    for device in (card, torch.device("cpu")):
        model = make("default").to(device)
        optimizers = optim.build(model, optimizer, 0.01, weight_decay=0.1, hardware=SimpleNamespace(compile=compile, dtype="auto"))
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(device)
            optim.apply_step(optimizers, torch.amp.GradScaler(device.type, enabled=False), 0.01, 1.0)
        moved.append([p.detach() - old for p, old in zip(model.parameters(), before)])
    errors = [off(*pair) for pair in zip(*moved)]
    record_property("error", max(errors))
    assert max(errors) < (0.05 if optimizer == "muon" else 1e-3), errors


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_in_fp16_that_overflows_is_skipped(optimizer, card):
    """The scale falls, no weight moves; the next step is taken."""
    model = make("gpt2").to(card)
    optimizers = optim.build(model, optimizer, 0.01)
    scaler = torch.amp.GradScaler(card.type, init_scale=2.0**40)
    before = copy.deepcopy(model.state_dict())
    for overflows in (True, False):
        with torch.autocast(card.type, torch.float16):
            loss = loss_of(model, card) / 260
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        norm, finite = optim.apply_step(optimizers, scaler, 0.01, 1.0)
        assert finite == math.isfinite(norm) == (not overflows)
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        unmoved = largest_difference(before, model.state_dict()) == 0
        assert unmoved == overflows
        scaler.update(2.0**8)


# --- what is compiled, and a run ---

@pytest.mark.parametrize("what, dtype", [(loss_of, "fp32"), (loss_of, "bf16"), (logprobs_of, "bf16")])
def test_compiled_is_eager(what, dtype, card, record_property):
    eager_loss, eager = loss_and_gradients(what, make("grouped").to(card), card, dtype)
    compiled = distributed.TrainedModel(make("grouped").to(card), compile=True, dynamic=what is logprobs_of)
    start = time.perf_counter()
    loss, gradients = loss_and_gradients(what, compiled, card, dtype)
    wait(card)
    record_property("compile_s", round(time.perf_counter() - start, 2))
    errors = off(loss, eager_loss), off(gradients, eager)
    record_property("error", max(errors))
    assert max(errors) < MODEL_OFF[dtype], errors


@pytest.mark.parametrize("what", [loss_of, logprobs_of])
def test_cuda_graphs_accumulate_the_gradients_of_micro_steps(what, card):
    """The first micro-step warms up, the second records, the others replay."""
    if card.type != "cuda":
        pytest.skip("a CPU has no CUDA graphs")
    gradients = []
    for compiled in (False, True):
        model = distributed.TrainedModel(make("grouped").to(card), compiled, "reduce-overhead", dynamic=what is logprobs_of)
        for _ in model.micro_steps([None] * 4):
            with torch.autocast(card.type, torch.bfloat16):
                loss = what(model, card)
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    eager, graphs = gradients
    assert off(graphs, eager) < MODEL_OFF["bf16"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_resumed_run_is_the_same_bit_for_bit(compiled, tmp_path, text, card):
    knobs = {"device": card.type, "deterministic": True, "compile": compiled, "dropout": 0.1, "n_kv_head": 1}
    trained(tmp_path / "a", text, **knobs)
    whole = weights(tmp_path / "a")
    losses = metrics(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step_00000020").rename(tmp_path / "gone")       # as if killed before step 20
    done = trained(tmp_path / "a", text, init_from="resume", **knobs)
    assert "steps 10 to 20" in done.stdout
    assert largest_difference(weights(tmp_path / "a"), whole) == 0 and metrics(tmp_path / "a") == losses
