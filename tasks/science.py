"""Science in small steps: the unit of a product or quotient, atoms in molecules, motion, sums of two units,
calendar.

The argument is a level, 0 to 2 (default 1): 0 four kinds and small numbers, for a model of a million
parameters that trains for minutes; 1 numbers mostly below 100; 2 larger numbers, and units of three
quantities.

Two in ten documents have a slip. Most sums of two units add the numbers without converting."""
import re

from tasks import _answers, _equations, _numbers, _questions, _steps
from tasks._steps import Steps, plain

INSTRUCTION = ("Work in short equations such as `3 * 2 = 6.`; for a unit add or subtract the exponents of "
               "kg, m and s in turn (`1 + 0 = 1.`), for a weekday count the days (`Mon 1, Tue 2`). Then "
               "give the number, the weekday or the unit (`kg m^2 s^-1`) alone within <answer></answer>.")
TINY = ("atoms", "motion", "sum", "weekday")         # kinds of level 0
BASES = ("kg", "m", "s")
UNITLESS = ("dimensionless", "unitless", "none", "no unit", "no units")
QUANTITIES = {                       # exponents of the bases
    "mass": (1, 0, 0), "distance": (0, 1, 0), "time": (0, 0, 1), "area": (0, 2, 0), "volume": (0, 3, 0),
    "speed": (0, 1, -1), "frequency": (0, 0, -1), "acceleration": (0, 1, -2), "momentum": (1, 1, -1),
    "density": (1, -3, 0), "force": (1, 1, -2), "pressure": (1, -1, -2), "energy": (1, 2, -2),
    "power": (1, 2, -3),
}
SIGNS = {"times": "+", "over": "-"}  # operation on exponents
FACTOR = re.compile(r"(kg|m|s)(?:\^?(\()?(-?[0-9]{1,2})(?(2)\)))?")
INORGANIC = ("H2O H2O2 NH3 N2H4 HNO3 N2O5 H2S H2SO4 SO3 H3PO4 P4O10 PF5 SF6 Na2O Na2CO3 Na2SO4 Na3PO4 Mg3N2 "
             "MgSO4 Al2O3 Al2S3 AlPO4 K3N KNO3 K2CO3 K3PO4 CaF2 Ca3N2 CaCO3 CO2 CS2 CF4").split()
ELEMENTS = {"C", "H", "O", *re.findall("[A-Z][a-z]?", " ".join(INORGANIC))}
FORMULAS = ("v = a * t", "s = v * t", "v = u + a * t")
LARGER = {("m", "cm"): 100, ("cm", "mm"): 10, ("hours", "minutes"): 60, ("minutes", "seconds"): 60,
          ("weeks", "days"): 7, ("days", "hours"): 24}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COUNTED = re.compile(r"\b(mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6} ([0-9]+)")
MONTHS = {"January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31,
          "August": 31, "September": 30, "October": 31, "November": 30, "December": 31}
VECTOR = re.compile(rf"\b({'|'.join(QUANTITIES)})[\s,:=(]+((?:-?[0-9]+[\s,]*)+)")
ATOMS = re.compile(r"\b((?i:one|each|every|per)\b[^.\n]*?)?\b([0-9]+) ([A-Z][a-z]?)\b")
LENGTH = re.compile(rf"\b({'|'.join(MONTHS)}) has ([0-9]+)")
LONGEST = 500                        # maximum characters of steps; worked ones have up to 220


def draw(rng, level=1):
    """Return (key, question). The key ignores the phrasing; given: arguments of the steps."""
    kind = rng.choice(list(KINDS) if level else TINY)
    given, phrasings = KINDS[kind][0](rng, level)
    question = {"question": rng.choice(phrasings), "kind": kind, "given": given}
    return f"{kind} {given}", question | {"answer": str(worked(question, Steps()))}


def worked(question, steps, converts=True):
    """Write the steps and return the answer. converts: False adds the numbers of a sum as they are given."""
    if not converts:
        n, _, rest, _ = question["given"]
        return steps.equation(n, "+", rest)
    return KINDS[question["kind"]][1](steps, *question["given"])


# For each kind, draw_KIND(rng, level) returns (arguments of the steps, phrasings), and KIND writes the steps.

def draw_unit(rng, level):
    names = rng.sample(list(QUANTITIES), level + 1)
    words = rng.choices(list(SIGNS), k=level)
    # Sorted, because another order is the same question, and `over` before `times` is ambiguous.
    words.sort(reverse=True)
    multiplied = 1 + words.count("times")
    names = sorted(names[:multiplied]) + sorted(names[multiplied:])
    text = names[0] + "".join(f" {word} {name}" for word, name in zip(words, names[1:]))
    return [names, words], (f"Which unit has {text}?", f"What is the unit of {text}?")


