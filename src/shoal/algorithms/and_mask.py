"""AND-mask: only parameters on whose direction the domains agree move."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from torch import nn

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Loss
from shoal.data.batch import Task
from shoal.gradients import and_mask
from shoal.settings import Range, uniform


class ANDMask(Algorithm):
    """The mean gradient, set to zero where the domains' gradients disagree in sign.

    A component stays where the mean of its S signs is at least τ in size: with τ = 1 all must agree, with
    τ = 0 everything stays. What is left of a tensor is divided by the share that is left, so that a sparse
    gradient is not a short one.

    Args:
        tau: τ.

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """

    family = "gradient surgery"
    reference = "Parascandolo et al. 2021"
    passes = "apart"
    compares_domains = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1.0))] = 1.0,
    ) -> None:
        super().__init__(model, loss, task)
        self.tau = tau

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return self.combined_gradient(batches, engine, partial(and_mask, tau=self.tau))
