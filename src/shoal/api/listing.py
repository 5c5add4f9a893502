"""``shoal list``: the algorithms, baselines, recipes and datasets, and what they take."""

from __future__ import annotations

import shutil
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.api.result import Result
from shoal.api.source import listed_names
from shoal.errors import InputError, unknown_name
from shoal.options import public

if TYPE_CHECKING:
    from shoal.settings import Setting

SPACES = {"choice": "one of {}", "uniform": "U{}", "log10": "10^U{}", "log2": "2^U{}"}
LARGE = "for large images and pretrained models"
FOOTNOTE = """\
Baselines for tables: {baselines}.
Recipes for pretrained models: {recipes}.
step: time per step relative to ERM on the same examples ({measured}).
batches: domains = one batch from each of S domains; pooled = from all examples;
  balanced = mixed, with an equal share of each domain; one-domain = S batches from one domain.
features: uses the input of the last linear layer of the model.
For details: shoal list NAME"""


@dataclass(frozen=True)
class Listing(Result):
    """The result of :func:`listing`.

    Attributes:
        algorithms: algorithms, baselines and recipes.
        datasets: datasets.
        unavailable: what cannot be imported, with the reason.
        text: text that ``print`` shows.
    """

    algorithms: Sequence[Mapping[str, Any]] = ()
    datasets: Sequence[Mapping[str, Any]] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        names = ("algorithms", "datasets", "unavailable")
        return {name: found for name in names if (found := getattr(self, name))}

    def __str__(self) -> str:
        return "\n\n".join([self.text, *(f"Not available: {why}" for why in self.unavailable.values())])


@public()
def listing(names: Sequence[str] = ()) -> Listing:
    """List the algorithms and datasets, or show what some of them are and take.

    Args:
        names: algorithms, datasets, or names of them, such as fish, to show with all details (default:
            algorithms and datasets).
    """
    from shoal.registry import ALGORITHMS, DATASETS, spelled

    found: dict[str, list[dict[str, Any]]] = {"algorithms": [], "datasets": []}
    unavailable: dict[str, str] = {}
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of packages: the same is listed as not available
        for word in map(spelled, listed_names(names) or found):
            if word in found:
                registry, entry = (ALGORITHMS, _algorithm) if word == "algorithms" else (DATASETS, _brief)
                entries = []
                for name in registry.names():
                    try:
                        entries.append(entry(name))
                    except InputError as error:  # of a package that defines something else
                        unavailable[name] = str(error)
                texts.append(_table(entries) if word == "algorithms" else _summaries(entries))
            else:
                word, entries = _named(word)
                texts += map(_in_full, entries)
            found[word] += entries
    return Listing(found["algorithms"], found["datasets"], unavailable, "\n\n".join(texts))


def _named(name: str) -> tuple[str, list[dict[str, Any]]]:
    """What is called so; algorithms, baselines and recipes are used in the same places."""
    from shoal.registry import ALGORITHMS, DATASETS
    from shoal.settings import settings
    from shoal.training.recipes import find_recipe, recipes

    if name in DATASETS.names():
        return "datasets", [_dataset(name)]
    if (recipe := find_recipe(name)) is not None:
        entry = {"name": name, "summary": recipe.summary, "family": "recipe", "paper": recipe.reference}
        options = [f"{name}={value}" for name, value in (*recipe.options.items(), *recipe.model.items())]
        needs = ["pretrained weights"] if recipe.pretrained else []
        return "algorithms", [entry | {"algorithm": recipe.algorithm, "options": options, "needs": needs}]
    if name in ALGORITHMS.names():
        return "algorithms", [_algorithm(name)]
    from shoal.experiments.baselines import SETTINGS, SUMMARIES

    if name not in SUMMARIES:
        known = [*ALGORITHMS.names(), *SUMMARIES, *recipes(), *DATASETS.names()]
        raise unknown_name("algorithm or dataset", name, known)
    entry = {"name": name, "summary": SUMMARIES[name], "family": "baseline"}
    return "algorithms", [entry | _settings(settings(SETTINGS[name]))]


