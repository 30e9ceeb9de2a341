"""Expected curves: the band of a recipe, whose run it is, and what is said of it. All runs are made up."""
import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import grpo
import train
from conftest import ROOT
from doctor import band, expected, plot
from runtime import guard
from runtime.config import BadInput, seal
from studies import bands

RL = {"task": "unit_conversion", "dataset": None, "k_samples": 8, "max_steps": 100, "learning_rate": 5e-4,
      "init_from": "out/rft", "log_interval": 5, "seed": 0}
BASE = {"dataset": "task:unit_conversion", "batch_size": 32, "gradient_accumulation_steps": 1,
        "max_steps": 60, "learning_rate": 0.01, "init_from": "scratch", "seed": 0}


def noise(rng, runs, steps, own, lasting, single):
    """Deviations [runs, steps]: a run's own offset, noise that lasts ten steps, noise of single steps."""
    wander = rng.standard_normal((runs, steps))
    for t in range(1, steps):
        wander[:, t] = 0.9 * wander[:, t - 1] + math.sqrt(1 - 0.9**2) * wander[:, t]
    offsets = own * rng.standard_normal((runs, 1))
    return offsets + lasting * wander + single * rng.standard_normal((runs, steps))


def grpo_curves(rng, runs, steps=21, own=0.7, lasting=0.7, single=2.5):
    """{figure: [runs, steps]}: a reward that rises from 0.6 to 0.75, entropy that falls, two evaluations. A
    step's reward has about the noise of 32 questions; noise becomes less."""
    t = np.linspace(0, 1, steps)
    deviations = [noise(rng, runs, steps, own, lasting, single) * (1 - t / 2) for _ in range(2)]
    return {
        "reward": 0.6 + 0.15 * t + 0.03 * deviations[0],
        "entropy": 0.05 * np.exp(-0.8 * t + 0.15 * deviations[1]),
        "val_accuracy": 0.76 + 0.02 * (own * rng.standard_normal((runs, 1)) + rng.standard_normal((runs, 2))),
    }


def as_figures(curves):
    return {key: {"steps": steps_of(key, rows), "runs": rows.tolist()} for key, rows in curves.items()}


def steps_of(key, rows):
    return [0, 100] if key == "val_accuracy" else [1, *range(5, 5 * rows.shape[1], 5)]


def leaves(bands, curves, row):
    return [gone["figure"] for key, rows in curves.items()
            for gone in band.departures(key, bands[key], dict(zip(steps_of(key, rows), rows[row].tolist())))]


# --- the band ---

def test_with_one_block_it_is_student_s_prediction_interval():
    for n, t in ((3, 4.3027), (5, 2.7764), (8, 2.3646)):     # quantiles of 97.5%
        assert band.multiplier(n, 1, 0.05) == pytest.approx(t * math.sqrt(1 + 1 / n), rel=0.03)
    runs = [[0.5], [0.6], [0.7]]
    found = band.band("reward", [10], runs, 0.05)
    assert found["mean"] == [0.6] and found["steps"] == [[10]]
    assert found["high"][0] - 0.6 == pytest.approx(4.3027 * 0.1 * math.sqrt(4 / 3), rel=0.03)
    assert band.multiplier(5, 8, 0.05) > 1.15 * band.multiplier(5, 1, 0.05)


def test_a_curve_is_compared_in_a_few_blocks():
    for n in (1, 2, 7, 8, 9, 21, 46, 100):
        parts = band.blocks(n)
        assert len(parts) <= band.BLOCKS and sorted(i for part in parts for i in part) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert np.allclose(band.pooling(8).sum(1), 1)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("own, lasting, single", [(0.7, 0.7, 2.5), (1, 0.3, 0.3), (0.3, 1, 1)])
def test_fresh_healthy_runs_lie_within_as_a_whole(seeds, own, lasting, single):
    rng = np.random.default_rng(1)
    within = 0
    for _ in range(500):
        curves = grpo_curves(rng, seeds + 1, own=own, lasting=lasting, single=single)
        found = band.bands(as_figures({key: rows[:-1] for key, rows in curves.items()}))
        within += not leaves(found, curves, -1)
    assert 0.96 <= within / 500 <= 0.999, within / 500


