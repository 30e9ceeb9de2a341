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
import train
from conftest import flags
from doctor import checks, diagnose
from doctor.diagnose import Doctor
from engine import sampler
from rollouts import metrics
from rollouts.pipeline import Completion
from runtime import guard, optim
from runtime.config import BadInput
from tasks import _pool
from tasks._pool import Grade
from text import data, examples, facts
from text.tokenizer import Tokenizer

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
    "right_unpaid": ('return float(False), {"number": answer.isdigit()}', {}),
    "ignores_question": ('return 1.0, {"number": answer.isdigit()}', {}),
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
    "paid_unlike": ("import os; return float(os.urandom(1)[0] < 128), {}", {"max_steps": 4}),
    "paid_by_length": ("return 1 - len(completion) / 10, {}", {"max_steps": 4, "temperature": 2}),
    "beta_too_large": (HONEST, {"beta": 10, "max_steps": 3}),
    "one_prompt": (HONEST, {"prompts_per_step": 1, "max_steps": 3}),
    "decay_too_strong": (HONEST, {"weight_decay": 300, "max_steps": 3}),
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


def of_the_next(monkeypatch):
    """Each group gets the advantages of the next one."""
    original = grpo.set_advantages

    def rolled(cfg, groups):
        original(cfg, groups[1:] + groups[:1])
        rows = [[c.advantage for c in group] for group in groups]
        for group, row in zip(groups, rows[1:] + rows[:1]):
            for c, advantage in zip(group, row):
                c.advantage = advantage
    monkeypatch.setattr(grpo, "set_advantages", rolled)


@pytest.mark.parametrize("name, reward, knobs, spoil, said", [
    ("ignores_question", "return 0.4, {}", {}, None, "does not depend on the answer"),
    ("ignores_question", "return float(answer.isdigit()), {}", {}, None, "does not depend on the answer"),
    ("right_unpaid", "return float(right if question['a'] % 2 else not right), {}", {}, None, "the wrong sign"),
    ("never_ends", HONEST, {"learning_rate": 3e-2, "max_steps": 8}, None, "lower --learning_rate=0.03"),
    ("never_ends", HONEST, {"temperature": 5}, None, "at --temperature=5 the model writes noise"),
    ("reward_fell", HONEST, {"learning_rate": 1e-3, "prompts_per_step": 48, "max_steps": 20}, uphill, "the sign of the loss"),
    ("advantages_unlike_rewards", HONEST, {}, of_the_next, "Check their order"),
], ids=["constant", "form alone", "half negated", "rate x 100", "temperature 5", "uphill", "the next group's advantages"])
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
    monkeypatch.setattr(engine.Engine, "load", lambda self, model: None)
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
    "task_never_right": {"a/pass_at_1": 0.7, "a/reward": 0.7, "a/groups": 16, "b/pass_at_1": 0.0, "b/reward": 0.0, "b/groups": 16},
    "right_unpaid": {"right_unpaid": 0.5, "pass_at_1": 0.0, "reward": 0.0, "zero_variance": 1.0},
    "never_ends": {"truncated": 0.9},
    "ignores_question": {"paid_elsewhere": 1.0, "truncated": 0.9, "truncated_score": 0.8},
    "truncated_unpaid": {"truncated": lambda step: (0.29, 0.18, 0.24, 0.38)[step % 4], "truncated_score": 0.01,
                         "reward": 0.625},
    "replies_too_long": {"reply_too_long": 0.2, "truncated": 0.0, "zero_variance": 0.95},
    "one_answer": {"most_common_share": 0.94, "most_common_questions": 18, "most_common_text": "five words", "reward": lambda step: 0.3 + 0.05 * step,
                   "distinct": 1.05, "zero_variance": 0.95},
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
    "paid_for_replies": {"paid_replies": 0.3},
    "few_questions": {"epoch": 9.0},
    "paid_unlike": {"copies_paid_unlike": 0.2},
    "advantages_unlike_rewards": {"advantage_fit": 0.1},
    "paid_by_length": {"length_fit": 1.0},
    "steps_skipped": {"skipped_steps": lambda step: 2 * step},
    "slower_than_before": {"tokens_per_s": lambda step: 1000.0 if step < 10 else 300.0},
}.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_check_by_its_metrics(name, figures):
    assert not Doctor([START, *lines(15)]).findings
    doctor = Doctor([START, *lines(15, **figures)])
    assert [finding.name for finding in doctor.holding] == [name]
    assert doctor.holding[0].sentence.endswith(".") and "\n" not in doctor.holding[0].sentence


