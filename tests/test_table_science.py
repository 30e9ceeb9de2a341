"""Generated domains: answers computed from the text alone, mistakes, lengths and what earns nothing."""
import datetime
import math
import random
import re
import time
from collections import Counter
from fractions import Fraction

import pytest

import tasks
from tasks import _questions, code_ as code, science, simulation, table


def drawn_of_each_kind(module, kinds, n, level=1):
    """Return n questions of each kind, of which some may be the same."""
    rng = random.Random(0)
    found = {kind: [] for kind in kinds}
    while any(len(questions) < n for questions in found.values()):
        _, q = module.draw(rng, level)
        if len(found[q["kind"]]) < n:
            found[q["kind"]].append(q)
    return [q for questions in found.values() for q in questions]


# {task: (its module, its kinds of question, whether a question invites a common mistake)}
DOMAINS = {"table": (table, table.PHRASINGS, table.invites_mistake), "science": (science, science.KINDS, lambda q: q["kind"] == "sum"),
           "code": (code, code.KINDS, lambda q: q["kind"] == "list"), "simulation": (simulation, simulation.KINDS, lambda q: q["kind"] == "stack")}


@pytest.mark.parametrize("name", DOMAINS)
def test_gold_is_paid_and_mistakes_are_not(name):
    """What solves each kind's questions is paid in full and fits, and what is wrong earns nothing."""
    module, kinds, _ = DOMAINS[name]
    rng = random.Random(1)
    task = tasks.load(name)
    for q in drawn_of_each_kind(module, kinds, 300):
        right, wrong = task.solution(q), module.wrong_solution(q, rng)
        answers = [re.search("<answer>(.*)</answer>", text)[1] for text in (right, wrong)]
        assert task.verified(*task.reward(q, right)) and answers[0] == q["answer"] != answers[1], q
        assert task.reward(q, wrong)[0] == 0.0, wrong
        assert len(q["question"]) <= 110 and len(right) <= 140 and len(wrong) <= 140 and (q["question"] + right).isascii()
        bare = f"<answer>{q['answer']}</answer>"
        score, parts = task.reward(q, bare)
        assert score == 1.0 and not parts["reasoned"], q
        for text in (q["answer"], f"<answer>{answers[1]}</answer>{bare}", f"Answer: {q['answer']}", f"<answer>not {q['answer']}</answer>",
                     f"<answer>{q['answer']} or {answers[1]}</answer>", f"<answer><answer>{answers[1]}</answer></answer>"):
            assert task.reward(q, text)[0] == 0.0, (q, text)


@pytest.mark.parametrize("name", DOMAINS)
def test_shares_of_mistakes(name, monkeypatch):
    """Of documents with a wrong answer: two in ten, and two in three where a mistake is common."""
    module, _, is_mistaken = DOMAINS[name]
    monkeypatch.setattr(_questions, "N_DOCUMENTS", {"train": 6000, "valid": 100})
    rng, found = random.Random(2), Counter()
    questions = _questions.draw_documents(module.draw, "train", 0)
    for q, text in zip(questions, tasks.load(name).documents("train"), strict=True):
        answer = re.search("<answer>(.*)</answer>", text)[1]
        found[is_mistaken(q), answer != q["answer"]] += 1
        if is_mistaken(q) and answer != q["answer"]:
            assert text.endswith(module.wrong_solution(q, rng) + "\n")           # always the same
    shares = {common: found[common, True] / (found[common, True] + found[common, False]) for common in (True, False)}
    assert 0.58 < shares[True] < 0.72 and 0.17 < shares[False] < 0.23 and 0.22 < (found[True, True] + found[False, True]) / 6000 < 0.34


