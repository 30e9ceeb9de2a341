"""Test and measure everything on this machine's GPU in a given time. Three stages need the network, or
--text= and the model of runs/smollm2.sh, and are skipped without.

    bash runs/gpu.sh 15                         minutes; without a number 9
    bash runs/gpu.sh 2 --only=engine,ceilings
    python -m measure.gpu.run --table=bench_results/gpu.jsonl       the table of the last run

Each stage of STAGES runs as a process with a time limit, the most decisive first; those that have passed on
this kind of card before, by the same file, come last. A stage that no longer fits is skipped, and a failed
stage does not stop the others. Each check appends a line to gpu.jsonl when its stage has ended: stage, name,
status (ok | failed | skipped | timeout), seconds of the stage in its first line, figures, error, command; the
first line has the card and the versions. Exit code 1 if a check failed or a stage timed out.
"""
import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from measure.runs import ROOT, check_writable, end_on_signals
from runtime import config, guard, network
from runtime.config import BadInput, PositiveFloat
from runtime.log import read_lines
from runtime.progress import ProgressLine, clear


@dataclass
class Config:
    minutes: PositiveFloat = 9.0             # for all stages together
    only: str | None = None                  # comma-separated stages; None: all
    output: str = "bench_results/gpu.jsonl"  # appended to; the processes' output goes to a .log next to it
    text: str = "Salesforce/wikitext:wikitext-2-raw-v1"      # of the stages that train on text: as --dataset=
    table: str | None = None                 # a gpu.jsonl: only print the table of its last run


class Stage(NamedTuple):
    """A process that makes checks."""
    name: str
    command: str                             # the arguments of `python`, or of `bash`
    needs: int                               # seconds; skipped if fewer are left
    timeout: int                             # seconds
    beside: str = ""                         # the earlier stage to compare with
    package: str = ""                        # required packages
    cards: int = 1
    download: str = ""                       # skipped if this file is not there and the hub can't be reached
    aims: dict = {}                          # {check, or "" for each: (figure, expected value)}


TRAIN = "bench.py --stage=train --repeats=1"
# steps of 65,536 tokens
GPT2 = f"{TRAIN} config/gpt2_124m.py --batch_size=16 --gradient_accumulation_steps=4"
GPT2_350M = (f"{TRAIN} config/gpt2_124m.py --n_layer=24 --n_head=16 --n_embd=1024 --batch_size=8 "
             "--gradient_accumulation_steps=8")
# one sequence a step, as in the figure that prime-rl publishes for full fine-tuning
QWEN3 = (f"{TRAIN} --model=qwen3-0.6b --block_size=8192 --batch_size=1 --gradient_accumulation_steps=1 "
         "--optimizer=adamw --learning_rate=3e-4")
