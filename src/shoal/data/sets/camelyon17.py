"""Camelyon17-WILDS: is there a tumour in a patch of tissue, from a held-out hospital?"""

from __future__ import annotations

from typing import Literal

import numpy as np

from shoal.data.batch import DomainData
from shoal.data.wilds import by_groups, find, image_data, published, read_columns
from shoal.errors import InputError
from shoal.settings import Pixels

SUMMARY = (
    "Camelyon17-WILDS: 455,954 tissue patches from five hospitals, tumour or not. Reads the files of WILDS."
)
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Bandi et al., IEEE TMI 2018"

PUBLISHED = published("camelyon17")
SIZE = 96
VALIDATION, TEST = 1, 2  # hospitals
COLUMNS = {"patient": str} | dict.fromkeys(
    ("node", "x_coord", "y_coord", "tumor", "slide", "center", "split"), int
)


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    size: Pixels = SIZE,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool = False,
) -> DomainData:
    """Read the patches; domains and groups are hospitals, of which 0, 3 and 4 are trained on.

    Hospital 1 is the validation split, 2 the test split, and a tenth of the others ``id_validation``.

    Args:
        folder: ``camelyon17_v1.0`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.0.
        size: of the images, in pixels each way: 96 as published; the authors of Fish made them 224.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; all of them take 13 GB.
    """
    place = find(PUBLISHED, folder, version)
    table = read_columns(place.folder / PUBLISHED.table, COLUMNS)
    hospital, y = table["center"], table["tumor"]
    if not np.isin(y, (0, 1)).all():
        raise InputError(f"{str(place.folder / PUBLISHED.table)!r} has a tumor that is neither 0 nor 1.")
    trained = ~np.isin(hospital, (VALIDATION, TEST))
    splits = {
        "train": trained & (table["split"] == 0),
        "id_validation": trained & (table["split"] == 1),
        "validation": hospital == VALIDATION,
        "test": hospital == TEST,
    }
    slides = zip(table["patient"], table["node"], table["x_coord"], table["y_coord"], strict=True)
    return image_data(
        PUBLISHED,
        place,
        table,
        place.folder / "patches",
        (f"patient_{p}_node_{n}/patch_patient_{p}_node_{n}_x_{x}_y_{y}.png" for p, n, x, y in slides),
        {"hospital": hospital, "slide": table["slide"], "y": y},
        hospital,
        by_groups(hospital, "hospital {}".format, splits),
        classes=2,
        options={"size": size, "bad": bad, "cache": cache},
        model="densenet121",
        measures=("accuracy",),
        class_names=("no tumour", "tumour"),
    )
