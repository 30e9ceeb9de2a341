"""grpo.py --teacher: the KL divergence from another model on the student's own samples."""
import contextlib
import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import hub.weights
from conftest import count_graphs, flags, largest_difference, run, trained, weights
from experimental.distillation import Teacher, check_teacher, find_teacher
from runtime import config, hardware, memory
from runtime.config import BadInput
from runtime.distributed import TrainedModel
from test_grpo import GRPO, apart, base, gradient, in_ranks, learn, letters, lines, one_thread, same, watched  # noqa: F401
from test_tokenizer import SMOL, write as write_tokenizer
from text import examples
from text.tokenizer import Tokenizer

ALONE = dict(beta=1.0, reward_weight=0.0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, text):
    """A larger model, which has seen more."""
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    trained(folder, text, max_steps=40, learning_rate=0.02, dtype="fp32", n_layer=3, n_embd=48)
    return folder


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_gradient_is_that_of_the_reverse_divergence_on_the_sampled_tokens(learn, watched, base, teacher, temperature):
    """That of -(log p_teacher - log p_student) log p_student, with the first factor held, summed over tokens and divided by their number."""
    out = learn(teacher=teacher, max_steps=1, grad_clip=0, temperature=temperature, **ALONE)
    student, other, ((*groups,),) = hub.find(str(base)).load(), hub.find(str(teacher)).load(), watched.groups
    loss, tokens = 0.0, 0
    for c in (c for group in groups for c in group):
        ids, at = torch.tensor([c.prompt + c.ids]), slice(len(c.prompt) - 1, -1)
        new, given = ((model(ids)[0, at].double() / temperature).log_softmax(-1).gather(1, ids[0, len(c.prompt):, None])[:, 0] for model in (student, other))
        loss = loss - ((given - new).detach() * new).sum()
        tokens += len(c.ids)
    (loss / tokens).backward()
    assert apart(gradient(out), torch.cat([p.grad.flatten() for name, p in sorted(student.named_parameters())])) < 1e-4
    (line,) = lines(out)
    assert line["kl"] > 0.05 and gradient(out).norm() > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_gradient_is_that_of_the_forward_divergence_over_all_ids(learn, watched, base, teacher, temperature):
    out = learn(teacher=teacher, max_steps=1, grad_clip=0, temperature=temperature, distill="forward", tokens_per_micro_batch=96, **ALONE)
    student, other, ((*groups,),) = hub.find(str(base)).load(), hub.find(str(teacher)).load(), watched.groups
    loss, tokens = 0.0, 0
    for c in (c for group in groups for c in group):
        ids, at = torch.tensor([c.prompt + c.ids]), slice(len(c.prompt) - 1, -1)
        ours, theirs = ((model(ids)[0, at].double() / temperature).log_softmax(-1) for model in (student, other))
        loss = loss + (theirs.detach().exp() * (theirs.detach() - ours)).sum()
        tokens += len(c.ids)
    (loss / tokens).backward()
    assert apart(gradient(out), torch.cat([p.grad.flatten() for name, p in sorted(student.named_parameters())])) < 1e-4
    (line,) = lines(out)
    assert line["kl"] == pytest.approx((loss / tokens).item(), rel=1e-4)


def test_without_rewards_the_forward_divergence_alone_is_differentiated(learn, teacher, monkeypatch):
    """The other pass has a gradient of 0, and its figures are logged."""
    knobs = dict(teacher=teacher, max_steps=3, distill="forward", beta=1.0)
    token_logprobs, kept, always = TrainedModel.token_logprobs, [], []

    def watched(model, *inputs):
        with torch.enable_grad() if always else contextlib.nullcontext():
            logprobs, entropy = token_logprobs(model, *inputs)
        kept.append(logprobs.requires_grad)
        return logprobs, entropy
    monkeypatch.setattr(TrainedModel, "token_logprobs", watched)
    out = learn("without", reward_weight=0.0, **knobs)
    assert kept and not any(kept)
    always.append(True)
    other = learn("with", reward_weight=0.0, **knobs)
    assert all(kept[-3:]) and same(weights(out, 3), weights(other, 3))
    names = ("loss", "kl", "entropy", "logprob_gap", "kl_old", "clip_fraction", "grad_norm")
    assert [[line[name] for name in names] for line in lines(out)] == [[line[name] for name in names] for line in lines(other)]
    always.clear()
    learn("rewards", reward_weight=1.0, **knobs)
    assert all(kept[-3:])


def test_the_rehearsal_computes_the_forward_divergence(learn, teacher, monkeypatch):
    count_graphs(monkeypatch)
    called = []
    for name in ("token_logprobs", "divergence"):
        def watched(*arguments, name=name, method=getattr(TrainedModel, name)):
            called.append(name)
            return method(*arguments)
        monkeypatch.setattr(TrainedModel, name, watched)
    learn(teacher=teacher, max_steps=1, distill="forward", beta=1.0, compile=True)
    assert called == 3 * ["token_logprobs", "divergence"] and "failed" not in learn.said