SFT = "bench.py --stage=sft --model=gpt2 --repeats=1"
GRPO = "bench.py --stage=grpo --model=gpt2 --work=64x8 --max_new_tokens=94 --steps=3 --repeats=1"
GENERATE = "bench.py --stage=generate --repeats=1"
PYTEST = "-m pytest -v -m gpu -p no:cacheprovider tests/test_gpu.py"
GPU_ENGINE = PYTEST.replace("test_gpu", "test_gpu_engine") + " tests/test_triton.py"
# of bytes, 9.8M tokens, less than one pass over WikiText-2; then the perplexity of the validation split
TEXT = "train.py config/a100_fast.py --dataset={text} --tokenizer=bytes --max_steps=300 --eval_interval=100"
CLIMBS = "test_reinforcement_learning_climbs"
COMPILES = "cuda_graphs or resumed_run or steps_of_an_optimizer"
# Tests of changed code have stages of their own, since a hang ends its stage.
STAGES = (
    Stage("card", "-m measure.gpu.checks card", 10, 60),
    # changed since the last run on a card
    Stage("compiled", f"{PYTEST} -k compiled_is_eager", 30, 120, package="pytest"),
    Stage("rl", f"{PYTEST} -k '{CLIMBS} and not compiled'", 20, 90, package="pytest"),
    Stage("rl-compiled", f"{PYTEST} -k '{CLIMBS} and compiled'", 90, 240, package="pytest"),
    Stage("engine", GPU_ENGINE, 30, 120, package="pytest"),
    Stage("grpo", GRPO, 35, 120, package="tokenizers", aims={"": ("completions_per_s", 1250)}),
    Stage("grpo-compiled", f"{GRPO} --compile=true", 45, 150, "grpo", "tokenizers"),
    Stage("correctness", f"{PYTEST} -k 'not compiled_is_eager and not {CLIMBS} and not ({COMPILES})'", 40,
          120, package="pytest"),
    # the A100 configurations, whose rates are extrapolated from a CPU
    *(Stage(name, f"{TRAIN} config/{name}.py --compile=false --steps=20", 45, 90, package="tokenizers")
      for name in ("a100_fast", "a100_production")),
    *(Stage(name, f"{TRAIN} config/{name}.py --compile=false --steps=6", 60, 120, package="tokenizers")
      for name in ("a100_max", "a100_mega")),
    Stage("a100_fast-compiled", f"{TRAIN} config/a100_fast.py --steps=20", 60, 150, "a100_fast",
          "tokenizers"),
    Stage("generate-360m", f"{GENERATE} --model=smollm2-360m --work=1x1,64x1,32x8", 25, 90,
          aims={"64x1": ("tokens_per_s", 40_000)}),
    Stage("correctness-compiled", f"{PYTEST} -k '{COMPILES}'", 90, 240, package="pytest"),
    # Muon and AdamW after the same tokens
    Stage("text-muon", TEXT, 90, 300, download="{text}"),
    Stage("text-adamw", f"{TEXT} --optimizer=adamw --learning_rate=6e-4", 90, 300, download="{text}"),
    # the price of each optimisation
    Stage("ladder-train", f"{TRAIN} --ladder --model=gpt2 --steps=30", 240, 450, package="tokenizers"),
    Stage("ladder-sft", f"{SFT} --ladder --steps=20", 200, 400),
    Stage("ladder-grpo", f"{GRPO} --ladder", 220, 450, package="tokenizers"),
    Stage("grpo-reference", f"{GRPO} --beta=0.04", 35, 120, "grpo", "tokenizers"),
    Stage("grpo-offloaded", f"{GRPO} --beta=0.04 --offload_reference", 35, 120, "grpo-reference",
          "tokenizers"),
    # speed
    Stage("ceilings", "-m measure.gpu.checks ceilings", 10, 60),
    Stage("attention", "-m measure.gpu.checks attention", 10, 60),
    Stage("train-eager", f"{GPT2} --compile=false", 25, 120, package="tokenizers"),
    Stage("train", GPT2, 40, 150, "train-eager", "tokenizers", aims={"": ("mfu", 0.45)}),
    Stage("train-fp16", f"{GPT2} --compile=false --dtype=fp16", 25, 120, "train-eager", "tokenizers"),
    Stage("train-64x1", f"{GPT2} --widen_micro_batch --loss_chunks=1", 40, 150, "train", "tokenizers",
          aims={"": ("mfu", 0.48)}),
    Stage("reduce-overhead", f"{GPT2} --compile_mode=reduce-overhead", 40, 150, "train", "tokenizers"),
    Stage("generate-gpt2", f"{GENERATE} --model=gpt2 --work=64x1,64x8 --prompt_tokens=50 --max_new_tokens=94",
          25, 90),
    Stage("grpo-360m", f"{GRPO} --model=smollm2-360m", 45, 150, package="tokenizers"),
    Stage("train-qwen3", QWEN3, 50, 150, package="tokenizers"),
    Stage("train-350m", GPT2_350M, 45, 150, package="tokenizers"),
    Stage("smollm2", "runs/smollm2_seeds.sh", 420, 600,
          package="gguf transformers matplotlib datasets tiktoken",
          download="data/SmolLM2-135M-Instruct.Q4_1.gguf"),
    Stage("sft-eager", f"{SFT} --compile=false", 20, 90),
    Stage("sft", f"{SFT} --compile=true", 35, 120, "sft-eager"),
    Stage("train-parts", f"{GPT2.replace(' --repeats=1', '')} --profile", 30, 120, package="tokenizers"),
    Stage("grpo-varied", f"{GRPO} --varied_prompts", 35, 120, "grpo", "tokenizers"),
    Stage("two-cards", f"{GPT2} --ranks=2", 40, 150, "train", "tokenizers", 2),
    Stage("peers", f"{GENERATE} --model=smollm2-360m --work=64x1 --peers=generate", 30, 120,
          package="transformers"),
    Stage("countdown", "runs/countdown.sh --size=large --base_steps=1000 --asked=4000 --grpo_steps=20 "
          "--num_questions=200", 300, 420, package="matplotlib datasets tiktoken"),
)
SETTINGS = ("attention", "compile", "micro_batch", "dtype")  # resolved settings to record
RUN_FIGURES = ("tokens_per_s", "mfu", "peak_memory_gb", "reserved_memory_gb", "utilization", "loss", "reward",
               "val_loss", "val_ppl_word")
