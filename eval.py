"""How good a model is on a text. Functions that the other stages call; the command line comes with engine.py."""
import math

import torch

from runtime import data, distributed


@torch.no_grad()
def text_loss(model, tokens, block_size, batch_size, hardware, limit=None):
    """Loss of a split over all ranks, each token predicted once, in windows of block_size that do not overlap.

    tokens: data.TokenFile. limit: only the first so many predicted tokens. Returns a dictionary: `val_loss` in nats per
    token, `val_tokens` predicted (the first token of a text is context only), `val_ppl_token`; where the text's words
    and bytes are known also `val_ppl_word` = exp(nats / words), words being what white space separates, and
    `val_bits_per_byte`. With a limit, words and bytes are counted in proportion.
    """
    training = model.training
    model.eval()
    nats, n = 0.0, 0
    for x, y in data.complete_pass(tokens, block_size, batch_size, limit, distributed.rank(), distributed.world_size()):
        n += int((y != data.IGNORE).sum())
        with hardware.autocast():
            nats += model(x.to(hardware.device), y.to(hardware.device)).item()
    model.train(training)
    nats, n = distributed.sum([nats, n])
    result = {"val_loss": nats / n, "val_tokens": int(n), "val_ppl_token": exp(nats / n)}
    if tokens.words:
        share = n / (len(tokens) - 1)
        result["val_ppl_word"] = exp(nats / (share * tokens.words))
        result["val_bits_per_byte"] = nats / (share * tokens.bytes) / math.log(2)
    return result


def exp(x):
    """Perplexity, infinite where a float can't hold it."""
    return math.exp(x) if x < 700 else math.inf
