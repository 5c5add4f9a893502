"""Random grouping: Fish, Fish on the same examples in random groups, and ERM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.data.sets import registry
from shoal.paper import cdsprites, recipes
from shoal.paper.columns import Column, column, run_tables, sweep_column
from shoal.paper.published import published

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

METHODS = {"Fish": "fish", "Fish, RG": "fish:regrouped", "ERM": "erm"}
VARIANTS = [
    recipes.Variant("Fish"),
    recipes.Variant("Fish, RG", draw="regrouped"),
    recipes.Variant("ERM", "erm"),
]
SEEDS = 3
QUICK_DATASETS = ("cdsprites", "rotated-digits")
QUICK: dict[str, Any] = {"search": 1, "steps": 30, "eval_every": 15}
QUICK_PASSES = 2_000
"""On CdSprites."""
LEFT_OUT = (
    "One seed and a few steps; without `datasets`, small CdSprites and scikit-learn's digits, "
    "which the paper does not have, in place of FMoW, VLCS, PACS and OfficeHome. Whether grouping by domain "
    "helps, and by how much, cannot be concluded from so little training."
)


def reproduce(request: Request) -> Reproduction:
    paper = {
        claim["names"][0]: claim
        for claim in published("grouping") + published("domainbed")
        if claim["table"] == "random grouping"
    }
    names = request.datasets or (QUICK_DATASETS if request.quick else paper)
    for name in names:
        registry.module(name)
    columns = [_column(name, paper.get(name, {"dataset": name, "values": {}}), request) for name in names]
    words = (
        "Held-out domains. DomainBed's datasets: every domain held out in turn, the step selected by "
        "training-domain validation; CdSprites: the last step; WILDS: the test split."
    )
    return run_tables(request, {"": columns}, words, LEFT_OUT, ("Fish", "Fish, RG"))


def _column(name: str, claim: dict[str, Any], request: Request) -> Column:
    about = {"title": claim["dataset"], "paper": claim["values"]}
    if name == "cdsprites":  # the last step: what it validates on is drawn like its test domain
        size = cdsprites.QUICK if request.quick else cdsprites.FULL
        fish, control = size.methods[:2]
        methods = (fish, replace(control, label="Fish, RG"), cdsprites.ERM)
        seeds = range(request.seeds or (1 if request.quick else SEEDS))
        deal = {**size.deal, **({"passes": QUICK_PASSES} if request.quick else {})}
        plan = partial(cdsprites.configs, methods, [10], seeds, **deal)
        return column(plan, dataset=name, metric="accuracy", last=True, **about)
    if name in recipes.datasets():
        same: dict[str, Any] = {"preset": request.preset, "seeds": request.seeds, "quick": request.quick}
        plan = partial(recipes.runs, name, VARIANTS, **same)
        return column(plan, dataset=name, metric=recipes.headline(name), **about)
    seeds_of = {"seeds": request.seeds or (1 if request.quick else SEEDS), "search": 1}
    return sweep_column(name, METHODS, request, QUICK, plan=seeds_of, **about)