@pytest.mark.parametrize("figures", [
    {"truncated": 0.3, "truncated_score": 0.2}, {"truncated": 0.05, "truncated_score": 0.0},
    {"truncated": lambda step: 0.6 / step, "truncated_score": 0.0, "reward": lambda step: 0.1 + 0.05 * step},     # it learns to end
    {"most_common_share": 0.94, "most_common_questions": 18, "most_common_text": lambda step: str(step % 2)},      # a right one each time
    {"most_common_share": 0.94, "most_common_questions": 1, "most_common_text": "yes"}, {"reply_too_long": 0.05},
    {"completion_tokens": lambda step: max(15.0, 100.0 - 10 * step), "reward": lambda step: 0.1 + 0.05 * step},    # it stops rambling
    {"tokens_per_s": lambda step: 1000.0 if step < 10 else 300.0, "completions_per_s": 9.0}])
def test_paid_truncation_and_answers_in_common_are_healthy(figures):
    assert not Doctor([START, *lines(15, **figures)]).findings


@pytest.mark.parametrize("config, figures, said", [
    ({}, {"distinct": 1.0}, "the same random numbers"), ({}, {"distinct": lambda step: 8 / step**2}, "collapsed"),
    ({"temperature": 0.2}, {"distinct": 1.6}, "nearly greedy"), ({"inner_epochs": 16}, {"kl_old": 0.5}, "lower --inner_epochs=16"),
    ({"teacher": "t", "reward_weight": 0.0}, {"kl": 0.0}, "the model itself"), ({"temperature": 0.2}, {"distinct": 2.5}, ""),
    ({"temperature": 0.01}, {"distinct": 1.0, "zero_variance": 1.0, "pass_at_1": 1.0}, "nearly greedy"),         # not easy questions
    ({}, {"truncated": 0.9, "truncated_score": 0.9}, "the reward does not ask for an end"),
    ({}, {"truncated": 0.9, "truncated_score": 0.1}, "raise --max_new_tokens"),
    ({"overlong": "penalty"}, {"truncated": 0.9, "truncated_score": 0.9}, "raise --max_new_tokens"), ({"tis_cap": 2.0}, {"logprob_gap": 0.3}, ""),
    ({"overlong": "penalty"}, {"completion_tokens": lambda step: 20.0 + 5 * step}, "right: use a constant loss denominator"),
    ({"overlong": "penalty"}, {"completion_tokens": lambda step: 20.0 + 5 * step, "pass_at_1": lambda step: 0.1 + 0.03 * step}, ""),  # it learns to reason
    ({"teacher": "t", "reward_weight": 0}, {"zero_variance": 0.97, "pass_at_1": 0.99, "kl": 0.05}, ""),
    ({"teacher": "t", "reward_weight": 0}, {"pass_at_1": 0.0, "reward": 0.0, "kl": 0.05}, ""),
    ({"mini_batches": 4}, {"skipped_steps": lambda step: 2 * step, "grad_norm": "inf"}, "30 of 60 updates"),
    ({"mini_batches": 64}, {"skipped_steps": lambda step: 2 * step}, ""),
    ({"skip_solved": 2}, {"zero_variance": 0.97, "pass_at_1": 0.99}, "harder ones, or stop"),
    ({}, {"logprob_gap": 0.015, "entropy": 0.03}, "the engine samples from another"), ({}, {"logprob_gap": 0.015, "entropy": 0.5}, "")])    # rounding
