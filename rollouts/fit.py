"""The memory of grpo.py: the micro-batch of the update, and the engine's slots beside it."""
from engine import slots_that_fit
from rollouts.batch import WorstCase, round_up
from runtime import distributed, memory


def samples_per_rank(cfg):
    """Return the number of completions of a step on each rank."""
    return cfg.prompts_per_step // distributed.world_size() * cfg.k_samples


def worst_case(cfg, hw, longest_prompt, replies, context):
    """Return the WorstCase of an update. longest_prompt, context, replies (of an environment): tokens."""
    prompt = round_up(longest_prompt, hw.length_multiple)
    answer = round_up(min(cfg.max_new_tokens + replies, context - 1), hw.length_multiple)
    return WorstCase(prompt, answer, cfg.k_samples, samples_per_rank(cfg) // cfg.mini_batches)


def fit_update(cfg, run, worst, context):
    """Return the TrainedModel, with the micro-batch that fits in memory."""
    hw = run.hardware

    def attempt(tokens):
        model = distributed.TrainedModel(run.model, hw.compile, cfg.compile_mode, dynamic=True)
        rows = worst.rows(tokens, context)
        inputs = worst.inputs(tokens, cfg.temperature, hw.device)
        return model, memory.rehearse(model, hw, rows, context, 2, run.bytes_to_come(), inputs)

    def advice():
        return memory.advice(run.model, hw, context, run.bytes_to_come(),
                             "lower --max_new_tokens, --max_prompt_tokens or --few_shot")
    return run.fit(attempt, worst.smaller, advice)


def slots_beside_update(cfg, run, worst, context, saved):
    """Return the number of engine slots that fit in memory beside the update, at most `saved` if that is not
    0."""
    hw = run.hardware
    rows = worst.rows(run.state.micro_batch, context)
    needed = sum(memory.parts(run.model, hw, rows, context, run.bytes_to_come()).values())
    needed += hw.sampling_dtype.itemsize * run.model.n_params()
    most = slots_that_fit(run.model.config, context, hw.sampling_dtype, hw.device, needed)
    share = samples_per_rank(cfg)
    return min(share, most, saved or share)
