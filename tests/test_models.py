"""Every script with an existing model from a folder or the hub: train, resume, adapt, evaluate, sample,
export."""
import io
import json
import shutil
import subprocess
import sys

import pytest
import torch

import datagen
import eval as evaluation
import forked
import hf
import hub.weights
import local_hub
import sample
import tasks
import train
from conftest import ROOT, called, command, environment, flags, in_process, largest_difference, metrics, trained, weights
from hub import find, load
from rollouts.pipeline import requests_of
from runs import summary
from runtime import checkpoint
from runtime.config import BadInput
from test_tokenizer import SMOL, write
from text import examples
from text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

MAINS = {"datagen.py": datagen.main, "eval.py": evaluation.main, "hf.py": hf.main, "sample.py": sample.main}
TUNE = dict(block_size=32, batch_size=4, max_steps=8, eval_interval=8, save_interval=4, log_interval=1, warmup_steps=2,
            learning_rate=0.003, keep_last=9, eval_tokens=640, dtype="fp32")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small Llama with a chat model's tokenizer, as transformers saves them."""
    folder = write(tmp_path_factory.mktemp("hf") / "small-chat", "smol", chat=SMOL)
    n = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=n, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def tune(out_dir, text, source, **options):
    return trained(out_dir, text, defaults=TUNE, init_from=source, **options)


def start(name, *arguments, ranks=1, **options):
    """Return what subprocess.run would of a script, in this process if it can be."""
    if ranks == 1 and not options:
        return called(MAINS[name], [str(argument) for argument in arguments])
    line = command("", ranks, name, defaults={})[:-1] + [str(argument) for argument in arguments]
    return forked.run(line, env=environment(), text=True, capture_output=True, timeout=120, **options)


