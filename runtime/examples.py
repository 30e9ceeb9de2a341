"""Questions with chosen answers, for fine-tuning: read, turned into ids of which some are trained on, and cut
into batches that are a pure function of (seed, step)."""
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import IGNORE
from runtime import prompts
from runtime.config import BadInput, parse_json


@dataclass
class Example:
    ids: np.ndarray                          # the whole sequence, [T + 1]
    # [T + 1], true where an id is an answer's, or the end of one: a target
    trained: np.ndarray
    question: str                            # examples of one question are held out together

    @property
    def length(self):
        """Positions of a forward pass: the last id is a target only."""
        return len(self.ids) - 1


# --- reading ---

def are(dataset, text_key="text"):
    """Whether a dataset's name is that of a file of examples (.json, or .jsonl with prompts or messages) and
    not of a text."""
    path = Path(dataset)
    if path.suffix != ".jsonl" or not path.is_file():
        return path.suffix == ".json" and not dataset.startswith("task:")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            row = parse_json(next((line for line in f if line.strip()), "{}"))
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and text_key not in row and ("messages" in row or {"prompt", "completion"} <= row.keys())


def read(dataset, tokenizer, form=None):
    """[Example] of a file; form: of a question for a model without a chat template, None: as datagen.py
    asked, or prompts.PROMPT.

    .json    [[question, answer, reasoning], ...], what datagen.py writes: the reasoning is trained on, as the
    very ids that were
             sampled where the log beside the file has them; or [[question, answer], ...]: the answer alone, within <answer> tags;
    .jsonl   {"prompt": text, "completion": text} or {"messages": [{"role", "content"}, ...]} a line; of
    messages all of the
             assistant's are trained on.
    """
    path, examples = Path(dataset), []
    rows = read_rows(path, lines=path.suffix != ".json")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{path} holds no example: give a --dataset= with some (datagen.py writes none if no "
                       "question is solved).")
    asked, sampled = logged(path, tokenizer) if path.suffix == ".json" else (None, {})
    form = form or asked or prompts.PROMPT
    for number, row in enumerate(rows, 1):
        try:
            examples.append(of_list(row, tokenizer, form, sampled) if path.suffix == ".json" else of_object(row, tokenizer))
        except ValueError as e:
            raise BadInput(f"Row {number} of {path} is no example ({e}): mend it.") from None
    return examples


def read_rows(path, lines=True):
    """The list of what a file's lines hold as JSON; not by lines: what the whole does. BadInput if that can't
    be read."""
    where = path
    try:
        text = Path(path).read_text("utf-8")
        if not lines:
            return parse_json(text)
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            where = f"Line {number} of {path}"
            rows += [parse_json(line)] if line.strip() else []
        return rows
    except (OSError, ValueError) as e:
        raise BadInput(f"{where} can't be read ({getattr(e, 'strerror', None) or e}): mend it, or give "
                       "another --dataset=.") from None


def is_answer(value):
    """Whether it is one: JSON's NaN and Infinity, as Python writes and reads them, are none."""
    return not isinstance(value, float) or math.isfinite(value)


def of_list(row, tokenizer, form, sampled):
    if not isinstance(row, list) or len(row) not in (2, 3) or not all(isinstance(x, str) for x in (row[0], *row[2:])) or \
            not isinstance(row[1], str | int | float) or isinstance(row[1], bool) or not is_answer(row[1]) or \
            not str(row[-1]).strip():
        raise ValueError("it should be [question, answer, reasoning] or [question, answer], and the answer a "
                         "text or a finite number")
    completion = row[2] if len(row) == 3 else f"<answer>{row[1]}</answer>"
    ids = sampled.get((row[0], completion)) or tokenizer.encode(completion).tolist()
    return example([(prompts.prompt_ids(tokenizer, row[0], form), False), (ids + [tokenizer.end], True)], row[0])


def of_object(row, tokenizer):
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return example([(tokenizer.prompt_ids(row["prompt"]), False), (tokenizer.answer_ids(row["completion"]), True)], row["prompt"])
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and
                                                 isinstance(m.get("content"), str) for m in messages):
        raise ValueError('it should be {"prompt": text, "completion": text} or {"messages": [{"role": ..., "content": ...}, ...]}')
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError("none of its messages is the assistant's")
    return example(tokenizer.conversation(messages), next((m["content"] for m in messages if m["role"] == "user"), ""))


