"""Tables: columns from a file or from memory, and how they become the numbers that a model takes.

A table is read into :class:`Columns`, one array a column. What a column means is decided later, by
:class:`Preprocessing`, from the rows it is fitted to and no others: a domain left out has no part in it.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, check_names

Kind = Literal["numeric", "categorical", "text"]
Array = NDArray[Any]

ENDINGS = (".csv", ".tsv", ".parquet")
MISSING = frozenset({"", "na", "n/a", "nan", "?", "none", "null", "<na>"})
"""What counts as a missing value, in any case."""
SEPARATORS = ",;\t|"
LONGEST = 2**24  # characters of a cell; more means that a quotation mark is never closed
FORMAT = 1  # of a description as plain data

CLIP = 10.0  # standardised numbers end here
FENCE = 10.0  # quartile distances beyond the quartiles: what lies further has no say in the mean
CATEGORIES = 50  # of a column; rarer ones share one
WORDS = 256  # numbers that a text becomes
FURTHEST = sys.float_info.max
FEW = 20  # rows below which nothing is taken for an identifier
IDENTIFIER = re.compile(r"(^|[\W_])(id|ids|uuid|guid|index|key|nr|no)$|^unnamed|^$", re.IGNORECASE)


# Reading


class Columns(dict[str, Array]):
    """Arrays by name, equally long: float64 with NaN where a value is missing, or texts and ``None``."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.values())))

    def without(self, names: Iterable[str]) -> Columns:
        gone = set(names)
        return Columns({name: values for name, values in self.items() if name not in gone})


def as_columns(source: Any) -> Columns:
    """The columns of a CSV or Parquet file, a pandas DataFrame, a pyarrow Table or a mapping of arrays."""
    if isinstance(source, Columns):
        return source
    if isinstance(source, (str, Path)):
        return read_table(source)
    if hasattr(source, "to_pydict"):  # pyarrow
        source = _from_arrow(source)
    elif hasattr(source, "columns") and hasattr(source, "iloc"):  # pandas
        named = [str(name) for name in source.columns]
        _check_header(named, "the frame")
        source = {name: _from_pandas(source.iloc[:, n]) for n, name in enumerate(named)}
    if not isinstance(source, Mapping):
        kind = type(source).__name__
        raise InputError(f"a table must be a file, a DataFrame or a mapping of columns, got {kind}.")
    columns = Columns({str(name): _plain(values, str(name)) for name, values in source.items()})
    if len(sizes := {len(values) for values in columns.values()}) > 1:
        told = ", ".join(f"{name!r} {len(values)}" for name, values in list(columns.items())[:4])
        raise InputError(f"the columns are not equally long: {told}.")
    if not sizes or sizes == {0}:
        raise InputError("the table has no rows.")
    return columns


def read_table(path: str | Path) -> Columns:
    """The columns of a CSV file (separated by commas, semicolons, tabs or bars) or a Parquet file.

    A file is read once as long as it stays as it is; the arrays are shared and cannot be written to.
    """
    path = Path(path).expanduser()
    try:
        about = path.stat()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; a table is a .csv or .parquet file.")
    return _read(str(path), about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4)
def _read(name: str, modified: int, size: int) -> Columns:
    path = Path(name)
    columns = Columns(_parquet(path) if path.suffix.lower() == ".parquet" else _csv(path))
    if not columns or not len(next(iter(columns.values()))):
        raise InputError(f"{name!r} has no rows.")
    for values in columns.values():
        values.setflags(write=False)
    return columns


def _csv(path: Path) -> dict[str, Array]:
    try:
        with opened_csv(path) as table:
            header, separator = table.names, table.separator
            _check_header(header, repr(str(path)))
            content = [_whole(row, header, table.line, path) for row in table.rows if row]
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 ({error.reason}); save it as UTF-8.") from error
    except (OSError, csv.Error) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}).") from error
    columns = {}
    for name, values in zip(header, zip(*content, strict=True), strict=bool(content)):
        cells = [text.strip() for text in values]
        column = _objects(_points(cells) if separator == ";" else cells)
        found = numbers(column)
        columns[name] = column if found is None else found
    return columns


