"""`shoal results`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import count
from shoal.cli.showing import show
from shoal.errors import InputError
from shoal.terminal import as_csv

if TYPE_CHECKING:
    from shoal.experiments.results import Results
    from shoal.report.tables import Table

SUMMARY = "Ask the records of all runs in a folder: a table, groups, CSV."
EXAMPLE = (
    "Example: shoal results shoal-compare --query 'algorithm == \"fish\" and seed < 3 and test > 0.8' "
    "--columns name left_out seed settings.meta_lr test. "
    "Columns are dataset, algorithm, name, left_out, seed, status, metric, step, steps, lr, batch_size, "
    "rule, seconds, device, all fields of the configuration, settings.X, data.X, model.X, optimizer.X; "
    "the scores test, validation and train at the selected step, test_last at the last, by domain test.X. "
    'A name that has spaces is written data["a name"] in a query. A run that diverged has no scores. '
    "In Python, shoal.experiments.results.load(RUNS).to_frame() is a frame (pip install 'shoal[tables]')."
)
SHOWN = 50
"""Rows on a terminal, unless asked for more; files and JSON get all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("folder", type=Path, metavar="RUNS", help="records are found in it and below")
    parser.add_argument("--query", metavar="Q", help="only runs for which this holds")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="which columns, in this order")
    parser.add_argument("--sort", metavar="NAME", help="by this column")
    parser.add_argument("--reverse", action="store_true", help="the largest first")
    parser.add_argument(
        "--limit", type=count, metavar="N", help=f"rows (default: all; {SHOWN} on the terminal)"
    )
    parser.add_argument(
        "--group",
        nargs="+",
        metavar="NAME",
        help="mean ± sd of test over seeds for each value of these columns",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to a file too")


def run(given: Any) -> None:
    from shoal.experiments.results import load
    from shoal.training.folder import check_output

    if given.group and given.columns:
        raise InputError("--columns and --group cannot be had together: groups have columns of their own.")
    results = load(given.folder)
    if given.csv:
        paths = [*(row["path"] for row in results.kept), *results.broken]
        check_output(given.csv, [given.folder / path for path in paths], "--csv")
    if not results:
        raise InputError(_nothing(results, given.folder))
    chosen = results.where(given.query) if given.query is not None else results
    make = _groups if given.group else _runs
    columns, rows, text = make(chosen, given)
    if given.csv:
        _write_csv(given.csv, columns, rows)
        text += f" Written to {given.csv}."
    content = {
        "runs": len(results),
        "matching": len(chosen),
        "duplicates": results.duplicates,
        "broken": dict(results.broken),
        "rows": [{name: row.get(name) for name in columns} for row in rows] if given.json else [],
    }
    show(content, "\n".join([text, *_troubles(results)]), given)


Made = tuple[Sequence[str], list[dict[str, Any]], str]
"""Columns and rows for files, and a text for the terminal."""


def _runs(results: Results, given: Any) -> Made:
    results.check(*(given.columns or ()))
    if given.sort:
        results = results.sorted(given.sort, given.reverse)
    columns = given.columns or _usual(results)
    shown = results.kept[: given.limit or SHOWN]
    table = _table([_heading(name) for name in columns])
    for row in shown:
        table.add(*(_cell(name, row) for name in columns))
    wide = given.columns or results.filled()
    rows = list(results.kept[: given.limit])
    return wide, rows, f"{table.text()}\n\n{_counted(len(shown), len(results), 'run')}.{_scored(results)}"


def _groups(results: Results, given: Any) -> Made:
    from shoal.experiments.results import in_order

    rows = results.group(given.group)
    columns = list(rows[0]) if rows else [*given.group, "mean"]
    if given.sort:
        by = "mean" if given.sort == "test" else given.sort
        if by not in columns:
            raise InputError(f"groups cannot be sorted by {given.sort!r}; they have {', '.join(columns)}.")
        rows = in_order(rows, by, given.reverse)
    keys = [name for name in columns if name not in MEASURED]
    lost = any(row["diverged"] for row in rows)
    metrics = {row["metric"] for row in results.kept if "metric" in row}
    table = _table(
        [*map(_heading, keys), "runs", "seeds", *(["diverged"] if lost else []), "test, mean ± sd"]
    )
    shown = rows[: given.limit or SHOWN]
    for row in shown:
        metric = row.get("metric") or (next(iter(metrics)) if len(metrics) == 1 else None)
        lost_here = [row["diverged"]] if lost else []
        table.add(*(_cell(k, row) for k in keys), row["runs"], row["seeds"], *lost_here, _spread(row, metric))
    counted = f"{_counted(len(shown), len(rows), 'group')} of {_many(len(results), 'run')}."
    how = " Standard deviations are over seeds; several runs of a seed are averaged first."
    return columns, rows[: given.limit], f"{table.text()}\n\n{counted}{how}{_scored(results)}"


SPLITS = ("train", "validation", "test", "oracle", "id_validation", "id_test")
MEASURED = ("runs", "seeds", "diverged", "mean", "sd")


def _table(headings: Sequence[str]) -> Table:
    from shoal.report.tables import Table

    return Table(headings)


def _heading(name: str) -> str:
    from shoal.terminal import clean

    return clean(name)


def _usual(results: Results) -> list[str]:
    """What tells the runs apart, and how they ended."""
    several = [
        name
        for name in ("steps", "batch_size", "lr", "metric")
        if len({str(row.get(name)) for row in results.kept}) > 1
    ]
    present = set(results.filled())
    names = ["dataset", "name", "left_out", "seed", *several, "test", "validation", "test_last", "seconds"]
    return [name for name in names if name in present or name in ("name", "test")]


def _scored(results: Results) -> str:
    """What the scores are, and which runs have none."""
    metrics = sorted({row["metric"] for row in results.kept if "metric" in row})
    if not metrics:
        return ""
    lost = sum(row["status"] != "finished" for row in results.kept)
    without = f" {_many(lost, 'run')} diverged and count for no mean." if lost else ""
    return f" Scores are {' or '.join(metrics)} at the selected step (…_last: at the last).{without}"


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value, base = row.get(name), name.split(".")[0].removesuffix("_last")
    score = base in SPLITS
    if value is None:
        return str(row["status"]) if score and row.get("status", "finished") != "finished" else "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return (
            _number(value, row.get("metric"))
            if score
            else f"{value:.1f}"
            if name == "seconds"
            else f"{value:.4g}"
        )
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _number(value: float, metric: str | None) -> str:
    return f"{value:.3f}" if metric == "accuracy" else f"{value:.4g}"


