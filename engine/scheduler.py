"""The host's side of the engine: which samples wait, run in which slots, pause and finish. No tensors.

Slots are the first dimension of arrays. The samples of a step are in slots 0 ... B-1, without gaps.
"""
import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Request:
    ids: list                                # the prompt's token ids; any sequence or array
    num_samples: int = 1
    key: int = 0                             # identifies the question; seeds the noise, ids don't
    max_new_tokens: int = 128
    first_sample: int = 0                    # index of the first, to request samples in parts

    def __post_init__(self):
        object.__setattr__(self, "ids", [int(i) for i in self.ids])


@dataclass
class Sample:
    request: Request
    index: int                               # first_sample ... first_sample + num_samples - 1
    ids: list = field(default_factory=list)  # new token ids
    logprobs: list = field(default_factory=list)       # under the sampling distribution (greedy: T = 1), nats
    reason: str = ""                         # stop | length | reply: the environment's, without room
    forced: list = field(default_factory=list)         # (first, last): the environment wrote ids[first:last];
                                             # their logprobs are 0
    pending: list = field(default_factory=list)        # its ids that the engine has yet to append
    replies: list = field(default_factory=list)        # its texts
    error: str | None = None                 # its failure, which ended the sample


def forced_tokens(forced):
    """Return the number of tokens in a sample's spans (first, last)."""
    return sum(last - first for first, last in forced)


