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
from shoal.data.tables import Encoder, Table, as_table, is_table, need_column, quoted
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
WITHOUT = {"domain": "all rows are one group", "group": "rows count as independent"}


class Labels(NamedTuple):
    """The label, domain and entity of every row, and the columns that they are in.

    ``values`` are numbers of classes, or numbers; NaN where the label is missing or cannot be used.
    """

    values: Array
    unusable: Mapping[str, int]
    domains: Array
    entities: Array
    columns: Mapping[str, str | None]
    notes: Sequence[str] = ()

    def by_domain(self) -> dict[str, Array]:
        """The rows of each domain, by name."""
        rows = pandas.Series(self.domains).groupby(self.domains).indices
        return {str(name): rows[name] for name in sorted(rows)}


def labels_of_table(trained: Trained, table: Table, roles: Mapping[str, str | None]) -> Labels:
    """The columns that are given, or those of the training."""
    with input_errors("the description of the label in inputs.json is damaged"):
        about = dict(trained.inputs.get("label") or {})
        format = Format(**(about.get("how") or {}))
        names = {"label": about.get("name"), "domain": about.get("domain"), "group": about.get("group")}
    notes = list[str]()
    for role, given in roles.items():
        if given is None and role in WITHOUT and names[role] not in (None, *table):
            notes.append(f"There is no {role} column {names[role]!r}, so {WITHOUT[role]}.")
            names[role] = None
        elif (name := given or names[role]) is not None:
            names[role] = need_column(str(name), table, role)
    if names["label"] is None:
        raise InputError("is missing, and the model does not name its label column.", "label")
    column = table[names["label"]]
    if trained.about.classes is None:
        values, unusable = column.values("numeric", format)
    else:
        texts, codes = column.categories("-" in trained.classes)
        values, unusable = _numbered((texts[c] if c >= 0 else None for c in codes), trained.classes)
    domains = np.full(len(values), None, object)
    if names["domain"] is not None:
        domains = np.array([text or None for text in table[names["domain"]].texts()], object)
        if lacking := list(domains).count(None):
            notes.append(f"{lacking:,} rows without a domain are included in the overall scores only.")
    entities = np.arange(len(values))
    if names["group"] is not None:
        codes = table[names["group"]].categories()[1]
        entities = np.where(codes < 0, codes.max() + 1 + entities, codes)  # a row without one is its own
    return Labels(values, unusable, domains, entities, names, notes)


def labels_of_paths(trained: Trained, paths: Sequence[str]) -> Labels:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depth = min(map(len, parts))
    if depth < 2 or (depth == 2 and max(map(len, parts)) > 2):
        raise InputError("images must be arranged as domain/class/image, or all as class/image.", "data")
    nested = depth > 2
    values, unknown = _numbered([part[nested] for part in parts], trained.classes)
    domains = np.array([part[0] if nested else None for part in parts], object)
    columns = {"label": "folder of the class", "domain": "folder" if nested else None, "group": None}
    return Labels(values, unknown, domains, np.arange(len(values)), columns)


def _numbered(labels: Iterable[Any], classes: Sequence[str]) -> tuple[Array, dict[str, int]]:
    """The number of each label among the classes, NaN where it is none, and the unknown labels."""
    labels, number = list(labels), {name: float(n) for n, name in enumerate(classes)}
    unknown = Counter(str(name) for name in labels if name is not None and name not in number)
    return np.array([number.get(name, np.nan) for name in labels]), dict(unknown.most_common())


class Scored(NamedTuple):
    """A score, and what it is made of: predictions and labels by row, and which rows are used."""

    score: Score
    predicted: Array
    """Probabilities (n, classes), or numbers (n,)."""
    labels: Labels
    used: Array


