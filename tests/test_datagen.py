"""Rejection sampling: what is kept depends on nothing but the samples, and a stopped run goes on to the same file."""
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import datagen
import forked
import tasks
from conftest import ROOT, called, environment, flags, trained
from rollouts.questions import unseen_questions
from runtime.config import BadInput
from tasks._pool import Grade
from text import examples
from text.tokenizer import Tokenizer

# A task that a model which has seen a little text solves now and then: an even number of letters before the first "a".
TASK = '''
STOP = "a"
PROMPT = "{}"

def questions(split, seed=0, n=None):
    words = [f"{w} {i}" for i in range(12) for w in ("the", "cat", "sat")]
    return [{"question": w, "answer": "7.5"} for w in (words if split == "train" else [" Cat  3!"] if split == "test" else [])][:n]

def reward(question, completion):
    if "slow" in question["question"]:
        raise ValueError("slow")
    return float(completion.endswith("a")), {"answered": completion.endswith("a"), "even": len(completion) % 2 == 0}

def signature(completion):
    return completion
'''
HEADER = {"config": {}, "tokenizer": {}, "model": "", "questions": "", "prompt": "{} is"}
DATAGEN = dict(oversample=6, keep_per_question=2, temperature=1.0, max_new_tokens=12, dtype="fp32", num_questions=30, reward_workers=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "base"
    trained(folder, text, max_steps=20, learning_rate=0.02)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "even.py"
    path.write_text(TASK)
    return path


def command(output, base, task, ranks=1, **knobs):
    start = [sys.executable] if ranks == 1 else [*forked.TORCHRUN, f"--nproc_per_node={ranks}"]
    return start + [str(ROOT / "datagen.py"), *flags(**DATAGEN | dict(init_from=base, task=task, output=output) | knobs)]


def generate(output, base, task, code=0, **knobs):
    argv = command(output, base, task, **knobs)
    if "ranks" in knobs:
        done = forked.run(argv, env=environment(), capture_output=True, text=True, timeout=120)
    else:
        done = called(datagen.main, argv[2:])
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def log(output):
    return [json.loads(line) for line in examples.attempts_path(output).read_text().splitlines()[1:]]


def test_byte_identical_samples_need_their_slots(base, task, tmp_path, monkeypatch):
    """Fewer, as beside another job on the same card, would change the last bits without a word."""
    monkeypatch.setattr(datagen.Engine, "slots", property(lambda self: 8))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    argv = flags(**DATAGEN | dict(init_from=base, task=task, output=tmp_path / "rft.json", deterministic=True))
    with pytest.raises(BadInput, match="Memory suffices for 8 samples at once, .* --slots=64"):
        datagen.main(argv)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] and not (tmp_path / "rft.json").exists()


