"""SAND-mask: AND-mask with a smooth threshold that depends on the variance of the gradients."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from torch import nn

from shoal.algorithms.and_mask import ANDMask
from shoal.algorithms.base import Engine, Gradient, Log, Loss, Step
from shoal.data.batch import MetaBatch, Task
from shoal.gradients import sand_mask
from shoal.settings import Range, log10, uniform

Threshold = Annotated[float, Range(0, below=1, search=uniform(0, 1))]
Steepness = Annotated[float, Range(above=0, search=log10(-3, 5))]


class SANDMask(ANDMask):
    """Multiply the mean gradient by max(0, tanh(k/σ² (a − τ))).

    For each component, a is the absolute mean of the S signs, and σ² the variance of the S gradients. With τ
    = 1 the mask would be zero, since a is at most 1; the default is 0.5.

    Args:
        tau: threshold τ, below 1.
        k: steepness of the threshold.

    Reference: Shahtalebi et al., SAND-mask: An Enhanced Gradient Masking Strategy for the Discovery of
    Invariances in Domain Generalization, 2021.
    """

    reference = "Shahtalebi et al. 2021"

    def __init__(
        self, model: nn.Module, loss: Loss, task: Task, *, tau: Threshold = 0.5, k: Steepness = 10.0
    ) -> None:
        super().__init__(model, loss, task, tau=tau)
        self.k = k

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        return self.combined_gradient(batch, engine, partial(sand_mask, tau=self.tau, k=self.k))
