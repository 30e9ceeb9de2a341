"""A training run: its folder and log, the steps, and when to evaluate, save and stop.

A stage contains the success path:

    run = start(cfg, hardware, model, progress, step)
    with run.open(tokenizer, about):
        while run.step < run.num_steps and not run.should_stop():
            run.start_step()
            ...
            grad_norm = run.optimizer_step(lr, batch=batch)
            run.finish_step(tokens, "optimizer", log, evaluate)

Failures raise: see runtime.recovery.
"""
import dataclasses
import math
import shlex
import time
from collections import Counter
from pathlib import Path

import torch

from layers.lora import fingerprint
from runtime import checkpoint, distributed, lock, memory, optim, parallel, recovery
from runtime.config import NOT_INHERITED, BadInput
from runtime.guard import Failure, Retry, StopSignal
from runtime.log import Log
from runtime.options import check_min_lr, lora
from runtime.state import RunState

# arguments of optim.lr_at, and the options that limit the number of steps
LR_OPTIONS = ("learning_rate", "min_lr", "warmup_steps", "lr_schedule", "cooldown")
LR_AND_LENGTH_OPTIONS = (*LR_OPTIONS, "max_steps", "num_epochs")
DATA_OPTIONS = ("dataset", "task", "seed", "block_size", "valid_share", "prompt", "instruction", "few_shot",
                "num_questions", "eval_questions", "eval_interval", "max_prompt_tokens")


