"""No worked solution with one number, sign, unit, name or form changed, so that a statement becomes false, is verified.

A mutant whose equation still holds within 0.1% or to the decimals written, as documented, is not counted."""
import random
import re
from fractions import Fraction

import pytest

import tasks
from tasks import science, table, unit_conversion

SPECS = [f"{name}{level}" for name in ("unit_conversion", "unit_conversion_tool") for level in ("", ":2", ":3")]
SPECS += ["arithmetic", "arithmetic:4", "arithmetic:7", "countdown", "countdown:5"]
SPECS += [f"{name}{level}" for name in ("math", "code", "logic", "simulation", "table", "science") for level in (":0", "", ":2")]
UNITS = sorted({unit for added in unit_conversion.UNITS for units in added.values() for unit in units})
CLASSES = {     # {task: [words of which one is replaced by another]}
    "table": [table.NAMES, table.COLUMNS, table.CODES],
    "science": [list(science.QUANTITIES), [day[:3] for day in science.DAYS], list(science.MONTHS), "H C O N S P K F Na Ca Al Mg".split(),
                "m cm mm hour hours minute minutes second seconds week weeks day days km kg".split()],
}
TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|(?<= )[-+*/<>=](?= )|(?<![\w/])[A-Za-z][\w/]*")
STATEMENT = re.compile(r"[^.\n]*(?:\.[0-9]+[^.\n]*)*")
EQUATION = re.compile(r"[0-9 .+*/()=-]*=[0-9 .+*/()=-]*")
RESULT = re.compile(r"(?<=[0-9]) = ([0-9]+(?:\.[0-9]+)?)(?=[.,]?(?:\s|$))")
FORMS = ('= "{}"', "= [{}]", "= {{{}}}", "= |{}|", "= ~{}", "= about {}", "= **{}**", "= `{}`", "= '{}'", "= “{}”", "= «{}»", "= <{}>",
         "= #{}", "= _{}_", "= @{}", "= ({})", "= {}!", ":= {}", "-> {}", "→ {}", "=> {}", "== {}", "≈ {}", "≡ {}", "is {}", "equals {}",
         "\n= {}", "=\n{}", "= exactly {}", "=\u200b{}", "= 0{}", "= ${}", "= \\boxed{{{}}}")
SPELLINGS = (lambda n: n.translate({48 + i: 0xFF10 + i for i in range(10)}), lambda n: f"{n[:1]} {n[1:]}", lambda n: f"{n}e0", lambda n: f"{n}.0")


def value_of(side):
    """Return the value of one side of an equation; this test made its text."""
    return eval(re.sub(r"[0-9]+(?:\.[0-9]+)?", lambda m: f"Fraction('{m[0]}')", side.strip(" .")), {"Fraction": Fraction})


def still_holds(statement):
    """Return whether all sides of a plain equation are equal within 0.1%."""
    if compared := re.fullmatch(r"[0-9 <>,]+", statement.strip()):
        pairs = re.findall(r"([0-9]+) ([<>]) (?=([0-9]+))", compared[0])
        return bool(pairs) and all((int(a) < int(b)) == (sign == "<") and a != b for a, sign, b in pairs)
    if not EQUATION.fullmatch(statement):
        return False
    try:
        values = [value_of(side) for side in statement.split("=")]
    except (SyntaxError, ZeroDivisionError, TypeError, ValueError):
        return False
    decimals = re.search(r"\.([0-9]+)\W*$", statement)
    step = Fraction(1, 10 ** len(decimals[1])) if decimals else 0
    return all(a == b or a.denominator * b.denominator > 1 and abs(a - b) <= max(max(abs(a), abs(b)) / 1000, min(step / 2, abs(b) / 10))
               for a, b in zip(values, values[1:]))


def other_number(text, rng):
    """Return a number with a changed, additional or missing digit."""
    while True:
        i = rng.randrange(len(text))
        changed = rng.choice((text[:i] + rng.choice("0123456789") + text[i + 1:], text[:i] + rng.choice("123456789") + text[i:],
                              text[:i] + text[i + 1:], f"{text}0", str(int(float(text)) + rng.choice((-1, 1)))))
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", changed) and abs(Fraction(changed) - Fraction(text)) * 1000 > Fraction(text):
            return changed


def other_token(name, token, question, rng):
    """Return a token that makes a true statement false, None for a word that is in no class."""
    if token[0].isdigit():
        return other_number(token, rng)
    if token in "<>=":
        return rng.choice([sign for sign in "<>" if sign != token])
    if token in "-+*/":
        return rng.choice([sign for sign in "-+*/" if sign != token])
    if name.startswith("unit_conversion"):
        return rng.choice([unit for unit in UNITS if unit != token]) if token in UNITS else None
    words = next((words for words in CLASSES.get(name, ()) if token in words), [token])
    others = [word for word in words if word.lower().rstrip("s") != token.lower().rstrip("s")
              and word not in str(question.get("given", ""))
              and (token not in science.MONTHS or science.MONTHS[word] != science.MONTHS[token])]
    return rng.choice(others) if others else None


def mutant(task, question, rng):
    """Return (fault, completion) with one change of the solution that makes a statement false; None if none was found."""
    text = task.solution(question)
    reasoning, answer, rest = text.rpartition("\nAnswer:")
    head = len("Reasoning:") if reasoning.startswith("Reasoning:") else 0
    if rng.random() < 0.2:                                   # another way of writing a result
        results = [m for m in RESULT.finditer(reasoning) if EQUATION.search(statement_at(reasoning, m.start())) or "1 " in reasoning]
        if not results:
            return None
        found = rng.choice(results)
        wrong = other_number(found[1], rng)
        form = rng.choice(FORMS)
        if rng.random() < 0.3:
            wrong = rng.choice(SPELLINGS)(wrong)
        fault, new = "form", f" {form.format(wrong)}"
        while new.strip().startswith(("=\n", "= ")) and wrong.replace(" ", "") == found[1]:
            return None
    else:
        tokens = [m for m in TOKEN.finditer(reasoning, head)
                  if "worked" not in question or "gsm8k" not in task.name or EQUATION.fullmatch(statement_at(reasoning, m.start()))]
        if not tokens:
            return None
        found = rng.choice(tokens)
        new = other_token(task.name.partition(":")[0], found[0], question, rng)
        if new is None:
            return None
        fault = "number" if found[0][0].isdigit() else "sign" if found[0] in "-+*/<>=" else "word"
    changed = reasoning[:found.start()] + new + reasoning[found.end():]
    if fault != "form" and still_holds(statement_at(changed, found.start())):
        return None
    return fault, changed + answer + rest


def statement_at(text, place):
    """Return the statement, up to a full stop, a colon or a line's end, around a place in a text."""
    return next((m[0][m[0].rfind(": ", 0, place - m.start()) + 1:] for m in STATEMENT.finditer(text) if m.start() <= place < m.end()), "")


def mutants(task, n, seed, among):
    """Yield n (question, fault, completion) of up to `among` questions of a task."""
    rng = random.Random(f"{task.name} {seed}")
    questions = [q for q in task.questions("train", n=among, fewer=True) if task.verified(*task.reward(q, task.solution(q)))]
    for _ in range(n):
        found = None
        while found is None:
            question = rng.choice(questions)
            found = mutant(task, question, rng)
        yield question, *found


@pytest.mark.parametrize("spec", SPECS)
def test_no_mutant_of_a_worked_solution_is_verified(spec):
    task = tasks.load(spec)
    kept = [(fault, question, completion) for question, fault, completion in mutants(task, 60, seed=1, among=150)
            if task.verified(*task.reward(question, completion))]
    assert kept == []
