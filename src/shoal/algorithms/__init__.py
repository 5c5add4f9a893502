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
from typing import Any, get_args

from torch import nn

from shoal.algorithms.base import Algorithm, Loss
from shoal.data.batch import TASKS, Task
from shoal.errors import InputError, check_names, shown
from shoal.options import Draw
from shoal.registry import ALGORITHMS as registry
from shoal.registry import spelled
from shoal.settings import check, settings

REFERENCE = re.compile(r"(?P<place>.+\.py|\w+(\.\w+)+(?=:))(:(?P<cls>\w+))?(@(?P<digest>[0-9a-f]{16}))?")
"""``my_algorithm.py``, ``my_algorithm.py:MyClass`` or ``package.module:MyClass``, then the file's digest."""


def algorithm_class(name: str | type[Algorithm]) -> type[Algorithm]:
    """Return the class of an algorithm; of a module or file, its last subclass of :class:`Algorithm`.

    Args:
        name: name of an algorithm (`shoal list algorithms`), file such as ``my_algorithm.py`` or
            ``my_algorithm.py:MyClass``, or subclass of :class:`Algorithm`.

    Raises:
        InputError: there is no such algorithm.
    """
    if isinstance(name, type) and issubclass(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise InputError(f"algorithm must be a name or a subclass of Algorithm, got {shown(name)}.")
    if (parts := REFERENCE.fullmatch(name)) is None:
        package = registry.package_of(name)
        whose = f" of the package {package}" if package else ""
        return _class_in(registry.module(name), f"algorithm {name!r}{whose}")
    place = parts["place"]
    try:
        module, digest = _load(place)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever a file of the user's may raise
        raise InputError(f"{place!r} cannot be loaded: {type(error).__name__}: {error}.") from error
    if parts["digest"] not in (None, digest):
        raise InputError(f"{place!r} has changed since the run was planned; repeat the command.")
    return _class_in(module, repr(place), parts["cls"])


def _class_in(module: Any, whose: str, name: str | None = None) -> type[Algorithm]:
    """The class ``name`` of a module, or the last algorithm that it defines; a class is itself."""
    every = [module] if inspect.isclass(module) else getattr(module, "__dict__", {}).values()
    place = getattr(module, "__module__", None) or getattr(module, "__name__", None)
    own = [c for c in every if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == place]
    found = {c.__name__: c for c in own}
    if not found:
        raise InputError(f"{whose} is not, and does not define, a subclass of shoal.algorithms.Algorithm.")
    check_names(f"algorithm in {whose}", [name or own[-1].__name__], found)
    return found[name] if name else own[-1]


def _load(place: str) -> tuple[Any, str]:
    """A module by its name or file, imported once for each content of the file, and a digest of that."""
    if not place.endswith(".py"):
        module = importlib.import_module(place)
        return module, _digest(module.__file__)
    digest = _digest(place)
    if (name := f"shoal_algorithm_{digest}") not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, Path(place).expanduser())
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses and annotations look for its names
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name], digest


def _digest(path: str | None) -> str:
    try:
        return hashlib.sha256(Path(path or "").expanduser().read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InputError(f"the algorithm's file {path!r} cannot be read: {error.strerror}.") from error


def reference(algorithm: str | type[Algorithm]) -> str:
    """What names an algorithm in a run configuration, so that other processes find it.

    That is the name of a registered one, otherwise its file (or module) and class, with a digest of the file:
    a changed file is another algorithm. Raises InputError for a class that is not in a file.
    """
    parts = REFERENCE.fullmatch(algorithm) if isinstance(algorithm, str) else None
    if isinstance(algorithm, str) and parts is None:
        return algorithm
    cls = algorithm_class(algorithm)
    if parts is None and cls.__module__.startswith(f"{__name__}."):
        return spelled(cls.__module__.rpartition(".")[2])
    place = parts["place"] if parts else _place(cls)
    return f"{place}:{cls.__name__}@{_digest(place if place.endswith('.py') else inspect.getsourcefile(cls))}"


def _place(cls: type[Algorithm]) -> str:
    """The file or module of a class."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__ == "__main__" or file is None or "." in cls.__qualname__:
        raise InputError(
            f"{cls.__qualname__} is defined in a notebook, in a script that is being run or in a function, "
            "where other processes cannot load it. Put it in a file of its own, such as my_algorithm.py, and "
            f"use 'my_algorithm.py:{cls.__name__}' or import the class from there."
        )
    if "." in cls.__module__:
        return cls.__module__
    relative = os.path.relpath(file)
    return str(file) if relative.startswith(os.pardir) else relative


def split_draw(name: str) -> tuple[str, str | None]:
    """Split ``fish:regrouped`` into the algorithm and how its batches are sampled, if that is given."""
    algorithm, _, draw = name.rpartition(":")
    if not algorithm or (draw not in get_args(Draw) and REFERENCE.fullmatch(name)):
        return name, None
    check_names("draw", [draw], get_args(Draw))
    return algorithm, draw


def display_name(name: str) -> str:
    """The name of an algorithm in tables: the name of the class for one from a file."""
    algorithm, draw = split_draw(name)
    if parts := REFERENCE.fullmatch(algorithm):
        algorithm = parts["cls"] or Path(parts["place"]).stem
    return f"{algorithm}:{draw}" if draw else algorithm


def settings_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return the hyperparameters of an ``algorithm``, including inherited ones, with their defaults."""
    other = () if algorithm.needs_features else ("features",)
    return {name: s.default for name, s in settings(algorithm).items() if name not in other}


def check_settings(cls: type[Algorithm], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters ``given`` for an algorithm ``cls``, converted to their types.

    Raises:
        InputError: a hyperparameter is unknown or has an invalid value.
    """
    check_names(f"setting of {cls.__name__}:", given, settings_of(cls))
    return check(cls, given, cls.__name__)


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

    Raises:
        InputError: a hyperparameter is unknown or has an invalid value, or the algorithm does not support
            the task.
    """
    cls = algorithm_class(algorithm)
    settings = check_settings(cls, settings)
    if task.kind not in cls.tasks:
        known = " and ".join(kind for kind in TASKS if kind in cls.tasks)
        raise InputError(f"{cls.__name__} supports {known}, and this task is {task.kind}.")
    return cls(model, loss, task, **settings)


def __getattr__(name: str) -> type[Algorithm]:
    """Every algorithm by the name of its class, imported when it is first used."""
    for module in registry.names():
        if module.replace("-", "") == name.lower():
            return algorithm_class(module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Algorithm", "Loss", "algorithm_class", "build", "check_settings", "registry", "settings_of"]
