"""AND-mask: updates only of parameters whose gradients have the same sign in all domains."""

from typing import Annotated

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import and_mask
from shoal.settings import Range, uniform


class ANDMask(Surgery):
    """Average the gradients of the domains and set components to zero where they disagree in sign.

    A component is kept where the absolute mean of its S signs is at least τ: with τ = 1 all must agree, with
    τ = 0 everything is kept. Each tensor is then divided by the fraction of its components that is kept.

    Args:
        tau: threshold τ.

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """

    reference = "Parascandolo et al. 2021"
    tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1.0))] = 1.0

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return and_mask(gradients, self.tau)
