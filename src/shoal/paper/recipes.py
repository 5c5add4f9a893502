"""How WILDS' datasets are trained, by the paper or by the authors' program, as configurations of runs."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.algorithms import algorithm_class, settings_of
from shoal.data import sets
from shoal.data.domains import Domains
from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.paper.published import read

PRESETS = ("paper", "authors-code")
ALGORITHMS = ("fish", "smoothfish", "irm", "coral", "reweighted", "groupdro", "erm")
"""Those of the paper's table and SmoothFish, in its order."""
ABLATIONS = ("warm-start", "rates", "meta-steps", "smoothfish")
NEUTRAL = frozenset({"folder", "version", "fold", "group_by", "bad", "cache", "pad_to"})
"""Options of datasets that say where files are and how they are read, or whose value a recipe's rows vary."""
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
    leaderboard: bool = False
    """As many runs as WILDS' leaderboard asks for, on PovertyMap its five folds, and not as the paper has."""

    def __post_init__(self) -> None:
        if self.leaderboard and self.seeds is not None:
            raise InputError(
                f"leaderboard and seeds={self.seeds} both set the number of runs; specify only one of them."
            )


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
    """Every variant with as many seeds as the paper has, or ``changes`` ask for."""
    changes = changes or Changes()
    recipe = settings(dataset, preset)
    own = inspect.signature(sets.registry.module(dataset).load).parameters
    changed = {k: v for k, v in changes.data_options.items() if k in own}
    result = []
    for seed, fold in _seeds(recipe, changes):
        options = {**recipe.get("data_options", {}), **changed, **fold}
        train = sets.load(dataset, **options).splits["train"]
        result += [_run(dataset, v, recipe, changes, options, seed, train) for v in variants]
    return result


def _seeds(recipe: Mapping[str, Any], changes: Changes) -> list[tuple[int, dict[str, Any]]]:
    """The seed of each run, and options of the dataset."""
    asked = recipe["leaderboard"] if changes.leaderboard else recipe
    if "folds" in asked:
        return [(0, {"fold": fold}) for fold in asked["folds"]]
    return [(n, {}) for n in range(changes.seeds or asked["seeds"])]


def settings(dataset: str, preset: str) -> dict[str, Any]:
    """What a preset says of a dataset."""
    check_names("dataset with a recipe:", [dataset], datasets())
    check_names("preset", [preset], PRESETS)
    every, own = _presets()["every"], _presets()[dataset]
    parts = [every, own, every.get(preset, {}), own.get(preset, {})]
    joined = {k: v for part in parts for k, v in part.items() if k not in (*PRESETS, "differs")}
    return {**joined, "settings": {k: v for p in parts for k, v in p.get("settings", {}).items()}}


def differences(names: Sequence[str], preset: str) -> list[str]:
    """What a preset does otherwise than the paper or the authors' program, or chooses itself, and why."""
    check_names("dataset with a recipe:", names, datasets())
    check_names("preset", [preset], PRESETS)
    lines = []
    for entry in _presets()["every"]["differs"][preset]:
        own = [name for name in names if name in entry.get("of", names)]
        title = ", ".join(own) if "of" in entry else "all"
        lines += [f"{title}: {entry['what']} ({entry['why']})."] * bool(own)
    return lines


