"""Random search: hyperparameter trials of an algorithm, and the learning rate that suits a model."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal import datasets as sets
from shoal import models
from shoal.algorithms import Algorithm, algorithm_class, settings_of
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.settings import search_space
from shoal.training.recipes import Recipe

Space = Mapping[str, Mapping[str, Any]]
"""Hyperparameter → ``default`` and one of ``choice``, ``uniform``, ``log10``, ``log2``. ``whole`` rounds
down, as DomainBed's ``int`` does; so does ``of``, by which the whole number is then divided."""

RATES: Mapping[str, Space] = {
    "random": {"lr": {"default": 1e-3, "log10": [-4.5, -2.5]}},
    "pretrained": {"lr": {"default": 5e-5, "log10": [-5, -3.5]}},
    "adapters": {"lr": {"default": 2e-4, "log10": [-4.5, -3]}},
}
"""The learning rate by the weights that are trained. Those of random and of pretrained weights (which 1e-3
destroys) are DomainBed's, for small and for large images; adapters are LoRA's in pretrained weights."""
WARMUP, LONGEST_WARMUP = 0.05, 500
"""The fraction of steps in which the learning rate of a pretrained model rises by default, and the most."""
SEARCH = 21  # purpose of a random key


def trials(config: RunConfig, count: int) -> list[RunConfig]:
    """The first ``count`` hyperparameter trials: the defaults at the learning rate of ``config``, then random
    ones.

    They depend on the seed. A trial's learning rate is the same for all algorithms. Pretrained weights have
    the search space for large images. A longer search starts with the trials of a shorter one.
    """
    cls, rates = algorithm_class(config.algorithm), RATES[weights_of(config)]
    space = search_space(cls, "small" if rates is RATES["random"] else "large")
    first = replace(config, settings=changed(cls, sample(space, 0, 0)))
    return [first] + [
        replace(config, settings=sample(space, config.seed, n), **sample(rates, config.seed, n))
        for n in range(1, count)
    ]


def changed(cls: type[Algorithm], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that differ from the algorithm's defaults."""
    defaults = settings_of(cls)
    return {name: value for name, value in settings.items() if value != defaults[name]}


def sample(space: Space, seed: int, trial: int) -> dict[str, Any]:
    """The defaults for trial 0; otherwise random values, each by seed, trial and the name alone."""
    if trial == 0:
        return {name: entry["default"] for name, entry in space.items()}
    return {name: _value(entry, _uniform(seed, trial, name)) for name, entry in space.items()}


def _uniform(seed: int, trial: int, name: str) -> float:
    """A number from 0 up to, but not including, 1."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return (int(key(SEARCH, seed, trial, digest)[0]) >> 11) / 2**53


def _value(entry: Mapping[str, Any], uniform: float) -> Any:
    if "choice" in entry:
        value = entry["choice"][int(uniform * len(entry["choice"]))]
    else:
        kind = next(kind for kind in ("uniform", "log10", "log2") if kind in entry)
        low, high = entry[kind]
        value = min(high, low + uniform * (high - low))
        value = float(value) if kind == "uniform" else {"log10": 10.0, "log2": 2.0}[kind] ** value
    if of := entry.get("of"):
        return math.floor(value) / of
    return math.floor(value) if entry.get("whole") else value


def weights_of(config: RunConfig) -> str:
    """Which weights are trained, as in :data:`RATES`: pretrained ones are those of a file, of timm or of a
    text encoder, unless they are frozen."""
    options = config.model_options
    if options.get("frozen"):
        return "random"
    loads = inspect.signature(sets.registry.module(config.dataset).load).parameters.get("tokenizer")
    name = config.model or (config.data_options.get("tokenizer", loads.default) if loads else None)
    pretrained = config.weights is not None or options.get("pretrained", False)
    if not pretrained and "pretrained" not in options and isinstance(name, str):
        built_in = name in models.registry.names()
        pretrained = not built_in and (models.language.known(name) or models.names_weights(name))
    return ("adapters" if options.get("lora") is not None else "pretrained") if pretrained else "random"


def with_rate(config: RunConfig) -> tuple[RunConfig, str]:
    """``config`` with a learning rate and a schedule, and a message where the model decided them.

    By default the learning rate depends on the model, and a pretrained one is warmed up.
    """
    weights = weights_of(config)
    if config.lr is None:
        config = replace(config, lr=RATES[weights]["lr"]["default"])
        if weights != "random":
            what = "the model is pretrained" + " and has LoRA adapters" * (weights == "adapters")
            steps, warmup = max(1, min(round(WARMUP * config.steps), LONGEST_WARMUP)), ""
            if config.schedule is None:
                config = replace(config, schedule=f"warmup:{steps}")
                warmup = f", with a warmup of {steps} step{'s' * (steps > 1)}"
            return config, f"{what}: learning rate {config.lr:g}{warmup}; set lr and schedule to change it"
    if config.model_options.get("lora") is not None and weights == "random":
        return (
            config,
            "the weights of the model are random, and LoRA does not train them; use pretrained weights",
        )
    return config, ""


def with_model_options(recipe: Recipe, config: RunConfig) -> RunConfig:
    """``config`` with the options that a recipe sets for a model built by its name.

    Raises:
        InputError: the recipe is for pretrained weights, and there are none.
    """
    if recipe.pretrained and weights_of(config) == "random":
        raise InputError(
            f"{recipe.name!r} requires a pretrained model: set one with its weights, such as "
            "model='resnet50.tv_in1k', or set weights= to a file."
        )
    known = models.options_of(config.model) if config.model else []
    options = {name: value for name, value in recipe.model.items() if name in known}
    return replace(config, model_options={**options, **config.model_options})
