"""Datasets by name; each file of this folder is one, with ``SUMMARY``, ``PAPER`` and ``load(**options)``.

Published image datasets in folders are declared in YAML; see :mod:`shoal.data.image_sets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from shoal.data.batch import DomainData
from shoal.registry import Registry
from shoal.settings import check


class Sets(Registry):
    """The modules of this folder, and its YAML files."""

    declared: ClassVar = {path.stem.replace("_", "-"): path for path in Path(__file__).parent.glob("*.yaml")}

    def names(self) -> list[str]:
        return sorted([*super().names(), *self.declared])

    def module(self, name: str) -> ModuleType:
        path = self.declared.get(str(name).lower().replace("_", "-"))
        if path is None:
            return super().module(name)
        from shoal.data.image_sets import image_set

        return image_set(path)


registry = Sets("dataset", "shoal.data.sets")


def load(name: str, **options: Any) -> DomainData:
    """The dataset called ``name``; ``options`` go to its own ``load``."""
    data: DomainData = registry.module(name).load(**check_options(name, options))
    return data


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the dataset takes them; raises InputError where it does not."""
    return check(registry.module(name).load, options, f"dataset {name!r}", "option")
