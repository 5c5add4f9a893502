"""The paper's ablations of Fish on WILDS: warm start, learning rates, domains per step, and SmoothFish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import check_names
from shoal.paper import recipes
from shoal.paper.columns import run_tables
from shoal.paper.recipes import Variant
from shoal.paper.wilds import wilds_column

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

PARTS = {
    "warm-start": ("camelyon17", "fmow", "iwildcam", "civilcomments"),
    "rates": ("camelyon17", "fmow", "iwildcam", "poverty", "civilcomments"),
    "meta-steps": ("fmow", "iwildcam", "poverty", "civilcomments"),
    "smoothfish": ("camelyon17", "fmow", "iwildcam", "poverty", "civilcomments", "amazon"),
}
"""By part, the datasets that the paper has for it."""
HEADINGS = {
    "warm-start": "Length of the ERM warm start",
    "rates": "Learning rates, with constant α·ε (the paper: plots without numbers)",
    "meta-steps": "Domains per step",
    "smoothfish": 'SmoothFish (the paper: "changing γ does not make much difference", without numbers)',
}
SHARES: dict[str, float | str] = {"10 % of the data": 0.1, "50 % of the data": 0.5, "converged": "plateau"}
LEFT_OUT = (
    "One seed, a few steps of a small network without pretrained weights and, without `datasets`, the first "
    "available dataset of each part. It shows that every variant runs; no effect of any of them can be "
    "concluded, and the scores must not be compared with the paper's."
)


def variants(part: str, dataset: str, preset: str) -> list[Variant]:
    """The rows of a part."""
    if part == "warm-start":
        return [Variant(label, warm_start=share) for label, share in SHARES.items()]
    if part == "rates":
        recipe = recipes.settings(dataset, preset)
        alpha, epsilon = recipe["lr"], recipe["epsilon"]
        factors = (0.1, 0.3, 1.0, 3.0, 10.0)
        return [Variant(f"α = {alpha * f:.2g}, ε = {epsilon / f:.2g}", rate=f) for f in factors]
    if part == "meta-steps":
        return [Variant(f"N = {n}", inner_steps=n) for n in (5, 10, 20)]
    return [Variant(f"γ = {g:g}", "smoothfish", {"gamma": g}) for g in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)]


def reproduce(request: Request) -> Reproduction:
    check_names("dataset of WILDS:", request.datasets, recipes.datasets())
    tables = {}
    for part in request.parts(list(PARTS)):
        names = request.datasets or PARTS[part]
        columns = [wilds_column(part, n, variants(part, n, request.preset), request) for n in names]
        if request.quick and not request.datasets:
            columns = [c for c in columns if c.runs][:1] or columns
        tables[HEADINGS[part]] = columns
    return run_tables(request, tables, f"Test split, preset {request.preset}.", LEFT_OUT)
