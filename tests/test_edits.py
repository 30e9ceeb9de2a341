"""What a researcher adds reaches the model, its checkpoints and its gradient, or is named: an architecture option, a trained part
beside the adapters, a term of the loss, a learning rate of a parameter group."""
import importlib.util
import json
import shutil
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import forked
import grpo
import hub
import train
from conftest import ROOT, TINY, environment, flags, in_process
from engine.generate import Engine
from engine.sampler import Sampling
from engine.scheduler import Request
from hub.architectures import write_config
from hub.gguf_export import architecture_of
from layers.lora import adapters, add_lora, trains_adapters_alone
from model import GPT, GPTConfig, IGNORE, blank
from runtime import checkpoint, optim
from runtime.config import BadInput
from runtime.run import changed_data
from test_grpo import base, learn, letters, lines, one_thread, watched, write  # noqa: F401

SMALL = TINY | dict(max_steps=4, save_interval=2, eval_interval=4, keep_last=9, dtype="fp32", keep_memory=False, diagnose=False)


def train_here(text, main=train.main, code=0, **options):
    """Run train.py in this process. Returns its standard error."""
    return in_process(main, flags(**dict(dataset=text, data_dir=text.parent / "tokens") | options), code)[1]


def saved(out, step=4):
    return load_file(checkpoint.step_folder(out, step) / "model.safetensors")


def test_an_option_with_the_name_of_a_field_of_the_model_reaches_the_model(text, tmp_path, monkeypatch):
    source = (ROOT / "train.py").read_text()
    place = "    tied_head: bool = False"
    assert source.count(place) == 1
    write(tmp_path, source.replace(place, f"    norm_eps: PositiveFloat = 1e-5\n{place}"), "my_train.py")
    spec = importlib.util.spec_from_file_location("my_train", tmp_path / "my_train.py")
    mine = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_train", mine)
    spec.loader.exec_module(mine)
    assert "norm_eps" in mine.ARCHITECTURE and set(mine.ARCHITECTURE) - {"norm_eps"} == set(train.ARCHITECTURE)
    out = tmp_path / "run"
    train_here(text, mine.main, **SMALL | dict(out_dir=out, norm_eps=0.1, bias=True, max_steps=1))
    shape = json.loads((out / "model.json").read_text())["architecture"]
    assert shape["norm_eps"] == 0.1 and shape["qkv_bias"] and shape["o_bias"] and shape["mlp_bias"]
    assert "norm_eps=0.2 contradicts" in train_here(text, mine.main, 2, init_from=out, out_dir=tmp_path / "b", norm_eps=0.2)
    assert mine.model_options(out)["norm_eps"] == 0.1
    train_here(text, **SMALL | dict(out_dir=tmp_path / "old", max_steps=1))        # whose config.json lacks the option
    assert "norm_eps=0.2 contradicts" in train_here(text, mine.main, 2, init_from="resume", out_dir=tmp_path / "old", norm_eps=0.2)


