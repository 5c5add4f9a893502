"""Metrics by name, defined as in scikit-learn and, for groups, as in WILDS.

>>> metric("worst-group accuracy").higher
True

A metric that is undefined is NaN, and a NaN is never the best: Pearson r of predictions (or truths) that are
all equal, AUC where all examples are of one class, everything computed from outputs of which one is not
finite. A group without a value is never the worst one. F1, recall and AUC of more than two classes are means
over the classes in the truth; in the multi-label task F1, AUC and average precision are means over the labels
in which they are defined; of several regression outputs, R² and Pearson r are means over the outputs.

The loss, a mean over domains, is a metric of every task. Sample weights count in the loss alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, unknown_name

if TYPE_CHECKING:
    from shoal.data.domains import Domains

Array = NDArray[Any]
Function = Callable[[Array, Array, "Domains"], float]
"""A metric of the user's: a function of outputs, labels and groups, whose indices are positions in these."""


@dataclass(frozen=True)
class Outcome:
    """The results on the examples of a split, in order.

    Args:
        y: labels.
        output: outputs of the model: in classification a score for each class.
        groups: groups, whose indices are positions in the other arrays.
        kind: kind of the task.
        loss: loss, a mean over domains.
        excluded_groups: groups that are not considered for the worst group.
        full_sizes: number of examples of each group, if only a sample of them is here.
    """

    y: Array
    output: Array
    groups: Domains
    kind: str
    loss: float | None = None
    excluded_groups: frozenset[str] = frozenset()
    full_sizes: Array | None = None

    @cached_property
    def predicted(self) -> Array:
        """Predicted classes; in the multi-label task 0 or 1 for each label; in regression the outputs."""
        if self.kind == "regression":
            return self.output
        found: Array = self.output > 0 if self.kind == "multilabel" else self.output.argmax(1)
        return found.astype(np.int32)

    @cached_property
    def points(self) -> Array:
        """Score of each example: its squared error, or the fraction of its labels that is correct."""
        errors = self.kind == "regression"
        points: Array = _columns((self.predicted - self.y) ** 2 if errors else self.predicted == self.y).mean(
            1
        )
        return points

    @cached_property
    def group_points(self) -> Array:
        return group_means(self.groups, self.points)

    @property
    def average(self) -> float:
        """Mean score over examples; of a sample, groups count by their full sizes."""
        if self.full_sizes is None:
            return float(self.points.mean())
        return float(np.average(self.group_points, weights=self.full_sizes))

    def of_group(self, number: int) -> Outcome:
        rows = self.groups.indices_of(number)
        groups = type(self.groups).from_sizes({self.groups.names[number]: len(rows)})
        return Outcome(self.y[rows], self.output[rows], groups, self.kind)

    def in_units(self, mean: float, scale: float) -> Outcome:
        """Of a label that was standardized to (label − mean) / scale, in its own units."""
        if (mean, scale) == (0.0, 1.0):
            return self
        y, output = (np.asarray(v, np.float64) * scale + mean for v in (self.y, self.output))
        return replace(self, y=y, output=output)


def group_means(groups: Domains, values: Array) -> Array:
    """The mean of the values of each group."""
    means: Array = np.add.reduceat(values[groups.indices], groups.offsets[:-1]) / groups.sizes
    return means


def mean_over_domains(metric: str, values: Iterable[float | None]) -> float:
    """The mean over domains, each of which counts once.

    A domain without an accuracy is left out. Any other metric is NaN where outputs are not finite, and so is
    the mean then.
    """
    known = [v for v in values if v is not None and (metric != "accuracy" or not math.isnan(v))]
    return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Metric:
    """A metric of the results on a split.

    Args:
        name: its name.
        compute: function of an :class:`Outcome`.
        tasks: kinds of task that it supports; none: all.
        outputs: whether it uses the outputs for all classes.
        higher: whether higher is better.
        over_groups: for a metric of groups: function of the values of the groups that count.
    """

    name: str
    compute: Callable[[Outcome], Any]
    tasks: tuple[str, ...] = ()
    outputs: bool = False
    higher: bool = True
    over_groups: Callable[[Array], Any] | None = None

    def __call__(self, outcome: Outcome) -> float:
        if self.over_groups is None:
            return self._value(outcome)
        counted = [n for n, name in enumerate(outcome.groups.names) if name not in outcome.excluded_groups]
        values = np.array([self._value(outcome.of_group(n)) for n in counted])
        return math.nan if np.isnan(values).all() else float(self.over_groups(values))

    def _value(self, outcome: Outcome) -> float:
        used = outcome.output if self.outputs else outcome.predicted
        return float(self.compute(outcome)) if np.isfinite(used).all() or not self.tasks else math.nan


def _columns(values: Array) -> Array:
    return np.asarray(values, np.float64).reshape(len(values), -1)


