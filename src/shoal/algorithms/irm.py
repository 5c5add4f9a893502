"""IRM: one classifier that is optimal in every domain."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.algorithms.base import Loss, Outputs
from shoal.algorithms.penalty import LargeWeight, LateSteps, Penalised
from shoal.data.batch import Task
from shoal.penalties import irm


class IRM(Penalised):
    """Add the squared gradient of each domain's loss with respect to a scale of the outputs (IRMv1).

        L = 1/S Σ_i L_i(f) + λ/S Σ_i (∂L_i(w·f)/∂w at w=1)²

    The square is estimated without bias as the product of the gradients on two halves of the batch, the even
    and the odd examples, so it may be negative: :func:`shoal.penalties.irm`. The penalty is
    also zero for outputs of zero: a large weight requires a ``start`` after the loss has decreased. Until
    ``start`` the weight is at most 1.

    Args:
        weight: weight λ of the penalty.
        start: number of steps before it; a float is a fraction of the training.
        **others: other hyperparameters of a penalty, such as ``batch_norm``.

    Reference: Arjovsky et al., Invariant Risk Minimization, 2019.
    """

    family = "invariant predictor"
    reference = "Arjovsky et al. 2019"
    sample_weights = False
    before = 1.0

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: LargeWeight = 100.0,
        start: LateSteps = 0.1,
        **others: Any,
    ) -> None:
        super().__init__(model, loss, task, weight=weight, start=start, **others)

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return irm(out.logits, out.y, out.blocks, loss=self.loss)
