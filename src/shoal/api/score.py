"""``shoal.score``: how well trained models do on labelled data, per domain, and how the data differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.files import dump_json
from shoal.report.tables import Table, number
from shoal.settings import Count, Range, checked
from shoal.terminal import clean

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.drift import ColumnDrift
    from shoal.experiments.statistics import Estimate
    from shoal.trained import Trained

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


@dataclass(frozen=True, repr=False)
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
        calibration: reliability of the probabilities, in classification.
        uncalibrated: the same without the temperature of the model, if it has one.
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
    calibration: Mapping[str, Any] | None = None
    uncalibrated: Mapping[str, Any] | None = None
    drift: tuple[ColumnDrift, ...] | None = None
    notes: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def worst(self) -> Group | None:
        """The domain with the lowest accuracy, or the highest mean absolute error."""
        name, sign = BY_DOMAIN[self.task][0], 1 if self.task == "classification" else -1
        known = [(sign * v, group) for group in self.domains if (v := group.metrics[name].value) is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "out"}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with each metric and its interval: one row per domain, and one for all rows."""
        import pandas

        rows = []
        for group in (*self.domains, self.overall):
            row: dict[str, Any] = {"domain": group.name, "rows": group.rows, "entities": group.entities}
            row["seen"] = group.seen
            for name, estimate in group.metrics.items():
                row |= {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}
            rows.append(row)
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        metrics = Table(["all rows", "value (95 %)"])
        for name, estimate in self.overall.metrics.items():
            metrics.add(name, _cell(estimate))
        saved = [f"Saved in {self.out}."] if self.out else []
        parts = [self._rows(), metrics.text(), *self._domains(), *self._calibration(), *self._drift()]
        return "\n\n".join([*parts, *map(_filled, (*self.notes, *saved))])

    def _rows(self) -> str:
        """How many rows are scored, and which are not."""
        positive = f"; positive class {self.class_names[1]!r}" if len(self.class_names) == 2 else ""
        scored = f"{self.overall.rows:,} of {self.rows:,} rows of {self.data}"
        lines = [f"{scored} (label {self.label!r}{positive})"]
        if self.group:
            lines.append(f"Intervals are those of {self.overall.entities:,} entities ({self.group!r}).")
        if self.unlabelled:
            lines.append(f"Excluded: {self.unlabelled:,} without a label.")
        if self.unusable:
            some = ", ".join(f"{name!r} ({count:,})" for name, count in list(self.unusable.items())[:3])
            what = "of unknown classes" if self.task == "classification" else "with a label that is no number"
            lines.append(f"Excluded: {sum(self.unusable.values()):,} {what}: {some}.")
        return "\n".join(map(_filled, lines))

    def _domains(self) -> Iterator[str]:
        if not self.domains:
            return
        names, worst = BY_DOMAIN[self.task], self.worst if len(self.domains) > 1 else None
        table = Table(["domain", "rows", "entities", "in training", *(f"{name} (95 %)" for name in names)])
        for group in self.domains[:SHOWN]:
            seen = "yes" if group.seen == "training" else group.seen
            metrics = (_cell(group.metrics[name]) for name in names)
            table.add(group.name, f"{group.rows:,}", f"{group.entities:,}", seen, *metrics)
        more = f", {SHOWN} of {len(self.domains):,}" if len(self.domains) > SHOWN else ""
        yield _filled(f"By domain ({self.domain}{more}){f'; worst: {worst.name}' if worst else ''}")
        yield table.text()

    def _calibration(self) -> Iterator[str]:
        if self.calibration is None:
            return
        error, chance, before = self.calibration["error"], self.calibration["chance"], ""
        what = "the predicted class" if len(self.class_names) != 2 else repr(self.class_names[1])
        result = "more than sampling explains" if error > chance else "no significant miscalibration"
        if self.uncalibrated:
            before = f", {self.uncalibrated['error']:.3f} without the temperature of the model"
        yield _filled(
            f"Calibration of the probability of {what}: expected calibration error {error:.3f} (below "
            f"{chance:.3f} for 95 % of perfectly calibrated models with as many rows{before}): {result}."
        )

    def _drift(self) -> Iterator[str]:
        if not self.drift:
            return
        flagged = sum(bool(one.flags) for one in self.drift)
        count = f"{flagged or 'none'} of {len(self.drift)} columns differ{'s' * (flagged < 2)}"
        yield f"Drift: {count} from training by more than sampling explains."
        table = Table(["column", "kind", "distance", "p", "difference"])
        for one in [one for one in self.drift if one.words()][:SHOWN]:
            numbers = ("–" if value is None else f"{value:.3f}" for value in (one.distance, one.p))
            table.add(one.column, one.kind, *numbers, one.words())
        if table.rows:
            yield table.text()


