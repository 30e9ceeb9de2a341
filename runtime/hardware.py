"""The hardware of this process: device, precision, attention kernels, peak FLOP/s and bandwidth."""
import contextlib
import ctypes
import os
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import distributed
from runtime.config import BadInput

# Dense peaks with fp32 accumulation in TFLOP/s (bf16, fp16, tf32, fp32) and memory bandwidth in TB/s, from
# the vendors' data sheets (not checked yet: V100, T4, A10, L40S, RTX 5090, B200, H100 PCIe, NVLs); None for
# an unsupported format. Names match as whole words with anything between them ("A100-SXM4-80GB" is an "A100
# 80GB"), specific names first. A card that is not listed has no MFU, since a guess would be worse.
PEAKS = {
    "H100 PCIe":  (756, 756, 378, 51, 2.0),
    "H100 NVL":   (835, 835, 417, 60, 3.9),
    "H100":       (989, 989, 494, 67, 3.35),
    "H200 NVL":   (835, 835, 417, 60, 4.8),
    "H200":       (989, 989, 494, 67, 4.8),
    "A100 80GB":  (312, 312, 156, 19.5, 2.04),
    "A100":       (312, 312, 156, 19.5, 1.56),
    "B200":       (2250, 2250, 1125, 75, 8.0),
    "RTX 5090":   (209.5, 209.5, 104.8, 104.8, 1.79),
    "RTX 3090":   (71, 71, 35.6, 35.6, 0.94),
    "RTX 4090":   (165.2, 165.2, 82.6, 82.6, 1.01),
    "L40S":       (362, 362, 183, 91.6, 0.86),
    "A10":        (125, 125, 62.5, 31.2, 0.60),
    "L4":         (121, 121, 60, 30.3, 0.30),
    "T4":         (None, 65, None, 8.1, 0.32),
    "V100":       (None, 125, None, 15.7, 0.9),
}
# Variants with a listed card's name but another speed
UNLISTED_VARIANTS = ("Laptop", "Ti", "SUPER", "RTX 4090 D", "MIG")

SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
# Up to this version cuDNN's attention has given NaN gradients at some lengths.
CUDNN_VERSION = 91500
heap_is_reserved = False                     # see reserve_heap
PROCESS_WIDE = contextlib.ExitStack()        # contexts that last until the process ends

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def peaks(name):
    """Return (TFLOP/s by format, TB/s) of a device by its name; ({}, None) if it is not in the table."""
    if any(re.search(rf"\b{variant}\b", name) for variant in UNLISTED_VARIANTS):
        return {}, None
    for card, (bf16, fp16, tf32, fp32, bandwidth) in PEAKS.items():
        words = r"\b.*\b".join(card.split())
        if re.search(rf"\b{words}\b", name):
            return {"bf16": bf16, "fp16": fp16, "tf32": tf32, "fp32": fp32}, bandwidth
    return {}, None


