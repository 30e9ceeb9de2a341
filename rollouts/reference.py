"""The reference model of grpo.py's KL term (--beta): the model that training began with."""
import contextlib

from layers.lora import adapters_off
from model import blank
from rollouts.batch import logprobs_of
from runtime import checkpoint, distributed, parallel
from runtime.config import BadInput


class Reference:
    """The reference model: with LoRA the policy without its adapters, else a second model. With
    offload_reference its weights stay in CPU memory between uses."""

    def __init__(self, cfg, hw, model):
        self.cfg = cfg
        self.hw = hw
        self.model = model
        self.offloaded = []                  # pinned CPU copies of the weights
        if cfg.lora_rank:
            return
        self.model = parallel.shard(distributed.together(self.begin, BadInput), hw, cfg.parallel)
        if cfg.offload_reference and hw.device.type == "cuda":
            self.offloaded = [p.data.cpu().pin_memory() for p in self.model.parameters()]
            self.place(self.offloaded)

    def begin(self):
        """Return the reference model, not yet sharded."""
        device = parallel.building_device(self.hw, self.cfg.parallel)
        model = blank(self.model.config, self.hw.attention, device=device)
        if device.type != "meta":
            model.load_state_dict(checkpoint.load_base(self.cfg.out_dir))
        return model

    def place(self, weights):
        """Point the model's parameters at these tensors."""
        for parameter, weight in zip(self.model.parameters(), weights):
            parameter.data = weight

    def add_logprobs(self, completions, tokens):
        """Set each Completion's reference_logprobs, in micro-batches of at most `tokens`."""
        self.place(weight.to(self.hw.device, non_blocking=True) for weight in self.offloaded)
        with adapters_off(self.model) if self.cfg.lora_rank else contextlib.nullcontext():
            temperature = self.cfg.temperature
            for c, logprobs in logprobs_of(self.model, self.hw, completions, tokens, temperature):
                c.reference_logprobs = logprobs
        self.place(self.offloaded)
