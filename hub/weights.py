"""Import and export models as Hugging Face files (GPT-2, Llama, SmolLM2, Qwen2.5, Qwen3), adapters as PEFT's;
import and export GGUF files.

    python hf.py out/base exported   # a folder that transformers.AutoModelForCausalLM.from_pretrained loads
    python hf.py out/base --gguf     # base-F16.gguf for llama.cpp; --gguf=Q8_0: half the size
"""
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from layers.lora import LoRA, add_lora, load_adapters, merged
from model import GPTConfig, blank, scale_rope
from runtime import checkpoint, config, guard, memory
from runtime.config import BadInput, read_json
from runtime.progress import ProgressLine, track
from text import gguf_export, gguf_files, hub
from text.tokenizer import Tokenizer

# Masks and rotary frequencies, which older files store with the weights.
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")      # of names in a compiled or DDP model's state dict
# Keys of config.json that model.py does not support, each with the value that has no effect in transformers.
NEUTRAL_VALUES = {
    "add_cross_attention": False,
    "is_causal": True,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
    "per_layer_config": None,
    "quantization_config": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "transformers_weights": None,            # another file than model.safetensors
    "use_sliding_window": False,
}
# Other names of GPT-2's keys, which transformers prefers.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# {type of rotary positions: required keys}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


# --- configurations ---

def read_config(hf_config):
    """Return the GPTConfig of a config.json (a dict); raise BadInput for an unsupported architecture."""
    kind = hf_config.get("model_type")
    if kind == "gpt2":
        refuse_unsupported(hf_config)
        aliases = GPT2_ALIASES.keys() & hf_config.keys()
        hf_config = hf_config | {GPT2_ALIASES[alias]: hf_config[alias] for alias in aliases}
        return GPTConfig(
            vocab_size=hf_config["vocab_size"],
            block_size=hf_config["n_positions"],
            n_layer=hf_config["n_layer"],
            n_head=hf_config["n_head"],
            n_embd=hf_config["n_embd"],
            mlp_hidden=hf_config.get("n_inner"),
            norm="layernorm",
            norm_eps=hf_config.get("layer_norm_epsilon", 1e-5),
            position="learned",
            qk_norm=False,
            mlp=translate(hf_config, "activation_function", {"gelu_new": "gelu_tanh", "gelu": "gelu"}),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            tied_head=hf_config.get("tie_word_embeddings", True))
    if kind not in ("llama", "qwen2", "qwen3"):
        raise BadInput(f"The model type {kind} is not supported: choose a gpt2, llama, qwen2 or qwen3.")
    other_layers = set(hf_config.get("layer_types") or ()) - {"full_attention"}
    refuse_unsupported(hf_config | {"layer_types": other_layers})
    rope_theta, rope_scaling = read_rope(hf_config)
    attention_bias = hf_config.get("attention_bias") or False
    return GPTConfig(
        vocab_size=hf_config["vocab_size"],
        block_size=hf_config["max_position_embeddings"],
        n_layer=hf_config["num_hidden_layers"],
        n_head=hf_config["num_attention_heads"],
        n_embd=hf_config["hidden_size"],
        n_kv_head=hf_config.get("num_key_value_heads", None if kind == "llama" else 32),
        head_dim=hf_config.get("head_dim", 128 if kind == "qwen3" else None),
        mlp_hidden=hf_config["intermediate_size"],
        norm="rmsnorm",
        norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        position="rope",
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qk_norm=kind == "qwen3",
        mlp=translate(hf_config, "hidden_act", {"silu": "swiglu", "relu": "relu2"}),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=kind != "qwen2" and attention_bias,
        mlp_bias=kind == "llama" and hf_config.get("mlp_bias") or False,
        tied_head=hf_config.get("tie_word_embeddings", False))


