"""Log output of train.py: the paragraph at the start, and metrics and a line for steps and evaluations."""
from layers.lora import fingerprint
from runtime import distributed
from runtime.log import shown
from runtime.progress import duration
from runtime.options import non_default_options, rate_shown
from text.data import TokenFile
from text.perplexity import evaluation_line


def start_up(cfg, run, model, dataset, about, flops_per_token, num_workers, inherited):
    """Return the paragraph at the start of the log. model: TrainedModel. about: description of the data.
    inherited: options that init_from set."""
    hw = run.hardware
    gpt = run.model
    world = distributed.world_size()
    sequences = cfg.sequences
    micro_batch = run.state.micro_batch
    requested = min(cfg.batch_size, sequences // world)
    smaller = f" ({requested} does not fit)" if micro_batch < requested else ""
    accumulation = -(-sequences // (micro_batch * world))
    steps_left = run.num_steps - run.step
    epochs = steps_left / dataset.steps_per_epoch
    time_left = ""
    if model.rehearsed_s:
        seconds = model.rehearsed_s * accumulation * steps_left
        time_left = f", in about {duration(seconds)} without optimizer steps"
    tf32 = "on" if hw.tf32 else "off"
    compiled = "on" if hw.compile else "off"
    checkpointing = "on" if cfg.gradient_checkpointing else "off"
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    lines = [
        f"{gpt.n_params():,} parameters ({gpt.n_params(embeddings=False):,} without embeddings), "
        f"{flops_per_token / 1e6:,.1f} MFLOP per token.",
        f"{cfg.dataset}: {about}; steps {run.step} to {run.num_steps}: {epochs:.2f} epochs{time_left}.",
        f"{world} x {hw.name}, {hw.memory_size_gb():.0f} GiB, {hw.dtype}, TF32 {tf32}, attention "
        f"{hw.attention_name(gpt.config)}, compile {compiled}, checkpointing {checkpointing}, {num_workers} "
        f"loader processes; peak {shown(hw.peak_tflops, 'g', ' TFLOP/s')}, "
        f"{shown(hw.bandwidth, 'g', ' TB/s')}.",
        f"Micro-batch {micro_batch}{smaller} x accumulation {accumulation} x {ranks} = "
        f"{sequences} sequences of {dataset.longest} = {sequences * dataset.longest:,} tokens per step, at "
        f"most; {cfg.optimizer}, {cfg.lr_schedule} schedule, peak {rate_shown(cfg)}.",
        f"Non-default options: {non_default_options(cfg, inherited)}",
    ]
    return "\n".join(lines)


def facts(run, dataset, held_out, tokenizer, flops_per_token, teacher_loss):
    """Return the facts about model and data that doctor.diagnose and bench.py need. teacher_loss: the
    teacher's mean loss on the first micro-batch, None without one."""
    rows = {}
    if run.cfg.diagnose:
        from text import facts
        of_text = isinstance(held_out, TokenFile)
        rows = facts.facts_of_text(dataset.text, held_out, tokenizer) if of_text else \
            facts.facts_of_examples(dataset.examples, held_out, tokenizer)
    return rows | {
        "vocabulary": run.model.config.vocab_size,
        "parameters": run.model.n_params(),
        "steps_per_epoch": dataset.steps_per_epoch,
        "flops_per_token": flops_per_token,
        "teacher_loss": teacher_loss,
    }


def log_step(run, loss_sum, num_targets, lr, grad_norm, flops_per_token, figures):
    """Write a step's metrics and log line. Every rank must call. loss_sum: over this rank's targets.
    num_targets: of all ranks. figures: more metrics, {name: tensor [] or float}. Times are means over the
    steps since the last line."""
    hw = run.hardware
    state = run.state
    loss = distributed.sum_over_ranks([loss_sum])[0] / num_targets
    seconds = run.timings.total() / run.timed_steps
    tokens_per_s = run.timed_tokens / run.timed_steps / seconds
    mfu = hw.mfu(tokens_per_s / distributed.world_size(), flops_per_token)
    busy = hw.busy()
    used, peak = hw.memory_gb()
    timings = {f"{name}_s": total / run.timed_steps for name, total in run.timings.items()}
    figures = {name: float(value) for name, value in figures.items()}
    run.log.metrics(
        step=run.step, loss=loss, lr=lr, grad_norm=grad_norm, tokens=state.tokens, seconds=state.seconds,
        tokens_per_s=tokens_per_s, mfu=mfu, utilization=busy, joules=hw.joules(), memory_gb=used,
        peak_memory_gb=peak, reserved_memory_gb=hw.reserved_gb(), micro_batch=state.micro_batch,
        skipped_steps=state.skipped, moved=run.moved(fingerprint(run.model)), **figures, **timings)
    run.log.say(
        f"step {run.step}/{run.num_steps} | loss {loss:.4f} | lr {lr:.2e} | grad norm {grad_norm:.3f} | "
        f"{tokens_per_s:,.0f} tokens/s | MFU {shown(mfu, '.1%')} | busy {shown(busy, '.0%')} | {peak:.2f} "
        f"GiB | ETA {duration(seconds * (run.num_steps - run.step))}")
    run.reset_timings()


def log_validation(run, result):
    """Write an evaluation's metrics and log line."""
    best = " | best so far" if run.new_best else ""
    figures = {f"val_{name}": value for name, value in result.items()}
    run.log.metrics(step=run.step, tokens=run.state.tokens, seconds=run.state.seconds, **figures)
    run.log.say(f"step {run.step}/{run.num_steps} | {evaluation_line(result)}{best}")