LOSS_OFF = 0.02                              # largest relative deviation between two runs of the same steps
# {figure: its format in tables}
SHOWN = {
    "tests": "{}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "completions_per_s": "{:,.1f} completions/s",
    "mfu": "MFU {:.1%}",
    "of_limit": "{:.0%} of the limit",
    "mbu": "MBU {:.0%}",
    "tflops": "{:,.1f} TFLOP/s",
    "gb_per_s": "{:,.0f} GB/s",
    "of_nominal": "{:.0%} of nominal",
    "ms": "{:.2f} ms",
    "varied_ms": "{:.2f} at varied lengths",
    "first_call_s": "first call {:.3f} s",
    "step_ms": "a step {:,.2f} ms",
    "floor_ms": "at least {:,.2f}",
    "host_share": "host {:.0%}",
    "rollout_s": "rollout {:.3f} s",
    "update_s": "update {:.3f} s",
    "peak_memory_gb": "{:.2f} GiB",
    "reserved_memory_gb": "{:.2f} reserved",
    "utilization": "busy {:.0%}",
    "gain": "{:.2f} times the row before",
    "promised": "the guides expect {} times",
    "off_fp32": "loss {:+.2%} from fp32",
    "speedup": "{:.2f} times {beside}",
    "longer_outside_s": "{:+.1f} s for start and compiling",
    "joules_a_step": "{:,.1f} J a step",
    "val_loss": "validation loss {:.4f}",
    "val_ppl_word": "word perplexity {:.1f}",
    "greedy": "greedy {:.1%}",
    "sampled": "sampled {:.1%}",
    "loss_off": "loss off by {:.2%}",
    "over_generate": "{:.1f} times transformers' generate",
    "aim": "aim {}",
}


# --- checks and their lines ---

def outcome(name, status="ok", figures=None, error=None):
    """Return the record of a check. status: ok | failed | skipped | timeout; error: a sentence if not ok."""
    return {"name": name, "status": status, "seconds": None, "figures": figures or {}, "error": error}


def parsed(text):
    """Return the dictionary in a line; {} if it is not one."""
    with contextlib.suppress(ValueError):
        return config.parse_json(text, dict)
    return {}


def read_runs(path):
    """Return the complete lines of each run in a gpu.jsonl. Raises BadInput if there are none."""
    try:
        texts = Path(path).read_text(errors="replace").splitlines()
    except OSError as e:
        raise BadInput(f"{path} can't be read ({e.strerror}): give the gpu.jsonl of a run.") from None
    runs = [[]]
    for line in map(parsed, texts):
        if line.get("stage") == "card":
            runs.append([])
        if {"stage", "command", *outcome("")} <= line.keys():
            runs[-1].append(line)
    runs = [lines for lines in runs if lines]
    if not runs:
        raise BadInput(f"{path} holds no line of a run of measure.gpu.run: give the gpu.jsonl of one.")
    return runs


