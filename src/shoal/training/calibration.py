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
    it on predictions for domains that were held out from the training: on domains that were trained on,
    models are more often right than on new ones.

    >>> z = [[0.0, 4.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]]  # 98 % sure, and right in 3 of 4
    >>> round(fit_temperature(z, [1, 1, 0, 0]), 2)
    3.64

    Args:
        logits: logits (n, classes).
        labels: class of each example (n,).
        prior: standard deviation of a normal prior of log T with mean 0. Without a prior, a few examples that
            are all right make T 1/100.

    Reference: Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    from scipy.optimize import brentq
    from scipy.special import softmax

    z, y = np.asarray(logits, np.float64), np.asarray(labels)
    right = z[np.arange(len(y)), y].mean()

    def derivative(log_scale: float) -> float:
        scale = np.exp(log_scale)
        slope = (softmax(scale * z, axis=1) * z).sum(1).mean() - right
        return float(slope + log_scale / (prior**2 * scale * len(y)))

    end = np.log(MOST)
    if derivative(-end) >= 0:
        return MOST
    if derivative(end) <= 0:
        return 1 / MOST
    return float(np.exp(-brentq(derivative, -end, end)))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 10) -> dict[str, Any]:
    """Return the accuracy of predictions by their confidence, in bins of equal width, as plain data.

    The confidence of a prediction is its probability. The expected calibration error is the mean over
    examples of |accuracy − mean confidence| of their bin.

    Args:
        probabilities: probabilities (n, classes).
        labels: class of each example (n,).
        bins: number of bins, each without its lower edge.

    Returns:
        ``edges`` of the bins; for each bin ``confidence`` and ``accuracy`` (means, ``None`` if it is empty)
        and ``counts``; and ``ece``, the expected calibration error.
    """
    p = np.asarray(probabilities, np.float64)
    confidence, correct = p.max(1), p.argmax(1) == np.asarray(labels)
    edges = np.linspace(0, 1, bins + 1)
    number = np.clip(np.searchsorted(edges, confidence) - 1, 0, bins - 1)
    counts, sure, right = (np.bincount(number, w, bins) for w in (None, confidence, correct))
    means = [
        [float(v / n) if n else None for v, n in zip(sums, counts, strict=True)] for sums in (sure, right)
    ]
    return {
        "edges": edges.tolist(),
        "confidence": means[0],
        "accuracy": means[1],
        "counts": counts.astype(int).tolist(),
        "ece": float(np.abs(sure - right).sum() / len(p)),
    }


def calibration(logits: ArrayLike, labels: ArrayLike, source: str = "validation") -> dict[str, Any]:
    """The temperature, how many examples of what it was fitted on (``source``), and the reliability before
    and after, as ``inputs.json`` has it."""
    from scipy.special import softmax

    z = np.asarray(logits, np.float64)
    temperature = fit_temperature(z, labels, prior=PRIOR)
    before, after = (reliability(softmax(z / t, axis=1), labels) for t in (1.0, temperature))
    return {"temperature": temperature, "on": source, "count": len(z), "before": before, "after": after}


def calibrated(setup: Setup) -> dict[str, Any] | None:
    """The calibration of a classifier that was trained, on its validation examples; ``None`` where there is
    none: without validation, where the model was trained on it, or where the option is off.

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
