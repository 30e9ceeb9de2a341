"""Tokenise texts into token files, once, and read them back as batches that depend only on (seed, step)."""
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import time
from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch

from model import IGNORE
from runtime.checkpoint import fsync, sha256, write_atomically
from runtime.config import BadInput, read_json
from runtime.progress import ProgressLine
from text import sources as texts
from text.sources import SPLITS

FORMAT = 3                           # version of the prepared folder
SHARD = 256                          # chunks of about texts.CHUNK per token file


# --- preparation, once per text and tokenizer ---

def prepare(dataset, tokenizer, data_dir, text_key="text", only=None):
    """Return the folder with a dataset's train_*.bin, valid_*.bin and meta.json, prepared now if missing.
    Raises BadInput.

    dataset: an argument of texts.find, a folder with nanoGPT's train.bin and val.bin, or task:NAME. The
    end-of-text token separates documents. Without a validation split, the last tenth of the text (at most
    about 10 MB) is held out. only: the one split to prepare, as valid (val.bin for nanoGPT's files).
    """
    try:
        if any(Path(dataset, name).exists() for name in ("train.bin", "val.bin")):
            if only not in (None, "valid"):
                raise BadInput(f"Token files have only the split valid, not {only}: leave --split= out.")
            return adopt_bins(Path(dataset), tokenizer, data_dir)
        sources = find(dataset, text_key, only)
        return prepare_texts(dataset, sources, tokenizer, Path(data_dir))
    except OSError as e:
        raise BadInput(f"Preparing {dataset} in {data_dir} failed ({e.strerror}: {e.filename}): make it "
                       "readable, free some space, or choose another folder with --data_dir=.") from None


def find(dataset, text_key, only=None):
    """Return {split: sources} of task:NAME or an argument of texts.find; parameters as there."""
    if dataset.startswith("task:"):
        return task_texts(dataset.removeprefix("task:"), only)
    return texts.find(dataset, text_key, only)


def task_texts(name, only):
    """Return {split: sources} of a task's generated text, like texts.find."""
    if only not in (None, *SPLITS):
        raise BadInput(f"The text of the task {name} has no split {only}: choose another --split=.")
    try:
        from tasks import _pool
        task = _pool.load(name)
        splits = [only] if only else SPLITS
        sources = {split: [texts.Documents(task.documents(split))] for split in splits}
    except (LookupError, ValueError, OSError) as e:
        raise BadInput(str(e)) from e
    return {"train": [], "valid": sources[only]} if only else sources


def prepare_texts(dataset, sources, tokenizer, data_dir):
    """Return the folder with the token ids of texts. sources: {split: [source]}, see text/sources.py.

    The folder's name contains a digest of the texts; meta.json is written last, so a killed preparation
    starts again. Concurrent preparations write the same content, each under its own temporary names.
    """
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.eos}".encode())
    size = sum(source.size for split in SPLITS for source in sources[split])
    with ProgressLine(f"reading {dataset}", size, "B") as line:
        for split in SPLITS:
            for source in sources[split]:
                digest.update(f"{split} {source.size}\n".encode())
                for block in source.raw():
                    digest.update(block)
                    line.add(len(block))
    name = str(dataset) if ":" in str(dataset) else Path(dataset).resolve().stem
    name = re.sub(r"\W+", "-", name)
    folder = data_dir / f"{name}-{tokenizer.name}-{digest.hexdigest()[:12]}"
    for left in folder.glob("*.tmp-[0-9]*"):              # a live process has written within the last hour
        with contextlib.suppress(FileNotFoundError):      # it has been renamed since
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()
    if is_prepared(folder):
        return folder

    dtype = "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"
    meta = {"source": str(dataset), "sha256": digest.hexdigest(), **tokenizer.describe(), "dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        shards = tokenise(sources[split], tokenizer, folder, split, dtype)
        totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "words", "bytes")}
        meta[split] = {"shards": shards} | totals
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return folder


