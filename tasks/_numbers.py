"""Parse numbers as people and models write them, for all tasks; docs/tasks.md lists the accepted
forms.

Model output is never evaluated, and parsing takes time linear in the length of a text."""
import math
import re
from fractions import Fraction

from tasks import _units

LONGEST_TEXT = 10_000                # characters read of a completion: the worst take 20 ms, honest ones 1 ms
LONGEST = 40                         # characters of a number: enough for honest ones, few enough to be cheap

VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5",
          "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
MOST = Fraction(10) ** 300           # larger numbers are rejected; they would overflow a float
SPACES = "\u00a0\u2009\u202f"        # thousands separators: no-break, thin, and narrow no-break space
SEPARATORS = str.maketrans("", "", f", {SPACES}")
GROUPS = rf"[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]{{1,3}}(?:[ {SPACES}][0-9]{{3}})+(?![0-9]|-[a-zA-Z])"
NUMBER = rf"(?:{GROUPS}|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,3}}(?!\w))?|\.[0-9]+"
SIGN = r"(?P<sign>[-+]?)\s?"
NUMERIC = re.compile(rf"{SIGN}(?P<digits>{NUMBER})(?:\s?[*x]\s?10\^(?P<power>[-+]?[0-9]{{1,3}}))?\.?")
# a decimal comma that can't be a thousands separator: `1,5`, `0,125`, `1.000,99`
COMMA = re.compile(rf"{SIGN}(?![1-9][0-9]{{0,2}},[0-9]{{3}}\.?$)"
                   r"(?P<whole>[0-9]+|[0-9]{1,3}(?:\.[0-9]{3})+),(?P<decimals>[0-9]+)\.?")
POWER = re.compile(rf"{SIGN}10\^(?P<power>[-+]?[0-9]{{1,3}})\.?")
RATIO = re.compile(rf"{SIGN}(?P<open>\()?(?:(?P<whole>[0-9]{{1,12}})[+ ])?(?P<above>[0-9]{{1,12}})\s?/\s?"
                   r"(?P<below>[0-9]{1,12})(?(open)\))\.?")
LABEL = re.compile(r"^(?:[a-zA-Z]\s?)?=\s?")       # `x = 11`, `= 11`
PRICE = re.compile(r"(?P<sign>[-+]?)\s?(?P<currency>US\$|USD|EUR|GBP|[$€£¥₹])\s?(?P<number>.*)")
WITH_UNIT = re.compile(r"(?P<number>.*?[0-9)])\s{0,2}(?P<unit>(?:[%$€£¥₹¢°/(]|[^\W\d_])"
                       r"(?:[^\W\d_]|\^[23]|[\s'’/%°().$€£&-])*)")
WORDS = dict(zip("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
                 "sixteen seventeen eighteen nineteen".split(), range(1, 20)))
WORDS |= dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10)))
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10 ** 6, "billion": 10 ** 9,
          "trillion": 10 ** 12}
# Words after a number that give it another value, or another number to choose.
ALTER = {*WORDS, *SCALES, *"half halves thirds quarters fourths fifths sixths sevenths eighths ninths tenths "
         "hundredths thousandths squared cubed pi π sqrt root mod factorial".split()}
WRAPPED = re.compile(r"(?:\*\*(.*)\*\*|\*(.*)\*|`(.*)`|\"(.*)\"|'(.*)'|“(.*)”|\\boxed\{(.*)\}|\\\((.*)\\\)|"
                     r"\\\[(.*)\\\]|\$(.*)\$)\.?", re.DOTALL)

# --- characters ---

SAME = str.maketrans({"⋅": "*", "∙": "*", "·": "*", "×": "*", "✕": "*", "✖": "*", "∗": "*", "＊": "*",
                      "÷": "/", "∕": "/", "⁄": "/", "−": "-", "–": "-", "‒": "-", "‐": "-", "‑": "-",
                      "﹣": "-", "－": "-", "＋": "+", "＝": "=", "≈": "=", "≃": "=", "≅": "=",
                      "℃": "°C", "℉": "°F"})
