"""bench.py, tiny: its stages without peers, the ladder's rows, the profile; TRL's side of grpo where TRL is installed."""
import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import forked
import grpo
import train
from conftest import ROOT, environment
from measure import ceilings, ladder, peers, reinforcement, runs, sampling, synthetic
from measure.gpu import run as gpu
from model import GPT, GPTConfig
from runtime import guard, hardware
from runtime.config import BadInput
from text import examples
from text.tokenizer import Tokenizer

TINY = dict(vocab_size=300, block_size=256, n_layer=2, n_head=2, n_embd=32, mlp="swiglu", qk_norm=False)
GRPO = ["--stage=grpo", "--model=llama-1m", "--work=2x4", "--prompt_tokens=5", "--max_new_tokens=6", "--steps=1", "--repeats=1"]
TRAIN = ["--stage=train", "--model=1m", "--batch_size=8", "--block_size=16", "--steps=2", "--repeats=1"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)                          # where bench_results/ goes
    monkeypatch.setitem(synthetic.SHAPES, "llama-1m", TINY)
    monkeypatch.setitem(synthetic.SHAPES, "1m", TINY | {"vocab_size": 257})
    monkeypatch.setitem(synthetic.SHAPES, "gpt2-1m", synthetic.GPT2 | TINY | {"mlp": "gelu_tanh", "vocab_size": 257})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")           # of the scripts that are started
    monkeypatch.setitem(ceilings.MEASURED, (torch.device("cpu"), "fp32"), 1e11)
    monkeypatch.setitem(ceilings.MEASURED, (torch.device("cpu"), "bf16"), 2e11)
    monkeypatch.setitem(ceilings.MEASURED, (torch.device("cpu"), "bytes"), 1e10)


@pytest.fixture
def in_process(monkeypatch):
    """The scripts' main is called instead of a process for each: the same records in a twentieth of the time."""
    real, handlers = runs.process, [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]

    def call(start, arguments, ranks=1, name=None, fine=(0,), env=None):
        if ranks > 1 or start[0] == "-m" and name != "nanogpt":
            return real(start, arguments, ranks, name, fine, env)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if start[0] == "-m":
                peers.main(arguments[0])
                return said.getvalue()
            assert importlib.import_module(Path(start[0]).stem).main(list(map(str, arguments))) in fine
        return said.getvalue()
    for module in (runs, sampling):                      # that call it
        monkeypatch.setattr(module, "process", call)
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


def said(capsys, *argv):
    assert bench.main([*argv, "--device=cpu", "--json"]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_overview(in_process, capsys):
    out, figures = said(capsys, "--dtype=fp32", "--steps=1", "--work=2x4", "--prompt_tokens=8", "--max_new_tokens=6",
                        "--verifier_ms=0.1")
    assert list(figures["stages"]) == ["train", "sft", "generate", "datagen", "grpo", "rewards"] and "left out" not in out
    assert "fp32 0.10" in out and "reading memory: 10 GB/s" in out
    for stage, f in figures["stages"].items():
        assert f["rates"]["nanoRFT" if stage != "generate" else "2x4 nanoRFT"][0] > 0 and f["limit"] > 0 and 0 < f["share"] < 2
        line = next(line for line in out.splitlines() if line.startswith(f"{stage} "))
        assert f["unit"] in line and f"{f['share']:.1%}" in line
    assert all("MFU" in figures["stages"][stage]["also"] for stage in ("train", "sft")) and "MBU" in figures["stages"]["generate"]["also"]


@pytest.mark.parametrize("device, dtype, memory, row", [
    ("cpu", "bf16", 8, "measured, bf16: yes"), ("cpu", "fp32", 8, "measured, bf16: no"), ("cuda", "bf16", 79, "computed, A100"),
    ("cuda", "bf16", 23.6, "computed, 4090"), ("cuda", "fp16", 14.6, "computed, T4")])
def test_the_rows_of_recipes_that_are_a_machine_s(device, dtype, memory, row):
    hw = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, memory_size_gb=lambda: memory)
    assert ceilings.recipe_rows(hw) == row
    kind, _, name = row.partition(", ")
    page = (ROOT / "docs/recipes.md").read_text()
    assert (f"| {name[6:]} |" if kind == "measured" else f"| {name} |") in page