@dataclass(frozen=True)
class CsvTable:
    """An open CSV file: the names of its columns, what separates them, and the rows that follow."""

    names: list[str]
    separator: str
    rows: Any
    before: int
    """Lines before that of the names."""

    @property
    def line(self) -> int:
        """Where the last row that was read ends, as an editor counts."""
        return self.before + int(self.rows.line_num)


@contextmanager
def opened_csv(path: Path) -> Iterator[CsvTable]:
    """A CSV file in UTF-8 whose first line that is not blank names the columns.

    Spreadsheets may write ``sep=;`` above it; then that is the separator.
    """
    limit = csv.field_size_limit(LONGEST)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            said, before, start = "", 0, 0
            while (line := lines.readline(LONGEST)) and (not line.strip() or _said_separator(line)):
                said, before, start = _said_separator(line) or said, before + 1, lines.tell()
            lines.seek(start)
            separator = said or _separator(line)
            rows = csv.reader(lines, delimiter=separator)
            yield CsvTable([name.strip() for name in next(rows, [])], separator, rows, before)
    finally:
        csv.field_size_limit(limit)


def _said_separator(line: str) -> str:
    found = re.fullmatch(rf"sep=([{SEPARATORS}])\s*", line, re.IGNORECASE)
    return found[1] if found else ""


def _separator(line: str) -> str:
    """What splits the line of names into the most parts; a comma where nothing does."""
    parts = {s: len(next(csv.reader([line], delimiter=s), [])) for s in SEPARATORS}
    return max(SEPARATORS, key=lambda s: parts[s])


def _whole(row: list[str], header: list[str], line: int, path: Path) -> list[str]:
    if len(row) != len(header):
        raise InputError(
            f"{str(path)!r}, line {line}: {len(row)} values, but the first line names {len(header)} columns."
        )
    return row


_COMMA = re.compile(r"[+-]?\d*,?\d+(e[+-]?\d+)?", re.IGNORECASE)


def _points(texts: list[str]) -> list[str]:
    """Where semicolons separate, numbers may have a decimal comma: with a point, if all of a column are."""
    some = [t for t in texts if t.lower() not in MISSING]
    if any("," in t for t in some) and all(_COMMA.fullmatch(t) for t in some):
        return [t.replace(",", ".") for t in texts]
    return texts


def _check_header(names: Sequence[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{where} has two columns called {twice[0]!r}; rename one.")


def _parquet(path: Path) -> dict[str, Array]:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'shoal[parquet]', or save it as CSV."
        )
    from pyarrow import ArrowException, parquet

    try:
        return _from_arrow(parquet.ParquetFile(path).read())
    except (OSError, ArrowException) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}).") from error


def _from_arrow(table: Any) -> dict[str, Array]:
    _check_header(table.column_names, "the table")
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        number = any(word in str(column.type) for word in ("int", "float", "double", "decimal"))
        flat = number and "<" not in str(column.type)
        values = [math.nan if v is None else float(v) for v in column.to_pylist()] if flat else None
        found[str(name)] = np.array(values) if values is not None else _plain(column.to_pylist(), str(name))
    return found


def _from_pandas(series: Any) -> Any:
    """Nullable numbers as floats, everything else as objects."""
    if series.dtype.kind in "iuf":
        return series.to_numpy(dtype=np.float64, na_value=math.nan)
    return series.to_numpy(dtype=object)


