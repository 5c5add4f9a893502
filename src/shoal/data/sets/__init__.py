"""Datasets by name; each file of this folder is one, with ``SUMMARY``, ``PAPER`` and ``load(**options)``."""

from __future__ import annotations

import inspect
from typing import Any

from shoal.data.batch import DomainData
from shoal.errors import check_names
from shoal.registry import Registry

registry = Registry("dataset", "shoal.data.sets")


def load(name: str, **options: Any) -> DomainData:
    """The dataset called ``name``; ``options`` go to its own ``load``."""
    module = registry.module(name)
    check_names(f"option of dataset {name!r}:", options, inspect.signature(module.load).parameters)
    data: DomainData = module.load(**options)
    return data