def _spread(row: Mapping[str, Any], metric: str | None) -> str:
    if row["mean"] is None:
        return "diverged" if row["diverged"] else "–"
    spread = "" if row["sd"] is None else f" ± {_number(row['sd'], metric)}"
    return _number(row["mean"], metric) + spread


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _counted(shown: int, number: int, what: str) -> str:
    more = f"The first {shown:,} of " if shown < number else ""
    return more + _many(number, what) + (f" (more with --limit {number})" if shown == SHOWN < number else "")


def _troubles(results: Results) -> list[str]:
    from shoal.terminal import clean

    lines = []
    if results.duplicates:
        lines.append(f"{_many(results.duplicates, 'older record')} of the same runs left out.")
    broken = list(results.broken.values())
    lines += [f"Not shown: {clean(why)}" for why in broken[:8]]
    if len(broken) > 8:
        lines.append(f"Not shown either: {len(broken) - 8:,} other files that are no records.")
    return lines


def _nothing(results: Results, folder: Path) -> str:
    if results.broken:
        return f"no record in {str(folder)!r} can be read: {next(iter(results.broken.values()))}"
    return f"{str(folder)!r} holds no record of a run, nor does a folder below it."


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    from shoal.files import write_atomically

    def line(row: Mapping[str, Any]) -> list[Any]:
        values = (row.get(name) for name in columns)
        return [json.dumps(v) if isinstance(v, list | dict | bool) else v for v in values]

    try:
        write_atomically(path, as_csv([columns, *map(line, rows)]).encode(errors="replace"))
    except OSError as error:
        raise InputError(f"--csv {str(path)!r} cannot be written: {error.strerror}.") from error
