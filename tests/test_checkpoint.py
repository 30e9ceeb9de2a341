import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

import forked
from conftest import ROOT
from runtime import checkpoint, config
from runtime.config import BadInput


PLAIN = ["training.log", "metrics.jsonl", "tokenizer.json", "base.safetensors", "base.sha256",
         "wandb_id", "bad_batch_step_5_rank_0.pt"]
CONFIG, MODEL = {"out_dir": "out", "init_from": "scratch"}, {"architecture": {}, "tokenizer": {}}


def save(out_dir, step, value=1.0, **kw):
    checkpoint.save(out_dir, step, {"w": torch.full((4,), value)}, {"step": step}, {"w.exp_avg": torch.full((4,), -value)}, **kw)


def test_the_last_k_and_the_best_are_kept(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        save(tmp_path, step, val_loss=loss, config={"keep_last": 2})
    assert checkpoint.steps(tmp_path) == [2, 4, 5]
    assert checkpoint.best(tmp_path) == 2 == checkpoint.choose(tmp_path)
    assert checkpoint.newest_intact(tmp_path) == 5


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 1, 2.0)
    assert checkpoint.load_weights(tmp_path, 1)["w"].tolist() == [2.0] * 4
    assert checkpoint.load_state(tmp_path, 1) == {"step": 1} and checkpoint.has_state(tmp_path, 1)
    with checkpoint.open_tensors(tmp_path, 1, "optimizer.safetensors") as moments:
        assert moments["w.exp_avg"][:].tolist() == [-2.0] * 4


def test_written_tensors_are_read_by_safetensors(tmp_path):
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2), "whole": torch.arange(5), "a": torch.randn(3, 4).t(),
               "b": torch.randn(7).bfloat16(), "c": torch.randn(1, 2, 3).half(), "naïve": torch.randn(2).double()}
    checkpoint.write_tensors(tmp_path / "x", tensors, iter(tensors.values()))
    again = load_file(tmp_path / "x")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())


def test_resuming_from_an_earlier_step_removes_the_later_ones(tmp_path):
    """After a damaged step 20 a run resumes from step 10: neither pruning nor `best` may prefer the damaged one."""
    for step in (10, 20):
        save(tmp_path, step, val_loss=30.0 - step)
    (tmp_path / "checkpoints" / "step_00000020" / "state.json").write_bytes(b"torn")
    save(tmp_path, 15, config={"keep_last": 1})
    assert checkpoint.newest_intact(tmp_path) == 15 and checkpoint.steps(tmp_path) == [10, 15]


def test_a_non_finite_loss_is_never_the_best(tmp_path):
    for step, loss in ((1, float("nan")), (2, 5.0), (3, float("inf"))):
        save(tmp_path, step, val_loss=loss, config={"keep_last": 9})
    assert checkpoint.best(tmp_path) == 2 and checkpoint.losses(tmp_path) == {2: 5.0}
    assert checkpoint.damage(tmp_path, 1) is None and checkpoint.losses(tmp_path, 1) == {}                       # a later step's, damaged perhaps, is not the one to beat


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "meta.json"])
@pytest.mark.parametrize("how", ["torn", "flipped", "gone"])
def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path, name, how):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "checkpoints" / "step_00000002" / name
    content = path.read_bytes()
    if how == "torn":
        path.write_bytes(content[:len(content) // 2])
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:])
    else:
        path.unlink()
    said = []
    step = checkpoint.newest_intact(tmp_path, said.append)
    assert step == 1 and "step 2" in said[0]


@pytest.mark.parametrize("name, problem", [("model.safetensors", "fails its checksum"), ("meta.json", "meta.json is missing")])
def test_the_best_checkpoint_is_not_replaced_in_silence(tmp_path, capsys, name, problem):
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (4, 5.0)):
        save(tmp_path, step, val_loss=loss, config={"keep_last": 9})
    assert checkpoint.choose(tmp_path) == 3 and capsys.readouterr() == ("", "")
    path = tmp_path / "checkpoints/step_00000003" / name
    path.write_bytes(b"\0" + path.read_bytes()[1:]) if problem.endswith("checksum") else path.unlink()
    assert checkpoint.choose(tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == "" and "step 3" in said.err and problem in said.err and "using step 2" in said.err


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "a/b"])
def test_a_checkpoint_that_names_files_elsewhere_is_damaged(tmp_path, name):
    save(tmp_path, 1)
    (tmp_path / "secret").write_text("")
    meta = tmp_path / "checkpoints/step_00000001/meta.json"
    about = config.read_sealed(meta, "")
    about["sha256"][name] = checkpoint.sha256(tmp_path / "secret")
    meta.write_bytes(config.seal(about))
    assert "not a file in its folder" in checkpoint.damage(tmp_path, 1)


