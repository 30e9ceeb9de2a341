"""Grade completions, and answer episodes (respond), in worker processes. A task may hang, crash or exhaust
memory without ending the run, unless it fails for all of the first FIRST completions.

`python -m tasks._pool SPEC` is a worker. Each line of its standard input is a JSON list of [number, kind of
job, question, completion, turns of an episode]. Its standard output is null once the task is loaded (or an
error message), then one line [number, values of the Grade or Reply] per job. multiprocessing would import the
caller, and torch with it, into each worker."""
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

MEMORY = 4 * 2**30                   # bytes of address space of a worker
LIMIT = f"(a reward worker may have {MEMORY / 2**30:g} GiB of memory)"
LOADING = 120.0                      # seconds, limit for loading a task
MOST_AT_ONCE = 16                    # maximum items per batch of a worker
QUICK = 0.005                        # seconds an item; slower workers get single items
HAND_OVER = 32                       # completions passed to the workers together,
PATIENCE = 1.0                       # or after this many seconds
FIRST = 32                           # the run ends if this many first grades are all errors
LOADED = 97                          # exit code of a process that only loads a task
KINDS = ("process", "thread", "serial")
PR_SET_PDEATHSIG = 1                 # options of Linux's prctl
PR_SET_CHILD_SUBREAPER = 36


class BrokenReward(BadInput, ValueError):
    """The reward fails for every completion. The message is one sentence."""


class Grade(NamedTuple):
    """score: in [0, 1]; parts: {name: bool}; signature: of a completion with score 1, else ""; error: failure
    of the grading itself, or None; figures: {name: float} to watch. With an error the score is meaningless
    and parts are empty."""
    score: float
    parts: dict
    signature: str
    error: str | None
    figures: dict = {}

    @property
    def verified(self):
        """Whether a completion may be trained on: no error, score 1, all parts true."""
        return self.error is None and self.score == 1.0 and all(self.parts.values())


class Reply(NamedTuple):
    """text: the answer of a task's respond, None at the end of an episode; error: its failure, or None."""
    text: str | None
    error: str | None


def grade(task, question, completion, turns=None):
    """Return the Grade of a completion, cut after the task's stop, or of an episode. An exception or a score
    outside [0, 1] becomes its error; a finite score outside [0, 1] is kept, and ends the run (see Pool)."""
    try:
        task = task.of(question)
        if not task.responds:                # else an environment may have written the stop
            completion = task.cut(completion)
            turns = None
        score, parts, figures = task.graded(question, completion, turns)
        signature = str(task.signature(completion)) if score == 1.0 else ""
        return Grade(score, {str(name): holds for name, holds in parts.items()}, signature, None,
                     {str(name): value for name, value in figures.items()})
    except (Exception, SystemExit) as e:
        score = e.score if isinstance(e, tasks.NotAScore) and math.isfinite(e.score) else 0.0
        return Grade(score, {}, "", describe_error(e))


def respond(task, question, text):
    """Return the Reply of a task to an episode's text so far. An exception becomes its error."""
    try:
        return Reply(task.of(question).respond(question, text), None)
    except (Exception, SystemExit) as e:
        return Reply(None, f"respond() failed: {describe_error(e)}")


JOBS = {"reward": grade, "respond": respond}
RESULTS = {"reward": "grade of", "respond": "reply to"}
FORMS = {"reward": "reward(question, completion)", "respond": "respond(question, text)"}


def run_job(task, kind, question, completion, *others):
    """Return the Grade or Reply; that of a verifier that uses `random` is the same in any process and after a
    resume."""
    random.seed(pack([question, completion]))
    return JOBS[kind](task, question, completion, *others)


def failure(kind, error):
    """Return the result of a job that failed."""
    return Grade(0.0, {}, "", error) if kind == "reward" else Reply(None, f"{error} in respond()")


def check_graded(spec, grades):
    """Raise BrokenReward if there are Grades, or Replies, and all have errors."""
    if grades and all(graded.error for graded in grades):
        kind = "respond" if "respond()" in grades[0].error else "reward"
        raise BrokenReward(f"The {kind} of the task {spec} failed for all of {len(grades)} completions ("
                           f"{grades[0].error}): correct {FORMS[kind]}, or choose another task.")


def load(spec):
    """Return tasks.load(spec); ValueError also if a task file would end the process."""
    if tasks.user_files(spec):
        try_to_load(spec, os.getcwd())
    return tasks.load(spec)


