"""Units of measure: sizes for unit conversion, aliases, and the units of questions and answers."""
import re
from collections import namedtuple
from fractions import Fraction

# Units added by each level: {quantity: {unit: size in the smallest unit of level 1; speed in metres per
# hour}}.
UNITS = (
    {
        "length": {"mm": 1, "cm": 10, "m": 1000, "km": 1_000_000},
        "mass": {"mg": 1, "gram": 1000, "kg": 1_000_000, "tonne": 1_000_000_000},
        "time": {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800},
        "data": {"bit": 1, "byte": 8, "kB": 8000, "MB": 8_000_000},
        "volume": {"ml": 1, "cl": 10, "dl": 100, "litre": 1000},
    },
    {
        "length": {"dm": 100, "micrometre": Fraction(1, 1000)},
        "mass": {"microgram": Fraction(1, 1000), "quintal": 100_000_000},
        "time": {"ms": Fraction(1, 1000), "fortnight": 1_209_600, "month": 2_629_800, "year": 31_557_600,
                 # a year has 365.25 days, a month is a twelfth of it
                 "decade": 315_576_000, "century": 3_155_760_000},
        "data": {"kbit": 1000, "Mbit": 1_000_000, "GB": 8_000_000_000, "TB": 8_000_000_000_000},
        "volume": {"hl": 100_000, "m3": 1_000_000},
    },
    {
        "length": {"inch": Fraction("25.4"), "foot": Fraction("304.8"), "yard": Fraction("914.4"),
                   "mile": 1_609_344},
        "mass": {"ounce": Fraction("28349.523125"), "pound": Fraction("453592.37"),
                 "stone": Fraction("6350293.18")},
        "data": {"KiB": 8192, "MiB": 8_388_608, "GiB": 8_589_934_592},
        "volume": {"cup": Fraction("236.5882365"), "pint": Fraction("473.176473"),
                   "quart": Fraction("946.352946"), "gallon": Fraction("3785.411784")},           # of the US
        "speed": {"m/s": 3600, "km/h": 1000, "mph": Fraction("1609.344"), "knot": 1852,
                  "ft/s": Fraction("1097.28")},
        "temperature": {"celsius": 0, "fahrenheit": 0, "kelvin": 0},
    },
)
ALIASES = {
    "millimetre": "mm", "millimeter": "mm", "centimetre": "cm", "centimeter": "cm", "metre": "m",
    "meter": "m", "kilometre": "km", "kilometer": "km", "decimetre": "dm", "decimeter": "dm",
    "micrometer": "micrometre", "inches": "inch", "feet": "foot", "ft": "foot", "milligram": "mg",
    "g": "gram", "gramme": "gram", "kilogram": "kg", "kilo": "kg", "oz": "ounce", "lb": "pound",
    "sec": "second", "s": "second", "min": "minute", "hr": "hour", "h": "hour", "millisecond": "ms",
    "centuries": "century", "centurie": "century", "millilitre": "ml", "milliliter": "ml", "centilitre": "cl",
    "centiliter": "cl", "decilitre": "dl", "deciliter": "dl", "hectolitre": "hl", "hectoliter": "hl",
    "liter": "litre", "l": "litre", "µm": "micrometre", "μm": "micrometre", "µg": "microgram",
    "μg": "microgram", "t": "tonne", "yd": "yard", "mi": "mile", "gal": "gallon", "m³": "m3", "m^3": "m3",
    "kilobit": "kbit", "megabit": "Mbit", "kilobyte": "kB", "megabyte": "MB", "gigabyte": "GB",
    "terabyte": "TB", "kibibyte": "KiB", "mebibyte": "MiB", "gibibyte": "GiB", "kph": "km/h", "kmh": "km/h",
    "kmph": "km/h", "KB": "kB", "kb": "kbit", "Kb": "kbit", "Mb": "Mbit", "Mg": "tonne",
    "yr": "year", "wk": "week",
}
# The length of a month is ambiguous (30 days, 4 weeks, a twelfth of a year); these are consistent with each
# other.
CALENDAR = {"month": 1, "year": 12, "decade": 120, "century": 1200}

SIZES = {unit: (quantity, Fraction(size)) for added in UNITS for quantity, sizes in added.items()
         for unit, size in sizes.items() if quantity != "temperature"}
# In metres per hour, from lengths in millimetres and times in seconds.
SPEEDS = {f"{far}/{long}": ("speed", length * 18 / 5 / time) for far, (kind, length) in SIZES.items()
          for long, (other, time) in SIZES.items() if (kind, other) == ("length", "time")}
MEANS = {f"mean-{unit}": SIZES[unit] for unit in CALENDAR}       # with a definite length
SIZES |= {unit: ("calendar", Fraction(size)) for unit, size in CALENDAR.items()}
SIZES |= {"cent": ("money", Fraction(1)), "dollar": ("money", Fraction(100))}
SIZES_OF_KIND = {kind: [size for other, size in SIZES.values() if other == kind]
                 for kind, _ in SIZES.values()}
SIZES |= SPEEDS | MEANS


def canonical(word):
    """Return this module's name of a unit, given in full, in the plural or as a symbol."""
    for form in (word, word.lower()):
        for name in (form, form.removesuffix("s"), form.removesuffix("es")):
            name = ALIASES.get(name, name)
            if name in SIZES:
                return name
    rate = "/".join(map(canonical, word.split("/"))) if "/" in word else word       # metres/second: m/second
    return rate if rate in SIZES else word


def size_of(word):
    """Return (quantity, size in the quantity's base unit) of a unit, None for other words and for
    temperatures, whose scales differ by an offset."""
    return SIZES.get(canonical(word))


# --- units in questions and answers ---

