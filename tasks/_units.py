"""Units of measure: sizes for unit conversion, and aliases."""
import re
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
    "terabyte": "TB", "kibibyte": "KiB", "mebibyte": "MiB", "gibibyte": "GiB", "kph": "km/h",
}
TEMPERATURES = {"c": "celsius", "f": "fahrenheit", "k": "kelvin", "centigrade": "celsius"}
CUBIC_METRES = re.compile(r"\bcubic met(?:re|er)s?\b", re.IGNORECASE)
DEGREES = re.compile(r"\s?(?:°|\bdegrees?\b)(?=\s?[^\W\d_])", re.IGNORECASE)      # of a scale
PER = re.compile(r"([^\W\d_]+) per ([^\W\d_]+)")
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
    rate = "/".join(map(canonical, word.split("/"))) if "/" in word else word         # metres/second: m/second
    return rate if rate in SIZES else word


def in_one_word(text):
    """Return a text with each unit in one word: m/s for meters per second, m3 for cubic meters, C for °C."""
    return PER.sub(r"\1/\2", CUBIC_METRES.sub("m3", DEGREES.sub("", text)))


def are_same(word, other):
    """Return whether two words name the same unit, known (km, kilometers; m/s, meters/second; %, percent) or
    not."""
    if "%" in (word, other):
        return {word.lower(), other.lower()} <= {"%", "percent", "percentage", "pct"}
    names = [canonical(name) for name in (word, other)]
    if all(name in SIZES for name in names):
        return SIZES[names[0]] == SIZES[names[1]]
    names = [TEMPERATURES.get(name.lower(), name.lower()).removesuffix("s") for name in names]
    return names[0] == names[1]


def size_of(word):
    """Return (quantity, size in the quantity's base unit) of a unit, None for other words and for
    temperatures, whose scales differ by an offset."""
    return SIZES.get(canonical(word))
