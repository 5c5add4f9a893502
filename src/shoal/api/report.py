"""``shoal.report``: one page of HTML from runs."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.result import Result
from shoal.errors import InputError
from shoal.files import read_json, write_atomically
from shoal.options import public

if TYPE_CHECKING:
    from shoal.report.groups import Run, Trouble

COMPARISON = {"dataset", "identities", "held_out", "recommendation", "rows", "runs", "seeds", "trials"}
"""What the result of a comparison has at least."""


@dataclass(frozen=True)
class Report(Result):
    """The result of :func:`report`: a self-contained HTML page.

    Attributes:
        path: file of the page.
        runs: number of runs.
        notes: number of notes on missing or failed runs.
        html: content of the page.
    """

    path: Path
    runs: int
    notes: int
    html: str

    def __str__(self) -> str:
        runs = f"{self.runs:,} run{'s' * (self.runs != 1)}"
        notes = f", {self.notes} note{'s' * (self.notes != 1)} on missing or failed runs" * (self.notes > 0)
        return f"{runs}{notes}. Saved in {self.path} ({len(self.html) / 1e6:.1f} MB)."

    def _repr_html_(self) -> str:
        frame = f'<iframe srcdoc="{escape(self.html)}" width="100%" height="700" style="border: 0"></iframe>'
        return f"{frame}<p>{escape(str(self))}</p>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the page itself."""
        return {"report": str(self.path), "runs": self.runs, "notes": self.notes}


@public()
def report(folder: str | Path, out: str | Path | None = None, *, title: str | None = None) -> Report:
    """Write an HTML report of runs: recommendation, tables, curves, hyperparameters, errors.

    Args:
        folder: folder of runs, a comparison or a sweep, searched recursively.
        out: file to write (default: report.html in the folder).
        title: title of the page (default: the name of the data or folder).

    Examples:
        >>> import shoal
        >>> _ = shoal.sweep("linear", algorithms="erm", seeds=1, search=1, steps=2, out="few", progress=False)
        >>> shoal.report("few").runs
        3
    """
    return write_report(Path(folder), out, title)


def write_report(
    folder: Path, out: str | Path | None = None, title: str | None = None, only: Collection[str] | None = None
) -> Report:
    """:func:`report`, of the runs with the identities ``only`` if they are given."""
    from shoal.report import page
    from shoal.report.groups import grouped
    from shoal.training.folder import check_output

    runs, troubles = _runs(folder)
    out = folder / "report.html" if out is None else Path(out)
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {str(out.parent)!r}.", "out")
    try:
        check_output(out, [run.path for run in runs])
    except InputError as error:
        raise InputError(str(error), "out") from None
    comparisons = _contents(folder, "comparison.json", COMPARISON, "the result of a comparison", troubles)
    if only is not None:
        runs = [run for run in runs if run.identity in only]
        comparisons = [(path, result) for path, result in comparisons if result["identities"] == list(only)]
    groups = grouped(runs, comparisons, troubles)
    name = groups[0].result.get("title") if len(groups) == 1 else None
    content = page.Content(
        groups,
        columns=_columns(folder, troubles),
        troubles=troubles,
        title=title or f"Report on {name or folder}",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    html = page.render(content)
    try:
        write_atomically(out, html.encode(errors="replace"))
    except OSError as error:
        raise InputError(f"{str(out)!r} cannot be written: {error.strerror}.", "out") from error
    return Report(out, len(runs), len(troubles), html)


def _runs(folder: Path) -> tuple[list[Run], list[Trouble]]:
    """Every run once, and notes on failed and unfinished ones and on files that are no records."""
    from shoal.experiments.store import read_runs
    from shoal.report.groups import Run, Trouble

    records, broken = read_runs(folder)
    runs, troubles = [], [Trouble(f"Not shown: {why}") for why in broken.values()]
    for path, record in records.items():
        if record.status == "failed":
            which = f"{record.config.name} on {record.config.dataset}, {path}"
            troubles.append(Trouble(f"Failed: {which}: {record.error}", record.traceback))
        else:
            runs.append(Run(record, str(path), _command(path.parent)))
    started = sorted(path.parent for path in folder.rglob("config.yaml"))
    left = [path for path in started if not (path / "record.json").exists()]
    troubles += [Trouble(f"Not finished: {path}; the same command resumes it.") for path in left]
    if not runs:
        why = f" {troubles[0].words}" if troubles else ""
        raise InputError(f"there is no record of a run in {str(folder)!r} or its subfolders.{why}")
    return runs, troubles


def _command(folder: Path) -> str:
    """The command of a run, which its folder keeps and a store of records does not."""
    from shoal.experiments.config import read_file

    try:
        return str(read_file(folder).get("command") or "")
    except InputError:  # there is none
        return ""


def _contents(
    folder: Path, pattern: str, keys: set[str], what: str, troubles: list[Trouble]
) -> list[tuple[Path, dict[str, Any]]]:
    """The JSON files in a folder that have these ``keys``; others are noted."""
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob(pattern)):
        try:
            content = read_json(path)
            if missing := keys - content.keys():
                raise ValueError(f"it lacks {min(missing)!r}")
        except (OSError, ValueError, AttributeError) as error:
            troubles.append(Trouble(f"Not shown: {path} is not {what} ({error})."))
        else:
            found.append((path, content))
    return found


def _columns(folder: Path, troubles: list[Trouble]) -> list[dict[str, Any]]:
    """The reports on columns that comparisons and runs keep, each once."""
    reports = [c for _, c in _contents(folder, "columns.json", {"columns"}, "a report on columns", troubles)]
    for path, content in _contents(folder, "inputs.json", set(), "the inputs of a model", troubles):
        if columns := content.get("columns_report"):
            reports.append({"file": path.parent.name, "columns": columns})
    different = {json.dumps(report["columns"], sort_keys=True): report for report in reversed(reports)}
    return list(different.values())[::-1]
