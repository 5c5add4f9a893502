"""What a comparison on flat features must beat: gradient boosting and a linear model, both of scikit-learn.

They get the same splits as the algorithms, learn from training examples alone, try as many settings, and are
recorded like any run. Boosting is looked at along the way, as a training is, and keeps the number of trees
that is best on validation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.bench.config import RunConfig
from shoal.bench.record import RunRecord, Store
from shoal.bench.run import validated
from shoal.bench.search import Space, draw
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.folders import VARIABLE
from shoal.errors import InputError
from shoal.training.evaluate import Scores, scored
from shoal.training.history import Point
from shoal.training.metrics import Outcome, chosen

Array = NDArray[Any]

BOOSTING, LOGISTIC, RIDGE = "gradient-boosting", "logistic-regression", "ridge-regression"
SPACES: dict[str, Space] = {
    BOOSTING: {
        "learning_rate": {"default": 0.1, "log10": [-2, -0.5]},
        "max_leaf_nodes": {"default": 31, "log2": [2, 6], "whole": True},
        "min_samples_leaf": {"default": 20, "log2": [1, 6], "whole": True},
        "l2_regularization": {"default": 0.0, "log10": [-3, 2]},
    },
    LOGISTIC: {"C": {"default": 1.0, "log10": [-3, 2]}},
    RIDGE: {"alpha": {"default": 1.0, "log10": [-2, 3]}},
}
TREES, LOOK = 200, 20
"""How many trees there are at most, and after how many the model is judged."""
ONE_THREAD = 20_000
LEAST = 1e-12  # a probability of less counts as this


def names(classes: int | None) -> tuple[str, str]:
    return BOOSTING, RIDGE if classes is None else LOGISTIC


def applies(data: DomainData) -> bool:
    """Whether examples are rows of numbers in memory."""
    examples = data.examples
    return len(data.input_shape) == 1 and isinstance(examples, TensorData) and examples.x.is_floating_point()


def lacking() -> str:
    """Why there can be none, if so."""
    gone = importlib.util.find_spec("sklearn") is None
    return "needs scikit-learn: pip install 'shoal[sklearn]'" if gone else ""


def is_one(config: RunConfig) -> bool:
    return config.algorithm in SPACES


def plan(
    base: RunConfig,
    classes: int | None,
    left_out: Sequence[str | None],
    seeds: Iterable[int],
    search: int,
) -> list[RunConfig]:
    """One run for each domain left out, baseline, seed and candidate: the defaults, and draws of settings."""
    usual = RunConfig(base.dataset, base.algorithm, base.steps)
    same = {"dataset", "steps", "holdout", "metric", "data_options"}
    own = replace(usual, **{name: getattr(base, name) for name in same})
    return [
        replace(
            own,
            algorithm=name,
            label=name,
            data_options={**base.data_options, **({} if out is None else {"test": out})},
            settings=draw(SPACES[name], seed, number) if number else {},
            seed=seed,
            select="best",
        )
        for out in left_out
        for name in names(classes)
        for seed in seeds
        for number in range(max(1, search))
    ]


def run_all(
    configs: Sequence[RunConfig], store: Store, done: Callable[[RunRecord], None] | None = None
) -> None:
    """Runs what the store does not hold yet, one after the other, each saved as it finishes."""
    for config in {c.identity: c for c in store.missing(configs)}.values():
        record = run(config)
        store.save(record)
        if done:
            done(record)


def run(config: RunConfig) -> RunRecord:
    """Fits to the training examples and judges in every split."""
    if why := lacking():
        raise InputError(f"{config.algorithm} {why}.")
    began = time.perf_counter()
    options = json.dumps(dict(config.data_options), sort_keys=True)
    data = _loaded(config.dataset, options, config.holdout, os.environ.get(VARIABLE))
    judge = Judge(data, config.metric)
    examples: Any = data.examples
    x, y = examples.x.cpu().numpy(), examples.y.cpu().numpy()
    train = data.splits["train"].examples()
    points: list[Point] = []
    for step, outputs in _outputs(config, x, x[train], y[train], data.classes):
        scores = judge(y, outputs)
        points.append(Point(step, 0, scores["train"].loss or 0.0, scores))
    best = 0
    for number, point in enumerate(points):
        if point.scores["validation"].better_than(points[best].scores["validation"]):
            best = number
    return RunRecord(
        config=config,
        status="finished",
        history=tuple(point.to_dict() for point in points),
        selected=best,
        rule="best on validation",
        seconds=round(time.perf_counter() - began, 3),
        environment=_environment(),
        notes=dict(data.notes),
    )


@lru_cache(maxsize=1)
def _loaded(dataset: str, options: str, holdout: float | None, root: str | None) -> DomainData:
    """Neighbouring runs share their data; ``root`` is where files were looked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever planned the runs has said them
        data = sets.load(dataset, **json.loads(options))
    return data if holdout is None else validated(data, holdout)


