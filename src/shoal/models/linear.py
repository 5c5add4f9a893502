"""A linear model of flat features."""

from __future__ import annotations

from torch import nn

from shoal.models.feature_model import FeatureModel, flat_width, linear_head


def build(input_shape: tuple[int, ...], classes: int | None) -> FeatureModel:
    """Build a linear model.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
    """
    return FeatureModel(nn.Identity(), linear_head(flat_width("linear", input_shape), classes))
