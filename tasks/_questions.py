"""Questions and their splits, for tasks that draw them and for tasks that read them from files."""
import functools
import hashlib
import math
import random

from runtime.progress import ProgressLine, track
from tasks import PROMPT

N_DOCUMENTS = {"train": 20_000, "valid": 1_000}
N_QUESTIONS = 1000                   # of a generated task, where no number is asked for
PATIENCE = 2000                      # draws without a new question after which a task is taken to have no more
WRONG = 0.2                          # share of documents with a slip in one step
COMMON = 0.65                        # share with the common mistake, of the questions that invite one


def split_of(asked):
    """The split of what is asked: a tenth is for validation, a tenth for the test, by a hash. No question can be in two splits."""
    tenth = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:8], "big") % 10
    return {0: "valid", 1: "test"}.get(tenth, "train")


def distinct(draw, split, seed, n=None, most=None):
    """n questions of a split (fewer if there are no more), each drawn by draw(rng), which gives (what is asked, the
    question). most: function that gives a bound on how many there are in all splits; ValueError, which drawing them would
    take a minute to find out, if n is past a split's share of it."""
    rng, found, idle = random.Random(f"{seed} {split} questions"), {}, 0
    wanted = N_QUESTIONS if n is None else n
    if most and wanted > N_QUESTIONS:        # so many are asked for by default, of whatever task
        share = most() * (0.8 if split == "train" else 0.1)
        share += 6 * math.sqrt(share)        # standard deviations of what the hash deals out
        if wanted > share:
            raise ValueError(f"{n} questions of the split {split} were asked for, and there are at most {share:.0f}: "
                             "lower --num_questions.")
    with ProgressLine(f"drawing {split} questions", wanted, "questions") as line:
        while len(found) < wanted and idle < PATIENCE:
            asked, question = draw(rng)
            if split_of(asked) == split:
                idle = idle + 1 if asked in found else 0
                line.add(asked not in found)
                found.setdefault(asked, question)
    return list(found.values())


def draw_documents(draw, split, seed):
    """N_DOCUMENTS[split] questions of a split, which may ask the same twice."""
    rng = random.Random(f"{seed} {split}")
    for _ in track(range(N_DOCUMENTS[split]), f"drawing {split} text", "questions"):
        asked, question = draw(rng)
        while split_of(asked) != split:
            asked, question = draw(rng)
        yield question


def with_levels(name, draw, solution, wrong_solution, invites_mistake):
    """Return (check, questions, documents) of a task whose argument is a level, 0 to 2 (default 1).

    draw(rng, level) returns (key, question); solution(question) and wrong_solution(question, rng) return completions. Like text
    from the web, some documents are wrong: the share COMMON where invites_mistake(question) is true, else WRONG.
    """
    def check(argument):
        if argument not in (None, "0", "1", "2"):
            raise ValueError(f"The argument of {name} is a level, 0 to 2, and {argument or 'nothing'} was given.")

    def questions(split, seed=0, n=None, argument=None):
        return distinct(functools.partial(draw, level=int(argument or 1)), split, seed, n)

    def documents(split, seed=0, argument=None):
        rng = random.Random(f"{seed} {split} wrong")
        texts = []
        for question in draw_documents(functools.partial(draw, level=int(argument or 1)), split, seed):
            is_wrong = rng.random() < (COMMON if invites_mistake(question) else WRONG)
            texts.append(document(question, wrong_solution(question, rng) if is_wrong else solution(question)))
        return texts
    return check, questions, documents


def document(question, completion):
    """The text to pretrain on that a question and what follows it make."""
    return f"{PROMPT.format(question['question'])}{completion}\n"


def make_splits(train, valid=None, test=None):
    """{split: questions} of lists, from files. A split without a file is a tenth of those that train. None stands twice: a question
    of the test is in no other split, one for validation does not train."""
    splits, seen = {"test": test, "valid": valid, "train": train}, set()
    for split in ("test", "valid"):
        if splits[split] is None:
            splits[split] = [q for q in train if split_of(q["question"]) == split]
    for split, questions in splits.items():
        kept = {}
        for q in questions:
            kept.setdefault(" ".join(q["question"].casefold().split()), q)
        splits[split] = [q for asked, q in kept.items() if asked not in seen]
        seen |= kept.keys()
    return splits


def sample(questions, seed, n=None):
    """n of the questions in an order of the seed's; None: all, in theirs."""
    return questions if n is None else random.Random(f"{seed} some").sample(questions, min(n, len(questions)))
