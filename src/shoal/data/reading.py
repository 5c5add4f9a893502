"""Tables from files and from memory: one :class:`Column` per column, with its cells as they were written.

CSV is read by pyarrow where it is installed and by the standard library elsewhere; both give the same cells.
What the cells mean is decided in :mod:`shoal.data.columns`.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import difflib
import gzip
import importlib.util
import io
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, shown
from shoal.files import check_expansion, check_regular, check_zip, lines_of, open_regular

Array = NDArray[Any]

CSV, PARQUET, EXCEL = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"), (".parquet",), (".xlsx",)
ENDINGS = (*CSV, *PARQUET, *EXCEL)
SEPARATORS = ",;\t|"
LONGEST = 2**24  # characters of a cell; more means that a quotation mark is never closed
BLOCK = 2**24  # bytes that pyarrow parses at a time; a row must fit
SMALL = 2**20  # bytes of a CSV file below which importing pyarrow takes longer than reading without it
ALL = 2**40  # rows: as many at a time as there are
EXACT = 2**53
"""Up to here every whole number is a float64 of its own."""
DAY = 86_400_000_000  # microseconds


def ending(path: Path | str) -> str:
    """The ending that says how a file is read, such as ``.csv.gz``; empty for any other file."""
    name = str(path).lower()
    return next((e for e in ENDINGS if name.endswith(e)), "")


class Column:
    """The cells of one column: ``numbers`` (float64, NaN where missing), or texts as they were written.

    ``dates``: the numbers are days since 1970-01-01 of a column that was typed as dates.
    """

    def __init__(self, numbers: Array | None = None, strings: Any = None, dates: bool = False) -> None:
        self.numbers, self.strings, self.dates = numbers, strings, dates
        if numbers is not None:
            numbers.setflags(write=False)

    def __len__(self) -> int:
        return len(self.strings if self.numbers is None else self.numbers)

    @cached_property
    def encoded(self) -> tuple[Array, Array]:
        """The distinct texts, and for each row the place of its own, −1 where there is no cell."""
        if self.numbers is not None:
            known = ~np.isnan(self.numbers)
            distinct, places = np.unique(self.numbers[known], return_inverse=True)
            codes = np.full(len(self.numbers), -1, np.int64)
            codes[known] = places
            return objects(date_text(v) if self.dates else number_text(v) for v in distinct.tolist()), codes
        if isinstance(self.strings, np.ndarray):
            places_of: dict[str | None, int] = {None: -1}
            codes = np.array([places_of.setdefault(t, len(places_of) - 1) for t in self.strings], np.int64)
            return objects(t for t in places_of if t is not None), codes
        made = self.strings.dictionary_encode()
        codes = made.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return _merged([t.strip() for t in made.dictionary.to_pylist()], codes)

    @cached_property
    def plain(self) -> Array | None:
        """Float64, if every cell is empty or a number as programs write it; ``None`` says nothing."""
        if self.numbers is not None:
            return None if self.dates else self.numbers
        if isinstance(self.strings, np.ndarray):
            return None  # the slow way is as good
        import pyarrow as pa
        from pyarrow import compute as pc

        known = pc.if_else(pc.equal(pc.utf8_trim_whitespace(self.strings), ""), None, self.strings)
        if pc.any(pc.match_substring_regex(known, r"^\s*[+-]?(0[0-9]|[iInN])"), min_count=0).as_py():
            return None
        try:
            result = pc.cast(pc.utf8_trim_whitespace(known), pa.float64())
        except pa.ArrowInvalid:
            return None
        values = np.asarray(result.fill_null(math.nan).to_numpy(zero_copy_only=False))
        return None if (np.abs(values) > EXACT).any() else values  # whole numbers beyond it would be one

    def take(self, rows: Array) -> Column:
        if self.numbers is not None:
            return Column(self.numbers[rows], dates=self.dates)
        if isinstance(self.strings, np.ndarray):
            return Column(strings=self.strings[rows])
        taken = Column(strings=self.strings.take(rows))
        if self.__dict__.get("plain") is not None:
            taken.__dict__["plain"] = self.plain[rows]  # type: ignore[index]
        return taken

    def texts(self) -> list[str | None]:
        """Every cell as text, ``None`` where there is none."""
        distinct, codes = self.encoded
        listed = [*distinct.tolist(), None]
        return [listed[code] for code in codes]


def _merged(texts: list[str], codes: Array) -> tuple[Array, Array]:
    """Texts that became equal by losing spaces at their ends share a place."""
    places: dict[str, int] = {}
    to = np.array([places.setdefault(t, len(places)) for t in texts] + [-1], np.int64)
    return objects(places), to[codes]


class Table(dict[str, Column]):
    """Columns by name, equally long. ``separator`` is a CSV file's own, empty for anything else."""

    separator = ""
    where = "the table"

    def __init__(self, columns: Mapping[str, Column], separator: str = "", where: str = "the table") -> None:
        super().__init__(columns)
        self.separator, self.where = separator, where
        self.memory: dict[Any, Any] = {}
        """What was found out about it, so that it is found out once."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.values())))


def as_table(source: Any) -> Table:
    """The columns of a file, a pandas DataFrame, a pyarrow Table or a mapping of arrays."""
    if isinstance(source, Table):
        return source
    if isinstance(source, (str, Path)):
        return read_table(source)
    columns = {name: as_column(values, name) for name, values in _named(source)}
    if len(sizes := {len(column) for column in columns.values()}) > 1:
        each = {len(column): name for name, column in reversed(columns.items())}  # the first of each length
        some = ", ".join(f"{name!r} {size:,}" for size, name in list(each.items())[::-1][:4])
        raise InputError(f"the columns have different lengths: {some}.")
    if not sizes or sizes == {0}:
        raise InputError("the table has no rows.")
    return Table(columns)


def _named(source: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(source, "iloc") and hasattr(source, "__arrow_c_stream__") and has("pyarrow"):
        import pyarrow as pa

        source = pa.table(source)  # pyarrow, polars and others
    if hasattr(source, "column_names") and hasattr(source, "columns"):
        names, values = list(map(str, source.column_names)), list(source.columns)
    elif hasattr(source, "columns") and hasattr(source, "iloc"):  # pandas
        names = [str(name) for name in source.columns]
        values = [source.iloc[:, n] for n in range(len(names))]
    elif isinstance(source, Mapping):
        names, values = [str(name) for name in source], list(source.values())
    else:
        kind = type(source).__name__
        raise InputError(f"a table must be a file, a DataFrame or a mapping of columns, got {kind}.")
    check_header(names, "the table")
    return zip(names, values, strict=True)


def read_table(path: str | Path) -> Table:
    """The columns of a CSV file (separated by commas, semicolons, tabs or bars), Parquet or Excel file.

    A file is read once as long as it stays as it is; the arrays are shared and cannot be written to.
    """
    path = Path(path).expanduser()
    try:
        about = path.stat()
    except (OSError, ValueError) as error:  # a ValueError of a name with a null byte
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; a table is a .csv, .parquet or .xlsx file.")
    if not path.is_file():
        raise InputError(f"{str(path)!r} is not a regular file; a table is a .csv, .parquet or .xlsx file.")
    return _read(str(path), about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4)
def _read(name: str, modified: int, size: int) -> Table:
    source = rows_of(Path(name))
    assert source is not None
    check_header(source.names, repr(name))
    parts = list(source.parts(source.names, ALL))
    if not parts or not parts[0].rows:
        raise InputError(f"{name!r} has no rows.")
    columns = {column: joined([part[column] for part in parts]) for column in source.names}
    return Table(columns, source.separator, repr(name))


def joined(columns: Sequence[Column]) -> Column:
    """One column after the other."""
    if len(columns) == 1:
        return columns[0]
    if all(c.numbers is not None for c in columns):
        return Column(np.concatenate([c.numbers for c in columns]), dates=columns[0].dates)
    if any(isinstance(c.strings, np.ndarray) or c.numbers is not None for c in columns):
        return Column(strings=objects(t for c in columns for t in c.texts()))
    import pyarrow as pa

    return Column(strings=pa.concat_arrays([c.strings for c in columns]))


def named_columns(cells: Iterable[Any]) -> list[str]:
    """The names in a first line; a column without one gets the name that pandas gives it."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    return [name or f"Unnamed: {place}" for place, name in enumerate(names)]


