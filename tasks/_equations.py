"""Find equations in model output and decide whether they are true.

An equation has numbers and + - * / ( ) on both sides of an equals sign. Numbers may have a currency before
them and a unit after them, as in `3 boxes * $2 per box = $6`. Every link of a chain (`6 * 2 = 12 = 3 * 4`) is
an equation. Known units are converted if the plain numbers differ: `6 kg = 6 * 1000 gram` and `1 kg = 1000
gram` are true. Two numbers may be compared (`3 * 4 > 10`). Of the other statements, those with a variable or
words (2x + 3 = 7, 4 boxes = 48 eggs) are neither true nor false, and those without (2^3 = 8) are false."""
import math
import re
from collections import namedtuple
from operator import eq, ge, gt, le, lt, ne

from tasks import _numbers, _units
from tasks._numbers import LONGEST, LONGEST_TEXT, NUMBER

DEEPEST = 20                         # open parentheses
MOST = 200                           # equals signs in a text; with more it is rejected (honest ones have 50)
TOLERANCE = 1e-3                     # relative difference allowed between two sides
ROUNDED = 0.1                        # relative difference allowed for rounding to the written digits

NOTE = re.compile(r"<<([^<>]{0,200})>>")             # GSM8K's annotations, <<48/2=24>>: separate equations
# End of a statement: the end of a line or clause, or a character that no side of an equation contains.
BREAK = re.compile(r"[^\w\s.,()=≺≻≤≥≠+*/$€£%\\'’^√²³:-]|\n|\.(?!\d)|,(?!\d{3}(?!\d))|(?<!\d):|:(?!\d)")
# List marker or conjunction before a statement: `- `, `1) `, `(b) `, `so `.
MARKER = re.compile(r"\s*(?:(?:so|thus|then|hence|therefore|and|now|because|since|is)\s+(?=[$(.0-9-])|"
                    r"[-*+]\s|(?:[0-9]{1,2}|[a-zA-Z]|[ivxIVX]{2,4})\)\s+(?=\S)|"
                    r"\((?:[0-9]{1,2}|[a-zA-Z]|[ivxIVX]{2,4})\)\s+(?=[$(.0-9a-zA-Z]))")
LETTER = r"[^\W\d_]"
DIGIT = re.compile(r"(?![0-9])\d")               # in another script
EQUALS = re.compile(r"[:.]\s{0,3}=|[≡≐≒﹦]")
ARROW = re.compile(r"[-=]{1,9}>|[→⇒⟶➔]")
COMPARISON = re.compile(r"(?<=[\w)%])\s{0,3}(<=|>=|!=|[<>≤≥≠])\s{0,3}(?=[-$(.]{0,2}[0-9])")
COMPARED = {"<=": "≤", ">=": "≥", "!=": "≠", "<": "≺", ">": "≻"}        # `<` elsewhere begins a tag
# A result behind a word or an arrow: `3 * 4 is 12`, `20% of 60 is 12`, `3*4 -> 12`.
OPERAND = rf"\s?[$(]{{0,2}}[0-9.][0-9.,]{{0,40}}\)?(?:\s?{LETTER}{{1,20}})?"
RESULT = re.compile(r"((?:(?P<chain>[-+*/x]\s?|%|percent)|(?<![0-9]))"
                    r"(?P<a>[0-9]{0,9})(?P<sign>\s[-+/x]\s|[-+*/x]|\sof\s)"
                    rf"(?P<b>{OPERAND})(?=\s{{0,3}}[a-z⇒]))\s{{0,3}}"
                    r"(?:(?P<word>is|are|makes|gives)\b|equals\b|⇒)\s{0,3}"
                    r"(?=[-$(.]{0,2}[0-9][0-9.,]{0,40}(?![0-9.,]|\s?[-+*/=x%(]))")
