"""studies/okadfa.py: its runs, counts and table, with runs of train.py made up."""
import dataclasses
import json
import math

import numpy as np
import pytest

import train
from runtime.config import BadInput, seal
from studies import okadfa

LOSS = {"softmax": 1.0, "feedback": 1.2, "last": 1.1, "twice": 0.97, "last_adamw": 1.15}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The flags of each run that is started. A run's loss is its row's and grows with the distance of its rate from 0.01."""
    runs = []

    def start(command, name, log, **env):
        flags = dict(flag[2:].split("=", 1) for flag in command[2:])
        runs.append(flags)
        folder = okadfa.Path(flags["out_dir"])
        row, seed = folder.parent.name, int(flags["seed"])
        fields = {f.name: f.default for f in dataclasses.fields(train.Config)}
        knobs = okadfa.config.load(train.Config, [f"--{key}={value}" for key, value in flags.items() if key in fields])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(seal(vars(knobs)))
        loss = LOSS[row] + 0.01 * seed + abs(math.log(float(flags["learning_rate"]) / 0.01))
        last = int(flags["max_steps"])
        lines = [{"step": 1, "lr": 1, "tokens": 100, "tokens_per_s": 7.0}, {"step": 2, "lr": 1, "tokens": 200, "tokens_per_s": 200.0},
                 {"step": last, "lr": 1, "tokens": 100 * last, "tokens_per_s": 150.0},
                 {"step": last, "val_loss": loss, "val_ppl_token": math.exp(loss), "val_ppl_word": math.exp(5 * loss)}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        end = okadfa.checkpoint.step_folder(folder, last)
        end.mkdir(parents=True, exist_ok=True)
        (end / "state.json").write_text(json.dumps({"progress": {"lr_factor": 1.0}}))
    monkeypatch.setattr(okadfa, "logged_process", start)
    monkeypatch.setattr(okadfa, "cpu_name", lambda: "two cores")
    monkeypatch.setattr(okadfa, "git_commit", lambda: "abc")
    return runs


def measure(tmp_path, *flags):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 50)
    return okadfa.main([str(text), str(tmp_path / "out"), f"--data_dir={tmp_path / 'data'}", "--max_steps=30", *flags])


def test_rates_are_tried_and_the_best_trains_for_all_steps_with_each_seed(started, tmp_path, capsys):
    asked = ["--rows=last,softmax,twice,feedback", "--rates=0.003 0.01 0.03"]
    assert measure(tmp_path, *asked) == 0
    tried = [run for run in started if run["max_steps"] == "10"]
    assert len(tried) == 9 and {run["seed"] for run in tried} == {"0"} and {run["warmup_steps"] for run in started} == {"1", "2", "3"}
    final = [run for run in started if run["max_steps"] != "10"]
    assert {run["learning_rate"] for run in final} == {"0.01"}
    seeds = {row: sorted(run["seed"] for run in final if f"/{row}/" in run["out_dir"]) for row in ("softmax", "feedback", "last", "twice")}
    assert seeds == {"softmax": ["0", "1", "2"], "feedback": ["0", "1", "2"], "last": ["0", "1", "2"], "twice": ["0"]}
    assert [run["max_steps"] for run in final if "/twice/" in run["out_dir"]] == ["60"]
    assert all(run["backward"] == "feedback" for run in started if "/feedback/" in run["out_dir"])
    said = capsys.readouterr().out
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    rows = {cells[0]: cells[1:] for cells in table[2:]}
    means = [sum(math.exp(LOSS[row] + 0.01 * seed) for seed in range(3)) / 3 for row in ("feedback", "softmax", "last")]
    assert rows["softmax, feedback"][1] == f"{means[0]:.3f} ({math.exp(1.2):.3f}-{math.exp(1.22):.3f})"
    assert rows["softmax, feedback"][3] == f"{means[0] / means[1]:.3f}" and rows["softmax, feedback"][5:] == ["1.74", "0.500"]
    assert rows["softmax, backpropagation"][3:6] == ["1.000", "1.000", "1.00"]
    assert rows["only the last block trained"][1] == f"{means[2]:.3f} ({math.exp(1.1):.3f}-{math.exp(1.12):.3f})"
    assert "by 3.9% a token, 18.2% a word: by the first figure the baseline is past its knee" in said
    assert (tmp_path / "out/table.md").read_text() in said
    saved = json.loads((tmp_path / "out/table.json").read_text())
    assert saved["rows"]["feedback"]["source"].startswith("Launay") and saved["tuning"]["last"]["0.03"] > saved["tuning"]["last"]["0.01"]
    before = len(started)
    assert measure(tmp_path, *asked) == 0 and len(started) == before           # what is done is not done again
    again = tmp_path / "out/last/rate0.01_steps30_seed0"
    (again / "metrics.jsonl").unlink()                                         # as if stopped before its first step
    assert measure(tmp_path, *asked) == 0 and [run["out_dir"] for run in started[before:]] == [str(again)]
    with pytest.raises(BadInput, match="has n_embd=64 and not 32: choose another output folder"):
        measure(tmp_path, *asked, "--n_embd=32")
    (tmp_path / "other.txt").write_text("a dog sat. " * 50)
    with pytest.raises(BadInput, match="has dataset=.*text.txt and not .*other.txt"):
        okadfa.main([str(tmp_path / "other.txt"), str(tmp_path / "out"), f"--data_dir={tmp_path / 'data'}", "--max_steps=30", *asked])


def test_a_rate_whose_run_fails_is_out_and_a_final_run_that_fails_is_an_error(started, tmp_path, monkeypatch, capsys):
    start = okadfa.logged_process

    def diverging(command, name, log, **env):
        if "--learning_rate=0.03" in command or "--learning_rate=0.01" in command and "--max_steps=30" in command:
            raise okadfa.guard.Failure("the loss is not finite")
        start(command, name, log, **env)
    monkeypatch.setattr(okadfa, "logged_process", diverging)
    with pytest.raises(okadfa.guard.Failure, match="not finite"):
        measure(tmp_path, "--rows=last", "--rates=0.003 0.01 0.03")
    assert capsys.readouterr().out.count("A learning rate is left out") == 1
    assert sorted(run["learning_rate"] for run in started) == ["0.003", "0.01"]


def test_a_run_that_went_back_does_not_count_for_the_rate_that_was_asked_for(started, tmp_path, monkeypatch, capsys):
    start = okadfa.logged_process

    def going_back(command, name, log, **env):
        start(command, name, log, **env)
        if "--learning_rate=0.01" in command:
            for state in tmp_path.glob("out/last/rate0.01*/checkpoints/*/state.json"):
                state.write_text('{"progress": {"lr_factor": 0.5}}')
    monkeypatch.setattr(okadfa, "logged_process", going_back)
    assert measure(tmp_path, "--rows=last", "--rates=0.003 0.01 0.03") == 0
    assert "rolled back and lowered its learning rate, so its figures are not those of 0.01" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/table.json").read_text())["rows"]["last"]["rate"] == 0.03


def test_a_rate_at_the_edge_is_said_and_a_needed_row_is_run(started, tmp_path, capsys):
    measure(tmp_path, "--rows=twice", "--rates=0.001 0.003", "--seeds=1", "--jobs=1")
    said = capsys.readouterr().out
    assert said.count("| 0.012 (edge) |") == 2 and {run["seed"] for run in started} == {"1"}
    assert [run["learning_rate"] for run in started if run["max_steps"] == "10"] == ["0.001", "0.003", "0.006", "0.012"]
    measure(tmp_path, "--rows=last", "--rates=0.02 0.04", "--seeds=1", "--jobs=1")
    assert [run["learning_rate"] for run in started if "/last/" in run["out_dir"]] == ["0.02", "0.04", "0.01", "0.005", "0.01"]
    assert "| 0.01 |" in capsys.readouterr().out


def test_each_optimizer_has_its_own_rates(started, tmp_path):
    measure(tmp_path, "--rows=last,last_adamw", "--seeds=0", "--jobs=1")
    tried = {row: [run["learning_rate"] for run in started if f"/{row}/" in run["out_dir"] and run["max_steps"] == "10"] for row in ("last", "last_adamw")}
    assert tried == {"last": ["0.006", "0.012", "0.024", "0.048"], "last_adamw": ["0.001", "0.002", "0.004", "0.008", "0.016"]}
    assert {run["optimizer"] for run in started if "/last_adamw/" in run["out_dir"]} == {"adamw"}


def test_counts_against_a_sum_by_hand():
    """Ids of training 0 0 1: with one added 3, 2 and 1 of 6; pairs 00 and 01, of which rows are 2 2 1, 1 1 1 and 1 1 1."""
    unigram, bigram = okadfa.nll_of_counts(np.array([0, 0, 1]), np.array([0, 1, 2, 2]), 3)
    assert unigram == pytest.approx(-math.log(2 / 6) - 2 * math.log(1 / 6))
    assert bigram == pytest.approx(-math.log(2 / 5) - 2 * math.log(1 / 3))


def test_rows_ask_train_for_what_it_has():
    for name, row in okadfa.ROWS.items():
        knobs = okadfa.options_of(okadfa.Config(), "x.txt", row, 0.01, 0, 100)
        train.check(train.Config(**knobs))
        assert (row.published is None) == (row.source == "" and name != "softmax")


@pytest.mark.parametrize("flags, said", [
    (["--rows=softmax,dfa"], "--rows=dfa is not a row: choose from"),
    (["--rates=fast"], "--rates=fast should be different numbers"),
    (["--seeds=1 1"], "--seeds=1 1 should be different numbers"),
    (["--optimizer=sgd"], "--optimizer=sgd should be muon or adamw"),
    (["third"], "Give a text and an output folder"),
])
def test_bad_input_is_one_sentence(started, tmp_path, flags, said):
    with pytest.raises(BadInput, match=said):
        measure(tmp_path, *flags)
