"""Convert GGUF files of GPT-2's, Llama's, Qwen2's and Qwen3's architectures, and of Apertus' with ReLU²
(which hub/gguf_export.py writes), to folders of Hugging Face files."""
import contextlib
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from runtime import checkpoint
from runtime.config import BadInput, require
from runtime.network import one_line
from text.tokenizer import FILE, HF_SETTINGS, SPLITS, byte_level

FOLDER = Path("data")                        # the default of --data_dir
# Hugging Face's names of tensors, {}: the layer; the package gguf knows GGUF's
LLAMA_TENSORS = ("model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{{}}.{name}" for name in (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj")))
GPT2_TENSORS = ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head", *(
    f"transformer.h.{{}}.{name}" for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc",
                                              "mlp.c_proj")))
# {GGUF's key of a number, after the architecture: config.json's}
LLAMA_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Apertus' activation xIELU is ReLU² if softplus(alpha_p) is 1, softplus(alpha_n) 0 and beta 0; a constant of
# every layer
RELU2 = {"xielu.alpha_p": 0.5413248546129181, "xielu.alpha_n": -200.0, "xielu.beta": 0.0, "xielu.eps": -1e-6}
# Other keys that are read, or that change nothing in a causal model with these rotary positions
OTHER_KEYS = ("vocab_size", "pooling_type", "tensor_data_layout", "rope.dimension_count", "rope.scale_linear",
              "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
              "rope.scaling.finetuned")
# Keys that model.py does not support, each with the value that has no effect in llama.cpp
NEUTRAL_VALUES = {"attention.causal": True, "rope.scaling.attn_factor": 1.0, "expert_count": 0,
                  "expert_used_count": 0}
