"""Tasks that are made for mixtures: their gold, their mistakes, and their answers computed in another way from the text."""
import random
import re
import sys
from fractions import Fraction
from itertools import permutations, product

import pytest

import tasks
from conftest import ROOT
from tasks import _questions

def drawn(spec, n):
    """{kind: n different questions}"""
    task, rng, found = tasks.load(spec), random.Random(spec), {}
    kinds = list(task.module.KINDS)
    while any(len(found.get(kind, {})) < n for kind in kinds):
        asked, q = task.module.draw(rng, int(task.argument or 1))
        found.setdefault(q["kind"], {}).setdefault(asked, q)
    return {kind: list(questions.values())[:n] for kind, questions in found.items()}


def numbers(text):
    return list(map(int, re.findall(r"[0-9]+", text)))


@pytest.mark.parametrize("spec", ["math", "logic"])
def test_math_and_logic_gold_is_paid_mistakes_are_not_and_both_are_short(spec):
    task, rng = tasks.load(spec), random.Random(0)
    for kind, questions in drawn(spec, 100 if spec == "math" else 300).items():
        for q in questions:
            gold, wrong = task.solution(q), task.module.wrong_solution(q, rng)
            assert task.reward(q, gold) == (1.0, dict.fromkeys(("answered", "correct", "reasoned"), True)), (q, gold)
            score, parts = task.reward(q, wrong)
            assert score == 0.0 and parts["answered"] and not parts["correct"], (q, wrong)
            assert len(q["question"]) <= 130 and max(len(gold), len(wrong)) <= 120
            answer = f"<answer>{q['answer']}</answer>"
            guess = task.reward(q, answer)
            assert guess[0] == 1.0 and not guess[1]["reasoned"], q
            assert task.reward(q, f"<answer>other</answer> {answer}")[0] == 0.0 == task.reward(q, q["answer"])[0]


def test_logic_rows_that_are_not_the_question_s_are_no_reasoning():
    task = tasks.load("logic")
    for q in drawn("logic", 100)["odd"]:
        rows, right = q["given"][0], task.solution(q)
        every = [" ".join(row) for pair in rows for row in product(sorted(set(pair)), repeat=len(pair))]
        assert not task.reward(q, f"{'. '.join(every)}. {right}")[1]["reasoned"]
        listed = q["question"].partition(": ")[2].rstrip("?.")
        assert task.verified(*task.reward(q, f"{listed}.\nSmall things first.\n{right}"))


@pytest.mark.parametrize("spec, least", [("math", "percent"), ("logic", "unknown")])
def test_math_and_logic_have_three_in_ten_documents_wrong(spec, least):
    task, rng = tasks.load(spec), random.Random(1)
    questions = [task.module.draw(rng, 1)[1] for _ in range(2000)]
    assert 0.25 < sum(_questions.COMMON if task.module.invites_mistake(q) else _questions.WRONG for q in questions) / 2000 < 0.35
    for q in questions:
        if q["kind"] == least:               # all make the same mistake
            assert len({task.module.wrong_solution(q, random.Random(i)) for i in range(5)}) == 1


def test_math_and_logic_have_20_000_questions():
    found = 0
    for kind, forms in tasks.load("math").module.KINDS.items():
        order = sorted if kind in tasks.load("math").module.UNORDERED else list
        for _, ranges, shown, _ in forms:
            drawn = product(*(range(low, high + 1) for low, high in ranges))
            found += len({tuple(order(shown(*numbers))) for numbers in drawn})
    assert found > 20_000
    draw_odd, rng = tasks.load("logic").module.draw_odd, random.Random(2)
    assert len({str(draw_odd(rng, 1)[1]) for _ in range(25_000)}) > 20_000


def test_no_file_hides_a_module_of_the_standard_library():
    """From a program that is started in its folder."""
    files = [*ROOT.glob("*"), *ROOT.glob("*/*.py")]
    assert not {file.stem for file in files} & sys.stdlib_module_names
    assert {"math", "code"} <= {*tasks.NAMES}
    task = tasks.load("countdown")           # which imports math
    assert [file.name for file in task.files] == ["countdown.py"]


