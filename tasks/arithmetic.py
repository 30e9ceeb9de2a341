"""Integer arithmetic in one or two steps, `What is 12 * 34 - 5?`, with solutions digit by digit. The argument
is the number of digits, 1 to 7 (default 2), since larger products are not exact in float64."""
from tasks import _answers, _numbers, _questions, _steps

INSTRUCTION = ("Work the question out digit by digit in short equations such as 12 * 30 = 360. Then give "
               "the number alone within <answer></answer>.")
FORMS = (                            # (form, its operators in the order of evaluation)
    ("{} + {}", "+"), ("{} - {}", "-"), ("{} * {}", "*"),
    ("{} + {} - {}", "+-"), ("{} * {} + {}", "*+"), ("{} * {} - {}", "*-"), ("({} + {}) * {}", "+*"),
    ("({} - {}) * {}", "-*"),
)
PHRASINGS = ("What is {}?", "Compute {}.", "{} = ?", "Work out {}.")


def check(argument):
    if argument is not None and not (argument.isdecimal() and 1 <= int(argument) <= 7):
        raise ValueError("The argument of arithmetic is the number of digits, 1 to 7, and "
                         f"{argument or 'nothing'} was given.")


def draw(rng, digits):
    """Return (key, question). The key ignores the phrasing and the order of a sum's or product's numbers."""
    form, signs = rng.choice(FORMS)
    numbers = [rng.randrange(10 ** rng.randint(1, digits)) for _ in range(len(signs) + 1)]
    if signs[0] == "-":
        numbers[:2] = sorted(numbers[:2], reverse=True)
    key = f"{signs} {sorted(numbers[:2])} {numbers[2:]}"
    text = rng.choice(PHRASINGS).format(form.format(*numbers))
    question = {"question": text, "signs": signs, "numbers": numbers}
    return key, question | {"answer": str(steps(signs, numbers)[1])}


def steps(signs, numbers):
    """Return (equations, result), computed digit by digit."""
    lines = []
    value = numbers[0]
    for sign, other in zip(signs, numbers[1:]):
        parts = _numbers.digits(other)
        if sign == "*":
            lines += [f"{value} * {part} = {value * part}." for part in parts]
            value, *parts = [value * part for part in parts]
        for part in parts:
            result = value - part if sign == "-" else value + part
            lines.append(f"{value} {sign.replace('*', '+')} {part} = {result}.")
            value = result
    return lines, value


def solution(question):
    lines, result = steps(question["signs"], question["numbers"])
    return _steps.completion(" ".join(lines), result)


def questions(split, seed=0, n=None, argument=None):
    digits = int(argument or 2)

    def most():
        return sum(10 ** (digits * (len(signs) + 1)) for _, signs in FORMS)
    return _questions.distinct(lambda rng: draw(rng, digits), split, seed, n, most)


def documents(split, seed=0, argument=None):
    drawn = _questions.draw_documents(lambda rng: draw(rng, int(argument or 2)), split, seed)
    return [_questions.document(q, solution(q)) for q in drawn]


reward = _answers.grade
