"""What is known of a trained model: which columns matter to it, and how reliable its probabilities are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.report.tables import Table, listed, number

MOST_COLUMNS = 8
"""Domains with a column of their own."""
IMPORTANCE = (
    "Importance for {algorithm}: how much worse {metric} becomes on a held-out domain if the column is "
    "shuffled there. Negative: the column misleads there. Columns with the same information share it."
)


def table(importance: Mapping[str, Any]) -> Table:
    """A row for each column: its importance on average, in each domain, and where it misleads."""
    metric, names = importance["metric"], importance["domains"]

    def shown(value: float | None) -> str:
        return "–" if value is None else number(value, metric, "+")

    names = names if len(names) <= MOST_COLUMNS else []
    found = Table(["column", "average", "95 % interval", *names, "misleads in"])
    for each in importance["columns"]:
        interval = "–" if each["low"] is None else f"{shown(each['low'])} to {shown(each['high'])}"
        values = [shown(each[f"in {name}"]) for name in names]
        found.add(each["column"], shown(each["mean"]), interval, *values, listed(each["misleads"]) or "–")
    return found


def calibration(result: Mapping[str, Any]) -> str:
    """The calibration in ``inputs.json`` as a sentence."""
    return (
        f"Temperature {result['temperature']:.3g}, fitted on {result['count']:,} examples ({result['on']}). "
        f"Expected calibration error on them: {result['before']['ece']:.3f} before, "
        f"{result['after']['ece']:.3f} after."
    )
