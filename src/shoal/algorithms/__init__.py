"""Algorithms, one file each; a file in this folder is an algorithm that can be named."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shoal.algorithms.base import Algorithm, Loss
from shoal.data.batch import Task
from shoal.errors import InputError, check_names
from shoal.registry import Registry

registry = Registry("algorithm", "shoal.algorithms", support=frozenset({"base", "penalty"}))


def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm that the file ``name`` defines: its last subclass of :class:`Algorithm`."""
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
    found: dict[str, Any] = {}
    for cls in reversed(algorithm.__mro__):
        if "__init__" in vars(cls) and issubclass(cls, Algorithm):
            parameters = inspect.signature(cls.__init__).parameters.values()
            found |= {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return found


def build(
    algorithm: str | type[Algorithm], model: nn.Module, loss: Loss, task: Task, **settings: Any
) -> Algorithm:
    """An algorithm by name or class, with its settings checked against the ones it takes."""
    cls = algorithm_class(algorithm) if isinstance(algorithm, str) else algorithm
    check_names(f"setting of {cls.__name__}:", settings, settings_of(cls))
    return cls(model, loss, task, **settings)


__all__ = ["Algorithm", "Loss", "algorithm_class", "build", "registry", "settings_of"]
