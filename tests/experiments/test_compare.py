"""Comparisons: what is run, what is chosen by what, and what is said of it."""

import csv
import io
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.algorithms import algorithm_class
from shoal.cli import main
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.run import run, validated
from shoal.experiments.search import candidates
from shoal.report import compare as view
from shoal.report import plots

Captured = pytest.CaptureFixture[str]
BASE = RunConfig("rotated-digits", "erm", 4, eval_every=2)


def plan(algorithms: str = "erm fish", left_out: str = "0° 75°", seeds: int = 2, search: int = 2) -> Any:
    return compare.plan(BASE, algorithms.split(), left_out.split(), range(seeds), search)


def record(
    config: RunConfig, validation: Any, test: float, metric: str = "accuracy", **changes: Any
) -> RunRecord:
    """``validation``: one score a domain, at the selected step; the last step has others."""
    domains = dict(enumerate(validation)) if isinstance(validation, (list, tuple)) else {"a": validation}
    scores = {
        "validation": {"metric": metric, "average": 0.123, "domains": domains},
        "test": {
            "metric": metric,
            "average": test,
            "domains": {config.data_options.get("test", "away"): test},
        },
    }
    other = {split: s | {"average": 0.0, "domains": {"a": 0.0}} for split, s in scores.items()}
    points = tuple({"step": n, "passes": n, "loss": 1.0, "scores": s} for n, s in ((2, scores), (4, other)))
    content: dict[str, Any] = {
        "status": "finished",
        "history": points,
        "selected": 0,
        "rule": "best on validation",
        "seconds": 1.5,
        "environment": {"device": "cpu"},
    }
    return RunRecord(config, **content | changes)


def diverged(config: RunConfig) -> RunRecord:
    return record(config, 0.0, 0.0, status="diverged", history=(), selected=-1)


def scored(configs: list[RunConfig], test: dict[str, Any], metric: str = "accuracy") -> list[RunRecord]:
    """Candidate 0 has the best validation; ``test`` is its score for each algorithm: by domain, by seed."""
    best, found = 0.9 if metric == "accuracy" else 0.1, []
    for config in configs:
        default = not config.settings and config.optimizer_options["lr"] == 1e-3
        score = test[config.algorithm][config.data_options["test"]][config.seed]
        found.append(record(config, best if default else 0.5, score if default else 0.5, metric))
    return found


