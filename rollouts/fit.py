"""The memory of grpo.py: the micro-batch of the update, and the engine's slots beside it."""
from functools import partial

import torch

from engine.kv_cache import cache_bytes, slots_that_fit
from rollouts.batch import WorstCase, round_up
from runtime import distributed, memory, optim
from runtime.config import BadInput


def samples_per_rank(cfg):
    """Return the number of completions of a step on each rank."""
    return cfg.prompts_per_step // distributed.world_size() * cfg.k_samples


def worst_case(cfg, hw, longest_prompt, replies, context):
    """Return the WorstCase of an update. longest_prompt, context, replies (of an environment): tokens."""
    prompt = round_up(longest_prompt, hw.length_multiple)
    answer = round_up(min(cfg.max_new_tokens + replies, context - 1), hw.length_multiple)
    return WorstCase(prompt, answer, cfg.k_samples, samples_per_rank(cfg) // cfg.mini_batches)


def fit_update(cfg, run, worst, context, other_bytes, reference):
    """Return the TrainedModel, with the micro-batch that fits in memory. other_bytes: of PCGrad. reference: a
    Reference, or None."""
    hw = run.hardware
    bytes_to_come = optim.pending_bytes(run.optimizers) + other_bytes
    if hw.device.type == "cuda":             # reserve room for the engine, which is made afterwards
        slots = min(64, samples_per_rank(cfg))
        bytes_to_come += hw.sampling_dtype.itemsize * run.model.n_params()
        bytes_to_come += cache_bytes(run.model.config, slots, context, hw.sampling_dtype)
    advice = partial(memory.advice, run.model, hw, context, bytes_to_come,
                     "lower --max_new_tokens, --max_prompt_tokens or --few_shot")
    return memory.fit(run, worst.sizes(run.state.micro_batch),
                      partial(try_update, cfg, run, worst, context, bytes_to_come, reference), advice)


def try_update(cfg, run, worst, context, bytes_to_come, reference, tokens):
    """Return (TrainedModel, exception of memory.rehearse or None) of a trial with this micro-batch."""
    hw = run.hardware
    model = distributed.TrainedModel(run.model, hw.compile, cfg.compile_mode, dynamic=True)
    inputs = worst.inputs(tokens, cfg.temperature, hw.device)

    def update(model):                       # as in learn
        with torch.set_grad_enabled(cfg.reward_weight > 0 or cfg.distill == "reverse"):
            loss = model.token_logprobs(*inputs)[0].sum()
        return loss + model.divergence(reference.model, *inputs)[0] if cfg.distill == "forward" else loss

    return model, memory.rehearse(model, hw, worst.rows(tokens, context), context, 2, bytes_to_come, update)


def slots_beside_update(cfg, run, worst, context, other_bytes, state):
    """Return the number of engine slots that fit in memory beside the update, at most those of the
    StreamState if a step has as many samples as then. other_bytes: of PCGrad."""
    saved = state.slots if state.samples in (0, samples_per_rank(cfg)) else 0
    hw = run.hardware
    rows = worst.rows(run.state.micro_batch, context)
    bytes_to_come = optim.pending_bytes(run.optimizers) + other_bytes
    parts = memory.parts(run.model, hw, rows, context, bytes_to_come)
    if cfg.distill == "forward":             # a second forward pass of the model, and the teacher's logits
        parts["teacher"] = parts["activations"] + parts["head"]
    needed = sum(parts.values())
    needed += hw.sampling_dtype.itemsize * run.model.n_params()
    most = slots_that_fit(run.model.config, context, hw.sampling_dtype, hw.device, needed)
    slots = min(most, saved or most, samples_per_rank(cfg))
    if slots < min(saved, samples_per_rank(cfg)):
        sentence = (f"Memory suffices for {slots} of the {saved} samples that the run had in flight, on "
                    "which the last bits of log-probabilities depend")
        if cfg.deterministic:
            raise BadInput(f"{sentence}: free memory, or leave --deterministic out.")
        run.log.say(f"{sentence}.")
    return slots
