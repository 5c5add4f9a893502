"""A residual network for tables, whose features are standardised numbers."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn

from shoal.models.feature_model import FeatureModel, flat_width, linear_head
from shoal.settings import Range


def build(
    input_shape: tuple[int, ...],
    classes: int | None,
    width: Annotated[int, Range(1, 2**14)] = 64,
    depth: Annotated[int, Range(0, 1000)] = 1,
    dropout: Annotated[float, Range(0, below=1)] = 0.5,
) -> FeatureModel:
    """A linear layer, then ``depth`` blocks that each add to what they get; a linear head.

    Nothing stands between the first layer and the head but additions, and blocks begin by adding nothing: so
    training starts from a linear model, which on small tables is hard to beat, and departs from it as far as
    the data ask. LayerNorm within the blocks, not BatchNorm: an example's output must not depend on which
    domains share its batch.

    Args:
        width: numbers between blocks and within.
        depth: how many blocks; a second one is for tables of many thousands of rows, 0 is a linear model.
        dropout: the share of numbers left out within each block, in training. It may be large: what is
            linear does not pass through it.
    """
    inputs = flat_width("tabular", input_shape)
    blocks = [Block(width, dropout) for _ in range(depth)]
    return FeatureModel(nn.Sequential(nn.Linear(inputs, width), *blocks), linear_head(width, classes))


class Block(nn.Module):
    """``x + W₂ ReLU(W₁ LayerNorm(x))``, with dropout before W₂, which starts at zero."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        last = nn.Linear(width, width)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.change = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), last
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.change(x)
        return changed
