"""Hugging Face's files in and out of model.py: GPT-2, Llama (and SmolLM2), Qwen2.5, Qwen3. PEFT's files out.

    python hf.py out/base exported       # a folder that transformers.AutoModelForCausalLM.from_pretrained
    loads
"""
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import GPTConfig, LoRA, add_lora, blank, load_adapters, merged, scaled
from runtime import checkpoint, config, guard, hub, memory
from runtime.config import BadInput, read_json
from runtime.tokenizer import Tokenizer

# Buffers that older files hold beside the weights: masks and rotary frequencies.
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")


# --- configurations ---

def read_config(hf):
    """GPTConfig of a config.json, given as a dictionary. BadInput for what model.py does not compute."""
    kind = hf.get("model_type")
    if kind == "gpt2":
        refuse(hf | {"unscaled attention": not hf.get("scale_attn_weights", True)}, "scale_attn_by_inverse_layer_idx",
               "add_cross_attention", "unscaled attention")
        return GPTConfig(
            vocab_size=hf["vocab_size"], block_size=hf["n_positions"], n_layer=hf["n_layer"], n_head=hf["n_head"],
            n_embd=hf["n_embd"], mlp_hidden=hf.get("n_inner"), norm="layernorm", norm_eps=hf.get("layer_norm_epsilon", 1e-5),
            position="learned", qk_norm=False, mlp=choice(hf, "activation_function", {"gelu_new": "gelu_tanh", "gelu": "gelu"}),
            qkv_bias=True, o_bias=True, mlp_bias=True, tied_head=hf.get("tie_word_embeddings", True))
    if kind not in ("llama", "qwen2", "qwen3"):
        raise BadInput(f"The model type {kind} is not known here: gpt2, llama, qwen2 and qwen3 are.")
    other_layers = set(hf.get("layer_types") or ()) - {"full_attention"}
    refuse(hf | {"layer_types": other_layers}, "use_sliding_window", "layer_types")
    rope = hf.get("rope_parameters") or (hf.get("rope_scaling") or {}) | {"rope_theta": hf.get("rope_theta", 10000.0)}
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type")} | {"rope_type": rope.get("rope_type") or
                                                                                  rope.get("type", "default")}
    if scaling["rope_type"] not in ("default", "linear", "llama3"):
        raise BadInput(f"Rotary positions of type {scaling['rope_type']} are not known here: default, linear "
                       "and llama3 are.")
    unknown = scaling.keys() - inspect.signature(scaled).parameters.keys()
    if unknown and scaling["rope_type"] != "default":
        raise BadInput(f"config.json scales rotary positions with {min(unknown)}, which model.py does not "
                       "know: choose another model.")
    bias = hf.get("attention_bias") or False
    return GPTConfig(
        vocab_size=hf["vocab_size"], block_size=hf["max_position_embeddings"], n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"], n_embd=hf["hidden_size"], n_kv_head=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim"), mlp_hidden=hf["intermediate_size"], norm="rmsnorm", norm_eps=hf.get("rms_norm_eps", 1e-6),
        position="rope", rope_theta=rope["rope_theta"], rope_scaling=None if scaling["rope_type"] == "default" else scaling,
        qk_norm=kind == "qwen3", mlp=choice(hf, "hidden_act", {"silu": "swiglu", "relu": "relu2"}), qkv_bias=kind == "qwen2" or bias,
        o_bias=kind != "qwen2" and bias, mlp_bias=hf.get("mlp_bias") or False, tied_head=hf.get("tie_word_embeddings", False))


def refuse(hf, *knobs):
    for knob in knobs:
        if hf.get(knob):
            raise BadInput(f"config.json has {knob}={hf[knob]}, which model.py does not compute: choose "
                           "another model.")


def choice(hf, knob, known):
    if hf.get(knob) not in known:
        raise BadInput(f"config.json has {knob}={hf.get(knob)}, which model.py does not compute "
                       f"({', '.join(known)} it does): choose another model.")
    return known[hf[knob]]


