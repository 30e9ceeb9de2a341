import gc
import json
import random
import re
import subprocess
import sys
import time
import types
from collections import Counter
from fractions import Fraction

import pytest

import tasks
from conftest import ROOT
from tasks import _equations, _questions, _units, countdown, unit_conversion
from tasks._pool import grade

EXAMPLE = re.compile(r"Question: (.*)\nReasoning: 1 (\w+) = ([\d.]+) (\w+)\. ([\d.]+) ([*/]) ([\d.]+) = ([\d.]+)\.\n"
                     r"Answer: <answer>([\d.]+)</answer>\n")
LEVELS = ["unit_conversion", "unit_conversion:2", "unit_conversion:3"]
DOMAINS = [name + level for name in ("math", "code", "logic", "simulation", "table", "science") for level in ("", ":0", ":2")]
GENERATED = LEVELS + ["arithmetic", "arithmetic:4", "countdown", "countdown:5"] + DOMAINS


def pairs(text):
    return [(e.left, e.right) for e in _equations.read(text) if e.left is not None]


def all_true(text):
    found = list(_equations.read(text))
    return any(e.computed for e in found) and all(e.true for e in found)


def asked(q):
    """What a question asks, whatever its wording."""
    if "from" in q:
        return q["n"], q["from"], q["to"]
    if "kind" in q:
        return q["kind"], q.get("form"), str(q.get("given") or q.get("numbers") or q["question"])
    if "signs" in q:
        return q["signs"], *sorted(q["numbers"][:2]), *q["numbers"][2:]
    return q["answer"], *sorted(q["numbers"])


