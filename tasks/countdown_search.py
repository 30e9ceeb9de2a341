"""Countdown with the search written out: combine each of some numbers once, with + - * /, to make a target.

The worked documents are streams of search (Gandhi et al. 2024, arXiv 2404.03683): what a teacher tries, dead
ends and ways back included, and the solution if it came upon one, `no solution.` if its ways on or its room
were used up before:

    Make 67 from 5 8 15
    5 8 15|67: 8*5=40
    15 40|67: 40+15=55< 40-15=25<
    5 8 15|67: 15*5=75
    8 75|67: 75+8=83> 75-8=67!
    answer: 75-8=67 15*5=75.

A line is a visit: the numbers that are left, the target, then what is tried. What is tried leads to a later
line, which begins with the numbers that are left then, the new one last; going back is writing down an
earlier state again. Of two numbers all results are tried, each marked as below, above or at the target. The
completion ends in `answer:`, the steps that make the target, the last one first, and a full stop.

Four things of this form are there for the model (numbers: docs/notes.md). A question begins with a word,
since in a text a document comes after the token that ends the one before, and in sampling after nothing: a
target in the first place was found in training by that token, and in sampling not at all. Each line has the
target, so that what is compared with it stands near, and each result has its mark: to compare is learnt from
all of them, and not from the one at which a search ends. And the answer goes back from the target, since
where each number came from stands in the search.

TEACHERS wrote them: breadth-first and depth-first, by two heuristics, that keep a few of the ways on from
each state. None of them makes a number above CEILING. No document is longer than `longest`: a teacher that
runs out of room gives up.

The argument is COUNTS,LARGEST,LONGEST,DOCUMENTS (default 3-4,20,400,100000; `4` and `4,50` do as well): how
many numbers, the largest of them, the bytes of a document with its end, and how many documents there are to
train on. Targets are 10 to 99. All questions can be solved. Both the targets and the sets of numbers are
dealt out to the splits by a hash: no question of the test shares its target or its numbers with one that is
trained on.

A reward is for the steps after `answer:` alone, replayed exactly; the search before it is free text, in which
anything may stand.
"""
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
FEWEST, MOST = 2, 6                  # numbers of a question
LOWEST, HIGHEST = 10, 99             # target
CEILING = 99                         # the largest number that a teacher makes; every question can do with it
N_VALID = 1000                       # documents for validation
MOST_DRAWS = 100_000                 # of numbers, until a question is found
ARGUMENT = re.compile(r"([0-9])(?:-([0-9]))?(?:,([0-9]{1,4}))?(?:,([0-9]{1,5}))?(?:,([0-9]{1,8}))?")
STEP = re.compile(r"([0-9]{1,6})([-+*/])([0-9]{1,6})=([0-9]{1,6})")


# --- the argument ---

def check(argument):
    sizes(argument)


def sizes(argument):
    """Return (how many numbers a question may have, the largest number, bytes of the longest document,
    documents to train on) of a spec's argument."""
    found = ARGUMENT.fullmatch("3-4" if argument is None else argument)
    if not found:
        raise ValueError("The argument of countdown_search is COUNTS,LARGEST,LONGEST,DOCUMENTS, such as 4 or "
                         f"3-4,20,400,100000, and not {argument!r}.")
    defaults = found[1], found[1], 20, 400, 100_000
    fewest, most, largest, longest, documents = (
        int(default if given is None else given) for given, default in zip(found.groups(), defaults))
    if not FEWEST <= fewest <= most <= MOST:
        raise ValueError(f"countdown_search has questions of {FEWEST} to {MOST} numbers, the fewer first: "
                         f"{argument} asks for others.")
    if not 10 <= largest <= CEILING or longest < 128 or documents < 1:
        raise ValueError(f"The largest number of countdown_search is 10 to {CEILING}, a document has room "
                         f"for 128 bytes at least, and there is at least one: {argument} has it otherwise.")
    return range(fewest, most + 1), largest, longest, documents


# --- what can be made ---

def results(a, b):
    """Yield (step, its result) of everything that two numbers make: whole, positive, at most CEILING, the
    larger first. Dividing by 1 is left out, for multiplying does the same."""
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
    """Return [(step, state after it)] of a state, a tuple of numbers: each step once, the new number last."""
    found = {}
    for i, j in combinations(range(len(state)), 2):
        rest = state[:i] + state[i + 1:j] + state[j + 1:]
        for step, result in results(state[i], state[j]):
            found.setdefault(step, (*rest, result))
    return list(found.items())