class Run(RunState):
    """A run's state, log and loop. epoch_steps: also save every so many steps; 0: off. timings: the seconds
    of each phase of a step, see end_phase."""

    def __init__(self, *state, epoch_steps=0):
        """state: arguments of RunState."""
        super().__init__(*state)
        self.epoch_steps = epoch_steps
        self.before = {}                     # {file of the run folder: its content before `open`, or None}
        self.log = None                      # until `open`, and so `stop`
        self.stop = None
        self.stopping = False                # a rank was asked to stop
        self.new_best = False                # whether this step's evaluation was the best so far
        self.fingerprint = None              # of the weights before this step, if it is logged
        self.clock = 0.0                     # end of the last phase
        self.reset_timings()
        # for recovery
        self.sizes = []                      # micro-batches to try, largest first; set by memory.fit
        self.counters_before = None          # counters() at the start of this step
        self.weights_moved = False           # in this step
        self.batch = {}                      # of the last optimizer step, saved if training diverges

    # --- the run folder and its log ---

    def open(self, tokenizer, about, doctor=None, resuming=False, keep_base=False):
        """Write the run folder, open the log and return the run, for `with`. about: more entries of
        model.json (text.provenance). doctor: class that checks each line of metrics, with --diagnose.
        keep_base: save the initial weights even without adapters, for the reference model."""
        cfg = self.cfg
        distributed.on_main(lambda: self.write_folder(tokenizer, about, resuming))
        if not resuming and (cfg.lora_rank or keep_base):
            base = checkpoint.base_of(self.model)
            parallel.write_on_main(base.values(),
                                   lambda values: checkpoint.save_base(cfg.out_dir, base, values))
        try:
            step = self.step if resuming else None
            self.log = Log(cfg.out_dir, step, cfg, doctor if cfg.diagnose else None)
        except BadInput:                     # __exit__ is not called yet
            self.restore_identity()
            raise
        for sentence in remarks_on_lr(self, resuming):
            self.log.say(sentence)
        return self

    def write_folder(self, tokenizer, about, resuming):
        cfg = self.cfg
        model = {
            "architecture": dataclasses.asdict(self.model.config),
            "tokenizer": tokenizer.describe(),
            "tokenizer_sha256": tokenizer.sha256,
            "lora": lora(cfg),
            **about,
            "launch": checkpoint.launch(),
        }
        for name in checkpoint.IDENTITY_FILES if resuming else ["config.json", "metrics.jsonl"]:
            path = Path(cfg.out_dir, name)
            self.before[path] = path.read_bytes() if resuming and path.exists() else None
        checkpoint.open_run(cfg.out_dir, dataclasses.asdict(cfg), model, cfg.overwrite, resuming)
        if not resuming:
            tokenizer.save(cfg.out_dir)

    def restore_identity(self):
        """Restore config.json, model.json and metrics.jsonl as they were before a start that was refused."""
        for path, content in self.before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                checkpoint.write_atomically(path, content)

    def log_start(self, text, facts, **settings):
        """Log the start-up paragraph; write config, settings and facts for the doctor to metrics.jsonl."""
        self.log.say(text)
        attention = self.hardware.attention_name(self.model.config)
        settings |= self.hardware.settings | {"ranks": distributed.world_size(), "attention": attention}
        self.log.metrics(step=self.step, config=dataclasses.asdict(self.cfg), settings=settings, facts=facts)

    def __enter__(self):
        self.stop = StopSignal(self.time_to_stop, "this step")
        self.stopping = self.stop.requested()             # perhaps before a Retry
        return self

    def __exit__(self, kind, error, traceback):
        """Turn out of memory and failed sampling into a Retry, and log why the run ends."""
        try:
            known = error is None or isinstance(error, BadInput | Failure | Retry)
            if not known and memory.is_out_of_memory(error):
                recovery.after_out_of_memory(self, f"{error}".partition("\n")[0])
            # Sampling raises it on every rank.
            if isinstance(error, FloatingPointError):
                self.log.say(f"step {self.step + 1}: sampling failed because the logits are not finite.")
                recovery.roll_back(self)
        except (Failure, Retry) as e:
            error = e
            raise
        finally:
            if isinstance(error, Failure | Retry) and (error.alone or distributed.is_main()):
                self.log.append("training.log", str(error))        # guard.run prints it
            if error is not None and not isinstance(error, Retry):
                self.log.say_findings()
            if isinstance(error, BadInput) and self.counters_before is None:
                self.restore_identity()      # else a resume would take the options that were refused
            self.log.close(failed=error is not None)
            self.stop.until = None           # the handler would keep the model's memory during a retry
            if not isinstance(error, Retry):              # a Retry resumes in this process
                lock.release(Path(self.cfg.out_dir) / lock.NAME)

    # --- a step ---

    def lr(self):
        """Return the learning rate of this step: the schedule's, halved after a rollback."""
        return self.state.lr_factor * scheduled_lr(vars(self.cfg), self.step, self.num_steps)

    def start_step(self):
        """Copy the counters, so that a failed step can be repeated."""
        self.counters_before = self.counters()
        logged = (self.step + 1) % self.cfg.log_interval == 0 or self.step + 1 in (1, self.num_steps)
        self.fingerprint = fingerprint(self.model) if logged else None
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
        """Clip the gradients and update the weights. Returns the gradient norm before clipping. With
        non-finite gradients the weights stay, see recovery.after_step. batch: saved if training diverges."""
        self.batch = batch
        self.weights_moved = True            # also if this runs out of memory midway
        grad_norm, finite = optim.apply_step(self.optimizers, self.scaler, lr, self.cfg.grad_clip)
        recovery.after_step(self, finite)
        return grad_norm

    def finish_step(self, tokens, phase, log, evaluate=None):
        """Count the step; log, evaluate and save if due. tokens: positions of the step, all ranks together.
        phase: name of the phase that ends here. log(): writes the step's metrics and log line. evaluate():
        calls record_validation."""
        self.state.step += 1
        self.weights_moved = False
        self.state.tokens += tokens
        self.timed_steps += 1
        self.timed_tokens += tokens
        self.state.evaluation_due = evaluate is not None and self.due(self.cfg.eval_interval)
        self.stopping = self.stop.requested()             # an all-reduce
        # Synchronize where the time is logged, or logging would be charged for the wait.
        self.end_phase(phase, wait=self.step % self.cfg.log_interval == 0)
        if self.due(self.cfg.log_interval) or self.step == 1:
            log()
        if self.stopping:
            self.save()                      # before the evaluation: there may be a kill soon
        if evaluate and self.state.evaluation_due:
            evaluate()
            self.stopping = self.stopping or self.stop.requested()
        evaluated_late = self.stopping and self.val_loss is not None
        due = self.due(self.cfg.save_interval) or self.epoch_steps and self.step % self.epoch_steps == 0
        failing = self.nonfinite.in_a_row and self.step < self.num_steps     # a rollback needs older weights
        if due and not failing or self.new_best or evaluated_late or self.out_of_patience():
            self.save()

    def catch_up(self, evaluate):
        """Evaluate the step of a run that was stopped before the evaluation, and save the result."""
        if evaluate and self.state.evaluation_due:
            evaluate()
            self.save()

    def record_validation(self, loss):
        """Record a validation loss, and in `new_best` whether it is the best so far."""
        self.val_loss = loss
        self.state.evaluation_due = False
        before = distributed.on_main(lambda: checkpoint.losses(self.cfg.out_dir, self.step - 1))
        self.new_best = loss < min(before.values(), default=math.inf)
        self.state.stale = 0 if self.new_best else self.state.stale + 1

    def moved(self, after, dtype=torch.float32):
        """Return the relative change of the last block's weights in this step, which must be a logged one;
        None if they are frozen. after: their fingerprint now, in dtype."""
        if not any(p.requires_grad for p in self.model.blocks[-1].parameters()):
            return None
        before = self.fingerprint.to(dtype).float()
        return ((after - before).norm() / before.norm().clamp(min=1e-30)).item()

    def due(self, interval):
        """Tell whether this step is a multiple of the interval, or the last; never with 0."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.num_steps)

    # --- the end ---

    def time_to_stop(self):
        """Return the work that is left after a stop signal, with the rest of a step's mean time."""
        if self.state.evaluation_due:
            return "this evaluation and its checkpoint"
        if not self.step or not self.counters_before:
            return "this step and its checkpoint"
        began = self.counters_before["progress"]["seconds"]
        spent = self.state.seconds - began + time.perf_counter() - self.clock
        return f"this step (about {max(began / self.step - spent, 1):.0f} s) and its checkpoint"

    def should_stop(self):
        """Tell whether a stop was requested or the run is out of patience."""
        return self.stopping or self.out_of_patience()

    def out_of_patience(self):
        patience = getattr(self.cfg, "patience", 0)
        return patience > 0 and self.state.stale >= patience

    def end(self):
        """Log open findings and the reason of an early stop. Returns the exit code."""
        self.log.say_findings()
        if self.stopping:
            out_dir = self.cfg.out_dir
            how = f"Resume with --init_from=resume --out_dir={shlex.quote(out_dir)}"
            if self.cfg.save_only_model:
                how = f"To go on, {checkpoint.new_run(out_dir)}"
            self.log.say(f"Stopped as asked after step {self.step}, and saved. {how}")
            return self.stop.exit_code()
        if self.out_of_patience():
            best = checkpoint.best(self.cfg.out_dir)
            self.log.say(f"Stopped early after step {self.step}: {self.state.stale} evaluations without a "
                         f"better loss than at step {best}, whose weights are kept.")
        return 0