def _algorithm(name: str) -> dict[str, Any]:
    from shoal.algorithms import algorithm_class, settings_of
    from shoal.registry import ALGORITHMS
    from shoal.settings import settings

    cls, costs, package = algorithm_class(name), _costs(), ALGORITHMS.package_of(name)
    needs = {
        "two domains": cls.min_domains > 1,
        "features": cls.needs_features,
        "second order": cls.second_order,
        "classes": "regression" not in cls.tasks,
    }
    return {
        "name": name,
        "summary": (cls.__doc__ or "").splitlines()[0],
        "family": cls.family,
        "paper": cls.reference,
        "batches": cls.draw,
        "needs": [word for word, needed in needs.items() if needed],
        "cost": costs["step"].get(name),
        "memory": costs["memory"].get(name),
        **({"package": package} if package else {}),
        **_settings({name: s for name, s in settings(cls).items() if name in settings_of(cls)}),
    }


def _costs() -> dict[str, Any]:
    """What benchmarks/algorithms.py measured: the cost of a step relative to ERM's."""
    from importlib import resources

    from shoal.files import parse_yaml

    text = resources.files("shoal.algorithms").joinpath("costs.yaml").read_text(encoding="utf-8")
    return dict(parse_yaml(text))


def _dataset(name: str) -> dict[str, Any]:
    from shoal.registry import DATASETS
    from shoal.settings import settings

    module = DATASETS.module(name)
    domains = {"domains": list(module.DOMAINS)} if hasattr(module, "DOMAINS") else {}
    return {**_brief(name), **domains, **_settings(settings(module.load))}


def _brief(name: str) -> dict[str, Any]:
    """The summary of a dataset and its paper; of Shoal's own, read without importing torch."""
    from shoal.files import read_yaml
    from shoal.registry import DATASETS

    if name in DATASETS.own:
        known = read_yaml(DATASETS.folder / "summaries.yaml")
        about = known.get(name) or read_yaml(DATASETS.folder / f"{name.replace('-', '_')}.yaml")
        found = {"summary": about["summary"], "paper": about["paper"]}
    else:
        module, package = DATASETS.module(name), DATASETS.package_of(name)
        found = {"summary": module.SUMMARY, "paper": module.PAPER, "package": package}
    return {"name": name, **found}


def _settings(declared: Mapping[str, Setting]) -> dict[str, Any]:
    """For each setting its default, what is allowed, and from what a random search samples."""
    found = {}
    for name, setting in declared.items():
        small, large = setting.space("small"), setting.space("large")
        search = f"; search: {_space(small)}" if small else ""
        if large and large != small:
            search += f" ({LARGE}: {_space(large)}, default {large['default']:g})"
        found[name] = {"default": setting.default, "allowed": f"{setting.words()}{search}"}
    return {"settings": found} if found else {}


def _space(space: Mapping[str, Any]) -> str:
    (kind,) = SPACES.keys() & space.keys()
    words = SPACES[kind].format(space[kind])
    if "of" in space:
        return f"{words} steps of {space['of']:,}, rounded down"
    return f"{words}, rounded down" if "whole" in space and kind != "choice" else words


def _table(entries: Sequence[Mapping[str, Any]]) -> str:
    from shoal.experiments.baselines import SUMMARIES
    from shoal.report.tables import Table
    from shoal.training.recipes import recipes

    packages = ["package"] if any("package" in e for e in entries) else []
    table = Table(["algorithm", "family", "paper", "batches", "needs", "step", *packages])
    for e in entries:
        cost = "–" if e["cost"] is None else f"{e['cost']:.2f}"
        more = [e.get(p, "–") for p in packages]
        table.add(e["name"], e["family"], e["paper"], e["batches"], ", ".join(e["needs"]), cost, *more)
    note = FOOTNOTE.format(baselines=", ".join(SUMMARIES), recipes=", ".join(recipes()), **_costs())
    return f"{table.text()}\n\n{note}"


def _summaries(entries: Sequence[Mapping[str, Any]]) -> str:
    width, longest = min(110, shutil.get_terminal_size().columns), max(len(e["name"]) for e in entries)
    indent = " " * (longest + 2)
    texts = [f"{e['name']:{longest}}  {e['summary']}" for e in entries]
    return "\n".join(textwrap.fill(text, width, subsequent_indent=indent) for text in texts)


def _in_full(entry: Mapping[str, Any]) -> str:
    width = min(100, shutil.get_terminal_size().columns)
    lines = [f"{entry['name']}: {entry['summary']}"]
    for key, value in entry.items():
        if key not in ("name", "summary", "settings"):
            text = ", ".join(value) if isinstance(value, list) else value
            lines += _wrapped(f"{key}: {text if text not in (None, '') else 'none'}", width, 4)
    for name, about in entry.get("settings", {}).items():
        lines += _wrapped(f"{name}={about['default']}: {about['allowed']}", width, 4)
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
