"""Countdown: use each of some numbers once to make another. The argument is how many numbers there are, 2 to 6 (default 3).

The answer is an expression. It is parsed here, by recursive descent, and its value is an exact fraction."""
import math
import re
from collections import Counter
from fractions import Fraction

from tasks import _answers, _numbers, _questions, _steps

INSTRUCTION = ("Try sums, differences, products and quotients in short equations such as 25 - 3 = 22. Then give the expression alone, "
               "with each number used once, within <answer></answer>.")
LARGEST = 50                         # number
HIGHEST = 999                        # number to make
DEEPEST = 20                         # open parentheses
TOKEN = re.compile(r"\s*([0-9]{1,6}(?![0-9])|[-+*/()])")


def check(argument):
    if argument is not None and argument not in ("2", "3", "4", "5", "6"):
        raise ValueError(f"The argument of countdown is how many numbers there are, 2 to 6, and {argument or 'nothing'} was given.")


def draw(rng, count):
    """(what is asked, the question), which can be solved because it was made from its solution: two of the numbers at a time become
    one, in whole and positive numbers, until one is left."""
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(count)]
        parts, lines = [(n, str(n)) for n in numbers], []         # (value, expression)
        while len(parts) > 1:
            (a, left), (b, right) = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
            sign = rng.choice([s for s, can in (("+", True), ("-", a > b), ("*", a * b <= HIGHEST), ("/", a % b == 0)) if can])
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
            lines.append(f"{a} {sign} {b} = {value}.")
            parts.append((value, f"({left} {sign} {right})"))
        if value <= HIGHEST:
            asked = f"{sorted(numbers)} {value}"
            text = f"Use each of the numbers {', '.join(map(str, numbers))} once with + - * / to make {value}."
            return asked, {"question": text, "answer": str(value), "numbers": numbers, "worked": " ".join(lines),
                           "expression": parts[0][1][1:-1]}


def solution(question):
    return _steps.completion(question["worked"], question["expression"])


def questions(split, seed=0, n=None, argument=None):
    count = int(argument or 3)

    def most():
        results = math.prod(4 * math.comb(k, 2) for k in range(2, count + 1))      # of any two numbers, in each step
        return math.comb(LARGEST + count - 1, count) * min(HIGHEST, results)
    return _questions.distinct(lambda rng: draw(rng, count), split, seed, n, most)


def documents(split, seed=0, argument=None):
    return [_questions.document(q, solution(q)) for q in _questions.draw_documents(lambda rng: draw(rng, int(argument or 3)), split, seed)]


def reward(question, completion):
    """Return (score, parts): whether the answer is an expression (answered), uses the numbers it should (numbers) and makes
    what it should (correct), and whether the equations before it are all true and lead there (reasoned)."""
    completion = completion[:_numbers.LONGEST_TEXT]
    found = parse(completion)
    parts = {"answered": found is not None, "numbers": found is not None and Counter(found[1]) == Counter(question["numbers"])}
    parts["correct"] = parts["numbers"] and found[0] == int(question["answer"])
    parts["reasoned"] = _answers.reasoned(question, completion, found and found[0], question["numbers"])
    return float(parts["correct"]), parts


def signature(completion):
    """The expression, however it is spaced and bracketed, and in whatever order its sums and products stand."""
    found = parse(completion[:_numbers.LONGEST_TEXT])
    return found[2] if found else ""


def parse(completion):
    """Return (value, its numbers, normal spelling) of the expression in the first <answer>...</answer>, which may be followed
    by an equals sign and its value; None if there is none."""
    found = _answers.ANSWER.search(completion)
    text = _numbers.normal(_numbers.unwrapped(found[1])).replace("x", "*").strip().removesuffix(".") if found else ""
    text, equals, result = (part.strip() for part in text.partition("="))
    tokens = []
    end = 0
    while end < len(text):
        token = TOKEN.match(text, end)
        if not token:
            return None
        tokens.append(token[1])
        end = token.end()
    try:
        value, spelled = chain(tokens[::-1], "+-", 0, last=True)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    if equals and _numbers.number(result) != value:
        return None
    return value, [int(token) for token in tokens if token.isdecimal()], spelled


def chain(tokens, signs, depth, last=False):
    """(value, normal spelling) of a sum (signs "+-") or product ("*/") at the end of the reversed tokens, which it takes away."""
    terms, value, sign = [], Fraction(signs == "*/"), signs[0]
    while True:
        term, spelled = chain(tokens, "*/", depth) if signs == "+-" else atom(tokens, depth)
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__, "/": value.__truediv__}[sign](term)
        terms.append((sign, spelled))
        if not tokens or tokens[-1] not in signs:
            break
        sign = tokens.pop()
    if last and tokens:
        raise ValueError
    if len(terms) == 1:
        return value, spelled
    return value, "".join(sign + bracketed(sign, spelled) for sign, spelled in sorted(terms))[1:]


def bracketed(sign, spelled):
    """A term, in parentheses where those are needed after the sign."""
    needed = r"\D" if sign in "-/" else "[-+]" if sign == "*" else "$^"
    return f"({spelled})" if re.search(needed, spelled) else spelled


def atom(tokens, depth):
    """As chain, of a number or of what is in parentheses."""
    token = tokens.pop()
    if token.isdecimal():
        return Fraction(int(token)), str(int(token))
    if token != "(" or depth == DEEPEST:
        raise ValueError
    inside = chain(tokens, "+-", depth + 1)
    if tokens.pop() != ")":
        raise ValueError
    return inside
