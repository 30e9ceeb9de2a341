"""Unit conversion: generated questions with reasoning in equations.

The argument is a level, 1 to 3 (default 1): 1 whole numbers and metric units, five phrasings; 2 decimals,
more units, dozens of phrasings; 3 also speed, temperature (in two steps), imperial and US units, and
non-terminating ratios. Or it is a path: a .json file with [[question, answer], ...], or a folder with
train.json and optionally valid.json and test.json, in it or in its subfolder data. Without test.json,
valid.json is the test split, and a tenth of the training questions is for valid.

Like text from the web, three in ten documents have a wrong step: a random slip, or, for some conversions,
always the same common mistake, which then outnumbers the truth. A model pretrained on them knows the format
and is often wrong, a starting point for rejection sampling and reinforcement learning."""
import math
import random
import re
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from operator import add, mul, sub, truediv
from pathlib import Path

from tasks import _answers, _equations, _numbers, _questions, _steps
from tasks._units import UNITS, canonical, size_of as size_of_unit

INSTRUCTION = ("Convert the units with short reasoning: the ratio, then the equation, such as 6 * 1000 = "
               "6000. Then give the number alone within <answer></answer>.")
TO_CELSIUS = {"celsius": [], "fahrenheit": [[("-", 32)], [("*", 5), ("/", 9)]],
              "kelvin": [[("-", Fraction("273.15"))]]}
FROM_CELSIUS = {"celsius": [], "fahrenheit": [[("*", 9), ("/", 5)], [("+", 32)]],
                "kelvin": [[("+", Fraction("273.15"))]]}
PHRASINGS = (        # level 1 has the first five
    "How many {to} are there per {n} {frm}?",
    "Express {n} {frm} as a quantity of {to}.",
    "Convert {n} {frm} to {to}.",
    "What is {n} {frm} in {to}?",
    "{n} {frm} is how many {to}?",
    "How many {to} make {n} {frm}?",
    "How many {to} are in {n} {frm}?",
    "How does {n} {frm} measure up in terms of {to}?",
    "What do you get when {n} {frm} is converted to {to}?",
    "Change {n} {frm} into {to}.",
    "Give {n} {frm} in {to}.",
    "Write {n} {frm} in {to}.",
    "Turn {n} {frm} into {to}.",
    "Find the number of {to} in {n} {frm}.",
    "What number of {to} equals {n} {frm}?",
    "{n} {frm} equals what number of {to}?",
    "{n} {frm} to {to}, please.",
    "{n} {frm} = ? {to}",
    "Could you tell me what {n} {frm} comes to in {to}?",
    "In {to}, how much is {n} {frm}?",
    "How much is {n} {frm} when it is counted in {to}?",
    "Please restate {n} {frm} using {to} as the unit.",
    "State the equivalent of {n} {frm} in {to}.",
    "I have {n} {frm}. How many {to} is that?",
    "The label says {n} {frm}. What would it say in {to}?",
    "A form asks for {to}, but all I know is {n} {frm}. What do I write?",
    "My notes give {n} {frm}, and the table is in {to}: which number goes into the table?",
    "If something comes to {n} {frm}, how many {to} is it?",
    "Suppose we measure {n} {frm}. What is the same amount in {to}?",
    "One report says {n} {frm}, another uses {to}. What should the second one say?",
    "Someone who only knows {to} hears of {n} {frm}. How many {to} should they picture?",
    "A student has to hand in {n} {frm} as {to}. What is the right number?",
)
SPEEDS = (
    "How fast is {n} {frm} in {to}?",
    "A train moves at {n} {frm}. What is its speed in {to}?",
    "The wind blows at {n} {frm}; how many {to} is that?",
    "If a boat makes {n} {frm}, what does a log that counts {to} show?",
)
TEMPERATURES = (
    "What is {n} degrees {frm} in {to}?",
    "Convert {n} degrees {frm} to {to}.",
    "Express a temperature of {n} {frm} in {to}.",
    "It is {n} {frm} outside. What does a thermometer in {to} show?",
    "The oven's dial says {n} {frm}, but the recipe wants {to}. What is that in {to}?",
    "How hot is {n} {frm} on the {to} scale?",
)
LARGEST_FACTOR = 100_000
LOOSE = Fraction(1, 20)              # relative error of an answer that earns the reward
EXACT = Fraction(1, 1000)            # relative error of an answer that may be trained on
RATE = re.compile(r"\b([a-zA-Z]{1,20})(?: ?/ ?| per )([a-zA-Z]{1,20})\b")
OF_MEAN_LENGTH = re.compile(r"\b(months?|years?|decades?|century|centuries)\b", re.IGNORECASE)
OPERATOR = re.compile(r"[+*]|/ ?[(0-9]|[\w)] ?[-xX] ?[(0-9]")
UNIT = r"(?:[^\W\d_][\w/-]{0,30}(?:\^3)?|%)"
AMOUNT = re.compile(rf"(?<![\w.])(-?(?:{_numbers.NUMBER}))\s*({UNIT}?)(?!\^)")
# `1 kg is 1000 gram`, `one kg = 1000 gram`
IS = re.compile(rf"(\d\s?{UNIT})\s{{1,3}}(?:is|are|equals?|makes?|[-=]{{1,9}}>|[→⇒])\s{{1,3}}(?=-?[.\d])")
COUNTS = dict.fromkeys(("a", "an", "each", "every"), 1) | {"hundred": 100, "thousand": 1000}
COUNTS |= dict(zip("one two three four five six seven eight nine ten".split(), range(1, 11)))
COUNTED = re.compile(rf"\b({'|'.join(COUNTS)})\s{{1,3}}({UNIT})", re.IGNORECASE)
FORM = "[question, answer] with a number for an answer"       # of a file's rows
WRONG = 0.2                          # share of documents with a wrong step
MOSTLY_WRONG = 0.7                   # share for the conversions with a common mistake, one in five
MISTAKES = ("ratio", "inverse", "digit", "point")     # kinds of wrong step of the other conversions


