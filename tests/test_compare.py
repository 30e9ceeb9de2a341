"""compare.py: intervals that hold at every look, controls, commands, resumes; the files in experiments/."""
import contextlib
import importlib
import io
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import compare
import tasks
from conftest import ROOT, flags
from measure import answers, intervals, runs
from runtime import config
from runtime.config import BadInput
from runtime.guard import Failure

LOOKS = np.arange(intervals.FEWEST, intervals.MOST + 1)
STUDENT = np.array([4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262])     # 97.5% at 3, 4, ..., 10 values


# --- the evaluation ---

@pytest.mark.parametrize("command, few_shot, tokens", [
    ("grpo.py --task=arithmetic", 4, 128), ("grpo.py --task=arithmetic --few_shot=2 --max_new_tokens=60", 2, 60),
    ("datagen.py --task=arithmetic --max_new_tokens=144 --few_shot=1 && train.py config/rft.py", 1, 144),
    ("train.py config/rft.py --dataset=task:arithmetic", 0, 128)])
def test_questions_are_asked_as_the_base_asks(command, few_shot, tokens):
    """Of a model that is no run: with four worked examples by default, as grpo.py trains it."""
    cfg = config.load(compare.Config, [f"--command={command}", "--start=org/model"])
    assert compare.check(cfg, {"base": command}) == cfg.task == "arithmetic"
    assert (cfg.few_shot, cfg.max_new_tokens) == (few_shot, tokens)


# --- statistics ---

def crossed(experiments, seed, question, residual, questions, rng):
    """Differences [experiments, 10, questions] without an effect, of these standard deviations."""
    shape = experiments, intervals.MOST, questions
    d = residual * rng.standard_normal(shape, dtype=np.float32)
    d += seed * rng.standard_normal((*shape[:2], 1), dtype=np.float32)
    return d + question * rng.standard_normal((experiments, 1, questions), dtype=np.float32)


def ever_differ(d, half_width):
    """The share of experiments that differ from 0 at 3, 4, ... or 10 seeds."""
    stopped = np.zeros(len(d), bool)
    for seeds in LOOKS:
        stopped |= np.abs(d[:, :seeds].mean((1, 2))) > half_width(d[:, :seeds])
    return stopped.mean()


def ours(d):
    return intervals.interval(d)[1]


def student(d):
    """Of the seeds' means alone, as studies usually have it."""
    return STUDENT[d.shape[1] - 3] * d.mean(2).std(1, ddof=1) / np.sqrt(d.shape[1])


@pytest.mark.parametrize("spread", [(1, 0, 0.3), (0.02, 0.3, 0.3), (0.02, 0, 0.3), (0, 0.3, 0.05)])
def test_ten_thousand_experiments_without_an_effect_that_stop_at_the_first_difference(spread):
    parts = [crossed(1000, *spread, 100, np.random.default_rng(i)) for i in range(10)]
    errors = {half.__name__: np.mean([ever_differ(d, half) for d in parts]) for half in (ours, student)}
    assert errors["ours"] <= 0.05 and errors["student"] > 0.15, errors


def test_the_bounds_spend_the_error_as_said_and_are_narrower_than_a_confidence_sequence():
    normal = np.random.default_rng(1).standard_normal((400_000, intervals.MOST), dtype=np.float32)
    mean = normal.cumsum(1) / np.arange(1, 11)
    variance = np.square(normal).cumsum(1) - np.arange(1, 11) * mean**2
    t = (np.abs(mean) * np.sqrt(np.arange(1, 11) * np.arange(10)) / np.sqrt(np.maximum(variance, 1e-30)))[:, 2:]
    for confidence, error in (("95", 0.048), ("99", 0.0096)):
        bounds, _ = intervals.BOUNDS[confidence]
        crossed_first = np.eye(8)[(t > bounds).argmax(1)][(t > bounds).any(1)].sum(0) / len(t)
        assert crossed_first == pytest.approx(error * np.array(intervals.SPENT), rel=0.15), confidence
    # The t-mixture martingale reaches 20 (Lai 1976; Wang and Ramdas): a normal prior of the effect, of
    # variance 1 / 0.05, over the right Haar prior of the standard deviation.
    factor = 0.05 / (LOOKS + 0.05)
    level = (400 / factor) ** (1 / LOOKS)
    mixture = np.sqrt((LOOKS - 1) * (level - 1) / (1 - level * factor))
    assert mixture[:5] == pytest.approx([10.33, 6.68, 5.66, 5.15, 4.84], abs=0.01)
    assert (mixture > intervals.BOUNDS["95"][0]).all()


