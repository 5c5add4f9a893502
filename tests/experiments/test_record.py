"""Configurations and records as plain data."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, read_record

TINY = RunConfig("linear", "erm", 4, optimizer="sgd", lr=0.5, eval_every=2)


def made(config: RunConfig = TINY, **changes: Any) -> RunRecord:
    score = {"metric": "accuracy", "average": 0.75, "domains": {"D3": 0.5, "D4": 0.9}, "sizes": [8, 4]}
    score |= {"metrics": {"AUC": 0.5, "r": None}}
    history = (
        {"step": 2, "passes": 4, "loss": 0.7, "scores": {"test": score | {"domains": {"D3": 0.8}}}},
        {"step": 4, "passes": 8, "loss": 0.5, "scores": {"test": score}},
    )
    record = RunRecord(config, "finished", history, 0, "best on validation", 1.5, {"torch": "2"})
    return replace(record, **changes)


def test_the_identity_is_that_of_what_decides_the_result() -> None:
    """Labels, the order of options and defaults do not count."""
    named = replace(TINY, label="Row 1")
    assert (named.identity, named.name, TINY.name) == (TINY.identity, "Row 1", "erm")
    config = replace(TINY, data_options={"domains": 10, "size": 32})
    assert config.identity == replace(config, data_options={"size": 32, "domains": 10}).identity
    short = RunConfig("linear", "erm", 4)
    assert RunConfig.from_dict(short.to_dict()).identity == short.identity
    known = json.dumps({"algorithm": "erm", "dataset": "linear", "steps": 4}, sort_keys=True)
    assert short.identity == hashlib.sha256(known.encode()).hexdigest()[:16]
    changes: dict[str, Any] = {"dataset": "cdsprites", "algorithm": "fish", "steps": 5, "lr": 0.25, "seed": 7}
    changes |= {"data_options": {"per_domain": 200}, "settings": {"a": 1}, "optimizer": "adam"}
    changes |= {"holdout": 0.2, "protocol": {"held_out": ["a"], "trial": 0}}
    different = {replace(TINY, **{k: v}).identity for k, v in changes.items()} | {TINY.identity}
    assert len(different) == len(changes) + 1


ABOUT = {"held_out": ["0°"], "seed": 0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": "adm"}, "optimizer"),
        ({"seed": 0.5}, "seed"),
        ({"protocol": ABOUT, "holdout": 0.2}, "holdout"),
        ({"protocol": ABOUT, "data_options": {"held_out": "0°"}}, "held_out"),
        ({"stepz": 4}, r"'stepz'\. Did you mean 'steps'"),
    ],
    ids=str,
)
def test_wrong_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        RunConfig.from_dict(TINY.to_dict() | changes)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    matrix = [[1, None], [None, 0.5]]
    points = (
        {"step": 1, "domains": ["a", "b"], "mean_cosine": None, "sign_agreement": 1, "matrix": matrix},
        {"step": 3, "mean_cosine": 0.5, "layers": {"a": None}},
    )
    score = {"metric": "r", "average": None, "domains": {"a": None}, "metrics": {"x": None}, "selects": "x"}
    history = ({"step": 2, "passes": 2, "loss": None, "scores": {"test": score}},)
    path = tmp_path / "record.json"
    for record in (made(), made(error="?", warm_up=history), made(agreement=points, history=history)):
        path.write_text(json.dumps(record.to_dict()))
        assert read_record(path, record.config) == record
    path.write_text(json.dumps(made(history=()).to_dict() | {"status": "diverged", "selected": -1}))
    assert math.isnan(read_record(path).score("test"))
    with pytest.raises(InputError, match=r"record of another run \(seed 0, not 7\)"):
        read_record(path, replace(TINY, seed=7))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"selected": 2}, "selected is 2"),
        ({"surprise": 1}, "surprise"),
        ({"history": [{"step": 2, "passes": 2, "loss": 1, "scores": {"test": None}}]}, "scores.test"),
        ({"schema": 99}, "newer version of Shoal, schema 99.*update Shoal"),
        ({"schema": 2}, "older version of Shoal, schema 2.*remove"),
    ],
    ids=str,
)
def test_a_file_that_is_no_record_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(made().to_dict() | changes))
    with pytest.raises(InputError, match=f"record.json' is not a run record .*{named}"):
        read_record(path)
