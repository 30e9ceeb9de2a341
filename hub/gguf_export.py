"""Write a model as one GGUF file, for llama.cpp and the programs built on it."""
import json
import os
from pathlib import Path

import numpy as np

from runtime.config import BadInput, require
from runtime.progress import track
from hub import gguf_import
from hub.gguf_import import CONTROL, NORMAL, STOPS, UNUSED, USER_DEFINED
from text.tokenizer import BUILT_IN, split_of, tokenizer_json


def architecture_of(config):
    """Return llama.cpp's name of the architecture of a config.json (a dict), or raise BadInput."""
    kind = config["model_type"]
    if kind not in ("gpt2", "llama", "qwen2", "qwen3"):
        raise BadInput(f"This command does not know how llama.cpp stores a {kind}: export the model without "
                       "--gguf, and use llama.cpp's convert_hf_to_gguf.py.")
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
    split = split_of(about)
    if not split:
        raise BadInput(f"llama.cpp has no tokenizer that splits like {tokenizer.name}: choose byte-level BPE "
                       "that splits like GPT-2, SmolLM2 or Qwen2 (python -m text.bpe), gpt2 or bytes.")
    return about, split


def export(config, tensors, tokenizer, path, quantisation):
    """Write a GGUF file. config, tensors: the content of config.json and {Hugging Face name: fp32 tensor};
    quantisation of matrices: F16 or Q8_0. Vectors and positions stay in fp32. BadInput, or OSError."""
    architecture = architecture_of(config)
    about, split = vocabulary_of(tokenizer)
    gguf = require("gguf", f"{path} can't be written")
    temporary = Path(f"{path}.tmp-{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, architecture)
    add_metadata(writer, config, architecture)
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, tokenizer, about, split, config["vocab_size"])
    for name, value in track(list(gguf_tensors(gguf, config, tensors, architecture)),
                             f"converting to {quantisation}", "tensors"):
        quant = gguf.GGMLQuantizationType.F32
        if value.ndim == 2 and name != "position_embd.weight":
            quant = gguf.GGMLQuantizationType["F16" if value.shape[1] % 32 else quantisation]
        if np.abs(value).max() > np.finfo(np.float16).max:
            raise BadInput(f"{name} has values beyond fp16: export the model without --gguf.")
        writer.add_tensor(name, gguf.quants.quantize(value, quant), raw_dtype=quant)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def add_metadata(writer, config, architecture):
    """Add the shape of a model."""
    keys = gguf_import.GPT2_KEYS if architecture == "gpt2" else gguf_import.LLAMA_KEYS
    for key, hf_key in keys.items():
        add = writer.add_float32 if key.endswith(("epsilon", "freq_base")) else writer.add_uint32
        add(f"{architecture}.{key}", config[hf_key])
    if architecture == "gpt2":
        return
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    if config["rope_scaling"]:
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if architecture == "apertus":
        for key, value in gguf_import.RELU2.items():
            writer.add_array(key, [value] * config["num_hidden_layers"])


def add_tokenizer(writer, tokenizer, about, split, vocab_size):
    """Add the vocabulary, the special tokens and the chat template; ids without a token are unused."""
    stops = list(dict.fromkeys([tokenizer.eos, tokenizer.end, *tokenizer.stop]))
    if len(stops) > len(STOPS):
        raise BadInput(f"The model has {len(stops)} stop tokens, and GGUF {len(STOPS)}: choose another.")
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in tokenizer.vocabulary().items():
        tokens[i] = token
        types[i] = NORMAL
    control = {*stops, tokenizer.pad, tokenizer.bos}
    if tokenizer.is_chat:
        control.update(tokenizer.chat.control.values())
        writer.add_chat_template(tokenizer.template["text"])
    for added in about["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] or added["id"] in control else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in about["model"]["merges"]]
    writer.add_token_merges(merges or [gguf_import.NO_MERGE])
    for name, i in zip(STOPS, stops):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    writer.add_pad_token_id(tokenizer.pad)
    writer.add_bos_token_id(tokenizer.eos if tokenizer.bos is None else tokenizer.bos)
    writer.add_add_bos_token(tokenizer.bos is not None and not tokenizer.is_chat)


def gguf_tensors(gguf, config, tensors, architecture):
    """Yield (GGUF's name, array) of {Hugging Face name: tensor}, the reverse of gguf_import.write."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], len(tensors))
    for hf_name, tensor in tensors.items():
        name = names.get_name(hf_name, (".weight", ".bias"))
        value = tensor.numpy()
        if architecture == "gpt2" and gguf_import.CONV1D.search(name):
            value = value.T
        if architecture == "llama" and gguf_import.ROTATED.search(name):
            halves = value.reshape(-1, 2, config["head_dim"] // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if architecture == "apertus" and config["tie_word_embeddings"] and name == "token_embd.weight":
            yield "output.weight", value     # that architecture has no tied head
        if architecture != "apertus" or "ffn_gate" not in name:
            yield name, value
