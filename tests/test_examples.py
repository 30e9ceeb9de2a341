"""Fine-tuning on chosen answers: what is trained on, in which batches, and that it goes on exactly."""
import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

import hub
import tasks
from conftest import ROOT, largest_difference, metrics, run, trained, weights
from model import GPT, GPTConfig, IGNORE
from rollouts import pipeline, questions
from runtime import checkpoint
from runtime.config import BadInput
from test_tokenizer import QWEN3, SMOL, write
from text import examples, prompts
from text.datasets import mean_flops
from text.rows import form_of
from text.tokenizer import Tokenizer

TUNE = dict(batch_size=8, gradient_accumulation_steps=2, num_epochs=2, optimizer="adamw", learning_rate=0.003, warmup_steps=None,
            lr_schedule="cosine", log_interval=1, dtype="fp32", keep_last=9)
RECORD = {"number": 0, "sample": 0, "question": "q", "answer": 42, "completion": "", "ids": [], "logprob": -1.0, "verdict": "verified",
          "score": 1.0, "parts": {}, "signature": "", "error": None}                     # of the log of attempts


def rows_of(n, seed=0):
    """Triples of very unequal lengths."""
    rng = random.Random(seed)
    return [[f"What is {i} and {'so ' * rng.randrange(6)}on?", i, f"{i} + 0 = {i}." * rng.randrange(1, 4) + f"<answer>{i}</answer>"]
            for i in range(n)]


