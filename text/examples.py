"""Fine-tuning examples: read and encode prompts with completions, batch them by (seed, step)."""
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import IGNORE
from runtime.config import BadInput, checksum, parse_json
from runtime.progress import track
from text import prompts, rows
from text.sources import suffix_of

WORKED = "examples:"                         # prefix of a dataset: worked examples of a task
NUM_WORKED = 1000                            # their number, at most


@dataclass
class Example:
    ids: np.ndarray                          # [T + 1], prompt and completion
    is_target: np.ndarray                    # [T + 1] bool, true for ids of an answer and its end
    question: str                            # examples of the same question are held out together

    @property
    def length(self):
        """Number of input positions T; the last id is only a target."""
        return len(self.ids) - 1


# --- reading ---

def is_examples_file(dataset, text_key="text"):
    """Return whether a dataset holds examples: a task's, or a .json file, or another with the columns of an
    example and none of the name text_key."""
    if dataset.startswith(WORKED):
        return True
    if suffix_of(dataset) == ".json":
        return not dataset.startswith("task:")
    row = rows.first(dataset)
    is_text = isinstance(row, dict) and text_key in row
    return not is_text and bool(rows.form_of(row) or rows.other_form(row))


def read(dataset, tokenizer, form=None, instruction=None):
    """Return the list of Examples in a dataset. BadInput if it can't be read or a row is not an example.

    examples:NAME   worked examples of a task, at most NUM_WORKED
    a file, or a folder written by save_to_disk of the package datasets (see rows.read), with rows

    [question, answer, reasoning]   as datagen.py writes it: the target is the reasoning, as the sampled ids
             if the log beside a .json file has them; of an episode, a list of texts, the first, third and so
             on are targets, and the environment's between them are not
    [question, answer]              the target is the answer within <answer> tags
    {"question", "answer"}          the target is the answer as it is
    {"prompt", "completion"}        the target is the completion; the prompt is whole
    {"messages": [{"role", "content"}, ...]}   the assistant's messages are targets, without "weight": 0

    form: of questions for a model without a chat template. instruction: system message for a chat model, that
    objects may replace. None: the task's or the log's, else prompts.PROMPT or the template's.
    """
    if str(dataset).startswith(WORKED):
        check_given(tokenizer, form, instruction)
        return worked_examples(dataset.removeprefix(WORKED), tokenizer, form, instruction)
    path = Path(dataset)
    all_rows = rows.read(path)
    if not all_rows:
        raise BadInput(f"{path} holds no example: give another --dataset= (datagen.py writes none if no "
                       "question is solved).")
    logged_form = None
    sampled = {}
    instructions = defaultdict(str)
    if suffix_of(path) == ".json":
        logged_form, sampled, instructions = read_log(path, tokenizer)
        if any(instructions.values()) and not tokenizer.is_chat:
            prompts.say_unseen(f"the instruction in {attempts_path(path)}")
    if instruction is not None:
        instructions = defaultdict(lambda: instruction)
    form_of_questions = form or logged_form or prompts.PROMPT
    examples = []
    for number, row in enumerate(track(all_rows, f"tokenising {path}", "examples"), 1):
        try:
            if isinstance(row, dict):
                example = example_of_object(row, tokenizer, form_of_questions, instructions)
            else:
                example = example_of_list(row, tokenizer, form_of_questions, sampled, instructions)
        except ValueError as e:
            raise BadInput(f"Row {number} of {path} is not an example ({e}): correct it.") from None
        if (form, instruction) != (None, None) and not rows.has_question(row):
            raise BadInput(f"--prompt and --instruction are for questions, and row {number} of {path} has "
                           "whole prompts: leave them out.")
        examples.append(example)
    check_given(tokenizer, form, instruction)
    rows.report_unused(all_rows, path)
    return examples


def check_given(tokenizer, form, instruction):
    """Raise BadInput for a prompt form to a model with a chat template, or an instruction to another."""
    if form and tokenizer.is_chat:
        raise BadInput("--prompt is for models without a chat template, which this one has: leave it out.")
    if instruction and not tokenizer.is_chat:
        raise BadInput("--instruction is a system message, and the model has no chat template: write it into "
                       "--prompt.")


