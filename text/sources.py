"""Read text from files (see SUFFIXES), folders of them, and datasets of the Hugging Face hub.

A source is a part of a split:

    name                   for messages
    size                   bytes on disk, for the progress line
    divide(at, low, high)  two lists of sources, cut after about `at` bytes, at least `low` and at most `high`
    raw()                  the bytes that identify it
    fragments()            (begins_document, text as str or bytes, share of the size), cut only where the cut
                           does not change the tokens
"""
import codecs
import copy
import csv
import os
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

from runtime.config import BadInput, parse_json, require
from runtime.progress import ProgressLine
from runtime.usage import load_package

CHUNK = 2**20                        # bytes read and tokenised at a time
SPLITS = ("train", "valid")
VALID_NAMES = ("valid", "validation", "val", "dev")
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".csv")
ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".markdown": ".md", ".rst": ".md", ".tsv": ".csv"}
KINDS = ".txt, .md, .jsonl, .parquet or .csv"
NOT_TEXT = (".json", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".npy", ".pt",
            ".safetensors")
HUB_NAMES = {"wikitext": "Salesforce/wikitext:wikitext-103-raw-v1"}
# Line ends at which GPT-2's pattern, and those that split digits, always end a piece: a cut there changes no
# token.
SAFE_CUT = re.compile(rb"(?<=[!-~])\n(?=[!-~])|\n(?= [!-/:-~])")
# Line that separates the documents of a .txt file, as in TinyStories.
MARK = b"<|endoftext|>"
SEPARATOR = re.compile(rb"^<\|endoftext\|>(?:[\r\n]+|\Z)", re.M)
FEW_ROWS = 1000                      # tables up to this size are split by row lengths, not by their mean


def find(dataset, text_key, only=None):
    """Return {split: sources} of a file, a folder or a hub dataset; docs/data.md says which file belongs to
    which split. BadInput if there are none. only: a split (train, valid or test) to return as valid, without
    training text; a single file is then used whole."""
    path = Path(dataset)
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", dataset) and suffix_of(path) not in SUFFIXES
    if is_saved(path):
        texts = splits_of(load_saved(path), dataset, text_key)
    elif path.exists():
        texts = find_files(path, text_key)
    elif dataset in HUB_NAMES or hub_name:
        with ProgressLine(f"downloading {dataset} from the Hugging Face hub"):
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
            raise BadInput(f"The dataset {dataset} has no split {only}: choose another --split=.")
        return {"train": [], "valid": texts[only]}
    if not texts["train"]:
        raise BadInput(f"The dataset {dataset} has held-out text and no training text: add a train file.")
    if not texts["valid"]:
        texts["train"], texts["valid"] = split_off_tail(texts["train"])
    return texts


def find_files(path, text_key):
    """Return {split: sources} of a file, or of a folder's files by the split in their paths."""
    if suffix_of(path) in NOT_TEXT:
        raise BadInput(f"{path} is not a text file: unpack or convert it to {KINDS}.")
    if path.is_file():
        found = [path]
        files = found
    else:
        hidden = re.compile(r"(^|/)\.")
        found = sorted(file for file in path.rglob("*") if (file.is_file() or file.is_symlink())
                       and not hidden.search(str(file.relative_to(path))))   # links are named, not followed
        usable = [file for file in found if file.is_file() and suffix_of(file) in SUFFIXES]
        # A README, and Markdown or tables beside other files, usually describe them.
        files = [file for file in usable if file.stem.lower() != "readme"] or usable
        for suffix in (".csv", ".md"):
            files = [file for file in files if suffix_of(file) != suffix] or files
    files = [file for file in files if file.stat().st_size]      # not empty
    if not files:
        suffixes = sorted({file.suffix or file.name for file in found if file.lstat().st_size})[:5]
        has = f", only {', '.join(suffixes)}" if suffixes else ", as it is empty"
        raise BadInput(f"The dataset {path} holds no text that is read{has}: give a {KINDS} file, or a "
                       "folder of them.")
    marks = {}                               # {file: the first name of a split in its relative path, or ""}
    for file in files:
        name = str(file.relative_to(path).with_suffix("")) if path.is_dir() else ""
        mark = re.search(rf"(?<![^\W\d_])(train|test|{'|'.join(VALID_NAMES)})(?![^\W\d_])", name.lower())
        marks[file] = mark[1] if mark else ""
    valid = [file for file in files if marks[file] in VALID_NAMES]
    test = [file for file in files if marks[file] == "test"]
    train = [file for file in files if marks[file] == "train"] or [file for file in files if not marks[file]]
    used = {*train, *valid, *test}
    left_out = [str(file.relative_to(path)) for file in found if file not in used]
    if left_out:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        print(f"Left out of {path}: {', '.join(left_out[:5])}{more} (empty, a linked folder, not {KINDS}, "
              "not marked train as others are, or Markdown or a table beside other files).", flush=True)
    return {split: [source_of(file, text_key) for file in of_split]
            for split, of_split in (("train", train), ("valid", valid), ("test", test))}


