"""Metrics against scikit-learn, SciPy and WILDS' own definitions, and against plain loops over groups."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import pearsonr
from sklearn.metrics import f1_score, recall_score, roc_auc_score

from shoal.data import Domains
from shoal.errors import InputError
from shoal.training import metrics
from shoal.training.metrics import METRICS, Outcome, auc, binary_auc, chosen, metric

TIGHT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}


def labels(most: int = 6, least: int = 1) -> Any:
    """Two equally long lists of classes: predicted and true."""
    classes = st.integers(0, most - 1)
    return st.integers(least, 40).flatmap(
        lambda n: st.tuples(
            st.lists(classes, min_size=n, max_size=n), st.lists(classes, min_size=n, max_size=n)
        )
    )


@given(labels())
def test_f1_and_recall_as_scikit_learn_over_the_classes_in_the_truth(pair: Any) -> None:
    predicted, y = map(np.array, pair)
    true = np.unique(y)
    for own, theirs, average in (
        (metrics.macro_f1, f1_score, "macro"),
        (metrics.weighted_f1, f1_score, "weighted"),
        (metrics.macro_recall, recall_score, "macro"),
    ):
        expected = theirs(y, predicted, labels=true, average=average, zero_division=0)
        assert own(predicted, y) == pytest.approx(expected, **TIGHT)


def test_a_class_that_is_never_true_has_no_f1_of_its_own() -> None:
    predicted, y = np.array([0, 7, 1, 1]), np.array([0, 0, 1, 1])
    assert metrics.macro_f1(predicted, y) == pytest.approx((2 / 3 + 1) / 2)
    assert metrics.macro_recall(predicted, y) == pytest.approx((1 / 2 + 1) / 2)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60))
def test_auc_with_ties_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    pairs = [(a, b) for a in scores[positive] for b in scores[~positive]]
    found = binary_auc(scores, positive)
    if not pairs:
        assert math.isnan(found)
        return
    assert found == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]), **TIGHT)
    assert found == pytest.approx(roc_auc_score(positive, scores), **TIGHT)
    both = np.stack([np.zeros(len(scores)), scores], 1)  # logits
    assert auc(both, positive.astype(int)) == pytest.approx(found, **TIGHT)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_auc_of_logits_as_scikit_learn_of_probabilities(classes: int) -> None:
    draw = np.random.default_rng(classes)
    y = np.concatenate([np.arange(classes), draw.integers(0, classes, 200)])
    logits = draw.normal(size=(len(y), classes)) + 0.5 * np.eye(classes)[y]
    p = softmax(logits, axis=1)
    expected = roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr", average="macro")
    assert auc(logits, y) == pytest.approx(expected, **TIGHT)
    assert 0.5 < auc(logits, y) < 1


def test_auc_of_logits_so_far_apart_that_probabilities_are_all_one() -> None:
    logits = np.array([[0.0, 60], [0.0, 61], [0.0, 62], [0, 63]])
    assert auc(logits, np.array([0, 0, 1, 1])) == 1
    assert auc(np.pad(logits, ((0, 0), (0, 1))), np.array([0, 0, 1, 1])) == 1  # a third class


def test_auc_without_an_answer() -> None:
    logits = np.array([[0.0, 1, 2], [1, 0, 3], [2, 2, 2]])
    assert math.isnan(auc(logits, np.array([1, 1, 1])))
    assert math.isnan(auc(logits[:, :2], np.array([0, 0, 0])))
    assert math.isnan(auc(np.where(logits == 3, np.nan, logits), np.array([0, 1, 2])))
    # a class that is not in the truth is left out
    y = np.array([0, 1, 1])
    found = [binary_auc(softmax(logits, 1)[:, c], y == c) for c in (0, 1)]
    assert auc(logits, y) == pytest.approx(np.mean(found))


@given(st.integers(0, 2**32 - 1), st.integers(2, 50))
def test_pearson_as_scipy(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    a = 100 + draw.normal(size=count)
    b = a * draw.normal() + draw.normal(size=count)
    assert metrics.pearson_r(a[:, None], b) == pytest.approx(pearsonr(a, b)[0], **TIGHT)


def test_pearson_of_what_does_not_vary() -> None:
    assert math.isnan(metrics.pearson_r(np.ones(5), np.arange(5.0)))
    assert math.isnan(metrics.pearson_r(np.arange(5.0), np.full(5, 0.1)))
    assert math.isnan(metrics.pearson_r(np.ones(1), np.ones(1)))
    assert math.isnan(metrics.pearson_r(np.array([1.0, math.nan, 2]), np.arange(3.0)))
    assert metrics.pearson_r(np.arange(4), -np.arange(4)) == -1


def outcome(seed: int, regression: bool = False, uncounted: frozenset[str] = frozenset()) -> Outcome:
    """Six groups of which an example may be in several, or in none."""
    draw = np.random.default_rng(seed)
    parts = {f"g{g}": draw.choice(60, draw.integers(2, 30), replace=False) for g in range(6)}
    y = draw.normal(size=60) if regression else draw.integers(0, 3, 60)
    output = y + draw.normal(size=60) if regression else draw.normal(size=(60, 3))
    predicted = None if regression else output.argmax(1)
    points = np.square(output - y) if regression else (predicted == y).astype(float)
    groups = Domains.from_indices(parts)
    return Outcome(y, groups, points, predicted, output, loss=0.25, uncounted=uncounted)


@pytest.mark.parametrize("seed", range(20))
def test_groups_against_a_loop(seed: int) -> None:
    """With a group that would be the worst and does not count."""
    full = outcome(seed)
    accuracies = {
        name: np.mean([full.points[i] for i in full.groups.indices_of(g)])
        for g, name in enumerate(full.groups.names)
    }
    worst = min(accuracies, key=lambda name: accuracies[name])
    assert METRICS["worst-group accuracy"](full) == pytest.approx(accuracies[worst])
    assert METRICS["10th-percentile accuracy"](full) == pytest.approx(
        np.percentile(list(accuracies.values()), 10)
    )
    del accuracies[worst]
    part = outcome(seed, uncounted=frozenset([worst, "not there"]))
    assert METRICS["worst-group accuracy"](part) == pytest.approx(min(accuracies.values()))
    assert METRICS["accuracy"](part) == METRICS["accuracy"](full) == full.points.mean()


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_a_regression_against_a_loop(seed: int) -> None:
    found = outcome(seed, regression=True)
    assert found.output is not None
    parts = [found.groups.indices_of(g) for g in range(6)]
    rs = [pearsonr(found.output[p], found.y[p])[0] for p in parts]
    errors = [np.mean((found.output[p] - found.y[p]) ** 2) for p in parts]
    assert METRICS["worst-group Pearson r"](found) == pytest.approx(min(rs))
    assert METRICS["worst-group mse"](found) == pytest.approx(max(errors))
    assert METRICS["mse"](found) == pytest.approx(np.mean((found.output - found.y) ** 2))
    out = found.groups.names[int(np.argmin(rs))]
    without = METRICS["worst-group Pearson r"](outcome(seed, True, frozenset([out])))
    assert without == pytest.approx(sorted(rs)[1])


def test_the_percentile_lies_between_groups() -> None:
    """As NumPy's default and so WILDS': of 0, 0.5, 1 a tenth of the way is 0.1."""
    groups = Domains.from_indices({"a": [0, 1], "b": [1, 2], "c": [2, 3]})
    found = Outcome(np.zeros(4), groups, np.array([0.0, 0, 1, 1]))
    assert METRICS["10th-percentile accuracy"](found) == pytest.approx(0.1)


def test_a_group_without_an_r_is_not_the_worst_and_a_nan_prediction_is_no_excuse() -> None:
    groups = Domains.from_indices({"constant": [0, 1], "one": [2], "usual": [3, 4, 5]})
    output, y = np.array([1.0, 1, 5, 1, 2, 4]), np.arange(6.0)
    worst, every = METRICS["worst-group Pearson r"], METRICS["Pearson r"]
    fine = Outcome(y, groups, np.zeros(6), output=output)
    assert worst(fine) == pytest.approx(pearsonr(output[3:], y[3:])[0])
    broken = Outcome(y, groups, np.zeros(6), output=np.where(output == 5, math.nan, output))
    assert math.isnan(worst(broken))
    assert math.isnan(every(broken))
    constant = Outcome(y, groups, np.zeros(6), output=np.ones(6))
    assert math.isnan(worst(constant))
    nothing = Outcome(y, groups, np.zeros(6), output=output, uncounted=frozenset(groups.names))
    assert math.isnan(worst(nothing))
    assert math.isnan(METRICS["worst-group accuracy"](nothing))
    assert math.isnan(METRICS["10th-percentile accuracy"](nothing))


@pytest.mark.parametrize("seed", range(3))
def test_as_wilds_defines_groups(seed: int) -> None:
    """Its group means are a scatter over one label an example, in float32; empty groups do not count."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(seed)
    label, hits = draw.integers(0, 40, 500) * 2, draw.random(500) < 0.7  # odd groups are empty
    sums = torch.zeros(80).index_add_(0, torch.tensor(label), torch.tensor(hits).float())
    counts = torch.bincount(torch.tensor(label), minlength=80)
    means = (sums / counts.clamp(min=1))[counts > 0]
    found = Outcome(np.zeros(500), Domains.from_labels(label), hits.astype(float))
    assert METRICS["worst-group accuracy"](found) == pytest.approx(means.min().item(), abs=1e-6)
    expected = np.percentile(means.numpy(), 10)
    assert METRICS["10th-percentile accuracy"](found) == pytest.approx(expected, abs=1e-6)
    assert METRICS["accuracy"](found) == pytest.approx(torch.tensor(hits).float().mean().item(), abs=1e-6)


