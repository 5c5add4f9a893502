"""Statistics: mean and spread, Student's t, paired intervals, corrections, and metrics with 95 % intervals.

The only module that imports SciPy, and only inside functions: what trains runs without it.

Intervals of metrics are about sampling of rows: how the number could differ for other rows drawn in the same
way. They say nothing about domains that are not among the rows. Accuracy has Wilson's interval, the AUC of
two classes Newcombe's; others come from a seeded bootstrap over rows: of its standard deviation, on the scale
of log odds, for shares such as the average precision, of its percentiles (beyond 10,000 rows of its standard
deviation) for the rest.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError

Array = NDArray[Any]
Z = 1.959963984540054
RESAMPLES, LEAST_RESAMPLES, NUMBERS = 1000, 100, 10_000_000
"""Of a bootstrap, at most and at least; how many numbers are drawn in all, which bounds its time."""
FEW = 10
"""Rows below which a bootstrap says nothing."""
BINS = 10
SIMULATED = 200
CLASSIFICATION = ("accuracy", "balanced accuracy", "AUC", "average precision", "log loss", "Brier score")
SHARES = ("balanced accuracy", "AUC", "average precision")
REGRESSION = ("MAE", "RMSE", "R²", "mean error")


def need_scipy() -> Any:
    """``scipy.special``, or what to install. Call it before long work whose result needs SciPy."""
    try:
        return importlib.import_module("scipy.special")
    except ImportError as error:
        raise InputError("statistics require SciPy: pip install 'shoal[stats]'.") from error


# Mean and spread


def mean_sd(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (n − 1) of the values that are known; ``None`` where there are too few.

    >>> mean_sd([1.0, None, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_sd([1.0]), mean_sd([])
    ((1.0, None), (None, None))
    """
    known = [v for v in values if v is not None]
    mean = statistics.fmean(known) if known else None
    return mean, statistics.stdev(known) if len(known) > 1 else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of values of which all are known, else ``None``."""
    every = list(values)
    return mean_sd(every)[0] if None not in every else None


def summarize(values: Sequence[float | None], metric: str | None = None) -> dict[str, Any]:
    """One value per seed, ``None`` where there is none; mean, sd and standard error of those known."""
    mean, sd = mean_sd(values)
    se = None if sd is None else sd / math.sqrt(sum(v is not None for v in values))
    return {"metric": metric, "values": list(values), "mean": mean, "sd": sd, "se": se}


def plus_minus(values: Iterable[float | None], digits: int = 1) -> str:
    """``mean ± sd`` of the known values as text; the mean alone of one, a dash of none.

    >>> plus_minus([1.0, 3.0]), plus_minus([1.0]), plus_minus([])
    ('2.0 ± 1.4', '1.0', '–')
    """
    mean, sd = mean_sd(values)
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" if sd is None else f"{mean:.{digits}f} ± {sd:.{digits}f}"


class Interval(NamedTuple):
    """A mean, its interval and standard error; ``None`` for the latter where there is one value only."""

    mean: float
    low: float | None
    high: float | None
    se: float | None


def t_limit(level: float, dof: int) -> float:
    """The limit that |t| stays below with probability ``level``, for Student's t.

    >>> round(t_limit(0.95, 4), 3)
    2.776
    """
    return float(need_scipy().stdtrit(dof, (1 + level) / 2))


def mean_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, level: float = 0.95
) -> Interval:
    """The mean of values with Student's interval, where those of the same cluster are dependent.

    Whoever calls it says what is independent: rows of one entity, domains that share a model because they
    were held out together, or seeds of one domain are a cluster. With G clusters of sizes n_g and means m_g,
    the standard error is √(G / (G − 1) Σ (n_g (m_g − m))²) / n, with G − 1 degrees of freedom; for clusters
    of one value it is that of the mean. There is no interval with fewer than two clusters.

    >>> mean_interval([1.0, 1.0, 4.0, 4.0, 7.0, 7.0], "aabbcc") == mean_interval([1.0, 4.0, 7.0])
    True
    """
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    _, own = np.unique(np.arange(len(array)) if clusters is None else _codes(clusters), return_inverse=True)
    sums = np.bincount(own, array - mean)
    count = len(sums)
    if count < 2:
        return Interval(mean, None, None, None)
    se = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(array)
    reach = t_limit(level, count - 1) * se
    return Interval(mean, mean - reach, mean + reach, se)


def _codes(clusters: Sequence[Hashable]) -> list[int]:
    number = {name: n for n, name in enumerate(dict.fromkeys(clusters))}
    return [number[name] for name in clusters]


def paired_interval(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """The mean of ``a − b``, pair by pair, with Student's interval.

    >>> paired_interval([3.0, 5.0], [2.0, 2.0]).mean
    2.0
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, sd = statistics.fmean(differences), mean_sd(differences)[1]
    if sd is None:
        return Interval(mean, None, None, None)
    se = sd / math.sqrt(len(differences))
    reach = t_limit(level, len(differences) - 1) * se
    return Interval(mean, mean - reach, mean + reach, se)


