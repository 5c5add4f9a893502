"""`shoal list`."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from shoal.commands.showing import show

SUMMARY = "List the algorithms or the datasets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["algorithms", "datasets"])


def run(given: Any) -> None:
    entries = _algorithms() if given.what == "algorithms" else _datasets()
    width = min(100, shutil.get_terminal_size().columns)
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']}: {entry['summary']}")
        for key, value in entry.items():
            if key in ("name", "summary"):
                continue
            if isinstance(value, dict):
                value = ", ".join(f"{k}={v}" for k, v in value.items())
            if isinstance(value, list):
                value = ", ".join(value)
            text = f"{key}: {value or 'none'}"
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="      ")
        lines.append("")
    show({given.what: entries}, "\n".join(lines).rstrip(), given)


def _algorithms() -> list[dict[str, Any]]:
    from shoal.algorithms import algorithm_class, registry, settings_of

    found = []
    for name in registry.names():
        cls = algorithm_class(name)
        needs = ["at least 2 domains"] * cls.compares_domains + ["second derivatives"] * cls.second_order
        found.append(
            {
                "name": name,
                "summary": (cls.__doc__ or "").splitlines()[0],
                "family": cls.family,
                "batches": cls.draw,
                "needs": needs,
                "settings": settings_of(cls),
                "paper": cls.reference,
            }
        )
    return found


def _datasets() -> list[dict[str, Any]]:
    import inspect

    from shoal.data.sets import registry

    found = []
    for name in registry.names():
        module = registry.module(name)
        options = {p.name: p.default for p in inspect.signature(module.load).parameters.values()}
        found.append({"name": name, "summary": module.SUMMARY, "options": options, "paper": module.PAPER})
    return found