class Scheduler:
    """Gives slots to the samples of one generate(), and counts its progress. A sample is

    waiting:  in `waiting`, a queue with a deque of samples for each request;
    running:  in `running[slot]`; each step draws its next token;
    paused:   so too, but it stopped, and the environment has yet to reply; its draws are dropped;
    finished: returned by receive() or record().

    poll: most steps between two calls of record(). strings: StopStrings or None.
    """

    def __init__(self, slots, context, poll, sampling, strings=None, environment=None):
        self.context = context
        self.poll = poll
        self.sampling = sampling
        self.strings = strings
        self.environment = environment
        self.waiting = deque()
        self.tokens = 0                      # sampled so far
        self.steps = 0                       # of the model, all rows at once
        self.polls = 0
        self.samples = 0                     # finished
        self.began = time.perf_counter()
        self.allocate(slots)

    def allocate(self, slots):
        """Make all slots free."""
        self.slots = slots
        self.running = []                    # by slot: a Sample, or None in a gap
        self.busy = 0                        # occupied slots
        self.in_last_row = None              # deque of `waiting` whose prompt is in the cache's last row
        self.prompt_tokens = np.zeros(slots, dtype=np.int64)
        self.new_tokens = np.zeros(slots, dtype=np.int64)
        self.max_new_tokens = np.zeros(slots, dtype=np.int64)
        self.paused = np.zeros(slots, dtype=bool)
        columns = self.context + self.poll   # finished samples run until the next record()
        self.ids = np.zeros((slots, columns), dtype=np.int64)
        self.logprobs = np.zeros((slots, columns), dtype=np.float32)

    def arrays(self):
        counts = self.prompt_tokens, self.new_tokens, self.max_new_tokens
        return *counts, self.paused, self.ids, self.logprobs

    @property
    def tokens_per_s(self):
        return self.tokens / (time.perf_counter() - self.began)

    @property
    def lengths(self):
        """Return the tokens of each sample so far [B], with its prompt."""
        return (self.prompt_tokens + self.new_tokens)[:len(self.running)]

    def in_flight(self):
        """Return [(Sample, its ids so far)] of the running and paused samples."""
        return [(sample, self.ids[slot, :self.new_tokens[slot]].tolist())
                for slot, sample in enumerate(self.running) if sample]

    # --- waiting -> running ---

    def has_room(self):
        """Return whether waiting samples leave slots free."""
        return self.busy + sum(map(len, self.waiting)) < self.slots

    def add(self, request):
        first = request.first_sample
        self.waiting.append(deque(Sample(request, first + i) for i in range(request.num_samples)))

    def schedule(self):
        """Move waiting samples into free slots. Return [(Request, slots of its new samples, whether its
        prompt is in the cache's last row, and whether to keep it there for samples that still wait)]."""
        free = [slot for slot, sample in enumerate(self.running) if sample is None]
        free += range(len(self.running), self.slots)
        admitted = []
        while free and self.waiting:
            samples = self.waiting[0]
            request = samples[0].request
            slots = free[:len(samples)]
            free = free[len(slots):]
            for slot in slots:
                self.running[slot:slot + 1] = [samples.popleft()]      # or appends
            self.busy += len(slots)
            self.prompt_tokens[slots] = len(request.ids)
            self.new_tokens[slots] = 0
            self.max_new_tokens[slots] = min(request.max_new_tokens, self.context - len(request.ids))
            self.paused[slots] = False
            admitted.append((request, slots, self.in_last_row is samples, bool(samples)))
            self.in_last_row = samples
            if not samples:
                self.waiting.popleft()
        return admitted

    def compact(self):
        """Move the last samples into gaps; return [(source, target, tokens)] of the moves, in order."""
        moves = []
        while self.busy < len(self.running):
            sample = self.running.pop()
            if sample:
                source = len(self.running)
                target = self.running.index(None)
                self.running[target] = sample
                for array in self.arrays():
                    array[target] = array[source]
                moves.append((source, target, self.prompt_tokens[source] + self.new_tokens[source]))
        return moves

    def sort(self):
        """Sort samples by length, longest first; return their old slots [B]."""
        order = np.argsort(-self.lengths, kind="stable")
        for array in self.arrays():
            array[:len(order)] = array[order]
        self.running = [self.running[slot] for slot in order]
        return order

    def restart(self, slots):
        """Let all samples wait again, those in slots first."""
        by_request = {}
        for sample in itertools.chain(self.running, *self.waiting):
            if sample:
                by_request.setdefault(sample.request, deque()).append(Sample(sample.request, sample.index))
        self.waiting = deque(by_request.values())
        self.allocate(slots)

    # --- running -> paused or finished ---

    def num_steps(self):
        """Return the number of steps until the next record(): 0 if no sample runs."""
        B = len(self.running)
        remaining = (self.max_new_tokens - self.new_tokens)[:B][~self.paused[:B]]
        return min(self.poll, int(remaining.max(initial=0)))

    def record(self, ids, logprobs):
        """Record new ids and logprobs [B, steps]; return the samples that finish. Vectorised: a
        Python loop over 512 rows takes as long as two GPU steps of a small model."""
        B, steps = ids.shape
        slots = np.arange(B)[:, None]
        columns = self.new_tokens[:B, None] + np.arange(steps)
        self.ids[slots, columns] = ids
        self.logprobs[slots, columns] = logprobs
        kept, stopped = self.find_stops(ids)
        self.new_tokens[:B] += kept
        self.tokens += int(kept.sum())
        at_limit = (self.new_tokens == self.max_new_tokens)[:B] & ~self.paused[:B]
        finished = []
        for slot in np.flatnonzero(stopped | at_limit):
            n = self.new_tokens[slot]
            sample = self.running[slot]
            sample.ids = self.ids[slot, :n].tolist()
            sample.logprobs = self.logprobs[slot, :n].tolist()
            sample.reason = "stop" if stopped[slot] else "length"
            if stopped[slot] and self.environment and self.environment.ask(sample):
                self.paused[slot] = True
            else:
                finished.append(self.finish(slot))
        return finished

    def find_stops(self, ids):
        """Return how many new ids [B, steps] each sample keeps, and whether it stopped."""
        B, steps = ids.shape
        remaining = (self.max_new_tokens - self.new_tokens)[:B]
        is_stop = (ids[..., None] == np.array(self.sampling.stop)).any(-1)       # faster than np.isin
        is_stop &= np.arange(steps) < remaining[:, None]
        stopped = is_stop.any(1)
        kept = np.where(stopped, is_stop.argmax(1) + 1, np.minimum(remaining, steps))
        completed = self.strings.may_complete(ids).any(1) if self.strings else np.zeros(B, dtype=bool)
        for slot in np.flatnonzero(completed):
            forced = self.running[slot].forced
            turn_start = forced[-1][1] if forced else 0
            last = self.new_tokens[slot]
            before = self.ids[slot, max(turn_start, last - self.strings.tail):last].tolist()
            n = self.strings.completed_by(ids[slot, :kept[slot]].tolist(), before)
            if n:
                kept[slot] = n
                stopped[slot] = True
        kept[self.paused[:B]] = 0
        stopped[self.paused[:B]] = False
        return kept, stopped

    def finish(self, slot):
        """Free a slot; return its Sample."""
        sample = self.running[slot]
        self.running[slot] = None
        self.busy -= 1
        self.samples += 1
        return sample

    # --- paused -> running or finished ---

    def receive(self):
        """Take the environment's replies to paused samples; return the samples that finish."""
        if not self.environment:
            return []
        all_paused = 0 < self.busy == len(self.running) and self.paused[:self.busy].all()
        slots = {id(sample): slot for slot, sample in enumerate(self.running)}
        finished = []
        for sample, ids in self.environment.replies(bool(all_paused)):
            slot = slots.get(id(sample))
            if slot is None:                 # out of memory since, and sampled again
                continue
            if ids and self.can_append(slot, len(ids)):
                sample.pending = ids
                continue
            if ids:
                at_limit = self.new_tokens[slot] == self.max_new_tokens[slot]
                sample.reason = "length" if at_limit else "reply"
            finished.append(self.finish(slot))
        return finished

    def can_append(self, slot, n):
        """Return whether n ids of the environment and another token fit behind a sample."""
        sample = self.running[slot]
        forced = forced_tokens(sample.forced) + n
        fits = self.lengths[slot] + n < self.context and forced <= sample.request.max_new_tokens
        return fits and self.new_tokens[slot] < self.max_new_tokens[slot]

    def resume(self):
        """Append pending replies and let their samples run. Return [(slot, position of its newest token, ids:
        this token and the reply)]."""
        resumed = []
        for slot, sample in enumerate(self.running):
            if not sample.pending:
                continue
            first = int(self.new_tokens[slot])
            last = first + len(sample.pending)
            self.ids[slot, first:last] = sample.pending
            self.logprobs[slot, first:last] = 0
            sample.forced.append((first, last))
            sample.pending = []
            self.new_tokens[slot] = last
            prompt = int(self.prompt_tokens[slot])
            self.max_new_tokens[slot] = min(self.max_new_tokens[slot] + last - first, self.context - prompt)
            self.paused[slot] = False
            resumed.append((slot, prompt + first - 1, self.ids[slot, first - 1:last].tolist()))
        return resumed
