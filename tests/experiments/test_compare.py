"""Comparisons: what is planned, what is held out, which trial is selected, and the table of the records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import datasets as sets
from shoal.experiments import compare
from shoal.experiments.compare import LeaveDomainsOut
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.selection import best_trial, table, trial_cases

BASE = RunConfig("rotated-digits", "erm", 4, lr=1e-3, eval_every=2)


def plan(rows: str = "erm fish", out: str = "0° 75°", seeds: int = 2, search: int = 2) -> list[RunConfig]:
    return LeaveDomainsOut(BASE, rows.split(), out.split(), seeds, search).plan()


def record(
    config: RunConfig, validation: Any, test: Any, metric: str = "accuracy", **changes: Any
) -> RunRecord:
    """Scores by domain (or of one) at the selected step; the last step has others."""
    tests = test if isinstance(test, dict) else {config.held_out or "away": test}
    inside = dict(enumerate(validation)) if isinstance(validation, (list, tuple)) else {"a": validation}
    scores = {
        "validation": {"metric": metric, "average": 0.123, "domains": inside},
        "test": {"metric": metric, "average": 0.123, "domains": tests},
    }
    other = {split: s | {"average": 0.0, "domains": {"a": 0.0}} for split, s in scores.items()}
    points = tuple({"step": n, "passes": n, "loss": 1.0, "scores": s} for n, s in ((2, scores), (4, other)))
    content: dict[str, Any] = {"status": "finished", "history": points, "selected": 0, "rule": "best"}
    content |= {"seconds": 1.5, "environment": {"device": "cpu"}}
    return RunRecord(config, **content | changes)


def diverged(config: RunConfig) -> RunRecord:
    return record(config, 0.0, 0.0, status="diverged", history=(), selected=-1)


def test_every_combination_is_planned_once_and_a_longer_search_keeps_its_runs() -> None:
    found = plan("erm fish:regrouped", seeds=3, search=4)
    assert len({c.identity for c in found}) == len(found) == 2 * 2 * 3 * 4
    assert {(c.select, c.eval_every, c.steps) for c in found} == {("best", 2, 4)}
    names = {("erm", "erm", None), ("fish:regrouped", "fish", "regrouped")}
    assert {(c.name, c.algorithm, c.draw) for c in found} == names
    assert [c.held_out for c in found] == ["0°"] * 24 + ["75°"] * 24  # neighbours share data
    assert {c.identity for c in plan("erm fish:regrouped")} < {c.identity for c in found}
    rates: dict[Any, list[Any]] = {}
    for c in plan(out="0°", search=3):
        rates.setdefault((c.name, c.seed), []).append(c.lr)
    assert rates["erm", 0] == rates["fish", 0]
    assert rates["erm", 0][0] == rates["erm", 1][0] == 1e-3
    assert not set(rates["erm", 0][1:]) & set(rates["erm", 1][1:])


def test_every_seed_of_own_data_has_its_own_validation() -> None:
    base = RunConfig("table", "erm", 5, {"file": "a.csv"})
    found = LeaveDomainsOut(base, ["erm", "majority"], ["oslo"], 3, 1).plan()
    assert [c.data_options.get("seed", 0) for c in found] == [0, 0, 1, 1, 2, 2]
    fixed = LeaveDomainsOut(replace(base, data_options={"seed": 7}), ["erm"], ["a"], 3, 1)
    assert {c.data_options["seed"] for c in fixed.plan()} == {7}


def test_up_to_ten_domains_are_held_out_one_by_one() -> None:
    def folds(count: int, wanted: int | None = None) -> Any:
        return LeaveDomainsOut(BASE, ["erm"], [f"d{n}" for n in range(count)], 1, 1, wanted).folds

    assert folds(10) == [f"d{n}" for n in range(10)]
    assert [len(group) for group in folds(25)] == [*[3] * 5, *[2] * 5]
    assert folds(4, 3) == [["d0", "d3"], "d1", "d2"]
    assert LeaveDomainsOut(BASE, ["erm"], [None], 1, 1).folds == [None]


def test_domains_that_cannot_be_scored_are_only_trained_on(tmp_path: Path) -> None:
    rng, lines = np.random.default_rng(0), ["age,dose,site,ill"]
    for site, count in {"kyoto": 40, "lima": 40, "oslo": 40, "one": 40, "tiny": 3}.items():
        for age, dose in zip(rng.normal(50, 10, count), rng.normal(size=count), strict=True):
            ill = site == "one" or age + 10 * dose > 50
            lines.append(f"{age:.2f},{dose:.3f},{site},{'yes' if ill else 'no'}")
    (file := tmp_path / "patients.csv").write_text("\n".join(lines))
    patients = {"file": str(file), "label": "ill", "domain": "site"}
    where = compare.layout("table", patients)
    assert where.held_out == ("kyoto", "lima", "one", "oslo")
    assert (set(where.excluded), set(where.warned)) == ({"tiny"}, {"one"})
    assert "tiny" in sets.load("table", **patients, held_out="kyoto").splits["train"].names
    assert set(compare.layout("table", patients, metric="auc").excluded) == {"one", "tiny"}
    where = compare.layout("table", patients, ["tiny", "oslo"])
    assert (where.held_out, set(where.warned)) == (("tiny", "oslo"), {"tiny"})
    few = [line for n, line in enumerate(lines) if n % 4 == 0 and ",tiny," not in line]
    file.write_text("\n".join(few))
    where = compare.layout("table", patients)  # many small ones still make an average
    assert len(where.held_out) == len(where.warned) == 4


def test_the_best_trial_on_validation() -> None:
    """By the mean over domains at the selected step; diverged runs and undefined scores are never it."""
    nan = math.nan
    assert best_trial([record(BASE, v, t) for v, t in ((0.5, 0.9), (0.8, 0.1), (0.7, 1.0))]) == 1
    assert best_trial([record(BASE, 0.5, 0.5), record(BASE, 0.9, 0.5, selected=1)]) == 0
    assert best_trial([record(BASE, [0.5, 0.7], 0), record(BASE, [0.9, 0.4], 0)]) == 1
    assert best_trial([record(BASE, v, 0, "mse") for v in (0.5, 0.2, 0.2, 0.3)]) == 1  # of equals the first
    assert best_trial([diverged(BASE), record(BASE, 0.0, 0)]) == 1
    assert best_trial([record(BASE, nan, 1), record(BASE, 0.0, 0)]) == 1
    assert best_trial([record(BASE, math.inf, 1, "mse"), record(BASE, 9.0, 0, "mse")]) == 1
    assert best_trial([diverged(BASE), diverged(BASE)]) is None
    for domains in ([nan, 0.6], [0.6, None]):  # the domain with a score decides, in any order
        assert best_trial([record(BASE, domains, 1), record(BASE, [0.5, 0.5], 0)]) == 0


SCORES = {
    "erm": {"0°": [0.5, 0.625], "75°": [0.25, 0.375]},
    "fish": {"0°": [0.75, 0.625], "75°": [0.25, 0.5]},
    "idgm": {"0°": [0.125, 0.125], "75°": [0.9375, 0.9375]},
}


def known(metric: str = "accuracy") -> tuple[list[RunConfig], list[RunRecord]]:
    """Trial 0 has the best validation score."""
    configs, records = plan("erm fish idgm"), []
    for c in configs:
        first = not c.settings and c.lr == 1e-3
        best = 0.9 if metric == "accuracy" else 0.1
        test = SCORES[c.algorithm][c.held_out][c.seed] if first else 0.5
        records.append(record(c, best if first else 0.5, test, metric))
    return configs, records


def test_means_over_domains_and_seeds_and_ranks() -> None:
    result = compare.results(*known())
    assert [row["algorithm"] for row in result["rows"]] == ["fish", "idgm", "erm"]
    fish = result["rows"][0]
    assert fish["average"]["values"] == [0.5, 0.5625]
    assert (fish["average"]["mean"], fish["average"]["sd"]) == pytest.approx((0.53125, 0.0625 / 2**0.5))
    assert fish["domains"]["0°"]["mean"] == 0.6875
    assert fish["over_domains"]["mean"] == pytest.approx(0.09375)
    assert fish["worst"]["domain"] == "75°"
    assert [row["rank"] for row in result["rows"]] == [1, 1, 3]
    errors = compare.results(*known("mse"))
    assert (errors["rows"][0]["algorithm"], errors["rows"][0]["rank"]) == ("erm", 1)
    assert errors["rows"][0]["worst"]["domain"] == "0°"
    assert json.loads(json.dumps(result["rows"])) == result["rows"]  # plain data


def test_missing_failed_diverged_and_undefined_runs() -> None:
    def erm(result: dict[str, Any]) -> dict[str, Any]:
        return next(row for row in result["rows"] if row["algorithm"] == "erm")

    configs, records = known()
    missing = compare.results(configs, records[1:], failed={configs[0].identity: "OSError: full"})
    assert (erm(missing)["rank"], missing["runs_missing"], missing["recommendation"]) == (None, 1, None)
    assert erm(missing)["domains"]["0°"]["values"] == [None, 0.625]
    assert erm(missing)["domains"]["0°"]["status"]["failed"] == 1
    assert missing["failed"] == {"erm": "OSError: full"}
    assert missing["missing"] == ["erm, 0° held out, seed 0, hyperparameter trial 0"]
    lost = [diverged(r.config) if r.config.name == "erm" else r for r in records]
    found = compare.results(configs, lost)
    assert (erm(found)["rank"], erm(found)["runs_diverged"]) == (None, 8)
    assert {c["status"] for c in found["cases"] if c["algorithm"] == "erm"} == {"diverged"}
    nothing = compare.results(configs, [])
    assert (nothing["metric"], nothing["runs_missing"]) == (None, 24)
    odd = [record(r.config, 0.9, math.nan) if r.config.held_out == "75°" else r for r in records]
    result = compare.results(configs, odd)
    assert {c["status"] for c in result["cases"] if c["held_out"] == "75°"} == {"undefined"}
    assert result["recommendation"] is None


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32))
def test_tables_against_loops(rows: int, domains: int, seeds: int, fold: int, chance: int) -> None:
    """Means over domains of the trial that is best on validation; further metrics where all have one."""
    rng, names = np.random.default_rng(chance), [f"d{n}" for n in range(domains)]
    protocol = LeaveDomainsOut(BASE, ["erm", "fish", "coral"][:rows], names, seeds, 2, -(-domains // fold))
    records, best, auc = [], {}, {}
    for config in protocol.plan():
        out = config.held_out if isinstance(config.held_out, list) else [config.held_out]
        validation = float(rng.integers(3))
        test = {name: float(rng.random()) for name in out}
        found = record(config, validation, test)
        extra = {name: float(rng.random()) if rng.random() > 0.1 else None for name in out}
        found.history[0]["scores"]["test"]["by_domain"] = {"AUC": extra}
        found.history[0]["scores"]["test"]["metrics"] = {"AUC": extra[out[0]]}
        records.append(found)
        for name in out:
            key = config.name, name, config.seed
            if key not in best or validation > best[key][0]:
                best[key], auc[key] = (validation, test[name]), extra[name]
    defined = [d for d in names if all(auc[key] is not None for key in auc if key[1] == d)]
    for row in table(trial_cases(protocol.plan(), records)):
        for seed in range(seeds):
            own = [best[row["algorithm"], name, seed] for name in names]
            assert row["average"]["values"][seed] == pytest.approx(np.mean([score for _, score in own]))
            assert row["validation"]["values"][seed] == pytest.approx(np.mean([v for v, _ in own]))
            if defined:
                expected = np.mean([auc[row["algorithm"], name, seed] for name in defined])
                assert row["metrics"]["AUC"]["values"][seed] == pytest.approx(expected)
