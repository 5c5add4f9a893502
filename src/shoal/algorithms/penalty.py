"""The weight of a penalty over the course of training, once for every algorithm that has one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import InputError


class PenaltyWeight(nn.Module):
    """Rises from 0 to ``weight``: off for ``start`` steps, then linearly over ``ramp`` steps, then constant.

    The step count is a buffer, so the schedule survives a checkpoint, and the weight is a tensor on the
    model's device, so reading it never waits for the device.

    >>> schedule = PenaltyWeight(2.0, start=1, ramp=2)
    >>> [schedule.next().item() for _ in range(5)]
    [0.0, 0.0, 1.0, 2.0, 2.0]
    """

    count: Tensor

    def __init__(self, weight: float, start: int = 0, ramp: int = 0) -> None:
        super().__init__()
        for name, value in (("weight", weight), ("start", start), ("ramp", ramp)):
            if not value >= 0:
                raise InputError(f"the penalty's {name} must not be negative, got {value}.")
        self.weight = weight
        self.start = start
        self.ramp = ramp
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def next(self) -> Tensor:
        """The weight for this step; counts it."""
        past = (self.count - self.start).double()
        self.count += 1
        share = (past / self.ramp).clamp(0, 1) if self.ramp else (past >= 0).double()
        return self.weight * share
