"""Handling of :class:`~shoal.optim.Fish` optimizers that both integrations share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from shoal.optim import Fish


def fish_among(optimizers: Iterable[Any]) -> list[Fish]:
    """The optimizers that are Fish, including those wrapped by Accelerate."""
    bare = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    return [optimizer for optimizer in bare if isinstance(optimizer, Fish)]


@contextmanager
def slow_weights(optimizers: Iterable[Any], model: nn.Module) -> Iterator[None]:
    """Within the block the model holds the slow weights of each Fish."""
    with ExitStack() as stack:
        for optimizer in fish_among(optimizers):
            stack.enter_context(optimizer.slow_weights(model))
        yield


def check_whole_loops(optimizers: Iterable[Any], max_steps: int) -> None:
    """Warns if ``max_steps`` ends training within an inner loop."""
    for optimizer in fish_among(optimizers):
        if max_steps > 0 and max_steps % (size := optimizer.inner_steps):
            warnings.warn(
                f"max_steps={max_steps} is not a multiple of inner_steps={size}: training ends within an "
                f"inner loop of Fish, with its inner weights. Take max_steps={-(-max_steps // size) * size}.",
                stacklevel=3,
            )
