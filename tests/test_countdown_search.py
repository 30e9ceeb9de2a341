"""Countdown with the search written out: what teachers write is true and fits, splits share nothing, the verifier pays for the target
alone; the list of what no teacher solves; the figures and the commands of runs/countdown.sh; the form of TinyZero."""
import itertools
import json
import re
import shlex
import stat
import subprocess
from collections import Counter

import pytest

import datagen
import eval as evaluation
import forked
import grpo
import tasks
import train
from conftest import ROOT, environment
from rollouts.pipeline import Completion
from rollouts.records import record_of
from runtime import config
from runtime.config import BadInput
from runs import countdown as runs_countdown
from tasks import countdown_search
from tasks._pool import Grade
from text.tokenizer import Tokenizer

SPECS = ["countdown_search", "countdown_search:4,50,640"]
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
QUESTION = {"question": "41 from 3 5 7 12", "answer": "41", "numbers": [3, 5, 7, 12]}


def read(step):
    a, sign, b, c = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
    return int(a), sign, int(b), int(c)


def all_made(numbers):
    """All that whole positive numbers up to the ceiling make, by trying every order."""
    if len(numbers) == 1:
        return {*numbers}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for make in SIGNS.values():
            c = make(numbers[i], numbers[j])
            if c == int(c) and 0 < c <= countdown_search.CEILING:
                found |= all_made([*rest, int(c)])
    return found


@pytest.fixture(scope="module", params=SPECS)
def written(request):
    """(the longest that a document may be, some of its documents as countdown_search.teacher_documents gives them)."""
    argument = request.param.partition(":")[2] or None
    documents = itertools.islice(countdown_search.teacher_documents("train", 3, argument), 600)
    return countdown_search.sizes(argument)[2], list(documents)


def test_every_step_is_true_and_every_line_follows_from_an_earlier_one(written):
    for question, _, text, found in written[1]:
        prompt, *lines, last = text.removesuffix("\n").split("\n")
        target = int(question["answer"])
        assert prompt == f"Make {target} from {' '.join(map(str, question['numbers']))}"
        known = {tuple(question["numbers"]): []}             # states that were reached: the steps that lead there
        made_target = False
        for line in lines:
            state, told, steps = re.fullmatch(r"([\d ]+)\|(\d+): (.+)", line).groups()
            state = tuple(map(int, state.split()))
            assert state in known and int(told) == target
            for step, mark in re.findall(r"(\S+\d)([<>!]?)", steps):
                a, sign, b, c = read(step)
                assert mark == ("" if len(state) > 2 else "<" if c < target else ">" if c > target else "!")
                left = list(state)
                left.remove(a)
                left.remove(b)
                assert SIGNS[sign](a, b) == c <= countdown_search.CEILING and c > 0
                known.setdefault((*left, c), [*known[state], step])
                made_target = made_target or not left and c == target
        assert made_target == found
        if found:
            assert last == f"answer: {' '.join(reversed(known[(target,)]))}."
        else:
            assert last == "no solution."


def test_they_end_in_a_verified_solution_exactly_when_the_teacher_found_one(written):
    rewards = []
    for question, _, text, found in written[1]:
        score, parts = countdown_search.reward(question, text.partition("\n")[2])
        assert score == found and parts["answered"] == found
        rewards.append(score)
    assert 0.3 < sum(rewards) / len(rewards) < 0.75
    assert len({teacher for _, teacher, _, _ in written[1]}) == len(countdown_search.TEACHERS)


def test_all_fit_and_none_is_clipped(written):
    longest, documents = written
    lengths = [len(Tokenizer("bytes").encode(text)) + 1 for _, _, text, _ in documents]      # with the token that ends it
    assert longest - 5 < max(lengths) <= longest


def test_a_teacher_solves_exactly_what_its_unlimited_document_has_room_for():
    for question, teacher in itertools.product(countdown_search.questions("test", n=60), countdown_search.TEACHERS):
        steps, text = countdown_search.search(teacher, question["numbers"], int(question["answer"]))
        document = f"Make {question['question']}\n{text}{countdown_search.answer(steps or [])}\n"
        assert countdown_search.completion(teacher, question, 400)[1] == (steps is not None and len(document) + 1 <= 400)


