"""What is suspicious in a table: leakage, rows that are no examples, classes of one domain, duplicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.tables.kinds import DROPPED, ColumnType, alike
from shoal.data.tables.labels import Labels
from shoal.data.tables.table import Column, Table, row_list

Array = NDArray[Any]
NEARLY, RELATED, EXACTLY = 0.98, 0.9, 0.9999
"""Balanced accuracy, and R² of one column and of several, from which on there is possibly leakage."""
MOST, LEAST = 20_000, 20
"""Rows that are looked at, and below how many nothing is said."""
FENCE, LOG_FENCE = 10.0, 3.0
"""Quartile distances, of labels and of their logarithms, beyond which a label is far from the others."""
RARE = 0.1
"""The share of rows up to which they are exceptions."""


def leaks(
    table: Table, types: Mapping[str, ColumnType], target: Labels, domain: Array, names: Sequence[str]
) -> dict[str, str]:
    """Columns that may give the answer away, or that identify the domain, and why; ``names`` are those of the
    label and the domain."""
    classes = target.classes
    most = min(MOST, 10**7 // classes) if classes else MOST  # bounds the memory
    rows = np.random.default_rng(0).permutation(table.rows)[:most]
    result: dict[str, str] = {}
    if len(rows) < LEAST:
        return result
    label, numbers = target.values[rows], dict[str, Array]()
    known_before = "if it is not known before the label is, exclude it (drop)"
    for name, about in types.items():
        if about.kind in (DROPPED, "text"):
            continue
        codes, values = _codes(table[name], about, rows)
        if values is not None:
            numbers[name] = values
        if found := _predicts(codes, values, label, target, names[0]):
            result[name] = f"possible leakage: this column alone {found}; {known_before}"
        elif _identifies(codes, values, domain[rows]):
            result[name] = f"repeats the domain {names[1]!r}: a model cannot use it on a new domain; drop it?"
    if not classes and (several := _together(numbers, label)):
        for name in several:
            others = " and ".join(map(repr, (n for n in several if n != name)))
            result.setdefault(
                name,
                f"possible leakage: with {others} it gives {names[0]!r} exactly, as a weighted sum; "
                f"{known_before}",
            )
    return result


def _codes(column: Column, about: ColumnType, rows: Array) -> tuple[Array, Array | None]:
    """Equal cells by number, missing ones too; and the values, where they have an order."""
    if about.kind == "categorical":
        return column.categories()[1][rows], None
    values = column.values(about.kind, about.how)[0][rows]
    return np.unique(values, return_inverse=True)[1], values


def _predicts(codes: Array, values: Array | None, label: Array, target: Labels, name: str) -> str:
    """What of the label a column predicts on rows that it was not fitted to, if nearly all."""
    guess = _guess(codes, values, label, target.classes)
    if not target.classes:
        score = _r2(guess[:, 0], values, label)
        return f"predicts {name!r} (R² {score:.3f} on held-out rows)" if score >= RELATED else ""
    best = np.where(guess.max(1) > 0, guess.argmax(1), -1)
    every, right = np.bincount(label, minlength=target.classes), np.bincount(label[best == label])
    right = np.pad(right, (0, target.classes - len(right)))
    recall = right[every > 0] / every[every > 0]
    if len(recall) > 1 and (score := float(recall.mean())) >= NEARLY:
        return f"predicts {name!r} ({score:.1%} balanced accuracy on held-out rows)"
    for c in np.flatnonzero(every >= LEAST / 2) if len(recall) > 2 else ():
        hits, said = right[c], int((best == c).sum())
        if hits >= NEARLY * every[c] and hits >= NEARLY * said:
            return f"identifies {name!r} {target.names[c]!r} ({hits:,} of {every[c]:,} held-out rows)"
    return ""


def _guess(codes: Array, values: Array | None, label: Array, classes: int | None) -> Array:
    """Shares of classes, or the mean label, at the nearest value (or the same category) in the other half."""
    each = np.eye(classes)[label] if classes else label[:, None]
    guess = np.empty_like(each, dtype=float)
    for half in (0, 1):
        fit, test = np.arange(half, len(label), 2), np.arange(1 - half, len(label), 2)
        place, near = (codes[fit] + 1, codes[test] + 1) if values is None else _places(values, fit, test)
        size = int(max(place.max(), near.max())) + 1
        sums = np.zeros((size, each.shape[1]))
        np.add.at(sums, place, each[fit])
        counts = np.bincount(place, minlength=size)[:, None]
        unknown = 0.0 if classes else label[fit].mean()
        guess[test] = np.where(counts > 0, sums / np.maximum(counts, 1), unknown)[near]
    return guess


def _r2(guess: Array, values: Array | None, label: Array) -> float:
    """Of a guess, or of a straight line, whichever is better."""
    total = float(((label - label.mean()) ** 2).sum())
    if not total > 0:
        return 0.0
    score = 1 - float(((guess - label) ** 2).sum()) / total
    if values is not None and (known := ~np.isnan(values)).sum() >= LEAST and np.std(values[known]) > 0:
        score = max(score, float(np.corrcoef(values[known], label[known])[0, 1] ** 2 * known.mean()))
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


def _together(numbers: Mapping[str, Array], label: Array, most: int = 4) -> list[str]:
    """Two to four columns of which the label is a weighted sum, chosen one after the other."""
    names = [name for name, values in numbers.items() if np.nanstd(values) > 0]
    y, chosen = label - label.mean(), list[str]()
    if len(label) <= 3 * most or not y.any():
        return []
    columns = {name: np.nan_to_num(numbers[name] - np.nanmean(numbers[name])) for name in names}
    columns = {name: values / np.linalg.norm(values) for name, values in columns.items()}
    rest = y
    while len(chosen) < min(most, len(columns)):
        chosen.append(max(columns.keys() - set(chosen), key=lambda n: abs(float(columns[n] @ rest))))
        x = np.stack([columns[name] for name in chosen], 1)
        rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        if rest @ rest <= (1 - EXACTLY) * (y @ y):
            return chosen if len(chosen) > 1 else []
    return []


def _identifies(codes: Array, values: Array | None, domain: Array) -> bool:
    """Whether a column is a name or a number of the domain. Other quantities that are the same all over a
    domain, such as a mean income, are of use on a new one."""
    domains, own = len(np.unique(domain)), len(np.unique(codes))
    if domains < 2 or own != domains or len(np.unique(codes * (domain.max() + 1) + domain)) != domains:
        return False
    if values is None:
        return True
    return bool((values % 1 == 0).all()) and np.ptp(values) < 2 * domains


# Rows


def mostly_empty(table: Table, names: Sequence[str]) -> Array:
    """Which rows, few of them, lack more than half of the cells that others have."""
    lacking = np.stack([table[name].cells.isna().to_numpy() for name in names])
    usual = lacking.mean(1) < 0.5
    if usual.sum() < 3:
        return np.zeros(table.rows, bool)
    empty = lacking[usual].mean(0) > 0.5
    return empty if 0 < empty.sum() <= max(1, RARE * table.rows) else np.zeros(table.rows, bool)


def far_labels(values: Array) -> Array:
    """Which labels, few of them, are far from all others; of positive ones, by their ratio too."""
    far = np.ones(len(values), bool)
    scales = [(values, FENCE)] + ([(np.log(values), LOG_FENCE)] if (values > 0).all() else [])
    for scaled, fence in scales:
        first, third = np.quantile(scaled, [0.25, 0.75])
        far &= (scaled < first - fence * (third - first)) | (scaled > third + fence * (third - first))
    few = len(values) >= LEAST and far.sum() <= RARE * len(values)
    return far if few else np.zeros(len(values), bool)


def rows_of_note(table: Table, suspects: Mapping[str, Array]) -> list[str]:
    """Remarks on rows that are probably no examples, with the option that drops them."""
    one = {
        "mostly-empty": "is mostly empty, such as a total or a note below a table",
        "outliers": "has a label far from all others",
        "single": "is the only one of its domain",
    }
    several = {
        "mostly-empty": "are mostly empty, such as totals or notes below a table",
        "outliers": "have labels far from all others",
        "single": "are the only ones of their domains",
    }
    notes = []
    for kind in one:
        numbers = table.numbers[suspects[kind]].tolist()
        if numbers:
            words = several[kind] if len(numbers) > 1 else one[kind]
            notes.append(f"{row_list(numbers)} {words}; set drop_rows to {kind} to leave out such rows")
    return notes


def classes_of_one_domain(target: Labels, domain: Array, names: Sequence[str]) -> list[dict[str, Any]]:
    """Domains with classes that no other domain has, and the accuracy that is possible without them."""
    counts = np.zeros((len(names), target.classes or 0), np.int64)
    if target.classes:
        np.add.at(counts, (domain, target.values), 1)
    alone = ((counts > 0).sum(0) == 1) & (counts > 0)
    return [
        {
            "domain": names[d],
            "classes": [target.names[c] for c in np.flatnonzero(alone[d])],
            "rows": int(counts[d][alone[d]].sum()),
            "ceiling": 1 - float(counts[d][alone[d]].sum() / counts[d].sum()),
        }
        for d in np.flatnonzero(alone.any(1)).tolist()
        if len(names) > 1
    ]


def in_words(found: Sequence[Mapping[str, Any]], most: int = 5) -> list[str]:
    """What :func:`classes_of_one_domain` found, a line per domain."""
    lines = [
        f"class{'es' * (len(each['classes']) > 1)} {', '.join(map(repr, each['classes'][:5]))}"
        f"{', …' * (len(each['classes']) > 5)} only in domain {each['domain']!r}: when it is held out, no "
        f"method can predict {each['rows']:,} of its rows, so its accuracy is at most {each['ceiling']:.1%}"
        for each in found
    ]
    return lines[:most] + [f"… and {len(lines) - most:,} more domains with classes of their own"] * (
        len(lines) > most
    )


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
        own = column.encoded[1] if column.numbers is None else column.numbers
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
    first = table.numbers[np.flatnonzero(group == group[twice[0]])[:2]].tolist()
    note = f"{repeated:,} rows are duplicates (such as rows {first[0]:,} and {first[1]:,})"
    if rows:
        note += (
            f"; {rows:,} of these rows are in more than one domain, so held-out domains are not independent"
        )
    return [f"{note}; if they belong to the same entity, set group to its column"]


def report_lines(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings of a column report, a line each."""
    return [f"column {c['column']!r}: {line}" for c in columns for line in c["warnings"]]
