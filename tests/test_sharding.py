"""--parallel=fsdp: each rank has a slice of every tensor, and results equal those of one process."""
import shutil
import weakref

import pytest
import torch

import forked
import grpo
import train
from conftest import ROOT, TINY, environment, failure, flags, in_process, largest_difference, metrics, run, trained, weights
from model import GPT, GPTConfig
from runtime import checkpoint, config, distributed, hardware, memory, parallel as sharding
from runtime.config import BadInput

KNOBS = dict(dtype="fp32", batch_size=2, gradient_accumulation_steps=4, save_interval=10, keep_last=5)
VARIANTS = {
    "muon": dict(optimizer="muon"),
    "adamw": dict(optimizer="adamw", learning_rate=1e-3, tied_head=True, loss_chunks=3, gradient_checkpointing=True, n_layer=3, n_embd=36),
    "sum_locally": dict(optimizer="muon", sum_locally=True, weight_decay=0.1),
}


def optimizer_state(out_dir, step=20):
    with checkpoint.open_tensors(out_dir, step, "optimizer.safetensors") as tensors:
        return {name: values[...] for name, values in tensors.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory, text):
    """Return a cached function: variant -> run folders of one process and of two sharded ranks."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            trained(folder / "one", text, parallel="fsdp", **KNOBS, **VARIANTS[name])     # alone it has everything
            trained(folder / "two", text, ranks=2, parallel="fsdp", **KNOBS, **VARIANTS[name])
            made[name] = folder / "one", folder / "two"
        return made[name]
    return get


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_weights_are_those_of_one_process(both, name):
    one, two = both(name)
    ours, theirs = metrics(two), metrics(one)
    assert len(ours) == 20 and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in theirs)
    norms, expected = metrics(two, "grad_norm"), metrics(one, "grad_norm")
    assert all(norms[s] == pytest.approx(expected[s], rel=1e-4) for s in expected)
    assert metrics(two, "val_loss")[20] == pytest.approx(metrics(one, "val_loss")[20], abs=1e-5)
    assert largest_difference(weights(two), weights(one)) < 1e-4
    assert largest_difference(optimizer_state(two), optimizer_state(one)) < 1e-4
    # Tuned weights, and not two that never moved.
    assert largest_difference(weights(one), weights(one, 10)) > 1e-3


def test_the_files_are_those_of_one_process(both):
    one, two = both("muon")
    files = [{str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*.safetensors")} for out in (one, two)]
    assert files[0] == files[1] and len(files[0]) == 4
    assert not list(two.rglob("*.pt"))


def test_four_ranks_on_two_nodes(both, tmp_path, text):
    """Within which the weights are shared, and between which gradients are summed: two nodes of two ranks, as far as they can
    tell."""
    one, _ = both("muon")
    trained(tmp_path / "four", text, ranks=4, parallel="hybrid", **KNOBS | VARIANTS["muon"], env={"NODES": "2"})
    ours, theirs = metrics(tmp_path / "four"), metrics(one)
    assert all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in theirs)
    assert largest_difference(weights(tmp_path / "four"), weights(one)) < 1e-4
    assert largest_difference(optimizer_state(tmp_path / "four"), optimizer_state(one)) < 1e-4


@pytest.mark.parametrize("ranks, how", [(1, {}), (2, {}), (4, {}), (2, {"parallel": "ddp"})], ids=str)
def test_a_sharded_run_resumes_with_any_number_of_ranks_sharded_or_not(both, tmp_path, text, ranks, how):
    _, two = both("muon")
    out = tmp_path / "a"
    shutil.copytree(two, out)
    shutil.rmtree(out / "checkpoints/step_00000020")          # as if killed after step 10
    done = trained(out, text, ranks=ranks, init_from="resume", **KNOBS | how)
    assert "steps 10 to 20" in done.stdout
    ours, theirs = metrics(out), metrics(two)
    assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in theirs)
    exact = 0 if ranks == 2 and not how else 1e-4
    assert largest_difference(weights(out), weights(two)) <= exact
    assert largest_difference(optimizer_state(out), optimizer_state(two)) <= exact


def test_an_unsharded_run_resumes_sharded(both, tmp_path, text):
    one, _ = both("adamw")
    out = tmp_path / "a"
    shutil.copytree(one, out)
    shutil.rmtree(out / "checkpoints/step_00000020")
    trained(out, text, ranks=2, init_from="resume", parallel="fsdp", **KNOBS | VARIANTS["adamw"])
    assert largest_difference(weights(out), weights(one)) < 1e-4


def test_adapters(both, tmp_path, text):
    one, _ = both("muon")
    knobs = KNOBS | dict(init_from=one, lora_rank=4, learning_rate=0.01, max_steps=10, save_interval=5)
    trained(tmp_path / "one", text, **knobs)
    trained(tmp_path / "two", text, ranks=2, parallel="fsdp", **knobs)
    adapters = weights(tmp_path / "two", 10)
    assert adapters and all(".lora_" in name for name in adapters)
    assert largest_difference(adapters, weights(tmp_path / "one", 10)) < 1e-4
    base = [checkpoint.load_base(tmp_path / name) for name in ("one", "two")]
    assert largest_difference(*base) == 0
    shutil.rmtree(tmp_path / "two/checkpoints/step_00000010")
    trained(tmp_path / "two", text, ranks=2, parallel="fsdp", **knobs | {"init_from": "resume"})
    assert largest_difference(adapters, weights(tmp_path / "two", 10)) == 0


def test_adapters_are_merged_with_whole_weights(both, tmp_path, text):
    """In bf16 the merged weights are rounded once, as in one process."""
    one, _ = both("muon")
    knobs = KNOBS | dict(init_from=one, lora_rank=4, dtype="bf16", learning_rate=3e-4, max_steps=8, save_interval=8)
    trained(tmp_path / "one", text, **knobs)
    trained(tmp_path / "two", text, ranks=2, parallel="fsdp", **knobs)
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), abs=1e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_other_precisions(tmp_path, text, dtype):
    """Rounding differs from one process's: weights are gathered in bf16, and each rank sums its own part."""
    knobs = KNOBS | dict(dtype=dtype, max_steps=10)
    trained(tmp_path / "one", text, **knobs)
    trained(tmp_path / "two", text, ranks=2, parallel="fsdp", **knobs)
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert all(ours[s] == pytest.approx(theirs[s], abs=0.01) for s in theirs) and ours[10] < ours[1] - 0.5
    scale = [checkpoint.load_state(tmp_path / name, 10)["scaler"].get("scale") for name in ("one", "two")]
    assert scale[0] == scale[1] and bool(scale[0]) == (dtype == "fp16")


