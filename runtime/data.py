"""Texts to token files, once; and token files to batches that are a pure function of (seed, step)."""
import hashlib
import json
import os
import re
import signal
import time
from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from model import IGNORE
from runtime import rewards, texts
from runtime.checkpoint import fsync, write_atomically
from runtime.config import BadInput, read_json
from runtime.texts import SPLITS

FORMAT = 2                           # of the prepared folder
SHARD = 256                          # pieces of about texts.CHUNK that go into one token file
SHARD_KEYS = {"file", "tokens", "words", "bytes"}


# --- preparation: once per text and tokenizer ---

def prepare(dataset, tokenizer, data_dir, text_key="text", only=None):
    """Folder with the token ids of a dataset, train_*.bin and valid_*.bin, and meta.json; made now unless it
    is there.

    dataset: what texts.find takes, a folder with nanoGPT's train.bin and val.bin, or task:NAME. Documents are
    separated by the end-of-text token. Without a validation split the last tenth of the text, at most 10 MB,
    is one. only: one split, as valid (of nanoGPT's files it is val.bin).
    """
    try:
        if list(Path(dataset).glob("*.bin")):
            if only not in (None, "valid"):
                raise BadInput(f"Of token files only the split valid can be had, and {only} was asked for: "
                               "leave it out.")
            return adopt_bins(Path(dataset), tokenizer, data_dir)
        found = task_texts(dataset[5:], only) if dataset.startswith("task:") else texts.find(dataset, text_key, only)
        return prepare_texts(dataset, found, tokenizer, Path(data_dir))
    except OSError as e:
        raise BadInput(f"Preparing {dataset} in {data_dir} failed ({e.strerror}: {e.filename}): make it "
                       "readable, free some space, or choose another place with --data_dir=.") from None


def task_texts(name, only):
    """{split: sources} of the text that a task generates."""
    if only not in (None, *SPLITS):
        raise BadInput(f"The text of the task {name} has no split {only}: choose another --split=.")
    try:
        task = rewards.load(name)
        found = {split: [texts.Documents(task.documents(split))] for split in ([only] if only else SPLITS)}
    except (LookupError, ValueError, OSError) as e:
        raise BadInput(str(e)) from e
    return {"train": [], "valid": found[only]} if only else found


