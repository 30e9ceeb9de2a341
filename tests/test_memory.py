"""The user sets the effective batch; the micro-batch follows from the available memory."""
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import forked
import train
from conftest import command, count_graphs, environment, failure, metrics, run, trained, weights
from model import GPT, GPTConfig
from runtime import config, distributed, guard, hardware, memory, recovery
from runtime.config import BadInput
from runtime.guard import Failure
from runtime.run import Run
from text import datasets
from text.tokenizer import Tokenizer

LITTLE = {"script": "tests/little_memory.py"}
WHOLE = {"batch_size": 8, "dtype": "fp32", "optimizer": "adamw"}


@pytest.fixture(scope="module")
def plenty(text, tmp_path_factory):
    """A run with memory for its whole batch of 8."""
    out = tmp_path_factory.mktemp("memory") / "plenty"
    trained(out, text, **WHOLE)
    return out


def losses_agree(a, b):
    return metrics(a).keys() == metrics(b).keys() and all(abs(v - metrics(b)[k]) < 1e-5 for k, v in metrics(a).items())


def test_a_micro_batch_that_does_not_fit_is_halved_before_step_0_and_kept(plenty, text, tmp_path):
    done = trained(tmp_path / "a", text, **LITTLE, **WHOLE, env={"ROWS": "2"})
    assert "A micro-batch of 8 does not fit" in done.stdout and "Micro-batch 2 (8 does not fit) x accumulation 4" in done.stdout
    assert losses_agree(tmp_path / "a", plenty) and set(metrics(tmp_path / "a", "micro_batch").values()) == {2}
    # The choice belongs to the checkpoint: where there is more memory, a resumed run is still the same run.
    trained(tmp_path / "b", text, **LITTLE, **WHOLE, env={"ROWS": "2"})
    (tmp_path / "b/checkpoints/step_00000020/meta.json").unlink()
    done = trained(tmp_path / "b", text, **WHOLE, init_from="resume")
    assert "Micro-batch 2" in done.stdout and "steps 10 to 20" in done.stdout
    assert all(torch.equal(v, weights(tmp_path / "b")[k]) for k, v in weights(tmp_path / "a").items())


@pytest.mark.parametrize("room, micro_batch", [(100, 8), (0.1, 4)], ids=["all of it", "half"])
def test_a_wide_micro_batch_is_the_largest_that_is_estimated_to_fit(plenty, text, tmp_path, room, micro_batch, monkeypatch):
    """Of a batch that the options split into eight; a resumed run keeps it."""
    sizes = []
    parts = memory.parts

    def sized(model, hardware, size, *rest):
        sizes.append(size)
        return {"all": 2**30 * (0.05 if size <= 4 else 0.08)} if room < 1 else parts(model, hardware, size, *rest)
    monkeypatch.setattr(memory, "parts", sized)
    monkeypatch.setattr(memory, "available", lambda device: room * 2**30)
    knobs = WHOLE | dict(batch_size=1, gradient_accumulation_steps=8, widen_micro_batch=True)
    done = trained(tmp_path / "a", text, **knobs)
    assert f"Micro-batch {micro_batch} x accumulation {8 // micro_batch}" in done.stdout and sizes[0] == 8
    assert losses_agree(tmp_path / "a", plenty) and set(metrics(tmp_path / "a", "micro_batch").values()) == {micro_batch}
    sizes.clear()
    done = trained(tmp_path / "a", text, **knobs, init_from="resume", max_steps=22)
    assert f"Micro-batch {micro_batch} x accumulation {8 // micro_batch}" in done.stdout and sizes[0] == micro_batch