def test_machine(capsys):
    assert bench.main(["--stage=machine", "--device=cpu", "--dtype=fp32"]) == 0
    assert capsys.readouterr().out.endswith("GiB: measured, bf16: no\n")


def test_train_passes_options_on(in_process, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("n_layer = 1\nbatch_size = 3\nlearning_rate = 0.003\n")
    out, figures = said(capsys, "--stage=train", "--steps=2", "--repeats=2", "--dtype=fp32", str(tmp_path / "mine.py"), "--batch_size=4",
                        "--block_size=16", "--output=deep/figures.json")
    settings, rates = figures["settings"], figures["rates"]["nanoRFT"]
    assert (settings["n_layer"], settings["micro_batch"], settings["learning_rate"], settings["n_embd"]) == (1, 4, 0.003, 128)
    assert "4 sequences of 16 tokens a step" in out and len(rates) == 2 and figures["unit"] == "tokens/s"
    assert [len(run["seconds"]) for run in figures["repeats"]] == [2, 2] and figures["repeats"][0]["rate"] == rates[0]
    assert figures["mfu"] == pytest.approx(sum(rates) / 2 * figures["flops_per_token"] / 1e11)
    written = json.loads((tmp_path / "deep/figures.json").read_text())
    assert written == figures
    assert figures["hardware"].endswith("thread" if torch.get_num_threads() == 1 else "threads") and figures["torch"] == torch.__version__
    assert figures["python"] == sys.version.split()[0] and figures["date"][:2] == "20" and "--batch_size=4" in figures["command"]
    known = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (figures["commit"] or "").removesuffix("-dirty") == (known.stdout.strip() if known.returncode == 0 else "")


def test_another_vocabulary(in_process, capsys, tmp_path):
    """A config for GPT-2's tokenizer is measured with as many ids, without a download."""
    pytest.importorskip("tokenizers")
    (tmp_path / "big.py").write_text("n_layer = 1\nn_embd = 8\nbatch_size = 1\nblock_size = 16\ntokenizer = 'gpt2'\ndataset = 'none'\n")
    _, figures = said(capsys, "--stage=train", "--steps=1", "--repeats=1", "--dtype=fp32", str(tmp_path / "big.py"))
    assert figures["settings"]["tokenizer"].endswith("tokenizer.json") and figures["flops_per_token"] > 6 * 8 * 50257


@pytest.mark.parametrize("stage", ["train", "sft"])
def test_each_row_of_the_ladder_changes_one_thing(stage, in_process, capsys):
    """By what the runs themselves recorded."""
    few = ["--batch_size=8", "--gradient_accumulation_steps=1"] + (["--block_size=16"] if stage == "train" else [])
    out, figures = said(capsys, f"--stage={stage}", "--ladder", "--dtype=bf16", "--steps=1",
                        "--repeats=1", *few)
    rows = figures["rows"]
    assert [row["name"].split(",")[0] for row in rows] == [
        "plain", "+ mixed precision", "+ no checkpointing", "+ loader processes", "+ micro-batch 2 -> 8", "+ fused AdamW",
        "+ attention kernel", "+ memory kept"]
    changed = [{k for k in b["settings"] if a["settings"][k] != b["settings"][k]} for a, b in zip(rows, rows[1:])]
    assert changed == [{"dtype"}, {"gradient_checkpointing"}, {"num_workers"}, {"micro_batch"},
                       {"fused_adamw"}, {"attention"}, {"keep_memory"}]
    plain, best = rows[0]["settings"], rows[-1]["settings"]
    assert (plain["dtype"], plain["compile"], plain["optimizer"], plain["micro_batch"]) == ("fp32", False, "adamw", 2)
    assert (best["dtype"], best["gradient_checkpointing"], best["micro_batch"], best["attention"]) == ("bf16", False, 8, "math")
    assert all(row["step_s"] > 0 and row["peak_memory_gb"] > 0 and abs(row["off_fp32"]) < 0.05 for row in rows)
    assert all(len(row["repeats"]) == 1 for row in rows)
    assert rows[0]["gain"] is None and rows[0]["off_fp32"] == 0 and rows[-1]["in_all"] > 0 and "off fp32" in out
    assert figures["rates"].keys() == {row["name"] for row in rows}
    assert [row["promised"] for row in rows] == [None, "2-3", "1.2-1.3", "1.5-2", None, None, "2-3 of attention", None]
    assert "guides" in out and "J/step" not in out                # a CPU has no counter of energy


def test_joules_a_step_are_the_counter_s_rise_over_the_measured_steps(in_process, capsys, monkeypatch):
    counter = itertools.count(1000, 25)                      # read once a step
    monkeypatch.setattr(hardware.Hardware, "joules", lambda hw: float(next(counter)))
    monkeypatch.setattr(runs, "LEAST_SECONDS", 0)
    out, figures = said(capsys, "--stage=train", "--ladder", "--dtype=bf16", "--steps=3", "--repeats=1", "--batch_size=2",
                        "--gradient_accumulation_steps=1", "--block_size=16")
    assert {row["joules_a_step"] for row in figures["rows"]} == {25} and "J/step" in out
    assert gpu.checks_of_record(figures)[0]["figures"]["joules_a_step"] == 25


def test_ladder_of_grpo(in_process, capsys):
    out, figures = said(capsys, *GRPO, "--ladder", "--dtype=bf16", "--verifier_ms=0.1", "--ranks=2")
    rows = figures["rows"]
    assert [row["name"] for row in rows] == ["plain, fp32", "+ mixed precision, bf16", "+ parallel rewards", "+ 2 processes"]
    changed = [{k for k in b["settings"] if a["settings"][k] != b["settings"][k]} - {"device"} for a, b in zip(rows, rows[1:])]    # its threads
    assert changed == [{"dtype", "engine", "attention"}, {"reward_pool"}, {"ranks"}]
    assert rows[0]["settings"]["ranks"] == 1 and rows[-1]["settings"]["ranks"] == 2 and "zero by construction" in out


def test_ablation(in_process, capsys):
    out, figures = said(capsys, *TRAIN, "--ablate", "--dtype=bf16", "--num_workers=0", "--fused_adamw=false", "--keep_memory=false",
                        "--gradient_checkpointing=true")
    rows = figures["rows"]
    assert [row["name"] for row in rows] == ["everything on", "without mixed precision, bf16", "without micro-batch 2 -> 8",
                                             "without attention kernel"]
    changed = [{k for k in row["settings"] if rows[0]["settings"][k] != row["settings"][k]} for row in rows[1:]]
    assert changed == [{"dtype", "attention"}, {"micro_batch"}, {"attention"}]           # auto: the kernel that is fastest at a dtype
    assert rows[1]["off_fp32"] == 0 and rows[0]["off_fp32"] != 0 and rows[0]["gain"] is None and rows[1]["gain"] > 0 and "gain: speed with everything on" in out


def test_a_row_without_effect_is_left_out(in_process, capsys, monkeypatch):
    """torch.compile that fails falls back: the row would be a second measurement of the one before."""
    class Broken(torch.nn.Module):
        def __init__(self, model, **_):
            super().__init__()
            self.model = model

        def forward(self, *_):
            raise RuntimeError("no compiler here")
    monkeypatch.setattr(torch, "compile", Broken)
    out, figures = said(capsys, *TRAIN, "--ladder", "--dtype=fp32", "--compile", "--num_workers=0", "--fused_adamw=false",
                        "--keep_memory=false", "--gradient_checkpointing=true")
    assert [row["name"] for row in figures["rows"]] == ["plain, fp32", "+ micro-batch 2 -> 8", "+ attention kernel"]
    assert "+ torch.compile: left out" in out


def test_a_failed_row_is_reported_and_the_others_count(in_process, capsys, monkeypatch):
    real, calls = ladder.run_script, []

    def run_script(work, knobs):
        calls.append(knobs["attention"])
        if knobs["attention"] == "auto" and calls.count("auto") > 1:
            raise guard.Failure("no memory left")
        return real(work, knobs)
    monkeypatch.setattr(ladder, "run_script", run_script)
    out, figures = said(capsys, *TRAIN, "--repeats=3", "--ladder", "--dtype=fp32", "--num_workers=0", "--fused_adamw=false",
                        "--keep_memory=false", "--gradient_checkpointing=true")
    assert "+ attention kernel: 1 runs, then it failed: no memory left" in out and calls.count("auto") == 2
    assert [len(row["repeats"]) for row in figures["rows"]] == [3, 3, 1]


def test_a_peer_that_fails_is_left_out(capsys):
    rates = {"nanoRFT": iter((6.0, 4.0)), "good": iter((2.0, 2.0)), "bad": iter((1.0,))}

    def side(name):
        try:
            return next(rates[name])
        except StopIteration:
            raise guard.Failure("out of memory") from None
    measured = runs.alternate({name: functools.partial(side, name) for name in rates}, 2, "tokens/s", print)
    out = capsys.readouterr().out
    assert measured == {"nanoRFT": [6.0, 4.0], "good": [2.0, 2.0]} and "bad: left out, it failed: out of memory" in out
    assert "good: 2.0 tokens/s; nanoRFT is 2.50 times as fast (2.00-3.00)" in out


def test_optimisations_of_a_gpu():
    """Every row of the ladder there changes one thing, and no row is about what only a CPU has."""
    card = hardware.Hardware(torch.device("cuda:0"), "A100", "bf16", True, True, "sdpa", "flash", {}, None)
    for stage, Config, names in (
            ("train", train.Config, ["TF32", "mixed precision, bf16", "no checkpointing", "loader processes", "micro-batch 8 -> 32",
                                     "torch.compile", "fused AdamW", "attention kernel"]),
            ("grpo", grpo.Config, ["TF32", "mixed precision, bf16", "parallel rewards", "torch.compile", "CUDA graphs"])):
        found = ladder.optimisations(stage, card, Config(), {}, 1)
        assert [one.name for one in found] == names
        options = [k for one in found for k in one.options]
        assert len(options) == len(set(options)) and set(options) <= vars(Config()).keys()
        rows = ladder.rows_of(found, ladder=True)
        for one, (_, before), (_, after) in zip(found, rows, rows[1:]):
            assert {k for k in after if before[k] != after[k]} == one.options.keys()
        assert [name for name, _ in ladder.rows_of(found, ladder=False)][1] == "without mixed precision, bf16"
    assert "torch.compile" not in [r.name for r in ladder.optimisations("train", card, train.Config(), {"compile": False}, 1)]


def test_profile():
    done = forked.run([sys.executable, str(ROOT / "bench.py"), "--stage=train", "--profile", "--output=p.json", "--steps=2",
                           "--batch_size=2", "--block_size=16", "--n_layer=1", "--device=cpu", "--dtype=fp32"],
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trace, figures = json.loads(Path("p.trace.json").read_text()), json.loads(Path("p.json").read_text())
    steps = [e for e in trace["traceEvents"] if e.get("name", "").startswith("Optimizer.step#")]
    assert {"aten::mm", "aten::addmm"} & {e.get("name") for e in trace["traceEvents"]} and len({e["ts"] for e in steps}) >= 2
    assert len(figures["consumers"]) == 15 and "p.trace.json" in done.stdout and figures["consumers"][0]["name"][:58] in done.stdout
    assert figures["consumers"] == sorted(figures["consumers"], key=lambda row: -row["ms_a_step"])


def test_interrupted():
    """Ctrl-C goes to bench.py and to the script that it has started. A shell's job in the background ignores it, and what that starts."""
    def heed():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([sys.executable, str(ROOT / "bench.py"), *TRAIN, "--steps=100000", "--device=cpu", "--output=i.json"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True, preexec_fn=heed) as process:
        assert any("steps a run" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.strip() == "error: interrupted." and not Path("i.json").exists()


def test_grpo_without_a_peer(in_process, monkeypatch, capsys):
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "trl" else real(name))
    out, figures = said(capsys, *GRPO, "--dtype=fp32", "--ranks=1", "--peers")
    assert "2 prompts of 5 tokens x 4 samples of 6" in out and "1 process here" in out and "pip install trl" in out
    assert figures["stage"] == "grpo" and figures["model"] == "llama-1m" and figures["rates"]["nanoRFT"][0] > 0
    with pytest.raises(BadInput, match="pip install trl"):
        bench.main([*GRPO, "--peers=trl_fp32"])


def test_grpo_of_varied_prompts(tmp_path):
    """Of a quarter of --prompt_tokens to all of it."""
    cfg = bench.Config(stage="grpo", varied_prompts=True, steps=6, verifier_ms=0.0)
    reinforcement.random_questions(cfg, tmp_path, 4, 40)
    lengths = {len(json.loads(line)["prompt"]) for line in (tmp_path / "questions.jsonl").read_text().splitlines()}
    assert min(lengths) >= 10 and max(lengths) <= 40 and len(lengths) > 5


def test_grpo_beside_trl(in_process, capsys):
    pytest.importorskip("trl")
    out, figures = said(capsys, *GRPO, "--dtype=fp32", "--peers=trl_bf16")
    assert figures["rates"].keys() == {"nanoRFT", "TRL's GRPOTrainer, bf16"}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in figures["rates"].values())
    assert out.count("times as fast") == 1


def train_tiny(folder):
    """Write a run, folder/run, with a tokenizer of its own."""
    (folder / "a.txt").write_text("6 kg = 6000 gram. " * 200)
    synthetic.write_tokenizer(folder, 300)
    flags = runs.as_flags(dataset=folder / "a.txt", out_dir=folder / "run", n_layer=1, n_embd=32, max_steps=1, tokenizer=folder)
    assert train.main([*flags, "--device=cpu"]) == 0


def test_grpo_of_a_trained_model_beside_trl(in_process, capsys, tmp_path):
    """On real questions, whose completions have different lengths."""
    pytest.importorskip("trl")
    train_tiny(tmp_path)
    options = ["--work=2x4", "--max_new_tokens=6", "--steps=1", "--repeats=1", "--ranks=1", "--dtype=fp32", "--peers=trl_fp32"]
    _, figures = said(capsys, "--stage=grpo", f"--run={tmp_path / 'run'}", *options)
    assert figures["rates"].keys() == {"nanoRFT", "TRL's GRPOTrainer, fp32"} and figures["settings"]["task"] == "unit_conversion"
    assert set(figures["peak_memory_gb"]) == {"nanoRFT", "trl_fp32"}


def test_train_beside_a_plain_loop(in_process, capsys):
    out, figures = said(capsys, "--stage=train", "--batch_size=4", "--block_size=16", "--steps=2", "--repeats=1", "--peers=nanogpt",
                        "--dtype=fp32")
    assert figures["model"] == "gpt2-1m" and figures["settings"]["optimizer"] == "adamw"
    assert figures["rates"]["nanogpt"][0] > 0 and out.count("times as fast") == 1
    with pytest.raises(BadInput, match="give --model=gpt2"):
        bench.main([*TRAIN, "--device=cpu", "--peers=nanogpt"])


def test_fine_tuning_of_a_trained_model(in_process, capsys, tmp_path):
    train_tiny(tmp_path)
    _, record = said(capsys, "--stage=sft", f"--run={tmp_path / 'run'}", "--steps=1", "--repeats=1", "--batch_size=4")
    assert record["settings"]["dataset"] == "examples:unit_conversion" and record["peak_memory_gb"]["nanoRFT"] > 0
    rows = peers.training_rows({"data": "examples:unit_conversion", "source": str(tmp_path / "run")})
    expected = examples.read("examples:unit_conversion", Tokenizer(tmp_path))
    assert [row["input_ids"] for row in rows] == [example.ids.tolist() for example in expected]


def test_sampling_beside_transformers(capsys):
    pytest.importorskip("transformers")
    out, figures = said(capsys, "--stage=generate", "--model=llama-1m", "--work=2x2,3x1", "--prompt_tokens=8", "--max_new_tokens=4",
                        "--repeats=2", "--dtype=fp32", "--peers=generate,static")
    assert {name: len(rates) for name, rates in figures["rates"].items()} == {
        f"{case} {side}": 2 for case in ("2x2", "3x1") for side in ("nanoRFT", "generate", "static")}
    assert out.count("times as fast") == 4 and "left out" not in out


def test_rejection_sampling_beside_transformers(in_process, capsys):
    pytest.importorskip("transformers")
    out, figures = said(capsys, "--stage=datagen", "--model=llama-1m", "--num_questions=3", "--oversample=2", "--max_new_tokens=4",
                        "--repeats=1", "--dtype=fp32", "--ranks=1", "--peers")
    assert figures["rates"].keys() == {"nanoRFT", *(f"loop over generate, {n} sequences at a time" for n in (32, 512))}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in figures["rates"].values()) and out.count("times as fast") == 2


def test_the_plain_loop_is_our_gpt2():
    """The same number of weights, and the same loss when they have the same values."""
    c = GPTConfig(**synthetic.SHAPES["gpt2-1m"] | {"vocab_size": 320})           # without padding, which only ours leaves out of the loss
    ours, theirs = synthetic.random_model(c, hardware.setup("cpu", "fp32")), peers.PlainGPT(vars(c))
    assert peers.is_gpt2(vars(c)) and not peers.is_gpt2(TINY) and ours.n_params() == sum(p.numel() for p in theirs.parameters())
    called = {"token_embedding": "tokens", "position_embedding": "positions", "attention_norm": "norm1", "mlp_norm": "norm2",
              "final_norm": "norm", "attention.": "", "mlp.": ""}
    weights = ours.state_dict()
    for name, other in called.items():
        weights = {key.replace(name, other): value for key, value in weights.items()}
    theirs.load_state_dict(weights)
    x, y = torch.randint(320, (2, 3, 20))
    assert ours.loss(x, y).item() / y.numel() == pytest.approx(theirs(x, y).item(), rel=1e-5)


def test_both_sides_read_the_same_ids(tmp_path):
    """A prompt of n characters is n tokens, and what the model may sample is the same text on both sides."""
    transformers = pytest.importorskip("transformers")
    synthetic.write_tokenizer(tmp_path, 300)
    ours, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("how far 0 12", "naïve\n\t 漢"):
        assert ours.prompt_ids(text) == theirs(text=text)["input_ids"] and len(ours.prompt_ids(text)) == len(text.encode())
    assert ours.n_vocab == len(theirs) == 300 and ours.stop == [299] and theirs.eos_token_id == 299
    ids = list(range(299))
    assert ours.text_of(ids) == theirs.batch_decode([ids], skip_special_tokens=True)[0]


@pytest.mark.parametrize("shape", [TINY, TINY | {"tied_head": True}, TINY | synthetic.GPT2], ids=["llama", "tied", "gpt2"])
def test_never_ends(shape):
    torch.manual_seed(0)
    model = synthetic.random_model(GPTConfig(**shape | {"n_layer": 8, "n_embd": 128, "block_size": 32}), hardware.setup("cpu", "fp32"))
    synthetic.suppress_eos(model, 299)
    model = model.bfloat16()
    if model.cos is not None:
        model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    p = model(torch.randint(299, (8, 32))).softmax(-1)
    assert isinstance(model, GPT) and p[..., 299].max() == 0 and p[..., :299].max() < 0.5


def test_rewards(capsys):
    out, figures = said(capsys, "--stage=rewards", "--verifier_ms=0.1", "--repeats=2")
    assert "256 completions, 0.1 ms each, 2 processes" in out and "times as fast" in out
    assert {name: len(rates) for name, rates in figures["rates"].items()} == {"nanoRFT": 2, "one after the other": 2}


@pytest.mark.parametrize("argv, sentence", [
    (["--stage=train", "--run=out/x"], "--run has no effect in --stage=train, only in sft, datagen, grpo"),
    (["--stage=train", "--work=3x3"], "--work has no effect"), (["--stage=generate", "--ranks=2"], "--ranks has no effect"),
    (["--stage=train", "--profile", "--repeats=2"], "leave --repeats and --ranks out"), (["--stage=sft", "--peers", "--ranks=2"], "leave --ranks out"),
    (["--stage=rewards", "--output=/dev/null/x.json"], "can't be written"), (["--stage=grpo", "--work=8x8,2x2"], "write for example --work=8x8"),
    (["--stage=grpo", "--prompt_tokens=300"], "has 256 positions"),
    (["--stage=grpo", "--work=8x1"], "at least 2"), (["--stage=train", "--bath_size=3"], "did you mean batch_size"),
    (["--stage=generate", "--varied_prompts"], "varied_prompts has no effect in --stage=generate"),
    (["--batch_size=3"], "--batch_size is not an option"), (["--stage=train", "--max_steps=3"], "give --steps= instead"),
    (["--stage=sft", "--dataset=x.json"], "leave it out"), (["--stage=grpo", "--eval_interval=2"], "leave it out"),
    (["--ladder"], "--ladder has no effect in --stage=overview, only in train, sft, grpo"),
    (["--stage=train", "--ladder", "--ablate"], "give one of them"), (["--stage=train", "--ladder", "--peers"], "leave --peers out"),
    (["--stage=rewards", "--peers"], "has no peers"), (["--stage=train", "--peers=trl"], "choose from nanogpt, trainer"),
    (["--stage=train", "--profile", "--ranks=2"], "one process"),
    (["--stage=train", "--peers=nanogpt", "--dataset=x.txt"], "leave --dataset out"), (["--stage=train", "--output=x.txt"], "should end in .json")])
def test_bad_input(argv, sentence):
    with pytest.raises(BadInput, match=sentence):
        bench.main(argv)


def test_only_files_of_an_earlier_record_are_replaced(tmp_path):
    for name in ("f.json", "f.trace.json"):
        (tmp_path / name).write_text("precious")
    with pytest.raises(BadInput, match="f.json exists"):
        bench.main(["--stage=rewards", "--output=f.json"])
    assert (tmp_path / "f.json").read_text() == "precious"
    record = {"command": "python bench.py --output=f.json"}
    (tmp_path / "f.json").write_text(json.dumps(record))
    with pytest.raises(BadInput, match="f.trace.json exists"):
        bench.check_output(tmp_path / "f.json")
    (tmp_path / "f.json").write_text(json.dumps(record | {"trace": "f.trace.json"}))
    bench.check_output(tmp_path / "f.json")


def test_a_script_s_own_sentence():
    """What its Config admits and the script refuses: the process's sentence and exit code are passed on."""
    with pytest.raises(BadInput, match="^n_embd=32 is not divisible by n_head=3: change one of them.$"):
        bench.main([*TRAIN, "--n_head=3", "--device=cpu"])
