"""Records of completions, one JSON object each: of grpo.py in RUN/rollouts, a compressed file a step and
rank; of datagen.py its log of attempts, of eval.py its --output. All have the keys of record_of.

    for record in records.read("out/grpo"):
        print(record["step"], record["score"], record["completion"])
"""
import gzip
import json
import os
import zlib
from pathlib import Path

import numpy as np

from runtime import distributed
from runtime.config import BadInput, parse_json

FOLDER = "rollouts"
MEGABYTE = 10**6


def record_of(completion):
    """Return the record of a graded Completion, a dictionary for JSON.

    number: the request's key, which is the index of the question, in training of grpo.py its position in
    the stream. keys: the question's others. millinats: the log-probability of each id at sampling time, in
    thousandths of a nat (integers are written faster than floats). turns, forced: of an episode, the texts in
    turn and the spans of ids that the environment wrote."""
    grade = completion.grade
    episode = {"turns": completion.turns, "forced": completion.forced} if completion.forced else {}
    return {
        "number": completion.key,
        "sample": completion.index,
        "question": completion.question["question"],
        "answer": completion.question.get("answer"),
        "keys": {k: v for k, v in completion.question.items() if k not in ("question", "answer")},
        "completion": completion.text,
        "ids": completion.ids,
        "millinats": (1000 * np.array(completion.logprobs, np.float32)).round().astype(int).tolist(),
        "end": completion.reason,
        "score": grade.score,
        "parts": grade.parts,
        "figures": grade.figures,
        "error": grade.error,
    } | episode


def key_of(record):
    """Return a text that no other record of a run or file has."""
    return " ".join(str(record.get(name)) for name in ("model", "split", "step", "number", "sample"))


class Recorder:
    """Writes the records of a run of grpo.py. record: megabytes that the files of all ranks may take
    together, or "all", or "none". The first file that does not fit is left empty, and none follows it."""

    def __init__(self, out_dir, record, step):
        """step: of the checkpoint that the run begins with; records of later steps are removed."""
        self.folder = Path(out_dir, FOLDER)
        distributed.on_main(lambda: self.forget_after(step))
        sizes = [path.stat().st_size for path in self.folder.glob("*.jsonl.gz")]
        self.room = {"all": float("inf"), "none": 0}.get(record)
        if self.room is None:
            self.room = 0 if 0 in sizes else (record * MEGABYTE - sum(sizes)) / distributed.world_size()
            self.say_if_full()

    def say_if_full(self):
        if self.room <= 0 and distributed.is_main():
            print(f"{self.folder} is as large as --record allows: later completions are not recorded.",
                  flush=True)

    def forget_after(self, step):
        for path in self.folder.glob("*_" + 8 * "[0-9]" + ".*.jsonl.gz*"):
            if int(path.name.split(".")[0][-8:]) > step or ".tmp-" in path.name:
                path.unlink()

    def write(self, step, split, completions, learned=()):
        """Record this rank's Completions of a step; split: train, or valid for greedy answers to held-out
        questions. learned: those with a gradient in this step. A failure (a full disk, for example) does not
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
                           "trained": id(c) in learned}
            lines.append(json.dumps(record))
        content = gzip.compress("\n".join(lines).encode(), 1, mtime=0)
        self.room -= len(content)
        self.say_if_full()
        path = self.folder / f"{split}_{step:08}.{distributed.rank()}.jsonl.gz"
        temporary = Path(f"{path}.tmp-{os.getpid()}")
        try:
            self.folder.mkdir(exist_ok=True)
            temporary.write_bytes(content if self.room > 0 else b"")
            temporary.replace(path)
        except OSError as e:
            print(f"{path} could not be written ({e.strerror}).", flush=True)


def files_of(path):
    """Return the files with records at a path: of a run of grpo.py, or the file itself (datagen.py's log,
    eval.py's --output)."""
    path = Path(path)
    return sorted(path.glob(f"{FOLDER}/*.jsonl.gz")) if path.is_dir() else [path]


def regraded(path):
    """Return the path of doctor.regrade's scores for the records at a path."""
    path = Path(path)
    return path / "regrade.json" if path.is_dir() else path.with_suffix(".regrade.json")


def read(path):
    """Yield the records at a path (see files_of), of a run those of training first, each split in the order
    of steps, as dictionaries with the keys of record_of and, instead of millinats, logprobs in nats. A last
    line cut short by a crash is left out; BadInput for another that can't be read."""
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
                raise BadInput(f"Line {number} of {file} can't be read ({e}): restore it.") from None
            if "completion" in record:                       # datagen.py's log has a header
                if "millinats" in record:
                    record["logprobs"] = [n / 1000 for n in record.pop("millinats")]
                yield record