def example(parts, question):
    """parts: [(ids, whether they are trained on)]."""
    ids = np.concatenate([np.array(ids, dtype=np.int64) for ids, _ in parts])
    return Example(ids, np.concatenate([np.full(len(ids), trained) for ids, trained in parts]), question)


def attempts_path(output):
    """Where datagen.py logs what it sampled for a .json file."""
    return Path(output).with_suffix(".attempts.jsonl")


def logged(path, tokenizer):
    """What datagen.py logged beside its output: (the form in which it asked, {(question, completion): ids} of
    what it sampled with this tokenizer, without those of a token that ended it); encoding a completion again
    could give other ids. (None, {}) without a log."""
    try:
        with open(attempts_path(path), encoding="utf-8") as f:
            header, rows = parse_json(next(f)), [parse_json(line) for line in f]
        ids = {(row["question"], row["completion"]): row["ids"] for row in rows if row["verdict"] == "verified"}
        same = header["tokenizer"] == tokenizer.describe()
        return header["prompt"], {key: i for key, i in ids.items() if same and tokenizer.decode(i) == key[1]}
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None, {}


def hold_out(examples, share, seed):
    """(examples to train on, examples held out): about that share of the questions, by a hash."""
    def held(question):
        return int.from_bytes(hashlib.sha256(f"{seed} {question}".encode("utf-8", "replace")).digest()[:4], "big") < share * 2**32
    return [e for e in examples if not held(e.question)], [e for e in examples if held(e.question)]


# --- batches ---

class Batches(torch.utils.data.Dataset):
    """`self[step]` is this rank's share of a step's batch, a list of micro-batches x, y [rows, T] of about
    equal lengths.

    A pure function of (seed, step): an epoch visits every example once, in an order of its own, in steps of
    as equal a number of examples as possible, at most `per_step`. A micro-batch has at most `rows` of them
    and at most micro_batch * longest cells, where micro_batch is what train.py lowers if memory is short; to
    sort by length first leaves few cells empty.
    """

    def __init__(self, examples, per_step, rows, seed, rank=0, world_size=1):
        if not examples:
            raise BadInput("No example is left to train on: give more, or raise --block_size.")
        self.examples, self.seed, self.rank, self.world_size = examples, seed, rank, world_size
        self.steps_per_epoch = -(-len(examples) // per_step)
        self.longest = max(e.length for e in examples)
        self.rows = self.micro_batch = rows
        self.order = (None, None)
        digest = hashlib.sha256()
        for e in examples:
            digest.update(e.ids.tobytes() + e.trained.tobytes())
        self.digest = digest.hexdigest()                      # what a run that is resumed must find again

    def of_step(self, step):
        """The examples of all ranks, longest first."""
        epoch, k = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            self.order = epoch, np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.examples))
        first, last = (len(self.examples) * i // self.steps_per_epoch for i in (k, k + 1))
        return sorted((self.examples[i] for i in self.order[1][first:last]), key=lambda e: -e.length)

    def tokens(self, step):
        """(positions, targets) of a step, all ranks together; the second is what its loss is divided by."""
        chosen = self.of_step(step)
        return sum(e.length for e in chosen), sum(int(e.trained[1:].sum()) for e in chosen)

    def __getitem__(self, step):
        mine, parts = self.of_step(step)[self.rank::self.world_size], []
        while mine:
            T = width(mine[0].length, self.longest)
            n = max(1, min(self.rows, self.micro_batch * self.longest // T))
            parts.append(padded(mine[:n], T))
            mine = mine[n:]
        # a rank too many
        return parts or [(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), IGNORE))]


def width(length, longest):
    """T of a micro-batch whose longest example has that length: the next multiple of 8, but no more than the
    `longest` of all data. For a product of a shape that it has not seen oneDNN takes half a millisecond more;
    few shapes make fine-tuning on a CPU about 8% faster (NOTES.md)."""
    return min(longest, -(-length // 8) * 8)


def padded(examples, T):
    """x, y [rows, T]; y is IGNORE where nothing is trained on: prompts, and cells past an example's end, by
    its length."""
    x, y = np.zeros((len(examples), T), np.int64), np.full((len(examples), T), IGNORE)
    for row, e in enumerate(examples):
        x[row, :e.length] = e.ids[:-1]
        y[row, :e.length] = np.where(e.trained[1:], e.ids[1:], IGNORE)
    return torch.from_numpy(x), torch.from_numpy(y)