def read_rope(hf_config):
    """Return rope_theta and rope_scaling of a GPTConfig. If keys contradict each other, choose as
    transformers does."""
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    outside = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    rope = {key: hf_config.get(key, value) for key, value in outside.items()} | rope
    refuse_unsupported(rope)
    del rope["partial_rotary_factor"]
    rope_theta = rope.pop("rope_theta")
    old_name = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_name)
    if kind not in ROPE_KEYS:
        raise BadInput(f"Rotary positions of type {kind} are not supported: use default, linear or llama3.")
    missing = set(ROPE_KEYS[kind]) - rope.keys()
    if missing:
        raise BadInput(f"config.json has rotary positions of type {kind} without {min(missing)}: restore it.")
    unknown = rope.keys() - inspect.signature(scale_rope).parameters.keys()
    if unknown:
        raise BadInput(f"config.json has rotary positions with {min(unknown)}, which is not supported: "
                       "choose another model.")
    if kind == "llama3":
        positions = "original_max_position_embeddings"
        rope[positions] = ({positions: hf_config["max_position_embeddings"]} | rope | hf_config)[positions]
    return rope_theta, None if kind == "default" else rope | {"rope_type": kind}


def refuse_unsupported(hf_config):
    """Raise BadInput if a key has another value than in NEUTRAL_VALUES."""
    for key, neutral in NEUTRAL_VALUES.items():
        value = hf_config.get(key, neutral)
        if value != neutral and (value or neutral):
            raise BadInput(f"config.json has {key}={str(value)[:80]}, which model.py does not support: "
                           "choose another model.")


def translate(hf_config, key, names):
    """Return `names[hf_config[key]]`, or raise BadInput for an unsupported value."""
    if hf_config.get(key) not in names:
        raise BadInput(f"config.json has {key}={hf_config.get(key)}, which model.py does not support: "
                       f"choose a model with {' or '.join(names)}.")
    return names[hf_config[key]]


def write_config(config):
    """Return a config.json (a dict) of a transformers architecture that is equivalent to this GPTConfig: the
    first that read_config turns back into it."""
    if config.mixer != "softmax":
        raise BadInput(f"transformers has no architecture with mixer={config.mixer}: export a model with "
                       "softmax attention.")
    config = dataclasses.replace(config, dropout=0.0, mixer_features=GPTConfig.mixer_features)
    wide_heads = config.head_dim != config.n_embd // config.n_head
    for kind in ("gpt2", "llama", "qwen3") if wide_heads else ("gpt2", "llama", "qwen2", "qwen3"):
        written = write_gpt2(config) if kind == "gpt2" else write_llama(config, kind)
        with contextlib.suppress(ValueError, BadInput):       # a width that this kind can't have, for example
            if read_config(written) == config:
                return written
    raise BadInput(f"transformers has no architecture for norm={config.norm}, "
                   f"position={config.position}, qk_norm={config.qk_norm}, mlp={config.mlp}, "
                   f"qkv_bias={config.qkv_bias}, logit_softcap={config.logit_softcap}: export an "
                   "architecture like GPT-2's, Llama's, Qwen's or train.py's default.")


