"""Measure each stage on this machine, next to its hardware limit and to other implementations of the same
work.

    python bench.py
        an overview: matrix products, memory, one line a stage (two minutes)
    python bench.py --stage=train config/gpt2_124m.py --batch_size=8
        bench.py's options and those of the stage's script can be mixed
    python bench.py --stage=train --ladder
        plain fp32 training, then one more optimisation in each row
    python bench.py --stage=grpo --profile
        a trace of a few steps and the operations that take most of their time
    python bench.py --stage=generate --model=gpt2 --work=1x1,64x8 --peers
        against transformers' generate; the other stages have peers too
    python bench.py --stage=rewards
        slow verifiers in worker processes against the same verifiers in the calling process

train.py, datagen.py and grpo.py run as processes, and the figures come from their logs: medians over the
steps after a warm-up. Compared runs share weights or shapes, data and the precision of activations, and
alternate. Each call writes its figures and the hardware and versions to bench_results/, as JSON.
"""
import contextlib
import importlib
import json
import re
import shlex
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.usage import first_line

first_line()                             # --help, or a word, before the seconds that importing PyTorch takes

import torch

import hub.weights
from measure import peers
from measure.ceilings import formats, machine, matmul_peak, read_bandwidth, recipe_rows
from measure.ladder import bench_ladder
from measure.profiling import bench_profile
from measure.reinforcement import bench_grpo, bench_rewards, grpo_case, grpo_work
from measure.runs import check_writable, end_on_signals
from measure.sampling import bench_datagen, bench_generate
from measure.synthetic import SHAPES, suppress_eos, random_model, write_tokenizer
from measure.training import bench_training, sft_work, train_work
from model import GPTConfig
from runtime import config, guard, hardware
from runtime.config import BadInput, NonNegativeFloat, NonNegativeInt, PositiveInt
from runtime.progress import clear


@dataclass
class Config:
    stage: Literal["overview", "train", "sft", "generate", "datagen", "grpo", "rewards",
                   "machine"] = "overview"   # machine: print the rows of docs/recipes.md that apply here
    model: Literal["auto", "qwen3-0.6b", "smollm2-360m", "smollm2-135m", "gpt2", "gpt2-1m", "1m", "llama-1m",
                   "llama-50m"] = "auto"     # a shape, with random weights. auto: generate smollm2-360m;
                                             # train the config file's, if given; else gpt2 on a GPU and
                                             # llama-1m on a CPU (train 1m, or gpt2-1m with --peers)
    run: str = ""                            # sft, datagen, grpo: a trained model, instead of random weights
    ladder: bool = False                     # train, sft, grpo: plain fp32, then one more optimisation a row
    ablate: bool = False                     # train, sft, grpo: all optimisations, then each one switched off
    profile: bool = False                    # train, sft, grpo: the operations that take most of a few steps'
                                             # time, and a trace for chrome://tracing
    peers: bool | str = False                # other implementations too: all that are installed, or
                                             # comma-separated names (measure/peers.py)
    steps: PositiveInt | None = None         # steps that are measured, after 2 of warm-up; None: train 12,
                                             # sft 6, grpo 6, with --profile 3
    repeats: PositiveInt | None = None       # runs of each implementation or row; None: 3, with --ladder or
                                             # --ablate 5, of the overview 1
    ranks: PositiveInt | None = None         # processes of nanoRFT; None: datagen and grpo one a thread for a
                                             # small model on a CPU, else 1
    work: str | None = None                  # prompts x samples of each, e.g. 8x8; generate: several cases,
                                             # by default 2x10,8x8,32x1; grpo: by the model
    prompt_tokens: PositiveInt | None = None     # generate, grpo: length of a prompt; None: 120; grpo: 50
    varied_prompts: bool = False             # grpo: prompt lengths between a quarter of prompt_tokens and all
    max_new_tokens: PositiveInt | None = None     # generate, datagen, grpo: of a sample; None: 60; grpo: by
                                             # model
    verifier_ms: NonNegativeFloat | None = None  # rewards, grpo: CPU time per grade; None: 5, plain grpo 0
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # precision of matrix products
    seed: NonNegativeInt = 0                 # of random weights and data
    output: str | None = None                # a .json file of the figures; None: a new one in bench_results/;
                                             # a trace is written beside it
    json: bool = False                       # print all figures as the last line too


