"""``shoal.score``: how well a trained model does on labelled data, per domain, and how the data differ."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from shoal.api.result import Result
from shoal.errors import InputError, shown
from shoal.experiments.drift import ColumnDrift, column_drift
from shoal.experiments.statistics import Estimate, calibration, classification, regression
from shoal.files import dump_json, write_atomically
from shoal.report.tables import Table
from shoal.settings import Count, Range, checked
from shoal.terminal import clean

if TYPE_CHECKING:
    from shoal.data import reading
    from shoal.trained import Trained

Array = NDArray[Any]
SHOWN = 20
"""Domains and columns in the text; :meth:`Score.to_dict` has all of them."""
BY_DOMAIN = {"classification": ("accuracy", "AUC", "average precision"), "regression": ("MAE", "RMSE", "R²")}


@dataclass(frozen=True)
class Group:
    """The metrics of some rows: those of a domain, or all.

    Attributes:
        name: name of the domain.
        rows: number of rows.
        entities: number of independent entities among them; the number of rows without a group column.
        metrics: metrics by name, each with ``value``, ``low`` and ``high``.
        seen: of a domain: ``training``, ``held out`` (the test domain of the training) or ``new``.
    """

    name: str
    rows: int
    entities: int
    metrics: Mapping[str, Estimate]
    seen: str = ""


@dataclass(frozen=True)
class Score(Result):
    """The result of :func:`score`; ``print`` shows it.

    Attributes:
        model: run folder of the model.
        data: name of the data.
        task: ``classification`` or ``regression``.
        label: label column.
        domain: domain column, if there is one.
        group: column of the entity of each row, if there is one.
        rows: number of rows of the data, of which ``overall.rows`` are scored.
        overall: metrics of all rows.
        domains: metrics of each domain.
        class_names: names of the classes.
        unlabelled: number of rows without a label.
        unusable: labels that are classes unknown to the model or, in regression, no numbers; with their
            counts.
        calibration: calibration of the probabilities, in classification.
        drift: drift of each column, flagged columns first; ``None`` if the model has no summary of its
            training columns.
        notes: remarks on the data.
        out: file that was written, if any.
    """

    model: str
    data: str
    task: str
    label: str
    domain: str | None
    group: str | None
    rows: int
    overall: Group
    domains: tuple[Group, ...]
    class_names: tuple[str, ...]
    unlabelled: int
    unusable: Mapping[str, int]
    calibration: Mapping[str, Any] | None
    drift: tuple[ColumnDrift, ...] | None
    notes: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def worst(self) -> Group | None:
        """The domain with the lowest accuracy, or the highest mean absolute error."""
        name = BY_DOMAIN[self.task][0]
        sign = 1 if self.task == "classification" else -1
        known = [(sign * v, group) for group in self.domains if (v := group.metrics[name].value) is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def to_dict(self) -> dict[str, Any]:
        content = {name: value for name, value in asdict(self).items() if name != "out"}
        for column, one in zip(content["drift"] or (), self.drift or (), strict=True):
            column["words"] = one.words()
        return content

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with each metric and its interval: one row per domain, and one for all rows."""
        rows = []
        for group in (*self.domains, self.overall):
            row: dict[str, Any] = {"domain": group.name, "rows": group.rows, "entities": group.entities}
            row["seen"] = group.seen
            for name, estimate in group.metrics.items():
                row |= {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}
            rows.append(row)
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        parts = [*self._rows(), *self._tables(), *self._calibration(), *self._drift()]
        parts += [_filled(note) for note in self.notes]
        return "\n\n".join([*parts, *([f"Saved in {self.out}."] if self.out else [])])

    def _rows(self) -> Iterator[str]:
        positive = f"; positive class {self.class_names[1]!r}" if len(self.class_names) == 2 else ""
        scored, excluded = self.overall.rows, sum(self.unusable.values())
        lines = [f"{scored:,} of {self.rows:,} rows of {self.data} (label {self.label!r}{positive})"]
        if self.group:
            lines.append(f"Intervals are those of {self.overall.entities:,} entities ({self.group!r}).")
        if self.unlabelled:
            lines.append(f"Excluded: {self.unlabelled:,} without a label.")
        if excluded:
            some = ", ".join(f"{name!r} ({count:,})" for name, count in list(self.unusable.items())[:3])
            if self.task == "classification":
                right = (self.overall.metrics["accuracy"].value or 0.0) * scored
                some += f". Counted as errors, the accuracy would be {right / (scored + excluded):.3f}"
            what = "of unknown classes" if self.task == "classification" else "with a label that is no number"
            lines.append(f"Excluded: {excluded:,} {what}: {some}.")
        yield "\n".join(map(_filled, lines))

    def _tables(self) -> Iterator[str]:
        table = Table(["all rows", "value (95 %)"])
        for name, estimate in self.overall.metrics.items():
            table.add(name, _cell(estimate))
        yield table.text()
        if not self.domains:
            return
        names, worst = BY_DOMAIN[self.task], self.worst if len(self.domains) > 1 else None
        counts = ["rows", "entities"] if self.group else ["rows"]
        table = Table(["domain", *counts, "in training", *(f"{name} (95 %)" for name in names)])
        for group in self.domains[:SHOWN]:
            seen = "yes" if group.seen == "training" else group.seen
            numbers = [f"{n:,}" for n in (group.rows, group.entities)[: len(counts)]]
            table.add(group.name, *numbers, seen, *(_cell(group.metrics[name]) for name in names))
        more = f", {SHOWN} of {len(self.domains):,}" if len(self.domains) > SHOWN else ""
        yield _filled(f"By domain ({self.domain}{more}){f'; worst: {worst.name}' if worst else ''}")
        yield table.text()

    def _calibration(self) -> Iterator[str]:
        if self.calibration is None:
            return
        error, chance = self.calibration["error"], self.calibration["chance"]
        what = "the predicted class" if len(self.class_names) != 2 else repr(self.class_names[1])
        result = "more than sampling explains" if error > chance else "no significant miscalibration"
        yield _filled(
            f"Calibration of the probability of {what}: expected calibration error {error:.3f} (below "
            f"{chance:.3f} for 95 % of perfectly calibrated models with as many rows): {result}."
        )

    def _drift(self) -> Iterator[str]:
        if not self.drift:
            return
        flagged = sum(bool(one.flags) for one in self.drift)
        count = f"{flagged or 'none'} of {len(self.drift)} columns differ{'s' * (flagged < 2)}"
        yield f"Drift: {count} from training by more than sampling explains."
        table = Table(["column", "kind", "PSI", "p", "difference"])
        for one in [one for one in self.drift if one.words()][:SHOWN]:
            p = "–" if one.p is None else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
            table.add(one.column, one.kind, _number(one.psi), p, one.words())
        if table.rows:
            yield table.text()