def worked_examples(name, tokenizer, form=None, instruction=None):
    """Return Examples of a task's training questions with its own solutions. form, instruction: see read."""
    examples = []
    try:
        from tasks import _pool
        task = _pool.load(name)
        questions = task.questions("train", n=NUM_WORKED, fewer=True)
        for question in track(questions, f"solving {name}", "questions"):
            own = task.of(question)
            system = prompts.instruction_of(tokenizer, own, question) if instruction is None else instruction
            prompt = prompts.prompt_ids(tokenizer, question["question"], form or own.prompt,
                                        instruction=system)
            answer = parts_of_turns(played(own, question, task.solution(question)), tokenizer)
            parts = [(prompt, False), *answer, ([tokenizer.end], True)]
            examples.append(example_of_parts(parts, question["question"]))
    except (LookupError, ValueError, OSError) as e:
        raise BadInput(str(e)) from e
    return examples


def played(task, question, solution):
    """Return a solution's texts in turn, the model's and the environment's, as the task would respond."""
    turns = []
    start = 0
    end = solution.find(task.turn_stop) if task.responds and task.turn_stop else -1
    while end >= 0:
        end += len(task.turn_stop)
        reply = task.sentence("respond", task.respond, question, solution[:end])
        if reply and solution.startswith(reply, end):
            turns += [solution[start:end], reply]
            start = end = end + len(reply)
        end = solution.find(task.turn_stop, end)
    return [*turns, solution[start:]]


def example_of_list(row, tokenizer, form, sampled, instructions):
    """Return the Example of [question, answer, reasoning] or [question, answer], ValueError for another row.
    sampled: {(question, turns): parts} of read_log. instructions: {question: system message}."""
    is_example = (
        isinstance(row, list) and len(row) in (2, 3)
        and all(isinstance(text, str) for text in (row[0], *(turns_of(row[2]) if len(row) == 3 else ())))
        and (rows.is_answer(row[1]) if len(row) == 2 else rows.is_finite(row[1]))
        and str(row[-1]).strip()
    )
    if not is_example:
        raise ValueError(rows.other_form(row) or "it should be [question, answer, reasoning], or [question, "
                                                 "answer] with a text or a finite number as the answer")
    question, answer, *reasoning = row
    turns = turns_of(reasoning[0]) if reasoning else (f"<answer>{answer}</answer>",)
    parts = sampled.get((question, turns)) or parts_of_turns(turns, tokenizer)
    prompt = prompts.prompt_ids(tokenizer, question, form, instruction=instructions[question])
    return example_of_parts([(prompt, False), *parts, ([tokenizer.end], True)], question)


def turns_of(reasoning):
    """Return the texts of a completion, a text or an episode's list of texts: the model's and the
    environment's in turn. Neither: the value itself, as the only one."""
    is_episode = isinstance(reasoning, list) and len(reasoning) % 2 == 1
    return tuple(reasoning) if is_episode else (reasoning,)


def parts_of_turns(turns, tokenizer):
    """Return [(ids, is_target)] of the texts of turns_of, without the last one's end."""
    parts = [(tokenizer.encode(turns[0]).tolist(), True)]
    for reply, text in zip(turns[1::2], turns[2::2]):
        if tokenizer.is_chat:
            parts.append(([tokenizer.end], True))
        parts.append((tokenizer.reply_ids(reply, ended=True), False))
        parts.append((tokenizer.encode(text).tolist(), True))
    return parts


def parts_of_ids(ids, forced):
    """Return [(ids, is_target)] of sampled ids, of which the spans in `forced` are the environment's."""
    parts = []
    start = 0
    for first, last in forced:
        parts += [(ids[start:first], True), (ids[first:last], False)]
        start = last
    return [*parts, (ids[start:], True)]


def example_of_object(row, tokenizer, form, instructions):
    """Return the Example of an object (see read), ValueError for another row."""
    if rows.form_of(row):                    # else named below
        rows.check_keys(row, rows.ANSWER_KEYS, rows.SELECTORS)
    system = row.get("system") or None
    if system and not tokenizer.is_chat:
        raise ValueError('its "system" message needs a model with a chat template')
    messages = rows.checked_messages(row["messages"] if isinstance(row.get("messages"), list) else [], system)
    prompt = row.get("prompt")
    question = row.get("question")
    if isinstance(prompt, str) and isinstance(row.get("completion"), str):
        prompts.check_unmarked(tokenizer, prompt)
        ids = tokenizer.prompt_ids(prompt, system)
        return example_of_parts([(ids, False), (tokenizer.answer_ids(row["completion"]), True)], prompt)
    if isinstance(row.get("messages"), list):
        if not any(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in messages):
            raise ValueError("none of its messages is the assistant's, with a weight other than 0")
        asked = [message["content"] for message in messages if message["role"] == "user"]
        return example_of_parts(tokenizer.conversation(messages), asked[0] if asked else "")
    if isinstance(question, str) and rows.is_answer(row.get("answer")):
        ids = prompts.prompt_ids(tokenizer, question, form, instruction=system or instructions[question])
        return example_of_parts([(ids, False), (tokenizer.answer_ids(str(row["answer"])), True)], question)
    raise ValueError(rows.other_form(row) or 'it should be {"prompt": text, "completion": text}, '
                                             '{"question": text, "answer": text} or '
                                             '{"messages": [{"role": ..., "content": ...}, ...]}')


