"""Metrics against scikit-learn, SciPy and WILDS' own definitions, and against plain loops over groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import pearsonr
from sklearn import metrics as sk

from shoal.data import Domains
from shoal.training import metrics
from shoal.training.metrics import METRICS, Outcome

TIGHT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}
ONE = Domains.from_sizes({"all": 1})
seeds = given(st.integers(0, 2**32 - 1))
few = settings(max_examples=25)


def value(name: str, y: Any, output: Any, kind: str = "ordinal") -> float:
    return METRICS[name](Outcome(np.asarray(y), np.asarray(output), ONE, kind))


@few
@seeds
def test_classes_as_scikit_learn_over_the_classes_in_the_truth(seed: int) -> None:
    draw = np.random.default_rng(seed)
    predicted, y = draw.integers(0, 5, (2, draw.integers(1, 30)))
    options: dict[str, Any] = {"labels": np.unique(y), "zero_division": 0}
    expected = {
        "macro F1": sk.f1_score(y, predicted, average="macro", **options),
        "weighted F1": sk.f1_score(y, predicted, average="weighted", **options),
        "macro recall": np.mean([np.mean(predicted[y == c] == c) for c in np.unique(y)]),
        "class MAE": np.abs(y - predicted).mean(),
        "accuracy": sk.accuracy_score(y, predicted),
    }
    # 1 − cost / its expectation, where every two could be paired; a class that does not occur still counts.
    chance = np.square(predicted[:, None] - y).mean()
    if len(np.unique([predicted, y])) > 1:
        expected["quadratic weighted kappa"] = 1 - np.square(predicted - y).mean() / chance
    assert {name: value(name, y, np.eye(5)[predicted]) for name in expected} == pytest.approx(
        expected, **TIGHT
    )
    assert math.isnan(value("quadratic weighted kappa", y * 0, np.eye(5)[predicted * 0]))


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_auc_of_logits_as_scikit_learn_of_probabilities(classes: int) -> None:
    draw = np.random.default_rng(classes)
    y = np.concatenate([np.arange(classes), draw.integers(0, classes, 200)])
    logits = draw.normal(size=(len(y), classes)) + 0.5 * np.eye(classes)[y]
    p = softmax(logits, axis=1)
    expected = sk.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr", average="macro")
    assert value("AUC", y, logits) == pytest.approx(expected, **TIGHT)
    assert 0.5 < expected < 1
    if classes > 2:  # a class that is not in the truth is left out
        known = y > 0
        each = [sk.roc_auc_score(y[known] == c, p[known, c]) for c in range(1, classes)]
        assert value("AUC", y[known], logits[known]) == pytest.approx(np.mean(each), **TIGHT)


def test_auc_where_probabilities_are_all_one_and_where_there_is_none() -> None:
    logits, y = np.array([[0.0, 60], [0.0, 61], [0.0, 62], [0, 63]]), np.array([0, 0, 1, 1])
    assert value("AUC", y, logits) == value("AUC", y, np.pad(logits, ((0, 0), (0, 1)))) == 1
    assert math.isnan(value("AUC", y * 0, logits))
    assert math.isnan(value("AUC", y, np.where(logits == 63, np.nan, logits)))


@few
@seeds
def test_regression_as_scikit_learn_and_scipy(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, outputs = draw.integers(2, 50), draw.integers(1, 4)
    y = 100 + draw.normal(size=(count, outputs))
    f = y * draw.normal() + draw.normal(size=(count, outputs))
    expected = {
        "R²": sk.r2_score(y, f),
        "MAE": sk.mean_absolute_error(y, f),
        "mse": sk.mean_squared_error(y, f),
        "Pearson r": np.mean([pearsonr(y[:, n], f[:, n])[0] for n in range(outputs)]),
    }
    found = {name: value(name, y, f, "regression") for name in expected}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    lost = np.where(np.arange(count)[:, None] == 0, math.nan, f)
    assert all(math.isnan(value(name, y, lost, "regression")) for name in expected)
    assert all(math.isnan(value(name, y * 0 + 0.1, f, "regression")) for name in ("Pearson r", "R²"))
    assert math.isnan(value("Pearson r", y, f * 0 + 0.1, "regression"))
    assert math.isnan(value("Pearson r", y[:1], f[:1], "regression"))


@few
@seeds
def test_labels_against_a_loop(seed: int) -> None:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, (draw.integers(1, 30), 3))
    scores = np.round(draw.normal(size=y.shape), 1)
    p = (scores > 0).astype(int)
    some = [n for n in range(3) if y[:, n].any()]
    f1 = [sk.f1_score(y[:, n], p[:, n]) for n in some]
    ap = [sk.average_precision_score(y[:, n], scores[:, n]) for n in some]
    for name, each in (("macro F1", f1), ("mean average precision", ap)):
        found = value(name, y.astype(float), scores, "multilabel")
        assert math.isnan(found) if not each else found == pytest.approx(np.mean(each), **TIGHT)
    assert value("exact match", y.astype(float), scores, "multilabel") == (p == y).all(1).mean()


def outcome(seed: int, regression: bool = False, excluded_groups: frozenset[str] = frozenset()) -> Outcome:
    """Six groups of which an example may be in several, or in none."""
    draw = np.random.default_rng(seed)
    parts = {f"g{g}": draw.choice(60, draw.integers(2, 30), replace=False) for g in range(6)}
    y = draw.normal(size=60) if regression else draw.integers(0, 3, 60)
    output = y + draw.normal(size=60) if regression else draw.normal(size=(60, 3))
    kind = "regression" if regression else "classification"
    return Outcome(y, output, Domains.from_indices(parts), kind, excluded_groups=excluded_groups)


@pytest.mark.parametrize("seed", range(10))
def test_groups_against_a_loop(seed: int) -> None:
    """With a group that would be the worst and does not count."""
    full, regression = outcome(seed), outcome(seed, regression=True)
    parts = {n: full.groups.indices_of(g) for g, n in enumerate(full.groups.names)}
    accuracy = {n: full.points[i].mean() for n, i in parts.items()}
    worst = min(accuracy, key=lambda name: accuracy[name])
    assert METRICS["worst-group accuracy"](full) == pytest.approx(accuracy.pop(worst))
    part = outcome(seed, excluded_groups=frozenset([worst, "not there"]))
    assert METRICS["worst-group accuracy"](part) == pytest.approx(min(accuracy.values()))
    assert METRICS["10th-percentile accuracy"](part) == pytest.approx(np.percentile([*accuracy.values()], 10))
    assert METRICS["accuracy"](part) == full.points.mean()
    rs = {n: pearsonr(regression.output[i], regression.y[i])[0] for n, i in parts.items()}
    assert METRICS["worst-group Pearson r"](regression) == pytest.approx(min(rs.values()))
    errors = [regression.points[i].mean() for i in parts.values()]
    assert METRICS["worst-group mse"](regression) == pytest.approx(max(errors))


@given(st.permutations(["scored", "low", "unscored"]))
def test_a_group_without_a_score_never_decides(order: list[str]) -> None:
    """Wherever it stands: its r is undefined, or it has no accuracy."""
    rows = {"scored": [0, 1], "low": [2, 3], "unscored": [4]}
    groups = Domains.from_indices({name: rows[name] for name in order})
    y, output = np.arange(5.0), np.array([0.0, 1, 2, 1, 5])
    assert METRICS["worst-group Pearson r"](Outcome(y, output, groups, "regression")) == pytest.approx(-1)
    lost = np.where(y == 3, math.nan, output)
    assert math.isnan(METRICS["worst-group mse"](Outcome(y, lost, groups, "regression")))
    none = Outcome(y.astype(int), np.eye(5), groups, "classification", excluded_groups=frozenset(rows))
    assert math.isnan(METRICS["worst-group accuracy"](none))
    for values in ((0.4, math.nan, 0.8), (math.nan, 0.4, 0.8), (0.4, 0.8, None)):
        assert metrics.mean_over_domains("accuracy", values) == pytest.approx(0.6)
    assert math.isnan(metrics.mean_over_domains("mse", (0.4, math.nan)))
