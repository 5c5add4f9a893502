"""What :func:`shoal.score` computes: the labels and domains of rows, metrics with intervals, and drift.

Intervals are those of :mod:`shoal.experiments.statistics`, drift is that of :mod:`shoal.experiments.drift`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from shoal.api.score import Group, Score
from shoal.data.cells import Format
from shoal.data.columns import categories_of, quoted, values_of
from shoal.data.reading import Table, as_table, need_column, rows_of
from shoal.data.table import Preprocessing
from shoal.errors import InputError, shown
from shoal.experiments.drift import ColumnDrift, column_drift
from shoal.experiments.statistics import Estimate, calibration, classification, regression
from shoal.trained import Trained, input_errors

Array = NDArray[Any]


class Labels(NamedTuple):
    """The label and domain of every row."""

    label: str
    domain: str | None
    values: Array
    """Numbers of classes, or numbers; NaN where the label is missing or cannot be used."""
    domains: Sequence[str | None]
    unusable: Mapping[str, int]
    """Unknown classes, or labels of a regression that are no numbers."""
    notes: list[str]


def score(
    trained: Trained,
    data: Any,
    *,
    label: str | None,
    domain: str | None,
    column: str | None,
    seed: int,
    **loading: int,
) -> Score:
    """Score a model; the arguments are those of :func:`shoal.score`."""
    kind, task = trained.inputs.get("kind", "array"), trained.about.task
    if kind == "array" or task in ("multilabel", "dense"):
        raise InputError(
            f"this is a model for {task} with {kind} input; score supports classification and regression of "
            "tables, of text in tables and of images in folders. For others, use predict_proba."
        )
    if kind == "image" and not (isinstance(data, str | Path) and Path(data).expanduser().is_dir()):
        raise InputError("must be a folder with images, as domain/class/image or class/image.", "data")
    table = _table(data) if kind != "image" else None
    labels = _labels_of_table(trained, table, label, domain) if table else None
    reader = trained.reader(column=column)
    parts = [(batch.names, output) for batch, output in trained.outputs(reader, data, **loading)]
    outputs = np.concatenate([output for _, output in parts])
    labels = labels or _labels_of_paths(trained, [name for names, _ in parts for name in names])
    numeric, used = trained.about.classes is None, ~np.isnan(labels.values)
    if not used.any():
        raise _nothing(labels, trained)
    if numeric and outputs.size != len(outputs):
        raise InputError(f"the model has {outputs[0].size} outputs per row; score supports one.")
    predicted = outputs.reshape(-1) if numeric else trained.probabilities(outputs)
    if not np.isfinite(predicted[used]).all():
        raise InputError("the model's outputs are not all finite; there is nothing to score.")

    def metrics(rows: Array) -> dict[str, Estimate]:
        y = labels.values[rows]
        return (regression if numeric else classification)(
            predicted[rows], y if numeric else y.astype(int), seed
        )

    every, seen = np.flatnonzero(used), _seen(trained.record)
    overall, groups = Group("all rows", len(every), metrics(every)), []
    by_domain = pandas.Series(used).groupby(np.array(labels.domains, object)).indices
    for name, rows in sorted(by_domain.items()):
        rows = rows[used[rows]]
        measured = metrics(rows) if len(rows) else dict.fromkeys(overall.metrics, Estimate(None))
        groups.append(Group(name, len(rows), measured, seen.get(name, "new") if seen else ""))
    drift = _drift(trained, table, labels.notes) if table and kind == "table" else None
    return Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=labels.label,
        domain=labels.domain,
        rows=len(used),
        overall=overall,
        domains=tuple(groups),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(labels.unusable.values()),
        unusable=labels.unusable,
        calibration=None if numeric else calibration(predicted[used], labels.values[used].astype(int), seed),
        drift=drift,
        notes=(*labels.notes, *reader.doubts),
    )


def _table(data: Any) -> Table:
    if rows_of(data) is None:
        raise InputError(f"this model takes a table (.csv, .parquet …), not {shown(data)}.", "data")
    return as_table(data)


def _labels_of_table(trained: Trained, table: Table, label: str | None, domain: str | None) -> Labels:
    notes = []
    with input_errors("the description of the label in inputs.json is damaged"):
        about = dict(trained.inputs.get("label") or {})
        name, where = label or about.get("name"), domain or about.get("domain")
        format = Format(**(about.get("how") or {}))
    if name is None:
        raise InputError("is missing, and the model does not name its label column.", "label")
    column = table[need_column(name, table, "label")]
    if domain is not None:
        need_column(domain, table, "domain")
    elif where is not None and where not in table:
        notes.append(f"There is no domain column {where!r}, so all rows are one group.")
        where = None
    if trained.about.classes is None:
        values, unusable = values_of(column, "numeric", format)
    else:
        names, codes = categories_of(column, "-" in trained.classes)
        listed = [str(names[code]) if code >= 0 else None for code in codes]
        values, unusable = _numbered(listed, trained.classes)
    domains = [None] * len(values) if where is None else [text or None for text in table[where].texts()]
    if where is not None and None in domains:
        notes.append(
            f"{domains.count(None):,} rows without a domain are included in the overall scores only."
        )
    return Labels(str(name), where, values, domains, unusable, notes)


def _labels_of_paths(trained: Trained, paths: Sequence[str]) -> Labels:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depth = min(map(len, parts))
    if depth < 2 or (depth == 2 and max(map(len, parts)) > 2):
        raise InputError("images must be arranged as domain/class/image, or all as class/image.", "data")
    nested = depth > 2
    values, unknown = _numbered([part[1] if nested else part[0] for part in parts], trained.classes)
    domains = [part[0] if nested else None for part in parts]
    return Labels("folder of the class", "folder" if nested else None, values, domains, unknown, [])


def _numbered(labels: Sequence[str | None], classes: Sequence[str]) -> tuple[Array, dict[str, int]]:
    """The number of each label among the classes, NaN where it is none, and the unknown labels."""
    number: dict[str | None, float] = {name: float(n) for n, name in enumerate(classes)}
    unknown = Counter(name for name in labels if name is not None and name not in number)
    return np.array([number.get(name, np.nan) for name in labels]), dict(unknown.most_common())


def _drift(trained: Trained, table: Table, notes: list[str]) -> tuple[ColumnDrift, ...] | None:
    training = trained.inputs.get("training")
    if not training:
        notes.append("The model has no summary of its training columns, so drift cannot be measured.")
        return None
    with input_errors("the summary of the training columns in inputs.json is damaged"):
        return tuple(column_drift(Preprocessing.from_dict(trained.inputs), training, table))


def _nothing(labels: Labels, trained: Trained) -> InputError:
    """Why no row can be scored."""
    if not labels.unusable:
        return InputError(f"{labels.label!r} is missing in every row; there is nothing to score.", "label")
    some = quoted(labels.unusable)
    if trained.about.classes is None:
        return InputError(f"{labels.label!r} holds {some}; this model predicts numbers.", "label")
    known = ", ".join(map(repr, trained.classes[:10]))
    return InputError(f"{labels.label!r} holds {some}; the classes of the model are {known}.", "label")


def _seen(record: Mapping[str, Any]) -> dict[str, str]:
    """The domains of the training, by what they were for; empty if there is no record."""
    found: dict[str, str] = {}
    for point in (record.get("history") or ())[-1:]:
        for split, use in (("test", "held out"), ("train", "training"), ("validation", "training")):
            found |= dict.fromkeys(point["scores"].get(split, {}).get("domains", ()), use)
    return found
