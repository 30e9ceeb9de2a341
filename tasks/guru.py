"""GURU, RL questions from six domains (Cheng et al. 2025, LLM360/guru-RL-92k on the hub), read from its
parquet files: guru:PATH is a file, or a folder whose files are in train/ and optionally test/ (or eval/,
valid/). Nothing is downloaded.

Answers are compared as numbers, or as text (also lists and tables) ignoring case, spaces and quotation marks.
That is stricter than GURU's own verifiers, which use a language model for some sources and partial rewards
for others. Questions whose answers must be executed (codegen__...) are skipped with a message."""
import functools
import json
import re
import sys
from collections import Counter
from pathlib import Path

from tasks import _answers, _numbers, _questions, gym

INSTRUCTION = "Think step by step. Then give the answer alone within <answer></answer>."
FORM = "one of GURU's, with data_source, prompt [{role, content}] and reward_model.ground_truth"
BOXED = re.compile(r"\\boxed\s?\{")
EXECUTED = ("codegen", "livecodebench", "humaneval", "mbpp", "leetcode", "taco", "primeintellect", "ifeval")
FOLDERS = {"train": "train", "test": "test", "eval": "test", "offline_eval": "test", "online_eval": "valid",
           "valid": "valid"}


def check(argument):
    path = Path(argument or ".")
    if not argument or not files(path):
        raise FileNotFoundError(f"There is no parquet file at {path}: guru:PATH names one of GURU's, or the "
                                "folder that they are in.")


def files(path):
    """Return {file: split} of a file or of the files in a folder, by the names of their subfolders."""
    if path.is_file():
        return {path: "train"}
    found = {}
    for file in sorted(path.rglob("*.parquet")):
        names = [FOLDERS[name] for name in file.relative_to(path).parts[:-1] if name in FOLDERS]
        found[file] = names[0] if names else "train"
    return found


def row(raw):
    """Return the question of a row; without an answer if that must be executed. Fails without a prompt or an
    answer."""
    source = str(raw["data_source"])
    if source.lower().startswith(EXECUTED):
        return {"source": source}
    model = raw["reward_model"]
    right = (json.loads(model) if isinstance(model, str) else model)["ground_truth"]
    right = right if isinstance(right, str) or right is None else json.dumps(right, ensure_ascii=False)
    asked = "\n".join(turn["content"].strip() for turn in raw["prompt"] if turn["role"] != "system")
    if not asked or not (right or "").strip():
        raise ValueError
    return {"question": asked, "answer": right.strip(), "source": source}


@functools.cache
def everything(path):
    """Return {split: questions} of a path; print the number of skipped questions."""
    found = {}
    left_out = Counter()
    for file, split in files(Path(path)).items():
        rows = _questions.read(file, row, FORM, ["data_source", "prompt", "reward_model"])
        found.setdefault(split, []).extend(question for question in rows if "answer" in question)
        left_out.update(question["source"] for question in rows if "answer" not in question)
    if left_out:
        sources = ", ".join(f"{n} of {source}" for source, n in sorted(left_out.items()))
        print(f"{left_out.total()} questions of {path} are left out, because their programs would have to be "
              f"executed: {sources}.", file=sys.stderr)
    if not any(found.values()):
        raise ValueError(f"{path} has no question that can be graded here: give files of GURU's math, logic, "
                         "simulation, table or stem.")
    return _questions.make_splits(**({"train": []} | found))


def questions(split, seed=0, n=None, argument=None):
    """Return n questions, or all, in random order, since files are sorted by source."""
    found = everything(argument)[split]
    return _questions.sample(found, seed, len(found) if n is None else n)


def solution(question):
    return f"<answer>{question['answer']}</answer>"


def documents(split, argument=None):
    return [_questions.document(q, solution(q)) for q in questions(split, argument=argument)]


def answer_of(completion):
    """Return a completion's answer: the first <answer></answer>, else the last \\boxed{}, else ""."""
    found = _answers.find(completion, gym.ANSWER)
    if found:
        inside = found[1].strip()
        return boxed(inside) if BOXED.match(inside) and inside.endswith("}") else inside
    return boxed(completion[-_numbers.LONGEST_TEXT:])


def boxed(text):
    """Return the content of the last \\boxed{}, with nested braces, "" without one."""
    starts = [found.end() for found in BOXED.finditer(text)]
    depth = 1
    for i in range(starts[-1] if starts else len(text), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[starts[-1]:i].strip()
    return ""


def reward(question, completion):
    answer = answer_of(completion)
    # (3,5) is a pair, not 3.5; 1,000 is a number
    is_list = re.search(r"^\s*[(\[{].*,|[0-9],(?![0-9]{3}(?![0-9]))", question["answer"])
    right = None if is_list else _numbers.number(_numbers.normal(question["answer"]).removesuffix("°"))
    if right is not None:
        said = _numbers.normal(answer).removesuffix("°")
        correct = _numbers.number(said, _answers.asked_unit(question)) == right
    else:
        said, wanted = (gym.plain(_numbers.unwrapped(text)) for text in (answer, question["answer"]))
        correct = bool(answer) and said == wanted
    return float(correct), {"answered": bool(answer), "correct": correct}
