"""What a run survives: a second writer, files that change or are damaged, a stop at an awkward moment, and other
numbers of ranks. Kills and bit flips by the thousand are tests/campaign.py."""
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import forked
import hf
import train
from conftest import (ROOT, TINY, command, environment, flags, largest_difference, metrics, run, trained,
                      weights)
from runtime import checkpoint, lock
from runtime.config import BadInput
from test_tokenizer import write
from text.tokenizer import Tokenizer

SHORT = dict(max_steps=8, eval_interval=4, save_interval=4, dtype="fp32")


def wait_for(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def here(out_dir, text, **knobs):
    """As `trained`, in this process, which saves the imports. Returns the exit code."""
    knobs = TINY | {"dataset": text, "data_dir": text.parent / "tokens", "out_dir": out_dir, "device": "cpu"} | knobs
    return train.main(flags(**knobs))


def begun(out_dir, text, script="train.py", **knobs):
    """A long run that has logged its first steps."""
    knobs = dict(max_steps=100_000, save_interval=10**6, eval_interval=10**6) | knobs
    process = forked.Popen(command(out_dir, script=script, dataset=text, data_dir=text.parent / "tokens", **knobs),
                               env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (out_dir / "metrics.jsonl").exists() and len(metrics(out_dir)) > 2)
    return process


# --- one writer ---

@pytest.mark.parametrize("knobs", [dict(overwrite=True), dict(init_from="resume"), dict(resume="auto")], ids=str)
def test_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path, text, knobs):
    first = begun(tmp_path / "a", text)
    try:
        done = run(tmp_path / "a", text, **knobs)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"Another run is writing {tmp_path / 'a'} (Held by process {first.pid} on " in done.stderr
        assert first.poll() is None
    finally:
        first.terminate()
    assert first.wait(60) == 143
    assert checkpoint.newest_intact(tmp_path / "a") == max(metrics(tmp_path / "a"))


def test_a_lock_ends_with_its_process_and_is_no_loaders(tmp_path, text):
    first = begun(tmp_path / "a", text, num_workers=2, save_interval=2)
    wait_for(lambda: checkpoint.steps(tmp_path / "a"))
    first.kill()
    first.wait()
    assert (tmp_path / "a" / "run.lock").exists()
    here(tmp_path / "a", text, init_from="resume", max_steps=1)            # nothing is left to do
    assert not (tmp_path / "a" / "run.lock").exists()


def test_a_process_may_take_its_lock_again_and_release_it(tmp_path):
    path = tmp_path / "run.lock"
    lock.take(path, tmp_path)
    lock.take(path, tmp_path)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from runtime import lock; lock.WAIT = 0; lock.take({str(path)!r}, 'it')"
    assert "Another run is writing it (Held by process" in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    pid = os.fork()
    if not pid:                                              # a loader, say: what it closes stays locked
        os._exit(len(lock.held))
    assert os.waitpid(pid, 0)[1] == 0
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
    lock.release(path)
    assert not path.exists() and not subprocess.run([sys.executable, "-c", program], capture_output=True).returncode


def test_where_there_are_no_locks_a_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    lock.take(tmp_path / "run.lock", tmp_path)
    assert "a file system without locks (Operation not supported)" in capsys.readouterr().out
    lock.release(tmp_path / "run.lock")


def test_what_a_killed_writer_left_is_removed(tmp_path, text):
    out = tmp_path / "a"
    here(out, text, **SHORT)
    whole = weights(out, 8)
    (out / "checkpoints/step_00000008").rename(out / "checkpoints/step_00000008.replaced")       # killed while it replaced it
    (out / "checkpoints/step_00000004").rename(out / "checkpoints/step_00000004.replaced")
    (out / "checkpoints/partial-77").mkdir()
    (out / "config.json.tmp-77").write_text("{")
    (out / "mine.tmp-77").write_text("mine")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "model.json.tmp-77").write_text("{")             # killed in its first file
    here(tmp_path / "first", text, resume="auto", **SHORT)
    assert not list((tmp_path / "first").glob("*.tmp-*"))
    here(out, text, init_from="resume", **SHORT)
    assert largest_difference(weights(out, 8), whole) == 0 and checkpoint.steps(out) == [4, 8]
    assert sorted(p.name for p in out.iterdir()) == sorted([
        "checkpoints", "config.json", "metrics.jsonl", "mine.tmp-77", "model.json", "training.log"])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]


# --- nothing that changes goes unnoticed ---

