"""Completions to grades. A verifier may hang, crash or eat memory: it runs in processes of its own, and the
run goes on, unless it fails for all of the first FIRST completions.

`python -m tasks._pool SPEC` is a worker. A line of its standard input is a list, in JSON, of [number,
question, completion]; its standard output has null once the task is loaded (or a sentence, if it can't be), then
a line [number, score, parts, signature, error] for each. Pipes, and not multiprocessing, because that would
import the caller into each worker, and torch with it.
"""
import contextlib
import functools
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import tasks
from runtime import progress
from runtime.config import BadInput
from runtime.progress import ProgressLine, track
from tasks import describe_error

MEMORY = 4 * 2**30                   # bytes of address space that a worker may have
LIMIT = f"(a reward worker may have {MEMORY / 2**30:g} GiB of memory)"
LOADING = 120.0                      # seconds that a task may take to load
MOST_AT_ONCE = 16                    # items that a quick worker is given in one go
# seconds an item: one that takes longer is given one at a time, for another may have the next
QUICK = 0.005
HAND_OVER = 32                       # completions that are given to the workers together,
PATIENCE = 1.0                       # or those that have come in so many seconds
FIRST = 32                           # grades that end the run if all of them are errors
LOADED = 97                          # exit code of a process that only had to load a task
KINDS = ("process", "thread", "serial")


class BrokenReward(BadInput, ValueError):
    """A reward that fails whatever it is given. The message is one sentence."""


class Grade(NamedTuple):
    """score in [0, 1]; parts {name: bool}; signature of a completion whose score is 1, else ""; error: the fault
    of the grading itself, else None. With an error the score means nothing and parts are empty."""
    score: float
    parts: dict
    signature: str
    error: str | None

    @property
    def verified(self):
        """Whether a completion may be trained on: graded, right, and every part of it true."""
        return self.error is None and self.score == 1.0 and all(self.parts.values())


def grade(task, question, completion):
    """The Grade of a completion, cut after the task's stop. An exception of the task, and a score outside
    [0, 1], is its error; such a score stays in the Grade if it is finite, and ends the run (see Pool)."""
    try:
        task = task.of(question)
        completion = task.cut(completion)
        score, parts = task.reward(question, completion)
        score, parts = float(score), {str(name): bool(value) for name, value in parts.items()}
        return Grade(score, parts, str(task.signature(completion)) if score == 1.0 else "", None)
    except (Exception, SystemExit) as e:
        score = e.score if isinstance(e, tasks.NotAScore) and math.isfinite(e.score) else 0.0
        return Grade(score, {}, "", describe_error(e))


def check_graded(spec, grades):
    """BrokenReward if there are Grades and all of them are errors."""
    if grades and all(graded.error for graded in grades):
        raise BrokenReward(f"The reward of the task {spec} failed for all of {len(grades)} completions ("
                           f"{grades[0].error}): mend reward(question, completion), or choose another task.")


def load(spec):
    """The Task of a spec, as tasks.load has it; ValueError too if it is a file that would end the process."""
    if tasks.user_files(spec):
        try_to_load(spec, os.getcwd())
    return tasks.load(spec)


