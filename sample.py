"""A prompt in, text out.

    python sample.py out/base --prompt="Question: How many gram are there per 6 kg?" --num_samples=4

Knobs, as --key=value:
"""
import sys
from dataclasses import dataclass
from typing import Literal

from engine import Engine, Request, Sampling
from model import GPT, GPTConfig
from runtime import checkpoint, config, guard, hardware
from runtime.tokenizer import Tokenizer


@dataclass
class Config:
    run: str = ""                            # the run folder, first on the command line
    prompt: str = ""                         # empty: the end-of-text token, after which a document begins
    num_samples: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.8                 # 0: greedy
    top_k: int | None = None                 # sample among the k likeliest tokens; None: all
    top_p: float = 1.0                       # among the likeliest that together reach it
    min_p: float = 0.0                       # among those at least so likely, as a share of the likeliest
    seed: int = 0
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"


def main(argv):
    cfg = config.load(Config, argv, positional="run")
    if not cfg.run:
        raise config.BadInput("Name the run to sample from: python sample.py RUN --prompt=...")
    config.at_least(cfg, 1, "num_samples max_new_tokens top_k")
    config.at_least(cfg, 0, "temperature seed")
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)

    about = checkpoint.read_model(cfg.run)
    tokenizer = Tokenizer(about["tokenizer"]["name"])
    model = GPT(GPTConfig(**about["architecture"])).to(hw.device)
    model.load_state_dict(checkpoint.load_weights(cfg.run, checkpoint.choose(cfg.run), hw.device))

    prompt = tokenizer.encode(cfg.prompt).tolist() or [tokenizer.eos]
    try:
        sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, stop=(tokenizer.eos,))
        engine = Engine(model, slots=min(cfg.num_samples, 64), context=len(prompt) + cfg.max_new_tokens, sampling=sampling,
                        seed=cfg.seed, dtype=hw.torch_dtype if hw.dtype == "bf16" else None)     # fp16's range is too narrow
        samples = list(engine.generate([Request(prompt, cfg.num_samples, max_new_tokens=cfg.max_new_tokens)]))
    except ValueError as e:
        raise config.BadInput(str(e)) from None
    for sample in sorted(samples, key=lambda sample: sample.index):
        text = tokenizer.decode(sample.ids[:-1] if sample.reason == "stop" else sample.ids)
        print(cfg.prompt + text.rstrip("\n"), end="\n---\n")


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
