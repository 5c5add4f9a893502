"""Shoal: domain generalization. Train models that work in places they have never seen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from shoal.api.diagnose import Diagnosis, diagnose
    from shoal.errors import InputError
    from shoal.scoring import Score, score
    from shoal.trained import Trained, load
    from shoal.training.fit import Fit, fit

# Names are imported when first used: `import shoal` and `shoal --help` must not wait for torch.
_HOME = {
    "diagnose": "shoal.api.diagnose",
    "Diagnosis": "shoal.api.diagnose",
    "fit": "shoal.training.fit",
    "Fit": "shoal.training.fit",
    "load": "shoal.trained",
    "Trained": "shoal.trained",
    "score": "shoal.scoring",
    "Score": "shoal.scoring",
    "InputError": "shoal.errors",
}

__all__ = [
    "Diagnosis",
    "Fit",
    "InputError",
    "Score",
    "Trained",
    "__version__",
    "diagnose",
    "fit",
    "load",
    "score",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
