"""Files that someone edited or damaged, and knobs that no one can mean: a sentence, at once, and never a traceback."""
import dataclasses
import hashlib
import json
import math
import runpy
import shutil
import sys
import time

import pytest
import torch

import datagen
import eval as evaluation
import forked
import grpo
import hf
import hub.weights
import hub.architectures
import sample
import tasks
import train
from conftest import ROOT, environment
from doctor import plot
from engine import Sampling
from layers.lora import adapters, add_lora
from model import GPT, GPTConfig
from rollouts import questions
from runtime import checkpoint, config, guard, hardware, recovery
from runtime.config import BadInput
from runtime.log import check_installed
from runtime.run import Run
from runtime.state import Progress
from tasks import _questions, countdown_think, gsm8k, gym
from text import examples, prompts, sources
from text.tokenizer import Tokenizer, TokenizerJson

DEEP = "[" * 100_000
JUNK = (None, "two", [], [[1]], {}, -1, 0, 1.5, 10**12, 10**40, True, math.nan)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run folder of adapters beside a model, and one of all its weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "sums.txt"
    text.write_text("1 + 1 = 2\n" * 500)
    model, about = GPT(GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16)), {"tokenizer": Tokenizer("bytes").describe()}
    for name, rank in (("run", 0), ("adapted", 2)):
        lora, state = {"rank": 2, "alpha": None, "linears": ["qkv"]} if rank else None, {"optimizer": "muon"}
        if rank:
            (folder / name).mkdir()
            checkpoint.save_base(folder / name, model.state_dict())
            add_lora(model, **lora)
        knobs = dataclasses.asdict(train.Config(n_layer=1, n_head=2, n_embd=16, block_size=64, lora_rank=rank, dataset=str(text), data_dir=str(folder / "data")))
        checkpoint.save(folder / name, 4, adapters(model) or model.state_dict(), state, {}, 1.0, config=knobs)
        (folder / name / "model.json").write_bytes(config.seal(about | {"architecture": dataclasses.asdict(model.config), "lora": lora}))
        (folder / name / "config.json").write_bytes(config.seal(knobs))
    return folder


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def edited(path, keys, value):
    """Set a value in a sealed file; an empty `value` removes the key. The new checksum is right, so that the
    content itself has to be checked."""
    content = config.read_sealed(path, "")
    *first, last = keys.split(".")
    place = content
    for key in first:
        place = place[key]
    place.pop(last, None)
    place |= {last: v for v in value}
    path.write_bytes(config.seal(content))


def use(folder):
    found = hub.find(folder)
    found.tokenizer()
    return found.load()


def sentence(call, words=""):
    """The BadInput that a call ends in, on one line and within a few seconds."""
    began = time.perf_counter()
    with pytest.raises(BadInput, match=words) as e:
        call()
    assert "\n" not in str(e.value) and len(str(e.value)) < 800 and time.perf_counter() - began < 40
    return str(e.value)


# --- edited run folders ---

ARCHITECTURE = [f.name for f in dataclasses.fields(GPTConfig) if f.name not in (
    "norm_eps", "rope_theta", "logit_softcap", "dropout", "n_kv_head", "head_dim", "mlp_hidden", "rope_scaling", "qk_norm")]


@pytest.mark.parametrize("key", ["architecture", "tokenizer", *(f"architecture.{name}" for name in ARCHITECTURE), "architecture.extra"])
def test_no_value_in_a_model_json_is_a_traceback(run, key):
    """All of these are refused, but for those that a field may have."""
    flag = key.split(".")[-1] in ("qkv_bias", "o_bias", "mlp_bias", "tied_head")
    before = (run / "model.json").read_text()
    for value in JUNK:
        edited(run / "model.json", key, [value])
        sentence(lambda: use(run), None if flag and value is True else "model.json")
        (run / "model.json").write_text(before)
    if "." not in key:
        edited(run / "model.json", key, [])
        sentence(lambda: use(run), "model.json")


@pytest.mark.parametrize("key", ["name", "n_vocab", "eos", "stop", "pad", "template"])
def test_what_describes_a_tokenizer_is_checked_as_knobs_are(run, key):
    before = (run / "model.json").read_text()
    for value in ([], [{"name": 3}], *([v] for v in JUNK)):
        edited(run / "model.json", f"tokenizer.{key}", value)
        if value != [0] or key not in ("eos", "pad"):          # that is an id
            if value != [[]] or key != "stop":
                sentence(lambda: use(run))
        (run / "model.json").write_text(before)
    for template in ({"name": "chatml", "system": None}, {"name": "jinja", "text": "{{ messages }}"}):
        edited(run / "model.json", "tokenizer.template", [template])
        sentence(lambda: use(run), "describes an unknown tokenizer")


