import random
import re
import subprocess
import sys
import time
from fractions import Fraction

import pytest

import tasks
from conftest import ROOT
from tasks import _numbers

EXAMPLE = re.compile(r"Question: (.*)\nReasoning: 1 (\w+) = ([\d.]+) (\w+)\. ([\d.]+) \* ([\d.]+) = ([\d.]+)\.\n"
                     r"Answer: <answer>([\d.]+)</answer>\n")


@pytest.fixture(scope="module")
def parsed():
    task = tasks.load("unit_conversion")
    return {split: [EXAMPLE.fullmatch(text) for text in task.documents(split)] for split in ("train", "valid")}


def test_every_worked_example_is_true_and_asks_what_it_answers(parsed):
    for match in parsed["train"] + parsed["valid"]:
        question, frm, ratio, to, n, factor, product, answer = match.groups()
        assert Fraction(n) * Fraction(factor) == Fraction(product) == Fraction(answer) and ratio == factor
        assert n in question.split() and frm in re.findall(r"\w+", question) and to in re.findall(r"\w+", question)


def test_no_validation_question_is_in_the_training_text_in_any_phrasing(parsed):
    asked = {split: {(m[5], m[2], m[4]) for m in matches} for split, matches in parsed.items()}
    assert not asked["train"] & asked["valid"] and len(asked["valid"]) > 500


def test_documents_are_a_function_of_split_and_seed():
    task = tasks.load("unit_conversion")
    assert task.documents("valid", seed=1) == task.documents("valid", seed=1) != task.documents("valid", seed=2)


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(LookupError, match="unit_conversion"):
        tasks.load("nothing")


def test_tasks_do_not_import_torch():
    program = "import sys, tasks; tasks.load('unit_conversion'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_questions_differ_and_splits_share_none():
    task = tasks.load("unit_conversion")
    train, valid = task.questions("train", n=3000), task.questions("valid", n=500)
    assert len({q["question"] for q in train}) == 3000 and not {q["question"] for q in train} & {q["question"] for q in valid}
    assert task.questions("valid", n=500) == valid != task.questions("valid", seed=1, n=500)
    units = {u for quantity in task.UNITS.values() for u in quantity}

    def asked(questions):                    # (number, its unit, the other unit), whatever the phrasing
        found = [(re.search(r"(\d+) (\w+)", q["question"]).groups(), re.findall(r"\w+", q["question"])) for q in questions]
        return {(n, frm, *(w for w in words if w in units and w != frm)) for (n, frm), words in found}
    assert len(asked(train)) == 3000 and len(next(iter(asked(train)))) == 3
    assert not asked(train) & asked(valid)
    with pytest.raises(ValueError, match="100000 questions of unit_conversion were asked for"):
        task.questions("valid", n=100_000)


def test_worked_examples_are_paid_in_full():
    task = tasks.load("unit_conversion")
    for text in task.documents("train")[:2000]:
        question, _, completion = text.partition("\n")
        answer = completion[completion.index("<answer>") + 8:completion.index("</answer>")]
        score, parts = task.reward({"question": question, "answer": answer}, completion)
        assert score == 1.0 and all(parts.values()), text


def test_grades_are_loose_and_exactness_is_not():
    task = tasks.load("unit_conversion")
    for completion, expected in (
            ("6 * 1000 = 6000. <answer>6200</answer>", (1.0, True, True, False, True)),
            ("6 * 1000 = 6400. <answer>6400</answer>", (0.0, True, False, False, False)),
            ("<answer>6000</answer>", (1.0, True, True, True, False)), ("6 * 1000 = 6000.", (0.0, False, False, False, True)),
            ("6 * 1,000 = 6,000. <answer> 6,000.0 </answer><answer>1</answer>", (1.0, True, True, True, True)),
            ("<answer>6000 m</answer>", (0.0, False, False, False, False)), ("<answer>1e999</answer>", (0.0, False, False, False, False)),
            ("6 * 1000 = 6000, 2 + 2 = 5. <answer>6000</answer>", (1.0, True, True, True, False))):
        score, parts = task.reward({"question": "", "answer": "6000"}, completion)
        assert (score, *parts.values()) == expected, completion


def test_junk_is_paid_nothing_and_costs_nothing():
    task, rng, slowest = tasks.load("unit_conversion"), random.Random(0), 0.0
    alphabet = ["<answer>", "</answer>", "9**9**9", "6000 ", "=", "*", "1,", "e", "-", "\0", "\n", "漢", "nan", "inf", "9" * 50, "__import__('os')"]
    for i in range(2000):
        junk = "".join(rng.choices(alphabet, k=rng.randrange(12))) * (1 if i % 20 else 20_000)
        began = time.process_time()          # of this process: others may be busy
        score, parts = task.reward({"question": "", "answer": "7.25"}, junk)
        slowest = max(slowest, time.process_time() - began)
        assert score == 0.0 and not parts["correct"]
    assert slowest < 0.05


def test_equations_are_read_as_arithmetic():
    rng = random.Random(1)
    for _ in range(2000):
        numbers = [rng.choice([str(rng.randrange(1, 1000)), f"{rng.random() * 10:.3f}", f"{rng.randrange(1000, 10**6):,}"]) for _ in range(4)]
        signs = rng.choices("+-*/", k=3)
        expression = "".join(f"{n} {s} " for n, s in zip(numbers, signs)) + numbers[3]
        expected = eval(expression.replace(",", ""))
        for sign, spelled in (("*", "×"), ("/", "÷"), (" ", "")):
            written = expression.replace(sign, spelled) if rng.random() < 0.5 else expression
            [(left, right)] = _numbers.equations(f"so {written} = 12.5.")
            assert left == pytest.approx(expected, rel=1e-9, abs=1e-9) and right == 12.5
    assert _numbers.all_true("3 + 4 * 2 = 11 and 10 / 4 = 2.5") and not _numbers.all_true("no equation") and not _numbers.all_true("1 / 0 = 0")
