"""What cells say: numbers, dates, true or false, or nothing; for all distinct cells of a column together.

Each function takes an Arrow array of text and returns float64, NaN where a text is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc

from shoal.data.tables.read import EXACT

Array = NDArray[Any]
DAY = 86_400_000_000  # microseconds
_MARKS = """na n/a n.a. n.a nan <na> #n/a #na nat none null (null) nil \\n missing (blank) #null! #div/0!
#value! #ref! #num! ? ?? ??? - -- --- – — . .. ... … * ** _ __ / //"""
MISSING = frozenset(["", "not available", "not applicable", *_MARKS.split()])
"""What counts as a missing value, in any case."""
_YES, _NO = """true t yes y on ja wahr oui vrai si sí sì sim vero 1 1.0
false f no n off nein nei nej nee falsch non faux falso não nao 0 0.0""".splitlines()
TRUE, FALSE = frozenset(_YES.split()), frozenset(_NO.split())


@dataclass(frozen=True)
class Format:
    """How the cells of a column are written: the same for every table that a model is given."""

    decimal: str = "."
    """The mark before decimals; the other one separates thousands."""
    unit: str = ""
    """What may follow or precede a number, such as kg or $."""
    day_first: bool = False
    """Whether 3/4/2020 is in April."""


PLAIN = Format()


def _mask(found: Any) -> Array:
    return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False))


def matches(texts: Any, pattern: str) -> Array:
    """Which texts match a pattern of RE2 from end to end."""
    return _mask(pc.match_substring_regex(texts, f"^(?:{pattern})$"))


def is_missing(texts: Any) -> Array:
    return _among(texts, MISSING)


def _among(texts: Any, words: frozenset[str]) -> Array:
    return _mask(pc.is_in(pc.utf8_lower(texts), pa.array(sorted(words))))


def booleans(texts: Any) -> Array:
    return np.where(_among(texts, TRUE), 1.0, np.where(_among(texts, FALSE), 0.0, np.nan))


# Numbers

_CURRENCY = r"(?:[$€£¥₹₽₩₺₪฿]|(?:US|A|C|R|HK|NZ)\$|USD|EUR|GBP|CHF|JPY|SEK|NOK|DKK|PLN|INR|CNY|Rs\.?|kr\.?)"
_UNIT = r"\pL[\pL\pN_%/^·°.-]*(?: \pL[\pL\pN_%/°]*)?|[%‰°′″][A-Za-z]?|" + _CURRENCY
_BODY = r"(?:[0-9]{1,3}(?:[ '’][0-9]{3})+|[0-9][0-9.,]*|[.,][0-9]+)(?:[.,][0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_NUMBER = (
    rf"^(?P<open>\()?(?P<sign>[+-]?) ?(?P<before>{_CURRENCY})? ?(?P<sign2>[+-]?)(?P<body>{_BODY})"
    rf" ?(?P<after>{_UNIT})?(?P<close>\))?$"
)
_CLOCK = (
    r"^(?:(?P<days>-?[0-9]{1,7}) days?,? \+?)?(?P<minus>-?)(?P<h>[0-9]{1,3}):(?P<mi>[0-5][0-9])"
    r"(?::(?P<s>[0-5][0-9])(?:[.,](?P<f>[0-9]{1,9}))?)?$"
)


class Numerals(NamedTuple):
    """Texts as numbers that are not read yet: sign, digits with marks, and unit; null where one is none."""

    negative: Array
    body: Any
    unit: Any


def numerals(texts: Any) -> Numerals:
    texts = pc.replace_substring_regex(texts, "[−\u2010\u2011]", "-")
    texts = pc.replace_substring_regex(texts, "[\u00a0\u202f\u2009]", " ")
    parts = pc.extract_regex(texts, _NUMBER)
    opened, sign, before, sign2, body, after, close = (
        pc.struct_field(parts, name) for name in ("open", "sign", "before", "sign2", "body", "after", "close")
    )
    negative = pc.or_(pc.equal(opened, "("), pc.or_(pc.equal(sign, "-"), pc.equal(sign2, "-")))
    sound = pc.and_(
        pc.equal(pc.utf8_length(opened), pc.utf8_length(close)),
        pc.or_(pc.equal(sign, ""), pc.equal(sign2, "")),
    )
    body = pc.replace_substring_regex(pc.if_else(sound, body, None), "[ '’]", "")
    unit = pc.utf8_rtrim(pc.utf8_lower(pc.if_else(pc.equal(before, ""), after, before)), characters=".")
    return Numerals(_mask(negative), body, unit)


