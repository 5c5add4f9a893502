"""What the columns of a table hold: numbers, booleans, dates, categories, free text, or identifiers.

The kind of a column is decided once, from the distinct cells of all rows, and holds in every split, in
training, prediction and export. What is estimated (means, scales, categories, words) comes from training rows
alone; see :mod:`shoal.data.tables.encode`.

Of the cells that are not missing (:data:`~shoal.data.tables.cells.MISSING`), at least :data:`ENOUGH` must be
numbers (or dates) for a column to be numeric (or of dates); the others are then missing as well, and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.data.tables.cells import (
    FALSE,
    TRUE,
    Format,
    boolean,
    date,
    in_open_order,
    is_missing,
    marks,
    number,
    unit_of,
)
from shoal.data.tables.read import EXACT, cell_text, need_column
from shoal.data.tables.table import Column, Table
from shoal.errors import InputError, check_names

Array = NDArray[Any]
Kind = Literal["numeric", "boolean", "date", "categorical", "text"]
KINDS: tuple[str, ...] = get_args(Kind)
DROPPED = "dropped"

ENOUGH = 0.9
"""The share of cells that must be numbers, or dates, for a column to be so."""
NOTABLE = 0.2
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
        if self.kind == DROPPED:
            return f"not used: {self.why}"
        gaps = ", and a missing indicator" * bool(self.missing)
        if self.kind in ("numeric", "boolean"):
            unit = f" in {self.how.unit}" * bool(self.how.unit)
            return f"{'0 or 1' if self.kind == 'boolean' else 'number'}{unit}, standardised{gaps}"
        if self.kind == "date":
            return f"day, month, weekday (and hour) as numbers{gaps}"
        if self.kind == "text":
            return "TF-IDF of its words, reduced to at most 100 numbers"
        if self.distinct > CATEGORIES:
            return f"one-hot: the {CATEGORIES} most frequent categories, and one for the others"
        return f"one-hot: {self.distinct} categories"

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


class Hints(NamedTuple):
    """What the user says of the columns; it always wins."""

    kinds: Mapping[str, str] = {}
    decimal: str | None = None
    day_first: bool | None = None

    def check(self, table: Iterable[str]) -> None:
        check_names("kind of a column:", self.kinds.values(), KINDS)
        for name in self.kinds:
            need_column(name, table, "kinds")
        if self.decimal not in (None, ".", ","):
            raise InputError(f"decimal={self.decimal!r}; it must be '.' or ','.")


def infer(table: Table, names: Sequence[str], hints: Hints | None = None) -> dict[str, ColumnType]:
    """The type of each of these columns, from all rows."""
    hints = hints or Hints()
    hints.check(table)
    return {name: _inferred(_Look(name, table, hints), hints.kinds.get(name)) for name in names}


def number_format(table: Table, name: str, hints: Hints) -> Format:
    """How the numbers of a column are written, if it has any."""
    return _Look(name, table, hints).format[0]


def _inferred(look: _Look, kind: str | None) -> ColumnType:
    if kind is not None:
        result = _of_kind(look, kind)
        if result.kind == DROPPED and look.known:
            raise InputError(
                f"column {look.name!r} cannot be read as {kind}: it {result.why}: {quoted(look.cells)}."
            )
        return result
    if not look.known:
        return look.typed(DROPPED, why="is empty")
    if len(look.categories) == 1 and look.known == look.rows:
        return look.typed(DROPPED, why="has the same value in every row")
    result, mixed = _guessed(look)
    if result.kind in ("numeric", "categorical") and not mixed and (why := _identifier(look, result)):
        note = f"not used, because it {why}; to use it, set its kind (kinds: {look.name} {result.kind})"
        return replace(result, kind=DROPPED, why=why, warnings=(note,))
    if result.kind in ("numeric", "categorical", "text") and _IDENTIFIER.search(look.name):
        if look.numbers is not None and (look.distinct_numbers % 1 != 0).any():
            return result  # a measurement
        note = "the name suggests an identifier; if it is one, drop it, or set group for a repeated entity"
        return replace(result, warnings=(*result.warnings, note))
    if result.kind == "numeric" and look.numbers is not None and _tells_rows_apart(look.numbers):
        note = "an integer that is different in every row; if it is an identifier, drop it"
        return replace(result, warnings=(*result.warnings, note))
    return result


class _Look:
    """The distinct cells of a column, and how numbers and dates among them are written."""

    def __init__(self, name: str, table: Table, hints: Hints) -> None:
        self.name, self.table, self.hints, self.rows = name, table, hints, table.rows
        self.column: Column = table[name]
        self.numbers = self.column.numbers

    @cached_property
    def distinct_numbers(self) -> Array:
        """Of a column of numbers, sorted."""
        assert self.numbers is not None
        return np.unique(self.numbers[~np.isnan(self.numbers)])

    @cached_property
    def _counted(self) -> tuple[list[Any], Array]:
        if self.numbers is not None:  # texts would cost time, and are hardly needed
            values, counts = np.unique(self.numbers[~np.isnan(self.numbers)], return_counts=True)
            return values.tolist(), counts
        names, codes = self.column.categories()
        return names.tolist(), np.bincount(codes[codes >= 0], minlength=len(names))

    @property
    def categories(self) -> list[Any]:
        """The distinct values: numbers, or the text of others."""
        return self._counted[0]

    @cached_property
    def known(self) -> int:
        """Rows where it is not missing."""
        return int(self._counted[1].sum())

    @cached_property
    def cells(self) -> dict[str, int]:
        """The text of cells that are not missing, and how many of each there are."""
        pairs = zip(self.column.encoded[0], self.column.counts.tolist(), strict=True)
        return {text: count for text, count in pairs if not is_missing(text)}

    def names(self, most: int) -> list[str]:
        """The first categories, as text."""
        return [_text(value) for value in self.categories[:most]]

    def typed(self, kind: str, how: Format | None = None, wrong: Mapping[str, int] = {}, **more: Any) -> Any:
        order = np.argsort(-self._counted[1], kind="stable")[: QUOTED + len(wrong)]
        shown = [t for t in (_text(self.categories[n]) for n in order) if t not in wrong]
        return ColumnType(
            self.name,
            kind,
            how or Format(),
            missing=self.rows - self.known + sum(wrong.values()),
            distinct=len(self.categories) - len(wrong),
            examples=tuple(map(_short, shown[:QUOTED])),
            signs=self.numbers is None and "+" in self.categories,
            **more,
        )

    @cached_property
    def format(self) -> tuple[Format, str]:
        """How its numbers are written, and a warning if that is open."""
        if self.column.is_number:
            return Format(), ""
        texts = list(self.cells) if self.numbers is None else list(self.cells)[:2000]
        shown = marks(texts)
        decimal, note = self._decimal(shown)
        if note:
            mark = "," if shown["open"] else "."
            sample = next(t for t in texts if re.search(rf"\d{re.escape(mark)}\d{{3}}", t))
            value = number(sample, Format(decimal), unit=False)
            note = f"{sample!r} is read as {value:g} ({note})" if value is not None else ""
        units = Counter(unit for text in texts if (unit := unit_of(text)))
        return Format(decimal, units.most_common(1)[0][0] if units else ""), note

    def _decimal(self, shown: Mapping[str, int]) -> tuple[str, str]:
        if self.hints.decimal is not None:
            return self.hints.decimal, ""
        if shown["."] or shown[","]:
            return "," if shown[","] > shown["."] else ".", ""
        every = self.table.marks
        european = every[","] > every["."] or (not any(every.values()) and self.table.separator == ";")
        if shown["open"]:
            return ("," if european else "."), "1,234 can mean 1234 or 1.234; set the option decimal"
        if shown["open."] and european:
            return ",", "1.234 can mean 1234 or 1.234; set the option decimal"
        return ("," if european else "."), ""

    @cached_property
    def day_first(self) -> tuple[bool, str]:
        """Whether the day comes first, and a warning if that is open."""
        if self.hints.day_first is not None or self.column.is_date:
            return bool(self.hints.day_first), ""
        shapes = [m for t in self.cells if (m := in_open_order(t))]
        if not shapes:
            return False, ""
        first, second = (sum(int(m[part]) > 12 for m in shapes) for part in "ab")
        if first or second:
            return first > second, ""
        guess = shapes[0]["sep"] == "." or self.table.separator == ";"
        order = "day first" if guess else "month first"
        return guess, f"{shapes[0][0]!r} is read {order}; set the option day_first to change this"

    def share(self, kind: str) -> float:
        """Of the cells that are not missing, those that can be read as this kind."""
        values = self.column.values(kind, self.how(kind))[0]
        return float((~np.isnan(values)).sum()) / max(1, self.known)

    def how(self, kind: str) -> Format:
        if kind == "numeric":
            return self.format[0]
        return Format(day_first=self.day_first[0]) if kind == "date" else Format()


def _guessed(look: _Look) -> tuple[ColumnType, bool]:
    """As the cells look; and whether a good part of them, but not all, are numbers or dates."""
    if look.column.is_date:
        return _of_kind(look, "date"), False
    if look.numbers is None and _is_boolean(look.cells):
        return _of_kind(look, "boolean"), False
    if why := _code(look):
        note = f"{why}: read as categories; set kinds to read them as numbers"
        return look.typed("categorical", warnings=(note,)), False
    if look.share("numeric") >= ENOUGH and not _eight_digit_dates(look):
        return _of_kind(look, "numeric"), False
    if look.share("date") >= ENOUGH:
        return _of_kind(look, "date"), False
    notes = [
        f"{look.share(kind):.0%} of its cells are {what}, too few to read it as {kind}; the others, such as "
        f"{quoted(look.column.values(kind, look.how(kind))[1])}, would become missing as {kind}"
        for what, kind in (("numbers", "numeric"), ("dates", "date"))
        if look.share(kind) >= NOTABLE
    ]
    kind = "text" if _is_text(look) else "categorical"
    return look.typed(kind, warnings=(*notes, *_alike(look))), bool(notes)


def _of_kind(look: _Look, kind: str) -> ColumnType:
    """A column as this kind, with the cells that do not fit."""
    if kind in ("categorical", "text"):
        return look.typed(kind, warnings=tuple(_alike(look)) if kind == "categorical" else ())
    how = look.how(kind)
    note = {"numeric": look.format[1], "date": look.day_first[1]}.get(kind, "")
    notes = [note] if note else []
    values, wrong = look.column.values(kind, how)
    if wrong:
        count = sum(wrong.values())
        cells = "1 cell is not" if count == 1 else f"{count:,} cells are not"
        notes.append(f"{cells} {WHAT[kind]}; treated as missing: {quoted(wrong)}")
    if np.isnan(values).all():
        return look.typed(DROPPED, why=f"has no value that is {WHAT[kind]}", warnings=tuple(notes))
    if kind == "numeric":
        notes += [note for note in (_units(look, how), _marker(values)) if note]
    result: ColumnType = look.typed(kind, how, wrong, warnings=tuple(notes))
    if kind == "numeric" and result.distinct <= 1 and not result.missing:
        return replace(result, kind=DROPPED, why="has the same value in every row")
    return result


def _is_boolean(cells: Mapping[str, int]) -> bool:
    words = {text.lower() for text in cells}
    if not words & (TRUE | FALSE) or set(cells) <= {"NO", "SI"}:  # Norway and Slovenia
        return False
    return all(boolean(word) is not None for word in words)


def _identifier(look: _Look, result: ColumnType) -> str:
    """Why the column is taken for an identifier, if it is: it tells rows or entities apart."""
    if look.known < FEW:
        return ""
    distinct, named = len(look.categories), bool(_IDENTIFIER.search(look.name))
    repeated = "is named like an identifier, and few rows share a value (set group for a repeated entity)"
    if result.kind == "categorical":
        if distinct >= ENOUGH * look.known:
            return "is different in (almost) every row, like an identifier"
        coded = np.mean([bool(_CODED.fullmatch(name)) for name in look.names(1000)]) > ENOUGH
        if distinct >= look.known / 2 and coded:
            return "looks like an identifier (a code shared by few rows)"
        return repeated if named and distinct > CATEGORIES and distinct >= look.known / 20 else ""
    values = look.column.values("numeric", result.how)[0]
    values = values[~np.isnan(values)]
    if not len(values) or (values % 1 != 0).any():
        return ""
    dense = values.max() - values.min() + 1 <= 2 * distinct
    steps = np.diff(values)
    ordered = bool((steps >= 0).all() or (steps <= 0).all())
    if distinct == len(values):
        if named:
            return "is different in every row and is named like an identifier"
        return "numbers the rows, like an identifier" if dense else ""
    if distinct <= max(CATEGORIES // 2, look.known / 20):
        return ""
    if named:
        return repeated
    if ordered and dense:
        return "follows the order of the rows, like an identifier (set group for a repeated entity)"
    return ""


def _tells_rows_apart(values: Array) -> bool:
    """Whether integers never repeat, and are in order, would repeat by chance, or have seven digits."""
    values = values[~np.isnan(values)]
    if len(values) < FEW or (values % 1 != 0).any() or len(np.unique(values)) < len(values):
        return False
    steps, (low, high) = np.diff(values), np.quantile(values, [0.25, 0.75])
    repeats = (len(values) / 2) ** 2 / 2 / max(1.0, high - low)  # expected among the middle half
    long = values.min() >= 10**6 and len(str(int(values.min()))) == len(str(int(values.max())))
    return bool((steps > 0).all() or (steps < 0).all() or repeats >= 3 or long)


def _code(look: _Look) -> str:
    """Why integers are taken for codes, if they are."""
    zeros: list[str] = []
    if look.numbers is not None:
        values = look.distinct_numbers
        if not len(values) or (values % 1 != 0).any():
            return ""
    else:
        digits = [t for t in look.cells if re.fullmatch(r"-?[0-9]+", t)]
        if sum(look.cells[t] for t in digits) < ENOUGH * look.known:
            return ""
        values = np.sort(np.array([float(t) for t in digits]))
        zeros = [t for t in digits if len(t) > 1 and t[0] == "0"]
        long = [t for t in digits if len(t) > 15]
        if len(set(map(float, long))) < len(long):
            return f"integers too large to be represented exactly ({_short(long[0])!r})"
    if not len(values) or values[-1] > EXACT:
        return ""
    if zeros:
        return f"codes with leading zeros ({_short(zeros[0])!r})"
    if values[0] < 0:
        return ""
    wide = len(str(int(values[-1])))
    if _CODE_NAME.search(look.name) and wide > 2:
        return f"codes of {wide} digits, according to the column name"
    if wide != len(str(int(values[0]))) or wide < 5 or not FEW <= len(values) <= look.known / 3:
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


def quoted(cells: Mapping[str, int], most: int = QUOTED) -> str:
    """The most frequent of these cells, such as ``'<0.1' (12), 'high' (3), …``."""
    order = sorted(cells, key=lambda t: (-cells[t], t))
    more = ", …" * (len(order) > most)
    return ", ".join(f"{_short(t)!r} ({cells[t]:,})" for t in order[:most]) + more


def _alike(look: _Look) -> list[str]:
    same = alike(look.names(10_000))
    return [f"categories that differ only in case or spaces: {', '.join(same[:QUOTED])}"] if same else []


def alike(names: Iterable[str]) -> list[str]:
    """Names that differ only in case or spaces, such as ``'oslo' and 'Oslo'``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[\s_]+", " ", name).strip().casefold(), []).append(name)
    return [" and ".join(map(repr, sorted(g)[:4])) for g in groups.values() if len(g) > 1]


