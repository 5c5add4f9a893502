"""A model in two parts: what it sees and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.errors import InputError


class FeatureModel(nn.Module):
    """``head(features(x))``, for algorithms that look at the features between the two.

    ``features`` must give what ``head`` takes; nothing is reshaped in between.
    """

    recipe: Mapping[str, Any] | None = None
    """The name and options that :func:`shoal.models.build` made it by."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Any) -> Tensor:
        output: Tensor = self.head(self.features(x))
        return output


def linear_head(width: int, classes: int | None) -> nn.Module:
    """From ``width`` features to logits (B, classes), or to one number each (B,) where it is None."""
    if classes is None:
        return nn.Sequential(nn.Linear(width, 1), nn.Flatten(start_dim=0))
    return nn.Linear(width, classes)


def flat_width(model: str, input_shape: tuple[int, ...]) -> int:
    """The d of an input shape (d,), which is all that ``model`` takes."""
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise InputError(f"model {model!r} takes flat features, input_shape (d,); not {input_shape}.")
    return input_shape[0]