ADDED_TOKENS = ("add_bos_token", "add_eos_token", "add_sep_token")
CONV1D = re.compile(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
ROTATED = re.compile(r"attn_[qk]\.")
STOPS = ("eos", "eot", "eom")                # names of stop tokens
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5            # types of tokens
NO_MERGE = "ſ ſ"                             # never applies: a list of merges in GGUF can't be empty


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
        gguf = require("gguf", f"{path} can't be read")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with locked(FOLDER):
            if not folder.exists():          # else another process has just converted it
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                write(gguf, path, digest, temporary)
                temporary.rename(folder)
    except OSError as e:
        if not folder.exists():              # else another process was faster, without a lock
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


@contextlib.contextmanager
def locked(folder):
    """Wait until no other process converts files into a folder, and remove the leftovers of killed ones. Do
    neither on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for leftover in folder.glob(f"*-{'[0-9a-f]' * 12}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def open_reader(gguf, path):
    """Return a GGUFReader that raises ValueError where a count leads past the end of the file."""
    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, *args, **options):
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("a count leads past the end of the file")
            return super()._get(offset, dtype, count, *args, **options)
    return Reader(path)


def write(gguf, path, digest, folder):
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json of a GGUF file."""
    reader = open_reader(gguf, path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    check_keys(fields, path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(fields, stored)
    tokenizer, settings = tokenizer_files(fields, path)
    config["converted_from"] = {"file": path.name, "sha256": digest}
    architecture = fields["general.architecture"]
    of_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], len(stored))
    names = {of_gguf.get_name(name.format(layer)): name.format(layer) for layer in range(len(stored))
             for name in (GPT2_TENSORS if architecture == "gpt2" else LLAMA_TENSORS)}
    hf_tensors = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if module not in names or part not in ("weight", "bias"):
            raise BadInput(f"{path} has the tensor {name}, which is not supported: choose another model.")
        hf_tensors[f"{names[module]}.{part}"] = tensor
    if config.get("hidden_act") == "relu":   # relu(z)^2 = relu(z) * z: the gate is the input itself
        hf_tensors |= {name.replace("up_proj", "gate_proj"): tensor for name, tensor in hf_tensors.items()}
    shapes = {name: torch.empty(tensor.shape.tolist()[::1 if is_transposed(tensor, config) else -1],
                                device="meta") for name, tensor in hf_tensors.items()}
    contents = (read_tensor(gguf, tensor, config) for tensor in hf_tensors.values())
    checkpoint.write_tensors(folder / "model.safetensors", shapes, contents)
    for name, content in (("config.json", config), (FILE, tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def check_keys(fields, path):
    """Raise BadInput for metadata that ask for a computation other than model.py's."""
    architecture = fields.get("general.architecture")
    if architecture not in ("apertus", "gpt2", "llama", "qwen2", "qwen3"):
        raise BadInput(f"{path} has the architecture {architecture}: choose gpt2, llama, qwen2 or qwen3.")
    if fields.get("split.count", 1) > 1:
        raise BadInput(f"{path} is one of {fields['split.count']} parts: merge them with llama.cpp's "
                       "llama-gguf-split --merge.")
    own = architecture_metadata(fields)
    neutral = {f"{architecture}.{key}": value for key, value in NEUTRAL_VALUES.items()}
    neutral[f"{architecture}.attention.value_length"] = own["attention.key_length"]
    neutral |= {f"tokenizer.ggml.{key}": False for key in ADDED_TOKENS}
    if architecture == "apertus":
        neutral |= {key: [float(np.float32(value))] * own["block_count"] for key, value in RELU2.items()}
    read = {f"{architecture}.{key}" for key in (*LLAMA_KEYS, *GPT2_KEYS, *OTHER_KEYS)}
    for key, value in fields.items():
        has_no_effect = not key.startswith(f"{architecture}.") or key in read and not isinstance(value, list)
        if value != neutral[key] if key in neutral else not has_no_effect:
            raise BadInput(f"{path} has {key}={str(value)[:80]}, which model.py does not support: choose "
                           "another model.")


def is_transposed(tensor, config):
    """Return whether Hugging Face's files hold the transpose of a tensor, as for GPT-2's linear layers."""
    return config["model_type"] == "gpt2" and bool(CONV1D.search(tensor.name))


def read_tensor(gguf, tensor, config):
    """Return a tensor in fp32. In Llama's queries and keys, the channels of a rotated pair are neighbours in
    GGUF, and half a head apart in Hugging Face's files."""
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    if not np.isfinite(value).all():
        raise ValueError(f"{tensor.name} has values that are not finite")
    if config["model_type"] == "llama" and ROTATED.search(tensor.name):
        pairs = value.reshape(-1, config["head_dim"] // 2, 2, *value.shape[1:])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return torch.tensor(value.T if is_transposed(tensor, config) else value)


def architecture_metadata(fields):
    """Return an architecture's metadata without its prefix, and with llama.cpp's defaults."""
    own = {key.removeprefix(f"{fields['general.architecture']}."): value for key, value in fields.items()}
    heads = own["attention.head_count"]
    return {"attention.head_count_kv": heads, "attention.key_length": own["embedding_length"] // heads,
            "rope.freq_base": 10000.0} | own


def hf_config(fields, stored):
    """Return config.json, a dict. fields: the file's metadata; stored: {name: tensor}."""
    architecture = fields["general.architecture"]
    kind = "qwen3" if architecture == "apertus" else architecture
    keys = GPT2_KEYS if kind == "gpt2" else LLAMA_KEYS
    own = architecture_metadata(fields)
    ends = [own.get(f"tokenizer.ggml.{name}_token_id") for name in STOPS]
    config = {hf_key: own[key] for key, hf_key in keys.items()} | {
        "model_type": kind,
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in stored,
        "eos_token_id": [i for i in dict.fromkeys(ends) if i is not None],
    }
    if kind == "gpt2":
        return config | {"activation_function": "gelu_new"}
    # as llama.cpp: an old name of the factor, 0 is none, and a factor without a type is linear
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0)) or 1.0
    rope_type = own.get("rope.scaling.type", "linear").replace("none", "default")
    is_scaled = factor != 1 or rope_type != "linear"
    head_dim = config["head_dim"]
    return config | {
        "hidden_act": "relu" if architecture == "apertus" else "silu",
        "rope_scaling": {"rope_type": rope_type, "factor": factor} if is_scaled else {"rope_type": "default"},
        "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
    }


def tokenizer_files(fields, path):
    """Return tokenizer.json and tokenizer_config.json, dicts. They follow tokenizer.ggml.pre; transformers
    ignores it, and so gives SmolLM2 other ids for a number after two blanks than it was trained on."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    split = own.get("pre")
    if own.get("model") != "gpt2" or split not in SPLITS:
        raise BadInput(f"{path} has another tokenizer, {own.get('model')} {split}: choose a model "
                       f"with gpt2 and {', '.join(SPLITS)}, or take its safetensors.")
    tokens = own["tokens"]
    kinds = own["token_type"]
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    merges = [merge.split(" ") for merge in own["merges"] if merge != NO_MERGE]
    about = byte_level(vocab, merges, own["eos_token_id"], split)
    end = about["added_tokens"][0]
    about["added_tokens"] = [end | {"id": i, "content": tokens[i], "special": kind == CONTROL}
                             for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    settings = dict(HF_SETTINGS)
    for key, name in (("eos", "eos"), ("bos", "bos"), ("pad", "padding")):
        if f"{name}_token_id" in own:
            settings[f"{key}_token"] = tokens[own[f"{name}_token_id"]]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return about, settings
