"""Grade GSM8K's right answers with the unit words of their own solutions, and with known units of another kind.

    PYTHONPATH=. python tests/campaign_units.py PATH/train.jsonl

The first table counts right answers that are refused, the second the wrong units that are paid, by the unit in
the solution: also of questions that do not say what they ask for, whose unit can't be known."""
import json
import re
import sys
from collections import Counter
from pathlib import Path

from tasks import _answers, _equations, _numbers

WRONG = {"money": "€{}, £{}, {} hours, {} km, {}%, {} cents", "time": "${}, {} km, {}%",
         "length": "${}, {} hours, {}%", "mass, volume": "${}, {} hours, {}%",
         "count": "${}, {} hours, {}%"}
KINDS = {"time": "hours minutes days years weeks months seconds",
         "length": "miles feet inches meters km kilometers",
         "mass, volume": "pounds ounces kg grams gallons liters", "money": "dollars dollar"}
KIND_OF = {unit: kind for kind, units in KINDS.items() for unit in units.split()}

PHRASE = re.compile(r"\b(?:of|for|at|by|on|to|from|with|the|is|are|was|were|did|do|that|and|left|more)\b")


def main(path):
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    tried = 0
    refused = []
    wrong = Counter()
    paid = Counter()
    for row in rows:
        worked, _, answer = row["answer"].rpartition("####")
        answer = answer.strip()
        value = _numbers.number(answer)
        asked = _answers.asked_unit({"question": row["question"], "answer": answer})
        line = _equations.NOTE.sub("", worked).strip().split("\n")[-1]
        number = rf"(-?[$€£]?)(?<![\d.,]){re.escape(answer)}(?:\.00)?(?![\d,]|\.\d)([ %/a-zA-Z²'’]*)"
        found = list(re.finditer(number, line))
        if not found:
            continue
        tail = found[-1][2].rstrip()
        sign = found[-1][1][-1:].strip("-")
        noun = PHRASE.split(tail)[0].rstrip()
        for text in {f"{sign}{answer}{tail}", f"{sign}{answer}{noun}"}:
            tried += 1
            if _numbers.number(text, asked) != value:
                refused.append((text, row["question"][-120:]))
        word = (tail.split() or [""])[0].lower()
        kind = "money" if sign == "$" else KIND_OF.get(word)
        if kind is None and word.endswith("s") and "how many" in row["question"].lower():
            kind = "count"
        for form in WRONG[kind].split(", ") if kind else ():
            wrong[kind, form] += 1
            paid[kind, form] += _numbers.number(form.format(answer), asked) == value
    print(f"{len(rows)} questions, {tried} right answers, {len(refused)} refused")
    for text, question in refused[:20]:
        print(f"  {text}: {question!r}")
    for kind, form in wrong:
        print(f"{kind:13} {form:9} {paid[kind, form]:5} paid of {wrong[kind, form]}")


if __name__ == "__main__":
    main(sys.argv[1])
