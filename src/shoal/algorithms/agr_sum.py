"""Agr-Sum: gradient surgery that keeps the components on whose sign all domains agree."""

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import agr_sum


class AgrSum(Surgery):
    """Average the gradients of the domains and drop the components whose signs differ between domains.

    It is :func:`shoal.gradients.agr_sum`: AND-mask with τ = 1, without its division by the fraction kept.

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """

    reference = "Mansilla et al. 2021"

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return agr_sum(gradients)
