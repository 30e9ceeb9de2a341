"""What a run survives: a second writer, files that change or are damaged, a stop at an awkward moment, and other
numbers of ranks."""
import io
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import forked
import grpo
import hub
import train
from conftest import (ROOT, TINY, alive, command, environment, flags, largest_difference, metrics, run, trained,
                      wait_for, weights)
from doctor import diagnose
from runtime import checkpoint, guard, lock, usage
from runtime.config import BadInput
from test_grpo import GRPO, TASK
from text.tokenizer import Tokenizer
from test_tokenizer import write

SHORT = dict(max_steps=8, eval_interval=4, save_interval=4, dtype="fp32")


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
        assert f"Another run is writing to {tmp_path / 'a'} (Held by process {first.pid} on " in done.stderr
        with pytest.raises(BadInput, match="Another run is writing"):      # both began at once, and saw an empty folder
            checkpoint.open_run(tmp_path / "a", {}, {})
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
    here(tmp_path / "a", text, init_from="resume", max_steps=checkpoint.newest_intact(tmp_path / "a"))
    assert not (tmp_path / "a" / "run.lock").exists()


def test_a_process_may_take_its_lock_again_and_release_it(tmp_path):
    path = tmp_path / "run.lock"
    lock.take(path, tmp_path)
    lock.take(path, tmp_path)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from runtime import lock; lock.take({str(path)!r}, 'it')"
    assert "Another run is writing to it (Held by process" in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    pid = os.fork()
    if not pid:                                              # a loader, say: what it closes stays locked
        os._exit(len(lock.held))
    assert os.waitpid(pid, 0)[1] == 0
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
    lock.release(path)
    assert not path.exists() and not subprocess.run([sys.executable, "-c", program], capture_output=True).returncode


def test_a_lock_file_that_its_last_holder_removes_meanwhile_is_not_taken(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: path.unlink())
    with pytest.raises(BadInput, match="Another run is writing to it"):
        lock.take(path, "it")
    assert path not in lock.held


def test_where_there_are_no_locks_a_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    lock.take(tmp_path / "run.lock", tmp_path)
    assert "a file system without locks (Operation not supported)" in capsys.readouterr().out
    lock.release(tmp_path / "run.lock")


UNFIT = {
    "a folder": lambda path, target: path.mkdir(),
    "a FIFO": lambda path, target: os.mkfifo(path),
    "a link loop": lambda path, target: path.symlink_to(path),
    "a link": lambda path, target: path.symlink_to(target),
}


@pytest.mark.parametrize("how", ["a folder", "a FIFO", "a link loop"])
def test_a_lock_that_can_not_be_one_is_a_sentence(tmp_path, how):
    UNFIT[how](tmp_path / "a.lock", None)
    with pytest.raises(BadInput, match="a.lock, the lock of it, can't be opened"):
        lock.take(tmp_path / "a.lock", "it")

    def refuse(*_):
        raise OSError(30, "Read-only file system", "a.lock")
    with pytest.raises(SystemExit, match="2"):
        guard.run(refuse, [])


@pytest.mark.parametrize("name, how", [
    ("training.log", "a link"), ("metrics.jsonl", "a FIFO"), ("rollouts", "a link"), ("run.lock", "a link loop"),
    ("run.lock", "a folder"), ("checkpoints", "a link"), ("tensorboard", "a link"),
    ("bad_batch_step_9_rank_0.pt", "a link")])
