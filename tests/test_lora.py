"""LoRA adapters: trained and frozen weights, on and off, merging, saving, export to PEFT."""
import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import hub.weights
from layers.lora import LINEARS, LoRA, adapters, adapters_off, add_lora, load_adapters, merged
from model import GPT
from runtime import optim
from runtime.config import BadInput
from test_model import GPT2, LLAMA, QWEN, ids, tiny

KINDS = {"default": {}, "gpt2": GPT2, "llama": LLAMA, "qwen": QWEN}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
X, Y = ids(), ids(seed=2)


def adapted(rank=4, alpha=None, linears=LINEARS, dtype=torch.float32, learnt=True, **kw):
    """Return a model with non-zero adapters."""
    model = add_lora(tiny(trained=True, **kw).to(dtype), rank, alpha, linears)
    if learnt:
        for name, p in adapters(model).items():
            p.add_(torch.randn_like(p) * 0.1 if name.endswith("lora_b") else 0)
    return model


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@kinds
def test_new_adapters_keep_the_function_and_the_names(kind):
    base = tiny(trained=True, **kind)
    expected, names = base(X), base.state_dict().keys()
    model = add_lora(base, 4)
    assert torch.equal(model(X), expected)
    assert model.state_dict().keys() - names == adapters(model).keys() and names <= model.state_dict().keys()
    assert "blocks.0.attention.qkv.lora_a" in adapters(model)


@kinds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_step_moves_every_b_and_no_weight_of_the_base(kind, checkpointing):
    model = adapted(learnt=False, **kind)
    model.gradient_checkpointing = checkpointing
    before = copy.deepcopy(model.state_dict())
    optimizers = optim.build(model, learning_rate=1e-2, weight_decay=0.1)
    model.loss(X, Y).backward()
    optimizers[0].step()
    for name, value in model.state_dict().items():
        if name.endswith("lora_b"):
            assert (value != 0).any(-1).all()                     # each row: queries, keys and values too
        elif not name.endswith("lora_a"):
            assert torch.equal(value, before[name])


@kinds
def test_number_of_trained_weights(kind):
    model = adapted(rank=3, **kind)
    c = model.config
    C, q, kv, M = c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.mlp_hidden
    one = (C + q + 2 * kv) + (q + C) + (C + M) * (3 if c.mlp == "swiglu" else 2)
    assert sum(p.numel() for p in trainable(model).values()) == c.n_layer * 3 * one
    assert trainable(model).keys() == adapters(model).keys()
    assert all(p.dtype == torch.float32 for p in trainable(model).values())


@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embeddings_are_never_adapted(tied):
    model = adapted(tied_head=tied)
    assert all(name.startswith("blocks.") for name, m in model.named_modules() if isinstance(m, LoRA))
    model.loss(X, Y).backward()
    assert not model.head_weight.requires_grad and model.head_weight.grad is None
    assert set(adapters(model)) == {f"blocks.{i}.{m}.lora_{x}" for i in range(2) for x in "ab"
                                    for m in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}


def test_only_the_linears_asked_for_are_adapted():
    model = adapted(linears=("qkv", "gate"), **LLAMA)
    assert {name.split(".")[-2] for name in adapters(model)} == {"qkv", "gate"}


@torch.no_grad()
def test_a_layer_is_the_formula():
    layer = adapted(rank=4, alpha=6).blocks[1].mlp.up
    x = torch.randn(5, 64)
    expected = x @ layer.weight.T + 6 / 4 * (x @ layer.lora_a.T) @ layer.lora_b.T
    torch.testing.assert_close(layer(x), expected)
    assert adapted(rank=5).blocks[0].mlp.up.scale == 2
    assert layer.lora_a.abs().max() <= 1 / 8 and layer.lora_a.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.2)


