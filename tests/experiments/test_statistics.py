"""Metrics equal scikit-learn's; intervals cover what they promise, also at the ends and for few rows."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError
from shoal.experiments import statistics as intervals
from shoal.experiments.statistics import (
    Estimate,
    auc_interval,
    calibration,
    classification,
    holm,
    mean_sd,
    need_scipy,
    paired_interval,
    regression,
    summarize,
    t_limit,
    wilson,
)

metrics = pytest.importorskip("sklearn.metrics")


def drawn(rows: int, classes: int, seed: int = 0, ties: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, classes)) + 1.2 * np.eye(classes)[y]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if ties:
        p = np.round(p, 1) + 0.05
        p /= p.sum(1, keepdims=True)
    return p, y


def value(found: Estimate) -> float:
    assert found.value is not None
    return found.value


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_classification_is_scikit_learns(classes: int, ties: bool) -> None:
    p, y = drawn(300, classes, ties=ties)
    found = classification(p, y)
    assert tuple(found) == intervals.CLASSIFICATION
    predicted = p.argmax(1)
    assert value(found["accuracy"]) == pytest.approx(metrics.accuracy_score(y, predicted))
    assert value(found["balanced accuracy"]) == pytest.approx(metrics.balanced_accuracy_score(y, predicted))
    assert value(found["log loss"]) == pytest.approx(metrics.log_loss(y, p))
    score, one_hot = (p[:, 1], y) if classes == 2 else (p, np.eye(classes)[y])
    assert value(found["AUC"]) == pytest.approx(metrics.roc_auc_score(one_hot, score, average="macro"))
    assert value(found["average precision"]) == pytest.approx(
        metrics.average_precision_score(one_hot, score, average="macro")
    )
    brier = ((p - np.eye(classes)[y]) ** 2).sum(1).mean()
    if classes == 2:
        assert value(found["Brier score"]) == pytest.approx(metrics.brier_score_loss(y, p[:, 1]))
    else:
        assert value(found["Brier score"]) == pytest.approx(brier)
    for estimate in found.values():
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= value(estimate) <= estimate.high
    assert found == classification(p, y)


def test_regression_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(100, 20, 200)
    output = y + rng.normal(2, 5, 200)
    found = regression(output, y)
    assert tuple(found) == intervals.REGRESSION
    assert value(found["MAE"]) == pytest.approx(metrics.mean_absolute_error(y, output))
    assert value(found["RMSE"]) == pytest.approx(metrics.root_mean_squared_error(y, output))
    assert value(found["R²"]) == pytest.approx(metrics.r2_score(y, output))
    assert value(found["mean error"]) == pytest.approx(float((output - y).mean()))


def test_degenerate_ones() -> None:
    p, y = drawn(30, 2)
    one = classification(p[y == 1], y[y == 1])
    assert one["AUC"] == one["average precision"] == Estimate(None, undefined="one class")
    assert one["accuracy"].value is not None
    single = classification(p[:1], y[:1])
    assert single["accuracy"].low is not None
    assert single["log loss"].low is None
    several = classification(*(part[:1] for part in drawn(5, 4)))
    assert several["AUC"].value is None
    sure = classification(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1]))
    assert sure["log loss"].value is None
    assert sure["log loss"].undefined == "infinite"
    flat = regression(np.arange(20.0), np.ones(20))
    assert flat["R²"].value is None
    assert "same in all rows" in flat["R²"].undefined
    assert regression(np.ones(1), np.zeros(1))["MAE"] == Estimate(1.0)
    perfect = auc_interval(1.0, 20, 20)
    assert perfect.low is not None
    assert 0.8 < perfect.low < 0.95
    assert perfect.high == 1.0
    truth = np.array([0, 1] * 20)
    ideal = classification(np.stack([1.0 - truth, truth], 1), truth)
    assert ideal["average precision"].low == ideal["balanced accuracy"].low == wilson(20, 20).low


def test_wilson() -> None:
    found = wilson(81, 263)  # Newcombe (1998), table I: 0.2553 to 0.3662
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    assert wilson(0, 29).low == 0.0
    assert wilson(0, 29).high == pytest.approx(0.1170, abs=1e-4)


def covered(make: Any, truth: dict[str, float], times: int) -> dict[str, int]:
    found = dict.fromkeys(truth, 0)
    for seed in range(times):
        for name, estimate in make(seed).items():
            if name in truth and estimate.low is not None and estimate.low <= truth[name] <= estimate.high:
                found[name] += 1
    return found


@pytest.mark.parametrize("rows", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_intervals_cover(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 150 intervals of 95 % about 142 hold the truth; fewer than 130 would be a wrong method."""
    monkeypatch.setattr(intervals, "RESAMPLES", 200)
    p, y = drawn(200_000, 2, seed=999)
    monkeypatch.setattr(intervals, "LEAST_RESAMPLES", 1)
    monkeypatch.setattr(intervals, "NUMBERS", 200_000)
    truth = {name: value(e) for name, e in classification(p, y).items()}
    monkeypatch.setattr(intervals, "NUMBERS", 10_000_000)
    found = covered(lambda seed: classification(*drawn(rows, 2, seed), seed), truth, 150)
    assert min(found.values()) >= 130, found
    rng = np.random.default_rng(5)

    def quantity(seed: int) -> dict[str, Estimate]:
        y = rng.normal(size=rows)
        return regression(0.8 * y + rng.normal(0, 0.5, rows), y, seed)

    noise = math.sqrt(0.04 + 0.25)
    exact = {"MAE": noise * math.sqrt(2 / math.pi), "RMSE": noise, "R²": 1 - noise**2, "mean error": 0.0}
    found = covered(quantity, exact, 150)
    assert min(found.values()) >= 128, found


