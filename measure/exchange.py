"""Holds the formulas of studies/scaling.py against two processes on this machine, where nothing overlaps: gloo computes
on the cores that train.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m measure.exchange

A step of ddp should take t + c: t is a step of as many tokens that each process does alone, both at the same time,
and c what an all-reduce of the gradients takes. A step of fsdp gathers each block twice and scatters its
gradients: t + 2 g + s.
"""
import statistics
import time

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from runtime import distributed, hardware, optim, parallel as sharding

STEPS = 6
ROUNDS = 3
# by the names of torch 2.13, or of those before it
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TOKENS = (4, 128)                            # sequences of a rank, their length
SHAPES = {
    "0.9M": GPTConfig(vocab_size=257, block_size=256, n_layer=4, n_head=4, n_kv_head=1, n_embd=128),
    "25M": GPTConfig(vocab_size=257, block_size=256, n_layer=8, n_head=8, n_embd=512),
}


def median_seconds(function, n=STEPS):
    """Return the median seconds of calls that all ranks begin together."""
    seconds = []
    for _ in range(n):
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def make(config, hw, parallel):
    """Return a function that does a training step: alone, ddp or fsdp."""
    torch.manual_seed(0)
    model = GPT(config)
    if parallel == "fsdp":
        model = sharding.shard(model if distributed.is_main() else model.to("meta"), hw)
    wrapped = distributed.TrainedModel(model)
    if parallel == "ddp":
        wrapped.share_gradients()
    optimizers = optim.build(model, "adamw", 1e-4)
    x = torch.randint(0, 256, TOKENS)

    def step():
        (part,) = wrapped.micro_steps([x])
        (wrapped.loss(part, part) / x.numel()).backward()
        optim.apply_step(optimizers, hw.scaler(), 1e-4, 1.0)
    step()
    return step


def exchanges(model):
    """Return functions that do the exchanges of a step of so many parameters in blocks: (all-reduce, gathers of the
    weights once, scatters of the gradients)."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    sizes = [2 * -(-n // 2) for n in [*blocks, model.n_params() - sum(blocks)]]
    wholes = [torch.zeros(n) for n in sizes]
    halves = [torch.zeros(n // 2) for n in sizes]

    def reduce():
        for tensor in wholes:
            dist.all_reduce(tensor)

    def gather():
        for tensor, half in zip(wholes, halves):
            gather_into(tensor, half)

    def scatter():
        for tensor, half in zip(wholes, halves):
            scatter_sums(half, tensor)
    return reduce, gather, scatter


def main():
    distributed.init()
    hw = hardware.setup("cpu", dtype="fp32", compile=False)
    for name, config in SHAPES.items():
        steps = [make(config, hw, parallel) for parallel in ("alone", "ddp", "fsdp")]
        exchanged = exchanges(GPT(config))
        rounds = []
        for _ in range(ROUNDS):                              # in turn, for the machine is not always as fast
            rounds.append([median_seconds(function) for function in (*steps, *exchanged)])
        t, ddp, fsdp, c, g, s = (1e3 * statistics.median(column) for column in zip(*rounds))
        if distributed.is_main():
            print(f"{name}: t {t:.1f} ms, all-reduce {c:.1f}, gather {g:.1f}, scatter {s:.1f} | ddp: t + c = {t + c:.1f}, "
                  f"measured {ddp:.1f} ({ddp / (t + c) - 1:+.0%}) | fsdp: t + 2 g + s = {t + 2 * g + s:.1f}, measured "
                  f"{fsdp:.1f} ({fsdp / (t + 2 * g + s) - 1:+.0%})", flush=True)
    distributed.close()


if __name__ == "__main__":
    main()