def test_each_says_what_is_better() -> None:
    assert {name for name, m in METRICS.items() if not m.higher} == {
        *("mse", "worst-group mse", "MAE", "class MAE", "loss")
    }
    assert METRICS["loss"](outcome(0)) == 0.25
    assert math.isnan(METRICS["loss"](Outcome(np.zeros(1), Domains.from_sizes({"a": 1}), np.zeros(1))))


def test_why_a_number_is_missing_is_said() -> None:
    values = {"AUC": None, "accuracy": 0.5, "mine": None, "Pearson r": None}
    assert metrics.why_missing("test", values) == [
        "AUC of test is undefined: all its examples are of one class, or an output is not finite.",
        "mine of test is undefined: it is not a finite number.",
        "Pearson r of test is undefined: predictions or truths are all equal, or one is not finite.",
    ]


def test_names() -> None:
    assert metric("auc") is metric("AUC") is METRICS["AUC"]
    with pytest.raises(InputError, match=r"metric 'worst group acuracy'\. Did you mean 'worst-group acc"):
        metric("worst group acuracy")
    with pytest.raises(InputError, match=r"'Pearson r' is for regression, and this is classification; .*AUC"):
        chosen("Pearson r", (), "classification")
    with pytest.raises(InputError, match=r"'macro F1' is for classification.*mse"):
        chosen(None, ["macro F1"], "regression")


