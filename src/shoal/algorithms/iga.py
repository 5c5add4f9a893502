"""IGA: gradients that vary little between domains."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from torch import nn

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Loss
from shoal.algorithms.penalty import PenaltyWeight, Steps
from shoal.data.batch import Task
from shoal.gradients import Method, match
from shoal.settings import Range, log10


class IGA(Algorithm):
    """Minimise the mean loss plus λ times the trace of the covariance of the gradients of the domains.

        L = 1/S Σ_i L_i + λ/S Σ_i ‖g_i − ḡ‖²

    While IDGM rewards gradients with the same direction, this penalizes every difference, also in norm.

    Args:
        weight: weight λ.
        start: number of steps for which λ is 0.
        ramp: number of steps over which λ then rises linearly.
        method: ``"exact"`` Hessian-vector products, or ``"finite-difference"`` for large models.

    Reference: Koyama and Yamaguchi, When is invariance useful in an out-of-distribution generalization
    problem?, 2020.
    """

    family = "gradient matching"
    reference = "Koyama & Yamaguchi 2020"
    passes = "apart"
    compares_domains = True
    capturable = True
    second_order = True
    by_engine = False

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: Annotated[float, Range(0, search=log10(1, 5))] = 1000.0,
        start: Steps = 0,
        ramp: Steps = 0,
        method: Method = "exact",
    ) -> None:
        super().__init__(model, loss, task)
        self.repeats_passes = method == "finite-difference"  # type: ignore[misc]
        self.weight = PenaltyWeight(weight, start, ramp, steps=task.steps)
        self.matching = partial(match, measure="variance", method=method, model=model)

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        average = engine.average if engine.processes > 1 else None
        found = self.matching(self.parts(batches, engine), engine.params, average=average)
        total = found.gradient(self.weight.next())
        return total, {"losses": found.losses, "penalty": found.value}
