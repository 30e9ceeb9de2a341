"""Kills one of two ranks at random moments, 20 times, under a torchrun that starts both anew
(--max-restarts), and compares what they end with: the same weights, bit for bit, as of ranks that were left
alone.

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
KNOBS = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=8, max_steps=STEPS, save_interval=25, eval_interval=500,
             eval_tokens=640, dtype="fp32", dropout=0.1, resume="auto", log_interval=100)


def torchrun(out, data, *more):
    argv = flags(**KNOBS, out_dir=out, dataset="task:arithmetic", data_dir=data)
    return [*forked.TORCHRUN[:3], f"--max-restarts={KILLS + 5}", "--monitor-interval=0.2", *forked.TORCHRUN[3:],
            "--nproc_per_node=2", str(ROOT / "train.py"), *argv, *more]


def ranks_of_process(pid):
    said = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in said.split()]


def main(more):
    folder = Path(tempfile.mkdtemp())
    subprocess.run(torchrun(folder / "calm", folder / "data", *more), env=environment(), check=True, capture_output=True)
    rng = random.Random(0)
    said = open(folder / "said.txt", "w+")
    process = subprocess.Popen(torchrun(folder / "stormy", folder / "data", *more), env=environment(), stdout=said, stderr=said)
    out = folder / "stormy"
    kills = 0
    known = set()
    while kills < KILLS and process.poll() is None:
        ranks = ranks_of_process(process.pid)
        if len(ranks) < 2 or set(ranks) & known:
            time.sleep(0.05)
            continue
        known = set(ranks)
        # Some while they are loading, most after they have saved at least once more.
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
    said.seek(0)
    apart = largest_difference(weights(folder / "calm", STEPS), weights(out, STEPS))
    print(f"{kills} kills, exit code {process.returncode}, weights apart by at most {apart}, "
          f"{said.read().count('error: ')} errors said by the stage")
    return int(bool(process.returncode or apart or kills < KILLS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
