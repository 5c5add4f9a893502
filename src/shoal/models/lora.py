"""LoRA: low-rank adapters in the linear layers of a model whose own weights stay as they are, by peft.

A layer W x + b becomes W x + b + (alpha / r) B A x. A (r × inputs) starts random and B (outputs × r) at zero,
so the model starts as the same function; A and B alone are trained.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from shoal.errors import InputError
from shoal.models.backbones import Backbone
from shoal.models.feature_model import FeatureModel
from shoal.settings import Range
from shoal.vision import allow_torchvision

ATTENTION = (
    *(("query", "value"), ("q_lin", "v_lin"), ("query_proj", "value_proj"), ("q_proj", "v_proj")),
    *(("qkv",), ("Wqkv",), ("in_proj",), ("q", "v")),
)
"""What models call the query and value projections of their attention, or one layer for all of them."""


def check(options: Mapping[str, Any]) -> None:
    """Refuses options of a model that contradict each other, and ``lora`` where peft is not installed."""
    if options.get("lora") is None:
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            if options.get(name):
                raise InputError(f"{name}={options[name]!r} requires lora=, the rank of the adapters.")
    elif options.get("frozen"):
        raise InputError(
            "lora= trains adapters in the backbone, frozen= (freeze_backbone=) trains none; specify only one."
        )
    elif options.get("freeze_batchnorm") is False:
        raise InputError("freeze_batchnorm=False, but lora= trains adapters and the head only.")
    elif importlib.util.find_spec("peft") is None:
        raise InputError("LoRA requires peft: pip install 'shoal[peft]'.")


def adapt(
    name: str,
    model: FeatureModel,
    input_shape: Sequence[int],
    *,
    lora: Annotated[int, Range(1, 10**4)] | None = None,
    lora_alpha: Annotated[float, Range(above=0)] | None = None,
    lora_dropout: Annotated[float, Range(0, below=1)] = 0.0,
    lora_targets: list[str] | str | None = None,
) -> None:
    """Put adapters into the features of a model, and freeze all else in them, BatchNorm included.

    Layers that the pretrained weights lack, such as the pooler of RoBERTa, are trained as well.

    Args:
        name: name of the model, for error messages.
        model: model of timm or transformers.
        input_shape: shape of an input, without the batch dimension.
        lora: rank r of the adapters (default: no adapters).
        lora_alpha: their output is multiplied by ``lora_alpha`` / r (default: 2 r).
        lora_dropout: dropout rate of their inputs.
        lora_targets: names of linear layers, or their last parts, that get adapters (default: the query and
            value projections of attention, or its layer ``qkv``).
    """
    if lora is None:
        return
    features: Any = model.features
    targets = _targets(name, features.body, lora_targets)
    alpha = 2 * lora if lora_alpha is None else lora_alpha
    allow_torchvision()  # peft imports transformers
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=lora, lora_alpha=alpha, lora_dropout=lora_dropout, target_modules=targets)
    peft.inject_adapter_in_model(config, features.body)
    if isinstance(features, Backbone):
        features.freeze()
    for parameter in getattr(features, "new", ()):
        parameter.requires_grad_()
    x: Any = torch.zeros(1, *input_shape)
    if len(input_shape) == 1:
        x = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, 4, dtype=torch.int64))
    idle = set(layers := adapted(features.body))
    handles = [m.register_forward_hook(lambda *_, n=n: idle.discard(n)) for n, m in layers.items()]
    with torch.no_grad():
        features.eval()(x)
    for handle in handles:
        handle.remove()
    features.train()
    if idle:
        raise InputError(
            f"lora_targets: model {name!r} uses the weight of {min(idle)!r} without calling the layer, so an "
            "adapter there would do nothing; name other linear layers."
        )


def _targets(name: str, body: nn.Module, targets: str | list[str] | None) -> list[str]:
    """The full names of the layers that are meant."""
    linear = [n for n, module in body.named_modules() if isinstance(module, nn.Linear)]
    last = dict.fromkeys(n.rpartition(".")[2] for n in linear)
    if targets is None:
        targets = list(next((names for names in ATTENTION if last.keys() >= {*names}), ()))
    wanted = [targets] if isinstance(targets, str) else targets
    found = {target: [n for n in linear if f".{n}".endswith(f".{target}")] for target in wanted}
    if not found or not all(found.values()):
        missing = next((f"no linear layer {t!r}" for t, own in found.items() if not own), "no usual ones")
        choose = f"choose from {', '.join(last)}" if last else "it has no linear layers, which LoRA requires"
        raise InputError(f"lora_targets: model {name!r} has {missing}; {choose}.")
    return [n for names in found.values() for n in names]


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters of peft's in them, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BaseTunerLayer)}


def merged(model: nn.Module) -> nn.Module:
    """A copy with W + (alpha / r) B A in place of each adapted W; ``model`` itself where there are none."""
    if not adapted(model):
        return model
    copied: Any = copy.deepcopy(model)
    if hasattr(copied, "merge_and_unload"):  # a PeftModel of the user's own
        whole: nn.Module = copied.merge_and_unload()
        return whole
    for name, layer in adapted(copied).items():
        layer.merge()
        copied.set_submodule(name, layer.get_base_layer())
    return copied