SCRIPTS = {"train": "train", "sft": "train", "datagen": "datagen", "grpo": "grpo"}
STEPS = {"train": 12, "sft": 6, "grpo": 6}
# bench.py's options that apply to some stages only
STAGES_OF_OPTION = {
    "run": "sft datagen grpo",
    "ladder": "train sft grpo",
    "ablate": "train sft grpo",
    "profile": "train sft grpo",
    "ranks": "train sft datagen grpo",
    "steps": "overview train sft grpo",
    "work": "overview generate grpo",
    "prompt_tokens": "overview generate grpo",
    "varied_prompts": "grpo",
    "max_new_tokens": "overview generate datagen grpo",
    "verifier_ms": "overview rewards grpo",
}
# options of a stage's script that bench.py sets
FIXED_OPTIONS = {
    "train": "num_epochs patience eval_tokens",
    "sft": "num_epochs patience dataset tokenizer",
    "datagen": "task tokenizer few_shot",
    "grpo": "task dataset num_questions tokenizer few_shot",
}
FIXED_IN_ALL = ("out_dir init_from overwrite eval_only max_steps log_interval eval_interval save_interval "
                "save_only_model")
FOLDER = "bench_results"


# --- arguments of the stages' scripts ---

class ScriptArgs(NamedTuple):
    """Config files and flags of a stage's script, the resulting Config, and the options they set."""
    files: list = ()
    flags: list = ()
    config: Any = None
    given: frozenset = frozenset()


def split_arguments(argv):
    """Split argv into (bench.py's arguments, those of the stage's script)."""
    options = {field.name for field in fields(Config)} | {"help"}
    own = [arg for arg in argv if arg == "-h" or arg[:2] == "--" and arg[2:].partition("=")[0] in options]
    return own, [arg for arg in argv if arg not in own]


def parse_script_args(stage, arguments):
    """Return the ScriptArgs of a stage. Raises BadInput for invalid options and those that bench.py sets."""
    script_config = config.load(importlib.import_module(SCRIPTS[stage]).Config, arguments)
    files = [arg for arg in arguments if not arg.startswith("--")]
    flags = [arg for arg in arguments if arg.startswith("--")]
    flagged = {flag[2:].partition("=")[0] for flag in flags}
    for option in f"{FIXED_OPTIONS[stage]} {FIXED_IN_ALL}".split():
        if option in flagged:
            advice = ", and give --steps= instead" if option in ("max_steps", "num_epochs") else ""
            raise BadInput(f"bench.py sets --{option} itself in --stage={stage}: leave it out{advice}.")
    in_files = [config.read_file(file) for file in files]
    return ScriptArgs(files, flags, script_config, frozenset(flagged.union(*in_files)))


# --- the overview ---

def log_line(line):
    """Print a line after clearing the progress line."""
    clear()
    print(line, flush=True)


def bench_overview(cfg, hw, folder, script_args, log):
    """Measure the hardware's peaks and a short run of each stage; log a line for each."""
    peaks = {dtype: matmul_peak(hw, dtype) for dtype in formats(hw)}
    bandwidth = read_bandwidth(hw)
    products = []
    for name, flops in peaks.items():
        nominal = f" (nominal {hw.peaks[name]:g})" if hw.peaks.get(name) else ""
        products.append(f"{name} {flops / 1e12:,.2f}{nominal}")
    nominal = f" (nominal {1e3 * hw.bandwidth:,.0f})" if hw.bandwidth else ""
    log(f"matrix products, TFLOP/s: {', '.join(products)}; "
        f"reading memory: {bandwidth / 1e9:,.0f} GB/s{nominal}")
    log(f"\n{'':9} {'speed':>28} {'limit':>14} {'share':>7}")
    stages = {}
    generate_work = "64x8" if hw.device.type == "cuda" else "8x8"
    for stage in ("train", "sft", "generate", "datagen", "grpo", "rewards"):
        steps = cfg.steps or {"train": 10, "sft": 4, "grpo": 3}.get(stage)
        work = cfg.work or (generate_work if stage == "generate" else None)
        stage_cfg = with_defaults(replace(cfg, stage=stage, steps=steps, work=work))
        stage_args = ScriptArgs()
        if stage in SCRIPTS:
            flags = ["--num_questions=40", "--oversample=8"] if stage == "datagen" else []
            stage_args = parse_script_args(stage, flags)
        try:
            check_context(stage_cfg, stage_args)
            with tempfile.TemporaryDirectory(dir=folder) as stage_folder:
                export_random_weights(stage_cfg, hw, stage_folder, log=lambda line: None)
                figures = STAGES[stage](stage_cfg, hw, stage_folder, stage_args, log=lambda line: None)
        except (BadInput, guard.Failure) as e:
            log(f"{stage:9} left out: {e}")
            continue
        stages[stage] = figures
        speed = f"{figures['share'] * figures['limit']:,.0f} {figures['unit']}"
        log(f"{stage:9} {speed:>28} {figures['limit']:14,.0f} {figures['share']:7.1%}  {figures['also']}")
    log("\nThe limit is computed: training's FLOPs at the measured speed of a large matrix product; the "
        "bytes of weights and\nKV cache that sampling reads at the measured bandwidth; grading on all cores. "
        "A model of a million parameters stays\nfar below it, because dispatching operations takes time.")
    shares = {stage: [100 * figures["share"]] for stage, figures in stages.items()}
    return {"unit": "% of the limit", "peaks": peaks, "bandwidth": bandwidth, "stages": stages,
            "rates": shares}


