"""Whatever a verifier does, the grades come in the order of submission, and the run goes on."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import tasks
from conftest import ROOT, alive
from runtime.config import BadInput
from tasks import _pool
from tasks._pool import BrokenReward, Grade, Pool, grade

MISCHIEF = """
import ctypes, os, re, subprocess, sys, time
STOP = "<stop>"
print("noise at import")

def reward(question, completion):
    time.sleep(question.get("sleep", 0))
    if completion == "hang":
        while True:
            pass
    if completion == "regex":                          # which keeps the interpreter's lock while it hangs
        re.match(r"(a+)+$", "a" * 50 + "b")
    if completion == "exit":
        os._exit(0)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "quit":
        sys.exit("enough")
    if completion == "raise":
        raise ValueError("no \\ud800\\n verdict")
    if completion == "fork":
        if os.fork() == 0:
            raise ValueError("of the copy")
        os.wait()
    if completion == "program":
        with subprocess.Popen(question["program"], start_new_session=question["session"]) as program, open(question["pid"], "w") as file:
            print(program.pid, file=file, end="", flush=True)
            program.wait()
    if completion == "pipe":                           # a grade for each descriptor that may be the protocol's
        for number in range(3, 16):
            try:
                os.write(number, question["grade"].encode())
            except OSError:
                pass
    if completion == "memory":
        return float(len(bytes(6 * 2**30)) > 0)        # zeros that are never touched: without a limit they cost nothing
    if completion == "print":
        print("noise")
        os.write(1, b"[0.5, {}, 1]\\n")
        subprocess.run(["echo", "noise of a program"])
        assert sys.stdin.read() == ""
    if completion.startswith("score "):
        return float(completion[6:])
    return 1.0, {"correct": True, "torch": "torch" in sys.modules}

def signature(completion):
    return completion
