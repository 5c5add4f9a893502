"""Statistics: means with intervals, Holm's correction, and metrics of predictions with 95 % intervals.

*What is independent* is stated by the caller, as one cluster code per value: rows of one entity (``group``),
domains that were held out together, or seeds of one domain are a cluster. Clusters are independent of each
other; what depends within a cluster, and how, does not matter.

Intervals of means are Student's, from the cluster sums. Those of metrics that are no means (AUC, R² …) come
from the jackknife that leaves out one block of clusters at a time. Shares have their interval on the scale of
log odds, errors on that of logarithms. They describe sampling of entities within the same domains, not other
domains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

Array = NDArray[Any]
Z = 1.959963984540054
BLOCKS = 50
"""Of the jackknife, at most: its cost does not grow with the number of clusters."""
BINS, SIMULATED = 10, 500
"""Of the calibration: bins of the probability, and simulations of perfect calibration."""
CLASSIFICATION = ("accuracy", "balanced accuracy", "AUC", "average precision", "log loss", "Brier score")
REGRESSION = ("MAE", "RMSE", "R²", "mean error")


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
    adjusted, largest = [1.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda n: ps[n])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[number]))
        adjusted[number] = largest
    return adjusted


# Metrics of predictions


@dataclass(frozen=True)
class Estimate:
    """A metric's value and its interval; ``None`` where it has none, and ``undefined`` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    undefined: str = ""


def wilson(share: float, count: float, limit: float = Z) -> Estimate:
    """A share of ``count`` independent rows with Wilson's interval, which has a width also at 0 and 1."""
    square = limit**2 / count
    middle = (share + square / 2) / (1 + square)
    half = limit * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def share_interval(happened: Array, clusters: Array) -> Estimate:
    """The share of rows with 1, with Wilson's interval for as many rows as the clusters are worth."""
    share, entities = float(happened.mean()), int(clusters.max()) + 1
    if entities == len(happened):
        return wilson(share, entities)
    se = mean_interval(happened, clusters).se
    if se is None:
        return Estimate(share)
    count = min(share * (1 - share) / se**2, len(happened)) if se > 0 else entities
    return wilson(share, count, t_limit(0.95, entities - 1))


