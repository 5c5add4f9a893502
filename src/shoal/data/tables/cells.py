"""What a cell of a table says: a number, a date, true or false, or nothing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

DAY = 86_400_000_000  # microseconds
_MARKS = """na n/a n.a. n.a nan <na> #n/a #na nat none null (null) nil \\n missing (blank) #null! #div/0!
#value! #ref! #num! ? ?? ??? - -- --- – — . .. ... … * ** _ __ / //"""
MISSING = frozenset(["", "not available", "not applicable", *_MARKS.split()])
"""What counts as a missing value, in any case."""
LONGEST_NUMBER = 64  # characters; nobody writes longer ones, nor dates
_YES, _NO = """true t yes y on ja wahr oui vrai si sí sì sim vero
false f no n off nein nei nej nee falsch non faux falso não nao""".splitlines()
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


_MINUS = str.maketrans({"−": "-", "\u2010": "-", "\u2011": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_CURRENCY = r"(?:[$€£¥₹₽₩₺₪฿]|(?:US|A|C|R|HK|NZ)\$|USD|EUR|GBP|CHF|JPY|SEK|NOK|DKK|PLN|INR|CNY|Rs\.?|kr\.?)"
_UNIT = r"[^\W\d_][\w²³µ°%/^·.-]*(?: [^\W\d_][\w²³µ°%/]*)?|[%‰°′″][A-Za-z]?|" + _CURRENCY
_BODY = r"(?:\d{1,3}(?:[ '’]\d{3})+|\d[\d.,]*|[.,]\d+)(?:[.,]\d+)?(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(
    rf"(?P<open>\()?(?P<sign>[+-]?) ?(?P<before>{_CURRENCY})? ?(?P<sign2>[+-]?)(?P<body>{_BODY})"
    rf" ?(?P<after>{_UNIT})?(?P<close>\))?"
)
_GROUPS = {mark: re.compile(rf"\d{{1,3}}(?:{re.escape(mark)}\d{{3}})+") for mark in ".,"}


def is_missing(text: str) -> bool:
    return text.lower() in MISSING


def number(text: str, how: Format, unit: bool = True) -> float | None:
    """A cell as a number, or ``None`` if it is none that is written as the column's are."""
    if how.decimal == "." and _is_plain(text):
        value = float(text)
        return value if np.isfinite(value) else None
    if (seconds := _seconds(text)) is not None:
        return seconds
    result = _shape(text)
    if (
        result is None
        or bool(result["open"]) != bool(result["close"])
        or (result["sign"] and result["sign2"])
    ):
        return None
    if unit and (own := _unit(result)) and own != how.unit:
        return None
    body = _plain_body(result["body"], how.decimal)
    if body is None:
        return None
    value = float(body)
    negative = "-" in (result["sign"], result["sign2"]) or result["open"]
    return None if value in (np.inf, -np.inf) else -value if negative else value


_CLOCK = re.compile(
    r"(?P<sign>-?)(?:(?P<d>\d+) days?,? )?(?P<h>\d{1,3}):(?P<m>[0-5]\d)"
    r"(?::(?P<s>[0-5]\d)(?P<f>[.,]\d{1,9})?)?"
)


def _seconds(text: str) -> float | None:
    """A time of day or a duration, such as 7:30, 07:30:15 or ``1 day, 7:30:00``."""
    result = _CLOCK.fullmatch(text)
    if result is None:
        return None
    whole = (
        86400 * int(result["d"] or 0)
        + 3600 * int(result["h"])
        + 60 * int(result["m"])
        + int(result["s"] or 0)
    )
    if result["sign"] and result["d"]:  # -1 days 23:59:59 is a second before midnight
        whole -= 2 * 86400 * int(result["d"])
    seconds = (whole * 1_000_000 + _micro(result["f"])) / 1_000_000
    return -seconds if result["sign"] and not result["d"] else seconds


def _micro(fraction: str | None) -> int:
    """The microseconds of ``.123456789``; what is finer is cut off."""
    return int((fraction or ".0")[1:7].ljust(6, "0"))


_PLAIN = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?")


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None


def _shape(text: str) -> re.Match[str] | None:
    return _NUMBER.fullmatch(text.translate(_MINUS)) if len(text) <= LONGEST_NUMBER else None


def unit_of(text: str) -> str:
    """The unit or currency of a number, in lower case; empty where there is none. Times are in seconds."""
    if _CLOCK.fullmatch(text):
        return "s"
    result = None if _is_plain(text) else _shape(text)
    return _unit(result) if result else ""


def _unit(result: re.Match[str]) -> str:
    return (result["before"] or result["after"] or "").lower().rstrip(".")


def _plain_body(body: str, decimal: str) -> str | None:
    """Digits as Python reads them; ``None`` where thousands are not in threes or there are two marks."""
    mantissa, e, power = re.sub(r"[ '’]", "", body).lower().partition("e")
    thousands = "," if decimal == "." else "."
    whole, mark, rest = mantissa.partition(decimal)
    if thousands in rest or decimal in rest:
        return None
    if thousands in whole and not _GROUPS[thousands].fullmatch(whole):
        return None
    return f"{whole.replace(thousands, '') or '0'}{'.' if mark else ''}{rest}{e}{power}"


def marks(texts: Iterable[str]) -> dict[str, int]:
    """How many cells show that the decimal mark is a point or a comma, and how many leave it open.

    1.5, 0.125 and 1,234.5 show a point, 1,5 a comma; 1,234 and 1.234 could be either.
    """
    result = {".": 0, ",": 0, "open": 0, "open.": 0}
    for text in texts:
        shape = _shape(text)
        if shape is None:
            continue
        body = re.sub(r"[ '’]|[eE].*", "", shape["body"])
        points, commas = body.count("."), body.count(",")
        if not points and not commas:
            continue
        if points and commas:
            result["." if body.rindex(".") > body.rindex(",") else ","] += 1
        elif points + commas > 1:
            result["," if points else "."] += 1
        else:
            mark = "." if points else ","
            whole, _, rest = body.partition(mark)
            if len(rest) == 3 and 1 <= len(whole) <= 3 and whole[0] != "0":
                result["open" if mark == "," else "open."] += 1
            else:
                result[mark] += 1
    return result


_TIME = r"(?:[T ,]+(?P<h>\d{1,2}):(?P<mi>\d{2})(?::(?P<s>\d{2})(?P<f>\.\d{1,9})?)? ?(?P<ap>[AaPp]\.?[Mm]\.?)?"
_TIME += r" ?(?P<z>Z|UTC|GMT|[+-]\d{2}:?\d{2})?)?"
_WEEKDAY = r"(?:[A-Z]{3,9},? )?"
_DATES = tuple(
    re.compile(form + _TIME, re.IGNORECASE)
    for form in (
        r"(?P<y>\d{4})(?P<sep>[-/.])(?P<mo>\d{1,2})(?P=sep)(?P<d>\d{1,2})",
        r"(?P<y>(?:19|20)\d{2})(?P<mo>\d{2})(?P<d>\d{2})",
        r"(?P<a>\d{1,2})(?P<sep>[-/.])(?P<b>\d{1,2})(?P=sep)(?P<y>\d{4}|\d{2})",
        _WEEKDAY + r"(?P<d>\d{1,2})(?:st|nd|rd|th)?[ -]?(?P<name>[A-Z]{3,9})\.?,?[ -]?(?P<y>\d{4}|\d{2})",
        _WEEKDAY + r"(?P<name>[A-Z]{3,9})\.? (?P<d>\d{1,2})(?:st|nd|rd|th)?,? (?P<y>\d{4})",
        r"(?P<y>(?:19|20)\d{2})[-/](?P<mo>\d{2})",
    )
)
_MONTHS = """january february march april may june july august september october november december
jan feb mar apr may jun jul aug sep oct nov dec sept"""
_MONTH = {name: ("sep" if name == "sept" else name)[:3] for name in _MONTHS.split()}


def date(text: str, day_first: bool) -> float | None:
    """A cell as days since 1970-01-01, or ``None``. Two digits of a year below 70 are of this century."""
    if len(text) > LONGEST_NUMBER:
        return None
    result = next((m for form in _DATES if (m := form.fullmatch(text))), None)
    if result is None:
        return None
    parts = result.groupdict()
    if parts.get("a"):
        parts["d"], parts["mo"] = (parts["a"], parts["b"]) if day_first else (parts["b"], parts["a"])
    month = _month(parts["name"]) if parts.get("name") else int(parts["mo"])
    year = int(parts["y"])
    if len(parts["y"]) == 2:
        year += 2000 if year < 70 else 1900
    try:
        moment = datetime.datetime(year, month, int(parts.get("d") or 1), *_clock(parts))
    except ValueError:
        return None
    micro = (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
    return (micro - _zone(parts.get("z"))) / DAY


def in_open_order(text: str) -> re.Match[str] | None:
    """A date such as 3/4/2020, in which ``a`` or ``b`` is the day."""
    return _DATES[2].fullmatch(text) if len(text) <= LONGEST_NUMBER else None


def _month(name: str) -> int:
    """From 1; 0 for a word that is no month."""
    short = _MONTH.get(name.lower())
    return 0 if short is None else list(dict.fromkeys(_MONTH.values())).index(short) + 1


def _clock(parts: Mapping[str, Any]) -> tuple[int, int, int, int]:
    if not parts.get("h"):
        return 0, 0, 0, 0
    hour = int(parts["h"])
    if parts["ap"]:
        if not 1 <= hour <= 12:
            raise ValueError
        hour = hour % 12 + 12 * (parts["ap"][0] in "pP")
    return hour, int(parts["mi"]), int(parts["s"] or 0), _micro(parts["f"])


def _zone(text: str | None) -> int:
    """Microseconds ahead of UTC."""
    if not text or text[0] not in "+-":
        return 0
    minutes = 60 * int(text[1:3]) + int(text[-2:])
    return (1 if text[0] == "+" else -1) * minutes * 60_000_000


def boolean(text: str) -> float | None:
    word = text.lower()
    if word in TRUE or word in ("1", "1.0"):
        return 1.0
    return 0.0 if word in FALSE or word in ("0", "0.0") else None
