"""SAM: sharpness-aware minimization, a low loss in a neighbourhood of the weights."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Log, Loss
from shoal.data.batch import Task, pool
from shoal.gradients import inner_product, moved
from shoal.replay import leaves_no_trace, random_state
from shoal.settings import Range, log10


class SAM(Algorithm):
    """Use the gradient of the mean loss at θ + ρ g/‖g‖, in the direction of steepest ascent from θ.

    Batches are those of ERM. The cost is twice that of ERM.

    Args:
        rho: radius ρ; with 0 it is ERM.

    Reference: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.
    """

    family = "flat minima"
    reference = "Foret et al. 2021"
    draw = "pooled"
    additive = True
    capturable = True
    repeats_passes = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        rho: Annotated[float, Range(0, search=log10(-2, 0))] = 0.05,
    ) -> None:
        super().__init__(model, loss, task)
        self.rho = rho

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        _, there, log = self.here_and_there(batches, engine)
        return there, log

    def here_and_there(
        self, batches: Batches, engine: Engine, descent: float = 0.0
    ) -> tuple[list[Tensor], list[Tensor], Log]:
        """The gradient g at θ and that at θ + (ρ/‖g‖ − ``descent``) g, with the same dropout masks."""
        whole = [pool(batches)]
        before = random_state(self.model)
        g, log = engine.gradients(self, whole)
        length = inner_product(g, g).sqrt()
        by = torch.where(length == 0, 0.0, self.rho / torch.where(length == 0, 1.0, length)) - descent
        with moved(engine.params, g, by), leaves_no_trace(self.model, since=before):
            there, _ = engine.gradients(self, whole)
        return g, there, log
