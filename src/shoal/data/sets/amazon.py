"""Amazon-WILDS: how many stars does a review give, by a held-out reviewer?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import DomainData
from shoal.data.text import DISTILBERT, MULTIPLE, Column, first_seen, read_table
from shoal.data.wilds import SPLITS, by_groups, find, published, text_data
from shoal.errors import InputError
from shoal.settings import Count

SUMMARY = "Amazon-WILDS: 539,502 reviews of 1 to 5 stars by 3,920 reviewers. Reads the files of WILDS."
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Ni et al., EMNLP 2019"

PUBLISHED = published("amazon")
OUTSIDE = -1  # the split of reviews that are left out
NUMBERS = {"train": 0, "val": 1, "id_val": 2, "test": 3, "id_test": 4}
COLUMNS = {"user": "reviewerID", "product": "asin", "category": "category"}
STARS = 5


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    tokenizer: str = DISTILBERT,
    max_tokens: Count = 512,
    pad_to: int | str = MULTIPLE,
) -> DomainData:
    """Read the reviews of the split by reviewers; domains and groups are the reviewers.

    Reviews that belong to no split are left out: examples are numbered as in WILDS.

    Args:
        folder: ``amazon_v2.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 2.1, 2.0, or 1.0, which the paper used; by default the newest that is there.
        tokenizer: the model's whose tokens texts become, by name or by folder.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``max`` all to ``max_tokens``.
    """
    place = find(PUBLISHED, folder, version)
    path = place.folder / PUBLISHED.table
    table = read_table(path, (*COLUMNS.values(), "reviewYear", "overall"))
    split = _splits(place.folder / "splits" / "user.csv", len(table))
    rows = np.flatnonzero(split != OUTSIDE)
    split = split[rows]
    order = np.argsort(split, kind="stable")
    metadata: dict[str, NDArray[Any]] = {}
    names: dict[str, NDArray[Any]] = {}
    for name, column in COLUMNS.items():
        metadata[name], names[name] = _numbered(table.columns[column], rows, order)
    year = table.columns["reviewYear"].numbers(f"{str(path)!r}: reviewYear")[rows].astype(np.int64)
    stars = table.columns["overall"].numbers(f"{str(path)!r}: overall")[rows]
    if not np.isin(stars, np.arange(1, STARS + 1)).all():
        wrong = stars[~np.isin(stars, np.arange(1, STARS + 1))][0]
        raise InputError(f"{str(path)!r}: overall is {wrong:g}; it must be 1, 2, 3, 4 or 5.")
    metadata |= {"year": year - year.min(), "y": stars.astype(np.int64) - 1}
    where = {ours: split == NUMBERS[theirs] for theirs, ours in SPLITS.items()}
    splits = by_groups(metadata["user"], names["user"].__getitem__, where)
    return text_data(
        PUBLISHED,
        place,
        table,
        "reviewText",
        metadata,
        splits,
        rows=rows,
        names=names,
        options={"tokenizer": tokenizer, "max_tokens": max_tokens, "pad_to": pad_to},
        classes=STARS,
        class_names=tuple(f"{n} star{'s' * (n > 1)}" for n in range(1, STARS + 1)),
        measures=("10th-percentile accuracy", "accuracy"),
    )


def _splits(path: Path, count: int) -> NDArray[np.int64]:
    """The split's number of every review."""
    column = read_table(path, ("split",)).columns["split"]
    split = column.numbers(f"{str(path)!r}: split")
    if len(split) != count:
        raise InputError(f"{str(path)!r} has {len(split):,} rows and {PUBLISHED.table} has {count:,}.")
    known = np.isin(split, [OUTSIDE, *NUMBERS.values()])
    if not known.all():
        raise InputError(f"{str(path)!r}: split is {split[~known][0]:g}; it must be -1, 0, 1, 2, 3 or 4.")
    return split.astype(np.int64)


def _numbered(
    column: Column, rows: NDArray[Any], order: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.object_]]:
    """A column's values at ``rows``, numbered as they come in ``order``, and what the numbers stand for."""
    codes = column.codes[rows]
    used, numbers = first_seen(codes[order])
    result = np.empty(len(rows), np.int64)
    result[order] = numbers
    return result, column.text()[used]
