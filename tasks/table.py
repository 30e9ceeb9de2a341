"""Questions about a small CSV table in the prompt: a cell of a named row, how many or which rows satisfy a
condition, the sum or the largest number of a column, a join of two tables.

The argument is a level, 0 to 2 (default 1): 0 three rows with one column of numbers below 10, and four kinds,
for a model of a million parameters that trains for minutes; 1 three rows with two columns of numbers below
100; 2 five to eight rows with four columns of numbers below 1000.

Two in ten documents have a slip. Where the largest number differs between numerical and alphabetical order,
in which 9 follows 45, most documents use alphabetical order."""
import re

from tasks import _answers, _equations, _numbers, _questions, _steps
from tasks._steps import Steps, sentences

INSTRUCTION = ("Read the cells that matter in short steps such as `cup: cost 45, size 8.`, `cup 45 > 20` or "
               "`12 + 45 = 57.` Then give the number or the name alone within <answer></answer>.")
# All first letters differ, so that one letter identifies a row.
NAMES = ("axe", "bag", "cup", "fan", "hat", "jar", "key", "map", "pen", "rug", "toy", "van")
COLUMNS = ("age", "cost", "mass", "rank", "size", "width")
CODES = "pqrstuvwyz"                 # without `a`, which is a word
PHRASINGS = {
    "cell": ("What is the {column} of the {name}?", "Give the {column} of the {name}."),
    "join": ("What is the {column} of the {name}?", "Give the {column} of the {name}."),
    "count": ("How many rows have {column} {than} {bound}?", "Count the rows with {column} {than} {bound}."),
    "which": ("Which item has {column} {than} {bound}?", "Name the item with {column} {than} {bound}."),
    "sum": ("What is the sum of {column}?", "Add up {column}."),
    "largest": ("What is the largest {column}?", "Give the largest {column}."),
}
TINY = ("cell", "join", "count", "largest")          # kinds of level 0
THAN = {">": "over", "<": "under"}
# In a chain, a comparison starts with the last number of the previous one.
COMPARISON = re.compile(r"(?<![\w.])(?<![0-9],)([0-9]{1,6}) ?([<>]) ?"
                        r"(?=([0-9]{1,6})(?![\w.]?[0-9]|,[0-9]{3}(?![0-9])| ?[-+*/] ?[0-9]))")
COMPARED = re.compile(r"[^\W\d]\w* [0-9]+ [<>] [0-9]+")      # as in worked examples, where the word is a name
WORD = re.compile(r"(?<![\w'’])\w+")
LONGEST = 500                        # maximum characters of steps; worked ones have up to 220


def draw(rng, level=1):
    """Return (key, question). The key ignores the phrasing.

    rows: [name, *numbers] each, or for a join [name, code], with the second table codes: [code, number]. row,
    column: indices of the cell asked for. sign, bound: the condition."""
    kind = rng.choice(list(PHRASINGS) if level else TINY)
    n_rows, n_columns = (3, level + 1) if level < 2 else (rng.randint(5, 8), 4)
    columns = rng.sample(COLUMNS, n_columns)
    names = rng.sample(NAMES, n_rows)
    numbers = [rng.sample(range(1, 10 ** (level + 1)), n_rows) for _ in columns]
    row = rng.randrange(n_rows)
    column = rng.randrange(n_columns)
    if kind == "largest" and rng.random() < 0.8:
        numbers[column] = tempting_numbers(rng, n_rows, max(level, 1))
    q = {"kind": kind, "columns": columns, "row": row, "column": column}
    sign = rng.choice("<>")
    bound = None
    if kind == "join":
        codes = rng.sample(CODES, n_rows)
        q["rows"] = list(map(list, zip(names, codes)))
        q["codes"] = list(map(list, zip(sorted(codes), numbers[0])))
        table = f"item,code\n{written(q['rows'])}\ncode,{columns[column]}\n{written(q['codes'])}"
    else:
        q["rows"] = list(map(list, zip(names, *numbers)))
        table = f"{','.join(['item', *columns])}\n{written(q['rows'])}"
    if kind in ("count", "which"):
        bounds = bounds_of(sorted(numbers[column]), kind, sign)
        if not bounds:
            return draw(rng, level)
        bound = rng.choice(bounds)
        q |= {"sign": sign, "bound": bound}
    phrasing, others = (p.format(column=columns[column], name=names[row], than=THAN[sign], bound=bound)
                        for p in rng.sample(PHRASINGS[kind], 2))
    q |= {"question": f"{table}\n{phrasing}", "answer": str(worked(q, Steps()))}
    return f"{table}\n{min(phrasing, others)}", q


