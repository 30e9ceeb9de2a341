"""Numbers in what a model writes: the answer between <answer> tags, and equations whose truth can be checked. What a model wrote
is never evaluated; every text is read in time proportional to its length.

An equation is two sides of numbers and + - * / ( ) with an equals sign between them, one side with an operator at least. Numbers
may have a currency before them and a unit after them, as in `3 boxes * $2 per box = $6`, and * may be × x or \\times. What can't be
read like that (2x + 3 = 7, 2^3 = 8) is no equation, and neither true nor false.
"""
import math
import re
from collections import namedtuple
from fractions import Fraction

LONGEST_TEXT = 10_000                # characters of a completion that are read: the worst take 20 ms, honest ones one
LONGEST = 40                         # characters of a number: enough for any honest one, too few to make one expensive
DEEPEST = 20                         # open parentheses
NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?!\w))?"
ANSWER = re.compile(r"<answer>([^<]{0,200})</answer>")

NOTE = re.compile(r"<<([^<>]{0,200})>>")             # GSM8K's annotations, <<48/2=24>>: equations of their own
# what ends a statement: the end of a line or a clause, and signs that no side of an equation has
BREAK = re.compile(r"[^\w\s.,()=+*/×÷·−–$€£%\\'’^√²³:-]|\n|\.(?![0-9])|,(?![0-9]{3}(?![0-9]))|:(?![0-9])")
BULLET = re.compile(r"\s*[-*+] ")
LETTER = r"[^\W\d_]"
TOKEN = re.compile(rf"""
      (?P<glued>(?<=[0-9)])(?=\ ?\())                                # 5(3 + 2) is a product
    | (?P<minus>(?<![\w)%])[-−](?=[$(.0-9]))                         # of a negative number, if nothing is before it
    | (?P<sign>\\times|\\cdot|\\div|[xX](?=[ ]?[$(.0-9])|[-/](?!{LETTER})|[+×÷·−–]|\*(?!\*))
    | (?P<space>(?:[\s$€£]|\\(?!times|cdot|div))+|\*\*+)           # ** is bold type
    | (?P<number>{NUMBER}|\.[0-9]+)
    | (?P<percent>%|percent\b)
    | (?P<variable>(?<=[0-9)])(?![ghlmst])[a-zA-Z](?!\w)|(?<!\w){LETTER}(?=\())    # 2y + 3, f(3)
    | (?P<word>[-/]?{LETTER}[\w'’]*(?:[-/]{LETTER}[\w'’]*)*)
    | (?P<open>\() | (?P<close>\)) | (?P<equals>=) | (?P<other>.)
""", re.VERBOSE)
SIGNS = {"×": "*", "x": "*", "X": "*", "·": "*", "\\times": "*", "\\cdot": "*", "": "*", "÷": "/", "\\div": "/", "−": "-", "–": "-"}
SPOKEN = {"times", "plus", "minus", "divided", "multiplied", "of", "than", "over", "less"}    # between numbers: arithmetic in words
NO_VARIABLES = set("aghlmst")                        # single letters that may stand between a number and a sign, `$5 a day * 3`

# value or None, normal spelling, how many operators, whether it ends in %, whether parentheses stay open or one was never opened
Expression = namedtuple("Expression", "value spelled operators percent open cut")


def number(text):
    """The finite float that a text is, as a whole; None if it is none."""
    text = text.strip()
    if len(text) > LONGEST or not re.fullmatch(rf"-?{NUMBER}", text):
        return None
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def answer(completion):
    """The number in the first <answer>...</answer>, None if there is none."""
    found = ANSWER.search(completion)
    return number(found[1]) if found else None


def before_answer(completion, pattern=ANSWER):
    """What stands before the first answer, all of it where there is none."""
    found = pattern.search(completion)
    return completion[:found.start()] if found else completion


def close(value, correct, tolerance):
    """Whether both, rounded to three decimals, differ by at most that share of the correct one."""
    return abs(round(value, 3) - round(correct, 3)) <= tolerance * abs(round(correct, 3))


def grade(question, completion, tolerance=0.0):
    """(score, parts) of a completion whose answer should be a number: whether there is one (answered), whether it is the right one up
    to that share of it (correct), and whether the text before it has equations, all of them true (reasoned)."""
    completion = completion[:LONGEST_TEXT]
    value, right = answer(completion), Fraction(question["answer"].replace(",", ""))
    exact = None if value is None else Fraction(ANSWER.search(completion)[1].strip().replace(",", ""))        # not to a float's 16 digits
    parts = {"answered": value is not None, "correct": value is not None and abs(exact - right) <= Fraction(tolerance) * abs(right),
             "reasoned": all_true(before_answer(completion))}
    return float(parts["correct"]), parts


def equations(text):
    """[(left side's value, right side's value)] of every equation in a text; None where a side has no finite value."""
    return [(left, right) for left, right, _ in read(text)]


def all_true(text, tolerance=1e-3):
    """Whether there is an equation in a text and all of them hold, up to that share of the larger side."""
    found = equations(text)
    return bool(found) and all(holds(left, right, tolerance) for left, right in found)


def holds(left, right, tolerance=1e-3):
    return left is not None and right is not None and abs(left - right) <= tolerance * max(abs(left), abs(right))


