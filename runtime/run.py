"""A training run: the state that an exact resume needs, and when to save and stop.

A stage contains the success path:

    run = start(cfg, hardware, model, micro_batch, num_steps, digest, step)
    with run.open(tokenizer, about):
        while run.step < run.num_steps and not run.should_stop():
            run.start_step()
            ...
            grad_norm = run.optimizer_step(lr, batch=batch)
            run.finish_step(tokens, "optimizer", log)

Failures raise. Out of memory and repeated non-finite gradients become a guard.Retry: the retry file
retry.json holds the change to make, and `restore` applies it to a checkpoint.
"""
import contextlib
import copy
import dataclasses
import math
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from layers.lora import EXTRAS, add_lora
from runtime import checkpoint, distributed, lock, memory, optim, parallel, vitals
from runtime.config import BadInput, read_sealed, seal
from runtime.guard import Failure, NonFinite, Retry, StopSignal, keep_batch
from runtime.log import Log, check_installed
from runtime.usage import one_line

# in the run folder until the next checkpoint: changed settings for the resume
RETRY_FILE = "retry.json"
# arguments of optim.lr_at, and the options that limit the number of steps
LR_OPTIONS = ("learning_rate", "min_lr", "warmup_steps", "lr_schedule", "cooldown")
LR_AND_LENGTH_OPTIONS = (*LR_OPTIONS, "max_steps", "num_epochs")
DATA_OPTIONS = ("dataset", "task", "seed", "block_size", "valid_share", "prompt", "instruction", "few_shot",
                "num_questions", "eval_questions", "eval_interval", "max_prompt_tokens")


@dataclass
class TrainState:
    """Counters of a run, saved in each checkpoint."""
    batch_size: int                          # cfg.batch_size when micro_batch was found
    micro_batch: int                         # sequences (grpo.py: tokens) of a rank
    num_steps: int                           # planned for the whole run
    step: int = 0                            # optimizer steps done (grpo.py: rollouts)
    tokens: int = 0                          # positions seen
    data: str = ""                           # digest of the training data
    seconds: float = 0.0                     # in optimizer steps
    lr_factor: float = 1.0                   # halved by a rollback
    skipped: int = 0                         # optimizer steps with non-finite gradients
    stale: int = 0                           # evaluations since the best one
    evaluation_due: bool = False             # this step is still to be evaluated, after a save at a signal
    ranks: int = field(default_factory=distributed.world_size)       # when micro_batch was found


