"""Algorithms, datasets and models by name: Shoal's own files, and what installed packages add to them.

A file in the folder is registered by being there. A package of anybody's adds names by entry points, in the
groups ``shoal.algorithms``, ``shoal.datasets`` and ``shoal.models``:

.. code-block:: toml

    [project.entry-points."shoal.algorithms"]
    my-method = "my_package.methods:MyMethod"   # a subclass of Algorithm, or a module that defines one

    [project.entry-points."shoal.datasets"]
    my-data = "my_package.data"   # a module with SUMMARY, PAPER and load(**options)

Once it is installed, ``shoal train my-method my-data`` works, and so does every other function and command.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError, unknown_name


class Package(NamedTuple):
    """An installed distribution."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def spelled(name: object) -> str:
    """A name as it is registered: ``Random_Thing`` is ``random-thing``."""
    return str(name).lower().replace("_", "-")


class Registry:
    """The modules of one package of Shoal's and the entry points of one group, looked up by name.

    Nothing is imported before it is asked for, so listing names is cheap. A package that cannot be imported
    does no harm to other names, and none can take a name of Shoal's own.

    Args:
        kind: what the names are of; the entry points are those of the group ``shoal.{kind}s``.
        package: where Shoal's own are; a module ``random_thing.py`` is known as ``random-thing``.
        support: modules there that are the package's own machinery and are not offered.
        listed: Shoal's own as ``"module:object"``, in place of the modules of the package.
        reserved: names that mean something else.
        needs: what an entry point must have.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        *,
        support: frozenset[str] = frozenset(),
        listed: Mapping[str, str] | None = None,
        reserved: frozenset[str] = frozenset(),
        needs: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.package = package
        self.support = support
        self.listed = listed
        self.reserved = reserved
        self.needs = needs
        self.folder = Path(__file__).parent.joinpath(*package.split(".")[1:])

    @cached_property
    def own(self) -> dict[str, str]:
        """Shoal's own, by name: a module's name or ``"module:object"``."""
        if self.listed is not None:
            return dict(self.listed)
        names = (m.name for m in pkgutil.iter_modules([str(self.folder)]))
        return {spelled(n): f"{self.package}.{n}" for n in names if n not in self.support}

    def names(self) -> list[str]:
        return sorted({*self.own, *self._offered()[0]})

    def module(self, name: str) -> Any:
        """What is called ``name``: a module or, where an entry point names one, a class."""
        key = spelled(name)
        offered, refused = self._offered()
        if key in self.own:
            if key in refused:
                warnings.warn(refused[key], stacklevel=2)
            return pkgutil.resolve_name(self.own[key])
        if key not in offered:
            _entry_points.cache_clear()  # it may have been installed since
            offered = self._offered()[0]
        if key not in offered:
            raise unknown_name(self.kind, name, self.names())
        (entry, package), *others = offered[key]
        if others:
            which = " and ".join(str(each) for _, each in offered[key])
            raise InputError(
                f"{self.kind} {key!r} is defined by two packages, {which}; uninstall one of them."
            )
        try:
            found = entry.load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module may raise
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise InputError(
                f"{self.kind} {key!r} of the package {package} cannot be imported ({entry.value}): {why}."
            ) from error
        if lacking := " and no ".join(need for need in self.needs if not hasattr(found, need)):
            what = f"{self.kind} {key!r} of the package {package}"
            raise InputError(f"{what}: {entry.value} has no {lacking}.")
        return found

    def having(self, attribute: str) -> list[str]:
        """The names of those that have ``attribute``; what cannot be imported has none."""
        problems = self.problems().keys() - self.own.keys()
        return [n for n in self.names() if n not in problems and hasattr(self.module(n), attribute)]

    def package_of(self, name: str) -> Package | None:
        """The installed package that adds ``name``; ``None`` for Shoal's own."""
        offered = self._offered()[0].get(spelled(name), ())
        return offered[0][1] if offered else None

    def problems(self) -> dict[str, str]:
        """What is wrong with entry points, by name. This imports them."""
        offered, found = self._offered()
        found = dict(found)
        for name in offered:
            try:
                self.module(name)
            except InputError as error:
                found[name] = str(error)
        return found

    def _offered(self) -> tuple[dict[str, list[tuple[EntryPoint, Package]]], dict[str, str]]:
        """Entry points by name, and why others are not taken."""
        offered, refused = defaultdict(list), {}
        for entry, package in _entry_points(f"shoal.{self.kind}s", tuple(sys.path)):
            key = spelled(entry.name)
            if key in self.own:
                refused[key] = (
                    f"{self.kind} {key!r} of the package {package} is ignored: the name is used by Shoal."
                )
            elif key in self.reserved or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key):
                why = "is reserved" if key in self.reserved else "must consist of letters, digits and dashes"
                refused[key] = f"{self.kind} {key!r} of the package {package} is ignored: its name {why}."
            else:
                offered[key].append((entry, package))
        return dict(offered), refused


@lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[tuple[EntryPoint, Package], ...]:
    """The entry points of a group in all packages on ``path``, which is ``sys.path``."""
    found: dict[str, list[tuple[EntryPoint, Package]]] = {}
    for each in distributions(path=list(path)):
        try:
            if f"[{group}]" not in (each.read_text("entry_points.txt") or ""):
                continue  # most, without reading more of them
            package = Package(spelled(each.metadata["Name"]), str(each.version))
            found.setdefault(package.name, [(e, package) for e in each.entry_points.select(group=group)])
        except Exception:  # of damaged metadata, which must not hide what others add
            continue
    return tuple(pair for pairs in found.values() for pair in pairs)


ALGORITHMS = Registry(
    "algorithm",
    "shoal.algorithms",
    support=frozenset({"base", "penalty"}),
    reserved=frozenset(
        {
            *("all", "majority", "logistic-regression", "ridge-regression", "gradient-boosting"),
            *("auto", "erm++", "lp-ft", "miro", "swad"),
        }
    ),
)
DATASETS = Registry(
    "dataset",
    "shoal.datasets",
    listed={
        **{
            name: f"shoal.datasets.wilds:{name}" for name in ("amazon", "camelyon17", "civilcomments", "fmow")
        },
        **{name: f"shoal.datasets.wilds:{name}" for name in ("iwildcam", "poverty")},
        "coloured-digits": "shoal.datasets.digits:coloured_digits",
        "coloured-mnist": "shoal.datasets.digits:coloured_mnist",
        "rotated-digits": "shoal.datasets.digits:rotated_digits",
        "rotated-mnist": "shoal.datasets.digits:rotated_mnist",
        **{name: f"shoal.datasets.folders:{name}" for name in ("domainnet", "pacs", "vlcs")},
        "office-home": "shoal.datasets.folders:office_home",
        "terra-incognita": "shoal.datasets.folders:terra_incognita",
        "cdsprites": "shoal.datasets.cdsprites:cdsprites",
        "linear": "shoal.datasets.linear:linear",
        "image-folder": "shoal.datasets.own:image_folder",
        "manifest": "shoal.datasets.own:manifest",
        "heart": "shoal.datasets.heart",
        "table": "shoal.datasets.table",
    },
    reserved=frozenset({"python"}),
    needs=("load", "SUMMARY", "PAPER"),
)
MODELS = Registry(
    "model",
    "shoal.models",
    listed={
        name: f"shoal.models.small:{name.replace('-', '_')}"
        for name in ("linear", "mlp", "mnist-cnn", "small-cnn", "sprite-cnn", "tabular")
    },
    needs=("build",),
)
