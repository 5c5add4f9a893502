"""Files of weights of other programs: timm's names, whatever is in front of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.errors import InputError
from shoal.models.backbones import Backbone
from shoal.models.feature_model import FeatureModel

DERIVED = ("relative_position_index", "num_batches_tracked")
"""Buffers that follow from the architecture, or that inference has no use for."""


def fitting(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``weights`` under the names and in the shapes of ``model``; InputError where they do not fit.

    They are the whole model's, or those of timm's backbone under timm's names (which for ResNet, ResNeXt and
    DenseNet are torchvision's too), with anything in front of the names. Then the classifier in the file is
    not used, and the model keeps its own head.
    """
    own = model.state_dict()
    if set(own) == set(weights):
        return dict(weights)
    features = getattr(model, "features", None)
    if not isinstance(model, FeatureModel) or not isinstance(features, Backbone):
        raise _unlike(model, own, weights)
    body: Any = features.body
    shapes, about = body.state_dict(), getattr(body, "pretrained_cfg", None) or {}
    needed = [k for k in shapes if not k.endswith(DERIVED)]
    ends = (*(f"{head}." for head in _listed(about.get("classifier"))), "AuxLogits.")
    prefixes = [k.removesuffix(needed[0]) for k in weights if k.endswith(needed[0])]
    inside = [{k.removeprefix(p): v for k, v in weights.items() if k.startswith(p)} for p in prefixes]
    for found in inside:
        unknown = [k for k in found if k not in shapes and not k.startswith(ends) and not k.endswith(DERIVED)]
        if found.keys() >= set(needed) and not unknown:
            break
    else:
        raise _unlike(model, needed, inside[0] if inside else weights)
    for name in _listed(about.get("first_conv")):
        _adapt_input(found, f"{name}.weight", shapes[f"{name}.weight"].shape[1])
    for k in needed:
        if found[k].shape != shapes[k].shape:
            raise InputError(
                f"weight {k!r} has shape {tuple(found[k].shape)} in the file and {tuple(shapes[k].shape)} in "
                "the model."
            )
    return {**own, **{f"features.body.{k}": found[k] for k in needed}}


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
    name = (getattr(model, "recipe", None) or {}).get("name", type(model).__name__)
    needed = [k for k in needed if not k.endswith(DERIVED)]
    lacking = ", ".join(repr(k[:80]) for k in [k for k in needed if k not in there][:3])
    others = [k for k in there if k not in needed and not k.endswith(DERIVED)]
    unknown = ", ".join(repr(k[:80]) for k in others[:3])
    parts = [f"it needs {lacking}"] * bool(lacking) + [f"the file has {unknown}"] * bool(unknown)
    return InputError(f"the {len(there):,} tensors are not those of model {name!r}: {'; '.join(parts)}.")