def test_neither_seeds_nor_questions_are_taken_for_more_than_they_are():
    rng = np.random.default_rng(0)
    seeds_alone = intervals.comparison(np.tile([[0.1], [0.0], [-0.1]], 400))
    assert seeds_alone["high"] == pytest.approx(8.23 * 0.1 / 3**0.5, rel=1e-6) and seeds_alone["from_questions"] == 0
    questions_alone = intervals.comparison(np.tile(rng.normal(0, 0.3, 400), (3, 1)))
    half = (questions_alone["high"] - questions_alone["low"]) / 2
    assert half == pytest.approx(2.05 * 0.3 / 20, rel=0.1)             # the seeds' spread is zero
    equal = intervals.comparison(np.zeros((3, 400)))
    assert 0 < equal["high"] < 0.01                                    # no interval of width zero


def test_verdicts():
    tie = intervals.comparison(np.random.default_rng(0).normal(0, 0.2, (3, 500)) + [[0.02], [-0.02], [0.01]])
    text = intervals.sentence("a", "base", tie, 5, "95")
    more = intervals.more_seeds(tie, 0.05)
    assert "a and base are a tie: the difference is within ±" in text and f"{more} more seed" in text and more > 0
    assert "10 seeds would not resolve 0.1 points" in intervals.sentence("a", "base", tie, 0.1, "95")
    gain = np.full((3, 500), 0.1) + [[0.01], [-0.01], [0.0]]
    assert intervals.sentence("a", "base", intervals.comparison(gain), 2, "95").startswith("a is better than base: +10.0")
    assert intervals.sentence("a", "base", intervals.comparison(-gain), 2, "95").startswith("a is worse than base: -10.0")


@pytest.mark.parametrize("arm, change, broken", [("again", 0.1, True), ("again", 0.0, False), ("placebo", 0.1, True),
                                                ("placebo", -0.1, False)])
def test_a_broken_set_up_is_said_first(arm, change, broken):
    rng = np.random.default_rng(0)
    zero = rng.normal(0.5, 0.01, (3, 400))
    shares = {name: {"sampled": zero, "majority": zero} for name in ("start", "base", "other")}
    shares[arm] = {"sampled": zero + change, "majority": zero}
    cfg = compare.Config()
    _, sentences = compare.verdicts(cfg, shares, dict.fromkeys(shares, 10.0) | {"other": 12.0})
    assert sentences[0].startswith("The set-up is broken") == broken
    assert any("(other took +20% seconds.)" in text for text in sentences)


# --- answers ---

def record(number, sample, answer, score, exact, text="Answer: <answer>{}</answer>"):
    return json.dumps({"number": number, "sample": sample, "completion": text.format(answer), "score": score,
                       "parts": {"exact": exact}, "question": "?"})


