"""Measure the sequence length from which linear attention is faster than fused softmax attention, and the
approximation error of FAVOR+.

    python -m studies.mixer_lengths
    python -m studies.mixer_lengths --lengths=512,1024,2048 --rounds=3
    python -m studies.mixer_lengths --errors
    python -m studies.mixer_lengths --errors --run=out/quickstart/base --text=README.md

Prints milliseconds and MiB of a forward and backward pass of one attention layer (from q, k, v to gradients)
and of a small model without its optimizer, and the length from which a kind is faster than PyTorch's fused
softmax kernel. Kinds alternate, and figures are medians of the rounds; on a CPU each measurement is a
process, and its memory is the peak above that before the first call.

--errors prints the relative error |A' - A| / |A| of FAVOR+'s causal attention weights A' against softmax's A,
by the number of features, for random queries and keys or for those of a softmax model on the first tokens of
a text.
"""
import itertools
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import hub
from layers.linear_attention import favor_features, initial_qk_gain, mix, orthogonal_vectors
from layers.ops import ATTENTION, repeat_heads
from measure.runs import as_flags, process
from model import GPT, GPTConfig
from runtime import config, guard, hardware
from runtime.config import BadInput, PositiveInt
from studies.okadfa import numbers

# softmax: PyTorch's fused kernel; softmax-math: written-out attention, train.py's default on a CPU in bf16
KINDS = ("softmax", "softmax-math", "favor-sum", "favor-delta", "linear-sum", "linear-delta")
D = 64                                       # channels a head
FEATURES = (16, 64, 256, 1024, 4096, 16384)


@dataclass
class Config:
    lengths: str = "512,1024,2048,4096,8192,16384"    # positions
    kinds: str = ",".join(KINDS)
    n_head: PositiveInt = 4                  # of 64 channels
    n_layer: PositiveInt = 2                 # of the small model
    features: PositiveInt = 256              # of favor
    rounds: PositiveInt = 5
    dtype: str = "auto"
    device: str = "auto"
    errors: bool = False                     # measure FAVOR+'s errors instead of times
    run: str | None = None                   # errors: take queries and keys from this model
    text: str | None = None                  # errors: a file for the model to read
    one: str | None = None                   # internal: PART,KIND,LENGTH measured once in this process


# --- errors ---

def favor_errors(features=FEATURES, size=1.0, T=512, B=4):
    """Return the relative error of FAVOR+'s weights for each number of features, at head size 64.

    Queries and keys have random directions and norm 8 * size, as QK-norm with a gain of `size` gives.
    """
    torch.manual_seed(0)
    q, k = (size * math.sqrt(D) * F.normalize(torch.randn(B, T, D), dim=-1) for _ in range(2))
    return [favor_error(q, k, n) for n in features]


def favor_error(q, k, n):
    """Return |A' - A| / |A| of causal weights [B, T, T] for queries and keys [B, T, D] and n features."""
    T, D = q.shape[1:]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    exact = (q @ k.mT / math.sqrt(D)).masked_fill(future, -math.inf).softmax(-1)
    vectors = orthogonal_vectors(n, D)
    near = favor_features(q, vectors, own_maximum=True) @ favor_features(k, vectors, own_maximum=False).mT
    near = near.masked_fill(future, 0)
    near = near / near.sum(-1, keepdim=True)
    return ((near - exact).norm() / exact.norm()).item()


@torch.no_grad()
def queries_and_keys(run, text):
    """Return (queries, keys), each [H, T, D], of each layer on the first tokens of a text, T <= 512."""
    found = hub.find(run)
    model = found.load()
    if found.config.mixer != "softmax":
        raise BadInput(f"{run} has mixer={found.config.mixer}: give a model with softmax attention.")
    ids = found.tokenizer().encode(Path(text).read_text()[:10**5])[:min(512, found.config.block_size)]
    layers = []

    def attend(q, k, v):
        heads = q.shape[2]
        layers.append((q[0].transpose(0, 1), repeat_heads(k.transpose(1, 2), heads)[0]))
        return model.causal_attention(q, k, v)
    model.hidden(torch.tensor([[int(i) for i in ids]]), None, [attend] * found.config.n_layer)
    return layers


def print_errors_of(run, text):
    layers = queries_and_keys(run, text)
    print(f"relative error of FAVOR+'s weights, {run}, {layers[0][0].shape[1]} tokens of {text}, "
          f"{layers[0][0].shape[2]} channels a head, features: {', '.join(map(str, FEATURES))}")
    torch.manual_seed(0)
    for i, (q, k) in enumerate(layers):
        errors = [favor_error(q, k, n) for n in FEATURES]
        length = math.sqrt(q.square().sum(-1).mean() * k.square().sum(-1).mean())
        print(f"  block {i}, |q||k| = {length:.1f}: {format_errors(errors)}", flush=True)


def print_errors():
    print(f"relative error of FAVOR+'s weights, {D} channels a head, 512 positions, features: "
          f"{', '.join(map(str, FEATURES))}")
    for size in (initial_qk_gain(shape_of(Config(), "favor-sum", 512)), 0.5, 0.7, 1.0):
        errors = favor_errors(FEATURES, size)
        print(f"  |q| = |k| = {size * math.sqrt(D):.1f}: {format_errors(errors)}", flush=True)


def format_errors(errors):
    return ", ".join(f"{error:.2f}" for error in errors)