@pytest.mark.parametrize("name", [*DOMAINS, "math", "logic"])
def test_junk_earns_nothing_and_costs_nothing(name):
    """Reward raises nothing, pays nothing and is quick for texts of all kinds."""
    task, rng = tasks.load(name), random.Random(3)
    questions = drawn_of_each_kind(task.module, DOMAINS[name][1] if name in DOMAINS else task.module.KINDS, 1)
    pieces = ["<answer>", "</answer>", "9**9**9", "\0", "\ud800", "9" * 50, "1=", "1 > 2", "kg^", "m/s/", " Mon 1", "((", "²", ",", "\n",
              "1 + 1 = 2. ", "cup cost 4", "<answer>kg^999999</answer>", "<answer>//</answer>", "<answer>nan</answer>"]
    longest = ["", "9" * 10**6, "<answer>" * 10**5, "1>" * 10**6, "1 > 2 " * 10**5, "1+1=2." * 10**5, "<answer>" + "m " * 10**5, "1 a " * 10**5,
               "a > b. " * 10**5, "-> = : " * 10**5, " " * 10**6, "\n" * 10**6, "Reasoning:" * 10**5]
    slowest = []
    for text in [*longest, *("".join(rng.choices(pieces, k=rng.randrange(9))) * rng.choice((1, 1, 1000)) for _ in range(300))]:
        for q in questions:
            began = time.process_time()
            score, _ = task.reward(q, text)
            slowest.append(time.process_time() - began)
            assert score == 0.0, (q, text[:200])
    assert sorted(slowest)[-5] < 0.02            # a pass of the garbage collector or two do not count


def table_oracle(text):
    """Compute the answer from a question's text."""
    *lines, asked = text.split("\n")
    tables = []
    for line in lines:
        if line.startswith(("item,", "code,")):
            tables.append([])
        tables[-1].append(line.split(","))
    cells = {(row[0], label): row[i] for head, *rows in tables for row in rows for i, label in enumerate(head)}
    if of := re.search(r"the (\w+) of the (\w+)", asked):
        if len(tables) == 2:
            return cells[cells[of[2], "code"], of[1]]
        return cells[of[2], of[1]]
    if than := re.search(r"(\w+) (over|under) (\d+)", asked):
        keep = [name for name, *_ in tables[0][1:] if (int(cells[name, than[1]]) - int(than[3])) * (1 if than[2] == "over" else -1) > 0]
        if not re.search("many|Count", asked):
            assert len(keep) == 1
            return keep[0]
        return str(len(keep))
    column = re.search(r"(\w+)\W$", asked)[1]
    values = [int(value) for (_, label), value in cells.items() if label == column]
    return str(max(values) if "largest" in asked else sum(values))


@pytest.mark.parametrize("level", [1, 2])
def test_table_answers_are_those_of_the_text(level):
    for q in drawn_of_each_kind(table, table.PHRASINGS, 200, level):
        assert table_oracle(q["question"]) == q["answer"], q


def test_table_answers_in_words_and_steps_that_must_be_there():
    task = tasks.load("table")
    q = next(q for q in task.questions("train") if q["kind"] == "which")
    for text, score in ((q["answer"].upper() + ".", 1.0), (f"  {q['answer']} ", 1.0), (f"the {q['answer']}", 0.0), ("", 0.0)):
        assert task.reward(q, f"<answer>{text}</answer>")[0] == score
    flipped = task.solution(q).translate(str.maketrans("<>", "><")).replace(">answer<", "<answer>").replace(">/answer<", "</answer>")
    score, parts = task.reward(q, flipped)
    assert score == 1.0 and not parts["reasoned"]


def verify_false(spec, false_reasonings, kinds, least):
    """Check that worked examples are kept, and nothing of {fault: reasoning}, which
    false_reasonings(question, right reasoning) gives, with the right answer."""
    task, tried, kept = tasks.load(spec), Counter(), []
    for q in drawn_of_each_kind(task.module, kinds, 60, int(task.argument or 1)):
        assert task.verified(*task.reward(q, task.solution(q)))
        right = task.solution(q).partition("\n")[0].removeprefix("Reasoning: ")
        for fault, text in false_reasonings(q, right).items():
            if text != right:
                tried[fault] += 1
                grade = task.reward(q, f"Reasoning: {text}\nAnswer: <answer>{q['answer']}</answer>")
                kept += [text] * task.verified(*grade)
    assert not kept and sum(tried.values()) > least and min(tried.values()) > 25


