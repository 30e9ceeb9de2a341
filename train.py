"""Train a GPT on text, from scratch or from a checkpoint; fine-tune one on chosen answers (SFT, RFT).

    python train.py                                     a small model on generated text, on whatever machine this is
    python train.py --dataset=book.txt --out_dir=out/book
    python train.py config/cpu_small.py --learning_rate=0.02
    python train.py --init_from=resume --out_dir=out/book
    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json
    python train.py --init_from=HuggingFaceTB/SmolLM2-360M --dataset=book.txt --lora_rank=16 --optimizer=adamw --learning_rate=2e-4
    torchrun --nproc_per_node=2 train.py config/...

Knobs, as --key=value:
"""
import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import hf
from eval import evaluation_line, examples_loss, text_loss
from model import GPT, GPTConfig, blank
from runtime import checkpoint, config, data, distributed, examples, guard, hardware, memory, optim
from runtime.config import BadInput
from runtime.log import Log, check_installed, duration, shown
from runtime.state import State, adapt, check_task, check_training
from runtime.tokenizer import Tokenizer


@dataclass
class Config:
    # the run
    out_dir: str = "out/base"                # run folder: config, weights, metrics.jsonl, training.log
    init_from: str = "scratch"               # scratch, resume (the run in out_dir), a run folder, a Hugging Face folder or hub name
    overwrite: bool = False                  # replace the run that out_dir holds
    seed: int = 0
    eval_only: bool = False                  # evaluate once and exit; nothing is written
    # data
    dataset: str = "task:unit_conversion"    # text: task:NAME, a path (.txt .jsonl .parquet, a folder), wikitext, or org/name:config;
                                             # examples: .json or .jsonl of questions with chosen answers (runtime/examples.py)
    text_key: str = "text"                   # where the text is in .jsonl, .parquet, or a dataset of the hub
    prompt: str | None = None                # examples of .json: the form of a question, with {} in it; None: as datagen.py asked
    valid_share: float = 0.0                 # examples: of their questions, held out for a validation loss
    tokenizer: str | None = None             # bytes, gpt2, or a folder with a tokenizer.json; None: the model's own, or bytes
    data_dir: str = "data"                   # where tokenised texts are kept
    block_size: int = 256                    # context, tokens; with init_from the model's, at most 1024
    # model
    n_layer: int = 4
    n_head: int = 2
    n_embd: int = 128                        # channels of the residual stream
    n_kv_head: int | None = None             # key/value heads; None: n_head
    head_dim: int | None = None              # channels a head; None: n_embd / n_head
    mlp_hidden: int | None = None            # None: 4 n_embd, or 8/3 n_embd with swiglu
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    position: Literal["rope", "learned"] = "rope"
    qk_norm: bool = True                     # RMSNorm of queries and keys
    mlp: Literal["relu2", "gelu", "gelu_tanh", "swiglu"] = "relu2"
    bias: bool = False                       # of all linear layers
    tied_head: bool = False                  # the head shares the embedding's weights
    logit_softcap: float = 0.0               # e.g. 15; 0: off
    dropout: float = 0.0                     # 0.1-0.2 where the text is seen many times
    lora_rank: int = 0                       # e.g. 16: train adapters of that rank beside the frozen weights of init_from; 0: off
    lora_alpha: float | None = None          # their scale is alpha / rank; None: 2 lora_rank
    lora_linears: str = "qkv,out,up,gate,down"       # which linear layers of a block get one
    # batch: sequences of an optimizer step = batch_size * gradient_accumulation_steps on any number of ranks
    batch_size: int = 32                     # sequences a micro-step, at most: halved while they don't fit the memory
    gradient_accumulation_steps: int = 1     # micro-steps an optimizer step, all ranks together
    max_steps: int | None = None             # optimizer steps, at most
    num_epochs: float | None = None          # passes over the data, at most; neither given: 300 steps of a text, 3 passes over examples
    patience: int = 0                        # stop after so many evaluations in a row without a new best; 0: never
    # optimizer
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 0.01              # peak; muon's update has AdamW's size, so the scale is AdamW's
    min_lr: float = 0.0                      # where the schedule ends
    warmup_steps: int | None = 10            # None: a tenth of the steps, at most 50
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "wsd"
    cooldown: float = 0.4                    # wsd: the share of steps in which the rate falls
    weight_decay: float = 0.0                # on matrices
    beta1: float = 0.9
    beta2: float = 0.95
    muon_momentum: float = 0.9
    grad_clip: float = 1.0                   # norm of the whole gradient; 0: off
    fused_adamw: bool = True
    # speed and memory
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"     # of matrix products; weights are fp32
    tf32: bool = True                        # fp32 products on tensor cores
    compile: bool | None = None              # torch.compile; None: for texts on a GPU (on a CPU it pays from about five minutes on)
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "math"] = "auto"
    gradient_checkpointing: bool = False     # recompute blocks in the backward pass: less memory, a second forward
    loss_chunks: int = 0                     # pieces in which head and loss are computed; 0: by size
    deterministic: bool = False              # refuse kernels whose result varies from run to run
    keep_memory: bool = True                 # on a CPU, freed tensors' memory stays in the process: no page faults
    num_workers: int | None = None           # loader processes; None: 2 on a GPU, 0 elsewhere
    pin_memory: bool = True                  # page-locked batches, on a GPU
    prefetch: int = 2                        # steps each loader process is ahead
    # evaluation, log, checkpoints
    eval_interval: int = 100                 # steps; also after the last
    eval_tokens: int | None = None           # None: the whole validation split
    log_interval: int = 10                   # steps
    save_interval: int = 100                 # steps; also after the last, at a new best, after each epoch of examples, when asked to stop
    keep_last: int = 2                       # checkpoints, beside the best
    save_only_model: bool = False            # weights alone: a third of the size, no resume
    tensorboard: bool = False                # curves in out_dir/tensorboard too
    wandb: bool = False                      # and at Weights & Biases (project: WANDB_PROJECT, or nanorft)

    @property
    def sequences(self):
        """Of an optimizer step, all ranks together."""
        return self.batch_size * self.gradient_accumulation_steps


