"""IRM: one classifier that is optimal in every domain."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss, Outputs
from shoal.algorithms.penalty import SHARE, STEPS, Penalised, Steps, plain_output
from shoal.data.batch import Task
from shoal.settings import Range, log10


class IRM(Penalised):
    """Adds the squared slope of each domain's loss along a common scale of the outputs (IRMv1).

        L = 1/S Σ_i L_i(f) + λ/S Σ_i (∂L_i(w·f)/∂w at w=1)²

    The square is estimated without bias as the product of the slopes on two halves of the batch, the even and
    the odd examples, so it may be negative. Outputs of zero have no slope either: a large weight needs a
    start that comes after the loss has fallen. Until ``start`` the weight is at most 1.

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
        weight: Annotated[float, Range(0, search=log10(-1, 5))] = 100.0,
        start: Annotated[int, STEPS] | Annotated[float, SHARE._replace(search=log10(-3.7, 0.3))] = 0.1,
        ramp: Steps = 0,
    ) -> None:
        super().__init__(model, loss, task, weight=weight, start=start, ramp=ramp)

    def penalty(self, outputs: Outputs, losses: Tensor) -> Tensor:
        return torch.stack([self._square(plain_output(v, self), v.y) for v in outputs]).mean()

    def _square(self, output: Tensor, y: Tensor) -> Tensor:
        if len(y) == 1:
            return self._slope(output, y).square()
        return self._slope(output[::2], y[::2]) * self._slope(output[1::2], y[1::2])

    def _slope(self, output: Tensor, y: Tensor) -> Tensor:
        scale = torch.ones((), dtype=output.dtype, device=output.device, requires_grad=True)
        (slope,) = torch.autograd.grad(self.loss(output * scale, y), scale, create_graph=True)
        return slope
