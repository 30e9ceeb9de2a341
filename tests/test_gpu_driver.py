"""runs/gpu.sh and measure/gpu/run.py, with the CPU for a GPU: stages that pass, fail, hang or no longer fit, the lines they leave, the table."""
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch

import bench
import forked
from conftest import ROOT
from measure.synthetic import SHAPES
from measure.training import shape_options
from model import GPTConfig
from runtime import config, hardware
from runtime.config import BadInput
from measure.gpu import run
from measure.gpu.run import Stage, outcome
from runs import smollm2

KEYS = {"stage", "name", "status", "seconds", "figures", "error", "command"}


def telling(*lines, then=""):
    """A command that tells of checks, and then does something."""
    return "-c " + shlex.quote(f"print({chr(10).join(map(json.dumps, lines))!r}, flush=True); {then}")


CARD = Stage("card", telling(outcome("Some Card", figures=dict(
    cards=2, memory_gb=79.2, nominal={"bf16": 989}, nominal_tb_per_s=3.35, dtype="bf16", power_limit="700.00 W", driver="580.1",
    torch="2.11.0", cuda="13.0", cudnn=91600, date="2026-11-23T00:00:00", commit="abc"))), 0, 20)


def measured(monkeypatch, path, *stages, argv=()):
    """(exit code, lines of gpu.jsonl) of a run of these stages."""
    monkeypatch.setattr(run, "STAGES", (CARD, *stages))
    monkeypatch.setattr(run, "check_machine", lambda: None)
    code = run.main([f"--output={path}", *argv])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)         # those of pytest stay
    run.has_network.cache_clear()


