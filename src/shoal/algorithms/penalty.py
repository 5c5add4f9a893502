"""What algorithms with a penalty have in common; the penalties themselves are in :mod:`shoal.penalties`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Log, Loss, Outputs
from shoal.data.batch import Task
from shoal.errors import InputError
from shoal.penalties import Blocks
from shoal.settings import Range, checked, log10
from shoal.tensors import widest

USUAL_STEPS = 5000
STEPS = Range(0, 10**9)
SHARE = Range(0, 2)
"""More than 1 is after its end: never."""
Steps = Annotated[int, STEPS] | Annotated[float, SHARE]
LateSteps = (
    Annotated[int, STEPS] | Annotated[float, replace(SHARE, search=log10(0, 4)._replace(of=USUAL_STEPS))]
)
"""Searched as DomainBed does for IRM and VREx: 1 to 10,000 steps of 5,000."""
BatchNorm = Literal["pooled", "per-domain"]
PASSES: dict[BatchNorm, Literal["together", "apart"]] = {"pooled": "together", "per-domain": "apart"}


class PenaltyWeight(nn.Module):
    """Rises from ``before`` to ``weight``: after ``start`` steps, linearly over ``ramp`` steps.

    Whole numbers are steps; a float is a fraction of ``steps``, rounded down, so that a schedule
    fits a short training as well as a long one (of 5,000, for which published settings are made, where nobody
    says).
    ``before`` is never more than ``weight``, so that a weight of 0 is no penalty at all. The step count is a
    buffer, so the schedule survives a checkpoint, and the weight is a tensor on the model's device, so
    reading it never waits for the device.

    >>> schedule = PenaltyWeight(2.0, start=1, ramp=2)
    >>> [schedule.next().item() for _ in range(5)]
    [0.0, 0.0, 1.0, 2.0, 2.0]
    """

    count: Tensor

    @checked
    def __init__(
        self,
        weight: Annotated[float, Range(0)],
        start: Steps = 0,
        ramp: Steps = 0,
        before: float = 0.0,
        steps: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.before = min(before, self.weight)
        self.start = in_steps(start, steps)
        self.ramp = in_steps(ramp, steps)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def next(self) -> Tensor:
        """The weight for this step; counts it."""
        past = (self.count - self.start).to(widest(self.count.device))
        self.count += 1
        share = (past / self.ramp).clamp(0, 1) if self.ramp else (past >= 0).to(past.dtype)
        return self.before + (self.weight - self.before) * share


def in_steps(count: float, steps: int | None) -> int:
    """Down, as DomainBed's ``int`` does; 0.29 of 100 steps, 28.999999999999996, is 29."""
    return math.floor(count * (steps or USUAL_STEPS) + 1e-9) if isinstance(count, float) else count


class Penalised(Algorithm):
    """Base class of algorithms that minimise the mean loss of the domains plus a weighted :meth:`penalty`.

    Args:
        model: model to train.
        loss: ``loss(output, y)``, a mean over examples.
        task: number of domains and classes, and kind of the task.
        weight: weight of the penalty.
        start: number of steps for which the weight is ``before``; a float is a fraction of the training.
        ramp: number of steps over which the weight then rises linearly; a float is a fraction of the
            training.
        batch_norm: whether BatchNorm statistics are computed over all domains or per domain, see
            :mod:`shoal.penalties`.
        features: name of the layer that returns the features (default: the input of the last linear layer).
    """

    before: ClassVar[float] = 0.0
    compares_domains = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: Annotated[float, Range(0, search=log10(-1, 1))] = 1.0,
        start: Steps = 0,
        ramp: Steps = 0,
        batch_norm: BatchNorm = "pooled",
        features: str | None = None,
    ) -> None:
        super().__init__(model, loss, task, features=features)
        self.passes = PASSES[batch_norm]
        self.weight = PenaltyWeight(weight, start, ramp, self.before, task.steps)

    def penalty(self, outputs: Outputs, losses: Tensor) -> Tensor:
        raise NotImplementedError

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses = self.losses(outputs)
        penalty = self.penalty(outputs, losses)
        total = losses.mean() + self.weight.next().to(penalty.dtype) * penalty
        return total, {"losses": losses.detach(), "penalty": penalty.detach()}


def blocks(outputs: Outputs, ids: Tensor | None = None) -> Blocks:
    """The batches of a step as blocks of examples."""
    return Blocks([len(v.y) for v in outputs], ids)


def pooled_features(outputs: Outputs) -> Tensor:
    return torch.cat([v.features for v in outputs])


def pooled_targets(outputs: Outputs) -> Tensor:
    return torch.cat([v.y for v in outputs])


def pooled_logits(outputs: Outputs, algorithm: object) -> Tensor:
    for each in outputs:
        if not isinstance(each.output, Tensor):
            raise InputError(
                f"{type(algorithm).__name__} needs a model whose output is one tensor, "
                f"got {type(each.output).__name__}."
            )
    return torch.cat([v.output for v in outputs])