class TestPlan:
    def test_every_combination_once(self) -> None:
        found = plan(seeds=3, search=4)
        assert len(found) == 2 * 2 * 3 * 4
        assert len({c.identity for c in found}) == len(found)
        assert {(c.select, c.eval_every, c.steps) for c in found} == {("best", 2, 4)}
        assert all(c.label == c.algorithm for c in found)
        assert [c.data_options["test"] for c in found] == ["0°"] * 24 + ["75°"] * 24  # neighbours share data

    def test_the_default_run_is_the_run_of_the_defaults(self) -> None:
        options = {"test": "75°"}
        usual = replace(BASE, algorithm="fish", data_options=options, seed=1, select="best")
        assert usual.identity in {c.identity for c in plan()}

    def test_all_algorithms_have_the_same_rates_and_trials_their_own(self) -> None:
        found = plan(left_out="0°", seeds=2, search=3)
        rates = {
            (a, s): [c.optimizer_options["lr"] for c in found if (c.algorithm, c.seed) == (a, s)]
            for a in ("erm", "fish")
            for s in (0, 1)
        }
        assert rates["erm", 0] == rates["fish", 0]
        assert rates["erm", 0][0] == rates["erm", 1][0] == 1e-3
        assert not set(rates["erm", 0][1:]) & set(rates["erm", 1][1:])

    def test_a_way_of_drawing_makes_a_row_of_its_own(self) -> None:
        found = plan("fish fish:regrouped", left_out="0°", seeds=1, search=2)
        assert [(c.name, c.algorithm, c.draw) for c in found] == [
            *[("fish", "fish", None)] * 2,
            *[("fish:regrouped", "fish", "regrouped")] * 2,
        ]
        own, mixed = found[:2], found[2:]
        assert [c.settings for c in own] == [c.settings for c in mixed]
        assert [c.optimizer_options for c in own] == [c.optimizer_options for c in mixed]
        assert len({c.identity for c in found}) == 4
        assert [t["algorithm"] for t in compare.trials(found, [])] == ["fish", "fish:regrouped"]

    def test_a_longer_search_keeps_the_runs_of_a_shorter_one(self) -> None:
        short, long = ({c.identity for c in plan(seeds=s, search=k)} for s, k in ((2, 2), (3, 4)))
        assert short < long

    def test_other_options_stay(self) -> None:
        base = replace(BASE, data_options={"seed": 5}, optimizer_options={"lr": 0.1, "weight_decay": 0.5})
        found = compare.plan(base, ["erm"], [None, "0°"], [0], 2)
        assert [dict(c.data_options) for c in found] == [{"seed": 5}] * 2 + [{"seed": 5, "test": "0°"}] * 2
        assert {c.optimizer_options["weight_decay"] for c in found} == {0.5}
        drawn = candidates(base, 2)[1][1]["lr"]
        assert [c.optimizer_options["lr"] for c in found] == [0.1, drawn] * 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers a dataset made of nothing but the given parts."""

    def make(validation: bool, notes: dict[str, str], domains: Any = None, classes: int | None = 2) -> str:
        def load(*, test: str = "c", size: int = 20) -> DomainData:
            names = [n for n in ("a", "b", "c") if n != test]
            rows = {n: np.arange(i * size, (i + 1) * size) for i, n in enumerate([*names, test])}
            splits = {"train": Domains.from_indices({n: rows[n][:-5] for n in names})}
            if validation:
                splits["validation"] = Domains.from_indices({n: rows[n][-5:] for n in names})
            splits["test"] = Domains.from_indices({test: rows[test]})
            numbers = torch.randn(3 * size, 4, generator=torch.Generator().manual_seed(0))
            y = (numbers[:, 0] > 0).long() if classes else numbers[:, 0]
            return DomainData(TensorData(numbers, y), splits, classes, (4,), "linear", notes)

        module = ModuleType("made")
        module.load, module.SUMMARY, module.PAPER = load, "", ""  # type: ignore[attr-defined]
        if domains:
            module.DOMAINS = domains  # type: ignore[attr-defined]
        names, known = sets.registry.names(), sets.registry.module
        monkeypatch.setattr(sets.registry, "names", lambda: [*names, "made"])
        monkeypatch.setattr(sets.registry, "module", lambda n: module if n == "made" else known(n))
        return "made"

    return make


def planted(root: Path) -> list[str]:
    """Small pictures in three domains and two classes, and a table's rows of them."""
    rows = []
    for n, (domain, label, i) in enumerate(itertools.product("abc", ("cat", "dog"), range(5))):
        path = root / domain / label / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (40 * (label == "dog"), n, 90)).save(path)
        rows.append(f"{path},{label},{domain}")
    return rows


class TestLayout:
    def test_own_validation_is_used_where_it_is_like_the_training_domains(self, made: Any) -> None:
        assert compare.layout(made(True, {}), {}).holdout is None
        assert compare.layout(made(True, {"test": "a few are ill"}), {}).holdout is None
        assert compare.layout(made(True, {"validation": "sampled like the test domain"}), {}).holdout == 0.2
        assert compare.layout(made(False, {}), {}).holdout == 0.2

    def test_domains(self, made: Any) -> None:
        assert compare.layout(made(True, {}), {}).left_out == (None,)
        assert compare.layout("made", {}, ["c"]).left_out == (None,)
        with pytest.raises(InputError, match=r"domain to hold out: 'd'.*Known: c"):
            compare.layout("made", {}, ["d"])
        several = made(True, {}, ("a", "b", "c"), classes=None)
        found = compare.layout(several, {})
        assert (found.left_out, found.domains, found.classes) == (("a", "b", "c"), 2, None)
        assert compare.layout(several, {}, ["b", "a", "b"]).left_out == ("b", "a")
        with pytest.raises(InputError, match="use held_out= to select"):
            compare.layout(several, {"test": "a"})
        with pytest.raises(InputError, match=r"option of dataset 'made'"):
            compare.layout(several, {"sice": 3})

    def test_rotated_digits_and_the_linear_example(self) -> None:
        digits = compare.layout("rotated-digits", {})
        assert digits == compare.Layout(("0°", "15°", "30°", "45°", "60°", "75°"), None, 5, 10)
        assert compare.layout("linear", {}) == compare.Layout((None,), 0.2, 2, 2)

    def test_the_users_own_pictures(self, tmp_path: Path) -> None:
        rows = planted(tmp_path / "pictures")
        folder = {"folder": str(tmp_path / "pictures"), "size": 16}
        assert compare.layout("image-folder", folder) == compare.Layout(("a", "b", "c"), None, 2, 2)
        assert compare.layout("image-folder", folder, ["c", "a"]).left_out == ("c", "a")
        with pytest.raises(InputError, match=r"domain to hold out: 'd'.*Known: a, b, c"):
            compare.layout("image-folder", folder, ["d"])
        with pytest.raises(InputError, match="use held_out= to select"):
            compare.layout("image-folder", {**folder, "test": "a"})
        with pytest.raises(InputError, match=r"option of dataset 'image-folder': 'sice'"):
            compare.layout("image-folder", {**folder, "sice": 3})
        with pytest.raises(InputError, match=r"--data folder=DIR"):
            compare.layout("image-folder", {})
        table = tmp_path / "list.csv"
        table.write_text("\n".join(["path,label,domain", *rows]))
        listed = {"file": str(table), "size": 16}
        assert compare.layout("manifest", listed).left_out == ("a", "b", "c")
        split = [f"{row},{'test' if row.endswith('b') else 'train'}" for row in rows]
        table.write_text("\n".join(["path,label,domain,split", *split]))
        assert compare.layout("manifest", listed) == compare.Layout((None,), 0.2, 2, 2)
        with pytest.raises(InputError, match=r"domain to hold out: 'a'.*Known: b"):
            compare.layout("manifest", listed, ["a"])

    def test_who_cannot_take_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(algorithm_class("fish"), "tasks", frozenset({"classification"}))
        names = ["erm", "fish", "idgm"]
        assert compare.unable(names, compare.Layout((None,), None, 2, None)) == {"fish": "needs classes"}
        assert compare.unable(names, compare.Layout((None,), None, 2, 3)) == {}
        assert compare.unable(["idgm"], compare.Layout((None,), None, 1, 3)) == {
            "idgm": "needs two training domains"
        }

    def test_who_is_refused(self) -> None:
        wrong = [replace(c, precision="fp16") for c in compare.plan(BASE, ["erm", "idgm"], ["0°"], [0], 1)]
        found = compare.refused(wrong, "cpu")
        assert "idgm" in found
        assert "bf16" in str(found["idgm"])


