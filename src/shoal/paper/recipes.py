"""How WILDS' datasets are trained, by the paper or by the authors' program, as configurations of runs.

The settings are in ``presets/wilds.yaml``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal import datasets as sets
from shoal.algorithms import algorithm_class, settings_of
from shoal.data.domains import Domains
from shoal.errors import check_names
from shoal.experiments.config import RunConfig
from shoal.paper import read


@dataclass(frozen=True)
class Variant:
    """A row of a table: an algorithm, with something of its recipe changed."""

    label: str
    algorithm: str = "fish"
    settings: Mapping[str, Any] = field(default_factory=dict)
    draw: str | None = None
    inner_steps: int | None = None
    warm_start: float | str | None = None
    rate: float = 1.0
    """Factor of α; ε is divided by it."""
    updates: int | None = None
    """On CdSprites: factor of the number of updates, where not the number of passes is given."""

    @classmethod
    def of(cls, name: str) -> Variant:
        """An algorithm, which may name its way of sampling, as in ``fish:regrouped``."""
        algorithm, _, draw = name.partition(":")
        algorithm_class(algorithm)
        return cls(name, algorithm, draw=draw or None)

    @property
    def name(self) -> str:
        return f"{self.algorithm}:{self.draw}" if self.draw else self.algorithm


def datasets() -> list[str]:
    """Those that there are recipes for."""
    return [name for name in read("presets/wilds.yaml") if name != "every"]


def settings(dataset: str, preset: str) -> dict[str, Any]:
    """What a preset says of a dataset."""
    check_names("dataset of WILDS:", [dataset], datasets())
    presets = read("presets/wilds.yaml")
    every, own = presets["every"], presets[dataset]
    parts = [every, own, every.get(preset, {}), own.get(preset, {})]
    joined = {name: value for part in parts for name, value in part.items()}
    return {**joined, "settings": {k: v for part in parts for k, v in part.get("settings", {}).items()}}


def headline(dataset: str) -> str:
    """The metric that the benchmark ranks by, whatever a preset selects by."""
    return str(read("presets/wilds.yaml")[dataset]["headline"])


def differences(names: Sequence[str], preset: str) -> list[str]:
    """What a preset does otherwise than the paper or the authors' program, or chooses itself, and why."""
    lines = []
    for entry in read("presets/wilds.yaml")["every"]["differs"][preset]:
        own = [name for name in names if name in entry.get("of", names)]
        title = ", ".join(own) if "of" in entry else "all"
        lines += [f"{title}: {entry['what']} ({entry['why']})."] * bool(own)
    return lines


def runs(
    dataset: str, variants: Sequence[Variant], preset: str, seeds: int | None = None, quick: bool = False
) -> list[RunConfig]:
    """Every variant with as many seeds as the paper has, or ``seeds``; ``quick``: one seed and few steps."""
    recipe = settings(dataset, preset)
    options = dict(recipe.get("data_options", {}))
    small = recipe["quick"]["text" if "tokenizer" in options else "images"] if quick else {}
    options |= small.get("data_options", {})
    train = sets.load(dataset, **options).splits["train"]
    configs = [
        _run(dataset, variant, recipe, options, seed, train)
        for seed in range(seeds or (1 if quick else recipe["seeds"]))
        for variant in variants
    ]
    return [_shrunk(config, small) for config in configs] if quick else configs


SHARED_FIELDS = ("model", "model_options", "optimizer", "select", "metric")
"""Entries of a recipe that are fields of its runs."""


def _run(
    dataset: str,
    variant: Variant,
    recipe: Mapping[str, Any],
    data: Mapping[str, Any],
    seed: int,
    train: Domains,
) -> RunConfig:
    kind = algorithm_class(variant.algorithm)
    inner_loop = "meta_lr" in settings_of(kind)
    batch, count = recipe["batch"], 1
    if inner_loop:
        count = variant.inner_steps or recipe["inner_steps"]
    elif kind.draw == "domains":
        count = min(recipe["groups"], batch)
        batch = batch // count
    epoch = math.ceil(len(train.examples()) / (batch * count))
    if inner_loop and recipe.get("epoch") == "domains":
        epoch = steps_until_used_up(train.sizes.tolist(), batch, count, seed)
    epoch = max(1, epoch)
    steps = recipe["epochs"] * epoch
    alpha, epsilon = recipe["lr"] * variant.rate, recipe["epsilon"] / variant.rate
    own = {**recipe["settings"].get(variant.algorithm, {}), **variant.settings}
    optimizer = dict(recipe.get("optimizer_options", {}))
    options: dict[str, Any] = {name: recipe[name] for name in SHARED_FIELDS if name in recipe}
    if inner_loop:
        optimizer["weight_decay"] = recipe.get("fish_weight_decay", optimizer.get("weight_decay", 0.0))
        state = epoch if recipe.get("inner_state") == "epoch" else "carry"
        own = {"meta_lr": epsilon, "inner_state": state, **own}
        options["warm_start"] = variant.warm_start or recipe.get("warm_start")
    else:
        options["schedule"] = f"step:{recipe['decay']:g}:{epoch}" if recipe.get("decay") else None
        data = {**data, **(recipe.get("grouped", {}) if kind.draw != "pooled" else {})}
    options |= {
        "label": variant.label.format(alpha=alpha, epsilon=epsilon),
        "draw": variant.draw,
        "seed": seed,
    }
    options |= {"data_options": dict(data), "settings": own, "optimizer_options": optimizer}
    options |= {"batch_size": batch, "domains_per_step": count, "lr": alpha if inner_loop else recipe["lr"]}
    options |= {"eval_every": min(recipe.get("eval_every", epoch), steps)}
    options |= {"precision": "fp32", "memory_format": "contiguous"}
    return RunConfig(dataset, variant.algorithm, steps, **options)


def _shrunk(config: RunConfig, small: Mapping[str, Any]) -> RunConfig:
    """A few steps of a small model; a warm start keeps its share of them, one that converges is as long."""
    steps, warm = small["steps"], config.warm_start
    if warm is not None:
        warm = max(1, round(steps * (warm if isinstance(warm, float) else 1)))
    same = {name: small[name] for name in ("model", "model_options", "eval_limit")}
    batch = min(config.batch_size, small["batch_size"])
    return replace(config, steps=steps, eval_every=steps, warm_start=warm, batch_size=batch, **same)


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
