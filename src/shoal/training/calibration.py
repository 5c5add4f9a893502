"""Calibrated probabilities: one temperature for the logits of a classifier, and how reliable they are."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from shoal.training.setup import Setup

MOST = 100.0
"""Temperatures are from 1/100 to 100; logits that are never wrong would be scaled without end."""
EXAMPLES, PRIOR = 10_000, 1.0
"""Validation examples that the temperature of a model is fitted on, at most, and the prior."""


def fit_temperature(logits: ArrayLike, labels: ArrayLike, prior: float = math.inf) -> float:
    """Return the temperature T for which softmax(z / T) has the lowest mean negative log-likelihood.

    The loss is convex in 1/T, so that its minimum is where the derivative, mean (E_p[z] − z_y), is zero. Fit
    it on held-out domains: on domains that were trained on, models are more often right than on new ones.

    >>> z = [[0.0, 4.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]]  # 98 % sure, and right in 3 of 4
    >>> round(fit_temperature(z, [1, 1, 0, 0]), 2)
    3.64

    Args:
        logits: logits (n, classes).
        labels: class of each example (n,).
        prior: standard deviation of a normal prior of log T with mean 0; without one, a few examples that
            are all right make T 1/100.

    Reference: Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    from scipy.optimize import brentq
    from scipy.special import softmax

    z, y = np.asarray(logits, np.float64), np.asarray(labels)
    right, end = z[np.arange(len(y)), y].mean(), np.log(MOST)

    def derivative(log_scale: float) -> float:
        scale = np.exp(log_scale)
        slope = (softmax(scale * z, axis=1) * z).sum(1).mean() - right
        return float(slope + log_scale / (prior**2 * scale * len(y)))

    if derivative(-end) >= 0:
        return MOST
    return 1 / MOST if derivative(end) <= 0 else float(np.exp(-brentq(derivative, -end, end)))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 10) -> dict[str, Any]:
    """Return the accuracy of predictions by their confidence, the probability of the predicted class.

    Args:
        probabilities: probabilities (n, classes).
        labels: class of each example (n,).
        bins: number of bins of equal width, each without its lower edge.

    Returns:
        ``edges`` of the bins; for each bin ``confidence`` and ``accuracy`` (means, ``None`` if it is empty)
        and ``counts``; and ``ece``, the mean over examples of |accuracy − confidence| of their bin.
    """
    p = np.asarray(probabilities, np.float64)
    confidence, correct = p.max(1), p.argmax(1) == np.asarray(labels)
    edges = np.linspace(0, 1, bins + 1)
    number = np.clip(np.searchsorted(edges, confidence) - 1, 0, bins - 1)
    counts, sure, right = (np.bincount(number, w, bins).tolist() for w in (None, confidence, correct))
    return {
        "edges": edges.tolist(),
        "confidence": [s / n if n else None for s, n in zip(sure, counts, strict=True)],
        "accuracy": [r / n if n else None for r, n in zip(right, counts, strict=True)],
        "counts": counts,
        "ece": float(np.abs(np.subtract(sure, right)).sum() / len(p)),
    }


def calibration(logits: ArrayLike, labels: ArrayLike, source: str = "validation") -> dict[str, Any]:
    """The temperature, what it was fitted on, and the reliability before and after, for ``inputs.json``."""
    from scipy.special import softmax

    z = np.asarray(logits, np.float64)
    temperature = fit_temperature(z, labels, prior=PRIOR)
    before, after = (reliability(softmax(z / t, axis=1), labels) for t in (1.0, temperature))
    return {"temperature": temperature, "on": source, "count": len(z), "before": before, "after": after}


def calibrated(setup: Setup) -> dict[str, Any] | None:
    """The calibration of a trained classifier on validation examples; ``None`` without such, or if off.

    All processes of the training call it.
    """
    options, kind = setup.options, setup.task.kind
    possible = options["calibrate"] and not options["retrain"] and "validation" in setup.evaluator.splits
    if not possible or kind not in ("classification", "ordinal"):
        return None
    evaluator = setup.evaluator_of(["validation"], {"validation": EXAMPLES})
    with contextlib.closing(evaluator.loader):
        found = evaluator.outcomes(setup.model)["validation"]
    known = np.isfinite(found.output).all(1)
    return calibration(found.output[known], found.y[known]) if known.any() else None