def is_prepared(folder):
    """Return whether the folder holds a finished preparation. Prints a line for a damaged token file."""
    try:
        meta = read_json(folder / "meta.json", "delete it")
        itemsize = np.dtype(meta["dtype"]).itemsize
        for shard in meta["train"]["shards"] + meta["valid"]["shards"]:
            path = folder / shard["file"]
            if path.stat().st_size != itemsize * shard["tokens"] or sha256(path) != shard["sha256"]:
                print(f"{path} is damaged: the text is tokenised again.", flush=True)
                return False
    except (BadInput, KeyError, TypeError, ValueError, OSError):
        return False
    return True


def digest(folder):
    """Return the SHA-256 of the token ids of both splits of a prepared folder, from its meta.json."""
    meta = read_json(folder / "meta.json", "delete it")
    result = hashlib.sha256(meta["dtype"].encode())
    for split in SPLITS:
        result.update(split.encode())
        for shard in meta[split]["shards"]:
            result.update(shard["sha256"].encode())
    return result.hexdigest()


# --- tokenisation: text chunks to shards ---

@dataclass
class EncodedChunk:
    ids: np.ndarray                          # [tokens], the shard's dtype
    words: int
    bytes: int                               # UTF-8 bytes of the text
    source_bytes: float                      # bytes on disk, for the progress line
    cpu_seconds: float


def text_chunks(sources):
    """Yield (fragments, source bytes), about CHUNK characters each, for the threads to encode. A fragment is
    (begins_document, text as str or bytes, name of the source)."""
    fragments = []
    length = 0
    source_bytes = 0.0
    for source in sources:
        for begins_document, text, n_bytes in source.fragments():
            if text:
                fragments.append((begins_document, text, source.name))
            length += len(text)
            source_bytes += n_bytes
            if length >= texts.CHUNK:
                yield fragments, source_bytes
                fragments = []
                length = 0
                source_bytes = 0.0
    if fragments:
        yield fragments, source_bytes


def encode_chunk(tokenizer, dtype, chunk):
    """Return the EncodedChunk of an item of text_chunks, with the end-of-text token before each document."""
    start_time = time.thread_time()
    fragments, source_bytes = chunk
    eos = np.array([tokenizer.eos], dtype)
    ids = []
    words = 0
    n_bytes = 0
    for begins_document, text, name in fragments:
        text, text_bytes = texts.decoded(text, name)
        if begins_document:
            ids.append(eos)
        ids.append(tokenizer.encode(text))
        words += len(text.split())
        n_bytes += text_bytes
    ids = np.concatenate(ids).astype(dtype)
    return EncodedChunk(ids, words, n_bytes, source_bytes, time.thread_time() - start_time)


def tokenise(sources, tokenizer, folder, split, dtype):
    """Write a split's token ids as shards. Return their entries in meta.json."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    encode = functools.partial(encode_chunk, tokenizer, dtype)
    shards = []
    cpu_seconds = 0.0
    start_time = time.perf_counter()
    line = ProgressLine(f"tokenising {split}", sum(source.size for source in sources), "B")
    with ThreadPoolExecutor(cores) as pool, line:                      # tiktoken releases the GIL
        encoded = in_order(pool, encode, text_chunks(sources), ahead=3 * cores)
        for first in encoded:
            path = folder / f"{split}_{len(shards):05d}.bin"
            shard, seconds = write_shard(path, chain([first], islice(encoded, SHARD - 1)), not shards, line)
            shards.append(shard)
            cpu_seconds += seconds
    n_bytes = sum(shard["bytes"] for shard in shards)
    if n_bytes >= 10 * texts.CHUNK:
        speed = n_bytes / 1e6 / (time.perf_counter() - start_time)
        limit = n_bytes / 1e6 / cpu_seconds * cores
        print(f"{folder.name}, {split}: {n_bytes / 1e6:,.0f} MB tokenised at {speed:.1f} MB/s, "
              f"{speed / limit:.0%} of the {cores} cores' limit ({limit:.1f} MB/s).", flush=True)
    return shards


def write_shard(path, encoded_chunks, begins_split, line):
    """Write a token file. Return (its entry in meta.json, CPU seconds spent encoding)."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shard = {"file": path.name, "tokens": 0, "words": 0, "bytes": 0}
    digest = hashlib.sha256()
    cpu_seconds = 0.0
    try:
        with open(temporary, "wb") as file:
            for chunk in encoded_chunks:
                ids = chunk.ids
                if begins_split and shard["tokens"] == 0:
                    ids = ids[1:]                         # no end of text before the first document
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                shard["tokens"] += len(ids)
                shard["words"] += chunk.words
                shard["bytes"] += chunk.bytes
                cpu_seconds += chunk.cpu_seconds
                line.add(chunk.source_bytes)
        fsync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return shard | {"sha256": digest.hexdigest()}, cpu_seconds


