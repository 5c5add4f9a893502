"""What :func:`shoal.score` computes: labels, domains and entities, metrics with intervals, and drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    columns: Mapping[str, str | None],
    column: str | None,
    batch_size: int,
    workers: int,
) -> Scored:
    """Read labelled data, and score a model on them; ``columns`` has the label, domain and group."""
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
    table = as_table(data) if kind != "image" else None
    labels = labels_of_table(trained, table, **columns) if table is not None else None
    reader = trained.reader(column=column)
    parts = [(batch.names, output) for batch, output in trained.outputs(reader, data, batch_size, workers)]
    labels = labels or labels_of_paths(trained, [name for names, _ in parts for name in names])
    result = _scored(trained, data, np.concatenate([output for _, output in parts]), labels)
    notes = [*labels.notes, *reader.warnings]
    if kind == "table" and table is not None:
        drift, more = drift_of(trained, table, labels.entities)
        return result._replace(score=replace(result.score, drift=drift, notes=(*notes, *more)))
    return result._replace(score=replace(result.score, notes=tuple(notes)))


def _scored(trained: Trained, data: Any, outputs: Array, labels: Labels) -> Scored:
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

    def reliability(probabilities: Array) -> dict[str, Any]:
        return calibration(probabilities[used], y[used], labels.entities[used])

    overall, seen = group("all rows", np.flatnonzero(used)), _seen(trained.record)
    raw = None if numeric or trained.temperature == 1 else trained.probabilities(outputs, calibrated=False)
    score = Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=labels.label,
        domain=labels.domain,
        group=labels.group,
        rows=len(used),
        overall=overall,
        domains=tuple(
            group(n, rows, seen.get(n, "new") if seen else "") for n, rows in _by_domain(labels).items()
        ),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(labels.unusable.values()),
        unusable=labels.unusable,
        calibration=None if numeric else reliability(predicted),
        uncalibrated=None if raw is None else reliability(raw),
    )
    return Scored(score, predicted, labels._replace(values=y), used)


def _by_domain(labels: Labels) -> dict[str, Array]:
    """The rows of each domain, by name."""
    rows = pandas.Series(range(len(labels.domains))).groupby(np.array(labels.domains, object)).indices
    return {str(name): rows[name] for name in sorted(rows)}


def differences(models: Sequence[Scored]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """The differences of the other models to the first, paired by row, with intervals."""
    first, found = models[0], dict[str, dict[str, dict[str, Estimate]]]()
    for other in models[1:]:
        for what in ("task", "class_names", "label"):
            one, two = (
                sorted(v) if what == "class_names" else v
                for v in (getattr(m.score, what) for m in (first, other))
            )
            if one != two:
                raise InputError(
                    f"cannot be scored together: the {what.replace('_', ' ')} of {first.score.model} is "
                    f"{shown(one)}, and that of {other.score.model} {shown(two)}.",
                    "model",
                )
        every = first.used & other.used
        groups = {"all rows": np.flatnonzero(every)}
        domains = {n: rows[every[rows]] for n, rows in _by_domain(first.labels).items()}
        if len(domains) > 1:
            groups |= domains
        each = {name: _paired(first, other, rows) for name, rows in groups.items() if len(rows)}
        if len(domains) > 2:
            mean = {
                metric: _mean([each[n][metric] for n in domains if n in each]) for metric in each["all rows"]
            }
            each = {"all rows": each.pop("all rows"), "mean over domains": mean, **each}
        name = other.score.model
        found[name if name not in found else f"{name} ({len(found) + 2})"] = each
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
