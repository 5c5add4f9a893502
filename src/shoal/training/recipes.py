"""Recipes by name: an algorithm and the options of a training that belong to it, as data in recipes.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from shoal.files import parse_yaml
from shoal.registry import spelled


@dataclass(frozen=True)
class Recipe:
    """How to train a pretrained model. ``shoal.train``, ``shoal.fit`` and ``shoal.compare`` take its name."""

    name: str
    summary: str
    reference: str
    algorithm: str
    options: Mapping[str, Any]
    """Fields of :class:`~shoal.options.TrainingOptions`; what the caller gives wins."""
    pretrained: bool = True
    """Whether it makes sense for pretrained weights only."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of a backbone that is built by its name; they do not apply to a model of the caller's own."""
    freeze_batchnorm: bool = False
    """Whether :func:`shoal.fit` calls :func:`shoal.models.freeze_batchnorm` on a model of the caller's own.
    Backbones built by their names have BatchNorm frozen by default."""

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given``, with the recipe's value for every option that was not given."""
        return {**self.options, **given}


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, by name."""
    text = resources.files("shoal.training").joinpath("recipes.yaml").read_text(encoding="utf-8")
    return {name: Recipe(name=name, **content) for name, content in parse_yaml(text).items()}


def find_recipe(name: Any) -> Recipe | None:
    """The recipe of this name, in any spelling; ``None`` where there is none."""
    return recipes().get(spelled(name)) if isinstance(name, str) else None
