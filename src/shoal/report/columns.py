"""The report on a table's columns, for a terminal and for Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from shoal.report.tables import Table, clean

MOST = 40
"""Columns that a terminal shows; of more, those with a warning come first."""
WIDEST = 34


def table(report: Mapping[str, Any], most: int | None = None) -> Table:
    """A row per column: its kind, missing and distinct cells, examples, and what the model sees of it."""
    result = Table(["column", "kind", "missing", "distinct", "examples", "becomes"])
    rows = list(report["columns"])
    if most is not None and len(rows) > most:
        rows = sorted(rows, key=lambda c: not c["warnings"])[:most]
    for c in rows:
        share = f" ({c['missing'] / report['rows']:.0%})" if c["missing"] and report.get("rows") else ""
        numbers = (f"{c['missing']:,}{share}", f"{c['distinct']:,}")
        cells = [clean(str(cell)) for cell in (c["column"], c["kind"], *numbers, ", ".join(c["examples"]))]
        cut = (cell if len(cell) <= WIDEST else f"{cell[: WIDEST - 1]}…" for cell in cells)
        result.add(*cut, c["becomes"])
    return result


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What is doubtful, a line each."""
    lines = [f"column {c['column']!r}: {line}" for c in report["columns"] for line in c["warnings"]]
    return [clean(line) for line in [*lines, *report.get("remarks", ())]]


def text(report: Mapping[str, Any], width: int = 110) -> str:
    """For a terminal: the table, and the warnings beneath it."""
    count, warnings = len(report["columns"]), remarks(report)
    lines = [f"{clean(report['file'])}: {report['rows']:,} rows, {count:,} columns"]
    lines.append(table(report, MOST).text())
    if count > MOST:
        lines.append(f"… and {count - MOST:,} more columns (all in columns.json, or with --json)")
    if warnings:
        lines += ["", f"{len(warnings)} warning{'s' * (len(warnings) != 1)}:"]
        for line in warnings:
            lines += textwrap.wrap(line, width, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)
