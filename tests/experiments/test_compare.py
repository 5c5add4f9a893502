"""Comparisons: what is planned, what is held out, which trial is selected, and the table of the records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shoal import datasets as sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run, validated
from shoal.report import compare as view

BASE = RunConfig("rotated-digits", "erm", 4, lr=1e-3, eval_every=2)


def plan(rows: str = "erm fish", held_out: str = "0° 75°", seeds: int = 2, search: int = 2) -> Any:
    return compare.plan(BASE, rows.split(), held_out.split(), range(seeds), search)


def record(
    config: RunConfig, validation: Any, test: float, metric: str = "accuracy", **changes: Any
) -> RunRecord:
    """``validation``: the score of each domain at the selected step; the last step has others."""
    domains = dict(enumerate(validation)) if isinstance(validation, (list, tuple)) else {"a": validation}
    held_out = config.data_options.get("held_out", "away")
    scores = {
        "validation": {"metric": metric, "average": 0.123, "domains": domains},
        "test": {"metric": metric, "average": test, "domains": {held_out: test}},
    }
    other = {split: s | {"average": 0.0, "domains": {"a": 0.0}} for split, s in scores.items()}
    points = tuple({"step": n, "passes": n, "loss": 1.0, "scores": s} for n, s in ((2, scores), (4, other)))
    content: dict[str, Any] = {"status": "finished", "history": points, "selected": 0, "rule": "best"}
    content |= {"seconds": 1.5, "environment": {"device": "cpu"}}
    return RunRecord(config, **content | changes)


def diverged(config: RunConfig) -> RunRecord:
    return record(config, 0.0, 0.0, status="diverged", history=(), selected=-1)


class TestPlan:
    def test_every_combination_once_and_a_longer_search_keeps_its_runs(self) -> None:
        found = plan("erm fish:regrouped", seeds=3, search=4)
        assert len({c.identity for c in found}) == len(found) == 2 * 2 * 3 * 4
        assert {(c.select, c.eval_every, c.steps) for c in found} == {("best", 2, 4)}
        assert {(c.name, c.algorithm, c.draw) for c in found} == {
            ("erm", "erm", None),
            ("fish:regrouped", "fish", "regrouped"),
        }
        held_out = [c.data_options["held_out"] for c in found]
        assert held_out == ["0°"] * 24 + ["75°"] * 24  # neighbours share data
        few = {c.identity for c in plan("erm fish:regrouped", seeds=2, search=2)}
        assert few < {c.identity for c in found}
        first = replace(BASE, data_options={"held_out": "75°"}, seed=1, select="best")
        assert first.identity in few

    def test_rows_share_learning_rates_and_seeds_do_not(self) -> None:
        found = plan(held_out="0°", search=3)
        rates = {
            (a, s): [c.lr for c in found if (c.name, c.seed) == (a, s)]
            for a in ("erm", "fish")
            for s in (0, 1)
        }
        assert rates["erm", 0] == rates["fish", 0]
        assert rates["erm", 0][0] == rates["erm", 1][0] == 1e-3
        assert not set(rates["erm", 0][1:]) & set(rates["erm", 1][1:])

    def test_every_seed_of_own_data_has_its_own_validation(self) -> None:
        base = RunConfig("table", "erm", 5, {"file": "a.csv"})
        found = compare.plan(base, ["erm", "majority"], ["oslo"], range(3), 1)
        assert [c.data_options.get("seed", 0) for c in found] == [0, 0, 1, 1, 2, 2]
        fixed = replace(base, data_options={"seed": 7})
        assert {c.data_options["seed"] for c in compare.plan(fixed, ["erm"], ["a"], range(3), 1)} == {7}
        assert {json.dumps(dict(c.data_options)) for c in plan("erm", "0°")} == {
            json.dumps({"held_out": "0°"})
        }

    def test_up_to_ten_domains_one_by_one(self) -> None:
        names = [f"d{n}" for n in range(25)]
        assert compare.folds(names[:10]) == names[:10]
        assert compare.folds([None]) == [None]
        assert [len(group or ()) for group in compare.folds(names)] == [*[3] * 5, *[2] * 5]
        assert compare.folds(names[:4], 3) == [["d0", "d3"], "d1", "d2"]

    @pytest.mark.parametrize(
        ("seconds", "sizes"),
        [(200, (3, 3, 8)), (100, (2, 3, 8)), (40, (1, 2, 8)), (12, (1, 1, 6)), (1, (1, 1, 3))],
    )
    def test_a_budget_reduces_trials_then_seeds_then_folds(self, seconds: int, sizes: Any) -> None:
        full = compare.LeaveDomainsOut(BASE, ["erm", "fish"], [*"abcdefgh"], 3, 3)
        found = full.within({"erm": 0.5, "fish": 1.5}, seconds)
        assert (found.search, found.seeds, len(found.groups)) == sizes
        assert bool(found.reductions(full)) is (sizes != (3, 3, 8))

    def test_runs_are_timed(self) -> None:
        base = RunConfig("linear", "erm", 3000, eval_every=300, holdout=0.2, batch_size=4)
        found = compare.time_runs(compare.plan(base, ["majority", "erm"], [None], [0], 2), "cpu", 1)
        assert found.keys() == {"majority", "erm"}
        assert 0 < found["erm"] < 300


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers a dataset made of the given parts."""

    def make(validation: bool, notes: dict[str, str], domains: Any = None) -> str:
        def load(*, held_out: str = "c") -> DomainData:
            names = [n for n in ("a", "b", "c") if n != held_out]
            rows = {n: np.arange(i * 20, (i + 1) * 20) for i, n in enumerate([*names, held_out])}
            splits = {"train": Domains.from_indices({n: rows[n][:-5] for n in names})}
            if validation:
                splits["validation"] = Domains.from_indices({n: rows[n][-5:] for n in names})
            splits["test"] = Domains.from_indices({held_out: rows[held_out]})
            x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
            return DomainData(TensorData(x, (x[:, 0] > 0).long()), splits, 2, (4,), "linear", notes)

        module: Any = ModuleType("made")
        module.load, module.SUMMARY, module.PAPER = load, "", ""
        if domains:
            module.DOMAINS = domains
        names, known = sets.registry.names(), sets.registry.module
        monkeypatch.setattr(sets.registry, "names", lambda: [*names, "made"])
        monkeypatch.setattr(sets.registry, "module", lambda n: module if n == "made" else known(n))
        return "made"

    return make