def test_a_teacher_goes_on_for_as_long_as_it_has_room():
    short = countdown_search.search(("depth", "sum", None), [3, 5, 7, 12], 1000, room=200)
    long = countdown_search.search(("depth", "sum", None), [3, 5, 7, 12], 1000, room=400)
    assert short[0] is long[0] is None and long[1].startswith(short[1]) and 150 < len(short[1]) <= 200 < len(long[1]) <= 400
    breadth = countdown_search.search(("breadth", "sum", 2), [3, 5, 7, 12], 1000)[1].splitlines()
    assert [len(line.split("|")[0].split()) for line in breadth] == [4] + 2 * [3] + 4 * [2]
    depth = countdown_search.search(("depth", "sum", 2), [3, 5, 7, 12], 1000)[1].splitlines()
    assert [len(line.split("|")[0].split()) for line in depth] == 2 * [4, 3, 2, 3, 2] and depth[1].split(":")[0] == depth[3].split(":")[0]


def test_splits_share_no_numbers_and_no_target():
    sets, targets = {}, {}
    for split in tasks.SPLITS:
        asked = [q for seed in range(2) for q in countdown_search.questions(split, seed, 300)]
        sets[split] = {tuple(sorted(q["numbers"])) for q in asked}
        targets[split] = {q["answer"] for q in asked}
        counts = Counter(len(q["numbers"]) for q in asked)
        assert counts[3] + counts[4] == counts.total() == 600
        assert counts[3] == counts[4] or split == "valid" and 0.2 < counts[3] / counts.total() < 0.46     # there are few with three
        assert all(1 <= n <= 20 for q in asked for n in q["numbers"]) and all(10 <= int(q["answer"]) <= 99 for q in asked)
        assert counts[3] == 2 * sum(len(q["numbers"]) == 3 for q in countdown_search.questions(split, 5, 300))
    for a, b in itertools.combinations(tasks.SPLITS, 2):
        assert not sets[a] & sets[b] and not targets[a] & targets[b]
    assert [len(countdown_search.targets_of(split)) for split in tasks.SPLITS] == [64, 9, 17]
    assert {countdown_search.LOWEST, countdown_search.HIGHEST} < countdown_search.targets_of("train")
    heard = [re.match(r"Make (\d+) from ([\d ]+)\n", text).groups() for text in tasks.load("countdown_search:3,20,256,300").documents("train")]
    assert len(heard) == 300 and not {target for target, _ in heard} & (targets["valid"] | targets["test"])
    assert not {tuple(sorted(map(int, numbers.split()))) for _, numbers in heard} & (sets["valid"] | sets["test"])


def test_questions_differ_can_be_solved_and_are_a_function_of_the_seed():
    task = tasks.load("countdown_search")
    asked = task.questions("test", n=200)
    assert len({(q["answer"], *sorted(q["numbers"])) for q in asked}) == 200
    assert all(task.verified(*task.reward(q, task.solution(q))) for q in asked)
    assert task.questions("test", n=50) == asked[:50] and task.questions("test", seed=1, n=50) != asked[:50]
    small = tasks.load("countdown_search:3,20,256,40")
    assert small.documents("train", 5) == small.documents("train", 5) != small.documents("train", 6)
    assert small.examples(2) == small.examples(2) and len(small.examples(2)) == 2
    with pytest.raises(ValueError, match="41 from 3 5 7 12 has no solution"):
        task.solution(QUESTION)
    assert len(tasks.load("countdown_search:2").questions("test", n=10_000, fewer=True)) == 14            # there are no more, and it ends


def test_where_a_split_has_no_question_it_is_said(monkeypatch):
    monkeypatch.setattr(countdown_search, "MOST_DRAWS", 2000)
    with pytest.raises(ValueError, match="countdown_search has no question of the split valid with 2 numbers up to 10: ask for more"):
        tasks.load("countdown_search:2,10").questions("valid", n=1)


