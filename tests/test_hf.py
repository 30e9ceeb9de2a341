"""transformers and model.py compute the same function before and after import and export by hf.py."""
import copy
import json
import math
import shlex
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf
import hub.weights
import hub.architectures
from hub.card import model_card
from conftest import metrics, trained
from model import GPT, GPTConfig, on_meta, rope_tables
from runtime.config import BadInput
from test_tokenizer import write
from text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
SHAPE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LLAMA = SHAPE | dict(hidden_act="silu", rms_norm_eps=0.1, tie_word_embeddings=True, rope_parameters=LLAMA3)
# {family: every key of its config.json that is honoured, and a value that is not the default}
HONOURED = {
    "GPT2": dict(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256, n_inner=96, layer_norm_epsilon=0.1,
                 activation_function="gelu", tie_word_embeddings=False),
    "Llama": LLAMA | dict(head_dim=32, attention_bias=True, mlp_bias=True),
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | dict(head_dim=32, attention_bias=True),
}
# Keys that change no logits, given the values in hub.architectures.NEUTRAL_VALUES.
IRRELEVANT = """_name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_encoder_decoder label2id model_type output_attentions output_hidden_states pad_token_id pretraining_tp problem_type
    reorder_and_upcast_attn return_dict transformers_version use_cache
    max_window_layers sliding_window attention_dropout attn_pdrop embd_pdrop resid_pdrop
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""".split()
MODELS = {
    "gpt2": ("GPT2", dict(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256)),
    "llama, tied, grouped heads": ("Llama", SHAPE | dict(tie_word_embeddings=True)),
    "llama, linear rope": ("Llama", SHAPE | dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    **{f"{kind}, every key": (kind, values) for kind, values in HONOURED.items()},
}


def theirs(name):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{kind}Config")(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():                      # initial biases of 0 and gains of 1 would hide mistakes
            p.add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def logits(model, x):
    out = model.eval()(x)
    return out if isinstance(out, torch.Tensor) else out.logits


X = torch.randint(300, (2, 256), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_at_every_position_and_after_a_round_trip(name, tmp_path):
    other = theirs(name)
    other.save_pretrained(tmp_path / "in")
    ours = hub.load(tmp_path / "in")
    expected = logits(other, X)
    assert (logits(ours, X) - expected).abs().max() < 1e-4
    hub.weights.export(ours, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is type(other)
    assert (logits(back, X) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("options", [{}, dict(tied_head=True), dict(mlp="swiglu", n_kv_head=1), dict(qk_norm=False)], ids=str)
def test_exports_compute_the_same_function(options, tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(vocab_size=300, block_size=256, n_layer=2, n_head=2, n_embd=64) | options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    hub.weights.export(model, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (logits(back, X) - logits(model, X)).abs().max() < 1e-4


def test_export_errors_are_one_sentence(tmp_path):
    for options in (dict(norm="layernorm"), dict(logit_softcap=15.0), dict(mlp="gelu")):
        with pytest.raises(BadInput, match="no architecture"):
            hub.weights.export(GPT(GPTConfig(vocab_size=300, block_size=32, n_layer=1, n_head=2, n_embd=32, **options)), tmp_path)


SIZES = {                     # published config.json and number of parameters
    "gpt2": (dict(model_type="gpt2", activation_function="gelu_new", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
             124_439_808),
    "gpt2-medium": (dict(model_type="gpt2", activation_function="gelu_new", vocab_size=50257, n_positions=1024, n_embd=1024, n_layer=24,
                         n_head=16), 354_823_168),
    "gpt2-large": (dict(model_type="gpt2", activation_function="gelu_new", vocab_size=50257, n_positions=1024, n_embd=1280, n_layer=36,
                        n_head=20), 774_030_080),
    "gpt2-xl": (dict(model_type="gpt2", activation_function="gelu_new", vocab_size=50257, n_positions=1024, n_embd=1600, n_layer=48,
                     n_head=25), 1_557_611_200),
    "SmolLM2-135M": (dict(model_type="llama", hidden_act="silu", vocab_size=49152, max_position_embeddings=8192, hidden_size=576,
                          num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
                          tie_word_embeddings=True), 134_515_008),
    "SmolLM2-360M": (dict(model_type="llama", hidden_act="silu", vocab_size=49152, max_position_embeddings=8192, hidden_size=960,
                          num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5, intermediate_size=2560,
                          tie_word_embeddings=True), 361_821_120),
    "SmolLM2-1.7B": (dict(model_type="llama", hidden_act="silu", vocab_size=49152, max_position_embeddings=8192, hidden_size=2048,
                          num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=32, intermediate_size=8192,
                          tie_word_embeddings=True), 1_711_376_384),
    "Qwen2.5-0.5B": (dict(model_type="qwen2", hidden_act="silu", vocab_size=151936, max_position_embeddings=32768, hidden_size=896,
                          num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
                          tie_word_embeddings=True, use_sliding_window=False), 494_032_768),
    "Qwen3-0.6B": (dict(model_type="qwen3", hidden_act="silu", vocab_size=151936, max_position_embeddings=40960, hidden_size=1024,
                        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
                        tie_word_embeddings=True), 596_049_920),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_published_models_have_their_published_sizes(name):
    about, n_params = SIZES[name]
    model = on_meta(hub.architectures.read_config(about))
    padding = (model.config.padded_vocab_size - model.config.vocab_size) * model.config.n_embd
    assert model.n_params() - padding == n_params


@pytest.fixture
def folder(tmp_path):
    theirs("llama, tied, grouped heads").save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    return tmp_path


def test_shards_are_read(folder):
    assert (logits(hub.load(folder), X) - logits(theirs("llama, tied, grouped heads"), X)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["../b/model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors",
                                  "", ".", "a\0b", 3, None, ["model.safetensors"]])
def test_shards_outside_the_folder_are_refused(folder, name):
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    about["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(about))
    with pytest.raises(BadInput, match="not inside it"):
        hub.load(folder)


@pytest.mark.parametrize("weight_map", [None, 3, "model.safetensors", ["model.safetensors"]])
def test_an_index_without_shards_is_one_sentence(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInput, match="which file holds which tensor"):
        hub.load(folder)


def test_shards_may_be_links_and_lie_in_folders(folder, tmp_path_factory):
    """In the hub's cache every file is a link out of its folder."""
    blobs, index = tmp_path_factory.mktemp("blobs"), folder / "model.safetensors.index.json"
    (folder / "part").mkdir()
    for shard in list(folder.glob("*.safetensors")):
        shard.rename(blobs / shard.name)
        (folder / "part" / shard.name).symlink_to(blobs / shard.name)
    about = json.loads(index.read_text())
    about["weight_map"] = {name: f"part/{shard}" for name, shard in about["weight_map"].items()}
    index.write_text(json.dumps(about))
    assert hub.load(folder).n_params()


def spoil(folder, change):
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop(next(iter(t))), "has no tensor model"),
    (lambda t: t.update(extra=torch.zeros(1)), "unexpected tensors for a .*, extra"),
    (lambda t: t.update({k: v[:1].clone() for k, v in list(t.items())[:1]}), "has the shape"),
    (lambda t: next(iter(t.values())).view(-1)[7:8].fill_(math.nan), r"^[\w.]+\.weight of the model in .* holds NaN or infinity: "),
    (lambda t: next(iter(t.values())).view(-1)[7:8].fill_(-math.inf), r"^[\w.]+\.weight of the model in .* holds NaN or infinity: "),
])
def test_mismatched_tensors_are_named(folder, change, words):
    spoil(folder, change)
    with pytest.raises(BadInput, match=words):
        hub.load(folder)


def test_weights_whose_sum_overflows_are_finite(folder):
    spoil(folder, lambda t: next(iter(t.values())).view(-1)[:9].fill_(3e38))
    assert hub.load(folder).n_params()


def test_weights_of_a_compiled_or_ddp_model_are_read(folder):
    before = hub.load(folder).state_dict()
    spoil(folder, lambda t: [t.update({f"module._orig_mod.{name}": t.pop(name)}) for name in list(t)])
    assert all(torch.equal(value, before[name]) for name, value in hub.load(folder).state_dict().items())
    spoil(folder, lambda t: t.update({name.removeprefix("module."): value.clone() for name, value in t.items()}))
    with pytest.raises(BadInput, match="has two tensors"):
        hub.load(folder)


def test_another_gpt2_s_vocabulary_is_not_openai_s(tmp_path, monkeypatch):
    source = hub.ModelSource(tmp_path, GPTConfig(vocab_size=50257), {"model_type": "gpt2"})
    (tmp_path / "vocab.json").write_text(json.dumps({"\u0120the": 300}))
    with pytest.raises(BadInput, match="has no tokenizer.json"):
        source.tokenizer()
    monkeypatch.setattr(hub, "Tokenizer", lambda name: SimpleNamespace(name=name, n_vocab=50257))     # OpenAI's is a download
    (tmp_path / "vocab.json").write_text(json.dumps({"\u0120the": 262}))
    assert source.tokenizer().name == "gpt2"
    (tmp_path / "vocab.json").unlink()
    assert source.tokenizer().name == "gpt2"


def test_a_file_that_is_no_model_is_no_missing_folder(tmp_path):
    (tmp_path / "model.pt").touch()
    with pytest.raises(BadInput, match="model.pt is a file, but not GGUF: give .* the folder that holds"):
        hub.find(tmp_path / "model.pt")


@pytest.mark.parametrize("kind", HONOURED)
def test_every_key_of_config_json_is_honoured_refused_or_irrelevant(kind):
    """A new field of a later transformers has to be added to one of the three."""
    config_class = getattr(transformers, f"{kind}Config")
    fields = config_class().to_dict().keys()
    assert sorted(fields) == sorted([*HONOURED[kind], *fields & hub.architectures.NEUTRAL_VALUES.keys(), *fields & {*IRRELEVANT}])
    about = config_class(**HONOURED[kind]).to_dict()
    assert hub.architectures.read_config(config_class().to_dict()) != hub.architectures.read_config(about)
    others = {"rope_parameters": {"rope_type": "default"}, "hidden_act": "relu", "activation_function": "gelu_new"}
    for key, value in HONOURED[kind].items():
        other = others.get(key) or (not value if type(value) is bool else 2 * value)
        assert hub.architectures.read_config(about | {key: other}) != hub.architectures.read_config(about), key
    others = {"layer_types": ["sliding_attention"] * 2, "partial_rotary_factor": 0.5}
    for key, neutral in hub.architectures.NEUTRAL_VALUES.items():
        assert hub.architectures.read_config(about | {key: neutral}) == hub.architectures.read_config(about)
        with pytest.raises(BadInput, match=f"config.json has {key}="):
            hub.architectures.read_config(about | {key: others.get(key, not neutral)})


def test_gpt2_s_keys_have_other_names_too():
    assert transformers.GPT2Config.attribute_map == hub.architectures.GPT2_ALIASES
    about = transformers.GPT2Config(**HONOURED["GPT2"]).to_dict()
    assert hub.architectures.read_config(about | {"num_attention_heads": 2}).n_head == 2


UNSCALED = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
WITHOUT = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize("change", [
    {"rope_parameters": UNSCALED, "rope_scaling": LINEAR}, {"rope_parameters": UNSCALED, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": LINEAR, "rope_theta": 1e6}, {"rope_parameters": LINEAR}, {"rope_scaling": LINEAR | {"rope_theta": 77.0}, "rope_theta": 1e6},
    {"rope_parameters": UNSCALED, "rope_theta": 77.0}, {"rope_parameters": WITHOUT}, {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
    {"rope_scaling": WITHOUT, "original_max_position_embeddings": 32}], ids=str)
def test_contradictory_or_missing_rotary_keys(change):
    about = SHAPE | {"model_type": "llama", "hidden_act": "silu"} | change
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(about))).inv_freq
    _, sin = rope_tables(hub.architectures.read_config(about))
    assert (sin[1, 0, -len(theirs):] - theirs.sin()).abs().max() < 1e-6


def test_model_safetensors_takes_precedence_over_an_index(folder):
    """This is transformers' order, with or without the shards of an earlier save."""
    other = theirs("llama, linear rope")
    other.config.save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in other.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    expected = logits(other, X)
    assert (logits(hub.load(folder), X) - expected).abs().max() < 1e-4
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    assert (logits(hub.load(folder), X) - expected).abs().max() < 1e-4


def test_unsupported_folders_are_refused(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(BadInput, match="lacks model.safetensors: get"):
        hub.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"lacks model.safetensors \(pytorch_model.bin is not supported\)"):
        hub.load(folder)
    step = folder / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    (folder / "model.json").write_text("{}")
    for part in (step, step.parent):
        with pytest.raises(BadInput, match=f"part of the run in {folder}: give that folder"):
            hub.find(part)


def test_stop_ids_survive_an_export(tmp_path):
    tokenizer = Tokenizer(write(tmp_path / "in", "smol", files={"generation_config": {"eos_token_id": [0, 1, 2]}}))
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, block_size=8, n_layer=1, n_head=1, n_embd=8))
    hub.weights.export(model, tmp_path / "out", tokenizer)
    assert hub.find(tmp_path / "out").tokenizer().stop == tokenizer.stop == [0, 1, 2]


def test_damaged_files_are_one_sentence(folder, monkeypatch):
    shard = sorted(folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:200])
    with pytest.raises(BadInput, match=f"{shard.name} can't be read"):
        hub.load(folder)
    shard.unlink()
    with pytest.raises(BadInput, match=f"{shard.name} can't be read"):
        hub.load(folder)
    config = json.loads((folder / "config.json").read_text())
    for change, words in (({"model_type": "mamba"}, "model type mamba"), ({"hidden_act": "gelu"}, "hidden_act=gelu"),
                          ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "type yarn"),
                          ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "ramp": 2, "factor": 2.0}}, "with ramp"),
                          ({"rope_parameters": {"full_attention": LINEAR}}, "with full_attention"), ({"rope_parameters": {"rope_type": "linear"}}, "without factor"),
                          ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "without high_freq_factor")):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(BadInput, match=words):
            hub.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(BadInput, match="not an object"):
        hub.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="has 257 ids, and the model in .* 200, none for '<.endoftext.>'"):
        hub.ModelSource(folder, GPTConfig(vocab_size=200), config).tokenizer("bytes")
    (folder / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="model type None"):
        hub.load(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="no folder org/absent here"):
        hub.load("org/absent")


