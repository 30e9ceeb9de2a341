"""Answers in other forms than the tasks' own are read as what they say; steps and signs that decide nothing verify nothing."""
import time

import pytest

import tasks
from tasks import _numbers, chess_world, gym, guru, unit_conversion, unit_conversion_tool

ENDING = " <answer>{}</answer>"


def correct(task, question, answer, before=""):
    return tasks.load(task).reward(question, before + ENDING.format(answer))[1]["correct"]


@pytest.mark.parametrize("task, text, right, answer, is_right", [
    ("arithmetic", "What is 4 + 6?", "10", "10³", False), ("arithmetic", "What is 250 * 4?", "1000", "10³", True),
    ("arithmetic", "What is 250 * 6?", "1500", "1.5 × 10³", True), ("arithmetic", "What is 2 - 12?", "-10", "−10", True),
    ("gsm8k", "If half of 2 million people leave, how many people are left?", "1000000", "1 million people", True),
    ("gsm8k", "How many million people are left of 2 million?", "1", "1 million people", True),
    ("gsm8k", "How much does he pay?", "5", "$5M", False), ("gsm8k", "How much does he pay?", "5000000", "$5M", True),
    ("gsm8k", "How much does he pay?", "5000", "$5K", True), ("gsm8k", "How much does he pay?", "5", "$5", True)])
def test_scales_and_exponents(task, text, right, answer, is_right):
    assert correct(task, {"question": text, "answer": right}, answer) == is_right


@pytest.mark.parametrize("right, answer", [
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\dfrac{\sqrt{3}}{2}}"), ("72", r"\boxed{72^\circ}"), ("72", r"\boxed{72°}"), (r"\frac{1}{2}", r"\boxed{\tfrac12}"),
    ("7", "x" * 12_000 + r"\boxed{7}"), ("7", r"\boxed{5}" + "x" * 12_000 + r"\boxed{7}"), ("7", "<answer>7</answer>" + "x" * 12_000)])
def test_tex_and_long_texts(right, answer):
    assert guru.reward({"answer": right}, answer)[0] == 1 and guru.reward({"answer": "11"}, answer)[0] == 0


def test_a_long_trace_is_no_wrong_answer():
    for name in ("code:0", "simulation:0"):
        task = tasks.load(name)
        (question, *_) = task.questions("train", 0, 5)
        score, parts, *_ = task.reward(question, "x" * 2500 + ENDING.format(question["answer"]))
        assert score == 1 and not parts["reasoned"]


@pytest.mark.parametrize("right, answer, is_right", [
    ("Yes", "yes", True), ("Yes", "Yes.", True), ("True", "true", True), ("brother", "brother.", True), ("No", "yes", False), ("No", "", False)])
def test_a_word_has_no_case(right, answer, is_right):
    assert (gym.reward({"answer": right, "generator": "syllogism", "index": 0}, f"<answer>{answer}</answer>")[0] == 1) == is_right


def test_true_is_yes():
    task = tasks.load("logic:0")
    question = next(q for q in task.questions("train", 0, 200) if q["kind"] == "truth")
    words = {"yes": "True", "no": "False"}
    other = {"yes": "False", "no": "True"}
    assert task.reward(question, ENDING.format(words[question["answer"]]))[1]["correct"]
    assert not task.reward(question, ENDING.format(other[question["answer"]]))[1]["correct"]


def test_a_unit_in_parentheses():
    from tasks import science
    assert science.exponents("kg/(m·s²)") == science.exponents("kg m^-1 s^-2") and science.exponents("kg/(m") is None


@pytest.mark.parametrize("before", ["`12 * 34` = 407.", '"12 * 34" = 407.', "[12 * 34] = 407.", "12² = 150."])
def test_a_false_equation_in_quotes_is_false(before):
    question = {"question": "What is 12 * 34?", "answer": "408"}
    verified = [all(tasks.load("arithmetic").reward(question, text + " 12 * 34 = 408." + ENDING.format(408))[1].values()) for text in (before, "")]
    assert verified == [False, True]