ARCHITECTURE = "n_layer n_head n_embd n_kv_head head_dim mlp_hidden norm position qk_norm mlp bias tied_head logit_softcap".split()
LORA = ["lora_rank", "lora_alpha", "lora_linears"]
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")           # these compile modes record the step, and can't accumulate gradients


def check(cfg):
    config.at_least(cfg, 1, "block_size n_layer n_head n_embd n_kv_head head_dim mlp_hidden batch_size max_steps eval_tokens "
                            "gradient_accumulation_steps eval_interval log_interval save_interval keep_last prefetch")
    config.at_least(cfg, 0, "seed logit_softcap dropout learning_rate min_lr warmup_steps weight_decay beta1 "
                            "beta2 muon_momentum grad_clip loss_chunks num_workers cooldown patience lora_rank valid_share num_epochs")
    config.below(cfg, 1, "dropout beta1 beta2 muon_momentum valid_share")
    config.at_most(cfg, 1, "cooldown")
    config.at_most(cfg, 256, "num_workers prefetch")
    check_training(cfg)
    if cfg.prompt is not None and "{}" not in cfg.prompt:
        raise BadInput(f"--prompt={cfg.prompt} has no place for the question: put {{}} into it.")
    if cfg.num_epochs == 0:
        raise BadInput("--num_epochs=0 would train nothing: it must be above 0.")
    if cfg.lora_rank and cfg.init_from == "scratch":
        raise BadInput("Adapters need a model to stand beside: name it with --init_from=, or leave --lora_rank out.")
    if cfg.init_from not in ("scratch", "resume") and Path(cfg.out_dir).resolve() == Path(cfg.init_from).resolve():
        raise BadInput(f"{cfg.out_dir} holds the model to start from: choose another --out_dir=, or continue its run with "
                       "--init_from=resume.")
    if cfg.sequences > 2**20:
        raise BadInput(f"--batch_size={cfg.batch_size} x --gradient_accumulation_steps={cfg.gradient_accumulation_steps} "
                       "is more than 2**20 sequences a step: lower one of them.")
    if cfg.sequences % distributed.world_size():
        raise BadInput(f"{distributed.world_size()} ranks can't share the {cfg.sequences} sequences of a step evenly: change "
                       "--batch_size or --gradient_accumulation_steps.")
    if cfg.gradient_accumulation_steps > distributed.world_size() and cfg.compile_mode in CUDA_GRAPHS:
        raise BadInput(f"--compile_mode={cfg.compile_mode} uses CUDA graphs, which can't accumulate gradients: use default or "
                       "max-autotune-no-cudagraphs, or one micro-step a rank.")