def reachable_values(numbers):
    """Return the set of all that can be made from all of the numbers. Of each part of them, the smaller parts
    before, it is what any two halves of it make."""
    # {bits of the numbers that are used: results}
    made = {1 << i: {number} for i, number in enumerate(numbers)}
    for part in range(1, 1 << len(numbers)):
        if part in made:
            continue
        made[part] = set()
        half = (part - 1) & part
        while half > part ^ half:                        # each pair of halves once
            made[part] |= {c for a in made[half] for b in made[part ^ half] for _, c in results(a, b)}
            half = (half - 1) & part
    return made[(1 << len(numbers)) - 1]


# --- the teachers ---

def by_sum(state, target):
    """How far the numbers that are left are from the target, added up (the paper's first heuristic)."""
    return abs(sum(state) - target)


def by_factors(state, target):
    """How far each of them is from a factor of the target, added up (its second, of which target = factor *
    factor makes use)."""
    return sum(min(abs(number - factor) for factor in factors_of(target)) for number in state)


@lru_cache(maxsize=None)
def factors_of(target):
    return [n for n in range(1, target + 1) if target % n == 0]


HEURISTICS = {"sum": by_sum, "factors": by_factors}
# (breadth or depth first, heuristic, how many ways on from a state are followed: the best of them; None: all)
WAYS = [("breadth", 1), ("breadth", 2), ("breadth", 3), ("depth", 3), ("depth", None)]
TEACHERS = [(order, name, width) for name in HEURISTICS for order, width in WAYS]
EXHAUSTIVE = ("depth", "sum", None)  # without a limit it finds whatever can be found


class OutOfRoom(Exception):
    """A trace has as many bytes as it may."""


class Trace:
    """What a teacher writes, in at most `room` bytes with what a completion ends in (None: in as many as it
    likes)."""

    def __init__(self, target, room):
        self.target, self.room = target, room
        self.text = ""

    def visit(self, state, steps, found=()):
        """Write a line: a state, the target and the steps that are tried there. found: the steps to the
        target, if that is among what they make. OutOfRoom if it does not fit, with what the completion would
        end in then."""
        line = f"{' '.join(map(str, state))}|{self.target}: {' '.join(steps)}\n"
        ending = answer(found) if found else FAILED
        if self.room is not None and len(self.text) + len(line) + len(ending) > self.room:
            raise OutOfRoom
        self.text += line

    def last(self, state, path):
        """Visit a state of two numbers: all that they make, up to the target. Returns the path to it or
        None."""
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
    """Return the ways on from a state that a teacher follows, the most promising first."""
    return sorted(successors(state), key=lambda way: heuristic(way[1], target))[:width]


def breadth_first(trace, numbers, heuristic, width):
    """Search level by level: of each state all ways on that are followed stand in its line. Returns the steps
    to the target or None."""
    level = [(numbers, [])]                              # (state, the steps that lead there)
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
    """Follow one way to its end before the next is tried, which begins with the state that it starts from.
    Returns as breadth_first."""
    if len(state) == 2:
        return trace.last(state, path)
    for step, after in best(state, trace.target, heuristic, width):
        trace.visit(state, [step])
        found = depth_first(trace, after, heuristic, width, (*path, step))
        if found:
            return found
    return None


def search(teacher, numbers, target, room=None):
    """Return (the steps to the target that a teacher finds, or None; what it wrote, as Trace has it). Its
    heuristic is a name in HEURISTICS, or a function like those."""
    order, heuristic, width = teacher
    trace = Trace(target, room)
    first = breadth_first if order == "breadth" else depth_first
    try:
        found = first(trace, tuple(numbers), HEURISTICS.get(heuristic, heuristic), width)
    except OutOfRoom:
        found = None
    return list(found) if found else None, trace.text


def completion(teacher, question, longest):
    """Return (what a teacher writes after a question, whether it found the target). The document, with the
    line break after it and the token that ends it, has at most `longest` bytes."""
    room = longest - len(PROMPT.format(question["question"])) - 2
    found, text = search(teacher, question["numbers"], int(question["answer"]), room)
    return text + (answer(found) if found else FAILED), bool(found)


