"""Which of PyTorch's attention kernels a GPU takes: by rule what is known, by a stopwatch which of the rest
is fastest at the shapes of a run."""
import contextlib
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from layers.ops import ATTENTION
from runtime import distributed
from runtime.config import BadInput
from runtime.progress import track

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Before this version cuDNN's attention has given NaN gradients at some lengths.
CUDNN_VERSION = 91500
TOKENS = 2**15                               # at which kernels are compared, at most
CALLS = 10                                   # of each, that count
# relative error of results and gradients beside those in fp64, at most; fp32 may be TF32
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
PROCESS_WIDE = contextlib.ExitStack()        # settings that hold until the process ends


def rule(attention, capability, dtype, fixed_shapes):
    """Return the names of the kernels that a GPU may take, in their order. BadInput for one that it lacks.

    attention: auto, or a name. capability: the card's. dtype: bf16 | fp16 | fp32. fixed_shapes: whether
    batches always have the same shape, for cuDNN builds a plan for each new one (a second in a public
    report, forward and backward; not measured here). What is asked for by name goes to math where it has no
    kernel, as for lengths of 0 and 1.
    """
    has_flash = capability >= (8, 0) and dtype != "fp32"
    if attention in ("flash", "cudnn") and not has_flash:
        raise BadInput(f"--attention={attention} needs bf16 or fp16 on a GPU of compute capability 8.0, and "
                       f"this is {dtype} on {capability[0]}.{capability[1]}: use auto.")
    if attention != "auto":
        return [attention, "math"]
    names = ["flash", "efficient", "math"] if has_flash else ["efficient", "math"]
    if has_flash and fixed_shapes and (torch.backends.cudnn.version() or 0) > CUDNN_VERSION:
        # On Hopper it is the fastest, on Ampere usually not.
        names.insert(0 if capability[0] == 9 else 1, "cudnn")
    return names


def use(names):
    """Have PyTorch take the first of these kernels that can do what is asked, in this process; in the end
    math, which can all."""
    names = list(dict.fromkeys([*names, "math"]))
    PROCESS_WIDE.close()
    PROCESS_WIDE.enter_context(varied(names))
    # Compiled code that is kept on the disk has one kernel in it, and its key does not say which.
    torch.compiler.config.cache_key_tag = f"attention {names}"


def settle(device):
    """Call attention once: on Hopper PyTorch's first call brings an order of its own, over what was asked."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
    F.scaled_dot_product_attention(x, x, x)


def varied(names=("flash", "efficient", "math")):
    """Return the context in which these kernels are taken, in their order. The default is for shapes that
    vary, in any dtype."""
    return sdpa_kernel([SDPA[name] for name in names], set_priority=True)


def shares_heads(capability, dtype):
    """Tell whether a fused kernel shares key heads among query heads: flash does. Others need them repeated,
    or PyTorch takes math without a word, whose scores take a GiB at 16 x 1,024 tokens and 15 heads."""
    return capability >= (8, 0) and dtype != torch.float32


# --- by the stopwatch ---

def choose(run, rows, length, fixed_shapes):
    """Have a run take the kernel that is fastest at micro-batches of rows x length tokens, on a GPU.

    The first rank decides for all. The choice is kept with the run, which goes on with it, and for other runs
    of the same shapes on the same card. --attention=NAME, --deterministic and a single candidate are no
    question, and attention of linear cost (layers/linear_attention.py) has no kernel of PyTorch's.
    """
    hw = run.hardware
    if run.model.config.mixer != "softmax":
        hw.attention_kernel = f"{run.model.config.mixer} ({run.model.config.mixer_rule})"
        return
    names = hw.attention_kernel.split(" > ")
    if hw.device.type != "cuda" or run.cfg.attention != "auto" or run.cfg.deterministic or hw.attention == "math":
        return
    if not run.state.attention:
        c = run.model.config
        rows = max(1, min(rows, TOKENS // length))
        lengths = [length] if fixed_shapes else [length, length * 3 // 4, length // 2]
        shapes = [(rows, max(1, n), c.n_head, c.n_kv_head, c.head_dim) for n in lengths]
        run.state.attention = distributed.on_main(
            lambda: " > ".join(remembered(hw, names, shapes, c.dropout, fixed_shapes, run.log.say)))
    # Of a run that began on another card some may be missing.
    chosen = [name for name in run.state.attention.split(" > ") if name in names] or names
    hw.attention_kernel = " > ".join(chosen)
    settle(hw.device)
    use(chosen)


def remembered(hw, names, shapes, dropout, fixed_shapes, log):
    """Return what `by_speed` does, from a file if it was asked before."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "nanorft" / "attention.json"
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    question = f"{hw.name}, {versions}, {hw.dtype}, {names}, {shapes}, dropout {dropout}, fixed {fixed_shapes}"
    answers = {}
    with contextlib.suppress(OSError, ValueError):
        answers = dict(json.loads(path.read_text()))
    known = answers.get(question)
    if isinstance(known, list) and known and set(known) <= set(names):
        return known
    answers[question] = by_speed(hw, names, shapes, dropout, fixed_shapes, log)
    with contextlib.suppress(OSError):       # then the next run asks again
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(answers, indent=1))
        partial.replace(path)
    return answers[question]


