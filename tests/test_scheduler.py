"""The scheduler alone, without a model: a step appends ids that the test makes up."""
from types import SimpleNamespace

import numpy as np
import pytest

from engine.scheduler import Request, Scheduler

STOP = 9


def make(slots=3, context=50, poll=1, environment=None):
    sampling = SimpleNamespace(stop=(STOP,))
    return Scheduler(slots, context, poll, sampling, environment=environment)


def record(scheduler, *rows):
    """Record a row of new ids for each slot in use."""
    ids = np.array(rows)
    return scheduler.record(ids, np.full(ids.shape, -1.0, dtype=np.float32))


def names(samples):
    return [sample and (sample.request.key, sample.index) for sample in samples]


class Environment:
    """Answers every stop when the test sets `ready`."""

    def __init__(self):
        self.asked = []
        self.waited = []
        self.ready = []

    def ask(self, sample):
        self.asked.append(sample)
        return True

    def replies(self, wait):
        self.waited.append(wait)
        ready, self.ready = self.ready, []
        return ready


def test_samples_wait_for_slots_and_a_prompt_stays_in_the_last_row_for_those_that_wait():
    scheduler = make()
    first, second = Request([1, 2], 5, key=0), Request([3], 1, key=1)
    scheduler.add(first)
    assert not scheduler.has_room()          # five samples for three slots
    scheduler.add(second)
    assert scheduler.schedule() == [(first, [0, 1, 2], False, True)]
    assert scheduler.busy == 3 and names(scheduler.running) == [(0, 0), (0, 1), (0, 2)] and scheduler.schedule() == []
    assert names(record(scheduler, [7], [STOP], [7])) == [(0, 1)]
    assert scheduler.schedule() == [(first, [1], True, True)]
    assert names(record(scheduler, [STOP], [7], [STOP])) == [(0, 0), (0, 2)]
    assert scheduler.schedule() == [(first, [0], True, False), (second, [2], False, False)]
    assert names(scheduler.running) == [(0, 4), (0, 3), (1, 0)] and not scheduler.waiting and not scheduler.has_room()


def test_gaps_are_filled_from_the_end_with_everything_that_belongs_to_a_sample():
    scheduler = make(slots=5)
    for key in range(5):
        scheduler.add(Request([key] * (key + 1), key=key))
    scheduler.schedule()
    assert scheduler.lengths.tolist() == [1, 2, 3, 4, 5]
    record(scheduler, [STOP], [1], [STOP], [3], [4])
    assert scheduler.busy == 3 and names(scheduler.running) == [None, (1, 0), None, (3, 0), (4, 0)]
    assert scheduler.compact() == [(4, 0, 6), (3, 2, 5)] and scheduler.compact() == []
    assert names(scheduler.running) == [(4, 0), (1, 0), (3, 0)]
    assert scheduler.lengths.tolist() == [6, 3, 5]
    assert [ids for _, ids in scheduler.in_flight()] == [[4], [1], [3]]
    assert scheduler.sort().tolist() == [0, 2, 1] and scheduler.lengths.tolist() == [6, 5, 3]
    assert [ids for _, ids in scheduler.in_flight()] == [[4], [3], [1]]


def test_tokens_behind_a_stop_or_the_limit_are_dropped():
    scheduler = make(poll=4)
    scheduler.add(Request([1], 2, max_new_tokens=6))
    scheduler.add(Request([1] * 47, 1, key=1, max_new_tokens=6))       # three fit into the context
    scheduler.schedule()
    assert scheduler.num_steps() == 4
    (full,) = record(scheduler, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, STOP])
    assert (full.ids, full.logprobs, full.reason) == ([1, 2, 3], [-1.0] * 3, "length")
    scheduler.compact()
    assert scheduler.num_steps() == 2        # as many as the limit leaves
    stopped, other = record(scheduler, [STOP, 5], [6, 7])
    assert (stopped.ids, stopped.reason) == ([1, 2, 3, 4, STOP], "stop")
    assert (other.ids, other.reason) == ([1, 2, 3, 4, 6, 7], "length")
    assert (scheduler.tokens, scheduler.samples, scheduler.busy) == (14, 3, 0)


@pytest.mark.parametrize("reply, reason", [([4, 5], None), (None, "stop"), ([4] * 7, "reply"), ([4] * 60, "reply")])
def test_a_paused_sample_runs_on_behind_a_reply_or_finishes(reply, reason):
    environment = Environment()
    scheduler = make(environment=environment)
    scheduler.add(Request([1, 2], 2, max_new_tokens=6))
    scheduler.schedule()
    assert record(scheduler, [7], [STOP]) == [] and environment.asked == [scheduler.running[1]]
    assert record(scheduler, [7], [8]) == [] and scheduler.lengths.tolist() == [4, 3]    # the pause keeps nothing
    assert scheduler.receive() == [] and environment.waited == [False]                   # another sample runs
    environment.ready = [(environment.asked[0], reply)]
    finished = scheduler.receive()
    if reason:
        assert names(finished) == [(0, 1)] and finished[0].reason == reason and names(scheduler.running) == [(0, 0), None]
        return
    assert scheduler.resume() == [(1, 2, [STOP, 4, 5])]
    assert not finished and scheduler.resume() == [] and scheduler.lengths.tolist() == [4, 5]
    record(scheduler, [7], [STOP])
    paused = environment.asked[1]
    assert (paused.ids, paused.logprobs, paused.forced) == ([STOP, 4, 5, STOP], [-1, 0, 0, -1], [(1, 3)])
    record(scheduler, [STOP], [0])
    assert scheduler.num_steps() == 0 and scheduler.receive() == [] and environment.waited[-1]     # nobody runs


def test_a_restart_puts_the_samples_in_flight_before_those_that_wait():
    scheduler = make()
    for key in range(2):
        scheduler.add(Request([1, 2, 3], 3, key=key, first_sample=10))
    scheduler.schedule()
    record(scheduler, [5], [STOP], [6])
    scheduler.schedule()
    assert names(scheduler.running) == [(0, 10), (1, 10), (0, 12)]
    scheduler.restart(2)
    assert [names(samples) for samples in scheduler.waiting] == [[(0, 10), (0, 12)], [(1, 10), (1, 11), (1, 12)]]
    assert (scheduler.slots, scheduler.busy, scheduler.samples, scheduler.in_flight()) == (2, 0, 1, [])
    assert [(slots, *flags) for _, slots, *flags in scheduler.schedule()] == [([0, 1], False, False)]
    assert all(sample.ids == [] for sample in scheduler.running)
