"""Fish and domain batches in other trainers: :mod:`shoal.integrations.lightning` and
:mod:`shoal.integrations.transformers`. Import the one you need; neither package is imported otherwise."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shoal.optim import Fish


def find_fish(optimizer: Any) -> Fish | None:
    """The optimizer if it is Fish, also where Accelerate has wrapped it."""
    bare = getattr(optimizer, "optimizer", optimizer)
    return bare if isinstance(bare, Fish) else None


def slow_weights(optimizer: Any, model: nn.Module) -> AbstractContextManager[None]:
    """Within the block the model holds the slow weights, if the optimizer is Fish."""
    fish = find_fish(optimizer)
    return nullcontext() if fish is None else fish.slow_weights(model)


def warn_of_partial_loop(optimizer: Any, max_steps: int) -> None:
    """Warns if ``max_steps`` ends training within an inner loop."""
    if (fish := find_fish(optimizer)) is not None and max_steps > 0 and max_steps % fish.inner_steps:
        whole = -(-max_steps // fish.inner_steps) * fish.inner_steps
        message = f"max_steps={max_steps} is not a multiple of inner_steps={fish.inner_steps}: training ends"
        warnings.warn(f"{message} within an inner loop of Fish. Use max_steps={whole}.", stacklevel=3)
