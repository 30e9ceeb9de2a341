"""The one pipeline of datagen.py, eval.py and grpo.py: questions -> requests -> samples -> graded
completions.

    questions = questions_of(task, "test", 500)
    requests = requests_of(tokenizer, task, questions, num_samples=8)
    with Pool(spec) as pool:
        pipeline = Pipeline(engine, pool, tokenizer, task)
        completions = list(pipeline.sample(questions, requests))          # verifiers work meanwhile
        pipeline.graded(wait=True)                                        # now each has its grade
"""
import contextlib
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from engine import Request
from model import IGNORE, Prompts
from runtime import config, distributed
from runtime.progress import ProgressLine
from runtime.prompts import context_of, prompt_ids
from runtime.rewards import Grade

# of a completion that was cut off, where nobody asks for its grade
UNFINISHED = Grade(0.0, {}, "", None)


# --- requests ---

def few_shot_of(cfg, found):
    """Return how many worked examples stand before a question: for a model that was trained here as many as
    grpo.py trained it with, none after other training, for it has seen the form; four for any other. found:
    hf.Found."""
    if cfg.few_shot is not None:
        return cfg.few_shot
    if found.step is None:
        return 4
    saved = config.read_saved(found.folder).get("few_shot")
    return config.check_type(saved, int | None, f"{found.folder}/config.json: few_shot") or 0


def requests_of(tokenizer, task, questions, num_samples=1, max_new_tokens=128, few_shot=0):
    """Return the engine's Request of each question, in their order, with so many worked examples before it
    (without the question itself). ValueError, LookupError or OSError if the task does not have them."""
    examples = {}                            # {name of a task: what is shown before its questions}
    requests = []
    for key, question in enumerate(questions):
        own = task.of(question)
        if own.name not in examples:
            examples[own.name] = own.examples(few_shot) if few_shot else ()
        others = [pair for pair in examples[own.name] if pair[0] != question["question"]]
        instruction = own.instruction if examples[own.name] else None
        ids = prompt_ids(tokenizer, question["question"], own.prompt, others, instruction)
        requests.append(Request(ids, num_samples, key, max_new_tokens))
    return requests


def context_for(cfg, requests, few_shot, found):
    """Return context_of the longest of the prompts, before a model is asked."""
    longest = max(len(request.ids) for request in requests)
    return context_of(longest, cfg.max_new_tokens, found.config.block_size,
                      f"lower --few_shot, which is {few_shot}, or choose another model than {found.folder}")


def stop_strings_of(task):
    """Return what Sampling is given to stop at: the text that ends a task's completions, if it has one."""
    return (task.stop,) if task.stop else ()


# --- samples and their grades ---

@dataclass(eq=False)
class Completion:
    """An answer that was sampled, its grade once a verifier has given it, and what grpo.py finds out about
    it."""
    prompt: list                             # ids
    ids: list                                # sampled after it; the token that ended it is the last
    logprobs: list                           # of them, nats, when they were sampled
    finished: bool                           # not cut off at max_new_tokens
    question: dict | None = None
    key: int = 0                             # of the request: which question (grpo.py: its position in the
                                             # stream)
    index: int = 0                           # which of its samples
    text: str = ""                           # without what follows the task's stop
    grade: Grade | None = None
    # of grpo.py
    reward: float = 0.0                      # NaN if it could not be graded
    advantage: float = 0.0
    trained: bool = True                     # whether the loss looks at it
    trainer_logprobs: list | None = None     # of ids, by the model that is trained before this step
    reference_logprobs: list | None = None   # of ids, by the model that training began with

    @property
    def prefix(self):
        """What stands before the completion's first step, whose input is the prompt's last token."""
        return tuple(self.prompt[:-1])


def zero_variance(group):
    """Tell whether all Completions of a group that could be graded have the same score. A penalty for length
    does not make them differ."""
    return len({c.grade.score for c in group if not c.grade.error}) <= 1