SITES = {"kyoto": 40, "lima": 40, "oslo": 40, "one": 40, "tiny": 3}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table whose domain ``one`` has one class, and ``tiny`` three rows."""
    monkeypatch.chdir(tmp_path)
    rng, lines = np.random.default_rng(0), ["age,dose,site,ill"]
    for site, count in SITES.items():
        for age, dose in zip(rng.normal(50, 10, count), rng.normal(size=count), strict=True):
            ill = site == "one" or age + 10 * dose > 50
            lines.append(f"{age:.2f},{dose:.3f},{site},{'yes' if ill else 'no'}")
    Path("patients.csv").write_text("\n".join(lines))
    return {"file": "patients.csv", "label": "ill", "domain": "site"}


class TestLayout:
    def test_own_validation_is_used_where_it_is_like_the_training_domains(self, made: Any) -> None:
        assert compare.layout(made(True, {}), {}).holdout is None
        assert compare.layout(made(True, {"test": "a few are ill"}), {}).holdout is None
        assert compare.layout(made(True, {"validation": "sampled like the test domain"}), {}).holdout == 0.2
        assert compare.layout(made(False, {}), {}).holdout == 0.2
        data = sets.load("made")
        cut = validated(data, 0.2)
        assert cut.splits["validation"].sizes.tolist() == [3, 3]
        assert cut.splits["test"] is data.splits["test"]

    def test_domains(self, made: Any) -> None:
        assert compare.layout(made(True, {}), {}).held_out == (None,)
        several = made(True, {}, ("a", "b", "c"))
        assert compare.layout(several, {}).held_out == ("a", "b", "c")
        assert compare.layout(several, {}, ["b", "a", "b"]).held_out == ("b", "a")
        for options, held_out, name in (({}, ["d"], "'d'"), ({"held_out": "a"}, [], "^held_out")):
            with pytest.raises(InputError, match=name):
                compare.layout(several, options, held_out)

    def test_domains_that_cannot_be_scored_are_only_trained_on(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients)
        assert where.held_out == ("kyoto", "lima", "one", "oslo")
        assert (set(where.excluded), set(where.warned)) == ({"tiny"}, {"one"})
        assert "tiny" in sets.load("table", **patients, held_out="kyoto").splits["train"].names
        assert set(compare.layout("table", patients, metric="auc").excluded) == {"one", "tiny"}
        where = compare.layout("table", patients, ["tiny", "oslo"])
        assert (where.held_out, set(where.warned)) == (("tiny", "oslo"), {"tiny"})

    def test_where_all_are_small_or_undefined(self, patients: dict[str, Any]) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        same = [line.rsplit(",", 1)[0] + (",no" if ",one," in line else ",yes") for line in lines[1:]]
        few = [line for n, line in enumerate(lines) if n % 4 == 0 and ",tiny," not in line]
        Path("patients.csv").write_text("\n".join([lines[0], *same]))
        with pytest.raises(InputError, match="no domain can be held out"):
            compare.layout("table", patients, metric="AUC")
        Path("patients.csv").write_text("\n".join(few))
        where = compare.layout("table", patients)
        assert len(where.held_out) == len(where.warned) == 4


class TestSelection:
    def test_by_the_mean_over_validation_domains_at_the_selected_step(self) -> None:
        choose = compare.best_trial
        assert choose([record(BASE, v, t) for v, t in ((0.5, 0.9), (0.8, 0.1), (0.7, 1.0))]) == 1
        assert choose([record(BASE, 0.5, 0.5), record(BASE, 0.9, 0.5, selected=1)]) == 0
        assert choose([record(BASE, [0.5, 0.7], 0), record(BASE, [0.9, 0.4], 0)]) == 1
        assert choose([record(BASE, v, 0, "mse") for v in (0.5, 0.2, 0.2, 0.3)]) == 1  # of equals the first

    def test_diverged_runs_and_undefined_scores(self) -> None:
        choose, nan = compare.best_trial, math.nan
        assert choose([diverged(BASE), record(BASE, 0.0, 0)]) == 1
        assert choose([record(BASE, nan, 1), record(BASE, 0.0, 0)]) == 1
        assert choose([record(BASE, math.inf, 1, "mse"), record(BASE, 9.0, 0, "mse")]) == 1
        assert choose([diverged(BASE), diverged(BASE)]) is None
        for domains in ([nan, 0.6], [0.6, nan], [0.6, None]):  # the domain with a score decides, in any order
            assert choose([record(BASE, domains, 1), record(BASE, [0.5, 0.5], 0)]) == 0

    def test_a_run_with_a_holdout(self) -> None:
        config = RunConfig("linear", "erm", 2, select="best", holdout=0.2)
        with pytest.raises(InputError, match="validation"):
            run(replace(config, holdout=None), device="cpu")
        assert run(config, device="cpu").history[-1]["scores"]["validation"]["sizes"] == [200, 200]

    def test_the_trial_selected_most_often(self) -> None:
        """Trials are each seed's own: the same number has other hyperparameters in another seed."""
        one, other = (RunConfig("table", "fish", 5, settings={"meta_lr": m}, lr=0.1) for m in (0.5, 0.2))
        cases = [
            {"algorithm": "fish", "fold": fold, "seed": 0, "chosen": n, "settings": {"meta_lr": m}, "lr": 0.1}
            for fold, n, m in (("a", 1, 0.3), ("b", 2, 0.2), ("c", 1, 0.2))
        ]
        assert compare.selected_trial([one, other], cases, "fish") == (other, 2, 3)
        assert compare.selected_trial([one, other], cases, "erm") is None


