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
from shoal.files import dump_yaml, read_yaml
from shoal.options import public
from shoal.registry import ALGORITHMS, DATASETS, spelled

if TYPE_CHECKING:
    from shoal.settings import Setting

Entry = dict[str, Any]
FOOTNOTE = """\
Baselines for tables: {baselines}.
Recipes for pretrained models: {recipes}.
step: time per step relative to ERM on the same examples (ResNet-50 on one H200).
batches: domains = one batch from each of S domains; pooled = from all examples;
  balanced = mixed, with an equal share of each domain; one-domain = S batches from one domain.
features: uses the input of the last linear layer of the model.
For details: shoal list NAME"""


@dataclass(frozen=True, repr=False)
class Listing(Result):
    """The result of :func:`listing`.

    Attributes:
        algorithms: algorithms, baselines and recipes.
        datasets: datasets.
        unavailable: what cannot be imported, with the reason.
        text: text that ``print`` shows.
    """

    algorithms: Sequence[Entry] = ()
    datasets: Sequence[Entry] = ()
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
    found: dict[str, list[Entry]] = {"algorithms": [], "datasets": []}
    unavailable, texts = dict[str, str](), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of packages: the same is listed as not available
        for word in map(spelled, listed_names(names) or found):
            if word not in found:
                kind, entry = _named(word)
                found[kind].append(entry)
                texts.append(dump_yaml(entry).rstrip())
                continue
            registry, about = (ALGORITHMS, _algorithm) if word == "algorithms" else (DATASETS, _brief)
            entries = []
            for name in registry.names():
                try:
                    entries.append(about(name))
                except InputError as error:  # of a package that defines something else
                    unavailable[name] = str(error)
            found[word] += entries
            texts.append(_table(entries) if word == "algorithms" else _summaries(entries))
    return Listing(found["algorithms"], found["datasets"], unavailable, "\n\n".join(texts))


def _named(name: str) -> tuple[str, Entry]:
    """What is called so; algorithms, baselines and recipes are used in the same places."""
    from shoal.settings import settings
    from shoal.training.recipes import find_recipe, recipes

    if name in DATASETS.names():
        module = DATASETS.module(name)
        domains = {"domains": list(module.DOMAINS)} if hasattr(module, "DOMAINS") else {}
        return "datasets", {**_brief(name), **domains, "settings": _settings(settings(module.load))}
    if (recipe := find_recipe(name)) is not None:
        entry = {"name": name, "summary": recipe.summary, "family": "recipe", "paper": recipe.reference}
        needs = ["pretrained weights"] if recipe.pretrained else []
        options = {**recipe.options, **recipe.model}
        return "algorithms", entry | {"algorithm": recipe.algorithm, "options": options, "needs": needs}
    if name in ALGORITHMS.names():
        return "algorithms", _algorithm(name)
    from shoal.experiments.baselines import SETTINGS, SUMMARIES

    if name not in SUMMARIES:
        known = [*ALGORITHMS.names(), *SUMMARIES, *recipes(), *DATASETS.names()]
        raise unknown_name("algorithm or dataset", name, known)
    entry = {"name": name, "summary": SUMMARIES[name], "family": "baseline"}
    return "algorithms", entry | {"settings": _settings(settings(SETTINGS[name]))}


def _algorithm(name: str) -> Entry:
    from shoal.algorithms import algorithm_class, settings_of
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
        "settings": _settings({n: s for n, s in settings(cls).items() if n in settings_of(cls)}),
    }


def _costs() -> dict[str, Any]:
    """What benchmarks/algorithms.py measured: the cost of a step relative to ERM's."""
    return dict(read_yaml(ALGORITHMS.folder / "costs.yaml"))


def _brief(name: str) -> Entry:
    """The summary of a dataset and its paper; of Shoal's own, read without importing torch."""
    if name in DATASETS.own:
        known = read_yaml(DATASETS.folder / "summaries.yaml")
        about = known.get(name) or read_yaml(DATASETS.folder / f"{name.replace('-', '_')}.yaml")
        return {"name": name, "summary": about["summary"], "paper": about["paper"]}
    module, package = DATASETS.module(name), DATASETS.package_of(name)
    return {"name": name, "summary": module.SUMMARY, "paper": module.PAPER, "package": package}


def _settings(declared: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """For each setting its default, what is allowed, and from what a random search samples: for small images
    and tables, and for large images and pretrained models where that differs."""
    found = {}
    for name, setting in declared.items():
        small, large = setting.space("small"), setting.space("large")
        found[name] = {"default": setting.default, "allowed": setting.words()}
        if small:
            found[name]["search"] = {what: value for what, value in small.items() if what != "default"}
        if large != small:
            found[name]["search for large images"] = large
    return found


def _table(entries: Sequence[Entry]) -> str:
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


def _summaries(entries: Sequence[Entry]) -> str:
    width, longest = min(110, shutil.get_terminal_size().columns), max(len(e["name"]) for e in entries)
    texts = [f"{e['name']:{longest}}  {e['summary']}" for e in entries]
    return "\n".join(textwrap.fill(text, width, subsequent_indent=" " * (longest + 2)) for text in texts)
