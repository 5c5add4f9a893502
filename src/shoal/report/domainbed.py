"""DomainBed's tables: a dataset's domains, and all datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.experiments.statistics import mean_of
from shoal.report.compare import NAMED, _four_digits
from shoal.report.tables import Table, clean

Result = Mapping[str, Any]
"""Of a dataset, from :func:`shoal.experiments.selection.results`."""


def dataset_table(result: Result) -> Table:
    """A row for every algorithm; a column for every held-out domain."""
    unit = _unit(result["metric"])
    table = Table(["algorithm", *(f"{name}, {unit}" for name in (*result["held_out"], "average"))])
    for row in result["rows"]:
        cells = (_cell(values, result["metric"]) for values in (*row["domains"].values(), row["average"]))
        table.add(row["algorithm"], *cells)
    return table


def overall_table(results: Sequence[Result]) -> Table:
    """The averages of every dataset, and over those where they share a metric."""
    metrics = [result["metric"] for result in results]
    columns = [f"{result['dataset']}, {_unit(result['metric'])}" for result in results]
    shared = len(results) > 1 and len(set(metrics)) == 1
    table = Table(["algorithm", *columns, *([f"average, {_unit(metrics[0])}"] if shared else [])])
    rows = [{r["algorithm"]: r["average"] for r in result["rows"]} for result in results]
    for name in dict.fromkeys(name for own in rows for name in own):
        averages = [own.get(name) for own in rows]
        cells = [_cell(average, metric) for average, metric in zip(averages, metrics, strict=True)]
        if shared:
            mean = mean_of(a["mean"] if a and None not in a["values"] else None for a in averages)
            cells.append(_cell({"values": [mean], "mean": mean, "se": None, "status": []}, metrics[0]))
        table.add(name, *cells)
    return table


def words(results: Sequence[Result]) -> list[str]:
    """How the numbers came about, and which are missing."""
    lines = []
    for result in results:
        trials, seeds = result["search"], len(result["seeds"])
        over = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
        among = (
            f"selected from {trials} trials of random search"
            if trials > 1
            else "with default hyperparameters"
        )
        unit = _unit(result["metric"])
        about = [f"{unit} on the in-split of the held-out domain; {over}; {result['words']} {among}"]
        if diverged := sum(row["diverged"] for row in result["rows"]):
            about.append(f"cases without a score because runs diverged: {diverged}")
        if gone := result["missing"]:
            more = f"; and {len(gone) - NAMED:,} more" if len(gone) > NAMED else ""
            about.append(f"{len(gone):,} missing: {'; '.join(gone[:NAMED])}{more}")
        lines += [clean(f"{result['dataset']}: {line}.") for line in about]
    return lines


def _unit(metric: str | None) -> str:
    return "accuracy (%)" if metric == "accuracy" else metric or "score"


def _cell(values: Mapping[str, Any] | None, metric: str | None) -> str:
    """Mean ± standard error, and of how many seeds if not of all; else why there is nothing."""
    if values is None or values["mean"] is None:
        return " and ".join(values["status"] if values else ()) or "–"
    mean, error = values["mean"], values["se"]
    if metric == "accuracy":
        mean, error, digits = 100 * mean, error and 100 * error, ".1f"
    else:
        digits = _four_digits(max(abs(mean), error or 0))
    known = sum(v is not None for v in values["values"])
    of = f" ({known} of {len(values['values'])})" if known < len(values["values"]) else ""
    return f"{mean:{digits}}" + ("" if error is None else f" ± {error:{digits}}") + of
