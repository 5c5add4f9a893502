"""Algorithms, one file each; a file in this folder is an algorithm that can be named."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.algorithms.base import Algorithm, Loss
from shoal.data.batch import TASKS, Task
from shoal.errors import InputError, check_names
from shoal.models import FeatureModel
from shoal.registry import Registry
from shoal.settings import check, checked, settings, shown

GIVEN = ("model", "loss", "task")
"""What every algorithm is made from, beside its settings."""
registry = Registry("algorithm", "shoal.algorithms", support=frozenset({"base", "penalty"}))


def algorithm_class(name: str | type[Algorithm]) -> type[Algorithm]:
    """The algorithm that the file ``name`` defines: its last subclass of :class:`Algorithm`; or a class."""
    if isinstance(name, type) and issubclass(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise InputError(f"algorithm must be a name or a subclass of Algorithm, got {shown(name)}.")
    module = registry.module(name)
    found = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == module.__name__
    ]
    if not found:
        raise InputError(f"{module.__name__} defines no subclass of shoal.algorithms.Algorithm.")
    return found[-1]


def settings_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """The settings an algorithm takes, with their defaults, those of its parents included."""
    return {name: s.default for name, s in settings(algorithm).items() if name not in GIVEN}


@checked
def build(
    algorithm: str | type[Algorithm], model: nn.Module, loss: Loss, task: Task, **settings: Any
) -> Algorithm:
    """An algorithm by name or class, with its settings checked against the ones it takes."""
    cls = algorithm_class(algorithm)
    settings = check_settings(cls, settings)
    check_fit(cls, model, task)
    return cls(model, loss, task, **settings)


def check_settings(cls: type[Algorithm], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the algorithm takes them; raises InputError where it does not."""
    check_names(f"setting of {cls.__name__}:", given, settings_of(cls))
    return check(cls, given, cls.__name__)


def check_fit(cls: type[Algorithm], model: nn.Module, task: Task) -> None:
    """Raises InputError where the algorithm cannot do the task, or not with this model."""
    instead = f" Others can: {', '.join(cls.instead)}." if cls.instead else ""
    if task.kind not in cls.tasks:
        known = " and ".join(kind for kind in TASKS if kind in cls.tasks)
        raise InputError(f"{cls.__name__} is for {known}, and this is {task.kind}.{instead}")
    if cls.needs_features and not isinstance(model, FeatureModel):
        raise InputError(
            f"{cls.__name__} looks at features: give it a shoal.models.FeatureModel(features, head), your "
            f"model in two parts, not a {type(model).__name__}. "
            "Algorithms such as fish, irm, vrex or groupdro need none."
        )
    if cls.trains_adversary and task.features is None:
        raise InputError(f"{cls.__name__} must know how many features there are: Task(…, features=…).")


def __getattr__(name: str) -> type[Algorithm]:
    """Every algorithm by the name of its class, imported when it is first used."""
    for module in registry.names():
        if module.replace("-", "") == name.lower():
            return algorithm_class(module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Algorithm",
    "Loss",
    "algorithm_class",
    "build",
    "check_fit",
    "check_settings",
    "registry",
    "settings_of",
]
