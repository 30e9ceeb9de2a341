"""Records of completions, one JSON object each: of grpo.py in RUN/rollouts, a compressed file a step and rank;
of datagen.py its log of attempts, of eval.py its --output. All have the keys of record_of.

    for record in records.read("out/grpo"):
        print(record["step"], record["advantage"], record["completion"])
"""
import gzip
import json
import zlib
from pathlib import Path

import numpy as np

from runtime import distributed
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, parse_json

FOLDER = "rollouts"
MEGABYTE = 10**6


def record_of(completion):
    """Return the record of a graded Completion, a dictionary for JSON. number: of its question. millinats: the
    log-probability of each id at sampling time, in thousandths of a nat (an integer is written ten times as fast
    as a float). keys: the question's others. turns, forced: of an episode, the texts in turn and the spans of ids that the environment
    wrote."""
    grade = completion.grade
    episode = {"turns": completion.turns, "forced": completion.forced} if completion.forced else {}
    return {
        "number": completion.key,
        "sample": completion.index,
        "question": completion.question["question"],
        "answer": completion.question.get("answer"),
        "keys": {key: value for key, value in completion.question.items() if key not in ("question", "answer")},
        "completion": completion.text,
        "ids": completion.ids,
        "millinats": (1000 * np.array(completion.logprobs, np.float32)).round().astype(int).tolist(),
        "end": completion.reason,
        "score": grade.score,
        "parts": grade.parts,
        "figures": grade.figures,
        "error": grade.error,
    } | episode


class Recorder:
    """Writes the records of a run of grpo.py. record: megabytes that the files of all ranks may take together,
    or "all", or "none"."""

    def __init__(self, out_dir, record, step):
        """step: of the checkpoint that the run begins with; records of later steps are removed."""
        self.folder = Path(out_dir, FOLDER)
        distributed.on_main(lambda: self.forget_after(step))
        self.room = {"all": float("inf"), "none": 0}.get(record, record)
        if self.room not in (0, float("inf")):
            mine = sum(path.stat().st_size for path in self.folder.glob(f"*.{distributed.rank()}.jsonl.gz"))
            self.room = self.room * MEGABYTE / distributed.world_size() - mine

    def forget_after(self, step):
        for path in self.folder.glob("*.jsonl.gz*"):
            if int(path.name.split(".")[0].split("_")[1]) > step or ".tmp-" in path.name:
                path.unlink()

    def write(self, step, split, completions, learned=()):
        """Record this rank's Completions of a step; split: train, or valid for greedy answers to held-out
        questions. learned: those that this step was trained on. A failure (a full disk, for example) does not
        end the run."""
        if self.room <= 0:
            return
        learned = {id(c) for c in learned}
        lines = []
        for c in completions:
            record = {"step": step, "split": split, "rank": distributed.rank()} | record_of(c)
            if split == "train":
                reward = None if c.grade.error else c.reward
                record |= {"prompt": c.prompt, "reward": reward, "advantage": c.advantage,
                           "trained": c.trained and id(c) in learned}
            lines.append(json.dumps(record))
        content = gzip.compress("\n".join(lines).encode(), 1, mtime=0)
        path = self.folder / f"{split}_{step:08}.{distributed.rank()}.jsonl.gz"
        self.room -= len(content)
        if self.room <= 0:
            if distributed.is_main():
                print(f"{self.folder} is as large as --record allows: later completions are not recorded.",
                      flush=True)
            return
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomically(path, content)
        except OSError as e:
            print(f"{path} could not be written ({e.strerror}).", flush=True)


def files_of(path):
    """Return the files with records at a path: of a run of grpo.py, or the file itself (datagen.py's log,
    eval.py's --output)."""
    path = Path(path)
    return sorted(path.glob(f"{FOLDER}/*.jsonl.gz")) if path.is_dir() else [path]


def read(path):
    """Yield the records at a path (see files_of) in the order of steps, as dictionaries with the keys of
    record_of and, instead of millinats, logprobs in nats. A last line cut short by a crash is left out; BadInput
    for another that can't be read."""
    for file in files_of(path):
        try:
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        except (OSError, EOFError, zlib.error) as e:
            raise BadInput(f"{file} can't be read ({e}): remove it, or restore it.") from None
        lines = content.decode("utf-8", "replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                record = parse_json(line, dict)
            except ValueError as e:
                if number == len(lines):
                    break
                raise BadInput(f"Line {number} of {file} can't be read ({e}): remove it, or restore it.") from None
            if "completion" in record:                       # datagen.py's log has a header
                if "millinats" in record:
                    record["logprobs"] = [n / 1000 for n in record.pop("millinats")]
                yield record
