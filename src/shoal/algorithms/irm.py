"""IRM: one classifier that is optimal in every domain."""

from torch import Tensor

from shoal.algorithms.base import Outputs
from shoal.algorithms.penalty import LargeWeight, LateSteps, Penalised
from shoal.penalties import irm


class IRM(Penalised):
    """Add the squared gradient of each domain's loss with respect to a scale of the outputs (IRMv1).

    The penalty is :func:`shoal.penalties.irm`, estimated on two halves of the batch. It is also zero for
    outputs of zero: a large weight requires a ``start`` after the loss has decreased. Until ``start`` the
    weight is at most 1.

    Args:
        weight: weight λ of the penalty.
        start: number of steps before it; a float is a fraction of the training.

    Reference: Arjovsky et al., Invariant Risk Minimization, 2019.
    """

    family = "invariant predictor"
    reference = "Arjovsky et al. 2019"
    sample_weights = False
    before = 1.0
    weight: LargeWeight = 100.0
    start: LateSteps = 0.1

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return irm(out.logits, out.y, out.blocks, loss=self.loss)