@dataclass
class Hardware:
    device: torch.device
    name: str
    dtype: str                       # of matrix products: bf16 | fp16 | fp32
    tf32: bool
    compile: bool
    attention: str                   # sdpa | sdpa_repeated | math, for ops.ATTENTION
    attention_kernels: list          # on a GPU: sdpa's kernels in order of preference; elsewhere [attention]
    peaks: dict                      # dense TFLOP/s of one device by format; {} if unknown
    bandwidth: float | None          # of device memory, TB/s; None if unknown
    deterministic: bool = False      # see deterministic_kernels
    busy_since: tuple = (0.0, 0.0)   # wall and CPU time at the last call of `busy`, s

    @property
    def peak_tflops(self):
        """Return the peak at dtype; None if unknown."""
        return self.peaks.get(self.product_format())

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    def product_format(self, dtype=None):
        """Return the format of products in dtype (None: this hardware's): tf32 where it replaces fp32."""
        dtype = dtype or self.dtype
        return "tf32" if dtype == "fp32" and self.tf32 else dtype

    @property
    def sampling_format(self):
        """Return the dtype of the engine's weights and cache: bf16, or fp32, since fp16's range is too
        narrow."""
        return "bf16" if self.dtype == "bf16" else "fp32"

    @property
    def sampling_dtype(self):
        return DTYPES[self.sampling_format]

    @property
    def length_multiple(self):
        """Return the multiple to which varying batch lengths are rounded up; compiled code should see few
        shapes."""
        return 64 if self.compile else 1

    @property
    def settings(self):
        """Return the resolved settings for the log."""
        return {"device": self.name, "dtype": self.dtype, "tf32": self.tf32, "compile": self.compile}

    def attention_name(self, config):
        """Return the attention kernels or the mixer of a GPTConfig, for the log."""
        if config.mixer != "softmax":
            return f"{config.mixer} ({config.mixer_rule})"
        return " > ".join(self.attention_kernels)

    def autocast(self):
        """Return the context that computes matrix products in dtype; weights stay fp32."""
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.torch_dtype)

    @contextlib.contextmanager
    def deterministic_kernels(self):
        """Within, use reproducible kernels alone if --deterministic asks for it. Not around sampling, which
        needs CUDA's cumsum."""
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def scaler(self):
        """Return a GradScaler that does nothing unless dtype is fp16."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")

    def wait(self):
        """Wait until the device has finished its queue; a CPU has none."""
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).synchronize()

    def mfu(self, tokens_per_s, flops_per_token):
        """Return the model FLOPs utilisation of one device, 0 to 1; None if its peak is unknown."""
        return self.peak_tflops and tokens_per_s * flops_per_token / (self.peak_tflops * 1e12)

    def busy(self):
        """Return the utilisation, 0 to 1. GPU: fraction of the last second in which a kernel ran (NVML; None
        without the package nvidia-ml-py). CPU: fraction of its threads' time that this process used since the
        last call (None at the first)."""
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):          # no NVML, or a driver without it
                return torch.cuda.utilization(self.device) / 100
            return None
        last_wall, last_cpu = self.busy_since
        self.busy_since = (time.perf_counter(), time.process_time())
        if self.device.type != "cpu" or not last_wall:
            return None
        wall, cpu = self.busy_since
        return min(1.0, (cpu - last_cpu) / (wall - last_wall) / torch.get_num_threads())

    def joules(self):
        """Return the energy that the GPU has used since its driver was loaded, in J (NVML); None if unknown,
        as without the package nvidia-ml-py."""
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):          # no NVML, or a card without this counter
                import pynvml
                pynvml.nvmlInit()
                name = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
                card = pynvml.nvmlDeviceGetHandleByUUID(name)
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3
        return None

    def memory_gb(self):
        """Return (GiB in use, peak GiB): of tensors on a GPU, of the resident set elsewhere, where the first
        is None without /proc."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss      # bytes on a Mac, KiB elsewhere
        in_use = None
        with contextlib.suppress(OSError):
            in_use = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30
        return in_use, peak / (2**30 if sys.platform == "darwin" else 2**20)

    def reserved_gb(self):
        """Return the peak GiB that the allocator of a GPU has reserved, with its gaps; None elsewhere."""
        return torch.cuda.max_memory_reserved() / 2**30 if self.device.type == "cuda" else None

    def memory_size_gb(self):
        """Return the GiB of memory of the GPU, or of the machine."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory / 2**30
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def setup(device="auto", dtype="auto", tf32=True, compile=None, attention="auto", deterministic=False,
          keep_memory=True, fixed_shapes=False):
    """Return the Hardware of this process and apply its settings. BadInput if a requested device or kernel is
    unavailable. keep_memory: see keep_freed_memory (CPU only). fixed_shapes: see attention_order."""
    kind = device.split(":")[0]
    if kind == "auto":
        kind = "mps" if torch.backends.mps.is_available() else "cpu"
        device = kind = "cuda" if torch.cuda.is_available() else kind
    if kind not in ("cuda", "mps", "cpu"):
        raise BadInput(f"--device={device} is unknown: use auto, cuda, cuda:1, mps or cpu.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device=cuda needs a GPU, and PyTorch finds none: use --device=cpu, or install a "
                       "CUDA build of PyTorch.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise BadInput("--device=mps needs an Apple GPU, and PyTorch finds none: use --device=cpu.")
    if kind == "mps" and distributed.world_size() > 1:
        raise BadInput("Several ranks can't exchange gradients on an Apple GPU: use --device=cpu, or one "
                       "process.")
    name = {"cpu": f"CPU, {torch.get_num_threads()} threads", "mps": "Apple GPU"}.get(kind)
    capability = (0, 0)
    if kind == "cuda":
        index = last = device.partition(":")[2] or "0"
        if distributed.world_size() > 1:     # all ranks of a machine refuse, else some would wait
            index = str(distributed.local_rank())
            last = str(distributed.local_world_size() - 1)
        if not last.isdigit() or int(last) >= torch.cuda.device_count():
            raise BadInput(f"GPU {last} does not exist; this machine has {torch.cuda.device_count()}, "
                           "numbered from 0: change --device or torchrun's --nproc_per_node.")
        device = f"cuda:{index}"
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    if dtype == "auto":
        if kind == "cuda":           # is_bf16_supported() is also true on a T4, which emulates bf16
            dtype = "bf16" if capability >= (8, 0) else "fp16"
        else:
            dtype = "bf16" if kind == "cpu" and cpu_multiplies_bf16() else "fp32"
    if kind == "cpu" and keep_memory:
        keep_freed_memory()
    tf32 = tf32 and capability >= (8, 0)
    if kind == "cuda":               # sets both PyTorch's old and its new TF32 switches
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        ignore_alignment()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if kind == "cuda" and not fixed_shapes:
        expand_segments()
    backend, kernels = choose_attention(attention, device, capability, dtype, fixed_shapes)
    if compile is None:
        compile = kind == "cuda"
    if compile and distributed.local_world_size() > 1:        # the compiler reads it at its import
        threads = max(1, min(32, os.cpu_count()) // distributed.local_world_size())
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", f"{threads}")
    return Hardware(torch.device(device), name, dtype, tf32, compile, backend, kernels, *peaks(name),
                    deterministic)


def choose_attention(attention, device, capability, dtype, fixed_shapes):
    """Return (a name in ops.ATTENTION, the list of kernels that it may use). flash, cudnn and efficient are
    sdpa's GPU kernels; BadInput for one that this device lacks."""
    kind = device.partition(":")[0]
    if attention in ("flash", "cudnn", "efficient") and kind != "cuda":
        raise BadInput(f"--attention={attention} needs a GPU: use auto, sdpa or math.")
    if attention == "math" or attention == "auto" and kind == "cpu" and dtype == "bf16":
        return "math", ["math"]              # on a CPU in bf16 faster, see ops.ATTENTION
    if kind != "cuda":
        return "sdpa", ["sdpa"]
    shared = shares_heads(capability, DTYPES[dtype]) and attention != "efficient"
    backend = "sdpa" if shared else "sdpa_repeated"
    if attention == "sdpa":
        torch.compiler.config.cache_key_tag = "attention by PyTorch"         # see use_attention
        return backend, ["sdpa"]
    names = attention_order(attention, capability, dtype, fixed_shapes)
    warm_up_sdpa(device)
    use_attention(names)
    return backend, names