@pytest.mark.parametrize("value", ["two", [1], {"rank": 2}, {"rank": "2", "alpha": None, "linears": ["qkv"]}, {"rank": 10**12, "alpha": 1, "linears": ["up"]},
                                   {"rank": 2, "alpha": "x", "linears": ["qkv"]}, {"rank": 2, "alpha": 1, "linears": [[]]}, {"rank": 3, "alpha": 1, "linears": ["qkv"]}])
def test_adapters_that_a_model_json_misdescribes(run, value):
    folder = run.parent / "adapted"
    assert use(folder)
    edited(folder / "model.json", "lora", [value])
    sentence(lambda: use(folder), "The checkpoint of step 4 .* can't be loaded")


MAINS = {
    "sample": lambda run: sample.main([run]), "hf": lambda run: hf.main([run, f"{run}-out"]),
    "eval": lambda run: evaluation.main([run, "--task=arithmetic:1", "--num_questions=2"]),
    "train": lambda run: train.main([f"--init_from={run}", f"--out_dir={run}-new", "--dataset=task:arithmetic"]),
    "resume": lambda run: train.main(["--init_from=resume", f"--out_dir={run}"]),
    "grpo": lambda run: grpo.main([f"--init_from={run}", f"--out_dir={run}-new", "--task=arithmetic:1", "--num_questions=9"]),
    "datagen": lambda run: datagen.main([f"--init_from={run}", f"--output={run}.json", "--task=arithmetic:1", "--num_questions=2"]),
}


@pytest.mark.parametrize("main", MAINS)
def test_every_script_refuses_an_edited_run_folder(run, main):
    before = (run / "model.json").read_text()
    for text in (DEEP, "[]", "null", "{", "{}", before.replace('"n_layer": 1', '"n_layer": "two"')):
        (run / "model.json").write_text(text)
        sentence(lambda: MAINS[main](str(run)), "model.json")
    (run / "model.json").write_text(before)
    for text in (DEEP, '{"sha256": []}', '{"sha256": {"model.safetensors": 3}}'):
        (run / "checkpoints/step_00000004/meta.json").write_text(text)
        sentence(lambda: MAINS[main](str(run)), "no intact checkpoint")
    assert not list(run.parent.glob("run-*")) and not run.with_suffix(".json").exists()


@pytest.mark.parametrize("key, value", [("val_loss", "two"), ("val_loss", []), ("val_loss", 10**400), ("sha256", None), ("sha256", [])])
def test_an_edited_meta_json_is_a_damaged_checkpoint(run, key, value):
    edited(run / "checkpoints/step_00000004/meta.json", key, [value])
    assert checkpoint.best(run) is None and checkpoint.damage(run, 4) == "meta.json is missing or unreadable"


def test_train_py_goes_on_from_a_run_of_grpo_py(run):
    """Whose config.json has no architecture: it comes from model.json."""
    (run / "config.json").write_bytes(config.seal(dataclasses.asdict(grpo.Config())))
    assert train.model_options(run) == {k: getattr(GPTConfig(257, 64, 1, 2, 16), k, False) for k in train.ARCHITECTURE} | {"block_size": 64}


# --- weights ---

def signed(folder):
    """Make a checkpoint's digests those of the files that are there."""
    path = folder / "checkpoints/step_00000004/meta.json"
    digests = {name: hashlib.sha256((path.parent / name).read_bytes()).hexdigest() for name in ("model.safetensors", "optimizer.safetensors", "state.json")}
    edited(path, "sha256", [digests])


@pytest.mark.parametrize("spoil", [lambda p: p.write_bytes(p.read_bytes()[:200]), lambda p: p.write_bytes(b"\xff" * 5000), lambda p: p.write_bytes(b""),
                                   lambda p: (p.unlink(), p.mkdir())], ids=["cut short", "garbage", "empty", "a folder"])
