"""Feedback in place of backpropagation, blocks that are frozen, and the orthogonality penalty: against what they are defined as,
and in runs of train.py."""
import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train
from conftest import TINY, count_graphs, flags, largest_difference, metrics, trained, weights
from experimental import feedback, orthogonality
from model import GPT, GPTConfig
from runtime import checkpoint, config, distributed, hardware, memory, optim
from runtime.config import BadInput

SHAPE = dict(vocab_size=61, block_size=16, n_layer=3, n_head=2, n_embd=24)
KINDS = {
    "feedback": dict(backward="feedback"),
    "shared": dict(backward="feedback", feedback_matrix="shared"),
    "identity": dict(backward="feedback", feedback_matrix="identity"),
    "micro": dict(backward="feedback_micro"),
    "micro shared": dict(backward="feedback_micro", feedback_matrix="shared"),
    "favor": dict(backward="feedback", mixer="favor", mixer_features=16),
    "micro delta": dict(backward="feedback_micro", mixer="linear", mixer_rule="delta"),
}


def batch(rows=6, seed=1):
    ids = torch.randint(61, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def learn(model, steps, seed=1):
    """Take so many steps of Muon and AdamW on a few sentences."""
    x, y = batch(seed=seed)
    optimizers = optim.build(model, "muon", fused=False)
    for _ in range(steps):
        (model.loss(x, y) / y.numel()).backward()
        optim.apply_step(optimizers, hardware.setup("cpu", dtype="fp32").scaler(), 0.01, 1.0)
    return model


@pytest.fixture(scope="module")
def tuned():
    """Return a function: options -> a model after 20 steps of backpropagation, with feedback attached."""
    @functools.cache
    def state(**shape):
        torch.manual_seed(0)
        return learn(GPT(GPTConfig(**SHAPE, **shape)), 20).state_dict()

    def get(gradient_checkpointing=False, **knobs):
        shape = only_shape(knobs)
        model = GPT(GPTConfig(**SHAPE, **shape), gradient_checkpointing=gradient_checkpointing)
        model.load_state_dict(state(**shape))
        feedback.attach(model, train.Config(**knobs))
        return model
    return get


def only_shape(knobs):
    return {name: value for name, value in knobs.items() if name.startswith("mixer")}


def gradients(model, x=None, y=None, scale=1.0, autocast=False):
    """{name: gradient} of the mean loss, of a batch."""
    if x is None:
        x, y = batch()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.loss(x, y)
    (loss / y.numel() * scale).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def learned(module):
    """The named parameters that can learn; a mixer has others."""
    return [(name, p) for name, p in module.named_parameters() if not name.endswith("mixer.vectors")]


def of(name):
    """Return the block of a weight, None outside the blocks."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


# --- what a block gets ---

@pytest.mark.parametrize("kind", KINDS)
def test_lower_blocks_get_another_gradient_and_the_top_the_true_one(tuned, kind):
    """The gradients of lower blocks differ in direction; those of the top are equal bit for bit. (-s prints by how much.)"""
    true = gradients(tuned(**only_shape(KINDS[kind])))
    ours = gradients(tuned(**KINDS[kind]))
    assert ours.keys() == true.keys()
    exact = [name for name in true if torch.equal(ours[name], true[name])]
    top = [name for name in true if of(name) in (2, None) and "embedding" not in name]
    if kind.startswith("micro"):             # whose top block is cut in three: the last of them
        top = [name for name in top if of(name) is None or "mlp.down" in name]
    assert exact == top
    cosines = {name: torch.cosine_similarity(ours[name].flatten(), true[name].flatten(), 0).item() for name in true}
    for i in range(3):
        in_block = [c for name, c in cosines.items() if of(name) == i and true[name].ndim == 2]
        print(f"{kind}, block {i}: mean cosine with backpropagation's gradient {sum(in_block) / len(in_block):+.2f}")
    matrices = {name: c for name, c in cosines.items() if name not in top and true[name].ndim == 2}
    assert max(matrices.values()) < (0.995 if kind == "identity" else 0.9), matrices
    assert all(gradient.abs().max() > 0 for gradient in ours.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_gets_the_error_at_the_top_through_its_matrices(tuned, kind):
    """By hand: each block alone, with e times its matrix as the gradient at each of its points."""
    model = tuned(**KINDS[kind])
    ours = gradients(model)
    x, y = batch()
    inputs = []
    cos, sin = model.rotary_embedding(slice(16), model.token_embedding(x))
    h = model.token_embedding(x)
    for block in model.blocks:
        inputs.append(h.detach())
        points = block(h, cos, sin, model.causal_attention)
        h = points[-1] if isinstance(points, tuple) else points
    top = h.detach().requires_grad_()
    plain = GPT(model.config)
    plain.load_state_dict(model.state_dict())
    plain.hidden = lambda x: plain.final_norm(top)
    (plain.loss(x, y) / y.numel()).backward()
    for i, (block, matrices) in enumerate(zip(model.blocks, model.feedback.matrices("cpu"))):
        points = block(inputs[i], cos, sin, model.causal_attention)
        points = points if isinstance(points, tuple) else (points,)
        errors = [top.grad if matrix is None else top.grad @ matrix for matrix in matrices]
        expected = torch.autograd.grad(points, [p for _, p in learned(block)], errors)
        for (name, _), gradient in zip(learned(block), expected):
            torch.testing.assert_close(ours[f"blocks.{i}.{name}"], gradient, rtol=1e-4, atol=1e-7)


def test_matrices_depend_on_seed_and_feedback_matrix():
    def drawn(seed=0, backward="feedback", matrix="each", **shape):
        return feedback.Feedback(GPTConfig(**SHAPE | shape), backward, matrix, seed).matrices("cpu")
    each = drawn()
    assert [[m is not None for m in block] for block in each] == [[True], [True], [False]]
    assert torch.equal(each[0][0], drawn()[0][0]) and not torch.equal(each[0][0], drawn(seed=1)[0][0])
    assert not torch.equal(each[0][0], each[1][0])
    shared = drawn(matrix="shared")
    assert shared[0][0] is shared[1][0] and shared[2] == [None]
    assert drawn(matrix="identity") == [[None]] * 3
    micro = drawn(backward="feedback_micro")
    assert [[None if m is None else tuple(m.shape) for m in block] for block in micro] == [
        [(24, 24), (24, 96), (24, 24)]] * 2 + [[(24, 24), (24, 96), None]]
    error = torch.randn(100, 512)
    wide = drawn(n_embd=512)[0][0]
    assert (error @ wide).norm().item() == pytest.approx(error.norm().item(), rel=0.05)
    for backward, matrix in (("feedback", "each"), ("feedback", "shared"), ("feedback_micro", "each"), ("feedback_micro", "shared")):
        lent = feedback.Feedback(GPTConfig(**SHAPE), backward, matrix, 0)
        said = lent.pending_bytes()
        unique = {id(m): m.nbytes for block in lent.matrices("cpu") for m in block if m is not None}
        assert said == sum(unique.values()) and lent.pending_bytes() == 0


@pytest.mark.parametrize("kind", ["feedback", "micro"])
def test_every_block_learns(tuned, kind):
    """The loss falls and all matrices change, although outputs are initialised to zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE))
    feedback.attach(model, train.Config(**KINDS[kind]))
    before = {name: p.detach().clone() for name, p in learned(model)}
    x, y = batch()
    first = model.loss(x, y).item()
    learn(model, 20)
    assert model.loss(x, y).item() < 0.8 * first
    moved = {name: (p - before[name]).norm().item() for name, p in learned(model)}
    assert min(moved.values()) > 0.01, moved


