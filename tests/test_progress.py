"""Long work has a line on a terminal, erased at its end; elsewhere nothing is printed."""
import contextlib
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import forked
import tasks
from conftest import ROOT, environment
from engine import Request, Sample
from rollouts.pipeline import Pipeline, ask
from runtime import log, memory, progress
from runtime.progress import ProgressLine, track
from tasks import _pool
from tasks._pool import Grade, Pool
from text.tokenizer import Tokenizer


class Terminal:
    """A pseudo-terminal and the text on its screen."""

    def __init__(self, columns):
        self.end, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.file = open(terminal, "w", buffering=1)
        self.printed = ""

    def read(self, seconds):
        """Take what is printed within so many seconds, or what was before. Returns whether there was any."""
        with contextlib.suppress(OSError):                    # nobody has it open any more
            if select.select([self.end], [], [], seconds)[0]:
                self.printed += os.read(self.end, 2**16).decode()
                return True
        return False

    def until(self, words):
        """Wait until the words have been printed, so that what calls this is slow enough to show them."""
        give_up = time.monotonic() + 20
        while words not in self.printed:
            self.read(0.01)
            assert time.monotonic() < give_up, (words, self.printed)

    def rows(self):
        """Return the lines as they are to be seen, without those that are empty."""
        while self.read(0.05):
            pass
        seen = []
        for line in self.printed.split("\n"):
            row = []
            at = 0
            for character in line:
                if character == "\r":
                    at = 0
                    continue
                row[at:at + 1] = character
                at += 1
            seen.append("".join(row).rstrip())
        return [row for row in seen if row]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns that progress.py takes for standard error (pytest has the real one), and lines that
    appear at once."""
    terminal = Terminal(100)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal.file, modules=sys.modules))
    monkeypatch.setattr(progress, "DELAY", 0.001)
    monkeypatch.setenv("TERM", "xterm")
    yield terminal
    terminal.file.close()
    os.close(terminal.end)


# --- the line ---

def test_a_line_counts_and_is_erased(terminal):
    with ProgressLine("counting", 200, "sheep", note=lambda: "7% right") as line:
        terminal.until("counting: 0 of 200 sheep (0%)")
        time.sleep(0.2)
        line.add(50)
        terminal.until("counting: 50 of 200 sheep (25%)")
        assert "7% right, ETA" in terminal.printed
    assert terminal.rows() == []
    print("next", file=terminal.file)
    assert terminal.rows() == ["next"]


def test_quick_work_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 60)
    for _ in track(range(20), "counting", "sheep"):
        time.sleep(0.001)
    assert terminal.rows() == []


def test_logged_lines_stand_above_the_progress_line(terminal, tmp_path):
    run_log = log.Log(tmp_path)
    with contextlib.redirect_stdout(terminal.file), ProgressLine("waiting", 5, "turns") as line:
        for i in range(3):
            terminal.until(f"waiting: {i} of 5")
            run_log.say(f"line {i}")
            time.sleep(0.2)
            line.add()
        terminal.until("waiting: 3 of 5")
        *lines, last = terminal.rows()
        assert lines == ["line 0", "line 1", "line 2"] and last.startswith("waiting: ")
    assert terminal.rows() == ["line 0", "line 1", "line 2"]
    assert (tmp_path / "training.log").read_text() == "line 0\nline 1\nline 2\n"


def test_an_error_leaves_no_line_behind(terminal):
    with pytest.raises(ValueError), ProgressLine("reading"):
        terminal.until("reading ...")
        raise ValueError
    assert terminal.rows() == []


# --- where nobody looks ---

@pytest.mark.parametrize("where", ["a pipe", "a dumb terminal", "another rank", "another's process"])
def test_nothing_is_drawn_and_no_thread_started(terminal, monkeypatch, where, tmp_path):
    if where == "a pipe":
        progress.sys.stderr = open(tmp_path / "stderr", "w")
    if where == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if where == "another rank":
        monkeypatch.setenv("RANK", "1")
    if where == "another's process":
        monkeypatch.setattr(progress, "disabled", True)
    threads = threading.active_count()
    for _ in track(range(3), "counting", "sheep"):
        assert threading.active_count() == threads
        time.sleep(0.005)
    assert terminal.rows() == [] and (where != "a pipe" or (tmp_path / "stderr").read_text() == "")


def on_a_terminal(program):
    """Return the Terminal of a program that has ended."""
    terminal = Terminal(100)
    process = forked.Popen([sys.executable, "-c", program], env=environment(TERM="xterm"), cwd=ROOT, stdout=terminal.file,
                           stderr=terminal.file)
    terminal.file.close()
    while process.poll() is None:
        terminal.read(0.01)
    assert not process.wait(20)
    return terminal


def test_worker_processes_draw_nothing(tmp_path):
    (tmp_path / "slow.py").write_text("""
