"""Unit conversion: a question, the reasoning with one equation, the answer. Generated, so it needs no download."""
import hashlib
import random
from fractions import Fraction

from tasks import _numbers

UNITS = {     # quantity: {unit: size in the quantity's smallest unit here}; ratios are kept whole or short
    "length": {"mm": 1, "cm": 10, "m": 1000, "km": 1_000_000},
    "mass": {"mg": 1, "gram": 1000, "kg": 1_000_000, "tonne": 1_000_000_000},
    "time": {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800},
    "data": {"bit": 1, "byte": 8, "kB": 8000, "MB": 8_000_000},
    "volume": {"ml": 1, "cl": 10, "dl": 100, "litre": 1000},
}
PHRASINGS = (
    "How many {to} are there per {n} {frm}?",
    "Express {n} {frm} as a quantity of {to}.",
    "Convert {n} {frm} to {to}.",
    "What is {n} {frm} in {to}?",
    "{n} {frm} is how many {to}?",
)
LARGEST_FACTOR = 100_000
N_DOCUMENTS = {"train": 20_000, "valid": 1_000}


def decimal(x):
    """A fraction with a finite decimal expansion, written out."""
    text = f"{float(x):.9f}".rstrip("0").rstrip(".")
    return text


def problems():
    """All (from, to, factor) with one unit at most LARGEST_FACTOR times the other and a short decimal ratio."""
    for units in UNITS.values():
        for frm, size in units.items():
            for to, other in units.items():
                factor = Fraction(size, other)
                short = factor.denominator == 1 or set(str(factor.denominator)) <= {"1", "0"}
                if frm != to and short and 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
                    yield frm, to, factor


def in_split(split, n, frm, to):
    """A tenth of the questions, by a hash of what is asked and not of how, is for validation."""
    held_out = hashlib.sha256(f"{n} {frm} {to}".encode()).digest()[0] % 10 == 0
    return held_out == (split != "train")


def draw(rng, split, choices):
    """(number, unit, unit, factor, question) of the split."""
    while True:
        frm, to, factor = rng.choice(choices)
        n = rng.randrange(1, 1000) if rng.random() < 0.5 else rng.randrange(1, 100)
        if in_split(split, n, frm, to):
            return n, frm, to, factor, rng.choice(PHRASINGS).format(n=n, frm=frm, to=to)


def document(rng, split, choices):
    """A question of the split with its worked answer."""
    n, frm, to, factor, question = draw(rng, split, choices)
    answer = decimal(n * factor)
    return (f"Question: {question}\nReasoning: 1 {frm} = {decimal(factor)} {to}. {n} * {decimal(factor)} = {answer}.\n"
            f"Answer: <answer>{answer}</answer>\n")


def documents(split, seed=0):
    """Worked examples of split "train" or "valid"."""
    rng, choices = random.Random(f"{seed} {split}"), list(problems())
    return [document(rng, split, choices) for _ in range(N_DOCUMENTS[split])]


def questions(split, seed=0, n=1000):
    """n questions, no two of which ask the same; train and valid have none in common. ValueError if there are not so many."""
    rng, choices, asked = random.Random(f"{seed} {split} questions"), list(problems()), {}
    there_are = sum(in_split(split, number, frm, to) for frm, to, _ in choices for number in range(1, 1000))
    if n > there_are:
        raise ValueError(f"{n} questions of unit_conversion were asked for, and the split {split} has {there_are}.")
    while len(asked) < n:
        number, frm, to, factor, question = draw(rng, split, choices)
        asked.setdefault((number, frm, to), {"question": question, "answer": decimal(number * factor)})
    return list(asked.values())


def reward(question, completion):
    """(score, parts). The score is 1.0 if the answer is within 5% of the right one, both rounded to three decimals, which is loose; the
    parts say whether there is an answer (answered), whether it is right to 0.1% (exact), and whether the text before it has
    equations, all of them true (reasoned)."""
    completion = completion[:_numbers.LONGEST_TEXT]
    value, correct = _numbers.answer(completion), float(question["answer"])
    answered = value is not None
    parts = {"answered": answered, "correct": answered and _numbers.close(value, correct, 0.05),
             "exact": answered and _numbers.close(value, correct, 1e-3),
             "reasoned": _numbers.all_true(completion.partition("<answer>")[0])}
    return float(parts["correct"]), parts
