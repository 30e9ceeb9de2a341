"""What small programs print, against Python itself; processes followed to their end, against their texts."""
import contextlib
import io
import random
import re

import pytest

import tasks
from tasks import code_ as code
from tasks import simulation
from tasks._steps import Steps
from test_table_science import drawn_of_each_kind, verify_domain, verify_junk, verify_mistakes

NAMES = {code: "code", simulation: "simulation"}


@pytest.mark.parametrize("module", [code, simulation], ids=["code", "simulation"])
def test_gold_is_paid_and_mistakes_are_not(module):
    verify_domain(NAMES[module], module, module.KINDS)


@pytest.mark.parametrize("module, is_mistaken", [(code, lambda q: q["kind"] == "list"),
                                                 (simulation, lambda q: q["kind"] == "stack")], ids=["code", "simulation"])
def test_shares_of_mistakes(module, is_mistaken, monkeypatch):
    verify_mistakes(NAMES[module], module, is_mistaken, monkeypatch)


@pytest.mark.parametrize("module", [code, simulation], ids=["code", "simulation"])
def test_junk(module):
    verify_junk(NAMES[module], drawn_of_each_kind(module, module.KINDS, 1))


@pytest.mark.parametrize("module", [code, simulation], ids=["code", "simulation"])
@pytest.mark.parametrize("level", [1, 2])
def test_there_are_enough_questions(module, level):
    rng = random.Random(0)
    assert len({module.draw(rng, level)[0] for _ in range(80_000)}) > 20_000


@pytest.mark.parametrize("level", [1, 2])
def test_programs_print_what_python_prints(level):
    for q in drawn_of_each_kind(code, code.KINDS, 200, level):
        program = q["question"].removeprefix("What does this program print?\n").removesuffix("\nWhat is printed?")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(program, {})                # ours: the test drew it
        assert said.getvalue().strip() == q["answer"], q


def followed(text):
    """The end of a process, computed from its text in another way than the task does."""
    numbers = list(map(int, re.findall(r"\d+", text)))
    if "robot" in text or "Start at" in text:
        x, y = numbers[:2]
        for n, way in re.findall(r"(\d+) (north|south|east|west)", text):
            x += {"east": int(n), "west": -int(n)}.get(way, 0)
            y += {"north": int(n), "south": -int(n)}.get(way, 0)
        return f"({x}, {y})"
    if "stack" in text:
        pile = []
        for push, letter in re.findall(r"(?i)(push (\w)|pop)", text):
            pile.append(letter) if letter else pile.pop()
        return pile[-1]
    if "amps" in text:
        row, *switched = re.findall(r"\b[01]{4,}\b", text) + re.findall(r"\b[2-9]\b|(?<=Switch )1\b|(?<=switch )1\b|(?<=, )1\b", text)
        return str(sum(int(lamp) ^ (str(i) in switched) for i, lamp in enumerate(row, 1)))
    if "halve" in text:
        value, times, odd = numbers
        for _ in range(times):
            value = value + odd if value % 2 else value // 2
        return str(value)
    at, *pairs = numbers
    order = list(range(10))                  # which ball is where
    for a, b in zip(pairs[::2], pairs[1::2]):
        order[a], order[b] = order[b], order[a]
    return str(order.index(at))


@pytest.mark.parametrize("level", [1, 2])
def test_processes_end_where_their_texts_lead(level):
    for q in drawn_of_each_kind(simulation, simulation.KINDS, 200, level):
        assert followed(q["question"]) == q["answer"], q


def test_a_reasoning_has_all_steps_and_no_other_equation():
    for name in ("code", "simulation"):
        task = tasks.load(name)
        for q in task.questions("train", n=200):
            right = task.solution(q)
            steps = Steps()
            task.module.worked(q, steps)
            assert task.reward(q, right)[1]["reasoned"] and task.reward(q, right.replace("\nAnswer", " Let me see.\nAnswer"))[1]["reasoned"]
            assert not task.reward(q, right.replace(steps.texts[-1], ""))[1]["reasoned"]
            assert not task.reward(q, right.replace("Reasoning: ", "Reasoning: 1 + 1 = 3. "))[1]["reasoned"]


def test_printed_texts_may_have_quotation_marks():
    q = next(q for q in tasks.load("code").questions("train", n=500) if q["kind"] == "word")
    assert tasks.load("code").reward(q, f"<answer>'{q['answer']}'</answer>")[0] == 1.0
    q = next(q for q in tasks.load("simulation").questions("train", n=500) if q["kind"] == "robot")
    assert tasks.load("simulation").reward(q, f"<answer>{q['answer'][1:-1]}</answer>")[0] == 1.0
