"""train.py as its users run it: as a process."""
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
import torch

import forked
import train
from conftest import command, environment, largest_difference, metrics, run, trained, wait_for, weights
from runtime import checkpoint, config, optim


@pytest.fixture(scope="module")
def reference(tmp_path_factory, text):
    """A run of 20 steps in fp32 with dropout, from which most tests differ in one thing."""
    out = tmp_path_factory.mktemp("reference") / "run"
    trained(out, text, dtype="fp32", dropout=0.1)
    return out


def test_a_run_learns_and_its_folder_is_complete(reference):
    losses = metrics(reference)
    assert losses[20] < losses[1] - 0.5
    lines = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    keys = ("step loss lr grad_norm tokens seconds tokens_per_s mfu utilization memory_gb peak_memory_gb micro_batch data_s "
            "forward_backward_s optimizer_s").split()
    assert lines[0]["config"]["n_embd"] == 32
    assert all(key in lines[1] for key in keys) and lines[-2]["tokens"] == 20 * 4 * 32
    evaluation = lines[-1]
    assert evaluation["val_tokens"] == 640
    assert evaluation["val_ppl_token"] == pytest.approx(2.718281828 ** evaluation["val_loss"])
    assert {"val_ppl_word", "val_bits_per_byte"} <= evaluation.keys()
    config = json.loads((reference / "config.json").read_text())
    assert config["n_embd"] == 32 and config["dropout"] == 0.1
    model = json.loads((reference / "model.json").read_text())
    assert model["tokenizer"]["eos"] == 256 and model["architecture"]["vocab_size"] == 257 and model["tokenizer"]["template"] == {"name": "plain"}
    assert "20/20" in (reference / "training.log").read_text()


def test_stopped_at_10_and_resumed_equals_20_steps_bit_for_bit(tmp_path, text, reference):
    """Dropout, Muon and AdamW states, schedule, data order: all as if nothing had happened."""
    trained(tmp_path / "a", text, dtype="fp32", dropout=0.1)
    (tmp_path / "a" / "checkpoints" / "step_00000020").rename(tmp_path / "gone")       # as if killed before step 20
    done = trained(tmp_path / "a", text, init_from="resume")
    assert "steps 10 to 20" in done.stdout
    assert largest_difference(weights(tmp_path / "a"), weights(reference)) == 0
    assert metrics(tmp_path / "a") == metrics(reference)
    assert metrics(tmp_path / "a", "val_loss") == metrics(reference, "val_loss")


@pytest.mark.parametrize("knobs", [dict(optimizer="adamw", learning_rate=1e-3), dict(dtype="bf16"), dict(dtype="fp16")],
                         ids=["adamw", "bf16", "fp16"])
def test_resume_is_exact_with(tmp_path, text, knobs):
    knobs = {"max_steps": 8, "save_interval": 4, "eval_interval": 8, "keep_last": 5} | knobs
    trained(tmp_path / "a", text, **knobs)
    whole = weights(tmp_path / "a", 8)
    (tmp_path / "a" / "checkpoints" / "step_00000008").rename(tmp_path / "gone")
    trained(tmp_path / "a", text, init_from="resume", **knobs)
    assert largest_difference(weights(tmp_path / "a", 8), whole) == 0


@pytest.mark.parametrize("knobs", [dict(num_workers=2), dict(eval_interval=5), dict(save_interval=3)], ids=str)
def test_these_change_no_bit(tmp_path, text, reference, knobs):
    trained(tmp_path / "a", text, dtype="fp32", dropout=0.1, **knobs)
    assert largest_difference(weights(tmp_path / "a"), weights(reference)) == 0


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory, text):
    """One process, 4 micro-steps of 4, no dropout (its noise depends on the rank)."""
    out = tmp_path_factory.mktemp("accumulated") / "run"
    trained(out, text, dtype="fp32", gradient_accumulation_steps=4, optimizer="adamw", learning_rate=1e-3)
    return out


@pytest.mark.parametrize("change", [dict(ranks=2), dict(batch_size=16, gradient_accumulation_steps=1), dict(loss_chunks=5)], ids=str)
def test_the_same_step_in_other_pieces(tmp_path, text, accumulated, change):
    """Equal within fp32 summation error: losses agree to 1e-5, weights after 20 AdamW steps of 1e-3 to 1e-4.
    (The head's gradient is a sum over chunks, so their number changes its rounding as that of micro-steps does.)"""
    trained(tmp_path / "a", text, **(dict(dtype="fp32", gradient_accumulation_steps=4, optimizer="adamw", learning_rate=1e-3)
                                     | change))
    ours, theirs = metrics(tmp_path / "a"), metrics(accumulated)
    assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in ours)
    val, expected = metrics(tmp_path / "a", "val_loss"), metrics(accumulated, "val_loss")
    assert all(val[s] == pytest.approx(expected[s], abs=1e-5) for s in expected)
    assert largest_difference(weights(tmp_path / "a"), weights(accumulated)) < 1e-4