@pytest.fixture(scope="module")
def rft(tmp_path_factory):
    path = tmp_path_factory.mktemp("rft") / "rft.json"
    path.write_text(json.dumps(rows_of(61)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "base"
    trained(folder, text, block_size=128, max_steps=2)
    return folder


def tune(out_dir, rft, base, **knobs):
    return trained(out_dir, rft, defaults=TUNE, init_from=base, **knobs)


def batches(path, tokenizer=None, per_step=16, rows=8, **knobs):
    return examples.Batches(examples.read(path, tokenizer or Tokenizer("bytes")), per_step, rows, seed=3, **knobs)


def tokenizers(folder):
    return [Tokenizer("bytes"), Tokenizer(write(folder / "plain")), Tokenizer(write(folder / "bos", bos=True)),
            Tokenizer(write(folder / "smol", "smol", chat=SMOL)), Tokenizer(write(folder / "qwen", "qwen", chat=QWEN3))]


def test_what_is_trained_on_is_the_completion_and_its_end_and_it_follows_the_prompt_that_is_sampled_from(rft, tmp_path):
    for tokenizer in tokenizers(tmp_path):
        for e, (question, _, reasoning) in zip(examples.read(rft, tokenizer), rows_of(61)):
            prompt = prompts.prompt_ids(tokenizer, question)
            assert e.ids.tolist() == prompt + tokenizer.encode(reasoning).tolist() + [tokenizer.end]
            assert np.flatnonzero(e.is_target).tolist() == list(range(len(prompt), len(e.ids)))
            x, y, _ = examples.padded([e, e], e.length)
            assert x[0, len(prompt) - 1] == prompt[-1] and y[0, :len(prompt) - 1].eq(IGNORE).all()
            assert y[1, len(prompt) - 1:].tolist() == e.ids[len(prompt):].tolist()       # each id is the target of the one before


def test_an_epoch_has_every_example_once_in_steps_of_about_equal_numbers(rft):
    b = batches(rft)
    assert b.steps_per_epoch == 4
    orders = []
    for epoch in range(3):
        steps = [b.of_step(4 * epoch + k) for k in range(4)]
        assert {len(s) for s in steps} == {15, 16} and all([e.length for e in s] == sorted((e.length for e in s), reverse=True) for s in steps)
        seen = [e.question for s in steps for e in s]
        assert sorted(seen) == sorted(e.question for e in b.examples)
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert [e.question for e in batches(rft).of_step(9)] == [e.question for e in b.of_step(9)]       # seed and step say it all


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_ranks_and_micro_batches_share_a_step(rft, world):
    whole = batches(rft)
    assert max(len(x) for x, *_ in whole[0]) == 8
    most_rows = 0
    for step in (0, 1, 2, 3, 7):
        got, cells = [], 0
        for rank in range(world):
            mine = batches(rft, rank=rank, world_size=world)
            mine.micro_batch = 2
            for x, y, index in mine[step]:
                assert index.tolist() == (y.flatten() != IGNORE).nonzero()[:, 0].tolist()
                assert len(x) <= 8 and x.numel() <= 2 * mine.longest        # micro_batch counts the longest examples
                assert x.shape[1] % 8 == 0 or x.shape[1] in (1, mine.longest)
                got += [tuple(row[row != IGNORE].tolist()) for row in y]
                cells += x.numel()
                most_rows = max(most_rows, len(x))
        expected = whole.of_step(step)
        assert sorted(filter(None, got)) == sorted(tuple(e.ids[e.is_target].tolist()) for e in expected)
        positions, targets = whole.tokens(step)
        assert positions == sum(e.length for e in expected) and targets == sum(map(len, got))
    # sorted by length: few cells are empty, and more of the short ones go together
    assert world > 1 or cells < 1.3 * positions and most_rows > 2


def test_micro_batches_and_ranks_make_no_difference(rft, base, tmp_path):
    """One normaliser: the targets of the whole step, whatever their share in a micro-batch."""
    whole = tune(tmp_path / "whole", rft, base, batch_size=16, gradient_accumulation_steps=1)
    assert "61 examples" in whole.stdout and "steps 0 to 8: 2.00 epochs" in whole.stdout
    for name, knobs in (("pieces", dict(batch_size=2, gradient_accumulation_steps=8)), ("ranks", dict(ranks=2, batch_size=1, gradient_accumulation_steps=16))):
        tune(tmp_path / name, rft, base, **knobs)
        for key in ("loss", "grad_norm", "tokens"):
            a, b = metrics(tmp_path / name, key), metrics(tmp_path / "whole", key)
            assert a.keys() == b.keys() == set(range(9)) - {0} and all(abs(a[s] - b[s]) < 1e-5 * max(1, b[s]) for s in a), (name, key)
        assert largest_difference(weights(tmp_path / name, 8), weights(tmp_path / "whole", 8)) < 1e-4
    assert checkpoint.steps(tmp_path / "whole") == [4, 8]                  # the ends of its epochs


def test_the_logged_loss_is_the_mean_over_the_answers(rft, base, tmp_path):
    tune(tmp_path / "a", rft, base, max_steps=1, batch_size=16, gradient_accumulation_steps=1)
    assert metrics(tmp_path / "a")[1] == pytest.approx(first_loss(rft, base), abs=1e-5)


def alike(path, n=21, before="You answer with one word, in capitals. ", rest=3):
    """Examples that begin alike, as with a system message."""
    rng = random.Random(0)
    rows = [{"prompt": f"{before}{'on ' * rng.randrange(rest)}{i}?", "completion": f"{i} " * rng.randrange(1, 4)} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("before, rest, expected", [
    ("You answer with one word, in capitals. ", 3, 39),
    ("You answer with one word, in capitals. ", 100, None),         # less than a quarter of the positions
    ("In one word. ", 1, 13), ("", 3, None)])
def test_examples_share_what_they_all_begin_with(tmp_path, before, rest, expected):
    found = examples.read(alike(tmp_path / "a.jsonl", before=before, rest=rest), Tokenizer("bytes"))
    prefix = examples.common_prefix(found)
    assert (prefix if expected is None else len(prefix)) == expected
    assert expected is None or bytes(prefix.tolist()).decode() == before[:expected]


def test_prompts_in_a_jsonl_file_are_whole(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Q: ", "completion": "Yes."}) + "\n")
    for given in (dict(form="{}"), dict(instruction="Be brief.")):
        with pytest.raises(BadInput, match="has whole prompts"):
            examples.read(tmp_path / "a.jsonl", Tokenizer("bytes"), **given)


def test_a_shared_beginning_ends_before_the_first_target(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "The same question: ", "completion": "Yes."}) + "\n")
    found = examples.read(tmp_path / "a.jsonl", Tokenizer("bytes")) * 8
    found[5] = examples.example_of_parts([(list(b"The same quest"), False), (list(b"ion"), True)], "")
    assert len(examples.common_prefix(found[:5])) == 18 and len(examples.common_prefix(found)) == 13
    found[5] = examples.example_of_parts([(list(b"The same question: all of it"), True)], "")
    assert examples.common_prefix(found) is None


def gradients_of(model, dataset, dtype=torch.float32):
    """Return the loss of a step, its gradient and the number of its positions."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = sum(model.loss(*batch) for batch in dataset[0])
    loss.backward()
    positions = sum(batch[0].numel() + (0 if dataset.prefix is None else len(batch[3])) for batch in dataset[0])
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]), positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{}, dict(mixer="linear"), dict(position="learned", norm="layernorm", mlp="gelu", n_kv_head=1)])
def test_a_shared_beginning_changes_no_gradient(tmp_path, kind, dtype):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, block_size=128, n_layer=2, n_head=2, n_embd=32, **kind))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    dataset = examples.Batches(examples.read(alike(tmp_path / "a.jsonl"), Tokenizer("bytes")), 16, 4, seed=0)
    exact, gradient, positions = gradients_of(model, dataset)
    plain = gradients_of(model, dataset, dtype)[1]
    dataset.prefix = examples.common_prefix(dataset.examples)
    loss, other, fewer = gradients_of(model, dataset, dtype)
    assert loss == pytest.approx(exact, rel=1e-5 if dtype == torch.float32 else 1e-2) and fewer < 0.6 * positions
    assert (other - gradient).norm() < max(1e-5 * gradient.norm(), 1.2 * (plain - gradient).norm())


def test_flops_are_those_of_positions_and_targets(rft):
    model = GPT(GPTConfig(vocab_size=257, block_size=256, n_layer=1, n_head=1, n_embd=8))
    dataset = batches(rft)
    lengths, targets = [e.length for e in dataset.examples], [int(e.is_target[1:].sum()) for e in dataset.examples]
    total = sum(n * (model.flops_per_token(n) - model.head_flops()) + k * model.head_flops() for n, k in zip(lengths, targets))
    assert mean_flops(model, dataset, 8) == pytest.approx(total / sum(lengths))
    dataset.prefix = torch.zeros(4)
    assert mean_flops(model, dataset, 8) < total / sum(lengths)


def test_a_micro_batch_with_a_shared_beginning_is_at_most_as_large_as_the_trial(tmp_path):
    dataset = examples.Batches(examples.read(alike(tmp_path / "a.jsonl", n=64), Tokenizer("bytes")), 64, 32, seed=0)
    dataset.prefix = examples.common_prefix(dataset.examples)
    for dataset.micro_batch in (1, 2, 8, 32):
        trial = len(dataset.prefix) + dataset.micro_batch * (dataset.longest - len(dataset.prefix))
        sizes = [len(prefix) + x.numel() for x, _, _, prefix in dataset[0]]
        assert max(sizes) <= trial and sum(len(x) for x, *_ in dataset[0]) == 64


@pytest.mark.parametrize("knobs", [{}, dict(ranks=2), dict(lora_rank=2, gradient_checkpointing=True)], ids=["one", "ranks", "lora"])
def test_a_run_with_a_shared_beginning_resumes_exactly(base, tmp_path, knobs):
    path = alike(tmp_path / "a.jsonl", n=17)
    done = tune(tmp_path / "a", path, base, save_interval=1, **knobs)
    assert ", the first 39 shared" in done.stdout and "flops_per_token" in (tmp_path / "a" / "metrics.jsonl").read_text()
    whole = weights(tmp_path / "a", 4)
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / "a" / "checkpoints" / f"step_{step:08d}")
    trained(tmp_path / "a", path, defaults={}, init_from="resume", **{key: knobs[key] for key in ("ranks",) if key in knobs})
    assert largest_difference(weights(tmp_path / "a", 4), whole) == 0


def test_a_run_shares_it_unless_dropout_could_tell_the_rows_apart(base, tmp_path):
    path = alike(tmp_path / "a.jsonl")
    knobs = dict(max_steps=2, num_epochs=None, batch_size=16, gradient_accumulation_steps=1)
    assert ", the first 39 shared" in tune(tmp_path / "a", path, base, **knobs).stdout
    assert "shared" not in tune(tmp_path / "b", path, base, dropout=0.1, **knobs).stdout
    assert metrics(tmp_path / "a", "tokens") == metrics(tmp_path / "b", "tokens")
    assert metrics(tmp_path / "a")[1] == pytest.approx(first_loss(path, base), abs=1e-5)


def first_loss(path, base):
    """Return the mean loss of the first step's targets, one example at a time."""
    model = hub.load(str(base))
    nats = 0.0
    n = 0
    for e in examples.Batches(examples.read(path, Tokenizer("bytes")), 16, 16, seed=0).of_step(0):
        logp = model(torch.tensor(e.ids[None, :-1])).log_softmax(-1)[0]
        picked = logp[range(e.length), e.ids[1:]][torch.tensor(e.is_target[1:])]
        nats += picked.sum().item()
        n += len(picked)
    return -nats / n


@pytest.mark.parametrize("knobs", [{}, dict(lora_rank=2, gradient_checkpointing=True)], ids=["whole", "lora"])
def test_resume_in_the_middle_of_an_epoch_is_exact(rft, base, tmp_path, knobs):
    tune(tmp_path / "a", rft, base, save_interval=3, **knobs)
    assert checkpoint.steps(tmp_path / "a") == [3, 4, 6, 8]
    done = tune(tmp_path / "b", rft, base, save_interval=3, **knobs)
    for step in (4, 6, 8):
        shutil.rmtree(tmp_path / "b" / "checkpoints" / f"step_{step:08d}")
    done = trained(tmp_path / "b", rft, defaults={}, init_from="resume")
    assert "steps 3 to 8" in done.stdout
    assert largest_difference(weights(tmp_path / "a", 8), weights(tmp_path / "b", 8)) == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") and metrics(tmp_path / "a", "tokens") == metrics(tmp_path / "b", "tokens")
    content = rft.read_text()
    try:
        rft.write_text(content.replace("What is 7 ", "What was 7 "))
        done = run(tmp_path / "b", rft, defaults={}, init_from="resume", num_epochs=3)
        assert done.returncode == 2 and "has changed since" in done.stderr and done.stderr.count("\n") == 1
    finally:
        rft.write_text(content)
    done = run(tmp_path / "b", rft, defaults={}, init_from="resume", num_epochs=3, valid_share=0.3)
    assert done.returncode == 2 and "--valid_share=0.3 changes the data of the run" in done.stderr
    if knobs:
        assert all(w.abs().max() > 0 for name, w in weights(tmp_path / "a", 8).items() if name.endswith("lora_b"))


def test_the_ids_that_were_sampled_are_the_ones_trained_on(tmp_path):
    tokenizer = Tokenizer(write(tmp_path / "t"))
    text = "42 gram <answer>42</answer>"
    ids = [i for letter in text for i in tokenizer.encode(letter).tolist()]
    assert tokenizer.decode(ids) == text and tokenizer.encode(text).tolist() != ids
    path = tmp_path / "rft.json"
    path.write_text(json.dumps([["q", 42, text]]))

    def log(tokenizer_then, **record):
        rows = [{"tokenizer": tokenizer_then, "prompt": "Q: {}"}, RECORD | {"completion": text, "ids": ids} | record]
        examples.attempts_path(path).write_text("".join(map(examples.line_of, rows)))
        (e,) = examples.read(path, tokenizer)
        assert tokenizer.decode(e.ids).startswith("Q: q")             # in the form in which it was asked
        return e.ids[e.is_target].tolist()
    assert log(tokenizer.describe()) == ids + [tokenizer.end]
    again = tokenizer.encode(text).tolist() + [tokenizer.end]
    assert log(tokenizer.describe(), completion="other") == log(tokenizer.describe(), verdict="not exact") == again
    assert log({"name": "bytes"}) == again == log(tokenizer.describe(), ids=ids + ids)


def test_a_log_of_attempts_that_is_not_as_it_was_written_is_refused_with_the_line(tmp_path):
    """And not trained on in another form."""
    path = tmp_path / "rft.json"
    path.write_text(json.dumps([["67", 67, "67."]]))
    log = examples.attempts_path(path)
    rows = [{"tokenizer": Tokenizer("bytes").describe(), "prompt": "Take {} from"}, RECORD | {"question": "67", "completion": "67."}]
    lines = [examples.line_of(row) for row in rows]
    log.write_text("".join(lines))
    (example,) = examples.read(path, Tokenizer("bytes"))
    assert bytes(example.ids[:-4].tolist()) == b"Take 67 from" and examples.read_form(path) == "Take {} from"
    for number, damaged in ((1, [lines[0].replace("Take", "Lake"), lines[1]]), (1, [lines[0].replace("checksum", "checksun"), lines[1]]),
                            (1, lines[1:]), (1, ["[]\n"]), (1, [""]), (2, 2 * lines[:1]),
                            (2, [lines[0], lines[1].replace("67.", "66.")]), (2, [lines[0], lines[1][:40]]), (2, [lines[0], "\n", lines[1]])):
        log.write_text("".join(damaged))
        with pytest.raises(BadInput, match=f"^Line {number} of .*attempts.jsonl can't be read .*--prompt="):
            examples.read(path, Tokenizer("bytes"))
    with pytest.raises(BadInput, match="^Line 1 of"):
        log.write_text("{}" + lines[0])
        examples.read_form(path)


@pytest.mark.parametrize("kind, chat", [("smol", SMOL), ("qwen", QWEN3)])
def test_conversations_are_the_templates_and_the_assistants_words_are_trained_on(tmp_path, kind, chat):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path / kind, kind, chat=chat)
    tokenizer, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "42"},
                {"role": "user", "content": "and now"}, {"role": "assistant", "content": "it is 5 kg"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"prompt": "how many?", "completion": "42"}) + "\n")
    assert examples.is_examples_file(str(path))
    chat, pair = examples.read(path, tokenizer)
    assert chat.ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
    assert chat.ids[:len(pair.ids)].tolist() == pair.ids.tolist() == tokenizer.prompt_ids("how many?") + tokenizer.answer_ids("42")
    thought = "<think>\n\n</think>\n\n" if kind == "qwen" else ""          # that Qwen3's template puts before the last answer
    words = tokenizer.answer_ids("42") + tokenizer.answer_ids(f"{thought}it is 5 kg")
    assert chat.ids[chat.is_target].tolist() == words and pair.ids[pair.is_target].tolist() == tokenizer.answer_ids("42")


