"""How a new table differs from the columns that a model was trained on, column by column.

A model keeps summaries of its training columns (``inputs["training"]``): quantiles of numbers, shares of
categories, the share that is missing. A column is flagged if it differs from its summary by more than
sampling explains (Kolmogorov–Smirnov for numbers, χ² for categories, two proportions for missing cells; p
below 0.01 divided by the number of tests) and by enough to matter. Rows are taken as independent; rows that
come in clusters differ more than the tests expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.cells import is_missing
from shoal.data.columns import values_of
from shoal.data.reading import Column, date_text
from shoal.data.table import Category, Number, Preprocessing
from shoal.experiments.statistics import chi_square, kolmogorov, two_proportions

Array = NDArray[Any]
LEVEL = 0.01
"""Probability of any flag in a table that has not changed."""
SMALLEST, SMALLEST_MISSING = 0.05, 0.02
"""The smallest differences that are flagged: of distributions, and of the share of missing cells."""
RESOLUTION = 0.01
"""Of the 101 quantiles in a summary, as a share of rows."""


@dataclass(frozen=True)
class ColumnDrift:
    """The difference of one column between training and new data.

    Attributes:
        column: name of the column.
        kind: kind of the column.
        missing: share of missing cells, in training and now.
        p_missing: p-value of the difference of the two.
        psi: population stability index, over tenths of the training values or over categories.
        distance: largest difference of the distribution functions; of categories, the total variation.
        p: p-value of the distance.
        median: medians of numbers and dates, as text.
        new: share of cells with a category that is not in the training data.
        new_categories: the most frequent of these categories, with their counts.
        unparsed: number of cells that could not be read.
        flags: what differs by more than sampling explains: ``values``, ``missing``.
    """

    column: str
    kind: str
    missing: tuple[float, float]
    p_missing: float
    psi: float | None = None
    distance: float | None = None
    p: float | None = None
    median: tuple[str, str] | None = None
    new: float = 0.0
    new_categories: Mapping[str, int] = field(default_factory=dict)
    unparsed: int = 0
    flags: tuple[str, ...] = ()

    def flagged(self, level: float) -> ColumnDrift:
        """With the flags of tests at this level."""
        values = self.p is not None and self.p < level and (self.distance or 0) >= SMALLEST
        missing = self.p_missing < level and abs(self.missing[1] - self.missing[0]) >= SMALLEST_MISSING
        return replace(self, flags=("values",) * values + ("missing",) * missing)

    def words(self) -> str:
        """Return what is different, in words."""
        parts = []
        if "values" in self.flags and self.median is not None:
            then, now = self.median
            parts.append(f"median {then}, now {now}" if then != now else f"spread changed (median {then})")
        elif "values" in self.flags:
            parts.append("different category proportions")
        if self.new:
            some = ", ".join(map(repr, list(self.new_categories)[:3]))
            parts.append(f"{self.new:.1%} not in the training data ({some})")
        if "missing" in self.flags:
            parts.append(f"missing {self.missing[0]:.1%}, now {self.missing[1]:.1%}")
        if self.unparsed:
            parts.append(f"{self.unparsed:,} cells could not be read")
        return "; ".join(parts)


def column_drift(
    preprocessing: Preprocessing, training: Mapping[str, Any], table: Mapping[str, Column]
) -> list[ColumnDrift]:
    """The drift of every column that ``training`` summarizes: flagged ones first, then by the difference."""
    steps: Sequence[Any] = [step for step in preprocessing.steps if step.name in training]
    found = [_compare(step, training[step.name], table[step.name]) for step in steps]
    level = LEVEL / max(1, sum((one.p is not None) + 1 for one in found))

    def order(one: ColumnDrift) -> tuple[Any, ...]:
        return not one.flags, -max(one.distance or 0, abs(one.missing[1] - one.missing[0])), one.column

    return sorted((one.flagged(level) for one in found), key=order)


def _compare(step: Any, about: Mapping[str, Any], column: Column) -> ColumnDrift:
    compare = _numbers if isinstance(step, Number) else _categories if isinstance(step, Category) else _text
    known, details = compare(step, about, column)
    then, now = float(about["missing"]), 1 - known / len(column)
    p_missing = two_proportions(then, int(about["rows"]), now, len(column))
    return ColumnDrift(step.name, str(about["kind"]), (then, now), p_missing, **details)


def _text(step: Any, about: Mapping[str, Any], column: Column) -> tuple[int, dict[str, Any]]:
    return sum(text is not None and not is_missing(text) for text in column.texts()), {}


def _numbers(step: Number, about: Mapping[str, Any], column: Column) -> tuple[int, dict[str, Any]]:
    values, unparsed = values_of(column, step.kind, step.how)
    known, details = np.sort(values[~np.isnan(values)]), {"unparsed": sum(unparsed.values())}
    quantiles = np.asarray(about["quantiles"], np.float64)
    if not len(known) or not len(quantiles):
        return len(known), details
    # The shares of values below and up to each quantile, then and now; many quantiles may be equal.
    edges, first, count = np.unique(quantiles, return_index=True, return_counts=True)
    then = np.stack([first, first + count - 1]) / (len(quantiles) - 1)
    now = np.stack([np.searchsorted(known, edges, side) for side in ("left", "right")]) / len(known)
    distance = max(0.0, float(np.abs(now - then).max()) - RESOLUTION)
    tenths = np.unique(np.searchsorted(then[1], np.arange(1, 10) / 10 - 1e-9))
    tenths = tenths[then[1][tenths] < 1]
    shares = [np.diff([0.0, *up_to[tenths], 1.0]) for up_to in (then[1], now[1])]
    rows = round(int(about["rows"]) * (1 - float(about["missing"]))), len(known)

    def shown(value: float) -> str:
        text = date_text(round(value)) if step.kind == "date" else f"{value:.4g}"
        return text if edges[0] <= value <= edges[-1] else f"{text}, outside the training range"

    return len(known), details | {
        "psi": stability(shares[0], shares[1], rows),
        "distance": distance,
        "p": kolmogorov(distance, *rows),
        "median": (shown(float(quantiles[len(quantiles) // 2])), shown(float(np.median(known)))),
    }


def _categories(step: Category, about: Mapping[str, Any], column: Column) -> tuple[int, dict[str, Any]]:
    names, codes = step.categories(column)
    counts = dict(zip(map(str, names), np.bincount(codes[codes >= 0], minlength=len(names)), strict=True))
    known = int(sum(counts.values()))
    rows = round(int(about["rows"]) * (1 - float(about["missing"]))), known
    if not all(rows):
        return known, {}
    others = {name: int(count) for name, count in counts.items() if name not in step.values and count}
    shares = {str(name): float(share) for name, share in about["shares"].items()}
    new = {} if step.other else others  # rare categories and new ones share a feature
    counts["other"] = sum(others.values()) if step.other else counts.get("other", 0)
    then = np.array([*shares.values(), 0.0])
    now = np.array([*(counts.get(name, 0) for name in shares), sum(new.values())]) / known
    return known, {
        "psi": stability(then, now, rows),
        "distance": float(np.abs(now - then).sum() / 2),
        "p": chi_square(then * rows[0], now * rows[1]) if shares else None,
        "new": sum(new.values()) / known,
        "new_categories": dict(sorted(new.items(), key=lambda pair: -pair[1])[:10]),
    }


def stability(then: Sequence[float] | Array, now: Sequence[float] | Array, rows: tuple[int, int]) -> float:
    """The population stability index Σ (now − then) log(now / then); empty bins count as half a row."""
    shares = [np.maximum(np.asarray(s, np.float64), 0.5 / n) for s, n in zip((then, now), rows, strict=True)]
    a, b = (s / s.sum() for s in shares)
    return float(((b - a) * np.log(b / a)).sum())
