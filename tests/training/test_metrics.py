"""Metrics against scikit-learn, SciPy and WILDS' own definitions, and against plain loops over groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import pearsonr
from sklearn import metrics as sk

from shoal.data import Domains
from shoal.errors import InputError
from shoal.training import metrics
from shoal.training.metrics import METRICS, Outcome, choose_metrics, metric

TIGHT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}
ONE = Domains.from_sizes({"all": 1})


def value(name: str, y: Any, predicted: Any = (), output: Any = (), **more: Any) -> float:
    y, predicted, output = map(np.asarray, (y, predicted, output))
    return METRICS[name](Outcome(y, ONE, np.zeros(len(y)), predicted, output, **more))


def pairs(most: int = 6) -> Any:
    """Two equally long lists of classes: predicted and true."""
    one = st.tuples(st.integers(0, most - 1), st.integers(0, most - 1))
    return st.lists(one, min_size=1, max_size=40).map(lambda rows: np.array(rows).T)


@given(pairs())
def test_classes_as_scikit_learn_over_the_classes_in_the_truth(pair: Any) -> None:
    predicted, y = pair
    options: dict[str, Any] = {"labels": np.unique(y), "zero_division": 0}
    assert value("macro F1", y, predicted) == pytest.approx(
        sk.f1_score(y, predicted, average="macro", **options), **TIGHT
    )
    assert value("weighted F1", y, predicted) == pytest.approx(
        sk.f1_score(y, predicted, average="weighted", **options), **TIGHT
    )
    recalls = [np.mean(predicted[y == c] == c) for c in np.unique(y)]
    assert value("macro recall", y, predicted) == pytest.approx(np.mean(recalls), **TIGHT)
    assert value("class MAE", y, predicted) == pytest.approx(np.abs(y - predicted).mean(), **TIGHT)
    assert metrics.METRICS["accuracy"](Outcome(y, ONE, (y == predicted).astype(float))) == pytest.approx(
        sk.accuracy_score(y, predicted), **TIGHT
    )


@given(pairs(3))
def test_kappa_is_one_minus_the_cost_over_its_expectation(pair: Any) -> None:
    """Of every two that could be paired: classes that do not occur still lie between those that do."""
    p, t = pair * 2
    expected = np.square(p[:, None] - t).mean()
    found = value("quadratic weighted kappa", t, p)
    if len(np.unique([p, t])) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(1 - np.square(p - t).mean() / expected, **TIGHT)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_auc_of_logits_as_scikit_learn_of_probabilities(classes: int) -> None:
    draw = np.random.default_rng(classes)
    y = np.concatenate([np.arange(classes), draw.integers(0, classes, 200)])
    logits = draw.normal(size=(len(y), classes)) + 0.5 * np.eye(classes)[y]
    p = softmax(logits, axis=1)
    expected = sk.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr", average="macro")
    assert value("AUC", y, output=logits) == pytest.approx(expected, **TIGHT)
    assert 0.5 < expected < 1
    if classes > 2:  # a class that is not in the truth is left out
        known = y > 0
        each = [sk.roc_auc_score(y[known] == c, p[known, c]) for c in range(1, classes)]
        assert value("AUC", y[known], output=logits[known]) == pytest.approx(np.mean(each), **TIGHT)


def test_auc_where_probabilities_are_all_one_and_where_there_is_none() -> None:
    logits, y = np.array([[0.0, 60], [0.0, 61], [0.0, 62], [0, 63]]), np.array([0, 0, 1, 1])
    assert value("AUC", y, output=logits) == value("AUC", y, output=np.pad(logits, ((0, 0), (0, 1)))) == 1
    assert math.isnan(value("AUC", y * 0, output=logits))
    assert math.isnan(value("AUC", y, output=np.where(logits == 63, np.nan, logits)))


@given(st.integers(0, 2**32 - 1), st.integers(2, 50), st.integers(1, 3))
def test_regression_as_scikit_learn_and_scipy(seed: int, count: int, outputs: int) -> None:
    draw = np.random.default_rng(seed)
    y = 100 + draw.normal(size=(count, outputs))
    f = y * draw.normal() + draw.normal(size=(count, outputs))
    r = [pearsonr(y[:, n], f[:, n])[0] for n in range(outputs)]
    assert value("Pearson r", y, output=f) == pytest.approx(np.mean(r), rel=1e-9, abs=1e-9)
    assert value("R²", y, output=f) == pytest.approx(sk.r2_score(y, f), **TIGHT)
    assert value("MAE", y, output=f) == pytest.approx(sk.mean_absolute_error(y, f), **TIGHT)
    points = np.square(f - y).mean(1)
    assert METRICS["mse"](Outcome(y, ONE, points)) == pytest.approx(sk.mean_squared_error(y, f), **TIGHT)
    lost = np.where(np.arange(count)[:, None] == 0, math.nan, f)
    assert all(math.isnan(value(n, y, output=lost)) for n in ("Pearson r", "R²", "MAE"))
    assert all(math.isnan(value(n, y * 0 + 0.1, output=f)) for n in ("Pearson r", "R²"))
    assert math.isnan(value("Pearson r", y, output=f * 0 + 0.1))
    assert math.isnan(value("Pearson r", y[:1], output=f[:1]))


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_labels_against_a_loop(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    y, p = draw.integers(0, 2, (2, count, 3))
    scores = np.round(draw.normal(size=(count, 3)), 1)
    some = [n for n in range(3) if y[:, n].any()]
    f1 = [sk.f1_score(y[:, n], p[:, n]) for n in some]
    ap = [sk.average_precision_score(y[:, n], scores[:, n]) for n in some]
    for name, each in (("macro F1", f1), ("mean average precision", ap)):
        found = value(name, y.astype(float), p, scores)
        assert math.isnan(found) if not each else found == pytest.approx(np.mean(each), **TIGHT)
    assert value("exact match", y.astype(float), p) == (p == y).all(1).mean()


def outcome(seed: int, regression: bool = False, uncounted: frozenset[str] = frozenset()) -> Outcome:
    """Six groups of which an example may be in several, or in none."""
    draw = np.random.default_rng(seed)
    parts = {f"g{g}": draw.choice(60, draw.integers(2, 30), replace=False) for g in range(6)}
    y = draw.normal(size=60) if regression else draw.integers(0, 3, 60)
    output = y + draw.normal(size=60) if regression else draw.normal(size=(60, 3))
    points = np.square(output - y) if regression else (output.argmax(1) == y).astype(float)
    return Outcome(y, Domains.from_indices(parts), points, (), output, loss=0.25, uncounted=uncounted)


@pytest.mark.parametrize("seed", range(10))
def test_groups_against_a_loop(seed: int) -> None:
    """With a group that would be the worst and does not count."""
    full, regression = outcome(seed), outcome(seed, regression=True)
    parts = {n: full.groups.indices_of(g) for g, n in enumerate(full.groups.names)}
    accuracy = {n: full.points[i].mean() for n, i in parts.items()}
    worst = min(accuracy, key=lambda name: accuracy[name])
    assert METRICS["worst-group accuracy"](full) == pytest.approx(accuracy.pop(worst))
    part = outcome(seed, uncounted=frozenset([worst, "not there"]))
    assert METRICS["worst-group accuracy"](part) == pytest.approx(min(accuracy.values()))
    assert METRICS["10th-percentile accuracy"](part) == pytest.approx(np.percentile([*accuracy.values()], 10))
    assert METRICS["accuracy"](part) == full.points.mean()
    rs = {n: pearsonr(regression.output[i], regression.y[i])[0] for n, i in parts.items()}
    assert METRICS["worst-group Pearson r"](regression) == pytest.approx(min(rs.values()))
    errors = [regression.points[i].mean() for i in parts.values()]
    assert METRICS["worst-group mse"](regression) == pytest.approx(max(errors))


@given(st.permutations(["scored", "low", "unscored"]))
def test_a_group_without_a_score_never_decides(order: list[str]) -> None:
    """Wherever it stands: it has no accuracy, or its r is undefined."""
    rows = {"scored": [0, 1], "low": [2, 3], "unscored": [4]}
    groups = Domains.from_indices({name: rows[name] for name in order})
    found = Outcome(np.zeros(5, int), groups, np.array([1.0, 1, 0, 1, math.nan]))
    assert METRICS["worst-group accuracy"](found) == 0.5
    assert METRICS["10th-percentile accuracy"](found) == pytest.approx(0.55)
    y, output = np.arange(5.0), np.array([0.0, 1, 2, 1, 5])
    assert METRICS["worst-group Pearson r"](found._replace(y=y, output=output)) == pytest.approx(-1)
    assert math.isnan(METRICS["worst-group mse"](Outcome(y, groups, np.array([1, 2, 3, math.nan, 9]))))
    none = found._replace(uncounted=frozenset(rows))
    assert math.isnan(METRICS["worst-group accuracy"](none))
    for values in ((0.4, math.nan, 0.8), (math.nan, 0.4, 0.8), (0.4, 0.8, None)):
        assert metrics.mean_over_domains("accuracy", values) == pytest.approx(0.6)
    assert math.isnan(metrics.mean_over_domains("mse", (0.4, math.nan)))


def test_names_tasks_and_what_selects() -> None:
    assert metric("auc") is METRICS["AUC"]
    lower = {"mse", "worst-group mse", "MAE", "class MAE", "loss"}
    assert {name for name, m in METRICS.items() if not m.higher} == lower
    with pytest.raises(InputError, match=r"metric 'worst group acuracy'\. Did you mean 'worst-group acc"):
        metric("worst group acuracy")
    with pytest.raises(InputError, match=r"'Pearson r' is for regression, and this is classification; .*AUC"):
        choose_metrics("Pearson r", (), "classification")
    every, selects = choose_metrics(None, ("macro F1", "accuracy"), "classification")
    assert ([m.name for m in every], selects) == (["macro F1", "accuracy"], METRICS["macro F1"])
    assert (
        choose_metrics("accuracy", ("macro F1", "accuracy"), "classification")[1] is None
    )  # the domain mean
    every, selects = choose_metrics("auc", ("macro F1",), "classification")
    assert ([m.name for m in every], selects) == (["AUC", "macro F1"], METRICS["AUC"])
    found = metrics.why_missing("test", {"AUC": None, "accuracy": 0.5, "mine": None})
    assert [line.split(" is ")[0] for line in found] == ["AUC of test", "mine of test"]


def test_a_function_of_the_users() -> None:
    def spread(output: Any, y: Any, groups: Domains) -> float:
        return float(np.ptp([output[groups.indices_of(g)].mean() for g in range(len(groups))]))

    found = outcome(3)
    assert metric(spread)(found) == spread(found.output, found.y, found.groups) > 0
    assert metric(spread).higher
    spread.higher_is_better = False  # type: ignore[attr-defined]
    assert not metric(spread).higher
    with pytest.raises(InputError, match="metric 'lambda' must return a number, got 'good'"):
        metric(lambda *_: "good")(found)  # type: ignore[arg-type, return-value]
