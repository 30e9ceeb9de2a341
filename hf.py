"""Export a model: Hugging Face files (GPT-2, Llama, SmolLM2, Qwen2.5, Qwen3), or one GGUF file.

    python hf.py out/base exported   # a folder for transformers.AutoModelForCausalLM.from_pretrained, with a
                                     # model card; `hf upload NAME exported` publishes it
    python hf.py out/base --gguf     # base-F16.gguf for llama.cpp; --gguf=Q8_0: half the size
"""
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.usage import first_line

first_line()                             # answers --help before the slow import of PyTorch

from safetensors import SafetensorError

import hub
from hub import card, gguf_export, weights
from hub.architectures import write_config
from runtime import checkpoint, config, guard
from runtime.config import BadInput


@dataclass
class Config:
    paths: tuple = ()                        # run folder, output folder; with --gguf the output file, or none
    gguf: bool | Literal["F16", "Q8_0"] = False      # write one GGUF file; true: F16


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
    source = hub.find(run)
    model = source.load()
    tokenizer = source.tokenizer() if source.has_tokenizer or cfg.gguf else None
    suited = "llama.cpp" if cfg.gguf else readers(write_config(model.config), tokenizer)
    try:
        if cfg.gguf:
            gguf_export.export(*weights.hf_files(model, tokenizer), tokenizer, out, quantisation)
        else:
            weights.export(model, out, tokenizer)
            if source.step is not None:
                (out / "README.md").write_text(card.model_card(source, model.n_params()), encoding="utf-8")
    except (OSError, SafetensorError) as e:
        raise checkpoint.write_error(out, e, "choose another place") from None
    step = "" if source.step is None else f" of step {source.step}"
    print(f"{out}: {model.n_params():,} parameters{step}, for {suited}")
    return 0


if __name__ == "__main__":
    guard.run(main)
