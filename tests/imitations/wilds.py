"""Small imitations of published datasets, in their layouts, to try programs on.

Each has something real to learn, a faint pattern in the middle that means the same everywhere, and something
easier that does not hold: a tint that goes with the label in training domains and with nothing in test ones.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.images import need_pillow
from shoal.errors import InputError, unknown_name

SIZES = {"small": 1, "medium": 4}
"""How many times the fewest examples there are."""
WILDS = {
    "amazon": "imitations.wilds_text",
    "camelyon17": "imitations.wilds",
    "civilcomments": "imitations.wilds_text",
    "fmow": "imitations.wilds",
    "iwildcam": "imitations.wilds",
    "poverty": "imitations.wilds",
}
"""Where the function ``fake_NAME`` of each is."""
KEPT = 0.95  # the chance that the tint is the label's, in training domains
FAINT = 0.05  # how much brighter or darker the pattern makes a cell
NOISE = 0.05  # how much cells differ by chance
CELLS = 12  # of a picture, each way; the pattern has the middle half

Fake = Callable[[Path, int, str], Path]
"""Takes the folder to write into, a seed and a size; returns the dataset's own folder."""


def maker(name: str) -> Fake:
    """The function that writes an imitation of dataset ``name``."""
    if name not in WILDS:
        raise unknown_name("dataset to imitate", name, WILDS)
    made: Fake = getattr(importlib.import_module(WILDS[name]), f"fake_{name}")
    return made


def times(size: str) -> int:
    """How many times the fewest examples a size has."""
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    return SIZES[size]


