"""What a comparison must beat: the majority class, a linear model and, on tables, gradient boosting.

They get the same splits and as many trials as the algorithms, and are recorded like any run; the number of
rounds of boosting is selected on validation. The linear model of images is one of a few averaged pixels, or
of the features of a frozen backbone; that of text is one of the TF-IDF of its tokens. It is saved as the head
of a network that computes these.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.special import log_softmax
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import nn

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.images import ImageFiles
from shoal.data.text import TextExamples
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.frozen import features_of
from shoal.experiments.record import RunRecord
from shoal.experiments.run import data_of, of_same_run
from shoal.experiments.search import Space
from shoal.models import build
from shoal.models.baseline import FILE, LEAST, BoostedBaseline
from shoal.models.feature_model import FeatureModel
from shoal.settings import Range, check, log2, log10, search_space
from shoal.training.calibration import calibration as calibration_of
from shoal.training.callbacks import Point
from shoal.training.card import about, with_card
from shoal.training.evaluate import Scores, scored
from shoal.training.folder import RunFolder
from shoal.training.metrics import Outcome, choose_metrics, group_means, mean_over_domains
from shoal.training.processes import Processes
from shoal.training.summary import environment, surroundings

Array = NDArray[Any]

MAJORITY, BOOSTING = "majority", "gradient-boosting"
LOGISTIC, RIDGE = "logistic-regression", "ridge-regression"
SUMMARIES = {
    MAJORITY: "A constant prediction: the most frequent class of the training examples, or their mean.",
    LOGISTIC: "A linear model: logistic regression of scikit-learn with an L2 penalty.",
    RIDGE: "A linear model: ridge regression of scikit-learn.",
    BOOSTING: "Decision trees: gradient boosting of LightGBM, number of rounds selected on validation.",
}


@dataclass
class BoostingSettings:
    learning_rate: Annotated[float, Range(above=0, most=1e6, search=log10(-2, -0.5))] = 0.1
    num_leaves: Annotated[int, Range(2, 2**16, search=log2(2, 6))] = 31
    min_child_samples: Annotated[int, Range(1, 2**31 - 1, search=log2(1, 6))] = 20
    reg_lambda: Annotated[float, Range(0, search=log10(-3, 2))] = 0.0


@dataclass
class LogisticSettings:
    C: Annotated[float, Range(above=0, search=log10(-3, 2))] = 1.0


@dataclass
class RidgeSettings:
    alpha: Annotated[float, Range(0, search=log10(-2, 3))] = 1.0


SETTINGS: dict[str, type] = {MAJORITY: object, BOOSTING: BoostingSettings}
SETTINGS |= {LOGISTIC: LogisticSettings, RIDGE: RidgeSettings}
SPACES: dict[str, Space] = {name: search_space(taken) for name, taken in SETTINGS.items()}
TREES, EVALUATED = 200, 20
"""The rounds of boosting, and after how many the model is evaluated. A round is one tree, or one for each
class where there are more than two."""
CARD_FIELDS = ("dataset", "algorithm", "label", "data_options", "settings", "metric", "select")
"""Of a configuration; the rest has no part in a baseline, the seed included."""
KINDS = ("classification", "ordinal", "regression")
"""Tasks for which there are baselines."""
BATCH = 256
"""Texts that are tokenised together."""
ONE_THREAD = 20_000
"""Rows below which several threads cost more than they bring."""


def names(classes: int | None) -> tuple[str, ...]:
    """From the simplest to the most complex."""
    return MAJORITY, RIDGE if classes is None else LOGISTIC, BOOSTING


def possible(data: DomainData, user_data: bool) -> tuple[str, ...]:
    """The baselines of a comparison on these data; ``own``: a file or folder of the user's."""
    if applies(data):
        return names(data.classes)
    text, labels = isinstance(data.examples, TextExamples), data.examples.known_labels()
    one_each = labels is not None and labels.ndim == 1 and data.task.kind in KINDS
    if not (user_data or text) or not one_each:
        return ()
    return names(data.classes)[:2] if text or isinstance(data.examples, ImageFiles) else (MAJORITY,)


