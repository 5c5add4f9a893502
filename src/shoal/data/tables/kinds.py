"""What the columns of a table hold: numbers, booleans, dates, categories, free text, or identifiers.

The kind of a column is decided once, from the distinct cells of all rows, and holds in every split, in
training, prediction and export. What is estimated (means, scales, categories, words) comes from training rows
alone; see :mod:`shoal.data.tables.encode`.

Of the cells that are not missing (:data:`~shoal.data.tables.cells.MISSING`), at least :data:`MAIN_SHARE` must
be numbers (or dates) for a column to be numeric (or of dates); the others are then missing as well, and
counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.data.tables import cells
from shoal.data.tables.cells import Format
from shoal.data.tables.read import EXACT, cell_text
from shoal.data.tables.table import Table
from shoal.errors import InputError

Array = NDArray[Any]
DROPPED = "dropped"

MAIN_SHARE = 0.9
"""The share of cells that must be numbers, or dates, for a column to be so."""
MIXED_SHARE = 0.2
"""From this share on a warning says that a categorical column has many numbers."""
CATEGORIES = 50  # of a column that have a feature of their own; rarer ones share one
FEW = 20  # rows below which nothing is taken for an identifier or a code
QUOTED = 3  # cells that a message quotes
WHAT = {"numeric": "a number", "boolean": "true or false", "date": "a date"}


@dataclass(frozen=True)
class ColumnType:
    """What a column holds and how it is written, with what a reader should know of it."""

    name: str
    kind: str
    how: Format = field(default_factory=Format)
    why: str = ""
    """Of a column that is dropped."""
    missing: int = 0
    distinct: int = 0
    examples: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    signs: bool = False
    """Whether - is a category, as + is one, and no mark of a missing value."""

    @property
    def becomes(self) -> str:
        """The features that are made of it."""
        gaps = ", and a missing indicator" * bool(self.missing)
        unit = f" in {self.how.unit}" * bool(self.how.unit)
        categories = f"{self.distinct} categories"
        if self.distinct > CATEGORIES:
            categories = f"the {CATEGORIES} most frequent categories, and one for the others"
        return {
            DROPPED: f"not used: {self.why}",
            "numeric": f"number{unit}, standardised{gaps}",
            "boolean": f"0 or 1, standardised{gaps}",
            "date": f"day, month, weekday (and hour) as numbers{gaps}",
            "text": "TF-IDF of its words, reduced to at most 200 numbers",
            "categorical": f"one-hot: {categories}",
        }.get(self.kind, "not a feature")

    def report(self) -> dict[str, Any]:
        return {
            "column": self.name,
            "kind": self.kind,
            "missing": self.missing,
            "distinct": self.distinct,
            "examples": list(self.examples),
            "becomes": self.becomes,
            "warnings": list(self.warnings),
        }


def infer(
    table: Table,
    names: Sequence[str],
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
) -> dict[str, ColumnType]:
    """The type of each of these columns, from all rows; what a user says of them always wins."""
    said = kinds or {}
    return {name: _inferred(_Content(name, table, decimal, day_first), said.get(name)) for name in names}


def number_format(table: Table, name: str, decimal: str | None) -> Format:
    """How the numbers of a column are written, if it has any."""
    return _Content(name, table, decimal).number_format[0]


class _Content:
    """The known cells of a column, and how numbers and dates among them are written."""

    def __init__(self, name: str, table: Table, decimal: str | None, day_first: bool | None = None) -> None:
        self.name, self.table, self.column = name, table, table[name]
        self.decimal, self.said_day_first = decimal, day_first

    @cached_property
    def numbers(self) -> Array | None:
        """Those of a column in which all known cells are plain numbers."""
        if self.column.plain is None:
            return None
        values = self.column.values("numeric", self.number_format[0])[0]
        return values[~np.isnan(values)]

    @cached_property
    def counted(self) -> tuple[Array, Array]:
        """The distinct values, as sorted numbers or as the text of categories, and their counts."""
        if self.numbers is not None:  # texts would cost time, and are hardly needed
            return np.unique(self.numbers, return_counts=True)
        names, codes = self.column.categories()
        return names, np.bincount(codes[codes >= 0], minlength=len(names))

    @cached_property
    def known(self) -> int:
        """Rows where it is not missing."""
        return int(self.counted[1].sum())

    @cached_property
    def texts(self) -> Any:
        """The distinct cells that are not missing, as an Arrow array."""
        return self.column.encoded[0].filter(pa.array(~self.column.missing))

    def first(self, most: int) -> list[str]:
        """The first distinct values as text."""
        return [_text(value) for value in self.counted[0][:most]]

    @cached_property
    def number_format(self) -> tuple[Format, str]:
        """How its numbers are written, and a warning if that is open."""
        column, hint = self.column, self.decimal
        if column.is_number:
            return Format(), ""
        shown = column.marks
        everywhere = self.table.decimal or "," * (self.table.separator == ";")
        note, decimal = "", everywhere or "."
        if hint or shown["."] or shown[","]:
            decimal = hint or ("," if shown[","] > shown["."] else ".")
        elif shown["open,"] or (shown["open."] and decimal == ","):
            mark = "," if shown["open,"] else "."
            marked = cells.matches(self.texts, rf".*[0-9]\{mark}[0-9]{{3}}(?:[^0-9].*)?")
            sample = self.texts.filter(pa.array(marked))[:1]
            numeral = cells.numerals(sample)
            (value,) = cells.numbers(sample, Format(decimal, cells.units(sample, numeral)[0]), numeral)
            note = f"{sample[0].as_py()!r} is read as {value:g} (1{mark}234 can mean 1234 or 1.234; "
            note += "set the option decimal)"
        units = Counter([] if column.plain else filter(None, column.units))
        return Format(decimal, units.most_common(1)[0][0] if units else ""), note

    @cached_property
    def day_first(self) -> tuple[bool, str]:
        """Whether the day comes first, and a warning if that is open."""
        if self.said_day_first is not None:
            return self.said_day_first, ""
        first, second, sample = cells.days_and_months(self.texts)
        if (first > 12).any() or (second > 12).any():
            return bool((first > 12).sum() > (second > 12).sum()), ""
        guess = "." in sample or (bool(sample) and self.table.separator == ";")
        order = "day first" if guess else "month first"
        note = f"{sample!r} is read {order}; set the option day_first to change this"
        return guess, note if sample else ""

    def how(self, kind: str) -> Format:
        if kind == "numeric":
            return self.number_format[0]
        return Format(day_first=self.day_first[0]) if kind == "date" else Format()

    def share(self, kind: str) -> float:
        """Of the cells that are not missing, those that can be read as this kind."""
        values = self.column.values(kind, self.how(kind))[0]
        return float((~np.isnan(values)).sum()) / max(1, self.known)


def _inferred(content: _Content, hint: str | None) -> ColumnType:
    """The column as the hint says, or as its cells look, with what is doubtful."""
    kind, notes = (hint, [""]) if hint else _guess(content)
    how, wrong, why = content.how(kind), dict[str, int](), notes[0] if kind == DROPPED else ""
    if kind in WHAT:
        values, wrong = content.column.values(kind, how)
        bad = sum(wrong.values())
        are = "cells are" if bad > 1 else "cell is"
        notes += [f"{bad:,} {are} not {WHAT[kind]}; treated as missing: {quoted(wrong)}"] * bool(wrong)
        if np.isnan(values).all():
            why = f"has no value that is {WHAT[kind]}"
        elif kind == "numeric":
            notes += [content.number_format[1], _some_units(content), _marker(content)]
        elif kind == "date":
            notes += [content.day_first[1]]
    elif kind == "categorical" and (same := alike(content.first(10_000))):
        notes += [f"categories that differ only in case or spaces: {', '.join(same[:QUOTED])}"]
    distinct, counts = content.counted
    if kind == "numeric" and len(distinct) - len(wrong) <= 1 and content.known == len(content.column):
        why = why or "has the same value in every row"
    if why and hint and content.known:
        cells_of = dict(zip(content.column.distinct, content.column.counts.tolist(), strict=True))
        raise InputError(f"column {content.name!r} cannot be read as {hint}: it {why}: {quoted(cells_of)}.")
    order = np.argsort(-counts, kind="stable")[: QUOTED + len(wrong)]
    shown = [text for text in (_text(distinct[n]) for n in order) if text not in wrong]
    if not (hint or why):
        why, note = _identifier(content, kind)
        if why:
            notes = [f"not used, because it {why}; to use it, set its kind (kinds: {content.name} {kind})"]
        notes += [note]
    return ColumnType(
        content.name,
        DROPPED if why else kind,
        how,
        why,
        missing=len(content.column) - content.known + sum(wrong.values()),
        distinct=len(distinct) - len(wrong),
        examples=tuple(map(_short, shown[:QUOTED])),
        warnings=tuple(note for note in notes if note and note != why),
        signs=content.numbers is None and "+" in content.column.distinct,
    )


def _guess(content: _Content) -> tuple[str, list[str]]:
    """The kind that the cells look like, and notes; of columns that are dropped, why."""
    if not content.known:
        return DROPPED, ["is empty"]
    if len(content.counted[0]) == 1 and content.known == len(content.column):
        return DROPPED, ["has the same value in every row"]
    if content.numbers is None and _is_boolean(content.texts):
        return "boolean", []
    if why := _code(content):
        return "categorical", [f"{why}: read as categories; set kinds to read them as numbers"]
    if content.share("numeric") >= MAIN_SHARE and not _eight_digit_dates(content):
        return "numeric", []
    if content.share("date") >= MAIN_SHARE:
        return "date", []
    notes = []
    for what, kind in (("numbers", "numeric"), ("dates", "date")):
        if (share := content.share(kind)) >= MIXED_SHARE:
            others = quoted(content.column.values(kind, content.how(kind))[1])
            notes.append(
                f"{share:.0%} of its cells are {what}, too few to read it as {kind}; the others, such as "
                f"{others}, would become missing as {kind}"
            )
    return "text" if _is_text(content) else "categorical", notes


def _is_boolean(texts: Any) -> bool:
    first = set(texts[:20].to_pylist())
    if first <= {"NO", "SI"} or first <= {"0", "1", "0.0", "1.0"}:  # Norway and Slovenia; numbers
        return False
    return not np.isnan(cells.booleans(texts)).any()


def _identifier(content: _Content, kind: str) -> tuple[str, str]:
    """Why a column is taken for an identifier of rows or entities, or a note if it may be one."""
    rows, values, why = content.known, content.numbers, ""
    distinct, named = len(content.counted[0]), bool(_IDENTIFIER.search(content.name))
    whole = values is None or not (values % 1 != 0).any()  # else it is a measurement
    if kind not in ("numeric", "categorical", "text") or not whole:
        return "", ""
    maybe = (
        "the name suggests an identifier; if it is one, drop it, or set group for a repeated entity" * named
    )
    repeated = "is named like an identifier, and few rows share a value (set group for a repeated entity)"
    mixed = kind == "categorical" and MIXED_SHARE <= max(map(content.share, ("numeric", "date"))) < MAIN_SHARE
    if rows < FEW or kind == "text" or mixed or (kind == "numeric" and values is None):
        return "", maybe
    if values is None or kind == "categorical":
        coded = np.mean([bool(_CODED.fullmatch(name)) for name in content.first(1000)]) > MAIN_SHARE
        if distinct >= MAIN_SHARE * rows:
            why = "is different in (almost) every row, like an identifier"
        elif distinct >= rows / 2 and coded:
            why = "looks like an identifier (a code shared by few rows)"
        elif named and distinct > CATEGORIES and distinct >= rows / 20:
            why = repeated
        return why, maybe * (not why)
    steps, dense = np.diff(values), np.ptp(values) + 1 <= 2 * distinct
    ordered = bool((steps >= 0).all() or (steps <= 0).all())
    if distinct == rows and (named or dense):
        why = f"is different in every row{' and is named' * named} like an identifier"
    elif distinct == rows:
        low, high = np.quantile(values, [0.25, 0.75])
        repeats = (rows / 2) ** 2 / 2 / max(1.0, high - low)  # expected among the middle half
        long = values.min() >= 10**6 and len(str(int(values.min()))) == len(str(int(values.max())))
        if ordered or repeats >= 3 or long:
            maybe = "an integer that is different in every row; if it is an identifier, drop it"
    elif distinct > max(CATEGORIES // 2, rows / 20) and (named or (ordered and dense)):
        follows = "follows the order of the rows, like an identifier (set group for a repeated entity)"
        why = repeated if named else follows
    return why, maybe * (not why)


def _code(content: _Content) -> str:
    """Why integers are taken for codes, if they are."""
    if content.numbers is not None:
        values = content.counted[0]
    else:
        column, integer = content.column, cells.matches(content.column.encoded[0], "-?[0-9]+")
        if column.counts[integer].sum() < MAIN_SHARE * content.known:
            return ""
        digits = [column.distinct[n] for n in np.flatnonzero(integer)]
        long = [text for text in digits if len(text) > 15]
        if len(set(map(float, long))) < len(long):
            return f"integers too large to be represented exactly ({_short(long[0])!r})"
        if zeros := [text for text in digits if len(text) > 1 and text[0] == "0"]:
            return f"codes with leading zeros ({_short(zeros[0])!r})"
        values = np.sort(np.array(digits, float))
    if not len(values) or values[0] < 0 or values[-1] > EXACT or (values % 1 != 0).any():
        return ""
    wide = len(str(int(values[-1])))
    if _CODE_NAME.search(content.name) and wide > 2:
        return f"codes of {wide} digits, according to the column name"
    if wide != len(str(int(values[0]))) or wide < 5 or not FEW <= len(values) <= content.known / 3:
        return ""
    spread = values[-1] / values[0] > 4 and np.mean(values % 100 == 0) < 0.5
    return f"codes of {wide} digits that repeat" if spread else ""


_IDENTIFIER = re.compile(
    r"(?i:(^|[\W_])(ids?|uuid|guid|key|nr|no|num|number|record|row|rowid|mrn|patient|subject|"
    r"participant|person|customer|client|user|account|case|sample|accession|ssn|name|email|phone|hash|url|link|"
    r"file|filename)$|^(row[\W_]*)?(index|idx)$|^unnamed|^$)|[a-z0-9](ID|Id|Nr|No|Key)$"
)
_CODE_NAME = re.compile(
    r"zip|postal|plz|fips|code$|(^|[\W_])(cod|icd|naics|sic|sku|ean|upc|isbn)$", re.IGNORECASE
)
_CODED = re.compile(r"(?=.*\d)[\w./:#-]+")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else cell_text(value)


def _short(text: str, most: int = 30) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(found: Mapping[str, int], most: int = QUOTED) -> str:
    """The most frequent of these cells, such as ``'<0.1' (12), 'high' (3), …``."""
    order = sorted(found, key=lambda t: (-found[t], t))
    more = ", …" * (len(order) > most)
    return ", ".join(f"{_short(t)!r} ({found[t]:,})" for t in order[:most]) + more


def alike(names: Iterable[str]) -> list[str]:
    """Names that differ only in case or spaces, such as ``'oslo' and 'Oslo'``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[\s_]+", " ", name).strip().casefold(), []).append(name)
    return [" and ".join(map(repr, sorted(g)[:4])) for g in groups.values() if len(g) > 1]


