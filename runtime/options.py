"""The options that train.py and grpo.py share: the machine, checkpoints and logs, speed."""
from dataclasses import dataclass
from typing import Literal

from runtime.config import NonNegativeInt, PositiveInt


@dataclass
class RunOptions:
    # machine
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; weights are fp32, and
                                             # grpo.py samples in bf16 or fp32
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass: less memory, a second
                                             # forward
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"       # replicate the weights (ddp), or shard them over
                                             # all ranks (fsdp) or the ranks of a node (hybrid)
    sum_locally: bool = False                # reduce gradients only at the last micro-step (FSDP no_sync);
                                             # costs one full gradient of memory per rank
    deterministic: bool = False              # only kernels with reproducible results
    seed: NonNegativeInt = 0
    # checkpoints, logs
    save_interval: PositiveInt = 100         # steps; also after the last, at a new best, after each epoch of
                                             # examples and at a stop signal
    keep_last: PositiveInt = 2               # checkpoints, besides the best
    save_only_model: bool = False            # weights only: a third (AdamW) to a half (Muon) of the size, no
                                             # resume
    diagnose: bool = True                    # report problems of the run (docs/diagnosis.md)
    tensorboard: bool = False                # log to out_dir/tensorboard
    wandb: bool = False                      # log to Weights & Biases (project: WANDB_PROJECT, or nanorft)
    # speed: bench.py --ladder measures the gain of each
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    tf32: bool = True                        # fp32 products on tensor cores
    fused_adamw: bool = True
    keep_memory: bool = True                 # on a CPU, keep freed memory in the process to avoid page faults

    learning_rate_reason = ""                # not an option: why learning_rate has its default, see optim
