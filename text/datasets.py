"""The dataset of train.py: a text, or examples of questions and answers."""
import math

from runtime import distributed
from runtime.config import BadInput
from text import data, examples
from text.perplexity import examples_loss, text_loss


def open_data(cfg, tokenizer):
    """Return (training dataset, validation data: data.TokenFile or a list of examples, description for the
    log)."""
    rank = distributed.rank()
    world = distributed.world_size()
    if not examples.is_examples_file(cfg.dataset, cfg.text_key):
        for option in ("valid_share", "prompt", "instruction"):
            if getattr(cfg, option):
                raise BadInput(f"--{option} is for examples, and {cfg.dataset} is a text: leave it out.")
        folder = distributed.on_main(lambda: data.prepare(cfg.dataset, tokenizer, cfg.data_dir, cfg.text_key))
        text = data.TokenFile(folder, "train")
        dataset = data.Windows(text, cfg.block_size, cfg.sequences, cfg.seed, rank, world,
                               data.digest(folder))
        held_out = data.TokenFile(folder, "valid")
        if len(held_out) < 2:
            raise BadInput(f"The validation split of {cfg.dataset} has no token to predict: give more text.")
        return dataset, held_out, f"{len(text):,} training tokens, {len(held_out):,} for validation"
    found = distributed.on_main(lambda: examples.read(cfg.dataset, tokenizer, cfg.prompt, cfg.instruction))
    short = [example for example in found if example.length <= cfg.block_size]
    train, held_out = examples.hold_out(short, cfg.valid_share, cfg.seed)
    dataset = examples.Batches(train, cfg.sequences, cfg.largest_micro_batch, cfg.seed, rank, world)
    if not cfg.dropout and cfg.backward == "backprop":       # neither is defined for shared positions
        dataset.prefix = examples.common_prefix(train)
    targets = sum(int(example.is_target[1:].sum()) for example in train)
    shared = "" if dataset.prefix is None else f", the first {len(dataset.prefix)} shared"
    about = (f"{len(train):,} examples of {dataset.longest} tokens at most{shared}, {targets:,} trained on; "
             f"{len(held_out):,} for validation; {len(found) - len(short):,} longer than "
             f"--block_size={cfg.block_size} left out")
    return dataset, held_out, about


def is_text(dataset):
    return isinstance(dataset, data.Windows)


def validation_loss(cfg, hw, model, held_out, micro_batch):
    """Return the result of text_loss or examples_loss."""
    if isinstance(held_out, data.TokenFile):
        return text_loss(model, held_out, cfg.block_size, micro_batch, hw, cfg.eval_tokens)
    return examples_loss(model, held_out, micro_batch, hw)


def mean_flops(model, dataset, micro_batch):
    """Return the FLOPs of forward and backward pass per token, without padding. Of examples the head is
    computed for targets alone, and the positions that all share once a micro-batch."""
    if is_text(dataset):
        return model.flops_per_token(dataset.longest)
    lengths = [example.length for example in dataset.examples]
    tokens = sum(lengths)
    targets = sum(int(example.is_target[1:].sum()) for example in dataset.examples)
    per_rank = len(lengths) / dataset.steps_per_epoch / distributed.world_size()
    micro_batches = dataset.steps_per_epoch * distributed.world_size() * math.ceil(per_rank / micro_batch)
    shared = 0 if dataset.prefix is None else len(dataset.prefix) * max(0, len(lengths) - micro_batches)
    head = model.head_flops()
    blocks = model.flops_per_token(sum(length**2 for length in lengths) / tokens) - head
    return blocks * (1 - shared / tokens) + head * targets / tokens


def number_of_steps(cfg, dataset):
    """Return the number of optimizer steps of the whole run."""
    limits = [] if cfg.max_steps is None else [cfg.max_steps]
    if cfg.num_epochs is not None or not (is_text(dataset) or limits):
        limits.append(math.ceil((cfg.num_epochs or 3) * dataset.steps_per_epoch - 1e-6))     # 1.1 * 100 > 110
    return max(1, min(limits or [300]))


def workers(cfg, hw):
    """Return the number of loader processes."""
    if cfg.num_workers is not None:
        return cfg.num_workers
    return 2 if hw.device.type == "cuda" else 0
