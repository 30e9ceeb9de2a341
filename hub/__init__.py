"""Find and load a model: a run folder, Hugging Face files, a GGUF file, or a name on the hub.

    hub.load("out/base")                     the GPT of a run, in fp32
    hub.find("HuggingFaceTB/SmolLM2-135M")   its ModelSource: architecture, tokenizer, weights
"""
import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path

from model import GPTConfig, blank
from runtime import checkpoint, memory
from runtime.config import BadInput, read_json
from runtime.progress import ProgressLine
from text.tokenizer import Tokenizer


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
            own = self.folder / "vocab.json"
            if tiktoken and own.exists():    # another GPT-2's ids are not OpenAI's
                tiktoken = read_json(own, "restore it").get("\u0120the") == 262
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

    def identity(self, name):
        """Return the entry of model.json that records this model, which was found by this name."""
        return {"name": name, "step": self.step, "sha256": self.sha256,
                "description_sha256": self.description_sha256}

    @property
    def has_tokenizer(self):
        return self.step is not None or (self.folder / "tokenizer.json").exists()

    def load(self, *args, device="cpu"):
        """Return GPT(config, *args) in fp32 with the weights, for evaluation (without dropout); BadInput if
        memory is too small."""
        memory.check_weights(self.config, device, remedy="free memory, or choose a smaller model")
        model = blank(self.config, *args, device=device)
        self.fill(model)
        return model.eval()

    def fill(self, model):
        """Copy the weights into a GPT(config), adapters merged; BadInput if one is not finite."""
        part = "model" if self.step is None else f"checkpoint of step {self.step}"
        if self.step is not None and not checkpoint.step_folder(self.folder, self.step).exists():
            raise BadInput(f"{self.folder} no longer has the {part}, since its run goes on and has replaced "
                           "it: repeat the command.")
        with checkpoint.loading(f"The {part} in {self.folder}"):
            if self.step is None:
                from hub.weights import load_safetensors
                load_safetensors(model, self.folder, self.about)
            elif self.about.get("lora"):
                from layers.lora import merged
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
        from layers.lora import add_lora, load_adapters
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
            from hub.gguf_import import convert
            folder = convert(folder)
        folder = folder if folder.is_dir() else download(str(path_or_name))
        refuse_checkpoint_or_adapter(folder)
        about = read_json(folder / "config.json", "give the folder of a model")
        from hub.architectures import read_config
    try:
        shape = GPTConfig(**about["architecture"]) if is_run else read_config(about)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        file = folder / ("model.json" if is_run else "config.json")
        advice = "restore it, or use the code that wrote it" if is_run else "download it again"
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
                       f"(save_only_model), which is not enough to resume: {checkpoint.new_run(out_dir)}.")
    return find(out_dir, step)


def load(path_or_name, *args, device="cpu"):
    """Return GPT(config, *args) in fp32 from whatever find() takes."""
    return find(path_or_name).load(*args, device=device)


def download(name):
    """Download a model from the hub with huggingface_hub and return its folder."""
    if Path(name).exists():
        raise BadInput(f"{name} is a file, but not GGUF: give a run folder, or the folder that holds "
                       "config.json and model.safetensors.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise BadInput(f"There is no folder {name}: give a run folder, a folder of Hugging Face's files, a "
                       "GGUF file, or a name on the hub.")
    from runtime import network
    try:
        import huggingface_hub
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        with ProgressLine(f"downloading {name} from the Hugging Face hub"):
            offline = not network.is_reachable()
            folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns,
                                                       local_files_only=offline)
        return Path(folder)
    except Exception as e:
        raise BadInput(f"There is no folder {name} here, and the Hugging Face hub gave no such model "
                       f"({network.reason(e)[:200]}): correct the name, or download the folder on a machine "
                       "with network access and give its path.") from None