def knobs_of(model):
    """The knobs that a model to start from settles, or block_size suggests: a run's, or those that describe Hugging Face's files."""
    knobs = [*ARCHITECTURE, "block_size"]
    saved = config.read_saved(model) if (Path(model) / "model.json").exists() else {}
    if not saved.keys() >= set(knobs):                        # Hugging Face's, or a run of grpo.py
        shape = distributed.on_main(lambda: hf.find(model)).config
        described = {k: getattr(shape, k, shape.qkv_bias) for k in ARCHITECTURE}
        saved = described | {"block_size": min(1024, shape.block_size)} | saved
    return {k: saved[k] for k in knobs}


def architecture(cfg, tokenizer):
    knobs = {k: getattr(cfg, k) for k in ARCHITECTURE + ["block_size", "dropout"] if k != "bias"}
    try:
        return GPTConfig(vocab_size=tokenizer.n_vocab, qkv_bias=cfg.bias, o_bias=cfg.bias, mlp_bias=cfg.bias, **knobs)
    except ValueError as e:
        raise BadInput(f"{e}: change one of them.") from None


def shape_of(cfg, hw, tokenizer, found):
    """GPTConfig of the model; BadInput for one that can't be made."""
    shape = dataclasses.replace(found.config, dropout=cfg.dropout) if found else architecture(cfg, tokenizer)
    if cfg.block_size > shape.block_size:
        raise BadInput(f"--block_size={cfg.block_size} is more than the {shape.block_size} positions of the model: lower it.")
    memory.check_weights(shape, hw.device)
    return shape


def build_model(cfg, hw, shape, found, resuming):
    """The GPT on its device: drawn, or with the weights of what was found; of a run that is resumed they come later."""
    knobs = hw.attention, cfg.gradient_checkpointing, cfg.loss_chunks
    model = blank(shape, *knobs, device=hw.device) if found else GPT(shape, *knobs).to(hw.device)
    if found and not resuming:
        found.fill(model)
    adapt(cfg, model, hw.device, resuming)
    return model


def starting_point(cfg):
    """hf.Found to begin from, or None. config.load has taken over that model's architecture and tokenizer."""
    if cfg.init_from == "scratch":
        return None
    return hf.to_resume(cfg.out_dir, cfg.eval_only) if cfg.init_from == "resume" else hf.find(cfg.init_from)


def open_data(cfg, tokenizer):
    """(batches to train on; function of the model, the micro-batch and the hardware that gives the validation loss, None without
    validation data; what is said of the data)."""
    rank, world = distributed.rank(), distributed.world_size()
    if not examples.are(cfg.dataset, cfg.text_key):
        folder = distributed.on_main(lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key))
        batches = data.Windows(data.TokenFile(folder, "train"), cfg.block_size, cfg.sequences, cfg.seed, rank, world)
        valid = data.TokenFile(folder, "valid")
        if len(valid) < 2:
            raise BadInput(f"The validation text of {cfg.dataset} has no token to predict: give more text.")
        return batches, lambda model, micro_batch, hw: text_loss(model, valid, cfg.block_size, micro_batch, hw, cfg.eval_tokens), \
            f"{len(batches.text):,} training tokens, {len(valid):,} for validation"
    found = distributed.on_main(lambda: examples.read(cfg.dataset, tokenizer, cfg.prompt))
    short = [e for e in found if e.length <= cfg.block_size]
    train, held_out = examples.hold_out(short, cfg.valid_share, cfg.seed)
    batches = examples.Batches(train, cfg.sequences, cfg.batch_size, cfg.seed, rank, world)
    about = (f"{len(train):,} examples of {batches.longest} tokens at most, {sum(int(e.trained[1:].sum()) for e in train):,} trained "
             f"on; {len(held_out):,} for validation; {len(found) - len(short):,} longer than --block_size={cfg.block_size} left out")
    return batches, (lambda model, micro_batch, hw: examples_loss(model, held_out, micro_batch, hw)) if held_out else None, about


