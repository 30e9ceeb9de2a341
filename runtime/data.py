"""Text on disk to token files, and token files to batches that are a pure function of (seed, step)."""
import hashlib
import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from model import IGNORE
from runtime.checkpoint import write_atomically
from runtime.config import BadInput

CHUNK = 2**20                        # bytes of text tokenised at a time
SPLITS = ("train", "valid")
VALID_NAMES = ("valid", "validation", "val", "dev")
# Line ends at which GPT-2's pattern always ends a piece, so that cutting there leaves the token ids as they were.
SAFE_CUT = re.compile(rb"(?<=[!-~])\n(?=[!-~])|\n(?= [!-~])")


# --- preparation: once per text and tokenizer ---

def prepare(dataset, tokenizer, data_dir, documents=None):
    """Folder with train.bin, valid.bin (token ids) and meta.json for a dataset, made now unless it is there.

    dataset: a .txt file, a folder of them, or a folder with nanoGPT's train.bin and val.bin; or a name, with `documents`
    a function from split to a list of texts. Documents are separated by the end-of-text token. Without a validation
    split the last tenth of the text, at most 10 MB, is one.
    """
    try:
        if documents is None and list(Path(dataset).glob("*.bin")):
            return adopt_bins(Path(dataset), tokenizer, data_dir)
        return prepare_texts(dataset, tokenizer, Path(data_dir), documents)
    except OSError as e:
        raise BadInput(f"Preparing {dataset} in {data_dir} failed ({e.strerror}: {e.filename}): make it readable, free some space, "
                       "or choose another place with --data_dir=.") from None


