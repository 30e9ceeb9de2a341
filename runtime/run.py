"""A training run: what must be found again in order to go on as if it had never stopped, and when to save and
to stop.

A stage says what happens when nothing goes wrong:

    run = Run(cfg, hardware, model, optimizers, micro_batch, digest)
    if resuming:
        run.restore(step)
    with run.open(tokenizer, resuming):
        while run.step < num_steps and not run.should_stop():
            run.start_step()
            ...
            grad_norm = run.optimizer_step(lr, batch=batch)
            run.finish_step(tokens)
            ...
            run.save_if_due()

What goes wrong raises. Out of memory, and gradients that stay without finite values, become a guard.Retry:
there is a checkpoint to go back to, the note retry.json says what is to be different, and `restore` reads it.
"""
import copy
import dataclasses
import math
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import tasks
from layers.lora import adapters, add_lora
from runtime import checkpoint, distributed, lock, memory, optim, parallel, vitals
from runtime.config import BadInput, read_sealed, seal
from runtime.guard import Failure, NonFinite, Retry, StopSignal, keep_batch
from runtime.hardware import DTYPES
from runtime.log import Log
from runtime.usage import one_line
from text import examples

# in the run folder, until the next checkpoint: what is to be different
NOTE = "retry.json"
# what the learning rate depends on: what optim.lr_at is given, and the number of steps
RATE = ("learning_rate", "min_lr", "warmup_steps", "lr_schedule", "cooldown", "max_steps", "num_epochs")


@dataclass
class TrainState:
    """The plain numbers of a run's state."""
    batch_size: int                          # the config's, for which micro_batch was found
    micro_batch: int                         # sequences (grpo.py: tokens) of a micro-step, as many as fit
    step: int = 0                            # optimizer steps done (grpo.py: rollouts)
    num_steps: int = 0                       # of the whole run, as it was planned; 0: not noted, in old runs
    tokens: int = 0                          # positions seen in them
    data: str = ""                           # digest of the examples, or questions, that are trained on
    seconds: float = 0.0                     # in optimizer steps
    lr_factor: float = 1.0                   # halved by a roll-back
    skipped: int = 0                         # optimizer steps whose gradients were not finite
    stale: int = 0                           # evaluations since the best
    evaluation_due: bool = False             # of this step: what is saved at a signal is saved before it


