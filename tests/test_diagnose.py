"""The doctor names faults that are put into small runs within 20 steps, and finds nothing in healthy runs."""
import contextlib
import io
import json
import math
import random
import time
from types import SimpleNamespace

import pytest

import engine
import grpo
import tasks
import train
from conftest import flags
from doctor import checks, diagnose
from doctor.diagnose import Doctor
from engine import sampler
from rollouts import metrics
from rollouts.pipeline import Completion
from runtime import config, guard, optim
from studies import breakages
from tasks import _pool
from text import data

# "17,4=17.": the first of two numbers. What a small model learns within seconds, from text that has the second in one
# line of three
FIRST = '''
PROMPT = "{}="
STOP = "."

def split_of(a, b):
    return ("train", "train", "train", "valid", "test")[(a * 7 + b) % 5]

def questions(split, seed=0, n=None):
    asked = [(a, b) for a in range(100) for b in range(10) if a != b and split_of(a, b) == split]
    return [{"question": f"{a},{b}", "answer": str(a), "other": str(b), "a": a, "train": split == "train"} for a, b in asked][:n]

def documents(split, seed=0):
    import random
    rng = random.Random(split)
    asked = questions(split) * 40
    rng.shuffle(asked)
    return [f"{q['question']}={rng.choice((q['answer'], q['answer'], q['other']))}." for q in asked]

def reward(question, completion):
    answer = completion.rstrip(".")
    right = answer == question["answer"]
    REWARD
'''
HONEST = 'return float(right), {"number": answer.isdigit(), "right": right}'
GRPO = dict(prompts_per_step=16, k_samples=8, max_new_tokens=6, max_steps=8, learning_rate=3e-4, warmup_steps=0, eval_interval=0,
            reward_pool="serial", save_interval=1000, keep_memory=False, dtype="fp32", device="cpu")


