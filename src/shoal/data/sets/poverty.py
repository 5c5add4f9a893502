"""PovertyMap-WILDS: how wealthy is a village, by satellite, in a held-out country?"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.images import Unreadable
from shoal.data.wilds import (
    by_group,
    by_groups,
    check_splits,
    coded,
    find,
    need_folder,
    notes,
    published,
    read_columns,
    row_of,
)
from shoal.errors import InputError, unknown_name
from shoal.files import check_zip

SUMMARY = (
    "PovertyMap-WILDS: 19,669 satellite images of 23 countries, labelled with wealth. Reads the files of "
    "WILDS."
)
PAPER = "Koh et al., WILDS, ICML 2021, https://arxiv.org/abs/2012.07421; Yeh et al., Nature Comm. 2020"

PUBLISHED = published("poverty")
BANDS = ("blue", "green", "red", "swir1", "swir2", "temperature", "nir", "nightlights")
SHAPE = (len(BANDS), 224, 224)
COLUMNS = {"country": str, "wealthpooled": float, "urban": str}
OTHERS = ("lat", "lon", "year", "nl_mean", "nl_center", "households")
STACK = "landsat_poverty_imgs.npy"  # all images of version 1.0
EVALUATED = 2_000  # examples of training countries held out, half for validation and half for test
URBAN = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}

COUNTRIES = tuple(PUBLISHED.names["countries"])
FOLDS = {
    "A": ("west", "angola"),
    "B": ("cameroon", "west"),
    "C": ("congo", "cameroon"),
    "D": ("kenya", "congo"),
    "E": ("angola", "kenya"),
}
"""The groups of countries of the validation and the test split."""


def load(
    *,
    folder: str | None = None,
    version: str | None = None,
    fold: str = "A",
    nightlights: bool = True,
    augment: bool = True,
    size: int = 224,
) -> DomainData:
    """Read the images of eight bands, which come normalised; the label is a village's wealth.

    Training domains are countries, other splits are scored by urban and rural villages. A thousand examples
    of the training countries are ``id_validation``, and a thousand ``id_test``.

    WILDS changes only the three visible bands in training: it mirrors them and shifts their colours, after
    cutting the normalised numbers to bytes. Here the whole image is mirrored and no colour changed.

    Args:
        folder: ``poverty_v1.1`` or the folder it is in; ``$SHOAL_DATA/wilds`` by default.
        version: 1.1, or 1.0, whose images lie in one array; by default the newest that is there.
        fold: which countries are held out, A to E.
        nightlights: whether the band of nightly light is shown; else it is 0.
        augment: whether training images are mirrored at random, both ways.
        size: of the images, in pixels each way; fewer than the files' 224 are means over them.
    """
    if not isinstance(size, int) or not 8 <= size <= SHAPE[-1]:
        raise InputError(f"size={size!r}; it must be a whole number from 8 to {SHAPE[-1]}.")
    if fold not in FOLDS:
        raise unknown_name("fold of poverty", fold, FOLDS)
    place = find(PUBLISHED, folder, version)
    path = place.folder / PUBLISHED.table
    table = read_columns(path, COLUMNS, OTHERS)
    urban = coded(path, "urban", np.char.lower(table["urban"].astype(str)), URBAN)
    country = coded(path, "country", table["country"], {name: n for n, name in enumerate(COUNTRIES)})
    if not np.isfinite(table["wealthpooled"]).all():
        raise InputError(f"{str(path)!r} has a wealthpooled that is not a number.")
    if place.version != "1.0":
        need_folder(PUBLISHED, place.folder / "images")
    chosen = split_by_fold(country, fold)
    splits = by_groups(urban, ("rural", "urban").__getitem__, chosen)
    if "train" in splits:
        splits["train"] = by_group(country, lambda code: COUNTRIES[code].replace("_", " "), chosen["train"])
    check_splits(PUBLISHED, place.folder, splits)
    examples = Villages(
        place.folder,
        {"urban": urban, "y": table["wealthpooled"], "country": country},
        stacked=place.version == "1.0",
        nightlights=nightlights,
        augment=augment,
        size=size,
    )
    return DomainData(
        examples=examples.in_splits(splits),
        splits=splits,
        classes=None,
        input_shape=(len(BANDS), size, size),
        model="resnet18",
        measures=("worst-group Pearson r", "Pearson r", "mse"),
        notes=notes(place, table, test=f"fold {fold}"),
    )


def split_by_fold(country: NDArray[Any], fold: str) -> dict[str, NDArray[np.bool_]]:
    """Which examples are in which split; those held out of the training countries are drawn as in WILDS."""
    validation, test = (
        np.isin(country, [COUNTRIES.index(name) for name in PUBLISHED.names[group]]) for group in FOLDS[fold]
    )
    order = np.flatnonzero(~(validation | test))
    np.random.default_rng(ord(fold) + 541_433).shuffle(order)
    half = EVALUATED // 2
    drawn = {"train": order[EVALUATED:], "id_validation": order[:half], "id_test": order[half:EVALUATED]}
    splits = {name: np.zeros(len(country), bool) for name in drawn}
    for name, chosen in drawn.items():
        splits[name][chosen] = True
    return {
        "train": splits["train"],
        "id_validation": splits["id_validation"],
        "validation": validation,
        "id_test": splits["id_test"],
        "test": test,
    }


class Villages(Examples):
    """Images as float32 (8, ``size``, ``size``), at 224 as in the files, with the wealth of each."""

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, NDArray[Any]],
        *,
        stacked: bool,
        nightlights: bool,
        augment: bool,
        size: int = SHAPE[-1],
    ) -> None:
        self.folder, self.metadata, self.stacked = str(folder), metadata, stacked
        self.nightlights, self.augment, self.size = nightlights, augment, size
        self.labels = metadata["y"].astype(np.float32)
        self.trained = np.zeros(len(self.labels), bool)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            x = torch.from_numpy(self._bands(index))
        except Unreadable as error:
            raise InputError(
                f"the image {self.path(index)!r} cannot be read ({error}). Download it again; "
                "`shoal data check` lists all such files."
            ) from error
        if not self.nightlights:
            x[-1] = 0
        if self.size < SHAPE[-1]:
            x = torch.nn.functional.adaptive_avg_pool2d(x, self.size)
        if self.augment and self.trained[index]:
            x = x.flip([axis for axis, chance in zip((1, 2), torch.rand(2), strict=True) if chance < 0.5])
        return x, torch.tensor(self.labels[index])

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def path(self, index: int) -> str:
        """Where an image is."""
        name = STACK if self.stacked else f"images/landsat_poverty_img_{index}.npz"
        return str(Path(self.folder, name))

    def problem(self, index: int) -> str | None:
        """Why an image cannot be read, if it cannot."""
        try:
            self._bands(index)
        except Unreadable as error:
            return str(error)
        return None

    def _bands(self, index: int) -> NDArray[np.float32]:
        path = self.path(index)
        bands = np.moveaxis(row_of(path, index), -1, 0) if self.stacked else _unpacked(path)
        if bands.shape != SHAPE:
            raise Unreadable(f"its shape is {bands.shape}, not {SHAPE}")
        return np.array(bands, np.float32)

    def in_splits(self, splits: Mapping[str, Domains]) -> Self:
        """The same images in other splits: those of ``"train"`` are mirrored."""
        same = copy.copy(self)
        same.trained = np.zeros(len(self), bool)
        same.trained[splits["train"].examples()] = True
        return same

    def evaluation(self) -> Self:
        """The same images, none of them mirrored."""
        same = copy.copy(self)
        same.augment = False
        return same


def _unpacked(path: str) -> NDArray[Any]:
    try:
        check_zip(path)
        with np.load(path, allow_pickle=False) as result:
            bands: NDArray[Any] = result["x"]
    except FileNotFoundError as error:
        raise Unreadable("there is no such file") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    return bands
