"""How the columns of a table become the numbers that a model takes.

Means, scales, categories and words are estimated from the rows that an :class:`Encoder` is fitted to and no
others. The same object encodes rows for training, prediction and scoring, and describes them for export.

The encoding of one column has a ``width`` of numbers per row, ``transform``, ``unknown`` (cells that cannot
be read, and categories that training did not have, with their counts) and ``summary``, which tells of drift.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from shoal.data.tables.cells import Format
from shoal.data.tables.kinds import CATEGORIES, DROPPED, ColumnType, infer, quoted
from shoal.data.tables.read import need_column
from shoal.data.tables.table import Column, Table, as_table
from shoal.errors import InputError

Array = NDArray[Any]
Counts = Mapping[str, int]
FORMAT = 4  # of a description as plain data
CLIP = 10.0  # standardised numbers end here
OUTLIER_DISTANCE = 10.0  # quartile distances beyond the quartiles: what lies further has no part in the mean
WORDS, COMPONENTS = 5_000, 200
"""The most frequent words of a text column that count, and the numbers that they are reduced to."""
LARGEST = sys.float_info.max
QUANTILES = 101  # of a training column, to compare new tables with
FINITE = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, config=FINITE)
class Scale:
    """(v − mean) / scale within ±:data:`CLIP`, 0 where v is missing.

    Mean and deviation are of values brought within ``low`` and ``high``, so that a few that lie far out do
    not squeeze the others together. ``scale`` is 0 where all known values were equal: nothing is left then.
    """

    mean: float
    scale: Annotated[float, Field(ge=0)]
    low: float
    high: float

    @classmethod
    def fit(cls, values: Array) -> Scale:
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(0.0, 0.0, -LARGEST, LARGEST)
        largest = float(np.abs(known).max()) or 1.0
        shares = known / largest  # whatever their size, sums and squares stay finite
        first, third = np.quantile(shares, [0.25, 0.75])
        far = OUTLIER_DISTANCE * float(third - first) or math.inf
        low, high = float(first) - far, float(third) + far
        shares = shares.clip(low, high)
        mean, deviation = float(shares.mean()), float(shares.std())
        scale = deviation * largest if deviation > 1e-12 else 0.0
        low, high = max(low * largest, -LARGEST), min(high * largest, LARGEST)
        return cls(mean * largest, scale, low, high)

    def __call__(self, values: Array) -> Array:
        with np.errstate(over="ignore"):  # beyond the clip it makes no difference
            result = ((values.clip(self.low, self.high) - self.mean) / self.scale).clip(-CLIP, CLIP)
        return np.where(np.isnan(values), 0.0, result)


def split(kind: str, values: Array) -> tuple[Array, ...]:
    """What a value becomes; of days since 1970-01-01 also month, weekday (Monday is 0) and hour."""
    if kind != "date":
        return (values,)
    days = np.where(np.isnan(values), 0, values)
    whole = np.floor(days)
    months = whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
    result = days, months.astype(float), (whole + 3) % 7, (days - whole) * 24
    return tuple(np.where(np.isnan(values), np.nan, part) for part in result)


@dataclass(frozen=True)
class Number:
    """A numeric, boolean or date column as one or four numbers, each standardised by a :class:`Scale`.

    ``indicator``: and 1 where it is missing.
    """

    kind: Literal["numeric", "boolean", "date"]
    name: str
    parts: tuple[Scale, ...]
    indicator: bool
    how: Format

    @classmethod
    def fit(cls, about: ColumnType, column: Column, rows: Array) -> Number:
        values, kind = column.values(about.kind, about.how)[0][rows], cast(Any, about.kind)
        parts = tuple(map(Scale.fit, split(kind, values)))
        return cls(kind, about.name, parts, bool(np.isnan(values).any()), about.how)

    @property
    def width(self) -> int:
        return sum(part.scale > 0 for part in self.parts) + self.indicator

    def values(self, column: Column) -> Array:
        return column.values(self.kind, self.how)[0]

    def transform(self, column: Column, rows: Array) -> Array:
        values = self.values(column)[rows]
        each = zip(self.parts, split(self.kind, values), strict=True)
        result = [scale(part) for scale, part in each if scale.scale > 0]
        result += [np.isnan(values)] if self.indicator else []
        return np.array(result, np.float32).reshape(len(result), len(values)).T

    def unknown(self, column: Column) -> tuple[Counts, Counts]:
        return column.values(self.kind, self.how)[1], {}

    def summary(self, column: Column, rows: Array) -> dict[str, Any]:
        values = self.values(column)[rows]
        known = np.sort(values[~np.isnan(values)])
        at = np.linspace(0, len(known) - 1, QUANTILES)
        quantiles = np.interp(at, np.arange(len(known)), known).tolist() if len(known) else []
        return _about(self.kind, rows, len(known)) | {"quantiles": quantiles}

    def written_in(self, table: Table) -> Number:
        """As numbers are written in a CSV file with another separator than the training file's: where its
        cells leave the decimal mark open, it is the one that the file shows elsewhere."""
        if self.kind != "numeric" or self.name not in table or table[self.name].is_number:
            return self
        shown = table[self.name].marks
        own = "," if shown[","] > shown["."] else "." * (shown["."] > 0)
        how = dataclasses.replace(self.how, decimal=own or table.decimal or self.how.decimal)
        return dataclasses.replace(self, how=how)


@dataclass(frozen=True)
class Category:
    """A feature for each of ``values``, all 0 where another value is or none.

    With ``other`` there were too many values: the rarer ones share a last feature, and so does one that
    training never had.
    """

    kind: Literal["categorical"]
    name: str
    values: tuple[str, ...]
    other: bool

    @classmethod
    def fit(cls, about: ColumnType, column: Column, rows: Array) -> Category:
        counts = _counts(*column.categories(about.signs), rows)
        seen = sorted((name for name in counts if counts[name]), key=lambda name: (-counts[name], name))
        return cls("categorical", about.name, tuple(sorted(seen[:CATEGORIES])), len(seen) > CATEGORIES)

    @property
    def width(self) -> int:
        return len(self.values) + self.other

    def categories(self, column: Column) -> tuple[Array, Array]:
        """The categories of a column and each row's, whichever rows it has."""
        return column.categories("+" in self.values or "-" in self.values)

    def transform(self, column: Column, rows: Array) -> Array:
        names, codes = self.categories(column)
        place = {value: n for n, value in enumerate(self.values)}
        beyond = len(self.values) if self.other else -1
        at = np.array([*(place.get(name, beyond) for name in names), -1], np.int64)[codes[rows]]
        return (at[:, None] == np.arange(self.width)).astype(np.float32)

    def unknown(self, column: Column) -> tuple[Counts, Counts]:
        counts = {} if self.other else _counts(*self.categories(column), slice(None))
        return {}, {name: count for name, count in counts.items() if name not in self.values}

    def summary(self, column: Column, rows: Array) -> dict[str, Any]:
        counts = _counts(*self.categories(column), rows)
        known = sum(counts.values())
        shares = {name: count / max(1, known) for name, count in counts.items() if name in self.values}
        shares |= {"other": 1 - sum(shares.values())} if self.other else {}
        return _about(self.kind, rows, known) | {"shares": shares}


