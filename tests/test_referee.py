"""runs/referee.py: trees in turn, early ends, fresh questions, no tree twice, the better kept, kills, a log."""
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import compare
import forked
import train
from conftest import ROOT, alive, environment, in_process, wait_for
from measure import intervals, runs
from runs import referee
from rollouts import records
from runtime import config

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the referee reads trees by git")
ARGV = ["--start=out/rft", "--command=grpo.py config/grpo.py", "--questions=100", "--seeds=10", "--out_dir=out"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A function that adds text to a file of a candidate, a copy of this tree, and returns the flag that names it."""
    monkeypatch.chdir(tmp_path)
    Path("config").symlink_to(ROOT / "config")
    copy = Path("trees", referee.keep_copy(ROOT, tmp_path)).rename("candidate")

    def edited(text, name="config/grpo.py"):
        (copy / name).write_text((ROOT / name).read_text() + text)
        return "--candidate=candidate"
    return edited


def log():
    return Path("out/log.txt").read_text().splitlines()


@pytest.fixture
def calls(monkeypatch):
    """Replace runs and answers: a model is right in half of its samples, plus `change` in its tree's config file. Returns the
    list of the runs' names."""
    names = []

    def process(start, arguments, ranks=1, name=None, env=None):
        names.append(name)
        right = 0.5 + config.read_file(arguments[0]).get("change", 0)
        folder = Path(next(word for word in arguments if word.startswith("--out_dir=")).partition("=")[2])
        folder.mkdir()
        (folder / "right").write_text(str(right))
        (folder / "metrics.jsonl").write_text('{"step": 5, "lr": 1, "seconds": 60}\n')

    def shares_of(models, kept):
        samples = [np.random.default_rng([*Path(model).name.encode()]).random((len(kept), 2)) for model in models]
        return {"sampled": np.array([(of < float(Path(model, "right").read_text())).mean(1) for of, model in zip(samples, models)])}
    monkeypatch.setattr(compare, "process", process)
    monkeypatch.setattr(compare.Comparison, "answer", lambda self, name, model, seed: model)
    monkeypatch.setattr(compare.answers, "shares_of", shares_of)
    return names


def test_in_turn_until_the_verdict_and_the_better_is_kept(tree, calls, capsys):
    referee.main([*ARGV, tree("change = 0.3") + ": a higher rate"])
    order = [f"{arm}: grpo.py" for arm in ("base-0", "candidate-0", "candidate-1", "base-1", "base-2", "candidate-2")]
    assert [name for name in calls if "grpo" in name][:6] == order and log()[0].endswith("first")
    assert re.fullmatch(r".{16}  \w{12}  better  \+.* \[\+.*\], \d seeds, 60 s, best 60 s  a higher rate \(config/grpo.py\)", log()[1])
    assert referee.main([*ARGV, tree("change = 0.3"), f"--candidate={ROOT}"]) == 0 and len(log()) == 2
    assert capsys.readouterr().out.count("none runs twice") == 2
    referee.main([*ARGV, tree("change = 0.0")])                               # as good as the first tree, worse than the best
    assert "  worse   -" in log()[2] and int(re.search(r"(\d+) seeds", log()[2])[1]) < 6
    assert Path(f"out/decisions/out-{log()[2].split()[2]}-{log()[1].split()[2]}").exists()
    states = [path.read_text() for path in Path("out/decisions").glob("*/comparison.json")]
    questions = {path.read_text() for path in Path("out/decisions").glob("*/questions-*.jsonl")}
    assert len({re.search(r"--seed=\d+", state)[0] for state in states}) == len(questions) == 2          # others for each decision


def test_a_tree_that_fails_is_dropped_and_the_next_is_compared(tree, calls):
    shutil.copytree("candidate", "other")
    Path("other/eval.py").write_text("")
    assert referee.main([*ARGV, tree("raise KeyError"), "--candidate=other: without an effect"]) == 0
    first, failed, tie = log()
    assert "  failed  BadInput: " in failed and "KeyError" in failed
    assert "  tie     " in tie and "without an effect (eval.py)" in tie and int(re.search(r"(\d+) seeds", tie)[1]) < 10
    assert referee.keep_copy("HEAD", Path("out").resolve()) in os.listdir("out/trees")
    with pytest.raises(config.BadInput, match="(?s)git fails .*no-commit.*: give a folder, or a commit"):
        referee.main([*ARGV, "--candidate=no-commit"])
    Path("out/log.txt").write_text("\n".join([first.replace(first.split()[2], "0" * 12), failed]))
    with pytest.raises(config.BadInput, match="isn't .*log.txt's first tree"):
        referee.main([*ARGV, tree("change = 0.1")])


def test_records_that_cannot_be_read_fail_the_candidate(tree, calls, monkeypatch):
    def figures(self):
        raise KeyError("question")
    monkeypatch.setattr(compare.Comparison, "figures", figures)
    assert referee.main([*ARGV, tree("change = 0.3")]) == 0 and "  failed  KeyError: 'question'" in log()[1]


def test_a_folder_for_results_inside_the_tree_is_no_part_of_it(tree, tmp_path):
    inside = tmp_path / "candidate/night2"
    inside.mkdir()
    digest = referee.keep_copy("candidate", inside)
    (inside / "referee.lock").write_text("")
    assert referee.keep_copy("candidate", inside) == digest == referee.keep_copy(ROOT, tmp_path)


def test_a_kill_loses_one_run_at_most(tree, calls, monkeypatch):
    process = compare.process
    monkeypatch.setattr(compare, "process", lambda *args, **more: sys.exit(1) if len(calls) == 4 else process(*args, **more))
    with pytest.raises(SystemExit):
        referee.main([*ARGV, tree("change = 0.3")])
    monkeypatch.setattr(compare, "process", process)
    assert not Path("out/log.txt").exists() and referee.main([*ARGV, tree("change = 0.3")]) == 0 and len(log()) == 2
    assert len(calls) == len(set(calls)) > 4                                  # the fifth was not made before


def test_twenty_trials_without_an_effect_a_known_gain_and_a_known_loss(tree, calls):
    cfg = config.load(compare.Config, [*ARGV, "--controls=", "--task=unit_conversion"])
    verdicts = []
    for number, change in enumerate([0.0] * 20 + [0.45, -0.45]):
        cfg.out_dir = f"out/{number}"
        (folder := Path(f"trees/{number}").resolve()).joinpath("config").mkdir(parents=True)
        (folder / "config/grpo.py").write_text(f"change = {change}")
        shutil.copy(ROOT / "grpo.py", folder)
        verdicts.append(referee.decide(cfg, {"base": Path("candidate").resolve(), "candidate": folder}).split()[0])
    assert verdicts[:20].count("tie") >= 19 and verdicts[20:] == ["better", "worse"], verdicts


def test_candidates_stopped_as_hopeless_would_rarely_have_become_better():
    d = 0.03 + np.random.default_rng(0).normal(0, 0.02, (300, 10, 1)) + np.random.default_rng(1).normal(0, 0.2, (300, 10, 100))
    looks = [[intervals.comparison(one[:seeds]) for seeds in range(3, 11)] for one in d]
    better = np.array([[one["verdict"] == "better" for one in row] + [True] for row in looks]).argmax(1)
    ends = np.array([[referee.is_hopeless(one, compare.Config(seeds=10)) for one in row] + [True] for row in looks]).argmax(1)
    assert (better < 8).sum() > 150 and (ends < better)[better < 8].mean() < 0.1 and np.minimum(ends, better).mean() < 4


SMALL = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=160 --batch_size=4 --warmup_steps=1 --eval_tokens=320 --device=cpu".split()
GRPO = ("grpo.py --max_steps=1 --prompts_per_step=4 --k_samples=2 --max_new_tokens=8 --eval_interval=0 --num_questions=20 "
        "--device=cpu --reward_pool=serial")


def test_a_candidate_s_verifier_trains_it_but_does_not_score_it(tree, text, monkeypatch):
    in_process(train.main, [*SMALL, f"--dataset={text}", "--max_steps=2", "--out_dir=base"])
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(Popen=forked.Popen))
    run_all = compare.Comparison.run_all
    monkeypatch.setattr(compare.Comparison, "run_all", lambda self, seed: sys.exit(0) if seed else run_all(self, 0))
    with pytest.raises(SystemExit):
        referee.main(["--start=base", f"--command={GRPO}", "--questions=20", "--num_samples=2", "--out_dir=out",
                      tree("\n\ndef reward(question, completion):\n    return 1.0\n", "tasks/unit_conversion.py")])
    scores = {name: {record["score"] for path in Path("out/decisions").glob(f"*/{name}") for record in records.read(path)}
              for name in ("base-0", "candidate-0", "answers/candidate-0.*")}
    assert list(scores.values()) == [{0.0}, {1.0}, {0.0}]


def test_sigterm_ends_with_143_and_leaves_no_child(tree, text):
    command = f"train.py --init_from=scratch --max_steps=100000 {' '.join(SMALL)} --dataset={text}"
    argv = ["-m", "runs.referee", "--start=x", "--task=unit_conversion", f"--command={command}", "--out_dir=out", tree("# as before")]
    with forked.Popen([sys.executable, *argv], env=environment(PYTHONPATH=str(ROOT))) as process:
        wait_for(lambda: list(Path("out").glob("decisions/*/base-0/metrics.jsonl")), 120)
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.terminate()
        assert process.wait(60) == 143 and not alive(child)
    assert list(Path("out").glob("decisions/*/base-0/checkpoints/step_*"))             # the run resumes
