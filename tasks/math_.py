"""Mathematics: equations, percentages, means, rectangles, sequences and short stories, worked one operation a
step. The argument is a level: 0 four kinds and smaller numbers, for a model of a million parameters that
trains for minutes; 1 (default) most numbers below 100; 2 larger.

About three in ten documents are wrong, by a slip in a step. Most documents with percentages have the same
mistake: 30% off 80 is computed as 80 - 30."""
import re

from tasks import _answers, _questions, _steps
from tasks._numbers import digits

INSTRUCTION = ("Work it out in short true equations, such as 23 + 40 = 63. Then give the number alone within "
               "<answer></answer>.")
TINY = ("equation", "percent", "rectangle", "sequence")         # kinds of level 0, with their first two forms
UNORDERED = ("mean", "rectangle")    # kinds in which the order of the numbers does not matter


class Work(_steps.Steps):
    """Writes each operation as an equation; a slip makes its result wrong, or skips it."""

    def step(self, a, sign, b):
        result = a // b if sign == "/" else {"+": a + b, "-": a - b, "*": a * b}[sign]
        if self.slips():
            result = self.rng.choice((result + 1, result - 1, result + 10, result - 10, None))
            if result is None:
                return a
        self.texts.append(f"{a} {sign} {b} = {result}.")
        return result

    def plus(self, a, b, sign="+"):
        for part in digits(b):
            a = self.step(a, sign, part)
        return a

    def minus(self, a, b):
        return self.plus(a, b, "-")

    def times(self, a, b):
        """Return the product with a single-digit number b."""
        total, *products = [self.step(part, "*", b) for part in digits(a)]
        for product in products:
            total = self.plus(total, product)
        return total

    def over(self, a, b):
        """Return the quotient by long division."""
        parts = []
        for part in digits(a // b)[:-1]:
            parts.append(part)
            a = self.minus(a, self.step(b, "*", part))
        quotient = self.step(a, "/", b)
        for part in reversed(parts):
            quotient = self.step(part, "+", quotient)
        return quotient


def mean(work, a, b, c):
    total = work.plus(work.plus(a, b), c)
    return work.step(total, "/", 3) if total < 200 else work.over(total, 3)


# {kind: forms}. A form has wordings, ranges of drawn numbers (bounds above 9 are ten times larger at level
# 2), a function from these to the question's numbers, and a function of a Work and the numbers that returns
# the answer.
KINDS = {
    "equation": (
        (("Solve x + {} = {}.", "Find x: x + {} = {}."), ((2, 49), (2, 49)), lambda a, x: (a, a + x),
         lambda work, a, c: work.minus(c, a)),
        (("Solve x - {} = {}.", "Find x: x - {} = {}."), ((2, 49), (2, 49)), lambda a, c: (a, c),
         lambda work, a, c: work.plus(c, a)),
        (("Solve {} * x = {}.", "Find x: {} * x = {}."), ((2, 9), (2, 19)), lambda a, x: (a, a * x),
         lambda work, a, c: work.over(c, a)),
        (("Solve {} * x + {} = {}.", "Find x: {} * x + {} = {}."), ((2, 9), (2, 9), (2, 49)),
         lambda a, x, b: (a, b, a * x + b), lambda work, a, b, c: work.over(work.minus(c, b), a))),
    "percent": (                         # never of 100, where the common mistake is right
        (("A price of {} falls by {}%. What is it then?", "How much is {} less {}%?"), ((6, 19), (1, 5)),
         lambda n, p: (10 * n + 10 * (n > 9), 10 * p),
         lambda work, n, p: work.minus(n, work.step(work.step(n, "/", 10), "*", p // 10))),
        (("A price of {} rises by {}%. What is it then?", "How much is {} plus {}%?"), ((6, 19), (1, 5)),
         lambda n, p: (10 * n + 10 * (n > 9), 10 * p),
         lambda work, n, p: work.plus(n, work.step(work.step(n, "/", 10), "*", p // 10)))),
    "mean": (
        (("What is the mean of {}, {} and {}?", "Find the average of {}, {} and {}."),
         ((2, 33), (2, 33), (4, 33)), lambda a, b, c: (a, b, c - (a + b + c) % 3), mean),),
    "rectangle": (
        (("A rectangle is {} long and {} wide. What is its perimeter?",
          "Find the perimeter of a rectangle {} by {}."),
         ((3, 49), (3, 49)), lambda a, b: (a, b), lambda work, a, b: work.step(work.plus(a, b), "*", 2)),
        (("A rectangle is {} long and {} wide. What is its area?", "Find the area of a rectangle {} by {}."),
         ((11, 49), (2, 9)), lambda a, b: (a, b), lambda work, a, b: work.times(a, b))),
    "sequence": (
        (("What comes next: {}, {}, {}, {}?", "Continue {}, {}, {}, {}."), ((1, 79), (2, 15)),
         lambda a, step: (a, a + step, a + 2 * step, a + 3 * step),
         lambda work, a, b, c, d: work.plus(d, work.minus(b, a))),
        (("What comes next: {}, {}, {}, {}?", "Continue {}, {}, {}, {}."), ((1, 79), (2, 15)),
         lambda a, step: (a + 4 * step, a + 3 * step, a + 2 * step, a + step),
         lambda work, a, b, c, d: work.minus(d, work.minus(a, b)))),
    "story": (
        (("Ann has {} pens and buys {} bags of {}. How many pens has she now?",), ((10, 99), (2, 9), (2, 9)),
         lambda n, bags, each: (n, bags, each),
         lambda work, n, bags, each: work.plus(n, work.times(each, bags))),
        (("Bob has {} coins and buys {} cakes for {} each. How many coins are left?",),
         ((2, 40), (2, 9), (2, 9)), lambda n, cakes, each: (n + cakes * each, cakes, each),
         lambda work, n, cakes, each: work.minus(n, work.times(each, cakes))),
        (("Eve puts {} eggs into boxes of {}. How many eggs are left over?",), ((2, 9), (3, 9), (1, 8)),
         lambda boxes, each, rest: (boxes * each + rest % each, each),
         lambda work, n, each: work.minus(n, work.times(each, n // each)))),
}


# --- the task ---

def draw(rng, level):
    """Return (key, question). The key ignores the wording, and order for UNORDERED kinds."""
    kind = rng.choice(list(KINDS) if level else TINY)
    form = rng.randrange(len(KINDS[kind]) if level else 2)
    wordings, ranges, shown, _ = KINDS[kind][form]
    numbers = list(shown(*(rng.randint(low, largest(high, level)) for low, high in ranges)))
    text = rng.choice(wordings).format(*numbers)
    question = {"question": text, "kind": kind, "form": form, "numbers": numbers}
    key = f"{kind} {form} {sorted(numbers) if kind in UNORDERED else numbers}"
    return key, question | {"answer": str(solve(question, Work()))}


def largest(high, level):
    """Return the upper bound of a range at a level."""
    if level == 0:
        return high // 2 if high > 20 else high
    return high * 10 ** (level - 1) if high > 9 else high


def solve(question, work):
    """Write the steps to a Work and return the result."""
    return KINDS[question["kind"]][question["form"]][-1](work, *question["numbers"])


def solution(question):
    work = Work()
    result = solve(question, work)
    return _steps.completion(work, result)


def invites_mistake(question):
    return question["kind"] == "percent"


def wrong_solution(question, rng):
    """Return a worked completion with a mistake that makes the answer wrong."""
    right = Work()
    solve(question, right)
    while True:
        work = Work(rng.randrange(right.taken), rng)
        if invites_mistake(question):                # the percentage is taken for an amount
            work = Work()
            n, percent = question["numbers"]
            result = work.step(n, "-+"[question["form"]], percent)
        else:
            result = solve(question, work)
        if work.texts and 0 <= result != int(question["answer"]):
            return _steps.completion(work, result)


check, questions, documents = _questions.with_levels("math", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts), see _answers.grade. All questions ask for an amount: 42% is none."""
    found = _answers.find(completion)
    if found and re.search("(?i)%|percent", found[1]):
        return 0.0, dict.fromkeys(("answered", "correct", "reasoned"), False)
    return _answers.grade(question, completion)
