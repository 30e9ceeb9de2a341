"""Breaks the quickstart's reinforcement learning on purpose, in ways that touch the reward, and prints what the
doctor (doctor/diagnose.py) said.

    python -m studies.breakages out/quickstart/rft out/breakages
    python -m studies.breakages out/quickstart/rft out/breakages --only="nothing_paid stale_engine"

A run ends once the doctor has spoken, or at its last step. What is done already is not done again.

Knobs, as --key=value:
"""
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from doctor.diagnose import Doctor
from measure.runs import ROOT, as_flags
from runtime import config, guard
from runtime.config import BadInput
from runtime.guard import Failure
from runtime.metrics import read_lines

TASK = """
from tasks.unit_conversion import *
from tasks.unit_conversion import reward as honest

def reward(question, completion):
    score, parts = honest(question, completion)
    {}
"""
HONEST = "return score, parts"
# name: (what is broken, what the verifier pays, knobs)
BROKEN = {
    "nothing_paid": ("a verifier that finds nothing right", "return 0.0, {}", {}),
    "all_paid": ("a verifier that finds everything right", "return 1.0, {}", {}),
    "verifier_fails": ("a verifier that fails at one answer in four",
                       "return 1 / (len(completion) % 4 > 0) * score, parts", {}),
    "constant": ("0.4 are paid to everything", "return 0.4, {}", {}),
    "any_answer": ("any answer is paid", "return float(parts['answered']), {}", {}),
    "wrong_sign": ("what is wrong is paid", "return 1 - score, {}", {}),
    "always_a_part": ("0.4 are paid to every answer",
                      "return 0.4 + 0.6 * score, parts | {'polite': True}", {}),
    "by_length": ("the length is paid", "return min(len(completion), 400) / 400, {}", {}),
    "too_short": ("--max_new_tokens=40", HONEST, {"max_new_tokens": 40}),
    "other_prompt": ("questions in another form", HONEST + "\nPROMPT = 'Q: {}\\nA: '", {}),
    "too_slow": ("--learning_rate=1e-9", HONEST, {"learning_rate": 1e-9}),
    "too_fast": ("--learning_rate=0.05", HONEST, {"learning_rate": 0.05}),
    "too_hot": ("--temperature=3", HONEST, {"temperature": 3.0}),
    "copies": ("--temperature=0.01", HONEST, {"temperature": 0.01}),
    "stale_engine": ("the engine keeps its first weights", HONEST, {}),
    "other_distribution": ("the engine samples at 0.7 times the temperature", HONEST, {}),
    # not on the doctor's list: tried to see what is said then
    "held_back": ("--beta=10, not on the list", HONEST, {"beta": 10.0}),
    "by_lot": ("a reward that is drawn by lot, not on the list",
               "import random\n    return float(random.random() < 0.5), {}", {}),
}


@dataclass
class Config:
    folders: tuple = ()                      # the model to start from, and where the runs go
    only: str = " ".join(BROKEN)
    jobs: int = 2                            # runs side by side, a core each
    inside: str | None = None                # run this one's grpo.py in this process: how it calls itself


def spoil(name):
    """Break the code of this process as `name` asks for."""
    import engine
    import grpo
    if name == "stale_engine":
        load = engine.Engine.load

        def only_once(self, model):
            if not hasattr(self, "fingerprint"):
                load(self, model)
        engine.Engine.load = only_once
    if name == "other_distribution":
        sampling = grpo.Sampling
        grpo.Sampling = lambda temperature, **others: sampling(0.7 * temperature, **others)


def findings_of(out):
    """Return the doctor's findings about a run, which may not have logged a step yet."""
    return Doctor(read_lines(out)).findings


def broken_run(cfg, name):
    """Run what is broken, or go on with it, until it has been found out or is over."""
    model, folder = map(Path, cfg.folders)
    out = folder / name
    if (out / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    task = (folder / f"{name}.py").resolve()
    task.write_text(TASK.format(BROKEN[name][1]))
    flags = as_flags(init_from=model.resolve(), out_dir=out.resolve(), task=task, resume="auto", device="cpu",
                     **BROKEN[name][2])
    command = [sys.executable, "-m", "studies.breakages", f"--inside={name}", "--", "config/grpo.py", *flags]
    with open(folder / f"{name}.log", "a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                   env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        while process.poll() is None:
            time.sleep(5)
            if findings_of(out):
                process.send_signal(signal.SIGTERM)
                process.wait()
    if process.returncode not in (0, 143):
        raise Failure(f"{name} ended with {process.returncode}: see {folder / f'{name}.log'}.")
    (out / "done").touch()


def main(argv):
    own, _, others = " ".join(argv).partition(" -- ")
    if others:
        import grpo
        spoil(config.load(Config, own.split(), positional="folders").inside)
        return grpo.main(argv[argv.index("--") + 1:])
    cfg = config.load(Config, argv, positional="folders")
    names = cfg.only.split()
    if len(cfg.folders) != 2 or not set(names) <= set(BROKEN):
        raise BadInput("Which model, and where do the runs go? python -m studies.breakages out/quickstart/rft "
                       f"out/breakages; --only= takes {', '.join(BROKEN)}.")
    with ThreadPoolExecutor(cfg.jobs) as pool:
        list(pool.map(lambda name: broken_run(cfg, name), names))
    print("| broken | the doctor said |\n|---|---|")
    summary = {}
    for name in names:
        findings = findings_of(Path(cfg.folders[1]) / name)
        summary[name] = [finding.as_json() for finding in findings]
        said = "; ".join(f"step {finding.since}, `{finding.name}`: {finding.sentence}" for finding in findings)
        print(f"| {BROKEN[name][0]} | {said or 'nothing'} |")
    (Path(cfg.folders[1]) / "summary.json").write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    guard.run(main)
