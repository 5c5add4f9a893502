"""Statistics: means with intervals, Holm's correction, and metrics of predictions with 95 % intervals.

*What is independent* is stated by the caller, as one cluster code per value: rows of one entity (``group``),
domains that were held out together, or seeds of one domain are a cluster. They describe sampling of entities
within the same domains, not other domains.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit
from scipy.stats import binomtest

Array = NDArray[Any]
BLOCKS = 50
"""Of the jackknife, at most: its cost does not grow with the number of clusters."""
BINS, SIMULATED = 10, 500
"""Of the calibration: bins of the probability, and simulations of perfect calibration."""


# Means


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
    """A mean, its interval and standard error; ``None`` for the latter where there is one cluster only."""

    mean: float
    low: float | None
    high: float | None
    se: float | None


def t_limit(level: float, dof: float) -> float:
    """The limit that |t| stays below with probability ``level``, for Student's t.

    >>> round(t_limit(0.95, 4), 3)
    2.776
    """
    return float(stdtrit(dof, (1 + level) / 2))


def mean_interval(
    values: Sequence[float] | Array, clusters: Sequence[Hashable] | Array | None = None, level: float = 0.95
) -> Interval:
    """The mean of values with Student's interval, where those of the same cluster are dependent.

    With G clusters of sizes n_g and means m_g, the standard error is √(G / (G − 1) Σ (n_g (m_g − m))²) / n,
    with G − 1 degrees of freedom; for clusters of one value it is that of the mean. There is no interval with
    fewer than two clusters.

    >>> mean_interval([1.0, 1.0, 4.0, 4.0, 7.0, 7.0], "aabbcc") == mean_interval([1.0, 4.0, 7.0])
    True
    """
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    sums = np.bincount(codes_of(clusters, len(array)), array - mean)
    count = len(sums)
    if count < 2:
        return Interval(mean, None, None, None)
    se = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(array)
    reach = t_limit(level, count - 1) * se
    return Interval(mean, mean - reach, mean + reach, se)


def codes_of(clusters: Sequence[Hashable] | Array | None, count: int) -> NDArray[np.int64]:
    """Clusters as numbers from 0; ``None``: each of ``count`` values is one."""
    if clusters is None:
        return np.arange(count)
    return np.asarray(pandas.factorize(np.array(list(clusters), object))[0], np.int64)


def holm(ps: Sequence[float]) -> list[float]:
    """p values after Holm's correction, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(ps)
    adjusted = np.maximum.accumulate(np.asarray(ps)[order] * np.arange(len(ps), 0, -1))
    return np.minimum(adjusted, 1.0)[np.argsort(order)].tolist()


# Metrics of predictions


