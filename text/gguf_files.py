"""Convert GGUF files with Llama's, Qwen2's or Qwen3's architecture to folders of Hugging Face files."""
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from runtime import checkpoint
from runtime.config import BadInput
from runtime.usage import load_package
from text.hub import one_line
from text.tokenizer import FILE, HF_SETTINGS, SPLIT_DIGITS, byte_level

FOLDER = Path("data")                        # the default of --data_dir
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
HF_TENSORS = {
    "token_embd": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "output_norm": "norm",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5      # kinds of tokens
# Qwen2's pattern, which splits a text into words
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
# {tokenizer.ggml.pre: the pre-tokeniser before the byte-level one}; without one, that splits like GPT-2
SPLITS = {
    "gpt-2": [],
    "smollm": [SPLIT_DIGITS],
    "qwen2": [{"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}],
}


def convert(path):
    """Return the folder of Hugging Face files, in fp32, of a GGUF file. It is written once for each content,
    whose SHA-256 stands in its name and config.json. BadInput if the file can't be read."""
    if not path.is_file():
        raise BadInput(f"There is no file {path}: correct its path.")
    digest = checkpoint.sha256(path)
    folder = FOLDER / f"{path.stem}-{digest[:12]}"
    temporary = FOLDER / f"{folder.name}.tmp-{os.getpid()}"
    if folder.exists():
        return folder
    try:
        gguf = load_package("gguf")
        temporary.mkdir(parents=True)
        write(gguf, path, digest, temporary)
        temporary.rename(folder)
    except ImportError as e:
        raise BadInput(f"{path} can't be read, since {e}.") from None
    except OSError as e:
        if not folder.exists():              # else another process was faster
            raise checkpoint.write_error(f"{folder}, converted from {path},", e, "start again") from None
    except NotImplementedError as e:
        raise BadInput(f"{path} has a quantisation that the package gguf can't read ({one_line(e)}): choose "
                       "another, such as Q8_0 or Q4_K_M.") from None
    except (BadInput, MemoryError):
        raise
    except Exception as e:                   # the package has no exceptions of its own
        raise BadInput(f"{path} can't be read as GGUF ({type(e).__name__}: {one_line(e)[:200]}): download it "
                       "again, or choose another file.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write(gguf, path, digest, folder):
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json of a GGUF file."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise BadInput(f"{path} has the architecture {kind}: choose a llama, qwen2 or qwen3.")
    if fields.get("split.count", 1) > 1:
        raise BadInput(f"{path} is one of {fields['split.count']} parts: merge them with llama.cpp's "
                       "llama-gguf-split --merge.")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(fields, stored)
    tokenizer, settings = tokenizer_files(fields)
    config["converted_from"] = {"file": path.name, "sha256": digest}
    shapes = {}
    for name, tensor in stored.items():
        shapes[hf_name(name)] = torch.empty(*tensor.shape.tolist()[::-1], device="meta")
    contents = (read_tensor(gguf, tensor, config) for tensor in stored.values())
    checkpoint.write_tensors(folder / "model.safetensors", shapes, contents)
    for name, content in (("config.json", config), (FILE, tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def hf_name(name):
    """Return the Hugging Face name of a tensor."""
    if name == "output.weight":
        return "lm_head.weight"
    match = TENSOR.fullmatch(name)
    if not match or match[2] not in HF_TENSORS:
        raise ValueError(f"the tensor {name} is not supported")
    layer = f"layers.{match[1]}." if match[1] else ""
    return f"model.{layer}{HF_TENSORS[match[2]]}.{match[3]}"


def read_tensor(gguf, tensor, config):
    """Return a tensor in fp32. In Llama's queries and keys, the channels of a rotated pair are neighbours in
    GGUF, and half a head apart in Hugging Face's files."""
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    if not np.isfinite(value).all():
        raise ValueError(f"{tensor.name} has values that are not finite")
    if config["model_type"] == "llama" and re.search(r"attn_[qk]\.", tensor.name):
        pairs = value.reshape(-1, config["head_dim"] // 2, 2, *value.shape[1:])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return torch.tensor(value)


def hf_config(fields, stored):
    """Return config.json, a dict. fields: the file's metadata; stored: {name: tensor}."""
    kind = fields["general.architecture"]
    own = {name.removeprefix(f"{kind}."): value for name, value in fields.items()}
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", own["embedding_length"] // heads)
    rope = {"rope_type": own.get("rope.scaling.type", "none").replace("none", "default")}
    if "rope.scaling.factor" in own:
        rope["factor"] = own["rope.scaling.factor"]
    ends = [own.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "max_position_embeddings": own["context_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "hidden_act": "silu",
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": rope,
        "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "eos_token_id": [i for i in dict.fromkeys(ends) if i is not None],
    }


def tokenizer_files(fields):
    """Return tokenizer.json and tokenizer_config.json, dicts. They follow tokenizer.ggml.pre; transformers
    ignores it, and so gives SmolLM2 other ids for a number after two blanks than it was trained on."""
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    split = own.get("pre")
    if own.get("model") != "gpt2" or split not in SPLITS or own.get("add_bos_token"):
        raise ValueError(f"its tokenizer, {own.get('model')} {split}, is not among {', '.join(SPLITS)}")
    tokens = own["tokens"]
    kinds = own["token_type"]
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    merges = [merge.split(" ") for merge in own["merges"]]
    about = byte_level(vocab, merges, own["eos_token_id"], split != "qwen2", SPLITS[split])
    end = about["added_tokens"][0]
    about["added_tokens"] = [end | {"id": i, "content": tokens[i], "special": kind == CONTROL}
                             for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    if split == "qwen2":
        about["normalizer"] = {"type": "NFC"}
    settings = dict(HF_SETTINGS)
    for key, name in (("eos", "eos"), ("bos", "bos"), ("pad", "padding")):
        if f"{name}_token_id" in own:
            settings[f"{key}_token"] = tokens[own[f"{name}_token_id"]]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return about, settings