def test_math_answers_are_those_of_an_oracle():
    for kind, questions in drawn("math", 40).items():
        for q in questions:
            text, right = q["question"], int(q["answer"])
            n = numbers(text)
            if kind == "equation":
                left, _, result = text.removesuffix(".").removeprefix("Solve ").removeprefix("Find x: ").partition(" = ")
                sides = {}
                for x in range(200):
                    values = re.sub(r"(\d+) \* (\d+)", lambda m: str(int(m[1]) * int(m[2])), left.replace("x", str(x)))
                    sides.setdefault(sum(int(t) for t in values.replace("- ", "-").replace("+ ", "").split()), []).append(x)
                assert sides[int(result)] == [right], text
            elif kind == "percent":
                factor = 100 + n[1] * (1 if "rises" in text or "plus" in text else -1)
                assert Fraction(n[0] * factor, 100) == right, text
            elif kind == "mean":
                assert Fraction(sum(n), 3) == right, text
            elif kind == "rectangle":
                inside = {(x, y) for x in range(n[0]) for y in range(n[1])}
                edge = sum((x + dx, y + dy) not in inside for x, y in inside for dx, dy in ((0, 1), (1, 0), (0, -1), (-1, 0)))
                assert (edge if "perimeter" in text else len(inside)) == right, text
            elif kind == "sequence":
                assert [b - a for a, b in zip(n, [*n[1:], right])] == [n[1] - n[0]] * 4, text
            else:
                left = n[0] % n[1] if "eggs" in text else n[0] + n[1] * n[2] * (1 if "bags" in text else -1)
                assert left == right, text


def logic_truth(text):
    values = dict(re.findall(r"(\b[A-Z]) is (true|false)", text))
    formula = re.search(r"(?:\. Is|: is) (.*) true\?", text)[1]
    formula = re.sub(r"\b[A-Z]\b", lambda m: values[m[0]], formula)
    while formula not in ("true", "false"):
        for pattern, value in ((r"\((true|false)\)", None), (r"not (true|false)", lambda m: m[1] == "false"),
                               (r"(true|false) and (true|false)", lambda m: m[1] == m[2] == "true"),
                               (r"(true|false) or (true|false)", lambda m: "true" in (m[1], m[2]))):
            if found := re.search(pattern, formula):
                new = found[1] if value is None else str(value(found)).lower()
                formula = formula[:found.start()] + new + formula[found.end():]
                break
    return "yes" if formula == "true" else "no"


def logic_order(text):
    facts = re.findall(r"(\w+) is (\w+) than (\w+)", text)
    facts = [(a, b) if how in ("older", "taller", "faster") else (b, a) for a, how, b in facts]
    names = sorted({name for fact in facts for name in fact})
    (row,) = [p for p in permutations(names) if all(p.index(a) < p.index(b) for a, b in facts)]
    return row[0 if re.search("Who is (oldest|tallest|fastest)", text) else -1]


def logic_rules(text):
    """The answer, by going through all that a thing can be."""
    rules = re.findall(r"(Every|No) (\w+) is a (\w+)\.", text)
    start, end = re.search(r"Is (?:a|every) (\w+) a (\w+)", text).groups()
    words = sorted({word for _, *pair in rules for word in pair})
    found = set()
    for values in product((True, False), repeat=len(words)):
        thing = dict(zip(words, values))
        if thing[start] and all(not thing[a] or thing[b] == (how == "Every") for how, a, b in rules):
            found.add(thing[end])
    return {(True,): "yes", (False,): "no"}.get(tuple(found), "unknown")


def logic_knights(text):
    a, b = re.match(r"(\w+) and (\w+) are", text).groups()
    said = re.findall(r"(\w+)(?: says)?: ([^.]*)\.", text)
    found = []
    for knights in ([a, b], [a], [b], []):
        def holds(claim):
            if claim.startswith("we are both"):
                return len(knights) == (2 if "knights" in claim else 0)
            if claim.startswith("we"):
                return (len(knights) == 1) == (claim == "we differ")
            return (claim.split()[0] in knights) == claim.endswith("knight")
        if all((speaker in knights) == holds(claim) for speaker, claim in said):
            found.append(knights)
    (knights,) = found
    return {0: "neither", 1: "".join(knights), 2: "both"}[len(knights)]


def logic_odd(text):
    items = [item.split() for item in re.search(": (.*)[?.]", text)[1].split(", ")]
    (odd,) = [item for item in items for i in (0, 1) if [other[i] for other in items].count(item[i]) == 1]
    return odd[2]


def test_logic_answers_are_those_of_an_oracle():
    oracles = {"truth": logic_truth, "order": logic_order, "rules": logic_rules, "unknown": logic_rules,
               "knights": logic_knights, "odd": logic_odd}
    for spec in ("logic", "logic:2"):
        for kind, questions in drawn(spec, 100).items():
            answers = {q["answer"] for q in questions}
            assert all(oracles[kind](q["question"]) == q["answer"] for q in questions), kind
            assert kind == "unknown" or len(answers) >= 2