def by_speed(hw, names, shapes, dropout, fixed_shapes, log):
    """Return the names of the kernels that agree with attention in fp64, the fastest first.

    shapes: [(rows, length, query heads, key heads, channels a head)]. They are timed with dropout, and
    compared without. Where lengths vary, the first call of each shape counts. Those that fail or are off are
    left out with a line to log.
    """
    attend = ATTENTION[hw.attention]
    inputs = [random_inputs(hw, shape) for shape in shapes]
    seconds = {}
    for name in track(names, "timing attention", "kernels"):
        problem = None
        try:
            with varied([name]):
                problem = disagreement(attend, *inputs[0])
                if not problem:
                    seconds[name] = time_kernel(attend, hw, inputs, dropout, fixed_shapes)
        except Exception as e:               # no such kernel here, or no memory for it
            problem = (str(e).strip() or type(e).__name__).splitlines()[0]
        if problem:
            log(f"attention: {name} is left out ({problem[:120]}).")
    if not seconds:
        return list(names)
    shown = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in seconds.items())
    log(f"attention, forward and backward, {'' if fixed_shapes else 'first calls included, '}{shown}")
    return sorted(seconds, key=seconds.get)


def random_inputs(hw, shape):
    """Return q [B, T, H, D], k and v [B, T, K, D], which take gradients, and a gradient of the result."""
    B, T, H, K, D = shape
    drawn = {"generator": torch.Generator(hw.device).manual_seed(T), "device": hw.device}
    *inputs, dy = (torch.randn(B, T, heads, D, dtype=hw.torch_dtype, **drawn) for heads in (H, K, K, H))
    return [x.requires_grad_() for x in inputs], dy


def results(attend, inputs, dy, dropout=0.0):
    """Return attention's result and the gradients of its inputs."""
    y = attend(*inputs, dropout=dropout)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def disagreement(attend, inputs, dy):
    """Return what is off beside attention in fp64, None if nothing is. Of two rows at most."""
    tolerance = TOLERANCE[dy.dtype]
    inputs = [x[:2].detach().requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(ATTENTION["math"], exact_inputs, dy[:2].double())
    for name, ours, expected in zip(("y", "dq", "dk", "dv"), results(attend, inputs, dy[:2]), exact):
        error = ((ours.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        if not error <= tolerance:           # NaN is no agreement either
            return f"{name} is off by {error:.1%}"
    return None


def time_kernel(attend, hw, batches, dropout, fixed_shapes):
    """Return seconds of a forward and backward pass of batches (inputs, dy): the median, or where lengths
    vary the mean with all first calls but that of the first shape."""
    seconds = []
    for inputs, dy in batches:
        seconds += time_calls(attend, hw, inputs, dy, CALLS + 1, dropout)
    seconds = seconds[1:]
    return statistics.median(seconds) if fixed_shapes else statistics.fmean(seconds)


def time_calls(attend, hw, inputs, dy, calls, dropout=0.0):
    """Return the seconds of each of so many forward and backward passes."""
    hw.wait()
    seconds = []
    for _ in range(calls):
        clock = time.perf_counter()
        results(attend, inputs, dy, dropout)
        hw.wait()
        seconds.append(time.perf_counter() - clock)
    return seconds
