"""From a comparison to a model: its algorithm trained on all domains, and which columns matter to it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from shoal.experiments.run import data_of, run
from shoal.experiments.statistics import Estimate, codes_of, estimate, mean_interval
from shoal.files import dump_json, write_atomically
from shoal.trained import RECORD, Calibration, Trained, load
from shoal.training.calibration import EXAMPLES, calibration
from shoal.training.metrics import Outcome
from shoal.training.metrics import metric as find_metric
from shoal.training.options import complete
from shoal.training.setup import Setup

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
    """Train a row of a comparison on all domains, and then on the validation examples too.

    A dataset with a test split of its own keeps that.
    """
    config = _selected(found, row)
    whole = _without_fold(config)
    if "held_out" in inspect.signature(sets.registry.module(config.dataset).load).parameters:
        whole = replace(whole, data_options={**whole.data_options, "held_out": []})
    whole = whole if baselines.is_one(config) else replace(whole, retrain=True)
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
        pairs = [_outputs_and_labels(fold, data) for _, fold, data in _folds(found, config)]
        logits, labels = map(np.concatenate, zip(*pairs, strict=True))
        fitted = Calibration.model_validate(calibration(logits, labels, "held-out domains"))
        model.about = model.about.model_copy(update={"calibration": fitted})
        write_atomically(found.folder / "calibration.json", dump_json(fitted.model_dump()))
        report(found.folder)
    return model if folder is None else load(model.save(folder))


def importance(found: Comparison, row: str | None) -> pandas.DataFrame:
    """The importance of every column to a row of a comparison; see ``Comparison.importance``."""
    config, metric = _selected(found, row), str(found.result["metric"])
    values, folds = dict[str, dict[str, Estimate]](), list[str]()
    for identity, model, data in _folds(found, config):
        if data.inputs.get("kind") != "table" or not isinstance(data.examples, TensorData):
            raise InputError("importance is that of the columns of a table, and these data are not a table.")
        test, start = data.splits["test"], 0
        folds += [identity] * len(test.names)
        for step in Encoder.from_dict(data.inputs).steps:
            places, start = slice(start, start + step.width), start + step.width
            for number, domain in enumerate(test.names):
                worse = _worse(model, data, metric, test.indices_of(number), places)
                values.setdefault(step.name, {})[domain] = worse
    rows = []
    for column, own in values.items():
        known = [(e.value, fold) for e, fold in zip(own.values(), folds, strict=True) if e.value is not None]
        clusters = [fold for _, fold in known]
        interval = mean_interval([value for value, _ in known], clusters) if known else None
        enough = len({*clusters}) > 2
        cells: dict[str, Any] = {"column": column, "mean": interval.mean if interval else np.nan}
        cells |= {end: getattr(interval, end) if enough else np.nan for end in ("low", "high")}
        cells["misleads"] = [domain for domain, e in own.items() if e.high is not None and e.high < 0]
        rows.append(cells | {f"in {domain}": e.value for domain, e in own.items()})
    frame = pandas.DataFrame(rows).set_index("column").sort_values("mean", ascending=False)
    content = {"algorithm": config.name, "metric": metric, "domains": list(next(iter(values.values())))}
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
            raise InputError(
                f"no algorithm is recommended, as {NOT_RECOMMENDED[about.state]}. To train one all the same, "
                f"name it: comparison.refit(row={about.nearest!r}), or `shoal train {about.nearest}`."
            )
    check_names("algorithm of this comparison:", [row], [each["algorithm"] for each in found.result["rows"]])
    selected = selected_trial([r.config for r in found.records], found.result["cases"], row)
    if selected is None or is_control(row):
        raise InputError(f"{row} is a control or has no finished run; choose another algorithm.", "row")
    return selected


def _without_fold(config: RunConfig) -> RunConfig:
    return replace(config, data_options={k: v for k, v in config.data_options.items() if k != "held_out"})


def _folds(found: Comparison, config: RunConfig) -> Iterator[tuple[str, Trained, DomainData]]:
    """For each fold its identity, the model with these settings, and data whose test split it has not seen;
    models that are not saved in the comparison are trained again."""
    options: dict[str, Any] = {name: found.options[name] for name in ("device", "progress")}
    for fold in (record.config for record in found.records):
        if _without_fold(fold).identity == _without_fold(config).identity:
            place = found.folder / "models" / fold.identity
            if run(fold, folder=place, **options).status == "finished":
                yield fold.identity, load(place), data_of(fold, torch.device("cpu"))


def _outputs_and_labels(model: Trained, data: DomainData) -> tuple[Array, Array]:
    """Of the test split."""
    rows, examples = data.splits["test"].examples(), data.examples
    if isinstance(examples, TensorData):
        return _outputs(model, examples.x[rows]), examples.y[rows].numpy()
    setup = Setup("erm", model.model, data, complete(steps=1, device="cpu", select="last", progress=False))
    evaluator = setup.evaluator_of(["test"], {"test": EXAMPLES})
    with closing(evaluator.loader):
        found = evaluator.outcomes(setup.model)["test"]
    return found.output, found.y


def _outputs(model: Trained, x: torch.Tensor) -> Array:
    with torch.inference_mode():
        return torch.cat([model(part).float() for part in x.split(4096)]).numpy()


def _worse(model: Trained, data: DomainData, name: str, rows: Array, places: slice) -> Estimate:
    """By how much a metric becomes worse on some rows where the features of a column are shuffled."""
    examples, metric = cast(TensorData, data.examples), find_metric(name)
    x, y, rng = examples.x[rows], examples.y[rows].numpy(), np.random.default_rng([len(rows), places.start])
    shuffled = x.repeat(REPEATS, 1)
    order = np.argsort(rng.random((REPEATS, len(rows))), axis=1).reshape(-1)
    shuffled[:, places] = x[order][:, places]
    every = [_outputs(model, x), *np.split(_outputs(model, shuffled), REPEATS)]

    def score(output: Array, some: Array) -> float:
        groups = Domains.from_sizes({"all": len(some)})
        output = output.reshape(len(rows), -1)[some]
        output = output[:, 0] if data.classes is None else output
        return metric(Outcome(y[some], output, groups, data.task.kind).in_units(*data.label_scale))

    def worse(some: Array) -> float:
        first, *others = (score(output, some) for output in every)
        return (first - float(np.mean(others))) * (1 if metric.higher else -1)

    entities = None if data.entities is None else data.entities[rows]
    return estimate(worse, codes_of(entities, len(rows)), "number")
