import contextlib
import importlib
import inspect
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import train
from runtime import config, guard, help, unknown
from runtime.config import BadInput, Count, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass
class Config:
    """A few options."""
    # the run
    out_dir: str = "out/a"      # a folder
    init_from: str = "scratch"
    # the rest
    learning_rate: NonNegativeFloat = 1e-3     # typical: 3e-4,
                                    # of a small model
    n_layer: PositiveInt = 4
    n_kv_head: PositiveInt | None = None
    num_epochs: PositiveFloat | None = None
    dropout: Fraction = 0.0
    compile: bool | None = None
    tied: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    num_questions: Count | Literal["auto"] | None = "auto"


def load(*argv, **kw):
    return config.load(Config, argv, **kw)


def test_dtypes_accept_pytorch_names():
    for script in ("train", "grpo", "datagen", "eval", "sample"):
        Config = importlib.import_module(script).Config
        for theirs, ours in {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32"}.items():
            if script in ("datagen", "sample") and ours == "fp16":     # too narrow a range for sampling
                continue
            assert config.load(Config, [f"--dtype={theirs}"]).dtype == ours
        with pytest.raises(BadInput, match="--dtype=float64 should be auto, bf16(, fp16)? or fp32"):
            config.load(Config, ["--dtype=float64"])
    assert load("--out_dir=float32").out_dir == "float32"


def test_values_get_their_field_s_type():
    cfg = load("--learning_rate=1", "--n_layer=2e1", "--n_kv_head=2", "--compile=False", "--tied", "--out_dir=a=b")
    assert (cfg.learning_rate, cfg.n_layer, cfg.n_kv_head, cfg.compile, cfg.tied, cfg.out_dir) == (1.0, 20, 2, False, True, "a=b")
    assert isinstance(cfg.learning_rate, float) and isinstance(cfg.n_layer, int)
    found = [load(f"--num_questions={text}").num_questions for text in ("auto", "none", "7")]
    assert found == ["auto", None, 7]
    assert load("--n_kv_head=none").n_kv_head is None and load("--learning_rate=1e-3").learning_rate == 1e-3


@pytest.mark.parametrize("key, value, words", [
    ("n_layer", 0, "small: it must be at least 1"), ("n_kv_head", -2, "small: it must be at least 1"),
    ("num_epochs", 0.0, "small: it must be above 0"), ("learning_rate", -1e-3, "small: it must be at least 0"),
    ("dropout", 1.0, "large: it must be below 1"), ("num_questions", 10**9, "large: it must be at most 10000000")])
def test_a_number_out_of_bounds_is_one_sentence(tmp_path, key, value, words):
    with pytest.raises(BadInput, match=rf"^--{key}={value} is too {words}\.$"):
        load(f"--{key}={value}")
    (tmp_path / "c.py").write_text(f"{key} = {value}")
    with pytest.raises(BadInput, match=rf"c\.py: {key}={value} is too {words}\.$"):
        load(str(tmp_path / "c.py"))
    (tmp_path / "config.json").write_bytes(config.seal({key: value}))
    with pytest.raises(BadInput, match=rf"config\.json: {key}={value} is too {words}\.$"):
        load("--init_from=resume", f"--out_dir={tmp_path}")


def test_one_positional_word():
    assert load("--n_layer=2", "out/x", positional="out_dir").out_dir == "out/x"
    with pytest.raises(BadInput, match="'b' is neither"):
        load("a", "b", positional="out_dir")


def test_files_and_flags_apply_in_order(tmp_path):
    (tmp_path / "a.py").write_text("import math\n_base = 2\nn_layer = _base * 3\nlearning_rate = 1\ntied = True\n")
    cfg = load("--n_layer=5", str(tmp_path / "a.py"), "--learning_rate=0.5")
    assert (cfg.n_layer, cfg.learning_rate, cfg.tied) == (6, 0.5, True)


@pytest.mark.parametrize("flag, word", [
    ("--lerning_rate=1", "learning_rate"), ("--n-layer=3", "n_layer"), ("--n_layer=1.5", "whole number"),
    ("--n_layer=x", "whole number"), ("--learning_rate=fast", "a number"), ("--learning_rate=nan", "a number"), ("--learning_rate=inf", "a number"),
    ("--optimizer=moun", "muon"), ("--tied=maybe", "true or false"), ("--n_layer", "--n_layer=VALUE"), ("n_layer=3", "flag"),
    ("--zzzzz=1", "--help"), ("nowhere.py", "nowhere.py"), ("--n_layer=none", "whole number"),
    ("--n_layer=1e30", "--n_layer is too large"), (f"--n_layer={2**63}", "too large"), ("--n_layer=1e400", "whole number"),
    ("--learning_rate=1" + 400 * "0", "too large"), ("--out_dir=a\udcff", r"'--out_dir=a\\udcff' is not UTF-8"),
])
def test_a_wrong_flag_is_one_sentence(flag, word):
    with pytest.raises(BadInput, match=word) as e:
        load(flag)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text, word", [
    ("n_layers = 3", "did you mean n_layer"), ("n_layer = 2.0", "whole number"), ("tied = 1", "true or false"),
    ("n_layer = True", "whole number"), ("n_layer = 1 / 0", "line 1: ZeroDivisionError"), ("x = (", "SyntaxError"),
    ("optimizer = 'sgd'", "adamw or muon"), ("learning_rate = None", "a number"), ("n_layer = 10**5000", "n_layer is too large"),
])
def test_a_wrong_file_is_one_sentence(tmp_path, text, word):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(BadInput, match=word):
        load(str(tmp_path / "c.py"))


