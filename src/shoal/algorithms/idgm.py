"""IDGM: inter-domain gradient matching, optimised directly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Engine, Log, Loss
from shoal.algorithms.penalty import PenaltyWeight
from shoal.data.batch import DomainBatch, Task
from shoal.gradients import Method, match


class IDGM(Algorithm):
    """Minimises the mean loss minus γ times the mean inner product of the domains' gradients.

        L = 1/S Σ_i L_i − γ/(S(S−1)) Σ_{i≠j} g_i·g_j

    Args:
        gamma: γ, the weight of the matching term.
        normalize: match cosines instead of inner products, as the paper does in its experiments. Either form
            has a trivial maximum: inner products grow with being wrong everywhere alike, cosines are 1 for a
            constant classifier.
        start, ramp: γ is 0 for ``start`` steps and then grows linearly for ``ramp`` steps.
        method: ``"exact"`` Hessian-vector products, or ``"finite-difference"`` for large models.
        softening: δ in ĝ = g/√(‖g‖² + δ²): bounds the normalised term's slope where gradients vanish.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    compares_domains = True
    capturable = True
    second_order = True
    repeats_passes = True
    search_space = {"gamma": {"default": 0.03, "log10": [-3, 0]}}  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        gamma: float = 0.03,
        normalize: bool = True,
        start: int = 0,
        ramp: int = 0,
        method: Method = "exact",
        softening: float = 0.0,
    ) -> None:
        super().__init__(model, loss, task)
        self.gamma = PenaltyWeight(gamma, start, ramp)
        self.matching = partial(match, normalize=normalize, method=method, softening=softening, model=model)

    def gradient(self, batches: Sequence[DomainBatch], engine: Engine) -> tuple[list[Tensor], Log]:
        found = self.matching([partial(self.domain_loss, b) for b in batches], engine.params)
        gamma = self.gamma.next()
        total = [m - gamma.to(m.dtype) * s for m, s in zip(found.mean, found.gip_gradient, strict=True)]
        return total, {"losses": found.losses, "gip": found.gip}