def suffix_of(path):
    """Return a path's suffix in lower case, .jsonl for its aliases."""
    suffix = Path(path).suffix.lower()
    return ALIASES.get(suffix, suffix)


def source_of(path, text_key):
    """Return the source for a file, by its suffix."""
    if suffix_of(path) == ".jsonl":
        return JsonLines(path, text_key)
    if suffix_of(path) == ".parquet":
        return Parquet(path, text_key)
    if suffix_of(path) == ".csv":
        table = require("datasets", f"{path} can't be read").Dataset.from_list(list(csv_rows(path)))
        return HubRows(table, path, text_key)
    return Text(path)


def is_saved(path):
    """Return whether a folder was written by save_to_disk of the package datasets."""
    return any(Path(path, name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved(path):
    """Return {split: datasets.Dataset} of a folder written by save_to_disk; a Dataset alone is train."""
    try:
        dataset = load_package("datasets").load_from_disk(str(path))
    except Exception as e:                   # package, format or files
        raise BadInput(f"{path} can't be read ({' '.join(str(e).split())}): fix that.") from None
    return dataset if isinstance(dataset, dict) else {"train": dataset}


def csv_rows(path):
    """Yield a table's rows as {column: text}. The first line names the columns and shows what separates them
    (comma, semicolon or tab). BadInput for another number of fields."""
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        separator = max(",;\t", key=file.readline().count)
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            names = rows.fieldnames or []
            if len(set(names)) < len(names):
                raise csv.Error("two columns have the same name")
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"it does not have the {len(names)} fields of line 1")
                yield row
        except (UnicodeError, csv.Error) as e:
            line = f"line {rows.line_num}: " if isinstance(e, csv.Error) else ""
            raise BadInput(f"{path} can't be read ({line}{e}): correct it.") from None


def find_on_hub(name, text_key):
    """Return {split: sources} of a dataset on the Hugging Face hub or in its local cache."""
    from runtime import network
    hub_answers = network.is_reachable()
    if not hub_answers:
        os.environ["HF_HUB_OFFLINE"] = "1"   # use the cache at once, without half a minute of retries
    datasets = require("datasets", f"The dataset {name} is not a local file, and the hub can't be searched")
    repository, _, configuration = HUB_NAMES.get(name, name).partition(":")
    try:
        dataset = datasets.load_dataset(repository, configuration or None)
    except Exception as e:                   # connection, name, configuration or format
        silent = "" if hub_answers else ", which does not answer"
        raise BadInput(f"There is no file or folder {name} here, and no dataset {repository} from the "
                       f"Hugging Face hub{silent} ({network.reason(e)}): correct the name, or download the "
                       "files where there is a network and give their path.") from None
    return splits_of(dataset, name, text_key, lines=repository == "Salesforce/wikitext")


def splits_of(dataset, name, text_key, lines=False):
    """Return {split: sources} of {split: datasets.Dataset}. lines: see HubRows."""
    texts = {}
    for split, hub_splits in (("train", ["train"]), ("valid", VALID_NAMES), ("test", ["test"])):
        texts[split] = [HubRows(dataset[hub_split], f"{name} ({hub_split})", text_key, lines)
                        for hub_split in hub_splits if hub_split in dataset]
    if not any(texts.values()):
        raise BadInput(f"The dataset {name} has no split 'train' (it has {', '.join(dataset)}): give files "
                       "of your choice by path.")
    left_out = [split for split in dataset if split not in ("train", *VALID_NAMES, "test")]
    if left_out:
        print(f"Left out of {name}: its splits {', '.join(left_out)}.", flush=True)
    return texts


def split_off_tail(sources):
    """Return (train, valid): the last tenth of the sources, at most 10 MB, becomes validation, cut between
    documents unless that would less than halve or more than double it."""
    total = sum(source.size for source in sources)
    wanted = min(total - total * 9 // 10, 10**7)
    cut = total - wanted                                      # bytes from the current source to the cut
    train = []
    valid = []
    for source in sources:
        if cut <= 0:
            valid.append(source)
        elif cut >= source.size:
            train.append(source)
        else:
            head, tail = source.divide(cut, cut - wanted, cut + wanted / 2)
            train += head
            valid += tail
        cut -= source.size
    return train, valid


def pieces(blocks):
    """Yield a text, given as blocks of bytes, in pieces of about CHUNK, cut where no token changes."""
    rest = b""
    for block in blocks:
        rest += block
        if len(rest) < CHUNK:
            continue
        cuts = [match.end() for match in SAFE_CUT.finditer(rest, max(0, len(rest) - CHUNK // 8))]
        # After 8 MB without a safe cut, bounded memory matters more than one token.
        if not cuts and len(rest) > 8 * CHUNK:
            starts = [i for i in range(len(rest) - 4, len(rest)) if begins_character(rest[i])]
            cuts = [rest.rfind(b"\n") + 1 or max(starts, default=len(rest))]
        if cuts:
            yield rest[:cuts[-1]]
            rest = rest[cuts[-1]:]
    if rest:
        yield rest


def decoded(text, name):
    """Return (a fragment's text as a string that UTF-8 can encode, its length in bytes). name: of its source,
    for messages."""
    try:
        text = text if isinstance(text, str) else text.decode()
        encoded = text.encode()
    except UnicodeDecodeError as e:
        raise BadInput(f"{name} is not UTF-8 (byte {e.object[e.start]:#x}): convert it.") from None
    except UnicodeEncodeError:               # a lone surrogate, which JSON can contain
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoded = text.encode()
    return text, len(encoded)


def begins_character(byte):
    """Return whether a byte starts a UTF-8 character (continuation bytes are 0b10xxxxxx)."""
    return byte & 0xC0 != 0x80


def divide_document(name, text, share):
    """Return the first `share` of a document and the rest as two sources, and print a note."""
    print(f"{name}: the validation split begins inside a document, because it is so long.", flush=True)
    cut = int(len(text) * share)
    return Documents([text[:cut]], name), Documents([text[cut:]], name)


class Documents:
    """Texts in memory."""

    def __init__(self, texts, name="the task's text"):
        self.name = name
        self.texts = [text.encode("utf-8", "replace") for text in texts]
        self.size = sum(map(len, self.texts))

    def raw(self):                           # with lengths: other ends of documents are other tokens
        return (part for text in self.texts for part in (f"{len(text)} ".encode(), text))

    def fragments(self):
        return ((True, text, len(text)) for text in self.texts)


class Text:
    """Bytes start to stop of a .txt file without BOM; <|endoftext|> lines separate documents."""

    def __init__(self, path, start=0, stop=None):
        self.path = path
        self.name = path
        self.start = start
        self.stop = path.stat().st_size if stop is None else stop
        with open(path, "rb") as f:
            if not start and f.read(3) == codecs.BOM_UTF8:
                self.start = 3

    @property
    def size(self):
        return self.stop - self.start

    def divide(self, at, low, high):
        """Divide after `at` bytes, between characters."""
        at += self.start
        with open(self.path, "rb") as f:
            f.seek(at)
            at += next((i for i, byte in enumerate(f.read(4)) if begins_character(byte)), 0)
        return [Text(self.path, self.start, at)], [Text(self.path, at, self.stop)]

    def raw(self):
        with open(self.path, "rb") as f:
            f.seek(self.start)
            while block := f.read(min(CHUNK, self.stop - f.tell())):
                yield block

    def fragments(self):
        begins_document = True
        for piece in pieces(self.raw()):
            parts = SEPARATOR.split(piece) if MARK in piece else [piece]
            for i, part in enumerate(parts):
                begins_document = begins_document or i > 0
                yield begins_document, part, len(piece) / len(parts)
                begins_document = begins_document and not part


class JsonLines(Text):
    """Bytes start to stop of a .jsonl file: one object a line, the text under `key` is a document."""

    def __init__(self, path, key, start=0, stop=None):
        super().__init__(path, start, stop)
        self.key = key

    def divide(self, at, low, high):
        """Divide before or after the line that contains byte `at`, or inside its text."""
        low += self.start
        high += self.start
        target = self.start + at
        at = target
        with open(self.path, "rb") as f:
            while at > self.start:
                block_start = max(self.start, at - 2**16)
                f.seek(block_start)
                line_start = f.read(at - block_start).rfind(b"\n") + 1
                if line_start:
                    at = block_start + line_start
                    break
                at = block_start
            f.seek(at)
            line = f.readline()
        for cut in (at, at + len(line)):
            if low <= cut <= high:
                return [self.part(self.start, cut)], [self.part(cut, self.stop)]
        head, tail = divide_document(self.path, self.text_of(line, at), (target - at) / len(line))
        return [self.part(self.start, at), head], [tail, self.part(at + len(line), self.stop)]

    def part(self, start, stop):
        return JsonLines(self.path, self.key, start, stop)

    def raw(self):
        yield self.key.encode()
        yield from super().raw()

    def fragments(self):
        with open(self.path, "rb") as f:
            f.seek(self.start)
            position = self.start
            while position < self.stop and (line := f.readline()):
                if line.strip():
                    yield True, self.text_of(line, position), len(line)
                position += len(line)

    def text_of(self, line, at):
        """Return the text in a line that begins at byte `at`; BadInput if there is none."""
        try:
            row = parse_json(line)
        except ValueError as e:
            raise BadInput(f"{self.where(at)} is not JSON ({e}): write one object a line.") from None
        if not isinstance(row, dict) or self.key not in row:
            has = f"has the keys {', '.join(row)}" if isinstance(row, dict) else f"is a {type(row).__name__}"
            raise BadInput(f"{self.where(at)} has no '{self.key}' (it {has}): name the key of the text with "
                           '--text_key=, or write {"prompt", "completion"} rows, in one file, to train on '
                           "answers.")
        text = row[self.key]
        if not isinstance(text, str | None):
            raise BadInput(f"{self.where(at)} has a '{self.key}' of type {type(text).__name__}, not "
                           "a text: choose another --text_key=.")
        return text or ""

    def where(self, at):
        """Return the file and line number of byte `at`, for messages."""
        before = sum(block.count(b"\n") for block in Text(self.path, 0, at).raw())
        return f"{self.path}, line {before + 1},"


class Rows:
    """Rows start to stop of a table whose column `key` has one document a row. width: mean bytes a row."""

    def __init__(self, name, key, schema, rows, n_bytes):
        """Raise BadInput unless the column exists and holds text. schema: pyarrow's."""
        self.name = name
        self.key = key
        self.start = 0
        self.stop = rows
        self.width = n_bytes / max(1, rows)
        columns = {field.name: field.type for field in schema}
        if self.key == "text" and len(columns) == 1 and self.key not in columns:
            (self.key,) = columns
            print(f"{self.name}: each row of its only column, {self.key!r}, is a document.", flush=True)
        column_type = str(columns.get(self.key))
        if self.key not in columns:
            raise BadInput(f"{self.name} has no column '{self.key}' (it has {', '.join(columns)}): name the "
                           "column of the text with --text_key=, or to train on answers give one file, or a "
                           "folder that save_to_disk() of the package datasets wrote.")
        if not re.match("(dictionary<values=)?(large_)?string", column_type):
            raise BadInput(f"{self.name}: the column '{self.key}' holds {column_type}, not text: choose "
                           "another --text_key=.")

    @property
    def size(self):
        return int((self.stop - self.start) * self.width)

    def divide(self, at, low, high):
        """Divide before or after the row that contains byte `at`, or inside its text. In a large table all
        rows count as equally long."""
        rows = self.stop - self.start
        cut = int(at / self.width)
        if rows > FEW_ROWS:
            return self.parts(self.start + cut)
        lengths = [len(text or "") for text in self.texts()]
        scale = self.size / max(1, sum(lengths))
        ends = [end * scale for end in accumulate(lengths, initial=0)]
        row = min(bisect_right(ends, at), rows) - 1
        for cut in (cut, row, row + 1):
            if low <= ends[cut] <= high:
                return self.parts(self.start + cut)
        share = (at - ends[row]) / max(1, ends[row + 1] - ends[row])
        row += self.start
        (text,) = self.part(row, row + 1).texts()
        head, tail = divide_document(self.name, text or "", share)
        return [self.part(self.start, row), head], [tail, self.part(row + 1, self.stop)]

    def part(self, start, stop):
        part = copy.copy(self)
        part.start = start
        part.stop = stop
        return part

    def parts(self, row):
        """Return the sources before a row and from it on."""
        return [self.part(self.start, row)], [self.part(row, self.stop)]

    def texts(self):
        """Yield the text of each row, None without one."""
        for texts in self.batches():
            yield from texts

    def fragments(self):
        return ((True, text or "", self.width) for text in self.texts())

    def raw(self):
        return (f"{len(text or '')} {text}".encode() for text in self.texts())


class Parquet(Rows):
    """Rows of a .parquet file, decoded in batches."""

    def __init__(self, path, key):
        pyarrow = require("pyarrow", f"{path} can't be read")
        require("pyarrow.parquet", f"{path} can't be read")
        self.path = path
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as e:
            raise self.unreadable(e) from None
        with file:
            super().__init__(path, key, file.schema_arrow, file.metadata.num_rows, path.stat().st_size)

    def unreadable(self, error):
        """Return the BadInput for an exception of pyarrow."""
        reason = str(error).splitlines()[0]
        return BadInput(f"{self.path} is not a readable parquet file ({reason}): replace or remove it.")

    def raw(self):
        yield f"{self.key} {self.start} {self.stop}".encode()
        yield from Text(self.path).raw()

    def batches(self):
        """Yield lists of texts, None for a row without text."""
        import pyarrow.parquet
        first = 0                            # row number of the next batch
        try:
            # Without buffer_size a group's whole column would be read at once.
            with pyarrow.parquet.ParquetFile(self.path, buffer_size=CHUNK) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if first >= self.stop or first + rows <= self.start:
                        first += rows
                        continue
                    for batch in file.iter_batches(512, [group], [self.key], use_threads=False):
                        offset = max(0, self.start - first)
                        length = max(0, self.stop - first - offset)
                        yield batch.column(0).slice(offset, length).to_pylist()
                        first += len(batch)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
            raise self.unreadable(e) from None


class HubRows(Rows):
    """Rows of a dataset from the package datasets. lines: the rows are the lines of one text, as in WikiText,
    whose empty rows have lost their blank."""

    def __init__(self, dataset, name, key, lines=False):
        super().__init__(name, key, dataset.features.arrow_schema, len(dataset), dataset.data.nbytes)
        self.dataset = dataset
        self.lines = lines

    def batches(self):
        """Yield lists of texts, None for a row without text."""
        column = self.dataset.select_columns([self.key])
        rows = column.select(range(self.start, self.stop)).with_format("arrow")
        for batch in rows.iter(2048):
            yield batch.column(0).to_pylist()

    def fragments(self):
        if not self.lines:
            yield from super().fragments()
            return
        joined = ("".join((line or " ").rstrip("\n") + "\n" for line in lines).encode()
                  for lines in self.batches())
        for i, piece in enumerate(pieces(joined)):
            yield i == 0, piece, len(piece)