def test_reachable_values_match_brute_force():
    for numbers in ([3, 5, 7], [2, 2, 8, 20], [1, 1, 13], [6, 6], [12, 18, 6, 1]):
        assert countdown_search.reachable_values(numbers) == all_made(numbers)


@pytest.mark.parametrize("completion, parts", [
    ("answer: 35+9=44 7*5=35 12-3=9.", "answered true numbers"),
    ("answer: 12*3=36 7-5=2 36+2=38.", "answered true"),                       # in the order in which they are taken
    ("answer: 36+5=41 12*3=36.", "answered true"),                             # 7 is left
    ("answer: 41*1=41 36+5=41 12*3=36.", "answered true"),                     # 1 is not there
    ("answer: 35+4=41 12/3=4 5*7=35.", "answered numbers"),                    # 39
    ("answer: 41+35=41 5*7=35 3*12=41.", "answered numbers"),
    ("answer: 36+5=41 12*3=36 7-5=2.", "answered true"),                       # 5 twice
    ("answer: 41.", ""),
    ("answer: .", ""),
    ("answer:", ""),
    ("no solution.", ""),
    ("answer: 36+2=38 7-5=2 12*3=36", ""),                                     # not ended
    ("answer: 40+1=41. answer: 3+5=8.", "answered true"),
    ("answer: 1+1=2 answer: 40+1=41.", ""),
    ("answer: (12*3)+5=41.", ""),
    ("answer: 36+5=41 oh 12*3=36.", ""),
    ("answer: 36+5=41! 12*3=36.", ""),
    ("answer: 12**3=36.", ""),
    ("answer: 35--9=44 5*7=35 3-12=-9.", ""),
    ("answer: 12/0=41.", "answered"),
    ("answer: 9999999*9999999=41.", ""),
    ("answer: ١٢*3=36.", ""),
    ("", ""), (".", ""), ("\0" * 100_000, ""), ("answer: " * 50_000, ""), ("answer: " + "1+1=2 " * 50_000 + ".", "")])
def test_what_is_not_the_target_earns_nothing(completion, parts):
    score, found = countdown_search.reward(QUESTION, completion)
    assert score == 0 and {name for name, value in found.items() if value} == {*parts.split()} and not found["correct"]


def test_the_answer_alone_is_graded():
    right = [q for q in countdown_search.questions("test", n=100) if len(q["numbers"]) == 3][0]
    steps = countdown_search.solution(right).partition("answer:")[2]
    for before in ("", "1+1=3 2+2=5\n", "anything: at all\n", "no solution, no solution\n"):
        assert countdown_search.reward(right, f"{before}answer:{steps}") == (1.0, dict.fromkeys(("answered", "true", "numbers", "correct"), True))
    assert countdown_search.reward(right, f"1.5 {steps}")[0] == 0                # what comes after the first full stop is not read
    assert countdown_search.reward({"answer": "4", "numbers": [3, 5, 2]}, "answer: 5-2=3 5+0=5 3-3=0.")[0] == 0
    assert countdown_search.reward({"answer": "5", "numbers": [3, 3, 5]}, "answer: 5+0=5 3-3=0.")[0] == 1      # nought may stand on the way
    assert countdown_search.signature("answer: 1+2=3 5*4=20.") == countdown_search.signature("x\nanswer:  5*4=20 1+2=3.") != ""
    assert countdown_search.signature("no solution.") == ""


@pytest.mark.parametrize("argument, words", [
    ("", "is COUNTS,LARGEST"), ("1", "2 to 6 numbers"), ("7", "2 to 6 numbers"), ("4-3", "smaller count first"), ("3,100", "10 to 99"), ("3,9", "10 to 99"),
    ("3,20,127", "at least 128 bytes"), ("3,0", "10 to 99"), ("3,20,0", "at least 128 bytes"), ("3,20,256,0", "at least one"), ("3;4", "is COUNTS,LARGEST"), ("three", "is COUNTS,LARGEST"), ("3,20,256,5,5", "is COUNTS,LARGEST")])
def test_an_argument_that_is_none_is_a_sentence(argument, words):
    with pytest.raises(ValueError, match=words):
        tasks.load(f"countdown_search:{argument}")