def test_calibration() -> None:
    rng = np.random.default_rng(0)
    stated = rng.random(2000)
    p = np.stack([1 - stated, stated], 1)
    y = (rng.random(2000) < stated).astype(int)
    good = calibration(p, y)
    assert good["error"] < 1.3 * good["chance"]
    assert sum(b["count"] for b in good["bins"]) == 2000
    assert all(b["low"] <= b["observed"] <= b["high"] for b in good["bins"])
    bins = np.minimum((stated * 10).astype(int), 9)
    naive = sum(abs(y[bins == b].mean() - stated[bins == b].mean()) * (bins == b).mean() for b in range(10))
    assert good["error"] == pytest.approx(naive)
    over = calibration(np.stack([stated < 0.5, stated >= 0.5], 1).astype(float), y)
    assert over["error"] > 5 * good["chance"]
    p, y = drawn(400, 4)
    several = calibration(p, y)
    assert several["bins"][0]["from"] >= 0.2  # the predicted class has at least a quarter


def test_perfectly_calibrated_models_stay_below_chance() -> None:
    rng = np.random.default_rng(1)
    above = 0
    for seed in range(100):
        stated = rng.beta(2, 3, 300)
        found = calibration(np.stack([1 - stated, stated], 1), (rng.random(300) < stated).astype(int), seed)
        above += found["error"] > found["chance"]
    assert above <= 12, above


def test_students_t_and_paired_intervals_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for level, dof in ((0.95, 1), (0.95, 4), (0.6, 9), (0.99, 200)):
        assert t_limit(level, dof) == pytest.approx(stats.t.interval(level, dof)[1])
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 7).tolist(), rng.normal(0, 1, 7).tolist()
    found, truth = paired_interval(a, b, 0.9), stats.ttest_rel(a, b)
    low, high = truth.confidence_interval(0.9)
    assert found == pytest.approx((np.mean(a) - np.mean(b), low, high, found.mean / truth.statistic))
    assert paired_interval([2.0], [1.0]) == (1.0, None, None, None)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.001, 0.6]) == pytest.approx([1.0, 0.003, 1.0])
    assert holm([]) == []


def test_mean_and_spread_of_what_is_known() -> None:
    assert mean_sd([]) == mean_sd([None]) == (None, None)
    assert mean_sd([2.0, None]) == (2.0, None)
    found = summarize([1.0, None, 3.0], "accuracy")
    assert found["values"] == [1.0, None, 3.0]
    assert (found["mean"], found["se"]) == (2.0, pytest.approx(1.0))


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[stats\]'"):
        need_scipy()
