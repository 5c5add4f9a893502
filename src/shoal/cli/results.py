"""`shoal results`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import count
from shoal.cli.showing import show
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.experiments.results import Results

EXAMPLE = """\
Examples:
  shoal results shoal-compare --query 'algorithm == "fish" and seed < 3 and test > 0.8'
  shoal results shoal-compare --columns name left_out seed settings.meta_lr test

Columns: dataset, algorithm, name, left_out, seed, status, metric, step, steps, lr, batch_size, rule, \
seconds, device; all fields of the configuration; settings.X, data.X, model.X and optimizer.X; the scores \
test, validation and train at the selected step, test_last at the last step, and test.X for domain X. In a \
query, write a name that contains spaces as data["a name"]. Runs that diverged or failed have no scores.

In Python, shoal.results(RUNS).to_frame() returns a DataFrame (pip install 'shoal[tables]')."""
SHOWN = 50
"""Rows on a terminal, unless asked for more; files and JSON get all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("folder", type=Path, metavar="RUNS", help="folder of runs, searched recursively")
    parser.add_argument("--query", metavar="Q", help="condition on columns; only matching runs are shown")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="columns to show, in this order")
    parser.add_argument("--sort", metavar="NAME", help="column to sort by")
    parser.add_argument("--reverse", action="store_true", help="sort in descending order")
    parser.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help=f"maximum number of rows (default: all; {SHOWN} on the terminal)",
    )
    parser.add_argument(
        "--group",
        nargs="+",
        metavar="NAME",
        help="columns to group by; shows mean ± standard deviation of the test score over seeds",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="CSV file to write")


def run(args: Any) -> None:
    from shoal.api.results import results as load
    from shoal.experiments.results import save_csv
    from shoal.training.folder import check_output

    if args.group and args.columns:
        raise InputError("--columns and --group cannot be combined: groups have their own columns.")
    results = load(args.folder)
    if args.csv:
        paths = [*(row["path"] for row in results.kept), *results.broken]
        check_output(args.csv, [args.folder / path for path in paths], "--csv")
    if not results:
        nothing = f"{str(args.folder)!r} and its subfolders contain no record of a run."
        why = next(iter(results.broken.values()), None)
        raise InputError(f"no record in {str(args.folder)!r} can be read: {why}" if why else nothing)
    chosen = results.where(args.query) if args.query is not None else results
    columns, rows, text = (_groups if args.group else _runs)(chosen, args)
    if args.csv:
        try:
            save_csv(args.csv, columns, rows)
        except OSError as error:
            raise InputError(f"--csv {str(args.csv)!r} cannot be written: {error.strerror}.") from error
        text += f" Saved in {args.csv}."
    content = {
        "runs": len(results),
        "matching": len(chosen),
        "duplicates": results.duplicates,
        "broken": dict(results.broken),
        "rows": [{name: row.get(name) for name in columns} for row in rows] if args.json else [],
    }
    show(content, "\n".join([text, *_notes(results)]), args)


Made = tuple[Sequence[str], list[dict[str, Any]], str]
"""Columns and rows for files, and a text for the terminal."""
MEASURED = ("runs", "seeds", "diverged", "failed", "mean", "sd")


def _runs(results: Results, args: Any) -> Made:
    from shoal.experiments.results import cell
    from shoal.report.tables import Table

    results.check(*(args.columns or ()))
    if args.sort:
        results = results.sorted(args.sort, args.reverse)
    columns = args.columns or results.usual()
    shown = results.kept[: args.limit or SHOWN]
    table = Table(columns)
    for row in shown:
        table.add(*(cell(name, row) for name in columns))
    text = f"{table.text()}\n\n{_counted(len(shown), len(results), 'run')}.{_scored(results)}"
    return args.columns or results.filled(), list(results.kept[: args.limit]), text


def _groups(results: Results, args: Any) -> Made:
    from shoal.experiments.results import cell, in_order, number
    from shoal.report.tables import Table

    rows = results.group(args.group)
    columns = list(rows[0]) if rows else [*args.group, "mean"]
    if args.sort:
        by = "mean" if args.sort == "test" else args.sort
        if by not in columns:
            raise InputError(f"groups cannot be sorted by {args.sort!r}; they have {', '.join(columns)}.")
        rows = in_order(rows, by, args.reverse)
    keys = [name for name in columns if name not in MEASURED]
    lost = [name for name in ("diverged", "failed") if any(row[name] for row in rows)]
    metrics = {row["metric"] for row in results.kept if "metric" in row}
    table = Table([*keys, "runs", "seeds", *lost, "test, mean ± sd"])
    shown = rows[: args.limit or SHOWN]
    for row in shown:
        metric = row.get("metric") or (next(iter(metrics)) if len(metrics) == 1 else None)
        spread = next((name for name in lost if row[name]), "–")
        if row["mean"] is not None:
            spread = number(row["mean"], metric) + (
                "" if row["sd"] is None else f" ± {number(row['sd'], metric)}"
            )
        counts = (row[name] for name in ("runs", "seeds", *lost))
        table.add(*(cell(key, row) for key in keys), *counts, spread)
    counted = f"{_counted(len(shown), len(rows), 'group')} of {_many(len(results), 'run')}."
    how = " Standard deviations are over seeds; runs with the same seed are averaged first."
    return columns, rows[: args.limit], f"{table.text()}\n\n{counted}{how}{_scored(results)}"


def _scored(results: Results) -> str:
    """What the scores are, and which runs have none."""
    metrics = sorted({row["metric"] for row in results.kept if "metric" in row})
    ended = [row["status"] for row in results.kept]
    lost = [
        f" {_many(count, 'run')} {status} and are excluded from the means."
        for status in ("diverged", "failed")
        if (count := ended.count(status))
    ]
    scores = f" Scores are {' or '.join(metrics)} at the selected step (…_last: at the last step)."
    return "".join([scores if metrics else "", *lost])


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _counted(shown: int, number: int, what: str) -> str:
    more = f"The first {shown:,} of " if shown < number else ""
    return (
        more + _many(number, what) + (f" (use --limit {number} for all)" if shown == SHOWN < number else "")
    )


def _notes(results: Results) -> list[str]:
    from shoal.terminal import clean

    lines = []
    if results.duplicates:
        lines.append(f"{_many(results.duplicates, 'older record')} of the same runs omitted.")
    broken = list(results.broken.values())
    lines += [f"Not shown: {clean(why)}" for why in broken[:8]]
    if len(broken) > 8:
        lines.append(f"Also not shown: {len(broken) - 8:,} other files that are not records.")
    return lines
