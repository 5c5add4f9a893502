"""A table of your own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.data.batch import DomainData
from shoal.data.download import needed
from shoal.data.own import domains_of, from_table
from shoal.data.reading import need_column, read_table
from shoal.data.splits import last_domain
from shoal.errors import InputError
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
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
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
        kinds: {column: numeric, boolean, date, categorical or text} where the guess is wrong.
        decimal: the decimal mark of numbers, "." or ",", where columns leave it open.
        day_first: whether 3/4/2020 is in April, where columns leave it open.
        task: classification or regression, by default as the label looks.
        digest: what :func:`digest_of` said of the file; another file is refused.
    """
    path, roles = needed("table", "file", file, "your own table"), _named(label, domain)
    if digest is not None and (now := digest_of(path)) != digest:
        raise InputError(f"{str(path)!r} has changed: its digest is {now}, not {digest}.")
    if held_out is None:
        held_out = last_domain(domains(file=file, label=label, domain=domain))
    return from_table(
        path,
        label=roles["label"],
        domain=roles["domain"],
        held_out=held_out,
        group=None if group is None else str(group),
        columns=None if columns is None else _several(columns),
        drop=_several(drop or ()),
        kinds=kinds,
        decimal=decimal,
        day_first=day_first,
        task=task,
        seed=seed,
    )


def domains(
    *, file: str | None = None, label: str | None = None, domain: str | None = None, **others: Any
) -> tuple[str, ...]:
    """Those that ``held_out`` can hold out."""
    path, roles = needed("table", "file", file, "your own table"), _named(label, domain)
    columns = read_table(path)
    need_column(roles["label"], columns, "label")
    return domains_of(columns[need_column(roles["domain"], columns, "domain")], roles["domain"]).names


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
