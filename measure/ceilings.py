"""What this machine can do at most, measured: products of matrices, reading memory, and the least time that
sampling takes by them."""
import contextlib
import datetime
import importlib.util
import os
import platform
import re
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import torch

from engine import Packed, cache_bytes
from model import GPT
from runtime import hardware

MEASURED = {}                                # in this process: {(device, format, or bytes): a second}


def clock(function, hw):
    """(seconds, result); the device is done when it starts and when it stops."""
    hw.wait()
    began = time.perf_counter()
    result = function()
    hw.wait()
    return time.perf_counter() - began, result


def once(function, hw):
    """Seconds that it takes, at best: on a CPU of five calls; a GPU, whose clock rises under load, works half
    a second, and then counts by itself what 20 calls take that wait for nothing."""
    if hw.device.type != "cuda":
        return min(clock(function, hw)[0] for _ in range(5))
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        clock(function, hw)
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            function()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / 20)
    return min(found)


def give_back(hw):
    """Memory of a GPU that no tensor holds, to the processes that are measured."""
    if hw.device.type == "cuda":
        torch.cuda.empty_cache()


def read_bandwidth(hw):
    """Bytes/s that reading 1 GiB reaches."""
    if (hw.device, "bytes") not in MEASURED:
        big = torch.zeros(2**28, dtype=torch.int32, device=hw.device)
        MEASURED[hw.device, "bytes"] = big.nbytes / once(big.max, hw)
        del big
        give_back(hw)
    return MEASURED[hw.device, "bytes"]


def matmul_peak(hw, format=None):
    """FLOP/s of a product of large matrices in bf16, fp16, tf32 or fp32; None: in what hw computes in."""
    format = format or hw.product_format()
    if (hw.device, format) not in MEASURED:
        n, before = 8192 if hw.device.type == "cuda" else 2048, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if format == "tf32" else "highest")
        a = torch.randn(n, n, device=hw.device).to(hardware.DTYPES[format.replace("tf", "fp")])
        ways = [a.mm]
        if format == "fp32" and Packed.works(hw.device, a.dtype):        # the faster one on most processors
            ways.append(Packed())
            ways[1].pack(a)
        MEASURED[hw.device, format] = 2 * n**3 / min(once(lambda: way(a), hw) for way in ways)
        torch.set_float32_matmul_precision(before)
        del a, ways
        give_back(hw)
    return MEASURED[hw.device, format]


def formats(hw):
    """That the device multiplies natively."""
    if hw.device.type == "cuda":
        return ["fp32", *(["tf32", "bf16"] if torch.cuda.get_device_capability(hw.device) >= (8, 0) else []), "fp16"]
    half = getattr(torch.cpu, "_is_avx512_fp16_supported", bool)() or getattr(torch.cpu, "_is_amx_fp16_supported", bool)()
    return ["fp32", *(["bf16"] if hw.device.type == "cpu" and hardware.cpu_multiplies_bf16() else []),
            *(["fp16"] if hw.device.type == "mps" or hw.device.type == "cpu" and half else [])]


def peak(hw):
    """FLOP/s that MFU is a share of: the card's nominal ones, measured where they are not known."""
    return hw.peak_tflops * 1e12 if hw.peak_tflops else matmul_peak(hw)


def devices(hw, ranks):
    """How many times its peak so many processes have: GPUs are one each, the cores of a CPU are shared."""
    return ranks if hw.device.type == "cuda" else 1


def machine(hw):
    """What figures are of no use without."""
    name = hw.name
    if hw.device.type == "cpu":
        known = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
        threads = torch.get_num_threads()
        name = f"{known[1] if known else platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    done = None
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=Path(__file__).parent,
                              capture_output=True, text=True)
    return {"hardware": name, "cores": os.cpu_count(), "memory_gb": round(hw.memory_size_gb(), 1), "python": platform.python_version(),
            "torch": torch.__version__, "cuda": torch.version.cuda if hw.device.type == "cuda" else None,
            "packages": {name: version(name) for name in ("transformers", "trl", "accelerate", "peft") if importlib.util.find_spec(name)},
            "commit": done.stdout.strip() or None if done and done.returncode == 0 else None,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}


def on_meta(c):
    with torch.device("meta"):
        return GPT(c)


def sampling_limit(c, hw, prompts, prompt_tokens, samples, new, slots=512):
    """(seconds that sampling takes at least, of which the steps; samples in flight): the prompts' products at
    the measured speed, and for each step weights, keys and values at the speed of reading memory."""
    model, in_flight = on_meta(c), min(slots, prompts * samples)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    dtype, format = hw.sampling_dtype, hw.product_format(hw.sampling_format)
    weights, per_token = (in_blocks + model.head_weight.numel()) * dtype.itemsize, cache_bytes(c, 0, 64, dtype) / 64
    floor = (weights + in_flight * (prompt_tokens + new / 2) * per_token) / read_bandwidth(hw)
    steps = floor * new * prompts * samples / in_flight
    return 2 * in_blocks * prompts * prompt_tokens / matmul_peak(hw, format) + steps, steps, in_flight
