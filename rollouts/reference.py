"""The reference model of grpo.py's KL term (--beta): the model that training began with, or a teacher."""
import contextlib
import dataclasses

from layers.lora import adapters_off
from model import blank
from rollouts.batch import logprobs_of
from runtime import checkpoint, distributed, parallel
from runtime.config import BadInput


def check_teacher(teacher, tokenizer, context):
    """Raise BadInput unless a teacher (a hf.ModelSource) reads the same ids, and `context` of them."""
    own = teacher.tokenizer()
    if (own.sha256, own.describe()["name"]) != (tokenizer.sha256, tokenizer.describe()["name"]):
        raise BadInput(f"The teacher in {teacher.folder} has another tokenizer than the trained model: choose a "
                       "teacher with the same one.")
    if teacher.config.block_size < context:
        raise BadInput(f"The teacher in {teacher.folder} has {teacher.config.block_size} positions, and prompt "
                       f"and completion need {context}: lower --max_new_tokens, or choose another teacher.")


class Reference:
    """The reference model: a teacher (a hf.ModelSource); without one the initial model, which with LoRA is the
    policy without its adapters, else a second model. With offload_reference its weights stay in CPU memory
    between uses."""

    def __init__(self, cfg, hw, model, teacher=None):
        self.cfg = cfg
        self.hw = hw
        self.model = model
        self.teacher = teacher
        self.is_policy = bool(cfg.lora_rank) and not teacher
        self.offloaded = []                  # pinned CPU copies of the weights
        if self.is_policy:
            return
        self.model = parallel.shard(distributed.together(self.begin, BadInput), hw, cfg.parallel)
        if cfg.offload_reference and hw.device.type == "cuda":
            self.offloaded = [p.data.cpu().pin_memory() for p in self.model.parameters()]
            self.place(self.offloaded)

    def begin(self):
        """Return the reference model, not yet sharded."""
        device = parallel.building_device(self.hw, self.cfg.parallel)
        shape = self.teacher.config if self.teacher else self.model.config
        model = blank(dataclasses.replace(shape, dropout=0.0), self.hw.attention, device=device)
        if device.type == "meta":
            return model
        if self.teacher:
            self.teacher.fill(model)
        else:
            model.load_state_dict(checkpoint.load_base(self.cfg.out_dir))
        return model

    def place(self, weights):
        """Point the model's parameters at these tensors."""
        for parameter, weight in zip(self.model.parameters(), weights):
            parameter.data = weight

    def add_logprobs(self, completions, tokens):
        """Set each Completion's reference_logprobs, in micro-batches of at most `tokens`."""
        self.place(weight.to(self.hw.device, non_blocking=True) for weight in self.offloaded)
        with adapters_off(self.model) if self.is_policy else contextlib.nullcontext():
            temperature = self.cfg.temperature
            for c, logprobs in logprobs_of(self.model, self.hw, completions, tokens, temperature):
                c.reference_logprobs = logprobs
        self.place(self.offloaded)
