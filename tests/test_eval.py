"""Accuracy on a task: what the figures mean, and that eval.py finds them, alone, on two ranks and for several models."""
import gc
import json
import math
import shutil
import weakref
import zlib
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as evaluation
import forked
import hub.weights
import tasks
from conftest import command, environment, trained
from engine import Engine, Sampling
from engine.runner import ModelRunner
from model import GPT, GPTConfig
from rollouts import accuracy as statistics_of_grades
from rollouts.accuracy import accuracy, difference, interval, mean_score, pass_at
from rollouts.pipeline import Pipeline, ask, context_for, requests_of
from rollouts.questions import questions_of
from runtime.config import BadInput
from runtime.log import for_json
from tasks._pool import Grade, Pool
from text.prompts import prompt_ids
from text.tokenizer import Tokenizer


def graded(*rows):
    """Grades of 1s and 0s; None: not graded."""
    return [[Grade(0.0, {}, "", "ValueError: no") if x is None else Grade(float(x), {"correct": x == 1}, "", None) for x in row] for row in rows]


# --- the figures ---

def test_figures_by_hand():
    good, wrong = Grade(1.0, {"answered": True, "reasoned": True}, "", None), Grade(0.5, {"answered": True, "reasoned": False}, "", None)
    silent, lucky = Grade(0.0, {"answered": False, "reasoned": False}, "", None), Grade(1.0, {"answered": True, "reasoned": False}, "", None)
    broken = Grade(0.0, {}, "", "timed out after 10 s")
    found = accuracy([[good, lucky], [wrong, silent], [good, broken], [good, good]])
    assert found["accuracy"] == (1 + 0 + 0.5 + 1) / 4 and found["accuracy_low"] < 0.625 < found["accuracy_high"]
    assert found["answer_rate"] == 6 / 8 and found["parts"] == {"answered": 6 / 8, "reasoned": 4 / 8} and found["verified"] == 4 / 8
    assert (found["questions"], found["samples"], found["errors"]) == (4, 8, 1)
    assert found["pass_at_k"] == {"1": 0.625, "2": 0.75}
    assert json.loads(json.dumps(found)) == found
    assert for_json(found | {"models": [{"ppl_word": float("inf")}, (1.0, None)]}) == found | {"models": [{"ppl_word": "inf"}, [1.0, None]]}


def test_a_task_without_the_part_answered_has_no_answer_rate():
    found = accuracy(graded([1], [0], [None]))
    assert found["answer_rate"] is None and found["parts"] == {"correct": 1 / 3} and found["errors"] == 1
    assert accuracy(graded([None]))["parts"] == {}


def test_without_worked_examples_the_way_out_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def reward(question, completion): return 1.0\n"
                                     "def questions(split): return [dict(question='6 * 7?', answer='42')] * 9")
    question = {"question": "1 + 1?", "answer": "2"}
    with pytest.raises(ValueError, match="has no solution.*; or give --few_shot=0"):
        requests_of(Tokenizer("bytes"), tasks.load(str(tmp_path / "own.py")), [question], few_shot=4)


@pytest.mark.parametrize("few_shot, advice", [(0, "leave its question out, or choose"), (2, "lower --few_shot, which is 2, or choose")])
def test_a_prompt_that_is_too_long_says_what_helps(few_shot, advice):
    source = SimpleNamespace(config=SimpleNamespace(block_size=8), folder="out/a")
    with pytest.raises(BadInput, match=advice):
        context_for(SimpleNamespace(max_new_tokens=4), SimpleNamespace(responds=False), [SimpleNamespace(ids=[1] * 9)], few_shot, source)


def test_a_part_is_a_share_of_the_samples_whose_task_has_it():
    one, other, broken = Grade(1.0, {"numbers": True}, "", None), Grade(1.0, {"reasoned": True}, "", None), Grade(0.0, {}, "", "no")
    assert accuracy([[one], [other], [other]])["parts"] == {"numbers": 1, "reasoned": 1}
    assert accuracy([[one], [other], [broken]])["parts"] == {"numbers": 1 / 2, "reasoned": 1 / 2}


