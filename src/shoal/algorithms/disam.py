"""DISAM: sharpness-aware minimization that perturbs weights less towards domains of low loss."""

from typing import Annotated

from torch import Tensor

from shoal.algorithms.base import Engine, Gradient, Log, Outputs, Step
from shoal.algorithms.sam import SAM
from shoal.data.batch import MetaBatch
from shoal.settings import Range, log10


class DISAM(SAM):
    """Use the gradient of the mean loss at θ + ρ v/‖v‖, where v also lowers the variance of domain losses.

        v = ∇( mean_i L_i − λ Var_i L_i ),   Var_i L_i = mean_i (L_i − mean_j L_j)²

    With λ = 0 it is SAM on a batch from every domain. The cost is twice that of ERM.

    Args:
        rho: radius ρ; with 0 it is ERM on the same batches.
        weight: weight λ of the variance of the losses in the perturbation.

    Reference: Zhang et al., Domain-Inspired Sharpness-Aware Minimization Under Domain Shifts, ICLR 2024.
    """

    reference = "Zhang et al. 2024"
    draw = "domains"
    min_domains = 2
    weight: Annotated[float, Range(0, search=log10(-2, 0))] = 0.1

    def perturbation_loss(self, out: Outputs) -> tuple[Tensor, Log]:
        losses = self.losses(out)
        value = losses.mean() - self.weight * losses.var(correction=0)
        return value, {"losses": losses.detach()}

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        direction, log = engine.gradient(batch, self.perturbation_loss)
        with self.perturbed(engine, direction):
            return engine.mean_gradient(batch)[0], log
