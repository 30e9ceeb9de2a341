"""Find the unit that a question asks for, so that answers in another one can be refused.

A question is in doubt about its unit unless it says `how many hours`, `in km`, `how much does he pay`, ...; then
answers may have any unit, but not another currency than the question's."""
import re
from fractions import Fraction
from functools import lru_cache

from tasks import _numbers, _units
from tasks._units import Asked

COUNT = {("count", 1)}
SENTENCE = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)(?<!St\.)\s+(?=[^a-z])")
NUMERAL = "|".join([r"\d", *_numbers.WORDS, *_numbers.SCALES, "half"])
PERCENT = re.compile(rf"\b(?:what|which|how (?:many|much))(?:'s)?\s?(?:(?!{NUMERAL})[\w'’]+\s){{0,4}}?(?:%|percent)|"
                     r"\b(?:in|as an?|find the|calculate the) percent", re.IGNORECASE)
SHARE_OF = re.compile(r"\b(?:what(?:'s| is| are)|find|calculate|compute) \S+ ?(?:%|percent) of", re.IGNORECASE)
MAYBE_PERCENT = re.compile("%|percent|rate|chance|likely|probab|interest|margin", re.IGNORECASE)
CHANGE = re.compile("increas|decreas|reduc|gr[eo]w|rise|rose|drop|fell|fall|chang", re.IGNORECASE)
IN = re.compile(r"\b(?:in(?:to)?|convert\b[^.?!]{1,80}\bto)\s+(?:(?:terms|units) of |whole |US |U\.S\. )*", re.IGNORECASE)
ASK = re.compile(r"\bhow (?P<how>many|much|far|long|old|tall|wide|heavy)\b|"
                 r"\b(?:what|which|(?:calculate|find|compute|determine)(?!\s+(?:out\s+)?(?:how|what)))\b", re.IGNORECASE)
MAIN = re.compile(r"(?:^|[,;:(.?!-]|\b(?:and|then|so|but|or|in|by|of|at|for|about|to|exactly|approximately|also))\s*$",
                  re.IGNORECASE)     # before a question word that does not belong to a clause
LEADING = re.compile(r"\s*(?:(?:'s|’s|is|are|was|were|will be|would be|of|the|these|those|his|her|its|their|my|our|"
                     r"your|all|an?|more|\w+['’]s) )*", re.IGNORECASE)
NUMBER_OF = re.compile(r"(?:\w+ ){0,3}?(number|amount|quantity) of ", re.IGNORECASE)
PER_TIME = re.compile(r"\b(?:per|an?|each|every|one) (hour|minute|second)\b", re.IGNORECASE)
MONEY = (r"money|cash|costs?|prices?|pay|pays|paid|payment|spend|spends|spent|spending|earn|earns|earned|earnings|"
         r"charged?|charges|owed?|owes|salary|wages?|income|revenue|profits?|budget|bills?|fees?|fare|rent|debts?|"
         r"expenses?|expensive|cheaper|worth")
IS_MONEY = re.compile(rf"(?<!\bto )\b(?:{MONEY})\b|"
                      rf"\b(?:have|has|had|needs?|needed|going|able|expect|wants?|get|supposed|required) to (?:{MONEY})\b",
                      re.IGNORECASE)                # not `how much must he run to earn $5`
GAIN = re.compile(r"\b(?:makes?|made|gets?|got|receives?|sells?|sold|gives?|gave|donated?|raised?|w[io]n|left|"
                  r"leftover|lose|lost|collect|invest|have|has|had)\b", re.IGNORECASE)
WEIGH = re.compile(r"\bweighs?\b", re.IGNORECASE)
SHARES = set("rate margin ratio percent percentage interest number".split())
CLOSED = re.compile(r"\s*(?:[^\w\s]|$)")
FILLERS = set("more less total in altogether extra additional change".split())
QUANTITIES = {name: {(quantity, None) for quantity in quantities.split()} for names, quantities in (
    ("far tall wide taller wider deeper farther further distance perimeter circumference", "length"),
    ("long longer length", "length time calendar"), ("time old older younger age", "time calendar"),
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
            asked = [found for found in asked if found and found[0] & senses] + [(senses, words)]
    names = scales(text, answer)
    if asked and all(asked):
        names = names.union(*(words for _, words in asked))
        return Asked(set().union(*(senses for senses, _ in asked)), None, names)
    money = currencies(text)
    quantities = {*_units.CURRENCIES} if money else set()
    if SHARE_OF.search(ask) or not MAYBE_PERCENT.search(text):
        quantities |= {"percent"}
    return Asked(money, quantities, names)


def scales(text, answer):
    """Return the words thousand, million, ... that the right answer, a number, leaves out."""
    number = abs(Fraction(answer.replace(",", ""))) if answer else 0
    found = {name for name, scale in _numbers.SCALES.items() if number < scale >= 1000 and name in text}
    return frozenset(found | ({"k"} if "thousand" in found else set()))


def sought(match, ask, text):
    """Return the (senses, words) of the unit that a question word in the sentence `ask` asks for, or None."""
    rest = ask[match.end():]
    rest = rest[LEADING.match(rest).end():]
    how = (match["how"] or "").lower()
    counted = NUMBER_OF.match(rest) if not how else None
    if counted:
        rest = rest[counted.end():]
    words, senses = _units.read(rest)
    lower = [word.lower() for word in words]
    if how == "many" or counted and not IS_MONEY.search(" ".join(lower)):
        return number_of(words, senses, ask, text) if senses or not counted or counted[1] == "number" else None
    is_money = IS_MONEY.search(" ".join(lower) if lower and how != "much" else rest)
    for name in [how, *lower, "weight" if how == "much" and not is_money and WEIGH.search(rest) else ""]:
        if name in QUANTITIES:
            return QUANTITIES[name], []
    if SHARES & {*lower}:
        return None
    if how == "much" and not all(word in FILLERS or IS_MONEY.fullmatch(word) for word in lower):
        return None
    if is_money and (how in ("", "much")):
        money = currencies(text) or {(currency, None) for currency in _units.CURRENCIES}
        return money | ({("percent", 1)} if CHANGE.search(rest) and "%" in text else set()), []
    if how == "much" and currencies(text):
        times = ("time", "calendar") if GAIN.search(rest) else ()
        return currencies(text) | {sense for sense in mentioned(text) if sense[0] not in times}, []
    return None


def number_of(words, senses, ask, text):
    """Return (senses, words) of `how many` with these words, or None if they have no noun."""
    if senses:
        rates = [_units.size_of(f"{word}/{time}") for word in words for time in PER_TIME.findall(ask)]
        return senses | {*filter(None, rates)}, words
    if not any(_units.is_plural(word) or word in _numbers.SCALES for word in _units.parts(words, "")):
        return None
    measures = {sense for sense in mentioned(text) if sense[0] in ("mass", "volume")}      # grams: how many carbs
    return COUNT | measures, words


def mentioned(text):
    """Return the senses of all words in a text."""
    return set().union(*map(_units.senses, _units.WORD.findall(f"{text} {_units.in_one_word(text)}")))


def currencies(text):
    """Return the senses of the words in a text that can only be money; of any size if it has only cents."""
    found = [_units.senses(word) for word in _units.WORD.findall(text)]
    money = set().union(*(senses for senses in found if senses and {q for q, _ in senses} <= {*_units.CURRENCIES}))
    return money | {(q, None) for q, _ in money} if money and all(size == 1 for _, size in money) else money
