"""The options of `reproduce`, the experiments that are one computation, and the paper's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.paper import read
from shoal.paper.reproduce import reproduce


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        ("linear", {"seeds": 3}, "^seeds: linear does not use it"),
        ("theorem", {"engine": "ray"}, "^engine: theorem does not use it"),
        ("cdsprites", {"seeds": 0}, "seeds must be at least 1, got 0"),
        ("cdsprites", {"only": "palete"}, "Did you mean 'palette'"),
        ("wilds", {"datasets": ["fmo"]}, "Did you mean 'fmow'"),
    ],
)
def test_wrong_options(experiment: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        reproduce(experiment, out=tmp_path, progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_theorem(tmp_path: Path) -> None:
    result = reproduce("theorem", quick=True, out=tmp_path, progress=False)
    for row in result.data["rows"]:
        assert row["slope"] == pytest.approx(2, abs=0.1)
        assert row["one_minus_cos"][-1] < 1e-6
    assert "Nothing is left out" in str(result)
    assert json.loads((tmp_path / "theorem-quick.json").read_text())["rows"]


def test_the_domainbed_table_is_complete() -> None:
    """Seven datasets and their average by ten methods; the printed averages are those of the columns."""
    *each, average = [c for c in read("published/domainbed.yaml") if c["table"] == "DomainBed"]
    assert len(each) == 7
    for row in read("presets/tables.yaml")["domainbed"]["tables"]["DomainBed"]["rows"]:
        method = row["label"]
        mean = sum(c["values"][method][0] for c in each) / 7
        assert abs(mean - average["values"][method][0]) <= 0.1, method
