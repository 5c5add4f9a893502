"""SAGM: sharpness-aware minimization with matching of the gradients of both losses."""

from typing import Annotated

from shoal.algorithms.base import Engine, Gradient, Log, Step
from shoal.algorithms.sam import SAM
from shoal.data.batch import MetaBatch
from shoal.settings import Range, choice


class SAGM(SAM):
    """Minimise L(θ) + L_p(θ − α∇L(θ)), where L_p(θ) = L(θ + ρ ∇L/‖∇L‖) is the loss of SAM.

    To first order the second term is L_p − α ∇L_p·∇L, so that the gradients of both losses are aligned. With
    g = ∇L(θ) as a constant, the step is along

        1/2 (g + ∇L(θ + (ρ/‖g‖ − α) g))

    The paper adds the two gradients; its code averages them, as here, so that learning rates are comparable
    to those of ERM. Batches are those of ERM. The cost is twice that of ERM.

    Args:
        rho: radius ρ.
        alpha: α; with 0 nothing is matched, and with ``rho=0`` as well it is ERM.

    Reference: Wang et al., Sharpness-Aware Gradient Matching for Domain Generalization, CVPR 2023.
    """

    reference = "Wang et al. 2023"
    rho: Annotated[float, Range(0, search=choice(0.01, 0.02, 0.05, 0.1))] = 0.05
    alpha: Annotated[float, Range(0, search=choice(0.0005, 0.001))] = 0.001

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        g, log = engine.mean_gradient(batch.merged())
        with self.perturbed(engine, g, self.alpha):
            perturbed, _ = engine.mean_gradient(batch.merged())
        return [(a + b) / 2 for a, b in zip(g, perturbed, strict=True)], log