class TestHoldout:
    def test_validation_is_cut_from_the_training_domains(self, made: Any) -> None:
        before = sets.load(made(True, {"validation": "peeks", "test": "kept"}))
        after = validated(before, 0.2)
        assert list(after.splits) == ["train", "validation", "test"]
        assert after.splits["train"].names == after.splits["validation"].names == ("a", "b")
        assert after.splits["validation"].sizes.tolist() == [3, 3]
        train, held = (set(after.splits[s].indices.tolist()) for s in ("train", "validation"))
        assert not train & held
        assert train | held == set(before.splits["train"].indices.tolist())
        assert after.splits["test"] is before.splits["test"]
        assert after.notes == {"test": "kept"}

    def test_a_run_with_it(self) -> None:
        config = RunConfig("linear", "erm", 2, select="best", holdout=0.2)
        with pytest.raises(InputError, match="require validation data"):
            run(replace(config, holdout=None), device="cpu")
        found = run(config, device="cpu")
        scores = found.history[-1]["scores"]
        assert (scores["train"]["sizes"], scores["validation"]["sizes"]) == ([800, 800], [200, 200])
        other = run(replace(config, holdout=0.5), device="cpu")  # not the data that were loaded for the other
        assert other.history[-1]["scores"]["validation"]["sizes"] == [500, 500]

    @pytest.mark.parametrize("share", [0, 1, 1.5, -0.2, 0.0, 1.0, math.nan, "0.2", True])
    def test_shares_that_are_none(self, share: Any) -> None:
        with pytest.raises(InputError, match="holdout must be a fraction between 0 and 1"):
            replace(BASE, holdout=share)

    def test_it_is_part_of_a_runs_name(self) -> None:
        assert len({BASE.identity, *(replace(BASE, holdout=h).identity for h in (0.1, 0.2))}) == 3


class TestChoice:
    def test_by_validation_and_not_by_test(self) -> None:
        records = [record(BASE, v, t) for v, t in ((0.5, 0.9), (0.8, 0.1), (0.7, 1.0))]
        assert compare.choose(records) == 1

    def test_at_the_selected_step(self) -> None:
        one = record(BASE, 0.5, 0.5)
        later = record(BASE, 0.9, 0.5, selected=1)  # 0.9 is at a step that was not selected
        assert compare.choose([one, later]) == 0

    def test_every_domain_counts_once(self) -> None:
        assert compare.choose([record(BASE, [0.5, 0.7], 0), record(BASE, [0.9, 0.4], 0)]) == 1
        assert compare.choose([record(BASE, [0.5, 0.9], 0), record(BASE, [0.9, 0.4], 0)]) == 0

    def test_of_equals_the_first(self) -> None:
        assert compare.choose([record(BASE, v, 0) for v in (0.5, 0.75, 0.75)]) == 1

    def test_the_lowest_error(self) -> None:
        assert compare.choose([record(BASE, v, 0, "mse") for v in (0.5, 0.2, 0.2, 0.3)]) == 1

    def test_what_diverged_loses(self) -> None:
        assert compare.choose([diverged(BASE), record(BASE, 0.0, 0)]) == 1
        assert compare.choose([record(BASE, math.nan, 1), record(BASE, 0.0, 0)]) == 1
        assert compare.choose([record(BASE, math.inf, 1, "mse"), record(BASE, 9.0, 0, "mse")]) == 1
        assert compare.choose([diverged(BASE), diverged(BASE)]) is None


