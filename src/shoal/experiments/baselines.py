"""What a comparison on flat features must beat: the majority class, a linear model and gradient boosting.

They get the same splits as the algorithms, learn from training examples alone, try as many settings, and are
recorded like any run. Boosting is looked at along the way, as a training is, and keeps the number of trees
that is best on validation. scikit-learn fits them; what was fitted becomes a plain network with its numbers
in safetensors, which is loaded, used and exported as any other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.batch import DomainData, TensorData, known_labels
from shoal.data.domains import Domains
from shoal.data.folders import VARIABLE
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import _loaded, of_same_run
from shoal.experiments.search import Space
from shoal.models import FeatureModel, build
from shoal.settings import Range, check, log2, log10, search_space
from shoal.training.card import files_beside
from shoal.training.evaluate import Scores, scored
from shoal.training.history import Point
from shoal.training.journal import Journal
from shoal.training.metrics import Outcome, chosen
from shoal.training.processes import Processes
from shoal.training.summary import about, environment, surroundings

Array = NDArray[Any]

MAJORITY, BOOSTING = "majority", "gradient-boosting"
LOGISTIC, RIDGE = "logistic-regression", "ridge-regression"
CONTROLS = (MAJORITY,)
"""What shows whether there is anything to learn; never a recommendation."""
SUMMARIES = {
    MAJORITY: "A constant prediction: the most frequent class of the training examples, or their mean.",
    LOGISTIC: "A linear model: logistic regression of scikit-learn with an L2 penalty.",
    RIDGE: "A linear model: ridge regression of scikit-learn.",
    BOOSTING: "Decision trees: gradient boosting of scikit-learn, tree count selected on validation.",
}


@dataclass
class BoostingSettings:
    learning_rate: Annotated[float, Range(above=0, most=1e6, search=log10(-2, -0.5))] = 0.1
    max_leaf_nodes: Annotated[int, Range(2, 2**16, search=log2(2, 6))] = 31
    min_samples_leaf: Annotated[int, Range(1, 2**31, search=log2(1, 6))] = 20
    l2_regularization: Annotated[float, Range(0, search=log10(-3, 2))] = 0.0


@dataclass
class LogisticSettings:
    C: Annotated[float, Range(above=0, search=log10(-3, 2))] = 1.0


@dataclass
class RidgeSettings:
    alpha: Annotated[float, Range(0, search=log10(-2, 3))] = 1.0


SETTINGS: dict[str, type] = {MAJORITY: object, BOOSTING: BoostingSettings}
SETTINGS |= {LOGISTIC: LogisticSettings, RIDGE: RidgeSettings}
SPACES: dict[str, Space] = {name: search_space(taken) for name, taken in SETTINGS.items()}
TREES, LOOK = 200, 20
"""The most rounds of boosting, and after how many the model is evaluated. A round is one tree, or
one for each class where there are more than two."""
BINS = 2**15
"""Of the histograms of all features together: 255 each up to 128 features, 31 at the least."""
FEWEST = 40
"""Rounds of even the largest table: with fewer it would be no baseline."""
WORK = 5_000_000_000
"""What a fit may take, in nanoseconds of one core, as :func:`_work` counts them; from 20,000 rows on it grows
with them, for then there are several threads."""
SECONDS = 60.0
"""The last resort, for a machine or a table on which that takes much longer."""
ON_CARD = ("dataset", "algorithm", "label", "data_options", "settings", "metric", "select")
"""Of a configuration; the rest has no part in a baseline, the seed included."""
ONE_THREAD = 20_000
LEAST = 1e-12  # a probability of less counts as this


def names(classes: int | None) -> tuple[str, ...]:
    """From the simplest to the most complex."""
    return MAJORITY, RIDGE if classes is None else LOGISTIC, BOOSTING


def applies(data: DomainData) -> bool:
    """Whether examples are rows of numbers in memory."""
    examples = data.examples
    return len(data.input_shape) == 1 and isinstance(examples, TensorData) and examples.x.is_floating_point()


def labels_alone(data: DomainData) -> DomainData | None:
    """The same examples without inputs, for a constant prediction; ``None`` where labels are not known."""
    labels = known_labels(data.examples)
    if labels is None or labels.ndim != 1 or data.task.kind not in ("classification", "regression"):
        return None
    y = torch.from_numpy(labels)
    return replace(data, examples=TensorData(torch.zeros(len(y), 1), y), input_shape=(1,))


def lacking() -> str:
    """Why there can be none, if so."""
    gone = importlib.util.find_spec("sklearn") is None
    return "requires scikit-learn: pip install 'shoal[sklearn]'" if gone else ""


def is_one(config: RunConfig) -> bool:
    return config.algorithm in SPACES


def run(config: RunConfig) -> RunRecord:
    """Fits to the training examples and judges in every split."""
    return _run(config, config.algorithm == MAJORITY)[0]


def train(config: RunConfig, folder: Path) -> RunRecord:
    """Fits and writes what any run leaves in its folder: the model, how to feed it, its card, the record."""
    if (before := of_same_run(folder, config)) is not None:
        return before
    record, network = _run(config)
    data, processes = _data(config), Processes("cpu")
    written: dict[str, Any] = {"run": config.to_dict(), "how": {}, **surroundings(processes.device)}
    with Journal(folder, processes, config=written) as journal:
        journal.begin(written)
        journal.restore()
        for point in record.history:
            line = {"phase": "train", "step": point["step"], "scores": point["scores"]}
            journal.line({**line, "seconds": record.seconds})
        shape = list(data.input_shape)
        content, files = about(data, network, network.recipe, data.classes, shape, "float32")
        kept, shown = record.to_dict(), {**written, "run": {k: written["run"][k] for k in ON_CARD}}
        sums = journal.finish(
            network.state_dict(), kept, lambda: files_beside(content, files, data, kept, shown)
        )
    return replace(record, files=sums)


def check_baseline(config: RunConfig) -> None:
    """Refuses settings that the baseline does not have."""
    check(SETTINGS[config.algorithm], config.settings, config.algorithm)
    if config.algorithm != MAJORITY and (why := lacking()):
        raise InputError(f"{config.algorithm} {why}.")


def _run(config: RunConfig, constant: bool = False) -> tuple[RunRecord, FeatureModel]:
    """The record, and the network that is best on validation; one that is ``constant`` needs no inputs."""
    check_baseline(config)
    began = time.perf_counter()
    data = _data(config)
    if constant and not applies(data):
        data = labels_alone(data) or data
    if not applies(data):
        raise InputError(f"{config.algorithm} requires tabular data, and {config.dataset!r} is not tabular.")
    if config.algorithm not in (fit_for := names(data.classes)):
        what = "numbers" if data.classes is None else "classes"
        raise InputError(f"{config.algorithm} does not predict {what}; use {' or '.join(fit_for)}.")
    examples: Any = data.examples
    x, y, train = examples.x.cpu().numpy(), examples.y.cpu().numpy(), data.splits["train"].examples()
    fitted = _fit(config, x[train], y[train], data.classes)
    points = []
    for step, outputs in fitted.outputs(x):
        scores = _scores(data, config.metric, outputs)
        points.append(Point(step, 0, scores["train"].loss or 0.0, scores))
    best = 0 if "validation" in data.splits else len(points) - 1
    for number, point in enumerate(points[best:]):
        if point.scores["validation"].better_than(points[best].scores["validation"]):
            best = number
    versions = {} if lacking() else {"scikit-learn": metadata.version("scikit-learn")}
    record = RunRecord(
        config=config,
        status="finished",
        history=tuple(point.to_dict() for point in points),
        selected=best,
        rule="best on validation" if "validation" in data.splits else "last step",
        seconds=round(time.perf_counter() - began, 3),
        environment=environment(torch.device("cpu")) | versions,
        notes={**data.notes, **({"boosting": fitted.note} if fitted.note else {})},
    )
    return record, fitted.network(points[best].step)


def _data(config: RunConfig) -> DomainData:
    options = json.dumps(dict(config.data_options), sort_keys=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever planned the runs has said them
        root = os.environ.get(VARIABLE)
        return _loaded(config.dataset, options, config.holdout, torch.device("cpu"), root)


def _scores(data: DomainData, metric: str | None, outputs: Array) -> dict[str, Scores]:
    """Of outputs for all examples, split by split, by the metrics of a training on these data."""
    classification, examples = data.classes is not None, data.examples
    metrics, selects = chosen(metric, data.measures, data.task.kind)
    y = examples.y.cpu().numpy()  # type: ignore[attr-defined]
    scores = {}
    for split, domains in data.splits.items():
        which = domains.examples()
        truth, output = y[which], outputs[which]
        predicted = output.argmax(1) if classification else None
        points = np.square(output.astype(np.float64) - truth) if predicted is None else predicted == truth
        loss = points if predicted is None else -output[np.arange(len(truth)), truth]
        outcome = Outcome(
            y=truth,
            groups=Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices)),
            points=points.astype(np.float64),
            predicted=predicted,
            output=output,
            loss=float(loss.mean()),
            uncounted=data.uncounted,
        ).in_units(*data.label_scale)
        scores[split] = scored(outcome, data.task.kind, metrics, selects, by_domain=split == "test")
    return scores


@dataclass(frozen=True)
class Fitted:
    """A model of scikit-learn, or what stands for one where there is nothing to tell apart."""

    classes: int | None
    known: Array
    """The classes that training examples have."""
    width: int
    model: Any = None
    constant: Array | None = None
    """In place of a model: log-probabilities of ``known``, or the mean."""
    boosted: bool = False
    note: str = ""

    def outputs(self, x: Array) -> Iterable[tuple[int, Array]]:
        """Steps, and the outputs for all of ``x`` there: log-probabilities of classes, or numbers."""
        for step, found in self._looks(x):
            if self.classes is not None:  # also of classes that no training example has
                shares = np.full((len(x), self.classes), LEAST)
                shares[:, self.known] = np.maximum(found, LEAST)
                found = np.log(shares)
            yield step, found

    def _looks(self, x: Array) -> Iterable[tuple[int, Array]]:
        if self.constant is not None:
            same = self.constant if self.classes is None else np.exp(self.constant)
            yield 1, np.repeat(same[None], len(x), 0)
        elif not self.boosted:
            yield 1, self.model.predict(x) if self.classes is None else self.model.predict_proba(x)
        else:
            staged = self.model.staged_predict if self.classes is None else self.model.staged_predict_proba
            last = len(self.model._predictors)
            yield from ((n, found) for n, found in enumerate(staged(x), 1) if n % LOOK == 0 or n == last)

    def network(self, step: int) -> FeatureModel:
        """What was fitted as a network, of boosting with ``step`` rounds."""
        if self.boosted:
            return self._trees(step)
        if self.constant is not None:
            weight, bias = np.zeros((self.constant.size, self.width)), np.atleast_1d(self.constant)
        else:
            weight, bias = np.atleast_2d(self.model.coef_), np.atleast_1d(self.model.intercept_)
        network = build("linear", input_shape=(self.width,), classes=self.classes, seed=0)
        return self._loaded(network, {}, weight, bias)

    def _trees(self, step: int) -> FeatureModel:
        """Of scikit-learn's nodes what decides; there are no missing values and no categories among them."""
        rounds = self.model._predictors[:step]
        nodes = [tree.nodes for trees in rounds for tree in trees]
        starts = np.cumsum([0, *map(len, nodes)])
        every = np.concatenate(nodes)
        first, own = np.repeat(starts[:-1], np.diff(starts)), np.arange(len(every))
        leaf = every["is_leaf"].astype(bool)
        # The greatest float32 that is no more: float32 features fall on the same sides of it.
        threshold = every["num_threshold"].astype(np.float32)
        above = threshold > every["num_threshold"]
        threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
        weights = {
            "roots": starts[:-1],
            "feature": np.where(leaf, 0, every["feature_idx"]),
            "threshold": np.where(leaf, np.float32(0), threshold),
            "left": np.where(leaf, own, first + every["left"]),
            "right": np.where(leaf, own, first + every["right"]),
            "value": np.where(leaf, every["value"], 0.0),
        }
        scores = len(rounds[0])
        sizes = {"nodes": len(every), "trees": len(nodes), "scores": scores}
        network = build("tree-ensemble", input_shape=(self.width,), classes=self.classes, seed=0, **sizes)
        bias = np.asarray(self.model._baseline_prediction).reshape(scores)
        return self._loaded(network, weights, np.eye(scores), bias)

    def _loaded(
        self, network: FeatureModel, features: dict[str, Array], weight: Array, bias: Array
    ) -> FeatureModel:
        """With a row of the head for each class.

        Two classes have one score, the log-odds of the second. A class that no training example has gets the
        mean of the others' scores less a constant, so that its probability is at most :data:`LEAST`.
        """
        if self.classes is not None:
            if len(weight) < len(self.known):
                weight, bias = (np.concatenate([np.zeros_like(part), part]) for part in (weight, bias))
            rows = np.repeat(weight.mean(0, keepdims=True), self.classes, 0)
            offsets = np.full(self.classes, bias.mean() + np.log(LEAST))
            rows[self.known], offsets[self.known] = weight, bias
            weight, bias = rows, offsets
        head = "head.0" if self.classes is None else "head"
        found = {f"features.{name}": torch.from_numpy(values) for name, values in features.items()}
        found |= {f"{head}.weight": torch.from_numpy(weight), f"{head}.bias": torch.from_numpy(bias)}
        network.load_state_dict(found)
        return network


