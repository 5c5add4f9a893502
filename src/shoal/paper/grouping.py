"""Random grouping: Fish, Fish on the same examples in random groups, and ERM, on the paper's datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal import models
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.paper import cdsprites, recipes
from shoal.paper.beside import Column, column
from shoal.paper.published import claims

METHODS = {"Fish": "fish", "Fish, RG": "fish:regrouped", "ERM": "erm"}
"""As the paper calls them, and as Shoal does."""
SPRITES = {"Fish": cdsprites.FISH, "Fish, RG": cdsprites.REGROUPED, "ERM": cdsprites.ERM}
VARIANTS = [
    recipes.Variant("Fish"),
    recipes.Variant("Fish, RG", draw="regrouped"),
    recipes.Variant("ERM", "erm"),
]


def said() -> dict[str, dict[str, Any]]:
    """The paper's table, a column at a time, by the names of datasets."""
    every = claims("grouping") + claims("domainbed")
    return {claim["names"][0]: claim for claim in every if claim["table"] == "random grouping"}


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    steps: int = protocol.STEPS
    """On DomainBed's datasets."""
    passes: int = cdsprites.PASSES[10]
    """On CdSprites."""
    size: int = 64
    model: str = "resnet50"
    """On DomainBed's datasets; pretrained, unless ``weights`` are given."""
    weights: str | None = None
    draws: int = 1
    data: Mapping[str, Any] = field(default_factory=dict)
    changes: recipes.Changes = field(default_factory=recipes.Changes)
    """On WILDS' datasets."""
    preset: str = "paper"


def columns(settings: Settings, only: Sequence[str] | None = None) -> list[Column]:
    """The paper's datasets, or any others of WILDS and DomainBed."""
    paper, found = said(), []
    for name in only or paper:
        claim = paper.get(name, {"dataset": name, "metric": "accuracy", "values": {}})
        given: dict[str, Any] = {"dataset": name, "title": claim["dataset"], "paper": claim["values"]}
        if name == "cdsprites":
            make, given["scores"] = partial(_sprites, settings), _of_sprites
        elif name in recipes.datasets():
            make = partial(recipes.runs, name, VARIANTS, given=settings.preset, changes=settings.changes)
            given["metric"] = recipes.judged(name)
        else:
            make, given["scores"] = partial(_domainbed, name, settings), _of_domainbed
        found.append(column(make, **{"metric": claim["metric"], **given}))
    return found


def _sprites(settings: Settings) -> list[RunConfig]:
    methods, seeds = SPRITES.values(), range(settings.seeds)
    return cdsprites.configs(
        methods, [10], seeds, passes=settings.passes, size=settings.size, eval_limit=5000
    )


def _of_sprites(made: Column, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """At the last step: what CdSprites validates on is drawn like its test domain."""
    known = {r.config.identity: r for r in records if r.status == "finished"}
    found: dict[str, list[float | None]] = {}
    for title, method in SPRITES.items():
        own = [known.get(c.identity) for c in made.runs if c.name == method.label]
        found[title] = [r.score("test", last=True) if r else None for r in own]
    return found


def _domainbed(dataset: str, settings: Settings) -> list[RunConfig]:
    pretrained = settings.weights is None and "pretrained" in models.options_of(settings.model)
    return protocol.plan(
        {dataset: settings.data},
        list(METHODS.values()),
        trials=settings.seeds,
        draws=settings.draws,
        steps=settings.steps,
        model=settings.model,
        model_options={"pretrained": True} if pretrained else {},
        weights=settings.weights,
    )


def _of_domainbed(made: Column, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """Averages over the domains left out, chosen by training-domain validation."""
    found = selection.results(selection.sweep(made.runs, records), made.dataset)
    rows = {row["algorithm"]: row["average"]["values"] for row in found["rows"]}
    return {title: rows[name] for title, name in METHODS.items()}