def scored(
    trained: Trained,
    data: Any,
    roles: Mapping[str, str | None],
    column: str | None,
    batch_size: int,
    workers: int,
) -> Scored:
    """Read labelled data, and score a model on them; ``roles`` has the label, domain and group columns."""
    kind, task = trained.inputs.get("kind", "array"), trained.about.task
    if kind == "array" or task == "multilabel":
        raise InputError(
            f"this is a model for {task} with {kind} input; score supports classification and regression of "
            "tables, of text in tables and of images in folders. For others, use predict_proba."
        )
    if kind == "image" and not (isinstance(data, str | Path) and Path(data).expanduser().is_dir()):
        raise InputError("must be a folder with images, as domain/class/image or class/image.", "data")
    if kind != "image" and not is_table(data):
        raise InputError(f"this model takes a table (.csv, .parquet …), not {shown(data)}.", "data")
    table = None if kind == "image" else as_table(data)
    labels = None if table is None else labels_of_table(trained, table, roles)
    names, outputs, reader = trained.run(data, batch_size, workers, column)
    labels = labels or labels_of_paths(trained, names)
    numeric, used = trained.about.classes is None, ~np.isnan(labels.values)
    if not used.any():
        known = ", ".join(map(repr, trained.classes[:10])) or "numbers"
        found = f"holds {quoted(labels.unusable)}" if labels.unusable else "is missing in every row"
        raise InputError(f"{labels.columns['label']!r} {found}; the model predicts {known}.", "label")
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

    overall, seen = group("all rows", np.arange(len(used))), _seen(trained.record)
    reliability = uncalibrated = None
    if not numeric:
        reliability = calibration(predicted[used], y[used], labels.entities[used])
        if trained.temperature != 1:
            raw = trained.probabilities(outputs, calibrated=False)
            uncalibrated = calibration(raw[used], y[used], labels.entities[used])
    notes, drift = [*labels.notes, *reader.warnings], None
    if kind == "table" and table is not None:
        drift = drift_of(trained, table, labels.entities)
        if drift is None:
            notes.append("The model has no summary of its training columns, so drift cannot be measured.")
    score = Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=str(labels.columns["label"]),
        domain=labels.columns["domain"],
        group=labels.columns["group"],
        rows=len(used),
        overall=overall,
        domains=tuple(
            group(n, rows, seen.get(n, "new") if seen else "") for n, rows in labels.by_domain().items()
        ),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(labels.unusable.values()),
        unusable=labels.unusable,
        calibration=reliability,
        uncalibrated=uncalibrated,
        drift=drift,
        notes=tuple(notes),
    )
    return Scored(score, predicted, labels._replace(values=y), used)


def drift_of(trained: Trained, table: Table, entities: Array) -> tuple[ColumnDrift, ...] | None:
    """How the columns of the table differ from those of the training; ``None`` if these are not known."""
    training = trained.inputs.get("training")
    if not training:
        return None
    with input_errors("the summary of the training columns in inputs.json is damaged"):
        encoder, rows = Encoder.from_dict(trained.inputs), np.arange(table.rows)
        unknown = encoder.unknown(table)
        steps = encoder.written_as(table).steps
        now = {step.name: step.summary(table[step.name], rows) for step in steps}
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
            if sorted(one) != sorted(two):
                text = f"the {what.replace('_', ' ')} of {first.score.model} is {shown(one)}, and that of"
                text = f"cannot be scored together: {text} {other.score.model} {shown(two)}."
                raise InputError(text, "model")
        every = first.used & other.used
        domains = {n: rows[every[rows]] for n, rows in first.labels.by_domain().items()}
        each = {n: _paired(first, other, rows) for n, rows in domains.items() if len(rows)}
        groups = {"all rows": _paired(first, other, np.flatnonzero(every))}
        if len(domains) > 2:
            metrics = groups["all rows"]
            groups["mean over domains"] = {name: _mean([m[name] for m in each.values()]) for name in metrics}
        name = other.score.model
        found[name if name not in found else f"{name} ({number})"] = groups | (each if len(each) > 1 else {})
    return found


def _paired(first: Scored, other: Scored, rows: Array) -> dict[str, Estimate]:
    """The difference of each metric on some rows; they are those of both models."""
    codes = codes_of(first.labels.entities[rows], len(rows))
    one, two = (metric_functions(m.predicted[rows], m.labels.values[rows]) for m in (first, other))

    def difference(metric: str, some: Array) -> float:
        return two[metric](some) - one[metric](some)

    names = BY_DOMAIN[first.score.task]
    return {name: estimate(partial(difference, name), codes, "number") for name in names}


def _mean(values: Sequence[Estimate]) -> Estimate:
    """The mean over domains, which are independent; domains without a value are left out."""
    known = [each.value for each in values if each.value is not None]
    if len(known) < 3:
        return Estimate(None, undefined="fewer than three domains")
    mean = mean_interval(known)
    return Estimate(mean.mean, mean.low, mean.high)
