"""measure/referee.py: trees in turn, early ends, fresh questions, no tree twice, the better kept, kills, a log."""
import json
import os
import re
import shutil
import signal
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest

import compare
import forked
import train
from conftest import ROOT, alive, environment, flags, in_process, wait_for
from measure import intervals, referee, runs
from rollouts import records
from runtime import guard, lock
from runtime.config import BadInput

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the referee reads trees by git")
ARGV = ["--start=out/rft", "--command=grpo.py config/grpo.py --max_steps=5", "--questions=100", "--num_samples=2", "--seeds=10",
        "--out_dir=out"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a function that edits a file of a candidate, a copy of this tree, and returns the flag that names it."""
    monkeypatch.chdir(tmp_path)
    Path("copy").mkdir()
    Path("config").symlink_to(ROOT / "config")
    copy = Path("copy/trees", referee.keep_copy(ROOT, Path("copy").resolve())).rename("candidate")

    def edited(text, name="config/grpo.py"):
        (copy / name).write_text((ROOT / name).read_text() + text)
        return "--candidate=candidate"
    yield edited
    for path in list(lock.held):
        lock.release(path)


@pytest.fixture
def calls(monkeypatch):
    """Replace processes by a stand-in: a model's accuracy follows from a line `change = ` in its tree's config file and from its
    tree and seed. Returns the list of their names."""
    names = []

    def process(start, arguments, ranks=1, name=None):
        names.append(name)
        options = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--"))
        rng = np.random.default_rng([int(options["seed"]), zlib.crc32(os.path.relpath(arguments[0]).encode())])
        if name.endswith("eval.py"):
            assert start == [str(ROOT / "eval.py")]
            asked = [json.loads(line)["question"] for line in Path(options["dataset"]).read_text().splitlines()]
            right = rng.random((len(asked), int(options.get("num_samples", 1)))) < float(Path(arguments[0], "right").read_text())
            rows = [{"number": n, "sample": k, "question": asked[n], "completion": "", "parts": {}, "score": int(right[n, k])}
                    for n, k in np.ndindex(right.shape)]
            Path(options["output"]).write_text("\n".join(map(json.dumps, rows)))
            return ""
        code = Path(arguments[0]).read_text()
        assert Path(arguments[0]).parent.parent == Path(start[0]).parent
        if "raise" in code:
            raise guard.Failure(f"{name} ended with 1: KeyError")
        change = float((re.findall(r"^change = (\S+)", code, re.M) or [0])[0])
        Path(options["out_dir"]).mkdir()
        Path(options["out_dir"], "right").write_text(str(0.5 + change + 0.01 * rng.normal()))
        Path(options["out_dir"], "metrics.jsonl").write_text(json.dumps({"step": 5, "lr": 1, "seconds": 60.0}) + "\n")
        return ""
    monkeypatch.setattr(compare, "process", process)
    monkeypatch.setattr(compare, "git_commit", lambda: "0" * 40)             # which takes 10 ms
    return names


def log():
    return Path("out/log.txt").read_text().splitlines()


# --- decisions ---

def test_in_turn_until_the_verdict_and_the_better_is_kept(tree, calls, capsys):
    assert referee.main([*ARGV, tree("change = 0.3") + ": a higher rate"]) == 0
    assert [name for name in calls if "grpo" in name][:6] == [f"{arm}: grpo.py" for arm in (
        "base-0", "candidate-0", "candidate-1", "base-1", "base-2", "candidate-2")]
    first, gain = log()
    assert re.fullmatch(r"[\d-]{10} [\d:]{5}  \w{12}  better  \+\d+\.\d \[\+.*\], \d seeds, 60 s, best 60 s  "
                        r"a higher rate \(config/grpo.py\)", gain) and first.endswith("first")
    known = len(calls)
    assert referee.main([*ARGV, tree("change = 0.3")]) == 0 and len(calls) == known         # no tree runs twice
    assert "none runs twice" in capsys.readouterr().out and referee.main([*ARGV, f"--candidate={ROOT}"]) == 0 and len(calls) == known
    assert referee.main([*ARGV, tree("change = 0.0")]) == 0
    *_, loss = log()
    assert "  worse   -" in loss and int(re.search(r"(\d+) seeds", loss)[1]) < 6              # it is compared with the new best
    of_gain, of_loss = (json.loads(path.read_text()) for path in sorted(
        Path("out/decisions").glob("*/comparison.json"), key=lambda path: path.stat().st_mtime))
    assert gain.split()[2] in of_loss["runs"]["base-0"]["command"][0][0]
    questions = {path.read_text() for path in Path("out/decisions").glob("*/questions-*.jsonl")}
    seeds = {word for state in (of_gain, of_loss) for word in state["runs"]["base-0"]["command"][0] if "--seed=" in word}
    assert len(questions) == len(seeds) == 2                                                 # others at each decision


def test_a_tree_that_fails_is_dropped_and_the_next_is_compared(tree, calls):
    shutil.copytree(Path("candidate"), "other")
    Path("other/eval.py").write_text("")
    assert referee.main([*ARGV, tree("raise"), "--candidate=other: without an effect"]) == 0
    first, failed, tie = log()
    assert "  failed  Failure: candidate-0: grpo.py ended with 1: KeyError" in failed and "  tie     " in tie
    assert "without an effect (eval.py)" in tie and int(re.search(r"(\d+) seeds", tie)[1]) < 10
    commit = referee.keep_copy("HEAD", Path("out").resolve())
    assert referee.keep_copy(f"out/trees/{commit}", Path("out").resolve()) == commit
    with pytest.raises(BadInput, match="(?s)git fails .*no-commit.*: give a folder, or a commit"):
        referee.main([*ARGV, "--candidate=no-commit"])
    Path("out/log.txt").write_text("\n".join([first.replace(first.split()[2], "0" * 12), failed]))
    with pytest.raises(BadInput, match="isn't .*log.txt's first tree"):
        referee.main([*ARGV, tree("change = 0.1")])


def test_a_kill_loses_one_run_at_most(tree, calls, monkeypatch):
    process = compare.process

    def killed(*args, **more):
        if len(calls) == 11:
            raise KeyboardInterrupt
        return process(*args, **more)
    monkeypatch.setattr(compare, "process", killed)
    with pytest.raises(KeyboardInterrupt):
        referee.main([*ARGV, tree("change = 0.3")])
    monkeypatch.setattr(compare, "process", process)
    assert not Path("out/log.txt").exists() and referee.main([*ARGV, tree("change = 0.3")]) == 0
    assert len(calls) == len(set(calls)) * 3 // 2 and len(log()) == 2        # a run, and eval.py twice: nothing is repeated


def test_twenty_trials_without_an_effect_a_known_gain_and_a_known_loss(tree, calls):
    cfg = compare.Config(start="out/rft", command=ARGV[1].partition("=")[2], seeds=10, questions=100, num_samples=2, controls="",
                         task="unit_conversion", max_new_tokens=8)
    verdicts = []
    for number, change in enumerate([0.0] * 20 + [0.45, -0.45]):
        folder = Path(f"trial-{number}").resolve()
        (folder / "config").mkdir(parents=True)
        (folder / "config/grpo.py").write_text(f"change = {change}")
        (folder / "grpo.py").touch()
        cfg.out_dir = str(folder / "out")
        verdicts.append(referee.decide(cfg, {"base": Path("candidate").resolve(), "candidate": folder}).split()[0])
    assert verdicts[:20].count("tie") >= 19 and verdicts[20:] == ["better", "worse"], verdicts


def test_who_stops_early_would_rarely_have_become_better():
    rng = np.random.default_rng(0)
    cfg = compare.Config(seeds=10)
    lost = won = 0
    stops = []
    for _ in range(300):
        d = 0.02 + rng.normal(0, 0.02, (10, 1)) + rng.normal(0, 0.2, (10, 100))
        looks = [intervals.comparison(d[:seeds]) for seeds in range(3, 11)]
        better = next((n for n, one in enumerate(looks) if one["low"] > 0), None)
        hopeless = next(n for n, one in enumerate(looks) if referee.is_hopeless(one, cfg) or one["low"] > 0)
        won += better is not None
        lost += better is not None and hopeless < better
        stops.append(hopeless)
    assert won > 75 and lost / won < 0.1 and np.mean(stops) < 4, (won, lost, np.mean(stops))


# --- real processes ---

SMALL = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=160 --batch_size=4 --warmup_steps=1 --eval_tokens=320 --device=cpu".split()
GRPO = ("grpo.py --max_steps=1 --prompts_per_step=4 --k_samples=2 --max_new_tokens=8 --eval_interval=0 --num_questions=20 "
        "--reward_workers=1 --device=cpu --reward_pool=serial")


def test_a_candidate_s_verifier_trains_it_but_does_not_score_it(tree, text, monkeypatch):
    """Both arms of the first seed, by their own scripts."""
    in_process(train.main, [*SMALL, f"--dataset={text}", "--max_steps=2", "--out_dir=base"])
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(Popen=forked.Popen))
    run_all = compare.Comparison.run_all
    monkeypatch.setattr(compare.Comparison, "run_all", lambda self, seed: sys.exit(0) if seed else run_all(self, 0))
    with pytest.raises(SystemExit):
        referee.main(["--start=base", f"--command={GRPO}", "--questions=20", "--num_samples=2", "--out_dir=out",
                      tree("\n\ndef reward(question, completion):\n    return 1.0\n", "tasks/unit_conversion.py")])
    (decision,) = Path("out/decisions").iterdir()
    paid = {arm: {record["score"] for record in records.read(decision / f"{arm}-0")} for arm in ("base", "candidate")}
    scored = {record["score"] for path in decision.glob("answers/candidate-0.*") for record in records.read(path)}
    assert paid["candidate"] == {1.0} and 1.0 not in paid["base"] | scored


def test_sigterm_ends_with_143_and_leaves_no_child(tree, text):
    command = f"train.py --init_from=scratch --max_steps=100000 {' '.join(SMALL)} --dataset={text}"
    argv = ["-m", "measure.referee", "--start=x", "--task=unit_conversion", f"--command={command}", "--out_dir=out", tree("# the same")]
    with forked.Popen([sys.executable, *argv], env=environment(PYTHONPATH=str(ROOT))) as process:
        wait_for(lambda: list(Path("out").glob("decisions/*/base-0/metrics.jsonl")))
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        assert alive(child)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143 and not alive(child)
    assert list(Path("out").glob("decisions/*/base-0/checkpoints/step_*"))             # the run resumes