# --- what no teacher solves ---

def test_the_list_of_what_no_teacher_solves(tmp_path, capsys):
    """test_countdown_ladder.py compares the figures with the record."""
    path = tmp_path / "new/teachers.json"
    assert runs_countdown.main([f"--teachers={path}", "--num_questions=60"]) == 0
    unsolved = {q["question"]: q for q in json.loads(path.read_text())["unsolved"]}
    later = {question for question, q in unsolved.items() if not q["solved_in_twice_the_room"]}
    for room, left in ((400, unsolved.keys()), (800, later)):
        for question in countdown_search.questions("test", n=60):
            by_any = any(countdown_search.reward(question, countdown_search.completion(teacher, question, room)[0])[0]
                         for teacher in countdown_search.TEACHERS)
            assert by_any == (question["question"] not in left)
    assert later < unsolved.keys() and "are solved by no teacher" in capsys.readouterr().out
    path.write_text("precious")
    with pytest.raises(BadInput, match="exists and is not a list of teachers"):
        runs_countdown.main([f"--teachers={path}"])


@pytest.mark.parametrize("argv, words", [([], "Give an output folder"), (["out/a", "--teachers=b.json"], "Give an output folder"), (["nowhere"], "has no seconds"),
                                         (["--teachers=a.json", "--task=countdown"], "has no teachers"), (["--teachers=a.json", "--task=countdown_search:9"], "2 to 6"),
                                         (["--teachers=a.json", "--num_questions=0"], "num_questions")])
def test_bad_input_is_one_sentence(argv, words):
    with pytest.raises(BadInput, match=words):
        runs_countdown.main(argv)


# --- the pipeline's figures ---

@pytest.fixture
def ladder(tmp_path):
    """A folder as the stages of runs/countdown.sh leave it: four problems, of which no teacher solves the last three. The base
    solves one of these in its other tries, and another in those that it is compared by."""
    greedy = {"base": "1000", "rft": "1100", "grpo": "1110"}
    rights = {"greedy": greedy, "sampled": greedy | {"base": "1010", "rft": "1110"}, "again": {"base": "1001"}}
    for name in ("greedy", "sampled", "again"):
        rows, lines = [], []
        for model in rights[name]:
            flags = [int(flag) for flag in rights[name][model]]
            rows.append({"model": f"out/{model}", "accuracy": sum(flags) / 4, "accuracy_low": 0.0, "accuracy_high": 1.0, "pass_at_k": {"8": sum(flags) / 4}})
            if model != "base":
                rows[-1] |= {"difference": 0.25, "difference_low": -0.1, "difference_high": 0.5}
            for i, flag in enumerate(flags):
                for k in range(1 if name == "greedy" else 8):
                    completion = Completion([], [5], [-1.0], True, {"question": f"problem {i}", "answer": str(i)}, i, k,
                                            f"{model} writes\nanswer: {i}.", Grade(float(flag and k == 0), {}, "", None))
                    lines.append({"model": f"out/{model}"} | record_of(completion))          # as eval.py writes them
        (tmp_path / f"{name}.txt").write_text("a table\n" + json.dumps({"models": rows}) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "teachers.json").write_text(json.dumps({"questions": 4, "solve": {"one": 0.25}, "together": 0.25, "together_in_twice_the_room": 0.5,
                                                        "random_search": {"one_try": 0.25, "best_of_8": 0.75},
                                                        "unsolved": [{"question": f"problem {i}", "solved_in_twice_the_room": i == 2, "solved_at_random": i == 2}
                                                                     for i in (1, 2, 3)]}))
    (tmp_path / "seconds").write_text("base 60.5 0.5\ndatagen 100 60\nrft 130 100\ngrpo 190 150\ngreedy 195 190\nsampled 198 195\nagain 200 198\n")
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo/metrics.jsonl").write_text('{"step": 1, "seconds": 5.0, "reward": 0.5}\n{"step": 2, "val_reward": 0.5}\n')
    return tmp_path