@dataclass(frozen=True, repr=False)
class PairedScores(Result):
    """The result of :func:`score` for several models; ``print`` shows it.

    Attributes:
        scores: score of each model.
        differences: for each other model, its differences to the first by metric, on the same rows: of ``all
            rows``, of each domain, and their ``mean over domains`` (with at least three); each with the 95 %
            interval.
    """

    scores: tuple[Score, ...]
    differences: Mapping[str, Mapping[str, Mapping[str, Estimate]]]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"scores": [one.to_dict() for one in self.scores]}

    def to_frame(self) -> pandas.DataFrame:
        """Return the DataFrames of all scores, with the column ``model``."""
        import pandas

        return pandas.concat([one.to_frame().assign(model=one.model) for one in self.scores])

    def __str__(self) -> str:
        first = self.scores[0]
        table = Table(["all rows (95 %)", *(one.model for one in self.scores)])
        for metric in first.overall.metrics:
            table.add(metric, *(_cell(one.overall.metrics[metric]) for one in self.scores))
        parts = [first._rows(), table.text()]
        for name, groups in self.differences.items():
            parts.append(_filled(f"Difference {name} − {first.model}, on the same rows (95 %):"))
            table = Table(["", *groups["all rows"]])
            for group, metrics in list(groups.items())[: SHOWN + 2]:
                table.add(group, *(_cell(estimate, "+") for estimate in metrics.values()))
            parts.append(table.text())
        for domain in first.domains:
            pairs = ((one.model, d.seen) for one in self.scores for d in one.domains if d.name == domain.name)
            trained = [model for model, seen in pairs if seen == "training"]
            if 0 < len(trained) < len(self.scores):
                which = f"{domain.name} is a training domain of {', '.join(trained)} only"
                parts.append(_filled(f"{which}: no fair comparison."))
        return "\n\n".join([*parts, *map(_filled, first.notes)])


def _filled(line: str) -> str:
    return textwrap.fill(clean(line), 100, break_long_words=False, break_on_hyphens=False)


def _cell(estimate: Estimate, sign: str = "") -> str:
    if estimate.value is None:
        return f"undefined: {estimate.undefined}" if estimate.undefined else "–"
    value, *ends = (
        None if v is None else number(v, None, sign) for v in (estimate.value, estimate.low, estimate.high)
    )
    return str(value) if None in ends else f"{value} ({ends[0]} to {ends[1]})"


@overload
def score(model: str | Path | Trained, data: Any, **options: Any) -> Score: ...
@overload
def score(model: list[Any] | tuple[Any, ...], data: Any, **options: Any) -> PairedScores: ...
@checked  # type: ignore[misc]
def score(
    model: Any | Sequence[Any],
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
) -> Score | PairedScores:
    """Score trained models on labelled data, per domain and overall, with 95 % confidence intervals. ::

        result = shoal.score("runs/fish", "labelled.csv")
        print(result)
        result.overall.metrics["AUC"].low
        print(shoal.score(["runs/erm", "runs/fish"], "labelled.csv"))

    Rows without a label, and rows of classes that are unknown to the model, are counted and excluded.
    Confidence intervals account for the sampling of rows, or of entities with a group column, within the same
    domains. A column is reported as drifted if its distribution differs from training by more than sampling
    explains. Of several models, the differences to the first are paired by row.

    Args:
        model: run folder, or several for models of the same task. In Python also a model from
            :func:`shoal.load`, or a list.
        data: table (.csv, .parquet …), or folder of images arranged as domain/class/image or class/image. In
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
    from shoal.api import scoring
    from shoal.trained import as_trained

    several = isinstance(model, list | tuple)
    models = [as_trained(each, device) for each in (model if several else [model])]
    if not models:
        raise InputError("must not be empty.", "model")
    path = None
    if out is not None:
        path = output_file(out if str(out).lower().endswith(".json") else Path(out) / "score.json", data)
    roles = {"label": label, "domain": domain, "group": group}
    scored = [scoring.scored(each, data, roles, column, batch_size, workers) for each in models]
    result: Score | PairedScores = scored[0].score
    if several:
        result = PairedScores(tuple(each.score for each in scored), scoring.differences(scored))
    if path is not None:
        write_output(path, dump_json(result.to_dict()))
    return replace(result, out=path) if isinstance(result, Score) else result
