"""A table of your own."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from shoal.data.batch import DomainData
from shoal.data.download import needed
from shoal.data.splits import last_domain
from shoal.data.tables.load import Content, content_of
from shoal.errors import InputError
from shoal.options import Names, TableOptions
from shoal.settings import Seed

SUMMARY = "Your own table (CSV, Parquet, Excel) with a label column and a domain column."
PAPER = "yours"
RESPLIT = True
"""In a comparison the option ``seed`` is that of the run: every seed has a validation split of its own."""
PASSES = 50
"""Over the training rows, in a comparison's trainings, as far as :data:`STEPS` lets them."""
BATCH, STEPS = (32, 256), (300, 3000)
"""The least and the most."""


def load(
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    held_out: Names | None = None,
    seed: Seed = 0,
    digest: str | None = None,
    **options: Unpack[TableOptions],
) -> DomainData:
    """Read a table; a fifth of every training domain is held out for validation, under the same name.

    Args:
        file: Parquet (.parquet), Excel (.xlsx), or CSV with a line of names first (.csv, .csv.gz …).
        label: the column to predict.
        domain: the column that tells where a row is from.
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples.
        digest: what :func:`digest_of` said of the file; another file is refused.
        **options: how it is read, see :class:`~shoal.options.TableOptions`.
    """
    content = _content(file, label, domain, options)
    if digest is not None and (now := digest_of(str(file))) != digest:
        raise InputError(f"{str(file)!r} has changed: its digest is {now}, not {digest}.")
    assert content.domains is not None
    return content.data(last_domain(content.domains.names) if held_out is None else held_out, seed=seed)


def domains(
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    held_out: Any = None,
    seed: Any = None,
    digest: Any = None,
    **options: Unpack[TableOptions],
) -> tuple[str, ...]:
    """Those that ``held_out`` can hold out."""
    content = _content(file, label, domain, options)
    assert content.domains is not None
    return content.domains.names


def _content(file: str | None, label: str | None, domain: str | None, options: TableOptions) -> Content:
    path = needed("table", "file", file, "your own table")
    for name, value, what in (("label", label, "to predict"), ("domain", domain, "with the domains")):
        if value is None:
            message = f"dataset 'table' requires the column {what}: `{name}=COLUMN`, or --{name} COLUMN."
            raise InputError(message)
    content = content_of(path, label=label, domain=domain, **options)
    if content.problems:
        raise content.problems[0]
    return content


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
