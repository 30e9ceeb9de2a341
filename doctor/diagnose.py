"""The doctor: names the problems of a run of train.py or grpo.py.

    python -m doctor out/grpo
    python -m doctor out/grpo --json

During a run, `Doctor` reports when a finding of a check (doctor/checks.py) begins and ends; this command does
the same from metrics.jsonl. Exit codes: 0 no finding at the last step, 3 a finding, 2 no such run.
"""
import json
from dataclasses import dataclass

from doctor.checks import History, examine, kind_of
from runtime import config, guard
from runtime.config import BadInput
from runtime.log import read_run

LINES_TO_END = 3                             # consecutive lines without a finding that end it
EXIT_FINDINGS = 3                            # exit code


@dataclass
class Config:
    runs: tuple = ()                         # run folders; usually without --runs=
    json: bool = False                       # print one JSON object per run


@dataclass
class Finding:
    """A check's finding, from step `since` to step `until` (None: not ended)."""
    name: str
    sentence: str
    since: int
    until: int | None = None
    lines_without: int = 0                   # latest consecutive lines without it

    def __str__(self):
        if self.until is None:
            return f"{self.name}, since step {self.since}: {self.sentence}"
        return f"{self.name}, steps {self.since} to {self.until}, now over: {self.sentence}"

    def as_json(self):
        return {"name": self.name, "sentence": self.sentence, "since": self.since, "until": self.until}


class Doctor:
    """Examines a run after each line of metrics.jsonl. `findings`: all of them, in order."""

    def __init__(self, lines=()):
        """lines: those from before the run was resumed."""
        self.run = History()
        self.findings = []
        for line in lines:
            self.look(line)

    @property
    def holding(self):
        """Return the findings that have not ended."""
        return [finding for finding in self.findings if finding.until is None]

    def look(self, line):
        """Add a line of metrics.jsonl and return the findings that begin or end with it."""
        self.run.add(line)
        if not kind_of(line):
            return []
        step = line["step"]
        found = examine(self.run)
        changed = []
        for finding in self.holding:
            finding.lines_without = 0 if finding.name in found else finding.lines_without + 1
            finding.sentence = found.pop(finding.name, finding.sentence)
            if finding.lines_without == LINES_TO_END:
                finding.until = step
                changed.append(finding)
        begun = [Finding(name, sentence, step) for name, sentence in found.items()]
        self.findings += begun
        return changed + begun


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("No run is given: name a run folder, such as python -m doctor out/grpo.")
    holding = []
    for folder in cfg.runs:
        doctor = Doctor(read_run(folder))
        holding += doctor.holding
        if cfg.json:
            findings = [finding.as_json() for finding in doctor.findings]
            print(json.dumps({"run": str(folder), "healthy": not doctor.holding, "findings": findings}))
            continue
        for finding in doctor.findings:
            print(f"{folder}: {finding}")
        if not doctor.findings:
            steps = doctor.run.steps[-1]["step"] if doctor.run.steps else 0
            print(f"{folder}: nothing is wrong after {steps} steps.")
    return EXIT_FINDINGS if holding else 0


if __name__ == "__main__":
    guard.run(main)
