"""docs/algorithm.md: a copy of grpo.py, and the three changes of docs/edits to it, in a folder of their own.

The diffs are between grpo.py as my_algo.py, with model.py, and their changed copies. If one no longer applies: apply it to the files of
an older commit, make the same changes to the present ones, and write `git diff --no-index -U2` of the two.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import forked
from conftest import ROOT, environment, flags, largest_difference
from runtime import checkpoint
from test_grpo import GRPO, base, letters, lines, one_thread, write  # noqa: F401

PAGE = ROOT / "docs/algorithm.md"
EQUAL = '''
def questions(split, seed=0, n=None):
    return [{"question": f"{split} {i}", "answer": ""} for i in range(9)][:n]

def reward(question, completion):
    return 0.5
'''

BY_QUESTION = EQUAL.replace('i}"', """i} {'cat' if i % 2 else 'mat'}\"""").replace("0.5", 'float("cat" in question["question"])')


@pytest.fixture
def changed(tmp_path):
    """Return a function that copies the repository (links, but for the files to be changed) into a folder, with a my_algo.py to which
    a diff of docs/edits is applied, and returns the folder."""
    def changed(name=None):
        folder = tmp_path / "copy"
        folder.mkdir()
        for path in ROOT.iterdir():
            if path.suffix == ".py" or (path / "__init__.py").exists():
                (folder / path.name).symlink_to(path)
        (folder / "model.py").unlink()
        shutil.copy(ROOT / "model.py", folder)
        shutil.copy(ROOT / "grpo.py", folder / "my_algo.py")
        if name:
            subprocess.run(["git", "apply", ROOT / f"docs/edits/{name}.diff"], cwd=folder, check=True,
                           env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)})
        return folder
    return changed


def imported(monkeypatch, path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def run(folder, *words, codes=(0,)):
    """Run a command in the folder, with its files. Returns what it said."""
    done = forked.run([sys.executable, *words], cwd=folder, env=environment(PYTHONPATH=str(folder)), capture_output=True, text=True,
                      timeout=120)
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def learnt(folder, out, start, task, **options):
    """Four steps of my_algo.py, the last two once more after a resume, with the same weights."""
    run(folder, "my_algo.py", *flags(**GRPO | dict(init_from=start, task=task, out_dir=out, save_interval=2, keep_last=9) | options))
    first = load_file(checkpoint.step_folder(out, 4) / "model.safetensors")
    shutil.rmtree(checkpoint.step_folder(out, 4))
    run(folder, "my_algo.py", *flags(init_from="resume", out_dir=out))
    assert largest_difference(first, load_file(checkpoint.step_folder(out, 4) / "model.safetensors")) == 0
    return lines(out)


def test_the_page_shows_gspo_whole_and_says_how_long_the_others_are():
    page = PAGE.read_text()
    for name in ("gspo", "entropy", "value"):
        diff = [line for line in (ROOT / f"docs/edits/{name}.diff").read_text().splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
        assert f"[{name}.diff](edits/{name}.diff), {len(diff)} lines" in page, len(diff)
        assert name != "gspo" or all(f"    {line}\n" in page for line in diff)
    assert len(re.sub(r"(?m)^    .*\n", "", page).split()) <= 500


def test_gspo_is_its_definition(changed, monkeypatch):
    """GSPO (Zheng et al. 2025, eq. 5 and 7): the mean over sequences of min(s A, clip(s) A), s = exp(mean over tokens of the log ratio)."""
    algo = imported(monkeypatch, changed("gspo") / "my_algo.py", "my_algo")
    cfg = algo.Config(loss_type="gspo", clip_low=3e-4, clip_high=4e-4)
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 7, 0, 9])[:, None]
    old = -torch.rand(6, 9)
    logp = (old + 1e-3 * torch.randn(6, 9)).masked_fill(~mask, float("nan")).requires_grad_()
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.0, 3.0, 2.0])
    loss, sums = algo.grpo_loss(logp, old, None, advantage, mask, cfg, algo.loss_denominator("gspo", 30, 5, 99))
    loss.backward()
    exact = logp.detach().double().nan_to_num(0.0).requires_grad_()
    s = (torch.where(mask, exact - old.double(), 0.0).sum(1) / mask.sum(1).clamp(min=1)).exp()
    terms = torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)[mask.any(1)]
    definition = -terms.sum() / 5
    definition.backward()
    assert loss.item() == pytest.approx(definition.item(), rel=1e-6)
    torch.testing.assert_close(logp.grad.double(), exact.grad, rtol=1e-5, atol=1e-9)
    clipped = (exact.grad == 0).all(1)[mask.any(1)].sum()
    assert 0 < clipped < 5 and 0 < sums["clipped"] < mask.sum()


def test_a_copy_with_gspo_runs_and_resumes(changed, base, letters, tmp_path):
    gspo = dict(loss_type="gspo", clip_low=3e-4, clip_high=4e-4, mini_batches=2)
    steps = learnt(changed("gspo"), tmp_path / "run", base, letters, **gspo)
    assert steps[0]["updates"] == 2 and any(line["clip_fraction"] for line in steps)


def test_an_entropy_bonus_trains_where_every_advantage_is_0(changed, base, tmp_path):
    task = write(tmp_path, EQUAL, "equal.py")
    steps = learnt(changed("entropy"), tmp_path / "run", base, task, entropy_weight=1, learning_rate=0.01, inner_epochs=2)
    assert all(line["updates"] == 2 for line in steps) and steps[-1]["entropy"] > steps[0]["entropy"] + 0.01
    assert steps[0]["loss"] == pytest.approx(-steps[0]["entropy"], rel=0.01)


def values_learnt(folder, out, start, task, **options):
    steps = learnt(folder, out, start, task, learning_rate=0.01, inner_epochs=8, value_weight=1, **options)
    heads = [load_file(checkpoint.step_folder(out, step) / "model.safetensors")["extras.value.weight"] for step in (2, 4)]
    assert heads[0].any() and not torch.equal(*heads)
    assert steps[0]["updates"] == 8 and steps[-1]["value_loss"] < 0.1
    assert all(line["advantage_fit"] is None for line in steps)            # rewards of a group are equal, and so are its advantages


def test_a_value_head_learns_and_is_in_the_checkpoints(changed, base, tmp_path):
    """The question decides the reward, 1 or 0 in turn, so that no constant value has an error as small."""
    values_learnt(changed("value"), tmp_path / "run", base, write(tmp_path, BY_QUESTION, "by_question.py"))


def test_every_command_takes_a_run_with_a_value_head_and_adapters(changed, base, tmp_path):
    folder, out, task = changed("value"), tmp_path / "run", write(tmp_path, EQUAL, "equal.py")
    values_learnt(folder, out, base, task, lora_rank=2)
    said = run(folder, "eval.py", str(out), *flags(task=task, num_questions=3, max_new_tokens=4, device="cpu", json=True))
    assert "accuracy" in said and "extras.value.weight" in said
    run(folder, "sample.py", str(out), *flags(prompt="the cat", max_new_tokens=3, device="cpu"))
    run(folder, "hf.py", str(out), str(tmp_path / "exported"))
    assert not any("extras" in name for name in load_file(tmp_path / "exported/model.safetensors"))
    assert "advantages_unlike_rewards" not in run(folder, "-m", "doctor", str(out), codes=(0, 3))
