"""CdSprites-N: the same conditions for every method, rows that share runs, and the whole experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paper.conftest import QUICK
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.paper import cdsprites
from shoal.paper.demo import demo
from shoal.paper.recipes import Variant
from shoal.paper.reproduce import reproduce

FULL = cdsprites.preset("sizes")["full"]
TINY: dict[str, Any] = {
    "numbers": [2],
    "seeds": 1,
    "passes": 40,
    "updates": 20,
    "without": ["Reptile"],
    "data": {"size": 32, "per_domain": 40},
    "run": {"model_options": {"width": 2}, "batch_size": 8, "lr": 1e-3, "eval_limit": 40},
    "settings": {"fish": {"meta_lr": 0.3}},
}


def runs(part: str) -> list[RunConfig]:
    return [config for column in cdsprites.plan(part, FULL, range(2)).values() for config in column.runs]


def test_every_method_has_the_same_passes_and_optimizer() -> None:
    configs = runs("adam")
    assert len({c.identity for c in configs}) == len(configs) == 4 * 7 * 2
    assert {c.steps * c.domains_per_step for c in configs} == {12_000}
    assert len({(c.optimizer, c.lr, c.batch_size, str(c.model_options)) for c in configs}) == 1
    assert all(c.steps // c.eval_every == 20 and c.data_options["seed"] == c.seed for c in configs)
    with pytest.raises(InputError, match="multiple of 140 for N=7"):
        cdsprites.configs([Variant("Fish")], 7, [0], FULL)


@pytest.mark.usefixtures("in_process")
def test_from_runs_to_a_table_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cdsprites.preset("sizes"), "quick", TINY)
    result = reproduce("cdsprites", only=["adam", "idgm"], out=tmp_path, **QUICK)
    (adam,), (idgm,) = (result.data["tables"][f"{part}, held-out domain"] for part in ("adam", "idgm"))
    assert list(adam["ours"]) == ["Fish", "Fish, random grouping", "ERM"]
    assert list(idgm["ours"]) == ["IDGM, equal updates", "IDGM"]
    assert not result.problems
    assert all(0 <= row["mean"] <= 1 for row in (*adam["ours"].values(), *idgm["ours"].values()))
    assert "must not be taken for a result" in str(result)
    assert {"cdsprites-quick.png", "cdsprites-samples-quick.svg"} <= {path.name for path in result.files}
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cdsprites-quick").glob("*.json")}
    assert len(kept) == 4  # both rows of IDGM are of one run here: twenty updates are forty passes
    gone = next(iter(kept))
    gone.unlink()
    again = reproduce("cdsprites", only=["adam", "idgm"], out=tmp_path, **QUICK)
    assert again.data == result.data
    assert {path for path, time in kept.items() if path.stat().st_mtime_ns != time} == {gone}
    assert json.loads(json.dumps(again.to_dict()))["experiment"] == "cdsprites"


@pytest.mark.usefixtures("in_process")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cdsprites.preset("sizes"), "demo", TINY)
    result = demo(out=tmp_path, jobs=1)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Square or ellipse?" in output.err
    assert list(result.data["test"]) == ["Fish", "Fish, random grouping", "ERM"]
    assert {"demo.png", "demo.svg"} <= {path.name for path in result.files}
    again = demo(out=tmp_path, jobs=1, progress=False)
    assert again.data["test"] == result.data["test"]
    assert capsys.readouterr().err == ""
    assert "held-out domain" in str(again)
    with pytest.raises(InputError, match="seeds must be at least 1"):
        demo(seeds=0, out=tmp_path)