def test_a_frozen_block_gets_nothing_and_the_others_what_they_got(tuned):
    whole = gradients(tuned(backward="feedback"))
    ours = gradients(tuned(backward="feedback", trained_blocks=2))
    assert {of(name) for name in ours} == {None, 1, 2}               # embeddings learn through a frozen first block
    assert all(torch.equal(ours[name], whole[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_include_the_feedback_products(tuned, kind):
    totals = []
    for knobs in (KINDS[kind], only_shape(KINDS[kind])):
        model = tuned(**knobs)
        with FlopCounterMode(display=False) as counter:
            gradients(model)
        totals.append((counter.get_total_flops() / (6 * 16), model.flops_per_token(16)))
    assert totals[0][0] - totals[1][0] == pytest.approx(totals[0][1] - totals[1][1], abs=1)


@pytest.mark.parametrize("knobs", [dict(trained_blocks="last"), dict(trained_blocks=1), dict(n_layer=1)], ids=str)
def test_the_top_block_alone_has_no_feedback(knobs):
    model = GPT(GPTConfig(**SHAPE | {"n_layer": knobs.pop("n_layer", 3)}))
    with pytest.raises(BadInput, match="--backward=feedback has no effect on the top block"):
        feedback.attach(model, train.Config(backward="feedback", **knobs))
    feedback.attach(model, train.Config(backward="feedback_micro", **knobs))         # of which it has two points


# --- what changes nothing ---

@pytest.mark.parametrize("kind", ["feedback", "micro"])
def test_evaluation_is_that_of_the_same_weights(tuned, kind):
    x, y = batch()
    with torch.no_grad():
        assert torch.equal(tuned(**KINDS[kind]).eval().loss(x, y), tuned().eval().loss(x, y))
    assert torch.equal(tuned(**KINDS[kind]).loss(x, y), tuned().loss(x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_scale_accumulation_and_checkpointing(tuned, kind):
    """A scale that is a power of two changes no bit but the exponent's, and neither does computing blocks twice."""
    ours = gradients(tuned(**KINDS[kind]))
    scaled = gradients(tuned(**KINDS[kind]), scale=2.0**16)
    assert all(torch.equal(scaled[name], ours[name] * 2.0**16) for name in ours)
    again = gradients(tuned(gradient_checkpointing=True, **KINDS[kind]))
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    model = tuned(**KINDS[kind])
    x, y = batch()
    for part in (slice(0, 2), slice(2, 6)):
        (model.loss(x[part], y[part]) / y.numel()).backward()
    for name, p in learned(model):
        torch.testing.assert_close(p.grad, ours[name], rtol=1e-3, atol=1e-7)


def test_the_product_is_fp32_under_autocast(tuned):
    """Also if the backward pass runs under autocast."""
    model = tuned(**KINDS["feedback"])
    seen = {}

    def watch(name):
        def note(module, inputs, output):
            output.register_hook(lambda gradient: seen.update({name: gradient}))
        return note
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(watch(i))
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(x, y).backward()
    matrix = model.feedback.matrices("cpu")[0][0]
    assert seen[0].dtype == seen[2].dtype == torch.bfloat16
    assert torch.equal(seen[0], (seen[2].float() @ matrix).bfloat16())


@pytest.mark.parametrize("kind", ["feedback", "micro"])
def test_compiled_block_by_block_it_is_the_same(tuned, kind, monkeypatch):
    """A graph for the block that the embeddings learn through, one for the others, a loss; what Dynamo captured is run."""
    ours = gradients(tuned(**KINDS[kind]))
    graphs = count_graphs(monkeypatch)
    fast = distributed.TrainedModel(tuned(**KINDS[kind]), compile=True, dynamic=False)
    x, y = batch()
    (fast.loss(x, y) / y.numel()).backward()
    for name, p in learned(fast.model):
        torch.testing.assert_close(p.grad, ours[name], rtol=1e-4, atol=1e-6)
    assert len(graphs) == 3 and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("kind", ["feedback", "micro"])
def test_memory_equals_the_estimate(tuned, kind):
    """A rehearsal draws the matrices; before it they are counted, and so is what autograd keeps, which is no more than
    without feedback."""
    model = tuned(**KINDS[kind])
    hw = hardware.setup("cpu", dtype="fp32", attention="sdpa")
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    to_come = memory.parts(model, hw, 6, 16, 0)["feedback"]
    x, y = batch()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(x, y)
    real = sum(n for p, n in kept.items() if p not in own)
    assert loss.requires_grad and 0.85 * memory.saved_for_backward(model, hw, 6, 16) < real <= 1.01 * memory.saved_for_backward(model, hw, 6, 16)
    assert to_come > 0 and memory.parts(model, hw, 6, 16, 0)["feedback"] == 0
    assert "feedback" not in memory.parts(tuned(), hw, 6, 16, 0)


# --- frozen blocks ---

@pytest.mark.parametrize("blocks, frozen", [("none", 3), ("last", 2), (2, 1), (3, 0), (0, 3)])
def test_frozen_blocks_neither_move_nor_have_a_state(tuned, blocks, frozen):
    model = tuned(trained_blocks=blocks)
    before = {name: p.detach().clone() for name, p in learned(model)}
    x, y = batch()
    optimizers = optim.build(model, "muon", fused=False)
    (model.loss(x, y) / y.numel()).backward()
    optim.apply_step(optimizers, hardware.setup("cpu", dtype="fp32").scaler(), 0.01, 1.0)
    still = {of(name) for name, p in learned(model) if torch.equal(p, before[name])}
    assert still == set(range(frozen))
    names = optim.moments(model, optimizers)
    assert {of(name) for name in names} == {None, *range(frozen, 3)}


# --- orthogonality ---

@pytest.mark.parametrize("rows, columns", [(5, 5), (4, 9), (9, 4)])
def test_penalty_equals_singular_values_and_its_gradient_autograd_s(rows, columns):
    w = torch.randn(rows, columns, dtype=torch.float64, requires_grad=True)
    wide = w if rows <= columns else w.mT
    value = (wide @ wide.mT - torch.eye(len(wide))).square().sum() / len(wide)
    expected, = torch.autograd.grad(value, w)
    ours, gradient = orthogonality.penalty(w.detach())
    torch.testing.assert_close(ours, value.detach())
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(ours, (torch.linalg.svdvals(w.detach()).square() - 1).square().mean())
    orthogonal, _ = torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64))
    assert orthogonality.penalty(orthogonal)[0] < 1e-20 and orthogonality.penalty(orthogonal.mT)[1].abs().max() < 1e-10


@pytest.mark.parametrize("grouped", [False, True])
def test_penalty_gradient_is_added_once_per_step(tuned, grouped):
    shape = SHAPE | ({"n_head": 4, "n_kv_head": 2} if grouped else {})
    torch.manual_seed(0)
    model = learn(GPT(GPTConfig(**shape)), 3)
    cfg = train.Config(orthogonality=0.5, orthogonality_warmup=8)
    before = gradients(model)
    total = 0
    D, H, K = model.config.head_dim, model.config.n_head, model.config.n_kv_head
    for block in model.blocks:
        q, k, v = block.attention.qkv.weight.split([H * D, K * D, K * D])
        for w in (q, k, v, block.attention.out.weight):
            n = min(w.shape)
            gram = w @ w.mT if len(w) == n else w.mT @ w
            total = total + (gram - torch.eye(n)).square().sum() / n
    expected = dict(zip(before, torch.autograd.grad(total, [p for _, p in learned(model)], allow_unused=True)))
    run = SimpleNamespace(model=model, step=1, scaler=SimpleNamespace(get_scale=lambda: 4.0))
    said = orthogonality.add_gradients(cfg, run)
    assert said["orthogonality"].item() == pytest.approx(total.item() / 12)
    for name, p in learned(model):
        added = 4.0 * 0.5 * 2 / 8 * expected[name] if expected[name] is not None else 0
        torch.testing.assert_close(p.grad, before[name] + added)
        assert (expected[name] is not None) == name.endswith(("qkv.weight", "out.weight"))


# --- runs ---

KNOBS = dict(dtype="fp32", batch_size=2, gradient_accumulation_steps=4, max_steps=8, save_interval=4, eval_interval=8, keep_last=5,
             n_layer=3, optimizer="adamw", learning_rate=3e-3,
             orthogonality=0.1, orthogonality_warmup=4)
VARIANTS = {
    "feedback": dict(backward="feedback"),
    "micro": dict(backward="feedback_micro", gradient_checkpointing=True, tied_head=True),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory, text):
    """Return a cached function: variant -> run folder of one process."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            trained(made[name], text, **KNOBS, **VARIANTS[name])
        return made[name]
    return get


def agree(out, theirs):
    for key in ("loss", "grad_norm", "orthogonality"):
        ours, expected = metrics(out, key), metrics(theirs, key)
        assert len(ours) == 8 and all(ours[s] == pytest.approx(expected[s], rel=2e-4, abs=1e-5) for s in expected), key
    assert largest_difference(weights(out, 8), weights(theirs, 8)) < 1e-4
    assert largest_difference(weights(theirs, 8), weights(theirs, 4)) > 1e-3


@pytest.mark.parametrize("name, change", [("feedback", dict(batch_size=8, gradient_accumulation_steps=1)), ("feedback", dict(ranks=2)),
                                          ("feedback", dict(ranks=2, parallel="fsdp")), ("micro", dict(ranks=2, parallel="fsdp"))], ids=str)
def test_the_same_step_in_other_micro_batches(one, tmp_path, text, name, change):
    trained(tmp_path / "a", text, **KNOBS | VARIANTS[name] | change)
    agree(tmp_path / "a", one(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_resume_is_exact(one, tmp_path, text, name):
    shutil.copytree(one(name), tmp_path / "a")
    shutil.rmtree(tmp_path / "a/checkpoints/step_00000008")
    done = trained(tmp_path / "a", text, defaults={}, init_from="resume")
    assert "steps 4 to 8" in done.stdout
    assert largest_difference(weights(tmp_path / "a", 8), weights(one(name), 8)) == 0
    assert metrics(tmp_path / "a") == metrics(one(name))


@pytest.mark.parametrize("change, said", [
    (dict(backward="backprop"), "backward=backprop contradicts .* which has backward=feedback"),
    (dict(feedback_matrix="shared"), "feedback_matrix=shared contradicts"), (dict(trained_blocks=2), "trained_blocks=2 contradicts"),
    (dict(seed=7), "drawn with another seed than --seed=7: leave it out")], ids=str)
def test_feedback_options_are_frozen_on_resume(one, change, said):
    with pytest.raises(BadInput, match=said):
        train.main(flags(out_dir=one("feedback"), init_from="resume", **change))


def test_fp16_and_weights_of_another_run(one, tmp_path, text):
    """The loss scale with the penalty; a model trained by feedback is an ordinary model."""
    trained(tmp_path / "a", text, defaults={}, **KNOBS | dict(init_from=one("feedback"), dtype="fp16", backward="feedback_micro", max_steps=4,
                                                              warmup_steps=1, eval_tokens=640, log_interval=1, learning_rate=1e-3))
    assert metrics(tmp_path / "a")[4] < metrics(one("feedback"))[8] + 0.1
    assert checkpoint.load_state(tmp_path / "a", 4)["scaler"]


@pytest.mark.parametrize("blocks, trained_ones", [("none", []), ("last", [2])])
def test_runs_with_frozen_blocks(tmp_path, text, blocks, trained_ones):
    out = tmp_path / "a"
    trained(out, text, **KNOBS | dict(orthogonality=0.0, trained_blocks=blocks, ranks=1 + len(trained_ones)))
    first, last = weights(out, 4), weights(out, 8)
    assert {of(name) for name in first if not torch.equal(first[name], last[name])} == {None, *trained_ones}
    with checkpoint.open_tensors(out, 8, "optimizer.safetensors") as moments:
        assert {of(name) for name in moments.keys()} == {None, *trained_ones}
    moved = [json.loads(line).get("moved", 0) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (None in moved) == (blocks == "none") and "learning rate" not in (out / "training.log").read_text().split("step 8")[-1]


# --- bad input ---

@pytest.mark.parametrize("knobs, said", [
    (dict(backward="dfa"), "--backward=dfa should be backprop, feedback or feedback_micro"),
    (dict(feedback_matrix="shared"), "has no effect with --backward=backprop"),
    (dict(backward="feedback_micro", feedback_matrix="identity"), "to the MLP, which has more channels"),
    (dict(backward="feedback", compile_mode="reduce-overhead"), "compiles a step as a whole"),
    (dict(backward="feedback", init_from="x", lora_rank=4), "--lora_rank freezes the weights of all blocks"),
    (dict(orthogonality=0.1, init_from="x", lora_rank=4), "--lora_rank freezes the weights of all blocks"),
    (dict(trained_blocks="last", init_from="x", lora_rank=4), "--lora_rank freezes the weights of all blocks"),
    (dict(trained_blocks="none", backward="feedback"), "have no effect with --trained_blocks=none"),
    (dict(trained_blocks=0, orthogonality=0.1), "have no effect with --trained_blocks=none"),
    (dict(trained_blocks=-1), "--trained_blocks=-1 is too small"),
    (dict(trained_blocks="first"), "--trained_blocks=first should be a whole number, all, none or last"),
    (dict(orthogonality=-1), "--orthogonality=-1.0 is too small"),
    (dict(orthogonality_warmup=0), "--orthogonality_warmup=0 is too small"),
], ids=str)
def test_bad_options_are_one_sentence(monkeypatch, tmp_path, knobs, said):
    monkeypatch.setattr(train, "model_options", lambda model: {})
    with pytest.raises(BadInput, match=said):
        cfg = config.load(train.Config, flags(**TINY | knobs, out_dir=tmp_path / "a"))
        train.check(cfg)


def test_more_blocks_than_there_are():
    with pytest.raises(BadInput, match="--trained_blocks=4 is more than the 3 blocks of the model: lower it"):
        feedback.attach(GPT(GPTConfig(**SHAPE)), train.Config(trained_blocks=4))