def script(name, *arguments, **options):
    """Return the output of a script; its last line as an object with --json."""
    done = start(name, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if "--json" in arguments else done.stdout


def refused(main, words, *arguments, **options):
    """Assert that a script's main, in this process, ends with code 2 and one sentence."""
    _, said = in_process(main, [*map(str, arguments), *flags(**options)], code=2)
    assert words in said and said.count("\n") == 1, said


@pytest.fixture(scope="module")
def tuned(source, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    tune(folder, text, source)
    return folder


def test_a_run_folder_is_self_contained(source, tuned, text, tmp_path):
    """A run can be resumed exactly, and sampled from, when its base model is gone."""
    gone = tmp_path / "small-chat"
    shutil.copytree(source, gone)
    tune(tmp_path / "a", text, gone)
    for folder in (gone, tmp_path / "a" / "checkpoints" / "step_00000008"):
        shutil.rmtree(folder)
    trained(tmp_path / "a", text, defaults={}, init_from="resume", max_steps=8)
    assert largest_difference(weights(tmp_path / "a", 8), weights(tuned, 8)) == 0
    assert metrics(tmp_path / "a")[4] == metrics(tuned)[4] and metrics(tuned)[8] < metrics(tuned)[1] - 0.1
    first = json.loads((tuned / "model.json").read_text())
    assert first["architecture"]["mlp"] == "swiglu" and first["tokenizer"]["template"] == {"name": "jinja", "text": SMOL}
    assert script("sample.py", tmp_path / "a", "--prompt=the cat", "--max_new_tokens=4").startswith("the cat")
    for system in ("", "You are a cat."):
        assert find(tuned).tokenizer().prompt_ids("the <|im_end|> cat", system) == Tokenizer(source).prompt_ids("the <|im_end|> cat", system)


def test_adapters_are_saved_alone_and_resumed_exactly(source, text, tmp_path):
    lora = dict(lora_rank=4, lora_linears="qkv,down", dropout=0.1)
    tune(tmp_path / "a", text, source, **lora)
    saved = weights(tmp_path / "a", 8)
    assert {name.split(".")[3] + name[-7:] for name in saved} == {"qkv.lora_a", "qkv.lora_b", "down.lora_a", "down.lora_b"}
    base = checkpoint.load_base(tmp_path / "a")
    assert largest_difference(base, load(source).state_dict()) == 0
    merged = load(tmp_path / "a").state_dict()
    expected = base["blocks.1.mlp.down.weight"] + 2 * saved["blocks.1.mlp.down.lora_b"] @ saved["blocks.1.mlp.down.lora_a"]
    assert torch.allclose(merged["blocks.1.mlp.down.weight"], expected) and not torch.equal(expected, base["blocks.1.mlp.down.weight"])
    assert torch.equal(merged["blocks.1.mlp.up.weight"], base["blocks.1.mlp.up.weight"])
    peft = pytest.importorskip("peft")
    hub.weights.export_adapters(tmp_path / "a", tmp_path / "adapter", source)
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert (theirs(torch.arange(9)[None]).logits - load(tmp_path / "a")(torch.arange(9)[None])).abs().max() < 1e-4
    with pytest.raises(BadInput, match="has no adapters"):
        hub.weights.export_adapters(source, tmp_path / "none")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step_00000008")
    trained(tmp_path / "b", text, defaults={}, init_from="resume")
    assert largest_difference(weights(tmp_path / "b", 8), saved) == 0
    evaluated = trained(tmp_path / "a", text, defaults={}, init_from="resume", eval_only=True)
    assert f"val loss {metrics(tmp_path / 'a', 'val_loss')[8]:.4f}" in evaluated.stdout
    trained(tmp_path / "c", text, defaults=TUNE, init_from=tmp_path / "a", max_steps=1, learning_rate=0.0)
    assert largest_difference(weights(tmp_path / "c", 1), merged) == 0
    content = bytearray((tmp_path / "b" / "base.safetensors").read_bytes())
    content[-9] ^= 1
    (tmp_path / "b" / "base.safetensors").write_bytes(content)
    for options, words in ((dict(max_steps=9), "base.safetensors, the weights that the run started from"),
                           (dict(lora_alpha=800.0), "lora_alpha=800.0 contradicts"), (dict(lora_rank=8), "lora_rank=8 contradicts")):
        refused(train.main, words, out_dir=tmp_path / "b", dataset=text, init_from="resume", **options)


def test_adapters_train_the_same_on_two_ranks(source, text, tmp_path):
    for ranks in (1, 2):
        tune(tmp_path / str(ranks), text, source, ranks=ranks, lora_rank=4, optimizer="adamw")
    alone, shared = ([*metrics(tmp_path / ranks).values()] for ranks in "12")
    assert alone == pytest.approx(shared, abs=1e-5) and alone[-1] < alone[0] - 0.01


def test_a_tuned_model_is_exported_with_its_tokenizer(tuned, tmp_path):
    script("hf.py", tuned, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = find(tuned)
    ids = ours.tokenizer().prompt_ids("how many?")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "how many?"}], add_generation_prompt=True, tokenize=True,
                                         return_dict=False) == ids
    with torch.no_grad():
        x = torch.tensor([ids])
        assert (model(x).logits - ours.load()(x)).abs().max() < 1e-4
    assert model.generation_config.eos_token_id == ours.tokenizer().eos
    again = find(tmp_path / "out")
    assert again.tokenizer().prompt_ids("how many?") == ids and again.tokenizer().describe() == ours.tokenizer().describe()
    assert largest_difference(again.load().state_dict(), ours.load().state_dict()) == 0


