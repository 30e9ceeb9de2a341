"""Break the quickstart's reinforcement learning in ways that affect the reward, and print the doctor's
findings.

    python -m studies.breakages out/quickstart/rft out/breakages
    python -m studies.breakages out/quickstart/rft out/breakages --only="nothing_paid stale_engine"

A run ends at the doctor's first finding or at its last step. Finished runs are not repeated.

Options, as --key=value:
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
# {name: (description, body of the verifier, options)}
BROKEN = {
    "nothing_paid": ("every completion gets 0", "return 0.0, {}", {}),
    "all_paid": ("every completion gets 1", "return 1.0, {}", {}),
    "verifier_fails": ("the verifier raises for one completion in four",
                       "return 1 / (len(completion) % 4 > 0) * score, parts", {}),
    "constant": ("every completion gets 0.4", "return 0.4, {}", {}),
    "any_answer": ("any answer gets 1", "return float(parts['answered']), {}", {}),
    "wrong_sign": ("wrong completions get 1", "return 1 - score, {}", {}),
    "always_a_part": ("every answer gets at least 0.4",
                      "return 0.4 + 0.6 * score, parts | {'polite': True}", {}),
    "by_length": ("the reward is the length", "return min(len(completion), 400) / 400, {}", {}),
    "too_short": ("--max_new_tokens=40", HONEST, {"max_new_tokens": 40}),
    "other_prompt": ("questions in another form", HONEST + "\nPROMPT = 'Q: {}\\nA: '", {}),
    "too_slow": ("--learning_rate=1e-9", HONEST, {"learning_rate": 1e-9}),
    "too_fast": ("--learning_rate=0.05", HONEST, {"learning_rate": 0.05}),
    "too_hot": ("--temperature=3", HONEST, {"temperature": 3.0}),
    "copies": ("--temperature=0.01", HONEST, {"temperature": 0.01}),
    "stale_engine": ("the engine keeps its first weights", HONEST, {}),
    "other_distribution": ("the engine samples at 0.7 times the temperature", HONEST, {}),
    # faults that the doctor has no check for
    "held_back": ("--beta=10, which has no check", HONEST, {"beta": 10.0}),
    "by_lot": ("a random reward, which has no check",
               "import random\n    return float(random.random() < 0.5), {}", {}),
}


@dataclass
class Config:
    folders: tuple = ()                      # the model to start from, and the output folder
    only: str = " ".join(BROKEN)             # names with spaces between
    jobs: int = 2                            # parallel runs, a core each
    inside: str | None = None                # internal: run grpo.py with this breakage in this process


def spoil(name):
    """Patch the engine or grpo.py in this process, if the breakage `name` needs it."""
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
    """Return the doctor's findings about a run; [] before its first step."""
    return Doctor(read_lines(out)).findings


def broken_run(cfg, name):
    """Start or resume a broken run, and stop it at the doctor's first finding."""
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
        raise BadInput("Give a model and an output folder: python -m studies.breakages out/quickstart/rft "
                       f"out/breakages; --only= takes {', '.join(BROKEN)}.")
    with ThreadPoolExecutor(cfg.jobs) as pool:
        list(pool.map(lambda name: broken_run(cfg, name), names))
    print("| fault | finding |\n|---|---|")
    summary = {}
    for name in names:
        findings = findings_of(Path(cfg.folders[1]) / name)
        summary[name] = [finding.as_json() for finding in findings]
        cells = [f"step {finding.since}, `{finding.name}`: {finding.sentence}" for finding in findings]
        print(f"| {BROKEN[name][0]} | {'; '.join(cells) or 'none'} |")
    (Path(cfg.folders[1]) / "summary.json").write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    guard.run(main)
