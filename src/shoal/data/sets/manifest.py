"""Images of your own, listed in a table."""

from __future__ import annotations

import csv
import difflib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.images import SIZE, SPLITS, image_data, leave_one_out
from shoal.data.tree import FileList, warn_missing
from shoal.errors import InputError
from shoal.files import check_regular, lines_of, open_text
from shoal.settings import Pixels, Seed

SUMMARY = "Images of your own, listed in a CSV or Parquet file with columns path, label, domain[, split]."
PAPER = "yours"
RESPLIT = True

COLUMNS = ("path", "label", "domain")
OTHER_WORDS = {"val": "validation", "valid": "validation", "dev": "validation", "training": "train"}

Row = tuple[str, str, str, str]
"""Path, label, domain, split."""


def load(
    *,
    file: str | None = None,
    test: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read the images that ``file`` lists, by paths from the folder it is in.

    With a column ``split`` (train, validation, test) these are the splits, and ``test`` may not be given.
    Without it one domain is left out and a fifth of every other one held out for validation.

    Args:
        file: the table; Parquet if it ends in .parquet, else CSV in UTF-8 with a line of names first.
        test: the domain left out, by default the last by name; ``[]`` leaves none out.
        seed: for the choice of the validation examples.
        size: of the images, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; small ones are by default.
    """
    path = _said(file)
    files, chosen = read_manifest(path)
    if chosen is None:
        splits = leave_one_out(files, max(files.domains) if test is None else test, seed)
    elif test is not None:
        raise InputError(f"{str(path)!r} has a column 'split', which says what test is; leave test out.")
    else:
        splits = _splits(files, chosen, path)
    return image_data(files, splits, size=size, augment=augment, bad=bad, cache=cache)


def domains(*, file: str | None = None, **others: Any) -> tuple[str, ...] | None:
    """Those that ``test`` can leave out; ``None`` where the table itself says what test is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading says them again
        files, chosen = read_manifest(_said(file))
    return files.domains if chosen is None else None


def _said(file: str | None) -> Path:
    if file is None:
        raise InputError("dataset 'manifest' reads a list of images: `--data file=FILE` says which.")
    return Path(str(file)).expanduser()


def read_manifest(path: Path) -> tuple[FileList, list[str] | None]:
    """The files listed, and the split of each where the table has one."""
    labels: dict[str, str] = {}
    chosen: list[str] = []

    def rows() -> Iterator[tuple[str, str, str]]:
        for number, row in _table(path):
            name, label, domain, split = _checked(row, f"{str(path)!r}, row {number}")
            if labels.setdefault(name, label) != label:
                raise InputError(
                    f"{str(path)!r}, row {number}: {name!r} has label {label!r}, "
                    f"and in a row before it {labels[name]!r}."
                )
            chosen.append(split)
            yield name, domain, label

    files = FileList.of(path.parent, rows())
    if not len(files):
        raise InputError(f"{str(path)!r} lists no images.")
    if len(labels) < len(files):
        warnings.warn(f"{str(path)!r} lists {len(files) - len(labels)} images twice.", stacklevel=3)
    warn_missing(files)
    return files, chosen if any(chosen) else None


def _checked(row: Mapping[str, Any], where: str) -> Row:
    name, label, domain, split = (_text(row.get(column)) for column in (*COLUMNS, "split"))
    for column, value in zip(COLUMNS, (name, label, domain), strict=True):
        if not value:
            raise InputError(f"{where}: {column} is empty; every image needs one.")
    if "split" in row:
        split = OTHER_WORDS.get(split.lower(), split.lower())
        if split not in SPLITS:
            raise InputError(f"{where}: split is {row['split']!r}; it must be {', '.join(SPLITS)}.")
    return name, label, domain, split


def _text(value: Any) -> str:
    return "" if value is None or value != value else str(value).strip()  # NaN is not itself


def _splits(files: FileList, chosen: list[str], path: Path) -> dict[str, Domains]:
    of = np.array(chosen)
    splits = {}
    for split in SPLITS:
        here = {name: rows[of[rows] == split] for name, rows in files.indices().items()}
        if any(len(rows) for rows in here.values()):
            splits[split] = Domains.from_indices({name: rows for name, rows in here.items() if len(rows)})
    if "train" not in splits:
        raise InputError(f"{str(path)!r} has no row of split train; there is nothing to learn from.")
    return splits


def _table(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their numbers: of a CSV the line, of Parquet from 1."""
    if path.suffix.lower() == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    try:
        with open_text(path) as lines:
            table = csv.DictReader(lines_of(lines, path))
            _check_columns(table.fieldnames or (), path)
            for row in table:
                yield table.line_num, row
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}).") from error


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'shoal[tables]', or save it as CSV."
        )
    from pyarrow import ArrowException, parquet

    check_regular(path)
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            _check_columns(names, path)
            for rows in table.iter_batches(columns=[n for n in (*COLUMNS, "split") if n in names]):
                yield from rows.to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}).") from error


def _check_columns(names: Any, path: Path) -> None:
    for column in COLUMNS:
        if column not in names:
            near = difflib.get_close_matches(column, [str(n) for n in names], n=1, cutoff=0.5)
            hint = f" Rename {near[0]!r}?" if near else ""
            there = ", ".join(map(repr, names)) or "none"
            raise InputError(f"{str(path)!r} has no column {column!r}.{hint} Its columns: {there}.")
