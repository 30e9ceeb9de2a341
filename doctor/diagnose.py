"""The doctor: what is wrong with a run of train.py or grpo.py, in sentences.

    python -m doctor out/grpo
    python -m doctor out/grpo --json

While a run goes on, `Doctor` says the sentence of a check (doctor/checks.py) when it first holds and when
it ends; here the same is done with what a run has left in metrics.jsonl. Exit codes: 0 nothing is wrong at the
last step, 3 something is, 2 there is no such run.
"""
import json
from dataclasses import dataclass

from doctor.checks import History, examine, kind_of
from runtime import config, guard
from runtime.config import BadInput
from runtime.metrics import check_run, read_lines

CALM = 3                                     # looks without it after which something has ended
FOUND = 3                                    # exit code


@dataclass
class Config:
    runs: tuple = ()                         # run folders; usually without --runs=
    json: bool = False                       # an object a run, for programs


@dataclass
class Finding:
    """What a check has found: from which step on, and to which one, None while it goes on."""
    name: str
    sentence: str
    since: int
    until: int | None = None
    calm: int = 0                            # looks in a row that did not find it any more

    def __str__(self):
        if self.until is None:
            return f"{self.name}, since step {self.since}: {self.sentence}"
        return f"{self.name}, steps {self.since} to {self.until}, over now: {self.sentence}"

    def as_json(self):
        return {"name": self.name, "sentence": self.sentence, "since": self.since, "until": self.until}


class Doctor:
    """Examines a run after each line that it writes. `findings` are all so far, in their order."""

    def __init__(self, lines=()):
        """lines: what the run wrote before it was resumed."""
        self.run = History()
        self.findings = []
        for line in lines:
            self.look(line)

    @property
    def holding(self):
        """The findings that have not ended."""
        return [finding for finding in self.findings if finding.until is None]

    def look(self, line):
        """Take in a line of metrics.jsonl. Returns the findings that begin or end with it."""
        self.run.add(line)
        if not kind_of(line):
            return []
        step = line["step"]
        found = examine(self.run)
        changed = []
        for finding in self.holding:
            finding.calm = 0 if finding.name in found else finding.calm + 1
            finding.sentence = found.pop(finding.name, finding.sentence)
            if finding.calm == CALM:
                finding.until = step
                changed.append(finding)
        begun = [Finding(name, sentence, step) for name, sentence in found.items()]
        self.findings += begun
        return changed + begun


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("Which run? python -m doctor out/grpo")
    holding = []
    for folder in cfg.runs:
        check_run(folder)
        doctor = Doctor(read_lines(folder))
        holding += doctor.holding
        if cfg.json:
            findings = [finding.as_json() for finding in doctor.findings]
            print(json.dumps({"run": str(folder), "healthy": not doctor.holding, "findings": findings}))
            continue
        for finding in doctor.findings:
            print(f"{folder}: {finding}")
        if not doctor.findings:
            steps = doctor.run.steps[-1]["step"] if doctor.run.steps else 0
            print(f"{folder}: nothing is wrong in what {steps} steps have logged.")
    return FOUND if holding else 0


if __name__ == "__main__":
    guard.run(main)
