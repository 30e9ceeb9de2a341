"""Science in small steps: the unit of a product or quotient, the atoms and the mass of molecules, motion, sums of two units, the calendar.

The argument is a level, 1 or 2 (default 1): 1 numbers mostly below 100; 2 larger numbers, units of three quantities, more atoms.

Two of ten worked examples carry a slip. Of the sums of two units most add the numbers without converting any."""
import re

from tasks import _answers, _equations, _numbers, _questions
from tasks._steps import Steps, completion, with_a_slip

INSTRUCTION = ("Work in short equations such as `3 * 2 = 6.`, for a unit those of the exponents of kg, m and s in turn, for a weekday the days "
               "counted (`Mon 1, Tue 2`). Then give the number, the weekday or the unit (`kg m^2 s^-1`) alone within <answer></answer>.")
BASES = ("kg", "m", "s")
QUANTITIES = {                       # exponents of the bases
    "mass": (1, 0, 0), "distance": (0, 1, 0), "time": (0, 0, 1), "area": (0, 2, 0), "volume": (0, 3, 0), "speed": (0, 1, -1),
    "frequency": (0, 0, -1), "acceleration": (0, 1, -2), "momentum": (1, 1, -1), "density": (1, -3, 0), "force": (1, 1, -2),
    "pressure": (1, -1, -2), "energy": (1, 2, -2), "power": (1, 2, -3),
}
SIGNS = {"times": "+", "over": "-"}  # what is done with exponents
MASSES = {"H": 1, "C": 12, "N": 14, "O": 16, "F": 19, "Na": 23, "Mg": 24, "Al": 27, "P": 31, "S": 32, "K": 39, "Ca": 40}
INORGANIC = ("NH3 N2H4 HNO3 N2O N2O4 N2O5 NO2 H2S H2SO4 SO2 SO3 H3PO4 PH3 P4O10 PF5 SF6 NF3 NaF Na2O Na3N Na3P NaNO3 Na2CO3 Na2SO4 Na3PO4 "
             "MgO MgF2 Mg3N2 MgCO3 MgSO4 Al2O3 AlF3 AlN Al2S3 AlPO4 K2O KF K3N KNO3 K2CO3 K2SO4 K3PO4 CaO CaF2 CaS Ca3N2 CaCO3 CaSO4 "
             "H2O H2O2 CO CO2 CS2 CF4 HF HCN").split()
LARGER = {("m", "cm"): 100, ("cm", "mm"): 10, ("hours", "minutes"): 60, ("minutes", "seconds"): 60, ("weeks", "days"): 7, ("days", "hours"): 24}
FORMULAS = ("v = a * t", "s = v * t", "v = u + a * t")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = {"January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31, "September": 30,
          "October": 31, "November": 30, "December": 31}
COUNTED = re.compile("(mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6} ([1-6])")
FACTOR = re.compile(r"(kg|m|s)(?:\^?\(?(-?[0-9]{1,2})\)?)?")
SUPERSCRIPTS = str.maketrans("²³⁴⁵⁻", "2345-")
LONGEST = 2000                       # characters of a completion that are read
WRONG = 0.2                          # share of the documents that carry a slip,
MISTAKEN = 0.65                      # and of the sums of two units that convert nothing


def check(argument):
    if argument not in (None, "1", "2"):
        raise ValueError(f"The argument of science is a level, 1 or 2, and {argument or 'nothing'} was given.")


def draw(rng, level=1):
    """Return (what is asked, the question): kind, and given, what the steps take. How it is phrased makes no other question."""
    kind = rng.choice(list(KINDS))
    given, phrasings = KINDS[kind][0](rng, level)
    question = {"question": rng.choice(phrasings), "kind": kind, "given": given}
    return f"{kind} {given}", question | {"answer": str(worked(question, Steps()))}


def worked(question, steps):
    """Write the steps and return the answer."""
    return KINDS[question["kind"]][1](steps, *question["given"])


# --- units ---

def draw_unit(rng, level):
    names = rng.sample(list(QUANTITIES), level + 1)
    words = rng.choices(list(SIGNS), k=level)
    text = names[0] + "".join(f" {word} {name}" for word, name in zip(words, names[1:]))
    return [names, words], (f"Which unit has {text}?", f"What is the unit of {text}?")