# --- speed ---

def shape_of(cfg, kind, T):
    mixer, _, rule = kind.partition("-")
    rule = "sum" if mixer == "softmax" else rule
    return GPTConfig(vocab_size=257, block_size=T, n_layer=cfg.n_layer, n_head=cfg.n_head,
                     n_embd=D * cfg.n_head, mixer=mixer, mixer_rule=rule, mixer_features=cfg.features)


def layer_pass(cfg, hw, shape, T):
    """Return a function that runs one layer's attention forward and backward."""
    torch.manual_seed(0)
    layer = GPT(shape, hw.attention).blocks[0].attention.to(hw.device)
    x = torch.randn(1, T, shape.n_embd, device=hw.device, dtype=hw.torch_dtype)
    like = {"device": hw.device, "dtype": hw.torch_dtype, "requires_grad": True}
    heads = [torch.randn(1, T, cfg.n_head, D, **like) for _ in "qkv"]

    def both_ways():
        with hw.autocast():
            if layer.mixer is None:
                y = ATTENTION[hw.attention](*heads)
            else:
                y, _ = mix(*layer.mixer(x, *heads))
        y.backward(y.detach())
    return both_ways


def model_pass(cfg, hw, shape, T):
    torch.manual_seed(0)
    model = GPT(shape, hw.attention).to(hw.device)
    x = torch.randint(shape.vocab_size, (1, T), device=hw.device)

    def both_ways():
        with hw.autocast():
            loss = model.loss(x, x)
        (loss / T).backward()
    return both_ways


PASSES = {"layer": layer_pass, "model": model_pass}


def measure(cfg, part, kind, T):
    """Return (milliseconds, MiB) of the second of two passes. part: layer or model."""
    kernel = "math" if kind == "softmax-math" else "sdpa"
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False, attention=kernel)
    both_ways = PASSES[part](cfg, hw, shape_of(cfg, kind, T), T)
    if hw.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(hw.device)
    _, before = hw.memory_gb()
    for _ in range(2):
        hw.wait()
        clock = time.perf_counter()
        both_ways()
        hw.wait()
        seconds = time.perf_counter() - clock
    _, peak = hw.memory_gb()
    return 1e3 * seconds, 1024 * (peak - before)


def measure_in_process(cfg, part, kind, T):
    shared = ("n_head", "n_layer", "features", "dtype", "device")
    flags = as_flags(one=f"{part},{kind},{T}", **{name: getattr(cfg, name) for name in shared})
    printed = process(["-m", "studies.mixer_lengths"], flags)
    return json.loads(printed.strip().splitlines()[-1])


def crossing(lengths, softmax, other):
    """Return the least length from which `other` is faster at every length, None if there is none."""
    first = None
    for T, slow, fast in zip(lengths, softmax, other):
        if fast >= slow:
            first = None
        elif first is None:
            first = T
    return first


def print_table(part, lengths, medians):
    """Print the table of a part. medians: {kind: [(milliseconds, MiB) of each length]}."""
    print(f"\n{part}: ms (MiB)")
    print(f"{'':>14}" + "".join(f"{T:>18,}" for T in lengths) + "   faster from")
    for kind, row in medians.items():
        cells = "".join(f"{ms:>10,.1f} ({mib:>5,.0f})" for ms, mib in row)
        found = ""
        if kind.partition("-")[0] != "softmax" and "softmax" in medians:
            times = [[ms for ms, _ in medians[name]] for name in ("softmax", kind)]
            found = crossing(lengths, *times) or "none of these"
        print(f"{kind:>14}{cells}   {found}", flush=True)


def main(argv):
    cfg = config.load(Config, argv)
    kinds = cfg.kinds.split(",")
    if cfg.one:
        part, kind, T = cfg.one.split(",")
        print(json.dumps(measure(cfg, part, kind, int(T))))
        return 0
    if (cfg.run is None) != (cfg.text is None):
        raise BadInput("--run needs --text, a file for the model to read: give both, or neither.")
    if cfg.errors and cfg.run:
        print_errors_of(cfg.run, cfg.text)
        return 0
    if cfg.errors:
        print_errors()
        return 0
    if not set(kinds) <= set(KINDS):
        raise BadInput(f"--kinds={cfg.kinds} is not known: choose from {', '.join(KINDS)}.")
    lengths = numbers(cfg.lengths, int, "lengths")
    if min(lengths) < 1:
        raise BadInput(f"--lengths={cfg.lengths} should be numbers of positions, above 0.")
    hw = hardware.setup(cfg.device, cfg.dtype, compile=False)
    print(f"{hw.name}, {hw.dtype}; one sequence, {cfg.n_head} heads of {D}, {cfg.features} features; "
          f"the model has {cfg.n_layer} layers; median of {cfg.rounds} rounds")
    found = {}
    measure_once = measure_in_process if hw.device.type == "cpu" else measure
    for _ in range(cfg.rounds):
        for part, T, kind in itertools.product(PASSES, lengths, kinds):
            found.setdefault((part, kind, T), []).append(measure_once(cfg, part, kind, T))
    for part in PASSES:
        medians = {}
        for kind in kinds:
            columns = [zip(*found[part, kind, T]) for T in lengths]
            medians[kind] = [[statistics.median(column) for column in pair] for pair in columns]
        print_table(part, lengths, medians)
    return 0


if __name__ == "__main__":
    guard.run(main)