def example_of_parts(parts, question):
    """Return the Example of concatenated parts [(ids, is_target)]."""
    ids = [np.array(part, dtype=np.int64) for part, _ in parts]
    is_target = [np.full(len(part), value) for part, value in parts]
    return Example(np.concatenate(ids), np.concatenate(is_target), question)


def attempts_path(output):
    """Return the path of datagen.py's log of sampled completions for an output file."""
    return Path(output).with_suffix(".attempts.jsonl")


def line_of(row):
    """Return the line of a header or record of the log, with a checksum."""
    return json.dumps(row | {"checksum": checksum(row)}) + "\n"


def row_of(line, key):
    """Return the object in a line of the log, a header (key: prompt) or a record (key: number). ValueError if
    the line is damaged or of the other kind."""
    row = parse_json(line, dict)
    if row.pop("checksum", None) != checksum(row):
        raise ValueError("it fails its checksum")
    if key not in row:
        raise ValueError(f"it has no {key}")
    return row


def log_beside(dataset):
    """Yield the header and the records of the log beside a .json file, if it exists. BadInput for a damaged
    line, which could change the prompt form or the ids of answers."""
    path = attempts_path(dataset)
    number = 1
    try:
        lines = path.read_bytes().splitlines() or [b""]
        for number, line in enumerate(lines, 1):
            yield row_of(line, "number" if number > 1 else "prompt")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"Line {number} of {path} can't be read ({reason}): restore the file, or move it "
                       "elsewhere and give the form of its questions with --prompt=.") from None


def read_form(dataset):
    """Return the prompt form of a file's questions: the log's, else prompts.PROMPT. None if it has none."""
    if not rows.has_question(rows.first(dataset)):
        return None
    logged = next(log_beside(dataset), {}) if suffix_of(dataset) == ".json" else {}
    return logged.get("prompt") or prompts.PROMPT


def read_log(path, tokenizer):
    """Return (prompt form, {(question, turns): [(sampled ids, is_target)]}, {question: system message}) from
    datagen.py's log; None and no entries without one. Encoding a completion again could give other ids.
    Excluded: other tokenizers, and ids that do not decode to the model's texts (such as a stop token)."""
    header, *attempts = list(log_beside(path)) or [{}]
    # but for the template, which is not a part of completions
    is_own = {**header.get("tokenizer", {}), "template": 0} == {**tokenizer.describe(), "template": 0}
    sampled = {}
    instructions = defaultdict(str)
    for attempt in attempts:
        instructions[attempt["question"]] = attempt.get("instruction", "")
        if is_own and attempt["verdict"] == "verified":
            turns = tuple(attempt.get("turns", [attempt["completion"]]))
            parts = parts_of_ids(attempt["ids"], attempt.get("forced", ()))
            texts = [tokenizer.text_of(ids) for ids, is_target in parts[:-1] if is_target]
            if (*texts, tokenizer.decode(parts[-1][0])) == turns[::2]:
                sampled[attempt["question"], turns] = parts
    return header.get("prompt"), sampled, instructions


def hold_out(examples, share, seed):
    """Return (train, held out); about `share` of the questions are held out, by a hash with the seed."""
    train = []
    held_out = []
    for example in examples:
        key = f"{seed} {example.question}".encode("utf-8", "replace")
        number = int.from_bytes(hashlib.sha256(key).digest()[:4], "big")
        (held_out if number < share * 2**32 else train).append(example)
    return train, held_out


# --- batches ---

