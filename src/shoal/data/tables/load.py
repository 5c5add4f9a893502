"""A table of your own as :class:`~shoal.data.DomainData`, and the check of one.

A table is split by domain: those named in ``held_out`` are the test split, and a share of every other domain
is held out for validation. Whatever is fitted (means, categories, words) is fitted to training examples
alone.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.splits import SHARE, Names, split, split_notes
from shoal.data.tables import audit
from shoal.data.tables.cells import Format
from shoal.data.tables.encode import Encoder
from shoal.data.tables.kinds import DROPPED, ColumnType, Hints, infer, number_format
from shoal.data.tables.labels import Labels, domains_of, entities_of, unlabelled
from shoal.data.tables.read import need_column
from shoal.data.tables.table import Table, as_table
from shoal.errors import InputError, TableWarning, check_names, listed
from shoal.options import DropRows
from shoal.settings import checked, shown

Array = NDArray[Any]
DROP_ROWS = get_args(DropRows)
Value = TypeVar("Value")


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
    drop_rows: Iterable[str] = (),
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
    encoding: str | None = None,
    sheet: str | int | None = None,
    skip_rows: int = 0,
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
    text becomes the TF-IDF of its words, reduced to 100 numbers (see :class:`~shoal.data.tables.Encoder`). In
    regression the label is standardized as well, on the training examples; scores are in its own units.

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
        drop_rows: rows to ignore: ``missing`` (no label or domain), ``mostly-empty`` (such as totals),
            ``outliers`` (labels far from all others), ``single`` (domains of one row).
        kinds: ``numeric``, ``boolean``, ``date``, ``categorical`` or ``text`` for columns whose inferred kind
            is wrong.
        decimal: decimal mark ``"."`` or ``","``, for columns where it is ambiguous.
        day_first: whether 3/4/2020 is in April, for columns where it is ambiguous.
        task: ``classification`` or ``regression`` (default: inferred from the label).
        encoding: encoding of a CSV file, such as ``"cp1252"`` (default: UTF-8).
        sheet: name of the sheet of an Excel file, or its number from 0 (default: the first).
        skip_rows: number of lines, or rows of a sheet, above the names of the columns.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.

    Returns:
        The dataset.
    """
    content = content_of(
        table,
        label=label,
        domain=domain,
        group=group,
        columns=columns,
        drop=drop,
        drop_rows=drop_rows,
        kinds=kinds,
        decimal=decimal,
        day_first=day_first,
        task=task,
        encoding=encoding,
        sheet=sheet,
        skip_rows=skip_rows,
    )
    target, domains, roles = content.target, content.domains, content.roles
    assert target is not None
    assert domains is not None
    splits = split(domains, held_out, validation, seed, content.entities)
    train = splits["train"].examples()
    about = {**roles, "name": label, "task": target.task, **target.scaling(train)}
    about |= {} if target.names else {"how": vars(content.written)}
    del about["label"]
    encoder = Encoder.fit(content.table, train, content.types, about)
    encoder = replace(encoder, columns=content.report)
    x, y = encoder.transform(content.table), target.numbers(about)
    notes = split_notes(splits, target.values if target.names else None, target.names)
    notes |= content.notes(splits, encoder.dropped)
    if multiprocessing.parent_process() is None:  # once, not in every worker process
        for line in [*audit.report_lines(encoder.columns), *content.remarks]:
            warnings.warn(f"{line}.", TableWarning, stacklevel=3)
    return DomainData(
        examples=TableRows(torch.from_numpy(x), torch.from_numpy(y), train),
        splits=splits,
        classes=target.classes,
        input_shape=(encoder.width,),
        model="tabular",
        notes=notes,
        measures={None: ("mse", "R²"), 2: ("accuracy", "AUC")}.get(target.classes, ()),
        class_names=target.names,
        inputs=encoder.to_dict(),
        entities=content.entities,
    )


