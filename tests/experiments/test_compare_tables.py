"""Comparisons on tables: scikit-learn's baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import datasets as sets
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.protocol import resplit

TREES = baselines.BOOSTING
SITES = ("kyoto", "lima", "oslo", "<script>")


def table(path: Path, rows: int = 160, label: str = "ill", seed: int = 0, sites: Any = SITES) -> str:
    """A CSV of a few sites; the label depends on age and colour, and on nothing else."""
    draw = np.random.default_rng(seed)
    age, colour = draw.normal(50, 10, rows), draw.choice(["red", "blue"], rows)
    risk = age + 10 * (colour == "red") + draw.normal(0, 4, rows)
    values = risk if label == "risk" else np.where(risk > 55, "yes", "no")
    lines = [f"age,colour,site,{label}"]
    lines += [
        f"{a:.2f},{c},{sites[n % len(sites)]},{v}"
        for n, (a, c, v) in enumerate(zip(age, colour, values, strict=True))
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"file": table(tmp_path / "patients.csv"), "label": "ill", "domain": "site"}


def base(options: dict[str, Any]) -> RunConfig:
    return RunConfig("table", "erm", 5, data_options=options, eval_every=5)


class TestBaselines:
    def test_the_same_as_scikit_learn_by_hand(self, options: dict[str, Any]) -> None:
        linear = pytest.importorskip("sklearn.linear_model")
        config = compare.plan(base(options), baselines.names(2), ["oslo"], [0], 1)[1]
        assert config.name == "logistic-regression"
        record = baselines.run(config)
        data: Any = sets.load("table", **options, held_out="oslo")
        x, y = data.examples.x.numpy(), data.examples.y.numpy()
        train, test = (data.splits[s].examples() for s in ("train", "test"))
        model = linear.LogisticRegression(max_iter=1000).fit(x[train], y[train])
        assert record.score("test") == pytest.approx(model.score(x[test], y[test]))
        scores = record.history[0]["scores"]["test"]
        chances = model.predict_proba(x[test])
        assert scores["loss"] == pytest.approx(-np.log(chances[np.arange(len(test)), y[test]]).mean())
        pairs = [(a, b) for a in chances[y[test] == 1, 1] for b in chances[y[test] == 0, 1]]
        assert scores["metrics"]["AUC"] == pytest.approx(np.mean([a > b for a, b in pairs]))
        assert scores["domains"] == {"oslo": scores["average"]}

    def test_the_trees_are_those_of_validation(self, options: dict[str, Any]) -> None:
        pytest.importorskip("sklearn")
        record = baselines.run(compare.plan(base(options), baselines.names(2), ["oslo"], [0], 1)[2])
        steps = [point["step"] for point in record.history]
        assert steps == list(range(baselines.LOOK, baselines.TREES + 1, baselines.LOOK))
        held = [point["scores"]["validation"]["average"] for point in record.history]
        assert record.selected == int(np.argmax(held))
        assert record.status == "finished"

    def test_what_is_held_out_has_no_part(self, options: dict[str, Any], tmp_path: Path) -> None:
        """Other labels and ages in the domain left out change its scores and no others."""
        pytest.importorskip("sklearn")
        lines = Path(options["file"]).read_text().splitlines()
        other = [("1.5,red,oslo,yes" if ",oslo," in line else line) for line in lines]
        (tmp_path / "other.csv").write_text("\n".join(other))
        changed = {**options, "file": str(tmp_path / "other.csv")}
        for one, two in zip(
            *(compare.plan(base(o), baselines.names(2), ["oslo"], [0], 1) for o in (options, changed)),
            strict=True,
        ):
            before, after = (baselines.run(c).history[-1]["scores"] for c in (one, two))
            assert before["validation"] == after["validation"]
            assert before["train"] == after["train"]
            assert before["test"] != after["test"]

    def test_quantities(self, tmp_path: Path) -> None:
        pytest.importorskip("sklearn")
        options = {"file": table(tmp_path / "r.csv", label="risk"), "label": "risk", "domain": "site"}
        found = {
            c.name: baselines.run(c)
            for c in compare.plan(base(options), baselines.names(None), ["lima"], [0], 1)
        }
        assert list(found) == ["majority", "ridge-regression", "gradient-boosting"]
        assert {r.history[-1]["scores"]["test"]["metric"] for r in found.values()} == {"mse"}
        mean = found.pop("majority").score("test")
        assert all(record.score("test") < 0.7 * mean for record in found.values())

    def test_a_search_of_the_same_length_that_begins_with_the_defaults(self, options: dict[str, Any]) -> None:
        def plan(seeds: int, search: int) -> list[RunConfig]:
            return compare.plan(base(options), baselines.names(2), ["lima", "oslo"], range(seeds), search)

        found = plan(2, 3)
        identities = {c.identity for c in found}
        assert len(identities) == len(found) == 2 * 2 * (1 + 3 + 3)  # majority has no settings
        of_one = [c for c in found if (c.name, c.seed, c.data_options["held_out"]) == (TREES, 1, "oslo")]
        assert [bool(c.settings) for c in of_one] == [False, True, True]
        assert {c.identity for c in plan(1, 2)} < identities

    def test_only_for_rows_of_numbers(self, options: dict[str, Any]) -> None:
        assert compare.layout("table", options).flat
        assert compare.layout("linear", {}).flat
        assert not compare.layout("rotated-digits", {}, ["75°"]).flat


def test_a_sweep_of_a_table_does_not_leak(options: dict[str, Any]) -> None:
    """DomainBed's splits would judge by rows to which columns were fitted."""
    with pytest.raises(InputError, match="scaled"):
        resplit(sets.load("table", **options), ["kyoto"], 0)
