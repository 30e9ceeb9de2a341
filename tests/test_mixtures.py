"""Several tasks as one: their shares, their grades, what is said of each, and what can't be mixed."""
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

import datagen
import eval as evaluation
import grpo
import tasks
from conftest import flags, trained
from rollouts.accuracy import accuracy, by_domain, difference, macro
from rollouts.questions import QuestionStream
from runtime import config, guard
from runtime.config import BadInput
from tasks._pool import Grade, Pool, grade
from test_grpo import TASK, base, learn, letters, lines, one_thread, write         # noqa: F401 (fixtures)

THREE = "arithmetic@2+countdown:2@0.5+unit_conversion@0.5"


def domains_of(questions):
    return Counter(question["domain"] for question in questions)


# --- questions ---

@pytest.mark.parametrize("n", [1, 300])
def test_every_beginning_has_the_shares_of_the_whole(n):
    found = tasks.load(THREE).questions("train", 0, n)
    assert len(found) == n and len({q["question"] for q in found}) == n
    for end in range(1, n + 1):
        counts = domains_of(found[:end])
        assert all(abs(counts[name] - share * end) <= 1 for name, share in
                   (("arithmetic", 2 / 3), ("countdown:2", 1 / 6), ("unit_conversion", 1 / 6)))


def test_no_task_is_more_than_a_turn_off():
    rng = random.Random(0)
    several = [dict(enumerate((2, 1, 30, 3, 1, 3, 30, 1)))]
    several += [{i: rng.choice((1, 1, 2, 3, 30)) for i in range(rng.randint(2, 8))} for _ in range(40)]
    for weights in several:
        counts = dict.fromkeys(weights, 0)
        for n in range(1, sum(weights.values()) + 1):
            counts[tasks.next_task(weights, counts)] += 1
            assert all(abs(counts[i] * sum(weights.values()) - w * n) <= sum(weights.values()) for i, w in weights.items())
        assert counts == weights
    counts = {}
    for n in range(12):                                            # of equal weights each in its turn
        name = tasks.next_task(dict.fromkeys("abc", 5), counts)
        counts[name] = counts.get(name, 0) + 1
        assert name == "abc"[n % 3]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_questions_are_as_many_of_each(split):
    task = tasks.load("arithmetic@5+countdown:2@0+unit_conversion")
    assert domains_of(task.questions(split, n=30)) == dict.fromkeys(task.domains, 10)
    assert "countdown:2" not in domains_of(task.questions("train", n=30))
    first = task.questions(split)[:6]
    assert domains_of(first) == dict.fromkeys(task.domains, 2)
    assert [q | {"domain": "arithmetic"} for q in tasks.load("arithmetic").questions(split, n=2)] == [
        q for q in first if q["domain"] == "arithmetic"]


@pytest.mark.parametrize("kind", ["serial", "process"])
def test_each_question_is_graded_by_its_task(kind):
    task = tasks.load(THREE)
    questions = task.questions("train", n=12)
    with Pool(THREE, 1, kind=kind) as pool:
        right = pool.score([(q, task.solution(q)) for q in questions])
        wrong = pool.score([(q, task.solution(other)) for q, other in zip(questions, questions[1:])])
    assert all(g.score == 1 and g.verified and g.signature for g in right) and all(g.score == 0 for g in wrong)
    assert {len(g.parts) for g in right} == {3, 4}                 # each task's own
    assert right == [grade(tasks.load(q["domain"]), q, task.solution(q)) for q in questions]


def test_texts_to_pretrain_on_are_mixed_by_weight():
    texts = tasks.load("arithmetic@3+countdown:2").documents("valid")
    expressions = ["Use each" in text for text in texts[:400]]
    assert sum(expressions) == 100
    assert 1333 <= len(texts) <= 1334                              # until the thousand of arithmetic is used up


def test_paths_may_have_a_plus_or_an_at(tmp_path):
    for name in ("a+b.py", "a@2.py", "c.py"):
        write(tmp_path, TASK, name)
    alone, at, plain = (str(tmp_path / name) for name in ("a+b.py", "a@2.py", "c.py"))
    for spec in (alone, at, f"{plain}:x+y"):
        assert tasks.parts_of(spec) == {spec: 1}
    assert tasks.parts_of(f"{plain}@2+arithmetic") == {plain: 2, "arithmetic": 1}
    assert tasks.user_files(f"{plain}@2+arithmetic+{at}") == [plain, at]
    assert tasks.load(alone).domains == [] and tasks.load(f"{plain}@2").domains == [plain]


