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
"""Colours of a page; with more algorithms, only those that matter have one."""
MOST = 100
"""Domains in a chart."""
FAR = 3
Chart = dict[str, Any]


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


def unit(metric: str | None) -> tuple[float, str]:
    """The factor and the name of values: accuracies are shown in percent."""
    return (100.0, "accuracy (%)") if metric == "accuracy" else (1.0, metric or "score")


def differences(found: Mapping[str, Mapping[str, Any]], metric: str | None) -> Chart:
    """A line for each difference (:func:`~shoal.experiments.recommend.over_domains`): a dot for every domain,
    the mean, its standard error and its interval.

    The scale is that of rows whose mean is within :data:`FAR` times the median row's reach: one far-off row,
    such as the majority class, must not squeeze the others into a point. Its marks are at the edge.
    """
    scale = unit(metric)[0]
    ends = ("mean", "low", "high")
    reach = {n: [scale * a[end] for end in ends if a[end] is not None] for n, a in found.items()}
    usual = statistics.median(max(map(abs, values)) for values in reach.values())
    near = [n for n, values in reach.items() if abs(values[0]) <= FAR * usual]
    core = [0.0, *(v for n in near for v in reach[n])]
    dots = [scale * v for n in near for v in found[n]["values"].values()]
    axis, rows = Axis.over([*core, *dots], core, 1 if len(found) > 1 else 3), []
    for name, about in found.items():
        mean, *limits = reach[name]
        marks = [axis.dot(scale * v, "other", n) for n, v in about["values"].items()]
        text = number(about["mean"], metric, "+")
        if limits:
            error = scale * about["se"]
            bars = {"interval": limits, "error": [mean - error, mean + error]}
            marks = [
                {"x": axis.at(a), "to": axis.at(b), "look": look} for look, (a, b) in bars.items()
            ] + marks
            text += f" ({number(about['low'], metric, '+')} to {number(about['high'], metric, '+')})"
        marks.append(axis.dot(mean, "c0 full", "mean"))
        rows.append({"name": name, "text": text.replace("-", "−"), "marks": marks})
    name_of_unit = "percentage points of accuracy" if metric == "accuracy" else metric or "score"
    return {"axis": axis, "zero": axis.at(0.0), "rows": rows, "unit": name_of_unit, "beyond": _beyond(rows)}


def _beyond(rows: Iterable[Mapping[str, Any]]) -> bool:
    return any("beyond" in mark["look"] for row in rows for mark in row["marks"])


def domains(result: Mapping[str, Any], first: str) -> Chart:
    """Every algorithm in every held-out domain: the average, the worst domain, then each domain.

    Domains are in the order of the scores of ``first``, worst on top, whose numbers are shown. With many
    algorithms, only ``first``, the best and the baseline have a colour.
    """
    rows = {str(row["algorithm"]): row for row in result["rows"]}
    scale, name_of_unit = unit(result["metric"])
    main = list(dict.fromkeys(n for n in (first, next(iter(rows)), result["baseline"]) if n in rows))
    coloured = list(dict.fromkeys([*main, *rows])) if len(rows) <= COLOURS else main
    looks = dict.fromkeys(rows, "other") | {name: f"c{n}" for n, name in enumerate(coloured)}
    sign = -scale if result["lower_is_better"] else scale
    scores = {n: {name: own["mean"] for name, own in row["domains"].items()} for n, row in rows.items()}
    order = sorted(result["held_out"], key=lambda name: sign * (scores[first][name] or 0.0))[:MOST]
    lines = [("average", "average"), ("worst domain", "worst")] if len(scores[first]) > 1 else []
    found = [(name, True, {n: row[key] for n, row in rows.items()}) for name, key in lines]
    found += [(name, False, {n: row["domains"][name] for n, row in rows.items()}) for name in order]
    known = [{n: s["mean"] for n, s in own.items() if s} for *_, own in found]
    means = [{n: scale * mean for n, mean in own.items() if mean is not None} for own in known]
    axis = Axis.over([v for m in means for v in m.values()], [m[n] for m in means for n in main if n in m], 1)
    drawn = []
    for (name, strong, own), values in zip(found, means, strict=True):
        above = sorted(values, key=lambda n: (n in coloured, n == first))  # what is drawn last is on top
        marks = [axis.dot(values[n], looks[n] + " full" * (n == first), n) for n in above]
        text = cell(own[first] and {**own[first], "sd": None})
        drawn.append({"name": name, "strong": strong, "text": text, "marks": marks})
    legend = [(n, looks[n] + " full" * (n == first)) for n in coloured]
    legend += [(f"the {len(rows) - len(coloured)} others", "other")] if len(rows) > len(coloured) else []
    about = {"unit": name_of_unit, "first": first, "beyond": _beyond(drawn)}
    return {"axis": axis, "rows": drawn, "legend": legend, **about}


