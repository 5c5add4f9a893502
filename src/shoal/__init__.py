"""Shoal: domain generalization. Train models that work on domains they were not trained on."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0.dev0"

if TYPE_CHECKING:  # imported when first used: `import shoal` and `shoal --help` must not wait for torch
    from shoal import algorithms as algorithms
    from shoal import data as data
    from shoal import experiments as experiments
    from shoal import gradients as gradients
    from shoal import models as models
    from shoal import optim as optim
    from shoal import penalties as penalties
    from shoal import sklearn as sklearn
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

_tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
_imports = [each for each in ast.walk(_tree) if isinstance(each, ast.ImportFrom)]
_HOME = {a.name: i.module for i in _imports if (i.module or "").startswith("shoal") for a in i.names}
"""The names above, with the modules that they are imported from."""

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    if (home := _HOME[name]) == "shoal":
        return importlib.import_module(f"shoal.{name}")
    return getattr(importlib.import_module(str(home)), name)


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