def test_a_config_file_may_give_a_dictionary(tmp_path):
    file = tmp_path / "mix.py"
    file.write_text('task = {"arithmetic": 2, "countdown:4": 0.5}\n')
    for Config in (grpo.Config, datagen.Config, evaluation.Config):
        assert tasks.spec_of(config.load(Config, [str(file)]).task) == "arithmetic@2+countdown:4@0.5"
    assert tasks.parts_of(tasks.spec_of({"arithmetic": 1e-5, "table": 1})) == {"arithmetic": 1, "table": 100_000}


@pytest.mark.parametrize("spec, said", [
    ("arithmetic+nosuch", "There is no task nosuch"),
    ("arithmetic@-1+countdown", "The weight of arithmetic in the mixture arithmetic@-1+countdown is negative"),
    ("arithmetic@0+countdown@0", "All weights of the mixture arithmetic@0+countdown@0 are zero"),
    ("arithmetic+countdown+arithmetic@2", "names arithmetic twice"),
    ("arithmetic++countdown", "has an empty part"),
    ("arithmetic@lots+countdown", "There is no task arithmetic@lots"),
    ("countdown:9+arithmetic", "The argument of countdown"),
    ("chess_world:A+arithmetic", "have different STOP texts"),
], ids=str)
def test_what_can_not_be_mixed_is_a_sentence(base, spec, said, tmp_path, capsys):
    if "chess" in spec:
        pytest.importorskip("chess")
    for main, knobs in ((grpo.main, dict(out_dir=tmp_path / "run")), (datagen.main, dict(output=tmp_path / "x.json"))):
        with pytest.raises(SystemExit) as ended:
            guard.run(main, flags(init_from=base, task=spec, **knobs))
        error = capsys.readouterr().err
        assert ended.value.code == 2 and said in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change, said", [
    ('"answer": "t"}', 'The questions of .* already have a "domain"'),
    ("[:n]", "of the mixture .* has no train questions"),
], ids=["own domain", "nothing"])
def test_questions_that_can_not_be_mixed(tmp_path, change, said):
    other = {'"answer": "t"}': '"answer": "t", "domain": "x"}', "[:n]": "[:0]"}[change]
    path = write(tmp_path, TASK.replace(change, other))
    with pytest.raises(ValueError, match=said):
        tasks.load(f"{path}+{write(tmp_path, TASK, 'b.py')}").questions("train", n=10, fewer=True)


def test_a_task_without_validation_questions_is_left_out_of_them(tmp_path):
    path = write(tmp_path, TASK.replace("[:n]", "[:n] if split == 'train' else []"))
    assert not tasks.load(str(path)).questions("valid") and tasks.load(str(path)).questions("train")
    other = write(tmp_path, TASK, "b.py")
    mixture = tasks.load(f"{path}+{other}")
    assert {*domains_of(mixture.questions("train", n=10))} == {str(path), str(other)}
    assert {*domains_of(mixture.questions("valid", n=10, fewer=True))} == {str(other)}


# --- the stream ---

def stream_of(sizes, weights=None, **knobs):
    names = list(sizes)
    pairs = [({"question": f"{name} {i}", "domain": name}, None) for name, n in sizes.items() for i in range(n)]
    task = SimpleNamespace(weights=weights or dict.fromkeys(names, 1),
                           of=lambda question: SimpleNamespace(name=question["domain"]))
    return QuestionStream(grpo.Config(**dict(prompts_per_step=8) | knobs), pairs, task)


def asked(stream, positions):
    return [stream.pairs[stream.place(position).number][0]["question"] for position in positions]


def test_a_step_has_each_task_s_share():
    stream = stream_of(dict(a=50, b=20, c=30), dict(a=2, b=1, c=1))
    steps = [stream.next() for _ in range(20)]
    for positions in steps:
        assert Counter(map(stream.domain, positions)) == {"a": 4, "b": 2, "c": 2} and len(set(positions)) == 8
    assert stream.state.turns == {"a": 80, "b": 40, "c": 40}
    everything = [question for positions in steps for question in asked(stream, positions)]
    of_b = [question for question in everything if question[0] == "b"]
    assert len(set(of_b[:20])) == len(set(of_b[20:])) == 20                # each once an epoch of its own
    orders = {tuple(map(stream.domain, positions)) for positions in steps}
    assert len(orders) > 10                                                # no mini-batch always misses the same


def test_one_task_a_step():
    stream = stream_of(dict(a=50, b=20, c=30), dict(a=2, b=1, c=1), mixing="round_robin")
    steps = ["".join({*map(stream.domain, stream.next())}) for _ in range(12)]
    assert all(len(step) == 1 for step in steps) and Counter(steps) == {"a": 6, "b": 3, "c": 3}
    assert Counter(steps[:4]) == {"a": 2, "b": 1, "c": 1}


