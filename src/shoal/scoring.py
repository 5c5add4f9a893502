"""``shoal.score``: how well a trained model does on labelled rows, per domain, and how these rows differ.

Rows without a label, and rows whose class the model does not know, are counted, named and left out of every
metric. Intervals are those of :mod:`shoal.experiments.statistics`, drift is that of
:mod:`shoal.experiments.drift`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.cells import Format, is_missing
from shoal.data.columns import categories_of, quoted, values_of
from shoal.data.inputs import ROWS, check_columns
from shoal.data.reading import Column, Rows, objects, rows_of
from shoal.data.table import Preprocessing
from shoal.errors import InputError
from shoal.experiments.drift import ColumnDrift, Drift
from shoal.experiments.statistics import Estimate, calibration, classification, need_scipy, regression
from shoal.files import dump_json, write_atomically
from shoal.report.tables import Table, clean
from shoal.settings import Seed, checked
from shoal.trained import Trained, load, probabilities

Array = NDArray[Any]
UNKNOWN, UNLABELLED = -2, -1
SHOWN = 20
"""Domains and columns in the text; the rest is in :meth:`Score.to_dict`."""
BY_DOMAIN = {"classification": ("accuracy", "AUC", "average precision"), "regression": ("MAE", "RMSE", "R²")}


@dataclass(frozen=True)
class Group:
    """The metrics of some rows: of a domain, or of all."""

    name: str
    rows: int
    metrics: Mapping[str, Estimate]
    seen: str = ""
    """Of a domain: ``training``, ``held out`` (the test domain of the training) or ``new``."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "metrics": {name: found.to_dict() for name, found in self.metrics.items()}}


