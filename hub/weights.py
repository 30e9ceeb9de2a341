"""Read and write the weights of Hugging Face's safetensors, and adapters as PEFT's."""
import functools
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import hub
from hub.architectures import write_config
from layers.lora import LoRA, merged, trained_beside
from runtime import checkpoint
from runtime.config import BadInput, read_json
from runtime.progress import ProgressLine, track

# Masks and rotary frequencies, which older files store with the weights.
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")      # of names in a compiled or DDP model's state dict


def weight_names(config, kind):
    """Yield for each weight of GPT(config): its name, the names of the Hugging Face tensors that it stacks
    (one or several), and whether those are transposed."""
    def linear(name, *hf_names, bias, transposed=False):
        yield f"{name}.weight", [f"{hf_name}.weight" for hf_name in hf_names], transposed
        if bias:
            yield f"{name}.bias", [f"{hf_name}.bias" for hf_name in hf_names], False

    gpt2 = kind == "gpt2"
    yield "token_embedding.weight", ["transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"], False
    if gpt2:
        yield "position_embedding.weight", ["transformer.wpe.weight"], False
    for i in range(config.n_layer):
        attention = f"blocks.{i}.attention"
        mlp = f"blocks.{i}.mlp"
        layer = f"transformer.h.{i}" if gpt2 else f"model.layers.{i}"
        norms = ("ln_1", "ln_2") if gpt2 else ("input_layernorm", "post_attention_layernorm")
        yield from linear(f"{attention}_norm", f"{layer}.{norms[0]}", bias=gpt2)
        yield from linear(f"{mlp}_norm", f"{layer}.{norms[1]}", bias=gpt2)
        if gpt2:
            yield from linear(f"{attention}.qkv", f"{layer}.attn.c_attn", bias=True, transposed=True)
            yield from linear(f"{attention}.out", f"{layer}.attn.c_proj", bias=True, transposed=True)
            yield from linear(f"{mlp}.up", f"{layer}.mlp.c_fc", bias=True, transposed=True)
            yield from linear(f"{mlp}.down", f"{layer}.mlp.c_proj", bias=True, transposed=True)
            continue
        qkv = [f"{layer}.self_attn.{letter}_proj" for letter in "qkv"]
        yield from linear(f"{attention}.qkv", *qkv, bias=config.qkv_bias)
        yield from linear(f"{attention}.out", f"{layer}.self_attn.o_proj", bias=config.o_bias)
        if config.qk_norm:
            yield f"{attention}.q_norm", [f"{layer}.self_attn.q_norm.weight"], False
            yield f"{attention}.k_norm", [f"{layer}.self_attn.k_norm.weight"], False
        if config.mlp == "swiglu":
            yield from linear(f"{mlp}.gate", f"{layer}.mlp.gate_proj", bias=config.mlp_bias)
        yield from linear(f"{mlp}.up", f"{layer}.mlp.up_proj", bias=config.mlp_bias)
        yield from linear(f"{mlp}.down", f"{layer}.mlp.down_proj", bias=config.mlp_bias)
    yield from linear("final_norm", "transformer.ln_f" if gpt2 else "model.norm", bias=gpt2)
    if not config.tied_head:
        yield "head.weight", ["lm_head.weight"], False


def load_safetensors(model, folder, hf_config):
    """Copy the weights from a folder's safetensors into a GPT, in the model's dtype. Every tensor is used
    exactly once; BadInput names one that is missing, unexpected or of another shape."""
    config = model.config
    kind = hf_config["model_type"]
    readers = read_tensors(folder)
    weights = model.state_dict()
    if kind == "gpt2":                                        # files of GPT2Model lack the prefix
        readers = {name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": reader
                   for name, reader in readers.items()}
    readers = {name: reader for name, reader in readers.items() if not BUFFERS.fullmatch(name)}
    names = list(weight_names(config, kind))
    for name, hf_names, transposed in track(names, f"loading the weights in {folder}", "tensors"):
        missing = [hf_name for hf_name in hf_names if hf_name not in readers]
        if missing:
            raise BadInput(f"{folder} has no tensor {missing[0]}, which a {kind} needs: download it again.")
        value = torch.cat([readers.pop(hf_name)() for hf_name in hf_names])
        if transposed:
            value = value.t()
        weight = weights[name]
        if weight.shape[0] == config.padded_vocab_size and value.shape[0] == config.vocab_size:
            weight[config.vocab_size:] = 0                    # padding
            weight = weight[:config.vocab_size]
        if value.shape != weight.shape:
            raise BadInput(f"{' + '.join(hf_names)} in {folder} has the shape {tuple(value.shape)}, and "
                           f"config.json asks for {tuple(weight.shape)}: download the files again.")
        weight.copy_(value)
        if config.mlp == "relu2" and "up_proj" in hf_names[0]:
            gate = hf_names[0].replace("up_proj", "gate_proj")
            gate_reader = readers.pop(gate, torch.Tensor)     # if missing: an empty tensor, which differs
            if not torch.equal(gate_reader(), value):
                raise BadInput(f"{gate} in {folder} differs from up_proj, but hidden_act=relu is only "
                               "supported with a gate equal to up_proj: choose another model.")
    if config.tied_head and "lm_head.weight" in readers:
        head = readers["lm_head.weight"]().to(model.head_weight)
        if torch.equal(head, weights["token_embedding.weight"][:config.vocab_size]):
            del readers["lm_head.weight"]                     # the tied weights, stored twice
    if readers:
        raise BadInput(f"{folder} has {len(readers)} unexpected tensors for a {kind}, "
                       f"{next(iter(readers))} for one: choose another model.")


