"""What algorithms with a penalty have in common; the penalties themselves are in :mod:`shoal.penalties`."""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from shoal.algorithms.base import Algorithm, Log, Outputs, Step
from shoal.settings import Range, log10
from shoal.tensors import widest

USUAL_STEPS = 5000
STEPS = Range(0, 10**9)
FRACTION = Range(0, 2)
"""Of the training; more than 1 is after its end: never."""
Steps = Annotated[int, STEPS] | Annotated[float, FRACTION]
LateSteps = (
    Annotated[int, STEPS] | Annotated[float, replace(FRACTION, search={"log10": [0, 4], "of": USUAL_STEPS})]
)
"""Searched as DomainBed does for IRM and VREx: 1 to 10,000 steps of 5,000."""
Weight = Annotated[float, Range(0, search=log10(-1, 1))]
LargeWeight = Annotated[float, Range(0, search=log10(-1, 5))]
BatchNorm = Literal["pooled", "per-domain"]


class Schedule:
    """A weight that rises from ``before`` to ``weight``: after ``start`` steps, linearly over ``ramp`` steps.

    Whole numbers are steps; a float is a fraction of ``steps``, rounded down, so that a schedule fits a short
    training as well as a long one (of 5,000, for which published settings are made, where nobody says).
    ``before`` is never more than ``weight``, so that a weight of 0 is no penalty at all.

    >>> [Schedule(2.0, start=1, ramp=2)(step) for step in range(5)]
    [0.0, 0.0, 1.0, 2.0, 2.0]
    """

    def __init__(
        self, weight: float, start: float = 0, ramp: float = 0, before: float = 0.0, steps: int | None = None
    ) -> None:
        self.weight, self.before = weight, min(before, weight)
        self.start, self.ramp = in_steps(start, steps), in_steps(ramp, steps)

    def __call__(self, step: Step) -> float | Tensor:
        """The weight at this step; a tensor where ``step`` is one."""
        rise = (step - self.start) / self.ramp if self.ramp else step - self.start + 1
        share = rise.to(widest(rise.device)).clamp(0, 1) if isinstance(rise, Tensor) else min(max(rise, 0), 1)
        return self.before + (self.weight - self.before) * share

    def times(self, value: Tensor, step: Step) -> Tensor:
        """The weight at this step times a number, in its precision."""
        weight = self(step)
        return (weight.to(value.dtype) if isinstance(weight, Tensor) else weight) * value


def in_steps(count: float, steps: int | None) -> int:
    """Down, as DomainBed's ``int`` does; 0.29 of 100 steps, 28.999999999999996, is 29."""
    return math.floor(count * (steps or USUAL_STEPS) + 1e-9) if isinstance(count, float) else count


class Penalised(Algorithm):
    """Base class of algorithms that minimise the mean loss of the domains plus a weighted :meth:`penalty`.

    Args:
        weight: weight of the penalty.
        start: number of steps for which the weight is ``before``; a float is a fraction of the training.
        ramp: number of steps over which the weight then rises linearly, or a fraction of the training.
        batch_norm: BatchNorm statistics over all domains or per domain (see :mod:`shoal.penalties`).
        features: name of the layer that returns the features (default: the input of the last linear layer).
    """

    min_domains = 2
    before: ClassVar[float] = 0.0
    weight: Weight = 1.0
    start: Steps = 0
    ramp: Steps = 0
    batch_norm: BatchNorm = "pooled"

    def setup(self) -> None:
        self.per_domain = self.batch_norm == "per-domain"
        self.schedule = Schedule(self.weight, self.start, self.ramp, self.before, self.task.steps)

    @abstractmethod
    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        """The penalty, from the outputs or from the mean loss of each domain (S,)."""

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        losses = self.losses(out)
        penalty = self.penalty(out, losses)
        total = losses.mean() + self.schedule.times(penalty, step)
        return total, {"losses": losses.detach(), "penalty": penalty.detach()}