class Pipeline:
    """Asks the engine, and hands what it writes to verifiers, which work while it goes on.

    pool: a rewards.Pool, used by nobody else. What it raises (BrokenReward) comes out of sample() and
    graded().
    """

    def __init__(self, engine, pool, tokenizer, task):
        self.engine = engine
        self.pool = pool
        self.tokenizer = tokenizer
        self.task = task
        # Completions that graded() has not given yet, in the order they were sampled
        self.waiting = deque()
        self.grades = deque()                # of the first of those that need one

    def sample(self, questions, requests, total=None, sampling=None, grade_unfinished=True, what="sampling",
               note=None):
        """Yield a Completion for each sample when it ends; its grade comes with graded().

        questions: what a request's key stands for. total: samples, if requests are no list. sampling: the
        engine's own if None. grade_unfinished: also verify completions that were cut off. what, note: of the
        progress line; note None: the speed.
        """
        if total is None:
            total = sum(request.num_samples for request in requests)
        with ProgressLine(what, total, "answers", note=note or self.speed) as line:
            for sample in self.engine.generate(requests, None, sampling):
                request = sample.request
                text = self.task.cut(self.tokenizer.text_of(sample.ids))
                completion = Completion(request.ids, sample.ids, sample.logprobs, sample.reason == "stop",
                                        questions[request.key], request.key, sample.index, text)
                self.waiting.append(completion)
                if completion.finished or grade_unfinished:
                    self.pool.submit(completion.question, text)
                else:
                    completion.grade = UNFINISHED
                line.add()
                yield completion
        self.pool.flush()

    def speed(self):
        """Return the engine's tokens a second, for people."""
        progress = self.engine.progress
        return f"{progress.tokens_per_s:,.0f} tokens/s" if progress else ""

    def graded(self, wait=False):
        """Return the Completions whose grades have come since the last call, in the order they were sampled;
        wait: all."""
        self.grades.extend(self.pool.collect(wait))
        done = []
        while self.waiting and (self.waiting[0].grade or self.grades):
            completion = self.waiting.popleft()
            completion.grade = completion.grade or self.grades.popleft()
            done.append(completion)
        return done


def ask(pipeline, questions, requests, sampling=None, shown=0, what="evaluating"):
    """Have a model answer questions, each rank its share of them, and grade the answers.

    requests: of all questions, on every rank. Returns, on every rank, the Grades [n_questions][num_samples],
    and the texts [shown][num_samples] of the answers to the first `shown` questions. What one rank raises,
    all raise: ValueError for what can't be sampled, FloatingPointError for weights that are broken,
    BrokenReward if the verifier fails whatever it is given. what: of the progress line.
    """
    mine = []
    error = None
    try:
        for request in requests:
            pipeline.engine.check(request)
        share = requests[distributed.rank()::distributed.world_size()]
        for _ in pipeline.sample(questions, share, sampling=sampling, what=what):
            mine += pipeline.graded()
        mine += pipeline.graded(wait=True)
    except (ValueError, FloatingPointError) as e:
        error = e
        # Drop what no one asks for any more; whatever that raises, the other ranks wait to be told.
        with contextlib.suppress(Exception):
            pipeline.graded(wait=True)
    grades = {}
    texts = {}
    for completion in mine:
        grades[completion.key, completion.index] = completion.grade
        if completion.key < shown:
            texts[completion.key, completion.index] = completion.text
    for error, rank_grades, rank_texts in distributed.gather((error, grades, texts)):
        if error:
            raise error
        grades |= rank_grades
        texts |= rank_texts
    return table(grades, requests), table(texts, requests[:shown])


def table(values, requests):
    """Return [[value of each sample] for each request], from {(key, sample): value}."""
    return [[values[request.key, i] for i in range(request.num_samples)] for request in requests]


# --- completions as padded batches ---

@dataclass
class Batch:
    """Completions that continue prefixes, each of which stands there once; column t is a completion's t-th
    token. Elsewhere y is IGNORE and the numbers are 0."""
    x: torch.Tensor                          # [B, T] ids: a prompt's last, and the completion's but for the last
    y: torch.Tensor                          # [B, T] ids of the completions, where they are trained on
    sampled_logprobs: torch.Tensor           # [B, T] of y: the engine's,
    trainer_logprobs: torch.Tensor           # the trainer's before the step (0 if not needed),
    reference_logprobs: torch.Tensor         # and the reference's (0 without one)
    advantages: torch.Tensor                 # [B]
    trained: torch.Tensor                    # [N]: where in y.flatten() the targets are
    prefixes: Prompts                        # ids [G, P], lengths [G], which of them a row continues [B]

    def to(self, device):
        def move(tensor):
            return tensor.to(device, non_blocking=True)
        *tensors, prefixes = vars(self).values()
        return Batch(*map(move, tensors), Prompts(*map(move, prefixes)))


def padded(completions, multiple=1):
    """Return the Batch of some Completions; of none, a row in which nothing is trained on. Masks come from
    lengths: a completion's last token, be it the end of text, is trained on. P and T are rounded up to a
    multiple."""
    completions = completions or [Completion([0, 0], [0], [0.0], True, trained=False)]
    B = len(completions)
    P, T = widths(completions, multiple)
    x = np.zeros((B, T), np.int64)
    y = np.full((B, T), IGNORE)
    logprobs = np.zeros((3, B, T), np.float32)
    for row, c in enumerate(completions):
        n = len(c.ids)
        x[row, :n] = c.prompt[-1:] + c.ids[:-1]
        if c.trained:
            y[row, :n] = c.ids
        for kind, values in enumerate((c.logprobs, c.trainer_logprobs, c.reference_logprobs)):
            logprobs[kind, row, :n] = 0.0 if values is None else values

    numbers = {}                             # {prefix: its number}
    of_row = [numbers.setdefault(c.prefix, len(numbers)) for c in completions]
    lengths = [len(prefix) for prefix in numbers]
    ids = np.zeros((len(numbers), P), np.int64)
    for number, prefix in enumerate(numbers):
        ids[number, :len(prefix)] = prefix
    return Batch(
        torch.from_numpy(x), torch.from_numpy(y), *torch.from_numpy(logprobs),
        torch.tensor([c.advantage for c in completions]), torch.from_numpy(np.flatnonzero(y != IGNORE)),
        Prompts(torch.from_numpy(ids), torch.tensor(lengths), torch.tensor(of_row)))