def tempting_numbers(rng, n, level):
    """Return n distinct numbers whose largest is not the last in alphabetical order."""
    while True:
        values = [rng.randrange(1, 10 ** rng.randint(1, level + 1)) for _ in range(n)]
        if len(set(values)) == n and max(values) != max(values, key=str):
            return values


def bounds_of(values, kind, sign):
    """Return possible bounds for the sorted values; for "which", exactly one value matches."""
    low, high = values[-2:] if sign == ">" else values[:2]
    if kind == "count":
        low = max(values[0] - 9, 0)
        high = values[-1] + 9
    return [n for n in range(low, high + 1) if n not in values]


def written(rows):
    return "\n".join(",".join(map(str, row)) for row in rows)


def compared(a, b):
    return ">" if a > b else "<"


def worked(q, steps, order=int):
    """Write the steps and return the answer. order: int, or str for alphabetical order."""
    kind = q["kind"]
    rows = q["rows"]
    column = q["column"]
    name, *cells = rows[q["row"]]
    if kind == "join":
        code = steps.choose(cells[0], [code for _, code in rows])
        value = steps.choose(dict(q["codes"])[code], [value for _, value in q["codes"]])
        steps.texts.append(f"{name} has code {code}. {code} has {q['columns'][column]} {value}.")
        return value
    if kind == "cell":
        cells = steps.choose(cells, [others for _, *others in rows])
        listed = [f"{label} {cell}" for label, cell in zip(q["columns"], cells)]
        steps.texts.append(f"{name}: {', '.join(listed)}.")
        i = steps.choose(column, range(len(cells))) if len(cells) > 1 else 0
        return cells[i]
    values = [row[1 + column] for row in rows]
    found = []
    best = values[0]
    comparisons = []
    if kind == "sum":
        steps.texts.append(f"{', '.join(map(str, values))}.")
        for value in values[1:]:
            best = steps.add(best, value) if len(values) == 3 else steps.equation(best, "+", value)
        return best
    if kind == "largest":
        for value in values[1:]:
            sign = steps.choose(compared(order(best), order(value)), "<>")
            comparisons.append(f"{best} {sign} {value}")
            best = best if sign == ">" else value
    else:
        for (name, *_), value in zip(rows, values):
            sign = steps.choose(compared(value, q["bound"]), "<>")
            comparisons.append(f"{name} {value} {sign} {q['bound']}")
            found += [name] * (sign == q["sign"])
    steps.texts.append(f"{', '.join(comparisons)}.")
    if kind == "largest":
        return best
    if kind == "count":
        return len(found)
    return found[0] if found else "none"


def invites_mistake(question):
    """Return whether another number is the largest in alphabetical order."""
    return question["kind"] == "largest" and str(worked(question, Steps(), str)) != question["answer"]


