"""tasks/gym.py: questions of reasoning-gym, and what its verifiers pay."""
import subprocess
import sys

import pytest

import tasks
from conftest import ROOT
from tasks import gym
from tasks._pool import Pool

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
GENERATORS = ["gcd", "chain_sum", "knights_knaves", "spell_backward", "rotate_matrix", "fraction_simplification"]


@pytest.mark.parametrize("name", GENERATORS)
def test_generator(name):
    task = tasks.load(f"gym:{name}")
    found = {split: task.questions(split, seed=1, n=20) for split in tasks.SPLITS}
    assert found["train"] == task.questions("train", seed=1, n=20) != task.questions("train", seed=2, n=20)
    for questions in found.values():
        for q, other in zip(questions, questions[1:]):
            assert task.verified(*task.reward(q, "So.\n" + task.solution(q)))
            right = q["answer"]
            forms = [f"`{right}`", f"**{right}**"] * ("$" not in right) + [f"+{right}.0", rf"\boxed{{{right}}}"] * right.isdecimal()
            assert all(task.reward(q, f"<answer >{text}</answer>")[0] == 1.0 for text in forms), right
            # the library pays a part of these, and here they earn nothing
            for text in (right, f"<answer>The answer is {right}</answer>", f"<answer>{right} {right}</answer>", "<answer></answer>",
                         f"<answer>{right[:-2]}</answer>", f"<answer>{right}x</answer>", f"<answer>{'9' * 4000}</answer>", "<answer>1e999999999</answer>",
                         f"<answer>{other['answer']}x</answer><answer>{right}</answer>"):
                assert task.reward(q, text)[0] == 0, (right, text)


@pytest.mark.parametrize("group", gym.GROUPS)
def test_group(group):
    task = tasks.load(f"gym:{group}")
    found = {split: task.questions(split, n=60) for split in tasks.SPLITS}
    texts = [q["question"] for questions in found.values() for q in questions]
    assert len(texts) == len(set(texts)) == 180
    assert {q["generator"] for q in found["train"]} <= set(gym.GROUPS[group]) and len({q["generator"] for q in found["train"]}) > 5
    assert sorted(map(len, texts))[90] < 1000                      # characters: about 256 tokens
    assert max(len(q["answer"]) for q in found["train"]) < 1000


def test_digits_of_a_base_are_no_decimal_number():
    task = tasks.load("gym:base_conversion")
    q = next(q for q in task.questions("train", n=200) if q["answer"].isdecimal())
    assert [task.reward(q, f"<answer>{text}</answer>")[0] for text in (q["answer"], f"{q['answer']}.0")] == [1.0, 0.0]


def test_partial_reward_is_not_paid():
    task = tasks.load("gym:spell_backward")
    question = task.questions("train", n=1)[0]
    nearly = question["answer"][:-1] + "x"
    assert 0 < gym.dataset("spell_backward").score_answer(nearly, gym.entry("spell_backward", question["index"])) < 1
    assert task.reward(question, f"<answer>{nearly}</answer>") == (0.0, {"answered": True, "correct": False})
    assert task.reward(question, question["answer"]) == (0.0, {"answered": False, "correct": False})


def test_graded_elsewhere():
    """A worker, whose sets have another order, makes the items again."""
    task = tasks.load("gym:code")
    questions = task.questions("test", n=10)
    with Pool("gym:code", workers=1, timeout=30) as pool:
        grades = pool.score([(q, task.solution(q)) for q in questions] + [(questions[0] | {"question": "Another?"}, "<answer>x</answer>")])
    assert all(graded.verified for graded in grades[:-1])
    assert grades[-1].error is None or "install the version" in grades[-1].error


def test_every_audited_generator_has_a_place():
    allowed = [name for group in (*gym.GROUPS.values(), gym.OTHERS) for name in group]
    assert len(allowed) == len(set(allowed)) and not set(allowed) & gym.EXCLUDED.keys()
    assert set(gym.library().factory.DATASETS) <= set(allowed) | gym.EXCLUDED.keys()
    assert set(gym.EXACT) | gym.SETTINGS.keys() <= set(allowed)


def test_bad_names_are_a_sentence():
    for name, reason in gym.EXCLUDED.items():
        with pytest.raises(ValueError) as e:
            tasks.load(f"gym:{name}")
        assert name in str(e.value) and reason in str(e.value)
    assert "executes" in gym.EXCLUDED["countdown"] and "executes" in gym.EXCLUDED["polynomial_multiplication"]
    for spec, says in (("gym", "name of a group"), ("gym:", "name of a group"), ("gym:nothing", "no audited generator nothing")):
        with pytest.raises(ValueError, match=says):
            tasks.load(spec)


def test_missing_library_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        tasks.load("gym:gcd")


def test_library_is_imported_where_it_is_asked_for():
    code = "import sys; from tasks import gym; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
