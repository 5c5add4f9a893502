"""A model in two parts, features and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class FeatureModel(nn.Module):
    """A model with explicit features, ``head(features(x))``, for algorithms that use them.

    Args:
        features: module that computes the features.
        head: module that computes the output from them; nothing is reshaped in between.
    """

    recipe: Mapping[str, Any] | None = None
    """Name and options with which :func:`shoal.models.build` built it."""
    weights: str = ""
    """Pretrained weights that :func:`shoal.models.build` loaded, if any."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Any) -> Tensor:
        output: Tensor = self.head(self.features(x))
        return output


def linear_head(width: int, classes: int | None) -> nn.Module:
    """From ``width`` features to logits (B, classes), or for ``None`` to one number per example (B,)."""
    if classes is None:
        return nn.Sequential(nn.Linear(width, 1), nn.Flatten(start_dim=0))
    return nn.Linear(width, classes)
