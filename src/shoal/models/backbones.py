"""Any backbone of timm as a :class:`~shoal.models.FeatureModel`."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.batchnorm import keep_statistics
from shoal.models.feature_model import FeatureModel, with_head
from shoal.models.lora import Alpha, Dropout, Rank, inject
from shoal.settings import Range
from shoal.vision import load_timm

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, with which image datasets come normalised."""
PUBLISHED = "tv_in1k"
"""timm's tag of torchvision's first weights (IMAGENET1K_V1), with which DomainBed and WILDS began."""


def known(name: str) -> bool:
    """Whether timm has a model of this name; InputError where it has not its weights, or cannot be used."""
    timm = load_timm()
    if not timm.is_model(name):
        return False
    kind, dot, tag = name.partition(".")
    full = timm.list_pretrained(f"{kind}.*")
    if dot and name not in full:
        tags = ", ".join(each.partition(".")[2] for each in full) or "none"
        raise InputError(f"model {kind!r} has no weights {tag!r} in timm; there are {tags}.")
    return True


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    pretrained: bool | None = None,
    freeze_batchnorm: bool | None = None,
    frozen: bool = False,
    dropout: Annotated[float, Range(0, below=1)] = 0.0,
    lora: Rank | None = None,
    lora_alpha: Alpha | None = None,
    lora_dropout: Dropout = 0.0,
    lora_targets: list[str] | str | None = None,
) -> FeatureModel:
    """Build a timm model without its classifier, with a linear head.

    Args:
        name: name of the model in timm.
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        pretrained: use the weights of timm, which it downloads and caches: those in the name, as in
            ``resnet50.tv_in1k``, otherwise the default of timm (default: if the name includes weights). For
            weights from a file, see ``--weights``.
        freeze_batchnorm: do not update BatchNorm statistics in training, since small batches of one domain
            would distort them; scale and shift are trained (default: if the weights are pretrained or from a
            file, as in the published results of DomainBed).
        frozen: train only the head, on features of images without augmentation.
        dropout: dropout rate of the features.
        lora: rank of low-rank adapters (with peft); only these and the head are trained, and BatchNorm is
            frozen.
        lora_alpha: scale of the adapters, ``lora_alpha`` / ``lora`` (default: 2 · ``lora``).
        lora_dropout: dropout rate of the inputs of the adapters.
        lora_targets: names of linear layers, or their last parts, that get adapters (default: the layer
            ``qkv`` of attention, or its query and value projections).
    """
    timm = load_timm()
    pretrained = "." in name if pretrained is None else pretrained
    if len(input_shape) != 3:
        raise InputError(f"model {name!r} takes images, input_shape (c, h, w); not {input_shape}.")
    try:
        body = timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=input_shape[0])
    except (OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the weights of {name!r} cannot be loaded ({first}); set weights to a file."
        ) from error
    if lora is not None:
        inject(body, name, lora, lora_alpha, lora_dropout, lora_targets)
        freeze_batchnorm = True
    config = timm.data.resolve_model_data_config(body)
    features = (Frozen if frozen else Backbone)(body, freeze_batchnorm, config["mean"], config["std"])
    model = with_head(name, features, torch.zeros(1, *input_shape), classes, dropout)
    if pretrained:
        model.weights = _weights(name, body)
        features.has_weights()
    return model


def _weights(name: str, body: Any) -> str:
    """What timm calls the pretrained weights of ``body``; a warning where ``name`` leaves it to timm."""
    timm, config = load_timm(), body.pretrained_cfg
    full, published = f"{config['architecture']}.{config['tag']}", f"{config['architecture']}.{PUBLISHED}"
    if "." not in name and full != published and published in timm.list_pretrained(f"{name}.*"):
        warnings.warn(
            f"model {name!r}: the weights are timm's default, {full}; the published results of DomainBed and "
            f"WILDS began with torchvision's, {published}.",
            stacklevel=3,
        )
    return f"{full} of timm {timm.__version__}"


class Backbone(nn.Module):
    """A network that wants images normalised its own way, with BatchNorm that may be frozen.

    ``freeze_batchnorm=None``: once it :meth:`has_weights`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        body: nn.Module,
        freeze_batchnorm: bool | None,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.body, self.freeze_batchnorm = body, freeze_batchnorm
        self.normalising = (*mean, *deviation) != (*MEAN, *DEVIATION) and len(mean) == len(MEAN)
        if self.normalising:
            own, wanted = torch.tensor(DEVIATION), torch.tensor(deviation)
            shift = (torch.tensor(MEAN) - torch.tensor(mean)) / wanted
            self.register_buffer("scale", (own / wanted).view(-1, 1, 1), persistent=False)
            self.register_buffer("shift", shift.view(-1, 1, 1), persistent=False)
        if freeze_batchnorm:
            self._freeze()

    def _freeze(self) -> None:
        for module in self.body.modules():
            if isinstance(module, _BatchNorm):
                keep_statistics(module)

    def has_weights(self) -> None:
        """To be called when the weights are no longer random."""
        if self.freeze_batchnorm is None:
            self._freeze()

    def forward(self, x: Tensor) -> Tensor:
        if self.normalising and x.shape[1] == len(self.scale):
            x = x * self.scale + self.shift
        features: Tensor = self.body(x)
        return features


class Frozen(Backbone):
    """A backbone that is not trained. Beside images (B, c, h, w) it takes their features (B, d), as they are:
    so the same model trains its head on features that were computed once, and predicts from images."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 2 else super().forward(x)
