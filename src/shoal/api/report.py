"""``shoal.report``: the page of one result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.files import read_json
from shoal.options import public

if TYPE_CHECKING:
    from shoal.experiments.record import RunRecord

RESULTS = ("comparison.json", "sweep.json", "diagnosis.json", "record.json", "seed-*/record.json")
"""The files that a page is made of, in this order."""


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The result of :func:`report`: a self-contained HTML page.

    Attributes:
        path: file of the page.
        runs: number of runs.
        notes: failed runs and files that cannot be read.
        html: content of the page.
    """

    path: Path
    runs: int
    notes: tuple[str, ...]
    html: str

    def __str__(self) -> str:
        left = f"; {len(self.notes):,} missing, failed or unreadable" * bool(self.notes)
        return f"Report{f' on {self.runs:,} runs' * bool(self.runs)}{left}. Saved in {self.path}."

    def _repr_html_(self) -> str:
        frame = f'<iframe srcdoc="{escape(self.html)}" width="100%" height="700" style="border: 0"></iframe>'
        return f"{frame}<p>{escape(str(self))}</p>"

    def to_dict(self) -> dict[str, Any]:
        return {"report": str(self.path), "runs": self.runs, "notes": list(self.notes)}


@public()
def report(folder: str | Path, out: str | Path | None = None) -> Report:
    """Write an HTML page of one result: recommendation, tables, curves, settings, errors.

    Args:
        folder: folder of a comparison, a sweep, a diagnosis, or a run with its seeds.
        out: file to write (default: report.html in the folder).

    Examples:
        >>> import shoal
        >>> _ = shoal.sweep("linear", algorithms="erm", seeds=1, search=1, steps=2, out="few", progress=False)
        >>> shoal.report("few").runs
        3
    """
    folder = Path(folder)
    files = _find(folder)
    path = output_file(folder / "report.html" if out is None else out, *files)
    notes: list[str] = []
    try:
        count, html = _page(folder, files, notes)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{str(files[0])!r} is not a result of this version ({error!r}).") from error
    write_output(path, html.encode(errors="replace"))
    return Report(path, count, tuple(notes), html)


def _find(folder: Path) -> list[Path]:
    """The files of the result in a folder."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    for name in RESULTS:
        if files := sorted(folder.glob(name)):
            return files
    inside = sorted({p.relative_to(folder).parts[0] for name in RESULTS for p in folder.glob(f"*/{name}")})
    if inside:
        raise InputError(
            f"a report is of one result; specify a folder in {str(folder)!r}: {', '.join(inside)}."
        )
    raise InputError(f"there is no result in {str(folder)!r}, such as {', '.join(RESULTS[:4])}.")


def _page(folder: Path, files: list[Path], notes: list[str]) -> tuple[int, str]:
    """The number of runs of a result, and its page; whatever its files lack raises an error."""
    from shoal.report import page

    def content(name: str) -> Mapping[str, Any]:
        """An object in a file that there may be."""
        try:
            found = read_json(path) if (path := files[0].with_name(name)).exists() else {}
        except (OSError, ValueError) as error:
            notes.append(f"Not shown: {path} cannot be read ({error}).")
            return {}
        return found if isinstance(found, Mapping) else {}

    kind, runs = files[0].name, folder / "runs"
    if kind == "record.json":
        records, about = _records(files, notes), content("inputs.json")
        if not records:
            raise InputError(notes[0])
        report = about.get("inputs", {}).get("columns_report")
        of_table = {"columns": report} if report else None
        return len(records), page.runs_page(records, of_table, notes, about.get("calibration"))
    result, columns = read_json(files[0]), content("columns.json") or None
    if kind == "diagnosis.json":
        return 0, page.diagnosis_page(result, columns, notes)
    if kind == "sweep.json":
        if not all(isinstance(found, list) and found for found in result.values()):
            raise TypeError("it must have lists of results")
        records = _records(sorted(runs.glob("*.json")), notes)
        return len(records), page.sweep_page(result, records, notes)
    paths = [runs / f"{identity}.json" for identity in list(result["identities"])]
    records = _records([path for path in paths if path.exists()], notes)
    more = [content(f"{name}.json") for name in ("importance", "calibration")]
    return len(records), page.comparison_page(result, records, columns, notes, *more)


def _records(files: Iterable[Path], notes: list[str]) -> list[RunRecord]:
    from shoal.experiments.record import read_record

    records = []
    for path in files:
        try:
            records.append(record := read_record(path))
        except InputError as error:
            notes.append(f"Not shown: {error}")
        else:
            if record.status == "failed":
                about = f"{record.config.name} on {record.config.dataset}, {record.config.identity}"
                notes.append(f"Failed: {about}: {record.error}")
    return records
