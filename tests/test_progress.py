"""What takes long has a line on the terminal that goes when it is done; elsewhere nothing is printed."""
import contextlib
import fcntl
import os
import pty
import re
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
import hf
import tasks
from conftest import ROOT, environment
from engine import Request, Sample
from model import GPT, GPTConfig
from rollout import Pipeline, ask
from runtime import data, guard, log, memory, perplexity, progress, rewards, texts
from runtime.config import BadInput
from runtime.progress import ProgressLine, track
from runtime.rewards import Grade, Pool
from runtime.tokenizer import Tokenizer
from tasks import arithmetic


class Terminal:
    """A pseudo-terminal, and what stands on its screen."""

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

    def until(self, words, anew=False):
        """Wait until the words have been printed, so that what calls this is slow enough to show them. anew: once
        more."""
        give_up = time.monotonic() + 20
        start = len(self.printed) if anew else 0
        while words not in self.printed[start:]:
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
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress, "TICK", 0.002)
    monkeypatch.setenv("TERM", "xterm")
    yield terminal
    terminal.file.close()
    os.close(terminal.end)


# --- the line ---

@pytest.mark.parametrize("about, done, seconds, text", [
    (dict(), 0, 75, "1m15s so far"),
    (dict(total=0), 0, 3, "3s so far"),
    (dict(total=400, unit="answers"), 0, 4, "0 of 400 answers (0%), 4s so far"),
    (dict(total=400, unit="answers"), 100, 10, "100 of 400 answers (25%), 10/s, ETA 30s"),
    (dict(total=400, unit="answers", note=lambda: "7% right"), 10, 4, "10 of 400 answers (2%), 2.5/s, ETA 2m36s, 7% right"),
    (dict(total=10, unit="runs", count=lambda: 4, note=str), 0, 60, "4 of 10 runs (40%), 15s each, ETA 1m30s"),
    (dict(total=8e9, unit="B"), 2e9, 100, "2.0 GB of 8.0 GB (25%), 20.0 MB/s, ETA 5m00s"),
    (dict(total=5000, unit="B"), 6000, 1, "5.0 kB of 5.0 kB (100%), 5.0 kB/s, ETA 0s"),
])
def test_what_it_says(monkeypatch, about, done, seconds, text):
    clock = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock)
    with ProgressLine("working", **about) as line:
        line.add(done)
        clock += seconds
        assert line.text() == f"working: {text}"


def test_it_is_drawn_again_and_again_and_leaves_nothing(terminal):
    before = threading.active_count()
    with ProgressLine("counting", 200, "sheep") as line:
        terminal.until("counting: 0 of 200 sheep (0%)")
        line.add(50)
        terminal.until("counting: 50 of 200 sheep (25%)")
        [row] = terminal.rows()
        assert row.startswith("counting: 50 of 200 sheep") and "ETA" in row and "\n" not in terminal.printed
    assert terminal.rows() == []
    print("next", file=terminal.file)
    assert terminal.rows() == ["next"]
    time.sleep(0.01)
    assert threading.active_count() <= before


def test_what_is_quick_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 60)
    for _ in track(range(20), "counting", "sheep"):
        time.sleep(0.001)
    assert terminal.rows() == [] and terminal.printed == ""


def test_it_is_drawn_a_few_times_a_second():
    assert 1 <= progress.DELAY <= 2 and 1 / progress.TICK <= 5


def test_it_fits_the_terminal(terminal):
    with ProgressLine("x" * 300):
        terminal.until("x" * 99)
        assert terminal.rows() == ["x" * 99]
    assert terminal.rows() == []


def test_lines_that_are_logged_meanwhile_stand_above_it(terminal, tmp_path):
    run_log = log.Log(tmp_path)
    with contextlib.redirect_stdout(terminal.file), ProgressLine("waiting"):
        for i in range(3):
            terminal.until("waiting: ", anew=True)
            run_log.say(f"line {i}")
            terminal.until(f"line {i}")
        terminal.until("waiting: ", anew=True)
        *lines, last = terminal.rows()
        assert lines == ["line 0", "line 1", "line 2"] and last.startswith("waiting: ")
    assert terminal.rows() == ["line 0", "line 1", "line 2"]
    assert (tmp_path / "training.log").read_text() == "line 0\nline 1\nline 2\n"


def test_of_lines_within_lines_the_one_that_counts_is_drawn(terminal):
    with ProgressLine("getting"):
        terminal.until("getting: 0s")
        with ProgressLine("drawing", 5, "questions") as line:
            terminal.until("drawing: 0 of 5")
            with ProgressLine("thinking"):
                line.add()
                terminal.until("drawing: 1 of 5")
        terminal.until("getting", anew=True)
    assert terminal.rows() == [] and "thinking" not in terminal.printed