def test_votes_and_the_verifier_s_choice(tmp_path):
    rows = [record(0, 0, "1,000", 1, True), record(0, 1, "1000.0", 1, True), record(0, 2, "7", 0, False),
            record(1, 0, "8", 0, False), record(1, 1, "8", 0, False), record(1, 2, "9.1", 1, False),
            record(2, 0, "", 0, False, ""), record(2, 1, "", 0, False, ""), record(2, 2, "5", 1, True)]
    (tmp_path / "sampled").write_text("\n".join(rows))
    (tmp_path / "greedy").write_text("\n".join(record(n, 0, "1", n % 2, False) for n in range(3)))
    figures = answers.figures_of(tmp_path / "greedy", tmp_path / "sampled", [0, 1, 2])
    assert figures["sampled"] == pytest.approx([2 / 3, 1 / 3, 1 / 3]) and figures["greedy"].tolist() == [0, 1, 0]
    assert figures["majority"].tolist() == [1, 0, 1] and figures["best"].tolist() == [1, 1, 1]
    assert figures["best exact"].tolist() == [1, 0, 1] and figures["sampled exact"] == pytest.approx([2 / 3, 0, 1 / 3])
    assert answers.figures_of(tmp_path / "greedy", tmp_path / "sampled", [1])["majority"].tolist() == [0]


@pytest.mark.parametrize("arms", [{"x": 5}, {"x": None}, {"x": " "}, {"a/b": "--beta=1"}], ids=str)
def test_an_arm_of_a_file_is_a_text(arms):
    with pytest.raises(BadInput, match="should be NAME: OPTIONS"):
        compare.commands_of(compare.Config(arms=arms), [])


def test_a_text_that_repeats_is_one_question(tmp_path):
    """As eval.py, which numbers the questions, asks each text once."""
    task = tmp_path / "own.py"
    task.write_text("def questions(split, seed=0, n=None):\n"
                    "    return [{'question': f'{i % 3} + 1?', 'answer': f'{i % 3 + 1}', 'n': i} for i in range(n or 6)]\n"
                    "def reward(question, completion):\n    return 0.0\n")
    path, drawn = answers.draw_questions(str(task), 6, 0, tmp_path)
    assert sorted(q["n"] for q in drawn) == [0, 1, 2] and len(path.read_text().splitlines()) == 3


def test_an_edited_verifier_grades_anew(tmp_path):
    task = tmp_path / "own.py"
    paths = set()
    for score in (0.0, 1.0, 1.0):
        task.write_text("def questions(split, seed=0, n=None):\n    return [{'question': f'{i}?', 'answer': '1'} for i in range(n or 6)]\n"
                        f"def reward(question, completion):\n    return {score}\n")
        paths.add(answers.draw_questions(str(task), 6, 0, tmp_path)[0])
    assert len(paths) == 2


def test_another_model_under_the_name_of_the_start_is_refused(start, tmp_path):
    copy = shutil.copytree(start, tmp_path / "start")
    state = {}
    assert answers.same_start(state, str(copy)) == answers.same_start(state, str(copy)) == str(copy)
    meta = next(copy.glob("checkpoints/*/meta.json"))
    meta.write_text(meta.read_text() + " ")
    with pytest.raises(BadInput, match="was replaced after runs had begun with it"):
        answers.same_start(state, str(copy))
    assert answers.same_start(state, "org/model") == "org/model"             # of the hub


def test_no_more_questions_are_asked_for_than_there_are(tmp_path):
    task = tmp_path / "own.py"
    task.write_text("def questions(split, seed=0, n=None):\n    return [{'question': f'{split} {i}?', 'answer': '1'} for i in range(70)][:n]\n"
                    "def reward(question, completion):\n    return 0.0\n")
    command = "datagen.py && train.py"
    assert compare.with_amount(command, 200, str(task)) == "datagen.py --num_questions=70 && train.py"
    assert compare.with_amount(command, 200, "arithmetic:4") == "datagen.py --num_questions=200 && train.py"


