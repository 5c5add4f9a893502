"""The network of DomainBed's MNIST experiments (Gulrajani and Lopez-Paz, 2021)."""

from __future__ import annotations

from typing import Annotated

from shoal.models.feature_model import FeatureModel, convolutions
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(8, 2**14, multiple=8)] = 64
) -> FeatureModel:
    """Build a network of four convolutions, the second with stride 2 and the last three with twice the width.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        width: number of channels of the first convolution.
    """
    return convolutions("mnist-cnn", input_shape, classes, [width, *[2 * width] * 3], [1, 2, 1, 1])