@pytest.fixture(scope="module")
def made(base, task, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "rft.json"
    done = generate(output, base, task, deterministic=True, json=True)
    return output, json.loads(done.stdout.splitlines()[-1]), done


def test_what_is_kept_and_what_is_said_follow_from_the_log(made):
    output, said, done = made
    rows, records = json.loads(output.read_text()), log(output)
    questions = 29                           # of 30: one reads like a test question but for case, punctuation and spaces
    assert said["dropped"] == 1 and "1 question" in done.stdout and not any(q == "cat 3" for q, _, _ in rows)
    assert sorted((r["number"], r["sample"]) for r in records) == [(r["number"], r["sample"]) for r in records] == list(
        itertools.product(range(questions), range(6)))
    expected, solved, loose = [], 0, 0
    for number in range(questions):
        solutions = {}
        for r in records[6 * number:6 * number + 6]:
            text = r["completion"]
            finished = text.endswith("a")
            assert finished == (r["verdict"] != "unfinished") and text.count("a") == finished
            assert r["verdict"] in ("unfinished", "verified", "not even") and (r["verdict"] == "verified") == (finished and len(text) % 2 == 0)
            assert Tokenizer("bytes").decode(r["ids"]) == text and r["logprob"] < 0 and r["seed"] == 0
            loose += finished
            if r["verdict"] == "verified":
                solutions.setdefault(text, [r["question"], 7.5, text])
        expected += list(solutions.values())[:2]
        solved += bool(solutions)
    assert rows == expected and len(rows) == said["kept"] > 10 and said["solved"] == solved
    assert said["yield_loose"] == pytest.approx(loose / len(records)) and said["attempts"] == len(records) == 174
    assert said["yield_tight"] == pytest.approx(sum(r["verdict"] == "verified" for r in records) / 174)
    assert said["pass_at_1"] == pytest.approx(sum(r["score"] for r in records if r["sample"] == 0) / questions)
    assert said["pass_at_k"]["6"] == pytest.approx(sum(any(r["score"] for r in records[6 * q:6 * q + 6]) for q in range(questions)) / questions)
    assert sum(said["verdicts"].values()) == 174 and sum(said["solutions_per_question"].values()) == questions
    assert sum(r["kept"] for r in records) == len(rows) and not any(r["after_close"] for r in records)


def test_what_is_kept_does_not_depend_on_the_order_of_finishing():
    rng = random.Random(0)
    for _ in range(300):
        n, keep = rng.randrange(1, 8), rng.randrange(1, 4)
        whole = {i: {"verdict": rng.choice(["verified", "not exact"]), "signature": rng.choice("xyz"), "i": i} for i in range(n)}
        closes, chosen = datagen.closes_at(whole, keep)
        firsts = {}
        for i in range(n):
            if whole[i]["verdict"] == "verified":
                firsts.setdefault(whole[i]["signature"], i)
        assert [c["i"] for c in chosen] == sorted(firsts.values())[:keep]
        assert closes == (sorted(firsts.values())[keep - 1] if len(firsts) >= keep else None)
        for missing in range(n):             # closed only when all before have finished
            known = {i: r for i, r in whole.items() if i != missing}
            assert datagen.closes_at(known, keep)[0] == (closes if closes is not None and missing > closes else None)


@pytest.mark.parametrize("knobs", [dict(ranks=2), dict(reward_workers=3), dict(stop_early=True), dict(stop_early=True, ranks=2)])
def test_ranks_workers_and_stopping_early_keep_the_same(made, base, task, tmp_path, knobs):
    generate(tmp_path / "rft.json", base, task, deterministic=True, **knobs)
    assert (tmp_path / "rft.json").read_bytes() == made[0].read_bytes()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["rft.attempts.jsonl", "rft.json"]
    records = log(tmp_path / "rft.json")
    if "stop_early" in knobs:
        assert {(r["number"], r["sample"]) for r in records} <= set(itertools.product(range(29), range(6)))
    else:
        assert examples.attempts_path(tmp_path / "rft.json").read_bytes() == examples.attempts_path(made[0]).read_bytes()


def test_stopping_early_asks_less(made, base, task, tmp_path):
    generate(tmp_path / "rft.json", base, task, stop_early=True, slots=2)
    records = log(tmp_path / "rft.json")
    assert len(records) < 174 and {r["number"] for r in records} == set(range(29)) and any(r["after_close"] for r in records)
    assert {q for q, *_ in json.loads((tmp_path / "rft.json").read_text())} == {q for q, *_ in json.loads(made[0].read_text())}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_to_the_same_file(base, task, tmp_path, how):
    """Killed at ten random moments, where it is killed hard."""
    rng, stops, output, knobs = random.Random(how), 0, tmp_path / "rft.json", dict(deterministic=True, slots=2)
    generate(tmp_path / "whole.json", base, task, **knobs)
    while stops < (10 if how == signal.SIGKILL else 1):
        process = forked.Popen(command(output, base, task, **knobs), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()            # sampling begins
        time.sleep(rng.random() * 0.15)
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
        if "questions solved" in out:        # it was through before it was stopped
            break
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[how], out + err
        assert how == signal.SIGKILL or "to resume" in out and "Stopping after the next answer." in err
        stops += 1
    generate(output, base, task, **knobs)
    assert stops >= (4 if how == signal.SIGKILL else 0)
    whole = tmp_path / "whole.json"
    assert output.read_bytes() == whole.read_bytes()
    assert examples.attempts_path(output).read_bytes() == examples.attempts_path(whole).read_bytes()


def test_only_what_is_missing_is_sampled_again_and_a_cut_line_is(made, base, task, tmp_path):
    output = tmp_path / "rft.json"
    lines = examples.attempts_path(made[0]).read_text().splitlines(keepends=True)
    kept = [line for i, line in enumerate(lines) if i % 5 != 2]
    examples.attempts_path(output).write_text("".join(kept) + lines[2][:40])
    done = generate(output, base, task, deterministic=True, json=True)
    assert f"{len(kept) - 1} attempts are logged already" in done.stdout
    for launcher in ("TORCHELASTIC", "SLURM"):           # torchrun restarts a rank that was killed, SLURM requeues a job
        environ = environment() | {f"{launcher}_RESTART_COUNT": "1"}
        again = forked.run(command(output, base, task, deterministic=True, overwrite=True), env=environ, capture_output=True, text=True)
        assert f"{len(lines) - 1} attempts are logged already" in again.stdout
    assert output.read_bytes() == made[0].read_bytes()
    assert json.loads(done.stdout.splitlines()[-1])["kept"] == made[1]["kept"]


def test_another_question_model_or_knob_refuses_to_go_on(made, base, task, text, tmp_path):
    output, before = made[0], examples.attempts_path(made[0]).read_bytes()
    trained(tmp_path / "other", text, max_steps=1)
    other = tmp_path / "other.py"
    other.write_text(TASK.replace("7.5", "8"))
    for knobs, words in ((dict(temperature=0.9), "another temperature (1.0, now 0.9)"), (dict(num_questions=5), "another num_questions (30, now 5)"),
                         (dict(base=tmp_path / "other"), "another init_from"), (dict(task=other), "another task")):
        done = generate(**dict(output=output, base=base, task=task, deterministic=True) | knobs, code=2)
        assert words in done.stderr and done.stderr.count("\n") == 1
    assert examples.attempts_path(output).read_bytes() == before
    generate(tmp_path / "b.json", base, other, num_questions=3)
    generate(tmp_path / "b.json", base, task, num_questions=3, overwrite=True)
    assert {r["answer"] for r in log(tmp_path / "b.json")} == {"7.5"}


def test_a_verifier_that_was_edited_refuses_old_verdicts_and_a_broken_log_is_named(base, task, tmp_path):
    own, output = tmp_path / "even.py", tmp_path / "rft.json"
    own.write_text(TASK)
    generate(output, base, own, num_questions=3)
    own.write_text(TASK.replace("% 2 == 0", "% 2 == 1"))
    done = generate(output, base, own, code=2, num_questions=3)
    assert "another version of the verifier" in done.stderr and done.stderr.count("\n") == 1
    lines = examples.attempts_path(output).read_text().splitlines(keepends=True)
    own.write_text(TASK)
    for spoiled, words in (([lines[0], "{broken\n", *lines[1:]], "Line 2 of"), (["{broken\n", *lines[1:]], "Line 1 of"), (["[]\n", *lines[1:]], "another")):
        examples.attempts_path(output).write_text("".join(spoiled))
        done = generate(output, base, own, code=2, num_questions=3)
        assert words in done.stderr and done.stderr.count("\n") == 1
        assert examples.attempts_path(output).read_text() == "".join(spoiled)         # nothing is lost


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["rft.json", "rft.attempts.jsonl", "rft.attempts.jsonl.part0"])
@pytest.mark.parametrize("content", ['[["a", 1, "by hand"]]', '{"by": "hand"}\n{"and": "more"}\n', ""])
def test_a_file_that_datagen_did_not_write_is_named_and_stays(tmp_path, name, content, overwrite):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=f"{name} "):
        datagen.Attempts(tmp_path / "rft.json", HEADER, overwrite)
    assert (tmp_path / name).read_text() == content and len(list(tmp_path.iterdir())) == 1