VERB = re.compile(r"(?:is|are|makes|gives|equals)\b|⇒")
WRAPPING = re.compile(r"=[\s\"'‘’“”„«»`~|\[\]{}#_@&\u200b-\u200f\u2060\ufeff]+")  # before a result
CLOSING = re.compile(r"(?<![\"“”«»`|\]}])[\"“”«»`|\]}]{1,9}(?=\s{0,3}=)")       # behind a left side
# A result in words, `= four hundred and seven`; not `= one half`.
WORD = "|".join([*_numbers.WORDS, *_numbers.SCALES])
ALTERED = "|".join(word.removesuffix("s") for word in sorted(_numbers.ALTER))
IN_WORDS = re.compile(rf"(?i)=\s{{0,3}}((?:{WORD})(?:(?:-|\s|(?<=d)\sand\s)(?:{WORD})){{0,9}})"
                      rf"(?![\w-]|\s(?:and|point|{ALTERED})s?\b)")
ASKED = re.compile(r"=\s{0,3}(?:\?|_{2,9}|\.{3}|…)")     # a result to come
RELATION = re.compile("[=≺≻≤≥≠]")
HOLDS = {"=": eq, "≺": lt, "≻": gt, "≤": le, "≥": ge, "≠": ne}
POWER_OF_TEN = re.compile(r"(?<![\w.,^])10\^([-+]?[0-9]{1,3})(?![\w^])")
MIXED = re.compile(r"(?<![\w.,/])([0-9]{1,3}) ([1-9][0-9]?/[1-9][0-9]?)(?![\w/]|\.[0-9])")       # 2 1/2
TOKEN = re.compile(rf"""
      (?P<glued>(?<=[0-9)])(?=\ ?\())                                # 5(3 + 2) is a product
    | (?P<minus>(?<![\w)%])-(?=[$(.0-9]))                      # of a negative number, if nothing is before it
    | (?P<sign>[xX](?=[ ]?[$(.0-9])|[-/](?!{LETTER})|\+|\*(?!\*))
    | (?P<space>(?:[\s$€£\\_'’])+|\*\*+)                                # ** is bold type
    | (?P<number>{NUMBER})
    | (?P<percent>%|percent\b)
    | (?P<variable>(?<=[0-9)])(?![ghlmst])[a-zA-Z](?!\w)|(?<!\w){LETTER}(?=\())    # 2y + 3, f(3)
    | (?P<word>[-/]?{LETTER}[\w'’]*(?:[-/]{LETTER}[\w'’]*)*(?:\^[0-9])?)
    | (?P<open>\() | (?P<close>\)) | (?P<relation>=(?:\s{{0,3}}=)*|[≺≻≤≥≠]) | (?P<other>.)
""", re.VERBOSE)
SIGNS = {"x": "*", "X": "*", "": "*"}
# arithmetic in words
SPOKEN = {"times", "plus", "minus", "divided", "multiplied", "by", "of", "more", "less", "than", "over"}
NO_VARIABLES = set("aghlmst")        # letters that are not variables after a number: `$5 a day * 3`
RATES = {"per", "a", "an", "each", "every", "apiece"}        # a unit after one of these is not the number's

# values: possible readings (`100 - 30%` has two), floats, maybe infinite or NaN. spelled: normal form.
# literals: the numbers in it. step: place value of the last decimal of a single number, else 0. cut: ended by
# an unmatched closing parenthesis. open: has unmatched opening parentheses.
Expression = namedtuple("Expression", "values spelled literals operators percent step open cut")
# One side of an equals sign. left, right: its Expression as the left side of the next equals sign and as the
# right side of the previous one, or None. *_unit: a known unit, "" without words, None for other words.
# label: words come first.
Side = namedtuple("Side", "left right left_unit right_unit label")
# operands: numbers on sides with an operator; results: numbers on sides without. computed: whether there are
# operators.
Equation = namedtuple("Equation", "left right true computed spelled operands results")
UNREADABLE = Equation(None, None, False, False, "", [], [])


