"""What small programs print, against Python itself; processes followed to their end, against their texts."""
import contextlib
import io
import random
import re
from collections import Counter

import pytest

import tasks
from tasks import code_ as code
from tasks import simulation
from tasks._steps import Steps
from test_table_science import drawn_of_each_kind

@pytest.mark.parametrize("module", [code, simulation], ids=["code", "simulation"])
@pytest.mark.parametrize("level", [1, 2])
def test_there_are_enough_questions(module, level):
    rng = random.Random(0)
    drawn = 0
    keys = set()
    while len(keys) <= 20_000 and drawn < 80_000:
        keys.add(module.draw(rng, level)[0])
        drawn += 1
    assert len(keys) > 20_000


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


def every_state(q, steps):
    """Each step with all that it could be, as one who guesses would write it."""
    def ways(text):
        head = text.split()[0]
        if q["kind"] == "branch":
            return [text, text.replace(" yes.", " no."), text.replace(" no.", " yes.")]
        if q["kind"] == "word":
            return [f"{head} is {letter}." for letter in q["given"][0]]
        if q["kind"] == "lamps":
            return [f"{head} {state:04b}." for state in range(16)]
        return [f"{text[:-3]} {cup}." for cup in (1, 2, 3)] if q["kind"] == "cups" else [text]
    return [*dict.fromkeys(way for text in steps.texts for way in ways(text))]


@pytest.mark.parametrize("name, guessed", [("code", ["branch", "word"]), ("simulation", ["lamps", "cups"])])
def test_steps_in_another_order_and_every_possible_step_are_not_kept(name, guessed):
    task, tried, kept = tasks.load(name), Counter(), []
    for q in task.questions("train", n=400):
        steps = Steps()
        task.module.worked(q, steps)
        right = steps.texts
        for way, texts in enumerate((every_state(q, steps), right[::-1], right * 2, right[:-1])):
            if texts != right:
                text = f"Reasoning: {' '.join(texts)}\nAnswer: <answer>{q['answer']}</answer>"
                tried[way, q["kind"]] += 1
                kept += [text] * task.verified(*task.reward(q, text))
    assert not kept and all(tried[0, kind] > 30 for kind in guessed) and sum(tried.values()) > 1000


@pytest.mark.parametrize("name", ["code:0", "code", "code:2", "simulation:0", "simulation", "simulation:2"])
def test_harmless_differences_are_kept_and_what_is_false_is_not(name):
    task = tasks.load(name)
    for q in task.questions("train", n=150) + task.questions("test", n=150):
        answer = q["answer"]
        right = task.solution(q).partition("\n")[0].removeprefix("Reasoning: ")
        end = f"\nAnswer: <answer>{answer}</answer>"
        points = "\n".join(f"{i}. {step}" for i, step in enumerate(right.removesuffix(".").split(". "), 1))
        for text in (right, f"I go through it. {right} So it is {answer}.", points, f"Reasoning:\n{points}",
                     right.replace(". ", "\n"), right.upper(), f"<think>\n{right}\n</think>"):
            assert task.verified(*task.reward(q, text + end)), text
        for text in (f"{right}{end[:9]} 1 + 1 = 3.{end[9:]}", f"{right} 1 ＋ 1 ＝ 3.{end}",
                     f"{right[:-1]}.5.{end}", f"{right} 1 north (2, 1).{end}", f"Swap 1 2: 3. {right}{end}",
                     f"{right} It is 0{answer}, or 77.{end}"):
            assert not task.reward(q, text)[1]["reasoned"], text



def test_answers_may_have_two_quotation_marks_or_parentheses_and_not_one():
    q = next(q for q in tasks.load("code").questions("train", n=500) if q["kind"] == "word")
    for text, score in ((f"'{q['answer']}'", 1.0), (f"'{q['answer']}", 0.0), (f"{q['answer']}\"", 0.0)):
        assert tasks.load("code").reward(q, f"<answer>{text}</answer>")[0] == score
    q = next(q for q in tasks.load("simulation").questions("train", n=500) if q["kind"] == "robot")
    place = q["answer"]
    for text, score in ((place, 1.0), (place[1:-1], 1.0), (place[:-1], 0.0), (place[1:], 0.0)):
        assert tasks.load("simulation").reward(q, f"<answer>{text}</answer>")[0] == score
