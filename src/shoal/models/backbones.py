"""Any backbone of timm as a :class:`~shoal.models.FeatureModel`."""

from __future__ import annotations

from typing import Annotated, Self

import torch
from torch import Tensor, nn

from shoal.data.images import DEVIATION, MEAN
from shoal.errors import InputError
from shoal.models.batchnorm import freeze_batchnorm as freeze
from shoal.models.feature_model import FeatureModel, with_head
from shoal.settings import Range
from shoal.vision import load_timm


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
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        pretrained: use the weights of timm, which it downloads and caches: those in the name, as in
            ``resnet50.tv_in1k``, otherwise its default (default: if the name includes weights). For weights
            from a file, see ``--weights``.
        freeze_batchnorm: do not update the BatchNorm statistics of pretrained weights, which small batches of
            one domain would distort; scale and shift are trained.
        frozen: train only the head, on features of images without augmentation.
        dropout: dropout rate of the features.
    """
    timm = load_timm()
    pretrained = "." in name if pretrained is None else pretrained
    if len(input_shape) != 3:
        raise InputError(f"model {name!r} takes images, input_shape (c, h, w); not {input_shape}.")
    try:
        body = timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=input_shape[0])
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

    A ``frozen`` network is not trained; then what has two dimensions, (B, d), is taken for its features as
    they are, so that the same model trains its head on features that were computed once, and predicts from
    images.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        body: nn.Module,
        mean: tuple[float, ...] = MEAN,
        deviation: tuple[float, ...] = DEVIATION,
        freeze_batchnorm: bool = True,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.body, self.freeze_batchnorm, self.frozen = body, freeze_batchnorm, frozen
        self.normalizes = (*mean, *deviation) != (*MEAN, *DEVIATION) and len(mean) == len(MEAN)
        if self.normalizes:
            own, wanted = (torch.tensor(v).view(-1, 1, 1) for v in (DEVIATION, deviation))
            shift = (torch.tensor(MEAN) - torch.tensor(mean)).view(-1, 1, 1) / wanted
            self.register_buffer("scale", own / wanted, persistent=False)
            self.register_buffer("shift", shift, persistent=False)
        self.requires_grad_(not frozen)

    def has_weights(self) -> None:
        """To be called when the weights are no longer random."""
        if self.freeze_batchnorm:
            freeze(self.body)

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen and x.dim() == 2:
            return x
        if self.normalizes and x.shape[1] == len(self.scale):
            x = x * self.scale + self.shift
        features: Tensor = self.body(x)
        return features
