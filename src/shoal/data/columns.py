"""What the columns of a table hold: numbers, booleans, dates, categories, free text, or identifiers.

The kind of a column is decided once, from all rows of the table, and holds in every split, in training,
prediction and export. What is estimated (means, scales, categories) comes from training rows alone; see
:mod:`shoal.data.table`.

A cell that holds one of :data:`MISSING` is missing. Of the others at least :data:`ENOUGH` must be numbers (or
dates) for the column to be numeric (or of dates); those that are not are then missing as well, and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.data.cells import (
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
from shoal.data.reading import EXACT, Array, Column, Table, need_column, number_text
from shoal.errors import InputError, check_names

Kind = Literal["numeric", "boolean", "date", "categorical", "text"]
KINDS: tuple[str, ...] = get_args(Kind)
DROPPED = "dropped"

ENOUGH = 0.9
"""The share of cells that must be numbers, or dates, for a column to be so."""
NOTABLE = 0.2
"""From this share on it is said that a categorical column has many numbers."""
CATEGORIES = 50  # of a column that have a feature of their own; rarer ones share one
FEW = 20  # rows below which nothing is taken for an identifier or a code
QUOTED = 3  # cells that a message quotes


def values_of(column: Column, kind: str, how: Format) -> tuple[NDArray[np.float64], dict[str, int]]:
    """The numbers of a numeric, boolean or date column, NaN where missing; and the cells that are none."""
    if kind == "numeric" and not column.dates and column.numbers is not None:
        return _finite(column.numbers)
    if kind == "numeric" and how.decimal == "." and (plain := column.plain) is not None:
        return _finite(plain)
    if kind == "date" and column.dates:
        assert column.numbers is not None
        return column.numbers, {}
    distinct, codes = column.encoded
    readers: dict[str, Callable[[str], float | None]] = {
        "numeric": lambda text: number(text, how),
        "boolean": boolean,
        "date": lambda text: date(text, how.day_first),
    }
    read = readers[kind]
    result = np.full(len(distinct) + 1, np.nan)
    wrong: list[int] = []
    for place, text in enumerate(distinct.tolist()):
        if not is_missing(text):
            value = read(text)
            if value is None:
                wrong.append(place)
            else:
                result[place] = value
    counts = np.bincount(codes[codes >= 0], minlength=len(distinct)) if wrong else ()
    return result[codes], {str(distinct[place]): int(counts[place]) for place in wrong}


def _finite(values: Array) -> tuple[NDArray[np.float64], dict[str, int]]:
    """Infinite numbers are none."""
    wrong = np.isinf(values)
    if not wrong.any():
        return values, {}
    plus, minus = int((values == np.inf).sum()), int((values == -np.inf).sum())
    unparsed = {name: n for name, n in (("inf", plus), ("-inf", minus)) if n}
    return np.where(wrong, np.nan, values), unparsed


def categories_of(column: Column, signs: bool | None = None) -> tuple[Array, Array]:
    """The distinct categories and each row's, −1 where missing: 1.0 and 1 are the same category.

    ``signs``: whether - is a category; by default if + is one.
    """
    distinct, codes = column.encoded
    if signs is None:
        signs = "+" in distinct.tolist()
    places: dict[str, int] = {}
    to = np.full(len(distinct) + 1, -1, np.int64)
    for place, text in enumerate(distinct.tolist()):
        if not is_missing(text) or (signs and text == "-"):
            to[place] = places.setdefault(_same_number(text), len(places))
    names = np.empty(len(places), object)
    names[:] = list(places)
    return names, to[codes]


_DECIMAL = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?(e[+-]?\d{1,2})?", re.IGNORECASE)


def _same_number(text: str) -> str:
    """Category 1.0 of one file is category 1 of another."""
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        return text
    if text.lstrip("+-").isdigit() and text != "-0":
        return text.lstrip("+")  # however large
    try:
        return number_text(float(text))
    except ValueError:
        return text


@dataclass(frozen=True)
class ColumnType:
    """What a column holds and how it is written, with what a reader should know of it."""

    name: str
    kind: str
    how: Format = field(default_factory=Format)
    why: str = ""
    """Of a column that is dropped."""
    rows: int = 0
    missing: int = 0
    distinct: int = 0
    examples: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    signs: bool = False
    """Whether - is a category, as + is one, and no mark of a missing value."""

    @property
    def becomes(self) -> str:
        """What the model sees of it."""
        if self.kind == DROPPED:
            return f"not used: {self.why}"
        gaps = ", and a missing indicator" * bool(self.missing)
        if self.kind in ("numeric", "boolean"):
            unit = f" in {self.how.unit}" * bool(self.how.unit)
            return f"{'0 or 1' if self.kind == 'boolean' else 'number'}{unit}, standardised{gaps}"
        if self.kind == "date":
            return f"day, month, weekday (and hour) as numbers{gaps}"
        if self.kind == "text":
            return "256 hashed word counts"
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


@dataclass(frozen=True)
class Hints:
    """What the user says of the columns; it always wins."""

    kinds: Mapping[str, str] = field(default_factory=dict)
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
    key = (tuple(sorted(hints.kinds.items())), hints.decimal, hints.day_first, tuple(names))
    if key not in table.memory:
        usual = _Usual(table, names, hints)
        table.memory[key] = {n: _inferred(n, table[n], hints.kinds.get(n), usual) for n in names}
    result: dict[str, ColumnType] = table.memory[key]
    return result


def number_format(table: Table, name: str, hints: Hints) -> Format:
    """How the numbers of a column are written, if it has any."""
    return Format() if table[name].plain is not None else _Usual(table, [name], hints).format(table[name])[0]


class _Usual:
    """How numbers and dates are written in this table, for columns that leave it open."""

    def __init__(self, table: Table, names: Sequence[str], hints: Hints) -> None:
        self.hints, self.semicolons = hints, table.separator == ";"
        self.sure = {".": 0, ",": 0}
        for name in names:
            if table[name].plain is None:
                result = marks(t for t in table[name].encoded[0][:2000].tolist() if not is_missing(t))
                for mark in self.sure:
                    self.sure[mark] += result[mark]

    def format(self, column: Column) -> tuple[Format, str]:
        """How a column's numbers are written, and what to say if that is open."""
        texts = [t for t in column.encoded[0].tolist() if not is_missing(t)]
        result = marks(texts)
        decimal, note = self._decimal(result)
        if note:
            mark = "," if result["open"] else "."
            sample = next(t for t in texts if re.search(rf"\d{re.escape(mark)}\d{{3}}", t))
            value = number(sample, Format(decimal), unit=False)
            note = f"{sample!r} is read as {value:g} ({note})" if value is not None else ""
        units = Counter(unit for text in texts if (unit := unit_of(text)))
        return Format(decimal, units.most_common(1)[0][0] if units else ""), note

    def _decimal(self, result: Mapping[str, int]) -> tuple[str, str]:
        if self.hints.decimal is not None:
            return self.hints.decimal, ""
        if result["."] or result[","]:
            return "," if result[","] > result["."] else ".", ""
        european = self.sure[","] > self.sure["."] or (self.sure == {".": 0, ",": 0} and self.semicolons)
        if result["open"]:
            return ("," if european else "."), "1,234 can mean 1234 or 1.234; set the option decimal"
        if result["open."]:
            if european:
                return ",", "1.234 can mean 1234 or 1.234; set the option decimal"
            return ".", ""
        return ("," if european else "."), ""

    def day_first(self, texts: Sequence[str]) -> tuple[bool, str]:
        """Whether the day comes first, and what to say if that is open."""
        if self.hints.day_first is not None:
            return self.hints.day_first, ""
        shapes = [m for t in texts if (m := in_open_order(t))]
        if not shapes:
            return False, ""
        first = sum(int(m["a"]) > 12 for m in shapes)
        second = sum(int(m["b"]) > 12 for m in shapes)
        if first or second:
            return first > second, ""
        guess = shapes[0]["sep"] == "." or self.semicolons
        order = "day first" if guess else "month first"
        return guess, f"{shapes[0][0]!r} is read {order}; set the option day_first to change this"


