"""Where text comes from: .txt, .jsonl and .parquet files, folders of them, datasets of the Hugging Face hub.

A source is a part of a split. It has a `size` (bytes on the disk, which the progress bar counts),
`divide(at)` gives it in two, `raw()` yields the bytes that identify it, and `fragments()` yields (begins a
document, text as str or bytes, bytes of size done) in pieces that tokenisation does not notice.
"""
import os
import re
from pathlib import Path

from runtime import hub
from runtime.config import BadInput, parse_json

CHUNK = 2**20                        # bytes read, and tokenised, at a time
SPLITS = ("train", "valid")
VALID_NAMES = ("valid", "validation", "val", "dev")
SUFFIXES = (".txt", ".jsonl", ".parquet")
KINDS = ".txt, .jsonl or .parquet"
NOT_TEXT = (".json", ".csv", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".npy", ".pt", ".safetensors")
HUB_NAMES = {"wikitext": "Salesforce/wikitext:wikitext-103-raw-v1"}
# Line ends at which GPT-2's pattern, and those that split off digits, always end a piece: cutting there
# changes no token.
SAFE_CUT = re.compile(rb"(?<=[!-~])\n(?=[!-~])|\n(?= [!-/:-~])")


def find(dataset, text_key, only=None):
    """{split: sources} of a file, a folder or a name on the hub, as README.md says which file is which split.
    only: a split (train, valid or test), which is returned as valid, with nothing to train on; of a single
    file it is all of it."""
    path = Path(dataset)
    if path.exists():
        texts = find_files(path, text_key)
    elif dataset in HUB_NAMES or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", dataset) and path.suffix not in SUFFIXES:
        texts = find_on_hub(dataset, text_key)
    else:
        raise BadInput(f"There is no dataset {dataset}: give a {KINDS} file, a folder of them, task:NAME, or "
                       "a name on the Hugging Face hub (wikitext, org/name, org/name:config).")
    if only and path.is_file():
        return {"train": [], "valid": texts["train"]}
    if only:
        if not texts["valid"] and only != "test" and texts["train"]:
            texts["train"], texts["valid"] = split_off_tail(texts["train"])
        if not texts[only]:
            raise BadInput(f"The dataset {dataset} has no text of the split {only}: choose another --split=.")
        return {"train": [], "valid": texts[only]}
    if not texts["train"]:
        raise BadInput(f"The dataset {dataset} has held-out text and nothing to train on: add a train file.")
    if not texts["valid"]:
        texts["train"], texts["valid"] = split_off_tail(texts["train"])
    return texts


def find_files(path, text_key):
    if path.suffix in NOT_TEXT:
        raise BadInput(f"{path} is not text as it stands: unpack or convert it to {KINDS}.")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()
                                                          and not re.search(r"(^|/)\.", str(f.relative_to(path))))
    # an empty shard holds no text, whatever its format
    full = [f for f in files if f.stat().st_size]
    if not full:
        raise BadInput(f"The dataset {path} holds no text: give a {KINDS} file, or a folder of them.")
    names = {f: str(f.relative_to(path).with_suffix("")) if path.is_dir() else "" for f in full}
    marks = {f: set(re.split(r"[\W_]+", name)) for f, name in names.items()}
    held_out = [f for f in full if marks[f] & {*VALID_NAMES, "test"}]
    train = [f for f in full if "train" in marks[f]] or [f for f in full if f not in held_out]
    kinds = {".jsonl": JsonLines, ".parquet": Parquet}

    def source(file):
        return kinds[file.suffix](file, text_key) if file.suffix in kinds else Text(file)
    return {"train": [source(f) for f in train], "valid": [source(f) for f in full if marks[f] & {*VALID_NAMES}],
            "test": [source(f) for f in full if "test" in marks[f]]}


def find_on_hub(name, text_key):
    if not (answers := hub.answers()):
        # its cache at once, instead of after half a minute of retries
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets
    except ImportError:
        raise BadInput(f"The dataset {name} is no file here, and a name on the hub needs the package "
                       "datasets: pip install datasets, or give a path.") from None
    repository, _, configuration = HUB_NAMES.get(name, name).partition(":")
    try:
        found = datasets.load_dataset(repository, configuration or None)
    # connection, name, configuration, format: it says which
    except Exception as e:
        raise BadInput(f"There is no file or folder {name} here, and no dataset {repository} from the Hugging "
                       f"Face hub{'' if answers else ', which does not answer'} ({hub.reason(e)}): correct "
                       "the name, or download the files where there is a network and give their "
                       "path.") from None
    lines = repository == "Salesforce/wikitext"
    texts = {split: [HubRows(found[k], f"{name} ({k})", text_key, lines) for k in names if k in found]
             for split, names in (("train", ["train"]), ("valid", VALID_NAMES), ("test", ["test"]))}
    if not any(texts.values()):
        raise BadInput(f"The dataset {name} has no split 'train' (it has {', '.join(found)}): give files of "
                       "your choice by path.")
    return texts