def test_a_text_that_changed_is_refused_and_a_damaged_token_file_made_again(tmp_path, text, capsys):
    own = tmp_path / "own.txt"
    own.write_text(text.read_text())
    out = tmp_path / "a"
    here(out, own, **SHORT)
    whole = weights(out, 8)
    shutil.rmtree(out / "checkpoints/step_00000008")

    own.write_text(text.read_text().replace("cat", "dog"))
    with pytest.raises(BadInput, match="own.txt has changed since the run"):
        here(out, own, init_from="resume", **SHORT)
    own.write_text(text.read_text())
    for file in (tmp_path / "tokens").glob("*/train_00000.bin"):
        damaged = bytearray(file.read_bytes())
        damaged[1000] ^= 1
        file.write_bytes(damaged)
    here(out, own, init_from="resume", **SHORT)
    assert "train_00000.bin is not as it was written, so it is made again" in capsys.readouterr().out
    assert largest_difference(weights(out, 8), whole) == 0


def test_token_files_of_the_users_that_changed_are_refused(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint16)
    bins = tmp_path / "bins"
    bins.mkdir()
    ids.tofile(bins / "train.bin")
    ids[:2000].tofile(bins / "val.bin")
    here(tmp_path / "a", bins, **SHORT | dict(max_steps=4))
    ids[:2000][::-1].tofile(bins / "val.bin")                # of the validation text: what is best is about it
    with pytest.raises(BadInput, match="has changed since the run"):
        here(tmp_path / "a", bins, init_from="resume", **SHORT)


SPOILS = {
    "metrics.jsonl": [b"\xff\xfe{}\n", b"12\n", b"null\n", b'{"step": "x"}\n'],
    "config.json": [b"null", b"", b"\xff"],
    "checkpoints/step_00000008/meta.json": [b"null", b"[]", b'{"sha256": "x"}', b'{"sha256": {}, "val_loss": "x"}', b"\xff"],
    "checkpoints/step_00000004/meta.json": [b"null", b'{"val_loss": "x", "sha256": {"state.json": 3}}'],
    "retry.json": [b"{", b'{"micro_batch": 1.0, "batch_size": 4}', b'{"lr_factor": "x", "dtype": 3}', b"[]"],
    "run.lock": [b"Held by process x", b""],
}


@pytest.fixture(scope="module")
def done_run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("done") / "run"
    here(out, text, **SHORT)
    return out


@pytest.mark.parametrize("name", SPOILS)
def test_no_damage_ends_in_a_traceback_or_in_other_weights(tmp_path, text, done_run, name, capsys):
    """The same loaders that a resume has, in this process."""
    for content in SPOILS[name]:
        out = tmp_path / "a"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(done_run, out)
        append = name == "metrics.jsonl"
        (out / name).write_bytes(((out / name).read_bytes() if append else b"") + content + b"\n")
        train.main([f"--out_dir={out}", "--init_from=resume", f"--data_dir={text.parent / 'tokens'}", "--device=cpu"])
        assert largest_difference(weights(out, 8), weights(done_run, 8)) == 0, content
        assert metrics(out) == metrics(done_run)
        if append and b"step" not in content:
            assert "could not be read and are left out" in capsys.readouterr().out
    (out / "model.json").rename(tmp_path / "model.json")
    with pytest.raises(BadInput, match="a run's folder without its model.json"):
        train.main([f"--out_dir={out}", "--init_from=resume", "--device=cpu"])
    (tmp_path / "model.json").rename(out / "model.json")
    for name in ("model.json", "config.json"):               # without a copy to fall back on
        for content in (b"null", b'{"architecture": {"n_layers": 2}, "tokenizer": {}}', b'{"n_layer": "two"}', b"\xff"):
            (out / name).write_bytes(content)
            for meta in out.glob("checkpoints/*/meta.json"):
                meta.unlink(missing_ok=True)
            with pytest.raises(BadInput):
                train.main([f"--out_dir={out}", "--init_from=resume", "--device=cpu"])


def test_a_tokenizer_that_was_exchanged_is_refused(tmp_path):
    folder = write(tmp_path / "t")
    tokenizer = Tokenizer(folder)
    about = {"tokenizer": tokenizer.describe(), "tokenizer_sha256": tokenizer.sha256}
    found = hf.Found(folder, None, about, step=1)
    assert found.tokenizer().sha256 == found.tokenizer(str(folder)).sha256 == tokenizer.sha256
    other = write(tmp_path / "other", kind="smol")
    for name in ("bytes", str(other)):
        with pytest.raises(BadInput, match="has its own tokenizer"):
            found.tokenizer(name)
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(BadInput, match="not as it was written"):
        found.tokenizer()


# --- going on ---

