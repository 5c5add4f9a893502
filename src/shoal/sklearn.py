"""scikit-learn estimators that learn from several domains, which come in as ``groups``.

>>> from sklearn.datasets import make_classification
>>> X, y = make_classification(300, random_state=0)
>>> hospital = ["oslo", "lima", "kyoto"] * 100
>>> DomainClassifier("fish", random_state=0).fit(X, y, groups=hospital).predict(X[:3]).shape
(3,)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from shoal.algorithms import Algorithm, algorithm_class, check_settings
from shoal.api.fit import fit
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.sampler import DomainBatchSampler
from shoal.data.splits import hold_out
from shoal.errors import InputError, check_names, shown
from shoal.experiments.config import OPTIMIZERS
from shoal.models import build
from shoal.settings import coerce

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import LabelEncoder, StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"shoal.sklearn requires scikit-learn 1.6 or later ({error}): pip install 'shoal[sklearn]'"
    ) from error

__all__ = ["DomainClassifier", "DomainRegressor"]

PASSES, LEAST, MOST = 30, 50, 2000
"""How long a training is by default: passes over the examples, and the bounds of that in steps."""
ROWS = 8192
"""Predicted at a time."""
FLOATS = (np.float64, np.float32)

ModelMaker = Callable[[tuple[int, ...], int | None], nn.Module]
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(eq=False, repr=False)  # scikit-learn reads the parameters off __init__, and shows them
class _DomainEstimator(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """What both estimators share: the parameters, the training and the model's outputs."""

    # With metadata routing enabled, whoever is given groups hands them on to `fit` unasked.
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}

    algorithm: str | type[Algorithm] = "fish"
    _: KW_ONLY
    model: str | ModelMaker | None = None
    settings: Mapping[str, Any] | None = None
    steps: int | None = None
    batch_size: int = 32
    domains_per_step: int | None = None
    draw: str | None = None
    lr: float = 1e-3
    optimizer: str | OptimizerMaker = "adam"
    validation: float | None = None
    patience: int | None = None
    standardize: bool = True
    random_state: Any = None
    device: str | torch.device | None = None
    verbose: int = 0

    def _train(self, X: NDArray[Any], y: NDArray[Any], groups: Any, classes: int | None) -> None:
        """Fits the model to checked rows and targets that are numbers already."""
        if len(y) < 2:
            raise InputError(f"n_samples={len(y)}: there must be at least two rows to learn from.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        domains = _domains(groups, len(y))
        options = self._method(domains, groups is not None)
        splits = self._splits(domains, seed)
        # A DataFrame would come out wherever scikit-learn is set to make them of everything.
        scaler = StandardScaler().set_output(transform="default") if self.standardize else None
        if scaler is not None:
            scaler.fit(X[splits["train"].examples()])
        x = torch.tensor(scaler.transform(X) if scaler else X, dtype=torch.float32)
        options["steps"] = self._steps(splits["train"], options["domains_per_step"])
        data = DomainData(TensorData(x, torch.tensor(y)), splits, classes, tuple(x.shape[1:]), model="")
        optimizer = self._optimizer()
        own = not isinstance(optimizer, type)  # which sets the learning rate itself
        run = fit(
            model=self._made(data.input_shape, classes, seed),
            train=data,
            batch_size=self.batch_size,
            optimizer=optimizer,
            lr=None if own and self.lr == 1e-3 else self.lr,
            patience=self.patience,
            eval_splits=[split for split in splits if split != "train"],
            seed=seed,
            device=self.device,
            progress=coerce(bool | float, self.verbose, "verbose") > 0,
            **options,
        )
        # Only now: what stops a fit half-way leaves the model of the one before as it was.
        self.scaler_ = scaler
        self._own = callable(self.model)  # which may insist on the precision that it was trained in
        self.model_ = run.model.cpu()  # so that what was trained on a GPU can be unpickled anywhere
        self.algorithm_ = type(run.algorithm).__name__
        self.domains_ = [str(name) for name in domains.names]
        self.n_iter_ = run.last.step
        self.history_ = [point.to_dict() for point in run.history]

    def _method(self, domains: Domains, grouped: bool) -> dict[str, Any]:
        """The algorithm and what belongs to it; ERM where it has fewer than two domains to work with."""
        cls = algorithm_class(self.algorithm)
        if not isinstance(self.settings, Mapping | None):
            got = shown(self.settings)
            raise InputError(f"settings must be a mapping, such as {{'meta_lr': 0.1}}; got {got}.")
        settings = check_settings(cls, dict(self.settings or {}))
        if len(domains) > 1 or not (cls.compares_domains or cls.knows_domains):
            drawn = {"draw": self.draw, "domains_per_step": self.domains_per_step}
            return {"algorithm": cls, "settings": settings, **drawn}
        groups = f"one group only ({domains.names[0]!r})" if grouped else "no groups"
        message = f"{cls.__name__} requires several domains, but fit received {groups}; it trains as ERM."
        warnings.warn(message, stacklevel=4)
        return {"algorithm": "erm", "settings": {}, "draw": None, "domains_per_step": None}

    def _splits(self, domains: Domains, seed: int) -> dict[str, Domains]:
        share = self.validation
        if share is None:
            return {"train": domains}
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise InputError(f"validation must be None or a fraction between 0 and 1; got {share!r}.")
        train, held = hold_out(domains, float(share), seed)
        return {"train": train, "validation": held}

    def _steps(self, train: Domains, domains_per_step: int | None) -> int:
        if self.steps is not None:
            return self.steps
        a_pass = DomainBatchSampler(train, self.batch_size, domains_per_step, draw="pooled").steps
        return min(max(PASSES * a_pass, LEAST), MOST)

    def _made(self, input_shape: tuple[int, ...], classes: int | None, seed: int) -> nn.Module:
        if self.model is None or isinstance(self.model, str):
            return build(self.model or "tabular", input_shape=input_shape, classes=classes, seed=seed)
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise InputError(
                "model must be a name, such as 'tabular', or a function that makes one, "
                f"model(input_shape, classes); got {type(self.model).__name__}."
            )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            made = self.model(input_shape, classes)
        if not isinstance(made, nn.Module):
            raise InputError(f"model must return a torch.nn.Module, got {type(made).__name__}.")
        return copy.deepcopy(made)  # it may be one that the function gives every time

    def _optimizer(self) -> OptimizerMaker:
        if not isinstance(self.optimizer, str):
            return self.optimizer
        check_names("optimizer", [self.optimizer], OPTIMIZERS)
        if isinstance(self.lr, bool) or not isinstance(self.lr, Real):
            raise InputError(f"lr must be a number above 0; got {shown(self.lr)}.")
        made: OptimizerMaker = getattr(torch.optim, OPTIMIZERS[self.optimizer])
        return made

    def _outputs(self, X: Any) -> NDArray[np.float64]:
        """What the model makes of new rows; ours in double precision, so that no row's depends on the others.

        In single precision a matrix product rounds differently for other numbers of rows.
        """
        check_is_fitted(self, "model_")
        X = validate_data(self, X, reset=False, dtype=FLOATS)
        x = torch.tensor(self.scaler_.transform(X) if self.scaler_ else X)
        model = self.model_ if self._own else copy.deepcopy(self.model_).double()
        x = x.float() if self._own else x.double()
        with torch.no_grad():
            return torch.cat([model(part) for part in x.split(ROWS)]).double().numpy()


class DomainClassifier(ClassifierMixin, _DomainEstimator):  # type: ignore[misc]
    """A classifier for held-out domains, trained with any algorithm of Shoal. ::

        DomainClassifier("fish").fit(X, y, groups=hospital).score(X_new, y_new)

    Labels may be of any type. Without groups, or with a single one, an algorithm that requires several
    domains trains as ERM, with a warning.

    Args:
        algorithm: name of an algorithm (``shoal list algorithms``) or subclass of
            :class:`~shoal.algorithms.Algorithm`.
        model: name of a network for flat features, or function ``model(input_shape, classes)`` that builds
            one; ``classes`` is ``None`` for regression (default: ``"tabular"``).
        settings: hyperparameters of the algorithm, such as ``{"meta_lr": 0.1}``.
        steps: number of training steps, each on ``batch_size`` rows from each of ``domains_per_step`` domains
            (default: as many as make 30 epochs, but at least 50 and at most 2,000).
        batch_size: number of rows per domain and step.
        domains_per_step: number of domains per step (default: all if there are at most 16, otherwise 5).
        draw: how batches are sampled (default: as the algorithm requires); ``"regrouped"`` mixes the domains
            of each step, as a control for the grouping.
        lr: learning rate of an ``optimizer`` given by name.
        optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``, or a function that creates a torch optimizer from
            parameters.
        validation: fraction of each domain that is held out to select the best of ten evaluations (by
            accuracy, or the mean squared error). By default all rows are trained on and the last step is
            used.
        patience: stop after this number of evaluations without improvement; requires ``validation``.
        standardize: standardize every column on the training rows.
        random_state: random seed; ``None`` uses the global state of NumPy.
        device: device for training, such as ``"cuda"`` (default: CUDA if available).
        verbose: show a progress line if above 0.

    Attributes:
        classes_: labels, sorted.
        model_: trained network, on the CPU, in eval mode. It takes standardized columns.
        algorithm_: name of the algorithm that was used, such as ``"Fish"``.
        domains_: names of the groups, sorted.
        n_iter_: number of training steps.
        history_: evaluations during the training, as plain data.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train the model.

        Args:
            X: dense rows without missing values.
            y: labels.
            groups: domain of each row.

        Returns:
            The estimator.
        """
        X, y = validate_data(self, X, y, dtype=FLOATS)
        _check_labels(y)
        check_classification_targets(y)
        encoder = LabelEncoder().fit(y)
        classes = encoder.classes_
        if len(classes) < 2:
            raise InputError(f"y has one class only, {classes[0]!r}; a classifier needs at least two.")
        self._train(X, encoder.transform(y).astype(np.int64), groups, len(classes))
        self.classes_ = classes
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Compute logits (n, classes); for two classes their difference, (n,), above 0 for the second class.

        Args:
            X: dense rows without missing values.
        """
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Predict probabilities (n, classes), in the order of ``classes_``.

        Args:
            X: dense rows without missing values.
        """
        probabilities: NDArray[np.float64] = torch.softmax(torch.from_numpy(self._outputs(X)), 1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the most probable label of each row.

        Args:
            X: dense rows without missing values.
        """
        best = self._outputs(X).argmax(1)  # first, as it asks whether there is a model
        labels: NDArray[Any] = self.classes_[best]
        return labels


class DomainRegressor(RegressorMixin, _DomainEstimator):  # type: ignore[misc]
    """A regressor for held-out domains, trained with any algorithm of Shoal. ::

        DomainRegressor("fish").fit(X, y, groups=hospital).score(X_new, y_new)

    It is trained on standardized targets, ``(y - target_[0]) / target_[1]``, with the squared error.

    Args:
        algorithm: name of an algorithm (``shoal list algorithms``) or subclass of
            :class:`~shoal.algorithms.Algorithm`.
        model: name of a network for flat features, or function ``model(input_shape, classes)`` that builds
            one; ``classes`` is ``None`` for regression (default: ``"tabular"``).
        settings: hyperparameters of the algorithm, such as ``{"meta_lr": 0.1}``.
        steps: number of training steps, each on ``batch_size`` rows from each of ``domains_per_step`` domains
            (default: as many as make 30 epochs, but at least 50 and at most 2,000).
        batch_size: number of rows per domain and step.
        domains_per_step: number of domains per step (default: all if there are at most 16, otherwise 5).
        draw: how batches are sampled (default: as the algorithm requires); ``"regrouped"`` mixes the domains
            of each step, as a control for the grouping.
        lr: learning rate of an ``optimizer`` given by name.
        optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``, or a function that creates a torch optimizer from
            parameters.
        validation: fraction of each domain that is held out to select the best of ten evaluations (by
            accuracy, or the mean squared error). By default all rows are trained on and the last step is
            used.
        patience: stop after this number of evaluations without improvement; requires ``validation``.
        standardize: standardize every column on the training rows.
        random_state: random seed; ``None`` uses the global state of NumPy.
        device: device for training, such as ``"cuda"`` (default: CUDA if available).
        verbose: show a progress line if above 0.

    Attributes:
        target_: mean and standard deviation of the targets.
        model_: trained network, on the CPU, in eval mode. It takes standardized columns.
        algorithm_: name of the algorithm that was used, such as ``"Fish"``.
        domains_: names of the groups, sorted.
        n_iter_: number of training steps.
        history_: evaluations during the training, as plain data.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train the model.

        Args:
            X: dense rows without missing values.
            y: targets.
            groups: domain of each row.

        Returns:
            The estimator.
        """
        X, y = validate_data(self, X, y, dtype=FLOATS, y_numeric=True)
        y = y.astype(np.float64)
        mean, spread = _centre(y)
        self._train(X, ((y - mean) / spread).astype(np.float32), groups, None)
        self.target_ = mean, spread
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predict one number per row, in the units of the targets.

        Args:
            X: dense rows without missing values.
        """
        outputs = self._outputs(X)  # first, as it asks whether there is a model
        return outputs * self.target_[1] + self.target_[0]


def _check_labels(y: NDArray[Any]) -> None:
    """Refuses labels that cannot be sorted, where they are Python's own objects."""
    if y.dtype != object:
        return
    for row, label in enumerate(y):
        if label is None:
            raise InputError(f"y has no label in row {row} (None); remove such rows.")
    kinds = sorted({"numbers" if isinstance(label, Real) else type(label).__name__ for label in y})
    if len(kinds) > 1:
        raise InputError(
            f"y has labels of several types, {' and '.join(kinds)}; they must have the same type."
        )


def _centre(y: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and deviation, the latter 1 for constant targets."""
    largest = float(np.abs(y).max()) or 1.0  # divided by, so that no square is too large or too small
    mean, spread = float((y / largest).mean()) * largest, float((y / largest).std()) * largest
    if not np.isfinite((y - mean) / (spread or 1.0)).all():
        raise InputError(f"y reaches {largest:.3g}, too large for regression; rescale the targets.")
    return mean, spread or 1.0


def _domains(groups: Any, rows: int) -> Domains:
    if groups is None:
        return Domains.from_sizes({"all": rows})
    if isinstance(groups, str | Mapping) or np.ndim(groups) != 1:
        what = repr(groups) if isinstance(groups, str) else f"a {type(groups).__name__}"
        shape = f" of shape {np.shape(groups)}" if np.ndim(groups) else ""
        raise InputError(f"groups must have one label for each of the {rows} rows of X; got {what}{shape}.")
    domains = Domains.from_labels(groups)
    if len(domains.indices) != rows:
        raise InputError(
            f"groups has {len(domains.indices)} labels and X has {rows} rows; give one label for each row."
        )
    return domains
