"""Run the stages' scripts as processes, read their logs, and alternate implementations."""
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from typing import Any

from runtime import config, guard
from runtime.config import BadInput
from runtime.log import read_lines, read_run
from runtime.progress import ProgressLine, track

ROOT = Path(__file__).parent.parent
# steps that allocate memory and meet shapes for the first time
WARM_UP = 2
LEAST_SECONDS = 2                            # of a figure in joules: their counter moves ten times a second
SAVING = 60                                  # seconds that a stopped process has for its checkpoint


def end_on_signals():
    """Let SIGTERM and SIGHUP raise SystemExit, so that processes started here end too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:       # nohup's
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def turned(names, turn):
    """Return a list that begins with another of its elements at each turn, so that none is always first."""
    first = turn % len(names)
    return names[first:] + names[:first]


def words_of(text):
    """Return the words of a command line, as a shell splits it."""
    try:
        return shlex.split(text)
    except ValueError as e:
        raise BadInput(f"'{text.strip()}' can't be read ({e}): correct its quotation marks.") from None


def script_of(name):
    """Return the path of one of the project's scripts, or of the user's."""
    return ROOT / name if name and (ROOT / name).is_file() else Path(name)


def is_script(name):
    """Return whether a word names a program in Python, and no config file."""
    path = script_of(name)
    if path.suffix != ".py" or not path.is_file():
        return False
    text = path.read_text(errors="replace")
    return "__main__" in text or "import torch" in text


def options_of(script, *words):
    """Return {option: value} of a stage, {} for a script of the user's; BadInput for a wrong option."""
    if script_of(script).parent != ROOT:
        return {}
    Config = getattr(importlib.import_module(Path(script).stem), "Config", None)
    if Config is None:
        return {}
    defaults = {name: field.default for name, field in Config.__dataclass_fields__.items()}
    return defaults | config.read_arguments(Config, words)


def make_folder(path):
    """Make a folder of --out_dir."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"The folder {path} can't be made ({e.strerror}): choose another "
                       "--out_dir=.") from None


def as_flags(**options):
    """Return options as --key=value."""
    return [f"--{key}={value}" for key, value in options.items()]


@dataclass
class Work:
    """A script and its arguments: bench.py's defaults, the user's files and flags, then the options that the
    measurement fixes."""
    script: str
    arguments: list
    folder: Path                             # for temporary files and the run folder
    description: str                         # in a few words, for log lines
    unit: str
    steps: int                               # measured, after the warm-up
    ranks: int = 1
    sequences: int = 0                       # in a step
    config: Any = None                       # the script's Config
    runs: list = field(default_factory=list)                 # figures of each call of run_script
    peak_memory_gb: dict = field(default_factory=dict)       # of each side's last run

    @property
    def out(self):
        return self.folder / "run"


def steps_alone(cfg, folder):
    """Return the flags of a run that only makes steps, logging each."""
    return as_flags(out_dir=folder / "run", overwrite=True, max_steps=WARM_UP + cfg.steps, log_interval=1,
                    save_interval=10**9, save_only_model=True, seed=cfg.seed, device=cfg.device)


def is_small(c):
    """Return whether a model is so small that one process per CPU core is fastest (README)."""
    return c.n_layer * c.n_embd**2 < 2e6


def check_writable(path):
    """Make the output's folder, before measuring. Raises BadInput if the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not path.stat().st_size:
            path.unlink()
    except OSError as e:
        raise BadInput(f"{path} can't be written ({e.strerror}): name another file with --output=.") from None


def processes(n):
    return f"{n} process{'es' * (n != 1)}"


