"""Find the units that a question surely asks for, so that an answer in another unit can be refused.

A question that does not say its unit (`how many hours`, `in km`, `how much does he pay`) accepts every unit
but a percentage, currencies that are not in its text, and lengths if that has other units only."""
import re
from functools import lru_cache

from tasks import _numbers, _units

COUNT = {("count", 1)}
SENTENCE = re.compile(r"(?<=[.!?])(?<!Mr\.|Ms\.|Dr\.)(?<!Mrs\.)\s+(?=[^a-z])")
CLAUSE = re.compile(r"(?i)(?:^|[,;:(.?!-]|\b(?:and|then|so|by|in|of)\b)\s*"
                    r"(?=how (?!to\b)|what\b|(?:calculate|find|determine) (?!out\b|how\b|what\b))")
LATER = re.compile(r"(?i)\s(?=how (?:many|much)\b)")        # `If he sold 5 how many does he have?`
MAYBE_PERCENT = re.compile("(?i)(?:%|percent)(?! of)|rate|frac|chance|likely|prob|odds|interest|margin|share")
# Before the name of a unit.
IN_UNIT = re.compile(r"(?i)\b(?:in(?:to)?|convert\b[^.?!]{1,80}\bto)\s+(?!\w+ \d)")
HOW_MANY = re.compile(r"(?i)(?:how many|\w+(?:['’]s)?(?: is| are| was)? (?:the )?(?:\w+ )?number of)\s+"
                      r"(?:(?:more|of|the|these|those|his|her|its|their|(?:thousand|m?b?illion)s) )*")
PER_TIME = re.compile(r"(?i)\b(?:per|an?|each|every|one) (hour|minute|second)\b")
GAP = r"(?:(?:(?:amount|sum) of|(?!(?:of|if|rate|ratio|percent\w*|interest|margin|number)\b)[\w'’-]+) ){0,7}?"
WHAT = rf"(?:what(?:['’]s)?|calculate|find) {GAP}"
MUCH = r"how much (?:(?:in total|in all|more|less|lower|total|extra|additional|change|altogether|of \w+) )*"
VERB = r"(?:is|are|was|were|do|does|did|will|would|can|could|should|must|has|have|had)\b"
MONEY = (r"\b(?:money|costs?|prices?|pays?|paid|payments?|spend|spent|earn(?:s|ed|ings)?|charged?|owed?|"
         r"wages?|salary|income|revenue|profits?|budget|bills?|fees?|rent|expens\w+|cheaper|worth|balance|"
         r"allowance|commission|discount|premium|charges|savings|withdraw|collect|take home|credit|bet)\b")
TIMED = r"\b(?:drink|eat|grow|run|walk|sleep|use|work|train|practice|study|read|watch|play|take|last|wait)\b"
# The beginning of a clause: the quantities that it asks for. known: any unit of a text with a currency.
PATTERNS = [(re.compile(f"(?i){pattern}"), quantities) for pattern, quantities in (
    (r"\w+ (?:\w+ the )?(?:\w+ )?percent", "percent"),
    (rf"how (?:much )?(?:(?:more |less )?time|old)|{WHAT}ages?\b", "time calendar"),
    (rf"how (?:much )?(?:far|fur|tall|wid|deep)|{WHAT}(?:distance|perimeter|height)\b", "length"),
    (r"how (?:much )?long(?:er)?\b[^,.?]*\b(?:takes?|took|spends?|spent|lasts?|waits?|stays?)\b",
     "time calendar"),
    (r"how (?:much )?long", "length time calendar"),
    (rf"how (?:much )?heav|{MUCH}{VERB}[^,.?]*\bweighs?\b|{WHAT}(?:weight|mass)\b", "mass"),
    (rf"{WHAT}area\b", "area"), (rf"{WHAT}volume\b", "volume"),
    (rf"{WHAT}{MONEY}|{MUCH}(?:{VERB}[^,.?]*(?:(?<!to )|(?<=need to |have to )))?{MONEY}", "money"),
    (rf"{MUCH}(?:\w+ )?(?:money|profit|revenue|commission)\b", "money"),
    (rf"{WHAT}(?:amount(?! of)|value|savings|loss|change)\b", "known"),
    (rf"{MUCH}(?:do|does|did|will|would)\b(?!.*{TIMED})", "known without time calendar"),
    (rf"{MUCH}{VERB}(?!.*{TIMED})", "known"))]


