"""Tasks that respond: from the reward workers to the gradient, the files, and the commands."""
import json
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import forked
import hub
import tasks
from conftest import ROOT, environment, flags, weights
from engine import Request, Sample
from model import IGNORE
from rollouts.episodes import Environment
from rollouts.metrics import only_replies_answer
from rollouts.pipeline import Completion
from tasks import _pool, unit_conversion as plain
from tasks._pool import Pool
from test_grpo import GRPO, TASK, apart, base, gradient, in_ranks, learn, letters, lines, one_thread, plainly, same, watched  # noqa: F401
from test_tokenizer import SMOL, write as write_tokenizer
from text import examples
from text.tokenizer import Tokenizer

# The model's turn ends at an o; the environment says how long the text is, or nothing more.
EPISODES = TASK + '''
TURN_STOP = "o"
MAX_TURNS = 3

def respond(question, text):
    return f"<{len(text)}a>" if len(text) % 3 else None
'''
RULES = dict(max_new_tokens=16, k_samples=6)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "episodes.py"
    path.write_text(EPISODES.replace('STOP = "a"', 'STOP = "i"', 1).replace('endswith("a")', 'endswith("i")'))
    return path


def is_own(completion):
    """Return for each id of a Completion whether the model wrote it."""
    return [not any(first <= t < last for first, last in completion.forced) for t in range(len(completion.ids))]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_gradient_is_that_of_the_models_tokens_given_everything_before_them(learn, watched, base, episodes, loss_type):
    out = learn(task=episodes, max_steps=1, grad_clip=0, loss_type=loss_type, tokens_per_micro_batch=128, **RULES)
    model, logp, advantage, ((*groups,),) = hub.find(str(base)).load(), [], [], watched.groups
    completions = [c for group in groups for c in group]
    assert sum(bool(c.forced) for c in completions) > 5 and max(len(c.forced) for c in completions) == 2
    for group in groups:
        rewards = torch.tensor([c.reward for c in group], dtype=torch.float64)
        for c, a in zip(group, rewards - rewards.mean()):
            logits = model(torch.tensor([c.prompt + c.ids]))[0].double()
            logp.append(torch.stack([logits[len(c.prompt) + t - 1].log_softmax(0)[i] for t, i in enumerate(c.ids) if is_own(c)[t]]))
            advantage.append(a)
    lengths = [len(row) for row in logp]
    assert lengths == [c.n_sampled for c in completions] and max(lengths) <= 16
    logp = torch.nn.utils.rnn.pad_sequence(logp, batch_first=True)
    plainly(logp, logp.detach(), logp.detach(), advantage, lengths, loss_type, 0.2, 0.28, None, logp.detach(), 0.0, 16).backward()
    expected = torch.cat([p.grad.flatten() for name, p in sorted(model.named_parameters())])
    assert apart(gradient(out), expected) < 1e-4
    (line,) = lines(out)
    assert line["logprob_gap_max"] < 1e-5 and line["completion_tokens"] == pytest.approx(sum(lengths) / len(lengths))


def test_ids_are_those_of_the_rollout_and_texts_are_what_was_said(learn, watched, base, episodes):
    learn(task=episodes, max_steps=2, **RULES)
    tokenizer = hub.find(str(base)).tokenizer(None)
    sampled = {(tuple(s.request.ids), tuple(s.ids)): s for s in watched.samples}
    for groups in watched.groups:
        for c in (c for group in groups for c in group):
            s = sampled[tuple(c.prompt), tuple(c.ids)]
            assert c.logprobs == s.logprobs and "".join(c.turns) == c.text and len(c.turns) == 2 * len(c.forced) + 1
            for (first, last), said, reply in zip(c.forced, c.turns[::2], c.turns[1::2]):
                assert said.endswith("o") and tokenizer.decode(c.ids[first:last]) == reply
                before = "".join(c.turns[:c.turns.index(reply)])
                assert reply == f"<{len(before)}a>" and len(before) % 3
    for batch in watched.batches:
        for x, y in zip(batch.x.tolist(), batch.y.tolist()):
            last = max(t for t, target in enumerate(y) if target != IGNORE)
            assert all(y[t] in (IGNORE, x[t + 1]) for t in range(last))


