"""How a new table differs from the columns that a model was trained on, column by column.

A model keeps summaries of its training columns (``inputs["training"]``): quantiles of numbers, shares of
categories, the share that is missing. New rows are counted against these some at a time, and are not kept.

A column is flagged when the difference is larger than sampling explains (Kolmogorov–Smirnov for numbers, χ²
for categories, two proportions for missing cells; p below 0.01 divided by the number of tests) and not too
small to matter. Rows are taken as independent; rows that come in clusters differ more than the tests expect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.cells import is_missing
from shoal.data.columns import values_of
from shoal.data.reading import Column, Table, date_text
from shoal.data.table import Category, Date, Number, Preprocessing
from shoal.experiments.statistics import chi_square, kolmogorov, two_proportions

Array = NDArray[Any]
LEVEL = 0.01
"""Of all flags together where nothing has changed."""
MATTERS, MISSING_MATTERS = 0.05, 0.02
"""The least differences that are flagged, as shares of the rows: of distributions, and of missing cells."""
GRAIN = 0.01
"""What 101 quantiles leave open of a share of rows."""


@dataclass(frozen=True)
class ColumnDrift:
    """One column, then (in training) and now."""

    column: str
    kind: str
    missing: tuple[float, float]
    p_missing: float
    psi: float | None = None
    """The population stability index over tenths of the training values, or over categories."""
    distance: float | None = None
    """The largest difference of the two distribution functions, or of categories half the sum of
    differences."""
    p: float | None = None
    unseen: float | None = None
    """The share of known cells that hold a category that training never saw."""
    new: Mapping[str, int] | None = None
    """The commonest of these."""
    unparsed: int = 0
    middle: tuple[str, str] | None = None
    """The medians of numbers and dates."""
    flags: tuple[str, ...] = ()
    """What differs more than sampling explains: ``values``, ``missing``."""

    @property
    def size(self) -> float:
        """What columns are sorted by."""
        return max(self.distance or 0.0, abs(self.missing[1] - self.missing[0]))

    def flagged(self, level: float) -> ColumnDrift:
        values = self.p is not None and self.p < level and (self.distance or 0.0) >= MATTERS
        missing = self.p_missing < level and abs(self.missing[1] - self.missing[0]) >= MISSING_MATTERS
        return replace(self, flags=("values",) * values + ("missing",) * missing)

    def words(self) -> str:
        """What is different, in plain words."""
        parts = []
        if "values" in self.flags and self.middle is not None:
            then, now = self.middle
            parts.append(f"median {then}, now {now}" if then != now else f"spread changed (median {then})")
        elif "values" in self.flags:
            parts.append("different category proportions")
        if self.unseen:
            some = ", ".join(repr(name) for name in list(self.new or ())[:3])
            parts.append(f"{self.unseen:.1%} not in the training data ({some})")
        if "missing" in self.flags:
            parts.append(f"missing {self.missing[0]:.1%}, now {self.missing[1]:.1%}")
        if self.unparsed:
            parts.append(f"{self.unparsed:,} cells could not be read")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{"column": self.column, "kind": self.kind, "flags": list(self.flags), "words": self.words()},
            **{"psi": self.psi, "distance": self.distance, "p": self.p},
            **{"missing_then": self.missing[0], "missing_now": self.missing[1], "p_missing": self.p_missing},
            **{"unseen": self.unseen, "new_categories": dict(self.new or {}), "unparsed": self.unparsed},
            "median": None if self.middle is None else list(self.middle),
        }


class Drift:
    """Counts rows of a new table against the training columns of ``preprocessing``."""

    def __init__(self, preprocessing: Preprocessing, training: Mapping[str, Any]) -> None:
        counters = {Number: _Numbers, Date: _Numbers, Category: _Categories}
        self.columns = [
            counters.get(type(step), _Counter)(step, training[step.name])
            for step in preprocessing.steps
            if step.name in training
        ]

    def add(self, part: Table) -> None:
        for column in self.columns:
            column.add(part[column.name])

    def result(self) -> list[ColumnDrift]:
        """Flagged columns first, then by how far they moved."""
        found = [column.result() for column in self.columns]
        level = LEVEL / max(1, sum((one.p is not None) + 1 for one in found))
        return sorted(
            (one.flagged(level) for one in found), key=lambda one: (not one.flags, -one.size, one.column)
        )


class _Counter:
    """A column of text: only what is missing is compared."""

    def __init__(self, step: Any, about: Mapping[str, Any]) -> None:
        self.step, self.name, self.kind = step, step.name, str(about["kind"])
        self.then_rows, self.then_missing = int(about["rows"]), float(about["missing"])
        self.rows = self.missing = self.unparsed = 0

    def add(self, column: Column) -> None:
        texts = column.texts()
        self._count(len(texts), sum(text is None or is_missing(text) for text in texts))

    def _count(self, rows: int, missing: int) -> None:
        self.rows, self.missing = self.rows + rows, self.missing + missing

    def result(self) -> ColumnDrift:
        now = self.missing / max(1, self.rows)
        p_missing = two_proportions(self.then_missing, self.then_rows, now, self.rows)
        then, known = round(self.then_rows * (1 - self.then_missing)), self.rows - self.missing
        values = self._values(then, known) if then and known else {}
        missing = (self.then_missing, now)
        return ColumnDrift(self.name, self.kind, missing, p_missing, unparsed=self.unparsed, **values)

    def _values(self, then: int, now: int) -> dict[str, Any]:
        """How the cells differ that are not missing, of which there are so many."""
        return {}


class _Numbers(_Counter):
    """Counted between the training quantiles."""

    def __init__(self, step: Number | Date, about: Mapping[str, Any]) -> None:
        super().__init__(step, about)
        quantiles = np.asarray(about["quantiles"], np.float64)
        self.edges, first, many = np.unique(quantiles, return_index=True, return_counts=True)
        top = max(1, len(quantiles) - 1)
        self.below, self.upto = first / top, (first + many - 1) / top
        """The shares of training values below each edge, and up to it."""
        self.counts = np.zeros(2 * len(self.edges) + 1, np.int64)
        """Of new values: below the first edge, at it, up to the next, and so on."""
        self.middle = float(quantiles[len(quantiles) // 2]) if len(quantiles) else math.nan

    def add(self, column: Column) -> None:
        values, unparsed = values_of(column, self.step.kind, self.step.how)
        known = values[~np.isnan(values)]
        self._count(len(values), len(values) - len(known))
        self.unparsed += sum(unparsed.values())
        if len(known):
            place = np.searchsorted(self.edges, known, "left") + np.searchsorted(self.edges, known, "right")
            self.counts += np.bincount(place, minlength=len(self.counts))

    def _values(self, then: int, now: int) -> dict[str, Any]:
        if not len(self.edges):
            return {}
        up = np.cumsum(self.counts) / now
        below, upto = up[0:-1:2], up[1::2]
        largest = max(np.abs(below - self.below).max(), np.abs(upto - self.upto).max())
        distance = max(0.0, float(largest) - GRAIN)
        # Over tenths of the training values, fewer where many are equal.
        tenths = np.unique(np.searchsorted(self.upto, np.arange(1, 10) / 10 - 1e-9))
        tenths = tenths[self.upto[tenths] < 1]
        shares = [np.diff([0.0, *ends[tenths], 1.0]) for ends in (self.upto, upto)]
        return {
            **{"psi": stability(shares[0], shares[1], (then, now)), "distance": distance},
            **{"p": kolmogorov(distance, then, now), "middle": (self._text(self.middle), self._median(up))},
        }

    def _median(self, up: Array) -> str:
        """Of the new values, as near as the training quantiles tell."""
        place = int(np.argmax(up >= 0.5))
        if place in (0, len(up) - 1):
            beyond = f"above {self._text(self.edges[-1])}" if place else f"below {self._text(self.edges[0])}"
            return f"{beyond}, outside the training range"
        if place % 2:
            return self._text(self.edges[place // 2])
        share = (0.5 - up[place - 1]) / (up[place] - up[place - 1])
        start, end = self.edges[place // 2 - 1 : place // 2 + 1]
        return self._text(start + share * (end - start))

    def _text(self, value: float) -> str:
        return date_text(round(value)) if self.kind == "date" else f"{value:.4g}"


class _Categories(_Counter):
    """Counted by the training categories; rare ones that share a feature count as one."""

    def __init__(self, step: Category, about: Mapping[str, Any]) -> None:
        super().__init__(step, about)
        self.shares = {str(name): float(share) for name, share in about["shares"].items()}
        self.counts: Counter[str] = Counter()
        self.new: Counter[str] = Counter()

    def add(self, column: Column) -> None:
        names, codes = self.step.categories(column)
        known = np.bincount(codes[codes >= 0], minlength=len(names)).tolist()
        self._count(len(codes), len(codes) - sum(known))
        for name, count in zip(map(str, names), known, strict=True):
            if name in self.step.values or self.step.other:
                self.counts[name if name in self.step.values else "other"] += count
            else:
                self.new[name] += count

    def _values(self, then: int, now: int) -> dict[str, Any]:
        before = np.array([*self.shares.values(), 0.0])  # and those never seen
        after = np.array([*(self.counts[name] for name in self.shares), self.new.total()]) / now
        return {
            "psi": stability(before, after, (then, now)),
            "distance": float(np.abs(after - before).sum() / 2),
            "p": chi_square(before * then, after * now) if self.shares else None,
            "unseen": None if self.step.other else self.new.total() / now,
            "new": {name: count for name, count in self.new.most_common(10) if count},
        }


def stability(then: Sequence[float] | Array, now: Sequence[float] | Array, rows: tuple[int, int]) -> float:
    """Σ (now − then) log(now / then), empty bins counted as half a row."""
    shares = [np.maximum(np.asarray(s, np.float64), 0.5 / n) for s, n in zip((then, now), rows, strict=True)]
    a, b = (s / s.sum() for s in shares)
    return float(((b - a) * np.log(b / a)).sum())
