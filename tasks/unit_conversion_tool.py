"""Unit conversion with a calculator: after `<calc>344 * 24</calc>` the environment writes ` = 8256`.

The questions and the grade are unit_conversion's, and so is its argument. Three in ten documents leave their
products to the calculator, as often from a wrong ratio as others; nothing in the grade asks for a call, so
reinforcement learning decides when one pays."""
import random
import re
from fractions import Fraction

from tasks import _answers, _equations, _numbers, _questions, unit_conversion as plain

INSTRUCTION = (f"{plain.INSTRUCTION} A calculator writes the result behind an expression such as "
               "<calc>344 * 24</calc>.")
TURN_STOP = "</calc>"
MAX_TURNS = 5
SHARE = 0.3                          # of the documents
EQUATION = re.compile(r"(-?\d[\d.]*(?: [-+*/] [\d.]*\d)+) = -?[\d.]*\d")
NUMBER = r"-?\d{1,15}(?:\.\d{1,15})?"
EXPRESSION = re.compile(rf"{NUMBER}(?: [*/] {NUMBER}){{1,5}}|{NUMBER}(?: [-+] {NUMBER}){{1,5}}")
LAST_CALL = re.compile(r"<calc>([^<]*)</calc>$")
CALL = re.compile(r"<calc>([^<]*)</calc>(?:\s*= (-?\d+(?:\.\d+)?|\?))?")
TAGS = re.compile("</?calc>")

check = plain.check
questions = plain.questions


def respond(question, text):
    call = LAST_CALL.search(text)
    return f" = {result(call[1])}" if call else None


def result(expression):
    """Return the result of a chain of products and quotients, or of sums and differences; else ?"""
    if not EXPRESSION.fullmatch(expression):
        return "?"
    first, *others = expression.split()
    try:
        return plain.decimal(plain.apply(Fraction(first), zip(others[::2], map(Fraction, others[1::2]))))
    except ZeroDivisionError:
        return "?"


def solution(question):
    return with_calls(plain.solution(question, parts=False))


def with_calls(text):
    """Return a worked text in which the calculator writes each result, the last of which is the answer."""
    text = EQUATION.sub(lambda equation: f"<calc>{equation[1]}</calc> = {result(equation[1])}", text)
    return _answers.ANSWER.sub(f"<answer>{CALL.findall(text)[-1][1]}</answer>", text)


def documents(split, seed=0, argument=None):
    rng = random.Random(f"{seed} {split} tool")
    level = plain.level_of(argument)
    drawn = _questions.draw_documents(lambda rng: plain.draw(rng, level), split, seed)
    return [document(question, rng) for question in drawn]


def document(question, rng):
    """Return a document of unit_conversion, or one that calls the calculator."""
    if rng.random() >= SHARE:
        return plain.document(question, rng)
    return plain.document(question, rng, ("ratio", "inverse"), False, with_calls)


def reward(question, completion):
    """Return unit_conversion's (score, parts); the part no_waste: the result of each call is used later."""
    score, parts = plain.reward(question, TAGS.sub("", completion))
    return score, parts | {"no_waste": not wastes(question, completion)}


def wastes(question, text):
    """Return whether there are more calls than turns, or a call has no result, repeats another, or has a
    result that is neither the answer nor a number in the left side of a later equation."""
    calls = list(CALL.finditer(text[:_numbers.LONGEST_TEXT]))
    if len(calls) > MAX_TURNS or len({call[1] for call in calls}) < len(calls):
        return True
    for call in calls:
        later = TAGS.sub("", text[call.end():])
        used = [n for e in _equations.read(_answers.before_answer(later)) for n in e.operands]      # unsigned
        value = _answers.answer(later, _answers.asked_unit(question))
        used += [] if value is None else [value]
        if call[2] in (None, "?"):
            return True
        if not any(_equations.near(abs(float(call[2])), abs(float(n))) for n in used):
            return True
    return False


def signature(completion):
    return _equations.signature(TAGS.sub("", completion))