@dataclass(frozen=True)
class Score:
    """The result of :func:`score`; ``print`` shows it.

    Attributes:
        model: run folder of the model.
        data: name of the data.
        task: ``classification`` or ``regression``.
        label: label column.
        domain: domain column, if there is one.
        rows: number of rows of the data, of which ``overall.rows`` are scored.
        overall: metrics of all rows.
        domains: metrics of each domain.
        class_names: names of the classes.
        unlabelled: number of rows without a label.
        unreadable: labels of a regression that are not numbers, with their counts.
        unknown: classes unknown to the model, with their counts.
        calibration: calibration of the probabilities, in classification.
        drift: drift of each column, flagged columns first; ``None`` if the model has no summary of its
            training columns.
        notes: remarks on the data.
    """

    model: str
    data: str
    task: str
    label: str
    domain: str | None
    rows: int
    """Of the data; those that count are ``overall.rows``."""
    overall: Group
    domains: tuple[Group, ...]
    class_names: tuple[str, ...]
    unlabelled: int
    unreadable: Mapping[str, int]
    """Labels of a regression that are no numbers."""
    unknown: Mapping[str, int]
    """Classes that the model does not know."""
    calibration: Mapping[str, Any] | None
    drift: tuple[ColumnDrift, ...] | None
    """Flagged columns first; ``None`` where the model has no summary of its training columns."""
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Group | None:
        """The domain with the lowest accuracy, or the highest mean absolute error."""
        name = BY_DOMAIN[self.task][0]
        known = [group for group in self.domains if group.metrics[name].value is not None]
        sign = 1 if self.task == "classification" else -1
        return min(known, key=lambda g: sign * (g.metrics[name].value or 0.0), default=None)

    def to_dict(self) -> dict[str, Any]:
        content = {k: v for k, v in vars(self).items() if k not in ("unlabelled", "unreadable", "unknown")}
        left_out = {"unlabelled": self.unlabelled, "unreadable": dict(self.unreadable)}
        return {
            **content,
            "overall": self.overall.to_dict(),
            "domains": [group.to_dict() for group in self.domains],
            "class_names": list(self.class_names),
            "left_out": {**left_out, "unknown_classes": dict(self.unknown)},
            "drift": None if self.drift is None else [column.to_dict() for column in self.drift],
            "notes": list(self.notes),
        }

    def to_frame(self) -> Any:
        """Return a DataFrame with each metric and its interval: one row per domain, and one for all rows."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("a DataFrame requires pandas: pip install 'shoal[tables]'") from error
        rows = []
        for group in (*self.domains, self.overall):
            row: dict[str, Any] = {"domain": group.name, "rows": group.rows, "seen": group.seen}
            for name, found in group.metrics.items():
                row |= {name: found.value, f"{name} low": found.low, f"{name} high": found.high}
            rows.append(row)
        return pandas.DataFrame(rows)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` as JSON.

        Args:
            path: .json file, or a folder for ``score.json``.
        """
        path = Path(path).expanduser()
        path = path if path.suffix.lower() == ".json" else path / "score.json"
        try:
            write_atomically(path, dump_json(self.to_dict()))
        except OSError as error:
            raise InputError(f"out={str(path)!r} cannot be written: {error.strerror}.") from error
        return path

    def __str__(self) -> str:
        by_domain = f"By domain ({clean(str(self.domain))})\n\n{self._by_domain().text()}{self._after()}"
        blocks = [self._head(), _overall(self.overall).text(), by_domain if self.domains else ""]
        if self.calibration is not None:
            blocks.append(f"{self._calibrated()}\n\n{_bins(self.calibration).text()}")
        blocks += [self._drifted(), *(_filled(note) for note in self.notes)]
        return "\n\n".join(block for block in blocks if block)

    def _repr_html_(self) -> str:
        tables = [_overall(self.overall), *([self._by_domain()] if self.domains else [])]
        tables += [_bins(self.calibration)] if self.calibration is not None else []
        return "\n".join(table.html() for table in [*tables, *([_columns(self.drift)] if self.drift else [])])

    def _head(self) -> str:
        positive = f"; positive class {self.class_names[1]!r}" if len(self.class_names) == 2 else ""
        lines = [
            f"{self.overall.rows:,} of {self.rows:,} rows of {self.data} (label {self.label!r}{positive})"
        ]
        if self.unlabelled:
            lines.append(f"Excluded: {_rows(self.unlabelled)} without a label.")
        if count := sum(self.unreadable.values()):
            lines.append(
                f"Excluded: {_rows(count)} with a label that is not a number: {quoted(self.unreadable)}."
            )
        if count := sum(self.unknown.values()):
            right = (self.overall.metrics["accuracy"].value or 0.0) * self.overall.rows
            lines.append(
                f"Excluded: {_rows(count)} of classes unknown to the model: {quoted(self.unknown)}. "
                f"Counted as errors, the accuracy would be {right / (self.overall.rows + count):.3f}."
            )
        return "\n".join(map(_filled, lines))

    def _by_domain(self) -> Table:
        names = BY_DOMAIN[self.task]
        table = Table(["domain", "rows", "in training", *(f"{name} (95 %)" for name in names)])
        for group in self.domains[:SHOWN]:
            cells = [_cell(group.metrics[name]) for name in names]
            table.add(group.name, f"{group.rows:,}", {"training": "yes"}.get(group.seen, group.seen), *cells)
        return table

    def _after(self) -> str:
        more = len(self.domains) - SHOWN
        rest = f"\n… {more:,} more domains (all of them in the JSON)" if more > 0 else ""
        name, worst = BY_DOMAIN[self.task][0], self.worst
        if worst is not None and len(self.domains) > 1:
            value = _number(worst.metrics[name].value)
            rest += f"\n\nWorst domain by {name}: {clean(worst.name)} ({value})."
        return rest

    def _calibrated(self) -> str:
        assert self.calibration is not None
        error, chance = self.calibration["error"], self.calibration["chance"]
        what = "the predicted class" if len(self.class_names) != 2 else repr(self.class_names[1])
        good, bad = (
            "no significant miscalibration",
            "miscalibrated by more than sampling",
        )
        return _filled(
            f"Calibration of the probability of {what}: expected calibration error {error:.3f} (below "
            f"{chance:.3f} for 95 % of perfectly calibrated models with as many rows): "
            f"{f'{bad} explains' if error > chance else good}."
        )

    def _drifted(self) -> str:
        if not self.drift:
            return ""
        flagged = sum(bool(column.flags) for column in self.drift)
        different = [column for column in self.drift if column.words()]
        count = f"{flagged or 'none'} of {len(self.drift)} columns differ{'s' * (flagged < 2)}"
        table = f"\n\n{_columns(different).text()}" if different else ""
        return f"Drift: {count} from training by more than sampling explains.{table}"


def _filled(line: str) -> str:
    return textwrap.fill(clean(line), 100)


