"""The rule of a comparison: which row is recommended, and the scores and intervals that it expects."""

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
from shoal.experiments.recommend import Recommendation, recommendation
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import mean_interval, t_limit
from shoal.report import compare as view

Scores = Mapping[str, Any]
"""For each row, for each domain, one score per seed."""


def result(scores: Scores, fold: int = 1) -> dict[str, Any]:
    """A comparison with these scores, in folds of ``fold`` domains."""
    configs, records = [], []
    for name, domains in scores.items():
        algorithm, draw = split_draw(name)
        for first in range(0, len(domains), fold):
            held_out = [f"d{number:02}" for number in range(first, first + fold)]
            for seed in range(len(domains[0])):
                values = {d: domains[first + n][seed] for n, d in enumerate(held_out)}
                options = {"held_out": held_out if fold > 1 else held_out[0]}
                config = RunConfig("table", algorithm, 5, options, seed=seed, draw=draw, label=name)
                held = {"metric": "accuracy", "average": 0.5, "domains": {"a": 0.5}}
                test = {"metric": "accuracy", "average": 0.0, "domains": values}
                point = {"step": 5, "passes": 5, "loss": 1.0, "scores": {"validation": held, "test": test}}
                configs.append(config)
                records.append(RunRecord(config, "finished", (point,), 0, "best", 1.0, {"device": "cpu"}))
    return compare.results(configs, records)


def rows_of(scores: Scores, left: Mapping[str, str] | None = None, fold: int = 1) -> list[dict[str, Any]]:
    """The rows that the rule takes."""
    return [
        {
            "algorithm": name,
            "control": compare.is_control(name),
            "rank": None if name in (left or {}) else 1,
            "left": (left or {}).get(name),
            "average": {"metric": "accuracy"},
            "domains": {
                f"d{n}": {"values": list(np.atleast_1d(v)), "fold": n // fold} for n, v in enumerate(domains)
            },
        }
        for name, domains in scores.items()
    ]


def recommended(scores: Scores, lower: bool = False, **options: Any) -> Recommendation:
    found = recommendation(rows_of(scores, **options), lower)
    assert found is not None
    return found


ORDER = ["logistic-regression", "gradient-boosting", "erm", "reweighted", "mixup"]
"""From simple to complex, written down again; all others are as complex as each other."""
ROWS = ["majority", *ORDER, "fish", "coral", "fish:regrouped"]


def place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def naive(means: Mapping[str, Sequence[float]]) -> str | None:
    """The rule in plain loops; higher is better. ``None``: no row beats the majority on average."""
    rows = {n: v for n, v in means.items() if n != "majority" and not n.endswith(":regrouped")}
    total = {name: sum(values) / len(values) for name, values in means.items()}
    limit = t_limit(1 - 2 * 0.1 / max(len(rows) - 1, 1), len(next(iter(rows.values()))) - 1)

    def beats(one: str, other: str) -> bool:
        gaps = [a - b for a, b in zip(rows[one], rows[other], strict=True)]
        middle = sum(gaps) / len(gaps)
        variance = sum((gap - middle) ** 2 for gap in gaps) / (len(gaps) - 1)
        return round(middle, 12) > limit * math.sqrt(variance / len(gaps))

    def fit(name: str) -> bool:
        """Whether no simpler row beats it on average."""
        return not any(place(n) < place(name) and round(total[n] - total[name], 12) > 0 for n in rows)

    useful = [n for n in rows if "majority" not in means or round(total[n] - total["majority"], 12) > 0]
    useful.sort(key=lambda name: (place(name), -total[name]))
    for name in useful:
        unbeaten = fit(name) and not any(beats(other, name) for other in rows if other != name)
        if unbeaten and (name == useful[0] or beats(name, useful[0])):
            return name
    return max([n for n in useful if fit(n)] or useful[:1], key=lambda name: total[name], default=None)


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.sampled_from(ROWS), min_size=2, unique=True),
    domains=st.integers(3, 9),
    seeds=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.01, 0.1]),
    number=st.integers(0, 10**6),
    lower=st.booleans(),
)
def test_as_in_plain_loops(
    names: list[str], domains: int, seeds: int, noise: float, number: int, lower: bool
) -> None:
    draw = np.random.default_rng(number)
    common, sign = draw.uniform(0.3, 0.7, (domains, 1)), -1 if lower else 1
    scores = {
        name: (common + draw.normal(0, 0.05) + noise * draw.normal(size=(domains, seeds))).tolist()
        for name in names
    }
    found = recommendation(rows_of(scores), lower)
    if all(name in ("majority", "fish:regrouped") for name in names):
        assert found is None
        return
    assert found is not None
    means = {name: (sign * np.mean(values, 1)).tolist() for name, values in scores.items()}
    expected = naive(means)
    if expected is None:
        assert (found.row, found.state) == (None, "majority")
        return
    assert found.nearest == expected
    if "majority" in names:
        gain = np.subtract(means[expected], means["majority"])
        error = gain.std(ddof=1) / math.sqrt(domains)
        sure = round(gain.mean(), 12) > t_limit(0.9, domains - 1) * error
        assert found.row == (expected if sure else None)
    assert Recommendation.from_dict(found.to_dict()) == found


def test_a_row_that_left_the_race_only_counts() -> None:
    scores = {"logistic-regression": [0.5] * 3, "erm": [0.9] * 3, "fish": [0.9] * 3}
    for how, state in (("average", "tied"), ("chance", "use")):
        found = recommended(scores, left={"erm": how, "fish": "chance"})
        assert (found.row, found.state, found.rows) == ("logistic-regression", state, 3)
        assert found.tied == (("erm",) if how == "average" else ())
        assert found.reference is not None  # with the seeds that both have
        assert found.reference.mean == pytest.approx(-0.4)


