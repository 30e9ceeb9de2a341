"""Write a model as one GGUF file, for llama.cpp and the programs built on it."""
import json
import os
import re
from pathlib import Path

import numpy as np

from runtime.checkpoint import write_error
from runtime.config import BadInput
from runtime.progress import track
from runtime.usage import load_package
from text import gguf_files
from text.gguf_files import CONTROL, NORMAL, SPLITS, STOPS, UNUSED, USER_DEFINED
from text.tokenizer import BUILT_IN, chatml_jinja, tokenizer_json

HF_TENSOR = re.compile(r"(?:model|transformer)\.(?:(?:layers|h)\.(\d+)\.)?(.+)\.(weight|bias)")


def architecture_of(config):
    """Return llama.cpp's name of the architecture of a config.json (a dict), or raise BadInput."""
    kind = config["model_type"]
    if config.get("activation_function") == "gelu":
        raise BadInput("llama.cpp computes GPT-2 with the tanh form of GELU: train with --mlp=gelu_tanh, or "
                       "use the model with transformers.")
    if config.get("hidden_act") == "relu" and kind != "qwen3" or kind == "qwen3" and config["attention_bias"]:
        raise BadInput("llama.cpp has no architecture with these biases, or with ReLU² but without qk_norm: "
                       "train with --mlp=swiglu and without --bias, or use the model with transformers.")
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        raise BadInput("Llama 3's rotary positions can't be written as GGUF: use llama.cpp's "
                       "convert_hf_to_gguf.py.")
    return "apertus" if config.get("hidden_act") == "relu" else kind


def vocabulary_of(tokenizer):
    """Return a tokenizer's tokenizer.json (a dict) and GGUF's name of the way it splits text into words, or
    raise BadInput if llama.cpp would give a text other ids."""
    built_in = tokenizer.name in BUILT_IN
    about = tokenizer_json(tokenizer.encoding) if built_in else json.loads(tokenizer.encoding.content)
    model = about["model"]
    first = about.get("pre_tokenizer") or {}
    splits = [{"use_regex": True} | split if split.get("type") == "ByteLevel" else split
              for split in first.get("pretokenizers", [first])]
    unlike = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    for name, before in SPLITS.items():
        last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": name != "qwen2"}
        same = [{**split, "trim_offsets": None} for split in splits] == [
            {**split, "trim_offsets": None} for split in (*before, last)]
        normalizer = {"type": "NFC"} if name == "qwen2" else None
        if (model["type"] == "BPE" and (same or not model["merges"]) and not any(map(model.get, unlike))
                and about.get("normalizer") == normalizer):
            return about, name
    raise BadInput(f"llama.cpp has no tokenizer that splits like {tokenizer.name}: choose byte-level BPE "
                   "that splits like GPT-2, SmolLM2 or Qwen2 (python -m text.bpe), gpt2 or bytes.")


def export(config, tensors, tokenizer, path, quantisation):
    """Write a GGUF file. config, tensors: the content of config.json and {Hugging Face name: fp32 tensor};
    quantisation of matrices: F16 or Q8_0. Vectors and positions stay in fp32."""
    architecture = architecture_of(config)
    about, split = vocabulary_of(tokenizer)
    try:
        gguf = load_package("gguf")
    except ImportError as e:
        raise BadInput(f"GGUF can't be written, since {e}.") from None
    temporary = Path(f"{path}.tmp-{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, architecture)
    add_metadata(writer, config, architecture)
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, tokenizer, about, split, config["vocab_size"])
    for name, value in track(list(gguf_tensors(config, tensors)), f"converting to {quantisation}", "tensors"):
        quant = gguf.GGMLQuantizationType.F32
        if value.ndim == 2 and name != "position_embd.weight":
            quant = gguf.GGMLQuantizationType["F16" if value.shape[1] % 32 else quantisation]
        if np.abs(value).max() > np.finfo(np.float16).max:
            raise BadInput(f"{name} has values beyond fp16, or that are not finite: export the model without "
                           "--gguf.")
        writer.add_tensor(name, gguf.quants.quantize(value, quant), raw_dtype=quant)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.rename(path)
    except OSError as e:
        raise write_error(path, e, "choose another file") from None
    finally:
        temporary.unlink(missing_ok=True)


def add_metadata(writer, config, architecture):
    """Add the shape of a model."""
    if architecture == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["rope_scaling"]:
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if architecture == "apertus":
        for key, value in gguf_files.RELU2.items():
            writer.add_array(key, [value] * config["num_hidden_layers"])


def add_tokenizer(writer, tokenizer, about, split, vocab_size):
    """Add the vocabulary, the special tokens and the chat template; ids without a token are unused."""
    stops = list(dict.fromkeys([tokenizer.eos, tokenizer.end, *tokenizer.stop]))
    if len(stops) > len(STOPS):
        raise BadInput(f"The model has {len(stops)} stop tokens, and GGUF {len(STOPS)}: choose another.")
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in about["model"]["vocab"].items():
        tokens[i] = token
        types[i] = NORMAL
    control = {*stops, tokenizer.pad, tokenizer.bos, tokenizer.start}
    for added in about["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] or added["id"] in control else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in about["model"]["merges"]]
    writer.add_token_merges(merges or [gguf_files.NO_MERGE])
    for name, i in zip(STOPS, stops):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    writer.add_pad_token_id(tokenizer.pad)
    writer.add_bos_token_id(tokenizer.eos if tokenizer.bos is None else tokenizer.bos)
    writer.add_add_bos_token(tokenizer.bos is not None and not tokenizer.is_chat)
    if tokenizer.is_chat:
        writer.add_chat_template(chatml_jinja(tokenizer.template["system"], tokenizer.bos is not None))


def gguf_tensors(config, tensors):
    """Yield (GGUF's name, array) of {Hugging Face name: tensor}, the reverse of gguf_files.write."""
    names = gguf_files.GPT2_TENSORS if config["model_type"] == "gpt2" else gguf_files.LLAMA_TENSORS
    names = {hf_name: name for name, hf_name in names.items()}
    is_apertus = config.get("hidden_act") == "relu"
    for hf_name, tensor in tensors.items():
        value = tensor.numpy()
        if hf_name == "lm_head.weight":
            yield "output.weight", value
            continue
        layer, module, part = HF_TENSOR.fullmatch(hf_name).groups()
        name = f"{f'blk.{layer}.' if layer else ''}{names[module]}.{part}"
        if config["model_type"] == "gpt2" and gguf_files.CONV1D.search(name):
            value = value.T
        if config["model_type"] == "llama" and gguf_files.ROTATED.search(name):
            halves = value.reshape(-1, 2, config["head_dim"] // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if not (is_apertus and names[module] == "ffn_gate"):
            yield name, value
        if is_apertus and config["tie_word_embeddings"] and names[module] == "token_embd":
            yield "output.weight", value     # that architecture has no tied head