Lines = dict[str, list[dict[int, float]]]
"""The runs of each curve: values by step."""
DASHED = "validation"
AGREEMENT = {"mean_cosine": "mean cosine of gradients", "sign_agreement": "sign agreement of gradients"}


def curves(lines: Lines, metric: str | None, title: str, y: Axis | None = None) -> Chart:
    """A curve for each name: the mean over its runs, at the steps that all of them have."""
    scale, name_of_unit = unit(metric)
    means = {}
    for name, runs in list(lines.items())[:COLOURS]:
        steps = [step for step in runs[0] if all(step in run for run in runs)]
        means[name] = {step: scale * statistics.fmean(run[step] for run in runs) for step in steps}
    y = y or Axis.over(v for own in means.values() for v in own.values())
    x = Axis(0, max([1, *(step for own in means.values() for step in own)]))
    drawn = []
    for n, (name, own) in enumerate(means.items()):
        points = " ".join(f"{x.at(step):g},{100 - y.at(value):g}" for step, value in own.items())
        drawn.append({"name": name, "look": "dashed" if name == DASHED else f"c{n}", "points": points})
    return {"title": title, "unit": name_of_unit if metric else "", "x": x, "y": y, "lines": drawn}


def learning_curves(panels: Mapping[str, Sequence[RunRecord]]) -> list[Chart]:
    """Scores by step, a panel for each name: held-out domains and, dashed, validation.

    Many held-out domains are one curve. Panels share a scale if all scores are between 0 and 1.
    """
    found = {name: _lines([r for r in records if len(r.history) > 1]) for name, records in panels.items()}
    values = [
        v for _, lines in found.values() for runs in lines.values() for run in runs for v in run.values()
    ]
    shared = values and 0 <= min(values) <= max(values) <= 1
    return [
        curves(lines, metric, name, Axis.over(unit(metric)[0] * v for v in values) if shared else None)
        for name, (metric, lines) in found.items()
        if lines
    ]


def _lines(records: Sequence[RunRecord]) -> tuple[str | None, Lines]:
    """The metric that selects, and its values by step on held-out domains and on validation."""
    names = {name for r in records for name in r.history[-1]["scores"].get("test", {}).get("domains", ())}
    lines, metric = Lines(), None
    for record in records:
        for split in ("test", "validation"):
            points, label = dict[int, float](), DASHED
            for measured in record.history:
                if (scores := measured["scores"].get(split)) is None:
                    continue
                metric, value = selection_score(scores)
                if split == "test":
                    one = len(scores["domains"]) == 1 and len(names) < COLOURS
                    label = next(iter(scores["domains"])) if one else "held-out domains"
                if value is not None and math.isfinite(value):
                    points[measured["step"]] = value
            if points:
                lines.setdefault(label, []).append(points)
    return metric, {name: lines[name] for name in sorted(lines, key=lambda n: (n == DASHED, n))}


def agreement(panels: Mapping[str, Sequence[RunRecord]]) -> tuple[list[Chart], list[Chart]]:
    """Agreement of gradients by step, and the last matrix of cosines of each algorithm."""
    made, matrices = [], []
    for key, title in AGREEMENT.items():
        runs = {
            name: [{p["step"]: p[key] for p in r.agreement if p.get(key) is not None} for r in records]
            for name, records in panels.items()
        }
        lines = {name: known for name, own in runs.items() if (known := [run for run in own if run])}
        made += [curves(lines, None, title)] if lines else []
    for name, records in panels.items():
        points = [(r.config.seed, p) for r in records for p in r.agreement if p.get("matrix")]
        for seed, point in points[-1:]:
            title = f"{name}, seed {seed}, step {point['step']:,}"
            matrices.append({"title": title, "names": point["domains"], "rows": point["matrix"]})
    return made, matrices
