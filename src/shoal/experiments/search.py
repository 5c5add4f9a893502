"""Random search: what an algorithm's hyperparameters may be, as data, and draws from it."""

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
from shoal.settings import Size, search_space
from shoal.training.recipes import Recipe

Space = Mapping[str, Mapping[str, Any]]
"""Setting → ``default`` and one of ``choice``, ``uniform``, ``log10``, ``log2``. ``whole`` rounds down, as
DomainBed's ``int`` does; so does ``of``, by which the whole number is then divided."""

RATES: Mapping[bool, Space] = {
    False: {"lr": {"default": 1e-3, "log10": [-4.5, -2.5]}},
    True: {"lr": {"default": 5e-5, "log10": [-5, -3.5]}},
}
"""The learning rate of random and of pretrained weights (which 1e-3 destroys): DomainBed's, for small and for
large images."""
OF_ADAPTERS: Space = {"lr": {"default": 2e-4, "log10": [-4.5, -3]}}
"""The learning rate of adapters (LoRA) in pretrained weights."""
WARMUP, LONGEST_WARMUP = 0.05, 500
"""The share of steps over which the learning rate of a pretrained model rises by default, and the most."""

RANGES = {"uniform": None, "log10": 10.0, "log2": 2.0}
"""Each from a lower to an upper end, with the base to which the number drawn is the exponent."""
KINDS = ("choice", *RANGES)
SEARCH = 21  # what a key is for