def process(start, arguments, ranks=1, name=None, fine=(0,), env=None):
    """Run a Python process, or several ranks with one thread each, and return its standard output. start: a
    script, or -m and a module. fine: accepted exit codes. env: additional variables. Raises BadInput or
    Failure with the last line of standard error. An exception here, as of Ctrl-C, stops the process, which
    may save."""
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": python_path} | (env or {})
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        env["OMP_NUM_THREADS"] = "1"
    command += [*start, *map(str, arguments)]
    name = name or start[-1]
    with (ProgressLine(f"running {name}"),
          subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=env) as child):
        try:
            output, errors = child.communicate()
        except BaseException:                # Ctrl-C, or a signal's SystemExit
            child.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=SAVING)
            finally:                         # after a second Ctrl-C too
                child.kill()
            raise
    error_lines = errors.strip().splitlines() or ["no error message"]
    # torchrun writes a report of its own behind a rank's sentence, and for a killed rank its exit code
    told = [line.strip() for line in error_lines if re.match(r"error: |\s*exitcode +: -", line)]
    error = (told or error_lines)[-1].removeprefix("error: ")
    if child.returncode == 2 and ranks == 1:
        raise BadInput(error)
    if child.returncode not in fine:
        raise guard.Failure(f"{name} ended with {child.returncode}: {error}")
    return output


def run_script(work, options=None):
    """Run the script once and return the figures of its log. seconds: of each measured step; step_s: their
    median; rate: median units a second; fastest: units a second of the fastest step; outside_s: seconds of
    the process outside of these steps (start, compiling, warm-up, end); utilization: the highest that a step
    logged, None if unknown; joules_a_step: of the first rank's GPU, None if unknown; loss: of the last step;
    grad_norm: of the first; settings: every option, with the value that auto resolved to, and facts about
    model and data."""
    options = dict(options or {})
    ranks = options.pop("ranks", work.ranks)
    start = time.perf_counter()
    process([str(ROOT / work.script)], work.arguments + as_flags(**options), ranks, work.script)
    wall = time.perf_counter() - start
    lines = read_run(work.out)
    steps = [line for line in lines if "lr" in line]
    settings = next(line["config"] | line["settings"] | line["facts"] for line in lines if "config" in line)
    if "batch_size" in settings:             # replaced by the micro-batch that fitted
        settings["micro_batch"] = steps[-1]["micro_batch"]
        del settings["batch_size"], settings["gradient_accumulation_steps"]
    counted = list(pairwise(steps))[WARM_UP - 1:]
    seconds = [step["seconds"] - before["seconds"] for before, step in counted]
    if work.script == "grpo.py":
        units = [settings["prompts_per_step"] * settings["k_samples"] for _ in counted]
    else:
        units = [step["tokens"] - before["tokens"] for before, step in counted]
    rates = [n / s for n, s in zip(units, seconds)]
    if len(seconds) != work.steps:
        raise guard.Failure(f"{work.script} logged {len(steps)} steps instead of {WARM_UP + work.steps}, so "
                            "there is nothing to compare.")
    joules = [step.get("joules") for step in (counted[0][0], steps[-1])]
    joules_a_step = None
    if None not in joules and sum(seconds) >= LEAST_SECONDS:
        joules_a_step = (joules[1] - joules[0]) / len(counted)
    work.runs.append({
        "seconds": seconds,
        "step_s": statistics.median(seconds),
        "rate": statistics.median(rates),
        "fastest": max(rates),
        "units": statistics.fmean(units),
        "outside_s": wall - sum(seconds),
        "peak_memory_gb": steps[-1]["peak_memory_gb"],
        "reserved_memory_gb": steps[-1].get("reserved_memory_gb"),
        "utilization": max(filter(None, (step.get("utilization") for step in steps)), default=None),
        "joules_a_step": joules_a_step,
        "loss": float(steps[-1]["loss"]),    # of a run that is not finite, the log has a text
        "grad_norm": steps[0]["grad_norm"],
        "settings": settings,
        "steps": steps,
    })
    return work.runs[-1]


def aligned(rows):
    """Return the lines of a table of texts: the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
            for first, *cells in rows]


def steps_of(folder):
    """Return the lines of a run's metrics that are steps."""
    return [line for line in read_lines(folder) if "lr" in line]


