"""How good a model is on a text: perplexity. Also the functions that the other stages call.

    python eval.py out/book --dataset=other.txt
    python eval.py HuggingFaceTB/SmolLM2-360M --dataset=wikitext --split=test --block_size=1024 --stride=512 --json
    torchrun --nproc_per_node=8 eval.py out/book --dataset=other.txt

Every token but the first of the text is predicted once, after at least block_size - stride others (at the start, after those there
are); nothing is put before the text. Knobs, as --key=value:
"""
import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

import hf
from runtime import config, data, distributed, examples, guard, hardware
from runtime.config import BadInput


@dataclass
class Config:
    model: str = ""                          # run folder, Hugging Face folder or hub name, first on the command line
    dataset: str = ""                        # as train.py's; of a single file all of it counts, else the split
    split: Literal["valid", "test", "train"] = "valid"
    text_key: str = "text"                   # where the text is in .jsonl, .parquet, or a dataset of the hub
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes, or a folder with one
    data_dir: str = "data"                   # where tokenised texts are kept
    block_size: int | None = None            # tokens of a window; None: the model's, at most 1024
    stride: int | None = None                # tokens between the beginnings of two windows; None: block_size, no overlap
    batch_size: int = 8                      # windows at a time
    eval_tokens: int | None = None           # predict only so many; None: all
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "fp32"     # bf16 is faster, and rounds
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    json: bool = False                       # all figures as the last line


def text_loss(model, tokens, block_size, batch_size, hardware, limit=None, stride=None):
    """Loss of a text over all ranks, each token predicted once (data.complete_pass).

    tokens: data.TokenFile. limit: only the first so many predicted tokens. Returns a dictionary: `loss` in nats per token, `nll`
    in nats, `tokens` predicted (the first token of a text is context only), `ppl_token`; where the text's words and bytes are
    known also these, `ppl_word` = exp(nats / words), words being what white space separates, and `bits_per_byte`. With a limit,
    words and bytes are counted in proportion.
    """
    result = loss_of(model, data.complete_pass(tokens, block_size, batch_size, limit, distributed.rank(), distributed.world_size(), stride),
                     hardware)
    nats, n = result["nll"], result["tokens"]
    if tokens.words:
        share = n / (len(tokens) - 1)
        words, bytes = share * tokens.words, share * tokens.bytes
        result |= {"words": round(words), "bytes": round(bytes), "ppl_word": exp(nats / words), "bits_per_byte": nats / bytes / math.log(2)}
    return result


def examples_loss(model, held_out, batch_size, hardware):
    """As text_loss, of the answers of examples.Examples, over all ranks."""
    mine = sorted(held_out, key=lambda e: e.length)[distributed.rank()::distributed.world_size()]
    return loss_of(model, (examples.padded(mine[i:i + batch_size]) for i in range(0, len(mine), batch_size)), hardware)


@torch.no_grad()
def loss_of(model, batches, hardware):
    """{loss, nll, tokens, ppl_token} of batches x, y, summed over all ranks."""
    training = model.training
    model.eval()
    nats, n = 0.0, 0
    for x, y in batches:
        n += int((y != data.IGNORE).sum())
        with hardware.autocast():
            nats += model(x.to(hardware.device), y.to(hardware.device)).item()
    model.train(training)
    nats, n = distributed.sum([nats, n])
    return {"loss": nats / n, "nll": nats, "tokens": int(n), "ppl_token": exp(nats / n)}


def exp(x):
    """Perplexity, infinite where a float can't hold it."""
    return math.exp(x) if x < 700 else math.inf


def evaluation_line(result):
    """A line for people of what text_loss returned."""
    line = f"val loss {result['loss']:.4f} | perplexity {result['ppl_token']:.2f} a token"
    return line + (f", {result['ppl_word']:.2f} a word | {result['bits_per_byte']:.4f} bits/byte" if "ppl_word" in result else "")


def main(argv):
    cfg = config.load(Config, argv, positional="model")
    if not cfg.model or not cfg.dataset:
        raise BadInput("Name a model and a text: python eval.py RUN_OR_MODEL --dataset=...")
    config.at_least(cfg, 1, "block_size stride batch_size eval_tokens")
    distributed.init()
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False, attention=cfg.attention)
    found = distributed.on_main(lambda: hf.find(cfg.model))
    tokenizer = found.tokenizer(cfg.tokenizer)
    block_size = cfg.block_size or min(1024, found.config.block_size)
    stride = cfg.stride or block_size
    if block_size > found.config.block_size or stride > block_size:
        raise BadInput(f"A stride of {stride} needs windows of at least that, and these of {block_size} a model with as many positions, "
                       f"which has {found.config.block_size}: lower --stride or --block_size.")
    folder = distributed.on_main(lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key, cfg.split))
    text = data.TokenFile(folder, "valid")
    if len(text) < 2:
        raise BadInput(f"{cfg.dataset} has no token to predict: give more text.")
    began = time.perf_counter()
    model = found.load(hw.attention, device=hw.device)
    result = text_loss(model, text, block_size, cfg.batch_size, hw, cfg.eval_tokens, stride)
    seconds = time.perf_counter() - began
    if distributed.is_main():
        print(f"{cfg.model} on {cfg.dataset}: {result['tokens']:,} tokens in windows of {block_size}, stride {stride}, {hw.dtype}, "
              f"{seconds:.1f} s")
        print(evaluation_line(result))
        if cfg.json:
            unknown = dict.fromkeys(("words", "bytes", "ppl_word", "bits_per_byte"))
            print(json.dumps(unknown | result | {"model": cfg.model, "dataset": cfg.dataset, "block_size": block_size, "stride": stride,
                                                 "dtype": hw.dtype, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