class Run:
    """Everything a run needs to stop and resume: model and optimizers (passed in), GradScaler, counters, log.

    num_steps: of the whole run. data: digest of the training data. stage_state: dataclass instance with more
    state of the stage to save. `timings` holds the seconds of each phase of a step, see `end_phase`.
    """

    def __init__(self, cfg, hardware, model, optimizers, micro_batch, num_steps, data="", stage_state=None):
        self.cfg = cfg
        self.hardware = hardware
        self.model = model
        self.optimizers = optimizers
        self.num_steps = num_steps
        self.state = TrainState(cfg.batch_size, micro_batch, num_steps, data=data)
        self.stage_state = stage_state
        self.scaler = hardware.scaler()
        self.nonfinite = NonFinite()
        self.smaller = None                  # function: micro-batch -> next smaller one or None, see `fit`
        self.other_bytes = 0                 # device memory that the stage itself will use
        self.reset_timings()
        self.state_before = None             # plain_state() at the start of this step
        self.weights_moved = False           # in this step
        self.batch = {}                      # of the last optimizer step, saved if training diverges
        self.stopping = False                # a rank was asked to stop
        self.val_loss = None                 # of this step, if it was evaluated
        self.new_best = False
        self.evaluate = None                 # the stage's function, which calls record_validation
        self.epoch_steps = 0                 # also save every so many steps; 0: off
        self.flops_per_token = None          # of a training step, for the log of train.py

    @property
    def step(self):
        return self.state.step

    # --- the run folder ---

    def open(self, tokenizer, about, doctor=None, resuming=False, keep_base=False):
        """Write the run folder, open the log and return the run, for `with`. about: more entries of
        model.json (text.provenance). doctor: class that checks each line of metrics, with --diagnose.
        keep_base: save the initial weights even without adapters, for the reference model."""
        distributed.on_main(lambda: self.write_folder(tokenizer, about, resuming))
        cfg = self.cfg
        if not resuming and (cfg.lora_rank or keep_base):
            base = checkpoint.base_of(self.model)
            parallel.write_on_main(base.values(),
                                   lambda values: checkpoint.save_base(cfg.out_dir, base, values))
        last_step = self.step if resuming else None
        self.log = Log(cfg.out_dir, last_step, cfg, doctor if cfg.diagnose else None)
        self.report_lr(resuming)
        return self

    def report_lr(self, resuming):
        """Log a changed learning rate at the next step of a resumed run, and a warmup longer than the run."""
        cfg = dataclasses.asdict(self.cfg)
        before = checkpoint.read_meta(self.cfg.out_dir, self.step).get("config") if resuming else None
        planned = self.state.num_steps
        self.state.num_steps = self.num_steps
        if before and self.step < self.num_steps:
            old = scheduled_lr(cfg | before, self.step, planned)
            new = scheduled_lr(cfg, self.step, self.num_steps)
            if not math.isclose(old, new):
                changes = [f"{name} from {before[name]} to {cfg[name]}" for name in LR_AND_LENGTH_OPTIONS
                           if before.get(name) != cfg.get(name)]
                self.log.say(f"The learning rate of step {self.step + 1} is {new:.2e} instead of {old:.2e}, "
                             f"because of changes: {', '.join(changes) or 'the data'}.")
        if (cfg["warmup_steps"] or 0) > self.num_steps:
            peak = scheduled_lr(cfg, self.num_steps - 1, self.num_steps)
            self.log.say(f"--warmup_steps={cfg['warmup_steps']} is more than the run's {self.num_steps} "
                         f"steps: the learning rate peaks at {peak:.2e} instead of "
                         f"{cfg['learning_rate']:.2e}.")

    def log_start(self, text, facts, **settings):
        """Log the start-up paragraph; write config, settings and facts for doctor.diagnose to
        metrics.jsonl."""
        self.log.say(text)
        attention = self.hardware.attention_name(self.model.config)
        settings |= self.hardware.settings | {"ranks": distributed.world_size(), "attention": attention}
        self.log.metrics(step=self.step, config=dataclasses.asdict(self.cfg), settings=settings, facts=facts)

    def write_folder(self, tokenizer, about, resuming):
        cfg = self.cfg
        model = {
            "architecture": dataclasses.asdict(self.model.config),
            "tokenizer": tokenizer.describe(),
            "tokenizer_sha256": tokenizer.sha256,
            "lora": lora(cfg),
            **about,
            "launch": launch(),
        }
        checkpoint.open_run(cfg.out_dir, dataclasses.asdict(cfg), model, cfg.overwrite, resuming)
        if not resuming:
            tokenizer.save(cfg.out_dir)

    def __enter__(self):
        self.stop = StopSignal(self.time_to_stop, "this step")
        self.stopping = self.stop.requested()             # perhaps before a Retry
        return self

    def __exit__(self, kind, error, traceback):
        """Turn out of memory into a Retry, and log why the run ends."""
        try:
            known = error is None or isinstance(error, BadInput | Failure | Retry)
            if not known and memory.is_out_of_memory(error):
                self.retry_with_smaller_micro_batch(f"{error}".partition("\n")[0])
            # Sampling raises it on every rank.
            if isinstance(error, FloatingPointError):
                self.log.say(f"step {self.step + 1}: sampling failed because the logits are not finite.")
                self.roll_back()
        except (Failure, Retry) as e:
            error = e
            raise
        finally:
            if isinstance(error, Failure | Retry) and (error.alone or distributed.is_main()):
                self.log.append("training.log", str(error))        # guard.run prints it
            if error is not None and not isinstance(error, Retry):
                self.log.say_findings()
            self.log.close(failed=error is not None)
            self.stop.until = None           # the handler would keep the model's memory during a retry
            if not isinstance(error, Retry):              # a Retry resumes in this process
                lock.release(Path(self.cfg.out_dir) / lock.NAME)

    def fit(self, attempt, smaller, advice):
        """Return the TrainedModel; memory.fit finds the micro-batch that fits on every rank."""
        self.smaller = smaller
        model, self.state.micro_batch = memory.fit(
            self.hardware, self.state.micro_batch, attempt, smaller, advice, self.log.say)
        model.share_gradients()
        return model

    def bytes_to_come(self):
        """Return the bytes that the optimizers will allocate in their first step, plus other_bytes."""
        return optim.pending_bytes(self.optimizers) + self.other_bytes

    # --- a step ---

    def lr(self):
        """Return the learning rate of this step: the schedule's, halved after a rollback."""
        return self.state.lr_factor * scheduled_lr(vars(self.cfg), self.step, self.num_steps)

    def start_step(self):
        """Copy the state, so that a failed step can be repeated."""
        self.state_before = self.plain_state()
        logged = (self.step + 1) % self.cfg.log_interval == 0 or self.step + 1 in (1, self.num_steps)
        self.fingerprint = vitals.fingerprint(self.model) if logged else None
        self.val_loss = None
        self.new_best = False
        self.clock = time.perf_counter()

    def reset_timings(self):
        self.timings = Counter()             # {phase: seconds}, in `timed_steps` steps
        self.timed_steps = 0
        self.timed_tokens = 0

    def end_phase(self, name, wait=False):
        """Add the seconds since the last phase to timings[name]. wait: synchronize the device first."""
        if wait:
            self.hardware.wait()
        clock = time.perf_counter()
        self.timings[name] += clock - self.clock
        self.state.seconds += clock - self.clock
        self.clock = clock

    def optimizer_step(self, lr, **batch):
        """Clip the gradients and update the weights. Returns the gradient norm before clipping. A step with
        non-finite gradients is skipped. Five in a row roll back to the last checkpoint, once, with half the
        learning rate and without fp16; after that the run fails and saves `batch`."""
        self.batch = batch
        self.weights_moved = True            # also if this runs out of memory midway
        grad_norm, finite = optim.apply_step(self.optimizers, self.scaler, lr, self.cfg.grad_clip)
        verdict = self.nonfinite.after(finite, self.scaler.get_scale())
        if verdict == "ok":
            return grad_norm
        self.state.skipped += 1
        self.log.say(f"step {self.step + 1}: non-finite gradients, optimizer step skipped.")
        if verdict == "rollback":
            self.roll_back()
        if verdict == "stop":
            self.give_up()
        return grad_norm

    def finish_step(self, tokens, phase, log):
        """Count the step; log, evaluate and save if due. tokens: positions of the step, all ranks together.
        phase: name of the phase that ends here. log(): writes the step's metrics and log line."""
        self.state.step += 1
        self.weights_moved = False
        self.state.tokens += tokens
        self.timed_steps += 1
        self.timed_tokens += tokens
        self.state.evaluation_due = self.due(self.cfg.eval_interval)
        self.stopping = self.stop.requested()             # an all-reduce
        # Synchronize where the time is logged, or logging would be charged for the wait.
        self.end_phase(phase, wait=self.step % self.cfg.log_interval == 0)
        if self.due(self.cfg.log_interval) or self.step == 1:
            log()
        if self.stopping:
            self.save()                      # before the evaluation: there may be a kill soon
        if self.evaluate and self.state.evaluation_due:
            self.evaluate()
            self.stopping = self.stopping or self.stop.requested()
        self.save_if_due()

    def catch_up(self):
        """Evaluate the step of a run that was stopped before the evaluation, and save the result."""
        if self.evaluate and self.state.evaluation_due:
            self.evaluate()
            self.save()

    def time_to_stop(self):
        """Return the work that is left after a stop signal, with the rest of a step's mean time."""
        if self.state.evaluation_due:
            return "this evaluation and its checkpoint"
        if not self.step or not self.state_before:
            return "this step and its checkpoint"
        began = self.state_before["progress"]["seconds"]
        spent = self.state.seconds - began + time.perf_counter() - self.clock
        return f"this step (about {max(began / self.step - spent, 1):.0f} s) and its checkpoint"

    def due(self, interval):
        """Tell whether this step is a multiple of the interval, or the last; never with 0."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.num_steps)

    def should_stop(self):
        """Tell whether a stop was requested or the run is out of patience."""
        return self.stopping or self.out_of_patience()

    def out_of_patience(self):
        patience = getattr(self.cfg, "patience", 0)
        return patience > 0 and self.state.stale >= patience

    def moved(self):
        """Return the relative change of the last block's weights in this step, which must be a logged one;
        None if they are frozen."""
        if not any(p.requires_grad for p in self.model.blocks[-1].parameters()):
            return None
        return vitals.moved(self.fingerprint, vitals.fingerprint(self.model))

    def record_validation(self, loss):
        """Record a validation loss, and in `new_best` whether it is the best so far."""
        self.val_loss = loss
        self.state.evaluation_due = False
        best = distributed.on_main(lambda: checkpoint.best_loss(self.cfg.out_dir, self.step - 1))
        self.new_best = loss < best
        self.state.stale = 0 if self.new_best else self.state.stale + 1

    def save_if_due(self):
        """Save every save_interval steps, after the last step and each epoch of examples, at a new best and
        before an early stop."""
        evaluated_late = self.stopping and self.val_loss is not None
        ends = self.out_of_patience() or evaluated_late
        epoch_ends = self.epoch_steps and self.step % self.epoch_steps == 0
        if self.due(self.cfg.save_interval) or self.new_best or ends or epoch_ends:
            self.save()

    def end(self):
        """Log open findings and the reason of an early stop. Returns the exit code."""
        self.log.say_findings()
        if self.stopping:
            out_dir = self.cfg.out_dir
            resume = f"--init_from=resume --out_dir={out_dir}"
            how = f"--init_from={out_dir}" if self.cfg.save_only_model else resume
            self.log.say(f"Stopped as asked after step {self.step}, and saved. Resume with {how}")
            return self.stop.exit_code()
        if self.out_of_patience():
            best = checkpoint.best(self.cfg.out_dir)
            self.log.say(f"Stopped early after step {self.step}: {self.state.stale} evaluations without a "
                         f"better loss than at step {best}, whose weights are kept.")
        return 0

    # --- checkpoints ---

    def plain_state(self):
        """Copy the part of a checkpoint that is not tensors."""
        stage = {}
        if self.stage_state:
            stage = {name: copy.copy(value) for name, value in vars(self.stage_state).items()}
        return {
            "progress": dataclasses.asdict(self.state),
            "nonfinite": dataclasses.asdict(self.nonfinite),
            "stage": stage,
        }

    def save(self, plain_state=None, save_only_model=None, val_loss=None):
        """Write a checkpoint. Every rank must call. plain_state: replaces the current one."""
        cfg = self.cfg
        plain_state = plain_state or self.plain_state()
        only_model = cfg.save_only_model if save_only_model is None else save_only_model
        state = {
            "optimizer": cfg.optimizer,
            "scaler": self.scaler.state_dict(),
            "dtype": self.hardware.dtype,
        }
        state = None if only_model else state | plain_state
        moments = {} if only_model else optim.moments(self.model, self.optimizers)
        weights = checkpoint.weights_of(self.model)
        val_loss = self.val_loss if val_loss is None else val_loss

        def write(values):
            step = plain_state["progress"]["step"]
            checkpoint.save(cfg.out_dir, step, weights, state, moments, val_loss,
                            dataclasses.asdict(cfg), values)
            (Path(cfg.out_dir) / RETRY_FILE).unlink(missing_ok=True)         # now part of the checkpoint
        parallel.write_on_main([*weights.values(), *moments.values()], write)

    def restore(self, step):
        """Restore the state after `step` steps of the run in out_dir, except optimizer options given on
        resume, a smaller micro-batch and the changes in the retry file."""
        with checkpoint.loading(f"The checkpoint of step {step} in {self.cfg.out_dir}"):
            self.load(step)
        if self.step > self.num_steps:
            raise BadInput(f"The run in {self.cfg.out_dir} has done {self.step} steps, more than the "
                           f"{self.num_steps} of --max_steps or --num_epochs: raise it, or leave it out.")
        self.apply_retry_file()
        self.scaler = self.hardware.scaler()
        if self.scaler_state and self.scaler.is_enabled():
            self.scaler.load_state_dict(self.scaler_state)

    def load(self, step):
        """Load weights, optimizer and counters. Files of another run raise any kind of exception."""
        out_dir = self.cfg.out_dir
        with checkpoint.open_tensors(out_dir, step) as weights:
            load_weights(self.model, weights)
        state = checkpoint.load_state(out_dir, step)
        if state["optimizer"] != self.cfg.optimizer:
            raise BadInput(f"--optimizer={self.cfg.optimizer} can't resume from the state of "
                           f"{state['optimizer']}: leave it out.")
        with checkpoint.open_tensors(out_dir, step, "optimizer.safetensors") as moments:
            optim.load_moments(self.model, self.optimizers, moments)
        asked_for = self.state.micro_batch
        vars(self.state).update(state["progress"])
        if self.stage_state:
            vars(self.stage_state).update(state["stage"])
        shares = self.cfg.batch_size, distributed.world_size()
        if (self.state.batch_size, self.state.ranks) != shares:
            self.state.batch_size, self.state.ranks = shares
            self.state.micro_batch = asked_for
        self.state.micro_batch = min(asked_for, self.state.micro_batch)
        vars(self.nonfinite).update(state["nonfinite"])
        if self.nonfinite.rolled_back:                    # perhaps from fp16 to another dtype
            self.hardware.dtype = state["dtype"]
        self.scaler_state = state["scaler"]               # empty without fp16

    # --- recovery ---

    def read_retry_file(self):
        try:
            return read_sealed(Path(self.cfg.out_dir) / RETRY_FILE, "delete it")
        except BadInput:
            return {}

    def apply_retry_file(self):
        """Apply the changes in the retry file. Its values are absolute, so applying them twice is safe."""
        changes = self.read_retry_file()
        if "micro_batch" in changes and changes["batch_size"] == self.cfg.batch_size:
            self.state.micro_batch = min(self.state.micro_batch, changes["micro_batch"])
        if "lr_factor" in changes:
            self.state.lr_factor = changes["lr_factor"]
            self.nonfinite.rolled_back = True
            self.hardware.dtype = changes["dtype"]

    def retry(self, sentence, alone=False, **changes):
        """Write the changes to the retry file and raise Retry."""
        if alone or distributed.is_main():
            # Keep earlier changes that are not yet part of a checkpoint.
            changes = self.read_retry_file() | {"batch_size": self.cfg.batch_size} | changes
            checkpoint.write_atomically(Path(self.cfg.out_dir) / RETRY_FILE, seal(changes))
        raise Retry(sentence, self.cfg.out_dir, alone)

    def retry_with_smaller_micro_batch(self, reason):
        """Raise Retry after running out of memory: from the start of this step if that can be saved, else
        from the last checkpoint. Failure without a checkpoint or a smaller micro-batch."""
        cfg = self.cfg
        step = self.step + 1
        micro_batch = self.state.micro_batch
        if not self.smaller:                 # `fit` was not called yet
            return
        less = self.smaller(micro_batch)
        if less is None:
            raise Failure(f"Step {step} ran out of memory with a micro-batch of one sequence ({reason}): "
                          "resume with --gradient_checkpointing, or on a machine with more free memory.")
        if distributed.world_size() == 1 and not self.weights_moved:
            self.save_start_of_step()
            self.retry(f"Step {step} ran out of memory ({reason}): repeating it with micro-batch {less} "
                       f"instead of {micro_batch}.", micro_batch=less)
        problem = f"Rank {distributed.rank()} ran out of memory at step {step} ({reason})"
        newest = checkpoint.newest_intact(cfg.out_dir, self.log.say)
        if newest is None:
            raise Failure(f"{problem}, before the first checkpoint: start again with --overwrite "
                          f"{cfg.flags_for(less)}, which keeps the effective batch.")
        if not checkpoint.has_state(cfg.out_dir, newest):
            raise Failure(f"{problem}, and --save_only_model left no state to resume from: start a new run "
                          f"with --init_from={cfg.out_dir} {cfg.flags_for(less)} and another --out_dir=.")
        if distributed.world_size() == 1:
            self.retry(f"Step {step} ran out of memory ({reason}) after weights had changed: resuming from "
                       f"the last checkpoint with micro-batch {less} instead of {micro_batch}.",
                       micro_batch=less)
        self.retry(f"{problem}: resume with --init_from=resume --out_dir={cfg.out_dir}, from the last "
                   f"checkpoint and with micro-batch {less} instead of {micro_batch}.", alone=True,
                   micro_batch=less)

    def save_start_of_step(self):
        """Save the state at the start of this step, even with save_only_model, unless it has a checkpoint."""
        out_dir = self.cfg.out_dir
        if not self.state_before or self.state_before["progress"]["step"] != self.step:
            self.state_before = self.plain_state()        # the step itself was complete
        if checkpoint.damage(out_dir, self.step) or not checkpoint.has_state(out_dir, self.step):
            val_loss = checkpoint.read_meta(out_dir, self.step).get("val_loss")
            self.save(self.state_before, save_only_model=False, val_loss=val_loss)

    def roll_back(self):
        """Raise Retry from the newest checkpoint with half the learning rate and without fp16. Failure
        without a checkpoint, or the second time."""
        out_dir = self.cfg.out_dir
        step = distributed.on_main(lambda: checkpoint.newest_intact(out_dir, self.log.say))
        if step is None or not checkpoint.has_state(out_dir, step) or self.state.lr_factor < 1:
            self.give_up()
        dtype = self.hardware.dtype
        if dtype == "fp16":
            bf16 = self.hardware.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8
            dtype = "bf16" if bf16 else "fp32"
        self.retry(f"Rolling back to the checkpoint of step {step}, once, with half the learning rate and "
                   f"{dtype}.", lr_factor=self.state.lr_factor / 2, dtype=dtype)

    def give_up(self):
        """Save the last batch and raise Failure."""
        path = keep_batch(self.cfg.out_dir, self.step + 1, **self.batch)
        raise Failure(f"Training diverged (non-finite logits, or {self.nonfinite.patience} steps in a row "
                      "with non-finite gradients) and there is no checkpoint left to roll back to: lower "
                      f"--learning_rate; the last batch is in {path}.", alone=False)


def start(cfg, hardware, model, micro_batch, num_steps, digest, step=None, stage_state=None):
    """Shard the model if asked, build its optimizers and return the Run, restored from the checkpoint of
    `step` if given. model: a GPT on parallel.building_device. digest: of the training data; BadInput if it is
    not the checkpoint's. stage_state: see Run."""
    if cfg.learning_rate is None:
        cfg.learning_rate, cfg.learning_rate_reason = optim.default_learning_rate(cfg, model.n_params())
        check_min_lr(cfg)
    model = parallel.shard(model, hardware, cfg.parallel, cfg.sum_locally, cfg.compile_mode)
    betas = (cfg.beta1, cfg.beta2)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, betas,
                             cfg.fused_adamw, cfg.muon_momentum, hardware)
    run = Run(cfg, hardware, model, optimizers, micro_batch, num_steps, digest, stage_state)
    if step is not None:
        run.restore(step)
        if run.state.data != digest:
            before = checkpoint.read_meta(cfg.out_dir, step).get("config", {})
            flags = [f"--{name}={getattr(cfg, name)}" for name in DATA_OPTIONS
                     if name in before and before[name] != getattr(cfg, name)]
            changed = cfg.dataset or "The list of questions"
            problem = f"{changed} has changed since the run in {cfg.out_dir} was stopped: restore it to resume"
            if flags:
                problem = f"{' with '.join(flags)} changes the data of the run in {cfg.out_dir}: leave it out"
            raise BadInput(f"{problem}, or start a new run with --init_from={cfg.out_dir} and another "
                           "--out_dir=.")
    return run


