"""Train a GPT on text, from scratch or from a checkpoint.

    python train.py                                     a small model on generated text, on whatever machine this is
    python train.py --dataset=book.txt --out_dir=out/book
    python train.py config/cpu_small.py --learning_rate=0.02
    python train.py --init_from=resume --out_dir=out/book
    torchrun --nproc_per_node=2 train.py config/...

Knobs, as --key=value:
"""
import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import tasks
from eval import text_loss
from model import GPT, GPTConfig
from runtime import checkpoint, config, data, distributed, guard, hardware, optim
from runtime.config import BadInput
from runtime.log import Log, duration, shown
from runtime.tokenizer import Tokenizer


@dataclass
class Config:
    # the run
    out_dir: str = "out/base"                # run folder: config, weights, metrics.jsonl, training.log
    init_from: str = "scratch"               # scratch, resume (the run in out_dir), or another run's folder
    overwrite: bool = False                  # replace the run that out_dir holds
    seed: int = 0
    eval_only: bool = False                  # evaluate once and exit; nothing is written
    # data
    dataset: str = "task:unit_conversion"    # task:NAME, a .txt file, a folder with train/valid .txt, or with nanoGPT's .bin
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    data_dir: str = "data"                   # where tokenised texts are kept
    block_size: int = 256                    # context, tokens
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
    # batch: tokens of an optimizer step = batch_size * gradient_accumulation_steps * block_size on any number of ranks
    batch_size: int = 32                     # sequences a micro-step, at most
    gradient_accumulation_steps: int = 1     # micro-steps an optimizer step, all ranks together
    max_steps: int = 300                     # optimizer steps
    # optimizer
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 0.01              # peak; muon's update has AdamW's size, so the scale is AdamW's
    min_lr: float = 0.0                      # where the schedule ends
    warmup_steps: int = 10
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
    compile: bool | None = None              # torch.compile; None: on a GPU (on a CPU it pays from about two minutes on)
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
    save_interval: int = 100                 # steps; also after the last, at a new best, and when asked to stop
    keep_last: int = 2                       # checkpoints, beside the best
    save_only_model: bool = False            # weights alone: a third of the size, no resume


ARCHITECTURE = ("block_size n_layer n_head n_embd n_kv_head head_dim mlp_hidden norm position qk_norm mlp bias tied_head "
                "logit_softcap").split()


def check(cfg):
    config.at_least(cfg, 1, "block_size n_layer n_head n_embd n_kv_head head_dim mlp_hidden batch_size max_steps eval_tokens "
                            "gradient_accumulation_steps eval_interval log_interval save_interval keep_last prefetch")
    config.at_least(cfg, 0, "seed logit_softcap dropout learning_rate min_lr warmup_steps weight_decay beta1 "
                            "beta2 muon_momentum grad_clip loss_chunks num_workers cooldown")
    config.below(cfg, 1, "dropout beta1 beta2 muon_momentum")
    config.at_most(cfg, 1, "cooldown")
    config.at_most(cfg, 2**63 - 1, "seed")
    if cfg.batch_size * cfg.gradient_accumulation_steps % distributed.world_size():
        raise BadInput(f"{distributed.world_size()} ranks can't share the {cfg.batch_size * cfg.gradient_accumulation_steps} "
                       "sequences of a step evenly: change --batch_size or --gradient_accumulation_steps.")
    if cfg.gradient_accumulation_steps > distributed.world_size() and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        raise BadInput(f"--compile_mode={cfg.compile_mode} uses CUDA graphs, which can't accumulate gradients: use default or "
                       "max-autotune-no-cudagraphs, or one micro-step a rank.")


def architecture(cfg, tokenizer):
    knobs = {k: getattr(cfg, k) for k in ARCHITECTURE + ["dropout"] if k != "bias"}
    try:
        return GPTConfig(vocab_size=tokenizer.n_vocab, qkv_bias=cfg.bias, o_bias=cfg.bias, mlp_bias=cfg.bias, **knobs)
    except ValueError as e:
        raise BadInput(f"{e}: change one of them.") from None


def prepare_data(cfg, tokenizer):
    """The folder of token files, made by the first rank while the others wait."""
    documents = None
    if cfg.dataset.startswith("task:"):
        try:
            documents = tasks.load(cfg.dataset[5:]).documents
        except LookupError as e:
            raise BadInput(str(e)) from None
    return distributed.on_main(lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, documents))