def applies(data: DomainData) -> bool:
    """Whether examples are rows of numbers in memory."""
    examples = data.examples
    return len(data.input_shape) == 1 and isinstance(examples, TensorData) and examples.x.is_floating_point()


class Inputs(NamedTuple):
    """What a baseline sees of all examples: a matrix, which may be sparse, and labels."""

    x: Any
    y: Array
    network: FeatureModel | None = None
    """The network whose features ``x`` are, unless these are the examples themselves."""


def inputs_of(config: RunConfig, data: DomainData) -> Inputs:
    """Rows of numbers as they are; features of images and of text."""
    kind, examples = type(data.examples), cast(Any, data.examples)
    if applies(data):
        return Inputs(examples.x.cpu().numpy(), examples.y.cpu().numpy())
    sizes: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "seed": 0}
    if issubclass(kind, TextExamples):
        from sklearn.feature_extraction.text import TfidfTransformer

        x, rows = _term_counts(examples), data.splits["train"].examples()
        transform = TfidfTransformer().fit(x[rows])
        network = build("tfidf-linear", vocabulary=x.shape[1], **sizes)
        network.features.idf.copy_(torch.from_numpy(transform.idf_))  # type: ignore[operator]
        return Inputs(transform.transform(x).astype(np.float32), examples.known_labels(), network)
    if issubclass(kind, ImageFiles):
        frozen = config.model_options.get("frozen")
        name, options = (config.model or data.model, config.model_options) if frozen else ("pixel-linear", {})
        network = build(name, **sizes, **options)
        found = features_of(data, network.eval(), torch.device("cpu"), False)
        return Inputs(found.x.numpy(), found.y.numpy(), network)
    what = "a table, a folder of images or text"
    raise InputError(f"{config.algorithm} requires {what}, and {config.dataset!r} is neither.")


@lru_cache(maxsize=1)
def _term_counts(examples: TextExamples) -> Any:
    """How often each token is in each text, as a sparse matrix."""
    rows, tokens = list[torch.Tensor](), list[torch.Tensor]()
    for start in range(0, len(examples), BATCH):
        found = examples.encode([examples[n][0] for n in range(start, min(start + BATCH, len(examples)))])
        row, place = found["attention_mask"].nonzero(as_tuple=True)
        rows.append(start + row)
        tokens.append(found["input_ids"][row, place])
    places = torch.cat(rows).numpy(), torch.cat(tokens).numpy()
    shape = len(examples), len(examples.loaded)
    return csr_matrix((np.ones(len(places[0]), np.float32), places), shape)


class Linear(NamedTuple):
    """A fitted linear model of all classes, or of a number."""

    weight: Array
    """(classes, width), or (1, width)."""
    bias: Array

    def outputs(self, x: Any, every: int = 0) -> Iterator[Array]:
        """Log-probabilities (n, classes) or numbers (n,)."""
        values = np.asarray(x @ self.weight.T) + self.bias
        yield log_softmax(values, 1) if len(self.bias) > 1 else values[:, 0]

    def network(self, data: DomainData, inputs: Inputs) -> FeatureModel:
        """The network of these coefficients and of what computes the inputs."""
        sizes: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "seed": 0}
        found = inputs.network or build("linear", **sizes)
        head = next(module for module in found.head.modules() if isinstance(module, nn.Linear))
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(self.weight))
            head.bias.copy_(torch.from_numpy(self.bias))
        return found.eval()


def is_one(config: RunConfig) -> bool:
    return config.algorithm in SPACES


def check_baseline(config: RunConfig) -> None:
    """Refuse settings that the baseline does not have."""
    check(SETTINGS[config.algorithm], config.settings, config.algorithm)


