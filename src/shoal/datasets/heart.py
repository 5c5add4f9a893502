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
from shoal.errors import InputError, TableWarning
from shoal.files import read_yaml
from shoal.options import Kind
from shoal.settings import Seed

if TYPE_CHECKING:
    import pandas as pd

RESPLIT = True
DOMAINS = ("cleveland", "hungarian", "switzerland", "va")
NUMERIC = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope"),
    *("ca", "thal", "num"),
)
"""The columns of the files in order; the last is the diagnosis."""
KINDS: dict[str, Kind] = {name: "numeric" if name in NUMERIC else "categorical" for name in COLUMNS[:-1]}
SOURCES = [Source(**each) for each in read_yaml(Path(__file__).with_name("heart.yaml"))["download"]]


def _paths(folder: str | Path | None) -> list[Path]:
    files = [source.file for source in SOURCES]
    return find_files(files, folder=folder, home="heart_disease", inside=(".", "heart_disease"), get="heart")


DOWNLOAD = Download("heart_disease", SOURCES, find=lambda folder: _paths(folder)[0].parent)


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

    table = read(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # nobody can change these files
        return from_table(table, label="ill", domain="hospital", held_out=held_out, kinds=KINDS, seed=seed)


def read(folder: str | None = None) -> pd.DataFrame:
    """All patients, with the columns ``ill`` and ``hospital``."""
    import pandas as pd

    tables = {}
    for hospital, path in zip(DOMAINS, _paths(folder), strict=True):
        try:
            table = pd.read_csv(path, header=None, na_values="?", dtype=float).set_axis([*COLUMNS], axis=1)
        except (OSError, ValueError) as error:
            why = str(error).strip()
            raise InputError(f"{str(path)!r} cannot be read ({why}); download it again.") from error
        tables[hospital] = table
    found = pd.concat(tables, names=["hospital"]).reset_index("hospital")
    measured = {name: found[name].where(found[name] > 0) for name in ("trestbps", "chol")}
    ill = (found["num"] > 0).map({True: "yes", False: "no"})
    return found.assign(**measured, ill=ill).drop(columns="num").reset_index(drop=True)
