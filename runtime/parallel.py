"""Sharded models (runtime/fsdp.py): each rank keeps a slice of the rows of every tensor.

These functions return unsharded tensors unchanged, so that checkpoints and optimizers need no case for them.
"""
from collections import deque

import torch
import torch.distributed as dist

from layers.lora import full_tensor
from runtime import distributed


def is_sharded(tensor):
    return hasattr(tensor, "full_tensor")             # a DTensor, without the import


def local(tensor):
    """Return this rank's rows of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def num_shards(tensor):
    """Return the number of ranks that share the rows of a tensor."""
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1) if is_sharded(tensor) else 1


def local_rows(tensor):
    """Return the slice of a tensor's rows on this rank."""
    if not is_sharded(tensor):
        return slice(None)
    mesh = tensor.device_mesh                # its last dimension: the ranks that share rows
    return rows_of(mesh.get_local_rank(mesh.ndim - 1), num_shards(tensor), len(tensor))


def rows_of(rank, ranks, n):
    """Return the slice of n rows on a rank, as torch.chunk splits them."""
    size = -(-n // ranks)
    return slice(min(n, rank * size), min(n, (rank + 1) * size))


@torch.no_grad()
def fill(tensor, values, name):
    """Copy this rank's rows of `values`, a tensor or a slice of a safetensors file, into a tensor.
    ValueError, with the name, if the shapes differ."""
    shape = values.shape if isinstance(values, torch.Tensor) else values.get_shape()
    if tuple(shape) != tuple(tensor.shape):
        raise ValueError(f"{name} has the shape {tuple(shape)} instead of {tuple(tensor.shape)}")
    local(tensor).copy_(values[local_rows(tensor)] if tensor.ndim else values[...])


def write_on_main(tensors, write):
    """Call write(values) on the first rank only, as distributed.on_main does. values yields the unsharded
    tensors, one in memory at a time. All ranks gather all of them, even if write fails. Every rank must
    call."""
    values = map(full_tensor, tensors)

    def on_first_rank():
        try:
            write(values)
        finally:
            deque(values, maxlen=0)
    if not distributed.is_main():
        deque(values, maxlen=0)
    distributed.on_main(on_first_rank)


# --- the model ---

def shards(parallel):
    """Tell whether models are sharded: with parallel fsdp or hybrid, and several ranks."""
    return parallel != "ddp" and distributed.world_size() > 1


def building_device(hw, parallel):
    """Return the device on which to build a model: hw's; to shard it (runtime/fsdp.py) the CPU on the first
    rank, and on the others meta, which holds no weights."""
    if not shards(parallel):
        return hw.device
    return torch.device("cpu" if distributed.is_main() else "meta")


def ranks_that_share(parallel):
    """Return the number of ranks that share a model: 1, all, or with hybrid those of a node."""
    return {"ddp": 1, "fsdp": distributed.world_size(), "hybrid": distributed.local_world_size()}[parallel]


def has_frozen_weights(model):
    """Tell whether only adapters are trained."""
    return not all(p.requires_grad for p in model.parameters())


def gathered_bytes(model, dtype):
    """Return the bytes that a step of a sharded model gathers beyond this rank's share (0 if unsharded): two
    blocks, since the next is prefetched, and all weights outside blocks, in the compute dtype; and fp32
    gradients of one block, or with sum_locally of all."""
    if not distributed.is_spread(model):
        return 0
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept_gradients = trained if model.sum_locally else 0
    itemsize = 2 if dtype == torch.bfloat16 and not has_frozen_weights(model) else 4
    block = sum(p.numel() for p in model.blocks[0].parameters())
    others = sum(p.numel() for p in model.parameters()) - len(model.blocks) * block
    return itemsize * (2 * block + others) + 4 * max(block, others, kept_gradients)


# --- Muon's matrices ---

def map_replicated(matrices, function):
    """Return function(matrices) for replicated matrices [N, rows, columns]: each of n ranks computes every
    n-th matrix, and all gather the results. Every rank must call."""
    n = distributed.world_size()
    mine = matrices[distributed.rank()::n]
    results = matrices.new_zeros(-(-len(matrices) // n), *matrices.shape[1:])
    if len(mine):
        results[:len(mine)] = function(mine)
    gathered = [torch.empty_like(results) for _ in range(n)]
    dist.all_gather(gathered, results)
    return torch.stack(gathered, 1).flatten(0, 1)[:len(matrices)]
