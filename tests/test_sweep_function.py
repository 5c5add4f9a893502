"""``shoal.sweep``: what it returns and writes, its budget, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import InputError
from shoal.experiments import execute
from shoal.experiments.store import Store

TINY: dict[str, Any] = {"seeds": 1, "search": 1, "steps": 2, "eval_every": 1, "device": "cpu", "jobs": 1}
TINY |= {"data_options": {"per_domain": 100}}


def test_a_sweep_shows_and_saves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = shoal.sweep("linear", algorithms=["erm", "fish"], out=tmp_path, progress=False, **TINY)
    assert not capsys.readouterr().err
    assert len(result.records) == 6
    frame = result.to_frame()
    assert len(frame) == 2 * 2 * 3  # rules, algorithms, held-out domains
    assert set(frame["held_out"]) == {"D1", "D2", "D3"}
    assert (set(frame["status"]), set(frame["seed"]), set(frame["trial"])) == ({"scored"}, {0}, {0})
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert saved == json.loads(json.dumps(result.results))
    assert {path.name for path in tmp_path.glob("sweep-oracle.*")} == {
        f"sweep-oracle.{ending}" for ending in ("md", "tex")
    }


def test_a_budget_stops_after_the_first_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = shoal.sweep("linear", algorithms="erm", out=tmp_path, budget=1e-6, **TINY)
    assert len(part.records) == 1
    assert "2 runs remain" in capsys.readouterr().err
    assert len(shoal.sweep("linear", algorithms="erm", out=tmp_path, **TINY).records) == 3


def test_failed_runs_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, short = execute.run, {**TINY, "progress": False}

    def failing(config: Any, *args: Any, **options: Any) -> Any:
        if config.held_out == ["D2"] or config.algorithm == "fish":
            raise OSError("no space.")
        return usual(config, *args, **options)

    monkeypatch.setattr(execute, "run", failing)
    result = shoal.sweep("linear", algorithms="erm", out=tmp_path, **short)
    assert result.problems == ["failed: OSError: no space."]
    assert set(result.to_frame()["status"]) == {"missing", "scored"}
    with pytest.raises(ChildProcessError, match=r"every run failed, such as: OSError: no space\."):
        shoal.sweep("linear", algorithms="fish", out=tmp_path / "none", **short)
    assert set(Store(tmp_path / "none").frame()["status"]) == {"failed"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["orakle"]}, "oracle"),
        ({"lr": 0.1}, "lr: .*protocol"),
        ({"algorithms": ()}, "algorithms"),
    ],
)
def test_wrong_input_is_named_before_any_work(options: Any, message: str, tmp_path: Path) -> None:
    names = {"datasets": "linear", "algorithms": "erm", "out": tmp_path / "out"}
    with pytest.raises(InputError, match=message):
        shoal.sweep(**names | options)
    assert not (tmp_path / "out").exists()