def test_pairs_train_the_answer_alone(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps([["How many gram are there per 6 kg?", 6000.5], ["And 7?", "7000"], ["And 8?", 8, "It is 8"]]))
    got = [bytes(e.ids[e.is_target][:-1].tolist()).decode() for e in examples.read(path, Tokenizer("bytes"))]
    assert got == ["<answer>6000.5</answer>", "<answer>7000</answer>", "It is 8"]


def test_a_text_stays_a_text(tmp_path):
    path = tmp_path / "a.jsonl"
    for content, expected in (({"text": "a", "prompt": "b", "completion": "c"}, False), ({"prompt": "b", "completion": "c"}, True),
                              ({"messages": []}, True), ({"prompt": "b"}, False)):
        path.write_text(json.dumps(content))
        assert examples.is_examples_file(str(path)) is expected
    path.write_text("{broken")
    assert not examples.is_examples_file(str(path)) and not examples.is_examples_file(str(tmp_path)) and not examples.is_examples_file("wikitext")


def test_questions_are_held_out_as_a_whole(rft, base, tmp_path):
    rows = [row for row in rows_of(200) for _ in range(3)]
    path = tmp_path / "rft.json"
    path.write_text(json.dumps(rows))
    train, held_out = examples.hold_out(examples.read(path, Tokenizer("bytes")), 0.1, seed=0)
    assert len(train) + len(held_out) == 600 and 30 <= len(held_out) <= 90
    assert not {e.question for e in train} & {e.question for e in held_out}
    done = tune(tmp_path / "a", path, base, valid_share=0.1, max_steps=3, eval_interval=2)
    assert "best so far" in done.stdout and "n/a" not in done.stdout.split("val loss")[1].splitlines()[0]
    one = metrics(tmp_path / "a", "val_loss")
    tune(tmp_path / "b", path, base, valid_share=0.1, max_steps=3, eval_interval=2, ranks=2)
    assert one.keys() == {2, 3} and all(abs(one[s] - metrics(tmp_path / "b", "val_loss")[s]) < 1e-5 for s in one)


