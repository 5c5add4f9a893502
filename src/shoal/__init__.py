"""Shoal: domain generalization. Train models that work in domains they were not trained on."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from shoal import algorithms, data, experiments, gradients, models, optim, training
    from shoal.api.compare import Comparison, compare
    from shoal.api.diagnose import Diagnosis, diagnose
    from shoal.api.report import Report, report
    from shoal.api.results import results
    from shoal.api.sweep import Sweep, sweep
    from shoal.api.train import Run, train
    from shoal.errors import InputError
    from shoal.experiments.results import Results
    from shoal.scoring import Score, score
    from shoal.trained import Trained, load
    from shoal.training.fit import Fit, fit

# Names are imported when first used: `import shoal` and `shoal --help` must not wait for torch.
_HOME = {
    "Comparison": "shoal.api.compare",
    "Diagnosis": "shoal.api.diagnose",
    "Fit": "shoal.training.fit",
    "InputError": "shoal.errors",
    "Report": "shoal.api.report",
    "Results": "shoal.experiments.results",
    "Run": "shoal.api.train",
    "Score": "shoal.scoring",
    "Sweep": "shoal.api.sweep",
    "Trained": "shoal.trained",
    "compare": "shoal.api.compare",
    "diagnose": "shoal.api.diagnose",
    "fit": "shoal.training.fit",
    "load": "shoal.trained",
    "results": "shoal.api.results",
    "score": "shoal.scoring",
    "sweep": "shoal.api.sweep",
    "train": "shoal.api.train",
}
_MODULES = ("algorithms", "data", "experiments", "gradients", "models", "optim", "sklearn", "training")

__all__ = [
    "Comparison",
    "Diagnosis",
    "Fit",
    "InputError",
    "Report",
    "Results",
    "Run",
    "Score",
    "Sweep",
    "Trained",
    "__version__",
    "algorithms",
    "compare",
    "data",
    "diagnose",
    "experiments",
    "fit",
    "gradients",
    "load",
    "models",
    "optim",
    "report",
    "results",
    "score",
    "sweep",
    "train",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"shoal.{name}")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """``shoal.report`` is the function, also once the package of that name was imported."""

    @property
    def report(self) -> Any:
        return importlib.import_module("shoal.api.report").report

    @report.setter
    def report(self, package: ModuleType) -> None:
        """Python binds a package to its parent when it is imported."""


sys.modules[__name__].__class__ = _Package
