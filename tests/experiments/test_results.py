"""``shoal.results``: the runs in a folder as a DataFrame."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store

ERM = RunConfig("digits", "erm", 100, data_options={"held_out": "15°"})
FISH = RunConfig("digits", "fish", 200, settings={"meta_lr": 0.5}, lr=0.01, label="Fish")


def scores(test: float) -> dict[str, Any]:
    def split(value: float, names: str) -> dict[str, Any]:
        return {"metric": "accuracy", "average": value, "domains": dict.fromkeys(names.split(), value)}

    return {"train": split(0.9, "a b"), "validation": split(0.8, "a b"), "test": split(test, "15°")}


def made(config: RunConfig = ERM, test: float = 0.5, **changes: Any) -> RunRecord:
    history = (
        {"step": 50, "passes": 50, "loss": 1.0, "scores": scores(test)},
        {"step": 100, "passes": 100, "loss": 0.5, "scores": scores(test / 2)},
    )
    record = RunRecord(config, "finished", history, 0, "best on validation", 1.5, {"device": "cpu"})
    return replace(record, **changes)


def save(folder: Path, *records: RunRecord) -> Path:
    for record in records:
        Store(folder).save(record)
    return folder


def test_a_row_has_settings_and_scores(tmp_path: Path) -> None:
    save(tmp_path, made(FISH))
    (row,) = shoal.results(tmp_path).to_dict("records")
    expected = {
        "dataset": "digits",
        "algorithm": "fish",
        "name": "Fish",
        "held_out": "15°",
        "seed": 0,
        "status": "finished",
        "metric": "accuracy",
        "step": 50,
        "steps": 200,
        "lr": 0.01,
        "batch_size": 32,
        "rule": "best on validation",
        "seconds": 1.5,
        "device": "cpu",
        "test": 0.5,
        "test_last": 0.25,
        "validation": 0.8,
        "train": 0.9,
        "test.15°": 0.5,
        "train.b": 0.9,
        "settings.meta_lr": 0.5,
        "identity": FISH.identity,
        "path": f"{FISH.identity}.json",
    }
    assert {name: row[name] for name in expected} == expected


def test_stores_and_run_folders_at_any_depth_in_a_fixed_order(tmp_path: Path) -> None:
    save(tmp_path / "compare" / "runs", made(replace(ERM, seed=1)), made())
    save(tmp_path / "compare" / "working", made(FISH))
    path = tmp_path / "seeds" / "seed-2" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made(replace(ERM, seed=2)).to_dict()))
    for other in ("seeds.json", "x.plan.json", "compare-x.json"):
        (tmp_path / other).write_text("[]")
    frame = shoal.results(str(tmp_path))
    assert frame[["name", "seed"]].values.tolist() == [["Fish", 0], ["erm", 0], ["erm", 1], ["erm", 2]]
    assert frame["path"].iloc[-1] == "seeds/seed-2/record.json"
    assert frame["settings.meta_lr"].isna().tolist() == [False, True, True, True]


def test_of_several_records_of_a_run_the_newest(tmp_path: Path) -> None:
    labelled = replace(ERM, label="plain")  # a label makes no other run
    for name, config, test, at in (
        ("old", ERM, 0.1, 10),
        ("new", labelled, 0.3, 30),
        ("middle", ERM, 0.2, 20),
    ):
        save(tmp_path / name, made(config, test))
        os.utime(Store(tmp_path / name).path(ERM), (at, at))
    assert shoal.results(tmp_path)["test"].tolist() == [0.3]


def test_runs_that_diverged_or_failed_have_no_scores(tmp_path: Path) -> None:
    save(tmp_path, made(), made(replace(ERM, seed=1), status="diverged", error="the loss is nan"))
    Store(tmp_path).fail(replace(ERM, seed=2), "RuntimeError: no memory")
    save(tmp_path, made(replace(ERM, seed=3), test=math.nan))
    frame = shoal.results(tmp_path).set_index("seed")
    assert frame["status"].tolist() == ["finished", "diverged", "failed", "finished"]
    assert frame["test"].isna().tolist() == [False, True, True, True]
    assert frame["validation"].isna().tolist() == [False, True, True, False]
    assert frame["error"][2] == "RuntimeError: no memory"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"config": {}}',
        json.dumps(made().to_dict() | {"history": [1]}),
        json.dumps(made().to_dict() | {"selected": 7}),
        json.dumps(made().to_dict() | {"surprise": 1}),
        json.dumps(made().to_dict() | {"schema": 99}),
    ],
)
def test_files_that_are_no_records_give_one_warning(content: str, tmp_path: Path) -> None:
    save(tmp_path, made(FISH))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(content)
    with pytest.warns(UserWarning, match="is not a run record") as caught:
        frame = shoal.results(tmp_path)
    assert frame["algorithm"].tolist() == ["fish"]
    (warning,) = caught
    assert all(str(tmp_path / name / "record.json") in str(warning.message) for name in ("a", "b"))


def test_no_runs_and_no_folder(tmp_path: Path) -> None:
    frame = shoal.results(tmp_path)
    assert len(frame) == 0
    assert {"algorithm", "held_out", "test"} <= set(frame)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"there is no folder '.*nowhere'"):
        shoal.results(tmp_path / "nowhere")


def test_runs_of_fit(tmp_path: Path) -> None:
    """Their data are not recorded, so that equal options do not make them the same run."""
    data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("oslo", "lima")}
    for name in ("one", "two"):
        model = torch.nn.Linear(3, 2)
        shoal.fit(
            "erm", model, data, test=data, steps=4, progress=False, folder=tmp_path / name, device="cpu"
        )
    frame = shoal.results(tmp_path)
    assert isinstance(frame, pandas.DataFrame)
    assert frame["steps"].tolist() == [4, 4]
    assert frame["test"].between(0, 1).all()