def number_of_steps(cfg, batches):
    """Optimizer steps of the whole run."""
    text, limits = isinstance(batches, data.Windows), []
    if cfg.max_steps is not None:
        limits.append(cfg.max_steps)
    if cfg.num_epochs is not None or not (text or limits):
        limits.append(math.ceil((3 if cfg.num_epochs is None else cfg.num_epochs) * batches.steps_per_epoch))
    return max(1, min(limits or [300]))


def start_up(cfg, hw, model, batches, about, now, steps):
    """The paragraph that says what is about to happen, on what."""
    world, sequences = distributed.world_size(), cfg.sequences
    micro, asked = now.micro_batch, min(cfg.batch_size, sequences // world)
    return (
        f"{model.n_params():,} parameters ({model.n_params(embeddings=False):,} without embeddings), "
        f"{model.flops_per_token(batches.longest) / 1e6:,.1f} MFLOP a token.\n"
        f"{cfg.dataset}: {about}; steps {now.step} to {steps} see {(steps - now.step) / batches.steps_per_epoch:.2f} epochs.\n"
        f"{world} x {hw.name}, {hw.memory_size_gb():.0f} GiB, {hw.dtype}, TF32 {'on' if hw.tf32 else 'off'}, attention "
        f"{hw.attention_kernel}, compile {'on' if hw.compile else 'off'}, checkpointing "
        f"{'on' if cfg.gradient_checkpointing else 'off'}, {workers(cfg, hw)} loader processes; peak "
        f"{shown(hw.peak_tflops, 'g', ' TFLOP/s')}, {shown(hw.bandwidth, 'g', ' TB/s')}.\n"
        f"Micro-batch {micro}{f' (for {asked}, which does not fit)' if micro < asked else ''} x accumulation "
        f"{-(-sequences // (micro * world))} x {world} rank{'s' if world > 1 else ''} = {sequences} sequences of "
        f"{batches.longest} = {sequences * batches.longest:,} tokens a step, at most; {cfg.optimizer}, {cfg.lr_schedule} schedule, peak "
        f"learning rate {cfg.learning_rate:g}.\n"
        f"Not by default: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(cfg).items() if v != getattr(Config, k)) or '-'}")


def workers(cfg, hw):
    return cfg.num_workers if cfg.num_workers is not None else 2 if hw.device.type == "cuda" else 0


def compile_and_fit(cfg, hw, model, optimizers, batches, micro_batch, say):
    """(model as the loop calls it, micro-batch that fits), found by rehearsing a step on every rank. Without torch.compile
    where that fails; with half the micro-batch, and again, while memory runs out on one of them."""
    share = cfg.sequences // distributed.world_size()

    def attempt(micro_batch):
        passes, mode = min(2, -(-share // micro_batch)), cfg.compile_mode
        if mode == "default" or passes > 1 and mode in CUDA_GRAPHS:
            mode = None
        dynamic = isinstance(batches, examples.Batches) and (None if cfg.gradient_checkpointing else True)     # which that breaks (torch 2.13)
        fast = distributed.TrainedModel(model, hw.compile, mode, dynamic)
        return fast, memory.rehearse(fast, hw, micro_batch, batches.longest, passes, optim.state_to_come(optimizers))
    return memory.fit(hw, micro_batch, attempt, lambda n: memory.smaller(n, share) if n > 1 else None,
                      lambda: memory.advice(model, hw, batches.longest, optim.state_to_come(optimizers)), say)


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, frozen=ARCHITECTURE + LORA, saved_of=knobs_of)
    check(cfg)
    distributed.on_main(lambda: check_task(cfg, argv))
    check_installed(cfg.tensorboard, cfg.wandb)
    rank, world = distributed.rank(), distributed.world_size()
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic,
                        cfg.keep_memory)

    # Data and model. A model to start from settles architecture and tokenizer.
    found, resuming = distributed.on_main(lambda: starting_point(cfg)), cfg.init_from == "resume" and not cfg.eval_only
    tokenizer = found.tokenizer(cfg.tokenizer) if found else Tokenizer(cfg.tokenizer or "bytes")
    cfg.tokenizer = tokenizer.describe()["name"]
    shape = shape_of(cfg, hw, tokenizer, found)           # before minutes are spent on a text
    batches, validate, about = open_data(cfg, tokenizer)
    if cfg.patience and not validate:
        raise BadInput("--patience needs a validation loss: hold out examples with --valid_share=, or leave it out.")
    if cfg.compile is None and isinstance(batches, examples.Batches):
        hw.compile = False                                # lengths differ from step to step, and each would be compiled anew
    steps = number_of_steps(cfg, batches)
    warmup = min(50, steps // 10) if cfg.warmup_steps is None else cfg.warmup_steps
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, hw, shape, found, resuming)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2),
                             cfg.fused_adamw, cfg.muon_momentum)
    state = State(cfg, hw, model, optimizers, micro_batch=min(cfg.batch_size, cfg.sequences // world))
    now = state.progress
    now.data = batches.digest
    if resuming:
        state.restore(found.step)
        if now.data != batches.digest:
            raise BadInput(f"{cfg.dataset} has changed since the run in {cfg.out_dir} was stopped, so it can't go on exactly: put the file "
                           f"and its log back, or start a new run with --init_from={cfg.out_dir} and another --out_dir=.")
        now.micro_batch = memory.after_retreat(cfg, now.micro_batch)
    if cfg.eval_only:
        if not validate:
            raise BadInput("No example is held out to evaluate on: say how many with --valid_share=.")
        result = validate(model, now.micro_batch, hw)
        if rank == 0:
            print(evaluation_line(result))
        return 0
    distributed.on_main(lambda: state.open_run(tokenizer, resuming))
    log = Log(cfg.out_dir, now.step if resuming else None, cfg.tensorboard, cfg.wandb, dataclasses.asdict(cfg))
    fast, now.micro_batch = compile_and_fit(cfg, hw, model, optimizers, batches, now.micro_batch, log.say)
    log.say(start_up(cfg, hw, model, batches, about, now, steps))
    log.metrics(step=now.step, config=dataclasses.asdict(cfg), settings=hw.settings | {"ranks": world, "num_workers": workers(cfg, hw)})
    fast.share_gradients()

    def out_of_patience():
        return cfg.patience and now.stale >= cfg.patience

    def load_from(step):
        batches.micro_batch = now.micro_batch
        return data.batches(batches, range(step, steps), workers(cfg, hw), cfg.pin_memory and hw.device.type == "cuda", cfg.prefetch)

    stop, loader = guard.StopSignal(), load_from(now.step)
    flops_per_token = model.flops_per_token(batches.longest)
    spent = dict(data=0.0, forward_backward=0.0, optimizer=0.0)
    timed_steps = timed_tokens = 0
    while now.step < steps and not out_of_patience():
        # One optimizer step.
        t0 = time.perf_counter()
        micro_steps = [(x.to(hw.device, non_blocking=True), y.to(hw.device, non_blocking=True)) for x, y in next(loader)]
        tokens, targets = batches.tokens(now.step)        # of all micro-steps and ranks; the second is the normaliser
        t1 = time.perf_counter()
        nats, out_of_memory = torch.zeros((), device=hw.device), None
        try:
            for i, (mx, my) in enumerate(fast.micro_steps(micro_steps)):
                if cfg.dropout:
                    torch.manual_seed(hash((cfg.seed, now.step, rank, i)))     # so that a resumed run drops the same
                with hw.autocast():
                    loss = fast.loss(mx, my)              # summed over the micro-batch
                state.scaler.scale(loss / targets).backward()
                nats += loss.detach()
            nats = nats.item()                            # waits for the device: what follows is the optimizer's time
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            out_of_memory = f"{error}".partition("\n")[0]
        if out_of_memory is not None:                     # one process repeats the step; of several, this one ends here
            loss = None                                   # it and the exception, now gone, hold the step's tensors
            now.micro_batch = memory.retreat(cfg, now.step, now.micro_batch, out_of_memory, log.say)
            fast, now.micro_batch = compile_and_fit(cfg, hw, model, optimizers, batches, now.micro_batch, log.say)
            loader = load_from(now.step)
            continue
        t2 = time.perf_counter()
        lr = now.lr_factor * optim.lr_at(now.step, steps, cfg.learning_rate, cfg.min_lr, warmup, cfg.lr_schedule, cfg.cooldown)
        grad_norm, finite = optim.apply_step(optimizers, state.scaler, lr, cfg.grad_clip)
        stopping = stop.requested()                       # one small exchange between the ranks
        if (now.step + 1) % cfg.log_interval == 0:
            hw.wait()                                     # else the log's own time would hide the optimizer's
        t3 = time.perf_counter()
        now.step += 1
        now.tokens += tokens
        now.seconds += t3 - t0
        for key, seconds in zip(spent, (t1 - t0, t2 - t1, t3 - t2)):
            spent[key] += seconds
        timed_steps, timed_tokens = timed_steps + 1, timed_tokens + tokens

        # Gradients that are not finite have moved nothing: skip the step, go back, or give up.
        verdict = state.nonfinite.after(finite, state.scaler.get_scale())
        if verdict != "ok":
            now.skipped += 1
            log.say(f"step {now.step}: the gradients are not finite; the step is skipped.")
        if verdict == "rollback" and state.roll_back(log.say):
            log.forget_after(now.step)
            loader = load_from(now.step)
            continue
        if verdict in ("rollback", "stop"):
            path = guard.keep_batch(cfg.out_dir, now.step, micro_batches=micro_steps)
            log.say(f"Training diverged: {state.nonfinite.patience} steps in a row without finite gradients, again after going "
                    f"back or with no checkpoint to go back to. The last batch is in {path}; lower --learning_rate.")
            return 1

        # Log, evaluate, save, stop.
        step, last = now.step, now.step == steps
        if step % cfg.log_interval == 0 or step == 1 or last:
            loss = distributed.sum([nats])[0] / targets
            seconds = sum(spent.values()) / timed_steps
            tokens_per_s = timed_tokens / timed_steps / seconds
            mfu, busy, (used, peak) = hw.mfu(tokens_per_s / world, flops_per_token), hw.busy(), hw.memory_gb()
            log.metrics(step=step, loss=loss, lr=lr, grad_norm=grad_norm, tokens=now.tokens, seconds=now.seconds,
                        tokens_per_s=tokens_per_s, mfu=mfu, utilization=busy, memory_gb=used, peak_memory_gb=peak,
                        micro_batch=now.micro_batch, skipped_steps=now.skipped,
                        **{f"{key}_s": value / timed_steps for key, value in spent.items()})
            log.say(f"step {step}/{steps} | loss {loss:.4f} | lr {lr:.2e} | grad norm {grad_norm:.3f} | "
                    f"{tokens_per_s:,.0f} tokens/s | MFU {shown(mfu, '.1%')} | busy {shown(busy, '.0%')} | {peak:.2f} GB | "
                    f"ETA {duration(seconds * (steps - step))}")
            spent, timed_steps, timed_tokens = dict.fromkeys(spent, 0.0), 0, 0
        if stopping:                                      # first of all: whoever asked may not wait for an evaluation
            state.save()
        val_loss, new_best = None, False
        if validate and (step % cfg.eval_interval == 0 or last):
            result = validate(fast, now.micro_batch, hw)
            val_loss = result["loss"]
            new_best = distributed.on_main(lambda: val_loss < checkpoint.best_loss(cfg.out_dir, step - 1))
            now.stale = 0 if new_best else now.stale + 1
            log.metrics(step=step, tokens=now.tokens, seconds=now.seconds, **{f"val_{k}": v for k, v in result.items()})
            log.say(f"step {step}/{steps} | {evaluation_line(result)}{' | best so far' if new_best else ''}")
        epoch_ends = isinstance(batches, examples.Batches) and step % batches.steps_per_epoch == 0
        if step % cfg.save_interval == 0 or last or new_best or epoch_ends or out_of_patience() or stopping and val_loss is not None:
            state.save(val_loss)
        if stopping:
            how = f"--init_from={cfg.out_dir}" if cfg.save_only_model else f"--init_from=resume --out_dir={cfg.out_dir}"
            log.say(f"Stopped as asked after step {step}, and saved. Go on with {how}")
            return stop.exit_code()
    if out_of_patience():
        log.say(f"Stopped early after step {now.step}: {now.stale} evaluations without a better loss than that of step "
                f"{checkpoint.best(cfg.out_dir)}, whose weights are kept.")
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