def prepare_texts(dataset, tokenizer, data_dir, documents):
    texts = {split: [t.encode() for t in documents(split)] for split in SPLITS} if documents else find_texts(Path(dataset))
    digest = hashlib.sha256()
    for split in SPLITS:
        for text in texts[split]:
            digest.update(f"{split} {len(text)}\n".encode())
            for chunk in pieces(text):
                digest.update(chunk)
    name = re.sub(r"\W+", "-", dataset if documents else Path(dataset).resolve().stem)
    folder = data_dir / f"{name}-{tokenizer.name}-{digest.hexdigest()[:12]}"
    if is_prepared(folder):
        return folder

    for left in data_dir.glob("*.partial-*"):                 # by a preparation that was killed
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)
    partial = Path(f"{folder}.partial-{os.getpid()}")
    meta = {"source": str(dataset), "sha256": digest.hexdigest(), **tokenizer.describe(),
            "dtype": "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"}
    try:
        partial.mkdir(parents=True)
        for split in SPLITS:
            meta[split] = tokenise(texts[split], tokenizer, partial / f"{split}.bin", meta["dtype"])
        write_atomically(partial / "meta.json", json.dumps(meta, indent=1).encode())
        if not is_prepared(folder):                           # another run may have been faster
            shutil.rmtree(folder, ignore_errors=True)         # a damaged one
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_prepared(folder):
    """Whether a finished preparation stands there: meta.json is written last, and says how long the files are."""
    try:
        meta = read_meta(folder)
        width = np.dtype(meta["dtype"]).itemsize
        return all((folder / f"{s}.bin").stat().st_size == width * meta[s]["tokens"] for s in SPLITS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_meta(folder):
    return json.loads((Path(folder) / "meta.json").read_text())


class FileSlice:
    """Bytes start to stop of a file, as a text: has a length, and `pieces` reads it bit by bit."""

    def __init__(self, path, start=0, stop=None):
        self.path, self.start, self.stop = path, start, path.stat().st_size if stop is None else stop

    def __len__(self):
        return self.stop - self.start


def find_texts(path):
    """{split: texts} of a .txt file or a folder of them."""
    files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    if not path.exists():
        raise BadInput(f"There is no dataset {path}: give a .txt file, a folder, or task:NAME.")
    if not files or not sum(f.stat().st_size for f in files):
        raise BadInput(f"The dataset {path} holds no text: give a .txt file, or a folder with train.txt and valid.txt.")
    marks = {f: set(re.split(r"[\W_]+", f.stem)) if path.is_dir() else set() for f in files}
    held_out = [f for f in files if marks[f] & {*VALID_NAMES, "test"}]
    train = [f for f in files if "train" in marks[f]] or [f for f in files if f not in held_out]
    texts = {"train": [FileSlice(f) for f in train], "valid": [FileSlice(f) for f in files if marks[f] & {*VALID_NAMES}]}
    if not train:
        raise BadInput(f"The dataset {path} has held-out text and nothing to train on: add a train.txt.")
    if not texts["valid"]:
        texts["train"], texts["valid"] = split_off_tail(texts["train"])
    return texts


def split_off_tail(texts):
    """(train, valid): the last tenth of the bytes, at most 10 MB, goes to validation; characters stay whole."""
    total = sum(map(len, texts))
    cut, train, valid = total - min(total - total * 9 // 10, 10**7), [], []
    for text in texts:
        if cut >= len(text):
            train.append(text)
        elif cut <= 0:
            valid.append(text)
        else:
            with open(text.path, "rb") as f:
                f.seek(cut)
                cut += next((i for i, byte in enumerate(f.read(4)) if byte & 0xC0 != 0x80), 0)
            train.append(FileSlice(text.path, 0, cut))
            valid.append(FileSlice(text.path, cut))
        cut -= len(text)
    return train, valid


def pieces(text):
    """The bytes of a text in pieces of about CHUNK, cut where tokenisation does not notice."""
    if isinstance(text, bytes):
        yield text
        return
    left, rest = len(text), b""
    with open(text.path, "rb") as f:
        f.seek(text.start)
        while left:
            block = f.read(min(CHUNK, left))
            left -= len(block)
            rest += block
            cuts = [m.end() for m in SAFE_CUT.finditer(rest, max(0, len(rest) - CHUNK // 8))] if left else []
            if not cuts and len(rest) > 8 * CHUNK:        # bounded memory comes before the last token of 8 MB
                last_character = max(i for i in range(len(rest) - 4, len(rest)) if rest[i] & 0xC0 != 0x80)
                cuts = [rest.rfind(b"\n") + 1 or last_character]
            if cuts:
                yield rest[:cuts[-1]]
                rest = rest[cuts[-1]:]
    if rest:
        yield rest


def tokenise(texts, tokenizer, path, dtype):
    """Write the token ids of the texts to a file; returns their number, and that of the words and bytes."""
    def encode(job):
        text, first, piece = job
        try:
            words = piece.decode()
        except UnicodeDecodeError as e:
            raise BadInput(f"{getattr(text, 'path', 'the text')} is not UTF-8 (byte {e.object[e.start]:#x}): convert it "
                           "first.") from None
        ids = tokenizer.encode(words).astype(dtype)
        return np.append(np.array([tokenizer.eos], dtype), ids) if first else ids, len(words.split()), len(piece)

    jobs = ((text, n > 0 and i == 0, piece) for n, text in enumerate(texts) for i, piece in enumerate(pieces(text)))
    counts = np.zeros(3, dtype=np.int64)
    with open(path, "wb") as out, ThreadPoolExecutor(os.cpu_count()) as pool:      # tiktoken releases the GIL
        while batch := list(islice(jobs, 4 * os.cpu_count())):
            for ids, words, size in pool.map(encode, batch):
                out.write(ids.tobytes())
                counts += (len(ids), words, size)
        out.flush()
        os.fsync(out.fileno())
    return dict(zip(("tokens", "words", "bytes"), counts.tolist()))


def adopt_bins(path, tokenizer, data_dir):
    """nanoGPT's train.bin and val.bin (uint16, no header), used where they lie. How many words they hold is not known."""
    files = {"train": path / "train.bin", "valid": path / "val.bin"}
    meta = {"source": str(path), **tokenizer.describe(), "dtype": "uint16"}
    for split, file in files.items():
        if not file.is_file():
            raise BadInput(f"{path} has no {file.name}: a folder of token files needs train.bin and val.bin.")
        size = file.stat().st_size // 2
        ids = np.memmap(file, dtype=np.uint16, mode="r", shape=size) if size else np.zeros(0, np.uint16)
        top = max((int(ids[i:i + 2**24].max()) for i in range(0, len(ids), 2**24)), default=0)
        if top >= tokenizer.n_vocab:
            raise BadInput(f"{file} holds token id {top}, and the tokenizer {tokenizer.name} ends at {tokenizer.n_vocab - 1}: "
                           "choose the --tokenizer= that wrote it.")
        meta[split] = {"tokens": len(ids), "file": str(file.resolve())}
    folder = Path(data_dir) / f"bins-{tokenizer.name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return folder


# --- batches ---

class TokenFile:
    """The token ids of a split, memory-mapped; `words` and `bytes` are those of its text, None if not known."""

    def __init__(self, folder, split):
        meta = read_meta(folder)
        self.path = meta[split].get("file") or str(Path(folder) / f"{split}.bin")
        self.dtype, self.length = meta["dtype"], meta[split]["tokens"]
        self.words, self.bytes = meta[split].get("words"), meta[split].get("bytes")
        self.ids = None                                   # opened once in each process

    def __len__(self):
        return self.length

    def __getitem__(self, where):
        """int64 ids of a slice."""
        if self.ids is None:
            self.ids = np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.length))
        return self.ids[where].astype(np.int64)

    def __getstate__(self):
        return self.__dict__ | {"ids": None}              # a loader process that is not forked opens its own


class Windows(torch.utils.data.Dataset):
    """`self[step]` is this rank's share of the step's batch: x, y [sequences, T], y the successors of x.

    A pure function of (seed, step): each epoch cuts the text into windows from an offset of its own and visits them in an
    order of its own, every window once. Ranks take consecutive slices of the batch, so the text of a step does not
    depend on how many there are.
    """

    def __init__(self, tokens, block_size, sequences_per_step, seed, rank=0, world_size=1):
        if len(tokens) <= block_size:
            raise BadInput(f"The training text has {len(tokens)} tokens, too few for one block of {block_size} and its "
                           "successor: lower --block_size, or give more text.")
        self.tokens, self.T, self.seed, self.per_step = tokens, block_size, seed, sequences_per_step
        share = sequences_per_step // world_size
        self.mine = range(rank * share, (rank + 1) * share)
        self.per_epoch = max(1, (len(tokens) - 1) // block_size - 1)
        self.offsets = min(block_size, len(tokens) - self.per_epoch * block_size)
        self.order = (None, None, None)

    def epoch(self, epoch):
        """(offset of the first window, order of the windows) of an epoch."""
        if self.order[0] != epoch:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self.order = (epoch, int(rng.integers(self.offsets)), rng.permutation(self.per_epoch))
        return self.order[1:]

    def __getitem__(self, step):
        rows = []
        for i in self.mine:
            epoch, place = divmod(step * self.per_step + i, self.per_epoch)
            offset, order = self.epoch(epoch)
            start = offset + int(order[place]) * self.T
            rows.append(self.tokens[start:start + self.T + 1])
        rows = torch.from_numpy(np.stack(rows))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(dataset, steps, num_workers=0, pin_memory=False, prefetch=2):
    """Iterate over dataset[step] for the steps, in worker processes if there are any."""
    return iter(torch.utils.data.DataLoader(
        dataset, sampler=steps, batch_size=None, num_workers=num_workers, pin_memory=pin_memory,
        prefetch_factor=prefetch if num_workers else None, worker_init_fn=ignore_signals))


def ignore_signals(_):
    """Ctrl-C and torchrun's SIGTERM reach every process of a group; the training process decides, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def complete_pass(tokens, block_size, batch_size, limit=None, rank=0, world_size=1):
    """This rank's batches of a pass over all (or the first `limit`) predicted tokens, once each, in windows of block_size
    that do not overlap: x, y [batch_size, T]. Cells past the end of the text have IGNORE for a target, so every batch has
    the same shape."""
    predicted = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
    windows = range(rank, -(-predicted // block_size), world_size)
    for first in range(0, len(windows), batch_size):
        x = np.zeros((batch_size, block_size), dtype=np.int64)
        y = np.full((batch_size, block_size), IGNORE, dtype=np.int64)
        for row, window in enumerate(windows[first:first + batch_size]):
            start = window * block_size
            ids = tokens[start:min(start + block_size, predicted) + 1]
            x[row, :len(ids) - 1], y[row, :len(ids) - 1] = ids[:-1], ids[1:]
        yield torch.from_numpy(x), torch.from_numpy(y)
