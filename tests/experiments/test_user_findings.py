"""What new users met in comparisons and diagnoses of their own tables."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import datasets as sets
from shoal.api.source import find_source
from shoal.errors import InputError
from shoal.experiments.diagnose import columns_of
from shoal.report import charts

Captured = pytest.CaptureFixture[str]


def test_one_far_off_row_leaves_the_others_their_scale() -> None:
    def row(mean: float) -> dict[str, Any]:
        return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02, "values": {"a": mean - 0.03}}

    near = {"erm": row(-0.01), "fish": row(0.01), "coral": row(-0.03)}
    chart = charts.differences({**near, "majority": row(-0.4)}, "accuracy")
    at = {r["name"]: r["marks"][-1] for r in chart["rows"]}
    assert at["fish"]["x"] - at["coral"]["x"] > 25  # percent of the width
    assert "beyond" in at["majority"]["look"]
    assert chart["beyond"]
    assert not charts.differences(near, "accuracy")["beyond"]


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables; a column of each kind; a domain with an escape sequence in its name."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one.csv", "two.csv")):
        draw, lines = np.random.default_rng(number), ["age,sex,visit,smoker,site,ill"]
        for site in ("oslo", "lima", "red\x1b[31m"):
            for day, age in enumerate(draw.normal(50, 10, 30)):
                cells = (f"{age:.2f}", "mf"[day % 2], f"2024-0{1 + day % 9}-11", ("yes", "no")[day % 3 == 0])
                lines.append(",".join([*cells, site, "yes" if age + draw.normal(0, 10) > 50 else "no"]))
        Path(name).write_text("\n".join(lines))


@pytest.mark.usefixtures("patients")
def test_columns_of_every_kind_are_diagnosed() -> None:
    data = sets.load("table", file="one.csv", label="ill", domain="site", held_out="oslo")
    names = {part.name: part.parts for part in columns_of(data, data.examples.x)}  # type: ignore[attr-defined]
    assert set(names) == {"age", "sex", "visit", "smoker"}
    assert names["sex"] == ("= f", "= m")


def test_what_is_neither_a_path_nor_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name, meant in (("photoz", "photos"), ("cdsprite", "cdsprites")):
        with pytest.raises(InputError, match=f"no file or folder '{name}'.* Did you mean '{meant}'"):
            find_source(name)


def test_a_folder_named_like_a_built_in_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two is taken is said, and either can be named."""
    monkeypatch.chdir(tmp_path)
    Path("pacs").mkdir()
    with pytest.warns(UserWarning, match=r"'pacs' is taken as the built-in dataset; write './pacs' for"):
        assert find_source("pacs").dataset == "pacs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_source("./pacs").dataset == "image-folder"
        assert find_source("pacs", data_options={"folder": "elsewhere"}).dataset == "pacs"
        assert find_source("vlcs").dataset == "vlcs"
