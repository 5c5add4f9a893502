"""Heart disease at four hospitals: is a patient ill, at a held-out hospital?"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.download import SAY_WHERE, Download, Source, find_files
from shoal.data.splits import held_out_names, split
from shoal.errors import InputError
from shoal.settings import Seed

SUMMARY = (
    "UCI Heart Disease: 920 patients of four hospitals, 13 attributes, ill or not. Reads the files of UCI."
)
RESPLIT = True
PAPER = (
    "Detrano et al., International application of a new probability algorithm for the diagnosis of coronary "
    "artery disease, Am. J. Cardiology 1989; UCI Heart Disease, CC BY 4.0, https://doi.org/10.24432/C52P4X"
)

DOMAINS = ("cleveland", "hungarian", "switzerland", "va")
FILES = {
    "processed.cleveland.data": (18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "processed.hungarian.data": (10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    "processed.switzerland.data": (4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "processed.va.data": (6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}


def _find(folder: Path) -> Path | None:
    for place in (folder / "heart_disease", folder):
        if all((place / name).is_file() for name in FILES):
            return place
    return None


DOWNLOAD = Download(
    home="heart_disease",
    sources=tuple(
        Source(
            name,
            urls=(f"https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/{name}",),
            checksum=f"sha256:{sha256}",
            checksum_from="as others recorded it; UCI publishes none",
            size=size,
        )
        for name, (size, sha256) in FILES.items()
    ),
    find=_find,
)

COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
NUMBERS = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
NEVER_ZERO = ("trestbps", "chol")
SOMETIMES_MISSING = NUMBERS[1:]
# From the documentation beside the files, not from the data: so no category depends on the test hospital.
CATEGORIES = {
    "sex": (0, 1),
    "cp": (1, 2, 3, 4),
    "fbs": (0, 1),
    "restecg": (0, 1, 2),
    "exang": (0, 1),
    "slope": (1, 2, 3),
    "thal": (3, 6, 7),
}
DIAGNOSES = (0, 1, 2, 3, 4)

Table = NDArray[np.float64]


def load(*, held_out: str | list[str] = "va", seed: Seed = 0, folder: str | None = None) -> DomainData:
    """Read the four hospitals' patients; the label is whether the diagnosis is above 0.

    Numbers are standardised by the mean and deviation of the training examples: neither the test hospital
    nor the validation examples have a part in them. A missing number becomes the mean, and a column of 0 and
    1 says where. A category has one column for each value it may take, all 0 where it is missing. A blood
    pressure or cholesterol of 0 is a missing one: all of Switzerland's cholesterol, and some of VA's.

    A fifth of every training hospital is held out for validation, under the same name. Hospitals differ in
    how many are ill: 46 % in Cleveland, 36 % in Hungary, 93 % in Switzerland, 75 % at VA.

    Args:
        held_out: the held-out hospital, or a list of them.
        seed: for the choice of the validation examples.
        folder: where ``processed.cleveland.data`` and so on are; ``$SHOAL_DATA/heart_disease`` by default.
    """
    names = held_out_names(held_out, DOMAINS)
    paths = find_files(list(FILES), folder=folder, home="heart_disease", get="heart")
    tables = [read(path) for path in paths]
    sizes = {name: len(table) for name, table in zip(DOMAINS, tables, strict=True)}
    splits = split(Domains.from_sizes(sizes), names, 0.2, seed)
    table, test = np.concatenate(tables), splits["test"].indices
    x = features(table, table[splits["train"].examples()])
    y = table[:, COLUMNS.index("num")] > 0
    return DomainData(
        examples=TensorData(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))),
        splits=splits,
        classes=2,
        input_shape=x.shape[1:],
        model="mlp",
        notes={
            "test": f"{y[test].sum()} of its {len(test)} patients are ill",
            "examples": f"numbers are scaled on the hospitals other than {' and '.join(names)}",
        },
    )


def features(table: Table, fitted_to: Table) -> NDArray[np.float32]:
    """The patients of ``table`` as (n, 30), with the means and deviations of those in ``fitted_to``."""
    columns = []
    for name in NUMBERS:
        values, mean, scale = table[:, COLUMNS.index(name)], *_scale(fitted_to[:, COLUMNS.index(name)])
        columns.append(np.where(np.isnan(values), 0, (values - mean) / scale))
    columns += [np.isnan(table[:, COLUMNS.index(name)]) for name in SOMETIMES_MISSING]
    columns += [table[:, COLUMNS.index(n)] == value for n, known in CATEGORIES.items() for value in known]
    return np.stack(columns, axis=1).astype(np.float32)


def _scale(values: Table) -> tuple[float, float]:
    """The mean and deviation of the values that are known; a deviation of 1 where they are all equal."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return 0.0, 1.0
    return float(known.mean()), float(known.std()) if np.ptp(known) > 0 else 1.0


def read(path: Path) -> Table:
    """A hospital's patients, (n, 14), with NaN for what is missing."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as lines:
            rows = csv.reader(lines)
            table = [_numbers(row, f"{str(path)!r}, line {rows.line_num}") for row in rows if row]
    except (OSError, csv.Error) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}); {SAY_WHERE} to look.") from error
    if not table:
        raise InputError(f"{str(path)!r} contains no patients; {SAY_WHERE} to look.")
    return np.array(table)


def _numbers(row: list[str], where: str) -> list[float]:
    if len(row) != len(COLUMNS):
        raise InputError(f"{where}: {len(row)} values; there must be {len(COLUMNS)}: {', '.join(COLUMNS)}.")
    return [_number(text.strip(), name, where) for text, name in zip(row, COLUMNS, strict=True)]


def _number(text: str, name: str, where: str) -> float:
    if text == "?" and name != "num":
        return math.nan
    known = DIAGNOSES if name == "num" else CATEGORIES.get(name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (known and value not in known):
        right = ", ".join(map(str, known)) if known else "a number"
        unless = "" if name == "num" else ", or ? where it is missing"
        raise InputError(f"{where}: {name} is {text!r}; it must be {right}{unless}.")
    return math.nan if value == 0 and name in NEVER_ZERO else value
