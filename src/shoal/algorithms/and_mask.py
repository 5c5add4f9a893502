"""AND-mask: updates only of parameters whose gradients have the same sign in all domains."""

from typing import Annotated

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import and_mask
from shoal.settings import Range, uniform


class ANDMask(Surgery):
    """Average the gradients of the domains and set components to zero where they disagree in sign.

    See :func:`shoal.gradients.and_mask`.

    Args:
        tau: threshold τ of the agreement: with 1 all signs must agree, with 0 everything is kept.

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """

    reference = "Parascandolo et al. 2021"
    tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1.0))] = 1.0

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return and_mask(gradients, self.tau)