def passed_before(path, card, stages):
    """Return the names of the stages with no failed check in their last run on a card of this name, if their
    command is that of today."""
    passed = {}
    for first, *lines in read_runs(path):
        if first["name"] == card:
            for stage in {line["stage"] for line in lines}:
                checks = [line for line in lines if line["stage"] == stage and line["status"] != "skipped"]
                if checks:
                    passed[stage] = all(check["status"] == "ok" for check in checks) and checks[0]["command"]
    return {stage.name for stage in stages if passed.get(stage.name) == command_of(stage)}


def in_order(stages, passed):
    """Return the stages with those that passed before (names) last, except where another is compared with
    their figures."""
    last = set(passed)
    for stage in reversed(stages):
        if stage.name not in last:
            last.discard(stage.beside)
    return sorted(stages, key=lambda stage: stage.name in last)


def checks_of_tests(printed):
    """Return the checks in pytest's output: each failed test, and the counts."""
    failed = [re.match(r"(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", line) for line in printed]
    checks = [outcome(test[1], "failed", error=test[2]) for test in failed if test]
    counts = [re.fullmatch(r"=+ (\d+ .*) in [\d.]+s.* =+", line) for line in printed]
    counts = [found[1] for found in counts if found]
    if not counts:                           # it was killed
        ended = [re.match(r"(\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b", line) for line in printed]
        results = Counter(found[2].lower() for found in ended if found)
        counts = [", ".join(f"{n} {result}" for result, n in results.items())] if results else []
        checks = [outcome(found[1], "failed", error="its message was lost") for found in ended
                  if found and found[2] in ("FAILED", "ERROR")]
    return [outcome("tests", figures={"tests": text}) for text in counts] + checks


def checks_of_record(record):
    """Return the checks in a record of bench.py."""
    rate = "completions_per_s" if record["stage"] == "grpo" else "tokens_per_s"
    if record["mode"] == "ladder":
        rows = [outcome(row["name"], figures={rate: row["rate"], "step_ms": 1e3 * row["step_s"]}
                        | {name: row[name] for name in ("gain", "promised", "joules_a_step", "peak_memory_gb",
                                                        "loss", "off_fp32")})
                for row in record["rows"]]
        return rows + [outcome(name, "failed", error=error) for name, error in record["failed"].items()]
    if record["mode"] == "profile":
        consumers = {row["name"]: row["share"] for row in record["consumers"][:8]}
        return [outcome("parts of a step", figures={"step_ms": record["ms_a_step"], "consumers": consumers})]
    if record["stage"] == "generate":
        return [outcome(case["work"], figures=case_figures(case)) for case in record["cases"]]
    run = record["repeats"][0]
    figures = {
        rate: statistics.median(record["rates"]["nanoRFT"]),
        "of_limit": record["share"],
        "mfu": record.get("mfu"),
        "step_ms": 1e3 * record["step_s"],
        "settings": {name: record["settings"].get(name) for name in SETTINGS},
    }
    names = ("peak_memory_gb", "reserved_memory_gb", "outside_s", "loss", "grad_norm", "utilization",
             "joules_a_step")
    figures |= record["parts"] | {name: run[name] for name in names}
    return [outcome(record["what"], figures=figures)]


def checks_of_folder(folder):
    """Return the check of a run folder of train.py, or the checks of pipelines' summary.json; of pipelines
    that were stopped, those of their run folders."""
    checks = []
    for path in sorted(folder.rglob("summary.json")):
        seed = "" if path.parent == folder else f"{path.parent.name}/"
        stages = json.loads(path.read_text())["stages"]
        checks += [outcome(seed + stage["name"], figures=stage) for stage in stages]
    if checks:
        return checks
    for path in sorted(folder.rglob("metrics.jsonl")):
        figures = {}
        settings = {}
        for line in read_lines(path.parent):
            figures |= {name: line[name] for name in RUN_FIGURES if isinstance(line.get(name), float)}
            settings |= {name: line["settings"].get(name) for name in SETTINGS if "settings" in line}
        name = path.parent.name if path.parent == folder else str(path.parent.relative_to(folder))
        checks += [outcome(name, figures=figures | {"settings": settings})] * bool(figures)
    return checks