def _eight_digit_dates(content: _Content) -> bool:
    """20240131 is a date if all are such."""
    if content.known < FEW or content.numbers is None or not 19_000_101 <= content.counted[0][0] < 21_000_000:
        return False
    return bool((cells.matches(content.texts, "[0-9]{8}") & ~np.isnan(cells.dates(content.texts))).all())


def _is_text(content: _Content) -> bool:
    """Several words that mostly differ; an e-mail address, a telephone number or a place has none."""
    many = len(content.counted[0]) > max(CATEGORIES, content.known // 2)
    words = [re.findall(r"[^\s,;|]*[^\W\d_][^\s,;|]*", text) for text in content.first(2000)] if many else []
    return many and float(np.mean([len(each) for each in words])) >= 3


def _some_units(content: _Content) -> str:
    """Per cent, kilograms or thousands (k) beside plain numbers may be two scales."""
    how, column = content.number_format[0], content.column
    if not how.unit:
        return ""
    bare = (np.array(column.units) == "") & ~np.isnan(cells.numbers(column.encoded[0], how, column.numerals))
    if not bare.any():
        return ""
    sample = _short(column.distinct[int(np.argmax(bare))])
    return (
        f"some cells have the unit {how.unit} and some have none ({sample!r}): all are read on the same scale"
    )


def _marker(content: _Content) -> str:
    """Of -999 or 9999 that comes several times, further from the others than these are from each other."""
    known, counts = content.counted
    if content.numbers is None:
        values = content.column.values("numeric", content.number_format[0])[0]
        known, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    for place, rest in ((0, known[1:]), (-1, known[:-1])) if len(known) > 3 else ():
        value, text = float(known[place]), cell_text(float(known[place]))
        far = min(abs(value - rest[0]), abs(value - rest[-1])) > rest[-1] - rest[0]
        if far and counts[place] > 2 and re.fullmatch(r"-?99+|-9", text):
            many = f"{text} ({counts[place]:,} cells) is far from all other values"
            return f"{many}; if it marks missing values, leave these cells empty"
    return ""
