"""Coverage of every 95 % interval and level of every test, by simulation with entities, folds and seeds.

    OMP_NUM_THREADS=1 python benchmarks/simulate_intervals.py > results.md

Where the truth is known: metrics of `score` with 40 entities of ten rows; means over domains that share a
model in a fold, and over seeds; the tests of `diagnose` and the interval of its gap in data without a shift.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
import sklearn
from sklearn import metrics

import shoal
from shoal.experiments.diagnose import Sample, generalization_gaps, gradient_agreement, shifts
from shoal.experiments.shift_tests import LEVEL, Rows
from shoal.experiments.statistics import calibration, classification, holm, mean_interval, regression
from shoal.report.tables import Table

Random = np.random.Generator
ENTITIES, EACH = 40, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=400, help="simulations of the intervals of metrics")
    parser.add_argument("--means", type=int, default=4000, help="simulations of the intervals of means")
    parser.add_argument("--tests", type=int, default=150, help="simulations of the tests of diagnose")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    versions = f"shoal {shoal.__version__}, scikit-learn {sklearn.__version__}, SciPy {scipy.__version__}"
    print(f"{versions}, NumPy {np.__version__}, Python {platform.python_version()}; one core.\n")
    show("Intervals of `score`: coverage in %", args.intervals, score_intervals(args.intervals, args.seed))
    show("`mean_interval`: coverage in %", args.means, mean_intervals(args.means, args.seed))
    show("`diagnose` without a shift: p ≤ 0.05 in %", args.tests, diagnose_tests(args.tests, args.seed))
    print(f"{time.perf_counter() - start:.0f} s.")


def show(title: str, times: int, columns: dict[str, Counter[str]]) -> None:
    """A column per kind of data, a row per interval or test."""
    error = 100 * math.sqrt(0.95 * 0.05 / times)
    table = Table(["", *columns])
    for name in dict.fromkeys(name for counts in columns.values() for name in counts):
        table.add(name, *(f"{100 * counts[name] / times:.1f}" for counts in columns.values()))
    print(f"## {title}\n\n{times:,} simulations; Monte Carlo error ± {error:.1f}.\n\n{table.markdown()}\n")


# score


def predictions(rng: Random, count: int) -> tuple[Any, ...]:
    """Classes and probabilities, and numbers and their predictions."""
    y, number = rng.integers(0, 2, count), rng.normal(size=count)
    p = 1 / (1 + np.exp(-rng.normal(0, 1.2, count) - 0.96 * (2 * y - 1)))
    stated = rng.beta(2, 3, count)
    return y, p, number, 0.8 * number + rng.normal(0, 0.5, count), stated, rng.random(count) < stated


def truths(rng: Random) -> dict[str, float]:
    y, p, number, output, *_ = predictions(rng, 400_000)
    return {
        "accuracy": metrics.accuracy_score(y, p > 0.5),
        "balanced accuracy": metrics.balanced_accuracy_score(y, p > 0.5),
        "AUC": metrics.roc_auc_score(y, p),
        "average precision": metrics.average_precision_score(y, p),
        "log loss": metrics.log_loss(y, p),
        "Brier score": metrics.brier_score_loss(y, p),
        "MAE": metrics.mean_absolute_error(number, output),
        "RMSE": metrics.root_mean_squared_error(number, output),
        "R²": metrics.r2_score(number, output),
        "mean error": 0.0,
    }


def score_intervals(times: int, seed: int) -> dict[str, Counter[str]]:
    truth = truths(np.random.default_rng(seed))
    entity = np.repeat(np.arange(ENTITIES), EACH)
    kinds: dict[str, tuple[int, Any, Any]] = {
        "ten equal rows per entity": (ENTITIES, entity, entity),
        "ten independent rows per entity": (ENTITIES * EACH, slice(None), entity),
        "40 rows, no groups": (ENTITIES, slice(None), None),
        "ten equal rows, group ignored": (ENTITIES, entity, None),
    }
    found = {}
    for number, (kind, (count, rows, clusters)) in enumerate(kinds.items()):
        rng, counts = np.random.default_rng([seed, number]), Counter(dict.fromkeys(truth, 0))
        for _ in range(times):
            y, p, value, output, stated, happened = (part[rows] for part in predictions(rng, count))
            both = classification(np.stack([1 - p, p], 1), y, clusters) | regression(output, value, clusters)
            for name, estimate in both.items():
                counts[name] += bool(
                    estimate.low is not None and estimate.low <= truth[name] <= estimate.high
                )
            perfect = calibration(np.stack([1 - stated, stated], 1), happened.astype(int), clusters)
            counts["calibration error below its limit, if perfect"] += perfect["error"] <= perfect["chance"]
        found[kind] = counts
    return found


# Folds and seeds


def mean_intervals(times: int, seed: int) -> dict[str, Counter[str]]:
    """20 domains in ten folds, whose model has an effect on both; ten domains with three seeds each."""
    found = {name: Counter[str]() for name in ("clustered", "values as independent")}
    rng, folds, domains = (
        np.random.default_rng(seed),
        np.repeat(np.arange(10), 2),
        np.repeat(np.arange(10), 3),
    )
    for _ in range(times):
        values = {
            f"20 domains in 10 folds, effect of the model {e} sd": (_effects(rng, folds, e), folds)
            for e in (0.0, 0.25, 0.5, 1.0)
        }
        values["10 domains with 3 seeds, seed sd 0.5"] = _effects(rng, domains, 2.0) / 2, domains
        for name, (each, clusters) in values.items():
            for kind, own in zip(found, (clusters, None), strict=True):
                interval = mean_interval(each, own)
                found[kind][name] += interval.low <= 0 <= interval.high  # type: ignore[operator]
    return found


def _effects(rng: Random, clusters: Any, effect: float) -> Any:
    return rng.normal(size=len(clusters)) + effect * rng.normal(size=int(clusters.max()) + 1)[clusters]


# diagnose


def without_shift(rng: Random, domains: int, entities: int, each: int, numeric: bool = False) -> Sample:
    """Domains of entities of equal rows but for noise; the label is the entity's."""
    count = domains * entities
    entity = np.repeat(np.arange(count), each)
    x = rng.normal(size=(count, 6))
    y = x[:, 0] + x[:, 1] ** 2 + rng.normal(size=count)
    y = y if numeric else (rng.random(count) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(int)
    x = x[entity] + (0.3 * rng.normal(size=(len(entity), 6)) if each > 1 else 0.0)
    x = (x - x.mean(0)) / x.std(0)
    rows = Rows(x, y[entity], None if numeric else 2, entity // entities, entity, [[n] for n in range(6)])
    return Sample(tuple(f"d{n}" for n in range(domains)), (entities * each,) * domains, rows, (), (), {})


KINDS: dict[str, Callable[[Random], Sample]] = {
    "4 domains of 8 entities of 8 rows": lambda rng: without_shift(rng, 4, 8, 8),
    "3 domains of 25 entities of 8 rows": lambda rng: without_shift(rng, 3, 25, 8),
    "4 domains of 75 independent rows": lambda rng: without_shift(rng, 4, 75, 1),
    "the same, regression": lambda rng: without_shift(rng, 4, 75, 1, numeric=True),
}


def diagnose_tests(times: int, seed: int) -> dict[str, Counter[str]]:
    found = {}
    for number, (kind, make) in enumerate(KINDS.items()):
        counts: Counter[str] = Counter()
        for repeat in range(times):
            sample = make(np.random.default_rng([seed, number, repeat]))
            tests = [*shifts(sample.rows, repeat)[0], *gradient_agreement(sample, repeat)[0]]
            for test in tests:
                counts[test.name] += test.p <= LEVEL
            counts["any, corrected (Holm)"] += min(holm([test.p for test in tests])) <= LEVEL
            average = generalization_gaps(sample, repeat)[-1]
            counts["0 outside the interval of the average gap"] += not average["low"] <= 0 <= average["high"]
            print(f"{kind}: {repeat + 1}, {dict(counts)}", file=sys.stderr, flush=True)
        found[kind] = counts
    return found


if __name__ == "__main__":
    main()
