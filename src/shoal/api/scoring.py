"""What :func:`shoal.score` computes: labels, domains and entities, metrics with intervals, and drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from shoal.api.score import BY_DOMAIN, Group, Score
from shoal.data.tables import Encoder, Table, as_table, need_column, quoted
from shoal.data.tables.cells import Format
from shoal.errors import InputError, shown
from shoal.experiments.drift import ColumnDrift, column_drift
from shoal.experiments.statistics import (
    Estimate,
    calibration,
    classification,
    codes_of,
    estimate,
    mean_interval,
    metric_functions,
    regression,
)
from shoal.trained import Trained, input_errors

Array = NDArray[Any]


class Rows(NamedTuple):
    """Of every row the label (a number of a class or a number; NaN where it cannot be used), the name of the
    domain or ``None``, and the number of the entity; and the columns that they are in."""

    labels: Array
    domains: Array
    entities: Array
    columns: Mapping[str, str | None]
    unusable: Mapping[str, int]
    notes: Sequence[str] = ()

    def by_domain(self) -> dict[str, Array]:
        rows = pandas.Series(self.domains).groupby(self.domains).indices
        return {str(name): rows[name] for name in sorted(rows)}


def rows_of_table(trained: Trained, table: Table, roles: Mapping[str, str | None]) -> Rows:
    """The columns that are given, or those of the training."""
    with input_errors("the description of the label in inputs.json is damaged"):
        about = dict(trained.inputs.get("label") or {})
        format = Format(**(about.get("how") or {}))
    columns, notes = dict[str, str | None](), list[str]()
    for role, given in roles.items():
        name = given or about.get("name" if role == "label" else role)
        if given is None and role != "label" and name not in (None, *table):
            notes.append(f"There is no {role} column {name!r}.")
            name = None
        columns[role] = None if name is None else need_column(str(name), table, role)
    if columns["label"] is None:
        raise InputError("is missing, and the model does not name its label column.", "label")
    column = table[columns["label"]]
    if trained.about.classes is None:
        labels, unusable = column.values("numeric", format)
    else:
        texts, codes = column.categories("-" in trained.classes)
        labels, unusable = _numbered((texts[c] if c >= 0 else None for c in codes), trained.classes)
    domains, entities = np.full(len(labels), None, object), np.arange(len(labels))
    if columns["domain"] is not None:
        domains = np.array([text or None for text in table[columns["domain"]].texts()], object)
    if columns["group"] is not None:
        codes = table[columns["group"]].categories()[1]
        entities = np.where(codes < 0, codes.max() + 1 + entities, codes)  # a row without one is its own
    return Rows(labels, domains, entities, columns, unusable, notes)


def rows_of_images(trained: Trained, paths: Sequence[str]) -> Rows:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depths = {min(len(part), 3) for part in parts}
    if len(depths) > 1 or min(depths) < 2:
        raise InputError("images must be arranged as domain/class/image, or all as class/image.", "data")
    nested = depths == {3}
    labels, unknown = _numbered((part[nested] for part in parts), trained.classes)
    domains = np.array([part[0] if nested else None for part in parts], object)
    columns = {"label": "folder of the class", "domain": "folder" if nested else None, "group": None}
    return Rows(labels, domains, np.arange(len(labels)), columns, unknown)


def _numbered(labels: Iterable[Any], classes: Sequence[str]) -> tuple[Array, dict[str, int]]:
    """The number of each label among the classes, NaN where it is none, and the unknown labels."""
    labels, number = list(labels), {name: float(n) for n, name in enumerate(classes)}
    unknown = Counter(str(name) for name in labels if name is not None and name not in number)
    return np.array([number.get(name, np.nan) for name in labels]), dict(unknown.most_common())


class Scored(NamedTuple):
    """A score, the probabilities or numbers, and labels by row (0 where a row is not used)."""

    score: Score
    predicted: Array
    y: Array
    used: Array
    rows: Rows


def scored(
    trained: Trained,
    data: Any,
    roles: Mapping[str, str | None],
    column: str | None,
    batch_size: int,
    workers: int,
) -> Scored:
    """Read labelled data, and score a model on them; ``roles`` has the label, domain and group columns."""
    kind, task, numeric = trained.inputs.get("kind", "array"), trained.about.task, not trained.about.classes
    if kind == "array" or task == "multilabel":
        raise InputError(
            f"this is a model for {task} with {kind} input; score supports classification and regression of "
            "tables, of text in tables and of images in folders. For others, use predict_proba."
        )
    if kind == "image" and not (isinstance(data, str | Path) and Path(data).expanduser().is_dir()):
        raise InputError("must be a folder with images, as domain/class/image or class/image.", "data")
    table = None if kind == "image" else as_table(data)
    rows = None if table is None else rows_of_table(trained, table, roles)  # before the model is run
    names, outputs, reader = trained.run(data, batch_size, workers, column)
    rows = rows or rows_of_images(trained, names)
    used = ~np.isnan(rows.labels)
    if not used.any():
        known = ", ".join(map(repr, trained.classes[:10])) or "numbers"
        found = f"holds {quoted(rows.unusable)}" if rows.unusable else "is missing in every row"
        raise InputError(f"{rows.columns['label']!r} {found}; the model predicts {known}.", "label")
    predicted = outputs.reshape(-1) if numeric else trained.probabilities(outputs)
    y = np.where(used, rows.labels, 0).astype(float if numeric else int)
    metrics_of: Any = regression if numeric else classification

    def group(name: str, of: Array, seen: str = "") -> Group:
        own = of[used[of]]
        if not len(own):
            return Group(name, 0, 0, dict.fromkeys(overall.metrics, Estimate(None)), seen)
        metrics = metrics_of(predicted[own], y[own], rows.entities[own])
        return Group(name, len(own), len(np.unique(rows.entities[own])), metrics, seen)

    def reliability(probabilities: Array) -> dict[str, Any]:
        return calibration(probabilities[used], y[used], rows.entities[used])

    overall, seen = group("all rows", np.arange(len(used))), _seen(trained.record)
    raw = None if numeric or trained.temperature == 1 else trained.probabilities(outputs, calibrated=False)
    score = Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=str(rows.columns["label"]),
        domain=rows.columns["domain"],
        group=rows.columns["group"],
        rows=len(used),
        overall=overall,
        domains=tuple(group(n, of, seen.get(n, "new" if seen else "")) for n, of in rows.by_domain().items()),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(rows.unusable.values()),
        unusable=rows.unusable,
        calibration=None if numeric else reliability(predicted),
        uncalibrated=None if raw is None else reliability(raw),
        drift=drift_of(trained, table, rows.entities) if kind == "table" and table is not None else None,
        notes=(*rows.notes, *reader.warnings),
    )
    return Scored(score, predicted, y, used, rows)


def drift_of(trained: Trained, table: Table, entities: Array) -> tuple[ColumnDrift, ...] | None:
    """How the columns of the table differ from those of the training; ``None`` if these are not known."""
    training = trained.inputs.get("training")
    if not training:
        return None
    with input_errors("the summary of the training columns in inputs.json is damaged"):
        encoder = Encoder.from_dict(trained.inputs)
        unknown, steps = encoder.unknown(table), encoder.written_as(table).steps
        now = {step.name: step.summary(table[step.name], np.arange(table.rows)) for step in steps}
        return tuple(column_drift(training, now, unknown.new, unknown.unread, len(np.unique(entities))))


def _seen(record: Mapping[str, Any]) -> dict[str, str]:
    """The domains of the training, by what they were for; empty if there is no record."""
    found: dict[str, str] = {}
    for point in (record.get("history") or ())[-1:]:
        for split, use in (("test", "held out"), ("train", "training"), ("validation", "training")):
            found |= dict.fromkeys(point["scores"].get(split, {}).get("domains", ()), use)
    return found


def differences(models: Sequence[Scored]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """The differences of the other models to the first, paired by row, with intervals."""
    first, found = models[0], dict[str, dict[str, dict[str, Estimate]]]()
    for number, other in enumerate(models[1:], 2):
        for what in ("task", "label", "class_names"):
            one, two = (getattr(scored.score, what) for scored in (first, other))
            if one != two:
                raise InputError(
                    f"cannot be scored together: the {what.replace('_', ' ')} of {first.score.model} is "
                    f"{shown(one)}, and that of {other.score.model} {shown(two)}.",
                    "model",
                )
        every = first.used & other.used
        domains = {n: rows[every[rows]] for n, rows in first.rows.by_domain().items()}
        each = {n: _paired(first, other, rows) for n, rows in domains.items() if len(rows)}
        groups = {"all rows": _paired(first, other, np.flatnonzero(every))}
        if len(domains) > 2:
            names = BY_DOMAIN[first.score.task]
            groups["mean over domains"] = {n: _mean([m[n].value for m in each.values()]) for n in names}
        name = other.score.model
        found[name if name not in found else f"{name} ({number})"] = groups | (each if len(each) > 1 else {})
    return found


def _paired(first: Scored, other: Scored, rows: Array) -> dict[str, Estimate]:
    """The difference of each metric on some rows; they are those of both models."""
    codes = codes_of(first.rows.entities[rows], len(rows))
    one, two = (metric_functions(m.predicted[rows], m.y[rows]) for m in (first, other))

    def difference(metric: str, some: Array) -> float:
        return two[metric](some) - one[metric](some)

    names = BY_DOMAIN[first.score.task]
    return {name: estimate(partial(difference, name), codes, "number") for name in names}


def _mean(values: Sequence[float | None]) -> Estimate:
    """The mean over domains, which are independent; domains without a value are left out."""
    known = [value for value in values if value is not None]
    if len(known) < 3:
        return Estimate(None, undefined="fewer than three domains")
    mean = mean_interval(known)
    return Estimate(mean.mean, mean.low, mean.high)