def false_tables(q, text):
    names, kind = [name for name, *_ in q["rows"]], q["kind"]
    others = dict(zip(names, names[1:] + names[:1]))
    rows = [",".join(map(str, [others[name], *cells])) for name, *cells in q["rows"]]
    found = {"echo": " ".join(q["question"].split("\n")[:-1]).replace(",", " "),
             "rows": "\n".join([*rows, text]),
             "names": re.sub("|".join(names), lambda m: others[m[0]], text)}
    if kind == "cell" and len(q["columns"]) > 1:
        numbers = re.findall("[0-9]+", text)
        changed = dict(zip(numbers, numbers[1:] + numbers[:1]))
        found["cells"] = re.sub("[0-9]+", lambda m: changed[m[0]], text)
        found["edge"] = re.sub("([0-9]+)", r"\g<1>.5", text)
    if kind in ("count", "which", "largest"):
        found |= {"edge": re.sub("([0-9]+)(,|\\.$)", r"\1,000 \2", text), "chain": f"{text} 5 > 3 > 4."}
    if kind in ("count", "which"):
        found["no names"] = re.sub("|".join(names), "ox", text)
    if kind in ("count", "which", "largest"):
        found["equal"] = f"{text} 7 < 7."
    if kind == "join":
        found["column"] = re.sub("has [a-z]+ ([0-9])", r"has has \1", text)
    if kind == "sum":
        found["list"] = re.sub("^[0-9]+", "0", text)
        found["names"] = f"{names[0]} {q['rows'][1][1 + q['column']]}. {text}"
    return found


@pytest.mark.parametrize("spec", ["table:0", "table", "table:2"])
def test_table_reasoning_binds_numbers_to_their_names(spec):
    verify_false(spec, false_tables, table.TINY if spec == "table:0" else table.PHRASINGS, 500)


def test_table_reasoning_may_be_in_other_words():
    task, kept = tasks.load("table"), 0
    for q in drawn_of_each_kind(table, table.PHRASINGS, 60):
        name, *cells = q["rows"][q["row"]]
        column, answer, bound = q["columns"][q["column"]], q["answer"], q.get("bound")
        values = {name: row[q["column"]] for name, *row in q["rows"]} if q["kind"] != "join" else {}
        compared = [f"{value} {table.compared(value, bound or 0)} {bound}" for value in values.values()]
        named = [f"{name}: {text}" for name, text in zip(values, compared)]
        total = " + ".join(map(str, values.values())) + f" = {answer}"
        less = ", ".join(f"{answer} > {value}" for value in values.values() if str(value) != answer)
        texts = {
            "cell": [f"The {column} of the {name} is {answer}.",
                     f"{answer} is the {column} of the {name}. It is {answer}."],
            "join": [f"The code of {name} is {cells[0]}, and {cells[0]} has {answer}.",
                     f"1. {name} has code {cells[0]}.\n2. {cells[0]}: {answer}."],
            "count": [". ".join(compared), f"{', '.join(named)}. So {answer} rows are counted."],
            "which": ["\n".join(named[::-1]),
                      f"{'; '.join(compared)}\nOnly {answer} has {column} over {bound}."],
            "sum": [total, f"{', '.join(f'{name} {value}' for name, value in values.items())}: {total}"],
            "largest": [f"{less}. The largest is {answer}."],
        }[q["kind"]]
        for text in texts:
            assert task.verified(*task.reward(q, f"{text}\nAnswer: <answer>{answer}</answer>")), (q, text)
            kept += 1
    assert kept == 60 * 11


PRIMES = {"kg": 2, "m": 3, "s": 5, "1": 1}               # products of them tell all units apart
DEFINED = {
    "mass": "kg", "distance": "m", "time": "s", "area": "m*m", "volume": "m*m*m", "speed": "m/s", "frequency": "1/s",
    "acceleration": "m/s/s", "momentum": "kg*m/s", "density": "kg/m/m/m", "force": "kg*m/s/s", "pressure": "kg/m/s/s",
    "energy": "kg*m*m/s/s", "power": "kg*m*m/s/s/s"}


