"""The script for several nodes, with stand-ins for SLURM's two programs and this machine as the only node."""
import os
import re
import signal
import subprocess
import time

import pytest

from conftest import ROOT, TINY, environment, flags

SCRIPT = ROOT / "runs/slurm_multinode.sh"


@pytest.fixture
def cluster(tmp_path):
    """Environment in which srun runs its command here, and scontrol notes what it is asked."""
    programs = {"srun": 'shift\nexec "$@"', "scontrol": f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {tmp_path}/asked',
                "python": f'[[ "$*" != *--help ]] && exec {os.sys.executable} "$@"; echo --shutdown-timeout'}
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node1", SLURM_JOB_ID="7",
                       SLURM_SUBMIT_DIR=str(ROOT), SLURM_GPUS_ON_NODE="2", RENDEZVOUS_PORT="29571")


def command(tmp_path, text, **knobs):
    return ["bash", str(SCRIPT), "train.py", *flags(**TINY | dict(dataset=text, data_dir=text.parent / "tokens", out_dir=tmp_path / "run") | knobs)]


def test_without_a_stage_it_says_how_it_is_used(cluster):
    done = subprocess.run(["bash", str(SCRIPT)], env=cluster, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["time limit", "scancel"])
def test_told_to_end_the_ranks_save_and_at_the_time_limit_the_job_goes_on(number, tmp_path, text, cluster):
    process = subprocess.Popen(command(tmp_path, text, max_steps=100_000, eval_interval=100_000), env=cluster, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    log, deadline = tmp_path / "run" / "training.log", time.time() + 60
    while time.time() < deadline and not (log.exists() and "step 3/" in log.read_text()):
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    stopped = int(re.search(r"Stopped as asked after step (\d+), and saved", log.read_text())[1])
    assert process.returncode != 0
    if number == signal.SIGTERM:
        assert not (tmp_path / "asked").exists()
        return
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    again = subprocess.run(command(tmp_path, text, max_steps=stopped + 2), env=cluster | {"SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "1"}, capture_output=True,
                           text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"step {stopped + 2}/{stopped + 2}" in log.read_text() and f"steps {stopped} to {stopped + 2}" in log.read_text()
