"""A model in two parts, features and head, and what several models are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

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


def convolutions(
    model: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    widths: Sequence[int],
    strides: Sequence[int],
) -> FeatureModel:
    """3 × 3 convolutions, ReLU and GroupNorm after each, the mean over the image, and a linear head.

    GroupNorm, not BatchNorm: an example's output must not depend on which domains share its batch.
    """
    if len(input_shape) != 3 or input_shape[0] < 1 or min(input_shape[1:]) < 8:
        raise InputError(
            f"model {model!r} takes images, input_shape (c, h, w) of at least 8 × 8; not {input_shape}."
        )
    layers: list[nn.Module] = []
    for (before, after), stride in zip(pairwise([input_shape[0], *widths]), strides, strict=True):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, after)]
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureModel(features, linear_head(widths[-1], classes))
