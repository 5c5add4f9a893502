"""Other people's files of weights: timm's and torchvision's names, whatever is in front of them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.files import parse_yaml
from shoal.models.backbones import Backbone
from shoal.models.feature_model import FeatureModel

SAME = (
    r"resnet(18|34|50|101|152)|resnext(50_32x4d|101_32x8d|101_64x4d)|wide_resnet(50|101)_2"
    r"|densenet(121|161|169|201)|vgg(11|13|16|19)(_bn)?|inception_v3|efficientnet_b[0-7]"
    r"|convnext_(tiny|small|base|large)"
)
"""Models that timm and torchvision call by the same name."""
LAST = (".proj.0.", ".proj.1.", ".reduction.")
"""Modules of torchvision's RegNet and Swin that timm registers after the others of their block."""
DERIVED = ("relative_position_index", "num_batches_tracked")
"""Buffers that follow from the architecture, or that inference has no use for."""


def torchvision_name(name: str) -> str | None:
    """What torchvision calls timm's model ``name``; ``None`` where it has none that is the same."""
    name = name.partition(".")[0].removeprefix("tv_")
    return name if re.fullmatch(SAME, name) else other_names().get(name)


@functools.cache
def other_names() -> dict[str, str]:
    """timm's names of networks that torchvision calls otherwise."""
    text = resources.files("shoal.models").joinpath("torchvision.yaml").read_text(encoding="utf-8")
    found: dict[str, str] = parse_yaml(text)
    return found


