"""A model in two parts, features and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import InputError


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


def linear_head(width: int, classes: int | None, dropout: float = 0.0) -> nn.Module:
    """From ``width`` features to logits (B, classes), or for ``None`` to one number per example (B,)."""
    linear = nn.Linear(width, classes or 1)
    parts: list[nn.Module] = [*[nn.Dropout(dropout)] * bool(dropout), linear]
    if classes is None:
        parts.append(nn.Flatten(start_dim=0))
    return nn.Sequential(*parts) if len(parts) > 1 else linear


def with_head(
    name: str, features: nn.Module, input_shape: tuple[int, ...], classes: int | None, dropout: float
) -> FeatureModel:
    """The features of images, of the model called ``name``, with a linear head."""
    try:
        with torch.no_grad():
            width = features.eval()(torch.zeros(1, *input_shape)).flatten(1).shape[1]
    except (RuntimeError, AssertionError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(f"model {name!r} cannot take images {tuple(input_shape)}: {first}") from error
    return FeatureModel(features, linear_head(width, classes, dropout)).train()
