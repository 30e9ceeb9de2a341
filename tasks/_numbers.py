"""Numbers in what a model writes: the answer between <answer> tags, and equations whose truth can be checked. What a model wrote
is never evaluated; every text is read in time proportional to its length."""
import math
import re

LONGEST_TEXT = 20_000                # characters of a completion that are read: none takes longer than a few milliseconds
LONGEST = 40                         # characters of a number: enough for any honest one, too few to make one expensive
NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?"
ANSWER = re.compile(r"<answer>([^<]{0,200})</answer>")
# a op b [op c ...] = d: operands and operators up to an equals sign, and the number after it. Possessive in effect: a number
# can't be split into two, because what follows one is an operator or the equals sign.
EQUATION = re.compile(rf"(?<![\w.,])({NUMBER}(?: ?[-+*/×÷x] ?{NUMBER}){{1,8}}) ?= ?({NUMBER})(?![\d.,]*\d)")
TERM = re.compile(rf" ?([-+*/×÷x]?) ?({NUMBER})")


def number(text):
    """The finite float that a text is, as a whole; None if it is none."""
    text = text.strip()
    if len(text) > LONGEST or not re.fullmatch(NUMBER, text):
        return None
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def answer(completion):
    """The number in the first <answer>...</answer>, None if there is none."""
    found = ANSWER.search(completion)
    return number(found[1]) if found else None


def close(value, correct, tolerance):
    """Whether both, rounded to three decimals, differ by at most that share of the correct one."""
    return abs(round(value, 3) - round(correct, 3)) <= tolerance * abs(round(correct, 3))


def equations(text):
    """[(left side's value or None, right side's value)] of every `a op b = c` in a text; None where it has no finite value."""
    return [(evaluate(left), number(right)) for left, right in EQUATION.findall(text)]


def evaluate(expression):
    """The value of numbers joined by + - * / (or × ÷ x), the latter two kinds first; None if it is not finite."""
    total, product = 0.0, None
    for sign, text in TERM.findall(expression):
        value = number(text)
        if value is None:
            return None
        if sign in ("", "+", "-"):
            total, product = total + (product or 0.0), -value if sign == "-" else value
        elif sign in "*×x":
            product *= value
        elif value:
            product /= value
        else:
            return None
    total += product
    return total if math.isfinite(total) else None


def all_true(text, tolerance=1e-3):
    """Whether there is an equation in a text and all of them hold, up to that share of the right side."""
    found = equations(text)
    return bool(found) and all(left is not None and right is not None and abs(left - right) <= tolerance * max(abs(left), abs(right))
                               for left, right in found)