def classification(
    probability: Array, y: Array, clusters: Sequence[Hashable] | Array | None = None
) -> dict[str, Estimate]:
    """Of probabilities (n, classes) and classes: accuracy, balanced accuracy, AUC, average precision, log
    loss and Brier score.

    With two classes the AUC, the average precision and the Brier score are those of the second; with more
    the first two are means of one class against the rest, over the classes in ``y``, and the Brier score is
    the sum of squares over classes.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    codes, count = codes_of(clusters, len(y)), probability.shape[1]
    right = (probability.argmax(1) == y).astype(np.float64)
    with np.errstate(divide="ignore"):
        losses = -np.log(probability[np.arange(len(y)), y])
    squares = ((probability - np.eye(count)[y]) ** 2).sum(1) / (2 if count == 2 else 1)
    present = np.unique(y)
    truth, score = (
        (y == 1, probability[:, 1]) if count == 2 else (y[:, None] == present, probability[:, present])
    )
    fewest = min(len(np.unique(codes[y == c])) for c in present)

    def recall(y: Array, right: Array) -> float:
        return float(np.mean([right[y == c].mean() for c in np.unique(y)]))

    def share(metric: Callable[..., Any], *arrays: Array) -> Estimate:
        value, se = _jackknife(metric, arrays, codes)
        if not 0 < value < 1:  # a perfect one is worth as many independent rows as the rarest class has
            return wilson(value, fewest)
        if se is None:
            return Estimate(value)
        reach = t_limit(0.95, min(int(codes.max()), BLOCKS - 1)) * se / (value * (1 - value))
        return Estimate(value, *expit([logit(value) - reach, logit(value) + reach]).tolist())

    found = {
        "accuracy": share_interval(right, codes),
        "balanced accuracy": share(recall, y, right),
        "log loss": _error(losses, codes),
        "Brier score": _error(squares, codes),
    }
    if len(present) > 1:
        found["AUC"] = share(roc_auc_score, truth, score)
        found["average precision"] = share(average_precision_score, truth, score)
    return {name: found.get(name, Estimate(None, undefined="one class")) for name in CLASSIFICATION}


def regression(
    output: Array, y: Array, clusters: Sequence[Hashable] | Array | None = None
) -> dict[str, Estimate]:
    """Of predictions and numbers: MAE, RMSE, R² and the mean error (prediction − truth), in their units."""
    from sklearn.metrics import r2_score

    codes, error = codes_of(clusters, len(y)), output - y
    bias = mean_interval(error, codes)
    explained = Estimate(None, undefined="the label is the same in all rows")
    if np.ptp(y) > 0:
        explained = Estimate(float(r2_score(y, output)))
        if error.any():  # by the share that is not explained, which is an error
            rest, se = _jackknife(lambda *rows: math.log(1 - r2_score(*rows)), (y, output), codes)
            better, worse = _ends(math.exp(rest), se, codes)
            explained = _changed(lambda rest: 1 - rest, Estimate(math.exp(rest), worse, better))
    return {
        "MAE": _error(np.abs(error), codes),
        "RMSE": _changed(math.sqrt, _error(error**2, codes)),
        "R²": explained,
        "mean error": Estimate(bias.mean, bias.low, bias.high),
    }


def _changed(function: Callable[[float], float], found: Estimate) -> Estimate:
    """A monotone function of a metric and its ends."""
    value, low, high = (None if v is None else function(v) for v in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.undefined)


def _jackknife(
    metric: Callable[..., Any], arrays: Sequence[Array], codes: Array
) -> tuple[float, float | None]:
    """A metric of arrays, and its standard error from leaving out one block of clusters at a time."""
    value, count = float(metric(*arrays)), int(codes.max()) + 1
    blocks = min(count, BLOCKS)
    block = (np.random.default_rng(0).permutation(count) % blocks)[codes]
    without = []
    for number in range(blocks if blocks > 1 else 0):
        rest = [array[block != number] for array in arrays]
        if len(np.unique(rest[0], axis=0)) < 2:  # one label is left: the metric depends on this block
            return value, None
        without.append(float(metric(*rest)))
    return value, math.sqrt((blocks - 1) * float(np.var(without))) if without else None


def _error(values: Array, codes: Array) -> Estimate:
    """A mean of errors, on the scale of logarithms, by leaving out one cluster at a time."""
    mean, sums, sizes = float(values.mean()), np.bincount(codes, values), np.bincount(codes)
    if not math.isfinite(mean):
        return Estimate(None, undefined="infinite")
    if len(sums) < 2 or np.count_nonzero(sums) < 2:
        return Estimate(mean)
    without = np.log((sums.sum() - sums) / (len(values) - sizes))
    return Estimate(mean, *_ends(mean, math.sqrt((len(sums) - 1) * float(without.var())), codes))


def _ends(value: float, se: float | None, codes: Array) -> tuple[float | None, float | None]:
    """Of an error, from the standard error of its logarithm."""
    if se is None:
        return None, None
    reach = math.exp(min(t_limit(0.95, int(codes.max())) * se, 700.0))
    return value / reach, value * reach


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

    def error(outcome: Array) -> float:
        return float(np.abs(np.bincount(place, outcome - stated, BINS)).sum() / len(y))

    rng, entities = np.random.default_rng(0), int(codes.max()) + 1
    simulated = [error(rng.random(entities)[codes] < stated) for _ in range(SIMULATED)]
    bins = []
    for number in np.unique(place).tolist():
        own = place == number
        share = share_interval(happened[own], codes_of(codes[own], int(own.sum())))
        ends = {"from": number / BINS, "to": (number + 1) / BINS, "count": int(own.sum())}
        mean = {"predicted": float(stated[own].mean()), "observed": share.value}
        bins.append({**ends, **mean, "low": share.low, "high": share.high})
    return {
        "error": error(happened),
        "chance": float(np.quantile(simulated, 0.95, method="higher")),
        "bins": bins,
    }
