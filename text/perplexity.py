"""Evaluate a model on a text or on fine-tuning examples, over all ranks: loss, perplexity, bits per byte."""
import math

import torch

from runtime import distributed
from runtime.progress import ProgressLine
from text import data, examples


def text_loss(model, tokens, block_size, batch_size, hardware, limit=None, stride=None):
    """Compute the loss of a text over all ranks; each token is predicted once (data.complete_pass).

    tokens: data.TokenFile. limit: number of predicted tokens. Returns a dictionary: `loss` in nats per token,
    `nll` in nats, `tokens` predicted (the first token is only context), `ppl_token`; and if the text's words
    (separated by white space) and bytes are known, both, `ppl_word` = exp(nll / words) and `bits_per_byte`.
    With a limit, words and bytes are scaled by the share of the text.
    """
    batches = data.complete_pass(
        tokens, block_size, batch_size, limit, distributed.rank(), distributed.world_size(), stride)
    predicted = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
    result = loss_of(model, batches, hardware, -(-predicted // distributed.world_size()))
    if tokens.words:
        share = result["tokens"] / (len(tokens) - 1)
        words = share * tokens.words
        n_bytes = share * tokens.bytes
        result["words"] = round(words)
        result["bytes"] = round(n_bytes)
        result["ppl_word"] = exp(result["nll"] / words)
        result["bits_per_byte"] = result["nll"] / n_bytes / math.log(2)
    return result


def examples_loss(model, held_out, batch_size, hardware):
    """Compute the loss of the targets of examples.Examples over all ranks; returns as loss_of."""
    held_out = sorted(held_out, key=lambda example: example.length)
    longest = held_out[-1].length
    mine = held_out[distributed.rank()::distributed.world_size()]
    batches = []
    for first in range(0, len(mine), batch_size):
        rows = mine[first:first + batch_size]
        T = examples.width(rows[-1].length, longest, hardware.length_multiple)
        batches.append(examples.padded(rows, T))
    targets = sum(int(example.is_target[1:].sum()) for example in mine)
    return loss_of(model, batches, hardware, targets)


@torch.no_grad()
def loss_of(model, batches, hardware, targets):
    """Return {loss, nll, tokens, ppl_token} of batches (x, y) or (x, y, index of targets) over all ranks.
    targets: estimate."""
    training = model.training
    model.eval()
    nll = 0.0
    n_tokens = 0
    with ProgressLine("evaluating", targets, "tokens") as line:
        for batch in distributed.in_step(model, batches, examples.empty_batch()):
            with hardware.autocast():
                nll += model.loss(*[tensor.to(hardware.device) for tensor in batch]).item()
            n = int((batch[1] != data.IGNORE).sum())
            n_tokens += n
            line.add(n)
    model.train(training)
    nll, n_tokens = distributed.sum_over_ranks([nll, n_tokens])
    return {"loss": nll / n_tokens, "nll": nll, "tokens": int(n_tokens), "ppl_token": exp(nll / n_tokens)}


def exp(x):
    """Return e**x, or infinity if it overflows."""
    return math.exp(x) if x < 700 else math.inf


def evaluation_line(result):
    """Return a log line with the results of text_loss."""
    line = f"val loss {result['loss']:.4f} | perplexity {result['ppl_token']:.2f} a token"
    if "ppl_word" in result:
        if result["ppl_word"] < 1e6:         # meaningless at the start of training
            line += f", {result['ppl_word']:.2f} a word"
        line += f" | {result['bits_per_byte']:.4f} bits/byte"
    return line
