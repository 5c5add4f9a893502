"""The network of DomainBed's MNIST experiments (Gulrajani and Lopez-Paz, 2021)."""

from __future__ import annotations

from typing import Annotated

from shoal.models.feature_model import FeatureModel, convolutions
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(8, 2**14, multiple=8)] = 64
) -> FeatureModel:
    """Four convolutions, the second of stride 2; the first is ``width`` wide, the others twice that."""
    return convolutions("mnist-cnn", input_shape, classes, [width, *[2 * width] * 3], [1, 2, 1, 1])
