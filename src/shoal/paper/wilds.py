"""The paper's table of WILDS and its ablations there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shoal.paper import recipes
from shoal.paper.beside import Column, column
from shoal.paper.published import claims

ROWS = {"fish": "Fish", "irm": "IRM", "coral": "Coral", "reweighted": "Reweighted", "groupdro": "GroupDRO"}
"""What the paper calls methods that it does not call as Shoal does; its own training of ERM is ours too."""
OURS, THEIRS = "ERM (ours)", "erm, by WILDS"


def said(table: str, dataset: str) -> dict[str, Any]:
    """What the paper says of a dataset in one of its tables; nothing where it has no column for it."""
    for claim in claims("wilds"):
        if (claim["table"], claim["dataset"], claim["split"]) == (table, dataset, "test"):
            return claim
    return {"metric": recipes.judged(dataset), "values": {}}


def table(
    names: Sequence[str], algorithms: Sequence[str], given: str, changes: recipes.Changes
) -> list[Column]:
    """The main table: a row for every algorithm."""
    variants = [recipes.Variant(ROWS.get(name, name), name) for name in algorithms]
    return _columns("main", names, dict.fromkeys(names, variants), given, changes)


def ablation(what: str, names: Sequence[str], given: str, changes: recipes.Changes) -> list[Column]:
    rows = {name: recipes.ablation(what, name, given) for name in names}
    return _columns(what, names, rows, given, changes)


def _columns(
    which: str,
    names: Sequence[str],
    variants: dict[str, list[recipes.Variant]],
    given: str,
    changes: recipes.Changes,
) -> list[Column]:
    found = []
    for name in names:
        claim = said(which, name)
        found.append(
            column(
                partial(recipes.runs, name, variants[name], given=given, changes=changes),
                dataset=name,
                title=name,
                metric=claim["metric"],
                paper=_named(claim["values"], [v.label for v in variants[name]]),
            )
        )
    return found


def _named(values: dict[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """Those of ``rows``. ERM is as the paper's authors trained it, which is what we repeat, and WILDS' own
    beside it.
    """
    named = {("erm" if k == OURS else THEIRS if k == "ERM" else k): v for k, v in values.items()}
    return {k: v for k, v in named.items() if k in rows or (k == THEIRS and "erm" in rows)}
