"""Metrics equal scikit-learn's; intervals know what is independent, also at the ends and for few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from shoal.experiments.statistics import (
    Estimate,
    calibration,
    classification,
    mean_interval,
    regression,
    t_limit,
)


def drawn(rows: int, classes: int, seed: int = 0, ties: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, classes)) + 1.2 * np.eye(classes)[y]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if ties:
        p = np.round(p, 1) + 0.05
        p /= p.sum(1, keepdims=True)
    return p, y


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_classification_is_scikit_learns(classes: int, ties: bool) -> None:
    p, y = drawn(300, classes, ties=ties)
    found = classification(p, y)
    score, truth = (p[:, 1], y) if classes == 2 else (p, np.eye(classes)[y])
    expected = {
        "accuracy": metrics.accuracy_score(y, p.argmax(1)),
        "balanced accuracy": metrics.balanced_accuracy_score(y, p.argmax(1)),
        "AUC": metrics.roc_auc_score(truth, score, average="macro"),
        "average precision": metrics.average_precision_score(truth, score, average="macro"),
        "log loss": metrics.log_loss(y, p),
        "Brier score": metrics.brier_score_loss(y, p[:, 1] if classes == 2 else p),
    }
    assert {name: estimate.value for name, estimate in found.items()} == pytest.approx(expected)
    assert all(e.low < e.value < e.high for e in found.values())  # type: ignore[operator]
    assert found == classification(p, y)


def test_regression_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(100, 20, 200)
    output = y + rng.normal(2, 5, 200)
    found = regression(output, y)
    assert found["MAE"].value == pytest.approx(metrics.mean_absolute_error(y, output))
    assert found["RMSE"].value == pytest.approx(metrics.root_mean_squared_error(y, output))
    assert found["R²"].value == pytest.approx(metrics.r2_score(y, output))
    assert found["mean error"].value == pytest.approx(float((output - y).mean()))
    assert all(e.low < e.value < e.high for e in found.values())  # type: ignore[operator]


def test_rows_repeated_within_entities_change_nothing() -> None:
    p, y = drawn(40, 2)
    rows = np.repeat(np.arange(40), 10)
    once, repeated = classification(p, y), classification(p[rows], y[rows], rows.astype(str))
    for name in set(once) - {"accuracy"}:
        assert vars(repeated[name]) == pytest.approx(vars(once[name]))
    assert repeated["accuracy"].low == pytest.approx(once["accuracy"].low, abs=0.01)
    output = 1.0 * y + p[:, 0]
    for name, estimate in regression(output[rows], 1.0 * y[rows], rows).items():
        assert vars(estimate) == pytest.approx(vars(regression(output, 1.0 * y)[name]))


def test_degenerate_ones() -> None:
    p, y = drawn(30, 2)
    one = classification(p[y == 1], y[y == 1])
    assert one["AUC"] == one["average precision"] == Estimate(None, undefined="one class")
    assert one["accuracy"].value is not None
    assert classification(p[:1], y[:1])["log loss"].low is None
    assert classification(p, y, np.zeros(30))["accuracy"].low is None
    assert classification(*(part[:1] for part in drawn(5, 4)))["AUC"].value is None
    sure = classification(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1]))
    assert sure["log loss"].undefined == "infinite"
    flat = regression(np.arange(20.0), np.ones(20))
    assert "same in all rows" in flat["R²"].undefined
    assert regression(np.ones(1), np.zeros(1))["MAE"] == Estimate(1.0)
    assert regression(np.arange(9.0), np.arange(9.0))["R²"] == Estimate(1.0)


def test_perfect_scores_have_a_width() -> None:
    truth = np.array([0, 1] * 20)
    entities = np.arange(40) // 2 * 2 + truth  # two rows each, of the same class
    ideal = classification(np.stack([1.0 - truth, truth], 1), truth, entities // 2)
    for name in ("accuracy", "balanced accuracy", "AUC", "average precision"):
        low, high = ideal[name].low, ideal[name].high
        assert low is not None
        assert 0.6 < low < 0.9
        assert high == 1.0


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
    assert calibration(*drawn(400, 4))["bins"][0]["from"] >= 0.2  # the predicted class has at least a quarter


def test_intervals_of_means_are_scipys_and_those_of_clusters_of_equal_values_are_those_of_the_clusters() -> (
    None
):
    for level, dof in ((0.95, 1), (0.95, 4), (0.6, 9), (0.99, 200)):
        assert t_limit(level, dof) == pytest.approx(stats.t.interval(level, dof)[1])
    values = np.random.default_rng(0).normal(1, 1, 7)
    truth = stats.ttest_1samp(values, 0)
    low, high = truth.confidence_interval(0.9)
    expected = (values.mean(), low, high, values.mean() / truth.statistic)
    assert mean_interval(values.tolist(), level=0.9) == pytest.approx(expected)
    several = mean_interval(np.repeat(values, 3), np.repeat(list("abcdefg"), 3), 0.9)
    assert several == pytest.approx(expected)
    assert mean_interval([1.0, 3.0], ["a", "a"]) == (2.0, None, None, None)