TURNS = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "42"}]


@pytest.mark.parametrize("row, words", [
    ({"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "42"}]}, "ShareGPT's form"),
    ({"instruction": "How", "input": "many?", "output": "42"}, "Alpaca's form"), (TURNS, "a list of turns"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "a prompt and a completion of turns")])
def test_examples_in_the_form_of_others_are_named_with_what_converts_them(tmp_path, row, words):
    """The expression in the sentence makes what is read."""
    tokenizer = Tokenizer(write(tmp_path / "smol", "smol", chat=SMOL))
    for name, content in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row]))):
        (tmp_path / name).write_text(content)
        assert examples.is_examples_file(str(tmp_path / name))
        with pytest.raises(BadInput, match=f"Row 1 of .*{words}: write .* in its place") as e:
            examples.read(tmp_path / name, tokenizer)
    converted = eval(str(e.value).partition(": write ")[2].partition(" in its place")[0], {"row": row})
    (tmp_path / "b.jsonl").write_text(json.dumps(converted))
    (example,) = examples.read(tmp_path / "b.jsonl", tokenizer)
    assert tokenizer.decode(example.ids[example.is_target][:2]) == "42" and example.question.split() == ["How", "many?"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("chat") / "smol", "smol", chat=SMOL))


PAIR = {"prompt": "How many?", "completion": "42"}


