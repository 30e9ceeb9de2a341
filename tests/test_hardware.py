import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from runtime import hardware
from runtime.config import BadInput

NAMES = [
    ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA L40", None), ("NVIDIA A10", 125), ("NVIDIA B200", 2250),
    ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A10G", None), ("Some GPU", None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
]


@pytest.mark.parametrize("name, bf16", NAMES)
def test_peaks_by_name(name, bf16):
    assert hardware.peaks(name)[0].get("bf16") == bf16


def test_specific_names_come_before_general_ones():
    assert hardware.peaks("NVIDIA A100-SXM4-80GB")[1] == 2.04 and hardware.peaks("NVIDIA A100-SXM4-40GB")[1] == 1.56
    assert hardware.peaks("Tesla T4")[0]["bf16"] is None and hardware.peaks("Tesla T4")[0]["fp16"] == 65


def on(monkeypatch, name, capability, **kw):
    """Return the Hardware that setup chooses on a machine with that card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    monkeypatch.setattr(hardware, "warm_up_sdpa", lambda device: None)
    with hardware.PROCESS_WIDE:                        # undone when the test ends
        return hardware.setup(**kw), torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()


def test_precision_follows_the_card(monkeypatch):
    t4, _, _ = on(monkeypatch, "Tesla T4", (7, 5))
    assert (t4.dtype, t4.tf32, t4.peak_tflops, t4.compile) == ("fp16", False, 65, True)
    a100, _, _ = on(monkeypatch, "NVIDIA A100-SXM4-40GB", (8, 0))
    assert (a100.dtype, a100.tf32, a100.peak_tflops) == ("bf16", True, 312)
    exact, _, _ = on(monkeypatch, "NVIDIA A100-SXM4-40GB", (8, 0), dtype="fp32")
    assert exact.peak_tflops == 156
    assert on(monkeypatch, "NVIDIA A100-SXM4-40GB", (8, 0), dtype="fp32", tf32=False)[0].peak_tflops == 19.5
    assert on(monkeypatch, "Some GPU", (9, 0))[0].mfu(1e5, 1e9) is None
    assert a100.mfu(1e5, 0.86e9) == pytest.approx(86 / 312)


def test_attention_kernels_stay_chosen_after_setup(monkeypatch):
    hopper, math, cudnn = on(monkeypatch, "NVIDIA H200", (9, 0), fixed_shapes=True)
    assert hopper.attention_kernels == ["cudnn", "flash", "efficient", "math"] and math and cudnn
    only, math, cudnn = on(monkeypatch, "NVIDIA A100", (8, 0), attention="flash")
    assert (only.attention, only.attention_kernels, math, cudnn) == ("sdpa", ["flash", "math"], True, False)


def test_cudnn_needs_fixed_shapes_and_a_good_version(monkeypatch):
    """cuDNN builds a plan for each new shape, and some versions gave NaN gradients."""
    assert hardware.attention_order("auto", (9, 0), "bf16", True) == ["flash", "efficient", "math"]       # a build without it
    assert on(monkeypatch, "NVIDIA H200", (9, 0))[0].attention_kernels == ["flash", "efficient", "math"]
    assert on(monkeypatch, "NVIDIA A100", (8, 0), fixed_shapes=True)[0].attention_kernels == ["flash", "cudnn", "efficient", "math"]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    assert hardware.attention_order("auto", (9, 0), "bf16", True) == ["flash", "efficient", "math"]


@pytest.mark.parametrize("capability, dtype, backend, kernels", [
    ((7, 5), "fp16", "sdpa_repeated", "efficient > math"), ((8, 0), "fp32", "sdpa_repeated", "efficient > math"),
    ((8, 0), "bf16", "sdpa", "flash > efficient > math")])
def test_heads_are_repeated_where_no_fused_kernel_shares_them(monkeypatch, capability, dtype, backend, kernels):
    """Else PyTorch would use math and store all scores."""
    hw, *_ = on(monkeypatch, "some card", capability, dtype=dtype)
    assert (hw.attention, hw.attention_kernels) == (backend, kernels.split(" > "))


def test_compile_workers_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 48)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    hardware.setup("cpu", compile=True)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "4"


def test_segments_expand_unless_the_environment_configures_the_allocator(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    on(monkeypatch, "NVIDIA A100", (8, 0), fixed_shapes=True)
    assert asked == []                                # no holes where all batches have one shape
    on(monkeypatch, "NVIDIA A100", (8, 0))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    on(monkeypatch, "NVIDIA A100", (8, 0))
    assert asked == ["expandable_segments:True"]


def test_several_ranks_are_refused_on_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="Apple GPU"):
        hardware.setup("mps")


def test_energy_is_the_card_s_counter(monkeypatch):
    """In joules, of the card of this UUID; unknown on a CPU and without NVML."""
    hw = hardware.setup("cpu", compile=False)
    assert hw.joules() is None
    hw.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b"))
    counters = {"GPU-a-b": 5000, "GPU-c": 1}
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda name: name,
                           nvmlDeviceGetTotalEnergyConsumption=counters.__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert hw.joules() == 5.0
    monkeypatch.setitem(sys.modules, "pynvml", None)         # cannot be imported
    assert hw.joules() is None


@pytest.mark.parametrize("kw", [dict(device="cuda:1"), dict(device="cuda:x"), dict(attention="flash", dtype="fp32"),
                                dict(device="tpu"), dict(device="mps"), dict(attention="cudnn", dtype="fp32")])
def test_missing_devices_are_refused(monkeypatch, kw):
    with pytest.raises(BadInput):
        on(monkeypatch, "NVIDIA A100", (8, 0), **kw)


def test_a_kernel_that_the_card_lacks_is_refused(monkeypatch):
    with pytest.raises(BadInput, match="compute capability 8.0 or more, and this is fp16 on 7.5"):
        on(monkeypatch, "Tesla T4", (7, 5), attention="flash")


# --- huge pages on a CPU ---

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TENSORS = """
import torch
from runtime import hardware
def mebibytes():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
hardware.setup(device="cpu", keep_memory=KEEP)
some = torch.ones(32 << 20)
print(mebibytes())
del some
hardware.return_freed_memory()
print(mebibytes())
some = torch.ones(32 << 20)
print(mebibytes())
"""


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="the system decides alone")
@pytest.mark.parametrize("keep, limit", [(True, "unlimited"), (False, "unlimited"), (True, "8000000")])
def test_tensors_on_a_cpu_have_huge_pages_and_give_them_back(keep, limit):
    """Unless memory is not kept, or the address space is limited (the command then runs without)."""
    command = f"ulimit -v {limit}; exec {sys.executable} -c '{TENSORS.replace('KEEP', str(keep))}'"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    first, returned, again = map(int, run.stdout.split())
    if keep and limit == "unlimited":
        assert min(first, again) >= 120 and returned <= 8
    else:
        assert first == returned == again == 0