def in_order(pool, function, arguments, ahead):
    """Yield function(argument) in order, with at most `ahead` calls in flight."""
    running = deque()
    for argument in arguments:
        running.append(pool.submit(function, argument))
        if len(running) == ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def adopt_bins(path, tokenizer, data_dir):
    """Return a folder whose meta.json points to nanoGPT's train.bin and val.bin in place (no header; uint16,
    or uint32/uint64 if every value is then a valid id). Word counts are unknown."""
    files = {"train": path / "train.bin", "valid": path / "val.bin"}
    for file in files.values():
        if not file.is_file():
            raise BadInput(f"{path} has no {file.name}: a folder of token files needs train.bin and val.bin.")
    if (path / "meta.pkl").exists():
        raise BadInput(f"The token ids in {path} use the alphabet in its meta.pkl, as nanoGPT's character "
                       "data do: give the original text (its input.txt), or remove meta.pkl if they are ids "
                       f"of --tokenizer={tokenizer.name}.")
    dtype = "uint16"
    for wider in ("uint32", "uint64"):       # read as uint16, one or three zeros follow every id
        if all(are_ids(file, wider, tokenizer.n_vocab) for file in files.values()):
            dtype = wider
    meta = {"source": str(path), **tokenizer.describe(), "dtype": dtype}
    for split, file in files.items():
        highest = max((int(piece.max()) for piece in id_pieces(file, dtype)), default=0)
        if highest >= tokenizer.n_vocab:
            raise BadInput(f"{file} contains token id {highest}, and the highest id of {tokenizer.name} is "
                           f"{tokenizer.n_vocab - 1}: choose the --tokenizer= that wrote it.")
        length = file.stat().st_size // np.dtype(dtype).itemsize
        shard = {"file": str(file.resolve()), "tokens": length, "sha256": sha256(file)}
        meta[split] = {"tokens": length, "shards": [shard]}
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    folder = Path(data_dir) / f"bins-{tokenizer.name}-{digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return folder


def id_pieces(path, dtype):
    """Yield slices of a token file, read as dtype."""
    length = path.stat().st_size // np.dtype(dtype).itemsize
    ids = open_ids(path, dtype, length)
    with ProgressLine(f"checking {path}"):
        yield from (ids[i:i + 2**24] for i in range(0, length, 2**24))


def are_ids(path, dtype, n_vocab):
    """Return whether a token file, read as dtype, contains only ids below n_vocab."""
    whole = path.stat().st_size % np.dtype(dtype).itemsize == 0
    return whole and all(piece.max() < n_vocab for piece in id_pieces(path, dtype))


def open_ids(path, dtype, length):
    """Return the ids [length] of a token file, memory-mapped."""
    if length == 0:                          # an empty file can't be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=length))


# --- batches ---

class TokenFile:
    """A split's token ids: its memory-mapped shards as one sequence. words, bytes: of the text, or None."""

    def __init__(self, folder, split):
        self.folder = Path(folder)
        meta = read_json(self.folder / "meta.json", "delete it")
        self.dtype = meta["dtype"]
        self.shards = meta[split]["shards"]
        self.words = meta[split].get("words")
        self.bytes = meta[split].get("bytes")
        self.starts = np.cumsum([0] + [shard["tokens"] for shard in self.shards]).tolist()
        self.opened = {}                                  # {shard: ids}, per process

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, where):
        """Return the ids of a slice, int64 [stop - start]."""
        start, stop, _ = where.indices(len(self))
        shard = bisect_right(self.starts, start) - 1
        parts = []
        while start < stop:
            end = min(stop, self.starts[shard + 1])
            offset = self.starts[shard]
            if shard not in self.opened:
                path = self.folder / self.shards[shard]["file"]
                self.opened[shard] = open_ids(path, self.dtype, self.shards[shard]["tokens"])
            parts.append(self.opened[shard][start - offset:end - offset])
            start = end
            shard += 1
        return np.concatenate(parts or [np.zeros(0, np.int64)], dtype=np.int64)

    def __getstate__(self):
        return self.__dict__ | {"opened": {}}             # a loader process that is not forked opens its own


