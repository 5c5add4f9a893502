"""Algorithms, one file each; a file in this folder, or an entry point, is an algorithm that can be named.

How a package of your own adds one: :mod:`shoal.registry`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.algorithms.base import Algorithm, Loss
from shoal.data.batch import TASKS, Task
from shoal.errors import InputError, check_names
from shoal.registry import ALGORITHMS as registry
from shoal.settings import check, checked, settings, shown

GIVEN = ("model", "loss", "task")
"""What every algorithm is made from, beside its settings."""


def algorithm_class(name: str | type[Algorithm]) -> type[Algorithm]:
    """Return the class of an algorithm.

    Args:
        name: name of an algorithm (`shoal list algorithms`), or a subclass of :class:`Algorithm`.

    Returns:
        The class; of a module, its last subclass of :class:`Algorithm`.

    Raises:
        InputError: there is no such algorithm.
    """
    if isinstance(name, type) and issubclass(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise InputError(f"algorithm must be a name or a subclass of Algorithm, got {shown(name)}.")
    module = registry.module(name)
    if inspect.isclass(module) and issubclass(module, Algorithm):
        return module
    found = [
        c
        for c in (vars(module).values() if inspect.ismodule(module) else ())
        if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == module.__name__
    ]
    if not found:
        package = registry.package_of(name)
        whose = f"algorithm {name!r} of the package {package}: " if package else ""
        what = getattr(module, "__name__", shown(module))
        raise InputError(
            f"{whose}{what} is not, and does not define, a subclass of shoal.algorithms.Algorithm."
        )
    return found[-1]


def settings_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return the hyperparameters of an algorithm, with their defaults.

    Args:
        algorithm: subclass of :class:`Algorithm`.

    Returns:
        Default value of each hyperparameter, including inherited ones.
    """
    other = GIVEN if algorithm.needs_features else (*GIVEN, "features")
    return {name: s.default for name, s in settings(algorithm).items() if name not in other}


@checked
def build(
    algorithm: str | type[Algorithm], model: nn.Module, loss: Loss, task: Task, **settings: Any
) -> Algorithm:
    """Build an algorithm.

    Args:
        algorithm: name of an algorithm, or a subclass of :class:`Algorithm`.
        model: model to train.
        loss: ``loss(output, y)``, a mean over examples.
        task: number of domains and classes, and kind of the task.
        **settings: hyperparameters of the algorithm.

    Returns:
        The algorithm.

    Raises:
        InputError: a hyperparameter is unknown or has an invalid value, or the algorithm does not support
            the task.
    """
    cls = algorithm_class(algorithm)
    settings = check_settings(cls, settings)
    check_fit(cls, task)
    return cls(model, loss, task, **settings)


def check_settings(cls: type[Algorithm], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check hyperparameters of an algorithm.

    Args:
        cls: subclass of :class:`Algorithm`.
        given: hyperparameters.

    Returns:
        The hyperparameters, converted to their types.

    Raises:
        InputError: a hyperparameter is unknown or has an invalid value.
    """
    check_names(f"setting of {cls.__name__}:", given, settings_of(cls))
    return check(cls, given, cls.__name__)


def check_fit(cls: type[Algorithm], task: Task) -> None:
    """Check that an algorithm supports a task.

    Args:
        cls: subclass of :class:`Algorithm`.
        task: the task.

    Raises:
        InputError: the algorithm does not support the task.
    """
    instead = f" Alternatives: {', '.join(cls.instead)}." if cls.instead else ""
    if task.kind not in cls.tasks:
        known = " and ".join(kind for kind in TASKS if kind in cls.tasks)
        raise InputError(f"{cls.__name__} supports {known}, and this task is {task.kind}.{instead}")
    if cls.trains_discriminator and task.features is None:
        raise InputError(f"{cls.__name__} requires the number of features: Task(…, features=…).")


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