"""
FINE = Grade(1.0, {"correct": True, "torch": False}, "fine", None)


@pytest.fixture(scope="module")
def mischief(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "mischief.py"
    path.write_text(MISCHIEF)
    return str(path)


@pytest.fixture(scope="module")
def pool(mischief):
    with Pool(mischief, workers=2, timeout=1.5) as pool:
        yield pool


def end_soon(pids, seconds=3.0):
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_grades_come_in_the_order_of_submission(mischief):
    rng = random.Random(0)
    with Pool(mischief, workers=3) as pool:
        grades, slowest = [], 0.0
        for i in range(150):
            pool.submit({"sleep": 1.0 if i == 0 else rng.random() * 0.01}, f"item {i}")
            began = time.monotonic()
            grades += pool.collect()
            slowest = max(slowest, time.monotonic() - began)
        assert not grades and slowest < 0.5                  # the first is still in work, and no one waited for it
        pool.submit({}, "last")
        assert [g.signature for g in pool.score([({}, "between")])] == ["between"]
        grades += pool.collect(wait=True)
        assert [g.signature for g in grades] == [f"item {i}" for i in range(150)] + ["last"]
        assert pool.collect() == pool.collect(wait=True) == pool.score([]) == []


def test_slow_grades_are_shared_by_the_workers(mischief):
    def seconds(items):
        began = time.monotonic()
        with pool.changed:                                   # no one takes any before all are there
            for item in items:
                pool.submit(*item)
        pool.collect(wait=True)
        return time.monotonic() - began
    with Pool(mischief, workers=4, timeout=0.7) as pool:
        pool.score([({}, "quick")] * 500)
        assert seconds([({"sleep": 0.2}, "slow")] * 12) < 0.6 * 12 * 0.2               # a quarter would be all of it
        pool.score([({}, "quick")] * 500)
        assert seconds([({}, "hang")] * 8 + [({}, "fine")] * 56) < 0.8 * 8 * 0.7       # nor do they wait for their turn to hang
        assert pool.counts == {"errors": 8, "timeouts": 8, "restarts": 8}
    with Pool(mischief, workers=2) as pool:
        seconds([({"sleep": 0.05}, "slow")] * 8)
        assert seconds([({"sleep": 1.5}, "slowest")] + [({"sleep": 0.15}, "slow")] * 10) < 1.95      # none is behind the slowest


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("program", [["sleep", "100"], ["timeout", "100", "sleep", "100"]])
def test_programs_of_a_verifier_end_with_it(mischief, tmp_path, program, session):
    """Those in a process group of their own, too, which `timeout` makes, and those in a session of their own."""
    path = tmp_path / "pid"
    with Pool(mischief, workers=1, timeout=1.0) as pool:
        [late] = pool.score([({"pid": str(path), "program": program, "session": session}, "program")])
    assert late.error == "timed out after 1 s" and end_soon([path.read_text()])


@pytest.mark.parametrize("stray", ['[0, 0.5, {}, "", null]\n', '[0.5, {}, "", null]\n', "noise", "\n", '{"score": 1}\n'])
def test_a_verifier_that_writes_into_the_pipe_of_the_grades_shifts_none(mischief, stray):
    with Pool(mischief, workers=1) as pool:
        grades = pool.score([({}, "score 0.25"), ({"grade": stray}, "pipe"), *[({}, f"score 0.{i}") for i in range(9)]])
        assert [g.score for g in grades if not g.error] == [0.25, *[float(f"0.{i}") for i in range(9)]]
        assert [g.error for g in grades if g.error] == ["the verifier wrote into the pipe that carries grades"] and grades[1].error


def test_processes_threads_and_the_caller_agree():
    task, rng = tasks.load("unit_conversion"), random.Random(0)
    junk = ["<answer>", "</answer>", "7", "1 * 2 = 2.", "9**9**9", "nan", "\0", "\n", "\r", "漢", "\u2028", "\ud800", "\ud83d\ude00", '"',
            "\\u0041"]
    pairs = []
    for q in task.questions("train", n=100):
        answer = f"<answer>{q['answer']}</answer>"
        pairs += [(q, task.solution(q)), (q, f"1 + 1 = 3. {answer}1 + 1 = 3"),
                  (q, "".join(rng.choices(junk, k=rng.randrange(20))))]
    grades = {}
    for kind in _pool.KINDS:
        with Pool("unit_conversion", workers=2, kind=kind) as pool:
            for pair in pairs:
                pool.submit(*pair)
            grades[kind] = pool.collect(wait=True)
            assert pool.score(pairs) == grades[kind] and pool.counts == {"errors": 0, "timeouts": 0, "restarts": 0}
    assert grades["process"] == grades["thread"] == grades["serial"] == [grade(task, *pair) for pair in pairs]
    assert sum(g.verified for g in grades["serial"]) == 100 and sum(g.score == 1.0 for g in grades["serial"]) >= 200


def test_texts_of_any_kind_and_length_arrive_as_they_are(mischief):
    texts = ["", "\0", "a\nb\r\n", "\ud800", "\udc80 \ud83d\ude00 😀", "\u2028\u0085", "\"\\", "a" * 2**20, "漢\ud800" * 2**19]
    texts += ["\n" * 2**20] * 20
    with Pool(mischief, workers=1) as pool:
        assert [g.signature for g in pool.score([({"text": t}, t) for t in texts])] == texts
        pool.score([({}, "quick")] * 200)                    # after which it is given several at once
        assert [g.signature for g in pool.score([({"text": t}, t) for t in texts])] == texts and pool.counts["restarts"] == 0


def test_a_completion_is_cut_after_the_stop(mischief):
    assert grade(tasks.load(mischief), {}, "a<stop>b<stop>").signature == "a<stop>"
    assert [g.signature for g in grade_all(mischief, ["a<stop>b", "a<sto"])] == ["a<stop>", "a<sto"]


def grade_all(spec, completions, **settings):
    with Pool(spec, workers=1, **settings) as pool:
        return pool.score([({}, c) for c in completions])


def test_one_that_hangs_is_killed_and_its_neighbours_are_graded(pool):
    before, began = dict(pool.counts), time.monotonic()
    texts = ["fine", "hang"] + 20 * ["fine"] + ["regex", "fine"]
    late = Grade(0.0, {}, "", "timed out after 1.5 s")
    assert pool.score([({}, t) for t in texts]) == [FINE if t == "fine" else late for t in texts]
    assert time.monotonic() - began < 15 and not late.verified
    assert {k: v - before[k] for k, v in pool.counts.items()} == {"errors": 2, "timeouts": 2, "restarts": 2}
    assert pool.score([({}, "fine")] * 9) == [FINE] * 9


def test_one_that_dies_is_replaced_and_its_neighbours_are_graded(pool):
    before = dict(pool.counts)
    texts = ["exit", "fine", "segfault", "exit"] + 20 * ["fine"]
    died = Grade(0.0, {}, "", "the worker died (a reward worker may have 4 GiB of memory)")
    assert pool.score([({}, t) for t in texts]) == [FINE if t == "fine" else died for t in texts]
    assert {k: v - before[k] for k, v in pool.counts.items()} == {"errors": 3, "timeouts": 0, "restarts": 3}


def test_what_a_verifier_raises_is_an_error_and_no_zero(pool, mischief):
    before = dict(pool.counts)
    texts = ["raise", "quit", "memory", "score nan", "score inf", "score x", "score 0", "score 0.5"]
    grades = pool.score([({}, t) for t in texts])
    errors = [g.error for g in grades]
    assert errors[0] == r"ValueError: no \ud800 verdict" and errors[1] == "SystemExit: enough" and \
        errors[2] == "MemoryError (a reward worker may have 4 GiB of memory)"
    assert all(error.startswith(("NotAScore", "ValueError")) for error in errors[3:6]) and errors[6:] == [None, None]
    assert all(g[:3] == (0.0, {}, "") for g in grades[:6]) and [g.score for g in grades[6:]] == [0.0, 0.5]
    assert {k: v - before[k] for k, v in pool.counts.items()} == {"errors": 6, "timeouts": 0, "restarts": 0}
    safe = [t for t in texts if t != "memory"]
    assert grade_all(mischief, safe, kind="serial") == grade_all(mischief, safe, kind="thread") == \
        [g for g, t in zip(grades, texts) if t != "memory"]


@pytest.mark.parametrize("kind", _pool.KINDS)
@pytest.mark.parametrize("score", [1.5, -1])
def test_a_score_of_another_scale_ends_the_run_at_once(mischief, kind, score):
    sentence = re.escape(f"returned the score {score}: a score is a number from 0 to 1, so divide it by the highest")
    with Pool(mischief, workers=1, kind=kind) as pool, pytest.raises(BrokenReward, match=sentence):
        pool.score([({}, "fine")] * 40 + [({}, f"score {score}")] + [({}, "fine")] * 40)


BROKEN = {"raise": ("raise KeyError('unit')", "KeyError: 'unit'"), "None": ("pass", "returned the score None"),
          "NaN": ("return float('nan')", "returned the score nan"), "exit": ("os._exit(3)", "the worker died"),
          "sleep": ("time.sleep(60)", "timed out after 0.2 s")}


@pytest.mark.parametrize("kind, fault", [("process", fault) for fault in BROKEN] + [
    (kind, fault) for kind in ("thread", "serial") for fault in ("raise", "None", "NaN")])
def test_a_reward_that_always_fails_is_heard_and_ends_the_run(tmp_path, capsys, monkeypatch, kind, fault):
    if fault in ("exit", "sleep"):                           # each takes a new worker
        monkeypatch.setattr(_pool, "FIRST", 8)
    body, error = BROKEN[fault]
    path = tmp_path / "broken.py"
    path.write_text(f"import os, time\ndef reward(question, completion):\n    {body}\n")
    began = time.monotonic()
    broken = pytest.raises(BrokenReward, match=re.escape(error))
    with broken as ended, Pool(str(path), 2, timeout=0.2, kind=kind) as pool:
        for i in range(_pool.FIRST):                       # no more than these: none is left to raise at
            pool.submit({}, f"{i} é\n" + "x" * 300)
        pool.collect(wait=True)
    assert time.monotonic() - began < 30
    assert isinstance(ended.value, BadInput) and "\n" not in str(ended.value)
    assert str(path) in str(ended.value) and "correct reward(question, completion)" in str(ended.value)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and error in said and len(said) < 600
    assert re.search(r"of '\d+ é\\nx{190,}'\.\.\.$", said.strip())
    for ask in (lambda: pool.submit({}, ""), lambda: pool.score([({}, "")])):
        with pytest.raises(BrokenReward):
            ask()


@pytest.mark.parametrize("kind", _pool.KINDS)
def test_a_reward_that_fails_less_often_is_said_once_and_the_run_goes_on(mischief, capfd, kind):
    """Which completions are the first is a matter of their submission, and not of how long they take."""
    with Pool(mischief, 2, kind=kind) as pool:
        capfd.readouterr()
        grades = pool.score([({"sleep": 0.5}, "fine")] + [({}, "raise")] * 50)
        assert [g.error is None for g in grades] == [True] + [False] * 50 and pool.counts["errors"] == 50
        assert pool.score([({}, "quit")] * 40)[0].error == "SystemExit: enough"
    said = capfd.readouterr().err
    assert said.count("of 'raise'") == said.count("failed (") == 1 and "SystemExit" not in said


@pytest.mark.parametrize("body, words", [
    ("import os; os._exit(0)", "ends the process that imports it, with exit code 0"),
    ("import ctypes; ctypes.string_at(0)", "exit code -11"),
    ("import sys; sys.exit('Say a level.')", "SystemExit: Say a level."),
    ("raise SystemExit", "SystemExit, line 1 of mine.py"),
    ("x = 1\nimport nothing_of_that_name", "nothing_of_that_name', line 2 of mine.py"),
    ("while True: pass", "takes more than 1 s")])
def test_a_task_that_ends_the_process_on_import_is_a_sentence(tmp_path, monkeypatch, body, words):
    monkeypatch.setattr(_pool, "LOADING", 1 if "while" in body else 60)
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        _pool.load(str(tmp_path / "mine.py"))
    assert "mine.py" in str(error.value) and "\n" not in str(error.value)


def test_a_reward_may_have_processes_of_its_own(tmp_path):
    """Which import its file under the name that its functions are pickled with."""
    (tmp_path / "sums.py").write_text("""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
