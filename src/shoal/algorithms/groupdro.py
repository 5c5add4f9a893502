"""GroupDRO: training with more weight on domains with a high loss."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Log, Loss, Outputs
from shoal.data.batch import Task, widest
from shoal.settings import Range, log10


class GroupDRO(Algorithm):
    """Minimises Σ_d q_d L_d, with q moving towards the domains of high loss: q_d ∝ exp(η Σ L_d) over visits.

    A domain's weight changes when it is visited. Where a step visits S of T domains, the sum over those is
    multiplied by T/S, so that on average it is the sum over all.

    Args:
        step_size: η; with 0 the weights stay equal.

    Reference: Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020.
    """

    family = "robust optimisation"
    reference = "Sagawa et al. 2020"
    compares_domains = True
    knows_domains = True
    capturable = True

    log_weights: Tensor

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        step_size: Annotated[float, Range(0, search=log10(-3, -1))] = 0.01,
    ) -> None:
        super().__init__(model, loss, task)
        self.step_size = step_size
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.register_buffer("log_weights", torch.zeros(task.domains, dtype=widest(device)))

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses, ids = self.losses(outputs), self.ids(outputs)
        with torch.no_grad():
            self.log_weights.index_add_(0, ids, self.step_size * losses.to(self.log_weights.dtype))
            self.log_weights -= self.log_weights.logsumexp(0)
            share = self.log_weights.exp()[ids].to(losses.dtype)
        total = (share * losses).sum() * (self.task.domains / len(outputs))
        return total, {"losses": losses.detach()}