def holm(ps: Sequence[float]) -> list[float]:
    """p values after Holm's correction, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda n: ps[n])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[number]))
        adjusted[number] = largest
    return adjusted


# Two samples


def kolmogorov(distance: float, rows: int, others: int) -> float:
    """The asymptotic p of a two-sample Kolmogorov–Smirnov distance; too large where values are tied."""
    root = math.sqrt(rows * others / (rows + others))
    return float(need_scipy().kolmogorov((root + 0.12 + 0.11 / root) * distance))


def chi_square(one: Array, other: Array) -> float:
    """The p of two columns of counts being drawn from the same shares; rare rows are put together."""

    def expected(table: Array) -> Array:
        return np.asarray(table.sum(1, keepdims=True) * table.sum(0) / table.sum())

    table = np.stack([one, other])
    rare = expected(table).min(0) < 5
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], 1)
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 1.0
    value = ((table - expected(table)) ** 2 / expected(table)).sum()
    return float(need_scipy().chdtrc(table.shape[1] - 1, value))


def two_proportions(share: float, rows: int, other: float, others: int) -> float:
    """The two-sided p of two shares being equal."""
    if not rows or not others:
        return 1.0
    pooled = (share * rows + other * others) / (rows + others)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / rows + 1 / others))
    return math.erfc(abs(share - other) / deviation / math.sqrt(2)) if deviation else 1.0


# Metrics with intervals


@dataclass(frozen=True)
class Estimate:
    """A metric's value and its interval; ``None`` where it has none, and then why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    undefined: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "undefined" or v}


def wilson(right: int, count: int) -> Estimate:
    """A share and its score interval."""
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def auc_interval(auc: float, positive: int, negative: int) -> Estimate:
    """An AUC with Newcombe's score-like interval, which has a width also where the AUC is 1.

    Its ends θ solve |AUC − θ| = z √V(θ), with Hanley and McNeil's V for groups of equal size (n = (m + k)/2).
    """
    equal = (positive + negative) / 2 - 1

    def variance(theta: float) -> float:
        spread = 1 + equal * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return theta * (1 - theta) * spread / (positive * negative)

    def end(outside: float) -> float:
        inside = auc  # which may itself solve the equation: a root finder would stop there
        for _ in range(60):
            middle = (inside + outside) / 2
            near = abs(auc - middle) <= Z * math.sqrt(variance(middle))
            inside, outside = (middle, outside) if near else (inside, middle)
        return inside

    return Estimate(auc, end(0.0), end(1.0))


def classification(probability: Array, y: Array, seed: int = 0) -> dict[str, Estimate]:
    """Of probabilities (n, classes) and classes: accuracy, balanced accuracy, AUC, average precision, log
    loss and Brier score.

    With two classes the AUC, the average precision and the Brier score are those of the second; with more
    the first two are means of one class against the rest, over the classes in ``y``, and the Brier score is
    the sum of squares over classes.
    """
    count = probability.shape[1]
    classes, two = np.unique(y), count == 2
    with np.errstate(divide="ignore"):
        losses = -np.log(probability[np.arange(len(y)), y])
    squares = (probability[:, 1] - (y == 1)) ** 2 if two else ((probability - np.eye(count)[y]) ** 2).sum(1)
    right = (probability.argmax(1) == y).astype(np.float64)
    rankings = [_Ranking(probability[:, c], y == c) for c in ([1] if two else classes.tolist())]
    metrics = {
        "balanced accuracy": lambda w: _balanced(right, y, w, count),
        "average precision": lambda w: _mean(ranking.precision(w) for ranking in rankings),
        "log loss": lambda w: float(w @ losses / w.sum()),
        "Brier score": lambda w: float(w @ squares / w.sum()),
    }
    if not two:
        metrics["AUC"] = lambda w: _mean(ranking.auc(w) for ranking in rankings)
    fewest = int(np.bincount(y)[classes].min())
    found = {"accuracy": wilson(int(right.sum()), len(y)), **bootstrap(metrics, len(y), seed, fewest)}
    if len(classes) < 2:
        found |= dict.fromkeys(("AUC", "average precision"), Estimate(None, undefined="one class"))
    elif two:
        positive = int((y == 1).sum())
        found["AUC"] = auc_interval(rankings[0].auc(np.ones(len(y))), positive, len(y) - positive)
    return {name: found[name] for name in CLASSIFICATION}