def _plain(values: Any, name: str) -> Array:
    """A column as float64, or as an object array of texts and ``None``."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf" and values.ndim == 1:
        return values.astype(np.float64)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise InputError(f"column {name!r} has shape {values.shape}; a column is one value a row.")
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in listed):
        try:
            return np.array([math.nan if v is None else v for v in listed], np.float64)
        except OverflowError as error:
            raise InputError(f"column {name!r}: a whole number is too large ({error}).") from error
    return _objects([_as_text(v, name, n) for n, v in enumerate(listed, 1)])


def _as_text(value: Any, name: str, row: int) -> str | None:
    # pandas' NA cannot be compared, so it is known by its type's name
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (list, tuple, dict, set, np.ndarray)):
        kind = type(value).__name__
        raise InputError(f"column {name!r}, row {row}: a {kind}; a table has one number or text a cell.")
    if isinstance(value, (float, np.floating)):
        return None if math.isnan(value) else number_text(float(value))
    return str(value)


def _objects(values: Iterable[Any]) -> Array:
    listed = list(values)
    found = np.empty(len(listed), dtype=object)
    found[:] = listed
    return found


def need_column(name: str, columns: Iterable[str], what: str) -> str:
    """``name``, if there is such a column; else an error with the nearest."""
    known = list(columns)
    if name in known:
        return name
    near = difflib.get_close_matches(name.lower(), [c.lower() for c in known], n=1, cutoff=0.5)
    hint = f" Did you mean {next(c for c in known if c.lower() == near[0])!r}?" if near else ""
    there = ", ".join(map(repr, known[:30])) + (", …" if len(known) > 30 else "")
    raise InputError(f"there is no column {name!r} for the {what}.{hint} Columns: {there or 'none'}.")


# Values


def number_text(value: float) -> str:
    """A number as a category: 3.0 and 3 are the same."""
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))


def texts(column: Array) -> Array:
    """Any column as texts, ``None`` where a value is missing."""
    if column.dtype != object:
        return _objects(None if math.isnan(v) else number_text(v) for v in column.tolist())
    return _objects(None if v is None or v.lower() in MISSING else _same_number(v) for v in column)


_DECIMAL = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?(e[+-]?\d{1,2})?", re.IGNORECASE)


def _same_number(text: str) -> str:
    """Category 1.0 of one file is category 1 of another."""
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        return text
    try:
        return number_text(float(text))
    except ValueError:
        return text


def numbers(column: Array) -> NDArray[np.float64] | None:
    """A column as float64 with NaN where a value is missing; ``None`` if some value is no number.

    Numbers with zeros in front, such as 01234, are codes and no numbers.
    """
    if column.dtype != object:
        return column
    try:
        return np.array([_number(v) for v in column], np.float64)
    except ValueError:
        return None


_CODE = re.compile(r"[+-]?0\d|.*_")  # Python itself would take 1_000 for a number


def _number(text: str | None) -> float:
    if text is None or text.lower() in MISSING:
        return math.nan
    if _CODE.match(text):
        raise ValueError(text)
    return float(text)


def _needed_numbers(column: Array, name: str) -> NDArray[np.float64]:
    """Of a column that must hold numbers; the first that is none is named, and so is an infinite one."""
    found = numbers(column)
    if found is None:
        for row, text in enumerate(column, 1):
            try:
                _number(text)
            except ValueError:
                raise InputError(
                    f"column {name!r}, row {row}: {text!r} is not a number, and it is to be numeric."
                ) from None
    assert found is not None
    check_finite(found, name)
    return found


def check_finite(values: NDArray[np.float64], name: str) -> None:
    if (wrong := np.isinf(values)).any():
        row = int(np.argmax(wrong)) + 1
        raise InputError(
            f"column {name!r}, row {row}: {values[row - 1]}; a number must be finite or missing."
        )


# From columns to what a model takes


class Step(Protocol):
    """What becomes of one column: ``width`` numbers a row."""

    name: str

    @property
    def width(self) -> int: ...
    def transform(self, column: Array) -> NDArray[np.float32]: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Number:
    """(v − mean) / scale within ±:data:`CLIP`, 0 where it is missing; and a column that says where.

    The mean and deviation are of values brought within ``low`` and ``high``, so that a few that lie far out
    do not squeeze the others together. ``scale`` is 0 where all known values were equal: then only the column
    that says where it is missing remains.
    """

    name: str
    mean: float
    scale: float
    low: float
    high: float
    indicator: bool

    @classmethod
    def fit(cls, name: str, values: NDArray[np.float64]) -> Number | str:
        """Or why the column is of no use."""
        known, indicator = values[~np.isnan(values)], bool(np.isnan(values).any())
        if not len(known):
            return "is empty"
        largest = float(np.abs(known).max()) or 1.0
        shares = known / largest  # whatever their size, sums and squares stay finite
        first, third = np.quantile(shares, [0.25, 0.75])
        far = FENCE * float(third - first) or math.inf
        low, high = float(first) - far, float(third) + far
        shares = shares.clip(low, high)
        mean, deviation = float(shares.mean()), float(shares.std())
        scale = deviation * largest if deviation > 1e-12 else 0.0
        if not scale and not indicator:
            return "has one value alone"
        low, high = max(low * largest, -FURTHEST), min(high * largest, FURTHEST)
        return cls(name, mean * largest, scale, low, high, indicator)

    @property
    def width(self) -> int:
        return (self.scale > 0) + self.indicator

    def transform(self, column: Array) -> NDArray[np.float32]:
        values = _needed_numbers(column, self.name)
        missing = np.isnan(values)
        parts = []
        if self.scale > 0:
            with np.errstate(over="ignore"):  # beyond the clip it makes no difference
                parts.append(((values.clip(self.low, self.high) - self.mean) / self.scale).clip(-CLIP, CLIP))
        if self.indicator:
            parts.append(missing)
        return np.where(
            missing[:, None] & (np.arange(len(parts)) < (self.scale > 0)), 0, _stack(parts)
        ).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "numeric", **self.__dict__}


@dataclass(frozen=True)
class Category:
    """A column for each of ``values``, all 0 where another value is or none.

    With ``other`` there were too many values: the rarer ones share a last column, and so does one that was
    never seen.
    """

    name: str
    values: tuple[str, ...]
    other: bool

    @classmethod
    def fit(cls, name: str, values: Array) -> Category | str:
        counts = Counter(v for v in values if v is not None)
        if not counts:
            return "is empty"
        if len(counts) == 1 and counts.total() == len(values):
            return "has one value alone"
        kept = sorted(counts, key=lambda v: (-counts[v], v))[:CATEGORIES]
        return cls(name, tuple(sorted(kept)), len(counts) > CATEGORIES)

    @property
    def width(self) -> int:
        return len(self.values) + self.other

    def transform(self, column: Array) -> NDArray[np.float32]:
        place = {value: n for n, value in enumerate(self.values)}
        beyond = len(self.values) if self.other else -1
        at = np.array([-1 if v is None else place.get(v, beyond) for v in texts(column)], np.int64)
        found = np.zeros((len(column), self.width), np.float32)
        rows = np.flatnonzero(at >= 0)
        found[rows, at[rows]] = 1
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "categorical", **self.__dict__, "values": list(self.values)}


@dataclass(frozen=True)
class Text:
    """A bag of words in ``len(idf)`` numbers: words share them by a hash that is the same everywhere.

    A word that comes n times counts (1 + log n) · idf, where idf = 1 + log((1 + rows) / (1 + rows with it));
    a row's numbers then have length 1, or 0 where there is no text.
    """

    name: str
    idf: tuple[float, ...]

    @classmethod
    def fit(cls, name: str, values: Array) -> Text | str:
        rows = np.zeros(WORDS)
        for text in values:
            rows[sorted(_words(text, WORDS))] += 1
        if not rows.any():
            return "is empty"
        idf = 1 + np.log((1 + len(values)) / (1 + rows))
        return cls(name, tuple(np.round(idf, 6).tolist()))

    @property
    def width(self) -> int:
        return len(self.idf)

    def transform(self, column: Array) -> NDArray[np.float32]:
        found = np.zeros((len(column), self.width))
        for row, text in enumerate(texts(column)):
            for place, count in _words(text, self.width).items():
                found[row, place] = (1 + math.log(count)) * self.idf[place]
        length = np.linalg.norm(found, axis=1, keepdims=True)
        return (found / np.where(length > 0, length, 1)).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "text", "name": self.name, "idf": list(self.idf)}


_WORD = re.compile(r"\w+")


def _words(text: str | None, width: int) -> Counter[int]:
    """How often each place is met. Python's own hash differs from process to process."""
    found = _WORD.findall((text or "").lower())
    return Counter(zlib.crc32(word.encode()) % width for word in found)