def test_a_partial_checkpoint_does_not_count(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "partial-7").mkdir()
    (tmp_path / "checkpoints" / "partial-7" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == [1]
    save(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path):
    save(tmp_path, 1)
    program = f"""
import resource, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from runtime import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))         # a write past 100 kB fails, as on a full disk
try:
    checkpoint.save({str(tmp_path)!r}, int(sys.argv[2]), {{"w": torch.zeros(int(sys.argv[1]))}}, {{}}, {{"s": torch.zeros(100_000)}})
except checkpoint.BadInput as e:
    print(e)
"""
    for size, step in ((1_000_000, 2), (4, 2), (4, 1)):   # the weights do not fit; the optimizer's state does not; step 1 again
        done = forked.run([sys.executable, "-c", program, size, step], capture_output=True, text=True)
        assert f"The checkpoint of step {step} in {tmp_path / 'checkpoints'} could not be written" in done.stdout, done.stderr
    assert checkpoint.newest_intact(tmp_path) == 1 and checkpoint.load_weights(tmp_path, 1)["w"].tolist() == [1.0] * 4
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_folder_with_a_run_is_not_overwritten_unasked(tmp_path):
    checkpoint.open_run(tmp_path, CONFIG | {"a": 1}, MODEL)
    save(tmp_path, 1)
    with pytest.raises(BadInput, match="--overwrite"):
        checkpoint.open_run(tmp_path, CONFIG | {"a": 2}, MODEL)
    checkpoint.open_run(tmp_path, CONFIG | {"a": 2}, MODEL, resume=True)
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.open_run(tmp_path, CONFIG | {"a": 2}, MODEL, overwrite=True)
    assert checkpoint.steps(tmp_path) == []


def put(folder, *names):
    """Write the user's own files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"precious": 1}')


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [
    "checkpoints/precious.pt", "checkpoints/step_00000010/model.safetensors", "tensorboard/notes.txt",
    "config.json", "model.json", *PLAIN])
def test_a_foreign_file_is_named_and_kept(tmp_path, name, overwrite):
    put(tmp_path, name)
    with pytest.raises(BadInput, match=rf"is not a run folder, but holds {re.escape(name.partition('/')[0])}, which"):
        checkpoint.open_run(tmp_path, CONFIG, MODEL, overwrite)
    assert files(tmp_path) == [name] and (tmp_path / name).read_text() == '{"precious": 1}'


def test_all_files_that_a_run_would_overwrite_are_named(tmp_path):
    put(tmp_path, "config.json", "model.json", "training.log", "slurm-7.out", "checkpoints/precious.pt")
    with pytest.raises(BadInput, match="holds checkpoints, config.json, model.json, training.log, which"):
        checkpoint.open_run(tmp_path, CONFIG, MODEL)


def test_overwrite_removes_only_run_files(tmp_path):
    mine = ["checkpoints/best/precious.pt", "checkpoints/precious.pt", "checkpoints/step_1", "notes.txt",
            "checkpoints/step_00000001.bak/w.pt", "run.log", "slurm-7.out", "tensorboard/notes.txt",
            "wandb/run-1/files/output.log"]
    put(tmp_path, "slurm-7.out", "run.log")
    checkpoint.open_run(tmp_path, CONFIG, MODEL)          # files with other names do not matter
    put(tmp_path, *mine, *PLAIN, "tensorboard/events.out.tfevents.1.host.2.0", "checkpoints/partial/w.safetensors")
    save(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    put(tmp_path, "elsewhere/model.safetensors")
    (tmp_path / "checkpoints/step_00000002").symlink_to(tmp_path / "elsewhere")
    checkpoint.open_run(tmp_path, CONFIG | {"seed": 7}, MODEL, overwrite=True)
    assert files(tmp_path) == sorted([*mine, "config.json", "elsewhere/model.safetensors", "model.json", "run.lock"])
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7
    checkpoint.open_run(tmp_path, CONFIG, MODEL)          # which is a run that has not logged a step yet


def test_a_run_killed_before_its_config_was_written_is_a_run(tmp_path):
    checkpoint.open_run(tmp_path, CONFIG, MODEL)
    (tmp_path / "config.json").unlink()
    checkpoint.open_run(tmp_path, CONFIG, MODEL)
    assert files(tmp_path) == ["config.json", "model.json", "run.lock"]


def test_out_of_memory_is_not_reported_as_damaged_files():
    with pytest.raises(torch.OutOfMemoryError), checkpoint.loading("The checkpoint"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(BadInput, match="The checkpoint can't be loaded"), checkpoint.loading("The checkpoint"):
        raise RuntimeError("size mismatch")


def test_a_folder_without_a_run_is_named(tmp_path):
    for call in (checkpoint.read_model, checkpoint.choose):
        with pytest.raises(BadInput, match=str(tmp_path)):
            call(tmp_path)