@pytest.fixture
def forks(monkeypatch):
    """Stages start as forks of a process that has imported PyTorch."""
    monkeypatch.setattr(run, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": forked.Popen}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_one_sentence(tmp_path):
    done = subprocess.run(["bash", str(ROOT / "runs/gpu.sh"), "60", f"--output={tmp_path}/gpu.jsonl"], capture_output=True, text=True,
                          env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: PyTorch sees no CUDA GPU: ") and done.stderr.count("\n") == 1


def test_a_stage_that_fails_stops_no_other(monkeypatch, tmp_path, capsys):
    path = tmp_path / "deep" / "gpu.jsonl"
    code, lines = measured(
        monkeypatch, path,
        Stage("two", telling(outcome("a", figures={"tflops": 700.0}), outcome("b", "failed", error="it is off by 3%")), 0, 20),
        Stage("broken", telling(outcome("c"), then="raise ValueError('no such | thing')"), 0, 20),
        Stage("refused", "-c " + shlex.quote("import sys; print('error: Give less.', file=sys.stderr); sys.exit(2)"), 0, 20),
        Stage("silent", "-c pass", 0, 20),
        Stage("lacking", "-c pass", 0, 20, package="no_such_package"),
        Stage("late", "-c pass", 10**6, 20),
        Stage("last", telling(outcome("d", figures={"gb_per_s": 3000.0})), 0, 20))
    assert code == 1 and all(line.keys() == KEYS for line in lines)
    assert [(line["stage"], line["name"], line["status"]) for line in lines] == [
        ("card", "Some Card", "ok"), ("two", "a", "ok"), ("two", "b", "failed"), ("broken", "c", "ok"), ("broken", "broken", "failed"),
        ("refused", "refused", "failed"), ("silent", "silent", "failed"), ("lacking", "lacking", "skipped"), ("late", "late", "skipped"),
        ("last", "d", "ok")]
    errors = {line["name"]: line["error"] for line in lines}
    assert errors["b"] == "it is off by 3%" and errors["broken"] == "exit code 1: ValueError: no such | thing"
    assert errors["refused"] == "exit code 2: Give less." and errors["lacking"] == "no_such_package is not installed"
    assert errors["late"].startswith("it needs at least 1000000 s, and 5") and errors["d"] is None
    assert lines[1]["figures"] == {"tflops": 700.0} and lines[1]["seconds"] > 0 and lines[2]["seconds"] is None
    said = capsys.readouterr().out
    assert "| two | a | 700.0 TFLOP/s |" in said and "| broken | broken | **failed**: exit code 1: ValueError: no such / thing |" in said
    assert "2 × Some Card, 79.2 GiB, nominal 989 TFLOP/s in bf16, 3.35 TB/s, 700.00 W; driver 580.1, torch 2.11.0" in said
    assert "ValueError" in path.with_suffix(".log").read_text()
    # The table is made of the lines alone: of those of the last run, and of whole ones.
    path.write_text(path.read_text().replace("Some Card", "An Older Card") + path.read_text() + '{"stage": "cut')
    assert run.main([f"--table={path}"]) == 0
    again = capsys.readouterr().out
    assert again.strip() in said and "Older" not in again


def test_what_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    """Also a child, which writes on and on. Checks reported before stay."""
    beats = tmp_path / "beats"
    child = f"import time\nwhile True:\n    open({str(beats)!r}, 'a').write('x')\n    time.sleep(0.05)"
    start = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    hangs = Stage("hangs", telling(outcome("before"), then="print('a test', flush=True); " + start), 0, 3)
    began = time.monotonic()
    code, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", hangs, Stage("after", telling(outcome("e")), 0, 20))
    assert code == 1 and time.monotonic() - began < 30
    assert [(line["name"], line["status"]) for line in lines[1:]] == [("before", "ok"), ("hangs", "timeout"), ("e", "ok")]
    assert lines[2]["error"] == "ended after 3 s; its last message: a test" and lines[1]["seconds"] >= 3
    size = beats.stat().st_size
    time.sleep(0.3)
    assert size and beats.stat().st_size == size


def test_a_stage_ends_when_the_time_for_everything_is_over(monkeypatch, tmp_path):
    sleeps = Stage("sleeps", "-c 'import time; time.sleep(60)'", 0, 50)
    code, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", sleeps, sleeps._replace(name="next", needs=1), argv=["--minutes=0.033"])
    assert code == 1 and [(line["stage"], line["status"]) for line in lines[1:]] == [("sleeps", "timeout"), ("next", "skipped")]
    assert lines[1]["seconds"] < 10


def test_an_interrupted_run_leaves_no_process(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self.pid)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()
    monkeypatch.setattr(run.subprocess, "Popen", Interrupted)
    with open(tmp_path / "log", "a+") as log, pytest.raises(KeyboardInterrupt):
        run.run_stage(Stage("endless", "-c 'import time; time.sleep(60)'", 0, 50), 50, log, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_what_pytest_tells(monkeypatch, tmp_path, capsys):
    """The tests that fail, or break while they are set up, and how many pass; and the test that ended the process."""
    tests = tmp_path / "test_some.py"
    tests.write_text("""
import os
import pytest

@pytest.fixture
def broken():
    raise OSError("no such fixture")

def test_right():
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_wrong(x):
    assert x == 3, "x is small"

def test_nothing():
    pytest.skip("no such card")

def test_broken(broken):
    pass

""")
    end = tmp_path / "test_other.py"
    end.write_text("import os\n\ndef test_first():\n    pass\n\ndef test_end():\n    os._exit(7)\n")
    stages = [Stage(path.stem, f"-m pytest -v -p no:cacheprovider --rootdir={tmp_path} {path}", 0, 60) for path in (tests, end)]
    stages.append(Stage("none", f"{stages[0].command} -k nothing_has_this_name", 0, 60))
    code, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", *stages)
    assert code == 1
    assert [(line["name"].rpartition("::")[2], line["status"]) for line in lines[1:]] == [
        ("tests", "ok"), ("test_wrong[1]", "failed"), ("test_wrong[2]", "failed"), ("test_broken", "failed"), ("tests", "ok"), ("test_other", "failed"),
        ("tests", "ok"), ("none", "failed")]
    assert lines[1]["figures"] == {"tests": "2 failed, 1 passed, 1 skipped, 1 error"} and lines[2]["error"] == "AssertionError: x is small"
    assert lines[4]["error"] == "OSError: no such fixture" and lines[6]["error"].endswith("test_other.py::test_end")
    assert lines[8]["error"].startswith("exit code 5")
    said = capsys.readouterr().out
    assert "| test_some | tests | 2 failed, 1 passed, 1 skipped, 1 error |" in said
    assert "| test_some | test_wrong[2] | **failed**: AssertionError: x is small |" in said and "test_nothing" not in said


def test_real_stages(forks, monkeypatch, tmp_path, capsys):
    """The card's, the kernels' and some of the tests that are marked gpu, on the CPU."""
    monkeypatch.setenv("NANORFT_GPU_TESTS_ON", "cpu")
    card, correctness, attention = (next(stage for stage in run.STAGES if stage.name == name) for name in ("card", "correctness", "attention"))
    monkeypatch.setitem(globals(), "CARD", card._replace(command=card.command + " --device=cpu"))
    code, lines = measured(monkeypatch, tmp_path / "gpu.jsonl",
                           correctness._replace(command=correctness.command + " -k fp16_that"),
                           attention._replace(command=attention.command + " --device=cpu --shape=1,16,2,2,8"))
    assert code == 0 and all(line.keys() == KEYS for line in lines)
    card, *others = lines
    assert card["stage"] == "card" and card["figures"]["torch"] == torch.__version__
    assert {"driver", "cudnn", "packages", "date", "commit", "capability"} <= card["figures"].keys()
    tests = [line for line in others if line["stage"] == "correctness"]
    assert len(tests) == 1 and tests[0]["status"] == "ok" and tests[0]["figures"]["tests"].startswith("2 passed")
    kernels = {line["name"]: line for line in others if line["stage"] == "attention"}
    # Where bf16 is fast our own attention is used, for which there is nothing to choose.
    expected = "skipped" if hardware.setup("cpu").attention == "sdpa" else "ok"
    assert kernels.keys() == {"flash", "cudnn", "efficient", "math"} and kernels["cudnn"]["status"] == expected
    assert all(kernels["math"]["figures"][key] > 0 for key in ("ms", "varied_ms", "first_call_s", "tflops"))
    assert "| attention | math |" in capsys.readouterr().out


def test_speeds(forks, monkeypatch, tmp_path, capsys):
    """bench.py's figures, one run beside another: two runs of the same steps have the same loss."""
    small = {
        "train": "--n_layer=1 --n_embd=32 --n_head=2 --block_size=32 --batch_size=2 --gradient_accumulation_steps=1 --steps=1 "
                 "--compile=false",
        "generate": "--model=1m --work=2x2 --prompt_tokens=8 --max_new_tokens=4",
        "grpo": "--model=1m --work=2x2 --prompt_tokens=8 --max_new_tokens=4 --steps=1"}
    stages = [stage._replace(command=f"{stage.command} {small[stage.name.partition('-')[0]]} --device=cpu")
              for stage in run.STAGES if stage.name in ("train-eager", "train", "generate-gpt2", "grpo")]
    _, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", *stages)
    lines = {line["stage"]: line for line in lines}
    train = lines["train"]["figures"]
    assert train["loss_off"] == 0 and train["beside"] == "train-eager" and train["speedup"] > 0 and train["outside_s"] > 0
    assert train["settings"]["micro_batch"] == 2 and {"optimizer_s", "mfu", "peak_memory_gb"} <= train.keys()
    case = lines["generate-gpt2"]["figures"]
    assert case["step_ms"] > case["floor_ms"] > 0 and case["host_share"] < 1 and case["mbu"] > 0   # of runs of 0.01 s: may be negative
    assert lines["grpo"]["figures"]["aim"] == "1,250.0 completions/s" and train["aim"] == "MFU 45.0%" and "aim" not in case
    assert lines["grpo"]["figures"]["rollout_s"] > 0 and lines["grpo"]["figures"]["completions_per_s"] > 0
    said = capsys.readouterr().out
    assert "times train-eager" in said and "loss off by 0.00%" in said and "| generate-gpt2 | 2x2 |" in said


def test_a_run_on_text_and_a_pipeline(monkeypatch, tmp_path, capsys):
    """A stage of train.py reports its run folder, a script its summary.json; without a network the latter is skipped if its model is missing."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five\n" * 400)
    stages = {stage.name: stage for stage in run.STAGES}
    small = ("--block_size=32 --n_layer=1 --n_head=2 --n_embd=32 --batch_size=2 --max_steps=4 --warmup_steps=1 --eval_interval=2 "
             f"--log_interval=2 --device=cpu --compile=false --data_dir={tmp_path}/tokens")
    muon = stages["text-muon"]
    monkeypatch.setattr(run.network, "is_reachable", lambda: False)
    summary = json.dumps({"stages": [{"name": "rft", "greedy": 0.5, "sampled": 0.4, "pass_at_8": 0.8, "seconds": 3.0}]})
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/smollm2_seeds.sh").write_text(f"mkdir -p ${{1#*=}}/1 && echo '{summary}' > ${{1#*=}}/1/summary.json\n")
    (tmp_path / "runs/broken.sh").write_text("mkdir ${1#*=}; echo no model; exit 1\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    for name in ("train.py", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    _, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", muon._replace(command=f"{muon.command} {small}"),
                        stages["smollm2"]._replace(download=str(tmp_path / "none"), package=""),
                        stages["smollm2"]._replace(name="there", download=str(text), package="", needs=0),
                        stages["smollm2"]._replace(name="broken", command="runs/broken.sh", download=str(text), package="", needs=0),
                        Stage("last", telling(outcome("e")), 0, 20), argv=[f"--text={text}"])
    trained, skipped, there, broken, last = lines[1:]
    assert broken["status"] == "failed" and broken["error"] == "exit code 1: no model" and last["status"] == "ok"
    assert stages["smollm2"].download == str(smollm2.FILE)
    assert trained["status"] == "ok" and trained["figures"]["val_ppl_word"] > 1 and trained["figures"]["tokens_per_s"] > 0
    assert skipped["status"] == "skipped" and skipped["error"].startswith("it needs the network, or ")
    assert there["status"] == "ok" and there["name"] == "1/rft" and there["figures"]["greedy"] == 0.5
    said = capsys.readouterr().out
    assert "word perplexity" in said and "greedy 50.0%, sampled 40.0%" in said and "`bash runs/smollm2_seeds.sh`" in said


def test_three_seeds_run_side_by_side_and_a_failed_one_is_named(tmp_path):
    (tmp_path / "runs").mkdir()
    shutil.copy(ROOT / "runs/smollm2_seeds.sh", tmp_path / "runs")
    (tmp_path / "runs/setup.sh").write_text("python=python3\n")
    (tmp_path / "runs/smollm2.sh").write_text(
        """[ $1 != --seed=1 ] || { echo started; echo no room; exit 1; }
out=${3#*=} all=${3#*=}/..
mkdir "$out"; echo "$@" > "$out/options"
while [ ! -e "$all/0/options" ] || [ ! -e "$all/2/options" ]; do sleep 0.01; done""")        # waits for the other
    done = subprocess.run(["bash", "runs/smollm2_seeds.sh", "--out_dir=a b/out", "--model=m", "--asked=9"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: seed 1 failed: no room\n")
    assert (tmp_path / "a b/out/2/options").read_text() == "--seed=2 --model=m --out_dir=a b/out/2 --asked=9\n"
    assert subprocess.run(["bash", "runs/smollm2_seeds.sh", "--seed=4"], cwd=tmp_path, capture_output=True).returncode == 2


def test_a_signal_ends_all_three_after_they_saved(tmp_path):
    (tmp_path / "runs").mkdir()
    shutil.copy(ROOT / "runs/smollm2_seeds.sh", tmp_path / "runs")
    (tmp_path / "runs/setup.sh").write_text("python=python3\n")
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.3), open(sys.argv[1] + '/saved', 'w'), sys.exit(0)))"
    (tmp_path / "runs/smollm2.sh").write_text(f"""set -euo pipefail
out=${{3#*=}}; mkdir "$out"
"$PYTHON" -c "{slow}; open(sys.argv[1] + '/began', 'w'); time.sleep(60)" "$out"
touch "$out/went on"
""")
    script = subprocess.Popen(["bash", "runs/smollm2_seeds.sh", "--model=m", "--out_dir=out"], cwd=tmp_path)
    began = time.monotonic()
    while len([*tmp_path.glob("out/*/began")]) < 3 and time.monotonic() < began + 60:
        time.sleep(0.02)
    script.terminate()
    assert script.wait(30) == 143
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("out/*/*")) == [
        f"out/{seed}/{name}" for seed in range(3) for name in ("began", "saved")]


def test_another_loss_is_a_failure():
    def line(stage, loss):
        return {"stage": stage, "status": "ok", "error": None, "figures": {"tokens_per_s": 10.0, "outside_s": 3.0, "loss": loss}}
    same, other = line("train", 4.01), line("train", 4.2)
    run.compare(same, line("train-eager", 4.0))
    run.compare(other, line("train-eager", 4.0))
    assert same["status"] == "ok" and same["figures"]["loss_off"] == pytest.approx(0.0025)
    assert other["status"] == "failed" and other["error"] == "its loss, 4.2000, is not that of train-eager, 4.0000"


@pytest.mark.parametrize("stage", [stage for stage in run.STAGES if stage.command.startswith("bench.py")], ids=lambda stage: stage.name)
def test_bench_knows_every_knob_of_the_stages(stage):
    words = shlex.split(stage.command)[1:]
    own, others = bench.split_arguments(words)
    cfg = config.load(bench.Config, own)
    bench.check(cfg)
    if cfg.stage in bench.SCRIPTS:
        script = bench.parse_script_args(cfg.stage, [str(ROOT / word) if word.endswith(".py") else word for word in others])
        if cfg.stage == "train" and cfg.model != "auto":       # the shape with these options is that of a model
            options = shape_options(script.config, SHAPES[cfg.model]) | {name: getattr(script.config, name) for name in script.given}
            GPTConfig(vocab_size=300, **{name: value for name, value in options.items() if hasattr(GPTConfig, name)})
    before = [other.name for other in run.STAGES[:run.STAGES.index(stage)]]
    assert stage.needs < stage.timeout and stage.beside in ["", *before]


def test_the_order_of_the_day(monkeypatch, tmp_path):
    """All real stages with a clock in place of the card: each takes 60% of its limit. The second quarter of an hour has what the
    first did not reach, then what failed or hung, and last what passed; another kind of card begins anew."""
    clock = [0.0]
    card = ["Some Card"]
    calls = []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(run.network, "is_reachable", lambda: True)

    def run_process(command, timeout, log, env):
        calls.append((run.shlex.join(["bash" if command[0] == "bash" else "python", *command[1:]]), timeout))
        name = next(stage.name for stage in run.STAGES if calls[-1][0].startswith(run.command_of(stage)))
        clock[0] += timeout if name == "rl" else 0.6 * timeout
        if name == "rl":
            return None, ["compiling"]
        told = outcome(card[0] if name == "card" else name, "failed" if name == "engine" else "ok", error="off" if name == "engine" else None,
                       figures={"cards": 1, "memory_gb": 80, "nominal": {}, "power_limit": None, "date": "2026", "commit": "a",
                                "driver": "1", "torch": "2", "cuda": "13", "cudnn": 9} if name == "card" else {})
        return 0, [json.dumps(told)]
    monkeypatch.setattr(run, "run_process", run_process)
    monkeypatch.setattr(run, "check_machine", lambda: None)

    def day():
        calls.clear()
        began = clock[0]
        assert run.main(["--minutes=15", "--text={text}", f"--output={tmp_path}/gpu.jsonl"]) in (0, 1)
        assert clock[0] - began <= 900 and len(list(tmp_path.iterdir())) == 2
        lines = run.read_runs(tmp_path / "gpu.jsonl")[-1]
        assert len({line["stage"] for line in lines}) == len(run.STAGES)
        return [line["stage"] for line in lines if line["status"] != "skipped"]
    names = [stage.name for stage in run.STAGES]
    first = day()
    assert first[:9] == names[:9] and "a100_mega" in first
    passed = {*first} - {"card", "rl", "engine"}
    second = day()
    beside = {stage.name: stage.beside for stage in run.STAGES}
    again = {*names} - passed
    again |= {beside[name] for name in again}
    again |= {beside[name] for name in again if name}
    early = second[:next((i for i, name in enumerate(second) if name not in again), len(second))]
    assert second[0] == "card" and {"rl", "engine"} <= {*second[:6]} and {*second} - passed <= {*early}
    for name in {*second} - passed:
        assert not beside[name] or second.index(beside[name]) < second.index(name)
    assert {*names} - {"two-cards", "countdown"} <= {*first, *second, *(name for _ in range(4) for name in day())}
    assert "countdown" in day()              # the last; it takes half of a quarter of an hour
    card[0] = "Other Card"
    assert day() == first


def test_a_stage_that_is_repeated_takes_the_one_beside_along(monkeypatch, tmp_path):
    """Else a loss that is off would not be compared, and pass."""
    path = tmp_path / "gpu.jsonl"

    def train(name, loss, beside=""):
        return Stage(name, telling(outcome(name, figures=dict(tokens_per_s=1.0, outside_s=1.0, loss=loss))), 0, 20, beside)
    stages = [Stage("first", telling(outcome("a")), 0, 20), train("eager", 4.0), train("compiled", 5.0, "eager")]
    for _ in range(2):
        code, lines = measured(monkeypatch, path, *stages)
        assert code == 1
    assert [(line["stage"], line["status"]) for line in run.read_runs(path)[1]] == [
        ("card", "ok"), ("eager", "ok"), ("compiled", "failed"), ("first", "ok")]


def test_pytest_s_results_are_kept_when_it_is_killed():
    head = "tests/test_gpu.py::test_"
    lines = [f"{head}a[bf16-1 x] PASSED   [ 25%]", f"{head}b SKIPPED (no CUDA GPU here) [ 50%]", f"{head}c FAILED [ 75%]", f"{head}d "]
    assert run.checks_of_tests(lines) == [outcome("tests", figures={"tests": "1 passed, 1 skipped, 1 failed"}), outcome(f"{head}c", "failed", error="its message was lost")]
    assert run.checks_of_tests(["collecting ..."]) == []


def test_a_failed_compilation_is_a_failed_check(monkeypatch, tmp_path):
    stages = []
    for name, options in (("asked", "--compile=true"), ("config", "--stage=train"), ("eager", "--stage=train --compile=false")):
        told = outcome(name, figures={"tokens_per_s": 1.0, "settings": {"compile": False}})
        stages.append(Stage(name, f"{telling(told)} {options}", 0, 20))
    code, lines = measured(monkeypatch, tmp_path / "gpu.jsonl", *stages)
    assert code == 1 and [line["status"] for line in lines] == ["ok", "failed", "failed", "ok"]
    assert lines[1]["error"] == "torch.compile failed, and training went on without"


def test_a_pipeline_that_was_stopped_leaves_the_figures_of_its_runs(tmp_path):
    for name, line in (("sft", {"step": 1, "loss": 2.0}), ("grpo", {"step": 1, "reward": 0.5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "config": {}, "settings": {"compile": false}}\n' + json.dumps(line) + "\n")
    (tmp_path / "base").mkdir()              # ended before its first step
    (tmp_path / "base/metrics.jsonl").write_text('{"step": 0, "config": {}, "settings": {"compile": false}}\n')
    grpo, sft = run.checks_of_folder(tmp_path)
    assert (grpo["name"], grpo["figures"]["reward"], sft["name"], sft["figures"]["loss"]) == ("grpo", 0.5, "sft", 2.0)
    assert sft["figures"]["settings"]["compile"] is False        # a failed compilation is a failed check


def test_a_quarter_of_an_hour_decides_what_changed():
    """Even if each stage takes its limit: the tests of changed code, and GRPO eager and compiled."""
    names = [stage.name for stage in run.STAGES]
    assert sum(stage.timeout for stage in run.STAGES[:names.index("grpo-compiled") + 1]) <= 15 * 60


@pytest.mark.parametrize("argv, sentence", [
    (["--only=trian"], "no stage 'trian'; choose from card"), 
    (["--minutes=0"], "too small"), (["--table=nothing.jsonl"], "nothing.jsonl can't be read"),
    (["--output=mine.txt"], "mine.txt exists and is not measure.gpu.run's")])
def test_bad_input(argv, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "check_machine", lambda: None)
    (tmp_path / "mine.txt").write_text("a diary\n")
    with pytest.raises(BadInput, match=sentence):
        run.main(argv)
    assert (tmp_path / "mine.txt").read_text() == "a diary\n"


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BadInput, match="2.11 or newer, not 2.9.1"):
        run.check_machine()


def test_a_table_of_a_card_that_did_not_answer():
    card = {"stage": "card", "command": "python -m x"} | outcome("card", "timeout", error="ended after 60 s")
    assert run.table([card]).startswith("The card is unknown: timeout, ended after 60 s.")