def card_of(source):
    return model_card(source, 1)


def test_a_run_is_exported_with_a_model_card(tmp_path, text):
    trained(tmp_path / "my run", text, max_steps=4, eval_interval=2, save_interval=2)
    assert hf.main([str(tmp_path / "my run"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    loss = metrics(tmp_path / "my run", "val_loss")[4]
    assert f"# my run\n" in card and "step 4 of nanoRFT's `train.py`" in card and f"| validation loss, nats a token | {loss:.3f} |" in card
    (command,) = (line for line in card.splitlines() if line.startswith("    python "))
    words = shlex.split(command)
    assert f"--dataset={text}" in words and "--max_steps=4" in words and words[1] == "train.py"
    trained(tmp_path / "my run", text, init_from="resume", max_steps=6)
    source = hub.find(tmp_path / "my run", 6)
    assert "--init_from=scratch" in card_of(source) and "--init_from=resume" not in card_of(source)
    with open(tmp_path / "my run/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "val_loss": "nan"}\n')
    assert "| nan |" not in card_of(source)
    (tmp_path / "my run/metrics.jsonl").write_text("")
    assert "|" not in card_of(source)
    assert hf.main([str(tmp_path / "out"), str(tmp_path / "again")]) == 0 and not (tmp_path / "again/README.md").exists()
