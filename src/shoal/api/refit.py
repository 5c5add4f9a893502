"""From a comparison to a model: its algorithm trained on all domains, and which columns matter to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import datasets as sets
from shoal.api.result import Result, write_files
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.tables import Encoder
from shoal.errors import InputError, check_names
from shoal.experiments import baselines
from shoal.experiments.compare import is_control, selected_trial
from shoal.experiments.config import RunConfig
from shoal.experiments.record import read_record
from shoal.experiments.run import data_of, prepare, run
from shoal.experiments.statistics import Estimate, codes_of, estimate, mean_interval
from shoal.files import dump_json
from shoal.report.model import table
from shoal.trained import RECORD, Calibration, Trained, load
from shoal.training.calibration import EXAMPLES, calibration
from shoal.training.metrics import Metric, Outcome
from shoal.training.metrics import metric as find_metric

if TYPE_CHECKING:
    import pandas

    from shoal.api.compare import Comparison

Array = NDArray[Any]
REPEATS = 5
"""Permutations of each column."""
NOT_RECOMMENDED = {
    "few": "there are fewer than three held-out domains",
    "majority": "none is shown to beat a constant prediction",
}


@dataclass(frozen=True)
class Importance(Result):
    """Which columns matter to an algorithm on held-out domains; returned by ``Comparison.importance``.

    A column is shuffled within a held-out domain, and its importance there is how much worse the score of
    the model becomes that was trained on the other domains. It is negative where the column misleads: the
    score is better without its information. Columns that carry the same information share it.

    Attributes:
        algorithm: algorithm that was trained.
        metric: metric of the score.
        columns: for each column, the most important first: its name ``column``, ``mean`` over domains with
            the 95 % interval ``low`` to ``high`` (``None`` with fewer than three folds), ``domains`` with the
            same for each, and the names of the domains in which it ``misleads``.
    """

    algorithm: str
    metric: str
    columns: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per column: mean, interval and each domain."""
        import pandas

        rows = [
            {name: each[name] for name in ("column", "mean", "low", "high")}
            | {name: about["value"] for name, about in each["domains"].items()}
            for each in self.columns
        ]
        return pandas.DataFrame(rows).set_index("column")

    def __str__(self) -> str:
        return f"{table(self.to_dict()).text()}\n\n{self._note()}"

    def _repr_html_(self) -> str:
        return f"{table(self.to_dict()).html()}<p>{self._note()}</p>"

    def _note(self) -> str:
        return (
            f"Importance for {self.algorithm}: how much worse {self.metric} becomes on a held-out domain if "
            "the column is shuffled there."
        )


class _Fold(NamedTuple):
    """A model that was trained without some domains, and its outputs on these."""

    config: RunConfig
    model: Trained
    data: DomainData
    rows: Array
    """The numbers of the held-out examples."""
    outputs: Array
    labels: Array


def refit(found: Comparison, out: str | Path | None = None, row: str | None = None) -> Trained:
    """Train a row of a comparison on all domains; see ``Comparison.refit``."""
    config = _selected(found, row)
    folder = None if out is None else Path(out).expanduser()
    whole = _on_all_domains(config)
    if folder is not None and (folder / RECORD).exists():
        if read_record(folder / RECORD).config.identity != whole.identity:
            raise InputError(f"{str(folder)!r} contains another model; choose another folder.", "fit")
        return load(folder)
    place = found.folder / "models" / whole.identity
    record = run(whole, found.options["device"], place, progress=found.options["progress"])
    if record.status != "finished":
        raise InputError(f"{config.name} could not be trained on all domains: {record.error}")
    model = load(place)
    if config.calibrate and model.about.task in ("classification", "ordinal"):
        folds = list(_folds(found, config))
        logits, labels = (np.concatenate([getattr(f, n) for f in folds]) for n in ("outputs", "labels"))
        fitted = Calibration.model_validate(calibration(logits, labels, "held-out domains"))
        model.about = model.about.model_copy(update={"calibration": fitted})
        write_files(found.folder, {"calibration.json": dump_json(fitted.model_dump())})
    return model if folder is None else load(model.save(folder))


def importance(found: Comparison, row: str | None = None) -> Importance:
    """The importance of every column to a row of a comparison; see ``Comparison.importance``."""
    config = _selected(found, row)
    metric, domains = find_metric(str(found.result["metric"])), dict[str, dict[str, Estimate]]()
    of_fold: list[str] = []
    for fold in _folds(found, config):
        columns = _columns(fold.data)
        test = fold.data.splits["test"]
        for number, name in enumerate(test.names):
            rows = test.indices_of(number)
            domains[name] = {n: _worse(fold, metric, name, rows, places) for n, places in columns.items()}
            of_fold.append(fold.config.identity)
    names = list(next(iter(domains.values())))
    found_columns = [_column(name, {d: of[name] for d, of in domains.items()}, of_fold) for name in names]
    return Importance(
        config.name, metric.name, tuple(sorted(found_columns, key=lambda each: -(each["mean"] or 0.0)))
    )


def _selected(found: Comparison, row: str | None) -> RunConfig:
    """The selected trial of a row, by default of the recommended one."""
    if row is None:
        if (about := found.recommendation) is None:
            raise InputError("no algorithm is recommended, as runs are missing; the same call repeats them.")
        if (row := about.row) is None:
            why = NOT_RECOMMENDED[about.state]
            raise InputError(
                f"no algorithm is recommended, as {why}. To train one all the same, name it: "
                f"comparison.refit(row={about.nearest!r}), or `shoal train {about.nearest}`."
            )
    names = [each["algorithm"] for each in found.result["rows"]]
    check_names("algorithm of this comparison:", [row], names)
    selected = selected_trial([r.config for r in found.records], found.result["cases"], row)
    if selected is None or is_control(row):
        raise InputError(f"{row} is a control or has no finished run; choose another algorithm.", "row")
    return selected


