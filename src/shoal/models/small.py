"""Small networks for tables and small images, by name in :data:`shoal.registry.MODELS`.

Each takes the shape of an input without the batch dimension and the number of classes (``None``: regression).
None of them has BatchNorm: the output for an example must not depend on the domains in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from annotated_types import MultipleOf
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.settings import Range

Shape = tuple[int, ...]
Width = Annotated[int, Range(1, 2**14)]
Channels = Annotated[int, Range(8, 2**14), MultipleOf(8)]
"""GroupNorm has eight groups."""


def linear(input_shape: Shape, classes: int | None) -> FeatureModel:
    """Build a linear model of flat features."""
    return FeatureModel(nn.Identity(), linear_head(_flat("linear", input_shape), classes))


def pixel_linear(
    input_shape: Shape, classes: int | None, side: Annotated[int, Range(1, 256)] = 8
) -> FeatureModel:
    """Build a linear model of an image that is averaged to a few pixels.

    Args:
        side: height and width of the averaged image.
    """
    _images("pixel-linear", input_shape, 1)
    side = min(side, *input_shape[1:])
    features = nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())
    return FeatureModel(features, linear_head(input_shape[0] * side**2, classes))


def tfidf_linear(
    input_shape: Shape, classes: int | None, vocabulary: Annotated[int, Range(1, 2**22)] = 30522
) -> FeatureModel:
    """Build a linear model of the TF-IDF of token ids.

    Args:
        vocabulary: number of tokens of the tokenizer.
    """
    return FeatureModel(TfIdf(vocabulary), linear_head(vocabulary, classes))


class TfIdf(nn.Module):
    """The counts of each token of a text, times ``idf``, scaled to Euclidean norm 1: (B, vocabulary).

    It takes ``input_ids`` and ``attention_mask`` (B, L); ``idf`` is 1 for all tokens at first.
    """

    idf: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("idf", torch.ones(vocabulary))

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        mask = x["attention_mask"].to(self.idf.dtype)
        counts = mask.new_zeros(mask.shape[0], len(self.idf)).scatter_add(1, x["input_ids"], mask)
        return nn.functional.normalize(counts * self.idf)


def mlp(input_shape: Shape, classes: int | None, width: Width = 64) -> FeatureModel:
    """Build a multilayer perceptron with two hidden layers and ReLU.

    Args:
        width: width of the hidden layers.
    """
    inputs = _flat("mlp", input_shape)
    features = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return FeatureModel(features, linear_head(width, classes))


def tabular(
    input_shape: Shape,
    classes: int | None,
    width: Width = 64,
    depth: Annotated[int, Range(0, 1000)] = 1,
    dropout: Annotated[float, Range(0, below=1)] = 0.5,
) -> FeatureModel:
    """Build a residual network for tables: a linear layer, ``depth`` residual blocks and a linear head.

    The blocks are initialized to zero, so that training starts from a linear model, which is a strong
    baseline on small tables.

    Args:
        width: width of the blocks.
        depth: number of blocks; 2 for tables of many thousands of rows, 0 for a linear model.
        dropout: dropout rate within each block. It can be large, because the linear part bypasses it.
    """
    inputs = _flat("tabular", input_shape)
    blocks = [Block(width, dropout) for _ in range(depth)]
    return FeatureModel(nn.Sequential(nn.Linear(inputs, width), *blocks), linear_head(width, classes))


class Block(nn.Module):
    """``x + W₂ ReLU(W₁ LayerNorm(x))``, with dropout before W₂, which starts at zero."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        last = nn.Linear(width, width)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        inner = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)
        self.change = nn.Sequential(*inner, last)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.change(x)
        return changed


def small_cnn(input_shape: Shape, classes: int | None, width: Channels = 32) -> FeatureModel:
    """Build a network of three convolutions, the last two with stride 2 and twice the width.

    Args:
        width: number of channels of the first convolution.
    """
    return _convolutions("small-cnn", input_shape, classes, [width, 2 * width, 2 * width], [1, 2, 2])


def mnist_cnn(input_shape: Shape, classes: int | None, width: Channels = 64) -> FeatureModel:
    """Build the network of DomainBed's MNIST experiments: four convolutions, the second with stride 2.

    Reference: Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021.

    Args:
        width: number of channels of the first convolution; the others have twice as many.
    """
    return _convolutions("mnist-cnn", input_shape, classes, [width, *[2 * width] * 3], [1, 2, 1, 1])


def sprite_cnn(input_shape: Shape, classes: int | None, width: Width = 32) -> FeatureModel:
    """Build the network of the CdSprites experiments: 4 × 4 convolutions with stride 2.

    There are five for 64 × 64 images and four for 32 × 32.

    Reference: Shi et al., Gradient Matching for Domain Generalization, ICLR 2022.

    Args:
        width: number of channels of the first convolution.
    """
    sizes: dict[Shape, Shape] = {(64, 64): (1, 1, 2, 4, 4), (32, 32): (1, 1, 2, 4)}
    if (factors := sizes.get(input_shape[1:])) is None:
        raise InputError(f"model 'sprite-cnn' takes images (c, 64, 64) or (c, 32, 32); not {input_shape}.")
    layers, inputs = list[nn.Module](), input_shape[0]
    for n, factor in enumerate(factors, 1):
        padding = 1 if n < len(factors) else 0
        layers += [nn.Conv2d(inputs, width * factor, 4, stride=2, padding=padding), nn.ReLU()]
        inputs = width * factor
    return FeatureModel(nn.Sequential(*layers, nn.Flatten()), linear_head(inputs, classes))


def _flat(model: str, input_shape: Shape) -> int:
    """The d of an input shape (d,)."""
    if len(input_shape) != 1:
        raise InputError(f"model {model!r} takes flat features, input_shape (d,); not {input_shape}.")
    return input_shape[0]


def _images(model: str, input_shape: Shape, least: int) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        at_least = f"at least {least} × {least}"
        raise InputError(f"model {model!r} takes images (c, h, w) of {at_least}; not {input_shape}.")


def _convolutions(
    model: str, input_shape: Shape, classes: int | None, widths: Sequence[int], strides: Sequence[int]
) -> FeatureModel:
    """3 × 3 convolutions, ReLU and GroupNorm after each, the mean over the image, and a linear head."""
    _images(model, input_shape, 8)
    layers, inputs = list[nn.Module](), input_shape[0]
    for outputs, stride in zip(widths, strides, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, outputs)]
        inputs = outputs
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureModel(features, linear_head(inputs, classes))