def test_ranks_with_unequal_numbers_of_micro_batches(both, tmp_path):
    import json
    from test_examples import TUNE
    rows = [[f"{i} and {i}?", i + i, f"{'so ' * (i % 5)}{i} + {i} = {i + i}"] for i in range(10)]
    (tmp_path / "rft.json").write_text(json.dumps(rows))
    base, _ = both("muon")
    knobs = TUNE | dict(init_from=base, batch_size=1, gradient_accumulation_steps=4, num_epochs=2, valid_share=0.3, dtype="fp32")
    for name, ranks, parallel in (("one", 1, "ddp"), ("two", 2, "fsdp")):
        trained(tmp_path / name, tmp_path / "rft.json", ranks=ranks, defaults={}, parallel=parallel, **knobs)
    ours = metrics(tmp_path / "two")
    theirs = metrics(tmp_path / "one")
    assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-5) for s in theirs)
    last = checkpoint.steps(tmp_path / "one")[-1]
    assert largest_difference(weights(tmp_path / "two", last), weights(tmp_path / "one", last)) < 1e-4


# --- reinforcement learning ---

@pytest.mark.parametrize("knobs", [dict(beta=0.1, tis_cap=2.0), dict(beta=0.1, lora_rank=4, learning_rate=0.03, gradient_checkpointing=True)],
                         ids=["whole", "lora"])
