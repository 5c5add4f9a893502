"""Drift: nothing is flagged where nothing changed, and what was changed is named."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from shoal.experiments.drift import ColumnDrift, column_drift

Content = dict[str, Any]


def table(rows: int, seed: int, **changes: Any) -> Content:
    rng = np.random.default_rng(seed)
    content: Content = {
        "age": rng.normal(50, 10, rows),
        "count": rng.poisson(2, rows).astype(float),
        "day": 19700.0 + rng.integers(0, 300, rows),
        "colour": rng.choice(["red", "green", "blue", "grey"], rows, p=[0.5, 0.3, 0.15, 0.05]),
    }
    content["age"][rng.random(rows) < 0.1] = np.nan
    return content | {name: change(content[name], rng) for name, change in changes.items()}


def summaries(content: Content) -> dict[str, Any]:
    """As a model's inputs.json has them."""
    found = {}
    for name, values in content.items():
        about: Content = {"rows": len(values), "missing": 0.0, "kind": "date" if name == "day" else "number"}
        if name == "colour":
            names, counts = np.unique(values, return_counts=True)
            shares = dict(zip(names.tolist(), (counts / len(values)).tolist(), strict=True))
            found[name] = about | {"kind": "category", "shares": shares}
        else:
            known = values[~np.isnan(values)]
            about["missing"] = 1 - len(known) / len(values)
            about["quantiles"] = np.quantile(known, np.linspace(0, 1, 101)).tolist() if len(known) else []
            found[name] = about
    return found


def drifted(then: Content, now: Content, entities: int | None = None) -> dict[str, ColumnDrift]:
    unseen = {"colour": {"mauve": int((now["colour"] == "mauve").sum())}}
    found = column_drift(summaries(then), summaries(now), unseen, {"age": {"high": 3}}, entities)
    return {one.column: one for one in found}


def test_no_drift_is_seldom_flagged() -> None:
    """At a level of 0.01 for each table."""
    flagged = 0
    for seed in range(60):
        rows, others = [(400, 300), (3000, 250), (300, 4000)][seed % 3]
        found = drifted(table(rows, seed), table(others, 1000 + seed))
        flagged += any(one.flags for one in found.values())
    assert flagged <= 2, flagged


@pytest.mark.parametrize(
    ("column", "change", "flag", "words"),
    [
        ("age", lambda v, rng: v + 5, "values", r"median (49|50)(\.\d+)?, now 5[45]"),
        ("age", lambda v, rng: v + 1000, "values", r"now 10\d\d, outside the training range"),
        ("age", lambda v, rng: np.full(len(v), np.nan), "missing", "now 100.0%"),
        ("day", lambda v, rng: v + 730, "values", "now 2026-.*outside the training range"),
        ("colour", lambda v, rng: np.r_[["mauve"] * 100, v[100:]], "values", r"20.0% not in .*'mauve'"),
    ],
)
def test_planted_drift_is_named(column: str, change: Any, flag: str, words: str) -> None:
    found = drifted(table(2000, 0), table(500, 77, **{column: change}))
    assert [one.column for one in found.values() if one.flags] == [column]
    assert flag in found[column].flags
    assert next(iter(found)) == column
    assert re.search(words, found[column].words()), found[column].words()
    assert "3 cells could not be read" in found["age"].words()
    for one in found.values():
        assert all(math.isfinite(v) for v in (one.distance, one.p) if v is not None)


def test_rows_of_an_entity_count_once() -> None:
    """Each row ten times: the same difference that is significant for 400 rows is not for 40 entities."""
    then, new = table(2000, 0), table(40, 3)
    repeated = {name: np.repeat(values, 10) for name, values in new.items()}
    found, naive = drifted(then, repeated, 40), drifted(then, repeated)
    assert [one.flags for one in found.values()] == [()] * 4
    assert all(one.p >= naive[name].p for name, one in found.items())  # type: ignore[operator]