def test_a_reply_that_does_not_fit_is_another_end_than_the_limit(learn, watched, episodes, tmp_path):
    (tmp_path / "long.py").write_text(episodes.read_text().replace('f"<{len(text)}a>"', '"a" * 40'))
    out = learn(task=tmp_path / "long.py", max_steps=1, **RULES)
    reasons = [c.reason for groups in watched.groups for group in groups for c in group]
    assert {*reasons} == {"stop", "length", "reply"}
    (line,) = lines(out)
    assert (line["truncated"], line["reply_too_long"]) == pytest.approx([reasons.count(r) / len(reasons) for r in ("length", "reply")])
    assert f" | cut off {line['truncated']:.0%} | replies too long {line['reply_too_long']:.0%}" in learn.said


def test_stopped_and_resumed_equals_a_run_that_was_not_bit_for_bit(learn, episodes):
    knobs = dict(task=episodes, max_steps=4, save_interval=2, keep_last=9, eval_interval=2, **RULES)
    out = learn(**knobs)
    whole = weights(out, 4)
    (out / "checkpoints" / "step_00000004").rename(out / "gone")       # as if killed before it
    learn(**knobs, init_from="resume")
    assert same(weights(out, 4), whole) and not same(weights(out, 2), whole)


def test_two_ranks_take_the_step_of_one(learn, episodes, base, tmp_path):
    knobs = dict(task=episodes, max_steps=1, grad_clip=0, **RULES)
    in_ranks(tmp_path, {"two": flags(**GRPO | dict(init_from=base, out_dir=tmp_path / "two") | knobs)})
    assert apart(gradient(tmp_path / "two"), gradient(learn("one", **knobs))) < 1e-5


# --- an environment that misbehaves ---

MISCHIEF = '''
import time
def reward(question, completion):
    return 1.0
def respond(question, text):
    if text == "hang":
        time.sleep(60)
    if text == "die":
        import os
        os._exit(3)
    return {"raise": [], "long": "x" * 10**6, "empty": "", "number": 7, "surrogate": "a\\ud800b", "end": None}.get(text, text[::-1])[0:]
'''


@pytest.mark.parametrize("kind", ["process", "thread", "serial"])
def test_replies_and_their_errors(tmp_path, kind):
    (tmp_path / "mischief.py").write_text(MISCHIEF.replace('[0:]', ''))
    asked = ["abc", "raise", "long", "empty", "number", "surrogate", "end", "abc"] + ["die", "hang", "abc"] * (kind == "process")
    with Pool(str(tmp_path / "mischief.py"), workers=2, timeout=2.0, kind=kind) as pool:
        pool.submit({}, "graded all the same")
        found = [pool.take(future) for future in [pool.respond({}, text) for text in asked]]
        assert [reply.text for reply in found] == ["cba", None, None, None, None, "a?b", None, "cba"] + [None, None, "cba"] * (kind == "process")
        words = [None, "returned", "1,000,000 characters: return a text", "0 characters", "it returned 7: return a text", None, None, None]
        words += ["the worker died", "timed out after 2 s", None] * (kind == "process")
        for reply, word in zip(found, words, strict=True):
            assert reply.error is None if word is None else word in reply.error and "respond()" in reply.error
        if kind == "process":                # the beginnings that datagen.py and metrics.jsonl look for
            assert found[8].error.startswith("the worker died") and found[9].error == "timed out after 2 s in respond()"
        assert [grade.score for grade in pool.collect(wait=True)] == [1.0]


