"""runs/speedrun.py, the judge of the record game, and its scripts."""
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import compare
from conftest import ROOT
from runs import speedrun
from runtime.config import BadInput
from runtime.guard import Failure


def test_a_record_is_faster_beyond_chance_and_right_often_enough():
    reference = [{"seconds": 300 + 5 * i, "exact": 0.71} for i in range(5)]
    faster = [{"seconds": 0.6 * (300 + 5 * i) + (-1)**i, "exact": 0.72} for i in range(5)]
    ratio, low, high, exact = speedrun.score(faster, reference)
    assert 0.58 < low < ratio < high < 0.62 and exact == pytest.approx(0.72)
    assert speedrun.verdict("mine", high, exact) == "mine is a record."
    assert "below 70%" in speedrun.verdict("mine", high, 0.69)
    noisy = [{"seconds": 300 + 5 * i + 60 * (-1)**i, "exact": 0.72} for i in range(5)]
    assert "not faster with p < 0.01" in speedrun.verdict("mine", *speedrun.score(noisy, reference)[2:])


def test_equal_scripts_make_no_record():
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, (2000, 2, 5)))
    scripts = [[[{"seconds": seconds, "exact": 0.8} for seconds in side] for side in sides] for sides in noise.tolist()]
    records = sum(speedrun.score(own, other)[2] < 1 for own, other in scripts)
    assert records < 0.005 * 2000 + 10                           # half of 1%, and three standard errors


@pytest.fixture
def game(tmp_path, monkeypatch):
    """A tree with a reference of 50 ms, and eval.py that calls 80% of everything exact but cannot read the folder of `unread`."""
    tree = tmp_path / "tree"
    (tree / "runs").mkdir(parents=True)
    (tree / "train.py").write_text("")

    def script(name, text):
        (tree / "runs" / name).write_text(f"set -e\necho $0 $@ >> {tmp_path}/ran\n{text}\n")
        return str(tree / "runs" / name)
    asked = []

    def evaluated(start, words, ranks):
        asked.append(words)
        if "unread" in str(words[0]):
            raise BadInput("no weights")
        return json.dumps({"parts": {"exact": 0.8}})
    monkeypatch.setattr(speedrun, "REFERENCE", tree / "runs" / "reference.sh")
    monkeypatch.setattr(speedrun, "process", evaluated)
    monkeypatch.setattr(speedrun.os, "sched_setaffinity", lambda pid, cores: asked.append(cores), raising=False)
    monkeypatch.setattr(speedrun, "end_on_signals", lambda: None)
    script("reference.sh", "sleep 0.05")
    return tmp_path, script, asked


def ran(folder):
    return (folder / "ran").read_text().splitlines()


def test_scripts_run_in_turn_with_the_same_seeds_and_questions_and_resume(game, capsys):
    folder, script, asked = game
    slow = script("slow.sh", "sleep 0.5")
    arguments = [slow, f"--out_dir={folder}/out"]
    assert speedrun.main(arguments) == 0
    said = capsys.readouterr().out
    assert "slow is no record: it is not faster with p < 0.01." in said and "80.0" in said
    assert len(asked.pop(0)) <= 2                                # cores
    names = [re.search(r"--out_dir=\S+/(\w+)-", line)[1] for line in ran(folder)]
    assert names == ["reference", "slow", "slow", "reference", "reference", "slow", "slow", "reference", "reference", "slow"]
    assert all(line.startswith(f"{folder}/out/trees/") for line in ran(folder))              # in copies
    seeds = [int(re.search(r"--seed=(\d+)", line)[1]) for line in ran(folder)]
    assert seeds[::2] == seeds[1::2] == list(range(seeds[0], seeds[0] + 5))
    assert len({word for words in asked for word in words if str(word).startswith("--dataset=")}) == 1
    speedrun.main(arguments)
    assert len(ran(folder)) == 10                                # the same call repeats nothing
    script("slow.sh", "sleep 0.1")
    speedrun.main(arguments)
    assert len(ran(folder)) == 20                                # an edited tree begins anew, with its reference


def test_a_failure_of_a_candidate_is_its_verdict(game, capsys):
    folder, script, _ = game
    broken = script("broken.sh", "echo error: no more >&2; exit 3")
    unread = script("unread.sh", "sleep 0")
    assert speedrun.main([broken, unread, f"--out_dir={folder}/out"]) == 0
    said = capsys.readouterr().out
    assert "broken is no record: seed 0 failed (no more)." in said
    assert "unread is no record: seed 0 failed (eval.py can't read its model: no weights)." in said
    killed = script("killed.sh", "kill -9 $$")
    for _ in range(2):                                           # no fault of the script: its runs begin again
        with pytest.raises(Failure, match="killed.sh was stopped"):
            speedrun.main([killed, f"--out_dir={folder}/out"])
    script("reference.sh", "exit 3")
    with pytest.raises(Failure, match="reference.sh failed"):
        speedrun.main([broken, f"--out_dir={folder}/out"])


def test_mistakes_are_named(game, monkeypatch):
    folder, script, _ = game
    out = f"--out_dir={folder}/out"
    with pytest.raises(BadInput, match="isn't a file in the folder runs"):
        speedrun.main([f"{folder}/none.sh", out])
    with pytest.raises(BadInput, match="rename one"):
        speedrun.main([script("reference.sh", "true"), out])
    mine = script("mine.sh", "sleep 0.01")
    speedrun.main([mine, out])
    monkeypatch.setattr(speedrun, "cpu_name", lambda: "another")
    with pytest.raises(BadInput, match="seconds of another CPU"):
        speedrun.main([mine, out])


def scripts(folder):
    """Return {name: path} of the reference and of the records in docs/records.md, each a diff to the script before, written to folder/runs."""
    path = folder / "runs" / "reference.sh"
    path.parent.mkdir()
    path.write_text((ROOT / "runs/speedrun.sh").read_text())
    found = {"reference": path}
    page = (ROOT / "docs/records.md").read_text()
    for name, diff in re.findall(r"^### (\w+)\n.*?^```diff\n(.*?)^```", page, re.M | re.S):
        before = path
        path = folder / "runs" / f"{name}.sh"
        subprocess.run(["patch", "--quiet", f"--output={path}", str(before)], input=diff, text=True, check=True)
        found[name] = path
    return found


@pytest.mark.skipif(not shutil.which("patch"), reason="there is no program patch here")
def test_the_commands_of_all_scripts_have_only_known_options(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/commands\n')
    stub.chmod(0o755)
    found = scripts(tmp_path)
    assert [*found] == ["reference", "small", "brief"]
    for path in found.values():
        done = subprocess.run(["bash", path, "--out_dir=out", "--seed=3"], env={"PYTHON": str(stub), "PATH": "/usr/bin:/bin"})
        assert done.returncode == 0
    commands = [line for line in (tmp_path / "commands").read_text().splitlines() if not line.startswith("-c ")]
    assert len(commands) >= 3 * len(found)
    for command in commands:
        words = command.split()
        first = next(i for i, word in enumerate(words) if word in ("train.py", "datagen.py"))
        assert compare.options_of(words[first], *(str(ROOT / word) if word.startswith("config/") else word for word in words[first + 1:]))["seed"] == 3
    done = subprocess.run(["bash", ROOT / "runs/speedrun.sh", "--steps=3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: speedrun.sh takes")
