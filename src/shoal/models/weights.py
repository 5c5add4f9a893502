"""Files of weights of other programs: timm's names, whatever is in front of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.errors import InputError
from shoal.models.backbones import Backbone

DERIVED = ("relative_position_index", "num_batches_tracked")
"""Buffers that follow from the architecture, or that inference has no use for."""


def fitting(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``weights`` under the names and in the shapes of ``model``; InputError where they do not fit.

    They are the whole model's, with LoRA adapters or without, or those of timm's backbone under timm's names
    (which for ResNet, ResNeXt and DenseNet are torchvision's too), with anything in front of the names. Then
    the classifier in the file is not used, and the model keeps its own head.
    """
    state = model.state_dict()
    without_adapters = {k.replace(".base_layer.", "."): k for k in state if ".lora_" not in k}
    for names in ({k: k for k in state}, without_adapters):
        if names.keys() == weights.keys():
            return state | {names[k]: v for k, v in weights.items()}
    if not isinstance(features := getattr(model, "features", None), Backbone):
        raise _unlike(model, state, weights)
    inside = "features.body."
    names = {k.removeprefix(inside): own for k, own in without_adapters.items() if k.startswith(inside)}
    needed = [k for k in names if not k.endswith(DERIVED)]
    about = getattr(features.body, "pretrained_cfg", None) or {}
    classifiers = (*(f"{name}." for name in _listed(about.get("classifier"))), "AuxLogits.")
    for prefix in [k.removesuffix(needed[0]) for k in weights if k.endswith(needed[0])]:
        found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        others = [k for k in found if k not in names and not k.startswith(classifiers)]
        if found.keys() >= set(needed) and all(k.endswith(DERIVED) for k in others):
            break
    else:
        raise _unlike(model, needed, weights)
    for name in _listed(about.get("first_conv")):
        _adapt_input(found, f"{name}.weight", state[names[f"{name}.weight"]].shape[1])
    for k in needed:
        if found[k].shape != (wanted := state[names[k]].shape):
            there = tuple(found[k].shape)
            raise InputError(f"weight {k!r} has shape {there} in the file and {tuple(wanted)} in the model.")
    return state | {names[k]: found[k] for k in needed}


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _adapt_input(found: dict[str, Tensor], key: str, wanted: int) -> None:
    """Fits the first convolution to another number of channels, as timm does for its own weights."""
    from timm.models import adapt_input_conv

    if (there := found[key].shape[1]) != wanted:
        how = "summed" if wanted == 1 else "repeated and scaled"
        what = f"the weights are of a model for {there} channels and the images have {wanted}"
        warnings.warn(f"{what}: those of the first layer are {how}.", stacklevel=3)
        found[key] = adapt_input_conv(wanted, found[key])


def _unlike(model: nn.Module, needed: Iterable[str], there: Mapping[str, Tensor]) -> InputError:
    name, needed = (getattr(model, "recipe", None) or {}).get("name", type(model).__name__), list(needed)
    lacking = [k for k in needed if k not in there]
    unknown = [k for k in there if k not in needed and not k.endswith(DERIVED)]
    parts = {"it needs": lacking, "the file has": unknown}
    said = [f"{words} {', '.join(repr(k[:80]) for k in keys[:3])}" for words, keys in parts.items() if keys]
    return InputError(f"the {len(there):,} tensors are not those of model {name!r}: {'; '.join(said)}.")