@pytest.mark.parametrize("script, argv", [
    ("train", ["--out_dir="]), ("train", ["--data_dir="]), ("train", ["--dataset="]), ("train", ["--init_from="]),
    ("train", ["--out_dir= "]), ("train", ["--init_from=resume", "--out_dir="]), ("grpo", ["--out_dir="]),
    ("grpo", ["--dataset="]), ("datagen", ["--output="]), ("eval", ["out/a", "--data_dir="]),
    ("bench", ["--output="]), ("doctor.plot", ["out/a", "--output="])])
def test_an_empty_path_is_one_sentence(script, argv):
    script, name = importlib.import_module(script), argv[-1][2:].partition("=")[0]
    with pytest.raises(BadInput, match=f"^--{name} is empty .*not set.*leave it out.$"):
        script.main(argv)


@pytest.mark.parametrize("script, argv", [
    ("hf", ["out/a", ""]), ("hf", ["", "out"]), ("eval", ["", "--task=countdown"]), ("doctor.plot", [""])])
def test_an_empty_name_is_one_sentence(script, argv):
    with pytest.raises(BadInput, match="is empty"):
        importlib.import_module(script).main(argv)


@pytest.mark.parametrize("script, argv, words", [
    ("train", ["--out_dir=~/run"], "^--out_dir=~/run begins with ~, .*HOME"), ("hf", ["~/a", "out"], "begins with ~"),
    ("grpo", ["--init_from=resume", "--overwrite"], "would replace"),
    ("eval", ["out/a", "--task=countdown", "--stride=8"], "^--stride is for a text, not for --task"),
    ("eval", ["out/a", "--dataset=b.txt", "--num_questions=8"], "^--num_questions is for a task, not for a text"),
    ("sample", ["out/a", "--chat", "--prompt=x"], "read prompts from standard input"),
    ("compare", ["--start=a", "--arm=a/b: --beta=1"], "with a new NAME without /"),
    ("compare", ["--start=a", "--arm=a: --task='x"], "can't be read .No closing quotation"),
    ("compare", ["--start=a", "--command="], "does not begin with a script"),
    ("compare", ["--start=a", "--command=grpo.py", "--task=arithmetic", f"--out_dir={__file__}"], "can't be made .*another --out_dir"),
    ("doctor.page", [".", "--output=none/a.html"], "holds no run"), ("doctor.plot", ["a", "--output=/dev/stdout"], "")])
def test_what_can_t_be_meant_is_one_sentence(script, argv, words):
    with pytest.raises(BadInput, match=words):
        importlib.import_module(script).main(argv)


def test_a_list_in_a_file_is_several_values(tmp_path):
    (tmp_path / "c.py").write_text('models = ["out/a", "out/b"]')
    assert config.load(importlib.import_module("eval").Config, [str(tmp_path / "c.py")], positional="models").models == ("out/a", "out/b")


def test_an_empty_path_in_a_file_is_one_sentence(tmp_path):
    (tmp_path / "c.py").write_text('out_dir = ""')
    with pytest.raises(BadInput, match="out_dir is empty"):
        load(str(tmp_path / "c.py"))