def _overall(group: Group) -> Table:
    table = Table(["all rows", "value", "95 % interval"])
    for name, estimate in group.metrics.items():
        ends = "–" if estimate.low is None else f"{_number(estimate.low)} to {_number(estimate.high)}"
        table.add(name, _cell(replace(estimate, low=None)), ends)
    return table


def _bins(content: Mapping[str, Any]) -> Table:
    table = Table(["probability", "rows", "mean predicted", "observed (95 %)"])
    for row in content["bins"]:
        observed = _cell(Estimate(row["observed"], row["low"], row["high"]))
        ends = f"{row['from']:.1f}–{row['to']:.1f}"
        table.add(ends, f"{row['count']:,}", f"{row['predicted']:.3f}", observed)
    return table


def _columns(drift: Sequence[ColumnDrift]) -> Table:
    table = Table(["column", "kind", "PSI", "p", "difference"])
    for one in drift[:SHOWN]:
        p = "–" if one.p is None else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
        table.add(one.column, one.kind, _number(one.psi), p, one.words() or "within sampling")
    return table


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1e6 else f"{value:.4g}"


def _cell(estimate: Estimate) -> str:
    if estimate.undefined:
        return f"undefined: {estimate.undefined}"
    ends = f" ({_number(estimate.low)} to {_number(estimate.high)})" if estimate.low is not None else ""
    return f"{_number(estimate.value)}{ends}"


# Scoring


@checked
def score(
    model: str | Path | Trained,
    data: Any,
    *,
    label: str | None = None,
    domain: str | None = None,
    column: str | None = None,
    batch_size: int = 256,
    workers: int = 0,
    device: str | torch.device = "cpu",
    bad_images: str = "stop",
    seed: Seed = 0,
) -> Score:
    """Score a trained model on labelled data, per domain and overall, with 95 % confidence intervals. ::

        result = shoal.score("runs/fish", "labelled.csv")
        print(result)
        result.overall.metrics["AUC"].low

    Args:
        model: run folder, or model loaded with :func:`shoal.load` (for your own network).
        data: for table and text models: a file, a DataFrame or a mapping of columns. For image models: a
            folder arranged as ``domain/class/image`` or ``class/image``.
        label: column to predict (default: as in training).
        domain: column with the domain of each row (default: as in training; without it all rows are one
            group).
        column: text column of a table, for text models.
        batch_size: number of examples per batch.
        workers: number of processes that load examples.
        device: device.
        bad_images: ``stop`` at an image that cannot be read, or ``skip`` it.
        seed: random seed of the bootstrap.

    Returns:
        Score: metrics, calibration and drift.
    """
    need_scipy()
    trained = model if isinstance(model, Trained) else load(model, device=device)
    kind = str(trained.inputs.get("kind", "array"))
    if kind == "array":
        raise InputError(
            "this model takes preprocessed arrays; score supports models of tables, of text in tables and "
            "of images "
            "in folders. For arrays take predict_proba and the functions of shoal.experiments.statistics."
        )
    reader = trained.reader(column=column, bad=bad_images)
    if kind == "image":
        if not isinstance(data, str | Path) or not Path(data).expanduser().is_dir():
            raise InputError(
                "this model takes images; specify a folder arranged as domain/class/image or class/image."
            )
        outputs, names = _predicted(trained, reader, data, batch_size, workers)
        truth = _from_paths(names, trained)
    else:
        truth = _from_table(trained, data, label, domain)
        outputs, _ = _predicted(trained, reader, data, batch_size, workers)
    if len(outputs) != len(truth.values):
        raise InputError(
            f"{len(truth.values):,} labels and {len(outputs):,} predictions: did the data change?"
        )
    return _scored(trained, data, truth, outputs, reader.notes, seed)


@dataclass
class _Truth:
    """The label and domain of every row."""

    label: str
    domain: str | None
    values: Array
    """Classes (or :data:`UNLABELLED`, :data:`UNKNOWN`); in regression numbers, NaN where there is none."""
    places: Array
    """In ``names``, −1 where a row has no domain."""
    names: list[str]
    unlabelled: int
    other: Counter[str]
    """Unknown classes; in regression labels that are no numbers."""
    drift: list[ColumnDrift] | None
    notes: list[str]


def _predicted(
    trained: Trained, reader: Any, data: Any, batch_size: int, workers: int
) -> tuple[Array, list[str]]:
    outputs, names = [], list[str]()
    for batch, found in trained.outputs(reader, data, batch_size, workers):
        outputs.append(found)
        names += batch.names if reader.description.get("kind") == "image" else []
    if not outputs:
        raise InputError("there is nothing to score: the input is empty.")
    return np.concatenate(outputs), names