def test_grpo(both, tmp_path, knobs):
    """The engine has the same weights after each step, so completions and updates are equal."""
    from test_grpo import GRPO, TASK
    (tmp_path / "letters.py").write_text(TASK)
    base, _ = both("muon")
    shared = GRPO | dict(init_from=base, task=tmp_path / "letters.py", max_steps=3, save_interval=1) | knobs
    in_process(grpo.main, flags(**shared, out_dir=tmp_path / "one"))
    line = [*forked.TORCHRUN, "--nproc_per_node=2", ROOT / "grpo.py", *flags(**shared, out_dir=tmp_path / "two", parallel="fsdp")]
    done = forked.run(line, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, failure(done)
    for key in ("reward", "loss", "kl", "grad_norm", "logprob_gap_max"):
        ours, theirs = metrics(tmp_path / "two", key), metrics(tmp_path / "one", key)
        assert ours.keys() == theirs.keys() and all(ours[s] == pytest.approx(theirs[s], abs=1e-4) for s in theirs), key
    assert largest_difference(weights(tmp_path / "two", 3), weights(tmp_path / "one", 3)) < 1e-4


# --- the parts ---

def test_muon_s_matrices_are_computed_by_one_rank_each():
    """On ragged slices: 5 matrices of 7 rows, three ranks."""
    program = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from runtime import distributed, fsdp, parallel as sharding
distributed.init()
whole = torch.arange(5 * 7 * 3.0).view(5, 7, 3)
computed = []
def double(matrices):
    computed.extend(matrices[:, 0, 0].tolist())
    return 2 * matrices
mine = sharding.rows_of(distributed.rank(), 3, 7)
mesh = torch.distributed.init_device_mesh("cpu", (3,))
result = fsdp.map_sharded(whole[:, mine], 7, mesh, double)
assert torch.equal(result, 2 * whole[:, mine])
said = distributed.gather(computed)
if distributed.is_main():
    print([[int(first) // 21 for first in rank] for rank in said])
distributed.close()
"""
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=3", "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stdout == "[[0, 3], [1, 4], [2]]\n", done.stderr


@pytest.mark.parametrize("n, ranks", [(7, 3), (2, 4), (64, 8), (1, 2)])
def test_rows_are_cut_as_torch_cuts_them(n, ranks):
    cut = [torch.arange(n)[sharding.rows_of(rank, ranks, n)].tolist() for rank in range(ranks)]
    expected = [part.tolist() for part in torch.arange(n).chunk(ranks)]
    assert cut == expected + [[]] * (ranks - len(expected))


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_gathers_one_tensor_at_a_time(tmp_path, monkeypatch, fails):
    """All tensors are gathered even if writing fails: other ranks take part."""
    alive, most, gathered = weakref.WeakSet(), [], []

    def gather(tensor):
        whole = tensor.clone()
        alive.add(whole)
        most.append(len(alive))
        gathered.append(tensor)
        return whole
    monkeypatch.setattr(sharding, "full_tensor", gather)
    weights = {f"w{i}": torch.randn(4, 4) for i in range(9)}
    moments = {f"w{i}.exp_avg": torch.randn(4, 4) for i in range(9)}
    if fails:
        monkeypatch.setattr(checkpoint, "SAFETENSORS", {})
    with pytest.raises(KeyError) if fails else pytest.MonkeyPatch.context():
        sharding.write_on_main([*weights.values(), *moments.values()],
                         lambda values: checkpoint.save(tmp_path, 1, weights, {}, moments, values=values))
    assert len(gathered) == 18
    if not fails:
        assert max(most) == 1
        assert largest_difference(checkpoint.load_weights(tmp_path, 1), weights) == 0


def test_memory_estimate_of_a_shard(monkeypatch):
    config = GPTConfig(vocab_size=1000, block_size=64, n_layer=4, n_head=4, n_embd=256)
    size = 4 * memory.n_params(config)
    monkeypatch.setattr(memory, "available", lambda device: size / 3)
    with pytest.raises(BadInput, match="--parallel=fsdp"):
        memory.check_weights(config, "cpu")
    memory.check_weights(config, "cpu", ranks=4)


def test_one_process_does_not_shard():
    hw = hardware.setup("cpu", dtype="fp32")
    model = GPT(GPTConfig(vocab_size=99, block_size=16, n_layer=1, n_head=2, n_embd=16))
    assert sharding.building_device(hw, "fsdp") == hw.device and not sharding.shards("fsdp") and not distributed.is_spread(model)
    assert sharding.gathered_bytes(model, torch.float32) == 0
    assert sharding.full_tensor(model.head.weight) is sharding.local(model.head.weight) is model.head.weight


# --- bad input ---

@pytest.mark.parametrize("knobs, said", [
    (dict(parallel="zero"), "--parallel=zero should be ddp, fsdp or hybrid"),
    (dict(parallel="fsdp", compile_mode="reduce-overhead"), "don't work with sharded weights"),
    (dict(sum_locally=True), "--sum_locally is for sharded weights"),
], ids=str)
def test_bad_options_are_one_sentence(capsys, tmp_path, knobs, said):
    with pytest.raises(BadInput, match=said):
        cfg = config.load(train.Config, flags(**TINY | knobs, out_dir=tmp_path / "a"))
        train.check(cfg)
    if "parallel" in knobs and "compile_mode" not in knobs:
        with pytest.raises(BadInput, match=said):
            config.load(grpo.Config, flags(**knobs))


def test_a_sharded_reference_model_can_not_be_offloaded():
    with pytest.raises(BadInput, match="--offload_reference can't move a model sharded"):
        grpo.check(config.load(grpo.Config, ["--init_from=x", "--parallel=fsdp", "--offload_reference", "--beta=0.1"]))


def test_more_ranks_than_sequences(tmp_path, text):
    done = run(tmp_path / "a", text, ranks=3, parallel="fsdp", batch_size=2, gradient_accumulation_steps=1)
    assert done.returncode == 1 and done.stderr.count("error: 2 sequences per step can't be split evenly over 3 ranks") == 1
    assert not (tmp_path / "a").exists()


# --- a rank that hangs ---

@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_hangs_ends_the_run(tmp_path, text, parallel):
    program = f"""
import datetime, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train
from runtime import distributed, guard
from runtime.run import Run
distributed.STEP_TIMEOUT = datetime.timedelta(seconds=3)
end_phase = Run.end_phase
def slow(run, name, **how):
    if run.step == 3 and name == "data" and distributed.rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    end_phase(run, name, **how)
Run.end_phase = slow
guard.run(train.main)
"""
    given = flags(**TINY, out_dir=tmp_path / "a", dataset=text, data_dir=text.parent / "tokens", parallel=parallel)
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", "-c", program, *given], env=environment(), capture_output=True, text=True,
                      timeout=60)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1, done.stderr
    assert "error: Rank 0 waited more than 0:00:03 for another rank, which hangs" in done.stderr
