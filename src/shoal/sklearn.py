"""scikit-learn estimators that learn from several domains, which come in as ``groups``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import FunctionTransformer, LabelEncoder, StandardScaler
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from shoal.algorithms import Algorithm, algorithm_class, check_settings
from shoal.api.fit import fit
from shoal.data import DomainBatchSampler, DomainData, Domains, TensorData
from shoal.data.splits import split
from shoal.errors import InputError
from shoal.models import build
from shoal.settings import Range, coerce

__all__ = ["DomainClassifier", "DomainRegressor"]

EPOCHS, LEAST, MOST = 30, 50, 2000  # default length of a training, and its bounds in steps
ROWS = 8192  # per batch of a prediction
FLOATS = (np.float64, np.float32)
Given = Mapping[str, Any] | None
Share = Annotated[float, Range(above=0, below=1)] | None
ModelMaker = Callable[[tuple[int, ...], int | None], nn.Module]


@dataclass(eq=False, repr=False)  # scikit-learn reads the parameters off __init__, and shows them
class _DomainEstimator(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Parameters of both estimators, the training and the model's outputs."""

    # With metadata routing enabled, meta-estimators pass groups on to `fit`.
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"groups": True}

    algorithm: str | type[Algorithm] = "fish"
    _: KW_ONLY
    model: str | ModelMaker | None = None
    settings: Given = None
    steps: int | None = None
    batch_size: int = 32
    domains_per_step: int | None = None
    lr: float | None = None
    validation: float | None = None
    standardize: bool = True
    options: Given = None
    random_state: Any = None
    device: str | torch.device | None = None
    verbose: int = 0

    def _train(self, X: NDArray[Any], y: NDArray[Any], groups: Any, classes: int | None) -> None:
        """Fits the model to checked rows, and targets that are numbers."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        domains, share = Domains.from_sizes({"all": len(y)}), coerce(Share, self.validation, "validation")
        if groups is not None:
            domains = Domains.from_labels(column_or_1d(groups))
            check_consistent_length(X, groups)
        splits = {"train": domains} if share is None else split(domains, [], share, seed)
        scaler = StandardScaler() if self.standardize else FunctionTransformer()
        scaler.set_output(transform="default").fit(X[splits["train"].examples()])  # never DataFrames
        x = torch.tensor(scaler.transform(X), dtype=torch.float32)
        data = DomainData(TensorData(x, torch.tensor(y)), splits, classes, tuple(x.shape[1:]), model="")
        method = self._method(domains, groups is not None)
        per_step = method["domains_per_step"]
        epoch = DomainBatchSampler(splits["train"], self.batch_size, per_step, draw="pooled").steps
        arguments = {
            **method,
            "model": self._model(data.input_shape, classes, seed),
            "train": data,
            "steps": min(max(EPOCHS * epoch, LEAST), MOST) if self.steps is None else self.steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "seed": seed,
            "device": self.device,
            "progress": coerce(bool | float, self.verbose, "verbose") > 0,
        }
        options = coerce(Given, self.options, "options") or {}
        if twice := arguments.keys() & options.keys():
            raise InputError(f"{min(twice)!r} is set by a parameter of the estimator.", "options")
        run = fit(**arguments, **options)
        # Only now: a fit that is interrupted leaves the estimator as it was.
        self.scaler_ = scaler
        self.model_ = run.model.cpu()  # so that it can be unpickled without a GPU
        self.algorithm_ = type(run.algorithm).__name__
        self.domains_ = [str(name) for name in domains.names]
        self.n_iter_ = run.last.step
        self.history_ = [point.to_dict() for point in run.history]

    def _method(self, domains: Domains, grouped: bool) -> dict[str, Any]:
        """The algorithm and its settings; ERM if it would have too few domains."""
        cls = algorithm_class(self.algorithm)
        settings = check_settings(cls, coerce(Given, self.settings, "settings") or {})
        if len(domains) > 1 or cls.min_domains == 1:
            return {"algorithm": cls, "settings": settings, "domains_per_step": self.domains_per_step}
        groups = f"one group only ({domains.names[0]!r})" if grouped else "no groups"
        message = f"{cls.__name__} requires several domains, but fit received {groups}; it trains as ERM."
        warnings.warn(message, stacklevel=4)
        return {"algorithm": "erm", "settings": {}, "domains_per_step": None}

    def _model(self, input_shape: tuple[int, ...], classes: int | None, seed: int) -> nn.Module:
        if self.model is None or isinstance(self.model, str):
            return build(self.model or "tabular", input_shape=input_shape, classes=classes, seed=seed)
        if isinstance(self.model, nn.Module) or not callable(self.model):
            kinds = "a name, or a function model(input_shape, classes) that builds a network"
            raise InputError(f"must be {kinds}, got {type(self.model).__name__}.", "model")
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            return copy.deepcopy(self.model(input_shape, classes))  # it may return the same one every time

    def _outputs(self, X: Any) -> NDArray[np.float64]:
        """The model's outputs; those of our networks in double precision.

        In single precision a matrix product rounds differently for other numbers of rows.
        """
        check_is_fitted(self, "model_")
        X = validate_data(self, X, reset=False, dtype=FLOATS)
        x = torch.tensor(self.scaler_.transform(X))
        own = callable(self.model)  # a network of the user's, which may insist on its precision
        model, x = (self.model_, x.float()) if own else (copy.deepcopy(self.model_).double(), x.double())
        with torch.no_grad():
            return torch.cat([model(part) for part in x.split(ROWS)]).double().numpy()


class DomainClassifier(ClassifierMixin, _DomainEstimator):  # type: ignore[misc]
    """A classifier for held-out domains, trained with any algorithm of Shoal. ::

        DomainClassifier("fish").fit(X, y, groups=hospital).score(X_new, y_new)

    Labels, sorted in ``classes_``, may be of any type. Without groups, or with a single one, an algorithm
    that requires several domains trains as ERM, with a warning.

    Args:
        algorithm: name or class of an algorithm (``shoal list algorithms``).
        model: name of a network for flat features, or function ``model(input_shape, classes)`` that builds
            one; ``classes`` is ``None`` for regression (default: ``"tabular"``).
        settings: hyperparameters of the algorithm, such as ``{"meta_lr": 0.1}``.
        steps: number of training steps (default: 30 epochs, but at least 50 and at most 2,000 steps).
        batch_size: number of rows per domain and step.
        domains_per_step: number of domains per step (default: all if there are at most 16, otherwise 5).
        lr: learning rate (default: 0.001).
        validation: fraction of each domain that is held out to select the best weights, by accuracy or the
            mean squared error (default: train on all rows and use the last weights).
        standardize: standardize every column on the training rows.
        options: other options of :func:`shoal.fit`, such as ``{"optimizer": "sgd", "patience": 3}``; see
            :class:`~shoal.options.FitOptions`.
        random_state: random seed; ``None`` uses the global state of NumPy.
        device: device for training, such as ``"cuda"`` (default: CUDA if available).
        verbose: show a progress line if above 0.

    Attributes:
        model_: trained network, on the CPU, in eval mode. It takes standardized columns.
        algorithm_: name of the algorithm that was used, such as ``"Fish"``.
        domains_: names of the groups, sorted.
        history_: evaluations during the training, as plain data.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on dense rows X without missing values and their labels y; groups are their domains."""
        X, y = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2)
        check_classification_targets(y)
        encoder = LabelEncoder().fit(y)
        if len(encoder.classes_) < 2:
            raise InputError(f"y has one class only, {encoder.classes_[0]!r}; a classifier needs two.")
        self._train(X, encoder.transform(y).astype(np.int64), groups, len(encoder.classes_))
        self.classes_ = encoder.classes_
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Compute logits (n, classes); for two classes their difference (n,), positive for the second."""
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Predict probabilities (n, classes), in the order of ``classes_``."""
        return torch.from_numpy(self._outputs(X)).softmax(1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the most probable label of each row."""
        best = self._outputs(X).argmax(1)  # first, as it checks that there is a model
        labels: NDArray[Any] = self.classes_[best]
        return labels


class DomainRegressor(RegressorMixin, _DomainEstimator):  # type: ignore[misc]
    """A regressor for held-out domains, trained with any algorithm of Shoal. ::

        DomainRegressor("fish").fit(X, y, groups=hospital).score(X_new, y_new)

    It is trained on standardized targets with the squared error; their mean and standard deviation are
    ``target_``. Its parameters are those of :class:`DomainClassifier`.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on dense rows X without missing values and their targets y; groups are their domains."""
        X, y = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2, y_numeric=True)
        y = y.astype(np.float64)
        mean, deviation = float(y.mean()), float(y.std()) or 1.0
        self._train(X, ((y - mean) / deviation).astype(np.float32), groups, None)
        self.target_ = mean, deviation
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predict one number per row, in the units of the targets."""
        outputs = self._outputs(X)  # first, as it checks that there is a model
        return outputs * self.target_[1] + self.target_[0]


_, _parameters, _described = (DomainClassifier.__doc__ or "").partition("\n\n    Args:")
DomainRegressor.__doc__ = f"{DomainRegressor.__doc__}{_parameters}{_described}"
