"""Heart disease at four hospitals: is a patient ill, at a held-out hospital?

Detrano et al., International application of a new probability algorithm for the diagnosis of coronary artery
disease, Am. J. Cardiology 1989; UCI Heart Disease, CC BY 4.0, https://doi.org/10.24432/C52P4X
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.data.batch import DomainData
from shoal.data.download import Download, Source, find_files
from shoal.data.splits import held_out_names
from shoal.errors import InputError, TableWarning
from shoal.settings import Seed

if TYPE_CHECKING:
    import pandas as pd

RESPLIT = True
DOMAINS = ("cleveland", "hungarian", "switzerland", "va")
SHA256 = {
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
KINDS = {
    **dict.fromkeys(("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"), "categorical"),
    **dict.fromkeys(("thalach", "exang", "oldpeak", "slope", "ca", "thal"), "categorical"),
    **dict.fromkeys(("age", "trestbps", "chol", "thalach", "oldpeak", "ca"), "numeric"),
}
"""The columns in order, which the diagnosis follows."""


def _find(folder: Path) -> Path | None:
    try:
        return _paths(str(folder))[0].parent
    except InputError:
        return None


def _paths(folder: str | None) -> list[Path]:
    inside = (".", "heart_disease")
    return find_files(list(SHA256), folder=folder, home="heart_disease", inside=inside, get="heart")


URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
RECORDED = "as others recorded it; UCI publishes none"
SOURCES = tuple(Source(name, (URL + name,), f"sha256:{sha}", RECORDED) for name, sha in SHA256.items())
DOWNLOAD = Download("heart_disease", SOURCES, find=_find)


def load(*, held_out: str | list[str] = "va", seed: Seed = 0, folder: str | None = None) -> DomainData:
    """Read the four hospitals' patients; the label is whether the diagnosis is above 0.

    Columns are encoded as those of any table (see :func:`shoal.data.from_table`). A blood pressure or
    cholesterol of 0 is a missing one: all of Switzerland's cholesterol, and some of VA's. A fifth of every
    training hospital is held out for validation, under the same name. Hospitals differ in how many are ill:
    46 % in Cleveland, 36 % in Hungary, 93 % in Switzerland, 75 % at VA.

    Args:
        held_out: the held-out hospital, or a list of them.
        seed: for the choice of the validation examples.
        folder: where ``processed.cleveland.data`` and so on are; ``$SHOAL_DATA/heart_disease`` by default.
    """
    from shoal.data import from_table

    names, table = held_out_names(held_out, DOMAINS), read(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # nobody can change these files
        return from_table(table, label="ill", domain="hospital", held_out=names, kinds=KINDS, seed=seed)


def read(folder: str | None = None) -> pd.DataFrame:
    """All patients, with the columns ``ill`` and ``hospital``."""
    import pandas as pd

    tables = {}
    for hospital, path in zip(DOMAINS, _paths(folder), strict=True):
        try:
            table = pd.read_csv(path, header=None, na_values="?", dtype=float)
            tables[hospital] = table.set_axis([*KINDS, "num"], axis=1)
        except (OSError, ValueError) as error:
            why = str(error).strip()
            raise InputError(f"{str(path)!r} cannot be read ({why}); download it again.") from error
    found = pd.concat(tables, names=["hospital"]).reset_index("hospital")
    measured = {name: found[name].where(found[name] > 0) for name in ("trestbps", "chol")}
    ill = (found["num"] > 0).map({True: "yes", False: "no"})
    return found.assign(**measured, ill=ill).drop(columns="num").reset_index(drop=True)
