"""How the columns of a table become the numbers that a model takes.

What a column holds is decided from all rows (:mod:`shoal.data.columns`). Means, scales and categories are
estimated from the rows that :class:`Preprocessing` is fitted to and no others: a held-out domain has no part
in them. The same code encodes rows for training, prediction and export.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.cells import Format, is_missing, marks
from shoal.data.columns import (
    CATEGORIES,
    DROPPED,
    ColumnType,
    Hints,
    categories_of,
    infer,
    quoted,
    values_of,
)
from shoal.data.reading import Array, Column, Table, as_table, need_column
from shoal.errors import InputError

FORMAT = 2  # of a description as plain data
CLIP = 10.0  # standardised numbers end here
FENCE = 10.0  # quartile distances beyond the quartiles: what lies further has no say in the mean
WORDS = 256  # numbers that a text becomes
FURTHEST = sys.float_info.max
HEAD = 10_000  # rows of a file that show how its numbers are written
QUANTILES = 101  # of a training column, to compare new tables with


class Tally:
    """What was met while rows were encoded: cells that could not be read, and categories new to the model."""

    def __init__(self) -> None:
        self.unparsed: dict[str, Counter[str]] = {}
        self.unseen: dict[str, Counter[str]] = {}
        self.rows = 0

    def add(self, where: dict[str, Counter[str]], name: str, cells: Mapping[str, int]) -> None:
        if cells:
            where.setdefault(name, Counter()).update(cells)

    def notes(self) -> list[str]:
        """In words, a line per column."""
        lines = [
            f"column {name!r}: {cells.total():,} of {self.rows:,} cells could not be read and are "
            f"treated as missing: {quoted(cells)}"
            for name, cells in self.unparsed.items()
        ]
        return lines + [
            f"column {name!r}: {cells.total():,} of {self.rows:,} cells contain categories that are not "
            f"in the training data: {quoted(cells)}"
            for name, cells in self.unseen.items()
        ]


class Step(Protocol):
    """What becomes of one column: ``width`` numbers per row."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    def transform(self, column: Column, tally: Tally) -> NDArray[np.float32]: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Scale:
    """(v − mean) / scale within ±:data:`CLIP`, 0 where v is missing.

    Mean and deviation are of values brought within ``low`` and ``high``, so that a few that lie far out do
    not squeeze the others together. ``scale`` is 0 where all known values were equal: nothing is left then.
    """

    mean: float
    scale: float
    low: float
    high: float

    @classmethod
    def fit(cls, values: NDArray[np.float64]) -> Scale:
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(0.0, 0.0, -FURTHEST, FURTHEST)
        largest = float(np.abs(known).max()) or 1.0
        shares = known / largest  # whatever their size, sums and squares stay finite
        first, third = np.quantile(shares, [0.25, 0.75])
        far = FENCE * float(third - first) or math.inf
        low, high = float(first) - far, float(third) + far
        shares = shares.clip(low, high)
        mean, deviation = float(shares.mean()), float(shares.std())
        scale = deviation * largest if deviation > 1e-12 else 0.0
        low, high = max(low * largest, -FURTHEST), min(high * largest, FURTHEST)
        return cls(mean * largest, scale, low, high)

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Scale:
        result = cls(**{part: float(about[part]) for part in ("mean", "scale", "low", "high")})
        if not all(map(math.isfinite, vars(result).values())) or result.scale < 0:
            raise ValueError(f"{vars(result)}")
        return result

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):  # beyond the clip it makes no difference
            result = ((values.clip(self.low, self.high) - self.mean) / self.scale).clip(-CLIP, CLIP)
        return np.where(np.isnan(values), 0.0, result)