def _filled(line: str) -> str:
    return textwrap.fill(clean(line), 100)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1e6 else f"{value:.4g}"


def _cell(estimate: Estimate) -> str:
    if estimate.undefined:
        return f"undefined: {estimate.undefined}"
    ends = f" ({_number(estimate.low)} to {_number(estimate.high)})" if estimate.low is not None else ""
    return f"{_number(estimate.value)}{ends}"


@checked
def score(
    model: Any,
    data: Any,
    *,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    column: str | None = None,
    out: str | Path | None = None,
    batch_size: Count = 256,
    workers: Annotated[int, Range(0, 1000)] = 0,
    device: str | None = None,
) -> Score:
    """Score a trained model on labelled data, per domain and overall, with 95 % confidence intervals. ::

        result = shoal.score("runs/fish", "labelled.csv")
        print(result)
        result.overall.metrics["AUC"].low

    Rows without a label, and rows of classes that are unknown to the model, are counted and excluded.
    Confidence intervals account for the sampling of rows, or of entities with a group column, within the same
    domains. A column is reported as drifted if its distribution differs from training by more than sampling
    explains.

    Args:
        model: run folder, or model from :func:`shoal.load`.
        data: table (.csv, .parquet …), or folder of images arranged as domain/class/image or class/image; in
            Python also a DataFrame or a mapping of columns.
        label: column to predict (default: as in training).
        domain: column with the domain of each row (default: as in training).
        group: column that identifies the entity of each row, such as a patient; rows of one entity are not
            independent (default: as in training).
        column: text column of a table, for text models (default: as in training).
        out: JSON file to write, or folder for score.json (default: none).
        batch_size: number of examples per batch.
        workers: number of processes that load examples.
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
    """
    from shoal.data.reading import as_table, rows_of
    from shoal.trained import as_trained, output_file

    trained = as_trained(model, device)
    kind, task = trained.inputs.get("kind", "array"), trained.about.task
    if kind == "array" or task in ("multilabel", "dense"):
        raise InputError(
            f"this is a model for {task} with {kind} input; score supports classification and regression of "
            "tables, of text in tables and of images in folders. For others, use predict_proba."
        )
    if kind == "image" and not (isinstance(data, str | Path) and Path(data).expanduser().is_dir()):
        raise InputError("must be a folder with images, as domain/class/image or class/image.", "data")
    if kind != "image" and rows_of(data) is None:
        raise InputError(f"this model takes a table (.csv, .parquet …), not {shown(data)}.", "data")
    path = None
    if out is not None:
        path = Path(out) if str(out).lower().endswith(".json") else Path(out) / "score.json"
        path = output_file(path, trained, data)
    table = as_table(data) if kind != "image" else None
    labels = _labels_of_table(trained, table, label, domain, group) if table else None
    reader = trained.reader(column=column)
    parts = [(batch.names, output) for batch, output in trained.outputs(reader, data, batch_size, workers)]
    outputs = np.concatenate([output for _, output in parts])
    labels = labels or _labels_of_paths(trained, [name for names, _ in parts for name in names])
    result = _scored(trained, data, outputs, labels)
    if kind == "table" and table is not None:
        drift, notes = _drift_of(trained, table, labels)
        result = replace(result, drift=drift, notes=(*result.notes, *notes))
    result = replace(result, notes=(*result.notes, *reader.doubts))
    if path is None:
        return result
    try:
        write_atomically(path, dump_json(result.to_dict()))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror}.", "out") from error
    return replace(result, out=path)