def _eight_digit_dates(look: _Look) -> bool:
    """20240131 is a date if all are such."""
    if look.known < FEW:
        return False
    if look.numbers is not None and not 19_000_101 <= look.distinct_numbers[0] < 21_000_000:
        return False
    return all(len(t) == 8 and t.isdigit() and date(t, False) is not None for t in look.cells)


def _is_text(look: _Look) -> bool:
    """Several words that mostly differ; an e-mail address, a telephone number or a place has none."""
    words = [sum(any(map(str.isalpha, word)) for word in re.split(r"[\s,;|]+", c)) for c in look.names(2000)]
    many = len(look.categories) > max(CATEGORIES, look.known // 2)
    return many and float(np.mean(words)) >= 3


def _units(look: _Look, how: Format) -> str:
    """Per cent, kilograms or thousands (k) beside plain numbers may be two scales."""
    bare = [t for t in look.cells if number(t, how) is not None and not unit_of(t)] if how.unit else ()
    if not bare:
        return ""
    return (
        f"some cells have the unit {how.unit} and some have none ({_short(bare[0])!r}): all are read on "
        "the same scale"
    )


def _marker(values: Array) -> str:
    """Of -999 or 9999 that comes several times, further from the others than these are from each other."""
    known, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    if len(known) < 4:
        return ""
    for place, rest in ((0, known[1:]), (-1, known[:-1])):
        value, text = float(known[place]), cell_text(float(known[place]))
        far = min(abs(value - rest[0]), abs(value - rest[-1])) > rest[-1] - rest[0]
        if far and counts[place] > 2 and re.fullmatch(r"-?99+|-9", text):
            many = f"{text} ({counts[place]:,} cells) is far from all other values"
            return f"{many}; if it marks missing values, leave these cells empty"
    return ""
