"""DomainBed's tables: a dataset's domains, and all datasets beside the paper's numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shoal.paper.published import claims
from shoal.report.compare import NAMED, _four_digits
from shoal.report.tables import Table, clean

AVERAGE = "Average"
"""What the paper calls its last row."""


@lru_cache(maxsize=1)
def _said() -> list[dict[str, Any]]:
    return claims("domainbed")


def dataset_table(result: Mapping[str, Any]) -> Table:
    """A row for every algorithm, in the paper's order; a column for every domain left out."""
    unit, paper = _unit(result["metric"]), _claims(result)
    beside = [f"average in the paper, {unit}"] if paper else []
    table = Table(
        ["algorithm", *(f"{name}, {unit}" for name in result["left_out"]), f"average, {unit}", *beside]
    )
    for row in in_order(result["rows"]):
        cells = [_cell(values, result["metric"]) for values in (*row["domains"].values(), row["average"])]
        table.add(row["algorithm"], *cells, *([_printed(paper, row["algorithm"])] if paper else []))
    return table


def overall_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The averages of every dataset, each with the paper's beside it where it has one."""
    metrics = {r["metric"] for r in results}
    papers = [_claims(result) for result in results]
    columns = ["algorithm"]
    for result, paper in zip(results, papers, strict=True):
        unit = _unit(result["metric"])
        columns += [f"{result['dataset']}, {unit}"]
        columns += [f"{result['dataset']} in the paper, {unit}"] if paper else []
    several = len(results) > 1 and len(metrics) == 1
    whole = several and _all_of_the_paper(results)
    unit = _unit(next(iter(metrics), None))
    columns += [f"average, {unit}"] if several else []
    table = Table([*columns, *([f"average in the paper, {unit}"] if whole else [])])
    average = [c for c in _said() if c["dataset"] == AVERAGE]
    for row in in_order({row["algorithm"]: row for r in results for row in r["rows"]}.values()):
        name, cells, means = row["algorithm"], [], []
        for result, paper in zip(results, papers, strict=True):
            own = next((r["average"] for r in result["rows"] if r["algorithm"] == name), None)
            cells.append("–" if own is None else _cell(own, result["metric"]))
            cells += [_printed(paper, name)] if paper else []
            means.append(own["mean"] if own and None not in own["values"] else None)
        if several:
            cells.append(_mean(means, results[0]["metric"]))
        table.add(name, *cells, *([_printed(average, name)] if whole else []))
    return table


def _unit(metric: str | None) -> str:
    return "accuracy (%)" if metric == "accuracy" else metric or "score"


def _mean(values: Sequence[float | None], metric: str | None) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return "–"
    return _cell({"values": known, "mean": statistics.fmean(known), "se": None, "status": []}, metric)


def _cell(values: Mapping[str, Any], metric: str | None) -> str:
    """Mean ± standard error, and of how many trials if not of all; else why there is nothing."""
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
    """Spelling and hyphens do not count; a way of drawing does."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ":")


def _claims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the paper says of a dataset, by the same rule and in the same metric."""
    name = _plain(result["dataset"])
    return [
        claim
        for claim in _said()
        if name in map(_plain, claim["names"])
        and (claim["rule"], claim["metric"]) == (result["rule"], result["metric"])
    ]


def _all_of_the_paper(results: Iterable[Mapping[str, Any]]) -> bool:
    found = [{c["dataset"] for c in _claims(result)} for result in results]
    return all(found) and set().union(*found) == {c["dataset"] for c in _said()} - {AVERAGE}


def _methods(claim: Mapping[str, Any]) -> dict[str, list[float]]:
    """The paper's numbers by the plain names of algorithms."""
    return {_plain(claim.get("rows", {}).get(m, m)): v for m, v in claim["values"].items()}


def _printed(paper: Iterable[Mapping[str, Any]], algorithm: str) -> str:
    """As in the first of the paper's tables that has it."""
    for claim in paper:
        if (value := _methods(claim).get(_plain(algorithm))) is not None:
            return " ± ".join(f"{number:.1f}" for number in value)
    return "–"


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Algorithms as the paper lists them, then the others as they come."""
    order = list(dict.fromkeys(method for claim in _said() for method in _methods(claim)))
    place = {method: number for number, method in enumerate(order)}
    return sorted(rows, key=lambda row: place.get(_plain(row["algorithm"]), len(order)))


def words(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the numbers came about, and which are missing."""
    lines = []
    for result in results:
        draws, trials = result["draws"], len(result["trials"])
        over = f"mean ± standard error over {trials} trials" if trials > 1 else "one trial"
        lines.append(
            f"{result['dataset']}: {_unit(result['metric'])} on the in-split of the domain left out; {over}; "
            f"{result['words']} among {draws} draw{'s' * (draws > 1)} of settings."
        )
        if diverged := sum(row["diverged"] for row in result["rows"]):
            lines.append(f"{result['dataset']}: draws lost to runs that diverged: {diverged}.")
        if gone := result["missing"]:
            more = f"; and {len(gone) - NAMED:,} more" if len(gone) > NAMED else ""
            lines.append(f"{result['dataset']}: {len(gone):,} missing: {'; '.join(gone[:NAMED])}{more}.")
    if any(_claims(result) for result in results):
        lines.append("The paper's numbers are over five trials, with what it prints after ±.")
    return [clean(line) for line in lines]