def new_folder(parent: Path, name: str, version: str) -> Path:
    """A dataset's folder with the file that says its version; there must be none of that name."""
    folder = parent / f"{name}_v{version}"
    try:
        folder.mkdir(parents=True)
        (folder / f"RELEASE_v{version}.txt").write_text(f"An imitation of {name}: none of it is real.\n")
    except FileExistsError as error:
        raise InputError(f"{str(folder)!r} is there already; give a folder without it.") from error
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be made: {error.strerror}.") from error
    return folder


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file as pandas writes it."""
    with path.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        table.writerow(header)
        table.writerows(rows)


@cache
def pattern(label: int, classes: int) -> NDArray[np.float64]:
    """What the middle of a picture of class ``label`` looks like, of -1 and 1; the same for any seed."""
    middle = np.random.default_rng([7, classes, label]).choice([-1.0, 1.0], (CELLS // 2, CELLS // 2))
    return np.pad(middle, CELLS // 4)


def tint(label: int, classes: int, domain: int) -> NDArray[np.float64]:
    """A colour, by the label, and turned a little by the domain."""
    hue = 2 * math.pi * (label / classes + 0.02 * (domain % 5))
    return np.array([math.cos(hue), math.cos(hue - 2.1), math.cos(hue + 2.1)]) * 0.18


def picture(
    rng: np.random.Generator, label: int, classes: int, domain: int, spurious: bool, shape: tuple[int, int]
) -> NDArray[np.uint8]:
    """A picture of (height, width) pixels; ``spurious`` ones have the tint of their label, mostly."""
    shown = label if spurious and rng.random() < KEPT else int(rng.integers(classes))
    cells = 0.5 + FAINT * pattern(label, classes) + rng.normal(0, NOISE, (CELLS, CELLS))
    colours = (cells[..., None] + tint(shown, classes, domain)).clip(0, 1)
    height, width = (-(-side // CELLS) for side in shape)
    large = (colours * 31).round().astype(np.uint8) * 8  # few levels, so that files are small
    return large.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def save(pixels: NDArray[np.uint8], path: Path) -> None:
    from PIL import Image

    options: dict[str, Any] = {"quality": 85} if path.suffix == ".jpg" else {"compress_level": 6}
    Image.fromarray(pixels).save(path, **options)


def fake_camelyon17(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """Five hospitals of two slides each; in hospitals 1 and 2 the stain tells nothing."""
    need_pillow()
    each, rng = 60 * times(size), np.random.default_rng(seed)
    place = new_folder(folder, "camelyon17", "1.0")
    rows: list[Sequence[Any]] = []
    for hospital in range(5):
        for slide in range(2):
            patient, node = f"{20 * hospital + 4 + slide:03d}", slide % 5
            patches = place / "patches" / f"patient_{patient}_node_{node}"
            patches.mkdir(parents=True)
            for i in range(each):
                x, y, tumour = 32 * int(rng.integers(900)), 1000 * i, i % 2
                pixels = picture(rng, tumour, 2, hospital, hospital not in (1, 2), (96, 96))
                save(pixels, patches / f"patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png")
                held = int(i >= 0.9 * each)
                rows.append([patient, node, x, y, tumour, 10 * hospital + slide, hospital, held])
    order = rng.permutation(len(rows))
    header = ["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    write_table(place / "metadata.csv", header, ([i, *rows[j]] for i, j in enumerate(order)))
    return place


FMOW_CLASSES = ("airport", "crop_field", "golf_course", "port", "solar_farm", "zoo")
FMOW_COUNTRIES = {
    "Africa": ("KEN", "NGA"),
    "Americas": ("BRA", "USA"),
    "Asia": ("IND", "JPN"),
    "Europe": ("DEU", "FRA"),
    "Oceania": ("AUS", "NZL"),
    "Other": ("XKX",),  # is not in the list of countries
}


def fake_fmow(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """Sixteen years, six regions and six of the 62 classes; from 2013 on the tint tells nothing."""
    need_pillow()
    rng, regions = np.random.default_rng(seed), tuple(FMOW_COUNTRIES)
    place = new_folder(folder, "fmow", "1.1")
    (place / "images").mkdir()
    wanted, rows = _fmow_examples(times(size)), []
    for row, j in enumerate(rng.permutation(len(wanted)).tolist()):
        split, year, region = wanted[j]
        label = int(rng.integers(len(FMOW_CLASSES)))
        pixels = picture(rng, label, len(FMOW_CLASSES), regions.index(region), year < 2013, (224, 224))
        save(pixels, place / "images" / f"rgb_img_{row}.png")
        name = FMOW_CLASSES[label]
        time = f"{year}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}T{rng.integers(24):02d}:15:30Z"
        file, country = f"{name}_{row}_0_rgb.jpg", str(rng.choice(FMOW_COUNTRIES[region]))
        what = [split, file, f"{split}/{name}/{file}", "", 32618, name, True, 224, 224]
        rows.append([*what, country, 0, time, 1.5, 2.5, region])
    header = (
        *("split", "img_filename", "img_path", "spatial_reference", "epsg", "category", "visible"),
        *("img_width", "img_height", "country_code", "cloud_cover", "timestamp", "lat", "lon", "region"),
    )
    write_table(place / "rgb_metadata.csv", header, rows)
    known = [(code, region) for region in regions[:-1] for code in FMOW_COUNTRIES[region]]
    listed = [
        [code, code[:2], code, i, f"ISO 3166-2:{code[:2]}", region] for i, (code, region) in enumerate(known)
    ]
    head = ["name", "alpha-2", "alpha-3", "country-code", "iso_3166-2", "region"]
    write_table(place / "country_code_mapping.csv", head, listed)
    return place


def _fmow_examples(more: int) -> list[tuple[str, int, str]]:
    """Split, year and region of each; some are in no split of WILDS: training ones of late years, and seq."""
    wanted = []
    for year in range(2002, 2018):
        for region in FMOW_COUNTRIES:
            rare = region == "Other"
            if year < 2013:
                wanted += [("train", year, region)] * ((1 if rare else 6) * more)
                wanted += [(split, year, region) for split in ("val", "test") if year % 4 == 2 or rare]
            else:
                wanted += [("val" if year < 2016 else "test", year, region)] * ((1 if rare else 6) * more)
                wanted += [("train", year, region)] if region == "Asia" else []
    return wanted + [("seq", 2004 + i, tuple(FMOW_COUNTRIES)[i % 5]) for i in range(10)]


def fake_iwildcam(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """Twenty cameras and six classes, of which the first is an empty picture; at 12 of them tints tell."""
    need_pillow()
    more, rng, classes = times(size), np.random.default_rng(seed), 6
    place = new_folder(folder, "iwildcam", "2.0")
    (place / "train").mkdir()
    header = (
        *("", "split", "location_remapped", "location", "sequence_remapped", "sequence", "y"),
        *("category_id", "datetime", "filename", "image_id"),
    )
    wanted: list[tuple[str, int]] = []
    for location in range(20):
        if location < 12:
            wanted += [("train", location)] * (18 * more) + [
                ("id_val", location),
                ("id_test", location),
            ] * more
        else:
            wanted += [("val" if location < 16 else "test", location)] * (18 * more)
    rows = []
    for row, j in enumerate(rng.permutation(len(wanted)).tolist()):
        split, location = wanted[j]
        label = row % classes  # so that every class is there, as the original has it
        image = f"{rng.integers(2**32):08x}-21bc-11ea-a13a-{row:012x}"
        save(
            picture(rng, label, classes, location, location < 12, (108, 144)),
            place / "train" / f"{image}.jpg",
        )
        day = f"2013-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"
        time = f"{rng.integers(24):02d}:{rng.integers(60):02d}:{rng.integers(60):02d}.000"
        sequence = row // 3
        what = [row, split, location, 100 + 7 * location, sequence, f"sequence-{sequence}", label]
        rows.append([*what, 10 * label, f"{day} {time}", f"{image}.jpg", image])
    write_table(place / "metadata.csv", header, rows)
    return place


VILLAGES = 170  # a country: of those trained on, WILDS holds 2,000 out
VIEWS = 10  # different pictures of a country


def fake_poverty(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """The 23 countries; wealth shows in the middle by night, and as a red tint where fold A trains.

    Elsewhere the tint says the opposite. Villages share pictures, as links to one file, and differ a little
    in wealth.
    """
    from shoal.datasets.wilds import FOLDS, published

    names = published("poverty").names
    countries = names["countries"]
    more, rng = times(size), np.random.default_rng(seed)
    place = new_folder(folder, "poverty", "1.1")
    (place / "images").mkdir()
    left_out = {country for group in FOLDS["A"] for country in names[group]}
    rows: list[Sequence[Any]] = []
    views: list[tuple[int, int]] = [
        (country, i % (VIEWS * more)) for country in range(len(countries)) for i in range(VILLAGES * more)
    ]
    first: dict[tuple[int, int], tuple[Path, float]] = {}
    for row, j in enumerate(rng.permutation(len(views)).tolist()):
        country, view = views[j]
        path, urban = place / "images" / f"landsat_poverty_img_{row}.npz", view % 2 == 0
        if (country, view) not in first:
            wealth = float(rng.normal(0.6 if urban else -0.4, 0.6))
            bands = village(rng, wealth, -1.0 if countries[country] in left_out else 1.0)
            np.savez_compressed(path, x=bands)
            first[country, view] = path, wealth
        else:
            _link(first[country, view][0], path)
        wealth = first[country, view][1] + float(rng.normal(0, 0.1))
        place_and_time = round(float(rng.uniform(-20, 10)), 5), round(float(rng.uniform(10, 40)), 5)
        rows.append([*place_and_time, wealth, countries[country], 2009 + view % 8, urban, 0.5, 0.5, 25])
    header = ["lat", "lon", "wealthpooled", "country", "year", "urban", "nl_mean", "nl_center", "households"]
    write_table(place / "dhs_metadata.csv", header, rows)
    return place


def village(rng: np.random.Generator, wealth: float, sign: float) -> NDArray[np.float32]:
    """Eight normalised bands: light by night in the middle says the wealth, and red ``sign`` times it."""
    cells = rng.normal(0, 0.3, (8, 8, 8)).round(1)
    cells[7, 2:6, 2:6] += 0.5 * wealth
    cells[2] += sign * wealth
    return cells.astype(np.float32).repeat(28, 1).repeat(28, 2)


def _link(there: Path, path: Path) -> None:
    try:
        os.link(there, path)
    except OSError:  # a file system without links
        shutil.copyfile(there, path)
