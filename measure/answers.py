"""Questions of a comparison, their answers by eval.py, its table, and the control with rewards at random."""
import functools
import json
import zlib
from pathlib import Path

import numpy as np

import tasks
from doctor import plot
from measure.intervals import points
from measure.runs import aligned
from rollouts import records
from rollouts.questions import default_few_shot, normalized, questions_of, task_errors
from rollouts.verifier import code_of
from runtime import checkpoint
from runtime.checkpoint import write_atomically
from runtime.config import BadInput
from tasks import _answers

PLACEBO = '''"""Scores of 1 at random, at the rate {rate}, for any completion: a control of compare.py."""
import random

import tasks

task = tasks.load({spec!r}).module
globals().update({{name: value for name, value in vars(task).items() if not name.startswith("__")}})


def reward(question, completion):
    return float(random.SystemRandom().random() < {rate})        # workers seed `random` with the completion
'''


def placebo(spec, rate, folder):
    """Write a file for each task of `spec`, with rewards of 1 at random at this rate; return their spec."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for number, (one, weight) in enumerate(tasks.parts_of(spec).items()):
        argument = tasks.load(one).argument
        path = folder / f"placebo_{number}.py"
        path.write_text(PLACEBO.format(spec=one, rate=rate))
        parts[str(path) if argument is None else f"{path}:{argument}"] = weight
    return next(iter(parts)) if len(parts) == 1 else tasks.spec_of(parts)


def same_start(state, model):
    """Return a start. BadInput if it is a run that has been replaced since a comparison's `state` began."""
    weights = [path.read_text() for path in sorted(Path(model).glob("checkpoints/*/meta.json"))]
    digest = zlib.crc32("".join(weights).encode())
    if weights and state.setdefault("starts", {}).setdefault(model, digest) != digest:
        raise BadInput(f"{model} was replaced after runs had begun with it: restore it, or choose another "
                       "--out_dir=.")
    return model


# --- questions ---

@functools.cache                             # each seed asks
def at_most(spec, n):
    """Return n, or the number of the task's training questions if that is less."""
    if spec is None:
        return n
    with task_errors():
        return min(n, len(tasks.load(spec).questions("train", 0, n, fewer=True)))


def few_shot_of(base, start):
    """Return the number of worked examples in the prompts of a base, {option: value}, that begins with
    `start`: by default as in rollouts.pipeline.few_shot_of."""
    given = base.get("few_shot")
    if given is not None or base.get("dataset") or not start:
        return given or 0
    start = start.replace("{seed}", "0")
    return default_few_shot(start if checkpoint.is_run(start) else None)


def draw_questions(spec, n, seed, folder, exact=False):
    """Write n questions of the split test to folder/questions-SEED-CODE.jsonl, and return (path, [question]).
    exact: the task must grade exact answers."""
    with task_errors():
        task = tasks.load(spec)
        drawn = questions_of(task, "test", n, seed, option="--questions")
        own = [(task.of(question), question) for question in drawn[:20]] if exact else []
        parts = [one.sentence("reward", one.reward, question, "")[1] for one, question in own]
    if exact and not any("exact" in of_one for of_one in parts):
        raise BadInput(f"--exact: {spec} tolerates no answer that is not exact: leave it out.")
    texts = {question["question"]: question for question in reversed(drawn)}
    questions = [*texts.values()][::-1]      # eval.py asks each text once
    path = folder / f"questions-{seed}-{code_of(task)[:8]}.jsonl"            # another verifier, other answers
    content = "".join(json.dumps(question) + "\n" for question in questions).encode()
    if path.exists() and path.read_bytes() != content:
        raise BadInput(f"{path} has other questions than {spec} draws now: choose another --out_dir= "
                       "(compare.py: or give --fresh).")
    write_atomically(path, content)
    return path, questions


def seed_of(name, draw):
    """Return the seed of an experiment's draw, by its folder's name; unlike those that people give."""
    return 10**6 + zlib.crc32(f"{name} {draw}".encode()) % 10**6


def trained_on(folders):
    """Return the normalized questions in training records of run folders and in datagen.py's logs there."""
    asked = set()
    for folder in map(Path, folders):
        for path in (*folder.glob(f"{records.FOLDER}/train_*.gz"), *folder.parent.glob("*.attempts.jsonl")):
            asked |= {normalized(record["question"]) for record in records.read(path)}
    return asked


