"""Low-rank adapters beside the linear layers of a model (LoRA, Hu et al. 2021)."""
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F

LINEARS = ("qkv", "out", "up", "gate", "down")         # of a block; what LoRA adapts


class LoRA(nn.Linear):
    """W x + alpha / rank * B A x with W frozen (Hu et al. 2021).

    `add_lora` turns an nn.Linear in place into one, so W keeps its name. qkv is one matrix: queries, keys and
    values share one A [rank, in] and each has its own rows of B [out, rank].
    """

    @property
    def scale(self):
        return self.alpha / len(self.lora_a)

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))


def add_lora(model, rank, alpha=None, linears=LINEARS):
    """Put adapters beside these linears of every block, freeze all other parameters and return the model.

    Embeddings and head (tied or not) are not adapted. alpha None: 2 rank, as in TRL, torchtune and
    LLaMA-Factory. B is zero, so at first the function is unchanged. The adapters are fp32 whatever the rest
    is (cast a model before, not after). ValueError for rank < 1, unknown linears or a model that is adapted
    already.
    """
    chosen = []
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear) and name.split(".")[-1] in linears:
            chosen.append(module)
    if rank < 1:
        raise ValueError(f"Adapters of rank {rank} hold nothing: give a rank of 1 or more.")
    if rank > model.config.n_embd:
        raise ValueError(f"Adapters of rank {rank} hold more than the {model.config.n_embd} channels of the "
                         "model: lower the rank.")
    if not set(linears) <= set(LINEARS) or not chosen:
        raise ValueError(f"linears={linears} names what the blocks lack: "
                         "choose from qkv, out, up, down and swiglu's gate.")
    if lora_modules(model):
        raise ValueError("The model has adapters already: add new ones to a GPT that loads merged(model).")
    model.requires_grad_(False)
    for module in chosen:
        module.__class__ = LoRA
        module.alpha = 2 * rank if alpha is None else alpha
        module.enabled = True
        fp32 = {"dtype": torch.float32, "device": module.weight.device}
        a = torch.empty(rank, module.in_features, **fp32)
        module.lora_a = nn.Parameter(nn.init.kaiming_uniform_(a, a=math.sqrt(5)))
        module.lora_b = nn.Parameter(torch.zeros(module.out_features, rank, **fp32))
    return model


def lora_modules(model):
    return [module for module in model.modules() if isinstance(module, LoRA)]


@contextmanager
def adapters_off(model):
    """Within, the model is bit for bit the one before add_lora: GRPO's reference.

    A backward pass belongs on the same side as its forward pass: gradient checkpointing computes blocks anew.
    """
    modules = lora_modules(model)
    before = [module.enabled for module in modules]
    try:
        for module in modules:
            module.enabled = False
        yield
    finally:
        for module, enabled in zip(modules, before):
            module.enabled = enabled


def adapters(model):
    """Return {name: tensor} of the adapters alone."""
    weights = model.state_dict()
    return {name: weights[name] for name in weights if name.endswith((".lora_a", ".lora_b"))}


def load_adapters(model, tensors):
    """Copy what `adapters` returned into a model with such adapters. ValueError if they have other shapes."""
    own = adapters(model)
    wrong = sorted(own.keys() ^ tensors.keys())
    if not wrong:
        wrong = [name for name in own if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing, left over or of another shape: "
                         "add_lora with the rank and the linears that the adapters were made with.")
    model.load_state_dict(tensors, strict=False)


def merged(model):
    """Return {name: tensor} with which a GPT without adapters computes what this one does.

    Within adapters_off that is the base. Adapted weights are new and fp32, since a sum in bf16 would lose
    about 5% of what was learnt. The others are the model's own.
    """
    return dict(merged_weights(model))


@torch.no_grad()
def merged_weights(model, dtype=None, prefix=""):
    """Yield (name, tensor) as `merged` has them, of the names that begin so.

    Of a model that is spread over ranks each is gathered as it is asked for, in dtype unless it is adapted.
    Every rank must ask for all.
    """
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoRA)}
    own = adapters(model)
    for name, value in model.state_dict().items():
        if name in own or not name.startswith(prefix):
            continue
        module = adapted.get(name)
        if module and module.enabled:
            yield name, merged_weight(module)
        else:
            yield name, whole(value, dtype)


def merged_weight(module):
    """Return W + alpha / rank * B A of a LoRA, fp32."""
    weight, a, b = (whole(tensor).float() for tensor in (module.weight, module.lora_a, module.lora_b))
    with torch.autocast(weight.device.type, enabled=False):  # which would multiply in bf16
        return weight + module.scale * b @ a


def whole(tensor, dtype=None):
    """Return a tensor, or of one that is spread over ranks all of it, in dtype: then every rank must call."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.to(dtype or tensor.dtype).full_tensor()
