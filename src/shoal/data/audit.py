"""What is suspicious in a table before training: leakage, near-equal names, repeated rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.data.columns import DROPPED, ColumnType, alike, categories_of, values_of
from shoal.data.reading import Array, Table

NEARLY = 0.98
"""A column that alone predicts the label this well, in rows it was not fitted to, is possibly a leak."""
MOST, LEAST = 20_000, 20
"""Rows that are looked at, and below how many nothing is said."""


def leaks(
    table: Table,
    types: Mapping[str, ColumnType],
    label: Array,
    classification: bool,
    domain: Array,
    label_name: str,
    domain_name: str,
) -> dict[str, str]:
    """Columns that may give the answer away, or that repeat the domain, and why."""
    most = min(MOST, 10**7 // (int(label.max()) + 1)) if classification else MOST  # bounds the memory
    rows = np.random.default_rng(0).permutation(len(label))[:most]
    result: dict[str, str] = {}
    if len(rows) < LEAST:
        return result
    target = label[rows]
    for name, about in types.items():
        if about.kind in (DROPPED, "text"):
            continue
        codes, values = _codes(table, about, rows)
        score = _score(codes, values, target, classification)
        if score >= NEARLY:
            what = f"{score:.1%} balanced accuracy" if classification else f"R² {score:.3f}"
            result[name] = (
                f"possible leakage: this column alone predicts {label_name!r} ({what} on held-out rows); "
                "if it is not known before the label is, exclude it (drop)"
            )
        elif why := _of_domain(codes, domain[rows]):
            result[name] = f"{why} {domain_name!r}: a model cannot use it on a new domain; drop it?"
    return result


def _codes(table: Table, about: ColumnType, rows: Array) -> tuple[Array, Array | None]:
    """Equal cells by number, missing ones too; and the values, where they have an order."""
    column = table[about.name].take(np.sort(rows))
    back = np.argsort(np.argsort(rows))
    if about.kind == "categorical":
        return categories_of(column)[1][back], None
    values = values_of(column, about.kind, about.how)[0][back]
    return np.unique(values, return_inverse=True)[1], values


def _score(codes: Array, values: Array | None, target: Array, classification: bool) -> float:
    """How well the nearest value (or the same category) in the other half of the rows predicts the target.

    Balanced accuracy of the most frequent class there; or R² of the mean target there, or of a straight line,
    whichever is better.
    """
    each = np.eye(int(target.max()) + 1)[target] if classification else target[:, None]
    guess = np.empty_like(each, dtype=float)
    for half in (0, 1):
        fit, test = np.arange(half, len(target), 2), np.arange(1 - half, len(target), 2)
        place, near = (codes[fit] + 1, codes[test] + 1) if values is None else _places(values, fit, test)
        size = int(max(place.max(), near.max())) + 1
        sums = np.zeros((size, each.shape[1]))
        np.add.at(sums, place, each[fit])
        counts = np.bincount(place, minlength=size)[:, None]
        unknown = 0.0 if classification else target[fit].mean()
        guess[test] = np.where(counts > 0, sums / np.maximum(counts, 1), unknown)[near]
    if classification:
        right = (guess.argmax(1) == target) & (guess.max(1) > 0)
        counts = each.sum(0)
        shares = (each.T @ right)[counts > 0] / counts[counts > 0]
        return float(shares.mean()) if len(shares) > 1 else 0.0
    total = float(((target - target.mean()) ** 2).sum())
    if not total > 0:
        return 0.0
    score = 1 - float(((guess[:, 0] - target) ** 2).sum()) / total
    if values is not None and (known := ~np.isnan(values)).sum() >= LEAST and np.std(values[known]) > 0:
        score = max(score, float(np.corrcoef(values[known], target[known])[0, 1] ** 2 * known.mean()))
    return score


def _places(values: Array, fit: Array, test: Array) -> tuple[Array, Array]:
    """Which distinct value of ``fit`` each of its rows has, and which is nearest to each row of ``test``.

    Missing is a value of its own, far below.
    """
    known = values[~np.isnan(values)]
    filled = np.where(np.isnan(values), known.min() - np.ptp(known) - 1 if len(known) else 0.0, values)
    distinct, place = np.unique(filled[fit], return_inverse=True)
    right = np.searchsorted(distinct, filled[test]).clip(0, len(distinct) - 1)
    left = (right - 1).clip(0)
    is_left = np.abs(filled[test] - distinct[left]) <= np.abs(distinct[right] - filled[test])
    return place, np.where(is_left, left, right)


def _of_domain(codes: Array, domain: Array) -> str:
    """Whether the column says the same as the domain, or is the same all over every domain."""
    domains, own = len(np.unique(domain)), len(np.unique(codes))
    if not 1 < own <= domains or len(np.unique(codes * (domain.max() + 1) + domain)) != domains:
        return ""
    return "repeats the domain" if own == domains else "is the same in all rows of a domain of"


def near_equal(names: Sequence[str], what: str) -> list[str]:
    """A warning for names of classes or domains that differ only in case or spaces."""
    return [
        f"{what} {pair} differ only in case or spaces; they are treated as different" for pair in alike(names)
    ]


def repeated_rows(table: Table, names: Sequence[str], domain: Array) -> list[str]:
    """How many rows are equal in all features and the label, within a domain and across domains.

    Nothing is said where columns take so few values that independent rows would be equal nearly as often.
    """
    key, cells = np.zeros(table.rows, np.uint64), []
    for place, name in enumerate(names):
        column = table[name]
        own = column.encoded[1] if column.plain is None else column.plain
        cells.append(np.unique(own, return_inverse=True)[1])
        mixed = (cells[-1].astype(np.uint64) + np.uint64(place + 1)) * np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (mixed ^ (mixed >> np.uint64(29)))) * np.uint64(0xBF58476D1CE4E5B9)
    _, group, counts = np.unique(key, return_inverse=True, return_counts=True)
    twice = np.flatnonzero(counts[group] > 1)
    repeated = len(twice) - len(np.unique(group[twice]))
    pairs = table.rows * (table.rows - 1.0)
    counted = [np.bincount(codes).astype(float) for codes in cells]
    chance = pairs / 2 * math.prod(float((n * (n - 1)).sum()) / max(1.0, pairs) for n in counted)
    if repeated <= 1 + chance + 3 * math.sqrt(chance):
        return []
    both = np.unique(np.stack([group[twice], domain[twice]]), axis=1)
    across = np.flatnonzero(np.bincount(both[0]) > 1)
    rows = int(np.isin(group[twice], across).sum())
    first = (np.flatnonzero(group == group[twice[0]])[:2] + 1).tolist()
    note = f"{repeated:,} rows are duplicates (such as rows {first[0]:,} and {first[1]:,})"
    if rows:
        note += (
            f"; {rows:,} of these rows are in more than one domain, so held-out domains are not independent"
        )
    return [f"{note}; if they belong to the same entity, set group to its column"]


def report_lines(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings of a column report, a line each."""
    return [f"column {c['column']!r}: {line}" for c in columns for line in c["warnings"]]