def test_a_century_is_no_cent():
    question = {"question": "How many year are there per 3 century?", "answer": "300", "n": "3", "from": "century", "to": "year"}
    parts = tasks.load("unit_conversion").reward(question, "3 * 1 = 3." + ENDING.format(300))[1]
    assert parts["correct"] and not parts["reasoned"]


def test_comparisons_must_decide():
    task = tasks.load("table:1")
    question = next(q for q in task.questions("train", 0, 300) if q["kind"] == "largest" and len(q["rows"]) >= 3
                    and len({row[1 + q["column"]] for row in q["rows"]}) == len(q["rows"]))
    values = sorted(row[1 + question["column"]] for row in question["rows"])
    low, rest = values[0], values[1:]
    undecided = "".join(f"{low} < {n}, " for n in rest).strip(", ") + "."
    decided = "".join(f"{n} < {values[-1]}, " for n in values[:-1]).strip(", ") + "."
    reasoned = [task.reward(question, text + ENDING.format(question["answer"]))[1]["reasoned"] for text in (undecided, decided)]
    assert reasoned == [False, True]


def test_what_raised_is_a_score():
    assert chess_world.beyond(1.0, 1.0) == 0.0 and chess_world.beyond(0.7, 1.0) == 0.0 and chess_world.beyond(1.0, 0.5) == 0.99
    question = {"question": "How many day are 2.5 week?", "answer": "17.5", "n": "2.5", "from": "week", "to": "day"}
    text = "<calc>5 / 2</calc> = 2.5.1 week = 7 day. <answer>9</answer>"
    assert unit_conversion_tool.reward(question, text)[0] == 0
    assert not unit_conversion.reward(question, f"1 kg = {'9' * 5000} gram." + ENDING.format(3))[0]


def test_of_two_units_a_long_word_costs_no_time():
    question = {"question": "Convert 6 kg to gram.", "answer": "6000", "n": "6", "from": "kg", "to": "gram"}
    started = time.process_time()
    unit_conversion.reward(question, "6 * 1000 = 6000. " + "1a" * 4900)
    assert time.process_time() - started < 0.2


def test_other_normal_forms_are_unchanged():
    for text in ("5 m²", "cm³", "x²", r"\frac{1}{2}", "10^{3}"):
        assert _numbers.normal(text) == {"5 m²": "5 m²", "cm³": "cm³", "x²": "x²", r"\frac{1}{2}": "(1/2)", "10^{3}": "10^3"}[text]


@pytest.mark.parametrize("task, text, right, answer, is_right", [
    ("gsm8k", "Mia buys 2 dozen eggs and uses 16. How many eggs are left?", "8", "8 dozen", False),
    ("gsm8k", "How many tons does the ship carry?", "5", "5 kg", False), ("gsm8k", "How many tons does the ship carry?", "5", "5 tons", True),
    ("gsm8k", "How many pies?", "5", "5 and a quarter", False), ("gsm8k", "How many pies?", "5", "5 ninths", False),
    ("gsm8k", "How many hours does he work?", "2.5", "2 ½ hours", True), ("gsm8k", "How many hours does he work?", "2.5", "2½ hours", True),
    ("gsm8k", "How many metres?", "1000", r"1000~\text{m}", True), ("gsm8k", "How many metres?", "1000", "~1000", False),
    ("gsm8k", "How many dollars and cents?", "5", "5 and a bit", True),
    ("math", "Find the area of a rectangle 25 by 4.", "100", "100 sq units", True),
    ("math", "Find the area of a rectangle 25 by 4.", "100", "100 sq. units", True),
    ("math", "A price of 60 falls by 30%. What is it then?", "42", "42%", False),
    ("math", "A price of 60 falls by 30%. What is it then?", "42", "42", True)])
def test_scales_parts_and_units_of_an_answer(task, text, right, answer, is_right):
    assert correct(task, {"question": text, "answer": right}, answer) == is_right


