import json
import os
import types

import pytest
import torch

from layers.ops import ATTENTION
from model import GPTConfig
from runtime import hardware, kernels
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
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    monkeypatch.setattr(kernels, "settle", lambda device: None)
    with kernels.PROCESS_WIDE:                        # undone when the test ends
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
    assert hopper.attention_kernel == "cudnn > flash > efficient > math" and math and cudnn
    only, math, cudnn = on(monkeypatch, "NVIDIA A100", (8, 0), attention="flash")
    assert (only.attention, only.attention_kernel, math, cudnn) == ("sdpa", "flash > math", True, False)


def test_cudnn_is_for_lengths_that_stay_and_versions_that_are_right(monkeypatch):
    """It builds a plan for each new shape, and some versions gave NaN gradients."""
    assert kernels.rule("auto", (9, 0), "bf16", True) == ["flash", "efficient", "math"]       # a build without it
    assert on(monkeypatch, "NVIDIA H200", (9, 0))[0].attention_kernel == "flash > efficient > math"
    assert on(monkeypatch, "NVIDIA A100", (8, 0), fixed_shapes=True)[0].attention_kernel == "flash > cudnn > efficient > math"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    assert kernels.rule("auto", (9, 0), "bf16", True) == ["flash", "efficient", "math"]


@pytest.mark.parametrize("capability, dtype, backend, kernels_of", [
    ((7, 5), "fp16", "sdpa_repeated", "efficient > math"), ((8, 0), "fp32", "sdpa_repeated", "efficient > math"),
    ((8, 0), "bf16", "sdpa", "flash > efficient > math")])
def test_heads_are_repeated_where_no_fused_kernel_shares_them(monkeypatch, capability, dtype, backend, kernels_of):
    """PyTorch would take math, and hold all scores."""
    hw, *_ = on(monkeypatch, "some card", capability, dtype=dtype)
    assert (hw.attention, hw.attention_kernel) == (backend, kernels_of)


def test_compile_workers_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 48)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    hardware.setup("cpu", compile=True)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "4"


def test_segments_expand_unless_the_environment_says_what_the_allocator_does(monkeypatch):
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


@pytest.mark.parametrize("kw", [dict(device="cuda:1"), dict(device="cuda:x"), dict(attention="flash", dtype="fp32"),
                                dict(device="tpu"), dict(device="mps"), dict(attention="cudnn", dtype="fp32")])
def test_what_is_not_there_is_refused(monkeypatch, kw):
    with pytest.raises(BadInput):
        on(monkeypatch, "NVIDIA A100", (8, 0), **kw)


def test_a_kernel_that_the_card_lacks_is_refused(monkeypatch):
    with pytest.raises(BadInput, match="compute capability 8.0, and this is fp16 on 7.5"):
        on(monkeypatch, "Tesla T4", (7, 5), attention="flash")


# --- kernels by the stopwatch ---

def a_run(cfg, said, **state):
    hw = hardware.setup("cpu", dtype="fp32", attention="sdpa")
    hw.device = types.SimpleNamespace(type="cuda")
    hw.attention_kernel = "cudnn > flash > efficient > math"
    config = GPTConfig(vocab_size=10, block_size=16, n_layer=1, n_head=2, n_embd=32)
    return types.SimpleNamespace(hardware=hw, cfg=types.SimpleNamespace(**dict(attention="auto", deterministic=False) | cfg),
                                 model=types.SimpleNamespace(config=config), state=types.SimpleNamespace(**dict(attention="") | state),
                                 log=types.SimpleNamespace(say=said.append))