def case_figures(case):
    """Return the figures of a case of bench.py --stage=generate."""
    names = ("tokens_per_s", "mbu", "step_ms", "floor_ms", "over_generate", "fused")
    figures = {name: case[name] for name in names if name in case}
    figures["of_limit"] = case["tokens_per_s"] / case["limit"]
    parts = {part: case.get(f"{part}_s", 0.0) for part in ("prefill", "decode", "draw", "host")}
    return figures | {f"{part}_share": seconds / sum(parts.values()) for part, seconds in parts.items()}


def add_aim(line, aims):
    """Add the aim for a check to its line, as text."""
    figure, value = aims.get(line["name"], aims.get("", (None, None)))
    if figure in line["figures"]:
        line["figures"]["aim"] = SHOWN[figure].format(value)


def compare(line, other):
    """Add the comparison with an earlier stage to a line: speed, seconds outside of the measured steps
    (compilation) and, of training, last loss. After the same training steps, a loss that deviates by more
    than LOSS_OFF fails the check."""
    ours = line["figures"]
    theirs = other["figures"]
    for rate in {"tokens_per_s", "completions_per_s"} & ours.keys() & theirs.keys():
        ours["beside"] = other["stage"]
        ours["speedup"] = ours[rate] / theirs[rate]
        ours["longer_outside_s"] = ours["outside_s"] - theirs["outside_s"]
    if "tokens_per_s" not in ours or "speedup" not in ours:
        return
    ours["loss_off"] = abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"])
    if not ours["loss_off"] <= LOSS_OFF:
        line["status"] = "failed"
        line["error"] = f"its loss, {ours['loss']:.4f}, is not that of {other['stage']}, {theirs['loss']:.4f}"


# --- a stage ---

def run_process(command, timeout, log, env):
    """Run a command whose output goes to the file log. Return (exit code, or None if it was killed after
    `timeout` seconds; the lines of its output). Kills its process group at the end; torchrun's ranks, which
    have groups of their own, end with torchrun."""
    log.seek(0, os.SEEK_END)
    begin = log.tell()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log,
                               stderr=subprocess.STDOUT, start_new_session=True)
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(begin)
    return code, log.read().splitlines()


def error_message(printed):
    """Return the error message in the last lines of a process, else the last line; leave records out."""
    lines = [line.strip() for line in printed[-50:] if line.strip() and not parsed(line)]
    for pattern in (r"error: ", r"(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|Exit|Interrupt)\b"):
        errors = [line for line in lines if re.match(pattern, line)]
        if errors:
            return errors[-1].removeprefix("error: ")
    return lines[-1] if lines else "no output"


@functools.cache
def has_network():
    """Return network.is_reachable(), asked once: without a network the answer may take half a minute."""
    return network.is_reachable()


def reason_to_skip(stage, seconds_left):
    """Return the reason why a stage can't run; None if it can."""
    missing = [name for name in stage.package.split() if not importlib.util.find_spec(name)]
    if missing:
        return f"{missing[0]} is not installed"
    if stage.cards > max(1, torch.cuda.device_count()):
        return f"it needs {stage.cards} cards, and there is one"
    if stage.download and not (Path(stage.download).exists() or has_network()):
        return f"it needs the network, or {'--text=FILE' if 'text' in stage.name else stage.download}"
    if seconds_left < stage.needs:
        return f"it needs at least {stage.needs} s, and {max(0.0, seconds_left):.0f} are left"
    return None


