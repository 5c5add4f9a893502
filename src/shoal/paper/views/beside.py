"""Tables in the paper's form: a column a dataset, the paper's numbers beneath ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.tables import Table

SHARES = ("accuracy", "f1", "recall", "auc")
"""What is shown in percent, by the last word of a metric's name."""


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """``entries`` are the columns: ``title``, ``metric``, and ``ours`` and ``paper`` by row."""
    found = Table(["", *(f"{e['title']}, {_unit(e['metric'])}" for e in entries)])
    rows = dict.fromkeys(row for e in entries for row in (*e["ours"], *e["paper"]))
    for row in rows:
        if any(row in e["ours"] for e in entries):
            found.add(row, *(_ours(e["ours"].get(row), e["metric"]) for e in entries))
        if any(row in e["paper"] for e in entries):
            found.add(f"{row}, the paper", *(_printed(e["paper"].get(row), e["metric"]) for e in entries))
    return found


def _percent(metric: str) -> bool:
    return metric.lower().split()[-1] in SHARES


def _unit(metric: str) -> str:
    return f"{metric} (%)" if _percent(metric) else metric


def _number(value: float, metric: str, scale: float = 1.0) -> str:
    return f"{scale * value:.1f}" if _percent(metric) else f"{value:.3g}"


def _ours(values: Mapping[str, Any] | None, metric: str) -> str:
    if values is None or values["mean"] is None:
        return "–"
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    spread = "" if values["deviation"] is None else f" ± {_number(values['deviation'], metric, 100)}"
    of = f" ({known} of {every})" if known < every else ""
    return f"{_number(values['mean'], metric, 100)}{spread}{of}"


def _printed(value: Sequence[float] | None, metric: str) -> str:
    return "–" if value is None else " ± ".join(_number(number, metric) for number in value)


def gaps(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was not run, and why; how many runs are missing."""
    lines = []
    for entry in entries:
        if entry["why_not"]:
            lines.append(f"{entry['title']}: not run: {entry['why_not']}")
        elif entry["missing"]:
            lines.append(f"{entry['title']}: {entry['missing']} of {entry['runs']} runs are missing.")
    return lines


def worth(entries: Sequence[Mapping[str, Any]], row: str, control: str) -> list[str]:
    """How much better ``row`` is than ``control`` with the same seeds."""
    lines = []
    for entry in entries:
        ours, other = entry["ours"].get(row), entry["ours"].get(control)
        pairs = zip(ours["values"], other["values"], strict=True) if ours and other else ()
        both = [(a, b) for a, b in pairs if None not in (a, b)]
        if both:
            scale = 100 if _percent(entry["metric"]) else 1
            mean = scale * sum(a - b for a, b in both) / len(both)
            wins = sum(a > b for a, b in both)
            points = "points" if scale == 100 else entry["metric"]
            lines.append(
                f"{entry['title']}: {row} against {control} {mean:+.2g} {points}; better with {wins} of "
                f"{len(both)} seeds."
            )
    return lines
