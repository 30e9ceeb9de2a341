"""What training must find again in order to go on as if it had never stopped: saved, restored and rolled back as a whole."""
import dataclasses
from dataclasses import dataclass, field

import torch

import tasks
from model import adapters, add_lora, load_adapters
from runtime import checkpoint, distributed
from runtime.config import BadInput
from runtime.guard import NonFinite


@dataclass
class Progress:
    """The plain numbers of it."""
    batch_size: int                          # the config's, for which micro_batch was found
    micro_batch: int                         # sequences a micro-step, as many as fit
    step: int = 0                            # optimizer steps done
    tokens: int = 0                          # positions seen in them
    asked: int = 0                           # grpo.py: how far the stream of questions has been read
    slots: int = 0                           # grpo.py: samples in flight, as many as fit
    solved: dict = field(default_factory=dict)       # grpo.py: {number of a question: epoch in which all its samples were right}
    data: str = ""                           # digest of the examples, or questions, that are trained on
    seconds: float = 0.0                     # in optimizer steps
    lr_factor: float = 1.0                   # halved by a roll-back
    skipped: int = 0                         # steps whose gradients were not finite
    stale: int = 0                           # evaluations since the best


def lora(cfg):
    """What model.add_lora is given; None without."""
    return {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "linears": cfg.lora_linears.split(",")} if cfg.lora_rank else None


def own_task(cfg):
    """Give {file, sha256} of the task file of one's own that a run executes, None without."""
    kind, _, name = ("task:" + cfg.task if hasattr(cfg, "task") else cfg.dataset).partition(":")
    file = tasks.own_file(name) if kind == "task" else ""
    try:
        return {"file": file, "sha256": checkpoint.sha256(file)} if file else None
    except OSError:                                           # loading the task will say so
        return None


def check_task(cfg, argv):
    """Say which task file of one's own a resumed run is about to execute. BadInput if it is not as the run
    noted it, unless the command line names it."""
    found = own_task(cfg) if cfg.init_from == "resume" else None
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
    """BadInput for knobs of train.py and grpo.py, of the optimizer and of adapters, that don't go together."""
    if cfg.min_lr > cfg.learning_rate:
        raise BadInput(f"--min_lr={cfg.min_lr:g}, where the schedule ends, is above --learning_rate={cfg.learning_rate:g}: "
                       "lower it.")
    if cfg.lora_alpha is not None and cfg.lora_alpha <= 0:
        raise BadInput(f"--lora_alpha={cfg.lora_alpha:g} would train nothing: it must be above 0.")
    for knob in ("lora_alpha", "lora_linears"):
        if not cfg.lora_rank and getattr(cfg, knob) != getattr(type(cfg), knob):
            raise BadInput(f"--{knob}={getattr(cfg, knob)} is about adapters, and there are none: give --lora_rank= too, "
                           "or leave it out.")


def adapt(cfg, model, device, resuming):
    """Give the model the adapters that cfg asks for; of a resumed run also the weights that they stand beside."""
    if not cfg.lora_rank:
        return
    if resuming:
        with checkpoint.loading(f"base.safetensors in {cfg.out_dir}"):
            model.load_state_dict(checkpoint.load_base(cfg.out_dir, device))
    try:
        add_lora(model, **lora(cfg))
    except ValueError as e:
        raise BadInput(str(e)) from None


class State:
    """Model, optimizers, loss scale (`scaler`), `progress` and `nonfinite`; the first two are given, and changed in place."""

    def __init__(self, cfg, hardware, model, optimizers, micro_batch):
        self.cfg, self.hardware, self.model, self.optimizers = cfg, hardware, model, optimizers
        self.progress = Progress(cfg.batch_size, micro_batch)
        self.scaler, self.nonfinite = hardware.scaler(), NonFinite()

    def open_run(self, tokenizer, resuming, keep_base=False):
        """The run folder, with all that is needed to use the model; keep_base: also the weights as they are now, beside which an
        adapter stands, and which a reference goes on to have."""
        cfg, about = dataclasses.asdict(self.cfg), {
            "architecture": dataclasses.asdict(self.model.config), "tokenizer": tokenizer.describe(),
            "lora": lora(self.cfg), "task": own_task(self.cfg)}
        checkpoint.open_run(self.cfg.out_dir, cfg, about, self.cfg.overwrite, resuming)
        if not resuming:
            tokenizer.save(self.cfg.out_dir)
            trained = adapters(self.model)
            if trained or keep_base:
                checkpoint.save_base(self.cfg.out_dir, {n: w for n, w in self.model.state_dict().items() if n not in trained})

    def save(self, val_loss=None):
        """A checkpoint of the step that has been reached; every rank must call."""
        state = {"optimizer": self.cfg.optimizer, "optimizers": [o.state_dict() for o in self.optimizers],
                 "scaler": self.scaler.state_dict(), "dtype": self.hardware.dtype,
                 "progress": dataclasses.asdict(self.progress), "nonfinite": dataclasses.asdict(self.nonfinite)}
        distributed.on_main(lambda: checkpoint.save(
            self.cfg.out_dir, self.progress.step, adapters(self.model) or self.model.state_dict(),
            None if self.cfg.save_only_model else state, val_loss, self.cfg.keep_last, dataclasses.asdict(self.cfg)))

    def restore(self, step):
        """Everything as it was after `step` steps of the run in out_dir; but knobs of the optimizer that are given on resume
        count, and so does a smaller micro-batch."""
        with checkpoint.loading(f"The checkpoint of step {step} in {self.cfg.out_dir}"):
            self.load(step)

    def load(self, step):
        """As `restore`, with whatever files raise that are not this run's."""
        weights = checkpoint.load_weights(self.cfg.out_dir, step, self.hardware.device)
        load_adapters(self.model, weights) if adapters(self.model) else self.model.load_state_dict(weights)
        state = checkpoint.load_state(self.cfg.out_dir, step)
        if state["optimizer"] != self.cfg.optimizer:
            raise BadInput(f"optimizer={self.cfg.optimizer} can't go on from the state of {state['optimizer']}: leave it out.")
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            knobs = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, given in zip(optimizer.param_groups, knobs):
                group.update(given)
        micro_batch = self.progress.micro_batch
        vars(self.progress).update(state["progress"])
        if self.progress.batch_size == self.cfg.batch_size:
            micro_batch = min(micro_batch, self.progress.micro_batch)
        self.progress.batch_size, self.progress.micro_batch = self.cfg.batch_size, micro_batch
        vars(self.nonfinite).update(state["nonfinite"])
        if self.nonfinite.rolled_back:                        # it may have left fp16
            self.hardware.dtype = state["dtype"]
        self.scaler = self.hardware.scaler()
        if state["scaler"]:                                   # empty without fp16
            self.scaler.load_state_dict(state["scaler"])

    def roll_back(self, say):
        """To the newest checkpoint, with half the learning rate and without fp16. False if there is none to go back to."""
        step = distributed.on_main(lambda: checkpoint.newest_intact(self.cfg.out_dir, say))
        if step is None or not checkpoint.has_state(self.cfg.out_dir, step):
            return False
        self.restore(step)
        self.nonfinite.rolled_back, self.progress.lr_factor = True, self.progress.lr_factor / 2
        if self.hardware.dtype == "fp16":
            bf16 = self.hardware.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8
            self.hardware.dtype = "bf16" if bf16 else "fp32"
            self.scaler = self.hardware.scaler()
        say(f"Back to the checkpoint of step {step}, once, with half the learning rate and {self.hardware.dtype}.")
        return True
