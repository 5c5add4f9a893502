"""PCGrad: removal of conflicting components from the gradients of the domains."""

from shoal.algorithms.base import Gradient, Surgery
from shoal.gradients import pcgrad


class PCGrad(Surgery):
    """Average the gradients of the domains after projecting each to be orthogonal to those it conflicts with.

    See :func:`shoal.gradients.pcgrad`; the order is random because the batches are in random order.

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020 (which takes the sum).
    """

    reference = "Yu et al. 2020"

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return pcgrad(gradients)