def test_broken_runs_leave_it():
    rng = np.random.default_rng(2)
    caught = {"shifted": 0, "flat": 0, "collapsed": 0, "nan": 0}
    for _ in range(50):
        curves = grpo_curves(rng, 6, steps=100, single=2.5)
        found = band.bands(as_figures({key: rows[:-1] for key, rows in curves.items()}))
        healthy = {key: rows[-1:].copy() for key, rows in curves.items()}
        shifted = healthy | {"reward": healthy["reward"] - 0.25}
        flat = grpo_curves(rng, 1, steps=100)
        flat["reward"] -= 0.15 * np.linspace(0, 1, 100)
        flat["entropy"] *= np.exp(0.8 * np.linspace(0, 1, 100))
        collapsed = healthy | {"reward": np.where(np.arange(100) < 70, healthy["reward"], 0.02)}
        broken = healthy | {"entropy": np.where(np.arange(100) == 60, math.nan, healthy["entropy"])}
        for name, run in zip(caught, (shifted, flat, collapsed, broken)):
            caught[name] += bool(leaves(found, run, 0))
    assert caught["collapsed"] == caught["nan"] == 50, caught
    assert caught["shifted"] >= 48 and caught["flat"] >= 40, caught


def test_seeds_that_agree_to_the_last_digit_leave_room_for_rounding():
    found = band.band("loss", [1, 2], [[5.549, 2.0]] * 3, 0.05)
    assert found["low"][0] < 5.53 and found["high"][0] > 5.57


# --- a run, and its recipe ---