def _on_all_domains(config: RunConfig) -> RunConfig:
    """The same run with all domains that were held out, and then with the validation examples.

    A dataset with a test split of its own keeps that.
    """
    config = _without_fold(config)
    options = dict(config.data_options)
    if "held_out" in inspect.signature(sets.registry.module(config.dataset).load).parameters:
        options["held_out"] = []
    changes: dict[str, Any] = {} if baselines.is_one(config) else {"retrain": True}
    return replace(config, data_options=options, **changes)


def _folds(found: Comparison, config: RunConfig) -> Iterator[_Fold]:
    """The model of each fold with these settings, trained again where it is not saved in the comparison."""
    options: dict[str, Any] = {name: found.options[name] for name in ("device", "progress")}
    for fold in (record.config for record in found.records):
        if _without_fold(fold).identity == _without_fold(config).identity:
            place = found.folder / "models" / fold.identity
            if run(fold, folder=place, **options).status == "finished":
                yield _evaluated(fold, place)


def _without_fold(config: RunConfig) -> RunConfig:
    return replace(config, data_options={k: v for k, v in config.data_options.items() if k != "held_out"})


def _evaluated(config: RunConfig, folder: Path) -> _Fold:
    """The model in a folder, and its outputs on the domains that it was not trained on."""
    model, device = load(folder), "cpu"
    data = data_of(config, torch.device(device))
    rows, examples = data.splits["test"].examples(), cast(Any, data.examples)
    if baselines.is_one(config) and not isinstance(examples, TensorData):
        x, y, _ = baselines.inputs_of(config, data)
        features = torch.from_numpy(x[rows] if isinstance(x, np.ndarray) else x[rows].toarray())
        return _Fold(config, model, data, rows, _outputs(model.model.head, features), y[rows])
    if isinstance(examples, TensorData):
        return _Fold(config, model, data, rows, _outputs(model, examples.x[rows]), examples.y[rows].numpy())
    setup = prepare(config, device, resumed=True).setup
    setup.model.load_state_dict(model.model.state_dict())
    evaluator = setup.evaluator_of(["test"], {"test": EXAMPLES})
    with closing(evaluator.loader):
        found = evaluator.rows(setup.model, ["output", "y"])["test"]
    return _Fold(config, model, setup.data, evaluator.which["test"], found["output"], found["y"])


def _outputs(model: Any, x: torch.Tensor) -> Array:
    with torch.inference_mode():
        parts = [model(part).float() for part in x.split(4096)]
    return torch.cat(parts).numpy()


def _columns(data: DomainData) -> dict[str, list[int]]:
    """The features that each column of a table has become."""
    if data.inputs.get("kind") != "table" or not isinstance(data.examples, TensorData):
        raise InputError("importance is that of the columns of a table, and these data are not a table.")
    columns, start = dict[str, list[int]](), 0
    for step in Encoder.from_dict(data.inputs).steps:
        columns[step.name] = list(range(start, start + step.width))
        start += step.width
    return columns


def _worse(fold: _Fold, metric: Metric, domain: str, rows: Array, places: Sequence[int]) -> Estimate:
    """By how much a metric becomes worse on a domain where some features are shuffled, together."""
    examples: Any = fold.data.examples
    rng = np.random.default_rng([len(rows), *places])
    x, order = examples.x[rows], np.argsort(rng.random((REPEATS, len(rows))), axis=1)
    shuffled = x.repeat(REPEATS, 1)
    shuffled[:, places] = x[order.reshape(-1)][:, places]
    outputs = [_outputs(fold.model, x), *_outputs(fold.model, shuffled).reshape(REPEATS, len(rows), -1)]
    y = examples.y[rows].numpy()
    score = partial(_score, metric, fold.data, domain)
    sign = 1 if metric.higher else -1

    def worse(some: Array) -> float:
        first, *others = (score(y[some], output.reshape(len(rows), -1)[some]) for output in outputs)
        return sign * (first - float(np.mean(others)))

    entities = None if fold.data.entities is None else fold.data.entities[rows]
    return estimate(worse, codes_of(entities, len(rows)), "number")


def _score(metric: Metric, data: DomainData, domain: str, y: Array, output: Array) -> float:
    """A metric of outputs for examples of one domain."""
    predicted, groups = output.argmax(1), Domains.from_sizes({domain: len(y)})
    if data.classes is None:
        output = output.reshape(-1)
        outcome = Outcome(y, groups, np.square(output.astype(float) - y), output=output)
        return metric(outcome.in_units(*data.label_scale))
    return metric(Outcome(y, groups, (predicted == y).astype(float), predicted, output))


def _column(name: str, domains: Mapping[str, Estimate], folds: Sequence[str]) -> dict[str, Any]:
    known = {d: (e.value, f) for (d, e), f in zip(domains.items(), folds, strict=True) if e.value is not None}
    values, clusters = [value for value, _ in known.values()], [fold for _, fold in known.values()]
    interval = mean_interval(values, clusters) if known else None
    enough = len({*clusters}) > 2
    return {
        "column": name,
        "mean": interval and interval.mean,
        "low": interval.low if interval and enough else None,
        "high": interval.high if interval and enough else None,
        "domains": {d: {"value": e.value, "low": e.low, "high": e.high} for d, e in domains.items()},
        "misleads": [d for d, e in domains.items() if e.high is not None and e.high < 0],
    }
