"""The model that training began with, which grpo.py's KL term compares with (--beta)."""
import contextlib

from layers.lora import adapters_off
from model import blank
from rollouts.batch import logprobs_of
from runtime import checkpoint, parallel


class Reference:
    """The trained model without its adapters, or a second one. With offload_reference its weights wait in the
    CPU's memory."""

    def __init__(self, cfg, hw, model):
        self.cfg = cfg
        self.hw = hw
        self.model = model
        self.waiting = []                    # page-locked copies of the weights, if they wait on the CPU
        if cfg.lora_rank:
            return
        self.model = parallel.build(self.begin, hw, cfg.parallel)
        if cfg.offload_reference and hw.device.type == "cuda":
            self.waiting = [p.data.cpu().pin_memory() for p in self.model.parameters()]
            self.place(self.waiting)

    def begin(self, device):
        """Return the model that training began with, on a device; without values on the device meta."""
        model = blank(self.model.config, self.hw.attention, device=device)
        if device.type != "meta":
            model.load_state_dict(checkpoint.load_base(self.cfg.out_dir))
        return model

    def place(self, weights):
        for parameter, weight in zip(self.model.parameters(), weights):
            parameter.data = weight

    def add_logprobs(self, completions, tokens):
        """Give each Completion its reference_logprobs, in micro-batches of at most so many tokens."""
        self.place(weight.to(self.hw.device, non_blocking=True) for weight in self.waiting)
        with adapters_off(self.model) if self.cfg.lora_rank else contextlib.nullcontext():
            temperature = self.cfg.temperature
            for c, logprobs in logprobs_of(self.model, self.hw, completions, tokens, temperature):
                c.reference_logprobs = logprobs
        self.place(self.waiting)
