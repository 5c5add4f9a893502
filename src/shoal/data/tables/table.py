"""The columns of a table, each of which is parsed once: its distinct cells, and what they mean."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc

from shoal.data.tables import cells
from shoal.data.tables.cells import Format
from shoal.data.tables.read import cell_text, read
from shoal.errors import InputError

Array = NDArray[Any]


class Column:
    """A column of float64 (``is_number``) or of text."""

    def __init__(self, series: pd.Series) -> None:
        self.series, self.is_number = series, series.dtype.kind == "f"
        self._values: dict[tuple[str, Format], tuple[Array, dict[str, int]]] = {}
        self._categories: dict[bool, tuple[Array, Array]] = {}

    def __len__(self) -> int:
        return len(self.series)

    @property
    def arrow(self) -> Any:
        """The cells of a column of text."""
        return pa.chunked_array(self.series).cast(pa.string()).combine_chunks()

    @cached_property
    def encoded(self) -> tuple[Any, Array]:
        """The distinct cells as an Arrow array of text, and each row's place there, −1 where it is empty."""
        if self.is_number:
            codes, distinct = pd.factorize(self.series)
            return pa.array(map(cell_text, distinct), pa.string()), codes
        found = self.arrow.dictionary_encode()
        return found.dictionary, found.indices.fill_null(-1).to_numpy()

    @cached_property
    def distinct(self) -> list[str]:
        """The distinct cells as text, in the order of the rows."""
        texts: list[str] = self.encoded[0].to_pylist()
        return texts

    @cached_property
    def counts(self) -> Array:
        """How many rows have each of the distinct cells."""
        texts, codes = self.encoded
        return np.bincount(codes[codes >= 0], minlength=len(texts))

    @cached_property
    def missing(self) -> Array:
        """Which of the distinct cells are marks of a missing one."""
        return cells.is_missing(self.encoded[0])

    def texts(self, rows: Array | None = None) -> list[str | None]:
        """The cells as text, ``None`` where there is none."""
        codes, listed = self.encoded[1], [*self.distinct, None]
        return [listed[code] for code in (codes if rows is None else codes[rows]).tolist()]

    @cached_property
    def plain(self) -> tuple[Array, str] | None:
        """Of a column of numbers as programs write them: float64, NaN where missing, and the decimal mark."""
        if self.is_number:
            return self.series.to_numpy(), "."
        if (found := cells.plain_numbers(self.arrow)) is not None:
            return found
        return cells.plain_numbers(pc.if_else(pa.array(cells.is_missing(self.arrow)), None, self.arrow))

    @cached_property
    def numerals(self) -> cells.Numerals:
        """The distinct cells as numbers that are not read yet."""
        return cells.numerals(self.encoded[0])

    @cached_property
    def units(self) -> list[str]:
        """The unit of each distinct cell; empty where there is none."""
        return cells.units(self.encoded[0], self.numerals)

    @cached_property
    def marks(self) -> dict[str, int]:
        """What its text shows of the decimal mark (:func:`~shoal.data.tables.cells.marks`)."""
        if self.plain is None:
            return cells.marks(self.numerals.body)
        shown = cells.marks(pc.utf8_ltrim(self.arrow[:2000], characters="+-"))
        if shown["."] or shown[","] or not self.plain[1]:
            return shown
        return cells.marks(pc.utf8_ltrim(self.arrow, characters="+-"))

    def values(self, kind: str, how: Format) -> tuple[Array, dict[str, int]]:
        """The numbers of a numeric, boolean or date column, NaN where missing; and cells that are none."""
        if kind == "numeric" and self.is_number:
            values = self.series.to_numpy()
            infinite = np.isinf(values)
            wrong = {cell_text(v): int((values == v).sum()) for v in np.unique(values[infinite])}
            return np.where(infinite, np.nan, values), wrong
        if kind == "numeric" and self.plain is not None and self.plain[1] in ("", how.decimal):
            return self.plain[0], {}
        if (kind, how) not in self._values:
            texts, codes = self.encoded
            if kind == "numeric":
                found = cells.numbers(texts, how, self.numerals)
            else:
                found = cells.dates(texts, how) if kind == "date" else cells.booleans(texts)
            found = np.where(self.missing, np.nan, found)
            bad = {
                self.distinct[n]: int(self.counts[n]) for n in np.flatnonzero(np.isnan(found) & ~self.missing)
            }
            self._values[kind, how] = np.append(found, np.nan)[codes], bad
        return self._values[kind, how]

    def categories(self, signs: bool | None = None) -> tuple[Array, Array]:
        """The distinct categories and each row's, −1 where missing: 1.0 and 1 are the same category.

        ``signs``: whether - is a category; by default if + is one.
        """
        signs = "+" in self.distinct if signs is None else signs
        if signs not in self._categories:
            texts, codes = self.encoded
            known = ~self.missing | (np.array([text == "-" for text in self.distinct], bool) & signs)
            names = np.array(self.distinct, object)[known]
            decimal = r"[+-]?(?:0|[1-9][0-9]*)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?"
            written = cells.matches(texts, decimal)[known] & cells.matches(texts, ".*[0-9].*")[known]
            names[written] = [_same_number(text) for text in names[written]]
            places, names = pd.factorize(names)
            to = np.full(len(texts) + 1, -1, np.int64)
            to[:-1][known] = places
            self._categories[signs] = names, to[codes]
        return self._categories[signs]