def _counts(names: Array, codes: Array, rows: Any) -> dict[str, int]:
    """How many of some rows have each category."""
    codes = codes[rows]
    return dict(zip(names, np.bincount(codes[codes >= 0], minlength=len(names)).tolist(), strict=True))


@dataclass(frozen=True, config=FINITE)
class Text:
    """TF-IDF of the words of a text, reduced to the leading singular directions of the training rows.

    A word that occurs n times counts (1 + log n) · idf, where idf = 1 + log((1 + rows) / (1 + rows with it)),
    and a row's numbers are scaled to length 1. ``components`` (words, numbers) then multiplies them;
    ``None``: there are few words, or few rows.
    """

    kind: Literal["text"]
    name: str
    words: list[str]
    idf: list[float]
    components: list[list[float]] | None = None

    @classmethod
    def fit(cls, about: ColumnType, column: Column, rows: Array) -> Text:
        from sklearn.decomposition import TruncatedSVD

        vectorizer = _vectorizer(max_features=WORDS, min_df=2 if len(rows) >= 100 else 1)
        try:
            counted = vectorizer.fit_transform(_texts(column, rows))
        except ValueError:  # there is no word
            return cls("text", about.name, [], [])
        words, idf = vectorizer.get_feature_names_out().tolist(), np.round(vectorizer.idf_, 6).tolist()
        if len(words) <= COMPONENTS or len(rows) <= COMPONENTS:
            return cls("text", about.name, words, idf)
        reduced = TruncatedSVD(COMPONENTS, random_state=0).fit(counted)
        scale = float(np.sqrt(reduced.explained_variance_.max())) or 1.0
        return cls("text", about.name, words, idf, np.round(reduced.components_.T / scale, 4).tolist())

    @cached_property
    def vectorizer(self) -> Any:
        result = _vectorizer(vocabulary=self.words)
        result.idf_ = np.array(self.idf)
        return result

    @cached_property
    def projection(self) -> Array | None:
        return None if self.components is None else np.array(self.components)

    @property
    def width(self) -> int:
        return len(self.words) if self.components is None else len(self.components[0])

    def counted(self, column: Column, rows: Array) -> Any:
        """The TF-IDF of all words, as a sparse matrix."""
        return self.vectorizer.transform(_texts(column, rows))

    def transform(self, column: Column, rows: Array) -> Array:
        if not self.words:
            return np.zeros((len(rows), 0), np.float32)
        counted = self.counted(column, rows)
        result = counted.toarray() if self.projection is None else counted @ self.projection
        return result.clip(-CLIP, CLIP).astype(np.float32)

    def unknown(self, column: Column) -> tuple[Counts, Counts]:
        return {}, {}

    def summary(self, column: Column, rows: Array) -> dict[str, Any]:
        return _about(self.kind, rows, sum(map(bool, _texts(column, rows))))


def _about(kind: str, rows: Array, known: int) -> dict[str, Any]:
    return {"kind": kind, "missing": 1 - known / max(1, len(rows)), "rows": len(rows)}