def reasoned(text, answers, known=()):
    """Return whether all equations in a text are true and one leads from the question to the answer: it
    computes with a known number, and its result is an answer (perhaps rounded to an integer), or is used in a
    later equation that leads there, or in one that can't be parsed (`2x = 90 - 10`).

    answers: numbers to reach, any of them; none: any result counts. known: numbers of the question, which
    also count digit by digit (344 as 300, 40 and 4), as percentages and as fractions (half); none: any number
    counts."""
    found = list(read(text, unread=True))
    if not all(e.true for e in found):
        return False
    begin = {spelled(form) for number in known for form in forms_of(number)}
    steps = [(e, {*map(spelled, e.operands)}, {*map(spelled, e.results)}) for e in found]
    for e, operands, _ in steps:
        if not e.results and begin & operands:       # an unparsed statement passes on all its numbers
            begin |= operands
    needed = set()
    for e, operands, results in reversed(steps):
        if (not answers or not results or needed & results
                or any(reaches(r, a) for r in e.results for a in answers)):
            if e.computed and (not begin or begin & operands):
                return True
            needed |= operands or results
    return False


def reaches(result, answer):
    """Return whether an answer equals a result, or the integer below or above it, ignoring signs."""
    result = abs(result)
    answer = abs(answer)
    return near(result, answer) or float(answer).is_integer() and 1 <= result and abs(result - answer) < 1


def forms_of(number):
    """Yield the forms of a number in a calculation: itself, as a percentage, inverse, digit values."""
    yield number
    yield number / 100
    if number:
        yield 1 / number
    if float(number).is_integer() and abs(number) < 1e15:
        yield from _numbers.digits(abs(int(number)))


def near(a, b, step=0.0):
    """Return whether two numbers are equal: integers exactly, others within TOLERANCE or `step`."""
    if float(a).is_integer() and float(b).is_integer():
        return a == b
    difference = abs(a - b)
    larger = max(abs(a), abs(b))
    is_rounded = difference <= 0.500001 * step and difference <= ROUNDED * larger
    return difference <= TOLERANCE * larger or is_rounded


def spelled(number):
    """Return a number's normal form, without its sign."""
    return f"{abs(float(number)):.12g}"


def signature(text):
    """Return the equations of a text in normal form, joined; the text itself without any."""
    text = text[:LONGEST_TEXT]
    return " ".join(e.spelled for e in read(NOTE.sub("", text)) if e.computed) or " ".join(text.split())


# --- parsing ---

def read(text, unread=False):
    """Yield the Equations of a text. Those that can't be parsed have no values: they are false, or, with a
    variable or words, unread=True yields them with true=True."""
    if sum(text.count(sign) for sign in "=<>≤≥≠") > MOST:
        yield UNREADABLE
        return
    for part in [NOTE.sub("", text), *NOTE.findall(text)]:
        for statement in statements(part):
            if not RELATION.search(statement):
                continue
            tokens, relations = tokens_of_sides(statement)
            sides = [side_of(side) for side in tokens]
            computed = any(e and e.operators for side in sides for e in (side.left, side.right))
            passed = False
            for i, relation in enumerate(relations):
                equation = link(sides[i], sides[i + 1], relation, computed)
                if equation:
                    yield equation
                elif is_false(tokens[i:i + 2], sides[i:i + 2]):
                    yield UNREADABLE
                else:
                    passed = True
            if unread and passed:
                numbers = [float(_numbers.ungrouped(digits)) for digits in re.findall(NUMBER, statement)]
                yield Equation(None, None, True, False, "", numbers, [])


