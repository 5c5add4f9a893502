"""``shoal.score``: how well trained models do on labelled data, per domain, and how the data differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.files import dump_json
from shoal.report.tables import Table
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
        unusable: labels that are unknown classes or no numbers, with their counts.
        calibration: reliability of the probabilities, in classification.
        uncalibrated: the same without the temperature of the model, if it has one.
        drift: drift of each column, flagged columns first; ``None`` where training columns are not known.
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

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "out"}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with each metric and its interval: one row per domain, and one for all rows."""
        import pandas

        rows = []
        for group in (*self.domains, self.overall):
            row = {"domain": group.name, "rows": group.rows, "entities": group.entities, "seen": group.seen}
            for name, estimate in group.metrics.items():
                row |= {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}
            rows.append(row)
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        metrics = Table(["all rows", "value (95 %)"])
        for name, estimate in self.overall.metrics.items():
            metrics.add(name, _cell(estimate))
        parts, names = [self.scored(), metrics.text()], BY_DOMAIN[self.task]
        if self.domains:
            table = Table([f"domain ({self.domain})", "rows", "entities", "seen", *names])
            for group in self.domains[:SHOWN]:
                cells = (_cell(group.metrics[name]) for name in names)
                table.add(group.name, f"{group.rows:,}", f"{group.entities:,}", group.seen, *cells)
            parts.append(table.text())
        if self.calibration is not None:
            error, chance = self.calibration["error"], self.calibration["chance"]
            text = f"Expected calibration error {error:.3f}, by chance below {chance:.3f}"
            if self.uncalibrated:
                text += f"; {self.uncalibrated['error']:.3f} without the temperature of the model"
            parts.append(f"{text}.")
        if self.drift:
            flagged = sum(bool(one.flags) for one in self.drift)
            parts.append(f"{flagged} of {len(self.drift)} columns differ from training beyond sampling.")
            table = Table(["column", "kind", "difference"])
            for one in [one for one in self.drift if one.words()][:SHOWN]:
                table.add(one.column, one.kind, one.words())
            parts += [table.text()] if table.rows else []
        saved = [f"Saved in {self.out}."] if self.out else []
        return "\n\n".join([*parts, *map(clean, self.notes), *saved])

    def scored(self) -> str:
        """How many rows are scored, and which are not, as text."""
        text = f"{self.overall.rows:,} of {self.rows:,} rows of {self.data} (label {self.label!r})"
        if len(self.class_names) == 2:
            text += f"; positive class {self.class_names[1]!r}"
        if self.group:
            text += f"; {self.overall.entities:,} entities ({self.group!r})"
        if self.unlabelled:
            text += f"; {self.unlabelled:,} without a label"
        if self.unusable:
            some = ", ".join(f"{name!r} ({count:,})" for name, count in list(self.unusable.items())[:3])
            text += f"; {sum(self.unusable.values()):,} excluded for their labels: {some}"
        return clean(text)


@dataclass(frozen=True)
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
        seen = Table(["seen", *(one.model for one in self.scores)])
        roles = [{group.name: group.seen for group in one.domains} for one in self.scores]
        for name in roles[0]:
            seen.add(name, *(each.get(name, "") for each in roles))
        parts = [first.scored(), table.text(), *([seen.text()] if seen.rows else [])]
        for name, found in self.differences.items():
            table = Table([f"{name} − {first.model}", *found["all rows"]])
            for group, metrics in list(found.items())[: SHOWN + 2]:
                table.add(group, *(_cell(estimate, "+") for estimate in metrics.values()))
            parts.append(table.text())
        return "\n\n".join(parts)


def _number(value: float, sign: str) -> str:
    return f"{value:{sign}.3f}" if abs(value) < 10 else f"{value:{sign}.5g}"


def _cell(estimate: Estimate, sign: str = "") -> str:
    if estimate.value is None:
        return f"undefined: {estimate.undefined}" if estimate.undefined else "–"
    text = _number(estimate.value, sign)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({_number(estimate.low, sign)} to {_number(estimate.high, sign)})"


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
        model: run folder, or several for models of the same task; in Python also from :func:`shoal.load`.
        data: table (.csv, .parquet …, DataFrame or mapping of columns), or folder of images arranged as
            domain/class/image or class/image.
        label: column to predict (default: as in training).
        domain: column with the domain of each row (default: as in training).
        group: column that identifies the entity of each row, such as a patient (default: as in training).
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
