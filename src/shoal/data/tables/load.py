"""A table of your own as :class:`~shoal.data.DomainData`, and the check of one.

A table is split by domain: those named in ``held_out`` are the test split, and a share of every other domain
is held out for validation. Whatever is fitted (means, categories, words) is fitted to training examples
alone.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.splits import SHARE, Names, split, split_notes
from shoal.data.tables import audit
from shoal.data.tables.cells import Format
from shoal.data.tables.encode import Encoder
from shoal.data.tables.kinds import DROPPED, ColumnType, alike, infer, number_format
from shoal.data.tables.labels import Labels, domains_of, entities_of, unlabelled
from shoal.data.tables.read import cell_text, need_column
from shoal.data.tables.table import Table, as_table
from shoal.errors import InputError, TableWarning
from shoal.options import DropRows, TableOptions
from shoal.options import Names as Columns
from shoal.settings import checked

Array = NDArray[Any]
Value = TypeVar("Value")


@checked
def from_table(
    table: Any,
    *,
    label: str,
    domain: str,
    held_out: Names = None,
    validation: float = SHARE,
    seed: int = 0,
    **options: Unpack[TableOptions],
) -> DomainData:
    """Load a table with a column of labels and a column of domains. ::

        data = shoal.data.from_table("patients.csv", label="ill", domain="hospital", held_out="oslo")
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        run = shoal.fit("fish", model, data, steps=300)

    The kind of each column is inferred from all rows and reported in ``data.inputs["columns_report"]``;
    doubtful cases raise a warning. Means, scales and categories are computed on training rows only. Numbers
    are standardized, categories are one-hot encoded, dates become their day, month, weekday and hour, and
    text becomes the TF-IDF of its words, reduced to 200 numbers (see :class:`~shoal.data.tables.Encoder`). In
    regression the label is standardized as well, on the training examples; scores are in its own units.

    Args:
        table: CSV, Parquet or Excel file, DataFrame, or mapping of columns.
        label: column to predict. Classes may be numbers or strings; numbers that are not all integers and
            have more than 20 values are a regression target.
        domain: column with the domain of each row; it is not a feature.
        held_out: held-out domains (default: none; train on all domains).
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.
        **options: how the table is read, see :class:`~shoal.options.TableOptions`.

    Returns:
        The dataset.
    """
    content = content_of(table, label=label, domain=domain, **options)
    if content.problems:
        raise content.problems[0]
    return content.data(held_out, validation, seed)


def check_table(table: Any, **options: Any) -> dict[str, Any]:
    """The report on a table; the options are those of :func:`content_of`.

    It has the columns as in ``data.inputs["columns_report"]``, and, as far as label and domain are given, the
    task, the rows of each domain and class, ``remarks`` on the whole table, and the ``problems`` for which
    :func:`from_table` refuses it.
    """
    content = content_of(table, **options)
    found = {"rows": content.table.rows, "columns": content.report, "remarks": content.remarks}
    return found | content.described() | {"problems": [str(problem) for problem in content.problems]}


@checked
def content_of(
    table: Any, *, label: str | None = None, domain: str | None = None, **options: Unpack[TableOptions]
) -> Content:
    """A table with what is known of its columns and rows."""
    roles = {"label": label, "domain": domain, "group": options.get("group")}
    reading = {name: options.get(name) for name in ("encoding", "sheet", "skip_rows")}
    return Content(as_table(table, **reading), roles, options)


class Content:
    """A table with what is known of its columns and rows, and the ``problems`` for which it is refused."""

    def __init__(self, table: Table, roles: Mapping[str, str | None], options: TableOptions) -> None:
        self.table, self.options = table, options
        self.problems: list[InputError] = []
        decimal, kinds, attempt = options.get("decimal"), options.get("kinds") or {}, self._attempt
        self.roles = attempt(lambda: self._find_roles(roles)) or {}
        self.drop = attempt(lambda: self._find(options.get("drop"), "list of those to drop")) or []
        self.features = attempt(self._find_features) or []
        attempt(lambda: self._find([*kinds], "kinds"))
        label, domain, group = (self.roles.get(role) for role in ("label", "domain", "group"))
        self.written = number_format(table, label, decimal) if label else Format()
        self.dropped_rows: dict[str, Array] = {}
        attempt(self._drop_rows)
        table, numbers = self.table, self.table.numbers
        typed = partial(infer, table, decimal=decimal, day_first=options.get("day_first"))
        self.types: dict[str, ColumnType] = {}
        for name in self.features:
            said = {name: kinds[name]} if name in kinds else {}
            self.types |= attempt(partial(typed, [name], said)) or typed([name])
        self.target: Labels | None = None
        self.domains: Domains | None = None
        self.entities: Array | None = None
        if label:
            task = options.get("task")
            self.target = attempt(lambda: Labels.read(table[label], label, task, self.written, numbers))
        for name in self.features if label else ():
            if table.frame[label].equals(table.frame[name].rename(label)):
                message = f"column {name!r} is a copy of the label {label!r}; drop it."
                self.problems.append(InputError(message))
        if domain:
            self.domains = attempt(lambda: domains_of(table[domain], domain, numbers))
        if group:
            self.entities = attempt(lambda: entities_of(table[group], group, numbers))

    def _attempt(self, step: Callable[[], Value]) -> Value | None:
        try:
            return step()
        except InputError as error:
            self.problems.append(error)
            return None

    def _find(self, names: Columns | None, what: str) -> list[str]:
        several = [names] if isinstance(names, (str, int)) else names or ()
        return list(dict.fromkeys(need_column(str(name), self.table, what) for name in several))

    def _find_roles(self, given: Mapping[str, str | None]) -> dict[str, str]:
        roles = {
            role: need_column(name, self.table, role) for role, name in given.items() if name is not None
        }
        for role, name in roles.items():
            if other := [r for r, n in roles.items() if n == name and r != role]:
                raise InputError(f"column {name!r} cannot be both the {role} and the {other[0]}.")
        return roles

    def _find_features(self) -> list[str]:
        if self.options.get("columns") is None:
            return [name for name in self.table if name not in (*self.roles.values(), *self.drop)]
        names = self._find(self.options["columns"], "features")
        for role, name in self.roles.items():
            if name in names:
                raise InputError(f"column {name!r} is the {role}; it cannot be a feature.")
        return [name for name in names if name not in self.drop]

    def _drop_rows(self) -> None:
        for kind in get_args(DropRows):  # one after the other: a total may be the only row of its domain
            if kind in (self.options.get("drop_rows") or ()) and (rows := self.suspects()[kind]).any():
                self.dropped_rows[kind] = self.table.numbers[rows]
                self.table = self.table.keep(~rows)

    def suspects(self) -> dict[str, Array]:
        """Rows that are probably no examples, by the word of ``drop_rows`` that drops them."""
        table, found = self.table, {kind: np.zeros(self.table.rows, bool) for kind in get_args(DropRows)}
        for role, name in self.roles.items():
            lacking = unlabelled(table[name]) if role == "label" else table.frame[name].isna().to_numpy()
            found["missing"] = found["missing"] | lacking
        if where := self.roles.get("domain"):
            codes, counts = table[where].encoded[1], table[where].counts
            single = (codes >= 0) & (np.append(counts, 0)[codes] == 1)
            found["single"] = single & (single.sum() < len(counts))
        if label := self.roles.get("label"):
            values, wrong = table[label].values("numeric", self.written)
            known, task = np.flatnonzero(~np.isnan(values)), self.options.get("task")
            quantity = task == "regression" or (task is None and len(np.unique(values[known])) > 20)
            if quantity and not wrong and len(known):
                found["outliers"][known] = audit.far_labels(values[known])
        if names := [name for name in table if name not in self.drop]:
            found["mostly-empty"] = audit.mostly_empty(table, names)
        return found

    @cached_property
    def domain_codes(self) -> Array:
        assert self.domains is not None
        codes = np.empty(self.table.rows, np.int64)
        codes[self.domains.indices] = np.repeat(np.arange(len(self.domains)), self.domains.sizes)
        return codes

    @cached_property
    def classes_alone(self) -> list[dict[str, Any]]:
        """Classes that occur in one domain only."""
        if self.target is None or self.domains is None:
            return []
        return audit.classes_of_one_domain(self.target, self.domain_codes, self.domains.names)

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
            becomes = {"label": "the target", "domain": "the domain"}.get(role, "not a feature")
            series = self.table.frame[name]
            some = tuple(map(cell_text, series.dropna().unique()[:3]))
            about = ColumnType(
                name, role, missing=int(series.isna().sum()), distinct=series.nunique(), examples=some
            )
            result[name] = about.report() | {"becomes": becomes}
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
        remarks += [self.target.note] if self.target.names and self.target.note else []
        remarks += audit.in_words(self.classes_alone)
        for what, names in (("labels", self.target.names), ("domains", self.domains.names)):
            remarks += [f"{what} {pair} differ only in case or spaces" for pair in alike(names)]
        if "group" not in self.roles:
            columns = [*self.types, self.roles["label"]]
            remarks += audit.repeated_rows(self.table, columns, self.domain_codes)
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
            for number, each in enumerate(found["domains"]):
                own = self.target.values[self.domains.indices_of(number)]
                if self.target.names:
                    counts = np.bincount(own, minlength=len(self.target.names)).tolist()
                    each["classes"] = dict(zip(self.target.names, counts, strict=True))
                else:
                    each |= {"mean": float(own.mean()), "sd": float(own.std())}
            found |= {"classes_of_one_domain": self.classes_alone} if self.target.names else {}
        return found

    def data(self, held_out: Names, validation: float = SHARE, seed: int = 0) -> DomainData:
        """The table in splits, as it is described in :func:`from_table`; it has no problems."""
        target, domains = self.target, self.domains
        assert target is not None
        assert domains is not None
        splits = split(domains, held_out, validation, seed, self.entities)
        train = splits["train"].examples()
        scaling, y = target.scaled(train)
        about: dict[str, Any] = {"name": self.roles["label"], "task": target.task, **scaling}
        about |= {role: name for role, name in self.roles.items() if role != "label"}
        about |= {} if target.names else {"how": vars(self.written)}
        encoder = Encoder.fit(self.table, train, self.types, about, self.report)
        notes = split_notes(splits, target.values if target.names else None, target.names)
        if multiprocessing.parent_process() is None:  # once, not in every worker process
            lines = [f"column {c['column']!r}: {line}" for c in self.report for line in c["warnings"]]
            for line in [*lines, *self.remarks]:
                warnings.warn(f"{line}.", TableWarning, stacklevel=4)
        x = torch.from_numpy(encoder.transform(self.table))
        return DomainData(
            examples=TableRows(x, torch.from_numpy(y), train),
            splits=splits,
            classes=target.classes,
            input_shape=(encoder.width,),
            model="tabular",
            notes=notes | self.notes(splits, encoder.dropped),
            metrics={None: ("mse", "R²"), 2: ("accuracy", "AUC")}.get(target.classes, ()),
            class_names=target.names,
            inputs=encoder.to_dict(),
            entities=self.entities,
        )

    def notes(self, splits: Mapping[str, Domains], dropped: Mapping[str, str]) -> dict[str, str]:
        """What a reader of the results must know."""
        away = f", none of them of {' and '.join(splits['test'].names)}" if "test" in splits else ""
        rows = ", ".join(f"{len(rows):,} {kind}" for kind, rows in self.dropped_rows.items())
        notes = {
            "examples": f"columns are scaled by training examples{away}",
            "columns": "; ".join(f"{name!r} {why}" for name, why in dropped.items()),
            "rows": f"rows left out: {rows}" * bool(rows),
            "label": self.target.note if self.target else "",
            "classes": "; ".join(audit.in_words(self.classes_alone)),
        }
        return {what: note for what, note in notes.items() if note}


class TableRows(TensorData):
    """Rows as numbers that were fitted to some of them; others may not be trained and tested on."""

    def __init__(self, x: Tensor, y: Tensor, fitted: Array) -> None:
        super().__init__(x, y)
        self.fitted = fitted

    def to(self, device: torch.device | str) -> TableRows:
        if self.device == torch.device(device):
            return self
        return TableRows(self.x.to(device), self.y.to(device), self.fitted)

    def with_splits(self, splits: Mapping[str, Domains]) -> TableRows:
        """Itself, in splits of which only ``train`` has rows that it was fitted to."""
        for name, domains in splits.items():
            if name != "train" and np.isin(domains.examples(), self.fitted).any():
                raise InputError(
                    f"split {name!r} would hold rows to which the table's columns are scaled; "
                    "`shoal compare FILE` leaves domains out of that too."
                )
        return self