def signature(text):
    """The equations of a text, as one text, however their numbers, signs and spaces are written; the text itself if it has none."""
    text = text[:LONGEST_TEXT]
    return " ".join(spelled for _, _, spelled in read(NOTE.sub("", text))) or " ".join(text.split())


# --- reading ---

def read(text):
    """(left value or None, right value or None, normal spelling) of every equation in a text."""
    for part in [NOTE.sub("", text), *NOTE.findall(text)]:
        for statement in BREAK.split(part):
            if "=" in statement:
                sides = []                           # (it as a left side, it as a right side, whether it has words)
                for tokens in sides_of(statement):
                    runs = stretches(tokens)
                    first = evaluate(runs[0])
                    last = first if len(runs) == 1 else evaluate(runs[-1])
                    sides.append((last, first, any(kind == "word" for kind, _ in tokens)))
                for (left, _, words), (_, right, _) in zip(sides, sides[1:]):
                    # `4 weeks = 4 * 7 days` is no equation between numbers, `12 = 4 * 3` is
                    if left and right and not left.cut and not right.open and (left.operators or right.operators and not words):
                        value = right.value
                        # `50 / 200 * 100 = 25%`: a percentage on the right may be a unit and not a hundredth
                        if right.percent and not right.operators and value and holds(left.value, value * 100):
                            value *= 100
                        yield left.value, value, f"{left.spelled}={right.spelled}"


def sides_of(statement):
    """The statement's tokens, [(kind, text)], cut at the equals signs."""
    sides = [[]]
    for token in TOKEN.finditer(statement, BULLET.match(statement).end() if BULLET.match(statement) else 0):
        if token.lastgroup == "equals":
            sides.append([])
        elif token.lastgroup != "space":
            sides[-1].append((token.lastgroup, token[0]))
    return sides


def stretches(side):
    """The tokens of a side without its words, cut where there is a number after mere words: of `24 clips in May and 48 + 24` the
    first is what an equals sign before it means, the last what one after it means."""
    found, said = [[]], []                           # said: the words since the last token that is none
    for kind, text in [*side, ("end", "")]:
        if kind == "word":
            said.append(text.strip("-/").lower())
            continue
        run = found[-1]
        if said:
            if (run and len(said[0]) == 1 and said[0] not in NO_VARIABLES) or (not run and kind == "sign"):
                run.append(("other", text))          # 2 y + 3, y + 3
            if said == ["of"] and run and (run[-1][0] == "percent" or ("sign", "/") in run[-2:-1]):
                run.append(("sign", "*"))            # 20% of 50, 1/2 of 10
            elif kind in ("number", "open") or (kind == "minus" and not run):
                if run and SPOKEN & set(said):
                    run.append(("other", text))
                else:
                    found.append([])
            said = []
        if kind != "end":
            found[-1].append((kind, text))
    return found


def evaluate(tokens):
    """The Expression that tokens are, * and / before + and -; None if they are none. If parentheses stay open it is the innermost
    part, which may be a left side; what is before a parenthesis that was never opened may be a right one: `(3 + 4 = 7)`."""
    stack, spelled, complete, cut = [[0.0, 0.0, "+", 1, 0, 0]], [], False, False     # complete: an operand has just ended
    for kind, text in tokens:                        # stack, of each open expression: see operand; operators; start in spelled
        if complete and kind in ("sign", "minus", "glued"):
            stack[-1][2] = sign = SIGNS.get(text, text)
            stack[-1][4], complete = stack[-1][4] + 1, False
            spelled.append(sign)
        elif complete and kind == "percent":
            stack[-1][1] *= 100 if stack[-1][2] == "/" else 0.01
            spelled.append("%")
        elif complete and kind == "close" and len(stack) > 1:
            total, product, _, _, operators, _ = stack.pop()
            stack[-1][4] += operators
            operand(stack[-1], total + product)
            spelled.append(")")
        elif complete and kind == "close":
            cut = True
            break
        elif not complete and kind == "minus" and stack[-1][3] == 1:
            stack[-1][3] = -1
            spelled.append("-")
        elif not complete and kind == "number" and len(text) <= LONGEST:
            value, complete = float(text.replace(",", "")), True
            operand(stack[-1], value)
            spelled.append(f"{value:.12g}")
        elif not complete and kind == "open" and len(stack) <= DEEPEST:
            spelled.append("(")
            stack.append([0.0, 0.0, "+", 1, 0, len(spelled)])
        else:
            return None
    if not complete:
        return None
    total, product, _, _, operators, start = stack[-1]
    value = total + product if math.isfinite(total + product) else None
    return Expression(value, "".join(spelled[start:]), operators, spelled[-1] == "%", len(stack) > 1, cut)


def operand(frame, value):
    """Takes a number into an expression [sum, last product, sign before the number, 1 or -1 by its own minus, ...]. A division by
    zero makes it NaN for good."""
    value, frame[3] = value * frame[3], 1
    if frame[2] == "*":
        frame[1] *= value
    elif frame[2] == "/":
        frame[1] = frame[1] / value if value else math.nan
    else:
        frame[0], frame[1] = frame[0] + frame[1], -value if frame[2] == "-" else value
