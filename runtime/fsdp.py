"""Sharding of a model with PyTorch's FSDP2, for --parallel=fsdp or hybrid on several ranks."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from runtime import distributed
from runtime.parallel import fill, has_frozen_weights, ranks_that_share, rows_of


def shard(model, hw, parallel="fsdp", sum_locally=False, compile_mode=None):
    """Shard every tensor of a model by rows, in place, and return it; with hybrid over the ranks of a node,
    and gradients are summed over the nodes. Blocks are gathered one at a time, in bf16 if hw computes in it,
    else (or with adapters) in fp32. Gradients are reduced in fp32 at each micro-step, or with sum_locally
    only at the last, which keeps a full gradient on each rank. The first rank's model has the weights; they
    are freed tensor by tensor. Every rank must call."""
    weights = model.state_dict()
    model.to("meta")
    model.sum_locally = sum_locally
    # fp16's range is too narrow, and adapters are merged with weights that are not rounded yet
    dtype = torch.bfloat16 if hw.dtype == "bf16" and not has_frozen_weights(model) else None
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    mesh = mesh_of(hw.device.type, parallel)
    for block in model.blocks:
        if hw.compile:
            block.compile(mode=compile_mode)
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # Reshard after the forward pass, as the blocks do: an evaluation has no backward pass to do it.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in [*model.blocks, model]:
        # Sum and do not average: the loss is divided by the number of targets on all ranks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for method in ("loss", "token_logprobs"):
        register_fsdp_forward_method(model, method)

    model.to_empty(device=hw.device)
    model.fill_rope_tables()
    broadcast(weights, model, hw.device)
    return model


def mesh_of(device_type, parallel):
    """Return the mesh of the ranks that share a model; with hybrid the nodes are its first dimension."""
    shape = [ranks_that_share(parallel)]
    if parallel == "hybrid":
        shape.insert(0, distributed.world_size() // shape[0])
    mesh = dist.init_device_mesh(device_type, tuple(shape), mesh_dim_names=("nodes", "cards")[-len(shape):])
    if parallel == "hybrid":                 # replace the default timeout of the mesh's own groups
        for dimension in range(len(shape)):
            dist.distributed_c10d._set_pg_timeout(distributed.STEP_TIMEOUT, mesh.get_group(dimension))
    return mesh


def broadcast(weights, model, device):
    """Fill a sharded model with the first rank's weights, {name: tensor}, and empty that dictionary."""
    for name, p in model.state_dict().items():
        values = torch.empty(p.shape, dtype=p.dtype, device=device)
        if distributed.is_main():
            values.copy_(weights.pop(name))
        dist.broadcast(values, 0)
        fill(p, values, name)


# --- Muon's matrices ---

def map_sharded(slices, n_rows, mesh, function):
    """Apply a function to whole matrices that are sharded by rows, each on one card: matrix k on card k
    modulo their number. slices: this rank's rows [N, rows, columns], of n_rows. function: [n, n_rows,
    columns] -> the same shape. Return this rank's rows of the result. Each rank sends and receives its slices
    twice; every rank must call."""
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