def test_the_cause_depends_on_the_options_and_the_first_step(config, figures, said):
    start = START | {"config": START["config"] | config}
    doctor = Doctor([start, *lines(15, **figures)])
    assert len(doctor.holding) == bool(said) and all(said in finding.sentence for finding in doctor.holding)
    assert said or not doctor.findings


@pytest.mark.parametrize("init_from, first, second, norm, said", [
    ("out/base", 5.55, 5.2, 1.0, "untrained"), ("out/base", 5.55, 2.5, 1.0, ""), ("resume", 5.55, 5.2, 1.0, ""),
    ("scratch", 5.55, 5.56, 60.0, "zero_grad"), ("scratch", 5.55, 5.56, 2.0, "too small or too large")])
def test_an_untrained_start_and_gradients_that_add_up(init_from, first, second, norm, said):
    steps = [{"step": 1 + 5 * i, "loss": second if i else first, "lr": 1e-3, "grad_norm": norm if i else 1.0} for i in range(6)]
    doctor = Doctor([START | {"config": {"init_from": init_from}, "facts": {"vocabulary": 257}}, *steps])
    assert said in "".join(finding.sentence for finding in doctor.holding) and (said or not doctor.findings)


def test_the_same_text_for_all_questions_is_shown():
    figures = dict(most_common_share=0.94, most_common_questions=18, most_common_text="a b\nc d e", distinct=1.0)
    (paid,) = Doctor([START, *lines(1, reward=0.3), *lines(5, 2, reward=0.998, pass_at_1=0.9, **figures)]).holding
    assert '94% of the last step\'s completions, to 18 different questions, are the same text, "a b c d e"' in paid.sentence
    assert "depend on the question" in paid.sentence
    (lost,) = Doctor([START, *lines(1, reward=0.3), *lines(5, 2, reward=0.2, pass_at_1=0.1, **figures)]).holding
    assert "collapsed" in lost.sentence and "--learning_rate" in lost.sentence
    asked = [{"question": f"{i}?", "answer": ""} for i in range(4)]
    completions = [Completion([1], [2], [], True, asked[i % 4], i, 0, "same " if i < 6 else str(i)) for i in range(8)]
    assert metrics.most_common(completions) == {"most_common_share": 6 / 8, "most_common_questions": 4, "most_common_text": "same"}


FACTS = {"vocabulary": 257, "unit": "examples", "rows": 800, "distinct_rows": 790, "held_out_trained": 0.1, "distinct_answers": 40,
         "empty_answers": 0.0, "prompts_with_answer": 0.2, "teacher_loss": 2.0}


@pytest.mark.parametrize("name, facts, said", [
    (None, {}, ""), (None, {"rows": 10, "distinct_rows": 1}, ""), (None, {"unit": "documents", "distinct_rows": 40}, ""),
    ("repeated_rows", {"distinct_rows": 1}, "Only 1 of the first 800 examples"),
    ("held_out_trained", {"held_out_trained": 1.0}, "part of the training data (100% of its examples)"),
    ("prompts_with_answer", {"prompts_with_answer": 0.9}, "The answer stands in the prompt of 90%"),
    ("bad_targets", {"prompt_targets": 1.0}, "Prompts are trained on"),
    ("bad_targets", {"distinct_answers": 1}, "the same completion"), ("bad_targets", {"empty_answers": 0.6}, "60% of the completions are empty"),
    ("bad_targets", {"conflicting": 0.5}, "with different numbers"), ("untrained_teacher", {"teacher_loss": 5.6}, "the teacher is untrained"),
])
def test_facts_about_data(name, facts, said):
    doctor = Doctor([START | {"config": {"init_from": "out/base", "teacher": "t"}, "facts": FACTS | facts}, {"step": 1, "loss": 3.0}])
    assert [finding.name for finding in doctor.holding] == ([name] if name else [])
    assert said in "".join(finding.sentence for finding in doctor.holding)


