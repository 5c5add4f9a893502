"""Heart disease of four hospitals: what the real files give, and what is said of wrong ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal.data.batch import DomainData
from shoal.datasets import heart, load
from shoal.errors import InputError

FILES = [source.file for source in heart.SOURCES]
ILL = {"cleveland": (139, 303), "hungarian": (106, 294), "switzerland": (115, 123), "va": (149, 200)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the real files."""
    root = os.environ.get("SHOAL_DATA")
    if not root or not Path(root, "heart_disease").is_dir():
        pytest.skip("SHOAL_DATA is unset or has no heart_disease")
    for name in FILES:
        shutil.copy(Path(root, "heart_disease", name), tmp_path)
    return tmp_path


def rows(data: DomainData, split: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.examples[data.splits[split].examples()]  # type: ignore[index]
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("hospital", heart.DOMAINS)
def test_hospitals_have_the_published_patients(hospital: str, folder: Path) -> None:
    data = load("heart", held_out=hospital, folder=str(folder))
    x, y = rows(data, "test")
    assert (y.sum(), len(y)) == ILL[hospital]
    assert np.isfinite(x).all()
    assert data.class_names == ("no", "yes")
    kinds = {column["column"]: column["kind"] for column in data.inputs["columns_report"]}
    assert kinds.items() >= heart.KINDS.items()
    others = set(heart.DOMAINS) - {hospital}
    assert set(data.splits["train"].names) == set(data.splits["validation"].names) == others
    # No number that is estimated depends on the held-out hospital or on a validation patient.
    path = folder / f"processed.{hospital}.data"
    path.write_text("\n".join(["99,0,4,90,999,0,2,99,1,9,3,3,7,4"] * len(y)))
    changed = load("heart", held_out=hospital, folder=str(folder))
    for split in ("train", "validation"):
        assert np.array_equal(rows(changed, split)[0], rows(data, split)[0])


def test_what_the_table_says(folder: Path) -> None:
    """Of the files as they are; an impossible zero is missing."""
    table = heart.read(str(folder))
    text = [line.split(",") for name in FILES for line in (folder / name).read_text().splitlines()]
    wanted = pd.DataFrame(text, columns=[*heart.KINDS, "num"]).replace("?", "nan").astype(float)
    for name in heart.KINDS:
        zero = (wanted[name] == 0) & (name in ("chol", "trestbps"))
        assert np.array_equal(table[name], wanted[name].mask(zero), equal_nan=True)
    assert ((table["ill"] == "yes") == (wanted["num"] > 0)).all()
    assert table.groupby("hospital").size().to_dict() == {name: n for name, (_, n) in ILL.items()}


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("63,1,1,145,233,1,2,150,0,2.3,3,0,6,0,9", "line 2, saw 15"),
        ("63,1,1,145,high,1,2,150,0,2.3,3,0,6,0", "'high'"),
        (None, "there is no file 'processed.va.data'"),
    ],
)
def test_damaged_and_missing_files_are_named(spoilt: Any, message: str, tmp_path: Path) -> None:
    patient = "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n"
    for name in FILES:
        (tmp_path / name).write_text(patient * 7)
    path = tmp_path / "processed.va.data"
    path.unlink() if spoilt is None else path.write_text(patient + spoilt)
    with pytest.raises(InputError, match=rf"(?=.*processed\.va\.data').*{message}"):
        load("heart", folder=str(tmp_path))
