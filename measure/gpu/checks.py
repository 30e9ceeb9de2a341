"""Check a GPU, and print a line of JSON for each check; measure.gpu.run runs these checks as processes.

    python -m measure.gpu.checks card           name, driver, versions
    python -m measure.gpu.checks ceilings       products of large matrices by format, memory bandwidth
    python -m measure.gpu.checks attention      attention kernels: first call, steady state, varied lengths
"""
import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import Literal

import torch

from layers.ops import ATTENTION
from measure.ceilings import clock, formats, machine, matmul_peak, read_bandwidth
from measure.gpu.run import outcome
from runtime import config, guard, hardware

CALLS = 20                                   # measured calls of a kernel


@dataclass
class Config:
    what: Literal["card", "ceilings", "attention"] = "card"
    shape: tuple = ("16", "1024", "12", "12", "64")  # attention: rows, length, query heads,
                                             # key heads, channels a head
    device: str = "auto"


def ask_driver(hw):
    """Return nvidia-smi's (driver version, power limit) of the card; (None, None) without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    if hw.device.type == "cuda":
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(hw.device).uuid}")
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return printed.splitlines()[0].split(", ")


def check_card(cfg, hw):
    driver, power_limit = ask_driver(hw)
    cuda = hw.device.type == "cuda"
    yield outcome(hw.name, figures=machine(hw) | {
        "device": hw.device.type,
        "cards": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(hw.device) if cuda else None,
        "driver": driver,
        "power_limit": power_limit,
        "cudnn": torch.backends.cudnn.version(),
        "compiler": shutil.which(os.environ.get("CC", "cc")),                # for Triton
        "dtype": hw.dtype,
        "nominal": hw.peaks,
        "nominal_tb_per_s": hw.bandwidth,
    })


def check_ceilings(cfg, hw):
    for name in formats(hw):
        tflops = matmul_peak(hw, name) / 1e12
        nominal = hw.peaks.get(name)
        share = nominal and tflops / nominal
        yield outcome(f"products, {name}", figures={"tflops": tflops, "of_nominal": share})
    gb_per_s = read_bandwidth(hw) / 1e9
    share = hw.bandwidth and gb_per_s / 1e3 / hw.bandwidth
    yield outcome("reading memory", figures={"gb_per_s": gb_per_s, "of_nominal": share})


def time_calls(hw, B, T, H, K, D):
    """Return the seconds of CALLS + 1 forward and backward passes of attention over q [B, T, H, D] and k, v
    [B, T, K, D]."""
    drawn = {"generator": torch.Generator(hw.device).manual_seed(T), "device": hw.device}
    *inputs, dy = (torch.randn(B, T, heads, D, dtype=hw.torch_dtype, **drawn) for heads in (H, K, K, H))
    inputs = [x.requires_grad_() for x in inputs]

    def attend():
        torch.autograd.grad(ATTENTION[hw.attention](*inputs), inputs, dy)
    return [clock(attend, hw)[0] for _ in range(CALLS + 1)]


def time_attention(hw, B, T, H, K, D):
    """Return the figures of the selected kernel: milliseconds of a forward and backward pass, seconds of the
    first call, and the mean over three lengths with their first calls, as in batches of varied lengths."""
    seconds = time_calls(hw, B, T, H, K, D)
    steady = statistics.median(seconds[1:])
    varied = [s for part in (4, 3, 2) for s in time_calls(hw, B, max(1, T * part // 4), H, K, D)]
    flops = 14 * B * H * T * T * D / 2       # two products forward and five backward, the causal half
    return {"ms": 1e3 * steady, "first_call_s": seconds[0], "varied_ms": 1e3 * statistics.fmean(varied[1:]),
            "tflops": flops / steady / 1e12}


def check_attention(cfg, hw):
    """Time each kernel; tests/test_gpu.py checks their results."""
    for name in hardware.SDPA:
        try:
            with hardware.sdpa_order([name]):
                yield outcome(name, figures=time_attention(hw, *map(int, cfg.shape)))
        except RuntimeError as e:
            lacks = "No available kernel" in str(e) or "No viable backend" in str(e)
            status = "skipped" if lacks else "failed"
            yield outcome(name, status, error=f"{e}".strip().splitlines()[0])


CHECKS = {"card": check_card, "ceilings": check_ceilings, "attention": check_attention}


def main(argv):
    cfg = config.load(Config, argv, positional="what")
    hw = hardware.setup(cfg.device, compile=False)
    for check in CHECKS[cfg.what](cfg, hw):
        print(json.dumps(check), flush=True)
    return 0


if __name__ == "__main__":
    guard.run(main)
