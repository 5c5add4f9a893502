"""Labels, domains and entities: the columns of a table that are not features."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.domains import Domains
from shoal.data.tables.cells import Format, boolean
from shoal.data.tables.kinds import quoted
from shoal.data.tables.read import cell_text
from shoal.data.tables.table import Column, row_list
from shoal.errors import InputError, check_names

Array = NDArray[Any]
TASKS = ("classification", "regression")
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
        cls,
        column: Column,
        name: str,
        task: str | None,
        how: Format | None = None,
        numbers: Array | None = None,
    ) -> Labels:
        """The labels in a column; ``numbers`` are those of its rows in a file."""
        if task is not None:
            check_names("task", [task], TASKS)
        missing = unlabelled(column)
        distinct, cells = column.encoded
        if missing.any():
            lost = np.flatnonzero(missing)
            word = distinct[cells[lost[0]]] if cells[lost[0]] >= 0 else ""
            which = f" ({word!r} is read as missing)" if word else ""
            raise InputError(f"label {name!r} is missing in {_rows(lost, numbers)}{which}; {REMOVE}")
        names, codes = column.categories()
        if (codes < 0).any():  # marks such as - or none, which name classes here
            marks = {distinct[n]: None for n in cells[codes < 0]}
            place = {text: n for n, text in enumerate(marks, len(names))}
            names = np.array([*names, *place], object)
            codes = np.where(codes < 0, [place.get(text, -1) for text in column.texts()], codes)
        values, wrong = column.values("numeric", how or Format())
        numeric = None if wrong or np.isnan(values).any() else values
        note = ""
        if task is None:
            task, note = _guess(len(names), len(codes), numeric, name)
        if task == "classification":
            return cls._classes(names, codes, numeric, name)
        if numeric is None:
            bad = wrong or {str(distinct[c]): 1 for c in cells[np.isnan(values)][:1]}
            raise InputError(f"label {name!r} contains {quoted(bad, 1)}; for regression it must be numbers.")
        return cls(numeric, (), note)

    @classmethod
    def _classes(cls, names: Array, codes: Array, numeric: Array | None, name: str) -> Labels:
        result = sorted(names.tolist(), key=None if numeric is None else _as_number)
        if [boolean(text) for text in result] == [1.0, 0.0]:
            result.reverse()  # of ja and nein, ja is the second and positive class
        if len(result) < 2:
            raise InputError(
                f"label {name!r} is {result[0]!r} in every row; at least two classes are needed."
            )
        place, note = {text: number for number, text in enumerate(result)}, ""
        if numeric is not None and len(result) >= FEWEST_GRADES:
            steps = np.unique(numeric)
            if (np.diff(steps) == 1).all():
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

    def scaling(self, train: Array) -> dict[str, float]:
        """In regression the mean and deviation of training rows, else nothing."""
        if self.names:
            return {}
        some = self.values[train]
        scale = float(some.std())
        if not scale > 0 or not np.isfinite(scale):
            raise InputError(f"the label is {some[0]:g} in every training row, or too large to be squared.")
        return {"mean": float(some.mean()), "scale": scale}

    def numbers(self, scaling: Mapping[str, Any]) -> Array:
        if self.names:
            return self.values
        shifted = self.values - scaling.get("mean", 0.0)
        scaled: NDArray[np.float32] = (shifted / scaling.get("scale", 1.0)).astype(np.float32)
        return scaled


REMOVE = "remove these rows, or set drop_rows to missing."


def unlabelled(column: Column) -> Array:
    """Which rows have no label."""
    distinct, codes = column.encoded
    return np.array([*(text.lower() in UNLABELLED for text in distinct), True])[codes]


def _rows(which: Array, numbers: Array | None) -> str:
    return row_list((which + 1 if numbers is None else numbers[which]).tolist())


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _guess(different: int, rows: int, values: Array | None, name: str) -> tuple[str, str]:
    """Classes or a quantity, and a note on it."""
    if values is not None and different > MANY_NUMBERS and not (np.floor(values) == values).all():
        note = f"label {name!r} has {different:,} different numbers, so the task is regression"
        return "regression", note
    many = different > MANY_TEXTS and different > rows // 2
    if different > MANY_NUMBERS if values is not None else many:
        raise InputError(
            f"label {name!r} has {different:,} different values in {rows:,} rows; set task "
            "to classification or regression."
        )
    return "classification", ""


def domains_of(column: Column, name: str, numbers: Array | None = None) -> Domains:
    """Rows by the value of a column; numbers in their order, texts in theirs.

    Words such as NA are names here: only an empty value is a missing one.
    """
    distinct, codes = column.encoded
    if (codes < 0).any():
        raise InputError(
            f"domain {name!r} is missing in {_rows(np.flatnonzero(codes < 0), numbers)}; {REMOVE}"
        )
    texts = [_whole_number(text) for text in distinct]
    if "" in texts:
        wrong = texts.index("")
        where = _rows(np.flatnonzero(codes == wrong)[:1], numbers)
        raise InputError(f"domain {name!r} is {distinct[wrong]} in {where}; use integers or strings.")
    numeric = all(t.lstrip("+-").isdigit() for t in texts)
    order = sorted(set(texts), key=int if numeric else None)
    place = {text: number for number, text in enumerate(order)}
    made = Domains.from_labels(np.array([place[t] for t in texts], np.int64)[codes])
    return Domains(order, made.offsets, made.indices)


def _whole_number(text: str) -> str:
    """1.0 of one file is 1 of another; other decimals are no names, which is ""."""
    if not re.fullmatch(r"[+-]?\d+\.\d*(e[+-]?\d+)?", text, re.IGNORECASE):
        return text
    value = float(text)
    return cell_text(value) if value == value // 1 else ""


def entities_of(column: Column, name: str, numbers: Array | None = None) -> Array:
    """Which entity each row is of."""
    codes: Array = column.categories()[1]
    if (codes < 0).any():
        raise InputError(
            f"group {name!r} is missing in {_rows(np.flatnonzero(codes < 0), numbers)}; {REMOVE}"
        )
    return codes
