import pytest
import torch

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
    """The hardware that setup would choose on a machine with that card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with hardware.PROCESS_WIDE:                       # undone when the test ends
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
    hopper, math, cudnn = on(monkeypatch, "NVIDIA H200", (9, 0))
    assert hopper.attention_kernel.startswith("cudnn") and math and cudnn
    assert on(monkeypatch, "NVIDIA A100", (8, 0))[0].attention_kernel.startswith("flash")
    only, math, cudnn = on(monkeypatch, "NVIDIA A100", (8, 0), attention="flash")
    assert (only.attention, math, cudnn) == ("sdpa", False, False)


@pytest.mark.parametrize("kw", [dict(device="cuda:1"), dict(device="cuda:x"), dict(attention="flash", dtype="fp32"),
                                dict(device="tpu"), dict(device="mps")])
def test_what_is_not_there_is_refused(monkeypatch, kw):
    with pytest.raises(BadInput):
        on(monkeypatch, "NVIDIA A100", (8, 0), **kw)