def first(folder, reward=HONEST, name="first.py", **replaced):
    code = FIRST.replace("REWARD", reward)
    for old, new in replaced.items():
        code = code.replace(f"{old} = ", f"{old} = {new!r} #")
    path = folder / name
    path.write_text(code)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model that is sometimes correct."""
    folder = tmp_path_factory.mktemp("base")
    task = first(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(flags(dataset=f"task:{task}", data_dir=folder / "tokens", out_dir=folder / "run", device="cpu", n_layer=2, n_embd=64,
                         block_size=64, batch_size=16, max_steps=200, learning_rate=0.02, eval_interval=1000, save_interval=1000,
                         keep_memory="false"))
    return folder / "run"


def findings(out_dir):
    """Return {name: last finding} of a run."""
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return {line["finding"]["name"]: line["finding"] for line in lines if "finding" in line}


def ailing(capsys, main, expected, out_dir, **knobs):
    """Run, and check that the doctor reports the expected finding within 20 steps, in the log and afterwards."""
    assert main(flags(out_dir=out_dir, **knobs)) == 0
    said = capsys.readouterr().out
    found = findings(out_dir)
    assert expected in found, (found, said[-3000:])
    assert found[expected]["since"] <= 20
    assert found[expected]["sentence"] in said
    assert diagnose.main([str(out_dir)]) in (0, 3)
    assert f"{expected}, s" in capsys.readouterr().out
    return found


BROKEN = {
    "never_right": ('return float(False), {"number": answer.isdigit()}', {}),
    "groups_alike": ('return 1.0, {"number": answer.isdigit()}', {}),
    "broken_verifier": ('return float(1 / (question["a"] % 4) > 0 and right), {}', {}),
    "part_never_paid": ('return float(right), {"right": right, "reasoned": "because" in answer}', {}),
    "part_always_paid": ('return 0.4 + 0.6 * right, {"right": right, "polite": True}', {"learning_rate": 1e-6}),
    "lengths_run_away": ('return min(len(completion), 40) / 80, {}', {"learning_rate": 3e-3, "max_new_tokens": 24, "max_steps": 20}),
    "greedy_falls": ('return float(answer == question["other"] if question["train"] else right), {}',
                  {"learning_rate": 3e-3, "eval_interval": 5, "eval_questions": 180, "max_steps": 20}),
    "rate_too_small": (HONEST, {"learning_rate": 1e-9}),
    "rate_too_large": (HONEST, {"learning_rate": 0.3}),
    "same_samples": (HONEST, {"temperature": 0.01}),
    "few_questions": (HONEST, {"num_questions": 16, "max_steps": 20}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_in_grpo_are_named(base, name, tmp_path, capsys):
    reward, knobs = BROKEN[name]
    task = first(tmp_path, reward)
    ailing(capsys, grpo.main, name, tmp_path / "run", **GRPO | dict(init_from=base, task=task) | knobs)


def uphill(monkeypatch):
    step = optim.apply_step

    def negated(optimizers, *others):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = p.grad if p.grad is None else -p.grad
        return step(optimizers, *others)
    monkeypatch.setattr(optim, "apply_step", negated)


@pytest.mark.parametrize("name, reward, knobs, spoil, said", [
    ("groups_alike", "return 0.4, {}", {}, None, "does not depend on the answer"),
    ("groups_alike", "return float(answer.isdigit()), {}", {}, None, "does not depend on the answer"),
    ("never_ends", HONEST, {"learning_rate": 3e-2, "max_steps": 8}, None, "lower --learning_rate=0.03"),
    ("never_ends", HONEST, {"temperature": 5}, None, "at --temperature=5 the model writes noise"),
    ("reward_fell", HONEST, {"learning_rate": 1e-3, "prompts_per_step": 48, "max_steps": 20}, uphill, "the sign of the loss"),
], ids=["constant", "form alone", "rate x 100", "temperature 5", "uphill"])
def test_only_the_cause_is_named(base, tmp_path, capsys, monkeypatch, name, reward, knobs, spoil, said):
    if spoil:
        spoil(monkeypatch)
    knobs = GRPO | dict(init_from=base, task=first(tmp_path, reward), max_steps=3) | knobs
    sentence = ailing(capsys, grpo.main, name, tmp_path / "run", **knobs)[name]["sentence"]
    assert said in sentence
    assert not any(other in sentence for other in ("too hard", "too easy", "raise --max_new_tokens"))


def test_correct_answers_are_graded_for_another_question(tmp_path):
    asked = [{"question": f"{a},0", "answer": str(a), "a": a, "train": True} for a in range(10, 20)]
    for reward, share in ((HONEST, 0), ("return float(answer.isdigit()), {}", 1)):
        with _pool.Pool(str(first(tmp_path, reward, f"{share}.py")), kind="serial") as pool:
            groups = [[Completion([1], [2], [], True, q, i, 0, q["answer"])] for i, q in enumerate(asked)]
            for (c,), grade in zip(groups, pool.score([(c.question, c.text) for (c,) in groups])):
                c.grade = grade
            assert metrics.paid_elsewhere(SimpleNamespace(pool=pool), groups) == share
            assert metrics.paid_elsewhere(SimpleNamespace(pool=pool), groups[:1]) is None
        doctor = Doctor([START, *lines(5, zero_variance=1.0, pass_at_1=1.0, paid_elsewhere=float(share))])
        assert ("too easy" in doctor.findings[0].sentence) == (not share)


def test_a_prompt_of_another_form_is_named(base, tmp_path, capsys):
    task = first(tmp_path, PROMPT="Q: {} A:")
    found = ailing(capsys, grpo.main, "other_prompts", tmp_path / "run", **GRPO | dict(init_from=base, task=task, max_steps=3))
    assert "'{}='" in found["other_prompts"]["sentence"]


def test_a_limit_that_cuts_every_completion_is_named(base, tmp_path, capsys):
    knobs = GRPO | dict(init_from=base, task=first(tmp_path, STOP="#"), max_new_tokens=1, max_steps=4)
    assert "raise --max_new_tokens" in ailing(capsys, grpo.main, "never_ends", tmp_path / "run", **knobs)["never_ends"]["sentence"]


def test_an_engine_with_old_weights_is_named(base, tmp_path, capsys, monkeypatch):
    load = engine.Engine.load

    def only_once(self, model):
        if not hasattr(self, "fingerprint"):
            load(self, model)
    monkeypatch.setattr(engine.Engine, "load", only_once)
    ailing(capsys, grpo.main, "stale_engine", tmp_path / "run", **GRPO | dict(init_from=base, task=first(tmp_path)))


def test_an_engine_that_samples_from_another_distribution_is_named(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grpo, "Sampling", lambda temperature, **others: sampler.Sampling(0.8 * temperature, **others))
    ailing(capsys, grpo.main, "engine_differs", tmp_path / "run", **GRPO | dict(init_from=base, task=first(tmp_path)))


PRETRAIN = dict(n_layer=2, n_embd=32, n_head=2, block_size=32, batch_size=8, max_steps=20, log_interval=1, warmup_steps=2, eval_interval=1000,
                save_interval=1000, learning_rate=0.02, keep_memory="false", device="cpu")


def slow_loader(monkeypatch):
    batches = data.batches

    def slowly(*args):
        for batch in batches(*args):
            time.sleep(0.1)
            yield batch
    monkeypatch.setattr(data, "batches", slowly)


def slow_machine(monkeypatch):
    step = optim.apply_step
    steps = iter(range(1000))

    def later(*args):
        time.sleep(0.8 if next(steps) > 13 else 0.05)
        return step(*args)
    monkeypatch.setattr(optim, "apply_step", later)


def wild_weights(monkeypatch):
    init = train.GPT.init_weights

    def wild(self):
        init(self)
        self.token_embedding.weight.data.mul_(50)
        self.head_weight.data.normal_(0, 2)
    monkeypatch.setattr(train.GPT, "init_weights", wild)


def jump(monkeypatch):
    lr_at = optim.lr_at
    monkeypatch.setattr(optim, "lr_at", lambda step, *others: lr_at(step, *others) * (200 if step == 14 else 1))


@pytest.mark.parametrize("name, knobs, spoil", [
    ("bad_start", {}, wild_weights),
    ("loss_spikes", {}, jump),
    ("loss_rises", {}, uphill),
    ("not_learning", {"learning_rate": 1e-5}, None),
    ("rate_too_small", {"learning_rate": 1e-9}, None),
    ("text_repeated", {"dataset": "short.txt"}, None),
    ("validation_rises", {"dataset": "short.txt", "eval_interval": 4, "learning_rate": 0.03, "n_embd": 64}, None),
    ("waits_for_data", {}, slow_loader),
    ("slower_than_before", {}, slow_machine),
], ids=lambda value: value if isinstance(value, str) else "")
def test_faults_in_train_are_named(text, name, knobs, spoil, tmp_path, capsys, monkeypatch):
    if "dataset" in knobs:
        path = tmp_path / knobs["dataset"]
        path.write_text("".join(random.Random(0).choices("abcdefgh", k=600)))
        knobs = knobs | {"dataset": path, "batch_size": 64}
    if spoil:
        spoil(monkeypatch)
    knobs = PRETRAIN | {"dataset": text, "data_dir": tmp_path / "tokens"} | knobs
    ailing(capsys, train.main, name, tmp_path / "run", **knobs)


@pytest.mark.parametrize("by", [1, -1], ids=["the inputs", "two ahead"])
def test_wrong_labels_are_not_memorisation(text, by, tmp_path, capsys, monkeypatch):
    batches = data.batches

    def shifted(*args):
        for batch in batches(*args):
            yield [(x, y.roll(by, 1)) for x, y in batch]
    monkeypatch.setattr(data, "batches", shifted)
    knobs = PRETRAIN | {"dataset": text, "data_dir": tmp_path / "tokens", "eval_interval": 5}
    found = ailing(capsys, train.main, "validation_rises", tmp_path / "run", **knobs)
    sentence = found["validation_rises"]["sentence"]
    assert "the labels or the evaluation are wrong" in sentence and "memorises" not in sentence


def test_healthy_runs_have_no_findings(base, text, tmp_path, capsys):
    """docs/diagnosis.md reports many more."""
    assert train.main(flags(**PRETRAIN, dataset=text, data_dir=tmp_path / "tokens", out_dir=tmp_path / "train")) == 0
    knobs = GRPO | dict(init_from=base, task=first(tmp_path), out_dir=tmp_path / "grpo", max_steps=20, eval_interval=10, eval_questions=180)
    assert grpo.main(flags(**knobs)) == 0
    assert "!" not in capsys.readouterr().out
    assert diagnose.main([str(tmp_path / "train"), str(tmp_path / "grpo")]) == 0
    assert diagnose.main([str(base)]) == 0
    assert diagnose.main([str(tmp_path / "grpo"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"run": str(tmp_path / "grpo"), "healthy": True, "findings": []}


# --- the doctor on made-up metrics ---

def lines(n, first=1, **figures):
    """Return n logged steps of GRPO, healthy except for some metrics, each a value or a function of the step."""
    healthy = dict(loss=0.0, lr=1e-3, grad_norm=0.1, updates=1, groups=32, reward=0.5, pass_at_1=0.5, zero_variance=0.4, truncated=0.0,
                   entropy=0.3, kl_old=0.0, clip_fraction=0.0, logprob_gap=1e-6, completion_tokens=50.0, errors=0, timeouts=0,
                   moved=1e-3, engine_stale=0.0, distinct=4.0, epoch=0.1, tokens_per_s=1000.0)
    result = []
    for step in range(first, first + n):
        result.append({"step": step} | {k: v(step) if callable(v) else v for k, v in (healthy | figures).items()})
    return result


START = {"step": 0, "config": dict(k_samples=8, prompts_per_step=32, max_new_tokens=100, learning_rate=1e-3, temperature=1.0),
         "settings": {"engine": "torch.bfloat16", "dtype": "bf16"}, "facts": {}}


@pytest.mark.parametrize("name, figures", {
    "never_right": {"pass_at_1": 0.0, "reward": 0.0, "parts/answered": 0.1},
    "never_ends": {"truncated": 0.9},
    "groups_alike": {"zero_variance": 0.97, "pass_at_1": 0.99},
    "broken_verifier": {"errors": 90, "timeouts": 80, "pass_at_1": 0.4},
    "engine_differs": {"logprob_gap": 0.3},
    "stale_engine": {"engine_stale": 1.0},
    "rate_too_small": {"moved": 0.0},
    "rate_too_large": {"kl_old": 0.5},
    "same_samples": {"distinct": 1.0, "zero_variance": 1.0},
    "lengths_run_away": {"completion_tokens": lambda step: 20.0 + 5 * step},
    "part_never_paid": {"parts/polite": 0.0},
    "part_always_paid": {"parts/polite": 1.0, "reward": 0.6, "pass_at_1": 0.2},
    "few_questions": {"epoch": 9.0},
    "slower_than_before": {"tokens_per_s": lambda step: 1000.0 if step < 10 else 300.0},
}.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_check_by_its_metrics(name, figures):
    assert not Doctor([START, *lines(15)]).findings
    doctor = Doctor([START, *lines(15, **figures)])
    assert [finding.name for finding in doctor.holding] == [name]
    assert doctor.holding[0].sentence.endswith(".") and "\n" not in doctor.holding[0].sentence


def test_metrics_without_values_are_no_finding_and_no_error():
    """A judge that is down while all samples are copies; entropies and a loss that were not finite."""
    assert not {f.name for f in Doctor([START, *lines(15, distinct=1.0, pass_at_1=None, entropy="nan")]).holding} - {"same_samples"}
    text = START | {"config": {"init_from": "scratch"}, "facts": {"vocabulary": 257, "steps_per_epoch": 20}}
    said = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": "nan"}, {"step": 2, "val_loss": 3.0}, {"step": 3, "loss": 2.0}, {"step": 3, "val_loss": 4.0}]
    Doctor([text, *said])


def test_a_reward_that_has_fallen():
    doctor = Doctor([START, *lines(20), *lines(5, first=21, reward=0.1, pass_at_1=0.1)])
    assert [finding.name for finding in doctor.holding] == ["reward_fell"]


@pytest.mark.parametrize("name, n", [("groups_alike", 8), ("never_right", 30)])
def test_a_policy_that_collapsed_is_not_told_to_ask_easier_questions(name, n):
    doctor = Doctor([START, *lines(1), *lines(n, first=2, reward=0.0, pass_at_1=0.0, zero_variance=1.0)])
    (sentence,) = [finding.sentence for finding in doctor.holding if finding.name == name]
    assert "50% were" in sentence and "lower --learning_rate" in sentence and "easier" not in sentence


@pytest.mark.parametrize("val_loss, epochs, said", [
    (2.5, 0.5, "labels"), (6.0, 5, "labels"), (2.5, 5, "memorises"), (6.0, 50, "memorises")])
def test_a_text_is_memorised_only_after_many_passes(val_loss, epochs, said):
    facts = {"vocabulary": 257, "steps_per_epoch": 20 / epochs}
    start = START | {"config": {"init_from": "scratch"}, "facts": facts}
    read = [{"step": step, "loss": 5.5 - 0.2 * step} for step in range(1, 21)]
    evaluated = [{"step": 10, "val_loss": 2.0}, {"step": 20, "val_loss": val_loss}]
    doctor = Doctor([start, *read[:10], evaluated[0], *read[10:], evaluated[1]])
    (sentence,) = [finding.sentence for finding in doctor.holding if finding.name == "validation_rises"]
    assert said in sentence


@pytest.mark.parametrize("entropy, differs", [(0.03, True), (0.5, False)])
def test_the_rounding_limit_depends_on_entropy(entropy, differs):
    doctor = Doctor([START, *lines(8, logprob_gap=0.015, entropy=entropy)])
    assert differs == ("engine_differs" in [finding.name for finding in doctor.holding])


def test_a_chat_template_that_can_not_be_read():
    doctor = Doctor([START | {"facts": {"unread_template": True}}, *lines(4)])
    assert [finding.name for finding in doctor.holding] == ["other_prompts"]


def test_noise_is_not_a_finding():
    def noisy(step):
        return 0.5 + 0.25 * math.sin(1e4 * step)
    assert not Doctor([START, *lines(300, reward=noisy, pass_at_1=noisy, zero_variance=noisy)]).findings
    assert not Doctor([START, *lines(40, moved=lambda step: 0.0 if step % 2 else 1e-3, errors=lambda step: int(step == 7))]).findings


def test_a_finding_begins_and_ends_once():
    doctor = Doctor([START])
    events = []
    for line in lines(30, truncated=lambda step: 0.9 if step <= 12 else 0.0):
        events += [(line["step"], finding.until) for finding in doctor.look(line)]
    assert len(events) == 2 and events[0] == (3, None) and events[1][1] == events[1][0] > 12
    assert not doctor.holding and len(doctor.findings) == 1


def test_a_resumed_run_keeps_its_findings():
    broken = lines(30, truncated=lambda step: 0.9 if step <= 12 else 0.0)
    whole = Doctor([START, *broken])
    resumed = Doctor([START, *broken[:9], START])
    assert resumed.holding
    for line in broken[7:]:                                    # two steps that are run again
        resumed.look(line)
    assert [f.as_json() for f in resumed.findings] == [f.as_json() for f in whole.findings]


def test_old_runs_and_missing_metrics_are_no_error(tmp_path):
    old = [{"step": step, "loss": "nan", "reward": None, "tokens_per_s": True} for step in range(1, 9)]
    assert not Doctor([{"step": 0, "config": {"k_samples": 4}}, *old]).findings
    assert not Doctor([*old, {"step": 8, "val_loss": "nan"}, {"step": 9, "val_accuracy": None}]).findings
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\nnot json\n[1]\n{"loss": 1}\n{"step": 2, "lo')
    assert diagnose.main([str(run)]) == 0


def test_a_long_history_stays_short():
    doctor = Doctor([START, *lines(checks.MAX_LINES + 200)])
    assert len(doctor.run.steps) <= checks.MAX_LINES and doctor.run.steps[0]["step"] == 1


def test_no_run_is_a_sentence(tmp_path, capsys):
    for argv in ([], [str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            guard.run(diagnose.main, argv)
        assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")


# --- the campaign on the quickstart ---

@pytest.mark.parametrize("name", breakages.BROKEN)
def test_each_breakage_is_a_task_with_options_of_grpo(name, tmp_path):
    _, pays, knobs = breakages.BROKEN[name]
    (tmp_path / "task.py").write_text(breakages.TASK.format(pays))
    task = tasks.load(str(tmp_path / "task.py"))
    question = task.questions("train", n=1)[0]
    paid = [task.reward(question, completion) for completion in (task.solution(question), "I do not know.")]
    scores = [score for score, _ in paid]
    aimed = {"nothing_paid": [0, 0], "all_paid": [1, 1], "any_answer": [1, 0], "always_a_part": [1, 0.4],
             "wrong_sign": [0, 1], "constant": [0.4, 0.4]}
    if name in aimed:
        assert scores == aimed[name]
    elif breakages.BROKEN[name][1].startswith(breakages.HONEST):
        assert scores == [1, 0]
    config.load(grpo.Config, flags(task=tmp_path / "task.py", **knobs))


def test_breakages_in_code(monkeypatch):
    monkeypatch.setattr(engine.Engine, "load", engine.Engine.load)
    monkeypatch.setattr(grpo, "Sampling", grpo.Sampling)
    honest = engine.Engine.load
    breakages.spoil("stale_engine")
    breakages.spoil("other_distribution")
    assert engine.Engine.load is not honest
    assert grpo.Sampling(temperature=1.0).temperature == 0.7
