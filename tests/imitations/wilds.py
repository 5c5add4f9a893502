"""Small imitations of the datasets of WILDS with images, in their layouts. None of it is real."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

WILDS = {
    **dict.fromkeys(("camelyon17", "fmow", "iwildcam", "poverty"), "imitations.wilds"),
    **dict.fromkeys(("amazon", "civilcomments"), "imitations.wilds_text"),
}
"""Where the function ``fake_NAME`` of each is; it takes the folder to write into."""


def maker(name: str) -> Callable[[Path], Path]:
    """The function that writes an imitation of dataset ``name`` and returns the dataset's own folder."""
    found: Callable[[Path], Path] = getattr(importlib.import_module(WILDS[name]), f"fake_{name}")
    return found


def save(path: Path, rng: np.random.Generator, label: int, height: int, width: int) -> None:
    """An image of a few grey squares, brighter for higher classes."""
    from PIL import Image

    cells = (30 * label + rng.integers(0, 60, (4, 4, 3))).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(cells.repeat(height // 4, 0).repeat(width // 4, 1)).save(path)


def fake_camelyon17(folder: Path) -> Path:
    """Five hospitals of two slides each."""
    place, rng, rows = folder / "camelyon17_v1.0", np.random.default_rng(0), []
    for slide in range(10):
        patient, node, hospital = f"{4 + 10 * slide:03d}", slide % 5, slide // 2
        for i in range(60):
            x, y = 32 * int(rng.integers(900)), 1000 * i
            name = f"patient_{patient}_node_{node}"
            save(place / "patches" / name / f"patch_{name}_x_{x}_y_{y}.png", rng, i % 2, 96, 96)
            rows.append((patient, node, x, y, i % 2, 10 * hospital + slide % 2, hospital, int(i >= 54)))
    columns = ["patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    table = pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=0)
    table.to_csv(place / "metadata.csv")
    (place / "RELEASE_v1.0.txt").touch()
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


def fake_fmow(folder: Path) -> Path:
    """Sixteen years, six regions and six of the 62 classes; some rows are in no split."""
    place, rng, wanted = folder / "fmow_v1.1", np.random.default_rng(0), []
    for year, region in product(range(2002, 2018), FMOW_COUNTRIES):
        late = "val" if year < 2016 else "test"
        wanted += [("train" if year < 2013 else late, year, region)] * (1 if region == "Other" else 6)
        if year < 2013 and (year % 4 == 2 or region == "Other"):
            wanted += [("val", year, region), ("test", year, region)]
        wanted += [("train", year, region)] * (year >= 2013 and region == "Asia")
    wanted += [("seq", 2004 + i, "Asia") for i in range(10)]
    rows = []
    for row, j in enumerate(rng.permutation(len(wanted)).tolist()):
        (split, year, region), label = wanted[j], int(rng.integers(6))
        save(place / "images" / f"rgb_img_{row}.png", rng, label, 224, 224)
        rows.append(
            (split, FMOW_CLASSES[label], rng.choice(FMOW_COUNTRIES[region]), f"{year}-07-15T12:15:30Z")
        )
    columns = ["split", "category", "country_code", "timestamp"]
    pd.DataFrame(rows, columns=columns).to_csv(place / "rgb_metadata.csv", index=False)
    known = [(code, r) for r, codes in FMOW_COUNTRIES.items() for code in codes if r != "Other"]
    pd.DataFrame(known, columns=["alpha-3", "region"]).to_csv(place / "country_code_mapping.csv", index=False)
    (place / "RELEASE_v1.1.txt").touch()
    return place


def fake_iwildcam(folder: Path) -> Path:
    """Twenty cameras and six classes."""
    place, rng, wanted = folder / "iwildcam_v2.0", np.random.default_rng(0), []
    for location in range(20):
        split = "train" if location < 12 else "val" if location < 16 else "test"
        wanted += [(split, location)] * 18 + [(s, location) for s in ("id_val", "id_test")] * (location < 12)
    rows = []
    for row, j in enumerate(rng.permutation(len(wanted)).tolist()):
        (split, location), name = wanted[j], f"{row:08x}.jpg"
        save(place / "train" / name, rng, row % 6, 108, 144)
        rows.append((split, location, row // 3, row % 6, 10 * (row % 6), "2013-07-15 12:15:30.000", name))
    columns = ["split", "location_remapped", "sequence_remapped", "y", "category_id", "datetime", "filename"]
    pd.DataFrame(rows, columns=columns).to_csv(place / "metadata.csv")
    (place / "RELEASE_v2.0.txt").touch()
    return place


def fake_poverty(folder: Path) -> Path:
    """170 villages in each of the 23 countries, of which many share an image, as links to one file."""
    from shoal.datasets.wilds import published

    place, rng = folder / "poverty_v1.1", np.random.default_rng(0)
    (place / "images").mkdir(parents=True)
    countries = rng.permutation(np.repeat(published("poverty").columns["country"], 170))
    for row in range(len(countries)):
        path = place / "images" / f"landsat_poverty_img_{row}.npz"
        if row < 10:
            cells = rng.normal(0, 0.3, (8, 8, 8)).astype(np.float32)
            np.savez_compressed(path, x=cells.repeat(28, 1).repeat(28, 2))
        else:
            os.link(place / "images" / f"landsat_poverty_img_{row % 10}.npz", path)
    urban = rng.random(len(countries)) < 0.5
    wealth = np.where(urban, 0.6, -0.4) + rng.normal(0, 0.6, len(countries))
    place_of = {"lat": rng.uniform(-20, 10, len(countries)), "lon": rng.uniform(10, 40, len(countries))}
    table = pd.DataFrame({**place_of, "wealthpooled": wealth, "country": countries, "year": 2009})
    other = dict.fromkeys(("nl_mean", "nl_center", "households"), 0.5)
    table.assign(urban=urban, **other).to_csv(place / "dhs_metadata.csv", index=False)
    (place / "RELEASE_v1.1.txt").touch()
    return place