@pytest.mark.parametrize("kind", ["process", "thread", "serial"])
def test_the_turns_reach_the_reward(tmp_path, kind):
    (tmp_path / "own.py").write_text("def reward(question, completion, turns):\n    return 1.0, {'|'.join(turns): True}\n"
                                     "def respond(question, text):\n    pass\n")
    with Pool(str(tmp_path / "own.py"), workers=1, kind=kind) as pool:
        pool.submit({}, "abc", ["a", "b", "c"])
        pool.submit({}, "abc")
        assert [grade.parts for grade in pool.collect(wait=True)] == [{"a|b|c": True}, {"abc": True}]
        assert pool.score([({}, "ab", ["a", "b", ""])])[0].parts == {"a|b|": True}


class Words:
    """A tokenizer whose ids are texts."""
    stop = ()
    is_chat = False

    def text_of(self, ids):
        return "".join(ids)


@pytest.mark.parametrize("name, own, asked", [
    ("unit_conversion_tool", [["<calc>2 * 3", "</calc>."], ["<calc>6 * 4", "</calc>.\n"]], "<calc>2 * 3</calc> = 6<calc>6 * 4</calc>"),
    ("guess", [["15", "\n\n"], ["20", "\n\n"]], "15\n = 620\n")])
def test_an_environment_gets_the_text_up_to_the_end_of_a_turn(name, own, asked):
    """Without the characters behind it that share its last token; the turns of the episode keep them, as the ids do."""
    heard = []
    environment = Environment(tasks.load(name), Words(), SimpleNamespace(respond=lambda question, text: heard.append(text)), {0: {}})
    ids = own[0] + [" = 6"] + own[1]
    sample = Sample(Request([1]), 0, ids, forced=[(2, 3)], replies=[" = 6"])
    assert environment.ask(sample) and heard == [asked] and sample.ids == ids
    assert environment.turns(sample, ids) == ["".join(own[0]), " = 6", "".join(own[1])]


@pytest.mark.parametrize("turns, answer, alone", [
    (["where?", "in Rome.", "ok"], "Rome", True), (["where?", "in Rome.", "rome!"], "Rome", False), (["Rome?", "Rome.", ""], "Rome", False),
    (["a", "1,000 12", "5 120"], "12", True), (["a", "12", "12.0"], "12", False), (["a", "b", ""], "Rome", False), (["a", "b", ""], "", False),
    (["a", "None", ""], None, False), (["a", "7", ""], 7, True)])
def test_an_answer_that_the_environment_alone_wrote(turns, answer, alone):
    assert only_replies_answer(Completion([], [], [], True, {"answer": answer}, forced=[(1, 2)], turns=turns)) == alone


LOOK_UP = """
plain = questions

def questions(split, seed=0, n=None):
    return [question | {"answer": "Rome"} for question in plain(split, seed, n)]

def respond(question, text):
    return "<Rome>"

def reward(question, completion, turns):
    return float("Rome" in READ)
"""


@pytest.mark.parametrize("read, paid", [("completion", 1), ("turns[-1]", None), ("completion + 'Rome'", 0)])
def test_a_reward_that_pays_for_the_environments_text_is_measured(learn, episodes, tmp_path, read, paid):
    """One that is paid without it, too, is another fault."""
    (tmp_path / "own.py").write_text(episodes.read_text() + LOOK_UP.replace("READ", read))
    out = learn(task=tmp_path / "own.py", max_steps=1, **RULES)
    (line,) = lines(out)
    assert line["replies"] > 0.3 and line["paid_replies"] == paid


def test_a_function_that_always_fails_ends_the_run_whatever_the_other_does(tmp_path):
    for works, fails in (("reward", "respond"), ("respond", "reward")):
        (tmp_path / "own.py").write_text(f"def {works}(question, text):\n    return {'1' if works == 'reward' else repr('x')}\n"
                                         f"def {fails}(question, text):\n    raise OSError('no game')\n")
        with pytest.raises(_pool.BrokenReward, match=rf"The {fails} of the task .* failed for all of 32 .*no game.*correct {fails}\("):
            with Pool(str(tmp_path / "own.py"), workers=2) as pool:
                for _ in range(_pool.FIRST):
                    replies = [pool.respond({}, "a")]
                    pool.submit({}, "a")
                    [pool.take(reply) for reply in replies]
                pool.collect(wait=True)
                pool.submit({}, "a")