def _over_labels(measure: Callable[[Array, Array], float], y: Array, scores: Array) -> float:
    """The mean over the labels that are 1 in some example and in which ``measure`` is defined."""
    pairs = zip(_columns(y).T > 0.5, _columns(scores).T, strict=True)
    values = [measure(truth, own) for truth, own in pairs if truth.any()]
    known = [v for v in values if not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan


def _over_classes(name: str, average: str = "macro") -> Callable[[Outcome], Any]:
    """A metric of scikit-learn for the classes in the truth."""

    def compute(o: Outcome) -> Any:
        from sklearn import metrics

        measure = getattr(metrics, name)
        if o.kind == "multilabel":
            return _over_labels(measure, o.y, o.predicted)
        return measure(o.y, o.predicted, labels=np.unique(o.y), average=average, zero_division=0)

    return compute


def _auc(o: Outcome) -> Any:
    from scipy.special import logsumexp
    from sklearn.metrics import roc_auc_score

    def binary(positive: Array, scores: Array) -> Any:
        return roc_auc_score(positive, scores) if 0 < positive.sum() < len(positive) else math.nan

    if o.kind == "multilabel":
        return _over_labels(binary, o.y, o.output)
    scores = o.output.astype(np.float64)
    classes = [1] if scores.shape[1] == 2 else np.unique(o.y)
    # log p − log(1 − p) of the softmax, which is not rounded to p = 1.
    odds = (scores[:, c] - logsumexp(np.delete(scores, c, 1), axis=1) for c in classes)
    return np.mean([binary(o.y == c, each) for c, each in zip(classes, odds, strict=True)])


def _average_precision(o: Outcome) -> Any:
    from sklearn.metrics import average_precision_score

    return _over_labels(average_precision_score, o.y, o.output)


def _kappa(o: Outcome) -> Any:
    from sklearn.metrics import cohen_kappa_score

    if len(np.unique([o.y, o.predicted])) < 2:
        return math.nan
    return cohen_kappa_score(o.y, o.predicted, labels=np.arange(o.output.shape[1]), weights="quadratic")


def _mae(o: Outcome) -> Any:
    return np.abs(o.predicted - o.y).mean()


def _constant(values: Array) -> bool:
    return bool((values == values[:1]).all())


def _r_squared(o: Outcome) -> Any:
    from sklearn.metrics import r2_score

    y = _columns(o.y)
    return math.nan if any(map(_constant, y.T)) else r2_score(y, _columns(o.output))


def _pearson(o: Outcome) -> Any:
    pairs = zip(_columns(o.y).T, _columns(o.output).T, strict=True)
    return np.mean(
        [math.nan if _constant(y) or _constant(own) else np.corrcoef(y, own)[0, 1] for y, own in pairs]
    )


_AVERAGE = operator.attrgetter("average")
CLASSES, REGRESSION = ("classification", "ordinal"), ("regression",)
LABELS = (*CLASSES, "multilabel")
_EVERY = (
    Metric("accuracy", _AVERAGE, LABELS),
    Metric("worst-group accuracy", _AVERAGE, LABELS, over_groups=np.nanmin),
    Metric("10th-percentile accuracy", _AVERAGE, LABELS, over_groups=lambda v: np.nanpercentile(v, 10)),
    Metric("macro F1", _over_classes("f1_score"), LABELS),
    Metric("weighted F1", _over_classes("f1_score", "weighted"), CLASSES),
    Metric("macro recall", _over_classes("recall_score"), CLASSES),
    Metric("AUC", _auc, LABELS, outputs=True),
    Metric("class MAE", _mae, ("ordinal",), higher=False),
    Metric("quadratic weighted kappa", _kappa, ("ordinal",)),
    Metric("exact match", lambda o: _columns(o.predicted == o.y).min(1).mean(), ("multilabel",)),
    Metric("mean average precision", _average_precision, ("multilabel",), outputs=True),
    Metric("mse", _AVERAGE, REGRESSION, higher=False),
    Metric("worst-group mse", _AVERAGE, REGRESSION, higher=False, over_groups=np.max),  # NaN if one is
    Metric("MAE", _mae, REGRESSION, higher=False),
    Metric("R²", _r_squared, REGRESSION),
    Metric("Pearson r", _pearson, REGRESSION),
    Metric("worst-group Pearson r", _pearson, REGRESSION, over_groups=np.nanmin),
    Metric("loss", lambda o: math.nan if o.loss is None else o.loss, higher=False),
)
METRICS = {each.name: each for each in _EVERY}
UNDEFINED = {"AUC", "quadratic weighted kappa", "mean average precision"}
UNDEFINED |= {"R²", "Pearson r", "worst-group Pearson r"}
"""Metrics without a value where labels (or predictions) are all equal."""


def metric(wanted: str | Function) -> Metric:
    """Return a metric by name (case-insensitive), or create one from a function.

    Args:
        wanted: name of a metric, or function of outputs, labels and groups that returns a number. Higher is
            better unless the function has an attribute ``higher_is_better`` that is false.
    """
    if not callable(wanted):
        by_name = {name.lower(): each for name, each in METRICS.items()}
        if str(wanted).lower() not in by_name:
            raise unknown_name("metric", wanted, METRICS)
        return by_name[str(wanted).lower()]
    name = getattr(wanted, "__name__", type(wanted).__name__).strip("<>")

    def compute(o: Outcome) -> float:
        value: Any = wanted(o.output, o.y, o.groups)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"metric {name!r} must return a number, got {value!r}.") from error

    return Metric(name, compute, outputs=True, higher=bool(getattr(wanted, "higher_is_better", True)))


def default_metric(kind: str) -> str:
    """Return the name of the default metric of a kind of task."""
    return "mse" if kind == "regression" else "accuracy"


def choose_metrics(
    wanted: str | Function | None, measures: Sequence[str], kind: str
) -> tuple[list[Metric], Metric | None]:
    """Return the metrics to measure, and the one that selects; ``None``: the default metric's domain mean.

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
        if m.tasks and kind not in m.tasks:
            known = ", ".join(other.name for other in METRICS.values() if kind in (other.tasks or [kind]))
            raise InputError(
                f"metric {m.name!r} is for {', '.join(m.tasks)}, and this is {kind}; choose from: {known}."
            )
    return every, None if selects is None or selects.name == default_metric(kind) else selects
