"""Train a GPT on text, from scratch or from a checkpoint, or fine-tune one on examples (SFT, RFT).

    python train.py                                     a small model on generated text, on any machine
    python train.py --dataset=book.txt --out_dir=out/book
    python train.py config/cpu_small.py --dataset=input.txt
    python train.py --dataset=book.txt --out_dir=out/book --resume=auto
    python train.py config/rft.py --init_from=out/base --dataset=data/rft.json
    python train.py --init_from=HuggingFaceTB/SmolLM2-360M --dataset=book.txt \\
        --lora_rank=16 --optimizer=adamw
    torchrun --nproc_per_node=2 train.py config/...
"""
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from runtime.usage import first_line

first_line()                             # answers --help before the slow import of PyTorch

import torch

import doctor
import experimental
import hub
from model import GPT, GPTConfig, blank
from runtime import config, distributed, guard, hardware, memory, optim, parallel as sharding
from runtime.checkpoint import claim
from runtime.config import (BadInput, Bounds, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat,
                            PositiveInt, UnitInterval)
from runtime.distributed import CUDA_GRAPHS
from runtime.options import LORA, RunOptions, check_needs, check_training
from runtime.run import start
from runtime.state import Progress, adapt
from text import data, examples
from text.datasets import is_text, mean_flops, number_of_steps, open_data, validation_loss, workers
from text.perplexity import evaluation_line
from text.provenance import check_task, own_task, prompt_form
from text.report import facts, log_step, log_validation, start_up
from text.tokenizer import Tokenizer