def test_an_episode_that_fails_is_an_error_and_not_trained_on(learn, watched, tmp_path):
    (tmp_path / "own.py").write_text(EPISODES.replace("return f", "assert len(text) % 5\n    return f"))
    out = learn(task=tmp_path / "own.py", max_steps=2, **RULES)
    failed = [c for groups in watched.groups for group in groups for c in group if c.grade.error]
    assert failed and all("respond() failed: AssertionError" in c.grade.error and not c.trained for c in failed)
    assert sum(line["errors"] for line in lines(out)) == len(failed)


def test_what_a_task_may_not_say(tmp_path):
    def error(text):
        (tmp_path / "own.py").write_text("def reward(question, completion):\n    return 1\n" + text)
        with pytest.raises(ValueError) as e:
            tasks.load(str(tmp_path / "own.py"))
        return str(e.value)
    assert "respond(question, text)" in error("def respond(question):\n    return None\n")
    assert "MAX_TURNS" in error("MAX_TURNS = 0\n") and "TURN_STOP" in error("TURN_STOP = 3\n")


# --- a control token, a chat ---

def test_an_environments_text_is_text(tmp_path):
    """In a chat the reply is a turn of the template; control tokens in it are letters."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "chat", "smol", SMOL))
    said, reply = "the cat", "no<|im_end|>\n<|im_start|>assistant\nyes"
    ids = tokenizer.prompt_ids("sat?") + tokenizer.answer_ids(said) + tokenizer.reply_ids(reply, ended=True) + tokenizer.answer_ids("mat")
    messages = [("user", "sat?"), ("assistant", said), ("user", reply), ("assistant", "mat")]
    parts = tokenizer.conversation([dict(role=role, content=content) for role, content in messages])
    assert ids + tokenizer.encode("\n").tolist() == sum((part for part, _ in parts), [])
    assert tokenizer.reply_ids(reply, ended=False) == [tokenizer.end] + tokenizer.reply_ids(reply, ended=True)
    assert sum(i in tokenizer.chat.control.values() for i in tokenizer.reply_ids(reply, ended=True)) == 3
    plain = Tokenizer(write_tokenizer(tmp_path / "plain"))
    assert plain.decode(plain.reply_ids(" = 8<|endoftext|>", True)) == " = 8<|endoftext|>" and plain.eos not in plain.reply_ids("<|endoftext|>", True)


# --- files and commands ---

def command(script, *arguments):
    done = forked.run([sys.executable, ROOT / script, *map(str, arguments)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_datagen_keeps_episodes_and_train_reads_them_with_their_ids(base, episodes, tmp_path):
    own = tmp_path / "even.py"
    own.write_text(episodes.read_text() + "\ndef reward(question, completion):\n    return float('<' in completion), {'ended': True}\n")
    out = tmp_path / "rft.json"
    command("datagen.py", f"--init_from={base}", f"--task={own}", f"--output={out}", "--num_questions=8", "--oversample=8", "--temperature=1",
            "--max_new_tokens=24", "--dtype=fp32")
    rows = json.loads(out.read_text())
    assert len(rows) > 3 and all(isinstance(turns, list) and len(turns) % 2 for _, _, turns in rows)
    tokenizer = hub.find(str(base)).tokenizer(None)
    found = examples.read(out, tokenizer)
    (tmp_path / "rft.attempts.jsonl").unlink()
    again = examples.read(out, tokenizer, form="{}")
    for (question, _, turns), example, other in zip(rows, found, again, strict=True):
        assert tokenizer.decode(example.ids[:-1]) == question + "".join(turns)
        assert tokenizer.decode(example.ids[example.is_target][:-1]) == "".join(turns[::2])
        if "\N{REPLACEMENT CHARACTER}" not in "".join(turns):              # of bytes
            assert example.ids.tolist() == other.ids.tolist() and example.is_target.tolist() == other.is_target.tolist()
    figures = json.loads(command("eval.py", base, f"--task={own}", "--num_questions=6", "--max_new_tokens=24", "--temperature=1", "--num_samples=4",
                                 "--json", f"--output={tmp_path / 'answers.jsonl'}").splitlines()[-1])
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert figures["accuracy"] == sum("<" in answer["completion"] for answer in answers) / 24 > 0
    shown = command("sample.py", base, f"--task={own}", "--prompt=the 1", "--num_samples=20", "--temperature=1", "--max_new_tokens=24")
    assert re.search(r"o«<\d+a>»", shown)


def test_worked_examples_of_a_task_that_responds_are_played(tmp_path):
    """Their calls are targets, the results are not."""
    for tokenizer in (Tokenizer(write_tokenizer(tmp_path / "plain")), Tokenizer(write_tokenizer(tmp_path / "chat", "smol", SMOL))):
        found = examples.read("examples:unit_conversion_tool", tokenizer)[:50]
        for example, question in zip(found, tasks.load("unit_conversion_tool").questions("train", n=50)):
            said = tasks.load("unit_conversion_tool").solution(question)
            own = tokenizer.decode(example.ids[example.is_target]).replace("<|im_end|>", "").replace("<|endoftext|>", "")
            assert own == re.sub(r"</calc> = [\d.]*\d", "</calc>", said) and tokenizer.is_chat == ("<|im_start|>user\n = " in tokenizer.decode(example.ids))


def test_what_an_environment_writes_ends_no_completion(learn, watched, tmp_path):
    """Its text has the task's stop, and the grade sees all of the episode."""
    (tmp_path / "own.py").write_text(EPISODES.replace("a>", "a> a") + """
def reward(question, completion):
    return 1.0 / (1 + len(completion)), {}
""")
    learn(task=tmp_path / "own.py", max_steps=1, **RULES)
    completions = [c for groups in watched.groups for group in groups for c in group if c.forced]
    assert completions and all(c.grade.score == pytest.approx(1 / (1 + len(c.text))) and "a> a" in c.text for c in completions)