class TestResults:
    test = {  # noqa: RUF012
        "erm": {"0°": [0.5, 0.625], "75°": [0.25, 0.375]},
        "fish": {"0°": [0.75, 0.625], "75°": [0.25, 0.5]},
        "idgm": {"0°": [0.125, 0.125], "75°": [0.9375, 0.9375]},
    }

    def rows(self, metric: str = "accuracy") -> dict[str, Any]:
        configs = plan("erm fish idgm")
        return compare.results(configs, scored(configs, self.test, metric))

    def test_means_over_seeds_and_domains(self) -> None:
        result = self.rows()
        assert [row["algorithm"] for row in result["rows"]] == ["fish", "idgm", "erm"]
        fish = result["rows"][0]
        assert fish["average"]["values"] == [0.5, 0.5625]
        assert (fish["average"]["mean"], fish["average"]["sd"]) == pytest.approx((0.53125, 0.0625 / 2**0.5))
        assert fish["domains"]["0°"]["mean"] == 0.6875
        assert fish["validation"]["mean"] == pytest.approx(0.9)
        assert fish["chosen"] == {"0": 4}
        assert {fish[part]["metric"] for part in ("average", "validation", "difference")} == {"accuracy"}

    def test_ranks(self) -> None:
        """fish and idgm have the same average; each domain orders them otherwise."""
        rows = {r["algorithm"]: r for r in self.rows()["rows"]}
        assert {name: r["rank"] for name, r in rows.items()} == {"fish": 1, "idgm": 1, "erm": 3}
        assert {name: r["mean_rank"] for name, r in rows.items()} == {"fish": 1.5, "idgm": 2, "erm": 2.5}

    def test_errors_are_ranked_from_below(self) -> None:
        result = self.rows("mse")
        assert result["lower_is_better"]
        assert [(r["algorithm"], r["rank"]) for r in result["rows"]] == [
            ("erm", 1),
            ("fish", 2),
            ("idgm", 2),
        ]
        assert [r["mean_rank"] for r in result["rows"]] == [1.5, 2.5, 2.0]
        assert result["rows"][0]["chosen"] == {"0": 4}

    def test_equal_scores_share_a_mean_rank(self) -> None:
        same = {name: {"0°": [0.5], "75°": [0.5]} for name in ("erm", "fish")}
        configs = plan(seeds=1)
        rows = compare.results(configs, scored(configs, same))["rows"]
        assert [(r["rank"], r["mean_rank"]) for r in rows] == [(1, 1.5), (1, 1.5)]

    def test_differences_are_paired_by_seed(self) -> None:
        rows = {r["algorithm"]: r["difference"] for r in self.rows()["rows"]}
        assert rows["fish"]["values"] == [0.125, 0.0625]
        assert (rows["fish"]["mean"], rows["fish"]["sd"]) == pytest.approx((0.09375, 0.0625 / 2**0.5))
        assert rows["fish"]["se"] == pytest.approx(0.03125)
        assert rows["idgm"]["values"] == [0.15625, 0.03125]
        assert rows["erm"]["values"] == [0, 0]

    def test_without_the_baseline_there_are_none(self) -> None:
        configs = plan("fish idgm")
        result = compare.results(configs, scored(configs, self.test))
        assert result["baseline"] is None
        assert [r["difference"] for r in result["rows"]] == [None, None]
        assert not [c for c in view.table(result).columns if "against" in c]

    def test_the_score_is_the_chosen_ones(self) -> None:
        """And not the best in the domain left out, nor that of the last step."""
        configs = plan("erm", "0°", seeds=1, search=3)
        scores = ((0.5, 0.9), (0.8, 0.2), (0.7, 1.0))
        records = [record(c, v, t) for c, (v, t) in zip(configs, scores, strict=True)]
        (trial,) = compare.trials(configs, reversed(records))
        assert (trial["chosen"], trial["validation"], trial["test"], trial["step"]) == (1, 0.8, 0.2, 2)
        assert trial["lr"] == configs[1].optimizer_options["lr"]

    def test_a_trial_of_which_all_runs_diverged(self) -> None:
        configs = plan()
        records = scored(configs, self.test)
        lost = [c.algorithm == "fish" and c.seed == 1 and c.data_options["test"] == "0°" for c in configs]
        records = [diverged(r.config) if gone else r for r, gone in zip(records, lost, strict=True)]
        result = compare.results(configs, records)
        erm, fish = result["rows"]
        assert (erm["algorithm"], erm["rank"], erm["mean_rank"]) == ("erm", 1, 1.0)
        assert (fish["rank"], fish["runs_diverged"]) == (None, 2)
        assert fish["average"]["values"] == [0.5, None]
        assert fish["difference"]["values"] == [0.125, None]
        assert fish["domains"]["75°"]["values"] == [0.25, 0.5]
        assert view.table(result).rows[1][2:5] == ["75.0 (1 of 2)", "37.5 ± 17.7", "50.0 (1 of 2)"]
        assert "Diverged runs, which were not selected: fish 2." in view.words(result)

    def test_an_algorithm_that_always_diverged(self) -> None:
        configs = plan()
        records = [
            diverged(r.config) if r.config.algorithm == "erm" else r for r in scored(configs, self.test)
        ]
        result = compare.results(configs, records)
        assert [r["algorithm"] for r in result["rows"]] == ["fish", "erm"]
        assert view.table(result).rows[1][2:] == ["diverged", "diverged", "diverged", "–", "–", "–"]

    def test_an_infinite_error_in_the_domain_left_out_is_not_hidden_by_the_choice(self) -> None:
        configs = plan("erm", "0°", seeds=1, search=2)
        records = [record(configs[0], 0.1, math.inf, "mse"), record(configs[1], 0.2, 0.3, "mse")]
        (trial,) = compare.trials(configs, records)
        assert (trial["status"], trial["chosen"], trial["test"]) == ("diverged", 0, None)
        json.dumps(compare.results(configs, records), allow_nan=False)

    @pytest.mark.parametrize("nothing", [None, math.nan])
    def test_a_measure_that_is_undefined_is_not_called_diverged(self, nothing: float | None) -> None:
        configs = plan("erm", "0°", seeds=1, search=1)
        there: Any = {"metric": "accuracy", "average": 0.5, "domains": {"a": 0.5}, "selects": "AUC"}
        for validation, test, chosen in ((0.9, nothing, 0), (nothing, 0.9, None)):
            scores = {
                "validation": there | {"metrics": {"AUC": validation}},
                "test": there | {"metrics": {"AUC": test}},
            }
            point = {"step": 2, "passes": 2, "loss": 1.0, "scores": scores}
            records = [record(configs[0], 0.5, 0.5, history=(point,))]
            (trial,) = compare.trials(configs, records)
            assert (trial["status"], trial["chosen"], trial["diverged"]) == ("undefined", chosen, 0)
            result = compare.results(configs, records)
            json.dumps(result, allow_nan=False)
            assert view.table(result).rows[0][2] == "undefined"
            assert "No score with '0°' held out" in view.text(result)
            assert "diverged" not in view.text(result)

    def test_missing_runs_are_named(self) -> None:
        configs = plan()
        records = [
            r
            for r in scored(configs, self.test)
            if r.config.algorithm != "fish" or r.config.seed or not r.config.settings
        ]
        result = compare.results(configs, records)
        lost = [f"fish, {d} held out, seed 0, hyperparameter trial 1" for d in ("0°", "75°")]
        assert result["missing"] == lost
        fish = result["rows"][1]
        assert (fish["algorithm"], fish["rank"]) == ("fish", None)
        assert fish["average"]["values"] == [None, 0.5625]
        text = view.text(result)
        assert f"2 of 16 runs are missing: {'; '.join(lost)}." in text
        assert "56.2 (1 of 2)" in text

    def test_no_run_at_all(self) -> None:
        result = compare.results(plan(), [])
        assert (result["metric"], result["runs_missing"]) == (None, 16)
        assert view.table(result).rows[0][2:5] == ["missing"] * 3
        assert "16 of 16 runs are missing" in view.text(result)
        assert len(result["missing"]) == 8
        with pytest.raises(InputError, match="no result yet"):
            view.figure(result)


