"""DomainBed's tables: a dataset's domains, and all datasets; beside published numbers where there are any.

``published`` is a list of what a paper says of datasets: ``dataset`` (its name there), ``names`` (ours),
``rule``, ``metric`` and ``values``, a mean and maybe what is printed after ± for each method; ``rows`` maps
methods to our names. What it says of no dataset of ours is an average over all of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.report.compare import NAMED, _four_digits
from shoal.report.tables import Table, clean

Result = Mapping[str, Any]
"""Of a dataset, from :func:`shoal.experiments.selection.results`."""
Published = Sequence[Mapping[str, Any]]


def dataset_table(result: Result, published: Published = ()) -> Table:
    """A row for every algorithm; a column for every held-out domain."""
    unit, paper = _unit(result["metric"]), _of(result, published)
    beside = [f"average in the paper, {unit}"] if paper else []
    names = [f"{name}, {unit}" for name in (*result["left_out"], "average")]
    table = Table(["algorithm", *names, *beside])
    for row in _in_order(result["rows"], published):
        cells = [_cell(values, result["metric"]) for values in (*row["domains"].values(), row["average"])]
        table.add(row["algorithm"], *cells, *([_printed(paper, row["algorithm"])] if paper else []))
    return table


def overall_table(results: Sequence[Result], published: Published = ()) -> Table:
    """The averages of every dataset, each beside the published one where there is one."""
    papers = [_of(result, published) for result in results]
    columns = ["algorithm"]
    for result, paper in zip(results, papers, strict=True):
        unit = _unit(result["metric"])
        columns += [f"{result['dataset']}, {unit}"]
        columns += [f"{result['dataset']} in the paper, {unit}"] if paper else []
    several = len(results) > 1 and len({r["metric"] for r in results}) == 1
    average = [c for c in published if not c["names"]]
    whole = several and all(papers)
    whole &= {c["dataset"] for p in papers for c in p} == {c["dataset"] for c in published if c["names"]}
    unit = _unit(results[0]["metric"])
    columns += [f"average, {unit}"] * several + [f"average in the paper, {unit}"] * whole
    table = Table(columns)
    for name in [row["algorithm"] for row in _in_order((r for s in results for r in s["rows"]), published)]:
        cells, means = [], []
        for result, paper in zip(results, papers, strict=True):
            own = next((r["average"] for r in result["rows"] if r["algorithm"] == name), None)
            cells.append("–" if own is None else _cell(own, result["metric"]))
            cells += [_printed(paper, name)] if paper else []
            means.append(own["mean"] if own and None not in own["values"] else None)
        if several:
            mean = None if None in means else statistics.fmean(means)
            values = {"values": [mean], "mean": mean, "se": None, "status": []}
            cells.append(_cell(values, results[0]["metric"]))
        table.add(name, *cells, *([_printed(average, name)] if whole else []))
    return table


def words(results: Sequence[Result], published: Published = ()) -> list[str]:
    """How the numbers came about, and which are missing."""
    lines = []
    for result in results:
        trials, seeds = result["draws"], len(result["trials"])
        over = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
        among = f"among {trials} trials of a random search" if trials > 1 else "with default hyperparameters"
        lines.append(
            f"{result['dataset']}: {_unit(result['metric'])} on the in-split of the held-out domain; {over}; "
            f"{result['words']} {among}."
        )
        if diverged := sum(row["diverged"] for row in result["rows"]):
            lines.append(f"{result['dataset']}: trials lost to runs that diverged: {diverged}.")
        if gone := result["missing"]:
            more = f"; and {len(gone) - NAMED:,} more" if len(gone) > NAMED else ""
            lines.append(f"{result['dataset']}: {len(gone):,} missing: {'; '.join(gone[:NAMED])}{more}.")
    if any(_of(result, published) for result in results):
        lines.append("The paper's numbers are over five trials, with what it prints after ±.")
    return [clean(line) for line in lines]


def _unit(metric: str | None) -> str:
    return "accuracy (%)" if metric == "accuracy" else metric or "score"


def _cell(values: Mapping[str, Any], metric: str | None) -> str:
    """Mean ± standard error, and of how many seeds if not of all; else why there is nothing."""
    if values["mean"] is None:
        return " and ".join(values["status"]) or "–"
    mean, error = values["mean"], values["se"]
    if metric == "accuracy":
        mean, error, digits = 100 * mean, error and 100 * error, ".1f"
    else:
        digits = _four_digits(max(abs(mean), error or 0))
    known = sum(v is not None for v in values["values"])
    of = f" ({known} of {len(values['values'])})" if known < len(values["values"]) else ""
    return f"{mean:{digits}}" + ("" if error is None else f" ± {error:{digits}}") + of


def _plain(name: str) -> str:
    """Spelling and hyphens do not count; a way of sampling does."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ":")


def _of(result: Result, published: Published) -> list[Mapping[str, Any]]:
    """What is published of a dataset, by the same rule and in the same metric."""
    same = [c for c in published if (c["rule"], c["metric"]) == (result["rule"], result["metric"])]
    return [claim for claim in same if _plain(result["dataset"]) in map(_plain, claim["names"])]


def _methods(claim: Mapping[str, Any]) -> dict[str, list[float]]:
    """The published numbers by the plain names of algorithms."""
    return {_plain(claim.get("rows", {}).get(m, m)): v for m, v in claim["values"].items()}


def _printed(paper: Iterable[Mapping[str, Any]], algorithm: str) -> str:
    """As in the first of the published tables that has it."""
    values = (_methods(claim).get(_plain(algorithm)) for claim in paper)
    return next((" ± ".join(f"{number:.1f}" for number in value) for value in values if value), "–")


def _in_order(rows: Iterable[Mapping[str, Any]], published: Published) -> list[Mapping[str, Any]]:
    """Every algorithm once: as the publication lists them, then the others as they come."""
    order = list(dict.fromkeys(method for claim in published for method in _methods(claim)))
    place = {method: number for number, method in enumerate(order)}
    every = {row["algorithm"]: row for row in rows}
    return sorted(every.values(), key=lambda r: place.get(_plain(r["algorithm"]), len(order)))
