"""A table of your own as :class:`~shoal.data.DomainData`.

It is split by domain: those named in ``held_out`` are the test split, and a share of every other
domain is held out for validation. Whatever is fitted (means, categories, words) is fitted to training
examples alone.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.audit import leaks, near_equal, repeated_rows, report_lines
from shoal.data.batch import DomainData, TensorData
from shoal.data.cells import Format, boolean
from shoal.data.columns import DROPPED, Hints, categories_of, infer, number_format, quoted, values_of
from shoal.data.domains import Domains
from shoal.data.reading import Column, Table, as_table, need_column, number_text
from shoal.data.splits import split
from shoal.data.table import Preprocessing
from shoal.errors import InputError, TableWarning, check_names, listed
from shoal.settings import checked, shown

SHARE = 0.2
TASKS = ("classification", "regression")
MANY_NUMBERS, MANY_TEXTS = 20, 50
"""A label with more different numbers is a quantity if some are not whole; of more whole numbers or texts it
must be said what they are."""
UNLABELLED = frozenset(["", "na", "n/a", "nan", "<na>", "#n/a", "null", "nat", "?"])
"""What counts as a missing label, in any case; other marks of missing cells may be names of classes."""
MODELS = {1: "tabular", 3: "small-cnn"}
"""The default model by the number of an input's dimensions."""

Names = str | float | bool | Iterable[str | float | bool] | None
"""Of domains; numbers as they are in the column."""