def answer(steps):
    """Return what a completion ends in, of the steps in the order in which they are taken."""
    return f"answer: {' '.join(reversed(steps))}{STOP}"


def name_of(teacher):
    order, heuristic, width = teacher
    return f"{order}-first by {heuristic}, {width or 'all'} ways on"


# --- questions ---

@lru_cache(maxsize=None)
def split_of_numbers(numbers):
    """Return the split of a set of numbers, a sorted tuple: a tenth is for validation, a tenth for the test,
    by a hash."""
    return _questions.split_of(f"numbers {numbers}")


@lru_cache(maxsize=None)
def targets_of(split):
    """Return the targets of a split: of all, in the order of a hash, every fifth is for the test, since a
    model is far better at some than at others, and every tenth for validation. (There are so few that a hash
    of each by itself would not deal out such shares.) The lowest and the highest are always trained on: where
    10 was not, each 10 in training was below its target, and was marked so in the test, too
    (docs/notes.md)."""
    order = sorted(range(LOWEST, HIGHEST + 1), key=lambda n: hashlib.sha256(f"target {n}".encode()).digest())
    dealt = {"test": {*order[::5]} - {LOWEST, HIGHEST}, "valid": {*order[1::10]} - {LOWEST, HIGHEST}}
    return frozenset(dealt.get(split) or {*order} - dealt["test"] - dealt["valid"])


def draw(rng, split, largest, count):
    """Return a question of a split with so many numbers. They are drawn evenly, and so is the target among
    those of the split that they make."""
    for _ in range(MOST_DRAWS):
        numbers = [rng.randint(1, largest) for _ in range(count)]
        if split_of_numbers(tuple(sorted(numbers))) != split:
            continue
        targets = sorted(reachable_values(numbers) & targets_of(split))
        if targets:
            target = str(rng.choice(targets))
            question = f"{target} from {' '.join(map(str, numbers))}"
            return {"question": question, "answer": target, "numbers": numbers}
    raise ValueError(f"Of {count} numbers up to {largest} countdown_search has no question for the split "
                     f"{split}: ask for more numbers, or larger ones.")


def questions(split, seed=0, n=None, argument=None):
    """n questions (fewer if there are no more), no two of which have the same numbers, in whatever order, and
    target. How many numbers a question has takes turns, as long as there are more with so many."""
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
    """A whole search without a limit, by the teacher that follows everything: it always ends in the
    target."""
    found, text = search(EXHAUSTIVE, question["numbers"], int(question["answer"]))
    if not found:
        raise ValueError(f"{question['question']} can't be done without a number above {CEILING} or a "
                         "fraction: ask questions of countdown_search's own.")
    return text + answer(found)


def teacher_documents(split, seed=0, argument=None):
    """Yield (question, teacher, document, whether it ends in a solution) of a split's documents, each by a
    teacher that is drawn, whether or not it finds the target: the paper keeps the searches that fail, too,
    and so is it here."""
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
    """Return [(a, sign, b, c)] of the steps after `answer:`, up to the first full stop, the last one first;
    None if there is no full stop, no `answer:` or more than one before it, or anything else behind it."""
    text, stop, _ = completion[:_numbers.LONGEST_TEXT].partition(STOP)
    parts = text.split("answer:")
    if not stop or len(parts) != 2:
        return None
    found = [STEP.fullmatch(word) for word in parts[1].split()]
    if not found or not all(found):
        return None
    return [(int(step[1]), step[2], int(step[3]), int(step[4])) for step in found]


def is_true(a, sign, b, c):
    """Whether a step is: in whole numbers, none of them negative, which a division has to come out in."""
    return {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b != 0 and b * c == a}[sign]


def reward(question, completion):
    """Return (score, parts): whether there is an answer made of steps (answered), whether each of these is
    true (true), whether each takes two numbers that are there, of which each is there once, so that in the
    end a single one is left (numbers), and whether that is the target (correct). What stands before `answer:`
    counts for nothing, be it right or wrong."""
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
    """The steps of the answer, in whatever order."""
    return " ".join(sorted(f"{a}{sign}{b}={c}" for a, sign, b, c in steps_of(completion) or []))
