"""The report on a table's columns, for a terminal and for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from shoal.report.tables import Table, clean, cut

MOST, WIDEST = 40, 34
"""Columns that a terminal shows, and characters of a cell."""


def table(report: Mapping[str, Any], most: int | None = None) -> Table:
    """A row per column: kind, missing and distinct cells, examples, and what it becomes.

    If not all are shown, or on a page, those with warnings are first.
    """
    found = Table(["column", "kind", "missing", "distinct", "examples", "becomes"])
    columns = report["columns"]
    if most is None or len(columns) > most:
        columns = sorted(columns, key=lambda c: not c["warnings"])[:most]
    for column in columns:
        missing = column["missing"]
        share = f" ({missing / report['rows']:.0%})" if missing and report.get("rows") else ""
        numbers = (f"{missing:,}{share}", f"{column['distinct']:,}")
        cells = [column["column"], column["kind"], *numbers, ", ".join(column["examples"])]
        found.add(*(cut(clean(c), WIDEST) for c in cells), column["becomes"])
    return found


def remarks(report: Mapping[str, Any]) -> list[str]:
    """The warnings, one line each."""
    lines = [f"column {c['column']!r}: {line}" for c in report["columns"] for line in c["warnings"]]
    return [clean(line) for line in [*lines, *report.get("remarks", ())]]


def text(report: Mapping[str, Any], width: int = 110) -> str:
    """For a terminal: the table, then the warnings."""
    count, warnings = len(report["columns"]), remarks(report)
    lines = [
        f"{clean(report['file'])}: {report['rows']:,} rows, {count:,} columns",
        table(report, MOST).text(),
    ]
    if count > MOST:
        lines.append(f"… and {count - MOST:,} more columns (all in columns.json, or with --json)")
    if warnings:
        lines += ["", f"{len(warnings)} warning{'s' * (len(warnings) != 1)}:"]
        lines += [textwrap.fill(w, width, initial_indent="- ", subsequent_indent="  ") for w in warnings]
    return "\n".join(lines)
