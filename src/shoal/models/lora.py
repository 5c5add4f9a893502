"""LoRA: low-rank adapters in the linear layers of a model whose own weights stay as they are, by peft.

A layer W x + b becomes W x + b + (alpha / r) B A x. A (r × inputs) starts random and B (outputs × r) at zero,
so the model starts as the same function; A and B alone are trained.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022.
"""

from __future__ import annotations

import copy
import sys
from typing import Annotated, Any

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel
from shoal.settings import Range
from shoal.vision import load

ATTENTION = (
    *("query", "value", "q_lin", "v_lin", "query_proj", "value_proj", "q_proj", "v_proj"),
    *("qkv", "Wqkv", "in_proj", "q", "v"),
)
"""What models call the query and value projections of their attention, or one layer for all of them."""


def adapt(
    name: str,
    model: FeatureModel,
    *,
    lora: Annotated[int, Range(1, 10**4)] | None = None,
    lora_alpha: Annotated[float, Range(above=0)] | None = None,
    lora_targets: list[str] | str | None = None,
) -> None:
    """Put adapters into the features of a model, and freeze all else in them that is pretrained.

    Args:
        name: name of the model, for error messages.
        model: model of timm or transformers.
        lora: rank r of the adapters (default: no adapters).
        lora_alpha: their output is multiplied by ``lora_alpha`` / r (default: 2 r).
        lora_targets: names of linear layers, or their last parts, that get adapters (default: the query and
            value projections of attention, or its layer ``qkv``).
    """
    if lora is None:
        if lora_alpha or lora_targets:
            raise InputError("lora_alpha and lora_targets require lora, the rank of the adapters.")
        return
    features: Any = model.features
    if getattr(features, "frozen", False):
        raise InputError("lora trains adapters in the backbone, frozen trains none; specify only one.")
    linear = [n for n, module in features.body.named_modules() if isinstance(module, nn.Linear)]
    last = {n.rpartition(".")[2]: n for n in linear}
    wanted = [lora_targets] if isinstance(lora_targets, str) else lora_targets
    wanted = [name for name in ATTENTION if name in last] if wanted is None else wanted
    found = {target: [n for n in linear if f".{n}".endswith(f".{target}")] for target in wanted}
    if not found or not all(found.values()):
        known = f"linear layers of model {name!r} ({', '.join(last) or 'it has none'})"
        raise InputError(f"must be {known}, got {wanted}.", "lora_targets")
    peft, targets = load("peft", "peft"), [n for layers in found.values() for n in layers]
    config = peft.LoraConfig(r=lora, lora_alpha=lora_alpha or 2 * lora, target_modules=targets)
    peft.inject_adapter_in_model(config, features.body)
    for parameter in getattr(features, "new", ()):
        parameter.requires_grad_()


def merged(model: nn.Module) -> nn.Module:
    """A copy with W + (alpha / r) B A in place of each adapted W; ``model`` itself where there are none."""
    if "peft" not in sys.modules:
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return model
    copied: Any = copy.deepcopy(model)
    if hasattr(copied, "merge_and_unload"):  # a PeftModel of the user's own
        whole: nn.Module = copied.merge_and_unload()
        return whole
    for name, layer in list(copied.named_modules(remove_duplicate=False)):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            copied.set_submodule(name, layer.get_base_layer())
    return copied
