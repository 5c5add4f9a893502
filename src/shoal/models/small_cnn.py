"""A modest convolutional network for small images."""

from __future__ import annotations

from typing import Annotated

from shoal.models.feature_model import FeatureModel, convolutions
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(8, 2**14, multiple=8)] = 32
) -> FeatureModel:
    """Build a network of three convolutions, the last two with stride 2 and twice the width.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        width: number of channels of the first convolution.
    """
    return convolutions("small-cnn", input_shape, classes, [width, 2 * width, 2 * width], [1, 2, 2])
