"""From a comparison to a model: its algorithm trained on all domains, and which columns matter to it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pandas
import torch
from numpy.typing import NDArray

from shoal import datasets as sets
from shoal.api.report import report
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
from shoal.files import dump_json, write_atomically
from shoal.trained import RECORD, Calibration, Trained, load
from shoal.training.calibration import EXAMPLES, calibration
from shoal.training.metrics import Metric, Outcome
from shoal.training.metrics import metric as find_metric

if TYPE_CHECKING:
    from shoal.api.compare import Comparison

Array = NDArray[Any]
REPEATS = 5
"""Permutations of each column."""
NOT_RECOMMENDED = {
    "few": "there are fewer than three held-out domains",
    "majority": "none is shown to beat a constant prediction",
}


def refit(found: Comparison, out: str | Path | None, row: str | None) -> Trained:
    """Train a row of a comparison on all domains; see ``Comparison.refit``."""
    config = _selected(found, row)
    whole = _on_all_domains(config)
    folder = None if out is None else Path(out).expanduser()
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
        logits, labels = map(np.concatenate, zip(*map(_outputs_of, _folds(found, config)), strict=True))
        fitted = Calibration.model_validate(calibration(logits, labels, "held-out domains"))
        model.about = model.about.model_copy(update={"calibration": fitted})
        write_atomically(found.folder / "calibration.json", dump_json(fitted.model_dump()))
        report(found.folder)
    return model if folder is None else load(model.save(folder))


def importance(found: Comparison, row: str | None) -> pandas.DataFrame:
    """The importance of every column to a row of a comparison; see ``Comparison.importance``."""
    config, metric = _selected(found, row), find_metric(str(found.result["metric"]))
    values, folds = dict[str, dict[str, Estimate]](), list[str]()
    for fold in _folds(found, config):
        test = fold.data.splits["test"]
        folds += [fold.config.identity] * len(test.names)
        for column, places in _columns(fold.data).items():
            for number, domain in enumerate(test.names):
                worse = _worse(fold, metric, domain, test.indices_of(number), places)
                values.setdefault(column, {})[domain] = worse
    rows = [{"column": column, **_summary(own, folds)} for column, own in values.items()]
    frame = pandas.DataFrame(rows).set_index("column").sort_values("mean", ascending=False)
    content = {"algorithm": config.name, "metric": metric.name, "domains": list(next(iter(values.values())))}
    content["columns"] = json.loads(frame.reset_index().to_json(orient="records"))
    write_atomically(found.folder / "importance.json", dump_json(content))
    report(found.folder)
    return frame


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
    check_names("algorithm of this comparison:", [row], [each["algorithm"] for each in found.result["rows"]])
    selected = selected_trial([r.config for r in found.records], found.result["cases"], row)
    if selected is None or is_control(row):
        raise InputError(f"{row} is a control or has no finished run; choose another algorithm.", "row")
    return selected


def _on_all_domains(config: RunConfig) -> RunConfig:
    """The same run with all domains that were held out, and then with the validation examples.

    A dataset with a test split of its own keeps that.
    """
    whole = _without_fold(config)
    if "held_out" in inspect.signature(sets.registry.module(config.dataset).load).parameters:
        whole = replace(whole, data_options={**whole.data_options, "held_out": []})
    return whole if baselines.is_one(config) else replace(whole, retrain=True)


def _without_fold(config: RunConfig) -> RunConfig:
    return replace(config, data_options={k: v for k, v in config.data_options.items() if k != "held_out"})


class _Fold(NamedTuple):
    """A model that was trained without some domains; these are the test split of its data."""

    config: RunConfig
    model: Trained
    data: DomainData


def _folds(found: Comparison, config: RunConfig) -> Iterator[_Fold]:
    """The model of each fold with these settings, trained again where it is not saved in the comparison."""
    options: dict[str, Any] = {name: found.options[name] for name in ("device", "progress")}
    for fold in (record.config for record in found.records):
        if _without_fold(fold).identity == _without_fold(config).identity:
            place = found.folder / "models" / fold.identity
            if run(fold, folder=place, **options).status == "finished":
                yield _Fold(fold, load(place), data_of(fold, torch.device("cpu")))


def _outputs_of(fold: _Fold) -> tuple[Array, Array]:
    """The outputs of a model on the domains that it was not trained on, and their labels."""
    config, model, data = fold
    if baselines.is_one(config):
        inputs, rows = baselines.inputs_of(config, data), data.splits["test"].examples()
        x = inputs.x[rows] if isinstance(inputs.x, np.ndarray) else inputs.x[rows].toarray()
        return _outputs(getattr(model.model, "head", model.model), torch.from_numpy(x)), inputs.y[rows]
    setup = prepare(config, "cpu", resumed=True).setup
    setup.model.load_state_dict(model.model.state_dict())
    evaluator = setup.evaluator_of(["test"], {"test": EXAMPLES})
    with closing(evaluator.loader):
        found = evaluator.outcomes(setup.model)["test"]
    return found.output, found.y


def _outputs(model: Any, x: torch.Tensor) -> Array:
    with torch.inference_mode():
        return torch.cat([model(part).float() for part in x.split(4096)]).numpy()


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
    _, model, data = fold
    examples = cast(TensorData, data.examples)
    x, y, rng = examples.x[rows], examples.y[rows].numpy(), np.random.default_rng([len(rows), *places])
    order = np.argsort(rng.random((REPEATS, len(rows))), axis=1)
    shuffled = x.repeat(REPEATS, 1)
    shuffled[:, places] = x[order.reshape(-1)][:, places]
    every = [_outputs(model, x), *np.split(_outputs(model, shuffled), REPEATS)]

    def score(output: Array, some: Array) -> float:
        labels, output = y[some], output.reshape(len(rows), -1)[some]
        groups = Domains.from_sizes({domain: len(some)})
        output = output[:, 0] if data.classes is None else output
        return metric(Outcome(labels, output, groups, data.task.kind).in_units(*data.label_scale))

    def worse(some: Array) -> float:
        first, *others = (score(output, some) for output in every)
        return (first - float(np.mean(others))) * (1 if metric.higher else -1)

    entities = None if data.entities is None else data.entities[rows]
    return estimate(worse, codes_of(entities, len(rows)), "number")


def _summary(values: Mapping[str, Estimate], folds: Sequence[str]) -> dict[str, Any]:
    """The importance of a column: its mean over domains with the 95 % interval, and each domain."""
    known = [(e.value, fold) for e, fold in zip(values.values(), folds, strict=True) if e.value is not None]
    clusters = [fold for _, fold in known]
    interval = mean_interval([value for value, _ in known], clusters) if known else None
    enough = interval is not None and len({*clusters}) > 2
    return {
        "mean": interval.mean if interval else math.nan,
        "low": interval.low if interval and enough else math.nan,
        "high": interval.high if interval and enough else math.nan,
        "misleads": [domain for domain, e in values.items() if e.high is not None and e.high < 0],
        **{f"in {domain}": e.value for domain, e in values.items()},
    }