class Run:
    """Model, optimizers, loss scale (`scaler`), `state` and the log of a run; the first two are given, and
    changed in place.

    num_steps: of the whole run. data: digest of what is trained on. stage_state: a dataclass instance of what
    else a stage must find again, saved with the rest. `timings` holds the seconds of each part of a step, see
    `lap`.
    """

    def __init__(self, cfg, hardware, model, optimizers, micro_batch, num_steps, data="", stage_state=None):
        self.cfg = cfg
        self.hardware = hardware
        self.model = model
        self.optimizers = optimizers
        self.num_steps = num_steps
        self.state = TrainState(cfg.batch_size, micro_batch, num_steps=num_steps, data=data)
        self.stage_state = stage_state
        self.scaler = hardware.scaler()
        self.nonfinite = NonFinite()
        # micro-batch -> the next smaller one, None if there is none; see `fit`
        self.smaller = None
        self.other_bytes = 0                 # of the device's memory, that a stage will keep beside
        self.reset_timings()
        self.before = None                   # plain_state() when this step began
        self.weights_moved = False           # in this step
        # what was last learnt from, for people to look at if training diverges
        self.batch = {}
        self.stopping = False                # one of the ranks was asked to stop
        self.val_loss = None                 # of this step, if it was evaluated
        self.new_best = False

    @property
    def step(self):
        return self.state.step

    # --- the run folder ---

    def open(self, tokenizer, resuming, keep_base=False):
        """Write the run folder, with all that is needed to use the model, and open the log. keep_base: also
        keep the weights as they are now, beside which an adapter stands, and which a reference goes on to
        have. Returns the run, for `with`."""
        distributed.on_main(lambda: self.write_folder(tokenizer, resuming))
        cfg = self.cfg
        trained = adapters(self.model)
        if not resuming and (trained or keep_base):
            base = {name: w for name, w in self.model.state_dict().items() if name not in trained}
            parallel.write_on_main(base.values(), lambda values: checkpoint.save_base(cfg.out_dir, base, values))
        last_step = self.step if resuming else None
        self.log = Log(cfg.out_dir, last_step, cfg.tensorboard, cfg.wandb, dataclasses.asdict(cfg), cfg.diagnose)
        self.say_rates(resuming)
        return self

    def say_rates(self, resuming):
        """Say if a resumed run's next step has another learning rate than its checkpoint's config gives it, and
        if no step has the full rate."""
        cfg = dataclasses.asdict(self.cfg)
        before = checkpoint.read_meta(self.cfg.out_dir, self.step).get("config") if resuming else None
        planned = self.state.num_steps
        self.state.num_steps = self.num_steps
        if before and planned and self.step < self.num_steps:
            old = rate(cfg | before, self.step, planned)
            new = rate(cfg, self.step, self.num_steps)
            if not math.isclose(old, new):
                changes = [f"{name} from {before[name]} to {cfg[name]}" for name in RATE
                           if before.get(name) != cfg.get(name)]
                self.log.say(f"The learning rate of step {self.step + 1} is {new:.2e}, and would have been "
                             f"{old:.2e} before these changed: {', '.join(changes) or 'the data'}.")
        if (cfg["warmup_steps"] or 0) > self.num_steps:
            most = rate(cfg, self.num_steps - 1, self.num_steps)
            self.log.say(f"--warmup_steps={cfg['warmup_steps']} is more than the {self.num_steps} steps of "
                         f"the run: its learning rate rises to {most:.2e} and not to {cfg['learning_rate']:.2e}.")

    def write_folder(self, tokenizer, resuming):
        cfg = self.cfg
        about = {
            "architecture": dataclasses.asdict(self.model.config),
            "tokenizer": tokenizer.describe(),
            "tokenizer_sha256": tokenizer.sha256,
            "lora": lora(cfg),
            "task": own_task(cfg),
            "prompt": prompt_form(cfg),
            "launch": launch(),
        }
        checkpoint.open_run(cfg.out_dir, dataclasses.asdict(cfg), about, cfg.overwrite, resuming)
        if not resuming:
            tokenizer.save(cfg.out_dir)

    def __enter__(self):
        self.stop = StopSignal()
        self.stopping = self.stop.requested()             # before a Retry, say
        return self

    def __exit__(self, kind, error, traceback):
        """Turn running out of memory into a Retry; keep in the log why the run ends."""
        try:
            known = error is None or isinstance(error, BadInput | Failure | Retry)
            if not known and memory.is_out_of_memory(error):
                self.go_on_with_smaller_pieces(f"{error}".partition("\n")[0])
            # Raised on every rank: nothing can be sampled from such weights.
            if isinstance(error, FloatingPointError):
                self.log.say(f"step {self.step + 1}: the logits are not finite, so nothing can be sampled.")
                self.roll_back()
        except (Failure, Retry) as e:
            error = e
            raise
        finally:
            if isinstance(error, Failure | Retry) and (error.alone or distributed.is_main()):
                self.log.note(str(error))
            if error is not None and not isinstance(error, Retry):
                self.log.say_findings()
            self.log.close(failed=error is not None)
            if not isinstance(error, Retry):              # which goes on in this process
                lock.release(Path(self.cfg.out_dir) / lock.NAME)

    def fit(self, attempt, smaller, advice):
        """Return the model as the loop calls it, with the micro-batch that fits every rank's memory
        (memory.fit)."""
        self.smaller = smaller
        model, self.state.micro_batch = memory.fit(
            self.hardware, self.state.micro_batch, attempt, smaller, advice, self.log.say)
        model.share_gradients()
        return model

    def bytes_to_come(self):
        """Return the memory that the optimizers will take from their first step on, and what the stage keeps."""
        return optim.state_to_come(self.optimizers) + self.other_bytes

    # --- a step ---

    def start_step(self):
        """Remember the state to which a step that fails goes back."""
        self.before = self.plain_state()
        logged = (self.step + 1) % self.cfg.log_interval == 0 or self.step + 1 in (1, self.num_steps)
        self.fingerprint = vitals.fingerprint(self.model) if logged else None
        self.val_loss = None
        self.new_best = False
        self.clock = time.perf_counter()

    def reset_timings(self):
        self.timings = Counter()             # {part of a step: seconds}, in `timed_steps` steps
        self.timed_steps = 0
        self.timed_tokens = 0

    def lap(self, name, wait=False):
        """Add the seconds since the last lap to timings[name]. wait: until the device has done what it was
        given."""
        if wait:
            self.hardware.wait()
        clock = time.perf_counter()
        self.timings[name] += clock - self.clock
        self.state.seconds += clock - self.clock
        self.clock = clock

    def optimizer_step(self, lr, **batch):
        """Clip the gradients and move the weights. Returns the norm of the gradients before clipping. If they
        are not finite, nothing moves and the step is skipped; five of those in a row go back to the last
        checkpoint, once, with half the learning rate and without fp16; then the run fails, with `batch` on
        the disk."""
        self.batch = batch
        self.weights_moved = True            # some of them, even if this runs out of memory midway
        grad_norm, finite = optim.apply_step(self.optimizers, self.scaler, lr, self.cfg.grad_clip)
        verdict = self.nonfinite.after(finite, self.scaler.get_scale())
        if verdict == "ok":
            return grad_norm
        self.state.skipped += 1
        self.log.say(f"step {self.step + 1}: the gradients are not finite; this optimizer step is skipped.")
        if verdict == "rollback":
            self.roll_back()
        if verdict == "stop":
            self.give_up()
        return grad_norm

    def finish_step(self, tokens):
        """Count a step that is done. tokens: positions of it, all ranks together."""
        self.state.step += 1
        self.weights_moved = False
        self.state.tokens += tokens
        self.timed_steps += 1
        self.timed_tokens += tokens
        self.state.evaluation_due = self.due(self.cfg.eval_interval)
        self.stopping = self.stop.requested()             # one small exchange between the ranks

    def due(self, interval):
        """Tell whether it is time for what happens every so many steps, and after the last; never if that is
        0."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.num_steps)

    def should_stop(self):
        """Tell whether the run was asked to stop, or has not become better for too long."""
        return self.stopping or self.out_of_patience()

    def out_of_patience(self):
        patience = getattr(self.cfg, "patience", 0)
        return patience > 0 and self.state.stale >= patience

    def moved(self):
        """Return by which share of their size this step moved the last block's weights, if it is one that is
        logged; None if they are frozen."""
        if not any(p.requires_grad for p in self.model.blocks[-1].parameters()):
            return None
        return vitals.moved(self.fingerprint, vitals.fingerprint(self.model))

    def record_validation(self, loss):
        """Note a validation loss, and whether it is the best so far (`new_best`)."""
        self.val_loss = loss
        self.state.evaluation_due = False
        best = distributed.on_main(lambda: checkpoint.best_loss(self.cfg.out_dir, self.step - 1))
        self.new_best = loss < best
        self.state.stale = 0 if self.new_best else self.state.stale + 1

    def save_if_due(self, also=False):
        """Save every save_interval steps, after the last, at a new best, before an end, and where `also` says
        so."""
        evaluated_late = self.stopping and self.val_loss is not None
        ends = self.out_of_patience() or evaluated_late
        if self.due(self.cfg.save_interval) or self.new_best or ends or also:
            self.save()

    def end(self):
        """Say what is wrong with the run, and why it ends before its last step, if it does. Returns the exit
        code."""
        self.log.say_findings()
        if self.stopping:
            out_dir = self.cfg.out_dir
            resume = f"--init_from=resume --out_dir={out_dir}"
            how = f"--init_from={out_dir}" if self.cfg.save_only_model else resume
            self.log.say(f"Stopped as asked after step {self.step}, and saved. Go on with {how}")
            return self.stop.exit_code()
        if self.out_of_patience():
            best = checkpoint.best(self.cfg.out_dir)
            self.log.say(f"Stopped early after step {self.step}: {self.state.stale} evaluations without a "
                         f"better loss than that of step {best}, whose weights are kept.")
        return 0

    # --- checkpoints ---

    def plain_state(self):
        """Copy the numbers that a checkpoint holds."""
        stage = {}
        if self.stage_state:
            stage = {name: copy.copy(value) for name, value in vars(self.stage_state).items()}
        return {
            "progress": dataclasses.asdict(self.state),
            "nonfinite": dataclasses.asdict(self.nonfinite),
            "stage": stage,
        }

    def save(self, plain_state=None, save_only_model=None, val_loss=None):
        """Write a checkpoint of the step that has been reached; every rank must call. plain_state: other
        numbers than the present ones."""
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
        weights = adapters(self.model) or self.model.state_dict()
        val_loss = self.val_loss if val_loss is None else val_loss

        def write(values):
            step = plain_state["progress"]["step"]
            checkpoint.save(cfg.out_dir, step, weights, state, moments, val_loss, cfg.keep_last,
                            dataclasses.asdict(cfg), values)
            (Path(cfg.out_dir) / NOTE).unlink(missing_ok=True)         # what it asks for is in the checkpoint
        parallel.write_on_main([*weights.values(), *moments.values()], write)

    def restore(self, step):
        """Bring everything back as it was after `step` steps of the run in out_dir; but knobs of the
        optimizer that are given on resume count, and so do a smaller micro-batch and what a Retry asks
        for."""
        with checkpoint.loading(f"The checkpoint of step {step} in {self.cfg.out_dir}"):
            self.load(step)
        if self.step > self.num_steps:
            raise BadInput(f"The run in {self.cfg.out_dir} has done {self.step} steps, and --max_steps or "
                           f"--num_epochs asks for {self.num_steps}: raise it, or leave it out.")
        self.take_over_note()
        self.scaler = self.hardware.scaler()
        if self.scaler_state and self.scaler.is_enabled():
            self.scaler.load_state_dict(self.scaler_state)

    def load(self, step):
        """Restore, with whatever files raise that are not this run's."""
        out_dir = self.cfg.out_dir
        with checkpoint.open_tensors(out_dir, step) as weights:
            load_weights(self.model, weights)
        state = checkpoint.load_state(out_dir, step)
        if state["optimizer"] != self.cfg.optimizer:
            raise BadInput(f"optimizer={self.cfg.optimizer} can't go on from the state of "
                           f"{state['optimizer']}: leave it out.")
        if "optimizers" in state:
            optim.load_moments(self.model, self.optimizers, optim.moments_of_old(self.model, self.optimizers, state))
        else:
            with checkpoint.open_tensors(out_dir, step, "optimizer.safetensors") as moments:
                optim.load_moments(self.model, self.optimizers, moments)
        asked_for = self.state.micro_batch
        update(self.state, state["progress"])
        if self.stage_state:                              # runs of grpo.py once had it among the others
            update(self.stage_state, state.get("stage", state["progress"]))
        if self.state.batch_size != self.cfg.batch_size:
            self.state.batch_size = self.cfg.batch_size
            self.state.micro_batch = asked_for
        self.state.micro_batch = min(asked_for, self.state.micro_batch)
        update(self.nonfinite, state["nonfinite"])
        if self.nonfinite.rolled_back:                    # it may have left fp16
            self.hardware.dtype = state["dtype"]
        self.scaler_state = state["scaler"]               # empty without fp16

    # --- the way back ---

    def read_note(self):
        try:
            return read_sealed(Path(self.cfg.out_dir) / NOTE, "delete it")
        except BadInput:
            return {}

    def take_over_note(self):
        """Change what the Retry that left the note asks for. Its values are absolute: to take them over twice
        does no harm."""
        note = self.read_note()
        micro_batch = note.get("micro_batch")
        same = note.get("batch_size") == self.cfg.batch_size
        if same and type(micro_batch) is int and 0 < micro_batch < self.state.micro_batch:
            self.state.micro_batch = micro_batch
        factor = note.get("lr_factor")
        if type(factor) is float and 0 < factor <= 1 and note.get("dtype") in DTYPES:
            self.state.lr_factor = factor
            self.nonfinite.rolled_back = True
            self.hardware.dtype = note["dtype"]

    def retry(self, sentence, alone=False, **changes):
        """Leave a note of the changes and raise Retry."""
        if alone or distributed.is_main():
            # No checkpoint holds yet what an earlier note asks for, if there is one.
            note = self.read_note() | {"batch_size": self.cfg.batch_size} | changes
            checkpoint.write_atomically(Path(self.cfg.out_dir) / NOTE, seal(note))
        raise Retry(sentence, self.cfg.out_dir, alone)

    def go_on_with_smaller_pieces(self, reason):
        """Raise Retry after running out of memory: from the beginning of this step where that can be saved,
        else from the last checkpoint. Failure where there is none, or nothing smaller to try."""
        cfg = self.cfg
        step = self.step + 1
        micro_batch = self.state.micro_batch
        if not self.smaller:                 # before there was a micro-batch
            return
        less = self.smaller(micro_batch)
        if less is None:
            raise Failure(f"Step {step} ran out of memory with a micro-batch of one sequence ({reason}): go "
                          "on from the last checkpoint with --gradient_checkpointing, or where more memory is "
                          "free.")
        if distributed.world_size() == 1 and not self.weights_moved:
            self.save_beginning_of_step()
            self.retry(f"Step {step} ran out of memory ({reason}): it is repeated with a micro-batch of "
                       f"{less} instead of {micro_batch}.", micro_batch=less)
        what = f"Rank {distributed.rank()} ran out of memory at step {step} ({reason})"
        newest = checkpoint.newest_intact(cfg.out_dir, self.log.say)
        if newest is None:
            raise Failure(f"{what}, before the first checkpoint: start again with --overwrite "
                          f"{cfg.flags_for(less)}, which is the same step in smaller pieces.")
        if not checkpoint.has_state(cfg.out_dir, newest):
            raise Failure(f"{what}, and with --save_only_model there is no state to go on from: begin a new run "
                          f"with --init_from={cfg.out_dir} {cfg.flags_for(less)}, and another --out_dir=.")
        if distributed.world_size() == 1:
            self.retry(f"Step {step} ran out of memory ({reason}), and weights had moved: back to the last "
                       f"checkpoint, with a micro-batch of {less} instead of {micro_batch}.", micro_batch=less)
        self.retry(f"{what}: --init_from=resume --out_dir={cfg.out_dir} goes on from the last checkpoint with "
                   f"a micro-batch of {less} instead of {micro_batch}.", alone=True, micro_batch=less)

    def save_beginning_of_step(self):
        """Save the state in which this step began, weights alone or not, unless there is a checkpoint of
        it."""
        out_dir = self.cfg.out_dir
        if not self.before or self.before["progress"]["step"] != self.step:
            self.before = self.plain_state()              # the step was done, and what came after it failed
        if checkpoint.damage(out_dir, self.step) or not checkpoint.has_state(out_dir, self.step):
            val_loss = checkpoint.read_meta(out_dir, self.step).get("val_loss")
            self.save(self.before, save_only_model=False, val_loss=val_loss)

    def roll_back(self):
        """Raise Retry from the newest checkpoint with half the learning rate and without fp16; Failure if
        there is none, or if that was tried before."""
        out_dir = self.cfg.out_dir
        step = distributed.on_main(lambda: checkpoint.newest_intact(out_dir, self.log.say))
        if step is None or not checkpoint.has_state(out_dir, step) or self.state.lr_factor < 1:
            self.give_up()
        dtype = self.hardware.dtype
        if dtype == "fp16":
            bf16 = self.hardware.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8
            dtype = "bf16" if bf16 else "fp32"
        self.retry(f"Back to the checkpoint of step {step}, once, with half the learning rate and {dtype}.",
                   lr_factor=self.state.lr_factor / 2, dtype=dtype)

    def give_up(self):
        """Raise Failure with the batch that was last learnt from on the disk."""
        path = keep_batch(self.cfg.out_dir, self.step + 1, **self.batch)
        raise Failure(f"Training diverged: no finite logits, or {self.nonfinite.patience} optimizer steps in a "
                      "row without finite gradients, again after going back or with no checkpoint to go back "
                      f"to. The last batch is in {path}; lower --learning_rate.", alone=False)


