"""Grade GSM8K's right answers with the unit words of their own solutions, and with units of other quantities.

    PYTHONPATH=. python tests/campaign_units.py PATH/train.jsonl

The first lines are right answers that are refused. The table counts the wrong units that are paid, by the
quantity of the solution's unit, in questions that do not say their unit too."""
import json
import re
import sys
from collections import Counter
from pathlib import Path

from tasks import _answers, _equations, _numbers, gsm8k

# quantity: its units in solutions; answers with other units
QUANTITIES = {"money": ("dollars dollar $", "€{}, £{}, {} hours, {} km, {}%, {} cents"),
              "time": ("hours minutes days years weeks months seconds", "${}, {} km, {}%"),
              "length": ("miles feet inches meters km kilometers", "${}, {} hours, {}%"),
              "mass, volume": ("pounds ounces kg grams gallons liters", "${}, {} hours, {}%"),
              "count": ("", "${}, {} hours, {}%")}
QUANTITY = {unit: quantity for quantity, (units, _) in QUANTITIES.items() for unit in units.split()}
PHRASE = re.compile(r"\b(?:of|for|at|by|on|to|from|with|the|is|are|was|were|did|do|that|and|left|more)\b")


def main(path):
    tried = 0
    refused = []
    wrong = Counter()
    paid = Counter()
    for row in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines()):
        worked, _, answer = row["answer"].rpartition("#### ")
        asked = _answers.asked_unit(gsm8k.row(row))
        line = _equations.NOTE.sub("", worked).strip().split("\n")[-1]
        form = rf"(-?[$€£]?)(?<![\d.,]){re.escape(answer)}(?:\.00)?(?![\d,]|\.\d)([ %/&a-zA-Z²³'’]*)"
        for sign, words in re.findall(form, line)[-1:]:
            sign = sign.strip("-")
            for text in {f"{sign}{answer}{unit.rstrip()}" for unit in (words, PHRASE.split(words)[0])}:
                tried += 1
                if _numbers.number(text, asked) != _numbers.number(answer):
                    refused.append(f"  {text}: {row['question'][-120:]!r}")
            word = (sign or words.strip().partition(" ")[0]).lower()
            is_count = word.endswith("s") and "how many" in row["question"].lower()
            quantity = QUANTITY.get(word, "count" if is_count else "")
            for text in QUANTITIES[quantity][1].split(", ") if quantity else ():
                wrong[quantity, text] += 1
                paid[quantity, text] += _numbers.number(text.format(answer), asked) is not None
    print(f"{tried} right answers, {len(refused)} refused", *refused[:20], sep="\n")
    for quantity, text in wrong:
        print(f"{quantity:13} {text:9} {paid[quantity, text]:5} paid of {wrong[quantity, text]}")


if __name__ == "__main__":
    main(sys.argv[1])
