"""Tables of a run's scores in every domain, alone or over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.tables import Table

MOST = 50
FEW = 10
"""Of a split with more domains than the former, so many are shown."""

Scores = Mapping[str, Any]
"""By split, see :class:`~shoal.training.evaluate.Scores`."""


def scores_table(scores: Scores) -> Table:
    """One evaluation: a row for every measure and domain."""
    return _filled(Table(_columns(scores, "{}")), [scores])


def run_table(record: Mapping[str, Any]) -> Table:
    """A finished run: every measure and domain at the selected step and the last."""
    selected, last = record["history"][record["selected"]]["scores"], record["history"][-1]["scores"]
    return _filled(Table([*_columns(selected, "{}"), "at the last step"]), [selected, last])


def seeds_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The same run with several seeds: mean ± standard deviation, and each."""
    found = [r["history"][r["selected"]]["scores"] for r in records]
    each = [f"seed {r['config']['seed']}" for r in records]
    return _filled(Table([*_columns(found[0], "{}, mean ± sd"), *each]), found, spread=True)


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """The mean alone of a single value; nothing where one is not a number."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    if len(known) < len(values):
        return "–"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


def _columns(scores: Scores, heading: str) -> list[str]:
    """Where more than one thing is measured, a column says what."""
    if _measured(scores):
        return ["split", "domain", "measure", heading.format("value")]
    return ["split", "domain", heading.format(next(iter(scores.values()))["metric"])]


def _measured(scores: Scores) -> bool:
    return any(content.get("metrics") for content in scores.values())


def _named(split: str, scores: Scores) -> str:
    """A split, with how much of it was scored where that was not all."""
    some, all_ = scores[split].get("sampled") or (0, 0)
    return f"{split} ({some:,} of {all_:,})" if all_ else split


def _value(scores: Scores, split: str, kind: str, name: str) -> float | None:
    """Of a record that may lack what another of the same table has."""
    found: float | None = ((scores.get(split) or {}).get(kind) or {}).get(name)
    return found


def _filled(table: Table, found: Sequence[Scores], spread: bool = False) -> Table:
    """Rows for what the first of ``found`` has, with a number from each."""
    measured = _measured(found[0])

    def add(split: str, domain: str, measure: str, values: Sequence[float | None]) -> None:
        mean = [mean_and_deviation(values)] if spread else []
        table.add(
            _named(split, found[0]), domain, *([measure] if measured else []), *mean, *map(number, values)
        )

    for split, content in found[0].items():
        for name in content.get("metrics") or {}:
            add(split, "all", name, [_value(s, split, "metrics", name) for s in found])
        names = list(content["domains"])
        for name in names[: FEW if len(names) > MOST else None]:
            add(split, name, content["metric"], [_value(s, split, "domains", name) for s in found])
        if len(names) > MOST:
            empty = [""] * (len(table.columns) - 2)
            table.add(_named(split, found[0]), f"… {len(names) - FEW:,} more", *empty)
    return table
