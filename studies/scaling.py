"""What a training step should take on 1 to 512 GPUs, and which cards hold which model: arithmetic, as
docs/scaling.md shows it.

    python -m studies.scaling

Nothing is measured here. A step's products are at MFU of the card's peak; what ranks exchange is at the speed
of links; the one runs beside the other as far as it can.
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
# Cards by the GB on their label, and the GiB that are left of them beside CUDA's own and what lies scattered.
CARDS = {24: 21.0, 40: 36.0, 80: 72.0}

QWEN = dict(vocab_size=151936, qkv_bias=True, tied_head=True, mlp="swiglu", qk_norm=False, block_size=2048)
SHAPES = {
    "GPT-2 124M": GPTConfig(tied_head=True, norm="layernorm", position="learned", qk_norm=False, mlp="gelu_tanh"),
    "GPT-2 1.5B": GPTConfig(n_layer=48, n_head=25, n_embd=1600, tied_head=True, norm="layernorm", position="learned",
                            qk_norm=False, mlp="gelu_tanh"),
    "Qwen2.5 0.5B": GPTConfig(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, mlp_hidden=4864, **QWEN),
    "Qwen2.5 1.5B": GPTConfig(n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, mlp_hidden=8960, **QWEN),
    "Qwen2.5 3B": GPTConfig(n_layer=36, n_head=16, n_kv_head=2, n_embd=2048, mlp_hidden=11008, **QWEN),
}


@dataclass
class Machine:
    """Cards and what connects them; links in bytes/s that a card sends while it receives as many."""
    name: str
    peak: float                              # FLOP/s, dense, bf16
    link: float                              # within a node
    between: float                           # nodes, of one card


H100 = Machine("H100, NVLink, InfiniBand", 989e12, 350 * GB, 45 * GB)
RTX_4090 = Machine("RTX 4090, PCIe, 100 Gb Ethernet", 165e12, 20 * GB, 12.5 * GB / GPUS_A_NODE)
A100 = Machine("A100, NVLink, InfiniBand", 312e12, 230 * GB, 23 * GB)


@functools.cache
def shape_of(values):
    """Return a GPT without memory. values: of a GPTConfig."""
    return on_meta(GPTConfig(*values))


# --- time ---

def passed_on(n_bytes, n, machine):
    """Return the seconds in which n cards gather, or scatter and sum, so many bytes that they share: once
    into every node, where each card takes its part of what comes, and within it."""
    inside = min(n, GPUS_A_NODE)
    nodes = max(1, n // GPUS_A_NODE)
    between = (nodes - 1) / nodes * n_bytes / inside / machine.between
    return (inside - 1) / inside * n_bytes / machine.link + between


@dataclass
class Step:
    seconds: float
    exchanged: float                         # seconds of exchange, part of them hidden

    def efficiency(self, n, alone):
        return alone / n / self.seconds


def step(config, n, machine, parallel="ddp", tokens=524288, micro_batch=8192, optimizer="adamw", sum_locally=False):
    """Return the Step of n cards. tokens: of a step; micro_batch: of a pass of one card.

    ddp sums the gradients, fp32, during the last pass's backward half (two thirds). fsdp gathers bf16 weights
    in the forward third and again in the backward one of each pass, where it also scatters and sums the
    gradients. hybrid does that within nodes, and sums the shares between them once. Muon passes each matrix
    on to its owner and back, in bf16, at the end of the step, where nothing hides it (fsdp; under ddp all
    ranks compute all).
    """
    model = shape_of(dataclasses.astuple(config))
    P = model.n_params()
    products = tokens / n * model.flops_per_token(config.block_size) / (machine.peak * MFU)
    passes = max(1, tokens / n / micro_batch)
    each = products / passes
    if n == 1:
        return Step(products, 0.0)
    if parallel == "ddp":
        exchange = 2 * passed_on(4 * P, n, machine)       # an all-reduce: scatter, then gather
        return Step(products + max(0, exchange - 2 / 3 * each), exchange)
    inside = min(n, GPUS_A_NODE) if parallel == "hybrid" else n
    gather = passed_on(2 * P, inside, machine)
    scatter = passed_on(4 * P, inside, machine)
    backward = gather + (scatter / passes if sum_locally else scatter)
    seen = passes * (max(0, gather - each / 3) + max(0, backward - 2 / 3 * each))
    exchange = passes * (gather + backward)
    if parallel == "hybrid":
        nodes = max(1, n // GPUS_A_NODE)
        between = 2 * (nodes - 1) / nodes * 4 * P / inside / machine.between
        seen += max(0, between - 2 / 3 * each)
        exchange += between
    if optimizer == "muon":
        matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
        owners = 2 * passed_on(2 * matrices / inside, inside, machine)
        seen += owners
        exchange += owners
    return Step(products + seen, exchange)


# --- memory ---

@functools.cache
def of_a_pass(shape, rows, checkpointing):
    """Return the bytes that (activations, the head) of a micro-batch take. shape: values of a GPTConfig."""
    model = on_meta(GPTConfig(*shape), "sdpa", checkpointing)
    hw = dataclasses.replace(hardware.setup("cpu", dtype="bf16", attention="sdpa"), device=torch.device("cuda"))
    parts = memory.parts(model, hw, rows, model.config.block_size, 0)
    return parts["activations"], parts["head"]


def needed(config, n, rows, checkpointing, sampling=None, reference=False, sum_locally=False):
    """Return {what: bytes} on each of n cards, AdamW, bf16, sharded if there are several. rows: sequences of
    block_size in a micro-batch; sampling: (slots, context) of an engine beside it; reference: grpo.py's with
    --beta."""
    model = shape_of(dataclasses.astuple(config))
    P = model.n_params()
    activations, head = of_a_pass(dataclasses.astuple(config), rows, checkpointing)
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
    """Return the smallest card that holds so much, as text."""
    fits = [label for label, gib in CARDS.items() if n_bytes / GIB <= gib]
    return f"{fits[0]} GB" if fits else "none"


# --- the tables of docs/scaling.md ---

def time_table(name, machine, kinds, counts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512), tokens=2**21):
    config = SHAPES[name]
    lines = [f"| {name}, {machine.name} | " + " | ".join(map(str, counts)) + " |", "|" + "---|" * (len(counts) + 1)]
    for label, knobs in kinds.items():
        alone = step(config, 1, machine, tokens=tokens).seconds
        cells = []
        for n in counts:
            it = step(config, n, machine, tokens=tokens, **knobs)
            cells.append(f"{it.seconds:.3g} s, {it.exchanged / it.seconds:.0%}, {it.efficiency(n, alone):.0%}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(counts=(1, 2, 4, 8)):
    rows = {
        "GPT-2 1.5B, `train.py`": ("GPT-2 1.5B", {}),
        "the same, `--sum_locally`": ("GPT-2 1.5B", {"sum_locally": True}),
        "Qwen2.5 1.5B, `grpo.py`": ("Qwen2.5 1.5B", {"sampling": (128, 2048)}),
        "Qwen2.5 3B, `grpo.py`": ("Qwen2.5 3B", {"sampling": (128, 2048)}),
        "the same with `--beta`": ("Qwen2.5 3B", {"sampling": (128, 2048), "reference": True}),
    }
    lines = ["| GiB a card | " + " | ".join(map(str, counts)) + " |", "|" + "---|" * (len(counts) + 1)]
    for label, (name, knobs) in rows.items():
        cells = []
        for n in counts:
            total = sum(needed(SHAPES[name], n, 4, True, **knobs).values())
            cells.append(f"{total / GIB:.1f}: {card_for(total)}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


KINDS = {
    "`ddp`": {"parallel": "ddp"},
    "`fsdp`": {"parallel": "fsdp"},
    "`fsdp --sum_locally`": {"parallel": "fsdp", "sum_locally": True},
    "`fsdp --optimizer=muon`": {"parallel": "fsdp", "optimizer": "muon"},
    "`hybrid`": {"parallel": "hybrid"},
}


def tables():
    """Return the tables in the order of the page."""
    return [
        memory_table(),
        time_table("GPT-2 1.5B", H100, KINDS),
        time_table("GPT-2 1.5B", RTX_4090, {kind: KINDS[kind] for kind in ("`ddp`", "`fsdp`", "`fsdp --sum_locally`")}, (1, 2, 4, 8, 16)),
        time_table("GPT-2 124M", H100, {"`ddp`": {}}),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