def attention_order(attention, capability, dtype, fixed_shapes):
    """Return the kernels that a GPU may use, in order of preference; BadInput for one that it lacks.

    attention: auto or a kernel, which falls back to math where it has no implementation, such as lengths 0
    and 1. capability: the card's. dtype: bf16 | fp16 | fp32. fixed_shapes: all batches have one shape; cuDNN
    builds a plan for each new shape (about a second in a public report, forward and backward; not measured
    here)."""
    has_flash = capability >= (8, 0) and dtype != "fp32"
    if attention in ("flash", "cudnn") and not has_flash:
        raise BadInput(f"--attention={attention} needs bf16 or fp16 and compute capability 8.0 or more, and "
                       f"this is {dtype} on {capability[0]}.{capability[1]}: use auto.")
    if attention != "auto":
        return [attention, "math"]
    names = ["flash", "efficient", "math"] if has_flash else ["efficient", "math"]
    if has_flash and fixed_shapes and (torch.backends.cudnn.version() or 0) > CUDNN_VERSION:
        # cuDNN is the fastest on Hopper, usually not on Ampere.
        names.insert(0 if capability[0] == 9 else 1, "cudnn")
    return names


def use_attention(names):
    """Make PyTorch use the first of these kernels that supports a call, in the whole process, and math as the
    last resort."""
    names = list(dict.fromkeys([*names, "math"]))
    PROCESS_WIDE.close()
    PROCESS_WIDE.enter_context(sdpa_order(names))
    # Compiled code in the disk cache contains one kernel, which its key does not name.
    torch.compiler.config.cache_key_tag = f"attention {names}"