def test_a_library_s_own_bar_has_the_terminal(terminal):
    tqdm = pytest.importorskip("tqdm")
    with ProgressLine("getting a model whose name is longer than the bar is wide"):
        terminal.until("getting a model")
        with tqdm.tqdm(total=2, file=terminal.file, leave=False) as bar:
            time.sleep(0.1)                  # the line goes when its thread looks again
            bar.refresh()
            [row] = terminal.rows()
            assert "0/2" in row and "so far" not in row
        terminal.until("getting a model", anew=True)
    assert terminal.rows() == []


def test_an_error_leaves_no_line_behind(terminal):
    def main(argv):
        rows = track(range(3), "reading", "rows")
        for number in rows:
            terminal.until("reading: 0 of 3 rows")
            raise BadInput(f"Row {number} is none.")
    with pytest.raises(BadInput) as kept:    # and with it the frame that has the rows, which have not ended
        guard.exit_code(main, [])
    assert terminal.rows() == [] and "is none" in str(kept.value)


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
        monkeypatch.setattr(progress.SCREEN, "off", True)
    threads = threading.active_count()
    for _ in track(range(3), "counting", "sheep"):
        assert threading.active_count() == threads
        time.sleep(0.005)
    assert terminal.rows() == [] and (where != "a pipe" or (tmp_path / "stderr").read_text() == "")


COUNTS = """
import os, sys, time
from runtime import progress
progress.DELAY = 0
progress.TICK = 0.01
with progress.ProgressLine("rank " + os.environ.get("RANK", "0"), 10, "sheep") as line:
    for _ in range(10):
        time.sleep(0.03)
        line.add()
print("done", flush=True)
"""


def on_a_terminal(program, ranks=1):
    """Return the Terminal of a program that has ended; of several ranks all write there."""
    terminal = Terminal(100)
    kinds = forked.ranks_of(ranks) if ranks > 1 else [{}]
    processes = [forked.Popen([sys.executable, "-c", program], env=environment(TERM="xterm", **of_rank), cwd=ROOT,
                              stdout=terminal.file, stderr=terminal.file) for of_rank in kinds]
    terminal.file.close()
    while any(process.poll() is None for process in processes):
        terminal.read(0.01)
    assert not any(process.wait(20) for process in processes)
    return terminal


def test_several_ranks_have_one_line():
    terminal = on_a_terminal(COUNTS, ranks=2)
    assert sum(row.endswith("done") for row in terminal.rows()) == 2       # one perhaps behind the other's line
    assert "rank 0: 5 of 10 sheep (50%)" in terminal.printed and "rank 1" not in terminal.printed


