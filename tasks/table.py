"""Questions over a small table in the prompt, written as CSV: a cell of a named row, how many or which
rows satisfy a condition, the sum or the largest of a column, a join of two tables.

The argument is a level, 0 to 2 (default 1): 0 three rows with a column of numbers below 10, and four
kinds, for a model of a million parameters that learns for minutes; 1 three rows with two columns of
numbers below 100; 2 five to eight rows with four columns of numbers below 1000.

Two in ten worked examples carry a slip. Where the largest number is not the last in the order of texts, in
which 9 comes after 45, most take the order of texts."""
import re

from tasks import _answers, _equations, _numbers, _questions, _steps
from tasks._steps import Steps, sentences

INSTRUCTION = ("Read the cells that matter in short steps such as `cup: cost 45, size 8.`, `cup 45 > 20` or "
               "`12 + 45 = 57.` Then give the number or the name alone within <answer></answer>.")
# No two begin alike: the first letter says where to read.
NAMES = ("axe", "bag", "cup", "fan", "hat", "jar", "key", "map", "pen", "rug", "toy", "van")
COLUMNS = ("age", "cost", "mass", "rank", "size", "width")
CODES = "pqrstuvwyz"                 # `a` is a word
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
# One of a chain begins with the number that the one before it ends with.
COMPARISON = re.compile(r"(?<![\w.])(?<![0-9],)([0-9]{1,6}) ?([<>])=? ?"
                        r"(?=([0-9]{1,6})(?![\w.]?[0-9]|,[0-9]{3}(?![0-9])| ?[-+*/] ?[0-9]))")
COMPARED = re.compile(r"[^\W\d]\w* [0-9]+ [<>] [0-9]+")        # as in a worked example: the word is a name
WORD = re.compile(r"(?<![\w'’])\w+")
LONGEST = 500                        # characters of steps that are read: worked ones have 220 at most


def draw(rng, level=1):
    """Return (what is asked, the question); how it is phrased makes no other question.

    rows: [name, numbers] each, or [name, code] where two tables are joined, of which codes: [code, number] is the
    second; row, column: indices of what is asked for; sign, bound: the condition."""
    kind = rng.choice(list(PHRASINGS) if level else TINY)
    n_rows, n_columns = (3, level + 1) if level < 2 else (rng.randint(5, 8), 4)
    columns, names = rng.sample(COLUMNS, n_columns), rng.sample(NAMES, n_rows)
    numbers = [rng.sample(range(1, 10 ** (level + 1)), n_rows) for _ in columns]
    row, column = rng.randrange(n_rows), rng.randrange(n_columns)
    if kind == "largest" and rng.random() < 0.8:         # else the numbers are as they come
        numbers[column] = trap(rng, n_rows, max(level, 1))
    q = {"kind": kind, "columns": columns, "row": row, "column": column}
    sign, bound = rng.choice("<>"), None
    if kind == "join":
        codes = rng.sample(CODES, n_rows)
        q |= {"rows": list(map(list, zip(names, codes))), "codes": list(map(list, zip(sorted(codes), numbers[0])))}
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


def trap(rng, n, level):
    """Return n different numbers whose largest is not the last in the order of texts."""
    while True:
        values = [rng.randrange(1, 10 ** rng.randint(1, level + 1)) for _ in range(n)]
        if len(set(values)) == n and max(values) != max(values, key=str):
            return values


def bounds_of(values, kind, sign):
    """Return the numbers, none a value, to compare the sorted values with: of kind "which" one value is to be found."""
    low, high = values[-2:] if sign == ">" else values[:2]
    if kind == "count":
        low, high = max(values[0] - 9, 0), values[-1] + 9
    return [n for n in range(low, high + 1) if n not in values]


def written(rows):
    return "\n".join(",".join(map(str, row)) for row in rows)


def compared(a, b):
    return ">" if a > b else "<"


