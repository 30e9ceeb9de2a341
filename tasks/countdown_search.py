"""Countdown with a written search: combine each given number once, with + - * /, to reach a target.

The documents are streams of search (Gandhi et al. 2024, arXiv 2404.03683): a teacher's attempts with dead
ends and backtracking, then the solution, or `no solution.` if its branches or its room are exhausted:

    Make 67 from 5 8 15
    5 8 15|67: 8*5=40
    15 40|67: 40+15=55< 40-15=25<
    5 8 15|67: 15*5=75
    8 75|67: 75+8=83> 75-8=67!
    answer: 75-8=67 15*5=75.

A line visits a state: the remaining numbers, the target, then the steps tried. Each step leads to a later
line that starts with the state after it, the new number last; backtracking repeats an earlier state. With two
numbers left, all results are tried and marked as below (<), above (>) or equal to (!) the target. The
completion ends with `answer:`, the steps to the target in reverse order, and a full stop.

Four features of this format help the model (numbers: docs/notes.md). A question begins with a word, because
in training a document follows an end-of-text token and in sampling nothing; a target in first position was
located by that token. Each line repeats the target, so that comparisons are local. Each result has a mark, so
that every comparison is a training signal, not just the last. The answer goes backwards from the target,
because the search shows where each number came from.

TEACHERS search breadth-first and depth-first with two heuristics, keep a few successors of each state, and
make no number above CEILING. No document is longer than `longest`: a teacher that runs out of room gives up.

The argument is COUNTS,LARGEST,LONGEST,DOCUMENTS (default 3-4,20,400,100000; `4` and `4,50` are valid too):
the count of numbers, the largest of them, the maximum bytes of a document with its end, and the number of
training documents. Targets are 10 to 99. All questions are solvable. A hash assigns both targets and sets of
numbers to splits: no test question shares its target or its numbers with a training question.

The reward depends only on the steps after `answer:`, replayed exactly; the search before it is free text."""
import hashlib
import random
import re
from collections import Counter
from functools import lru_cache
from itertools import combinations

from runtime.progress import track
from tasks import _numbers, _questions

PROMPT = "Make {}\n"
STOP = "."
INSTRUCTION = ("Make the first number from all the others, each used once, with + - * /. Search for a way, "
               "then end with the steps, the last one first, and a full stop, as in: "
               "answer: 35+9=44 7*5=35 12-3=9.")
FAILED = "no solution."
FEWEST = 2                           # given numbers
MOST = 6
LOWEST = 10                          # target
HIGHEST = 99
CEILING = 99                         # largest intermediate result; enough for every question
N_VALID = 1000                       # validation documents
MOST_DRAWS = 100_000                 # attempts to draw a question
ARGUMENT = re.compile(r"([0-9])(?:-([0-9]))?(?:,([0-9]{1,4}))?(?:,([0-9]{1,5}))?(?:,([0-9]{1,8}))?")
STEP = re.compile(r"([0-9]{1,6})([-+*/])([0-9]{1,6})=([0-9]{1,6})")


# --- the argument ---

def check(argument):
    sizes(argument)


def sizes(argument):
    """Return (range of counts, largest number, maximum bytes, training documents) of an argument."""
    found = ARGUMENT.fullmatch("3-4" if argument is None else argument)
    if not found:
        raise ValueError("The argument of countdown_search is COUNTS,LARGEST,LONGEST,DOCUMENTS, such as 4 or "
                         f"3-4,20,400,100000, not {argument!r}.")
    defaults = found[1], found[1], 20, 400, 100_000
    fewest, most, largest, longest, documents = (
        int(default if given is None else given) for given, default in zip(found.groups(), defaults))
    if not FEWEST <= fewest <= most <= MOST:
        raise ValueError(f"{argument} is not a range of {FEWEST} to {MOST} numbers: give countdown_search "
                         "the smaller count first.")
    if not 10 <= largest <= CEILING or longest < 128 or documents < 1:
        raise ValueError(f"{argument} is out of range: countdown_search needs a largest number of 10 to "
                         f"{CEILING}, documents of at least 128 bytes, and at least one document.")
    return range(fewest, most + 1), largest, longest, documents


# --- reachable values ---

def results(a, b):
    """Yield (step, result) for two numbers, the larger first; results are positive integers up to CEILING.
    Division by 1 is omitted, since multiplication does the same."""
    if a < b:
        a, b = b, a
    if a + b <= CEILING:
        yield f"{a}+{b}={a + b}", a + b
    if a > b:
        yield f"{a}-{b}={a - b}", a - b
    if a * b <= CEILING:
        yield f"{a}*{b}={a * b}", a * b
    if b > 1 and a % b == 0:
        yield f"{a}/{b}={a // b}", a // b


def successors(state):
    """Return [(step, next state)] of a state, a tuple of numbers: distinct steps, the new number last."""
    found = {}
    for i, j in combinations(range(len(state)), 2):
        rest = state[:i] + state[i + 1:j] + state[j + 1:]
        for step, result in results(state[i], state[j]):
            found.setdefault(step, (*rest, result))
    return list(found.items())


