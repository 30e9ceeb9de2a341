"""Synthetic inputs of benchmarks: model shapes, random weights, a text, a tokenizer, a verifier."""
import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch

from model import blank
from text.tokenizer import END_OF_TEXT, byte_letters, byte_level

GPT2 = dict(norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh", qkv_bias=True, o_bias=True,
            mlp_bias=True, tied_head=True)
MILLION = dict(vocab_size=257, block_size=256, n_layer=4, n_head=2, n_embd=128)
SHAPES = {
    "smollm2-360m": dict(vocab_size=49152, block_size=8192, n_layer=32, n_head=15, n_kv_head=5, n_embd=960,
                         mlp="swiglu", mlp_hidden=2560, qk_norm=False, tied_head=True, rope_theta=1e5),
    "smollm2-135m": dict(vocab_size=49152, block_size=8192, n_layer=30, n_head=9, n_kv_head=3, n_embd=576,
                         mlp="swiglu", mlp_hidden=1536, qk_norm=False, tied_head=True, rope_theta=1e5),
    "qwen3-0.6b": dict(vocab_size=151936, block_size=40960, n_layer=28, n_head=16, n_kv_head=8, n_embd=1024,
                       head_dim=128, mlp="swiglu", mlp_hidden=3072, tied_head=True, rope_theta=1e6),
    "gpt2": GPT2,
    "gpt2-1m": GPT2 | MILLION,
    "1m": MILLION,                           # train.py's default
    "llama-1m": MILLION | dict(mlp="swiglu", qk_norm=False),
    "llama-50m": dict(vocab_size=32768, block_size=256, n_layer=8, n_head=9, n_embd=576, mlp="swiglu",
                      mlp_hidden=1536, qk_norm=False, tied_head=True),
}


def random_model(c, hw):
    """Return a GPT of this shape: matrices from a normal distribution, norms 1, biases 0."""
    model = blank(c, device=hw.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            else:
                p.fill_(not name.endswith("bias"))
    return model.eval()


def write_text(folder, n_vocab, seed, tokens=2**20):
    """Write train.bin and val.bin in nanoGPT's format, and return the folder. The text is learnable: each id
    has a likely successor, and some ids are common. Uses at most 65,536 ids."""
    folder = Path(folder)
    rng = np.random.default_rng(seed)
    n = min(n_vocab - 1, 2**16)
    successors = rng.integers(n, size=n)
    ids = np.empty((256, tokens // 256), np.int64)
    ids[:, 0] = 0
    for t in range(1, ids.shape[1]):
        common = (n * rng.random(len(ids))**3).astype(np.int64)
        follows = rng.random(len(ids)) < 0.6
        ids[:, t] = np.where(follows, successors[ids[:, t - 1]], common)
    folder.mkdir(exist_ok=True)
    ids.astype(np.uint16).tofile(folder / "train.bin")
    ids[:, :64].astype(np.uint16).tofile(folder / "val.bin")
    return folder


def write_tokenizer(folder, n_vocab):
    """Write a tokenizer.json: bytes, words that only decoding produces, the end-of-text token."""
    folder = Path(folder)
    all_words = ("".join(letters) for n in (2, 3, 4) for letters in product(ascii_lowercase, repeat=n))
    words = islice(all_words, n_vocab - 257)
    vocab = {token: i for i, token in enumerate([*byte_letters(), *words, END_OF_TEXT])}
    content = byte_level(vocab, [], n_vocab - 1)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT,
                "pad_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def suppress_eos(model, eos):
    """Change the weights so that the end-of-text token is never sampled and all sides do the same work.
    Channel 0 is 1 in all embeddings and no block writes to it; the head's row for eos is -1000 there."""
    with torch.no_grad():
        model.token_embedding.weight[:, 0] = 1
        model.head_weight[eos, 0] = -1000
        for block in model.blocks:
            for linear in (block.attention.out, block.mlp.down):
                linear.weight[0] = 0
                if linear.bias is not None:
                    linear.bias[0] = 0


VERIFIER = '''"""Scores that differ between the samples of a group, at a chosen cost in CPU time."""
import time
import zlib

PROMPT, STOP = "{}", ""


def reward(question, completion):
    end = time.thread_time() + SECONDS
    while time.thread_time() < end:
        pass
    return zlib.crc32(completion.encode("utf-8", "replace")) / 2**32
'''


def verifier(milliseconds):
    """Return the text of a task file whose reward takes so many milliseconds of CPU time."""
    return VERIFIER.replace("SECONDS", str(milliseconds / 1000))