def test_what_selects_is_what_is_wanted_else_the_first_measure() -> None:
    measures = ("macro F1", "accuracy")
    every, selects = chosen(None, measures, "classification")
    assert ([m.name for m in every], selects) == (["macro F1", "accuracy"], METRICS["macro F1"])
    every, selects = chosen("accuracy", measures, "classification")
    assert ([m.name for m in every], selects) == (["macro F1", "accuracy"], None)  # the mean over domains
    every, selects = chosen("auc", measures, "classification")
    assert ([m.name for m in every], selects) == (["AUC", "macro F1", "accuracy"], METRICS["AUC"])
    assert chosen(None, (), "classification") == ([], None)


def test_a_function_of_the_users() -> None:
    def spread(output: Any, y: Any, groups: Domains) -> float:
        return float(np.ptp([output[groups.indices_of(g)].mean() for g in range(len(groups))]))

    found = outcome(3)
    own = metric(spread)
    assert (own.name, own.needs, own.tasks, own.higher) == ("spread", "output", (), True)
    assert own(found) == spread(found.output, found.y, found.groups) > 0
    spread.higher_is_better = False  # type: ignore[attr-defined]
    assert not metric(spread).higher
    with pytest.raises(InputError, match="metric 'lambda' must return a number, got 'good'"):
        metric(lambda *_: "good")(found)  # type: ignore[arg-type, return-value]