def unseen(questions, folders):
    """Return (indices of the questions that are not in the runs' training records, number of these).
    BadInput if hardly one is left."""
    trained = trained_on(folders)
    kept = [i for i, one in enumerate(questions) if normalized(one["question"]) not in trained]
    if len(kept) < 20:
        raise BadInput("The runs trained on the test questions: make the splits of the task differ.")
    return kept, len(trained)


# --- answers ---

def vote(completion):
    """Return the answer that a completion votes for: its number or text in <answer></answer>, else its last
    line; None for an empty one."""
    number = _answers.answer(completion)
    lines = completion.strip().splitlines()
    return number if number is not None else _answers.words(completion) or (lines[-1] if lines else None)


def majority(samples, right):
    """Return the share right(sample) of the samples with the commonest answer; of several such answers, their
    mean; 0 without an answer."""
    groups = {}
    for sample in samples:
        groups.setdefault(vote(sample["completion"]), []).append(right(sample))
    groups.pop(None, None)
    most = max(map(len, groups.values()), default=0)
    return float(np.mean([np.mean(group) for group in groups.values() if len(group) == most] or [0]))


def figures_of(greedy, sampled, kept):
    """Return {name: [questions]}, shares of right answers from eval.py's records at two paths. kept: indices
    of the questions that count. Names: greedy, sampled, majority, best (the first sample with the verifier's
    highest score), and each with " exact" if the task's grade has that part."""
    likeliest = {record["number"]: record for record in records.read(greedy)}
    by_question = {}
    for record in sorted(records.read(sampled), key=lambda record: record["sample"]):
        by_question.setdefault(record["number"], []).append(record)
    rights = {"": lambda record: record["score"] == 1}
    if any("exact" in record["parts"] for record in likeliest.values()):
        rights[" exact"] = lambda record: record["score"] == 1 and record["parts"].get("exact", True)
    groups = [by_question[number] for number in kept]
    best = [max(samples, key=lambda sample: sample["score"]) for samples in groups]
    figures = {}
    for suffix, right in rights.items():
        figures["greedy" + suffix] = [right(likeliest[number]) for number in kept]
        figures["sampled" + suffix] = [np.mean([right(sample) for sample in samples]) for samples in groups]
        figures["majority" + suffix] = [majority(samples, right) for samples in groups]
        figures["best" + suffix] = [right(sample) for sample in best]
    return {name: np.array(values, float) for name, values in figures.items()}


def shares_of(by_seed, kept):
    """Return {name: [seeds, questions]} of figures_of, from each seed's paths."""
    figures = [figures_of(*paths, kept) for paths in by_seed]
    return {name: np.stack([one[name] for one in figures]) for name in figures[0]}


def print_table(num_samples, shares, compared, seconds):
    """Print each arm's figures in percent and its difference from the base."""
    heads = [name.replace("majority", f"maj@{num_samples}").replace("best", f"best of {num_samples}")
             for name in shares["base"]]
    table = [["%", *heads, "above the base", "seconds"]]
    for arm, own in shares.items():
        means = (f"{100 * values.mean():.1f}" for values in own.values())
        above = points(compared[arm, "base"]) if (arm, "base") in compared else ""
        table.append([arm, *means, above, f"{seconds[arm]:,.0f}" if arm in seconds else ""])
    print("", *aligned(table), "", sep="\n")


def draw(path, title, compared):
    """Draw the intervals of comparisons {(arm, reference): figures}; says so without matplotlib."""
    plot.check_output(path, "--out_dir=")
    try:
        figure, axis = plot.one_panel(title, 9, 1.2 + 0.4 * len(compared))
    except ImportError as e:
        print(f"The picture is left out, since matplotlib can't be imported ({e}).")
        return
    for row, ((arm, reference), one) in enumerate(reversed(compared.items())):
        middle = 100 * one["difference"]
        color = {"better": "C0", "worse": "C3", "tie": "0.5"}[one["verdict"]]
        axis.errorbar(middle, row, xerr=100 * one["high"] - middle, color=color, marker="o", capsize=3)
        axis.annotate(f"{arm} - {reference}  {middle:+.1f}", (middle, row + 0.15), ha="center", fontsize=9)
    axis.axvline(0, color="0.6")
    axis.margins(y=0.2)
    axis.set_yticks([])
    axis.set_xlabel("points; grey: a tie")
    figure.savefig(path, dpi=120)