def run(config: RunConfig) -> RunRecord:
    """Fit to the training examples and evaluate in every split."""
    data = _data(config)
    if config.algorithm == MAJORITY and not applies(data) and (y := data.examples.known_labels()) is not None:
        return _run(config, data, Inputs(np.zeros((len(y), 1)), y))[0]
    return _run(config, data, inputs_of(config, data))[0]


def train(config: RunConfig, folder: Path) -> RunRecord:
    """Fit, and write what any run leaves in its folder: the model, its preprocessing, its card, the record.

    Where there is validation, the model is then fitted to training and validation examples.
    """
    if (before := of_same_run(folder, config)) is not None:
        return before
    data, processes = _data(config), Processes("cpu")
    inputs = inputs_of(config, data)
    record, model = _run(config, data, inputs)
    lines = [{"phase": "train", **point} for point in record.history]
    calibration = None
    if "validation" in data.splits:
        if config.calibrate and data.classes is not None:
            calibration = _calibration(model, data, inputs, record)
        last, model = _run(config, data, inputs, record.history[record.selected]["step"])
        lines.append({"phase": "retrain", **last.history[0]})
        record = replace(
            record,
            history=(*record.history, last.history[0]),
            selected=len(record.history),
            rule=f"{record.rule}, refitted with the validation data",
            seconds=round(record.seconds + last.seconds, 3),
        )
    written: dict[str, Any] = {"run": config.to_dict(), "options": {}, **surroundings(processes.device)}
    with RunFolder(folder, processes) as run_folder:
        run_folder.write_config(written)
        run_folder.restore()
        for line in lines:
            run_folder.log({**line, "seconds": record.seconds})
        network = model.network(data, inputs) if isinstance(model, Linear) else model
        recipe = getattr(network, "recipe", None)
        content, files = about(data, network, data.task, recipe, calibration)
        if isinstance(network, BoostedBaseline):
            content["model"] = {"name": config.algorithm, "known": network.known}
            files[FILE] = network.content
        weights = network.state_dict()
        plain, shown = record.to_dict(), {**written, "run": {k: written["run"][k] for k in CARD_FIELDS}}
        files = with_card(content, files, data, plain, shown)
        sums = run_folder.finish(weights, plain, lambda: files)
    return replace(record, files=sums)


def _calibration(
    model: Linear | BoostedBaseline, data: DomainData, inputs: Inputs, record: RunRecord
) -> dict[str, Any]:
    """That of the selected model on validation examples, which it was not fitted to."""
    rows = data.splits["validation"].examples()
    outputs = itertools.islice(model.outputs(inputs.x[rows], EVALUATED), record.selected, None)
    return calibration_of(next(outputs), inputs.y[rows])


def _data(config: RunConfig) -> DomainData:
    with warnings.catch_warnings(action="ignore"):  # whoever planned the runs has shown them
        return data_of(config, torch.device("cpu"))


def _run(
    config: RunConfig, data: DomainData, inputs: Inputs, refit: int = 0
) -> tuple[RunRecord, Linear | BoostedBaseline]:
    """The record, and the model after all rounds; ``refit``: so many, with the validation examples."""
    start = time.perf_counter()
    if config.algorithm not in (known := names(data.classes)):
        what = "numbers" if data.classes is None else "classes"
        raise InputError(f"{config.algorithm} does not predict {what}; use {' or '.join(known)}.")
    if config.algorithm == BOOSTING and inputs.network is not None:
        raise InputError(f"{BOOSTING} requires a table, and {config.dataset!r} is none; use {known[1]}.")
    x, y, rows = inputs.x, inputs.y, data.splits["train"].examples()
    if refit:
        rows = np.union1d(rows, data.splits["validation"].examples())
        data = replace(data, splits={k: v for k, v in data.splits.items() if k != "validation"})
    boosted = config.algorithm == BOOSTING
    model = _fit(config, x[rows], y[rows], data.classes, refit or TREES)
    every = refit or (EVALUATED if boosted else 1)
    points, best = list[Point](), 0
    for outputs in model.outputs(x, every):
        scores = _scores(data, config.metric, y, outputs)
        points.append(Point(every * (len(points) + 1), 0, scores["train"].loss or 0.0, scores))
        if "validation" not in scores or scores["validation"].better_than(points[best].scores["validation"]):
            best = len(points) - 1
    versions = {name: metadata.version(name) for name in ("scikit-learn", "lightgbm")}
    record = RunRecord(
        config=config,
        status="finished",
        history=tuple(point.to_dict() for point in points),
        selected=best,
        rule="best on validation" if "validation" in data.splits else "last step",
        seconds=round(time.perf_counter() - start, 3),
        environment=environment(torch.device("cpu")) | versions,
        notes=data.notes,
    )
    return record, model


