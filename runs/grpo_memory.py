"""Compute the peak memory of a card in grpo.py with --parallel=ddp, without the card and without a download.

    python -m runs.grpo_memory gpt2 24 2 91 config/grpo_4090x2.py
    python -m runs.grpo_memory qwen2.5-1.5b 80 8 768 config/grpo_a100x8.py --tokens_per_micro_batch=16384

Arguments: the model, GiB and number of cards, tokens of the longest prompt, and those of grpo.py. The peak is
that of an update, without CUDA's own memory; torch.compile saves a part of the activations.
"""
import dataclasses
import os

import torch

import grpo
from engine.kv_cache import cache_bytes
from model import GPTConfig, on_meta
from rollouts.fit import samples_per_rank, worst_case
from runtime import config, guard, hardware, memory, optim

QWEN = dict(vocab_size=151936, qkv_bias=True, tied_head=True, mlp="swiglu", qk_norm=False, block_size=2048)
SHAPES = {
    "gpt2": GPTConfig(tied_head=True, norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh",
                      qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen2.5-0.5b": GPTConfig(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, mlp_hidden=4864, **QWEN),
    "qwen2.5-1.5b": GPTConfig(n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, mlp_hidden=8960, **QWEN),
}


def memory_of(cfg, shape, card, prompt):
    """Return {use: bytes} on each card. cfg: checked options of grpo.py; shape: a GPTConfig; card: its GiB,
    of which a chunk of logits is a share; prompt: tokens of the longest."""
    model = on_meta(shape, "sdpa", cfg.gradient_checkpointing)
    hw = hardware.setup("cpu", dtype="bf16", attention="sdpa", compile=cfg.compile)
    hw = dataclasses.replace(hw, device=torch.device("cuda"))
    context = prompt + cfg.max_new_tokens
    tokens = cfg.tokens_per_micro_batch or grpo.MICRO_BATCH
    rows = worst_case(cfg, hw, prompt, 0, context).rows(tokens, context)
    n = model.n_params()
    used = {"weights": 4 * n}
    optimizers = optim.build(model, cfg.optimizer, fused=False)
    used |= memory.parts(model, hw, rows, context, optim.pending_bytes(optimizers))
    chunk = model.rows_per_chunk(hw.device, int(card * 2**30) // 256)
    used["head"] = 12 * shape.padded_vocab_size * (min(rows * context, chunk) + shape.n_embd)
    slots = cfg.slots or min(512, samples_per_rank(cfg))
    used["engine"] = 2 * n + cache_bytes(shape, slots, context, torch.bfloat16)
    if cfg.beta and not cfg.offload_reference:
        used["reference"] = 4 * n
    if cfg.surgery == "pcgrad" and cfg.surgery_buffers != "cpu":
        used["PCGrad"] = (cfg.task.count("+") + 1) * n * (2 if cfg.surgery_buffers == "bf16" else 4)
    return used


def main(argv):
    if len(argv) < 4 or argv[0] not in SHAPES or not all(number.isdigit() for number in argv[1:4]):
        raise config.BadInput(f"Give a model ({', '.join(SHAPES)}), GiB and number of cards, tokens of the "
                              "longest prompt, and options of grpo.py.")
    name, card, cards, prompt, *options = argv
    os.environ["WORLD_SIZE"] = cards
    cfg = config.load(grpo.Config, options)
    grpo.check(cfg)
    if cfg.lora_rank:
        raise config.BadInput("The memory of adapters is not computed: leave --lora_rank out.")
    used = memory_of(cfg, SHAPES[name], float(card), int(prompt))
    parts = ", ".join(f"{use} {size / 2**30:.2f}" for use, size in used.items() if size)
    print(f"{sum(used.values()) / 2**30:.1f} GiB: {parts}")
    return 0


if __name__ == "__main__":
    guard.run(main)
