"""Which columns matter to a model on held-out domains, as a table."""

from __future__ import annotations

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