def _fit(config: RunConfig, x: Array, y: Array, classes: int | None) -> Fitted:
    known, counts = np.unique(y if classes is not None else [0], return_counts=True)
    if config.algorithm == MAJORITY or (classes is not None and len(known) == 1):  # nothing to tell apart
        constant = np.asarray(y.mean(dtype=np.float64)) if classes is None else np.log(counts / len(y))
        return Fitted(classes, known, x.shape[1], constant=constant)
    note, boosted = "", config.algorithm == BOOSTING
    with warnings.catch_warnings(), _threads(len(x)):
        warnings.simplefilter("ignore")  # of solvers that would go on
        model = _model(config, classes, x.shape[1])
        try:
            if boosted:
                note = _boost(model, x, y)
            else:
                model.fit(x, y)
        except ValueError as error:
            settings = ", ".join(f"{name}={value!r}" for name, value in config.settings.items())
            raise InputError(f"{config.algorithm} with {settings or 'defaults'}: {error}") from error
    return Fitted(classes, known, x.shape[1], model, boosted=boosted, note=note)


def _boost(model: Any, x: Array, y: Array) -> str:
    """Fits as many rounds as :data:`WORK` allows; what it says where these are not all.

    The first few tell what a round takes. It is counted and not timed: the same data give the same trees on
    every machine.
    """
    began = time.thread_time()  # of this thread alone: what else the machine does is left out
    model.set_params(max_iter=LOOK, warm_start=True).fit(x, y)
    took = time.thread_time() - began
    allowed = WORK * max(1, len(x) / ONE_THREAD)
    counted = min(max(int(LOOK * allowed / _work(model)), FEWEST), TREES)
    timed = min(max(int(LOOK * SECONDS / took), LOOK), TREES) if took else TREES
    if (rounds := min(counted, timed)) > LOOK:
        model.set_params(max_iter=rounds).fit(x, y)
    if timed < counted:
        return (
            f"{timed} rounds instead of {counted}, because more would take over {SECONDS:.0f} s on this "
            "machine"
        )
    return f"{counted} rounds instead of {TREES}, for a table of this size" if counted < TREES else ""