def test_questions_are_those_of_the_draw_and_not_of_training(tmp_path):
    path, drawn = answers.draw_questions("unit_conversion", 50, answers.seed_of("x", 1), tmp_path)
    again = answers.draw_questions("unit_conversion", 50, answers.seed_of("x", 1), tmp_path)
    _, fresh = answers.draw_questions("unit_conversion", 50, answers.seed_of("x", 2), tmp_path)
    assert again == (path, drawn) and len(path.read_text().splitlines()) == 50
    assert not {q["question"] for q in drawn} & {q["question"] for q in fresh}
    with pytest.raises(BadInput, match="--questions=10000000 is too many: .* lower --questions"):
        answers.draw_questions("arithmetic:1", 10**7, 0, tmp_path)
    with pytest.raises(BadInput, match="--exact: countdown tolerates no"):
        answers.draw_questions("countdown", 20, 0, tmp_path, exact=True)
    assert answers.draw_questions("unit_conversion", 20, 3, tmp_path, exact=True)[1]
    with pytest.raises(BadInput, match="give --fresh"):
        answers.draw_questions("unit_conversion", 40, answers.seed_of("x", 1), tmp_path)
    (tmp_path / "rft.attempts.jsonl").write_text('{"config": {}}\n' + json.dumps(
        {"completion": "", "question": drawn[0]["question"].upper()}) + "\n")
    assert answers.unseen(drawn, [tmp_path / "run"]) == ([*range(1, 50)], 1)
    with pytest.raises(BadInput, match="make the splits of the task differ"):
        answers.unseen(drawn[:20], [tmp_path / "run"])                       # too few for an interval
    with pytest.raises(BadInput, match="make the splits of the task differ"):
        answers.unseen(drawn[:2], [tmp_path / "run"])


def test_the_placebo_pays_at_random_and_asks_as_the_task_does(tmp_path):
    spec = answers.placebo("countdown_search:3", 0.3, tmp_path)
    task, real = tasks.load(spec), tasks.load("countdown_search:3")
    question = real.questions("train", 0, 3)[0]
    assert (task.prompt, task.stop) == (real.prompt, real.stop) and task.questions("train", 0, 3)[0] == question
    paid = [task.reward(question, "the same text")[0] for _ in range(2000)]
    assert set(paid) == {0.0, 1.0} and np.mean(paid) == pytest.approx(0.3, abs=0.05)
    mixture = tasks.load(answers.placebo("math:0@2+code:0", 0.5, tmp_path / "two"))
    assert list(mixture.weights.values()) == [2, 1]


# --- commands ---

def loaded(*argv):
    cfg = config.load(compare.Config, list(argv))
    commands = compare.commands_of(cfg, [word.partition("=")[2] for word in argv if word.startswith("--arm=")])
    return cfg, commands, compare.check(cfg, commands)


