"""Countdown for chat models, in TinyZero's form (Pan et al. 2025): reasoning within <think></think>, then an
expression within <answer></answer>.

The questions come from the dataset Jiayi-Pan/Countdown-Tasks-3to4 on the hub, about 490,000 rows {"target":
98, "nums": [44, 19, 35]}, downloaded by the library `datasets`. The argument is a local .jsonl or .parquet
file of such rows. A tenth each is for valid and test; rows with the same numbers and target are one question.
The wording is ours, the tags are TinyZero's.

The answer is graded as in countdown.py: parsed, each number used once, exact value. Unlike TinyZero, which
pays a tenth for it, the format alone earns nothing."""
import random
from functools import lru_cache
from pathlib import Path

from tasks import _questions, countdown

PROMPT = "{}\n"
INSTRUCTION = "First think about the problem within <think></think>, then answer within <answer></answer>."
HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
ASKED = ("Write an expression with the numbers {numbers} that equals {target}. Use each number once, with + "
         "- * / and parentheses. Show your work within <think> </think>, then give the expression alone "
         "within <answer> </answer>, as in <answer> (1 + 2) / 3 </answer>.")


def check(argument):
    path = Path(argument or "")
    suffix = path.suffix.lower()
    if argument is not None and not (path.is_file() and suffix in (".jsonl", ".ndjson", ".parquet")):
        raise ValueError(f"There is no file {argument}: countdown_think:FILE is a .jsonl or .parquet with "
                         'rows {"target", "nums"}.')


def row(raw):
    """Return the question of a row. Fails unless it has a target and two to six numbers."""
    target = raw["target"]
    numbers = raw["nums"]
    if not all(type(n) is int and n >= 0 for n in (target, *numbers)) or not 2 <= len(numbers) <= 6:
        raise ValueError
    question = ASKED.format(numbers=numbers, target=target)
    return {"question": question, "answer": str(target), "numbers": numbers}


@lru_cache(maxsize=2)
def everything(argument):
    """Return {split: questions}, split by a hash of the target and the sorted numbers."""
    found = {}
    if argument is None:
        asked = map(row, _questions.download("countdown_think:FILE", HUB, split="train"))
    else:
        form = '{"target": 98, "nums": [44, 19, 35]}'
        asked = _questions.read(Path(argument), row, form, ["target", "nums"])
    for question in asked:
        found.setdefault(f"{sorted(question['numbers'])} {question['answer']}", question)
    splits = {"train": [], "valid": [], "test": []}
    for asked, question in found.items():
        splits[_questions.split_of(asked)].append(question)
    return splits


def questions(split, seed=0, n=None, argument=None):
    return _questions.sample(everything(argument)[split], seed, n)


def examples(n):
    """Return n fixed pairs of split train with numbers as countdown.py draws them."""
    rng = random.Random("examples")
    found = {}
    while len(found) < n:
        key, drawn = countdown.draw(rng, 3)
        if _questions.split_of(key) == "train":
            asked = ASKED.format(numbers=drawn["numbers"], target=drawn["answer"])
            found[key] = asked, f"<think>{drawn['worked']}</think>\n<answer> {drawn['expression']} </answer>"
    return list(found.values())


def reward(question, completion):
    """Return (score, parts) as countdown.py does, without the part `reasoned`: the reasoning is free text."""
    found = countdown.parse(completion)
    used = found is not None and sorted(found[1]) == sorted(question["numbers"])
    correct = used and found[0] == int(question["answer"])
    return float(correct), {"answered": found is not None, "numbers": used, "correct": correct}


signature = countdown.signature
