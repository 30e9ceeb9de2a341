"""Distillation on a given text or on examples (--teacher): the loss of a position is teacher_weight times the
KL divergence of the teacher's distribution from the model's, plus 1 - teacher_weight times the cross entropy
(Hinton et al. 2015, at temperature 1)."""
import sys

import torch

import hub
from model import IGNORE, Prompts
from runtime import checkpoint, distributed
from runtime.config import BadInput
from runtime.frozen import frozen


def find_teacher(cfg, resuming):
    """Return the ModelSource of cfg.teacher. A resumed run keeps the checkpoint that it began with, whatever
    the teacher's own run has saved since; BadInput if the teacher's weights, architecture or tokenizer have
    changed."""
    recorded = checkpoint.read_model(cfg.out_dir).get("teacher") if resuming else None
    if not recorded or recorded["name"] != cfg.teacher:
        recorded = {}
    step = recorded.get("step")
    again = checkpoint.new_run(cfg.out_dir)
    source = hub.find(cfg.teacher, step)
    if step is not None and not checkpoint.step_folder(source.folder, step).is_dir():
        raise BadInput(f"{cfg.teacher} no longer has the checkpoint of step {step}, with which the run in "
                       f"{cfg.out_dir} began: restore that checkpoint, or {again}.")
    parts = {"description_sha256": "The architecture or tokenizer", "sha256": "The weights"}
    for key, part in parts.items():
        if key in recorded and recorded[key] != getattr(source, key):
            raise BadInput(f"{part} of the teacher {cfg.teacher} changed after the run in {cfg.out_dir} "
                           f"began: restore the teacher to resume, or {again}.")
    return source


def check_teacher(source, tokenizer, vocab_size, positions):
    """Raise BadInput unless each of the tokenizer's tokens has the same id for a teacher (a hub.ModelSource),
    which may have more ids, and the teacher has at least as many positions."""
    own = source.tokenizer()
    if not tokenizer.vocabulary().items() <= own.vocabulary().items():
        raise BadInput(f"The teacher in {source.folder} has another tokenizer than the trained model: choose "
                       "one with the same.")
    if own.is_chat and not tokenizer.is_chat and distributed.is_main():
        print(f"The teacher in {source.folder} has a chat template and the trained model has none, so the "
              "teacher sees prompts without its template: prefer a model with it.", file=sys.stderr,
              flush=True)
    if source.config.vocab_size < vocab_size:
        raise BadInput(f"The teacher in {source.folder} has {source.config.vocab_size} ids, and the trained "
                       f"model {vocab_size}: choose a teacher with at least as many.")
    if source.config.block_size < positions:
        raise BadInput(f"The teacher in {source.folder} has {source.config.block_size} positions, and "
                       f"{positions} are needed: train on shorter texts, or choose another teacher.")


class Teacher:
    """The teacher of train.py. source: a hub.ModelSource."""

    def __init__(self, cfg, hw, source):
        self.hw = hw
        self.weight = cfg.teacher_weight
        self.model = frozen(source.config, source.fill, hw, cfg.parallel)

    def loss(self, model, x, y, target_index=None, prefix=None):
        """Return the summed loss of a TrainedModel's micro-batch; see GPT.loss."""
        prompts = None if prefix is None else Prompts.shared(prefix, len(x))
        if target_index is None:
            target_index = torch.arange(y.numel(), device=y.device)
        divergence, cross_entropy = model.divergence(self.model, x, y, 1.0, prompts, target_index)
        return self.weight * divergence + (1 - self.weight) * cross_entropy

    def loss_on(self, batch):
        """Return the teacher's own mean loss on a micro-batch, in nats per target."""
        x, y, *others = [tensor.to(self.hw.device) for tensor in batch]
        with torch.no_grad(), self.hw.autocast():
            return self.model.loss(x, y, *others).item() / max(1, int((y != IGNORE).sum()))