def _from_table(trained: Trained, data: Any, label: str | None, domain: str | None) -> _Truth:
    rows = rows_of(data)
    if rows is None:
        what = repr(str(data)) if isinstance(data, str | Path) else f"a {type(data).__name__}"
        raise InputError(f"score requires a table (.csv, .parquet …) for this model, not {what}.")
    about = _described(trained)
    wanted = label or about.get("name")
    if wanted is None:
        raise InputError("the label column is missing; set it with label (--label on the command line).")
    check_columns(rows, [wanted], "the label column" if label else "the label column of the training")
    notes: list[str] = []
    where = domain or about.get("domain")
    if domain is not None:
        check_columns(rows, [domain], "the domain column")
    elif where is not None and where not in rows.names:
        notes.append(f"There is no domain column {where!r}, so all rows are one group.")
        where = None
    drift = _drift(trained, rows, notes)
    features = [column.name for column in drift.columns] if drift else []
    needed = list(dict.fromkeys([wanted, *([where] if where else []), *features]))
    values, places, known = list[Array](), list[Array](), dict[str, int]()
    other: Counter[str] = Counter()
    read = _Labels(trained)
    for part in rows.parts(needed, ROWS):  # of features only counts are kept
        values.append(read(part[wanted], other))
        if where is not None:
            distinct, codes = part[where].encoded
            to = np.array([*(known.setdefault(t, len(known)) if t else -1 for t in distinct), -1], np.int64)
            places.append(to[codes])
        if drift is not None:
            drift.add(part)
    if not values:
        raise InputError(f"{rows.where} has no rows.")
    every = np.concatenate(values)
    found = np.concatenate(places) if places else np.full(len(every), -1)
    numeric = trained.about.classes is None
    unlabelled = int((np.isnan(every) if numeric else every == UNLABELLED).sum())
    unlabelled -= other.total() if numeric else 0
    if where is not None and (gone := int((found < 0).sum())):
        notes.append(f"{_rows(gone)} without a domain are included in the overall scores only.")
    moved = drift.result() if drift is not None else None
    return _Truth(wanted, where, every, found, list(known), unlabelled, other, moved, notes)


def _described(trained: Trained) -> Mapping[str, Any]:
    """What the model's folder says of the label, as far as it is of use."""
    about = trained.inputs.get("label") or {}
    if not isinstance(about, Mapping):
        raise InputError("the description of the label is damaged: it is no mapping.")
    if wrong := [name for name in ("name", "domain") if not isinstance(about.get(name, ""), str | None)]:
        raise InputError(f"the description of the label is damaged: its {wrong[0]} is no text.")
    return about


def _drift(trained: Trained, rows: Rows, notes: list[str]) -> Drift | None:
    if trained.inputs.get("kind") != "table":
        return None
    training = trained.inputs.get("training")
    if not training:
        notes.append("The model has no summary of its training columns, so drift cannot be measured.")
        return None
    preprocessing = Preprocessing.from_dict(trained.inputs)
    check_columns(rows, preprocessing.names, "what the model needs:")
    try:
        return Drift(preprocessing, training)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the summary of the training columns is damaged ({error!r}).") from error


class _Labels:
    """A column of labels as classes of a model, or as numbers."""

    def __init__(self, trained: Trained) -> None:
        self.classes = {name: n for n, name in enumerate(trained.classes)}
        try:
            self.how = Format(**(_described(trained).get("how") or {}))
        except TypeError as error:
            raise InputError(f"the description of the label is damaged ({error}).") from error

    def __call__(self, column: Column, other: Counter[str]) -> Array:
        if not self.classes:
            values, wrong = values_of(column, "numeric", self.how)
            other.update(wrong)
            return values
        distinct, codes = column.encoded
        names, alike = categories_of(Column(strings=objects(distinct)))  # where 1.0 is 1
        to = np.full(len(distinct) + 1, UNLABELLED)
        for place, (text, code) in enumerate(zip(distinct, alike.tolist(), strict=True)):
            if text in self.classes:
                to[place] = self.classes[text]
            elif code >= 0 and not is_missing(text):
                to[place] = self.classes.get(str(names[code]), UNKNOWN)
            if to[place] == UNKNOWN:
                other[str(text)] += int((codes == place).sum())
        found: Array = to[codes]
        return found


