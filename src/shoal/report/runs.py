"""Tables of a run's scores in every domain, alone or over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.tables import Table


def scores_table(scores: Mapping[str, Any]) -> Table:
    """One evaluation: a row for every domain."""
    table = Table(["split", "domain", _metric(scores)])
    for split, content in scores.items():
        for name, value in content["domains"].items():
            table.add(split, name, f"{value:.3f}")
    return table


def run_table(record: Mapping[str, Any]) -> Table:
    """A finished run: every domain at the selected step and the last."""
    selected, last = record["history"][record["selected"]]["scores"], record["history"][-1]["scores"]
    table = Table(["split", "domain", _metric(selected), "at the last step"])
    for split, content in selected.items():
        for name, value in content["domains"].items():
            table.add(split, name, f"{value:.3f}", f"{last[split]['domains'][name]:.3f}")
    return table


def seeds_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The same run with several seeds: mean ± standard deviation, and each."""
    found = [r["history"][r["selected"]]["scores"] for r in records]
    each = [f"seed {r['config']['seed']}" for r in records]
    table = Table(["split", "domain", f"{_metric(found[0])}, mean ± sd", *each])
    for split, content in found[0].items():
        for name in content["domains"]:
            values = [scores[split]["domains"][name] for scores in found]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            table.add(split, name, f"{statistics.mean(values):.3f}{spread}", *(f"{v:.3f}" for v in values))
    return table


def _metric(scores: Mapping[str, Any]) -> str:
    return str(next(iter(scores.values()))["metric"])