@functools.lru_cache
def try_to_load(spec, folder):
    """Import a task in a process of its own. If it ends or keeps that for ever, ValueError."""
    try:
        with ProgressLine(f"loading the task {spec}"):
            code = subprocess.run([sys.executable, "-m", "tasks._pool", spec, folder, "try"],
                                  timeout=LOADING, cwd=Path(__file__).parent.parent,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
        problem = None if code == LOADED else f"it ends the process that imports it, with exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"importing it takes more than {LOADING:g} s"
    if problem:
        raise ValueError(f"The task {spec} can't be loaded ({problem}): let its file only define functions.")


def pack(value):
    """JSON, on one line. Lone surrogates, which UTF-8 has no place for, keep theirs."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def unpack(line):
    return json.loads(line.decode(errors="surrogatepass"))


# --- a worker ---

def main(spec, folder=".", only_try=False):
    """Read items and write grades until the input ends. folder: where the spec's paths begin. only_try: load
    the task, no more."""
    progress.never()
    os.chdir(folder)
    if only_try:
        with contextlib.suppress(BaseException):             # which will be said where it happens again
            tasks.load(spec)
        os._exit(LOADED)
    watch_over_worker()
    me = os.getpid()
    items, grades = os.fdopen(os.dup(0), "rb", 2**16), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)             # what a verifier reads is not the items,
    os.dup2(2, 1)                                # and what it prints, or a program that it runs, is no grade
    sys.stdout = sys.stderr
    confine()

    def write(value):
        grades.write(pack(value) + b"\n")
        grades.flush()
    try:
        task = tasks.load(spec)
    except (Exception, SystemExit) as e:
        plain = isinstance(e, LookupError | ValueError | OSError)
        write(with_limit(str(e) if plain else f"The task {spec} can't be loaded ({describe_error(e)}): mend it, or choose "
                                              "another."))
        return
    write(None)
    for line in items:
        for number, question, completion in unpack(line):
            # a verifier that draws does so alike on any worker, and after a resume
            random.seed(pack([question, completion]))
            graded = grade(task, question, completion)
            if os.getpid() != me:                # a copy that the verifier forked and forgot
                os._exit(1)
            write([number, *graded._replace(error=graded.error and with_limit(graded.error))])


def with_limit(error):
    """An error's text, with the limit of a worker's memory if it speaks of memory."""
    sentence = error.removesuffix(".")
    return f"{sentence} {LIMIT}{error[len(sentence):]}" if re.search("(?i)memory|alloc", error) else error


def watch_over_worker():
    """Return in a forked process. This one stays behind, and ends all of its session (the worker, and programs
    that the verifier started) when the worker has ended or the run has, killed or not."""
    run = os.getppid()
    with contextlib.suppress(PermissionError):   # it leads a session already
        os.setsid()
    signal.signal(signal.SIGCHLD, lambda *_: end_session(os.getpid()))
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.close(1)                                  # its end is the worker's to tell
    closed = select.poll()
    closed.register(0, 0)                        # no event but the one that is always told: the other end is closed
    closed.poll()
    while os.getppid() == run:                   # the worker may have to read the rest
        time.sleep(0.05)
    end_session(os.getpid())


def end_session(leader):
    """Kill all processes of a session, its leader last. On Linux one in a process group of its own, such as
    coreutils' `timeout` makes, is found; elsewhere only the leader's group is killed."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            session = path.read_text(errors="replace").rpartition(")")[2].split()[3]
            if int(session) == leader != int(path.parent.name):
                os.kill(int(path.parent.name), signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def confine():
    """A worker takes no more memory than MEMORY and ends with its parent; when to stop is the run's
    matter."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a handler and not SIG_IGN, which programs that a verifier runs would inherit
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource
        limits = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([MEMORY, *limits]), resource.getrlimit(resource.RLIMIT_AS)[1]))
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes
        # Linux's PR_SET_PDEATHSIG: one that hangs does not see its input end
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# --- the pool ---

def default_workers():
    """One for each core that is this rank's share, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


class Pool:
    """Grades completions of the task `spec`, in the order of submission, the same whatever the kind.

    kind "process": `workers` processes (default_workers() if None). One that gives no answer for `timeout`
    seconds is killed and replaced, and so is one that dies: the completion in work gets an error for its
    grade, those behind it another worker. "thread", "serial": threads, or the caller itself. There a verifier
    that hangs can't be stopped, nor its memory limited. counts: "errors", grades collected that have one,
    whatever it is; "timeouts", those of them for the time; "restarts", workers that were replaced. The first
    error is printed when it happens. ValueError, LookupError or OSError with a sentence if the task can't be
    loaded; BrokenReward, of submit, collect and score, once the first FIRST items have all failed, or a finite
    score is outside [0, 1]. To be used by one thread, and to be closed; one that is not ends with the program.
    """

    def __init__(self, spec, workers=None, timeout=10.0, kind="process"):
        self.n = default_workers() if workers is None else workers
        if kind not in KINDS:
            raise ValueError(f"There is no kind {kind} of reward pool: choose {', '.join(KINDS)}.")
        if self.n < 1:
            raise ValueError(f"{self.n} reward workers can't grade anything: ask for at least 1.")
        self.spec, self.timeout, self.kind, self.folder = spec, timeout, kind, os.getcwd()
        self.counts = {"errors": 0, "timeouts": 0, "restarts": 0}
        # (question, completion) not given to the workers yet
        self.outbox = deque()
        self.handed_over = time.monotonic()                  # when the outbox was last emptied
        # futures not collected; (future, item) that no worker has
        self.pending, self.waiting = deque(), deque()
        self.submitted, self.failed = 0, False               # failed: there was an error
        self.first = {}                                      # {number: Grade} of the first FIRST submitted
        self.changed, self.loaded, self.ended = threading.Condition(), kind != "process", None
        self.task = tasks.load(spec) if self.loaded else None
        self.workers = [Worker(self) for _ in range(self.n)] if kind == "process" else []
        for _ in range(self.n if kind == "thread" else 0):
            threading.Thread(target=self.serve, daemon=True).start()
        try:
            with ProgressLine(f"loading the task {spec}"), self.changed:
                self.changed.wait_for(lambda: self.loaded or self.ended)
                if self.ended:
                    raise self.ended
        except BaseException:
            self.close()
            raise

    def submit(self, question, completion):
        """Queue a completion. question: a dict that JSON can hold. RuntimeError if the pool is closed.

        Workers get HAND_OVER of them at a time: on a CPU every process that wakes stops the threads that
        sample, which one at a time costs a small model up to a tenth of its speed (docs/notes.md).
        """
        if self.ended:
            raise self.ended
        self.outbox.append((question, completion))
        if len(self.outbox) >= HAND_OVER or time.monotonic() - self.handed_over > PATIENCE:
            self.flush()

    def flush(self):
        """Give the workers all that is queued."""
        while self.outbox:
            self.pending.append(self._put(*self.outbox.popleft()))
        self.handed_over = time.monotonic()

    def collect(self, wait=False):
        """List of the next Grades that are ready, in the order of submission; wait: of all that were
        submitted."""
        if wait or time.monotonic() - self.handed_over > PATIENCE:
            self.flush()
        if wait:
            with ProgressLine(f"verifying {len(self.pending):,} answers"):
                # the last is awaited first: one waking instead of many
                for future in reversed(self.pending):
                    future.result()
        grades = []
        while self.pending and self.pending[0].done():
            grades.append(self._take(self.pending[0]))
            self.pending.popleft()
        return grades

    def score(self, pairs):
        """List of the Grades of [(question, completion)]. What was submitted before waits for collect()."""
        futures = []
        for question, completion in pairs:
            futures.append(self._put(question, completion))
        return [self._take(future) for future in track(futures, "verifying", "answers")]

    def close(self):
        """End the workers at once; what they have not graded is lost."""
        self.end(RuntimeError("This reward pool is closed: make another."))
        with self.changed:
            for worker in self.workers:
                worker.kill()
        for worker in self.workers:
            worker.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _put(self, question, completion):
        future = Future()
        with self.changed:
            if self.ended:
                raise self.ended
            future.completion = completion
            future.number = self.submitted
            self.submitted += 1
            item = (question, completion)
            if self.kind == "process":
                item = pack([future.number, question, completion])
            if self.kind != "serial":
                self.waiting.append((future, item))
                self.changed.notify()
        if self.kind == "serial":
            self.hand_over(future, grade(self.task, question, completion))
        return future

    def _take(self, future):
        graded = future.result()
        if isinstance(self.ended, BrokenReward):
            raise self.ended
        self.counts["errors"] += graded.error is not None
        return graded

    # --- for the workers' threads ---

    def hand_over(self, future, graded):
        """Give a future its Grade; print the first error; end the pool if all of the first FIRST are, or at a
        score of another scale."""
        if not 0.0 <= graded.score <= 1.0:
            self.end(BrokenReward(f"The task {self.spec} gave the score {graded.score:g}: a score is a number from 0 "
                                  "to 1, so divide it by the largest score there can be."))
        with self.changed:
            speak = graded.error is not None and not self.failed
            self.failed = self.failed or speak
            if future.number < FIRST:
                self.first[future.number] = graded
                if len(self.first) == FIRST:
                    try:
                        check_graded(self.spec, [self.first[number] for number in range(FIRST)])
                    except BrokenReward as e:
                        self.end(e)
        if speak:
            text = f"{future.completion[:200]!r}{'...' if len(future.completion) > 200 else ''}"
            with contextlib.suppress(OSError):               # no one listens
                progress.clear()
                print(f"The reward of the task {self.spec} failed ({graded.error}), so there is no grade "
                      f"of {text}", file=sys.stderr, flush=True)
        future.set_result(graded)

    def batch(self, most):
        """Some of what waits, once there is something: a worker's share, `most` at most. Nothing at the
        end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.ended)
            return deque(self.waiting.popleft() for _ in range(min(most, -(-len(self.waiting) // self.n))))

    def serve(self):
        """Grade in a thread of this process."""
        while batch := self.batch(1):
            self.hand_over(batch[0][0], grade(self.task, *batch[0][1]))

    def end(self, error, batch=()):
        """From here on, all that waits and all that will be asked gets this exception, or that with which it
        had ended before."""
        with self.changed:
            self.ended = self.ended or error
            for future, _ in (*batch, *self.waiting):
                future.set_exception(self.ended)
            self.waiting.clear()
            self.changed.notify_all()


class Worker:
    """A process that grades, and the thread that feeds it, watches the clock, and puts another in its
    place."""

    def __init__(self, pool):
        self.pool, self.process, self.inbox = pool, None, b""
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        batch, most = (), 1
        try:
            self.start()
            while batch := self.pool.batch(most):
                n, began = len(batch), time.monotonic()
                self.grade(batch)
                most = min(2 * most, MOST_AT_ONCE) if time.monotonic() - began < QUICK * n else 1
        except Exception as e:                               # no one is left waiting, whatever happened
            self.pool.end(e, batch)
        self.remove()

    def grade(self, batch):
        """Grade (future, line) pairs. They go over as one line, so that the process has read all of it before
        it writes: no two full pipes wait for each other. If one of them ends the process, those behind it
        wait for whoever is free."""
        try:
            self.write(b"[" + b",".join(line for _, line in batch) + b"]\n")
            while batch:
                graded = self.read_grade(batch[0][0].number)
                self.pool.hand_over(batch.popleft()[0], graded)
        except (TimeoutError, EOFError) as e:
            self.remove()
            with self.pool.changed:
                if self.pool.ended:                          # it was killed by close()
                    raise self.pool.ended
                self.pool.counts["restarts"] += 1
                self.pool.counts["timeouts"] += isinstance(e, TimeoutError)
                self.pool.hand_over(batch.popleft()[0], Grade(0.0, {}, "", str(e)))
                self.pool.waiting.extendleft(reversed(batch))
                batch.clear()
                self.pool.changed.notify_all()
            self.start()

    def read_grade(self, number):
        """The Grade of the completion with that number. EOFError if a verifier wrote between the grades."""
        line = self.read(self.pool.timeout)
        with contextlib.suppress(ValueError, TypeError):
            answered, *graded = unpack(line)
            if answered == number:
                return Grade(*graded)
        raise EOFError("the verifier wrote into the pipe that carries grades")

    def start(self):
        """A process that has loaded the task. ValueError with a sentence if it can't."""
        for _ in range(3):
            with self.pool.changed:
                if self.pool.ended:
                    raise self.pool.ended
                # One thread each; sets in an order that is not the worker's own; a session of its own, for
                # Ctrl-C is not for it.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "tasks._pool", self.pool.spec, self.pool.folder], cwd=Path(__file__).parent.parent,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}, start_new_session=True,
                    bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            os.set_blocking(self.process.stdin.fileno(), False)
            self.inbox = b""
            try:
                sentence = unpack(self.read(LOADING))
            except (TimeoutError, EOFError) as e:
                problem = e
                self.remove()
                continue
            if sentence is not None:
                raise ValueError(sentence)
            with self.pool.changed:
                self.pool.loaded = True
                self.pool.changed.notify_all()
            return
        raise ValueError(f"The task {self.pool.spec} can't be loaded in a worker process ({problem}): look at "
                         "what its file does when it is imported.")

    def write(self, data):
        data = memoryview(data)
        while data:
            self.wait(self.process.stdin, select.POLLOUT, self.pool.timeout)
            try:
                data = data[os.write(self.process.stdin.fileno(), data):]
            except BrokenPipeError:
                raise EOFError(f"the worker died {LIMIT}") from None

    def read(self, timeout):
        """The next line. TimeoutError if none comes for that many seconds, EOFError if none will."""
        while b"\n" not in self.inbox:
            self.wait(self.process.stdout, select.POLLIN, timeout)
            data = os.read(self.process.stdout.fileno(), 2**16)
            if not data:
                raise EOFError(f"the worker died {LIMIT}")
            self.inbox += data
        line, _, self.inbox = self.inbox.partition(b"\n")
        return line

    def wait(self, pipe, event, timeout):
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(1000 * timeout):
            raise TimeoutError(f"timed out after {timeout:g} s")

    def kill(self):
        """Kill the process, if there is one, and all that it started."""
        if self.process:
            end_session(self.process.pid)

    def remove(self):
        with self.pool.changed:
            if self.process:
                self.kill()
                self.process.wait()
                self.process.stdin.close(), self.process.stdout.close()
                self.process = None


if __name__ == "__main__":
    main(*sys.argv[1:])