def last_step(script, folder):
    """Return the last step that a script logged in a run folder; Failure if there is none."""
    steps = steps_of(folder)
    if not steps:
        raise guard.Failure(f"{script} has logged no step in {folder}: it must write there.")
    return steps[-1]


def seconds_at(folder, step):
    """Return the seconds of training a step, until the first logged one from `step` on, or the last."""
    steps = steps_of(folder)
    line = next((line for line in steps if line["step"] >= step), steps[-1])
    return line["seconds"] / line["step"]


def recorded(runs):
    """Return the figures of runs that the record keeps."""
    left_out = ("units", "settings", "steps")
    return [{key: value for key, value in run.items() if key not in left_out} for run in runs]


def shared_figures(work, rates, limit, parts, log):
    """Log all sides' peak memory, and return the figures that records of train.py and grpo.py share. parts:
    seconds in a step's log."""
    runs = work.runs
    counted = [step for run in runs for step in run["steps"][WARM_UP:]]
    peak_memory_gb = work.peak_memory_gb | {"nanoRFT": runs[-1]["peak_memory_gb"]}
    log(f"peak memory, GiB: {', '.join(f'{name} {size:.2f}' for name, size in peak_memory_gb.items())}")
    return {
        "what": work.description,
        "unit": work.unit,
        "rates": rates,
        "limit": limit,
        "share": statistics.median(rates["nanoRFT"]) / limit,
        "step_s": statistics.median(run["step_s"] for run in runs),
        "parts": {part: statistics.median(step[part] for step in counted) for part in parts},
        "settings": runs[0]["settings"],
        "repeats": recorded(runs),
        "peak_memory_gb": peak_memory_gb,
    }


def alternate(sides, repeats, unit, log, warm_up=0):
    """Alternate between sides {name: function -> rate}; log medians and ratios, and return {name: rates}. The
    first warm_up rounds are dropped; a peer that fails is left out. Raises BadInput, and nanoRFT's errors."""
    rates = {name: [] for name in sides}
    for repeat in track(range(warm_up + repeats), "measuring", "turns"):
        for name in list(rates):
            try:
                rate = sides[name]()
            except Exception as e:
                if name == "nanoRFT" or isinstance(e, BadInput):
                    raise
                first_line, *_ = f"{e or type(e).__name__}".splitlines()
                log(f"{name}: left out, it failed: {first_line}")
                del rates[name]
                continue
            if repeat >= warm_up:
                rates[name].append(rate)
    ours = rates["nanoRFT"]
    log(f"nanoRFT: {statistics.median(ours):,.1f} {unit} ({min(ours):,.1f}-{max(ours):,.1f})")
    for name, theirs in rates.items():
        if name == "nanoRFT":
            continue
        ratios = sorted(our_rate / their_rate for our_rate, their_rate in zip(ours, theirs))
        log(f"{name}: {statistics.median(theirs):,.1f} {unit}; nanoRFT is "
            f"{statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    return rates


def run_peer(cfg, hw, work, peer, units, **job):
    """Run a training peer in its own process, which sees one GPU only, since transformers would use all.
    Return its units a second after the warm-up. units: of a step."""
    env = {}
    if hw.device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = visible.split(",")[hw.device.index] if visible else str(hw.device.index)
        env = {"CUDA_VISIBLE_DEVICES": gpu}
    common = {"peer": peer, "folder": str(work.folder), "device": hw.device.type, "dtype": hw.dtype,
              "tf32": hw.tf32, "seed": cfg.seed, "steps": WARM_UP + work.steps}
    path = work.folder / "job.json"
    path.write_text(json.dumps(common | job))
    printed = process(["-m", "measure.peers"], [path], name=peer, env=env)
    figures = json.loads(printed.splitlines()[-1])
    work.peak_memory_gb[peer] = figures["peak_memory_gb"]
    return units / statistics.median(figures["seconds"][WARM_UP:])
