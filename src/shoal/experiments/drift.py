"""How a new table differs from the columns that a model was trained on, column by column.

A model keeps summaries of its training columns (``inputs["training"]``): quantiles of numbers, shares of
categories, the share that is missing. A column is flagged if it differs from its summary by more than
sampling explains (Kolmogorov–Smirnov for numbers, χ² for categories and for missing cells; p below 0.01
divided by the number of tests) and by enough to matter. Where rows belong to entities, all rows of one count
as one in the tests.
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

Array = NDArray[Any]
LEVEL = 0.01
"""Probability of any flag in a table that has not changed."""
SMALLEST, SMALLEST_MISSING = 0.05, 0.02
"""The smallest differences that are flagged: of distributions, and of the share of missing cells."""
RESOLUTION = 0.01
"""Of the 101 quantiles in a summary, as a share of rows."""
RARE = 5
"""Categories with fewer expected rows are counted together."""


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
    preprocessing: Preprocessing,
    training: Mapping[str, Any],
    table: Mapping[str, Column],
    entities: int | None = None,
) -> list[ColumnDrift]:
    """The drift of every column that ``training`` summarizes: flagged ones first, then by the difference.

    ``entities`` is the number of entities in the table, if rows are not independent. The training rows are
    assumed to have as many rows per entity.
    """
    found = []
    for step in (step for step in preprocessing.steps if step.name in training):
        column = table[step.name]
        found.append(_compare(step, training[step.name], column, (entities or len(column)) / len(column)))
    level = LEVEL / max(1, sum((one.p is not None) + 1 for one in found))

    def flagged(one: ColumnDrift) -> ColumnDrift:
        values = one.p is not None and one.p < level and (one.distance or 0) >= SMALLEST
        missing = one.p_missing < level and abs(one.missing[1] - one.missing[0]) >= SMALLEST_MISSING
        return replace(one, flags=("values",) * values + ("missing",) * missing)

    def order(one: ColumnDrift) -> tuple[Any, ...]:
        return not one.flags, -max(one.distance or 0, abs(one.missing[1] - one.missing[0])), one.column

    return sorted(map(flagged, found), key=order)


def _compare(step: Any, about: Mapping[str, Any], column: Column, independent: float) -> ColumnDrift:
    """One column; ``independent`` is the share of rows that count in the tests."""
    rows, then = int(about["rows"]), float(about["missing"])
    details: dict[str, Any] = {}
    if isinstance(step, Number):
        values, unparsed = values_of(column, step.kind, step.how)
        known = int((~np.isnan(values)).sum())
        details = {"unparsed": sum(unparsed.values())}
        quantiles = np.asarray(about["quantiles"], np.float64)
        if known and len(quantiles):
            counts = (rows * (1 - then), known)
            details |= _numbers(step, quantiles, np.sort(values[~np.isnan(values)]), counts, independent)
    elif isinstance(step, Category):
        names, codes = step.categories(column)
        known = int((codes >= 0).sum())
        if known and then < 1:
            each = dict(
                zip(map(str, names), np.bincount(codes[codes >= 0], minlength=len(names)), strict=True)
            )
            details = _categories(step, about["shares"], each, (rows * (1 - then), known), independent)
    else:
        known = sum(text is not None and not is_missing(text) for text in column.texts())
    now = 1 - known / len(column)
    sizes = np.array([rows, len(column)]) * independent
    p = _same_shares(np.array([[then, 1 - then], [now, 1 - now]]) * sizes[:, None])
    return ColumnDrift(step.name, str(about["kind"]), (then, now), p, **details)


def _numbers(
    step: Number, quantiles: Array, known: Array, counts: tuple[float, float], independent: float
) -> dict[str, Any]:
    from scipy.special import kolmogorov

    # The shares of values below and up to each quantile, then and now; many quantiles may be equal.
    edges, first, count = np.unique(quantiles, return_index=True, return_counts=True)
    then = np.stack([first, first + count - 1]) / (len(quantiles) - 1)
    now = np.stack([np.searchsorted(known, edges, side) for side in ("left", "right")]) / len(known)
    distance = max(0.0, float(np.abs(now - then).max()) - RESOLUTION)
    tenths = np.unique(np.searchsorted(then[1], np.arange(1, 10) / 10 - 1e-9))
    tenths = tenths[then[1][tenths] < 1]
    shares = [np.diff([0.0, *up_to[tenths], 1.0]) for up_to in (then[1], now[1])]
    size = np.sqrt(independent * counts[0] * counts[1] / (counts[0] + counts[1]))

    def shown(value: float) -> str:
        text = date_text(round(value)) if step.kind == "date" else f"{value:.4g}"
        return text if edges[0] <= value <= edges[-1] else f"{text}, outside the training range"

    return {
        "psi": stability(shares[0], shares[1], counts),
        "distance": distance,
        "p": float(kolmogorov((size + 0.12 + 0.11 / size) * distance)),  # too large where values are tied
        "median": (shown(float(quantiles[len(quantiles) // 2])), shown(float(np.median(known)))),
    }


def _categories(
    step: Category,
    shares: Mapping[str, float],
    each: dict[str, Any],
    counts: tuple[float, float],
    independent: float,
) -> dict[str, Any]:
    others = {name: int(count) for name, count in each.items() if name not in step.values and count}
    new = {} if step.other else others  # rare categories and new ones share a feature
    each["other"] = sum(others.values()) if step.other else each.get("other", 0)
    then = np.array([*shares.values(), 0.0], np.float64)
    now = np.array([*(each.get(name, 0) for name in shares), sum(new.values())]) / counts[1]
    sizes = np.array(counts)[:, None] * independent
    return {
        "psi": stability(then, now, counts),
        "distance": float(np.abs(now - then).sum() / 2),
        "p": _same_shares(np.stack([then, now]) * sizes) if shares else None,
        "new": sum(new.values()) / counts[1],
        "new_categories": dict(sorted(new.items(), key=lambda pair: -pair[1])[:10]),
    }


def _same_shares(table: Array) -> float:
    """The p of two rows of counts being drawn from the same shares; rare columns are counted together."""
    from scipy.stats import chi2_contingency

    rare = (table.sum(1, keepdims=True) * table.sum(0) / table.sum()).min(0) < RARE
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    table = table[:, table.sum(0) > 0]
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def stability(then: Sequence[float] | Array, now: Sequence[float] | Array, rows: Sequence[float]) -> float:
    """The population stability index Σ (now − then) log(now / then); empty bins count as half a row."""
    shares = [np.maximum(np.asarray(s, np.float64), 0.5 / n) for s, n in zip((then, now), rows, strict=True)]
    a, b = (s / s.sum() for s in shares)
    return float(((b - a) * np.log(b / a)).sum())
