"""GSM8K, grade-school word problems (Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems). The
argument is a .jsonl file with rows {"question", "answer"}, or a folder with train.jsonl and optionally
test.jsonl; without an argument the library `datasets` downloads it.

A tenth of the training questions is for valid, and another for test without a test file."""
from pathlib import Path

from tasks import _answers, _equations, _numbers, _questions

INSTRUCTION = ("Solve the problem in short steps, each with its equation, such as 48 / 2 = 24. Then give "
               "the number alone within <answer></answer>.")

FORM = '{"question": text, "answer": "worked text #### number"}'


def check(argument):
    path = Path(argument or ".")
    if argument is not None and not (path.is_file() or (path / "train.jsonl").is_file()):
        raise FileNotFoundError(f"There is no file {path} and no {path / 'train.jsonl'}: gsm8k:PATH names a "
                                ".jsonl file or a folder with train.jsonl, and perhaps test.jsonl.")


def row(raw):
    """Return the question of a row of GSM8K. Fails unless its answer ends with a number."""
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
        files = {"train": path if path.is_file() else path / "train.jsonl", "test": path / "test.jsonl"}
        found = {split: _questions.read(file, row, FORM) for split, file in files.items() if file.is_file()}
    return _questions.sample(_questions.make_splits(**found)[split], seed, n)


def solution(question):
    return f"{_equations.NOTE.sub('', question['worked'])}\nAnswer: <answer>{question['answer']}</answer>"


def documents(split, argument=None):
    return [_questions.document(q, solution(q)) for q in questions(split, argument=argument)]


def with_number(question):
    """Return a question of this task, or that of a row of GSM8K's own files (--dataset=)."""
    return question | row(question) if "####" in str(question["answer"]) else question


def reward(question, completion):
    return _answers.grade(with_number(question), completion)
