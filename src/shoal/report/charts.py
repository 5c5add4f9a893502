"""Charts of a page as plain data, which its template draws as inline SVG; positions are in percent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.experiments.record import RunRecord, selection_score
from shoal.report.tables import cell, number

COLOURS = 8
"""Colours of curves."""
MOST = 100
"""Domains in a chart."""
FAR = 3
Chart = dict[str, Any]
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """One scale for all lines of a chart."""

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
        return [(self.at(v), f"{v:.2g}" if wide else f"{v:,.{digits}f}".replace("-", "−")) for v in values]

    def dot(self, value: float, look: str, title: str) -> Chart:
        beyond = " beyond" * (not self.low <= value <= self.high)
        return {"x": self.at(value), "look": look + beyond, "title": f"{title}: {value:.4g}"}

    def bar(self, ends: Iterable[float], look: str) -> Chart:
        low, high = map(self.at, ends)
        return {"x": low, "to": high, "look": look}


def unit(metric: str | None) -> tuple[float, str]:
    """The factor and the name of values: accuracies are shown in percent."""
    return (100.0, "accuracy (%)") if metric == "accuracy" else (1.0, metric or "score")


# Lines with dots


def differences(found: Mapping[str, Result], metric: str | None) -> Chart:
    """A line for each difference: its ``mean``, interval from ``low`` to ``high`` and standard error ``se``
    where they are known, and a dot for each of ``values``, such as those of the domains.

    The scale is that of rows whose mean is within :data:`FAR` times the median row's reach: one far-off row,
    such as the majority class, must not squeeze the others into a point. Its marks are at the edge.
    """
    scale = unit(metric)[0]
    ends = {n: [scale * a[e] for e in ("mean", "low", "high") if a[e] is not None] for n, a in found.items()}
    typical = statistics.median(max(map(abs, values)) for values in ends.values())
    near = [n for n, (mean, *_) in ends.items() if abs(mean) <= FAR * typical]
    core = [0.0, *(v for n in near for v in ends[n])]
    dots = [scale * v for n in near for v in found[n].get("values", {}).values()]
    axis, rows = Axis.over([*core, *dots], core, 1 if len(found) > 1 else 3), []
    for name, difference in found.items():
        mean, *limits = ends[name]
        marks = [axis.bar(limits, "interval")] if limits else []
        if limits and difference.get("se") is not None:
            marks.append(
                axis.bar([mean - scale * difference["se"], mean + scale * difference["se"]], "error")
            )
        marks += [axis.dot(scale * v, "other", n) for n, v in difference.get("values", {}).items()]
        marks.append(axis.dot(mean, "c0 full", "mean"))
        shown = [
            number(difference[e], metric, "+") for e in ("mean", "low", "high") if difference[e] is not None
        ]
        text = f"{shown[0]} ({shown[1]} to {shown[2]})" if limits else shown[0]
        rows.append({"name": name, "text": text.replace("-", "−"), "marks": marks})
    words = "percentage points of accuracy" if metric == "accuracy" else metric or "score"
    return {"axis": axis, "zero": axis.at(0.0), "rows": rows, "unit": words}


def domains(result: Result, first: str) -> Chart:
    """Every algorithm in every held-out domain: the average, the worst domain, then each domain.

    Domains are in the order of the scores of ``first``, worst on top, whose numbers are shown.
    """
    rows, (scale, name_of_unit) = {row["algorithm"]: row for row in result["rows"]}, unit(result["metric"])
    looks = dict.fromkeys(rows, "other") | {result["baseline"] or first: "c1", first: "c0 full"}
    sign, first_scores = -scale if result["lower_is_better"] else scale, rows[first]["domains"]
    order = sorted(result["held_out"], key=lambda name: sign * (first_scores[name]["mean"] or 0.0))[:MOST]
    lines = [(name, False, {n: row["domains"][name] for n, row in rows.items()}) for name in order]
    for name, key in {"worst domain": "worst", "average": "average"}.items() if len(first_scores) > 1 else ():
        lines.insert(0, (name, True, {n: row[key] for n, row in rows.items()}))
    values = [
        {n: scale * s["mean"] for n, s in scores.items() if s and s["mean"] is not None}
        for _, _, scores in lines
    ]
    core = [value for each in values for n, value in each.items() if looks[n] != "other"]
    axis, drawn = Axis.over([v for each in values for v in each.values()], core, 1), []
    for (name, strong, scores), means in zip(lines, values, strict=True):
        above = sorted(means, key=lambda n: (looks[n] != "other", n == first))  # the last is on top
        marks = [axis.dot(means[n], looks[n], n) for n in above]
        text = cell(scores[first] and {**scores[first], "sd": None})
        drawn.append({"name": name, "strong": strong, "text": text, "marks": marks})
    legend = [(n, look) for n, look in looks.items() if look != "other"]
    legend += [("the others", "other")] if len(legend) < len(rows) else []
    return {"axis": axis, "rows": drawn, "legend": legend, "unit": name_of_unit, "first": first}


# Curves

Curves = dict[str, list[dict[int, float]]]
"""The runs of each curve: values by step."""
SPLITS = {"test": "held-out domains", "validation": "validation"}
AGREEMENT = {"mean_cosine": "mean cosine of gradients", "sign_agreement": "sign agreement of gradients"}


def curves(lines: Curves, metric: str | None, title: str) -> Chart:
    """A curve for each name: the mean over its runs, at the steps that all of them have."""
    scale, name_of_unit = unit(metric)
    means = {}
    for name, runs in list(lines.items())[:COLOURS]:
        steps = [step for step in runs[0] if all(step in run for run in runs)]
        means[name] = {step: scale * statistics.fmean(run[step] for run in runs) for step in steps}
    y = Axis.over(v for curve in means.values() for v in curve.values())
    x, drawn = Axis(0, max([1, *(step for curve in means.values() for step in curve)])), []
    for n, (name, curve) in enumerate(means.items()):
        points = " ".join(f"{x.at(step):g},{100 - y.at(value):g}" for step, value in curve.items())
        drawn.append({"name": name, "look": "dashed" if name == "validation" else f"c{n}", "points": points})
    return {"title": title, "unit": name_of_unit if metric else "", "x": x, "y": y, "lines": drawn}


def learning_curves(panels: Mapping[str, Sequence[RunRecord]]) -> list[Chart]:
    """Scores by step, a panel for each name: held-out domains and, dashed, validation."""
    made = []
    for panel, records in panels.items():
        lines, metric = Curves(), None
        for split, label in SPLITS.items():
            for record in (each for each in records if len(each.history) > 1):
                measured = [(m["step"], m["scores"][split]) for m in record.history if split in m["scores"]]
                scores = {step: selection_score(found) for step, found in measured}
                points = {step: v for step, (_, v) in scores.items() if v is not None and math.isfinite(v)}
                if points:
                    metric = next(iter(scores.values()))[0]
                    lines.setdefault(label, []).append(points)
        if lines:
            made.append(curves(lines, metric, panel))
    return made


def agreement(panels: Mapping[str, Sequence[RunRecord]]) -> tuple[list[Chart], list[Chart]]:
    """Agreement of gradients by step, and the last matrix of cosines of each algorithm."""
    made, matrices = [], []
    for key, title in AGREEMENT.items():
        lines = Curves()
        for name, records in panels.items():
            runs = [{p["step"]: p[key] for p in r.agreement if p.get(key) is not None} for r in records]
            if runs := [run for run in runs if run]:
                lines[name] = runs
        if lines:
            made.append(curves(lines, None, title))
    for name, records in panels.items():
        for seed, point in [(r.config.seed, p) for r in records for p in r.agreement if p.get("matrix")][-1:]:
            title = f"Cosines of gradients: {name}, seed {seed}, step {point['step']:,}"
            matrices.append({"title": title, "names": point["domains"], "rows": point["matrix"]})
    return made, matrices
