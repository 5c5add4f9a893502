"""`shoal list`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.commands.showing import show

SUMMARY = "List the algorithms or the datasets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["algorithms", "datasets"])


def run(given: Any) -> None:
    from shoal.report.tables import Table

    if given.what == "datasets":
        from shoal.data.sets import registry

        modules = {name: registry.module(name) for name in registry.names()}
        table = Table(["name", "what it is", "source"])
        entries = [{"name": n, "summary": m.SUMMARY, "paper": m.PAPER} for n, m in modules.items()]
        for e in entries:
            table.add(e["name"], e["summary"], e["paper"])
    else:
        from shoal.algorithms import algorithm_class, settings_of
        from shoal.algorithms import registry as algorithms

        table = Table(["name", "family", "batches", "needs", "paper", "settings"])
        entries = []
        for name in algorithms.names():
            cls = algorithm_class(name)
            needs = ["2 domains"] * cls.compares_domains + ["second order"] * cls.second_order
            settings = settings_of(cls)
            entries.append(
                {
                    "name": name,
                    "family": cls.family,
                    "draw": cls.draw,
                    "needs": needs,
                    "paper": cls.reference,
                    "settings": settings,
                }
            )
            shown = ", ".join(f"{k}={v}" for k, v in settings.items())
            table.add(name, cls.family, cls.draw, ", ".join(needs) or "–", cls.reference, shown or "–")
    show({given.what: entries}, table.text(), given)
