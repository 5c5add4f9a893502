"""Generated data to try Shoal with."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from shoal.data.tables import check_table
from shoal.datasets.example import HOSPITALS, write_images, write_table
from shoal.errors import InputError

FIRST = "OSL-0001,oslo,2024-07-16,63,male,no,absent,116,220,normal,surgery,no"


def test_a_table_is_messy_and_always_the_same(tmp_path: Path) -> None:
    path = write_table(tmp_path / "deeper" / "patients.csv")
    assert path.read_bytes() == write_table(tmp_path / "again.csv").read_bytes()
    assert path.read_text().splitlines()[1] == FIRST
    assert 35_000 < path.stat().st_size < 50_000
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["hospital"] for row in rows) == {
        n: patients for n, (patients, *_) in HOSPITALS.items()
    }
    report = check_table(path, label="ill", domain="hospital")
    columns = {column["column"]: column for column in report["columns"]}
    kinds = {column["kind"] for column in columns.values()}
    assert kinds == {"dropped", "domain", "date", "numeric", "categorical", "boolean", "label"}
    assert columns["patient"]["kind"] == "dropped"
    assert "3 cells are not a number" in columns["pressure"]["warnings"][0]
    incomplete = {name for name, column in columns.items() if column["missing"]}
    assert incomplete == {"age", "smoker", "pressure", "cholesterol", "ecg"}


@pytest.mark.parametrize("write", [write_table, write_images])
def test_nothing_is_overwritten(write: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "", "file/below"):
        with pytest.raises(InputError, match=r"exists already|cannot be written"):
            write(tmp_path / name)  # type: ignore[operator]
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
