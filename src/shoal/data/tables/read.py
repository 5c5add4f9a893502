"""Tables as pandas DataFrames, from files and from memory.

A column that :func:`read` returns is ``float64`` where it came as numbers, and text (pandas' ``string``,
without spaces at its ends) where it did not. What text means is decided for the whole column, in
:mod:`shoal.data.tables.kinds`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shoal.errors import InputError, did_you_mean

CSV, PARQUET, EXCEL = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"), (".parquet",), (".xlsx",)
ENDINGS = (*CSV, *PARQUET, *EXCEL)
SEPARATORS = ",;\t|"
TEXT = pd.StringDtype("pyarrow")
EXACT = 2**53
"""Up to here every whole number is a float64 of its own."""


def ending(path: Path | str) -> str:
    """The ending that says how a file is read, such as ``.csv.gz``; empty for any other file."""
    name = str(path).lower()
    return next((e for e in ENDINGS if name.endswith(e)), "")


def is_table(source: Any) -> bool:
    """Whether :func:`read` takes it: the name of a table's file, a DataFrame, or a mapping of columns."""
    if isinstance(source, str | Path):
        return bool(ending(source))
    return isinstance(source, Mapping) or hasattr(source, "columns") or hasattr(source, "__arrow_c_stream__")


def read(
    source: Any,
    *,
    encoding: str | None = None,
    sheet: str | int | None = None,
    skip_rows: int = 0,
) -> pd.DataFrame:
    """The columns of a file, a DataFrame (of pandas, polars or pyarrow) or a mapping of columns.

    Args:
        source: path (.csv, .tsv, .csv.gz, .parquet, .xlsx), DataFrame or mapping.
        encoding: of a CSV file (default: UTF-8).
        sheet: name of an Excel sheet, or its number from 0 (default: the first).
        skip_rows: lines, or rows of an Excel sheet, above the line that names the columns.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        where = repr(str(path))
        frame = _of_file(path, where, encoding, sheet, skip_rows)
    else:
        where, frame = "the table", _in_memory(source)
    names = [str(name) for name in frame.columns]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{where} has two columns named {twice[0]!r}; rename one.")
    if not len(frame):
        raise InputError(f"{where} has no rows.")
    columns = {name: _plain(frame.iloc[:, place], name) for place, name in enumerate(names)}
    result = pd.DataFrame(columns, copy=False)
    result.attrs = {"where": where, "separator": frame.attrs.get("separator", "")}
    return result


def need_column(name: str, columns: Iterable[str], what: str) -> str:
    """``name``, if there is such a column; else an error with the nearest."""
    name, known = str(name), list(columns)
    if name in known:
        return name
    listed = ", ".join(map(repr, known[:30])) + (", …" if len(known) > 30 else "")
    hint = did_you_mean(name, known)
    raise InputError(f"there is no column {name!r} for the {what}.{hint} Columns: {listed or 'none'}.")


# Files


def _of_file(path: Path, where: str, encoding: str | None, sheet: Any, skip_rows: int) -> pd.DataFrame:
    kind = ending(path)
    if path.is_dir():
        raise InputError(f"{where} is a folder; a table is a .csv, .parquet or .xlsx file.")
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        raise InputError(f"{encoding!r} is no encoding; one is cp1252.", "encoding") from error
    try:
        path.stat()
        if kind in PARQUET:
            return _in_memory(pd.read_parquet(path, dtype_backend="pyarrow"))
        if kind in EXCEL:
            return _excel(path, where, sheet, skip_rows)
        return _csv(path, where, encoding or "utf-8", skip_rows)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not {error.encoding}; set encoding, such as cp1252.") from error
    except Exception as error:  # whatever a library raises that reads a damaged file
        why = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{where} cannot be read: {why}.") from error


def _csv(path: Path, where: str, encoding: str, skip_rows: int) -> pd.DataFrame:
    """All cells as text; a row that is longer or shorter than the first one is refused."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    with_mark = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
    names, separator, above = _header(path, with_mark, skip_rows)
    if not names:
        raise InputError(f"{where} has no rows; its first line must name the columns.")
    numbered = [str(n) for n in range(len(names))]
    wrong: list[Any] = []

    def ragged(row: Any) -> str:
        wrong.append(row)
        return "error"

    reading = arrow.ReadOptions(
        skip_rows=above,
        column_names=numbered,
        encoding=encoding,
        block_size=2**24,  # a row must fit
        use_threads=False,  # only then are rows counted
    )
    parsing = arrow.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=ragged)
    text = arrow.ConvertOptions(column_types=dict.fromkeys(numbered, pa.string()), strings_can_be_null=False)
    compression = "gzip" if path.suffix.lower() == ".gz" else None
    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            table = arrow.read_csv(stream, reading, parsing, text)
    except pa.ArrowInvalid as error:
        if wrong:
            row = wrong[0]
            raise InputError(
                f"{where}, row {row.number - above}: {row.actual_columns} values, but the first line names "
                f"{len(names)} columns."
            ) from error
        if "Empty CSV" in str(error):
            raise InputError(f"{where} has no rows.") from error
        if "invalid UTF8" in str(error):
            number = re.search(r"Row #(\d+)", str(error))
            at = f" in row {int(number[1]) - above}" if number else ""
            raise InputError(f"{where} is not UTF-8{at}; set encoding, such as cp1252.") from error
        raise
    frame = table.to_pandas(types_mapper={pa.string(): TEXT}.get)
    frame.columns = pd.Index(names)
    frame.attrs["separator"] = separator
    return frame


