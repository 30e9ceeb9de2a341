"""Predict the output of a small program. Programs are generated together with their trace; nothing is
executed, in particular no model output.

The argument is a level, 0 to 2 (default 1): 0 three kinds and small numbers, for a model of a million
parameters that trains for minutes; 1 numbers mostly below 30 and two to four steps; 2 larger numbers and more
steps. Two in ten documents have a slip. Most documents that index a list count from 1."""
from tasks import _answers, _numbers, _questions, _steps
from tasks._steps import Steps

INSTRUCTION = ("Follow the program in short steps, each with the value that a line leaves, such as "
               "`x: 7 + 5 = 12.` Then give what it prints within <answer></answer>.")
WORDS = ("cat dog sun map pen owl fig jam kit log mud net oak pig rat sky toy urn vet web yak zip bird fish "
         "lamp milk").split()
TINY = ("lines", "branch", "list")   # kinds of level 0
PHRASINGS = ("What does this program print?\n{}", "{}\nWhat is printed?")


def draw(rng, level=1):
    """Return (key, question). The key ignores the phrasing."""
    kind = rng.choice(list(KINDS) if level else TINY)
    given, program = KINDS[kind][0](rng, level)
    question = {"question": rng.choice(PHRASINGS).format(program), "kind": kind, "given": given}
    return program, question | {"answer": str(worked(question, Steps()))}


def worked(question, steps, first=0):
    """Write the steps and return the output. first: index of a list's first value."""
    more = [first] if question["kind"] == "list" else []
    return KINDS[question["kind"]][1](steps, *question["given"], *more)


# For each kind, draw_KIND(rng, level) returns (arguments of the steps, program), and KIND_worked writes the
# steps.

def draw_lines(rng, level):
    """Draw assignments [target, source, sign, number] to two names, the first with an initial value."""
    x, y = rng.sample("abcdkmnpqxyz", 2)
    most = 19 * level or 9
    start = rng.randint(2, most)
    values = {x: start}
    lines = []
    for i in range(level + 1 + (rng.random() < 0.3)):
        source = rng.choice(list(values))
        target = y if i == 0 else rng.choice((x, y))
        sign = rng.choice("++--*")
        number = rng.randint(2, 4) if sign == "*" else rng.randint(2, most)
        if sign == "-" and number > values[source]:
            sign = "+"
        before = values[source]
        values[target] = {"+": before + number, "-": before - number, "*": before * number}[sign]
        lines.append([target, source, sign, number])
    body = "\n".join(f"{target} = {source} {sign} {number}" for target, source, sign, number in lines)
    return [x, start, lines], f"{x} = {start}\n{body}\nprint({lines[-1][0]})"


def lines_worked(steps, x, start, lines):
    values = {x: start}
    for target, source, sign, number in lines:
        taken = steps.choose(source, [*values, source]) if len(values) > 1 else source
        values[target] = steps.equation(values[taken], sign, number, label=target)
    return values[lines[-1][0]]


def draw_loop(rng, level):
    """Draw a start, a number of iterations, and an addend, or None for the loop variable."""
    times = rng.randint(2, 2 + 2 * level)
    start = rng.randint(1, 29 * level)
    number = rng.choice((None, rng.randint(2, 15 * level)))
    added = "i" if number is None else number
    return [start, times, number], f"s = {start}\nfor i in range({times}):\n    s = s + {added}\nprint(s)"


def loop_worked(steps, start, times, number):
    total = start
    for i in range(times - steps.slips()):
        total = steps.equation(total, "+", i if number is None else number)
    return total


def draw_branch(rng, level):
    most = 49 * level or 19
    x = rng.randint(2, most)
    sign = rng.choice("<>")
    bound = rng.randint(2, most)
    more, less = rng.sample(range(2, 20 * level or 10), 2)
    program = f"x = {x}\nif x {sign} {bound}:\n    x = x + {more}\nelse:\n    x = x - {less}\nprint(x)"
    return [x, sign, bound, more, less], program


def branch_worked(steps, x, sign, bound, more, less):
    holds = steps.choose(x > bound if sign == ">" else x < bound, (True, False))
    steps.texts.append(f"{x} {sign} {bound} {'yes' if holds else 'no'}.")
    return steps.equation(x, "+" if holds else "-", more if holds else less)


def draw_list(rng, level):
    """Draw values and two indices to add or subtract, such that indices from 1 would give another result."""
    while True:
        values = rng.sample(range(1, 30 * level or 20), 2 + max(level, 1) + (rng.random() < 0.5))
        i, j = rng.sample(range(1, len(values)), 2)
        if abs(values[i] - values[i - 1]) != abs(values[j] - values[j - 1]):
            break
    sign = "+" if values[i] < values[j] else rng.choice("+-")
    return [values, i, sign, j], f"a = {values}\nprint(a[{i}] {sign} a[{j}])"


def list_worked(steps, values, i, sign, j, first):
    picked = []
    for index in (i, j):
        picked.append(steps.choose(values[index - first], values))
        steps.texts.append(f"a[{index}] is {picked[-1]}.")
    return steps.equation(picked[0], sign, picked[1])


def draw_word(rng, level):
    """Draw a word, an index of a letter, and its number of repetitions, or 0: appended to the word."""
    word = rng.choice(WORDS) + (rng.choice(WORDS) if level > 1 else "")
    index = rng.randint(1, len(word) - 1)
    times = rng.choice((0, 2, 3, 4))
    printed = f"w[{index}] * {times}" if times else f"w + w[{index}]"
    return [word, index, times], f'w = "{word}"\nprint({printed})'


def word_worked(steps, word, index, times):
    letter = steps.choose(word[index], list(word))
    steps.texts.append(f"w[{index}] is {letter}.")
    return letter * steps.choose(times, [n for n in (2, 3, 4) if n != times]) if times else word + letter


KINDS = {"lines": (draw_lines, lines_worked), "loop": (draw_loop, loop_worked),
         "branch": (draw_branch, branch_worked), "list": (draw_list, list_worked),
         "word": (draw_word, word_worked)}


# --- the task ---

def invites_mistake(question):
    return question["kind"] == "list"


# the mistake: list indices counted from 1
solution, wrong_solution = _steps.completions(worked, invites_mistake, 1)
check, questions, documents = _questions.with_levels("code", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts), see _answers.grade_steps. `print 7` is the answer 7."""
    answer = _answers.words(completion[:_numbers.LONGEST_TEXT])
    answer = _numbers.unwrapped(answer.removeprefix("print "))
    correct = _answers.same(answer, question["answer"])
    return _answers.grade_steps(worked, question, completion, answer, correct)