def statements(text):
    """Return the statements of a text, in one spelling of digits, signs and relations."""
    text = ARROW.sub("⇒", EQUALS.sub("=", DIGIT.sub(lambda m: str(int(m[0])), text)))
    text = _numbers.normal(joined(text))
    text = POWER_OF_TEN.sub(r"1e\1", text) if "10^" in text else text
    text = CLOSING.sub("", text)
    text = IN_WORDS.sub(in_digits, WRAPPING.sub("= ", ASKED.sub(" ", text)))
    if VERB.search(text):                    # the next pattern takes a third of the time
        text = RESULT.sub(with_equals, text)
    text = MIXED.sub(r"(\1+\2)", text)
    return BREAK.split(COMPARISON.sub(lambda m: COMPARED.get(m[1], m[1]), text))


def with_equals(found):
    """Return `5*3 = ` for `5*3 is` and `60/2 = ` for `60/2 is`, but `1/3 is` (5 eggs), `rows 1-3 are`, `a 9-5
    job is`, `12/5 is` (a day) or `2 of 10 are` unchanged."""
    if found["chain"] or not found["word"] or found["sign"] not in ("-", "/", "x", " of "):
        return f"{found[1]} = "
    a = int(found["a"] or 0)
    b = re.fullmatch(r"[\s$]{0,2}([1-9][0-9]{0,8})", found["b"])
    if found["sign"] == " of " or found["word"] == "are" or not b or a <= int(b[1]):
        return found[0]
    is_date = found["sign"] == "/" and a % int(b[1])
    return found[0] if is_date else f"{found[1]} = "


def in_digits(found):
    """Return an equals sign and a number in words, in digits: `= 407` for `= four hundred and seven`."""
    total = part = 0
    for word in re.findall("[a-z]+", found[1].lower()):
        scale = _numbers.SCALES.get(word, 0)
        part = scale * (part or 1) if scale else part + _numbers.WORDS.get(word, 0)
        if scale > 100:
            total += part
            part = 0
    return f"= {total + part}"


def is_false(tokens, sides):
    """Return whether a statement about two sides that `link` can't read is false: a side is empty, the result
    has two numbers in a row or a stray comma or point, both are amounts of different quantities, or neither
    has a word or variable (`5 = 5` is true)."""
    a = sides[0].left
    b = sides[1].right
    units = {_units.size_of(unit)[0] for unit in (sides[0].left_unit, sides[1].right_unit) if unit}
    if a and b and len(units) == 2 and not units & {"money", "calendar"}:
        return True                                  # `1 hour = 60 km`
    if not tokens[0]:                                # `**Total:** = 5 * 3 = 15`
        return False
    result = next((run for run, _ in stretches(tokens[1]) if run), [])
    kinds = " ".join(text if text in (",", ".") else name for name, text in result)
    is_broken = re.search("[,.]|(number|close) number(?! percent)", kinds) and "variable" not in kinds
    if not tokens[1] or not b and is_broken:
        return True
    words = any(name in ("word", "variable") for side in tokens for name, _ in side)
    return not words and not (a and b and near(a.values[0], b.values[0]))


def joined(text):
    """Return a text without line breaks beside an equals sign or after an operator."""
    lines = [[]]
    for line in text.split("\n"):
        line = line.strip()
        if not line:
            continue
        if lines[-1] and not line.startswith("=") and lines[-1][-1][-1] not in "=+-*/×÷⋅·−":
            lines.append([])
        lines[-1].append(line)
    return "\n".join(map(" ".join, lines))


def link(left, right, relation, chained):
    """Return the Equation between two adjacent Sides, or None. chained: a side of the statement has an
    operator, so that plain numbers are results and not a label or definition."""
    a = left.left
    b = right.right
    if not a or not b or a.cut or b.open or left.label and not a.operators:
        return None                                  # a label: `total 5 = 5 * 1`
    factors = factors_of(a, b, left.left_unit, right.right_unit, relation, chained)
    if factors is None:
        return None
    right_values = b.values
    if b.percent and not b.operators:                # 50 / 200 * 100 = 25%
        right_values = (*b.values, 100 * b.values[0])
    true = any(HOLDS[relation](0.0 if near(f * x, y, max(f * a.step, b.step)) else f * x - y, 0.0)
               for f in factors for x in a.values for y in right_values)
    if relation != "=":
        return Equation(a.values[0], b.values[0], true, False, "", [], [])
    operands = [n for e in (a, b) if e.operators for n in e.literals]
    results = [n for e in (a, b) if not e.operators for n in e.literals]
    results = results or [*a.values, *b.values, *b.literals]
    text = f"{a.spelled}={b.spelled}"
    return Equation(a.values[0], b.values[0], true, bool(operands), text, operands, results)


