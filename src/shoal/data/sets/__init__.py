"""Datasets by name; each file of this folder is one, with ``SUMMARY``, ``PAPER`` and ``load(**options)``."""

from __future__ import annotations

import inspect
from typing import Any

from shoal.data.batch import DomainData
from shoal.errors import unknown_name
from shoal.registry import Registry

registry = Registry("dataset", "shoal.data.sets")


def load(name: str, **options: Any) -> DomainData:
    """The dataset called ``name``; ``options`` go to its own ``load``."""
    module = registry.module(name)
    known = list(inspect.signature(module.load).parameters)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of dataset {name!r}:", option, known)
    data: DomainData = module.load(**options)
    return data