class TestResults:
    scores = {  # noqa: RUF012
        "erm": {"0°": [0.5, 0.625], "75°": [0.25, 0.375]},
        "fish": {"0°": [0.75, 0.625], "75°": [0.25, 0.5]},
        "idgm": {"0°": [0.125, 0.125], "75°": [0.9375, 0.9375]},
    }

    def records(self, metric: str = "accuracy") -> tuple[list[RunConfig], list[RunRecord]]:
        """Trial 0 has the best validation score."""
        configs, records = plan("erm fish idgm"), []
        for c in configs:
            first = not c.settings and c.lr == 1e-3
            best = 0.9 if metric == "accuracy" else 0.1
            test = self.scores[c.algorithm][c.data_options["held_out"]][c.seed] if first else 0.5
            records.append(record(c, best if first else 0.5, test, metric))
        return configs, records

    def test_means_over_domains_and_seeds_and_ranks(self) -> None:
        result = compare.results(*self.records())
        assert [row["algorithm"] for row in result["rows"]] == ["fish", "idgm", "erm"]
        fish = result["rows"][0]
        assert fish["average"]["values"] == [0.5, 0.5625]
        assert (fish["average"]["mean"], fish["average"]["sd"]) == pytest.approx((0.53125, 0.0625 / 2**0.5))
        assert (fish["domains"]["0°"]["mean"], fish["chosen"]) == (0.6875, {"0": 4})
        assert fish["difference"]["values"] == pytest.approx([0.125, 0.0625])
        assert [row["rank"] for row in result["rows"]] == [1, 1, 3]
        assert [row["mean_rank"] for row in result["rows"]] == [1.5, 2, 2.5]
        errors = compare.results(*self.records("mse"))
        assert (errors["rows"][0]["algorithm"], errors["rows"][0]["rank"]) == ("erm", 1)

    def test_missing_failed_and_diverged_runs(self) -> None:
        configs, records = self.records()
        missing = compare.results(configs, records[1:], failed={configs[0].identity: "OSError: full"})
        row = next(r for r in missing["rows"] if r["algorithm"] == "erm")
        assert (row["rank"], missing["runs_missing"], missing["recommendation"]) == (None, 1, None)
        assert (row["domains"]["0°"]["values"], row["domains"]["0°"]["trials"]["failed"]) == (
            [None, 0.625],
            1,
        )
        assert missing["failed"] == {"erm": "OSError: full"}
        assert missing["missing"] == ["erm, 0° held out, seed 0, hyperparameter trial 0"]
        lost = compare.results(
            configs, [diverged(r.config) if r.config.name == "erm" else r for r in records]
        )
        row = next(r for r in lost["rows"] if r["algorithm"] == "erm")
        assert (row["rank"], row["runs_diverged"]) == (None, 8)
        assert {c["status"] for c in lost["trials"] if c["algorithm"] == "erm"} == {"diverged"}
        nothing = compare.results(configs, [])
        assert (nothing["metric"], nothing["runs_missing"]) == (None, 24)
        assert "missing" in view.text(nothing)

    def test_a_metric_that_is_undefined_in_a_domain(self) -> None:
        configs, records = self.records()
        odd = [
            record(r.config, 0.9, math.nan) if r.config.data_options["held_out"] == "75°" else r
            for r in records
        ]
        result = compare.results(configs, odd)
        assert {c["status"] for c in result["trials"] if c["held_out"] == "75°"} == {"undefined"}
        assert result["recommendation"] is None
        assert "75°" in view.text(result)