def _vectorizer(**options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+", **options)


def _texts(column: Column, rows: Array) -> list[str]:
    listed = ["" if gap else text for text, gap in zip(column.distinct, column.missing, strict=True)]
    return [[*listed, ""][code] for code in column.encoded[1][rows].tolist()]


Step = Number | Category | Text
STEPS = TypeAdapter(list[Annotated[Step, Field(discriminator="kind")]])
FITTED: dict[str, Any] = {"categorical": Category, "text": Text}


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How rows of a table become float32 (n, :attr:`width`), as plain data that JSON can hold.

    Attributes:
        steps: encoding of each column that is used.
        dropped: why the other columns are not used.
        label: ``name``, ``task`` and ``domain`` (column of the domains) of the label, and in regression the
            ``mean`` and ``scale`` that :meth:`predictions` undoes.
        columns: report on all columns.
        training: summaries of the rows it was fitted to, to compare new tables with.
        separator: separator of the CSV file whose columns these are.
    """

    steps: tuple[Step, ...]
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    label: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    columns: Sequence[Mapping[str, Any]] = ()
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    separator: str = ""

    @classmethod
    def fit(
        cls,
        source: Any,
        rows: Array | None = None,
        types: Mapping[str, ColumnType] | None = None,
        label: Mapping[str, Any] | None = None,
        columns: Sequence[Mapping[str, Any]] = (),
    ) -> Encoder:
        """Estimate from ``rows`` (by default all) alone how columns of these types are encoded."""
        table = as_table(source)
        types = infer(table, list(table)) if types is None else types
        rows = np.arange(table.rows) if rows is None else rows
        used = {name: about for name, about in types.items() if about.kind != DROPPED}
        dropped = {name: about.why for name, about in types.items() if about.kind == DROPPED}
        steps = [FITTED.get(t.kind, Number).fit(t, table[name], rows) for name, t in used.items()]
        if not sum(step.width for step in steps):
            why = "; ".join(f"{name!r} {reason}" for name, reason in list(dropped.items())[:5])
            raise InputError(f"there is no column to learn from{f': {why}' if why else ''}.")
        training = {step.name: step.summary(table[step.name], rows) for step in steps}
        return cls(tuple(steps), dropped, dict(label or {}), columns, training, table.separator)

    @property
    def width(self) -> int:
        return sum(step.width for step in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(step.name for step in self.steps)

    def written_as(self, table: Table) -> Encoder:
        """The encoder for numbers as they are written in a table."""
        if not table.separator or table.separator == self.separator:
            return self
        steps = (s.written_in(table) if isinstance(s, Number) else s for s in self.steps)
        return dataclasses.replace(self, steps=tuple(steps), separator=table.separator)

    def transform(self, source: Any, rows: Array | None = None) -> NDArray[np.float32]:
        """Rows of a table (by default all) that has these columns; others are ignored."""
        table = as_table(source)
        for name in self.names:
            need_column(name, table, "model")
        rows = np.arange(table.rows) if rows is None else rows
        result, start = np.empty((len(rows), self.width), np.float32), 0
        for step in self.written_as(table).steps:
            result[:, start : start + step.width] = step.transform(table[step.name], rows)
            start += step.width
        return result

    def unknown(self, source: Any) -> Unknown:
        """What a table has that cannot be read, or that training did not have."""
        table = as_table(source)
        found = {step.name: step.unknown(table[step.name]) for step in self.written_as(table).steps}
        unread, new = ({name: pair[n] for name, pair in found.items() if pair[n]} for n in (0, 1))
        return Unknown(unread, new, table.rows)

    def predictions(self, outputs: Array) -> Array:
        """In regression, a model's outputs in the label's own units."""
        own: Array = np.asarray(outputs) * self.label.get("scale", 1.0) + self.label.get("mean", 0.0)
        return own

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "format": FORMAT,
            "label": dict(self.label),
            "columns": STEPS.dump_python(list(self.steps), mode="json"),
            "dropped": dict(self.dropped),
            "columns_report": [dict(about) for about in self.columns],
            "training": dict(self.training),
            "separator": self.separator,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Encoder:
        if content.get("kind") != "table" or content.get("format") != FORMAT:
            result = f"kind {content.get('kind')!r}, format {content.get('format')!r}"
            raise InputError(f"this description of a table is not supported ({result}).")
        return cls(
            tuple(STEPS.validate_python(content["columns"])),
            dict(content["dropped"]),
            dict(content["label"]),
            tuple(content.get("columns_report", ())),
            dict(content.get("training", {})),
            str(content.get("separator", "")),
        )


class Unknown(NamedTuple):
    """By column, the cells of a new table that could not be read, and the categories new to the model."""

    unread: Mapping[str, Counts]
    new: Mapping[str, Counts]
    rows: int

    def notes(self) -> list[str]:
        unread = "could not be read and are treated as missing"
        each = [(self.unread, unread), (self.new, "contain categories that are not in the training data")]
        return [
            f"column {name!r}: {sum(cells.values()):,} of {self.rows:,} cells {what}: {quoted(cells)}"
            for found, what in each
            for name, cells in found.items()
        ]
