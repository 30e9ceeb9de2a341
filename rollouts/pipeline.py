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
from collections import deque
from dataclasses import dataclass

from engine import Request
from runtime import config, distributed
from runtime.progress import ProgressLine
from tasks._pool import Grade
from text.prompts import context_of, prompt_ids

# of a completion that was cut off, where nobody asks for its grade
UNFINISHED = Grade(0.0, {}, "", None)


# --- requests ---

def few_shot_of(cfg, found):
    """Return how many worked examples stand before a question: for a model that was trained here as many as
    grpo.py trained it with, none after other training, for it has seen the form; four for any other. found:
    hf.ModelSource."""
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
