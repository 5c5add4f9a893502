"""How WILDS' datasets are trained, by the paper or by the authors' program, as configurations of runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.algorithms import algorithm_class, settings_of
from shoal.data import sets
from shoal.errors import check_names
from shoal.experiments.config import RunConfig
from shoal.paper.published import read

PRESETS = ("paper", "authors-code")
ALGORITHMS = ("fish", "smoothfish", "irm", "coral", "reweighted", "groupdro", "erm")
"""Those of the paper's table and SmoothFish, in its order."""
ABLATIONS = ("warm-start", "rates", "meta-steps", "smoothfish")
SHARES: dict[str, float | str] = {"10 % of the data": 0.1, "50 % of the data": 0.5, "converged": "plateau"}


def _presets() -> dict[str, Any]:
    presets: dict[str, Any] = read("presets/wilds.yaml")
    return presets


def datasets() -> list[str]:
    """Those that there are recipes for."""
    return [name for name in _presets() if name != "every"]


@dataclass(frozen=True)
class Changes:
    """What to do otherwise than a recipe says, such as a small model to try the pipeline with."""

    epochs: float | None = None
    """Of fewer epochs so much less is a warm start that is a number of steps."""
    model: str | None = None
    model_options: Mapping[str, Any] | None = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    """Of those datasets that have them."""
    batch: int | None = None
    lr: float | None = None
    eval_limit: int | None = None
    precision: str | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class Variant:
    """A row of a table: an algorithm, with something of its recipe changed."""

    label: str
    algorithm: str = "fish"
    settings: Mapping[str, Any] = field(default_factory=dict)
    draw: str | None = None
    inner_steps: int | None = None
    warm_start: int | float | str | None = None
    rate: float = 1.0
    """Times α, and ε divided by it."""


def runs(
    dataset: str, variants: Sequence[Variant], *, preset: str = "paper", changes: Changes | None = None
) -> list[RunConfig]:
    """Every variant with every seed that the benchmark asks for (on PovertyMap every fold)."""
    changes = changes or Changes()
    recipe = settings(dataset, preset)
    own = inspect.signature(sets.registry.module(dataset).load).parameters
    changed = {k: v for k, v in changes.data_options.items() if k in own}
    seeds: list[tuple[int, dict[str, Any]]] = [
        (n, {}) for n in range(changes.seeds or recipe.get("seeds", 0))
    ]
    if "folds" in recipe:
        seeds = [(0, {"fold": fold}) for fold in recipe["folds"][: changes.seeds]]
    result = []
    for seed, fold in seeds:
        options = {**recipe.get("data_options", {}), **changed, **fold}
        examples = len(sets.load(dataset, **options).splits["train"].examples())
        result += [_run(dataset, v, recipe, changes, options, seed, examples) for v in variants]
    return result


def settings(dataset: str, preset: str) -> dict[str, Any]:
    """What a preset says of a dataset."""
    check_names("dataset with a recipe:", [dataset], datasets())
    check_names("preset", [preset], PRESETS)
    every = _presets()
    common = {k: v for k, v in every[dataset].items() if k not in PRESETS}
    own = every[dataset].get(preset, {})
    joined = {**every["every"]["settings"], **common.get("settings", {}), **own.get("settings", {})}
    return {**common, **own, "settings": joined}


def headline(dataset: str) -> str:
    """The metric that the benchmark ranks by, whatever a preset selects by."""
    return str(_presets()[dataset]["judged"])


def _run(
    dataset: str,
    variant: Variant,
    recipe: Mapping[str, Any],
    changes: Changes,
    data_options: Mapping[str, Any],
    seed: int,
    examples: int,
) -> RunConfig:
    kind = algorithm_class(variant.algorithm)
    inner_loop = "meta_lr" in settings_of(kind)
    batch, count = changes.batch or recipe["batch"], 1
    if inner_loop:
        count = variant.inner_steps or recipe["walk"]
    elif kind.draw == "domains":
        count = min(recipe["groups"], batch)
        batch = batch // count
    epoch = max(1, math.ceil(examples / (batch * count)))
    steps = max(1, round((changes.epochs or recipe["epochs"]) * epoch))
    optimizer = dict(recipe["optimizer_options"])
    if changes.lr is not None:
        optimizer["lr"] = changes.lr
    own = {**recipe["settings"].get(variant.algorithm, {}), **variant.settings}
    warm, schedule = None, None
    if inner_loop:
        alpha = recipe.get("fish_lr", optimizer["lr"]) if changes.lr is None else changes.lr
        optimizer["lr"] = alpha * variant.rate
        optimizer["weight_decay"] = recipe.get("fish_weight_decay", optimizer.get("weight_decay", 0.0))
        own = {"meta_lr": recipe["epsilon"] / variant.rate, "inner_state": "carry", **own}
        warm = recipe.get("warm_start") if variant.warm_start is None else variant.warm_start
        if isinstance(warm, int) and changes.epochs:
            warm = max(1, round(warm * changes.epochs / recipe["epochs"]))
    else:
        schedule = f"step:{recipe['decay']:g}:{epoch}" if "decay" in recipe else None
        data_options = {**data_options, **(recipe.get("grouped", {}) if kind.draw != "pooled" else {})}
    options = changes.model_options
    if options is None:
        options = {} if changes.model else recipe["model_options"]
    same: dict[str, Any] = {"label": variant.label, "draw": variant.draw, "seed": seed, "warm_start": warm}
    same |= {"optimizer": recipe["optimizer"], "optimizer_options": optimizer, "schedule": schedule}
    same |= {"model": changes.model or recipe["model"], "model_options": dict(options)}
    same |= {"eval_limit": changes.eval_limit, "metric": recipe["metric"], "precision": changes.precision}
    return RunConfig(
        dataset,
        variant.algorithm,
        steps,
        dict(data_options),
        own,
        batch_size=batch,
        domains_per_step=count,
        eval_every=min(epoch, steps),
        eval_splits=["validation", "test"],
        **same,
    )


def ablation(name: str, dataset: str, preset: str = "paper") -> list[Variant]:
    """The rows of one of the paper's ablations; with fewer domains than a row asks for it is refused."""
    check_names("ablation", [name], ABLATIONS)
    recipe = settings(dataset, preset)
    if name == "warm-start":
        return [Variant(label, warm_start=share) for label, share in SHARES.items()]
    if name == "rates":
        alpha, epsilon = recipe.get("fish_lr", recipe["optimizer_options"]["lr"]), recipe["epsilon"]
        factors = (0.1, 0.3, 1.0, 3.0, 10.0)
        return [Variant(f"α = {alpha * f:.2g}, ε = {epsilon / f:.2g}", rate=f) for f in factors]
    if name == "meta-steps":
        return [Variant(f"N = {n}", inner_steps=n) for n in (5, 10, 20)]
    return [Variant(f"γ = {g:g}", "smoothfish", {"gamma": g}) for g in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)]
