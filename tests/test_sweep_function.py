"""``shoal.sweep`` and ``shoal.report`` as functions: what they return, and what failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import InputError
from shoal.experiments import execute

TINY: dict[str, Any] = {"seeds": 1, "search": 1, "steps": 2, "eval_every": 1, "device": "cpu", "jobs": 1}
TINY |= {"data_options": {"per_domain": 100}}


def test_a_sweep_shows_and_saves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    result = shoal.sweep("linear", algorithms=["erm", "fish"], out=out, progress=False, **TINY)
    assert not capsys.readouterr().err
    assert (result.missing, len(result.found.planned)) == (6, 6)
    frame = result.to_frame()
    assert len(frame) == 2 * 2 * 3  # rules, algorithms, held-out domains
    assert set(frame["held_out"]) == {"D1", "D2", "D3"}
    assert set(frame["status"]) == {"scored"}
    assert result._repr_html_().count("<table>") == 2
    saved = json.loads((result.save(tmp_path / "copy") / "sweep.json").read_text())
    assert saved == json.loads(json.dumps(result.results))
    more = shoal.sweep("linear", algorithms=["erm", "fish"], out=out, **TINY | {"seeds": 2})
    assert more.missing == 6
    assert more.seconds is not None
    page = shoal.report(out, tmp_path / "page.html", title="Ours")
    assert page.runs == 12
    assert page.path.read_text(encoding="utf-8") == page.html


def test_a_budget_stops_after_the_first_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = shoal.sweep("linear", algorithms="erm", out=tmp_path, budget=1e-6, **TINY)
    assert len(part.found.runs) == 1
    assert "2 runs remain" in capsys.readouterr().err
    assert len(shoal.sweep("linear", algorithms="erm", out=tmp_path, **TINY).found.runs) == 3


def test_failed_runs_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = execute.execute

    def failing(configs: Any, *args: Any, **options: Any) -> Any:
        outcome = usual(configs[1:], *args, **options)
        return replace(outcome, failed={configs[0].identity: "OSError: no space."})

    monkeypatch.setattr(execute, "execute", failing)
    result = shoal.sweep("linear", algorithms="erm", out=tmp_path, **TINY)
    assert result.problems == ["failed: OSError: no space."]
    assert set(result.to_frame()["status"]) == {"missing", "scored"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datasets": "liner"}, "Did you mean 'linear'"),
        ({"algorithms": "emr"}, "Did you mean 'erm'"),
        ({"rules": ["orakle"]}, "oracle"),
        ({"seeds": 0}, "seeds"),
        ({"engine": "rey"}, "engine"),
        ({"address": "auto"}, "address"),
        ({"lr": 0.1}, "lr: .*protocol"),
        ({"datasets": ()}, "datasets"),
        ({"algorithms": ()}, "algorithms"),
    ],
)
def test_wrong_input_is_named_before_any_work(options: Any, message: str, tmp_path: Path) -> None:
    names = {"datasets": "linear", "algorithms": "erm", "out": tmp_path / "out"}
    with pytest.raises(InputError, match=message):
        shoal.sweep(**names | options)
    assert not (tmp_path / "out").exists()
