"""PCGrad against the published algorithm, and in runs of grpo.py."""
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import forked
import grpo
from conftest import ROOT, environment, failure, flags, in_process, largest_difference, metrics, weights
from experimental.pcgrad import PCGrad, project
from runtime import checkpoint
from test_grpo import GRPO, TASK, base, learn, letters, lines, one_thread, same, write        # noqa: F401 (fixtures)

# --- the algorithm ---


def directly(gradients, orders):
    """Return PCGrad's gradient, by algorithm 1 of Yu et al. 2020 on the gradients themselves."""
    total = torch.zeros_like(gradients[0])
    for i, order in enumerate(orders):
        mine = gradients[i].clone()
        for j in order:
            if j != i and mine @ gradients[j] < 0:
                mine -= (mine @ gradients[j]) / (gradients[j] @ gradients[j]) * gradients[j]
        total += mine
    return total


def some(kind, K, seed=0):
    """Return K gradients, float64 [K, 20]."""
    generator = torch.Generator().manual_seed(100 * K + seed)
    gradients = torch.randn(K, 20, generator=generator, dtype=torch.float64)
    if kind == "zero":
        gradients[K // 2] = 0
    if kind == "duplicates":
        gradients[-1] = gradients[0]
    if kind == "opposites":
        gradients[-1] = -2 * gradients[0]
    if kind == "unlike in size":
        gradients *= 10.0 ** torch.arange(-3, K - 3, dtype=torch.float64)[:, None]
    return gradients


KINDS = ("random", "zero", "duplicates", "opposites", "unlike in size")


@pytest.mark.parametrize("K", range(2, 7))
@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_equal_the_published_algorithm(kind, K):
    for seed in range(20):
        gradients = some(kind, K, seed)
        orders = [torch.randperm(K, generator=torch.Generator().manual_seed(seed + i)).tolist() for i in range(K)]
        expected = directly(gradients, orders)
        ours = project(gradients @ gradients.T, orders) @ gradients
        assert (ours - expected).norm() <= 1e-12 * gradients.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_equal_torchjd(kind):
    """torchjd draws its orders from the global generator."""
    weighting = pytest.importorskip("torchjd.aggregation", reason="pip install torchjd").PCGradWeighting()
    for K in range(2, 7):
        gradients = some(kind, K)
        torch.manual_seed(K)
        orders = [torch.randperm(K).tolist() for _ in range(K)]
        torch.manual_seed(K)
        expected = weighting(gradients @ gradients.T) @ gradients
        ours = project(gradients @ gradients.T, orders) @ gradients
        assert (ours - expected).norm() <= 1e-12 * gradients.norm()


# --- on a model ---

def lent(kind="pcgrad", buffers="device", domains=("a", "b", "c"), seed=0, scale=1.0):
    """Return a PCGrad on two small layers, the layers and the run."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    cfg = grpo.Config(surgery=kind, surgery_buffers=buffers, seed=seed)
    run = SimpleNamespace(model=model, step=0, hardware=SimpleNamespace(device=torch.device("cpu")),
                          scaler=SimpleNamespace(get_scale=lambda: scale))
    return PCGrad(cfg, run, SimpleNamespace(domains=list(domains))), model, run


def step_of(surgery, model, sign=1.0):
    """The gradients that a step of three micro-batches of three domains leaves; those of "b" point the other way
    when the sign is -1."""
    trained = SimpleNamespace(micro_steps=lambda batches, empty: batches)
    inputs = torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(2))
    steps = [("a", 0), ("b", 1), ("c", 2), ("c", 2)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("experimental.pcgrad.micro_batches", lambda completions, tokens, multiple: completions)
        if surgery:
            surgery.split = lambda completions: [[step for step in completions if step[0] == domain] for domain in surgery.domains]
            steps = surgery.micro_steps(trained, steps, 1, 1)
        for domain, number in steps:
            (model(inputs[number]).sum() * (sign if domain == "b" else 1.0)).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("buffers, off", [("device", 1e-6), ("cpu", 1e-6), ("bf16", 1e-2)])
def test_without_conflicts_a_step_equals_the_plain_one(buffers, off):
    plain = step_of(None, lent()[1])
    surgery, model, _ = lent(buffers=buffers)
    operated = step_of(surgery, model)
    assert surgery.figures["surgery/conflicts"] == 0 and (plain - operated).norm() <= off * plain.norm()
    assert surgery.figures["surgery/norm_after"] == pytest.approx(surgery.figures["surgery/norm_before"])
    assert surgery.figures["surgery/norm_before"] == pytest.approx(plain.norm().item(), rel=off)


def test_with_conflicts_a_step_follows_the_algorithm():
    surgery, model, _ = lent()
    kept = []
    take = surgery.take

    def taken():
        kept.append(take())
        return kept[-1]
    surgery.take = taken
    operated = step_of(surgery, model, sign=-1.0)
    gradients = torch.stack([torch.cat([g.flatten() for g in gradients]).double() for gradients in kept])
    again, _, _ = lent()
    expected = directly(gradients, again.orders())
    assert (operated - expected).norm() <= 1e-6 * expected.norm()
    assert (operated - gradients.sum(0)).norm() > 0.1 * expected.norm()
    assert surgery.figures["surgery/conflicts"] == pytest.approx(2 / 3)
    assert surgery.figures["surgery/cosine/a/b"] == pytest.approx(torch.cosine_similarity(gradients[0], gradients[1], 0).item())
    assert surgery.figures["surgery/norm_after"] == pytest.approx(expected.norm().item())


def test_orders_depend_on_seed_step_and_optimizer_step():
    def orders(seed, steps):
        surgery, _, run = lent(seed=seed, domains="abcdef")
        found = []
        for run.step in steps:
            found.append(surgery.orders())
        return found
    first = orders(0, [0, 0, 1, 1, 2])
    assert len({str(order) for order in first}) == 5                       # in a step twice: two orders
    assert orders(0, [2]) == first[4:] and orders(0, [1, 1]) == first[2:4]           # after a resume the same
    assert orders(1, [2]) != first[4:]
    assert all(sorted(order) == list(range(6)) for order in first[0])


def test_a_non_finite_gradient_spreads():
    """So the step is skipped like any other."""
    surgery, model, _ = lent()
    assert not step_of(surgery, model, sign=float("nan")).isfinite().all()
    assert math.isnan(surgery.figures["surgery/norm_before"])                # and not 0
    assert [name for name in surgery.figures if "cosine" in name] == ["surgery/cosine/a/c"]


@pytest.mark.parametrize("buffers, a_number", [("device", 4), ("bf16", 2)])
def test_memory_is_a_gradient_for_each_domain(buffers, a_number):
    surgery, model, _ = lent(buffers=buffers)
    numbers = sum(p.numel() for p in model.parameters())
    assert surgery.bytes() == 3 * a_number * numbers
    step_of(surgery, model)
    taken = surgery.take()
    assert sum(g.numel() * g.element_size() for g in taken) == a_number * numbers


def test_logged_norms_exclude_the_loss_scale():
    plain, model, _ = lent()
    step_of(plain, model)
    scaled, model, _ = lent(scale=0.5)
    step_of(scaled, model)
    assert scaled.figures["surgery/norm_after"] == pytest.approx(2 * plain.figures["surgery/norm_after"])
    assert scaled.figures["surgery/cosine/a/c"] == plain.figures["surgery/cosine/a/c"]


# --- in runs ---

# What earns the one and the other at the same prompts is opposite, so their gradients conflict.
OTHER = TASK.replace('completion.count("t")', '(len(completion) - completion.count("t"))').replace(
    '(words if split == "train"', '([w + "!" for w in words] if split == "train"')


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return f"{write(folder, TASK)}+{write(folder, OTHER, 'others.py')}"


def test_conflicts_are_projected_out(learn, mixed):
    plain = learn("plain", task=mixed, max_steps=2)
    operated = learn("operated", task=mixed, max_steps=2, surgery="pcgrad")
    first, second = lines(plain)[0], lines(operated)[0]
    assert first["reward"] == second["reward"] and second["surgery/conflicts"] in (0.0, 1.0)
    conflicts = [line for line in lines(operated) if line["surgery/conflicts"]]
    assert conflicts and all(line["surgery/norm_after"] > line["surgery/norm_before"] for line in conflicts)
    assert first["grad_norm"] == pytest.approx(second["surgery/norm_before"], rel=1e-4)
    assert second["grad_norm"] == pytest.approx(second["surgery/norm_after"], rel=1e-4)
    assert not same(weights(plain, 2), weights(operated, 2))


@pytest.mark.parametrize("knobs", [dict(), dict(mini_batches=2, inner_epochs=2, beta=0.1), dict(tokens_per_micro_batch=32)], ids=str)
def test_a_single_task_is_unchanged(learn, letters, knobs):
    plain = learn("plain", max_steps=2, **knobs)
    operated = learn("operated", max_steps=2, surgery="pcgrad", **knobs)
    assert same(weights(plain, 2), weights(operated, 2)) and "surgery/conflicts" not in lines(operated)[0]


def test_a_mixture_resumes_bit_for_bit(learn, mixed):
    """Stopped midway, with PCGrad, several optimizer steps and skipped questions."""
    knobs = dict(task=mixed, surgery="pcgrad", mini_batches=2, skip_solved=1, max_steps=6, save_interval=3)
    whole = learn("whole", **knobs)
    stopped = learn("stopped", **knobs)
    shutil.rmtree(checkpoint.step_folder(stopped, 6))
    learn(argv=["--init_from=resume", f"--out_dir={stopped}"], name="stopped")
    assert "step 4/6" in learn.said and "step 3/6" not in learn.said
    assert same(weights(whole, 6), weights(stopped, 6))
    mine, theirs = ([{k: v for k, v in line.items() if "/" in k and not k.startswith("perf/")} for line in lines(run)] for run in (stopped, whole))
    assert mine == theirs


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_agree_with_one_process(base, mixed, tmp_path, parallel):
    shared = GRPO | dict(init_from=base, task=mixed, max_steps=3, save_interval=1, surgery="pcgrad", eval_interval=3, eval_questions=6,
                         tokens_per_micro_batch=96)
    in_process(grpo.main, flags(**shared, out_dir=tmp_path / "one"))
    line = [*forked.TORCHRUN, "--nproc_per_node=2", ROOT / "grpo.py", *flags(**shared, out_dir=tmp_path / "two", parallel=parallel)]
    done = forked.run(line, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, failure(done)
    for key in ("reward", "surgery/conflicts", "surgery/norm_before", "surgery/norm_after", "grad_norm"):
        ours, theirs = metrics(tmp_path / "two", key), metrics(tmp_path / "one", key)
        assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in theirs), key
    assert largest_difference(weights(tmp_path / "two", 3), weights(tmp_path / "one", 3)) < 1e-5