def test_ids_of_a_logged_episode_are_not_made_anew(tmp_path):
    """Ids that encoding the texts again would not give; of a chat, whose end of a turn the model wrote or not."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "chat", "smol", SMOL))
    letters = [tokenizer.encode(c).tolist()[0] for c in "the cat"]
    assert letters != tokenizer.encode("the cat").tolist()
    for ended in (True, False):
        said = letters + [tokenizer.end] * ended
        reply = tokenizer.reply_ids("no", ended)
        record = {"number": 0, "sample": 0, "question": "q", "answer": "a", "completion": "the cat\nno\nthe cat", "ids": said + reply + letters,
                  "turns": ["the cat", "no", "the cat"], "forced": [[len(said), len(said) + len(reply)]], "verdict": "verified"}
        header = {"config": {}, "tokenizer": tokenizer.describe(), "model": "", "questions": "", "prompt": "{}"}
        (tmp_path / "rft.attempts.jsonl").write_text(examples.line_of(header) + examples.line_of(record))
        (tmp_path / "rft.json").write_text(json.dumps([["q", "a", ["the cat", "no", "the cat"]]]))
        (example,) = examples.read(tmp_path / "rft.json", tokenizer)
        prompt = tokenizer.prompt_ids("q")
        assert example.ids.tolist() == prompt + said + reply + letters + [tokenizer.end]
        assert example.is_target.tolist() == [False] * len(prompt) + [True] * len(said) + [False] * len(reply) + [True] * (len(letters) + 1)


# --- the tasks of this repository that respond ---

def test_the_calculator_computes_what_the_documents_say():
    task = tasks.load("unit_conversion_tool")
    share = [("<calc>" in document) for document in task.documents("valid")]
    assert 0.25 < sum(share) / len(share) < 0.35
    for level in "123":                          # results are the calculator's in the text too, and in wrong documents
        task = tasks.load(f"unit_conversion_tool:{level}")
        rng = random.Random(level)
        for question in task.questions("train", n=700):
            said = task.solution(question)
            assert task.verified(*task.reward(question, said)) and "</calc> = " in said, said
            wrong = task.module.with_calls(plain.wrong_solution(question, rng, ("ratio", "inverse"), parts=False))
            for text in (said, wrong):
                for call in re.finditer(r"</calc>( = -?[\d.]*\d)", text):
                    assert task.respond(question, text[:call.start()] + "</calc>") == call[1], text

    def answer(expression):
        return task.respond({}, f"so <calc>{expression}</calc>")
    assert [answer(e) for e in ("344 * 24", "5 * 9 / 4", "1 - 3 + 0.5", "-2 * 3")] == [" = 8256", " = 11.25", " = -1.5", " = -6"]
    wrong = ("1 / 0", "2 + 3 * 4", "12 * x", "2", "", "9 ** 9", "1e9 * 2", "__import__('os')", "9" * 16 + " * 2", " * ".join(["2"] * 7))
    assert {answer(e) for e in wrong} == {" = ?"} and task.respond({}, "344 * 24</calc>") is None
    assert task.respond({}, "<calc>2 * 3</calc>") == " = 6" and task.respond({}, "<calc>2 * 3</calc> = 6. So it is 6") is None


@pytest.mark.parametrize("said, wasted", [
    ("<calc>2 * 3</calc> = 6. <answer>6</answer>", False), ("2 * 3 = 6. <answer>6</answer>", False),
    ("<calc>2 * 3</calc> = 6. <calc>6 * 4</calc> = 24. <answer>24</answer>", False), ("<calc>2 * 3</calc> = 6. <answer>7</answer>", True),
    ("<calc>2 x 3</calc> = ?. <answer>6</answer>", True), ("<calc>2 * 3</calc> = 6. <calc>2 * 3</calc> = 6. <answer>6</answer>", True),
    ("<calc>2 * 3</calc>\n = 6\n. <answer>6</answer>", False), ("<calc>2 * 3</calc>", True), ("<calc>1 * 1</calc> = 1. <answer>6</answer>", True),
    ("<calc>1 * 1</calc> = 1. 1 week = 7 day. 2 * 16 = 32. <answer>16</answer>", True), ("<calc>1 * 6</calc> = 6. <answer>6000</answer>", True)])
def test_a_wasted_call_is_a_part_of_the_grade_and_costs_no_reward(said, wasted):
    task = tasks.load("unit_conversion_tool")
    question = {"question": "Convert 2 x to y.", "answer": "6", "n": "2", "from": "week", "to": "day", "level": 1}
    score, parts = task.reward(question, said)
    assert parts["no_waste"] == (not wasted) and score == ("<answer>6<" in said)


def test_guessing_by_halves_wins_every_game():
    task = tasks.load("guess")
    ways = {way: 0 for way in task.module.WAYS}
    rng = random.Random(0)
    for question in task.questions("test", n=200):
        for way in ways:
            text = task.module.play(question, rng, way)
            ways[way] += task.reward(question, text)[0]
            lines = text.splitlines(keepends=True)
            for i in range(0, len(lines) - 1, 2):
                assert task.respond(question, "".join(lines[:i + 1])) == lines[i + 1]
    assert ways["halves"] == 200 > ways["within"] > 1.3 * ways["anywhere"]
    assert task.respond({"answer": "7"}, "3\n\n") == "higher\n" and task.reward({"answer": "7"}, "3\n\nhigher\n7\n\n")[0] == 1
    assert task.respond({"answer": "7"}, "\n") is None and task.reward({"answer": "7"}, "3\nhigher\n")[0] == 0
    assert task.respond({"answer": "7"}, "no idea\n") is None and task.respond({"answer": "7"}, "3\nhigher\n" + "9" * 5000 + "\n") == "lower\n"
