"""Tables of a run's scores in every domain, alone or over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.experiments.statistics import plus_minus
from shoal.report.tables import Table

MOST, FEW = 50, 10
"""Of a split with more domains than the former, so many are shown."""

Scores = Mapping[str, Any]
"""By split, see :class:`~shoal.training.evaluate.Scores`."""


def run_table(record: Mapping[str, Any]) -> Table:
    """A finished run: every measure and domain at the selected step and the last."""
    selected, last = record["history"][record["selected"]]["scores"], record["history"][-1]["scores"]
    return _table([selected, last], ["at the last step"])


def seeds_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The same run with several seeds: mean ± standard deviation, and each."""
    scores = [r["history"][r["selected"]]["scores"] for r in records]
    return _table(scores, [f"seed {r['config']['seed']}" for r in records], ", mean ± sd")


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """The mean alone of a single value; nothing where one is not a number."""
    return "–" if any(v is None or math.isnan(v) for v in values) else plus_minus(values, 3)


def _table(scores: Sequence[Scores], more: Sequence[str] = (), mean: str = "") -> Table:
    """Rows for what the first of ``scores`` has, with a number from each; ``mean`` asks for their mean.

    Where more than one thing is measured, a column says what. Others may lack what the first has.
    """
    first = scores[0]
    measured = any(content.get("metrics") for content in first.values())
    heads = ["measure", f"value{mean}"] if measured else [f"{next(iter(first.values()))['metric']}{mean}"]
    table = Table(["split", "domain", *heads, *more])
    for split, content in first.items():
        some, every = content.get("sampled") or (0, 0)
        name = f"{split} ({some:,} of {every:,})" if every else split
        domains = list(content["domains"])
        shown = domains[:FEW] if len(domains) > MOST else domains
        rows = [("metrics", "all", m, m) for m in content.get("metrics") or ()]
        rows += [("domains", d, content["metric"], d) for d in shown]
        for kind, domain, measure, key in rows:
            values = [((s.get(split) or {}).get(kind) or {}).get(key) for s in scores]
            cells = [mean_and_deviation(values)] if mean else []
            table.add(name, domain, *([measure] if measured else []), *cells, *map(number, values))
        if len(domains) > MOST:
            table.add(name, f"… {len(domains) - FEW:,} more", *[""] * (len(table.columns) - 2))
    return table
