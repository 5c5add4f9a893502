"""Files of weights of other programs: timm's names, whatever is in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.models.backbones import Backbone

BODY = "features.body."
DERIVED = ("relative_position_index", "num_batches_tracked")
"""Buffers that follow from the architecture, or that inference has no use for."""


def fitting(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``weights`` under the names of ``model``, as far as they fit; ``load_state_dict`` says if they do not.

    They are the whole model's, with LoRA adapters or without, or those of timm's backbone under timm's names
    (which for ResNet, ResNeXt and DenseNet are torchvision's too), with anything in front of the names. Then
    the classifier in the file is not used, and the model keeps its own head.
    """
    state: dict[str, Tensor] = model.state_dict()
    names = {k.replace(".base_layer.", "."): k for k in state if ".lora_" not in k}
    if names.keys() == weights.keys():
        return state | {names[k]: v for k, v in weights.items()}
    features: Any = getattr(model, "features", None)
    if state.keys() == weights.keys() or not isinstance(features, Backbone):
        return dict(weights)
    inside = {k.removeprefix(BODY): own for k, own in names.items() if k.startswith(BODY)}
    prefixes = {k[: -len(own)] for own in list(inside)[:1] for k in weights if k.endswith(own)}
    prefix = max(prefixes, key=lambda prefix: sum(prefix + k in weights for k in inside), default="")
    classifier = (getattr(features.body, "pretrained_cfg", None) or {}).get("classifier") or ()
    unused = [f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier)]
    ignored = (*unused, "AuxLogits.")
    found = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    found = {
        k: v for k, v in found.items() if k in inside or not (k.startswith(ignored) or k.endswith(DERIVED))
    }
    replaced = {inside.get(k, k): v for k, v in found.items()}
    needed = {own for own in inside.values() if not own.endswith(DERIVED)}
    return {k: v for k, v in state.items() if k not in needed} | replaced