@dataclass(frozen=True)
class Estimate:
    """A metric's value and its interval; ``None`` where it has none, and ``undefined`` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    undefined: str = ""


SCALES: dict[str, tuple[Callable[[float], float], Callable[[float], float], Callable[[float], float]]] = {
    "share": (logit, expit, lambda v: 1 / (v * (1 - v))),
    "error": (math.log, lambda v: math.exp(min(v, 700.0)), lambda v: 1 / v),
    "number": (float, float, lambda v: 1.0),
}
"""Where the interval of a metric is symmetric: a function, its inverse and its derivative."""


def estimate(
    metric: Callable[[Array], float], codes: Array, scale: str, fewest: int | None = None
) -> Estimate:
    """A metric of rows (given as their numbers) with its interval from the jackknife over clusters.

    A share that is exactly 0 or 1 has Wilson's interval for ``fewest`` independent rows (default: the number
    of clusters). There is no interval with one cluster, or where the metric is undefined (NaN) without some.
    """
    rows, count = np.arange(len(codes)), int(codes.max()) + 1
    value, blocks = float(metric(rows)), min(count, BLOCKS)
    if not math.isfinite(value):
        return Estimate(None, undefined="one class" if math.isnan(value) else "infinite")
    if scale == "share" and not 0 < value < 1:
        independent = fewest or count
        ends = binomtest(round(value * independent), independent).proportion_ci(method="wilson")
        return Estimate(value, float(ends.low), float(ends.high))
    if blocks < 2 or (scale == "error" and value <= 0):
        return Estimate(value)
    block = (np.random.default_rng(0).permutation(count) % blocks)[codes]
    without = np.array([metric(rows[block != number]) for number in range(blocks)])
    if np.isnan(without).any() or np.ptp(without) == 0:
        return Estimate(value)
    to, back, slope = SCALES[scale]
    se = math.sqrt((blocks - 1) * float(without.var()))
    reach = t_limit(0.95, blocks - 1) * se * slope(value)
    return Estimate(value, float(back(to(value) - reach)), float(back(to(value) + reach)))


def metric_functions(predicted: Array, y: Array) -> dict[str, Callable[[Array], float]]:
    """The metrics of some rows, given as their numbers, by name.

    For probabilities (n, classes) accuracy, balanced accuracy, AUC, average precision, log loss and Brier
    score; for numbers (n,) MAE, RMSE and R². With two classes the AUC, the average precision and the Brier
    score are those of the second; with more the first two are means of one class against the rest, over the
    classes in ``y``, and the Brier score is the sum of squares over classes. Where not all classes in ``y``
    are in the rows, metrics that average over them are NaN.
    """
    from sklearn.metrics import average_precision_score, r2_score, roc_auc_score

    if predicted.ndim == 1:
        error = predicted - y
        return {
            "MAE": lambda rows: float(np.abs(error[rows]).mean()),
            "RMSE": lambda rows: math.sqrt((error[rows] ** 2).mean()),
            "R²": lambda rows: r2_score(y[rows], predicted[rows]) if np.ptp(y[rows]) > 0 else math.nan,
        }
    count, present = predicted.shape[1], np.unique(y)
    right = (predicted.argmax(1) == y).astype(np.float64)
    with np.errstate(divide="ignore"):
        losses = -np.log(predicted[np.arange(len(y)), y])
    squares = ((predicted - np.eye(count)[y]) ** 2).sum(1) / (2 if count == 2 else 1)
    truth, score = (y == 1, predicted[:, 1]) if count == 2 else (y[:, None] == present, predicted[:, present])

    def of_all(metric: Callable[[Array], Any], least: int = 1) -> Callable[[Array], float]:
        """Of a metric that needs every class that is present, and at least so many."""

        def known(rows: Array) -> float:
            found = len(np.unique(y[rows]))
            return float(metric(rows)) if found == len(present) >= least else math.nan

        return known

    return {
        "accuracy": lambda rows: float(right[rows].mean()),
        "balanced accuracy": of_all(
            lambda rows: np.mean([right[rows][y[rows] == c].mean() for c in present])
        ),
        "AUC": of_all(lambda rows: roc_auc_score(truth[rows], score[rows]), 2),
        "average precision": of_all(lambda rows: average_precision_score(truth[rows], score[rows]), 2),
        "log loss": lambda rows: float(losses[rows].mean()),
        "Brier score": lambda rows: float(squares[rows].mean()),
    }


def classification(
    probability: Array, y: Array, clusters: Sequence[Hashable] | Array | None = None
) -> dict[str, Estimate]:
    """The metrics of probabilities (n, classes) and classes, see :func:`metric_functions`."""
    codes = codes_of(clusters, len(y))
    fewest = min(len(np.unique(codes[y == c])) for c in np.unique(y))
    of_all = ("balanced accuracy", "AUC", "average precision")
    return {
        name: estimate(
            metric,
            codes,
            "error" if name in ("log loss", "Brier score") else "share",
            fewest if name in of_all else None,
        )
        for name, metric in metric_functions(probability, y).items()
    }


def regression(
    output: Array, y: Array, clusters: Sequence[Hashable] | Array | None = None
) -> dict[str, Estimate]:
    """Of predictions and numbers: MAE, RMSE, R² and the mean error (prediction − truth), in their units."""
    codes, functions = codes_of(clusters, len(y)), metric_functions(output, y)
    explained = Estimate(None, undefined="the label is the same in all rows")
    if np.ptp(y) > 0:  # 1 − R² is an error
        rest = estimate(lambda rows: 1 - functions["R²"](rows), codes, "error")
        ends = (None, None) if rest.high is None or rest.low is None else (1 - rest.high, 1 - rest.low)
        explained = Estimate(functions["R²"](np.arange(len(y))), *ends)
    bias = mean_interval(output - y, codes)
    return {
        **{name: estimate(functions[name], codes, "error") for name in ("MAE", "RMSE")},
        "R²": explained,
        "mean error": Estimate(bias.mean, bias.low, bias.high),
    }


def calibration(
    probability: Array, y: Array, clusters: Sequence[Hashable] | Array | None = None
) -> dict[str, Any]:
    """How probabilities compare with what happened: a table of bins and the expected calibration error.

    With two classes they are those of the second, else that of the predicted class. The error is
    Σ n_b/n |observed_b − predicted_b|, which is above zero for a perfect model too: ``chance`` is what 95 in
    100 perfectly calibrated models would stay below with these rows, if those of a cluster come out together.
    """
    codes, two = codes_of(clusters, len(y)), probability.shape[1] == 2
    stated = probability[:, 1] if two else probability.max(1)
    happened = (y == 1 if two else probability.argmax(1) == y).astype(np.float64)
    place = np.minimum((stated * BINS).astype(np.int64), BINS - 1)

    def observed(outcome: Array, clusters: Array) -> Estimate:
        return estimate(lambda rows: float(outcome[rows].mean()), clusters, "share")

    def error(outcome: Array) -> float:
        return float(np.abs(np.bincount(place, outcome - stated, BINS)).sum() / len(y))

    # A seed for every table: with one for all, chance would err in the same direction in all of them.
    rng, entities = np.random.default_rng(zlib.crc32(np.unique(stated).tobytes())), int(codes.max()) + 1
    simulated = [error(rng.random(entities)[codes] < stated) for _ in range(SIMULATED)]
    bins = []
    for number in np.unique(place).tolist():
        rows = np.flatnonzero(place == number)
        share = observed(happened[rows], codes_of(codes[rows], len(rows)))
        ends = {"from": number / BINS, "to": (number + 1) / BINS, "count": len(rows)}
        mean = {"predicted": float(stated[rows].mean()), "observed": share.value}
        bins.append({**ends, **mean, "low": share.low, "high": share.high})
    chance = float(np.quantile(simulated, 0.95, method="higher"))
    return {"error": error(happened), "chance": chance, "bins": bins}