solution, wrong_solution = _steps.completions(worked, invites_mistake, str)
check, questions, documents = _questions.with_levels("table", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts). The parts are answered, correct, and reasoned: the text before the answer has
    the steps that lead to it, and no false equation or comparison."""
    completion = completion[:_numbers.LONGEST_TEXT]
    if question.get("kind") == "which":
        value = _answers.words(completion)
        right = question["answer"]
    else:
        value = _answers.answer(completion, _answers.asked_unit(question))
        right = int(question["answer"])
    short = len(_answers.before_answer(completion)) <= LONGEST
    parts = {"answered": value not in (None, ""), "correct": value == right,
             "reasoned": short and "kind" in question and reasoned(question, completion, value)}
    return float(parts["correct"]), parts


def reasoned(question, completion, value):
    """Return whether the text before the answer has the steps of its kind: a sum's equations, a comparison of
    each number, or the cells in one sentence with their names."""
    name, *cells = question["rows"][question["row"]]
    kind = question["kind"]
    column = question["columns"][question["column"]]
    text = _answers.before_answer(completion)
    values = [row[1 + question["column"]] for row in question["rows"]] if kind != "join" else []
    if not fits(question, text):
        return False
    if kind == "sum":                                    # 12,345 in a CSV are two numbers
        return _answers.reasoned(question, completion, value, values)
    comparisons = [(int(a), sign, int(b)) for a, sign, b in COMPARISON.findall(text)]
    if any(a == b or sign != compared(a, b) for a, sign, b in comparisons):
        return False
    if not all(e.true for e in _equations.read(text)):
        return False
    pairs = [{a, b} for a, _, b in comparisons]
    if not set().union(*pairs) <= {*values, question.get("bound")}:
        return False
    if kind == "largest":
        losers = {min(pair) for pair in pairs}
        return set(values) <= set().union(*pairs) and {n for n in values if n < max(values)} <= losers
    if kind in ("count", "which"):
        return all({n, question["bound"]} in pairs for n in values)
    right = question["answer"]
    needed = [{name, column, right}] if kind == "cell" else [{name, cells[0]}, {cells[0], right}]
    found = [set(WORD.findall(sentence)) for sentence in sentences(text)]
    return all(any(words <= sentence for sentence in found) for words in needed)


def fits(question, text):
    """Return whether the numbers that a text assigns to names and columns agree with the table, and for a
    cell, whether it mentions no other row."""
    kind, rows, columns, right = (question[key] for key in ("kind", "rows", "columns", "answer"))
    asked = rows[question["row"]]
    column = columns[question["column"]]
    if kind == "join":
        found = {word for sentence in sentences(text) for word in WORD.findall(sentence)}
        others = {*NAMES, *CODES, *COLUMNS} - {*asked, column}
        labels = set(re.findall(r"\bhas (\w+) [0-9]", text))
        return not found & others and labels <= {column} and {*filter(str.isdecimal, found)} <= {right}
    table = {name: dict(zip(columns, numbers)) for name, *numbers in rows}
    for sentence in sentences(text):
        first, *others = re.split(" ?, ?", sentence)
        if others and all(map(str.isdecimal, others)):           # a row, or the numbers of a sum
            if first in NAMES and others != [*map(str, table.get(first, {}).values())]:
                return False
            values = sorted(row[column] for row in table.values())
            if first.isdecimal() and sorted(map(int, [first, *others])) != values:
                return False
        names = asked[:1] if kind == "cell" else []
        for clause in re.split("[,;]", sentence):
            words = WORD.findall(clause.partition("=")[0])
            named = [*dict.fromkeys(word for word in words if word in NAMES)]
            labels = [*dict.fromkeys(word for word in words if word in COLUMNS)]
            numbers = [int(word) for word in words if word.isdecimal() and int(word) != question.get("bound")]
            names = named or names
            theirs = [table.get(name, {}).get(label) for name in names for label in labels or [column]]
            if kind == "cell" and (names != asked[:1] or numbers not in ([], theirs)):
                return False
            result = kind in ("count", "sum") and numbers == [int(right)] and not re.search("[<>]", clause)
            if numbers and (named or labels) and numbers[:len(theirs)] != theirs and not result:
                return False
            if COMPARED.fullmatch(clause.strip()) and words[0] not in (*named, *labels, "and", "so"):
                return False
    return True
