"""Random search: hyperparameter trials of an algorithm, and the learning rate that suits a model."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal import models
from shoal.algorithms import Algorithm, algorithm_class, settings_of
from shoal.data import sets
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.settings import search_space
from shoal.training.recipes import Recipe

Space = Mapping[str, Mapping[str, Any]]
"""Hyperparameter → ``default`` and one of ``choice``, ``uniform``, ``log10``, ``log2``. ``whole`` rounds
down, as DomainBed's ``int`` does; so does ``of``, by which the whole number is then divided."""

RATES: Mapping[bool, Space] = {
    False: {"lr": {"default": 1e-3, "log10": [-4.5, -2.5]}},
    True: {"lr": {"default": 5e-5, "log10": [-5, -3.5]}},
}
"""The learning rate of random and of pretrained weights (which 1e-3 destroys): DomainBed's, for small and for
large images."""
ADAPTER_RATES: Space = {"lr": {"default": 2e-4, "log10": [-4.5, -3]}}
"""The learning rate of adapters (LoRA) in pretrained weights."""
WARMUP, LONGEST_WARMUP = 0.05, 500
"""The fraction of steps in which the learning rate of a pretrained model rises by default, and the most."""
BASES = {"uniform": None, "log10": 10.0, "log2": 2.0}
"""Kinds of range, with the base to which the sampled number is the exponent."""
SEARCH = 21  # purpose of a random key


def trials(config: RunConfig, count: int) -> list[RunConfig]:
    """The first ``count`` hyperparameter trials: the defaults at the learning rate of ``config``, then random
    ones.

    They depend on the seed. A trial's learning rate is the same for all algorithms. Pretrained weights have
    the search space for large images. A longer search starts with the trials of a shorter one.
    """
    cls, rates = algorithm_class(config.algorithm), rates_of(config)
    space = search_space(cls, "large" if is_pretrained(config) else "small")
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
        return {name: about["default"] for name, about in space.items()}
    return {name: _value(about, _uniform(seed, trial, name)) for name, about in space.items()}


def _uniform(seed: int, trial: int, name: str) -> float:
    """A number from 0 up to, but not including, 1."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return (int(key(SEARCH, seed, trial, digest)[0]) >> 11) / 2**53


def _value(about: Mapping[str, Any], uniform: float) -> Any:
    if "choice" in about:
        value = about["choice"][int(uniform * len(about["choice"]))]
    else:
        kind = next(kind for kind in BASES if kind in about)
        (low, high), base = about[kind], BASES[kind]
        value = min(high, low + uniform * (high - low))
        value = float(value) if base is None else base**value
    if of := about.get("of"):
        return math.floor(value) / of
    return math.floor(value) if about.get("whole") else value


def is_pretrained(config: RunConfig) -> bool:
    """Whether pretrained weights are trained: those of a file, of timm or of a text encoder, not frozen."""
    if config.model_options.get("frozen"):
        return False
    if config.weights is not None or "pretrained" in config.model_options:
        return bool(config.weights is not None or config.model_options["pretrained"])
    name = _backbone(config)
    return name is not None and (models.language.known(name) or models.names_weights(name))


def _backbone(config: RunConfig) -> str | None:
    """The name of the model of timm or transformers that is trained, if it is one."""
    option = inspect.signature(sets.registry.module(config.dataset).load).parameters.get("tokenizer")
    name = config.model or (config.data_options.get("tokenizer", option.default) if option else None)
    return name if isinstance(name, str) and name not in models.registry.names() else None


def rates_of(config: RunConfig) -> Space:
    """The search space of the learning rate for the model of ``config``."""
    pretrained = is_pretrained(config)
    return ADAPTER_RATES if pretrained and _has_adapters(config) else RATES[pretrained]


def _has_adapters(config: RunConfig) -> bool:
    return config.model_options.get("lora") is not None


def with_rate(config: RunConfig, lr: float | None, schedule: str | None) -> tuple[RunConfig, str]:
    """``config`` with a learning rate and a schedule, and a message where the model decided them.

    By default the learning rate depends on the model, and a pretrained one is warmed up.
    """
    pretrained, message, warmup = is_pretrained(config), "", ""
    rate = rates_of(config)["lr"]["default"] if lr is None else lr
    if lr is None and schedule is None and pretrained:
        steps = max(1, min(round(WARMUP * config.steps), LONGEST_WARMUP))
        schedule, warmup = f"warmup:{steps}", f", with a warmup of {steps} step{'s' * (steps > 1)}"
    if lr is None and pretrained:
        what = "the model is pretrained" + " and has LoRA adapters" * _has_adapters(config)
        message = f"{what}: learning rate {rate:g}{warmup}; set lr and schedule to change it"
    if _has_adapters(config) and not pretrained:
        message = "the weights of the model are random, and LoRA does not train them; use pretrained weights"
    return replace(config, lr=rate, schedule=schedule), message


def with_model_options(recipe: Recipe, config: RunConfig) -> RunConfig:
    """``config`` with the options that a recipe sets for a model built by its name.

    Raises:
        InputError: the recipe is for pretrained weights, and there are none.
    """
    if recipe.pretrained and not is_pretrained(config):
        raise InputError(
            f"{recipe.name!r} requires a pretrained model: set one with its weights, such as "
            "model='resnet50.tv_in1k', or set weights= to a file."
        )
    known = models.options_of(config.model) if config.model else []
    options = {name: value for name, value in recipe.model.items() if name in known}
    return replace(config, model_options={**options, **config.model_options})
