"""The paper's table of WILDS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.errors import check_names
from shoal.paper import recipes
from shoal.paper.columns import Column, column, run_tables
from shoal.paper.published import published

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

ALGORITHMS = {
    "fish": "Fish",
    "smoothfish": "SmoothFish",
    "irm": "IRM",
    "coral": "Coral",
    "reweighted": "Reweighted",
    "groupdro": "GroupDRO",
    "erm": "ERM (ours)",
}
"""Algorithms of the paper's table and SmoothFish, with the names of their rows. ``ERM`` is WILDS' own."""
LEFT_OUT = (
    "One seed, a few steps of a small network without pretrained weights, small images or few tokens, scores "
    "of a sample of the test split and, without `algorithms`, only Fish and ERM. It shows that the files are "
    "read and that everything runs; the scores mean nothing and must not be compared with the paper's."
)


def claim_of(table: str, dataset: str) -> dict[str, Any]:
    """What the paper says of a dataset in one of its tables; nothing where it has no column for it."""
    for claim in published("wilds"):
        if (claim["table"], claim["dataset"], claim["split"]) == (table, dataset, "test"):
            return claim
    return {"metric": recipes.headline(dataset), "values": {}}


def wilds_column(table: str, dataset: str, variants: Sequence[recipes.Variant], request: Request) -> Column:
    claim, labels = claim_of(table, dataset), [v.label for v in variants]
    paper = {row: v for row, v in claim["values"].items() if row in labels}
    if "ERM (ours)" in paper:
        paper["ERM (by WILDS)"] = claim["values"]["ERM"]
    same: dict[str, Any] = {"preset": request.preset, "seeds": request.seeds, "quick": request.quick}
    plan = partial(recipes.runs, dataset, variants, **same)
    return column(plan, dataset=dataset, title=dataset, metric=claim["metric"], paper=paper)


def reproduce(request: Request) -> Reproduction:
    names = request.datasets or recipes.datasets()
    check_names("dataset of WILDS:", names, recipes.datasets())
    algorithms = request.algorithms or (("fish", "erm") if request.quick else tuple(ALGORITHMS))
    check_names("algorithm", algorithms, ALGORITHMS)
    variants = [recipes.Variant(ALGORITHMS[name], name) for name in algorithms]
    columns = [wilds_column("main", name, variants, request) for name in names]
    return run_tables(request, {"": columns}, f"Test split, preset {request.preset}.", LEFT_OUT)