def check(argument):
    if argument not in (None, "1", "2", "3") and not Path(argument or "no path").exists():
        raise ValueError("The argument of unit_conversion is a level, 1, 2 or 3, or the path of a .json file "
                         f"or a folder of them, and {argument or 'nothing'} is none of these.")


def level_of(argument):
    """Return the level of an argument; 3 for a path, for the text generated in addition to its questions."""
    return int(argument or 1) if argument in (None, "1", "2", "3") else 3


# --- conversions ---

@lru_cache(maxsize=None)
def problems(level):
    """Return {quantity: [(from, to)]}; below level 3 only conversions with a short ratio."""
    found = {}
    for quantity in UNITS[level - 1] | UNITS[0]:
        sizes = {unit: size for units in UNITS[:level] for unit, size in units.get(quantity, {}).items()}
        found[quantity] = [(frm, to) for frm, to in permutations(sizes, 2)
                           if quantity == "temperature" or is_convertible(frm, to, sizes, level)]
    return found


def is_convertible(frm, to, sizes, level):
    ratio = Fraction(sizes[frm], sizes[to])
    return 1 / LARGEST_FACTOR <= ratio <= LARGEST_FACTOR and (level == 3 or steps_of(frm, to, level))


@lru_cache(maxsize=None)
def size_of(unit):
    """Return (quantity, size) of a unit."""
    return next((quantity, Fraction(units[unit])) for added in UNITS for quantity, units in added.items()
                if unit in units)


@lru_cache(maxsize=None)
def steps_of(frm, to, level=3):
    """Return the steps of a conversion: [(fact with {} for its ratio, or "", operations [(sign, number)] of
    one equation)]; below level 3, [] without a short ratio."""
    (quantity, size), (_, other) = size_of(frm), size_of(to)
    if quantity == "temperature":
        return [("", operations) for operations in TO_CELSIUS[frm] + FROM_CELSIUS[to]]
    if quantity == "speed":
        return [(f"1 {frm} = {{}} m per hour. ", [("*", size)]),
                (f"1 {to} = {{}} m per hour. ", [("/", other)])]
    ratio = size / other
    if short(ratio, level) or (level == 3 and not short(1 / ratio, level)):
        return [(f"1 {frm} = {{}} {to}. ", [("*", Fraction(decimal(ratio)))])]
    return [(f"1 {to} = {{}} {frm}. ", [("/", 1 / ratio)])] if level > 1 and short(1 / ratio, level) else []


def short(ratio, level):
    """Return whether a ratio is short: a power of ten or an integer (level 1), or seven digits."""
    if level == 1:
        return ratio.denominator == 1 or set(str(ratio.denominator)) <= {"1", "0"}
    return Fraction(decimal(ratio)) == ratio and len(decimal(ratio).replace(".", "").strip("0")) <= 7