def problem(i):
    """A row of GSM8K's form."""
    return {"question": f"Ann has {i} bags of 3 apples and eats 1,000.  How many are left?",
            "answer": f"She had {i} * 3 = <<{i}*3={3 * i}>>{3 * i} apples.\n"
                      f"{3 * i} - 1,000 = <<{3 * i}-1000={3 * i - 1000}>>{3 * i - 1000}\n#### {3 * i - 1000:,}"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """The spec of gsm8k with a folder that has both files; five of its test questions are among those that train."""
    folder = tmp_path_factory.mktemp("gsm8k")
    jsonl(folder / "train.jsonl", [problem(i) for i in range(1000, 3000)])
    jsonl(folder / "test.jsonl", [problem(i) for i in range(2995, 3200)])
    return f"gsm8k:{folder}"


@pytest.fixture
def no_collection():
    """A pass over all that the tests hold is not a verifier's time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def parsed():
    task = tasks.load("unit_conversion")
    return {split: [EXAMPLE.fullmatch(in_one_step(text)) for text in task.documents(split)] for split in ("train", "valid")}


def in_one_step(text):
    """A worked example with the product that it computes digit by digit, all of it right but perhaps the sum, in one equation."""
    found = re.search(r"\. ((?:\d+ \* \d+ = \d+\. )+)(\d+(?: \+ \d+)+) = ([\d.]+)\.\n", text)
    if not found:
        return text
    parts = [tuple(map(int, part)) for part in re.findall(r"(\d+) \* (\d+) = (\d+)", found[1])]
    assert all(d * x == product for d, x, product in parts) and found[2] == " + ".join(str(product) for *_, product in parts)
    return text.replace(found[0], f". {sum(d for d, *_ in parts)} * {parts[0][1]} = {found[3]}.\n")


def test_seven_in_ten_worked_examples_are_true_and_the_others_have_one_wrong_step(parsed):
    sizes = {unit: size for units in unit_conversion.UNITS[0].values() for unit, size in units.items()}
    for matches in parsed.values():
        wrong, beyond = 0, 0
        for match in matches:
            question, frm, ratio, to, n, sign, factor, product, answer = match.groups()
            assert n in question.split() and frm in re.findall(r"\w+", question) and to in re.findall(r"\w+", question)
            assert product == answer and factor == ratio
            truth = Fraction(n) * sizes[frm] / sizes[to]
            away = abs(Fraction(answer) - truth) / truth
            steps = [sign == "*", Fraction(ratio) == Fraction(sizes[frm], sizes[to]),
                     all_true(f"{n} {sign} {factor} = {product}")]
            assert (away == 0) == all(steps) and (all(steps) or (sum(steps) == 2 and away > 1e-3))
            wrong, beyond = wrong + (away > 0), beyond + (away > 0.05)
        assert 0.25 < wrong / len(matches) < 0.35 and beyond > 0.95 * wrong
    assert [len(matches) for matches in parsed.values()] == [20_000, 1000]


def test_no_validation_question_is_in_the_training_text_in_any_phrasing(parsed):
    asked = {split: {(m[5], m[2], m[4]) for m in matches} for split, matches in parsed.items()}
    assert not asked["train"] & asked["valid"] and len(asked["valid"]) > 500
    held_out = {(q["n"], q["from"], q["to"]) for q in tasks.load("unit_conversion").questions("test", n=1000)}
    assert not (asked["train"] | asked["valid"]) & held_out


@pytest.mark.parametrize("spec", GENERATED[1:])
def test_documents_are_questions_with_their_worked_answers(spec, monkeypatch):
    monkeypatch.setattr(_questions, "N_DOCUMENTS", {"train": 3000, "valid": 300})
    task = tasks.load(spec)
    train, valid = task.documents("train"), task.documents("valid")
    for text in train + valid:
        prompt, newline, completion = text.partition("\nReasoning: ")     # a question may have lines of its own
        completion = newline[1:] + completion
        assert prompt.startswith("Question: ") and completion.startswith("Reasoning: ") and completion.endswith(task.stop + "\n")
    heard, held_out = ({text.partition("\nReasoning: ")[0][10:] for text in texts} for texts in (train, valid))
    assert (len(train), len(valid)) == (3000, 300) and not heard & held_out
    assert not heard & {q["question"] for q in task.questions("test")}


@pytest.mark.parametrize("spec", GENERATED)
def test_all_is_a_function_of_split_and_seed(spec, monkeypatch):
    monkeypatch.setattr(_questions, "N_DOCUMENTS", {"train": 50, "valid": 50})
    task, again = tasks.load(spec), tasks.load(spec)
    for make in (lambda t, seed: t.documents("valid", seed), lambda t, seed: t.questions("test", seed, n=50)):
        assert make(task, 1) == make(again, 1) != make(task, 2)
    assert task.examples(4) == again.examples(4) and len(set(task.examples(4))) == 4 and task.examples(3) == task.examples(4)[:3]
    assert json.loads(json.dumps(task.questions("train", n=20))) == task.questions("train", n=20)


@pytest.mark.parametrize("spec", GENERATED)
def test_questions_differ_and_splits_share_none(spec):
    task = tasks.load(spec)
    seen = {split: [q for seed in range(3) for q in task.questions(split, seed, n=250)] for split in ("train", "valid", "test")}
    for seed in range(3):
        assert len({asked(q) for q in seen["train"][250 * seed:250 * seed + 250]}) == 250
    keys = {split: {asked(q) for q in questions} for split, questions in seen.items()}
    assert not keys["train"] & keys["valid"] and not keys["train"] & keys["test"] and not keys["valid"] & keys["test"]
    assert len(task.questions("train")) == 1000
    worked = {q for q, _ in task.examples(4)}
    assert not worked & {q["question"] for split in ("valid", "test") for q in seen[split]}


@pytest.mark.parametrize("spec, split, n", [("unit_conversion", "test", 5000), ("unit_conversion:1", "train", 40_000), ("unit_conversion:2", "train", 10**7),
                                            ("unit_conversion:3", "valid", 10**9), ("arithmetic:1", "train", 10**5), ("countdown:2", "test", 10**4)])
def test_a_number_of_questions_that_arithmetic_rules_out_is_refused_before_one_is_drawn(spec, split, n):
    began = time.perf_counter()
    with pytest.raises(ValueError, match=rf"{n} questions of the split {split} were asked for, and there are at most \d+: lower --num_questions"):
        tasks.load(spec).questions(split, n=n)
    assert time.perf_counter() - began < 5


def test_more_questions_than_there_are_is_a_sentence(stories):
    for spec, n in (("arithmetic:1", 600), (stories, 10_000)):
        with pytest.raises(ValueError, match=rf"{n} questions of .* were asked for, and the split valid has \d+\.$"):
            tasks.load(spec).questions("valid", n=n)
    with pytest.raises(ValueError, match="has no split dev: choose train, valid or test"):
        tasks.load("arithmetic").questions("dev")
    with pytest.raises(ValueError, match="has no split test: choose train or valid"):
        tasks.load("arithmetic").documents("test")


@pytest.mark.parametrize("spec", GENERATED + ["stories"])
def test_gold_is_paid_in_full(spec, stories):
    task = tasks.load(stories if spec == "stories" else spec)
    questions = task.questions("train", n=1500 if spec == "stories" else 2000)
    for q in questions:
        solution = task.solution(q)
        assert task.verified(*task.reward(q, solution)) and solution.endswith(task.stop) and task.signature(solution), (q, solution)


@pytest.mark.parametrize("spec", ["unit_conversion", "arithmetic", "countdown", "stories"])
def test_junk_is_paid_nothing_and_costs_nothing(spec, stories, no_collection):
    task, rng, slowest = tasks.load(stories if spec == "stories" else spec), random.Random(0), 0.0
    question = {"question": "", "answer": "7.25" if spec == "unit_conversion" else "725", "numbers": [7, 2, 5]}
    alphabet = ["<answer>", "</answer>", "9**9**9", "6000 ", "=", "*", "1,", "e", "-", "\0", "\n", "漢", "nan", "inf", "9" * 50, "(", ")",
                "<<", ">>", "1=", "1+1=2", " x ", "%", "/0", "__import__('os')", "\ud800", "²", "1e999", "<answer>nan</answer>",
                "<answer>9**9**9</answer>", "<answer>1e400</answer>", f"<answer>{'9' * 199}</answer>", "<answer>(((7",
                "<answer>7/(5-5)*2</answer>", "<answer>-</answer>", "1 + 1 = 1e999%"]
    longest = ["<answer>" * 5000, "(" * 5000 + "1" + ")" * 5000, "<answer>" + "(" * 5000 + "7" + ")" * 5000 + "</answer>", "9" * 10**6,
               "1+" * 10**5, "1=" * 10**5, "((1)=" * 10**5, "<<1=1>>" * 10**5, "\n1+1=2" * 10**5, "1 a " * 10**5, ",000" * 10**5,
               "1" + ",000" * 10**5 + "0"]
    for i in range(2000):
        junk = "".join(rng.choices(alphabet, k=rng.randrange(12))) * (1 if i % 20 else 20_000) if i >= len(longest) else longest[i]
        began = time.process_time()          # of this process: others may be busy
        score, parts = task.reward(question, junk)
        slowest = max(slowest, time.process_time() - began)
        assert score == 0.0 and not parts["correct"], junk[:200]
        began = time.process_time()
        task.signature(junk)
        slowest = max(slowest, time.process_time() - began)
    assert slowest < 0.05


@pytest.mark.parametrize("spec", GENERATED + ["stories"])
def test_a_right_answer_with_a_false_equation_is_not_verified(spec, stories):
    task = tasks.load(stories if spec == "stories" else spec)
    for q in task.questions("valid", n=50):
        score, parts = task.reward(q, "3 + 4 = 8. " + task.solution(q))
        assert score == 1.0 and not parts["reasoned"] and not task.verified(score, parts)


def test_grades_are_loose_and_exactness_is_not():
    task = tasks.load("unit_conversion")
    for completion, expected in (
            ("6 * 1000 = 6000. <answer>6200</answer>", (1.0, True, True, False, True)),
            ("6 * 1000 = 6400. <answer>6400</answer>", (0.0, True, False, False, False)),
            ("<answer>6000</answer>", (1.0, True, True, True, False)), ("6 * 1000 = 6000.", (0.0, False, False, False, True)),
            ("6 * 1,000 = 6,000. <answer> 6,000.0 </answer><answer>1</answer>", (1.0, True, True, True, True)),
            ("<answer>6000 m</answer>", (1.0, True, True, True, False)), ("<answer>1e999</answer>", (0.0, False, False, False, False)),
            ("6 * 1000 = 6000, 2 + 2 = 5. <answer>6000</answer>", (1.0, True, True, True, False))):
        score, parts = task.reward({"question": "", "answer": "6000"}, completion)
        assert (score, *parts.values()) == expected, completion


def test_arithmetic_has_one_right_answer(stories):
    for spec in ("arithmetic", "math", stories):
        task = tasks.load(spec)
        for answer, score in (("5000", 1.0), ("5,000.0", 1.0), ("5001", 0.0), ("5000.1", 0.0), ("-5000", 0.0), ("$5000", 1.0),
                              ("5000 $", 1.0)):
            assert task.reward({"question": "", "answer": "5000"}, f"<answer>{answer}</answer>")[0] == score, (spec, answer)


# --- unit conversion ---

def test_conversions_are_those_of_the_world():
    for n, frm, to, expected in (
            (100, "celsius", "fahrenheit", 212), (-40, "fahrenheit", "celsius", -40), (300, "kelvin", "celsius", Fraction("26.85")),
            (50, "fahrenheit", "kelvin", Fraction("283.15")), (36, "km/h", "m/s", 10), (10, "mph", "km/h", Fraction("16.09344")),
            (1, "pound", "gram", Fraction("453.59237")), (14, "pound", "stone", 1), (16, "ounce", "pound", 1), (12, "inch", "foot", 1),
            (3, "foot", "yard", 1), (1760, "yard", "mile", 1), (1, "mile", "km", Fraction("1.609344")), (8, "pint", "gallon", 1),
            (1, "gallon", "litre", Fraction("3.785411784")), (2, "cup", "pint", 1), (4, "quart", "gallon", 1), (2, "GiB", "MiB", 2048),
            (1, "KiB", "byte", 1024), (1, "century", "day", 36525), (1, "year", "month", 12), (1, "m3", "litre", 1000),
            (3, "TB", "GB", 3000), (1, "tonne", "quintal", 10), (5, "dm", "cm", 50), (2, "fortnight", "week", 4),
            (7, "m", "micrometre", 7_000_000)):
        assert unit_conversion.exact(Fraction(n), frm, to) == expected, (frm, to)
    q = {"question": "", "answer": "68", "n": "20", "from": "celsius", "to": "fahrenheit", "level": 3}
    assert unit_conversion.solution(q) == "Reasoning: 20 * 9 / 5 = 36. 36 + 32 = 68.\nAnswer: <answer>68</answer>"
    q = {"question": "", "answer": "10", "n": "36", "from": "km/h", "to": "m/s", "level": 3}
    assert unit_conversion.solution(q).startswith("Reasoning: 1 km/h = 1000 m per hour. 36 * 1000 = 36000. "
                                                  "1 m/s = 3600 m per hour. 36000 / 3600 = 10.")


def test_every_wording_names_number_and_units():
    phrasings = unit_conversion.PHRASINGS + unit_conversion.SPEEDS + unit_conversion.TEMPERATURES
    assert len(set(phrasings)) >= 36 and all({"{n}", "{frm}", "{to}"} <= set(re.findall(r"\{\w+\}", p)) for p in phrasings)
    for level, fewest, quantities in ((1, 5, 5), (2, 32, 5), (3, 42, 7)):
        questions = tasks.load(f"unit_conversion:{level}").questions("train", n=1000)
        shapes = {re.sub(rf"(?<![\w.-]){re.escape(q['n'])}(?!\w|\.\d)", "#", q["question"].replace(q["from"], "@").replace(q["to"], "@"))
                  for q in questions}
        assert all(q["n"] in q["question"] and q["from"] in q["question"] and q["to"] in q["question"] for q in questions)
        assert fewest <= len(shapes) and len({unit_conversion.size_of(q["from"])[0] for q in questions}) == quantities
        assert any("." in q["n"] for q in questions) == (level > 1)
        assert all(float(q["answer"]) == round(float(q["answer"]), 3) for q in questions)


def test_examples_are_of_different_quantities():
    for spec, many in zip(LEVELS, (5, 5, 7)):
        texts = [question for question, _ in tasks.load(spec).examples(many)]
        units = {unit: quantity for added in unit_conversion.UNITS for quantity, names in added.items() for unit in names}
        found = [{units[w] for w in re.findall(r"[\w/]+", text) if w in units} for text in texts]
        assert len({frozenset(f) for f in found}) == many


def test_questions_from_files(tmp_path):
    def rows(numbers):
        return [[f"How many gram are there per {i} kg?", i * 1000 if i % 2 else f" {i},000.0 "] for i in numbers]
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.json").write_text(json.dumps(rows(range(1, 501))))
    (data / "valid.json").write_text(json.dumps(rows(range(491, 600)) + [["how  many GRAM are there per 7 kg?", 7000]]))
    for spec in (f"unit_conversion:{data}", f"unit_conversion:{tmp_path}"):
        task = tasks.load(spec)
        splits = {split: {q["question"].casefold() for q in task.questions(split)} for split in ("train", "valid", "test")}
        assert len(splits["test"]) == 110 and len(splits["train"] | splits["valid"]) == 489 and 20 < len(splits["valid"]) < 80
        assert not splits["train"] & splits["valid"]
        assert not any("per 7 kg" in q or "per 495 kg" in q for q in splits["train"] | splits["valid"])
        assert task.reward(task.questions("test")[1], "492 * 1000 = 492000 <answer>492000</answer>") == (1.0, dict.fromkeys(
            ("answered", "correct", "exact", "reasoned"), True))
    assert task.questions("train", seed=3, n=40) == task.questions("train", seed=3, n=40) != task.questions("train", seed=4, n=40)
    assert len(task.examples(3)) == 3
    with pytest.raises(ValueError, match="no worked solution"):
        task.solution(task.questions("train")[0])
    (data / "test.json").write_text(json.dumps(rows(range(700, 720))))
    assert len(task.questions("test")) == 20 and len(task.questions("valid")) == 110 and len(task.questions("train")) == 489
    whole = tasks.load(f"unit_conversion:{data / 'train.json'}")
    assert sum(len(whole.questions(split)) for split in ("train", "valid", "test")) == 500


@pytest.mark.parametrize("text, message", [
    ("", "can't be read"), ("[]", "has no questions"), ('{"a": 1}', "has no questions"), ('[["q", 1], ["q", "six"]]', "row 2"),
    ('[["q", NaN]]', "row 1"), ('[["q", true]]', "row 1"), ('[["q"]]', "row 1"), ("[7]", "row 1"), ('[["", 7]]', "row 1"),
    ('[[3, 7]]', "row 1"), ('[["q", 1], ["q", 1e999]]', "row 2"), ('["ab"]', "row 1"), ("[" * 10**5, "can't be read")])
def test_bad_files_are_named_with_their_row(tmp_path, text, message):
    file = tmp_path / "train.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        tasks.load(f"unit_conversion:{file}").questions("train")
    assert str(file) in str(error.value) and "\n" not in str(error.value)


# --- GSM8K ---

def test_gsm8k_splits_share_no_question(stories):
    task = tasks.load(stories)
    splits = {split: [q["question"] for q in task.questions(split)] for split in ("train", "valid", "test")}
    assert len(splits["test"]) == 205 and len(splits["train"]) + len(splits["valid"]) == 1995 and 150 < len(splits["valid"]) < 250
    assert sum(map(len, splits.values())) == len(set(sum(splits.values(), [])))
    alone = tasks.load(f"{stories}/train.jsonl")
    sizes = [len(alone.questions(split)) for split in ("train", "valid", "test")]
    assert sum(sizes) == 2000 and 1500 < sizes[0] < 1700
    texts = task.documents("valid")
    assert len(texts) == len(splits["valid"]) and all("<<" not in text and text.endswith("</answer>\n") for text in texts)
    assert task.questions("test")[0]["answer"] == "7985" and len(task.examples(4)) == 4


def test_gsm8k_in_verl_s_form(stories):
    task = tasks.load(stories.replace("gsm8k", "gsm8k_hashes", 1))
    question = task.questions("test")[0]
    # a chat model sees the question alone
    assert question["answer"] == "7985" and question["question"].endswith('output the final answer after "####".') and task.prompt == "{}\n"
    assert not task.instruction and task.documents("valid")[0].count("####") == 2
    assert task.module.reward(question, task.module.solution(question)) == 1
    said = {"#### 7,985": 1, "so #### 12\n#### 7985 eggs": 1, "#### 7985\n#### 12": 0, "####7985": 0, "#### 7985.0": 0, "7985": 0, "": 0,
            "<answer>7985</answer>": 0}
    assert {text: task.module.reward(question, text) for text in said} == said
    raw = {"question": "How many?", "answer": "They are 3 * 3 = <<3*3=9>>9.\n#### 9"}
    assert task.module.reward(raw, "#### 9") == 1 and task.module.reward(raw, "#### 3") == 0
    assert all("<<" not in text and "\n#### " in text for text in task.documents("valid"))


def test_gsm8k_says_what_is_wrong(tmp_path, monkeypatch):
    for row, line in (('{"question": "q", "answer": "no number"}', 2), ('{"question": "q"}', 2), ("[]", 2), ("{", 2)):
        file = tmp_path / "train.jsonl"
        file.write_text(f'{json.dumps(problem(7))}\n{row}\n')
        with pytest.raises(ValueError, match=rf"train.jsonl(, row {line}, is no| can't be read)"):
            tasks.load(f"gsm8k:{tmp_path}").questions("train")
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no questions"):
        tasks.load(f"gsm8k:{file}").questions("train")
    with pytest.raises(OSError, match="gsm8k:PATH names"):
        tasks.load(f"gsm8k:{tmp_path / 'nowhere'}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets, or give a local file"):
        tasks.load("gsm8k").questions("test")

    def no_network(*_):
        raise ConnectionError("no route\nto host")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=no_network))
    with pytest.raises(OSError, match=r"ConnectionError: no route\): connect"):
        tasks.load("gsm8k").questions("test")
    rows = {"train": [problem(i) for i in range(1000, 1100)], "test": [problem(i) for i in range(1100, 1110)]}
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_: rows))
    assert len(tasks.load("gsm8k").questions("test")) == 10


# --- countdown ---

def test_countdown_computes_what_python_does():
    """eval is the oracle here, of texts that this test makes."""
    rng = random.Random(2)

    def expression(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randrange(30))
        text = rng.choice(("", " ")).join([expression(depth - 1), rng.choice("+-*/"), expression(depth - 1)])
        return f"({text})" if rng.random() < 0.5 else text
    for _ in range(2000):
        text = expression(rng.randrange(1, 5))
        found = countdown.parse(f"so <answer>{text}</answer>")
        try:
            expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", text))
        except ZeroDivisionError:
            expected = None
        if len(text) > 200 or expected is None:
            assert found is None
        else:
            assert found[0] == expected and found[1] == [int(n) for n in re.findall(r"\d+", text)], text
            again = countdown.parse(f"<answer>{found[2]}</answer>")
            assert again[0] == expected and Counter(again[1]) == Counter(found[1]), (text, found[2])


def test_countdown_takes_each_number_once():
    task = tasks.load("countdown")
    q = {"question": "", "answer": "46", "numbers": [3, 7, 25]}
    right, other_value, other_numbers = (True, True, True), (True, True, False), (True, False, False)
    for text, expected in (("7 * 3 + 25", right), ("25+7×3", right), ("25 + 7·3", right), ("25 + 7 x 3", right), ("7 * 3 + 25.", right),
                           ("7 * 3 + 25 = 46", right), ("**7 ⋅ 3 + 25**", right), (r"\boxed{7 \times 3 + 25}", right),
                           ("25 − 3 × 7 = 4", other_value), ("25 - 3 * 7", other_value), ("46", other_numbers),
                           ("25 + 7 + 7 + 7", other_numbers), ("7 * 3 + 25 + 0", other_numbers)):
        score, parts = task.reward(q, f"<answer>{text}</answer>")
        assert (score, parts["answered"], parts["numbers"], parts["correct"]) == (float(expected == right), *expected), text
    for text in ("25 + 3 7", "7 * 3 + 25 = 47", "7 * 3 + 25 =", "46 = 7 * 3 + 25", "7 * 3 or 25", "(7 * 3 + 25", "7 * 3 + 25)", "", "7 ** 3 + 25", "-3 + 7 * 25", "3 / (7 - 7)", "7 * + 3", "()"):
        score, parts = task.reward(q, f"<answer>{text}</answer>")
        assert score == 0.0 and not parts["answered"] and not parts["correct"], text
    same = {task.signature(f"Try.\n<answer>{text}</answer>") for text in ("7 * 3 + 25", "25+(3×7)", "((25) + 7*3)", "(07 * 3) + 25")}
    assert len(same) == 1 and task.signature("<answer>25 * 3 + 7</answer>") not in same
    assert task.signature("<answer>25 - (7 - 3)</answer>") != task.signature("<answer>25 - 7 - 3</answer>")


# --- tasks of one's own ---

def own(tmp_path, text, spec=""):
    file = tmp_path / "mine.py"
    file.write_text(text)
    return f"{file}{spec}"


def test_a_file_of_ones_own_is_a_task(tmp_path):
    text = """
from dataclasses import dataclass
PROMPT, STOP, INSTRUCTION = "{} ", "!", "Shout."
@dataclass
class Word:
    text: str
def reward(question, completion):
    return float(completion == question["answer"])
def questions(split, n=None, argument="a"):
    return [{"question": f"{split} {argument} {i}", "answer": Word(str(i)).text} for i in range(n or 9)]
def solution(question):
    return question["answer"]
"""
    task = tasks.load(own(tmp_path, text, ":b"))
    assert (task.prompt, task.stop, task.instruction) == ("{} ", "!", "Shout.")
    assert task.questions("test", n=2) == [{"question": "test b 0", "answer": "0"}, {"question": "test b 1", "answer": "1"}]
    q = task.questions("valid")[3]
    assert task.reward(q, "3") == (1.0, {"correct": True}) and task.reward(q, "4") == (0.0, {"correct": False})
    assert task.examples(2) == [("train b 0", "0"), ("train b 1", "1")] and task.examples(0) == []
    assert task.signature("1 + 2 =  3") == task.signature("1+2=3.0") != task.signature("2+1=3") and task.signature(" a  b") == "a b"
    with pytest.raises(ValueError, match="has no documents: write a function documents"):
        task.documents("train")
    with pytest.raises(ValueError, match="20 worked examples .* were asked for, and it has 9"):
        task.examples(20)


@pytest.mark.parametrize("result, parts", [
    ("True", {"correct": True}), ("0.5", {"correct": False}), ("(1, {'a': 1, 'b': 0})", {"a": True, "b": False}),
    ("float('nan')", None), ("1.01", None), ("-1", None), ("None", None), ("'x'", None), ("(1, 2, 3)", None), ("(1, [2])", None)])
def test_a_score_is_a_number_from_0_to_1(tmp_path, result, parts):
    task = tasks.load(own(tmp_path, f"def reward(question, completion): return {result}"))
    if parts is None:
        with pytest.raises(ValueError, match="a score is a number from 0 to 1"):
            task.reward({}, "")
    else:
        assert task.reward({}, "")[1] == parts


def test_what_is_no_task_is_a_sentence(tmp_path):
    for spec, kind, message in (
            ("nothing", LookupError, "There is no task nothing: choose arithmetic, chess_world, code, countdown, countdown_search, countdown_think, gsm8k, gsm8k_hashes, "
             "guess, guru, gym, logic, math, science, simulation, table, unit_conversion, unit_conversion_tool"),
            (str(tmp_path / "none.py"), OSError, "There is no file"), (own(tmp_path, "def reward("), ValueError, "SyntaxError"),
            ("unit_conversion:4", ValueError, "a level, 1, 2 or 3"), ("unit_conversion:", ValueError, "nothing is none of these"),
            ("arithmetic:x", ValueError, "number of digits"), ("countdown:9", ValueError, "2 to 6")):
        with pytest.raises(kind, match=message):
            tasks.load(spec)
    for text, message in (("x = 1", "has no reward"), ("import nowhere", "nowhere")):
        with pytest.raises(ValueError, match=message):
            tasks.load(own(tmp_path, text))
    with pytest.raises(ValueError, match="takes an argument: leave :7 out"):
        tasks.load(own(tmp_path, "def reward(question, completion): return 0", ":7"))
    with pytest.raises(ValueError, match="a question is"):
        spec = own(tmp_path, "def reward(question, completion): return 0\ndef questions(split): return ['q']")
        tasks.load(spec).questions("train")


@pytest.mark.parametrize("head", [
    "def reward(completion):", "def reward(question, completion, answer):", "class reward:",
    "def reward(*, question, completion):", "def reward(question, argument, completion):"])
def test_a_reward_that_can_not_be_called_is_refused_when_it_is_loaded(tmp_path, head):
    with pytest.raises(ValueError, match=r"mine.py.* can't be called as reward\(question, completion\)"):
        tasks.load(own(tmp_path, f"{head}\n    pass\n", ":2" if "argument" in head else ""))


@pytest.mark.parametrize("text", [
    "reward = max", "reward = lambda *given: 1", "def reward(q, c, strict=False): return 1", "reward = type"])
def test_a_reward_that_can_be_called_is_taken(tmp_path, text):
    assert callable(tasks.load(own(tmp_path, text)).score)


THREE = "def questions(split): return [dict(question='q', answer='a')] * 3\ndef solution(question): "


@pytest.mark.parametrize("text, ask, words", [
    ("def questions(split):\n    x = {}\n    return x[split]", "questions",
     "questions() of the task FILE failed (KeyError: 'train', line 4 of mine.py)"),
    ("def questions(split): pass", "questions",
     "questions() of the task FILE failed (TypeError: it returned None and no list)"),
    ("def questions(split):\n    yield 1 / 0", "questions", "ZeroDivisionError: division by zero, line 3 "),
    ("def questions(split): raise SystemExit", "questions", "SystemExit, line 2"),
    ("def questions(): return []", "questions", "TypeError: questions()"),
    ("def questions(split): raise ValueError('two\\nlines')", "questions", "ValueError: two lines, line 2"),
    ("def questions(split): return [{'question': 'q', 'answer': {1}}]", "questions", "any other JSON values"),
    ("questions = 7", "questions", "has no questions"),
    ("def documents(split): return [b'']", "documents", "return texts"),
    ("def documents(split): int('x')", "documents", "line 2 of mine.py"),
    ("def examples(n): return ['ab'] * n", "examples", "an example is"),
    ("def examples(n): return n", "examples", "it returned 2 and no list"),
    (f"{THREE}return question['worked']", "examples", "solution() of the task FILE failed (KeyError: 'worke"),
    (f"{THREE}pass", "examples", "it returned None and no str"),
    (f"{THREE}return ''", "examples", "returned the score None"),
    ("def check(argument): open(argument)", "load", "check() of the task FILE failed (TypeError: "),
    ("def check(said, gold): pass", "load", "check() is a name that tasks/__init__.py reserves, so correct it, or rename yours"),
    ("def signature(a, b): pass", "load", "can't be called as signature(completion) (missing a required argument: 'b'): signature() is a name"),
    ("signature = 'x'", "load", "has no signature: write a function signature in its file, where nothing else may have that name"),
    ("PROMPT = 'Think.'", "load", "PROMPT of the task FILE is 'Think.': PROMPT is a name"),
    ("PROMPT = ['{}']", "load", "for a text with {} for the question, so rename yours"),
    ("STOP = {1: 2}", "load", "STOP of the task FILE is '{1: 2}': STOP is a name"),
    ("INSTRUCTION = b'x'", "load", "INSTRUCTION is a name")])
def test_what_fails_in_a_task_of_ones_own_is_a_sentence_that_names_the_line(tmp_path, text, ask, words):
    spec = own(tmp_path, f"def reward(question, completion): pass\n{text}\n")
    with pytest.raises(ValueError) as error:
        task = tasks.load(spec)
        task.examples(2) if ask == "examples" else getattr(task, ask)("train")
    sentence = str(error.value)
    assert words.replace("FILE", spec) in sentence and spec in sentence and "\n" not in sentence


@pytest.mark.parametrize("text, words", [
    ("def reward(", "The task FILE can't be loaded (SyntaxError: "), ("import sys\nsys.exit(0)", "(SystemExit: 0, line 2 of mine.py): correct it"),
    ("x = {}['a']", "(KeyError: 'a', line 1 of mine.py)"), ("import nothing_of_that_name", "nothing_of_that_name', line 1 of mine.py"),
    ("def reward(q, c): return 1\ndef questions(split): return {}[split]", "(KeyError: 'train', line 2 of mine.py)")])
def test_a_broken_task_taken_by_name_is_a_sentence(tmp_path, monkeypatch, text, words):
    own(tmp_path, text)
    monkeypatch.setattr(tasks, "__path__", [str(tmp_path)])
    monkeypatch.setattr(tasks, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(tasks, "NAMES", ["mine"])
    monkeypatch.setitem(tasks.MODULES, "mine", "mine")
    monkeypatch.delitem(sys.modules, "tasks.mine", raising=False)
    with pytest.raises(ValueError) as error:
        tasks.load("mine").questions("train")
    assert words.replace("FILE", f"{tmp_path}/mine.py") in str(error.value) and "\n" not in str(error.value)


TURNS = ["3\n", "higher\n", "7\n"]


@pytest.mark.parametrize("head", ["turns", "turns=None", "argument=None, turns=None", "*, turns", "**others"])
def test_a_reward_can_read_the_turns_of_an_episode(tmp_path, head):
    turns = "others['turns']" if "others" in head else "turns"
    text = f"STOP = '.'\ndef reward(question, completion, {head}):\n    return len({turns}) / 10, dict.fromkeys({turns}, True)\n"
    task = tasks.load(own(tmp_path, text + "def respond(question, text): pass\n"))
    assert task.reward({}, "".join(TURNS), TURNS) == (0.3, dict.fromkeys(TURNS, True))
    assert task.reward({}, "7") == (0.1, {"7": True}) == grade(task, {}, "7")[:2]
    assert grade(tasks.load(own(tmp_path, text)), {}, "7. 8", ["7. 8"])[:2] == (0.1, {"7.": True})        # no episode: cut at the stop
    assert tasks.load("guess").reward({"answer": "7"}, "".join(TURNS), TURNS)[0] == 1


def test_a_task_may_import_its_neighbours_which_hide_nothing_of_ours(tmp_path):
    """When it is loaded and later, here and in a worker."""
    (tmp_path / "later").mkdir()
    neighbours = {"near_by": "import nearer\nWORTH = nearer.WORTH", "nearer": "WORTH = 0.25",
                  "later/of_all": "MORE = 0.5"}
    ours = dict.fromkeys(("tasks", "measure", "runtime"), "raise RuntimeError('This hides one of ours.')")
    for name, text in (neighbours | ours).items():
        (tmp_path / f"{name}.py").write_text(text)
    spec = own(tmp_path, "import near_by\nimport tasks, measure\ndef reward(question, completion):\n"
                         "    from later.of_all import MORE\n    return near_by.WORTH + MORE\n")
    program = f"""
import tasks
from tasks import _pool as rewards
task = rewards.load({spec!r})
print(task.reward({{}}, "")[0], *(file.name for file in task.files))
with rewards.Pool({spec!r}, 1) as pool:
    print(*pool.score([({{}}, "")])[0])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    files = "mine.py near_by.py tasks.py measure.py of_all.py nearer.py"
    assert done.stdout.splitlines() == [f"0.75 {files}", "0.75 {'correct': False}  None {}"], done.stderr


def test_as_many_questions_as_there_are_up_to_a_number(stories, tmp_path):
    for spec, n in (("arithmetic", 500), (stories, 1000)):
        task = tasks.load(spec)
        assert task.questions("train", n=n, fewer=True) == task.questions("train", n=n)
    assert len(tasks.load("arithmetic:1").questions("train", n=10**6, fewer=True)) == 2310         # all of them
    assert len(task.questions("valid", n=1000, fewer=True)) == len(task.questions("valid")) < 1000
    for last in ("[:n]", "", "[:n] if n is None or n < 37 else 1 / 0"):      # some refuse to draw too many
        few = tasks.load(own(tmp_path, f"""
def reward(question, completion): return 1
def questions(split, n=None):
    return [dict(question=str(i), answer="") for i in range(36)]{last}
"""))
        assert len(few.questions("train", n=1000, fewer=True)) == 36
        assert len(few.questions("train", n=7, fewer=True)) == 7


def test_tasks_do_not_import_torch():
    program = "\n".join(("import sys, tasks", "for name in ('unit_conversion', 'arithmetic', 'countdown', 'gsm8k'): tasks.load(name)",
                         "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"))
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


# --- equations ---

def test_equations_are_read_as_arithmetic():
    rng = random.Random(1)
    for _ in range(2000):
        numbers = [rng.choice([str(rng.randrange(1, 1000)), f"{rng.random() * 10:.3f}", f"{rng.randrange(1000, 10**6):,}"])
                   for _ in range(4)]
        signs = rng.choices("+-*/", k=3)
        expression = "".join(f"{n} {s} " for n, s in zip(numbers, signs)) + numbers[3]
        if rng.random() < 0.5:
            expression = re.sub(r"^(\S+ . \S+) (.) (\S+ . \S+)$", r"(\1) \2 (\3)", expression)
        expected = eval(expression.replace(",", ""))
        for sign, spelled in (("*", "×"), ("/", "÷"), ("*", "x"), ("*", r"\times"), ("-", "−"), (" ", "")):
            written = expression.replace(sign, spelled) if rng.random() < 0.5 else expression
            [(left, right)] = pairs(f"so {written} = 12.5.")
            assert left == pytest.approx(expected, rel=1e-9, abs=1e-9) and right == 12.5
    assert all_true("3 + 4 * 2 = 11 and 10 / 4 = 2.5") and not all_true("no equation")


@pytest.mark.parametrize("text, expected", [
    ("48/2 = $<<48/2=24>>24 clips in May and 48+24 = 72", "48/2=24 48+24=72"), ("2 * $3 = $6", "2*3=6"), ("5% * 100 = 5", "5%*100=5"),
    ("20% of 50 = 10", "20%*50=10"), ("1/2 of 10 = 5", "1/2*10=5"), ("50/200*100 = 25%", "50/200*100=25%"),
    ("100% - 20% = 80%", "100%-20%=80%"), ("6 crates x 2 kg/crate = 12 kg", "6*2=12"), ("$5 a day * 3 days = $15.", "5*3=15"),
    ("3(2 + 2) = 12", "3*(2+2)=12"), ("5 * (3 apples + 2 pears) = 25", "5*(3+2)=25"), ("He has 8 (5 + 3 = 8) apples", "5+3=8"),
    ("total = 5 * 3 = 15", "5*3=15"), ("2 * 3 = 6 = 12 / 2", "2*3=6 6=12/2"), ("-40 * 9 / 5 = -72", "-40*9/5=-72"),
    ("- 5 + 3 = 8\n- 1 + 1 = 2", "5+3=8 1+1=2"), (r"\(6 \times 1,000 = **6000**\)", "6*1000=6000"), ("3 - (-2) = 5", "3-(-2)=5"),
    (".5 * 20 = 10.", "0.5*20=10"), ("7-day trips: 2-1=1", "2-1=1")])
def test_equations_of_honest_people_are_true(text, expected):
    assert all_true(text) and _equations.signature(text) == expected


@pytest.mark.parametrize("text", [
    "2x + 3 = 7", "x - 3 + 5 = 10", "3(x + 2) = 9", "2 * y = 5", "2^3 + 1 = 8", "9**9**9 = 1", "5 times 3 + 2 = 16", "3! + 1 = 8",
    "4 boxes = 4 * 12 eggs", "1 km/h = 1000 m per hour", "5 + three = 9", "5 = 5", "(" * 30 + "1 + 1" + ")" * 30 + " = 3", "1 +/ 2 = 4",
    "8:30 + 2 = 11", "5 + = 5", "() = 1 + 1", "2 + 5) * 3 = 20", "1 + " + "9" * 50 + " = 3", "f(3) + 1 = 8"])
def test_what_can_not_be_read_is_no_equation(text):
    assert pairs(text) == [] and not all_true(text)


@pytest.mark.parametrize("text", [
    "6 * 1000 = 6000 = 9", "1 + 1 = 2 = 3 = 4", "1) 6 * 1000 = 7.", "a) 6 * 1000 = 7", "(1) 6 * 1000 = 7", "2) -40 * 9 / 5 = 7",
    "6 * 1000\n= 7", "6 * 1000 =\n7", "6 *\n1000 = 7", "6 * 1000 == 7", "6 ⋅ 1000 = 7", "6 ∙ 1000 ≈ 7", "６ × 1000 ＝ 7".replace("６", "6"),
    r"\frac{6}{1} = 7", r"\dfrac{6}{2} \cdot \text{ } 2 = 7", r"$6 \times 1{,}000 = 7$", "½ + ½ = 2", "6 kg = 7 * 1000 gram", "6 kg = 7 * 1000",
    "1 kg = 100 gram", "1 hour = 61 minutes", "6 * 1000 = 6000 gram = 9 kg", "6 * 1 000 = 7 000", "10/3 = 3.34", "1/3 = 0.4", "10 / 3 = 3",
    "100 - 30% = 71", "2 hours every day for a total of 2*3 = 7 hours", "0.05 / 2 = 0.0",
    "96/12 equals 48 ounces", "60/2 is 0 dollars", "300-100 is 2500 people", "8 x 3/4 is 60 seats", "10+27 is 36", "20% of 50 is 11", "1/3 of 36 is 120",
    "so $50/$5 equals 100 bills", "so 3 + 6 = **9 0** breads", "so 7 * 3,000 = '621',000 steps", "so 16 - 14 = (2 0) years", "so 5 * 7,000 = (35) 000 g", "Katie:6/2=4 books",
    "12 * 34 = four hundred seven", "so 12 * 34 = four hundred and seven eggs", "6048000 + 518400 = 6562400", "8255 = 344 * 24", "(300 + 44) * 24 = 8257"])
def test_no_way_of_writing_it_makes_a_false_equation_pass(text):
    assert not all_true(f"6 * 1000 = 6000. {text}") and not all_true(f"{text}\n6 * 1000 = 6000.")


RESULTS = ['= "407"', "= “407”", "= '407'", "= [407]", "= {407}", "= |407|", "= ~407", "= about 407", "= ４０７", "= 40 7", "= exactly 40 7", "= #407",
           "= @407", "= _407_", "= **407**", "=\u200b407", "= =407", ":= 407", ". = 407", "≡ 407", "-> 407", "=> 407", "→ 407", "is 407", "equals 407",
           "> 408", "<= 407", "!= 408", "= ,407", "= !407", "= 2^3", "="]


@pytest.mark.parametrize("spec", ["arithmetic", "math", "stories"])
def test_a_false_result_is_not_kept_in_any_form(spec, stories):
    task = tasks.load(stories if spec == "stories" else spec)
    q = {"question": "What is 12 * 34?", "answer": "408"}

    def kept(text):
        return task.verified(*task.reward(q, f"12 * 34 = 408. {text}. <answer>408</answer>"))
    assert [form for form in RESULTS if kept(f"12 * 34 {form}")] == [] and not kept("so 407 = 12 * 34") and not kept("5 = 6") and not kept("1 hour = 60 km")
    right = [form.replace("407", "408").replace("４０７", "４０８") for form in RESULTS[:9] + RESULTS[11:25]]
    assert [form for form in right if not kept(f"12 * 34 {form}")] == []
    for text in ("2x + 3 = 7", "x = 5, x + 7 = y", "4 boxes = 4 * 12 eggs", "12 * 34 = ?", "12 * 34 > 400", "3 1/2 * 2 = 7", "1.5 * 10^3 = 1500",
                 "420 / 7 = 60 6-packs", "5 = 5", "A third of it is 136", "a < b"):
        assert kept(text), text


@pytest.mark.parametrize("text", [
    "1) 6 * 1000 = 6000.", "a) 6 * 1000 = 6000", "33.33 * 3 = 100", "2000 / 3 = 667", "67% of 30 = 20.1", "6 * 1000\n= 6000", "6 ⋅ 1000 = 6 000", r"\frac{6}{2} = 3", "10/3 = 3.33", "2/3 = 66.67%",
    "100 - 30% = 70", "100% - 20% = 80%", "100 + 5% = 105", "4 weeks = 4 * 7 days = 28 days", "6 kg = 6 * 1000 = 6000 gram",
    "96/12 equals 8 ounces", "300-100 is 200 people", "20% of 50 is 10", "1/3 of 36 is 12", "1/3 is 5 eggs", "rows 1-3 are 9", "2 of 10 are red",
    "12 * 34 = four hundred and eight eggs", "3 * 7 = twenty-one", "2 * 12 = two dozen", "6 / 12 = one half", "28/0.5=56 6-inch pencils", "Katie:6/2=3 books",
    "8-3 = 5:00 pm", "24 / 3 = 8 5% increases", "2 * 500 gram = 1 kg", "60 minutes * 60 = 3600 seconds", "60 * 60 = 3600 = 1 hour", "1/4 = 0.25 = 25%", "4 * 3 = 12 = 1 dozen",
    "2 hours every day for a total of 2*3 = 6 hours", "1 + 1 = 2 and 1 month = 30 days", "Day 2 = 15 and 1 + 1 = 2", "5 feet 6 inches = 66 inches"])
def test_what_honest_people_write_is_not_false(text):
    assert all_true(f"1 + 1 = 2. {text}")


def test_some_equation_leads_from_the_question_to_the_answer(stories):
    task = tasks.load("unit_conversion")
    q = {"question": "How many hour are there per 344 day?", "answer": "8256", "n": "344", "from": "day", "to": "hour", "level": 1}
    for text, honest in (
            (task.solution(q).partition("Answer")[0], True), ("344 * 24 = 8256.", True), ("24 * 344 = 8256 hours", True),
            ("8256 = 344 * 24", True), ("A day has 24 hours, half of it 12. 344 * 12 = 4128. 2 * 4128 = 8256.", True),
            ("x = 344 * 24. x * 1 = y. 344 * 24 = 8256", True), ("0 * 0 = 0.", False), ("1 + 1 = 2.", False), ("344 + 0 = 344.", False),
            ("8256 * 1 = 8256.", False), ("1 day = 24 hour.", False), ("", False),
            ("344 * 24 = 8256 = 9", False), ("344 * 24 = 8256. 1 day = 25 hours", False)):
        score, parts = task.reward(q, f"{text} <answer>8256</answer>")
        assert score == 1.0 and parts["exact"] and parts["reasoned"] == honest, text
    words = {"question": "Ann has twice as many as half a dozen apples. How many?", "answer": "12"}
    for text, honest in (("12 / 2 = 6. 6 * 2 = 12.", True), ("5 + 7 = 12", False)):
        assert tasks.load("gsm8k:" + stories[6:]).reward(words, f"{text} <answer>12</answer>")[1]["reasoned"] == honest, text
    q = {"question": "", "answer": "46", "numbers": [3, 7, 25]}
    for text, honest in (("7 * 3 = 21. 21 + 25 = 46.", True), ("40 + 6 = 46", False), ("7 - 3 = 4", False)):
        assert tasks.load("countdown").reward(q, f"{text} <answer>7 * 3 + 25</answer>")[1]["reasoned"] == honest, text


CONVERTED = {    # (from, to): number, its equation, facts that are true, and that are false or can't be read
    ("kg", "gram"): (
        "6", "6 * 1000 = 6000",
        ["We know that 1 kg = 1000 grams, so", "1 kg = 1000. 6 kg = 6000.", "6 kg * 1000 g per kg = 6000 gram.", "1 kg = 10^3 gram.", "One kg = 1000 gram.",
         "A kg is 1000 gram.", "1 kg -> 1000 gram.", "1 kg > 900 gram.", "1 m^3 = 1000 litres."],
        ["So 1 kg = 100 gram.", "1 kg = 100.", "1 ee = 1000 gram.", "1 hour = 60 km.", "1 kg = 10^2 gram.", "one kg = 100 gram.", "a kg = 100 gram.",
         "1 kg := 100 gram.", "1 dl = 100 %.", "1 kg is 100 gram.", "1 kg -> 100 gram.", "1 kg → 100 gram.", "1 kg > 1000 gram.", "1 kg < 900 gram.",
         '1 kg = "100" gram.', "1 inch = 2.5 cm.", "6 * 1000 -> 7000."]),
    ("km/h", "m/s"): (
        "36", "36 / 3.6 = 10",
        ["1 km/h = 1000 metres per hour, 1 m/s = 3600 meters / hour.", "1 m/s = 3.6 km/h. 36 km/h = 10 m/s.",
         "36 km/h = 36 km per hour = 36 * 1000 / 3600 = 10 m/s."],
        ["10 m/s = 3600 m per hour.", "So 1 m/s = 360 m per hour.", "1 km/h = 1000 m every hour.",
         "36 foo = 10 bar."]),
    ("month", "day"): (
        "3", "3 * 30.4375 = 91.3125",
        ["1 month = 30.4375 days.", "1 year = 365.25 day and 1 year = 12 months.",
         "3 months * 30.4375 = 91.3125 days."],
        ["1 month = 31 days.", "3 months = 3 * 31 days.", "1 year = 366 day.", "2 centuries = 36525 days."]),
    ("celsius", "fahrenheit"): (
        "20", "20 * 9 / 5 + 32 = 68",
        ["F = C * 9 / 5 + 32.", "20 °C = 68 °F.", "20 degrees celsius = 68 Fahrenheit."],
        ["21 celsius = 68 fahrenheit.", "20 °C = 69 °F."]),
}


@pytest.mark.parametrize("units", CONVERTED, ids="-".join)
def test_facts_of_conversions_are_true_or_not_kept(units):
    n, equation, honest, false = CONVERTED[units]
    answer = equation.partition(" = ")[2]
    q = {"question": "", "answer": answer, "n": n, "from": units[0], "to": units[1], "level": 3}
    task = tasks.load("unit_conversion:3")
    kept = [fact for fact in honest + false
            if task.verified(*task.reward(q, f"{fact} {n} is known. {equation}.\n<answer>{answer}</answer>"))]
    assert kept == honest


@pytest.mark.parametrize("spec", LEVELS)
def test_a_fact_that_is_ten_times_too_large_is_not_kept(spec):
    task, kept, n = tasks.load(spec), 0, 0
    for q in task.questions("train", n=300):
        right = task.solution(q)
        assert task.verified(*task.reward(q, right))
        false = re.sub(r"1 (\S+ = )", r"10 \1", right)
        n += false != right
        kept += false != right and task.verified(*task.reward(q, false))
    assert kept == 0 and n > 200


@pytest.mark.parametrize("right, value, loose, exact", [
    ("0.001", "0.00149", False, False), ("0.0003", "0", False, False), ("0.0003", "-0.0004", False, False), ("0.0003", "1e-300", False, False),
    ("0.0003", "0.0003", True, True), ("0.0003", "0.00031", True, False), ("0.001", "0.0010009", True, True), ("0", "0", True, True),
    ("0", "0.0004", False, False), ("6000", "6005.9", True, True), ("6000", "6006.1", True, False), ("-40", "40", False, False)])
def test_a_tenth_of_a_percent_is_that_of_small_answers_too(right, value, loose, exact):
    score, parts = tasks.load("unit_conversion").reward({"question": "", "answer": right}, f"<answer>{value}</answer>")
    assert (score, parts["exact"]) == (float(loose), exact)


FORMS = ["1 000", "1,000", "+1000", "1000.", "1000.0", "**1000**", r"\boxed{1000}", "$1000$", r"$\boxed{1{,}000}$", "10^3", "1e3", "1.0 * 10^3",
         "1 × 10^3", " 1000 ", "1\u202f000", "\\(1000\\)", r"1.0 \times 10^{3}", r"\left( 1000 \right)", "x = 1000", "$x=1000$", "= 1000",
         "$ \n 1000 \n $", r"1,\! 000", "1 {, }000", "1000€", r"\$1,000.00", "£1000", "1.000,0", "1000,00", "*1000*",
         "'1000'", '"1000".', "`1000`", "`**1000**`"]


@pytest.mark.parametrize("spec", ["unit_conversion", "arithmetic", "stories"])
def test_right_answers_are_paid_in_the_forms_people_write(spec, stories):
    task = tasks.load(stories if spec == "stories" else spec)

    def paid(text, **question):
        return task.reward({"question": "", "answer": "1000"} | question, f"<answer>{text}</answer>")[0]
    for text in FORMS:
        assert paid(text) == 1.0, text
    for text in ("5 or 6", "1000 or 1001", "1000, 2000", "1 0000", "10 00", "~1000", "x = 1000 = y", "2000/2", "10^3^1", "2 = 1000", "(1000", "1000)", "1, 000",
                 "*1000", "`1000", "1000, or so", "1000!", "1000 1", "",
                 "10^999", "1000**", "ten", "$$", "1e400", "1e299 trillion", "1000 - 0"):
        assert paid(text) == 0.0, text
    for right, texts in (("0.5", (".5", "½", "1/2", "0.50", "0,5", r"\frac{1}{2}", r"\frac12", r"\cfrac{1}2", r"\left( \frac{1}{2} \right)")),
                         ("-40", ("−40", "-40", "- 40", "(-40)")), ("-0.5", (r"-\frac{1}{2}", r"\frac{-1}{2}")),
                         ("2.5", ("2½", "2 1/2", "5/2", r"2\frac{1}{2}", r"2 \frac12", "2,5")), ("0.111", ("0,111", ".111"))):
        for text in texts:
            assert paid(text, answer=right) == 1.0, text
    for right, texts in (("10.5", (r"2\frac{1}{2}", "2(1/2)")), ("111", ("0,111",)), ("1.5", ("1.5 or 2", "1, 5")), ("1.234", ("1,234",)),
                         ("13", (r"11\frac{4}{2}", "11 4/2", "11 8/4")), ("2.333", ("1 4/3",))):
        for text in texts:
            assert paid(text, answer=right) == 0.0, text
    assert task.reward({"question": "", "answer": "1000"}, "<Answer >1000</ANSWER >")[0] == 1.0
    asked = {"question": "How many km is that?"}
    for text, score in (("1000 km", 1.0), ("1000 kilometres", 1.0), ("1000km.", 1.0), ("1,000 km", 1.0), ("1000 m", 0.0), ("1000 km or 1 m", 0.0), ("$1000", 0.0)):
        assert paid(text, **asked) == score, text
    assert paid("1000 clips", question="How many clips?") == paid("1000%", question="What percent?") == 1.0 == paid("1000 g", to="gram")
    for text, score in (("1000 clips", 1.0), ("1000", 1.0), ("1000%", 0.0)):
        assert paid(text, question="A fifth, 20%, is lost. How many clips are left?") == score
    assert paid("1000%", question="How many percent is that?") == 1.0
    for right in (1000, "1,000", 1000.0):
        score, parts = task.reward({"question": "900 + 100 = ?", "answer": right}, "900 + 100 = 1000 <answer>1000</answer>")
        assert score == 1.0 and parts["reasoned"]
    assert paid("1000 clip", question="How many boxes?") == paid("1000 km") == 1.0 and paid("$1000", question="How many cents?") == 0.0
    for text, question, score in (
            ("1000 apples", "How many more apples has Ann?", 1.0), ("1000 pears", "How many more apples has Ann?", 1.0),
            ("1000 atoms", "How many H atoms are in it?", 1.0), ("1000 hours", "How many H atoms are in it?", 0.0),
            ("1000 degrees", "How many degrees is the angle?", 1.0), ("1000", "How many did she sell?", 1.0), ("1000 did", "How many did she sell?", 1.0),
            ("1000%", "What is 40% of 2500?", 0.0), ("1000%", "Ann saves 5%. What percentage is that?", 1.0),
            ("1000%", "There is a 5% discount. How much does he pay?", 0.0),
            ("1000 dollars", "A pen costs $5. How much does he pay?", 1.0), ("1000 km", "How much of it, in $?", 0.0)):
        assert paid(text, question=question) == score, (text, question)
    for unit, names in {"kB": ("kilobytes", "kB"), "MB": ("megabytes",), "micrometre": ("µm", "μm"), "m3": ("m³", "m^3", "cubic meters"),
                        "mile": ("mi",), "gallon": ("gal",), "tonne": ("t",), "celsius": ("°C", "degrees Celsius", "C", "° C"),
                        "kelvin": ("K",), "km/h": ("kph", "kilometers per hour", "km/hour"), "m/s": ("meters per second",),
                        "mph": ("miles per hour",)}.items():
        assert all(paid(f"1000 {name}", to=unit) == 1.0 for name in names), unit
    for unit, name in (("kB", "kilobits"), ("celsius", "°F"), ("km/h", "miles per hour"), ("m3", "m^2"), ("m/s", "meters")):
        assert paid(f"1000 {name}", to=unit) == 0.0, unit
    assert paid("$1000$ percentage", question="What percent?") == paid("$1000", question="How many dollars?") == 1.0


# question: right answers; answers in a unit that is known, and not the one asked for. All numbers are right.
ASKED = {
    # a question word before the last sentence does not ask
    "Ann earns $5 an hour and wonders how many hours she must work. She works ten. What is her pay?": ("$50, 50 dollars, 50", "50 hours, €50, 50%, 50 km"),
    "Bo knows how many km he ran. Shoes cost $30. How much does he pay for two pairs?": ("$60, 60 dollars, 60.00 USD", "60 km, 60 hours, £60"),
    "How many hours does he work? He works 8 hours on 5 days. How many dollars does he earn at $2 an hour?": ("$80, 80 dollars, 80 dollars a week", "80 hours, 80%, 80 €"),
    "If she knows how many hours she works, what is her total income in dollars?": ("$9, 9 dollars", "9 hours, 9 cents"),
    "She paid $3. How many pens did she get, if she does not know how much they cost?": ("4 pens, 4 blue pens, 4", "$4, 4 hours"),
    # a quantity some words behind the question word
    "Tea costs $2 an hour. What is the difference in the shop's earnings last week?": ("$6, 6 dollars, 6", "6 hours, 6 km"),
    "He has $9 and waits two hours. What is the amount of the discount?": ("$3, 3 dollars", "3 hours, 3 km"),
    "He drives 60 km for $5. How much longer does the second trip take?": ("2 hours, 2 minutes", "2 km, $2"),
    "The wall is 5 m long. How long will it take to paint it?": ("2 hours, 2", "2 m, 2 km"),
    "How much longer is the wall of 5 m than the fence of 3 m?": ("2 m, 2 meters", "$2, 2 kg"),
    # percent
    "What is 20 percent of 50?": ("10, 10 dollars, 10 km", "10%, 10 percent"),
    "What is 20% of 50 kg?": ("10 kg, 10 kilos", "10%, 10 pct"),
    "A shirt costs $80. How much does he pay after a 25 percent discount?": ("$60, 60 dollars, 60", "60%, 60 percent, 60 euros, 60 km"),
    "Of 50 students 20 percent leave. How many students are left?": ("40 students, 40 pupils, 40", "40%, 40 percent, $40, 40 hours"),
    "What percent of 50 is 10?": ("20%, 20 percent, 20, 20 percent of it", "$20, 20 km, 20 hours"),
    "There are 5 red balls of 20. What is the percentage of red balls?": ("25%, 25 percent, 25 percentage points", "25 kg, €25"),
    "By how many percent did it rise from $4 to $5?": ("25%, 25 pct", "$25, 25 dollars"),
    "There are 3 red balls of 12. What is the probability of red, in percent?": ("25%, 25 percent", "25 m, $25"),
    "The price rises from $50 by 20%. By how much does the price rise?": ("$10, 10 dollars", "10 hours, €10"),
    "A third of 60% of the class are boys. What share is that?": ("20%, 20 percent, 20", ""),
    # how much
    "A pen costs $3. How much longer is a pen of 12 cm than one of 7 cm?": ("5 cm, 5 centimeters, 5", "$5, 5 dollars, 5 kg, 5%"),
    "A dog eats $3 of food and gains 2 kg. How much does it weigh?": ("9 kg, 9 pounds", "$9, 9 hours, £9"),
    "A bag of 6 cups of flour costs $3. How much flour is left?": ("5 cups, 5 grams", "€5"),
    "It takes Ann 3 hours and $4 to get there. How much time does she lose?": ("5 hours, 5 minutes", "$5, 5 dollars, 5 kg"),
    "A taxi costs €2. How much do ten rides cost?": ("€20, 20 euros, 20 EUR", "$20, 20 dollars, £20, 20 hours, 20%"),
    "A taxi costs £2. How much do ten rides cost?": ("£20, 20 pounds, 20 quid, 20 pounds sterling", "$20, 20 euros, 20 kg, 20 minutes"),
    "He has ₹30 and spends ₹10. How much money does he have left?": ("₹20, 20 rupees", "$20, ¥20, 20 hours"),
    "He has $30 and loses $10 in 3 hours. How much does he have left?": ("$20, 20 dollars left", "€20, 20%, 20 km"),
    "How much more expensive is a $9 ticket than a $4 one?": ("$5, 5 dollars more", "5 hours, 5 yen"),
    "How much does a book cost?": ("$5, 5 euros, £5, 5 dollars and a bit", "5 hours, 5 km, 5%"),
    "How much must he run to earn $5 at 20 cents a mile?": ("25 miles, 25", "€25"),
    "He owes $7 and pays $12. How much does he owe now?": ("-$5, $-5, -5 dollars, −$5, -5", "-€5, -5 hours, €-5, $5, -5%"),
    "How much water does she drink in 3 days at $2 a liter?": ("6 liters, 6", "€6"),
    "She has $5 and pays a fifth as rent. What share of her pay is that?": ("20%, 20 percent, 20", "€20"),
    "She earns $9 a day. What does she earn in week 3?": ("$9, 9 dollars", "9 weeks, 9 hours, €9"),
    # units of several words
    "How many miles per hour is that?": ("30 miles per hour, 30 mph, 30 miles/hour, 30 miles an hour, 30 mi/h", "30 miles, 30 km/h, 30 hours, 30 kilometers per hour, 30 feet per second"),
    "What is its speed in meters per second?": ("30 m/s, 30 meters per second, 30 metres/second", "30 m, 30 meters, 30 seconds, 30 km/h"),
    "How many miles does he drive each hour?": ("30 miles, 30 miles per hour, 30 mph", "30 km, 30 hours, $30, 30 km/h"),
    "How many miles does he drive in 2 hours?": ("60 miles, 60 mi", "60 mph, 60 hours, 60 miles per hour"),
    "How many square feet is the room?": ("120 square feet, 120 sq ft, 120 sq. ft., 120 ft^2, 120 ft², 120 ft2, 120 square feet of floor", "120 feet, 120 square, 120 cubic feet, 120 square meters, 120 ft"),
    "What is the volume in cubic meters?": ("9 m^3, 9 cubic meters, 9 m³, 9 m3, 9 cubic metres", "9 m, 9 m², 9 square meters, 9 liters"),
    "What is the area of a garden of 4 feet by 5 feet?": ("20 square feet, 20 sq ft, 20", "20 feet, 20 hours, 20 cubic feet, $20"),
    "How many liters per day does he drink?": ("2 liters, 2 liters per day, 2 l", "2 ml, 2 hours, $2"),
    "How many fluid ounces is it?": ("8 fluid ounces, 8 ounces, 8 oz, 8 fl oz", "8 pounds, 8 cups, 8 hours"),
    "How many dollars per hour does she earn?": ("$15, 15 dollars per hour, $15/hour, $15 an hour, 15 dollars", "15 hours, €15, 15 cents, 15 mph"),
    "How many kilowatt hours does he use?": ("7 kWh, 7 kilowatt hours, 7 kilowatt-hours", "$7, 7 km"),
    # words that are no units
    "How many green apples are left?": ("5 apples, 5 green apples, 5 fruits, 5 pieces of fruit, 5 apples per person", "5 hours, $5, 5%, 5 km"),
    "How many more H atoms are in it?": ("6 H, 6 atoms, 6 H atoms, 6 hydrogen atoms", "6 hours, $6, 6%"),
    "How many did she sell?": ("6, 6 eggs, 6 pies, $6", "6%"),
    "There are 24 second graders and 6 third graders. How many students are there?": ("30 students, 30 second graders, 30 children", "30 seconds, 30 minutes, $30"),
    "How many dollar bills has he?": ("5 dollar bills, 5 bills, 5 notes", "5 hours, 5 km"),
    "How many people did not come?": ("8 people did not come, 8 did not, 8 guests in two days", "8 hours, $8"),
    "Each bar has 15 grams of carbs. How many carbs do two bars have?": ("30 carbs, 30 grams, 30 g, 30 grams of carbs", "30 hours, $30, 30%"),
    "How many dozen eggs are there?": ("5 dozen, 5 dozens, 5 dozen eggs", "5 hours, 5 kg"),
    "How many eggs are there?": ("60 eggs, 5 dozen, 5 dozen eggs", "60 dozen, 60 hours"),
    "A city has 2 million people, half leave. How many people are left?": ("1000000, 1 million, 1 million people", "1000000 hours, $1 million, 1000 hours"),
    "Bo has 12 eggs and some are left. If he sold 5 how many does he have?": ("7, 7 eggs", "$7, 7 hours, 7 km, 7%"),
    "He runs 3 miles a day. How many does he run in a week?": ("21 miles, 21, 21 miles a week", "$21, 21%, 21 kg"),
    "How many m&ms has he?": ("11 m&ms, 11 m&m packs, 11 M&M's", "11 hours, $11"),
    # money
    "A hat costs $50 and he works 8 hours a week. How much does he make?": ("$400, 400", "400 hours, 400 weeks, €400, 400 km"),
    "What's the price of 2 hats at $5 an hour?": ("$10, 10", "10 hours, €10"),
    "How much net profit did he make at $5 an hour?": ("$10, 10", "10 hours, €10"),
    "He gets $5 a day. Calculate the total amount he earned in 3 days.": ("$15, 15", "15 days, 15 km"),
    "He gets $5 a lesson. How much does he practice in 3 days?": ("6 hours, 6", "€6"),
    "Of its $32 million half is left. How much is it without 12?": ("4, $4 million, $4", "€4, 4 thousand"),
    "How much, in thousands of dollars, does he pay?": ("$2k, 2, $2k per month", "€2"),
    "How much will she owe 4 months from now, of $60?": ("$20 four months from now, $20, 20", "20 hours, $20 and five"),
    # other ways of asking than `how many`
    "A ride takes 9 minutes. How long do two rides take?": ("18 minutes, 18", "18 km, $18"),
    "How long is it?": ("5 km, 5 hours", "$5"),
    "How far is it in km?": ("9 km, 9 kilometers, 9 KM, 9 Km, 9 kms", "9 miles, 9 m, 9 hours, $9"),
    "How far is it?": ("9 km, 9 miles, 9 blocks", "9 hours, $9, 9 kg"),
    "What is the total cost in dollars?": ("6 dollars, $6, 6 USD, US$6", "€6, 6 cents, 6 hours, £6"),
    "What is his change, in cents?": ("250 cents, 250¢, 250", "$250, 250 dollars, €250, 250 km"),
    "A pen costs $2.50. Give its price in cents.": ("250 cents, 250 ¢", "$250, 250 dollars"),
    "How much is the fare in euros?": ("€6, 6 euros, 6 EUR", "$6, 6 dollars, 6 cents"),
    "How long does it take, in minutes?": ("45 minutes, 45 min, 45 mins", "45 hours, 45 seconds, 45 m, $45"),
    "How old is he?": ("45 years, 45 years old, 45", "$45, 45 km, 45 kg"),
    "How tall is the tree in feet?": ("45 feet, 45 ft, 45 feet tall, 45 foot", "45 inches, 45 m, 45 pounds"),
    "Calculate the number of hours that he sleeps.": ("8 hours, 8 hrs, 8 hours of sleep, 8 h", "8 minutes, 8 days, $8, 8%"),
    "Convert 6 kg to gram.": ("6000 gram, 6000 g, 6000 grams", "6000 kg, 6000 mg, 6000 pounds"),
    "What is the temperature in degrees Celsius?": ("25 °C, 25 degrees Celsius, 25 C, 25 degrees, 25°", "25 °F, 25 degrees Fahrenheit, 25 kelvin, $25"),
    "How many feet and inches is it?": ("7 feet, 7 inches", "7 hours, 7 kg"),
    # case
    "How many mg is it?": ("5 mg, 5 milligrams, 5 MG", "5 Mg, 5 g, 5 kg"),
    "How many MB is it?": ("5 MB, 5 megabytes, 5 Megabytes", "5 Mb, 5 kB, 5 megabits, 5 Mbit"),
    "How many kB is it?": ("5 kB, 5 KB, 5 kilobytes", "5 kb, 5 Kb, 5 kbit, 5 MB"),
    "How many kilometers is it?": ("5 km, 5 KM, 5 Km, 5 Kilometers", "5 m, 5 M/s, 5 miles"),
}
# These words give a number another value.
ALTERED = ("5 million", "5 and a half", "5 or six", "5 halves", "5x", "5 x", "5 pi", "5 squared", "5 feet six inches", "5 hours and thirty minutes", "5 dozen", "5 thousand dollars")


@pytest.mark.parametrize("question", ASKED)
def test_a_right_number_is_refused_only_for_a_known_unit_of_another_kind_or_size(question):
    task = tasks.load("arithmetic")
    right, wrong = (texts.split(", ") if texts else [] for texts in ASKED[question])
    plain = next((text for text in right if re.fullmatch("-?[0-9]+", text)), None) or re.search("-?[0-9]+", right[0].replace("$", ""))[0]
    refused = [text for text in right if task.reward({"question": question, "answer": plain}, f"<answer>{text}</answer>")[0] != 1.0]
    paid = [text for text in wrong if task.reward({"question": question, "answer": plain}, f"<answer>{text}</answer>")[0] != 0.0]
    assert (refused, paid) == ([], [])


def test_many_answers_with_units_are_tried_and_words_that_change_a_number_count():
    right, wrong = ([text for texts in ASKED.values() for text in texts[i].split(", ")] for i in (0, 1))
    assert len(right) >= 150 and len(wrong) >= 150
    task = tasks.load("arithmetic")
    for question in ("", "How many apples?", "What is the total?"):
        assert not any(task.reward({"question": question, "answer": "5"}, f"<answer>{text}</answer>")[0] for text in ALTERED)


def test_all_tasks_read_answers_with_one_reader():
    """Numbers in every form, and words in what models put around them."""
    around = ("{}", "**{}**", "*{}*.", "`{}`", r"\boxed{{{}}}", r"$\boxed{{\text{{{}}}}}$", '"{}"', " {}. ")
    seen = set()
    for spec in ("code", "simulation", "table", "science", "logic", "math"):
        task = tasks.load(spec)
        for q in {q.get("kind"): q for q in task.questions("train", n=100)}.values():
            right = q["answer"]
            forms = [form.format(right) for form in around if "^" not in right]
            forms += [f"+{right}", f"{right}.0", f"= {right}", f"`+{right}.0`"] if right.isdecimal() else []
            for text in forms:
                assert task.reward(q, f"<answer >{text}</answer >")[0] == 1.0, (spec, q, text)
            wrong = [f"{right}1", f"{right} {right}", f"1{right}", f"({right}", f"{right[:-1]}"]
            assert not any(task.reward(q, f"<answer>{text}</answer>")[0] for text in wrong), (spec, q)
            seen.add((spec, q.get("kind")))
    assert len(seen) > 25


def test_right_answers_in_files_may_have_those_forms_too(tmp_path):
    forms = {"1,5": 1.5, "$2.50": 2.5, "1 000": 1000, " 6,000.0 ": 6000, "10^3": 1000, "½": 0.5, "1/2": 0.5, "−40": -40, "**7**": 7, "+7.": 7, "1e3": 1000}
    rows = [[f"What is number {i}?", text] for i, text in enumerate(forms)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    lines = [{"question": question, "answer": f"So it is. #### {text}"} for question, text in rows]
    for spec in (f"unit_conversion:{tmp_path / 'train.json'}", f"gsm8k:{jsonl(tmp_path / 'train.jsonl', lines)}"):
        task = tasks.load(spec)
        for q in [q for split in ("train", "valid", "test") for q in task.questions(split)]:
            value = list(forms.values())[int(re.search(r"\d+", q["question"])[0])]
            assert Fraction(q["answer"]) == Fraction(value), q
            assert task.reward(q, f"<answer>{value}</answer>")[0] == 1.0, q


def test_what_a_model_is_trained_on_has_one_form():
    for spec in ("unit_conversion:3", "arithmetic"):
        task = tasks.load(spec)
        answers = [re.search("<answer>(.*)</answer>", task.solution(q))[1] for q in task.questions("train", n=300)]
        assert all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) for text in answers)


