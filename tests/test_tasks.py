import re
import subprocess
import sys
from fractions import Fraction

import pytest

import tasks
from conftest import ROOT

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
