"""Steps of a worked completion. One of them may contain a slip, and the later steps then build on it."""
import re

from tasks import _numbers

END = re.compile(r"\.(?![0-9])|\n|\b(?:reasoning|answer):", re.IGNORECASE)     # end of a sentence
NUMBERED = re.compile("[0-9=]")      # a sentence that matches is a step
POINT = re.compile("[0-9]{1,2}")     # number of a list item: `1. pop ab.`


class Steps:
    """Steps in order. wrong: index of the step with a slip, drawn from rng; None: no slip."""

    def __init__(self, wrong=None, rng=None):
        self.wrong = wrong
        self.rng = rng
        self.taken = 0
        self.texts = []

    def __str__(self):
        return " ".join(self.texts)

    def slips(self):
        """Return whether the next step has the slip, and count it."""
        self.taken += 1
        return self.taken - 1 == self.wrong

    def choose(self, right, others):
        """Return `right`, or one of the others if this step has the slip."""
        if self.slips():
            return self.rng.choice([other for other in others if other != right])
        return right

    def equation(self, a, sign, b, label=""):
        """Write `label: a + b = c.` (or with -, *, or / without remainder) and return c, which is slightly
        off if this step has the slip."""
        result = a // b if sign == "/" else {"+": a + b, "-": a - b, "*": a * b}[sign]
        if self.slips():
            result += self.rng.choice((-1, 1) if abs(result) < 12 else (-1, 1, -10, 10))
        self.texts.append(f"{label}{': ' if label else ''}{a} {sign} {b} = {result}.")
        return result

    def add(self, a, b):
        """Write the sum of a and b digit by digit, and return it."""
        for part in _numbers.digits(b) if b else ():
            a = self.equation(a, "+", part)
        return a


def completions(worked, invites_mistake, mistake):
    """Return (solution, wrong_solution) of a task whose worked(question, steps) writes Steps and returns the
    answer. If invites_mistake(question), the wrong solution is worked(question, steps, mistake), else one
    with a slip that makes the answer wrong."""
    def solution(question, *options):
        steps = Steps()
        return completion(steps, worked(question, steps, *options))

    def wrong_solution(question, rng):
        if invites_mistake(question):
            return solution(question, mistake)
        right = Steps()
        worked(question, right)
        while True:
            steps = Steps(rng.randrange(right.taken), rng)
            answer = str(worked(question, steps))
            if answer != question["answer"]:
                return completion(steps, answer)
    return solution, wrong_solution


def follows(steps, reasoning, answer, form=NUMBERED):
    """Return whether the step-like sentences of a reasoning are exactly the Steps, in order. form: pattern of
    a step, searched in a sentence after the answer is removed from it."""
    expected = sentences(str(steps))
    answer_text = re.compile(rf"(?<!\w){re.escape(plain(answer))}(?!\w)")
    written = [sentence for sentence in sentences(reasoning)
               if sentence in expected or form.search(answer_text.sub("", sentence, count=1))]
    return written == expected


def sentences(text):
    """Return the normalised sentences of a text, without headings and list numbers."""
    found = map(plain, END.split(_numbers.normal(text)))
    return [sentence for sentence in found if sentence and not POINT.fullmatch(sentence)]


def completion(steps, answer):
    """Return the text of a completion with these steps and this answer."""
    return f"Reasoning: {steps}\nAnswer: <answer>{answer}</answer>"


def plain(text):
    """Return a normalised text: lower case, single spaces, no final full stop."""
    return " ".join(text.split()).removesuffix(".").casefold()
