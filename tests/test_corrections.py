"""A task's correct(): right next lines at states of the model's own completions."""
import random

import pytest
import torch

import hf
import tasks
from conftest import flags, weights
from rollouts.corrections import line_ends
from tasks import countdown_search
from test_grpo import GRPO, TASK, apart, base, gradient, in_ranks, learn, letters, lines, one_thread, same, watched  # noqa: F401

LINES = TASK.replace('STOP = "a"', 'STOP = "i"').replace('endswith("a")', 'endswith("i")') + '''
def correct(question, text):
    assert not text or text.endswith("\\n")
    return ["the mat\\n", "a cat\\n"] if text.count("\\n") < 3 else []
'''
ALONE = dict(corrections=2, reward_weight=0.0, max_new_tokens=16)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "lines.py"
    path.write_text(LINES)
    return path


def test_the_gradient_is_that_of_the_cross_entropy_at_the_models_own_states(learn, watched, base, written):
    out = learn(task=written, max_steps=1, grad_clip=0, correction_weight=0.5, **ALONE | dict(max_new_tokens=28, corrections=4))
    model, ((*groups,),), tokenizer = hf.find(str(base)).load(), watched.groups, hf.find(str(base)).tokenizer(None)
    own = [c for group in groups if len(group) == 4 for c in group]
    added = [group[0] for group in groups if len(group) == 1]
    assert len(own) == 16 and 4 < len(added) <= 16 and all(c.advantage == 0 for c in own)
    loss = 0.0
    for c in added:
        assert c.text in ("the mat\n", "a cat\n") and tokenizer.decode(c.ids) == c.text
        states = [o.prompt + o.ids[:n] for o in own for n in line_ends(tokenizer, o.ids)]
        assert c.prompt in states
        logits = model(torch.tensor([c.prompt + c.ids]))[0].double()
        logp = logits[len(c.prompt) - 1:-1].log_softmax(-1).gather(1, torch.tensor(c.ids)[:, None])[:, 0]
        assert c.logprobs == pytest.approx(logp.tolist(), abs=1e-4)
        loss = loss - 0.5 * logp.sum()
    assert any(len(c.prompt) > len(own[0].prompt) + 2 for c in added)
    (loss / sum(len(c.ids) for c in own + added)).backward()
    assert apart(gradient(out), torch.cat([p.grad.flatten() for name, p in sorted(model.named_parameters())])) < 1e-4
    (line,) = lines(out)
    assert line["corrections/number"] == len(added) and line["corrections/nats"] > 0.5


def test_they_are_learnt_beside_the_reward(learn, written):
    said = lines(learn(task=written, max_steps=25, prompts_per_step=8, **ALONE | dict(reward_weight=1.0)))
    assert said[-1]["corrections/nats"] < 0.7 * said[0]["corrections/nats"]


def test_resumed_and_by_two_ranks(learn, base, written, tmp_path):
    knobs = dict(task=written, max_steps=4, save_interval=2, keep_last=9, mini_batches=2, **ALONE | dict(reward_weight=1.0))
    out = learn(**knobs)
    whole = weights(out, 4)
    (out / "checkpoints" / "step_00000004").rename(out / "gone")       # as if killed before it
    learn(**knobs, init_from="resume")
    assert same(weights(out, 4), whole)
    step = dict(task=written, max_steps=1, grad_clip=0, **ALONE)
    in_ranks(tmp_path, {"two": flags(**GRPO | dict(init_from=base, out_dir=tmp_path / "two") | step)})
    assert apart(gradient(tmp_path / "two"), gradient(learn("one", **step))) < 1e-5


def test_tasks_and_functions_that_are_refused(learn, letters, tmp_path):
    learn("none", code=2, **ALONE)
    assert "has no correct(question, text)" in learn.error
    (tmp_path / "own.py").write_text(TASK + "def correct(question, text):\n    return 'a line'\n")
    with pytest.raises(TypeError, match="return a list of texts"):
        tasks.load(str(tmp_path / "own.py")).correct({}, "")


# --- countdown_search ---

def test_a_search_that_is_continued_reaches_the_target_and_tries_nothing_again():
    found = 0
    for question in countdown_search.questions("train", n=100, argument="3"):
        text = ""
        while "." not in text:
            (line,) = countdown_search.correct(question, text)
            assert line.endswith((".", "\n")) and line not in text.splitlines(keepends=True)
            text += line
        states = [line.partition("|")[0] for line in text.splitlines()[:-1]]
        looks = [state for state in states if state.count(" ") == 1]
        assert len(set(looks)) == len(looks)
        found += countdown_search.reward(question, text)[0]
    assert found == 100


def test_right_next_lines_of_a_search():
    question = {"question": "67 from 5 8 15", "answer": "67", "numbers": [5, 8, 15]}
    text = "5 8 15|67: 8*5=40\n15 40|67: 40+15=55< 40-15=25<\n"
    assert countdown_search.correct(question, text)[0] == "5 8 15|67: 15*5=75\n"
    text += "5 8 15|67: 15*5=75\n"
    assert countdown_search.correct(question, text) == ["8 75|67: 75+8=83> 75-8=67!\n"]
    text += "8 75|67: 75+8=83> 75-8=67!\n"
    assert countdown_search.correct(question, text) == ["answer: 75-8=67 15*5=75."]
    for wrong in ("5 8 15|67: 8*5=41\n", "no search\n", text + "answer: 75-8=67 15*5=75.", "1 67|67: 67*1=67!\n", "5 7 15|67: 15*5=75\n",
                  "5 8 15|99: 15*5=75\n", "5 8 15|67: 8*5=40\n15 40|67: 40+15=55!\n", "5 8 15|67: 8*5=40\n3 64|67: 64+3=67!\n",
                  "5 8 15|67: 15*5=75\n8 75|67: 75-8=67! 75+8=83>\n"):
        assert countdown_search.correct(question, wrong) == []
    assert countdown_search.correct({"question": "7 from 3 4", "answer": "7", "numbers": [3, 4]}, "") == ["3 4|7: 4+3=7!\n"]
