"""What is suspicious in a table: leakage, rows that are no examples, classes of one domain, duplicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shoal.data.tables.kinds import DROPPED, ColumnType
from shoal.data.tables.labels import Labels
from shoal.data.tables.table import Table, row_list

Array = NDArray[Any]
NEARLY, RELATED, EXACTLY = 0.98, 0.9, 0.9999
"""Balanced accuracy, and R² of one column and of several, from which on there is possibly leakage."""
MOST, LEAST = 20_000, 20
"""Rows that are looked at, and below how many nothing is said."""
OUTLIER_DISTANCE, LOG_OUTLIER_DISTANCE = 10.0, 3.0
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
        if ordered := about.kind != "categorical":
            values = numbers[name] = table[name].values(about.kind, about.how)[0][rows]
        else:
            values = table[name].categories()[1][rows]
        if found := _predicts(values, ordered, label, target, names[0]):
            result[name] = f"possible leakage: this column alone {found}; {known_before}"
        elif _identifies(values, ordered, domain[rows]):
            result[name] = f"repeats the domain {names[1]!r}: a model cannot use it on a new domain; drop it?"
    several = [] if classes else _weighted_sum(numbers, label)
    for name in several:
        others = " and ".join(map(repr, (n for n in several if n != name)))
        found = f"with {others} it gives {names[0]!r} exactly, as a weighted sum"
        result.setdefault(name, f"possible leakage: {found}; {known_before}")
    return result


def _predicts(values: Array, ordered: bool, label: Array, target: Labels, name: str) -> str:
    """What of the label a column predicts on rows that it was not fitted to, if nearly all."""
    guess = _guess(values, ordered, label, target.classes)
    if not target.classes:
        score = 1 - float(
            ((guess[:, 0] - label) ** 2).sum() / max(((label - label.mean()) ** 2).sum(), 1e-300)
        )
        known = ~np.isnan(values)
        if ordered and known.sum() >= LEAST and np.std(values[known]) > 0 and np.std(label[known]) > 0:
            line = float(np.corrcoef(values[known], label[known])[0, 1] ** 2)
            score = max(score, line * known.mean())
        return f"predicts {name!r} (R² {score:.3f} on held-out rows)" if score >= RELATED else ""
    best = np.where(guess.max(1) > 0, guess.argmax(1), -1)
    every = np.bincount(label, minlength=target.classes)
    right = np.bincount(label[best == label], minlength=target.classes)
    said = np.bincount(best[best >= 0], minlength=target.classes)
    recall = right[every > 0] / every[every > 0]
    if len(recall) > 1 and (score := float(recall.mean())) >= NEARLY:
        return f"predicts {name!r} ({score:.1%} balanced accuracy on held-out rows)"
    sure = (every >= LEAST / 2) & (right >= NEARLY * every) & (right >= NEARLY * said)
    for c in np.flatnonzero(sure & (len(recall) > 2)):
        return f"identifies {name!r} {target.names[c]!r} ({right[c]:,} of {every[c]:,} held-out rows)"
    return ""


def _guess(values: Array, ordered: bool, label: Array, classes: int | None) -> Array:
    """Shares of classes, or the mean label, at the nearest value (or the same category) in the other half."""
    each = pd.DataFrame(np.eye(classes)[label] if classes else label[:, None])
    known = values[~np.isnan(values)]
    below = known.min() - np.ptp(known) - 1 if len(known) else 0.0
    values = np.where(np.isnan(values), below, values)  # missing is a value of its own
    found = []
    for half in (0, 1):
        fit = np.arange(len(label)) % 2 == half
        means = each[fit].groupby(values[fit]).mean()
        near = means.reindex(values[~fit], method="nearest" if ordered else None)
        near.index = each.index[~fit]
        found.append(near.fillna(0.0 if classes else label[fit].mean()))
    return pd.concat(found).sort_index().to_numpy()


def _weighted_sum(numbers: Mapping[str, Array], label: Array, most: int = 4) -> list[str]:
    """Two to four columns of which the label is a weighted sum, chosen one after the other."""
    y, chosen = label - label.mean(), list[str]()
    columns = {name: np.nan_to_num(v - np.nanmean(v)) for name, v in numbers.items() if np.nanstd(v) > 0}
    columns = {name: values / np.linalg.norm(values) for name, values in columns.items()}
    rest = y
    while y.any() and len(chosen) < min(most, len(columns)) and len(label) > 3 * most:
        chosen.append(max(columns.keys() - set(chosen), key=lambda n: abs(float(columns[n] @ rest))))
        x = np.stack([columns[name] for name in chosen], 1)
        rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        if rest @ rest <= (1 - EXACTLY) * (y @ y):
            return chosen if len(chosen) > 1 else []
    return []


def _identifies(values: Array, ordered: bool, domain: Array) -> bool:
    """Whether a column is a name or a number of the domain. Other quantities that are the same all over a
    domain, such as a mean income, are of use on a new one."""
    pairs = pd.DataFrame({"value": values, "domain": domain}).drop_duplicates()
    count = pairs["domain"].nunique()
    if count < 2 or len(pairs) != count or pairs["value"].nunique(dropna=False) != count:
        return False
    return not ordered or (bool((values % 1 == 0).all()) and np.ptp(values) < 2 * count)


# Rows


def mostly_empty(table: Table, names: Sequence[str]) -> Array:
    """Which rows, few of them, lack more than half of the cells that others have."""
    lacking = table.frame[list(names)].isna().to_numpy()
    usual = lacking.mean(0) < 0.5
    empty = lacking[:, usual].mean(1) > 0.5 if usual.sum() > 2 else np.zeros(table.rows, bool)
    return empty & (empty.sum() <= max(1, RARE * table.rows))


def far_labels(values: Array) -> Array:
    """Which labels, few of them, are far from all others; of positive ones, by their ratio too."""
    far = np.ones(len(values), bool)
    for scaled, fence in [(values, OUTLIER_DISTANCE)] + (
        [(np.log(values), LOG_OUTLIER_DISTANCE)] if (values > 0).all() else []
    ):
        first, third = np.quantile(scaled, [0.25, 0.75])
        far &= (scaled < first - fence * (third - first)) | (scaled > third + fence * (third - first))
    return far & (len(values) >= LEAST and far.sum() <= RARE * len(values))


SUSPECT = {
    "mostly-empty": "mostly empty, such as a total or a note below a table",
    "outliers": "labelled far from all others",
    "single": "alone in the domain",
}


def rows_of_note(table: Table, suspects: Mapping[str, Array]) -> list[str]:
    """Remarks on rows that are probably no examples, with the option that drops them."""
    found = {kind: table.numbers[suspects[kind]].tolist() for kind in SUSPECT}
    return [
        f"{row_list(rows)}: {SUSPECT[kind]}; set drop_rows to {kind} to leave out such rows"
        for kind, rows in found.items()
        if rows
    ]


def classes_of_one_domain(target: Labels, domain: Array, names: Sequence[str]) -> list[dict[str, Any]]:
    """Domains with classes that no other domain has, and the accuracy that is possible without them."""
    counts = np.zeros((len(names), target.classes or 0), np.int64)
    if target.classes and len(names) > 1:
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
    ]


def in_words(found: Sequence[Mapping[str, Any]], most: int = 5) -> list[str]:
    """What :func:`classes_of_one_domain` found, a line per domain."""
    lines = [
        f"class{'es' * (len(each['classes']) > 1)} {', '.join(map(repr, each['classes'][:5]))}"
        f"{', …' * (len(each['classes']) > 5)} only in domain {each['domain']!r}: when it is held out, no "
        f"method can predict {each['rows']:,} of its rows, so its accuracy is at most {each['ceiling']:.1%}"
        for each in found[:most]
    ]
    more = len(found) - most
    return lines + [f"… and {more:,} more domains with classes of their own"] * (more > 0)


def repeated_rows(table: Table, names: Sequence[str], domain: Array) -> list[str]:
    """How many rows are equal in all features and the label, within a domain and across domains.

    Nothing is said where columns take so few values that independent rows would be equal nearly as often.
    """
    columns = {name: table[name] for name in names}
    frame = pd.DataFrame({n: c.series if c.is_number else c.encoded[1] for n, c in columns.items()})
    repeated = int(frame.duplicated().sum())
    if not repeated:
        return []
    pairs = table.rows * (table.rows - 1.0)
    counts = [frame[name].value_counts(dropna=False).to_numpy(float) for name in names]
    chance = pairs / 2 * math.prod(float((n * (n - 1)).sum()) / pairs for n in counts)
    if repeated <= 1 + chance + 3 * math.sqrt(chance):
        return []
    twice = frame.duplicated(keep=False)
    groups = frame[twice].groupby(list(names), dropna=False, sort=False).ngroup()
    first = table.numbers[groups.index[groups == 0][:2]].tolist()
    note = f"{repeated:,} rows are duplicates (such as rows {first[0]:,} and {first[1]:,})"
    several = pd.Series(domain[twice], groups.index).groupby(groups).transform("nunique") > 1
    if across := int(several.sum()):
        note += (
            f"; {across:,} of these rows are in more than one domain, so held-out domains are not independent"
        )
    return [f"{note}; if they belong to the same entity, set group to its column"]