def start(cfg, hardware, model, progress, step=None, stage_state=None, epoch_steps=0):
    """Shard the model if asked, build its optimizers and return the Run, restored from the checkpoint of
    `step` if given. model: a GPT on parallel.building_device. progress: state.Progress of a new run;
    BadInput if its digest of the data is not the checkpoint's. The others: see Run."""
    if cfg.learning_rate is None:
        cfg.learning_rate, cfg.learning_rate_reason = optim.default_learning_rate(cfg, model.n_params())
        check_min_lr(cfg)
    if parallel.shards(cfg.parallel):
        from runtime import fsdp             # torch.distributed.fsdp takes half a second
        model = fsdp.shard(model, hardware, cfg.parallel, cfg.sum_locally, cfg.compile_mode)
    betas = (cfg.beta1, cfg.beta2)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, betas,
                             cfg.fused_adamw, cfg.muon_momentum, hardware)
    run = Run(cfg, hardware, model, optimizers, progress, stage_state, epoch_steps=epoch_steps)
    if step is not None:
        digest = progress.data
        run.restore(step, recovery.read_retry_file(cfg.out_dir))
        if run.state.data != digest:
            raise changed_data(cfg, step)
    return run


def changed_data(cfg, step):
    """Return the BadInput for a resume on other data than those of the checkpoint of `step`."""
    before = checkpoint.read_meta(cfg.out_dir, step).get("config", {})
    differing = [name for name in before if name in vars(cfg) and before[name] != getattr(cfg, name)]
    flags = [f"--{name}={getattr(cfg, name)}" for name in differing if name in DATA_OPTIONS]
    # An option that is new to the code may select data too.
    others = [f"--{name}={getattr(cfg, name)}" for name in differing
              if name not in (*NOT_INHERITED, *LR_AND_LENGTH_OPTIONS)]
    changed = cfg.dataset or "The list of questions"
    or_option = f" (or {' or '.join(others)} selects other data: leave it out)" if others else ""
    problem = (f"{changed} has changed since the run in {cfg.out_dir} was stopped{or_option}: restore it to "
               "resume")
    if flags:
        problem = f"{' with '.join(flags)} changes the data of the run in {cfg.out_dir}: leave it out"
    return BadInput(f"{problem}, or {checkpoint.new_run(cfg.out_dir)}.")


def scheduled_lr(options, step, num_steps):
    return optim.lr_at(step, num_steps, *(options[name] for name in LR_OPTIONS))


def remarks_on_lr(run, resuming):
    """Yield sentences on another learning rate of a resumed run's next step, and a warmup longer than the
    run."""
    cfg = dataclasses.asdict(run.cfg)
    before = checkpoint.read_meta(run.cfg.out_dir, run.step).get("config") if resuming else None
    if before and run.step < run.num_steps:
        planned = checkpoint.load_state(run.cfg.out_dir, run.step)["progress"]["num_steps"]
        old = scheduled_lr(cfg | before, run.step, planned)
        new = scheduled_lr(cfg, run.step, run.num_steps)
        if not math.isclose(old, new):
            changes = [f"{name} from {before[name]} to {cfg[name]}" for name in LR_AND_LENGTH_OPTIONS
                       if before.get(name) != cfg.get(name)]
            yield (f"The learning rate of step {run.step + 1} is {new:.2e} instead of {old:.2e}, because of "
                   f"changes: {', '.join(changes) or 'the data'}.")
    if (cfg["warmup_steps"] or 0) > run.num_steps:
        peak = scheduled_lr(cfg, run.num_steps - 1, run.num_steps)
        yield (f"--warmup_steps={cfg['warmup_steps']} is more than the run's {run.num_steps} steps: the "
               f"learning rate peaks at {peak:.2e} instead of {cfg['learning_rate']:.2e}.")
