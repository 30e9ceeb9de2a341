"""The options that train.py and grpo.py share: optimizer, adapters, machine, checkpoints and logs, speed."""
import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

from runtime import distributed
from runtime.config import (BadInput, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt,
                            UnitInterval)
from runtime.log import check_installed
from runtime.usage import one_line

LORA = ["lora_rank", "lora_alpha", "lora_linears"]


@dataclass
class RunOptions:
    # the run
    resume: Literal["auto"] | None = None    # auto: resume the run in out_dir, or start it
    overwrite: bool = False                  # replace the run in out_dir
    # optimizer
    cooldown: UnitInterval = 0.4             # of wsd: fraction of steps in which the rate decays
    min_lr: NonNegativeFloat = 0.0           # learning rate at the end of the schedule
    weight_decay: NonNegativeFloat = 0.0     # of matrices; other parameters have none
    beta1: Fraction = 0.9                    # AdamW's average of gradients
    beta2: Fraction = 0.95                   # AdamW's average of squared gradients
    muon_momentum: Fraction = 0.9            # Muon's average of gradients
    grad_clip: NonNegativeFloat = 1.0        # largest global gradient norm; 0: no limit
    # adapters (LoRA)
    lora_rank: NonNegativeInt = 0            # e.g. 16: train adapters of this rank on the frozen weights of
                                             # init_from, which are then grpo.py's reference model; 0: off
    lora_alpha: PositiveFloat | None = None  # adapters' scale is alpha / rank; None: 2 lora_rank
    lora_linears: str = "qkv,out,up,gate,down"       # linear layers of a block that get an adapter
    # machine
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; the weights are fp32
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass, which saves memory
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"       # replicate the weights (ddp), or shard them over
                                             # all ranks (fsdp) or the ranks of a node (hybrid)
    sum_locally: bool = False                # reduce gradients only at the last micro-step (FSDP no_sync);
                                             # costs one full gradient of memory per rank
    deterministic: bool = False              # only kernels with reproducible results
    seed: NonNegativeInt = 0                 # of initial weights, batches and samples
    # evaluation, log, checkpoints
    save_interval: PositiveInt = 100         # steps from checkpoint to checkpoint; also after the last step,
                                             # at a new best, after each epoch of examples and at a stop
    keep_last: PositiveInt = 2               # newest checkpoints that are kept, besides the best
    save_only_model: bool = False            # weights only: a third to a half of the size, but no resume
    diagnose: bool = True                    # report problems of the run (docs/diagnosis.md)
    tensorboard: bool = False                # log to out_dir/tensorboard
    wandb: bool = False                      # log to Weights & Biases
    wandb_project: str | None = None         # None: the variable WANDB_PROJECT, or nanorft
    wandb_name: str | None = None            # name of the run there; None: the folder of out_dir
    # speed: bench.py --stage=... --ladder measures the gain of most
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"  # kernel
    compile_mode: Literal["default", "reduce-overhead", "max-autotune",
                          "max-autotune-no-cudagraphs"] = "default"        # of torch.compile
    tf32: bool = True                        # TF32 for fp32 products on tensor cores
    fused_adamw: bool = True                 # AdamW's update in one kernel
    keep_memory: bool = True                 # on a CPU, keep freed memory in the process to avoid page faults

    learning_rate_reason = ""                # not an option: why learning_rate has its default, see optim


def non_default_options(cfg, inherited=()):
    """Describe the options that differ from their defaults, without those inherited from init_from."""
    changed = []
    if cfg.learning_rate_reason:
        inherited = [*inherited, "learning_rate"]
    for name, value in dataclasses.asdict(cfg).items():
        if value != getattr(type(cfg), name) and name not in inherited:
            changed.append(one_line(f"{name}={value}"))
    return ", ".join(changed) or "-"


def rate_shown(cfg):
    """Return the learning rate for the start-up paragraph, with the reason of a default."""
    reason = f" ({cfg.learning_rate_reason})" if cfg.learning_rate_reason else ""
    return f"learning rate {cfg.learning_rate:g}{reason}"


def lora(cfg):
    """Return the arguments of layers.lora.add_lora, None without adapters."""
    if not cfg.lora_rank:
        return None
    return {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "linears": cfg.lora_linears.split(",")}


def check_training(cfg):
    """Raise BadInput for conflicting options that train.py and grpo.py share, or a missing package."""
    out_dir = os.path.realpath(cfg.out_dir)
    if cfg.init_from not in ("scratch", "resume") and out_dir == os.path.realpath(cfg.init_from):
        raise BadInput(f"{cfg.out_dir} is both --out_dir and --init_from: choose another --out_dir=, or "
                       "resume the run with --init_from=resume.")
    if cfg.teacher and out_dir == os.path.realpath(cfg.teacher):
        raise BadInput(f"{cfg.out_dir} is both --out_dir and --teacher: choose another --out_dir=.")
    if cfg.sum_locally and cfg.parallel == "ddp":
        raise BadInput("--sum_locally is for sharded weights, since DDP reduces gradients once a step "
                       "anyway: set --parallel=fsdp or hybrid, or leave it out.")
    if cfg.parallel == "hybrid" and distributed.world_size() % distributed.local_world_size():
        raise BadInput("--parallel=hybrid needs the same number of ranks on each node: change torchrun's "
                       "--nproc_per_node.")
    if cfg.parallel != "ddp" and cfg.compile_mode in distributed.CUDA_GRAPHS:
        raise BadInput(f"--compile_mode={cfg.compile_mode} uses CUDA graphs, which don't work with sharded "
                       "weights: use default or max-autotune-no-cudagraphs.")
    if cfg.learning_rate is not None:
        check_min_lr(cfg)
    check_needs(cfg, {
        "--lora_rank": (cfg.lora_rank, LORA[1:]),
        "--wandb": (cfg.wandb, ["wandb_project", "wandb_name"]),
        "--compile": (cfg.compile is not False, ["compile_mode"]),
    })
    check_installed(cfg.tensorboard, cfg.wandb)


def check_needs(cfg, needs):
    """Raise BadInput for an option that has no effect, unless it is a resumed run's. needs: {the option that
    it needs: (whether that is set, names of such options)}."""
    if cfg.init_from == "resume":
        return
    for needed, (is_set, names) in needs.items():
        for name in () if is_set else names:
            value = getattr(cfg, name)
            if value != getattr(type(cfg), name):
                raise BadInput(f"--{name}={value} has no effect without {needed}: add that, or leave "
                               f"--{name} out.")


def check_min_lr(cfg):
    if cfg.min_lr > cfg.learning_rate:
        raise BadInput(f"--min_lr={cfg.min_lr:g} is above --learning_rate={cfg.learning_rate:g}: lower it.")