def warm_up_sdpa(device):
    """Call attention once: on Hopper PyTorch's first call overrides the order of kernels."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
    F.scaled_dot_product_attention(x, x, x)


def sdpa_order(names=("flash", "efficient", "math")):
    """Return the context that uses these kernels, in this order. The default suits varying shapes and any
    dtype."""
    return sdpa_kernel([SDPA[name] for name in names], set_priority=True)


def shares_heads(capability, dtype):
    """Return whether the fused kernel shares key heads among query heads, as flash does. Others need repeated
    heads; without them PyTorch silently uses math, whose scores take a GiB at 16 x 1,024 tokens and 15
    heads."""
    return capability >= (8, 0) and dtype != torch.float32


def expand_segments():
    """Use expandable segments in the GPU allocator, against fragmentation by varying lengths, unless the
    environment configures it."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # its name in torch 2.13, and before
        set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        set_allocator = set_allocator or torch.cuda.memory._set_allocator_settings
        with contextlib.suppress(RuntimeError):               # unsupported platform
            set_allocator("expandable_segments:True")


def cpu_multiplies_bf16():
    """Return whether the CPU has AVX512-BF16 or AMX; a 2-core Zen 5 multiplies bf16 matrices 4.3 times faster
    than fp32 ones."""
    features = ("avx512_bf16", "amx_tile")
    return any(getattr(torch.cpu, f"_is_{feature}_supported", bool)() for feature in features)


def keep_freed_memory():
    """Let glibc reuse the memory of freed tensors instead of returning it, which would cost page faults at
    every step, and take it in huge pages (measured in docs/notes.md)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):              # not glibc
        return
    M_TRIM_THRESHOLD = -1                                     # from malloc.h
    M_TOP_PAD = -2
    M_MMAP_THRESHOLD = -3
    M_ARENA_MAX = -8
    if not mallopt(M_MMAP_THRESHOLD, 1 << 30):                # older versions accept at most 32 MiB
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
    mallopt(M_TRIM_THRESHOLD, -1)                             # never
    mallopt(M_TOP_PAD, 64 << 20)
    mallopt(M_ARENA_MAX, 1)              # else autograd's thread gets its own arena
    reserve_heap()


def reserve_heap():
    """Extend glibc's heap by most of the machine's memory, advised to have pages of 2 MiB instead of 4 KiB
    (Linux). A page takes memory when it is first written. Without effect where the system refuses, or counts
    memory that is not written."""
    global heap_is_reserved
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY or (
            overcommit.exists() and overcommit.read_text().strip() == "2"):
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    M_MMAP_MAX = -4
    MADV_HUGEPAGE = 14
    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss         # a fork may not exceed the whole
    size = max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 * 3 - used)
    libc.mallopt(M_MMAP_MAX, 0)          # else malloc takes so large a block from elsewhere
    block = libc.malloc(size)
    libc.mallopt(M_MMAP_MAX, 65536)      # the default
    if block:
        page = os.sysconf("SC_PAGE_SIZE")
        libc.madvise(block // page * page, size, MADV_HUGEPAGE)
        libc.free(block)
        heap_is_reserved = True


def ignore_alignment():
    """Let MKL's products on an Intel CPU round alike wherever their operands lie in memory, for deterministic
    engines, whose slots have different offsets. Large fp32 products then take a tenth longer (two Xeon cores
    with AMX, 2026-11-27). It has no effect after the first product of the process."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def return_freed_memory():
    """Return the memory of freed tensors to the system; glibc keeps it after keep_freed_memory()."""
    with contextlib.suppress(OSError, AttributeError, TypeError):            # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    if heap_is_reserved:                 # and free in whole
        reserve_heap()
