"""Drift: nothing is flagged where nothing changed, and what was changed is named."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from shoal.data.tables import Encoder, as_table
from shoal.experiments.drift import ColumnDrift, column_drift, stability


def table(rows: int, seed: int, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    content: dict[str, Any] = {
        "age": rng.normal(50, 10, rows),
        "count": rng.poisson(2, rows).astype(float),
        "rare": (rng.random(rows) < 0.03).astype(float) * rng.integers(1, 5, rows),
        "flag": rng.choice(["yes", "no"], rows, p=[0.3, 0.7]).tolist(),
        "day": [f"2024-{m:02}-{d:02}" for m, d in rng.integers(1, 28, (rows, 2)) % 12 + 1],
        "colour": rng.choice(["red", "green", "blue", "grey"], rows, p=[0.5, 0.3, 0.15, 0.05]).tolist(),
        "city": [f"c{n}" for n in np.minimum(rng.geometric(0.1, rows), 30)],
    }
    content["age"][rng.random(rows) < 0.1] = np.nan
    for name, change in changes.items():
        content[name] = change(content[name], rng)
    return content


def fitted(rows: int = 2000, seed: int = 0) -> Encoder:
    return Encoder.fit(table(rows, seed))


def drifted(fit: Encoder, new: Any, entities: int | None = None) -> dict[str, ColumnDrift]:
    content = as_table(new)
    unknown, rows = fit.unknown(content), np.arange(content.rows)
    now = {step.name: step.summary(content[step.name], rows) for step in fit.steps}
    found = column_drift(fit.training, now, unknown.new, unknown.unread, entities)
    return {one.column: one for one in found}


def test_no_drift_is_seldom_flagged() -> None:
    """60 pairs of tables of 7 columns: at a level of 0.01 for each table about none is flagged."""
    flagged = 0
    for seed in range(60):
        rows, others = [(400, 300), (3000, 250), (300, 4000)][seed % 3]
        found = drifted(fitted(rows, seed), table(others, 1000 + seed))
        assert len(found) == 7
        flagged += any(one.flags for one in found.values())
    assert flagged <= 2, flagged


PLANTED: dict[str, tuple[str, Any, str, str]] = {
    "higher": ("age", lambda v, rng: v + 5, "values", r"median 49.\d+, now 5[45]"),
    "wider": ("age", lambda v, rng: 50 + 2.5 * (v - 50), "values", "median|spread"),
    "more counts": ("count", lambda v, rng: v + rng.poisson(1, len(v)), "values", "median 2, now 3"),
    "no longer rare": ("rare", lambda v, rng: np.where(rng.random(len(v)) < 0.3, 3, v), "values", ""),
    "different category proportions": (
        "flag",
        lambda v, rng: rng.choice(["yes", "no"], len(v), p=[0.6, 0.4]).tolist(),
        "values",
        "",
    ),
    "later": (
        "day",
        lambda v, rng: [d.replace("2024", "2026") for d in v],
        "values",
        "now 2026-.*outside the training range",
    ),
    "categories": (
        "colour",
        lambda v, rng: ["red"] * (len(v) // 2) + v[len(v) // 2 :],
        "values",
        "different category proportions",
    ),
    "new category": (
        "colour",
        lambda v, rng: ["mauve"] * (len(v) // 5) + v[len(v) // 5 :],
        "values",
        r"20.0% not in the training data \('mauve'\)",
    ),
    "missing": (
        "age",
        lambda v, rng: np.where(rng.random(len(v)) < 0.3, np.nan, v),
        "missing",
        r"missing 9.\d%, now 3\d",
    ),
    "unreadable": (
        "age",
        lambda v, rng: ["high"] * 50 + v[50:].tolist(),
        "missing",
        "50 cells could not be read",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_drift_is_named(name: str) -> None:
    column, change, flag, words = PLANTED[name]
    preprocessing = fitted()
    found = drifted(preprocessing, table(500, 77, **{column: change}))
    assert [one.column for one in found.values() if one.flags] == [column]
    assert flag in found[column].flags
    assert next(iter(found)) == column
    assert re.search(words, found[column].words()), found[column].words()


def test_edges() -> None:
    preprocessing = fitted()
    gone = drifted(preprocessing, table(60, 1, age=lambda v, rng: np.full(len(v), np.nan)))["age"]
    assert gone.flags == ("missing",)
    assert gone.p is None
    far = drifted(preprocessing, table(60, 1, age=lambda v, rng: v + 1000))["age"]
    assert re.search(r"now 10\d\d, outside the training range", far.words())
    one = drifted(preprocessing, table(1, 1))
    assert not any(column.flags for column in one.values())
    for column in [*one.values(), far, gone]:
        assert all(math.isfinite(v) for v in (column.psi, column.distance, column.p) if v is not None)


def test_rows_of_an_entity_count_once() -> None:
    """Each row ten times: the same difference that is significant for 400 rows is not for 40 entities."""
    preprocessing, new = fitted(), table(40, 3)
    repeated = {name: [value for value in values for _ in range(10)] for name, values in new.items()}
    found, once, naive = (
        drifted(preprocessing, repeated, 40),
        drifted(preprocessing, new),
        drifted(preprocessing, repeated),
    )
    assert [one.flags for one in found.values()] == [()] * 7
    for name, one in found.items():
        assert one.distance == pytest.approx(once[name].distance, abs=0.03)
        assert one.p is None or one.p >= naive[name].p  # type: ignore[operator]


def test_the_stability_index() -> None:
    half, rows = np.array([0.5, 0.5]), np.array([100, 100])
    assert stability(half, half, rows) == 0
    assert stability(half, np.array([0.6, 0.4]), rows) == pytest.approx(
        0.1 * math.log(1.2) - 0.1 * math.log(0.8)
    )
