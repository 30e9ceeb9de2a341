"""Several tasks as one: the spec `math@2+countdown:4+table` names tasks, each with a weight after
@ (default 1)."""
import math
import re
from fractions import Fraction
from functools import cached_property

from tasks import next_task

WEIGHT = re.compile(r"(.+?)(?:@([-+]?(?:\d+\.?\d*|\.\d+)))?", re.DOTALL)


def parse(spec):
    """Return {task's spec: integer weight}. ValueError for invalid weights or a duplicate task."""
    weights = {}
    for part in spec.split("+"):
        found = WEIGHT.fullmatch(part)
        if not found:
            raise ValueError(f"The mixture {spec} has an empty part: write TASK@WEIGHT+TASK@WEIGHT.")
        name, weight = found.groups()
        if name in weights:
            raise ValueError(f"The mixture {spec} names {name} twice: give it one weight.")
        weights[name] = Fraction(weight or 1)
        if weights[name] < 0:
            raise ValueError(f"The weight of {name} in the mixture {spec} is negative: give 0 or more.")
    if not any(weights.values()):
        raise ValueError(f"All weights of the mixture {spec} are zero: give one task more than 0.")
    whole = math.lcm(*(weight.denominator for weight in weights.values()))
    return {name: int(weight * whole) for name, weight in weights.items()}


class Mixture:
    """Several tasks with the interface of tasks.Task. Each question has its task's spec as "domain".

    weights: {spec: share of the training questions}. Validation and test use equal shares."""

    def __init__(self, spec, tasks):
        self.name = spec
        self.weights = parse(spec)
        self.tasks = tasks                   # {spec: Task}
        for name in ("stop", "turn_stop"):
            values = {getattr(task, name) for task in tasks.values()}
            if len(values) > 1:
                raise ValueError(f"The tasks of the mixture {spec} have different {name.upper()} texts "
                                 f"({', '.join(map(repr, values))}): mix tasks with the same {name.upper()}.")
            setattr(self, name, *values)
        self.responds = any(task.responds for task in tasks.values())

    @property
    def domains(self):
        return list(self.tasks)

    @property
    def prompt(self):
        """The prompt form of all tasks, for datagen.py's log. ValueError if the forms differ."""
        forms = {task.prompt for task in self.tasks.values()}
        if len(forms) > 1:
            raise ValueError(f"The tasks of the mixture {self.name} have different prompt forms, and "
                             "fine-tuning examples need one: sample from each task by itself.")
        return forms.pop()

    @cached_property
    def files(self):
        return list(dict.fromkeys(file for task in self.tasks.values() for file in task.files))

    def of(self, question):
        """Return the Task of a question."""
        try:
            return self.tasks[question["domain"]]
        except (KeyError, TypeError):
            raise ValueError(f"A question of the mixture {self.name} needs a \"domain\", one of "
                             f"{', '.join(self.tasks)}, and this has {question.get('domain')}: "
                             f"{question['question'][:80]}") from None

    def cut(self, completion):
        return next(iter(self.tasks.values())).cut(completion)

    def reward(self, question, completion, turns=None):
        return self.of(question).reward(question, completion, turns)

    def solution(self, question):
        return self.of(question).solution(question)

    def questions(self, split, seed=0, n=None, fewer=False):
        """Return n questions, ordered so that every prefix has the shares of the whole. n None: all of each
        task, or its default number. fewer: accept fewer than its share from a task that has no more."""
        weights = self.weights
        if split != "train":
            weights = dict.fromkeys(self.tasks, 1)
        weights = {name: weight for name, weight in weights.items() if weight}
        counts = {}
        for _ in range(n or 0):
            name = next_task(weights, counts)
            counts[name] = counts.get(name, 0) + 1
        found = {}
        for name in weights if n is None else counts:
            found[name] = self.tagged(name, self.tasks[name].questions(split, seed, counts.get(name), fewer))
            if not found[name] and split == "train":
                raise ValueError(f"The task {name} of the mixture {self.name} has no train questions: leave "
                                 "it out, or give it the weight 0.")
        return interleave(found, weights)

    def tagged(self, name, questions):
        if any("domain" in question for question in questions):
            raise ValueError(f'The questions of {name} already have a "domain", a key reserved for mixtures: '
                             "rename it.")
        return [question | {"domain": name} for question in questions]

    def documents(self, split, seed=0):
        """Return texts for pretraining, by weight, until a task has no more."""
        weights = {name: weight for name, weight in self.weights.items() if weight}
        found = {name: self.tasks[name].documents(split, seed) for name in weights}
        if not all(found.values()):
            raise ValueError(f"One of the tasks of {self.name} has no text of split {split}: leave it out.")
        return interleave(found, weights, to_the_end=False)


def interleave(lists, weights, to_the_end=True):
    """Return the values of {name: list}, interleaved by weight; to_the_end: until all are used up."""
    weights = {name: weights[name] for name in lists}
    counts = dict.fromkeys(lists, 0)
    result = []
    while weights:
        name = next_task(weights, counts)
        if counts[name] == len(lists[name]):
            if not to_the_end:
                break
            del weights[name]
            continue
        result.append(lists[name][counts[name]])
        counts[name] += 1
    return result