@dataclass(frozen=True)
class Number:
    """A numeric or boolean column, standardised by :class:`Scale`; ``indicator``: and 1 where missing."""

    name: str
    parts: tuple[Scale, ...]
    indicator: bool
    how: Format
    kind: str = "numeric"

    @staticmethod
    def split(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """The numbers that a value becomes, one scale each."""
        return (values,)

    @classmethod
    def fit(cls, about: ColumnType, column: Column) -> Number:
        values = values_of(column, about.kind, about.how)[0]
        parts = tuple(map(Scale.fit, cls.split(values)))
        return cls(about.name, parts, bool(np.isnan(values).any()), about.how, about.kind)

    @property
    def width(self) -> int:
        return sum(part.scale > 0 for part in self.parts) + self.indicator

    def values(self, column: Column, tally: Tally) -> NDArray[np.float64]:
        result, unparsed = values_of(column, self.kind, self.how)
        tally.add(tally.unparsed, self.name, unparsed)
        return result

    def transform(self, column: Column, tally: Tally) -> NDArray[np.float32]:
        values = self.values(column, tally)
        each = zip(self.parts, self.split(values), strict=True)
        result = [scale(part) for scale, part in each if scale.scale > 0]
        result += [np.isnan(values).astype(np.float64)] if self.indicator else []
        return np.array(result, np.float32).reshape(len(result), len(values)).T

    def to_dict(self) -> dict[str, Any]:
        parts = [vars(part) for part in self.parts]
        scales = {"parts": parts} if len(parts) > 1 else {"scaling": parts[0]}
        plain = {"kind": self.kind, "name": self.name, "indicator": self.indicator}
        return plain | scales | {"how": vars(self.how)}

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Number:
        parts = tuple(map(Scale.from_dict, about["parts"] if "parts" in about else [about["scaling"]]))
        if len(parts) != len(cls.split(np.zeros(1))):
            raise ValueError(f"{len(parts)} parts of a {about['kind']}")
        how = Format(**{"decimal": ".", "unit": "", "day_first": False, **about["how"]})
        if how.decimal not in (".", ",") or not isinstance(how.unit, str):
            raise ValueError(f"decimal {how.decimal!r}, unit {how.unit!r}")
        return cls(str(about["name"]), parts, bool(about["indicator"]), how, about["kind"])


class Date(Number):
    """Day, month, weekday and hour of a date, each standardised; ``indicator``: and 1 where missing."""

    @staticmethod
    def split(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """The day itself, the month, the weekday (Monday is 0) and the hour of days since 1970-01-01."""
        days = np.where(np.isnan(values), 0, values)
        whole = np.floor(days)
        months = whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
        result = days, months.astype(float), (whole + 3) % 7, (days - whole) * 24
        return tuple(np.where(np.isnan(values), np.nan, part) for part in result)


@dataclass(frozen=True)
class Category:
    """A feature for each of ``values``, all 0 where another value is or none.

    With ``other`` there were too many values: the rarer ones share a last feature, and so does one that
    training never saw.
    """

    name: str
    values: tuple[str, ...]
    other: bool
    kind: str = "categorical"

    @classmethod
    def fit(cls, about: ColumnType, column: Column) -> Category:
        names, codes = categories_of(column, about.signs)
        counts = np.bincount(codes[codes >= 0], minlength=len(names))
        seen = [(-int(n), str(name)) for name, n in zip(names, counts, strict=True) if n]
        kept = sorted(name for _, name in sorted(seen)[:CATEGORIES])
        return cls(about.name, tuple(kept), len(seen) > CATEGORIES)

    @property
    def width(self) -> int:
        return len(self.values) + self.other

    def categories(self, column: Column) -> tuple[Array, Array]:
        """The categories of a column and each row's, whichever rows it has."""
        return categories_of(column, "+" in self.values or "-" in self.values)

    def transform(self, column: Column, tally: Tally) -> NDArray[np.float32]:
        names, codes = self.categories(column)
        place = {value: n for n, value in enumerate(self.values)}
        beyond = len(self.values) if self.other else -1
        to = np.array([*(place.get(name, beyond) for name in names), -1], np.int64)
        if not self.other and (new := [n for n, name in enumerate(names) if name not in place]):
            counts = np.bincount(codes[codes >= 0], minlength=len(names))
            tally.add(tally.unseen, self.name, {str(names[n]): int(counts[n]) for n in new if counts[n]})
        at = to[codes]
        result = np.zeros((len(codes), self.width), np.float32)
        rows = np.flatnonzero(at >= 0)
        result[rows, at[rows]] = 1
        return result

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "values": list(self.values), "other": self.other}

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Category:
        return cls(str(about["name"]), tuple(map(str, about["values"])), bool(about["other"]))


@dataclass(frozen=True)
class Text:
    """A bag of words in ``len(idf)`` numbers: words share them by a hash that is the same everywhere.

    A word that comes n times counts (1 + log n) · idf, where idf = 1 + log((1 + rows) / (1 + rows with it));
    a row's numbers then have length 1, or 0 where there is no text.
    """

    name: str
    idf: tuple[float, ...]
    kind: str = "text"

    @classmethod
    def fit(cls, about: ColumnType, column: Column) -> Text:
        rows, texts = np.zeros(WORDS), column.texts()
        for text in texts:
            rows[sorted(_words(text, WORDS))] += 1
        idf = 1 + np.log((1 + len(texts)) / (1 + rows))
        return cls(about.name, tuple(np.round(idf, 6).tolist()))

    @property
    def width(self) -> int:
        return len(self.idf)

    def transform(self, column: Column, tally: Tally) -> NDArray[np.float32]:
        texts = column.texts()
        result = np.zeros((len(texts), self.width))
        for row, text in enumerate(texts):
            for place, count in _words(text, self.width).items():
                result[row, place] = (1 + math.log(count)) * self.idf[place]
        length = np.linalg.norm(result, axis=1, keepdims=True)
        return (result / np.where(length > 0, length, 1)).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "idf": list(self.idf)}

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Text:
        idf = tuple(map(float, about["idf"]))
        if not idf or not all(map(math.isfinite, idf)):
            raise ValueError("idf is not a list of numbers")
        return cls(str(about["name"]), idf)