def test_not_better_than_the_majority_class() -> None:
    chance = [0.5, 0.6, 0.4, 0.5]
    for gains, row in (
        ((0.02, -0.03, 0.03, -0.01), None),
        ((0.2, 0.2, 0.21, 0.2), "erm"),
        ((0.4, 0.1, 0.3, -0.1), None),  # by 1.6 standard errors; 2.35 are needed
        ((-0.2, -0.2, -0.2, -0.2), None),
    ):
        rows = {"majority": chance, "erm": np.add(chance, gains).tolist(), "fish": chance}
        found = result({name: [[v] for v in values] for name, values in rows.items()})
        about = Recommendation.from_dict(found["recommendation"])
        assert (about.row, about.nearest, about.state == "majority") == (row, "erm", row is None)
        assert about.majority is not None
        assert about.majority.mean == pytest.approx(np.mean(gains))
        assert view.recommended(found)[0].startswith("No recommendation" if row is None else "Use erm")


@pytest.mark.parametrize("domains", [1, 2])
def test_too_few_domains_are_no_conclusion(domains: int) -> None:
    found = result({"erm": [[0.5]] * domains, "fish": [[0.9]] * domains})
    about = Recommendation.from_dict(found["recommendation"])
    assert (about.row, about.nearest, about.state, about.mean) == (None, "erm", "few", None)
    assert view.recommended(found)[0].startswith("No recommendation")


def test_numbers_of_one_row_are_student_s() -> None:
    values = [0.7, 0.6, 0.8, 0.5, 0.65]
    found, interval = recommended({"erm": values}), mean_interval(values)
    assert found.expected == found.average == pytest.approx(0.65)
    assert found.mean == pytest.approx((interval.low, interval.high))
    reach = 2.776445 * np.std(values, ddof=1) * math.sqrt(1 + 1 / 5)
    assert found.new_domain == pytest.approx((0.65 - reach, 0.65 + reach))
    assert (found.reference, found.alternative, found.detectable) == (None, None, None)


def test_the_expected_score_is_halfway_to_the_cross_fitted_one() -> None:
    """Without the last domain the rule finds ERM, without any other the linear model."""
    linear, erm = np.array([0.5, 0.6, 0.7, 0.6, 0.9]), np.array([0.60, 0.701, 0.80, 0.70, 0.7])
    found = recommended({"logistic-regression": linear, "erm": erm})
    assert found.row == "logistic-regression"
    assert found.expected == pytest.approx((linear.mean() + (linear[:4].sum() + erm[4]) / 5) / 2)


def test_what_could_have_been_told_apart() -> None:
    found = recommended({"erm": [0.5, 0.6, 0.7, 0.8], "fish": [0.52, 0.55, 0.74, 0.79]})
    error = np.std([0.02, -0.05, 0.04, -0.01], ddof=1) / 2
    # Student's t with three degrees of freedom: 90 % below 1.63774, 80 % below 0.97847
    assert found.detectable == pytest.approx((1.63774 + 0.97847) * error, rel=1e-4)
    assert found.domains_needed is None  # the averages are equal
    assert found.alternative is not None
    assert (found.alternative.to, found.alternative.mean) == ("fish", pytest.approx(0.0))
    gains = np.array([0.10, -0.06, 0.05, 0.03])
    needed = recommended({"erm": np.full(4, 0.5), "fish": 0.5 + gains}).domains_needed
    assert needed is not None
    for domains, enough in ((needed, True), (needed - 1, False)):
        limits = t_limit(0.8, domains - 1) + t_limit(0.6, domains - 1)
        assert (limits * np.std(gains, ddof=1) / math.sqrt(domains) <= 0.03) == enough


def test_domains_of_a_fold_are_one_cluster_and_seeds_are_averaged_first() -> None:
    """Twelve domains in four folds: the interval is that of four independent folds."""
    rng = np.random.default_rng(0)
    erm = rng.uniform(0.4, 0.6, (12, 2))
    gain = np.repeat(rng.normal(0.02, 0.05, 4), 3) + rng.normal(0, 0.01, 12)
    scores = {"erm": erm.tolist(), "fish": (erm + gain[:, None]).tolist()}
    found = result(scores, fold=3)
    about = Recommendation.from_dict(found["recommendation"])
    assert (found["folds"], about.folds, about.domains) == (4, 4, 12)
    over = next(r["over_domains"] for r in found["rows"] if r["algorithm"] == "fish")
    expected = mean_interval(gain.tolist(), [n // 3 for n in range(12)])
    assert (over["mean"], over["low"], over["high"]) == pytest.approx(expected[:3])
    assert about.alternative is not None
    ends = sorted(map(abs, (about.alternative.low, about.alternative.high)))  # type: ignore[arg-type]
    assert ends == pytest.approx(sorted(map(abs, expected[1:3])))
    assert [*over["values"].values()] == pytest.approx(gain.tolist())
    assert result({n: v[:6] for n, v in scores.items()}, fold=3)["recommendation"]["state"] == "few"


def test_equal_averages_are_equal_in_whatever_order_they_were_added() -> None:
    scores = {"groupdro": [0.8625, 0.9, 0.8625, 0.8625], "erm": [0.8625, 0.9125, 0.8375, 0.875]}
    scores |= {"logistic-regression": [0.8875, 0.9, 0.875, 0.825], "fish": [0.8, 0.8, 0.81, 0.8]}
    found = result({name: [[v] for v in values] for name, values in scores.items()})
    assert [row["rank"] for row in found["rows"]] == [1, 1, 1, 4]
    assert found["recommendation"]["row"] == "logistic-regression"
    assert "-0.0" not in view.text(found)
