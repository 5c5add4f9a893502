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


def labels(report: Mapping[str, Any], most: int = 20) -> list[str]:
    """The task, and a row per domain with its rows of each class, or the mean label."""
    if "task" not in report:
        return []
    classes = report["classes"]
    count = f", {len(classes)} classes" if classes else ""
    lines = [f"task: {report['task']}{count}"]
    if (domains := report.get("domains")) is None:
        return lines
    shown = classes[:6] if classes else ["mean", "sd"]
    more = ["others"] if len(classes) > 6 else []
    found = Table(["domain", "rows", *(cut(clean(str(name)), WIDEST) for name in shown), *more])
    for each in domains[:most]:
        numbers = [each[name] for name in shown] if not classes else [each["classes"][c] for c in shown]
        rest = [each["rows"] - sum(numbers)] if more else []
        cells = [f"{n:,}" if isinstance(n, int) else f"{n:.4g}" for n in (each["rows"], *numbers, *rest)]
        found.add(cut(clean(each["domain"]), WIDEST), *cells)
    left = [f"… and {len(domains) - most:,} more domains"] if len(domains) > most else []
    return [*lines, "", found.text(), *left]


def text(report: Mapping[str, Any], width: int = 110) -> str:
    """For a terminal: the columns, the labels and domains, then warnings and problems."""
    count = len(report["columns"])
    lines = [
        f"{clean(report['file'])}: {report['rows']:,} rows, {count:,} columns",
        table(report, MOST).text(),
    ]
    if count > MOST:
        lines.append(f"… and {count - MOST:,} more columns (all in columns.json, or with --json)")
    if described := labels(report):
        lines += ["", *described]
    for what, found in (("warning", remarks(report)), ("problem", report.get("problems", ()))):
        if found:
            lines += ["", f"{len(found)} {what}{'s' * (len(found) != 1)}:"]
            filled = (clean(line) for line in found)
            lines += [textwrap.fill(w, width, initial_indent="- ", subsequent_indent="  ") for w in filled]
    return "\n".join(lines)