def load_weights(model, weights):
    """Copy {name: tensor or slice} of a checkpoint into a model. ValueError for weights of another model."""
    own = checkpoint.weights_of(model)
    if wrong := sorted(own.keys() ^ weights.keys()):
        raise ValueError(f"{wrong[0]} is missing or unexpected")
    for name, tensor in own.items():
        parallel.fill(tensor, weights[name], name)


def scheduled_lr(options, step, num_steps):
    return optim.lr_at(step, num_steps, *(options[name] for name in LR_OPTIONS))


# --- options of train.py and grpo.py ---

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


def claim(out_dir):
    """Lock a run folder. Returns "nothing" if there is no run, "run", or "restarted" for a run that this same
    torchrun started. Every rank must call."""
    def take():
        if not (Path(out_dir) / "config.json").exists():
            return "nothing"
        checkpoint.check_kinds(out_dir)
        lock.take(Path(out_dir) / lock.NAME, out_dir)
        checkpoint.tidy(out_dir)
        try:
            began = checkpoint.read_model(out_dir).get("launch")
        except BadInput:                                      # raised again where the file is needed
            began = None
        return "restarted" if began and began == launch() else "run"
    return distributed.on_main(take)


def launch():
    """Return an identifier of this torchrun, None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    began = None
    with contextlib.suppress(OSError):       # a container's torchrun always has the same number: its start too
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return [os.environ["TORCHELASTIC_RUN_ID"], socket.gethostname(), parent, began]


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
    if cfg.learning_rate is not None:
        check_min_lr(cfg)
    for option in ("lora_alpha", "lora_linears"):
        if not cfg.lora_rank and getattr(cfg, option) != getattr(type(cfg), option):
            raise BadInput(f"--{option}={getattr(cfg, option)} needs adapters: add --lora_rank=, or leave it "
                           "out.")
    check_installed(cfg.tensorboard, cfg.wandb)


def check_min_lr(cfg):
    if cfg.min_lr > cfg.learning_rate:
        raise BadInput(f"--min_lr={cfg.min_lr:g} is above --learning_rate={cfg.learning_rate:g}: lower it.")


def adapt(cfg, model, device, resuming):
    """Add cfg's adapters to the model and, in a resumed run, load the frozen base weights."""
    if not cfg.lora_rank:
        return
    if resuming and device.type != "meta":
        with checkpoint.loading(f"base.safetensors in {cfg.out_dir}"):
            extras = {name: w for name, w in model.state_dict().items() if name.startswith(EXTRAS)}
            model.load_state_dict(checkpoint.load_base(cfg.out_dir, device) | extras)
    try:
        add_lora(model, **lora(cfg))
    except ValueError as e:
        raise BadInput(str(e)) from None
