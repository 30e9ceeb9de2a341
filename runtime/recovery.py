"""Recovery from a failed step: out of memory and repeated non-finite gradients raise a guard.Retry, whose
change is in the retry file; guard.run, or the next start, resumes with it."""
import os
import shlex
from pathlib import Path

import torch

from runtime import checkpoint, distributed
from runtime.config import BadInput, read_sealed, seal
from runtime.guard import Failure, Retry

RETRY_FILE = "retry.json"                    # in the run folder until the next checkpoint


def read_retry_file(out_dir):
    """Return the changes for a resume, {} without any."""
    try:
        return read_sealed(Path(out_dir) / RETRY_FILE, "delete it")
    except BadInput:
        return {}


def retry(run, sentence, alone=False, **changes):
    """Write the changes to the retry file and raise Retry."""
    out_dir = run.cfg.out_dir
    if alone or distributed.is_main():
        # Keep earlier changes that are not yet part of a checkpoint.
        changes = read_retry_file(out_dir) | {"batch_size": run.state.batch_size} | changes
        checkpoint.write_atomically(Path(out_dir) / RETRY_FILE, seal(changes))
    raise Retry(sentence, out_dir, alone)


def after_out_of_memory(run, reason):
    """Raise Retry with a smaller micro-batch: from the start of this step if that can be saved, else from the
    last checkpoint. Failure without a checkpoint or a smaller micro-batch; return if no micro-batch was tried
    yet."""
    if not run.sizes:
        return
    cfg = run.cfg
    several = distributed.world_size() > 1
    less = next((size for size in run.sizes if size < run.state.micro_batch), None)
    name = f"step {run.step + 1}"
    if run.state.evaluation_due:
        name = f"the evaluation after step {run.step}"
    elif run.counters_before is None:
        name = f"the start before {name}"
    problem = f"{name[0].upper()}{name[1:]} ran out of memory ({reason})"
    how = " after weights had changed: resuming"
    if several:
        problem = f"Rank {distributed.rank()} ran out of memory at {name} ({reason})"
        how = f": resume with --init_from=resume --out_dir={shlex.quote(cfg.out_dir)}"
    remedy = f"with micro-batch {less} instead of {run.state.micro_batch}."
    if less is None:
        raise Failure(f"{problem}, with a micro-batch of one sequence: resume with --gradient_checkpointing, "
                      "or on a machine with more free memory.")
    if not several and not run.weights_moved:
        save_start_of_step(run)
        retry(run, f"{problem}: repeating it {remedy}", micro_batch=less)
    newest = checkpoint.newest_intact(cfg.out_dir, run.log.say)
    if newest is None:
        raise Failure(f"{problem}, before the first checkpoint: start again with --overwrite "
                      f"{cfg.flags_for(less)}, which keeps the effective batch.")
    if not checkpoint.has_state(cfg.out_dir, newest):
        raise Failure(f"{problem}, and --save_only_model left no state to resume from: "
                      f"{checkpoint.new_run(cfg.out_dir)} {cfg.flags_for(less)}.")
    retry(run, f"{problem}{how} from the last checkpoint {remedy}", alone=several, micro_batch=less)


def save_start_of_step(run):
    """Save the state at the start of this step, even with save_only_model, unless it has a checkpoint."""
    out_dir = run.cfg.out_dir
    before = run.counters_before
    if not before or before["progress"]["step"] != run.step:
        before = run.counters()              # the step itself was complete
    if checkpoint.damage(out_dir, run.step) or not checkpoint.has_state(out_dir, run.step):
        val_loss = checkpoint.read_meta(out_dir, run.step).get("val_loss")
        run.write(before, only_model=False, val_loss=run.val_loss if val_loss is None else val_loss)


def after_step(run, finite):
    """Count a step with non-finite gradients, which the optimizers skipped. Five in a row roll back, once;
    after that the run fails. fp16 overflows do not count while GradScaler can still lower its scale."""
    count = run.nonfinite
    if finite:
        count.in_a_row = 0
        return
    run.state.skipped += 1
    run.log.say(f"step {run.step + 1}: non-finite gradients, optimizer step skipped.")
    if run.scaler.get_scale() > 1:
        return
    count.in_a_row += 1
    if count.in_a_row == count.patience:
        roll_back(run)


def roll_back(run):
    """Raise Retry from the newest checkpoint with half the learning rate and without fp16. Without a
    checkpoint, or the second time, save the last batch and raise Failure."""
    out_dir = run.cfg.out_dir
    step = distributed.on_main(lambda: checkpoint.newest_intact(out_dir, run.log.say))
    if step is None or not checkpoint.has_state(out_dir, step) or run.nonfinite.rolled_back:
        path = os.path.join(out_dir, f"bad_batch_step_{run.step + 1}_rank_{distributed.rank()}.pt")
        torch.save(run.batch, path)
        raise Failure(f"Training diverged (non-finite logits, or {run.nonfinite.patience} steps in a row "
                      "with non-finite gradients) and there is no checkpoint left to roll back to: lower "
                      f"--learning_rate; the last batch is in {path}.", alone=False)
    dtype = run.hardware.dtype
    if dtype == "fp16":
        bf16 = run.hardware.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8
        dtype = "bf16" if bf16 else "fp32"
    retry(run, f"Rolling back to the checkpoint of step {step}, once, with half the learning rate and "
               f"{dtype}.", lr_factor=run.state.lr_factor / 2, dtype=dtype)