def _mean(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan


def _balanced(right: Array, y: Array, weights: Array, classes: int) -> float:
    total = np.bincount(y, weights, classes)
    found = np.bincount(y, weights * right, classes)
    return float((found[total > 0] / total[total > 0]).mean())


class _Ranking:
    """Rows in the order of a score, sorted once for all resamples."""

    def __init__(self, score: Array, positive: Array) -> None:
        self.order = np.argsort(-score, kind="stable")
        ranked = score[self.order]
        self.positive = positive[self.order]
        self.ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        """The last row of each group of equal scores."""

    def _sums(self, weights: Array) -> tuple[Array, Array]:
        """Weights of positive and negative rows down to each group."""
        hits = weights[self.order] * self.positive
        misses = weights[self.order] * ~self.positive
        return np.cumsum(hits)[self.ends], np.cumsum(misses)[self.ends]

    def precision(self, weights: Array) -> float:
        """Σ (recall_k − recall_{k−1}) precision_k."""
        hits, misses = self._sums(weights)
        if not hits[-1]:
            return math.nan
        with np.errstate(invalid="ignore"):
            precision = np.nan_to_num(hits / (hits + misses))
        return float(np.diff(hits, prepend=0.0) @ precision / hits[-1])

    def auc(self, weights: Array) -> float:
        hits, misses = self._sums(weights)
        if not hits[-1] or not misses[-1]:
            return math.nan
        above = np.concatenate([[0.0], misses[:-1]])
        below = misses[-1] - (above + misses) / 2
        return float(np.diff(hits, prepend=0.0) @ below / (hits[-1] * misses[-1]))


def regression(output: Array, y: Array, seed: int = 0) -> dict[str, Estimate]:
    """Of predictions and numbers: MAE, RMSE, R² and the mean error (prediction − truth), in their units."""
    error = output - y
    squares, absolute = error**2, np.abs(error)

    def explained(weights: Array) -> float:
        variance = weights @ (y - weights @ y / weights.sum()) ** 2
        return float(1 - weights @ squares / variance) if variance > 0 else math.nan

    metrics = {
        "MAE": lambda w: float(w @ absolute / w.sum()),
        "RMSE": lambda w: math.sqrt(w @ squares / w.sum()),
        "R²": explained,
        "mean error": lambda w: float(w @ error / w.sum()),
    }
    found = bootstrap(metrics, len(y), seed)
    if found["R²"].value is None:
        found["R²"] = Estimate(None, undefined="the label is the same in all rows")
    return found


def bootstrap(
    metrics: Mapping[str, Callable[[Array], float]], rows: int, seed: int, fewest: int = 1
) -> dict[str, Estimate]:
    """Each metric is a function of weights of the rows; resamples are weights that count them.

    ``fewest`` is how many rows the rarest class has, which is what a perfect score is worth.
    """
    drawn: dict[str, list[float]] = {name: [] for name in metrics}
    rng = np.random.default_rng(seed)
    for _ in range(min(RESAMPLES, max(LEAST_RESAMPLES, NUMBERS // rows)) if rows >= FEW else 0):
        weights = np.bincount(rng.integers(0, rows, rows), minlength=rows).astype(np.float64)
        for name, metric in metrics.items():
            drawn[name].append(metric(weights))
    return {
        name: _estimate(metric(np.ones(rows)), np.array(drawn[name]), fewest if name in SHARES else None)
        for name, metric in metrics.items()
    }


def _estimate(value: float, drawn: Array, fewest: int | None) -> Estimate:
    """From resamples; these repeat rows, which flatters the ranking of a share (``fewest`` is not ``None``),
    so that only their deviation counts there."""
    if not math.isfinite(value):
        return Estimate(None, undefined="" if math.isnan(value) else "infinite")
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return Estimate(value)
    half = Z * float(known.std())
    if fewest is not None:
        if not 0 < value < 1:
            return wilson(round(value) * fewest, fewest)
        odds, half = math.log(value / (1 - value)), half / (value * (1 - value))
        low, high = (1 / (1 + math.exp(-min(max(end, -500.0), 500.0))) for end in (odds - half, odds + half))
        return Estimate(value, low, high)
    if len(drawn) < RESAMPLES:
        return Estimate(value, value - half, value + half)
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return Estimate(value, min(low, value), max(high, value))


def calibration(probability: Array, y: Array, seed: int = 0) -> dict[str, Any]:
    """How probabilities compare with what happened: a table of bins and the expected calibration error.

    With two classes they are those of the second, else that of the predicted class. The error is
    Σ n_b/n |observed_b − predicted_b|, which is above zero for a perfect model too: ``chance`` is what 95 in
    100 perfectly calibrated models would stay below with these rows.
    """
    two = probability.shape[1] == 2
    stated = probability[:, 1] if two else probability.max(1)
    happened = (y == 1 if two else probability.argmax(1) == y).astype(np.float64)
    place = np.minimum((stated * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    predicted = np.bincount(place, stated, BINS)

    def error(outcome: Array) -> float:
        return float(np.abs(np.bincount(place, outcome, BINS) - predicted).sum() / len(y))

    rng = np.random.default_rng(seed)
    few = max(20, min(SIMULATED, NUMBERS // len(y)))
    chance = [error((rng.random(len(y)) < stated).astype(np.float64)) for _ in range(few)]
    observed = np.bincount(place, happened, BINS)
    bins = []
    for b in np.flatnonzero(counts).tolist():
        share = wilson(round(float(observed[b])), int(counts[b]))
        ends = {"from": b / BINS, "to": (b + 1) / BINS, "count": int(counts[b])}
        mean = {"predicted": float(predicted[b] / counts[b]), "observed": share.value}
        bins.append({**ends, **mean, "low": share.low, "high": share.high})
    return {"error": error(happened), "chance": float(np.quantile(chance, 0.95)), "bins": bins}