def double(text):
    return 2 * int(text)
def reward(question, completion):
    with ProcessPoolExecutor(1, mp_context=get_context(question["start"])) as pool:
        return pool.submit(double, completion).result() / 2
""")
    (tmp_path / "json.py").write_text((tmp_path / "sums.py").read_text())     # the name of another module
    for name, start in (("sums", "spawn"), ("sums", "fork"), ("json", "fork")):
        with Pool(str(tmp_path / f"{name}.py"), 1) as pool:
            assert pool.score([({"start": start}, "1")])[0][:4:3] == (1.0, None), (name, start)


def test_what_a_verifier_prints_or_forks_is_no_grade(mischief, capfd):
    grades = grade_all(mischief, ["print", "fork", "fine"])
    assert [g.signature for g in grades] == ["print", "fork", "fine"] and not any(g.error for g in grades)
    out, err = capfd.readouterr()
    assert out == "" and err.split("\n")[:3] == ["noise at import", "noise", "[0.5, {}, 1]"] and "noise of a program" in err


def test_a_worker_by_hand(mischief):
    lines = json.dumps([[7, "reward", {}, "fine"], [8, "reward", {}, "raise"]]) + "\n" + json.dumps([[9, "reward", {}, "fine"]]) + "\n"
    done = subprocess.run([sys.executable, "-m", "tasks._pool", mischief], input=lines, capture_output=True, text=True, cwd=ROOT,
                          timeout=20)
    ready, *answers = map(json.loads, done.stdout.splitlines())
    assert ready is None and [(a[0], a[3]) for a in answers] == [(7, "fine"), (8, ""), (9, "fine")]
    assert done.returncode == -signal.SIGKILL                # it has ended all that a verifier may have started, and itself


def test_a_path_begins_where_the_pool_was_made(mischief, tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(mischief))
    (tmp_path / "tasks").mkdir()                             # hides nothing of ours
    with Pool("mischief.py", workers=1) as pool:
        monkeypatch.chdir(tmp_path)
        died, fine = pool.score([({}, "exit"), ({}, "fine")])
        assert died.error.startswith("the worker died") and fine.error is None


@pytest.mark.parametrize("body, sentence", [
    ("bytes(6 * 2**30)", "MemoryError.* .a reward worker may have 4 GiB of memory.\\.$"),
    ("import nothing_of_that_name", "nothing_of_that_name"), ("raise ValueError('Say a level.')", "Say a level."),
    ("import os; os._exit(0)", "the worker died"), ("import sys; sys.exit()", "SystemExit")])
def test_a_task_that_can_not_be_loaded_says_so_at_once(tmp_path, body, sentence):
    (tmp_path / "broken.py").write_text(body)
    began = time.monotonic()
    with pytest.raises(ValueError, match=sentence):
        Pool(str(tmp_path / "broken.py"), workers=2)
    assert time.monotonic() - began < 5


def test_bad_arguments_are_refused(mischief):
    for kind, error in (("process", ValueError), ("serial", LookupError)):
        with pytest.raises(error, match="There is no task nothing"):
            Pool("nothing", workers=1, kind=kind)
    with pytest.raises(ValueError, match="at least 1"):
        Pool(mischief, workers=0)
    with pytest.raises(ValueError, match="process, thread, serial"):
        Pool(mischief, kind="fibre")


@pytest.mark.parametrize("edited", ["later.py", "neighbour.py"])
def test_a_task_that_breaks_later_ends_the_wait(tmp_path, edited):
    path = tmp_path / "later.py"
    path.write_text("import neighbour\n" + MISCHIEF)
    (tmp_path / "neighbour.py").write_text("")
    with Pool(str(path), workers=1) as pool:
        (tmp_path / edited).write_text("raise ValueError('Changed meanwhile.')")
        pool.submit({}, "exit")
        pool.submit({}, "fine")
        with pytest.raises(ValueError, match="has changed since the run loaded it"):
            pool.collect(wait=True)
        with pytest.raises(ValueError, match="has changed since the run loaded it"):
            pool.submit({}, "fine")


@pytest.mark.parametrize("kind", _pool.KINDS)
def test_a_closed_pool_is_closed(mischief, kind):
    pool = Pool(mischief, workers=2, kind=kind)
    pids = [w.process.pid for w in pool.workers]
    for text in ["fine", "fine"] + ["hang", "regex"] * (kind == "process"):
        pool.submit({}, text)
    grades = []
    while len(grades) < 2:
        grades += pool.collect()
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 1 and not any(map(alive, pids)) and [g.signature for g in grades] == ["fine", "fine"]
    for ask in (lambda: pool.submit({}, "fine"), lambda: pool.score([({}, "fine")])):
        with pytest.raises(RuntimeError, match="closed"):
            ask()
    if kind == "process":
        with pytest.raises(RuntimeError, match="closed"):
            pool.collect(wait=True)


def test_signals_are_the_stages_to_decide(mischief):
    with Pool(mischief, workers=1) as pool:
        pool.score([({}, "fine")])
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pool.workers[0].process.pid, number)
        assert [g.signature for g in pool.score([({}, "fine")] * 3)] == ["fine"] * 3 and pool.counts["restarts"] == 0


@pytest.mark.parametrize("ending", ["kill -9", "not closed", "a crash"])
def test_what_a_verifier_started_ends_with_the_run(mischief, tmp_path, ending):
    """Also in a session of its own, and a daemon, whose parent has ended."""
    (tmp_path / "starts.py").write_text(f"""
