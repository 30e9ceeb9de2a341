"""A frozen model beside the trained one: the reference model of a KL term, or a teacher."""
import dataclasses

from model import blank
from runtime import distributed, memory, parallel
from runtime.config import BadInput

REMEDY = "choose a smaller teacher, or for a reference model train adapters with --lora_rank"


def frozen(shape, fill, hw, mode):
    """Return a GPT of this shape without dropout, filled by fill(model) and sharded as the trained one. mode:
    the option --parallel. BadInput if memory is too small. Every rank must call."""
    ranks = parallel.ranks_that_share(mode)
    distributed.together(lambda: memory.check_weights(shape, hw.device, ranks, REMEDY), BadInput)
    device = parallel.building_device(hw, mode)
    model = blank(dataclasses.replace(shape, dropout=0.0), hw.attention, device=device)
    distributed.together(lambda: device.type == "meta" or fill(model), BadInput)
    if parallel.shards(mode):
        from runtime import fsdp             # torch.distributed.fsdp takes half a second
        model = fsdp.shard(model, hw, mode)
    return model
