"""The pipeline of datagen.py, eval.py and grpo.py: questions -> requests -> samples -> graded completions.

    questions = questions_of(task, "test", 500)
    requests = requests_of(tokenizer, task, questions, num_samples=8)
    with Pool(spec) as pool:
        pipeline = Pipeline(engine, pool, tokenizer, task)
        completions = list(pipeline.sample(questions, requests))          # verifiers run meanwhile
        pipeline.graded(wait=True)                                        # now all are graded
"""
import contextlib
import dataclasses
from collections import deque
from dataclasses import dataclass

from engine import Request
from engine.scheduler import forced_tokens
from rollouts.episodes import Environment, reply_tokens
from rollouts.questions import default_few_shot
from runtime import config, distributed
from runtime.progress import ProgressLine
from tasks._pool import Grade
from text.prompts import context_of, instruction_of, prompt_ids

# the grade of truncated completions that are not verified
UNFINISHED = Grade(0.0, {}, "", None)


# --- requests ---

def few_shot_of(cfg, source):
    """Return cfg.few_shot, or by default the saved value for a grpo.py run, 0 for other runs and with a
    dataset, whose task may have no examples, 4 for a Hugging Face model. source: hub.ModelSource."""
    if cfg.few_shot is not None or getattr(cfg, "dataset", None):
        return cfg.few_shot or 0
    return default_few_shot(None if source.step is None else source.folder)


def requests_of(tokenizer, task, questions, num_samples=1, max_new_tokens=128, few_shot=0):
    """Return an engine Request per question, in order, with few_shot worked examples (never the question
    itself) in its prompt. ValueError, LookupError or OSError if the task lacks them."""
    examples = {}                            # {task name: [(question, solution)]}
    requests = []
    for key, question in enumerate(questions):
        own = task.of(question)
        if own.name not in examples:
            try:
                examples[own.name] = own.examples(few_shot) if few_shot else ()
            except ValueError as e:
                raise ValueError(f"{str(e).removesuffix('.')}; or give --few_shot=0.") from e
        others = [pair for pair in examples[own.name] if pair[0] != question["question"]]
        instruction = instruction_of(tokenizer, own, question)
        ids = prompt_ids(tokenizer, question["question"], own.prompt, others, instruction)
        requests.append(Request(ids, num_samples, key, max_new_tokens))
    return requests


def with_requests(cfg, tokenizer, task, questions, num_samples, positions):
    """Return [(question, Request)] of the questions whose prompts fit max_prompt_tokens and leave room for an
    answer."""
    longest = min(positions - 1, cfg.max_prompt_tokens or positions)
    requests = requests_of(tokenizer, task, questions, num_samples, cfg.max_new_tokens, cfg.few_shot)
    pairs = []
    for question, request in zip(questions, requests):
        if len(request.ids) <= longest:
            pairs.append((question, dataclasses.replace(request, key=len(pairs))))
    return pairs


def context_for(cfg, task, requests, few_shot, source):
    """Return the context in tokens that the longest prompt and its completion need
    (text.prompts.context_of)."""
    longest = max(len(request.ids) for request in requests)
    shorter = f"lower --few_shot, which is {few_shot}" if few_shot else "leave its question out"
    return context_of(longest, cfg.max_new_tokens, source.config.block_size,
                      f"{shorter}, or choose another model than {source.folder}",
                      reply_tokens(cfg, task, source.config))


def stop_strings_of(task):
    """Return Sampling's stop_strings for a task: the texts that end a completion or a turn, if it has any."""
    return tuple(text for text in (task.stop, task.turn_stop) if text)


# --- samples and their grades ---

@dataclass(eq=False)
class Completion:
    """A sampled completion, its grade once verified, and the values that grpo.py adds."""
    prompt: list                             # ids
    ids: list                                # sampled, with the final stop token, and an environment's
    logprobs: list                           # of ids at sampling time, nats; 0 for an environment's
    finished: bool                           # whether the model ended it
    question: dict | None = None
    key: int = 0                             # the request's key: index of the question (grpo.py: its position
                                             # in the stream)
    index: int = 0                           # sample index within the question
    text: str = ""                           # up to the task's stop text
    grade: Grade | None = None
    forced: list = dataclasses.field(default_factory=list)       # (first, last): ids[first:last] are the
                                             # environment's, which are context and not trained on
    turns: list | None = None                # of an episode: the model's and the environment's texts in turn
    reason: str = ""                         # of the end: stop | length (max_new_tokens) | reply (the
                                             # environment's did not fit)
    # set by grpo.py
    reward: float = 0.0                      # NaN if grading failed
    advantage: float = 0.0
    trained: bool = True                     # whether it contributes to the loss
    trainer_logprobs: list | None = None     # of ids, by the policy before this step
    reference_logprobs: list | None = None   # of ids, by the reference model

    @property
    def n_sampled(self):
        """Return the number of ids that the model wrote."""
        return len(self.ids) - forced_tokens(self.forced)

    @property
    def n_context(self):
        """Return the number of other ids: the prompt's and an environment's."""
        return len(self.prompt) + len(self.ids) - self.n_sampled

    @property
    def prefix(self):
        """Return the prompt without its last token, which is the first input of the completion."""
        return tuple(self.prompt[:-1])