def _from_paths(paths: Sequence[str], trained: Trained) -> _Truth:
    """Of images in folders ``domain/class`` or ``class``."""
    parts = [Path(path).parts for path in paths]
    depths = {len(part) for part in parts}
    if min(depths) < 2 or (len(depths & {2}) and len(depths) > 1):
        raise InputError("images must be arranged as domain/class/image, or all as class/image.")
    nested = min(depths) > 2
    classes = {name: n for n, name in enumerate(trained.classes)}
    labels = [part[1] if nested else part[0] for part in parts]
    values = np.array([classes.get(name, UNKNOWN) for name in labels])
    other = Counter(name for name in labels if name not in classes)
    names = sorted({part[0] for part in parts}) if nested else []
    place = {name: n for n, name in enumerate(names)}
    places = np.array([place[part[0]] if nested else -1 for part in parts])
    domain = "folder" if nested else None
    return _Truth("folder of the class", domain, values, places, names, 0, other, None, [])


def _scored(
    trained: Trained, data: Any, truth: _Truth, outputs: Array, notes: Sequence[str], seed: int
) -> Score:
    numeric = trained.about.classes is None
    if numeric:
        if outputs.size != len(outputs):
            raise InputError(f"the model has {outputs[0].size} outputs per row; score takes one.")
        outputs, keep = outputs.reshape(-1).astype(np.float64), np.isfinite(truth.values)
    else:
        keep = truth.values >= 0
    if not keep.any():
        raise _nothing(truth, trained)
    y = truth.values[keep]
    predicted = outputs[keep] if numeric else probabilities(outputs[keep])
    if not np.isfinite(predicted).all():
        raise InputError("the model's outputs are not all finite; there is nothing to score.")
    measure = regression if numeric else classification
    overall = Group("all rows", int(keep.sum()), measure(predicted, y, seed))
    seen = _seen(trained.record)
    groups, none = [], dict.fromkeys(overall.metrics, Estimate(None))
    places = truth.places[keep]
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(len(truth.names) + 1))
    for n in sorted(range(len(truth.names)), key=lambda n: truth.names[n]):
        name, rows = truth.names[n], order[bounds[n] : bounds[n + 1]]
        metrics = measure(predicted[rows], y[rows], seed) if len(rows) else none
        groups.append(Group(name, len(rows), metrics, seen.get(name, "new") if seen else ""))
    other = dict(truth.other.most_common())
    return Score(
        model=str(trained.folder or trained),
        data=repr(str(data)) if isinstance(data, str | Path) else "the table",
        task="regression" if numeric else "classification",
        label=truth.label,
        domain=truth.domain,
        rows=len(truth.values),
        overall=overall,
        domains=tuple(groups),
        class_names=() if numeric else trained.classes,
        unlabelled=truth.unlabelled,
        unreadable=other if numeric else {},
        unknown={} if numeric else other,
        calibration=None if numeric else calibration(predicted, y, seed),
        drift=None if truth.drift is None else tuple(truth.drift),
        notes=(*truth.notes, *(note for note in notes if "not used" not in note and "never saw" not in note)),
    )


def _nothing(truth: _Truth, trained: Trained) -> InputError:
    """Why no row can be scored."""
    if not truth.other:
        return InputError(f"the label {truth.label!r} is missing in every row; there is nothing to score.")
    some = quoted(truth.other)
    if trained.about.classes is None:
        return InputError(f"the label {truth.label!r} holds {some}; this model predicts numbers.")
    known = ", ".join(map(repr, trained.classes[:10]))
    return InputError(
        f"no row has a class of the model: the label {truth.label!r} is {some}; it knows {known}."
    )


def _seen(record: Mapping[str, Any]) -> dict[str, str]:
    """The domains of the training, by what they were for; empty where nothing tells."""
    found: dict[str, str] = {}
    try:
        for point in record.get("history") or ():
            scores = point.get("scores") or {}
            found |= dict.fromkeys((scores.get("test") or {}).get("domains") or (), "held out")
            for split in ("train", "validation"):
                found |= dict.fromkeys((scores.get(split) or {}).get("domains") or (), "training")
    except (AttributeError, TypeError) as error:
        raise InputError(f"the record of the training is damaged ({error}).") from error
    return found