def _inferred(name: str, column: Column, kind: str | None, usual: _Usual) -> ColumnType:
    facts = Facts(name, column)
    if kind is None and (why := facts.useless()):
        return facts.typed(DROPPED, why=why)
    result = _of_kind(facts, kind, usual) if kind is not None else _guessed(facts, usual)
    if kind is not None and result.kind == DROPPED and facts.known:
        some = quoted(facts.cells)
        raise InputError(f"column {name!r} cannot be read as {kind}: it {result.why}: {some}.")
    if kind is None and result.kind != DROPPED and (why := facts.identifier(result)):
        return replace(result, kind=DROPPED, why=why, warnings=(_kept(name, result.kind, why),))
    if kind is None and result.kind in ("numeric", "categorical", "text") and _IDENTIFIER.search(name):
        if facts.plain is not None and (np.floor(facts.categories) != facts.categories).any():
            return result  # a measurement
        note = "the name suggests an identifier; if it is one, drop it, or set group for a repeated entity"
        return replace(result, warnings=(*result.warnings, note))
    return result


def _kept(name: str, kind: str, why: str) -> str:
    return f"not used, because it {why}; to use it, set its kind (kinds: {name} {kind})"


class Facts:
    """What the cells of a column look like."""

    def __init__(self, name: str, column: Column) -> None:
        self.name, self.column, self.rows = name, column, len(column)
        self.mixed = False
        """Whether a good part, but not all, are numbers or dates."""
        self.plain = column.plain
        if self.plain is not None:  # texts would cost time, and are hardly needed
            self.categories, self.counts = np.unique(self.plain[~np.isnan(self.plain)], return_counts=True)
        else:
            self.categories, codes = categories_of(column)
            self.counts = np.bincount(codes[codes >= 0], minlength=len(self.categories))
        self.known = int(self.counts.sum())

    @cached_property
    def cells(self) -> dict[str, int]:
        """The texts of cells that are not missing, and how many of each there are."""
        distinct, codes = self.column.encoded
        times = np.bincount(codes[codes >= 0], minlength=len(distinct)).tolist()
        return {t: n for t, n in zip(distinct.tolist(), times, strict=True) if not is_missing(t)}

    def names(self, most: int) -> list[str]:
        """The first categories, as texts."""
        return [_category_text(value) for value in self.categories[:most].tolist()]

    def typed(self, kind: str, how: Format | None = None, unparsed: int = 0, **more: Any) -> ColumnType:
        wrong = more.pop("wrong", ())
        order = np.argsort(-self.counts, kind="stable")[: QUOTED + len(wrong)]
        shown = [t for t in map(_category_text, self.categories[order].tolist()) if t not in wrong]
        return ColumnType(
            self.name,
            kind,
            how or Format(),
            rows=self.rows,
            missing=self.rows - self.known + unparsed,
            distinct=len(self.categories) - len(wrong),
            examples=tuple(map(_short, shown[:QUOTED])),
            signs="+" in self.categories.tolist(),
            **more,
        )

    def useless(self) -> str:
        if not self.known:
            return "is empty"
        if len(self.categories) == 1 and self.known == self.rows:
            return "has the same value in every row"
        return ""

    def identifier(self, result: ColumnType) -> str:
        """Why the column is taken for an identifier, if it is: it tells rows or entities apart."""
        kind = result.kind
        if self.known < FEW or self.mixed or kind in ("date", "boolean", "text"):
            return ""
        distinct = len(self.categories)
        named = bool(_IDENTIFIER.search(self.name))
        if kind == "numeric":
            return self._numbering(result.how, distinct, named)
        if distinct >= ENOUGH * self.known:
            return "is different in (almost) every row, like an identifier"
        coded = np.mean([bool(_CODED.fullmatch(c)) for c in self.names(1000)]) > ENOUGH
        if distinct >= self.known / 2 and coded:
            return "looks like an identifier (a code shared by few rows)"
        if named and distinct > CATEGORIES and distinct >= self.known / 20:
            return "is named like an identifier, and few rows share a value (set group for a repeated entity)"
        return ""

    def _numbering(self, how: Format, distinct: int, named: bool) -> str:
        values = values_of(self.column, "numeric", how)[0]
        values = values[~np.isnan(values)]
        if not len(values) or (np.floor(values) != values).any():
            return ""
        dense = values.max() - values.min() + 1 <= 2 * distinct
        steps = np.diff(values)
        ordered = bool((steps >= 0).all() or (steps <= 0).all())
        if distinct == len(values):
            if named:
                return "is different in every row and is named like an identifier"
            return "numbers the rows, like an identifier" if dense else ""
        if distinct <= max(CATEGORIES // 2, self.known / 20):
            return ""
        if named:
            return "is named like an identifier, and few rows share a value (set group for a repeated entity)"
        if ordered and dense:
            return "follows the order of the rows, like an identifier (set group for a repeated entity)"
        return ""

    def code(self) -> str:
        """Why whole numbers are taken for codes, if they are."""
        if self.plain is not None:
            values, zeros = self.categories, []
            if not len(values) or (np.floor(values) != values).any():
                return ""
        else:
            digits = [t for t in self.cells if re.fullmatch(r"-?[0-9]+", t)]
            if sum(self.cells[t] for t in digits) < ENOUGH * self.known:
                return ""
            values = np.sort(np.array([float(t) for t in digits]))
            zeros = [t for t in digits if len(t) > 1 and t[0] == "0"]
        long = [c for c in self.categories.tolist() if isinstance(c, str) and len(c) > 15]
        long = [c for c in long if c.lstrip("-").isdigit()]
        if len(set(map(float, long))) < len(long):
            return f"integers too large to be represented exactly ({_short(long[0])!r})"
        if not len(values) or values[-1] > EXACT:
            return ""
        if zeros:
            return f"codes with leading zeros ({_short(zeros[0])!r})"
        if values[0] < 0:
            return ""
        wide = len(str(int(values[-1])))
        if _CODE_NAME.search(self.name) and wide > 2:
            return f"codes of {wide} digits, according to the column name"
        if wide != len(str(int(values[0]))) or wide < 5 or not FEW <= len(values) <= self.known / 3:
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


def _category_text(value: Any) -> str:
    return value if isinstance(value, str) else number_text(value)


def _short(text: str, most: int = 30) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(cells: Mapping[str, int], most: int = QUOTED) -> str:
    """The most frequent of these cells, such as ``'<0.1' (12), 'high' (3), …``."""
    order = sorted(cells, key=lambda t: (-cells[t], t))
    more = ", …" * (len(order) > most)
    return ", ".join(f"{_short(t)!r} ({cells[t]:,})" for t in order[:most]) + more


def _guessed(facts: Facts, usual: _Usual) -> ColumnType:
    if facts.column.dates:
        return _of_kind(facts, "date", usual)
    if facts.plain is None:
        words = [t.lower() for t in facts.cells]
        if any(w in TRUE or w in FALSE for w in words) and all(boolean(w) is not None for w in words):
            return _of_kind(facts, "boolean", usual)
    if why := facts.code():
        return facts.typed(
            "categorical", warnings=(f"{why}: read as categories; set kinds to read them as numbers",)
        )
    how, _ = usual.format(facts.column) if facts.plain is None else (Format(), "")
    numbers = _share(facts, "numeric", how)
    if numbers >= ENOUGH and not _eight_digit_dates(facts):
        return _of_kind(facts, "numeric", usual)
    cells = facts.cells
    dates = _share(facts, "date", replace(how, day_first=usual.day_first(list(cells))[0]))
    if dates >= ENOUGH:
        return _of_kind(facts, "date", usual)
    kind = "text" if _is_text(facts) else "categorical"
    notes = []
    for share, what, flag in ((numbers, "numbers", "numeric"), (dates, "dates", "date")):
        if share >= NOTABLE:
            facts.mixed = True
            wrong = _wrong(facts, flag, replace(how, day_first=usual.day_first(list(cells))[0]))
            notes.append(
                f"{share:.0%} of its cells are {what}, too few to read it as {flag}; the others, such as "
                f"{quoted(wrong)}, would become missing as {flag}"
            )
    return facts.typed(kind, warnings=(*notes, *_alike(facts)))


def _alike(facts: Facts) -> list[str]:
    same = alike(facts.names(10_000))
    return [f"categories that differ only in case or spaces: {', '.join(same[:QUOTED])}"] if same else []


def alike(names: Iterable[str]) -> list[str]:
    """Names that differ only in case or spaces, such as ``'oslo' and 'Oslo'``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[\s_]+", " ", name).strip().casefold(), []).append(name)
    return [" and ".join(map(repr, sorted(g)[:4])) for g in groups.values() if len(g) > 1]


def _eight_digit_dates(facts: Facts) -> bool:
    """20240131 is a date if all are such."""
    if facts.known < FEW or (facts.plain is not None and not 19_000_101 <= facts.categories[0] < 21_000_000):
        return False
    return all(len(t) == 8 and t.isdigit() and date(t, False) is not None for t in facts.cells)


def _wrong(facts: Facts, kind: str, how: Format) -> dict[str, int]:
    return values_of(facts.column, kind, how)[1]


def _share(facts: Facts, kind: str, how: Format) -> float:
    """Of the cells that are not missing, those that can be read as this kind."""
    return float((~np.isnan(values_of(facts.column, kind, how)[0])).sum()) / max(1, facts.known)


def _is_text(facts: Facts) -> bool:
    """Several words that mostly differ; an address of mail, a telephone number or a place has none."""
    words = [sum(any(map(str.isalpha, word)) for word in re.split(r"[\s,;|]+", c)) for c in facts.names(2000)]
    many = len(facts.categories) > max(CATEGORIES, facts.known // 2)
    return many and float(np.mean(words)) >= 3


def _of_kind(facts: Facts, kind: str, usual: _Usual) -> ColumnType:
    """As the user said, or as the cells look."""
    if kind in ("categorical", "text"):
        return facts.typed(kind, warnings=tuple(_alike(facts)) if kind == "categorical" else ())
    how, notes = Format(), []
    what = {"numeric": "a number", "boolean": "true or false", "date": "a date"}[kind]
    if kind == "numeric" and facts.column.plain is None:
        how, note = usual.format(facts.column)
        notes += [note] if note else []
    elif kind == "date":
        day_first, note = usual.day_first([] if facts.column.dates else list(facts.cells))
        how, notes = replace(how, day_first=day_first), [note] if note else []
    values, wrong = values_of(facts.column, kind, how)
    if wrong:
        count = sum(wrong.values())
        cells = "1 cell is not" if count == 1 else f"{count:,} cells are not"
        notes.append(f"{cells} {what}; treated as missing: {quoted(wrong)}")
    if np.isnan(values).all():
        return facts.typed(DROPPED, why=f"has no value that is {what}", warnings=tuple(notes))
    if kind == "numeric":
        notes += [note for note in (_units(facts, how), _marker(values)) if note]
    result = facts.typed(kind, how, sum(wrong.values()), warnings=tuple(notes), wrong=wrong)
    if kind == "numeric" and result.distinct <= 1 and not result.missing:
        return replace(result, kind=DROPPED, why="has the same value in every row")
    return result


def _units(facts: Facts, how: Format) -> str:
    """Per cent, kilograms or thousands (k) beside plain numbers may be two scales."""
    bare = [t for t in facts.cells if number(t, how) is not None and not unit_of(t)] if how.unit else ()
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
        value, text = float(known[place]), number_text(float(known[place]))
        far = min(abs(value - rest[0]), abs(value - rest[-1])) > rest[-1] - rest[0]
        if far and counts[place] > 2 and re.fullmatch(r"-?99+|-9", text):
            many = f"{text} ({counts[place]:,} cells) is far from all other values"
            return f"{many}; if it marks missing values, leave these cells empty"
    return ""