def fitting(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``weights`` under the names and in the shapes of ``model``; InputError where they do not fit.

    They are the whole model's, or those of timm's backbone under timm's or torchvision's names, with anything
    in front of the names. Then the classifier in the file is not used, and the model keeps its own head.
    """
    own = model.state_dict()
    if set(own) == set(weights):
        return dict(weights)
    if not isinstance(model, FeatureModel) or not isinstance(model.features, Backbone):
        raise _misfit(model, own, weights)
    body = model.features.body
    needed = [k for k in body.state_dict() if not k.endswith(DERIVED)]
    found = _under_prefix(weights, needed, _classifiers(body))
    if found is None and (name := torchvision_name((model.recipe or {}).get("name", ""))):
        found = _of_torchvision(weights, name, body)
        if found is not None and name != "inception_v3":  # which normalises as timm's does, inside
            _fold_normalisation(found, model.features)
    if found is None:
        raise _misfit(model, body.state_dict(), weights)
    _adapt_input(found, body)
    wrong = [k for k in needed if found[k].shape != body.state_dict()[k].shape]
    if wrong:
        k, shape = wrong[0], tuple(body.state_dict()[wrong[0]].shape)
        raise InputError(
            f"{len(wrong)} of the weights have another shape than the model's, such as {k!r}: "
            f"{tuple(found[k].shape)} in the file, {shape} in the model."
        )
    return {**own, **{f"features.body.{k}": v for k, v in found.items()}}


def _under_prefix(
    weights: Mapping[str, Tensor], needed: Sequence[str], classifiers: tuple[str, ...]
) -> dict[str, Tensor] | None:
    """What is ``needed``, if all of it is there behind one prefix with nothing else but a classifier."""
    for key in weights:
        if not key.endswith(needed[0]):
            continue
        prefix = key.removesuffix(needed[0])
        inside = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        lacking, unknown = _differences(needed, inside)
        if not lacking and all(k.startswith(classifiers) or k.endswith(DERIVED) for k in unknown):
            return {k: inside[k] for k in needed}
    return None


def _classifiers(body: nn.Module) -> tuple[str, ...]:
    """How the names of timm's classifier begin."""
    names = getattr(body, "pretrained_cfg", {}).get("classifier") or ()
    return (*(f"{name}." for name in ([names] if isinstance(names, str) else names)), "AuxLogits.")


def _of_torchvision(weights: Mapping[str, Tensor], name: str, body: nn.Module) -> dict[str, Tensor] | None:
    """torchvision's ``name`` under the names that its layers have in timm's ``body``.

    Both register the same layers in the same order, up to :data:`LAST` and ViT's position embedding. The file
    must have the very names of torchvision's model, so that no other can be taken for it. BatchNorm divides
    by √(variance + eps): a different eps goes into the variance, which leaves the function as it was.
    """
    theirs = _reference(name)
    keys = _in_order([k for k in theirs.state_dict() if not k.endswith(DERIVED) and "AuxLogits" not in k])
    needed = [k for k in body.state_dict() if not k.endswith(DERIVED)]
    last = tuple({f"{k.rpartition('.')[0]}." for k in keys[len(needed) :]})
    found = _under_prefix(weights, keys[: len(needed)], (*last, "AuxLogits."))
    if found is None:
        return None
    shapes, mapped = body.state_dict(), {}
    norms, modules = dict(body.named_modules()), dict(theirs.named_modules())
    for theirs_key, key in zip(keys, needed, strict=False):
        value = found[theirs_key]
        # A linear layer may be a 1 × 1 convolution in the other, and a scale (C, 1, 1) be (C,).
        mapped[key] = value.reshape(shapes[key].shape) if value.numel() == shapes[key].numel() else value
        if key.endswith("running_var"):
            layer, other = norms[key.rpartition(".")[0]], modules[theirs_key.rpartition(".")[0]]
            mapped[key] = value + (float(getattr(other, "eps", 0)) - float(getattr(layer, "eps", 0)))
    return mapped


def _reference(name: str) -> nn.Module:
    """torchvision's model, for the names and the order of its layers."""
    from torchvision import models

    options: dict[str, Any] = {"init_weights": False} if name == "inception_v3" else {}
    try:
        with torch.device("meta"):
            found: nn.Module = models.get_model(name, weights=None, **options)
    except NotImplementedError:  # RegNet computes its widths with tensors
        with torch.random.fork_rng(devices=[]):
            found = models.get_model(name, weights=None, **options)
    return found


def _in_order(keys: list[str]) -> list[str]:
    """torchvision's names in the order in which timm registers the same layers."""
    begins: dict[str, int] = {}
    for place, key in enumerate(keys):
        for part in LAST:
            if part in key:
                begins.setdefault(f"{key.partition(part)[0]}.", place)
    ranks = {}
    for place, key in enumerate(keys):
        block = next((p for p in begins if key.startswith(p)), None)
        ranks[key] = (begins[block], any(p in key for p in LAST), place) if block else (place, False, place)
    if "encoder.pos_embedding" in ranks:
        ranks["encoder.pos_embedding"] = (0, True, 0)
    return sorted(keys, key=ranks.__getitem__)


def _fold_normalisation(found: dict[str, Tensor], features: Backbone) -> None:
    """Undoes, in the first convolution, a normalisation of images other than torchvision's.

    With x' = s x + t, the weights w / s and the bias b − Σ (w / s) t give of x' what w and b give of x. That
    is exact without padding, as in ViT.
    """
    if not features.normalising:
        return
    name = features.body.pretrained_cfg["first_conv"]  # type: ignore[index]
    weight, scale, shift = found[f"{name}.weight"], features.scale, features.shift
    found[f"{name}.weight"] = weight / scale
    found[f"{name}.bias"] = found[f"{name}.bias"] - (weight / scale * shift).sum((1, 2, 3))


def _adapt_input(found: dict[str, Tensor], body: nn.Module) -> None:
    """Fits the first convolution to another number of channels, as timm does for its own weights."""
    from timm.models import adapt_input_conv

    names = getattr(body, "pretrained_cfg", {}).get("first_conv") or ()
    for name in [names] if isinstance(names, str) else names:
        key = f"{name}.weight"
        there, wanted = found[key].shape[1], body.state_dict()[key].shape[1]
        if found[key].shape[1] != wanted:
            warnings.warn(
                f"the weights are of a model for {there} channels and the images have {wanted}: "
                f"those of the first layer are {'summed' if wanted == 1 else 'repeated and scaled'}.",
                stacklevel=2,
            )
            found[key] = adapt_input_conv(wanted, found[key])


def _differences(needed: Iterable[str], there: Iterable[str]) -> tuple[list[str], list[str]]:
    needed, there = list(needed), set(there)
    return [k for k in needed if k not in there], sorted(there - set(needed))


def _misfit(model: nn.Module, own: Iterable[str], weights: Mapping[str, Tensor]) -> InputError:
    name = (getattr(model, "recipe", None) or {}).get("name", type(model).__name__)
    needed = [k for k in own if not k.endswith(DERIVED)]
    lacking, unknown = _differences(needed, [k for k in weights if not k.endswith(DERIVED)])
    first = f", {next(iter(weights))[:80]!r} first," if weights and not unknown else ""
    text = f"the {len(weights):,} tensors{first} are not those of model {name!r}"
    text += f"; it needs {_some(lacking)}" if lacking else ""
    text += f"; the file has {_some(unknown)}" if unknown else ""
    if isinstance(getattr(model, "features", None), Backbone):
        theirs = torchvision_name(name)
        known = f"{theirs!r} of torchvision" if theirs else "no model of torchvision's is the same"
        text += f".\nTaken are its own names, timm's, and torchvision's ({known})"
    return InputError(f"{text}.")


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(k[:80]) for k in keys[:3])
    return f"{shown} and {len(keys) - 3:,} more" if len(keys) > 3 else shown