def unit(steps, names, words):
    """Write each quantity's exponents of kg, m and s, and their sums or differences."""
    vectors = []
    for name in names:
        vector = QUANTITIES[name]
        vectors.append(steps.choose(vector, [other for other in QUANTITIES.values() if other != vector]))
        steps.texts.append(f"{name} {' '.join(map(str, vectors[-1]))}{',' if len(vectors) < len(names) else '.'}")
    found = []
    for exponent, *others in zip(*vectors):
        for word, other in zip(words, others):
            exponent = steps.equation(exponent, SIGNS[word], other)
        found.append(exponent)
    return " ".join(base if n == 1 else f"{base}^{n}" for base, n in zip(BASES, found) if n) or "1"


def exponents(text):
    """Return {base: exponent} of a unit such as `kg m^2 s^-1` or `kg*m2/s`, or None of another text."""
    found = dict.fromkeys(BASES, 0)
    text = _numbers.normal(text.translate(SUPERSCRIPTS)).strip().removesuffix(".")
    for i, part in enumerate(text.split("/")):
        for token in part.replace("*", " ").split() or ["no unit"]:
            factor = FACTOR.fullmatch(token)
            if not factor and token != "1":
                return None
            if factor:
                found[factor[1]] += int(factor[2] or 1) * (-1 if i else 1)
    return found


# --- molecules ---

def draw_formula(rng, level):
    """Return a molecule, of carbon and hydrogen or from INORGANIC: [[element, number of atoms]]."""
    if rng.random() < 0.4:
        found = re.findall("([A-Z][a-z]?)([0-9]*)", rng.choice(INORGANIC))
        return [[element, int(count or 1)] for element, count in found]
    carbon = rng.randint(1, 6 * level)
    oxygen = rng.randint(0, 2 * level)
    return [["C", carbon], ["H", 2 * rng.randint(1, carbon + 1)], *[["O", oxygen]] * (oxygen > 0)]


def formula(atoms):
    return "".join(f"{element}{count if count > 1 else ''}" for element, count in atoms)


def draw_atoms(rng, level):
    atoms = draw_formula(rng, level)
    element, n = rng.choice(atoms)[0], rng.randint(2, 12 if level == 1 else 99)
    text = f"{n} {formula(atoms)}"
    return [atoms, element, n], (f"How many {element} atoms are in {text}?", f"How many atoms of {element} do {text} have?")


def atoms_of(steps, atoms, element, n):
    counts = dict(atoms)
    count = steps.choose(counts[element], [other for other in (*counts.values(), counts[element] + 1) if other != counts[element]])
    steps.texts.append(f"One has {count} {element}.")
    return steps.equation(n, "*", count)


def draw_mass(rng, level):
    atoms = draw_formula(rng, level)
    n = rng.choice((1, 1, 2, 3)) * rng.randint(1, 1 if level == 1 else 9)
    text = f"{n} mol of {formula(atoms)}"
    masses = ", ".join(f"{element} = {MASSES[element]}" for element, _ in atoms)
    return [atoms, n], (f"{masses}. What is the mass of {text}?", f"{masses}. How heavy is {text}?")


def mass(steps, atoms, n):
    first, *others = [steps.equation(count, "*", MASSES[element]) for element, count in atoms]
    for other in others:
        first = steps.equation(first, "+", other)
    return first if n == 1 else steps.equation(n, "*", first)


# --- motion and sums of two units ---

def draw_motion(rng, level):
    most = 12 if level == 1 else 60
    form, numbers = rng.choice(list(FORMULAS)), [rng.randint(2, most), rng.randint(2, most), rng.randint(1, 5 * most)]
    a, t, u = numbers
    if form == "s = v * t":
        return [form, numbers[:2]], (f"v = {a} m/s, t = {t} s. What is s?", f"How far is {t} s at {a} m/s?")
    if form == "v = a * t":
        return [form, numbers[:2]], (f"From rest, a = {a} m/s^2, t = {t} s. What is v?", f"From rest, how fast after {t} s at {a} m/s^2?")
    return [form, numbers], (f"u = {u} m/s, a = {a} m/s^2, t = {t} s. What is v?", f"From {u} m/s, how fast after {t} s at {a} m/s^2?")


def motion(steps, form, numbers):
    a, t, *start = numbers
    steps.texts.append(f"{steps.choose(form, [other for other in FORMULAS if other != form])}.")
    product = steps.equation(a, "*", t)
    return steps.add(product, start[0]) if start else product


def draw_sum(rng, level):
    large, small = rng.choice(list(LARGER))
    n, rest = rng.randint(1, 9 if level == 1 else 99), rng.randint(1, 99 if level == 1 else 999)
    return [n, large, rest, small], (f"How many {small} are {n} {large} + {rest} {small}?", f"How many {small} make {n} {large} and {rest} {small}?")


