"""Questions of a task or a dataset, and the stream that orders them for grpo.py."""
import contextlib
import functools
import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import tasks
from runtime import config, distributed
from runtime.config import BadInput
from text import rows


@contextlib.contextmanager
def task_errors():
    """Turn errors of a task, its workers or the engine into BadInput, except KeyError and IndexError, which
    are bugs in a task's code."""
    try:
        yield
    except (LookupError, ValueError, OSError, FloatingPointError) as e:
        if isinstance(e, KeyError | IndexError):
            raise
        raise BadInput(str(e)) from None


@task_errors()
def questions_of(task, split, n, seed=0, most=1000, option="--num_questions"):
    """Return n questions of a task's split, at least one; "auto": all, at most `most`. BadInput if there are
    fewer than n, which the `option` set."""
    questions = task.questions(split, seed, most if n == "auto" else n, fewer=True)
    if isinstance(n, int) and len(questions) < n:
        raise ValueError(f"{option}={n} is too many: the split {split} of {task.name} has {len(questions)} "
                         f"questions; lower {option}.")
    if not questions:
        raise ValueError(f"The task {task.name} has no {split} questions: choose another split or task.")
    return questions


def default_few_shot(run):
    """Return the worked examples in a prompt: as a grpo.py run saved, 0 for others, 4 for no run's model."""
    saved = {"few_shot": 4} if run is None else config.read_saved(run)
    return config.check_type(saved.get("few_shot"), int | None, f"{run}/config.json: few_shot") or 0


def normalized(text):
    """Return a question for comparison: lower case, single spaces, no punctuation except in numbers and
    formulas."""
    return " ".join(re.sub(r"""[?!;:"'_]|[.,](?!\d)""", " ", text).casefold().split())


@task_errors()
def unseen_questions(task, split, n, seed=0):
    """Return (distinct training questions of a split, number dropped because their normalized text is in the
    test split)."""
    drawn = questions_of(task, split, n, seed)
    by_text = {}
    for question in drawn:
        by_text.setdefault((question.get("domain"), question["question"]), question)
    questions = [*by_text.values()]
    report_duplicates(len(drawn) - len(questions), task.name)
    try:
        test = {normalized(q["question"]) for q in task.questions("test")}
    except ValueError as e:
        print(f"The task has no readable test split, so no question was compared with it ({e}).", flush=True)
        test = set()
    kept = [q for q in questions if normalized(q["question"]) not in test]
    if not kept:
        raise ValueError(f"All {len(questions)} questions of {task.name} are also in its test split: make "
                         "questions() return different ones for each split.")
    return kept, len(questions) - len(kept)


def report_duplicates(n, source):
    if n:
        print(f"Questions of {source} dropped because an earlier one has the same text: {n}.", flush=True)


def questions_in(path, split="train", task=None):
    """Return the distinct questions of a dataset (see rows.read), {text: question}; BadInput for any other
    row. All or none have an answer; none may, unless the task is built in and reads it."""
    all_rows = rows.read(path, split)
    needs_answer = any(isinstance(row, dict) and row.get("answer") is not None for row in all_rows)
    questions = {}
    for number, row in enumerate(all_rows, 1):
        try:
            question = rows.question_of(row, needs_answer)
            if number == 1 and task and not needs_answer:
                check_keys(task.of(question), question)
        except ValueError as e:
            raise BadInput(f"Row {number} of {path} is not a question ({e}): correct it.") from None
        system = question.get("system", "")
        key = f"{system}\n{question['question']}" if system else question["question"]
        questions.setdefault(key, question)
    report_duplicates(len(all_rows) - len(questions), path)
    if not questions:
        raise BadInput(f"{path} has no questions: give another --dataset=.")
    return questions


def check_keys(task, question):
    """Raise ValueError if a built-in task's reward reads a key that a question lacks."""
    if task.module.__name__.startswith("tasks."):
        try:
            task.reward(question, "")
        except KeyError as e:
            raise ValueError(f"it has no {e}, and the task {task.name} reads that") from None


def read_questions(path, n_valid, task=None):
    """Return (training questions, validation questions) of a dataset. A hash of the text selects a tenth
    for validation, at most n_valid."""
    questions = questions_in(path, task=task)
    tenth = [text for text in questions
             if int(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), 16) % 10 == 0]
    valid = [questions.pop(text) for text in tenth[:n_valid]]
    if not questions:
        raise BadInput(f"{path} has no questions to train on: give a --dataset= with more questions.")
    return list(questions.values()), valid


def open_questions(cfg, task):
    """Return (training questions, validation questions, note on dropped questions for the log)."""
    if cfg.dataset:
        n_valid = cfg.eval_questions if cfg.eval_interval else 0
        train, valid = read_questions(cfg.dataset, n_valid, task)
        return train[:cfg.num_questions], valid, ""
    train, dropped = unseen_questions(task, "train", cfg.num_questions, cfg.seed)
    valid = task.questions("valid")[:cfg.eval_questions] if cfg.eval_interval else []
    return train, valid, f" ({dropped} also in the test split dropped)" if dropped else ""


# --- the question stream of grpo.py ---

