"""CdSprites-N: the same conditions for every method, rows that share runs, and the whole experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paper.conftest import QUICK
from shoal.errors import InputError
from shoal.experiments.record import RunRecord
from shoal.paper import cdsprites
from shoal.paper.demo import demo
from shoal.paper.reproduce import reproduce

FULL = cdsprites.preset("sizes")["full"]
ROWS = cdsprites.plan(list(cdsprites.preset("parts")), FULL, range(2))
TINY: dict[str, Any] = {
    "numbers": [2],
    "seeds": 1,
    "passes": 40,
    "updates": {"IDGM, equal updates": 10, "IDGM, 40 updates": 40},
    "without": ["Reptile"],
    "data": {"size": 32, "per_domain": 40},
    "run": {"model_options": {"width": 2}, "batch_size": 8, "lr": 1e-3, "eval_limit": 40},
    "settings": {"fish": {"meta_lr": 0.3}},
}


def test_every_method_has_the_same_passes_and_optimizer() -> None:
    configs = [c for row in ROWS if row.part == "adam" for c in row.runs]
    assert len({c.identity for c in configs}) == len(configs) == 4 * 7 * 2
    assert {c.steps * c.domains_per_step for c in configs} == {12_000}
    assert len({(c.optimizer, c.lr, c.batch_size, str(c.model_options)) for c in configs}) == 1
    assert all(c.steps // c.eval_every == 20 and c.data_options["seed"] == c.seed for c in configs)
    with pytest.raises(InputError, match="multiple of 140 for N=7"):
        cdsprites.configs(cdsprites.rows("adam", FULL), 7, [0], FULL)


def test_parts() -> None:
    by_part = {part: [row for row in ROWS if row.part == part] for part in cdsprites.preset("parts")}
    for part in ("adam", "sgd", "palette"):
        assert {"ERM", "Fish", "Fish, random grouping"} <= {row.method for row in by_part[part]}
        assert {c.steps * c.domains_per_step for row in by_part[part] for c in row.runs} == {12_000}
    assert {c.optimizer for row in by_part["sgd"] for c in row.runs} == {"sgd"}
    assert {c.data_options["palette"] for row in by_part["palette"] for c in row.runs} == {"random"}
    assert {c.batch_size for row in by_part["batch-256"] for c in row.runs} == {256}
    assert by_part["as-printed"][0].runs[0].settings == {"trust": None, "gamma": 0.3}


def test_rows_of_idgm_share_runs_that_are_evaluated_where_each_ends() -> None:
    rows = [row for row in ROWS if row.part == "idgm"]
    assert {row.domains for row in rows} == set(FULL["numbers"])
    assert len({c.identity for row in rows for c in row.runs}) == 2 * len(FULL["numbers"])
    for row in rows:
        ends = {"IDGM": 12_000 // row.domains, "IDGM, equal updates": 1500, "IDGM, 6,000 updates": 6000}
        assert row.at == ends[row.method]
        assert all(c.steps >= row.at and row.at % c.eval_every == 0 for c in row.runs)


@pytest.mark.usefixtures("in_process")
def test_from_runs_to_a_table_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cdsprites.preset("sizes"), "quick", TINY)
    result = reproduce("cdsprites", only=["adam", "idgm"], out=tmp_path, **QUICK)
    rows = {row["method"]: row for row in result.data["rows"]}
    assert list(rows) == ["Fish", "Fish, random grouping", "ERM", "IDGM, equal updates", "IDGM"]
    assert not result.problems
    assert all(0 <= value <= 1 for row in rows.values() for value in row["test last"])
    assert "must not be taken for a result" in str(result)
    assert {"cdsprites-quick.png", "cdsprites-samples-quick.svg"} <= {path.name for path in result.files}
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cdsprites-quick").glob("*.json")}
    assert len(kept) == 4  # both rows of IDGM are of one run
    gone = next(iter(kept))
    gone.unlink()
    again = reproduce("cdsprites", only=["adam", "idgm"], out=tmp_path, **QUICK)
    assert again.data == result.data
    assert {path for path, time in kept.items() if path.stat().st_mtime_ns != time} == {gone}
    assert json.loads(json.dumps(again.to_dict()))["experiment"] == "cdsprites"


def test_a_run_that_diverged_has_no_score() -> None:
    row = next(r for r in ROWS if r.method == "IDGM" and r.domains == 10)
    every = row.runs[0].eval_every
    scores = {split: {"metric": "accuracy", "average": 0.5} for split in ("train", "validation", "test")}
    history = [{"step": step, "scores": scores} for step in range(every, row.at + 1, every)]
    records = {
        c.identity: RunRecord(c, "finished", tuple(history[: len(history) - n]), 0, "", 1.0, {})
        for n, c in enumerate(row.runs)
    }
    entry = cdsprites.entry(row, records)
    assert (entry["seeds"], entry["diverged"], entry["test last"]) == ([0], [1], [0.5])
    assert cdsprites.shown(entry)["seeds"] == "1, 1 diverged"


@pytest.mark.usefixtures("in_process")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cdsprites.preset("sizes"), "demo", TINY)
    result = demo(out=tmp_path, jobs=1)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Square or ellipse?" in output.err
    assert [row["method"] for row in result.data["rows"]] == ["Fish", "Fish, random grouping", "ERM"]
    assert {"demo.png", "demo.svg"} <= {path.name for path in result.files}
    again = demo(out=tmp_path, jobs=1, progress=False)
    assert again.data["rows"] == result.data["rows"]
    assert capsys.readouterr().err == ""
    assert "held-out domain" in str(again)
    with pytest.raises(InputError, match="seeds must be at least 1"):
        demo(seeds=0, out=tmp_path)
