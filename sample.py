"""A prompt in, text out.

    python sample.py out/base --prompt="Question: How many gram are there per 6 kg?" --num_samples=4

Knobs, as --key=value:
"""
import sys
from dataclasses import dataclass
from typing import Literal

import torch

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
    model = GPT(GPTConfig(**about["architecture"]), hw.attention).to(hw.device).eval()
    model.load_state_dict(checkpoint.load_weights(cfg.run, checkpoint.choose(cfg.run), hw.device))

    prompt = tokenizer.encode(cfg.prompt).tolist() or [tokenizer.eos]
    x = torch.tensor([prompt] * cfg.num_samples, device=hw.device)
    with hw.autocast():
        out = model.generate(x, cfg.max_new_tokens, cfg.temperature, cfg.top_k,
                             torch.Generator(hw.device).manual_seed(cfg.seed))
    for row in out[:, len(prompt):].tolist():
        stop = row.index(tokenizer.eos) if tokenizer.eos in row else len(row)
        print(cfg.prompt + tokenizer.decode(row[:stop]).rstrip("\n"), end="\n---\n")


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
