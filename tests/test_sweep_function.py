"""``shoal.sweep`` and ``shoal.report`` as functions: what they return, and what failed."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import execute
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.store import Store

TINY: dict[str, Any] = {"seeds": 1, "search": 1, "steps": 2, "eval_every": 1, "device": "cpu", "jobs": 1}
TINY |= {"data_options": {"per_domain": 100}}


@pytest.fixture
def result(tmp_path: Path) -> shoal.Sweep:
    return shoal.sweep("linear", ["erm", "fish"], out=tmp_path / "out", progress=False, **TINY)


def test_a_sweep_shows_and_saves_itself(
    result: shoal.Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not capsys.readouterr().err
    assert result.plan == "6 runs, 6 remaining."
    words = f"sweep linear --algorithms erm fish --data per_domain=100 --out {tmp_path / 'out'} --seeds 1"
    words += " --search 1 --steps 2 --eval-every 1 --device cpu --jobs 1"
    assert main(words.split()) == 0
    assert capsys.readouterr().out == f"{result}\n"
    frame = result.to_frame()
    assert len(frame) == 2 * 2 * 3  # rules, algorithms, held-out domains
    assert set(frame["held_out"]) == {"D1", "D2", "D3"}
    assert set(frame["status"]) == {"scored"}
    parser = HTMLParser()
    parser.feed(result._repr_html_())
    assert result._repr_html_().count("<table>") == 2
    saved = json.loads((result.save(tmp_path / "copy") / "sweep.json").read_text())
    assert saved == json.loads(json.dumps(result.results))


def test_the_plan_says_how_long_the_rest_takes(result: shoal.Sweep, tmp_path: Path) -> None:
    more = shoal.sweep("linear", ["erm", "fish"], out=tmp_path / "out", run=False, **{**TINY, "seeds": 2})
    assert more.missing == 6
    assert more.seconds is not None
    assert "6 remaining (about" in more.plan


def test_a_budget_stops_after_the_first_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = shoal.sweep("linear", "erm", out=tmp_path, budget=1e-6, **TINY)
    assert len(part.found.runs) == 1
    assert "2 runs remain" in capsys.readouterr().err
    assert len(shoal.sweep("linear", "erm", out=tmp_path, **TINY).found.runs) == 3


def test_some_failed_runs_are_said_and_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = execute.execute

    def failing(configs: Any, *args: Any, **options: Any) -> Any:
        outcome = usual(configs[1:], *args, **options)
        return replace(outcome, failed={configs[0].identity: "OSError: no space."})

    monkeypatch.setattr(execute, "execute", failing)
    words = f"sweep linear --algorithms erm --data per_domain=100 --out {tmp_path} --seeds 1 --search 1"
    words += " --steps 2 --eval-every 1 --device cpu --jobs 1"
    assert main(words.split()) == 1
    shown = capsys.readouterr().out
    assert "failed: OSError: no space." in shown
    assert "1 missing: erm on linear, D1 held out, seed 0, hyperparameter trial 0" in shown
    assert "D2, accuracy (%)" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datasets": "liner"}, "Did you mean 'linear'"),
        ({"algorithms": "emr"}, "Did you mean 'erm'"),
        ({"rules": "orakle"}, "Did you mean 'oracle'"),
        ({"seeds": 0}, "seeds of sweep must be"),
        ({"engine": "rey"}, "engine of sweep must be"),
        ({"address": "auto"}, "address"),
        ({"datasets": ()}, "datasets="),
    ],
)
def test_wrong_input_is_named_before_any_work(options: Any, message: str, tmp_path: Path) -> None:
    names = {"datasets": "linear", "algorithms": "erm", "out": tmp_path / "out"}
    with pytest.raises(InputError, match=message):
        shoal.sweep(**names | options)
    assert not (tmp_path / "out").exists()


def test_a_report_shows_and_saves_itself(result: shoal.Sweep, tmp_path: Path) -> None:
    page = shoal.report(tmp_path / "out", tmp_path / "page.html", title="Ours")
    assert str(page).startswith("6 runs. Saved in ")
    assert page.path.read_text(encoding="utf-8") == page.html
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert page.save(tmp_path / "copy.html").read_text(encoding="utf-8") == page.html


def test_failed_runs_are_listed_on_the_page(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    split = {"metric": "accuracy", "average": 0.5, "domains": {"a": 0.5}}
    history = ({"step": 2, "passes": 2, "loss": 1.0, "scores": {"test": split}},)
    good = RunRecord(RunConfig("made", "erm", 2), "finished", history, 0, "last step", 1.0, {})
    bad = RunRecord(RunConfig("made", "fish", 2), "failed", (), -1, "", 1.0, {}, error="OSError: <no> space")
    store.save(good)
    store.save(bad)
    page = shoal.report(tmp_path, tmp_path / "page.html")
    assert (page.runs, page.notes) == (1, 1)
    assert "Failed: fish on made" in page.html
    assert "OSError: &lt;no&gt; space" in page.html
    with pytest.raises(InputError, match=r"no record of a run .* Failed: fish on made"):
        shoal.report(store.path(bad.config), tmp_path / "page.html")
