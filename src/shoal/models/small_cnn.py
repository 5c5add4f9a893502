"""A modest convolutional network for small images."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(8, 2**14, multiple=8)] = 32
) -> FeatureModel:
    """Three 3 × 3 convolutions, the last two of stride 2; ReLU and GroupNorm after each; mean over the image.

    GroupNorm, not BatchNorm: an example's output must not depend on which domains share its batch.
    """
    if len(input_shape) != 3 or input_shape[0] < 1 or min(input_shape[1:]) < 8:
        raise InputError(
            f"model 'small-cnn' takes images, input_shape (c, h, w) of at least 8 × 8; not {input_shape}."
        )
    widths = [input_shape[0], width, 2 * width, 2 * width]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        stride = 1 if i == 0 else 2
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, after)]
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureModel(features, linear_head(widths[-1], classes))
