"""What a model is judged by: named functions of what it predicted, the same as in WILDS.

>>> metric("worst-group accuracy").higher
True

Where a number is not defined it is NaN, and a NaN is never the best:

- Pearson r of predictions (or of truths) that are all equal, or of fewer than two. The worst group is then
  sought among the others, as in WILDS.
- AUC where all examples are of one class. With more than two classes it is the mean over those in the truth.
- anything computed from real-valued outputs of which one is not finite.

F1, recall and IoU are over the classes in the truth: one that is predicted and never true only costs the
others. In the multi-label task F1, AUC and average precision are means over labels; labels for which AUC or
average precision is undefined, as all examples are alike in them, are left out.

By task, after :data:`~shoal.data.batch.TASKS`:

- classification: accuracy, worst-group accuracy, 10th-percentile accuracy, macro F1, weighted F1, macro
  recall, AUC
- ordinal: these, class MAE (mean |predicted − true|, in classes) and quadratic weighted kappa
- dense: accuracy (over positions that are not ignored), worst-group accuracy, 10th-percentile accuracy,
  mean IoU
- multilabel: accuracy (over examples and labels), worst-group accuracy, 10th-percentile accuracy, exact
  match, macro F1, AUC, mean average precision
- regression: mse, worst-group mse, MAE, R², Pearson r, worst-group Pearson r (of several outputs, the mean
  over them)

The loss is a metric of every task. Sample weights count in the loss alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, unknown_name

if TYPE_CHECKING:
    from shoal.data.domains import Domains

Array = NDArray[Any]
Own = Callable[[Array, Array, "Domains"], float]
"""A metric of the user's: of the model's outputs, the truths and the groups, whose indices count these."""
Need = Literal["points", "class", "output", "counts", "loss"]
CLASSES = ("classification", "ordinal")
RIGHT_OR_WRONG = (*CLASSES, "dense", "multilabel")


NONE: Array = np.empty(0)


class Outcome(NamedTuple):
    """The results on the examples of a split, in order; arrays that no metric uses may be empty."""

    y: Array
    """Labels."""
    groups: Domains
    """Groups, whose indices are positions in the other arrays."""
    points: Array
    """Score of each example: 1 if the class is correct, otherwise 0; with several labels the fraction that is
    correct; in regression the mean squared error."""
    predicted: Any = NONE
    """Predicted classes; in the multi-label task 0 or 1 for each label."""
    output: Any = NONE
    """Outputs of the model: real values, or in classification a score for each class."""
    loss: float | None = None
    """Mean loss."""
    uncounted: frozenset[str] = frozenset()
    """Groups that are not considered for the worst group."""
    sizes: Any = None
    """Number of labels of each example that are not ignored, if these differ; the mean over none is NaN."""
    counts: Any = NONE
    """(n, 3, classes): number of positions of an example that are correct, true and predicted in each class.
    """

    @property
    def average(self) -> float:
        """The mean over examples."""
        if self.sizes is None:
            return float(self.points.mean())
        whole = self.sizes.sum()
        return float((self.points * self.sizes).sum() / whole) if whole else math.nan

    @property
    def group_points(self) -> Array:
        """The mean over each group."""
        which, starts = self.groups.indices, self.groups.offsets[:-1]
        if self.sizes is None:
            sums: Array = np.add.reduceat(self.points[which], starts)
            return sums / self.groups.sizes
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat((self.points * self.sizes)[which], starts)
            return sums / np.add.reduceat(self.sizes[which], starts)

    def in_units(self, mean: float, scale: float) -> Outcome:
        """Return the same results in the units of a label that was standardized to (label − mean) / scale.

        Args:
            mean: mean of the label.
            scale: scale of the label.
        """
        if (mean, scale) == (0.0, 1.0):
            return self

        def own(values: Array) -> Array:
            return np.asarray(values, np.float64) * scale + mean if len(values) else values

        return self._replace(y=own(self.y), output=own(self.output), points=self.points * scale**2)

    def counted(self, values: Array) -> Array:
        """Return the values of the groups that are considered for the worst group.

        Args:
            values: value of each group.
        """
        if not self.uncounted:
            return values
        return values[[name not in self.uncounted for name in self.groups.names]]


@dataclass(frozen=True)
class Metric:
    """A metric of the results on a split."""

    name: str
    """Name."""
    compute: Callable[[Outcome], float]
    """Function that computes it from an :class:`Outcome`."""
    needs: Need = "points"
    """Part of an :class:`Outcome` that it uses."""
    tasks: tuple[str, ...] = CLASSES
    """Kinds of task that it supports."""
    higher: bool = True
    """Whether higher is better."""
    by_group: Callable[[Outcome], Array] | None = None
    """For a metric of the worst group: function that computes the value of each group."""
    of_groups: str = ""
    """Name of the metric of each group."""
    undefined: str = ""
    """When it has no value."""

    def __call__(self, outcome: Outcome) -> float:
        if outcome.sizes is not None and self.tasks and self.needs in ("class", "output"):
            some = outcome.sizes > 0  # whose label is not ignored
            if not some.any():
                return math.nan
            kept = {n: getattr(outcome, n) for n in ("y", "predicted", "output")}
            outcome = outcome._replace(**{n: v[some] for n, v in kept.items() if len(v)})
        return float(self.compute(outcome))


def macro_recall(predicted: Array, y: Array) -> float:
    """Compute the recall of each true class, averaged over classes.

    Args:
        predicted: predicted classes (n,).
        y: true classes (n,).
    """
    right, true, _ = _counts(predicted, y)
    return float((right / true).mean())


def macro_f1(predicted: Array, y: Array) -> float:
    """Compute the F1 score 2 TP / (2 TP + FP + FN), averaged over the true classes.

    Args:
        predicted: predicted classes (n,).
        y: true classes (n,).
    """
    right, true, claimed = _counts(predicted, y)
    return float((2 * right / (true + claimed)).mean())


def weighted_f1(predicted: Array, y: Array) -> float:
    """Compute the F1 score, averaged over the true classes weighted by their frequency.

    Args:
        predicted: predicted classes (n,).
        y: true classes (n,).
    """
    right, true, claimed = _counts(predicted, y)
    return float((2 * right / (true + claimed) * true).sum() / true.sum())


def label_f1(predicted: Array, y: Array) -> float:
    """Compute the F1 score 2 TP / (2 TP + FP + FN), averaged over labels with positive examples.

    Args:
        predicted: predictions (n, L), 0 or 1.
        y: labels (n, L), 0 or 1.
    """
    p, t = (values.reshape(len(values), -1) > 0.5 for values in (predicted, y))
    both, some = (p & t).sum(0), t.sum(0) > 0
    return float((2 * both / np.maximum(p.sum(0) + t.sum(0), 1))[some].mean()) if some.any() else math.nan


def mean_iou(counts: Array) -> float:
    """Compute the intersection over union TP / (TP + FP + FN), averaged over the true classes.

    Args:
        counts: confusion counts of each example.
    """
    right, true, claimed = counts.sum(0).astype(np.float64)
    some = true > 0
    return float((right / (true + claimed - right + ~some))[some].mean()) if some.any() else math.nan


def quadratic_kappa(predicted: Array, y: Array) -> float:
    """Compute the quadratic weighted kappa, 1 − Σ(p − y)² / its expectation under independence.

    It is NaN if the expectation is 0.

    Args:
        predicted: predicted classes (n,).
        y: true classes (n,).
    """
    p, t = np.asarray(predicted, np.float64), np.asarray(y, np.float64)
    expected = p.var() + t.var() + (p.mean() - t.mean()) ** 2
    return float(1 - np.square(p - t).mean() / expected) if expected > 0 else math.nan


def average_precision(scores: Array, positive: Array) -> float:
    """Compute the average precision, Σ_k (R_k − R_{k−1}) P_k over the distinct scores.

    It is NaN without positive examples.

    Args:
        scores: scores (n,).
        positive: whether each example is positive (n,).
    """
    if not positive.any() or np.isnan(scores).any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    hits, ends = np.cumsum(positive[order]), np.append(np.diff(scores[order]) != 0, True)
    hits, seen = hits[ends], np.flatnonzero(ends) + 1
    return float((np.diff(hits, prepend=0) * hits / seen).sum() / hits[-1])


def r_squared(output: Array, y: Array) -> float:
    """Compute R² = 1 − Σ(y − f)² / Σ(y − ȳ)²; NaN if the true values are constant.

    Args:
        output: predictions (n,).
        y: true values (n,).
    """
    whole = np.square(y - y.mean()).sum()
    return float(1 - np.square(y - output).sum() / whole) if whole > 0 else math.nan


def _by_label(measure: Callable[[Array, Array], float], outcome: Outcome) -> float:
    """The mean of a measure over the labels in which it is defined."""
    scores, y = (_rows(values) for values in (outcome.output, outcome.y))
    values = [measure(scores[:, n], y[:, n] > 0.5) for n in range(y.shape[1])]
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _by_output(measure: Callable[[Array, Array], float], outcome: Outcome) -> float:
    """The mean of a measure over outputs."""
    output, y = (_rows(values) for values in (outcome.output, outcome.y))
    if not np.isfinite(output).all():
        return math.nan
    return float(np.mean([measure(output[:, n], y[:, n]) for n in range(y.shape[1])]))


def _rows(values: Any) -> Array:
    return np.asarray(values, np.float64).reshape(len(values), -1)


def _counts(predicted: Array, y: Array) -> tuple[Array, Array, Array]:
    """Of every class in the truth: how often it was right, true and predicted."""
    classes, place = np.unique(y, return_inverse=True)
    true = np.bincount(place, minlength=len(classes))
    right = np.bincount(place[predicted == y], minlength=len(classes))
    at = np.searchsorted(classes, predicted)
    known = classes[np.minimum(at, len(classes) - 1)] == predicted
    return right, true, np.bincount(at[known], minlength=len(classes))


def pearson_r(output: Array, y: Array) -> float:
    """Compute Pearson r, Σ(a − ā)(b − b̄) / √(Σ(a − ā)² Σ(b − b̄)²); NaN if one side is constant.

    Args:
        output: predictions (n,).
        y: true values (n,).
    """
    a, b = (np.asarray(values, np.float64).reshape(-1) for values in (output, y))
    if len(a) < 2 or (a == a[0]).all() or (b == b[0]).all():
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    if not all(lengths) or not np.isfinite(lengths).all():
        return math.nan
    return float(np.clip((a / lengths[0]) @ (b / lengths[1]), -1.0, 1.0))


def binary_auc(scores: Array, positive: Array) -> float:
    """Compute the AUC: the probability that a positive example scores higher than a negative one.

    Ties count one half.

    Args:
        scores: scores (n,).
        positive: whether each example is positive (n,).
    """
    many, few = int(positive.sum()), int((~positive).sum())
    if not many or not few or np.isnan(scores).any():
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - many * (many + 1) / 2) / (many * few))


def auc(scores: Array, y: Array) -> float:
    """Compute the AUC; with more than two classes, the mean of one class against the rest.

    Args:
        scores: scores (n, classes), such as logits.
        y: true classes (n,).
    """
    if not np.isfinite(scores).all():
        return math.nan
    odds = _log_odds(np.asarray(scores, np.float64))
    if scores.shape[1] == 2:
        return binary_auc(odds[:, 1], y == 1)
    return float(np.mean([binary_auc(odds[:, c], y == c) for c in np.unique(y)]))


def _log_odds(scores: Array) -> Array:
    """log p − log(1 − p) of each class: in the order of p = softmax(scores), and never rounded to 1."""
    rows, top = np.arange(len(scores)), scores.argmax(1)
    highest = scores[rows, top][:, None]
    others = scores.copy()
    others[rows, top] = -np.inf
    second = others.max(1, keepdims=True)
    rest = second[:, 0] + np.log(np.exp(others - second).sum(1))
    shares = np.exp(scores - highest)
    with np.errstate(divide="ignore", invalid="ignore"):  # at the highest, which is put right below
        odds: Array = scores - highest - np.log(shares.sum(1, keepdims=True) - shares)
    odds[rows, top] = highest[:, 0] - rest
    return odds


def _worst(
    name: str, by_group: Callable[[Outcome], Array], higher: bool = True, needs: Need = "points"
) -> Metric:
    """The worst of the groups that count and have a number."""

    def compute(outcome: Outcome) -> float:
        if needs == "output" and not np.isfinite(outcome.output).all():
            return math.nan
        values = outcome.counted(by_group(outcome))
        if needs == "output" or outcome.sizes is not None:
            values = values[~np.isnan(values)]
        if not len(values):
            return math.nan
        return float(values.min() if higher else values.max())

    what, undefined = name.removeprefix("worst-group "), CONSTANT if needs == "output" else ""
    tasks = RIGHT_OR_WRONG if what == "accuracy" else ("regression",)
    return Metric(name, compute, needs, tasks, higher, by_group, what, undefined)


def _group_r(outcome: Outcome) -> Array:
    parts = map(outcome.groups.indices_of, range(len(outcome.groups)))
    return np.array(
        [_by_output(pearson_r, outcome._replace(output=outcome.output[p], y=outcome.y[p])) for p in parts]
    )


def _tenth_percentile(outcome: Outcome) -> float:
    values = outcome.counted(outcome.group_points)
    values = values[~np.isnan(values)]
    return float(np.percentile(values, 10)) if len(values) else math.nan


ONE_CLASS = "all its examples are of one class, or an output is not finite"
CONSTANT = "predictions or truths are all equal, or one is not finite"
NO_LABEL = "no label that is 1 in some example (and 0 in others), or an output is not finite"
GROUPS: Callable[[Outcome], Array] = Outcome.group_points.fget  # type: ignore[attr-defined]


def _is_multilabel(outcome: Outcome) -> bool:
    return bool(outcome.y.dtype.kind == "f")


def _f1(outcome: Outcome) -> float:
    return (label_f1 if _is_multilabel(outcome) else macro_f1)(outcome.predicted, outcome.y)


def _auc(outcome: Outcome) -> float:
    if _is_multilabel(outcome):
        return _by_label(binary_auc, outcome)
    return auc(outcome.output, outcome.y)


def _exact(outcome: Outcome) -> float:
    return float((_rows(outcome.predicted) == _rows(outcome.y)).all(1).mean())


def _mae(outcome: Outcome) -> float:
    return float(np.abs(_rows(outcome.output) - _rows(outcome.y)).mean())


def _class_mae(outcome: Outcome) -> float:
    return float(np.abs(outcome.predicted.astype(np.float64) - outcome.y).mean())


METRICS = {
    m.name: m
    for m in (
        Metric("accuracy", lambda o: o.average, tasks=RIGHT_OR_WRONG),
        _worst("worst-group accuracy", GROUPS),
        Metric(
            *("10th-percentile accuracy", _tenth_percentile),
            tasks=RIGHT_OR_WRONG,
            by_group=GROUPS,
            of_groups="accuracy",
        ),
        Metric("macro F1", _f1, "class", (*CLASSES, "multilabel")),
        Metric("weighted F1", lambda o: weighted_f1(o.predicted, o.y), "class"),
        Metric("macro recall", lambda o: macro_recall(o.predicted, o.y), "class"),
        Metric("AUC", _auc, "output", (*CLASSES, "multilabel"), undefined=ONE_CLASS),
        Metric("class MAE", _class_mae, "class", ("ordinal",), higher=False),
        Metric(
            *("quadratic weighted kappa", lambda o: quadratic_kappa(o.predicted, o.y), "class", ("ordinal",)),
            undefined="predictions and truths are all of one class",
        ),
        Metric("mean IoU", lambda o: mean_iou(o.counts), "counts", ("dense",)),
        Metric("exact match", _exact, "class", ("multilabel",)),
        Metric(
            *("mean average precision", lambda o: _by_label(average_precision, o), "output", ("multilabel",)),
            undefined=NO_LABEL,
        ),
        Metric(
            *("Pearson r", lambda o: _by_output(pearson_r, o), "output", ("regression",)), undefined=CONSTANT
        ),
        _worst("worst-group Pearson r", _group_r, needs="output"),
        Metric("mse", lambda o: o.average, tasks=("regression",), higher=False),
        _worst("worst-group mse", GROUPS, higher=False),
        Metric("MAE", _mae, "output", ("regression",), higher=False),
        Metric("R²", lambda o: _by_output(r_squared, o), "output", ("regression",), undefined=CONSTANT),
        Metric("loss", lambda o: math.nan if o.loss is None else o.loss, "loss", (), higher=False),
    )
}


def metric(wanted: str | Own) -> Metric:
    """Return a metric by name (case-insensitive), or create one from a function.

    Args:
        wanted: name of a metric, or function of outputs, labels and groups that returns a number. Higher is
            better unless the function has an attribute ``higher_is_better`` that is false.

    Raises:
        InputError: there is no such metric.
    """
    if callable(wanted):
        return _own(wanted)
    same = {name.lower(): found for name, found in METRICS.items()}
    if not isinstance(wanted, str) or wanted.lower() not in same:
        raise unknown_name("metric", wanted, METRICS)
    return same[wanted.lower()]


def why_missing(split: str, values: Mapping[str, float | None]) -> list[str]:
    """Explain each metric of a split that has no value.

    Args:
        split: name of the split.
        values: value of each metric, ``None`` if it is undefined.

    Returns:
        One sentence per undefined metric.
    """
    missing = [name for name, value in values.items() if value is None]
    known = {name: METRICS[name].undefined for name in missing if name in METRICS}
    return [
        f"{name} of {split} is undefined: {known.get(name) or 'it is not a finite number'}."
        for name in missing
    ]


def _own(function: Own) -> Metric:
    name = getattr(function, "__name__", type(function).__name__).strip("<>")

    def compute(outcome: Outcome) -> float:
        value: Any = function(outcome.output, outcome.y, outcome.groups)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"metric {name!r} must return a number, got {value!r}.") from error

    return Metric(name, compute, "output", (), bool(getattr(function, "higher_is_better", True)))


def usual(kind: str) -> str:
    """Return the name of the default metric of a kind of task.

    Args:
        kind: kind of the task.
    """
    return "mse" if kind == "regression" else "accuracy"


def chosen(
    wanted: str | Own | None, measures: Sequence[str], kind: str
) -> tuple[list[Metric], Metric | None]:
    """Return the metrics to measure, and the one for selection.

    The latter is ``None`` for the mean over domains of the default metric.

    Args:
        wanted: metric for selection (default: the first of ``measures``).
        measures: names of the metrics of the dataset.
        kind: kind of the task.
    """
    every = [metric(name) for name in measures]
    selects = metric(wanted) if wanted is not None else every[0] if every else None
    if selects is not None and selects.name not in [m.name for m in every]:
        every = [selects, *every]
    for m in every:
        check_fits(m, kind)
    return every, None if selects is None or selects.name == usual(kind) else selects


def mean_over_domains(metric: str, values: Iterable[float | None]) -> float:
    """Return the mean of a default metric over domains, each of which counts once.

    A domain without an accuracy (none of its labels counts) is left out. An mse is NaN where outputs are not
    finite, and so is then the mean.

    Args:
        metric: accuracy or mse.
        values: score of each domain, NaN or ``None`` if it has none.
    """
    known = [v for v in values if v is not None and (metric == "mse" or not math.isnan(v))]
    return float(np.mean(known)) if known else math.nan


def check_fits(m: Metric, kind: str) -> None:
    """Check that a metric supports a kind of task.

    Args:
        m: metric.
        kind: kind of the task.

    Raises:
        InputError: the metric does not support the task.
    """
    if m.tasks and kind not in m.tasks:
        known = ", ".join(other.name for other in METRICS.values() if not other.tasks or kind in other.tasks)
        tasks = ", ".join(m.tasks)
        raise InputError(f"metric {m.name!r} is for {tasks}, and this is {kind}; choose from: {known}.")


def check_output(every: Iterable[Metric], shape: tuple[int, ...], kind: str) -> None:
    """Check that metrics support the outputs of a model.

    Args:
        every: metrics.
        shape: shape of the output of a batch.
        kind: kind of the task.

    Raises:
        InputError: a metric requires another output.
    """
    for m in every:
        if m.needs in ("class", "output") and m.tasks and kind in CLASSES and len(shape) != 2:
            raise InputError(
                f"metric {m.name!r} requires one score per class; the model's output has shape {shape}."
            )
