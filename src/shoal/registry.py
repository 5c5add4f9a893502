"""Finding algorithms, datasets and models by name: whatever file is in the folder is registered."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from shoal.errors import unknown_name


class Registry:
    """The modules of one package, looked up by name.

    A module ``random_thing.py`` is known as ``random-thing``; modules in ``support`` are the package's own
    machinery and are not offered. Nothing is imported before it is asked for, so listing names is cheap.
    """

    def __init__(self, kind: str, package: str, support: frozenset[str] = frozenset()) -> None:
        self.kind = kind
        self.package = package
        self.support = support

    def names(self) -> list[str]:
        path = importlib.import_module(self.package).__path__
        found = (m.name for m in pkgutil.iter_modules(path))
        return sorted(n.replace("_", "-") for n in found if n not in self.support)

    def module(self, name: str) -> ModuleType:
        key = str(name).lower().replace("_", "-")
        if key not in self.names():
            raise unknown_name(self.kind, name, self.names())
        return importlib.import_module(f"{self.package}.{key.replace('-', '_')}")
