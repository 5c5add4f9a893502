"""Files of weights of other programs: timm's names, whatever is in front of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
    name = (getattr(model, "recipe", None) or {}).get("name", type(model).__name__)
    if not isinstance(model, FeatureModel) or not isinstance(model.features, Backbone):
        raise InputError(
            f"the {len(weights):,} tensors are not those of model {name!r}: {_some(own, weights)}."
        )
    body: Any = model.features.body
    shapes = body.state_dict()
    needed = [k for k in shapes if not k.endswith(DERIVED)]
    prefixes = [k.removesuffix(needed[0]) for k in weights if k.endswith(needed[0])]
    inside = [{k.removeprefix(p): v for k, v in weights.items() if k.startswith(p)} for p in prefixes]
    heads = (getattr(body, "pretrained_cfg", None) or {}).get("classifier") or ()
    ends = (*(f"{h}." for h in ([heads] if isinstance(heads, str) else heads)), "AuxLogits.")
    for found in inside:
        unknown = [k for k in found if k not in shapes and not k.startswith(ends) and not k.endswith(DERIVED)]
        if found.keys() >= set(needed) and not unknown:
            break
    else:
        closest = inside[0] if inside else weights
        raise InputError(
            f"the {len(weights):,} tensors are not those of model {name!r} in timm: {_some(needed, closest)}."
        )
    found = {k: found[k] for k in needed}
    _adapt_input(found, body)
    wrong = [k for k in needed if found[k].shape != shapes[k].shape]
    if wrong:
        raise InputError(
            f"{len(wrong)} of the weights have another shape than the model's, such as {wrong[0]!r}: "
            f"{tuple(found[wrong[0]].shape)} in the file, {tuple(shapes[wrong[0]].shape)} in the model."
        )
    return {**own, **{f"features.body.{k}": v for k, v in found.items()}}


def _adapt_input(found: dict[str, Tensor], body: Any) -> None:
    """Fits the first convolution to another number of channels, as timm does for its own weights."""
    from timm.models import adapt_input_conv

    names = (getattr(body, "pretrained_cfg", None) or {}).get("first_conv") or ()
    for name in [names] if isinstance(names, str) else names:
        key = f"{name}.weight"
        there, wanted = found[key].shape[1], body.state_dict()[key].shape[1]
        if there != wanted:
            warnings.warn(
                f"the weights are of a model for {there} channels and the images have {wanted}: "
                f"those of the first layer are {'summed' if wanted == 1 else 'repeated and scaled'}.",
                stacklevel=2,
            )
            found[key] = adapt_input_conv(wanted, found[key])


def _some(needed: Any, there: Any) -> str:
    lacking = [k for k in needed if k not in there and not k.endswith(DERIVED)]
    unknown = [k for k in there if k not in needed and not k.endswith(DERIVED)]
    parts = (("it needs", lacking), ("the file has", unknown))
    return "; ".join(f"{words} {', '.join(repr(k[:80]) for k in keys[:3])}" for words, keys in parts if keys)