def test_overwriting_removes_what_datagen_wrote_and_nothing_else(tmp_path):
    datagen.Attempts(tmp_path / "rft.json", HEADER, False).part(0).close()
    mine = ["rft.attempts.jsonl.part-of-mine", "rft.json.bak", "rft.txt"]
    for name in ["rft.json", "rft.attempts.jsonl.part1", *mine]:  # the second was killed before it had a line
        (tmp_path / name).write_text("")
    (tmp_path / "rft.attempts.regrade.json").write_text("{}")          # doctor.regrade's scores of the old attempts
    attempts = datagen.Attempts(tmp_path / "rft.json", HEADER | {"model": "another"}, True)
    assert not (tmp_path / "rft.attempts.regrade.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*mine, "rft.attempts.jsonl"])
    assert json.loads(attempts.path.read_text())["model"] == "another"


def test_a_record_that_was_changed_is_refused(made):
    line = examples.attempts_path(made[0]).read_text().splitlines()[1]
    record = examples.row_of(line, "number")
    assert examples.row_of(examples.line_of(record), "number") == record
    for key, value in {"number": -1, "sample": 0.5, "score": 1.5, "completion": None, "checksum": None}.items():
        with pytest.raises(ValueError, match="checksum"):
            examples.row_of(json.dumps(json.loads(line) | {key: value}), "number")


def test_resume_is_no_model():
    with pytest.raises(BadInput, match="name a model here; the same datagen.py command resumes"):
        datagen.main(["--init_from=resume", "--task=unit_conversion"])


def test_a_header_that_was_changed_is_refused(tmp_path):
    log = datagen.Attempts(tmp_path / "rft.json", HEADER, False).path
    log.write_text(log.read_text().replace("{} is", "{} it"))
    with pytest.raises(BadInput, match="Line 1 of .* can't be read .it fails its checksum"):
        datagen.Attempts(tmp_path / "rft.json", HEADER, False)


def test_copies_of_a_question_are_asked_once(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def reward(question, completion): return 1\ndef questions(split, seed=0, n=None):\n"
                                     "    return [{'question': q, 'answer': i} for q in ('ab' if split == 'train' else '') for i in range(20)]\n")
    found, dropped = unseen_questions(tasks.load(str(tmp_path / "own.py")), "train", "auto")
    assert found == [{"question": "a", "answer": 0}, {"question": "b", "answer": 0}] and dropped == 0
    assert "own.py dropped because an earlier one has the same text: 38." in capsys.readouterr().out


def test_a_file_by_the_name_of_the_lock_is_named_and_stays(tmp_path):
    (tmp_path / "rft.attempts.jsonl.lock").write_text("mine")
    with pytest.raises(BadInput, match="not a nanoRFT lock"):
        datagen.open_log(SimpleNamespace(output=str(tmp_path / "rft.json")), HEADER, 1)
    assert (tmp_path / "rft.attempts.jsonl.lock").read_text() == "mine"


def test_answers_of_any_kind_are_written_as_they_are():
    assert [repr(datagen.number(a)) for a in ("7.5", "6000", "999999997000000002", "x", None, ["7"], "nan", 3, 3.7, True, "0012", "1_000", "-2")] == [
        "7.5", "6000", "999999997000000002", "'x'", "None", "['7']", "'nan'", "3", "3.7", "True", "'0012'", "'1_000'", "-2"]


@pytest.mark.parametrize("answer", [None, ["7"], {"a": 1}, True, 7.5])
def test_an_answer_of_any_kind_can_be_trained_on_beside_its_reasoning(tmp_path, answer):
    path = tmp_path / "rft.json"
    path.write_text(json.dumps([["2 + 5?", answer, "It is 7."]]))
    [example] = examples.read(path, Tokenizer("bytes"), "{}")
    assert bytes(example.ids[example.is_target].tolist()[:-1]) == b"It is 7."
    path.write_text(json.dumps([["2 + 5?", answer]]))
    if answer != 7.5:
        with pytest.raises(BadInput, match="a text or a finite number"):
            examples.read(path, Tokenizer("bytes"), "{}")


@pytest.mark.parametrize("text, verdict", [("", "blank"), (" \n", "blank"), ("a", "verified")])
def test_a_blank_completion_that_a_verifier_pays_is_not_kept(text, verdict):
    paid = Grade(1.0, {}, text, None)
    assert datagen.verdict(SimpleNamespace(text=text, finished=True, grade=paid)) == verdict
    assert datagen.verdict(SimpleNamespace(text=text, finished=False, grade=paid)) == "unfinished"


def test_nothing_solved_is_said(base, tmp_path):
    task = tmp_path / "never.py"
    task.write_text(TASK.replace("float(completion.endswith(\"a\"))", "0.0"))
    done = generate(tmp_path / "rft.json", base, task, code=1, num_questions=3)
    assert "No question was solved" in done.stderr and json.loads((tmp_path / "rft.json").read_text()) == []


def test_a_verifier_that_fails_is_counted_and_not_taken_for_a_wrong_answer(base, tmp_path):
    task = tmp_path / "fails.py"
    task.write_text(TASK.replace('("the", "cat", "sat")', '("the", "slow")'))
    done = generate(tmp_path / "rft.json", base, task, num_questions=10, json=True)
    said, records = json.loads(done.stdout.splitlines()[-1]), log(tmp_path / "rft.json")
    errors = [r for r in records if r["verdict"] == "error"]
    assert said["errors"] == len(errors) == said["verdicts"]["error"] > 0 and all("ValueError: slow" in r["error"] for r in errors)
    assert all(r["question"].startswith("slow") for r in errors) and "errors" in done.stdout


@pytest.mark.parametrize("body, knobs, error", [
    ("raise KeyError('unit')", dict(num_questions=10), "KeyError: 'unit'"),
    ("return None", dict(num_questions=2), "returned the score None"),
    ("raise OSError('no')", dict(num_questions=10, ranks=2), "OSError: no")], ids=["raises", "few", "ranks"])
def test_a_verifier_that_always_fails_is_heard_and_ends_the_run(base, tmp_path, body, knobs, error):
    task = tmp_path / "broken.py"
    task.write_text(f"{TASK.partition('def reward')[0]}\ndef reward(question, completion):\n    {body}\n")
    ranks, output = knobs.get("ranks", 1), tmp_path / "rft.json"
    done = generate(output, base, task, code=2 if ranks == 1 else 1, max_new_tokens=24, **knobs)
    own = [line for line in done.stderr.splitlines() if "The reward of the task" in line]
    assert all(error in line for line in own), done.stderr
    assert [line.startswith("error: ") for line in own] == [False] * ranks + [True], done.stderr
    assert not output.exists() and "better model" not in done.stderr
    assert ranks > 1 or done.stderr.count("\n") == 2


@pytest.mark.parametrize("failed, truncated, ends", [(1, 47, False), (2, 2, False), (3, 2, True), (1, 0, True)])
def test_a_failed_reply_among_truncated_attempts_is_no_broken_task(tmp_path, capsys, failed, truncated, ends):
    cfg = datagen.Config(task="guess", output=f"{tmp_path}/rft.json", oversample=failed + truncated)
    attempts = datagen.Attempts(cfg.output, HEADER, False)
    for i in range(failed + truncated):
        said = dict(verdict="error", error="respond() failed: KeyError: 'x'") if i < failed else dict(verdict="unfinished", error=None)
        attempts.records[0, i] = dict(number=0, sample=i, question="q", answer="1", completion="", ids=[1], score=0.0, parts={}, signature="") | said
    cost = dict(seconds=1.0, tokens=9, errors=failed, timeouts=0, restarts=0)
    with pytest.raises(BadInput, match="The respond of .* all of .* correct respond") if ends else nullcontext():
        assert datagen.finish(cfg, [{"question": "q", "answer": "1"}], attempts, [([], cost)], 0) == 1
    assert ends or f"error {failed}" in capsys.readouterr().out


def test_a_task_of_few_questions_is_asked_all_of_them(base, task, tmp_path):
    output = tmp_path / "rft.json"
    done = generate(output, base, task, num_questions="auto", oversample=1, json=True)
    said = json.loads(done.stdout.splitlines()[-1])
    header = json.loads(examples.attempts_path(output).read_text().splitlines()[0])
    assert (said["questions"], said["dropped"], header["config"]["num_questions"]) == (35, 1, 36)
    assert datagen.Config.num_questions == "auto"


def test_a_verifier_s_neighbours_are_a_part_of_it(tmp_path):
    (tmp_path / "near_to_it.py").write_text("WORTH = 1")
    text = "from near_to_it import WORTH\ndef reward(question, completion): return WORTH\n"
    (tmp_path / "mine.py").write_text(text)
    found = tasks.load(str(tmp_path / "mine.py"))
    before = datagen.code_of(found)
    (tmp_path / "near_to_it.py").write_text("WORTH = 0.5")
    assert datagen.code_of(found) != before
    names = [file.name for file in tasks.load("unit_conversion_tool").files]
    assert names == ["unit_conversion_tool.py", "unit_conversion.py"]          # which it imports, and which grades


def test_what_is_kept_can_be_trained_on(made, base, tmp_path):
    trained(tmp_path / "tuned", made[0], defaults={}, config=ROOT / "config/rft.py", init_from=base, num_epochs=1, prompt="{}")
    kept = [r for r in log(made[0]) if r["kept"]]
    read = examples.read(made[0], Tokenizer("bytes"), "{}")
    assert [e.ids[e.is_target].tolist()[:-1] for e in read] == [r["ids"] for r in kept]


@pytest.mark.parametrize("knobs, words", [
    (dict(output="/proc/nothing/rft.json"), "can't be written"), (dict(output="rft.txt"), "should end in .json"),
    (dict(temperature=0), "all samples of a question are the same"), (dict(task="unknown"), "unknown"),
    (dict(num_questions=99), "--num_questions=99"),
    (dict(task="missing.py"), "missing.py"), (dict(few_shot=3), "has no solution"), (dict(init_from="nowhere/at-all"), "nowhere/at-all"),
    (dict(split="valid"), "has 0"), (dict(timeout=0), "timeout"), (dict(num_questions=1, split="valid"), "has 0"), (dict(oversample=0), "at least 1"), (dict(top_p=2.0), "top_p")])
def test_what_can_not_be_done_is_one_sentence(base, task, tmp_path, knobs, words):
    arguments = dict(output=tmp_path / "rft.json", base=base, task=task)
    arguments |= {"base" if k == "init_from" else k: v for k, v in knobs.items()}
    done = generate(code=2, **arguments)
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "rft.json").exists()
