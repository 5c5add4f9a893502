"""A table by columns, each of which is decoded once: its distinct cells, its numbers, its categories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shoal.data.tables.cells import DAY, MISSING, Format, boolean, date, is_missing, marks, number
from shoal.data.tables.read import TEXT, cell_text, plain_numbers, read
from shoal.errors import InputError

Array = NDArray[Any]
ISO = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?)?"
READERS = {
    "numeric": number,
    "boolean": lambda text, how: boolean(text),
    "date": lambda text, how: date(text, how.day_first),
}


class Column:
    """The cells of a column of one of the types of :mod:`shoal.data.tables.read`."""

    def __init__(self, cells: pd.Series) -> None:
        self.cells = cells
        self.is_number, self.is_date = cells.dtype.kind == "f", cells.dtype.kind == "M"
        self._values: dict[tuple[str, Format], tuple[Array, dict[str, int]]] = {}
        self._categories: dict[bool, tuple[Array, Array]] = {}

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def encoded(self) -> tuple[list[str], Array]:
        """The distinct cells as text, and for each row the place of its own, −1 where there is no cell."""
        codes, distinct = pd.factorize(self.cells)
        if not pd.api.types.is_string_dtype(distinct):
            return [cell_text(value) for value in distinct], codes
        return distinct.tolist(), codes

    @cached_property
    def counts(self) -> Array:
        """How many rows have each of the distinct cells."""
        distinct, codes = self.encoded
        return np.bincount(codes[codes >= 0], minlength=len(distinct))

    def texts(self, rows: Array | None = None) -> list[str | None]:
        """The cells as text, ``None`` where there is none."""
        distinct, codes = self.encoded
        listed = [*distinct, None]
        return [listed[code] for code in (codes if rows is None else codes[rows]).tolist()]

    @cached_property
    def numbers(self) -> Array | None:
        """Float64 if every cell is a number, or a mark of a missing one; ``None``: they must be looked at."""
        if self.is_number:
            return self.cells.to_numpy()
        return plain_numbers(self.cells, missing=sorted(MISSING)) if self.cells.dtype == TEXT else None

    def values(self, kind: str, how: Format) -> tuple[Array, dict[str, int]]:
        """The numbers of a numeric, boolean or date column, NaN where missing; and cells that are none."""
        if (kind, how) not in self._values:
            self._values[kind, how] = self._read(kind, how)
        return self._values[kind, how]

    def _read(self, kind: str, how: Format) -> tuple[Array, dict[str, int]]:
        if kind == "numeric" and self.numbers is not None and (self.is_number or how.decimal == "."):
            infinite = np.isinf(self.numbers)
            cells = {cell_text(v): int((self.numbers == v).sum()) for v in set(self.numbers[infinite])}
            return np.where(infinite, np.nan, self.numbers), cells
        if kind == "date" and (moments := self._moments) is not None:
            return moments, {}
        distinct, codes = self.encoded
        values, wrong = np.full(len(distinct) + 1, np.nan), dict[str, int]()
        for place, text in enumerate(distinct):
            if not is_missing(text):
                value = READERS[kind](text, how)
                if value is None:
                    wrong[text] = int(self.counts[place])
                else:
                    values[place] = value
        return values[codes], wrong

    @cached_property
    def _moments(self) -> Array | None:
        """Days since 1970-01-01, if all cells are moments, or dates in the form of ISO 8601."""
        moments = self.cells
        if not self.is_date:
            if moments.dtype != TEXT or not moments.str.fullmatch(ISO).all():
                return None
            moments = pd.to_datetime(moments, format="ISO8601", utc=True, errors="coerce")
            if moments.isna().any():
                return None  # of 31 February
            moments = moments.dt.tz_localize(None)
        moments = moments.to_numpy("datetime64[us]")
        return np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / DAY)

    def categories(self, signs: bool | None = None) -> tuple[Array, Array]:
        """The distinct categories and each row's, −1 where missing: 1.0 and 1 are the same category.

        ``signs``: whether - is a category; by default if + is one.
        """
        distinct, codes = self.encoded
        signs = "+" in distinct if signs is None else signs
        if signs not in self._categories:
            places: dict[str, int] = {}
            to = np.full(len(distinct) + 1, -1, np.int64)
            for place, text in enumerate(distinct):
                if not is_missing(text) or (signs and text == "-"):
                    to[place] = places.setdefault(_same_number(text), len(places))
            names = np.empty(len(places), object)
            names[:] = list(places)
            self._categories[signs] = names, to[codes]
        return self._categories[signs]


_DECIMAL = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?(e[+-]?\d{1,2})?", re.IGNORECASE)


def _same_number(text: str) -> str:
    """Category 1.0 of one file is category 1 of another."""
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        return text
    if text.lstrip("+-").isdigit() and text != "-0":
        return text.lstrip("+")  # however large
    try:
        return cell_text(float(text))
    except ValueError:
        return text


class Table(Mapping[str, Column]):
    """The columns of a table by name. ``numbers`` are those of its rows, from 1, in the file."""

    def __init__(self, frame: pd.DataFrame, numbers: Array | None = None) -> None:
        self.frame, self.rows = frame, len(frame)
        self.numbers = np.arange(1, self.rows + 1) if numbers is None else numbers
        self.where, self.separator = frame.attrs.get("where", "the table"), frame.attrs.get("separator", "")
        self.columns = {name: Column(frame[name]) for name in frame.columns}
        self.memo: dict[str, Any] = {}
        """What was found out about it, so that it is found out once."""

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def keep(self, rows: Array) -> Table:
        """Some rows, by a mask."""
        if not rows.any():
            raise InputError(f"{self.where} has no rows but those that are dropped (drop_rows).")
        frame = self.frame[rows].reset_index(drop=True)
        return Table(frame, self.numbers[rows])

    @cached_property
    def marks(self) -> dict[str, int]:
        """How many cells show that the decimal mark of this table is a point, and how many a comma."""
        shown = {".": 0, ",": 0}
        for column in self.values():
            if column.is_number:
                mark = self.frame.attrs["marks"].get(column.cells.name, ".")
                shown[mark] += int((column.cells[:2000] % 1 > 0).sum())
            elif column.cells.dtype == TEXT:
                found = marks(text for text in column.encoded[0][:2000] if not is_missing(text))
                shown = {mark: count + found[mark] for mark, count in shown.items()}
        return shown


def as_table(source: Any, **reading: Any) -> Table:
    """What :func:`~shoal.data.tables.read.read` reads; a file once, as long as it stays as it is."""
    if isinstance(source, Table):
        return source
    if not isinstance(source, str | Path):
        return Table(read(source))
    reading = {name: value for name, value in reading.items() if value not in (None, 0)}
    path = Path(source).expanduser()
    try:
        about = path.stat()
    except (OSError, ValueError) as error:  # a ValueError of a name with a null byte
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    return _file(path, about.st_mtime_ns, about.st_size, tuple(sorted(reading.items())))


@lru_cache(maxsize=4)
def _file(path: Path, modified: int, size: int, reading: tuple[tuple[str, Any], ...]) -> Table:
    return Table(read(path, **dict(reading)))


def row_list(numbers: Any) -> str:
    """Row numbers in words: ``rows 1, 2, 3, 4, 5 and 7 more``."""
    shown = ", ".join(f"{n}" for n in numbers[:5])
    more = f" and {len(numbers) - 5:,} more" if len(numbers) > 5 else ""
    return f"row{'s' * (len(numbers) > 1)} {shown}{more}"
