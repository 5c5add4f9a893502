"""SAND-mask: AND-mask with a smooth threshold that depends on the variance of the gradients."""

from typing import Annotated

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import sand_mask
from shoal.settings import Range, log10, uniform


class SANDMask(Surgery):
    """Multiply the mean gradient by max(0, tanh(k/σ² (a − τ))).

    For each component, a is the absolute mean of the S signs, and σ² the variance of the S gradients:
    :func:`shoal.gradients.sand_mask`. With τ = 1 the mask would be zero, since a is at most 1.

    Args:
        tau: threshold τ, below 1.
        k: steepness of the threshold.

    Reference: Shahtalebi et al., SAND-mask: An Enhanced Gradient Masking Strategy for the Discovery of
    Invariances in Domain Generalization, 2021.
    """

    reference = "Shahtalebi et al. 2021"
    tau: Annotated[float, Range(0, below=1, search=uniform(0, 1))] = 0.5
    k: Annotated[float, Range(above=0, search=log10(-3, 5))] = 10.0

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return sand_mask(gradients, self.tau, self.k)