def test_facts_are_those_of_the_data(tmp_path):
    tokenizer = Tokenizer("bytes")

    def of_text(train, valid):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, rows in (("train", train), ("valid", valid)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        tokens = data.prepare(str(folder), tokenizer, tmp_path / "tokens")
        return facts.facts_of_text(data.TokenFile(tokens, "train"), data.TokenFile(tokens, "valid"), tokenizer)

    def of_examples(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows))
        return facts.facts_of_examples(examples.read(path, tokenizer), [], tokenizer)

    own = [f"row {i} of the text" for i in range(100)]
    assert [of_text(own, own[:50])[key] for key in ("unit", "distinct_rows", "held_out_trained")] == ["documents", 99, 1]
    assert of_text(own, [f"another {i}" for i in range(30)])["held_out_trained"] == 0
    lines = of_text(["\n".join(own[:1] * 80)], ["\n".join(own)])
    assert (lines["unit"], lines["rows"], lines["distinct_rows"], lines["held_out_trained"]) == ("lines", 80, 1, 0.01)
    spaced = of_examples([("1 + 1", "2")] * 20 + [("1  + 1", "2")] * 10)
    assert (spaced["distinct_rows"], spaced["prompt_targets"], spaced["conflicting"]) == (1, 0, 0)
    assert of_examples([("1 + 1", f"{2 + i % 4}") for i in range(30)])["conflicting"] == 0.75
    assert of_examples([(f"{i} + 1 (so {i + 1})", f"{i + 1}") for i in range(30)])["prompts_with_answer"] == 1
    assert of_examples([("Say it.", f"words {i}") for i in range(30)])["conflicting"] == 0
    hinted = of_examples([(f"{i} + 1? (Answer: {i + 1})", f"{i + 1}") for i in range(30)])
    assert (hinted["prompts_with_answer"], hinted["distinct_answers"], hinted["empty_answers"]) == (1, 30, 0)
    for prompt in ("{} or {}?", "Is {} below {}? Answer yes or no."):
        answers = [("yes", "no")[i % 2] if "yes" in prompt else str(i + 1) for i in range(30)]
        assert of_examples([(prompt.format(i, i + 1), answer) for i, answer in enumerate(answers)])["prompts_with_answer"] == 0


def group_of(*members):
    """Return Completions of (text, score, advantage)."""
    return [Completion([1], [2], [], True, {}, 0, i, text, Grade(score, {}, "", None), reward=score, advantage=advantage)
            for i, (text, score, advantage) in enumerate(members)]


def test_metrics_of_rewards_and_advantages():
    honest = group_of(("a", 1.0, 0.5), ("b", 0.0, -0.5), ("a", 1.0, 0.5), ("b", 0.0, -0.5))
    solved = group_of(("a", 1.0, 0.0), ("c", 1.0, 0.0))
    assert metrics.advantage_fit([honest, solved]) == pytest.approx(1) and metrics.advantage_fit([solved]) is None
    equal = group_of(("a", 1.0, 0.4), ("c", 1.0, 0.4))       # with another baseline than the group's mean
    assert metrics.advantage_fit([honest, equal]) == pytest.approx(1) and metrics.advantage_fit([equal]) is None
    assert metrics.advantage_fit([group_of(("a", 1.0, 0.4), ("c", 1.0, -0.4))]) == 0
    assert metrics.copies_paid_unlike([honest, solved]) == 0 and metrics.copies_paid_unlike([solved]) is None
    wrong = group_of(("a", 1.0, -0.5), ("b", 0.0, 0.5), ("a", 0.0, 0.5), ("b", 0.0, -0.5))
    assert metrics.copies_paid_unlike([honest, wrong]) == pytest.approx(1 / 4) and metrics.advantage_fit([wrong]) < 0
    by_length = [group_of(*[("x" * n, 1 - n / 10, 0.0) for n in (1, 2, 3, 4, 4)]) for _ in range(6)]
    assert metrics.length_fit(by_length) == pytest.approx(1) and metrics.length_fit([honest] * 6) is None
    mixed = [group_of(*[("x" * n, (n + i) % 5 / 5, 0.0) for n in (1, 2, 3, 4, 4)]) for i in range(6)]
    assert metrics.length_fit(mixed) < 0.5
    copies = [group_of(*[("x" * n, ((3 * n + i) % 7) / 7, 0.0) for n in (1 + i, 1 + i, 9 + i, 9 + i)]) for i in range(6)]
    assert metrics.length_fit(copies) is None          # copies say nothing about the length