def numbers(texts: Any, how: Format = PLAIN, found: Numerals | None = None) -> Array:
    """With a point, ``1,234.5`` is 1234.5 and ``1,23`` is none; times such as 7:30 are in seconds."""
    negative, body, unit = found or numerals(texts)
    mark, thousands = (r"\.", ",") if how.decimal == "." else (",", r"\.")
    form = rf"(?:[0-9]*|[0-9]{{1,3}}(?:{thousands}[0-9]{{3}})+)(?:{mark}[0-9]*)?(?:[eE].*)?"
    good = matches(body, form) & _mask(pc.or_(pc.equal(unit, ""), pc.equal(unit, how.unit)))
    body = pc.replace_substring(pc.replace_substring_regex(body, thousands, ""), how.decimal, ".")
    values = pc.cast(pc.if_else(pa.array(good), body, None), pa.float64()).to_numpy(zero_copy_only=False)
    values = np.where(negative, -values, values)
    values = np.where(np.isinf(values), np.nan, values)
    return np.where(np.isnan(values), _seconds(texts), values)


def plain_numbers(texts: Any) -> tuple[Array, str] | None:
    """Float64, NaN where null, and the decimal mark (or none), if programs write numbers so."""
    for mark in ".,":
        if mark == "," and not matches(texts.drop_null(), "[+-]?[0-9]*,?[0-9]*").all():
            continue
        try:
            cast = pc.cast(pc.replace_substring(texts, ",", ".") if mark == "," else texts, pa.float64())
        except pa.ArrowInvalid:
            continue
        values = np.asarray(cast.to_numpy(zero_copy_only=False))
        finite = int(np.isfinite(values).sum()) == len(texts) - texts.null_count
        zeros = pc.match_substring_regex(texts, "^[+-]?0[0-9]")
        if finite and not (np.abs(values) > EXACT).any() and not _mask(zeros).any():
            return values, mark * bool(pc.any(pc.match_substring(texts, mark), min_count=0).as_py())
    return None


def _seconds(texts: Any) -> Array:
    """Of times of day and durations, such as 7:30, 07:30:15 or ``1 day, 7:30:00``."""
    parts = _Parts(texts, _CLOCK)
    result = np.full(len(texts), np.nan)
    micro = ((parts["h"] * 60 + parts["mi"]) * 60 + parts["s"]) * 1_000_000 + parts.micro()
    seconds = (parts["days"] * DAY + np.where(parts.text("minus") == "-", -micro, micro)) / 1_000_000
    result[parts.rows] = seconds
    return result


def units(texts: Any, found: Numerals) -> list[str]:
    """The unit or currency of each number, in lower case; that of times is s."""
    clock = pc.match_substring_regex(texts, _CLOCK)
    listed: list[str] = pc.if_else(clock, "s", found.unit).fill_null("").to_pylist()
    return listed


def marks(body: Any) -> dict[str, int]:
    """How many numerals show that the decimal mark is a point or a comma, and how many leave it open.

    1.5, 0.125 and 1,234.5 show a point, 1,5 a comma; 1,234 and 1.234 could be either.
    """
    body, shown = pc.replace_substring_regex(body, "[eE].*", ""), dict[str, int]()
    for mark, other in ((r"\.", ","), (",", r"\.")):
        left_open = matches(body, rf"[1-9][0-9]{{0,2}}{mark}[0-9]{{3}}")
        one = matches(body, f"[0-9]*{mark}[0-9]*") & ~left_open
        last = matches(body, f".*{other}.*{mark}[0-9]*")
        groups = matches(body, f"[0-9]*{other}[0-9]*{other}[0-9{other}]*")
        shown[mark[-1]] = int((one | last | groups).sum())
        shown[f"open{mark[-1]}"] = int(left_open.sum())
    return shown


# Dates

_TIME = r"(?:[T ,]+(?P<h>[01]?[0-9]|2[0-3]):(?P<mi>[0-5][0-9])(?::(?P<s>[0-5][0-9])(?:\.(?P<f>[0-9]{1,9}))?)?"
_TIME += r" ?(?P<ap>[ap]?)(?:\.?m\.?)? ?(?:Z|UTC|GMT|(?P<zone>[+-])(?P<zh>[0-9]{2}):?(?P<zm>[0-9]{2}))?)?"
_WEEKDAY, _DAY, _YEAR = "(?:[a-z]{3,9},? )?", "(?P<d>[0-9]{1,2})", "(?P<y>[0-9]{4}|[0-9]{2})"
_MONTH = """(?P<name>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|
sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)""".replace("\n", "")
_MONTHS = {"janfebmaraprmayjunjulaugsepoctnovdec"[3 * n : 3 * n + 3]: n + 1 for n in range(12)}
_OPEN = tuple(f"(?i)^(?P<a>[0-9]{{1,2}}){s}(?P<b>[0-9]{{1,2}}){s}{_YEAR}{_TIME}$" for s in ("-", "/", r"\."))
_FORMS = (
    *(f"(?i)^(?P<y>[0-9]{{4}}){s}(?P<mo>[0-9]{{1,2}}){s}{_DAY}{_TIME}$" for s in ("-", "/", r"\.")),
    f"(?i)^(?P<y>(?:19|20)[0-9]{{2}})(?P<mo>[0-9]{{2}})(?P<d>[0-9]{{2}}){_TIME}$",
    *_OPEN,
    f"(?i)^{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?[ -]?{_MONTH}\\.?,?[ -]?{_YEAR}{_TIME}$",
    f"(?i)^{_WEEKDAY}{_MONTH}\\.? {_DAY}(?:st|nd|rd|th)?,? {_YEAR}{_TIME}$",
    f"(?i)^(?P<y>(?:19|20)[0-9]{{2}})[-/](?P<mo>[0-9]{{2}}){_TIME}$",
)