def test_micro_batches_of_examples_are_widened_too(tmp_path, text):
    (tmp_path / "x.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "{i + 1}"}}\n' for i in range(8)))
    rows = []
    for name, knobs in (("narrow", {}), ("wide", {"widen_micro_batch": True})):
        done = trained(tmp_path / name, text, dataset=tmp_path / "x.jsonl", batch_size=2, gradient_accumulation_steps=4, max_steps=2, **knobs)
        rows.append(8 if "Micro-batch 8 x accumulation 1" in done.stdout else 2)
        dataset, *_ = datasets.open_data(train.Config(**config.read_saved(tmp_path / name)), Tokenizer("bytes"))
        rows.append(len(dataset[0][0][0]))
    assert rows == [2, 2, 8, 8]


def test_ranks_agree_on_the_smaller_one(plenty, text, tmp_path):
    done = trained(tmp_path / "a", text, ranks=2, **LITTLE, **WHOLE, env={"ROWS": "2", "ONLY_RANK": "1"})
    assert "A micro-batch of 4 does not fit" in done.stdout and "Micro-batch 2 (4 does not fit) x accumulation 2 x 2 ranks" in done.stdout
    assert losses_agree(tmp_path / "a", plenty)


def test_out_of_memory_later_repeats_the_step_with_half_the_micro_batch(plenty, text, tmp_path):
    # Calls: one refused, two to rehearse 4 sequences, two a step; so 18 is the first half of step 8, and its second is refused.
    done = trained(tmp_path / "a", text, **LITTLE, **WHOLE, env={"ROWS": "4", "CALLS": "18", "ROWS_LATER": "2"})
    assert "Step 8 ran out of memory" in done.stdout
    assert "repeating it with micro-batch 2 instead of 4" in done.stdout
    assert losses_agree(tmp_path / "a", plenty) and sorted(set(metrics(tmp_path / "a", "micro_batch").values())) == [2, 4]


def test_a_repeated_step_starts_with_the_memory_of_the_failed_one_freed(plenty, text, tmp_path):
    done = trained(tmp_path / "a", text, **LITTLE, **WHOLE,
                   env={"ROWS": "4", "CALLS": "18", "ROWS_LATER": "2", "BACKWARD": "1"})
    assert "Step 8 ran out of memory" in done.stdout and losses_agree(tmp_path / "a", plenty)


def test_several_ranks_without_a_checkpoint_get_the_flags_to_start_again(text, tmp_path):
    done = run(tmp_path / "a", text, ranks=2, **LITTLE, **WHOLE, env={"ROWS": "4", "CALLS": "5", "ROWS_LATER": "2"})
    assert done.returncode == 1 and "--overwrite --batch_size=2 --gradient_accumulation_steps=4" in done.stderr


def test_several_ranks_end_and_resume_from_the_checkpoint(plenty, text, tmp_path):
    done = run(tmp_path / "a", text, ranks=2, **LITTLE, **WHOLE,
               env={"ROWS": "4", "CALLS": "12", "ROWS_LATER": "2", "ONLY_RANK": "1"})
    assert done.returncode == 1 and "Rank 1 ran out of memory at step" in done.stderr and "micro-batch 2 instead of 4" in done.stderr
    assert sorted(p.name for p in (tmp_path / "a/checkpoints").iterdir()) == ["step_00000010"]
    done = trained(tmp_path / "a", text, ranks=2, **WHOLE, init_from="resume")
    assert "Micro-batch 2 " in done.stdout and "steps 10 to 20" in done.stdout
    assert losses_agree(tmp_path / "a", plenty)


def test_torchrun_restart_resumes_from_the_checkpoint(plenty, text, tmp_path):
    """With the same command line, which would otherwise start again or refuse to."""
    start = command(tmp_path / "a", 2, **LITTLE, **WHOLE, dataset=text, data_dir=text.parent / "tokens", overwrite=True)
    start.insert(start.index("--standalone"), "--max-restarts=1")
    env = environment(ROWS="4", CALLS="12", ROWS_LATER="2", ONLY_RANK="1")
    done = forked.run(start, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, failure(done)
    assert "Rank 1 ran out of memory at step" in done.stderr and "steps 10 to 20" in done.stdout
    assert losses_agree(tmp_path / "a", plenty) and not (tmp_path / "a/retry.json").exists()


def test_a_step_is_repeated_with_save_only_model(plenty, text, tmp_path):
    out = tmp_path / "a"
    done = trained(out, text, **LITTLE, **WHOLE, save_only_model=True,
                   env={"ROWS": "4", "CALLS": "18", "ROWS_LATER": "2"})
    assert "Step 8 ran out of memory" in done.stdout and losses_agree(out, plenty)
    assert "Step 8 ran out of memory" in (out / "training.log").read_text() and not (out / "retry.json").exists()
    assert not (out / "checkpoints/step_00000020/state.json").exists()


def test_a_micro_batch_of_one_that_does_not_fit_says_what_is_needed(text, tmp_path):
    done = run(tmp_path / "a", text, **LITTLE, **WHOLE, env={"ROWS": "0"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not (tmp_path / "a/metrics.jsonl").exists()
    for words in ("one sequence of 32 tokens does not fit in memory; CPU", "GiB free", "GiB (weights 0.00, gradients", "--block_size"):
        assert words in done.stderr
    trained(tmp_path / "a", text, max_steps=1)                       # nothing was begun that would have to be overwritten


def test_weights_that_do_not_fit_are_refused_before_allocation(text, tmp_path):
    done = run(tmp_path / "a", text, n_layer=100, n_embd=16384)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "The weights of this model alone take 12" in done.stderr and "--n_embd" in done.stderr


SHAPES = [dict(), dict(n_kv_head=1, mlp="swiglu"), dict(head_dim=6, mlp_hidden=40), dict(norm="layernorm", position="learned", qk_norm=False),
          dict(qkv_bias=True, o_bias=True, mlp_bias=True, tied_head=True), dict(mlp="swiglu", mlp_bias=True), dict(mlp="gelu", qkv_bias=True),
          dict(norm="layernorm", tied_head=True, position="learned", n_layer=1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_counted_without_making_them(shape):
    c = GPTConfig(**dict(vocab_size=300, block_size=64, n_layer=3, n_head=2, n_embd=32) | shape)
    assert memory.n_params(c) == GPT(c).n_params()


def test_absurd_shapes_are_refused_before_anything_is_built():
    began = time.perf_counter()
    for shape in (dict(n_layer=1000, n_embd=65536), dict(vocab_size=2**31 - 1, n_embd=1024), dict(mlp_hidden=2**31 - 1), dict(block_size=2**31 - 1)):
        with pytest.raises(BadInput, match="The weights of this model alone take"):
            memory.check_weights(GPTConfig(**dict(n_layer=100, n_head=16, n_embd=64) | shape), "cpu")
    for shape in (dict(n_layer=99999999), dict(vocab_size=10**12)):
        with pytest.raises(ValueError, match="should be a whole number from 1"):
            GPTConfig(**shape)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("micro, share, less", [(8, 8, 4), (20, 20, 10), (5, 20, 2), (3, 3, 1), (32, 96, 16), (7, 12, 3), (2, 2, 1)])
def test_smaller_divides_the_share_evenly(micro, share, less):
    assert memory.divisors(micro, share)[1] == less and memory.divisors(micro, share)[-1] == 1


def test_an_estimate_precedes_the_rehearsal_on_a_cpu(monkeypatch):
    model = GPT(GPTConfig(vocab_size=300, block_size=64, n_layer=2, n_head=2, n_embd=64))
    hw = hardware.setup("cpu")
    assert memory.rehearse(distributed.TrainedModel(model), hw, 4, 64, 2, 1000) is None and model.training
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.setattr(memory, "available", lambda hw: 10**6)
    assert memory.is_out_of_memory(memory.rehearse(distributed.TrainedModel(model), hw, 4, 64, 2, 1000))


def test_the_rehearsal_compiles_the_code_that_training_runs(monkeypatch):
    """Block and loss, for training and evaluation; the first real micro-step compiles nothing."""
    graphs = count_graphs(monkeypatch)
    model = GPT(GPTConfig(vocab_size=300, block_size=64, n_layer=2, n_head=2, n_embd=32))
    fast, hw = distributed.TrainedModel(model, compile=True, dynamic=False), hardware.setup("cpu", dtype="fp32")
    assert memory.rehearse(fast, hw, 4, 64, 2, 1000) is None and len(graphs) == 4
    x, y = torch.randint(300, (8, 64)), torch.randint(300, (8, 64))
    for mx, my in zip(x.split(4), y.split(4)):
        fast.loss(mx, my).backward()
    with torch.no_grad():
        fast.eval().loss(x[:4], y[:4])
    assert len(graphs) == 4


def test_a_bug_in_the_model_keeps_its_traceback(monkeypatch):
    model = GPT(GPTConfig(vocab_size=300, block_size=64, n_layer=1, n_head=2, n_embd=32))
    monkeypatch.setattr(model, "hidden", lambda x: x + "mistake")
    failure = memory.rehearse(distributed.TrainedModel(model), hardware.setup("cpu"), 4, 64, 2, 1000)
    assert isinstance(failure, TypeError) and failure.__traceback__.tb_next


def test_activations_are_counted_as_autograd_keeps_them():
    """Compare the estimate from shapes with the tensors of a real forward pass."""
    def both(dtype, attention, checkpointing):
        model = GPT(GPTConfig(vocab_size=300, block_size=64, n_layer=3, n_head=2, n_embd=64), attention, checkpointing)
        hw = hardware.setup("cpu", dtype=dtype, attention=attention)
        kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def note(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        x = torch.zeros(4, 64, dtype=torch.long)
        with hw.autocast(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(x, x)
        assert loss.requires_grad
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):              # as --attention=cudnn leaves it, on a GPU
            computed = memory.saved_for_backward(model, hw, 4, 64)
        return computed, sum(n for p, n in kept.items() if p not in own)
    sizes = {}
    for case in (("fp32", "sdpa", False), ("bf16", "math", False), ("fp32", "sdpa", True)):
        computed, real = sizes[case] = both(*case)
        assert computed == pytest.approx(real, rel=0.02)
    assert sizes["fp32", "sdpa", True][0] < 0.6 * sizes["fp32", "sdpa", False][0]


def test_allocator_errors_are_recognised():
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert memory.is_out_of_memory(MemoryError()) and memory.is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    assert memory.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50, dtype=torch.uint8)
    assert memory.is_out_of_memory(refused.value) and not memory.is_out_of_memory(RuntimeError("size mismatch"))


def test_out_of_memory_during_graph_capture_is_recognised():
    """CUDA reports the capture; the cause is the previous exception."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as e:
        assert memory.is_out_of_memory(e)
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError:
            raise TypeError("a mistake in what was to help")
    except TypeError as e:
        assert not memory.is_out_of_memory(e)


def test_the_limits_of_all_cgroups_above_count(tmp_path, monkeypatch):
    """A container's at the root, SLURM's and systemd's below; cgroup v1 beside v2."""
    shown, plain = "3:cpu:/\n2:memory:/job\n0::/slice/job\n", memory.read_text
    monkeypatch.setattr(memory, "read_text", lambda path: shown if str(path) == "/proc/self/cgroup" else plain(path))
    monkeypatch.setattr(memory, "CGROUPS", {"": (tmp_path, "memory.max", "anon"), "memory": (tmp_path / "v1", "memory.limit_in_bytes", "total_rss")})
    for folder, name, limit, used in (("slice/job", "memory.max", "max", "anon 9"), ("slice", "memory.max", "5000000", "anon 2000000\nfile 7"),
                                      ("v1/job", "memory.limit_in_bytes", "4000000", "cache 5\ntotal_rss 3000000")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(f"{limit}\n")
        (tmp_path / folder / "memory.stat").write_text(f"{used}\n")
    assert [*memory.free_in_cgroups()] == [1_000_000, 3_000_000]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory.available(torch.device("cpu")) == 1_000_000


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nDetails"), RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                                   MemoryError("too much")], ids=lambda error: type(error).__name__)
def test_out_of_memory_outside_of_training_is_one_sentence(error, capsys):
    """For example in eval.py, which tries no smaller batch."""
    def fail(argv):
        raise error
    with pytest.raises(SystemExit, match="1"):
        guard.run(fail, [])
    said = capsys.readouterr().err
    assert said.startswith(f"error: Out of memory ({str(error).splitlines()[0]}): lower the batch size") and said.count("\n") == 1
    error.args = ("another problem",)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError):
        with pytest.raises(type(error), match="another problem"):
            guard.run(fail, [])


def test_out_of_memory_in_an_evaluation_names_it_and_a_hint_can_be_pasted():
    said = []
    state = SimpleNamespace(micro_batch=1, evaluation_due=True)
    run = SimpleNamespace(sizes=[1], step=300, state=state, counters_before={}, cfg=SimpleNamespace(out_dir="out/my run", save_only_model=False),
                          log=SimpleNamespace(say=said.append, say_findings=list), stopping=True, stop=SimpleNamespace(exit_code=lambda: 130))
    with pytest.raises(Failure, match="^The evaluation after step 300 ran out of memory"):
        recovery.after_out_of_memory(run, "no room")
    state.evaluation_due = False
    with pytest.raises(Failure, match="^Step 301 ran out of memory"):
        recovery.after_out_of_memory(run, "no room")
    run.counters_before = None
    with pytest.raises(Failure, match="^The start before step 301 ran out of memory"):
        recovery.after_out_of_memory(run, "no room")
    assert Run.end(run) == 130 and said[0].endswith("Resume with --init_from=resume --out_dir='out/my run'")
    run.cfg.save_only_model = True
    assert Run.end(run) == 130 and said[1].endswith("start a new run with --init_from='out/my run' and another --out_dir=")