def write_run(folder, knobs, curves, row=0, until=None):
    """A run's folder with these knobs and one row of curves, as far as the step `until`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(seal(knobs | {"out_dir": str(folder)}))
    lines = {}
    for key, rows in curves.items():
        for step, value in zip(steps_of(key, rows), rows[row].tolist()):
            if until is None or step <= until:
                value = value if math.isfinite(value) else str(value)
                evaluation = key.startswith("val_")
                line = lines.setdefault((step, evaluation), {"step": step})
                line |= {key: value} if evaluation else {"loss": 1.0, key: value}
    rows = [{"step": 0, "config": knobs}, *(lines[place] for place in sorted(lines))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """Five finished quickstarts in out/seedN, of which the bands are written, and a sixth."""
    monkeypatch.setattr(expected, "FOLDER", tmp_path / "bands")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    curves = grpo_curves(rng, 6)
    losses = {"loss": 5 * np.exp(-3 * np.linspace(0, 1, 13) + 0.05 * rng.standard_normal((6, 13)))}
    for i in range(6):
        out = tmp_path / f"out/seed{i}"
        write_run(out / "base", BASE | {"seed": i}, losses, i)
        tuned = {"dataset": f"{out}/rft.json", "init_from": f"{out}/base", "max_steps": None}
        write_run(out / "rft", BASE | {"seed": i} | tuned, losses, i)
        write_run(out / "grpo", RL | {"seed": i, "init_from": f"{out}/rft"}, curves, i)
    folders = [str(tmp_path / f"out/seed{i}") for i in range(5)]
    assert bands.main(["quickstart", *folders, "--commit=abc", "--machine=made up"]) == 0
    return tmp_path, curves


def verdicts(capsys, *argv):
    code = expected.main([*map(str, argv), "--json"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_file_holds_what_its_band_is_computed_from(ladder):
    folder, curves = ladder
    found = expected.recipes()
    assert list(found) == ["quickstart_base", "quickstart_grpo", "quickstart_rft"]
    for name, recipe in found.items():
        assert recipe["band"] == band.bands(recipe["figures"]) and recipe["seeds"] == [0, 1, 2, 3, 4]
        assert recipe["commit"] == "abc" and recipe["machine"] == "made up"
        assert str(folder) not in (expected.FOLDER / f"{name}.json").read_text()
        assert not expected.BESIDE & recipe["knobs"].keys()
    assert found["quickstart_base"]["starts_from"] is None
    assert found["quickstart_grpo"]["starts_from"] == "quickstart_rft"
    rewards = found["quickstart_grpo"]["figures"]["reward"]["runs"]
    assert rewards[2] == pytest.approx(curves["reward"][2], abs=1e-4)
    assert found["quickstart_base"]["knobs"]["sequences"] == 32


def test_the_bands_that_come_with_the_project_are_those_of_their_figures():
    for path in (ROOT / "expected/bands").glob("*.json"):
        recipe = json.loads(path.read_text())
        for key, again in band.bands(recipe["figures"]).items():
            for side in ("low", "mean", "high"):          # what is drawn may differ with NumPy's version
                assert recipe["band"][key][side] == pytest.approx(again[side], rel=0.05), path.name


def test_the_bands_that_come_with_the_project_know_each_knob():
    """A knob that came later is to be written into them with the value that their runs had, for a run with another
    value is not of the recipe."""
    for name, recipe in expected.recipes().items():
        stage = {"train.py": train, "grpo.py": grpo}[recipe["stage"]]
        knobs = {field.name for field in fields(stage.Config)} - expected.BESIDE
        assert knobs <= recipe["knobs"].keys(), name


def test_nine_of_ten_fresh_quickstarts_lie_within_the_bands_that_come_with_the_project():
    known = {name: recipe for name, recipe in expected.recipes().items() if name.startswith("quickstart")}
    fresh = bands.judged(known)
    if len(fresh) < 10:
        pytest.skip("the fresh seeds have not been run yet")
    assert sum(not left for left in fresh.values()) >= 0.9 * len(fresh), fresh
    for recipe in known.values():
        assert not set(recipe["seeds"]) & set(fresh) and len(recipe["fresh"]) == len(fresh)


def test_five_seeds_are_few_as_the_page_says():
    known = {name: recipe for name, recipe in expected.recipes().items() if name.startswith("quickstart")}
    narrower = {}
    for name, recipe in known.items():
        first = {key: figure | {"runs": figure["runs"][:5]} for key, figure in recipe["figures"].items()}
        others = dict(recipe["fresh"])
        for i, seed in enumerate(recipe["seeds"][5:], 5):
            others[str(seed)] = {key: figure | {"runs": [figure["runs"][i]]} for key, figure in recipe["figures"].items()}
        narrower[name] = {"band": band.bands(first), "fresh": others}
    left = {seed for seed, where in bands.judged(narrower).items() if where}
    assert left == {11, 22} and len(others) == 15
    page = (ROOT / "docs/expected.md").read_text()
    assert "would hold 13 of the other fifteen ladders" in page and "and seed 11" in page


def test_a_healthy_run_is_within(ladder, capsys):
    code, rows = verdicts(capsys, "out/seed5/base", "out/seed5/rft", "out/seed5/grpo")
    assert code == 0 and {row["verdict"] for row in rows} == {"within"}
    assert [row["recipe"] for row in rows] == ["quickstart_base", "quickstart_rft", "quickstart_grpo"]
    assert rows[2]["figures"] == ["reward", "val_accuracy", "entropy"]
    assert expected.main(["out/seed5/grpo"]) == 0
    assert "within the band of quickstart_grpo (5 seeds) up to step 100" in capsys.readouterr().out


def test_a_run_that_left_is_told_where_first(ladder, capsys):
    folder, curves = ladder
    bad = curves | {"reward": np.where(np.arange(21) < 9, curves["reward"], 0.1),
                    "entropy": np.where(np.arange(21) < 15, curves["entropy"], 9.0)}
    write_run(folder / "out/seed5/grpo", RL | {"init_from": "out/seed5/rft"}, bad, 5)
    code, (row,) = verdicts(capsys, "out/seed5/grpo")
    first, second = row["left"]
    assert code == expected.LEFT == 3 and row["verdict"] == "left"
    assert (first["figure"], first["from"], first["to"], second["figure"]) == ("reward", 45, 55, "entropy")
    assert first["value"] == pytest.approx(0.1) and 0.4 < first["low"] < first["high"]
    assert expected.main(["out/seed5/base", "out/seed5/grpo"]) == 3
    said = capsys.readouterr().out.splitlines()[1]
    assert "reward is 0.1 at steps 45 to 55, expected 0." in said and "also entropy is 9" in said


def test_a_run_is_judged_as_far_as_it_got(ladder, capsys):
    folder, curves = ladder
    dead = curves | {"reward": np.where(np.arange(21) < 12, curves["reward"], 0.0)}
    # blocks end at 10, 25, 40, 55, 70 ...
    for until, verdict in ((50, "within"), (65, "within"), (70, "left"), (100, "left")):
        run = write_run(folder / "cut", RL | {"init_from": "gone"}, dead, 5, until)
        code, (row,) = verdicts(capsys, run)
        assert (row["verdict"], row["step"], code) == (verdict, until, 3 if verdict == "left" else 0)
    broken = curves | {"entropy": np.where(np.arange(21) == 11, math.nan, curves["entropy"])}
    run = write_run(folder / "cut", RL | {"init_from": "gone"}, broken, 5, until=55)
    code, (row,) = verdicts(capsys, run)
    assert code == 3 and row["left"][0]["value"] is None and row["left"][0]["figure"] == "entropy"
    first = write_run(folder / "young", RL | {"init_from": "gone"}, curves, 5, until=5)
    (first / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    code, (row,) = verdicts(capsys, first)
    assert code == 0 and row["verdict"] == "no band" and "none of the steps" in row["reason"]


def test_a_run_that_logs_at_other_steps_is_compared_at_those_that_both_have(ladder, capsys):
    folder, curves = ladder
    run = folder / "out/seed5/grpo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seldom = [line for line in lines if "reward" not in line or line["step"] % 20 == 0]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, seldom)))
    compared = expected.bands_for(expected.open_run(run), expected.recipes()["quickstart_grpo"])
    assert compared["reward"]["steps"] == [[20], [40], [60], [80], [100]]
    assert verdicts(capsys, run)[1][0]["verdict"] == "within"


@pytest.mark.parametrize("change, words", [
    ({"learning_rate": 1e-3}, "learning_rate=0.001 (there 0.0005)"),
    ({"max_steps": 20}, "max_steps=20 (there 100)"),
    ({"seed": 9, "log_interval": 1, "device": "cuda", "slots": 4, "a_new_knob": 1}, None)])
def test_no_band_applies_to_another_recipe(ladder, capsys, change, words):
    folder, curves = ladder
    run = write_run(folder / "out/seed5/grpo", RL | {"init_from": "out/seed5/rft"} | change, curves, 5)
    assert expected.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert ("there is no band for it" in said and words in said) if words else "within the band" in said
    if words:
        assert expected.main([str(run), "--recipe=quickstart_grpo"]) == 0
        said = capsys.readouterr().out
        assert words in said
        assert "within the band of quickstart_grpo (5 seeds), from which it differs in" in said


def test_a_model_that_was_made_otherwise_has_no_band_either(ladder, capsys):
    """As with the quickstart's --base_steps, which leaves the knobs of the later rungs as they were."""
    folder, curves = ladder
    saved = json.loads((folder / "out/seed5/base/config.json").read_text())
    saved.pop("checksum")
    (folder / "out/seed5/base/config.json").write_bytes(seal(saved | {"max_steps": 20}))
    code, rows = verdicts(capsys, "out/seed5/base", "out/seed5/rft", "out/seed5/grpo")
    assert code == 0 and {row["verdict"] for row in rows} == {"no band"}
    (knob,) = rows[2]["differs"]
    assert "max_steps of" in knob and knob.endswith("out/seed5/base") and rows[2]["differs"][knob] == [20, 60]


