"""Audit the verifiers of reasoning-gym's generators, through the reward of tasks/gym.py.

    python -m studies.gym_audit [NAME ...]

prints a Markdown table (generator, verdict, reason). A generator stands if
- its right answer earns 1 on ITEMS items, which a process with another hash seed reproduces;
- junk() earns 0 on the first JUNKED items (text that equals the right answer by same() is not junk);
- no grade raises or takes more than MOST_SECONDS["grade"];
- no part of a completion is compiled or executed, as eval does.
Other right answers are not searched for: a generator with many stands only if no junk happens to be one.
"""
import contextlib
import datetime
import inspect
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from importlib.metadata import version

from tasks import _numbers, gym

ITEMS = 50
JUNKED = 20                          # items that all junk is tried on
DRAWS = 500                          # items whose questions are counted
FEWEST = 0.75                        # share of them that must be different
MOST_SECONDS = {"construction": 2.0, "item": 0.1, "grade": 0.05}
MOST_OF_ALL = 60                     # seconds to audit a generator
MEMORY = 3 * 2**30
CANARY = "canary_7391"               # a name that occurs in no code
CODE = ("{c}", "__import__('os').getpid() or {c}", "exec('{c}=1')", "lambda {c}: {g}", "[{c} for {c} in [1]]",
        "{c} + 1", "x**2 + {c}", "print({c})", "import os; {c}", "f(x)={c}", "while True: {c}",
        "{g} if True else {c}", "({c} := 1)", "{g} # {c}", "[{g!r}, {c}]")
PLAIN = ("", " ", "\n", "0", "1", "-1", "2", "10", "100", "1000000", "0.5", "3.14159", "1e308", "1e999999999",
         "nan", "inf", "-inf", "1/0", "1/3", "0/0", "None", "null", "True", "False", "true", "yes", "no",
         "[]", "[[]]", "{}", "()", "[null]", '""', "''", "?", ".", ",", "-", "a", "A", "answer",
         "I don't know", "impossible", "the answer", "x", "\x00\x01\x02\xff", "\ud83d", "０", "٣", "½", "∞",
         "🙂" * 40, "a" * 3999, "9" * 3999, "9" * 300, "[" * 3000, "(" * 3000, "1," * 1500, "0 " * 1900,
         "a b " * 900, "\n" * 3000, "- " * 1500, "{\"a\":" * 500, "1+" * 1500 + "1", "2**2**2**2**2**2",
         "9**9**9**9", "<think>", "%s %d {} {0}", "\\boxed{}", "```python\npass\n```", "A,B", "1,2",
         "1 2\n3 4", "1=2")


def same(text, right):
    """Return whether two answers are equal: as numbers, as lists of numbers, or as texts without case,
    spaces, quotation marks and a final full stop."""
    number = _numbers.number(right)
    if number is not None and _numbers.number(text) is not None:
        return _numbers.number(text) == number
    pieces = [re.split(r"[\s,]+", answer.strip()) for answer in (text, right)]
    values = [[_numbers.number(piece) for piece in part] for part in pieces]
    return gym.plain(text) == gym.plain(right) or (None not in values[0] and values[0] == values[1])


def near(right):
    """Return near misses of a right answer, an edit each."""
    half = len(right) // 2
    words = right.split()
    found = [right[1:], right[:-1], right + right[-1], right[0] + right, right[::-1], right[:half],
             right[half:], right[half:] + right[:half], right[:half] + right[half + 1:], right + "1",
             "1" + right, right + "x", "-" + right, " ".join(words[::-1]), " ".join(words[1:]),
             " ".join(words[:-1]), " ".join(words + words[-1:]),
             "".join(str((int(c) + 1) % 10) if c in "0123456789" else c for c in right),
             right.translate(str.maketrans("abcxyzABC", "bcayzxBCA"))]
    for i, c in enumerate(right):            # change the first digit
        if c in "0123456789":
            found += [right[:i] + str((int(c) + step) % 10) + right[i + 1:] for step in (1, 9)]
            break
    number = _numbers.number(right)
    if number is not None:
        found += [str(float(n)) for n in (number + 1, number - 1, -number, 10 * number, number / 10,
                                          number * 1001 / 1000, number + 1 / 1000)]
    return found


