"""Images of your own, listed in a table."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.folders import needed
from shoal.data.images import SIZE, SPLITS, image_data, split_files
from shoal.data.reading import ALL, CsvRows, check_header, need_column, rows_of
from shoal.data.tree import FileList, warn_missing
from shoal.errors import InputError
from shoal.settings import Pixels, Seed

SUMMARY = "Your own images, listed in a CSV, Parquet or Excel file with columns path, label, domain[, split]."
PAPER = "yours"
RESPLIT = True

COLUMNS = ("path", "label", "domain")
OTHER_WORDS = {"val": "validation", "valid": "validation", "dev": "validation", "training": "train"}


def load(
    *,
    file: str | None = None,
    held_out: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read the images that ``file`` lists, by paths from the folder it is in.

    With a column ``split`` (train, validation, test) these are the splits, and ``held_out`` may not be given.
    Without it one domain is held out and a fifth of every other one held out for validation.

    Args:
        file: the table; Parquet (.parquet), Excel (.xlsx), else CSV in UTF-8 with a line of names first.
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples.
        size: of the images, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; small ones are by default.
    """
    path = needed("manifest", "file", file, "a list of images")
    files, chosen = read_manifest(path)
    if chosen is None:
        splits = split_files(files, held_out, seed)
    elif held_out is not None:
        message = f"{str(path)!r} has a column 'split', which defines the test split; use only one of them."
        raise InputError(message, "held_out")
    else:
        splits = _splits(files, chosen, path)
    return image_data(files, splits, size=size, augment=augment, bad=bad, cache=cache)


def domains(*, file: str | None = None, **others: Any) -> tuple[str, ...] | None:
    """Those that ``held_out`` can hold out; ``None`` where the table itself says what test is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading says them again
        files, chosen = read_manifest(needed("manifest", "file", file, "a list of images"))
    return files.domains if chosen is None else None


def read_manifest(path: Path) -> tuple[FileList, list[str] | None]:
    """The files listed, and the split of each where the table has one."""
    source = rows_of(path) or CsvRows(path)
    for name in COLUMNS:
        need_column(name, source.names, f"images of {source.where}")
    check_header(source.names, source.where)
    columns = [name for name in (*COLUMNS, "split") if name in source.names]
    rows = [
        row
        for part in source.parts(columns, ALL)
        for row in zip(*(part[n].texts() for n in columns), strict=True)
    ]
    labels: dict[str, str] = {}
    chosen: list[str] = []
    for number, row in enumerate(rows, 1):
        where = f"{source.where}, row {number}"
        for column, value in zip(columns, row, strict=True):
            if not value or not value.strip():
                raise InputError(f"{where}: {column} is empty; every image needs one.")
        name, label, _, *split = row
        if labels.setdefault(name, label) != label:
            raise InputError(
                f"{where}: {name!r} has label {label!r}, and in a row before it {labels[name]!r}."
            )
        for word in split:
            chosen.append(OTHER_WORDS.get(word.lower(), word.lower()))
            if chosen[-1] not in SPLITS:
                raise InputError(f"{where}: split is {word!r}; it must be {', '.join(SPLITS)}.")
    if not rows:
        raise InputError(f"{source.where} lists no images.")
    files = FileList.of(path.parent, ((name, domain, label) for name, label, domain, *_ in rows))
    if len(labels) < len(files):
        warnings.warn(f"{source.where} lists {len(files) - len(labels)} images twice.", stacklevel=3)
    warn_missing(files)
    return files, chosen or None


def _splits(files: FileList, chosen: list[str], path: Path) -> dict[str, Domains]:
    of, splits = np.array(chosen), {}
    for split in SPLITS:
        members = {name: rows[of[rows] == split] for name, rows in files.indices().items()}
        if members := {name: rows for name, rows in members.items() if len(rows)}:
            splits[split] = Domains.from_indices(members)
    if "train" not in splits:
        raise InputError(f"{str(path)!r} has no row of split train; there is nothing to train on.")
    return splits