class TestReport:
    def result(self, *, metric: str = "accuracy", seeds: int = 2, apart: float = 0.0, **test: Any) -> Any:
        configs = plan("erm fish", "0° 75°", seeds=seeds)
        usual = [0.5 + 0.01 * s for s in range(seeds)]
        other = [u + apart + 0.001 * s for s, u in enumerate(usual)]
        scores = {a: {"0°": v, "75°": v} for a, v in (("erm", usual), ("fish", other))}
        return compare.results(configs, scored(configs, scores, metric))

    def test_table(self) -> None:
        table = view.table(self.result(apart=0.1))
        assert table.columns == [
            *("rank", "algorithm", "0°", "75°", "average accuracy", "worst domain", "difference to erm"),
            "validation accuracy",
        ]
        assert table.rows[0][:5] == ["1", "fish", "60.5 ± 0.8", "60.5 ± 0.8", "60.5 ± 0.8"]
        assert table.rows[0][5:] == ["60.5 (0°)", "+10.1 ± 0.1", "90.0"]
        assert table.rows[1][5:] == ["50.5 (0°)", "–", "90.0"]

    def test_errors_are_no_percent(self) -> None:
        result = self.result(metric="mse", apart=-0.1)
        table = view.table(result)
        assert "average mse" in table.columns
        assert table.rows[0][1:3] == ["fish", "0.4055 ± 0.0078"]
        assert table.rows[0][5:7] == ["0.4055 (0°)", "-0.09950 ± 0.00071"]
        assert "Mse (lower is better)" in view.words(result)[0]

    def test_one_domain_needs_no_average(self) -> None:
        configs = plan("erm", "75°", seeds=1)
        result = compare.results(configs, scored(configs, {"erm": {"75°": [0.5]}}))
        assert view.table(result).columns == [
            "rank",
            "algorithm",
            "75°",
            "difference to erm",
            "validation accuracy",
        ]

    def test_names_cannot_break_the_page(self, tmp_path: Path) -> None:
        odd = "<script>|$\x1b[2J"
        configs = compare.plan(BASE, ["erm"], [odd, "b"], [0], 1)
        result = compare.results(configs, [record(c, 0.5, 0.5) for c in configs])
        page = view.markdown(result)
        heading, line, row = (text for text in page.splitlines() if text.startswith("|"))
        cells = [text.replace("\\|", "").count("|") for text in (heading, line, row)]
        assert cells[0] == cells[1] == cells[2] == 9
        assert "&lt;script&gt;\\|$?[2J" in heading
        assert "<script>" not in page
        assert "\x1b" not in page + view.text(result)
        assert "<script>|$?[2J" in view.text(result)
        png, svg = plots.save(view.figure(result), tmp_path / "compare")
        assert png.read_bytes()[:4] == b"\x89PNG"
        ElementTree.parse(svg)

    def test_the_picture_shows_every_algorithm_and_domain(self, tmp_path: Path) -> None:
        _, svg = plots.save(view.figure(self.result()), tmp_path / "compare")
        text = svg.read_text()
        for shown in ("erm", "fish", "0°", "75°", "worst domain", "accuracy on a held-out domain (%)"):
            assert f"<!-- {shown} -->" in text

    def test_csv_has_a_line_a_trial(self) -> None:
        result = self.result(apart=0.1)
        lines = list(csv.DictReader(io.StringIO(view.as_csv(result))))
        assert len(lines) == 8
        assert {(d["algorithm"], d["left_out"], d["seed"]) for d in lines} == {
            (a, d, s) for a in ("erm", "fish") for d in ("0°", "75°") for s in "01"
        }
        assert float(lines[0]["test"]) == 0.5
        assert (lines[0]["metric"], lines[0]["chosen"], json.loads(lines[0]["settings"])) == (
            "accuracy",
            "0",
            {},
        )