def around(right, other):
    """Return texts that contain the right answer but are not one."""
    return [f"The answer is {right}", f"{right} or {other}", f"not {right}", f"{right} {right}",
            f"{right}, {other}", f"{other}\n{right}", f"{right}\n{other}", f"{right} because {other}",
            f"I guess {right}?", f"{other} {right}", f"{right}/{other}", f"maybe {right}, maybe not"]


def junk(question, right, others):
    """Return more than a hundred kinds of wrong completions: wrong answers within tags, and wrong tags."""
    texts = [*PLAIN, question, question[:200], question[-200:], *near(right),
             *around(right, others[0] if others else "7"), *others]
    texts += [code.format(c=CANARY, g=right) for code in CODE]
    found = [f"<answer>{text}</answer>" for text in texts if not same(text, right)]
    wrong = next((text for text in others if not same(text, right)), "junk")
    return found + [right, f"Answer: {right}", f"<answer>{right}", f"{right}</answer>",
                    f"<answer></answer>{right}", f"\\boxed{{{right}}}",
                    f"<answer>{wrong}</answer><answer>{right}</answer>",
                    f"<answer><answer>{right}</answer></answer>", f"</answer>{right}<answer>",
                    f"<answer>{wrong} <answer>{right}</answer>", "x" * 10_000 + f"<answer>{right}</answer>"]


COMPILED = []


def record_compilation(event, arguments):
    """Audit hook: record code with the canary that is compiled (eval, exec and parsers that use them), and
    commands that are run."""
    if event == "compile" and arguments[0] is not None and CANARY in str(arguments[0]):
        COMPILED.append(str(arguments[0])[:60])
    if event in ("os.system", "subprocess.Popen"):
        COMPILED.append(event)


def clocked(stage, function, *given):
    """Return (seconds, result) of a call, the faster of two if the first exceeds MOST_SECONDS[stage]."""
    seconds = math.inf
    for _ in range(2):                       # since other processes share the cores
        if seconds > MOST_SECONDS[stage]:
            start = time.perf_counter()
            result = function(*given)
            seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def grade(question, completion):
    """Return (seconds, score) of a completion."""
    seconds, (score, parts) = clocked("grade", gym.reward, question, completion)
    return seconds, score if all(parts.values()) else 0.0


class Rejected(Exception):
    """The reason against a generator."""


