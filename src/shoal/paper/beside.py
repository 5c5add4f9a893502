"""What the paper tabulates with a column a dataset: runs, or why there are none, and its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord

Scores = Callable[["Column", Sequence[RunRecord]], Mapping[str, Sequence[float | None]]]


def by_label(column: Column, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """On the test split at the selected step: a value for every run that a row's name is the label of."""
    known = {r.config.identity: r for r in records if r.status == "finished"}
    found: dict[str, list[float | None]] = {}
    for config in column.runs:
        record = known.get(config.identity)
        score = None if record is None else record.measure("test", column.metric)
        found.setdefault(config.name, []).append(score)
    return found


@dataclass(frozen=True)
class Column:
    dataset: str
    title: str
    metric: str
    paper: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By row: what is printed, and what is printed after ±."""
    runs: Sequence[RunConfig] = ()
    why_not: str = ""
    scores: Scores = by_label

    def entry(self, records: Sequence[RunRecord]) -> dict[str, Any]:
        """The column as plain data, for tables."""
        own = {c.identity for c in self.runs}
        mine = [r for r in records if r.config.identity in own]
        return {
            "dataset": self.dataset,
            "title": self.title,
            "metric": self.metric,
            "paper": dict(self.paper),
            "ours": {row: summary(values) for row, values in self.scores(self, mine).items()} if own else {},
            "runs": len(own),
            "missing": len(own) - len(mine),
            "why_not": self.why_not,
        }


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """One value a seed, the mean of those known and their standard deviation."""
    known = [v for v in values if v is not None]
    return {
        "values": list(values),
        "mean": statistics.fmean(known) if known else None,
        "deviation": statistics.stdev(known) if len(known) > 1 else None,
    }


def column(make: Callable[[], Sequence[RunConfig]], **given: Any) -> Column:
    """A column whose runs ``make`` lists; where that is refused, such as for want of files, it says why."""
    try:
        return Column(runs=make(), **given)
    except InputError as error:
        return Column(why_not=str(error), **given)
