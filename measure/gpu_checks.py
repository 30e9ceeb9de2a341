"""Checks of a card that measure.gpu runs as processes of their own.

    python -m measure.gpu_checks card           what it is, its driver, versions, attention kernels that run
    python -m measure.gpu_checks ceilings       products of large matrices by format, and reading memory
    python -m measure.gpu_checks attention      attention kernels: first call, steady, at varied lengths

Knobs, as --key=value:
"""
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import torch

from measure.ceilings import formats, machine, matmul_peak, read_bandwidth
from measure.report import outcome, tell
from ops import ATTENTION
from runtime import config, guard, hardware, kernels

PACKAGES = ("numpy", "triton", "tokenizers", "safetensors", "transformers", "pytest", "nvidia-ml-py")
CALLS = 20                                   # of a kernel that count


@dataclass
class Config:
    what: Literal["card", "ceilings", "attention"] = "card"
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
    seconds = []
    for _ in range(CALLS + 1):
        hw.wait()
        start = time.perf_counter()
        kernels.results(attend, inputs, dy)
        hw.wait()
        seconds.append(time.perf_counter() - start)
    steady = statistics.median(seconds[1:])
    varied = [(B, max(1, T * part // 4), H, K, D) for part in (4, 3, 2)]
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
                problem = kernels.disagreement(ATTENTION[hw.attention], hw, shape)
                figures = time_attention(hw, shape)
        except RuntimeError as e:
            problem = str(e).strip().splitlines()[0]
        if problem:
            lacks = "No available kernel" in problem or "No viable backend" in problem
            status = "skipped" if lacks else "failed"
        tell(**outcome(name, status, figures=figures, error=problem))


CHECKS = {"card": check_card, "ceilings": check_ceilings, "attention": check_attention}


def main(argv):
    cfg = config.load(Config, argv, positional="what")
    hw = hardware.setup(cfg.device, compile=False)
    CHECKS[cfg.what](cfg, hw)
    return 0


if __name__ == "__main__":
    guard.run(main)