def test_an_arm_may_be_a_config_file_or_a_program_of_the_user(tmp_path, monkeypatch):
    """Told apart by their text. A program that writes no steps fails with a sentence."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("learning_rate = 1e-4\n")
    Path("my").mkdir()
    Path("my/own.py").write_text("import torch\n")
    _, commands, _ = loaded("--start=out/rft", "--controls=start", "--task=arithmetic:2", "--command=grpo.py --task=arithmetic:2",
                             "--arm=file: mine.py", "--arm=program: my/own.py --x=1")
    assert commands["file"] == "grpo.py --task=arithmetic:2 mine.py" and commands["program"] == "my/own.py --x=1"
    monkeypatch.setattr(compare, "process", lambda *arguments, **options: "")
    (tmp_path / "out").mkdir()
    runs = compare.Comparison(*loaded("--start=out/rft", "--controls=start", "--task=arithmetic:2", "--questions=20", "--command=my/own.py --x=1"))
    with pytest.raises(Failure, match="my/own.py has logged no step in"):
        runs.run("base-0", "my/own.py --x=1", 0, "out/rft")


def test_the_base_s_device_is_that_of_evaluations_and_controls(tmp_path, monkeypatch):
    cfg, commands, _ = loaded("--start=out/rft", "--controls=rft", "--task=arithmetic:2", "--command=grpo.py --task=arithmetic:2 --device=cpu")
    assert cfg.device == "cpu" and commands["rft"].count("--device=cpu") == 2
    monkeypatch.chdir(tmp_path)
    runs = compare.Comparison(*loaded("--start=out/rft", "--controls=start", "--task=arithmetic:2", "--questions=20",
                                      "--command=grpo.py --task=arithmetic:2 --device=cpu"))
    asked = []
    monkeypatch.setattr(compare, "process", lambda start, arguments, *rest: asked.append([*map(str, arguments)]))
    runs.answer("base-0", "out/rft", 0)
    assert len(asked) == 2 and all("--device=cpu" in arguments for arguments in asked)


def test_folders_may_have_spaces():
    ((script, *words),) = compare.stages_of("grpo.py --init_from={start} --out_dir={out}", "my models/rft", 3, Path("out/my run"))
    assert script == "grpo.py" and words[:2] == ["--init_from=my models/rft", "--out_dir=out/my run"]


def test_confidence_is_a_number_in_an_experiment_s_file(tmp_path):
    (tmp_path / "x.py").write_text("confidence = 99\n")
    assert config.load(compare.Config, [str(tmp_path / "x.py")]).confidence == "99"


def test_an_arm_changes_the_base_or_is_a_command():
    cfg, commands, _ = loaded("--start=out/rft", "--command=grpo.py config/grpo.py --max_steps=3", "--arm=cispo: --loss_type=cispo",
                              "--arm=sft: train.py config/rft.py", "--controls=start,again,rft")
    assert commands["cispo"].endswith("--max_steps=3 --loss_type=cispo") and commands["sft"] == "train.py config/rft.py"
    assert list(commands) == ["base", "cispo", "sft", "again", "rft"] and (cfg.task, cfg.max_new_tokens) == ("unit_conversion", 144)
    data, tuned = compare.stages_of(commands["rft"], "out/rft", 4, "o/rft-4")
    assert {"--output=o/rft-4.1.json", "--init_from=out/rft", "--seed=4"} <= set(data)
    assert {"--dataset=o/rft-4.1.json", "--out_dir=o/rft-4", "--init_from=out/rft", "--resume=auto"} <= set(tuned)
    first, second = compare.stages_of("train.py && grpo.py --seed=9 --init_from={start}", None, 4, "o/x")
    assert "--out_dir=o/x.1" in first and not any(word.startswith("--init_from") for word in first)
    assert second == ["grpo.py", "--seed=9", "--init_from=None", "--out_dir=o/x", "--resume=auto"]
    assert compare.with_amount(commands["rft"], 70) == commands["rft"].replace(" &&", " --num_questions=70 &&")
    assert cfg.arms == {"cispo": "--loss_type=cispo", "sft": "train.py config/rft.py"}


def test_controls_train_on_the_task_of_the_base(tmp_path):
    config_file = tmp_path / "own.py"
    config_file.write_text("arm = 'other: --beta=0.1'")
    cfg, commands, task = loaded(str(config_file), "--start=out/rft", "--controls=start,rft", "--task=arithmetic:2",
                                 "--command=grpo.py config/grpo.py --task=arithmetic:1 --max_new_tokens=40")
    assert (task, cfg.task) == ("arithmetic:1", "arithmetic:2") and "other" in commands
    data, _ = compare.stages_of(commands["rft"], "out/rft", 4, "o/rft-4")
    assert {"--task=arithmetic:1", "--max_new_tokens=40", f"--few_shot={cfg.few_shot}"} <= set(data)
    assert "--learning_rate=none" in commands["rft"]                         # else that of a million parameters
    _, commands, _ = loaded("--start=out/rft", "--controls=rft", "--rft=datagen.py --task=countdown && train.py")
    assert commands["rft"] == "datagen.py --task=countdown && train.py"


@pytest.mark.parametrize("flag, complaint", [
    ("--arm=x: --los_type=grpo", "did you mean loss_type"), ("--arm=again: --beta=1", "with a new NAME"),
    ("--controls=start,gain", "should name some of"), ("--controls=placebo", "compared with the start"), ("--arm=a[b]: --beta=1", "NAME without /"),
    ("--arm=x: datagen.py", "ends without a model"), ("--seeds=2", "at least 3"), ("--start=", "Give either"),
    ("--command=none.py", "does not begin with a script")])
def test_mistakes_are_named_before_anything_runs(flag, complaint):
    with pytest.raises(BadInput, match=complaint):
        loaded("--start=out/rft", flag)


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*.py")), ids=lambda p: p.name)
def test_experiments_are_accepted(path):
    cfg, commands, _ = loaded(str(path))
    assert len(path.read_text().splitlines()) <= 30 and len(commands) > 1
    for command in commands.values():
        for script, *words in compare.stages_of(command, "out/start", 0, "out/run"):
            module = importlib.import_module(script.removesuffix(".py"))
            getattr(module, "check", lambda cfg: None)(config.load(module.Config, words))


# --- runs ---

GRPO = ("grpo.py --max_steps=1 --prompts_per_step=4 --k_samples=2 --max_new_tokens=8 --eval_interval=0 --num_questions=20 "
        "--reward_workers=1 --device=cpu --reward_pool=serial")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "base"
    argv = flags(dataset="task:unit_conversion", n_layer=1, n_head=2, n_embd=32, block_size=160, batch_size=4, max_steps=2,
                 warmup_steps=1, eval_tokens=320, device="cpu", out_dir=folder, data_dir=folder.parent / "data")
    with in_process() as call:
        call(["train.py"], argv)
    return folder


@contextlib.contextmanager
def in_process(calls=None):
    """Yield a stand-in for runs.process that calls a script's main; it appends the scripts to `calls`."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def call(start, arguments, ranks=1, name=None, fine=(0,), env=None):
        script = Path(start[0]).stem
        if calls is not None:
            calls.append(name)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert importlib.import_module(script).main(list(map(str, arguments))) in (0, None)
        return said.getvalue()
    yield call
    for number, handler in handlers:
        signal.signal(number, handler)