def sum_of(steps, n, large, rest, small):
    factor = steps.choose(LARGER[large, small], [other for other in set(LARGER.values()) if other != LARGER[large, small]])
    steps.texts.append(f"1 {large.removesuffix('s')} = {factor} {small}.")
    return steps.add(steps.equation(n, "*", factor), rest)


# --- the calendar ---

def draw_weekday(rng, level):
    day, n = rng.choice(DAYS), rng.randint(1, 60 if level == 1 else 999)
    return [day, n], (f"Which weekday is {n} days after {day}?", f"Today is {day}. Which weekday is it in {n} days?")


def weekday(steps, day, n):
    left = n
    if n >= 7:
        left = steps.choose(n % 7, [other for other in range(7) if other != n % 7])
        steps.texts.append(f"{n} - {n - n % 7} = {left}.")
    start = DAYS.index(day)
    start += steps.choose(0, [-1, 1])                    # the day itself is counted as the first, or the one after it is left out
    if left:
        steps.texts.append(", ".join(f"{DAYS[(start + i) % 7][:3]} {i}" for i in range(1, left + 1)) + ".")
    return DAYS[(start + left) % 7] if left else day


def draw_days(rng, level):
    """Draw two dates, between which no February ends, since years differ."""
    months = list(MONTHS)
    first = rng.randrange(12)
    last = first + rng.randint(0, 1 if level == 1 else 4)
    if last > 11 or first <= 1 < last:
        return draw_days(rng, level)
    days = [rng.randint(1, MONTHS[months[i]]) for i in (first, last)]
    if first == last and days[0] >= days[1]:
        return draw_days(rng, level)
    dates = [f"{day} {months[i]}" for day, i in zip(days, (first, last))]
    return [days, months[first:last + 1]], (f"How many days from {dates[0]} to {dates[1]}?", f"{dates[1]} is how many days after {dates[0]}?")


def days_between(steps, days, months):
    if len(months) == 1:
        return steps.equation(days[1], "-", days[0])
    found = 0
    for i, month in enumerate(months[:-1]):
        length = steps.choose(MONTHS[month], [61 - MONTHS[month], 29])
        steps.texts.append(f"{month} has {length}.")
        found = steps.equation(found, "+", length) if i else steps.equation(length, "-", days[0])
    return steps.equation(found, "+", days[1])


KINDS = {
    "unit": (draw_unit, unit), "atoms": (draw_atoms, atoms_of), "mass": (draw_mass, mass), "motion": (draw_motion, motion),
    "sum": (draw_sum, sum_of), "weekday": (draw_weekday, weekday), "days": (draw_days, days_between),
}


# --- what every task has ---

def solution(question):
    steps = Steps()
    return completion(steps, worked(question, steps))


def wrong_solution(question, rng):
    if question["kind"] != "sum":
        return completion(*with_a_slip(worked, question, rng))
    steps = Steps()
    n, _, rest, _ = question["given"]
    return completion(steps, steps.equation(n, "+", rest))


def share_wrong(question):
    return MISTAKEN if question["kind"] == "sum" else WRONG


def questions(split, seed=0, n=None, argument=None):
    return _questions.distinct(lambda rng: draw(rng, int(argument or 1)), split, seed, n)


def documents(split, seed=0, argument=None):
    return _questions.with_mistakes(lambda rng: draw(rng, int(argument or 1)), solution, wrong_solution, share_wrong, split, seed)


def reward(question, completion):
    """Return (score, parts): whether there is an answer (answered), whether it is the right one (correct), and whether what stands
    before it has the steps that lead there, and no false equation (reasoned)."""
    completion = completion[:LONGEST]
    if question.get("kind") not in ("unit", "weekday"):
        return _answers.grade(question, completion)
    found = _answers.ANSWER.search(completion)
    text = found[1] if found else ""
    if question["kind"] == "unit":
        value, right = exponents(text), exponents(question["answer"])
    else:
        value, right = " ".join(text.split()).removesuffix(".").casefold() or None, question["answer"].casefold()
    parts = {"answered": value is not None, "correct": value == right,
             "reasoned": reasoned(question, _answers.before_answer(completion))}
    return float(parts["correct"]), parts


def reasoned(question, text):
    """Return whether a text has the equations of the solution, and no false one, and the weekdays that it counts, with their numbers."""
    steps = Steps()
    worked(question, steps)
    found = list(_equations.read(text))
    needed = {e.spelled for e in _equations.read(str(steps))}
    counted = set(COUNTED.findall(text.casefold()))
    return all(e.true for e in found) and needed <= {e.spelled for e in found} and counted >= set(COUNTED.findall(str(steps).casefold()))