def test_a_model_from_scratch_survives_export_and_import(tmp_path, text):
    trained(tmp_path / "a", text, max_steps=2)
    script("hf.py", tmp_path / "a", tmp_path / "out")
    x = torch.arange(32)[None]
    assert (load(tmp_path / "out")(x) - load(tmp_path / "a")(x)).abs().max() < 1e-6
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), list("the naïve cat".encode())
    assert theirs("the naïve cat").input_ids == ids and theirs.eos_token_id == 256
    assert find(tmp_path / "out").tokenizer().encode("the naïve cat").tolist() == ids
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / name).unlink()
    out = script("sample.py", tmp_path / "out", "--tokenizer=bytes", "--prompt=the", "--max_new_tokens=5", "--temperature=0")
    assert out == script("sample.py", tmp_path / "a", "--prompt=the", "--max_new_tokens=5", "--temperature=0")
    refused(sample.main, "has no tokenizer.json: choose --tokenizer=", tmp_path / "out")
    for options, words in (
            (dict(init_from=tmp_path / "out"), "has no tokenizer.json"), (dict(init_from=tmp_path / "a", tokenizer="gpt2"), "its own tokenizer"),
            (dict(init_from=tmp_path / "out", out_dir=tmp_path / "out", tokenizer="bytes"), "is both --out_dir and --init_from"),
            (dict(out_dir=tmp_path / "out"), "not a run folder"), (dict(lora_rank=4), "needs a pretrained model"), (dict(block_size=64, init_from=tmp_path / "a"), "positions"),
            (dict(init_from=tmp_path / "a", lora_rank=4, lora_linears="qkvv"), "choose from qkv"), (dict(lora_alpha=0.0), "above 0")):
        refused(train.main, words, **dict(out_dir=tmp_path / "b", dataset=text, data_dir=tmp_path) | options)
    refused(hf.main, "not an empty folder", tmp_path / "a", tmp_path / "out")


def test_a_name_goes_through_the_hub_once_and_then_through_its_cache(source, tmp_path):
    shutil.copytree(source, tmp_path / "hub" / "org" / "small-chat")
    code = "import hub; f = hub.find('org/small-chat'); print(f.load().n_params(), f.tokenizer().template['name'])"

    def load_by_name(url, **extra):
        return forked.run([sys.executable, "-c", code], cwd=ROOT, env=local_hub.environment(url, tmp_path / "home") | extra,
                              capture_output=True, text=True, timeout=120)
    with local_hub.serve(tmp_path / "hub") as url:
        assert load_by_name(url).stdout.split()[1:] == ["jinja"]
    assert load_by_name(url).stdout.split()[1:] == ["jinja"]                  # the server is down now
    shutil.rmtree(tmp_path / "home")
    assert "gave no such model (it can't be reached, and the local cache has no copy)" in load_by_name(url, HF_HUB_OFFLINE="1").stderr


# --- eval.py ---

