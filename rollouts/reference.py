"""The reference model of grpo.py's KL term (--beta): the model that training began with, or a teacher."""
import contextlib

from layers.lora import adapters_off, trains_adapters_alone
from rollouts.batch import logprobs_of
from runtime import checkpoint
from runtime.frozen import frozen


class Reference:
    """The reference model: a teacher (a hub.ModelSource); without one the initial model, which with LoRA is
    the policy without its adapters, else a second model. With offload_reference its weights stay in CPU
    memory between uses."""

    def __init__(self, cfg, hw, model, teacher=None):
        self.cfg = cfg
        self.hw = hw
        self.model = model
        self.teacher = teacher
        self.is_policy = bool(cfg.lora_rank) and not teacher and trains_adapters_alone(model)
        self.offloaded = []                  # pinned CPU copies of the weights
        if self.is_policy:
            return
        shape = teacher.config if teacher else model.config
        self.model = frozen(shape, self.fill, hw, cfg.parallel)
        if cfg.offload_reference and hw.device.type == "cuda":
            self.offloaded = [p.data.cpu().pin_memory() for p in self.model.parameters()]
            self.place(self.offloaded)

    def fill(self, model):
        """Copy the reference model's weights into a GPT."""
        if self.teacher:
            self.teacher.fill(model)
        else:
            model.load_state_dict(checkpoint.load_base(self.cfg.out_dir))

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