def _header(path: Path, encoding: str, skip_rows: int) -> tuple[list[str], str, int]:
    """The names of the columns, what separates them, and how many lines they and what is above them take.

    Names are in the first line that is not blank; spreadsheets may write ``sep=;`` above it.
    """
    stated, above = "", 0
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding=encoding, newline="") as file:
        for line in file:
            above += 1
            said = re.fullmatch(rf"sep=([{SEPARATORS}])\s*", line, re.IGNORECASE)
            stated = said[1] if said else stated
            if above <= skip_rows or said or not line.strip():
                continue
            separator = stated or max(
                SEPARATORS, key=lambda s: len(next(csv.reader([line], delimiter=s), []))
            )
            rows = csv.reader([line, *file] if line.count('"') % 2 else [line], delimiter=separator)
            return _names(next(rows, [])), separator, above + rows.line_num - 1
    return [], ",", above


def _names(cells: Iterable[Any]) -> list[str]:
    """The names in a first line; a column without one gets the name that pandas gives it."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    return [name or f"Unnamed: {place}" for place, name in enumerate(names)]


def _excel(path: Path, where: str, sheet: str | int | None, skip_rows: int) -> pd.DataFrame:
    """A sheet of a workbook: a row of names, then rows of values; empty rows are left out."""
    if importlib.util.find_spec("openpyxl") is None:
        raise InputError(f"{where} requires openpyxl: pip install 'shoal[excel]', or save it as CSV.")
    with path.open("rb") as file:
        if file.read(8) == bytes.fromhex("D0CF11E0A1B11AE1"):
            raise InputError(f"{where} has a password, or is an old .xls file; save it as .xlsx without one.")
    with pd.ExcelFile(path, engine="openpyxl") as book:
        titles = [str(title) for title in book.sheet_names]
        if sheet is not None and sheet not in (*titles, *range(len(titles))):
            known = ", ".join(map(repr, titles))
            raise InputError(
                f"{where} has no sheet {sheet!r}.{did_you_mean(str(sheet), titles)} Sheets: {known}.", "sheet"
            )
        chosen = sheet if isinstance(sheet, str) else titles[sheet or 0]
        cells = {"header": None, "dtype": object, "na_filter": False}
        frame = pd.read_excel(book, sheet_name=chosen, skiprows=skip_rows, **cells)
    if sheet is None and len(titles) > 1:
        others = ", ".join(map(repr, titles[1:6]))
        warnings.warn(f"{where}: the sheet {chosen!r} is read; not read: {others} (set sheet).", stacklevel=2)
    frame = frame.where(frame != "", None).dropna(how="all")
    if len(frame) < 2:
        raise InputError(f"{where}: the sheet {chosen!r} has no rows.")
    frame, names = frame[1:].reset_index(drop=True), _names(frame.iloc[0])
    frame.columns = pd.Index(names)
    return frame


# Columns


def _in_memory(source: Any) -> pd.DataFrame:
    if isinstance(source, pd.DataFrame):
        named = [name for name in source.index.names if name is not None]
        return source.reset_index(named) if named else source
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "column_names"):  # polars, pyarrow
        import pyarrow as pa

        return pa.table(source).to_pandas(types_mapper=pd.ArrowDtype)
    if not isinstance(source, Mapping):
        raise InputError(
            f"a table must be a file, a DataFrame or a mapping of columns, got {type(source).__name__}."
        )
    columns = dict[str, pd.Series]()
    for name, values in source.items():
        array = values.detach().cpu().numpy() if hasattr(values, "detach") else values
        if getattr(array, "ndim", 1) != 1:
            raise InputError(f"column {name!r} has shape {array.shape}; it must have one value per row.")
        known = isinstance(array, pd.Series | np.ndarray)
        series = pd.Series(array) if known else pd.Series(list(array), dtype=object)
        columns[str(name)] = series.reset_index(drop=True)
    if len({len(values) for values in columns.values()}) > 1:
        each = ", ".join(f"{name!r} {len(values):,}" for name, values in list(columns.items())[:4])
        raise InputError(f"the columns have different lengths: {each}.")
    return pd.DataFrame(columns)


def _plain(values: pd.Series, name: str) -> pd.Series:
    """A column as float64 or text; moments are text in UTC, without zones and nanoseconds."""
    series = values.reset_index(drop=True)
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    kind = pd.api.types.infer_dtype(series, skipna=True)
    if kind in ("timedelta64", "timedelta"):
        return pd.to_timedelta(series.astype(object)).dt.as_unit("us") / pd.Timedelta(seconds=1)
    large = kind == "integer" and series.dtype == object and (series.dropna().map(abs) > EXACT).any()
    if kind in ("integer", "floating", "mixed-integer-float", "decimal") and not large:
        numbers = series if series.dtype != object else pd.to_numeric(series, dtype_backend="numpy_nullable")
        numbers = pd.Series(numbers.to_numpy(np.float64, na_value=np.nan))
        if kind in ("floating", "decimal") or not (numbers.abs() > EXACT).any():
            return numbers
    if kind in ("datetime64", "datetime", "date"):
        moments = pd.to_datetime(series.astype(object), utc=True)
        series = moments.dt.tz_localize(None).dt.as_unit("us")
    elif kind not in ("string", "empty"):
        series = series.astype(object).where(series.notna(), None)
        if (
            nested := series.map(lambda cell: isinstance(cell, list | tuple | dict | set | np.ndarray))
        ).any():
            row = int(nested.argmax())
            what = f"column {name!r}, row {row + 1}: a {type(series[row]).__name__}"
            raise InputError(f"{what}; a cell must be a number or a string.")
        series = series.map(cell_text, na_action="ignore")
    texts = series.astype(TEXT).str.strip()
    return texts.where(texts != "", None)


def cell_text(value: Any) -> str:
    """A value as a CSV file has it: 3.0 and 3 are the same."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float | np.floating):
        return str(int(value)) if value == value // 1 and abs(float(value)) <= EXACT else repr(float(value))
    return str(value)