@pytest.mark.parametrize("epoch, slope, name, said", [
    (3.0, 0.02, "memorised", "memorises"), (0.5, 0.02, "greedy_falls", "no question has been asked twice"),
    (0.5, 0.0, "greedy_falls", "does not rise (0.30 to 0.30)"), (3.0, -0.002, "greedy_falls", "more harm than good; lower --learning_rate")])
def test_nothing_is_memorised_in_the_first_epoch(epoch, slope, name, said):
    evaluated = [{"step": step, "val_accuracy": share, "val_accuracy_low": share - 0.05, "val_accuracy_high": share + 0.05}
                 for step, share in ((0, 0.8), (10, 0.5), (20, 0.5))]
    steps = lines(20, reward=lambda step: 0.3 + step * slope, epoch=epoch)
    doctor = Doctor([START, evaluated[0], *steps[:10], evaluated[1], *steps[10:], evaluated[2]])
    assert [finding.name for finding in doctor.holding] == [name] and said in doctor.holding[0].sentence


@pytest.mark.parametrize("losses, rises", [
    ([0.18, 0.12, 0.13, 0.08, 0.09, 0.06, 0.05, 0.06, 0.04, 0.037, 0.047], False),        # a healthy fine-tuning
    ([0.18, 0.12, 0.10, 0.09, 0.095, 0.103, 0.112, 0.12, 0.129, 0.137], True), ([0.4, 0.6], True), ([0.4, 0.45], False),
    ([2.86, 2.67, 2.79, 2.80], True)])          # a sorted text: the last tenth is of another kind
def test_noise_of_validation_is_no_rise(losses, rises):
    start = START | {"config": {"init_from": "out/base"}, "facts": {"vocabulary": 257, "steps_per_epoch": 20}}
    read = [line for i, loss in enumerate(losses) for line in ({"step": 10 * i + 10, "loss": 0.2 / (i + 1)}, {"step": 10 * i + 10, "val_loss": loss})]
    assert ("validation_rises" in [finding.name for finding in Doctor([start, *read]).findings]) == rises


@pytest.mark.parametrize("losses, named", [([15.0, 12.0, 9.0, 7.0], False), ([15.0, 14.5, 14.0, 13.5], True)])
def test_a_model_of_other_text_recovers_and_one_of_another_tokenizer_does_not(losses, named):
    start = START | {"config": {"init_from": "out/base"}, "facts": {"vocabulary": 257}}
    steps = [{"step": step, "loss": loss} for step, loss in zip((1, 5, 10, 15), losses)]
    doctor = Doctor([start, *steps, {"step": 15, "val_loss": losses[-1]}])
    assert [finding.name for finding in doctor.holding] == ["bad_start"] * named


@pytest.mark.parametrize("waits, named", [((0.9, 0.01, 0.01, 0.01), False), ((0.1, 0.5, 0.5, 0.5), True)])
def test_the_first_step_may_wait_for_data(waits, named):
    steps = [{"step": 10 * i + 1, "loss": 2.0, "data_s": wait, "forward_backward_s": 0.5} for i, wait in enumerate(waits)]
    doctor = Doctor([START | {"config": {"init_from": "out/base"}, "settings": {"num_workers": 0}}, *steps])
    assert [finding.name for finding in doctor.holding] == ["waits_for_data"] * named
    assert all("--num_workers=2 (now 0)" in finding.sentence for finding in doctor.holding)


def test_metrics_without_values_are_no_finding_and_no_error():
    """A judge that is down while all samples are copies; entropies and a loss that were not finite."""
    assert not {f.name for f in Doctor([START, *lines(15, distinct=1.0, pass_at_1=None, entropy="nan")]).holding} - {"same_samples"}
    text = START | {"config": {"init_from": "scratch"}, "facts": {"vocabulary": 257, "steps_per_epoch": 20}}
    said = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": "nan"}, {"step": 2, "val_loss": 3.0}, {"step": 3, "loss": 2.0}, {"step": 3, "val_loss": 4.0}]
    Doctor([text, *said])