STAGES = {
    "overview": bench_overview,
    "train": bench_training,
    "sft": bench_training,
    "generate": bench_generate,
    "datagen": bench_datagen,
    "grpo": bench_grpo,
    "rewards": bench_rewards,
}
# the work that --ladder, --ablate and --profile run
WORK = {"train": train_work, "sft": sft_work, "grpo": grpo_work}


# --- main ---

def choose_model(cfg, hw):
    """Return the name of the shape to measure."""
    if cfg.model != "auto":
        return cfg.model
    if cfg.stage == "generate":
        return "smollm2-360m"
    if hw.device.type == "cuda":
        return "gpt2"
    if cfg.stage == "train":
        return "gpt2-1m" if cfg.peers else "1m"
    return "llama-1m"


def with_defaults(cfg):
    """Return the Config with the stage's defaults in place of None."""
    overview = cfg.stage == "overview"
    in_rows = cfg.ladder or cfg.ablate
    defaults = {"repeats": 1 if overview else 5 if in_rows else 3,
                "steps": 3 if cfg.profile else STEPS.get(cfg.stage)}
    if not overview:
        defaults["verifier_ms"] = 5.0 if cfg.stage == "rewards" or in_rows else 0.0
    if cfg.stage not in ("grpo", "overview"):            # see grpo_case
        defaults |= {"work": "2x10,8x8,32x1", "prompt_tokens": 120, "max_new_tokens": 60}
    return replace(cfg, **{name: value for name, value in defaults.items() if getattr(cfg, name) is None})


def check(cfg):
    """Raise BadInput for options that are invalid or contradict each other."""
    modes = [mode for mode in ("ladder", "ablate", "profile") if getattr(cfg, mode)]
    if len(modes) > 1:
        raise BadInput(f"--{modes[0]} and --{modes[1]} exclude each other: give one of them.")
    if modes and cfg.peers:
        raise BadInput(f"--{modes[0]} does not run peers: leave --peers out.")
    on_gpu = torch.cuda.is_available() and cfg.device in ("auto", "cuda")
    if cfg.peers and (cfg.stage in ("train", "sft") or on_gpu) and (cfg.ranks or 1) > 1:
        raise BadInput("Peers train, and use a GPU, in one process: leave --ranks out.")
    for option in ("prompt_tokens", "varied_prompts", "verifier_ms"):
        if cfg.run and getattr(cfg, option) != getattr(Config, option):
            raise BadInput(f"--{option} is for random prompts, and --run has real ones: leave one out.")
    for option, stages in STAGES_OF_OPTION.items():
        if cfg.stage not in stages.split() and getattr(cfg, option) != getattr(Config, option):
            raise BadInput(f"--{option} has no effect in --stage={cfg.stage}, only in "
                           f"{', '.join(stages.split())}: leave it out.")
    if cfg.profile and (cfg.repeats or (cfg.ranks or 1) > 1):
        raise BadInput("--profile profiles one run of one process: leave --repeats and --ranks out.")
    one_case = cfg.stage in ("grpo", "overview")
    work = cfg.work or "8x8"
    cases = [work] if one_case else work.split(",")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", case) for case in cases):
        raise BadInput(f"--work={work} is not prompts x samples: write for example "
                       f"--work={'8x8' if one_case else '2x10,32x1'}.")
    if one_case and work.endswith("x1"):
        raise BadInput(f"--work={work} makes groups of one sample: give at least 2 samples a prompt.")
    if cfg.output and not cfg.output.endswith(".json"):
        raise BadInput(f"--output={cfg.output} should end in .json.")


