"""The table of random grouping."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.cli import main
from shoal.data.sets import registry
from shoal.paper import tables

ARGUMENTS = ["--model", "small-cnn", "--steps", "3", "--seeds", "2", "--device", "cpu", "--jobs", "1"]
ARGUMENTS += ["--data", "size=16", "augment=false"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A PACS of ten tiny pictures a domain and class."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for domain in registry.module("pacs").DOMAINS:
        for label in ("dog", "horse"):
            folder = tmp_path / "data" / "PACS" / domain / label
            folder.mkdir(parents=True)
            for i in range(10):
                pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


def test_one_command_makes_the_table(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    command = ["reproduce", "grouping", "--datasets", "pacs", "vlcs", "fmow", "--out", str(tmp_path / "out")]
    command += ["--data-dir", str(pictures), *ARGUMENTS]
    assert main([*command, "--json"]) == 0
    columns = {c["title"]: c for c in json.loads(capsys.readouterr().out)["columns"]}
    assert columns["PACS"]["runs"] == 2 * 3 * 4
    assert columns["PACS"]["missing"] == 0
    assert columns["PACS"]["paper"]["Fish, RG"] == [83.9, 0.7]
    for values in columns["PACS"]["ours"].values():
        assert len(values["values"]) == 2
        assert 0 <= values["mean"] <= 1
    for absent in ("VLCS", "FMoW"):
        assert columns[absent]["why_not"]
        assert columns[absent]["ours"] == {}
    assert main([*command, "--no-run"]) == 0
    shown = capsys.readouterr().out
    assert "PACS: Fish against Fish, RG" in shown
    assert "of 2 seeds" in shown
    assert "VLCS: not run" in shown
    assert "85.5 ± 0.3" in (tmp_path / "out" / "grouping.md").read_text(encoding="utf-8")


def test_columns_are_the_papers() -> None:
    names = ["cDsprites (N=10)", "FMoW", "VLCS", "PACS", "OfficeHome"]
    assert [c["dataset"] for c in tables.grouping_claims().values()] == names
    assert all(list(c["values"]) == list(tables.GROUPING) for c in tables.grouping_claims().values())


def test_runs_that_are_not_there_are_no_numbers() -> None:
    (column,) = tables.grouping(tables.Settings(seeds=2, size=32), ["cdsprites"])
    assert len(column.runs) == 6
    entry = column.entry([])
    assert (entry["runs"], entry["missing"]) == (6, 6)
    assert all(f["mean"] is None and f["values"] == [None, None] for f in entry["ours"].values())
    assert "–" in tables.table([entry]).text()


def test_an_unknown_dataset_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "grouping", "--datasets", "pax", "--out", str(tmp_path)]) != 0
    assert "pacs" in capsys.readouterr().err
