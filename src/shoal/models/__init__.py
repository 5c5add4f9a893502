"""Models by name: small networks, any backbone of timm, encoders of text, image towers of CLIP.

How a package of your own adds one: :mod:`shoal.registry`; its name goes before one of timm's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch

from shoal.errors import InputError, check_names, unknown_name
from shoal.models import backbones, clip, language, lora
from shoal.models.backbones import freeze_batchnorm
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor
from shoal.models.layers import parameter_groups
from shoal.registry import MODELS as registry
from shoal.registry import spelled
from shoal.settings import Count, Range, Seed, Setting, checked, coerce, settings

__all__ = [
    "FeatureExtractor",
    "FeatureModel",
    "build",
    "freeze_batchnorm",
    "options_of",
    "parameter_groups",
    "registry",
]


@checked
def build(
    name: str,
    *,
    input_shape: Sequence[Count],
    classes: Annotated[int, Range(2, 10**9)] | None,
    seed: Seed,
    **options: Any,
) -> FeatureModel:
    """Build a model by name.

    The initial weights depend only on ``seed``, and other random numbers do not depend on them.

    >>> model = build("mlp", input_shape=(4,), classes=3, seed=0, width=32)
    >>> model(torch.zeros(2, 4)).shape
    torch.Size([2, 3])

    Args:
        name: name of a model of Shoal or timm, name or folder of a text encoder of transformers, or ``clip:``
            with the name or folder of a model like CLIP.
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression: one output, of shape (B,).
        seed: random seed of the initial weights.
        **options: options of the model, such as its ``width``.

    Returns:
        The model.

    Raises:
        InputError: the model or an option is unknown, or the model does not take inputs of this shape.
    """
    if not name:
        raise InputError(
            f"there is no default model for examples of shape {tuple(input_shape)}; name one "
            f"({', '.join(registry.names())}) or pass your own module."
        )
    make, options = maker(name), check_options(name, options)
    adapters = {key: value for key, value in options.items() if key.startswith("lora")}
    own = {key: value for key, value in options.items() if key not in adapters}
    # Not torch.manual_seed: it would reseed the accelerators' generators as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model: FeatureModel = make(tuple(input_shape), classes, **own)
        if adapters:
            lora.adapt(name, model, **adapters)
    model.recipe = {"name": name, "options": options}
    return model


def names_weights(name: str) -> bool:
    """Whether a name says which pretrained weights it begins with, as resnet50.tv_in1k and clip:FOLDER do."""
    if name.startswith(clip.PREFIX):
        return True
    return "." in name and spelled(name) not in registry.names() and not language.known(name)


@checked
def options_of(name: str) -> list[str]:
    """Return the names of the options of a model.

    Args:
        name: name of the model.
    """
    return list(settings_of(name))


def settings_of(name: str) -> dict[str, Setting]:
    """The options of a model with their defaults; those of LoRA are the same for all that are pretrained."""
    make = maker(name)
    found = dict(list(settings(make).items())[2:])
    if isinstance(make, partial):  # of timm or transformers
        found |= {key: s for key, s in settings(lora.adapt).items() if key.startswith("lora")}
    return found


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the model takes them; raises InputError where it does not."""
    known, of = settings_of(name), f"model {name!r}"
    check_names(f"option of {of}:", options, known)
    return {key: coerce(known[key].annotation, value, key, of) for key, value in options.items()}


def maker(name: str) -> Callable[..., FeatureModel]:
    """What builds the model called ``name``."""
    if spelled(name) in registry.names():
        found: Any = registry.module(name)
        return getattr(found, "build", found)
    if name.startswith(clip.PREFIX):
        return partial(clip.build, name.removeprefix(clip.PREFIX))
    if language.known(name):  # timm has none of these, and takes seconds to say so
        return partial(language.build, name)
    if not backbones.known(name):
        raise unknown_name("model", name, [*registry.names(), *language.NAMES])
    return partial(backbones.build, name)