@kinds
def test_adapters_off_is_bitwise_the_base(kind):
    base, model = tiny(trained=True, **kind), adapted(**kind)
    expected, on = base(X), model(X)
    assert (on - expected).abs().max() > 1e-2
    with adapters_off(model):
        with adapters_off(model):
            assert torch.equal(model(X), expected)
        assert torch.equal(model(X), expected)
    assert torch.equal(model(X), on)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(model(X), on)


@kinds
def test_merged_is_the_same_function_without_adapters(kind):
    model = adapted(**kind)
    plain = GPT(model.config)
    plain.load_state_dict(merged(model))
    torch.testing.assert_close(plain(X), model(X), rtol=1e-5, atol=1e-5)
    with adapters_off(model):
        plain.load_state_dict(merged(model))
        assert torch.equal(plain(X), model(X))
    assert merged(plain).keys() == plain.state_dict().keys()
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in merged(plain).items())


def test_merging_into_a_bf16_base_keeps_the_update():
    model = adapted(dtype=torch.bfloat16)
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA):
            layer.lora_b.data.mul_(0.02)
            delta = layer.scale * layer.lora_b.double() @ layer.lora_a.double()
            with torch.autocast("cpu", torch.bfloat16):
                ours = merged(model)[f"{name}.weight"]
            assert ours.dtype == torch.float32
            lost = {kind: ((sum - layer.weight.double() - delta).norm() / delta.norm()).item()
                    for kind, sum in (("fp32", ours.double()), ("bf16", (layer.weight + delta.bfloat16()).double()))}
            assert lost["fp32"] < 1e-4 and lost["bf16"] > 0.03, lost


def test_adapters_are_saved_and_loaded():
    model, other = adapted(**QWEN), adapted(learnt=False, **QWEN)
    load_adapters(other, adapters(model))
    assert torch.equal(other(X), model(X))
    for wrong in (adapted(rank=3, **QWEN), adapted(linears=("qkv",), **QWEN), tiny(**QWEN)):
        with pytest.raises(ValueError, match="add_lora with the rank"):
            load_adapters(wrong, adapters(model))


def test_add_lora_errors_are_one_sentence():
    for options, words in ((dict(rank=0), "rank of 1 or more"), (dict(rank=2, linears=("qkv", "head")), "choose from qkv"),
                         (dict(rank=2, linears=("gate",)), "choose from qkv"), (dict(rank=2, linears="up"), "choose from qkv")):
        model = tiny()
        with pytest.raises(ValueError, match=words):
            add_lora(model, **options)
        assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(adapted(), 4)


def gradients(model, autocast):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.loss(X, Y).backward()
    return {name: p.grad for name, p in trainable(model).items()}


@kinds
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_gradients_to_every_adapter(kind, autocast):
    model = adapted(**kind)
    plain = gradients(model, autocast)
    model.gradient_checkpointing = True
    for name, grad in gradients(model, autocast).items():
        assert torch.equal(grad, plain[name]) and grad.abs().max() > 0


def test_under_autocast_a_layer_is_rounded_as_in_the_engine():
    """An update that is small beside the spacing of bf16 numbers must not exist in the trainer alone."""
    torch.manual_seed(0)
    model = adapted()
    layer = model.blocks[0].mlp.up
    with torch.no_grad():
        layer.lora_b.normal_(std=1e-4)
    x = torch.randn(50, layer.in_features).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        apart = F.linear(x, layer.weight) + layer.scale * F.linear(F.linear(x, layer.lora_a), layer.lora_b)
    engine = F.linear(x, merged(model)["blocks.0.mlp.up.weight"].bfloat16())
    assert torch.equal(y, engine) and not torch.equal(y, apart)


@kinds
@pytest.mark.parametrize("autocast", [False, True])
def test_a_bf16_base_trains_fp32_adapters(kind, autocast):
    exact = gradients(adapted(**kind), False)
    for name, grad in gradients(adapted(dtype=torch.bfloat16, **kind), autocast).items():
        assert grad.dtype == torch.float32
        assert torch.cosine_similarity(grad.flatten(), exact[name].flatten(), dim=0) > 0.9


