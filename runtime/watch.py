"""Ends a run of several ranks of which one hangs. The others would wait for it, and nobody would know for
whom."""
import contextlib
import json
import os
import sys
import threading
import time

from runtime import distributed, progress

NOTICE = 1.0                                 # seconds between two looks at the clock
LAST_LOOK = 5.0                              # seconds for asking where the others are


class Watch:
    """A thread that ends this process if it stays in the same part of a step for `seconds`; 0, or a single
    rank: none.

    Ranks wait for each other, so all come to a standstill. Each says in torchrun's store where it is; the one
    that is furthest behind is named.
    """

    number = 0

    def __init__(self, seconds):
        self.seconds = seconds
        Watch.number += 1                    # of this process: after a Retry there is another, as on all ranks
        self.number = Watch.number
        self.place = None                    # (step, number of the part, its name)
        self.since = time.monotonic()
        self.ended = threading.Event()
        if seconds and distributed.world_size() > 1:
            threading.Thread(target=self.look, daemon=True).start()

    def at(self, step, part):
        """Note that a part of a step begins."""
        number = self.place[1] + 1 if self.place else 0
        self.place = (step, number, part)
        self.since = time.monotonic()

    def end(self):
        self.ended.set()

    def look(self):
        said = None
        while not self.ended.wait(NOTICE):
            if self.place and time.monotonic() - self.since > self.seconds:
                # The store may be gone too, with the rank that has it.
                threading.Timer(LAST_LOOK, os._exit, [1]).start()
                with contextlib.suppress(Exception):
                    self.say_who()
                os._exit(1)
            if self.place != said:
                said = self.place
                with contextlib.suppress(Exception):
                    distributed.store.set(self.key(distributed.rank()), json.dumps(said))

    def key(self, rank):
        return f"watch {self.number}: place of rank {rank}"

    def say_who(self):
        """Print which ranks are furthest behind, once for all ranks."""
        store = distributed.store
        if store.add(f"watch {self.number}: said", 1) > 1:
            time.sleep(LAST_LOOK)            # torchrun ends all once one has ended: who speaks comes first
            return
        places = {}
        for rank in range(distributed.world_size()):
            key = self.key(rank)
            places[rank] = json.loads(store.get(key)) if store.check([key]) else [0, -1, "its start"]
        least = min(number for _, number, _ in places.values())
        behind = [rank for rank, place in places.items() if place[1] == least]
        step, _, part = places[behind[0]]
        who = f"Rank {behind[0]} hangs" if len(behind) == 1 else f"Ranks {', '.join(map(str, behind))} hang"
        progress.clear()
        print(f"error: {who} in step {step + 1}, in {part}: that has taken more than {self.seconds:g} s. Look "
              "there, go on with --init_from=resume, and raise --step_timeout if it only takes long.",
              file=sys.stderr, flush=True)
