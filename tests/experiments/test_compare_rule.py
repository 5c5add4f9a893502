"""The rule of a comparison: which row is recommended, and the intervals that it is based on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algorithms import split_draw
from shoal.experiments import compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import mean_interval, t_limit
from shoal.report import compare as view

Scores = Mapping[str, Sequence[Sequence[float]]]
"""For each row, for each domain, one score per seed."""


def result(scores: Scores, metric: str = "accuracy", fold: int = 1, **also: Any) -> dict[str, Any]:
    """A comparison with these scores, in folds of ``fold`` domains; ``also`` are other metrics by domain."""
    configs, records = [], []
    for name, domains in scores.items():
        algorithm, draw = split_draw(name)
        for first in range(0, len(domains), fold):
            held_out = [f"d{number:02}" for number in range(first, first + fold)]
            for seed in range(len(domains[0])):
                values = {d: domains[first + n][seed] for n, d in enumerate(held_out)}
                options = {"held_out": held_out if fold > 1 else held_out[0]}
                config = RunConfig("table", algorithm, 5, options, seed=seed, draw=draw, label=name)
                score = {"metric": metric, "average": 0.0, "domains": values}
                extra = {"metrics": {name: each[first] for name, each in also.items()}}
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


def test_domains_of_a_fold_are_one_cluster_and_seeds_are_averaged_first() -> None:
    """Twelve domains in four folds: the interval is that of four independent folds."""
    rng = np.random.default_rng(0)
    erm = rng.uniform(0.4, 0.6, (12, 2))
    gain = np.repeat(rng.normal(0.02, 0.05, 4), 3) + rng.normal(0, 0.01, 12)
    scores = {"erm": erm.tolist(), "fish": (erm + gain[:, None]).tolist()}
    found = result(scores, fold=3)
    assert (found["folds"], found["recommendation"]["folds"]) == (4, 4)
    over = next(r["over_domains"] for r in found["rows"] if r["algorithm"] == "fish")
    expected = mean_interval(gain.tolist(), [n // 3 for n in range(12)])
    assert (over["mean"], over["low"], over["high"]) == pytest.approx(expected[:3])
    assert [*over["values"].values()] == pytest.approx(gain.tolist())
    apart = next(r["over_domains"] for r in result(scores)["rows"] if r["algorithm"] == "fish")
    assert over["high"] - over["low"] > apart["high"] - apart["low"]
    assert (
        result({n: v[:6] for n, v in scores.items()}, fold=3)["recommendation"]["take"] is None
    )  # two folds


def test_the_worst_domain_and_other_metrics() -> None:
    found = result({"erm": [[0.9, 0.8], [0.9, 0.9], [0.9, 0.9], [0.5, 0.3]]})
    worst = found["rows"][0]["worst"]
    assert (worst["domain"], worst["mean"]) == ("d03", pytest.approx(0.4))
    assert result({"erm": [[0.1], [0.5], [0.2]]}, "mse")["rows"][0]["worst"]["mean"] == 0.5
    found = result({"erm": [[0.5]] * 3, "fish": [[0.6]] * 3}, AUC=[0.7, None, 0.9])
    assert found["undefined"] == {"AUC": ["d01"]}
    assert [row["also"]["AUC"]["mean"] for row in found["rows"]] == pytest.approx([0.8, 0.8])
