"""Labels, domains and entities: the columns of a table that are not features."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.domains import Domains
from shoal.data.tables.cells import FALSE, PLAIN, TRUE, Format
from shoal.data.tables.kinds import quoted
from shoal.data.tables.read import cell_text
from shoal.data.tables.table import Column, row_list
from shoal.errors import InputError

Array = NDArray[Any]
MANY_NUMBERS, MANY_TEXTS = 20, 50
"""A label with more different numbers is a quantity if some are no integers; of more integers or texts the
task must be set."""
UNLABELLED = frozenset(["", "na", "n/a", "nan", "<na>", "#n/a", "null", "nat", "?"])
"""What counts as a missing label, in any case; other marks of missing cells may be names of classes."""
FEWEST_GRADES = 4
"""Integers in a row that a label has at least to be called ordinal."""


@dataclass(frozen=True)
class Labels:
    """What is to be predicted, row by row: numbers of classes called ``names``, or quantities."""

    values: Array
    names: tuple[str, ...]
    note: str = ""
    """What was inferred of it, in words."""

    @classmethod
    def read(
        cls, column: Column, name: str, task: str | None, how: Format = PLAIN, numbers: Any = None
    ) -> Labels:
        """The labels in a column; ``numbers`` are those of its rows in a file."""
        _complete(unlabelled(column), column, f"label {name!r}", numbers)
        values, wrong = column.values("numeric", how)
        numeric = None if wrong or np.isnan(values).any() else values
        different = len(column.distinct) if numeric is None else len(np.unique(numeric))
        note = ""
        if task is None and numeric is not None and different > MANY_NUMBERS and (numeric % 1 != 0).any():
            note = f"label {name!r} has {different:,} different numbers, so the task is regression"
            task = "regression"
        many = different > MANY_TEXTS and different > len(values) // 2
        if task is None and (different > MANY_NUMBERS if numeric is not None else many):
            raise InputError(
                f"label {name!r} has {different:,} different values in {len(values):,} rows; set task "
                "to classification or regression."
            )
        if task != "regression":
            return cls._classes(column, numeric, name)
        if numeric is None:
            bad = wrong or {column.texts(np.flatnonzero(np.isnan(values))[:1])[0] or "": 1}
            raise InputError(f"label {name!r} contains {quoted(bad, 1)}; for regression it must be numbers.")
        return cls(numeric, (), note)

    @classmethod
    def _classes(cls, column: Column, numeric: Array | None, name: str) -> Labels:
        texts, codes = column.categories(signs=True)
        names = list(texts)
        if (codes < 0).any():  # marks such as none, which name classes here
            names += [
                text for text, gap in zip(column.distinct, column.missing, strict=True) if gap and text != "-"
            ]
            place = {text: n for n, text in enumerate(names)}
            codes = np.where(codes < 0, [place.get(text or "", -1) for text in column.texts()], codes)
        result = sorted(names, key=None if numeric is None else float)
        if len(result) < 2:
            raise InputError(
                f"label {name!r} is {result[0]!r} in every row; at least two classes are needed."
            )
        if len(result) == 2 and result[0].lower() in TRUE and result[1].lower() in FALSE:
            result.reverse()  # of ja and nein, ja is the second and positive class
        place, note = {text: number for number, text in enumerate(result)}, ""
        if numeric is not None and len(result) >= FEWEST_GRADES and (np.diff(np.unique(numeric)) == 1).all():
            note = (
                f"label {name!r} is ordinal ({result[0]} to {result[-1]}); its {len(result)} values are "
                "taken as classes without an order; set task to regression to predict it as a number"
            )
        return cls(np.array([place[text] for text in names], np.int64)[codes], tuple(result), note)

    @property
    def task(self) -> str:
        return "classification" if self.names else "regression"

    @property
    def classes(self) -> int | None:
        return len(self.names) or None

    def scaled(self, train: Array) -> tuple[dict[str, float], Array]:
        """In regression the mean and deviation of training rows, and the labels in these units."""
        if self.names:
            return {}, self.values
        some = self.values[train]
        mean, scale = float(some.mean()), float(some.std())
        if not scale > 0 or not np.isfinite(scale):
            raise InputError(f"the label is {some[0]:g} in every training row, or too large to be squared.")
        return {"mean": mean, "scale": scale}, ((self.values - mean) / scale).astype(np.float32)


def unlabelled(column: Column) -> Array:
    """Which rows have no label."""
    if column.is_number:
        return column.series.isna().to_numpy()
    return np.array([*(text.lower() in UNLABELLED for text in column.distinct), True])[column.encoded[1]]


def _complete(lacking: Array, column: Column, what: str, numbers: Any) -> None:
    """Refuse rows that lack a label, a domain or an entity."""
    if lacking.any():
        lost = np.flatnonzero(lacking)
        rows = row_list((lost + 1 if numbers is None else numbers[lost]).tolist())
        (word,) = column.texts(lost[:1])
        which = f" ({word!r} is read as missing)" if word else ""
        advice = "remove these rows, or set drop_rows to missing."
        raise InputError(f"{what} is missing in {rows}{which}; {advice}")


def domains_of(column: Column, name: str, numbers: Any = None) -> Domains:
    """Rows by the value of a column; numbers in their order, texts in theirs.

    Words such as NA are names here: only an empty value is a missing one.
    """
    codes = column.encoded[1]
    _complete(codes < 0, column, f"domain {name!r}", numbers)
    texts = [_whole_number(text) for text in column.distinct]
    if "" in texts:
        row = int(np.argmax(codes == texts.index("")))
        where = row_list([row + 1 if numbers is None else int(numbers[row])])
        raise InputError(f"domain {name!r} is {column.texts()[row]} in {where}; use integers or strings.")
    numeric = all(text.lstrip("+-").isdigit() for text in texts)
    order = sorted(set(texts), key=int if numeric else None)
    place = {text: number for number, text in enumerate(order)}
    made = Domains.from_labels(np.array([place[text] for text in texts], np.int64)[codes])
    return Domains(order, made.offsets, made.indices)


def _whole_number(text: str) -> str:
    """1.0 of one file is 1 of another; other decimals are no names, which is ""."""
    if not re.fullmatch(r"[+-]?\d+\.\d*(e[+-]?\d+)?", text, re.IGNORECASE):
        return text
    value = float(text)
    return cell_text(value) if value == value // 1 else ""


def entities_of(column: Column, name: str, numbers: Any = None) -> Array:
    """Which entity each row is of."""
    codes: Array = column.categories()[1]
    _complete(codes < 0, column, f"group {name!r}", numbers)
    return codes