@pytest.mark.parametrize("first", ["adapters", "part"])
def test_a_trained_part_beside_adapters_is_in_the_checkpoints_and_other_commands_name_it(text, tmp_path, monkeypatch, first, capsys):
    """The part is a value head; the final norm is trained too."""
    train_here(text, **SMALL | dict(out_dir=tmp_path / "base", max_steps=1))
    adapt, loss = train.adapt, GPT.loss

    def with_a_head(cfg, model, device, resuming):
        if first == "adapters":
            adapt(cfg, model, device, resuming)
        model.extras["value"] = torch.nn.Linear(model.config.n_embd, 1, bias=False)
        if first == "part":
            adapt(cfg, model, device, resuming)
        model.final_norm.requires_grad_(True)

    def with_decay(model, *args):
        return loss(model, *args) + sum(w.square().sum() for w in model.extras.parameters())
    monkeypatch.setattr(train, "adapt", with_a_head)
    monkeypatch.setattr(GPT, "loss", with_decay)
    out = tmp_path / "run"
    train_here(text, **SMALL | dict(init_from=tmp_path / "base", out_dir=out, lora_rank=2))
    weights, before = saved(out), saved(out, 2)
    others = {name for name in weights if ".lora_" not in name}
    assert others == {"extras.value.weight", "final_norm.weight"}
    assert not any(torch.equal(weights[name], before[name]) for name in others)
    shutil.rmtree(checkpoint.step_folder(out, 4))
    train_here(text, init_from="resume", out_dir=out)
    assert all(torch.equal(weights[name], value) for name, value in saved(out).items())
    monkeypatch.undo()
    capsys.readouterr()
    model = hub.load(str(out))
    said = capsys.readouterr().err
    assert torch.equal(model.final_norm.weight, weights["final_norm.weight"]) and not model.extras
    assert "extras.value.weight" in said and "left aside" in said and said.count("\n") == 1
    assert torch.equal(checkpoint.load_base(out)["final_norm.weight"], saved(tmp_path / "base", 1)["final_norm.weight"])


def test_a_model_whose_norm_is_trained_is_no_reference_without_its_adapters():
    model = add_lora(GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=16, block_size=8)), 2)
    model.extras["value"] = torch.nn.Linear(16, 1)
    assert trains_adapters_alone(model) and checkpoint.weights_of(model).keys() == adapters(model).keys() | {
        "extras.value.weight", "extras.value.bias"}
    model.final_norm.requires_grad_(True)
    assert not trains_adapters_alone(model) and "final_norm.weight" in checkpoint.weights_of(model)
    model.register_buffer("seen", torch.zeros(1))
    assert "seen" in checkpoint.weights_of(model) and "seen" in checkpoint.base_of(model)


def test_one_predicate_decides_which_completions_are_learnt_from(learn, watched, tmp_path, monkeypatch):
    """With equal rewards every advantage is 0."""
    task = write(tmp_path, 'def questions(split, seed=0, n=None):\n    return [{"question": f"{split} {i}", "answer": ""} for i in range(9)][:n]\n'
                 "def reward(question, completion):\n    return 0.5\n", "equal.py")
    (line,) = lines(learn("plain", task=task, max_steps=1))
    assert line["updates"] == 0 and line["loss"] == 0 and not watched.batches
    monkeypatch.setattr(grpo, "has_gradient", lambda cfg, completion: completion.trained)
    (line,) = lines(learn("term", task=task, max_steps=1))
    targets = sum(int((batch.y != IGNORE).sum()) for batch in watched.batches)
    assert line["updates"] == 1 and targets == sum(c.n_sampled for group in watched.groups[-1] for c in group) > 0


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_a_loss_that_is_a_mean_per_sequence_says_so_in_one_place(loss_type, monkeypatch):
    monkeypatch.setattr(grpo, "MEAN_PER_SEQUENCE", ("grpo", "gspo"))
    cfg = SimpleNamespace(loss_type=loss_type, clip_low=0.2, clip_high=0.2, beta=0, tis_cap=0)
    logp, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss, _ = grpo.grpo_loss(logp, logp, None, torch.tensor([1.0, 3.0]), mask, cfg, grpo.loss_denominator(loss_type, 4, 2, 9))
    assert loss.item() == -2                 # over tokens it would be -1.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_parameter_group_keeps_its_share_of_the_rate(optimizer):
    model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=16, block_size=8))
    optimizers = optim.build(model, optimizer, fused=False)
    for i, group in enumerate(optimizers[0].param_groups):
        group["lr_scale"] = i / 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optim.apply_step(optimizers, torch.amp.GradScaler(enabled=False), 0.1)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.0, 0.05]
    assert torch.equal(model.head.weight, before["head.weight"]) and not torch.equal(model.final_norm.weight, before["final_norm.weight"])
    assert [group["lr"] for other in optimizers[1:] for group in other.param_groups] == [0.1] * (optimizer == "muon")