def write_config(c):
    """The config.json, as a dictionary, of an architecture of transformers that computes what this GPTConfig
    does."""
    if c.logit_softcap == 0 and (c.norm, c.position, c.qk_norm) == ("layernorm", "learned", False) and \
            c.mlp in ("gelu", "gelu_tanh") and c.qkv_bias and c.o_bias and c.mlp_bias and \
            (c.n_kv_head, c.head_dim) == (c.n_head, c.n_embd // c.n_head):
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": c.vocab_size, "n_positions": c.block_size,
                "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_inner": c.mlp_hidden,
                "layer_norm_epsilon": c.norm_eps, "activation_function": "gelu_new" if c.mlp == "gelu_tanh" else "gelu",
                "tie_word_embeddings": c.tied_head, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fits = {"llama": not c.qk_norm and c.qkv_bias == c.o_bias, "qwen2": c.qkv_bias and not (c.qk_norm or c.o_bias or c.mlp_bias),
            "qwen3": c.qk_norm and c.qkv_bias == c.o_bias and not c.mlp_bias}
    kind = next((kind for kind, fit in fits.items() if fit), None)
    if not kind or c.logit_softcap or (c.norm, c.position) != ("rmsnorm", "rope") or c.mlp not in ("swiglu", "relu2") or \
            kind == "qwen2" and c.head_dim != c.n_embd // c.n_head:
        raise BadInput(f"transformers has no architecture for norm={c.norm}, position={c.position}, "
                       f"qk_norm={c.qk_norm}, mlp={c.mlp}, qkv_bias={c.qkv_bias}, "
                       f"logit_softcap={c.logit_softcap}: GPT-2's, Llama's, Qwen's and train.py's default can "
                       "be exported.")
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    rope = (c.rope_scaling or {"rope_type": "default"}) | {"rope_theta": c.rope_theta}
    return {"model_type": kind, "architectures": [f"{name}ForCausalLM"], "vocab_size": c.vocab_size,
            "max_position_embeddings": c.block_size, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim, "hidden_size": c.n_embd,
            "intermediate_size": c.mlp_hidden, "hidden_act": "silu" if c.mlp == "swiglu" else "relu", "rms_norm_eps": c.norm_eps,
            "rope_parameters": rope, "rope_theta": c.rope_theta, "rope_scaling": c.rope_scaling,
            "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "tie_word_embeddings": c.tied_head}


# --- weights ---

def names(c, kind):
    """For each weight of GPT(c): (its name, theirs: one, or several that are stacked, whether theirs is
    transposed)."""
    def both(ours, *theirs, bias, transposed=False):
        yield f"{ours}.weight", [f"{t}.weight" for t in theirs], transposed
        if bias:
            yield f"{ours}.bias", [f"{t}.bias" for t in theirs], False

    gpt2 = kind == "gpt2"
    yield "token_embedding.weight", ["transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"], False
    if gpt2:
        yield "position_embedding.weight", ["transformer.wpe.weight"], False
    for i in range(c.n_layer):
        a, m, t = f"blocks.{i}.attention", f"blocks.{i}.mlp", f"transformer.h.{i}" if gpt2 else f"model.layers.{i}"
        yield from both(f"{a}_norm", f"{t}.ln_1" if gpt2 else f"{t}.input_layernorm", bias=gpt2)
        yield from both(f"{m}_norm", f"{t}.ln_2" if gpt2 else f"{t}.post_attention_layernorm", bias=gpt2)
        if gpt2:
            yield from both(f"{a}.qkv", f"{t}.attn.c_attn", bias=True, transposed=True)
            yield from both(f"{a}.out", f"{t}.attn.c_proj", bias=True, transposed=True)
            yield from both(f"{m}.up", f"{t}.mlp.c_fc", bias=True, transposed=True)
            yield from both(f"{m}.down", f"{t}.mlp.c_proj", bias=True, transposed=True)
            continue
        yield from both(f"{a}.qkv", *(f"{t}.self_attn.{x}_proj" for x in "qkv"), bias=c.qkv_bias)
        yield from both(f"{a}.out", f"{t}.self_attn.o_proj", bias=c.o_bias)
        if c.qk_norm:
            yield f"{a}.q_norm", [f"{t}.self_attn.q_norm.weight"], False
            yield f"{a}.k_norm", [f"{t}.self_attn.k_norm.weight"], False
        if c.mlp == "swiglu":
            yield from both(f"{m}.gate", f"{t}.mlp.gate_proj", bias=c.mlp_bias)
        yield from both(f"{m}.up", f"{t}.mlp.up_proj", bias=c.mlp_bias)
        yield from both(f"{m}.down", f"{t}.mlp.down_proj", bias=c.mlp_bias)
    yield from both("final_norm", "transformer.ln_f" if gpt2 else "model.norm", bias=gpt2)
    if not c.tied_head:
        yield "head.weight", ["lm_head.weight"], False


@dataclass
class Found:
    """A model that exists: a run folder, or Hugging Face's files."""
    folder: Path
    config: GPTConfig
    about: dict                              # model.json of a run, config.json of Hugging Face
    step: int | None = None                  # of a run: the checkpoint whose weights count

    def tokenizer(self, name=None):
        """The model's own, or for Hugging Face's files the one of that name."""
        if self.step is not None:
            tokenizer = Tokenizer.of_run(self.folder, self.about.get("tokenizer"))
            if name not in (None, own := self.about["tokenizer"]["name"]):
                raise BadInput(f"The run in {self.folder} has its own tokenizer, {own}: leave --tokenizer "
                               "out.")
            return tokenizer
        name = name or ("gpt2" if self.about["model_type"] == "gpt2" and not self.has_tokenizer else self.folder)
        tokenizer = Tokenizer(name)
        if tokenizer.n_vocab > self.config.vocab_size:
            raise BadInput(f"The tokenizer {name} has {tokenizer.n_vocab} ids, and the model in {self.folder} "
                           f"{self.config.vocab_size}: give the model's own with --tokenizer=.")
        return tokenizer

    @property
    def has_tokenizer(self):
        return self.step is not None or (self.folder / "tokenizer.json").exists()

    def load(self, *args, device="cpu"):
        """GPT(config, *args) in fp32 with the weights; BadInput if they don't fit the memory."""
        memory.check_weights(self.config, device)
        model = blank(self.config, *args, device=device)
        self.fill(model)
        return model

    def fill(self, model):
        """Give a GPT(config) the weights; a run's adapters are merged."""
        if self.step is None:
            with checkpoint.loading(f"The model in {self.folder}"):
                return fill(model, self.folder, self.about)
        with checkpoint.loading(f"The checkpoint of step {self.step} in {self.folder}"):
            weights = checkpoint.load_weights(self.folder, self.step)
            if lora := self.about.get("lora"):
                adapted = blank(self.config)
                adapted.load_state_dict(checkpoint.load_base(self.folder))
                load_adapters(add_lora(adapted, **lora), weights)
                weights = merged(adapted)
            model.load_state_dict(weights)


def find(path_or_name, step=None):
    """Found: a run folder (at its best checkpoint, or that of `step`), a folder of Hugging Face's, or a name
    on the hub."""
    run = (Path(path_or_name) / "model.json").exists()
    folder = Path(path_or_name) if run or Path(path_or_name).is_dir() else download(str(path_or_name))
    about = checkpoint.read_model(folder) if run else read_json(folder / "config.json", "give the folder of a model")
    try:
        shape = GPTConfig(**about["architecture"]) if run else read_config(about)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        file = folder / ("model.json" if run else "config.json")
        raise BadInput(f"{file} describes no model ({type(e).__name__}: {e}): "
                       f"{'restore it, or give another run' if run else 'get it again'}.") from None
    return Found(folder, shape, about, step or checkpoint.choose(folder) if run else None)


def to_resume(out_dir, weights_suffice=False):
    """Found: the newest intact checkpoint of a run that is to go on. BadInput if there is none, or one of
    weights alone."""
    step = checkpoint.newest_intact(out_dir)
    if step is None:
        raise BadInput(f"{out_dir} has no intact checkpoint to resume from: start again with --overwrite.")
    if not checkpoint.has_state(out_dir, step) and not weights_suffice:
        raise BadInput(f"The checkpoint of step {step} in {out_dir} holds the weights alone "
                       "(save_only_model), which is not enough to resume: start a new run with "
                       f"--init_from={out_dir} and another --out_dir=.")
    return find(out_dir, step)


def load(path_or_name, *args, device="cpu"):
    """GPT(config, *args) in fp32 of a run folder, a folder of Hugging Face's or a name on the hub. See `find`
    and `fill`."""
    return find(path_or_name).load(*args, device=device)


def download(name):
    """Where huggingface_hub puts what it downloads by a name."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise BadInput(f"There is no folder {name}: give a run folder, a folder of Hugging Face's files, or a "
                       "name on the hub.")
    try:
        import huggingface_hub
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                                                      local_files_only=not hub.answers()))
    except Exception as e:
        raise BadInput(f"There is no folder {name} here, and the Hugging Face hub gave no such model "
                       f"({hub.reason(e)[:200]}): correct the name, or download the folder where there is a "
                       "network and give its path.") from None


def fill(model, folder, hf):
    """Give a GPT the weights of a folder's safetensors, in one file or several, converted to the model's
    dtype. Every tensor is used exactly once; BadInput names the one that is missing, left over or of another
    shape."""
    c, theirs, own = model.config, read_tensors(folder), model.state_dict()
    if hf["model_type"] == "gpt2":                            # files of the base model lack the prefix
        theirs = {k if k.startswith(("transformer.", "lm_head.")) else f"transformer.{k}": v for k, v in theirs.items()}
    theirs = {k: v for k, v in theirs.items() if not BUFFERS.fullmatch(k)}
    for name, sources, transposed in names(c, hf["model_type"]):
        missing = [s for s in sources if s not in theirs]
        if missing:
            raise BadInput(f"{folder} has no tensor {missing[0]}, which a {hf['model_type']} needs: get its "
                           "files again.")
        value = torch.cat([theirs.pop(s)() for s in sources])
        value, want = value.t() if transposed else value, own[name]
        if want.shape[0] == c.padded_vocab_size and value.shape[0] == c.vocab_size:
            want[c.vocab_size:] = 0                           # padding
            want = want[:c.vocab_size]
        if value.shape != want.shape:
            raise BadInput(f"{' + '.join(sources)} in {folder} has the shape {tuple(value.shape)}, and "
                           f"config.json asks for {tuple(want.shape)}: get the files of one model.")
        want.copy_(value)
        twins = [s.replace("up_proj", "gate_proj") for s in sources if c.mlp == "relu2" and "up_proj" in s]
        if not all(torch.equal(theirs.pop(twin, torch.Tensor)(), value) for twin in twins):
            raise BadInput(f"{twins[0]} in {folder} differs from up_proj, and with hidden_act=relu only an "
                           "MLP whose gate is its own input is known here: choose another model.")
    shared = theirs.get("lm_head.weight") if c.tied_head else None
    if shared and torch.equal(shared().to(model.head_weight), own["token_embedding.weight"][:c.vocab_size]):
        del theirs["lm_head.weight"]                          # the shared weights, written twice
    if theirs:
        raise BadInput(f"{folder} has {len(theirs)} tensors that a {hf['model_type']} has no place for, "
                       f"{next(iter(theirs))} for one: choose another model.")


def read_tensors(folder):
    """{name: function that reads the tensor} of model.safetensors, or of the shards that its index names."""
    index, tensors = folder / "model.safetensors.index.json", {}
    shards = read_json(index, "get it again").get("weight_map") if index.exists() else {"": "model.safetensors"}
    if not isinstance(shards, dict):
        raise BadInput(f"{index} does not say which file holds which tensor: get it again.")
    for shard in sorted({checkpoint.inside(folder, name) for name in shards.values()}):
        try:
            file = safe_open(shard, framework="pt")
        except (OSError, SafetensorError) as e:
            raise BadInput(f"{shard} can't be read ({e}): get it again.") from None
        tensors |= {name: (lambda file=file, name=name: file.get_tensor(name)) for name in file.keys()}
    return tensors


def export(model, folder, tokenizer=None):
    """Write config.json and model.safetensors (fp32) that transformers loads as the same function, adapters
    merged, and the tokenizer for its AutoTokenizer."""
    c = model.config
    hf, own, tensors = write_config(c), merged(model), {}
    if tokenizer:
        hf |= {"eos_token_id": tokenizer.stop if len(tokenizer.stop) > 1 else tokenizer.eos, "pad_token_id": tokenizer.pad,
               "bos_token_id": tokenizer.bos}
    for name, theirs, transposed in names(c, hf["model_type"]):
        value = own[name].float().cpu()
        if value.shape[0] == c.padded_vocab_size and name in ("token_embedding.weight", "head.weight"):
            value = value[:c.vocab_size]
        parts = (value.t(),) if transposed else rows(c, value, theirs)
        tensors |= {their: part.clone().contiguous() for their, part in zip(theirs, parts)}
    write(folder, "config.json", hf, "model.safetensors", gated(c, tensors))
    if tokenizer:
        tokenizer.export(folder)


def rows(c, value, theirs):
    """The parts of a weight [out, ...] of ours that stacks several of theirs."""
    return value.split([c.n_head * c.head_dim] + 2 * [c.n_kv_head * c.head_dim] if len(theirs) == 3 else len(value))


def gated(c, tensors):
    """relu(z)^2 = relu(z) * z: a gated MLP whose gate is its input."""
    twins = {k.replace("up_proj", "gate_proj"): v.clone() for k, v in tensors.items() if c.mlp == "relu2" and "up_proj" in k}
    return tensors | twins


def write(folder, config_name, hf, tensors_name, tensors):
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder, tensors_name), metadata={"format": "pt"})
    Path(folder, config_name).write_text(json.dumps(hf, indent=1))


def export_adapters(model, folder, base_model_name_or_path=""):
    """Write adapter_config.json and adapter_model.safetensors: peft.PeftModel.from_pretrained(base, folder)
    is the function of the adapted model, base being transformers' model of the base weights (`export` within
    adapters_off writes one)."""
    c, layers, tensors = model.config, {k: m for k, m in model.named_modules() if isinstance(m, LoRA)}, {}
    if not layers:
        raise BadInput("The model has no adapters: use hf.export, or add_lora before.")
    kind = write_config(c)["model_type"]
    for name, theirs, _ in names(c, kind):
        m = layers.get(name.removesuffix(".weight"))
        if m is None:
            continue
        for their, b in zip(theirs, rows(c, m.lora_b, theirs)):          # one A for all, each its rows of B
            # [rank, in] and [out, rank], for GPT-2's Conv1D too
            for x, value in (("A", m.lora_a), ("B", b)):
                key = f"base_model.model.{their.removesuffix('weight')}lora_{x}.weight"
                tensors[key] = value.detach().float().cpu().clone()
    tensors, m = gated(c, tensors), next(iter(layers.values()))
    write(folder, "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_model_name_or_path),
        "inference_mode": True, "r": len(m.lora_a), "lora_alpha": m.alpha, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": kind == "gpt2",                                # Conv1D keeps its weight transposed
        # PEFT adapts what ends so, in every block. One name would not do: GPT-2 has attn.c_proj and
        # mlp.c_proj.
        "target_modules": sorted({".".join(k.split(".")[-4:-2]) for k in tensors}),
    }, "adapter_model.safetensors", tensors)


@dataclass
class Config:
    paths: tuple = ()                        # a run folder, and the folder to write


def main(argv):
    cfg = config.load(Config, argv, positional="paths")
    if len(cfg.paths) != 2:
        raise BadInput("Two folders are needed: python hf.py RUN OUT_DIR")
    source, out = cfg.paths
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise BadInput(f"{out} is there and not an empty folder: choose another.")
    found = find(source)
    model = found.load()
    try:
        export(model, out, found.tokenizer() if found.has_tokenizer else None)
    except OSError as e:
        raise BadInput(f"{out} could not be written ({e.strerror}): choose another folder.") from None
    print(f"{out}: {model.n_params():,} parameters{'' if found.step is None else f' of step {found.step}'}")
    return 0


if __name__ == "__main__":
    guard.run(main)