_WORD = re.compile(r"\w+")


def _words(text: str | None, width: int) -> Counter[int]:
    """How often each place is met. Python's own hash differs from process to process."""
    result = () if text is None or is_missing(text) else _WORD.findall(text.lower())
    return Counter(zlib.crc32(word.encode()) % width for word in result)


STEPS: dict[str, Any] = {
    "numeric": Number,
    "boolean": Number,
    "date": Date,
    "categorical": Category,
    "text": Text,
}


@dataclass(frozen=True)
class Preprocessing:
    """How rows of a table become float32 (n, :attr:`width`), as plain data that JSON can hold.

    ``dropped`` says of columns that are not used why. ``label`` is what is predicted: its ``name``, ``task``,
    ``domain`` (the column with the domains), and in regression the ``mean`` and ``scale`` that
    :meth:`predictions` undoes. ``columns`` is the report on all columns, ``training`` summaries of the rows
    it was fitted to, to compare new tables with.
    """

    steps: tuple[Step, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    label: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[Mapping[str, Any]] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    separator: str = ""
    """Of the CSV file whose columns these are."""

    @classmethod
    def fit(
        cls,
        table: Any,
        rows: Array | None = None,
        kinds: Mapping[str, str] | None = None,
        label: Mapping[str, Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        hints: Hints | None = None,
    ) -> Preprocessing:
        """Decides the kinds of columns from all rows, and estimates from ``rows`` (by default all) alone.

        Args:
            kinds: ``numeric``, ``boolean``, ``date``, ``categorical`` or ``text`` for some columns; it wins.
            names: the columns to use, by default all.
            hints: more that the user says of how cells are written; ``kinds`` is then not looked at.
        """
        table = as_table(table)
        hints = hints or Hints({str(k): str(v) for k, v in (kinds or {}).items()})
        types = infer(table, list(table) if names is None else list(names), hints)
        used = {name: about for name, about in types.items() if about.kind != DROPPED}
        dropped = {name: about.why for name, about in types.items() if about.kind == DROPPED}
        steps: list[Step] = []
        for name, about in used.items():
            column = table[name] if rows is None else table[name].take(rows)
            steps.append(STEPS[about.kind].fit(about, column))
        if not sum(step.width for step in steps):
            why = "; ".join(f"{name!r} {reason}" for name, reason in list(dropped.items())[:5])
            raise InputError(f"there is no column to learn from{f': {why}' if why else ''}.")
        training = {
            step.name: summary(step, table[step.name] if rows is None else table[step.name].take(rows))
            for step in steps
        }
        report = [about.report() for about in types.values()]
        return cls(tuple(steps), dropped, dict(label or {}), report, training, table.separator)

    @property
    def width(self) -> int:
        return sum(step.width for step in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(step.name for step in self.steps)

    def transform(self, table: Any, tally: Tally | None = None) -> NDArray[np.float32]:
        """The rows of a table (see :func:`as_table`) that has all columns; others are not looked at.

        ``tally`` counts what could not be read.
        """
        content = table if isinstance(table, Table) else as_table(table)
        for name in self.names:
            need_column(name, content, "model")
        tally = tally if tally is not None else Tally()
        tally.rows += content.rows
        steps = self.written_as(content, content.separator).steps
        return np.concatenate([step.transform(content[step.name], tally) for step in steps], axis=1)

    def written_as(self, some: Table, separator: str) -> Preprocessing:
        """For a CSV file with another ``separator`` than the training file's: its numbers may have another
        decimal mark, as the first rows show. Else itself."""
        if not separator or separator == self.separator:
            return self
        first = np.arange(min(some.rows, HEAD))
        own = {
            step.name: Counter(marks(some[step.name].take(first).encoded[0].tolist()))
            for step in self.steps
            if isinstance(step, Number) and not isinstance(step, Date)
        }
        usual = _decimal(sum(own.values(), Counter()))

        def written(step: Step) -> Step:
            decimal = _decimal(own[step.name]) or usual if step.name in own else ""
            return replace(step, how=replace(step.how, decimal=decimal)) if decimal else step  # type: ignore

        return replace(self, steps=tuple(map(written, self.steps)))

    def predictions(self, outputs: Array) -> Array:
        """In regression, a model's outputs in the label's own units."""
        own: Array = np.asarray(outputs) * self.label.get("scale", 1.0) + self.label.get("mean", 0.0)
        return own

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "format": FORMAT,
            "label": dict(self.label),
            "columns": [step.to_dict() for step in self.steps],
            "dropped": dict(self.dropped),
            "columns_report": [dict(about) for about in self.columns],
            "training": dict(self.training),
            "separator": self.separator,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preprocessing:
        if content.get("kind") != "table" or content.get("format") not in _READERS:
            result = f"kind {content.get('kind')!r}, format {content.get('format')!r}"
            raise InputError(f"this description of a table is not supported ({result}).")
        columns = map(_READERS[content["format"]], content["columns"])
        return cls(
            tuple(STEPS[about["kind"]].from_dict(about) for about in columns),
            dict(content["dropped"]),
            dict(content["label"]),
            tuple(content.get("columns_report", ())),
            dict(content.get("training", {})),
            str(content.get("separator", "")),
        )


def _decimal(result: Mapping[str, int]) -> str:
    """The decimal mark that most cells show, empty where none does."""
    if not result[","] and not result["."]:
        return ""
    return "," if result[","] > result["."] else "."


def _version_1(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """A column as version 0.2 described it."""
    if about["kind"] != "numeric":
        return about
    scaling = {part: about[part] for part in ("mean", "scale", "low", "high")}
    return {**about, "scaling": scaling, "how": {}}


_READERS: dict[int, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {1: _version_1, FORMAT: dict}


def summary(step: Step, column: Column) -> dict[str, Any]:
    """A training column in few numbers: the share that is missing, and quantiles or shares of categories."""
    if isinstance(step, Number):
        values = step.values(column, Tally())
        known = values[~np.isnan(values)]
        ends = np.quantile(known, np.linspace(0, 1, QUANTILES)).tolist() if len(known) else []
        return _about(step.kind, len(values), len(known)) | {"quantiles": ends}
    if isinstance(step, Category):
        names, codes = step.categories(column)
        counts = np.bincount(codes[codes >= 0], minlength=len(names)).tolist()
        every = max(1, sum(counts))
        shares = {str(n): c / every for n, c in zip(names, counts, strict=True) if n in step.values}
        shares |= {"other": 1 - sum(shares.values())} if step.other else {}
        return _about(step.kind, len(codes), sum(counts)) | {"shares": shares}
    texts = column.texts()
    return _about("text", len(texts), sum(text is not None and not is_missing(text) for text in texts))


def _about(kind: str, rows: int, known: int) -> dict[str, Any]:
    return {"kind": kind, "missing": 1 - known / max(1, rows), "rows": rows}