@dataclass
class Config(RunOptions):                    # runtime/options.py: --resume, adapters, machine, checkpoints
    # the run
    out_dir: str = "out/base"                # run folder: config, weights, metrics.jsonl, training.log
    init_from: str = "scratch"               # scratch, a run folder, a Hugging Face folder, GGUF file or hub
                                             # name; resume: the run in out_dir, see --resume
    # data
    dataset: str = "task:unit_conversion"    # text: task:NAME, a path (.txt .jsonl .parquet, a folder),
                                             # wikitext, or org/name:config; examples: .json or .jsonl of
                                             # questions and answers (text/examples.py), or examples:NAME, a
                                             # task's own
    block_size: PositiveInt = 256            # context, tokens; with init_from the run's, else at most 1024
    tokenizer: str | None = None             # bytes, gpt2, or a folder; None: the model's, or bytes
    # effective batch = batch_size * gradient_accumulation_steps sequences, on any number of ranks
    batch_size: PositiveInt = 32             # largest micro-batch, sequences; halved until it fits in memory
    gradient_accumulation_steps: PositiveInt = 1     # micro-steps per optimizer step, summed over ranks
    widen_micro_batch: bool = False          # as few micro-steps as memory allows, whatever batch_size is
    max_steps: PositiveInt | None = None     # limit in optimizer steps
    num_epochs: PositiveFloat | None = None  # limit in passes over the data; without either limit: 300 steps
                                             # for text, 3 passes for examples
    # optimizer
    learning_rate: NonNegativeFloat | None = None     # peak rate (Muon's updates have AdamW's size). None:
                                             # 0.01 from scratch, 1e-3 with LoRA, else 2e-3 for a million
                                             # parameters and less for more (docs/training.md)
    optimizer: Literal["adamw", "muon"] = "muon"     # muon: of the matrices inside blocks; AdamW of the rest
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "wsd"  # wsd: constant, then linear decay
    warmup_steps: NonNegativeInt | None = 10     # steps in which the rate rises; None: 10% of all, at most 50
    dropout: Fraction = 0.0                  # typical: 0.1-0.2 for many epochs
    teacher: str | None = None               # distil from this model, named as in --init_from
                                             # (experimental/distillation.py)
    teacher_weight: UnitInterval = 0.5       # share of the loss that is the KL divergence from the teacher
    # model
    n_layer: PositiveInt = 4                 # blocks
    n_head: PositiveInt = 2                  # attention heads
    n_embd: PositiveInt = 128                # width of the residual stream
    n_kv_head: PositiveInt | None = None     # key/value heads; None: n_head
    head_dim: PositiveInt | None = None      # channels of a head; None: n_embd / n_head
    mlp_hidden: PositiveInt | None = None    # width inside an MLP; None: 4 n_embd, or 8/3 n_embd with swiglu
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"     # normalisation layers
    position: Literal["rope", "learned"] = "rope"     # rotary angles, or learned vectors
    qk_norm: bool = True                     # RMSNorm of queries and keys
    mlp: Literal["relu2", "gelu", "gelu_tanh", "swiglu"] = "relu2"  # activation of the MLPs
    bias: bool = False                       # bias terms in all linear layers
    tied_head: bool = False                  # share weights between embedding and head
    logit_softcap: NonNegativeFloat = 0.0    # e.g. 15: logits are bent to stay between -15 and 15; 0: off
    mixer: Literal["softmax", "favor", "linear"] = "softmax"  # attention; the others: docs/okadfa.md
    mixer_rule: Literal["sum", "delta"] = "sum"     # linear attention: add values to the state, or replace
    mixer_features: PositiveInt = 256        # of --mixer=favor: random features per head
    # feedback alignment, frozen blocks, orthogonality (docs/okadfa.md)
    backward: Literal["backprop", "feedback", "feedback_micro"] = "backprop"     # feedback: send the error at
                                             # the top to each block through a fixed matrix; feedback_micro:
                                             # to three points of each block
    feedback_matrix: Literal["each", "shared", "identity"] = "each"  # a matrix per block, one
                                             # for all, or the error unchanged
    trained_blocks: NonNegativeInt | Literal["all", "none", "last"] = "all"  # blocks that are trained; a
                                             # number: so many, from the top
    orthogonality: NonNegativeFloat = 0.0    # e.g. 0.01: weight of a penalty on attention's projections
    orthogonality_warmup: PositiveInt = 1000     # steps in which the penalty's weight rises
    # machine
    compile: bool | None = None              # torch.compile; None: on a GPU only (a CPU gains after five
                                             # minutes)
    # evaluation, log, checkpoints
    eval_interval: PositiveInt = 100         # steps between evaluations; also after the last step
    eval_tokens: PositiveInt | None = None   # validation tokens of a text; None: the whole split
    eval_only: bool = False                  # evaluate once and exit, leaving out_dir alone
    patience: NonNegativeInt = 0             # stop after this many evaluations without a new best; 0: never
    log_interval: PositiveInt = 10           # steps between log lines
    # data, in detail
    text_key: str = "text"                   # text field of .jsonl, .parquet and hub datasets
    data_dir: str = "data"                   # folder for tokenised texts
    prompt: str | None = None                # examples with questions: prompt form with {} for
                                             # the question; None: datagen.py's, or the task's
    instruction: str | None = None           # examples with questions: system message of a chat model
    valid_share: Fraction = 0.0              # examples: fraction of the questions held out for validation
    # speed: bench.py --stage=... --ladder measures the gain of most
    loss_chunks: NonNegativeInt = 0          # chunks in which head and loss are computed; 0: by size
    num_workers: Annotated[int, Bounds(0, 256)] | None = None  # loader processes; None: 2 on a GPU, else 0
    pin_memory: bool = True                  # copy batches from page-locked memory, on a GPU
    prefetch: Annotated[int, Bounds(1, 256)] = 2     # steps loaded ahead per loader process

    # Not an option: learning_rate where that is None, see optim.default_learning_rate
    default_rates = (0.01, 2e-3, 1e-3)

    @property
    def sequences(self):
        """Effective batch, all ranks together."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def largest_micro_batch(self):
        """Largest micro-batch to try, sequences."""
        return self.sequences if self.widen_micro_batch else self.batch_size

    def flags_for(self, micro_batch):
        """Return the flags for the same effective batch with this micro-batch."""
        return f"--batch_size={micro_batch} --gradient_accumulation_steps={self.sequences // micro_batch}"


# The options that are fields of GPTConfig, and bias, which stands for three of them
ARCHITECTURE = [name for name in Config.__dataclass_fields__ if name == "bias" or
                name in GPTConfig.__dataclass_fields__ and name not in ("block_size", "dropout")]


def check(cfg):
    check_training(cfg)
    if cfg.mixer != "softmax" and cfg.attention != "auto":
        raise BadInput(f"--attention={cfg.attention} is for softmax attention, not for --mixer={cfg.mixer}: "
                       "leave one of them out.")
    if cfg.mixer != "favor" and cfg.mixer_features != Config.mixer_features:
        raise BadInput(f"--mixer_features={cfg.mixer_features} is for --mixer=favor, not for {cfg.mixer}: "
                       "leave it out.")
    check_needs(cfg, {"--teacher": (cfg.teacher, ["teacher_weight"])})
    experimental.check(cfg)
    if cfg.prompt is not None and "{}" not in cfg.prompt:
        raise BadInput(f"--prompt={cfg.prompt} has no {{}} for the question: add it.")
    if cfg.teacher and (cfg.parallel != "ddp" or cfg.compile_mode in CUDA_GRAPHS):
        raise BadInput("--teacher needs --parallel=ddp and no CUDA graphs: use "
                       "--parallel=ddp --compile_mode=default.")
    if cfg.lora_rank and cfg.init_from == "scratch":
        raise BadInput("--lora_rank needs a pretrained model: name one with --init_from=, or leave it out.")
    if cfg.sequences > 2**20:
        raise BadInput(f"--batch_size={cfg.batch_size} x "
                       f"--gradient_accumulation_steps={cfg.gradient_accumulation_steps} is more than 2**20 "
                       "sequences a step: lower one of them.")
    if cfg.sequences % distributed.world_size():
        raise BadInput(f"{cfg.sequences} sequences per step can't be split evenly over "
                       f"{distributed.world_size()} ranks: change --batch_size or "
                       "--gradient_accumulation_steps.")


# --- the model ---

def model_options(model):
    """Return {option: value} of the architecture and block_size of a run folder or a Hugging Face model."""
    names = [*ARCHITECTURE, "block_size"]
    saved = config.read_saved(model) if (Path(model) / "model.json").exists() else {}
    if not saved.keys() >= set(names):                        # a Hugging Face model, or a run of grpo.py
        shape = distributed.on_main(lambda: hub.find(model)).config
        described = {k: getattr(shape, "qkv_bias" if k == "bias" else k) for k in ARCHITECTURE}
        saved = described | {"block_size": min(1024, shape.block_size)} | saved
    return {k: saved[k] for k in names}


def architecture(cfg, tokenizer):
    """Return the GPTConfig that the options describe."""
    options = {k: getattr(cfg, k) for k in [*ARCHITECTURE, "block_size", "dropout"]}
    bias = options.pop("bias")
    try:
        return GPTConfig(vocab_size=tokenizer.n_vocab, qkv_bias=bias, o_bias=bias, mlp_bias=bias, **options)
    except ValueError as e:
        raise BadInput(f"{e}: change one of them.") from None


def shape_of(cfg, hw, tokenizer, found):
    """Return the model's GPTConfig. BadInput for one that can't be built."""
    shape = dataclasses.replace(found.config, dropout=cfg.dropout) if found else architecture(cfg, tokenizer)
    if cfg.block_size > shape.block_size:
        raise BadInput(f"--block_size={cfg.block_size} is more than the model's {shape.block_size} "
                       "positions: lower it.")
    sharing = sharding.ranks_that_share(cfg.parallel)
    distributed.together(lambda: memory.check_weights(shape, hw.device, sharing), BadInput)
    return shape


def build_model(cfg, hw, shape, found, resuming):
    """Return the GPT, not yet sharded, randomly initialized or with the weights of `found`. `start` loads
    those of a resumed run."""
    torch.manual_seed(cfg.seed)
    device = sharding.building_device(hw, cfg.parallel)
    options = (hw.attention, cfg.gradient_checkpointing, cfg.loss_chunks)
    if found or device.type == "meta":
        model = blank(shape, *options, device=device)
    else:
        model = GPT(shape, *options).to(device)
    if found and not resuming and device.type != "meta":
        found.fill(model)
    adapt(cfg, model, device, resuming)
    experimental.attach(model, cfg)
    return model


# --- training ---

def compile_and_fit(cfg, run, dataset, teacher):
    """Return the TrainedModel, with the micro-batch that fits in memory. If torch.compile fails, the model is
    eager."""
    share = cfg.sequences // distributed.world_size()
    optimizer_bytes = optim.pending_bytes(run.optimizers)
    if cfg.widen_micro_batch and cfg.init_from != "resume":
        run.state.micro_batch = memory.widest(run, memory.divisors(share, share), dataset.longest,
                                              optimizer_bytes)
    sizes = memory.divisors(run.state.micro_batch, share)
    advice = partial(memory.advice, run.model, run.hardware, dataset.longest, optimizer_bytes)
    return memory.fit(run, sizes, partial(try_step, cfg, run, dataset, teacher), advice)


def try_step(cfg, run, dataset, teacher, micro_batch):
    """Return (TrainedModel, exception of memory.rehearse or None) of a dry run with this micro-batch."""
    hw = run.hardware
    passes = min(2, -(-cfg.sequences // distributed.world_size() // micro_batch))
    model = distributed.TrainedModel(run.model, hw.compile, cfg.compile_mode, dynamic=not is_text(dataset))
    prefix = None if is_text(dataset) else dataset.prefix
    return model, memory.rehearse(model, hw, micro_batch, dataset.longest, passes,
                                  optim.pending_bytes(run.optimizers), prefix=prefix,
                                  loss_of=teacher and partial(teacher.loss, model))


def train(cfg, run, model, dataset, held_out, teacher, flops_per_token):
    """Train until the last step or a stop request. Returns the exit code."""
    hw = run.hardware
    loader = data.batches(dataset, range(run.step, run.num_steps), workers(cfg, hw),
                          cfg.pin_memory and hw.device.type == "cuda", cfg.prefetch)
    nothing = [tensor.to(hw.device) for tensor in examples.empty_batch()]
    evaluate = partial(validate, cfg, run, model, held_out) if held_out else None
    run.catch_up(evaluate)

    while run.step < run.num_steps and not run.should_stop():
        run.start_step()
        # Micro-batches: x [micro_batch, T] token ids, y the next ids, of examples also the index of targets
        # and the beginning that all of them share. num_targets counts all micro-steps and ranks.
        micro_batches = [[tensor.to(hw.device, non_blocking=hw.device.type == "cuda") for tensor in batch]
                         for batch in next(loader)]
        num_tokens, num_targets = dataset.tokens(run.step)
        run.end_phase("data")

        # Gradients of the mean loss over all targets.
        loss_sum = torch.zeros((), device=hw.device)
        for i, batch in enumerate(model.micro_steps(micro_batches, empty=nothing)):
            if cfg.dropout:
                # Seeded by step, so that a resumed run repeats the same masks.
                torch.manual_seed(hash((cfg.seed, run.step, distributed.rank(), i)))
            with hw.autocast():
                loss = teacher.loss(model, *batch) if teacher else model.loss(*batch)
            run.scaler.scale(loss / num_targets).backward()
            loss_sum += loss.detach()
        loss_sum = loss_sum.item()           # synchronizes, so that the next phase times the optimizer
        run.end_phase("forward_backward")

        # Optimizer step.
        lr = run.lr()
        figures = experimental.add_gradients(cfg, run)       # more metrics, {name: number}; {} if off
        grad_norm = run.optimizer_step(lr, micro_batches=micro_batches)
        log = partial(log_step, run, loss_sum, num_targets, lr, grad_norm, flops_per_token, figures)
        run.finish_step(num_tokens, "optimizer", log, evaluate)
    return run.end()


def validate(cfg, run, model, held_out):
    """Evaluate the current step and log the result."""
    result = validation_loss(cfg, run.hardware, model, held_out, run.state.micro_batch)
    run.record_validation(result["loss"])
    log_validation(run, result)


def main(argv):
    distributed.init()
    frozen = ARCHITECTURE + LORA + experimental.FEEDBACK
    cfg = config.load(Config, argv, frozen=frozen, saved_of=model_options, claim=claim)
    check(cfg)
    distributed.on_main(lambda: check_task(cfg, argv))
    of_examples = examples.is_examples_file(cfg.dataset, cfg.text_key)
    hw = hardware.setup(cfg.device, cfg.dtype, cfg.tf32, cfg.compile, cfg.attention, cfg.deterministic,
                        cfg.keep_memory, fixed_shapes=not of_examples)

    # Data and model. init_from sets architecture and tokenizer.
    found = None
    if cfg.init_from == "resume":
        found = distributed.on_main(lambda: hub.to_resume(cfg.out_dir, weights_suffice=cfg.eval_only))
    elif cfg.init_from != "scratch":
        found = distributed.on_main(lambda: hub.find(cfg.init_from))
    resuming = cfg.init_from == "resume" and not cfg.eval_only
    tokenizer = found.tokenizer(cfg.tokenizer) if found else Tokenizer(cfg.tokenizer or "bytes")
    cfg.tokenizer = tokenizer.option
    shape = shape_of(cfg, hw, tokenizer, found)           # fails before a long tokenization
    dataset, held_out, about = open_data(cfg, tokenizer)
    if cfg.patience and not held_out:
        raise BadInput("--patience needs a validation loss: hold out examples with --valid_share=, or leave "
                       "it out.")
    source = None if cfg.eval_only else distributed.on_main(
        lambda: experimental.find_teacher(cfg, resuming, tokenizer, shape.vocab_size, dataset.longest))
    micro_batch = min(cfg.largest_micro_batch, cfg.sequences // distributed.world_size())
    model = distributed.together(lambda: build_model(cfg, hw, shape, found, resuming), BadInput)
    progress = Progress(cfg.batch_size, micro_batch, number_of_steps(cfg, dataset), data=dataset.digest)
    run = start(cfg, hw, model, progress, found.step if resuming else None,
                epoch_steps=0 if is_text(dataset) else dataset.steps_per_epoch)
    if cfg.eval_only:
        if not held_out:
            raise BadInput("There are no validation examples: set --valid_share=.")
        with hw.deterministic_kernels():
            result = validation_loss(cfg, hw, run.model, held_out, micro_batch)
        if distributed.is_main():
            print(evaluation_line(result))
        return 0
    provenance = distributed.on_main(lambda: {"task": own_task(cfg), "prompt": prompt_form(cfg),
                                              "teacher": source and source.identity(cfg.teacher)})
    with hw.deterministic_kernels(), run.open(tokenizer, provenance, doctor.start, resuming):
        teacher = experimental.teacher_of(cfg, hw, source)
        model = compile_and_fit(cfg, run, dataset, teacher)
        dataset.micro_batch = run.state.micro_batch
        dataset.multiple = hw.length_multiple
        flops_per_token = mean_flops(run.model, dataset, run.state.micro_batch)
        inherited = [*ARCHITECTURE, "block_size", "tokenizer"] if found and not resuming else []
        teacher_loss = teacher and teacher.loss_on(dataset[0][0])
        run.log_start(start_up(cfg, run, model, dataset, about, flops_per_token, workers(cfg, hw), inherited),
                      facts(run, dataset, held_out, tokenizer, flops_per_token, teacher_loss),
                      num_workers=workers(cfg, hw))
        return train(cfg, run, model, dataset, held_out, teacher, flops_per_token)


if __name__ == "__main__":
    guard.run(main)
