"""Metrics of predictions with 95 % intervals, and calibration; NumPy alone.

Intervals are about sampling of rows: how the number could differ for other rows drawn in the same way. They
say nothing about domains that are not among the rows. Accuracy has Wilson's interval, the AUC of two classes
Newcombe's; others come from a seeded bootstrap over rows: of its deviation, on the scale of log odds, for
shares such as the average precision, of its percentiles (beyond 10,000 rows of its deviation) for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.training.metrics import binary_auc

Array = NDArray[Any]
Z = 1.959963984540054
RESAMPLES, LEAST_RESAMPLES, NUMBERS = 1000, 100, 10_000_000
"""Of a bootstrap, at most and at least; how many numbers are drawn in all, which bounds its time."""
FEW = 10
"""Rows below which a bootstrap says nothing."""
BINS = 10
SIMULATED = 200
ONE_CLASS = "one class"


@dataclass(frozen=True)
class Estimate:
    """A metric's value and its interval; ``None`` where it has none, and then why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    undefined: str = ""

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"value": self.value, "low": self.low, "high": self.high}
        return found | ({"undefined": self.undefined} if self.undefined else {})


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

    def end(target: float) -> float:
        inside, outside = auc, target
        for _ in range(60):
            middle = (inside + outside) / 2
            near = abs(auc - middle) <= Z * math.sqrt(variance(middle))
            inside, outside = (middle, outside) if near else (inside, middle)
        return inside

    return Estimate(auc, end(0.0), end(1.0))


# Classification


def classification(probability: Array, y: Array, seed: int = 0) -> dict[str, Estimate]:
    """Of probabilities (n, classes) and classes: accuracy, balanced accuracy, AUC, average precision, log
    loss and Brier score.

    With two classes the AUC, the average precision and the Brier score are those of the second; with more
    the first two are means of one class against the rest, over the classes in ``y``, and the Brier score is
    the sum of squares over classes.
    """
    rows, predicted = np.arange(len(y)), probability.argmax(1)
    classes = np.unique(y)
    two = probability.shape[1] == 2
    with np.errstate(divide="ignore"):
        losses = -np.log(probability[rows, y])
    truth = np.eye(probability.shape[1])[y] if not two else None
    squares = (
        ((probability - truth) ** 2).sum(1) if truth is not None else (probability[:, 1] - (y == 1)) ** 2
    )
    right = (predicted == y).astype(np.float64)
    ranked = [1] if two else classes.tolist()
    orders = [_Ranking(probability[:, c], y == c) for c in ranked]
    several = {
        "balanced accuracy": lambda w: _balanced(right, y, w, probability.shape[1]),
        "average precision": lambda w: _mean(order.precision(w) for order in orders),
        "log loss": lambda w: float(w @ losses / w.sum()),
        "Brier score": lambda w: float(w @ squares / w.sum()),
    }
    if not two:
        several["AUC"] = lambda w: _mean(order.auc(w) for order in orders)
    fewest = int(np.bincount(y)[classes].min())
    found = {"accuracy": wilson(int(right.sum()), len(y)), **bootstrap(several, len(y), seed, fewest)}
    if two and len(classes) == 2:
        positive = int((y == 1).sum())
        auc = binary_auc(probability[:, 1], y == 1)
        found["AUC"] = auc_interval(auc, positive, len(y) - positive)
    if len(classes) < 2:
        found |= {name: Estimate(None, undefined=ONE_CLASS) for name in ("AUC", "average precision")}
    return {name: found[name] for name in CLASSIFICATION}


CLASSIFICATION = ("accuracy", "balanced accuracy", "AUC", "average precision", "log loss", "Brier score")
SHARES = ("balanced accuracy", "AUC", "average precision")
REGRESSION = ("MAE", "RMSE", "R²", "mean error")


def _mean(values: Any) -> float:
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
        ordered = weights[self.order]
        return (
            np.cumsum(ordered * self.positive)[self.ends],
            np.cumsum(ordered * ~self.positive)[self.ends],
        )

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


# Regression


def regression(output: Array, y: Array, seed: int = 0) -> dict[str, Estimate]:
    """Of predictions and numbers: MAE, RMSE, R² and the mean error (prediction − truth), in their units."""
    error = output - y
    squares, away = error**2, np.abs(error)

    def explained(weights: Array) -> float:
        total = weights.sum()
        spread = weights @ (y - weights @ y / total) ** 2
        return float(1 - weights @ squares / spread) if spread > 0 else math.nan

    several = {
        "MAE": lambda w: float(w @ away / w.sum()),
        "RMSE": lambda w: math.sqrt(w @ squares / w.sum()),
        "R²": explained,
        "mean error": lambda w: float(w @ error / w.sum()),
    }
    found = bootstrap(several, len(y), seed)
    if found["R²"].value is None:
        found["R²"] = Estimate(None, undefined="the label is the same in all rows")
    return found


def bootstrap(
    metrics: Mapping[str, Callable[[Array], float]], rows: int, seed: int, fewest: int = 1
) -> dict[str, Estimate]:
    """Each metric is a function of weights of the rows; resamples are weights that count them.

    ``fewest`` is how many rows the rarest class has, which is what a perfect score is worth.
    """
    values = {name: metric(np.ones(rows)) for name, metric in metrics.items()}
    drawn: dict[str, list[float]] = {name: [] for name in metrics}
    rng = np.random.default_rng(seed)
    count = min(RESAMPLES, max(LEAST_RESAMPLES, NUMBERS // rows)) if rows >= FEW else 0
    for _ in range(count):
        weights = np.bincount(rng.integers(0, rows, rows), minlength=rows).astype(np.float64)
        for name, metric in metrics.items():
            drawn[name].append(metric(weights))
    return {
        name: _share(value, np.array(drawn[name]), fewest)
        if name in SHARES
        else _estimate(value, np.array(drawn[name]))
        for name, value in values.items()
    }


def _estimate(value: float, drawn: Array) -> Estimate:
    if not math.isfinite(value):
        return Estimate(None, undefined="" if math.isnan(value) else "infinite")
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return Estimate(value)
    if len(drawn) < RESAMPLES:
        half = Z * float(known.std())
        return Estimate(value, value - half, value + half)
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return Estimate(value, min(low, value), max(high, value))


def _share(value: float, drawn: Array, fewest: int) -> Estimate:
    """Of a number between 0 and 1; resamples repeat rows, which flatters a ranking, so only their deviation
    counts."""
    known = drawn[np.isfinite(drawn)]
    if math.isnan(value) or not len(known):
        return _estimate(value, known)
    if not 0 < value < 1:
        return wilson(round(value) * fewest, fewest)
    odds, half = math.log(value / (1 - value)), Z * float(known.std()) / (value * (1 - value))
    low, high = (1 / (1 + math.exp(-min(max(end, -500.0), 500.0))) for end in (odds - half, odds + half))
    return Estimate(value, low, high)


# Calibration


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
        bins.append(
            {
                "from": b / BINS,
                "to": (b + 1) / BINS,
                "count": int(counts[b]),
                "predicted": float(predicted[b] / counts[b]),
                "observed": share.value,
                "low": share.low,
                "high": share.high,
            }
        )
    return {"error": error(happened), "chance": float(np.quantile(chance, 0.95)), "bins": bins}
