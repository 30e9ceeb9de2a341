"""The options that train.py and grpo.py share: the machine, checkpoints and logs, speed."""
from dataclasses import dataclass
from typing import Literal


@dataclass
class RunOptions:
    # machine
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; weights are fp32, and
                                             # grpo.py samples in bf16 or fp32
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass: less memory, a second
                                             # forward
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"       # each rank holds all weights (ddp) or a share of
                                             # every tensor, among all ranks (fsdp) or those of a node (hybrid)
    sum_locally: bool = False                # reduce gradients only at the last micro-step (FSDP no_sync); costs
                                             # one full gradient of memory per rank
    deterministic: bool = False              # refuse kernels whose result varies from run to run
    seed: int = 0
    # checkpoints, logs
    save_interval: int = 100                 # steps; also after the last, at a new best, after each epoch of
                                             # examples, when asked to stop
    keep_last: int = 2                       # checkpoints, beside the best
    save_only_model: bool = False            # weights alone: a third of the size, no resume
    diagnose: bool = True                    # report problems of the run (docs/diagnosis.md)
    tensorboard: bool = False                # curves in out_dir/tensorboard too
    wandb: bool = False                      # and at Weights & Biases (project: WANDB_PROJECT, or nanorft)
    # speed: bench.py --ladder measures what each of these buys
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    tf32: bool = True                        # fp32 products on tensor cores
    fused_adamw: bool = True
    keep_memory: bool = True                 # on a CPU, freed tensors' memory stays in the process: no page
                                             # faults
