"""Tables of scores: of a run, of a run with several seeds, and of a sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.experiments.statistics import plus_minus
from shoal.report.tables import Table, cell, clean, listed

MOST, FEW = 50, 10
"""Of a split with more domains than the former, only so many are shown."""
Result = Mapping[str, Any]


def number(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def run_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """A finished run at the selected step and at the last; or several seeds of it, with their mean ± sd.

    A row for each split and metric, and for each domain.
    """
    scores = [record["history"][record["selected"]]["scores"] for record in records]
    several, titles = len(records) > 1, [f"seed {record['config']['seed']}" for record in records]
    if not several:
        scores, titles = [*scores, records[0]["history"][-1]["scores"]], ["at the last step"]
    table = Table(["split", "domain", "metric", "value" if not several else "mean ± sd", *titles])
    for split, content in scores[0].items():
        some, every = content.get("sampled") or (0, 0)
        name, domains = f"{split} ({some:,} of {every:,})" if every else split, list(content["domains"])
        rows = [("metrics", "all", metric, metric) for metric in content.get("metrics") or ()]
        shown = domains[:FEW] if len(domains) > MOST else domains
        rows += [("domains", domain, content["metric"], domain) for domain in shown]
        for part, domain, metric, key in rows:
            values = [((s.get(split) or {}).get(part) or {}).get(key) for s in scores]
            whole = not any(v is None or math.isnan(v) for v in values)
            mean = [plus_minus(values, 3) if whole else "–"] if several else []
            table.add(name, domain, metric, *mean, *map(number, values))
        if len(domains) > len(shown):
            table.add(name, f"… {len(domains) - FEW:,} more", *[""] * (len(table.columns) - 2))
    return table


def dataset_table(result: Result) -> Table:
    """A dataset of a sweep (:func:`shoal.experiments.selection.sweep_results`): a column for every domain."""
    unit = _unit(result["metric"])
    table = Table(["algorithm", *(f"{name}, {unit}" for name in (*result["held_out"], "average"))])
    for row in result["rows"]:
        table.add(row["algorithm"], *(cell(v, "se") for v in (*row["domains"].values(), row["average"])))
    return table


def overall_table(results: Sequence[Result]) -> Table:
    """The averages of every dataset of a sweep, and over those where they share a metric."""
    metrics = [result["metric"] for result in results]
    columns = [f"{result['dataset']}, {_unit(result['metric'])}" for result in results]
    columns += [f"average, {_unit(metrics[0])}"] if len(set(metrics)) == 1 else []
    table = Table(["algorithm", *columns])
    rows = [{row["algorithm"]: row["average"] for row in result["rows"]} for result in results]
    for name in dict.fromkeys(name for row in rows for name in row):
        averages = [row.get(name) for row in rows]
        known = [a["mean"] for a in averages if a and None not in a["values"]]
        mean = statistics.fmean(known) if len(known) == len(averages) else None
        whole = {"values": [mean], "mean": mean, "se": None, "metric": metrics[0]}
        table.add(name, *(cell(a, "se") for a in [*averages, whole][: len(columns)]))
    return table


def sweep_notes(results: Sequence[Result]) -> list[str]:
    """How the numbers of a sweep were measured, and which are missing."""
    lines = []
    for result in results:
        name, trials, missing = result["dataset"], result["search"], result["missing"]
        seeds = len(result["rows"][0]["average"]["values"])
        over = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
        search = f"selected from {trials} trials of random search" if trials > 1 else "with the defaults"
        unit = f"{_unit(result['metric'])} on the in-split of the held-out domain"
        lines.append(f"{name}: {unit}; {over}; {result['rule_name']} {search}.")
        if diverged := sum(row["average"]["status"].get("diverged", 0) for row in result["rows"]):
            lines.append(f"{name}: cases without a score because runs diverged: {diverged}.")
        lines += [f"{name}: {len(missing):,} missing: {listed(missing)}."] if missing else []
    return [clean(line) for line in lines]


def _unit(metric: str | None) -> str:
    return "accuracy (%)" if metric == "accuracy" else metric or "score"
