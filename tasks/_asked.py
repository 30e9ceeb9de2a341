"""Find the unit that a question asks for, so that an answer in another one can be refused.

The unit is in doubt unless a question says `how many hours`, `in km`, `how much does he pay` or the like;
then an answer may have any unit, but no currency that the question does not have."""
import re
from functools import lru_cache

from tasks import _numbers, _units
from tasks._units import Asked

COUNT = {("count", 1)}
SENTENCE = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)(?<!St\.)\s+(?=[^a-z])")
NUMERAL = "|".join([r"\d", *_numbers.WORDS, *_numbers.SCALES, "half"])
PERCENT = re.compile(rf"(?i)\b(?:what|which|how (?:many|much))(?:'s)?\s?(?:(?!{NUMERAL})[\w'’]+\s){{0,4}}?"
                     r"(?:%|percent)|\b(?:in|as an?|find the|calculate the) percent")
SHARE_OF = re.compile(r"(?i)\b(?:what(?:'s| is| are)|find|calculate|compute) \S+ ?(?:%|percent) of")
MAYBE_PERCENT = re.compile("(?i)%|percent|rate|chance|likely|probab|interest|margin")
CHANGE = re.compile("(?i)increas|decreas|reduc|gr[eo]w|rise|rose|drop|fell|fall")
IN = re.compile(r"(?i)\b(?:in(?:to)?|convert\b[^.?!]{1,80}\bto)\s+(?:(?:terms|units) of |whole |US )*")
CLOSED = re.compile(r"\s*(?:[^\w\s]|$)")
ASK = re.compile(r"(?i)\bhow (?P<how>many|much|far|long|old|tall|wide|heavy)\b|\bwhat\b|"
                 r"\b(?<!to )(?:calculate|find|compute|determine)\b(?!\s+(?:out\s+)?(?:how|what))")
# Text before a question word that does not belong to a clause.
MAIN = re.compile(r"(?i)(?:^|[,;:(.?!-]|\b(?:and|then|so|but|or|in|by|of|at|for|about|to|exactly|also))\s*$")
LEADING = re.compile(r"(?i)\s*(?:(?:['’]s|is|are|was|were|will be|would be|of|the|these|those|his|her|its|"
                     r"their|my|our|your|all|an?|more|\w+['’]s) )*")
NUMBER_OF = re.compile(r"(?i)(?:\w+ ){0,3}?(number of|amount of|sum of|difference in) ")
PER_TIME = re.compile(r"(?i)\b(?:per|an?|each|every|one) (hour|minute|second)\b")
MONEY = (r"money|cash|costs?|prices?|pay|pays|paid|payment|spend|spends|spent|spending|earn|earns|earned|"
         r"earnings|charged?|charges|owed?|owes|salary|wages?|income|revenue|profits?|"
         r"budget|bills?|fees?|fare|rent|"
         r"debts?|expenses?|expensive|cheaper|worth|balance|commission|allowance")
IS_MONEY = re.compile(                              # not `how much must he run to earn $5`
    rf"(?i)(?<!\bto )\b(?:{MONEY})\b|"
    rf"\b(?:have|has|had|needs?|needed|going|able|expect|wants?|get|supposed|required) to (?:{MONEY})\b")
GAIN = re.compile(r"(?i)\b(?:makes?|made|gets?|got|receives?|received|sells?|sold|gives?|gave|"
                  r"donated?|raised?|w[io]n|left|leftover|lose|lost|collect|invest|have|has|had)\b")
WEIGH = re.compile(r"(?i)\bweighs?\b")
OF = re.compile(r"\s*of\b")
SHARES = set("rate margin ratio percent percentage interest number".split())
FILLERS = set("more less total amount money cash altogether extra additional change".split())
QUANTITIES = {name: {(quantity, None) for quantity in quantities.split()} for names, quantities in (
    ("far tall wide taller wider deeper farther further distance perimeter circumference height", "length"),
    ("long longer length", "length time calendar"), ("time old older younger age ages", "time calendar"),
    ("heavy heavier weight mass", "mass"), ("area", "area"), ("volume", "volume")) for name in names.split()}


def asked_unit(question):
    """Return the _units.Asked of a question: of "to" if it has that, else of its text."""
    if "to" in question:
        words, senses = _units.read(question["to"])
        return Asked(senses or COUNT, None, frozenset(words))
    return asked_in(question.get("question", ""), str(question.get("answer", "")))