class Judge:
    """Scores outputs for all examples, split by split, by what a training on these data is judged by."""

    def __init__(self, data: DomainData, metric: str | None) -> None:
        self.data = data
        self.metrics, self.selects = chosen(metric, data.measures, data.classes is not None)

    def __call__(self, y: Array, outputs: Array) -> dict[str, Scores]:
        return {split: self._split(domains, y, outputs) for split, domains in self.data.splits.items()}

    def _split(self, domains: Domains, y: Array, outputs: Array) -> Scores:
        which = domains.examples()
        truth, output = y[which], outputs[which]
        classification = self.data.classes is not None
        predicted = output.argmax(1) if classification else None
        if classification:
            points = (predicted == truth).astype(np.float64)
            loss = -output[np.arange(len(truth)), truth].mean()
        else:
            points = np.square(output.astype(np.float64) - truth)
            loss = points.mean()
        outcome = Outcome(
            y=truth,
            groups=Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices)),
            points=points,
            predicted=predicted,
            output=output,
            loss=float(loss),
            uncounted=self.data.uncounted,
        )
        return scored(outcome, classification, self.metrics, self.selects)


def _outputs(
    config: RunConfig, x: Array, train_x: Array, train_y: Array, classes: int | None
) -> Iterator[tuple[int, Array]]:
    """Steps, and the model's outputs for all of ``x`` there: log-probabilities of classes, or numbers."""
    if classes is not None and len(np.unique(train_y)) == 1:  # nothing to tell apart
        yield 1, _logarithms(np.ones((len(x), 1)), train_y[:1], classes)
        return
    with warnings.catch_warnings(), _threads(len(train_x)):
        warnings.simplefilter("ignore")  # of solvers that would go on
        model = _model(config, classes).fit(train_x, train_y)
        for step, found in _looks(model, x, config.algorithm == BOOSTING, classes is None):
            yield step, found if classes is None else _logarithms(found, model.classes_, classes)


def _looks(model: Any, x: Array, staged: bool, regression: bool) -> Iterator[tuple[int, Array]]:
    """What the model makes of ``x``, and at how many trees."""
    if not staged:
        yield 1, model.predict(x) if regression else model.predict_proba(x)
        return
    stages = model.staged_predict(x) if regression else model.staged_predict_proba(x)
    yield from ((number, found) for number, found in enumerate(stages, 1) if number % LOOK == 0)


def _threads(rows: int) -> AbstractContextManager[Any]:
    """One for small data: threads that wait for each other cost more than they bring."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # of scikit-learn

    return threadpool_limits(limits=1) if rows < ONE_THREAD else nullcontext()


def _model(config: RunConfig, classes: int | None) -> Any:
    settings = dict(config.settings)
    if config.algorithm == BOOSTING:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        make = HistGradientBoostingRegressor if classes is None else HistGradientBoostingClassifier
        return make(max_iter=TREES, early_stopping=False, random_state=config.seed, **settings)
    from sklearn.linear_model import LogisticRegression, Ridge

    return Ridge(**settings) if classes is None else LogisticRegression(max_iter=1000, **settings)


def _logarithms(shares: Array, known: Array, classes: int) -> Array:
    """Of the probability of every class, also of those that no training example has."""
    found = np.full((len(shares), classes), LEAST)
    found[:, known] = shares
    return np.log(np.maximum(found, LEAST))


def _environment() -> dict[str, str]:
    import sklearn

    import shoal

    return {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
        "device": "cpu",
    }