def test_a_reward_that_has_fallen():
    doctor = Doctor([START, *lines(20), *lines(5, first=21, reward=0.1, pass_at_1=0.1)])
    assert [finding.name for finding in doctor.holding] == ["reward_fell"]
    start = START | {"config": START["config"] | {"skip_solved": 1}}
    assert not Doctor([start, *lines(20), *lines(5, first=21, reward=0.1, pass_at_1=0.1)]).holding     # of the questions that are left


def test_an_option_that_is_on_is_not_advised():
    advice = "replace such groups with --dynamic_sampling=true"
    for is_on in (False, True):
        start = START | {"config": START["config"] | {"dynamic_sampling": is_on}}
        (finding,) = Doctor([start, *lines(15, zero_variance=0.97, pass_at_1=0.99)]).holding
        assert (advice in finding.sentence) == (not is_on)


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


def pretrained(steps, **figures):
    return [{"step": step, "lr": 1e-3, "grad_norm": 1.0, "loss": 5.0, "tokens_per_s": 1000.0, "moved": 1e-3, "seconds": 10.0 * step}
            | {k: v(step) if callable(v) else v for k, v in figures.items()} for step in steps]


def test_losses_of_the_warm_up_say_nothing():
    start = {"step": 0, "config": {"init_from": "scratch", "learning_rate": 1e-3, "warmup_steps": 2000}, "settings": {}, "facts": {}}
    said = [[finding.name for finding in Doctor([start, *pretrained([1, 10, 20, 30], **figures)]).findings] for figures in (
        {"lr": lambda step: 1e-3 * step / 2000}, {}, {"grad_norm": lambda step: 4.0 if step < 30 else "inf"})]
    assert said == [[], ["not_learning"], ["not_learning"]]


def test_skipped_steps_are_no_small_ones():
    start = {"step": 0, "config": {"init_from": "scratch", "learning_rate": 1e-3}, "settings": {}, "facts": {}}
    assert not Doctor([start, *pretrained(range(1, 12), moved=0.0, grad_norm="nan", loss=lambda step: 5 - 0.1 * step)]).findings


def test_another_machine_and_a_short_hiccup_are_not_slowness():
    start = {"step": 0, "config": {"init_from": "scratch", "learning_rate": 1e-3}, "settings": {"ranks": 8}, "facts": {}}
    falls = {"loss": lambda step: 5 - 0.01 * step}
    before, after = pretrained(range(1, 11), **falls), pretrained(range(11, 30), tokens_per_s=250.0, **falls)
    assert [finding.name for finding in Doctor([start, *before, *after]).findings] == ["slower_than_before"]
    assert not Doctor([start, *before, start | {"step": 10, "settings": {"ranks": 2}}, *after]).findings
    quick = {"seconds": lambda step: 0.05 * step, **falls}
    assert not Doctor([start, *pretrained(range(10, 110, 10), **quick), *pretrained((110, 120, 130), tokens_per_s=250.0, **quick)]).findings


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


def test_a_resumed_run_from_scratch_is_still_one():
    """The line of a resume has init_from=resume."""
    start, again = ({"step": step, "config": {"init_from": name, "learning_rate": 1e-3}, "settings": {}, "facts": {}}
                    for step, name in ((0, "scratch"), (20, "resume")))
    flat = [{"step": step, "loss": 5.0, "lr": 1e-3, "grad_norm": 0.1, "moved": 1e-3} for step in range(1, 41)]
    doctor = Doctor([start, *flat[:20], again, *flat[20:]])
    assert [finding.name for finding in doctor.holding] == ["not_learning"]


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


def test_a_run_without_a_step_is_not_called_healthy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"time": 1, "config": {}, "settings": {}}\n')
    with pytest.raises(BadInput, match="has logged no step yet"):
        diagnose.main([str(tmp_path)])
