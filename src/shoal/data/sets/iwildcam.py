"""iWildCam2020-WILDS: which animal is this, at a held-out camera?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import DomainData
from shoal.data.wilds import SPLITS, Columns, by_groups, find, image_data, published, read_columns
from shoal.errors import InputError
from shoal.settings import Pixels

SUMMARY = (
    "iWildCam2020-WILDS: 203,029 photos of 182 animal species from 323 camera traps. Reads the files of "
    "WILDS."
)
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Beery et al. 2020, arXiv:2004.10340"

PUBLISHED = published("iwildcam")
SIZE = 448
COLUMNS = {
    "filename": str,
    "y": int,
    "location_remapped": int,
    "sequence_remapped": int,
    "datetime": str,
    "split": str,
}
OLD_COLUMNS = {"filename": str, "category_id": int, "location": int, "datetime": str}
OLD_FILES = {
    "train": "train",
    "val_trans": "val",
    "test_trans": "test",
    "test_cis": "id_test",
    "val_cis": "id_val",
}
"""The tables of version 1.0, in the order in which WILDS puts them together, and their splits."""
OTHERS = (
    *("location", "sequence", "category_id", "image_id"),
    *("index", "id", "frame_num", "seq_id", "datetime_obj", "date"),
)
"""Columns of either version that are not read."""
TIMES = ("year", "month", "day", "hour", "minute", "second")


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    size: Pixels = SIZE,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool = False,
) -> DomainData:
    """Read the photos; domains and groups are the cameras' locations.

    Args:
        folder: ``iwildcam_v2.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 2.0, or 1.0, which the paper used; by default the newest that is there.
        size: of the images, in pixels each way: 448 as in WILDS 2.0; the authors of Fish took 224.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory.
    """
    place = find(PUBLISHED, folder, version)
    table, metadata, location = (_old if place.version == "1.0" else _new)(place.folder)
    classes = int(metadata["y"].max()) + 1
    where = {ours: table["split"] == theirs for theirs, ours in SPLITS.items()}
    return image_data(
        PUBLISHED,
        place,
        table,
        place.folder / "train",
        table["filename"],
        metadata,
        metadata["location"],
        by_groups(location, "location {}".format, where),
        classes=classes,
        options={"size": size, "bad": bad, "cache": cache},
        model="resnet50",
        measures=("macro F1", "accuracy", "macro recall"),
    )


def _new(folder: Path) -> tuple[Columns, dict[str, NDArray[Any]], NDArray[Any]]:
    """The table, WILDS' metadata, and the location that a domain is called by."""
    path = folder / PUBLISHED.table
    table = read_columns(path, COLUMNS, OTHERS)
    if unknown := sorted(set(table["split"]) - set(SPLITS)):
        raise InputError(f"{str(path)!r}: split is {unknown[0]!r}; it must be one of {', '.join(SPLITS)}.")
    if (table["y"] < 0).any():
        raise InputError(f"{str(path)!r}: y is {table['y'].min()}; classes count from 0.")
    metadata = {
        "location": table["location_remapped"],
        "sequence": table["sequence_remapped"],
        **_times(path, table["datetime"]),
        "y": table["y"],
    }
    return table, metadata, table["location_remapped"]


def _old(folder: Path) -> tuple[Columns, dict[str, NDArray[Any]], NDArray[Any]]:
    """The same from the five tables of version 1.0, whose classes and locations are not yet numbered."""
    parts = []
    for name, split in OLD_FILES.items():
        part = read_columns(folder / f"{name}.csv", OLD_COLUMNS, OTHERS)
        part["split"] = np.full(len(part["filename"]), split, object)
        parts.append(part)
    table = Columns((name, np.concatenate([part[name] for part in parts])) for name in parts[0])
    table.unused = parts[0].unused
    metadata = {
        "location": np.unique(table["location"], return_inverse=True)[1],
        **_times(folder / "train.csv", table["datetime"]),
        "y": np.unique(table["category_id"], return_inverse=True)[1],
    }
    return table, metadata, table["location"]


def _times(path: Path, texts: NDArray[Any]) -> dict[str, NDArray[np.int64]]:
    """Years to seconds of times such as 2013-06-05 05:44:19.000."""
    try:
        times = texts.astype("datetime64[s]")
    except ValueError as error:
        raise InputError(
            f"{str(path)!r}: datetime cannot be read ({error}); it must be such as 2013-06-05 05:44:19.000."
        ) from error
    if np.isnat(times).any():
        raise InputError(f"{str(path)!r}: datetime is empty in the {np.isnat(times).argmax() + 1}. example.")
    months, days = times.astype("datetime64[M]"), times.astype("datetime64[D]")
    second = (times - days).astype(np.int64)
    values = (
        times.astype("datetime64[Y]").astype(np.int64) + 1970,
        months.astype(np.int64) % 12 + 1,
        (days - months).astype(np.int64) + 1,
        second // 3600,
        second // 60 % 60,
        second % 60,
    )
    return dict(zip(TIMES, values, strict=True))