def zero_variance(group):
    """Tell whether all graded Completions of a group have the same score, before any length penalty."""
    return len({c.grade.score for c in group if not c.grade.error}) <= 1


class Pipeline:
    """Samples completions with the engine and grades them in the pool while sampling continues.

    pool: a tasks._pool.Pool that nothing else uses. sample() and graded() raise its BrokenReward.
    """

    def __init__(self, engine, pool, tokenizer, task):
        self.engine = engine
        self.pool = pool
        self.tokenizer = tokenizer
        self.task = task
        self.waiting = deque()               # Completions not yet returned by graded(), in sampling order
        self.grades = deque()                # grades for the first of these that need one

    def sample(self, questions, requests, total=None, sampling=None, grade_unfinished=True, label="sampling",
               note=None):
        """Yield a Completion for each sample as it ends; graded() returns it with its grade.

        questions: indexed by a request's key. total: number of samples, needed if requests is not a list.
        sampling: None for the engine's own. grade_unfinished: also verify truncated completions. label, note:
        of the progress line; note None: the speed.
        """
        if total is None:
            total = sum(request.num_samples for request in requests)
        responds = self.task.responds
        environment = Environment(self.task, self.tokenizer, self.pool, questions) if responds else None
        with ProgressLine(label, total, "answers", note=note or self.speed) as line:
            for sample in self.engine.generate(requests, None, sampling, environment):
                request = sample.request
                completion = Completion(request.ids, sample.ids, sample.logprobs, sample.reason == "stop",
                                        questions[request.key], request.key, sample.index,
                                        reason=sample.reason)
                if environment:
                    environment.finish(sample, completion)
                else:
                    completion.text = self.task.cut(self.tokenizer.text_of(sample.ids))
                self.waiting.append(completion)
                if not (completion.grade or completion.finished or grade_unfinished):
                    completion.grade = UNFINISHED
                if not completion.grade:
                    self.pool.submit(completion.question, completion.text, completion.turns)
                line.add()
                yield completion
        self.pool.flush()

    def speed(self):
        """Return the engine's tokens/s as text."""
        return f"{self.engine.progress.tokens_per_s:,.0f} tokens/s"

    def graded(self, wait=False):
        """Return the Completions graded since the last call, in order of sampling. wait: for all."""
        self.grades.extend(self.pool.collect(wait))
        done = []
        while self.waiting and (self.waiting[0].grade or self.grades):
            completion = self.waiting.popleft()
            completion.grade = completion.grade or self.grades.popleft()
            done.append(completion)
        return done


def ask(pipeline, questions, requests, sampling=None, label="evaluating"):
    """Sample and grade answers to questions, divided among ranks.

    requests: for all questions, on every rank. Returns, on every rank, the Grades [n_questions][num_samples]
    and the rank's own Completions. An error on one rank is raised on all: ValueError for invalid requests,
    FloatingPointError for non-finite weights, BrokenReward if the verifier always fails. label: of the
    progress line.
    """
    mine = []
    error = None
    try:
        for request in requests:
            pipeline.engine.check(request)
        share = requests[distributed.rank()::distributed.world_size()]
        for _ in pipeline.sample(questions, share, sampling=sampling, label=label):
            mine += pipeline.graded()
        mine += pipeline.graded(wait=True)
    except (ValueError, FloatingPointError) as e:
        error = e
        # Discard pending grades. Ignore what that raises: the other ranks wait at the gather.
        with contextlib.suppress(Exception):
            pipeline.graded(wait=True)
    grades = {}
    for error, ranks in distributed.gather((error, {(c.key, c.index): c.grade for c in mine})):
        if error:
            raise error
        grades |= ranks
    return [[grades[request.key, i] for i in range(request.num_samples)] for request in requests], mine