def write_gpt2(config):
    """Return GPT-2's config.json for a GPTConfig."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,                           # llama.cpp's converter reads this name
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": config.mlp_hidden,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.mlp == "gelu_tanh" else "gelu",
        "tie_word_embeddings": config.tied_head,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def write_llama(config, kind):
    """Return the config.json of kind llama, qwen2 or qwen3 for a GPTConfig."""
    rope_scaling = config.rope_scaling or {"rope_type": "default"}
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_hidden,
        "hidden_act": "silu" if config.mlp == "swiglu" else "relu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_scaling | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_head,
    }


def readers(hf_config, tokenizer=None):
    """Return the names of the programs that compute an exported model rightly. llama.cpp computes SiLU in a
    Llama or Qwen, whatever config.json says, and its converter knows published tokenizers alone; vLLM refuses
    another activation."""
    names = "transformers and vLLM"
    if hf_config.get("hidden_act") == "relu":
        names = "transformers alone (--mlp=swiglu in train.py makes models for vLLM too)"
    with contextlib.suppress(BadInput):
        gguf_export.architecture_of(hf_config)
        if tokenizer and gguf_export.vocabulary_of(tokenizer):
            names += "; hf.py --gguf writes a file for llama.cpp"
    return names


# --- weights ---

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


@dataclasses.dataclass
class ModelSource:
    """A model to load: a run folder or Hugging Face files."""
    folder: Path
    config: GPTConfig
    about: dict                              # a run's model.json or Hugging Face's config.json
    step: int | None = None                  # of a run: the checkpoint to load

    def tokenizer(self, name=None):
        """Return the model's own tokenizer, or for Hugging Face files the named one. Raise BadInput for a
        name that contradicts a run's own, or for more ids than the model has."""
        if self.step is not None:
            tokenizer = Tokenizer.of_run(self.folder, self.about.get("tokenizer"))
            if self.about.get("tokenizer_sha256") != tokenizer.sha256:
                raise BadInput(f"tokenizer.json in {self.folder} is not as it was written: restore the run's "
                               "original.")
            own_name = self.about["tokenizer"]["name"]
            if name not in (None, own_name) and not tokenizer.is_file_of(name):
                raise BadInput(f"The run in {self.folder} has its own tokenizer, {own_name}: omit "
                               "--tokenizer.")
            return tokenizer
        if not name:
            tiktoken = self.about["model_type"] == "gpt2" and not self.has_tokenizer
            name = "gpt2" if tiktoken else self.folder
        tokenizer = Tokenizer(name)
        if tokenizer.n_vocab > self.config.vocab_size:
            last = tokenizer.decode([tokenizer.n_vocab - 1])
            raise BadInput(f"The tokenizer {name} has {tokenizer.n_vocab} ids, and the model in "
                           f"{self.folder} {self.config.vocab_size}, none for {last!r}: pass the model's own "
                           "with --tokenizer=, or resize it with transformers' resize_token_embeddings().")
        return tokenizer

    @functools.cached_property
    def sha256(self):
        """The SHA-256 of the files that hold the weights."""
        files = sorted(self.folder.glob("*.safetensors"))    # of a run: the base weights of adapters
        if self.step is not None:
            files.append(checkpoint.step_folder(self.folder, self.step) / "model.safetensors")
        return hashlib.sha256("".join(map(checkpoint.sha256, files)).encode()).hexdigest()

    @property
    def description_sha256(self):
        """The SHA-256 of the architecture (of Hugging Face files: of config.json) and of tokenizer.json."""
        tokenizer = self.folder / "tokenizer.json"
        digest = checkpoint.sha256(tokenizer) if tokenizer.exists() else None
        architecture = self.about["architecture"] if self.step is not None else self.about
        return hashlib.sha256(json.dumps([architecture, digest], sort_keys=True).encode()).hexdigest()

    @property
    def has_tokenizer(self):
        return self.step is not None or (self.folder / "tokenizer.json").exists()

    def load(self, *args, device="cpu"):
        """Return GPT(config, *args) in fp32 with the weights, for evaluation (without dropout); BadInput if
        memory is too small."""
        memory.check_weights(self.config, device)
        model = blank(self.config, *args, device=device)
        self.fill(model)
        return model.eval()

    def fill(self, model):
        """Copy the weights into a GPT(config), adapters merged; BadInput if one is not finite."""
        part = "model" if self.step is None else f"checkpoint of step {self.step}"
        with checkpoint.loading(f"The {part} in {self.folder}"):
            if self.step is None:
                load_safetensors(model, self.folder, self.about)
            elif self.about.get("lora"):
                model.load_state_dict(merged(self.load_adapted()))
            else:
                model.load_state_dict(checkpoint.load_weights(self.folder, self.step))
        for name, weight in model.state_dict().items():
            # The sum takes a twentieth of the time; that of large weights may overflow.
            if not weight.sum().isfinite() and not weight.isfinite().all():
                raise BadInput(f"{name} of the model in {self.folder} holds NaN or infinity: give another "
                               "checkpoint, or restore the original files.")

    def load_adapted(self):
        """Return the GPT of a run with LoRA, its adapters not merged. BadInput for another model."""
        if self.step is None or not self.about.get("lora"):
            raise BadInput(f"{self.folder} has no adapters (it was not trained with --lora_rank): export "
                           "it whole, with python hf.py MODEL OUT_DIR.")
        model = blank(self.config)
        model.load_state_dict(checkpoint.load_base(self.folder))
        load_adapters(add_lora(model, **self.about["lora"]), checkpoint.load_weights(self.folder, self.step))
        return model


