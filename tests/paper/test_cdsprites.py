"""CdSprites-N: the same deal for every method, rows that share runs, and the experiment from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.experiments.execute import Store
from shoal.paper import cdsprites, demo
from shoal.paper.demo import demo as show
from shoal.paper.reproduce import reproduce

TINY = {"passes": 40, "size": 32, "per_domain": 40, "width": 2, "eval_limit": 40}
SIZE = replace(cdsprites.QUICK, numbers=(2,), deal=TINY, updates=10)
FULL = cdsprites.plan(cdsprites.PARTS, cdsprites.FULL, range(2))


def test_every_method_gets_the_same_deal() -> None:
    methods = (cdsprites.ERM, cdsprites.FISH, cdsprites.REGROUPED, cdsprites.REPTILE, cdsprites.IDGM)
    configs = cdsprites.configs(methods, [5, 10], [0, 1], passes=4000, size=32)
    assert len({c.identity for c in configs}) == len(configs) == len(methods) * 4
    assert {c.steps * c.domains_per_step for c in configs} == {4000}
    assert len({(c.optimizer, c.lr, c.batch_size, str(c.model_options)) for c in configs}) == 1
    assert all(
        c.steps // c.eval_every == cdsprites.POINTS and c.data_options["seed"] == c.seed for c in configs
    )
    with pytest.raises(InputError, match="multiple of 200 for N=10"):
        cdsprites.configs(methods, [10], [0], passes=4010)


def test_parts_of_the_figure() -> None:
    by_part = {part: [row for row in FULL if row.part == part] for part in cdsprites.PARTS}
    for part in ("adam", "sgd", "palette"):
        assert {"ERM", "Fish", "Fish, random grouping"} <= {row.method for row in by_part[part]}
        assert {c.steps * c.domains_per_step for row in by_part[part] for c in row.runs} == {12_000}
    assert {c.optimizer for row in by_part["sgd"] for c in row.runs} == {"sgd"}
    assert {c.data_options["palette"] for row in by_part["palette"] for c in row.runs} == {"random"}
    assert {row.domains for row in by_part["idgm"]} == set(cdsprites.FULL.numbers)


def test_rows_of_idgm_share_runs_that_are_evaluated_where_each_ends() -> None:
    rows = [row for row in FULL if row.part == "idgm"]
    assert len({c.identity for row in rows for c in row.runs}) == 2 * len(cdsprites.FULL.numbers)
    for row in rows:
        assert row.at == (
            12_000 // row.domains if row.method == "IDGM" else 6000 if "6,000" in row.method else 1500
        )
        for config in row.runs:
            assert config.steps >= row.at
            assert row.at % config.eval_every == 0


def test_from_runs_to_a_table_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdsprites, "QUICK", SIZE)
    options = {"quick": True, "out": tmp_path, "device": "cpu", "jobs": 1, "progress": False}
    result = reproduce("cdsprites", only=["adam", "idgm"], **options)
    rows = {row["method"]: row for row in result.data["rows"]}
    assert list(rows) == ["Fish", "Fish, random grouping", "ERM", "IDGM, equal updates", "IDGM"]
    assert not result.problems
    assert all(0 <= value <= 1 for row in rows.values() for value in row["test last"])
    assert "must not be taken for a result" in str(result)
    assert {"cdsprites-quick.png", "cdsprites-samples-quick.svg"} <= {path.name for path in result.files}
    folder = tmp_path / "cdsprites-quick"
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert len(kept) == 4  # both rows of IDGM are of one run

    # The shorter row is what a run of its length gives.
    (row,) = [r for r in cdsprites.plan(["idgm"], SIZE, [0]) if r.method == "IDGM, equal updates"]
    (whole,) = Store(folder).found(row.runs)
    assert whole.config.steps == 20
    assert [m["scores"]["test"]["average"] for m in whole.history if m["step"] == row.at] == rows[row.method][
        "test last"
    ]

    gone = next(iter(kept))
    gone.unlink()
    again = reproduce("cdsprites", only=["adam", "idgm"], **options)
    assert again.data == result.data
    changed = {path for path, time in kept.items() if path.stat().st_mtime_ns != time}
    assert changed == {gone}
    assert json.loads(json.dumps(again.to_dict()))["experiment"] == "cdsprites"
    with pytest.raises(InputError, match="Did you mean 'palette'"):
        reproduce("cdsprites", only="palete", **options)


def test_a_run_that_diverged_has_no_score() -> None:
    row = next(r for r in FULL if r.method == "IDGM" and r.domains == 10)
    every = row.runs[0].eval_every
    point = {"metric": "accuracy", "average": 0.5, "domains": {}}
    history = [
        {"step": step, "scores": dict.fromkeys(("train", "validation", "test"), point)}
        for step in range(every, row.at + 1, every)
    ]

    class Record:
        def __init__(self, number: int, points: int) -> None:
            self.config, self.history = row.runs[number], tuple(history[:points])

    records = {c.identity: Record(n, len(history) - n) for n, c in enumerate(row.runs)}
    entry = cdsprites.entry(row, records)  # type: ignore[arg-type]
    assert (entry["seeds"], entry["diverged"], entry["test last"]) == ([0], [1], [0.5])
    assert "1, 1 diverged" in cdsprites.table([entry]).text()


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "SIZE", {**TINY, "passes": 200})
    result = show(out=tmp_path, jobs=1)
    said = capsys.readouterr()
    assert said.out == ""
    assert "Square or ellipse?" in said.err
    assert "3 runs to do" in said.err
    assert [row["method"] for row in result.rows] == ["Fish", "Fish, random grouping", "ERM"]
    assert all(row["seeds"] == [0] for row in result.rows)
    assert {path.name for path in result.files} == {"demo.png", "demo.svg"}
    again = show(out=tmp_path, jobs=1, progress=False)
    assert again.rows == result.rows
    assert capsys.readouterr().err == ""
    assert "held-out domain" in str(again)
    assert not again.problems
    with pytest.raises(InputError, match="seeds must be at least 1"):
        show(seeds=0, out=tmp_path)