@pytest.mark.parametrize("distill, ids", [("forward", 300), ("reverse", 257)])
def test_a_teacher_may_have_unused_ids_and_its_tokenizer_in_another_file(learn, teacher, tmp_path, distill, ids):
    """Qwen2.5-7B pads 151,665 tokens to 152,064 ids and Qwen2.5-0.5B to 151,936; a run of train.py has GPT-2's tokenizer by name, GPT-2 XL as a file."""
    wide = hub.find(str(teacher)).load()
    wide.config = dataclasses.replace(wide.config, vocab_size=ids)          # rows that training left unused
    hub.weights.export(wide, tmp_path / "exported", Tokenizer("bytes"))
    one, other = (learn(name, teacher=it, distill=distill, max_steps=1, **ALONE) for name, it in (("one", teacher), ("other", tmp_path / "exported")))
    assert largest_difference(weights(one, 1), weights(other, 1)) < 1e-5


def test_the_student_approaches_the_teacher_and_rewards_count_beside_it(learn, teacher):
    for distill in ("forward", "reverse"):
        alone = lines(learn(distill, teacher=teacher, max_steps=30, prompts_per_step=12, distill=distill, **ALONE))
        assert alone[-1]["kl"] < 0.6 * alone[0]["kl"]
    both = lines(learn("both", teacher=teacher, max_steps=45, prompts_per_step=12, beta=0.05))
    assert sum(line["reward"] for line in both[-5:]) > 2 * sum(line["reward"] for line in alone[-5:])


def test_a_resumed_run_and_two_ranks(learn, base, letters, teacher, tmp_path):
    knobs = dict(teacher=teacher, max_steps=4, save_interval=2, keep_last=9, beta=0.5, lora_rank=2, learning_rate=0.02)
    out = learn(**knobs)
    whole = weights(out, 4)
    (out / "checkpoints" / "step_00000004").rename(out / "gone")       # as if killed before it
    learn(**knobs, init_from="resume")
    assert same(weights(out, 4), whole) and not same(weights(out, 2), whole)
    step = dict(teacher=teacher, max_steps=1, grad_clip=0, beta=0.5)
    kinds = ("reverse", "forward")
    in_ranks(tmp_path, {d: flags(**GRPO | dict(init_from=base, task=letters, out_dir=tmp_path / d, distill=d) | step) for d in kinds})
    for d in kinds:
        assert apart(gradient(tmp_path / d), gradient(learn(f"{d} alone", distill=d, **step))) < 1e-5


# --- train.py ---