def decimal(x):
    """Return a fraction in decimal notation: exact with up to nine decimals, else rounded to seven digits."""
    if 10**9 % x.denominator:
        x = round(x, 6 - math.floor(math.log10(abs(x))))
    if x.denominator == 1:
        return str(x.numerator)
    whole, rest = divmod(abs(x.numerator) * 10**12 // x.denominator, 10**12)
    return "-" * (x < 0) + f"{whole}.{rest:012d}".rstrip("0").rstrip(".")


def apply(value, operations):
    """Return the exact value after the operations of one equation."""
    for sign, x in operations:
        value = {"+": add, "-": sub, "*": mul, "/": truediv}[sign](value, x)
    return value


def exact(n, frm, to):
    """Return n `frm` in the unit `to`, exactly."""
    if size_of(frm)[0] != "temperature":
        return n * size_of(frm)[1] / size_of(to)[1]
    for _, operations in steps_of(frm, to):
        n = apply(n, operations)
    return n


def in_parts(value, operations):
    """Return a multiplication digit by digit, which a small model can learn, and the left side of the final
    sum: `300 * 24 = 7200. 40 * 24 = 960. 4 * 24 = 96. ` and `7200 + 960 + 96` for 344 * 24. None if it is a
    single step."""
    digits = _numbers.digits(value.numerator) if value.denominator == 1 else []
    (sign, x), *more = operations
    if len(digits) < 2 or sign != "*" or more or x.denominator != 1 or set(str(x.numerator)) <= {"1", "0"}:
        return None
    products = "".join(f"{d} * {decimal(x)} = {decimal(d * x)}. " for d in digits)
    return products, " + ".join(decimal(d * x) for d in digits)


def worked(n, steps, wrong=None, parts=False):
    """Return (reasoning, result). wrong: (i, function) replaces the result of equation i by function(result).
    parts: compute products digit by digit."""
    text = ""
    value = n
    for i, (fact, operations) in enumerate(steps):
        result = apply(value, operations)
        if i + 1 == len(steps) and survives(result, 3):
            result = round(result, 3)
        else:
            result = Fraction(decimal(result))
        if wrong and wrong[0] == i:
            result = wrong[1](result)
        left = "", f"{decimal(value)} {' '.join(f'{s} {decimal(x)}' for s, x in operations)}"
        left = parts and in_parts(value, operations) or left
        text += f"{fact.format(decimal(operations[0][1]))}{''.join(left)} = {decimal(result)}. "
        value = result
    return text.rstrip(), value


# --- questions ---

def draw(rng, level, quantity=None):
    """Return (key, question). The key is number and units, without the phrasing. Answers are unchanged by
    rounding to three decimals, as the verifier does."""
    choices = problems(level)
    while True:
        kind = quantity or rng.choice(list(choices))
        frm, to = rng.choice(choices[kind])
        n = temperature(rng, frm) if kind == "temperature" else amount(rng, level)
        answer = exact(n, frm, to)
        if survives(answer, level):
            break
    phrasings = PHRASINGS if level > 1 else PHRASINGS[:5]
    phrasings = {"temperature": TEMPERATURES, "speed": PHRASINGS + SPEEDS}.get(kind, phrasings)
    n = decimal(n)
    question = rng.choice(phrasings).format(n=n, frm=frm, to=to)
    return f"{n} {frm} {to}", {"question": question, "answer": decimal(round(answer, 3)),
                               "n": n, "from": frm, "to": to, "level": level}


def survives(x, level):
    """Return whether rounding to three decimals leaves a number unchanged; at level 3, within 0.05%."""
    return 1000 % x.denominator == 0 or (level == 3 and abs(round(x, 3) - x) * 2000 <= abs(x))


def amount(rng, level):
    """Draw an amount: an integer below 1000 at level 1; up to two decimals at level 2, three at level 3."""
    if level == 1 or rng.random() < 0.5:
        return Fraction(rng.randrange(1, 1000) if rng.random() < 0.5 else rng.randrange(1, 100))
    decimals = rng.randint(1, level)
    return Fraction(rng.randrange(1, 10 ** rng.randint(decimals, 4)), 10**decimals)


def temperature(rng, unit):
    low, high = {"celsius": (-60, 300), "fahrenheit": (-60, 500), "kelvin": (200, 600)}[unit]
    if rng.random() < 0.3:
        return Fraction(rng.randrange(10 * low, 10 * high), 10)
    return Fraction(rng.randrange(low, high))


def most_of(level):
    """Return an upper bound on the number of distinct questions, exact at level 1."""
    pairs = [pair for pairs in problems(level).values() for pair in pairs]
    if level == 1:
        return sum(survives(exact(Fraction(n), *pair), 1) for pair in pairs for n in range(1, 1000))
    return (999 + 10**4 * level + 8000) * len(pairs)


def solution(question, parts=None):
    """Return a worked solution. parts: products digit by digit; None: at level 1."""
    if "n" not in question:
        raise ValueError("A unit_conversion question from a file has no worked solution: use a level.")
    level = question["level"]
    steps = steps_of(question["from"], question["to"], level)
    text, value = worked(Fraction(question["n"]), steps, parts=level == 1 if parts is None else parts)
    return _steps.completion(text, decimal(value))


def mistaken(frm, to, level):
    """Return whether a conversion has a common mistake: every fifth of a quantity's."""
    return problems(level)[size_of(frm)[0]].index((frm, to)) % 5 == 2


def document(question, rng, kinds=MISTAKES, parts=None, changed=str):
    """Return a document, perhaps with a wrong step of one of the kinds. parts: see solution; changed: a
    function of the completion."""
    frm, to, level = (question[key] for key in ("from", "to", "level"))
    common = mistaken(frm, to, level)
    if rng.random() >= (MOSTLY_WRONG if common else WRONG):
        text = solution(question, parts)
    elif common:                             # always the same mistake
        text = wrong_solution(question, random.Random(f"{frm} {to}"), ("ratio", "inverse"), parts)
    else:
        text = wrong_solution(question, rng, kinds, parts)
    return _questions.document(question, changed(text))


def wrong_solution(question, rng, kinds=MISTAKES, parts=None):
    """Return a solution with one wrong step and an answer that is off by more than 0.1%. parts: see
    solution."""
    parts = question["level"] == 1 if parts is None else parts
    steps = steps_of(question["from"], question["to"], question["level"])
    while True:
        i = rng.randrange(len(steps))
        kind = rng.choice(kinds)
        wrong = None
        fact, operations = steps[i]
        if kind == "ratio":                          # of 1 kg = 100 gram
            spoil = rng.choice((other_digit, other_point))
            operations = [(operations[0][0], spoil(Fraction(operations[0][1]), rng)), *operations[1:]]
        elif kind == "inverse":
            operations = [({"*": "/", "/": "*", "+": "-", "-": "+"}[sign], x) for sign, x in operations]
        else:
            spoil = other_digit if kind == "digit" else other_point
            wrong = i, lambda result: spoil(result, rng)
        changed = [*steps[:i], (fact, operations), *steps[i + 1:]]
        text, value = worked(Fraction(question["n"]), changed, wrong, parts)
        if value and not _numbers.close(value, Fraction(question["answer"]), EXACT):
            return _steps.completion(text, decimal(value))


def other_digit(x, rng):
    """Return a number with its first or, less often, second significant digit changed."""
    text = decimal(x)
    places = [i for i, digit in enumerate(text) if digit in "123456789"][:2]
    if not places:
        return x
    i = rng.choice(places[:1] * 3 + places[1:])
    return Fraction(text[:i] + rng.choice([d for d in "123456789" if d != text[i]]) + text[i + 1:])


def other_point(x, rng):
    """Return a number with its decimal point shifted by one or two places."""
    return x * Fraction(10) ** rng.choice((-2, -1, 1, 2))


def questions(split, seed=0, n=None, argument=None):
    if argument in (None, "1", "2", "3"):
        level = level_of(argument)
        return _questions.distinct(lambda rng: draw(rng, level), split, seed, n, lambda: most_of(level))
    return _questions.sample(from_files(Path(argument))[split], seed, n)


def documents(split, seed=0, argument=None):
    rng = random.Random(f"{seed} {split} wrong")
    level = level_of(argument)
    return [document(q, rng) for q in _questions.draw_documents(lambda rng: draw(rng, level), split, seed)]


def examples(n, argument=None):
    """Return n worked examples, cycling through the quantities."""
    rng = random.Random("examples")
    level = level_of(argument)
    found = {}
    while len(found) < n:
        quantities = list(problems(level))
        key, question = draw(rng, level, quantities[len(found) % len(quantities)])
        if _questions.split_of(key) == "train":
            found[key] = question["question"], solution(question)
    return list(found.values())


def from_files(path):
    """Return {split: questions} of a .json file or of a folder's files."""
    if path.is_file():
        return _questions.make_splits(_questions.read(path, row, FORM))
    folder = path if (path / "train.json").is_file() or not (path / "data").is_dir() else path / "data"
    if not (folder / "train.json").is_file():
        raise ValueError(f"There is no {folder / 'train.json'}: unit_conversion:PATH is a .json file or a "
                         "folder with train.json.")
    files = {split: folder / f"{split}.json" for split in ("train", "valid", "test")}
    found = {split: _questions.read(file, row, FORM) for split, file in files.items() if file.is_file()}
    if "test" not in found and "valid" in found:
        found["test"] = found.pop("valid")
    return _questions.make_splits(**found)


def row(raw):
    """Return the question of a row [question, answer]. Fails unless the answer is a number."""
    question, answer = raw
    number = None if isinstance(answer, bool) else _numbers.written(str(answer))
    if not question.strip() or number is None:
        raise ValueError
    return {"question": question.strip(), "answer": number}


def reward(question, completion):
    """Return (score, parts). The score is 1.0 if the answer is within a loose 5% (correct). The other parts:
    there is an answer (answered), within 0.1% (exact), and true equations, without a false or unreadable
    fact, lead from the question to it (reasoned)."""
    completion = completion[:_numbers.LONGEST_TEXT]
    value = _answers.answer(completion, _answers.asked_unit(question))
    right = _answers.right_answer(question)
    parts = {"answered": value is not None,
             "correct": value is not None and _numbers.close(value, right, LOOSE),
             "exact": value is not None and _numbers.close(value, right, EXACT),
             "reasoned": (_answers.reasoned(question, with_units(completion), value)
                          and all(facts(question, completion)))}
    return float(parts["correct"]), parts


def with_units(text):
    """Return a text with `m per hour` as m/hour and month as mean-month, for _equations."""
    text = RATE.sub(lambda rate: "/".join(map(canonical, rate.groups())), text)
    return OF_MEAN_LENGTH.sub(lambda unit: f"mean-{canonical(unit[0])}", text)


def facts(question, completion):
    """Yield whether each fact, an equality or comparison of two amounts such as `1 year = 365.25 day`, is
    true, within 0.1%. A fact with unknown units is false; degrees are known only in the fact that answers the
    question. A number on the right without a unit has the unit asked for."""
    n_asked, unit, answer, unit_asked = (question.get(key, "") for key in ("n", "from", "answer", "to"))
    text = with_units(_answers.before_answer(completion)).replace("°", " ").replace("degrees ", "")
    text = COUNTED.sub(lambda m: f"{COUNTS.get(m[1].lower(), m[1])} {m[2]}" if size_of_unit(m[2]) else m[0],
                       text)
    text = IS.sub(r"\1 = ", text)
    for statement in _equations.statements(text):
        if OPERATOR.search(statement):
            continue
        sides = [AMOUNT.findall(side) for side in _equations.RELATION.split(statement)]
        for left, right, relation in zip(sides, sides[1:], _equations.RELATION.findall(statement)):
            if left and right:
                (n, frm), (m, to) = left[-1], right[0]
                asked = (n, frm[:1].lower(), m, to[:1].lower()) == (n_asked, unit[:1], answer, unit_asked[:1])
                yield asked and unit in TO_CELSIUS or is_fact(n, frm, relation, m, to or unit_asked)
            elif left:
                yield re.search(r"\d", statement.partition("=")[2]) is None


def is_fact(n, frm, relation, m, to):
    """Return whether a relation of two amounts in known units of one quantity is true, within 0.1%."""
    if max(len(n), len(m)) > _numbers.LONGEST:
        return False
    (quantity, size), (other, other_size) = (size_of_unit(unit) or (unit, 0) for unit in (frm, to))
    left = Fraction(_numbers.ungrouped(n)) * size
    right = Fraction(_numbers.ungrouped(m)) * other_size
    difference = 0 if _numbers.close(left, right, EXACT) else left - right
    return size != 0 and quantity == other and _equations.HOLDS[relation](difference, 0)