def check_context(cfg, script_args):
    """Raise BadInput if prompt and completion exceed the model's context."""
    if cfg.stage not in ("generate", "grpo"):
        return
    lengths = cfg.max_new_tokens, cfg.prompt_tokens
    if cfg.stage == "grpo":
        _, _, *lengths = grpo_case(cfg, script_args)
    block_size = GPTConfig(**SHAPES[cfg.model]).block_size
    if sum(lengths) > block_size and not cfg.run:
        raise BadInput(f"{cfg.model} has {block_size} positions: lower --prompt_tokens or --max_new_tokens.")


def check_output(path):
    """Raise BadInput if the output or its trace would overwrite a file that is not bench.py's."""
    record = {}
    with contextlib.suppress(OSError, ValueError):
        record = config.parse_json(path.read_bytes(), dict)
    is_ours = str(record.get("command")).startswith("python bench.py")
    trace = path.with_suffix(".trace.json")
    for file, may_go in ((path, is_ours), (trace, is_ours and "trace" in record)):
        if file.exists() and not may_go:
            raise config.would_overwrite(file, "bench.py's")


def export_random_weights(cfg, hw, folder, log):
    """Export random weights to the folder if the stage starts from a model; for grpo also a tokenizer."""
    if cfg.stage in ("train", "rewards", "overview") or cfg.run or cfg.stage == "generate" and not cfg.peers:
        return
    torch.manual_seed(cfg.seed)
    c = GPTConfig(**SHAPES[cfg.model])
    model = random_model(c, hw)
    if cfg.stage == "grpo":
        suppress_eos(model, c.vocab_size - 1)
        write_tokenizer(folder, c.vocab_size)
    hub.weights.export(model, folder)
    log(f"{cfg.model}, {model.n_params():,} parameters, random weights")
    del model
    torch.cuda.empty_cache()                 # for the measured processes


def main(argv):
    end_on_signals()
    own, others = split_arguments(argv)
    cfg = config.load(Config, own)
    if cfg.stage not in SCRIPTS:
        config.load(Config, argv)            # names an unknown option
    check(cfg)
    cfg.peers = peers.chosen(cfg.stage, cfg.peers)
    script_args = parse_script_args(cfg.stage, others) if cfg.stage in SCRIPTS else ScriptArgs()
    tf32 = getattr(script_args.config, "tf32", True)
    dtype = cfg.dtype
    if dtype == "auto" and hasattr(script_args.config, "tf32"):
        dtype = script_args.config.dtype
    hw = hardware.setup(cfg.device, dtype, tf32, compile=False)
    if cfg.stage != "train" or not script_args.files or cfg.model != "auto":
        cfg.model = choose_model(cfg, hw)
    cfg = with_defaults(cfg)
    check_context(cfg, script_args)
    facts = machine(hw)
    if cfg.stage == "machine":
        print(f"{facts['hardware']}, {hw.dtype}, {facts['memory_gb']:g} GiB: {recipe_rows(hw)}")
        return 0
    mode = next((mode for mode in ("ladder", "ablate", "profile") if getattr(cfg, mode)), None)
    timestamp = facts["date"][:19].replace(":", "")
    name = "_".join(filter(None, (cfg.stage, mode, hw.device.type, timestamp)))
    cfg.output = Path(cfg.output or f"{FOLDER}/{name}.json")
    check_output(cfg.output)
    check_writable(cfg.output)
    model_name = cfg.run or (" ".join(script_args.files) if cfg.model == "auto" else cfg.model)
    if cfg.stage == "rewards":
        model_name = ""
    subject = f"{model_name}; " if model_name else ""
    mode_suffix = f", {mode}" if mode else ""
    print(f"{cfg.stage}{mode_suffix}: {subject}{facts['hardware']}, torch {facts['torch']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        export_random_weights(cfg, hw, folder, print)
        if mode:
            bench_mode = bench_profile if mode == "profile" else bench_ladder
            work = WORK[cfg.stage](cfg, hw, folder, script_args)
            figures = bench_mode(cfg, hw, work, script_args, log_line)
        else:
            figures = STAGES[cfg.stage](cfg, hw, folder, script_args, log_line)
    command = shlex.join(["python", "bench.py", *argv])
    record = {"stage": cfg.stage, "mode": mode, "model": model_name, "command": command, "device": hw.name,
              "dtype": hw.dtype} | facts | figures
    cfg.output.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"All figures: {cfg.output}")
    if cfg.json:
        print(json.dumps(record, default=str))
    return 0


if __name__ == "__main__":
    guard.run(main)
