"""LoRA adapters for the linear layers of a model (Hu et al. 2021)."""
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from layers.ops import autocast

LINEARS = ("qkv", "out", "up", "gate", "down")         # the linear layers of a block
EXTRAS = "extras."                                     # beginning of the names of weights in GPT.extras
SAMPLED = 256                                          # weights of a matrix in a fingerprint


class LoRA(nn.Linear):
    """(W + alpha / rank * B A) x with W frozen.

    `add_lora` converts an nn.Linear in place, so W keeps its name. qkv is one matrix: queries, keys and
    values share one A [rank, in] and have separate rows of B [out, rank]."""

    @property
    def scale(self):
        return self.alpha / len(self.lora_a)

    def forward(self, x):
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        return MergedLinear.apply(x, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)


class MergedLinear(torch.autograd.Function):
    """A linear layer with W + scale * B A, rounded to the dtype of the product as the engine rounds it.

    With W x and B A x computed apart, as is usual, the trainer keeps small changes that a bf16 engine with
    merged weights rounds away. In GRPO of SmolLM2-135M the log-probabilities of the two were up to 2.3 nats
    apart after four steps, and the accuracy fell from 34 to 1% in nine (docs/notes.md)."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        """Return [..., out] for x [..., in], W [out, in], bias [out] or None, A [rank, in], B [out, rank]."""
        ctx.dtype = x.dtype
        ctx.scale = scale
        x = autocast(x)
        ctx.save_for_backward(x, weight, a, b)
        return F.linear(x, merge(weight, a, b, scale).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, a, b = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            # merged again, since a copy of every W until the backward pass would double the weights' memory
            dx = (dy @ merge(weight, a, b, ctx.scale).to(dy.dtype)).to(ctx.dtype)
        x = x.flatten(0, -2)
        dy = dy.flatten(0, -2)
        da = (dy @ b.to(dy.dtype)).t() @ x
        db = dy.t() @ (x @ a.t().to(x.dtype))
        return dx, None, None, da.float() * ctx.scale, db.float() * ctx.scale, None


def merge(weight, a, b, scale):
    """Return W + scale * B A in fp32, whatever autocast says."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def add_lora(model, rank, alpha=None, linears=LINEARS):
    """Add adapters to these linears of every block, freeze the model's other parameters (not those of
    GPT.extras) and return the model.

    alpha None: 2 rank, as in TRL, torchtune and LLaMA-Factory. B is zero, so the function is unchanged at
    first. The adapters stay fp32, so cast a model before, not after. Embeddings and head (tied or not) are
    not adapted. ValueError for rank < 1, unknown linears or a model that already has adapters."""
    chosen = [module for name, module in model.blocks.named_modules()
              if isinstance(module, nn.Linear) and name.split(".")[-1] in linears]
    if rank < 1:
        raise ValueError(f"An adapter rank of {rank} is too small: give a rank of 1 or more.")
    if rank > model.config.n_embd:
        raise ValueError(f"An adapter rank of {rank} exceeds the model's {model.config.n_embd} channels: "
                         "lower the rank.")
    if not set(linears) <= set(LINEARS) or not chosen:
        raise ValueError(f"linears={linears} names layers that the blocks lack: "
                         "choose from qkv, out, up, down and swiglu's gate.")
    if lora_modules(model):
        raise ValueError("The model has adapters already: load merged(model) into a new GPT first.")
    for name, parameter in model.named_parameters():
        if not name.startswith(EXTRAS):
            parameter.requires_grad_(False)
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
    """Disable adapters: within, the model is bitwise the one before add_lora (GRPO's reference).

    Run a backward pass in the same context as its forward pass: gradient checkpointing recomputes blocks."""
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
    """Return {name: tensor} of only the adapters."""
    weights = model.state_dict()
    return {name: weights[name] for name in weights if name.endswith((".lora_a", ".lora_b"))}


def trained_beside(model):
    """Return the names of the weights that are trained beside a model's adapters, sorted."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return sorted(trained - adapters(model).keys())


def trains_adapters_alone(model):
    """Tell whether a model within adapters_off stays what it was before training."""
    return all(name.startswith(EXTRAS) for name in trained_beside(model))


def load_adapters(model, tensors):
    """Copy adapters, and weights that were trained beside them, into a model with such adapters; ValueError
    for other names or shapes."""
    own = model.state_dict()
    wrong = sorted(adapters(model).keys() - tensors.keys() | tensors.keys() - own.keys())
    wrong = wrong or [name for name in tensors if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing, unexpected or of another shape: "
                         "call add_lora with the rank and linears of the saved adapters.")
    model.load_state_dict(tensors, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in tensors)


def merged(model):
    """Return {name: tensor} of an equivalent GPT without adapters (within adapters_off: the base) and extras.

    Adapted weights are new and fp32, since a sum in bf16 would lose about 5% of the update. Others are the
    model's own."""
    return dict(merged_weights(model))


@torch.no_grad()
def merged_weights(model, dtype=None, prefix=""):
    """Yield the (name, tensor) pairs of `merged` whose names start with prefix.

    Sharded weights are gathered one at a time, in dtype unless adapted. Every rank must iterate over all."""
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoRA)}
    own = adapters(model)
    for name, value in model.state_dict().items():
        if name in own or name.startswith(EXTRAS) or not name.startswith(prefix):
            continue
        module = adapted.get(name)
        if module and module.enabled:
            yield name, merge(*map(full_tensor, (module.weight, module.lora_a, module.lora_b)), module.scale)
        else:
            yield name, full_tensor(value, dtype)


@torch.no_grad()
def fingerprint(model, dtype=torch.float32):
    """Return SAMPLED weights of each matrix of the last block, adapters merged and rounded to dtype: fp32 [n]
    on the model's device. Every rank must call if the model is sharded."""
    last = f"blocks.{model.config.n_layer - 1}."
    matrices = (weight for _, weight in merged_weights(model, dtype, last) if weight.ndim == 2)
    parts = [weight.flatten()[::max(1, weight.numel() // SAMPLED)] for weight in matrices]
    return torch.cat(parts).to(dtype).float()


def full_tensor(tensor, dtype=None):
    """Return a tensor, gathered in dtype if it is sharded; then every rank must call."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.to(dtype or tensor.dtype).full_tensor()