@pytest.fixture
def buffered(monkeypatch):
    """A function: persistent or not -> every new GPT has a buffer that multiplies its last hidden states."""
    initialise = GPT.__init__

    def add(persistent):
        def init(model, *args, **options):
            initialise(model, *args, **options)
            model.register_buffer("gain", torch.full((1,), 3.0), persistent)
            model.final_norm.register_forward_hook(lambda _, inputs, h: h * model.gain.to(h.dtype))
        monkeypatch.setattr(GPT, "__init__", init)
    return add


def test_a_buffer_of_the_model_reaches_the_engine(buffered):
    buffered(True)
    model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=16, block_size=8)).eval()
    model.gain.fill_(-2)
    torch.nn.init.normal_(model.head.weight)
    engine = Engine(model, slots=1, dtype=torch.float32, sampling=Sampling(temperature=0))
    assert engine.runner.model.gain == -2
    (sample,) = engine.generate([Request([1, 2], max_new_tokens=5)])
    assert sample.ids == model.generate(torch.tensor([[1, 2]]), 5, temperature=0)[0, 2:].tolist()


def test_a_buffer_of_the_model_is_sharded_with_its_weights(tmp_path):
    """On two ranks, of which the second builds its model on the meta device."""
    script = write(tmp_path, textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}]
        from types import SimpleNamespace
        import torch
        from model import GPT, GPTConfig, on_meta
        from runtime import distributed, fsdp

        build = GPT.__init__

        def init(model, config, *args):
            build(model, config, *args)
            model.register_buffer("gain", torch.full((1,), 3.0))
        GPT.__init__ = init
        distributed.init()
        hw = SimpleNamespace(device=torch.device("cpu"), dtype="fp32", compile=False)
        config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=16, block_size=8)
        model = GPT(config) if distributed.is_main() else on_meta(config)
        assert fsdp.shard(model, hw, "fsdp").gain == 3 and model.head.weight.to_local().shape == (32, 16)
        """), "sharded.py")
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", script], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def test_a_buffer_that_checkpoints_lack_is_refused(buffered):
    buffered(False)
    with pytest.raises(ValueError, match="The buffer gain of GPT is not saved with its weights: register it without"):
        blank(GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=16, block_size=8))


def test_an_export_names_the_options_that_no_architecture_has():
    with pytest.raises(BadInput, match="no architecture with logit_softcap=15 and the model's other options"):
        write_config(GPTConfig(logit_softcap=15))
    with pytest.raises(BadInput, match="how llama.cpp stores a gemma: export the model without --gguf"):
        architecture_of({"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"})


def test_a_new_option_that_may_change_the_data_is_named_when_a_run_is_resumed(monkeypatch):
    before = dict(dataset="a.txt", second_share=0.25, max_steps=5, init_from="scratch")
    monkeypatch.setattr(checkpoint, "read_meta", lambda out_dir, step: {"config": before})
    cfg = SimpleNamespace(out_dir="out", **before | dict(max_steps=9, init_from="resume"))
    assert str(changed_data(cfg, 5)).startswith("a.txt has changed since the run in out was stopped: restore it to resume, or start")
    cfg.second_share = 0.5
    assert "stopped (or --second_share=0.5 selects other data: leave it out): restore it" in str(changed_data(cfg, 5))
    cfg.dataset = "b.txt"
    assert str(changed_data(cfg, 5)).startswith("--dataset=b.txt changes the data of the run in out: leave it out")


def test_a_model_of_other_code_is_refused_with_advice(tmp_path, monkeypatch):
    write(tmp_path, "{}", "model.json")
    monkeypatch.setattr(checkpoint, "read_model", lambda folder: {"architecture": {"x0_mix": True}})
    with pytest.raises(BadInput, match=r"'x0_mix'\): restore it, or use the code that wrote it"):
        hub.find(tmp_path)
