"""A linear probe: the head of a model trained alone, with the rest frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.errors import InputError
from shoal.models.head import find_head


def probed_head(model: nn.Module, x: Any, option: str) -> nn.Module:
    """The head of ``model``, to be trained alone; ``x`` is a batch and ``option`` what asked for it."""
    try:
        head = find_head(model, x)
    except InputError as error:
        raise InputError(f"{option} trains only the head: {error}") from error
    own = {id(p) for p in head.parameters()}
    if not any(p.requires_grad for p in head.parameters()):
        raise InputError(f"{option} trains only the head, and no parameter of it requires a gradient.")
    if all(id(p) in own for p in model.parameters()):
        raise InputError(
            f"{option} trains only the head, and {type(model).__name__} has no other parameters."
        )
    return head


@contextmanager
def only_trained(model: nn.Module, part: nn.Module | None) -> Iterator[None]:
    """Within the block no parameter outside ``part`` requires a gradient; ``None``: nothing changes."""
    own = {id(p) for p in (model if part is None else part).parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def train_mode(model: nn.Module, part: nn.Module | None) -> None:
    """Training mode for all of ``model``, or for ``part`` alone and evaluation mode for the rest."""
    model.train(part is None)
    if part is not None:
        part.train()
