"""`shoal list`."""

from __future__ import annotations

import argparse
import shutil
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

from shoal.cli.showing import show
from shoal.errors import InputError, check_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.settings import Setting, Size
    from shoal.training.recipes import Recipe

SPACES = {"choice": "one of {}", "uniform": "U{}", "log10": "10^U{}", "log2": "2^U{}"}
SIZES: tuple[Size, ...] = ("small", "large")
LARGE = "for large images and pretrained models"
FOOTNOTE = """\
Baselines for tables, also accepted by `shoal train`: {baselines}.
Recipes for pretrained models, also accepted by `shoal train`: {recipes}.
step: time per step relative to ERM on the same examples ({measured}).
batches: domains = one batch from each of S domains; pooled = from all examples;
  balanced = mixed, with an equal share of each domain; one-domain = S batches from one domain.
features: uses the input of the last linear layer of the model.
For details: shoal list algorithms NAME"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example:\n  shoal list algorithms fish irm"
    parser.add_argument("what", choices=["algorithms", "datasets"], help="what to list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="show only these, with all details")


def run(args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of packages: the same is listed under "Not available"
        _run(args)


def _run(args: Any) -> None:
    from shoal.algorithms import registry as algorithms
    from shoal.data.sets import registry as datasets
    from shoal.experiments.baselines import SUMMARIES
    from shoal.training.recipes import recipes

    listed = args.what == "algorithms"
    registry, baselines = (algorithms, SUMMARIES) if listed else (datasets, {})
    named = recipes() if listed else {}
    check_names(registry.kind, args.names, [*registry.names(), *baselines, *named])
    chosen = [n for n in registry.names() if not args.names or n in args.names]
    costs = algorithms_costs()
    problems = {} if args.names else registry.problems()
    entries = []
    for name in chosen:
        try:
            entry = _algorithm(name, costs) if listed else _dataset(name)
        except InputError as error:
            if args.names:
                raise
            problems[name] = str(error)
            continue
        package = registry.package_of(name)
        entries.append(entry | ({"package": str(package)} if package else {}))
    entries += [_baseline(name) for name in baselines if name in args.names]
    entries += [_recipe(recipe) for name, recipe in named.items() if name in args.names]
    text = _in_full(entries)
    if listed and not args.names:
        others = {"baselines": ", ".join(SUMMARIES), "recipes": ", ".join(named)}
        text = f"{_table(entries)}\n\n{FOOTNOTE.format(**others, **costs)}"
    text += "".join(f"\n\nNot available: {problem}" for problem in problems.values())
    show({args.what: entries, "problems": problems}, text, args)


def algorithms_costs() -> dict[str, Any]:
    """What benchmarks/algorithms.py measured: the cost of a step relative to ERM's."""
    from importlib import resources

    from shoal.files import parse_yaml

    text = resources.files("shoal.algorithms").joinpath("costs.yaml").read_text(encoding="utf-8")
    costs: dict[str, Any] = parse_yaml(text)
    return costs


def _algorithm(name: str, costs: dict[str, Any]) -> dict[str, Any]:
    from shoal.algorithms import algorithm_class, settings_of
    from shoal.settings import settings

    cls = algorithm_class(name)
    needs = {
        "two domains": cls.compares_domains,
        "features": cls.needs_features,
        "discriminator": cls.trains_discriminator,
        "second order": cls.second_order,
        "classes": "regression" not in cls.tasks,
    }
    return {
        "name": name,
        "summary": (cls.__doc__ or "").splitlines()[0],
        "family": cls.family,
        "paper": cls.reference,
        "batches": cls.draw,
        "forward passes": cls.passes,
        "needs": [word for word, needed in needs.items() if needed],
        "cost": costs["step"].get(name),
        "memory": costs["memory"].get(name),
        **_settings({name: s for name, s in settings(cls).items() if name in settings_of(cls)}),
    }


def _settings(declared: dict[str, Setting], called: str = "settings") -> dict[str, Any]:
    """The defaults, what is allowed, and from what a random search samples."""
    small, large = (
        {name: space for name, s in declared.items() if (space := s.space(size))} for size in SIZES
    )
    other = {name: space for name, space in large.items() if space != small.get(name)}
    return {
        called: {name: s.default for name, s in declared.items()},
        "allowed": {name: s.words() for name, s in declared.items()},
        "search": {name: _space(space) for name, space in small.items()},
        "search_large": {name: f"{_space(s)}, default {s['default']:g}" for name, s in other.items()},
    }


def _space(space: dict[str, Any]) -> str:
    (kind,) = SPACES.keys() & space.keys()
    words = SPACES[kind].format(space[kind])
    if "of" in space:
        return f"{words} steps of {space['of']:,}, rounded down"
    return f"{words}, rounded down" if "whole" in space and kind != "choice" else words


def _baseline(name: str) -> dict[str, Any]:
    from shoal.experiments.baselines import SETTINGS, SUMMARIES
    from shoal.settings import settings

    about = {"name": name, "summary": SUMMARIES[name], "family": "baseline"}
    return {**about, **_settings(settings(SETTINGS[name]))}


def _recipe(recipe: Recipe) -> dict[str, Any]:
    def listed(options: Mapping[str, Any]) -> list[str]:
        return [f"{name}={value}" for name, value in options.items()]

    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "family": "recipe",
        "paper": recipe.reference,
        "algorithm": recipe.algorithm,
        "training": listed(recipe.options),
        "model": listed(recipe.model),
        "needs": ["pretrained weights"] if recipe.pretrained else [],
    }


def _dataset(name: str) -> dict[str, Any]:
    from shoal.data.sets import registry
    from shoal.settings import settings

    module = registry.module(name)
    options = _settings(settings(module.load), "options")
    del options["search"], options["search_large"]
    domains = {"test takes": list(module.DOMAINS)} if hasattr(module, "DOMAINS") else {}
    return {"name": name, "summary": module.SUMMARY, **options, **domains, "paper": module.PAPER}


def _table(entries: list[dict[str, Any]]) -> str:
    from shoal.report.tables import Table

    packages = ["package"] if any("package" in e for e in entries) else []
    table = Table(["name", "family", "paper", "batches", "needs", "step", *packages])
    for e in entries:
        cost = "–" if e["cost"] is None else f"{e['cost']:.2f}"
        table.add(
            e["name"],
            e["family"],
            e["paper"],
            e["batches"],
            ", ".join(e["needs"]),
            cost,
            *(e.get(p, "–") for p in packages),
        )
    return table.text()


def _in_full(entries: list[dict[str, Any]]) -> str:
    width = min(100, shutil.get_terminal_size().columns)
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']}: {entry['summary']}")
        search, large = entry.get("search", {}), entry.get("search_large", {})
        for key, value in entry.items():
            if key in ("name", "summary", "allowed", "search", "search_large"):
                continue
            if isinstance(value, dict) and value:
                lines.append(f"    {key}:")
                for k, v in value.items():
                    sampled = f"; search space: {search[k]}" if k in search else ""
                    sampled += f" ({LARGE} {large[k]})" if k in large else ""
                    lines += _wrapped(f"{k}={v}: {entry['allowed'][k]}{sampled}", width, 6)
                continue
            text = ", ".join(value) if isinstance(value, list) else value
            lines += _wrapped(f"{key}: {'none' if text in (None, '', {}) else text}", width, 4)
        lines.append("")
    return "\n".join(lines).rstrip()


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