@pytest.mark.parametrize("kind, checkpointing", [({}, False), (QWEN, True)], ids=["default", "qwen"])
def test_the_whole_step_is_one_graph_for_torch_compile(kind, checkpointing):
    torch._dynamo.reset()
    model = adapted(**kind)
    model.gradient_checkpointing = checkpointing
    eager = model.loss
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=False)
    exact, rounded = (gradients(model, autocast) for autocast in (False, True))
    model.loss = compiled
    for name, grad in gradients(model, False).items():
        torch.testing.assert_close(grad, exact[name])
    for name, grad in gradients(model, True).items():        # products of other strides round differently
        assert (grad - rounded[name]).norm() < 0.01 * rounded[name].norm()
    with adapters_off(model), torch.no_grad():
        torch.testing.assert_close(compiled(X, Y), tiny(trained=True, **kind).loss(X, Y))
    torch.testing.assert_close(compiled(X, Y), eager(X, Y))


# --- PEFT's files ---

PEFT = {"default": {}, "default, tied": dict(tied_head=True), "gpt2": GPT2, "llama, tied, grouped heads": LLAMA,
        "qwen2": dict(mlp="swiglu", n_kv_head=2, qk_norm=False, qkv_bias=True),
        "qwen3": dict(mlp="swiglu", n_kv_head=1, head_dim=24)}
SUBSETS = [LINEARS, ("qkv",), ("out",), ("down",), ("up",)]


@pytest.mark.parametrize("linears", SUBSETS, ids=str)
@pytest.mark.parametrize("name", PEFT)
@torch.no_grad()
def test_peft_computes_the_same_function(name, linears, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = adapted(rank=4, alpha=6, linears=linears, **PEFT[name]).eval()
    with adapters_off(model):
        hub.weights.export(model, tmp_path / "base")
    hub.weights.export_adapters(model, tmp_path / "adapters", tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    expected, tensors = model(X), load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert (base(X).logits - expected).abs().max() > 1e-2
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert (theirs(X).logits - expected).abs().max() < 1e-4
    own = {k for k, _ in theirs.named_parameters() if "lora_" in k}      # every adapter is in the file
    assert {k.replace(".default", "") for k in own} == tensors.keys()
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(tmp_path / "base"))
    (tmp_path / "base" / "adapter_config.json").write_text(json.dumps(config))
    for name in ("adapters", "base"):                     # transformers would load adapters beside a model
        with pytest.raises(BadInput, match=f"{name} holds a PEFT adapter of {tmp_path / 'base'}"):
            hub.find(tmp_path / name)


@pytest.mark.parametrize("name", PEFT)
@torch.no_grad()
def test_an_adapted_model_is_exported_merged(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = adapted(**PEFT[name]).eval()
    hub.weights.export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (theirs(X).logits - model(X)).abs().max() < 1e-4


def test_exporting_missing_adapters_is_one_sentence(tmp_path):
    with pytest.raises(BadInput, match="no adapters"):
        hub.weights.export_adapters(tiny(), tmp_path)


def test_weights_trained_beside_the_adapters_are_not_dropped_from_an_export(tmp_path):
    model = adapted(**LLAMA)
    model.final_norm.requires_grad_()
    model.gate = torch.nn.Linear(2, 1, bias=False)
    with pytest.raises(BadInput, match=r"final_norm.weight, gate.weight were trained beside"):
        hub.weights.export_adapters(model, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()
    del model.gate
    trained = trainable(model)                            # what a checkpoint holds
    loaded = adapted(learnt=False, **LLAMA)
    load_adapters(loaded, {name: weight.detach() for name, weight in trained.items()})
    assert trainable(loaded).keys() == trained.keys()
    with pytest.raises(BadInput, match="final_norm.weight were trained"):
        hub.weights.export_adapters(loaded, tmp_path / "adapters")
