"""Run a model again on batches it has seen, with the same random numbers and without changing its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

random_in_graph = False
"""Whether the step that is captured as a CUDA graph draws random numbers; set where it is captured."""


def random_state(model: nn.Module) -> list[Tensor]:
    """The state of the generators that ``model`` draws from: the CPU's, and those of its CUDA devices.

    Empty while a CUDA graph is captured, where generators cannot be read.
    """
    devices = _devices(model)
    if devices and torch.cuda.is_current_stream_capturing():
        if random_in_graph:
            raise RuntimeError("random numbers cannot be repeated within a CUDA graph")
        return []
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]


@contextmanager
def preserve_state(model: nn.Module, since: list[Tensor] | None = None) -> Iterator[None]:
    """Forward passes in this block change neither buffers nor random state.

    Second-order methods pass the same batches through the model more than once per step. Without this, each
    later pass would move BatchNorm's running statistics again and draw fresh dropout masks, so that the
    "same" loss would be another function. With ``since``, a :func:`random_state` from before, the block draws
    the numbers that were drawn after it, hence the same masks if it runs the same passes. ::

        before = random_state(model)
        losses = [criterion(model(x), y) for x, y in batches]           # statistics move, once
        with preserve_state(model, since=before):
            same = [criterion(model(x), y) for x, y in batches]
    """
    now = random_state(model)
    buffers = [(m, n, b, b.clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    if since is not None:
        set_random_state(model, since)
    try:
        yield
    finally:
        set_random_state(model, now)
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                buffer.copy_(saved)
                module._buffers[name] = buffer  # a forward pass may have put another tensor in its place


def set_random_state(model: nn.Module, states: list[Tensor]) -> None:
    """Restore what :func:`random_state` returned."""
    if states:
        torch.set_rng_state(states[0])
        for device, state in zip(_devices(model), states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


def _devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.is_cuda})