def test_resume_uses_saved_values_and_refuses_changed_frozen_ones(tmp_path):
    (tmp_path / "config.json").write_bytes(config.seal({"n_layer": 7, "learning_rate": 0.5, "init_from": "scratch"}))
    resume = ("--init_from=resume", f"--out_dir={tmp_path}")
    cfg = load(*resume, "--learning_rate=0.25", "--n_layer=7", frozen=["n_layer"])
    assert (cfg.n_layer, cfg.learning_rate, cfg.init_from) == (7, 0.25, "resume")
    with pytest.raises(BadInput, match="n_layer=3"):
        load(*resume, "--n_layer=3", frozen=["n_layer"])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not readable JSON"):
        load(*resume)


@pytest.mark.parametrize("content, words", [
    ({"n_layer": "two"}, "config.json: n_layer=two should be a whole number"), ({"n_layer": [[1]]}, "a whole number"),
    ({"n_kv_head": {}}, "a whole number or None"), ({"learning_rate": math.nan}, "a number"), ({"optimizer": 3}, "adamw or muon"),
    ({"n_layer": 10**30}, "too large"),
    (b"{}", "fails its checksum"), (b"[]", "it holds a list"), (b"null", "can't be read"), (b"[" * 100_000, "can't be read .*deep|recursion"),
    (b'{"a": ' * 100_000, "can't be read"), (b"\xff", "can't be read")], ids=lambda value: str(value)[:20])
def test_an_edited_config_of_a_run_is_one_sentence(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else config.seal(content))
    with pytest.raises(BadInput, match=words) as e:
        load("--init_from=resume", f"--out_dir={tmp_path}")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("body, words", [
    ("import sys\nsys.exit(0)", "at line 2: SystemExit: 0$"), ("raise GeneratorExit", "at line 1: GeneratorExit: $"), ("x = 1 / 0", "at line 1: ZeroDiv")])
def test_a_config_file_that_fails_or_exits_is_one_sentence(tmp_path, body, words):
    (tmp_path / "own.py").write_text(body)
    with pytest.raises(BadInput, match=words):
        load(f"{tmp_path}/own.py")


def test_an_unreadable_file_is_one_sentence(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadInput, match=r"can't be read \((Is a directory|No such file or directory)\): mend it\."):
            config.read_json(path, "mend it")

    def main(argv):
        raise PermissionError(13, "Permission denied", "secret")
    with pytest.raises(SystemExit) as e:
        guard.run(main, [])
    assert e.value.code == 2
    assert capsys.readouterr().err == "error: secret can't be opened (Permission denied): change its permissions, or choose another.\n"


