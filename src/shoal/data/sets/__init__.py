"""Datasets by name; each file of this folder is one, with ``SUMMARY``, ``PAPER`` and ``load(**options)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.data.batch import DomainData
from shoal.registry import Registry
from shoal.settings import check

registry = Registry("dataset", "shoal.data.sets")


def load(name: str, **options: Any) -> DomainData:
    """The dataset called ``name``; ``options`` go to its own ``load``."""
    module = registry.module(name)
    data: DomainData = module.load(**check_options(name, options))
    return data


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the dataset takes them; raises InputError where it does not."""
    return check(registry.module(name).load, options, f"dataset {name!r}", "option")
