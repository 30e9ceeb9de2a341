"""config/shakespeare.py: its first minute beside the recorded curves of three seeds."""
import dataclasses
import json
import lzma

import pytest

import train
from conftest import ROOT, metrics, near_the_seeds, options_of_the_curve, seeds
from runtime import config
from runtime.hardware import cpu_multiplies_bf16

STEPS = 50 if cpu_multiplies_bf16() else 10      # half a minute on two cores; in fp32 six seconds a step
RECIPE = ROOT / "config/shakespeare.py"


def test_the_first_minute_is_near_the_recorded_seeds(tmp_path):
    """Up to there the rate is constant after the warm-up, as the recipe's is."""
    text = tmp_path / "input.txt"
    text.write_bytes(lzma.decompress((ROOT / "tests/tinyshakespeare.txt.xz").read_bytes()))
    train.main([str(RECIPE), f"--dataset={text}", f"--out_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'data'}",
                f"--max_steps={STEPS}", "--lr_schedule=constant", "--eval_tokens=1024", "--device=cpu"])
    values = metrics(tmp_path / "run")
    assert near_the_seeds("shakespeare", "loss", values)
    assert not near_the_seeds("shakespeare", "loss", {step: loss + 0.1 for step, loss in values.items()})


def test_the_record_is_of_the_recipe_as_it_stands():
    """Its knobs are those of the file, and each seed reaches the published loss in less than twenty times the seconds."""
    recipe = seeds("shakespeare")
    cfg = config.load(train.Config, [str(RECIPE), "--dataset=input.txt"])
    assert options_of_the_curve(dataclasses.asdict(cfg)) == recipe["knobs"]
    record = json.loads((ROOT / "expected/shakespeare.json").read_text())
    assert len(record["best_val_loss"]) == len(record["seeds"]) == len(recipe["seeds"]) == 3
    ends = [row[-1] for row in recipe["figures"]["val_loss"]["runs"]]
    assert ends == pytest.approx(record["best_val_loss"], abs=1e-3)
    assert max(ends) <= 1.4697
    seconds = record["whole_process_seconds"]
    assert max(seconds["nanoRFT"]) < 20 * min(seconds["nanoGPT, its CPU recipe"])
