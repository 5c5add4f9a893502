"""What is known of a trained model: which columns matter to it, and how reliable its probabilities are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from shoal.report.tables import Table, listed, number

MOST_COLUMNS = 8
"""Domains with a column of their own."""


def table(importance: Mapping[str, Any]) -> Table:
    """A row for each column: its importance on average, in each domain, and where it misleads."""
    metric, columns = importance["metric"], importance["columns"]
    names = list(columns[0]["domains"]) if columns else []
    shown = names if len(names) <= MOST_COLUMNS else []
    found = Table(["column", "average", "95 % interval", *shown, "misleads in"])
    for each in columns:
        ends = (each["low"], each["high"])
        found.add(
            each["column"],
            _number(each["mean"], metric),
            "–" if None in ends else " to ".join(_number(end, metric) for end in ends),
            *(_number(each["domains"][name]["value"], metric) for name in shown),
            listed(each["misleads"]) or "–",
        )
    return found


def _number(value: float | None, metric: str) -> str:
    return "–" if value is None else number(value, metric, "+")


def calibration(about: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration in ``inputs.json`` as a sentence and a table."""
    before, after = about["before"], about["after"]
    text = (
        f"Temperature {about['temperature']:.3g}, fitted on {about['count']:,} examples ({about['on']}). "
        f"Expected calibration error on them: {before['ece']:.3f} before, {after['ece']:.3f} after."
    )
    found = Table(
        [
            "confidence",
            *(f"{what}, {when}" for when in ("before", "after") for what in ("n", "mean", "correct")),
        ]
    )
    edges = before["edges"]
    for n, (low, high) in enumerate(itertools.pairwise(edges)):
        cells = [each[what][n] for each in (before, after) for what in ("counts", "confidence", "accuracy")]
        if cells[0] or cells[3]:
            found.add(
                f"{low:.0%} to {high:.0%}",
                *(c if isinstance(c, int) else "–" if c is None else f"{c:.1%}" for c in cells),
            )
    return {"text": text, "table": found}
