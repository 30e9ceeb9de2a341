"""Train a byte-level BPE tokenizer on the training split of a text.

    python -m text.bpe book.txt --vocab_size=4096 --out=tok
    python train.py --dataset=book.txt --tokenizer=tok

The output folder holds a tokenizer.json and a tokenizer_config.json, which transformers reads too. The same
text always gives the same file. The text is streamed: memory grows with the number of its distinct words,
beside the 256 fragments of some megabytes at most that the library `tokenizers` reads ahead.
"""
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtime import config, guard
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, Bounds, require
from runtime.progress import ProgressLine
from text import data
from text.sources import decoded
from text.tokenizer import END_OF_TEXT, FILE, HF_SETTINGS, Tokenizer, byte_level

SETTINGS = "tokenizer_config.json"
HELD_OUT = 2**22                             # bytes of the validation split to measure the result on
LONGEST = 128                                # bytes of a token at most, as in GPT-2's vocabulary


@dataclass
class Config:
    dataset: str = ""                        # as in train.py, first on the command line
    text_key: str = "text"                   # column of the text in .jsonl, .parquet or a hub dataset
    vocab_size: Annotated[int, Bounds(257, 2**20)] = 4096       # 256 bytes, merges and the end of text
    split_digits: bool = False               # each digit is a token; False: split as in GPT-2
    out: str = "tok"                         # folder of the tokenizer


def texts_of(sources, label):
    """Yield the fragments of sources as text, with a progress line."""
    with ProgressLine(label, sum(source.size for source in sources), "B") as line:
        for source in sources:
            for _, text, n_bytes in source.fragments():
                yield decoded(text, source.name)[0]
                line.add(n_bytes)


def train(texts, vocab_size, split_digits):
    """Return the tokenizer.json of BPE trained on an iterable of strings, as a dictionary."""
    tokenizers = require("tokenizers", "A tokenizer can't be trained")
    about = byte_level({}, [], 0, "smollm" if split_digits else "gpt-2")
    about["added_tokens"] = []               # the trainer adds the end of text
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(about))
    split = tokenizer.pre_tokenizer
    # The trainer takes quadratic time in the length of a piece, such as a line of "=".
    pieces = tokenizers.pre_tokenizers.FixedLength(LONGEST)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, pieces])
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT],
                                             initial_alphabet=letters, show_progress=False)
    # In the main thread, the library would only heed a Ctrl-C at its end.
    ThreadPoolExecutor(1).submit(tokenizer.train_from_iterator, texts, trainer).result()
    tokenizer.pre_tokenizer = split
    return json.loads(tokenizer.to_str())


def bytes_per_token(tokenizer, texts):
    """Return (bytes per token, bytes) of the first HELD_OUT bytes of an iterable of strings."""
    n_bytes = 0
    n_tokens = 0
    for text in texts:
        n_bytes += len(text.encode())
        n_tokens += len(tokenizer.encode(text))
        if n_bytes >= HELD_OUT:
            break
    return n_bytes / max(1, n_tokens), n_bytes


def refuse_other(path, content):
    """Raise BadInput if there is a file with other content."""
    if path.is_dir() or path.exists() and path.read_bytes() != content:
        raise config.would_overwrite(path, "this tokenizer's", "--out=")


def main(argv):
    cfg = config.load(Config, argv, positional="dataset")
    if not cfg.dataset:
        raise BadInput("Name a text: python -m text.bpe book.txt --vocab_size=4096 --out=tok")
    sources = data.find(cfg.dataset, cfg.text_key)
    out = Path(cfg.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"The folder {out} can't be made ({e.strerror}): choose another --out=.") from None
    settings = json.dumps(HF_SETTINGS | {"eos_token": END_OF_TEXT}, indent=1).encode()
    refuse_other(out / SETTINGS, settings)
    about = train(texts_of(sources["train"], "counting words"), cfg.vocab_size, cfg.split_digits)
    content = json.dumps(about, ensure_ascii=False, indent=1).encode()
    refuse_other(out / FILE, content)
    write_atomically(out / FILE, content)
    write_atomically(out / SETTINGS, settings)
    tokenizer = Tokenizer(out)
    if tokenizer.n_vocab < cfg.vocab_size:
        print(f"The text yields only {tokenizer.n_vocab:,} ids.")
    density, n_bytes = bytes_per_token(tokenizer, texts_of(sources["valid"], "measuring"))
    print(f"{out}: {tokenizer.n_vocab:,} ids, {density:.2f} bytes a token on {n_bytes:,} held-out bytes.")
    return 0


if __name__ == "__main__":
    guard.run(main)
