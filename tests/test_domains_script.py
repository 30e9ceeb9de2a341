"""runs/domains.sh's figures from files that are made up here, its flags, and the two jobs of
runs/slurm_domains.sh."""
import json
import os
import stat
import subprocess

import pytest

from conftest import ROOT
from runtime.config import BadInput
from runs import domains

NAMES = [f"{name}:0" for name in ("math", "code", "logic", "simulation", "table", "science")]


def row(name, accuracy, difference=0.0):
    """A model's figures as eval.py --json has them, the same for each domain."""
    def figures(prefix=""):
        return {f"{prefix}{key}{end}": value + width for key, value in (("accuracy", accuracy), ("difference", difference))
                for end, width in (("", 0.0), ("_low", -0.02), ("_high", 0.02))}
    return {"model": f"out/x/{name}", "domains": {domain: figures() for domain in NAMES}} | figures("macro_")


@pytest.fixture
def folder(tmp_path):
    def write(name, *rows):
        for how in ("greedy", "sampled"):
            (tmp_path / f"{name}.{how}.json").write_text(json.dumps({"models": rows}))
    write("ladder", row("base", 0.3), row("rft", 0.4), row("mixed0", 0.5))
    for seed, (mixed, pcgrad) in enumerate([(0.50, 0.52), (0.54, 0.55), (0.52, 0.55)]):
        write(f"seed{seed}", row(f"mixed{seed}", mixed), row(f"pcgrad{seed}", pcgrad, pcgrad - mixed), row("rft", 0.4))
        run = tmp_path / f"pcgrad{seed}"
        run.mkdir()
        lines = [{"step": step, "surgery/cosine/math:0/code:0": 0.1 * seed - 0.1, "surgery/conflicts": 0.5, "rollout_s": 1.0,
                  "update_s": 2.0, "seconds": 3.0 * step, "peak_memory_gb": 0.5} for step in (5, 10, 15)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write("single", row("rft", 0.4), *(row(name[:-2], 0.45, 0.05) for name in NAMES))
    return tmp_path


def test_the_tables(folder, capsys):
    assert domains.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "PCGrad - mixed" in said and "sampled, of" in said and "50.0 [48.0, 52.0]" in said
    summary = json.loads((folder / "summary.json").read_text())
    summary |= summary["sampled"]
    mean, low, high = summary["methods"]["macro"]["difference"]
    assert mean == pytest.approx(0.02) and low == pytest.approx(0.02 - 4.30 * 0.01 / 3**0.5) and high - mean == pytest.approx(mean - low)
    assert summary["methods"]["macro"]["gain_of_mixed"][0] == pytest.approx(0.12)
    assert summary["cosines"]["math:0/code:0"]["10"] == pytest.approx(0.0) and summary["conflicts"]["5"] == 0.5
    assert summary["transfer"]["math:0"]["logic:0"][0] == pytest.approx(0.05)


def test_a_folder_without_runs_is_a_sentence(tmp_path):
    with pytest.raises(BadInput, match="has no ladder.sampled.json"):
        domains.main([str(tmp_path)])


@pytest.mark.parametrize("flag", ["--sampled=1", "--pcgrad=yes", "nonsense"])
def test_flags_that_the_script_does_not_have(flag):
    done = subprocess.run(["bash", ROOT / "runs/domains.sh", flag], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: domains.sh takes --out_dir=") and done.stderr.count("\n") == 1


def test_two_jobs_are_submitted(tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/jobs"\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IEXEC)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", ROOT / "runs/slurm_domains.sh"]
    subprocess.run([*script, "--parallel=fsdp"], env=env, check=True)
    jobs = (tmp_path / "jobs").read_text().splitlines()
    pcgrad = "--surgery=pcgrad --surgery_buffers=bf16 --out_dir=out/six_domains_pcgrad"
    assert [line.split("grpo.py config/six_domains_mixed.py ")[1] for line in jobs] == ["--parallel=fsdp", f"{pcgrad} --parallel=fsdp"]
    assert all("runs/slurm_multinode.sh" in line and "--nodes=1" in line for line in jobs)
    refused = subprocess.run([*script, "--out_dir=x"], env=env, capture_output=True, text=True)
    assert refused.returncode == 2 and "leave it out" in refused.stderr
    if subprocess.run(["which", "sbatch"], capture_output=True).returncode:
        alone = subprocess.run(script, capture_output=True, text=True)
        assert alone.returncode == 2 and "There is no sbatch here" in alone.stderr