def _same_number(text: str) -> str:
    """Category 1.0 of one file is category 1 of another; whole numbers may be as large as they are."""
    whole = text.lstrip("+-").isdigit() and text != "-0"
    return text.lstrip("+") if whole else cell_text(float(text))


class Table(dict[str, Column]):
    """The columns of a table by name. ``numbers`` are those of its rows, from 1, in the file."""

    def __init__(self, frame: pd.DataFrame, numbers: Array | None = None) -> None:
        super().__init__((name, Column(frame[name])) for name in frame.columns)
        self.frame, self.rows = frame, len(frame)
        self.numbers = np.arange(1, self.rows + 1) if numbers is None else numbers
        self.where: str = frame.attrs["where"]
        self.separator: str = frame.attrs["separator"]

    def keep(self, rows: Array) -> Table:
        """Some rows, by a mask."""
        if not rows.any():
            raise InputError(f"{self.where} has no rows but those that are dropped (drop_rows).")
        return Table(self.frame[rows].reset_index(drop=True), self.numbers[rows])

    @cached_property
    def decimal(self) -> str:
        """The decimal mark that most cells show, if any does; else empty."""
        point = comma = 0
        for column in self.values():
            if column.is_number:
                point += int((column.series[:2000] % 1 > 0).sum())
            else:
                point, comma = point + column.marks["."], comma + column.marks[","]
        return "," if comma > point else "." * (point > 0)


def as_table(source: Any, **reading: Any) -> Table:
    """What :func:`~shoal.data.tables.read.read` reads; a file once, as long as it stays as it is."""
    if isinstance(source, Table):
        return source
    if not isinstance(source, str | Path):
        return Table(read(source))
    reading = {name: value for name, value in reading.items() if value not in (None, 0)}
    path = Path(source).expanduser()
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    return _file(path, changed, tuple(sorted(reading.items())))


@lru_cache(maxsize=2)
def _file(path: Path, changed: int, reading: tuple[tuple[str, Any], ...]) -> Table:
    return Table(read(path, **dict(reading)))


def row_list(numbers: Any) -> str:
    """Row numbers in words: ``rows 1, 2, 3, 4, 5 and 7 more``."""
    shown = ", ".join(f"{n}" for n in numbers[:5])
    more = f" and {len(numbers) - 5:,} more" if len(numbers) > 5 else ""
    return f"row{'s' * (len(numbers) > 1)} {shown}{more}"