def test_resume_may_change_to_a_precision_with_a_loss_scale(tmp_path, text):
    trained(tmp_path / "a", text, dtype="fp32", max_steps=4)
    trained(tmp_path / "a", text, init_from="resume", dtype="fp16", max_steps=6)
    assert checkpoint.load_state(tmp_path / "a", 6)["scaler"]


def test_patience_stops_a_run_that_no_longer_improves(tmp_path, text):
    knobs = dict(eval_interval=2, learning_rate=0.0, patience=3)
    done = trained(tmp_path / "a", text, **knobs)
    assert "Stopped early after step 8: 3 evaluations without a better loss than at step 2" in done.stdout
    assert checkpoint.steps(tmp_path / "a") == [2, 8] and checkpoint.best(tmp_path / "a") == 2      # the last is kept to go on from
    assert "Stopped early after step 8" in trained(tmp_path / "a", text, init_from="resume", **knobs).stdout
    trained(tmp_path / "a", text, init_from="resume", **knobs | {"patience": 5})
    assert max(metrics(tmp_path / "a")) == 12
    seconds = list(metrics(tmp_path / "a", "seconds").values())
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 60


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_exits(tmp_path, text, number, code):
    out = tmp_path / "a"
    process = forked.Popen(command(out, dataset=text, data_dir=tmp_path, max_steps=100_000, save_interval=10**6,
                                       eval_interval=10**6), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == code
    step = checkpoint.newest_intact(out)
    assert step and max(metrics(out)) == step
    assert f"Stopped as asked after step {step}" in said
    again = {signal.SIGINT: "A second Ctrl-C", signal.SIGTERM: "SIGKILL"}[number]
    assert re.search(rf"Stopping after this step \(about \d+ s\) and its checkpoint. {again} stops now and loses this step.\n", errors)


def test_sigterm_to_the_whole_group_with_loader_processes_saves_too(tmp_path, text):
    """As torchrun and batch systems stop a job."""
    out = tmp_path / "a"
    process = forked.Popen(command(out, dataset=text, data_dir=tmp_path, max_steps=100_000, save_interval=10**6,
                                       eval_interval=10**6, num_workers=2), env=environment(), start_new_session=True)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143
    assert checkpoint.newest_intact(out) == max(metrics(out))


def test_a_signal_to_one_of_two_ranks_stops_both_after_the_same_step(tmp_path, text):
    out = tmp_path / "a"
    line = command(out, dataset=text, data_dir=tmp_path, max_steps=100_000, batch_size=4, save_interval=10**6, eval_interval=10**6)
    ranks = [forked.Popen(line, env=environment(**rank), stdout=subprocess.DEVNULL) for rank in forked.ranks_of(2)]
    wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
    ranks[1].terminate()
    assert [rank.wait(60) for rank in ranks] == [143, 143]
    assert checkpoint.newest_intact(out) == max(metrics(out))


def test_killed_at_20_random_moments_it_ends_with_the_same_weights(tmp_path, text):
    knobs = dict(dataset=text, data_dir=tmp_path, max_steps=800, save_interval=5, eval_interval=200, log_interval=50, dtype="fp32",
                 keep_last=2, block_size=16, batch_size=2)
    assert forked.run(command(tmp_path / "calm", **knobs), env=environment(), capture_output=True).returncode == 0
    out, rng, kills, seen = tmp_path / "stormy", random.Random(0), 0, []
    while kills < 20:
        how = {"init_from": "resume"} if checkpoint.newest_intact(out, seen.append) else {"overwrite": True}
        process = forked.Popen(command(out, **knobs, **how), env=environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        before = checkpoint.steps(out)
        try:
            wait_for(lambda: checkpoint.steps(out) != before or process.poll() is not None)
            process.wait(rng.uniform(0, 0.15))
            break                                         # done before the twentieth kill
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    if checkpoint.newest_intact(out) < 800:
        assert forked.run(command(out, **knobs, init_from="resume"), env=environment(), capture_output=True).returncode == 0
    assert kills == 20 and not seen                       # and no kill left a damaged checkpoint
    assert largest_difference(weights(out, 800), weights(tmp_path / "calm", 800)) == 0
    assert metrics(out) == metrics(tmp_path / "calm")


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_stay_non_finite_roll_back_once_then_stop_with_the_batch_on_disk(tmp_path, text, ranks):
    done = run(tmp_path / "a", text, ranks=ranks, dtype="fp32", learning_rate=1e30, lr_schedule="constant", save_interval=1, grad_clip=0,
               optimizer="adamw", max_steps=60)
    assert done.returncode == 1
    assert done.stdout.count("Rolling back to the checkpoint of step") == 1 and "Training diverged" in done.stderr
    log = (tmp_path / "a/training.log").read_text()
    assert log.count("Rolling back to the checkpoint of step") == 1 and "Training diverged" in log
    batches = list((tmp_path / "a").glob("bad_batch*.pt"))
    assert len(batches) == ranks
    assert torch.load(batches[0], weights_only=True)["micro_batches"][0][0].shape == (4 // ranks, 32)


def test_without_a_compiler_training_goes_on_eagerly(tmp_path, text):
    env = environment(CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))    # read by an import
    done = subprocess.run(command(tmp_path / "a", dataset=text, data_dir=tmp_path, compile=True, max_steps=3), env=env, capture_output=True,
                          text=True)
    assert done.stdout.count("torch.compile failed") == 1 and "step 3/3" in done.stdout


def test_without_a_compiler_muon_is_eager_too(tmp_path, text, monkeypatch):
    """On a GPU it is compiled apart from the model."""
    def fails(*inputs, **options):
        raise RuntimeError("no compiler")
    monkeypatch.setattr(optim, "COMPILE_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    optim.compiled.cache_clear()
    trained(tmp_path / "a", text, compile=True, max_steps=2, optimizer="muon")
    optim.compiled.cache_clear()
    assert "torch.compile failed" in (tmp_path / "a/training.log").read_text() and len(metrics(tmp_path / "a")) == 2


def test_save_only_model_is_small_and_starts_a_new_run(tmp_path, text):
    trained(tmp_path / "a", text, save_only_model=True, max_steps=10)
    assert not (tmp_path / "a" / "checkpoints" / "step_00000010" / "state.json").exists()
    refused = run(tmp_path / "a", text, init_from="resume")
    assert refused.returncode == 2 and "only weights" in refused.stderr
    trained(tmp_path / "b", text, init_from=tmp_path / "a", max_steps=5)
    assert metrics(tmp_path / "b")[1] < metrics(tmp_path / "a")[1] - 0.3     # it starts from what the first had learnt


def test_knobs_given_on_resume_count(tmp_path, text):
    trained(tmp_path / "a", text, max_steps=10)
    refused = run(tmp_path / "a", text, init_from="resume", optimizer="adamw")
    assert refused.returncode == 2 and "optimizer=adamw" in refused.stderr
    trained(tmp_path / "a", text, init_from="resume", weight_decay=0.5, muon_momentum=0.5, dtype="fp32")
    trained(tmp_path / "b", text, weight_decay=0.5, muon_momentum=0.5, dtype="fp32")
    assert checkpoint.load_state(tmp_path / "a", 20)["dtype"] == "fp32"
    asked_for = config.read_saved(tmp_path / "a")
    assert (asked_for["weight_decay"], asked_for["muon_momentum"]) == (0.5, 0.5)
    # Neither as it would have gone on, nor as if the new values had held from the beginning.
    trained(tmp_path / "c", text, dtype="fp32")
    assert all(largest_difference(weights(tmp_path / "a"), weights(tmp_path / other)) > 1e-3 for other in "bc")


def test_eval_only_prints_and_writes_nothing(text, reference):
    before = sorted(p.stat().st_mtime_ns for p in reference.rglob("*"))
    for start in (dict(init_from="resume"), dict(resume="auto")):
        done = trained(reference, text, **start, eval_only=True)
        assert f"val loss {metrics(reference, 'val_loss')[20]:.4f}" in done.stdout
    assert sorted(p.stat().st_mtime_ns for p in reference.rglob("*")) == before


BAD = [
    (dict(lerning_rate=1), "did you mean learning_rate"),
    (dict(n_head=3), "not divisible by n_head=3"),
    (dict(batch_size=-1), "at least 1"),
    (dict(beta1=1), "below 1"),
    (dict(cooldown=1.5), "at most 1"),
    (dict(dataset="nowhere.txt"), "no dataset nowhere.txt"),
    (dict(dataset="task:nothing"), "no task nothing"),
    (dict(block_size=100_000), "and one window needs"),
    (dict(device="cuda", dtype="bf16"), "finds none"),
    (dict(attention="flash"), "needs a GPU"),
    (dict(init_from="resume"), "not a run folder"),
    (dict(init_from="/nowhere"), "no folder /nowhere"),
    (dict(out_dir="/proc/run"), "can't be written"),
    (dict(data_dir="/proc/tokens"), "--data_dir="),
    (dict(tokenizer="gpt2"), "TIKTOKEN_CACHE_DIR"),
]


@pytest.mark.parametrize("knobs, sentence", BAD, ids=[s for _, s in BAD])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, text, knobs, sentence):
    if "device" in knobs and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = run(knobs.pop("out_dir", tmp_path / "a"), text, env=env if "tokenizer" in knobs else None, **knobs)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_another_run_is_not_overwritten_and_another_architecture_not_resumed(text, reference):
    done = run(reference, text)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    done = run(reference, text, init_from="resume", n_layer=3)
    assert done.returncode == 2 and "n_layer=3 contradicts" in done.stderr
    assert checkpoint.newest_intact(reference) == 20


def test_the_seconds_of_training_have_no_evaluation_in_them(tmp_path, text, monkeypatch):
    measure = train.validation_loss
    monkeypatch.setattr(train, "validation_loss", lambda *arguments: time.sleep(1.5) or measure(*arguments))
    trained(tmp_path / "run", text, max_steps=4, eval_interval=2)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in lines if line["step"] == 4 and "lr" in line]
    assert last["seconds"] < 1.5 and len([line for line in lines if "val_loss" in line]) >= 2
