"""Translate config.json of GPT-2, Llama, SmolLM2, Qwen2.5 and Qwen3 to a GPTConfig and back."""
import contextlib
import dataclasses
import inspect

from model import GPTConfig, scale_rope
from runtime.config import BadInput

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
        raise BadInput(f"The model type {kind} is not supported: choose gpt2, llama, qwen2 or qwen3.")
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
    differences = []                         # per kind the fields that it can't express
    for kind in ("gpt2", "llama", "qwen3") if wide_heads else ("gpt2", "llama", "qwen2", "qwen3"):
        written = write_gpt2(config) if kind == "gpt2" else write_llama(config, kind)
        with contextlib.suppress(ValueError, BadInput):       # a width that this kind can't have, for example
            other = read_config(written)
            if other == config:
                return written
            differences.append([f"{name}={value}" for name, value in vars(config).items()
                                if value != getattr(other, name)])
    nearest = min(differences, key=len, default=["this shape"])
    raise BadInput(f"transformers has no architecture with {', '.join(nearest)} and the model's other "
                   "options: export an architecture like GPT-2's, Llama's, Qwen's or train.py's default.")


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