FRACTION = re.compile(r"(?:(?<![\w.,^])([0-9]{1,12})\s?)?\\frac\s?(?:\{([^{}]{0,200})\}|([0-9]))\s?"
                      r"(?:\{([^{}]{0,200})\}|([0-9]))")
BRACED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\s?\{([^{}]{0,200})\}")
NAMED_FRACTION = re.compile(r"\\[cdt]frac(?![a-zA-Z])")
DEGREE = re.compile(r"\^?\\(?:circ|degree)(?![a-zA-Z])")
EXPONENT = re.compile("(?<=[0-9)])[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
TEX = {"times": "*", "cdot": "*", "ast": "*", "div": "/", "approx": "=", "simeq": "=", "left": "",
       "right": "", ",": "", ";": " ", "!": "", "quad": " ", "%": "%", "$": "$", "(": " ", ")": " ", "[": " ",
       "]": " ", " ": " "}
COMMAND = re.compile(r"\\(times|cdot|ast|div|approx|simeq|left|right|quad)(?![a-zA-Z])|\\([ ,;!%$()\[\]])")
BRACES = re.compile(r"\^\{([^{}]{0,20})\}| ?\{, ?\}|,\\!\s*")       # 10^{3}, 1{,}000, 1,\! 000
FRACTION_CHARACTER = re.compile(f"(?:(?<![0-9])([0-9]{{1,12}})\\s?)?([{''.join(VULGAR)}])")
AND_A_PART = re.compile(r"(?i)\band (?:an?|one) (?:quarter|third|(?:four|fif|six|seven|eigh|nin|ten)th)\b")


def normal(text):
    """Return a text with ASCII in place of Unicode and TeX signs: × and \\cdot become *, the minus sign -,
    \\frac{1}{2} and ½ (1/2), ≈ =."""
    if not text.isascii():
        text = EXPONENT.sub(lambda m: "^" + m[0].translate(SUPERSCRIPTS), text.translate(SAME))
        text = FRACTION_CHARACTER.sub(lambda m: f"({m[1] + '+' if m[1] else ''}{VULGAR[m[2]]})", text)
    if "{" in text or "\\!" in text:
        text = BRACES.sub(lambda m: "," if m[1] is None else f"^{m[1]}", text)
    if "\\" in text:
        text = DEGREE.sub("°", NAMED_FRACTION.sub(r"\\frac", text)).replace("~", " ")
        for _ in range(4):                           # deeper nesting is left unchanged
            before = text
            text = BRACED.sub(r" \1 ", FRACTION.sub(fraction, text))
            if text == before:
                break
        text = COMMAND.sub(lambda m: TEX[m[1] or m[2]], text).replace(" ^", "^")
    return text


def fraction(found):
    """Return a TeX fraction written with a slash, and a mixed number, 2\\frac{1}{2}, as (2+1/2)."""
    whole = found[1] or ""
    above, below = ((found[i] or found[i + 1] or "").strip() for i in (2, 4))
    if not re.fullmatch("-?[0-9]{1,12}/[0-9]{1,12}", f"{above}/{below}"):
        return f"{whole}(({above})/({below}))"
    is_mixed = whole and 0 < int(above) < int(below)
    return f"({whole}+{above}/{below})" if is_mixed else f"{whole}({above}/{below})"


# --- numbers ---

def number(text, asked=None):
    """Return the exact value of a text as a Fraction, or None unless the whole text is one number (`5 or 6`
    is not), perhaps with a currency sign.

    asked: _units.Asked; other words may follow the number then, but no unit that it does not allow."""
    if len(text) > 5 * LONGEST:
        return None
    text = LABEL.sub("", re.sub(r"^\$(.*)\$", r"\1", normal(unwrapped(text)).strip()))     # TeX: $1000$ km
    currency = unit = ""
    if found := PRICE.fullmatch(text):
        currency = found["currency"]
        text = found["sign"] + found["number"]
    value = plain_number(text)
    if value is None and (found := WITH_UNIT.fullmatch(_units.in_one_word(text))):
        value = plain_number(found["number"])
        unit = found["unit"].strip()
    if value is None or asked is None:
        return value if unit in ("", *"$€£¥₹") else None
    return with_words(value, currency, unit, asked)


def with_words(value, currency, unit, asked):
    """Return the value of a number with a currency before it and a unit, or any words, after it; None if they
    alter it (`5 and a half`, `5x`) or `asked` does not allow them."""
    if AND_A_PART.search(unit):
        return None
    first, _, rest = unit.partition(" ")
    amounts = {"K": "thousand", "M": "million", "B": "billion"} if currency else {}
    scale = ({"k": "thousand"} | amounts).get(first, first.lower().removesuffix("s"))
    if scale in SCALES:
        value *= 1 if scale in asked.words else SCALES[scale]
        unit = rest
    for word in _units.WORD.findall(unit):
        if word in _units.STOPS - {"a", "an"}:                # two: 20 people in two days
            break
        is_variable = len(word) == 1 and "a" < word <= "z" and not _units.senses(word)      # 5x
        said = {word.lower().removesuffix("s"), str(WORDS.get(word.lower()))}
        if is_variable or word.lower() in ALTER and not said & asked.words:
            return None
        if word.lower() in ALTER:                    # `$20 four months from now`
            unit = unit.partition(word)[0]
            break
    allowed = abs(value) <= MOST and all(_units.allows(asked, text) for text in (currency, unit))
    return value if allowed else None


def written(text):
    """Return a number's text in a form that Fraction parses, unchanged if possible; None for other texts."""
    value = number(text)
    if value is None:
        return None
    text = text.strip().replace(",", "")
    try:
        return text if Fraction(text) == value else str(value)       # in `1,5` the comma counts
    except ValueError:
        return str(value)


def unwrapped(text):
    """Return a text without an answer's wrapping: spaces, bold, quotation marks, \\boxed{}, $."""
    text = text.strip()
    for _ in range(10):                              # bounds the time
        found = WRAPPED.fullmatch(text)
        if not found:
            break
        text = found[found.lastindex].strip()
    return text


def plain_number(text):
    """Return the value as `number` does, for a normalised text without wrapping."""
    if len(text) > LONGEST:
        return None
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if found := COMMA.fullmatch(text):
        value = Fraction(f"{found['whole'].replace('.', '')}.{found['decimals']}")
    elif found := NUMERIC.fullmatch(text):
        value = Fraction(ungrouped(found["digits"]))
        if found["power"]:
            value *= Fraction(10) ** int(found["power"])
    elif found := POWER.fullmatch(text):
        value = Fraction(10) ** int(found["power"])
    elif found := RATIO.fullmatch(text):
        above = int(found["above"])
        below = int(found["below"])
        # 6000/1000 is an unfinished calculation
        if below < 2 or math.gcd(above, below) > 1 or found["whole"] and above > below:
            return None
        value = int(found["whole"] or 0) + Fraction(above, below)
    else:
        return None
    if abs(value) > MOST:
        return None
    return -value if found["sign"] == "-" else value


def digits(n):
    """Return the values of an integer's digits without zeros, 400 and 7 for 407; n itself below 10."""
    text = str(n)
    if n < 10:
        return [n]
    return [int(digit) * 10 ** (len(text) - 1 - i) for i, digit in enumerate(text) if digit != "0"]


def ungrouped(digits):
    """Return a number's digits without thousands separators."""
    return digits.translate(SEPARATORS)


def close(value, correct, tolerance):
    """Return whether a value differs from the correct one by at most that share of it."""
    return abs(value - correct) <= Fraction(tolerance) * abs(correct)
