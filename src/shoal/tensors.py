"""The floating type for sums, and nests of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices that have no such numbers."""


def widest(device: torch.device) -> torch.dtype:
    """The floating type for sums: float64 where the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` laid out in memory as ``other``, which has the same shape; itself where it is already."""
    strides = zip(other.shape, tensor.stride(), other.stride(), strict=True)
    if all(size == 1 or a == b for size, a, b in strides):
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def map_nest(function: Callable[[Any], Any], x: Any) -> Any:
    """A nest of lists, tuples and mappings with ``function`` of every other part in its place.

    Not by torch's pytree, to which a subclass of dict, such as an output of transformers, is a leaf.
    """
    if isinstance(x, Mapping):
        return type(x)({k: map_nest(function, part) for k, part in x.items()})  # type: ignore[call-arg]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_nest(function, part) for part in x))
    if isinstance(x, (list, tuple)):
        return type(x)(map_nest(function, part) for part in x)
    return function(x)
