"""Test recovery from thousands of kills and bit flips, to find rare faults that the tests' few trials miss.

    OMP_NUM_THREADS=1 python tests/campaign.py out/campaign --kills=300 --flips=1000

Stages: train (a text), rft (examples, with adapters), datagen, grpo. Trials of each:

- crash: SIGKILL before the n-th operation on a file (open, rename, remove, mkdir, ...), for every n;
  repeating the command until it finishes must give the results of an undisturbed run, bit for bit.
- kill: SIGKILL at random moments, up to six times, with the same requirement.
- flip: one bit of one file of a run is flipped. A resume must end as an undisturbed run does, or refuse with
  a sentence.

Runs are forked from a process that has imported everything, so each takes a third of a second. Results are
appended to results.jsonl. No process may survive its run.
"""
import contextlib
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import datagen
import grpo
import train
from conftest import TINY, flags
from runtime import checkpoint, config, guard
from test_datagen import DATAGEN, TASK as EVEN
from test_grpo import GRPO, TASK as LETTERS
from test_tokenizer import write as write_tokenizer
from text.examples import attempts_path


@dataclass
class Config:
    folder: str = "out/campaign"             # for runs and results
    kills: int = 0                           # kill trials a stage
    crashes: bool = True                     # crash trials, for every operation on a file
    flips: int = 0                           # flip trials, all stages together
    seed: int = 0                            # of the trials; for a second campaign beside the first


STAGES = {"train": train, "rft": train, "datagen": datagen, "grpo": grpo}
FLIPPED_STAGES = ("train", "rft", "datagen")         # grpo.py's files are like train.py's
WRITE_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


# --- runs in their own processes ---

def prepare(folder):
    """Write the inputs of the stages."""
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "naïve", "42", "\n"], k=6000)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "even.py").write_text(EVEN)
    (folder / "letters.py").write_text(LETTERS)
    rows = [[f"the {i}", i % 7, f"cat sat {i % 5} a"] for i in range(40)]
    (folder / "examples.json").write_text(json.dumps(rows))
    write_tokenizer(folder / "tokenizer")
    base = flags(**TINY | dict(dataset=folder / "text.txt", data_dir=folder / "tokens", learning_rate=0.02,
                               device="cpu", out_dir=folder / "base"))
    assert in_child(lambda: train.main(base), folder / "log")[0] == 0


def import_what_runs_import(folder):
    """Import the modules of the stages' runs, so that forks need not."""
    def work():
        train.main(argv("train", folder, folder / "warm"))
        grpo.main(argv("grpo", folder, folder / "warmer"))
        (folder / "modules").write_text("\n".join(sys.modules))
    assert in_child(work, folder / "log")[0] is not None
    for name in (folder / "modules").read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def argv(stage, folder, out):
    """Return the command line of a short run of a stage, the same for a start and a resume."""
    saves = dict(eval_interval=2, save_interval=2, keep_last=2, resume="auto", dtype="fp32", device="cpu",
                 keep_memory=False)
    base = folder / "base"
    if stage == "train":
        return flags(**TINY | saves | dict(dataset=folder / "text.txt", data_dir=folder / "tokens",
                                           tokenizer=folder / "tokenizer", dropout=0.1, max_steps=6,
                                           out_dir=out))
    if stage == "rft":
        return flags(dataset=folder / "examples.json", init_from=base, lora_rank=2, batch_size=4, prompt="{}",
                     num_epochs=0.6, valid_share=0.2, learning_rate=0.01, out_dir=out, **saves)
    if stage == "grpo":
        return flags(**GRPO | saves | dict(init_from=base, task=folder / "letters.py", max_steps=4, beta=0.1,
                                           reward_pool="process", reward_workers=1, eval_questions=4,
                                           out_dir=out))
    return flags(**DATAGEN | dict(init_from=base, task=folder / "even.py", num_questions=8, slots=4,
                                  deterministic=True, device="cpu", output=out / "rft.json"))


def in_child(work, log, before=lambda: None):
    """Run `work` in a forked process. Returns (exit code, negative for a signal; output; seconds)."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        code = 1
        try:
            os.setsid()
            before()
            guard.run(lambda _: work(), [])
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, Path(log).read_text(errors="replace"), time.monotonic() - start


def left_over():
    """Return the number of processes that outlive a run by five seconds, and kill them. As its subreaper,
    this process has become their parent."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if pid == 0:
            time.sleep(0.02)
    left = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)
                left += 1
    return left


def killed_at(number, folder):
    """Return a function that makes its process SIGKILL itself before the n-th operation on a file below the
    folder; for n = 0 it writes the number of operations to folder/../count instead."""
    def arm():
        count = 0
        below = os.fspath(folder)

        def hook(event, args):
            nonlocal count
            writes = event in WRITE_EVENTS
            if event == "open":
                writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes and str(args[0]).startswith(below):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == 0:
                    counted.seek(0)
                    counted.write(f"{count}")
                    counted.flush()
        counted = open(folder.parent / "count", "w") if number == 0 else None
        sys.addaudithook(hook)
    return arm


# --- outcomes ---

def outcome(stage, out):
    """Return the results of a finished run that must be reproduced."""
    if stage == "datagen":
        return [path.read_bytes() for path in (out / "rft.json", attempts_path(out / "rft.json"))]
    step = max(checkpoint.steps(out))
    logged = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "config" not in row:
            for key in ("loss", "reward", "val_loss", "val_reward", "grad_norm"):
                if key in row:
                    logged[row["step"], key] = row[key]
    tensors = checkpoint.load_weights(out, step)
    best = checkpoint.best(out), min(checkpoint.losses(out).values(), default=float("inf"))
    return [step, best, logged, {name: t.numpy().tobytes() for name, t in tensors.items()}]


