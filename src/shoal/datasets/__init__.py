"""Datasets by name: one file per family, published image folders in YAML.

How a package of your own adds a dataset: :mod:`shoal.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.data.batch import DomainData
from shoal.registry import DATASETS as registry
from shoal.settings import check


def load(name: str, **options: Any) -> DomainData:
    """The dataset called ``name``; ``options`` go to its own ``load``."""
    data: DomainData = registry.module(name).load(**check_options(name, options))
    return data


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the dataset takes them; raises InputError where it does not."""
    return check(registry.module(name).load, options, f"dataset {name!r}", "option")


__all__ = ["check_options", "load", "registry"]
