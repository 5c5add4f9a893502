"""Agr-Sum: gradient surgery that keeps the components on whose sign all domains agree."""

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import agr_sum


class AgrSum(Surgery):
    """Average the gradients of the domains and drop the components whose signs differ between domains.

        g_k = mean_i g_ik   if sign(g_1k) = … = sign(g_Sk),   else 0

    It is AND-mask with τ = 1 without the division by the fraction of components that is kept.

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """

    reference = "Mansilla et al. 2021"

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return agr_sum(gradients)