@pytest.mark.parametrize("n, k", [(1, 1), (5, 2), (6, 4), (7, 7)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n, k):
    for n_right in range(n + 1):
        answers = [i < n_right for i in range(n)]
        chosen = list(combinations(answers, k))
        assert pass_at(k, n, n_right) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_pass_at_k_for_powers_of_two_and_for_all():
    found = accuracy(graded([1, 0, 0, 0, 0, 0], [0] * 6))["pass_at_k"]
    assert list(found) == ["1", "2", "4", "6"] and found["6"] == 0.5 and found["1"] == pytest.approx(1 / 12)
    assert list(accuracy(graded([1] * 8))["pass_at_k"]) == ["1", "2", "4", "8"]
    many = accuracy(graded([1] * 3 + [0] * 1500))["pass_at_k"]                     # where floats would overflow
    assert many["1503"] == 1 and many["1"] == pytest.approx(3 / 1503) and sorted(many.values()) == list(many.values())


# --- the intervals ---

@pytest.mark.parametrize("n_right, n, low, high", [(8, 10, 0.4901625, 0.9433178), (0, 10, 0, 0.2775328), (10, 10, 0.7224672, 1),
                                                   (1, 1, 0.2065493, 1), (250, 500, 0.4563413, 0.5436587)])
def test_with_one_sample_each_the_interval_is_wilsons(n_right, n, low, high):
    found = accuracy(graded(*[[i < n_right] for i in range(n)]))
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx((low, high), abs=1e-6)


def test_samples_that_agree_count_as_one_and_others_as_more():
    shares = [1.0] * 30 + [0.0] * 20
    assert interval(shares, 16) == pytest.approx(interval(shares, 1), abs=1e-12)
    width = [high - low for low, high in (interval([0.5] * 50, 1), interval([0.5] * 50, 4), interval([0.5] * 50, 16))]
    assert width[0] > 1.9 * width[1] > 3 * width[2]
    assert interval([0.0] * 100, 8) == pytest.approx(interval([0.0] * 100, 1)) and interval([0.0] * 100, 8)[1] > 0.03
    assert all(interval([share] * n, 1)[0] <= share <= interval([share] * n, 1)[1] for share in (0.0, 1.0) for n in range(1, 600))
    assert interval([1 / 8] + [0.0] * 99, 8)[1] > 0.03                             # one more right answer proves no less


def test_intervals_stay_within_bounds_and_hold_the_figure():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n, k = rng.integers(1, 30), rng.integers(1, 9)
        a, b = (rng.binomial(k, rng.beta(0.1, 0.1, n)) for _ in range(2))
        shares = (a / k).tolist()
        low, high = interval(shares, k)
        assert 0 <= low <= np.mean(shares) + 1e-12 and np.mean(shares) - 1e-12 <= high <= 1 and high - low > 0.01
        found = difference(*(graded(*[[i < c for i in range(k)] for c in counts]) for counts in (a, b)))
        assert -1 <= found["difference_low"] < found["difference"] + 1e-12 and found["difference"] - 1e-12 < found["difference_high"] <= 1


# questions, samples, how hard the questions are (Beta; None: all the same) and the mean: samples depend on each other more and more
SIMULATED = [(100, 1, (1, 1), 0.5), (60, 1, (4, 1), 0.8), (100, 4, None, 0.5), (200, 8, None, 0.3), (60, 4, (1, 1), 0.5), (60, 8, (0.3, 0.3), 0.5),
             (100, 16, (0.2, 0.8), 0.2), (50, 4, (0.05, 0.05), 0.5), (200, 8, (0.1, 1.9), 0.05)]


@pytest.mark.parametrize("n, k, beta, truth", SIMULATED)
def test_about_95_percent_of_intervals_hold_the_truth(n, k, beta, truth):
    rng = np.random.default_rng(n + k)
    held = 0
    for _ in range(3000):
        shares = rng.binomial(k, truth if beta is None else rng.beta(*beta, n), n) / k
        low, high = interval(shares.tolist(), k)
        held += low <= truth <= high
    assert 0.93 < held / 3000 < 0.97


GRADED = {                                   # (questions, samples, scores of a question [n, k], the mean)
    "half": (100, 1, lambda rng, n, k: (rng.random((n, k)) < 0.3) / 2, 0.15),
    "rare half": (200, 1, lambda rng, n, k: (rng.random((n, k)) < 0.05) / 2, 0.025),
    "three": (100, 4, lambda rng, n, k: rng.choice([0, 0.5, 1], p=[0.3, 0.5, 0.2], size=(n, k)), 0.45),
    "by question": (50, 8, lambda rng, n, k: rng.choice([0, 0.25, 0.5, 1], p=[0.4, 0.3, 0.2, 0.1], size=(n, 1)).repeat(k, 1), 0.275)}


@pytest.mark.parametrize("name", GRADED)
def test_about_95_percent_of_intervals_hold_the_mean_score(name):
    n, k, draw, truth = GRADED[name]
    rng = np.random.default_rng(n + k)
    held, width = 0, 0
    for _ in range(2000):
        means = draw(rng, n, k).mean(1)
        low, high = interval(means.tolist(), math.inf)
        held += low <= truth <= high
        width += (high - low) / (2 * 1.96 * means.std() / math.sqrt(n) + 1e-9) / 2000
    assert 0.93 < held / 2000 < 0.98 and 0.9 < width < 1.3            # that of a normal interval over questions


def test_scores_of_0_and_1_have_the_interval_of_accuracy():
    grades = graded([1, 0, 1], [0, 0, 0], [1, 1, None], [1, 0, 0])
    figures = mean_score(grades, "accuracy")
    assert figures == {name: accuracy(grades)[name] for name in figures}
    halves = graded([0.5, 0.5], [0.5, 0.5])
    figures = mean_score(halves)
    assert figures["mean_score"] == 0.5 and 0 < figures["mean_score_low"] < 0.5 < figures["mean_score_high"] < 1
    assert mean_score([])["mean_score"] == 0


@pytest.mark.parametrize("n, k", [(60, 1), (100, 4), (200, 8)])
def test_about_95_percent_of_intervals_hold_the_difference(n, k, monkeypatch):
    monkeypatch.setattr(statistics_of_grades, "right_shares", lambda shares: shares)                # grades would take most of the time
    rng = np.random.default_rng(n)
    held = 0
    for _ in range(3000):
        p = rng.beta(0.5, 0.5, n)                                                  # hard ones are hard for both
        better = np.where(rng.random(n) < 0.2, 1.0, p)                             # by 0.2 * 0.5
        found = difference(*((rng.binomial(k, q) / k).tolist() for q in (p, better)))
        held += found["difference_low"] <= 0.1 <= found["difference_high"]
    assert 0.93 < held / 3000 < 0.97


def test_the_difference_is_paired_by_question():
    a = graded(*[[1]] * 40, *[[0]] * 40, [0], [0], [0], [0])
    b = graded(*[[1]] * 40, *[[0]] * 40, [1], [1], [1], [1])
    found, turned = difference(a, b), difference(b, a)
    assert found["difference"] == pytest.approx(4 / 84) == -turned["difference"]
    assert found["difference_low"] == pytest.approx(-turned["difference_high"])
    alone = accuracy(b)["accuracy_high"] - accuracy(b)["accuracy_low"]
    assert found["difference_high"] - found["difference_low"] < 0.6 * alone
    nothing = difference(a, a)
    assert nothing["difference"] == 0 and nothing["difference_low"] == -nothing["difference_high"] < -0.01
    with pytest.raises(ValueError):
        difference(a, b[1:])


# --- a task's questions, asked ---

TASK = '''
import zlib
PROMPT, STOP, INSTRUCTION = "Q: {}\\n", "  ", "Be brief."
def questions(split, seed=0, n=None):
    everything = [{"question": f"{split} {i}?", "answer": str(i)} for i in range(24 * (split != "valid"))]
    if n is not None and n > len(everything):
        raise ValueError(f"The split {split} has {len(everything)} questions, and {n} were asked for: lower --num_questions.")
    return everything[:n]
def examples(n):
    return [(f"train {i}?", f"{i}") for i in range(n)]
def reward(question, completion):
    if question["answer"] == "13":
        raise RuntimeError("unlucky")
    luck = zlib.crc32((question["question"] + completion).encode())
    return float(luck % 3 == 0), {"answered": luck % 2 == 0, "long": len(completion) > 9}
def signature(completion):
    return completion
'''


def worth(question, completion):
    """TASK's reward, again: whether it is right."""
    return question["answer"] != "13" and zlib.crc32((question["question"] + completion).encode()) % 3 == 0


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "luck.py"
    path.write_text(TASK)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "little"
    trained(folder, text, block_size=128, max_steps=4, n_layer=1, eval_interval=4)
    return folder


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "little"
    hub.weights.export(hub.load(model), folder)
    return folder


def evaluate(capsys, *arguments):
    """(what eval.py printed for people, its figures)"""
    assert evaluation.main([str(a) for a in (*arguments, "--dtype=fp32", "--max_new_tokens=20", "--num_questions=24", "--json")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


SAMPLED = ("--num_samples=3", "--temperature=1", "--seed=5")


def test_worked_examples_stand_before_a_question_but_never_itself(task):
    tokenizer, luck = Tokenizer("bytes"), tasks.load(str(task))
    asked = requests_of(tokenizer, luck, luck.questions("train", n=3), 2, 7, few_shot=2)
    assert [tokenizer.decode(r.ids) for r in asked] == [
        "Q: train 1?\n1\n\nQ: train 0?\n", "Q: train 0?\n0\n\nQ: train 1?\n", "Q: train 0?\n0\n\nQ: train 1?\n1\n\nQ: train 2?\n"]
    assert [(r.key, r.num_samples, r.max_new_tokens) for r in asked] == [(0, 2, 7), (1, 2, 7), (2, 2, 7)]
    assert requests_of(tokenizer, luck, luck.questions("test", n=1))[0].ids == prompt_ids(tokenizer, "test 0?", luck.prompt)


def test_the_figures_are_those_of_what_the_engine_samples(model, task, capsys):
    lines, found = evaluate(capsys, model, f"--task={task}", *SAMPLED)
    tokenizer, luck = hub.find(model).tokenizer(), tasks.load(str(task))
    questions = luck.questions("test")
    engine = Engine(hub.load(model), sampling=Sampling(1.0, stop=tokenizer.stop, stop_strings=("  ",)), seed=5, decode=tokenizer.decode)
    rights, tokens = np.zeros((24, 3)), 0
    for sample in engine.generate(requests_of(tokenizer, luck, questions, 3, 20)):
        text, stop, _ = tokenizer.text_of(sample.ids).partition("  ")
        rights[sample.request.key, sample.index] = worth(questions[sample.request.key], text + stop)
        tokens += len(sample.ids)
    assert found["accuracy"] == pytest.approx(rights.mean()) and 0.1 < found["accuracy"] < 0.6
    assert found["pass_at_k"]["3"] == pytest.approx(rights.any(1).mean()) and found["tokens"] == tokens < 24 * 3 * 20
    assert (found["questions"], found["samples"], found["errors"], found["few_shot"], found["split"]) == (24, 72, 3, 0, "test")
    assert found["answer_rate"] == found["parts"]["answered"] > 0.2 and found["dtype"] == "fp32" and found["tokens_per_s"] > 0
    assert "unlucky" in lines[-1] and f"{100 * rights.mean():.1f} [" in lines[-2] and "pass@3" in lines[-3]


def test_two_ranks_find_what_one_does(model, task, capsys):
    line = [str(model), f"--task={task}", "--dtype=fp32", "--max_new_tokens=20", "--num_questions=21", "--json", *SAMPLED]
    assert evaluation.main(line) == 0
    alone = capsys.readouterr().out.splitlines()
    done = forked.run(command("", 2, "eval.py", defaults={})[:-1] + line, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shared = done.stdout.splitlines()
    assert len(shared) == len(alone)
    alone, shared = (json.loads(lines[-1]) | {"seconds": 0, "tokens_per_s": 0} for lines in (alone, shared))
    assert shared == alone and shared["samples"] == 63


def test_all_answers_are_kept_in_a_file(model, exported, task, tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    _, figures = evaluate(capsys, model, exported, f"--task={task}", f"--output={path}", "--tokenizer=bytes", *SAMPLED)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [q["question"] for q in questions_of(tasks.load(str(task)), "test", 24)]
    assert [row["question"] for row in rows] == [q for q in asked for _ in range(3)] * 2
    assert [row["model"] for row in rows] == [str(model)] * 72 + [str(exported)] * 72
    for row, found in zip((rows[:72], rows[72:]), figures["models"]):
        assert sum(sample["score"] == 1 for sample in row) / 72 == pytest.approx(found["accuracy"])
    evaluate(capsys, model, f"--task={task}", f"--output={path}", *SAMPLED)              # which replaces what it wrote itself
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:72]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": q, "answer": q.split()[1][:-1]}) + "\n" for q in asked))
    evaluate(capsys, model, f"--task={task}", f"--output={path}", f"--dataset={tmp_path / 'asked.jsonl'}", *SAMPLED)
    assert [json.loads(line) | {"keys": {}} for line in path.read_text().splitlines()] == [row | {"keys": {}} for row in rows[:72]]
    for name, content, words in (("mine.txt", "precious", "not eval.py's answers"), ("none/a.jsonl", None, "There is no folder")):
        if content:
            (tmp_path / name).write_text(content)
        with pytest.raises(BadInput, match=words):
            evaluation.main([str(model), f"--task={task}", f"--output={tmp_path / name}"])
    with pytest.raises(BadInput, match="exists and is not a file of answers"):           # nothing is read from a pipe
        evaluation.main([str(model), f"--task={task}", "--output=/dev/null"])
    with pytest.raises(BadInput, match="is for answers to a task"):
        evaluation.main([str(model), "--dataset=a.txt", f"--output={path}"])


def test_own_questions_are_asked_of_a_hugging_face_model_without_worked_examples(exported, tmp_path, capsys):
    """As in grpo.py: a task file with a reward alone has no examples."""
    (tmp_path / "mine.py").write_text("def reward(question, completion):\n    return 0.5\n")
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": ""}}\n' for n in range(3)))
    _, found = evaluate(capsys, exported, f"--task={tmp_path / 'mine.py'}", f"--dataset={tmp_path / 'asked.jsonl'}",
                        "--tokenizer=bytes", "--max_new_tokens=4")
    assert (found["few_shot"], found["questions"], found["errors"]) == (0, 3, 0)


def test_models_are_compared_on_the_same_questions(model, exported, task, capsys):
    lines, found = evaluate(capsys, "--compare", model, exported, exported, f"--task={task}", *SAMPLED, "--tokenizer=bytes")
    first, shown, again = found["models"]
    assert [m["few_shot"] for m in found["models"]] == [0, 4, 4] and "difference" not in first
    assert shown["difference"] == again["difference"] == pytest.approx(shown["accuracy"] - first["accuracy"])
    assert shown["difference_low"] < shown["difference"] < shown["difference_high"]
    assert len(lines) == 8 and "above the first" in lines[1] and lines[2].startswith(str(model))
    _, found = evaluate(capsys, model, exported, f"--task={task}", *SAMPLED, "--tokenizer=bytes", "--few_shot=0")
    assert found["models"][1]["difference"] == 0 and found["models"][0]["accuracy"] == found["models"][1]["accuracy"]
    _, found = evaluate(capsys, "--compare", model, f"--task={task}")
    assert len(found["models"]) == 1 and found["models"][0]["temperature"] == 0


def test_a_model_leaves_its_memory_to_the_next(model, exported, task, capsys, monkeypatch):
    """Its engine has no more slots than there are samples, and is gone before the next model is loaded."""
    engines = []
    make, load = evaluation.Engine, hub.ModelSource.load
    monkeypatch.setattr(evaluation, "Engine", lambda *arguments, **options: engines.append(make(*arguments, **options)) or engines[-1])
    monkeypatch.setattr(evaluation.memory, "release", lambda: engines.append(weakref.ref(engines.pop())))

    def watched(source, *arguments, **options):
        gc.collect()
        assert all(engine() is None for engine in engines) and not options
        return load(source, *arguments, **options)
    monkeypatch.setattr(hub.ModelSource, "load", watched)
    slots = []
    allocate = ModelRunner.allocate
    monkeypatch.setattr(ModelRunner, "allocate", lambda runner, n: slots.append(n) or allocate(runner, n))
    evaluate(capsys, "--compare", model, exported, f"--task={task}", "--tokenizer=bytes", "--num_samples=3", "--temperature=1")
    assert len(engines) == 2 and slots == [24 * 3, 24 * 3]


def test_a_checkpoint_that_a_run_has_replaced_is_named(model, tmp_path):
    shutil.copytree(model, tmp_path / "run")
    source = hub.find(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(BadInput, match=f"no longer has the checkpoint of step {source.step}, since its run goes on"):
        source.load()


def test_a_verifier_that_always_fails_is_heard_and_ends_the_evaluation(model, tmp_path, capsys):
    faults = (24, "return question['unit']", "KeyError: 'unit'"), (500, "pass", "returned the score None")
    for n, body, error in faults:
        path = tmp_path / f"broken_{n}.py"
        head = TASK.partition("def reward")[0].replace("INSTRUCTION", "unseen").replace("24 *", f"{n} *")
        path.write_text(f"{head}\ndef reward(question, completion):\n    {body}\n")
        with pytest.raises(BadInput, match=error):
            evaluation.main([str(model), f"--task={path}", "--dtype=fp32", "--max_new_tokens=2"])
        out, err = capsys.readouterr()
        assert f": {n} test questions x 1" in out and err.count("\n") == 1 and error in err


def test_as_many_questions_as_there_are_unless_a_number_is_asked_for(task):
    luck, plain = tasks.load(str(task)), tasks.load("arithmetic")
    assert evaluation.Config.num_questions == "auto"
    assert questions_of(luck, "test", "auto", most=500) == luck.questions("test", n=24)
    assert questions_of(plain, "test", "auto", most=500) == plain.questions("test", n=500)
    sentence = "^--num_questions=25 is too many: the split test of .* has 24 questions; lower --"
    with pytest.raises(BadInput, match=sentence):
        questions_of(luck, "test", 25)


def test_the_table_shows_a_mean_score_once_there_are_other_scores_than_0_and_1(model, tmp_path, capsys):
    half = tmp_path / "half.py"
    half.write_text("def reward(question, completion):\n    return 0.5 * (len(completion) % 2)\n")
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": ""}}\n' for n in range(8)))
    arguments = (f"--dataset={tmp_path / 'asked.jsonl'}", "--temperature=1", "--num_samples=4")
    lines, found = evaluate(capsys, model, f"--task={half}", *arguments)
    assert found["accuracy"] == 0 < found["mean_score_low"] < found["mean_score"] < found["mean_score_high"] < 0.5
    score, low, high = (100 * found[f"mean_score{end}"] for end in ("", "_low", "_high"))
    assert "mean score" in lines[1] and f"{score:.1f} [{low:.1f}, {high:.1f}]" in lines[2]
    half.write_text("def reward(question, completion):\n    return float(len(completion) % 2)\n")
    lines, found = evaluate(capsys, model, f"--task={half}", *arguments)
    assert "mean score" not in lines[1] and found["mean_score"] == found["accuracy"] and found["mean_score_low"] == found["accuracy_low"]


def test_what_can_not_be_sampled_is_a_sentence_on_every_rank(task):
    tokenizer, luck = Tokenizer("bytes"), tasks.load(str(task))
    asked, questions = requests_of(tokenizer, luck, luck.questions("test", n=2)), luck.questions("test", n=2)
    with Pool(str(task), kind="serial") as pool:
        small = Engine(GPT(GPTConfig(vocab_size=64, block_size=64, n_layer=1, n_head=1, n_embd=16)), 2)
        with pytest.raises(ValueError, match="encode it with the model's tokenizer"):
            ask(Pipeline(small, pool, tokenizer, luck), questions, asked)
        broken = GPT(GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=1, n_embd=16))
        torch.nn.init.constant_(broken.token_embedding.weight, math.nan)
        with pytest.raises(FloatingPointError, match="not finite"):
            ask(Pipeline(Engine(broken, 2), pool, tokenizer, luck), questions, asked)


@pytest.mark.parametrize("arguments, words", [
    (["RUN"], "Name a model and a text or a task"), (["--task=TASK"], "Name a model"), (["RUN", "--task=TASK", "--dataset=x"], "can't be read"),
    (["RUN", "RUN", "--dataset=x"], "compared only on a task"), (["RUN", "--task=TASK", "--num_samples=2"], "At temperature 0"),
    (["RUN", "--task=nothing"], "no task nothing"), (["RUN", "--task=TASK", "--split=valid", "--num_questions=none"], "no valid questions"),
    (["RUN", "--task=TASK", "--num_questions=25"], "lower --num_questions"), (["RUN", "--task=TASK", "--few_shot=20", "--num_questions=9"], "lower --few_shot"),
    (["RUN", "--task=TASK", "--top_p=0"], "can't be sampled from"), (["RUN", "--task=TASK", "--num_questions=0"], "at least 1"),
    (["RUN", "/nowhere", "--task=TASK", "--num_questions=9"], "no folder /nowhere"), (["RUN", "--task=TASK", "--split=tests"], "did you mean")])
def test_what_can_not_be_evaluated_is_one_sentence(model, task, arguments, words, capsys):
    with pytest.raises(BadInput, match=words) as e:
        evaluation.main([a.replace("RUN", str(model)).replace("TASK", str(task)) for a in arguments])
    assert "\n" not in str(e.value) and capsys.readouterr().out == ""