def test_a_resumed_run_began_with_what_its_log_says(ladder, capsys):
    folder, curves = ladder
    saved = json.loads((folder / "out/seed5/base/config.json").read_text())
    saved.pop("checksum")
    (folder / "out/seed5/base/config.json").write_bytes(seal(saved | {"init_from": "resume"}))
    assert verdicts(capsys, "out/seed5/base")[1][0]["verdict"] == "within"


def test_a_text_is_known_by_what_is_held_out_of_it(ladder):
    run = expected.open_run("out/seed5/base")
    recipe = expected.recipes()["quickstart_base"]
    recipe["knobs"]["dataset"] = "input.txt"
    recipe["val_tokens"] = 1000
    for dataset, tokens, same in (("a/input.txt", None, True), ("b.txt", None, False), ("b.txt", 1000, True),
                                  ("a/input.txt", 999, False), ("task:input.txt", 1000, False)):
        run.saved["dataset"] = dataset
        run.lines = [{"step": 60, "val_loss": 1.0, "val_tokens": tokens}] if tokens else []
        assert expected.same_dataset(run, recipe) is same, (dataset, tokens)


def test_without_bands_there_is_none(ladder, capsys, monkeypatch):
    monkeypatch.setattr(expected, "FOLDER", Path("nowhere"))
    assert expected.main(["out/seed5/grpo"]) == 0
    said = capsys.readouterr().out
    assert said == "out/seed5/grpo: there is no band for it, because no recipe of grpo.py has one yet.\n"