def worked(q, steps, order=int):
    """Write the steps and return the answer. order: int, or str for that of texts."""
    kind, rows, column = q["kind"], q["rows"], q["column"]
    name, *cells = rows[q["row"]]
    if kind == "join":
        code = steps.choose(cells[0], [code for _, code in rows])
        value = steps.choose(dict(q["codes"])[code], [value for _, value in q["codes"]])
        steps.texts.append(f"{name} has code {code}. {code} has {q['columns'][column]} {value}.")
        return value
    if kind == "cell":
        cells = steps.choose(cells, [others for _, *others in rows])
        steps.texts.append(f"{name}: {', '.join(f'{label} {cell}' for label, cell in zip(q['columns'], cells))}.")
        i = steps.choose(column, range(len(cells))) if len(cells) > 1 else 0
        return cells[i]
    values = [row[1 + column] for row in rows]
    found, best, comparisons = [], values[0], []
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
    return best if kind == "largest" else len(found) if kind == "count" else found[0] if found else "none"


def solution(question):
    return _steps.solution(worked, question)


def invites_mistake(question):
    """Return whether another number is the largest in alphabetical order."""
    return question["kind"] == "largest" and str(worked(question, Steps(), str)) != question["answer"]


def wrong_solution(question, rng):
    """Return a worked completion with a mistake that makes the answer wrong."""
    if invites_mistake(question):
        return _steps.solution(worked, question, str)
    return _steps.with_slip(worked, question, rng)


check, questions, documents = _questions.with_levels("table", draw, solution, wrong_solution, invites_mistake)


def reward(question, completion):
    """Return (score, parts): whether there is an answer (answered), whether it is the right one (correct), and whether
    the text before it has the steps that lead there, and no false equation or comparison (reasoned)."""
    completion = completion[:_numbers.LONGEST_TEXT]
    if question.get("kind") == "which":
        value, right = _answers.words(completion), question["answer"]
        parts = {"answered": value != "", "correct": value == right}
    else:
        value, right = _answers.answer(completion, _answers.asked_unit(question)), int(question["answer"])
        parts = {"answered": value is not None, "correct": value == right}
    short = len(_answers.before_answer(completion)) <= LONGEST
    parts["reasoned"] = short and "kind" in question and reasoned(question, completion, value)
    return float(parts["correct"]), parts


def reasoned(question, completion, value):
    """Return whether what stands before the answer has the steps of its question's kind: a sum's equations, each number
    compared, or the cells in one sentence with their names."""
    name, *cells = question["rows"][question["row"]]
    kind, column, text = question["kind"], question["columns"][question["column"]], _answers.before_answer(completion)
    values = [row[1 + question["column"]] for row in question["rows"]] if kind != "join" else []
    if not fits(question, text):
        return False
    if kind == "sum":                                    # a CSV's 12,345 are two numbers
        return _answers.reasoned(question, completion, value, values)
    comparisons = [(int(a), sign, int(b)) for a, sign, b in COMPARISON.findall(text)]
    if any(sign != compared(a, b) for a, sign, b in comparisons) or not all(e.true for e in _equations.read(text)):
        return False
    pairs = [{a, b} for a, _, b in comparisons]
    if not set().union(*pairs) <= {*values, question.get("bound")}:
        return False
    if kind == "largest":
        return len(pairs) >= len(values) - 1 and set(values) <= set().union(*pairs)
    if kind in ("count", "which"):
        return all({n, question["bound"]} in pairs for n in values)
    right = question["answer"]
    needed = [{name, column, right}] if kind == "cell" else [{name, cells[0]}, {cells[0], right}]
    found = [set(WORD.findall(sentence)) for sentence in sentences(text)]
    return all(any(words <= sentence for sentence in found) for words in needed)


def fits(question, text):
    """Return whether the numbers that a text gives to names and columns are theirs, and where a cell is asked
    for, it has no other row."""
    kind, rows, columns, right = (question[key] for key in ("kind", "rows", "columns", "answer"))
    asked, column = rows[question["row"]], columns[question["column"]]
    if kind == "join":
        found = {word for sentence in sentences(text) for word in WORD.findall(sentence)}
        others = {*NAMES, *CODES, *COLUMNS} - {*asked, column}
        return not found & others and {*filter(str.isdecimal, found)} <= {right}
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
