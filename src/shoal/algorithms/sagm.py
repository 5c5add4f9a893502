"""SAGM: a low loss at a point and all around it, with gradients that agree."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from shoal.algorithms.base import Batches, Engine, Gradients, Loss
from shoal.algorithms.sam import SAM
from shoal.data.batch import Task
from shoal.settings import Range, choice


class SAGM(SAM):
    """Minimises L(θ) + L_p(θ − α∇L(θ)), where L_p(θ) = L(θ + ρ ∇L/‖∇L‖) is SAM's loss.

    To first order the second term is L_p − α ∇L_p·∇L, so that the gradients of both losses become alike. With
    g = ∇L(θ) as a constant, the step is along

        1/2 (g + ∇L(θ + (ρ/‖g‖ − α) g))

    The paper adds the two gradients; its program averages them, as here, so that a learning rate means what
    it means for ERM. Batches are ERM's. Twice ERM's cost.

    Args:
        rho: ρ.
        alpha: α; with 0 the two losses are minimised and nothing is matched. With ``rho=0`` too it is ERM.

    Reference: Wang et al., Sharpness-Aware Gradient Matching for Domain Generalization, CVPR 2023.
    """

    reference = "Wang et al. 2023"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        rho: Annotated[float, Range(0, search=choice(0.01, 0.02, 0.05, 0.1))] = 0.05,
        alpha: Annotated[float, Range(0, search=choice(0.0005, 0.001))] = 0.001,
    ) -> None:
        super().__init__(model, loss, task, rho=rho)
        self.alpha = alpha

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        here, there, log = self.here_and_there(batches, engine, self.alpha)
        return [(a + b) / 2 for a, b in zip(here, there, strict=True)], log
