"""The verbs an algorithm trains with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.gradients import gradient


class Engine:
    """Owns the optimizer step, so that algorithms say *what* is applied and never how.

    ``params`` are the parameters the optimizer trains, in its order.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.params: list[nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return gradient(loss, self.params)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device named, or CUDA where there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