def token_cost(n_prefixes, longest_prefix, rows, T):
    """Return what a forward pass of rows of T ids after so many prefixes takes, in positions: those of the
    linear layers, padding included, and an eighth of the keys and values that attention copies for each row,
    which is about their share of a position's memory."""
    return n_prefixes * longest_prefix + rows * T + rows * (longest_prefix + T) / 8


def widths(completions, multiple):
    """Return P and T of a batch of them, rounded up to a multiple."""
    P = max(len(c.prefix) for c in completions)
    T = max(len(c.ids) for c in completions)
    return round_up(P, multiple), round_up(T, multiple)


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def cost_of(completions, multiple=1):
    """Return the token_cost of a batch of them."""
    P, T = widths(completions, multiple)
    return token_cost(len({c.prefix for c in completions}), P, len(completions), T)


def micro_batches(completions, tokens, multiple=1):
    """Return lists of Completions whose token_cost, with lengths rounded up to a multiple, is at most
    `tokens`, or of a single one if that alone has more. In the order that costs less: those of about equal
    lengths together, for less padding, or those of a prompt, whose prefix then stands in one list."""
    longest = {}                             # {prefix: the length of the longest completion after it}
    for c in completions:
        longest[c.prefix] = max(longest.get(c.prefix, 0), len(c.ids))

    def by_length(c):
        return -len(c.ids), c.prompt

    def by_prompt(c):
        return -longest[c.prefix], c.prompt, -len(c.ids)
    ways = [cut(sorted(completions, key=order), tokens, multiple) for order in (by_length, by_prompt)]
    return min(ways, key=lambda parts: sum(cost_of(part, multiple) for part in parts))


def cut(completions, tokens, multiple=1):
    """Return lists of Completions that follow one another, each of a token_cost of at most `tokens`."""
    parts = []
    prefixes = set()
    P = 0
    T = 0
    for c in completions:
        prefixes = prefixes | {c.prefix}
        P = max(P, round_up(len(c.prefix), multiple))
        T = max(T, round_up(len(c.ids), multiple))
        if not parts or token_cost(len(prefixes), P, len(parts[-1]) + 1, T) > tokens:
            parts.append([])
            prefixes = {c.prefix}
            P, T = widths([c], multiple)
        parts[-1].append(c)
    return parts


@dataclass
class WorstCase:
    """Micro-batches of the longest prompts and answers there can be."""
    prompt: int                              # tokens
    answer: int
    k_samples: int
    most: int                                # answers of an optimizer step, a rank

    @property
    def cost(self):
        """Of one answer, in tokens of a micro-batch."""
        return token_cost(1 / self.k_samples, self.prompt, 1, self.answer)

    def answers(self, tokens):
        """Return how many answers a micro-batch of so many tokens holds."""
        return min(self.most, max(1, int(tokens // self.cost)))

    def rows(self, tokens, context):
        """Return how many sequences of that context take as many positions."""
        return math.ceil(self.answers(tokens) * self.cost / context)

    def smaller(self, tokens):
        """Return the tokens of a micro-batch of half the answers; None if one of them is all it holds."""
        if self.answers(tokens) > 1:
            return math.ceil(self.answers(tokens) // 2 * self.cost)
        return math.ceil(self.cost) if tokens > math.ceil(self.cost) else None

    def inputs(self, tokens, temperature, device):
        """Return what GPT.token_logprobs is given in such a micro-batch."""
        n = self.answers(tokens)
        n_prompts = math.ceil(n / self.k_samples)
        x = torch.zeros(n, self.answer, dtype=torch.long, device=device)
        ids = torch.zeros(n_prompts, self.prompt, dtype=torch.long, device=device)
        of_row = torch.arange(n, device=device) // self.k_samples
        return x, x, temperature, Prompts(ids, ids.new_full((n_prompts,), self.prompt), of_row)


@torch.no_grad()
def logprobs_of(model, hw, completions, tokens, temperature):
    """Yield (Completion, log-probabilities of its ids under the model), in micro-batches of at most so many
    `tokens`. Of a sharded model every rank must call."""
    for part in distributed.in_step(model, micro_batches(completions, tokens, hw.length_multiple), []):
        batch = padded(part, hw.length_multiple).to(hw.device)
        with hw.autocast():
            logprobs, _ = model.token_logprobs(batch.x, batch.y, temperature, batch.prefixes, batch.trained)
        for c, row in zip(part, logprobs.cpu().numpy()):
            yield c, row[:len(c.ids)].tolist()
