"""Models that are spread over the ranks: PyTorch's FSDP2 (fully_shard), by which each rank keeps a slice of
rows of every tensor.

What is not sharded passes through these functions as it is, so that a checkpoint or an optimizer need not
ask.
"""
from collections import deque

import torch
import torch.distributed as dist

from layers.lora import full_tensor
from runtime import distributed
from runtime.config import BadInput


def is_sharded(tensor):
    return hasattr(tensor, "full_tensor")             # a DTensor, without importing what defines it


def local(tensor):
    """Return this rank's rows of a tensor, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def cards(tensor):
    """Return among how many ranks the rows of a tensor are shared."""
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1) if is_sharded(tensor) else 1


def my_rows(tensor):
    """Return the slice of rows that this rank has of a tensor."""
    if not is_sharded(tensor):
        return slice(None)
    mesh = tensor.device_mesh                # of cards that share, and before that perhaps of nodes, which don't
    return rows_of(mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), len(tensor))


def rows_of(rank, ranks, n):
    """Return the slice of n rows that one of the ranks has: as torch.chunk cuts them."""
    size = -(-n // ranks)
    return slice(min(n, rank * size), min(n, (rank + 1) * size))


@torch.no_grad()
def fill(tensor, values, name):
    """Copy values, a tensor or a slice of a safetensors file, into a tensor: each rank its own rows.
    ValueError with the name if they have another shape."""
    shape = values.shape if isinstance(values, torch.Tensor) else values.get_shape()
    if tuple(shape) != tuple(tensor.shape):
        raise ValueError(f"{name} has the shape {tuple(shape)} and not {tuple(tensor.shape)}")
    local(tensor).copy_(values[my_rows(tensor)] if tensor.ndim else values[...])


def write_on_main(tensors, write):
    """Call write(values) on the first rank alone, as distributed.on_main does. values yields the tensors
    whole, one after another, so that one is in memory at a time. The other ranks take part in gathering them,
    to the last even if write fails. Every rank must call."""
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

def build(make, hw, parallel, sum_locally=False, compile_mode=None):
    """Return the model that make(device) makes. parallel fsdp or hybrid, with several ranks: spread over
    them, see `shard`; the first one makes it in the computer's memory, and the others without values."""
    if parallel == "ddp" or distributed.world_size() == 1:
        return make(hw.device)
    device = torch.device("cpu" if distributed.is_main() else "meta")
    model = distributed.together(lambda: make(device), BadInput)
    return shard(model, hw, parallel, sum_locally, compile_mode)


def ranks_that_share(parallel):
    """Return among how many ranks a model is spread: all, with hybrid those of a node."""
    return {"ddp": 1, "fsdp": distributed.world_size(), "hybrid": distributed.local_world_size()}[parallel]


def shard(model, hw, parallel="fsdp", sum_locally=False, compile_mode=None):
    """Spread a model over the ranks: every tensor by its rows. Blocks are gathered one at a time as they are
    computed, in bf16 where hw computes in it, else in fp32; their gradients are summed in fp32, in each
    micro-step or (sum_locally, which keeps all of them on each rank) in the last. parallel hybrid: over those
    of a node, and nodes sum their gradients. The first rank's model has the weights, and is emptied tensor by
    tensor."""
    # Imported here: it takes half a second, and most runs don't need it.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    weights = dict(model.named_parameters())
    model.to("meta")
    model.sum_locally = sum_locally
    dtype = torch.bfloat16 if hw.dtype == "bf16" else None    # fp16's range is too narrow for weights
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    mesh = mesh_of(hw.device.type, parallel)
    for block in model.blocks:
        if hw.compile:
            block.compile(mode=compile_mode)
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # Let go of after a forward pass, as the blocks are: an evaluation has no backward pass that would do so.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in [*model.blocks, model]:
        # A plain sum: a loss is divided by the targets of all ranks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for method in ("loss", "token_logprobs"):
        register_fsdp_forward_method(model, method)

    model.to_empty(device=hw.device)
    model.fill_rope_tables()
    hand_out(weights, model, hw.device)
    return model