@pytest.mark.parametrize("argv, words", [
    ([], "Which run?"), (["nowhere"], "not the folder of a run"),
    (["out/seed5/grpo", "--recipe=x"], "choose quickstart_base, "),
    (["out/seed5/grpo", "--recipe=quickstart_base"], "is of train.py"), ([""], "is empty")])
def test_bad_input_is_one_sentence(ladder, argv, words):
    with pytest.raises(BadInput, match=words.replace("?", r"\?")):
        expected.main(argv)


def test_what_a_curve_does_not_depend_on_are_knobs():
    """So that none is misspelt; diagnose is the doctor's."""
    known = {field.name for module in (train, grpo) for field in fields(module.Config)}
    assert expected.BESIDE - known <= {"diagnose"}


# --- collecting ---

def test_runs_that_are_no_band_are_refused(ladder):
    folder, curves = ladder
    one = [f"out/seed{i}/grpo" for i in range(3)]
    with pytest.raises(BadInput, match="at least three seeds"):
        bands.main(["quickstart_grpo", *one[:2]])
    with pytest.raises(BadInput, match="no seed twice"):
        bands.main(["quickstart_grpo", *one, one[0]])
    with pytest.raises(BadInput, match="Which recipe"):
        bands.main(["quickstart_sft"])
    with pytest.raises(BadInput, match="give the folders"):
        bands.main(["quickstart_grpo"])
    with pytest.raises(BadInput, match="name it with --dataset"):
        bands.main(["cpu_small"])
    with pytest.raises(BadInput, match="3 different whole numbers"):
        bands.main(["quickstart", "--seeds=0 1 1"])
    write_run(folder / one[1], RL | {"seed": 1}, curves, 1, until=50)
    with pytest.raises(BadInput, match="stopped at step 50"):
        bands.main(["quickstart_grpo", *one])
    write_run(folder / one[1], RL | {"seed": 1, "learning_rate": 1.0}, curves, 1)
    with pytest.raises(BadInput, match="learning_rate=1.0"):
        bands.main(["quickstart_grpo", *one])