def reachable_values(numbers):
    """Return the set of values reachable with all the numbers, by dynamic programming over subsets: the
    values of a subset combine those of each of its two-part partitions."""
    # {bit mask of a subset: reachable values}
    made = {1 << i: {number} for i, number in enumerate(numbers)}
    for part in range(1, 1 << len(numbers)):
        if part in made:
            continue
        made[part] = set()
        half = (part - 1) & part
        while half > part ^ half:                        # each partition once
            made[part] |= {c for a in made[half] for b in made[part ^ half] for _, c in results(a, b)}
            half = (half - 1) & part
    return made[(1 << len(numbers)) - 1]


# --- the teachers ---

@lru_cache(maxsize=None)
def factors_of(target):
    return [n for n in range(1, target + 1) if target % n == 0]


# the paper's {name: distance of a state from the target}, by the sum or each number's nearest factor
HEURISTICS = {
    "sum": lambda state, target: abs(sum(state) - target),
    "factors": lambda state, target: sum(min(abs(number - factor) for factor in factors_of(target))
                                         for number in state),
}
ORDERS = [("breadth", 1), ("breadth", 2), ("breadth", 3), ("depth", 3), ("depth", None)]
# (order, heuristic, number of best successors to follow, None: all)
TEACHERS = [(order, name, width) for name in HEURISTICS for order, width in ORDERS]
EXHAUSTIVE = ("depth", "sum", None)  # finds every solution if its room is unlimited


class OutOfRoom(Exception):
    """The trace has reached its maximum length."""


class Trace:
    """A teacher's text, at most `room` bytes including the completion's ending (None: unlimited)."""

    def __init__(self, target, room):
        self.target = target
        self.room = room
        self.text = ""

    def visit(self, state, steps, found=()):
        """Write a line: state, target and the steps tried. found: the steps to the target if reached.
        OutOfRoom if the line and the ending do not fit."""
        line = f"{' '.join(map(str, state))}|{self.target}: {' '.join(steps)}\n"
        ending = answer(found) if found else FAILED
        if self.room is not None and len(self.text) + len(line) + len(ending) > self.room:
            raise OutOfRoom
        self.text += line

    def last(self, state, path):
        """Visit a state of two numbers up to the target. Return the path to it or None."""
        steps = []
        for step, (result,) in successors(state):
            mark = "!" if result == self.target else "<" if result < self.target else ">"
            steps.append(step + mark)
            if result == self.target:
                self.visit(state, steps, [*path, step])
                return [*path, step]
        self.visit(state, steps)
        return None


def best(state, target, heuristic, width):
    """Return the successors of a state that a teacher follows, best first."""
    return sorted(successors(state), key=lambda way: heuristic(way[1], target))[:width]


def breadth_first(trace, numbers, heuristic, width):
    """Search level by level. Return the steps to the target or None."""
    level = [(numbers, [])]                              # (state, steps to it)
    while level:
        following = []
        for state, path in level:
            if len(state) == 2:
                found = trace.last(state, path)
                if found:
                    return found
                continue
            ways = best(state, trace.target, heuristic, width)
            trace.visit(state, [step for step, _ in ways])
            following += [(after, [*path, step]) for step, after in ways]
        level = following
    return None


def depth_first(trace, state, heuristic, width, path=()):
    """Follow each branch to its end before the next. Return the steps to the target or None."""
    if len(state) == 2:
        return trace.last(state, path)
    for step, after in best(state, trace.target, heuristic, width):
        trace.visit(state, [step])
        found = depth_first(trace, after, heuristic, width, (*path, step))
        if found:
            return found
    return None


def search(teacher, numbers, target, room=None):
    """Return (a teacher's steps to the target or None, its text)."""
    order, heuristic, width = teacher
    trace = Trace(target, room)
    first = breadth_first if order == "breadth" else depth_first
    try:
        found = first(trace, tuple(numbers), HEURISTICS.get(heuristic, heuristic), width)
    except OutOfRoom:
        found = None
    return list(found) if found else None, trace.text


def completion(teacher, question, longest):
    """Return (a teacher's completion, whether it found the target). The document with its line break and end
    token has at most `longest` bytes."""
    room = longest - len(PROMPT.format(question["question"])) - 2
    found, text = search(teacher, question["numbers"], int(question["answer"]), room)
    return text + (answer(found) if found else FAILED), bool(found)


def answer(steps):
    """Return the ending of a completion, for steps in the order in which they are taken."""
    return f"answer: {' '.join(reversed(steps))}{STOP}"


def name_of(teacher):
    order, heuristic, width = teacher
    return f"{order}-first by {heuristic}, {width or 'all'} ways on"


# --- questions ---

