"""Report the gain of each stage of runs/countdown.sh, and the problems that no teacher solves.

    python -m runs.countdown --teachers=out/teachers.json
        the share of problems that each teacher solves, and the problems that none solves
    python -m runs.countdown out/countdown
        a table, summary.json, traces.txt and summary.png of a finished pipeline
"""
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from rollouts.questions import task_errors
from runs import summary as pipeline
from runtime import config, guard
from runtime.config import BadInput, PositiveInt
from runtime.log import read_lines
from tasks import countdown_search

MODELS = ("base", "rft", "grpo")
TRIES = 8                                    # of each question, as in eval.py
NEEDED = "seconds greedy.txt sampled.txt greedy.jsonl sampled.jsonl again.jsonl teachers.json".split()


@dataclass
class Config:
    folder: str = ""                         # output of runs/countdown.sh, first on the command line
    teachers: str = ""                       # a .json file: write the teachers' figures there instead
    task: str = "countdown_search"           # with an argument, if any
    num_questions: PositiveInt = 500         # of split test


# --- the teachers ---

def random_search(question, longest, rng):
    """Return whether depth-first search in random order, a baseline, finds the target in `longest` bytes."""
    at_random = ("depth", lambda state, target: rng.random(), None)
    return countdown_search.completion(at_random, question, longest)[1]


def teachers(n, argument=None):
    """Return the teachers' figures on the first n test questions, within a document's bytes and within twice
    as many (the model's context), those of random search within the latter, and the questions that no teacher
    solves within the former, each with a solution."""
    longest = countdown_search.sizes(argument)[2]
    asked = countdown_search.questions("test", n=n, argument=argument)
    solved = {}                              # {teacher: [whether it solves a question]}
    later = {}                               # the same, within twice the bytes
    lengths = []
    for teacher in countdown_search.TEACHERS:
        name = countdown_search.name_of(teacher)
        searches = [countdown_search.completion(teacher, question, longest) for question in asked]
        solved[name] = [right for _, right in searches]
        later[name] = [countdown_search.completion(teacher, question, 2 * longest)[1] for question in asked]
        for question, (text, _) in zip(asked, searches):
            lengths.append(len(countdown_search.PROMPT.format(question["question"])) + len(text) + 1)
    by_any, by_any_later = (list(map(any, zip(*rows.values()))) for rows in (solved, later))
    rng = random.Random("random search")
    at_random = [[random_search(question, 2 * longest, rng) for _ in range(TRIES)] for question in asked]
    unsolved = []
    for question, right, right_later, tries in zip(asked, by_any, by_any_later, at_random):
        if not right:
            steps, _ = countdown_search.search(countdown_search.EXHAUSTIVE, question["numbers"],
                                               int(question["answer"]))
            unsolved.append(question | {"a_solution": steps, "solved_in_twice_the_room": right_later,
                                        "solved_at_random": any(tries)})
    return {
        "questions": len(asked),
        "solve": {name: fmean(row) for name, row in solved.items()},
        "solve_in_twice_the_room": {name: fmean(row) for name, row in later.items()},
        "together": fmean(by_any),
        "together_in_twice_the_room": fmean(by_any_later),
        "random_search": {"one_try": fmean(map(fmean, at_random)), "best_of_8": fmean(map(any, at_random))},
        "bytes_of_a_document": {"mean": fmean(lengths), "most": max(lengths)},
        "longer_than_the_limit": sum(length + 1 > longest for length in lengths),
        "unsolved": unsolved,
    }


