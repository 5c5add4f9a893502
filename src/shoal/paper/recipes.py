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
from shoal.paper.presets import preset

PRESETS = ("paper", "authors-code")
ALGORITHMS = ("fish", "smoothfish", "irm", "coral", "reweighted", "groupdro", "erm")
"""Those of the paper's table and SmoothFish, in its order."""


def datasets() -> list[str]:
    """Those that there are recipes for."""
    return [name for name in preset("wilds") if name != "every"]


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
    walk: int | None = None
    warm_start: int | float | str | None = None
    rate: float = 1.0
    """Times α, and ε divided by it."""


def runs(
    dataset: str, variants: Sequence[Variant], *, given: str = "paper", changes: Changes | None = None
) -> list[RunConfig]:
    """Every variant with every seed that the benchmark asks for (on PovertyMap every fold)."""
    changes = changes or Changes()
    said = settings(dataset, given)
    own = inspect.signature(sets.registry.module(dataset).load).parameters
    changed = {k: v for k, v in changes.data_options.items() if k in own}
    options = {**said.get("data_options", {}), **changed}
    found = []
    for seed, fold in _seeds(said, changes):
        data_options = {**options, **fold}
        examples = len(sets.load(dataset, **data_options).splits["train"].examples())
        found += [_run(dataset, v, said, changes, data_options, seed, examples) for v in variants]
    return found


def settings(dataset: str, name: str) -> dict[str, Any]:
    """What the preset ``name`` says of a dataset."""
    check_names("dataset with a recipe:", [dataset], datasets())
    check_names("preset", [name], PRESETS)
    every = preset("wilds")
    said = {k: v for k, v in every[dataset].items() if k not in PRESETS}
    other = every[dataset].get(name, {})
    joined = {**every["every"]["settings"], **said.get("settings", {}), **other.get("settings", {})}
    return {**said, **other, "settings": joined}


def judged(dataset: str) -> str:
    """What the benchmark ranks by, whatever a preset selects by."""
    return str(preset("wilds")[dataset]["judged"])


def _seeds(said: Mapping[str, Any], changes: Changes) -> list[tuple[int, dict[str, Any]]]:
    if "folds" in said:
        return [(0, {"fold": fold}) for fold in said["folds"][: changes.seeds]]
    return [(seed, {}) for seed in range(changes.seeds or said["seeds"])]


def _run(
    dataset: str,
    variant: Variant,
    said: Mapping[str, Any],
    changes: Changes,
    data_options: Mapping[str, Any],
    seed: int,
    examples: int,
) -> RunConfig:
    kind = algorithm_class(variant.algorithm)
    walks = "meta_lr" in settings_of(kind)
    batch, count = changes.batch or said["batch"], 1
    if walks:
        count = variant.walk or said["walk"]
    elif kind.draw == "domains":
        count = min(said["groups"], batch)
        batch = batch // count
    epoch = max(1, math.ceil(examples / (batch * count)))
    steps = max(1, round((changes.epochs or said["epochs"]) * epoch))
    rate = dict(said["optimizer_options"])
    if changes.lr is not None:
        rate["lr"] = changes.lr
    own = {**said["settings"].get(variant.algorithm, {}), **variant.settings}
    if walks:
        rate["lr"] = (said.get("fish_lr", rate["lr"]) if changes.lr is None else changes.lr) * variant.rate
        rate["weight_decay"] = said.get("fish_weight_decay", rate.get("weight_decay", 0.0))
        own = {"meta_lr": said["epsilon"] / variant.rate, "inner_state": "carry", **own}
    decays = "decay" in said and not walks
    warm = variant.warm_start if variant.warm_start is not None else said.get("warm_start")
    if isinstance(warm, int) and changes.epochs:
        warm = max(1, round(warm * changes.epochs / said["epochs"]))
    model = changes.model or said["model"]
    options = changes.model_options if changes.model_options is not None else said["model_options"]
    return RunConfig(
        dataset=dataset,
        algorithm=variant.algorithm,
        label=variant.label,
        steps=steps,
        data_options={**data_options, **({} if walks or kind.draw == "pooled" else said.get("grouped", {}))},
        settings=own,
        model=model,
        model_options={} if changes.model and changes.model_options is None else dict(options),
        optimizer=said["optimizer"],
        optimizer_options=rate,
        batch_size=batch,
        domains_per_step=count,
        draw=variant.draw,
        seed=seed,
        warm_start=warm if walks else None,
        eval_every=min(epoch, steps),
        eval_splits=["validation", "test"],
        eval_limit=changes.eval_limit,
        metric=said["metric"],
        precision=changes.precision,
        schedule=f"step:{said['decay']:g}:{epoch}" if decays else None,
    )


SHARES: dict[str, float | str] = {"10 % of the data": 0.1, "50 % of the data": 0.5, "converged": "plateau"}


def ablation(name: str, dataset: str, given: str = "paper") -> list[Variant]:
    """The rows of one of the paper's ablations; with fewer domains than a row asks for it is refused."""
    check_names("ablation", [name], ABLATIONS)
    said = settings(dataset, given)
    if name == "warm-start":
        return [Variant(label, warm_start=share) for label, share in SHARES.items()]
    if name == "rates":
        alpha = said.get("fish_lr", said["optimizer_options"]["lr"])
        return [
            Variant(f"α = {alpha * f:.2g}, ε = {said['epsilon'] / f:.2g}", rate=f)
            for f in (0.1, 0.3, 1.0, 3.0, 10.0)
        ]
    if name == "meta-steps":
        return [Variant(f"N = {n}", walk=n) for n in (5, 10, 20)]
    return [Variant(f"γ = {g:g}", "smoothfish", {"gamma": g}) for g in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)]


ABLATIONS = {
    "warm-start": "how long ERM trains before Fish: 10 % and 50 % of an epoch, until it stops improving",
    "rates": "Fish's α with α·ε kept constant",
    "meta-steps": "Fish with N = 5, 10, 20 domains a step",
    "smoothfish": "SmoothFish's γ from 0 to 1",
}
