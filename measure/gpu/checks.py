"""Check a GPU; measure.gpu.run runs these checks as processes.

    python -m measure.gpu.checks card           name, driver, versions, attention kernels that run
    python -m measure.gpu.checks ceilings       products of large matrices by format, memory bandwidth
    python -m measure.gpu.checks attention      attention kernels: first call, steady state, varied lengths
    python -m measure.gpu.checks decoding       attention of a decoding step, by mask and by lengths

Options, as --key=value:
"""
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Literal

import torch
from torch.nn.attention import sdpa_kernel

from engine.gpu import CUDAGraph
from engine.runner import ModelRunner
from layers.ops import ATTENTION, SDPA_WITH_MASK
from measure.ceilings import formats, machine, matmul_peak, read_bandwidth
from measure.report import outcome, print_record
from measure.synthetic import SHAPES
from model import GPTConfig, blank
from runtime import config, guard, hardware

PACKAGES = ("numpy", "triton", "tokenizers", "safetensors", "transformers", "pytest", "nvidia-ml-py")
CALLS = 20                                   # measured calls of a kernel, or layers in a graph
# largest relative error of results and gradients against fp64; fp32 may be TF32
TOLERANCES = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
TOLERANCE = 0.03                             # the same for bf16 attention by lengths against mask


@dataclass
class Config:
    what: Literal["card", "ceilings", "attention", "decoding"] = "card"
    shape: tuple = ("16", "1024", "12", "12", "64")  # attention: rows, length, query heads,
                                             # key heads, channels a head
    device: str = "auto"


def ask_driver(fields):
    """Return nvidia-smi's text for the first card; None without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None


def installed(package):
    """Return the version of a package, None if it is not installed."""
    module = {"nvidia-ml-py": "pynvml"}.get(package, package)
    return version(package) if importlib.util.find_spec(module) else None


def random_inputs(hw, shape):
    """Return ([q [B, T, H, D], k, v [B, T, K, D]] with requires_grad, a gradient of the result)."""
    B, T, H, K, D = shape
    drawn = {"generator": torch.Generator(hw.device).manual_seed(T), "device": hw.device}
    *inputs, dy = (torch.randn(B, T, heads, D, dtype=hw.torch_dtype, **drawn) for heads in (H, K, K, H))
    return [x.requires_grad_() for x in inputs], dy


def results(attend, inputs, dy):
    """Return the result of attention and the gradients of its inputs."""
    y = attend(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def disagreement(attend, inputs, dy):
    """Return a sentence about the first tensor that deviates from fp64 attention of two rows, or None."""
    tolerance = TOLERANCES[dy.dtype]
    inputs = [x[:2].detach().requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(ATTENTION["math"], exact_inputs, dy[:2].double())
    for name, ours, expected in zip(("y", "dq", "dk", "dv"), results(attend, inputs, dy[:2]), exact):
        error = ((ours.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        if not error <= tolerance:           # NaN fails too
            return f"{name} is off by {error:.1%}"
    return None


def time_calls(attend, hw, inputs, dy, calls):
    """Return the seconds of each forward and backward pass."""
    hw.wait()
    seconds = []
    for _ in range(calls):
        clock = time.perf_counter()
        results(attend, inputs, dy)
        hw.wait()
        seconds.append(time.perf_counter() - clock)
    return seconds


def attention_kernels(hw):
    """Return the names of the attention kernels that can run forward and backward on a small batch."""
    found = []
    for name in hardware.SDPA:
        try:
            with hardware.sdpa_order([name]):
                inputs, dy = random_inputs(hw, (2, 64, 4, 4, 64))
                results(ATTENTION[hw.attention], inputs, dy)
            hw.wait()
        except RuntimeError:
            continue
        found.append(name)
    return found


def check_card(cfg, hw):
    facts = machine(hw)
    cuda = hw.device.type == "cuda"
    start = time.perf_counter()
    available = attention_kernels(hw)
    figures = dict(
        device=hw.device.type,
        cards=torch.cuda.device_count(),
        memory_gb=facts["memory_gb"],
        capability=torch.cuda.get_device_capability(hw.device) if cuda else None,
        driver=ask_driver("driver_version"),
        power_limit=ask_driver("power.limit"),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        python=platform.python_version(),
        packages={name: installed(name) for name in PACKAGES},
        kernels=available,
        kernels_s=round(time.perf_counter() - start, 2),
        compiler=shutil.which(os.environ.get("CC", "cc")),                   # for Triton
        dtype=hw.dtype,
        nominal=hw.peaks,
        nominal_tb_per_s=hw.bandwidth,
        commit=facts["commit"],
        date=facts["date"],
    )
    print_record(**outcome(hw.name, figures=figures))


def check_ceilings(cfg, hw):
    for name in formats(hw):
        tflops = matmul_peak(hw, name) / 1e12
        nominal = hw.peaks.get(name)
        figures = {"tflops": tflops, "nominal_tflops": nominal, "of_nominal": nominal and tflops / nominal}
        print_record(**outcome(f"products, {name}", figures=figures))
    gb_per_s = read_bandwidth(hw) / 1e9
    nominal = hw.bandwidth and 1e3 * hw.bandwidth
    share = nominal and gb_per_s / nominal
    figures = {"gb_per_s": gb_per_s, "nominal_gb_per_s": nominal, "of_nominal": share}
    print_record(**outcome("reading memory", figures=figures))


def time_attention(hw, shape):
    """Return the figures of the selected kernel: milliseconds of a forward and backward pass, seconds of the
    first call, and the mean over three lengths with their first calls, as in batches of varied lengths."""
    B, T, H, K, D = shape
    attend = ATTENTION[hw.attention]
    inputs, dy = random_inputs(hw, shape)
    seconds = time_calls(attend, hw, inputs, dy, CALLS + 1)
    steady = statistics.median(seconds[1:])
    varied = []
    for part in (4, 3, 2):
        inputs, dy = random_inputs(hw, (B, max(1, T * part // 4), H, K, D))
        varied += time_calls(attend, hw, inputs, dy, CALLS + 1)
    flops = 14 * B * H * T * T * D / 2       # two products forward and five backward, the causal half
    return {"ms": 1e3 * steady, "first_call_s": seconds[0], "varied_ms": 1e3 * statistics.fmean(varied[1:]),
            "tflops": flops / steady / 1e12}


def check_attention(cfg, hw):
    shape = tuple(map(int, cfg.shape))
    for name in hardware.SDPA:
        figures = {}
        status = "ok"
        problem = None
        try:
            with hardware.sdpa_order([name]):
                problem = disagreement(ATTENTION[hw.attention], *random_inputs(hw, shape))
                figures = time_attention(hw, shape)
        except RuntimeError as e:
            problem = str(e).strip().splitlines()[0]
        if problem:
            lacks = "No available kernel" in problem or "No viable backend" in problem
            status = "skipped" if lacks else "failed"
        print_record(**outcome(name, status, figures=figures, error=problem))


def attention_by_way(runner):
    """Return {"mask" or "length": LayerAttention} for random lengths, filling the cache's first layer."""
    drawn = {"generator": torch.Generator(runner.device).manual_seed(0)}
    on_device = {"device": runner.device} | drawn
    B = runner.slots
    c = runner.config
    positions = torch.randint(runner.context, (B,), **on_device)
    q, k, v = (torch.randn(B, 1, heads, c.head_dim, dtype=runner.dtype, **on_device)
               for heads in (c.n_head, c.n_kv_head, c.n_kv_head))
    for cache in (runner.cache.k, runner.cache.v):
        cache[0].normal_(**drawn)
    ways = {}
    for way in ("mask", "length") if runner.by_length else ("mask",):
        runner.cache.by_length = way == "length"
        groups = runner.cache.groups(B, positions.cpu().numpy() + 1)
        attend, *_ = runner.cache.decode(positions, groups)
        ways[way] = LayerAttention(runner.device, partial(attend, q, k, v))
    return ways