class _Labels(NamedTuple):
    """The label, domain and entity of every row."""

    label: str
    values: Array
    """Numbers of classes, or numbers; NaN where the label is missing or cannot be used."""
    unusable: Mapping[str, int]
    domain: str | None
    domains: Sequence[str | None]
    group: str | None
    entities: Array
    notes: tuple[str, ...]


def _labels_of_table(
    trained: Trained, table: reading.Table, label: str | None, domain: str | None, group: str | None
) -> _Labels:
    from shoal.data.cells import Format
    from shoal.data.columns import categories_of, values_of
    from shoal.data.reading import need_column
    from shoal.trained import input_errors

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
        values, unusable = values_of(column, "numeric", format)
    else:
        names, codes = categories_of(column, "-" in trained.classes)
        listed = [str(names[code]) if code >= 0 else None for code in codes]
        values, unusable = _numbered(listed, trained.classes)
    domains: list[str | None] = [None] * len(values)
    if (where := used["domain"]) is not None:
        domains = [text or None for text in table[where].texts()]
        if lacking := domains.count(None):
            notes.append(f"{lacking:,} rows without a domain are included in the overall scores only.")
    entities = np.arange(len(values))
    if (whose := used["group"]) is not None:
        codes = categories_of(table[whose])[1]
        entities = np.where(codes < 0, codes.max() + 1 + entities, codes)  # a row without one is its own
    return _Labels(str(name), values, unusable, where, domains, whose, entities, tuple(notes))


def _labels_of_paths(trained: Trained, paths: Sequence[str]) -> _Labels:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depth = min(map(len, parts))
    if depth < 2 or (depth == 2 and max(map(len, parts)) > 2):
        raise InputError("images must be arranged as domain/class/image, or all as class/image.", "data")
    nested = depth > 2
    values, unknown = _numbered([part[1] if nested else part[0] for part in parts], trained.classes)
    domains, where = [part[0] if nested else None for part in parts], "folder" if nested else None
    return _Labels("folder of the class", values, unknown, where, domains, None, np.arange(len(values)), ())


def _numbered(labels: Sequence[str | None], classes: Sequence[str]) -> tuple[Array, dict[str, int]]:
    """The number of each label among the classes, NaN where it is none, and the unknown labels."""
    number: dict[str | None, float] = {name: float(n) for n, name in enumerate(classes)}
    unknown = Counter(name for name in labels if name is not None and name not in number)
    return np.array([number.get(name, np.nan) for name in labels]), dict(unknown.most_common())


def _scored(trained: Trained, data: Any, outputs: Array, labels: _Labels) -> Score:
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

    def group(name: str, rows: Array, seen: str = "") -> Group:
        own = rows[used[rows]]
        if not len(own):
            return Group(name, 0, 0, dict.fromkeys(overall.metrics, Estimate(None)), seen)
        metrics = (regression if numeric else classification)(predicted[own], y[own], labels.entities[own])
        return Group(name, len(own), len(np.unique(labels.entities[own])), metrics, seen)

    overall, seen = group("all rows", np.flatnonzero(used)), _seen(trained.record)
    by_domain = pandas.Series(used).groupby(np.array(labels.domains, object)).indices
    domains = [group(n, rows, seen.get(n, "new") if seen else "") for n, rows in sorted(by_domain.items())]
    return Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=labels.label,
        domain=labels.domain,
        group=labels.group,
        rows=len(used),
        overall=overall,
        domains=tuple(domains),
        class_names=trained.classes,
        unlabelled=int((~used).sum()) - sum(labels.unusable.values()),
        unusable=labels.unusable,
        calibration=None if numeric else calibration(predicted[used], y[used], labels.entities[used]),
        drift=None,
        notes=labels.notes,
    )


def _drift_of(
    trained: Trained, table: reading.Table, labels: _Labels
) -> tuple[tuple[ColumnDrift, ...] | None, tuple[str, ...]]:
    from shoal.data.table import Preprocessing
    from shoal.trained import input_errors

    training = trained.inputs.get("training")
    if not training:
        return None, ("The model has no summary of its training columns, so drift cannot be measured.",)
    with input_errors("the summary of the training columns in inputs.json is damaged"):
        entities = len(np.unique(labels.entities))
        return tuple(column_drift(Preprocessing.from_dict(trained.inputs), training, table, entities)), ()


def _nothing(labels: _Labels, trained: Trained) -> InputError:
    """Why no row can be scored."""
    from shoal.data.columns import quoted

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
