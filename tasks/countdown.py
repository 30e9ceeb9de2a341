"""Countdown: reach a target with each given number used once. The argument is the count of numbers, 2 to 6
(default 3).

The answer is an expression, parsed by recursive descent and evaluated with exact fractions."""
import math
import re
from collections import Counter
from fractions import Fraction
from operator import add, mul, sub, truediv

from tasks import _answers, _numbers, _questions, _steps

INSTRUCTION = ("Try sums, differences, products and quotients in short equations such as 25 - 3 = 22. Then "
               "give the expression alone, with each number used once, within <answer></answer>.")
LARGEST = 50                         # largest given number
HIGHEST = 999                        # highest target
DEEPEST = 20                         # nested parentheses
TOKEN = re.compile(r"\s*([0-9]{1,6}(?![0-9])|[-+*/()])")


def check(argument):
    if argument is not None and argument not in ("2", "3", "4", "5", "6"):
        raise ValueError("The argument of countdown is how many numbers there are, 2 to 6, and "
                         f"{argument or 'nothing'} was given.")


def draw(rng, count):
    """Return (key, question). The question is built from its solution: two numbers at a time are combined
    into a positive integer, until one is left."""
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(count)]
        parts = [(n, str(n)) for n in numbers]           # (value, expression)
        lines = []
        while len(parts) > 1:
            a, left = parts.pop(rng.randrange(len(parts)))
            b, right = parts.pop(rng.randrange(len(parts)))
            allowed = {"+": True, "-": a > b, "*": a * b <= HIGHEST, "/": a % b == 0}
            sign = rng.choice([sign for sign, is_allowed in allowed.items() if is_allowed])
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
            lines.append(f"{a} {sign} {b} = {value}.")
            parts.append((value, f"({left} {sign} {right})"))
        if value <= HIGHEST:
            key = f"{sorted(numbers)} {value}"
            listed = ", ".join(map(str, numbers))
            text = f"Use each of the numbers {listed} once with + - * / to make {value}."
            return key, {"question": text, "answer": str(value), "numbers": numbers,
                         "worked": " ".join(lines), "expression": parts[0][1][1:-1]}


def solution(question):
    return _steps.completion(question["worked"], question["expression"])


def questions(split, seed=0, n=None, argument=None):
    count = int(argument or 3)

    def most():
        results = math.prod(4 * math.comb(k, 2) for k in range(2, count + 1))   # any two numbers in each step
        return math.comb(LARGEST + count - 1, count) * min(HIGHEST, results)
    return _questions.distinct(lambda rng: draw(rng, count), split, seed, n, most)


def documents(split, seed=0, argument=None):
    drawn = _questions.draw_documents(lambda rng: draw(rng, int(argument or 3)), split, seed)
    return [_questions.document(q, solution(q)) for q in drawn]


def reward(question, completion):
    """Return (score, parts). The parts: the answer is an expression (answered), uses each number once
    (numbers), reaches the target (correct), and true equations before it lead to it (reasoned)."""
    found = parse(completion)
    has_numbers = found is not None and Counter(found[1]) == Counter(question["numbers"])
    parts = {"answered": found is not None, "numbers": has_numbers,
             "correct": has_numbers and found[0] == int(question["answer"]),
             "reasoned": _answers.reasoned(question, completion, found and found[0], question["numbers"])}
    return float(parts["correct"]), parts


def signature(completion):
    """Return the normal form of the answer's expression."""
    found = parse(completion)
    return found[2] if found else ""


def parse(completion):
    """Return (value, numbers, normal form) of the expression in the first <answer>...</answer>, which may be
    followed by an equals sign and its value; None without one."""
    found = _answers.find(completion)
    text = _numbers.normal(_numbers.unwrapped(found[1])) if found else ""
    text = text.replace("x", "*").strip().removesuffix(".")
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
    """Consume a sum (signs "+-") or product ("*/") of reversed tokens; return (value, normal form)."""
    terms = []
    value = Fraction(signs == "*/")
    sign = signs[0]
    while True:
        term, spelled = chain(tokens, "*/", depth) if signs == "+-" else atom(tokens, depth)
        operation = {"+": add, "-": sub, "*": mul, "/": truediv}[sign]
        value = operation(value, term)
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
    """Return a term, in parentheses if needed after the sign."""
    needed = r"\D" if sign in "-/" else "[-+]" if sign == "*" else "$^"
    return f"({spelled})" if re.search(needed, spelled) else spelled


def atom(tokens, depth):
    """Consume a number or a parenthesised expression, like chain."""
    token = tokens.pop()
    if token.isdecimal():
        return Fraction(int(token)), str(int(token))
    if token != "(" or depth == DEEPEST:
        raise ValueError
    inside = chain(tokens, "+-", depth + 1)
    if tokens.pop() != ")":
        raise ValueError
    return inside