def _stack(parts: Sequence[Array]) -> Array:
    return np.stack(parts, axis=1)


STEPS: dict[str, Any] = {"numeric": Number, "categorical": Category, "text": Text}


@dataclass(frozen=True)
class Preprocessing:
    """How rows of a table become float32 (n, :attr:`width`), as plain data that JSON can hold.

    ``dropped`` says of columns that are not used why. ``label`` is what is predicted: its ``name``, ``task``,
    ``domain`` (the column with the domains), and in regression the ``mean`` and ``scale`` that
    :meth:`predictions` undoes.
    """

    steps: tuple[Step, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    label: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        columns: Columns,
        rows: Array | None = None,
        kinds: Mapping[str, str] | None = None,
        label: Mapping[str, Any] | None = None,
    ) -> Preprocessing:
        """Looks at ``rows`` of ``columns`` (by default all) and at no others.

        ``kinds`` says ``numeric``, ``categorical`` or ``text`` of some columns; the kinds of others are found
        out. Columns that are empty, have one value alone or look like an identifier are dropped.
        """
        kinds = {str(k): str(v) for k, v in (kinds or {}).items()}
        check_names("kind of a column:", kinds.values(), get_args(Kind))
        for name, kind in kinds.items():
            need_column(name, columns, "kinds")
            if kind == "numeric":  # here, where rows have the numbers that the user knows
                _needed_numbers(columns[name], name)
        steps, dropped = [], {}
        for name, column in columns.items():
            found = _fitted(name, column if rows is None else column[rows], kinds.get(name))
            if isinstance(found, str):
                dropped[name] = found
            else:
                steps.append(found)
        if not steps:
            why = "; ".join(f"{name!r} {reason}" for name, reason in list(dropped.items())[:5])
            raise InputError(f"no column is left to learn from{f': {why}' if why else ''}.")
        return cls(tuple(steps), dropped, dict(label or {}))

    @property
    def width(self) -> int:
        return sum(step.width for step in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(step.name for step in self.steps)

    def transform(self, table: Any) -> NDArray[np.float32]:
        """The rows of a table (see :func:`as_columns`) that has all columns; others are not looked at."""
        columns = as_columns(table)
        for name in self.names:
            need_column(name, columns, "model")
        return np.concatenate([step.transform(columns[step.name]) for step in self.steps], axis=1)

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
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preprocessing:
        if content.get("kind") != "table" or content.get("format") != FORMAT:
            said = f"kind {content.get('kind')!r}, format {content.get('format')!r}"
            raise InputError(f"this is no description of a table that is known here ({said}).")
        return cls(
            tuple(_step(about) for about in content["columns"]),
            dict(content["dropped"]),
            dict(content["label"]),
        )


def _step(about: Mapping[str, Any]) -> Step:
    parts = {k: tuple(v) if isinstance(v, list) else v for k, v in about.items() if k != "kind"}
    step: Step = STEPS[about["kind"]](**parts)
    return step


def _fitted(name: str, column: Array, kind: str | None) -> Step | str:
    """A column's step, or why it is dropped."""
    if kind is None and (why := _identifier(name, column)):
        return why
    kind = kind or kind_of(column)
    values = _needed_numbers(column, name) if kind == "numeric" else texts(column)
    found: Step | str = STEPS[kind].fit(name, values)
    return found


def kind_of(column: Array) -> Kind:
    """Numbers are numeric; texts of several words that mostly differ are text, others categories."""
    if numbers(column) is not None:
        return "numeric"
    known = [v for v in texts(column) if v is not None]
    words = sum(len(_WORD.findall(v)) for v in known) / max(1, len(known))
    return "text" if words >= 3 and len(set(known)) > max(CATEGORIES, len(known) // 2) else "categorical"


def _identifier(name: str, column: Array) -> str:
    """Why a column is taken for an identifier, if it is: it tells rows apart and nothing else."""
    values = numbers(column)
    if values is None:
        known = [v for v in texts(column) if v is not None]
        if len(known) >= FEW and len(set(known)) == len(known) and kind_of(column) != "text":
            return "is different in every row, as an identifier is"
    elif IDENTIFIER.search(name):
        some = values[~np.isnan(values)]
        if len(some) >= FEW and len(np.unique(some)) == len(some) and (np.floor(some) == some).all():
            return "is different in every row and is called like an identifier"
    return ""
