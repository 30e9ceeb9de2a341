"""What this machine is and what it can do: device, precision, attention kernel, peak speed."""
import contextlib
import ctypes
import re
import resource
import sys
from dataclasses import dataclass

import torch

from runtime import distributed
from runtime.config import BadInput

# Dense peaks with fp32 accumulation in TFLOP/s (bf16, fp16, tf32, fp32) and memory bandwidth in TB/s, from the makers'
# data sheets; None where the hardware lacks the format. Matched as whole words, the specific name before the general.
# A card that is not listed has no MFU: a guess would be worse.
PEAKS = {
    "H100 PCIe":  (756, 756, 378, 51, 2.0),
    "H100 NVL":   (835, 835, 417, 60, 3.9),
    "H100":       (989, 989, 494, 67, 3.35),
    "H200":       (989, 989, 494, 67, 4.8),
    "A100 80GB":  (312, 312, 156, 19.5, 2.04),       # also "A100-SXM4-80GB": any run of other characters may stand between
    "A100":       (312, 312, 156, 19.5, 1.56),
    "RTX 3090":   (71, 71, 35.6, 35.6, 0.94),
    "RTX 4090":   (165.2, 165.2, 82.6, 82.6, 1.01),
    "L4":         (121, 121, 60, 30.3, 0.30),
    "T4":         (None, 65, None, 8.1, 0.32),
    "V100":       (None, 125, None, 15.7, 0.9),
}
OTHER_CARDS = ("Laptop", "RTX 4090 D", "MIG")        # share a listed card's name, not its speed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def peaks(name):
    """(TFLOP/s by dtype, TB/s) of a device by its name; ({}, None) if it is not in the table."""
    if any(re.search(rf"\b{other}\b", name) for other in OTHER_CARDS):
        return {}, None
    for card, (bf16, fp16, tf32, fp32, bandwidth) in PEAKS.items():
        if re.search(r"\b" + r"\b.*\b".join(card.split()) + r"\b", name):
            return {"bf16": bf16, "fp16": fp16, "tf32": tf32, "fp32": fp32}, bandwidth
    return {}, None


@dataclass
class Hardware:
    device: torch.device
    name: str
    dtype: str                       # bf16 | fp16 | fp32: what matrix products compute in
    tf32: bool
    compile: bool
    attention: str                   # sdpa | math, for model.attend
    peak_tflops: float | None        # dense, at dtype, one device
    bandwidth_tbs: float | None

    def autocast(self):
        """Matrix products in dtype; weights stay fp32."""
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.dtype])

    def scaler(self):
        """GradScaler that does nothing unless dtype is fp16."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")

    def mfu(self, tokens_per_s, flops_per_token):
        """Model FLOPs utilisation of one device, 0 to 1; None if its peak is not known."""
        return self.peak_tflops and tokens_per_s * flops_per_token / (self.peak_tflops * 1e12)

    def peak_memory_gb(self):
        """GiB: the most that tensors held on a GPU, the process's resident set elsewhere."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)


def setup(device="auto", dtype="auto", tf32=True, compile=None, attention="auto", deterministic=False):
    """Choose by what is there, obey what is asked for, and refuse what can't be had."""
    kind = device.split(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        device = kind
    if kind not in ("cuda", "mps", "cpu"):
        raise BadInput(f"--device={device} is not known: use auto, cuda, cuda:1, mps or cpu.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device=cuda was asked for, but PyTorch sees no GPU here: use --device=cpu, or install a CUDA build.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise BadInput("--device=mps was asked for, but this is no Apple GPU: use --device=cpu.")
    if kind == "cuda" and distributed.world_size() > 1:
        device = f"cuda:{distributed.local_rank()}"
    name = torch.cuda.get_device_name(device) if kind == "cuda" else {"cpu": f"CPU, {torch.get_num_threads()} threads",
                                                                      "mps": "Apple GPU"}[kind]
    capability = torch.cuda.get_device_capability(device) if kind == "cuda" else (0, 0)
    if dtype == "auto":
        if kind == "cuda":           # not is_bf16_supported(): it is also true on a T4, which emulates bf16
            dtype = "bf16" if capability >= (8, 0) else "fp16"
        else:
            dtype = "bf16" if kind == "cpu" and cpu_multiplies_bf16() else "fp32"
    if kind == "cpu":
        keep_freed_memory()
    tf32 = tf32 and capability >= (8, 0)
    if kind == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    if deterministic:
        torch.use_deterministic_algorithms(True)
    tflops, bandwidth = peaks(name)
    return Hardware(torch.device(device), name, dtype, tf32, kind == "cuda" if compile is None else compile,
                    choose_attention(attention, kind, capability, dtype),
                    tflops.get("tf32" if dtype == "fp32" and tf32 else dtype), bandwidth)


def choose_attention(attention, kind, capability, dtype):
    """sdpa or math for model.attend; flash, cudnn and efficient name one of sdpa's kernels on a GPU."""
    if attention in ("flash", "cudnn", "efficient") and kind != "cuda":
        raise BadInput(f"--attention={attention} needs a GPU: use auto, sdpa or math.")
    if attention == "auto" and kind == "cpu":
        return "math" if dtype == "bf16" else "sdpa"          # see model.attend for what that buys
    if attention in ("auto", "flash", "cudnn", "efficient") and kind == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel
        kernels = {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION],
                   "efficient": [SDPBackend.EFFICIENT_ATTENTION],
                   "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}[attention]
        if attention == "auto" and capability[0] == 9:        # Hopper: cuDNN's kernel first
            kernels.insert(0, SDPBackend.CUDNN_ATTENTION)
        sdpa_kernel(kernels, set_priority=True).__enter__()   # for the whole process
    return "math" if attention == "math" else "sdpa"


def cpu_multiplies_bf16():
    """AVX512-BF16 or AMX: a 2-core Zen 5 multiplies bf16 matrices 4.3 times faster than fp32 ones."""
    return any(getattr(torch.cpu, f"_is_{feature}_supported", bool)() for feature in ("avx512_bf16", "amx_tile"))


def keep_freed_memory():
    """Let glibc reuse freed tensors instead of giving their pages back: a training step of a 0.8M model took 4,400 page
    faults and 78 ms before, fewer than 50 faults and 55 ms with this."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):              # not glibc
        return
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 64 << 20)
    mallopt(M_ARENA_MAX, 1)                                   # autograd's thread would get an arena of its own
