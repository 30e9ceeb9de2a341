"""The answer that a completion gives between <answer> tags, and its grade."""
import re
from fractions import Fraction

from tasks import _equations, _numbers
from tasks._steps import NUMBERED, Steps, follows, plain

LONGEST_STEPS = 2000                 # characters of a completion that follows a process
ANSWER = re.compile(r"<answer ?>([^<]{0,200})</answer ?>", re.IGNORECASE)
HOW_MANY = re.compile(r"\bhow many ([^\W\d_]{1,40})", re.IGNORECASE)
WORDS = dict(zip("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
                 "eighteen nineteen".split(), range(1, 20)))
WORDS |= dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10)))
WORDS |= dict(zip("third fourth fifth sixth seventh eighth ninth tenth".split(), range(3, 11)))
WORDS |= {"hundred": 100, "thousand": 1000, "million": 1_000_000, "dozen": 12, "half": 2, "quarter": 4, "once": 1, "twice": 2,
          "double": 2, "thrice": 3, "triple": 3, "minute": 60, "hour": 60, "day": 24, "week": 7, "year": 12}


def answer(completion, unit=None):
    """Return the number in the first <answer>...</answer>, a Fraction, or None. unit: see _numbers.number."""
    found = ANSWER.search(completion)
    return _numbers.number(found[1], unit) if found else None


def words(completion):
    """Return the text in the first <answer>...</answer> as words are compared, "" if there is none."""
    found = ANSWER.search(completion)
    return plain(_numbers.normal(_numbers.unwrapped(found[1]))) if found else ""


def same(said, right):
    """Return whether a text is the right one: as a number where that is one."""
    value = _numbers.number(right)
    return plain(said) == plain(right) if value is None else _numbers.number(said) == value


def before_answer(completion):
    """Return what stands before the first answer, all of it where there is none."""
    found = ANSWER.search(completion)
    return completion[:found.start()] if found else completion


def asked_unit(question):
    """Return the unit that an answer to a question may carry, or None."""
    if "to" in question:
        return question["to"]
    text = question.get("question", "")
    if "percent" in text or "%" in text:
        return "%"
    found = HOW_MANY.search(text)
    return found and found[1]


def numbers_in(text):
    """Return the numbers of a question, those written as words among them."""
    text = _numbers.normal(text)
    found = [float(_numbers.ungrouped(digits)) for digits in re.findall(_numbers.NUMBER, text)]
    words = re.findall(r"[a-z]+", text.lower())
    return found + [WORDS[name] for word in words if (name := word if word in WORDS else word.removesuffix("s")) in WORDS]


def reasoned(question, completion, value, numbers=None):
    """Return whether the text before the answer leads there: see _equations.reasoned. value: the completion's answer or
    None; numbers: of the question, None: those in its text."""
    answers = [] if value is None else [float(value), float(Fraction(question["answer"]))]
    if "cent" in question.get("question", "").lower():                           # in cents, percent
        answers += [answer / 100 for answer in answers]
    known = numbers_in(question.get("question", "")) if numbers is None else numbers
    return _equations.reasoned(before_answer(completion), answers, known)


def grade_steps(worked, question, completion, answer, correct, form=NUMBERED):
    """Return (score, parts) of a completion that has to follow a process.

    worked(question, steps) writes the steps that lead to the answer; answer: the completion's, "" if it has none;
    correct: whether it is right; form: see _steps.follows. parts: answered, correct, and reasoned, whether the text
    before the answer has exactly these steps, in order, and no other number.
    """
    steps = Steps()
    worked(question, steps)
    reasoning = before_answer(completion[:LONGEST_STEPS])
    parts = {"answered": answer != "", "correct": correct,
             "reasoned": follows(steps, reasoning, question["answer"], form)}
    return float(correct), parts


def grade(question, completion):
    """Return (score, parts) of a completion whose answer should be a number: whether there is one (answered),
    whether it is exactly the right one (correct), and whether the text before it has equations, all of them
    true, that lead from the question's numbers to the answer (reasoned)."""
    completion = completion[:_numbers.LONGEST_TEXT]
    value = answer(completion, asked_unit(question))
    right = Fraction(question["answer"].replace(",", ""))
    parts = {"answered": value is not None,
             "correct": value == right,
             "reasoned": reasoned(question, completion, value)}
    return float(parts["correct"]), parts
