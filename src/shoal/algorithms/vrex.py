"""VREx: training with a penalty on differences of the loss between domains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.algorithms.base import Loss, View
from shoal.algorithms.penalty import Penalised
from shoal.data.batch import Task


class VREx(Penalised):
    """Adds the variance of the domains' losses. Until ``start`` its weight is at most 1.

        L = mean_i L_i + λ Var_i L_i

    Reference: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021.
    """

    family = "risk extrapolation"
    reference = "Krueger et al. 2021"
    before = 1.0
    search_space = {  # noqa: RUF012
        "weight": {"default": 10.0, "log10": [-1, 5]},
        "start": {"default": 0.1, "log10": [-3.7, 0.3]},
    }

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: float = 10.0,
        start: float = 0.1,
        ramp: float = 0,
    ) -> None:
        super().__init__(model, loss, task, weight=weight, start=start, ramp=ramp)

    def penalty(self, views: Sequence[View], losses: Tensor) -> Tensor:
        return losses.var(correction=0)