@checked
def from_table(
    table: Any,
    *,
    label: str,
    domain: str,
    held_out: Names = None,
    group: str | None = None,
    columns: Iterable[str] | None = None,
    drop: Iterable[str] = (),
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """Load a table with a column of labels and a column of domains. ::

        data = shoal.data.from_table("patients.csv", label="ill", domain="hospital", held_out="oslo")
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        run = shoal.fit("fish", model, data, steps=300)

    The kind of each column is inferred from all rows and reported in ``data.inputs["columns_report"]``;
    doubtful cases raise a warning. Means, scales and categories are computed on training rows only. Numbers
    are standardized, categories are one-hot encoded, dates become their day, month, weekday and hour, and
    text becomes a weighted bag of words (see :class:`~shoal.data.table.Preprocessing`). In regression the
    label is standardized as well, on the training examples; scores are in its own units.

    Args:
        table: CSV, Parquet or Excel file, DataFrame, or mapping of columns.
        label: column to predict. Classes may be numbers or strings; numbers that are not all integers and
            have more than 20 values are a regression target.
        domain: column with the domain of each row; it is not a feature.
        held_out: held-out domains (default: none; train on all domains).
        group: column that identifies the entity of each row, such as a patient; rows of one entity stay in
            the same split. It is not a feature.
        columns: columns to use as features (default: all except ``label``, ``domain``, ``group`` and
            ``drop``).
        drop: columns to ignore.
        kinds: ``numeric``, ``boolean``, ``date``, ``categorical`` or ``text`` for columns whose inferred kind
            is wrong.
        decimal: decimal mark ``"."`` or ``","``, for columns where it is ambiguous.
        day_first: whether 3/4/2020 is in April, for columns where it is ambiguous.
        task: ``classification`` or ``regression`` (default: inferred from the label).
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.

    Returns:
        The dataset.
    """
    content = as_table(table)
    label, domain = need_column(label, content, "label"), need_column(domain, content, "domain")
    group = None if group is None else need_column(group, content, "group")
    if label == domain:
        raise InputError(f"column {label!r} cannot be both the label and the domain.")
    if group in (label, domain):
        raise InputError(f"column {group!r} cannot be the group too; it is the label or the domain.")
    used = _features(content, [label, domain, *([group] if group else [])], columns, _listed(drop))
    hints = Hints({str(k): str(v) for k, v in (kinds or {}).items()}, decimal, day_first)
    written = number_format(content, label, hints)
    target = Labels.read(content[label], label, task, written)
    _check_copy(content, used, label)
    domains = domains_of(content[domain], domain)
    entities = None if group is None else _entities(content[group], group)
    splits = split(domains, _listed(held_out), validation, seed, entities)
    train = splits["train"].examples()
    about = {"name": label, "domain": domain, "task": target.task, **target.scaling(train)}
    about |= {} if target.names else {"how": vars(written)}
    about |= {"group": group} if group else {}
    how = Preprocessing.fit(content, train, label=about, names=used, hints=hints)
    roles = {"label": label, "domain": domain, **({"group": group} if group else {})}
    how, remarks = _audited(how, content, target, domains, roles, hints)
    x = how.transform(content)
    y = target.numbers(about)
    _warn(how, remarks)
    notes = _notes(splits, target, how)
    if target.note:
        notes["label"] = target.note
    return DomainData(
        examples=TableRows(torch.from_numpy(x), torch.from_numpy(y), train),
        splits=splits,
        classes=target.classes,
        input_shape=(how.width,),
        model=MODELS[1],
        notes=notes,
        measures={None: ("mse", "R²"), 2: ("accuracy", "AUC")}.get(target.classes, ()),
        class_names=target.names,
        inputs=how.to_dict(),
        entities=entities,
    )


@checked
def check_table(
    table: Any,
    *,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    drop: Iterable[str] = (),
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
) -> dict[str, Any]:
    """What the columns of a table are taken for: ``columns``, a list as in ``data.inputs["columns_report"]``.

    With ``label`` and ``domain`` it also looks for leakage, near-equal names and repeated rows; what it has
    to say of the whole table is in ``remarks``.
    """
    content = as_table(table)
    roles = {"label": label, "domain": domain, "group": group}
    named = {role: need_column(name, content, role) for role, name in roles.items() if name is not None}
    hints = Hints({str(k): str(v) for k, v in (kinds or {}).items()}, decimal, day_first)
    used = _features(content, list(named.values()), None, _listed(drop))
    types = infer(content, used, hints)
    how = Preprocessing((), {}, {}, [types[name].report() for name in used])
    remarks: list[str] = []
    if label is not None and domain is not None:
        target = Labels.read(content[label], label, task, number_format(content, label, hints))
        how, remarks = _audited(how, content, target, domains_of(content[domain], domain), named, hints)
    else:
        how = replace(how, columns=_with_roles(how.columns, content, named, _listed(drop)))
    return {"rows": content.rows, "columns": list(how.columns), "remarks": remarks}


def _audited(
    how: Preprocessing,
    content: Table,
    target: Labels,
    domains: Domains,
    roles: Mapping[str, str],
    hints: Hints,
) -> tuple[Preprocessing, list[str]]:
    """The report with what is suspicious in it, and remarks on the whole table."""
    used = [about["column"] for about in how.columns]
    types = infer(content, used, hints)
    key = ("audit", tuple(used), tuple(roles.items()), tuple(hints.kinds.items()), target.task)
    if key not in content.memory:
        codes = np.empty(content.rows, np.int64)
        for number in range(len(domains)):
            codes[domains.indices_of(number)] = number
        names = (roles["label"], roles["domain"])
        values = target.values
        result = leaks(content, types, values, bool(target.names), codes, *names)
        remarks = near_equal(target.names, "labels") + near_equal(domains.names, "domains")
        remarks += repeated_rows(content, [*used, roles["label"]], codes) if "group" not in roles else []
        content.memory[key] = result, remarks
    result, remarks = content.memory[key]
    columns = [
        {**c, "warnings": [*c["warnings"], *([result[c["column"]]] if c["column"] in result else [])]}
        for c in how.columns
    ]
    return replace(how, columns=_with_roles(columns, content, roles, ())), remarks


def _with_roles(
    columns: Sequence[Mapping[str, Any]], content: Table, roles: Mapping[str, str], drop: Iterable[str]
) -> list[Mapping[str, Any]]:
    """The report with the columns that are no features too, in the table's order."""
    result = {str(about["column"]): about for about in columns}
    for role, name in [*((DROPPED, name) for name in drop), *roles.items()]:
        names, codes = categories_of(content[name])
        result[name] = {
            "column": name,
            "kind": role,
            "missing": int((codes < 0).sum()),
            "distinct": len(names),
            "examples": [str(n) for n in names[:3]],
            "becomes": {"label": "the target", "domain": "the domain"}.get(role, "not a feature"),
            "warnings": [],
        }
    return [result[name] for name in content if name in result]


def _entities(column: Column, name: str) -> NDArray[Any]:
    """Which entity each row is of."""
    names, codes = categories_of(column)
    if gone := (np.flatnonzero(codes < 0) + 1).tolist():
        raise InputError(f"group {name!r} is missing in {_rows(gone)}; every row needs one.")
    if len(names) == len(codes):
        warnings.warn(f"group {name!r} is different in every row, so it has no effect", stacklevel=5)
    return codes


# Labels


@dataclass(frozen=True)
class Labels:
    """What is to be predicted, row by row: numbers of classes called ``names``, or quantities."""

    values: NDArray[Any]
    names: tuple[str, ...]
    note: str = ""
    """What was guessed of it, in words."""

    @classmethod
    def read(cls, column: Column, name: str, task: str | None, how: Format | None = None) -> Labels:
        if task is not None:
            check_names("task", [task], TASKS)
        names, codes = categories_of(column)
        distinct, cells = column.encoded
        texts = [None if t is None or t.lower() in UNLABELLED else t for t in [*distinct.tolist(), None]]
        if gone := [row for row, cell in enumerate(cells, 1) if texts[cell] is None]:
            word = distinct[cells[gone[0] - 1]] if cells[gone[0] - 1] >= 0 else None
            which = f" ({word!r} is read as missing)" if word else ""
            raise InputError(f"label {name!r} is missing in {_rows(gone)}{which}; remove these rows.")
        if (codes < 0).any():  # marks such as - or none, which name classes here
            lost = {
                t: n for n, t in enumerate(dict.fromkeys(distinct[cells[codes < 0]].tolist()), len(names))
            }
            names = np.array([*names, *lost], object)
            codes = np.where(codes < 0, [lost.get(t, -1) for t in distinct[cells].tolist()], codes)
        values, wrong = values_of(column, "numeric", how or Format())
        numeric = None if wrong or np.isnan(values).any() else values
        note = ""
        if task is None:
            task, note = _guess(len(names), len(codes), numeric, name)
        if task == "classification":
            return cls._classes(names, codes, numeric is not None, name)
        if numeric is None:
            bad = wrong or {str(distinct[c]): 1 for c in cells[np.isnan(values)][:1]}
            raise InputError(f"label {name!r} contains {quoted(bad, 1)}; for regression it must be numbers.")
        return cls(numeric, (), note)

    @classmethod
    def _classes(cls, names: NDArray[Any], codes: NDArray[Any], numeric: bool, name: str) -> Labels:
        result = sorted(names.tolist(), key=_as_number if numeric else None)
        if [boolean(text) for text in result] == [1.0, 0.0]:
            result.reverse()  # of ja and nein, ja is the second and positive class
        if len(result) < 2:
            raise InputError(
                f"label {name!r} is {result[0]!r} in every row; at least two classes are needed."
            )
        place = {text: number for number, text in enumerate(result)}
        return cls(np.array([place[text] for text in names], np.int64)[codes], tuple(result))

    @property
    def task(self) -> str:
        return "classification" if self.names else "regression"

    @property
    def classes(self) -> int | None:
        return len(self.names) or None

    def scaling(self, train: NDArray[Any]) -> dict[str, float]:
        """In regression the mean and deviation of training rows, else nothing."""
        if self.names:
            return {}
        some = self.values[train]
        scale = float(some.std())
        if not scale > 0 or not np.isfinite(scale):
            raise InputError(f"the label is {some[0]:g} in every training row, or too large to be squared.")
        return {"mean": float(some.mean()), "scale": scale}

    def numbers(self, scaling: Mapping[str, Any]) -> NDArray[Any]:
        if self.names:
            return self.values
        shifted = self.values - scaling.get("mean", 0.0)
        scaled: NDArray[np.float32] = (shifted / scaling.get("scale", 1.0)).astype(np.float32)
        return scaled


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _guess(different: int, rows: int, values: NDArray[Any] | None, name: str) -> tuple[str, str]:
    """Classes or a quantity, and what to say of that."""
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


def _rows(which: Sequence[int]) -> str:
    """Row numbers from 1 in words."""
    shown = ", ".join(map(str, which[:5]))
    more = f" and {len(which) - 5:,} more" if len(which) > 5 else ""
    return f"row{'s' * (len(which) > 1)} {shown}{more}"


# Domains and splits


def domains_of(column: Column, name: str) -> Domains:
    """Rows by the value of a column; numbers in their order, texts in theirs.

    Words such as NA are names here: only an empty value is a missing one.
    """
    distinct, codes = column.encoded
    texts = [_whole_number(t, name, int(np.argmax(codes == n)) + 1) for n, t in enumerate(distinct.tolist())]
    if gone := (np.flatnonzero(np.array([*(not t for t in texts), True])[codes]) + 1).tolist():
        raise InputError(f"domain {name!r} is missing in {_rows(gone)}; every row needs one.")
    numeric = all(t.lstrip("+-").isdigit() for t in texts)
    order = sorted(set(texts), key=int if numeric else None)
    place = {text: number for number, text in enumerate(order)}
    made = Domains.from_labels(np.array([place[t] for t in texts], np.int64)[codes])
    return Domains(order, made.offsets, made.indices)


def _whole_number(text: str, name: str, row: int) -> str:
    """1.0 of one file is 1 of another; other decimals are no names."""
    if not re.fullmatch(r"[+-]?\d+\.\d*(e[+-]?\d+)?", text, re.IGNORECASE):
        return text
    value = float(text)
    if value != value // 1:
        raise InputError(f"domain {name!r} is {text} in row {row}; use integers or strings.")
    return number_text(value)


def _listed(names: Names) -> list[str]:
    if names is None:
        return []
    several = (
        [names] if isinstance(names, (str, int, float, np.number)) else listed(names, "names of domains")
    )
    try:
        return [str(n) if isinstance(n, str | bool | np.bool_) else number_text(float(n)) for n in several]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(f"names of domains must be strings or numbers, got {shown(names)}.") from None


def _notes(splits: Mapping[str, Domains], target: Labels, how: Preprocessing | None = None) -> dict[str, str]:
    """What a reader of the results must know."""
    notes = {}
    if how is not None:
        away = " and ".join(splits["test"].names) if "test" in splits else ""
        notes["examples"] = (
            f"columns are scaled by training examples{f', none of them of {away}' * bool(away)}"
        )
        if how.dropped:
            notes["columns"] = "; ".join(f"{name!r} {why}" for name, why in how.dropped.items())
    small = [n for n in splits["train"].names if n not in splits["validation"].names]
    if small:
        shown = ", ".join(map(repr, small[:5])) + (", …" if len(small) > 5 else "")
        notes["domains"] = f"too small for validation examples: {shown}"
    if target.names and "test" in splits:
        seen = set(target.values[splits["train"].indices].tolist())
        unseen = sorted(set(target.values[splits["test"].indices].tolist()) - seen)
        if unseen:
            shown = ", ".join(repr(target.names[c]) for c in unseen[:5])
            notes["test"] = f"it has classes without training examples: {shown}"
    return notes


# Columns of a table


class TableRows(TensorData):
    """Rows as numbers that were fitted to some of them; others may not be trained and tested on."""

    def __init__(self, x: Tensor, y: Tensor, fitted: NDArray[Any]) -> None:
        super().__init__(x, y)
        self.fitted = fitted

    def to(self, device: torch.device | str) -> TableRows:
        if self.device == torch.device(device):
            return self
        return TableRows(self.x.to(device), self.y.to(device), self.fitted)

    def in_splits(self, splits: Mapping[str, Domains]) -> TableRows:
        """Itself, in splits of which only ``train`` has rows that it was fitted to."""
        for name, domains in splits.items():
            if name != "train" and np.isin(domains.examples(), self.fitted).any():
                raise InputError(
                    f"split {name!r} would hold rows to which the table's columns are scaled; "
                    "`shoal compare FILE` leaves domains out of that too."
                )
        return self

    def unguarded(self) -> TensorData:
        """For a look at the data that judges no method."""
        return TensorData(self.x, self.y)


def _features(
    content: Table, taken: Sequence[str], columns: Iterable[str] | None, drop: Sequence[str]
) -> list[str]:
    """Those that are learned from; ``taken`` are the label, the domain and the group."""
    for name in drop:
        need_column(name, content, "list of those to drop")
    if columns is None:
        return [name for name in content if name not in (*taken, *drop)]
    chosen = _listed(columns)
    for name in chosen:
        need_column(name, content, "features")
        if name in taken:
            what = ("label", "domain", "group")[taken.index(name)]
            raise InputError(f"column {name!r} is the {what}; it cannot be a feature.")
    return [name for name in dict.fromkeys(chosen) if name not in drop]


def _check_copy(content: Table, used: Sequence[str], label: str) -> None:
    """A feature that repeats the label tells nothing about a new row."""
    first = np.arange(min(100, content.rows))
    some, every = content[label].take(first).texts(), content[label].texts
    for name in used:
        if content[name].take(first).texts() == some and content[name].texts() == every():
            raise InputError(f"column {name!r} is a copy of the label {label!r}; drop it.")


def _warn(how: Preprocessing, remarks: Sequence[str]) -> None:
    """Says once, not in every worker process, what is doubtful."""
    if multiprocessing.parent_process() is None:
        for line in [*report_lines(how.columns), *remarks]:
            warnings.warn(f"{line}.", TableWarning, stacklevel=4)