def load_weights(model, weights):
    """Copy {name: tensor or slice} into a model's weights, or its adapters if it has them. ValueError if they
    are another model's."""
    own = adapters(model) or model.state_dict()
    if wrong := sorted(own.keys() ^ weights.keys()):
        raise ValueError(f"{wrong[0]} is missing or left over")
    for name, tensor in own.items():
        parallel.fill(tensor, weights[name], name)


def rate(knobs, step, num_steps):
    """Return the learning rate of a step by a config's schedule."""
    return optim.lr_at(step, num_steps, *(knobs[name] for name in RATE[:5]))


def update(instance, values):
    """Set those fields of a dataclass instance that are among the values."""
    for field in dataclasses.fields(instance):
        if field.name in values:
            setattr(instance, field.name, values[field.name])


# --- what train.py and grpo.py ask of their knobs ---

def not_by_default(cfg, inherited=()):
    """Return the knobs that are set to something of one's own, for people; not those that a model to start
    from has settled."""
    changed = []
    for name, value in dataclasses.asdict(cfg).items():
        if value != getattr(type(cfg), name) and name not in inherited:
            changed.append(one_line(f"{name}={value}"))
    return ", ".join(changed) or "-"


def lora(cfg):
    """The arguments of layers.lora.add_lora; None without."""
    if not cfg.lora_rank:
        return None
    return {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "linears": cfg.lora_linears.split(",")}