def _scores(data: DomainData, metric: str | None, y: Array, outputs: Array) -> dict[str, Scores]:
    """Of outputs for all examples, split by split, by the metrics of a training on these data."""
    metrics, selects = choose_metrics(metric, data.metrics, data.task.kind)
    scores = {}
    for split, domains in data.splits.items():
        which = domains.examples()
        truth, output = y[which], outputs[which]
        groups = Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices))
        outcome = Outcome(truth, output, groups, data.task.kind, excluded_groups=data.excluded_groups)
        losses = outcome.points if data.classes is None else -output[np.arange(len(truth)), truth]
        loss = mean_over_domains("loss", group_means(groups, losses))
        outcome = replace(outcome, loss=loss).in_units(*data.label_scale)
        scores[split] = scored(outcome, metrics, selects, by_domain=split == "test")
    return scores


def _fit(config: RunConfig, x: Any, y: Array, classes: int | None, rounds: int) -> Linear | BoostedBaseline:
    from sklearn.linear_model import LogisticRegression, Ridge

    known = np.unique(y).tolist() if classes is not None else []
    settings = check(SETTINGS[config.algorithm], config.settings, config.algorithm)
    weight = np.zeros((classes or 1, x.shape[1]))
    if config.algorithm == MAJORITY or len(known) == 1:  # nothing to tell apart
        if classes is None:
            return Linear(weight, np.array([y.mean(dtype=np.float64)]))
        return Linear(weight, np.log(np.maximum(np.bincount(y, minlength=classes) / len(y), LEAST)))
    codes = np.searchsorted(known, y) if known else y
    try:
        if config.algorithm == BOOSTING:
            text = _boosted(x, codes, len(known), rounds, settings)
            return BoostedBaseline(text, x.shape[1], classes, known)
        model: Any = LogisticRegression(max_iter=1000, **settings) if known else Ridge(**settings)
        with warnings.catch_warnings(action="ignore"), threadpool_limits(1 if len(y) < ONE_THREAD else None):
            model.fit(x, codes)  # solvers warn where they would go on
    except ValueError as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in config.settings.items()) or "defaults"
        raise InputError(f"{config.algorithm} with {shown}: {error}") from error
    if classes is None:
        return Linear(np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_))
    bias = np.full(classes, math.log(LEAST))  # classes without training rows are unlikely
    rows = known if len(known) > 2 else known[1:]  # of two classes the first has the logit 0
    bias[known[0]], weight[rows], bias[rows] = 0.0, model.coef_, model.intercept_
    return Linear(weight, bias)


def _boosted(x: Array, y: Array, known: int, rounds: int, settings: dict[str, Any]) -> bytes:
    """The text of the model that LightGBM fits, the same on every machine."""
    import lightgbm

    options = {"objective": "regression", "verbosity": -1, "deterministic": True, "force_row_wise": True}
    options |= {"objective": "binary"} if known == 2 else {}
    options |= {"objective": "multiclass", "num_class": known} if known > 2 else {}
    options |= {"seed": 0, "num_threads": 1 if len(x) < ONE_THREAD else 0, **settings}
    try:
        model = lightgbm.train(options, lightgbm.Dataset(x, y), rounds)
        return BoostedBaseline.content_of(model.model_to_string())
    except lightgbm.basic.LightGBMError as error:
        raise ValueError(str(error)) from error
