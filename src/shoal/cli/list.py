"""`shoal list`."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from shoal.cli.showing import show
from shoal.errors import check_names

if TYPE_CHECKING:
    from shoal.algorithms import Algorithm
    from shoal.settings import Setting

SUMMARY = "List the algorithms or the datasets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "With names, those in full: shoal list algorithms fish irm"
    parser.add_argument("what", choices=["algorithms", "datasets"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, with all there is to say")


def run(given: Any) -> None:
    from shoal.algorithms import registry as algorithms
    from shoal.data.sets import registry as datasets
    from shoal.experiments.baselines import SUMMARIES

    registry = algorithms if given.what == "algorithms" else datasets
    plain = SUMMARIES if given.what == "algorithms" else {}
    check_names(registry.kind, given.names, [*registry.names(), *plain])
    chosen = [n for n in registry.names() if not given.names or n in given.names]
    if given.what == "datasets":
        entries = [_dataset(name) for name in chosen]
        text = _in_full(entries)
    else:
        costs = algorithms_costs()
        entries = [_algorithm(name, costs) for name in chosen]
        entries += [_baseline(name) for name in plain if name in given.names]
        text = _in_full(entries) if given.names else f"{_table(entries)}\n\n{_footnote(costs)}"
    show({given.what: entries}, text, given)


def algorithms_costs() -> dict[str, Any]:
    """What benchmarks/algorithms.py measured: the cost of a step relative to ERM's."""
    from importlib import resources

    import yaml

    text = resources.files("shoal.algorithms").joinpath("costs.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _algorithm(name: str, costs: dict[str, Any]) -> dict[str, Any]:
    from shoal.algorithms import GIVEN, algorithm_class
    from shoal.settings import settings

    cls = algorithm_class(name)
    return {
        "name": name,
        "summary": (cls.__doc__ or "").splitlines()[0],
        "family": cls.family,
        "paper": cls.reference,
        "batches": cls.draw,
        "forward passes": cls.passes,
        "needs": _needs(cls),
        "cost": costs["step"].get(name),
        "memory": costs["memory"].get(name),
        **_settings({name: s for name, s in settings(cls).items() if name not in GIVEN}),
    }


def _settings(declared: dict[str, Setting], called: str = "settings") -> dict[str, Any]:
    """Their defaults, what they may be, and from what a search draws them."""
    spaces = {name: s.space() for name, s in declared.items()}
    return {
        called: {name: s.default for name, s in declared.items()},
        "allowed": {name: s.words() for name, s in declared.items()},
        "search": {name: _space(space) for name, space in spaces.items() if space},
    }


def _baseline(name: str) -> dict[str, Any]:
    from shoal.experiments.baselines import SETTINGS, SUMMARIES
    from shoal.settings import settings

    taken = _settings(settings(SETTINGS[name]))
    return {"name": name, "summary": SUMMARIES[name], "family": "baseline", **taken}


def _needs(cls: type[Algorithm]) -> list[str]:
    return [
        word
        for word, wanted in {
            "two domains": cls.compares_domains,
            "features": cls.needs_features,
            "adversary": cls.trains_adversary,
            "second order": cls.second_order,
            "classes": not cls.regression,
        }.items()
        if wanted
    ]


def _space(space: dict[str, Any]) -> str:
    kinds = {"choice": "one of {}", "uniform": "U{}", "log10": "10^U{}", "log2": "2^U{}"}
    return next(form.format(space[kind]) for kind, form in kinds.items() if kind in space)


def _table(entries: list[dict[str, Any]]) -> str:
    from shoal.report.tables import Table

    table = Table(["name", "family", "paper", "batches", "needs", "step"])
    for e in entries:
        cost = "–" if e["cost"] is None else f"{e['cost']:.2f}"
        table.add(e["name"], e["family"], e["paper"], e["batches"], ", ".join(e["needs"]), cost)
    return table.text()


def _footnote(costs: dict[str, Any]) -> str:
    from shoal.experiments.baselines import SUMMARIES

    return (
        f"Baselines for tables, which `shoal train` takes too: {', '.join(SUMMARIES)}.\n"
        f"step: time of a step relative to ERM's on the same examples ({costs['measured']}).\n"
        "batches: domains = one batch from each of S domains; pooled = from all examples together;\n"
        "  balanced = mixed, every domain with the same share; one-domain = S batches of one.\n"
        "features: takes a shoal.models.FeatureModel(features, head). One in full: shoal list algorithms NAME"
    )


def _dataset(name: str) -> dict[str, Any]:
    from shoal.data.sets import registry
    from shoal.settings import settings

    module = registry.module(name)
    options = _settings(settings(module.load), "options")
    del options["search"]
    domains = {"test takes": list(module.DOMAINS)} if hasattr(module, "DOMAINS") else {}
    return {"name": name, "summary": module.SUMMARY, **options, **domains, "paper": module.PAPER}


def _in_full(entries: list[dict[str, Any]]) -> str:
    width = min(100, shutil.get_terminal_size().columns)
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']}: {entry['summary']}")
        for key, value in entry.items():
            if key in ("name", "summary", "allowed", "search"):
                continue
            if isinstance(value, dict):
                lines += [f"    {key}:"] if value else [f"    {key}: none"]
                for k, v in value.items():
                    drawn = f"; a search draws {entry['search'][k]}" if k in entry.get("search", ()) else ""
                    text = f"{k}={v}: {entry['allowed'][k]}{drawn}"
                    lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 8)
                continue
            if isinstance(value, list):
                value = ", ".join(value)
            text = f"{key}: {'none' if value in (None, '') else value}"
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="      ")
        lines.append("")
    return "\n".join(lines).rstrip()