def _work(model: Any) -> int:
    """Nanoseconds that the trees take by what is done, as measured once on 2,026 rows of 100 and 800 numbers.

    Histograms are made of the rows of the smaller of two children, and each node's are searched for a split.
    """
    bins, features = int(model._bin_mapper.n_bins_non_missing_.sum()), model.n_features_in_
    work = 0
    for tree in (tree for trees in model._predictors for tree in trees):
        nodes = tree.nodes
        split, rows = nodes[nodes["is_leaf"] == 0], nodes["count"].astype(np.int64)
        added = rows[0] + np.minimum(rows[split["left"]], rows[split["right"]]).sum()
        work += 3 * features * int(added) + (4 * bins + 100 * features) * len(nodes)
    return work


def _threads(rows: int) -> AbstractContextManager[Any]:
    """One for small data: threads that wait for each other cost more than they bring."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # of scikit-learn

    return threadpool_limits(limits=1) if rows < ONE_THREAD else nullcontext()


def _model(config: RunConfig, classes: int | None, features: int) -> Any:
    settings = check(SETTINGS[config.algorithm], config.settings, config.algorithm)
    if config.algorithm == BOOSTING:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        make = HistGradientBoostingRegressor if classes is None else HistGradientBoostingClassifier
        bins = min(max(BINS // features, 31), 255)
        return make(early_stopping=False, random_state=config.seed % 2**32, max_bins=bins, **settings)
    from sklearn.linear_model import LogisticRegression, Ridge

    return Ridge(**settings) if classes is None else LogisticRegression(max_iter=1000, **settings)
