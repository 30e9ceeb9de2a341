"""The options of runs/domains.sh, and the two jobs of runs/slurm_domains.sh."""
import os
import stat
import subprocess

import pytest

from conftest import ROOT


@pytest.mark.parametrize("flag", ["--sampled=1", "--pcgrad", "nonsense"])
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