# Money is in hundredths, areas in square millimetres, a percentage and a count in ones. These words are not
# in SIZES, whose units are those of equations.
CURRENCIES = set("dollar euro sterling yen rupee".split())
TONS = SIZES["tonne"][1], 2000 * SIZES["pound"][1], 2240 * SIZES["pound"][1]         # metric, short, long
SENSES = {name: meant for names, meant in (
    ("$ us$ usd dollar buck", {("dollar", 100)}), ("€ eur euro", {("euro", 100)}),
    ("£ gbp quid sterling", {("sterling", 100)}), ("pound", {("sterling", 100), SIZES["pound"]}),
    ("¥ jpy yen", {("yen", 100)}), ("₹ inr rupee", {("rupee", 100)}),
    ("cent ¢", {("dollar", 1), ("euro", 1)}), ("penny pennies pence", {("dollar", 1), ("sterling", 1)}),
    ("% percent percentage pct", {("percent", 1)}), ("square sq cubic", {("incomplete", 1)}),
    ("oz ounce", {SIZES["ounce"], ("volume", Fraction("29.5735295625"))}),
    ("ton", {("mass", size) for size in TONS}),
    ("degree °", {("celsius", 1), ("fahrenheit", 1)}), ("celsius centigrade C", {("celsius", 1)}),
    ("fahrenheit F", {("fahrenheit", 1)}), ("kelvin K", {("kelvin", 1)})) for name in names.split()}
QUANTITIES = {quantity for quantity, _ in [*SIZES.values(), *set().union(*SENSES.values())]} | {"area"}
LETTERS = "ghlLmst"                  # symbols of one letter
IRREGULAR = set("feet inches pennies people men women children mice teeth geese fish sheep".split())
LENGTH = "|".join(f"{name}s?" for name in (*SIZES, *ALIASES) if size_of(name)[0] == "length") + "|in"
SHORT_FORMS = [(re.compile(form), short) for form, short in (
    (r"(?i)\b(?:square|sq\.?|cubic|cu\.?)\s+units?\b", "units"),
    (r"(?i)\s?(?:°|\bdegrees?\b)\s?(?=(?:[CFK]|celsius|centigrade|fahrenheit|kelvin)\b)", " "),
    (rf"(?i)\b(?:(?:square|sq\.?)[\s-]*({LENGTH})|({LENGTH})(?:\^?[2²]| squared?))\b", r"\1\2^2"),
    (rf"(?i)\b(?:(?:cubic|cu\.?)[\s-]*({LENGTH})|({LENGTH})(?:\^?[3³]| cubed))\b", r"\1\2^3"),
    (r"(?i)\b(?!and\b|or\b)([^\W\d_]+(?:\^[23])?)\.?(?: ?/ ?| (?:per|an?|each|every) )([^\W\d_]+)",
     r"\1/\2"))]
WORD = re.compile(r"US\$|[^\W\d_][^\W_]*(?:[-'’./^][^\W_]+)*|[%$€£¥₹¢°]")
# The end of a noun phrase, as are STOPS.
END = re.compile(r"^/|[,;:?!]|\.(?:\s|$)|\s-\s|(?<![\^\w])[0-9]")
STOPS = set("of in into per a an at for by on to from with without than as if when while until before after "
            "during that which who is are was were be do does did has have had will would can could should "
            "must may he she it they we you i each every all the this these those his her its their my our "
            "your over under between last next".split())

# senses: the {(quantity, size)} that the unit of an answer may have, size None: any; words: the question's in
# lower case and in the singular.
Asked = namedtuple("Asked", "senses words")


def in_one_word(text):
    """Return a text with each unit in one word: m/s for m per s, feet^2 for square feet, C for °C."""
    for pattern, short in SHORT_FORMS:
        text = pattern.sub(short, text)
    return text


def senses(word):
    """Return the {(quantity, size)} that a word from in_one_word may mean as a unit, maybe none."""
    top, _, below = word.partition("/")
    if below:                                                 # dollars/hour and miles/day: dollars, miles
        speed = size_of(word) if canonical(below) in ("hour", "minute", "second") else None
        return {speed} if speed else senses(top)
    base, _, power = word.partition("^")
    if power:
        base_senses = senses("inch" if base == "in" else base)
        lengths = [size for quantity, size in base_senses if quantity == "length"]
        return {("area", n ** 2) if power == "2" else ("volume", n ** 3 / 1000) for n in lengths}
    size = None if len(word) == 1 and word not in LETTERS else size_of(word)
    forms = (word, word.lower()) if len(word) > 1 else (word,)
    names = [form.removesuffix(ending) for form in forms for ending in ("", "s")]
    return next((SENSES[name] for name in names if name in SENSES), {size} if size else set())


def is_plural(word):
    return word.endswith("s") and not word.endswith("ss") and len(word) > 2 or word in IRREGULAR


def read(text):
    """Return the words of the noun phrase that a text begins with, and the senses of its units. A unit in the
    singular before another word is none (`second graders`)."""
    words = WORD.findall(END.split(in_one_word(text))[0])
    stop = next((i for i, word in enumerate(words) if word.lower().partition("/")[0] in STOPS), len(words))
    units = [word for i, word in enumerate(words[:stop], 1)
             if i == stop or is_plural(word.lower()) or len(word) == 2 or not word.isalpha()]
    return words[:stop], set().union(*map(senses, units))


def units_in(text):
    """Return the senses of all words in a text."""
    return set().union(*map(senses, WORD.findall(f"{text} {in_one_word(text)}")))


def allows(asked, text):
    """Return whether an answer's unit, the words beside its number, may be right: unless it is known, and of
    another quantity or size than the question asks for."""
    known = read(text)[1]
    return not known or any(sense in asked.senses or (sense[0], None) in asked.senses for sense in known)
