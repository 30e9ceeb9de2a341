"""Checks of a card that studies.gpu.run runs as processes of their own.

    python -m studies.gpu.checks card           what it is, its driver, versions, attention kernels that run
    python -m studies.gpu.checks ceilings       products of large matrices by format, and reading memory
    python -m studies.gpu.checks attention      attention kernels: first call, steady, at varied lengths
    python -m studies.gpu.checks decoding       a step's attention, by a mask and by lengths

Knobs, as --key=value:
"""
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import torch

from engine import Engine, decoding
from layers.ops import ATTENTION
from measure.ceilings import formats, machine, matmul_peak, read_bandwidth
from measure.report import outcome, tell
from measure.synthetic import SHAPES
from model import GPTConfig, blank
from runtime import config, guard, hardware, kernels

PACKAGES = ("numpy", "triton", "tokenizers", "safetensors", "transformers", "pytest", "nvidia-ml-py")
CALLS = 20                                   # of a kernel that count


@dataclass
class Config:
    what: Literal["card", "ceilings", "attention", "decoding"] = "card"
    shape: tuple = ("16", "1024", "12", "12", "64")  # attention: rows, length, query heads,
                                             # key heads, channels a head
    device: str = "auto"


def ask_driver(fields):
    """Return what nvidia-smi says of the first card, as text; None without it."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None


def installed(package):
    """Return the version of a package, None if it is not there."""
    module = {"nvidia-ml-py": "pynvml"}.get(package, package)
    return version(package) if importlib.util.find_spec(module) else None


def attention_kernels(hw):
    """Return the names of the attention kernels that do a forward and backward pass of a small batch."""
    found = []
    for name in kernels.SDPA:
        try:
            with kernels.varied([name]):
                kernels.results(ATTENTION[hw.attention], *kernels.random_inputs(hw, (2, 64, 4, 4, 64)))
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
        compiler=shutil.which(os.environ.get("CC", "cc")),                   # Triton needs one
        dtype=hw.dtype,
        nominal=hw.peaks,
        nominal_tb_per_s=hw.bandwidth,
        commit=facts["commit"],
        date=facts["date"],
    )
    tell(**outcome(hw.name, figures=figures))


def check_ceilings(cfg, hw):
    for name in formats(hw):
        tflops = matmul_peak(hw, name) / 1e12
        nominal = hw.peaks.get(name)
        figures = {"tflops": tflops, "nominal_tflops": nominal, "of_nominal": nominal and tflops / nominal}
        tell(**outcome(f"products, {name}", figures=figures))
    gb_per_s = read_bandwidth(hw) / 1e9
    nominal = hw.bandwidth and 1e3 * hw.bandwidth
    share = nominal and gb_per_s / nominal
    figures = {"gb_per_s": gb_per_s, "nominal_gb_per_s": nominal, "of_nominal": share}
    tell(**outcome("reading memory", figures=figures))


def time_attention(hw, shape):
    """Return the figures of the kernel that is set: milliseconds of a forward and backward pass, what the
    first one took, and the mean of passes at three lengths with the first of each, as batches of varied
    lengths have it."""
    B, T, H, K, D = shape
    attend = ATTENTION[hw.attention]
    inputs, dy = kernels.random_inputs(hw, shape)
    seconds = kernels.time_calls(attend, hw, inputs, dy, CALLS + 1)
    steady = statistics.median(seconds[1:])
    varied = [kernels.random_inputs(hw, (B, max(1, T * part // 4), H, K, D)) for part in (4, 3, 2)]
    flops = 14 * B * H * T * T * D / 2       # two products forward and five backward, the causal half
    return {
        "ms": 1e3 * steady,
        "first_call_s": seconds[0],
        "varied_ms": 1e3 * kernels.time_kernel(attend, hw, varied, 0.0, False),
        "tflops": flops / steady / 1e12,
    }


def check_attention(cfg, hw):
    shape = tuple(map(int, cfg.shape))
    for name in kernels.SDPA:
        figures = {}
        status = "ok"
        problem = None
        try:
            with kernels.varied([name]):
                problem = kernels.disagreement(ATTENTION[hw.attention], *kernels.random_inputs(hw, shape))
                figures = time_attention(hw, shape)
        except RuntimeError as e:
            problem = str(e).strip().splitlines()[0]
        if problem:
            lacks = "No available kernel" in problem or "No viable backend" in problem
            status = "skipped" if lacks else "failed"
        tell(**outcome(name, status, figures=figures, error=problem))


def check_decoding(cfg, hw):
    """Time what the engine chooses from, for models of one layer with the heads of GPT-2 and SmolLM2-360M:
    the attention of CALLS layers, of rows that have from 1 to all positions."""
    for name, slots, context in (("gpt2", 64, 192), ("gpt2", 512, 192), ("smollm2-360m", 256, 1024)):
        model = blank(GPTConfig(**SHAPES[name] | {"n_layer": 1}), device=hw.device)
        engine = Engine(model, slots, context, dtype=hw.sampling_dtype, decoding="mask")
        expected = None
        for way, once in decoding.both_ways(engine).items():
            case = f"{name}, {engine.slots} rows of up to {engine.context}, {way}"
            try:
                found = once.attend().float()
                expected = found if expected is None else expected
                error = ((found - expected).norm() / expected.norm()).item()
                figures = {"ms": 1e3 * once.seconds(), "calls": decoding.CALLS, "off_mask": error}
                problem = None if error <= decoding.TOLERANCE else f"off by {error:.1%} from the mask's"
                tell(**outcome(case, "failed" if problem else "ok", figures=figures, error=problem))
            except Exception as e:           # no such kernel here, or none that a graph can hold
                expected_to_run = way == "mask" and hw.device.type == "cuda"
                status = "failed" if expected_to_run else "skipped"
                tell(**outcome(case, status, error=f"{type(e).__name__}: {e}".splitlines()[0][:200]))


CHECKS = {
    "card": check_card,
    "ceilings": check_ceilings,
    "attention": check_attention,
    "decoding": check_decoding,
}


def main(argv):
    cfg = config.load(Config, argv, positional="what")
    hw = hardware.setup(cfg.device, compile=False)
    CHECKS[cfg.what](cfg, hw)
    return 0


if __name__ == "__main__":
    guard.run(main)
