"""The steps of a worked completion, one of which may go wrong: what follows it then follows from it."""
import re

from tasks import _numbers

END = re.compile(r"\.(?![0-9])|\n|\b(?:reasoning|answer):", re.IGNORECASE)     # of a sentence
NUMBERED = re.compile("[0-9=]")      # a sentence with one of these is a step
POINT = re.compile("[0-9]{1,2}")     # what precedes a point of a list: `1. pop ab.`


class Steps:
    """Steps in their order. wrong: the index of the one that goes wrong, by the draws of rng; None: none does."""

    def __init__(self, wrong=None, rng=None):
        self.wrong = wrong
        self.rng = rng
        self.taken = 0
        self.texts = []

    def __str__(self):
        return " ".join(self.texts)

    def slips(self):
        """Return whether the next step goes wrong."""
        self.taken += 1
        return self.taken - 1 == self.wrong

    def choose(self, right, others):
        """Return what is right, or one of the others if this step goes wrong."""
        return self.rng.choice([other for other in others if other != right]) if self.slips() else right

    def equation(self, a, sign, b, label=""):
        """Write `a + b = c.` (or with - or *, or / where nothing is left over), after a label if there is one, and
        return c, which is a little off if this step goes wrong."""
        result = a // b if sign == "/" else {"+": a + b, "-": a - b, "*": a * b}[sign]
        if self.slips():
            result += self.rng.choice((-1, 1) if abs(result) < 12 else (-1, 1, -10, 10))
        self.texts.append(f"{label}{': ' if label else ''}{a} {sign} {b} = {result}.")
        return result

    def add(self, a, b):
        """Write the sum of a and each digit of b in its turn, and return it."""
        for place, digit in reversed(list(enumerate(reversed(str(b))))):
            if digit != "0":
                a = self.equation(a, "+", int(digit) * 10**place)
        return a


def solution(worked, question, *options):
    """Return the completion that worked(question, steps, *options) works out: it writes the steps and returns the answer."""
    steps = Steps()
    answer = worked(question, steps, *options)
    return completion(steps, answer)


def with_slip(worked, question, rng):
    """Return such a completion with a slip in one step that makes the answer wrong."""
    right = Steps()
    worked(question, right)
    while True:
        steps = Steps(rng.randrange(right.taken), rng)
        answer = str(worked(question, steps))
        if answer != question["answer"]:
            return completion(steps, answer)


def follows(steps, reasoning, answer, form=NUMBERED):
    """Return whether the Steps, in their order, are all sentences of a reasoning that have a step's form.
    form: matches somewhere in such a sentence when the answer is taken out."""
    expected = sentences(str(steps))
    said = re.compile(rf"(?<!\w){re.escape(plain(answer))}(?!\w)")
    written = [sentence for sentence in sentences(reasoning)
               if sentence in expected or form.search(said.sub("", sentence, count=1))]
    return written == expected


def sentences(text):
    """Return the sentences of a text as they are compared, without headings and the numbers of a list."""
    found = map(plain, END.split(_numbers.normal(text)))
    return [sentence for sentence in found if sentence and not POINT.fullmatch(sentence)]


def completion(steps, answer):
    """Return the completion that has these steps and this answer."""
    return f"Reasoning: {steps}\nAnswer: <answer>{answer}</answer>"


def plain(text):
    """Return an answer in words as it is compared: in lower case, with single spaces, without a final full stop."""
    return " ".join(text.split()).removesuffix(".").casefold()