def perplexity_by_hand(folder, ids, block_size, stride):
    """Return the total nats of all tokens but the first by transformers, one token at a time."""
    model, nats = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0
    with torch.no_grad():
        for target in range(1, len(ids)):
            window = max(0, -(-(target - block_size) // stride))
            logits = model(torch.tensor([ids[window * stride:target]])).logits[0, -1]
            nats -= logits.log_softmax(-1)[ids[target]].item()
    return nats


@pytest.mark.parametrize("stride", [24, 7])
def test_perplexity_equals_transformers(source, tmp_path, stride):
    words = "the cat sat on a mat, née 漢字\nand counted 123 of them twice " * 2
    (tmp_path / "a.txt").write_text(words)
    ids = Tokenizer(source).encode(words).tolist()
    arguments = [source, f"--dataset={tmp_path / 'a.txt'}", f"--data_dir={tmp_path / 'd'}", "--block_size=24", f"--stride={stride}", "--json"]
    alone, shared = (script("eval.py", *arguments, ranks=ranks) for ranks in (1, 2))
    expected = perplexity_by_hand(source, ids, 24, stride)
    for found in (alone, shared):
        assert found["nll"] == pytest.approx(expected, rel=1e-5)
        assert (found["tokens"], found["words"], found["bytes"]) == (len(ids) - 1, len(words.split()), len(words.encode()))
        assert found["ppl_token"] == pytest.approx(2.718281828459045 ** (found["nll"] / found["tokens"]))
        assert found["ppl_word"] == pytest.approx(2.718281828459045 ** (found["nll"] / found["words"]))
        assert found["bits_per_byte"] == pytest.approx(found["nll"] / found["bytes"] / 0.6931471805599453)


def test_a_split_is_evaluated_without_touching_the_others(tuned, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.txt").write_bytes(b"\xff not UTF-8")
    (folder / "valid.txt").write_text("the cat sat " * 9)
    (folder / "test.txt").write_text("on a mat")
    line = [tuned, f"--dataset={folder}", f"--data_dir={tmp_path / 'd'}", "--json"]
    valid, test = (script("eval.py", *line, f"--split={s}") for s in ("valid", "test"))
    assert valid["words"] == 27 and test["words"] == 3


@pytest.mark.parametrize("arguments, words", [
    (["--dataset=x.txt"], "Name a model"), (["RUN", "--dataset=nowhere.txt"], "no dataset nowhere"),
    (["RUN", "--dataset=TEXT", "--block_size=300"], "--block_size=300 exceeds the model's"),
    (["RUN", "--dataset=TEXT", "--block_size=8", "--stride=9"], "--stride=9 exceeds the window of 8"),
    (["RUN", "--dataset=TEXT", "--stride=0"], "at least 1"), (["/nowhere", "--dataset=TEXT"], "no folder /nowhere"),
    (["RUN", "--dataset=task:unit_conversion", "--split=test"], "no split test")])
def test_eval_errors_are_one_sentence(tuned, text, tmp_path, arguments, words):
    arguments = [a.replace("RUN", str(tuned)).replace("TEXT", str(text)) for a in arguments]
    refused(evaluation.main, words, *arguments, data_dir=tmp_path)


# --- sample.py ---

def test_ranks_share_the_samples_and_print_the_same(tuned):
    line = [tuned, "--prompt=the", "--num_samples=5", "--max_new_tokens=6", "--deterministic", "--dtype=fp32"]
    alone = script("sample.py", *line)
    assert script("sample.py", *line, ranks=2) == alone and alone.count("---\n") == 5
    few = script("sample.py", *line[:2], "--num_samples=2", *line[3:])
    assert alone.startswith(few)


def test_sampling_errors_are_one_sentence_on_any_rank(tuned):
    for option, words in (("--top_p=0", "can't be sampled from"), (f"--prompt={'the ' * 400}", "can't be continued")):
        refused(sample.main, words, tuned, option)
        done = start("sample.py", tuned, option, ranks=2)
        assert done.returncode and done.stderr.count("error: ") == 1 and words in done.stderr, done.stderr


def test_a_prompt_is_the_question_of_one_task(tuned):
    with pytest.raises(BadInput, match="several tasks: name the one"):
        sample.main([str(tuned), "--task=math:0+code:0", "--prompt=1 + 1?"])
    refused(sample.main, "a chat template already applied", tuned, task="math:0", prompt="<|im_start|>1 + 1?")


def test_interactive_answers_line_by_line_and_a_stop_text_ends_a_sample(tuned):
    line = [tuned, "--max_new_tokens=12", "--temperature=2", "--seed=3", "--dtype=fp32"]   # samples differ

    def completion(*more):
        return script("sample.py", *line, "--prompt=the cat", *more).removeprefix("the cat").removesuffix("\n---\n")
    whole = completion()
    stop = whole[6:9]
    ended = completion(f"--stop={stop}")
    assert stop in ended and len(ended) < len(whole) and whole.startswith(ended)
    out = script("sample.py", *line, "--interactive", input="the cat\n\nthe cat\n")
    assert len(whole) > 8 and out.startswith(whole) and out.rstrip("\n").endswith("\n" + whole)


def test_a_chat_remembers_what_was_said(source, monkeypatch, capsys):
    asked, tokenizer, generate = [], Tokenizer(source), sample.Engine.generate

    def spied(self, requests, progress, sampling, environment):
        asked.append((requests[0].ids, sampling.temperature))
        yield from generate(self, requests, progress, sampling, environment)
    monkeypatch.setattr(sample.Engine, "generate", spied)
    said = b"the cat\n/temperature 0\nand then\n/reset\nthe cat\n/speed 2\n/temperature hot\n/temperature -1\nthe cat\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said)))
    sample.main([str(source), "--chat", "--max_new_tokens=6", "--device=cpu", "--temperature=0.9"])
    (first, warm), (second, cold), (third, _), (_, refused_one) = asked
    assert refused_one == cold                               # an invalid number changes nothing
    assert first == third == tokenizer.prompt_ids("the cat") and (warm, cold) == (0.9, 0)
    answer = second[len(first):]
    assert second[:len(first)] == first and answer[-len(tokenizer.reply_ids("and then", True)):] == tokenizer.reply_ids("and then", True)
    assert 1 <= len(answer) - len(tokenizer.reply_ids("and then", True)) <= 7      # an end behind an answer that was cut off
    error = capsys.readouterr().err
    assert "/speed is no command" in error and "/temperature needs a number" in error


def test_a_task_s_own_question_and_two_models_side_by_side(source, tuned, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    task = tmp_path / "keyed.py"
    task.write_text(KEYED)
    out = script("sample.py", source, f"--versus={tuned}", f"--task={task}", "--max_new_tokens=60", "--device=cpu")
    assert out.startswith("test ") and out.count(" | ") > 2 and "«<" in out and "KeyError" not in out
    refused(sample.main, "--versus is for one prompt", source, versus=tuned, chat=True)


KEYED = '''
TURN_STOP = "e"
MAX_TURNS = 2
def questions(split, seed=0, n=None):
    return [{"question": f"{split} {i}", "answer": "7", "secret": i} for i in range(20)][:n]
def respond(question, text):
    return f"<{question['secret']}>"
def reward(question, completion):
    return 0.0
'''


LADDER = '''
STOP, INSTRUCTION = "e", "Write."
def questions(split, seed=0, n=None):
    return [{"question": f"{split} {i}", "answer": "7"} for i in range(20)][:n]
def solution(question):
    return "the cat e"
def reward(question, completion):
    return float(completion.endswith("e"))
def signature(completion):
    return completion
'''


def test_a_chat_model_runs_the_whole_pipeline(source, tmp_path):
    """Ask with worked examples and an instruction, train without them, by the recipe for SmolLM2."""
    task, out = tmp_path / "letters.py", tmp_path / "rft.json"
    task.write_text(LADDER)
    about = script("datagen.py", f"--init_from={source}", f"--task={task}", f"--output={out}", "--num_questions=12", "--oversample=4",
                              "--temperature=1", "--max_new_tokens=60", "--dtype=fp32", "--json")
    rows, tokenizer = json.loads(out.read_text()), Tokenizer(source)
    assert about["kept"] == len(rows) > 12 and all(question.startswith("train ") for question, _, _ in rows)
    header = json.loads((tmp_path / "rft.attempts.jsonl").read_text().splitlines()[0])
    assert header["config"]["few_shot"] == 4 and header["tokenizer"] == tokenizer.describe()
    trained(tmp_path / "tuned", out, defaults={}, config=ROOT / "config/rft_smollm2_360m.py", init_from=source, block_size=128, num_epochs=1,
            dtype="fp32")
    kept = json.loads((tmp_path / "tuned/config.json").read_text())
    assert (kept["batch_size"], kept["gradient_accumulation_steps"], kept["lora_rank"], kept["learning_rate"]) == (16, 4, 16, 2e-4)
    figures = script("eval.py", tmp_path / "tuned", source, f"--task={task}", "--num_questions=10", "--max_new_tokens=60", "--json",
                     "--few_shot=0")
    assert [m["questions"] for m in figures["models"]] == [10, 10] and "difference" in figures["models"][1]


def test_a_chat_model_is_told_the_instruction_wherever_it_is_asked_or_trained(source, tmp_path):
    (tmp_path / "letters.py").write_text(LADDER)
    name, tokenizer = str(tmp_path / "letters.py"), Tokenizer(source)
    task = tasks.load(name)
    told = tokenizer.prompt_ids("train 3", "Write.")
    (request,) = requests_of(tokenizer, task, [{"question": "train 3", "answer": "7"}])
    assert request.ids == told != tokenizer.prompt_ids("train 3")
    (few_shot,) = requests_of(tokenizer, task, [{"question": "train 3", "answer": "7"}], few_shot=2)
    assert few_shot.ids == tokenizer.prompt_ids("train 3", "Write.", task.examples(2))

    def prompt(example):
        assert tokenizer.decode(example.ids[example.is_target].tolist()) == "the cat e<|im_end|>"
        return example.ids[:example.is_target.argmax()].tolist()
    worked = examples.read(f"examples:{name}", tokenizer)
    assert len(worked) == 20 and prompt(worked[3]) == told and examples.is_examples_file(f"examples:{name}")
    rft = tmp_path / "rft.json"
    start("datagen.py", f"--init_from={source}", f"--task={name}", f"--output={rft}", "--num_questions=4", "--oversample=1",
          "--max_new_tokens=4", "--dtype=fp32", "--few_shot=0", "--temperature=1")
    rft.write_text(json.dumps([["train 3", 7, "the cat e"], ["another", 7, "the cat e"]]))
    assert [prompt(example) for example in examples.read(rft, tokenizer)] == [told, tokenizer.prompt_ids("another")]
    assert prompt(examples.read(rft, tokenizer, instruction="Run.")[0]) == tokenizer.prompt_ids("train 3", "Run.")
    for dataset in (rft, f"examples:{name}"):
        with pytest.raises(BadInput, match="--prompt is for models without a chat template"):
            examples.read(dataset, tokenizer, form="Q: {}")
    line = ["sample.py", source, "--prompt=train 3", "--num_samples=8", "--dtype=fp32", "--max_new_tokens=9"]
    shown = script(*line, f"--task={name}").replace("train 3\n", "train 3")         # which ends the question's line
    assert shown == script(*line, "--system=Write.", "--stop=e") != script(*line, "--stop=e")
    assert script(*line, f"--task={name}", "--system=").replace("train 3\n", "train 3") == script(*line, "--system=", "--stop=e") != shown


def shell(script, *arguments):
    with forked.interpreter() as python:
        done = subprocess.run(["bash", ROOT / "runs" / script, *map(str, arguments)], env=environment(PYTHON=python),
                              capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_of_a_real_model_with_a_small_one(source, tmp_path):
    said = shell("own_reward.sh", f"--model={source}", f"--out_dir={tmp_path / 'own'}")
    assert "step 6/6" in said and said.count("What is the capital of ") == 10 and "above the first" in said
    task, out = tmp_path / "letters.py", tmp_path / "out"
    task.write_text(LADDER)
    shell("smollm2.sh", f"--model={source}", f"--task={task}", f"--out_dir={out}", "--sft_steps=2", "--asked=8", "--grpo_steps=1", "--num_questions=6")
    summary = json.loads((out / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == ["small-chat", "sft", "rft", "grpo"] and (out / "summary.png").exists()
    assert [*summary["stages"][3]] == ["name", "greedy", "sampled", "pass_at_2", "seconds"] and summary["stages"][2]["seconds"] > 0


@pytest.mark.parametrize("script", ["quickstart.sh", "countdown.sh"])
@pytest.mark.parametrize("option, words", [
    ("--out_dir=", "is empty"), ("--data_dir=", "is empty"), ("--out_dir={}", "summary.json is there"),
    ("--out_dir={}/other", "seconds is there"), ("--steps=3", "sh takes")])
def test_the_scripts_refuse_in_a_sentence_and_do_not_overwrite_other_files(tmp_path, script, option, words):
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "summary.json", tmp_path / "other/seconds"):
        path.write_text("precious")
    done = subprocess.run(["bash", ROOT / "runs" / script, option.format(tmp_path)],
                          env=environment(PYTHON="false"), capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"precious"}


def test_the_page_has_the_figures_of_the_record():
    page = (ROOT / "docs/models.md").read_text()
    seeds = json.loads((ROOT / "expected/smollm2_seeds.json").read_text())["seeds"]
    for label, stage in (("worked examples", "sft"), ("verified answers", "rft"), ("GRPO", "grpo")):
        shares = [100 * seeds[seed][stage][way] for way in ("greedy", "sampled") for seed in "012"]
        assert f"| {label} | {' | '.join(f'{share:.1f}' for share in shares)} |" in page


def test_own_reward_keeps_a_user_s_files(tmp_path):
    (tmp_path / "questions.jsonl").write_text("precious")
    done = subprocess.run(["bash", ROOT / "runs/own_reward.sh", f"--out_dir={tmp_path}", "--model=none"],
                          env=environment(PYTHON=sys.executable), capture_output=True, text=True)
    assert done.returncode == 2 and "questions.jsonl is there and not this script's" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_domains_refuses_other_options_than_the_folder_began_with(tmp_path):
    (tmp_path / "flags").write_text("--seed=0\n")
    done = subprocess.run(["bash", ROOT / "runs/domains.sh", f"--out_dir={tmp_path}", "--seed=1"],
                          env=environment(PYTHON="false"), capture_output=True, text=True)
    assert done.returncode == 2 and "was started with other options, --seed=0" in done.stderr


def test_an_earlier_quickstart_is_replaced_and_nothing_else(tmp_path):
    out, python = tmp_path / "out", tmp_path / "python"
    out.mkdir()
    (out / "seconds").write_text("base 12.5 1.25\n")
    for name in ("greedy.txt", "summary.json", "summary.csv"):
        (out / name).write_text(name)
    # It knows the time, and fails at the first stage.
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 7.5 || exit 9\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", ROOT / "runs/quickstart.sh", f"--out_dir={out}"],
                          env=environment(PYTHON=str(python)), capture_output=True)
    left = {path.name: path.read_text() for path in out.iterdir()}
    assert done.returncode == 9 and left == {"seconds": "base 7.5 7.5\n", "summary.csv": "summary.csv"}


def test_another_summary_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "summarise", lambda folder: ({"stages": [], "total_seconds": 1.0}, []))
    (tmp_path / "summary.json").write_text("precious")
    with pytest.raises(BadInput, match="summary.json exists"):
        summary.main([str(tmp_path)])
    assert (tmp_path / "summary.json").read_text() == "precious"


def test_the_quickstarts_summary(tmp_path):
    with pytest.raises(BadInput, match="seconds is not there yet"):
        summary.summarise(tmp_path)
    rows = [{"model": f"out/{name}", "accuracy": a, "accuracy_low": a - 0.1, "accuracy_high": a + 0.1, "pass_at_k": {"1": a, "8": 0.9}}
            for name, a in (("base", 0.5), ("rft", 0.7), ("grpo", 0.8))]
    for name in ("greedy", "sampled"):
        (tmp_path / f"{name}.txt").write_text("a table\n" + json.dumps({"models": rows}) + "\n")
    (tmp_path / "seconds").write_text("base 60.5 0.5\ndatagen 100 60\nrft 130 100\ngrpo 190 150\nevaluation 140 130\nevaluation 155 140\n")
    said, _ = in_process(summary.main, [str(tmp_path)])
    assert "50.0%" in said
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [list(stage.values()) for stage in written["stages"]] == [
        ["base", 0.5, 0.5, 0.9, 60.0], ["rft", 0.7, 0.7, 0.9, 70.0], ["grpo", 0.8, 0.8, 0.9, 40.0]]
    assert [*written["stages"][0]] == ["name", "greedy", "sampled", "pass_at_8", "seconds"]
    assert written["total_seconds"] == 195.0 and written["device"] and (tmp_path / "summary.png").stat().st_size > 5000