def dates(texts: Any, how: Format = PLAIN) -> Array:
    """Days since 1970-01-01. Two digits of a year below 70 are of this century."""
    result = np.full(len(texts), np.nan)
    for form in _FORMS:
        rest = np.flatnonzero(np.isnan(result))
        parts = _Parts(texts.take(pa.array(rest)), form)
        if len(parts.rows):
            result[rest[parts.rows]] = _days(parts, how.day_first)
    return result


def _days(parts: _Parts, day_first: bool) -> Array:
    day, month, year = parts["d"], parts["mo"], parts["y"]
    if "a" in parts.fields:
        day, month = (parts["a"], parts["b"]) if day_first else (parts["b"], parts["a"])
    elif "name" in parts.fields:
        month = pd.Series(parts.text("name")).str.lower().str[:3].map(_MONTHS).to_numpy()
    if "d" not in parts.fields and "a" not in parts.fields:
        day = np.ones_like(year)
    short = np.char.str_len(parts.text("y").astype(str)) == 2
    year = year + np.where(short, np.where(year < 70, 2000, 1900), 0)
    hour, half = parts["h"], np.char.lower(parts.text("ap").astype(str))
    known = (
        (year >= 1)
        & (month >= 1)
        & (month <= 12)
        & (day >= 1)
        & ((half == "") | ((hour >= 1) & (hour <= 12)))
    )
    hour = np.where(half == "", hour, hour % 12 + 12 * (half == "p"))
    first = ((year - 1970) * 12 + month - 1).astype("M8[M]")
    date = first.astype("M8[D]") + (day - 1)
    known &= date.astype("M8[M]") == first  # 31 February is none
    minutes = hour * 60 + parts["mi"]
    minutes -= (parts["zh"] * 60 + parts["zm"]) * np.where(parts.text("zone") == "-", -1, 1)
    micro = date.astype(np.int64) * DAY + (minutes * 60 + parts["s"]) * 1_000_000 + parts.micro()
    return np.where(known, micro / DAY, np.nan)


def days_and_months(texts: Any) -> tuple[Array, Array, str]:
    """Of dates such as 3/4/2020, the two numbers of which one is the day; and the first such date."""
    pairs, first = [np.zeros((2, 0), np.int64)], ""
    for form in _OPEN:
        parts = _Parts(texts, form)
        pairs.append(np.stack([parts["a"], parts["b"]]))
        first = first or (texts[int(parts.rows[0])].as_py() if len(parts.rows) else "")
    a, b = np.concatenate(pairs, 1)
    return a, b, first


class _Parts:
    """The named parts of the texts that match a pattern, which are in ``rows``."""

    def __init__(self, texts: Any, pattern: str) -> None:
        found = pc.extract_regex(texts, pattern)
        self.rows = np.flatnonzero(_mask(found.is_valid()))
        self.found = found.drop_null()
        self.fields = {field.name for field in found.type}

    def text(self, name: str) -> Array:
        if name not in self.fields:
            return np.full(len(self.rows), "", object)
        return np.asarray(pc.struct_field(self.found, name).to_numpy(zero_copy_only=False))

    def __getitem__(self, name: str) -> Array:
        """A part as integers, 0 where it is lacking."""
        if name not in self.fields:
            return np.zeros(len(self.rows), np.int64)
        part = pc.struct_field(self.found, name)
        return self._integers(pc.if_else(pc.equal(part, ""), "0", part))

    def micro(self) -> Array:
        """The microseconds of a fraction of a second; what is finer is cut off."""
        part = pc.utf8_slice_codeunits(pc.struct_field(self.found, "f"), 0, 6)
        return self._integers(pc.utf8_rpad(part, 6, "0"))

    @staticmethod
    def _integers(part: Any) -> Array:
        return np.asarray(pc.cast(part, pa.int64()).to_numpy(zero_copy_only=False))
