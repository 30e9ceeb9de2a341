"""Compute the tables of docs/scaling.md: time of a training step on 1 to 512 GPUs, and the cards that hold a
model.

    python -m studies.scaling

These are estimates, not measurements: matrix products run at MFU of the card's peak, communication at link
speed, and the two overlap as far as possible.
"""
import dataclasses
import functools
from dataclasses import dataclass

import torch

from engine.kv_cache import cache_bytes
from model import GPTConfig, on_meta
from runtime import hardware, memory, parallel as sharding

MFU = 0.45                                   # assumed
GB = 1e9
GIB = 2**30
GPUS_A_NODE = 8
# {nominal GB of a card: usable GiB, after the CUDA context and fragmentation}
CARDS = {24: 21.0, 40: 36.0, 80: 72.0}

GPT2 = dict(tied_head=True, norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh")
QWEN = dict(vocab_size=151936, qkv_bias=True, tied_head=True, mlp="swiglu", qk_norm=False, block_size=2048)
SHAPES = {
    "GPT-2 124M": GPTConfig(**GPT2),
    "GPT-2 1.5B": GPTConfig(n_layer=48, n_head=25, n_embd=1600, **GPT2),
    "Qwen2.5 0.5B": GPTConfig(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, mlp_hidden=4864, **QWEN),
    "Qwen2.5 1.5B": GPTConfig(n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, mlp_hidden=8960, **QWEN),
    "Qwen2.5 3B": GPTConfig(n_layer=36, n_head=16, n_kv_head=2, n_embd=2048, mlp_hidden=11008, **QWEN),
}


@dataclass
class Machine:
    """Cards and their links, in bytes/s that a card sends while receiving as many."""
    name: str
    peak: float                              # FLOP/s, dense, bf16
    link: float                              # within a node
    between: float                           # between nodes, share of one card


H100 = Machine("H100, NVLink, InfiniBand", 989e12, 350 * GB, 45 * GB)
RTX_4090 = Machine("RTX 4090, PCIe, 100 Gb Ethernet", 165e12, 20 * GB, 12.5 * GB / GPUS_A_NODE)
A100 = Machine("A100, NVLink, InfiniBand", 312e12, 230 * GB, 23 * GB)


@functools.cache
def shape_of(values):
    """Return a GPT on the meta device. values: of a GPTConfig."""
    return on_meta(GPTConfig(*values))


# --- time ---

def collective_time(n_bytes, n, machine):
    """Return the seconds of an all-gather or reduce-scatter of n_bytes over n cards: between nodes, where
    each card carries its share, then within a node."""
    inside = min(n, GPUS_A_NODE)
    nodes = max(1, n // GPUS_A_NODE)
    between = (nodes - 1) / nodes * n_bytes / inside / machine.between
    return (inside - 1) / inside * n_bytes / machine.link + between


@dataclass
class Step:
    seconds: float
    exchanged: float                         # seconds of communication, partly overlapped


def step(config, n, machine, *, tokens=524288, micro_batch=8192, parallel="ddp", optimizer="adamw",
         sum_locally=False):
    """Return the Step of n cards. tokens: in a step; micro_batch: tokens of a pass on one card.

    A pass is one third forward, two thirds backward. ddp all-reduces fp32 gradients during the last backward
    pass. fsdp all-gathers bf16 weights in every forward and backward pass, and reduce-scatters gradients in
    the backward pass. hybrid does so within nodes, and all-reduces between them once. With fsdp, Muon sends
    each matrix to its owner and back in bf16 at the end of the step, not overlapped; with ddp every rank
    computes all of them.
    """
    model = shape_of(dataclasses.astuple(config))
    P = model.n_params()
    products = tokens / n * model.flops_per_token(config.block_size) / (machine.peak * MFU)
    passes = max(1, tokens / n / micro_batch)
    each = products / passes
    if n == 1:
        return Step(products, 0.0)
    if parallel == "ddp":
        exchange = 2 * collective_time(4 * P, n, machine)       # all-reduce: reduce-scatter, then all-gather
        return Step(products + max(0, exchange - 2 / 3 * each), exchange)
    inside = min(n, GPUS_A_NODE) if parallel == "hybrid" else n
    gather = collective_time(2 * P, inside, machine)
    scatter = collective_time(4 * P, inside, machine)
    backward = gather + (scatter / passes if sum_locally else scatter)
    exposed = passes * (max(0, gather - each / 3) + max(0, backward - 2 / 3 * each))
    exchange = passes * (gather + backward)
    if parallel == "hybrid":
        nodes = max(1, n // GPUS_A_NODE)
        between = 2 * (nodes - 1) / nodes * 4 * P / inside / machine.between
        exposed += max(0, between - 2 / 3 * each)
        exchange += between
    if optimizer == "muon":
        matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
        owners = 2 * collective_time(2 * matrices / inside, inside, machine)
        exposed += owners
        exchange += owners
    return Step(products + exposed, exchange)


# --- memory ---

@functools.cache
def pass_memory(shape, rows, checkpointing):
    """Return the bytes of a micro-batch's (activations, head). shape: values of a GPTConfig."""
    model = on_meta(GPTConfig(*shape), "sdpa", checkpointing)
    hw = hardware.setup("cpu", dtype="bf16", attention="sdpa")
    hw = dataclasses.replace(hw, device=torch.device("cuda"))
    parts = memory.parts(model, hw, rows, model.config.block_size, 0)
    return parts["activations"], parts["head"]


def needed(config, n, rows, checkpointing, sampling=None, reference=False, sum_locally=False):
    """Return {use: bytes} on each of n cards, with AdamW in bf16, sharded if n > 1. rows: sequences of
    block_size in a micro-batch; sampling: (slots, context) of an engine; reference: whether grpo.py --beta
    keeps a reference model."""
    model = shape_of(dataclasses.astuple(config))
    P = model.n_params()
    activations, head = pass_memory(dataclasses.astuple(config), rows, checkpointing)
    result = {
        "weights, gradients, moments": 16 * P / n,
        "gathered": sharding.gathered(model, torch.bfloat16, P if sum_locally else 0) if n > 1 else 0,
        "activations": activations,
        "head": head,
    }
    if sum_locally and n > 1:
        result["weights, gradients, moments"] = 12 * P / n
    if sampling:
        slots, context = sampling
        result["sampling"] = 2 * P + cache_bytes(config, slots, context, torch.bfloat16)
    if reference:
        result["reference"] = 4 * P / n
    return result


def card_for(n_bytes):
    """Return the name of the smallest card with so much memory, or "none"."""
    fits = [label for label, gib in CARDS.items() if n_bytes / GIB <= gib]
    return f"{fits[0]} GB" if fits else "none"


# --- the tables of docs/scaling.md ---

def time_table(name, machine, kinds, counts=(1, 8, 64, 256, 512), tokens=2**21):
    config = SHAPES[name]
    rows = {}
    for label, options in kinds.items():
        alone = step(config, 1, machine, tokens=tokens).seconds
        rows[label] = []
        for n in counts:
            found = step(config, n, machine, tokens=tokens, **options)
            share = found.exchanged / found.seconds
            rows[label].append(f"{found.seconds:.3g} s, {share:.0%}, {alone / n / found.seconds:.0%}")
    return markdown(f"{name}, {machine.name}", counts, rows)


def markdown(title, counts, rows):
    """Return a table of {label: cells}, a column for each number of cards."""
    lines = [f"| {title} | {' | '.join(map(str, counts))} |", "|" + "---|" * (len(counts) + 1)]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()]
    return "\n".join(lines)


def memory_table(counts=(1, 2, 4, 8)):
    rows = {
        "GPT-2 1.5B, `train.py`": ("GPT-2 1.5B", {}),
        "the same, `--sum_locally`": ("GPT-2 1.5B", {"sum_locally": True}),
        "Qwen2.5 1.5B, `grpo.py`": ("Qwen2.5 1.5B", {"sampling": (128, 2048)}),
        "Qwen2.5 3B, `grpo.py`": ("Qwen2.5 3B", {"sampling": (128, 2048)}),
        "the same with `--beta`": ("Qwen2.5 3B", {"sampling": (128, 2048), "reference": True}),
    }
    cells = {}
    for label, (name, options) in rows.items():
        totals = [sum(needed(SHAPES[name], n, 4, True, **options).values()) for n in counts]
        cells[label] = [f"{total / GIB:.1f}: {card_for(total)}" for total in totals]
    return markdown("GiB a card", counts, cells)


KINDS = {
    "`ddp`": {"parallel": "ddp"},
    "`fsdp`": {"parallel": "fsdp"},
    "`fsdp --sum_locally`": {"parallel": "fsdp", "sum_locally": True},
    "`fsdp --optimizer=muon`": {"parallel": "fsdp", "optimizer": "muon"},
    "`hybrid`": {"parallel": "hybrid"},
}


def tables():
    """Return the tables in the order of the page."""
    on_one_node = {kind: KINDS[kind] for kind in ("`ddp`", "`fsdp`", "`fsdp --sum_locally`")}
    return [
        memory_table(),
        time_table("GPT-2 1.5B", H100, KINDS),
        time_table("GPT-2 1.5B", RTX_4090, on_one_node, (1, 2, 4, 8, 16)),
        time_table("GPT-2 124M", H100, {"`ddp`": {}}),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