def split_off_tail(sources):
    """(train, valid): the last tenth of the sources, at most 10 MB, goes to validation."""
    total = sum(source.size for source in sources)
    cut, train, valid = total - min(total - total * 9 // 10, 10**7), [], []
    for source in sources:
        if cut <= 0 or cut >= source.size:
            (valid if cut <= 0 else train).append(source)
        else:
            head, tail = source.divide(cut)
            train.append(head)
            valid.append(tail)
        cut -= source.size
    return train, valid


def blocks(file, n):
    """n bytes of an open file, CHUNK at a time."""
    while n and (block := file.read(min(CHUNK, n))):
        n -= len(block)
        yield block


def pieces(blocks):
    """One text, given in blocks of bytes, in pieces of about CHUNK cut where tokenisation does not notice."""
    rest = b""
    for block in blocks:
        rest += block
        if len(rest) < CHUNK:
            continue
        cuts = [m.end() for m in SAFE_CUT.finditer(rest, max(0, len(rest) - CHUNK // 8))]
        # bounded memory comes before the last token of 8 MB
        if not cuts and len(rest) > 8 * CHUNK:
            last_character = max((i for i in range(len(rest) - 4, len(rest)) if rest[i] & 0xC0 != 0x80), default=len(rest))
            cuts = [rest.rfind(b"\n") + 1 or last_character]
        if cuts:
            yield rest[:cuts[-1]]
            rest = rest[cuts[-1]:]
    if rest:
        yield rest


class Documents:
    """A list of texts in memory."""

    def __init__(self, texts):
        self.name, self.texts = "the task's text", [text.encode() for text in texts]
        self.size = sum(map(len, self.texts))

    def raw(self):
        return self.texts

    def fragments(self):
        return ((True, text, len(text)) for text in self.texts)


class Text:
    """Bytes start to stop of a .txt file: one document."""

    def __init__(self, path, start=0, stop=None):
        self.path = self.name = path
        self.start, self.stop = start, path.stat().st_size if stop is None else stop

    @property
    def size(self):
        return self.stop - self.start

    def divide(self, at):
        """Characters stay whole."""
        at += self.start
        with open(self.path, "rb") as f:
            f.seek(at)
            at += next((i for i, byte in enumerate(f.read(4)) if byte & 0xC0 != 0x80), 0)
        return Text(self.path, self.start, at), Text(self.path, at, self.stop)

    def raw(self):
        with open(self.path, "rb") as f:
            f.seek(self.start)
            yield from blocks(f, self.size)

    def fragments(self):
        for i, piece in enumerate(pieces(self.raw())):
            yield i == 0, piece, len(piece)


class JsonLines(Text):
    """Bytes start to stop of a .jsonl file: an object a line, its text_key a document."""

    def __init__(self, path, key, start=0, stop=None):
        super().__init__(path, start, stop)
        self.key = key

    def divide(self, at):
        """Where the line that holds byte `at` begins."""
        at += self.start
        with open(self.path, "rb") as f:
            while at > self.start:
                back = max(self.start, at - 2**16)
                f.seek(back)
                if newline := f.read(at - back).rfind(b"\n") + 1:
                    at = back + newline
                    break
                at = back
        return JsonLines(self.path, self.key, self.start, at), JsonLines(self.path, self.key, at, self.stop)

    def raw(self):
        yield self.key.encode()
        yield from super().raw()

    def fragments(self):
        with open(self.path, "rb") as f:
            f.seek(self.start)
            done = self.start
            while done < self.stop and (line := f.readline()):
                if line.strip():
                    yield True, self.text(line, done), len(line)
                done += len(line)

    def text(self, line, at):
        try:
            row = parse_json(line)
        except ValueError as e:
            raise BadInput(f"{self.where(at)} is not JSON ({e}): a .jsonl file has one object a "
                           "line.") from None
        if not isinstance(row, dict) or self.key not in row:
            has = f"has the keys {', '.join(row)}" if isinstance(row, dict) else f"is a {type(row).__name__}"
            raise BadInput(f"{self.where(at)} has no '{self.key}' (it {has}): name the text's with "
                           "--text_key=.")
        if not isinstance(row[self.key], str | None):
            raise BadInput(f"{self.where(at)} has a '{self.key}' of type {type(row[self.key]).__name__}, not "
                           "a text: choose another --text_key=.")
        return row[self.key] or ""

    def where(self, at):
        """The number of the line that begins at byte `at`."""
        before = sum(block.count(b"\n") for block in Text(self.path, 0, at).raw())
        return f"{self.path}, line {before + 1},"


class Rows:
    """Rows start to stop of a table with a column of texts, a document each; `width` is a row's share of the
    size."""

    def check(self, columns):
        """columns: {name: pyarrow type}"""
        kind = str(columns.get(self.key))
        if self.key not in columns:
            raise BadInput(f"{self.name} has no column '{self.key}' (it has {', '.join(columns)}): name the "
                           "text's with --text_key=.")
        if not re.match("(dictionary<values=)?(large_)?string", kind):
            raise BadInput(f"{self.name}: the column '{self.key}' holds {kind}, not text: choose another "
                           "--text_key=.")

    @property
    def size(self):
        return int((self.stop - self.start) * self.width)

    def fragments(self):
        for texts in self.batches():
            for text in texts:
                yield True, text or "", self.width


class Parquet(Rows):
    """Rows of a .parquet file, decoded a few thousand at a time."""

    def __init__(self, path, key, start=0, stop=None):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise BadInput(f"{path} needs the package pyarrow: pip install pyarrow.") from None
        self.path = self.name = path
        self.key, self.start = key, start
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as e:
            raise self.unreadable(e) from None
        with file:
            rows = file.metadata.num_rows
            self.check({field.name: field.type for field in file.schema_arrow})
        self.stop, self.width = rows if stop is None else stop, path.stat().st_size / max(1, rows)

    def unreadable(self, error):
        return BadInput(f"{self.path} is not a readable parquet file ({str(error).splitlines()[0]}): get it "
                        "again, or take it out.")

    def divide(self, at):
        at = self.start + int(at / self.width)
        return Parquet(self.path, self.key, self.start, at), Parquet(self.path, self.key, at, self.stop)

    def raw(self):
        yield f"{self.key} {self.start} {self.stop}".encode()
        yield from Text(self.path).raw()

    def batches(self):
        import pyarrow.parquet
        first = 0
        try:
            # without, a column of a group at once
            with pyarrow.parquet.ParquetFile(self.path, buffer_size=CHUNK) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if first < self.stop and first + rows > self.start:
                        for batch in file.iter_batches(512, row_groups=[group], columns=[self.key], use_threads=False):
                            start = max(0, self.start - first)
                            yield batch.column(0).slice(start, max(0, self.stop - first - start)).to_pylist()
                            first += len(batch)
                    else:
                        first += rows
        except (pyarrow.ArrowException, OSError) as e:
            raise self.unreadable(e) from None


class HubRows(Rows):
    """Rows of a dataset that the package datasets has brought here. With `lines` they are the lines of one
    text (WikiText's rows are, and have lost what the empty ones held, a blank)."""

    def __init__(self, dataset, name, key, lines=False, start=0, stop=None):
        self.dataset, self.name, self.key, self.lines = dataset, name, key, lines
        self.start, self.stop = start, len(dataset) if stop is None else stop
        self.check({field.name: field.type for field in dataset.features.arrow_schema})
        self.width = dataset.data.nbytes / max(1, len(dataset))

    def divide(self, at):
        at = self.start + int(at / self.width)
        return (HubRows(self.dataset, self.name, self.key, self.lines, self.start, at),
                HubRows(self.dataset, self.name, self.key, self.lines, at, self.stop))

    def batches(self):
        rows = self.dataset.select_columns([self.key]).select(range(self.start, self.stop)).with_format("arrow")
        for batch in rows.iter(2048):
            yield batch.column(0).to_pylist()

    def raw(self):
        for texts in self.batches():
            for text in texts:
                yield f"{len(text or '')} {text}".encode()

    def fragments(self):
        if not self.lines:
            yield from super().fragments()
            return
        text = ("".join((row or " ").rstrip("\n") + "\n" for row in rows).encode() for rows in self.batches())
        for i, piece in enumerate(pieces(text)):
            yield i == 0, piece, len(piece)