def test_a_comparison_resumes_and_refuses_another_command(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [f"--start={start}", f"--command={GRPO}", "--arm=x 2: --learning_rate=2e-3", "--controls=start,placebo",
            "--questions=20", "--num_samples=2", "--out_dir=out"]
    calls = []
    with in_process(calls) as call:
        def killed(*args, **more):
            if len(calls) == 5:
                raise KeyboardInterrupt
            return call(*args, **more)
        monkeypatch.setattr(compare, "process", killed)
        with pytest.raises(KeyboardInterrupt):
            compare.main(argv)
        monkeypatch.setattr(compare, "process", call)
        assert compare.main(argv) == 0
        scripts = [name for name in calls if "grpo" in name]
        assert scripts == [f"{arm}: grpo.py" for arm in (
            "base-0", "x 2-0", "placebo-0", "x 2-1", "placebo-1", "base-1", "placebo-2", "base-2", "x 2-2")]
        assert len(calls) == 9 + 2 * 12                                    # each run once, each answer once
        assert compare.main(argv) == 0 and len(calls) == 9 + 2 * 12        # nothing is repeated
        said = capsys.readouterr().out
        assert "above the base" in said and "without 0 that are among" in said
        result = json.loads(Path("out/comparison.json").read_text())
        assert len(result["verdict"]) == 5 and result["means"]["base"]["sampled exact"] >= 0
        assert Path("out/comparison.png").exists() and result["runs"]["base-0"]["seconds"] > 0
        with pytest.raises(BadInput, match="was made by another command"):
            compare.main([*argv, f"--command={GRPO} --beta=0.1"])
        assert compare.main([*argv, "--fresh"]) == 0 and len(calls) == 9 + 4 * 12     # other questions, same runs


def test_equal_seconds_follow_from_the_first_steps(start, tmp_path, monkeypatch):
    """An arm that takes twice the seconds a step gets half the steps, and the control rft the questions: 200 take 10
    seconds and 1,000 take 22, so 70 seconds are enough for 4,200."""
    out = tmp_path / "out"
    comparison = compare.Comparison(*loaded(
        f"--start={start}", "--command=grpo.py config/grpo.py --max_steps=40", "--arm=slow: --k_samples=16", "--controls=rft",
        "--budget=seconds", f"--out_dir={out}", "--questions=20"))

    def run(name, command, seed, start):
        comparison.state["runs"][name] = {"seconds": 22.0 if "probe2" in name else 10.0, "steps": 10}
        (out / name).mkdir()
        lines = [{"step": n, "lr": 1, "seconds": (4.0 if "slow" in name else 2.0) * n} for n in range(1, 11)]
        (out / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return str(out / name)
    monkeypatch.setattr(comparison, "run", run)
    run("base-0", "", 0, "")
    comparison.state["runs"]["base-0"] = {"seconds": 70.0, "steps": 40}
    assert comparison.command("slow").endswith("--k_samples=16 --max_steps=20")
    assert "--num_questions=4200 &&" in comparison.command("rft") and "max_steps=40" in comparison.command("base")
    assert runs.seconds_at(out / "slow-probe", 3) == 4
    comparison.state["amounts"] = {}
    comparison.state["runs"] = {"base-0": {"seconds": 15.0, "steps": 40}}
    shutil.rmtree(out / "rft-probe")
    assert "--num_questions=300 &&" in comparison.command("rft") and "rft-probe2" not in comparison.state["runs"]     # near enough
    (out / "sparse").mkdir()
    (out / "sparse/metrics.jsonl").write_text("".join(f'{{"step": {n}, "lr": 1, "seconds": {s}}}\n' for n, s in ((1, 9), (25, 50))))
    assert runs.seconds_at(out / "sparse", 10) == 2              # not those of the slow first step


def test_a_stage_that_has_finished_is_not_repeated(tmp_path, monkeypatch):
    """Its data would be others, by rounding, than those of the next stage's checkpoint."""
    argv = ["--start=out/rft", "--controls=rft", f"--out_dir={tmp_path / 'out'}", "--questions=20"]
    called = []

    def process(start, arguments, ranks, name, env=None):
        called.append(name)
        if len(called) == 2:
            raise KeyboardInterrupt
        folder = tmp_path / "out/rft-0"
        if "train" in name:
            folder.mkdir()
            (folder / "metrics.jsonl").write_text('{"step": 7, "lr": 1, "seconds": 3}\n')
        return '{"seconds": 2}'
    monkeypatch.setattr(compare, "process", process)
    with pytest.raises(KeyboardInterrupt):
        rft_of(argv)
    runs = rft_of(argv)
    assert called == ["rft-0: datagen.py", "rft-0: train.py", "rft-0: train.py"]
    assert (runs.state["runs"]["rft-0"]["seconds"], runs.state["runs"]["rft-0"]["steps"]) == (5, 7)


def rft_of(argv):
    runs = compare.Comparison(*loaded(*argv))
    runs.run("rft-0", runs.commands["rft"], 0, "out/rft")
    return runs


def test_a_rank_s_sentence_is_found_in_torchrun_s_report(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text("import sys\nsys.exit('error: No model.\\n=====\\n  exitcode  : 1 (pid: 7)\\n=====')")
    with pytest.raises(Failure, match="ended with 1: No model.$"):
        runs.process([str(script)], [])
    script.write_text("import sys\nsys.exit('W1129 worker\\n=====\\n  exitcode  : -9 (pid: 7)\\n=====')")
    with pytest.raises(Failure, match="exitcode  : -9"):               # which the referee does not blame on a candidate
        runs.process([str(script)], [])


def test_a_signal_ends_what_nohup_does_not_protect(monkeypatch):
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(runs.signal, "getsignal", handlers.get)
    monkeypatch.setattr(runs.signal, "signal", handlers.__setitem__)
    runs.end_on_signals()
    assert handlers[signal.SIGHUP] == signal.SIG_IGN
    with pytest.raises(SystemExit, match="143"):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
