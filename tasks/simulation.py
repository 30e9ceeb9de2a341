"""Simulate a process: a walking robot, a stack, switched lamps, a counter with a rule, a ball under swapped
cups. The reasoning is the state after each step.

The argument is a level, 0 to 2 (default 1): 0 only stacks, lamps and cups, for a model of a million
parameters that trains for minutes; 1 two to four steps; 2 about twice as many. Two in ten documents have a
slip. Most documents with a stack pop from the wrong end, as if it were a queue."""
import re

from tasks import _answers, _numbers, _questions, _steps
from tasks._steps import Steps

INSTRUCTION = ("Write what is there after each step, such as `3 north (2, 8).` or `pop ab.` or "
               "`swap 1 2: 1.` Then give the end within <answer></answer>.")
WAYS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
TINY = ("stack", "lamps", "cups")    # kinds of level 0
LETTERS = "abcdefghkmnpqrstuvwxyz"
STEP = re.compile(r"[0-9=]|^(?:push|pop|swap)\b")    # a sentence that matches is a step


def draw(rng, level=1):
    """Return (key, question). The key ignores the phrasing."""
    kind = rng.choice(list(KINDS) if level else TINY)
    given, phrasings = KINDS[kind][0](rng, max(level, 1))
    question = {"question": rng.choice(phrasings), "kind": kind, "given": given}
    return f"{kind} {given}", question | {"answer": str(worked(question, Steps()))}


def worked(question, steps, end=-1):
    """Write the steps and return the answer. end: index that a stack's pop removes."""
    more = [end] if question["kind"] == "stack" else []
    return KINDS[question["kind"]][1](steps, *question["given"], *more)


# For each kind, draw_KIND(rng, level) returns (arguments of the steps, phrasings), and KIND writes the steps.

def draw_robot(rng, level):
    x = rng.randint(0, 9)
    y = rng.randint(0, 9)
    moves = [[rng.randint(1, 6 * level), way] for way in rng.sample(list(WAYS), 3)][:rng.randint(2, 3)]
    moves += [[rng.randint(1, 9), rng.choice(list(WAYS))] for _ in range(2 * (level - 1))]
    told = ", ".join(f"{n} {way}" for n, way in moves)
    return [x, y, moves], (f"A robot at ({x}, {y}) goes {told}. Where is it?",
                           f"Start at ({x}, {y}), go {told}. Where?")


def robot(steps, x, y, moves):
    for n, way in moves:
        dx, dy = WAYS[steps.choose(way, list(WAYS))]
        x = x + n * dx
        y = y + n * dy
        steps.texts.append(f"{n} {way} ({x}, {y}).")
    return f"({x}, {y})"


def draw_stack(rng, level):
    """Draw letters to push, "" for a pop, such that a queue would end with another letter."""
    while True:
        n = rng.randint(4, 5) if level == 1 else rng.randint(7, 9)
        operations = [rng.choice(("", letter, letter)) for letter in rng.sample(LETTERS, n)]
        heights = [sum(1 if letter else -1 for letter in operations[:i + 1]) for i in range(n)]
        if min(heights) > 0 and stack(Steps(), operations, -1) != stack(Steps(), operations, 0):
            break
    told = ", ".join(f"push {letter}" if letter else "pop" for letter in operations)
    return [operations], (f"A stack is empty. {told.capitalize()}. What is on top?",
                          f"Empty stack: {told}. Top?")


def stack(steps, operations, end):
    pile = ""
    for letter in operations:
        taken = end if letter else steps.choose(end, (0, -1))
        pile = pile + letter if letter else pile[1:] if taken == 0 else pile[:-1]
        steps.texts.append(f"{'push' if letter else 'pop'} {pile}.")
    return pile[-1]


def draw_lamps(rng, level):
    lamps = rng.choices((0, 1), k=4 + 2 * (level - 1))
    switched = rng.sample(range(1, len(lamps) + 1), rng.randint(2, 3) + level - 1)
    shown = "".join(map(str, lamps))
    told = ", ".join(map(str, switched))
    return [lamps, switched], (f"Lamps {shown} (1 is on). Switch {told}. How many are on?",
                               f"Of lamps {shown} switch {told} (1 is on). How many are on now?")


def lamps(steps, lamps, switched):
    lamps = list(lamps)
    for number in switched:
        lamps[steps.choose(number, range(1, len(lamps) + 1)) - 1] ^= 1
        steps.texts.append(f"{number} {''.join(map(str, lamps))}.")
    return sum(lamps)


def draw_counter(rng, level):
    start = rng.randint(3, 40 * level)
    odd = rng.choice((1, 3, 5, 7))
    times = rng.randint(2, 3) + 2 * (level - 1)
    rule = f"halve it if even, else add {odd}"
    return [start, odd, times], (f"Start with {start}. {times} times: {rule}. What is it then?",
                                 f"From {start}, {times} times: {rule}. The end?")


def counter(steps, value, odd, times):
    for _ in range(times - steps.slips()):
        value = steps.equation(value, "+", odd) if value % 2 else steps.equation(value, "/", 2)
    return value


def draw_cups(rng, level):
    ball = rng.randint(1, 3 + (level > 1))
    n = rng.randint(2, 4) + 2 * (level - 1)
    swaps = [sorted(rng.sample(range(1, 4 + (level > 1)), 2)) for _ in range(n)]
    told = ", ".join(f"{a} and {b}" for a, b in swaps)
    return [ball, swaps], (f"A ball is under cup {ball}. Swap cups {told}. Where is the ball?",
                           f"Ball under cup {ball}; swap {told}. Which cup has it?")


def cups(steps, ball, swaps):
    for a, b in swaps:
        ball = steps.choose({a: b, b: a}.get(ball, ball), (1, 2, 3))
        steps.texts.append(f"swap {a} {b}: {ball}.")
    return ball


KINDS = {"robot": (draw_robot, robot), "stack": (draw_stack, stack), "lamps": (draw_lamps, lamps),
         "counter": (draw_counter, counter), "cups": (draw_cups, cups)}


# --- the task ---

def invites_mistake(question):
    return question["kind"] == "stack"


# the mistake: pop takes from the bottom
solution, wrong_solution = _steps.completions(worked, invites_mistake, 0)
check, questions, documents = _questions.with_levels(
    "simulation", draw, solution, wrong_solution, invites_mistake)


def is_right(answer, question):
    """Return whether an answer is right. A position, `(3, 9)`, may have both parentheses or none; words may
    follow a number, and `cup` precede it."""
    right = question["answer"]
    if "," not in right:
        value = _numbers.number(answer.removeprefix("under ").removeprefix("cup "),
                                _answers.asked_unit(question))
        return value == _numbers.number(right) if value is not None else _answers.same(answer, right)
    position = re.fullmatch(r"\((.*)\)|([^()]*)", answer)
    parts = (position[1] or position[2] or "").split(",") if position else []
    expected = right.strip("()").split(",")
    return [_numbers.number(part) for part in parts] == [_numbers.number(part) for part in expected]


def reward(question, completion):
    """Return (score, parts), see _answers.grade_steps."""
    answer = _answers.words(completion[:_numbers.LONGEST_TEXT])
    correct = is_right(answer, question)
    return _answers.grade_steps(worked, question, completion, answer, correct, STEP)