@functools.lru_cache
def try_to_load(spec, folder):
    """Import a task in a separate process; ValueError if that process ends or hangs."""
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
    """Return a value as one line of JSON, preserving lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def unpack(line):
    return json.loads(line.decode(errors="surrogatepass"))


# --- a worker ---

def main(spec, folder=".", only_try=False):
    """Read items and write grades. folder: working directory; only_try: only load the task."""
    progress.never()
    os.chdir(folder)
    if only_try:
        with contextlib.suppress(BaseException):             # reported when the task is loaded again
            tasks.load(spec)
        os._exit(LOADED)
    watch_over_worker()
    me = os.getpid()
    items = os.fdopen(os.dup(0), "rb", 2**16)
    grades = os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)          # verifiers, and programs that they run, must not read the items
    os.dup2(2, 1)                                # or print into the grades
    sys.stdout = sys.stderr
    confine()

    def write(value):
        try:
            grades.write(pack(value) + b"\n")
            grades.flush()
        except BrokenPipeError:              # the run has ended
            os._exit(1)
    try:
        task = tasks.load(spec)
    except (Exception, SystemExit) as e:
        plain = isinstance(e, LookupError | ValueError | OSError)
        message = f"The task {spec} can't be loaded ({describe_error(e)}): correct it, or choose another."
        write(with_limit(str(e) if plain else message))
        return
    write(None)
    for line in items:
        for number, kind, *item in unpack(line):
            result = run_job(task, kind, *item)
            if os.getpid() != me:                # a forked copy left by the verifier
                os._exit(1)
            write([number, *result._replace(error=result.error and with_limit(result.error))])


def with_limit(error):
    """Return an error's text; append the memory limit if it mentions memory."""
    sentence = error.removesuffix(".")
    return f"{sentence} {LIMIT}{error[len(sentence):]}" if re.search("(?i)memory|alloc", error) else error


def watch_over_worker():
    """Return in a forked process. The original process waits until the worker or the run ends, however that
    happens, and then kills all that the verifier started. On Linux it is the subreaper, hence the parent, of
    those that a parent has left, also in a session of their own."""
    run = os.getppid()
    with contextlib.suppress(PermissionError):   # already a session leader
        os.setsid()
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        return
    signal.signal(signal.SIGCHLD, functools.partial(reap, worker))
    reap(worker)                                 # if it has ended by now
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.close(1)                                  # only the worker keeps it open
    closed = select.poll()
    closed.register(0, 0)                        # no events but POLLHUP, which Linux always reports
    while os.getppid() == run and not closed.poll(1000):
        pass
    while os.getppid() == run:                   # the worker may still read the rest
        time.sleep(0.05)
    end_family(os.getpid())


def set_process(option, value):
    """Set an attribute of this process by Linux's prctl; elsewhere do nothing."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes
        ctypes.CDLL(None).prctl(option, value)


def reap(worker, *_):
    """Wait for children that have ended; once the worker is one of them, end this process and all others."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid == worker:
                end_family(os.getpid())


def end_family(*leaders):
    """Kill the first processes of workers, the subreapers, after all that descend from them or are in their
    sessions; on systems other than Linux only their process groups."""
    for _ in range(100):                         # they may start others meanwhile
        pids = family_of(leaders)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.002)
    for leader in leaders:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def family_of(leaders):
    """Return the ids of the running processes that descend from others or are in their sessions (Linux)."""
    processes = {}                               # {id: (state, parent, session)}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, session, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            processes[int(path.parent.name)] = state, int(parent), int(session)
    family = {*leaders}
    size = 0
    while size < len(family):
        size = len(family)
        family |= {pid for pid, (_, *others) in processes.items() if family & {*others}}
    return [pid for pid in family - {*leaders} if processes[pid][0] not in "ZX"]


def confine():
    """Limit a worker's memory, ignore signals that the run handles, and end with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a handler, because programs that a verifier runs would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([MEMORY, *limits]), hard))
    # because a hanging worker does not notice the end of its input
    set_process(PR_SET_PDEATHSIG, signal.SIGKILL)


# --- the pool ---

def default_workers():
    """Return the number of cores per local rank, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


