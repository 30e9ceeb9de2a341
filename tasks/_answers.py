"""Extract the answer between <answer> tags from a completion, and grade it."""
import re
from fractions import Fraction

from tasks import _equations, _numbers
from tasks._asked import asked_unit
from tasks._steps import NUMBERED, Steps, follows, plain

LONGEST_STEPS = 2000                 # characters of the steps that grade_steps reads
ANSWER = re.compile(r"<answer ?>([^<]{0,200})</answer ?>", re.IGNORECASE)
WORDS = _numbers.WORDS | dict(zip("third fourth fifth sixth seventh eighth ninth tenth".split(),
                                  range(3, 11)))
WORDS |= _numbers.SCALES | {"half": 2, "quarter": 4, "once": 1, "twice": 2, "double": 2, "thrice": 3}
WORDS |= {"triple": 3, "minute": 60, "hour": 60, "day": 24, "week": 7, "year": 12}


def find(completion, pattern=ANSWER):
    """Return the match of the first <answer>...</answer> or None. A long text is read at both ends."""
    longest = _numbers.LONGEST_TEXT
    return pattern.search(completion[:longest]) or pattern.search(completion[-longest:])


def answer(completion, asked=None):
    """Return the number in the first <answer>...</answer> or None. asked: see _numbers.number."""
    found = find(completion)
    return _numbers.number(found[1], asked) if found else None


def words(completion):
    """Return the normalised text in the first <answer>...</answer>, "" without one."""
    found = ANSWER.search(completion)
    return plain(_numbers.normal(_numbers.unwrapped(found[1]))) if found else ""


def same(said, right):
    """Return whether two answers are equal, as numbers if the right one is a number."""
    value = _numbers.number(right)
    return plain(said) == plain(right) if value is None else _numbers.number(said) == value


def before_answer(completion):
    """Return the text before the first answer and an equals sign in front of it, the whole completion without
    one."""
    found = ANSWER.search(completion)
    return completion[:found.start()].rstrip(" \n=:") if found else completion


def right_answer(question):
    """Return the right answer as a Fraction. It may be a number, or a text with commas between thousands."""
    return Fraction(str(question["answer"]).replace(",", ""))


def numbers_in(text):
    """Return the numbers in a question, including those written as words."""
    text = _numbers.normal(text)
    found = [float(_numbers.ungrouped(digits)) for digits in re.findall(_numbers.NUMBER, text)]
    for word in re.findall(r"[a-z]+", text.lower()):
        name = word if word in WORDS else word.removesuffix("s")
        if name in WORDS:
            found.append(WORDS[name])
    return found


def reasoned(question, completion, value, numbers=None):
    """Return whether the text before the answer leads to it, see _equations.reasoned. value: the completion's
    answer or None. numbers: of the question; None: those in its text."""
    answers = [] if value is None else [float(value), float(right_answer(question))]
    if re.search(r"\bcents?\b|¢|%|per ?cent", question.get("question", "").lower()):
        answers += [answer / 100 for answer in answers]
    known = numbers_in(question.get("question", "")) if numbers is None else numbers
    return _equations.reasoned(before_answer(completion[:_numbers.LONGEST_TEXT]), answers, known)


def grade_steps(worked, question, completion, answer, correct, form=NUMBERED):
    """Return (score, parts) of a completion that must reproduce the steps of worked(question, steps).

    answer: the completion's, "" without one; correct: whether it is right; form: see _steps.follows. The
    parts are answered, correct, and reasoned: whether exactly these steps, in order, precede the answer."""
    steps = Steps()
    worked(question, steps)
    reasoning = before_answer(completion[:LONGEST_STEPS])
    parts = {"answered": answer != "", "correct": correct,
             "reasoned": follows(steps, reasoning, question["answer"], form)}
    return float(correct), parts


def grade(question, completion):
    """Return (score, parts) of a completion whose answer is a number. The parts are answered, correct
    (exactly equal), and reasoned: true equations lead from the question's numbers to the answer."""
    value = answer(completion, asked_unit(question))
    parts = {"answered": value is not None, "correct": value == right_answer(question),
             "reasoned": reasoned(question, completion, value)}
    return float(parts["correct"]), parts
