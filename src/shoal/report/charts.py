"""Charts of a page that are lines of text with dots beside them, on one scale: plain data for a template.

A chart has ``ticks`` (position in percent, label), ``rows`` and maybe ``zero``. A row has a ``name``, a
``text`` and ``marks``: dots at ``x``, or bars from ``x`` to ``to``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.report import figures
from shoal.report.compare import _spread

COLOURS = 6
"""With more algorithms only those that matter have a colour of their own."""
MOST = 100
"""Domains in a chart."""
FAR = 3

Row = Mapping[str, Any]
"""Of the ``rows`` of :func:`shoal.experiments.compare.results`."""


@dataclass(frozen=True)
class Axis:
    """One scale for all lines of a chart; positions are in percent of its width."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], core: Iterable[float] = (), times: float = 3) -> Axis:
        """Holds all ``values``, but reaches no further beyond those of ``core`` than ``times`` their range.

        One algorithm with an enormous error must not squeeze the others into a point.
        """
        every = [v for v in values if math.isfinite(v)]
        inner = [v for v in core if math.isfinite(v)]
        low, high = (min(every), max(every)) if every else (0.0, 1.0)
        if inner and (reach := times * (max(inner) - min(inner))):
            low, high = max(low, min(inner) - reach), min(high, max(inner) + reach)
        room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 2)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of three to six round numbers."""
        part = (self.high - self.low) / 3
        size = 10.0 ** math.floor(math.log10(part))
        step = next(size * m for m in (5, 2, 1) if size * m <= part)
        digits = max(0, -math.floor(math.log10(step)))
        values = [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        wide = digits > 5 or max(map(abs, values)) >= 1e6
        return [(self.at(v), f"{v:.2g}" if wide else f"{v:.{digits}f}".replace("-", "−")) for v in values]

    def dot(self, value: float, look: str, title: str) -> dict[str, Any]:
        beyond = " beyond" * (not self.low <= value <= self.high)
        return {"x": self.at(value), "look": look + beyond, "title": f"{title}: {value:.4g}"}


def differences(found: Mapping[str, Mapping[str, Any]], metric: str | None) -> dict[str, Any]:
    """A line for each paired difference: a dot for every domain, the mean and its interval; zero is marked.

    The scale is that of the rows whose mean is within :data:`FAR` times the median row's reach: one far-off
    row, such as the majority class, must not squeeze the others into a point. Its marks are at the edge.

    ``found`` is from :func:`shoal.experiments.compare.over_domains`, maybe with a standard error ``se``.
    """
    scale, unit = figures.unit(metric)
    reach = {n: [v for v in (a["mean"], a["low"], a["high"]) if v is not None] for n, a in found.items()}
    usual = statistics.median(max(map(abs, values)) for values in reach.values())
    near = [n for n, a in found.items() if abs(a["mean"]) <= FAR * usual]
    ends = [scale * v for n in near for v in reach[n]]
    dots = [scale * v for n in near for v in found[n]["values"].values()]
    axis = Axis.over([0.0, *ends, *dots], [0.0, *ends], 1 if len(found) > 1 else 3)
    rows = []
    for name, about in found.items():
        mean, low, error = about["mean"], about["low"], about.get("se")
        bars = [] if low is None else [("interval", low, about["high"])]
        bars += [] if error is None else [("error", mean - error, mean + error)]
        marks = [{"x": axis.at(scale * a), "to": axis.at(scale * b), "look": look} for look, a, b in bars]
        marks += [axis.dot(scale * v, "other", n) for n, v in about["values"].items()]
        marks.append(axis.dot(scale * mean, "c0 full", "mean"))
        text, *limits = _signed([scale * v for v in reach[name]], metric)
        text += f" ({' to '.join(limits)})" if limits else ""
        rows.append({"name": name, "strong": False, "text": text, "marks": marks})
    unit = "percentage points of accuracy" if metric == "accuracy" else unit
    return {"ticks": axis.ticks, "zero": axis.at(0.0), "rows": rows, "unit": unit, "beyond": _beyond(rows)}


def _beyond(rows: Iterable[Mapping[str, Any]]) -> bool:
    return any("beyond" in mark["look"] for row in rows for mark in row["marks"])


def _signed(values: Sequence[float], metric: str | None) -> list[str]:
    """With as many digits each as the largest needs."""
    size = max(map(abs, values))
    digits = 1 if metric == "accuracy" else max(0, 2 - math.floor(math.log10(size))) if size else 0
    form = f"+.{digits}f" if digits < 8 and size < 1e6 else "+.2e"
    return [f"{v:{form}}".replace("-", "−") for v in values]


def domains(result: Mapping[str, Any], first: str | None) -> dict[str, Any]:
    """Every algorithm in every held-out domain: the average, the worst domain, then the domains.

    Those come in the order of ``first``'s scores there, the worst on top; its numbers stand beside them.
    """
    rows, names = {str(row["algorithm"]): row for row in result["rows"]}, list(result["held_out"])
    scale, unit = figures.unit(result["metric"])
    main = list(dict.fromkeys(n for n in (first, next(iter(rows)), result["baseline"]) if n in rows))
    coloured = list(dict.fromkeys([*main, *rows])) if len(rows) <= COLOURS else main
    looks = {name: f"c{n}" + " full" * (n == 0) for n, name in enumerate(coloured)}
    back_to_front = [*(n for n in rows if n not in looks), *reversed(coloured)]
    sign = -1 if result["lower_is_better"] else 1

    def rising(name: str) -> float:
        mean = rows[coloured[0]]["domains"][name]["mean"]
        return math.inf if mean is None else sign * mean

    lines = {"average": "average", "worst domain": "worst"} if len(names) > 1 else {}
    found = [(name, True, {n: row[key] for n, row in rows.items()}) for name, key in lines.items()]
    ordered = sorted(names, key=rising)[:MOST]
    found += [(name, False, {n: row["domains"][name] for n, row in rows.items()}) for name in ordered]
    means = [
        {n: scale * s["mean"] for n, s in own.items() if s and s["mean"] is not None} for *_, own in found
    ]
    axis = Axis.over([v for m in means for v in m.values()], [m[n] for m in means for n in main if n in m])
    drawn = []
    for (name, strong, scores), values in zip(found, means, strict=True):
        own = scores[coloured[0]]
        text = "–" if own is None else _spread({**own, "sd": None})
        marks = [axis.dot(values[n], looks.get(n, "other"), n) for n in back_to_front if n in values]
        drawn.append({"name": name, "strong": strong, "text": text, "marks": marks})
    others = len(rows) - len(coloured)
    return {
        "ticks": axis.ticks,
        "rows": drawn,
        "legend": [*looks.items(), *([(f"the {others} others", "other")] if others else [])],
        "first": coloured[0],
        "unit": unit,
        "beyond": _beyond(drawn),
        "left": max(0, len(names) - MOST),
    }