def prepare_texts(dataset, found, tokenizer, data_dir):
    """The folder's name holds a digest of the texts, and meta.json is written when all else is there. Until
    then partial.json counts the shards that are whole, so that a preparation which was killed goes on after
    them. Two at the same time put the same content in place, each under temporary names of its own."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.eos}".encode())
    for split in SPLITS:
        for source in found[split]:
            digest.update(f"{split} {source.size}\n".encode())
            for block in source.raw():
                digest.update(block)
    name = re.sub(r"\W+", "-", str(dataset) if ":" in str(dataset) else Path(dataset).resolve().stem)
    folder = data_dir / f"{name}-{tokenizer.name}-{digest.hexdigest()[:12]}"
    if is_prepared(folder):
        return folder

    meta = {"source": str(dataset), "sha256": digest.hexdigest(), **tokenizer.describe(),
            "dtype": "uint16" if tokenizer.n_vocab <= 2**16 else "uint32"}
    made = read_or_empty(folder / "partial.json")
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        shards = whole_shards(folder, made.get(split, []), meta["dtype"])
        for shards in tokenise(found[split], tokenizer, folder, split, meta["dtype"], shards):
            made[split] = shards
            write_atomically(folder / "partial.json", json.dumps(made).encode())
        meta[split] = {"shards": shards} | {key: sum(s[key] for s in shards) for key in ("tokens", "words", "bytes")}
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
    (folder / "partial.json").unlink(missing_ok=True)
    return folder


def is_prepared(folder):
    """Whether a finished preparation stands there, with files as long as meta.json says."""
    meta = read_or_empty(folder / "meta.json")
    try:
        return all(whole_shards(folder, meta[s]["shards"], meta["dtype"]) == meta[s]["shards"] for s in SPLITS)
    except (KeyError, TypeError):
        return False


def whole_shards(folder, shards, dtype):
    """The shards up to the first that is damaged: its file missing or of another length, or what is said of
    it."""
    width, whole = np.dtype(dtype).itemsize, []
    for shard in shards if isinstance(shards, list) else []:
        try:
            if (folder / shard["file"]).stat().st_size != width * shard["tokens"] or shard.keys() != SHARD_KEYS:
                break
        except (KeyError, TypeError, OSError):
            break
        whole.append(shard)
    return whole


def read_or_empty(path):
    """The object in a file; {} if there is none that can be read: then it is written anew."""
    try:
        return read_json(path, "delete it")
    except BadInput:
        return {}


def jobs(sources):
    """Fragments of texts, gathered to about CHUNK: a list of (begins a document, text, its source), bytes of
    size done."""
    gathered, length, size = [], 0, 0.0
    for source in sources:
        for begins, text, done in source.fragments():
            if text:
                gathered.append((begins, text, source.name))
            length, size = length + len(text), size + done
            if length >= texts.CHUNK:
                yield gathered, size
                gathered, length, size = [], 0, 0.0
    if gathered:
        yield gathered, size


def tokenise(sources, tokenizer, folder, split, dtype, shards):
    """Write the token ids of a split to shards after those that are there; yields the list of shards after
    each."""
    cores, spent = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), 0.0
    eos = np.array([tokenizer.eos], dtype)

    def encode(job):
        began = time.thread_time()
        fragments, size = job
        ids, words, length = [], 0, 0
        for begins, text, name in fragments:
            try:
                text = text if isinstance(text, str) else text.decode()
                encoded = text.encode()
            except UnicodeDecodeError as e:
                raise BadInput(f"{name} is not UTF-8 (byte {e.object[e.start]:#x}): convert it "
                               "first.") from None
            except UnicodeEncodeError:                        # half of a surrogate pair, as JSON can spell it
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                encoded = text.encode()
            ids += [eos] * begins + [tokenizer.encode(text)]
            words, length = words + len(text.split()), length + len(encoded)
        return np.concatenate(ids).astype(dtype), words, length, size, time.thread_time() - began

    todo, total = jobs(sources), sum(source.size for source in sources)
    skipped = sum(size for _, size in islice(todo, SHARD * len(shards)))
    bar = tqdm(total=round(total), initial=round(skipped), desc=f"tokenising {split}", unit="B", unit_scale=True, disable=None)
    began, length = time.perf_counter(), 0
    with ThreadPoolExecutor(cores) as pool, bar:                       # tiktoken releases the GIL
        for first in todo:
            name = f"{split}_{len(shards):05d}.bin"
            temporary, counts = folder / f"{name}.tmp-{os.getpid()}", np.zeros(3, dtype=np.int64)
            try:
                with open(temporary, "wb") as out:
                    for ids, words, n, size, seconds in in_order(pool, encode, chain([first], islice(todo, SHARD - 1)),
                                                                 3 * cores):
                        if not shards and not counts[0]:
                            # the end of a document that is not there
                            ids = ids[1:]
                        out.write(ids.tobytes())
                        counts += (len(ids), words, n)
                        length, spent = length + n, spent + seconds
                        bar.update(round(size))
                fsync(temporary)
                temporary.rename(folder / name)
            finally:
                temporary.unlink(missing_ok=True)
            shards = shards + [{"file": name} | dict(zip(("tokens", "words", "bytes"), counts.tolist()))]
            yield shards
    if length >= 10 * texts.CHUNK:
        speed, limit = length / 1e6 / (time.perf_counter() - began), length / 1e6 / spent * cores
        print(f"{folder.name}, {split}: {length / 1e6:,.0f} MB tokenised at {speed:.1f} MB/s, "
              f"{speed / limit:.0%} of what {cores} cores can ({limit:.1f} MB/s).", flush=True)


def in_order(pool, function, arguments, ahead):
    """Results in the order of the arguments, which are drawn at most `ahead` before their result is asked
    for."""
    running = deque()
    for argument in arguments:
        running.append(pool.submit(function, argument))
        if len(running) == ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def adopt_bins(path, tokenizer, data_dir):
    """nanoGPT's train.bin and val.bin (uint16, no header), used where they lie. How many words they hold is
    not known."""
    files = {"train": path / "train.bin", "valid": path / "val.bin"}
    meta = {"source": str(path), **tokenizer.describe(), "dtype": "uint16"}
    for split, file in files.items():
        if not file.is_file():
            raise BadInput(f"{path} has no {file.name}: a folder of token files needs train.bin and val.bin.")
        size = file.stat().st_size // 2
        ids = np.memmap(file, dtype=np.uint16, mode="r", shape=size) if size else np.zeros(0, np.uint16)
        top = max((int(ids[i:i + 2**24].max()) for i in range(0, len(ids), 2**24)), default=0)
        if top >= tokenizer.n_vocab:
            raise BadInput(f"{file} holds token id {top}, and the tokenizer {tokenizer.name} ends at "
                           f"{tokenizer.n_vocab - 1}: choose the --tokenizer= that wrote it.")
        meta[split] = {"tokens": len(ids), "shards": [{"file": str(file.resolve()), "tokens": len(ids)}]}
    folder = Path(data_dir) / f"bins-{tokenizer.name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return folder


# --- batches ---

class TokenFile:
    """The token ids of a split, its shards one after the other, memory-mapped; `words` and `bytes` are those
    of its text, None if not known."""

    def __init__(self, folder, split):
        self.folder, meta = Path(folder), read_json(Path(folder) / "meta.json", "delete it")
        self.dtype, self.shards = meta["dtype"], meta[split]["shards"]
        self.words, self.bytes = meta[split].get("words"), meta[split].get("bytes")
        self.starts = np.cumsum([0] + [shard["tokens"] for shard in self.shards]).tolist()
        self.open = {}                                    # shards opened, once in each process

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, where):
        """int64 ids of a slice."""
        start, stop, _ = where.indices(len(self))
        shard, parts = bisect_right(self.starts, start) - 1, []
        while start < stop:
            end = min(stop, self.starts[shard + 1])
            parts.append(self.ids(shard)[start - self.starts[shard]:end - self.starts[shard]])
            start, shard = end, shard + 1
        return np.concatenate(parts or [np.zeros(0, np.int64)], dtype=np.int64)

    def ids(self, shard):
        if shard not in self.open:
            path, length = self.folder / self.shards[shard]["file"], self.shards[shard]["tokens"]
            self.open[shard] = np.asarray(np.memmap(path, dtype=self.dtype, mode="r", shape=length)) if length else \
                np.zeros(0, self.dtype)
        return self.open[shard]

    def __getstate__(self):
        return self.__dict__ | {"open": {}}               # a loader process that is not forked opens its own


class Windows(torch.utils.data.Dataset):
    """`self[step]` is this rank's share of the step's batch, a list of micro-batches x, y [micro_batch, T], y
    the successors of x.

    A pure function of (seed, step): each epoch cuts the text into windows from an offset of its own and
    visits them in an order of its own, every window once. Ranks take consecutive slices of the batch, so the
    text of a step does not depend on how many there are.
    """

    digest = ""                                           # a text's stands in the name of its folder

    def __init__(self, tokens, block_size, sequences_per_step, seed, rank=0, world_size=1):
        if len(tokens) <= block_size:
            raise BadInput(f"The training text has {len(tokens)} tokens, too few for one block of "
                           f"{block_size} and its successor: lower --block_size, or give more text.")
        self.text, self.longest, self.seed, self.per_step = tokens, block_size, seed, sequences_per_step
        share = self.micro_batch = sequences_per_step // world_size
        self.mine = range(rank * share, (rank + 1) * share)
        self.per_epoch = max(1, (len(tokens) - 1) // block_size - 1)
        self.offsets = min(block_size, len(tokens) - self.per_epoch * block_size)
        self.order = (None, None, None)
        self.steps_per_epoch = self.per_epoch / self.per_step

    def tokens(self, step):
        """(positions, targets) of a step, all ranks together; the second is what its loss is divided by."""
        return self.per_step * self.longest, self.per_step * self.longest

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
            start = offset + int(order[place]) * self.longest
            rows.append(self.text[start:start + self.longest + 1])
        parts = torch.from_numpy(np.stack(rows)).split(self.micro_batch)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def batches(dataset, steps, num_workers=0, pin_memory=False, prefetch=2):
    """Iterate over dataset[step] for the steps, in worker processes if there are any."""
    return iter(torch.utils.data.DataLoader(
        dataset, sampler=steps, batch_size=None, num_workers=num_workers, pin_memory=pin_memory,
        prefetch_factor=prefetch if num_workers else None, worker_init_fn=ignore_signals))


def ignore_signals(_):
    """Ctrl-C and torchrun's SIGTERM reach every process of a group; the training process decides, and ends
    its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def complete_pass(tokens, block_size, batch_size, limit=None, rank=0, world_size=1, stride=None):
    """This rank's batches of a pass over all (or the first `limit`) predicted tokens, once each, in windows
    of block_size: x, y [batch_size, T]. Windows begin `stride` tokens apart, None: they do not overlap; where
    they do, the later one has IGNORE for a target, as have cells past the end of the text, so every batch has
    the same shape."""
    predicted, stride = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1), stride or block_size
    windows = range(rank, 1 + -(-max(0, predicted - block_size) // stride) if predicted > 0 else 0, world_size)
    for first in range(0, len(windows), batch_size):
        x = np.zeros((batch_size, block_size), dtype=np.int64)
        y = np.full((batch_size, block_size), IGNORE, dtype=np.int64)
        for row, window in enumerate(windows[first:first + batch_size]):
            start = window * stride
            ids = tokens[start:min(start + block_size, predicted) + 1]
            x[row, :len(ids) - 1], y[row, :len(ids) - 1] = ids[:-1], ids[1:]
            y[row, :(block_size - stride) * (window > 0)] = IGNORE
        yield torch.from_numpy(x), torch.from_numpy(y)