def factors_of(a, b, unit_a, unit_b, relation, chained):
    """Return the factors one of which must convert the left Expression to the right one: 1 and ratios of
    units; None if the sides need not be equal."""
    if relation != "=":
        return None if None in (unit_a, unit_b) else [ratio(unit_a, unit_b) if unit_a and unit_b else 1.0]
    known = sorted({unit_a, unit_b} - {"", None})
    kinds = {_units.size_of(unit)[0] for unit in known}
    if a.operators:                                  # `60 minutes * 60 = 3600 seconds`, `2 * 500 gram = 1 kg`
        return [1.0, ratio(unit_a, unit_b)] if len(known) == 2 and len(kinds) == 1 else [1.0]
    if unit_a is None or len(kinds) > 1:             # `4 boxes = 4 * 12 eggs`, `1 hour = 60 km`
        return None
    if b.operators and not unit_a:                   # `12 = 4 * 3 eggs`
        return [1.0]
    if unit_b is None:
        return None
    if unit_a and unit_b:                            # `4 weeks = 4 * 7 days`, `1 kg = 1000 gram`
        return [1.0, ratio(unit_a, unit_b)] if b.operators else [ratio(unit_a, unit_b)]
    if not chained:                                  # `5 = 5`, `total = 5`
        return None
    if known:                          # `6 kg = 6 * 1000`, `60 * 60 = 3600 = 1 hour`, in any unit of the kind
        size = _units.size_of(known[0])[1]
        ratios = [float(size / other) for other in _units.SIZES_OF_KIND[kinds.pop()]]
        return [1.0, *(ratios if unit_a else [1 / r for r in ratios])]
    return [1.0]


def ratio(unit_a, unit_b):
    return float(_units.size_of(unit_a)[1] / _units.size_of(unit_b)[1])


def tokens_of_sides(statement):
    """Return a statement's tokens [(kind, text)], one list per side of a relation, and the relations."""
    start = 0
    while marker := MARKER.match(statement, start):
        start = marker.end()
    sides = [[]]
    relations = []
    for token in TOKEN.finditer(statement, start):
        if token.lastgroup == "relation":
            relations.append(token[0][0])
            sides.append([])
        elif token.lastgroup != "space":
            sides[-1].append((token.lastgroup, token[0]))
    return sides, relations


def side_of(tokens):
    """Return the Side of a list of tokens."""
    runs = stretches(tokens)
    first, right_unit = next((run for run in runs if run[0]), runs[0])        # `= about 5`
    last, left_unit = runs[-1]
    left = expression(last)
    if right_unit != "" and [name for name, _ in first[-2:]] == ["number", "number"]:
        if not re.match("0[0-9]*$", first[-1][1]):   # `80 18-inch lengths`, not `8 0 lengths`
            first = first[:-1]
        right_unit = None
    right = expression(first)
    return Side(left, right, left_unit, right_unit, label=len(runs) > 1)


