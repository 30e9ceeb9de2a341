"""Check a GPU; measure.gpu.run runs these checks as processes.

    python -m measure.gpu.checks card           name, driver, versions
    python -m measure.gpu.checks ceilings       products of large matrices by format, memory bandwidth
    python -m measure.gpu.checks attention      attention kernels: first call, steady state, varied lengths

Options, as --key=value:
"""
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import Literal

import torch

from layers.ops import ATTENTION
from measure.ceilings import clock, formats, machine, matmul_peak, read_bandwidth
from measure.report import outcome, print_record
from runtime import config, guard, hardware

CALLS = 20                                   # measured calls of a kernel


@dataclass
class Config:
    what: Literal["card", "ceilings", "attention"] = "card"
    shape: tuple = ("16", "1024", "12", "12", "64")  # attention: rows, length, query heads,
                                             # key heads, channels a head
    device: str = "auto"


def ask_driver():
    """Return nvidia-smi's (driver version, power limit) of the first card; (None, None) without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return printed.splitlines()[0].split(", ")


def random_inputs(hw, shape):
    """Return ([q [B, T, H, D], k, v [B, T, K, D]] with requires_grad, a gradient of the result)."""
    B, T, H, K, D = shape
    drawn = {"generator": torch.Generator(hw.device).manual_seed(T), "device": hw.device}
    *inputs, dy = (torch.randn(B, T, heads, D, dtype=hw.torch_dtype, **drawn) for heads in (H, K, K, H))
    return [x.requires_grad_() for x in inputs], dy


def attend_both_ways(attend, inputs, dy):
    """Compute attention and the gradients of its inputs."""
    torch.autograd.grad(attend(*inputs), inputs, dy)


def time_calls(attend, hw, inputs, dy):
    """Return the seconds of each of CALLS + 1 forward and backward passes."""
    return [clock(lambda: attend_both_ways(attend, inputs, dy), hw)[0] for _ in range(CALLS + 1)]


def check_card(cfg, hw):
    driver, power_limit = ask_driver()
    cuda = hw.device.type == "cuda"
    figures = machine(hw) | {
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
    }
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
    seconds = time_calls(attend, hw, *random_inputs(hw, shape))
    steady = statistics.median(seconds[1:])
    varied = []
    for part in (4, 3, 2):
        varied += time_calls(attend, hw, *random_inputs(hw, (B, max(1, T * part // 4), H, K, D)))
    flops = 14 * B * H * T * T * D / 2       # two products forward and five backward, the causal half
    return {"ms": 1e3 * steady, "first_call_s": seconds[0], "varied_ms": 1e3 * statistics.fmean(varied[1:]),
            "tflops": flops / steady / 1e12}


def check_attention(cfg, hw):
    """Time each kernel; tests/test_gpu.py checks their results."""
    for name in hardware.SDPA:
        try:
            with hardware.sdpa_order([name]):
                figures = time_attention(hw, tuple(map(int, cfg.shape)))
            print_record(**outcome(name, figures=figures))
        except RuntimeError as e:
            lacks = "No available kernel" in str(e) or "No viable backend" in str(e)
            status = "skipped" if lacks else "failed"
            print_record(**outcome(name, status, error=f"{e}".strip().splitlines()[0]))


CHECKS = {"card": check_card, "ceilings": check_ceilings, "attention": check_attention}


def main(argv):
    cfg = config.load(Config, argv, positional="what")
    hw = hardware.setup(cfg.device, compile=False)
    CHECKS[cfg.what](cfg, hw)
    return 0


if __name__ == "__main__":
    guard.run(main)
