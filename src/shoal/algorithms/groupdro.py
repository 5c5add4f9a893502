"""GroupDRO: training with more weight on domains with a high loss."""

from typing import Annotated

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Log, Outputs, Step
from shoal.algorithms.penalty import BatchNorm
from shoal.penalties import Blocks, GroupWeights, group_dro
from shoal.settings import Range, log10
from shoal.tensors import widest


class GroupDRO(Algorithm):
    """Minimise Σ_d q_d L_d, with more weight on domains with a high loss: q_d ∝ exp(η Σ L_d) over steps.

    See :func:`shoal.penalties.group_dro`.

    Args:
        step_size: step size η; with 0 the weights remain equal.
        batch_norm: BatchNorm statistics over all domains or per domain (see :mod:`shoal.penalties`).

    Reference: Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020.
    """

    family = "robust optimisation"
    reference = "Sagawa et al. 2020"
    min_domains = 2
    step_size: Annotated[float, Range(0, search=log10(-3, -1))] = 0.01
    batch_norm: BatchNorm = "pooled"

    def setup(self) -> None:
        self.per_domain = self.batch_norm == "per-domain"
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.weights = GroupWeights(self.task.domains, self.step_size, dtype=widest(device))

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        losses = self.losses(out)
        total = group_dro(losses, Blocks([1] * len(losses), out.batch.ids), self.weights)
        return total, {"losses": losses.detach()}