def test_seeds_are_added_to_a_band_or_held_against_it(ladder, capsys):
    folder, curves = ladder
    before = expected.recipes()["quickstart_grpo"]
    off = curves | {"reward": curves["reward"] - 0.3}
    write_run(folder / "out/seed6/grpo", RL | {"seed": 6}, off, 0)
    capsys.readouterr()
    assert bands.main(["quickstart_grpo", "out/seed5/grpo", "out/seed6/grpo", "--fresh=true"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "seed 5: within" and said[2].startswith("seed 6: left quickstart_grpo: reward is ")
    with_fresh = expected.recipes()["quickstart_grpo"]
    assert with_fresh | {"fresh": None} == before | {"fresh": None}
    assert list(with_fresh["fresh"]) == ["5", "6"]
    assert with_fresh["fresh"]["5"]["reward"]["runs"][0] == pytest.approx(curves["reward"][5], abs=1e-4)
    with pytest.raises(BadInput, match="no seed twice"):
        bands.main(["quickstart_grpo", "out/seed5/grpo", "--add=true"])
    write_run(folder / "out/seed7/grpo", RL | {"seed": 7}, curves, 5)
    assert bands.main(["quickstart_grpo", "out/seed7/grpo", "--add=true", "--commit=def"]) == 0
    wider = expected.recipes()["quickstart_grpo"]
    assert wider["seeds"] == [0, 1, 2, 3, 4, 7] and wider["fresh"] == with_fresh["fresh"]
    assert wider["figures"]["reward"]["runs"][:5] == before["figures"]["reward"]["runs"]
    assert wider["figures"]["reward"]["runs"][5] == with_fresh["fresh"]["5"]["reward"]["runs"][0]
    assert wider["band"] == band.bands(wider["figures"]) != before["band"]
    assert wider["commit"] == ["abc", "def"]
    write_run(folder / "out/seed8/grpo", RL | {"seed": 8, "learning_rate": 1.0}, curves, 5)
    with pytest.raises(BadInput, match="learning_rate=1.0, the file of quickstart_grpo"):
        bands.main(["quickstart_grpo", "out/seed8/grpo", "--fresh=true"])
    with pytest.raises(BadInput, match="no band cpu_small yet"):
        bands.main(["cpu_small", "--add=true"])
    with pytest.raises(BadInput, match="--add or --fresh"):
        bands.main(["quickstart_grpo", "--add=true", "--fresh=true"])


def test_seeds_are_run_once_and_a_failure_is_told(ladder, monkeypatch, capsys):
    folder, curves = ladder
    ran = []

    def pretend(command, log):
        ran.append(command)
        seed = int(command.split("--seed=")[1].split()[0])
        if seed == 2 and len(ran) < 4:
            raise guard.Failure(f"{command} ended with 1")
        out = command.split("--out_dir=")[1].split()[0]
        losses = 3 + 0.01 * np.random.default_rng(seed).random((1, 13))
        write_run(Path(out), BASE | {"seed": seed, "dataset": "input.txt"}, {"loss": losses})
    monkeypatch.setattr(bands, "run", pretend)
    argv = ["cpu_small", "--dataset=input.txt", "--seeds=0 1 2"]
    with pytest.raises(guard.Failure):
        bands.main(argv)
    assert bands.main(argv) == 0
    assert [command.split("--seed=")[1].split()[0] for command in ran] == ["0", "1", "2", "2"]
    assert ran[0].startswith("python train.py config/cpu_small.py --dataset=")
    assert (folder / "out/bands/cpu_small/seed0.done.json").exists()
    found = expected.recipes()["cpu_small"]
    (command,) = found["commands"]
    assert "train.py config/cpu_small.py --dataset=TEXT --out_dir=out --data_dir=data --seed=SEED" in command
    assert found["knobs"]["dataset"] == "input.txt" and found["date"] and found["machine"]


def test_a_command_that_fails_says_its_last_line(tmp_path):
    with pytest.raises(guard.Failure, match="ended with 3, after: no luck"):
        bands.run("python -c \"import sys; print('no luck'); sys.exit(3)\"", tmp_path / "log")


def test_every_command_and_config_file_of_a_recipe_is_there():
    for recipe in bands.RECIPES.values():
        for command in bands.commands_of(recipe, "out", "data", 0, "a text"):
            for word in command.split():
                if word.endswith((".py", ".sh")):
                    assert (ROOT / word).exists(), word


# --- the picture ---

def test_a_run_is_drawn_in_its_band(ladder, capsys, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    savefig = figure.Figure.savefig

    def keep(self, *args, **kwargs):
        drawn.append(self)
        savefig(self, *args, **kwargs)
    monkeypatch.setattr(figure.Figure, "savefig", keep)
    assert plot.main(["out/seed5/grpo", "--expected"]) == 0
    assert "within the band of quickstart_grpo" in capsys.readouterr().out
    assert Path("out/seed5/grpo/curves.png").stat().st_size > 20_000
    titles = {axis.get_title(loc="left"): axis for axis in drawn[0].axes}
    reward = titles["reward of a step's samples"]
    assert len(reward.collections) == 1 and len(reward.lines) == 2       # band; means in its blocks, curve
    low, high = (reward.collections[0].get_datalim(reward.transData).get_points()[:, 1])
    assert low < 0.55 and high > 0.75
    assert not titles["learning rate"].collections and "held-out questions right, greedy" in titles
    plot.main(["out/seed5/base", "--expected"])
    loss = drawn[1].axes[0]
    assert loss.get_title(loc="left") == "loss, nats a token" and len(loss.collections) == 1
    plot.main(["out/seed5/base"])
    assert not drawn[2].axes[0].collections
    with pytest.raises(BadInput, match="about steps"):
        plot.main(["out/seed5/base", "--expected", "--x=time"])
