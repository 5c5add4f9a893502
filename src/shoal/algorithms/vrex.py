"""VREx: training with a penalty on differences of the loss between domains."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.algorithms.base import Loss, Outputs
from shoal.algorithms.penalty import LargeWeight, LateSteps, Penalised
from shoal.data.batch import Task
from shoal.penalties import Blocks, vrex


class VREx(Penalised):
    """Add the variance of the losses of the domains; until ``start`` its weight is at most 1.

        L = mean_i L_i + λ Var_i L_i

    Args:
        weight: weight λ of the penalty.
        start: number of steps before it; a float is a fraction of the training.
        **others: other hyperparameters of a penalty, such as ``batch_norm``.

    Reference: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021.
    """

    family = "risk extrapolation"
    reference = "Krueger et al. 2021"
    before = 1.0

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: LargeWeight = 10.0,
        start: LateSteps = 0.1,
        **others: Any,
    ) -> None:
        super().__init__(model, loss, task, weight=weight, start=start, **others)

    def penalty(self, out: Outputs, losses: Tensor) -> Tensor:
        return vrex(losses, Blocks([1] * len(losses)))
