"""VREx: training with a penalty on differences of the loss between domains."""

from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import LargeWeight, LateSteps, Penalised
from shoal.penalties import Blocks, vrex


class VREx(Penalised):
    """Add the variance of the losses of the domains; until ``start`` its weight is at most 1.

    Args:
        weight: weight λ of the penalty.
        start: number of steps before it; a float is a fraction of the training.

    Reference: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021.
    """

    family = "risk extrapolation"
    reference = "Krueger et al. 2021"
    before = 1.0
    weight: LargeWeight = 10.0
    start: LateSteps = 0.1

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return vrex(losses, Blocks([1] * len(losses)))
