"""A column of a table: scores over seeds, a row per method, with the paper's numbers beneath ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus, summarize

Scores = dict[str, list[float | None]]
"""By row one score per seed, ``None`` where there is none."""


@dataclass(frozen=True)
class Column:
    """The runs of a column, or why there are none, and the paper's numbers."""

    dataset: str
    title: str
    metric: str
    paper: Mapping[str, Any] = field(default_factory=dict)
    """By row: what is printed and what is printed after ±, or words."""
    runs: Sequence[RunConfig] = ()
    why_not: str = ""

    def scores(self, records: Mapping[str, RunRecord], split: str = "test", last: bool = False) -> Scores:
        """Those of finished runs, at the selected step or the last one."""
        result: Scores = {}
        for config in self.runs:
            record = records.get(config.identity)
            finished = record and record.status == "finished"
            score = record.measure(split, self.metric, last=last) if record and finished else None
            result.setdefault(config.name, []).append(score)
        return result

    def entry(self, scores: Scores) -> dict[str, Any]:
        """The column as plain data."""
        ours = {row: summarize(values, self.metric) for row, values in scores.items()}
        about = {name: getattr(self, name) for name in ("dataset", "title", "metric", "why_not")}
        return {**about, "runs": len(self.runs), "paper": dict(self.paper), "ours": ours}


def is_share(metric: str) -> bool:
    """Whether it is shown in percent; a correlation is not."""
    return metric.lower().split()[-1] in ("accuracy", "f1", "recall", "auc")


def unit(metric: str) -> str:
    return f"{metric} (%)" if is_share(metric) else metric


def shown(values: Sequence[float | None], metric: str) -> str:
    """Mean ± standard deviation of scores, in percent where they are shares."""
    share = is_share(metric)
    known = [100 * v if share else v for v in values if v is not None]
    of = f" ({len(known)} of {len(values)})" if 0 < len(known) < len(values) else ""
    return plus_minus(known, 1 if share else 3) + of


def printed(numbers: Any, metric: str) -> str:
    """What the paper says, as text."""
    if isinstance(numbers, str):
        return numbers
    return " ± ".join(f"{n:.1f}" if is_share(metric) else f"{n:g}" for n in numbers)


def table(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row per method of ours, and beneath it the paper's."""
    result = []
    titles = [f"{e['title']}, {unit(e['metric'])}" for e in entries]
    for row in dict.fromkeys(row for e in entries for row in (*e["ours"], *e["paper"])):
        ours = [shown(e["ours"][row]["values"], e["metric"]) if row in e["ours"] else "–" for e in entries]
        paper = [printed(e["paper"][row], e["metric"]) if row in e["paper"] else "–" for e in entries]
        for label, cells in ((row, ours), (f"{row}, the paper", paper)):
            if set(cells) != {"–"} or label == row:
                result.append({"": label, **dict(zip(titles, cells, strict=True))})
    return result


def differences(entries: Sequence[Mapping[str, Any]], row: str, control: str) -> list[str]:
    """How much better ``row`` is than ``control`` with the same seeds."""
    lines = []
    for entry in entries:
        ours, other = (entry["ours"].get(name, {"values": []})["values"] for name in (row, control))
        both = [(a, b) for a, b in zip(ours, other, strict=True) if None not in (a, b)]
        if both:
            scale, points = (100, "points") if is_share(entry["metric"]) else (1, entry["metric"])
            mean = scale * sum(a - b for a, b in both) / len(both)
            wins = f"better with {sum(a > b for a, b in both)} of {len(both)} seeds"
            lines.append(f"{entry['title']}: {row} against {control} {mean:+.2g} {points}; {wins}.")
    return lines
