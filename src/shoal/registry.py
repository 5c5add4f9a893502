"""Algorithms, datasets and models by name: Shoal's own, and what installed packages add to them.

A package adds names by entry points in the groups ``shoal.algorithms``, ``shoal.datasets`` and
``shoal.models``. Once it is installed, every function and command takes them.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from shoal.errors import InputError, unknown_name

FOLDER = Path(__file__).parent


def spelled(name: object) -> str:
    """A name as it is registered: ``Random_Thing`` is ``random-thing``."""
    return str(name).lower().replace("_", "-")


@dataclass(frozen=True)
class Registry:
    """Names of Shoal's own objects, and the entry points of the group ``shoal.{kind}s``.

    Nothing is imported before it is asked for, so listing names is cheap. A package that cannot be imported
    does no harm to other names, and an entry point whose name is taken is ignored.
    """

    kind: str
    own: Mapping[str, str]
    """Shoal's own by name, as ``"module"`` or ``"module:object"``."""
    needs: tuple[str, ...] = ()
    """Attributes that an entry point must have."""

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.kind}s"

    def names(self) -> list[str]:
        return sorted({*self.own, *self._added()})

    def module(self, name: str) -> Any:
        """What is called ``name``: a module or, where an entry point names one, a class."""
        key = spelled(name)
        if key in self.own:
            return pkgutil.resolve_name(self.own[key])
        if (entry := self._added().get(key)) is None:
            raise unknown_name(self.kind, name, self.names())
        whose = f"{self.kind} {key!r} of the package {self.package_of(name)}"
        try:
            found = entry.load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module may raise
            raise InputError(
                f"{whose} cannot be imported ({entry.value}): {type(error).__name__}: {error}"
            ) from error
        if lacking := " and no ".join(need for need in self.needs if not hasattr(found, need)):
            raise InputError(f"{whose}: {entry.value} has no {lacking}.")
        return found

    def having(self, attribute: str) -> list[str]:
        """Those of Shoal's own that have ``attribute``."""
        return [name for name in sorted(self.own) if hasattr(self.module(name), attribute)]

    def package_of(self, name: str) -> str | None:
        """The installed package that adds ``name``, with its version; ``None`` for Shoal's own."""
        entry = self._added().get(spelled(name))
        return f"{spelled(entry.dist.name)} {entry.dist.version}" if entry and entry.dist else None

    def _added(self) -> dict[str, EntryPoint]:
        """Entry points by name; of those with the same name the first."""
        found = _entry_points(f"shoal.{self.kind}s", tuple(sys.path))
        return {name: entry for name, entry in found.items() if name not in self.own}


@functools.lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Those of all packages on ``path``, which is ``sys.path``."""
    return {spelled(entry.name): entry for entry in reversed(tuple(entry_points(group=group)))}


def _in_module(module: str, *names: str) -> dict[str, str]:
    """Names of objects in one module."""
    return {name: f"shoal.{module}:{name.replace('-', '_')}" for name in names}


ALGORITHMS = Registry(
    "algorithm",
    {
        spelled(module.name): f"shoal.algorithms.{module.name}"
        for module in pkgutil.iter_modules([str(FOLDER / "algorithms")])
        if module.name not in ("base", "penalty")
    },
)
DATASETS = Registry(
    "dataset",
    _in_module("datasets.wilds", "amazon", "camelyon17", "civilcomments", "fmow", "iwildcam", "poverty")
    | _in_module("datasets.digits", "coloured-digits", "coloured-mnist", "rotated-digits", "rotated-mnist")
    | _in_module("datasets.folders", "domainnet", "office-home", "pacs", "terra-incognita", "vlcs")
    | _in_module("datasets.own", "image-folder", "manifest")
    | {name: f"shoal.datasets.{name}:{name}" for name in ("cdsprites", "linear")}
    | {name: f"shoal.datasets.{name}" for name in ("heart", "table")},
    needs=("load", "SUMMARY", "PAPER"),
)
SMALL = ("linear", "mlp", "mnist-cnn", "pixel-linear", "small-cnn", "sprite-cnn", "tabular", "tfidf-linear")
MODELS = Registry("model", _in_module("models.small", *SMALL), needs=("build",))