def test_weights_that_are_none(run, tmp_path, spoil):
    weights = run / "checkpoints/step_00000004/model.safetensors"
    shutil.copytree(run, tmp_path / "other")
    spoil(weights)
    sentence(lambda: use(run), "no intact checkpoint")
    if weights.is_file():
        signed(run)
        sentence(lambda: use(run), "The checkpoint of step 4 .* can't be loaded")
        sentence(lambda: MAINS["resume"](str(run)), "can't be loaded")
    hub.weights.export(hub.load(tmp_path / "other"), tmp_path / "exported")
    spoil(tmp_path / "exported/model.safetensors")
    sentence(lambda: hub.load(tmp_path / "exported"), "model.safetensors can't be read")


def test_a_state_that_is_none_or_of_another_model(run):
    step = run / "checkpoints/step_00000004"
    good = (step / "state.json").read_bytes()
    for name, content in (("state.json", b"\xff" * 500), ("state.json", b""), ("state.json", b"[]"), ("state.json", b"{}"),
                          ("optimizer.safetensors", b"\xff" * 500), ("optimizer.safetensors", b"")):
        (step / "state.json").write_bytes(good)
        (step / name).write_bytes(content)
        signed(run)
        sentence(lambda: MAINS["resume"](str(run)), "The checkpoint of step 4 .* can't be loaded")
    edited(run / "model.json", "architecture.mlp_hidden", [32])
    sentence(lambda: use(run), "can't be loaded .*size mismatch")