def test_one_task_a_step_however_many_rounds_it_takes():
    """Dynamic sampling asks again for the same step; the others' turns are then made up for."""
    stream = stream_of(dict(a=50, b=50, c=50), mixing="round_robin", dynamic_sampling=True)
    for _ in range(9):
        step = [position for i in range(3) for position in stream.next(again=i > 0)]
        assert len({*map(stream.domain, step)}) == 1 and len({*step}) == 24
    assert len({*stream.state.turns.values()}) == 1
    one = stream_of(dict(a=50, b=50), mixing="round_robin", dynamic_sampling=True, prompts_per_step=1)
    assert len({one.domain(*one.next(again=i > 0)) for i in range(4)}) == 1
    mixed = stream_of(dict(a=50, b=50), dynamic_sampling=True)
    assert [Counter(map(mixed.domain, mixed.next(again=i > 0))) for i in range(2)] == [{"a": 4, "b": 4}] * 2


def test_a_domain_s_solved_questions_rest_and_the_others_share_stays():
    stream = stream_of(dict(a=16, b=16), skip_solved=1)
    right = [SimpleNamespace(grade=SimpleNamespace(score=1.0))]
    for _ in range(4):                                     # the first epoch, in which all of a is solved
        positions = stream.next()
        stream.mark_solved({p: right for p in positions if stream.domain(p) == "a"})
    assert len(stream.state.solved) == 16
    resting = [stream.next() for _ in range(2)]
    assert all(Counter(map(stream.domain, positions)) == {"a": 4, "b": 4} for positions in resting)


def test_positions_of_a_stream_of_one_task_count_up():
    stream = stream_of(dict(a=5), prompts_per_step=3)
    assert [stream.next() for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [len({*asked(stream, range(5 * i, 5 * i + 5))}) for i in range(3)] == [5, 5, 5]


# --- figures ---

def graded(*shares):
    return [[Grade(float(right), {"correct": bool(right)}, "", None)] for right in shares]


def test_each_task_counts_alike_in_the_macro_average():
    task = SimpleNamespace(of=lambda question: SimpleNamespace(name=question["domain"]))
    questions = [{"domain": name} for name in "aaab"]
    found = by_domain(task, questions, graded(1, 1, 0, 0))
    assert {name: len(rows) for name, rows in found.items()} == {"a": 3, "b": 1}
    figures = [accuracy(rows) for rows in found.values()]
    assert macro(figures)["accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    alike = [accuracy(graded(*[1] * 50 + [0] * 50))] * 4
    one, four = alike[0], macro(alike)
    assert four["accuracy_high"] - four["accuracy"] == pytest.approx((one["accuracy_high"] - one["accuracy"]) / 2)
    none = macro([accuracy(graded(*[0] * 50))] * 4)
    assert none["accuracy_low"] == 0.0 < none["accuracy_high"]
    better = [difference(graded(*[0] * 10), graded(*[1] * 10)), difference(graded(*[1] * 10), graded(*[1] * 10))]
    assert macro(better, "difference")["difference"] == 0.5 and macro(better, "difference")["difference_low"] > 0


# --- in the stages ---

SECOND = TASK.replace("completion.count", "2 * completion.count").replace("share = ", "share = min(1, ").replace(
    "max(1, len(completion))", "max(1, len(completion)))").replace('f"{w} {i}"', 'f"{w} {i}?"').replace('f"mat {i}"', 'f"rat {i}"')


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return str(write(folder, TASK)), str(write(folder, SECOND, "second.py"))


def test_a_run_says_how_each_task_fares(learn, two):
    first, second = two
    run = learn(task=f"{first}@3+{second}", max_steps=2, eval_interval=2, eval_questions=8)
    step = lines(run)[-1]
    assert step[f"{first}/questions"] == 6 and step[f"{second}/questions"] == 2 and step["questions"] == 8
    for key in ("reward", "pass_at_1", "pass_at_4", "zero_variance", "truncated", "completion_tokens"):
        weighted = (3 * step[f"{first}/{key}"] + step[f"{second}/{key}"]) / 4
        assert step[key] == pytest.approx(weighted), key
    said = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(line for line in said if "val_reward" in line)
    assert {f"{first}/val_accuracy", f"{second}/val_accuracy", "val_macro_accuracy"} <= evaluation.keys()
    assert f"pass@1 of {first}" in learn.said and f"{second} 0%" in learn.said


def test_the_best_checkpoint_is_the_macro_average_s(learn, two, monkeypatch):
    noted = []
    monkeypatch.setattr(grpo, "ask", lambda pipeline, questions, *rest, **how: (
        [[Grade(float(q["domain"] == two[1]), {}, "", None)] for q in questions], []))
    monkeypatch.setattr("runtime.run.Run.record_validation", lambda run, loss: noted.append(loss))
    # two of three held-out questions are the first task's
    monkeypatch.setattr(grpo, "open_questions", lambda cfg, task: (
        task.questions("train", n=8), [q for q in task.questions("valid") if q["domain"] == two[0] or "rat 1" in q["question"]], ""))
    learn(task="+".join(two), max_steps=1, eval_interval=1)
    assert noted == [pytest.approx(0.5), pytest.approx(0.5, abs=1e-6)]


def test_a_task_without_room_is_named(learn, two, tmp_path):
    long = write(tmp_path, TASK.replace('f"{w} {i}"', 'f"{w} {i}" * 20'), "long.py")
    learn(task=f"{two[0]}+{long}", code=2)
    assert f"Every prompt of {long} exceeds --max_prompt_tokens" in learn.error and learn.error.count("\n") == 1


def test_a_task_without_a_question_is_named(learn, two, tmp_path):
    learn(task="+".join(two), num_questions=1, code=2)
    assert f"{two[1]} has no questions to train on: raise --num_questions" in learn.error
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({"prompt": f"the {i}", "answer": "t", "domain": two[0]}) for i in range(40)))
    learn(task="+".join(two), dataset=tmp_path / "q.jsonl", code=2)
    assert f"{two[1]} has no questions to train on" in learn.error and learn.error.count("\n") == 1


