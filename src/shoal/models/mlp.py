"""A small multilayer perceptron for flat features."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from shoal.models.feature_model import FeatureModel, flat_width, linear_head
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...], classes: int | None, width: Annotated[int, Range(1, 2**14)] = 64
) -> FeatureModel:
    """Build a multilayer perceptron with two hidden layers and ReLU.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        width: width of the hidden layers.
    """
    features = nn.Sequential(
        nn.Linear(flat_width("mlp", input_shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    )
    return FeatureModel(features, linear_head(width, classes))
