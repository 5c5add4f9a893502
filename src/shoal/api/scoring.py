"""What :func:`shoal.score` computes: labels, domains and entities, metrics with intervals, and drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from shoal.api.score import Group, Score
from shoal.data.tables import Encoder, Table, need_column, quoted
from shoal.errors import InputError
from shoal.experiments.drift import ColumnDrift, column_drift
from shoal.experiments.statistics import Estimate, calibration, classification, regression
from shoal.trained import Trained, input_errors

Array = NDArray[Any]


class Labels(NamedTuple):
    """The label, domain and entity of every row, and the columns that they are in.

    ``values`` are numbers of classes, or numbers; NaN where the label is missing or cannot be used.
    """

    label: str
    values: Array
    unusable: Mapping[str, int]
    domains: Sequence[str | None]
    entities: Array
    domain: str | None = None
    group: str | None = None
    notes: tuple[str, ...] = ()


def labels_of_table(
    trained: Trained, table: Table, label: str | None, domain: str | None, group: str | None
) -> Labels:
    """The columns that are given, or those of the training."""
    from shoal.data.tables.cells import Format

    with input_errors("the description of the label in inputs.json is damaged"):
        about = dict(trained.inputs.get("label") or {})
        format = Format(**(about.get("how") or {}))
        known = {role: str(about[role]) for role in ("name", "domain", "group") if about.get(role)}
    if (name := label or known.get("name")) is None:
        raise InputError("is missing, and the model does not name its label column.", "label")
    column, notes = table[need_column(name, table, "label")], []
    used = {"domain": domain, "group": group}
    without = {"domain": "all rows are one group", "group": "rows count as independent"}
    for role, given in used.items():
        if given is not None:
            need_column(given, table, role)
        elif role in known and known[role] not in table:
            notes.append(f"There is no {role} column {known[role]!r}, so {without[role]}.")
        else:
            used[role] = known.get(role)
    if trained.about.classes is None:
        values, unusable = column.values("numeric", format)
    else:
        names, codes = column.categories("-" in trained.classes)
        values, unusable = _numbered([names[c] if c >= 0 else None for c in codes], trained.classes)
    domains: list[str | None] = [None] * len(values)
    if (where := used["domain"]) is not None:
        domains = [text or None for text in table[where].texts()]
        if lacking := domains.count(None):
            notes.append(f"{lacking:,} rows without a domain are included in the overall scores only.")
    entities = np.arange(len(values))
    if (whose := used["group"]) is not None:
        codes = table[whose].categories()[1]
        entities = np.where(codes < 0, codes.max() + 1 + entities, codes)  # a row without one is its own
    return Labels(name, values, unusable, domains, entities, where, whose, tuple(notes))


def labels_of_paths(trained: Trained, paths: Sequence[str]) -> Labels:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depth = min(map(len, parts))
    if depth < 2 or (depth == 2 and max(map(len, parts)) > 2):
        raise InputError("images must be arranged as domain/class/image, or all as class/image.", "data")
    nested = depth > 2
    values, unknown = _numbered([part[nested] for part in parts], trained.classes)
    domains = [part[0] if nested else None for part in parts]
    where = "folder" if nested else None
    return Labels("folder of the class", values, unknown, domains, np.arange(len(values)), where)


def _numbered(labels: Sequence[Any], classes: Sequence[str]) -> tuple[Array, dict[str, int]]:
    """The number of each label among the classes, NaN where it is none, and the unknown labels."""
    number = {name: float(n) for n, name in enumerate(classes)}
    unknown = Counter(str(name) for name in labels if name is not None and name not in number)
    return np.array([number.get(name, np.nan) for name in labels]), dict(unknown.most_common())


def scored(trained: Trained, data: Any, outputs: Array, labels: Labels) -> Score:
    """Metrics of all rows and of each domain, and the calibration."""
    numeric, used = trained.about.classes is None, ~np.isnan(labels.values)
    if not used.any():
        raise _nothing(labels, trained)
    if numeric and outputs.size != len(outputs):
        raise InputError(f"the model has {outputs[0].size} outputs per row; score supports one.")
    predicted = outputs.reshape(-1) if numeric else trained.probabilities(outputs)
    if not np.isfinite(predicted[used]).all():
        raise InputError("the model's outputs are not all finite; there is nothing to score.")
    y = np.where(used, labels.values, 0).astype(float if numeric else int)
    metrics_of: Any = regression if numeric else classification

    def group(name: str, rows: Array, seen: str = "") -> Group:
        own = rows[used[rows]]
        if not len(own):
            return Group(name, 0, 0, dict.fromkeys(overall.metrics, Estimate(None)), seen)
        entities = labels.entities[own]
        metrics = metrics_of(predicted[own], y[own], entities)
        return Group(name, len(own), len(np.unique(entities)), metrics, seen)

    overall, seen = group("all rows", np.flatnonzero(used)), _seen(trained.record)
    by_domain = pandas.Series(used).groupby(np.array(labels.domains, object)).indices
    return Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=labels.label,
        domain=labels.domain,
        group=labels.group,
        rows=len(used),
        overall=overall,
        domains=tuple(
            group(n, rows, seen.get(n, "new") if seen else "") for n, rows in sorted(by_domain.items())
        ),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(labels.unusable.values()),
        unusable=labels.unusable,
        calibration=None if numeric else calibration(predicted[used], y[used], labels.entities[used]),
        drift=None,
        notes=labels.notes,
    )


def drift_of(
    trained: Trained, table: Table, entities: Array
) -> tuple[tuple[ColumnDrift, ...] | None, tuple[str, ...]]:
    """How the columns of the table differ from those of the training; ``None`` if these are not known."""
    training = trained.inputs.get("training")
    if not training:
        return None, ("The model has no summary of its training columns, so drift cannot be measured.",)
    with input_errors("the summary of the training columns in inputs.json is damaged"):
        encoder, rows = Encoder.from_dict(trained.inputs), np.arange(table.rows)
        unknown = encoder.unknown(table)
        steps = encoder.written_as(table).steps
        now = {step.name: step.summary(table[step.name], rows) for step in steps}
        count = len(np.unique(entities))
        return tuple(column_drift(training, now, unknown.new, unknown.unread, count)), ()


def _nothing(labels: Labels, trained: Trained) -> InputError:
    """Why no row can be scored."""
    if not labels.unusable:
        return InputError(f"{labels.label!r} is missing in every row; there is nothing to score.", "label")
    some, known = quoted(labels.unusable), ", ".join(map(repr, trained.classes[:10]))
    right = f"the classes of the model are {known}" if known else "this model predicts numbers"
    return InputError(f"{labels.label!r} holds {some}; {right}.", "label")


def _seen(record: Mapping[str, Any]) -> dict[str, str]:
    """The domains of the training, by what they were for; empty if there is no record."""
    found: dict[str, str] = {}
    for point in (record.get("history") or ())[-1:]:
        for split, use in (("test", "held out"), ("train", "training"), ("validation", "training")):
            found |= dict.fromkeys(point["scores"].get(split, {}).get("domains", ()), use)
    return found
