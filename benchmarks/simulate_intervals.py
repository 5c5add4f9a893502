"""Coverage of every 95 % interval and level of every test, by simulation with entities, folds and seeds.

    OMP_NUM_THREADS=1 python benchmarks/simulate_intervals.py > benchmarks/results/2026-11-18-intervals.md

Where the truth is known: metrics of `score` with 40 entities of ten rows; means over domains that share a
model in a fold, and over seeds; the tests of `diagnose` where there is nothing to find; and its gap, where
nothing differs, and where the relation is reversed in one domain (the truth is the mean over simulations).
The intervals of a recommendation are in `benchmarks/recommendation.py`.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy
import sklearn
from sklearn import metrics

import shoal
from shoal.experiments.diagnose import LEVEL, Sample, generalization_gap, gradient_agreement, shifts
from shoal.experiments.statistics import calibration, classification, holm, mean_interval, regression
from shoal.report.tables import Table

Random = np.random.Generator
Counts = dict[str, Counter[str]]
"""How often something was true, by column and row of a table; the key "" counts simulations."""
ENTITIES, EACH = 40, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=200, help="simulations of the intervals of metrics")
    parser.add_argument("--means", type=int, default=4000, help="simulations of the intervals of means")
    parser.add_argument("--tests", type=int, default=150, help="simulations of the tests of diagnose")
    parser.add_argument("--gaps", type=int, default=60, help="simulations of its gap")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    versions = f"scikit-learn {sklearn.__version__}, SciPy {scipy.__version__}, NumPy {np.__version__}"
    print(f"# Coverage of intervals and level of tests, {time.strftime('%Y-%m-%d')}\n")
    print(f"`OMP_NUM_THREADS=1 python {shlex.join(sys.argv)}`, shoal {shoal.__version__}, {versions},")
    print(f"Python {platform.python_version()}; one core.\n")
    print("Wanted: coverage of 93 to 97 %, tests significant in at most 5 %.\n")
    show("Intervals of `score`: coverage in %", score_intervals(args.intervals, args.seed))
    show("`mean_interval`: coverage in %", mean_intervals(args.means, args.seed))
    show("`diagnose` without a shift: p ≤ 0.05 in %", diagnose_tests(args.tests, args.seed))
    show("Gap of `diagnose`: coverage in %", gap_intervals(args.gaps, args.seed))
    print(f"{time.process_time():.0f} CPU-s.")


def show(title: str, found: Counts) -> None:
    """A column per kind of data, a row per interval or test, with the Monte Carlo error of a rate of 5 %."""
    error = 100 * math.sqrt(0.05 * 0.95 / min(counts[""] for counts in found.values()))
    print(f"## {title}\n\nMonte Carlo error ± {error:.1f}.\n")
    table = Table(["", *found])
    table.add("simulations", *(counts[""] for counts in found.values()))
    for name in dict.fromkeys(name for counts in found.values() for name in counts if name):
        known = (f"{100 * c[name] / c['']:.1f}" if name in c else "–" for c in found.values())
        table.add(name, *known)
    print(table.markdown(), "\n", flush=True)


def covers(low: float | None, truth: float, high: float | None) -> bool:
    return low is not None and high is not None and low <= truth <= high


# score


def predictions(rng: Random, count: int) -> tuple[Any, ...]:
    """Classes and probabilities, numbers and their predictions, and perfectly calibrated probabilities."""
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


def score_intervals(times: int, seed: int) -> Counts:
    truth, entity = truths(np.random.default_rng(seed)), np.repeat(np.arange(ENTITIES), EACH)
    kinds: dict[str, tuple[int, Any, Any]] = {
        "ten equal rows per entity": (ENTITIES, entity, entity),
        "ten independent rows per entity": (ENTITIES * EACH, slice(None), entity),
        "40 rows, no groups": (ENTITIES, slice(None), None),
        "ten equal rows, group ignored": (ENTITIES, entity, None),
    }
    found: Counts = defaultdict(Counter)
    for number, (kind, (count, rows, clusters)) in enumerate(kinds.items()):
        rng = np.random.default_rng([seed, number])
        for _ in range(times):
            y, p, value, output, stated, happened = (part[rows] for part in predictions(rng, count))
            both = classification(np.stack([1 - p, p], 1), y, clusters) | regression(output, value, clusters)
            for name, one in both.items():
                found[kind][name] += covers(one.low, truth[name], one.high)
            perfect = calibration(np.stack([1 - stated, stated], 1), happened.astype(int), clusters)
            found[kind]["calibration error below its limit"] += perfect["error"] <= perfect["chance"]
            found[kind][""] += 1
    return found


# Folds and seeds


def mean_intervals(times: int, seed: int) -> Counts:
    """20 domains in ten folds, whose model has an effect on both; ten domains with three seeds each."""
    found: Counts = {name: Counter({"": times}) for name in ("clustered", "values as independent")}
    rng, folds, domains = np.random.default_rng(seed), np.arange(20) // 2, np.arange(30) // 3
    for _ in range(times):
        values = {
            f"20 domains in 10 folds, effect of the model {e} sd": (effects(rng, folds, e), folds)
            for e in (0.0, 0.25, 0.5, 1.0)
        }
        values["10 domains with 3 seeds, seed sd 0.5"] = effects(rng, domains, 2.0) / 2, domains
        for name, (each, clusters) in values.items():
            for kind, own in zip(found, (clusters, None), strict=True):
                interval = mean_interval(each, own)
                found[kind][name] += covers(interval.low, 0, interval.high)
    return found


def effects(rng: Random, clusters: Any, effect: float) -> Any:
    return rng.normal(size=len(clusters)) + effect * rng.normal(size=int(clusters.max()) + 1)[clusters]


# diagnose


SIZES = {
    "4 × 8 entities × 8 rows": (4, 8, 8),
    "3 × 25 entities × 8 rows": (3, 25, 8),
    "4 × 75 rows": (4, 75, 1),
}
"""Domains, entities per domain, rows per entity."""


def sample(rng: Random, size: tuple[int, int, int], numeric: bool = False, shift: str = "") -> Sample:
    """Rows of an entity are equal but for noise, and have its label."""
    domains, entities, each = size
    place = np.arange(domains * entities) // entities
    x = rng.normal(size=(len(place), 6))
    x[:, :2] += (shift == "inputs") * np.array([0.5, 0.7]) * (place == 1)[:, None]
    sign = np.where((shift == "reversed") & (place == domains - 1), -1, 1)
    y = sign * 3 * x[:, 0] + 0.5 * x[:, 1] ** 2 + (1 if numeric else 0) * rng.normal(size=len(place))
    y = y if numeric else (rng.random(len(place)) < 1 / (1 + np.exp(0.5 - y))).astype(int)
    entity = np.repeat(np.arange(len(place)), each)
    x = x[entity] + (0.3 * rng.normal(size=(len(entity), 6)) if each > 1 else 0.0)
    x, classes = (x - x.mean(0)) / x.std(0), None if numeric else 2
    columns, names = {f"x{n}": [n] for n in range(6)}, [f"d{n}" for n in range(domains)]
    return Sample(x, y[entity], classes, place[entity], entity, columns, names)


def samples(times: int, seed: int, shift: str = "") -> Iterator[tuple[str, int, Sample]]:
    for number, (name, size) in enumerate(SIZES.items()):
        for numeric in (False, True) if size[2] == 1 else (False,):
            for repeat in range(times):
                rng = np.random.default_rng([seed, number, numeric, repeat])
                yield name + ", regression" * numeric, repeat, sample(rng, size, numeric, shift)


def diagnose_tests(times: int, seed: int) -> Counts:
    found: Counts = defaultdict(Counter)
    for kind, repeat, each in samples(times, seed):
        tests = [*shifts(each, repeat)[0], gradient_agreement(each, repeat)[0]]
        for test in tests:
            found[kind][test.name] += test.p <= LEVEL
        found[kind]["any, corrected (Holm)"] += min(holm([test.p for test in tests])) <= LEVEL
        found[kind][""] += 1
    for repeat in range(times):  # the inputs differ, what they say of the label does not
        rows = sample(np.random.default_rng([seed, 9, repeat]), SIZES["4 × 75 rows"], shift="inputs")
        relation = next(test for test in shifts(rows, repeat)[0] if test.name == "relation")
        found["4 × 75 rows, inputs differ"] += Counter({"": 1, "relation": relation.p <= LEVEL})
    return found


def gap_intervals(times: int, seed: int) -> Counts:
    found: Counts = {}
    for shift in ("", "reversed"):
        gaps = defaultdict(list)
        for kind, repeat, each in samples(times, seed, shift):
            if (gap := generalization_gap(each, repeat))["average"] is not None:
                rows = (gap["average"], *gap["gaps"])
                gaps[kind].append([(row["gap"], row["low"], row["high"]) for row in rows])
        for kind, values in gaps.items():
            array = np.array(values)
            truth = array[:, :, 0].mean(0) if shift else 0
            inside = (array[:, :, 1] <= truth) & (truth <= array[:, :, 2])
            name = f"{kind}{', reversed in one' if shift else ''}"
            found[name] = Counter({"": len(array), "average": int(inside[:, 0].sum())})
            found[name]["each domain"] = inside[:, 1:].mean(1).sum()
    return found


if __name__ == "__main__":
    main()