def test_a_retry_uses_the_options_of_the_run_folder(tmp_path, monkeypatch, capsys):
    calls = []

    def main(argv):
        calls.append(argv)
        if len(calls) == 1:
            raise guard.Retry("Once more.", tmp_path)
        return 7
    assert guard.exit_code(main, ["some.py", "--n_layer=2"]) == 7 and "Once more." in capsys.readouterr().out
    assert calls[1] == ["--init_from=resume", f"--out_dir={tmp_path}"]

    def alone(argv):
        raise guard.Retry("One of two is out of memory.", tmp_path, alone=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(guard.Failure, match="One of two"):
        guard.exit_code(alone, [])
    # torchrun gives the same flags again: what its ranks began counts, and not that it would be overwritten
    (tmp_path / "config.json").write_bytes(config.seal({"n_layer": 3, "out_dir": "elsewhere"}))
    (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
    flags = [f"--out_dir={tmp_path}", "--n_layer=2", "--overwrite"]
    for found, n_layer in (("nothing", 2), ("run", 2), ("restarted", 3)):
        cfg = config.load(train.Config, flags, claim=lambda out_dir: found)
        assert cfg.n_layer == n_layer and cfg.init_from == ("resume" if n_layer == 3 else "scratch")
        assert cfg.out_dir == str(tmp_path) and cfg.overwrite == (n_layer == 2)


def test_resume_auto_resumes_an_existing_run(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(config.seal({"n_layer": 3, "init_from": "scratch"}))
    flags = [f"--out_dir={tmp_path}", "--resume=auto", "--learning_rate=0.5"]
    assert config.load(train.Config, flags, claim=lambda _: "nothing").init_from == "scratch"
    cfg = config.load(train.Config, flags, claim=lambda _: "run")
    assert (cfg.init_from, cfg.n_layer, cfg.learning_rate, cfg.overwrite) == ("scratch", 3, 0.5, True)     # it begins again
    assert "no checkpoint yet" in capsys.readouterr().out
    (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
    cfg = config.load(train.Config, flags, claim=lambda _: "run")
    assert (cfg.init_from, cfg.n_layer, cfg.learning_rate, cfg.overwrite) == ("resume", 3, 0.5, False)
    with pytest.raises(BadInput, match="--overwrite would replace"):
        config.load(train.Config, [*flags, "--overwrite"], claim=lambda _: "run")


def test_a_sealed_file_detects_changes(tmp_path):
    content = {"lr": 0.1, "name": "ü", "list": [1, None, {"a": True}]}
    path = tmp_path / "x.json"
    path.write_bytes(config.seal(content))
    assert config.read_sealed(path, "mend it") == content
    whole = path.read_bytes()
    unnoticed = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with contextlib.suppress(BadInput):
            assert config.read_sealed(path, "mend it") == content           # a blank
            unnoticed += 1
    assert unnoticed < 8 * len(whole) * 0.3


def test_help_has_every_option_with_default_choices_and_comment(capsys):
    with pytest.raises(SystemExit) as e:
        load("--help")
    text = capsys.readouterr().out
    assert e.value.code == 0
    assert all(word in text for word in ("--learning_rate=1e-3", "typical: 3e-4, of a small model", "--n_kv_head=None", "adamw | muon", "the rest"))


SCRIPTS = ("train", "grpo", "datagen", "eval", "sample", "bench", "compare", "hf")


@pytest.mark.parametrize("script", [*SCRIPTS, "doctor.page", "doctor.plot", "doctor.regrade", "text.bpe"])
def test_help_is_wrapped_and_has_each_option_and_section_once(script):
    Config = importlib.import_module(script).Config
    source = Path(inspect.getfile(Config)).read_text()
    options = [option for section in help.sections_of(source).values() for option in section]
    assert [option.name for option in options if option.name in Config.__dataclass_fields__] == [option.name for option in options]
    assert {option.name for option in options} == set(Config.__dataclass_fields__)
    headings = list(help.sections_of(source))
    alike = Counter(re.split(r"[,:.(]", heading)[0].strip() for heading in headings if heading)
    assert alike.pop("data", 1) <= 2 and set(alike.values()) <= {1}, headings         # "data" and "data, in detail"
    for width in (40, 60, 80, 110, 200):
        text = help.help_text(source, width).partition("Options with their defaults")[2]
        assert max(map(len, text.splitlines())) <= max(60, min(110, width))
        flags = re.findall(r"^  --(\w+)=", text, re.M)
        assert len(flags) == len(options) and set(flags) == set(Config.__dataclass_fields__)
        words = " ".join(text.split())
        assert all(option.comment in words and " | ".join(option.choices) in words for option in options)
        unindented = " ".join(line for line in text.splitlines()[1:] if line and line[0] != " ")
        assert unindented == " ".join(filter(None, headings))


@pytest.mark.parametrize("script", SCRIPTS)
def test_comments_of_options_can_be_read_alone(script):
    source = Path(inspect.getfile(importlib.import_module(script).Config)).read_text()
    for section in help.sections_of(source).values():
        for option in section:
            assert option.comment or option.choices, option.name
            assert not re.match(r"(and|or|but|its?|these|there|same|also|more) ", option.comment), option


def answered(script, flag):
    with pytest.raises(BadInput) as e:
        config.read_arguments(importlib.import_module(script).Config, [flag])
    return str(e.value)


def test_an_option_of_another_tool_is_answered_by_ours():
    """Each suggestion is an option of the script, or of the script that the sentence names."""
    fields = {script: importlib.import_module(script).Config.__dataclass_fields__ for script in SCRIPTS}
    theirs = {word for line in unknown.OPTIONS.strip().splitlines() for word in line.partition(":")[2].split()}
    theirs |= {word for words in unknown.SENTENCES.values() for word in words.split()}
    own = {name for names in fields.values() for name in names}
    named = [line.partition(":")[0].split() for line in unknown.OPTIONS.strip().splitlines()]
    assert not theirs & own - {"resume"} and {word.partition("=")[0] for words in named for word in words} <= own
    assert len(inspect.getsource(unknown).partition("OPTIONS =")[2].partition("def ")[0].splitlines()) <= 64      # 60 of the tables
    for script, names in fields.items():
        for word in sorted(theirs | own - set(names)):
            text = unknown.answer_to_option(word, f"--{word}", names)
            assert text.startswith(f"--{word} is not an option") and text[-1] in ".?" and "\n" not in text and ". " not in text
            used = re.search(r"use --(\w+)", text) or re.search(r"mean (\w+)\?", text)
            has = re.search(r"here: (.*) ha(?:s|ve) --(\w+)", text)
            if used:
                assert used[1] in names, text
            elif has:
                assert all(has[2] in fields[other] for other in re.findall(r"(\w+)\.py", has[1])), text
            else:
                assert any(sentence in text for sentence in unknown.SENTENCES) or word in own and "--help" in text, text


@pytest.mark.parametrize("script, flag, ours", [
    ("grpo", "max-new-tokens", "max_new_tokens"), ("eval", "TASK", "task"),
    ("train", "mixed_precision", "dtype=auto, which is the default"), ("train", "fp16", "dtype=fp16"), ("train", "bf16", "dtype=bf16"),
    ("grpo", "use_amp", "dtype=auto"), ("train", "d_model", "n_embd"), ("train", "num_layers", "n_layer"), ("train", "num_heads", "n_head"),
    ("train", "hidden_size", "n_embd"), ("train", "max_seq_length", "block_size"), ("grpo", "max_seq_length", "max_prompt_tokens"),
    ("train", "checkpoint_dir", "out_dir"), ("datagen", "output_dir", "output"), ("train", "per_device_train_batch_size", "batch_size"),
    ("grpo", "micro_batch_size", "tokens_per_micro_batch"), ("grpo", "batch_size", "prompts_per_step"), ("grpo", "num_generations", "k_samples"),
    ("datagen", "num_generations", "oversample"), ("eval", "k_samples", "num_samples"), ("grpo", "max_completion_length", "max_new_tokens"),
    ("train", "max_iters", "max_steps"), ("train", "lr", "learning_rate"), ("train", "logging_steps", "log_interval"),
    ("train", "save_steps", "save_interval"), ("grpo", "parallel_rewards", "reward_pool=process"), ("eval", "parallel_rewards", "reward_workers"),
    ("grpo", "kl_coef", "beta"), ("grpo", "algorithm.kl-coef", "beta"), ("eval", "model", "models"), ("sample", "init_from", "model")])
def test_the_answer_depends_on_the_script(script, flag, ours):
    assert re.match(rf"--{flag} is not an option: use --{ours}\b", answered(script, f"--{flag}=1"))


def test_answers_that_are_no_option_of_the_script(tmp_path):
    assert answered("train", "--use_ddp") == "--use_ddp is not an option: torchrun --nproc_per_node=N runs a script on N GPUs."
    assert answered("grpo", "--d_model=8") == "--d_model is not an option here: train.py has --n_embd."
    assert answered("eval", "--lr=1") == "--lr is not an option here: train.py and grpo.py have --learning_rate."
    assert "repeated" in answered("datagen", "--resume")
    (tmp_path / "c.py").write_text("lr = 1")
    assert answered("train", f"{tmp_path}/c.py") == f"{tmp_path}/c.py: lr is not an option: use learning_rate."


def test_a_data_file_is_answered_by_its_option(tmp_path):
    assert answered("datagen", "data/rft.json") == "'data/rft.json' is not a config file, which ends in .py: write --output=data/rft.json."
    for script, word, option in ("train", "book.txt", "dataset"), ("grpo", "q.jsonl", "dataset"), ("train", "a.gguf", "init_from"):
        assert answered(script, word).endswith(f": write --{option}={word}.")
    (tmp_path / "config.json").touch()
    assert answered("grpo", f"{tmp_path}").endswith(f"write --init_from={tmp_path}.")
    assert "neither a config file" in answered("compare", "x.json")


def test_the_checksum_of_keys_that_are_numbers_is_that_of_their_texts():
    content = {"counts": {2: 7, 10: 3, "total": 10}}
    assert config.checksum(content) == config.checksum(json.loads(json.dumps(content)))
