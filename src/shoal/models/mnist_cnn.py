"""The network of DomainBed's MNIST experiments (Gulrajani and Lopez-Paz, 2021)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.settings import Range

GROUPS = 8


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(8, 2**14, multiple=8)] = 64
) -> FeatureModel:
    """Four 3 × 3 convolutions, the second of stride 2; ReLU and GroupNorm after each; mean over the image.

    The first is ``width`` wide, the others twice that.
    """
    if len(input_shape) != 3 or input_shape[0] < 1 or min(input_shape[1:]) < 8:
        raise InputError(
            f"model 'mnist-cnn' takes images, input_shape (c, h, w) of at least 8 × 8; not {input_shape}."
        )
    widths = [input_shape[0], width, 2 * width, 2 * width, 2 * width]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        stride = 2 if i == 1 else 1
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(GROUPS, after)]
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureModel(features, linear_head(widths[-1], classes))
