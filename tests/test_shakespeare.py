"""config/shakespeare.py: its first minute beside the recorded curves of three seeds."""
import dataclasses
import json
import lzma

import pytest

import train
from conftest import ROOT
from doctor import band, expected
from runtime import config

STEPS = 100                                  # about the first minute of two cores
RECIPE = ROOT / "config/shakespeare.py"


def test_the_first_minute_lies_in_the_band_of_the_recipe(tmp_path):
    """Up to there the rate is constant after the warm-up, as the recipe's is."""
    text = tmp_path / "input.txt"
    text.write_bytes(lzma.decompress((ROOT / "tests/tinyshakespeare.txt.xz").read_bytes()))
    train.main([str(RECIPE), f"--dataset={text}", f"--out_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'data'}",
                f"--max_steps={STEPS}", "--lr_schedule=constant", "--eval_tokens=1024", "--device=cpu"])
    values = expected.series(expected.open_run(tmp_path / "run"), "loss")
    recorded = expected.recipes()["shakespeare"]["figures"]["loss"]
    steps = [step for step in recorded["steps"] if step <= STEPS]
    found = band.band("loss", steps, [row[:len(steps)] for row in recorded["runs"]])
    assert len(found["steps"]) >= 4
    assert band.departures("loss", found, values) == []
    worse = {step: loss + 0.1 for step, loss in values.items()}
    assert band.departures("loss", found, worse)


def test_the_record_is_of_the_recipe_as_it_stands():
    """Its knobs are those of the file, and each seed reaches the published loss in less than twenty times the seconds."""
    recipe = expected.recipes()["shakespeare"]
    cfg = config.load(train.Config, [str(RECIPE), "--dataset=input.txt"])
    assert expected.knobs_of(dataclasses.asdict(cfg)) == recipe["knobs"]
    record = json.loads((ROOT / "expected/shakespeare.json").read_text())
    assert len(record["best_val_loss"]) == len(record["seeds"]) == len(recipe["seeds"]) == 3
    ends = [row[-1] for row in recipe["figures"]["val_loss"]["runs"]]
    assert ends == pytest.approx(record["best_val_loss"], abs=1e-3)
    assert max(ends) <= 1.4697
    seconds = record["whole_process_seconds"]
    assert max(seconds["nanoRFT"]) < 20 * min(seconds["nanoGPT, its CPU recipe"])
