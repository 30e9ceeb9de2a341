"""GSM8K, grade-school word problems (Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems). The
argument is a .jsonl file with rows {"question", "answer"}, or a folder with train.jsonl and optionally
test.jsonl; without an argument the library `datasets` downloads it.

A tenth of the training questions is for valid, and another for test without a test file."""
import json
from pathlib import Path

from tasks import _answers, _equations, _numbers, _questions

INSTRUCTION = ("Solve the problem in short steps, each with its equation, such as 48 / 2 = 24. Then give "
               "the number alone within <answer></answer>.")


def check(argument):
    path = Path(argument or ".")
    if argument is not None and not (path.is_file() or (path / "train.jsonl").is_file()):
        raise FileNotFoundError(f"There is no file {path} and no {path / 'train.jsonl'}: gsm8k:PATH names a "
                                ".jsonl file or a folder with train.jsonl, and perhaps test.jsonl.")


def rows(path):
    """Return the questions in a .jsonl file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} can't be read ({e}): make it a readable .jsonl file.") from None
    found = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(row(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                form = '{"question": text, "answer": "worked text #### number"}'
                raise ValueError(f"{path}, line {i}, is not {form}: correct it.") from None
    if not found:
        raise ValueError(f"{path} is empty: give a .jsonl file with questions.")
    return found


def row(raw):
    """Return a question; ValueError unless its answer ends with a number."""
    worked, _, answer = raw["answer"].rpartition("####")
    number = _numbers.written(answer)
    if not raw["question"].strip() or number is None:
        raise ValueError
    return {"question": raw["question"].strip(), "answer": number, "worked": worked.strip()}


def questions(split, seed=0, n=None, argument=None):
    if argument is None:
        raw = _questions.download("gsm8k:PATH", "openai/gsm8k", "main")
        found = {split: [row(r) for r in raw[split]] for split in ("train", "test")}
    else:
        path = Path(argument)
        found = {"train": rows(path if path.is_file() else path / "train.jsonl")}
        if (path / "test.jsonl").is_file():
            found["test"] = rows(path / "test.jsonl")
    return _questions.sample(_questions.make_splits(**found)[split], seed, n)


def solution(question):
    return f"{_equations.NOTE.sub('', question['worked'])}\nAnswer: <answer>{question['answer']}</answer>"


def documents(split, argument=None):
    return [_questions.document(q, solution(q)) for q in questions(split, argument=argument)]


def reward(question, completion):
    """Grade an answer to a question of this task, or to a row of GSM8K's own files (--dataset=)."""
    is_row = "####" in str(question["answer"])
    return _answers.grade(question | row(question) if is_row else question, completion)