def test_files_of_another_user_are_named(run, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(checkpoint, "sha256", refused)
    sentence(lambda: use(run), "no intact checkpoint .*model.safetensors can't be read: Permission denied")
    sentence(lambda: use(run.parent / "adapted"), "no intact checkpoint")
    sentence(lambda: checkpoint.load_base(run.parent / "adapted"), "Permission denied")


# --- Hugging Face's files ---

LLAMA = dict(model_type="llama", hidden_act="silu", vocab_size=320, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, intermediate_size=64)
GPT2 = dict(model_type="gpt2", activation_function="gelu_new", vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2)


@pytest.mark.parametrize("about, change, words", [
    *((LLAMA, {key: value}, "config.json describes no model") for key in (
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
      for value in ("2", 0, -1, 2.0, 10**12, [[2]])),
    *((GPT2, {key: "2"}, "config.json describes no model") for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")),
    *((LLAMA, {"rope_theta": value}, "rope_theta") for value in (0, -1, "1e4", math.inf, [1])),
    *((LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": value}}, "factor") for value in (0, -1, "2", [2])),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding_attention"), (LLAMA, {"layer_types": [["a"]]}, "no model"),
    (LLAMA, {"rope_scaling": [1]}, "no model"), (LLAMA, {"hidden_act": ["silu"]}, "no model"), (LLAMA, {"model_type": []}, "model type"),
    (LLAMA, {"attention_bias": "yes"}, "qkv_bias=yes"), (LLAMA, {"rms_norm_eps": "small"}, "norm_eps"), (LLAMA, {"tie_word_embeddings": 3}, "tied_head")], ids=str)
def test_a_config_json_of_absurd_values(tmp_path, about, change, words):
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    sentence(lambda: hub.find(tmp_path), words)


def test_a_config_json_with_null_or_full_attention_is_read_as_before(tmp_path):
    for change in ({"layer_types": ["full_attention"] * 2}, {"layer_types": None}, {"head_dim": None, "attention_bias": None, "mlp_bias": None}, {"rope_theta": 10000}):
        assert hub.architectures.read_config(LLAMA | change) == hub.architectures.read_config(LLAMA)


@pytest.mark.parametrize("name, text, words", [
    ("config.json", DEEP, "config.json can't be read"), ("model.safetensors.index.json", DEEP, "can't be read"),
    *((name, DEEP, f"{name} can't be read") for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")),
    ("tokenizer.json", DEEP, "not a readable tokenizer.json")])
def test_other_files_nested_deep(run, tmp_path, name, text, words):
    folder = tmp_path / "exported"
    hub.weights.export(hub.load(run), folder)
    if "token" in name or "generation" in name:
        import tokenizers
        tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    (folder / name).write_text(text)
    if "index" in name:
        (folder / "model.safetensors").unlink()               # which counts before an index
    sentence(lambda: hub.load(folder) if "index" in name else use(folder), words)


# --- rows of examples and questions ---

@pytest.mark.parametrize("name, text, words", [
    ("a.json", DEEP, "can't be read"), ("a.jsonl", '{"prompt": "a", "completion": "b"}\n' + DEEP, "Line 2 of .* can't be read"),
    *(("a.json", f'[["q", 1, "r"], ["q", {value}, "r"]]', "Row 2 of .* finite number") for value in ("NaN", "Infinity", "-Infinity", "1e999"))])
def test_examples(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    sentence(lambda: examples.read(tmp_path / name, Tokenizer("bytes")), words)


@pytest.mark.parametrize("text, words", [(DEEP, "Line 1 of .* can't be read"), ('{"prompt": "a", "answer": NaN}', "Row 1 of .* not NaN"),
                                         ('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": -Infinity}', "Row 2 of"),
                                         ('{"prompt": "a"}\n{"prompt": "b\\ud800"}', "Row 2 of .*questions.jsonl .*lone surrogate"),
                                         ('{"prompt": "a"}\n{"prompt": "b", "answer": 1}', 'Row 1 of .*no "answer"'),
                                         ('{"prompt": "a", "tools": [{"name": "f"}]}', 'Row 1 of .*"tools": '),
                                         ('{"prompt": "a", "question": "b"}', 'Row 1 of .*"prompt" and "question" differ'),
                                         ('{"prompt": [{"role": "assistant", "content": "a"}]}', "Row 1 of .*a message of the user"),
                                         ('{"prompt": "a", "system": 1}', 'Row 1 of .*"system" should be a text'),
                                         *((f'{{"prompt": "a", "answer": 3}}\n\n{row}', "Row 2") for row in (
                                             '{"answer": 3}', '["the", 3]', '{"prompt": 3, "answer": 3}')), ("\n", "no question")])
def test_questions(tmp_path, text, words):
    (tmp_path / "questions.jsonl").write_text(text)
    sentence(lambda: questions.read_questions(tmp_path / "questions.jsonl", 4), words)


def test_questions_have_an_answer_or_none_has_and_perhaps_a_system_message(tmp_path):
    path = tmp_path / "q.jsonl"
    told = [{"role": "system", "content": "Shout."}, {"role": "user", "content": "a"}]
    rows = [{"prompt": told}, {"prompt": "a", "system": "Whisper."}, {"prompt": told[1:], "level": 3}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = questions.read_questions(path, 0)
    assert [(q["question"], q.get("system"), q.get("level")) for q in found] == [("a", "Shout.", None), ("a", "Whisper.", None), ("a", None, 3)]
    with pytest.raises(BadInput, match="^Row 1 of .*it has no 'answer', and the task arithmetic reads that"):
        questions.read_questions(path, 0, tasks.load("arithmetic"))
    raw = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
    gsm8k = tasks.load(f"gsm8k:{path}")
    path.write_text(json.dumps(raw))                          # as GSM8K's own files have them
    ((question,), _) = questions.read_questions(path, 0, gsm8k)
    assert [gsm8k.reward(question, f"<answer>{said}</answer>")[0] for said in ("42", "6")] == [1, 0]


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, "utf-8-sig")
        return tmp_path / name
    assert config.load(train.Config, [str(write("own.py", "n_layer = 3"))]).n_layer == 3
    pairs = [examples.read(write(name, text), Tokenizer("bytes")) for name, text in (
        ("a.json", '[["q", 1, "r"]]'), ("a.jsonl", '{"prompt": "q", "completion": "r"}'))]
    assert [bytes(example.ids[example.is_target][:1].tolist()) for (example,) in pairs] == [b"r", b"r"] and examples.is_examples_file(str(tmp_path / "a.jsonl"))
    assert len(questions.read_questions(write("q.jsonl", '{"prompt": "a", "answer": 1}'), 0)[0]) == 1
    for spec, text in (("unit_conversion", '[["How many gram are there per 6 kg?", 6000]]'), ("gsm8k", '{"question": "1 + 1?", "answer": "#### 2"}'),
                       ("countdown_think", '{"target": 3, "nums": [1, 2]}\n' * 30)):
        path = write(f"{spec}.{'json' if spec == 'unit_conversion' else 'JSONL'}", text)
        assert tasks.load(f"{spec}:{path}").questions("train", 0, 1, fewer=True)


def test_a_retry_file_that_no_run_wrote_is_passed_over(tmp_path):
    def after(content):
        (tmp_path / "retry.json").write_bytes(content)
        run = Run(train.Config(out_dir=str(tmp_path)), hardware.setup("cpu", "fp32"), None, [], Progress(32, 8, 1))
        run.apply(recovery.read_retry_file(tmp_path))
        return run.state.micro_batch, run.state.lr_factor, run.nonfinite.rolled_back, run.hardware.dtype
    for content in (DEEP.encode(), b"[]", b'{"batch_size": 32, "micro_batch": 4}', config.seal({"batch_size": 16, "micro_batch": 4})):
        assert after(content) == (8, 1.0, False, "fp32"), content
    assert after(config.seal({"batch_size": 32, "micro_batch": 4})) == (4, 1.0, False, "fp32")
    assert after(config.seal({"batch_size": 32, "lr_factor": 0.5, "dtype": "bf16"})) == (8, 0.5, True, "bf16")


def test_a_note_keeps_what_no_checkpoint_holds_yet(tmp_path):
    run = Run(train.Config(out_dir=str(tmp_path)), hardware.setup("cpu", "fp32"), None, [], Progress(32, 8, 1))
    for changes in (dict(lr_factor=0.5, dtype="bf16"), dict(micro_batch=4)):
        with pytest.raises(guard.Retry):
            recovery.retry(run, "Once more.", **changes)
    run.apply(recovery.read_retry_file(tmp_path))
    found = run.state.micro_batch, run.state.lr_factor, run.nonfinite.rolled_back, run.hardware.dtype
    assert found == (4, 0.5, True, "bf16")


# --- packages ---

NEEDS = {
    "tokenizers": lambda folder: TokenizerJson(folder / "tokenizer.json"),
    "matplotlib": lambda folder: plot.draw({}, "steps", folder / "a.png"),
    "datasets": lambda folder: sources.find_on_hub("org/name", "text"),
    "pyarrow": lambda folder: sources.Parquet(folder / "a.parquet", "text"),
    "reasoning-gym": lambda folder: gym.library(),
    "datasets ": lambda folder: gsm8k.questions("train"),
    "datasets  ": lambda folder: countdown_think.everything(None),
    "pyarrow ": lambda folder: list(_questions.rows(folder / "a.parquet", None)),
    "chess": lambda folder: runpy.run_path(str(ROOT / "tasks/chess_world.py"))["check"](None),
    "wandb": lambda folder: check_installed(False, True),
}


@pytest.mark.parametrize("package", NEEDS)
def test_a_package_that_is_installed_and_fails_is_not_called_missing(tmp_path, monkeypatch, package):
    name = package.strip().replace("-", "_")
    for module in [*sys.modules]:
        if module.partition(".")[0] == name:
            monkeypatch.delitem(sys.modules, module)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('numpy 1.19 is too old')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fails = rf"the package {package.strip()} is installed, but its import fails \(numpy 1.19 is too old\)"
    with pytest.raises((BadInput, ValueError), match=fails):
        NEEDS[package](tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((BadInput, ValueError), match=f"the package {package.strip()} is missing: pip install {package.strip()}"):
        NEEDS[package](tmp_path)


# --- knobs ---

TEXT = ["--dataset=task:arithmetic"]
SCRIPTS = {"train": train, "grpo": grpo, "sample": sample, "eval": evaluation, "datagen": datagen}


@pytest.mark.parametrize("main, arguments, words", [
    *(("train", [*TEXT, knob], words) for knob, words in (
        ("--batch_size=1e30", "--batch_size is too large"), ("--batch_size=1e18", "sequences a step"), ("--gradient_accumulation_steps=1e10", "sequences a step"),
        ("--n_layer=99999999", "n_layer=99999999 should be a whole number from 1 to 1,000"), ("--n_embd=65536", "weights of this model alone"),
        ("--n_embd=1e10", "n_embd"), ("--block_size=1e12", "block_size"), ("--num_workers=9999", "--num_workers=9999 is too large"),
        ("--prefetch=1e9", "too large"), ("--min_lr=0.1", "--min_lr=0.1 is above --learning_rate=0.01"),
        ("--lora_alpha=4", "--lora_alpha=4.0 has no effect without --lora_rank"), ("--lora_linears=up", "--lora_linears=up has no effect without --lora_rank"),
        ("--prompt=\udcff{}", "is not UTF-8"))),
    ("train", [*TEXT, "--init_from=RUN", "--lora_rank=17"], "rank of 17 exceeds the model's 16 channels"),
    *(("grpo", ["--init_from=RUN", "--task=arithmetic:1", knob], words) for knob, words in (
        ("--min_lr=1", "is above --learning_rate=0.0003"), ("--lora_linears=up", "has no effect without --lora_rank"), ("--lora_rank=17", "17 exceeds the model's 16 channels"),
        ("--reward_workers=9999", "too large"), ("--k_samples=1e9", "--k_samples=1000000000 is too large"), ("--num_questions=1e9", "--num_questions"),
        ("--few_shot=5000", "--few_shot=5000 is too large"), ("--few_shot=9", "lower --few_shot"))),
    *(("sample", ["RUN", knob], words) for knob, words in (
        ("--top_p=2", "--top_p=2.0 is too large: it must be at most 1"), ("--top_p=0", "^top_p=0.0 can't be sampled from: it must be above 0, and at most 1.$"),
        ("--min_p=2", "--min_p"), ("--min_p=-1", "--min_p"), ("--top_k=0", "--top_k"), ("--num_samples=1e12", "--num_samples"), ("--prompt=\udcff", "is not UTF-8"),
        ("--prompt=" + 99 * "a", "A prompt of 99 tokens can't be continued in the 64 positions of the model: shorten it"))),
    *(("eval", ["RUN", "--task=arithmetic:1", knob], words) for knob, words in (
        ("--top_p=2", "--top_p"), ("--num_questions=1e12", "--num_questions"), ("--num_questions=1e4", "lower --num_questions"),
        ("--reward_workers=9999", "too large"))),
    ("eval", ["RUN", "--task=arithmetic:1", "--num_questions=9", "--few_shot=500"], "lower --few_shot, which is 500"),
    ("eval", ["RUN", "--task=arithmetic:1", "--temperature=1", "--num_samples=1e9"], "--num_samples"),
    *(("datagen", ["--init_from=RUN", "--output=OUT.json", "--task=arithmetic:1", "--num_questions=9", knob], words) for knob, words in (
        ("--top_p=2", "--top_p"), ("--few_shot=500", "lower --few_shot, which is 500"), ("--oversample=1e9", "--oversample"), ("--num_questions=1e9", "--num_questions"))),
], ids=str)
def test_knobs(run, tmp_path, monkeypatch, main, arguments, words):
    monkeypatch.chdir(tmp_path)
    sentence(lambda: SCRIPTS[main].main([a.replace("RUN", str(run)).replace("OUT", str(tmp_path / "o")) for a in arguments]), words)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("knobs, words", [
    (dict(top_p=2), "^top_p=2 can't be sampled from: it must be above 0, and at most 1.$"), (dict(temperature=-1), "^temperature=-1 .* at least 0.$"),
    (dict(temperature=math.nan), "^temperature=nan"), (dict(top_k=0), "^top_k=0 "), (dict(min_p=1.5), "^min_p=1.5 .* from 0 to 1.$")])
def test_sampling_names_what_can_not_be(knobs, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**knobs)


def test_what_max_new_tokens_is_clipped_to_is_said(run, capsys):
    assert prompts.context_of(10, 54, 64) == 64 and capsys.readouterr().err == ""
    assert prompts.context_of(10, 55, 64) == 64
    assert capsys.readouterr().err == ("--max_new_tokens=55 is more than the model's 64 positions leave: after a prompt of 10 tokens an answer ends "
                                       "at 54.\n")
    sample.main([str(run), "--prompt=abc", "--max_new_tokens=999", "--dtype=fp32"])
    said = capsys.readouterr()
    assert said.err == "--max_new_tokens=999 is more than the model's 64 positions leave: after a prompt of 3 tokens an answer ends at 61.\n"
    assert said.out.startswith("abc")


@pytest.mark.parametrize("ranks, words", [((1,), "GPU 1 does not exist"), ((0, 1), "no such file")])
def test_what_is_wrong_on_any_rank_is_said_once(ranks, words):
    """By whichever rank finds it: the second of two may lack a GPU, and a file is missing for both."""
    program = f"""
from runtime import distributed, guard
from runtime.config import BadInput
def main(argv):
    distributed.init()
    distributed.on_any_rank(False)
    if distributed.rank() in {ranks}:
        raise BadInput("{words}")
guard.run(main)
"""
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr == f"error: {words}\n"
