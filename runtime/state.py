"""The state of a run that an exact resume needs: what checkpoints save and restore."""
import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from layers.lora import EXTRAS, add_lora
from runtime import checkpoint, distributed, optim, parallel
from runtime.config import BadInput
from runtime.options import lora
from runtime.recovery import RETRY_FILE


@dataclass
class Progress:
    """Counters of a run."""
    batch_size: int                          # largest micro-batch that the options allow
    micro_batch: int                         # sequences (grpo.py: tokens) of a rank, as it fits in memory
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


@dataclass
class NonFinite:
    """Steps with non-finite gradients, for recovery.after_step."""
    patience: int = 5                        # steps in a row before a rollback
    in_a_row: int = 0
    rolled_back: bool = False


class RunState:
    """Model, optimizers, GradScaler and counters. stage_state: dataclass instance with more state of the
    stage, None without."""

    def __init__(self, cfg, hardware, model, optimizers, progress, stage_state=None):
        self.cfg = cfg
        self.hardware = hardware
        self.model = model
        self.optimizers = optimizers
        self.state = progress
        self.stage_state = stage_state
        self.scaler = hardware.scaler()
        self.nonfinite = NonFinite()
        self.val_loss = None                 # of this step, if it was evaluated

    @property
    def step(self):
        return self.state.step

    @property
    def num_steps(self):
        return self.state.num_steps

    def counters(self):
        """Return a copy of the part of a checkpoint that is no tensor and changes in a step."""
        stage = vars(self.stage_state) if self.stage_state else {}
        return {
            "progress": dataclasses.asdict(self.state),
            "nonfinite": dataclasses.asdict(self.nonfinite),
            "stage": {name: copy.copy(value) for name, value in stage.items()},
        }

    def save(self):
        """Write a checkpoint of this step. Every rank must call."""
        self.write(self.counters(), self.cfg.save_only_model, self.val_loss)

    def write(self, counters, only_model, val_loss):
        """Write a checkpoint with these counters; only_model: without the state to resume from."""
        cfg = self.cfg
        weights = checkpoint.weights_of(self.model)
        moments = {} if only_model else optim.moments(self.model, self.optimizers)
        state = {"optimizer": cfg.optimizer, "scaler": self.scaler.state_dict(), "dtype": self.hardware.dtype}
        state = None if only_model else state | counters

        def write_files(values):
            step = counters["progress"]["step"]
            options = dataclasses.asdict(cfg)
            checkpoint.save(cfg.out_dir, step, weights, state, moments, val_loss, options, values)
            (Path(cfg.out_dir) / RETRY_FILE).unlink(missing_ok=True)         # now part of the checkpoint
        parallel.write_on_main([*weights.values(), *moments.values()], write_files)

    def restore(self, step, changes):
        """Restore the state after `step` steps of the run in out_dir, except optimizer options given on
        resume, and a smaller micro-batch. changes: of recovery.read_retry_file."""
        with checkpoint.loading(f"The checkpoint of step {step} in {self.cfg.out_dir}"):
            scaler_state = self.load(step)
        if self.step > self.num_steps:
            raise BadInput(f"The run in {self.cfg.out_dir} has done {self.step} steps, more than the "
                           f"{self.num_steps} of --max_steps or --num_epochs: raise it, or leave it out.")
        self.apply(changes)
        self.scaler = self.hardware.scaler()
        if scaler_state and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler_state)

    def load(self, step):
        """Load weights, optimizers and counters, and return the GradScaler's state, empty without fp16. Files
        of another run raise any kind of exception."""
        out_dir = self.cfg.out_dir
        with checkpoint.open_tensors(out_dir, step) as weights:
            load_weights(self.model, weights)
        saved = checkpoint.load_state(out_dir, step)
        if saved["optimizer"] != self.cfg.optimizer:
            raise BadInput(f"--optimizer={self.cfg.optimizer} can't resume from the state of "
                           f"{saved['optimizer']}: leave it out.")
        with checkpoint.open_tensors(out_dir, step, "optimizer.safetensors") as moments:
            optim.load_moments(self.model, self.optimizers, moments)
        new = dataclasses.replace(self.state)
        vars(self.state).update(saved["progress"])
        micro_batch = new.micro_batch
        if (self.state.batch_size, self.state.ranks) == (new.batch_size, new.ranks):
            micro_batch = min(micro_batch, self.state.micro_batch)       # it may have been halved
        vars(self.state).update(batch_size=new.batch_size, micro_batch=micro_batch, num_steps=new.num_steps,
                                ranks=new.ranks)
        if self.stage_state:
            vars(self.stage_state).update(saved["stage"])
        vars(self.nonfinite).update(saved["nonfinite"])
        option = (checkpoint.read_meta(out_dir, step).get("config") or {}).get("dtype")
        if self.nonfinite.rolled_back and option in (None, self.cfg.dtype):      # no --dtype for this resume
            self.hardware.dtype = saved["dtype"]
        return saved["scaler"]

    def apply(self, changes):
        """Apply the changes of a retry file. Its values are absolute, so applying them twice is safe."""
        if "micro_batch" in changes and changes["batch_size"] == self.state.batch_size:
            self.state.micro_batch = min(self.state.micro_batch, changes["micro_batch"])
        if "lr_factor" in changes:
            self.state.lr_factor = changes["lr_factor"]
            self.nonfinite.rolled_back = True
            self.hardware.dtype = changes["dtype"]


def load_weights(model, weights):
    """Copy {name: tensor or slice} of a checkpoint into a model. ValueError for weights of another model."""
    own = checkpoint.weights_of(model)
    if wrong := sorted(own.keys() ^ weights.keys()):
        raise ValueError(f"{wrong[0]} is missing or unexpected")
    for name, tensor in own.items():
        parallel.fill(tensor, weights[name], name)


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
