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
from shoal.terminal import clean

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
        return {"x": self.at(value), "look": look + beyond, "title": f"{clean(title)}: {value:.4g}"}


def differences(found: Mapping[str, Mapping[str, Any]], metric: str | None) -> dict[str, Any]:
    """A line for each paired difference: a dot for every domain, the mean and its interval; zero is marked.

    The scale is that of the rows whose mean is within :data:`FAR` times the median row's reach: one far-off
    row, such as the majority class, must not squeeze the others into a point. Its marks are at the edge.

    ``found`` is from :func:`shoal.experiments.compare.over_domains`, maybe with a standard error ``se``.
    """
    scale, unit = figures.unit(metric)
    reach = {n: [v for v in (a["low"], a["high"], a["mean"]) if v is not None] for n, a in found.items()}
    usual = statistics.median(max(map(abs, values)) for values in reach.values())
    near = [n for n, a in found.items() if abs(a["mean"]) <= FAR * usual]
    ends = [scale * v for n in near for v in reach[n]]
    dots = [scale * v for n in near for v in found[n]["values"].values()]
    axis = Axis.over([0.0, *ends, *dots], [0.0, *ends], 1 if len(found) > 1 else 3)
    rows = []
    for name, about in found.items():
        marks, (mean, low, high) = [], (about[key] for key in ("mean", "low", "high"))
        mean_text, *ends_text = _signed([scale * v for v in (mean, low, high) if v is not None], metric)
        if low is not None:
            marks.append({"x": axis.at(scale * low), "to": axis.at(scale * high), "look": "interval"})
        if (error := about.get("se")) is not None:
            within = (axis.at(scale * (mean + way * error)) for way in (-1, 1))
            marks.append(dict(zip(("x", "to"), within, strict=True), look="error"))
        marks += [axis.dot(scale * v, "other", n) for n, v in about["values"].items()]
        marks.append(axis.dot(scale * mean, "c0 full", "mean"))
        text = mean_text + (f" ({' to '.join(ends_text)})" if ends_text else "")
        rows.append({"name": clean(name), "strong": False, "text": text, "marks": marks})
    unit = "percentage points of accuracy" if metric == "accuracy" else unit
    return {
        "ticks": axis.ticks,
        "zero": axis.at(0.0),
        "rows": rows,
        "unit": clean(unit),
        "beyond": _beyond(rows),
    }


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
    rows, lower, names = result["rows"], result["lower_is_better"], list(result["left_out"])
    scale, unit = figures.unit(result["metric"])
    every = [str(row["algorithm"]) for row in rows]
    main = list(dict.fromkeys(n for n in (first, every[0], result["baseline"]) if n in every))
    coloured = list(dict.fromkeys([*main, *every])) if len(every) <= COLOURS else main
    looks = {name: f"c{n}" + " full" * (n == 0) for n, name in enumerate(coloured)}
    shown = next(row for row in rows if row["algorithm"] == coloured[0])
    order = {name: n for n, name in enumerate(reversed(coloured), 1)}
    back_to_front = sorted(rows, key=lambda row: order.get(row["algorithm"], 0))

    def rising(name: str) -> float:
        mean = shown["domains"][name]["mean"]
        return math.inf if mean is None else -mean if lower else mean

    lines: list[tuple[str, dict[str, Mapping[str, Any]]]] = []
    if len(names) > 1:
        lines.append(("average", {r["algorithm"]: r["average"] for r in back_to_front}))
        lines.append(("worst domain", {r["algorithm"]: r["worst"] for r in back_to_front if r["worst"]}))
    lines += [
        (name, {r["algorithm"]: r["domains"][name] for r in back_to_front})
        for name in sorted(names, key=rising)[:MOST]
    ]
    values = [
        {name: scale * found["mean"] for name, found in scores.items() if found["mean"] is not None}
        for _, scores in lines
    ]
    axis = Axis.over(
        [v for line in values for v in line.values()], [line[n] for line in values for n in main if n in line]
    )
    drawn: list[dict[str, Any]] = []
    for number, ((name, scores), line) in enumerate(zip(lines, values, strict=True)):
        own = scores.get(shown["algorithm"])
        drawn.append(
            {
                "name": clean(name),
                "strong": len(names) > 1 and number < 2,
                "text": "–" if own is None else _spread({**own, "sd": None}),
                "marks": [axis.dot(v, looks.get(n, "other"), n) for n, v in line.items()],
            }
        )
    legend = [(clean(name), look) for name, look in looks.items()]
    if len(every) > len(coloured):
        legend.append((f"the {len(every) - len(coloured)} others", "other"))
    return {
        "ticks": axis.ticks,
        "rows": drawn,
        "legend": legend,
        "first": clean(coloured[0]),
        "unit": clean(unit),
        "beyond": _beyond(drawn),
        "left": max(0, len(names) - MOST),
    }