def mesh_of(device_type, parallel):
    """Return the mesh of ranks: those that share, and with hybrid the nodes before them."""
    shape = [ranks_that_share(parallel)]
    if parallel == "hybrid":
        shape.insert(0, distributed.world_size() // shape[0])
    mesh = dist.init_device_mesh(device_type, tuple(shape), mesh_dim_names=("nodes", "cards")[-len(shape):])
    if parallel == "hybrid":                 # groups of its own, which would wait for half an hour
        for dimension in range(len(shape)):
            dist.distributed_c10d._set_pg_timeout(distributed.STEP_TIMEOUT, mesh.get_group(dimension))
    return mesh


def hand_out(weights, model, device):
    """Fill a sharded model with the first rank's weights {name: tensor}, which is emptied on the way."""
    for name, p in model.named_parameters():
        values = torch.empty(p.shape, dtype=p.dtype, device=device)
        if distributed.is_main():
            values.copy_(weights.pop(name).detach())
        dist.broadcast(values, 0)
        fill(p, values, name)


def gathered_bytes(model, dtype):
    """Return what a step of a sharded model has beside its share, 0 of another: two blocks (the next while
    one is computed) and what is in no block, in the dtype that is computed in, and gradients in fp32, of a
    block or all."""
    if not distributed.is_spread(model):
        return 0
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    return gathered(model, dtype, sum(sizes) if model.sum_locally else 0)


def gathered(model, dtype, kept_gradients=0):
    """Do the arithmetic of gathered_bytes, for any model (on the device meta, say)."""
    itemsize = 2 if dtype == torch.bfloat16 else 4
    block = sum(p.numel() for p in model.blocks[0].parameters())
    others = sum(p.numel() for p in model.parameters()) - len(model.blocks) * block
    return itemsize * (2 * block + others) + 4 * max(block, others, kept_gradients)


# --- Muon's matrices ---

def by_owners(slices, n_rows, mesh, function):
    """Return this rank's rows of function(matrices), given its rows of these: slices [N, rows, columns],
    n_rows in all. Every matrix is put together and computed on one of the mesh's cards, the k-th on card k
    modulo their number. function: matrices [n, n_rows, columns] -> the same shape.

    Each rank sends and receives twice what it has of all matrices. Every rank must call.
    """
    cards = mesh.size(mesh.ndim - 1)
    mine = mesh.get_local_rank(mesh.ndim - 1)
    group = mesh.get_group(mesh.ndim - 1)
    columns = slices.shape[2]
    rows = [len(range(n_rows)[rows_of(card, cards, n_rows)]) for card in range(cards)]
    owned = [len(slices[card::cards]) for card in range(cards)]
    sent = [owned[card] * rows[mine] * columns for card in range(cards)]
    received = [owned[mine] * rows[card] * columns for card in range(cards)]

    outgoing = torch.cat([slices[card::cards].flatten() for card in range(cards)])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    parts = [part.view(owned[mine], n, columns) for part, n in zip(incoming.split(received), rows)]
    if owned[mine]:
        parts = function(torch.cat(parts, 1)).split(rows, 1)

    incoming = torch.cat([part.flatten() for part in parts])
    dist.all_to_all_single(outgoing, incoming, sent, received, group=group)
    result = torch.empty_like(slices)
    for card, part in enumerate(outgoing.split(sent)):
        result[card::cards] = part.view(owned[card], rows[mine], columns)
    return result


def in_turn(matrices, function):
    """Return function(matrices), of matrices [N, rows, columns] that all ranks have: each computes every n-th
    of them, n being their number, and all get all. Every rank must call."""
    n = distributed.world_size()
    mine = matrices[distributed.rank()::n]
    done = matrices.new_zeros(-(-len(matrices) // n), *matrices.shape[1:])
    if len(mine):
        done[:len(mine)] = function(mine)
    gathered = [torch.empty_like(done) for _ in range(n)]
    dist.all_gather(gathered, done)
    return torch.stack(gathered, 1).flatten(0, 1)[:len(matrices)]