def unit_value(text):
    """Return the number that a unit of * and / is with PRIMES in place of the bases."""
    above, *below = text.split("/")
    return Fraction(math.prod(PRIMES[base] for base in above.split("*")), math.prod(PRIMES[base] for base in below))


def science_oracle(text):
    """Compute the answer from a question's text; of a unit its unit_value."""
    numbers = [int(digits) for digits in re.findall(r"\d+", text.replace("s^2", ""))]
    if unit := re.search(r"(?:unit has|unit of) (.+)\?", text):
        name, *rest = unit[1].split()
        value = unit_value(DEFINED[name])
        for word, other in zip(rest[::2], rest[1::2]):
            value *= unit_value(DEFINED[other]) ** (1 if word == "times" else -1)
        return value
    if "atoms" in text:
        element = re.search(r"many (\w+) atoms|atoms of (\w+)", text)
        n, formula = re.search(r"(\d+) ([A-Z]\w*)", text).groups()
        single = re.sub(r"([A-Z][a-z]?)(\d+)", lambda m: m[1] * int(m[2]), formula) * int(n)
        return str(re.findall("[A-Z][a-z]?", single).count(element[1] or element[2]))
    if "m/s" in text:
        *start, a, t = numbers
        return str(sum([a] * t, sum(start)))
    if "day is" in text and "how many" not in text:
        day = next(i for i in range(7) if f"{datetime.date(2024, 1, 1 + i):%A}" in text)
        return f"{datetime.date(2024, 1, 1 + day) + datetime.timedelta(numbers[0]):%A}"
    if dates := re.findall(r"(\d+) ([A-Z]\w+)", text):
        first, second = (datetime.datetime.strptime(f"{day} {month} 2023", "%d %B %Y") for day, month in dates)
        return str(abs((second - first).days))
    small = re.search(r"How many (\w+)", text)[1]
    sizes = {"mm": 1, "cm": 10, "m": 1000, "seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800}
    amounts = re.findall(r"(\d+) (\w+)", text)
    return str(sum(int(n) * sizes[unit] for n, unit in amounts) // sizes[small])


@pytest.mark.parametrize("level", [1, 2])
def test_science_answers_are_those_of_the_text(level):
    for q in drawn_of_each_kind(science, science.KINDS, 200, level):
        expected = science_oracle(q["question"])
        if q["kind"] == "unit":
            factors = [token.partition("^") for token in q["answer"].split()]
            assert math.prod(Fraction(PRIMES[base]) ** int(n or 1) for base, _, n in factors) == expected, q
        else:
            assert expected == q["answer"], (q, expected)


def false_facts(q, text):
    def other(match):
        return match[1] + str(int(match[2]) + 1)
    every_day = ", ".join(f"{day} {i}" for day in "Mon Tue Wed Thu Fri Sat Sun".split() for i in range(1, 7))
    return {
        "unit": {"vector": re.sub("^([a-z]+ )(-?[0-9]+)", other, text),
                 "sums": text + " ".join(f" {i} + 1 = {i + 1}." for i in range(20))},
        "atoms": {"count": re.sub("(One has )([0-9]+)", other, text), "element": re.sub("[A-Z][a-z]?[.]", "Al." if " Al." not in text else "C.", text, count=1)},
        "motion": {"formula": text.replace("*", "-", 1), "compared": text.replace("=", "<", 1)},
        "weekday": {"all days": f"{text} {every_day}", "edge": re.sub("(?<=[a-z] )([1-6])", r"\g<1>0", text)},
        "days": {"length": re.sub("( has )([0-9]+)", other, text)},
        "sum": {"factor": re.sub("( = )([0-9]+)", other, text, count=1), "unit": re.sub("( = [0-9]+) [a-z]+", r"\1 kg", text, count=1)},
    }[q["kind"]]


@pytest.mark.parametrize("spec", ["science:0", "science", "science:2"])
def test_science_facts_are_true_where_they_are_no_equations(spec):
    verify_false(spec, false_facts, science.TINY if spec == "science:0" else science.KINDS, 250)


@pytest.mark.parametrize("kind, given, answer, texts", [
    ("atoms", ["CH4", {"C": 1, "H": 4}, "H", 7], "28",
     ["Each CH4 has 1 C and 4 H atoms. 7 * 4 = 28 H.", "7 * 4 = 28", "7 CH4: 7 * 4 H = 28 H"]),
    ("motion", ["v = u + a * t", 3, 4, 5], "17",
     ["v = u + at. 3 * 4 = 12. 12 + 5 = 17.", "v = a * t + u = 3 * 4 + 5 = 17.", "5 + 3 * 4 = 17"]),
    ("motion", ["s = v * t", 3, 4], "12", ["s = vt\n3 * 4 = 12", "v = s / t, so s = v * t = 3 * 4 = 12."]),
    ("weekday", ["Monday", 10], "Thursday",
     ["10 - 7 = 3. Monday 0, Tuesday 1, Wednesday 2, Thursday 3.",
      "10 - 7 = 3. Tue 1\nWed 2\nThu 3, as Thu 10."]),
    ("days", [[22, 5], ["July", "August"]], "14",
     ["July has 31 days. 31 - 22 = 9. 9 + 5 = 14.", "31 - 22 + 5 = 14"])])
def test_science_reasoning_may_be_in_other_words(kind, given, answer, texts):
    q = {"question": "How many?", "kind": kind, "given": given, "answer": answer}
    for text in texts:
        assert tasks.load("science").reward(q, f"{text} <answer>{answer}</answer>") == (
            1.0, dict.fromkeys(("answered", "correct", "reasoned"), True)), text


def test_atoms_may_be_named_by_their_symbol():
    """Of which C, F and K are also units of temperature."""
    for element, n in {"C": 3, "K": 6, "O": 9}.items():
        q = {"question": f"How many {element} atoms are in 3 K2CO3?", "kind": "atoms", "given": ["K2CO3", {"K": 2, "C": 1, "O": 3}, element, 3],
             "answer": str(n)}
        paid = [science.reward(q, f"<answer>{text}</answer>")[0] for text in (f"{n} {element}", f"{n}{element}", f"{n} {element}2", f"{n + 1} {element}")]
        assert paid == [1, 1, 0, 0]


def test_science_asks_for_a_unit_in_one_order_that_can_be_read_in_one_way():
    rng = random.Random(0)
    drawn = [science.draw_unit(rng, level)[0] for level in (1, 2) for _ in range(2000)]
    spelled = {}
    for (first, *others), words in drawn:
        factors = [(first, "times"), *zip(others, words)]
        spelled.setdefault(str(sorted(factors)), set()).add(str(factors))
        assert words == sorted(words, reverse=True)                # a over b times c: is c below?
    assert all(len(ways) == 1 for ways in spelled.values())


def test_science_units_are_read_in_the_forms_people_write():
    q = {"kind": "unit", "given": [["energy", "time"], ["over"]], "question": "", "answer": "kg m^2 s^-3"}
    for text in ("kg m^2 s^-3", "kg¹ m² s⁻³", "kg*m^2/s^3", "kg·m²/s³", "kg m2 s-3", "m^2 kg / s^3", "kg m m/s/s/s",
                 "kg m^(2) s^(-3)"):
        assert tasks.load("science").reward(q, f"<answer>{text}</answer>")[0] == 1.0, text
    for text in ("kg m^2 s^3", "kg m^2", "W", "kg m^2 s^-3 or 1", "kg g m^2 s^-3", "", "/", "kg m^2 /",
                 "kg m^(2 s^-3", "kg m^2) s^-3"):
        assert tasks.load("science").reward(q, f"<answer>{text}</answer>")[0] == 0.0, text
