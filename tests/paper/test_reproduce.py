"""The options of `reproduce`, and the experiments that are one computation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.paper import cost
from shoal.paper.reproduce import reproduce

SMALL = {"sprite-cnn": cost.Network((3, 32, 32), 2, 2, 4)}


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        ("linear", {"seeds": 3}, "seeds: linear does not use it; used by cdsprites, tracking, grouping"),
        ("theorem", {"jobs": 2}, "jobs: theorem does not use it"),
        ("cost", {"engine": "ray"}, "engine: cost does not use it"),
        ("cdsprites", {"algorithms": ["fish"]}, "algorithms: .*; used by domainbed, wilds"),
        ("domainbed", {"preset": "authors-code"}, "preset: .*; used by tracking, grouping, wilds, ablation"),
        ("wilds", {"only": ["rates"]}, "only: .*; used by cdsprites, cost, ablation"),
        ("cdsprites", {"data_dir": "."}, "data_dir: .*; used by tracking, grouping, domainbed"),
        ("cdsprites", {"seeds": 0}, "seeds must be at least 1, got 0"),
        ("lineer", {}, "Did you mean 'linear'"),
        ("ablation", {"only": ["rate"]}, "Did you mean 'rates'"),
        ("cost", {"only": ["resnet"]}, "Did you mean 'resnet50'"),
        ("tracking", {"datasets": ["camelyon"]}, "Did you mean 'camelyon17'"),
        ("wilds", {"datasets": ["fmo"]}, "Did you mean 'fmow'"),
        ("wilds", {"algorithms": ["fsh"]}, "Did you mean 'fish'"),
        ("domainbed", {"algorithms": ["fsh"]}, "Did you mean 'fish'"),
        ("grouping", {"datasets": ["pax"]}, "Did you mean 'pacs'"),
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


def test_cost_compares_within_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timings = iter(4.0**n for n in range(100))
    monkeypatch.setattr(cost, "NETWORKS", SMALL)
    monkeypatch.setattr(cost, "ROUNDS", 4)
    monkeypatch.setattr(cost, "WARM_UP", 0)
    monkeypatch.setattr(cost, "_timed", lambda step, batches, device: (step(batches), next(timings))[1])
    result = reproduce("cost", out=tmp_path, device="cpu", progress=False)
    rows = {row["method"]: row for row in result.data["rows"]}
    assert list(rows) == list(cost.METHODS)
    assert rows["Fish"]["ratio_to_fish"] == rows["ERM"]["ratio_to_erm"] == 1.0
    # The m-th timing takes 4^m. In each round IDGM comes right after Fish, but for the one that it begins.
    assert rows["IDGM, exact"]["ratio_to_fish"] == 4.0
    assert "about 10 ×" in str(result)
    assert result.to_dict()["environment"]["device"] == "cpu"


def test_help_needs_no_torch() -> None:
    code = "import sys, shoal.paper.reproduce, shoal.paper.demo; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