def find(path_or_name, step=None):
    """Return the ModelSource of a run folder (at its best checkpoint, or at `step`), a folder of Hugging Face
    files, a GGUF file, or a name on the hub."""
    folder = Path(path_or_name)
    is_run = (folder / "model.json").exists()
    if is_run:
        about = checkpoint.read_model(folder)
    elif (folder / "checkpoints").is_dir():
        raise BadInput(f"{folder} is a run folder without model.json: restore it, or give another run.")
    else:
        if folder.suffix == ".gguf" and not folder.is_dir():
            folder = gguf_files.convert(folder)
        folder = folder if folder.is_dir() else download(str(path_or_name))
        refuse_checkpoint_or_adapter(folder)
        about = read_json(folder / "config.json", "give the folder of a model")
    try:
        shape = GPTConfig(**about["architecture"]) if is_run else read_config(about)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        file = folder / ("model.json" if is_run else "config.json")
        advice = "restore it, or give another run" if is_run else "download it again"
        raise BadInput(f"{file} describes no model ({type(e).__name__}: {e}): {advice}.") from None
    if is_run:
        step = step or checkpoint.choose(folder)
    return ModelSource(folder, shape, about, step if is_run else None)


def refuse_checkpoint_or_adapter(folder):
    """Raise BadInput for a checkpoint within a run, and for PEFT adapters, alone or beside a model."""
    if not (folder / "config.json").exists():
        for run in folder.resolve().parents[:2]:
            if (run / "model.json").exists():
                raise BadInput(f"{folder} is part of the run in {run}: give that folder.")
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        base = read_json(adapter, "download it again").get("base_model_name_or_path")
        raise BadInput(f"{folder} holds a PEFT adapter of {base or 'a model'} ({adapter.name}), which can't "
                       "be loaded: merge it with peft's merge_and_unload(), save that model, and give its "
                       "folder.")


def to_resume(out_dir, weights_suffice=False):
    """Return the ModelSource of a run's newest intact checkpoint. Raise BadInput if there is none, or if it
    holds only weights and they don't suffice."""
    step = checkpoint.newest_intact(out_dir)
    if step is None:
        raise BadInput(f"{out_dir} has no intact checkpoint to resume from: start again with --overwrite.")
    if not checkpoint.has_state(out_dir, step) and not weights_suffice:
        raise BadInput(f"The checkpoint of step {step} in {out_dir} holds only weights "
                       "(save_only_model), which is not enough to resume: start a new run with "
                       f"--init_from={out_dir} and another --out_dir=.")
    return find(out_dir, step)


def load(path_or_name, *args, device="cpu"):
    """Return GPT(config, *args) in fp32 from whatever find() takes."""
    return find(path_or_name).load(*args, device=device)