@lru_cache(maxsize=1024)
def asked_in(text, answer):
    """Return the _units.Asked of a text: the last sentence with a question mark asks, with those after it."""
    sentences = SENTENCE.split(text.strip())
    last = max((i for i, sentence in enumerate(sentences) if "?" in sentence), default=len(sentences) - 1)
    ask = " ".join(sentences[last:])
    if PERCENT.search(ask):
        return Asked({("percent", 1)}, None, frozenset())
    matches = list(ASK.finditer(ask))
    matches = [m for m in matches if MAIN.search(ask[:m.start()])] or matches
    asked = [sought(m, ask, text) for m in matches]
    for m in IN.finditer(ask):
        words, senses = _units.read(ask[m.end():])
        is_plural = senses and (_units.is_plural(words[0].lower()) or not words[0].isalpha())
        if is_plural or senses and len(words) == 1 and CLOSED.match(ask, m.end() + len(words[0])):
            asked = [a for a in asked if a and a[1] and not a[0] & COUNT] + [(senses, words)]
    names = scales(text, answer)
    if asked and all(asked):
        names = names.union(*(words for _, words in asked))
        every = set().union(*(senses for senses, _ in asked))
        return Asked(every, None, names)
    money = currencies(text)
    quantities = {*_units.CURRENCIES} if money else set()
    if SHARE_OF.search(ask) or not MAYBE_PERCENT.search(text):
        quantities |= {"percent"}
    return Asked(money, quantities, names)


def scales(text, answer):
    """Return the words thousand, million, ... that the right answer, a number, leaves out."""
    number = abs(_numbers.number(answer) or 0)
    found = {name for name, scale in _numbers.SCALES.items() if number < scale >= 1000 and name in text}
    return frozenset(found | ({"k"} if "thousand" in found else set()))


def sought(match, ask, text):
    """Return the (senses, words) of the unit that a question word in the sentence `ask` asks for, or None."""
    how = (match["how"] or "").lower()
    rest = ask[match.end():]
    counted = None
    if how != "much":
        rest = rest[LEADING.match(rest).end():]
        counted = NUMBER_OF.match(rest) if not how else None
    if counted:
        rest = rest[counted.end():]
        rest = rest[LEADING.match(rest).end():]
    words, senses = _units.read(rest)
    names = [word.lower().partition("/")[0] for word in words]
    if how == "many" or counted and (senses or counted[1].lower() == "number of"):
        return number_of(words, senses, ask, text)
    is_amount = how in ("", "much") and {*names} <= FILLERS and not OF.match(rest)
    is_money = IS_MONEY.search(rest if is_amount else " ".join(names))
    for name in [how, *names, "weight" if how == "much" and not is_money and WEIGH.search(rest) else ""]:
        if name in QUANTITIES:
            return QUANTITIES[name], []
    if how not in ("", "much") or SHARES & {*names}:
        return None
    money = currencies(text)
    change = {("percent", 1)} if CHANGE.search(rest) and MAYBE_PERCENT.search(text) else set()
    if is_money:
        return (money or {(currency, None) for currency in _units.CURRENCIES}) | change, []
    if is_amount and money and (how or "amount" in names):
        no_units = ("percent", "time", "calendar") if GAIN.search(rest) else ("percent",)
        return money | change | {sense for sense in mentioned(text) if sense[0] not in no_units}, []
    return None


def number_of(words, senses, ask, text):
    """Return (senses, words) of `how many` with these words, or None if they have no noun."""
    if senses:
        rates = [_units.size_of(f"{word}/{time}") for word in words for time in PER_TIME.findall(ask)]
        return senses | {*filter(None, rates)}, words
    if not any(_units.is_plural(word) or word in _numbers.SCALES for word in _units.parts(words, "")):
        return None
    # grams: how many carbs
    measures = {sense for sense in mentioned(text) if sense[0] in ("mass", "volume")}
    return COUNT | measures, words


def mentioned(text):
    """Return the senses of all words in a text."""
    return set().union(*map(_units.senses, _units.WORD.findall(f"{text} {_units.in_one_word(text)}")))


def currencies(text):
    """Return the senses of the words in a text that can only be money; of any size if it has only cents."""
    found = [_units.senses(word) for word in _units.WORD.findall(text)]
    money = set().union(*(senses for senses in found if {q for q, _ in senses} <= {*_units.CURRENCIES}))
    return money | {(q, None) for q, _ in money} if {size for _, size in money} == {1} else money
