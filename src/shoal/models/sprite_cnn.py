"""The network of the CdSprites experiments (Shi et al., 2022)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.settings import Range

# Widths after each convolution, in units of `width`; 32 × 32 images need one halving less.
CHANNELS = {64: (1, 1, 2, 4, 4), 32: (1, 1, 2, 4)}


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(1, 2**14)] = 32
) -> FeatureModel:
    """Build a network of 4 × 4 convolutions with stride 2: five for 64 × 64 images, four for 32 × 32.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        width: number of channels of the first convolution.
    """
    if len(input_shape) != 3 or input_shape[0] < 1 or input_shape[1:] not in [(s, s) for s in CHANNELS]:
        raise InputError(f"model 'sprite-cnn' takes images (c, 64, 64) or (c, 32, 32); not {input_shape}.")
    widths = [input_shape[0], *(width * c for c in CHANNELS[input_shape[1]])]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        last = i == len(widths) - 2
        layers += [nn.Conv2d(before, after, 4, stride=2, padding=0 if last else 1), nn.ReLU()]
    return FeatureModel(nn.Sequential(*layers, nn.Flatten()), linear_head(widths[-1], classes))