def unit(steps, names, words):
    vectors = [steps.choose(QUANTITIES[name], list(QUANTITIES.values())) for name in names]
    listed = [f"{name} {' '.join(map(str, vector))}" for name, vector in zip(names, vectors)]
    steps.texts.append(f"{', '.join(listed)}.")
    found = []
    for exponent, *others in zip(*vectors):
        for word, other in zip(words, others):
            exponent = steps.equation(exponent, SIGNS[word], other)
        found.append(exponent)
    return " ".join(base if n == 1 else f"{base}^{n}" for base, n in zip(BASES, found) if n) or "1"


def exponents(text):
    """Return {base: exponent} of a unit such as `kg m^2 s^-1` or `kg*m2/s`, None for other texts."""
    found = dict.fromkeys(BASES, 0)
    text = _numbers.unwrapped(text).replace(r"\,", " ").translate(_numbers.SUPERSCRIPTS)
    text = _numbers.normal(text)
    text = text.strip().removesuffix(".")
    text = "1" if text.lower() in UNITLESS else text
    text = text[1:-1] if text.startswith("((") and text.endswith("))") else text         # of \frac
    for i, part in enumerate(text.split("/")):
        part = part.strip()
        part = part[1:-1] if part.startswith("(") and part.endswith(")") else part
        for token in part.replace("*", " ").split() or ["nothing"]:
            factor = FACTOR.fullmatch(token)
            if not factor and token != "1":
                return None
            if factor:
                found[factor[1]] += int(factor[3] or 1) * (-1 if i else 1)
    return found


def draw_atoms(rng, level):
    """Draw a molecule of carbon, hydrogen and perhaps oxygen, or one of INORGANIC."""
    carbon = rng.randint(1, 6 * level or 4)
    oxygen = rng.randint(0, 3 * level)
    counts = {"C": carbon, "H": 2 * rng.randint(1, carbon + 1), **({"O": oxygen} if oxygen else {})}
    formula = "".join(f"{element}{count if count > 1 else ''}" for element, count in counts.items())
    if rng.random() < 0.4:
        formula = rng.choice(INORGANIC)
        counts = {element: int(count or 1) for element, count in re.findall("([A-Z][a-z]?)([0-9]*)", formula)}
    element = rng.choice(list(counts))
    n = rng.randint(2, (9, 12, 99)[level])
    return [formula, counts, element, n], (f"How many {element} atoms are in {n} {formula}?",
                                           f"How many atoms of {element} do {n} {formula} have?")


def atoms(steps, formula, counts, element, n):
    count = steps.choose(counts[element], [*counts.values(), counts[element] + 1])
    steps.texts.append(f"One has {count} {element}.")
    return steps.equation(n, "*", count)


def draw_motion(rng, level):
    most = (9, 12, 60)[level]
    a = rng.randint(2, most)
    t = rng.randint(2, most)
    u = rng.randint(1, 5 * most)
    form = rng.choice(FORMULAS)
    if form == "s = v * t":
        return [form, a, t], (f"v = {a} m/s, t = {t} s. What is s?", f"How far is {t} s at {a} m/s?")
    if form == "v = a * t":
        return [form, a, t], (f"From rest, a = {a} m/s^2, t = {t} s. What is v?",
                              f"From rest, how fast after {t} s at {a} m/s^2?")
    return [form, a, t, u], (f"u = {u} m/s, a = {a} m/s^2, t = {t} s. What is v?",
                             f"From {u} m/s, how fast after {t} s at {a} m/s^2?")


def motion(steps, form, a, t, u=0):
    steps.texts.append(f"{form}.")
    return steps.add(steps.equation(a, "*", t), u)


def draw_sum(rng, level):
    large, small = rng.choice(list(LARGER))
    n = rng.randint(1, 10 ** max(level, 1) - 1)
    rest = rng.randint(1, 10 ** (level + 1) - 1)
    return [n, large, rest, small], (f"How many {small} are {n} {large} + {rest} {small}?",
                                     f"How many {small} make {n} {large} and {rest} {small}?")


def sum_of(steps, n, large, rest, small):
    factor = steps.choose(LARGER[large, small], sorted(LARGER.values()))
    steps.texts.append(f"1 {large.removesuffix('s')} = {factor} {small}.")
    return steps.add(steps.equation(n, "*", factor), rest)


def draw_weekday(rng, level):
    day = rng.choice(DAYS)
    n = rng.randint(1, (20, 60, 999)[level])
    return [day, n], (f"Which weekday is {n} days after {day}?",
                      f"Today is {day}. Which weekday is it in {n} days?")


def weekday(steps, day, n):
    left = steps.choose(n % 7, range(7))
    if n >= 7:
        steps.texts.append(f"{n} - {n - n % 7} = {left}.")
    start = DAYS.index(day) + steps.choose(0, [-1, 1])   # slip: off by one day
    if left:
        steps.texts.append(", ".join(f"{DAYS[(start + i) % 7][:3]} {i}" for i in range(1, left + 1)) + ".")
    return DAYS[(start + left) % 7] if left else day