def test_nothing_is_written_through_a_link_of_a_stranger_s_folder(tmp_path, done_run, text, name, how):
    target = tmp_path / "target"
    (target / "step_00000008").mkdir(parents=True) if name == "checkpoints" else target.write_text("mine")
    for start in (dict(init_from="resume"), dict(overwrite=True)):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(done_run, tmp_path / "a")
        if name == "checkpoints":
            shutil.rmtree(tmp_path / "a" / name)
        checkpoint.remove(tmp_path / "a", [name])
        UNFIT[how](tmp_path / "a" / name, target)
        with pytest.raises(BadInput, match=f"{name} is not a "):
            here(tmp_path / "a", text, **SHORT, **start)
    assert (target / "step_00000008").is_dir() if name == "checkpoints" else target.read_text() == "mine"


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
    assert "train_00000.bin is damaged: the text is tokenised again" in capsys.readouterr().out
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
    "metrics.jsonl": [b"\xff\xfe{}\n", b"12\n", b"null\n", b'{"step": "x"}\n', b'{"step": 8, "config": "x"}',
                      b'{"step": 8, "config": {}, "facts": []}', b'{"step": 8, "loss": %s}' % (b"9" * 400),
                      b'{"step": 8, "val_loss": %s}' % (b"9" * 400)],
    "config.json": [b"null", b"", b"\xff"],
    "checkpoints/step_00000008/meta.json": [b"null", b"[]", b'{"sha256": "x"}', b'{"sha256": {}, "val_loss": "x"}', b"\xff"],
    "checkpoints/step_00000008/optimizer.safetensors": [b"", b"\xff" * 500],
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
        assert diagnose.main([str(out)]) in (0, diagnose.EXIT_FINDINGS)
        train.main([f"--out_dir={out}", "--init_from=resume", f"--data_dir={text.parent / 'tokens'}", "--device=cpu"])
        assert largest_difference(weights(out, 8), weights(done_run, 8)) == 0, content
        assert metrics(out) == metrics(done_run)
        if append:
            assert "are left out" in capsys.readouterr().out
    (out / "model.json").rename(tmp_path / "model.json")
    with pytest.raises(BadInput, match="is a run folder without model.json"):
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
    found = hub.ModelSource(folder, None, about, step=1)
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
def stopped_at_4(run, *given):
    if run.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    finish_step(run, *given)
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
    with pytest.raises(BadInput, match="checkpoint"):        # there is nothing to evaluate
        train.main([f"--out_dir={out}", "--init_from=resume", "--eval_only"])
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_steps=8"])
    said = capsys.readouterr().out
    assert "no checkpoint yet: it restarts" in said and "steps 0 to 8" in said
    assert largest_difference(weights(out, 8), whole) == 0
    with pytest.raises(BadInput, match="finds no run to evaluate"):
        here(tmp_path / "none", text, resume="auto", eval_only=True)


def test_a_run_that_was_killed_early_restarts_with_its_own_tokenizer(tmp_path, text, monkeypatch):
    pytest.importorskip("tokenizers")
    out = tmp_path / "a"
    monkeypatch.chdir(write(tmp_path / "tok").parent)
    here(out, text, **SHORT | dict(max_steps=4), tokenizer="tok")
    whole = weights(out, 4)
    shutil.rmtree(out / "checkpoints")
    write(tmp_path / "other", "qwen")
    monkeypatch.chdir(tmp_path / "other")                    # has another tokenizer.json
    train.main([f"--out_dir={out}", "--init_from=resume"])
    assert largest_difference(weights(out, 4), whole) == 0
    shutil.rmtree(tmp_path / "tok")                          # from here on the run has its own
    assert train.main([f"--out_dir={out}", "--init_from=resume", "--max_steps=5"]) == 0


def test_a_rate_that_moves_on_resume_is_said(tmp_path, text, done_run, capsys):
    out = tmp_path / "a"
    shutil.copytree(done_run, out)
    shutil.rmtree(out / "checkpoints/step_00000008")
    knobs = SHORT | dict(init_from="resume")
    with pytest.raises(BadInput, match="has done 4 steps, more than the 3 of --max_steps or --num_epochs: raise it"):
        here(out, text, **knobs | dict(max_steps=3))
    # wsd falls over the last 0.4 of the steps: of 8 from step 4 on, of 6 from step 3 on, and is down by a third there
    here(out, text, **knobs | dict(max_steps=6))
    assert ("The learning rate of step 5 is 6.67e-03 instead of 1.00e-02, because of changes: max_steps from 8 to 6.") in capsys.readouterr().out
    here(out, text, **knobs | dict(max_steps=6))
    assert "The learning rate of" not in capsys.readouterr().out
    here(tmp_path / "b", text, **SHORT | dict(max_steps=4, warmup_steps=10))
    assert ("--warmup_steps=10 is more than the run's 4 steps: the learning rate peaks at 4.00e-03 instead of 1.00e-02.") in capsys.readouterr().out


# --- the terminal ---