def asked_unit(question):
    """Return the _units.Asked of a question: of "to" if it has that, else of its text."""
    if "to" in question:
        return _units.Asked(_units.read(question["to"])[1] or COUNT, frozenset())
    text = question.get("question", "")
    asked = asked_in(text)
    right = abs(_numbers.number(str(question.get("answer"))) or 0)
    scales = [scale for scale, size in _numbers.SCALES.items()
              if f" {scale}" in text and right < size and "many" not in asked.words]
    whole = [scale for scale in asked.words & _numbers.SCALES.keys() if right >= _numbers.SCALES[scale]
             and not re.search(rf"(?:how many|in) {scale}", text, re.IGNORECASE)]
    # the rest of $32 million: 4, or $4 million; half of 2 million people: 1 million, or 1000000
    return asked._replace(words=asked.words.union(scales).difference(whole))


@lru_cache(maxsize=1024)
def asked_in(text):
    """Return the _units.Asked of a text: the last sentence with a question mark asks, with those after it."""
    sentences = SENTENCE.split(text.strip())
    last = max((i for i, sentence in enumerate(sentences) if "?" in sentence), default=len(sentences) - 1)
    ask = " ".join(sentences[last:])
    senses = [clause_senses(clause, text) for clause in CLAUSE.split(ask)[1:] or LATER.split(ask)[-1:]]
    if not all(senses):
        refused = _units.CURRENCIES if MAYBE_PERCENT.search(text) else _units.CURRENCIES | {"percent"}
        senses = [{(quantity, None) for quantity in _units.QUANTITIES - refused}, currencies(text)]
    words = frozenset(word.removesuffix("s") for word in re.findall(r"[^\W_]+", ask.lower()))
    senses = set().union(*senses)
    named = {quantity for quantity, _ in _units.units_in(text)} - {"percent"}
    if named and not named & {"length", "area", "volume", "speed"}:           # $3 a day: no km
        senses = {sense for sense in senses if sense[0] not in ("length", "area", "speed")} or senses
    return _units.Asked(senses, words)


def clause_senses(clause, text):
    """Return the {(quantity, size)} that a clause of a question in `text` asks for, none if it is unsure."""
    start = HOW_MANY.match(clause)
    counted, senses = _units.read(clause[start.end():]) if start else ([], set())
    if senses:
        rates = [_units.size_of(f"{word}/{time}") for word in counted for time in PER_TIME.findall(clause)]
        return senses | {*filter(None, rates)}
    for before in IN_UNIT.finditer(clause):
        words, senses = _units.read(clause[before.end():])
        if senses and _units.senses(words[0]):                # not `in two weeks`
            return senses
    is_named = any(map(_units.is_plural, counted))            # carbs may be counted in grams
    if is_named or start and re.search("[0-9]", text):        # how many did he run: any unit of the text
        return COUNT | {sense for sense in _units.units_in(text)
                        if sense[0] in ("mass", "volume") or not is_named and sense[0] != "percent"}
    quantities = next((quantities for pattern, quantities in PATTERNS if pattern.match(clause)), "")
    if quantities.startswith("known"):
        known = {sense for sense in _units.units_in(text) if sense[0] not in quantities.split()}
        return known | currencies(text) if _units.CURRENCIES & {quantity for quantity, _ in known} else set()
    return currencies(text) if quantities == "money" else {(name, None) for name in quantities.split()}


def currencies(text):
    """Return the senses of a text's currencies, of any size if it has only cents; of all if it has none."""
    money = {sense for sense in _units.units_in(text) if sense[0] in _units.CURRENCIES}
    names = {currency for currency, _ in money} or _units.CURRENCIES
    return money if any(size == 100 for _, size in money) else {(name, None) for name in names}