def test_the_fastest_kernel_that_agrees_is_taken_and_what_fails_is_left_out(monkeypatch):
    """cuDNN's and the efficient one are not to be had on a CPU; of the others the clock decides, then what it computes."""
    hw, said = hardware.setup("cpu", dtype="fp32"), []
    times = {"flash": 2.0, "math": 1.0}
    current = []
    varied = kernels.varied
    monkeypatch.setattr(kernels, "varied", lambda names: current.append(*names) or varied(names))
    monkeypatch.setattr(kernels, "time_kernel", lambda *_: times[current[-1]])
    shapes = [(2, 16, 4, 2, 8)]
    names = ["cudnn", "flash", "efficient", "math"]
    assert kernels.by_speed(hw, names, shapes, 0.0, True, said.append) == ["math", "flash"]
    assert [line.split()[1] for line in said[:2]] == ["cudnn", "efficient"] and "flash 2000.00 ms, math 1000.00 ms" in said[2]
    wrong = kernels.results
    monkeypatch.setattr(kernels, "results", lambda attend, inputs, dy: [
        y * (1.01 if current[-1] == "math" and attend is not ATTENTION["math"] else 1) for y in wrong(attend, inputs, dy)])
    assert kernels.by_speed(hw, ["flash", "math"], shapes, 0.0, True, said.append) == ["flash"]
    assert "math is left out (y is off by 1.0%)" in said[-2]


def test_kernels_are_timed_with_their_first_calls_where_lengths_vary(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock) ** 2)       # each call takes longer
    hw = hardware.setup("cpu", dtype="fp32")
    batches = [kernels.random_inputs(hw, shape) for shape in ((1, 8, 2, 1, 8), (1, 4, 2, 1, 8))]
    calls = [(2 * i + 1) ** 2 - (2 * i) ** 2 for i in range(2 * kernels.CALLS + 2)]
    varied = kernels.time_kernel(ATTENTION["sdpa"], hw, batches, 0.0, False)
    assert varied == pytest.approx(sum(calls[1:]) / len(calls[1:]))


def test_a_choice_is_kept_with_the_run_and_for_the_next(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "settle", lambda device: None)
    asked, said = [], []
    monkeypatch.setattr(kernels, "by_speed", lambda hw, names, shapes, *_: asked.append(shapes) or ["flash", "math"])
    with kernels.PROCESS_WIDE:
        first, second, resumed = (a_run({}, said, **state) for state in ({}, {}, dict(attention="math > flash")))
        kernels.choose(first, 4, 16, True)
        assert first.state.attention == first.hardware.attention_kernel == "flash > math" and not torch.backends.cuda.cudnn_sdp_enabled()
        kernels.choose(second, 4, 16, True)
        assert second.state.attention == "flash > math" and asked == [[(4, 16, 2, 2, 16)]]
        kernels.choose(second, 4, 16, True)           # has its answer
        kernels.choose(resumed, 4, 16, True)
        assert resumed.hardware.attention_kernel == "math > flash"
        elsewhere = a_run({}, said, attention="efficient > math")
        elsewhere.hardware.attention_kernel = "flash > math"          # of a card that lacks the first
        kernels.choose(elsewhere, 4, 16, True)
        assert elsewhere.hardware.attention_kernel == "math" and not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert "math" in torch.compiler.config.cache_key_tag          # or code that was kept would bring its own kernel
        kernels.choose(a_run({}, said), 10**6, 16, False)     # another question: of several lengths, and not too many rows
        assert asked[1] == [(kernels.TOKENS // 16, n, 2, 2, 16) for n in (16, 12, 8)]
        (tmp_path / "nanorft" / "attention.json").write_text("{not JSON")
        kernels.choose(a_run({}, said), 4, 16, True)
        assert len(asked) == 3 and json.loads((tmp_path / "nanorft" / "attention.json").read_text())


@pytest.mark.parametrize("cfg", [dict(attention="flash"), dict(deterministic=True)])
def test_no_stopwatch_for_what_was_asked_by_name_or_must_repeat(monkeypatch, cfg):
    monkeypatch.setattr(kernels, "by_speed", None)
    run = a_run(cfg, [])
    kernels.choose(run, 4, 16, True)
    assert run.state.attention == "" and run.hardware.attention_kernel == "cudnn > flash > efficient > math"
