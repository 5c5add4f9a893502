"""Algorithms, one file each.

An algorithm of your own is a subclass of :class:`Algorithm`. It is used as the class itself, as its file
(``my_algorithm.py`` or ``my_algorithm.py:MyClass``), or by a name that a package adds with an entry point
(:mod:`shoal.registry`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from torch import nn

from shoal.algorithms.base import Algorithm, Loss
from shoal.data.batch import TASKS, Task
from shoal.errors import InputError, check_names
from shoal.options import Draw
from shoal.registry import ALGORITHMS as registry
from shoal.registry import spelled
from shoal.settings import check, checked, settings, shown

GIVEN = ("model", "loss", "task")
"""What every algorithm is made from, beside its settings."""
REFERENCE = re.compile(
    r"(?P<file>.+\.py)(:(?P<cls>\w+))?(@(?P<digest>[0-9a-f]{16}))?"
    r"|(?P<module>\w+(\.\w+)+):(?P<name>\w+)(@(?P<version>[0-9a-f]{16}))?"
)
"""``my_algorithm.py``, ``my_algorithm.py:MyClass`` or ``package.module:MyClass``, then the file's digest."""


def algorithm_class(name: str | type[Algorithm]) -> type[Algorithm]:
    """Return the class of an algorithm.

    Args:
        name: name of an algorithm (`shoal list algorithms`), file such as ``my_algorithm.py`` or
            ``my_algorithm.py:MyClass``, or subclass of :class:`Algorithm`.

    Returns:
        The class; of a module or file, its last subclass of :class:`Algorithm`.

    Raises:
        InputError: there is no such algorithm.
    """
    if isinstance(name, type) and issubclass(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise InputError(f"algorithm must be a name or a subclass of Algorithm, got {shown(name)}.")
    if parts := REFERENCE.fullmatch(name):
        return _referenced(name, parts)
    module = registry.module(name)
    package = registry.package_of(name)
    whose = f"algorithm {name!r} of the package {package}: " if package else ""
    return _defined_in(module, whose)


def _defined_in(module: Any, whose: str = "", name: str | None = None) -> type[Algorithm]:
    """The class ``name`` of a module, or the last algorithm that it defines."""
    if inspect.isclass(module) and issubclass(module, Algorithm):
        return module
    found = [
        c
        for c in (vars(module).values() if inspect.ismodule(module) else ())
        if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == module.__name__
    ]
    if name is not None:
        check_names("algorithm", [name], [c.__name__ for c in found])
        found = [c for c in found if c.__name__ == name]
    if not found:
        what = getattr(module, "__file__", None) or getattr(module, "__name__", shown(module))
        raise InputError(
            f"{whose}{what} is not, and does not define, a subclass of shoal.algorithms.Algorithm."
        )
    return found[-1]


def _referenced(name: str, parts: re.Match[str]) -> type[Algorithm]:
    """The class in a file or an importable module, which must have the digest of the reference."""
    if parts["file"]:
        cls, expected = parts["cls"], parts["digest"]
        digest = _digest(parts["file"])
        module = _loaded_file(Path(parts["file"]), digest)
    else:
        cls, expected = parts["name"], parts["version"]
        try:
            module = importlib.import_module(parts["module"])
        except ImportError as error:
            raise InputError(f"algorithm {name!r} cannot be imported: {error}.") from error
        digest = _digest(module.__file__)
    if expected not in (None, digest):
        place = parts["file"] or parts["module"]
        raise InputError(f"{place!r} has changed since the run was planned; repeat the command.")
    return _defined_in(module, name=cls)


def _digest(path: str | None) -> str:
    try:
        return hashlib.sha256(Path(path or "").expanduser().read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InputError(f"the algorithm's file {path!r} cannot be read: {error.strerror}.") from error


def _loaded_file(path: Path, digest: str) -> ModuleType:
    """The module in a file, loaded once for each content."""
    name = f"shoal_algorithm_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path.expanduser())
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever a file of the user's may raise
            del sys.modules[name]
            raise InputError(f"{str(path)!r} cannot be loaded: {type(error).__name__}: {error}.") from error
    return sys.modules[name]


def reference(algorithm: str | type[Algorithm]) -> str:
    """Return what names an algorithm in a run configuration, so that other processes find it.

    That is the name of a registered one, otherwise its file (or module) and class, with a digest of the file:
    a changed file is another algorithm.

    Args:
        algorithm: as for :func:`algorithm_class`.

    Raises:
        InputError: there is no such algorithm, or its class is not in a file that can be loaded.
    """
    parts = REFERENCE.fullmatch(algorithm) if isinstance(algorithm, str) else None
    if isinstance(algorithm, str) and parts is None:
        return algorithm
    cls = algorithm_class(algorithm)
    if parts is not None:
        place: str = parts["file"] or parts["module"]
    elif cls.__module__.startswith(f"{__name__}."):
        return spelled(cls.__module__.rpartition(".")[2])
    else:
        place = _place(cls)
    file = place if place.endswith(".py") else inspect.getsourcefile(cls)
    return f"{place}:{cls.__name__}@{_digest(file)}"


def _place(cls: type[Algorithm]) -> str:
    """The file or module of a class."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" or file is None or "." in cls.__qualname__:
        raise InputError(
            f"{cls.__qualname__} is defined in a notebook, in a script that is being run or in a function, "
            "where other processes cannot load it. Put it in a file of its own, such as my_algorithm.py, and "
            f"use 'my_algorithm.py:{cls.__name__}' or import the class from there."
        )
    if "." in cls.__module__ and not cls.__module__.startswith("shoal_algorithm_"):
        return cls.__module__
    relative = os.path.relpath(file)
    return str(file) if relative.startswith(os.pardir) else relative


def split_draw(name: str) -> tuple[str, str | None]:
    """Split ``fish:regrouped`` into the algorithm and how its batches are sampled.

    Args:
        name: algorithm, with or without a way of sampling.

    Raises:
        InputError: there is no such way of sampling.
    """
    algorithm, _, draw = name.rpartition(":")
    if not algorithm or (draw not in get_args(Draw) and REFERENCE.fullmatch(name)):
        return name, None
    check_names("draw", [draw], get_args(Draw))
    return algorithm, draw


def display_name(name: str) -> str:
    """Return the name of an algorithm in tables: the name of the class for one from a file.

    Args:
        name: algorithm, with or without a way of sampling.
    """
    algorithm, draw = split_draw(name)
    if parts := REFERENCE.fullmatch(algorithm):
        algorithm = parts["cls"] or parts["name"] or Path(parts["file"]).stem
    return f"{algorithm}:{draw}" if draw else algorithm


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
    if task.kind not in cls.tasks:
        known = " and ".join(kind for kind in TASKS if kind in cls.tasks)
        raise InputError(f"{cls.__name__} supports {known}, and this task is {task.kind}.")


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