@pytest.mark.parametrize("script, number", [("train.py", signal.SIGINT), ("grpo.py", signal.SIGHUP)], ids=str)
def test_a_run_outlives_its_terminal(tmp_path, text, done_run, script, number):
    """The reader of its output is gone, as tee is after Ctrl-C; then it is asked to stop."""
    out = tmp_path / "a"
    (tmp_path / "letters.py").write_text(TASK)
    knobs = TINY | dict(dataset=text, data_dir=text.parent / "tokens", device="cpu", dtype="fp32", lr_schedule="constant")
    if script == "grpo.py":
        knobs = GRPO | dict(init_from=done_run, task=tmp_path / "letters.py")
    main = train.main if script == "train.py" else grpo.main
    process = forked.Popen([sys.executable, str(ROOT / script), *flags(**knobs | dict(out_dir=out, max_steps=100_000))],
                           env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while "step 2/" not in (line := process.stdout.readline()):
        assert line
    process.stdout.close()
    seen = max(metrics(out))
    wait_for(lambda: max(metrics(out)) > seen + 2 or process.poll() is not None)
    os.kill(process.pid, number)
    assert process.wait(60) == 128 + number
    step = checkpoint.newest_intact(out)
    assert step == max(metrics(out)) and f"Stopped as asked after step {step}" in (out / "training.log").read_text()
    main(flags(init_from="resume", out_dir=out, max_steps=step + 2))
    main(flags(**knobs | dict(out_dir=tmp_path / "calm", max_steps=step + 2)))
    assert largest_difference(weights(out, step + 2), weights(tmp_path / "calm", step + 2)) == 0


def printed(monkeypatch, stream, ends=False):
    """The exit code of a script that prints a line to a stream of its own."""
    def main(_):
        if ends:
            usage.end_with_reader()
        print("naïve \N{CJK UNIFIED IDEOGRAPH-6F22}\x1b[2J")
    with monkeypatch.context() as m, pytest.raises(SystemExit) as e:
        m.setattr(sys, "stdout", stream)
        guard.run(main, [])
    return e.value.code or 0


def test_no_output_ends_a_run(monkeypatch, capsys):
    for ends, code in ((False, 0), (True, 128 + signal.SIGPIPE)):          # sample.py's reader may be head
        read, write = os.pipe()
        os.close(read)
        assert printed(monkeypatch, open(write, "w"), ends) == code
    for ends, code in ((False, 0), (True, 2)):
        assert printed(monkeypatch, open("/dev/full", "w"), ends) == code
    assert "A file could not be written (No space left on device)" in capsys.readouterr().err


def test_characters_that_can_not_be_shown_are_escaped(monkeypatch, tmp_path, text):
    for encoding, expected in (("ascii", b"na\\xefve \\u6f22\x1b[2J\n"), ("cp1252", b"na\xefve \\u6f22\x1b[2J\n")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        assert printed(monkeypatch, stream) == 0 and stream.buffer.getvalue() == expected
    stream.isatty = lambda: True
    stream.buffer.truncate(0)
    assert printed(monkeypatch, stream) == 0 and stream.buffer.getvalue().endswith(b"\\x1b[2J\n")
    here(tmp_path / "a", text, **SHORT, text_key="\x1b[2J\nstep 9")
    assert "text_key=\\x1b[2J\\nstep 9," in (tmp_path / "a/training.log").read_text()


SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from runtime.usage import first_line
first_line()
print("importing", flush=True)
class Config:
    pass
time.sleep(float(sys.argv[1]))
"""


def test_before_a_script_has_begun(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    process = subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "error: interrupted.\n" and process.returncode == 130
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command, "0"], stderr=subprocess.PIPE)
    assert (closed.returncode, closed.stderr) == (0, b"")
    monkeypatch.setattr(sys, "argv", [command[1], "--help"])
    with monkeypatch.context() as patched:   # a process of torch's DataLoader, which imports the script again
        patched.setattr("multiprocessing.parent_process", lambda: process)
        usage.first_line()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="2"):
        usage.first_line()
    assert capsys.readouterr().err == "error: nanoRFT runs on Linux, macOS and WSL: on Windows, run it in WSL.\n"


def test_ranks_end_with_their_torchrun(tmp_path, text):
    out = tmp_path / "a"
    process = begun(out, text, ranks=2)
    ranks = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, ranks)), 30)
    assert checkpoint.newest_intact(out) == max(metrics(out))              # they have saved


@pytest.mark.parametrize("ranks, pieces", [(1, (16, 1)), (4, (4, 4))], ids=str)
def test_a_run_of_two_ranks_goes_on_with_other_numbers(tmp_path, text, stopped, ranks, pieces):
    """On one or four ranks, in other micro-batches: the same batches, losses to 1e-5 in fp32."""
    whole, half = stopped
    shutil.copytree(half, tmp_path / "a")
    batch_size, accumulation = pieces
    knobs = SHORT | dict(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    done = trained(tmp_path / "a", text, ranks=ranks, init_from="resume", **knobs)
    assert f"Micro-batch {min(batch_size, 16 // ranks)} x accumulation" in done.stdout
    ours, theirs = metrics(tmp_path / "a"), metrics(whole)
    assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in ours)
    assert metrics(tmp_path / "a", "val_loss")[8] == pytest.approx(metrics(whole, "val_loss")[8], abs=1e-5)
    assert metrics(tmp_path / "a", "tokens") == metrics(whole, "tokens")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, text):
    """A run of two ranks, and the same as if it had been killed after step 4."""
    folder = tmp_path_factory.mktemp("two")
    knobs = SHORT | dict(batch_size=16, gradient_accumulation_steps=1, optimizer="adamw", learning_rate=1e-3, keep_last=5)
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