class Batches(torch.utils.data.Dataset):
    """self[step] is this rank's share of a step's batch: a list of micro-batches as `padded` returns them,
    sorted by length to waste few positions on padding.

    Depends only on (seed, step): an epoch visits every example once, in random order, in steps of nearly
    equal size, at most `per_step` examples. A micro-batch has at most `rows` examples and at most
    micro_batch * longest positions; train.py lowers micro_batch if memory is short.
    """

    def __init__(self, examples, per_step, rows, seed, rank=0, world_size=1):
        if not examples:
            raise BadInput("No example is left to train on: give more, or raise --block_size.")
        self.examples = examples
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.steps_per_epoch = -(-len(examples) // per_step)
        self.longest = max(example.length for example in examples)
        self.rows = rows
        self.prefix = None                                    # see common_prefix
        self.multiple = 1                                     # T is a multiple of it, and of 8
        self.micro_batch = rows
        self.latest = (None, None)                            # cache: (epoch, order)
        digest = hashlib.sha256()
        for example in examples:
            digest.update(example.ids.tobytes() + example.is_target.tobytes())
        self.digest = digest.hexdigest()                      # compared by a resumed run

    def order(self, epoch):
        """Return an epoch's order of the examples, [n_examples]."""
        if self.latest[0] != epoch:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self.latest = (epoch, rng.permutation(len(self.examples)))
        return self.latest[1]

    def of_step(self, step):
        """Return a step's examples of all ranks, longest first."""
        epoch, k = divmod(step, self.steps_per_epoch)
        first = len(self.examples) * k // self.steps_per_epoch
        last = len(self.examples) * (k + 1) // self.steps_per_epoch
        chosen = [self.examples[i] for i in self.order(epoch)[first:last]]
        return sorted(chosen, key=lambda example: -example.length)

    def tokens(self, step):
        """Return (positions, targets) of a step over all ranks; targets is the loss denominator."""
        chosen = self.of_step(step)
        positions = sum(example.length for example in chosen)
        targets = sum(int(example.is_target[1:].sum()) for example in chosen)
        return positions, targets

    def __getitem__(self, step):
        mine = self.of_step(step)[self.rank::self.world_size]
        parts = []
        while mine:
            P = 0 if self.prefix is None else len(self.prefix)
            T = width(mine[0].length - P, self.longest - P, self.multiple)
            n = max(1, min(self.rows, self.micro_batch * self.longest // (P + T)))
            parts.append(padded(mine[:n], T, self.prefix))
            mine = mine[n:]
        if not parts:                                         # more ranks than examples
            parts.append(empty_batch())
        return parts


def empty_batch():
    """Return x, y [1, 1] and the index [0] of a micro-batch without targets."""
    return torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), IGNORE), torch.zeros(0, dtype=torch.long)


def width(length, longest, multiple=1):
    """Return T for a micro-batch whose longest example has `length`: the next multiple of 8 and of `multiple`
    (a power of 2), at most `longest`. oneDNN spends half a millisecond on each new matmul shape, so fewer
    shapes make fine-tuning on a CPU about 8% faster (docs/notes.md)."""
    multiple = max(8, multiple)
    return min(longest, -(-length // multiple) * multiple)


def common_prefix(examples):
    """Return the ids [P] that all examples begin with before the first target, such as a system message; None
    if they are less than a quarter of all positions, since the rows' attention would need a mask."""
    first = examples[0].ids
    P = len(first)
    for example in examples:
        P = max(0, min(P, example.is_target.argmax() - 1))
        alike = example.ids[:P] == first[:P]
        P = P if alike.all() else alike.argmin()
    if not P or 4 * P * len(examples) < sum(example.length for example in examples):
        return None
    return torch.from_numpy(first[:P])


def padded(examples, T, prefix=None):
    """Return x, y [rows, T], the index of the targets in y.flatten() and, if there is one, the prefix [P]
    that the rows continue. The rest of y, prompts and positions past an example's end, is IGNORE."""
    P = 0 if prefix is None else len(prefix)
    x = np.zeros((len(examples), T), np.int64)
    y = np.full((len(examples), T), IGNORE)
    for row, example in enumerate(examples):
        n = example.length - P
        x[row, :n] = example.ids[P:-1]
        y[row, :n] = np.where(example.is_target[P + 1:], example.ids[P + 1:], IGNORE)
    batch = [torch.from_numpy(array) for array in (x, y, np.flatnonzero(y != IGNORE))]
    return batch if prefix is None else [*batch, prefix]
