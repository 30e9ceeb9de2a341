"""Batched generation: continuous batching over slots, each prompt prefilled once for all of its samples.

    engine = Engine(model, sampling=Sampling(temperature=0.8, stop=(tokenizer.eos,)))
    for sample in engine.generate(Request(ids, num_samples=8, key=i) for i, ids in enumerate(prompts)):
        print(sample.request.key, sample.index, sample.ids, sample.reason)

Samples wait for free slots. A prompt is prefilled once and copied to the slots of its samples. All running
samples decode together, one token per step. The host launches steps and reads the results every `poll` steps.
With an `environment` (rollouts/episodes.py), a sample that stops may go on, after the environment's tokens.

The host's part is engine/scheduler.py, the device's engine/runner.py.
"""
from operator import attrgetter

import torch

from engine import kv_cache
from engine.runner import ModelRunner
from engine.sampler import Sampling, StopStrings, stream
from engine.scheduler import Scheduler
from runtime import memory

SORT_EVERY = 32                              # on a CPU: polls between two sorts of the rows by position


class Engine:
    """Sample in batches with generate(); replace the weights with load()."""

    def __init__(self, model, slots=None, context=None, sampling=Sampling(), *, seed=0, decode=None,
                 **options):
        """Copy the model. sampling: default for generate(). decode: ids -> text, needed for stop strings.
        slots, context and options (dtype, device, deterministic, poll ...): see ModelRunner."""
        self.runner = ModelRunner(model, slots, context, **options)
        self.sampling = sampling
        self.seed = seed
        self.decode = decode
        self.stop_strings = {}               # {texts: StopStrings} of all calls
        self.find_strings(sampling)
        self.progress = None                 # Scheduler of the generate() that owns the slots

    slots = property(attrgetter("runner.slots"))
    context = property(attrgetter("runner.context"))
    dtype = property(attrgetter("runner.dtype"))
    format = property(attrgetter("runner.format"))
    half_weights = property(attrgetter("runner.half_weights"))
    cuda_graphs = property(attrgetter("runner.cuda_graphs"))
    fingerprint = property(attrgetter("runner.fingerprint"))

    def load(self, model):
        """Copy the weights of a model of the same shape, with adapters merged in fp32. An unfinished
        generate() can't continue, since its keys and values are of old weights."""
        self.progress = None
        self.runner.load(model)

    def bytes_read(self, lengths):
        """Return the minimum bytes read by the last generate(), for samples of lengths (prompt, new tokens):
        the weights in each step, and for each token the keys and values before it (or the states)."""
        return self.progress.steps * self.runner.weight_bytes + self.runner.cache.bytes_read(lengths)

    def generate(self, requests, progress=None, sampling=None, environment=None):
        """Yield Samples as they finish.

        requests: an iterable, read only when slots are free.
        progress: called after each poll with the Scheduler, which has counters and in_flight().
        sampling: for this call; None: the engine's.
        environment: ask(Sample) is called when a sample stops, and returns whether it is to go on; then
        replies(wait) returns [(Sample, ids to put behind it, or None: it has ended)], and waits for at least
        one if asked to. Other samples run on meanwhile. max_new_tokens limits a sample's own tokens and,
        separately, the environment's.

        When out of memory, restart the samples in flight with half the slots. Their noise is the same, and so
        is the result.
        """
        runner = self.runner
        sampling = sampling or self.sampling
        strings = self.find_strings(sampling)
        if environment and runner.config.mixer != "softmax":
            raise ValueError(f"mixer={runner.config.mixer} can't go on behind the text of an environment: "
                             "use a model with mixer=softmax, or a task without respond().")
        requests = iter(requests)
        scheduler = Scheduler(self.slots, self.context, runner.poll, sampling, strings, environment)
        self.progress = scheduler
        runner.reset()
        while True:
            finished = scheduler.receive()
            while scheduler.has_room() and (request := next(requests, None)):
                self.check(request)
                scheduler.add(request)
            if not (finished or scheduler.busy or scheduler.waiting):
                return
            draws = None
            try:
                self.admit(scheduler)
                draws = self.advance(scheduler)
            except Exception as e:
                if self.slots == 1 or not memory.is_out_of_memory(e):
                    raise
            if draws is None:                # not within `except`, where the exception holds memory
                runner.allocate(self.slots // 2)
                scheduler.restart(self.slots)
            elif draws:
                finished += scheduler.record(*draws)
            if progress:
                progress(scheduler)
            yield from finished
            if self.progress is not scheduler:
                raise RuntimeError("Another generate() or load() took over this engine's slots: "
                                   "finish one call before the next, or make two engines.")

    @torch.inference_mode()
    def admit(self, scheduler):
        """Move waiting samples into free slots. A prompt is prefilled in one of them, without its last token,
        the input of the first step, and copied to the others and to the cache's last row if more wait."""
        runner = self.runner
        admitted = scheduler.schedule()
        runner.cache.fit(max((len(request.ids) for request, *_ in admitted), default=0))
        runner.prefill([(slots[0], request.ids[:-1]) for request, slots, in_last_row, _ in admitted
                        if not in_last_row])
        last_row = self.slots
        copies = []
        for request, slots, in_last_row, keep in admitted:
            rows = [last_row, *slots] if in_last_row else [*slots, last_row] if keep else slots
            copies.append((rows[0], rows[1:], len(request.ids) - 1))
        runner.copy_prompts(copies)
        if admitted:
            self.start(scheduler, [slot for _, slots, *_ in admitted for slot in slots])
        for source, target, n in scheduler.compact():
            runner.move(source, target, n)

    def start(self, scheduler, slots):
        """Give the device the first inputs of new samples and the noise of all their positions."""
        samples = [scheduler.running[slot] for slot in slots]
        tokens = torch.tensor([sample.request.ids[-1] for sample in samples])
        keys = torch.tensor([sample.request.key for sample in samples])
        streams = stream(self.seed, keys, torch.tensor([sample.index for sample in samples]))
        positions = scheduler.prompt_tokens[slots] - 1
        end = (scheduler.prompt_tokens + scheduler.max_new_tokens)[slots].max()
        end = self.context if scheduler.environment else int(end)
        self.runner.start(slots, tokens, torch.from_numpy(positions), streams, end)

    @torch.inference_mode()
    def advance(self, scheduler):
        """Append replies and decode until the next poll. Return ids and logprobs [B, steps]; () if all
        samples are paused."""
        runner = self.runner
        if scheduler.environment:
            runner.extend(scheduler.resume())
        steps = scheduler.num_steps()
        if not steps:
            return ()
        scheduler.steps += steps
        scheduler.polls += 1
        in_groups = runner.cache.grows and scheduler.busy > kv_cache.ROW_GROUP_SIZE
        if in_groups and scheduler.polls % SORT_EVERY == 0:
            runner.reorder(scheduler.sort()) # rows of a group then read about the same number of positions
        paused = scheduler.paused[:scheduler.busy]
        return runner.decode(scheduler.lengths - 1, paused, steps, scheduler.sampling)

    def check(self, request):
        """Raise ValueError for a request that can't be sampled."""
        n = len(request.ids)
        if not 0 < n < self.context:
            raise ValueError(f"A prompt of {n} tokens can't be continued: give 1 to {self.context - 1} "
                             f"in a context of {self.context}.")
        last = self.runner.config.vocab_size - 1
        for i in (min(request.ids), max(request.ids)):
            if not 0 <= i <= last:
                raise ValueError(f"A prompt has token id {i}, but the model's ids are 0 to {last}: "
                                 "encode it with the model's tokenizer.")
        if not all(-2**63 <= number < 2**63 for number in (request.key, self.seed)):
            raise ValueError(f"key={request.key} and seed={self.seed} must fit 64 bits.")
        if request.num_samples < 1 or request.max_new_tokens < 1:
            raise ValueError(f"num_samples={request.num_samples} and max_new_tokens={request.max_new_tokens} "
                             "must be at least 1.")

    def find_strings(self, sampling):
        """Return the cached StopStrings of a Sampling, None if it has none; ValueError without `decode`."""
        strings = sampling.stop_strings
        if strings and not self.decode:
            raise ValueError("Stop strings need the text of ids: pass decode=tokenizer.decode to Engine.")
        if strings and strings not in self.stop_strings:
            self.stop_strings[strings] = StopStrings(strings, self.decode, self.runner.config.vocab_size)
        return self.stop_strings.get(strings)