def starting_point(cfg):
    """(run folder, step) to begin from, or None. config.load has taken over that run's architecture and tokenizer."""
    if cfg.init_from == "scratch":
        return None
    if cfg.init_from == "resume":
        step = checkpoint.newest_intact(cfg.out_dir)
        if step is None:
            raise BadInput(f"{cfg.out_dir} has no intact checkpoint to resume from: start again with --overwrite.")
        if not checkpoint.has_state(cfg.out_dir, step) and not cfg.eval_only:
            raise BadInput(f"The checkpoint of step {step} in {cfg.out_dir} holds the weights alone (save_only_model), which is "
                           f"not enough to resume: start a new run with --init_from={cfg.out_dir} and another --out_dir=.")
        return cfg.out_dir, step
    return cfg.init_from, checkpoint.choose(cfg.init_from)


def evaluation_line(result):
    return (f"val loss {result['val_loss']:.4f} | perplexity {result['val_ppl_token']:.2f} a token, "
            f"{shown(result.get('val_ppl_word'), '.2f')} a word | {shown(result.get('val_bits_per_byte'), '.4f')} bits/byte")


def start_up(cfg, hw, model, windows, valid_text, step):
    """The paragraph that says what is about to happen, on what."""
    world, sequences = distributed.world_size(), cfg.batch_size * cfg.gradient_accumulation_steps
    micro = min(cfg.batch_size, sequences // world)
    return (
        f"{model.n_params():,} parameters ({model.n_params(embeddings=False):,} without embeddings), "
        f"{model.flops_per_token(cfg.block_size) / 1e6:,.1f} MFLOP a token.\n"
        f"{cfg.dataset}: {len(windows.tokens):,} training tokens, {len(valid_text):,} for validation; steps {step} to "
        f"{cfg.max_steps} see {(cfg.max_steps - step) * sequences * cfg.block_size / len(windows.tokens):.2f} epochs.\n"
        f"{world} x {hw.name}, {hw.dtype}, TF32 {'on' if hw.tf32 else 'off'}, attention {hw.attention_kernel}, compile "
        f"{'on' if hw.compile else 'off'}, checkpointing {'on' if cfg.gradient_checkpointing else 'off'}, "
        f"{workers(cfg, hw)} loader processes; peak {shown(hw.peak_tflops, 'g', ' TFLOP/s')}.\n"
        f"Micro-batch {micro} x accumulation {-(-sequences // (micro * world))} x {world} rank{'s' if world > 1 else ''} = "
        f"{sequences} sequences of {cfg.block_size} = {sequences * cfg.block_size:,} tokens a step; {cfg.optimizer}, "
        f"{cfg.lr_schedule} schedule, peak learning rate {cfg.learning_rate:g}.\n"
        f"Not by default: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(cfg).items() if v != getattr(Config, k)) or '-'}")


def workers(cfg, hw):
    return cfg.num_workers if cfg.num_workers is not None else 2 if hw.device.type == "cuda" else 0


def compiled(model, mode, hw, x, y, say):
    """torch.compile'd model, or the model itself where a trial step shows that compiling fails."""
    fast = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
    try:
        with hw.autocast():
            fast(x, y).backward()
            with torch.no_grad():
                fast.eval()(x, y)
        failure = None
    except Exception as e:                              # a missing C++ compiler, an unsupported card, ...
        failure = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"
    model.train().zero_grad(set_to_none=True)
    if distributed.any(failure is not None):
        say(f"torch.compile failed, training goes on without it ({failure or 'on another rank'}).")
        return model
    return fast


def main(argv):
    cfg = config.load(Config, argv, frozen=ARCHITECTURE + ["tokenizer"])
    check(cfg)
    distributed.init()
    rank, world = distributed.rank(), distributed.world_size()
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic,
                        cfg.keep_memory)

    # Data and model. A run folder to start from settles the architecture.
    start, resuming = distributed.on_main(lambda: starting_point(cfg)), cfg.init_from == "resume"
    tokenizer = Tokenizer(cfg.tokenizer)
    folder = prepare_data(cfg, tokenizer)
    sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    windows = data.Windows(data.TokenFile(folder, "train"), cfg.block_size, sequences, cfg.seed, rank, world)
    valid_text = data.TokenFile(folder, "valid")
    if len(valid_text) < 2:
        raise BadInput(f"The validation text of {cfg.dataset} has no token to predict: give more text.")
    torch.manual_seed(cfg.seed)
    model = GPT(architecture(cfg, tokenizer), hw.attention, cfg.gradient_checkpointing, cfg.loss_chunks).to(hw.device)
    optimizers = optim.build(model, cfg.optimizer, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2),
                             cfg.fused_adamw, cfg.muon_momentum)
    scaler, nonfinite, lr_factor, skipped = hw.scaler(), guard.NonFinite(), 1.0, 0

    def restore(out_dir, step, whole=True):
        """Model (and, if whole, all that training needs to go on) as they were after `step` steps."""
        nonlocal lr_factor, scaler, skipped
        model.load_state_dict(checkpoint.load_weights(out_dir, step, hw.device))
        if not whole:
            return
        state = checkpoint.load_state(out_dir, step)
        if state["optimizer"] != cfg.optimizer:
            raise BadInput(f"optimizer={cfg.optimizer} can't go on from the state of {state['optimizer']}: leave it out.")
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            knobs = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, given in zip(optimizer.param_groups, knobs):           # a knob given on resume counts
                group.update(given)
        lr_factor, skipped, nonfinite.rolled_back = state["lr_factor"], state["skipped"], state["rolled_back"]
        nonfinite.in_a_row = state["in_a_row"]
        if nonfinite.rolled_back:
            hw.dtype = state["dtype"]
        scaler = hw.scaler()
        scaler.load_state_dict(state["scaler"])

    def save(step, val_loss=None):
        state = {"optimizer": cfg.optimizer, "optimizers": [o.state_dict() for o in optimizers], "lr_factor": lr_factor,
                 "scaler": scaler.state_dict(), "dtype": hw.dtype, "skipped": skipped, "in_a_row": nonfinite.in_a_row,
                 "rolled_back": nonfinite.rolled_back}
        distributed.on_main(lambda: checkpoint.save(
            cfg.out_dir, step, model.state_dict(), None if cfg.save_only_model else state, val_loss, cfg.keep_last,
            dataclasses.asdict(cfg)))

    if start:
        restore(*start, whole=resuming and not cfg.eval_only)
    step = start[1] if resuming else 0
    if cfg.eval_only:
        result = text_loss(model, valid_text, cfg.block_size, cfg.batch_size, hw, cfg.eval_tokens)
        if rank == 0:
            print(evaluation_line(result))
        return 0
    distributed.on_main(lambda: checkpoint.open_run(cfg.out_dir, dataclasses.asdict(cfg), {
        "architecture": dataclasses.asdict(model.config), "tokenizer": tokenizer.describe(), "prompt_template": "{prompt}",
    }, cfg.overwrite, resume=resuming))
    log = Log(cfg.out_dir, step if resuming else None)
    log.say(start_up(cfg, hw, model, windows, valid_text, step))
    log.metrics(step=step, config=dataclasses.asdict(cfg))

    fast = model                                          # compiled, if that works; the same weights
    if hw.compile:
        x, y = (t[:cfg.batch_size].to(hw.device) for t in windows[step])
        fast = compiled(model, cfg.compile_mode, hw, x, y, log.say)
    ddp = fast if world == 1 else DistributedDataParallel(
        fast, device_ids=[hw.device.index] if hw.device.type == "cuda" else None, gradient_as_bucket_view=True)

    def load_from(step):
        return data.batches(windows, range(step, cfg.max_steps), workers(cfg, hw),
                            cfg.pin_memory and hw.device.type == "cuda", cfg.prefetch)

    def roll_back():
        """To the newest checkpoint, with half the learning rate and without fp16: its step; None if there is none."""
        nonlocal lr_factor, scaler
        saved = distributed.on_main(lambda: checkpoint.newest_intact(cfg.out_dir, log.say))
        if saved is None or not checkpoint.has_state(cfg.out_dir, saved):
            return None
        restore(cfg.out_dir, saved)
        nonfinite.rolled_back, lr_factor = True, lr_factor / 2
        if hw.dtype == "fp16":
            hw.dtype = "bf16" if hw.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8 else "fp32"
            scaler = hw.scaler()
        log.forget_after(saved)
        log.say(f"Back to the checkpoint of step {saved}, once, with half the learning rate and {hw.dtype}.")
        return saved

    stop, loader = guard.StopSignal(), load_from(step)
    targets = sequences * cfg.block_size                  # of an optimizer step, all micro-steps and ranks: the normaliser
    flops_per_token = model.flops_per_token(cfg.block_size)
    spent, timed_steps = dict(data=0.0, forward_backward=0.0, optimizer=0.0), 0
    while step < cfg.max_steps:
        # One optimizer step.
        t0 = time.perf_counter()
        x, y = (t.to(hw.device, non_blocking=True) for t in next(loader))
        micro_steps = list(zip(x.split(cfg.batch_size), y.split(cfg.batch_size)))
        t1 = time.perf_counter()
        nats = torch.zeros((), device=hw.device)
        for i, (mx, my) in enumerate(micro_steps):
            if cfg.dropout:
                torch.manual_seed(hash((cfg.seed, step, rank, i)))             # so that a resumed run drops the same
            ddp.require_backward_grad_sync = i == len(micro_steps) - 1         # DDP: one exchange of gradients a step
            with hw.autocast():
                loss = ddp(mx, my)                        # summed over the micro-batch
            scaler.scale(loss * (world / targets)).backward()                  # DDP averages over ranks, hence world
            nats += loss.detach()
        nats = nats.item()                                # waits for the device: what follows is the optimizer's time
        t2 = time.perf_counter()
        lr = lr_factor * optim.lr_at(step, cfg.max_steps, cfg.learning_rate, cfg.min_lr, cfg.warmup_steps, cfg.lr_schedule,
                                     cfg.cooldown)
        grad_norm, finite = optim.apply_step(optimizers, scaler, lr, cfg.grad_clip)
        stopping = stop.requested()                       # one small exchange between the ranks
        t3 = time.perf_counter()
        step += 1
        for key, seconds in zip(spent, (t1 - t0, t2 - t1, t3 - t2)):
            spent[key] += seconds
        timed_steps += 1

        # Gradients that are not finite have moved nothing: skip the step, go back, or give up.
        verdict = nonfinite.after(finite, scaler.get_scale())
        if verdict != "ok":
            skipped += 1
            log.say(f"step {step}: the gradients are not finite; the step is skipped.")
        if verdict == "rollback":
            earlier = roll_back()
            if earlier is not None:
                step, loader = earlier, load_from(earlier)
                continue
        if verdict in ("rollback", "stop"):
            path = guard.keep_batch(cfg.out_dir, step, x=x, y=y)
            log.say(f"Training diverged: {nonfinite.patience} steps in a row without finite gradients, again after going back "
                    f"or with no checkpoint to go back to. The last batch is in {path}; lower --learning_rate.")
            return 1

        # Log, evaluate, save, stop.
        if step % cfg.log_interval == 0 or step in (1, cfg.max_steps):
            loss = distributed.sum([nats])[0] / targets
            seconds = sum(spent.values()) / timed_steps
            tokens_per_s = targets / seconds
            mfu = hw.mfu(tokens_per_s / world, flops_per_token)
            log.metrics(step=step, loss=loss, lr=lr, grad_norm=grad_norm, tokens=step * targets, tokens_per_s=tokens_per_s,
                        mfu=mfu, peak_memory_gb=hw.peak_memory_gb(), skipped_steps=skipped,
                        **{f"{key}_s": value / timed_steps for key, value in spent.items()})
            log.say(f"step {step}/{cfg.max_steps} | loss {loss:.4f} | lr {lr:.2e} | grad norm {grad_norm:.3f} | "
                    f"{tokens_per_s:,.0f} tokens/s | MFU {shown(mfu, '.1%')} | {shown(hw.peak_memory_gb(), '.2f')} GB | "
                    f"ETA {duration(seconds * (cfg.max_steps - step))}")
            spent, timed_steps = dict.fromkeys(spent, 0.0), 0
        if stopping:                                      # first of all: whoever asked may not wait for an evaluation
            save(step)
        last, val_loss, new_best = step == cfg.max_steps, None, False
        if step % cfg.eval_interval == 0 or last:
            result = text_loss(fast, valid_text, cfg.block_size, cfg.batch_size, hw, cfg.eval_tokens)
            val_loss = result["val_loss"]
            new_best = distributed.on_main(lambda: val_loss < checkpoint.best_loss(cfg.out_dir))
            log.metrics(step=step, **result)
            log.say(f"step {step}/{cfg.max_steps} | {evaluation_line(result)}{' | best so far' if new_best else ''}")
        if step % cfg.save_interval == 0 or last or new_best or stopping and val_loss is not None:
            save(step, val_loss)
        if stopping:
            how = f"--init_from={cfg.out_dir}" if cfg.save_only_model else f"--init_from=resume --out_dir={cfg.out_dir}"
            log.say(f"Stopped as asked after step {step}, and saved. Go on with {how}")
            return stop.exit_code()
    return 0


if __name__ == "__main__":
    guard.run(lambda: main(sys.argv[1:]))
