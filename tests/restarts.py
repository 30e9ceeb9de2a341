"""Kill one of two ranks at random moments, 20 times, under torchrun --max-restarts, and check that the final
weights equal those of an undisturbed run, bit for bit.

    python tests/restarts.py --parallel=ddp
    python tests/restarts.py --parallel=fsdp
"""
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import forked
from conftest import ROOT, environment, flags, largest_difference, weights
from runtime import checkpoint

KILLS = 20
STEPS = 1500
OPTIONS = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=8, max_steps=STEPS, save_interval=25,
               eval_interval=500, eval_tokens=640, dtype="fp32", dropout=0.1, resume="auto", log_interval=100)


def torchrun(out, data, *more):
    argv = flags(**OPTIONS, out_dir=out, dataset="task:arithmetic", data_dir=data)
    return [*forked.TORCHRUN[:3], f"--max-restarts={KILLS + 5}", "--monitor-interval=0.2",
            *forked.TORCHRUN[3:], "--nproc_per_node=2", str(ROOT / "train.py"), *argv, *more]


def ranks_of_process(pid):
    pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in pids.split()]


def main(more):
    folder = Path(tempfile.mkdtemp())
    command = torchrun(folder / "undisturbed", folder / "data", *more)
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    rng = random.Random(0)
    log = open(folder / "log.txt", "w+")
    out = folder / "killed"
    command = torchrun(out, folder / "data", *more)
    process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    kills = 0
    known = set()
    while kills < KILLS and process.poll() is None:
        ranks = ranks_of_process(process.pid)
        if len(ranks) < 2 or set(ranks) & known:
            time.sleep(0.05)
            continue
        known = set(ranks)
        # a fifth of the kills may come while loading, the others after another save
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 5))
        else:
            before = checkpoint.steps(out)
            while checkpoint.steps(out) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.3))
        if process.poll() is None:
            os.kill(rng.choice(ranks), signal.SIGKILL)
            kills += 1
            print(f"kill {kills}: checkpoints {checkpoint.steps(out)}", flush=True)
    process.wait()
    log.seek(0)
    difference = largest_difference(weights(folder / "undisturbed", STEPS), weights(out, STEPS))
    print(f"{kills} kills, exit code {process.returncode}, largest difference of weights {difference}, "
          f"{log.read().count('error: ')} errors in the log")
    return int(bool(process.returncode or difference or kills < KILLS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
