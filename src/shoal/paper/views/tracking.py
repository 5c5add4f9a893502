"""What `shoal track` found, as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.tables import Table

METHODS = {"Fish": "fish", "ERM": "erm"}
END = 0.1
"""The share of the measurements, at their end, that the table's means are over."""


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """One value a seed: agreement at the end of training, its change by an update, and the last score."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for label, name in METHODS.items():
        found[label] = {
            "before": [_end(r[name]["before"]["normalised"]) for r in results],
            "after": [_end(r[name]["after"]["normalised"]) for r in results],
            "raw": [_end(r[name]["after"]["raw"]) for r in results],
            "score": [r["scores"][name][-1] for r in results],
        }
    constants = [r["constant"] for r in results if r["constant"]]
    rows = {"constant classifier": constants, "constant and wrong": [c["wrong"] for c in constants]}
    for label, constant in rows.items() if constants else ():
        normalised = [c["normalised"] for c in constant]
        found[label] = {
            "before": normalised,
            "after": normalised,
            "raw": [c["raw"] for c in constant],
            "score": [c["score"] for c in constant],
        }
    return found


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    metric = results[0]["scores"]["metric"]
    made = Table(["", "cosine before", "cosine after", "GIP after", f"unseen {metric}"])
    for label, row in summary(results).items():
        cells = [_cell(row[k], 1, 3) for k in ("before", "after")]
        score = _cell(row["score"], 100, 1) if "accuracy" in metric else _cell(row["score"], 1, 3)
        made.add(label, *cells, _small(row["raw"]), score)
    return made


def words(results: Sequence[Mapping[str, Any]]) -> str:
    seeds = len(results)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    devices = ", ".join(sorted({r["environment"]["device"] for r in results}))
    return (
        f"Gradients {_when(results)}, scores at the last; {over}, on {devices}.\n"
        "Before and after an update, on the minibatches of that update."
    )


def _when(results: Sequence[Mapping[str, Any]]) -> str:
    """What the means of the table are over."""
    measured = {(tuple(r["iterations"]), r["config"]["steps"]) for r in results}
    if all(len(iterations) == steps >= 1 / END for iterations, steps in measured):
        return "over the last tenth of the iterations"
    if len(measured) > 1:  # folds of different sizes
        return "over the last tenth of the measurements, at least one"
    ((iterations, steps),) = measured
    tail = iterations[-_count(iterations) :]
    if len(tail) == 1:
        return f"at the last measurement (iteration {tail[0]:,} of 0 to {steps - 1:,})"
    span = f"iterations {tail[0]:,} to {tail[-1]:,} of 0 to {steps - 1:,}"
    return f"over the last {len(tail):,} measurements ({span})"


def _count(measured: Sequence[Any]) -> int:
    return max(1, round(END * len(measured)))


def _end(values: Sequence[float | None]) -> float | None:
    """The mean over the last tenth."""
    tail = values[-_count(values) :]
    known = [v for v in tail if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else None


def _cell(values: Sequence[float | None], scale: float, digits: int) -> str:
    known = [scale * v for v in values if v is not None]
    if not known:
        return "–"
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def _small(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{statistics.fmean(known):.2e}" if known else "–"