def own_task(cfg):
    """Give {file, sha256} of the task file of one's own that a run executes (of a mixture's several, their names
    and digests in a row), None without."""
    kind, _, name = ("task:" + cfg.task if hasattr(cfg, "task") else cfg.dataset).partition(":")
    try:
        files = tasks.user_files(name) if kind == "task" else []
        digests = [checkpoint.sha256(file) for file in files]
    except (OSError, ValueError):                             # loading the task will say so
        return None
    return {"file": ", ".join(files), "sha256": " ".join(digests)} if files else None


def prompt_form(cfg):
    """Return the form in which a run puts questions to the model, with {} for the question; None if it has
    none, or several."""
    try:
        if hasattr(cfg, "task"):
            return tasks.load(cfg.task).prompt
        if cfg.dataset.startswith("task:"):
            return tasks.load(cfg.dataset.removeprefix("task:")).prompt
    except (LookupError, OSError, ValueError):                # which will be said by who needs it
        return None
    if Path(cfg.dataset).suffix.lower() != ".json":
        return None
    return cfg.prompt or examples.read_form(cfg.dataset)


def claim(out_dir):
    """Take the lock of a folder that holds a run. Returns what stands there: "nothing", "run", or
    "restarted", a run that this same torchrun began. Every rank must call."""
    def look():
        if not (Path(out_dir) / "config.json").exists():
            return "nothing"
        checkpoint.check_kinds(out_dir)
        lock.take(Path(out_dir) / lock.NAME, out_dir)
        checkpoint.tidy(out_dir)
        try:
            began = checkpoint.read_model(out_dir).get("launch")
        except BadInput:                                      # which will be said by who needs it
            began = None
        return "restarted" if began and began == launch() else "run"
    return distributed.on_main(look)