def test_a_program_in_a_pipe_prints_no_line():
    done = forked.run([sys.executable, "-c", COUNTS], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_verifier_s_process_leaves_the_run_s_terminal_alone(tmp_path):
    (tmp_path / "slow.py").write_text("""
import time
from runtime import progress
progress.DELAY = 0
progress.TICK = 0.01
def reward(question, completion):
    with progress.ProgressLine("a worker"):
        time.sleep(0.1)
    return 1.0
""")
    program = f"""
from runtime.rewards import Pool
with Pool({str(tmp_path / "slow.py")!r}, workers=1) as pool:
    print(pool.score([({{}}, "x")])[0].score)
"""
    assert "a worker" not in on_a_terminal(program).printed


# --- what takes long ---

def test_a_loop_that_was_given_up_may_be_collected_at_any_moment(terminal):
    """While a line begins, say: its lock is held then, by the same thread."""
    loop = track([1, 2], "counting", "sheep")
    next(loop)

    def collect():
        with progress.SCREEN.lock:
            loop.close()
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and not progress.SCREEN.lines


def test_preparing_a_text(terminal, text, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 2000)
    blocks = texts.blocks
    encode = data.encode_chunk
    encoded = []
    one_at_a_time = threading.Lock()

    def slow_blocks(file, n_bytes):
        terminal.until("reading ")
        yield from blocks(file, n_bytes)

    def slow_encode(*given):
        with one_at_a_time:
            if len(encoded) == 2:
                terminal.until("tokenising train: ")
            encoded.append(encode(*given))
            return encoded[-1]
    monkeypatch.setattr(texts, "blocks", slow_blocks)
    monkeypatch.setattr(data, "encode_chunk", slow_encode)
    data.prepare(str(text), Tokenizer("bytes"), tmp_path)
    assert re.search(rf"reading {re.escape(str(text))}: [\d.]+ kB of 51.4 kB", terminal.printed)
    assert re.search(r"tokenising train: [\d.]+ kB of 46.3 kB", terminal.printed)
    assert terminal.rows() == []


def test_loading_weights(terminal, tmp_path, monkeypatch):
    model = GPT(GPTConfig(vocab_size=17, n_layer=2, n_embd=8, n_head=2, block_size=8))
    hf.export(model, tmp_path)
    whole = hf.read_tensors

    def slow(folder):
        readers = whole(folder)
        name = next(name for name in readers if "layers.1." in name)
        reader = readers[name]

        def slow_reader():
            terminal.until(f"loading the weights in {tmp_path}"[:90])
            return reader()
        return readers | {name: slow_reader}
    monkeypatch.setattr(hf, "read_tensors", slow)
    loaded = hf.load(tmp_path)
    assert torch.equal(loaded.head_weight, model.head_weight) and terminal.rows() == []


def test_getting_a_model_from_the_hub(terminal, monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def slow(name, **_):
        terminal.until("getting some/model from the Hugging Face hub: 0s so far")
        return tmp_path
    monkeypatch.setattr(huggingface_hub, "snapshot_download", slow)
    monkeypatch.setattr(hf.hub, "answers", lambda: True)
    assert hf.download("some/model") == tmp_path and terminal.rows() == []


def test_drawing_questions(terminal, monkeypatch):
    expected = tasks.load("arithmetic").questions("train", n=40)
    draw = arithmetic.draw
    drawn = []

    def slow(*given):
        drawn.append(draw(*given))
        if len(drawn) == 20:
            terminal.until("drawing train questions: ")
        return drawn[-1]
    monkeypatch.setattr(arithmetic, "draw", slow)
    assert tasks.load("arithmetic").questions("train", n=40) == expected
    assert " of 40 questions (" in terminal.printed and terminal.rows() == []


def test_evaluating_on_a_text(terminal, text, tmp_path):
    held_out = data.TokenFile(data.prepare(str(text), Tokenizer("bytes"), tmp_path), "valid")
    calls = []

    def loss(x, y):
        calls.append(x)
        if len(calls) == 3:
            terminal.until("evaluating: 64 of 320 tokens (20%)")
        return torch.tensor(float((y >= 0).sum()))
    model = SimpleNamespace(training=False, eval=lambda: None, train=lambda training: None, loss=loss)
    hw = SimpleNamespace(device="cpu", autocast=contextlib.nullcontext)
    result = perplexity.text_loss(model, held_out, 16, 2, hw, limit=320)
    assert (result["loss"], result["tokens"], len(calls)) == (1.0, 320, 10) and terminal.rows() == []


def test_trying_a_micro_batch(terminal):
    hw = SimpleNamespace(compile=True)

    def attempt(size):
        terminal.until(f"trying a micro-batch of {size}, compiling: 0s so far")
        return "model", torch.OutOfMemoryError("out of memory") if size == 8 else None
    said = []
    assert memory.fit(hw, 8, attempt, lambda size: size // 2, str, said.append) == ("model", 4)
    assert len(said) == 1 and terminal.rows() == []


@pytest.fixture
def graded(monkeypatch, tmp_path):
    """Return the path of a task, of which each answer is right."""
    monkeypatch.setattr(rewards, "grade", lambda task, question, completion: Grade(1.0, {}, "", None))
    (tmp_path / "right.py").write_text("def reward(question, completion):\n    return 1.0\n")
    return str(tmp_path / "right.py")


def test_asking_and_what_is_said_beside_the_count(terminal, graded):
    class Engine:
        progress = SimpleNamespace(tokens_per_s=1234.5)

        def check(self, request):
            pass

        def generate(self, requests, progress, sampling):
            for request in requests:
                for index in range(request.num_samples):
                    yield Sample(request, index, [5, 256], [-0.5, -0.5], [], "stop")
                terminal.until("evaluating: 1 of 2 answers (50%)")

    questions = [{"question": "a", "answer": "b"}] * 2
    with Pool(graded, kind="serial") as pool:
        pipeline = Pipeline(Engine(), pool, Tokenizer("bytes"), tasks.load(graded))
        requests = [Request([1], 1, key, 4) for key in range(2)]
        grades, _ = ask(pipeline, questions, requests)
    assert [[grade.score for grade in row] for row in grades] == [[1.0], [1.0]]
    assert "1,234 tokens/s" in terminal.printed and terminal.rows() == []


@pytest.mark.parametrize("way", ["submit and collect", "score"])
def test_verifying(terminal, graded, monkeypatch, way):
    gradings = []

    def slow(task, question, completion):
        gradings.append(completion)
        if len(gradings) == 3:
            terminal.until("verifying: 2 of 5 answers (40%)")
        return Grade(1.0, {}, "", None)
    monkeypatch.setattr(rewards, "grade", slow)
    with Pool(graded, workers=1, kind="thread") as pool:
        pairs = [({}, f"{i}") for i in range(5)]
        if way == "score":
            assert len(pool.score(pairs)) == 5
        else:
            for question, completion in pairs:
                pool.submit(question, completion)
            assert len(pool.collect(wait=True)) == 5
    assert terminal.rows() == []