def audit(name, other):
    """Return the measurements of a generator, {name: number}, or raise Rejected."""
    scorer = inspect.getsource(gym.library().factory.DATASETS[name][0].score_answer)
    evaluates = re.search(r"\b(eval|exec|parse_expr)\(", scorer)
    if evaluates and name not in gym.EXACT:
        raise Rejected(f"its scorer calls {evaluates[1]}, which executes the answer as code")
    seconds, data = clocked("construction", gym.dataset, name)
    if seconds > MOST_SECONDS["construction"]:
        raise Rejected(f"constructing it takes {seconds:.1f} s")
    items, item_seconds = make_items(name, data)
    texts = [q["question"] + q["answer"] for q in items]
    if other.texts(name, [q["index"] for q in items]) != texts:
        raise Rejected("an item is not a function of its index: another process makes another")
    for q in items:
        if grade(q, f"Well.\n<answer>{q['answer']}</answer>")[1] != 1.0:
            raise Rejected(f"its own right answer {short(q['answer'])} is paid less than 1")
    kinds, slowest = grade_junk(items)
    different = len({data[(104729 * i + 3) % gym.N_ITEMS]["question"] for i in range(DRAWS)})
    if different < FEWEST * DRAWS:
        raise Rejected(f"{DRAWS} items have only {different} different questions")
    lengths = sorted(len(q["question"]) for q in items)
    return {"item_ms": 1000 * item_seconds, "characters": lengths[len(items) // 2],
            "answer": max(len(q["answer"]) for q in items), "grade_ms": 1000 * slowest,
            "different": different / DRAWS, "kinds": kinds,
            "guess": Counter(q["answer"] for q in items).most_common(1)[0][1] / len(items)}


def make_items(name, data):
    """Return (ITEMS items with an answer as questions, mean seconds to make one)."""
    items = []
    total = 0.0
    for i in range(ITEMS):
        index = 7919 * i + 1
        seconds, item = clocked("item", data.__getitem__, index)
        if not isinstance(item["answer"], str):
            raise Rejected("it has no right answer of its own")
        if seconds > MOST_SECONDS["item"]:
            raise Rejected(f"an item takes {1000 * seconds:.0f} ms to make")
        total += seconds
        if right := item["answer"].strip():
            items.append({"question": item["question"].strip(), "answer": right, "generator": name,
                          "index": index})
    if not items:
        raise Rejected("its answers are empty")
    return items, total / ITEMS


def grade_junk(items):
    """Grade junk, which must not be paid. Return (most kinds for an item, seconds of the slowest grade)."""
    slowest = 0.0
    kinds = 0
    for i, q in enumerate(items[:JUNKED]):
        others = [items[(i + step) % len(items)]["answer"] for step in range(1, 9)]
        completions = junk(q["question"], q["answer"], others)
        kinds = max(kinds, len(completions))
        for completion in completions:
            COMPILED.clear()
            try:
                seconds, score = grade(q, completion)
            except Exception as e:
                raise Rejected(f"its scorer raises {type(e).__name__} on {short(completion)}") from None
            slowest = max(slowest, seconds)
            if COMPILED:
                raise Rejected("its scorer evaluates the answer as code")
            if score != 0:
                raise Rejected(f"{short(completion)} is paid where {short(q['answer'])} is right")
            if seconds > MOST_SECONDS["grade"]:
                raise Rejected(f"grading {short(completion)} takes {1000 * seconds:.0f} ms")
    return kinds, slowest


def short(text):
    text = text.removeprefix("<answer>").removesuffix("</answer>")
    text = text if len(text) < 60 else f"{text[:28]}...{text[-28:]}"
    return repr(text).replace("|", "\\|").replace("`", "")


class Other:
    """A process with another hash seed, hence another order of sets, which makes items again."""
    CODE = ("import json, os, sys; from tasks import gym; out = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1)\n"
            "for line in sys.stdin:\n"
            "    name, indices = json.loads(line)\n"
            "    items = [gym.dataset(name)[i] for i in indices]\n"
            "    texts = [e['question'].strip() + e['answer'].strip() for e in items]\n"
            "    print(json.dumps(texts), file=out, flush=True)\n")

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", self.CODE], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env=os.environ | {"PYTHONHASHSEED": "12345"})

    def texts(self, name, indices):
        """Return [question and answer] of a generator's items."""
        self.process.stdin.write(json.dumps([name, indices]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def audit_in_process(name, other):
    """Run audit() in a process with at most MOST_OF_ALL seconds and MEMORY bytes, and return (the reason
    against the generator or None, measurements)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.alarm(MOST_OF_ALL)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            try:
                sys.addaudithook(record_compilation)
                found = None, audit(name, other)
            except Rejected as e:
                found = str(e), {}
            except BaseException as e:
                found = f"{type(e).__name__}: {' '.join(str(e).split())[:120]}", {}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    if not result:
        return f"it takes more than {MOST_OF_ALL} s or {MEMORY // 2**30} GiB", {}
    return json.loads(result)


def main(names):
    """Audit the named generators or all, print the table, and return {generator: reason}."""
    registered = sorted(gym.library().factory.DATASETS)
    print(f"reasoning-gym {version('reasoning-gym')}, {len(registered)} generators, {datetime.date.today()}")
    print("\n| generator | verdict | reason |\n|---|---|---|")
    found = {}
    other = Other()
    for name in names or registered:
        found[name], seen = audit_in_process(name, other)
        rest = ", ".join(f"{key} {value:.3g}" for key, value in seen.items())
        print(f"| {name} | {'left out' if found[name] else 'stands'} | {found[name] or rest} |", flush=True)
    other.process.stdin.close()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
