"""The rule of a comparison: what is recommended, what is held out, and on which splits."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import sets
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import t_limit
from shoal.report import compare as view

Scores = Mapping[str, Sequence[Sequence[float]]]
"""For each row, for each domain, one score per seed."""


def result(scores: Scores, metric: str = "accuracy", **also: Any) -> dict[str, Any]:
    """A comparison with these scores; ``also`` are other measures by domain."""
    configs, records = [], []
    for name, domains in scores.items():
        algorithm, draw = compare.parted(name)
        for number, seeds in enumerate(domains):
            for seed, value in enumerate(seeds):
                options = {"held_out": f"d{number}"}
                config = RunConfig("table", algorithm, 5, options, seed=seed, draw=draw, label=name)
                score = {"metric": metric, "average": value, "domains": {f"d{number}": value}}
                extra = {"metrics": {name: values[number] for name, values in also.items()}}
                held = {"metric": metric, "average": 0.5, "domains": {"a": 0.5}}
                points = {"validation": held, "test": score | extra}
                point = {"step": 5, "passes": 5, "loss": 1.0, "scores": points}
                configs.append(config)
                records.append(RunRecord(config, "finished", (point,), 0, "best", 1.0, {"device": "cpu"}))
    return compare.results(configs, records)


ORDER = ["logistic-regression", "ridge-regression", "gradient-boosting", "erm", "reweighted", "mixup"]
"""From simple to complex, written down again; all others are as complex as each other."""


def naive(scores: Scores, lower: bool) -> str:
    """The one-standard-error rule in plain loops."""
    means = {}
    for name, domains in scores.items():
        if name != "majority" and not name.endswith(":regrouped"):
            means[name] = [sum(seeds) / len(seeds) for seeds in domains]
    total = {name: sum(values) / len(values) * (-1 if lower else 1) for name, values in means.items()}
    best = max(total, key=lambda name: total[name])
    near = []
    for name, values in means.items():
        differences = [abs_of - own for abs_of, own in zip(means[best], values, strict=True)]
        middle = sum(differences) / len(differences)
        variance = sum((d - middle) ** 2 for d in differences) / (len(differences) - 1)
        if abs(middle) <= math.sqrt(variance / len(differences)) or name == best:
            near.append(name)
    return min(near, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), -total[name]))


ROWS = ["majority", "logistic-regression", "gradient-boosting", "erm", "reweighted", "mixup", "fish", "coral"]
ROWS += ["fish:regrouped"]


class TestRule:
    @settings(max_examples=60, deadline=None)
    @given(
        names=st.lists(st.sampled_from(ROWS), min_size=2, unique=True),
        domains=st.integers(3, 9),
        seeds=st.integers(1, 3),
        noise=st.sampled_from([0.0, 0.01, 0.1]),
        number=st.integers(0, 10**6),
        metric=st.sampled_from(["accuracy", "mse"]),
    )
    def test_one_standard_error_as_in_plain_loops(
        self, names: list[str], domains: int, seeds: int, noise: float, number: int, metric: str
    ) -> None:
        draw = np.random.default_rng(number)
        common = draw.uniform(0.3, 0.7, (domains, 1))
        scores = {
            name: (common + draw.normal(0, 0.05) + noise * draw.normal(size=(domains, seeds))).tolist()
            for name in names
        }
        about = result(scores, metric)["recommendation"]
        if all(name in ("majority", "fish:regrouped") for name in names):
            assert about is None
            return
        assert about["take"] == naive(scores, metric == "mse")
        assert about["take"] not in ("majority", "fish:regrouped")
        if "majority" in names:
            own = np.mean(scores[about["take"]], 1) - np.mean(scores["majority"], 1)
            error = own.std(ddof=1) / math.sqrt(domains)
            sign = -1 if metric == "mse" else 1
            assert about["majority"]["better"] == (sign * own.mean() > error)
            sure = sign * own.mean() > t_limit(0.95, domains - 1) * error
            assert about["majority"]["sure"] == sure

    def test_the_simpler_row_unless_it_is_more_than_one_standard_error_behind(self) -> None:
        erm = [[0.70], [0.60], [0.80], [0.50]]
        gains = (0.10, -0.06, 0.05, 0.03)  # mean 0.03, standard error 0.0334
        fish = [[v + g for v in d] for d, g in zip(erm, gains, strict=True)]
        found = result({"erm": erm, "fish": fish})
        assert (found["recommendation"]["take"], found["recommendation"]["best"]) == ("erm", "fish")
        assert found["recommendation"]["behind"]["se"] == pytest.approx(np.std(gains, ddof=1) / 2)
        clearly = [[v + 0.03 + 0.001 * n for v in d] for n, d in enumerate(erm)]
        found = result({"erm": erm, "fish": clearly})
        assert found["recommendation"]["take"] == "fish"

    def test_what_could_have_been_seen_at_all(self) -> None:
        scores = {"erm": [[0.5], [0.6], [0.7], [0.8]], "fish": [[0.52], [0.55], [0.74], [0.79]]}
        error = np.std([0.02, -0.05, 0.04, -0.01], ddof=1) / 2
        found = result(scores)
        # Student's t with three degrees of freedom: 97.5 % below 3.18245, 80 % below 0.97847
        assert found["recommendation"]["detectable"] == pytest.approx((3.18245 + 0.97847) * error, rel=1e-4)

    def test_not_better_than_the_majority_class(self) -> None:
        chance = [[0.5], [0.6], [0.4], [0.5]]
        for gains, better, sure in (
            ((0.02, -0.03, 0.03, -0.01), False, False),
            ((0.2, 0.2, 0.21, 0.2), True, True),
            ((0.4, 0.1, 0.3, -0.1), True, False),
        ):
            erm = [[v[0] + gain] for v, gain in zip(chance, gains, strict=True)]
            found = result({"majority": chance, "erm": erm, "fish": chance})
            about = found["recommendation"]["majority"]
            assert (about["better"], about["sure"]) == (better, sure)
            assert view.recommended(found)[0].startswith("Use erm" if better else "No recommendation")

    @pytest.mark.parametrize("domains", [1, 2])
    def test_too_few_domains_are_no_conclusion(self, domains: int) -> None:
        found = result({"erm": [[0.5]] * domains, "fish": [[0.9]] * domains})
        about = found["recommendation"]
        assert (about["take"], about["begin"]) == (None, "erm")
        assert view.recommended(found)[0].startswith("No recommendation")

    def test_nothing_of_controls_alone(self) -> None:
        found = result({"majority": [[0.5]] * 3, "fish:regrouped": [[0.6]] * 3})
        assert found["recommendation"] is None
        assert view.recommended(found) == []


def test_the_worst_domain_stands_beside_the_average() -> None:
    found = result({"erm": [[0.9, 0.8], [0.9, 0.9], [0.9, 0.9], [0.5, 0.3]]})
    worst = found["rows"][0]["worst"]
    assert (worst["domain"], worst["mean"]) == ("d3", pytest.approx(0.4))
    (line, *_) = csv.DictReader(io.StringIO(view.as_csv(found)))
    assert (line["worst_domain"], float(line["worst"])) == ("d3", pytest.approx(0.4))
    assert result({"erm": [[0.1], [0.5], [0.2]]}, "mse")["rows"][0]["worst"]["mean"] == 0.5


def test_another_measure_is_averaged_where_it_is_defined() -> None:
    found = result({"erm": [[0.5]] * 3, "fish": [[0.6]] * 3}, AUC=[0.7, None, 0.9])
    assert found["undefined"] == {"AUC": ["d1"]}
    assert [row["also"]["AUC"]["mean"] for row in found["rows"]] == pytest.approx([0.8, 0.8])


SITES = {"kyoto": 40, "lima": 40, "oslo": 40, "one": 40, "tiny": 3}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table whose domain ``one`` has one class, and ``tiny`` three rows."""
    monkeypatch.chdir(tmp_path)
    draw, lines = np.random.default_rng(0), ["age,dose,site,ill"]
    for site, count in SITES.items():
        for age, dose in zip(draw.normal(50, 10, count), draw.normal(size=count), strict=True):
            ill = site == "one" or age + 10 * dose > 50
            lines.append(f"{age:.2f},{dose:.3f},{site},{'yes' if ill else 'no'}")
    Path("patients.csv").write_text("\n".join(lines))
    return {"file": "patients.csv", "label": "ill", "domain": "site"}


