"""Models by name; each file of this folder is one, with ``build(input_shape, classes)``.

How a package of your own adds one: :mod:`shoal.registry`; its name goes before one of timm's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.errors import InputError, check_names, unknown_name
from shoal.models import backbones, language, lora
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor
from shoal.models.layers import parameter_groups
from shoal.registry import MODELS as registry
from shoal.registry import spelled
from shoal.settings import check, checked, settings

__all__ = ["FeatureExtractor", "FeatureModel", "build", "options_of", "parameter_groups", "registry"]


@checked
def build(
    name: str, *, input_shape: Sequence[int], classes: int | None, seed: int, **options: Any
) -> FeatureModel:
    """The model called ``name`` for inputs of ``input_shape``, without the batch.

    It is one of ours, of timm's, or an encoder of text of transformers', by its name or its folder.

    ``options`` are the model's own, such as its ``width``.

    ``classes`` is ``None`` for regression: one output, of shape (B,). The initial weights depend on ``seed``
    alone, whatever was drawn before and whatever the default device, and nothing drawn later depends on them.
    """
    if classes is not None and classes < 2:
        raise InputError(f"classes must be at least 2, or None for regression; not {classes!r}.")
    if not name:
        raise InputError(
            f"no model is known for examples of shape {tuple(input_shape)}; name one "
            f"({', '.join(registry.names())}) or pass a module of your own."
        )
    maker = _maker(name)
    options = check_options(name, options)
    # Not torch.manual_seed: it would reseed the accelerators' generators as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model: FeatureModel = maker(tuple(input_shape), classes, **options)
    model.recipe = {"name": name, "options": options}
    return model


def names_weights(name: str) -> bool:
    """Whether a name of timm's says which pretrained weights it begins with, as resnet50.tv_in1k does."""
    return "." in name and spelled(name) not in registry.names() and not language.known(name)


def options_of(name: str) -> list[str]:
    """The options that the model called ``name`` takes."""
    return list(settings(_maker(name)))[2:]


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the model takes them; raises InputError where it does not."""
    check_names(f"option of model {name!r}:", options, options_of(name))
    maker = _maker(name)
    options = check(maker, options, f"model {name!r}")
    if isinstance(maker, partial):  # one of timm's or transformers'
        lora.check(options)
    return options


def _maker(name: str) -> Callable[..., FeatureModel]:
    """What builds the model called ``name``."""
    if spelled(name) in registry.names():
        maker: Callable[..., FeatureModel] = registry.module(name).build
        return maker
    if language.known(str(name)):  # timm has none of these, and takes seconds to say so
        return partial(language.build, str(name))
    names = [*registry.names(), *language.NAMES]
    try:
        known = backbones.known(name)
    except InputError as error:  # the cause before the list: most names are timm's
        raise InputError(
            f"{error} Without timm there is no model {name!r}; there are {', '.join(names)}."
        ) from error
    if not known:
        raise unknown_name("model", name, names)
    backbones.check_tag(name)
    return partial(backbones.build, name)
