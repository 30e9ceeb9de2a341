"""Draw questions or read them from files, and split them into train, valid and test."""
import functools
import hashlib
import json
import math
import random

from runtime.progress import ProgressLine, track
from runtime.usage import load_package
from tasks import PROMPT

N_DOCUMENTS = {"train": 20_000, "valid": 1_000}
N_QUESTIONS = 1000                   # default number for generated tasks
PATIENCE = 2000                      # consecutive duplicates after which a task counts as exhausted
WRONG = 0.2                          # share of documents with a slip in one step
COMMON = 0.65                        # share with the common mistake, of the questions that invite one


def split_of(key):
    """Return the split of a question's key by a hash: a tenth each for valid and test."""
    tenth = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 10
    return {0: "valid", 1: "test"}.get(tenth, "train")


def distinct(draw, split, seed, n=None, most=None):
    """Return n questions of a split with distinct keys (fewer if there are no more).

    draw(rng) returns (key, question). most(): upper bound on the number of questions in all splits; if n
    exceeds the split's share of it, ValueError at once, instead of after a minute of drawing."""
    rng = random.Random(f"{seed} {split} questions")
    found = {}
    idle = 0
    wanted = N_QUESTIONS if n is None else n
    if most and wanted > N_QUESTIONS:        # the default number is allowed for any task
        share = most() * (0.8 if split == "train" else 0.1)
        share += 6 * math.sqrt(share)        # six standard deviations of the hash split
        if wanted > share:
            refused = ValueError(f"{n} questions of the split {split} were asked for, and there are at most "
                                 f"{share:.0f}: lower --num_questions.")
            refused.most = min(int(share), 100_000)      # to draw until there are no more
            raise refused
    with ProgressLine(f"drawing {split} questions", wanted, "questions") as line:
        while len(found) < wanted and idle < PATIENCE:
            key, question = draw(rng)
            if split_of(key) == split:
                idle = idle + 1 if key in found else 0
                line.add(key not in found)
                found.setdefault(key, question)
    return list(found.values())


def draw_documents(draw, split, seed):
    """Yield N_DOCUMENTS[split] questions of a split, duplicates possible."""
    rng = random.Random(f"{seed} {split}")
    for _ in track(range(N_DOCUMENTS[split]), f"drawing {split} text", "questions"):
        key, question = draw(rng)
        while split_of(key) != split:
            key, question = draw(rng)
        yield question


def with_levels(name, draw, solution, wrong_solution, invites_mistake):
    """Return (check, questions, documents) of a task whose argument is a level, 0 to 2 (default 1).

    draw(rng, level) returns (key, question); solution(question) and wrong_solution(question, rng) return
    completions. Like text from the web, some documents are wrong: the share COMMON of those for which
    invites_mistake(question) is true, WRONG of the others."""
    def check(argument):
        if argument not in (None, "0", "1", "2"):
            raise ValueError(f"The argument of {name} is a level, 0 to 2, not {argument or 'nothing'}.")

    def questions(split, seed=0, n=None, argument=None):
        return distinct(functools.partial(draw, level=int(argument or 1)), split, seed, n)

    def documents(split, seed=0, argument=None):
        rng = random.Random(f"{seed} {split} wrong")
        texts = []
        for question in draw_documents(functools.partial(draw, level=int(argument or 1)), split, seed):
            is_wrong = rng.random() < (COMMON if invites_mistake(question) else WRONG)
            completion = wrong_solution(question, rng) if is_wrong else solution(question)
            texts.append(document(question, completion))
        return texts
    return check, questions, documents


def document(question, completion):
    """Return the pretraining text of a question and a completion."""
    return f"{PROMPT.format(question['question'])}{completion}\n"


def make_splits(train, valid=None, test=None):
    """Return {split: questions} without duplicates within or across splits; test takes precedence, then
    valid. A missing split gets a tenth of train."""
    splits = {"test": test, "valid": valid, "train": train}
    seen = set()
    for split in ("test", "valid"):
        if splits[split] is None:
            splits[split] = [q for q in train if split_of(q["question"]) == split]
    for split, questions in splits.items():
        kept = {}
        for q in questions:
            kept.setdefault(" ".join(q["question"].casefold().split()), q)
        splits[split] = [q for key, q in kept.items() if key not in seen]
        seen |= kept.keys()
    return splits


def rows(path, columns):
    """Yield the rows of a .json list, a .jsonl or a .parquet file; of the latter only these columns.
    ValueError if it can't be read."""
    try:
        if path.suffix.lower() == ".parquet":
            with load_package("pyarrow.parquet").ParquetFile(path) as file:
                for batch in file.iter_batches(64, columns=columns):       # GURU's rows may take megabytes
                    yield from batch.to_pylist()
        elif path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from content if isinstance(content, list) else ()
        else:
            with open(path, encoding="utf-8-sig") as file:
                yield from (json.loads(line) for line in file if line.strip())
    except ImportError as e:
        raise ValueError(f"{path} can't be read, since {e}.") from None
    except (OSError, ValueError, RecursionError, NotImplementedError) as e:              # also pyarrow's
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        raise ValueError(f"{path} can't be read ({reason}): correct it, or give another file.") from None


def read(path, question_of, form, columns=None):
    """Return question_of(row) of each row of a file; see rows. form: of a row, in words, for the ValueError
    if question_of fails, or if there is no row."""
    found = []
    for number, row in enumerate(rows(path, columns), 1):
        try:
            found.append(question_of(row))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}, row {number}, is not {form}: correct it.") from None
    if not found:
        raise ValueError(f"{path} has no questions: give rows {form}.")
    return found


def download(local, name, *args, **kwargs):
    """Return a dataset of the Hugging Face hub. ValueError or OSError names the `local` spec instead."""
    try:
        return load_package("datasets").load_dataset(name, *args, **kwargs)
    except ImportError as e:
        raise ValueError(f"{name} can't be downloaded, since {e}, or give a local file, {local}.") from None
    except Exception as e:                   # errors of network, cache or hub
        reason = str(e).split("\n")[0][:200]
        raise OSError(f"{name} can't be downloaded ({type(e).__name__}: {reason}): connect to the network, "
                      f"or give a local file, {local}.") from None


def sample(questions, seed, n=None):
    """Return n of the questions in random order; None: all, in their order."""
    if n is None:
        return questions
    return random.Random(f"{seed} some").sample(questions, min(n, len(questions)))