class Pool:
    """Grades completions of the task `spec` in the order of submission; all kinds give the same grades (in
    threads, not those of a verifier that uses `random`).

    kind: "process" starts `workers` processes (None: default_workers()). A worker that dies or gives no grade
    within `timeout` seconds is replaced: the current completion's grade gets an error, the later ones go to
    other workers. "thread" and "serial" grade in threads or in the caller, without limits of time and memory.
    counts: "errors", collected grades with an error; "timeouts", those due to time; "restarts", replaced
    workers. The first error is printed at once. Raises ValueError, LookupError or OSError with one sentence
    if the task can't be loaded; submit, collect and score raise BrokenReward if the first FIRST items have
    all failed or a finite score is outside [0, 1]. Use from one thread, and close it; an open pool ends with
    the program."""

    def __init__(self, spec, workers=None, timeout=10.0, kind="process"):
        self.n = default_workers() if workers is None else workers
        if kind not in KINDS:
            raise ValueError(f"There is no kind {kind} of reward pool: choose {', '.join(KINDS)}.")
        if self.n < 1:
            raise ValueError(f"{self.n} reward workers can't grade anything: ask for at least 1.")
        self.spec = spec
        self.timeout = timeout
        self.kind = kind
        self.folder = os.getcwd()
        self.code = self.read_code()
        self.counts = {"errors": 0, "timeouts": 0, "restarts": 0}
        self.outbox = deque()                                # submitted, not yet passed on
        self.handed_over = time.monotonic()                  # time when the outbox was last emptied
        self.pending = deque()                               # futures not collected
        self.replies = deque()                               # (future, item) of respond without a worker
        self.waiting = deque()                               # and of reward
        self.submitted = {kind: 0 for kind in JOBS}
        self.failed = False                                  # an error has occurred
        self.first = {kind: {} for kind in JOBS}             # {number: result} of the first FIRST submitted
        self.changed = threading.Condition()
        self.loaded = kind != "process"
        self.ended = None
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

    def read_code(self):
        """Return {path: contents, or None} of the user's files and of those that they import."""
        files = tasks.user_files(self.spec)
        paths = [path for file in files for path in tasks.files_of(Path(self.folder, file))]
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    def submit(self, question, completion, turns=None):
        """Queue a completion. question: a dict of JSON values; turns: an episode's texts (Task.reward).
        RuntimeError if the pool is closed.

        Workers get HAND_OVER completions at a time: on a CPU every process that wakes interrupts the sampling
        threads, which for single completions costs a small model up to a tenth of its speed (docs/notes.md).
        """
        if self.ended:
            raise self.ended
        self.outbox.append((question, completion, turns))
        if len(self.outbox) >= HAND_OVER or time.monotonic() - self.handed_over > PATIENCE:
            self.flush()

    def flush(self):
        """Pass all queued completions to the workers."""
        while self.outbox:
            self.pending.append(self._put("reward", *self.outbox.popleft()))
        self.handed_over = time.monotonic()

    def collect(self, wait=False):
        """Return the next finished Grades in the order of submission; wait: all of them."""
        if wait or time.monotonic() - self.handed_over > PATIENCE:
            self.flush()
        if wait:
            with ProgressLine(f"verifying {len(self.pending):,} answers"):
                # last first, to wake once instead of many times
                for future in reversed(self.pending):
                    future.result()
        grades = []
        while self.pending and self.pending[0].done():
            grades.append(self.take(self.pending[0]))
            self.pending.popleft()
        return grades

    def score(self, pairs):
        """Return the Grades of [arguments of submit]; earlier submissions still need collect()."""
        futures = [self._put("reward", *pair) for pair in pairs]
        return [self.take(future) for future in track(futures, "verifying", "answers")]

    def respond(self, question, text):
        """Return the Future of the Reply to an episode's text so far; `take` its result."""
        return self._put("respond", question, text)

    def take(self, future):
        """Return the result of a Future of this pool."""
        result = future.result()
        if isinstance(self.ended, BrokenReward):
            raise self.ended
        self.counts["errors"] += result.error is not None
        return result

    def close(self):
        """End the workers at once, without waiting for grades."""
        self.end(RuntimeError("This reward pool is closed: make another."))
        with self.changed:
            end_family(*(worker.process.pid for worker in self.workers if worker.process))
        for worker in self.workers:
            worker.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _put(self, kind, *item):
        future = Future()
        with self.changed:
            if self.ended:
                raise self.ended
            future.kind = kind
            future.completion = item[1]
            future.number = self.submitted[kind]
            self.submitted[kind] += 1
            if self.kind == "process":
                item = pack([future.number, kind, *item])
            if self.kind != "serial":
                self.queue(kind).append((future, item))
                self.changed.notify()
        if self.kind == "serial":
            before = random.getstate()
            self.hand_over(future, run_job(self.task, kind, *item))
            random.setstate(before)
        return future

    def queue(self, kind):
        return self.waiting if kind == "reward" else self.replies

    # --- for the workers' threads ---

    def hand_over(self, future, graded):
        """Set a future's Grade or Reply and print the first error; end the pool if the first FIRST results
        are all errors, or if the score is outside [0, 1]."""
        if future.kind == "reward" and not 0.0 <= graded.score <= 1.0:
            self.end(BrokenReward(f"The task {self.spec} returned the score {graded.score:g}: a score is a "
                                  "number from 0 to 1, so divide it by the highest possible score."))
        with self.changed:
            speak = graded.error is not None and not self.failed
            self.failed = self.failed or speak
            if future.number < FIRST:
                first = self.first[future.kind]
                first[future.number] = graded
                if len(first) == FIRST:
                    try:
                        check_graded(self.spec, [first[n] for n in range(FIRST)])
                    except BrokenReward as e:
                        self.end(e)
        if speak:
            text = f"{future.completion[:200]!r}{'...' if len(future.completion) > 200 else ''}"
            with contextlib.suppress(OSError):               # stderr is closed
                progress.clear()
                print(f"The {future.kind} of the task {self.spec} failed ({graded.error}), so there is no "
                      f"{RESULTS[future.kind]} {text}", file=sys.stderr, flush=True)
        future.set_result(graded)

    def batch(self, most):
        """Wait for items and return a worker's share, at most `most`; empty at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.replies or self.waiting or self.ended)
            queue = self.replies or self.waiting             # samples wait for replies
            return deque(queue.popleft() for _ in range(min(most, -(-len(queue) // self.n))))

    def serve(self):
        """Grade in a thread of this process."""
        while batch := self.batch(1):
            future, item = batch[0]
            self.hand_over(future, JOBS[future.kind](self.task, *item))

    def end(self, error, batch=()):
        """Give all waiting and future items this exception, or that of an earlier end."""
        with self.changed:
            self.ended = self.ended or error
            for future, _ in (*batch, *self.replies, *self.waiting):
                future.set_exception(self.ended)
            self.replies.clear()
            self.waiting.clear()
            self.changed.notify_all()


class Worker:
    """A grading process with the thread that feeds it, enforces the timeout and replaces it."""

    def __init__(self, pool):
        self.pool = pool
        self.process = None
        self.inbox = b""
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        batch = ()
        most = 1
        try:
            self.start()
            while batch := self.pool.batch(most):
                n = len(batch)
                began = time.monotonic()
                self.grade(batch)
                most = min(2 * most, MOST_AT_ONCE) if time.monotonic() - began < QUICK * n else 1
        except Exception as e:                               # release everyone who waits
            self.pool.end(e, batch)
        self.remove()

    def grade(self, batch):
        """Grade (future, line) pairs. They are sent as one line, so that the process reads all of it before
        it writes, and full pipes can't deadlock. If an item ends the process, the later ones go back to the
        queue."""
        try:
            self.write(b"[" + b",".join(line for _, line in batch) + b"]\n")
            while batch:
                result = self.read_result(batch[0][0])
                self.pool.hand_over(batch.popleft()[0], result)
        except (TimeoutError, EOFError) as e:
            self.remove()
            with self.pool.changed:
                if self.pool.ended:                          # it was killed by close()
                    raise self.pool.ended
                self.pool.counts["restarts"] += 1
                self.pool.counts["timeouts"] += isinstance(e, TimeoutError)
                future, _ = batch.popleft()
                self.pool.hand_over(future, failure(future.kind, str(e)))
                self.pool.queue(future.kind).extendleft(reversed(batch))
                batch.clear()
                self.pool.changed.notify_all()
            self.start()

    def read_result(self, future):
        """Return the Grade or Reply of a Future. EOFError if a verifier wrote into the pipe."""
        line = self.read(self.pool.timeout)
        with contextlib.suppress(ValueError, TypeError):
            answered, *values = unpack(line)
            if answered == future.number:
                return (Grade if future.kind == "reward" else Reply)(*values)
        raise EOFError("the verifier wrote into the pipe that carries grades")

    def start(self):
        """Start a process and wait until it has loaded the task. ValueError if it can't."""
        for _ in range(3):
            if self.pool.read_code() != self.pool.code:
                raise BrokenReward(f"{self.pool.spec} has changed since the run loaded it: restore it and "
                                   "resume.")
            with self.pool.changed:
                if self.pool.ended:
                    raise self.pool.ended
                # One thread; the same order of sets in all workers; a new session, so that Ctrl-C does not
                # reach it.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "tasks._pool", self.pool.spec, self.pool.folder],
                    cwd=Path(__file__).parent.parent,
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
                raise BrokenReward(sentence)
            with self.pool.changed:
                self.pool.loaded = True
                self.pool.changed.notify_all()
            return
        raise BrokenReward(f"The task {self.pool.spec} can't be loaded in a worker process ({problem}): "
                           "check the code that its file runs on import.")

    def write(self, data):
        data = memoryview(data)
        while data:
            self.wait(self.process.stdin, select.POLLOUT, self.pool.timeout)
            try:
                data = data[os.write(self.process.stdin.fileno(), data):]
            except BrokenPipeError:
                raise EOFError(f"the worker died {LIMIT}") from None

    def read(self, timeout):
        """Return the next line. TimeoutError after `timeout` seconds, EOFError at the end of the pipe."""
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

    def remove(self):
        with self.pool.changed:
            if self.process:
                end_family(self.process.pid)
                self.process.wait()
                self.process.stdin.close(), self.process.stdout.close()
                self.process = None


if __name__ == "__main__":
    main(*sys.argv[1:])