def test_an_evaluation_that_a_second_signal_prevented_is_made_up_for(tmp_path, text):
    """The checkpoint of a stop stands before the evaluation does: as if killed between the two."""
    knobs = SHORT | dict(keep_last=9, patience=2, learning_rate=0.0)
    here(tmp_path / "whole", text, **knobs)
    out = tmp_path / "a"
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from runtime.run import Run
finish_step, evaluate = Run.finish_step, train.validation_loss
def stopped_at_4(run, tokens):
    if run.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    finish_step(run, tokens)
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
Run.finish_step, train.validation_loss = stopped_at_4, killed
train.main(sys.argv[1:])
"""
    given = command(out, dataset=text, data_dir=text.parent / "tokens", **knobs)[2:]
    assert forked.run([sys.executable, "-c", program, *given], env=environment()).returncode == -signal.SIGKILL
    assert checkpoint.steps(out) == [4] and not metrics(out, "val_loss")
    here(out, text, init_from="resume", **knobs)
    assert metrics(out, "val_loss") == metrics(tmp_path / "whole", "val_loss")
    assert checkpoint.best(out) == checkpoint.best(tmp_path / "whole") == 4
    assert checkpoint.read_meta(out, 4)["val_loss"] is not None
    assert largest_difference(weights(out, 8), weights(tmp_path / "whole", 8)) == 0


def test_one_command_always_works(tmp_path, text, capsys):
    out = tmp_path / "a"
    knobs = SHORT | dict(resume="auto", n_embd=64)
    here(out, text, **knobs)                                 # begins
    whole = weights(out, 8)
    for left, said in ((8, "steps 8 to 8"), (4, "steps 4 to 8")):          # has nothing to do, and goes on
        checkpoint.remove(out, [f"checkpoints/step_{step:08d}" for step in checkpoint.steps(out) if step > left])
        here(out, text, **knobs)
        assert said in capsys.readouterr().out and largest_difference(weights(out, 8), whole) == 0
    shutil.rmtree(out)
    here(out, text, **SHORT | dict(n_embd=64, max_steps=4))
    shutil.rmtree(out / "checkpoints")                       # as if killed before the first
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_steps=8"])
    said = capsys.readouterr().out
    assert "no checkpoint yet, so it begins again" in said and "steps 0 to 8" in said
    assert largest_difference(weights(out, 8), whole) == 0


def test_ranks_end_with_their_torchrun(tmp_path, text):
    out = tmp_path / "a"
    process = begun(out, text, ranks=2)
    ranks = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, ranks)), 30)
    assert checkpoint.newest_intact(out) == max(metrics(out))              # they have saved


@pytest.mark.parametrize("ranks, pieces", [(1, (8, 2)), (4, (4, 4))], ids=str)
def test_a_run_of_two_ranks_goes_on_with_other_numbers(tmp_path, text, stopped, ranks, pieces):
    """On one or four ranks, in other micro-batches: the same batches, losses to 1e-5 in fp32."""
    whole, half = stopped
    shutil.copytree(half, tmp_path / "a")
    batch_size, accumulation = pieces
    knobs = SHORT | dict(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    trained(tmp_path / "a", text, ranks=ranks, init_from="resume", **knobs)
    ours, theirs = metrics(tmp_path / "a"), metrics(whole)
    assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in ours)
    assert metrics(tmp_path / "a", "val_loss")[8] == pytest.approx(metrics(whole, "val_loss")[8], abs=1e-5)
    assert metrics(tmp_path / "a", "tokens") == metrics(whole, "tokens")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, text):
    """A run of two ranks, and the same as if it had been killed after step 4."""
    folder = tmp_path_factory.mktemp("two")
    knobs = SHORT | dict(gradient_accumulation_steps=4, optimizer="adamw", learning_rate=1e-3, keep_last=5)
    trained(folder / "whole", text, ranks=2, **knobs)
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half/checkpoints/step_00000008")
    return folder / "whole", folder / "half"


# --- a full disk ---

def test_a_disk_that_is_full_is_named_with_the_file(tmp_path, monkeypatch):
    def refuse(self, content):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    with pytest.raises(OSError, match="rft.json") as e:
        checkpoint.write_atomically(tmp_path / "rft.json", b"{}")
    assert e.value.errno == 28 and checkpoint.is_full(e.value)


def test_saving_a_step_again_keeps_the_first_until_the_second_stands(tmp_path):
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(3)}, {})
    program = f"""
import resource, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from runtime import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    checkpoint.save({str(tmp_path)!r}, 1, {{"a": torch.ones(3000)}}, {{}})
except checkpoint.BadInput as e:
    print(e)
"""
    done = forked.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "could not be written" in done.stdout and checkpoint.damage(tmp_path, 1) is None
    assert weights(tmp_path, 1)["a"].tolist() == [0, 0, 0]