def launch():
    """Return what tells one call of torchrun from another; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return [os.environ["TORCHELASTIC_RUN_ID"], socket.gethostname(), os.getppid()]


def check_task(cfg, argv):
    """Say which task file of one's own a resumed run is about to execute. BadInput if it is not as the run
    noted it, unless the command line names it."""
    # Without a checkpoint the run begins again, and its init_from is no longer "resume".
    asked = cfg.resume == "auto" or "--init_from=resume" in argv
    goes_on = cfg.init_from == "resume" or asked and (Path(cfg.out_dir) / "config.json").exists()
    found = own_task(cfg) if goes_on else None
    if not found:
        return
    model, file = checkpoint.read_model(cfg.out_dir), found["file"]
    about, knob = "as the run noted it", "--task=" if hasattr(cfg, "task") else "--dataset=task:"
    if "task" not in model:
        about = "of which the run noted no digest"
    elif not isinstance(model["task"], dict) or model["task"].get("sha256") != found["sha256"]:
        about = f"not as the run noted it, because {knob} names it"
        if not any(arg.startswith(knob) for arg in argv):
            raise BadInput(f"{file} is not the task file that the run in {cfg.out_dir} noted: put that back, "
                           f"name the new one with {knob}{file}, or start a new run with --init_from=.")
    print(f"Executing {file}, {about}.", flush=True)


def check_training(cfg):
    """BadInput for knobs that train.py and grpo.py share and that don't go together."""
    same = os.path.realpath(cfg.out_dir) == os.path.realpath(cfg.init_from)
    if cfg.init_from not in ("scratch", "resume") and same:
        raise BadInput(f"{cfg.out_dir} holds the model to start from: choose another --out_dir=, or continue "
                       "its run with --init_from=resume.")
    if cfg.sum_locally and cfg.parallel == "ddp":
        raise BadInput("--sum_locally is about weights that are shared, and DDP exchanges once a step anyway: give "
                       "--parallel=fsdp or hybrid, or leave it out.")
    if cfg.parallel == "hybrid" and distributed.world_size() % distributed.local_world_size():
        raise BadInput("--parallel=hybrid needs as many ranks on each node: change torchrun's --nproc_per_node.")
    if cfg.min_lr > cfg.learning_rate:
        raise BadInput(f"--min_lr={cfg.min_lr:g}, where the schedule ends, is above "
                       f"--learning_rate={cfg.learning_rate:g}: lower it.")
    if cfg.lora_alpha is not None and cfg.lora_alpha <= 0:
        raise BadInput(f"--lora_alpha={cfg.lora_alpha:g} would train nothing: it must be above 0.")
    for knob in ("lora_alpha", "lora_linears"):
        if not cfg.lora_rank and getattr(cfg, knob) != getattr(type(cfg), knob):
            raise BadInput(f"--{knob}={getattr(cfg, knob)} is about adapters, and there are none: give "
                           "--lora_rank= too, or leave it out.")


def adapt(cfg, model, device, resuming):
    """Give the model the adapters that cfg asks for; of a resumed run also the weights that they stand
    beside."""
    if not cfg.lora_rank:
        return
    if resuming and device.type != "meta":
        with checkpoint.loading(f"base.safetensors in {cfg.out_dir}"):
            model.load_state_dict(checkpoint.load_base(cfg.out_dir, device))
    try:
        add_lora(model, **lora(cfg))
    except ValueError as e:
        raise BadInput(str(e)) from None
