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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.cells import is_missing
from shoal.data.columns import values_of
from shoal.data.reading import Column, Table, date_text
from shoal.data.table import Category, Date, Number, Preprocessing, Step
from shoal.experiments.statistics import chi_square, kolmogorov, two_proportions

Array = NDArray[Any]
LEVEL = 0.01
"""Of all flags together where nothing has changed."""
MATTERS, MISSING_MATTERS = 0.05, 0.02
"""The least differences that are flagged, as shares of the rows: of distributions, and of missing cells."""
GRAIN = 0.01
"""What 101 quantiles leave open of a share of rows."""
NEW = "(never seen in training)"


@dataclass(frozen=True)
class ColumnDrift:
    """One column, then (in training) and now."""

    column: str
    kind: str
    psi: float | None
    """The population stability index over tenths of the training values, or over categories."""
    distance: float | None
    """The largest difference of the two distribution functions, or of categories half the sum of
    differences."""
    p: float | None
    missing: tuple[float, float]
    p_missing: float
    unseen: float | None
    """The share of known cells that hold a category that training never saw."""
    new: Mapping[str, int]
    """The commonest of these."""
    unparsed: int
    middle: tuple[str, str] | None
    """The medians of numbers and dates."""
    flags: tuple[str, ...] = ()
    """What differs more than sampling explains: ``values``, ``missing``."""

    @property
    def size(self) -> float:
        """What columns are sorted by."""
        return max(self.distance or 0.0, abs(self.missing[1] - self.missing[0]))

    def words(self) -> str:
        """What is different, in plain words."""
        parts = []
        if "values" in self.flags and self.middle is not None:
            then, now = self.middle
            parts.append(f"median {then}, now {now}" if then != now else f"spread changed (median {then})")
        elif "values" in self.flags:
            parts.append("other shares of categories")
        if self.unseen:
            some = ", ".join(repr(name) for name in list(self.new)[:3])
            parts.append(f"{self.unseen:.1%} never seen in training ({some})")
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
            **{"unseen": self.unseen, "new_categories": dict(self.new), "unparsed": self.unparsed},
            "median": None if self.middle is None else list(self.middle),
        }


class Drift:
    """Counts rows of a new table against the training columns of ``preprocessing``."""

    def __init__(self, preprocessing: Preprocessing, training: Mapping[str, Any]) -> None:
        self.columns = [
            _counter(step, training[step.name]) for step in preprocessing.steps if step.name in training
        ]

    def add(self, part: Table) -> None:
        for column in self.columns:
            column.add(part[column.name])

    def result(self) -> list[ColumnDrift]:
        """Flagged columns first, then by how far they moved."""
        found = [column.result() for column in self.columns]
        tests = sum((one.p is not None) + 1 for one in found)
        return sorted(
            (_flagged(one, LEVEL / max(1, tests)) for one in found),
            key=lambda one: (not one.flags, -one.size, one.column),
        )


def _flagged(found: ColumnDrift, level: float) -> ColumnDrift:
    flags = []
    if found.p is not None and found.p < level and (found.distance or 0.0) >= MATTERS:
        flags.append("values")
    if found.p_missing < level and abs(found.missing[1] - found.missing[0]) >= MISSING_MATTERS:
        flags.append("missing")
    return ColumnDrift(**{**found.__dict__, "flags": tuple(flags)})


def _counter(step: Step, about: Mapping[str, Any]) -> _Counter:
    if isinstance(step, Number | Date):
        return _Numbers(step, about)
    return _Categories(step, about) if isinstance(step, Category) else _Counter(step, about)


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

    @property
    def known(self) -> tuple[int, int]:
        """Cells that are not missing, then and now."""
        return round(self.then_rows * (1 - self.then_missing)), self.rows - self.missing

    def result(self) -> ColumnDrift:
        return self._result()

    def _result(
        self,
        psi: float | None = None,
        distance: float | None = None,
        p: float | None = None,
        unseen: float | None = None,
        new: Mapping[str, int] | None = None,
        middle: tuple[str, str] | None = None,
    ) -> ColumnDrift:
        now = self.missing / max(1, self.rows)
        p_missing = two_proportions(self.then_missing, self.then_rows, now, self.rows)
        missing = (self.then_missing, now)
        return ColumnDrift(
            self.name,
            self.kind,
            psi,
            distance,
            p,
            missing,
            p_missing,
            unseen,
            new or {},
            self.unparsed,
            middle,
        )


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

    def result(self) -> ColumnDrift:
        then, now = self.known
        if not then or not now or not len(self.edges):
            return self._result()
        up = np.cumsum(self.counts) / now
        below, upto = up[0:-1:2], up[1::2]
        distance = max(np.abs(below - self.below).max(), np.abs(upto - self.upto).max())
        distance = max(0.0, float(distance) - GRAIN)
        p = kolmogorov(distance, then, now)
        middle = self._text(self.middle), self._median(up)
        return self._result(self._psi(upto), distance, p, middle=middle)

    def _psi(self, upto: Array) -> float:
        """Over tenths of the training values, fewer where many are equal."""
        tenths = np.unique(np.searchsorted(self.upto, np.arange(1, 10) / 10 - 1e-9))
        tenths = tenths[self.upto[tenths] < 1]
        then = np.diff([0.0, *self.upto[tenths], 1.0])
        now = np.diff([0.0, *upto[tenths], 1.0])
        return stability(then, now, self.known)

    def _median(self, up: Array) -> str:
        """Of the new values, as near as the training quantiles tell."""
        place = int(np.argmax(up >= 0.5))
        if place in (0, len(up) - 1):
            beyond = f"above {self._text(self.edges[-1])}" if place else f"below {self._text(self.edges[0])}"
            return f"{beyond}, beyond training"
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
        self.rest = step.other
        self.counts: Counter[str] = Counter()
        self.new: Counter[str] = Counter()

    def add(self, column: Column) -> None:
        names, codes = self.step.categories(column)
        known = np.bincount(codes[codes >= 0], minlength=len(names)).tolist()
        self._count(len(codes), len(codes) - sum(known))
        for name, count in zip(map(str, names), known, strict=True):
            if name in self.step.values:
                self.counts[name] += count
            elif self.rest:
                self.counts["other"] += count
            else:
                self.new[name] += count

    def result(self) -> ColumnDrift:
        then, now = self.known
        if not then or not now:
            return self._result()
        bins = [*self.shares, NEW]
        before = np.array([*self.shares.values(), 0.0])
        after = np.array([*(self.counts[name] for name in self.shares), self.new.total()]) / now
        distance = float(np.abs(after - before).sum() / 2)
        p = chi_square(before * then, after * now) if len(bins) > 1 else None
        new = {name: count for name, count in self.new.most_common(10) if count}
        unseen = None if self.rest else self.new.total() / now
        return self._result(stability(before, after, (then, now)), distance, p, unseen, new)


# Statistics


def stability(then: Sequence[float] | Array, now: Sequence[float] | Array, rows: tuple[int, int]) -> float:
    """Σ (now − then) log(now / then), empty bins counted as half a row."""
    shares = [np.maximum(np.asarray(s, np.float64), 0.5 / n) for s, n in zip((then, now), rows, strict=True)]
    a, b = (s / s.sum() for s in shares)
    return float(((b - a) * np.log(b / a)).sum())
