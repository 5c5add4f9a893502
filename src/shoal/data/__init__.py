"""Domains, meta-batches, samplers, loaders and splits; and data of your own.

Names are imported when they are first used: the readers of tables, images and text need other libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.arrays import from_arrays, from_dataset
    from shoal.data.batch import DomainData, Examples, MetaBatch, Task, TensorData
    from shoal.data.domains import Domains
    from shoal.data.hub import from_hf
    from shoal.data.loader import MetaBatchLoader
    from shoal.data.sampler import DomainBatchSampler, WithDomain
    from shoal.data.splits import hold_out_domains, hold_out_examples
    from shoal.data.tables import from_table

__all__ = [
    "DomainBatchSampler",
    "DomainData",
    "Domains",
    "Examples",
    "MetaBatch",
    "MetaBatchLoader",
    "Task",
    "TensorData",
    "WithDomain",
    "from_arrays",
    "from_dataset",
    "from_hf",
    "from_table",
    "hold_out_domains",
    "hold_out_examples",
]
MODULES = {
    "arrays": ("from_arrays", "from_dataset"),
    "batch": ("DomainData", "Examples", "MetaBatch", "Task", "TensorData"),
    "domains": ("Domains",),
    "hub": ("from_hf",),
    "loader": ("MetaBatchLoader",),
    "sampler": ("DomainBatchSampler", "WithDomain"),
    "splits": ("hold_out_domains", "hold_out_examples"),
    "tables": ("from_table",),
}


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"shoal.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