@pytest.mark.parametrize("row, words", [
    ({"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]}, '"tool_calls": .* not supported'),
    ({"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "6 * 7"}]}, '"reasoning_content": 6 . 7 is not supported'),
    ({"messages": TURNS, "tools": [{"name": "f"}]}, '"tools": '), (PAIR | {"label": False}, '"label": False'), (PAIR | {"weight": 0}, '"weight": 0'),
    (PAIR | {"weight": 0.5}, '"weight": 0.5'), ({"question": "q", "answer": "0", "choices": ["a", "b"]}, '"choices": '),
    ({"question": "q", "answer": "a", "context": "c"}, '"context": c is not'), ({"messages": [{"role": "tool", "content": "x"}, *TURNS]}, "the role 'tool'"),
    ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, "none of its messages"),
    ({"messages": [TURNS[0], TURNS[1] | {"weight": 2}]}, "the weight 2; give 0 or 1"), (PAIR | {"system": 7}, '"system" should be a text'),
    ({"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"}, "without another message"),
    ({"question": "q", "answer": True}, "it should be"), ({"question": "q", "answer": float("nan")}, "it should be")])
def test_a_key_that_changes_a_row_and_is_not_supported_is_named(tmp_path, chat, row, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIR) + "\n" + json.dumps(row))
    with pytest.raises(BadInput, match=f"Row 2 of .*{words}") as e:
        examples.read(path, chat)
    assert "\n" not in str(e.value)


def test_keys_are_honoured_or_listed(tmp_path, chat, capsys):
    path = tmp_path / "a.jsonl"
    rows = [PAIR | {"system": "Be brief.", "id": 7, "source": "web", "tools": None, "label": True, "weight": 1},
            {"messages": [TURNS[0], TURNS[1] | {"weight": 0, "name": "bot"}, TURNS[0], {"role": "assistant", "content": "43", "tool_calls": []}],
             "system": "Be brief."}, {"question": "How many?", "answer": 42, "system": "Be brief.", "metadata": {}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair, talk, question = examples.read(path, chat)
    told = chat.prompt_ids("How many?", "Be brief.")
    for example in (pair, question):
        assert example.ids.tolist() == told + chat.answer_ids("42") and example.is_target.sum() == len(chat.answer_ids("42"))
    assert talk.ids[:len(told)].tolist() == told and talk.ids[talk.is_target].tolist() == chat.answer_ids("43")
    assert capsys.readouterr().out == f"Keys of {path} that have no effect: id, messages: name, source.\n"
    with pytest.raises(BadInput, match="Row 1 of .*a model with a chat template"):
        examples.read(path, Tokenizer("bytes"))


CONTAINERS = {
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "a.jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "a.csv": lambda path, rows: path.write_text("\n".join(",".join(f'"{text}"' for text in line) for line in [rows[0], *(row.values() for row in rows)])),
    "a.tsv": lambda path, rows: path.write_text("\n".join("\t".join(line) for line in [rows[0], *(row.values() for row in rows)])),
    "a.parquet": lambda path, rows: datasets().Dataset.from_list(rows).to_parquet(str(path)),
    "saved": lambda path, rows: datasets().Dataset.from_list(rows).save_to_disk(str(path)),
    "splits": lambda path, rows: datasets().DatasetDict({split: datasets().Dataset.from_list(part) for split, part in (
        ("train", rows), ("test", rows[:1]))}).save_to_disk(str(path)),
}


def datasets():
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    return found


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("keys", [("prompt", "completion"), ("question", "answer")])
def test_rows_are_the_same_from_every_kind_of_file(tmp_path, name, keys, capsys):
    texts = [("NA", "007"), ("What is, 2?", "two"), ("So; so", "null")]
    rows = [dict(zip(keys, pair)) for pair in texts]
    CONTAINERS[name](tmp_path / name, rows)
    path = str(tmp_path / name)
    assert examples.is_examples_file(path) and examples.read_form(path) == (None if keys[0] == "prompt" else prompts.PROMPT)
    form = "{}" if keys[0] == "prompt" else prompts.PROMPT
    for example, (question, answer) in zip(examples.read(path, Tokenizer("bytes")), texts, strict=True):
        assert bytes(example.ids[:-1].tolist()).decode() == form.replace("{}", question) + answer
    asked = [dict(question=question, answer=answer) for question, answer in texts]
    if keys[0] == "question":
        assert list(questions.questions_in(path).values()) == asked
    if name == "splits":
        assert f"{path}: 3 rows of its split train, without any others" in capsys.readouterr().out and len(questions.questions_in(path, "test")) == 1
        with pytest.raises(BadInput, match="no split valid, only train, test"):
            questions.questions_in(path, "valid")


@pytest.mark.parametrize("content, words", [
    ("question,answer\na,1,2\n", "line 2: it does not have the 2 fields"), ("question,answer\na\n", "line 2: it does not"),
    ("question,answer,answer\na,1,2\n", "two columns have the same name"), ('question,answer\n"a,1\n', "can't be read"), ("", "holds no example"),
    ("question,answer\na,\xff\n", "can't be read .'utf-8' codec")])
def test_a_table_that_loses_fields_is_refused(tmp_path, content, words):
    (tmp_path / "a.csv").write_text(content, "latin-1")
    with pytest.raises(BadInput, match=words):
        examples.read(tmp_path / "a.csv", Tokenizer("bytes"))


def test_an_instruction_that_no_one_sees_is_refused_or_said(tmp_path, capsys, chat):
    path, task = tmp_path / "rft.json", tmp_path / "own.py"
    path.write_text('[["q", 1, "r"]]')
    task.write_text("""INSTRUCTION = "Be brief."
def questions(split, seed=0, n=None):
    return [{"question": "q", "answer": 1}]
def solution(question):
    return "s"
def reward(question, completion):
    return 1.0
""")
    plain = Tokenizer("bytes")
    for dataset in (str(path), f"examples:{task}"):
        with pytest.raises(BadInput, match="--instruction is a system message"):
            examples.read(dataset, plain, instruction="Be brief.")
        assert examples.read(dataset, plain, instruction="")
    own = tasks.load(str(task))
    for _ in range(2):
        pipeline.requests_of(plain, own, own.questions("train"))
    examples.read(f"examples:{task}", plain)
    assert capsys.readouterr().err.count("does not see INSTRUCTION of the task") == 1
    own.prompt = "Q: {} Answer after ####."
    for _ in range(2):
        assert prompts.instruction_of(chat, own, own.questions("train")[0]) == own.instruction
    assert capsys.readouterr().err.count("The model has a chat template, so it does not see PROMPT of the task") == 1
    examples.read("examples:arithmetic", plain)              # its worked examples show the form
    log = [{"tokenizer": {}, "prompt": "{}"}, RECORD | {"instruction": "Be brief."}]
    examples.attempts_path(path).write_text("".join(map(examples.line_of, log)))
    examples.read(path, plain)
    assert "does not see the instruction in " in capsys.readouterr().err
    (request,) = pipeline.requests_of(chat, own, [{"question": "q", "answer": 1, "system": "Shout."}])
    assert request.ids == chat.prompt_ids("q", "Shout.")
    with pytest.raises(ValueError, match="question 'q' has a system message"):
        pipeline.requests_of(plain, own, [{"question": "q", "answer": 1, "system": "Shout."}])


def test_a_prompt_in_a_chat_s_template_is_not_put_into_it_once_more(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"prompt": "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n", "completion": "42"}
    path.write_text(json.dumps(row))
    chat = Tokenizer(write(tmp_path / "smol", "smol", chat=SMOL))
    with pytest.raises(BadInput, match="Row 1 of .*contains <.im_start.>.*messages"):
        examples.read(path, chat)
    with pytest.raises(ValueError, match="contains .INST.*user's text alone"):
        prompts.prompt_ids(chat, "[INST] How many? [/INST]")
    assert examples.read(path, Tokenizer("bytes"))            # whose prompts stand as they are
    turns, line = re.search(r"    turns = (.*?)\n    print\((.*?)\)\n", (ROOT / "docs/rft.md").read_text(), re.S).groups()
    assert json.loads(eval(line, {"json": json, "turns": eval(turns, {"re": re, "row": row})})) == {"messages": TURNS}


@pytest.mark.parametrize("content, words", [
    ("[]", "holds no example"), ("{", "can't be read"), ('{"a": 1}', "holds no example"),
    ('[["q", true]]', "Row 1 of"), ('[["q", NaN]]', "Row 1 of"), ('[["q", 1, " "]]', "Row 1 of"), ('[["q", 1, "r"], ["q"]]', "Row 2 of"),
    ('[["q", 1, 2]]', "Row 1 of"), ('[[1, 2, "r"]]', "Row 1 of"), ("[7]", "Row 1 of"),
    ('[["\\ud800", 1, "r"]]', "Row 1 of .*surrogates"), ("\xff\xfe", "can't be read"),
    ({"prompt": 1, "completion": ""}, "it should be"), ({"messages": []}, "none of its messages"),
    ({"messages": [{"role": "user"}]}, "needs a text as role and as content"),
    ({"messages": [*TURNS, {"role": "assistant", "content": None}]}, "'content': None} needs"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "need a model with a chat template")])
def test_bad_examples_are_one_sentence(tmp_path, content, words):
    path = tmp_path / "rft.json"
    if isinstance(content, dict):
        path = tmp_path / "rft.jsonl"
        words = f"Row 2 of .*{words}"
        content = json.dumps({"prompt": "a", "completion": "b"}) + "\n" + json.dumps(content)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match=words) as e:
        examples.read(path, Tokenizer("bytes"))
    assert "\n" not in str(e.value)


def test_bad_knobs_are_one_sentence_and_leave_nothing(rft, base, tmp_path):
    for knobs, words in ((dict(dataset=tmp_path / "none.json"), "can't be read"), (dict(block_size=8), "No example is left"),
                         (dict(valid_share=1.0), "must be below 1"), (dict(num_epochs=0), "must be above 0"),
                         (dict(patience=3), "needs a validation loss"), (dict(prompt="Q:"), "has no {} for the question"),
                         (dict(eval_only=True), "There are no validation examples")):
        done = run(tmp_path / "a", knobs.pop("dataset", rft), defaults=TUNE, init_from=base, **knobs)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "a").exists()


def test_an_empty_column_decides_no_form():
    assert form_of({"question": "2+2?", "answer": "4", "messages": None}) == {"question", "answer"} and form_of({"messages": None}) is None
