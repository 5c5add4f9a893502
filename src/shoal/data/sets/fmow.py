"""FMoW-WILDS: what is this land used for, in held-out years and regions?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.batch import DomainData
from shoal.data.wilds import by_group, by_groups, coded, find, image_data, published, read_columns
from shoal.errors import InputError, check_names
from shoal.settings import Pixels

SUMMARY = "FMoW-WILDS: 141,696 satellite images, 62 land uses, 16 years, 5 regions. Reads the files of WILDS."
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Christie et al., CVPR 2018"

PUBLISHED = published("fmow")
SIZE = 224
FIRST_YEAR, LAST_YEAR = 2002, 2017  # that WILDS numbers
VALIDATION, TEST = 2013, 2016  # from these years on
OTHER = "Other"
COLUMNS = {"split": str, "category": str, "country_code": str, "timestamp": str}
OTHERS = (
    *("img_filename", "img_path", "spatial_reference", "epsg", "visible", "img_width", "img_height"),
    *("cloud_cover", "lat", "lon", "region"),
)
STACKS = 100  # version 1.0 has a hundred arrays of images, and one with the rest

CATEGORIES = tuple(PUBLISHED.names["classes"])
GROUP_BY = ("year and region", "year")


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    group_by: str = "year and region",
    size: Pixels = SIZE,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool = False,
) -> DomainData:
    """Read the images; those before 2013 are trained on, those from 2016 on are the test split.

    Training domains are a year in a region, other splits are scored by region; the region ``Other``, of a
    few dozen images, is never the worst. Rows in no split keep their places, so that indices are WILDS'.

    Args:
        folder: ``fmow_v1.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.1, or 1.0, whose images lie in arrays; by default the newest that is there.
        group_by: what a training domain is: ``year and region``, or ``year``, as for WILDS' own baselines.
        size: of the images, in pixels each way.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; all of them take 21 GB.
    """
    check_names("group_by", [group_by], GROUP_BY)
    place = find(PUBLISHED, folder, version)
    path = place.folder / PUBLISHED.table
    table = read_columns(path, COLUMNS, OTHERS)
    region, regions = _regions(place.folder / "country_code_mapping.csv", table["country_code"])
    rows = np.flatnonzero(table["split"] != "seq")
    if not len(rows):
        raise InputError(f"{str(path)!r} has no row of a split other than seq.")
    year = _years(path, table["timestamp"])[rows]
    y = coded(path, "category", table["category"], {c: n for n, c in enumerate(CATEGORIES)})[rows]
    part, region = table["split"][rows], region[rows]
    early = year < VALIDATION
    splits = {
        "train": early & (part == "train"),
        "id_validation": early & (part == "val"),
        "validation": ~early & (year < TEST) & (part == "val"),
        "id_test": early & (part == "test"),
        "test": (year >= TEST) & (part == "test"),
    }
    numbered = np.where((year >= FIRST_YEAR) & (year <= LAST_YEAR), year - FIRST_YEAR, -1)
    both = year * len(regions) + region
    domains = by_groups(region, regions.__getitem__, splits)
    if "train" in domains:
        name = str if group_by == "year" else lambda code: _year_and_region(code, regions)
        domains["train"] = by_group(year if group_by == "year" else both, name, splits["train"])
    images, stacks = place.folder / "images", None
    names = (f"rgb_img_{row}.png" for row in rows.tolist())
    if place.version == "1.0":
        images, stacks = place.folder, (rows, each := max(1, len(table["split"]) // STACKS))
        names = (f"rgb_all_imgs_{row // each}.npy" for row in rows.tolist())
    return image_data(
        PUBLISHED,
        place,
        table,
        images,
        names,
        {"region": region, "year": numbered, "y": y},
        both - both.min(),
        domains,
        classes=len(CATEGORIES),
        options={"size": size, "bad": bad, "cache": cache, "stacks": stacks},
        model="densenet121",
        measures=("worst-group accuracy", "accuracy"),
        uncounted=frozenset({OTHER}),
        class_names=CATEGORIES,
    )


def _year_and_region(code: int, regions: tuple[str, ...]) -> str:
    return f"{code // len(regions)}, {regions[code % len(regions)]}"


def _regions(path: Path, countries: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The region of each row, numbered as they appear; ``Other`` where the country is not listed."""
    table = read_columns(path, {"alpha-3": str, "region": str})
    known = dict(zip(table["alpha-3"], table["region"], strict=True))
    number: dict[str, int] = {}
    of_country = {
        code: number.setdefault(known.get(code) or OTHER, len(number)) for code in dict.fromkeys(countries)
    }
    return np.fromiter((of_country[code] for code in countries), np.int64, len(countries)), tuple(number)


def _years(path: Path, timestamps: NDArray[Any]) -> NDArray[np.int64]:
    """The years of times in UTC, such as 2015-07-25T08:45:12Z."""
    known = re.compile(r"([0-9]{4})-[0-9]{2}-[0-9]{2}([T ][0-9:.]+)?(Z|\+00:?00)?")
    result = [known.fullmatch(text) for text in timestamps]
    if None in result:
        i = result.index(None)
        raise InputError(
            f"{str(path)!r}: timestamp is {timestamps[i]!r} in example {i + 1}; it must be a time in UTC "
            "such as 2015-07-25T08:45:12Z."
        )
    return np.array([int(match[1]) for match in result if match], np.int64)