def test_units_are_known_by_their_names():
    for names, quantity in ((("kg", "kilogram", "Kilograms", "kilos"), "mass"), (("m", "metres", "meter"), "length"), (("h", "hrs", "hours"), "time"),
                            (("inch", "inches"), "length"), (("feet", "foot", "ft"), "length"), (("l", "liter", "litres"), "volume")):
        assert len({_units.size_of(name) for name in names}) == 1 and _units.size_of(names[0])[0] == quantity
    assert _units.size_of("clips") is None is _units.size_of("celsius") and _units.size_of("MB") != _units.size_of("Mbit")


@pytest.mark.parametrize("text", ["16800 / 2 = 8401", "1 km = 1001 m", "2 + 2 = 5", "48/2 = <<48/2=25>>24", "1 / (2 - 2) = 1", "1 / 0 = 0", "10% * 50 = 500", "100 / 3 = 33",
                                  "2 * 3 = 6 = 5 + 2", "1e300 * 1e300 = 1", "1 + 1 = 1e999%"])
def test_false_is_false(text):
    assert pairs(text) and not all_true("1 + 1 = 2. " + text)


def test_signatures_are_of_what_is_computed():
    one = _equations.signature("First 2 × 3.50 = 7.0 km.\nThen 7+1,000 = 1007.")
    assert one == _equations.signature("2*3.5=<<2*3.5=7>>7, so 7 + 1000 = 1007.00") == "2*3.5=7 7+1000=1007"
    assert one not in (_equations.signature("7 + 1000 = 1007. 2 * 3.5 = 7"), _equations.signature("3.5 * 2 = 7. 7 + 1000 = 1007"))
