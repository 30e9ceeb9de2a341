"""Fixtures and helpers. Tests need no download, and no GPU except those marked gpu."""
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"          # before PyTorch is imported: two workers share two cores
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")         # hardware.ignore_alignment, before any product
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")          # else it starts processes that import PyTorch

import forked

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from runtime import guard

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4, "max_steps": 20,
        "eval_interval": 10, "save_interval": 10, "log_interval": 1, "warmup_steps": 2, "eval_tokens": 640}


LONGEST = ("countdown_ladder.py", "models.py::test_the_scripts_of_a_real", "shakespeare.py", "micro.py", "train.py::test_killed",
           "notebook.py::test_the_whole", "docs.py::test_a_newcomer", "slurm.py")


def pytest_collection_modifyitems(items):
    """Mark the tests of tests/slow.txt, each of which takes seconds (see `pytest --durations=0`), as slow."""
    slow = {*(ROOT / "tests" / "slow.txt").read_text().split("\n")}
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
    # long ones first, or one worker ends with them alone; the sort keeps the tests of a module together
    items.sort(key=lambda item: not any(item.nodeid.startswith(f"tests/test_{name}") for name in LONGEST))


@pytest.fixture
def card():
    """The device of tests marked gpu; NANORFT_GPU_TESTS_ON=cpu runs them on the CPU, to test the tests."""
    import torch
    name = os.environ.get("NANORFT_GPU_TESTS_ON", "cuda:0")
    if name != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.device(name)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 60 kB with words, numbers, blank lines and characters of several bytes."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "naïve", "über", "漢字", "don't", "42", "3.14", "\n",
             "\n\n", " \n "]
    path = tmp_path_factory.mktemp("text") / "cats.txt"
    path.write_text(" ".join(rng.choices(words, k=12_000)))
    return path


def flags(**options):
    return [f"--{key}={value}" for key, value in options.items()]


def command(out_dir, ranks=1, script="train.py", defaults=TINY, config=None, **options):
    start = [sys.executable] if ranks == 1 else [*forked.TORCHRUN, f"--nproc_per_node={ranks}"]
    files = [str(config)] if config else []
    return [*start, str(ROOT / script), *files, *flags(**(defaults | {"out_dir": out_dir} | options))]


def environment(**extra):
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | extra


def run(out_dir, text, ranks=1, env=None, **options):
    """Return what subprocess.run would of a tiny training run on the text, in this process if it can be."""
    options = {"dataset": text, "data_dir": Path(text).parent / "tokens"} | options
    line = command(out_dir, ranks, **options)
    alone = {"script", "num_workers"} & options.keys() or options.get("device") == "cuda"
    if ranks == 1 and env is None and not alone:
        import train
        return called(train.main, line[2:])
    return forked.run(line, env=environment(**(env or {})), capture_output=True, text=True, timeout=120)


def trained(out_dir, text, **options):
    """Like `run`, and assert success."""
    done = run(out_dir, text, **options)
    assert done.returncode == 0, failure(done)
    return done


def failure(done):
    """Return how a run failed: its ranks' exit codes, its last output, and the beginning and end of its errors."""
    codes = getattr(done, "codes", [done.returncode])
    return f"exit codes {codes}\n{done.stdout[-2000:]}{done.stderr[:4000]}\n...\n{done.stderr[4000:][-4000:]}"


def called(main, argv):
    """Run a script's main in this process, which saves 2 s of a fork. Return what subprocess.run would."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            guard.run(main, argv)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, ended.value.code or 0, out.getvalue(), err.getvalue())


def in_process(main, argv, code=0):
    """Run a script's main in this process. Return its output and its errors."""
    done = called(main, argv)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr
    return done.stdout, done.stderr


def wait_for(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.01)


def alive(pid):
    """Return whether a process runs; one that only waits for its parent to ask how it ended does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def weights(out_dir, step=20):
    from runtime import checkpoint
    return checkpoint.load_weights(out_dir, step)


def metrics(out_dir, key="loss"):
    lines = [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


# options that change a curve not at all or only by rounding: folders, machine, logging
NOT_OF_THE_CURVE = set(
    "out_dir data_dir init_from resume overwrite eval_only seed batch_size gradient_accumulation_steps "
    "device dtype tf32 compile compile_mode attention cuda_graphs gradient_checkpointing loss_chunks "
    "parallel sum_locally deterministic fused_adamw keep_memory num_workers pin_memory prefetch "
    "slots tokens_per_micro_batch offload_reference surgery_buffers reward_workers reward_pool timeout "
    "instruction eval_interval record log_interval save_interval keep_last save_only_model tensorboard wandb "
    "wandb_project wandb_name widen_micro_batch "
    "diagnose".split())


def seeds(name):
    """Return the recorded seeds of a recipe: {knobs, seeds, figures: {key: {steps: [T], runs: [seeds][T]}},
    ...}."""
    return json.loads((ROOT / f"expected/seeds/{name}.json").read_text())


def options_of_the_curve(saved):
    """Return the options that a run's curves depend on, with sequences a step instead of its
    micro-batches."""
    options = {name: value for name, value in saved.items() if name not in NOT_OF_THE_CURVE}
    if "batch_size" in saved:
        options["sequences"] = saved["batch_size"] * saved["gradient_accumulation_steps"]
    return options


def near_the_seeds(name, key, values, least=0.01):
    """Return whether a curve {step: value} is near the recorded seeds: its means over the first and second
    half of the steps lie in the seeds' range, widened by its width on both sides. least: the
    smallest width that counts, as a share of the mean."""
    figure = seeds(name)["figures"][key]
    at = [i for i, step in enumerate(figure["steps"]) if step in values]
    near = True
    for part in (at[:len(at) // 2], at[len(at) // 2:]):
        means = [sum(row[i] for i in part) / len(part) for row in figure["runs"]]
        mean = sum(values[figure["steps"][i]] for i in part) / len(part)
        width = max(max(means) - min(means), least * abs(mean))
        near = near and min(means) - width <= mean <= max(means) + width
    return near


def unknown(out_dir):
    """Return the files of a run folder that runtime.checkpoint.RUN_FILES does not list."""
    from runtime import checkpoint
    listed = {path for pattern in checkpoint.RUN_FILES for path in Path(out_dir).glob(pattern)}
    return [path for path in Path(out_dir).rglob("*") if path.is_file() and not {path, path.parent} & listed]


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


def count_graphs(monkeypatch):
    """Patch torch.compile to run eagerly, and return the list to which it appends the graphs that it
    captured."""
    import torch
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    compile = torch.compile

    def capture(f, mode=None, dynamic=None):
        return compile(f, backend=backend, dynamic=dynamic)
    monkeypatch.setattr(torch, "compile", capture)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return graphs