def stretches(side):
    """Return [(tokens without words, unit)] of a side, cut before each number that follows words only: of `24
    clips in May and 48 + 24` the first stretch belongs to a preceding equals sign, the last to a following
    one. unit: the known unit right after a stretch's last number, "" without words, None for other words."""
    runs = [[]]
    pending = []                                     # words since the last token of another kind
    inside = []
    units = []

    def unit():
        if not pending:
            return None if inside else ""            # `3 boxes * 12`
        known = _units.canonical(pending[0])
        return known if _units.size_of(known) and not RATES & {*pending[1:]} else None
    for kind, text in [*side, ("end", "")]:
        if kind == "word":
            pending.append(text.strip("-/"))
            continue
        run = runs[-1]
        words = [word.lower() for word in pending]
        if words:
            if (run and len(words[0]) == 1 and words[0] not in NO_VARIABLES) or (not run and kind == "sign"):
                run.append(("variable", text))       # 2 y + 3, y + 3
            if words == ["of"] and run and (run[-1][0] == "percent" or ("sign", "/") in run[-2:-1]):
                run.append(("sign", "*"))            # 20% of 50, 1/2 of 10
            elif kind in ("number", "open") or (kind == "minus" and not run):
                if run and set(words) <= SPOKEN:
                    run.append(("variable", text))
                else:
                    units.append(unit())
                    runs.append([])
                    inside = []
            elif kind != "end":
                inside = pending
        if kind != "end":
            pending = []
            runs[-1].append((kind, text))
    units.append(unit())
    return list(zip(runs, units))


def expression(tokens):
    """Return the Expression of tokens, or None. An added or subtracted percentage has two readings: 0.3, and
    three tenths of the preceding sum."""
    found = evaluate(tokens)
    if found and found.operators and any(kind == "percent" for kind, _ in tokens):
        found = found._replace(values=found.values + evaluate(tokens, relative=True).values)
    return found


def evaluate(tokens, relative=False):
    """Return the Expression of tokens, with * and / before + and -, or None. With unclosed parentheses it is
    the innermost part, which can be a left side; the part before an unmatched closing parenthesis can be a
    right side: `(3 + 4 = 7)`. relative: reading of percentages, see `expression`."""
    # one frame per open parenthesis: four values for `operand`, number of operators, start in spelled, in
    # literals
    stack = [[0.0, 0.0, "+", 1, 0, 0, 0]]
    spelled = []
    literals = []
    complete = False                                 # whether the last token ended an operand
    cut = False
    step = 0.0
    for kind, text in tokens:
        if complete and kind in ("sign", "minus", "glued"):
            stack[-1][2] = sign = SIGNS.get(text, text)
            stack[-1][4] += 1
            complete = False
            spelled.append(sign)
        elif complete and kind == "percent":
            frame = stack[-1]
            whole = frame[0] if relative and frame[2] in "+-" and frame[0] else 1.0
            frame[1] *= 100 if frame[2] == "/" else 0.01 * whole
            step *= 0.01
            spelled.append("%")
        elif complete and kind == "close" and len(stack) > 1:
            total, product, _, _, operators, *_ = stack.pop()
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
            plain = _numbers.ungrouped(text)
            value = float(plain)
            decimals = plain.partition(".")[2]
            step = 10.0 ** -len(decimals) if decimals.isdecimal() else 0.0
            complete = True
            operand(stack[-1], value)
            spelled.append(f"{value:.12g}")
            literals.append(value)
        elif not complete and kind == "open" and len(stack) <= DEEPEST:
            spelled.append("(")
            stack.append([0.0, 0.0, "+", 1, 0, len(spelled), len(literals)])
        else:
            return None
    if not complete:
        return None
    total, product, _, _, operators, start, first = stack[-1]
    value = total + product if math.isfinite(total + product) else math.nan
    return Expression((value,), "".join(spelled[start:]), literals[first:], operators, spelled[-1] == "%",
                      0.0 if operators else step, len(stack) > 1, cut)


def operand(frame, value):
    """Add a number to a frame [sum, last product, operator, 1 or -1 for its own minus, ...]."""
    value *= frame[3]
    frame[3] = 1
    if frame[2] == "*":
        frame[1] *= value
    elif frame[2] == "/":
        frame[1] = frame[1] / value if value else math.nan
    else:
        frame[0] += frame[1]
        frame[1] = -value if frame[2] == "-" else value