def until_done(stage, folder, out, befores):
    """Start a stage with each of the functions `befores`, which arm a kill, then undisturbed until it is
    done. Returns (kills, problem)."""
    def work():
        return STAGES[stage].main(argv(stage, folder, out))
    kills = 0
    for before in [*befores, lambda: None, lambda: None]:
        code, output, _ = in_child(work, out.parent / "log", before)
        killed = code in (-signal.SIGKILL, -signal.SIGALRM)
        kills += killed
        left = left_over()
        if left:
            return kills, f"{left} processes left"
        if "Traceback" in output:
            return kills, "traceback: " + output[-600:]
        if code and not killed:
            return kills, f"exit {code}: " + output[-300:]
        if code == 0:
            return kills, None
    return kills, "not done"


def fresh(path):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def delayed(seconds):
    """Return a function that makes the kernel kill its process after so many seconds."""
    def arm():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    return arm


def disturbed(stage, folder, work, expected, befores):
    """Run a stage with kills. Returns (kills, problem)."""
    out = fresh(work / "runs") / "out"
    kills, problem = until_done(stage, folder, out, befores)
    if not problem and outcome(stage, out) != expected:
        problem = "difference"
    return kills, problem


def crash(stage, number, folder, work, expected, seconds):
    """Kill a run before its n-th operation on a file."""
    return disturbed(stage, folder, work, expected, [killed_at(number, work / "runs")])


def kill(stage, number, folder, work, expected, seconds):
    """Kill a run up to six times at random moments."""
    rng = random.Random(number)
    befores = [delayed(rng.uniform(0.02, 1.1 * seconds)) for _ in range(6)]
    return disturbed(stage, folder, work, expected, befores)


# --- flipped bits ---

def flip(out, number):
    """Flip one bit of one file of a run. Returns the file."""
    rng = random.Random(number)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    if content:
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    return path.relative_to(out)


def damaged(stage, number, folder, work, expected, seconds):
    """Flip a bit of a run that was stopped early, and resume it to its end. expected: (that run, the
    outcome)."""
    stopped, undisturbed = expected
    out = work / "runs" / "out"
    fresh(work / "runs")
    shutil.copytree(stopped, out)
    file = flip(out, number)
    code, output, _ = in_child(lambda: STAGES[stage].main(argv(stage, folder, out)), work / "log")
    left = left_over()
    if left or "Traceback" in output or code not in (0, 2):
        return 0, f"{file}: {left} left, exit {code}: {output[-300:]}"
    if code == 2:
        return 0, None                       # refused
    ended = outcome(stage, out)
    if file.name == "metrics.jsonl":         # a log: no step depends on it
        ended[2] = undisturbed[2]
    return 0, None if ended == undisturbed else f"{file}: difference"


# --- the campaign ---

def plan(cfg, folder, work):
    """Yield (part, stage, numbers, trial function, its `expected`, seconds of a run) for all trials."""
    for stage in STAGES:
        out = fresh(work / "runs") / "out"
        code, output, seconds = in_child(lambda: STAGES[stage].main(argv(stage, folder, out)), work / "log",
                                         killed_at(0, work / "runs"))
        assert code == 0, output
        assert left_over() == 0
        expected = outcome(stage, out)
        operations = int((work / "count").read_text())
        finished = work / f"finished {stage}"
        shutil.rmtree(finished, ignore_errors=True)
        shutil.move(out, finished)
        if cfg.crashes:
            yield "crash", stage, range(1, operations + 1), crash, expected, seconds
        yield "kill", stage, range(cfg.kills), kill, expected, seconds
        if stage not in FLIPPED_STAGES:
            continue
        stopped = finished
        if stage != "datagen":               # two steps early
            stopped = work / f"stopped {stage}"
            shutil.rmtree(stopped, ignore_errors=True)
            shutil.copytree(finished, stopped)
            shutil.rmtree(checkpoint.step_folder(stopped, expected[0]))
        yield "flip", stage, range(cfg.flips // len(FLIPPED_STAGES)), damaged, (stopped, expected), seconds


def table(rows):
    """Print the trials by part and stage, and the problems."""
    print(f"{'':12} {'':8} {'trials':>7} {'kills':>7} {'problems':>9}")
    for part, stage in dict.fromkeys((row["part"], row["stage"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["stage"]) == (part, stage)]
        problems = sum(row["problem"] is not None for row in mine)
        print(f"{part:12} {stage:8} {len(mine):7,} {sum(row['kills'] for row in mine):7,} {problems:9,}")
    for row in [row for row in rows if row["problem"]][:20]:
        print(f"{row['part']} {row['stage']} {row['number']}: {row['problem']}")


def main(argv):
    cfg = config.load(Config, argv, positional="folder")
    folder = Path(cfg.folder).resolve()
    work = fresh(folder / "work")
    if not (folder / "base").exists():
        prepare(folder)
    import_what_runs_import(folder)
    # PR_SET_CHILD_SUBREAPER: orphans of a run become children of this process, which counts them
    ctypes.CDLL(None).prctl(36, 1)
    rows = []
    with open(folder / "results.jsonl", "a") as file:
        for part, stage, numbers, trial, expected, seconds in plan(cfg, folder, work):
            for number in numbers:
                seeded = number + 10**6 * cfg.seed if part != "crash" else number
                kills, problem = trial(stage, seeded, folder, work, expected, seconds)
                rows.append({"part": part, "stage": stage, "number": seeded, "kills": kills, "problem": problem})
                print(json.dumps(rows[-1]), file=file, flush=True)
    table(rows)
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