@pytest.mark.parametrize("right, answer, is_right", [
    ("(3,5)", r"\boxed{(3, 5)}", True), ("(3,5)", r"\boxed{\frac72}", False), ("(3,5)", "<answer>3.5</answer>", False), ("1,3", "<answer>1, 3</answer>", True),
    ("1,000", "<answer>1000</answer>", True), ("5", r"\boxed{5\text{ cm}}", True), ("5", r"\boxed{5^\circ}", True), ("5", r"\boxed{6\text{ cm}}", False),
    ("(2,100)", "<answer>2100</answer>", False), ("(2,100)", "<answer>(2, 100)</answer>", True), ("(0,100)", "<answer>0.1</answer>", False),
    (r"90^\circ", r"\boxed{90}", True), (r"90^\circ", "<answer>90°</answer>", True), (r"90^\circ", r"\boxed{91}", False)])
def test_a_list_is_no_decimal_comma(right, answer, is_right):
    assert (guru.reward({"answer": right}, answer)[0] == 1) == is_right


@pytest.mark.parametrize("kind, answer, is_right", [
    ("lamps", "{} lamps", True), ("cups", "cup {}", True), ("cups", "under cup {}", True), ("cups", "cup 12{}", False), ("lamps", "{} and a half", False)])
def test_words_around_the_number_of_a_simulation(kind, answer, is_right):
    task = tasks.load("simulation")
    question = next(q for q in task.questions("train", 0, 400) if q["kind"] == kind and _numbers.number(q["answer"]) is not None)
    assert task.reward(question, ENDING.format(answer.format(question["answer"])))[1]["correct"] == is_right


def test_units_as_fractions_and_without():
    from tasks import science
    power = science.exponents("kg m^2 s^-3")
    assert all(science.exponents(text) == power for text in ("(kg m^2)/s^3", "(kg·m²)/s³", r"\frac{kg m^2}{s^3}"))
    assert science.exponents("dimensionless") == science.exponents("1") and science.exponents("(kg") is None


def test_thin_spaces_separate_units():
    from tasks import science
    force = science.exponents("kg m s^-2")
    assert force == science.exponents(r"$\mathrm{kg\,m\,s^{-2}}$") == science.exponents(r"\frac{kg\,m}{s^2}")


@pytest.mark.parametrize("task, question, answer", [
    ("countdown", {"question": "98 from 44 19 35", "answer": "98", "numbers": [44, 19, 35]}, "44 + 19 + 35"),
    ("gsm8k", {"question": "How many eggs?", "answer": "8"}, "8"), ("math", {"question": "How many eggs?", "answer": "8"}, "8")])
def test_an_answer_after_much_reasoning_is_found(task, question, answer):
    for text in ("x" * 10_000 + f"<answer>{answer}</answer>", f"<answer>{answer}</answer>" + "x" * 30_000):
        assert tasks.load(task).reward(question, text)[0] == 1
    assert tasks.load(task).reward(question, f"<answer>{answer}</answer>" + "x" * 10_000 + "<answer>7</answer>")[0] == 1     # the first


def test_a_temperature_sign_and_a_long_s():
    assert correct("unit_conversion:3", {"question": "", "n": "77", "from": "fahrenheit", "to": "celsius", "answer": "25"}, "25℃")
    question = {"question": "Convert 5 km to m.", "n": "5", "from": "km", "to": "m", "answer": "5000"}
    assert correct("unit_conversion", question, "5000", "5 * 1000 = 5000. ſix km.")


def test_two_statements_in_another_order_are_one_puzzle():
    from tasks import logic
    asked = {split: [q for q in logic.questions(split, 0, 3000, "1") if q["kind"] == "knights"] for split in ("train", "test")}
    puzzles = {split: {tuple(sorted(zip(*q["given"]))) for q in found} for split, found in asked.items()}
    assert len(puzzles["test"]) > 50 and len(puzzles["train"]) > 200 and not puzzles["train"] & puzzles["test"]


def test_verl_reads_the_end():
    from tasks import gsm8k_hashes
    question = {"answer": "18", "worked": ""}
    assert gsm8k_hashes.reward(question, "#### 18" + "x" * 200) == 1 and gsm8k_hashes.reward(question, "#### 18" + "x" * 300) == 0
