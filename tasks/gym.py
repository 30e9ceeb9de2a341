"""Questions of the library reasoning-gym (pip install reasoning-gym): `gym:NAME` is one of its generators, `gym:math` a group of them
(code, logic, simulation). Nothing is downloaded, and nothing that a model wrote is executed.

Of its generators only those are here whose verifier stood the audit of measure/audit.py: see EXCLUDED and docs/gym_audit.md. The
library pays part of a reward where the right answer merely occurs in what was said; here only its full score counts, on the text
within the first <answer></answer>. An item is a function of (generator, index): a question carries these two, and whoever
grades it makes the item again."""
import functools
import re

from tasks import _numbers, _questions

INSTRUCTION = "Think step by step. Then give the answer alone, in the form that is asked for, within <answer></answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
LONGEST = 4_000                      # characters of an answer that are read
N_ITEMS = 2**31                      # of a generator: its indices

GROUPS = {
    "math": [],
    "code": [],
    "logic": [],
    "simulation": [],
}
# generators that stood the audit and are in no group: too long, too hard or too few questions for a small model
OTHERS = []
# what differs from the library's defaults
SETTINGS = {}
# {generator: what the audit found}
EXCLUDED = {}
MISSING = "The task gym needs a library that is missing: pip install reasoning-gym."


def check(argument):
    names = ", ".join(GROUPS)
    if not argument:
        raise ValueError(f"The task gym needs the name of a group or generator: gym:NAME, with one of {names}, or docs/gym_audit.md's.")
    if argument in EXCLUDED:
        raise ValueError(f"The generator {argument} is left out of gym ({EXCLUDED[argument]}): choose another, or one of {names}.")
    if argument not in GROUPS and not any(argument in group for group in (*GROUPS.values(), OTHERS)):
        raise ValueError(f"There is no generator {argument} in gym that was audited: choose {names}, or one of docs/gym_audit.md.")
    library()


def library():
    """Return the module reasoning_gym, which takes seconds to import; ValueError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(MISSING) from None
    return reasoning_gym


@functools.cache
def dataset(generator):
    """Return the library's generator. Its seed is fixed: indices decide."""
    return library().create_dataset(generator, seed=0, size=N_ITEMS, **SETTINGS.get(generator, {}))


@functools.lru_cache(1024)
def entry(generator, index):
    """Return an item as the library has it, with what its scorer needs."""
    return dataset(generator)[index]


def draw(rng, generators):
    """Return (what is asked, the question) of one of the generators."""
    generator = rng.choice(generators)
    while True:
        index = rng.randrange(N_ITEMS)
        item = entry(generator, index)
        if item["answer"].strip():           # an empty answer could not be told from none
            break
    text = item["question"].strip()
    return text, {"question": text, "answer": item["answer"].strip(), "generator": generator, "index": index}


def questions(split, seed=0, n=None, argument=None):
    generators = GROUPS.get(argument, [argument])
    return _questions.distinct(lambda rng: draw(rng, generators), split, seed, n)


def solution(question):
    return f"<answer>{question['answer']}</answer>"


def documents(split, seed=0, argument=None):
    generators = GROUPS.get(argument, [argument])
    return [_questions.document(q, solution(q)) for q in _questions.drawn(lambda rng: draw(rng, generators), split, seed)]


def is_right(question, said):
    """Return whether an answer earns the library's full score. Where the right one is a number, what was said must be that
    number and nothing else, which is asked first: some of the scorers round, or find a number anywhere."""
    exact = _numbers.number(question["answer"])
    if exact is not None and _numbers.number(said) != exact:
        return False
    item = entry(question["generator"], question["index"])
    if item["question"].strip() != question["question"]:
        raise ValueError("the installed reasoning-gym makes another question of this index: install the version that made it")
    return dataset(question["generator"]).score_answer(said, item) == 1.0


def reward(question, completion):
    found = ANSWER.search(completion[:_numbers.LONGEST_TEXT])
    said = found[1].strip() if found else ""
    answered = 0 < len(said) <= LONGEST
    correct = answered and is_right(question, said)
    return float(correct), {"answered": answered, "correct": correct}