class LayerAttention:
    """One layer's decoding attention outside of a step; attend: a function without arguments."""

    def __init__(self, device, attend):
        self.device = device
        self.attend = attend

    def repeat(self):
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
            for _ in range(CALLS):
                self.attend()

    def seconds(self):
        """Return the median seconds of a CUDA graph of CALLS calls, which avoids Python's launch overhead."""
        graph = CUDAGraph(self.repeat, self.device, [])
        seconds = []
        for _ in range(6):
            clock = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - clock)
        return statistics.median(seconds[1:])


def check_decoding(cfg, hw):
    """Time decoding attention by mask and by lengths, with the heads of GPT-2 and SmolLM2-360M: CALLS layers,
    rows with random lengths up to the context."""
    for name, slots, context in (("gpt2", 64, 192), ("gpt2", 512, 192), ("smollm2-360m", 256, 1024)):
        model = blank(GPTConfig(**SHAPES[name] | {"n_layer": 1}), device=hw.device)
        runner = ModelRunner(model, slots, context, dtype=hw.sampling_dtype)
        expected = None
        for way, attention in attention_by_way(runner).items():
            case = f"{name}, {runner.slots} rows of up to {runner.context}, {way}"
            try:
                found = attention.attend().float()
                expected = found if expected is None else expected
                error = ((found - expected).norm() / expected.norm()).item()
                figures = {"ms": 1e3 * attention.seconds(), "calls": CALLS, "off_mask": error}
                problem = None if error <= TOLERANCE else f"off by {error:.1%} from the result by mask"
                print_record(**outcome(case, "failed" if problem else "ok", figures=figures, error=problem))
            except Exception as e:           # no such kernel here, or it can't be captured
                status = "failed" if hw.device.type == "cuda" else "skipped"
                print_record(**outcome(case, status, error=f"{type(e).__name__}: {e}".splitlines()[0][:200]))


CHECKS = {"card": check_card, "ceilings": check_ceilings, "attention": check_attention,
          "decoding": check_decoding}


def main(argv):
    cfg = config.load(Config, argv, positional="what")
    hw = hardware.setup(cfg.device, compile=False)
    CHECKS[cfg.what](cfg, hw)
    return 0


if __name__ == "__main__":
    guard.run(main)