def draw_days(rng, level):
    """Draw two dates of a year without the end of February between them, because it may be a leap year."""
    first = rng.randrange(12)
    last = first + rng.randint(0, 1 if level == 1 else 3)
    if last > 11 or first <= 1 < last:
        return draw_days(rng, level)
    months = list(MONTHS)[first:last + 1]
    days = [rng.randint(1, MONTHS[months[i]]) for i in (0, -1)]
    if first == last and days[0] >= days[1]:
        return draw_days(rng, level)
    dates = [f"{days[i]} {months[i]}" for i in (0, -1)]
    return [days, months], (f"How many days from {dates[0]} to {dates[1]}?",
                            f"{dates[1]} is how many days after {dates[0]}?")


def days_between(steps, days, months):
    if len(months) == 1:
        return steps.equation(days[1], "-", days[0])
    found = None
    for month in months[:-1]:
        length = steps.choose(MONTHS[month], (29, 30, 31))
        steps.texts.append(f"{month} has {length}.")
        found = steps.equation(length, "-", days[0]) if found is None else steps.equation(found, "+", length)
    return steps.equation(found, "+", days[1])


KINDS = {"unit": (draw_unit, unit), "atoms": (draw_atoms, atoms), "motion": (draw_motion, motion),
         "sum": (draw_sum, sum_of), "weekday": (draw_weekday, weekday), "days": (draw_days, days_between)}


# --- the task ---

def invites_mistake(question):
    return question["kind"] == "sum"


solution, wrong_solution = _steps.completions(worked, invites_mistake, False)
check, questions, documents = _questions.with_levels(
    "science", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts). The parts are answered, correct, and reasoned: the text before the answer has
    the steps of the solution, and no false equation or fact."""
    completion = completion[:_numbers.LONGEST_TEXT]
    text = _answers.before_answer(completion)
    if question.get("kind") in ("unit", "weekday"):
        if question["kind"] == "unit":
            found = _answers.ANSWER.search(completion)
            value = exponents(found[1]) if found else None
            right = exponents(question["answer"])
        else:
            value = _answers.words(completion)
            right = plain(question["answer"])
        is_reasoned = len(text) <= LONGEST and reasoned(question, text)
    else:
        if question.get("kind") == "atoms" and "given" in question:          # C, F and K are also units
            symbol = rf"((?i:<answer ?>)[\s\d,.]*\d) ?{question['given'][2]}(?=\s*</)"
            completion = re.sub(symbol, r"\1", completion)
        value = _answers.answer(completion, _answers.asked_unit(question))
        right = int(question["answer"])
        is_reasoned = len(text) <= LONGEST and _answers.reasoned(question, completion, value)
    parts = {"answered": value not in (None, ""), "correct": value == right,
             "reasoned": is_reasoned and all(facts(question, text))}
    return float(parts["correct"]), parts


def reasoned(question, text):
    """Return whether a text has the equations and counted weekdays of the solution, and no false equation.
    For a unit the equations must be exactly these, in order, since a list of all sums of exponents would
    contain them."""
    right = solution(question)
    found = list(_equations.read(text))
    spelled, needed = ([e.spelled for e in equations] for equations in (found, _equations.read(right)))
    days, needed_days = (set(COUNTED.findall(t.casefold())) for t in (text, right))
    if question["kind"] == "unit" and spelled != needed:
        return False
    return all(e.true for e in found) and set(needed) <= set(spelled) and needed_days <= days


def facts(question, text):
    """Yield whether each fact in a text that is not an equation is true."""
    kind = question.get("kind")
    given = question.get("given")
    if kind == "unit":
        for name, numbers in VECTOR.findall(text):
            yield tuple(map(int, re.findall("-?[0-9]+", numbers))) == QUANTITIES[name]
    elif kind == "atoms":
        _, counts, _, n = given
        for of_one, count, element in ATOMS.findall(text):
            in_one = counts.get(element, 0)
            yield (element not in ELEMENTS or int(count) == in_one
                   or not of_one and int(count) == n * in_one)
    elif kind == "motion":
        form, a, t, *u = given
        values = {form[0]: question["answer"], form[4]: a, "t": t} | ({"u": u[0], "a": a} if u else {})
        for formula in re.findall(r"[^0-9.\n]*[=<>≤≥≠][^0-9.\n]*", text):
            formula = re.sub(r"(?<=[av])(?=t\b)", " * ", formula.strip(" ="))
            formula = re.sub(r"\b[a-z]\b", lambda m: str(values.get(m[0], m[0])), formula)
            yield all(e.true for e in _equations.read(formula))
    elif kind == "weekday":
        for day, n in COUNTED.findall(text.casefold()):
            yield DAYS[(DAYS.index(given[0]) + int(n)) % 7][:3].casefold() == day
    elif kind == "days":
        for month, length in LENGTH.findall(text):
            yield MONTHS[month] == int(length)