def download(name):
    """Download a model from the hub with huggingface_hub and return its folder."""
    if Path(name).exists():
        raise BadInput(f"{name} is a file, and no GGUF file: give a run folder, or the folder that holds "
                       "config.json and model.safetensors.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise BadInput(f"There is no folder {name}: give a run folder, a folder of Hugging Face's files, a "
                       "GGUF file, or a name on the hub.")
    try:
        import huggingface_hub
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        with ProgressLine(f"downloading {name} from the Hugging Face hub"):
            offline = not hub.is_reachable()
            folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns,
                                                       local_files_only=offline)
        return Path(folder)
    except Exception as e:
        raise BadInput(f"There is no folder {name} here, and the Hugging Face hub gave no such model "
                       f"({hub.reason(e)[:200]}): correct the name, or download the folder on a machine with "
                       "network access and give its path.") from None


def load_safetensors(model, folder, hf_config):
    """Copy the weights from a folder's safetensors into a GPT, in the model's dtype. Every tensor is used
    exactly once; BadInput names one that is missing, unexpected or of another shape."""
    config = model.config
    kind = hf_config["model_type"]
    readers = read_tensors(folder)
    weights = model.state_dict()
    if kind == "gpt2":                                        # files of GPT2Model lack the prefix
        readers = {with_gpt2_prefix(name): reader for name, reader in readers.items()}
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


def with_gpt2_prefix(name):
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


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
    gates = {}
    if config.mlp == "relu2":
        for name, value in tensors.items():
            if "up_proj" in name:
                gates[name.replace("up_proj", "gate_proj")] = value.clone()
    return tensors | gates


def write(folder, config_name, hf_config, tensors_name, tensors):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ProgressLine(f"writing {folder}"):
        save_file(tensors, Path(folder, tensors_name), metadata={"format": "pt"})
    Path(folder, config_name).write_text(json.dumps(hf_config, indent=1))


def export_adapters(model, folder, base_model_name_or_path=""):
    """Write adapter_config.json and adapter_model.safetensors for peft.PeftModel.from_pretrained(base,
    folder). model: a run folder, or a GPT with adapters (`export` within adapters_off writes the base)."""
    if isinstance(model, str | Path):
        model = find(model).load_adapted()
    config = model.config
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
    if not layers:
        raise BadInput("The model has no adapters: use hf.export, or call add_lora first.")
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


@dataclasses.dataclass
class Config:
    paths: tuple = ()                        # run folder, output folder; with --gguf the output file, or none
    gguf: bool | Literal["F16", "Q8_0"] = False      # write one GGUF file; true: F16


def main(argv):
    cfg = config.load(Config, argv, positional="paths")
    if len(cfg.paths) != 2 and not (cfg.gguf and len(cfg.paths) == 1):
        raise BadInput("hf.py needs two folders: python hf.py RUN OUT_DIR, or python hf.py RUN --gguf")
    run, *outputs = cfg.paths
    quantisation = "F16" if cfg.gguf is True else cfg.gguf
    name = Path(run).resolve().name.removesuffix(".gguf")
    out = Path(*outputs or [f"{name}-{quantisation}.gguf"])
    if out.exists() and (cfg.gguf or not out.is_dir() or any(out.iterdir())):
        full = ": choose another file, python hf.py RUN FILE.gguf --gguf" if cfg.gguf else (
            " and is not an empty folder: choose another.")
        raise BadInput(f"{out} exists{full}")
    source = find(run)
    model = source.load()
    tokenizer = source.tokenizer() if source.has_tokenizer or cfg.gguf else None
    suited = "llama.cpp" if cfg.gguf else readers(write_config(model.config), tokenizer)
    try:
        if cfg.gguf:
            gguf_export.export(*hf_files(model, tokenizer), tokenizer, out, quantisation)
        else:
            export(model, out, tokenizer)
    except OSError as e:
        raise checkpoint.write_error(out, e, "choose another place") from None
    step = "" if source.step is None else f" of step {source.step}"
    print(f"{out}: {model.n_params():,} parameters{step}, for {suited}")
    return 0


if __name__ == "__main__":
    guard.run(main)
