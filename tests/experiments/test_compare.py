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
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run, validated
from shoal.experiments.search import candidates
from shoal.report import compare as view
from shoal.report import plots

BASE = RunConfig("rotated-digits", "erm", 4, lr=1e-3, eval_every=2)


def plan(algorithms: str = "erm fish", held_out: str = "0° 75°", seeds: int = 2, search: int = 2) -> Any:
    return compare.plan(BASE, algorithms.split(), held_out.split(), range(seeds), search)


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
            "domains": {config.data_options.get("held_out", "away"): test},
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
        default = not config.settings and config.lr == 1e-3
        score = test[config.algorithm][config.data_options["held_out"]][config.seed]
        found.append(record(config, best if default else 0.5, score if default else 0.5, metric))
    return found


class TestPlan:
    def test_every_combination_once(self) -> None:
        found = plan(seeds=3, search=4)
        assert len(found) == 2 * 2 * 3 * 4
        assert len({c.identity for c in found}) == len(found)
        assert {(c.select, c.eval_every, c.steps) for c in found} == {("best", 2, 4)}
        assert all(c.label == c.algorithm for c in found)
        held_out = [c.data_options["held_out"] for c in found]
        assert held_out == ["0°"] * 24 + ["75°"] * 24  # neighbours share data

    def test_the_default_run_is_the_run_of_the_defaults(self) -> None:
        options = {"held_out": "75°"}
        usual = replace(BASE, algorithm="fish", data_options=options, seed=1, select="best")
        assert usual.identity in {c.identity for c in plan()}

    def test_all_algorithms_have_the_same_rates_and_trials_their_own(self) -> None:
        found = plan(held_out="0°", seeds=2, search=3)
        rates = {
            (a, s): [c.lr for c in found if (c.algorithm, c.seed) == (a, s)]
            for a in ("erm", "fish")
            for s in (0, 1)
        }
        assert rates["erm", 0] == rates["fish", 0]
        assert rates["erm", 0][0] == rates["erm", 1][0] == 1e-3
        assert not set(rates["erm", 0][1:]) & set(rates["erm", 1][1:])

    def test_a_way_of_drawing_makes_a_row_of_its_own(self) -> None:
        found = plan("fish fish:regrouped", held_out="0°", seeds=1, search=2)
        assert [(c.name, c.algorithm, c.draw) for c in found] == [
            *[("fish", "fish", None)] * 2,
            *[("fish:regrouped", "fish", "regrouped")] * 2,
        ]
        own, mixed = found[:2], found[2:]
        assert [c.settings for c in own] == [c.settings for c in mixed]
        assert [c.lr for c in own] == [c.lr for c in mixed]
        assert len({c.identity for c in found}) == 4
        assert [t["algorithm"] for t in compare.trials(found, [])] == ["fish", "fish:regrouped"]

    def test_a_longer_search_keeps_the_runs_of_a_shorter_one(self) -> None:
        short, long = ({c.identity for c in plan(seeds=s, search=k)} for s, k in ((2, 2), (3, 4)))
        assert short < long

    def test_other_options_stay(self) -> None:
        base = replace(BASE, data_options={"seed": 5}, lr=0.1, optimizer_options={"weight_decay": 0.5})
        found = compare.plan(base, ["erm"], [None, "0°"], [0], 2)
        assert [dict(c.data_options) for c in found[1:3]] == [{"seed": 5}, {"seed": 5, "held_out": "0°"}]
        assert {c.optimizer_options["weight_decay"] for c in found} == {0.5}
        assert [c.lr for c in found] == [0.1, candidates(base, 2)[1][1]["lr"]] * 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers a dataset made of nothing but the given parts."""

    def make(validation: bool, notes: dict[str, str], domains: Any = None, classes: int | None = 2) -> str:
        def load(*, held_out: str = "c", size: int = 20) -> DomainData:
            names = [n for n in ("a", "b", "c") if n != held_out]
            rows = {n: np.arange(i * size, (i + 1) * size) for i, n in enumerate([*names, held_out])}
            splits = {"train": Domains.from_indices({n: rows[n][:-5] for n in names})}
            if validation:
                splits["validation"] = Domains.from_indices({n: rows[n][-5:] for n in names})
            splits["test"] = Domains.from_indices({held_out: rows[held_out]})
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
        assert compare.layout(made(True, {}), {}).held_out == (None,)
        assert compare.layout("made", {}, ["c"]).held_out == (None,)
        several = made(True, {}, ("a", "b", "c"), classes=None)
        found = compare.layout(several, {})
        assert (found.held_out, found.domains, found.classes) == (("a", "b", "c"), 2, None)
        assert compare.layout(several, {}, ["b", "a", "b"]).held_out == ("b", "a")

    @pytest.mark.parametrize(
        ("options", "held_out", "named"),
        [({}, ["d"], "'d'"), ({"held_out": "a"}, [], "held_out"), ({"sice": 3}, [], "'sice'")],
    )
    def test_wrong_names(self, options: Any, held_out: list[str], named: str, made: Any) -> None:
        with pytest.raises(InputError, match=named):
            compare.layout(made(True, {}, ("a", "b", "c")), options, held_out)

    def test_rotated_digits_and_the_linear_example(self) -> None:
        digits = compare.layout("rotated-digits", {})
        assert digits == compare.Layout(("0°", "15°", "30°", "45°", "60°", "75°"), None, 5, 10)
        assert compare.layout("linear", {}) == compare.Layout((None,), 0.2, 2, 2)

    def test_the_users_own_pictures(self, tmp_path: Path) -> None:
        rows = planted(tmp_path / "pictures")
        folder = {"folder": str(tmp_path / "pictures"), "size": 16}
        assert compare.layout("image-folder", folder) == compare.Layout(("a", "b", "c"), None, 2, 2)
        table = tmp_path / "list.csv"
        listed = {"file": str(table), "size": 16}
        table.write_text("\n".join(["path,label,domain", *rows]))
        assert compare.layout("manifest", listed).held_out == ("a", "b", "c")
        split = [f"{row},{'test' if row.endswith('b') else 'train'}" for row in rows]
        table.write_text("\n".join(["path,label,domain,split", *split]))
        assert compare.layout("manifest", listed) == compare.Layout((None,), 0.2, 2, 2)

    def test_who_cannot_take_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(algorithm_class("fish"), "tasks", frozenset({"classification"}))
        names = ["erm", "fish", "idgm"]
        assert compare.unable(names, compare.Layout((None,), None, 2, None)) == {"fish": "needs classes"}
        assert compare.unable(names, compare.Layout((None,), None, 2, 3)) == {}
        assert compare.unable(["idgm"], compare.Layout((None,), None, 1, 3)) == {
            "idgm": "needs two training domains"
        }


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
        with pytest.raises(InputError, match="validation"):
            run(replace(config, holdout=None), device="cpu")
        found = run(config, device="cpu")
        scores = found.history[-1]["scores"]
        assert (scores["train"]["sizes"], scores["validation"]["sizes"]) == ([800, 800], [200, 200])
        other = run(replace(config, holdout=0.5), device="cpu")  # not the data that were loaded for the other
        assert other.history[-1]["scores"]["validation"]["sizes"] == [500, 500]

    @pytest.mark.parametrize("share", [0, 1, -0.2, math.nan, "a fifth"])
    def test_shares_that_are_none(self, share: Any) -> None:
        with pytest.raises(InputError, match=r"^holdout"):
            replace(BASE, holdout=share)


class TestChoice:
    def test_by_validation_and_not_by_test(self) -> None:
        records = [record(BASE, v, t) for v, t in ((0.5, 0.9), (0.8, 0.1), (0.7, 1.0))]
        assert compare.choose(records) == 1

    def test_at_the_selected_step_where_every_domain_counts_once(self) -> None:
        one = record(BASE, 0.5, 0.5)
        later = record(BASE, 0.9, 0.5, selected=1)  # 0.9 is at a step that was not selected
        assert compare.choose([one, later]) == 0
        assert compare.choose([record(BASE, [0.5, 0.7], 0), record(BASE, [0.9, 0.4], 0)]) == 1

    def test_of_equals_the_first_and_the_lowest_error(self) -> None:
        assert compare.choose([record(BASE, v, 0) for v in (0.5, 0.75, 0.75)]) == 1
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

    def test_differences_are_paired_by_seed(self) -> None:
        rows = {r["algorithm"]: r["difference"] for r in self.rows()["rows"]}
        assert rows["fish"]["values"] == [0.125, 0.0625]
        assert (rows["fish"]["mean"], rows["fish"]["sd"]) == pytest.approx((0.09375, 0.0625 / 2**0.5))
        assert rows["fish"]["se"] == pytest.approx(0.03125)
        assert rows["idgm"]["values"] == [0.15625, 0.03125]
        assert rows["erm"]["values"] == [0, 0]

    def test_the_score_is_the_chosen_ones(self) -> None:
        """And not the best in the domain left out, nor that of the last step."""
        configs = plan("erm", "0°", seeds=1, search=3)
        scores = ((0.5, 0.9), (0.8, 0.2), (0.7, 1.0))
        records = [record(c, v, t) for c, (v, t) in zip(configs, scores, strict=True)]
        (trial,) = compare.trials(configs, reversed(records))
        assert (trial["chosen"], trial["validation"], trial["test"], trial["step"]) == (1, 0.8, 0.2, 2)
        assert trial["lr"] == configs[1].lr

    def test_a_trial_of_which_all_runs_diverged(self) -> None:
        configs = plan()
        records = scored(configs, self.test)
        lost = [c.algorithm == "fish" and c.seed == 1 and c.data_options["held_out"] == "0°" for c in configs]
        records = [diverged(r.config) if gone else r for r, gone in zip(records, lost, strict=True)]
        result = compare.results(configs, records)
        erm, fish = result["rows"]
        assert (erm["algorithm"], erm["rank"], erm["mean_rank"]) == ("erm", 1, 1.0)
        assert (fish["rank"], fish["runs_diverged"]) == (None, 2)
        assert fish["average"]["values"] == [0.5, None]
        assert fish["difference"]["values"] == [0.125, None]
        assert fish["domains"]["75°"]["values"] == [0.25, 0.5]

    def test_an_algorithm_that_always_diverged(self) -> None:
        configs = plan()
        records = [
            diverged(r.config) if r.config.algorithm == "erm" else r for r in scored(configs, self.test)
        ]
        result = compare.results(configs, records)
        assert [r["algorithm"] for r in result["rows"]] == ["fish", "erm"]
        assert {t["status"] for t in result["trials"] if t["algorithm"] == "erm"} == {"diverged"}

    def test_an_infinite_error_in_the_held_out_domain_is_not_hidden_by_the_choice(self) -> None:
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
            json.dumps(compare.results(configs, records), allow_nan=False)

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

    def test_no_run_at_all(self) -> None:
        result = compare.results(plan(), [])
        assert (result["metric"], result["runs_missing"]) == (None, 16)
        assert len(result["missing"]) == 8
        assert "missing" in view.text(result)
        with pytest.raises(InputError):
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
        at = {name: n for n, name in enumerate(table.columns)}
        (fish, erm) = table.rows
        assert (fish[at["algorithm"]], fish[at["75°"]]) == ("fish", "60.5 ± 0.8")
        assert (fish[at["difference to erm"]], erm[at["difference to erm"]]) == ("+10.1 ± 0.1", "–")

    def test_errors_are_no_percent(self) -> None:
        table = view.table(self.result(metric="mse", apart=-0.1))
        assert table.rows[0][1:3] == ["fish", "0.4055 ± 0.0078"]

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
        assert {(d["algorithm"], d["held_out"], d["seed"]) for d in lines} == {
            (a, d, s) for a in ("erm", "fish") for d in ("0°", "75°") for s in "01"
        }
        assert float(lines[0]["test"]) == 0.5
        assert (lines[0]["metric"], lines[0]["chosen"], lines[0]["settings"]) == ("accuracy", "0", "{}")