class Windows(torch.utils.data.Dataset):
    """self[step] is this rank's share of a step's batch: a list of micro-batches x, y [micro_batch, T], where
    y is x shifted by one, the first token of a document included, which follows <|endoftext|>.

    Depends only on (seed, step): each epoch cuts the text into windows from a random offset and visits each
    window once, in random order. Ranks take consecutive slices of the batch, so a step's text does not depend
    on the world size. digest: of the text; a resumed run compares it.
    """

    def __init__(self, tokens, block_size, sequences_per_step, seed, rank=0, world_size=1, digest=""):
        if len(tokens) <= block_size:
            raise BadInput(f"The training text has {len(tokens)} tokens, and one window needs "
                           f"{block_size + 1}: lower --block_size, or give more text.")
        self.text = tokens
        self.digest = digest
        self.longest = block_size
        self.seed = seed
        self.per_step = sequences_per_step
        self.micro_batch = sequences_per_step // world_size
        self.mine = range(rank * self.micro_batch, (rank + 1) * self.micro_batch)
        self.per_epoch = max(1, (len(tokens) - 1) // block_size - 1)
        self.n_offsets = min(block_size, len(tokens) - self.per_epoch * block_size)
        self.latest = (None, None, None)                  # cache: (epoch, offset, order)
        self.steps_per_epoch = self.per_epoch / self.per_step

    def tokens(self, step):
        """Return (positions, targets) of a step over all ranks; targets is the loss denominator."""
        return self.per_step * self.longest, self.per_step * self.longest

    def cut(self, epoch):
        """Return an epoch's (offset of the first window, order of the windows [per_epoch])."""
        if self.latest[0] != epoch:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            offset = int(rng.integers(self.n_offsets))
            self.latest = (epoch, offset, rng.permutation(self.per_epoch))
        return self.latest[1:]

    def __getitem__(self, step):
        rows = []
        for i in self.mine:
            epoch, position = divmod(step * self.per_step + i, self.per_epoch)
            offset, order = self.cut(epoch)
            start = offset + int(order[position]) * self.longest
            rows.append(self.text[start:start + self.longest + 1])
        parts = torch.from_numpy(np.stack(rows)).split(self.micro_batch)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def batches(dataset, steps, num_workers=0, pin_memory=False, prefetch=2):
    """Iterate over dataset[step] for the steps, in num_workers loader processes."""
    return iter(torch.utils.data.DataLoader(
        dataset, sampler=steps, batch_size=None, num_workers=num_workers, pin_memory=pin_memory,
        prefetch_factor=prefetch if num_workers else None, worker_init_fn=ignore_signals))


def ignore_signals(_):
    """Ignore the group's signals: the training process ends its loader processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def complete_pass(tokens, block_size, batch_size, limit=None, rank=0, world_size=1, stride=None):
    """Yield this rank's batches x, y [batch_size, block_size] of one pass that predicts each token (or each
    of the first `limit`) once.

    Windows start `stride` tokens apart (None: block_size, no overlap). Targets in an overlap are IGNORE in
    the later window, as are positions past the end of the text, so that all batches have the same shape.
    """
    predicted = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
    stride = stride or block_size
    n_windows = 1 + -(-max(0, predicted - block_size) // stride) if predicted > 0 else 0
    windows = range(rank, n_windows, world_size)
    for first in range(0, len(windows), batch_size):
        x = np.zeros((batch_size, block_size), dtype=np.int64)
        y = np.full((batch_size, block_size), IGNORE, dtype=np.int64)
        for row, window in enumerate(windows[first:first + batch_size]):
            start = window * stride
            ids = tokens[start:min(start + block_size, predicted) + 1]
            n = len(ids) - 1
            x[row, :n] = ids[:-1]
            y[row, :n] = ids[1:]
            if window > 0:
                y[row, :block_size - stride] = IGNORE
        yield torch.from_numpy(x), torch.from_numpy(y)