def changed(config: RunConfig, *, any_rate: bool = False) -> list[str]:
    """In which batches, learning rate, options of model and data, and precision a run is unlike every preset.

    ``any_rate`` allows every learning rate.
    """
    every = [settings(config.dataset, preset) for preset in PRESETS]
    inner_loop = "meta_lr" in settings_of(algorithm_class(config.algorithm))
    batch = config.batch_size * (1 if inner_loop else config.domains_per_step or 1)
    found = [] if batch in {r["batch"] for r in every} else [f"batches of {batch:,}"]
    rate = None if any_rate else config.optimizer_options.get("lr")
    if rate is not None and rate not in {r["optimizer_options"]["lr"] for r in every}:
        found.append(f"a learning rate of {rate:g}")
    options = config.model_options
    if config.model in {r["model"] for r in every} and options not in [r["model_options"] for r in every]:
        found.append("other options of the model")
    own = inspect.signature(sets.registry.module(config.dataset).load).parameters
    for name in sorted(config.data_options.keys() - NEUTRAL):
        usual = [r.get("data_options", {}).get(name, own[name].default) for r in every if name in own]
        if config.data_options[name] not in usual:
            found.append(f"{name}={config.data_options[name]}")
    if config.precision not in (None, "fp32"):
        found.append(f"in {config.precision}")
    return found


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
    train: Domains,
) -> RunConfig:
    kind = algorithm_class(variant.algorithm)
    inner_loop = "meta_lr" in settings_of(kind)
    batch, count = changes.batch or recipe["batch"], 1
    if inner_loop:
        count = variant.inner_steps or recipe["walk"]
    elif kind.draw == "domains":
        count = min(recipe["groups"], batch)
        batch = batch // count
    epoch = math.ceil(len(train.examples()) / (batch * count))
    if inner_loop and recipe.get("epoch") == "domains":
        epoch = steps_until_used_up(train.sizes.tolist(), batch, count, seed)
    epoch = max(1, epoch)
    steps = max(1, round((changes.epochs or recipe["epochs"]) * epoch))
    optimizer = dict(recipe["optimizer_options"])
    if changes.lr is not None:
        optimizer["lr"] = changes.lr
    own = {**recipe["settings"].get(variant.algorithm, {}), **variant.settings}
    warm, warm_select, schedule = None, None, None
    if inner_loop:
        optimizer["lr"] *= variant.rate
        optimizer["weight_decay"] = recipe.get("fish_weight_decay", optimizer.get("weight_decay", 0.0))
        state = epoch if recipe.get("inner_state") == "epoch" else "carry"
        own = {"meta_lr": recipe["epsilon"] / variant.rate, "inner_state": state, **own}
        warm = recipe.get("warm_start") if variant.warm_start is None else variant.warm_start
        if isinstance(warm, int):
            warm_select = recipe.get("warm_select")
            if changes.epochs:
                warm = max(1, round(warm * changes.epochs / recipe["epochs"]))
    else:
        schedule = f"step:{recipe['decay']:g}:{epoch}" if recipe.get("decay") else None
        data_options = {**data_options, **(recipe.get("grouped", {}) if kind.draw != "pooled" else {})}
    options = changes.model_options
    if options is None:
        options = {} if changes.model else recipe["model_options"]
    same: dict[str, Any] = {"label": variant.label, "draw": variant.draw, "seed": seed, "warm_start": warm}
    same |= {"warm_select": warm_select, "select": recipe.get("select")}
    same |= {"optimizer": recipe["optimizer"], "optimizer_options": optimizer, "schedule": schedule}
    same |= {"model": changes.model or recipe["model"], "model_options": dict(options)}
    same |= {"eval_limit": changes.eval_limit, "metric": recipe["metric"]}
    same |= {"precision": changes.precision or "fp32", "memory_format": "contiguous"}  # whatever the model
    return RunConfig(
        dataset,
        variant.algorithm,
        steps,
        dict(data_options),
        own,
        batch_size=batch,
        domains_per_step=count,
        eval_every=min(recipe.get("eval_every", epoch), steps),
        eval_splits=["validation", "test"],
        **same,
    )


def steps_until_used_up(sizes: Sequence[int], batch: int, slots: int, seed: int) -> int:
    """How many steps an epoch of Fish has in the authors' program.

    A step draws ``slots`` domains uniformly, without replacement, and takes a batch of each. A domain's last
    batch is never taken off, and the epoch ends when fewer than ``slots`` domains have another before it.
    """
    left = [math.ceil(size / batch) for size in sizes]
    more, steps, generator = sum(n > 1 for n in left), 0, random.Random(seed)
    while more >= slots:
        for domain in generator.sample(range(len(left)), slots):
            if left[domain] > 1:
                left[domain] -= 1
                more -= left[domain] == 1
        steps += 1
    return steps


def ablation(name: str, dataset: str, preset: str = "paper") -> list[Variant]:
    """The rows of one of the paper's ablations; with fewer domains than a row asks for it is refused."""
    check_names("ablation", [name], ABLATIONS)
    recipe = settings(dataset, preset)
    if name == "warm-start":
        return [Variant(label, warm_start=share) for label, share in SHARES.items()]
    if name == "rates":
        alpha, epsilon = recipe["optimizer_options"]["lr"], recipe["epsilon"]
        factors = (0.1, 0.3, 1.0, 3.0, 10.0)
        return [Variant(f"α = {alpha * f:.2g}, ε = {epsilon / f:.2g}", rate=f) for f in factors]
    if name == "meta-steps":
        return [Variant(f"N = {n}", inner_steps=n) for n in (5, 10, 20)]
    return [Variant(f"γ = {g:g}", "smoothfish", {"gamma": g}) for g in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)]