import os, subprocess
def reward(question, completion):
    pids = [subprocess.Popen(["sleep", "600"], start_new_session=new).pid for new in (False, True)]
    daemon = subprocess.run("setsid sleep 600 >/dev/null & echo $!", shell=True, text=True, stdout=subprocess.PIPE).stdout
    with open({str(tmp_path / "pids")!r}, "a") as file:
        print(*pids, daemon, file=file, end="")
    if {ending == "a crash"}:
        os._exit(3)
    return 1.0
""")
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tasks._pool import Pool
pool = Pool({str(tmp_path / "starts.py")!r}, workers=2, timeout=60)
pool.score([({{}}, "fine")] * 4)
if {ending == "a crash"}:
    time.sleep(60)
if {ending == "kill -9"}:
    os.kill(os.getpid(), 9)
"""
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    if ending == "a crash":                                  # of the worker; the run goes on
        until = time.monotonic() + 20
        while time.monotonic() < until and (not (tmp_path / "pids").exists() or (tmp_path / "pids").read_text().count("\n") < 4):
            time.sleep(0.05)
    else:
        run.wait()
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 12 and end_soon(pids)
    run.kill()
    run.wait()


def test_a_worker_whose_run_is_gone_says_nothing():
    """As after a run that is killed while its workers start."""
    worker = subprocess.Popen([sys.executable, "-m", "tasks._pool", "guess"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
    worker.stdout.close()
    assert worker.communicate()[1] == b""


@pytest.mark.parametrize("ending", ["kill -9", "not closed"])
def test_no_worker_outlives_its_parent(mischief, ending):
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tasks._pool import Pool
pool = Pool({mischief!r}, workers=3, timeout=60)
pool.score([({{}}, "fine")] * 50)
while not all(w.process for w in pool.workers):
    time.sleep(0.01)
for text in ("hang", "regex"):                         # the third has nothing to do
    pool.submit({{}}, text)
time.sleep(0.2)
print(*(w.process.pid for w in pool.workers), flush=True)
if {ending == "kill -9"}:
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = parent.stdout.readline().split()
    assert len(pids) == 3
    if ending == "kill -9":
        assert all(map(alive, pids))
        parent.kill()
    assert parent.wait(timeout=10) == (-signal.SIGKILL if ending == "kill -9" else 0)
    assert end_soon(pids)


def test_there_are_as_many_workers_as_a_rank_has_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(24), raising=False)
    for ranks, workers in ((1, 8), (4, 6), (8, 3), (48, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert _pool.default_workers() == workers


def test_completions_are_handed_over_together_or_when_they_have_waited(tmp_path, monkeypatch):
    (tmp_path / "quick.py").write_text("def reward(question, completion):\n    return 1.0\n")
    graded = []
    monkeypatch.setattr(_pool, "PATIENCE", 60)
    monkeypatch.setitem(_pool.JOBS, "reward", lambda task, question, completion, turns: graded.append(completion) or Grade(1.0, {}, "", None))
    with Pool(str(tmp_path / "quick.py"), kind="serial") as pool:
        for i in range(_pool.HAND_OVER - 1):
            pool.submit({}, f"{i}")
        assert not graded and pool.collect() == []
        pool.submit({}, "the last")
        assert len(graded) == len(pool.collect()) == _pool.HAND_OVER
        pool.submit({}, "alone")
        assert pool.collect() == []
        pool.handed_over -= 2 * _pool.PATIENCE
        assert len(pool.collect()) == 1 and graded[-1] == "alone"
        pool.submit({}, "at the end")
        assert len(pool.collect(wait=True)) == 1 and pool.collect(wait=True) == []


def test_a_grade_costs_little(tmp_path):
    (tmp_path / "quick.py").write_text("def reward(question, completion):\n    return 1.0\n")
    with Pool(str(tmp_path / "quick.py"), workers=1) as pool:
        pairs, best = [({"question": "How many?", "answer": "6"}, "2 * 3 = 6. <answer>6</answer>")] * 2000, 1.0
        for _ in range(5):
            began = time.monotonic()
            pool.score(pairs)
            best = min(best, (time.monotonic() - began) / len(pairs))
    assert best < 1e-3                       # seconds: about 30e-6 on an idle machine, ten times that on a busy one


def test_a_verifier_that_draws_does_so_alike_on_any_worker(tmp_path):
    path = tmp_path / "luck.py"
    path.write_text("import random\ndef reward(question, completion):\n    return random.random()\n")
    pairs = [({"question": "q"}, f"answer {i}") for i in range(40)]
    scores = []
    random.seed(5)
    for workers, kind in ((1, "process"), (3, "process"), (None, "serial")):
        with Pool(str(path), workers, kind=kind) as pool:
            scores.append([grade.score for grade in pool.score(pairs)])
    assert scores[0] == scores[1] == scores[2] and len(set(scores[0])) == 40
    assert random.random() == random.Random(5).random()              # serial: the caller's own draws go on