def test_the_summary(ladder, capsys):
    assert runs_countdown.main([str(ladder)]) == 0
    summary = json.loads((ladder / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == ["base", "rft", "grpo"] and summary["total_seconds"] == 180.0
    assert [(stage["greedy"], stage["seconds"]) for stage in summary["stages"]] == [(0.25, 60.0), (0.5, 70.0), (0.75, 40.0)]
    counts = {key: {name: (row["n"], row["of"]) for name, row in summary["beyond"][key].items()}
              for key in ("no_teacher", "no_teacher_and_not_the_base", "nor_in_twice_the_room")}
    assert counts == {
        "no_teacher": {"base": (1, 3), "rft": (2, 3), "grpo": (2, 3), "random_search": (1, 3)},
        "no_teacher_and_not_the_base": {"base": (1, 2), "rft": (2, 2), "grpo": (2, 2), "random_search": (1, 2)},    # problem 3 is left out,
        "nor_in_twice_the_room": {"base": (0, 1), "rft": (1, 1), "grpo": (1, 1), "random_search": (0, 1)}}          # and problem 2
    assert summary["beyond"]["solved_by_the_last"] == ["problem 1", "problem 2"]
    assert summary["gains"]["sampled"]["grpo"] == {"difference": 0.25, "difference_low": -0.1, "difference_high": 0.5}
    said = capsys.readouterr().out
    assert (ladder / "summary.png").stat().st_size > 5000 and "in 8 tries grpo solves 2 of 3" in said
    assert "grpo - base, greedy: +25.0 points [-10.0, +50.0]" in said
    first, *others = (ladder / "traces.txt").read_text().split("\n\n\n")
    assert first.splitlines() == ["problem 2 (no teacher solves it)", "base (wrong)   rft (wrong)   grpo (right)", "base writes    rft writes    grpo writes",
                                  "answer: 2.     answer: 2.    answer: 2."] and len(others) == 3
    (ladder / "summary.json").write_text("precious")
    with pytest.raises(BadInput, match="summary.json exists"):
        runs_countdown.main([str(ladder)])


def test_the_hardest_problems_are_shown_first():
    def answers(right):
        return {question: [{"score": float(right), "completion": "what it writes"}] for question in ("easy", "more room", "luck", "hard")}

    unsolved = {question: {"solved_in_twice_the_room": question == "more room"} for question in ("more room", "luck", "hard")}
    again = {"base": answers(False) | {"luck": [{"score": 1.0}]}}
    shown = runs_countdown.side_by_side({"base": answers(False), "rft": answers(False), "grpo": answers(True)}, again, unsolved)
    assert [part.splitlines()[0] for part in shown.split("\n\n\n")] == [
        "hard (no teacher solves it within twice the bytes, nor the base in 8 tries)", "more room (no teacher solves it)",
        "luck (no teacher solves it)", "easy"]


def test_where_nothing_is_left_to_solve(ladder):
    known = json.loads((ladder / "teachers.json").read_text()) | {"unsolved": []}
    (ladder / "teachers.json").write_text(json.dumps(known))
    assert runs_countdown.main([str(ladder)]) == 0
    assert json.loads((ladder / "summary.json").read_text())["beyond"]["no_teacher"]["grpo"] == {"n": 0, "of": 0}


# --- the script ---

def script(*flags, **env):
    return subprocess.run(["bash", ROOT / "runs/countdown.sh", *flags], env=environment(**env), capture_output=True, text=True)


@pytest.fixture(scope="module")
def fork():
    with forked.interpreter() as python:
        yield python


@pytest.fixture
def climbed(tmp_path, fork):
    """A function: flags of the script -> what its stages were asked for, [(name, knobs and models)]; and what it printed."""
    python = tmp_path / "python"             # notes what it is asked for, and leaves what the script looks for
    python.write_text(f'''#!/bin/sh
case "$1 $2" in
    -c*) exec {fork} "$@" ;;
    *) for word in "$@"; do case "$word" in --out_dir=*) mkdir -p "${{word#*=}}" && touch "${{word#*=}}/model.json" ;; esac; done
       for word in "$@"; do printf "%s\\t" "$word"; done >> {tmp_path}/asked; echo >> {tmp_path}/asked; echo a table; echo a trace > {tmp_path}/out/traces.txt
       case "$*" in *datagen.py*) echo "[]" > {tmp_path}/out/rft.json ;; *eval.py*) exit ${{FAILS:-0}} ;; esac ;;
esac
''')
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    Configs = {"train.py": train.Config, "datagen.py": datagen.Config, "grpo.py": grpo.Config, "eval.py": evaluation.Config}

    def climb(*flags, code=0, **env):
        (tmp_path / "asked").write_text("")
        done = script(f"--out_dir={tmp_path}/out", "--seed=7", *flags, PYTHON=str(python), CUDA_VISIBLE_DEVICES="", **env)
        assert done.returncode == code, done.stderr
        stages = []
        for line in (tmp_path / "asked").read_text().splitlines():
            words = line.strip().split("\t")
            name = next((word for word in words if word in Configs), None)
            if name is None:
                stages.append((words[1], words))
                continue
            argv = [str(ROOT / word) if word.startswith("config/") else word for word in words[words.index(name) + 1:]]
            starts = [word for word in argv if word.startswith("--init_from=")]                  # the models are not there
            cfg = config.load(Configs[name], [word for word in argv if word not in starts], positional="models" if name == "eval.py" else None)
            if starts:
                cfg.init_from = starts[0].partition("=")[2]
            stages.append((name, cfg))
        return stages, done.stdout
    return climb


def test_each_stage_is_given_knobs_that_it_has(climbed, tmp_path):
    stages, said = climbed("--base_steps=5", "--grpo_steps=3", "--asked=9", "--num_questions=11", "--task=countdown_search:3")
    assert [name for name, _ in stages] == ["runs.countdown", "train.py", "datagen.py", "train.py", "grpo.py", *3 * ["eval.py"], "runs.countdown"]
    teachers, base, drawn, tuned, learnt, greedy, sampled, again, report = (cfg for _, cfg in stages)
    out = f"{tmp_path}/out"
    assert {f"--teachers={out}/teachers.json", "--task=countdown_search:3", "--num_questions=11"} < {*teachers} and report[-1] == out
    assert (base.dataset, base.max_steps, base.block_size, base.seed, base.device) == ("task:countdown_search:3", 5, 800, 7, "cpu")
    assert (base.init_from, base.out_dir, base.resume) == ("scratch", f"{out}/base", "auto")
    assert (drawn.init_from, drawn.num_questions, drawn.temperature, drawn.max_new_tokens) == (f"{out}/base", 9, 1.0, 773)
    assert drawn.seed not in (base.seed, learnt.seed) and not drawn.overwrite                    # other questions; it goes on
    assert (tuned.init_from, tuned.dataset, tuned.out_dir, tuned.resume) == (f"{out}/base", drawn.output, f"{out}/rft", "auto")
    assert (learnt.init_from, learnt.out_dir, learnt.resume) == (f"{out}/rft", f"{out}/grpo", "auto")
    assert (learnt.max_steps, learnt.num_questions, learnt.task, learnt.max_new_tokens) == (3, 96, "countdown_search:3", 773)
    three = tuple(f"{out}/{name}" for name in ("base", "rft", "grpo"))
    assert [(cfg.num_samples, cfg.temperature, cfg.seed, cfg.models, cfg.output) for cfg in (greedy, sampled, again)] == [
        (1, 0.0, 0, three, f"{out}/greedy.jsonl"), (8, 1.0, 0, three, f"{out}/sampled.jsonl"), (8, 1.0, 1, three[:1], f"{out}/again.jsonl")]
    assert {cfg.num_questions for cfg in (greedy, sampled, again)} == {11}
    assert "== grpo" in said and (tmp_path / "out/seconds").read_text().split()[::3] == ["base", "datagen", "rft", "grpo", "greedy", "sampled", "again"]
    assert shlex.split(said)[-2:] == ["a", "trace"]


def test_the_large_size_takes_its_own_files(climbed, tmp_path):
    _, base, drawn, tuned, learnt, greedy, *_ = (cfg for _, cfg in climbed("--size=large")[0])
    assert (base.n_embd, base.block_size, base.dataset) == (384, 2048, "task:countdown_search:4,99,1024,200000")
    assert (drawn.num_questions, drawn.max_new_tokens, tuned.learning_rate) == (10_000, 2021, 3e-4)
    assert (learnt.prompts_per_step, learnt.num_questions, learnt.max_steps, learnt.init_from) == (64, 3840, 60, f"{tmp_path}/out/rft")
    assert learnt.task == greedy.task == "countdown_search:4,99,1024,200000"
    assert climbed(code=2)[0] == []                      # the folder is the large one's


def test_what_is_done_is_not_done_again(climbed, tmp_path):
    """And the seconds of a stage that failed count, too."""
    stages, _ = climbed(code=1, FAILS="1")
    assert [name for name, _ in stages][-2:] == ["grpo.py", "eval.py"] and stages[-1][1].num_questions == "auto"
    assert (tmp_path / "out/seconds").read_text().split()[::3] == ["base", "datagen", "rft", "grpo", "greedy"]
    assert [name for name, _ in climbed()[0]] == ["runs.countdown", *3 * ["eval.py"], "runs.countdown"]
    assert (tmp_path / "out/seconds").read_text().split()[::3][4:] == ["greedy", "greedy", "sampled", "again"]
    assert [name for name, _ in climbed()[0]] == ["runs.countdown", "runs.countdown"]
    assert climbed("--base_steps=5", code=2)[0] == []                    # it was begun with other flags
    assert climbed("--grpo_steps=0", code=2)[0] == climbed("--asked=some", code=2)[0] == []


# --- TinyZero's form ---

@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    asked = [{"target": 98, "nums": [44, 19, 35]}, {"target": 98, "nums": [19, 44, 35]}] + [{"target": 10 + i, "nums": [10, i, 7, 7]} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path


def test_the_data_set_s_rows_are_questions(rows, tmp_path):
    task = tasks.load(f"countdown_think:{rows}")
    asked = {split: task.questions(split) for split in tasks.SPLITS}
    keys = [(*sorted(q["numbers"]), q["answer"]) for questions in asked.values() for q in questions]
    assert len(keys) == len({*keys}) == 201 and 8 < len(asked["test"]) < 35 and 8 < len(asked["valid"]) < 35
    question = {"answer": "98", "numbers": [44, 19, 35]}
    assert "<think>" in asked["train"][0]["question"] and str(asked["train"][0]["numbers"]) in asked["train"][0]["question"]
    for completion, score in (("<think> 44 + 35 = 79, 79 + 19 = 98 </think>\n<answer> 44 + (35 + 19) </answer>", 1), ("<answer>19 + 35 + 44 = 98</answer>", 1),
                              ("<think>1</think><answer>98</answer>", 0), ("<answer>44 + 35 + 19 + 0</answer>", 0), ("44 + 35 + 19", 0),
                              ("<answer>44 + 35</answer><answer>44 + 35 + 19</answer>", 0), ("", 0), ("<answer>" * 10_000, 0)):
        assert task.reward(question, completion)[0] == score, completion
    for asked_of, answer in task.examples(4):
        numbers, target = re.search(r"numbers (\[.*?\]) that equals (\d+)", asked_of).groups()
        assert task.reward({"numbers": json.loads(numbers), "answer": target}, answer)[0] == 1 and "<think>" in answer
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in rows.read_text().splitlines()]), file)
    assert tasks.load(f"countdown_think:{file}").questions("test") == asked["test"]


@pytest.mark.parametrize("text, words", [('{"target": 5}\n', "row 1, is not"), ("[1, 2]\n", "row 1, is not"), ('{"target": 5, "nums": ["1", 2]}\n', "row 1, is not"), ("{", "can't be read"),
                                         ('{"target": 5, "nums": [5]}\n', "row 1, is not"), ('{"target": true, "nums": [1, 2]}\n', "row 1, is not")])
def test_rows_that_are_none_are_named(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        tasks.load(f"countdown_think:{path}").questions("train")


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match="There is no file nowhere.jsonl"):
        tasks.load("countdown_think:nowhere.jsonl")
