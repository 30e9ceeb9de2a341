"""TensorBoard, Weights & Biases and plots of a run."""
import io
import json
import sys
from types import SimpleNamespace

import pytest

import train
from conftest import called, flags, metrics, run, trained, unknown
from doctor import plot as curves
from runtime import config, log
from runtime.config import BadInput
from runtime.options import RunOptions


def plot(*arguments):
    return called(curves.main, [str(argument) for argument in arguments])


def test_tensorboard_gets_the_numbers_of_metrics_jsonl(tmp_path, text):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    trained(tmp_path / "a", text, tensorboard=True, max_steps=10, save_interval=5, eval_interval=5)
    (tmp_path / "a/checkpoints/step_00000010").rename(tmp_path / "gone")
    trained(tmp_path / "a", text, init_from="resume", max_steps=12)             # the flag is the run's
    events = EventAccumulator(str(tmp_path / "a/tensorboard"))
    events.Reload()
    for name in ("train/loss", "train/lr", "val/loss", "time/tokens_per_s"):
        seen = {e.step: e.value for e in events.Scalars(name)}
        key = name.replace("val/", "val_").rpartition("/")[2]
        assert seen == pytest.approx(metrics(tmp_path / "a", key), rel=1e-6) and len(seen) == len(events.Scalars(name))
    assert not unknown(tmp_path / "a")


def test_a_resumed_run_continues_its_weights_and_biases_run(tmp_path, text):
    pytest.importorskip("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    trained(tmp_path / "a", text, wandb=True, max_steps=4, env=offline)
    trained(tmp_path / "a", text, init_from="resume", max_steps=6, env=offline)
    runs = [p.name for p in (tmp_path / "a/wandb").glob("offline-run-*")]
    assert len(runs) == 2 and len({name.split("-")[-1] for name in runs}) == 1


@pytest.mark.parametrize("options, variable, opened", [
    ({}, None, ("nanorft", "a")), ({}, "lab", ("lab", "a")),
    (dict(wandb_project="chess", wandb_name="first"), "lab", ("chess", "first"))])
def test_the_project_and_name_of_a_weights_and_biases_run(tmp_path, monkeypatch, options, variable, opened):
    class FakeRun:
        id = "1"

    def init(project, name, **others):
        assert (project, name) == opened and others["dir"] == tmp_path / "a"
        return FakeRun
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=None))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    (tmp_path / "a").mkdir()
    assert log.Log(tmp_path / "a", cfg=RunOptions(wandb=True, **options)).wandb_run is FakeRun


def test_a_resume_that_weights_and_biases_refuses_leaves_the_options_as_they_were(tmp_path, text, monkeypatch):
    def init(**options):
        raise RuntimeError("no login")
    out = tmp_path / "run"
    trained(out, text, max_steps=2)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=None))
    done = run(out, text, init_from="resume", max_steps=3, wandb=True)
    assert done.returncode == 2 and "no login" in done.stderr
    saved = config.read_saved(out)
    assert saved["max_steps"] == 2 and not saved["wandb"]


def test_a_name_at_weights_and_biases_needs_it(tmp_path):
    cfg = config.load(train.Config, flags(out_dir=tmp_path, wandb_name="first"))
    with pytest.raises(BadInput, match="no effect without --wandb"):
        train.check(cfg)


@pytest.mark.parametrize("x", ["steps", "tokens", "time"])
def test_curves_of_two_runs(tmp_path, text, x):
    pytest.importorskip("matplotlib")
    for name, lr in (("a", 0.01), ("b", 0.001)):
        if not (tmp_path.parent / name).exists():
            trained(tmp_path.parent / name, text, learning_rate=lr, max_steps=10, eval_interval=5)
    done = plot(tmp_path.parent / "a", tmp_path.parent / "b", f"--x={x}", f"--output={tmp_path}/curves.png")
    assert done.returncode == 0, done.stderr
    image = (tmp_path / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000


def test_files_by_others_are_not_overwritten_by_plots(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n')
    for name in ("curves.png", "a.pdf"):
        knobs = [str(tmp_path)] + ([f"--output={tmp_path / name}"] if name != "curves.png" else [])
        assert curves.main(knobs) == curves.main(knobs) == 0             # its own is replaced
        (tmp_path / name).write_bytes(b"precious")
        with pytest.raises(BadInput, match=f"{name} exists"):
            curves.main(knobs)
        assert (tmp_path / name).read_bytes() == b"precious"


def test_a_run_is_compared_with_recorded_seeds(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [{"step": 0, "config": {}}, *({"step": step, "loss": 0.0, "reward": 0.9, "entropy": 0.01} for step in (1, 2, 3))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves.main([str(tmp_path), "--expected=quickstart_grpo"]) == 0
    seeds = [row[2] for row in curves.recorded("quickstart_grpo")["reward"]["runs"]]
    assert f"{tmp_path}: reward 0.9 at step 3, seeds {min(seeds):.3g} to {max(seeds):.3g}; " in capsys.readouterr().out
    for knobs, words in ((["--expected=nothing"], "choose chess_mini"), (["--expected=cpu_small", "--x=time"], "needs --x=steps")):
        with pytest.raises(BadInput, match=words):
            curves.main([str(tmp_path), *knobs])


def test_held_out_rewards_are_drawn_with_their_interval(monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn = {"plot": [], "fill_between": []}
    for name, method in ((name, getattr(axes, name)) for name in drawn):
        monkeypatch.setattr(axes, name, lambda *given, name=name, method=method, **style: drawn[name].append(given[1:4]) or method(*given, **style))
    rows = [{"step": step, "val_reward": 0.2 * step, "val_reward_low": 0.1 * step, "val_reward_high": 0.3 * step} for step in (0, 2)]
    curves.draw({"a": [rows[0], {"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, rows[1]]}, "steps", io.BytesIO())
    assert [given[:2] for given in drawn["plot"]] == [([1, 2], [0.1, 0.2]), ([0, 2], [0, 0.4])]
    assert drawn["fill_between"] == [([0, 2], [0, 0.2], [0, pytest.approx(0.6)])]


def test_plot_errors_are_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "config": {}}) + "\n" + '{"step": 1, "lo')
    for arguments, words in (((), "No run is given"), ((tmp_path / "none",), "not a run folder"), ((tmp_path,), "no step yet"),
                             ((tmp_path, "--x=epochs"), "should be steps, tokens or time")):
        done = plot(*arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
