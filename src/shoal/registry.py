"""Algorithms, datasets and models by name: Shoal's own, and what installed packages add to them.

A package adds names by entry points in the groups ``shoal.algorithms``, ``shoal.datasets`` and
``shoal.models``. Once it is installed, every function and command takes them.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError, unknown_name

FOLDER = Path(__file__).parent


class Package(NamedTuple):
    """An installed distribution."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def spelled(name: object) -> str:
    """A name as it is registered: ``Random_Thing`` is ``random-thing``."""
    return str(name).lower().replace("_", "-")


@dataclass(frozen=True)
class Registry:
    """Names of Shoal's own objects, and the entry points of the group ``shoal.{kind}s``.

    Nothing is imported before it is asked for, so listing names is cheap. A package that cannot be imported
    does no harm to other names, and none can take a name that is taken.
    """

    kind: str
    own: Mapping[str, str]
    """Shoal's own by name, as ``"module"`` or ``"module:object"``."""
    reserved: tuple[str, ...] = ()
    """Names that mean something else."""
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
        try:
            found = entry.load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module may raise
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise InputError(
                f"{self._described(entry)} cannot be imported ({entry.value}): {why}."
            ) from error
        if lacking := " and no ".join(need for need in self.needs if not hasattr(found, need)):
            raise InputError(f"{self._described(entry)}: {entry.value} has no {lacking}.")
        return found

    def having(self, attribute: str) -> list[str]:
        """The names of those that have ``attribute``; what cannot be imported has none."""
        unusable = self.problems().keys() - self.own.keys()
        return [n for n in self.names() if n not in unusable and hasattr(self.module(n), attribute)]

    def package_of(self, name: str) -> Package | None:
        """The installed package that adds ``name``; ``None`` for Shoal's own."""
        entry = self._added().get(spelled(name))
        return None if entry is None else _package(entry)

    def problems(self) -> dict[str, str]:
        """What is wrong with entry points, by name. This imports them."""
        found, added = {}, self._added()
        for entry in _entry_points(self.kind, tuple(sys.path)):
            if added.get(key := spelled(entry.name)) is not entry:
                why = "the name is taken, or not of letters, digits and dashes"
                found[key] = f"{self._described(entry)} is ignored: {why}."
                continue
            try:
                self.module(key)
            except InputError as error:
                found[key] = str(error)
        return found

    def _added(self) -> dict[str, EntryPoint]:
        """Entry points by name; of those with the same name the first."""
        every = {spelled(entry.name): entry for entry in reversed(_entry_points(self.kind, tuple(sys.path)))}
        taken = {*self.own, *self.reserved}
        return {n: entry for n, entry in every.items() if re.fullmatch("[a-z0-9-]+", n) and n not in taken}

    def _described(self, entry: EntryPoint) -> str:
        return f"{self.kind} {spelled(entry.name)!r} of the package {_package(entry)}"


@functools.lru_cache(maxsize=16)
def _entry_points(kind: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of all packages on ``path``, which is ``sys.path``."""
    return tuple(entry_points(group=f"shoal.{kind}s"))


def _package(entry: EntryPoint) -> Package:
    return Package("", "") if entry.dist is None else Package(spelled(entry.dist.name), entry.dist.version)


def _in_module(module: str, *names: str) -> dict[str, str]:
    """Names of objects in one module."""
    return {name: f"shoal.{module}:{name.replace('-', '_')}" for name in names}


BASELINES = ("majority", "logistic-regression", "ridge-regression", "gradient-boosting")
RECIPES = ("auto", "erm++", "lp-ft", "miro", "swad")
ALGORITHMS = Registry(
    "algorithm",
    {
        spelled(module.name): f"shoal.algorithms.{module.name}"
        for module in pkgutil.iter_modules([str(FOLDER / "algorithms")])
        if module.name not in ("base", "penalty")
    },
    reserved=("all", *BASELINES, *RECIPES),
)
DATASETS = Registry(
    "dataset",
    {
        **_in_module(
            "datasets.wilds", "amazon", "camelyon17", "civilcomments", "fmow", "iwildcam", "poverty"
        ),
        **_in_module(
            "datasets.digits", "coloured-digits", "coloured-mnist", "rotated-digits", "rotated-mnist"
        ),
        **_in_module("datasets.folders", "domainnet", "office-home", "pacs", "terra-incognita", "vlcs"),
        **_in_module("datasets.cdsprites", "cdsprites"),
        **_in_module("datasets.linear", "linear"),
        **_in_module("datasets.own", "image-folder", "manifest"),
        **{"heart": "shoal.datasets.heart", "table": "shoal.datasets.table"},
    },
    reserved=("python",),
    needs=("load", "SUMMARY", "PAPER"),
)
SMALL = ("linear", "mlp", "mnist-cnn", "pixel-linear", "small-cnn", "sprite-cnn", "tabular", "tfidf-linear")
MODELS = Registry("model", _in_module("models.small", *SMALL), needs=("build",))