def read_tensors(folder):
    """Return {tensor name: function that reads it} of model.safetensors or the shards in the index."""
    index = folder / "model.safetensors.index.json"
    shards = {"": "model.safetensors"}
    if not (folder / "model.safetensors").exists():
        if not index.exists():
            others = [path.name for path in sorted(folder.iterdir()) if path.suffix == ".bin"]
            others = f" ({others[0]} is not supported)" if others else ""
            raise BadInput(f"{folder} lacks model.safetensors{others}: get that file, or write it with "
                           "transformers' save_pretrained().")
        shards = read_json(index, "download it again").get("weight_map")
    if not isinstance(shards, dict):
        raise BadInput(f"{index} does not say which file holds which tensor: download it again.")
    readers = {}
    for shard in sorted({checkpoint.inside(folder, name) for name in shards.values()}):
        try:
            file = safe_open(shard, framework="pt")
        except (OSError, SafetensorError) as e:
            raise BadInput(f"{shard} can't be read ({e}): download it again.") from None
        for name in file.keys():
            plain = WRAPPERS.sub("", name)
            if plain in readers:
                raise BadInput(f"{folder} has two tensors {plain}: save the model again.")
            readers[plain] = functools.partial(file.get_tensor, name)
    return readers


def export(model, folder, tokenizer=None):
    """Write config.json and model.safetensors (fp32, adapters merged) for transformers, and the tokenizer for
    its AutoTokenizer."""
    hf_config, tensors = hf_files(model, tokenizer)
    write(folder, "config.json", hf_config, "model.safetensors", tensors)
    if tokenizer:
        tokenizer.export(folder)


def hf_files(model, tokenizer=None):
    """Return config.json (a dict) and {Hugging Face name: fp32 tensor} of a GPT, adapters merged."""
    config = model.config
    hf_config = write_config(config)
    weights = merged(model)
    tensors = {}
    if tokenizer:
        hf_config["eos_token_id"] = tokenizer.stop if len(tokenizer.stop) > 1 else tokenizer.eos
        hf_config["pad_token_id"] = tokenizer.pad
        hf_config["bos_token_id"] = tokenizer.bos
    for name, hf_names, transposed in weight_names(config, hf_config["model_type"]):
        value = weights[name].float().cpu()
        if value.shape[0] == config.padded_vocab_size and name in ("token_embedding.weight", "head.weight"):
            value = value[:config.vocab_size]
        parts = [value.t()] if transposed else split_stacked(config, value, hf_names)
        for hf_name, part in zip(hf_names, parts):
            tensors[hf_name] = part.clone().contiguous()
    return hf_config, add_gates(config, tensors)


def split_stacked(config, value, hf_names):
    """Split a weight [out, ...] into the Hugging Face tensors that it stacks: three (q, k, v) or one."""
    if len(hf_names) == 1:
        return [value]
    queries = config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    return value.split([queries, keys, keys])


def add_gates(config, tensors):
    """Add gate projections for relu2: relu(z)^2 = relu(z) * z is a gated MLP whose gate is its own input."""
    return tensors | {name.replace("up_proj", "gate_proj"): value.clone() for name, value in tensors.items()
                      if config.mlp == "relu2" and "up_proj" in name}


def write(folder, config_name, hf_config, tensors_name, tensors):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ProgressLine(f"writing {folder}"):
        save_file(tensors, Path(folder, tensors_name), metadata={"format": "pt"})
    Path(folder, config_name).write_text(json.dumps(hf_config, indent=1))


def export_adapters(model, folder, base_model_name_or_path=""):
    """Write adapter_config.json and adapter_model.safetensors for peft.PeftModel.from_pretrained(base,
    folder). model: a run folder, or a GPT with adapters (`export` within adapters_off writes the base).
    BadInput if other weights were trained too: PEFT's files would lack them."""
    if isinstance(model, str | Path):
        model = hub.find(model).load_adapted()
    config = model.config
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
    if not layers:
        raise BadInput("The model has no adapters: use hub.weights.export, or call add_lora first.")
    if beside := trained_beside(model):
        raise BadInput(f"{', '.join(beside)} were trained beside the adapters, and PEFT's files would lack "
                       "them: export the whole model with hub.weights.export, or freeze those that it can do "
                       "without.")
    kind = write_config(config)["model_type"]
    tensors = {}
    for name, hf_names, _ in weight_names(config, kind):
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            continue
        rows_of_b = split_stacked(config, layer.lora_b, hf_names)        # q, k and v share one A
        for hf_name, lora_b in zip(hf_names, rows_of_b):
            prefix = f"base_model.model.{hf_name.removesuffix('weight')}"
            # [rank, in] and [out, rank], for GPT-2's Conv1D too
            tensors[f"{prefix}lora_A.weight"] = layer.lora_a.detach().float().cpu().clone()
            tensors[f"{prefix}lora_B.weight"] = lora_b.detach().float().cpu().clone()
    tensors = add_gates(config, tensors)
    layer = next(iter(layers.values()))
    # PEFT matches the ends of names. Two parts, since GPT-2 has both attn.c_proj and mlp.c_proj.
    target_modules = {".".join(name.split(".")[-4:-2]) for name in tensors}
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model_name_or_path),
        "inference_mode": True,
        "r": len(layer.lora_a),
        "lora_alpha": layer.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": kind == "gpt2",                                # Conv1D keeps its weight transposed
        "target_modules": sorted(target_modules),
    }
    write(folder, "adapter_config.json", adapter_config, "adapter_model.safetensors", tensors)