def by_hand(student, other, ids, is_target, weight):
    """Return the loss of one row: weight times the divergence plus the rest times the cross entropy, in float64."""
    ours, theirs = (model(ids[:, :-1])[0].double().log_softmax(-1)[is_target] for model in (student, other))
    theirs = theirs.detach()
    nats = -ours.gather(1, ids[0, 1:][is_target][:, None]).sum()
    return weight * (theirs.exp() * (theirs - ours)).sum() + (1 - weight) * nats


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_step_of_fine_tuning_is_that_of_both_losses(base, teacher, tmp_path, weight):
    """Of examples that begin alike, so that their beginning is computed once."""
    rows = [["the cat sat " + w, "1", w + " ran"] for w in ("here", "there", "away", "up")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    trained(tmp_path / "run", tmp_path / "rows.json", init_from=base, teacher=teacher, teacher_weight=weight, prompt="{}", max_steps=1, grad_clip=0, dtype="fp32",
            optimizer="adamw", learning_rate=1e-3, warmup_steps=0)
    student, other, loss, n = hub.find(str(base)).load(), hub.find(str(teacher)).load(), 0.0, 0
    for example in examples.read(tmp_path / "rows.json", hub.find(str(base)).tokenizer(None), "{}"):
        is_target = torch.from_numpy(example.is_target[1:])
        loss = loss + by_hand(student, other, torch.from_numpy(example.ids)[None], is_target, weight)
        n += int(is_target.sum())
    (loss / n).backward()
    expected = torch.cat([p.grad.flatten() for name, p in sorted(student.named_parameters())])
    assert apart(gradient(tmp_path / "run"), expected) < 1e-4
    (line,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if "grad_norm" in line]
    assert line["loss"] == pytest.approx((loss / n).item(), rel=1e-4)


def test_the_trial_step_has_the_teachers_memory(teacher, text, tmp_path, monkeypatch):
    rehearsed, trials = [], []
    loss, rehearse = Teacher.loss, memory.rehearse

    def watched(*arguments, **options):
        before = len(rehearsed)
        result = rehearse(*arguments, **options)
        trials.append((len(rehearsed) > before, result))
        return result
    monkeypatch.setattr(Teacher, "loss", lambda *arguments: rehearsed.append(arguments) or loss(*arguments))
    monkeypatch.setattr(memory, "rehearse", watched)
    trained(tmp_path / "run", text, teacher=teacher, max_steps=1)
    assert trials == [(True, None)]


def test_the_loss_of_a_text_counts_all_positions(base, teacher):
    cfg = SimpleNamespace(teacher_weight=0.3, parallel="ddp")
    student, other = hub.find(str(base)).load(), hub.find(str(teacher)).load()
    guide = Teacher(cfg, hardware.setup("cpu", "fp32", compile=False), hub.find(str(teacher)))
    ids = torch.randint(256, (3, 33), generator=torch.Generator().manual_seed(0))
    found = guide.loss(TrainedModel(student), ids[:, :-1], ids[:, 1:])
    every = torch.ones(32, dtype=torch.bool)
    assert found.item() == pytest.approx(sum(by_hand(student, other, row[None], every, 0.3).item() for row in ids), rel=1e-5)


def test_training_with_a_teacher_resumes_bit_for_bit(teacher, text, tmp_path):
    """Also if the teacher's own run has gone on: a resumed run keeps the checkpoint that it began with."""
    out, own = tmp_path / "run", shutil.copytree(teacher, tmp_path / "teacher")
    trained(out, text, teacher=own, dropout=0.1)
    whole = weights(out)
    (out / "checkpoints" / "step_00000020").rename(out / "gone")       # as if killed before it
    trained(own, text, init_from="resume", max_steps=60, n_layer=3, n_embd=48, keep_last=9)
    assert hub.find(own).step == 60
    trained(out, text, init_from="resume")
    assert same(weights(out), whole)
    (own / "checkpoints/step_00000040").rename(own / "deleted")        # as by keep_last
    done = run(out, text, init_from="resume")
    assert done.returncode == 2 and "no longer has the checkpoint of step 40" in done.stderr
    shutil.rmtree(own)
    trained(own, text, max_steps=40, n_layer=3, n_embd=48, seed=1)          # other weights after as many steps
    done = run(out, text, init_from="resume", max_steps=30)
    assert done.returncode == 2 and "The weights of the teacher" in done.stderr
    trained(tmp_path / "two", text, teacher=teacher, dtype="fp32", ranks=2)
    trained(tmp_path / "one", text, teacher=teacher, dtype="fp32")
    assert largest_difference(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-4


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_resumed_run_refuses_a_teacher_with_another_description(teacher, tmp_path, name):
    """Other rotary positions, for one, would change the loss in silence."""
    folder = tmp_path / "teacher"
    source = hub.find(teacher)
    hub.weights.export(source.load(), folder, source.tokenizer())
    if name == "tokenizer.json" and not (folder / name).exists():
        (folder / name).write_text("{}")
    cfg = SimpleNamespace(teacher=str(folder), out_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    recorded = find_teacher(cfg, resuming=False).identity(cfg.teacher)
    (tmp_path / "run/model.json").write_bytes(config.seal({"teacher": recorded}))
    assert find_teacher(cfg, resuming=True).identity(cfg.teacher) == recorded
    described = json.loads((folder / name).read_text()) | {"rope_theta": 2e4}
    (folder / name).write_text(json.dumps(described))
    with pytest.raises(BadInput, match="The architecture or tokenizer of the teacher"):
        find_teacher(cfg, resuming=True)


def refuse(reason):
    raise BadInput(reason)


def test_teachers_that_are_refused(learn, base, teacher, tmp_path, text, monkeypatch):
    learn("weight", code=2, teacher=teacher)
    assert "--beta=1" in learn.error
    for words, knobs in {"without --teacher": dict(distill="forward", beta=1), "another loss": dict(teacher=teacher, distill="forward", beta=1, loss_type="grpo"),
                         "nothing is left": dict(reward_weight=0),
                         "--parallel=ddp": dict(teacher=teacher, distill="forward", beta=1, parallel="fsdp")}.items():
        learn("refused", code=2, **knobs)
        assert words in learn.error
    monkeypatch.setattr("runtime.memory.check_weights", lambda shape, device, ranks, remedy=None: remedy and refuse(remedy))
    learn("large", code=2, teacher=teacher, beta=1)
    assert "choose a smaller teacher, or for a reference model train adapters" in learn.error
    monkeypatch.undo()
    trained(tmp_path / "short", text, max_steps=1, block_size=16)
    learn("refused", code=2, teacher=tmp_path / "short", beta=1, max_new_tokens=12, prompts_per_step=4)
    assert "has 16 positions" in learn.error
    trained(tmp_path / "other", text, max_steps=1, tokenizer=write_tokenizer(tmp_path / "words"))
    learn("refused", code=2, teacher=tmp_path / "other", beta=1)
    assert "another tokenizer" in learn.error
    learn("short", code=2, teacher=tmp_path / "short", beta=1, overwrite=True)
    assert "both --out_dir and --teacher" in learn.error and hub.find(tmp_path / "short").step == 1


def test_a_chat_teacher_of_a_model_without_a_template_is_said(tmp_path, capsys):
    chat, plain = (Tokenizer(write_tokenizer(tmp_path / str(n), "smol", chat=template)) for n, template in enumerate((SMOL, None)))
    source = SimpleNamespace(folder="out/teacher", tokenizer=lambda: chat, config=SimpleNamespace(vocab_size=512, block_size=64))
    check_teacher(source, chat, 400, 64)
    assert capsys.readouterr().err == ""
    check_teacher(source, plain, 400, 64)
    assert "out/teacher has a chat template and the trained model has none" in capsys.readouterr().err
