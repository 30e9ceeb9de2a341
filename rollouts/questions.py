"""What a model is asked: the questions of a task or of a file, and their order in reinforcement learning."""
import contextlib
import functools
import hashlib
import random
import re
from dataclasses import dataclass, field

import numpy as np

import tasks
from runtime import distributed
from runtime.config import BadInput
from text.examples import is_answer, read_rows


@contextlib.contextmanager
def task_errors():
    """Turn what a task, its workers or the engine say of their input into BadInput. A KeyError is a mistake
    in a task's code."""
    try:
        yield
    except (LookupError, ValueError, OSError, FloatingPointError) as e:
        if isinstance(e, KeyError | IndexError):
            raise
        raise BadInput(str(e)) from None


@task_errors()
def questions_of(task, split, n, seed=0, most=1000):
    """Return n questions of a task's split, at least one; for "auto" as many as there are, up to `most`.
    BadInput if there are not so many."""
    questions = task.questions(split, seed, most if n == "auto" else n, fewer=True)
    if isinstance(n, int) and len(questions) < n:
        raise ValueError(f"--num_questions={n} is more than there are: the split {split} of {task.name} has "
                         f"{len(questions)} questions; lower --num_questions, or leave it out.")
    if not questions:
        raise ValueError(f"The task {task.name} has no {split} questions: choose another split, or another "
                         "task.")
    return questions


def plain(text):
    """Return a question as it is compared: without case, spaces, and what punctuation is no part of a number
    or a formula."""
    return " ".join(re.sub(r"""[?!;:"'_]|[.,](?!\d)""", " ", text).casefold().split())


@task_errors()
def unseen_questions(task, split, n, seed=0):
    """Return (questions of a split to train on, each text once; how many were dropped because they, or ones
    that read the same, stand in the test split)."""
    drawn = questions_of(task, split, n, seed)
    by_text = {}
    for question in drawn:
        by_text.setdefault((question.get("domain"), question["question"]), question)
    questions = [*by_text.values()]
    say_copies(len(drawn) - len(questions), task.name)
    try:
        test = {plain(q["question"]) for q in task.questions("test")}
    except ValueError as e:
        print("The task has no test split that could be read, so no question was compared with it "
              f"({e})", flush=True)
        test = set()
    kept = [q for q in questions if plain(q["question"]) not in test]
    if not kept:
        raise ValueError(f"All {len(questions)} questions of {task.name} stand in its test split too: let "
                         "questions() tell splits apart.")
    return kept, len(questions) - len(kept)


def say_copies(n, source):
    if n:
        print(f"Questions of {source} that repeat the text of an earlier one are left out, whatever their "
              f"answers: {n}.", flush=True)


def read_questions(path, n_valid):
    """Return (questions to train on, questions for validation) of a .jsonl file; the latter a tenth by a
    hash, n_valid at most."""
    questions = {}
    number = 0
    for number, row in enumerate(read_rows(path), 1):
        text = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if not isinstance(text, str) or "answer" not in row or not is_answer(row["answer"]):
            raise BadInput(f'Row {number} of {path} is no question: it should be {{"prompt": text, "answer": ...}}, and the '
                           'answer not NaN.')
        questions.setdefault(text, row | {"question": text})
    say_copies(number - len(questions), path)
    tenth = [text for text in questions
             if int(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), 16) % 10 == 0]
    valid = [questions.pop(text) for text in tenth[:n_valid]]
    if not questions:
        raise BadInput(f"{path} holds no question to train on: give a --dataset= with more.")
    return list(questions.values()), valid


# --- the stream that grpo.py asks ---

@dataclass
class StreamState:
    """What of the stream is saved with the run."""
    asked: int = 0                           # positions that have been passed, of all domains
    passed: dict = field(default_factory=dict)       # {domain: of its own}
    turns: dict = field(default_factory=dict)        # {domain: questions asked}
    solved: dict = field(default_factory=dict)       # {number of a question, as a text: epoch in which
                                             # all its samples were right}
    slots: int = 0                           # samples in flight, as many as fit


class QuestionStream:
    """The endless stream of questions: each once an epoch, in an order of its own. pairs: [(question,
    Request)]. Of a mixture's tasks (domains) each has a stream of its own, and gives its share of a step's
    questions, or of the steps (--mixing)."""

    def __init__(self, cfg, pairs, task):
        self.cfg = cfg
        self.pairs = pairs
        self.state = StreamState()
        self.weights = {name: weight for name, weight in task.weights.items() if weight}
        self.domains = list(self.weights)
        self.turn = None                     # the domain that was asked last
        self.numbers = {name: [] for name in self.domains}             # of pairs, each domain's
        for number, (question, _) in enumerate(pairs):
            own = task.of(question).name
            if own in self.numbers:          # or its weight is 0
                self.numbers[own].append(number)

    def __len__(self):
        return len(self.pairs)

    def domain(self, position):
        """Return the domain whose question stands at a position of the stream."""
        return self.domains[position % len(self.domains)]

    def epoch(self, position):
        """Return how often its domain's questions have all been asked before."""
        return position // len(self.domains) // len(self.numbers[self.domain(position)])

    def number(self, position):
        """Return which question stands at a position of the stream."""
        numbers = self.numbers[self.domain(position)]
        return numbers[question_at(position // len(self.domains), len(numbers), self.cfg.seed)]

    def next(self, again=False):
        """Return the positions of a step's questions, of all ranks together. Those that rest are passed
        over. again: of more questions for the same step, which with --mixing=round_robin has one domain."""
        state = self.state
        if state.asked and not state.passed:                 # a run from before there were domains
            state.passed[self.domains[0]] = state.asked
        n = self.cfg.prompts_per_step
        at_once = n if self.cfg.mixing == "round_robin" else 1
        positions = []
        resting = set()
        while len(positions) < n:
            if not again or at_once == 1:
                self.turn = tasks.next_task(self.weights, state.turns)
            state.turns[self.turn] = state.turns.get(self.turn, 0) + at_once
            positions += [self.next_of(self.turn, resting) for _ in range(at_once)]
        if len(self.domains) > 1:            # or a mini-batch, which is every n-th, might miss some
            random.Random(f"{self.cfg.seed} {positions[0]}").shuffle(positions)
        return positions

    def next_of(self, domain, resting):
        """Return the next position of a domain whose question does not rest; if all do, they are asked all
        the same. resting: numbers of questions that were passed over in this step."""
        state = self.state
        which = self.domains.index(domain)
        while True:
            position = state.passed.get(domain, 0) * len(self.domains) + which
            state.passed[domain] = state.passed.get(domain, 0) + 1
            state.asked += 1
            number = self.number(position)
            rest = self.cfg.skip_solved
            rested = self.epoch(position) - state.solved.get(str(number), -rest - 1) > rest
            if rested or resting.issuperset(self.numbers[domain]):
                return position
            resting.add(number)

    def mark_solved(self, groups):
        """Let the questions rest all of whose samples were right, on any rank. groups: {position:
        [Completion]}."""
        solved = [position for position, group in groups.items() if all(c.grade.score == 1 for c in group)]
        for positions in distributed.gather(solved):
            for position in positions:
                self.state.solved[str(self.number(position))] = self.epoch(position)


def question_at(position, n, seed):
    """Return the number of the question at a position of the stream of n questions."""
    epoch, k = divmod(position, n)
    return int(epoch_order(n, seed, epoch)[k])


@functools.lru_cache(maxsize=32)
def epoch_order(n, seed, epoch):
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)
