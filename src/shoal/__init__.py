"""Shoal: domain generalization. Train models that work in places they have never seen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from shoal.api.fit import Fit, fit
    from shoal.errors import InputError
    from shoal.scoring import Score, score
    from shoal.trained import Trained, load
    from shoal.training.callbacks import Callback

# Names are imported when first used: `import shoal` and `shoal --help` must not wait for torch.
_HOME = {
    "fit": "shoal.api.fit",
    "Fit": "shoal.api.fit",
    "Callback": "shoal.training.callbacks",
    "load": "shoal.trained",
    "Trained": "shoal.trained",
    "score": "shoal.scoring",
    "Score": "shoal.scoring",
    "InputError": "shoal.errors",
}

__all__ = ["Callback", "Fit", "InputError", "Score", "Trained", "__version__", "fit", "load", "score"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
