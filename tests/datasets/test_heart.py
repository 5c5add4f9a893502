"""Heart disease of four hospitals: what the real files give, and what is said of wrong ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal.datasets import heart, load
from shoal.errors import InputError

FILES = [source.file for source in heart.SOURCES]
ILL = {"cleveland": (139, 303), "hungarian": (106, 294), "switzerland": (115, 123), "va": (149, 200)}


@pytest.fixture
def folder() -> Path:
    root = os.environ.get("SHOAL_DATA")
    if not root or not Path(root, "heart_disease").is_dir():
        pytest.skip("SHOAL_DATA is unset or has no heart_disease")
    return Path(root, "heart_disease")


def test_hospitals_have_the_published_patients(folder: Path) -> None:
    for hospital, (ill, count) in ILL.items():
        data: Any = load("heart", held_out=hospital, folder=str(folder))
        x, y = data.examples[data.splits["test"].examples()]
        assert (y.sum(), len(y)) == (ill, count)
        assert x.isfinite().all()
        assert data.class_names == ("no", "yes")
        others = set(heart.DOMAINS) - {hospital}
        assert set(data.splits["train"].names) == set(data.splits["validation"].names) == others
    kinds = {column["column"]: column["kind"] for column in data.inputs["columns_report"]}
    assert kinds.items() >= heart.KINDS.items()


def test_what_the_table_says(folder: Path) -> None:
    """Of the files as they are; an impossible zero is missing."""
    table = heart.read(str(folder))
    text = [line.split(",") for name in FILES for line in (folder / name).read_text().splitlines()]
    wanted = pd.DataFrame(text, columns=list(heart.COLUMNS)).replace("?", "nan").astype(float)
    for name in heart.KINDS:
        zero = (wanted[name] == 0) & (name in ("chol", "trestbps"))
        assert np.array_equal(table[name], wanted[name].mask(zero), equal_nan=True)
    assert ((table["ill"] == "yes") == (wanted["num"] > 0)).all()


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