def candidates(config: RunConfig, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and learning rates to try: the defaults at the rate of ``config``, and ``count`` − 1 draws.

    They depend on the seed; a draw's rate is the same for all algorithms. Pretrained weights have the space
    for large images. Settings that the algorithm has by default stay unsaid. A search with more candidates
    begins with those of a shorter one.
    """
    pretrained = is_pretrained(config)
    size: Size = "large" if pretrained else "small"
    cls, rates = algorithm_class(config.algorithm), rates_of(config)
    space = search_space(cls, size)
    drawn = [(draw(space, config.seed, n), draw(rates, config.seed, n)) for n in range(1, max(1, count))]
    return [(changed(cls, draw(space, 0, 0)), {"lr": config.lr}), *drawn]


def changed(cls: type[Algorithm], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not what the algorithm has by default."""
    usual = settings_of(cls)
    return {name: value for name, value in settings.items() if value != usual[name]}


def is_pretrained(config: RunConfig) -> bool:
    """Whether a file's weights, timm's own or a text encoder's are trained on, and not frozen."""
    if config.model_options.get("frozen"):
        return False
    if config.weights is not None or "pretrained" in config.model_options:
        return bool(config.weights is not None or config.model_options["pretrained"])
    name = _backbone(config)
    return name is not None and (models.language.known(name) or models.names_weights(name))


def _backbone(config: RunConfig) -> str | None:
    """The name of timm's or transformers' model that is trained, if it is one."""
    option = inspect.signature(sets.registry.module(config.dataset).load).parameters.get("tokenizer")
    name = config.model or (config.data_options.get("tokenizer", option.default) if option else None)
    return name if isinstance(name, str) and name not in models.registry.names() else None


def with_format(config: RunConfig) -> RunConfig:
    """``config`` with precision and memory format left to a trial, where they are not given and a pretrained
    backbone of timm's or transformers' is trained.

    Only what users start in their own name comes here: protocols that repeat published results compute as
    these did, contiguous and in fp32.
    """
    if not is_pretrained(config) or _backbone(config) is None:
        return config
    return replace(config, precision=config.precision or "auto", memory_format=config.memory_format or "auto")


def rates_of(config: RunConfig) -> Space:
    """Of the learning rate, for the model of ``config``."""
    pretrained = is_pretrained(config)
    return OF_ADAPTERS if pretrained and _adapts(config) else RATES[pretrained]


def _adapts(config: RunConfig) -> bool:
    return config.model_options.get("lora") is not None


def with_rate(config: RunConfig, lr: float | None, schedule: str | None) -> tuple[RunConfig, str]:
    """``config`` with a learning rate and a schedule, and what was chosen, in words ("" where nothing was).

    A rate that is not given follows the model; a pretrained one for which neither was given is warmed up too.
    """
    pretrained, message, warm = is_pretrained(config), "", ""
    rate = rates_of(config)["lr"]["default"] if lr is None else lr
    if lr is None and schedule is None and pretrained:
        steps = max(1, min(round(WARMUP * config.steps), LONGEST_WARMUP))
        schedule, warm = f"warmup:{steps}", f", with a warmup of {steps} step{'s' * (steps > 1)}"
    chosen = replace(config, lr=rate, schedule=schedule)
    if lr is None and pretrained:
        what = "the model is pretrained" + " and has LoRA adapters" * _adapts(config)
        message = f"{what}: learning rate {rate:g}{warm}; set lr and schedule to change it"
    if _adapts(config) and not pretrained:
        message = "the weights of the model are random, and LoRA does not train them; use pretrained weights"
    return chosen, message


def with_model_options(recipe: Recipe, config: RunConfig) -> RunConfig:
    """``config`` with the options that a recipe has for a model that is built by its name.

    Raises:
        InputError: the recipe is for pretrained weights, and there are none.
    """
    if recipe.pretrained and not is_pretrained(config):
        raise InputError(
            f"{recipe.name!r} requires a pretrained model: set one with its weights, such as "
            "model='resnet50.tv_in1k', or set weights= to a file."
        )
    known = models.options_of(config.model) if config.model else []
    own = {name: value for name, value in recipe.model.items() if name in known}
    return replace(config, model_options={**own, **config.model_options})


def draw(space: Space, seed: int, number: int) -> dict[str, Any]:
    """The defaults for number 0; else random values, each by seed, number and the setting's name alone."""
    check_space(space)
    if number == 0:
        return {name: about["default"] for name, about in space.items()}
    return {name: _value(about, _share(seed, number, name)) for name, about in space.items()}


def _share(seed: int, number: int, name: str) -> float:
    """A number from 0 up to, but not including, 1."""
    letters = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return (int(key(SEARCH, seed, number, letters)[0]) >> 11) / 2**53


def _value(about: Mapping[str, Any], share: float) -> Any:
    (kind,) = _kinds(about)
    if kind == "choice":
        value = about[kind][int(share * len(about[kind]))]
    else:
        (low, high), base = about[kind], RANGES[kind]
        value = min(high, low + share * (high - low))
        value = float(value) if base is None else base**value
    if of := about.get("of"):
        return math.floor(value) / of
    return math.floor(value) if about.get("whole") else value


def check_space(space: Space) -> None:
    """Refuses a space that cannot be drawn from, naming the setting."""
    for name, about in space.items():
        if problem := _problem(about):
            raise InputError(f"the search space of setting {name!r} {problem}.")


def _problem(about: Any) -> str:
    if not isinstance(about, Mapping) or "default" not in about:
        return f"needs a default, got {about!r}"
    if unknown := sorted(set(about) - {"default", "whole", "of", *KINDS}):
        return f"has an unknown part {unknown[0]!r}; known: default, whole, of, {', '.join(KINDS)}"
    if len(kinds := _kinds(about)) != 1:
        return f"needs exactly one of {', '.join(KINDS)}, got {' and '.join(kinds) or 'none'}"
    among = about[kinds[0]]
    if not isinstance(among, (list, tuple)) or not among:
        return f"needs a list for {kinds[0]}, got {among!r}"
    if (kinds[0] in RANGES or about.keys() & {"whole", "of"}) and not all(_is_number(v) for v in among):
        return f"needs numbers for {kinds[0]}, got {among!r}"
    if kinds[0] in RANGES and not (len(among) == 2 and among[0] <= among[1]):
        return f"needs a lower and an upper end for {kinds[0]}, got {among!r}"
    if not (_is_number(of := about.get("of", 1)) and of > 0):
        return f"needs a number above 0 for of, got {of!r}"
    return ""


def _kinds(about: Mapping[str, Any]) -> list[str]:
    return [kind for kind in KINDS if kind in about]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
