"""How a new table differs from the columns that a model was trained on, both given as summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogorov
from scipy.stats import chi2_contingency, ks_2samp

Array = NDArray[Any]
Summary = Mapping[str, Any]
LEVEL = 0.01
"""Probability of any flag in a table that has not changed."""
SMALLEST, SMALLEST_MISSING = 0.05, 0.02
"""The smallest differences that are flagged: of distributions, and of the share of missing cells."""
RARE = 5
"""Categories with fewer expected rows are counted together."""


@dataclass(frozen=True)
class ColumnDrift:
    """The difference of one column between training and new data.

    Attributes:
        column: name of the column.
        kind: kind of the column.
        missing: share of missing cells, in training and now.
        distance: largest difference of the distribution functions; of categories, the total variation.
        p: p-value of the distance.
        median: medians of numbers and dates, as text.
        new_categories: categories that are not in the training data, with their counts.
        new: share of cells with one of these.
        unparsed: number of cells that could not be read.
        flags: what differs by more than sampling explains: ``values``, ``missing``.
    """

    column: str
    kind: str
    missing: tuple[float, float]
    distance: float | None = None
    p: float | None = None
    median: tuple[str, str] | None = None
    new_categories: Mapping[str, int] = field(default_factory=dict)
    new: float = 0.0
    unparsed: int = 0
    flags: tuple[str, ...] = ()

    def words(self) -> str:
        """Return what is different, in words."""
        parts = []
        if "values" in self.flags and self.median is not None:
            parts.append(f"median {self.median[0]}, now {self.median[1]}")
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
    training: Mapping[str, Summary],
    new: Mapping[str, Summary],
    unseen: Mapping[str, Mapping[str, int]],
    unparsed: Mapping[str, Mapping[str, int]],
    entities: int | None = None,
) -> list[ColumnDrift]:
    """The drift of every column that ``training`` summarizes: flagged ones first, then by the difference.

    A column is flagged if p is below ``LEVEL`` divided by the number of tests, and the difference matters.

    Args:
        training: summaries of the training columns (:mod:`shoal.data.tables.encode`).
        new: those of the new table.
        unseen: counts of categories that are not in the training data, by column.
        unparsed: counts of cells that could not be read, by column.
        entities: number of entities in the new table, if its rows are not independent. The training rows are
            assumed to have as many rows per entity.
    """
    names, found = [name for name in new if name in training], []
    level = LEVEL / max(1, 2 * len(names))
    for name in names:
        then, now = training[name], new[name]
        missing, rows = (np.array([of[part] for of in (then, now)], float) for part in ("missing", "rows"))
        independent = rows * (entities or rows[1]) / rows[1]
        fields, counts, flags = dict[str, Any](), independent * (1 - missing), list[str]()
        if counts.min() > 0 and ("quantiles" in then or "shares" in then):
            fields = (_numbers if "quantiles" in then else _categories)(then, now, counts)
            if fields["p"] < level and fields["distance"] >= SMALLEST:
                flags.append("values")
        both = np.column_stack([missing, 1 - missing]) * independent[:, None]
        if abs(missing[1] - missing[0]) >= SMALLEST_MISSING and _same_shares(both) < level:
            flags.append("missing")
        fields |= {"missing": (float(missing[0]), float(missing[1])), "flags": tuple(flags)}
        fields["new_categories"] = dict(Counter(unseen.get(name, {})).most_common(10))
        fields["unparsed"] = sum(unparsed.get(name, {}).values())
        found.append(ColumnDrift(name, str(then["kind"]), **fields))
    return sorted(found, key=lambda one: (not one.flags, -(one.distance or 0), one.column))


def _categories(then: Summary, now: Summary, counts: Array) -> dict[str, Any]:
    shares = np.array([[summary["shares"].get(c, 0.0) for c in then["shares"]] for summary in (then, now)])
    shares = np.column_stack([shares, np.maximum(1 - shares.sum(1), 0)])  # the last: new categories
    distance = float(np.abs(shares[1] - shares[0]).sum() / 2)
    return {"distance": distance, "p": _same_shares(shares * counts[:, None]), "new": float(shares[1, -1])}


def _numbers(then: Summary, now: Summary, counts: Array) -> dict[str, Any]:
    quantiles = np.array([then["quantiles"], now["quantiles"]])
    count, statistic = quantiles.shape[1], float(ks_2samp(*quantiles, method="asymp").statistic)
    distance = max(0.0, statistic - 1 / (count - 1))  # the resolution of the quantiles
    size = np.sqrt(counts.prod() / counts.sum())

    def shown(value: float) -> str:
        text = f"{value:.4g}"
        if then["kind"] == "date":
            text = f"{datetime.fromtimestamp(86400 * round(value), UTC):%Y-%m-%d}"
        known = quantiles[0][0] <= value <= quantiles[0][-1]
        return text if known else f"{text}, outside the training range"

    return {
        "distance": distance,
        "p": float(kolmogorov((size + 0.12 + 0.11 / size) * distance)),  # too large where values are tied
        "median": tuple(shown(float(q[count // 2])) for q in quantiles),
    }


def _same_shares(table: Array) -> float:
    """The p of two rows of counts being drawn from the same shares; rare columns are counted together."""
    rare = (table.sum(1, keepdims=True) * table.sum(0) / table.sum()).min(0) < RARE
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    table = table[:, table.sum(0) > 0]
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0
