"""Read rows of examples or questions from files, and tell their form by their keys."""
import json
import math
from pathlib import Path

from runtime.config import BadInput, parse_json
from runtime.usage import load_package
from text.sources import VALID_NAMES, csv_rows, is_saved, load_saved, suffix_of

EXAMPLES = ({"prompt", "completion"}, {"messages"}, {"question", "answer"})
TOOL_ROLES = ("tool", "function", "ipython", "observation")
# Keys that change the meaning of a row or of a message, unless their value is one of EMPTY
EMPTY = (None, "", [], {})
PROMPT_KEYS = ("tools", "functions", "documents", "image", "images", "audio", "videos")
ANSWER_KEYS = (*PROMPT_KEYS, "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking",
               "context", "input", "choices", "options")
SELECTORS = ("label", "weight", "train")     # the same, unless one of ONE
ONE = (1, "1", "1.0", "True", "true")


def read(path, split="train"):
    """Return the list of rows of a .json (a list), .jsonl, .csv or .parquet file, or of a split of a folder
    that save_to_disk of the package datasets wrote. Raises BadInput."""
    rows = list(rows_of(Path(path), split))
    if Path(path, "dataset_dict.json").is_file():
        print(f"{path}: {len(rows):,} rows of its split {split}, without any others.", flush=True)
    return rows


def first(path):
    """Return the first row, None if there is none or it can't be read."""
    try:                                     # a text may be one very long line
        return None if suffix_of(path) in (".txt", ".md") else next(rows_of(Path(path)), None)
    except BadInput:
        return None


def rows_of(path, split="train"):
    """Yield the rows of a file or folder, see read."""
    number = None                            # line
    try:
        if is_saved(path):
            yield from saved_rows(path, split)
        elif suffix_of(path) == ".parquet":
            for batch in load_package("pyarrow.parquet").ParquetFile(path).iter_batches(512):
                yield from batch.to_pylist()
        elif suffix_of(path) == ".csv":
            yield from csv_rows(path)
        elif suffix_of(path) == ".json":
            content = parse_json(path.read_text("utf-8-sig"))
            yield from content if isinstance(content, list) else ()
        else:
            with open(path, encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield parse_json(line)
    except (OSError, ValueError, ImportError, NotImplementedError) as e:
        where = path if number is None else f"Line {number} of {path}"
        reason = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise BadInput(f"{where} can't be read ({reason}): correct it, or give another --dataset=.") from None


def saved_rows(path, split):
    """Return the rows of a split, or of a Dataset without splits."""
    splits = load_saved(path)
    if not (path / "dataset_dict.json").is_file():
        split = "train"
    for name in VALID_NAMES if split == "valid" else (split,):
        if name in splits:
            return splits[name]
    raise ValueError(f"it has no split {split}, only {', '.join(splits)}")


# --- forms of rows ---

def form_of(row):
    """Return the keys of an example that an object has, None for another row."""
    return next((keys for keys in EXAMPLES if isinstance(row, dict) and None not in map(row.get, keys)), None)


def has_question(row):
    """Return whether an example's question is put into a prompt form: a list, or {"question", "answer"}."""
    return isinstance(row, list) or form_of(row) == EXAMPLES[-1]


def other_form(row):
    """Return the name of another project's row format with the expression that converts it, else None."""
    if isinstance(row, list) and row and all(isinstance(turn, dict) and "role" in turn for turn in row):
        return 'a list of turns: write {"messages": row} in its place, in a .jsonl file'
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("conversations"), list):
        return ("ShareGPT's form: write "
                '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], m["from"]), '
                '"content": m["value"]} for m in row["conversations"]]} in its place, in a .jsonl file')
    if {"instruction", "output"} <= row.keys():
        return ("Alpaca's form: write "
                r'{"prompt": "\n".join(filter(None, [row["instruction"], row.get("input")])), '
                '"completion": row["output"]} in its place, in a .jsonl file')
    if isinstance(row.get("prompt"), list) and "completion" in row:
        return ('a prompt and a completion of turns: write {"messages": row["prompt"] + row["completion"]} '
                "in its place, in a .jsonl file")
    return None


def is_finite(value):
    """Return False for NaN and Infinity, which Python reads from JSON."""
    return not isinstance(value, float) or math.isfinite(value)


def is_answer(value):
    """Return whether a value is a text or a finite number."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and is_finite(value)


def check_keys(row, keys, selectors=()):
    """Raise ValueError for a key of a row or message that changes its meaning and is not supported."""
    for key in (*keys, *selectors):
        if row.get(key) not in (*EMPTY, *(ONE if key in selectors else ())):
            raise ValueError(f'"{key}": {str(row[key])[:40]} is not supported; leave the row out, or write '
                             "it into its texts without that key")


def checked_messages(messages, system=None):
    """Return a row's messages, after its "system" if it has one; ValueError for one that is not {"role",
    "content"}, or a tool's."""
    for message in messages:
        shown = str(message)[:80]
        fields = message if isinstance(message, dict) else {}
        check_keys(fields, ANSWER_KEYS, ("label", "train"))
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            raise ValueError(f"its message {shown} needs a text as role and as content; give it both, or "
                             "leave it out")
        if message["role"] in TOOL_ROLES:
            raise ValueError(f"its message has the role {message['role']!r}, a tool's; leave the row out")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"its message {shown} has the weight {message['weight']}; give 0 or 1")
    if not system:
        return messages
    if not isinstance(system, str) or messages[:1] and messages[0]["role"] == "system":
        raise ValueError('its "system" should be a text, without another message of that role')
    return [{"role": "system", "content": system}, *messages]


def report_unused(rows, path):
    """Print the keys of examples that nothing used."""
    unused = set()
    for row in filter(form_of, rows):
        used = {*form_of(row), "system", *ANSWER_KEYS, *SELECTORS}
        unused |= {key for key in row.keys() - used if row[key] not in EMPTY}
        for message in row["messages"] if "messages" in used else ():
            unused |= {f"messages: {key}" for key in message.keys() - used - {"role", "content"}
                       if message[key] not in EMPTY}
    if unused:
        print(f"Keys of {path} that have no effect: {', '.join(sorted(map(str, unused)))}.", flush=True)


def question_of(row, needs_answer):
    """Return a question for a task, row | {"question", perhaps "system"}; ValueError for another row. The
    prompt may be a list of a user's message, perhaps after a system message."""
    prompt = isinstance(row, dict) and (row.get("prompt") or row.get("question"))
    if not prompt:
        raise ValueError('it should be {"prompt": text, "answer": ...}')
    check_keys(row, PROMPT_KEYS)
    if (row.get("question") or prompt) != prompt:
        raise ValueError('its "prompt" and "question" differ; leave one out')
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": prompt}]
    *system, message = checked_messages(prompt, row.get("system"))
    if [m["role"] for m in (*system, message)] not in (["user"], ["system", "user"]):
        raise ValueError("its prompt should be a message of the user, perhaps after one of the system")
    if needs_answer and row.get("answer") is None or not is_finite(row.get("answer")):
        raise ValueError('it has no "answer", any value of JSON but not NaN')
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError) as e:
        raise ValueError(f"it has a lone surrogate, or a value that JSON has not: {e}") from None
    return row | {"question": message["content"]} | {turn["role"]: turn["content"] for turn in system}