def check_header(names: Sequence[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{where} has two columns named {twice[0]!r}; rename one.")


def need_column(name: str, columns: Iterable[str], what: str) -> str:
    """``name``, if there is such a column; else an error with the nearest."""
    name, known = str(name), list(columns)
    if name in known:
        return name
    near = difflib.get_close_matches(name.lower(), [c.lower() for c in known], n=1, cutoff=0.5)
    hint = f" Did you mean {next(c for c in known if c.lower() == near[0])!r}?" if near else ""
    there = ", ".join(map(repr, known[:30])) + (", …" if len(known) > 30 else "")
    raise InputError(f"there is no column {name!r} for the {what}.{hint} Columns: {there or 'none'}.")


# Some rows at a time


class Rows:
    """Rows with named columns, which come some at a time, so that a file of any length fits into memory."""

    where: str
    names: list[str]
    separator = ""

    def parts(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        """At most ``size`` rows after the other."""
        raise NotImplementedError


def rows_of(source: Any) -> Rows | None:
    """The rows of a file, a DataFrame or a mapping of columns; ``None`` for anything else."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        kind = ending(path)
        if kind in PARQUET:
            return ParquetRows(path)
        if kind in EXCEL:
            return _Frame(_excel(path), repr(str(path)))
        return CsvRows(path) if kind else None
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        return _Frame(as_table(source), "the table")
    return None


class _Frame(Rows):
    """What is in memory."""

    def __init__(self, table: Table, where: str) -> None:
        self.table, self.where, self.names = table, where, list(table)

    def parts(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        for at in range(0, self.table.rows, size):
            rows = np.arange(at, min(at + size, self.table.rows))
            yield Table({name: self.table[name].take(rows) for name in columns})


class CsvRows(Rows):
    """A CSV file in UTF-8 with a line of names first; the separator is what that line has most of."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, repr(str(path))
        with self._opened() as (self.names, self.separator, rows, before):
            self.head = before + rows.line_num
        if not self.names:
            raise InputError(f"{self.where} has no rows; its first line must name the columns.")

    def parts(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        if has("pyarrow") and self.path.stat().st_size > SMALL:
            yield from self._fast(columns, size)
        else:
            yield from self._slow(columns, size)

    def _fast(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        import pyarrow as pa
        from pyarrow import csv as arrow

        kinds = {str(n): pa.string() for n in range(len(self.names))}
        try:
            with pa.input_stream(str(self.path), compression=_compression(self.path)) as stream:
                table = arrow.open_csv(
                    stream,
                    arrow.ReadOptions(skip_rows=self.head, column_names=list(kinds), block_size=BLOCK),
                    arrow.ParseOptions(delimiter=self.separator, newlines_in_values=True),
                    arrow.ConvertOptions(column_types=kinds, strings_can_be_null=False),
                )
                places, most = [self.names.index(name) for name in columns], check_expansion(self.path)
                for batch in table:
                    most -= batch.nbytes
                    if most < 0:
                        raise InputError(f"{self.where} is far larger than its header says; it is not read.")
                    for at in range(0, batch.num_rows, size):
                        part = batch.slice(at, size)
                        cells = {n: part.column(p) for n, p in zip(columns, places, strict=True)}
                        yield Table({n: Column(strings=c) for n, c in cells.items()})
        except (pa.ArrowInvalid, OSError) as error:
            if "Empty CSV" in str(error):
                return
            for _ in self._slow([], ALL):  # says where the damage is
                pass
            raise InputError(f"{self.where} cannot be read ({_first_line(error)}).") from error

    def _slow(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        places = [self.names.index(name) for name in columns]
        with self._opened() as (_, _, rows, before):
            result: list[list[str]] = []
            for row in rows:
                if not row:
                    continue
                if len(row) != len(self.names):
                    raise InputError(
                        f"{self.where}, line {before + rows.line_num}: {len(row)} values, but the first "
                        f"line names {len(self.names)} columns."
                    )
                result.append([row[place].strip() for place in places])
                if len(result) >= min(size, 2**16):
                    yield self._table(columns, result)
                    result = []
            if result:
                yield self._table(columns, result)

    def _table(self, columns: Sequence[str], rows: list[list[str]]) -> Table:
        cells = zip(*rows, strict=True)
        return Table({n: Column(strings=objects(c)) for n, c in zip(columns, cells, strict=bool(columns))})

    @contextmanager
    def _opened(self) -> Iterator[tuple[list[str], str, Any, int]]:
        """The names of the columns, what separates them, the rows that follow, and the lines before.

        Names are in the first line that is not blank; spreadsheets may write ``sep=;`` above it.
        """
        limit = csv.field_size_limit(LONGEST)
        try:
            with open_regular(self.path) as file, self._text(file) as lines:
                stated, before, start = "", 0, 0
                while (line := lines.readline(LONGEST)) and (not line.strip() or _stated_separator(line)):
                    stated, before, start = _stated_separator(line) or stated, before + 1, lines.tell()
                lines.seek(start)
                # What splits the line of names into the most parts; a comma where nothing does.
                parts = {s: len(next(csv.reader([line], delimiter=s), [])) for s in SEPARATORS}
                separator = stated or max(SEPARATORS, key=lambda s: parts[s])
                rows = csv.reader(lines_of(lines, self.path, check_expansion(self.path)), delimiter=separator)
                yield named_columns(next(rows, [])), separator, rows, before
        except UnicodeDecodeError as error:
            raise InputError(f"{self.where} is not UTF-8 ({error.reason}); save it as UTF-8.") from error
        except (OSError, EOFError, csv.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(f"{self.where} cannot be read: {why}.") from error
        finally:
            csv.field_size_limit(limit)

    def _text(self, file: Any) -> TextIO:
        inside: Any = gzip.GzipFile(fileobj=file) if _compression(self.path) else file
        return io.TextIOWrapper(inside, encoding="utf-8-sig", newline="")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _compression(path: Path) -> str | None:
    return "gzip" if str(path).lower().endswith(".gz") else None


def _stated_separator(line: str) -> str:
    stated = re.fullmatch(rf"sep=([{SEPARATORS}])\s*", line, re.IGNORECASE)
    return stated[1] if stated else ""


class ParquetRows(Rows):
    def __init__(self, path: Path) -> None:
        self.path, self.where = path, repr(str(path))
        _need("pyarrow", self.where, "Parquet")
        with self._open() as table:
            self.names = [str(name) for name in table.schema_arrow.names]

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from pyarrow import ArrowException, parquet

        check_regular(self.path)
        try:
            with parquet.ParquetFile(self.path) as table:
                yield table
        except (OSError, ArrowException) as error:
            raise InputError(f"{self.where} cannot be read ({_first_line(error)}).") from error

    def parts(self, columns: Sequence[str], size: int) -> Iterator[Table]:
        with self._open() as table:
            for part in table.iter_batches(batch_size=min(size, 2**16), columns=list(columns)):
                yield Table({name: as_column(part.column(name), name) for name in columns})


def _excel(path: Path) -> Table:
    """The first sheet of a workbook: a row of names, then rows of values."""
    where = repr(str(path))
    _need("openpyxl", where, "Excel")
    import openpyxl

    try:
        check_zip(path)
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        sheet, *others = book.worksheets
        rows = [row for row in sheet.iter_rows(values_only=True) if any(v is not None for v in row)]
        book.close()
    except InputError:
        raise
    except Exception as error:  # openpyxl raises whatever its parts raise
        raise InputError(f"{where} cannot be read as an Excel workbook ({_first_line(error)}).") from error
    if others:
        more = ", ".join(repr(other.title) for other in others[:5])
        warnings.warn(f"{where}: the first sheet, {sheet.title!r}, is read; not read: {more}.", stacklevel=2)
    if len(rows) < 2:
        raise InputError(f"{where}: the first sheet, {sheet.title!r}, has no rows.")
    wide = max(max((n for n, v in enumerate(row, 1) if v is not None), default=0) for row in rows)
    rows = [[*row, *[None] * wide][:wide] for row in rows]  # some programs leave empty ends out
    names = named_columns(rows[0])
    check_header(names, where)
    return Table({name: as_column([row[n] for row in rows[1:]], name) for n, name in enumerate(names)})


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _need(package: str, where: str, what: str) -> None:
    if not has(package):
        raise InputError(
            f"{where} is {what}, which requires {package}: pip install 'shoal[excel]', or save it as CSV."
        )


# Columns from memory


def as_column(values: Any, name: str) -> Column:
    """Numbers, booleans, dates, texts or a mixture, from a list, an array, a series or pyarrow."""
    if isinstance(values, Column):
        return values
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if hasattr(values, "to_pylist") and hasattr(values, "type"):
        return _from_arrow(values, name)
    if hasattr(values, "iloc"):  # pandas
        values = _from_pandas(values)
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InputError(
                f"column {name!r} has shape {values.shape}; a column must have one value per row."
            )
        if values.dtype.kind in "iuf" and _is_exact(values):
            return Column(values.astype(np.float64))
        if values.dtype.kind == "M":
            return Column(_days(values), dates=True)
        if values.dtype.kind == "m":
            return Column(_ratio(values.astype("timedelta64[us]"), 1_000_000))
        if values.dtype.kind == "f":
            return Column(values.astype(np.float64))
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InputError(f"column {name!r} must be a list or an array, got {shown(values)}.")
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return _from_list([None if _is_missing(v) else v for v in listed], name)


def _from_list(values: list[Any], name: str) -> Column:
    known = [v for v in values if v is not None]
    if all(isinstance(v, (int, float, np.number)) and not isinstance(v, bool | np.bool_) for v in known):
        if all(isinstance(v, float | np.floating) or abs(int(v)) <= EXACT for v in known):
            return Column(np.array([math.nan if v is None else v for v in values], np.float64))
    elif all(isinstance(v, decimal.Decimal | int | float) and not isinstance(v, bool) for v in known):
        if all(abs(v) <= EXACT for v in known):
            return Column(np.array([math.nan if v is None else float(v) for v in values]))
    elif all(isinstance(v, datetime.timedelta | np.timedelta64) for v in known):
        return as_column(
            np.array([np.timedelta64("NaT") if v is None else v for v in values], "m8[us]"), name
        )
    elif all(isinstance(v, datetime.date | np.datetime64) for v in known):
        moments = [np.datetime64("NaT", "us") if v is None else _moment(v) for v in values]
        return Column(_days(np.array(moments, "datetime64[us]")), dates=True)
    return Column(
        strings=objects(None if v is None else _as_text(v, name, n) for n, v in enumerate(values, 1))
    )


def _from_arrow(values: Any, name: str) -> Column:
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Column(strings=values.cast(pa.string()) if not pa.types.is_string(kind) else values)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        moments = values.cast(pa.timestamp("us"), safe=False)  # of nanoseconds the rest is cut off
        return Column(_days(moments.to_numpy(zero_copy_only=False)), dates=True)
    if pa.types.is_duration(kind):
        return as_column(values.cast(pa.duration("us"), safe=False).to_numpy(zero_copy_only=False), name)
    if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and not values.null_count):
        return as_column(values.to_numpy(zero_copy_only=False), name)
    return as_column(values.to_pylist(), name)


def _from_pandas(series: Any) -> Any:
    """A NumPy array of the same values; whole numbers beyond float64 stay themselves."""
    kind = getattr(series.dtype, "kind", "O")
    if kind in "iuf":
        numpy = isinstance(series.dtype, np.dtype)
        if numpy or not series.isna().any():
            return series.to_numpy()
        return (
            series.to_numpy(dtype=object) if kind != "f" else series.to_numpy(np.float64, na_value=math.nan)
        )
    if kind == "M":
        if str(series.dtype).startswith(("date32", "date64")):
            return series.to_numpy(dtype=object)  # pyarrow's days
        zone = getattr(series.dt, "tz", None)
        return (series.dt.tz_convert("UTC").dt.tz_localize(None) if zone else series).to_numpy(
            "datetime64[us]"
        )
    if kind == "m":
        return series.to_numpy("timedelta64[us]")
    return series.to_numpy(dtype=object)


def _is_exact(values: Array) -> bool:
    if values.dtype.kind == "f" or not len(values):
        return True
    return int(values.max()) <= EXACT and int(values.min()) >= -EXACT


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' cannot be compared
        return True
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    return isinstance(value, float | np.floating | decimal.Decimal) and math.isnan(value)


def _moment(value: Any) -> np.datetime64:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(value, "us")


def _days(moments: Array) -> Array:
    return _ratio(moments.astype("datetime64[us]"), DAY)


def _ratio(values: Array, unit: int) -> Array:
    result: Array = values.astype(np.int64) / unit
    result[np.isnat(values)] = math.nan
    return result


def _as_text(value: Any, name: str, row: int) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace").strip()
    if isinstance(value, (list, tuple, dict, set, np.ndarray)):
        kind = type(value).__name__
        raise InputError(f"column {name!r}, row {row}: a {kind}; a cell must be a number or a string.")
    if isinstance(value, (float, np.floating)):
        return number_text(float(value))
    if isinstance(value, datetime.date | np.datetime64):
        return date_text(float(_days(np.array([_moment(value)]))[0]))
    return str(value)


def objects(values: Iterable[Any]) -> Array:
    listed = list(values)
    result = np.empty(len(listed), dtype=object)
    result[:] = listed
    return result


def number_text(value: float) -> str:
    """A number as a category: 3.0 and 3 are the same."""
    return str(int(value)) if value == value // 1 and abs(value) <= EXACT else repr(float(value))


def date_text(days: float) -> str:
    """Days since 1970 as a date, with the time where it is not midnight."""
    moment = np.datetime64(round(days * DAY), "us")
    text = str(moment.astype("datetime64[s]")).replace("T", " ")
    return text.removesuffix(" 00:00:00")
