"""Shoal: domain generalization. Train models that work on domains they were not trained on."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0.dev0"

if TYPE_CHECKING:
    from shoal import algorithms as algorithms
    from shoal import data as data
    from shoal import experiments as experiments
    from shoal import gradients as gradients
    from shoal import models as models
    from shoal import optim as optim
    from shoal import penalties as penalties
    from shoal import training as training
    from shoal.api.compare import Comparison as Comparison
    from shoal.api.compare import compare as compare
    from shoal.api.diagnose import Diagnosis as Diagnosis
    from shoal.api.diagnose import diagnose as diagnose
    from shoal.api.export import export as export
    from shoal.api.fit import Fit as Fit
    from shoal.api.fit import fit as fit
    from shoal.api.predict import Predictions as Predictions
    from shoal.api.predict import predict as predict
    from shoal.api.report import Report as Report
    from shoal.api.report import report as report
    from shoal.api.score import Score as Score
    from shoal.api.score import score as score
    from shoal.api.soup import Soup as Soup
    from shoal.api.soup import soup as soup
    from shoal.api.sweep import Sweep as Sweep
    from shoal.api.sweep import sweep as sweep
    from shoal.api.train import Run as Run
    from shoal.api.train import train as train
    from shoal.errors import InputError as InputError
    from shoal.trained import Trained as Trained
    from shoal.trained import load as load
    from shoal.training.callbacks import Callback as Callback

# Names are imported when first used: `import shoal` and `shoal --help` must not wait for torch.
_HOMES = {
    "shoal.api.compare": ("Comparison", "compare"),
    "shoal.api.diagnose": ("Diagnosis", "diagnose"),
    "shoal.api.export": ("export",),
    "shoal.api.fit": ("Fit", "fit"),
    "shoal.api.predict": ("Predictions", "predict"),
    "shoal.api.report": ("Report", "report"),
    "shoal.api.score": ("Score", "score"),
    "shoal.api.soup": ("Soup", "soup"),
    "shoal.api.sweep": ("Sweep", "sweep"),
    "shoal.api.train": ("Run", "train"),
    "shoal.errors": ("InputError",),
    "shoal.trained": ("Trained", "load"),
    "shoal.training.callbacks": ("Callback",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = (
    "algorithms",
    "data",
    "experiments",
    "gradients",
    "models",
    "optim",
    "penalties",
    "sklearn",
    "training",
)

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"shoal.{name}")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """``shoal.report`` is the function, also once the package of that name was imported."""

    @property
    def report(self) -> Any:
        return __getattr__("report")

    @report.setter
    def report(self, package: ModuleType) -> None:
        """Python binds a package to its parent when it is imported."""


sys.modules[__name__].__class__ = _Package