import time
from runtime import progress
progress.DELAY = 0.001
def reward(question, completion):
    with progress.ProgressLine("a worker"):
        time.sleep(0.1)
    return 1.0
""")
    program = f"""
from tasks._pool import Pool
with Pool({str(tmp_path / "slow.py")!r}, workers=1) as pool:
    print(pool.score([({{}}, "x")])[0].score)
"""
    assert "a worker" not in on_a_terminal(program).printed


# --- work that takes long ---

def test_a_line_that_is_being_drawn_as_its_work_ends(terminal, monkeypatch):
    begun = threading.Event()
    drawn = threading.Event()
    draw = ProgressLine.draw

    def slow(line):
        begun.set()
        time.sleep(0.1)
        draw(line)
        drawn.set()
    monkeypatch.setattr(ProgressLine, "draw", slow)
    with ProgressLine("short"):
        assert begun.wait(10)
    assert drawn.is_set() and terminal.rows() == []


def test_trying_a_micro_batch(terminal):
    said = []
    run = SimpleNamespace(hardware=SimpleNamespace(compile=True), log=SimpleNamespace(say=said.append), state=SimpleNamespace())
    model = SimpleNamespace(share_gradients=lambda: said.append("shared"))

    def attempt(size):
        terminal.until(f"trying a micro-batch of {size}, compiling ...")
        return model, torch.OutOfMemoryError("out of memory") if size == 8 else None
    assert memory.fit(run, [8, 4, 2], attempt, str) is model and run.state.micro_batch == 4 and run.sizes == [8, 4, 2]
    assert len(said) == 2 and said[-1] == "shared" and terminal.rows() == []


def test_a_line_is_written_to_a_file_now_and_then(monkeypatch, capfd):
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    with ProgressLine("sampling", 4, "answers", note=lambda: "50% verified") as line:
        line.add()
        time.sleep(0.06)
        line.add()
        line.add()
    with ProgressLine("reading", unit="rows") as line:
        time.sleep(0.06)
        line.add(7)
    assert capfd.readouterr().err == "sampling: 50% of 4 answers, 50% verified, 0s, ETA 0s\nreading: 7 rows, 0s\n"


@pytest.fixture
def graded(monkeypatch, tmp_path):
    """Return the path of a task that accepts every answer."""
    monkeypatch.setitem(_pool.JOBS, "reward", lambda task, question, completion, turns: Grade(1.0, {}, "", None))
    (tmp_path / "right.py").write_text("def reward(question, completion):\n    return 1.0\n")
    return str(tmp_path / "right.py")


def test_asking_questions_and_the_note(terminal, graded):
    class Engine:
        progress = SimpleNamespace(tokens_per_s=1234.5)

        def check(self, request):
            pass

        def generate(self, requests, progress, sampling, environment):
            for request in requests:
                for index in range(request.num_samples):
                    yield Sample(request, index, [5, 256], [-0.5, -0.5], "stop")
                time.sleep(0.2)
                terminal.until("evaluating: ")

    questions = [{"question": "a", "answer": "b"}] * 2
    with Pool(graded, kind="serial") as pool:
        pipeline = Pipeline(Engine(), pool, Tokenizer("bytes"), tasks.load(graded))
        requests = [Request([1], 1, key, 4) for key in range(2)]
        grades, _ = ask(pipeline, questions, requests)
    assert [[grade.score for grade in row] for row in grades] == [[1.0], [1.0]]
    assert " of 2 answers" in terminal.printed and terminal.rows() == []
