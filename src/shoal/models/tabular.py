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
    """Build a residual network for tables: a linear layer, ``depth`` residual blocks and a linear head.

    The blocks are initialized to zero, so that training starts from a linear model, which is a strong
    baseline on small tables. The blocks use LayerNorm instead of BatchNorm, because the output for an example
    must not depend on the domains in its batch.

    Args:
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        width: width of the blocks.
        depth: number of blocks; 2 for tables of many thousands of rows, 0 for a linear model.
        dropout: dropout rate within each block. It can be large, because the linear part bypasses it.
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