SMALL = ["--algorithms", "erm", "fish", "--seeds", "2", "--search", "2", "--steps", "4", "--batch-size", "8"]
SMALL += ["--device", "cpu", "--jobs", "1"]
TINY = ["compare", "rotated-digits", "--held-out", "75°", *SMALL]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("elsewhere", "in_process")
class TestCommand:
    def test_from_the_names_to_the_table(self, capsys: Captured) -> None:
        assert main([*TINY, "--json"]) == 0
        shown = capsys.readouterr()
        result = json.loads(shown.out)
        result.pop("schema", None)  # of what is printed
        assert (
            "8 runs: 2 algorithms, 1 held-out domain, 2 seeds, 2 hyperparameter trials each; 8 re"
            in shown.err
        )
        assert "[8/8] fish, held out: 75°, seed 1: accuracy " in shown.err
        assert {r["algorithm"]: r["average"]["sd"] is not None for r in result["rows"]} == {
            "erm": True,
            "fish": True,
        }
        records = Store("shoal-compare/runs").all()
        assert len(records) == 8
        for trial in result["trials"]:
            mine = [
                r
                for r in records
                if (r.config.algorithm, r.config.seed) == (trial["algorithm"], trial["seed"])
            ]
            best = max(mine, key=lambda r: r.history[r.selected]["scores"]["validation"]["mean"])
            assert trial["test"] == best.score("test")
        assert main(TINY) == 0
        shown = capsys.readouterr()
        assert not shown.err
        assert shown.out.startswith("No recommendation: 1 held-out domain")
        assert "\nrank  algorithm " in shown.out
        assert "8 runs of 4 steps on cpu" in shown.out
        files = {p.name for p in Path("shoal-compare").iterdir() if p.is_file()}
        assert files == {f"compare-rotated-digits.{e}" for e in ("md", "csv", "json", "png", "svg")}
        assert json.loads(Path("shoal-compare/compare-rotated-digits.json").read_text()) == result
        assert "| 1 | " in Path("shoal-compare/compare-rotated-digits.md").read_text()

    @pytest.mark.parametrize("dataset", ["image-folder", "manifest"])
    def test_the_users_own_pictures(self, dataset: str, tmp_path: Path, capsys: Captured) -> None:
        rows = planted(tmp_path / "pictures")
        (tmp_path / "list.csv").write_text("\n".join(["path,label,domain", *rows]))
        where = {
            "image-folder": f"folder={tmp_path / 'pictures'}",
            "manifest": f"file={tmp_path / 'list.csv'}",
        }
        given = ["compare", dataset, "--data", where[dataset], "size=16", *SMALL, "--search", "1"]
        assert main([*given, "--seeds", "1", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["left_out"] == ["a", "b", "c"]
        assert {t["status"] for t in result["trials"]} == {"scored"}
        for one in Store("shoal-compare/runs").all():
            scores = one.history[-1]["scores"]
            assert list(scores["test"]["domains"]) == [one.config.data_options["test"]]
            assert set(scores["train"]["domains"]) == set("abc") - set(scores["test"]["domains"])

    def test_a_control_is_a_row(self, capsys: Captured) -> None:
        given = ["compare", "rotated-digits", "--held-out", "75°", "--seeds", "1", "--search", "1"]
        given += ["--steps", "4", "--batch-size", "8", "--device", "cpu", "--jobs", "1", "--json"]
        assert main([*given, "--algorithms", "fish", "fish:regrouped"]) == 0
        rows = {r["algorithm"]: r["average"]["mean"] for r in json.loads(capsys.readouterr().out)["rows"]}
        assert set(rows) == {"fish", "fish:regrouped"}
        assert {r.config.draw for r in Store("shoal-compare/runs").all()} == {None, "regrouped"}

    def test_a_plan_is_kept(self, capsys: Captured) -> None:
        assert main([*TINY, "--plan"]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith(
            "8 runs: 2 algorithms, 1 held-out domain, 2 seeds, 2 hyperparameter trials each; 8 remaining."
        )
        assert not shown.err
        path = Path("shoal-compare/rotated-digits.plan.json")
        runs = json.loads(path.read_text())
        assert [RunConfig.from_dict(r["config"]).identity for r in runs] == [r["identity"] for r in runs]
        assert not Path("shoal-compare/runs").exists()
        for more in (["--plan"], ["--no-run"], []):
            assert main([*TINY, "--seeds", "3", *more]) == 2
            said = capsys.readouterr().err
            assert "contains a different plan: 4 of these 12 runs are not in it, and 0 of its 8" in said
        assert json.loads(path.read_text()) == runs
        assert main([*TINY, "--no-run"]) == 0
        assert "8 of 8 runs are missing" in capsys.readouterr().out
        for damaged in ("{", "{}", "[1]", "[{}]", "7"):
            path.write_text(damaged)
            assert main([*TINY, "--no-run"]) == 2
            assert "rotated-digits.plan.json' is not a plan" in capsys.readouterr().err
        path.unlink()
        assert main([*TINY, "--seeds", "3", "--plan", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["plan"], shown["runs"]) == (str(path), 12)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (["--algorithms", "erm", "fsh"], "unknown algorithm 'fsh'. Did you mean 'fish'"),
            (["--algorithms", "fish:regruped"], "unknown draw 'regruped'. Did you mean 'regrouped'"),
            (["--algorithms", "fsh:regrouped"], "unknown algorithm 'fsh'. Did you mean 'fish'"),
            (["--held-out", "75"], "domain to hold out: '75'. Did you mean '75°'"),
            (["--data", "seeed=1"], "'seeed'. Did you mean 'seed'"),
            (["--data", "test=0°"], "the option test is set by the comparison"),
            (["--optimizer", "adm"], "Did you mean 'adam'"),
            (["--model", "smal-cnn"], "Did you mean 'small-cnn'"),
            (["--lr", "0"], "--lr must be a number above 0"),
            (["--domains-per-step", "6"], "6, but there are only 5 training domains"),
            (["--precision", "fp8"], "got 'fp8'"),
        ],
    )
    def test_wrong_input_is_one_line_before_anything_runs(
        self, changes: list[str], message: str, capsys: Captured
    ) -> None:
        assert main([*TINY, *changes]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.err.startswith("shoal: ")
        assert len(shown.err.splitlines()) == 1
        assert not shown.out
        assert list(Path().iterdir()) == []

    def test_a_name_with_a_dash_in_front(self, capsys: Captured) -> None:
        arguments = ["compare", "coloured-digits", "--algorithms", "erm", "--seeds", "1", "--search", "1"]
        arguments += ["--plan", "--json", "--device", "cpu"]
        assert main([*arguments, "--held-out=-90%", "--held-out=+80%"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"] == 2

    def test_an_unknown_dataset(self, capsys: Captured) -> None:
        assert main(["compare", "rotated-digit"]) == 2
        assert "Did you mean 'rotated-digits'" in capsys.readouterr().err

    def test_errors_have_no_percent(self, made: Any, capsys: Captured) -> None:
        name = made(False, {}, ("a", "b", "c"), classes=None)
        assert main(["compare", name, *SMALL, "--search", "1", "--held-out", "a", "b"]) == 0
        shown = capsys.readouterr()
        assert "erm, held out: a, seed 0: mse " in shown.err
        assert "%" not in shown.err
        assert "average mse" in shown.out
        assert {r.config.holdout for r in Store("shoal-compare/runs").all()} == {0.2}

    def test_who_cannot_take_part_is_said(
        self, made: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(algorithm_class("fish"), "tasks", frozenset({"classification"}))
        name = made(False, {}, ("a", "b", "c"), classes=None)
        arguments = ["compare", name, *SMALL, "--search", "1", "--held-out", "a"]
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert "Not compared: fish (needs classes)." in shown.err
        assert "Not compared: fish (needs classes)." in shown.out
        assert main([*arguments, "--algorithms", "fish"]) == 2
        assert "there is nothing to compare: fish needs classes" in capsys.readouterr().err

    def test_one_that_fails_does_not_cost_the_others(self, capsys: Captured, in_process: Any) -> None:
        def run_or_fail(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == "erm" and config.seed == 1:
                raise RuntimeError("out of memory\nand more")
            return record(config, 0.5, 0.5)

        in_process(run_or_fail)
        assert main(TINY) == 1
        shown = capsys.readouterr()
        assert "seed 1: failed: RuntimeError: out of memory" in shown.err
        assert "A run of erm failed: RuntimeError: out of memory" in shown.out
        assert "2 of 8 runs are missing: erm, 75° held out, seed 1, hyperparameter trials 0, 1." in shown.out
        assert sum(r.status == "finished" for r in Store("shoal-compare/runs").all()) == 6
        in_process(lambda config, *given: record(config, 0.5, 0.5))
        assert main(TINY) == 0  # the same command does what failed again
        assert "failed" not in capsys.readouterr().out

    def test_a_row_that_failed_is_shown_as_failed(self, capsys: Captured, in_process: Any) -> None:
        def run_or_fail(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == "erm":
                raise ValueError("no")
            return record(config, 0.5, 0.5)

        in_process(run_or_fail)
        assert main([*TINY, "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        assert result["failed"] == {"erm": "ValueError: no"}
        assert [(r["algorithm"], r["rank"]) for r in result["rows"]] == [("fish", 1), ("erm", None)]
        assert view.table(result).rows[1][2] == "failed"

    def test_ctrl_c_keeps_what_has_finished(self, capsys: Captured, in_process: Any) -> None:
        def run_or_stop(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == "fish":
                raise KeyboardInterrupt
            return record(config, 0.5, 0.5)

        in_process(run_or_stop)
        assert main(TINY) == 130
        assert "he same command resumes" in capsys.readouterr().err
        in_process(lambda config, *given: record(config, 0.5, 0.5))
        assert main(TINY) == 0
        assert "6 runs to do, 2 already finished." in capsys.readouterr().err

    def test_not_of_several_processes(self, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        assert main(TINY) == 2
        assert "run it without torchrun" in capsys.readouterr().err