def is_compiled(words):
    """Return whether a stage's command asks for torch.compile."""
    by_default = "--stage=train" in words or words[0] == "train.py"
    return "--compile=true" in words or by_default and "--compile=false" not in words


def command_of(stage):
    words = shlex.split(stage.command)
    return shlex.join(["bash" if words[0].endswith(".sh") else "python", *words])


def run_stage(stage, seconds_left, log, folder):
    """Run a stage, and return the lines of its checks."""
    words = shlex.split(stage.command)
    head = {"stage": stage.name, "command": command_of(stage)}
    reason = reason_to_skip(stage, seconds_left)
    if reason:
        return [head | outcome(stage.name, "skipped", error=reason)]
    record = Path(folder) / f"{stage.name}.json"
    out = Path(folder) / stage.name
    if words[0] == "bench.py":
        words.append(f"--output={record}")
    elif words[0] == "train.py" or words[0].endswith(".sh"):
        words.append(f"--out_dir={out}")
    timeout = min(stage.timeout, seconds_left)
    # Each stage compiles anew, since its seconds are reported. Temporary files are removed with the folder
    # even if the process is killed.
    caches = f"{folder}/caches/{stage.name}"
    env = os.environ | {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
                        "TRITON_CACHE_DIR": f"{caches}/triton", "XDG_CACHE_HOME": f"{caches}/cache",
                        "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1",
                        "COLUMNS": "300"}                  # pytest cuts messages to them
    log.write(f"\n== {stage.name}: {head['command']}\n")
    log.flush()
    start = time.monotonic()
    with ProgressLine(f"running {stage.name}"):
        start_with = "bash" if words[0].endswith(".sh") else sys.executable
        code, printed = run_process([start_with, *words], timeout, log, env)
    seconds = round(time.monotonic() - start, 3)
    checks = [content for content in map(parsed, printed) if content.keys() == outcome("").keys()]
    checks += checks_of_tests(printed) if "pytest" in words else []
    if record.exists():
        checks += checks_of_record(json.loads(record.read_text()))
    checks += checks_of_folder(out)
    for check in checks:
        if is_compiled(words) and check["figures"].get("settings", {}).get("compile") is False:
            check |= {"status": "failed", "error": "torch.compile failed, and training went on without"}
    if code is None:
        error = f"ended after {timeout:.0f} s; its last message: {error_message(printed)}"
        checks.append(outcome(stage.name, "timeout", error=error))
    elif code and not (code == 1 and "pytest" in words and any(c["status"] == "failed" for c in checks)):
        checks.append(outcome(stage.name, "failed", error=f"exit code {code}: {error_message(printed)}"))
    elif not checks:
        checks.append(outcome(stage.name, "failed", error="it reported no check"))
    checks[0]["seconds"] = seconds
    return [head | check for check in checks]


# --- the table ---

def shown(figures):
    """Return the text of a check's figures."""
    known = {key: figures[key] for key in SHOWN if figures.get(key) is not None}
    texts = [SHOWN[key].format(value, beside=figures.get("beside")) for key, value in known.items()]
    texts += [f"{name[:40]} {share:.0%}" for name, share in list(figures.get("consumers", {}).items())[:4]]
    return ", ".join(texts)


