"""Logic puzzles with short reasoning steps: truth of a formula, order of people, rules with a definite or an
unknown conclusion, knights and knaves, the odd one out. The argument is a level: 0 four kinds and three
people; 1 (default); 2 more letters, people, rules and things.

About three in ten documents are wrong, by a slip in a step. Most documents of kind "unknown" have the same
fallacy: every wug is a dax, so a dax is a wug."""
import re

from tasks import _answers, _numbers, _questions, _steps

INSTRUCTION = ("Reason in short steps, each a sentence such as `true or false = true`, `Ann > Bob` or "
               "`wug -> dax`. Then give the answer, one word, within <answer></answer>.")
NAMES = ("Ann", "Bob", "Cy", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jo", "Kim", "Leo")
LETTERS = "ABCDEFGHJKLM"
NONSENSE = ("wug", "dax", "fep", "zib", "lom", "tov", "kiv", "nup", "rab", "sot", "gim", "hud")
THINGS = ("cup", "hat", "pen", "box", "jar", "fan", "key", "map", "toy", "bag")
RELATIONS = (("older", "younger", "oldest", "youngest"), ("taller", "shorter", "tallest", "shortest"),
             ("faster", "slower", "fastest", "slowest"))
SAYINGS = {                       # {saying: its truth}; i, you: whether the speaker and the other are knights
    "{} is a knave": lambda i, you: not you, "{} is a knight": lambda i, you: you,
    "we are both knaves": lambda i, you: not i and not you, "we are both knights": lambda i, you: i and you,
    "we are alike": lambda i, you: i == you, "we differ": lambda i, you: i != you,
}
COLOURS = ("red", "blue", "green", "pink")
CASES = ((True, True), (True, False), (False, True), (False, False))
HEADING = re.compile(r"^[ \t]*(?:Reasoning|Answer):", re.IGNORECASE | re.MULTILINE)
# A sentence with a sign, or with only sizes or colours, is a step.
CLAIM = re.compile(rf"[=<>:]|^(?:(?:big|small|{'|'.join(COLOURS)})(?: |$)){{2,}}$")
TINY = ("truth", "order", "rules", "unknown")        # kinds of level 0


# Each kind has two functions. draw_KIND(rng, level) returns the question's text, a key that ignores the
# wording, and the givens as JSON values. KIND(given, rng) returns steps and answer, with a mistake if rng is
# given.

def draw_truth(rng, level):
    """Draw a formula of [negated, letter, operator before it], evaluated from the left."""
    least = max(level, 1)
    letters = rng.sample(LETTERS, rng.randint(least + 1, level + 2))
    negated = rng.choices(letters, k=least)
    terms = [[letter in negated, letter, rng.choice(("and", "or"))] for letter in letters]
    values = {letter: rng.random() < 0.5 for letter in sorted(letters)}
    formula = ""
    for i, (negation, letter, operator) in enumerate(terms):
        formula = f"({formula})" if i > 1 else formula
        formula += f" {operator} " * (i > 0) + "not " * negation + letter
    facts = ", ".join(f"{letter} is {spelled(value)}" for letter, value in values.items())
    wording = rng.choice(("{}. Is {} true?", "Given {}: is {} true?"))
    return wording.format(facts, formula), [facts, formula], [values, terms]


def truth(given, rng=None):
    values, terms = given
    steps = []
    wrong = rng.randrange(2 * len(terms)) if rng else None
    for i, (negation, letter, operator) in enumerate(terms):
        value = values[letter]
        if negation:
            value = (not value) != (len(steps) == wrong)
            steps.append(f"not {spelled(values[letter])} = {spelled(value)}")
        if i == 0:
            total = value
            continue
        result = (total and value if operator == "and" else total or value) != (len(steps) == wrong)
        steps.append(f"{spelled(total)} {operator} {spelled(value)} = {spelled(result)}")
        total = result
    return steps, "yes" if total else "no"


def spelled(value):
    return "true" if value else "false"


def draw_order(rng, level):
    """Draw people from most to least, facts that imply this order, and the end that is asked for."""
    people = rng.sample(NAMES, rng.randint(2 * level + 1, 2 * level + 2) if level else 3)
    facts = rng.sample([[*pair] for pair in zip(people, people[1:])], len(people) - 1)
    more, less, *ends = rng.choice(RELATIONS)
    end = rng.choice((0, -1))
    sentences = [rng.choice((f"{a} is {more} than {b}.", f"{b} is {less} than {a}.")) for a, b in facts]
    return f"{' '.join(sentences)} Who is {ends[end]}?", [people, end], [people, facts, end]


def order(given, rng=None):
    people, facts, end = given
    people = list(people)
    if rng and rng.random() < 0.5:                   # the other end
        end = -1 - end
    elif rng:                                        # two people swapped
        near = 1 if end == 0 else -2
        people[end], people[near] = people[near], people[end]
    return [f"{a} > {b}" for a, b in facts] + [" > ".join(people)], people[end]


def draw_rules(rng, level):
    """Draw a chain of rules, the last perhaps negative, and a question that they answer."""
    words = rng.sample(NONSENSE, max(level, 1) + 2)
    rules = [[*pair] for pair in zip(words, words[1:])]
    if rng.random() < 0.5:
        rules[-1][1] = f"not {words[-1]}"
    return asked_of(rng, rules, words[0], words[-1])


def draw_unknown(rng, level):
    """Draw rules that leave the question open: a chain backwards, or a shared property."""
    words = rng.sample(NONSENSE, max(level, 1) + 2)
    rules = [[*pair] for pair in zip(words, words[1:])]
    if rng.random() < 0.5:
        return asked_of(rng, rules, words[-1], words[0])
    rules[-1].reverse()
    return asked_of(rng, rules, *rng.sample((words[0], words[-1]), 2))


def asked_of(rng, rules, start, end):
    shown = rng.sample(rules, len(rules))
    sentences = [f"No {a} is a {b[4:]}." if b.startswith("not ") else f"Every {a} is a {b}."
                 for a, b in shown]
    wording = rng.choice(("{} Is a {} a {}: yes, no or unknown?", "{} Is every {} a {}, yes, no or unknown?"))
    text = wording.format(" ".join(sentences), start, end)
    return text, [sorted(rules), start, end], [rules, shown, start, end]


def rules(given, rng=None):
    chain, shown, start, end = given
    found = [b for _, b in chain]
    if rng:
        found[-1] = rng.choice((end, f"not {end}", "unknown"))
    answer = {end: "yes", f"not {end}": "no"}.get(found[-1], "unknown")
    return [f"{a} -> {b}" for a, b in shown] + [f"{start} -> {b}" for b in found[1:]], answer


def unknown(given, rng=None):
    _, shown, start, end = given
    to, answer = (end, "yes") if rng else ("unknown", "unknown")
    return [f"{a} -> {b}" for a, b in shown] + [f"{start} -> {to}"], answer


def draw_knights(rng, level):
    """Draw two knights (truthful) or knaves (lying), with sayings that fit exactly one case."""
    while True:
        people = rng.sample(NAMES, 2)
        said = rng.choices(list(SAYINGS), k=2)
        if sum(case == truth_of(case, said) for case in CASES) == 1:
            break
    a, b = people
    wording = rng.choice(("{} says: {}. {} says: {}. Who is a knight (or both, neither)?",
                          "{}: {}. {}: {}. Name the knight (or both, neither)."))
    text = wording.format(a, said[0].format(b), b, said[1].format(a))
    return f"{a} and {b} are knights or knaves. {text}", sorted(zip(people, said)), [people, said]


def truth_of(case, said):
    """Return the truth of both sayings, assuming the case."""
    return SAYINGS[said[0]](*case), SAYINGS[said[1]](*case[::-1])


def knights(given, rng=None):
    """Try each case until the truth of the sayings agrees with it."""
    (a, b), said = given
    chosen = rng.choice(CASES) if rng else None
    steps = []
    for case in CASES:
        found = truth_of(case, said)
        if rng and (case == found) != (case == chosen):          # misjudged
            found = case if case == chosen else (not case[0], case[1])
        steps.append(f"{letters(case)}: {letters(found)} {'yes' if case == found else 'no'}")
        if case == found:
            return steps, {"TT": "both", "TF": a, "FT": b, "FF": "neither"}[letters(case)]


def letters(case):
    return "".join("T" if value else "F" for value in case)


def draw_odd(rng, level):
    """Draw things with a size and a colour: one property halves them, the other singles out one thing."""
    half = level + 1
    things = rng.sample(THINGS, 2 * half)
    pairs = [["big", "small"], rng.sample(COLOURS, 2)]
    which = rng.randrange(2)
    rows = []
    for i, pair in enumerate(pairs):
        count = 1 if i == which else half
        a, b = rng.sample(pair, 2)
        rows.append(rng.sample([a] * count + [b] * (2 * half - count), 2 * half))
    listed = [" ".join(item) for item in zip(*rows, things)]
    wording = rng.choice(("Which is the odd one out: {}?", "Find the odd one out: {}."))
    return wording.format(", ".join(listed)), sorted(listed), [rows, which, things]


def odd(given, rng=None):
    rows, which, things = given
    rows = [list(row) for row in rows]
    row = rows[which]
    if rng:                                          # values assigned in another order
        rng.shuffle(row)
    (value,) = (value for value in row if row.count(value) == 1)
    thing = things[row.index(value)]
    return [" ".join(row) for row in rows] + [f"{value}: {thing}"], thing


KINDS = {"truth": (draw_truth, truth), "order": (draw_order, order), "rules": (draw_rules, rules),
         "unknown": (draw_unknown, unknown), "knights": (draw_knights, knights), "odd": (draw_odd, odd)}


# --- the task ---

def draw(rng, level):
    """Return (key, question)."""
    kind = rng.choice(list(KINDS) if level else TINY)
    draw_kind, work_out = KINDS[kind]
    text, key, given = draw_kind(rng, level)
    return f"{kind} {key}", {"question": text, "answer": work_out(given)[1], "kind": kind, "given": given}


def solve(question, rng=None):
    """Return (steps, answer) of a question, with a mistake if there is an rng."""
    return KINDS[question["kind"]][1](question["given"], rng)


def solution(question):
    steps, answer = solve(question)
    return _steps.completion(f"{'. '.join(steps)}.", answer)


def invites_mistake(question):
    return question["kind"] == "unknown"


def wrong_solution(question, rng):
    """Return a worked completion with a mistake that makes the answer wrong."""
    while True:
        steps, answer = solve(question, rng)
        if answer != question["answer"]:
            return _steps.completion(f"{'. '.join(steps)}.", answer)


check, questions, documents = _questions.with_levels("logic", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts). The parts are answered, correct, and reasoned: exactly the steps of the solution
    precede the answer, in any order."""
    completion = completion[:_numbers.LONGEST_TEXT]
    answer = _answers.words(completion)
    if question.get("kind") == "truth":      # Is A or B true?
        answer = {"true": "yes", "false": "no"}.get(answer, answer)
    steps = {plain(step) for step in solve(question)[0]}
    reasoning = HEADING.sub("", _answers.before_answer(completion))
    written = {plain(text) for text in re.split(r"[.\n]", reasoning)}
    parts = {"answered": bool(answer), "correct": answer == plain(question["answer"]),
             "reasoned": steps <= written and not any(CLAIM.search(text) for text in written - steps)}
    return float(parts["correct"]), parts


def plain(text):
    """Return a text without differences of case, spaces and a final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()
