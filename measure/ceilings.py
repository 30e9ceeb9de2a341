"""Measured limits of this machine: matrix products, memory bandwidth, and the least time for sampling."""
import contextlib
import datetime
import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from layers.packed import Packed
from engine.kv_cache import cache_bytes
from model import on_meta
from runtime import hardware

# {(device, format): FLOP/s, (device, "bytes"): bytes/s}, filled in by this process
MEASURED = {}


def clock(function, hw):
    """Call function() and return (seconds, result), synchronizing the device before and after."""
    hw.wait()
    start = time.perf_counter()
    result = function()
    hw.wait()
    return time.perf_counter() - start, result


def best_time(function, hw):
    """Return the seconds of function(), the least of five: single calls on a CPU; on a GPU means of 20 calls,
    after half a second of load to raise its clock."""
    calls = 1
    if hw.device.type == "cuda":
        calls = 20
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            clock(function, hw)
    return min(clock(lambda: [function() for _ in range(calls)], hw)[0] / calls for _ in range(5))


def read_bandwidth(hw):
    """Return the bytes/s of reading 1 GiB."""
    if (hw.device, "bytes") not in MEASURED:
        big = torch.zeros(2**28, dtype=torch.int32, device=hw.device)
        MEASURED[hw.device, "bytes"] = big.nbytes / best_time(big.max, hw)
        del big
        torch.cuda.empty_cache()             # for the measured processes
    return MEASURED[hw.device, "bytes"]


def matmul_peak(hw, format=None):
    """Return the FLOP/s of a product of large matrices in bf16, fp16, tf32 or fp32; None: hw's own format."""
    format = format or hw.product_format()
    if (hw.device, format) not in MEASURED:
        n = 8192 if hw.device.type == "cuda" else 2048
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if format == "tf32" else "highest")
        a = torch.randn(n, n, device=hw.device).to(hardware.DTYPES[format.replace("tf", "fp")])
        products = [a.mm]
        if format == "fp32" and Packed.works(hw.device.type, a.dtype):        # faster on most CPUs
            products.append(Packed())
            products[1].pack(a)
        seconds = min(best_time(lambda: product(a), hw) for product in products)
        MEASURED[hw.device, format] = 2 * n**3 / seconds
        torch.set_float32_matmul_precision(precision)
        del a, products
        torch.cuda.empty_cache()
    return MEASURED[hw.device, format]


def formats(hw):
    """Return the formats that the device multiplies natively."""
    device = hw.device.type
    if device == "cuda":
        ampere = torch.cuda.get_device_capability(hw.device) >= (8, 0)
        return ["fp32", "tf32", "bf16", "fp16"] if ampere else ["fp32", "fp16"]
    if device == "mps":
        return ["fp32", "fp16"]
    return ["fp32", "bf16"] if hardware.cpu_multiplies_bf16() else ["fp32"]


def peak(hw):
    """Return the FLOP/s that MFU refers to: the card's nominal peak, or the measured one if unknown."""
    return hw.peak_tflops * 1e12 if hw.peak_tflops else matmul_peak(hw)


def devices(hw, ranks):
    """Return the number of devices that the ranks use: a GPU each, or one CPU together."""
    return ranks if hw.device.type == "cuda" else 1


def machine(hw):
    """Return the hardware, versions, commit and date that a record of figures needs."""
    name = hw.name
    if hw.device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}"
    packages = {}
    for package in ("numpy", "triton", "tokenizers", "safetensors", "transformers", "trl", "accelerate",
                    "peft"):
        with contextlib.suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        "hardware": name,
        "cores": os.cpu_count(),
        "memory_gb": round(hw.memory_size_gb(), 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if hw.device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if hw.device.type == "cuda" else None,
        "packages": packages,
        "commit": git_commit(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def recipe_rows(hw):
    """Return the rows of docs/recipes.md that are this machine's."""
    if hw.device.type != "cuda":
        return f"measured, bf16: {'yes' if hw.dtype == 'bf16' else 'no'}"
    memory = hw.memory_size_gb()
    return "computed, " + ("A100" if memory > 36 else "4090" if memory > 20 and hw.dtype == "bf16" else "T4")


def cpu_name():
    cpuinfo = Path("/proc/cpuinfo")
    model_name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return model_name[1] if model_name else platform.processor() or platform.machine()


def git_commit():
    """Return the commit of this repository, with -dirty if files differ from it; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = None
    with contextlib.suppress(OSError):
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return result.stdout.strip() or None if result and result.returncode == 0 else None


def sampling_limit(c, hw, prompts, prompt_tokens, samples, new, slots=512, weight_size=None):
    """Return (least seconds of sampling, of these the decoding steps' seconds, samples in flight). Prefill is
    counted as FLOPs at the measured matmul speed; each decoding step as bytes of weights and KV cache at the
    measured bandwidth. new: tokens of each sample. weight_size: bytes; None: of hw's format."""
    model = on_meta(c)
    in_flight = min(slots, prompts * samples)
    dtype = hw.sampling_dtype
    format = hw.product_format(hw.sampling_format)
    block_params = sum(p.numel() for p in model.blocks.parameters())
    weight_bytes = (block_params + model.head_weight.numel()) * (weight_size or dtype.itemsize)
    bytes_per_token = cache_bytes(c, 0, 64, dtype) / 64
    context = prompt_tokens + new / 2                    # on average
    step = (weight_bytes + in_flight * context * bytes_per_token) / read_bandwidth(hw)
    decode = step * new * prompts * samples / in_flight
    return 2 * block_params * prompts * prompt_tokens / matmul_peak(hw, format) + decode, decode, in_flight