def write_teachers(cfg):
    """Write and print the figures of teachers()."""
    name, _, argument = cfg.task.partition(":")
    path = Path(cfg.teachers)
    if name != "countdown_search":
        raise BadInput(f"--task={cfg.task} has no teachers: give countdown_search, or countdown_search:4,99.")
    with task_errors():
        countdown_search.check(argument or None)
    if path.exists() and b'"together"' not in path.read_bytes():
        raise config.would_overwrite(path, "a list of teachers", "--teachers=")
    found = teachers(cfg.num_questions, argument or None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    print(f"Solved of {found['questions']} test problems, and within twice the bytes:")
    for name, share in found["solve"].items():
        print(f"{name:36}{100 * share:6.1f}%{100 * found['solve_in_twice_the_room'][name]:8.1f}%")
    print(f"{'together':36}{100 * found['together']:6.1f}%{100 * found['together_in_twice_the_room']:8.1f}%")
    for tries, share in found["random_search"].items():
        print(f"{'depth-first at random, ' + tries.replace('_', ' '):36}{100 * share:15.1f}%")
    print(f"{len(found['unsolved'])} are solved by no teacher: {path}")


# --- the pipeline ---

def read_teachers(path):
    """Return the figures of teachers() from its file, with the unsolved problems as {question: record}."""
    known = json.loads(path.read_text())
    return known | {"unsolved": {question["question"]: question for question in known["unsolved"]}}


def answers(path):
    """Return {model: {question: its samples}} from a file of eval.py --output=, which has a line a sample."""
    by_model = {}
    for line in map(json.loads, path.read_text().splitlines()):
        of_model = by_model.setdefault(Path(line["model"]).name, {})
        of_model.setdefault(line["question"], []).append(line)
    return by_model


def solved(samples):
    """Return whether a sample of the question is right."""
    return any(sample["score"] == 1 for sample in samples)


def count(flags):
    """Return {"n": True ones, "of": all} of a list of bools."""
    return {"n": sum(flags), "of": len(flags)}


def hard_problems(again, unsolved):
    """Return {group: problems}: those that no teacher solves; of these, those that the base does not solve in
    8 tries; and of the latter, those that no teacher solves within twice the bytes.

    again: the base's answers with another seed, from answers(); they select the base's failures, since
    selecting by the compared answers would favour the other models by chance. unsolved: from
    read_teachers()."""
    hard = [question for question in unsolved if question in again["base"]]
    hardest = [question for question in hard if not solved(again["base"][question])]
    beyond_room = [question for question in hardest if not unsolved[question]["solved_in_twice_the_room"]]
    return {"no_teacher": hard, "no_teacher_and_not_the_base": hardest, "nor_in_twice_the_room": beyond_room}


def beyond(sampled, again, unsolved):
    """Return how many problems of each group of hard_problems() each model, and random search within the
    models' context, solves in 8 tries. sampled: from answers()."""
    groups = hard_problems(again, unsolved)
    result = {}
    for key, asked in groups.items():
        result[key] = {name: count([solved(samples[question]) for question in asked])
                       for name, samples in sampled.items()}
        at_random = [unsolved[question]["solved_at_random"] for question in asked]
        result[key]["random_search"] = count(at_random)
    hardest = groups["no_teacher_and_not_the_base"]
    result["solved_by_the_last"] = [question for question in hardest if solved(sampled["grpo"][question])]
    return result


def side_by_side(greedy, again, unsolved, n=12):
    """Return the three models' greedy answers to n questions, in columns. Questions that only the last model
    solves come first: first those that no teacher solves within twice the bytes nor the base in other tries,
    then those that no teacher solves, then the rest in test order."""
    beyond_room = hard_problems(again, unsolved)["nor_in_twice_the_room"]

    def rank(question):
        rights = [solved(greedy[name][question]) for name in MODELS]
        return rights != [False, False, True], question not in beyond_room, question not in unsolved

    parts = []
    for question in sorted(greedy["base"], key=rank)[:n]:
        columns = []
        for name in MODELS:
            (sample,) = greedy[name][question]
            mark = "right" if sample["score"] == 1 else "wrong"
            columns.append([f"{name} ({mark})", *sample["completion"].splitlines()])
        widths = [max(map(len, column)) for column in columns]
        height = max(map(len, columns))
        rows = zip(*(column + [""] * (height - len(column)) for column in columns))
        by_whom = " (no teacher solves it)" if question in unsolved else ""
        if question in beyond_room:
            by_whom = " (no teacher solves it within twice the bytes, nor the base in 8 tries)"
        lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        parts.append("\n".join([question + by_whom, *lines]))
    return "\n\n\n".join(parts) + "\n"


def gains(path):
    """Return {model: accuracy minus the base's, with its 95% interval} from eval.py --compare's output."""
    keys = "difference", "difference_low", "difference_high"
    base, *others = pipeline.last_line(path)["models"]
    return {Path(row["model"]).name: {key: row[key] for key in keys} for row in others}


def summarise(folder, known, again):
    """Return (summary, intervals of greedy and sampled accuracy of each stage); see beyond()."""
    summary, intervals = pipeline.summarise(folder)
    return summary | {
        "questions": known["questions"],
        "teachers": known["solve"] | {key: known[key] for key in ("together", "together_in_twice_the_room",
                                                                  "random_search")},
        "gains": {when: gains(folder / f"{when}.txt") for when in ("greedy", "sampled")},
        "beyond": beyond(answers(folder / "sampled.jsonl"), again, known["unsolved"]),
    }, intervals


def report(summary):
    pipeline.print_stages(summary)
    for when, by_model in summary["gains"].items():
        for name, row in by_model.items():
            low, high = (100 * row[f"difference_{end}"] for end in ("low", "high"))
            print(f"{name} - base, {when}: {100 * row['difference']:+.1f} points [{low:+.1f}, {high:+.1f}]")
    together, later = (100 * summary["teachers"][key] for key in ("together", "together_in_twice_the_room"))
    one, eight = (100 * summary["teachers"]["random_search"][key] for key in ("one_try", "best_of_8"))
    print(f"All teachers together solve {together:.1f}%, and {later:.1f}% within twice the bytes, where "
          f"random search\nsolves {one:.1f}%, and {eight:.1f}% in 8 tries. Of the problems that")
    groups = {"no_teacher": "no teacher solves",
              "no_teacher_and_not_the_base": "nor the base in 8 other tries",
              "nor_in_twice_the_room": "nor a teacher within twice the bytes"}
    for key, group in groups.items():
        for name, row in summary["beyond"][key].items():
            print(f"  {group}, in 8 tries {name} solves {row['n']} of {row['of']}")


def main(argv):
    cfg = config.load(Config, argv, positional="folder")
    if bool(cfg.folder) == bool(cfg.teachers):
        raise BadInput("Give an output folder of runs/countdown.sh or --teachers=FILE.json: "
                       "python -m runs.countdown out/countdown")
    if cfg.teachers:
        write_teachers(cfg)
        return 0
    folder = Path(cfg.folder)
    missing = [name for name in NEEDED if not (folder / name).exists()]
    if missing:
        raise BadInput(f"{folder} has no {missing[0]}: run runs/countdown.sh first, or name its --out_dir=.")
    known = read_teachers(folder / "teachers.json")
    again = answers(folder / "again.jsonl")
    summary, intervals = summarise(folder, known, again)
    traces = side_by_side(answers(folder / "greedy.jsonl"), again, known["unsolved"])
    level = known["together"], "all teachers together"
    steps = [line for line in read_lines(folder / "grpo") if "reward" in line and "seconds" in line]
    curve = [(line["seconds"], line["reward"]) for line in steps]
    picture = partial(pipeline.draw, summary, intervals, curve=curve, level=level)
    pipeline.write(folder, summary, report, picture, {"traces.txt": traces})
    return 0


if __name__ == "__main__":
    guard.run(main)