@dataclass
class StreamState:
    """The stream's state, saved with the run."""
    passed: dict = field(default_factory=dict)       # {domain: its positions passed}
    turns: dict = field(default_factory=dict)        # {domain: its questions asked}
    solved: dict = field(default_factory=dict)       # {str(question number): epoch in which all its
                                             # samples were right}
    slots: int = 0                           # samples in flight on each rank
    samples: int = 0                         # of a step on each rank; 0: not known


class Place(NamedTuple):
    """What stands at a position of a QuestionStream."""
    domain: str
    number: int                              # of the question: its index in pairs
    epoch: int                               # of the domain, from 0


class QuestionStream:
    """An endless stream of questions: each once per epoch, newly shuffled each epoch. pairs: [(question,
    Request)]. Each task (domain) of a mixture has its own stream and gets its weight's share of a step's
    questions, or of the steps (--mixing). A position is a whole number, the key of the request; the domains
    take turns in it."""

    def __init__(self, cfg, pairs, task):
        self.cfg = cfg
        self.pairs = pairs
        self.state = StreamState()
        self.weights = {name: weight for name, weight in task.weights.items() if weight}
        self.domains = list(self.weights)
        self.turn = None                     # the domain asked last
        self.numbers = {name: [] for name in self.domains}             # {domain: indices into pairs}
        for number, (question, _) in enumerate(pairs):
            own = task.of(question).name
            if own in self.numbers:          # else its weight is 0
                self.numbers[own].append(number)

    def __len__(self):
        return len(self.pairs)

    def domain(self, position):
        """Return the domain of a stream position."""
        return self.domains[position % len(self.domains)]

    def place(self, position):
        """Return the Place at a stream position."""
        domain = self.domain(position)
        numbers = self.numbers[domain]
        index = position // len(self.domains)                # in the domain's own stream
        number = numbers[question_at(index, len(numbers), self.cfg.seed)]
        return Place(domain, number, index // len(numbers))

    def next(self, again=False):
        """Return the stream positions of a step's questions, for all ranks, without resting questions. again:
        more questions for the same step, with --mixing=round_robin from the same domain."""
        turns = self.state.turns
        n = self.cfg.prompts_per_step
        per_turn = n if self.cfg.mixing == "round_robin" else 1
        positions = []
        resting = set()
        while len(positions) < n:
            if not again or self.cfg.mixing != "round_robin":
                self.turn = tasks.next_task(self.weights, turns)
            turns[self.turn] = turns.get(self.turn, 0) + per_turn
            positions += [self.next_position(self.turn, resting) for _ in range(per_turn)]
        if len(self.domains) > 1:            # else a mini-batch (every n-th question) might miss a domain
            random.Random(f"{self.cfg.seed} {positions[0]}").shuffle(positions)
        return positions

    def next_position(self, domain, resting):
        """Return a domain's next position whose question is not resting; if all rest, the next one. resting:
        question numbers skipped in this step, updated."""
        state = self.state
        offset = self.domains.index(domain)
        while True:
            position = state.passed.get(domain, 0) * len(self.domains) + offset
            state.passed[domain] = state.passed.get(domain, 0) + 1
            place = self.place(position)
            rest = self.cfg.skip_solved
            rested = place.epoch - state.solved.get(str(place.number), -rest - 1) > rest
            if rested or resting.issuperset(self.numbers[domain]):
                return position
            resting.add(place.number)

    def mark_solved(self, groups):
        """Rest the questions whose samples were all right (--skip_solved), on all ranks. groups: this rank's
        {position: [Completion]}."""
        solved = [position for position, group in groups.items() if all(c.grade.score == 1 for c in group)]
        for positions in distributed.gather(solved):
            for place in map(self.place, positions):
                self.state.solved[str(place.number)] = place.epoch

    def digest(self):
        """Return a digest of all questions and their prompts."""
        asked = json.dumps([(question, request.ids) for question, request in self.pairs])
        return hashlib.sha256(asked.encode()).hexdigest()


def check_domains(stream, asked, positions):
    """Raise BadInput for a task with fewer than two questions left, or fewer questions in total than a step
    needs. asked: {task: number of questions before long ones were dropped}."""
    for domain, numbers in stream.numbers.items():
        if not asked[domain]:
            raise BadInput(f"{domain} has no questions to train on: raise --num_questions, change "
                           "--dataset=, or leave that task out.")
        if len(numbers) < min(2, asked[domain]):
            raise BadInput(f"Every prompt of {domain}{' but one' if numbers else ''} exceeds "
                           f"--max_prompt_tokens or the model's {positions} positions: raise the first, "
                           "lower --few_shot, or change models.")
    if len(stream) < stream.cfg.prompts_per_step <= asked.total():
        raise BadInput(f"Only {len(stream)} of {asked.total()} prompts fit --max_prompt_tokens and the "
                       f"model's {positions} positions, and a step needs {stream.cfg.prompts_per_step}: "
                       "lower --few_shot or --prompts_per_step.")


def question_at(position, n, seed):
    """Return the index of the question at a position of an endless stream over n questions."""
    epoch, k = divmod(position, n)
    return int(epoch_order(n, seed, epoch)[k])


@functools.lru_cache(maxsize=32)
def epoch_order(n, seed, epoch):
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)
