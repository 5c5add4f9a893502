"""A table of your own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.data.batch import DomainData
from shoal.data.download import needed
from shoal.data.splits import last_domain
from shoal.data.tables import from_table
from shoal.data.tables.load import content_of
from shoal.errors import InputError
from shoal.options import DropRows
from shoal.settings import Seed

SUMMARY = "Your own table (CSV, Parquet, Excel) with a label column and a domain column."
PAPER = "yours"

PASSES = 50
"""Over the training rows, in a comparison's trainings, as far as :data:`STEPS` lets them."""
BATCH, STEPS = (32, 256), (300, 3000)
"""The least and the most."""
RESPLIT = True
"""In a comparison the option ``seed`` is that of the run: every seed has a validation split of its own."""


def load(
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    held_out: str | list[str] | None = None,
    seed: Seed = 0,
    group: str | None = None,
    columns: str | list[str] | None = None,
    drop: str | list[str] | None = None,
    drop_rows: list[DropRows] | None = None,
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
    encoding: str | None = None,
    sheet: str | int | None = None,
    skip_rows: int = 0,
    digest: str | None = None,
) -> DomainData:
    """Read a table; a fifth of every training domain is held out for validation, under the same name.

    What columns hold is decided from all rows, how they are scaled and encoded from training rows alone; see
    :func:`shoal.data.from_table`.

    Args:
        file: Parquet (.parquet), Excel (.xlsx), or CSV in UTF-8 with a line of names first (.csv, .csv.gz …).
        label: the column to predict.
        domain: the column that tells where a row is from.
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples.
        group: the column that names the entity of a row; an entity's rows are on one side of every split.
        columns: the features, as [a, b] or a,b; by default all but label, domain and group.
        drop: columns that are not to be used.
        drop_rows: rows that are not to be used: missing, mostly-empty, outliers, single.
        kinds: {column: numeric, boolean, date, categorical or text} where the guess is wrong.
        decimal: the decimal mark of numbers, "." or ",", where columns leave it open.
        day_first: whether 3/4/2020 is in April, where columns leave it open.
        task: classification or regression, by default as the label looks.
        encoding: of a CSV file, by default UTF-8.
        sheet: of an Excel file, by its name or its number from 0.
        skip_rows: lines above the names of the columns.
        digest: what :func:`digest_of` said of the file; another file is refused.
    """
    path, roles = needed("table", "file", file, "your own table"), _named(label, domain)
    if digest is not None and (now := digest_of(path)) != digest:
        raise InputError(f"{str(path)!r} has changed: its digest is {now}, not {digest}.")
    options: dict[str, Any] = {
        **roles,
        "group": None if group is None else str(group),
        "columns": None if columns is None else _several(columns),
        "drop": _several(drop or ()),
        "drop_rows": drop_rows or (),
        "kinds": kinds,
        "decimal": decimal,
        "day_first": day_first,
        "task": task,
        "encoding": encoding,
        "sheet": sheet,
        "skip_rows": skip_rows,
    }
    if held_out is None:
        held_out = last_domain(_domains(path, options))
    return from_table(path, **options, held_out=held_out, seed=seed)


def domains(
    *, file: str | None = None, label: str | None = None, domain: str | None = None, **others: Any
) -> tuple[str, ...]:
    """Those that ``held_out`` can hold out."""
    options = {name: value for name, value in others.items() if name not in ("digest", "held_out", "seed")}
    options |= {
        name: _several(options[name]) for name in ("columns", "drop") if options.get(name) is not None
    }
    return _domains(needed("table", "file", file, "your own table"), options | _named(label, domain))


def _domains(path: Path, options: Mapping[str, Any]) -> tuple[str, ...]:
    domains = content_of(path, **options).domains
    assert domains is not None
    return domains.names


def comparison(data: DomainData) -> dict[str, Any]:
    """How to train on it in a comparison, where nothing else is said: small tables take seconds."""
    rows, count = len(data.splits["train"].indices), len(data.splits["train"])
    each_step = count if count <= 16 else 5
    batch = 2 ** round(math.log2(max(1.0, rows / each_step / 8)))
    batch = min(max(batch, BATCH[0]), BATCH[1])
    steps = round(PASSES * rows / (each_step * batch) / 100) * 100
    return {"steps": min(max(steps, STEPS[0]), STEPS[1]), "batch": batch}


def digest_of(path: str | Path) -> str:
    """Tells a file's content from any other."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error


def _named(label: str | None, domain: str | None) -> dict[str, str]:
    """The two columns that must be named, as the header spells them."""
    for name, value, what in (("label", label, "to predict"), ("domain", domain, "with the domains")):
        if value is None:
            raise InputError(
                f"dataset 'table' requires the column {what}: `{name}=COLUMN`, or --{name} COLUMN."
            )
    return {"label": str(label), "domain": str(domain)}


def _several(names: Any) -> list[str]:
    """``a,b`` or [a, b]."""
    if not isinstance(names, (str, list, tuple)):
        names = [names]
    parts = names.split(",") if isinstance(names, str) else [str(name) for name in names]
    return [part.strip() for part in parts if part.strip()]
