"""Any backbone of timm as a :class:`~shoal.models.FeatureModel`, and files of weights under timm's names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.data.images import MEAN, STD
from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, with_head
from shoal.settings import Range, checked
from shoal.vision import load_timm

BODY = "features.body."
DERIVED = ("relative_position_index", "num_batches_tracked")
"""Buffers that follow from the architecture, or that inference has no use for."""


def known(name: str) -> bool:
    """Whether timm has a model of this name; InputError where timm cannot be used."""
    return bool(load_timm().is_model(name))


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    pretrained: bool | None = None,
    freeze_batchnorm: bool = True,
    frozen: bool = False,
    dropout: Annotated[float, Range(0, below=1)] = 0.0,
) -> FeatureModel:
    """Build a timm model without its classifier, with a linear head; see also the options of LoRA.

    Args:
        name: name of the model in timm.
        input_shape: shape of an input, without the batch dimension; transformers are built for this size.
        classes: number of classes, or ``None`` for regression.
        pretrained: use the weights of timm (default: if the name has some, as in ``resnet50.tv_in1k``).
        freeze_batchnorm: do not update the BatchNorm statistics of pretrained weights.
        frozen: train only the head, on features of images without augmentation.
        dropout: dropout rate of the features.
    """
    timm = load_timm()
    pretrained = "." in name if pretrained is None else pretrained
    if len(input_shape) != 3:
        raise InputError(f"model {name!r} takes images, input_shape (c, h, w); not {input_shape}.")
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0, "in_chans": input_shape[0]}
    try:
        if getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False):
            options["img_size"] = input_shape[1:]
        body = timm.create_model(name, **options)
    except (OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        advice = "; set weights to a file" if pretrained else ""
        raise InputError(f"model {name!r} cannot be loaded ({first}){advice}.") from error
    config = timm.data.resolve_model_data_config(body)
    features = Backbone(body, config["mean"], config["std"], freeze_batchnorm, frozen)
    model = with_head(name, features, input_shape, classes, dropout)
    if pretrained:
        about = body.pretrained_cfg
        model.weights = f"{about['architecture']}.{about['tag']} of timm {timm.__version__}"
        features.has_weights()
    return model


class Backbone(nn.Module):
    """A network that wants images, which come normalised for ImageNet, with another mean and deviation.

    If it is ``frozen``, what has two dimensions, (B, d), is taken for its features as they are: the same
    model trains its head on features that were computed once, and predicts from images.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        body: nn.Module,
        mean: tuple[float, ...] = MEAN,
        deviation: tuple[float, ...] = STD,
        freeze_batchnorm: bool = True,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.body, self.freeze_batchnorm, self.frozen = body, freeze_batchnorm, frozen
        self.normalizes = (*mean, *deviation) != (*MEAN, *STD) and len(mean) == len(MEAN)
        if self.normalizes:
            own, wanted = (torch.tensor(v).view(-1, 1, 1) for v in (STD, deviation))
            shift = (torch.tensor(MEAN) - torch.tensor(mean)).view(-1, 1, 1) / wanted
            self.register_buffer("scale", own / wanted, persistent=False)
            self.register_buffer("shift", shift, persistent=False)
        self.requires_grad_(not frozen)

    def has_weights(self) -> None:
        """To be called when the weights are no longer random."""
        if self.freeze_batchnorm:
            freeze_batchnorm(self.body)

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen and x.dim() == 2:
            return x
        if self.normalizes and x.shape[1] == len(self.scale):
            x = x * self.scale + self.shift
        features: Tensor = self.body(x)
        return features


@checked
def freeze_batchnorm(model: nn.Module) -> list[str]:
    """Keep the running statistics of every BatchNorm layer in training mode too, in place.

    The layers normalise with their pretrained means and variances; their scales and shifts are still trained.
    Layers whose statistics were never updated are left as they are. Weights and their names do not change. ::

        model = torchvision.models.resnet50(weights="IMAGENET1K_V2")
        freeze_batchnorm(model)

    Args:
        model: any network with pretrained weights.

    Returns:
        The names of the layers that are now frozen.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and "train" not in vars(module):
            mean = module.running_mean
            if mean is not None and mean.count_nonzero():
                module.train = partial(_eval, module)  # type: ignore[assignment, method-assign]
                module.eval()
                names.append(name)
    return names


def _eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


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
    resize = getattr(sys.modules[type(features.body).__module__], "checkpoint_filter_fn", None)
    if resize and any(k in inside and v.shape != state[inside[k]].shape for k, v in found.items()):
        found = resize(found, features.body)  # position embeddings, as timm does for its own weights
    found = {
        k: v for k, v in found.items() if k in inside or not (k.startswith(ignored) or k.endswith(DERIVED))
    }
    replaced = {inside.get(k, k): v for k, v in found.items()}
    needed = {own for own in inside.values() if not own.endswith(DERIVED)}
    return {k: v for k, v in state.items() if k not in needed} | replaced