@lru_cache(maxsize=None)
def targets_of(split):
    """Return the targets of a split. In hash order, every fifth is for test, since difficulty varies between
    targets, and every tenth for valid (there are too few for a hash of each target to give these shares). The
    lowest and highest are always in train: without 10, the model had always seen 10 below its target, and
    marked it so in test (docs/notes.md)."""
    order = sorted(range(LOWEST, HIGHEST + 1), key=lambda n: hashlib.sha256(f"target {n}".encode()).digest())
    held_out = {"test": {*order[::5]} - {LOWEST, HIGHEST}, "valid": {*order[1::10]} - {LOWEST, HIGHEST}}
    return frozenset(held_out.get(split) or {*order} - held_out["test"] - held_out["valid"])


def draw(rng, split, largest, count):
    """Return a question of a split: uniform numbers, then a uniform reachable target."""
    for _ in range(MOST_DRAWS):
        numbers = [rng.randint(1, largest) for _ in range(count)]
        if _questions.split_of(f"numbers {(*sorted(numbers),)}") != split:
            continue
        targets = sorted(reachable_values(numbers) & targets_of(split))
        if targets:
            target = str(rng.choice(targets))
            question = f"{target} from {' '.join(map(str, numbers))}"
            return {"question": question, "answer": target, "numbers": numbers}
    raise ValueError(f"countdown_search has no question of the split {split} with {count} numbers up to "
                     f"{largest}: ask for more numbers, or larger ones.")


def questions(split, seed=0, n=None, argument=None):
    """Return n questions (fewer if there are no more) with distinct (target, sorted numbers). Their counts of
    numbers alternate, while there are new questions of each count."""
    counts, largest, *_ = sizes(argument)
    left = [*counts]
    rng = random.Random(f"{seed} {split} questions")
    found = {}
    idle = 0
    while len(found) < (n or _questions.N_QUESTIONS) and left:
        count = left[len(found) % len(left)]
        question = draw(rng, split, largest, count)
        asked = question["answer"], *sorted(question["numbers"])
        idle = idle + 1 if asked in found else 0
        found.setdefault(asked, question)
        if idle == _questions.PATIENCE:
            left.remove(count)
            idle = 0
    return list(found.values())


def solution(question):
    """Return the unlimited exhaustive search, which always reaches the target."""
    found, text = search(EXHAUSTIVE, question["numbers"], int(question["answer"]))
    if not found:
        raise ValueError(f"{question['question']} has no solution without a number above {CEILING} or a "
                         "fraction: use questions of countdown_search.")
    return text + answer(found)


def teacher_documents(split, seed=0, argument=None):
    """Yield (question, teacher, document, whether it is solved) of a split's documents, each by a random
    teacher. Like the paper, keep searches that fail."""
    counts, largest, longest, n_train = sizes(argument)
    rng = random.Random(f"{seed} {split}")
    n = n_train if split == "train" else N_VALID
    for _ in track(range(n), f"searching for {split} text", "questions"):
        question = draw(rng, split, largest, rng.choice(counts))
        teacher = rng.choice(TEACHERS)
        text, found = completion(teacher, question, longest)
        yield question, teacher, f"{PROMPT.format(question['question'])}{text}\n", found


def documents(split, seed=0, argument=None):
    return [text for _, _, text, _ in teacher_documents(split, seed, argument)]


# --- the verifier ---

def steps_of(completion):
    """Return the steps [(a, sign, b, c)] between `answer:` and the first full stop, last step first. None
    without a full stop, without exactly one `answer:` before it, or with other text between them."""
    text, stop, _ = completion[:_numbers.LONGEST_TEXT].partition(STOP)
    parts = text.split("answer:")
    if not stop or len(parts) != 2:
        return None
    found = [STEP.fullmatch(word) for word in parts[1].split()]
    if not found or not all(found):
        return None
    return [(int(step[1]), step[2], int(step[3]), int(step[4])) for step in found]


def is_true(a, sign, b, c):
    """Return whether a step is true in non-negative integers; a division must be exact."""
    return {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b != 0 and b * c == a}[sign]


def reward(question, completion):
    """Return (score, parts). The parts: the answer consists of steps (answered), each step is true (true),
    each uses two available numbers and one number remains at the end (numbers), and that is the target
    (correct). The text before `answer:` is ignored."""
    steps = steps_of(completion)
    parts = {"answered": steps is not None, "true": bool(steps) and all(is_true(*step) for step in steps)}
    left = Counter(question["numbers"])
    used = bool(steps)
    for a, _, b, c in reversed(steps or []):
        left.subtract([a, b])
        used = used and left[a] >= 0 and left[b] >= 0
        left[c] += 1
    parts["numbers"] = used and left.total() == 1
    parts["correct"] = parts["true"] and parts["numbers"] and left[int(question["answer"])] == 1
    return float(parts["correct"]), parts


def signature(completion):
    """Return the sorted steps of the answer."""
    return " ".join(sorted(f"{a}{sign}{b}={c}" for a, sign, b, c in steps_of(completion) or []))