def check_table(table: Any, **options: Any) -> dict[str, Any]:
    """The report on a table; the options are those of :func:`content_of`.

    It has the columns as in ``data.inputs["columns_report"]``, and, as far as label and domain are given, the
    task, the rows of each domain and class, ``remarks`` on the whole table, and the ``problems`` for which
    :func:`from_table` refuses it.
    """
    problems: list[str] = []

    def collect(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except InputError as error:
            problems.append(str(error))
            return None

    content = content_of(table, collect, **options)
    found = {"rows": content.table.rows, "columns": content.report, "remarks": content.remarks}
    return found | content.described() | {"problems": problems}


@dataclass(frozen=True)
class Choice:
    """What a user says of a table."""

    label: str | None
    domain: str | None
    group: str | None
    columns: Sequence[str] | None
    drop: Sequence[str]
    drop_rows: Sequence[str]
    hints: Hints
    task: str | None


def _strict(step: Callable[[], Value]) -> Value:
    return step()


@checked
def content_of(
    table: Any,
    attempt: Callable[..., Any] = _strict,
    *,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    columns: Names = None,
    drop: Names = None,
    drop_rows: Names = None,
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    task: str | None = None,
    encoding: str | None = None,
    sheet: str | int | None = None,
    skip_rows: int = 0,
) -> Content:
    """A table as these options of :func:`from_table` say; a file is examined once."""
    content = as_table(table, encoding=encoding, sheet=sheet, skip_rows=skip_rows)
    choice = Choice(
        label,
        domain,
        group,
        None if columns is None else _names("columns", columns),
        _names("drop", drop),
        _names("drop_rows", drop_rows),
        Hints({str(k): str(v) for k, v in (kinds or {}).items()}, decimal, day_first),
        task,
    )
    if attempt is not _strict:
        return Content(content, choice, attempt)
    if repr(choice) not in content.memo:
        content.memo[repr(choice)] = Content(content, choice, attempt)
    found: Content = content.memo[repr(choice)]
    return found


def _names(what: str, names: Names) -> list[str]:
    """One name or several, as text."""
    if names is None:
        return []
    several = [names] if isinstance(names, (str, int, float)) else listed(names, what)
    if bad := [name for name in several if not isinstance(name, (str, int, float, np.number))]:
        raise InputError(f"must be names of columns, got {shown(bad[0])}.", what)
    return [str(name) for name in several]


class Content:
    """A table with what is known of its columns and rows.

    Args:
        table: the table.
        choice: what the user says of it.
        attempt: calls each step of its examination, and may go on with ``None`` where one raises InputError.
    """

    def __init__(self, table: Table, choice: Choice, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self.choice, self.table = choice, table
        self.roles: dict[str, str] = attempt(self._roles) or {}
        self.drop: list[str] = attempt(self._dropped) or []
        self.features: list[str] = attempt(self._features) or []
        self.dropped_rows: dict[str, Array] = {}
        attempt(self._drop_rows)
        table, hints = self.table, choice.hints
        self.types: dict[str, ColumnType] = attempt(lambda: infer(table, self.features, hints)) or {}
        self.target: Labels | None = None
        self.written = Format()
        if name := self.roles.get("label"):
            self.written = attempt(lambda: number_format(table, name, hints)) or self.written
            self.target = attempt(
                lambda: Labels.read(table[name], name, choice.task, self.written, table.numbers)
            )
            attempt(self._check_copies)
        self.domains: Domains | None = None
        if where := self.roles.get("domain"):
            self.domains = attempt(lambda: domains_of(table[where], where, table.numbers))
        self.entities: Array | None = None
        if whose := self.roles.get("group"):
            self.entities = attempt(lambda: entities_of(table[whose], whose, table.numbers))

    def _roles(self) -> dict[str, str]:
        given = {"label": self.choice.label, "domain": self.choice.domain, "group": self.choice.group}
        roles = {
            role: need_column(name, self.table, role) for role, name in given.items() if name is not None
        }
        for role, name in roles.items():
            if other := [r for r, n in roles.items() if n == name and r != role]:
                raise InputError(f"column {name!r} cannot be both the {role} and the {other[0]}.")
        return roles

    def _dropped(self) -> list[str]:
        return [need_column(name, self.table, "list of those to drop") for name in self.choice.drop]

    def _features(self) -> list[str]:
        if self.choice.columns is None:
            return [name for name in self.table if name not in (*self.roles.values(), *self.drop)]
        for name in self.choice.columns:
            need_column(name, self.table, "features")
            for role, other in self.roles.items():
                if name == other:
                    raise InputError(f"column {name!r} is the {role}; it cannot be a feature.")
        return [name for name in dict.fromkeys(self.choice.columns) if name not in self.drop]

    def _drop_rows(self) -> None:
        check_names("kind of rows to drop:", self.choice.drop_rows, DROP_ROWS)
        for kind in DROP_ROWS:  # one after the other: a total may be the only row of its domain
            if kind in self.choice.drop_rows and (rows := self.suspects()[kind]).any():
                self.dropped_rows[kind] = self.table.numbers[rows]
                self.table = self.table.keep(~rows)

    def suspects(self) -> dict[str, Array]:
        """Rows that are probably no examples, by the word of ``drop_rows`` that drops them."""
        table, none = self.table, np.zeros(self.table.rows, bool)
        missing, single, outliers = none, none, none
        for role, name in self.roles.items():
            missing = missing | (unlabelled(table[name]) if role == "label" else table[name].encoded[1] < 0)
        if where := self.roles.get("domain"):
            distinct, codes = table[where].encoded
            single = (codes >= 0) & (np.append(table[where].counts, 0)[codes] == 1)
            single = single if single.sum() < len(distinct) else none
        if label := self.roles.get("label"):
            values, wrong = table[label].values("numeric", number_format(table, label, self.choice.hints))
            known = np.flatnonzero(~np.isnan(values))
            quantity = self.choice.task == "regression" or len(np.unique(values[known])) > 20
            if quantity and not wrong and self.choice.task != "classification" and len(known):
                outliers = none.copy()
                outliers[known] = audit.far_labels(values[known])
        names = [name for name in table if name not in self.drop]
        empty = audit.mostly_empty(table, names) if names else none
        return {"missing": missing, "mostly-empty": empty, "outliers": outliers, "single": single}

    def _check_copies(self) -> None:
        """A feature that repeats the label tells nothing about a new row."""
        label, name = self.table[self.roles["label"]], self.roles["label"]
        for other in self.features:
            if label.cells.equals(self.table[other].cells.rename(label.cells.name)):
                raise InputError(f"column {other!r} is a copy of the label {name!r}; drop it.")

    @cached_property
    def domain_codes(self) -> Array:
        assert self.domains is not None
        codes = np.empty(self.table.rows, np.int64)
        codes[self.domains.indices] = np.repeat(np.arange(len(self.domains)), self.domains.sizes)
        return codes

    @cached_property
    def report(self) -> list[dict[str, Any]]:
        """A row per column, in the order of the table, with what is suspicious in it."""
        result = {name: about.report() for name, about in self.types.items()}
        if self.target is not None and self.domains is not None:
            names = self.roles["label"], self.roles["domain"]
            found = audit.leaks(self.table, self.types, self.target, self.domain_codes, names)
            for name, line in found.items():
                result[name]["warnings"].append(line)
        for role, name in [*((DROPPED, name) for name in self.drop), *self.roles.items()]:
            names_of_cells, codes = self.table[name].categories()
            result[name] = {
                "column": name,
                "kind": role,
                "missing": int((codes < 0).sum()),
                "distinct": len(names_of_cells),
                "examples": [str(n) for n in names_of_cells[:3]],
                "becomes": {"label": "the target", "domain": "the domain"}.get(role, "not a feature"),
                "warnings": [],
            }
        return [result[name] for name in self.table if name in result]

    @cached_property
    def remarks(self) -> list[str]:
        """What a user should know of the whole table before training."""
        remarks = audit.rows_of_note(self.table, self.suspects()) if self.roles else []
        for kind, numbers in self.dropped_rows.items():
            remarks.append(f"left out ({kind}): {audit.row_list(numbers.tolist())}")
        if self.entities is not None and len(np.unique(self.entities)) == self.table.rows:
            remarks.append(f"group {self.roles['group']!r} is different in every row, so it has no effect")
        if self.target is None or self.domains is None:
            return remarks
        domain = self.domain_codes
        remarks += [self.target.note] if self.target.names and self.target.note else []
        remarks += audit.in_words(audit.classes_of_one_domain(self.target, domain, self.domains.names))
        remarks += audit.near_equal(self.target.names, "labels")
        remarks += audit.near_equal(self.domains.names, "domains")
        if "group" not in self.roles:
            remarks += audit.repeated_rows(self.table, [*self.types, self.roles["label"]], domain)
        return remarks

    def described(self) -> dict[str, Any]:
        """Task, classes, and the rows of each domain, as far as they are known."""
        found: dict[str, Any] = {}
        if self.target is not None:
            found |= {"task": self.target.task, "classes": list(self.target.names)}
        if self.domains is not None:
            sizes = zip(self.domains.names, self.domains.sizes.tolist(), strict=True)
            found["domains"] = [{"domain": name, "rows": rows} for name, rows in sizes]
        if self.target is not None and self.domains is not None:
            for each, domain in zip(found["domains"], range(len(self.domains)), strict=True):
                own = self.target.values[self.domains.indices_of(domain)]
                if self.target.names:
                    counts = np.bincount(own, minlength=len(self.target.names)).tolist()
                    each["classes"] = dict(zip(self.target.names, counts, strict=True))
                else:
                    each |= {"mean": float(own.mean()), "sd": float(own.std())}
            if self.target.names:
                own = audit.classes_of_one_domain(self.target, self.domain_codes, self.domains.names)
                found["classes_of_one_domain"] = own
        return found

    def notes(self, splits: Mapping[str, Domains], dropped: Mapping[str, str]) -> dict[str, str]:
        """What a reader of the results must know."""
        assert self.target is not None
        assert self.domains is not None
        away = " and ".join(splits["test"].names) if "test" in splits else ""
        notes = {
            "examples": f"columns are scaled by training examples{f', none of them of {away}' * bool(away)}"
        }
        if dropped:
            notes["columns"] = "; ".join(f"{name!r} {why}" for name, why in dropped.items())
        if self.dropped_rows:
            each = [f"{len(rows):,} {kind}" for kind, rows in self.dropped_rows.items()]
            notes["rows"] = f"rows left out: {', '.join(each)}"
        if self.target.note:
            notes["label"] = self.target.note
        alone = audit.classes_of_one_domain(self.target, self.domain_codes, self.domains.names)
        if alone:
            notes["classes"] = "; ".join(audit.in_words(alone))
        return notes


class TableRows(TensorData):
    """Rows as numbers that were fitted to some of them; others may not be trained and tested on."""

    def __init__(self, x: Tensor, y: Tensor, fitted: Array) -> None:
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