def table(lines):
    """Return the Markdown table of a run: a line about the card, then a row for each check."""
    rows = []
    if lines[0]["stage"] == "card":
        rows = [heading(lines[0]), ""]
        lines = lines[1:]
    rows += ["| stage | check | result | s | by |", "|---|---|---|---|---|"]
    before = None
    for line in lines:
        result = shown(line["figures"])
        if line["status"] != "ok":
            result = ", ".join(filter(None, (f"**{line['status']}**: {line['error']}", result)))
        name = line["name"].rpartition("::")[2]
        seconds = "" if line["seconds"] is None else f"{line['seconds']:.0f}"
        command = "" if line["stage"] == before else f"`{line['command']}`"       # in the stage's first row
        before = line["stage"]
        cells = [" ".join(text.replace("|", "/").split())[:400]
                 for text in (before, name, result, seconds, command)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def heading(card):
    """Return the sentence about the hardware and versions above a table."""
    if card["status"] != "ok":
        return f"The card is unknown: {card['status']}, {card['error']}."
    facts = card["figures"]
    hardware = [f"{max(1, facts['cards'])} × {card['name']}", f"{facts['memory_gb']} GiB"]
    if facts["nominal"]:
        hardware.append(f"nominal {facts['nominal'][facts['dtype']]:g} TFLOP/s in {facts['dtype']}")
        hardware.append(f"{facts['nominal_tb_per_s']:g} TB/s")
    if facts["power_limit"]:
        hardware.append(facts["power_limit"])
    versions = [f"{name} {facts[name]}" for name in ("driver", "torch", "cuda", "cudnn") if facts[name]]
    return f"{', '.join(hardware)}; {', '.join(versions)}; {facts['date'][:10]}, commit {facts['commit']}."


# --- main ---

def chosen(names):
    """Return the Stages to run, always with "card". Raises BadInput for an unknown name."""
    known = [stage.name for stage in STAGES]
    wanted = names.split(",") if names is not None else known
    for name in wanted:
        if name not in known:
            raise BadInput(f"--only={names}: there is no stage {name!r}; choose from {', '.join(known)}.")
    return [stage for stage in STAGES if stage.name in ("card", *wanted)]


def check_machine():
    """Raise BadInput if this machine or PyTorch can't run the suite."""
    if not torch.cuda.is_available():
        raise BadInput("PyTorch sees no CUDA GPU: use a machine with one and a CUDA build of PyTorch, or "
                       "measure the CPU with python bench.py.")
    version = [int(number) for number in re.findall(r"\d+", torch.__version__)[:2]]
    if version < [2, 11]:
        raise BadInput(f"The GPU suite needs PyTorch 2.11 or newer, not {torch.__version__}: update it.")


def check_output(path):
    """Make the output's folder. Raises BadInput if the file is not from this script or can't be written."""
    check_writable(path)
    try:
        if path.exists():
            read_runs(path)
    except BadInput:
        raise config.would_overwrite(path, "measure.gpu.run's") from None


def run(cfg, stages, path):
    """Run the stages, print their checks, append their lines to the file, and return them."""
    deadline = time.monotonic() + 60 * cfg.minutes
    stages = list(stages)
    lines = []
    first = {}                               # {stage: its first line that is ok}
    output = path.with_suffix(".log")
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
          open(output, "a+", errors="replace") as log):
        while stages:
            stage = stages.pop(0)
            checks = run_stage(stage, deadline - time.monotonic(), log, folder)
            for line in checks:
                if line["status"] == "ok":
                    first.setdefault(stage.name, line)
                    if stage.beside in first:
                        compare(line, first[stage.beside])
                    add_aim(line, stage.aims)
                clear()
                result = f"{line['status']}: {line['error']}" if line["error"] else shown(line["figures"])
                print(heading(line) if stage.name == "card" else f"{stage.name}: {line['name']}: {result}",
                      flush=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in checks)
            lines += checks
            if stage.name == "card" and checks[0]["status"] == "ok":
                stages = in_order(stages, passed_before(path, checks[0]["name"], stages))
    return lines


def main(argv):
    cfg = config.load(Config, argv)
    if cfg.table is not None:
        print(table(read_runs(cfg.table)[-1]))
        return 0
    stages = [stage._replace(command=stage.command.replace("{text}", shlex.quote(cfg.text)),
                             download=stage.download.replace("{text}", cfg.text))
              for stage in chosen(cfg.only)]
    check_machine()
    path = Path(cfg.output).resolve()
    check_output(path)
    end_on_signals()
    lines = run(cfg, stages, path)
    print(f"\n{table(lines)}\n\nAll figures: {path}")
    return int(any(line["status"] in ("failed", "timeout") for line in lines))


if __name__ == "__main__":
    guard.run(main)
