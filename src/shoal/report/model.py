"""What is known of a trained model: which columns matter to it, and how reliable its probabilities are."""

from __future__ import annotations

import itertools
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


def calibration(result: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration in ``inputs.json`` as a sentence and a table."""
    before, after = result["before"], result["after"]
    text = (
        f"Temperature {result['temperature']:.3g}, fitted on {result['count']:,} examples ({result['on']}). "
        f"Expected calibration error on them: {before['ece']:.3f} before, {after['ece']:.3f} after."
    )
    columns = [f"{what}, {when}" for when in ("before", "after") for what in ("n", "mean", "correct")]
    found = Table(["confidence", *columns])
    for n, (low, high) in enumerate(itertools.pairwise(before["edges"])):
        cells = [each[what][n] for each in (before, after) for what in ("counts", "confidence", "accuracy")]
        if cells[0] or cells[3]:
            shown = (c if isinstance(c, int) else "–" if c is None else f"{c:.1%}" for c in cells)
            found.add(f"{low:.0%} to {high:.0%}", *shown)
    return {"text": text, "table": found}
