"""SAND-mask: AND-mask with a smooth threshold that depends on the variance of the gradients."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from shoal.algorithms.and_mask import ANDMask
from shoal.algorithms.base import Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch
from shoal.gradients import sand_mask
from shoal.settings import Range, log10, uniform


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
    tau: Annotated[float, Range(0, below=1, search=uniform(0, 1))] = 0.5
    k: Annotated[float, Range(above=0, search=log10(-3, 5))] = 10.0

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        return self.combined_gradient(batch, engine, partial(sand_mask, tau=self.tau, k=self.k))