class TestHeldOut:
    def test_by_accuracy(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients)
        assert where.held_out == ("kyoto", "lima", "one", "oslo")
        assert (set(where.excluded), set(where.warned)) == ({"tiny"}, {"one"})
        train = sets.load("table", **patients, held_out="kyoto").splits["train"]
        assert "tiny" in train.names

    def test_by_auc(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients, metric="auc")
        assert where.held_out == ("kyoto", "lima", "oslo")
        assert set(where.excluded) == {"one", "tiny"}

    def test_whoever_is_named_is_held_out_with_a_warning(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients, ["tiny", "oslo"])
        assert (where.held_out, dict(where.excluded)) == (("tiny", "oslo"), {})
        assert set(where.warned) == {"tiny"}

    def test_where_all_are_small_all_are_held_out_with_a_warning(self, patients: dict[str, Any]) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        some = [line for n, line in enumerate(lines) if n % 4 == 0 and ",tiny," not in line]
        Path("patients.csv").write_text("\n".join(some))
        where = compare.layout("table", patients)
        assert len(where.held_out) == 4
        assert len(where.warned) == 4

    def test_none_of_whom_auc_is_defined(self, patients: dict[str, Any]) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        same = [line.rsplit(",", 1)[0] + (",no" if ",one," in line else ",yes") for line in lines[1:]]
        Path("patients.csv").write_text("\n".join([lines[0], *same]))
        with pytest.raises(InputError, match="no domain can be held out"):
            compare.layout("table", patients, metric="AUC")


class TestSplits:
    def plan(self, options: dict[str, Any]) -> list[RunConfig]:
        base = RunConfig("table", "erm", 5, options, metric="auc")
        return compare.plan(base, ["erm", "fish", *baselines.names(2)], ["oslo"], range(3), 2)

    def test_every_seed_has_its_own_and_all_rows_the_same(self, patients: dict[str, Any]) -> None:
        options: dict[int, set[str]] = {}
        for config in self.plan(patients):
            options.setdefault(config.seed, set()).add(json.dumps(dict(config.data_options), sort_keys=True))
        assert [len(same) for same in options.values()] == [1, 1, 1]
        validation = {
            tuple(sets.load("table", **json.loads(next(iter(same)))).splits["validation"].examples().tolist())
            for same in options.values()
        }
        assert len(validation) == 3

    def test_a_seed_of_the_data_that_is_given_stays(self, patients: dict[str, Any]) -> None:
        assert {c.data_options["seed"] for c in self.plan({**patients, "seed": 7})} == {7}
        assert {c.seed for c in self.plan({**patients, "seed": 7})} == {0, 1, 2}

    def test_a_dataset_that_is_made_by_its_seed_is_the_same_for_all(self) -> None:
        found = compare.plan(RunConfig("rotated-digits", "erm", 5), ["erm"], ["0°"], range(3), 1)
        assert {json.dumps(dict(c.data_options)) for c in found} == {json.dumps({"held_out": "0°"})}