def test_rows_of_a_file_name_their_task(learn, two, tmp_path):
    rows = [{"prompt": f"the {i}", "answer": "t", "domain": two[i % 2]} for i in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = learn(task="+".join(two), dataset=tmp_path / "q.jsonl", max_steps=1)
    assert lines(run)[0][f"{two[0]}/questions"] == 2
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(row | {"domain": "x"}) for row in rows))
    learn(name="other", task="+".join(two), dataset=tmp_path / "q.jsonl", code=2)
    assert 'of the mixture' in learn.error and 'needs a "domain"' in learn.error and learn.error.count("\n") == 1


def test_a_task_of_weight_0_is_asked_for_validation_alone(learn, two, tmp_path):
    rows = [{"prompt": f"the {i}", "answer": "t", "domain": two[i % 2]} for i in range(200)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, knobs in (("own", {}), ("file", dict(dataset=tmp_path / "q.jsonl"))):
        run = learn(name, task=f"{two[0]}+{two[1]}@0", max_steps=1, eval_interval=1, eval_questions=8, **knobs)
        lines_of_run = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert f"{two[1]}/reward" not in lines(run)[0] and any(f"{two[1]}/val_accuracy" in line for line in lines_of_run)


def test_surgery_needs_several_tasks_in_a_step():
    with pytest.raises(BadInput, match="--mixing=round_robin has one"):
        grpo.check(config.load(grpo.Config, ["--init_from=x", "--task=math+table", "--surgery=pcgrad", "--mixing=round_robin"]))


def test_datagen_and_eval_count_each_task(base, two, tmp_path, capsys):
    spec = f"{two[0]}@3+{two[1]}"
    knobs = dict(init_from=base, task=spec, num_questions=8, oversample=4, max_new_tokens=12, output=tmp_path / "rft.json", json=True,
                 temperature=1, device="cpu")
    datagen.main(flags(**knobs))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [own["questions"] for own in figures["domains"].values()] == [6, 2]
    assert sum(own["kept"] for own in figures["domains"].values()) == figures["kept"]
    evaluation.main([str(base), str(base), *flags(task=spec, split="valid", max_new_tokens=12, json=True, device="cpu")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert [own["questions"] for own in rows[0]["domains"].values()] == [6, 6]
    assert rows[1]["macro_difference"] == 0 and rows[1]["macro_difference_low"] < 0 < rows[1]["macro_difference_high"]


def test_a_model_is_pretrained_on_a_mixture(tmp_path):
    trained(tmp_path / "run", "task:arithmetic@2+countdown:2", max_steps=1, eval_interval=1, data_dir=tmp_path)
    (folder,) = tmp_path.glob("task-arithmetic-2-countdown-2-bytes-*")
    text = (folder / "valid_00000.bin").read_bytes().decode("utf-16-le", "replace")
    assert text.count("Use each of the numbers") == 500 and text.count("Question: ") >= 1500


def test_a_weight_may_become_zero_on_resume(learn, tmp_path):
    names = [str(write(tmp_path, TASK, name)) for name in ("a.py", "b.py")]
    rows = [{"prompt": f"{word} {i}", "answer": "t", "domain": name} for i in range(12) for word, name in zip(("the", "cat"), names)]
    dataset = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "q.jsonl")
    run = learn("run", task="+".join(names), dataset=dataset, max_steps=2, save_interval=2)
    learn("run", argv=["--init_from=resume", f"--out_dir={run}", f"--task={names[0]}+{names[1]}@0", "--max_steps=3"])
    assert [line["step"] for line in lines(run)] == [1, 2, 3] and f"{names[1]}/reward" not in lines(run)[-1]
